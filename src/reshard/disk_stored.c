/* Tensors of the source: what the files of its ranks have, compared with the spec. */
#include "reshard/disk_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

tb__shape_text tb__disk_shape_text(const tb_shape *shape) {
    tb__shape_text out = {""};
    size_t at = 0;
    for (int d = 0; d < shape->ndim; d++)
        at += (size_t)snprintf(out.text + at, sizeof out.text - at, d ? ",%" PRId64 : "%" PRId64, shape->dim[d]);
    if (shape->ndim == 0)
        snprintf(out.text, sizeof out.text, "a scalar");
    return out;
}

bool tb__disk_same_shape(const tb_shape *a, const tb_shape *b) {
    return a->ndim == b->ndim && (a->ndim == 0 || !memcmp(a->dim, b->dim, (size_t)a->ndim * sizeof *a->dim));
}

static bool is_empty(const tb_shape *shape) {
    for (int d = 0; d < shape->ndim; d++) {
        if (shape->dim[d] == 0)
            return true;
    }
    return false;
}

static tb_status fail_missing(const tb__disk_source *source, int32_t rank, const char *name) {
    tb__set_detail("tensor '%.100s' is not in it, but the spec has it on rank %" PRId32, name, rank);
    return source->file ? tb__file_fail_within(TB_INVALID, source->file->path) : TB_INVALID;
}

/* Whether any placement cuts this dimension by lists, from which its length can't be told. */
static tb_status check_deducible(const tb__disk_stored *t) {
    for (int m = 0; m < t->layout->ndim; m++) {
        if (t->layout->place[m].kind == TB_EXPLICIT)
            return tb__fail(TB_INVALID, "a source that is Explicit needs 'shape' in the spec");
    }
    return TB_OK;
}

/* Whether mesh index `index` stands at 0 in every mesh dim that does not cut tensor dim `d`. */
static bool is_on_axis(const tb_layout *layout, int32_t index, int ndim, int d) {
    int64_t rest = index;
    for (int m = layout->ndim - 1; m >= 0; m--) {
        const tb_placement *place = &layout->place[m];
        int dim = place->dim < 0 ? place->dim + ndim : place->dim;
        bool cuts = tb__placement_shards(place) && dim == d;
        if (!cuts && rest % layout->shape[m] != 0)
            return false;
        rest /= layout->shape[m];
    }
    return true;
}

/* Every placement but Explicit deals the indices of a dimension out, each once: the parts' lengths add up. */
static tb_status deduce_shape(const tb__disk *disk, tb__disk_stored *t) {
    tb_shape shape = {0};
    for (int32_t i = 0; i < tb_layout_nranks(t->layout); i++) {
        int32_t rank = tb_layout_rank_at(t->layout, i);
        tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
        if (!source.tensor)
            return fail_missing(&source, rank, t->name);
        const tb_shape local = tb__disk_quant_part(&t->quant, &source.tensor->shape);
        if (i == 0)
            shape.ndim = local.ndim;
        if (local.ndim != shape.ndim)
            return tb__file_fail(TB_INVALID, source.file->path, "tensor '%.100s' has %d dims, but %d on rank %" PRId32,
                                 t->name, local.ndim, shape.ndim, tb_layout_rank_at(t->layout, 0));
        for (int d = 0; d < shape.ndim; d++) {
            if (!is_on_axis(t->layout, i, shape.ndim, d))
                continue;
            if (local.dim[d] > (INT64_C(1) << 62) - shape.dim[d])
                return tb__fail(TB_TOO_BIG, "tensor '%.100s' has more than 2^62 bytes", t->name);
            shape.dim[d] += local.dim[d];
        }
    }
    t->shape = shape;
    return TB_OK;
}

/* Whether ranks hold the same, unless the spec forgot that they hold shards. */
static bool has_replicas(const tb_layout *layout) {
    for (int m = 0; m < layout->ndim; m++) {
        if (layout->place[m].kind == TB_REPLICATE && layout->shape[m] > 1)
            return true;
    }
    return false;
}

