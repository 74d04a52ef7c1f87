/* Quantising: what a tensor takes, and its rows split among the workers. The unit of work is a band, or a piece of one
 * as wide as suits the caches. */
#include "device/host/quant.h"

#include "base/int.h"
#include "device/host/kernel.h"
#include "device/host/quant_inside.h"
#include "device/host/quant_kernel.h"
#include "device/host/workers.h"

#include <float.h>
#include <inttypes.h>
#include <string.h>

enum {
    ROW_PIECE = 8192,    /* columns of a unit that is one row; whole blocks */
    BLOCKS_PIECE = 1024, /* of one that has 128 rows and is read twice */
    TILE_ROWS = 128,
    TILE_BYTES = 512,
};
#define SIZE_LIMIT ((int64_t)1 << 62)

static const struct {
    const char *name;
    tb_dtype data, scale;
    int64_t block_rows, block_columns;
} formats[] = {
    [TB__QUANT_MXFP8] = {"mxfp8", TB_F8E4M3, TB_E8M0, 1, TB__MXFP8_BLOCK},
    [TB__QUANT_FP8_BLOCK] = {"fp8_block", TB_F8E4M3, TB_F32, TB__FP8_BLOCK, TB__FP8_BLOCK},
    [TB__QUANT_FP8_TENSOR] = {"fp8_tensor", TB_F8E4M3, TB_F32, 1, 0},
    [TB__QUANT_NVFP4] = {"nvfp4", TB_F4E2M1, TB_F8E4M3, 1, TB__NVFP4_BLOCK},
};

const char *tb__quant_name(tb__quant_kind kind) {
    return (size_t)kind < sizeof formats / sizeof *formats ? formats[kind].name : NULL;
}

static int64_t blocks_of(int64_t n, int64_t block) {
    return n / block + (n % block != 0);
}

static tb_status check_format(const tb__quant_format *format) {
    const char *name = tb__quant_name(format->kind);
    if (!name)
        return tb__fail(TB_INVALID, "%d is no kind of quantised tensor", (int)format->kind);
    bool has_bytes = format->kind == TB__QUANT_MXFP8 || format->kind == TB__QUANT_NVFP4;
    if (format->is_floor && format->kind != TB__QUANT_MXFP8)
        return tb__fail(TB_INVALID, "%s has no exponent rule; mxfp8 has", name);
    if (format->is_power_of_two && has_bytes)
        return tb__fail(TB_INVALID, "%s has no choice of powers of two for scales; fp8_block and fp8_tensor have",
                        name);
    if (format->is_swizzled && !has_bytes)
        return tb__fail(TB_INVALID, "%s has no scales in tiles; mxfp8 and nvfp4 have", name);
    return TB_OK;
}

tb_status tb__quant_measure(const tb__quant_format *format, int64_t rows, int64_t columns, tb__quant_size *out) {
    TB_TRY(check_format(format));
    const char *name = formats[format->kind].name;
    if (rows < 0 || columns < 0)
        return tb__fail(TB_INVALID, "a matrix of %" PRId64 " x %" PRId64 " is none", rows, columns);
    int64_t n;
    /* Padded tiles have fewer bytes than this many elements with room for a tile's rows. */
    if (rows > SIZE_LIMIT / 2 || columns > SIZE_LIMIT / 2 || __builtin_mul_overflow(rows + 127, columns + 127, &n) ||
        n > SIZE_LIMIT / 4)
        return tb__fail(TB_INVALID, "a matrix of %" PRId64 " x %" PRId64 " is too large for %s", rows, columns, name);
    bool is_packed = formats[format->kind].data == TB_F4E2M1;
    if (is_packed && columns % 2 != 0)
        return tb__fail(TB_REFUSED, "%s has two elements to a byte, and rows of %" PRId64 " would end inside one", name,
                        columns);
    tb__quant_size size = {
        .data_dtype = formats[format->kind].data,
        .scale_dtype = formats[format->kind].scale,
        .data_nbytes = rows * (is_packed ? columns / 2 : columns),
        .band = formats[format->kind].block_rows,
        .block = formats[format->kind].block_columns,
    };
    if (format->kind != TB__QUANT_FP8_TENSOR) {
        size.scale_rows = blocks_of(rows, size.band);
        size.scale_columns = blocks_of(columns, size.block);
        size.scale_nbytes = size.scale_rows * size.scale_columns * (size.scale_dtype == TB_F32 ? 4 : 1);
    }
    if (format->is_swizzled)
        size.scale_nbytes = blocks_of(rows, TILE_ROWS) * TILE_ROWS * blocks_of(size.scale_columns, 4) * 4;
    *out = size;
    return TB_OK;
}

