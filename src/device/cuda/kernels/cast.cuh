/* Casts and reductions of rows that are contiguous on all sides; and of elements wherever they are. */
#pragma once

#include "number.cuh"

/* What a thread does at a time: SS and DS are the bytes of an element of the source and of the destination. */
template <int SS, int DS> struct slot_of {
    enum { N = 16 / (SS > DS ? SS : DS), SRC_WORDS = N * SS / 4, DST_WORDS = N * DS / 4 };
};

/* N elements of a row, of which n exist. The others, and those of an empty row, are zero. IS_WHOLE: all exist and are
 * aligned, so that loads need no branches and all of a thread's are under way together. */
template <int SS, int N, bool IS_WHOLE>
INLINE void load_slot(const char *from, int64_t n, bool is_aligned, uint32_t *w) {
    words<N * SS / 4> v;
    if (IS_WHOLE || (is_aligned && n >= N)) {
        v = load_words<N * SS / 4>(from);
    } else {
        uint4 some = load_bytes(from, n < N ? (int)n * SS : N * SS);
        uint32_t four[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
        for (int i = 0; i < N * SS / 4; i++)
            v.w[i] = four[i];
    }
#pragma unroll
    for (int i = 0; i < N * SS / 4; i++)
        w[i] = v.w[i];
}

template <int DS, int N, bool IS_WHOLE>
INLINE void store_slot(char *to, int64_t n, bool is_aligned, const uint32_t *w) {
    enum { W = N * DS / 4 };
    if (IS_WHOLE || (is_aligned && n >= N)) {
        words<W> v;
#pragma unroll
        for (int i = 0; i < W; i++)
            v.w[i] = w[i];
        store_words<W>(to, v);
    } else {
        store_bytes(to,
                    make_uint4(w[0], W > 1 ? w[W > 1] : 0, W > 2 ? w[W > 2 ? 2 : 0] : 0, W > 3 ? w[W > 3 ? 3 : 0] : 0),
                    n < N ? (int)n * DS : N * DS);
    }
}

INLINE tile_kind kind_of_box_tile(args_ref a, const tb__cuda_box *box, uint32_t tile, uint32_t slots, int n) {
    bool is_aligned = is_src_aligned(a, box->flags) && is_dst_aligned(a, box->flags);
    return kind_of_tile(box, is_aligned, box->run, tile, slots, n);
}

template <int SS, int DS> INLINE void cast_slot(const tb__cuda_box *box, const uint32_t *in, uint32_t *out) {
    enum { N = slot_of<SS, DS>::N };
    float x[N];
    widen<SS, N>(box->src_dtype, in, x);
    if (has_nan<N>(x)) {
        uint32_t bits[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            bits[k] = widen_exactly(box->src_dtype, get_element<SS>(in, k));
        finish_exactly<DS, N>(box, bits, out);
    } else {
        if (box->has_wire)
            round_through<N>(box->wire_dtype, x);
        narrow<DS, N>(box->dst_dtype, x, out);
    }
}

template <int SS, int DS, int TILE> INLINE void cast_row_tile(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { STEP = TILE / 64, SW = slot_of<SS, DS>::SRC_WORDS, DW = slot_of<SS, DS>::DST_WORDS };
    slot_place first = find_slot(box, tile, TILE, threadIdx.x);
    places at = find_row(a, box, first.row);
    const char *from = at.src + (uint64_t)first.j * (4 * SW);
    char *to = at.dst + (uint64_t)first.j * (4 * DW);
    words<SW> in[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++)
        in[i] = load_words<SW>(from + i * (64 * 4 * SW));
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        words<DW> out;
        cast_slot<SS, DS>(box, in[i].w, out.w);
        store_words<DW>(to + i * (64 * 4 * DW), out);
    }
}

template <int SS, int DS, int TILE, bool IS_WHOLE>
INLINE void cast_slots(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { N = slot_of<SS, DS>::N, STEP = TILE / 64, SW = slot_of<SS, DS>::SRC_WORDS, DW = slot_of<SS, DS>::DST_WORDS };
    bool src_aligned = is_src_aligned(a, box->flags), dst_aligned = is_dst_aligned(a, box->flags);
    uint32_t in[STEP][SW];
    char *to[STEP];
    int64_t left[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        slot_place slot = find_slot(box, tile, TILE, threadIdx.x + 64 * i);
        left[i] = 0;
        if (IS_WHOLE || slot.exists) {
            places at = find_row(a, box, slot.row);
            to[i] = at.dst + (uint64_t)slot.j * (N * DS);
            left[i] = box->run - (int64_t)slot.j * N;
            load_slot<SS, N, IS_WHOLE>(at.src + (uint64_t)slot.j * (N * SS), left[i], src_aligned, in[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t out[DW];
        if (!IS_WHOLE && left[i] <= 0)
            continue;
        cast_slot<SS, DS>(box, in[i], out);
        store_slot<DS, N, IS_WHOLE>(to[i], left[i], dst_aligned, out);
    }
}

template <int SS, int DS, int TILE>
static __device__ __noinline__ void cast_other_tile(args_ref a, const tb__cuda_box *box, uint32_t tile, bool is_whole) {
    if (is_whole)
        cast_slots<SS, DS, TILE, true>(a, box, tile);
    else
        cast_slots<SS, DS, TILE, false>(a, box, tile);
}

template <int SS, int DS, int TILE> INLINE void cast_tile(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_box *box = (const tb__cuda_box *)heap_at(a, tile.place);
    tile_kind kind = kind_of_box_tile(a, box, tile.tile, TILE, slot_of<SS, DS>::N);
    if (kind == ROW_TILE)
        cast_row_tile<SS, DS, TILE>(a, box, tile.tile);
    else
        cast_other_tile<SS, DS, TILE>(a, box, tile.tile, kind == WHOLE_TILE);
}

#define CAST(SS, DS, TILE)                                                                                             \
    extern "C" __global__ void __launch_bounds__(64, 16)                                                               \
        tb__cast_##SS##_##DS(const __grid_constant__ tb__cuda_args a) {                                                \
        cast_tile<SS, DS, TILE>(a);                                                                                    \
    }
CAST(1, 1, 256)
CAST(1, 2, 512)
CAST(1, 4, 512)
CAST(2, 1, 256)
CAST(2, 2, 256)
CAST(2, 4, 512)
CAST(4, 1, 256)
CAST(4, 2, 256)
CAST(4, 4, 256)

/* ---- Reductions -------------------------------------------------------------------------------------------------- */

/* min and max keep the accumulator where the two are equal, and NaN from either side. */
template <class T> INLINE T apply(uint32_t op, T a, T b) {
    switch (op) {
    case TB_MIN:
        return b < a || b != b ? b : a;
    case TB_MAX:
        return b > a || b != b ? b : a;
    case TB_PRODUCT:
        return a * b;
    default:
        return a + b;
    }
}

template <int N> INLINE void apply_all(uint32_t op, float *acc, const float *x) {
    switch (op) { /* once for all elements */
    case TB_MIN:
#pragma unroll
        for (int i = 0; i < N; i++)
            acc[i] = apply(TB_MIN, acc[i], x[i]);
        return;
    case TB_MAX:
#pragma unroll
        for (int i = 0; i < N; i++)
            acc[i] = apply(TB_MAX, acc[i], x[i]);
        return;
    case TB_PRODUCT:
#pragma unroll
        for (int i = 0; i < N; i++)
            acc[i] *= x[i];
        return;
    default:
#pragma unroll
        for (int i = 0; i < N; i++)
            acc[i] += x[i];
    }
}

enum { REDUCE_TILE = 256 };

template <int SS, int DS, bool IS_WHOLE> INLINE void reduce_slots(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { N = slot_of<SS, DS>::N, SW = slot_of<SS, DS>::SRC_WORDS, DW = slot_of<SS, DS>::DST_WORDS };
    enum { STEP = 2, AT_ONCE = 4 }; /* slots of a thread, and sources that are loaded before they are combined */
    uint32_t nsrc = box->nsrc, op = box->op, src_dtype = box->src_dtype;
    bool src_aligned = is_src_aligned(a, box->flags), dst_aligned = is_dst_aligned(a, box->flags);
    uint32_t row[STEP], j[STEP];
    char *to[STEP];
    int64_t left[STEP];
    float acc[STEP][N];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        slot_place slot = find_slot(box, tile, REDUCE_TILE, threadIdx.x + 128 * i);
        row[i] = slot.row;
        j[i] = slot.j;
        left[i] = slot.exists ? box->run - (int64_t)slot.j * N : 0;
    }
    for (uint32_t k = 0; k < nsrc; k += AT_ONCE) {
        uint32_t in[AT_ONCE][STEP][SW];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                if (k + s >= nsrc || (!IS_WHOLE && left[i] <= 0))
                    continue;
                const char *from;
                if (k + s == 0) {
                    places at = find_row(a, box, row[i]);
                    from = at.src;
                    to[i] = at.dst;
                } else {
                    from = find_source_row(a, box, k + s, row[i]);
                }
                load_slot<SS, N, IS_WHOLE>(from + (uint64_t)j[i] * (N * SS), left[i], src_aligned, in[s][i]);
            }
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                if (k + s >= nsrc || (!IS_WHOLE && left[i] <= 0))
                    continue;
                float x[N];
                widen<SS, N>(src_dtype, in[s][i], x);
                if (k + s == 0) {
#pragma unroll
                    for (int e = 0; e < N; e++)
                        acc[i][e] = x[e];
                } else {
                    apply_all<N>(op, acc[i], x);
                }
            }
        }
    }
    float divisor = box->divisor;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t out[DW];
        if (!IS_WHOLE && left[i] <= 0)
            continue;
        if (divisor > 0) {
#pragma unroll
            for (int e = 0; e < N; e++)
                acc[i][e] = __fdiv_rn(acc[i][e], divisor);
        }
        if (has_nan<N>(acc[i])) {
            uint32_t bits[N];
#pragma unroll
            for (int e = 0; e < N; e++)
                bits[e] = acc[i][e] == acc[i][e] ? bits_of(acc[i][e]) : F32_NAN;
            finish_exactly<DS, N>(box, bits, out);
        } else {
            if (box->has_wire)
                round_through<N>(box->wire_dtype, acc[i]);
            narrow<DS, N>(box->dst_dtype, acc[i], out);
        }
        store_slot<DS, N, IS_WHOLE>(to[i] + (uint64_t)j[i] * (N * DS), left[i], dst_aligned, out);
    }
}