/* Data as the layout and the spec have it. */
static tb_status check_data(const tb__disk_stored *t, int32_t rank, const tb__disk_source *source,
                            const tb__safetensor *wanted, bool is_said) {
    const tb__safetensor *found = source->tensor;
    const char *format = tb__quant_name(t->quant.format.kind);
    bool has_dtype = wanted->dtype == TB_DTYPE_NONE || found->dtype == wanted->dtype;
    if (!tb__disk_same_shape(&wanted->shape, &found->shape)) {
        bool may_be_shards = has_dtype && has_replicas(t->layout);
        return tb__file_fail(TB_INVALID, source->file->path,
                             "tensor '%.100s' is %s, but its layout gives rank %" PRId32 " %s of %s%s%s%s", t->name,
                             tb__disk_shape_text(&found->shape).text, rank, tb__disk_shape_text(&wanted->shape).text,
                             tb__disk_shape_text(&t->shape).text, format ? " as " : "", format ? format : "",
                             may_be_shards ? "; the spec has it replicated, do the ranks hold shards of it?" : "");
    }
    if (has_dtype)
        return TB_OK;
    if (format)
        tb__set_detail("tensor '%.100s' is %s, but the data of %s is %s", t->name, tb__safetensor_dtype_name(found),
                       format, tb_dtype_name(wanted->dtype));
    else
        tb__set_detail("tensor '%.100s' is %s, but %s %s", t->name, tb__safetensor_dtype_name(found),
                       is_said ? "the spec says" : "another rank has it as", tb_dtype_name(wanted->dtype));
    return tb__file_fail_within(TB_INVALID, source->file->path);
}

/* A tensor of scales; that of the whole may be a scalar or have one element. */
static tb_status check_scales(tb__disk *disk, const tb__disk_stored *t, int32_t rank, const tb__safetensor *wanted) {
    tb__disk_source source = tb__disk_input_find(disk->input, rank, wanted->name);
    const char *format = tb__quant_name(t->quant.format.kind);
    if (!source.tensor)
        return tb__file_fail(TB_INVALID, source.file->path,
                             "tensor '%.100s' is not in it, but '%.100s' is %s and needs its scales", wanted->name,
                             t->name, format);
    const tb_shape *found = &source.tensor->shape, one = {1, {1}};
    bool is_shaped =
        tb__disk_same_shape(found, &wanted->shape) || (wanted->shape.ndim == 0 && tb__disk_same_shape(found, &one));
    if (!is_shaped || source.tensor->dtype != wanted->dtype)
        return tb__file_fail(TB_INVALID, source.file->path,
                             "tensor '%.100s' is %s of %s, but %s has %s of %s for '%.100s'", wanted->name,
                             tb__disk_shape_text(found).text, tb__safetensor_dtype_name(source.tensor), format,
                             tb__disk_shape_text(&wanted->shape).text, tb_dtype_name(wanted->dtype), t->name);
    disk->src_nbytes += source.tensor->nbytes;
    return TB_OK;
}

static tb_status check_source(tb__disk *disk, tb__disk_stored *t, int32_t rank, tb_dtype said) {
    tb_local local;
    tb__safetensor wanted[TB__DISK_SLOTS];
    tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
    tb_status status = tb_layout_local(t->layout, &t->shape, rank, &local);
    if (status == TB_OK) {
        tb_dtype dtype = said != TB_DTYPE_NONE ? said : t->dtype;
        status = tb__disk_quant_tensors(&t->quant, t->name, dtype, &local.shape, wanted);
        tb_local_fini(&local);
    }
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s': src", t->name);
    if (!source.tensor)
        return is_empty(&wanted[TB__DISK_DATA].shape) ? TB_OK : fail_missing(&source, rank, t->name);
    TB_TRY(check_data(t, rank, &source, &wanted[TB__DISK_DATA], said != TB_DTYPE_NONE));
    for (int i = TB__DISK_SCALES; i < TB__DISK_SLOTS; i++) {
        if (wanted[i].name)
            TB_TRY(check_scales(disk, t, rank, &wanted[i]));
    }
    t->dtype = t->quant.format.kind ? said : source.tensor->dtype;
    disk->src_nbytes += source.tensor->nbytes; /* of files that exist: far from 2^63 */
    return TB_OK;
}

