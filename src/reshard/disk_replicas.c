/* Checks that source ranks that hold the same elements hold the same bytes. A resharding reads one of them, so a
 * sharded tensor that the spec declares replicated by mistake would lose its other shards.
 *
 * Copies, ranks with the same part, are compared byte by byte in the files, scales included. Parts that share elements
 * because of Explicit lists are compared box by box; those of a quantised tensor are not, since each part is quantised
 * by itself. Contributions to a Partial source differ by design. */
#include "base/dtype.h"
#include "plan/plan.h"
#include "reshard/disk_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { STRETCH_BYTES = 64 << 20 }; /* what a thread takes at a time */

/* ---- How much there is --------------------------------------------------------------------------------------- */

static const char *slot_name(const tb__disk_stored *t, int slot) {
    const char *const names[TB__DISK_SLOTS] = {t->name, t->quant.scales_name, t->quant.scale_name};
    return names[slot];
}

/* What the file of a rank has for a slot; NULL: nothing. */
static tb__disk_source find_slot(const tb__disk_input *input, const tb__disk_stored *t, int32_t rank, int slot) {
    const char *name = slot_name(t, slot);
    return name ? tb__disk_input_find(input, rank, name) : (tb__disk_source){0};
}

/* Elements of a contribution that are held again, by another rank or by the same one. */
static int64_t shared_elements(const tb__disk_stored *t) {
    int64_t held = 1, distinct = 1;
    bool has_table = false;
    for (int d = 0; d < t->shape.ndim; d++) {
        const tb__axis *axis = &t->grid->axis[d];
        int64_t total = axis->length, different = total;
        if (axis->table) {
            has_table = true;
            total = different = 0;
            for (int32_t coord = 0; coord < axis->ncoords; coord++)
                total += tb__axis_local(axis, coord);
            for (size_t i = 0; i < axis->table->nsegments; i++)
                different += axis->table->segment[i].stop - axis->table->segment[i].start;
        }
        held *= total; /* of files that exist: far from 2^63 */
        distinct *= different;
    }
    return has_table && !t->quant.format.kind ? held - distinct : 0;
}

void tb__disk_count_replicas(const tb__disk_input *input, tb__disk_stored *t) {
    const tb__grid *grid = t->grid;
    t->shared_nbytes = tb__dtype_bytes(t->dtype, shared_elements(t)) * grid->partial.size;
    t->replica_nbytes = t->shared_nbytes;
    for (int32_t i = 0; grid->copies.size > 1 && i < tb_layout_nranks(t->layout); i++) {
        tb__place place;
        int32_t rank = tb_layout_rank_at(t->layout, i);
        if (!tb__grid_place(grid, rank, &place) || place.copy == 0)
            continue;
        for (int slot = 0; slot < TB__DISK_SLOTS; slot++) {
            tb__disk_source source = find_slot(input, t, rank, slot);
            t->replica_nbytes += source.tensor ? source.tensor->nbytes : 0;
        }
    }
}

/* ---- What there is to do ------------------------------------------------------------------------------------- */

/* Whether the source at this index of the mesh is a part's first copy, with which the others are compared. */
static bool is_first_copy(const tb__disk_stored *t, int32_t index) {
    tb__place place;
    return tb__grid_place(t->grid, tb_layout_rank_at(t->layout, index), &place) && place.copy == 0;
}

static bool next_copies(const tb__disk_input *input, const tb__disk_stored *t, tb__disk_comparison *at,
                        tb__disk_comparison *out) {
    for (; at->source < tb_layout_nranks(t->layout); at->source++, at->slot = 0) {
        if (!is_first_copy(t, at->source))
            continue;
        for (; at->slot < TB__DISK_SLOTS; at->slot++, at->first = 0) {
            tb__disk_source source = find_slot(input, t, tb_layout_rank_at(t->layout, at->source), at->slot);
            int64_t left = source.tensor ? source.tensor->nbytes - at->first : 0;
            if (left == 0)
                continue;
            *out = *at;
            out->nbytes = left < STRETCH_BYTES ? left : STRETCH_BYTES;
            at->first += out->nbytes;
            return true;
        }
    }
    return false;
}

static bool next_shared(const tb__disk_stored *t, tb__disk_comparison *at, tb__disk_comparison *out) {
    for (; at->source < tb_layout_nranks(t->layout); at->source++) {
        if (is_first_copy(t, at->source)) {
            *out = *at;
            at->source++;
            return true;
        }
    }
    return false;
}

bool tb__disk_next_comparison(const tb__disk_input *input, const tb__disk_stored *t, tb__disk_comparison *at,
                              tb__disk_comparison *out) {
    if (!at->is_shared) {
        if (t->replica_nbytes > t->shared_nbytes && next_copies(input, t, at, out))
            return true;
        *at = (tb__disk_comparison){.is_shared = true};
    }
    return t->shared_nbytes > 0 && next_shared(t, at, out);
}

/* ---- Error messages ------------------------------------------------------------------------------------------ */

typedef struct rank_list {
    char text[160];
    size_t length, count;
} rank_list;

