/* Copies in which the destination runs along one dimension and the source along another. Both sides are used a cache
 * line at a time: a tile is as many elements each way as fill a line. */
#include "base/int.h"
#include "device/host/bytes.h"
#include "device/host/kernel.h"

#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    LINE = 64,
    /* Tiles go in squares this many lines wide, so that the pages of either side that are touched in turn stay within
     * the reach of the translation buffers. */
    SQUARE = 16,
};

bool tb__is_swapped(size_t run, const int64_t dst_step[2], const int64_t src_step[2]) {
    return run < LINE && llabs(dst_step[1]) < llabs(dst_step[0]) && llabs(src_step[0]) < llabs(src_step[1]) &&
           llabs(src_step[0]) <= LINE / 2;
}

/* n0 x n1 elements, one at a time. */
static void transpose_any(char *dst, const char *src, const tb__swapped_dims *t, int64_t n0, int64_t n1) {
#define LOOP(size)                                                                                                     \
    for (int64_t i = 0; i < n0; i++) {                                                                                 \
        for (int64_t j = 0; j < n1; j++) {                                                                             \
            memcpy(dst + i * t->dst_step[0] + j * t->dst_step[1], src + i * t->src_step[0] + j * t->src_step[1],       \
                   size);                                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    return
    switch (t->run) {
    case 1:
        LOOP(1);
    case 2:
        LOOP(2);
    case 4:
        LOOP(4);
    case 8:
        LOOP(8);
    case 16:
        LOOP(16);
    case 32:
        LOOP(32);
    default:
        LOOP(t->run);
    }
#undef LOOP
}

#ifdef __SSE2__

typedef __m128i vec;

static inline vec load_vec(const char *src) {
    return _mm_loadu_si128((const __m128i *)src);
}

static inline void store_vec(char *dst, vec x) {
    _mm_storeu_si128((__m128i *)dst, x);
}

/* Interleaving register i with register i + count/2, log2(count) times, transposes a square of them. */
#define TRANSPOSE_BLOCK(name, count, low, high)                                                                        \
    static inline void name(char *dst, int64_t dst_step, const char *src, int64_t src_step) {                          \
        vec a[count], b[count];                                                                                        \
        for (int64_t i = 0; i < (count); i++)                                                                          \
            a[i] = load_vec(src + i * src_step);                                                                       \
        for (int width = 1; width < (count); width *= 2) {                                                             \
            for (int64_t i = 0; i < (count) / 2; i++) {                                                                \
                b[2 * i] = low(a[i], a[i + (count) / 2]);                                                              \
                b[2 * i + 1] = high(a[i], a[i + (count) / 2]);                                                         \
            }                                                                                                          \
            for (int64_t i = 0; i < (count); i++)                                                                      \
                a[i] = b[i];                                                                                           \
        }                                                                                                              \
        for (int64_t i = 0; i < (count); i++)                                                                          \
            store_vec(dst + i * dst_step, a[i]);                                                                       \
    }
TRANSPOSE_BLOCK(transpose_block_1, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
TRANSPOSE_BLOCK(transpose_block_2, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16)
TRANSPOSE_BLOCK(transpose_block_4, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32)
TRANSPOSE_BLOCK(transpose_block_8, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64)

static inline void transpose_block_16(char *dst, int64_t dst_step, const char *src, int64_t src_step) {
    (void)dst_step;
    (void)src_step;
    store_vec(dst, load_vec(src));
}

/* A tile of LINE/size x LINE/size elements: rows of `dst` lie dst_step apart, those of `src` src_step. */
#define TRANSPOSE_TILE(size)                                                                                           \
    static void transpose_tile_##size(char *dst, int64_t dst_step, const char *src, int64_t src_step) {                \
        enum { SIDE = 16 / (size) };                                                                                   \
        for (int64_t i = 0; i < LINE / 16; i++) {                                                                      \
            for (int64_t j = 0; j < LINE / 16; j++) {                                                                  \
                transpose_block_##size(dst + j * SIDE * dst_step + 16 * i, dst_step,                                   \
                                       src + i * SIDE * src_step + 16 * j, src_step);                                  \
            }                                                                                                          \
        }                                                                                                              \
    }
TRANSPOSE_TILE(1)
TRANSPOSE_TILE(2)
TRANSPOSE_TILE(4)
TRANSPOSE_TILE(8)
TRANSPOSE_TILE(16)

typedef void tile_fn(char *dst, int64_t dst_step, const char *src, int64_t src_step);

/* NULL unless both sides are contiguous and the element is one that registers can be made of. */
static tile_fn *tile_for(const tb__swapped_dims *t) {
    if (t->dst_step[1] != (int64_t)t->run || t->src_step[0] != (int64_t)t->run)
        return NULL;
    switch (t->run) {
    case 1:
        return transpose_tile_1;
    case 2:
        return transpose_tile_2;
    case 4:
        return transpose_tile_4;
    case 8:
        return transpose_tile_8;
    case 16:
        return transpose_tile_16;
    default:
        return NULL;
    }
}

#else

typedef void tile_fn(char *dst, int64_t dst_step, const char *src, int64_t src_step);

static tile_fn *tile_for(const tb__swapped_dims *t) {
    (void)t;
    return NULL;
}

#endif

static void transpose_tile(char *dst, const char *src, const tb__swapped_dims *t, tile_fn *tile,
                           const tb__kernels *stream) {
    if (!stream) {
        tile(dst, t->dst_step[0], src, t->src_step[1]);
        return;
    }
    /* A line must be streamed as a whole. */
    char block[LINE * LINE] __attribute__((aligned(LINE)));
    tile(block, LINE, src, t->src_step[1]);
    for (int64_t i = 0; i < LINE / (int64_t)t->run; i++)
        stream->stream(dst + i * t->dst_step[0], block + i * LINE, LINE, block);
}

/* One square; side is a tile's, in elements. */
static void transpose_square(char *dst, const char *src, const tb__swapped_dims *t, int64_t n0, int64_t n1,
                             int64_t side, tile_fn *tile, const tb__kernels *stream) {
    for (int64_t i = 0; i < n0; i += side) {
        for (int64_t j = 0; j < n1; j += side) {
            char *to = dst + i * t->dst_step[0] + j * t->dst_step[1];
            const char *from = src + i * t->src_step[0] + j * t->src_step[1];
            int64_t rows = tb__min64(side, n0 - i), columns = tb__min64(side, n1 - j);
            if (tile && rows == side && columns == side)
                transpose_tile(to, from, t, tile, stream);
            else
                transpose_any(to, from, t, rows, columns);
        }
    }
}

void tb__transpose(char *dst, const char *src, const tb__swapped_dims *t, bool stream) {
    int64_t side = LINE / (int64_t)t->run, square = SQUARE * side;
    tile_fn *tile = tile_for(t);
    bool aligned = ((uintptr_t)dst | (uint64_t)t->dst_step[0]) % LINE == 0;
    const tb__kernels *kernels = stream && aligned ? tb__kernels_get() : NULL;
    for (int64_t i = 0; i < t->len[0]; i += square) {
        for (int64_t j = 0; j < t->len[1]; j += square) {
            transpose_square(dst + i * t->dst_step[0] + j * t->dst_step[1],
                             src + i * t->src_step[0] + j * t->src_step[1], t, tb__min64(square, t->len[0] - i),
                             tb__min64(square, t->len[1] - j), side, tile, kernels);
        }
    }
}
