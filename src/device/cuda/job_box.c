/* Copies, casts and reductions as descriptors of boxes: dimensions are merged where possible, and the kernel is chosen
 * by contiguity and alignment. */
#include "device/cuda/job.h"

#include "base/dtype.h"
#include "base/int.h"

#include <string.h>

enum {
    SLOT = 16,               /* bytes */
    PIECES_BELOW = 32 << 10, /* bytes of a contiguous copy that is cut into pieces */
    ENGINE_NBYTES = 1 << 20, /* of a contiguous copy from or to host memory that the copy engine does */
    ENGINE_COPIES = 64,      /* of a job, at most */
    TRANSPOSE_MIN = 16,      /* elements along both dimensions */
    FEW_SOURCES = 16,
};
#define MOST_ELEMENTS ((int64_t)1 << 30) /* of a box; counts of slots are below 2^31 */

/* A move with as few dimensions as possible, outermost first. Dimension i has the steps of the move's dim[i];
 * dimensions in which the destination goes backwards are reversed. */
typedef struct nest {
    const tb__move *move;
    const void *const *src;
    int64_t src_size, dst_size; /* bytes of an element; 1 where two share a byte */
    int pairs;                  /* the dimension along which they do; -1: none */
    bool is_packed;
    int ndim, dim[TB_MAX_DIMS];
    int64_t len[TB_MAX_DIMS];
    int64_t run; /* elements that are contiguous on all sides */
} nest;

/* Sides: -1 is the destination, others are sources. */

static int64_t dim_length(const nest *n, int d) {
    return d == n->pairs ? n->move->len[d] / 2 : n->move->len[d];
}

/* Bytes from an element to the next one along a dimension of the move. */
static int64_t step_of(const nest *n, int64_t side, int d) {
    int64_t stride = side < 0 ? n->move->dst_stride[d] : n->move->src_stride[side][d];
    int64_t step = stride * (side < 0 ? n->dst_size : n->src_size);
    if (n->is_packed && d != n->pairs)
        step /= 2;
    return n->move->dst_stride[d] < 0 ? -step : step;
}

/* Where the first element is; an offset, if it is in the run's buffer. */
static uintptr_t origin_of(const nest *n, int64_t side) {
    uintptr_t at = (uintptr_t)(side < 0 ? n->move->dst : n->src[side]);
    for (int d = 0; d < n->move->ndim; d++) {
        if (n->move->dst_stride[d] < 0)
            at -= (uintptr_t)((dim_length(n, d) - 1) * step_of(n, side, d));
    }
    return at;
}

static int64_t nsides(const nest *n) {
    return n->move->nsrc;
}

static bool is_outer(const nest *n, int a, int b) {
    int64_t x = step_of(n, -1, a), y = step_of(n, -1, b);
    if (x != y || n->move->nsrc == 0)
        return x > y;
    return llabs(step_of(n, 0, a)) > llabs(step_of(n, 0, b));
}

static bool can_merge(const nest *n, int outer, int inner) {
    for (int64_t k = -1; k < nsides(n); k++) {
        if (step_of(n, k, n->dim[outer]) != step_of(n, k, n->dim[inner]) * n->len[inner])
            return false;
    }
    return true;
}

static void collapse_dims(nest *n) {
    int order[TB_MAX_DIMS], ndim = 0;
    for (int d = 0; d < n->move->ndim; d++) {
        if (dim_length(n, d) == 1)
            continue;
        int i = ndim++;
        for (; i > 0 && is_outer(n, d, order[i - 1]); i--)
            order[i] = order[i - 1];
        order[i] = d;
    }
    for (int i = 0; i < ndim; i++) {
        int at = n->ndim++;
        n->dim[at] = order[i];
        n->len[at] = dim_length(n, order[i]);
        if (at > 0 && can_merge(n, at - 1, at)) {
            n->dim[at - 1] = order[i];
            n->len[at - 1] *= n->len[at];
            n->ndim--;
        }
    }
}

