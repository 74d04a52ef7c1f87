/* The quantisers for processors with AVX2 and F16C. Ends of rows that are shorter than a step go to the portable
 * ones. */
#include "device/host/kernel.h"
#include "device/host/quant_kernel.h"

#ifdef __x86_64__

#include "device/host/avx2.h"

AVX2_INLINE size_t bytes_per(tb_dtype dtype) {
    return dtype == TB_F32 ? 4 : 2;
}

/* Elements i .. i+7. */
AVX2_INLINE __m256 load8(tb_dtype dtype, const void *src, size_t i) {
    const char *at = (const char *)src + i * bytes_per(dtype);
    switch (dtype) {
    case TB_F16:
        return _mm256_cvtph_ps(load128(at));
    case TB_BF16:
        return float_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(at)), 16));
    default:
        return _mm256_loadu_ps((const float *)(const void *)at);
    }
}

AVX2_INLINE __m256i magnitude(__m256 x) {
    return _mm256_and_si256(bits_of(x), _mm256_set1_epi32(0x7fffffff));
}

AVX2_INLINE uint32_t largest(__m256i x) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

/* Finite numbers, rounded as the portable tb__e4m3_round does, for a format with so many bits of fraction, whose
 * smallest normal number is 2^lowest. */
#define ROUND(name, mantissa, lowest, limit, sign_at)                                                                  \
    AVX2_INLINE __m256i name(__m256 v) {                                                                               \
        enum { SHIFT = 23 - (mantissa), MAGIC = (127 + (lowest) - (mantissa) + 23) << 23 };                            \
        __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits_of(v), 31), sign_at);                                  \
        __m256 a = _mm256_min_ps(float_of(magnitude(v)), _mm256_set1_ps(limit));                                       \
        __m256i magic = _mm256_set1_epi32(MAGIC);                                                                      \
        __m256i small = _mm256_sub_epi32(bits_of(_mm256_add_ps(a, float_of(magic))), magic);                           \
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits_of(a), SHIFT), _mm256_set1_epi32(1));                    \
        __m256i offset = _mm256_set1_epi32((1 << (SHIFT - 1)) - 1 - ((127 + (lowest)-1) << 23));                       \
        __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits_of(a), offset), odd), SHIFT);        \
        __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32((127 + (lowest)) << 23), bits_of(a));                  \
        return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);                                     \
    }
ROUND(e4m3_round, 3, -6, 448.0F, 7)
ROUND(e2m1_round, 1, 0, 6.0F, 3)

