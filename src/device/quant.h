/* Quantised tensors: numbers of 8 or 4 bits with scales, made from f32, f16 or bf16 and turned back into them. Every
 * device comes to the same bits.
 *
 * A tensor is a matrix here: `columns` is its last dimension, `rows` all others multiplied; where blocks cover several
 * rows, it should have two, and a stack of matrices is quantised one by one. Blocks count from its own origin; those at
 * the right and lower end cover what is left. With f32 arithmetic, rounded to nearest even at each step:
 *
 *   mxfp8       blocks of 32 in a row; f8e4m3 data, an E8M0 byte each: 2^(byte - 127), 0..254, 0 for a block of zeros.
 *               The exponent is ceil(log2(amax / 448)), or floor(log2 amax) - 8. data = x / scale
 *   fp8_block   blocks of 128 x 128; f8e4m3 data, an f32 each: amax / 448, or the next power of two not below it; 1 for
 *               a block of zeros. data = x / scale
 *   fp8_tensor  the same with one scale, which the caller gives
 *   nvfp4       blocks of 16 in a row; f4e2m1 data, an f8e4m3 each: (amax / 6) / global, where the caller gives the
 *               global scale, amax / 2688 of the tensor or its scale group. data = x / (scale * global); zeros where
 * that divisor is 0
 *
 * Data is rounded to nearest even and saturates; zeros keep their sign. A scale is never 0 but in mxfp8's and nvfp4's
 * bytes: what would be is the smallest f32, 2^-149, or as a power of two 2^-126. Both sets of kernels, any number of
 * threads and any bands give the same bits. Data and scales must not overlap what they are made from. */
#ifndef TB_DEVICE_QUANT_H
#define TB_DEVICE_QUANT_H

#include "base/error.h"

typedef enum tb__quant_kind {
    TB__QUANT_MXFP8 = 1,
    TB__QUANT_FP8_BLOCK,
    TB__QUANT_FP8_TENSOR,
    TB__QUANT_NVFP4,
} tb__quant_kind;

typedef struct tb__quant_format {
    tb__quant_kind kind;
    bool is_floor;        /* mxfp8: the exponent rule */
    bool is_power_of_two; /* fp8_block and fp8_tensor: the scales */
    bool is_swizzled;     /* mxfp8 and nvfp4: scales in tiles of 128 x 4, padded with zeros; else rows */
} tb__quant_format;

const char *tb__quant_name(tb__quant_kind kind); /* "mxfp8"; NULL if kind is invalid */

/* The sizes of a quantised tensor. */
typedef struct tb__quant_size {
    tb_dtype data_dtype, scale_dtype;                /* scale_dtype: of those in memory */
    int64_t data_nbytes;                             /* row-major, without gaps */
    int64_t scale_rows, scale_columns, scale_nbytes; /* 0 for fp8_tensor; nbytes has the padding of tiles */
    int64_t band;                                    /* rows that share scales: bands begin at its multiples */
    int64_t block;                                   /* columns that share one; 0 for fp8_tensor */
} tb__quant_size;

/* Refuses sizes and options that the format does not have: the columns of nvfp4 must be even. */
tb_status tb__quant_measure(const tb__quant_format *format, int64_t rows, int64_t columns, tb__quant_size *out);

/* A quantised tensor and where it is. */
typedef struct tb__quant_tensor {
    tb__quant_format format;
    int64_t rows, columns;
    void *data;
    void *scales; /* unused by fp8_tensor; aligned like floats for fp8_block */
    float scale;  /* fp8_tensor's only one, nvfp4's global one; the caller keeps it with the tensor */
} tb__quant_tensor;

/* Some rows of plain numbers, as many as a call says. */
typedef struct tb__quant_rows {
    void *data; /* only read where it is a source */
    tb_dtype dtype;
    int64_t stride; /* elements from row to row, at least the columns */
} tb__quant_rows;

/* The scale of fp8_tensor, the global one of nvfp4, for an amax; 1 if that is 0. */
tb_status tb__quant_scale(const tb__quant_format *format, float amax, float *out);

/* The place of a scale byte among those in tiles, when there are so many columns of them. */
static inline int64_t tb__quant_swizzle(int64_t row, int64_t column, int64_t columns) {
    int64_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

#endif