tb_status tb__quant_check_rows(const tb__quant_rows *rows, int64_t count, int64_t columns) {
    if (rows->dtype != TB_F32 && rows->dtype != TB_F16 && rows->dtype != TB_BF16) {
        const char *name = tb_dtype_name(rows->dtype);
        return tb__fail(TB_INVALID, "quantised tensors are made from, and turned into, f32, f16 and bf16, not %s",
                        name ? name : "an invalid dtype");
    }
    int64_t reach;
    if (rows->stride < columns || __builtin_mul_overflow(rows->stride, count, &reach) || reach > SIZE_LIMIT / 4)
        return tb__fail(TB_INVALID, "rows of %" PRId64 " elements can't begin every %" PRId64, columns, rows->stride);
    return TB_OK;
}

tb_status tb__quant_check_tensor(const tb__quant_tensor *tensor, int64_t first, int64_t rows, tb__quant_size *out) {
    tb__quant_size size;
    TB_TRY(tb__quant_measure(&tensor->format, tensor->rows, tensor->columns, &size));
    if (first < 0 || rows < 0 || first > tensor->rows || rows > tensor->rows - first)
        return tb__fail(TB_INVALID, "%" PRId64 " rows from %" PRId64 " on are not in a tensor of %" PRId64, rows, first,
                        tensor->rows);
    bool has_scale = tensor->format.kind == TB__QUANT_FP8_TENSOR || tensor->format.kind == TB__QUANT_NVFP4;
    if (has_scale && !(tensor->scale > 0 && tb__f32_bits(tensor->scale) < TB__F32_INF))
        return tb__fail(TB_INVALID, "the scale of a %s tensor is %g; it must be positive and finite",
                        formats[tensor->format.kind].name, (double)tensor->scale);
    *out = size;
    return TB_OK;
}

/* Bands begin and end with blocks. */
static tb_status check_band(const tb__quant_tensor *to, int64_t first, int64_t rows, int64_t band) {
    if (first % band != 0 || (rows % band != 0 && first + rows != to->rows))
        return tb__fail(TB_INVALID,
                        "rows %" PRId64 "-%" PRId64 " begin or end inside a block of %s, which has %" PRId64 " rows",
                        first, first + rows, formats[to->format.kind].name, band);
    return TB_OK;
}

typedef tb__quant_job job;

static const char *source_at(const job *j, int64_t row, int64_t column) {
    int64_t size = tb_dtype_bits(j->from.dtype) / 8;
    return (const char *)j->from.data + (row * j->from.stride + column) * size;
}

/* Records the first element of the unit that is not finite. */
static void record_bad(job *j, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    for (int64_t r = row; r < row + rows; r++) {
        for (int64_t c = column; c < column + columns; c++) {
            if (j->kernels->amax[j->from.dtype](source_at(j, r, c), 1) < TB__F32_INF)
                continue;
            int64_t at = r * j->columns + c, before = atomic_load(&j->bad);
            while (at < before && !atomic_compare_exchange_weak(&j->bad, &before, at)) {
            }
            return;
        }
    }
}

static void record_amax(job *j, uint32_t amax) {
    uint32_t before = atomic_load_explicit(&j->amax, memory_order_relaxed);
    while (amax > before && !atomic_compare_exchange_weak(&j->amax, &before, amax)) {
    }
}

static uint8_t *data_at(const job *j, int64_t row, int64_t column) {
    int64_t at = (j->first + row) * j->columns + column;
    return (uint8_t *)j->to.data + (j->size.data_dtype == TB_F4E2M1 ? at / 2 : at);
}

/* The bytes of row `row` of the tensor from scale column `column` on, where a tile begins, to their places in the
 * tiles; those of the last one that has no column are zero. */
static void place_scales(const job *j, const uint8_t *scales, int64_t row, int64_t column, int64_t n) {
    uint8_t *out = (uint8_t *)j->to.scales + tb__quant_swizzle(row, column, j->size.scale_columns);
    int64_t whole = n & ~(int64_t)3;
    for (int64_t c = 0; c < whole; c += 4, out += TILE_BYTES)
        memcpy(out, scales + c, 4);
    if (n > whole) {
        uint8_t four[4] = {0};
        memcpy(four, scales + whole, (size_t)(n - whole));
        memcpy(out, four, 4);
    }
}

/* The rows of the last tiles that the tensor does not have. */
static void clear_scale_padding(const job *j) {
    uint8_t *out = j->to.scales;
    for (int64_t row = j->to.rows; row % TILE_ROWS != 0; row++) {
        for (int64_t c = 0; c < j->size.scale_columns; c += 4)
            memset(out + tb__quant_swizzle(row, c, j->size.scale_columns), 0, 4);
    }
}

