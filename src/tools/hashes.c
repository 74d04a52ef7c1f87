/* Tensors of checkpoints, hashed where the mapped files have them, and compared. */
#include "tools/hashes.h"

#include "base/dtype.h"
#include "base/int.h"
#include "layout/layout.h"
#include "tools/tools.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Opening ------------------------------------------------------------------------------------------------- */

static tb_status map_files(hash_side *side) {
    side->maps = tb__calloc(side->nfiles ? side->nfiles : 1, sizeof *side->maps);
    if (!side->maps)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < side->nfiles; i++) {
        const tb__safetensors *file = side->files[i];
        size_t nbytes = (size_t)(file->data_start + file->header.data_nbytes);
        void *map = mmap(NULL, nbytes, PROT_READ, MAP_PRIVATE, file->fd, 0);
        if (map == MAP_FAILED)
            return tb__fail(TB_IO, "map %s: %s", file->path, strerror(errno));
        side->maps[i] = map;
    }
    return TB_OK;
}

static tb_status bind_part(const hash_side *side, size_t file, const tb__safetensor *t, hash_part *part) {
    char *at = (char *)side->maps[file] + side->files[file]->data_start + t->offset;
    tb_shape bytes = {.ndim = 1, .dim = {t->nbytes}};
    if (t->dtype == TB_DTYPE_NONE)
        return tb_binding_contiguous(at, 0, TB_U8, &bytes, &part->binding);
    return tb_binding_contiguous(at, 0, t->dtype, &t->shape, &part->binding);
}

static tb_status add_model(hash_side *side) {
    const tb__checkpoint *model = side->model;
    side->tensors = tb__arena_alloc(&side->arena, model->count + 1, sizeof *side->tensors);
    if (!side->tensors)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < model->count; i++) {
        const tb__safetensor *t = model->tensors[i].tensor;
        hash_part *part = tb__arena_alloc(&side->arena, 1, sizeof *part);
        if (!part)
            return TB_NO_MEMORY;
        *part = (hash_part){.rank = TB_NO_RANK};
        TB_TRY(bind_part(side, model->tensors[i].file, t, part));
        side->tensors[side->count++] = (hash_tensor){
            .name = t->name,
            .dtype_name = tb__safetensor_dtype_name(t),
            .dtype = part->binding.dtype,
            .shape = part->binding.shape,
            .shown = t->shape,
            .nparts = 1,
            .parts = part,
            .nreplicas = 1,
        };
    }
    return TB_OK;
}

static int64_t count_elements(const tb_shape *shape) {
    int64_t n = 1;
    for (int d = 0; d < shape->ndim; d++)
        n *= shape->dim[d];
    return n;
}

/* Ranks that differ in mesh dims that do not cut the tensor have the same. */
static int32_t replica_of(const tb_layout *layout, int32_t index, int32_t *nreplicas) {
    int32_t replica = 0, step = 1;
    for (int d = layout->ndim - 1; d >= 0; d--) {
        int32_t n = (int32_t)layout->shape[d];
        if (!tb__placement_shards(&layout->place[d])) {
            replica += index % n * step;
            step *= n;
        }
        index /= n;
    }
    *nreplicas = step;
    return replica;
}

static tb_status bind_ranked(const hash_side *side, hash_tensor *t, size_t file, const tb_local *local,
                             hash_part *part) {
    const char *path = side->files[file]->path;
    const tb__safetensor *has = tb__safetensors_find(&side->files[file]->header, t->name);
    if (!has && count_elements(&local->shape) == 0) {
        part->binding = (tb_binding){.dtype = t->dtype, .shape = local->shape};
        return TB_OK;
    }
    if (!has)
        return tb__fail(TB_INVALID, "%s has no tensor '%.100s'", path, t->name);
    if (has->dtype == TB_DTYPE_NONE)
        return tb__fail(TB_REFUSED, "%s: tensor '%.100s' is of dtype %s; those are not compared by ranks", path,
                        t->name, tb__safetensor_dtype_name(has));
    bool is_same = local->shape.ndim == has->shape.ndim;
    for (int d = 0; is_same && d < has->shape.ndim; d++)
        is_same = local->shape.dim[d] == has->shape.dim[d];
    if (!is_same)
        return tb__fail(TB_INVALID, "%s: tensor '%.100s' has another shape than its layout gives rank %" PRId32, path,
                        t->name, part->rank);
    if (part != t->parts && has->dtype != t->dtype)
        return tb__fail(TB_INVALID, "%s: tensor '%.100s' is %s, and %s in other files", path, t->name,
                        tb__safetensor_dtype_name(has), t->dtype_name);
    t->dtype = has->dtype;
    t->dtype_name = tb__safetensor_dtype_name(has);
    return bind_part(side, file, has, part);
}

