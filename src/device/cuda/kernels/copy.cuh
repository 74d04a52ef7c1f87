/* Plain copies and zeros: contiguous pieces, rows, and elements with gaps. */
#pragma once

#include "access.cuh"

/* Slot j of a row that is aligned in any way: the j-th aligned 16 bytes of the destination, or what the row has of
 * them. First both aligned loads that the bytes are in; a slot at an end of the row is left for the second step. */
struct shifted_slot {
    uint4 a, b;
    bool is_whole;
};

INLINE char *aligned_slot(places row, uint32_t j) {
    return (char *)((uint64_t)row.dst & ~(uint64_t)15) + 16 * (uint64_t)j;
}

INLINE const char *source_of_slot(places row, uint32_t j) {
    return row.src + (aligned_slot(row, j) - row.dst);
}

INLINE shifted_slot load_shifted(places row, int64_t run, uint32_t j, bool is_zero) {
    char *at = aligned_slot(row, j);
    const char *from = source_of_slot(row, j);
    uint32_t shift = (uint32_t)(uint64_t)from & 15;
    shifted_slot s;
    s.is_whole = at >= row.dst && at + 16 <= row.dst + run &&
                 (is_zero || (from - shift >= row.src && from - shift + (shift ? 32 : 16) <= row.src + run));
    s.a = s.b = make_uint4(0, 0, 0, 0);
    if (s.is_whole && !is_zero) {
        s.a = __ldca((const uint4 *)(from - shift));
        if (shift)
            s.b = __ldca((const uint4 *)(from - shift + 16));
    }
    return s;
}

INLINE void store_shifted(const shifted_slot &s, places row, int64_t run, uint32_t j, bool is_zero) {
    char *at = aligned_slot(row, j);
    const char *from = source_of_slot(row, j);
    if (s.is_whole) {
        __stwb((uint4 *)at, is_zero ? make_uint4(0, 0, 0, 0) : join(s.a, s.b, (uint32_t)(uint64_t)from & 15));
        return;
    }
    int64_t low = row.dst - at, high = row.dst + run - at;
    if (high <= 0)
        return;
    uint4 v = is_zero ? make_uint4(0, 0, 0, 0) : load_window(from, row.src, row.src + run);
    store_some(at, v, low > 0 ? (int)low : 0, high < 16 ? (int)high : 16);
}

/* ---- Pieces ------------------------------------------------------------------------------------------------------ */

struct piece_ends {
    places at;
    uint32_t nbytes, flags;
};

INLINE piece_ends load_piece(args_ref a, uint32_t item) {
    const uint4 *from = (const uint4 *)a.items + 2 * (uint64_t)item;
    uint4 x = __ldca(from), y = __ldca(from + 1);
    return piece_ends{{(const char *)((uint64_t)x.y << 32 | x.x), (char *)((uint64_t)x.w << 32 | x.z)}, y.x, y.y};
}

INLINE void add_buffers(args_ref a, piece_ends &p) {
    p.at.src += src_base(a, p.flags);
    p.at.dst += dst_base(a, p.flags);
}

/* Piece i of the launch; one of no bytes behind the last. */
INLINE piece_ends find_piece(args_ref a, uint32_t i) {
    piece_ends p = {{nullptr, nullptr}, 0, 0};
    if (i < a.nitems)
        p = load_piece(a, find_item(a, i));
    add_buffers(a, p);
    return p;
}

/* Byte by byte, by a warp, where the run's buffer is not aligned. */
static __device__ __noinline__ void copy_piece_slowly(piece_ends p) {
    for (uint32_t at = threadIdx.x % 32; at < p.nbytes; at += 32)
        p.at.dst[at] = p.flags & TB__CUDA_ZERO ? 0 : p.at.src[at];
}

/* Pieces that are aligned, as far as they are not in the run's buffer; G for a warp. Most have no flags, and neither do
 * they need more than one range: what is left then is a few instructions for each. */
template <int G, int STEP> INLINE void copy_aligned_pieces(args_ref a) {
    uint32_t lane = threadIdx.x % 32, first = (blockIdx.x * 4 + threadIdx.x / 32) * G, flags = 0, most = 0;
    bool is_one_range = !a.list && a.nranges == 1;
    piece_ends p[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        p[g] = {{nullptr, nullptr}, 0, 0};
        if (first + g < a.nitems)
            p[g] = load_piece(a, is_one_range ? a.ranges[0].first + first + g : find_item(a, first + g));
        flags |= p[g].flags;
    }
    if (flags) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            add_buffers(a, p[g]);
            if ((((uint64_t)p[g].at.src | (uint64_t)p[g].at.dst) & 15) != 0) {
                copy_piece_slowly(p[g]);
                p[g].nbytes = 0;
            }
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++)
        most = most > p[g].nbytes ? most : p[g].nbytes;
    for (uint32_t at = lane * 16; at < most; at += STEP * 512) {
        uint4 v[G][STEP];
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                v[g][i] = make_uint4(0, 0, 0, 0);
                if (at + 512 * i < p[g].nbytes && !(p[g].flags & TB__CUDA_ZERO))
                    v[g][i] = __ldca((const uint4 *)(p[g].at.src + at + 512 * i));
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                if (at + 512 * i < p[g].nbytes)
                    __stwb((uint4 *)(p[g].at.dst + at + 512 * i), v[g][i]);
            }
        }
    }
}