/* Four vectors of codes as 32 bytes in order: packing works on each half of the vectors by itself. */
AVX2_INLINE __m256i pack32(const __m256i c[4]) {
    __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(c[0], c[1]), _mm256_packus_epi32(c[2], c[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

AVX2_INLINE void put32(uint8_t *dst, __m256i x, bool stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)(void *)dst, x);
    else
        _mm256_storeu_si256((__m256i *)(void *)dst, x);
}

AVX2_INLINE bool is_aligned(const void *p, size_t to) {
    return (uintptr_t)p % to == 0;
}

AVX2_INLINE uint32_t amax(tb_dtype dtype, const void *src, size_t n) {
    __m256i most[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        most[0] = _mm256_max_epi32(most[0], magnitude(load8(dtype, src, i)));
        most[1] = _mm256_max_epi32(most[1], magnitude(load8(dtype, src, i + 8)));
    }
    uint32_t all = largest(_mm256_max_epi32(most[0], most[1]));
    if (i < n)
        all = tb__larger(all, tb__quant_kernels_portable.amax[dtype]((const char *)src + i * bytes_per(dtype), n - i));
    return all;
}

AVX2_INLINE __m256i mxfp8_block(tb_dtype dtype, const void *src, size_t i, float factor) {
    __m256i code[4];
    for (size_t k = 0; k < 4; k++)
        code[k] = e4m3_round(_mm256_mul_ps(load8(dtype, src, i + 8 * k), _mm256_set1_ps(factor)));
    return pack32(code);
}

AVX2_INLINE uint32_t mxfp8(tb_dtype dtype, uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor,
                           bool stream) {
    size_t i = 0;
    uint32_t all = 0;
    stream = stream && is_aligned(data, 32);
    for (; i + TB__MXFP8_BLOCK <= n; i += TB__MXFP8_BLOCK) {
        __m256i most = magnitude(load8(dtype, src, i));
        for (size_t k = 8; k < TB__MXFP8_BLOCK; k += 8)
            most = _mm256_max_epi32(most, magnitude(load8(dtype, src, i + k)));
        uint32_t bits = largest(most), scale = tb__mxfp8_scale(bits, is_floor);
        put32(data + i, mxfp8_block(dtype, src, i, tb__mxfp8_factor(scale)), stream);
        scales[i / TB__MXFP8_BLOCK] = (uint8_t)scale;
        all = tb__larger(all, bits);
    }
    if (i == n)
        return all;
    const char *rest = (const char *)src + i * bytes_per(dtype);
    return tb__larger(all, tb__quant_kernels_portable.mxfp8[dtype](data + i, scales + i / TB__MXFP8_BLOCK, rest, n - i,
                                                                   is_floor, false));
}

/* A bf16 and a power of two need no multiplication: a magnitude's bits less those of the scale are E4M3's with four
 * more bits of fraction. That holds for E4M3's normal numbers. LOWEST exponents below them there may still be something
 * left after rounding; weights seldom have that, so that it is first done without. */
enum { LOWEST = 4, BF16_ONE = 128, LEAST_NORMAL = 8, MOST = 126 };

/* Compilers would rather make a constant again each time. */
AVX2_INLINE __m256i keep(__m256i constant) {
    __asm__("" : "+x"(constant));
    return constant;
}

AVX2_INLINE __m256i words(int x) {
    return keep(_mm256_set1_epi16((short)x));
}

AVX2_INLINE __m256i bytes(int x) {
    return keep(_mm256_set1_epi8((char)x));
}

typedef struct constants {
    __m256i magnitude, swap, carry, exponent, bias, least_scale, low, gather; /* of scales */
    __m256i last_bit, sixteenth, one, lowest, factors, least, most, sign;     /* of elements */
} constants;

AVX2_INLINE constants make_constants(void) {
    return (constants){
        .magnitude = words(0x7fff),
        .swap = keep(_mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13))),
        .carry = words(0x1fffff >> 16), /* as in tb__mxfp8_exponent; the lower half of a bf16's bits is 0 */
        .exponent = words(0xff80),
        .bias = words(8 * BF16_ONE),
        .least_scale = words((7 + LOWEST) * BF16_ONE),
        .low = words(LOWEST * BF16_ONE),
        /* The first byte of each quarter to where it is in the result. */
        .gather = keep(_mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 8, -1,
                                        -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)),
        .last_bit = words(1),
        .sixteenth = words(1 << 11), /* of what _mm256_mulhrs_epi16 takes for 1 */
        .one = words(BF16_ONE),      /* the 256th of that, too */
        .lowest = words(LOWEST * BF16_ONE << 4),
        /* By the exponent: the factor of a fraction below the normal numbers, in place of a shift. */
        .factors = keep(_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))),
        .least = bytes(LEAST_NORMAL),
        .most = bytes(MOST),
        .sign = bytes(0x80),
    };
}

/* The codes, without signs, of sixteen magnitudes from which (scale - 7) exponents were subtracted, and 0 is what was
 * below. Those over 448 give codes over 126. Those below the normal numbers are wrong, but LEAST_NORMAL at most. */
AVX2_INLINE __m256i normal_codes(const constants *k, __m256i a) {
    /* Halves are rounded up, so that the even ones must become a little less first. */
    __m256i is_even = _mm256_andnot_si256(_mm256_srli_epi16(a, 4), k->last_bit);
    return _mm256_mulhrs_epi16(_mm256_sub_epi16(a, is_even), k->sixteenth);
}