static tb_status check_unknown_ranks(const tb__disk *disk, const tb__disk_stored *t, const char *name) {
    const char *stranger = name ? tb__disk_input_stranger(disk->input, t->layout, name) : NULL;
    if (!stranger)
        return TB_OK;
    return tb__file_fail(TB_INVALID, stranger,
                         "tensor '%.100s' is in it, but the rank is not in the tensor's source mesh", name);
}

/* Whether any rank has it in a dtype that is not known: which one. */
static const tb__safetensor *find_unknown(const tb__disk *disk, const tb__disk_stored *t) {
    for (int32_t i = 0; i < tb_layout_nranks(t->layout); i++) {
        tb__disk_source source = tb__disk_input_find(disk->input, tb_layout_rank_at(t->layout, i), t->name);
        if (source.tensor && source.tensor->unknown_dtype)
            return source.tensor;
    }
    return NULL;
}

static tb_status check_whole(const tb__safetensor *unknown, const tb_layout *layout, const char *side) {
    for (int m = 0; m < layout->ndim; m++) {
        tb_placement_kind kind = layout->place[m].kind;
        if (kind != TB_REPLICATE && (kind != TB_SHARD || layout->shape[m] > 1))
            return tb__fail(TB_INVALID,
                            "tensor '%.100s' is %s, a dtype that tensorbus does not know: it can be copied whole, but "
                            "mesh dim %d of '%s' does not replicate it",
                            unknown->name, unknown->unknown_dtype, m, side);
    }
    return TB_OK;
}

/* What is of an unknown dtype is bytes, which every rank has whole. There are as many dims as the spec knows of, so
 * that a placement over one rank may name any of them. */
static tb_status take_unknown(tb__disk *disk, tb__disk_stored *t, const tb__spec_rule *rule) {
    const tb__safetensor *unknown = t->unknown;
    if (rule->dst_dtype != TB_DTYPE_NONE || rule->dst_quant.kind)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s' is %s, a dtype that tensorbus does not know: it can't be cast to %s", t->name,
                        unknown->unknown_dtype,
                        rule->dst_quant.kind ? tb__quant_name(rule->dst_quant.kind) : tb_dtype_name(rule->dst_dtype));
    TB_TRY(check_whole(unknown, t->layout, "src"));
    TB_TRY(check_whole(unknown, rule->dst, "dst"));
    if (rule->src_form.view || rule->dst_form.view)
        return tb__fail(TB_INVALID, "tensor '%.100s' is %s, a dtype that tensorbus does not know: it can't have a view",
                        t->name, unknown->unknown_dtype);
    if (rule->has_shape && !tb__disk_same_shape(&rule->shape, &unknown->shape))
        return tb__fail(TB_INVALID, "tensor '%.100s' is %s, but the spec says %s", t->name,
                        tb__disk_shape_text(&unknown->shape).text, tb__disk_shape_text(&rule->shape).text);
    for (int32_t i = 0; i < tb_layout_nranks(t->layout); i++) {
        int32_t rank = tb_layout_rank_at(t->layout, i);
        tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
        if (!source.tensor)
            return fail_missing(&source, rank, t->name);
        const char *name = tb__safetensor_dtype_name(source.tensor);
        if (strcmp(name, unknown->unknown_dtype) != 0 || source.tensor->nbytes != unknown->nbytes ||
            !tb__disk_same_shape(&source.tensor->shape, &unknown->shape))
            return tb__file_fail(TB_INVALID, source.file->path,
                                 "tensor '%.100s' is %s of %s, but another rank has it as %s of %s", t->name,
                                 tb__disk_shape_text(&source.tensor->shape).text, name,
                                 tb__disk_shape_text(&unknown->shape).text, unknown->unknown_dtype);
        disk->src_nbytes += source.tensor->nbytes;
    }
    t->dtype = TB_U8;
    t->shape.ndim = unknown->shape.ndim > 0 ? unknown->shape.ndim : 1;
    for (int d = 0; d < t->shape.ndim; d++)
        t->shape.dim[d] = d == t->shape.ndim - 1 ? unknown->nbytes : 1;
    return TB_OK;
}

