/* Quantisers of one row, or of a piece of one that begins with a block; in portable C, for AVX2, and for AVX-512,
 * with the same bits.
 *
 * Each returns the bits of the largest magnitude: those of infinity or more where an element is not finite, and then
 * its output is undefined. With `stream`, stores of aligned data bypass the cache; the caller calls tb__kernels.fence
 * at the end. */
#ifndef TB_DEVICE_HOST_QUANT_KERNEL_H
#define TB_DEVICE_HOST_QUANT_KERNEL_H

#include "tensorbus/tensorbus.h"

enum {
    TB__MXFP8_BLOCK = 32,
    TB__FP8_BLOCK = 128,
    TB__NVFP4_BLOCK = 16,
    TB__F32_INF = 0x7f800000,
};

/* By dtype of the source: f32, f16, bf16. */
typedef struct tb__quant_kernels {
    uint32_t (*amax[TB_DTYPE_COUNT])(const void *src, size_t n);
    uint32_t (*mxfp8[TB_DTYPE_COUNT])(uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor,
                                      bool stream);
    uint32_t (*fp8[TB_DTYPE_COUNT])(uint8_t *data, const void *src, size_t n, float scale, bool stream);
    uint32_t (*nvfp4[TB_DTYPE_COUNT])(uint8_t *data, uint8_t *scales, const void *src, size_t n, float global,
                                      bool stream);
} tb__quant_kernels;

/* Those of a set are its `quant`. */
extern const tb__quant_kernels tb__quant_kernels_portable;
#ifdef __x86_64__
extern const tb__quant_kernels tb__quant_kernels_avx2;
const tb__quant_kernels *tb__quant_kernels_avx512(void); /* for one thread at a time */
#endif

/* Arithmetic that the sets share. */

static inline uint32_t tb__larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

static inline uint32_t tb__f32_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float tb__f32_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

/* The E8M0 byte for an amax, plus 8. 448 is 1.75 * 2^8: rounding up is a carry from fractions over .75. */
static inline uint32_t tb__mxfp8_exponent(uint32_t amax, bool is_floor) {
    return (is_floor ? amax : amax + 0x1fffff) >> 23;
}

static inline uint32_t tb__mxfp8_scale(uint32_t amax, bool is_floor) {
    uint32_t exponent = tb__mxfp8_exponent(amax, is_floor);
    return exponent > 8 ? exponent - 8 : 0;
}

/* 2^(127 - byte), by which elements are multiplied; both are powers of two, so nothing that counts is rounded. Bytes
 * over 247 come from elements that are not finite. */
static inline float tb__mxfp8_factor(uint32_t scale) {
    return tb__f32_of((254 - scale) << 23);
}

/* A finite magnitude, rounded to E4M3. Below 2^-6, adding a number whose last place is 2^-9 does the rounding. */
static inline uint8_t tb__e4m3_round(float x) {
    const float magic = 0x1p14F;
    uint32_t a = tb__f32_bits(x < 448.0F ? x : 448.0F);
    if (a < 121U << 23)
        return (uint8_t)(tb__f32_bits(tb__f32_of(a) + magic) - tb__f32_bits(magic));
    return (uint8_t)((a + 0x7ffff + (a >> 20 & 1) - (120U << 23)) >> 20);
}

/* The value of a code below 0x7f. */
static inline float tb__e4m3_value(uint8_t code) {
    return code < 8 ? (float)code * 0x1p-9F : tb__f32_of(((uint32_t)code << 20) + (120U << 23));
}

/* The divisor of a block's elements; infinity, which makes them zeros, if it would be 0. */
static inline float tb__nvfp4_divisor(uint8_t scale, float global) {
    float divisor = tb__e4m3_value(scale) * global;
    return divisor > 0 ? divisor : tb__f32_of(TB__F32_INF);
}

#endif
