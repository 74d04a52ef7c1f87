/* Numbers: conversions between f32 and the narrower floats, with the bits of the host's (device/host/kernel.h). What
 * the hardware converts is right for all but NaN, which it does not keep; so rows with a NaN take the exact functions,
 * which work on integers. */
#pragma once

#include "access.cuh"
#include "tensorbus/plan.h"

const uint32_t F32_INF = 0x7f800000, F32_NAN = 0x7fc00000, F32_ABS = 0x7fffffff;
const uint64_t F64_INF = 0x7ff0000000000000, F64_NAN = 0x7ff8000000000000, F64_ABS = 0x7fffffffffffffff;

INLINE uint32_t bits_of(float x) {
    return __float_as_uint(x);
}

INLINE float float_of(uint32_t bits) {
    return __uint_as_float(bits);
}

INLINE bool is_nan_bits(uint32_t bits) {
    return (bits & F32_ABS) > F32_INF;
}

/* ---- Exact ------------------------------------------------------------------------------------------------------- */

INLINE uint32_t widen_f16(uint32_t x) {
    uint32_t a = x & 0x7fff;
    uint32_t finite = a < 0x400 ? bits_of((float)(int32_t)a * 0x1p-24f) : (a << 13) + (112U << 23);
    uint32_t special = (a << 13) | F32_INF | (a > 0x7c00 ? 0x400000 : 0);
    return (a < 0x7c00 ? finite : special) | (x & 0x8000) << 16;
}

INLINE uint32_t widen_e4m3(uint32_t x) {
    uint32_t a = x & 0x7f;
    uint32_t finite = a < 8 ? bits_of((float)(int32_t)a * 0x1p-9f) : (a << 20) + (120U << 23);
    return (a < 0x7f ? finite : F32_NAN) | (x & 0x80) << 24;
}

/* The magnitude rounded to MANTISSA bits, whose smallest normal number is 2^LOWEST. Below that, adding a number whose
 * last place is the smallest subnormal does the rounding. */
template <int MANTISSA, int LOWEST> INLINE uint32_t round_magnitude(uint32_t a) {
    const int shift = 23 - MANTISSA;
    const uint32_t magic = (uint32_t)(127 + LOWEST - MANTISSA + 23) << 23;
    uint32_t small = bits_of(float_of(a) + float_of(magic)) - magic;
    uint32_t normal = (a + (1U << (shift - 1)) - 1 + (a >> shift & 1) - ((uint32_t)(127 + LOWEST - 1) << 23)) >> shift;
    return a < (uint32_t)(127 + LOWEST) << 23 ? small : normal;
}

INLINE uint32_t narrow_f16(uint32_t x) {
    uint32_t a = x & F32_ABS;
    uint32_t r = round_magnitude<10, -14>(a < F32_INF ? a : 0);
    r = a < 0x477ff000 ? r : 0x7c00; /* 65520 is halfway to what would come after 65504 */
    r = a <= F32_INF ? r : 0x7e00 | (a >> 13 & 0x3ff);
    return r | (x >> 16 & 0x8000);
}

INLINE uint32_t narrow_bf16(uint32_t x) {
    uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & F32_ABS) <= F32_INF ? rounded : x >> 16 | 0x40;
}

INLINE uint32_t narrow_e4m3(uint32_t x) {
    uint32_t a = x & F32_ABS, limit = 0x43e00000; /* 448 */
    uint32_t r = round_magnitude<3, -6>(a < limit ? a : limit);
    return (a <= F32_INF ? r : 0x7f) | (x >> 24 & 0x80);
}

INLINE uint32_t narrow_e5m2(uint32_t x) {
    uint32_t a = x & F32_ABS, limit = 0x47600000; /* 57344 */
    uint32_t r = round_magnitude<2, -14>(a < limit ? a : limit);
    return (a <= F32_INF ? r : 0x7f) | (x >> 24 & 0x80);
}

/* f64 to f32, and back: a NaN keeps its sign and what fits of its payload, and becomes quiet. */
INLINE uint32_t narrow_f64(uint64_t x) {
    if ((x & F64_ABS) > F64_INF)
        return (uint32_t)(x >> 32 & 0x80000000) | F32_NAN | (uint32_t)(x >> 29 & 0x3fffff);
    return bits_of((float)__longlong_as_double((int64_t)x));
}

INLINE uint64_t widen_to_f64(uint32_t x) {
    if (is_nan_bits(x))
        return (uint64_t)(x & 0x80000000) << 32 | F64_NAN | (uint64_t)(x & 0x3fffff) << 29;
    return (uint64_t)__double_as_longlong((double)float_of(x));
}

static __device__ __noinline__ uint32_t widen_exactly(uint32_t dtype, uint32_t x) {
    switch (dtype) {
    case TB_F16:
        return widen_f16(x);
    case TB_BF16:
        return x << 16;
    case TB_F8E4M3:
        return widen_e4m3(x);
    case TB_F8E5M2:
        return widen_f16(x << 8);
    default:
        return x;
    }
}

static __device__ __noinline__ uint32_t narrow_exactly(uint32_t dtype, uint32_t x) {
    switch (dtype) {
    case TB_F16:
        return narrow_f16(x);
    case TB_BF16:
        return narrow_bf16(x);
    case TB_F8E4M3:
        return narrow_e4m3(x);
    case TB_F8E5M2:
        return narrow_e5m2(x);
    default:
        return x;
    }
}

/* ---- Fast: not for NaN ------------------------------------------------------------------------------------------- */

