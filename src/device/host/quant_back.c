/* From quantised tensors back to plain numbers: codes to f32 by a cast or a table, times the scale, and from f32
 * to the dtype wanted. */
#include "base/int.h"
#include "device/host/kernel.h"
#include "device/host/quant_inside.h"
#include "device/host/quant_kernel.h"
#include "device/host/workers.h"

#include <string.h>

enum {
    PIECE = 1024, /* columns at a time; whole blocks of every format */
};

typedef tb__dequant_job job;

static float decode_e4m3(uint8_t code) {
    float x;
    tb__kernels_portable.widen[TB_F8E4M3](&x, &code, 1);
    return x;
}

/* 255 is E8M0's NaN. */
static float decode_e8m0(uint8_t byte) {
    if (byte == 255)
        return tb__f32_of(0x7fc00000);
    return byte ? tb__f32_of((uint32_t)byte << 23) : 0x1p-127F;
}

/* The factor of block `column` of a row. */
static float scale_at(const job *j, int64_t row, int64_t column) {
    const tb__quant_tensor *from = &j->from;
    int64_t columns = j->size.scale_columns;
    if (from->format.kind == TB__QUANT_FP8_TENSOR)
        return from->scale;
    if (from->format.kind == TB__QUANT_FP8_BLOCK)
        return ((const float *)from->scales)[row / TB__FP8_BLOCK * columns + column];
    int64_t at = from->format.is_swizzled ? tb__quant_swizzle(row, column, columns) : row * columns + column;
    uint8_t byte = ((const uint8_t *)from->scales)[at];
    return from->format.kind == TB__QUANT_MXFP8 ? decode_e8m0(byte) : decode_e4m3(byte) * from->scale;
}

static int64_t block_of(tb__quant_kind kind) {
    switch (kind) {
    case TB__QUANT_MXFP8:
        return TB__MXFP8_BLOCK;
    case TB__QUANT_NVFP4:
        return TB__NVFP4_BLOCK;
    case TB__QUANT_FP8_BLOCK:
        return TB__FP8_BLOCK;
    default:
        return PIECE; /* the one scale, again for each piece */
    }
}

static void codes_to_f32(const job *j, float *out, int64_t row, int64_t column, int64_t n) {
    static const float e2m1[16] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                   -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
    int64_t at = row * j->from.columns + column;
    const uint8_t *data = j->from.data;
    if (j->size.data_dtype == TB_F8E4M3) {
        tb__kernels_get()->widen[TB_F8E4M3](out, data + at, (size_t)n);
        return;
    }
    int64_t i = 0;
    if (at % 2 && n > 0)
        out[i++] = e2m1[data[at / 2] >> 4];
    for (; i + 1 < n; i += 2) {
        uint8_t two = data[(at + i) / 2];
        out[i] = e2m1[two & 15];
        out[i + 1] = e2m1[two >> 4];
    }
    if (i < n)
        out[i] = e2m1[data[(at + i) / 2] & 15];
}

static void dequantise_unit(const job *j, int64_t row, int64_t at) {
    float x[PIECE];
    int64_t n = tb__min64(PIECE, j->columns - at), block = block_of(j->from.format.kind), column = j->first_column + at;
    codes_to_f32(j, x, j->first + row, column, n);
    for (int64_t i = 0, end; i < n; i = end) {
        int64_t which = (column + i) / block;
        float scale = scale_at(j, j->first + row, which);
        end = tb__min64((which + 1) * block - column, n);
        for (int64_t k = i; k < end; k++)
            x[k] *= scale;
    }
    size_t size = tb_dtype_bits(j->to.dtype) / 8;
    char *out = (char *)j->to.data + (size_t)(row * j->to.stride + at) * size;
    if (j->to.dtype == TB_F32)
        memcpy(out, x, (size_t)n * size);
    else
        tb__kernels_get()->narrow[j->to.dtype](out, x, (size_t)n);
}

/* Parts are runs of units. */
void tb__dequant_run(const job *j, int64_t from, int64_t to) {
    int64_t each = j->nunits / j->nparts, more = j->nunits % j->nparts;
    int64_t end = to * each + tb__min64(to, more);
    for (int64_t u = from * each + tb__min64(from, more); u < end; u++)
        dequantise_unit(j, u / j->across, u % j->across * PIECE);
}

tb_status tb__dequant_begin(job *j, const tb__quant_tensor *from, int64_t first, int64_t rows, int64_t first_column,
                            int64_t columns, const tb__quant_rows *to) {
    *j =
        (job){.from = *from, .to = *to, .first = first, .rows = rows, .first_column = first_column, .columns = columns};
    TB_TRY(tb__quant_check_tensor(from, first, rows, &j->size));
    TB_TRY(tb__quant_check_rows(to, rows, columns));
    j->across = columns / PIECE + (columns % PIECE != 0);
    j->nunits = rows * j->across;
    int64_t parts = rows * columns / (TB__PIECE_BYTES / 4);
    j->nparts = tb__min64(parts < 1 ? 1 : parts, j->nunits);
    return TB_OK;
}

static void dequantise_parts(void *arg, int64_t from, int64_t to) {
    tb__dequant_run(arg, from, to);
}

tb_status tb__quant_dequantise(const tb__quant_tensor *from, int64_t first, int64_t rows, const tb__quant_rows *to) {
    job j;
    TB_TRY(tb__dequant_begin(&j, from, first, rows, 0, from->columns, to));
    tb__workers_for(j.nparts, dequantise_parts, &j);
    return TB_OK;
}