/* A sum of few sources in a tile of one row, the usual reduction: all loads of a thread are under way together. */
enum { SUM_SOURCES = 4 };

template <int SS, int DS, int DTYPE> INLINE void sum_row_tile(args_ref a, const tb__cuda_box *box, uint32_t tile) {
    enum { N = slot_of<SS, DS>::N, SW = slot_of<SS, DS>::SRC_WORDS, DW = slot_of<SS, DS>::DST_WORDS, STEP = 2 };
    uint32_t nsrc = box->nsrc;
    slot_place first = find_slot(box, tile, REDUCE_TILE, threadIdx.x);
    places at = find_row(a, box, first.row);
    words<SW> in[SUM_SOURCES][STEP];
#pragma unroll
    for (int k = 0; k < SUM_SOURCES; k++) {
        if (k < nsrc) {
            const char *from = k ? find_source_row(a, box, k, first.row) : at.src;
#pragma unroll
            for (int i = 0; i < STEP; i++)
                in[k][i] = load_words<SW>(from + (uint64_t)first.j * (N * SS) + i * (128 * N * SS));
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float acc[N], x[N];
        words<DW> out;
        widen<SS, N>(DTYPE, in[0][i].w, acc);
#pragma unroll
        for (int k = 1; k < SUM_SOURCES; k++) {
            if (k < nsrc) {
                widen<SS, N>(DTYPE, in[k][i].w, x);
                apply_all<N>(TB_SUM, acc, x);
            }
        }
        if (has_nan<N>(acc)) {
            uint32_t bits[N];
#pragma unroll
            for (int e = 0; e < N; e++)
                bits[e] = acc[e] == acc[e] ? bits_of(acc[e]) : F32_NAN;
            finish_exactly<DS, N>(box, bits, out.w);
        } else {
            narrow<DS, N>(box->dst_dtype, acc, out.w);
        }
        store_words<DW>(at.dst + (uint64_t)first.j * (N * DS) + i * (128 * N * DS), out);
    }
}

template <int SS, int DS>
static __device__ __noinline__ void reduce_other_tile(args_ref a, const tb__cuda_box *box, uint32_t tile,
                                                      bool is_whole) {
    if (is_whole)
        reduce_slots<SS, DS, true>(a, box, tile);
    else
        reduce_slots<SS, DS, false>(a, box, tile);
}

template <int SS, int DS> INLINE void reduce_tile(args_ref a) {
    enum { DTYPE = SS == 2 ? TB_BF16 : TB_F32 };
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_box *box = (const tb__cuda_box *)heap_at(a, tile.place);
    tile_kind kind = kind_of_box_tile(a, box, tile.tile, REDUCE_TILE, slot_of<SS, DS>::N);
    bool is_sum = box->op == TB_SUM && box->divisor == 0 && !box->has_wire;
    if (kind == ROW_TILE && is_sum && box->nsrc <= SUM_SOURCES && box->src_dtype == DTYPE)
        sum_row_tile<SS, DS, DTYPE>(a, box, tile.tile);
    else
        reduce_other_tile<SS, DS>(a, box, tile.tile, kind != OTHER_TILE);
}

#define REDUCE(SS, DS)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 7)                                                               \
        tb__reduce_##SS##_##DS(const __grid_constant__ tb__cuda_args a) {                                              \
        reduce_tile<SS, DS>(a);                                                                                        \
    }
