/* Casts and reductions. A tile is a box of at most TILE elements that fits the first-level cache together with its
 * result: sources that are not packed are gathered, the kernels run over rows, and the result is scattered if the
 * destination is not packed. Rows that are contiguous everywhere are read in place. */
#include "device/host/tile.h"

#include "base/dtype.h"
#include "device/host/bytes.h"
#include "device/host/cast.h"
#include "device/host/kernel.h"

#include <stdlib.h>
#include <string.h>

enum {
    TILE = 2048,
    ROW = 128,
    ROWS = 8, /* of a tile that is read in rows, in pieces of so many elements */
    PIECE = 64,
    SIDE = 64, /* of a tile, where source and destination run along different dimensions */
};

/* Scratch for one element may be 8 bytes wide. */
typedef struct scratch {
    char acc[TILE * 8], packed[TILE * 8], wire[TILE * 8], out[TILE * 8];
} scratch __attribute__((aligned(64)));

/* The part of the copy with as few dimensions as possible, outermost first. Dimension d has the steps of the copy's
 * dim[d]. */
typedef struct nest {
    const tb__move *copy;
    tb__move_share part;
    const tb__kernels *kernels;
    bool stream;
    tb__reduce_fn *reduce; /* for rows that are in place on all sides; NULL: step by step */
    bool by_rows;
    tb__narrow_rows_fn *narrow_rows; /* by rows, and straight to the destination */
    size_t src_size, dst_size;
    int ndim;
    int dim[TB_MAX_DIMS];
    int64_t len[TB_MAX_DIMS], tile[TB_MAX_DIMS];
} nest;

static size_t size_of(tb_dtype dtype) {
    return tb_dtype_bits(dtype) / 8;
}

static const int64_t *strides_of(const nest *n, int64_t source) {
    return source < 0 ? n->copy->dst_stride : n->copy->src_stride[source];
}

static bool can_merge(const nest *n, int outer, int inner) {
    for (int64_t k = -1; k < (int64_t)n->copy->nsrc; k++) {
        const int64_t *stride = strides_of(n, k);
        if (stride[n->dim[outer]] != stride[n->dim[inner]] * n->len[inner])
            return false;
    }
    return true;
}

static bool is_outer(const tb__move *copy, int a, int b) {
    int64_t x = llabs(copy->dst_stride[a]), y = llabs(copy->dst_stride[b]);
    return x != y ? x > y : llabs(copy->src_stride[0][a]) > llabs(copy->src_stride[0][b]);
}

static int64_t dim_length(const nest *n, int d) {
    return d == n->part.dim ? n->part.hi - n->part.lo : n->copy->len[d];
}

static void collapse_dims(nest *n) {
    const tb__move *copy = n->copy;
    int order[TB_MAX_DIMS], ndim = 0;
    for (int d = 0; d < copy->ndim; d++) {
        if (dim_length(n, d) == 1)
            continue;
        int i = ndim++;
        for (; i > 0 && is_outer(copy, d, order[i - 1]); i--)
            order[i] = order[i - 1];
        order[i] = d;
    }
    for (int i = 0; i < ndim; i++) {
        int d = order[i], at = n->ndim++;
        n->dim[at] = d;
        n->len[at] = dim_length(n, d);
        if (at > 0 && can_merge(n, at - 1, at)) {
            n->dim[at - 1] = d;
            n->len[at - 1] *= n->len[at];
            n->ndim--;
        }
    }
}

/* The kernel that makes the destination from the sources directly, if there is one. */
static tb__reduce_fn *whole_reduction(const nest *n) {
    const tb__move *copy = n->copy;
    if (copy->nsrc < 2 || copy->nsrc > TB__COMBINE_MAX || copy->avg_divisor > 1 ||
        copy->src_dtype != copy->wire_dtype || copy->wire_dtype != copy->dst_dtype)
        return NULL;
    return n->kernels->reduce[copy->src_dtype][copy->op];
}

