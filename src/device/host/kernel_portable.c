/* The kernels in plain C, written so that compilers vectorise them: selections instead of branches. */
#include "device/host/kernel.h"
#include "device/host/quant_kernel.h"

#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Rows may start anywhere. */
typedef float f32_any __attribute__((aligned(1), may_alias));
typedef uint8_t u8_any __attribute__((may_alias));
typedef uint16_t u16_any __attribute__((aligned(1), may_alias));

ALWAYS_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

enum { F32_INF = 0x7f800000, F32_NAN = 0x7fc00000, F32_ABS = 0x7fffffff };

/* A power of two's exponent field. */
#define F32_EXP(e) ((uint32_t)(127 + (e)) << 23)

ALWAYS_INLINE uint32_t f16_to_f32(uint32_t x) {
    uint32_t a = x & 0x7fff;
    uint32_t finite = a < 0x400 ? bits_of((float)(int32_t)a * 0x1p-24f) : (a << 13) + (112U << 23);
    uint32_t special = (a << 13) | F32_INF | (a > 0x7c00 ? 0x400000 : 0);
    return (a < 0x7c00 ? finite : special) | (x & 0x8000) << 16;
}

ALWAYS_INLINE uint32_t e4m3_to_f32(uint32_t x) {
    uint32_t a = x & 0x7f;
    uint32_t finite = a < 8 ? bits_of((float)(int32_t)a * 0x1p-9f) : (a << 20) + (120U << 23);
    return (a < 0x7f ? finite : F32_NAN) | (x & 0x80) << 24;
}

/* The magnitude rounded to `mantissa` bits, whose smallest normal number is 2^lowest: for those below, adding a number
 * whose last place is the smallest subnormal makes the processor do the rounding. */
ALWAYS_INLINE uint32_t round_magnitude(uint32_t a, int mantissa, int lowest) {
    int shift = 23 - mantissa;
    uint32_t magic = F32_EXP(lowest - mantissa + 23);
    uint32_t small = bits_of(float_of(a) + float_of(magic)) - magic;
    uint32_t normal = (a + (1U << (shift - 1)) - 1 + (a >> shift & 1) - F32_EXP(lowest - 1)) >> shift;
    return a < F32_EXP(lowest) ? small : normal;
}

ALWAYS_INLINE uint32_t f32_to_f16(uint32_t x) {
    uint32_t a = x & F32_ABS;
    uint32_t r = round_magnitude(a < F32_INF ? a : 0, 10, -14);
    r = a < 0x477ff000 ? r : 0x7c00; /* 65520 is halfway to what would come after 65504 */
    r = a <= F32_INF ? r : 0x7e00 | (a >> 13 & 0x3ff);
    return r | (x >> 16 & 0x8000);
}

ALWAYS_INLINE uint32_t f32_to_bf16(uint32_t x) {
    uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & F32_ABS) <= F32_INF ? rounded : x >> 16 | 0x40;
}

ALWAYS_INLINE uint32_t f32_to_e4m3(uint32_t x) {
    uint32_t a = x & F32_ABS, limit = 0x43e00000; /* 448 */
    uint32_t r = round_magnitude(a < limit ? a : limit, 3, -6);
    return (a <= F32_INF ? r : 0x7f) | (x >> 24 & 0x80);
}

ALWAYS_INLINE uint32_t f32_to_e5m2(uint32_t x) {
    uint32_t a = x & F32_ABS, limit = 0x47600000; /* 57344 */
    uint32_t r = round_magnitude(a < limit ? a : limit, 2, -14);
    return (a <= F32_INF ? r : 0x7f) | (x >> 24 & 0x80);
}

