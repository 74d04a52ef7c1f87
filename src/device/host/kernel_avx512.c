/* Copies for processors with AVX-512: a store fills a whole cache line, and lines are prefetched across the ends of
 * rows, at one of several distances. All else is the AVX2 set's. */
#include "device/host/kernel.h"

#ifdef __x86_64__

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
    }
}

const tb__kernels *tb__kernels_avx512(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    __builtin_cpu_init();
    if (!tb__kernels_avx2() || !__builtin_cpu_supports("avx512f"))
        return NULL;
    pthread_once(&once, init_ways);
    return ways;
}

#else

const tb__kernels *tb__kernels_avx512(void) {
    return NULL;
}

#endif