/* Not on a GPU, for tests: what the instructions below take a NaN for, whose sign and payload they lose. */
INLINE uint32_t bits_without_payload(float x) {
    return x == x ? bits_of(x) : F32_ABS;
}

/* Two in a word, the first in the lower half. */

INLINE uint32_t pack_bf16(float x, float y) {
#if defined __CUDA_ARCH__
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
#else
    return narrow_bf16(bits_without_payload(x)) | narrow_bf16(bits_without_payload(y)) << 16;
#endif
}

INLINE uint32_t pack_f16(float x, float y) {
#if defined __CUDA_ARCH__
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
    return r;
#else
    return narrow_f16(bits_without_payload(x)) | narrow_f16(bits_without_payload(y)) << 16;
#endif
}

/* Two in 16 bits. */

INLINE uint32_t pack_e4m3(float x, float y) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
    return r;
#else
    return narrow_e4m3(bits_of(x)) | narrow_e4m3(bits_of(y)) << 8;
#endif
}

INLINE uint32_t pack_e5m2(float x, float y) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
    return r;
#else
    return narrow_e5m2(bits_of(x)) | narrow_e5m2(bits_of(y)) << 8;
#endif
}

INLINE float unpack_f16(uint32_t x) {
#if defined __CUDA_ARCH__
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((uint16_t)x));
    return r;
#else
    return float_of(bits_without_payload(float_of(widen_f16(x & 0xffff))));
#endif
}

/* Byte i of the words of four codes. */
INLINE uint32_t byte_of(const uint32_t *w, int i) {
    return w[i / 4] >> (i % 4 * 8) & 0xff;
}

/* N elements of SIZE bytes each, as f32. A NaN comes out as some NaN. */
template <int SIZE, int N> INLINE void widen(uint32_t dtype, const uint32_t *w, float *x) {
    if constexpr (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = float_of(w[i]);
    } else if constexpr (SIZE == 2) {
        if (dtype == TB_BF16) {
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = float_of(i % 2 ? w[i / 2] & 0xffff0000 : w[i / 2] << 16);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = unpack_f16(w[i / 2] >> (i % 2 * 16));
        }
    } else {
        if (dtype == TB_F8E4M3) {
            /* As an f16 the bits stand for a 256th of the value, subnormals included. */
#pragma unroll
            for (int i = 0; i < N; i++) {
                uint32_t c = byte_of(w, i), a = c & 0x7f;
                float y = unpack_f16(a << 7 | (c & 0x80) << 8) * 256.0f;
                x[i] = a == 0x7f ? float_of(F32_NAN) : y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
                x[i] = unpack_f16(byte_of(w, i) << 8);
        }
    }
}

/* N numbers, none of them NaN, to SIZE bytes each. */
template <int SIZE, int N> INLINE void narrow(uint32_t dtype, const float *x, uint32_t *w) {
    if constexpr (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < N; i++)
            w[i] = bits_of(x[i]);
    } else if constexpr (SIZE == 2) {
        if (dtype == TB_BF16) {
#pragma unroll
            for (int i = 0; i < N; i += 2)
                w[i / 2] = pack_bf16(x[i], x[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2)
                w[i / 2] = pack_f16(x[i], x[i + 1]);
        }
    } else {
        if (dtype == TB_F8E4M3) {
#pragma unroll
            for (int i = 0; i < N; i += 4)
                w[i / 4] = pack_e4m3(x[i], x[i + 1]) | pack_e4m3(x[i + 2], x[i + 3]) << 16;
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 4)
                w[i / 4] = pack_e5m2(x[i], x[i + 1]) | pack_e5m2(x[i + 2], x[i + 3]) << 16;
        }
    }
}

/* Numbers through a dtype, none of them NaN. */
template <int N> INLINE void round_through(uint32_t dtype, float *x) {
    uint32_t w[N];
    if (dtype == TB_F16 || dtype == TB_BF16) {
        narrow<2, N>(dtype, x, w);
        widen<2, N>(dtype, w, x);
    } else if (dtype == TB_F8E4M3 || dtype == TB_F8E5M2) {
        narrow<1, N>(dtype, x, w);
        widen<1, N>(dtype, w, x);
    }
}

template <int N> INLINE bool has_nan(const float *x) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < N; i++)
        found |= x[i] != x[i];
    return found;
}

/* The bits of element i of a vector, and setting them in one that is zero there. */
template <int SIZE> INLINE uint32_t get_element(const uint32_t *w, int i) {
    if constexpr (SIZE == 4)
        return w[i];
    return w[i * SIZE / 4] >> (i * SIZE % 4 * 8) & ((1U << (SIZE * 8 % 32)) - 1);
}

template <int SIZE> INLINE void add_element(uint32_t *w, int i, uint32_t bits) {
    w[i * SIZE / 4] |= bits << (i * SIZE % 4 * 8);
}

/* A number of any kind, given as f32 bits, through the wire's dtype to the destination's. */
INLINE uint32_t finish_element(const tb__cuda_box *box, uint32_t bits) {
    if (box->has_wire && box->wire_dtype == TB_F64)
        bits = narrow_f64(widen_to_f64(bits)); /* a NaN becomes quiet */
    else if (box->has_wire)
        bits = widen_exactly(box->wire_dtype, narrow_exactly(box->wire_dtype, bits));
    return narrow_exactly(box->dst_dtype, bits);
}

template <int DS, int N> INLINE void finish_exactly(const tb__cuda_box *box, const uint32_t *bits, uint32_t *out) {
#pragma unroll
    for (int i = 0; i < N * DS / 4; i++)
        out[i] = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        add_element<DS>(out, i, finish_element(box, bits[i]));
}
