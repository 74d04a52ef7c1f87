/* What kernels and the code that launches them share: names, descriptors, arguments. Plain C, for nvcc as well.
 *
 * Each kernel takes one tb__cuda_args. Its work is a list of items, of which a launch takes some: ranges in the
 * arguments, or a list of numbers in memory. An item is a piece of a contiguous copy, or a tile of something that the
 * heap describes: a box (copies, casts, reductions) or a matrix (quantised tensors). A tile covers a fixed number of
 * slots. A slot is what one thread does at a time, 16 bytes mostly; slots count along the rows of a box or matrix. */
#ifndef TB_DEVICE_CUDA_KERNELS_H
#define TB_DEVICE_CUDA_KERNELS_H

#include <stdint.h>

/* X(name, threads of a block, blocks of an item, slots of an item). */
#define TB__CUDA_KERNELS(X)                                                                                            \
    X(copy_small_pieces, 128, 1, 1)   /* of at most TB__CUDA_SMALL_PIECE bytes; a warp takes TB__CUDA_WARP_PIECES */   \
    X(copy_pieces, 128, 1, 1)         /* a warp takes one */                                                           \
    X(copy_shifted_pieces, 128, 1, 1) /* aligned in any way; a warp takes one */                                       \
    X(copy_rows, 64, 1, 256)                                                                                           \
    X(copy_long_rows, 64, 16, 4096)  /* the same, with fewer items */                                                  \
    X(copy_shifted_rows, 64, 1, 256) /* aligned in any way */                                                          \
    X(copy_any, 256, 1, 1024)                                                                                          \
    X(transpose_1, 256, 1, 1) /* by the bytes of an element; slots are tiles */                                        \
    X(transpose_2, 256, 1, 1)                                                                                          \
    X(transpose_4, 256, 1, 1)                                                                                          \
    X(transpose_8, 256, 1, 1)                                                                                          \
    X(cast_1_1, 64, 1, 256) /* by the bytes of an element of the source and of the destination */                      \
    X(cast_1_2, 64, 1, 512)                                                                                            \
    X(cast_1_4, 64, 1, 512)                                                                                            \
    X(cast_2_1, 64, 1, 256)                                                                                            \
    X(cast_2_2, 64, 1, 256)                                                                                            \
    X(cast_2_4, 64, 1, 512)                                                                                            \
    X(cast_4_1, 64, 1, 256)                                                                                            \
    X(cast_4_2, 64, 1, 256)                                                                                            \
    X(cast_4_4, 64, 1, 256)                                                                                            \
    X(reduce_2_2, 128, 1, 256) /* the same; 8-bit floats go to number_any */                                           \
    X(reduce_2_4, 128, 1, 256)                                                                                         \
    X(reduce_4_2, 128, 1, 256)                                                                                         \
    X(reduce_4_4, 128, 1, 256)                                                                                         \
    X(number_any, 256, 1, 1024)                                                                                        \
    X(mxfp8_2, 128, 1, 128) /* quantisers: by the bytes of an element of the source; slots are blocks */               \
    X(mxfp8_4, 128, 1, 128)                                                                                            \
    X(fp8_block_2, 256, 1, 1)                                                                                          \
    X(fp8_block_4, 256, 1, 1)                                                                                          \
    X(fp8_tensor_2, 128, 1, 512) /* slots are 16 bytes */                                                              \
    X(fp8_tensor_4, 128, 1, 512)                                                                                       \
    X(nvfp4_2, 128, 1, 256)                                                                                            \
    X(nvfp4_4, 128, 1, 128)                                                                                            \
    X(amax_2, 128, 1, 1024)                                                                                            \
    X(amax_4, 128, 1, 1024)                                                                                            \
    X(dequantise_2, 128, 1, 512) /* by the bytes of an element of the destination */                                   \
    X(dequantise_4, 128, 1, 512)                                                                                       \
    X(checksum, 256, 1, 1)     /* items are blocks of the checksum */                                                  \
    X(copy_words, 256, 1, 1)   /* items are words, from `items` to `results`; a block takes TB__CUDA_BLOCK_WORDS */    \
    X(take_results, 256, 1, 1) /* items are results, likewise, and are reset; a block takes TB__CUDA_BLOCK_RESULTS */

#define TB__CUDA_KERNEL_ID(name, threads, blocks, slots) TB__CUDA_##name,
enum { TB__CUDA_KERNELS(TB__CUDA_KERNEL_ID) TB__CUDA_NKERNELS };

/* The function of a kernel in the module: "tb__copy_rows". */
#define TB__CUDA_KERNEL_NAME(name, threads, blocks, slots) "tb__" #name,

enum {
    TB__CUDA_WARP_PIECES = 2,
    TB__CUDA_SMALL_PIECE = 512, /* bytes: 16 for each thread of a warp */
    TB__CUDA_BLOCK_WORDS = 1024,
    TB__CUDA_BLOCK_RESULTS = 256,
    TB__CUDA_PIECE_MAX = 4096, /* bytes */
    TB__CUDA_RANGES = 16,
    TB__CUDA_NO_PLACE = -1,
    TB__CUDA_HEAP_UNIT = 32,     /* bytes; places in the heap count in it */
    TB__CUDA_TRANSPOSE_SIDE = 64 /* words of a tile of transpose_1 to _4; _8 has half as many, of 8 bytes */
};