static void add_rank(rank_list *list, int32_t rank) {
    enum { MOST = 8 };
    if (list->count++ < MOST)
        list->length += (size_t)snprintf(list->text + list->length, sizeof list->text - list->length, "%s%" PRId32,
                                         list->length ? ", " : "", rank);
    else if (list->count == MOST + 1)
        list->length += (size_t)snprintf(list->text + list->length, sizeof list->text - list->length, " and others");
}

static int64_t first_difference(const unsigned char *a, const unsigned char *b, int64_t nbytes) {
    int64_t i = 0;
    while (i < nbytes && a[i] == b[i])
        i++;
    return i;
}

static const char advice[] = "do they hold shards of it? Then its 'src' in the spec has to say how it is cut; "
                             "--trust-replicas reads the first";

/* ---- Copies -------------------------------------------------------------------------------------------------- */

static int32_t copy_rank(const tb__grid *grid, const tb__place *of, int32_t copy) {
    tb__place place = *of;
    place.copy = copy;
    return tb__grid_rank(grid, &place);
}

/* Copies differ from the first somewhere in [first, first + n): the first one's bytes are in memory. */
static tb_status fail_copies(const tb__disk_comparer *c, const tb__disk_stored *t, const tb__place *place, int slot,
                             int64_t first, size_t n) {
    const tb__grid *grid = t->grid;
    rank_list all = {0}, different = {0};
    int64_t byte = INT64_MAX;
    for (int32_t copy = 0; copy < grid->copies.size; copy++) {
        int32_t rank = copy_rank(grid, place, copy);
        tb__disk_source source = find_slot(c->gather->input, t, rank, slot);
        add_rank(&all, rank);
        TB_TRY(tb__safetensors_read(source.file, source.tensor, first, n, c->other));
        int64_t at = first_difference(c->one, c->other, (int64_t)n);
        if (at < (int64_t)n) {
            add_rank(&different, rank);
            byte = first + at < byte ? first + at : byte;
        }
    }
    return tb__fail(
        TB_INVALID,
        "tensor '%.100s': by the spec ranks %s hold the same, but in the files rank%s %s differ%s from rank "
        "%" PRId32 ", at byte %" PRId64 " first; %s",
        slot_name(t, slot), all.text, different.count > 1 ? "s" : "", different.text, different.count > 1 ? "" : "s",
        copy_rank(grid, place, 0), byte, advice);
}

static tb_status compare_copies(const tb__disk_comparer *c, const tb__disk_stored *t, const tb__disk_comparison *what) {
    const tb__grid *grid = t->grid;
    tb__place place;
    int32_t rank = tb_layout_rank_at(t->layout, what->source);
    tb__disk_source one = find_slot(c->gather->input, t, rank, what->slot);
    (void)tb__grid_place(grid, rank, &place);
    for (int64_t done = 0; done < what->nbytes && !atomic_load(c->is_stopped);) {
        int64_t first = what->first + done, left = what->nbytes - done;
        size_t n = left < (int64_t)c->nbytes ? (size_t)left : c->nbytes;
        TB_TRY(tb__safetensors_read(one.file, one.tensor, first, n, c->one));
        for (int32_t copy = 1; copy < grid->copies.size; copy++) {
            tb__disk_source other = find_slot(c->gather->input, t, copy_rank(grid, &place, copy), what->slot);
            TB_TRY(tb__safetensors_read(other.file, other.tensor, first, n, c->other));
            if (memcmp(c->one, c->other, n) != 0)
                return fail_copies(c, t, &place, what->slot, first, n);
            atomic_fetch_add(c->bytes_done, (int_fast64_t)n);
        }
        done += (int64_t)n;
    }
    return TB_OK;
}

/* ---- Shared elements ----------------------------------------------------------------------------------------- */

/* A run of indices of a rank's part, and its position in the first rank that holds them. */
typedef struct run {
    int64_t start, len;
    int32_t coord;
    int64_t first_start;
} run;

typedef TB_VEC(run) runs;

static tb_status list_runs(const tb__axis *axis, int32_t coord, tb__arena *arena, runs *out) {
    tb__spans list;
    if (!axis->table)
        return tb__vec_push(out, (run){0, tb__axis_local(axis, coord), coord, 0}) ? TB_OK : TB_NO_MEMORY;
    TB_TRY(tb__axis_list(axis, coord, arena, &list));
    for (size_t i = 0; i < list.count; i++) {
        const tb__span *span = &list.item[i];
        for (int64_t index = span->start; index < span->stop;) {
            const tb__table_segment *segment = &axis->table->segment[tb__table_find(axis->table, index)];
            int64_t end = segment->stop < span->stop ? segment->stop : span->stop;
            run r = {span->offset + index - span->start, end - index,
                     axis->table->holder[axis->table->cls[segment->cls].first_holder],
                     axis->table->offset[segment->offsets] + index - segment->start};
            if (!tb__vec_push(out, r))
                return TB_NO_MEMORY;
            index = end;
        }
    }
    return TB_OK;
}

