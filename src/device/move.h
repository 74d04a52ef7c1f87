/* A move: a box of elements that is copied, cast, reduced or quantised from one or several strided sources to a strided
 * destination, or zeroed. A copy does:
 *
 *     dst[i, j, ...] = dst_dtype(wire_dtype(src_0[i, j, ...] op src_1[i, j, ...] op ...))
 *
 * Sources combine in their order: 8- and 16-bit floats in f32, the others in their own dtype, integers modulo their
 * width. The result is rounded once, to the wire dtype, and cast from there, so that the bits are the same whether
 * the data is staged in the wire dtype or not. There are casts among floats (device/host/kernel.h
 * has the rules; f64 goes through f32) and among integers, which keep their low bits. min and max give NaN where any
 * source has one. */
#ifndef TB_DEVICE_MOVE_H
#define TB_DEVICE_MOVE_H

#include "base/mem.h"
#include "device/quant.h"
#include "tensorbus/plan.h"

typedef struct tb__mapping tb__mapping; /* mapped memory of another process */

/* The mapping of sources in the buffer of a run. */
#define TB__IN_BUFFER ((tb__mapping *)1)

/* A quantised matrix, and where the move's rows begin in it: at row `first`; and when dequantising, at column
 * first_column. */
typedef struct tb__quantised {
    tb__quant_format format;
    int64_t rows, columns, first, first_column;
    void *data, *scales; /* of the whole matrix; `scales` is not used by fp8_tensor */
    const float *scale; /* fp8_tensor's only one, nvfp4's global one; in host memory or in the device's, read when it is
                           run */
} tb__quantised;

typedef enum tb__move_kind {
    TB__MOVE_COPY,
    TB__MOVE_QUANTISE,   /* the source is plain rows, whole bands of them; the destination is `quantised` */
    TB__MOVE_DEQUANTISE, /* the source is `quantised`, the destination is plain rows */
    TB__MOVE_AMAX,       /* raises *amax to the largest magnitude in the source */
} tb__move_kind;

/* Addresses of a tensor of this rank. */
typedef struct tb__move_tensor {
    uintptr_t first, last;
} tb__move_tensor;

typedef struct tb__move {
    tb__move_kind kind;
    uint32_t part; /* of the job that it belongs to: any number; runs select parts by it */
    int ndim;      /* 2 for all but copies: rows and columns */
    int64_t len[TB_MAX_DIMS];
    void *dst;
    int64_t dst_stride[TB_MAX_DIMS]; /* elements; may be negative */
    uint32_t nsrc;                   /* 0: zeroes the destination */
    const void *const *src;
    const int64_t (*src_stride)[TB_MAX_DIMS]; /* one row per source; elements; may be negative or 0 */
    /* Per source: if set, the source's address is an offset in the mapping, or in the run's buffer (TB__IN_BUFFER). The
     * array may be NULL. */
    tb__mapping *const *src_mapping;
    bool is_dst_in_buffer; /* dst is an offset in the run's buffer; of QUANTISE: data and scales are */
    /* The tensors that dst and sources are parts of, or zeros. A device that pins host memory pins all of a tensor, or
     * nothing: the driver refuses the program's own copies of partly pinned memory. */
    tb__move_tensor src_tensor, dst_tensor;
    tb_dtype src_dtype, wire_dtype, dst_dtype;
    tb_reduce_op op;                /* if nsrc > 1 */
    uint64_t avg_divisor;           /* if over 1, a sum is divided by this before it is rounded */
    const tb__quantised *quantised; /* of QUANTISE and DEQUANTISE */
    float *amax;                    /* of AMAX; in host memory */
    int64_t first_row;              /* of AMAX: that the source begins with, for messages */
    const char *name;               /* of the tensor, for messages; may be NULL. Borrowed by the job */
} tb__move;

/* A list of moves. Zero-initialised: empty. */
typedef struct tb__move_list {
    tb__arena arena;
    TB_VEC(tb__move) moves;
} tb__move_list;

/* Copies the move and its arrays. */
tb_status tb__move_list_add(tb__move_list *list, const tb__move *move);
void tb__move_list_fini(tb__move_list *list);

/* Elements of f4e2m1 share bytes. A box of them must be even in the one dimension where both sides have stride 1, and
 * have even strides in all others.
 *
 * Source and destination must not overlap, and neither may the destinations of moves that are run together: the caller
 * must ensure that. Everything else is checked here. */
tb_status tb__move_check(const tb__move *move);

/* Bytes read and written, and those written alone. */
int64_t tb__move_traffic(const tb__move *move);
int64_t tb__move_written(const tb__move *move);

bool tb__move_is_empty(const tb__move *move);

/* Whether source k, whose address is an offset, lies in so many bytes. */
bool tb__move_source_fits(const tb__move *move, uint32_t k, size_t nbytes);

/* The dimension along which elements that share bytes lie side by side; -1: there is none. */
int tb__move_packed_dim(const tb__move *move);

#endif