REDUCE(2, 2)
REDUCE(2, 4)
REDUCE(4, 2)
REDUCE(4, 4)

/* ---- Anything ---------------------------------------------------------------------------------------------------- */

INLINE uint32_t size_of_dtype(uint32_t dtype) {
    switch (dtype) {
    case TB_U64:
    case TB_I64:
    case TB_F64:
        return 8;
    case TB_U32:
    case TB_I32:
    case TB_F32:
        return 4;
    case TB_U16:
    case TB_I16:
    case TB_F16:
    case TB_BF16:
        return 2;
    default:
        return 1;
    }
}

INLINE bool is_small_float(uint32_t dtype) {
    return dtype == TB_F32 || dtype == TB_F16 || dtype == TB_BF16 || dtype == TB_F8E4M3 || dtype == TB_F8E5M2;
}

INLINE bool is_signed(uint32_t dtype) {
    return dtype == TB_I8 || dtype == TB_I16 || dtype == TB_I32 || dtype == TB_I64;
}

/* An integer's value in 64 bits, whatever is above its own. */
INLINE uint64_t extend(uint32_t dtype, uint64_t x) {
    uint32_t shift = 64 - 8 * size_of_dtype(dtype);
    return is_signed(dtype) ? (uint64_t)((int64_t)(x << shift) >> shift) : x << shift >> shift;
}