/* The kernel that narrows rows from source to destination directly, if there is one. */
static tb__narrow_rows_fn *whole_rows(const nest *n) {
    const tb__move *copy = n->copy;
    bool is_one_cast = copy->wire_dtype == copy->src_dtype || copy->wire_dtype == copy->dst_dtype;
    uint64_t steps = (uintptr_t)copy->dst;
    for (int d = 0; d < n->ndim - 1; d++)
        steps |= (uint64_t)copy->dst_stride[n->dim[d]] * n->dst_size;
    if (n->part.dim >= 0)
        steps |= (uint64_t)(n->part.lo * copy->dst_stride[n->part.dim]) * n->dst_size;
    return n->stream && copy->src_dtype == TB_F32 && is_one_cast && steps % 32 == 0
               ? n->kernels->narrow_rows[copy->dst_dtype]
               : NULL;
}

/* Whether the innermost dimension is contiguous on all sides, and long enough to be a tile by itself. */
static bool has_rows(const nest *n) {
    int last = n->ndim - 1;
    for (int64_t k = -1; k < (int64_t)n->copy->nsrc; k++) {
        if (strides_of(n, k)[n->dim[last]] != 1)
            return false;
    }
    return n->len[last] >= ROW;
}

/* Rows as long as possible where the sources run along with the destination; else squares, so that whole cache lines
 * of both sides are used. */
static void choose_tile(nest *n) {
    int last = n->ndim - 1;
    int64_t budget = TILE;
    for (int d = 0; d <= last; d++)
        n->tile[d] = 1;
    if (last < 0)
        return;
    if (has_rows(n)) {
        /* A row that needs no scratch memory is not cut. */
        n->reduce = whole_reduction(n);
        n->tile[last] = n->len[last] < TILE || n->reduce ? n->len[last] : TILE;
        /* Several sources are several rows. One source that has gaps is read in several rows, too. */
        n->by_rows = n->copy->nsrc == 1 && n->copy->avg_divisor <= 1 && last > 0 && n->len[last - 1] >= ROWS;
        if (n->by_rows) {
            n->narrow_rows = whole_rows(n);
            n->tile[last] = n->len[last] < TILE / ROWS || n->narrow_rows ? n->len[last] : TILE / ROWS;
            n->tile[last - 1] = ROWS;
        }
        return;
    }
    const int64_t *src = n->copy->src_stride[0];
    int along = last;
    for (int d = 0; d < last; d++) {
        if (llabs(src[n->dim[d]]) < llabs(src[n->dim[along]]))
            along = d;
    }
    if (along != last) {
        n->tile[along] = n->len[along] < SIDE / 2 ? n->len[along] : SIDE / 2;
        budget /= n->tile[along];
    }
    for (int d = last; d >= 0 && budget > 1; d--) {
        if (d == along && d != last)
            continue;
        n->tile[d] = n->len[d] < budget ? n->len[d] : budget;
        budget /= n->tile[d];
    }
}

/* Whether a tile of these lengths is a row without gaps. */
static bool is_row(const nest *n, const int64_t *stride, const int64_t *len, size_t count) {
    int64_t expected = (int64_t)count;
    for (int d = 0; d < n->ndim; d++) {
        expected /= len[d];
        if (len[d] > 1 && stride[n->dim[d]] != expected)
            return false;
    }
    return true;
}

/* The box between a tile's place in memory and a row. */
static tb__byte_box row_box(const nest *n, const int64_t *stride, const int64_t *len, size_t count, size_t size) {
    tb__byte_box box = {.ndim = n->ndim, .run = size};
    int64_t packed = (int64_t)count;
    for (int d = 0; d < n->ndim; d++) {
        packed /= len[d];
        box.len[d] = len[d];
        box.src_step[d] = stride[n->dim[d]] * (int64_t)size;
        box.dst_step[d] = packed * (int64_t)size;
    }
    return box;
}

static int64_t offset_of(const nest *n, const int64_t *stride, const int64_t *index) {
    int64_t offset = n->part.dim < 0 ? 0 : n->part.lo * stride[n->part.dim];
    for (int d = 0; d < n->ndim; d++)
        offset += index[d] * stride[n->dim[d]];
    return offset;
}

