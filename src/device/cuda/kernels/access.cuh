/* How threads find their work and touch memory. Sources may be written by other processes between launches: they are
 * never read through the read-only cache. */
#pragma once

#include "device/cuda/kernels.h"

#define INLINE static __device__ __forceinline__

typedef const tb__cuda_args &args_ref;

/* The range that the i-th item of the launch is in. */
INLINE uint32_t find_range(args_ref a, uint32_t i) {
    uint32_t k = 0;
    while (k + 1 < a.nranges && a.ranges[k + 1].begin <= i)
        k++;
    return k;
}

/* The number of the i-th item of the launch. */
INLINE uint32_t find_item(args_ref a, uint32_t i) {
    if (a.list)
        return ((const uint32_t *)a.list)[i];
    uint32_t k = find_range(a, i);
    return a.ranges[k].first + (i - a.ranges[k].begin);
}

INLINE tb__cuda_tile find_tile(args_ref a, uint32_t i) {
    uint32_t k = find_range(a, i);
    if (!a.list && a.ranges[k].place != (uint32_t)TB__CUDA_NO_PLACE) /* nothing need be loaded */
        return tb__cuda_tile{a.ranges[k].place, a.ranges[k].first + (i - a.ranges[k].begin)};
    const uint2 tile = ((const uint2 *)a.items)[find_item(a, i)];
    return tb__cuda_tile{tile.x, tile.y};
}

INLINE const char *heap_at(args_ref a, uint32_t place) {
    return (const char *)a.heap + (uint64_t)place * TB__CUDA_HEAP_UNIT;
}

INLINE uint32_t divide(uint32_t n, const tb__cuda_divisor &d) {
    return (uint32_t)((uint64_t)n * d.magic >> d.shift);
}

INLINE uint64_t src_base(args_ref a, uint32_t flags) {
    return flags & TB__CUDA_SRC_IN_BUFFER ? a.src_buffer : 0;
}

INLINE uint64_t dst_base(args_ref a, uint32_t flags) {
    return flags & TB__CUDA_DST_IN_BUFFER ? a.dst_buffer : 0;
}

/* Descriptors count buffers as aligned. */
INLINE bool is_src_aligned(args_ref a, uint32_t flags) {
    bool has_buffer = flags & (TB__CUDA_SRC_IN_BUFFER | TB__CUDA_ANY_IN_BUFFER);
    return flags & TB__CUDA_ALIGNED_SRC && !(has_buffer && a.src_buffer & 15);
}

INLINE bool is_dst_aligned(args_ref a, uint32_t flags) {
    return flags & TB__CUDA_ALIGNED_DST && (dst_base(a, flags) & 15) == 0;
}

struct places {
    const char *src;
    char *dst;
};

/* Where a row of a box is. */
INLINE places find_row(args_ref a, const tb__cuda_box *box, uint32_t row) {
    const tb__cuda_dim *dim = (const tb__cuda_dim *)(box + 1);
    int64_t src = 0, dst = 0;
    uint32_t n = box->ndim;
    for (uint32_t d = 0; d < n; d++) {
        uint32_t next = d + 1 < n ? divide(row, dim[d].len) : 0;
        uint32_t index = row - next * dim[d].len.by;
        src += (int64_t)index * dim[d].src_step;
        dst += (int64_t)index * dim[d].dst_step;
        row = next;
    }
    return places{(const char *)(box->src + src_base(a, box->flags)) + src,
                  (char *)(box->dst + dst_base(a, box->flags)) + dst};
}

/* Which slot of which row slot k of a tile is; tiles have so many slots. Of boxes and matrices. */
struct slot_place {
    uint32_t row, j;
    bool exists;
};