static tb_status find_sources(tb__disk *disk, tb__disk_stored *t, const tb__spec_rule *rule) {
    if (rule->src_quant.kind)
        TB_TRY(tb__disk_quant_init(&t->quant, &rule->src_quant, t->name, &disk->arena));
    TB_TRY(check_unknown_ranks(disk, t, t->name));
    TB_TRY(check_unknown_ranks(disk, t, t->quant.scales_name));
    TB_TRY(check_unknown_ranks(disk, t, t->quant.scale_name));
    t->unknown =
        rule->src_dtype == TB_DTYPE_NONE ? find_unknown(disk, t) : NULL; /* else check_data says what is wrong */
    if (t->unknown)
        return take_unknown(disk, t, rule);
    if (rule->has_shape)
        t->shape = rule->shape;
    else
        TB_TRY(deduce_shape(disk, t));
    if (rule->src_quant.kind) {
        if (tb__disk_quant_check(&rule->src_quant, &t->shape, rule->src_dtype) != TB_OK)
            return tb__fail_within(TB_INVALID, "tensor '%.100s': src", t->name);
    }
    for (int32_t i = 0; i < tb_layout_nranks(t->layout); i++)
        TB_TRY(check_source(disk, t, tb_layout_rank_at(t->layout, i), rule->src_dtype));
    return TB_OK;
}

static tb_status check_sides(const tb__disk *disk, const tb__disk_stored *t, const tb__spec_rule *rule) {
    if (tb__disk_input_model(disk->input) && tb_layout_nranks(t->layout) != 1)
        return tb__fail(TB_INVALID, "its source mesh has %" PRId32 " ranks, but the source is a model, which is one",
                        tb_layout_nranks(t->layout));
    return rule->has_shape ? TB_OK : check_deducible(t);
}

static tb_status fill_stored(tb__disk *disk, tb__disk_stored *t, const tb__spec_rule *rule) {
    TB_TRY(check_sides(disk, t, rule));
    TB_TRY(find_sources(disk, t, rule));
    if (t->dtype == TB_DTYPE_NONE) /* all parts are empty, and no file has one */
        t->dtype = rule->src_dtype != TB_DTYPE_NONE ? rule->src_dtype : TB_F32;
    TB_TRY(tb__disk_grid(disk, t->layout, &t->shape, TB__SOURCE, &t->grid));
    tb__disk_count_replicas(disk->input, t);
    disk->nreplicated += t->replica_nbytes > 0;
    disk->replica_nbytes += t->replica_nbytes;
    return TB_OK;
}

tb_status tb__disk_find_stored(tb__disk *disk, const char *name, const tb__spec_rule *rule, tb__disk_stored **out) {
    tb_layout *layout;
    tb__disk_stored *t = tb__arena_alloc(&disk->arena, 1, sizeof *t);
    if (!t)
        return TB_NO_MEMORY;
    TB_TRY(tb__spec_layout(&disk->spec->src_mesh, &rule->src_form, rule->src, name, &layout));
    *t = (tb__disk_stored){.name = name, .layout = layout};
    tb_status status = fill_stored(disk, t, rule);
    if (status == TB_OK)
        t->layout = t->grid->layout; /* which the disk keeps */
    tb_layout_destroy(layout);
    *out = t;
    return status;
}