/* Takes the innermost dimension for the row, if it is contiguous on all sides. */
static void take_run(nest *n) {
    int last = n->ndim - 1;
    n->run = 1;
    if (last < 0)
        return;
    for (int64_t k = -1; k < nsides(n); k++) {
        if (step_of(n, k, n->dim[last]) != (k < 0 ? n->dst_size : n->src_size))
            return;
    }
    n->run = n->len[last];
    n->ndim = last;
}

static void make_nest(nest *n, const tb__move *move, const void *const *src) {
    bool is_packed = tb_dtype_bits(move->dst_dtype) == 4;
    *n = (nest){.move = move,
                .src = src,
                .is_packed = is_packed,
                .pairs = is_packed ? tb__move_packed_dim(move) : -1,
                .src_size = is_packed || !move->nsrc ? 1 : tb_dtype_bits(move->src_dtype) / 8,
                .dst_size = is_packed ? 1 : tb_dtype_bits(move->dst_dtype) / 8};
    collapse_dims(n);
    take_run(n);
}

/* ---- Descriptors ------------------------------------------------------------------------------------------------- */

static bool is_in_buffer(const tb__move *move, int64_t side) {
    if (side < 0)
        return move->is_dst_in_buffer;
    return move->src_mapping && move->src_mapping[side] == TB__IN_BUFFER;
}

/* All addresses and steps of a side, except those of one dimension of the nest (-1: none), or'ed. */
static uint64_t alignment_of(const nest *n, int64_t side, int but) {
    uint64_t bits = origin_of(n, side);
    for (int i = 0; i < n->ndim; i++) {
        if (i != but)
            bits |= (uint64_t)step_of(n, side, n->dim[i]);
    }
    return bits;
}

static uint64_t count_rows(const nest *n) {
    uint64_t rows = 1;
    for (int i = 0; i < n->ndim; i++)
        rows *= (uint64_t)n->len[i];
    return rows;
}

/* The box with its dimensions in the order of `order`, innermost first; NULL: that of the nest. */
static tb__cuda_box *add_box(tb__job *job, uint32_t gpu, const nest *n, const int *order, uint32_t *place) {
    const tb__move *move = n->move;
    size_t ndim = (size_t)n->ndim, more = move->nsrc > 1 ? move->nsrc - 1 : 0;
    size_t nbytes = sizeof(tb__cuda_box) + ndim * sizeof(tb__cuda_dim) + more * (2 + ndim) * sizeof(int64_t);
    tb__cuda_box *box = tb__cuda_heap_add(&job->gpus[gpu], nbytes, place);
    if (!box)
        return NULL;
    *box = (tb__cuda_box){.dst = origin_of(n, -1),
                          .flags = move->is_dst_in_buffer ? TB__CUDA_DST_IN_BUFFER : 0,
                          .nsrc = move->nsrc,
                          .ndim = (uint32_t)ndim,
                          .run = n->run,
                          .src_dtype = (uint8_t)move->src_dtype,
                          .wire_dtype = (uint8_t)move->wire_dtype,
                          .dst_dtype = (uint8_t)move->dst_dtype,
                          .op = (uint8_t)move->op};
    if (move->nsrc)
        box->src = origin_of(n, 0);
    else
        box->flags |= TB__CUDA_ZERO;
    if (move->nsrc && is_in_buffer(move, 0))
        box->flags |= TB__CUDA_SRC_IN_BUFFER;
    tb__cuda_dim *dim = (tb__cuda_dim *)(box + 1);
    for (int i = 0; i < n->ndim; i++) {
        int d = order ? order[i] : n->ndim - 1 - i;
        dim[i] = (tb__cuda_dim){.len = tb__cuda_divide_by((uint32_t)n->len[d]),
                                .dst_step = step_of(n, -1, n->dim[d]),
                                .src_step = move->nsrc ? step_of(n, 0, n->dim[d]) : 0};
    }
    int64_t *source = (int64_t *)(dim + ndim);
    for (uint32_t k = 1; k < move->nsrc; k++) {
        bool is_there = is_in_buffer(move, k);
        *source++ = (int64_t)origin_of(n, k);
        *source++ = is_there ? TB__CUDA_SRC_IN_BUFFER : 0;
        for (int i = 0; i < n->ndim; i++)
            *source++ = step_of(n, k, n->dim[n->ndim - 1 - i]);
        box->flags |= is_there ? TB__CUDA_ANY_IN_BUFFER : 0;
    }
    return box;
}