template <class T> INLINE slot_place find_slot(const T *of, uint32_t tile, uint32_t slots, uint32_t k) {
    if (of->flags & TB__CUDA_ROW_TILES) {
        uint32_t row = divide(tile, of->per_row), j = (tile - row * of->per_row.by) * slots + k;
        return slot_place{row, j, row < of->nrows && j < of->nslots};
    }
    uint32_t slot = tile * slots + k, row = divide(slot, of->per_row);
    return slot_place{row, slot - row * of->per_row.by, slot < of->nslots};
}

/* Which tiles need no checks: their slots exist, and are aligned and full, of n elements each. */
enum tile_kind { OTHER_TILE, WHOLE_TILE, ROW_TILE /* a whole one in one row */ };

template <class T>
INLINE tile_kind kind_of_tile(const T *of, bool is_aligned, int64_t columns, uint32_t tile, uint32_t slots, int n) {
    if (!is_aligned)
        return OTHER_TILE;
    if (of->flags & TB__CUDA_ROW_TILES)
        return (int64_t)find_slot(of, tile, slots, slots).j * n <= columns ? ROW_TILE : OTHER_TILE;
    return (tile + 1) * slots <= of->nslots && columns == (int64_t)of->per_row.by * n ? WHOLE_TILE : OTHER_TILE;
}

/* Where a row of source k is, k > 0. */
INLINE const char *find_source_row(args_ref a, const tb__cuda_box *box, uint32_t k, uint32_t row) {
    uint32_t n = box->ndim;
    const tb__cuda_dim *dim = (const tb__cuda_dim *)(box + 1);
    const int64_t *source = (const int64_t *)(dim + n) + (uint64_t)(k - 1) * (2 + n);
    int64_t at = source[0] + (int64_t)src_base(a, (uint32_t)source[1]);
    for (uint32_t d = 0; d < n; d++) {
        uint32_t next = d + 1 < n ? divide(row, dim[d].len) : 0;
        at += (int64_t)(row - next * dim[d].len.by) * source[2 + d];
        row = next;
    }
    return (const char *)at;
}

/* ---- Words ------------------------------------------------------------------------------------------------------- */

/* __ldca and __stwb are ordinary accesses, of which the compiler knows that they are to global memory. Data that is
 * used once is not marked as such (__ldcs, __stcs): that is slower by 2 to 20 % on an H200. */

/* 4 * N aligned bytes. */
template <int N> struct words { uint32_t w[N]; };

template <int N> INLINE words<N> load_words(const void *p) {
    words<N> r;
    if constexpr (N == 4) {
        uint4 v = __ldca((const uint4 *)p);
        r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
    } else if constexpr (N == 2) {
        uint2 v = __ldca((const uint2 *)p);
        r.w[0] = v.x, r.w[1] = v.y;
    } else {
        r.w[0] = __ldca((const uint32_t *)p);
    }
    return r;
}

template <int N> INLINE void store_words(void *p, const words<N> &r) {
    if constexpr (N == 4)
        __stwb((uint4 *)p, make_uint4(r.w[0], r.w[1], r.w[2], r.w[3]));
    else if constexpr (N == 2)
        __stwb((uint2 *)p, make_uint2(r.w[0], r.w[1]));
    else
        __stwb((uint32_t *)p, r.w[0]);
}

/* An element of 1, 2, 4 or 8 bytes, anywhere. */
INLINE uint64_t load_element(const void *p, uint32_t size) {
    uint64_t at = (uint64_t)p;
    if ((at & (size - 1)) == 0) {
        switch (size) {
        case 1:
            return *(const uint8_t *)p;
        case 2:
            return *(const uint16_t *)p;
        case 4:
            return *(const uint32_t *)p;
        default:
            return *(const uint64_t *)p;
        }
    }
    uint64_t x = 0;
    for (uint32_t i = 0; i < size; i++)
        x |= (uint64_t)((const uint8_t *)p)[i] << (8 * i);
    return x;
}

