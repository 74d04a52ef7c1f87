/* Copies for processors with AVX-512: a store fills a whole cache line, and lines are prefetched across the ends of
 * rows. All else is the AVX2 set's. */
#include "device/host/kernel.h"

#ifdef __x86_64__

#include <immintrin.h>
#include <pthread.h>
#include <string.h>

#define AVX512        __attribute__((target("avx512f")))
#define AVX512_INLINE static inline AVX512 __attribute__((always_inline))

enum {
    LINE = 64,
    AHEAD = 4096 /* bytes; processors prefetch within a row by themselves, but not beyond its page or its end */
};

AVX512_INLINE void stream_line(char *dst, const char *src) {
    _mm512_stream_si512((void *)dst, _mm512_loadu_si512(src));
}

AVX512 static void stream(void *dst, const void *src, size_t nbytes, const void *next) {
    char *out = dst;
    const char *in = src;
    size_t i = tb__head_bytes(dst, nbytes);
    memcpy(out, in, i);
    for (; i + LINE <= nbytes; i += LINE) {
        if (i % TB__PAGE < LINE)
            tb__touch(nbytes - i > TB__PAGE ? in + i + TB__PAGE : next);
        stream_line(out + i, in + i);
    }
    memcpy(out + i, in + i, nbytes - i);
}

/* `next` is the row that begins AHEAD bytes later, or the one after this row if that is longer. */
AVX512_INLINE void stream_row(char *dst, const char *src, size_t nbytes, const char *next) {
    size_t i = tb__head_bytes(dst, nbytes), inside = nbytes > AHEAD ? nbytes - AHEAD : 0;
    memcpy(dst, src, i);
    for (; i + LINE <= inside; i += LINE) {
        __builtin_prefetch(src + i + AHEAD);
        stream_line(dst + i, src + i);
    }
    for (; i + LINE <= nbytes; i += LINE) {
        __builtin_prefetch(next + (ptrdiff_t)(i - inside));
        stream_line(dst + i, src + i);
    }
    memcpy(dst + i, src + i, nbytes - i);
}

AVX512 static void stream_rows(char *dst, int64_t dst_step, const char *src, int64_t src_step, int64_t n,
                               size_t nbytes) {
    int64_t later = nbytes < AHEAD ? AHEAD / (int64_t)nbytes : 1;
    for (int64_t r = 0; r < n; r++)
        stream_row(dst + r * dst_step, src + r * src_step, nbytes, src + (r + later) * src_step);
}

AVX512 static void stream_zeros(void *dst, size_t nbytes) {
    char *out = dst;
    size_t i = tb__head_bytes(dst, nbytes);
    memset(out, 0, i);
    for (; i + LINE <= nbytes; i += LINE)
        _mm512_stream_si512((void *)(out + i), _mm512_setzero_si512());
    memset(out + i, 0, nbytes - i);
}

static tb__kernels kernels;

static void init_kernels(void) {
    kernels = *tb__kernels_avx2();
    kernels.name = "AVX-512";
    kernels.stream = stream;
    kernels.stream_rows = stream_rows;
    kernels.stream_zeros = stream_zeros;
}

const tb__kernels *tb__kernels_avx512(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    __builtin_cpu_init();
    if (!tb__kernels_avx2() || !__builtin_cpu_supports("avx512f"))
        return NULL;
    pthread_once(&once, init_kernels);
    return &kernels;
}

#else

const tb__kernels *tb__kernels_avx512(void) {
    return NULL;
}

#endif
