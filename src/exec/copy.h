/* The one operation that moves tensor data: a box of elements is copied, cast, reduced or zeroed on its way from one or
 * several strided places to another.
 *
 *     dst[i, j, ...] = dst_dtype(wire_dtype(src_0[i, j, ...] op src_1[i, j, ...] op ...))
 *
 * Sources combine in their order: 8- and 16-bit floats in f32, the others in their own dtype, integers modulo their
 * width. What comes out is rounded once, to the wire dtype, and cast from there, so that the bits are the same whether
 * the data is staged in the wire dtype or not. There are casts among f32, f16, bf16, f8e4m3 and f8e5m2 (exec/kernel.h
 * has the rules). min and max give NaN where any source has one. */
#ifndef TB_EXEC_COPY_H
#define TB_EXEC_COPY_H

#include "tensorbus/tensorbus.h"

typedef struct tb__copy {
    int ndim;
    int64_t len[TB_MAX_DIMS];
    void *dst;
    int64_t dst_stride[TB_MAX_DIMS]; /* elements; may be negative */
    uint32_t nsrc;                   /* 0: zeros, and only the destination's fields count */
    const void *const *src;
    const int64_t (*src_stride)[TB_MAX_DIMS]; /* one row per source; elements; may be negative or 0 */
    tb_dtype src_dtype, wire_dtype, dst_dtype;
    tb_reduce_op op;      /* where nsrc > 1 */
    uint64_t avg_divisor; /* if over 1, a sum is divided by this before it is rounded */
} tb__copy;

/* Elements of f4e2m1 share bytes. A box of them must be even in the one dimension where both sides have stride 1, and
 * have even strides in all others.
 *
 * Source and destination must not overlap, and neither may the destinations of a batch: that is for the caller to
 * see to. Everything else is checked here. */
tb_status tb__copy_check(const tb__copy *copy);

/* Bytes read and written, and those written alone. */
int64_t tb__copy_traffic(const tb__copy *copy);
int64_t tb__copy_written(const tb__copy *copy);

/* What of a copy is to be done: indices lo .. hi-1 of one dimension. */
typedef struct tb__part {
    int dim;
    int64_t lo, hi;
} tb__part;

/* The whole. */
tb__part tb__copy_whole(const tb__copy *copy);

/* A share for one of several threads: what lies from `from` to `to` if the copy is `of` long. Shares that meet there
 * meet here, on a line of the destination if they can. */
tb__part tb__copy_cut(const tb__copy *copy, int64_t from, int64_t to, int64_t of);

/* Does a part of a copy that was checked. With `stream`, the destination is not left in the cache, and the caller ends
 * with the kernels' fence. Arithmetic is that of the thread's floating-point environment. */
void tb__copy_run(const tb__copy *copy, tb__part part, bool stream);

#endif