/* Element i of a row of one of the floats that are added up in f32. */
ALWAYS_INLINE float load(tb_dtype dtype, const void *src, size_t i) {
    switch (dtype) {
    case TB_F16:
        return float_of(f16_to_f32(((const u16_any *)src)[i]));
    case TB_BF16:
        return float_of((uint32_t)((const u16_any *)src)[i] << 16);
    case TB_F8E4M3:
        return float_of(e4m3_to_f32(((const u8_any *)src)[i]));
    case TB_F8E5M2:
        return float_of(f16_to_f32((uint32_t)((const u8_any *)src)[i] << 8));
    default:
        return ((const f32_any *)src)[i];
    }
}

#define WIDEN(name, dtype)                                                                                             \
    static void widen_##name(float *dst, const void *src, size_t n) {                                                  \
        f32_any *out = dst;                                                                                            \
        for (size_t i = 0; i < n; i++)                                                                                 \
            out[i] = load(dtype, src, i);                                                                              \
    }
WIDEN(f16, TB_F16)
WIDEN(bf16, TB_BF16)
WIDEN(e4m3, TB_F8E4M3)
WIDEN(e5m2, TB_F8E5M2)

#define NARROW(name, type)                                                                                             \
    static void narrow_##name(void *dst, const float *src, size_t n) {                                                 \
        type##_any *out = dst;                                                                                         \
        const f32_any *in = src;                                                                                       \
        for (size_t i = 0; i < n; i++)                                                                                 \
            out[i] = (type##_t)f32_to_##name(bits_of(in[i]));                                                          \
    }
typedef uint8_t u8_t;
typedef uint16_t u16_t;
NARROW(f16, u16)
NARROW(bf16, u16)
NARROW(e4m3, u8)
NARROW(e5m2, u8)

/* Both of them keep the accumulator where the two are equal, and NaN from either side. */
#define LESSER(a, b)  ((b) < (a) || (b) != (b) ? (b) : (a))
#define GREATER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))

ALWAYS_INLINE float apply_f32(tb_reduce_op op, float a, float b) {
    switch (op) {
    case TB_MIN:
        return LESSER(a, b);
    case TB_MAX:
        return GREATER(a, b);
    case TB_PRODUCT:
        return a * b;
    default:
        return a + b;
    }
}

ALWAYS_INLINE void combine_f32(tb_dtype dtype, tb_reduce_op op, void *acc, const void *const *src, uint32_t nsrc,
                               size_t n, bool resume) {
    f32_any *a = acc;
    if (!resume) {
        for (size_t i = 0; i < n; i++)
            a[i] = load(dtype, src[0], i);
    }
    for (uint32_t k = resume ? 0 : 1; k < nsrc; k++) {
        const void *in = src[k];
        for (size_t i = 0; i < n; i++)
            a[i] = apply_f32(op, a[i], load(dtype, in, i));
    }
    for (size_t i = 0; i < n; i++)
        a[i] = a[i] == a[i] ? a[i] : float_of(F32_NAN);
}

#define COMBINE_F32(name, dtype, op)                                                                                   \
    static void name(void *acc, const void *const *src, uint32_t nsrc, size_t n, bool resume) {                        \
        combine_f32(dtype, op, acc, src, nsrc, n, resume);                                                             \
    }