/* Its dtype is what the first rank's file says; before that, what is expected. */
static tb_status add_ranked(hash_side *side, hash_tensor *t, const tb_layout *layout) {
    t->nparts = (size_t)tb_layout_nranks(layout);
    t->parts = tb__arena_alloc(&side->arena, t->nparts, sizeof *t->parts);
    if (!t->parts)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < t->nparts; i++) {
        hash_part *part = &t->parts[i];
        *part = (hash_part){.rank = tb_layout_rank_at(layout, (int32_t)i), .layout = layout};
        part->replica = replica_of(layout, (int32_t)i, &t->nreplicas);
        size_t file = 0;
        while (file < side->nfiles && side->ranks.files[file].rank != part->rank)
            file++;
        if (file == side->nfiles)
            return tb__fail(TB_INVALID, "%s has no file of rank %" PRId32 ", which has a part of tensor '%.100s'",
                            side->path, part->rank, t->name);
        tb_local local;
        TB_TRY(tb_layout_local(layout, &t->shape, part->rank, &local));
        tb_status status = bind_ranked(side, t, file, &local, part);
        tb_local_fini(&local);
        TB_TRY(status);
    }
    return TB_OK;
}

/* Both checkpoints have to have the same tensors, by the same names. */
static tb_status refuse_other_forms(const tb__spec *spec, const tb__disk_tensor *t) {
    const tb__disk_part *part = &t->parts[0];
    bool is_renumbered = false;
    for (int i = 0; i < TB__SPEC_NUMBERS; i++)
        is_renumbered |= spec->src_mesh.numbers[i].pattern || spec->dst_mesh.numbers[i].pattern;
    if (t->nparts == 1 && !part->src_view && !part->dst_view && !is_renumbered &&
        strcmp(part->from->name, t->name) == 0)
        return TB_OK;
    return tb__fail(TB_REFUSED,
                    "tensor '%.100s' has other names or views on the two sides of the spec; `tensorbus diff` compares "
                    "such checkpoints",
                    t->name);
}

/* The source of a resharding, whose shapes are worked out from the files. */
static tb_status add_sources(hash_side *side, const tb__spec *spec) {
    TB_TRY(tb__disk_open(spec, side->path, true, &side->disk));
    side->tensors = tb__arena_alloc(&side->arena, side->disk->count + 1, sizeof *side->tensors);
    if (!side->tensors)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < side->disk->count; i++) {
        const tb__disk_tensor *from = &side->disk->tensors[i];
        hash_tensor *t = &side->tensors[side->count++];
        if (from->parts[0].from->quant.format.kind)
            return tb__fail(TB_REFUSED, "tensor '%.100s' is quantised by the spec; its bits are not compared",
                            from->name);
        TB_TRY(refuse_other_forms(spec, from));
        *t = (hash_tensor){
            .name = from->name, .shape = from->shape, .shown = from->shape, .dtype = from->parts[0].from->dtype};
        t->dtype_name = tb_dtype_name(t->dtype);
        TB_TRY(add_ranked(side, t, from->parts[0].from->layout));
    }
    return TB_OK;
}

/* The target: tensors are those of the source. */
static tb_status add_targets(hash_side *side, const tb__spec *spec, const hash_side *first) {
    side->tensors = tb__arena_alloc(&side->arena, first->count + 1, sizeof *side->tensors);
    if (!side->tensors)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < first->count; i++) {
        const hash_tensor *from = &first->tensors[i];
        const tb__spec_rule *rule = tb__spec_find(spec, from->name);
        if (!rule)
            return tb__fail(TB_INVALID, "tensor '%.100s': the spec has no entry and no rule for it", from->name);
        if (rule->is_skipped)
            continue;
        if (rule->dst_quant.kind)
            return tb__fail(TB_REFUSED, "tensor '%.100s' is quantised by the spec; its bits are not compared",
                            from->name);
        hash_tensor *t = &side->tensors[side->count++];
        *t = (hash_tensor){.name = from->name, .shape = from->shape, .shown = from->shape, .dtype = from->dtype};
        t->dtype_name = from->dtype_name;
        TB_TRY(add_ranked(side, t, rule->dst));
    }
    return TB_OK;
}