/* With few registers, so that as many warps as there can be wait for memory. */
extern "C" __global__ void __launch_bounds__(128, 16) tb__copy_small_pieces(const __grid_constant__ tb__cuda_args a) {
    copy_aligned_pieces<TB__CUDA_WARP_PIECES, 1>(a);
}

extern "C" __global__ void __launch_bounds__(128, 16) tb__copy_pieces(const __grid_constant__ tb__cuda_args a) {
    copy_aligned_pieces<1, 2>(a);
}

/* Pieces that are aligned in any way, a warp each. */
extern "C" __global__ void __launch_bounds__(128) tb__copy_shifted_pieces(const __grid_constant__ tb__cuda_args a) {
    enum { STEP = 2 };
    piece_ends p = find_piece(a, blockIdx.x * 4 + threadIdx.x / 32);
    bool is_zero = p.flags & TB__CUDA_ZERO;
    if (is_zero)
        p.at.src = p.at.dst; /* not read; so that all slots inside are whole ones */
    uint32_t nslots = p.nbytes ? (p.nbytes + 14) / 16 + 1 : 0;
    for (uint32_t j = threadIdx.x % 32; j < nslots; j += 32 * STEP) {
        shifted_slot s[STEP];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            if (j + 32 * i < nslots)
                s[i] = load_shifted(p.at, p.nbytes, j + 32 * i, is_zero);
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            if (j + 32 * i < nslots)
                store_shifted(s[i], p.at, p.nbytes, j + 32 * i, is_zero);
        }
    }
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

/* Tiles have 256 slots, for 64 threads. */

/* A slot at an end of a row. */
static __device__ __noinline__ void copy_end_slot(places row, int64_t run, uint32_t j, bool is_zero) {
    store_shifted(load_shifted(row, run, j, is_zero), row, run, j, is_zero);
}

/* Of rows that are aligned in different ways. Slots that are not near an end of their row need no checks: their 16
 * bytes, and the aligned 32 bytes that they come from, are in the row. */
