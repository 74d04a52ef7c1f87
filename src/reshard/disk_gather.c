/* Boxes from the files of source ranks to memory: data is read, cast, combined and written to its place. */
#include "reshard/disk_inside.h"

#include "base/dtype.h"
#include "device/host/move.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <string.h>

enum {
    GAP = 4 << 10,         /* fewer bytes than this between two runs are read along: cheaper than a second call */
    DIRECT_RUN = 16 << 10, /* runs at least this long are read to their places at once */
};

void tb__disk_gather_fini(tb__disk_gather *g) {
    free(g->sources.item);
    free(g->from.item);
    free(g->strides.item);
}

static tb_status find_sources(tb__disk_gather *g, const tb__disk_piece *piece) {
    g->sources.count = g->from.count = g->strides.count = 0;
    if (!tb__vec_reserve(&g->sources, piece->nsources) || !tb__vec_reserve(&g->from, piece->nsources) ||
        !tb__vec_reserve(&g->strides, piece->nsources))
        return TB_NO_MEMORY;
    for (uint32_t i = 0; i < piece->nsources; i++) {
        tb__disk_origin *origin = &g->sources.item[g->sources.count++];
        TB_TRY(tb__disk_origin_find(g->input, piece->from, piece->sources[i], origin));
        memcpy(g->strides.item[g->strides.count++].dim, piece->src_stride, sizeof piece->src_stride);
        g->from.item[g->from.count++] = NULL;
    }
    return TB_OK;
}

/* Whether runs that are long and contiguous at both ends make up the piece; *run is their elements, *outer how many
 * dimensions are to be stepped through. */
static bool is_direct(const tb__disk_piece *piece, tb_dtype dtype, int64_t *run, int *outer) {
    if (piece->nsources != 1 || piece->from->dtype != dtype || piece->from->quant.format.kind)
        return false;
    int64_t n = 1;
    int d = piece->ndim;
    while (d > 0 && (piece->len[d - 1] == 1 || (piece->src_stride[d - 1] == n && piece->dst_stride[d - 1] == n)))
        n *= piece->len[--d];
    *run = n;
    *outer = d;
    return d == 0 || tb__dtype_bytes(dtype, n) >= DIRECT_RUN;
}

/* Steps through the indices of dims 0 .. ndim-1; false once all were seen. */
static bool next_index(int64_t *index, const int64_t *len, const int64_t *step, int ndim) {
    for (int d = ndim - 1; d >= 0; d--) {
        index[d] += step ? step[d] : 1;
        if (index[d] < len[d])
            return true;
        index[d] = 0;
    }
    return false;
}

static int64_t offset_of(const int64_t *index, const int64_t *stride, int ndim) {
    int64_t sum = 0;
    for (int d = 0; d < ndim; d++)
        sum += index[d] * stride[d];
    return sum;
}

static tb_status read_direct(const tb__disk_gather *g, const tb__disk_piece *piece, void *to, tb_dtype dtype,
                             int64_t run, int outer) {
    const tb__disk_source *source = &g->sources.item[0].data;
    int64_t index[TB_MAX_DIMS] = {0};
    do {
        int64_t from = tb__dtype_bytes(dtype, piece->src + offset_of(index, piece->src_stride, outer));
        int64_t at = tb__dtype_bytes(dtype, offset_of(index, piece->dst_stride, outer));
        TB_TRY(tb__safetensors_read(source->file, source->tensor, from, (size_t)tb__dtype_bytes(dtype, run),
                                    (char *)to + at));
    } while (next_index(index, piece->len, NULL, outer));
    return TB_OK;
}

/* How a box is cut for the stage: `step` indices of each dimension at a time. */
typedef struct cutting {
    int64_t step[TB_MAX_DIMS];
} cutting;

/* As much at once as fits in and is not mostly gaps. */
static cutting cut_for_stage(const tb__disk_stored *t, const tb__disk_piece *piece, int64_t capacity) {
    const int64_t *stride = piece->src_stride;
    int64_t span = tb__dtype_packing(t->dtype); /* elements from the first to the last, of the dims so far */
    int64_t most = capacity * 8 / tb_dtype_bits(t->dtype), gap = (int64_t)GAP * 8 / tb_dtype_bits(t->dtype);
    cutting cut;
    int d = piece->ndim - 1;
    for (; d >= 0; d--) {
        int64_t all = stride[d] * (piece->len[d] - 1) + span;
        if (piece->len[d] > 1 && (stride[d] - span > gap || all > most))
            break;
        cut.step[d] = piece->len[d];
        span = piece->len[d] > 1 ? all : span;
    }
    if (d >= 0) {
        int64_t n = stride[d] - span > gap || span > most ? 1 : (most - span) / stride[d] + 1;
        int64_t packing = d == piece->ndim - 1 ? tb__dtype_packing(t->dtype) : 1;
        n -= n % packing;
        cut.step[d--] = n > packing ? n : packing;
    }
    for (; d >= 0; d--)
        cut.step[d] = 1;
    return cut;
}

/* Brings a box of `len`, which is cut for the stage, into it: as it lies in the files from an element on or, where it
 * is quantised, as numbers side by side, from the indices `start` on. */
