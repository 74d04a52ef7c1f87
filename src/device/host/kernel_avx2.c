/* The kernels for processors with AVX2 and F16C. Ends of rows that fill no vector go to the portable ones, and so do
 * the dtypes for which compilers generate equally fast code. No fused multiply-add: it would give other bits. */
#include "device/host/kernel.h"

#ifdef __x86_64__

#include "device/host/avx2.h"
#include "device/host/quant_kernel.h"

#include <cpuid.h>
#include <string.h>

enum {
    STEP = 32,    /* elements at a time */
    TURN = 128,   /* of each row in turns */
    AHEAD = 2048, /* bytes */
};

AVX2_INLINE __m256i load256(const void *src) {
    return _mm256_loadu_si256((const __m256i *)src);
}

AVX2_INLINE void store256(void *dst, __m256i x) {
    _mm256_storeu_si256((__m256i *)dst, x);
}

/* `yes` where the mask is set. */
AVX2_INLINE __m256i choose(__m256i mask, __m256i yes, __m256i no) {
    return _mm256_blendv_epi8(no, yes, mask);
}

AVX2_INLINE __m256i nan_mask(__m256 x) {
    return bits_of(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* As an f16 its bits stand for a 256th of the value, subnormals included. */
AVX2_INLINE __m256 e4m3_to_f32(__m128i bytes) {
    __m128i x = _mm_cvtepu8_epi16(bytes);
    __m128i a = _mm_and_si128(x, _mm_set1_epi16(0x7f));
    __m128i is_nan = _mm_cmpeq_epi16(a, _mm_set1_epi16(0x7f));
    __m128i half = _mm_blendv_epi8(_mm_slli_epi16(a, 7), _mm_set1_epi16(0x7e00), is_nan);
    half = _mm_or_si128(half, _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), x), 8));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0F));
}

/* Elements i .. i+7. */
AVX2_INLINE __m256 load8(tb_dtype dtype, const void *src, size_t i) {
    const char *at = src;
    switch (dtype) {
    case TB_F16:
        return _mm256_cvtph_ps(load128(at + 2 * i));
    case TB_BF16:
        return float_of(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(at + 2 * i)), 16));
    case TB_F8E4M3:
        return e4m3_to_f32(_mm_loadl_epi64((const __m128i *)(at + i)));
    case TB_F8E5M2:
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(at + i))), 8));
    default:
        return _mm256_loadu_ps((const float *)(at + 4 * i));
    }
}

static size_t bytes_per(tb_dtype dtype) {
    return tb_dtype_bits(dtype) / 8;
}

AVX2_INLINE void widen(tb_dtype dtype, float *dst, const void *src, size_t n) {
    size_t i = 0, size = bytes_per(dtype);
    for (; i + STEP <= n; i += STEP) {
        for (size_t v = 0; v < STEP; v += 8)
            _mm256_storeu_ps(dst + i + v, load8(dtype, src, i + v));
    }
    if (i < n)
        tb__kernels_portable.widen[dtype](dst + i, (const char *)src + i * size, n - i);
}

AVX2_INLINE __m256i bf16_bits(__m256 v) {
    __m256i x = bits_of(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(choose(nan_mask(v), quiet, rounded), 16);
}

/* Shifts must be constants, hence a macro for what the two f8 kinds share; see the portable version for how it works.
 */
#define F8_BITS(name, mantissa, lowest, limit)                                                                         \
    AVX2_INLINE __m256i name(__m256 v) {                                                                               \
        enum { SHIFT = 23 - (mantissa), MAGIC = (127 + (lowest) - (mantissa) + 23) << 23 };                            \
        __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits_of(v), 24), _mm256_set1_epi32(0x80));                   \
        __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), v);                                                         \
        a = _mm256_min_ps(a, _mm256_set1_ps(limit));                                                                   \
        __m256i magic = _mm256_set1_epi32(MAGIC);                                                                      \
        __m256i small = _mm256_sub_epi32(bits_of(_mm256_add_ps(a, float_of(magic))), magic);                           \
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits_of(a), SHIFT), _mm256_set1_epi32(1));                    \
        __m256i offset = _mm256_set1_epi32((1 << (SHIFT - 1)) - 1 - ((127 + (lowest)-1) << 23));                       \
        __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits_of(a), offset), odd), SHIFT);        \
        __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32((127 + (lowest)) << 23), bits_of(a));                  \
        __m256i r = choose(is_small, small, normal);                                                                   \
        return _mm256_or_si256(choose(nan_mask(v), _mm256_set1_epi32(0x7f), r), sign);                                 \
    }