static tb_status open_ranks(hash_side *side) {
    TB_TRY(tb__rank_files_init(side->path, &side->ranks));
    side->files = tb__calloc(side->ranks.count, sizeof(tb__safetensors *));
    if (!side->files)
        return TB_NO_MEMORY;
    for (; side->nfiles < side->ranks.count; side->nfiles++)
        TB_TRY(tb__safetensors_open(side->ranks.files[side->nfiles].path, &side->files[side->nfiles]));
    return TB_OK;
}

tb_status hash_side_open(hash_side *side, const char *path, const tb__spec *spec, const hash_side *first) {
    tb__checkpoint_kind kind;
    *side = (hash_side){.path = path};
    TB_TRY(tb__checkpoint_look(path, &kind));
    bool has_ranks = kind == TB__CHECKPOINT_RANKS;
    if (has_ranks && !spec)
        return tb__fail(TB_INVALID,
                        "%s has files of ranks: --spec FILE says which part of each tensor they have, as for "
                        "`tensorbus reshard`",
                        path);
    tb_status status = has_ranks ? open_ranks(side) : tb__checkpoint_open(path, &side->model);
    if (status == TB_OK && side->model) {
        side->files = side->model->files;
        side->nfiles = side->model->nfiles;
    }
    if (status == TB_OK)
        status = map_files(side);
    if (status == TB_OK)
        status = side->model ? add_model(side) : first ? add_targets(side, spec, first) : add_sources(side, spec);
    if (status != TB_OK)
        hash_side_close(side);
    return status;
}

void hash_side_close(hash_side *side) {
    for (size_t i = 0; side->maps && i < side->nfiles; i++) {
        if (side->maps[i])
            munmap(side->maps[i], (size_t)(side->files[i]->data_start + side->files[i]->header.data_nbytes));
    }
    free(side->maps);
    if (!side->model) {
        for (size_t i = 0; i < side->nfiles; i++)
            tb__safetensors_close(side->files[i]);
        free(side->files);
        tb__rank_files_fini(&side->ranks);
    }
    tb__checkpoint_close(side->model);
    tb__disk_close(side->disk);
    tb__arena_fini(&side->arena);
    *side = (hash_side){0};
}

const hash_tensor *hash_side_find(const hash_side *side, const char *name) {
    for (size_t low = 0, high = side->count; low < high;) {
        size_t i = low + (high - low) / 2;
        int order = strcmp(side->tensors[i].name, name);
        if (order == 0)
            return &side->tensors[i];
        if (order < 0)
            low = i + 1;
        else
            high = i;
    }
    return NULL;
}

/* ---- Hashing ------------------------------------------------------------------------------------------------- */

typedef struct hash_unit {
    hash_tensor *tensor;
    const hash_part *part;
    size_t tile;
    uint64_t hash;
} hash_unit;

typedef struct hash_work {
    hash_unit *units;
    size_t count;
    atomic_size_t next;
    pthread_mutex_t lock;
    tb_status status; /* of the first failure, and its sentence */
    tb__saved_detail detail;
} hash_work;

/* A model's tensors lie row-major: a tile of one is a box of one dim. */
static tb_status hash_tile(hash_unit *unit) {
    const hash_tensor *t = unit->tensor;
    tb_shape flat = {.ndim = 1, .dim = {count_elements(&t->shape)}};
    int64_t start[TB_MAX_DIMS] = {(int64_t)unit->tile * HASH_TILE};
    tb_shape tile = {.ndim = 1, .dim = {tb__min64(HASH_TILE, flat.dim[0] - start[0])}};
    tb_binding box;
    TB_TRY(
        tb_binding_contiguous(unit->part->binding.base, tb__dtype_offset(t->dtype, start[0]), t->dtype, &tile, &box));
    return tb_hash_box(&box, &flat, start, &unit->hash);
}

