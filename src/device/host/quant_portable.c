/* The quantisers in plain C: block by block, by way of f32 and the casts of kernel.h. */
#include "device/host/kernel.h"
#include "device/host/quant_kernel.h"

#include "base/int.h"

#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { STEP = 128 }; /* elements at a time, for formats without blocks */

ALWAYS_INLINE size_t bytes_per(tb_dtype dtype) {
    return dtype == TB_F32 ? 4 : 2;
}

/* Elements from..from+n-1 as f32; the bits of the largest magnitude. */
ALWAYS_INLINE uint32_t load(tb_dtype dtype, float *out, const void *src, size_t from, size_t n) {
    const char *at = (const char *)src + from * bytes_per(dtype);
    if (dtype == TB_F32)
        memcpy(out, at, n * sizeof *out);
    else
        tb__kernels_portable.widen[dtype](out, at, n);
    uint32_t amax = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t a = tb__f32_bits(out[i]) & 0x7fffffff;
        amax = a > amax ? a : amax;
    }
    return amax;
}

ALWAYS_INLINE uint32_t amax(tb_dtype dtype, const void *src, size_t n) {
    float x[STEP];
    uint32_t all = 0;
    for (size_t i = 0; i < n; i += STEP)
        all = tb__larger(all, load(dtype, x, src, i, tb__min_size(STEP, n - i)));
    return all;
}

ALWAYS_INLINE uint32_t mxfp8(tb_dtype dtype, uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor) {
    float x[TB__MXFP8_BLOCK];
    uint32_t all = 0;
    for (size_t i = 0; i < n; i += TB__MXFP8_BLOCK) {
        size_t count = tb__min_size(TB__MXFP8_BLOCK, n - i);
        uint32_t most = load(dtype, x, src, i, count), scale = tb__mxfp8_scale(most, is_floor);
        float factor = tb__mxfp8_factor(scale);
        for (size_t k = 0; k < count; k++)
            x[k] *= factor;
        tb__kernels_portable.narrow[TB_F8E4M3](data + i, x, count);
        scales[i / TB__MXFP8_BLOCK] = (uint8_t)scale;
        all = tb__larger(all, most);
    }
    return all;
}

ALWAYS_INLINE uint32_t fp8(tb_dtype dtype, uint8_t *data, const void *src, size_t n, float scale) {
    float x[STEP];
    uint32_t all = 0;
    for (size_t i = 0; i < n; i += STEP) {
        size_t count = tb__min_size(STEP, n - i);
        all = tb__larger(all, load(dtype, x, src, i, count));
        for (size_t k = 0; k < count; k++)
            x[k] /= scale;
        tb__kernels_portable.narrow[TB_F8E4M3](data + i, x, count);
    }
    return all;
}

/* Like E4M3's rounding, with one bit of fraction and 1 the smallest normal number. */
static uint8_t e2m1_round(float x) {
    const float magic = 0x1p22F;
    uint32_t bits = tb__f32_bits(x), sign = bits >> 28 & 8, limit = 0x40c00000; /* 6 */
    uint32_t a = bits & 0x7fffffff;
    a = a < limit ? a : limit;
    uint32_t small = tb__f32_bits(tb__f32_of(a) + magic) - tb__f32_bits(magic);
    uint32_t normal = (a + 0x1fffff + (a >> 22 & 1) - (126U << 23)) >> 22;
    return (uint8_t)((a < 127U << 23 ? small : normal) | sign);
}

ALWAYS_INLINE uint32_t nvfp4(tb_dtype dtype, uint8_t *data, uint8_t *scales, const void *src, size_t n, float global) {
    float x[TB__NVFP4_BLOCK];
    uint32_t all = 0;
    for (size_t i = 0; i < n; i += TB__NVFP4_BLOCK) {
        size_t count = tb__min_size(TB__NVFP4_BLOCK, n - i);
        uint32_t most = load(dtype, x, src, i, count);
        uint8_t scale = tb__e4m3_round(tb__f32_of(most) / 6.0F / global);
        float divisor = tb__nvfp4_divisor(scale, global);
        for (size_t k = 0; k + 1 < count; k += 2)
            data[(i + k) / 2] = (uint8_t)(e2m1_round(x[k] / divisor) | e2m1_round(x[k + 1] / divisor) << 4);
        scales[i / TB__NVFP4_BLOCK] = scale;
        all = tb__larger(all, most);
    }
    return all;
}

/* The portable quantisers do not stream. */
#define KERNELS(name, dtype)                                                                                           \
    static uint32_t amax_##name(const void *src, size_t n) {                                                           \
        return amax(dtype, src, n);                                                                                    \
    }                                                                                                                  \
    static uint32_t mxfp8_##name(uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor,             \
                                 bool stream) {                                                                        \
        (void)stream;                                                                                                  \
        return mxfp8(dtype, data, scales, src, n, is_floor);                                                           \
    }                                                                                                                  \
    static uint32_t fp8_##name(uint8_t *data, const void *src, size_t n, float scale, bool stream) {                   \
        (void)stream;                                                                                                  \
        return fp8(dtype, data, src, n, scale);                                                                        \
    }                                                                                                                  \
    static uint32_t nvfp4_##name(uint8_t *data, uint8_t *scales, const void *src, size_t n, float global,              \
                                 bool stream) {                                                                        \
        (void)stream;                                                                                                  \
        return nvfp4(dtype, data, scales, src, n, global);                                                             \
    }
KERNELS(f32, TB_F32)
KERNELS(f16, TB_F16)
KERNELS(bf16, TB_BF16)

const tb__quant_kernels tb__quant_kernels_portable = {
    .amax = {[TB_F32] = amax_f32, [TB_F16] = amax_f16, [TB_BF16] = amax_bf16},
    .mxfp8 = {[TB_F32] = mxfp8_f32, [TB_F16] = mxfp8_f16, [TB_BF16] = mxfp8_bf16},
    .fp8 = {[TB_F32] = fp8_f32, [TB_F16] = fp8_f16, [TB_BF16] = fp8_bf16},
    .nvfp4 = {[TB_F32] = nvfp4_f32, [TB_F16] = nvfp4_f16, [TB_BF16] = nvfp4_bf16},
};