/* The same for (scale - 7 - LOWEST) exponents, and all are right. */
AVX2_INLINE __m256i all_codes(const constants *k, __m256i a) {
    /* The upper bytes of the factors are 0, so that only the fractions are multiplied. */
    __m256i factor = _mm256_shuffle_epi8(k->factors, _mm256_srli_epi16(a, 7));
    __m256i small = _mm256_maddubs_epi16(_mm256_or_si256(a, k->one), factor);
    __m256i normal = _mm256_sub_epi16(_mm256_slli_epi16(a, 4), k->lowest);
    /* Eight bits of fraction now. The larger is the right one: below 2^-6 `normal` is too small, above it `small` is.
     */
    __m256i x = _mm256_max_epi16(small, normal);
    __m256i is_even = _mm256_andnot_si256(_mm256_srli_epi16(x, 8), k->last_bit);
    return _mm256_mulhrs_epi16(_mm256_sub_epi16(x, is_even), k->one);
}

/* Blocks are done four at a time, so that their scales are found in one vector, where each has the words of a quarter.
 */
enum { QUAD = 4, QUAD_LENGTH = QUAD * TB__MXFP8_BLOCK, EXACT_LENGTH = 8 * QUAD_LENGTH };
#define SIGNS 0xaaaaaaaa /* of words, in a mask of bytes */

typedef struct bf16_row {
    uint8_t *data, *scales;
    const void *src; /* bf16 */
} bf16_row;

AVX2_INLINE __m256i load16(const bf16_row *row, size_t i) {
    return _mm256_loadu_si256((const __m256i *)(const void *)((const char *)row->src + 2 * i));
}

/* The largest magnitude of each block, in all words of its quarter. */
AVX2_INLINE __m256i quad_amax(const constants *k, const bf16_row *row, size_t i) {
    __m256i m[QUAD];
    for (size_t b = 0; b < QUAD; b++) {
        size_t at = i + b * TB__MXFP8_BLOCK;
        m[b] = _mm256_max_epu16(_mm256_and_si256(load16(row, at), k->magnitude),
                                _mm256_and_si256(load16(row, at + 16), k->magnitude));
    }
    __m256i even = _mm256_max_epu16(_mm256_blend_epi32(m[0], m[2], 0xf0), _mm256_permute2x128_si256(m[0], m[2], 0x21));
    __m256i odd = _mm256_max_epu16(_mm256_blend_epi32(m[1], m[3], 0xf0), _mm256_permute2x128_si256(m[1], m[3], 0x21));
    __m256i all = _mm256_max_epu16(_mm256_unpacklo_epi64(even, odd), _mm256_unpackhi_epi64(even, odd));
    all = _mm256_max_epu16(all, _mm256_shuffle_epi32(all, 0xb1));
    return _mm256_max_epu16(all, _mm256_shuffle_epi8(all, k->swap));
}

AVX2_INLINE __m256i quarter(__m256i x, size_t b) {
    switch (b) {
    case 0:
        return _mm256_permute4x64_epi64(x, 0x00);
    case 1:
        return _mm256_permute4x64_epi64(x, 0x55);
    case 2:
        return _mm256_permute4x64_epi64(x, 0xaa);
    default:
        return _mm256_permute4x64_epi64(x, 0xff);
    }
}

/* The codes of a block, without signs and in the order that packing leaves. */
AVX2_INLINE __m256i block_codes(const constants *k, const bf16_row *row, size_t at, __m256i less, bool is_floor,
                                bool is_exact) {
    __m256i a0 = _mm256_subs_epu16(_mm256_and_si256(load16(row, at), k->magnitude), less);
    __m256i a1 = _mm256_subs_epu16(_mm256_and_si256(load16(row, at + 16), k->magnitude), less);
    __m256i codes = is_exact ? _mm256_packus_epi16(all_codes(k, a0), all_codes(k, a1))
                             : _mm256_packus_epi16(normal_codes(k, a0), normal_codes(k, a1));
    return is_floor ? _mm256_min_epu8(codes, k->most) : codes; /* else the scale sees to it */
}