/* Tiles for all slots of the box, so many to a row. */
static tb_status add_rows(tb__job *job, uint32_t gpu, const nest *n, tb__cuda_box *box, uint32_t place, int kernel,
                          uint64_t per_row) {
    uint64_t nslots = count_rows(n) * per_row, slots = tb__cuda_kernel_shapes[kernel].slots;
    box->nrows = (uint32_t)count_rows(n);
    box->per_row = tb__cuda_divide_by((uint32_t)per_row);
    box->nslots = (uint32_t)nslots;
    return tb__cuda_add_tiles(job, gpu, kernel, place, 0, (uint32_t)((nslots + slots - 1) / slots));
}

/* The same; tiles do not cross rows where that leaves few of their slots unused. */
static tb_status add_tiled_rows(tb__job *job, uint32_t gpu, const nest *n, tb__cuda_box *box, uint32_t place,
                                int kernel, uint64_t per_row) {
    const tb__cuda_kernel_shape *shape = &tb__cuda_kernel_shapes[kernel];
    uint64_t slots = shape->slots / shape->blocks, tiles = (per_row + slots - 1) / slots;
    if (tiles * slots > per_row + per_row / 8)
        return add_rows(job, gpu, n, box, place, kernel, per_row);
    uint64_t ntiles = count_rows(n) * tiles;
    box->flags |= TB__CUDA_ROW_TILES;
    box->nrows = (uint32_t)count_rows(n);
    box->per_row = tb__cuda_divide_by((uint32_t)tiles);
    box->nslots = (uint32_t)per_row;
    return tb__cuda_add_tiles(job, gpu, kernel, place, 0, (uint32_t)((ntiles + shape->blocks - 1) / shape->blocks));
}

/* ---- Plain copies ------------------------------------------------------------------------------------------------ */

static tb_status add_transfer(tb__job *job, uint32_t gpu, const nest *n) {
    tb__cuda_part_of_gpu *part = &job->gpus[gpu];
    tb__cuda_transfer t = {.src = origin_of(n, 0), .dst = origin_of(n, -1), .nbytes = (uint64_t)(n->run * n->dst_size)};
    if (!tb__vec_push(&part->transfers, t))
        return TB_NO_MEMORY;
    return tb__cuda_add_step(job, gpu, TB__CUDA_NKERNELS, (uint32_t)part->transfers.count - 1, 1);
}

static tb_status add_pieces(tb__job *job, uint32_t gpu, const nest *n, bool is_aligned) {
    uint32_t left = (uint32_t)(n->run * n->dst_size);
    int kernel = !is_aligned                    ? TB__CUDA_copy_shifted_pieces
                 : left <= TB__CUDA_SMALL_PIECE ? TB__CUDA_copy_small_pieces
                                                : TB__CUDA_copy_pieces;
    tb__cuda_part_of_gpu *part = &job->gpus[gpu];
    tb__cuda_piece piece = {.dst = origin_of(n, -1), .flags = is_in_buffer(n->move, -1) ? TB__CUDA_DST_IN_BUFFER : 0};
    uint32_t first = part->nitems[kernel];
    if (n->move->nsrc) {
        piece.src = origin_of(n, 0);
        piece.flags |= is_in_buffer(n->move, 0) ? TB__CUDA_SRC_IN_BUFFER : 0;
    } else {
        piece.src = piece.dst;
        piece.flags |= TB__CUDA_ZERO | (piece.flags & TB__CUDA_DST_IN_BUFFER ? TB__CUDA_SRC_IN_BUFFER : 0);
    }
    while (left > 0) {
        /* Cut where a line of the cache begins. */
        uint32_t most = TB__CUDA_PIECE_MAX - (uint32_t)(piece.dst & 127);
        piece.nbytes = left < most ? left : most;
        if (!tb__vec_reserve(&part->items[kernel], sizeof piece))
            return TB_NO_MEMORY;
        memcpy(part->items[kernel].item + part->items[kernel].count, &piece, sizeof piece);
        part->items[kernel].count += sizeof piece;
        part->nitems[kernel]++;
        piece.src += piece.nbytes;
        piece.dst += piece.nbytes;
        left -= piece.nbytes;
    }
    return tb__cuda_add_step(job, gpu, kernel, first, part->nitems[kernel] - first);
}