static void *hash_units(void *arg) {
    hash_work *work = arg;
    for (size_t i; (i = atomic_fetch_add(&work->next, 1)) < work->count;) {
        hash_unit *unit = &work->units[i];
        const hash_part *part = unit->part;
        tb_status status =
            part->layout ? tb_hash_part(part->layout, &unit->tensor->shape, part->rank, &part->binding, &unit->hash)
                         : hash_tile(unit);
        if (status != TB_OK) {
            pthread_mutex_lock(&work->lock);
            if (work->status == TB_OK) {
                work->status = tb__fail_within(status, "tensor '%.100s'", unit->tensor->name);
                work->detail = tb__save_detail();
            }
            pthread_mutex_unlock(&work->lock);
            atomic_store(&work->next, work->count);
        }
    }
    return NULL;
}

static void run_threads(hash_work *work, int threads) {
    enum { MOST = 64 };
    pthread_t ids[MOST];
    int64_t want = threads > 0 ? threads : sysconf(_SC_NPROCESSORS_ONLN);
    int started = 0;
    want = tb__min64(tb__min64(want, MOST), (int64_t)work->count);
    while (started < want - 1 && pthread_create(&ids[started], NULL, hash_units, work) == 0)
        started++;
    hash_units(work);
    while (started > 0)
        pthread_join(ids[--started], NULL);
}

tb_status hash_side_compute(hash_side *side, int threads) {
    TB_VEC(hash_unit) units = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < side->count && status == TB_OK; i++) {
        hash_tensor *t = &side->tensors[i];
        bool is_whole = !t->parts[0].layout;
        t->ntiles = is_whole ? (size_t)((count_elements(&t->shape) + HASH_TILE - 1) / HASH_TILE) : 0;
        t->tiles = is_whole ? tb__arena_alloc(&side->arena, t->ntiles + 1, sizeof *t->tiles) : NULL;
        t->hash = tb__arena_alloc(&side->arena, (size_t)t->nreplicas, sizeof *t->hash);
        if (!t->hash || (is_whole && !t->tiles)) {
            status = TB_NO_MEMORY;
            break;
        }
        memset(t->hash, 0, (size_t)t->nreplicas * sizeof *t->hash);
        for (size_t k = 0; k < (is_whole ? t->ntiles : t->nparts) && status == TB_OK; k++) {
            hash_unit unit = {.tensor = t, .part = &t->parts[is_whole ? 0 : k], .tile = k};
            status = tb__vec_push(&units, unit) ? TB_OK : TB_NO_MEMORY;
        }
    }
    hash_work work = {.units = units.item, .count = units.count, .lock = PTHREAD_MUTEX_INITIALIZER};
    if (status == TB_OK) {
        run_threads(&work, threads);
        status = work.status;
        if (status != TB_OK)
            tb__set_detail("%s", work.detail.text);
    }
    for (size_t i = 0; i < units.count && status == TB_OK; i++) {
        hash_unit *unit = &units.item[i];
        unit->tensor->hash[unit->part->replica] += unit->hash;
        if (unit->tensor->tiles)
            unit->tensor->tiles[unit->tile] = unit->hash;
    }
    free(units.item);
    return status;
}

/* ---- Comparing ----------------------------------------------------------------------------------------------- */

static tb_status list_local(const hash_tensor *t, const hash_part *part, tb_local *out) {
    if (part->layout)
        return tb_layout_local(part->layout, &t->shape, part->rank, out);
    *out = (tb_local){.shape = t->shape};
    for (int d = 0; d < t->shape.ndim; d++) {
        out->segments[d] = tb__malloc(1, sizeof(tb_segment));
        if (!out->segments[d]) {
            tb_local_fini(out);
            return TB_NO_MEMORY;
        }
        out->segments[d][0] = (tb_segment){0, t->shape.dim[d]};
        out->nsegments[d] = 1;
    }
    return TB_OK;
}

/* Indices that both parts have, and where each has them. */
typedef struct common {
    int64_t index, len, at_a, at_b;
} common;
typedef TB_VEC(common) commons;

static bool add_common(const tb_local *a, const tb_local *b, int d, commons *out) {
    int64_t at_a = 0;
    for (size_t i = 0; i < a->nsegments[d]; i++) {
        tb_segment x = a->segments[d][i];
        int64_t at_b = 0;
        for (size_t k = 0; k < b->nsegments[d]; k++) {
            tb_segment y = b->segments[d][k];
            int64_t start = tb__max64(x.start, y.start), stop = tb__min64(x.stop, y.stop);
            if (start < stop &&
                !tb__vec_push(out, (common){start, stop - start, at_a + start - x.start, at_b + start - y.start}))
                return false;
            at_b += y.stop - y.start;
        }
        at_a += x.stop - x.start;
    }
    return true;
}

