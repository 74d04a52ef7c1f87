/* Plans a resharding on disk: compares the spec with the source's files, tensor by tensor. */
#include "reshard/disk.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/text.h"
#include "layout/layout.h"
#include "reshard/disk_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The ranks of one side, of its mesh and in all rules, ascending; to be freed by the caller. */
static tb_status list_ranks(const tb__spec *spec, bool is_target, int32_t **out, size_t *count) {
    TB_VEC(int32_t) all = {0};
    const tb_layout *last = NULL;
    const tb__spec_mesh *mesh = is_target ? &spec->dst_mesh : &spec->src_mesh;
    size_t nrules = spec->ntensors + spec->nrules;
    for (size_t i = 0; i < nrules + mesh->is_given; i++) {
        const tb__spec_rule *rule = i < spec->ntensors ? &spec->tensors[i] : &spec->rules[i - spec->ntensors];
        const tb_layout *layout = i == nrules ? mesh->layout : is_target ? rule->dst : rule->src;
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

/* *data is what of it is data. */
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
    TB_TRY(tb__disk_quant_check(&rule->dst_quant, &t->shape, t->parts[0].from->dtype));
    TB_TRY(tb__disk_quant_init(&t->dst_quant, &rule->dst_quant, t->name, &disk->arena));
    TB_TRY(tb__spec_group(rule, t->parts[0].from->name, &disk->arena, &t->group));
    TB_TRY(tb__quant_measure(&rule->dst_quant, 0, 0, &size));
    t->dst_dtype = size.data_dtype;
    t->band_dtype = t->parts[0].from->dtype;
    return t->dst_quant.scale_name ? tb__disk_take_amax(disk, t) : TB_OK;
}

/* What the rules of a tensor's parts say of the whole has to be the same. */
static tb_status check_agreement(const tb__disk_tensor *t, const tb__disk_part *part) {
    const tb__disk_part *first = &t->parts[0];
    const tb__spec_rule *a = first->rule, *b = part->rule;
    const char *what = NULL;
    if (!tb_layout_equal(a->dst, b->dst) || a->dst_form.has_own_mesh != b->dst_form.has_own_mesh ||
        a->dst_form.has_stage != b->dst_form.has_stage || a->dst_form.stage != b->dst_form.stage)
        what = "layouts";
    else if (a->dst_dtype != b->dst_dtype ||
             ((a->dst_dtype == TB_DTYPE_NONE || a->dst_quant.kind) && first->from->dtype != part->from->dtype))
        what = "dtypes";
    else if (a->dst_quant.kind != b->dst_quant.kind || a->dst_quant.is_floor != b->dst_quant.is_floor ||
             a->dst_quant.is_power_of_two != b->dst_quant.is_power_of_two ||
             a->dst_quant.is_swizzled != b->dst_quant.is_swizzled)
        what = "quantisations";
    else if (first->from->unknown || part->from->unknown)
        return tb__fail(TB_INVALID, "it is made of several, of which '%.100s' has a dtype that tensorbus does not know",
                        (first->from->unknown ? first : part)->from->name);
    if (!what)
        return TB_OK;
    return tb__fail(TB_INVALID, "'%.100s' and '%.100s' become parts of it, but with other %s", first->from->name,
                    part->from->name, what);
}

static tb_status prepare_tensor(tb__disk *disk, tb__disk_tensor *t) {
    const tb__spec_rule *rule = t->parts[0].rule;
    tb_layout *layout;
    for (size_t i = 1; i < t->nparts; i++)
        TB_TRY(check_agreement(t, &t->parts[i]));
    t->unknown = t->parts[0].from->unknown;
    TB_TRY(tb__disk_target_shape(t->parts, t->nparts, &t->shape));
    TB_TRY(tb__spec_layout(&disk->spec->dst_mesh, &rule->dst_form, rule->dst, t->name, &layout));
    tb_status status = tb__disk_grid(disk, layout, &t->shape, TB__TARGET, &t->grid);
    tb_layout_destroy(layout);
    if (status != TB_OK)
        return tb__fail_within(status, "dst");
    t->dst = t->grid->layout;
    tb_dtype dtype = t->parts[0].from->dtype;
    if (rule->dst_quant.kind)
        TB_TRY(prepare_quantised(disk, t, rule));
    else
        t->dst_dtype = t->band_dtype = rule->dst_dtype != TB_DTYPE_NONE ? rule->dst_dtype : dtype;
    for (size_t i = 0; i < t->nparts; i++)
        TB_TRY(tb__disk_part_plan(disk, t, &t->parts[i]));
    TB_TRY(tb__disk_check_cover(t));
    return add_target_bytes(disk, t);
}

/* A part of the target for each rule that holds for a tensor of the source. */
static tb_status add_tensor(tb__disk *disk, const char *name) {
    const tb__spec_rule *rule = tb__spec_find(disk->spec, name), *first = rule;
    tb__disk_stored *stored = NULL;
    if (!rule)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s': the spec has no entry and no rule for it; "
                        "{\"match\": \"*\", \"skip\": true} as the last rule would leave it out",
                        name);
    if (rule->is_skipped) {
        disk->nskipped++;
        return TB_OK;
    }
    tb_status status = tb__disk_find_stored(disk, name, rule, &stored);
    for (; rule && status == TB_OK; rule = tb__spec_more(disk->spec, rule)) {
        tb__disk_part part = {.from = stored, .rule = rule};
        if (!tb_layout_equal(rule->src, first->src) || rule->src_dtype != first->src_dtype ||
            rule->src_quant.kind != first->src_quant.kind || rule->has_shape != first->has_shape ||
            (rule->has_shape && !tb__disk_same_shape(&rule->shape, &first->shape)))
            status = tb__fail(TB_INVALID, "%s: it says otherwise how the source has the tensor than %s", rule->where,
                              first->where);
        if (status == TB_OK)
            status = tb__spec_expand(rule, name, rule->dst_form.name, &disk->arena, &part.name);
        part.name = part.name ? part.name : name;
        if (status == TB_OK)
            status = tb__vec_push(&disk->parts, part) ? TB_OK : TB_NO_MEMORY;
        if (status == TB_OK)
            status = tb__disk_part_shape(disk, &disk->parts.item[disk->parts.count - 1]);
    }
    return status == TB_OK ? TB_OK : tb__fail_within(status, "tensor '%.100s'", name);
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
        if (spec->tensors[i].is_more)
            continue;
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
static tb_status add_name(tb__disk *disk, const char *const *names, size_t count, size_t i) {
    const char *owner = find_owner(disk->spec, names, count, names[i]);
    if (!owner)
        return add_tensor(disk, names[i]);
    const tb__spec_rule *rule = tb__spec_find(disk->spec, names[i]);
    if (rule && strcmp(rule->match, names[i]) == 0)
        return tb__fail(TB_INVALID, "tensor '%.100s': the spec has an entry for it, but it is a scale of '%.100s'",
                        names[i], owner);
    return TB_OK;
}

static int compare_parts(const void *left, const void *right) {
    const tb__disk_part *a = left, *b = right;
    int order = strcmp(a->name, b->name);
    return order != 0 ? order : strcmp(a->from->name, b->from->name);
}

/* The tensors that the parts make up. */
static tb_status add_targets(tb__disk *disk) {
    tb__disk_part *parts = disk->parts.item;
    size_t n = disk->parts.count;
    if (n > 0)
        qsort(parts, n, sizeof *parts, compare_parts);
    disk->tensors = tb__arena_alloc(&disk->arena, n, sizeof *disk->tensors);
    if (!disk->tensors)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n; i++)
        parts[i].from->reader = SIZE_MAX;
    for (size_t i = 0, end; i < n; i = end) {
        tb__disk_tensor *t = &disk->tensors[disk->count];
        for (end = i; end < n && strcmp(parts[end].name, parts[i].name) == 0; end++) {
            if (parts[end].from->reader == SIZE_MAX)
                parts[end].from->reader = disk->count;
        }
        *t = (tb__disk_tensor){.name = parts[i].name, .nparts = end - i, .parts = &parts[i]};
        tb_status status = prepare_tensor(disk, t);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", t->name);
        disk->count++;
    }
    return TB_OK;
}