/* The dimension along which the source is contiguous, if it is not the destination's; -1: none. */
static int find_transposed(const nest *n, int64_t unit) {
    int last = n->ndim - 1;
    if (n->move->nsrc == 0 || last < 1 || step_of(n, -1, n->dim[last]) != unit || n->len[last] < TRANSPOSE_MIN)
        return -1;
    for (int i = 0; i < last; i++) {
        if (step_of(n, 0, n->dim[i]) == unit && n->len[i] >= TRANSPOSE_MIN)
            return i;
    }
    return -1;
}

static tb_status add_transpose(tb__job *job, uint32_t gpu, const nest *n, int64_t unit, int along) {
    int order[TB_MAX_DIMS] = {n->ndim - 1, along}, count = 2;
    for (int i = n->ndim - 2; i >= 0; i--) {
        if (i != along)
            order[count++] = i;
    }
    uint32_t place;
    tb__cuda_box *box = add_box(job, gpu, n, order, &place);
    if (!box)
        return TB_NO_MEMORY;
    int kernel = unit == 1   ? TB__CUDA_transpose_1
                 : unit == 2 ? TB__CUDA_transpose_2
                 : unit == 4 ? TB__CUDA_transpose_4
                             : TB__CUDA_transpose_8;
    int64_t side = unit == 8 ? TB__CUDA_TRANSPOSE_SIDE / 2 : TB__CUDA_TRANSPOSE_SIDE, packed = unit < 4 ? 4 / unit : 1;
    int64_t tiles0 = (n->len[n->ndim - 1] + side * packed - 1) / (side * packed),
            tiles1 = (n->len[along] + side - 1) / side, outer = 1;
    for (int i = 2; i < n->ndim; i++)
        outer *= n->len[order[i]];
    box->run = unit;
    box->per_row = tb__cuda_divide_by((uint32_t)tiles0);
    box->across = tb__cuda_divide_by((uint32_t)tiles1);
    box->nslots = (uint32_t)(tiles0 * tiles1 * outer);
    box->flags |= alignment_of(n, 0, along) % SLOT ? 0 : TB__CUDA_ALIGNED_SRC;
    box->flags |= alignment_of(n, -1, n->ndim - 1) % SLOT ? 0 : TB__CUDA_ALIGNED_DST;
    return tb__cuda_add_tiles(job, gpu, kernel, place, 0, box->nslots);
}

/* Rows of so many bytes, in steps of 1, 2, 4 or 8. */
static tb_status add_any(tb__job *job, uint32_t gpu, const nest *n, int64_t run, int64_t unit) {
    uint32_t place;
    tb__cuda_box *box = add_box(job, gpu, n, NULL, &place);
    if (!box)
        return TB_NO_MEMORY;
    box->run = run;
    box->unit = (uint32_t)unit;
    return add_rows(job, gpu, n, box, place, TB__CUDA_copy_any, (uint64_t)(run / unit));
}

