/* Plans a resharding on disk: compares the spec with the source's files, tensor by tensor. */
#include "reshard/disk.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/text.h"
#include "ir/ir.h"
#include "layout/layout.h"
#include "reshard/disk_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The ranks of one side in all rules, ascending; to be freed by the caller. */
static tb_status list_ranks(const tb__spec *spec, bool is_target, int32_t **out, size_t *count) {
    TB_VEC(int32_t) all = {0};
    const tb_layout *last = NULL;
    for (size_t i = 0; i < spec->ntensors + spec->nrules; i++) {
        const tb__spec_rule *rule = i < spec->ntensors ? &spec->tensors[i] : &spec->rules[i - spec->ntensors];
        const tb_layout *layout = is_target ? rule->dst : rule->src;
        bool is_same = last && layout && tb_layout_nranks(last) == tb_layout_nranks(layout) && !last->ranks &&
                       !layout->ranks && last->first == layout->first;
        if (!layout || is_same)
            continue;
        last = layout;
        for (int32_t k = 0; k < tb_layout_nranks(layout); k++) {
            if (!tb__vec_push(&all, tb_layout_rank_at(layout, k))) {
                free(all.item);
                return TB_NO_MEMORY;
            }
        }
    }
    *out = all.item;
    *count = tb__vec_sort_unique(&all, tb__compare_int32);
    return TB_OK;
}

typedef struct shape_text {
    char text[TB_MAX_DIMS * 21 + 8];
} shape_text;

static shape_text text_of(const tb_shape *shape) {
    shape_text out = {""};
    size_t at = 0;
    for (int d = 0; d < shape->ndim; d++)
        at += (size_t)snprintf(out.text + at, sizeof out.text - at, d ? ",%" PRId64 : "%" PRId64, shape->dim[d]);
    if (shape->ndim == 0)
        snprintf(out.text, sizeof out.text, "a scalar");
    return out;
}