/* mxfp8 and nvfp4. */
static uint32_t byte_scaled_row(const job *j, int64_t row, int64_t column, int64_t columns) {
    uint8_t swizzled[ROW_PIECE / TB__NVFP4_BLOCK];
    bool is_mxfp8 = j->to.format.kind == TB__QUANT_MXFP8;
    int64_t block = is_mxfp8 ? TB__MXFP8_BLOCK : TB__NVFP4_BLOCK, tensor_row = j->first + row;
    uint8_t *scales = (uint8_t *)j->to.scales + tensor_row * j->size.scale_columns + column / block;
    if (j->to.format.is_swizzled)
        scales = swizzled;
    const void *src = source_at(j, row, column);
    uint8_t *data = data_at(j, row, column);
    tb_dtype dtype = j->from.dtype;
    uint32_t amax;
    if (is_mxfp8)
        amax = j->kernels->mxfp8[dtype](data, scales, src, (size_t)columns, j->to.format.is_floor, j->stream);
    else
        amax = j->kernels->nvfp4[dtype](data, scales, src, (size_t)columns, j->to.scale, j->stream);
    if (j->to.format.is_swizzled)
        place_scales(j, scales, tensor_row, column / block, blocks_of(columns, block));
    return amax;
}

static float fp8_scale(uint32_t amax, bool is_power_of_two) {
    if (amax == 0)
        return 1;
    if (!is_power_of_two) {
        float scale = tb__f32_of(amax) / 448.0F;
        return scale > 0 ? scale : tb__f32_of(1);
    }
    uint32_t exponent = tb__mxfp8_scale(amax, false);
    return tb__f32_of((exponent > 1 ? exponent : 1) << 23);
}

static uint32_t fp8_blocks(const job *j, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    uint32_t amax[BLOCKS_PIECE / TB__FP8_BLOCK] = {0}, all = 0;
    float *scales = (float *)j->to.scales + (j->first + row) / TB__FP8_BLOCK * j->size.scale_columns;
    tb_dtype dtype = j->from.dtype;
    for (int64_t r = row; r < row + rows; r++) {
        for (int64_t c = 0; c < columns; c += TB__FP8_BLOCK) {
            size_t n = (size_t)(columns - c < TB__FP8_BLOCK ? columns - c : TB__FP8_BLOCK);
            uint32_t most = j->kernels->amax[dtype](source_at(j, r, column + c), n), *of = &amax[c / TB__FP8_BLOCK];
            *of = most > *of ? most : *of;
        }
    }
    for (int64_t c = 0; c < columns; c += TB__FP8_BLOCK) {
        uint32_t most = amax[c / TB__FP8_BLOCK];
        scales[(column + c) / TB__FP8_BLOCK] = fp8_scale(most, j->to.format.is_power_of_two);
        all = most > all ? most : all;
    }
    if (all >= TB__F32_INF)
        return all;
    for (int64_t r = row; r < row + rows; r++) {
        for (int64_t c = 0; c < columns; c += TB__FP8_BLOCK) {
            size_t n = (size_t)(columns - c < TB__FP8_BLOCK ? columns - c : TB__FP8_BLOCK);
            float scale = scales[(column + c) / TB__FP8_BLOCK];
            j->kernels->fp8[dtype](data_at(j, r, column + c), source_at(j, r, column + c), n, scale, j->stream);
        }
    }
    return all;
}

static uint32_t quantise_unit(const job *j, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    if (j->is_amax)
        return j->kernels->amax[j->from.dtype](source_at(j, row, column), (size_t)columns);
    switch (j->to.format.kind) {
    case TB__QUANT_FP8_BLOCK:
        return fp8_blocks(j, row, rows, column, columns);
    case TB__QUANT_FP8_TENSOR:
        return j->kernels->fp8[j->from.dtype](data_at(j, row, column), source_at(j, row, column), (size_t)columns,
                                              j->to.scale, j->stream);
    default:
        return byte_scaled_row(j, row, column, columns);
    }
}

/* Parts are runs of units. */
void tb__quant_run(job *j, int64_t from, int64_t to) {
    int64_t each = j->nunits / j->nparts, more = j->nunits % j->nparts;
    int64_t begin = from * each + tb__min64(from, more), end = to * each + tb__min64(to, more);
    uint32_t all = 0;
    for (int64_t u = begin; u < end; u++) {
        int64_t row = u / j->across * j->band, column = u % j->across * j->width;
        int64_t rows = tb__min64(j->band, j->rows - row), columns = tb__min64(j->width, j->columns - column);
        uint32_t amax = quantise_unit(j, row, rows, column, columns);
        all = amax > all ? amax : all;
        if (amax >= TB__F32_INF)
            record_bad(j, row, rows, column, columns);
    }
    record_amax(j, all);
    if (j->stream)
        tb__kernels_get()->fence();
}