static tb_status add_plain_rows(tb__job *job, uint32_t gpu, const nest *n, int64_t run, bool is_aligned) {
    uint32_t place;
    tb__cuda_box *box = add_box(job, gpu, n, NULL, &place);
    if (!box)
        return TB_NO_MEMORY;
    box->run = run;
    if (!is_aligned) /* slots are aligned in the destination: a row may begin and end inside of one */
        return add_rows(job, gpu, n, box, place, TB__CUDA_copy_shifted_rows, (uint64_t)(run + SLOT - 2) / SLOT + 1);
    uint64_t per_row = (uint64_t)run / SLOT;
    uint64_t tiles = count_rows(n) * per_row / tb__cuda_kernel_shapes[TB__CUDA_copy_rows].slots;
    uint64_t blocks = tb__cuda_kernel_shapes[TB__CUDA_copy_long_rows].blocks;
    bool is_long = (tiles + blocks - 1) / blocks * blocks <= tiles + tiles / 8; /* few blocks have nothing to do */
    return add_tiled_rows(job, gpu, n, box, place, is_long ? TB__CUDA_copy_long_rows : TB__CUDA_copy_rows, per_row);
}

/* Whether pinned memory is in one registration: the driver refuses copies that cross from one to the next. */
static bool is_one_registration(uint64_t address, int64_t nbytes) {
    CUdeviceptr begin = 0;
    size_t size = 0;
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void *values[] = {&begin, &size};
    return tb__cuda.cuPointerGetAttributes(2, which, values, address) == CUDA_SUCCESS && begin <= address &&
           address + (uint64_t)nbytes <= begin + size;
}

/* Whether the copy engine takes it: long, contiguous, and from or to host memory. */
static bool suits_engine(const tb__job *job, uint32_t gpu, const nest *n, int64_t run) {
    if (n->move->nsrc == 0 || n->ndim > 0 || run < ENGINE_NBYTES || job->host.count == 0 ||
        job->gpus[gpu].transfers.count >= ENGINE_COPIES || is_in_buffer(n->move, 0) || is_in_buffer(n->move, -1))
        return false;
    uintptr_t src = origin_of(n, 0), dst = origin_of(n, -1);
    bool is_src_host = tb__cuda_is_host(&job->host, src), is_dst_host = tb__cuda_is_host(&job->host, dst);
    return is_src_host != is_dst_host && is_one_registration(is_src_host ? src : dst, run);
}

static tb_status add_plain(tb__job *job, uint32_t gpu, const nest *n) {
    int64_t run = n->run * n->dst_size;
    uint64_t bits = alignment_of(n, -1, -1) | (uint64_t)run;
    if (n->move->nsrc)
        bits |= alignment_of(n, 0, -1);
    bool is_aligned = bits % SLOT == 0;
    if (suits_engine(job, gpu, n, run))
        return add_transfer(job, gpu, n);
    if (n->ndim == 0 && run < PIECES_BELOW)
        return add_pieces(job, gpu, n, is_aligned);
    if (run >= SLOT)
        return add_plain_rows(job, gpu, n, run, is_aligned);
    int64_t unit = (int64_t)(bits & -bits);
    unit = unit < 8 ? unit : 8;
    int along = unit == run ? find_transposed(n, unit) : -1;
    return along < 0 ? add_any(job, gpu, n, run, unit) : add_transpose(job, gpu, n, unit, along);
}

/* ---- Casts and reductions ---------------------------------------------------------------------------------------- */

/* By the bytes of an element of source and destination; -1: use number_any. */
static int kernel_for(const tb__move *move, bool is_cast) {
    static const int casts[3][3] = {
        {TB__CUDA_cast_1_1, TB__CUDA_cast_1_2, TB__CUDA_cast_1_4},
        {TB__CUDA_cast_2_1, TB__CUDA_cast_2_2, TB__CUDA_cast_2_4},
        {TB__CUDA_cast_4_1, TB__CUDA_cast_4_2, TB__CUDA_cast_4_4},
    };
    static const int reductions[3][3] = {
        {-1, -1, -1},
        {-1, TB__CUDA_reduce_2_2, TB__CUDA_reduce_2_4},
        {-1, TB__CUDA_reduce_4_2, TB__CUDA_reduce_4_4},
    };
    if (!tb__dtype_is_small_float(move->src_dtype) || !tb__dtype_is_small_float(move->dst_dtype))
        return -1;
    unsigned s = tb_dtype_bits(move->src_dtype) / 16, d = tb_dtype_bits(move->dst_dtype) / 16; /* 0, 1, 2 */
    return is_cast ? casts[s][d] : reductions[s][d];
}

