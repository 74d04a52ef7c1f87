/* Shared by the kernels for AVX2 and F16C. Included on x86-64 only. */
#ifndef TB_DEVICE_HOST_AVX2_H
#define TB_DEVICE_HOST_AVX2_H

#include <immintrin.h>

#define AVX2        __attribute__((target("avx2,f16c")))
#define AVX2_INLINE static inline AVX2 __attribute__((always_inline))

AVX2_INLINE __m128i load128(const void *src) {
    return _mm_loadu_si128((const __m128i *)src);
}

AVX2_INLINE __m256 float_of(__m256i x) {
    return _mm256_castsi256_ps(x);
}

AVX2_INLINE __m256i bits_of(__m256 x) {
    return _mm256_castps_si256(x);
}

#endif