/* A box that two ranks hold, or one rank twice. */
typedef struct shared_box {
    int32_t one, other;
    int64_t one_start[TB_MAX_DIMS], other_start[TB_MAX_DIMS];
    tb_shape shape;
} shared_box;

static tb_status read_band(tb__disk_gather *g, const tb__disk_stored *t, const tb__disk_bands *bands,
                           const tb__disk_band *band, int32_t rank, const int64_t *start, void *to) {
    tb_local local;
    tb__disk_piece piece = {.from = t, .nsources = 1, .sources = &rank, .wire_dtype = t->dtype, .avg_divisor = 1};
    TB_TRY(tb_layout_local(t->layout, &t->shape, rank, &local));
    int64_t stride = 1;
    piece.ndim = t->shape.ndim;
    for (int d = piece.ndim - 1; d >= 0; d--) {
        piece.len[d] = band->len[d];
        piece.src_stride[d] = stride;
        piece.dst_stride[d] = bands->stride[d];
        piece.src += (start[d] + band->start[d]) * stride;
        stride *= local.shape.dim[d];
    }
    tb_local_fini(&local);
    return tb__disk_gather_piece(g, &piece, to, t->dtype);
}

static tb_status fail_box(const tb__disk_stored *t, const shared_box *box) {
    if (box->one == box->other)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s': by the spec rank %" PRId32
                        " holds elements twice, but in its file the two differ",
                        t->name, box->one);
    return tb__fail(TB_INVALID,
                    "tensor '%.100s': by the spec ranks %" PRId32 " and %" PRId32
                    " share elements, but in the files they differ there; %s",
                    t->name, box->one, box->other, advice);
}

static tb_status compare_box(const tb__disk_comparer *c, const tb__disk_stored *t, const shared_box *box) {
    tb__disk_bands bands;
    const tb__disk_tensor plain = {.band_dtype = t->dtype}; /* as the files have it */
    tb__disk_bands_init(&bands, &plain, &box->shape, (int64_t)c->nbytes);
    for (int64_t i = 0; i < bands.count && !atomic_load(c->is_stopped); i++) {
        tb__disk_band band;
        tb__disk_bands_at(&bands, i, &band);
        size_t nbytes = (size_t)tb__dtype_bytes(t->dtype, band.nelements);
        TB_TRY(read_band(c->gather, t, &bands, &band, box->one, box->one_start, c->one));
        TB_TRY(read_band(c->gather, t, &bands, &band, box->other, box->other_start, c->other));
        if (memcmp(c->one, c->other, nbytes) != 0)
            return fail_box(t, box);
        atomic_fetch_add(c->bytes_done, (int_fast64_t)nbytes);
    }
    return TB_OK;
}

/* The boxes that a rank's part is made of, each held as a whole by one first rank. */
static tb_status compare_boxes(const tb__disk_comparer *c, const tb__disk_stored *t, const tb__place *place,
                               const runs *per_dim) {
    const tb__grid *grid = t->grid;
    int ndim = t->shape.ndim;
    size_t at[TB_MAX_DIMS] = {0};
    for (int d = 0; d < ndim; d++) {
        if (per_dim[d].count == 0)
            return TB_OK;
    }
    for (;;) {
        tb__place first = *place;
        shared_box box = {.other = tb__grid_rank(grid, place), .shape.ndim = ndim};
        bool is_first = true;
        for (int d = 0; d < ndim; d++) {
            run r = per_dim[d].item[at[d]];
            first.coord[d] = r.coord;
            box.shape.dim[d] = r.len;
            box.one_start[d] = r.first_start;
            box.other_start[d] = r.start;
            is_first = is_first && r.coord == place->coord[d] && r.first_start == r.start;
        }
        box.one = tb__grid_rank(grid, &first);
        if (!is_first)
            TB_TRY(compare_box(c, t, &box));
        int d = ndim - 1;
        while (d >= 0 && ++at[d] == per_dim[d].count)
            at[d--] = 0;
        if (d < 0)
            return TB_OK;
    }
}

static tb_status compare_shared(const tb__disk_comparer *c, const tb__disk_stored *t, int32_t rank) {
    const tb__grid *grid = t->grid;
    tb__arena arena = {0};
    runs per_dim[TB_MAX_DIMS] = {0};
    tb__place place;
    tb_status status = TB_OK;
    (void)tb__grid_place(grid, rank, &place);
    for (int d = 0; d < t->shape.ndim && status == TB_OK; d++)
        status = list_runs(&grid->axis[d], place.coord[d], &arena, &per_dim[d]);
    if (status == TB_OK)
        status = compare_boxes(c, t, &place, per_dim);
    for (int d = 0; d < TB_MAX_DIMS; d++)
        free(per_dim[d].item);
    tb__arena_fini(&arena);
    return status;
}

tb_status tb__disk_compare(const tb__disk_comparer *c, const tb__disk_stored *t, const tb__disk_comparison *what) {
    if (what->is_shared)
        return compare_shared(c, t, tb_layout_rank_at(t->layout, what->source));
    return compare_copies(c, t, what);
}