static tb_status add_numbers(tb__job *job, uint32_t gpu, const nest *n) {
    const tb__move *move = n->move;
    bool is_cast = move->nsrc == 1 && move->avg_divisor <= 1;
    int64_t slot = SLOT / tb__max64(n->src_size, n->dst_size); /* elements */
    uint32_t place;
    tb__cuda_box *box = add_box(job, gpu, n, NULL, &place);
    if (!box)
        return TB_NO_MEMORY;
    /* 8- and 16-bit floats are reduced in f32. */
    tb_dtype from = is_cast || !tb__dtype_is_small_float(move->src_dtype) ? move->src_dtype : TB_F32;
    box->has_wire = from != move->wire_dtype && move->wire_dtype != move->dst_dtype;
    if (move->avg_divisor > 1) {
        box->divisor = (float)move->avg_divisor;
        box->double_divisor = (double)move->avg_divisor;
    }
    int kernel = kernel_for(move, is_cast);
    if (kernel < 0 || n->run < slot)
        return add_rows(job, gpu, n, box, place, TB__CUDA_number_any, (uint64_t)n->run);
    uint64_t bits = 0;
    for (uint32_t k = 0; k < move->nsrc; k++)
        bits |= alignment_of(n, k, -1);
    box->flags |= bits % (uint64_t)(slot * n->src_size) ? 0 : TB__CUDA_ALIGNED_SRC;
    box->flags |= alignment_of(n, -1, -1) % (uint64_t)(slot * n->dst_size) ? 0 : TB__CUDA_ALIGNED_DST;
    return add_tiled_rows(job, gpu, n, box, place, kernel, (uint64_t)((n->run + slot - 1) / slot));
}

/* ---- Moves ------------------------------------------------------------------------------------------------------- */

/* One half after the other: along the longest dimension, at an even index. */
static tb_status add_halves(tb__job *job, uint32_t gpu, const tb__move *move, const void *const *src) {
    const void *few[FEW_SOURCES] = {0}, **moved = few;
    int longest = 0;
    for (int d = 1; d < move->ndim; d++)
        longest = move->len[d] > move->len[longest] ? d : longest;
    tb__move half = *move;
    int64_t at = move->len[longest] / 4 * 2;
    half.len[longest] = at;
    TB_TRY(tb__cuda_add_copy(job, gpu, &half, src));
    if (move->nsrc > FEW_SOURCES && !(moved = tb__malloc(move->nsrc, sizeof *moved)))
        return TB_NO_MEMORY;
    for (uint32_t k = 0; k < move->nsrc; k++)
        moved[k] = (const char *)src[k] + tb__dtype_offset(move->src_dtype, at * move->src_stride[k][longest]);
    half.dst = (char *)move->dst + tb__dtype_offset(move->dst_dtype, at * move->dst_stride[longest]);
    half.len[longest] = move->len[longest] - at;
    tb_status status = tb__cuda_add_copy(job, gpu, &half, moved);
    if (moved != few)
        free(moved);
    return status;
}

tb_status tb__cuda_add_copy(tb__job *job, uint32_t gpu, const tb__move *move, const void *const *src) {
    int64_t elements = 1;
    for (int d = 0; d < move->ndim; d++)
        elements *= move->len[d];
    if (elements > MOST_ELEMENTS)
        return add_halves(job, gpu, move, src);
    nest n;
    make_nest(&n, move, src);
    bool is_plain = move->nsrc == 0 || (move->nsrc == 1 && move->avg_divisor <= 1 &&
                                        move->src_dtype == move->wire_dtype && move->wire_dtype == move->dst_dtype);
    return is_plain ? add_plain(job, gpu, &n) : add_numbers(job, gpu, &n);
}