static int compare_target(const void *name, const void *tensor) {
    return strcmp(name, ((const tb__disk_tensor *)tensor)->name);
}

int64_t tb__disk_constants_nbytes(const tb__disk *disk) {
    return (int64_t)(disk->spec->nconstants * sizeof(float));
}

static tb_status add_constants(tb__disk *disk) {
    for (size_t i = 0; i < disk->spec->nconstants; i++) {
        const char *name = disk->spec->constants[i].name;
        if (disk->count && bsearch(name, disk->tensors, disk->count, sizeof *disk->tensors, compare_target))
            return tb__fail(TB_INVALID, "constants '%.100s': a tensor of the target has this name", name);
    }
    disk->dst_nbytes += tb__disk_constants_nbytes(disk) * (int64_t)disk->nranks;
    return TB_OK;
}

static tb_status add_tensors(tb__disk *disk) {
    const char **names;
    size_t count;
    TB_TRY(list_names(disk, disk->spec, &names, &count));
    tb_status status = TB_OK;
    for (size_t i = 0; i < count && status == TB_OK; i++)
        status = add_name(disk, names, count, i);
    free(names);
    if (status == TB_OK)
        status = add_targets(disk);
    return status == TB_OK ? add_constants(disk) : status;
}

static tb_status open_disk(tb__disk *disk, const char *dir, bool ignore_unindexed) {
    const tb__spec *spec = disk->spec;
    int32_t *ranks;
    size_t nranks;
    TB_TRY(list_ranks(spec, false, &ranks, &nranks));
    tb_status status = tb__disk_input_open(dir, &spec->src_mesh, ranks, nranks, ignore_unindexed, &disk->input);
    free(ranks);
    TB_TRY(status);
    TB_TRY(list_ranks(spec, true, &disk->ranks, &disk->nranks));
    TB_TRY(tb_plan_cache_create(&disk->plans));
    return add_tensors(disk);
}

tb_status tb__disk_open(const tb__spec *spec, const char *dir, bool ignore_unindexed, tb__disk **out) {
    tb__disk *disk = tb__calloc(1, sizeof *disk);
    if (!disk)
        return TB_NO_MEMORY;
    disk->spec = spec;
    tb_status status = open_disk(disk, dir, ignore_unindexed);
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
    for (size_t i = 0; i < disk->parts.count; i++) {
        tb_view_destroy(disk->parts.item[i].src_view);
        tb_view_destroy(disk->parts.item[i].dst_view);
        tb_layout_destroy(disk->parts.item[i].src);
    }
    free(disk->parts.item);
    tb__disk_free_grids(disk);
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
    *out = total + tb__disk_constants_nbytes(disk);
    return TB_OK;
}