INLINE void copy_shifted_tile(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { STEP = 4 };
    uint32_t nslots = box->nslots, first = tile * 256 + threadIdx.x, j[STEP];
    const tb__cuda_divisor per_row = box->per_row;
    bool is_zero = box->flags & TB__CUDA_ZERO, is_inner[STEP];
    uint4 v[STEP], w[STEP];
    places at[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 64 * i, row = divide(slot, per_row);
        j[i] = slot - row * per_row.by;
        is_inner[i] = slot < nslots && j[i] >= 2 && j[i] + 4 <= per_row.by;
        v[i] = w[i] = make_uint4(0, 0, 0, 0);
        at[i] = find_row(a, box, row);
        const char *from = source_of_slot(at[i], j[i]);
        const uint4 *begin = (const uint4 *)((uint64_t)from & ~(uint64_t)15);
        if (is_inner[i] && !is_zero) {
            v[i] = __ldca(begin);
            w[i] = __ldca(begin + 1);
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        if (is_inner[i])
            __stwb((uint4 *)aligned_slot(at[i], j[i]),
                   join(v[i], w[i], (uint32_t)(uint64_t)source_of_slot(at[i], j[i]) & 15));
        else if (first + 64 * i < nslots)
            copy_end_slot(at[i], box->run, j[i], is_zero);
    }
}

/* Byte by byte, where the run's buffer is not aligned. */
static __device__ __noinline__ void copy_tile_slowly(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    bool is_zero = box->flags & TB__CUDA_ZERO;
    for (uint32_t k = threadIdx.x; k < 256; k += 64) {
        slot_place slot = find_slot(box, tile, 256, k);
        if (!slot.exists)
            continue;
        places at = find_row(a, box, slot.row);
#pragma unroll 1
        for (uint64_t i = (uint64_t)slot.j * 16; i < (uint64_t)slot.j * 16 + 16; i++)
            at.dst[i] = is_zero ? 0 : at.src[i];
    }
}

INLINE void copy_row_tile(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { STEP = 4 };
    slot_place first = find_slot(box, tile, 256, threadIdx.x);
    bool is_zero = box->flags & TB__CUDA_ZERO;
    uint32_t nslots = box->nslots;
    if (!first.exists)
        return;
    places at = find_row(a, box, first.row);
    const char *from = at.src + (uint64_t)first.j * 16;
    char *to = at.dst + (uint64_t)first.j * 16;
    uint4 v[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (first.j + 64 * i < nslots && !is_zero)
            v[i] = __ldca((const uint4 *)(from + 1024 * i));
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        if (first.j + 64 * i < nslots)
            __stwb((uint4 *)(to + 1024 * i), v[i]);
    }
}

/* Of rows that are aligned. */
INLINE void copy_tile(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { STEP = 4 };
    uint4 v[STEP];
    char *to[STEP];
    if (((src_base(a, box->flags) | dst_base(a, box->flags)) & 15) != 0) {
        copy_tile_slowly(a, box, tile);
        return;
    }
    if (box->flags & TB__CUDA_ROW_TILES) {
        copy_row_tile(a, box, tile);
        return;
    }
    bool is_zero = box->flags & TB__CUDA_ZERO;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        slot_place slot = find_slot(box, tile, 256, threadIdx.x + 64 * i);
        to[i] = NULL;
        v[i] = make_uint4(0, 0, 0, 0);
        if (slot.exists) {
            places at = find_row(a, box, slot.row);
            to[i] = at.dst + (uint64_t)slot.j * 16;
            if (!is_zero)
                v[i] = __ldca((const uint4 *)(at.src + (uint64_t)slot.j * 16));
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        if (to[i])
            __stwb((uint4 *)to[i], v[i]);
    }
}

extern "C" __global__ void __launch_bounds__(64) tb__copy_rows(const __grid_constant__ tb__cuda_args a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    copy_tile(a, (const tb__cuda_box *)heap_at(a, tile.place), tile.tile);
}

extern "C" __global__ void __launch_bounds__(64) tb__copy_long_rows(const __grid_constant__ tb__cuda_args a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x / 16);
    copy_tile(a, (const tb__cuda_box *)heap_at(a, tile.place), tile.tile * 16 + blockIdx.x % 16);
}

extern "C" __global__ void __launch_bounds__(64) tb__copy_shifted_rows(const __grid_constant__ tb__cuda_args a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    copy_shifted_tile(a, (const tb__cuda_box *)heap_at(a, tile.place), tile.tile);
}

/* ---- Anything ---------------------------------------------------------------------------------------------------- */

/* Elements of 1, 2, 4, 8 or 16 bytes, wherever they are. */
extern "C" __global__ void __launch_bounds__(256) tb__copy_any(const __grid_constant__ tb__cuda_args a) {
    enum { STEP = 4 };
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_box *box = (const tb__cuda_box *)heap_at(a, tile.place);
    uint32_t nslots = box->nslots, first = tile.tile * 1024 + threadIdx.x, unit = box->unit;
    const tb__cuda_divisor per_row = box->per_row;
    bool is_zero = box->flags & TB__CUDA_ZERO;
    uint64_t v[STEP], w[STEP];
    char *to[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 256 * i, row = divide(slot, per_row), j = slot - row * per_row.by;
        v[i] = w[i] = 0;
        if (slot < nslots) {
            places at = find_row(a, box, row);
            to[i] = at.dst + (uint64_t)j * unit;
            if (!is_zero)
                v[i] = load_element(at.src + (uint64_t)j * unit, unit < 8 ? unit : 8);
            if (!is_zero && unit == 16)
                w[i] = load_element(at.src + (uint64_t)j * unit + 8, 8);
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        if (first + 256 * i < nslots) {
            store_element(to[i], v[i], unit < 8 ? unit : 8);
            if (unit == 16)
                store_element(to[i] + 8, w[i], 8);
        }
    }
}

/* Words of 4 bytes. What travels with a launch goes this way: a copy engine would make the kernels wait for it, and
 * where several processes share the GPU, for their turn once more. */
extern "C" __global__ void __launch_bounds__(256) tb__copy_words(const __grid_constant__ tb__cuda_args a) {
    enum { STEP = TB__CUDA_BLOCK_WORDS / 256 };
    const uint32_t *src = (const uint32_t *)a.items;
    uint32_t first = blockIdx.x * TB__CUDA_BLOCK_WORDS + threadIdx.x, w[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++)
        w[i] = first + 256 * i < a.nitems ? src[first + 256 * i] : 0;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        if (first + 256 * i < a.nitems)
            ((uint32_t *)a.results)[first + 256 * i] = w[i];
    }
}