/* Sums and products wrap, so that unsigned arithmetic of 64 bits serves all. */
INLINE uint64_t apply_integer(uint32_t dtype, uint32_t op, uint64_t a, uint64_t b) {
    if (op != TB_MIN && op != TB_MAX)
        return op == TB_PRODUCT ? a * b : a + b;
    uint64_t x = extend(dtype, a), y = extend(dtype, b);
    bool is_less = is_signed(dtype) ? (int64_t)y < (int64_t)x : y < x;
    bool is_more = is_signed(dtype) ? (int64_t)y > (int64_t)x : y > x;
    return (op == TB_MIN ? is_less : is_more) ? b : a;
}

/* Floats go through f32. Of integers, the low bits are stored. */
INLINE uint64_t cast_element(uint32_t from, uint32_t to, uint64_t x) {
    if (from == to)
        return x;
    if (from != TB_F64 && !is_small_float(from))
        return extend(from, x);
    uint32_t bits = from == TB_F64 ? narrow_f64(x) : widen_exactly(from, (uint32_t)x);
    return to == TB_F64 ? widen_to_f64(bits) : narrow_exactly(to, bits);
}

/* All sources of one element, in their order, as the destination has it. */
INLINE uint64_t reduce_element(args_ref a, const tb__cuda_box *box, uint32_t row, int64_t at, uint32_t size) {
    uint32_t dtype = box->src_dtype, op = box->op;
    uint64_t x = load_element(find_row(a, box, row).src + at, size);
    bool is_reduced = box->nsrc > 1 || box->divisor > 0;
    if (is_reduced && is_small_float(dtype)) {
        float acc = float_of(widen_exactly(dtype, (uint32_t)x));
        for (uint32_t k = 1; k < box->nsrc; k++) {
            uint64_t y = load_element(find_source_row(a, box, k, row) + at, size);
            acc = apply(op, acc, float_of(widen_exactly(dtype, (uint32_t)y)));
        }
        if (box->divisor > 0)
            acc = __fdiv_rn(acc, box->divisor);
        x = acc == acc ? bits_of(acc) : F32_NAN;
        dtype = TB_F32;
    } else if (is_reduced && dtype == TB_F64) {
        double acc = __longlong_as_double((int64_t)x);
        for (uint32_t k = 1; k < box->nsrc; k++) {
            uint64_t y = load_element(find_source_row(a, box, k, row) + at, size);
            acc = apply(op, acc, __longlong_as_double((int64_t)y));
        }
        if (box->double_divisor > 0)
            acc = acc / box->double_divisor;
        x = acc == acc ? (uint64_t)__double_as_longlong(acc) : F64_NAN;
    } else {
        for (uint32_t k = 1; k < box->nsrc; k++)
            x = apply_integer(dtype, op, x, load_element(find_source_row(a, box, k, row) + at, size));
    }
    return cast_element(box->wire_dtype, box->dst_dtype, cast_element(dtype, box->wire_dtype, x));
}

extern "C" __global__ void __launch_bounds__(256) tb__number_any(const __grid_constant__ tb__cuda_args a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_box *box = (const tb__cuda_box *)heap_at(a, tile.place);
    uint32_t src_size = size_of_dtype(box->src_dtype), dst_size = size_of_dtype(box->dst_dtype);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t slot = tile.tile * 1024 + i * 256 + threadIdx.x;
        if (slot >= box->nslots)
            return;
        uint32_t row = divide(slot, box->per_row), j = slot - row * box->per_row.by;
        uint64_t x = reduce_element(a, box, row, (int64_t)j * src_size, src_size);
        store_element(find_row(a, box, row).dst + (int64_t)j * dst_size, x, dst_size);
    }
}