/* Rows of whole blocks that lie one after the other are quantised as a single one: of a short row the kernels could do
 * little at a time. */
static void join_rows(job *j) {
    if (j->from.stride != j->columns || j->band != 1)
        return;
    if (!j->is_amax) {
        if (j->to.format.is_swizzled || (j->size.block > 0 && j->columns % j->size.block != 0))
            return;
        void *data = data_at(j, 0, 0);
        if (j->size.scale_nbytes > 0)
            j->to.scales = (uint8_t *)j->to.scales + j->first * j->size.scale_columns;
        j->to.data = data;
    }
    j->first = 0;
    j->columns *= j->rows;
    j->rows = 1;
}

tb_status tb__quant_begin(job *j, const tb__quant_tensor *to, int64_t first, int64_t rows, int64_t columns,
                          const tb__quant_rows *from) {
    *j = (job){.kernels = tb__kernels_get()->quant,
               .is_amax = !to,
               .from = *from,
               .first = first,
               .rows = rows,
               .columns = columns,
               .first_row = first,
               .tensor_columns = columns,
               .band = 1,
               .width = ROW_PIECE};
    if (to) {
        j->to = *to;
        TB_TRY(tb__quant_check_tensor(to, first, rows, &j->size));
        TB_TRY(check_band(to, first, rows, j->size.band));
        j->band = j->size.band;
        j->width = to->format.kind == TB__QUANT_FP8_BLOCK ? BLOCKS_PIECE : ROW_PIECE;
        j->stream = rows * columns >= (j->size.data_dtype == TB_F4E2M1 ? 2 : 1) * (int64_t)TB__STREAM_BYTES;
        j->ends_tensor = rows > 0 && first + rows == to->rows;
    } else {
        TB_TRY(tb__quant_measure(&(tb__quant_format){.kind = TB__QUANT_FP8_TENSOR}, rows, columns, &j->size));
    }
    TB_TRY(tb__quant_check_rows(from, rows, columns));
    join_rows(j);
    atomic_init(&j->amax, 0);
    atomic_init(&j->bad, INT64_MAX);
    j->across = blocks_of(j->columns, j->width);
    j->nunits = blocks_of(j->rows, j->band) * j->across;
    int64_t parts = j->rows * j->columns / (TB__PIECE_BYTES / 4);
    j->nparts = tb__min64(parts < 1 ? 1 : parts, j->nunits);
    return TB_OK;
}

tb_status tb__quant_end(const job *j, float *amax) {
    int64_t bad = atomic_load(&j->bad);
    if (bad != INT64_MAX)
        return tb__fail(TB_INVALID, "the element at row %" PRId64 ", column %" PRId64 " is not finite",
                        j->first_row + bad / j->tensor_columns, bad % j->tensor_columns);
    if (!j->is_amax && j->to.format.is_swizzled && j->ends_tensor)
        clear_scale_padding(j);
    if (amax)
        *amax = tb__f32_of(atomic_load(&j->amax));
    return TB_OK;
}

static void quantise_parts(void *arg, int64_t from, int64_t to) {
    tb__quant_run(arg, from, to);
}

tb_status tb__quant_amax(const tb__quant_rows *from, int64_t rows, int64_t columns, float *out) {
    job j;
    TB_TRY(tb__quant_begin(&j, NULL, 0, rows, columns, from));
    tb__workers_for(j.nparts, quantise_parts, &j);
    return tb__quant_end(&j, out);
}

tb_status tb__quant_quantise(const tb__quant_tensor *to, int64_t first, int64_t rows, const tb__quant_rows *from) {
    job j;
    TB_TRY(tb__quant_begin(&j, to, first, rows, to->columns, from));
    tb__workers_for(j.nparts, quantise_parts, &j);
    return tb__quant_end(&j, NULL);
}

tb_status tb__quant_scale(const tb__quant_format *format, float amax, float *out) {
    TB_TRY(check_format(format));
    if (!(amax >= 0 && amax <= FLT_MAX))
        return tb__fail(TB_INVALID, "an amax of %g is none", (double)amax);
    if (format->kind == TB__QUANT_FP8_TENSOR) {
        *out = fp8_scale(tb__f32_bits(amax) & 0x7fffffff, format->is_power_of_two);
        return TB_OK;
    }
    if (format->kind != TB__QUANT_NVFP4)
        return tb__fail(TB_INVALID, "%s has no scale for the whole tensor", formats[format->kind].name);
    float scale = amax / (448.0F * 6.0F);
    *out = amax == 0 ? 1.0F : scale > 0 ? scale : tb__f32_of(1);
    return TB_OK;
}