/* Flags of pieces, boxes and matrices. */
enum {
    TB__CUDA_SRC_IN_BUFFER = 1, /* addresses are offsets in the buffer of the run */
    TB__CUDA_DST_IN_BUFFER = 2, /* of a matrix that is made: data and scales */
    TB__CUDA_ZERO = 4,          /* there is no source */
    TB__CUDA_ALIGNED_SRC = 8,   /* all rows begin with a slot that is aligned, and buffers are */
    TB__CUDA_ALIGNED_DST = 16,  /* of quantisers: the data */
    TB__CUDA_FLOOR = 32,        /* options of a quantised tensor */
    TB__CUDA_POWER_OF_TWO = 64,
    TB__CUDA_SWIZZLED = 128,
    TB__CUDA_ANY_IN_BUFFER = 256, /* one of several sources is */
    TB__CUDA_ROW_TILES = 512      /* each tile is in one row, and the last one of a row may be shorter */
};

/* n / by is n * magic >> shift, for n below 2^31. */
typedef struct tb__cuda_divisor {
    uint32_t by, magic, shift;
} tb__cuda_divisor;

/* A contiguous copy of at most TB__CUDA_PIECE_MAX bytes. */
typedef struct tb__cuda_piece {
    uint64_t src, dst;
    uint32_t nbytes, flags, unused[2];
} tb__cuda_piece;

/* Slots number `tile * slots of an item` and on of a box or matrix. */
typedef struct tb__cuda_tile {
    uint32_t place, tile;
} tb__cuda_tile;

/* A dimension of a box. Steps are in bytes, the source's that of the first one. */
typedef struct tb__cuda_dim {
    tb__cuda_divisor len;
    uint32_t unused;
    int64_t dst_step, src_step;
} tb__cuda_dim;

/* A box of rows, contiguous on all sides. Its dimensions follow, innermost first, then the sources after the first: an
 * address, flags and a step for each dimension, 8 bytes each. Of a transpose, the rows are single elements, and the
 * first two dimensions are those along which the destination and the source are contiguous. */
typedef struct tb__cuda_box {
    uint64_t src, dst;
    uint32_t flags, nsrc, ndim;
    uint32_t nslots;          /* of all rows; with ROW_TILES, of one */
    tb__cuda_divisor per_row; /* slots of a row, or its tiles; of a transpose: tiles along the first dimension */
    tb__cuda_divisor across;  /* of a transpose: tiles along the second one */
    int64_t run;              /* of a row: bytes of a plain copy, else elements */
    uint32_t nrows;
    uint32_t unit; /* copy_any: bytes of a slot */
    uint8_t src_dtype, wire_dtype, dst_dtype, op;
    float divisor;         /* of a sum; 0: there is none */
    uint32_t has_wire;     /* whether there is a cast to the wire dtype and another one from it */
    double double_divisor; /* the same, for f64 */
} tb__cuda_box;

/* Rows of plain numbers, and the quantised tensor that is made of them or the other way round. */
typedef struct tb__cuda_matrix {
    uint64_t rows_at; /* the plain rows */
    uint64_t data, scales;
    uint64_t scale;    /* the address of the tensor's scale on the device; 0: it is in the result */
    int64_t row_step;  /* of the plain rows, in bytes */
    int64_t data_step; /* elements of a row of the tensor */
    int64_t first;     /* row of the tensor */
    int64_t rows;      /* of the tensor */
    int64_t columns;   /* of the plain rows */
    int64_t first_column, scale_columns;
    uint32_t flags, result, nrows;
    uint32_t nslots;          /* of all rows; with ROW_TILES, of one */
    tb__cuda_divisor per_row; /* slots of a row, or its tiles */
    uint8_t kind, dtype, unused[2];
} tb__cuda_matrix;

/* What a move of a matrix reports, one each in a launch; and the scale where the host has it. */
typedef struct tb__cuda_result {
    uint64_t bad;       /* the first element that is not finite, counted along the plain rows; else UINT64_MAX */
    uint32_t amax;      /* bits of the largest magnitude */
    uint32_t bad_scale; /* bits of a scale that is not positive and finite; else 0 */
    float scale;
    uint32_t has_bad_scale;
} tb__cuda_result;

/* Items of a launch: `begin` of them are before these. With a place they are tiles of what is there, from `first` on;
 * else, and of pieces, `first` is the number of an item. */
typedef struct tb__cuda_range {
    uint32_t begin, first, place;
} tb__cuda_range;

typedef struct tb__cuda_args {
    uint64_t items;                  /* tb__cuda_piece or tb__cuda_tile; of a checksum: the bytes */
    uint64_t heap;                   /* boxes and matrices */
    uint64_t list;                   /* numbers of items, uint32_t; 0: the ranges say them */
    uint64_t src_buffer, dst_buffer; /* of the run */
    uint64_t results;                /* tb__cuda_result; of a checksum: the sums of blocks */
    uint32_t nitems, nranges;
    uint32_t first_result; /* the number of the first one of `results` */
    tb__cuda_range ranges[TB__CUDA_RANGES];
} tb__cuda_args;

#endif