/* False, with nothing written, if a scale is so small that subnormal bf16 elements matter, whose bits have another
 * form. Unless is_exact, also false if codes may be below those of normal numbers. */
AVX2_INLINE bool do_quad(const constants *k, const bf16_row *row, size_t i, __m256i *all, bool is_floor, bool stream,
                         bool is_exact) {
    __m256i amax = quad_amax(k, row, i);
    __m256i exponent = _mm256_and_si256(is_floor ? amax : _mm256_add_epi16(amax, k->carry), k->exponent);
    __m256i scale = _mm256_sub_epi16(exponent, k->bias), less = _mm256_sub_epi16(scale, k->least_scale);
    if (_mm256_movemask_epi8(less) & SIGNS)
        return false;
    if (!is_exact)
        less = _mm256_add_epi16(less, k->low);
    __m256i codes[QUAD];
    for (size_t b = 0; b < QUAD; b++)
        codes[b] = block_codes(k, row, i + b * TB__MXFP8_BLOCK, quarter(less, b), is_floor, is_exact);
    if (!is_exact) {
        __m256i least = _mm256_min_epu8(_mm256_min_epu8(codes[0], codes[1]), _mm256_min_epu8(codes[2], codes[3]));
        if (_mm256_movemask_epi8(_mm256_cmpgt_epi8(least, k->least)) != -1)
            return false;
    }
    for (size_t b = 0; b < QUAD; b++) {
        size_t at = i + b * TB__MXFP8_BLOCK;
        __m256i signs = _mm256_and_si256(_mm256_packs_epi16(load16(row, at), load16(row, at + 16)), k->sign);
        put32(row->data + at, _mm256_permute4x64_epi64(_mm256_or_si256(codes[b], signs), 0xd8), stream);
    }
    __m256i four = _mm256_shuffle_epi8(_mm256_srli_epi16(scale, 7), k->gather);
    int scales = _mm_cvtsi128_si32(_mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
    __builtin_memcpy(row->scales + i / TB__MXFP8_BLOCK, &scales, sizeof scales);
    *all = _mm256_max_epu16(*all, amax);
    return true;
}

/* Quads until one can't be done. Returns where that begins, or what is less than a quad. */
AVX2_INLINE size_t do_quads(bf16_row row, size_t i, size_t end, uint32_t *amax, bool is_floor, bool stream,
                            bool is_exact) {
    const constants k = make_constants();
    __m256i all = _mm256_setzero_si256();
    while (end - i >= QUAD_LENGTH && do_quad(&k, &row, i, &all, is_floor, stream, is_exact))
        i += QUAD_LENGTH;
    __m128i half = _mm_max_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    half = _mm_max_epu16(half, _mm_unpackhi_epi64(half, half));
    *amax = tb__larger(*amax, (uint32_t)_mm_extract_epi16(half, 0) << 16);
    return i;
}

#define QUADS(name, is_floor, stream, is_exact)                                                                        \
    AVX2 __attribute__((noinline)) static size_t name(bf16_row row, size_t i, size_t end, uint32_t *amax) {            \
        return do_quads(row, i, end, amax, is_floor, stream, is_exact);                                                \
    }
QUADS(normal_ceil, false, false, false)
QUADS(normal_ceil_stream, false, true, false)
QUADS(normal_floor, true, false, false)
QUADS(normal_floor_stream, true, true, false)
QUADS(exact_ceil, false, false, true)
QUADS(exact_ceil_stream, false, true, true)
QUADS(exact_floor, true, false, true)
QUADS(exact_floor_stream, true, true, true)

AVX2 static uint32_t mxfp8_bf16(uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor, bool stream) {
    typedef size_t quads_fn(bf16_row row, size_t i, size_t end, uint32_t * amax);
    static quads_fn *const normal[2][2] = {{normal_ceil, normal_ceil_stream}, {normal_floor, normal_floor_stream}};
    static quads_fn *const exact[2][2] = {{exact_ceil, exact_ceil_stream}, {exact_floor, exact_floor_stream}};
    stream = stream && is_aligned(data, 32);
    bf16_row row = {data, scales, src};
    size_t i = 0;
    uint32_t all = 0;
    while (i < n) {
        i = normal[is_floor][stream](row, i, n, &all);
        /* Neighbours are alike, so that after a quad that needs it some are made exactly at once. What is left are
         * those with small scales, and the end. */
        size_t stop = n - i < EXACT_LENGTH ? n : i + EXACT_LENGTH;
        if (stop - i >= QUAD_LENGTH)
            i = exact[is_floor][stream](row, i, stop, &all);
        if (i == stop)
            continue;
        size_t next = n - i < QUAD_LENGTH ? n : i + QUAD_LENGTH;
        all = tb__larger(all, mxfp8(TB_BF16, data + i, scales + i / TB__MXFP8_BLOCK, (const char *)src + 2 * i,
                                    next - i, is_floor, stream));
        i = next;
    }
    return all;
}

AVX2_INLINE uint32_t fp8(tb_dtype dtype, uint8_t *data, const void *src, size_t n, float scale, bool stream) {
    __m256i most = _mm256_setzero_si256();
    size_t i = 0;
    stream = stream && is_aligned(data, 32);
    for (; i + 32 <= n; i += 32) {
        __m256i code[4];
        for (size_t k = 0; k < 4; k++) {
            __m256 x = load8(dtype, src, i + 8 * k);
            most = _mm256_max_epi32(most, magnitude(x));
            code[k] = e4m3_round(_mm256_div_ps(x, _mm256_set1_ps(scale)));
        }
        put32(data + i, pack32(code), stream);
    }
    uint32_t all = largest(most);
    if (i == n)
        return all;
    const char *rest = (const char *)src + i * bytes_per(dtype);
    return tb__larger(all, tb__quant_kernels_portable.fp8[dtype](data + i, rest, n - i, scale, false));
}

/* Sixteen codes in two vectors, two to a byte. */
AVX2_INLINE int64_t pack_nibbles(__m256i c0, __m256i c1) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(c0, c1), 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001)); /* even + 16 odd */
    return _mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs));
}