INLINE void store_element(void *p, uint64_t x, uint32_t size) {
    uint64_t at = (uint64_t)p;
    if ((at & (size - 1)) == 0) {
        switch (size) {
        case 1:
            *(uint8_t *)p = (uint8_t)x;
            return;
        case 2:
            *(uint16_t *)p = (uint16_t)x;
            return;
        case 4:
            *(uint32_t *)p = (uint32_t)x;
            return;
        default:
            *(uint64_t *)p = x;
            return;
        }
    }
    for (uint32_t i = 0; i < size; i++)
        ((uint8_t *)p)[i] = (uint8_t)(x >> (8 * i));
}

/* ---- 16 bytes from anywhere -------------------------------------------------------------------------------------- */

/* Bytes `shift` .. shift+15 of the 32 in a and b. */
INLINE uint4 join(uint4 a, uint4 b, uint32_t shift) {
    uint32_t x0 = a.x, x1 = a.y, x2 = a.z, x3 = a.w, x4 = b.x, x5 = b.y, x6 = b.z, x7 = b.w;
    if (shift & 8) {
        x0 = x2, x1 = x3, x2 = x4, x3 = x5, x4 = x6, x5 = x7;
    }
    if (shift & 4) {
        x0 = x1, x1 = x2, x2 = x3, x3 = x4, x4 = x5;
    }
    uint32_t bits = (shift & 3) * 8;
    return make_uint4(__funnelshift_r(x0, x1, bits), __funnelshift_r(x1, x2, bits), __funnelshift_r(x2, x3, bits),
                      __funnelshift_r(x3, x4, bits));
}

/* The 16 bytes at an aligned address, of which only those in [begin, end) exist. */
INLINE uint4 load_existing(const char *at, const char *begin, const char *end) {
    if (at >= begin && at + 16 <= end)
        return *(const uint4 *)at;
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (at + 4 * j >= begin && at + 4 * j + 4 <= end) {
            w[j] = *(const uint32_t *)(at + 4 * j);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const char *p = at + 4 * j + i;
                if (p >= begin && p < end)
                    w[j] |= (uint32_t) * (const uint8_t *)p << (8 * i);
            }
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* The 16 bytes at p, of which only those in [begin, end) exist. */
INLINE uint4 load_window(const char *p, const char *begin, const char *end) {
    uint32_t shift = (uint32_t)(uint64_t)p & 15;
    const char *at = p - shift;
    uint4 a = load_existing(at, begin, end), b = make_uint4(0, 0, 0, 0);
    if (shift)
        b = load_existing(at + 16, begin, end);
    return join(a, b, shift);
}

/* Bytes low .. high-1 of the 16, to an aligned address. */
INLINE void store_some(char *at, uint4 v, int low, int high) {
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (4 * j >= low && 4 * j + 4 <= high) {
            *(uint32_t *)(at + 4 * j) = w[j];
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (4 * j + i >= low && 4 * j + i < high)
                    *(uint8_t *)(at + 4 * j + i) = (uint8_t)(w[j] >> (8 * i));
            }
        }
    }
}

/* At most 16 bytes from anywhere, the others zero; and to anywhere. For what is rare: not inlined. */
static __device__ __noinline__ uint4 load_bytes(const char *from, int nbytes) {
    return nbytes > 0 ? load_window(from, from, from + nbytes) : make_uint4(0, 0, 0, 0);
}

static __device__ __noinline__ void store_bytes(char *to, uint4 v, int nbytes) {
    int step = ((uint64_t)to & 3) == 0 ? 4 : ((uint64_t)to & 1) == 0 ? 2 : 1;
    uint64_t low = (uint64_t)v.y << 32 | v.x, high = (uint64_t)v.w << 32 | v.z;
    int i = 0;
    for (; i + step <= nbytes; i += step)
        store_element(to + i, (i < 8 ? low : high) >> (i % 8 * 8), step);
    for (; i < nbytes; i++)
        to[i] = (char)((i < 8 ? low : high) >> (i % 8 * 8));
}