/* The tile at `index` of one source: in place if it is a row, else gathered into `packed`. */
static const void *source_row(const nest *n, uint32_t k, const int64_t *index, const int64_t *len, size_t count,
                              char *packed) {
    const int64_t *stride = n->copy->src_stride[k];
    const char *from = (const char *)n->copy->src[k] + offset_of(n, stride, index) * (int64_t)n->src_size;
    if (is_row(n, stride, len, count)) {
        /* Touch the pages of the next tile, which mostly follows. */
        for (size_t at = 0; at < count * n->src_size && !n->reduce; at += TB__PAGE)
            tb__touch(from + count * n->src_size + at);
        return from;
    }
    tb__byte_box box = row_box(n, stride, len, count, n->src_size);
    box.src = from;
    box.dst = packed;
    tb__bytes_move(&box, false);
    return packed;
}

static void divide_row(tb_dtype dtype, void *acc, size_t count, uint64_t divisor) {
    if (dtype == TB_F64) {
        typedef double any __attribute__((aligned(1), may_alias));
        any *a = acc;
        for (size_t i = 0; i < count; i++)
            a[i] /= (double)divisor;
    } else {
        typedef float any __attribute__((aligned(1), may_alias));
        any *a = acc;
        for (size_t i = 0; i < count; i++)
            a[i] /= (float)divisor;
    }
}

/* Reduces into `acc`, which may be the destination itself. */
static void reduce_tile(const nest *n, const int64_t *index, const int64_t *len, size_t count, char *acc,
                        char *packed) {
    const tb__move *copy = n->copy;
    tb__combine_fn *combine = n->kernels->combine[copy->src_dtype][copy->op];
    if (!combine)
        combine = tb__kernels_portable.combine[copy->src_dtype][copy->op];
    uint32_t k = 0;
    do {
        /* There is room for one gathered source at a time; it ends the group. */
        const void *group[TB__COMBINE_MAX];
        uint32_t size = 0;
        bool full = false, resume = k > 0;
        while (k < copy->nsrc && size < TB__COMBINE_MAX && !full) {
            group[size] = source_row(n, k++, index, len, count, packed);
            full = group[size++] == packed;
        }
        combine(acc, group, size, count, resume);
    } while (k < copy->nsrc);
    if (copy->avg_divisor > 1)
        divide_row(copy->src_dtype, acc, count, copy->avg_divisor);
}

/* Converts `row`, of dtype `from`, by way of the wire dtype to `out`. */
static void finish_row(const nest *n, const void *row, tb_dtype from, void *out, size_t count, char *wire) {
    tb_dtype mid = n->copy->wire_dtype, to = n->copy->dst_dtype;
    if (from == mid || mid == to) {
        tb__cast_row(out, to, row, from, count);
        return;
    }
    tb__cast_row(wire, mid, row, from, count);
    tb__cast_row(out, to, wire, mid, count);
}

/* The rows of a tile, a piece of each in turns, so that the processor reads ahead in all of them. */
static void finish_rows(const nest *n, const int64_t *index, const int64_t *len, char *out, char *wire) {
    const int64_t *stride = n->copy->src_stride[0];
    int row = n->ndim - 2;
    int64_t step = stride[n->dim[row]] * (int64_t)n->src_size, run = len[row + 1];
    const char *from = (const char *)n->copy->src[0] + offset_of(n, stride, index) * (int64_t)n->src_size;
    for (int64_t at = 0; at < run; at += PIECE) {
        int64_t now = run - at < PIECE ? run - at : PIECE;
        for (int64_t i = 0; i < len[row]; i++)
            finish_row(n, from + i * step + at * (int64_t)n->src_size, n->copy->src_dtype,
                       out + (i * run + at) * (int64_t)n->dst_size, (size_t)now, wire);
    }
}

