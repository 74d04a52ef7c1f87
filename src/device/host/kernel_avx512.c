/* Copies and reductions for processors with AVX-512: a store fills a whole cache line, and lines of copies are
 * prefetched across the ends of rows, at one of several distances. All else is the AVX2 set's, casts among it: what
 * limits them is how far ahead they prefetch, which wider vectors do not change. */
#include "device/host/kernel.h"

#ifdef __x86_64__

#include "device/host/quant_kernel.h"

#include <immintrin.h>
#include <pthread.h>
#include <string.h>

#define AVX512        __attribute__((target("avx512f")))
#define AVX512_INLINE static inline AVX512 __attribute__((always_inline))

enum { LINE = 64 };

AVX512_INLINE void stream_line(char *dst, const char *src) {
    _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
}

/* Prefetches what is read `ahead` bytes later: in `next` as far as it is not in this row. */
AVX512_INLINE void stream_row(char *dst, const char *src, size_t nbytes, const char *next, size_t ahead) {
    size_t i = tb__head_bytes(dst, nbytes), inside = nbytes > ahead ? nbytes - ahead : 0;
    memcpy(dst, src, i);
    for (; i + LINE <= inside; i += LINE) {
        _mm_prefetch(src + i + ahead, _MM_HINT_NTA);
        stream_line(dst + i, src + i);
    }
    for (; i + LINE <= nbytes; i += LINE) {
        _mm_prefetch(next + (ptrdiff_t)(i - inside), _MM_HINT_NTA);
        stream_line(dst + i, src + i);
    }
    memcpy(dst + i, src + i, nbytes - i);
}

AVX512_INLINE void rows(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t nbytes,
                        size_t ahead) {
    int64_t later = nbytes < ahead ? (int64_t)(ahead / nbytes) : 1;
    for (int64_t r = 0; r < n; r++)
        stream_row(dst + r * dst_step, src + r * src_step, nbytes, src + (r + later) * src_step, ahead);
}

/* Processors prefetch within a row by themselves, but not beyond its page or its end. */
#define AHEAD(kib)                                                                                                     \
    AVX512 static void rows_##kib(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n,           \
                                  size_t nbytes) {                                                                     \
        rows(dst, dst_step, src, src_step, n, nbytes, (kib) << 10);                                                    \
    }                                                                                                                  \
    AVX512 static void row_##kib(void *dst, const void *src, size_t nbytes, const void *next) {                        \
        stream_row(dst, src, nbytes, next, (kib) << 10);                                                               \
    }
AHEAD(1)
AHEAD(4)
AHEAD(12)

AVX512 static void stream_zeros(void *dst, size_t nbytes) {
    char *out = dst;
    size_t i = tb__head_bytes(dst, nbytes);
    memset(out, 0, i);
    for (; i + LINE <= nbytes; i += LINE)
        _mm512_stream_si512((void *)(out + i), _mm512_setzero_si512());
    memset(out + i, 0, nbytes - i);
}

/* ---- Reductions ------------------------------------------------------------------------------------------------- */

enum { STEP = 32, REDUCE_AHEAD = 2048 }; /* elements; bytes */

/* Elements i .. i+31 in two vectors, in any order that store32 undoes: see load16 in kernel_avx2.c. */
AVX512_INLINE void load32(tb_dtype dtype, const char *src, __m512 out[2]) {
    __m512i x = _mm512_loadu_si512(src);
    _mm_prefetch(src + REDUCE_AHEAD, _MM_HINT_T0);
    switch (dtype) {
    case TB_BF16:
        out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        out[1] = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
        break;
    case TB_F16:
        out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
        out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
        break;
    default:
        out[0] = _mm512_castsi512_ps(x);
        out[1] = _mm512_loadu_ps(src + LINE);
        _mm_prefetch(src + LINE + REDUCE_AHEAD, _MM_HINT_T0);
    }
}

AVX512_INLINE __m512 quiet_nan(void) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
}

AVX512_INLINE __m512 apply(tb_reduce_op op, __m512 a, __m512 b) {
    switch (op) {
    case TB_MIN: /* the second operand where they are equal */
        return _mm512_mask_mov_ps(_mm512_min_ps(b, a), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), quiet_nan());
    case TB_MAX:
        return _mm512_mask_mov_ps(_mm512_max_ps(b, a), _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), quiet_nan());
    case TB_PRODUCT:
        return _mm512_mul_ps(a, b);
    default:
        return _mm512_add_ps(a, b);
    }
}

AVX512_INLINE void put(char *dst, __m512i x, bool stream) {
    if (stream)
        _mm512_stream_si512((void *)dst, x);
    else
        _mm512_storeu_si512(dst, x);
}

/* Rounded to bf16, in the upper halves; a NaN is the canonical one, which stays what it is. */
AVX512_INLINE __m512i round_bf16(__m512 v) {
    __m512i x = _mm512_castps_si512(v);
    __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), is_odd);
}