static tb_status load_box(tb__disk_gather *g, const tb__disk_piece *piece, int64_t first, const int64_t *start,
                          const int64_t *len, size_t each) {
    const tb__disk_stored *t = piece->from;
    for (size_t i = 0; i < g->sources.count; i++) {
        const tb__disk_origin *origin = &g->sources.item[i];
        unsigned char *place = g->stage + i * each;
        int64_t *stride = g->strides.item[i].dim, span = 1;
        g->from.item[i] = place;
        if (t->quant.format.kind) {
            TB_TRY(tb__disk_dequantise(t, origin, start, len, place, each, &g->from.item[i], stride));
            continue;
        }
        for (int d = 0; d < piece->ndim; d++)
            span += stride[d] * (len[d] - 1);
        TB_TRY(tb__safetensors_read(origin->data.file, origin->data.tensor, tb__dtype_bytes(t->dtype, first),
                                    (size_t)tb__dtype_bytes(t->dtype, span), place));
    }
    return TB_OK;
}

/* A quantised source has no view: the piece's dims are those of the rank's part, of which it may lack some that are 1
 * long. They are put in order again, and *start is where the piece begins. */
static void use_part_dims(const tb__disk_origin *origin, tb__disk_piece *piece, int64_t *start) {
    const tb__disk_piece from = *piece;
    int64_t stride = 1, rest = from.src;
    piece->ndim = origin->shape.ndim;
    for (int a = piece->ndim - 1; a >= 0; a--) {
        int64_t length = origin->shape.dim[a];
        piece->len[a] = 1;
        piece->src_stride[a] = stride;
        piece->dst_stride[a] = 0;
        for (int d = 0; d < from.ndim && length > 1; d++) {
            if (from.src_stride[d] == stride) {
                piece->len[a] = from.len[d];
                piece->dst_stride[a] = from.dst_stride[d];
            }
        }
        start[a] = rest % length;
        rest /= length;
        stride *= length;
    }
}

static tb_status read_staged(tb__disk_gather *g, tb__disk_piece *piece, void *to, tb_dtype dtype) {
    const tb__disk_stored *t = piece->from;
    size_t each = g->stage_nbytes / piece->nsources / 64 * 64; /* of the stage, for every source */
    int64_t index[TB_MAX_DIMS] = {0}, begin[TB_MAX_DIMS] = {0}, start[TB_MAX_DIMS] = {0};
    cutting cut = {0};
    bool fits = each > 0;
    if (t->quant.format.kind)
        use_part_dims(&g->sources.item[0], piece, begin);
    if (fits && t->quant.format.kind)
        fits = tb__disk_dequant_step(t, piece->len, (int64_t)each, cut.step);
    else if (fits)
        cut = cut_for_stage(t, piece, (int64_t)each);
    if (!fits)
        return tb__fail(TB_TOO_BIG, "tensor '%.100s' is combined from %" PRIu32 " ranks; that takes more memory",
                        t->name, piece->nsources);
    do {
        tb__move copy = {.ndim = piece->ndim, .nsrc = piece->nsources, .src = g->from.item, .src_dtype = t->dtype};
        int64_t first = piece->src + offset_of(index, piece->src_stride, piece->ndim);
        for (int d = 0; d < piece->ndim; d++) {
            int64_t left = piece->len[d] - index[d];
            start[d] = begin[d] + index[d];
            copy.len[d] = left < cut.step[d] ? left : cut.step[d];
            copy.dst_stride[d] = piece->dst_stride[d];
        }
        TB_TRY(load_box(g, piece, first, start, copy.len, each));
        copy.src_stride = (const int64_t(*)[TB_MAX_DIMS])g->strides.item;
        copy.wire_dtype = piece->wire_dtype;
        copy.dst_dtype = dtype;
        copy.op = piece->op;
        copy.avg_divisor = piece->avg_divisor;
        copy.dst = (char *)to + tb__dtype_bytes(dtype, offset_of(index, piece->dst_stride, piece->ndim));
        TB_TRY(tb__move_check(&copy));
        tb__move_run(&copy, tb__move_whole(&copy), false);
    } while (next_index(index, piece->len, cut.step, piece->ndim));
    return TB_OK;
}

static tb_status write_zeros(const tb__disk_piece *piece, void *to, tb_dtype dtype) {
    tb__move copy = {.ndim = piece->ndim, .dst = to, .dst_dtype = dtype};
    for (int d = 0; d < copy.ndim; d++) {
        copy.len[d] = piece->len[d];
        copy.dst_stride[d] = piece->dst_stride[d];
    }
    TB_TRY(tb__move_check(&copy));
    tb__move_run(&copy, tb__move_whole(&copy), false);
    return TB_OK;
}

tb_status tb__disk_gather_piece(tb__disk_gather *g, const tb__disk_piece *wanted, void *to, tb_dtype dtype) {
    int64_t run;
    int outer;
    tb__disk_piece piece = *wanted;
    if (piece.nsources == 0)
        return write_zeros(&piece, to, dtype);
    tb__disk_piece_join(&piece, false);
    TB_TRY(find_sources(g, &piece));
    if (is_direct(&piece, dtype, &run, &outer))
        return read_direct(g, &piece, to, dtype, run, outer);
    return read_staged(g, &piece, to, dtype);
}
