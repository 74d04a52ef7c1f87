/* The quantiser of bf16 to MXFP8 for processors with AVX-512, whose vector is a block; the others are the AVX2 set's.
 *
 * As in quant_avx2.c a magnitude's bits less those of the scale are E4M3's with four more bits of fraction; here each
 * word can be shifted by its own count, so that numbers below E4M3's normal ones take a few more instructions only. */
#include "device/host/kernel.h"
#include "device/host/quant_kernel.h"

#ifdef __x86_64__

#include <immintrin.h>

#define AVX512        __attribute__((target("avx512f,avx512bw")))
#define AVX512_INLINE static inline AVX512 __attribute__((always_inline))

enum {
    QUAD = 4, /* blocks at a time, whose scales are found in one vector, where each has a lane */
    QUAD_LENGTH = QUAD * TB__MXFP8_BLOCK,
    AHEAD = 4096,     /* bytes; processors prefetch within a page by themselves */
    EXPONENT_AT = 7,  /* bit of a bf16 */
    LEAST_SCALE = 11, /* of those below, subnormal elements matter, whose bits have another form */
    LEAST_NORMAL = 8, /* codes */
    MOST = 126,
};

/* Compilers would rather make a constant again each time. */
AVX512_INLINE __m512i keep(__m512i constant) {
    __asm__("" : "+v"(constant));
    return constant;
}

AVX512_INLINE __m512i words(int x) {
    return keep(_mm512_set1_epi16((short)x));
}

AVX512_INLINE __m512i bytes(int x) {
    return keep(_mm512_set1_epi8((char)x));
}

typedef struct constants {
    __m512i magnitude, carry, exponent, bias, least_bits, order, seven; /* of scales */
    __m128i even_bytes;
    __m512i one, sixteenth, sign, least, most; /* of elements */
} constants;

AVX512_INLINE constants make_constants(bool is_floor) {
    return (constants){
        .magnitude = words(0x7fff),
        .carry = words(is_floor ? 0 : 0x1fffff >> 16), /* as in tb__mxfp8_exponent; a bf16 has the upper half */
        .exponent = words(0xff80),
        .bias = words((8 + 7) << EXPONENT_AT),
        .least_bits = words((LEAST_SCALE - 7) << EXPONENT_AT),
        .order = keep(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7)), /* packing works on each lane by itself */
        .seven = words(7),
        .even_bytes = _mm_setr_epi8(0, 2, 4, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
        .one = words(1),
        .sixteenth = words(1 << 11), /* of what _mm512_mulhrs_epi16 takes for 1 */
        .sign = bytes(0x80),
        .least = bytes(LEAST_NORMAL),
        .most = bytes(MOST),
    };
}

AVX512_INLINE __m512i larger(__m512i a, __m512i b) {
    return _mm512_max_epu16(a, b);
}

/* The largest magnitude of each block, in all words of its lane. */
AVX512_INLINE __m512i quad_amax(const __m512i a[QUAD]) {
    __m512i low = larger(_mm512_shuffle_i64x2(a[0], a[1], 0x44), _mm512_shuffle_i64x2(a[0], a[1], 0xee));
    __m512i high = larger(_mm512_shuffle_i64x2(a[2], a[3], 0x44), _mm512_shuffle_i64x2(a[2], a[3], 0xee));
    __m512i all = larger(_mm512_shuffle_i64x2(low, high, 0x88), _mm512_shuffle_i64x2(low, high, 0xdd));
    all = larger(all, _mm512_shuffle_epi32(all, 0x4e));
    all = larger(all, _mm512_shuffle_epi32(all, 0xb1));
    return larger(all, _mm512_rol_epi32(all, 16));
}

/* The codes of magnitudes from which (scale - 7) exponents are subtracted. What is below the normal numbers is wrong,
 * but LEAST_NORMAL at most. */