#define COMBINE_F32_ALL(name, dtype)                                                                                   \
    COMBINE_F32(name##_sum, dtype, TB_SUM)                                                                             \
    COMBINE_F32(name##_min, dtype, TB_MIN)                                                                             \
    COMBINE_F32(name##_max, dtype, TB_MAX)                                                                             \
    COMBINE_F32(name##_product, dtype, TB_PRODUCT)
COMBINE_F32_ALL(f32, TB_F32)
COMBINE_F32_ALL(f16, TB_F16)
COMBINE_F32_ALL(bf16, TB_BF16)
COMBINE_F32_ALL(e4m3, TB_F8E4M3)
COMBINE_F32_ALL(e5m2, TB_F8E5M2)

/* Sums and products of integers are worked out in an unsigned type no narrower than int, where wrapping is defined. */
#define COMBINE(name, type, wide, op, expr, canonical_nan)                                                             \
    static void name##_##op(void *acc, const void *const *src, uint32_t nsrc, size_t n, bool resume) {                 \
        typedef type any __attribute__((aligned(1), may_alias));                                                       \
        any *out = acc;                                                                                                \
        if (!resume)                                                                                                   \
            memcpy(acc, src[0], n * sizeof(type));                                                                     \
        for (uint32_t k = resume ? 0 : 1; k < nsrc; k++) {                                                             \
            const any *in = src[k];                                                                                    \
            for (size_t i = 0; i < n; i++) {                                                                           \
                wide a = (wide)out[i], b = (wide)in[i];                                                                \
                out[i] = (type)(expr);                                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        if (canonical_nan) {                                                                                           \
            for (size_t i = 0; i < n; i++)                                                                             \
                out[i] = out[i] == out[i] ? out[i] : (type)float_of(F32_NAN);                                          \
        }                                                                                                              \
    }
#define COMBINE_ALL(name, type, wide, canonical_nan)                                                                   \
    COMBINE(name, type, wide, sum, a + b, canonical_nan)                                                               \
    COMBINE(name, type, type, min, LESSER(a, b), canonical_nan)                                                        \
    COMBINE(name, type, type, max, GREATER(a, b), canonical_nan)                                                       \
    COMBINE(name, type, wide, product, a *b, canonical_nan)
COMBINE_ALL(f64, double, double, true)
COMBINE_ALL(u8, uint8_t, uint32_t, false)
COMBINE_ALL(u16, uint16_t, uint32_t, false)
COMBINE_ALL(u32, uint32_t, uint32_t, false)
COMBINE_ALL(u64, uint64_t, uint64_t, false)
COMBINE_ALL(i8, int8_t, uint32_t, false)
COMBINE_ALL(i16, int16_t, uint32_t, false)
COMBINE_ALL(i32, int32_t, uint32_t, false)
COMBINE_ALL(i64, int64_t, uint64_t, false)

static void stream(void *dst, const void *src, size_t nbytes, const void *next) {
    (void)next;
    memcpy(dst, src, nbytes);
}

static void stream_rows(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t nbytes) {
    for (int64_t i = 0; i < n; i++)
        memcpy(dst + i * dst_step, src + i * src_step, nbytes);
}

static void stream_zeros(void *dst, size_t nbytes) {
    memset(dst, 0, nbytes);
}

static void fence(void) {
}

#define OPS(name)                                                                                                      \
    {                                                                                                                  \
        [TB_SUM] = name##_sum, [TB_AVG] = name##_sum, [TB_MIN] = name##_min, [TB_MAX] = name##_max,                    \
        [TB_PRODUCT] = name##_product                                                                                  \
    }

const tb__kernels tb__kernels_portable = {
    .name = "portable",
    .widen = {[TB_F16] = widen_f16, [TB_BF16] = widen_bf16, [TB_F8E4M3] = widen_e4m3, [TB_F8E5M2] = widen_e5m2},
    .narrow = {[TB_F16] = narrow_f16, [TB_BF16] = narrow_bf16, [TB_F8E4M3] = narrow_e4m3, [TB_F8E5M2] = narrow_e5m2},
    .combine =
        {
            [TB_F8E4M3] = OPS(e4m3),
            [TB_F8E5M2] = OPS(e5m2),
            [TB_F16] = OPS(f16),
            [TB_BF16] = OPS(bf16),
            [TB_F32] = OPS(f32),
            [TB_F64] = OPS(f64),
            [TB_U8] = OPS(u8),
            [TB_U16] = OPS(u16),
            [TB_U32] = OPS(u32),
            [TB_U64] = OPS(u64),
            [TB_I8] = OPS(i8),
            [TB_I16] = OPS(i16),
            [TB_I32] = OPS(i32),
            [TB_I64] = OPS(i64),
        },
    .stream = stream,
    .stream_rows = stream_rows,
    .stream_zeros = stream_zeros,
    .fence = fence,
    .quant = &tb__quant_kernels_portable,
};