static bool is_equal(const hash_tensor *t, const tb_binding *a, int64_t at_a, const tb_binding *b, int64_t at_b) {
    const uint8_t *x = a->base, *y = b->base;
    if (tb__dtype_packing(t->dtype) > 1) {
        x += a->offset;
        y += b->offset;
        return (x[at_a / 2] >> (at_a % 2 * 4) & 15) == (y[at_b / 2] >> (at_b % 2 * 4) & 15);
    }
    size_t nbytes = tb_dtype_bits(t->dtype) / 8;
    return memcmp(x + a->offset + at_a * (int64_t)nbytes, y + b->offset + at_b * (int64_t)nbytes, nbytes) == 0;
}

static void count_in_box(const hash_tensor *t, const tb_binding *a, const tb_binding *b, const common *box,
                         hash_difference *out) {
    int64_t at[TB_MAX_DIMS] = {0};
    int ndim = t->shape.ndim;
    for (int d = 0; d >= 0;) {
        int64_t in_a = 0, in_b = 0;
        for (int i = 0; i < ndim; i++) {
            in_a += (box[i].at_a + at[i]) * a->strides[i];
            in_b += (box[i].at_b + at[i]) * b->strides[i];
        }
        out->of++;
        if (!is_equal(t, a, in_a, b, in_b)) {
            for (int i = 0; i < ndim; i++) {
                int64_t index = box[i].index + at[i], first = out->start[i], stop = first + out->len[i];
                out->start[i] = out->count ? tb__min64(first, index) : index;
                out->len[i] = out->count ? tb__max64(stop, index + 1) - out->start[i] : 1;
            }
            out->count++;
        }
        for (d = ndim - 1; d >= 0 && ++at[d] == box[d].len; d--)
            at[d] = 0;
    }
}

static tb_status compare_parts(const hash_tensor *t, const hash_part *pa, const tb_local *a, const hash_part *pb,
                               const tb_local *b, hash_difference *out) {
    commons dims[TB_MAX_DIMS] = {{0}};
    common box[TB_MAX_DIMS] = {{0}};
    size_t at[TB_MAX_DIMS] = {0};
    bool is_empty = false;
    tb_status status = TB_OK;
    *out = (hash_difference){.rank_a = pa->rank, .rank_b = pb->rank};
    for (int d = 0; d < t->shape.ndim && status == TB_OK; d++) {
        status = add_common(a, b, d, &dims[d]) ? TB_OK : TB_NO_MEMORY;
        is_empty |= dims[d].count == 0;
    }
    for (int d = 0; d >= 0 && status == TB_OK && !is_empty;) {
        for (int i = 0; i < t->shape.ndim; i++)
            box[i] = dims[i].item[at[i]];
        count_in_box(t, &pa->binding, &pb->binding, box, out);
        for (d = t->shape.ndim - 1; d >= 0 && ++at[d] == dims[d].count; d--)
            at[d] = 0;
    }
    for (int d = 0; d < TB_MAX_DIMS; d++)
        free(dims[d].item);
    return status;
}

tb_status hash_compare(const hash_tensor *a, const hash_tensor *b, hash_difference **out, size_t *count) {
    TB_VEC(hash_difference) found = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < a->nparts && a->parts && b->parts && status == TB_OK; i++) {
        tb_local in_a, in_b;
        status = list_local(a, &a->parts[i], &in_a);
        if (status != TB_OK)
            break;
        for (size_t k = 0; k < b->nparts && status == TB_OK; k++) {
            hash_difference difference;
            status = list_local(b, &b->parts[k], &in_b);
            if (status != TB_OK)
                break;
            status = compare_parts(a, &a->parts[i], &in_a, &b->parts[k], &in_b, &difference);
            tb_local_fini(&in_b);
            if (status == TB_OK && difference.count > 0 && !tb__vec_push(&found, difference))
                status = TB_NO_MEMORY;
        }
        tb_local_fini(&in_a);
    }
    if (status != TB_OK) {
        free(found.item);
        return status;
    }
    *out = found.item;
    *count = found.count;
    return TB_OK;
}

/* ---- Lists --------------------------------------------------------------------------------------------------- */