F8_BITS(e4m3_bits, 3, -6, 448.0F)
F8_BITS(e5m2_bits, 2, -14, 57344.0F)

AVX2_INLINE __m256i f8_bits(tb_dtype dtype, __m256 v) {
    return dtype == TB_F8E4M3 ? e4m3_bits(v) : e5m2_bits(v);
}

AVX2_INLINE void put(char *dst, __m256i x, bool stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)dst, x);
    else
        store256(dst, x);
}

/* Stores src[0..31], narrowed. */
AVX2_INLINE void narrow32(tb_dtype dtype, char *dst, const float *src, bool stream) {
    __m256 v[4];
    for (size_t k = 0; k < 4; k++)
        v[k] = _mm256_loadu_ps(src + 8 * k);
    switch (dtype) {
    case TB_F16:
        for (size_t k = 0; k < 4; k += 2) {
            __m128i low = _mm256_cvtps_ph(v[k], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            __m128i high = _mm256_cvtps_ph(v[k + 1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            put(dst + 16 * k, _mm256_set_m128i(high, low), stream);
        }
        return;
    case TB_BF16:
        /* Packing works on each half of the vectors by itself. */
        for (size_t k = 0; k < 4; k += 2) {
            __m256i packed = _mm256_packus_epi32(bf16_bits(v[k]), bf16_bits(v[k + 1]));
            put(dst + 16 * k, _mm256_permute4x64_epi64(packed, 0xd8), stream);
        }
        return;
    default: {
        __m256i low = _mm256_packus_epi32(f8_bits(dtype, v[0]), f8_bits(dtype, v[1]));
        __m256i high = _mm256_packus_epi32(f8_bits(dtype, v[2]), f8_bits(dtype, v[3]));
        __m256i packed = _mm256_packus_epi16(low, high);
        put(dst, _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), stream);
    }
    }
}

AVX2_INLINE void narrow(tb_dtype dtype, void *dst, const float *src, size_t n) {
    char *out = dst;
    size_t i = 0, size = bytes_per(dtype);
    for (; i + STEP <= n; i += STEP)
        narrow32(dtype, out + i * size, src + i, false);
    if (i < n)
        tb__kernels_portable.narrow[dtype](out + i * size, src + i, n - i);
}

/* Of several rows at once the processor fetches too little by itself. What lies behind a row's end is mostly wanted
 * next; an address that is not there does no harm. */
AVX2_INLINE void fetch(const char *at, size_t nbytes) {
    for (size_t line = 0; line < nbytes; line += 64)
        _mm_prefetch(at + line + AHEAD, _MM_HINT_T0);
}

AVX2_INLINE void narrow_rows(tb_dtype dtype, char *dst, int64_t dst_step, const char *src, int64_t src_step,
                             int64_t rows, size_t n) {
    size_t i = 0, size = bytes_per(dtype), steps = n - n % STEP;
    for (size_t now; i < steps; i += now) {
        now = steps - i < TURN ? steps - i : TURN;
        for (int64_t r = 0; r < rows; r++) {
            const float *from = (const float *)(const void *)(src + r * src_step) + i;
            char *to = dst + r * dst_step + i * size;
            for (size_t k = 0; k < now; k += STEP) {
                fetch((const char *)(from + k), STEP * sizeof *from);
                narrow32(dtype, to + k * size, from + k, true);
            }
        }
    }
    for (int64_t r = 0; r < rows && i < n; r++)
        tb__kernels_portable.narrow[dtype](dst + r * dst_step + i * size,
                                           (const float *)(const void *)(src + r * src_step) + i, n - i);
}

AVX2_INLINE __m256 apply(tb_reduce_op op, __m256 a, __m256 b) {
    switch (op) {
    case TB_MIN: /* the second operand where they are equal; all ones, a NaN, where either is one */
        return _mm256_or_ps(_mm256_min_ps(b, a), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    case TB_MAX:
        return _mm256_or_ps(_mm256_max_ps(b, a), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    case TB_PRODUCT:
        return _mm256_mul_ps(a, b);
    default:
        return _mm256_add_ps(a, b);
    }
}

AVX2_INLINE __m256 canonical_nan(__m256 a) {
    return float_of(choose(nan_mask(a), _mm256_set1_epi32(0x7fc00000), bits_of(a)));
}

/* Elements i .. n-1, for which there is no whole step. */
static void combine_rest(tb_dtype dtype, tb_reduce_op op, float *acc, const void *const *src, uint32_t nsrc, size_t i,
                         size_t n, bool resume) {
    const void *rest[TB__COMBINE_MAX];
    for (uint32_t k = 0; k < nsrc; k++)
        rest[k] = (const char *)src[k] + i * bytes_per(dtype);
    tb__kernels_portable.combine[dtype][op](acc, rest, nsrc, n - i, resume);
}

AVX2_INLINE void combine(tb_dtype dtype, tb_reduce_op op, void *dst, const void *const *src, uint32_t nsrc, size_t n,
                         bool resume) {
    float *acc = dst;
    size_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        __m256 a[STEP / 8];
        for (size_t v = 0; v < STEP / 8; v++)
            a[v] = resume ? _mm256_loadu_ps(acc + i + 8 * v) : load8(dtype, src[0], i + 8 * v);
        for (uint32_t k = resume ? 0 : 1; k < nsrc; k++) {
            for (size_t v = 0; v < STEP / 8; v++)
                a[v] = apply(op, a[v], load8(dtype, src[k], i + 8 * v));
        }
        for (size_t v = 0; v < STEP / 8; v++)
            _mm256_storeu_ps(acc + i + 8 * v, canonical_nan(a[v]));
    }
    if (i < n)
        combine_rest(dtype, op, acc + i, src, nsrc, i, n, resume);
}

/* Sixteen elements in two vectors, in any order that store16 undoes. A bf16 is the upper half of an f32, so even and
 * odd elements come apart and together without being moved. */
AVX2_INLINE void load16(tb_dtype dtype, const void *src, size_t i, __m256 out[2]) {
    if (dtype == TB_BF16) {
        __m256i x = load256((const char *)src + 2 * i);
        out[0] = float_of(_mm256_slli_epi32(x, 16));
        out[1] = float_of(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
    } else {
        out[0] = load8(dtype, src, i);
        out[1] = load8(dtype, src, i + 8);
    }
}

/* The two vectors as they will lie in memory: for f32 both, for 16 bits the first, for f8 its lower half. */
AVX2_INLINE void pack16(tb_dtype dtype, const __m256 v[2], __m256i out[2]) {
    switch (dtype) {
    case TB_BF16:
        out[0] = _mm256_blend_epi16(bf16_bits(v[0]), _mm256_slli_epi32(bf16_bits(v[1]), 16), 0xaa);
        break;
    case TB_F16:
        out[0] = _mm256_set_m128i(_mm256_cvtps_ph(v[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                                  _mm256_cvtps_ph(v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
    case TB_F32:
        out[0] = bits_of(v[0]);
        out[1] = bits_of(v[1]);
        break;
    default: {
        __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(f8_bits(dtype, v[0]), f8_bits(dtype, v[1])), 0xd8);
        __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        out[0] = _mm256_castsi128_si256(bytes);
    }
    }
}

AVX2_INLINE void store32(tb_dtype dtype, char *dst, const __m256 a[4], bool stream) {
    __m256i low[2], high[2];
    pack16(dtype, a, low);
    pack16(dtype, a + 2, high);
    if (dtype == TB_F32) {
        put(dst, low[0], stream);
        put(dst + 32, low[1], stream);
        put(dst + 64, high[0], stream);
        put(dst + 96, high[1], stream);
    } else if (dtype == TB_F16 || dtype == TB_BF16) {
        put(dst, low[0], stream);
        put(dst + 32, high[0], stream);
    } else {
        put(dst, _mm256_inserti128_si256(low[0], _mm256_castsi256_si128(high[0]), 1), stream);
    }
}

AVX2_INLINE void reduce(tb_dtype dtype, tb_reduce_op op, void *dst, const void *const *src, uint32_t nsrc, size_t n,
                        bool stream) {
    char *out = dst;
    size_t i = 0, size = bytes_per(dtype);
    stream = stream && (uintptr_t)dst % 32 == 0;
    for (; i + STEP <= n; i += STEP) {
        __m256 a[4], b[4];
        load16(dtype, src[0], i, a);
        load16(dtype, src[0], i + 16, a + 2);
        fetch((const char *)src[0] + i * size, STEP * size);
        for (uint32_t k = 1; k < nsrc; k++) {
            load16(dtype, src[k], i, b);
            load16(dtype, src[k], i + 16, b + 2);
            fetch((const char *)src[k] + i * size, STEP * size);
            for (int v = 0; v < 4; v++)
                a[v] = apply(op, a[v], b[v]);
        }
        for (int v = 0; v < 4; v++)
            a[v] = canonical_nan(a[v]);
        store32(dtype, out + i * size, a, stream);
    }
    if (i == n)
        return;
    float rest[STEP];
    combine_rest(dtype, op, rest, src, nsrc, i, n, false);
    if (dtype == TB_F32)
        memcpy(out + i * size, rest, (n - i) * size);
    else
        tb__kernels_portable.narrow[dtype](out + i * size, rest, n - i);
}

#define KERNELS(name, dtype)                                                                                           \
    AVX2 static void widen_##name(float *dst, const void *src, size_t n) {                                             \
        widen(dtype, dst, src, n);                                                                                     \
    }                                                                                                                  \
    AVX2 static void narrow_##name(void *dst, const float *src, size_t n) {                                            \
        narrow(dtype, dst, src, n);                                                                                    \
    }                                                                                                                  \
    AVX2 static void narrow_rows_##name(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t rows,  \
                                        size_t n) {                                                                    \
        narrow_rows(dtype, dst, dst_step, src, src_step, rows, n);                                                     \
    }                                                                                                                  \
    COMBINE_ALL(name, dtype)
#define COMBINE_ALL(name, dtype)                                                                                       \
    COMBINE(name##_sum, dtype, TB_SUM)                                                                                 \
    COMBINE(name##_min, dtype, TB_MIN)                                                                                 \
    COMBINE(name##_max, dtype, TB_MAX)                                                                                 \
    COMBINE(name##_product, dtype, TB_PRODUCT)
#define COMBINE(name, dtype, op)                                                                                       \
    AVX2 static void name(void *acc, const void *const *src, uint32_t nsrc, size_t n, bool resume) {                   \
        combine(dtype, op, acc, src, nsrc, n, resume);                                                                 \
    }                                                                                                                  \
    AVX2 static void reduce_##name(void *dst, const void *const *src, uint32_t nsrc, size_t n, bool stream) {          \
        reduce(dtype, op, dst, src, nsrc, n, stream);                                                                  \
    }
KERNELS(f16, TB_F16)
KERNELS(bf16, TB_BF16)
KERNELS(e4m3, TB_F8E4M3)
KERNELS(e5m2, TB_F8E5M2)
COMBINE_ALL(f32, TB_F32)

/* Whole lines only. */
AVX2_INLINE void stream_lines(char *dst, const char *src, size_t nbytes) {
    size_t i = 0;
    for (; i + 128 <= nbytes; i += 128) {
        __m256i a = load256(src + i), b = load256(src + i + 32), c = load256(src + i + 64), d = load256(src + i + 96);
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
        _mm256_stream_si256((__m256i *)(dst + i + 64), c);
        _mm256_stream_si256((__m256i *)(dst + i + 96), d);
    }
    if (i < nbytes) {
        __m256i a = load256(src + i), b = load256(src + i + 32);
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
}

AVX2 static void stream(void *dst, const void *src, size_t nbytes, const void *next) {
    char *out = dst;
    const char *in = src;
    size_t head = tb__head_bytes(dst, nbytes);
    if (head) {
        memcpy(out, in, head);
        out += head;
        in += head;
        nbytes -= head;
    }
    while (nbytes >= 64) {
        size_t now = nbytes < TB__PAGE ? nbytes & ~(size_t)63 : TB__PAGE;
        tb__touch(nbytes > TB__PAGE ? in + TB__PAGE : next);
        stream_lines(out, in, now);
        out += now;
        in += now;
        nbytes -= now;
    }
    if (nbytes)
        memcpy(out, in, nbytes);
}

enum {
    ROWS = 4, /* at a time; fewer and more are both slower */
    LONG_ROW = 64 << 10,
};

/* Lines of ROWS rows in turns. */
AVX2_INLINE void stream_lines_of_rows(char *dst, int64_t dst_step, const char *src, int64_t src_step, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) {
        for (int64_t r = 0; r < ROWS; r++) {
            const char *in = src + r * src_step + i;
            char *out = dst + r * dst_step + i;
            __m256i a = load256(in), b = load256(in + 32);
            _mm256_stream_si256((__m256i *)out, a);
            _mm256_stream_si256((__m256i *)(out + 32), b);
        }
    }
}

/* Several rows at a time: a processor that reads ahead in each of them waits less at their beginnings. One long row is
 * several, end to end. */
AVX2 static void stream_rows(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t nbytes) {
    if (n == 1 && nbytes >= ROWS * LONG_ROW) {
        size_t rows = nbytes / LONG_ROW, rest = rows * LONG_ROW;
        stream_rows(dst, LONG_ROW, src, LONG_ROW, (int64_t)rows, LONG_ROW);
        stream(dst + rest, src + rest, nbytes - rest, src + nbytes);
        return;
    }
    int64_t r = 0, later = nbytes < TB__PAGE ? TB__PAGE / (int64_t)nbytes : 1;
    for (; dst_step % 64 == 0 && r + ROWS <= n; r += ROWS) { /* lines begin at the same place in all of them */
        char *out = dst + r * dst_step;
        const char *in = src + r * src_step;
        size_t head = tb__head_bytes(out, nbytes), lines = (nbytes - head) & ~(size_t)63, tail = nbytes - head - lines;
        stream_lines_of_rows(out + head, dst_step, in + head, src_step, lines);
        for (int64_t k = 0; k < ROWS && head + tail > 0; k++) {
            memcpy(out + k * dst_step, in + k * src_step, head);
            memcpy(out + k * dst_step + head + lines, in + k * src_step + head + lines, tail);
        }
    }
    for (; r < n; r++)
        stream(dst + r * dst_step, src + r * src_step, nbytes, src + (r + later) * src_step);
}

AVX2 static void stream_zeros(void *dst, size_t nbytes) {
    char *out = dst;
    size_t i = tb__head_bytes(dst, nbytes);
    memset(out, 0, i);
    for (; i + 64 <= nbytes; i += 64) {
        _mm256_stream_si256((__m256i *)(out + i), _mm256_setzero_si256());
        _mm256_stream_si256((__m256i *)(out + i + 32), _mm256_setzero_si256());
    }
    memset(out + i, 0, nbytes - i);
}

static void fence(void) {
    _mm_sfence();
}

#define OPS(name)                                                                                                      \
    {                                                                                                                  \
        [TB_SUM] = name##_sum, [TB_AVG] = name##_sum, [TB_MIN] = name##_min, [TB_MAX] = name##_max,                    \
        [TB_PRODUCT] = name##_product                                                                                  \
    }

static const tb__kernels kernels = {
    .name = "avx2",
    .widen = {[TB_F16] = widen_f16, [TB_BF16] = widen_bf16, [TB_F8E4M3] = widen_e4m3, [TB_F8E5M2] = widen_e5m2},
    .narrow = {[TB_F16] = narrow_f16, [TB_BF16] = narrow_bf16, [TB_F8E4M3] = narrow_e4m3, [TB_F8E5M2] = narrow_e5m2},
    .narrow_rows = {[TB_F16] = narrow_rows_f16,
                    [TB_BF16] = narrow_rows_bf16,
                    [TB_F8E4M3] = narrow_rows_e4m3,
                    [TB_F8E5M2] = narrow_rows_e5m2},
    .combine = {[TB_F8E4M3] = OPS(e4m3),
                [TB_F8E5M2] = OPS(e5m2),
                [TB_F16] = OPS(f16),
                [TB_BF16] = OPS(bf16),
                [TB_F32] = OPS(f32)},
    .reduce = {[TB_F8E4M3] = OPS(reduce_e4m3),
               [TB_F8E5M2] = OPS(reduce_e5m2),
               [TB_F16] = OPS(reduce_f16),
               [TB_BF16] = OPS(reduce_bf16),
               [TB_F32] = OPS(reduce_f32)},
    .stream = stream,
    .stream_rows = stream_rows,
    .stream_zeros = stream_zeros,
    .fence = fence,
    .quant = &tb__quant_kernels_avx2,
};

const tb__kernels *tb__kernels_avx2(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    /* Not every compiler knows f16c by name; that the system saves the vector registers is part of avx2. */
    bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return __builtin_cpu_supports("avx2") && has_f16c ? &kernels : NULL;
}

#else

const tb__kernels *tb__kernels_avx2(void) {
    return NULL;
}

#endif