static void run_tile(const nest *n, const int64_t *index, const int64_t *len, scratch *s) {
    const tb__move *copy = n->copy;
    size_t count = 1;
    for (int d = 0; d < n->ndim; d++)
        count *= (size_t)len[d];
    char *dst = (char *)copy->dst + offset_of(n, copy->dst_stride, index) * (int64_t)n->dst_size;
    if (n->reduce) {
        const void *rows[TB__COMBINE_MAX];
        for (uint32_t k = 0; k < copy->nsrc; k++)
            rows[k] = source_row(n, k, index, len, count, NULL);
        n->reduce(dst, rows, copy->nsrc, count, n->stream);
        return;
    }
    if (n->narrow_rows) {
        int row = n->ndim - 2;
        const int64_t *from = copy->src_stride[0];
        n->narrow_rows(dst, copy->dst_stride[n->dim[row]] * (int64_t)n->dst_size,
                       (const char *)copy->src[0] + offset_of(n, from, index) * (int64_t)n->src_size,
                       from[n->dim[row]] * (int64_t)n->src_size, len[row], (size_t)len[row + 1]);
        return;
    }
    bool dst_is_row = is_row(n, copy->dst_stride, len, count);
    char *out = dst_is_row && !n->stream ? dst : s->out;

    if (n->by_rows) {
        finish_rows(n, index, len, out, s->wire);
    } else if (copy->nsrc == 1 && copy->avg_divisor <= 1) {
        const void *row = source_row(n, 0, index, len, count, s->packed);
        finish_row(n, row, copy->src_dtype, out, count, s->wire);
    } else {
        tb_dtype acc_dtype = tb__dtype_is_small_float(copy->src_dtype) ? TB_F32 : copy->src_dtype;
        bool is_final = acc_dtype == copy->wire_dtype && acc_dtype == copy->dst_dtype;
        char *acc = is_final ? out : s->acc;
        reduce_tile(n, index, len, count, acc, s->packed);
        finish_row(n, acc, acc_dtype, out, count, s->wire);
    }

    if (out == dst)
        return;
    if (dst_is_row) {
        n->kernels->stream(dst, out, count * n->dst_size, out);
        return;
    }
    tb__byte_box box = row_box(n, copy->dst_stride, len, count, n->dst_size);
    for (int d = 0; d < box.ndim; d++) {
        int64_t step = box.dst_step[d];
        box.dst_step[d] = box.src_step[d];
        box.src_step[d] = step;
    }
    box.src = out;
    box.dst = dst;
    tb__bytes_move(&box, n->stream);
}

/* How far into its first tile the destination's row meets a cache line, so that the tiles after it start on one. */
static int64_t first_step(const nest *n) {
    int last = n->ndim - 1;
    if (!n->stream || last < 0 || n->copy->dst_stride[n->dim[last]] != 1)
        return 0;
    const int64_t origin[TB_MAX_DIMS] = {0};
    const char *dst = (char *)n->copy->dst + offset_of(n, n->copy->dst_stride, origin) * (int64_t)n->dst_size;
    int64_t ahead = (int64_t)(-(uintptr_t)dst & 63);
    return ahead % (int64_t)n->dst_size ? 0 : ahead / (int64_t)n->dst_size;
}

void tb__tiles_run(const tb__move *copy, tb__move_share part, bool stream) {
    nest n = {
        .copy = copy,
        .part = part,
        .kernels = tb__kernels_get(),
        .stream = stream,
        .src_size = size_of(copy->src_dtype),
        .dst_size = size_of(copy->dst_dtype),
    };
    collapse_dims(&n);
    choose_tile(&n);
    int last = n.ndim - 1;
    int64_t first = n.narrow_rows ? 0 : first_step(&n);
    int64_t index[TB_MAX_DIMS] = {0}, len[TB_MAX_DIMS] = {0};
    scratch s;
    for (;;) {
        for (int d = 0; d < n.ndim; d++) {
            bool is_first = d == last && index[d] == 0 && first > 0 && first < n.tile[d];
            int64_t tile = is_first ? first : n.tile[d];
            len[d] = tile < n.len[d] - index[d] ? tile : n.len[d] - index[d];
        }
        run_tile(&n, index, len, &s);
        int d = last;
        for (; d >= 0; d--) {
            index[d] += len[d];
            if (index[d] < n.len[d])
                break;
            index[d] = 0;
        }
        if (d < 0)
            return;
    }
}
