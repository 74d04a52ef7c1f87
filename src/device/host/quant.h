/* Quantising and dequantising in host memory: at once, or in parts for several threads. */
#ifndef TB_DEVICE_HOST_QUANT_H
#define TB_DEVICE_HOST_QUANT_H

#include "device/quant.h"

#include <stdatomic.h>

/* The largest magnitude. TB_INVALID if an element is not finite, with its position ("row 3, column 5") in the message;
 * rows count from the first one here. Amax of a scale group is the largest of its parts. */
tb_status tb__quant_amax(const tb__quant_rows *from, int64_t rows, int64_t columns, float *out);

/* Quantises rows first .. first+rows-1, which are whole bands, into their places in `to`. TB_INVALID, with a message
 * that names the first such element, if one is not finite; the contents of the band are undefined then. Scales that
 * tiles have too many of are set with the last row. Splits the rows among the workers. */
tb_status tb__quant_quantise(const tb__quant_tensor *to, int64_t first, int64_t rows, const tb__quant_rows *from);

/* The other way: rows first .. first+rows-1, any, as f32, f16 or bf16. A product is rounded to f32, then to those. */
tb_status tb__quant_dequantise(const tb__quant_tensor *from, int64_t first, int64_t rows, const tb__quant_rows *to);

/* Quantising, or taking an amax, in parts 0 .. nparts-1. */
typedef struct tb__quant_job {
    const struct tb__quant_kernels *kernels;
    bool is_amax;        /* nothing is made of the source */
    tb__quant_tensor to; /* as the kernels see it */
    tb__quant_rows from;
    tb__quant_size size;
    int64_t first, rows, columns;      /* likewise */
    int64_t first_row, tensor_columns; /* as the caller sees it */
    bool ends_tensor;                  /* the last row is among them */
    int64_t band, width;               /* of a unit */
    int64_t across;                    /* units side by side */
    int64_t nunits, nparts;
    bool stream;
    _Atomic uint32_t amax;
    _Atomic int64_t bad; /* the first element that is not finite, counted from the first row here; else INT64_MAX */
} tb__quant_job;

/* `to` is NULL for an amax. With 0 parts there is nothing to run. */
tb_status tb__quant_begin(tb__quant_job *job, const tb__quant_tensor *to, int64_t first, int64_t rows, int64_t columns,
                          const tb__quant_rows *from);
/* Any thread; each part once. */
void tb__quant_run(tb__quant_job *job, int64_t from, int64_t to);
/* When all parts are done. */
tb_status tb__quant_end(const tb__quant_job *job, float *amax);

typedef struct tb__dequant_job {
    tb__quant_tensor from;
    tb__quant_rows to;
    tb__quant_size size;
    int64_t first, rows, first_column, columns, across, nunits, nparts;
} tb__dequant_job;

/* Of so many columns, from one on. */
tb_status tb__dequant_begin(tb__dequant_job *job, const tb__quant_tensor *from, int64_t first, int64_t rows,
                            int64_t first_column, int64_t columns, const tb__quant_rows *to);
void tb__dequant_run(const tb__dequant_job *job, int64_t from, int64_t to);

#endif