AVX512_INLINE __m512i normal_codes(const constants *k, __m512i a, __m512i less) {
    __m512i x = _mm512_subs_epu16(a, less);
    /* Halves are rounded up, so that the even ones must become a little less first. */
    __m512i is_even = _mm512_andnot_si512(_mm512_srli_epi16(x, 4), k->one);
    return _mm512_mulhrs_epi16(_mm512_sub_epi16(x, is_even), k->sixteenth);
}

/* All are right. This is rare, so that its constants are not kept. */
AVX512_INLINE __m512i all_codes(__m512i a, __m512i less) {
    __m512i one = _mm512_set1_epi16(1), four = _mm512_set1_epi16(4), five = _mm512_set1_epi16(5);
    __m512i x = _mm512_sub_epi16(a, less), exponent = _mm512_srai_epi16(x, EXPONENT_AT);
    __m512i shift = _mm512_max_epi16(_mm512_sub_epi16(five, exponent), four);
    __m512i small = _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x80));
    x = _mm512_mask_mov_epi16(x, _mm512_cmplt_epi16_mask(exponent, one), small);
    __m512i is_odd = _mm512_and_si512(_mm512_srlv_epi16(x, shift), one);
    __m512i below_half = _mm512_srlv_epi16(_mm512_set1_epi16(-1), _mm512_sub_epi16(_mm512_set1_epi16(17), shift));
    return _mm512_srlv_epi16(_mm512_add_epi16(_mm512_add_epi16(x, below_half), is_odd), shift);
}

AVX512_INLINE void put(uint8_t *dst, __m512i x, bool stream) {
    if (stream)
        _mm512_stream_si512((void *)dst, x);
    else
        _mm512_storeu_si512(dst, x);
}

/* The scale's bits for all words of block b. */
AVX512_INLINE __m512i lane(__m512i x, size_t b) {
    switch (b) {
    case 0:
        return _mm512_shuffle_i64x2(x, x, 0x00);
    case 1:
        return _mm512_shuffle_i64x2(x, x, 0x55);
    case 2:
        return _mm512_shuffle_i64x2(x, x, 0xaa);
    default:
        return _mm512_shuffle_i64x2(x, x, 0xff);
    }
}

/* False, with nothing written, if a scale is less than LEAST_SCALE. */
AVX512_INLINE bool do_quad(const constants *k, uint8_t *data, uint8_t *scales, const char *src, __m512i *all,
                           bool is_floor, bool stream) {
    __m512i v[QUAD], a[QUAD], less[QUAD], codes[QUAD / 2];
    for (size_t b = 0; b < QUAD; b++) {
        v[b] = _mm512_loadu_si512(src + 64 * b);
        a[b] = _mm512_and_si512(v[b], k->magnitude);
        _mm_prefetch(src + 64 * b + AHEAD, _MM_HINT_NTA);
    }
    __m512i amax = quad_amax(a);
    __m512i exponent = _mm512_and_si512(_mm512_add_epi16(amax, k->carry), k->exponent);
    __m512i bits = _mm512_sub_epi16(exponent, k->bias);
    if (_mm512_cmplt_epi16_mask(bits, k->least_bits))
        return false;
    for (size_t b = 0; b < QUAD; b++)
        less[b] = lane(bits, b);
    for (size_t b = 0; b < QUAD; b += 2)
        codes[b / 2] = _mm512_packus_epi16(normal_codes(k, a[b], less[b]), normal_codes(k, a[b + 1], less[b + 1]));
    if (_mm512_cmple_epu8_mask(_mm512_min_epu8(codes[0], codes[1]), k->least)) {
        for (size_t b = 0; b < QUAD; b += 2)
            codes[b / 2] = _mm512_packus_epi16(all_codes(a[b], less[b]), all_codes(a[b + 1], less[b + 1]));
    }
    for (size_t b = 0; b < QUAD; b += 2) {
        __m512i x = is_floor ? _mm512_min_epu8(codes[b / 2], k->most) : codes[b / 2]; /* else the scale sees to it */
        __m512i signs = _mm512_and_si512(_mm512_packs_epi16(v[b], v[b + 1]), k->sign);
        put(data + b * TB__MXFP8_BLOCK, _mm512_permutexvar_epi64(k->order, _mm512_or_si512(x, signs)), stream);
    }
    /* Those of the first word of each lane. */
    __m512i scale = _mm512_add_epi16(_mm512_srli_epi16(bits, EXPONENT_AT), k->seven);
    __m128i first = _mm512_cvtepi64_epi8(scale);
    int four = _mm_cvtsi128_si32(_mm_shuffle_epi8(first, k->even_bytes));
    __builtin_memcpy(scales, &four, sizeof four);
    *all = larger(*all, amax);
    return true;
}