AVX512_INLINE void store32(tb_dtype dtype, char *dst, const __m512 v[2], bool stream) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    __m512i upper = _mm512_set1_epi32((int)0xffff0000), x;
    switch (dtype) {
    case TB_BF16:
        x = _mm512_and_si512(round_bf16(v[1]), upper);
        put(dst, _mm512_or_si512(x, _mm512_srli_epi32(round_bf16(v[0]), 16)), stream);
        break;
    case TB_F16:
        x = _mm512_castsi256_si512(_mm512_cvtps_ph(v[0], NEAREST));
        put(dst, _mm512_inserti64x4(x, _mm512_cvtps_ph(v[1], NEAREST), 1), stream);
        break;
    default:
        put(dst, _mm512_castps_si512(v[0]), stream);
        put(dst + LINE, _mm512_castps_si512(v[1]), stream);
    }
}

AVX512_INLINE void reduce(tb_dtype dtype, tb_reduce_op op, void *dst, const void *const *src, uint32_t nsrc, size_t n,
                          bool stream) {
    char *out = dst;
    size_t i = 0, size = dtype == TB_F32 ? 4 : 2;
    bool whole_lines = stream && (uintptr_t)dst % LINE == 0;
    for (; i + STEP <= n; i += STEP) {
        __m512 a[2], b[2];
        load32(dtype, (const char *)src[0] + i * size, a);
        for (uint32_t k = 1; k < nsrc; k++) {
            load32(dtype, (const char *)src[k] + i * size, b);
            a[0] = apply(op, a[0], b[0]);
            a[1] = apply(op, a[1], b[1]);
        }
        for (int v = 0; v < 2; v++)
            a[v] = _mm512_mask_mov_ps(a[v], _mm512_cmp_ps_mask(a[v], a[v], _CMP_UNORD_Q), quiet_nan());
        store32(dtype, out + i * size, a, whole_lines);
    }
    if (i == n)
        return;
    const void *rest[TB__COMBINE_MAX];
    for (uint32_t k = 0; k < nsrc; k++)
        rest[k] = (const char *)src[k] + i * size;
    tb__kernels_avx2()->reduce[dtype][op](out + i * size, rest, nsrc, n - i, false);
}

#define REDUCE(name, dtype, op)                                                                                        \
    AVX512 static void reduce_##name(void *dst, const void *const *src, uint32_t nsrc, size_t n, bool stream) {        \
        reduce(dtype, op, dst, src, nsrc, n, stream);                                                                  \
    }
#define REDUCE_ALL(name, dtype)                                                                                        \
    REDUCE(name##_sum, dtype, TB_SUM)                                                                                  \
    REDUCE(name##_min, dtype, TB_MIN)                                                                                  \
    REDUCE(name##_max, dtype, TB_MAX)                                                                                  \
    REDUCE(name##_product, dtype, TB_PRODUCT)                                                                          \
    static void use_##name(tb__reduce_fn *fn[TB__REDUCE_OPS]) {                                                        \
        fn[TB_SUM] = fn[TB_AVG] = reduce_##name##_sum;                                                                 \
        fn[TB_MIN] = reduce_##name##_min;                                                                              \
        fn[TB_MAX] = reduce_##name##_max;                                                                              \
        fn[TB_PRODUCT] = reduce_##name##_product;                                                                      \
    }
REDUCE_ALL(f16, TB_F16)
REDUCE_ALL(bf16, TB_BF16)
REDUCE_ALL(f32, TB_F32)

/* ---- The sets --------------------------------------------------------------------------------------------------- */

static tb__kernels ways[TB__AVX512_WAYS];

static void init_ways(void) {
    static const struct {
        const char *name;
        void (*stream)(void *dst, const void *src, size_t nbytes, const void *next);
        void (*stream_rows)(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n, size_t nbytes);
    } distances[TB__AVX512_WAYS] = {
        {"avx512-1k", row_1, rows_1}, {"avx512-4k", row_4, rows_4}, {"avx512-12k", row_12, rows_12}};
    for (int i = 0; i < TB__AVX512_WAYS; i++) {
        ways[i] = *tb__kernels_avx2();
        ways[i].name = distances[i].name;
        ways[i].stream = distances[i].stream;
        ways[i].stream_rows = distances[i].stream_rows;
        ways[i].stream_zeros = stream_zeros;
        ways[i].quant = tb__quant_kernels_avx512();
        use_f16(ways[i].reduce[TB_F16]);
        use_bf16(ways[i].reduce[TB_BF16]);
        use_f32(ways[i].reduce[TB_F32]);
    }
}

const tb__kernels *tb__kernels_avx512(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    __builtin_cpu_init();
    if (!tb__kernels_avx2() || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw"))
        return NULL;
    pthread_once(&once, init_ways);
    return ways;
}

#else

const tb__kernels *tb__kernels_avx512(void) {
    return NULL;
}

#endif