enum { GROUP = 8 }; /* blocks whose scales are computed together: divisions are slow */

/* Scales for the bits of so many amax, and the elements' divisors. */
AVX2_INLINE void nvfp4_scales(uint8_t *scales, float *divisors, const uint32_t *most, float global) {
    __m256 x = _mm256_loadu_ps((const float *)(const void *)most), globals = _mm256_set1_ps(global);
    __m256i code = e4m3_round(_mm256_div_ps(_mm256_div_ps(x, _mm256_set1_ps(6.0F)), globals));
    _mm_storel_epi64((__m128i *)(void *)scales,
                     _mm256_castsi256_si128(pack32((const __m256i[4]){code, code, code, code})));
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(0x1p-9F));
    __m256 normal = float_of(_mm256_add_epi32(_mm256_slli_epi32(code, 20), _mm256_set1_epi32(120 << 23)));
    __m256 is_small = float_of(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), code));
    __m256 divisor = _mm256_mul_ps(_mm256_blendv_ps(normal, small, is_small), globals);
    __m256 is_some = _mm256_cmp_ps(divisor, _mm256_setzero_ps(), _CMP_GT_OQ);
    _mm256_storeu_ps(divisors, _mm256_blendv_ps(float_of(_mm256_set1_epi32(TB__F32_INF)), divisor, is_some));
}