/* Quads until one can't be done. Returns where that begins, or what is less than a quad. Without calls, so that the
 * constants stay in registers. */
AVX512_INLINE size_t do_quads(uint8_t *data, uint8_t *scales, const char *src, size_t i, size_t n, uint32_t *amax,
                              bool is_floor, bool stream) {
    const constants k = make_constants(is_floor);
    __m512i all = _mm512_setzero_si512();
    while (n - i >= QUAD_LENGTH &&
           do_quad(&k, data + i, scales + i / TB__MXFP8_BLOCK, src + 2 * i, &all, is_floor, stream))
        i += QUAD_LENGTH;
    uint16_t lanes[32];
    _mm512_storeu_si512(lanes, all);
    for (size_t b = 0; b < QUAD; b++)
        *amax = tb__larger(*amax, (uint32_t)lanes[8 * b] << 16);
    return i;
}

#define QUADS(name, is_floor, stream)                                                                                  \
    AVX512 __attribute__((noinline)) static size_t name(uint8_t *data, uint8_t *scales, const char *src, size_t i,     \
                                                        size_t n, uint32_t *amax) {                                    \
        return do_quads(data, scales, src, i, n, amax, is_floor, stream);                                              \
    }
QUADS(quads_ceil, false, false)
QUADS(quads_ceil_stream, false, true)
QUADS(quads_floor, true, false)
QUADS(quads_floor_stream, true, true)

static uint32_t mxfp8_bf16(uint8_t *data, uint8_t *scales, const void *src, size_t n, bool is_floor, bool stream) {
    typedef size_t quads_fn(uint8_t * data, uint8_t * scales, const char *src, size_t i, size_t n, uint32_t *amax);
    static quads_fn *const quads[2][2] = {{quads_ceil, quads_ceil_stream}, {quads_floor, quads_floor_stream}};
    const char *in = src;
    uint32_t all = 0;
    /* A block by itself, to the next line; then quads, and between them those with small scales; the end. */
    size_t i = 0, rest = stream && (uintptr_t)data % 64 == TB__MXFP8_BLOCK ? TB__MXFP8_BLOCK : 0;
    bool fills_lines = stream && ((uintptr_t)data + rest) % 64 == 0;
    while (i < n) {
        rest = rest < n - i ? rest : n - i;
        if (rest > 0)
            all = tb__larger(all, tb__quant_kernels_avx2.mxfp8[TB_BF16](data + i, scales + i / TB__MXFP8_BLOCK,
                                                                        in + 2 * i, rest, is_floor, stream));
        i = quads[is_floor][fills_lines](data, scales, in, i + rest, n, &all);
        rest = QUAD_LENGTH;
    }
    return all;
}

static tb__quant_kernels kernels;

const tb__quant_kernels *tb__quant_kernels_avx512(void) {
    kernels = tb__quant_kernels_avx2;
    kernels.mxfp8[TB_BF16] = mxfp8_bf16;
    return &kernels;
}

#else

/* Nothing for other processors; C does not allow an empty file. */
typedef int tb__quant_no_avx512;

#endif