static bool same_shape(const tb_shape *a, const tb_shape *b) {
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
static tb_status check_deducible(const tb__disk_tensor *t) {
    for (int m = 0; m < t->src->ndim; m++) {
        if (t->src->place[m].kind == TB_EXPLICIT)
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
static tb_status deduce_shape(const tb__disk *disk, tb__disk_tensor *t) {
    tb_shape shape = {0};
    for (int32_t i = 0; i < tb_layout_nranks(t->src); i++) {
        int32_t rank = tb_layout_rank_at(t->src, i);
        tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
        if (!source.tensor)
            return fail_missing(&source, rank, t->name);
        const tb_shape local = tb__disk_quant_part(&t->src_quant, &source.tensor->shape);
        if (i == 0)
            shape.ndim = local.ndim;
        if (local.ndim != shape.ndim)
            return tb__file_fail(TB_INVALID, source.file->path, "tensor '%.100s' has %d dims, but %d on rank %" PRId32,
                                 t->name, local.ndim, shape.ndim, tb_layout_rank_at(t->src, 0));
        for (int d = 0; d < shape.ndim; d++) {
            if (!is_on_axis(t->src, i, shape.ndim, d))
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
static tb_status check_data(const tb__disk_tensor *t, int32_t rank, const tb__disk_source *source,
                            const tb__safetensor *wanted, bool is_said) {
    const tb__safetensor *found = source->tensor;
    const char *format = tb__quant_name(t->src_quant.format.kind);
    bool has_dtype = wanted->dtype == TB_DTYPE_NONE || found->dtype == wanted->dtype;
    if (!same_shape(&wanted->shape, &found->shape)) {
        bool may_be_shards = has_dtype && has_replicas(t->src);
        return tb__file_fail(TB_INVALID, source->file->path,
                             "tensor '%.100s' is %s, but its layout gives rank %" PRId32 " %s of %s%s%s%s", t->name,
                             text_of(&found->shape).text, rank, text_of(&wanted->shape).text, text_of(&t->shape).text,
                             format ? " as " : "", format ? format : "",
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
static tb_status check_scales(tb__disk *disk, const tb__disk_tensor *t, int32_t rank, const tb__safetensor *wanted) {
    tb__disk_source source = tb__disk_input_find(disk->input, rank, wanted->name);
    const char *format = tb__quant_name(t->src_quant.format.kind);
    if (!source.tensor)
        return tb__file_fail(TB_INVALID, source.file->path,
                             "tensor '%.100s' is not in it, but '%.100s' is %s and needs its scales", wanted->name,
                             t->name, format);
    const tb_shape *found = &source.tensor->shape, one = {1, {1}};
    bool is_shaped = same_shape(found, &wanted->shape) || (wanted->shape.ndim == 0 && same_shape(found, &one));
    if (!is_shaped || source.tensor->dtype != wanted->dtype)
        return tb__file_fail(TB_INVALID, source.file->path,
                             "tensor '%.100s' is %s of %s, but %s has %s of %s for '%.100s'", wanted->name,
                             text_of(found).text, tb__safetensor_dtype_name(source.tensor), format,
                             text_of(&wanted->shape).text, tb_dtype_name(wanted->dtype), t->name);
    disk->src_nbytes += source.tensor->nbytes;
    return TB_OK;
}

static tb_status check_source(tb__disk *disk, tb__disk_tensor *t, int32_t rank, tb_dtype said) {
    tb_local local;
    tb__safetensor wanted[TB__DISK_SLOTS];
    tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
    tb_status status = tb_layout_local(t->src, &t->shape, rank, &local);
    if (status == TB_OK) {
        tb_dtype dtype = said != TB_DTYPE_NONE ? said : t->src_dtype;
        status = tb__disk_quant_tensors(&t->src_quant, t->name, dtype, &local.shape, wanted);
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
    t->src_dtype = t->src_quant.format.kind ? said : source.tensor->dtype;
    disk->src_nbytes += source.tensor->nbytes; /* of files that exist: far from 2^63 */
    return TB_OK;
}

/* *data is the size of the data, without scales. */
static tb_status part_nbytes(const tb__disk_tensor *t, int32_t rank, int64_t *out, int64_t *data) {
    tb__safetensor tensors[TB__DISK_SLOTS];
    *out = *data = 0;
    TB_TRY(tb__disk_part_tensors(t, rank, tensors));
    for (int i = 0; i < TB__DISK_SLOTS; i++) {
        int64_t nbytes;
        if (!tensors[i].name)
            continue;
        TB_TRY(tb__safetensor_size(&tensors[i], &nbytes));
        *out += nbytes;
        *data = i == TB__DISK_DATA ? nbytes : *data;
    }
    return TB_OK;
}

static tb_status add_target_bytes(tb__disk *disk, tb__disk_tensor *t) {
    for (int32_t i = 0; i < tb_layout_nranks(t->dst); i++) {
        int64_t nbytes, data;
        int32_t rank = tb_layout_rank_at(t->dst, i);
        TB_TRY(part_nbytes(t, rank, &nbytes, &data));
        if (nbytes > (INT64_C(1) << 62) - disk->dst_nbytes)
            return tb__fail(TB_TOO_BIG, "the target has more than 2^62 bytes");
        t->dst_nbytes += nbytes;
        disk->dst_nbytes += nbytes;
        disk->amax_nbytes += tb__disk_is_looked_at(t, rank) ? data : 0;
    }
    return TB_OK;
}

/* What is written is worked out by the quantiser, from numbers as the source has them. */
static tb_status prepare_quantised(tb__disk *disk, tb__disk_tensor *t, const tb__spec_rule *rule) {
    tb__quant_size size;
    TB_TRY(tb__disk_quant_check(&rule->dst_quant, &t->shape, t->src_dtype));
    TB_TRY(tb__disk_quant_init(&t->dst_quant, &rule->dst_quant, t->name, &disk->arena));
    TB_TRY(tb__spec_group(rule, t->name, &disk->arena, &t->group));
    TB_TRY(tb__quant_measure(&rule->dst_quant, 0, 0, &size));
    t->dst_dtype = size.data_dtype;
    t->band_dtype = t->wire_dtype = t->src_dtype;
    return t->dst_quant.scale_name ? tb__disk_take_amax(disk, t) : TB_OK;
}

static tb_status check_unknown_ranks(const tb__disk *disk, const tb__disk_tensor *t, const char *name) {
    const char *stranger = name ? tb__disk_input_stranger(disk->input, t->src, name) : NULL;
    if (!stranger)
        return TB_OK;
    return tb__file_fail(TB_INVALID, stranger,
                         "tensor '%.100s' is in it, but the rank is not in the tensor's source mesh", name);
}

/* Whether any rank has it in a dtype that is not known: which one. */
static const tb__safetensor *find_unknown(const tb__disk *disk, const tb__disk_tensor *t) {
    for (int32_t i = 0; i < tb_layout_nranks(t->src); i++) {
        tb__disk_source source = tb__disk_input_find(disk->input, tb_layout_rank_at(t->src, i), t->name);
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
static tb_status take_unknown(tb__disk *disk, tb__disk_tensor *t, const tb__spec_rule *rule) {
    const tb__safetensor *unknown = t->unknown;
    if (rule->dst_dtype != TB_DTYPE_NONE || rule->dst_quant.kind)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s' is %s, a dtype that tensorbus does not know: it can't be cast to %s", t->name,
                        unknown->unknown_dtype,
                        rule->dst_quant.kind ? tb__quant_name(rule->dst_quant.kind) : tb_dtype_name(rule->dst_dtype));
    TB_TRY(check_whole(unknown, t->src, "src"));
    TB_TRY(check_whole(unknown, t->dst, "dst"));
    if (rule->has_shape && !same_shape(&rule->shape, &unknown->shape))
        return tb__fail(TB_INVALID, "tensor '%.100s' is %s, but the spec says %s", t->name,
                        text_of(&unknown->shape).text, text_of(&rule->shape).text);
    for (int32_t i = 0; i < tb_layout_nranks(t->src); i++) {
        int32_t rank = tb_layout_rank_at(t->src, i);
        tb__disk_source source = tb__disk_input_find(disk->input, rank, t->name);
        if (!source.tensor)
            return fail_missing(&source, rank, t->name);
        const char *name = tb__safetensor_dtype_name(source.tensor);
        if (strcmp(name, unknown->unknown_dtype) != 0 || source.tensor->nbytes != unknown->nbytes ||
            !same_shape(&source.tensor->shape, &unknown->shape))
            return tb__file_fail(TB_INVALID, source.file->path,
                                 "tensor '%.100s' is %s of %s, but another rank has it as %s of %s", t->name,
                                 text_of(&source.tensor->shape).text, name, text_of(&unknown->shape).text,
                                 unknown->unknown_dtype);
        disk->src_nbytes += source.tensor->nbytes;
    }
    t->src_dtype = TB_U8;
    t->shape.ndim = unknown->shape.ndim > 0 ? unknown->shape.ndim : 1;
    for (int d = 0; d < t->shape.ndim; d++)
        t->shape.dim[d] = d == t->shape.ndim - 1 ? unknown->nbytes : 1;
    return TB_OK;
}

/* What the files have of it; sentences name the file and the tensor. */
static tb_status find_sources(tb__disk *disk, tb__disk_tensor *t, const tb__spec_rule *rule) {
    if (rule->src_quant.kind)
        TB_TRY(tb__disk_quant_init(&t->src_quant, &rule->src_quant, t->name, &disk->arena));
    TB_TRY(check_unknown_ranks(disk, t, t->name));
    TB_TRY(check_unknown_ranks(disk, t, t->src_quant.scales_name));
    TB_TRY(check_unknown_ranks(disk, t, t->src_quant.scale_name));
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
    for (int32_t i = 0; i < tb_layout_nranks(t->src); i++)
        TB_TRY(check_source(disk, t, tb_layout_rank_at(t->src, i), rule->src_dtype));
    return TB_OK;
}

static tb_status prepare_tensor(tb__disk *disk, tb__disk_tensor *t, const tb__spec_rule *rule) {
    if (t->src_dtype == TB_DTYPE_NONE) /* all parts are empty, and no file has one */
        t->src_dtype = rule->src_dtype != TB_DTYPE_NONE ? rule->src_dtype : TB_F32;
    if (rule->dst_quant.kind) {
        TB_TRY(prepare_quantised(disk, t, rule));
    } else {
        t->dst_dtype = t->band_dtype = rule->dst_dtype != TB_DTYPE_NONE ? rule->dst_dtype : t->src_dtype;
        /* A dtype in a spec asks for what may be lost, too. */
        bool may_lose = tb_dtype_bits(t->dst_dtype) <= 8 || tb__dtype_class_of(t->dst_dtype) == TB__INTEGER;
        TB_TRY(tb__wire_dtype(t->src_dtype, t->dst_dtype, may_lose ? t->dst_dtype : TB_DTYPE_NONE, &t->wire_dtype));
    }
    /* The first replica serves everything: what is read twice is in the page cache the second time. */
    const tb_plan_opts opts = {.size = sizeof opts, .unbalanced = true};
    TB_TRY(tb_plan_cache_get(disk->plans, t->src, t->dst, &t->shape, t->src_dtype, &opts, &t->plan));
    tb__disk_count_replicas(disk->input, t);
    disk->nreplicated += t->replica_nbytes > 0;
    disk->replica_nbytes += t->replica_nbytes;
    return add_target_bytes(disk, t);
}

static tb_status check_sides(const tb__disk *disk, const tb__disk_tensor *t, const tb__spec_rule *rule) {
    if (tb__disk_input_model(disk->input) && tb_layout_nranks(t->src) != 1)
        return tb__fail(TB_INVALID, "its source mesh has %" PRId32 " ranks, but the source is a model, which is one",
                        tb_layout_nranks(t->src));
    return rule->has_shape ? TB_OK : check_deducible(t);
}

static tb_status add_tensor(tb__disk *disk, const tb__spec *spec, const char *name) {
    const tb__spec_rule *rule = tb__spec_find(spec, name);
    if (!rule)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s': the spec has no entry and no rule for it; "
                        "{\"match\": \"*\", \"skip\": true} as the last rule would leave it out",
                        name);
    if (rule->is_skipped) {
        disk->nskipped++;
        return TB_OK;
    }
    tb__disk_tensor *t = &disk->tensors[disk->count];
    *t = (tb__disk_tensor){.name = name, .src = rule->src, .dst = rule->dst};
    tb_status status = check_sides(disk, t, rule);
    if (status == TB_OK) {
        TB_TRY(find_sources(disk, t, rule));
        status = prepare_tensor(disk, t, rule);
    }
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s'", name);
    disk->count++;
    return TB_OK;
}

/* The names of the files, and those that only the spec has: that one is missing is said by the file that lacks it. */
static tb_status list_names(const tb__disk *disk, const tb__spec *spec, const char ***out, size_t *count) {
    const char **names;
    size_t n, found;
    TB_TRY(tb__disk_input_names(disk->input, &names, &found));
    const char **all = tb__realloc(names, found + spec->ntensors, sizeof *all);
    if (!all) {
        free(names);
        return TB_NO_MEMORY;
    }
    n = found;
    for (size_t i = 0; i < spec->ntensors; i++) {
        const char *name = spec->tensors[i].match;
        bool is_found = found && bsearch(&name, all, found, sizeof *all, tb__compare_strings);
        if (!is_found && !spec->tensors[i].is_skipped)
            all[n++] = name;
    }
    qsort(all, n, sizeof *all, tb__compare_strings);
    *out = all;
    *count = n;
    return TB_OK;
}

typedef struct prefix {
    const char *name;
    size_t length;
} prefix;

static int compare_prefix(const void *left, const void *right) {
    const prefix *key = left;
    const char *name = *(const char *const *)right;
    int order = strncmp(key->name, name, key->length);
    return order != 0 ? order : name[key->length] ? -1 : 0;
}

/* The quantised tensor of the source whose scales have this name; NULL: none. */
static const char *find_owner(const tb__spec *spec, const char *const *names, size_t count, const char *name) {
    for (const char *at = strrchr(name, '_'); at && at > name; at--) {
        if (*at != '_')
            continue;
        const prefix key = {name, (size_t)(at - name)};
        const char *const *found = bsearch(&key, names, count, sizeof *names, compare_prefix);
        const tb__spec_rule *rule = found ? tb__spec_find(spec, *found) : NULL;
        if (rule && !rule->is_skipped && rule->src_quant.kind &&
            tb__disk_quant_is_scale(&rule->src_quant, name, key.length))
            return *found;
    }
    return NULL;
}

/* A name of the source: a tensor, or the scales of one. */
static tb_status add_name(tb__disk *disk, const tb__spec *spec, const char *const *names, size_t count, size_t i) {
    const char *owner = find_owner(spec, names, count, names[i]);
    if (!owner)
        return add_tensor(disk, spec, names[i]);
    const tb__spec_rule *rule = tb__spec_find(spec, names[i]);
    if (rule && strcmp(rule->match, names[i]) == 0)
        return tb__fail(TB_INVALID, "tensor '%.100s': the spec has an entry for it, but it is a scale of '%.100s'",
                        names[i], owner);
    return TB_OK;
}

static tb_status add_tensors(tb__disk *disk, const tb__spec *spec) {
    const char **names;
    size_t count;
    TB_TRY(list_names(disk, spec, &names, &count));
    disk->tensors = tb__arena_alloc(&disk->arena, count, sizeof *disk->tensors);
    tb_status status = disk->tensors ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < count && status == TB_OK; i++)
        status = add_name(disk, spec, names, count, i);
    free(names);
    return status;
}

static tb_status open_disk(tb__disk *disk, const tb__spec *spec, const char *dir, bool ignore_unindexed) {
    int32_t *ranks;
    size_t nranks;
    TB_TRY(list_ranks(spec, false, &ranks, &nranks));
    tb_status status = tb__disk_input_open(dir, ranks, nranks, ignore_unindexed, &disk->input);
    free(ranks);
    TB_TRY(status);
    TB_TRY(list_ranks(spec, true, &disk->ranks, &disk->nranks));
    TB_TRY(tb_plan_cache_create(&disk->plans));
    return add_tensors(disk, spec);
}

tb_status tb__disk_open(const tb__spec *spec, const char *dir, bool ignore_unindexed, tb__disk **out) {
    tb__disk *disk = tb__calloc(1, sizeof *disk);
    if (!disk)
        return TB_NO_MEMORY;
    tb_status status = open_disk(disk, spec, dir, ignore_unindexed);
    if (status != TB_OK)
        tb__disk_close(disk);
    else
        *out = disk;
    return status;
}

void tb__disk_close(tb__disk *disk) {
    if (!disk)
        return;
    tb__disk_input_close(disk->input);
    tb_plan_cache_destroy(disk->plans);
    tb__index_fini(&disk->groups);
    tb__arena_fini(&disk->arena);
    free(disk->ranks);
    free(disk);
}

const tb__checkpoint *tb__disk_model(const tb__disk *disk) {
    return tb__disk_input_model(disk->input);
}

const tb__rank_files *tb__disk_rank_files(const tb__disk *disk) {
    return tb__disk_input_ranks(disk->input);
}

tb_status tb__disk_rank_nbytes(const tb__disk *disk, int32_t rank, int64_t *out) {
    int64_t total = 0, nbytes, data;
    for (size_t i = 0; i < disk->count; i++) {
        if (tb_layout_index_of(disk->tensors[i].dst, rank) < 0)
            continue;
        TB_TRY(part_nbytes(&disk->tensors[i], rank, &nbytes, &data));
        total += nbytes;
    }
    *out = total;
    return TB_OK;
}