AVX2_INLINE void nvfp4_block(tb_dtype dtype, uint8_t *data, const void *src, size_t i, float divisor, bool stream) {
    __m256 d = _mm256_set1_ps(divisor);
    __m256i c0 = e2m1_round(_mm256_div_ps(load8(dtype, src, i), d));
    __m256i c1 = e2m1_round(_mm256_div_ps(load8(dtype, src, i + 8), d));
    int64_t codes = pack_nibbles(c0, c1);
    if (stream)
        _mm_stream_si64((long long *)(void *)(data + i / 2), codes);
    else
        __builtin_memcpy(data + i / 2, &codes, sizeof codes);
}

AVX2_INLINE uint32_t nvfp4(tb_dtype dtype, uint8_t *data, uint8_t *scales, const void *src, size_t n, float global,
                           bool stream) {
    size_t i = 0;
    uint32_t all = 0;
    stream = stream && is_aligned(data, 8);
    for (; i + GROUP * TB__NVFP4_BLOCK <= n; i += GROUP * TB__NVFP4_BLOCK) {
        uint32_t most[GROUP];
        float divisors[GROUP];
        for (size_t b = 0; b < GROUP; b++) {
            size_t at = i + b * TB__NVFP4_BLOCK;
            __m256i low = magnitude(load8(dtype, src, at)), high = magnitude(load8(dtype, src, at + 8));
            most[b] = largest(_mm256_max_epi32(low, high));
            all = tb__larger(all, most[b]);
        }
        nvfp4_scales(scales + i / TB__NVFP4_BLOCK, divisors, most, global);
        for (size_t b = 0; b < GROUP; b++)
            nvfp4_block(dtype, data, src, i + b * TB__NVFP4_BLOCK, divisors[b], stream);
    }
    if (i == n)
        return all;
    const char *rest = (const char *)src + i * bytes_per(dtype);
    return tb__larger(all, tb__quant_kernels_portable.nvfp4[dtype](data + i / 2, scales + i / TB__NVFP4_BLOCK, rest,
                                                                   n - i, global, false));
}

#define MXFP8(name, dtype)                                                                                             \
    AVX2 static uint32_t mxfp8_##name(uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor,        \
                                      bool stream) {                                                                   \
        return mxfp8(dtype, data, scales, src, n, is_floor, stream);                                                   \
    }
#define OTHERS(name, dtype)                                                                                            \
    AVX2 static uint32_t amax_##name(const void *src, size_t n) {                                                      \
        return amax(dtype, src, n);                                                                                    \
    }                                                                                                                  \
    AVX2 static uint32_t fp8_##name(uint8_t *data, const void *src, size_t n, float scale, bool stream) {              \
        return fp8(dtype, data, src, n, scale, stream);                                                                \
    }                                                                                                                  \
    AVX2 static uint32_t nvfp4_##name(uint8_t *data, uint8_t *scales, const void *src, size_t n, float global,         \
                                      bool stream) {                                                                   \
        return nvfp4(dtype, data, scales, src, n, global, stream);                                                     \
    }
MXFP8(f32, TB_F32)
MXFP8(f16, TB_F16)
OTHERS(f32, TB_F32)
OTHERS(f16, TB_F16)
OTHERS(bf16, TB_BF16)

const tb__quant_kernels tb__quant_kernels_avx2 = {
    .amax = {[TB_F32] = amax_f32, [TB_F16] = amax_f16, [TB_BF16] = amax_bf16},
    .mxfp8 = {[TB_F32] = mxfp8_f32, [TB_F16] = mxfp8_f16, [TB_BF16] = mxfp8_bf16},
    .fp8 = {[TB_F32] = fp8_f32, [TB_F16] = fp8_f16, [TB_BF16] = fp8_bf16},
    .nvfp4 = {[TB_F32] = nvfp4_f32, [TB_F16] = nvfp4_f16, [TB_BF16] = nvfp4_bf16},
};

#else

/* Nothing for other processors; C does not allow an empty file. */
typedef int tb__quant_no_avx2;

#endif
