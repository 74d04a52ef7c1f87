/* Reference quantisers. Exponents come from comparing, rounding from searching, places from counting. */
#include "quantised.h"

#include <math.h>
#include <string.h>

static int64_t blocks(int64_t n, int64_t block) {
    return (n + block - 1) / block;
}

static float load(const tb__quant_rows *from, int64_t row, int64_t column) {
    size_t size = number_size(from->dtype);
    const char *at = (const char *)from->data + (size_t)(row * from->stride + column) * size;
    return (float)number_value(from->dtype, number_load(from->dtype, at));
}

/* Of a box, as far as the tensor goes. */
static float amax_of(const tb__quant_tensor *t, const tb__quant_rows *from, int64_t row, int64_t column, int64_t height,
                     int64_t width) {
    float amax = 0;
    for (int64_t r = row; r < row + height && r < t->rows; r++) {
        for (int64_t c = column; c < column + width && c < t->columns; c++)
            amax = fmaxf(amax, fabsf(load(from, r, c)));
    }
    return amax;
}

static uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint8_t)number_cast(TB_F32, TB_F8E4M3, bits);
}

double quantised_e2m1(unsigned code) {
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

static unsigned to_e2m1(float x) {
    unsigned best = 0;
    double a = fabs((double)x);
    for (unsigned code = 1; code < 8; code++) {
        double before = fabs(a - quantised_e2m1(best)), now = fabs(a - quantised_e2m1(code));
        if (now < before || (now == before && code % 2 == 0))
            best = code;
    }
    if (a >= 6) /* infinities are as far from everything */
        best = 7;
    return best | (signbit(x) ? 8 : 0);
}

/* The least e with 448 * 2^e >= amax, or the largest with 2^e <= amax, less 8; as far as a byte goes. */
static int mxfp8_exponent(float amax, bool is_floor) {
    int e = -127;
    if (is_floor) {
        while (e < 127 && ldexp(1, e + 8 + 1) <= (double)amax)
            e++;
    } else {
        while (e < 127 && ldexp(448, e) < (double)amax)
            e++;
    }
    return e;
}

static float power_of_two_scale(float amax) {
    int e = -126;
    while (ldexp(448, e) < (double)amax)
        e++;
    return (float)ldexp(1, e);
}

static float fp8_scale(float amax, bool is_power_of_two) {
    if (amax == 0)
        return 1;
    if (is_power_of_two)
        return power_of_two_scale(amax);
    float scale = amax / 448.0F;
    return scale == 0 ? 0x1p-149F : scale;
}

static int64_t scale_place(const tb__quant_tensor *t, int64_t row, int64_t column, int64_t columns) {
    if (!t->format.is_swizzled)
        return row * columns + column;
    /* Tiles of 128 x 4, row after row of them; in a tile 32 rows of 16 bytes, each with row r, r+32, r+64, r+96. */
    int64_t tile = row / 128 * blocks(columns, 4) + column / 4, r = row % 128;
    return tile * 512 + (r % 32) * 16 + (r / 32) * 4 + column % 4;
}

static void make_mxfp8(const tb__quant_tensor *to, const tb__quant_rows *from) {
    int64_t columns = blocks(to->columns, 32);
    for (int64_t r = 0; r < to->rows; r++) {
        for (int64_t c = 0; c < to->columns; c++) {
            int e = mxfp8_exponent(amax_of(to, from, r, c / 32 * 32, 1, 32), to->format.is_floor);
            ((uint8_t *)to->data)[r * to->columns + c] = to_e4m3((float)ldexp(load(from, r, c), -e));
            ((uint8_t *)to->scales)[scale_place(to, r, c / 32, columns)] = (uint8_t)(e + 127);
        }
    }
}

static void make_fp8(const tb__quant_tensor *to, const tb__quant_rows *from) {
    bool has_blocks = to->format.kind == TB__QUANT_FP8_BLOCK;
    int64_t columns = blocks(to->columns, 128);
    for (int64_t b = 0; has_blocks && b < blocks(to->rows, 128) * columns; b++) {
        float amax = amax_of(to, from, b / columns * 128, b % columns * 128, 128, 128);
        ((float *)to->scales)[b] = fp8_scale(amax, to->format.is_power_of_two);
    }
    for (int64_t r = 0; r < to->rows; r++) {
        for (int64_t c = 0; c < to->columns; c++) {
            float scale = has_blocks ? ((const float *)to->scales)[r / 128 * columns + c / 128] : to->scale;
            ((uint8_t *)to->data)[r * to->columns + c] = to_e4m3(load(from, r, c) / scale);
        }
    }
}

static void make_nvfp4(const tb__quant_tensor *to, const tb__quant_rows *from) {
    int64_t columns = blocks(to->columns, 16);
    for (int64_t r = 0; r < to->rows; r++) {
        for (int64_t c = 0; c < to->columns; c++) {
            float amax = amax_of(to, from, r, c / 16 * 16, 1, 16), sixth = amax / 6.0F;
            uint8_t scale = to_e4m3(sixth / to->scale);
            float divisor = (float)number_value(TB_F8E4M3, scale) * to->scale, x = load(from, r, c);
            unsigned code = divisor == 0 ? (signbit(x) ? 8 : 0) : to_e2m1(x / divisor);
            uint8_t *byte = (uint8_t *)to->data + (r * to->columns + c) / 2;
            *byte = c % 2 ? (uint8_t)((*byte & 15) | code << 4) : (uint8_t)code;
            ((uint8_t *)to->scales)[scale_place(to, r, c / 16, columns)] = scale;
        }
    }
}

void quantised_make(const tb__quant_tensor *to, const tb__quant_rows *from) {
    tb__quant_size size;
    if (tb__quant_measure(&to->format, to->rows, to->columns, &size) == TB_OK && size.scale_nbytes > 0)
        memset(to->scales, 0, (size_t)size.scale_nbytes);
    if (to->format.kind == TB__QUANT_MXFP8)
        make_mxfp8(to, from);
    else if (to->format.kind == TB__QUANT_NVFP4)
        make_nvfp4(to, from);
    else
        make_fp8(to, from);
}

uint64_t quantised_value(const tb__quant_tensor *t, int64_t row, int64_t column, tb_dtype dtype) {
    const uint8_t *data = t->data, *scales = t->scales;
    int64_t at = row * t->columns + column, block = t->format.kind == TB__QUANT_NVFP4 ? 16 : 32;
    double value = 0, scale = t->scale;
    if (t->format.kind == TB__QUANT_NVFP4)
        value = quantised_e2m1(at % 2 ? data[at / 2] >> 4 : data[at / 2] & 15);
    else
        value = number_value(TB_F8E4M3, data[at]);
    if (t->format.kind == TB__QUANT_FP8_BLOCK) {
        scale = ((const float *)t->scales)[row / 128 * blocks(t->columns, 128) + column / 128];
    } else if (t->format.kind != TB__QUANT_FP8_TENSOR) {
        uint8_t byte = scales[scale_place(t, row, column / block, blocks(t->columns, block))];
        scale = t->format.kind == TB__QUANT_MXFP8 ? ldexp(1, byte - 127)
                                                  : (double)(float)(number_value(TB_F8E4M3, byte) * (double)t->scale);
    }
    float product = (float)(value * scale);
    uint32_t bits;
    memcpy(&bits, &product, sizeof bits);
    return number_cast(TB_F32, dtype, bits);
}