void tool_add_hashes(tb__text *out, const hash_side *side) {
    tb__text_add(out, "{\"hashes\":1,\"tile\":%d,\"tensors\":{", HASH_TILE);
    for (size_t i = 0; i < side->count; i++) {
        const hash_tensor *t = &side->tensors[i];
        tb__text_add(out, i ? ",\n" : "\n");
        tb__text_add_json(out, t->name);
        tb__text_add(out, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype_name);
        for (int d = 0; d < t->shown.ndim; d++)
            tb__text_add(out, "%s%" PRId64, d ? "," : "", t->shown.dim[d]);
        tb__text_add(out, "],\"hash\":\"%016" PRIx64 "\"", t->hash[0]);
        for (size_t k = 0; t->ntiles > 1 && k < t->ntiles; k++)
            tb__text_add(out, "%s\"%016" PRIx64 "\"", k ? "," : ",\"tiles\":[", t->tiles[k]);
        tb__text_add(out, t->ntiles > 1 ? "]}" : "}");
    }
    tb__text_add(out, "\n}}\n");
}

static bool read_hash(const json_t *json, uint64_t *out) {
    const char *text = json_string_value(json);
    if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16)
        return false;
    *out = strtoull(text, NULL, 16);
    return true;
}

static tb_status load_tensor(hash_side *side, const char *name, const json_t *json) {
    hash_tensor *t = &side->tensors[side->count];
    *t = (hash_tensor){.name = tb__arena_strdup(&side->arena, name), .nreplicas = 1};
    const char *dtype = json_string_value(json_object_get(json, "dtype"));
    const json_t *tiles = json_object_get(json, "tiles");
    if (!dtype || tb__shape_from_json(json_object_get(json, "shape"), &t->shown) != TB_OK)
        return tb__fail(TB_INVALID, "tensor '%.100s' has no dtype or no shape", name);
    t->shape = t->shown;
    t->dtype_name = tb__arena_strdup(&side->arena, dtype);
    t->ntiles = json_array_size(tiles);
    t->hash = tb__arena_alloc(&side->arena, 1, sizeof *t->hash);
    t->tiles = t->ntiles ? tb__arena_alloc(&side->arena, t->ntiles, sizeof *t->tiles) : NULL;
    if (!t->name || !t->dtype_name || !t->hash || (t->ntiles && !t->tiles))
        return TB_NO_MEMORY;
    bool is_right = read_hash(json_object_get(json, "hash"), t->hash);
    for (size_t i = 0; i < t->ntiles && is_right; i++)
        is_right = read_hash(json_array_get(tiles, i), &t->tiles[i]);
    if (!is_right)
        return tb__fail(TB_INVALID, "tensor '%.100s': a hash is 16 digits of 0-9 and a-f", name);
    side->count++;
    return TB_OK;
}

static int compare_tensors(const void *a, const void *b) {
    return strcmp(((const hash_tensor *)a)->name, ((const hash_tensor *)b)->name);
}

tb_status hash_side_load(hash_side *side, const char *path) {
    *side = (hash_side){.path = path};
    json_error_t error;
    json_t *json = strcmp(path, "-") == 0 ? json_loadf(stdin, 0, &error) : json_load_file(path, 0, &error);
    if (!json)
        return tb__fail(TB_INVALID, "%s: %s", path, error.text);
    const json_t *tensors = json_object_get(json, "tensors");
    tb_status status = TB_OK;
    if (json_integer_value(json_object_get(json, "hashes")) != 1 || !json_is_object(tensors) ||
        json_integer_value(json_object_get(json, "tile")) != HASH_TILE)
        status =
            tb__fail(TB_INVALID, "%s is no list of hashes, as `tensorbus verify CHECKPOINT --json` prints it", path);
    if (status == TB_OK) {
        side->tensors = tb__arena_alloc(&side->arena, json_object_size(tensors) + 1, sizeof *side->tensors);
        status = side->tensors ? TB_OK : TB_NO_MEMORY;
    }
    const char *name;
    json_t *tensor;
    json_object_foreach((json_t *)tensors, name, tensor) {
        if (status == TB_OK)
            status = load_tensor(side, name, tensor);
    }
    json_decref(json);
    if (status == TB_OK)
        qsort(side->tensors, side->count, sizeof *side->tensors, compare_tensors);
    else
        hash_side_close(side);
    return status == TB_INVALID ? tb__fail_within(status, "--hashes") : status;
}
