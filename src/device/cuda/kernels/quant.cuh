/* Quantised tensors (device/quant.h), with the bits of the host's. Numbers come as rows of f32, f16 or bf16, 16 bytes
 * to a thread at a time. */
#pragma once

#include "cast.cuh"
#include "device/quant.h"

enum { MXFP8_BLOCK = 32, FP8_BLOCK = 128, NVFP4_BLOCK = 16 };

INLINE uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* The bits of the largest magnitude, as f32, of N elements of SIZE bytes: infinity's or more where one is not finite.
 * Magnitudes of floats are ordered as their bits are. */
template <int SIZE, int N> INLINE uint32_t largest(uint32_t dtype, const uint32_t *w) {
    uint32_t most = 0;
    if constexpr (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < N; i++)
            most = larger(most, w[i] & F32_ABS);
        return most;
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            most = __vmaxu2(most, w[i] & 0x7fff7fff);
        most = larger(most & 0xffff, most >> 16);
        return dtype == TB_BF16 ? most << 16 : widen_f16(most);
    }
}

/* The bits of infinity. */
INLINE uint32_t infinity_of(uint32_t dtype) {
    return dtype == TB_F32 ? F32_INF : dtype == TB_BF16 ? 0x7f80 : 0x7c00;
}

/* Notes the first element that is not finite, among N from a column on. */
template <int SIZE, int N>
INLINE void record_bad(tb__cuda_result *result, uint32_t dtype, const uint32_t *w, int64_t columns, uint32_t row,
                       int64_t column) {
    const uint32_t mask = SIZE == 4 ? F32_ABS : 0x7fff;
    int first = N;
#pragma unroll
    for (int i = N - 1; i >= 0; i--)
        first = (get_element<SIZE>(w, i) & mask) >= infinity_of(dtype) ? i : first;
    if (first < N)
        atomicMin((unsigned long long *)&result->bad, (unsigned long long)((int64_t)row * columns + column + first));
}

INLINE tb__cuda_result *result_of(args_ref a, const tb__cuda_matrix &m) {
    return (tb__cuda_result *)a.results + (m.result - a.first_result);
}

/* The scale of the tensor. False: it is none, which the result says. */
INLINE bool find_scale(args_ref a, const tb__cuda_matrix &m, float *scale) {
    tb__cuda_result *result = result_of(a, m);
    *scale = m.scale ? *(const float *)m.scale : result->scale;
    if (*scale > 0 && bits_of(*scale) < F32_INF)
        return true;
    result->bad_scale = bits_of(*scale);
    result->has_bad_scale = 1;
    return false;
}

/* ---- Division ---------------------------------------------------------------------------------------------------- */

/* Where the bits of magnitudes that quotients below are right for lie: 2^-60 to 2^60. */
INLINE bool is_moderate(float x) {
    uint32_t a = bits_of(x) & F32_ABS;
    return a >= 67U << 23 && a <= 187U << 23;
}

/* x / y for x >= 0, rounded to nearest even as by a division; r is 1 / y, rounded. Each step adds the exact remainder.
 * After the first one the quotient is off by less than its last place, and the second one rounds it correctly. If x has
 * at most 11 bits, the first one does: quotient_test.c tries all. It takes a moderate y, and x / y below 2^60; x so
 * small that the remainder is not exact gives some number below 2^-30 instead, which is zero in all formats here. */
template <int STEPS> INLINE float refine_quotient(float x, float y, float r) {
    float q = x * r;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        q = __fmaf_rn(__fmaf_rn(-q, y, x), r, q);
    return q;
}

static __device__ __noinline__ float divide_slowly(float x, float y) {
    return __fdiv_rn(x, y);
}

/* What many numbers are divided by: it is positive. */
struct divisor {
    float y, r; /* 1 / y; 0: y is not moderate */
};

INLINE divisor divide_by(float y) {
    return divisor{y, is_moderate(y) ? __frcp_rn(y) : 0};
}

/* The magnitudes of N numbers divided, at most `most`, a number that quotients may exceed by their last place. SIZE:
 * bytes of what the numbers were made from. */
template <int SIZE, int N> INLINE void divide_all(float *x, divisor by, float most) {
    enum { STEPS = SIZE == 4 ? 2 : 1 };
    float limit = by.y * most;
    if (by.r > 0) {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = refine_quotient<STEPS>(fminf(fabsf(x[i]), limit), by.y, by.r);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = divide_slowly(fminf(fabsf(x[i]), limit), by.y);
    }
}

INLINE float divide_one(float x, divisor by) {
    return is_moderate(x) && by.r > 0 ? refine_quotient<2>(x, by.y, by.r) : divide_slowly(x, by.y);
}

/* The signs of 4 elements, in the highest bits of bytes. */
template <int SIZE> INLINE uint32_t byte_signs(const uint32_t *w) {
    uint32_t x = SIZE == 2 ? __byte_perm(w[0], w[1], 0x7531)
                           : __byte_perm(__byte_perm(w[0], w[1], 0x73), __byte_perm(w[2], w[3], 0x73), 0x5410);
    return x & 0x80808080;
}

/* The signs of 8 elements, in the highest bits of half bytes. */
template <int SIZE> INLINE uint32_t nibble_signs(const uint32_t *w) {
    uint32_t x = byte_signs<SIZE>(w), y = byte_signs<SIZE>(w + SIZE);
    uint32_t even = __byte_perm(x, y, 0x6420), odd = __byte_perm(x, y, 0x7531);
    return even >> 4 | odd;
}

/* ---- Scales ------------------------------------------------------------------------------------------------------ */

/* 448 is 1.75 * 2^8: to round up is to carry from fractions over .75. */
INLINE uint32_t mxfp8_scale(uint32_t amax, bool is_floor) {
    uint32_t exponent = (is_floor ? amax : amax + 0x1fffff) >> 23;
    return exponent > 8 ? exponent - 8 : 0;
}

INLINE float fp8_scale(uint32_t amax, bool is_power_of_two) {
    if (amax == 0)
        return 1;
    if (!is_power_of_two) {
        float scale = __fdiv_rn(float_of(amax), 448.0f);
        return scale > 0 ? scale : float_of(1);
    }
    uint32_t exponent = mxfp8_scale(amax, false);
    return float_of((exponent > 1 ? exponent : 1) << 23);
}

/* Where the scale byte of a row and block is. */
INLINE uint64_t scale_place(const tb__cuda_matrix &m, int64_t row, int64_t column) {
    if (m.flags & TB__CUDA_SWIZZLED) {
        int64_t tile = row / 128 * ((m.scale_columns + 3) / 4) + column / 4;
        return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
    }
    return row * m.scale_columns + column;
}

/* ---- mxfp8 and nvfp4: a byte to a block of a row ----------------------------------------------------------------- */

/* A thread makes a block. SIZE: bytes of an element of the source. */
template <int SIZE, bool IS_MXFP8> struct block_of {
    enum { N = IS_MXFP8 ? MXFP8_BLOCK : NVFP4_BLOCK, PER_LOAD = 16 / SIZE, LOADS = N / PER_LOAD };
    enum { STEP = LOADS < 4 ? 4 / LOADS : 1, OUT = IS_MXFP8 ? N : N / 2 /* bytes */ };
};

/* The scale byte of a block, and its data. */
template <int SIZE>
INLINE uint32_t make_mxfp8(uint32_t dtype, const uint32_t *in, uint32_t most, bool is_floor, uint32_t *out) {
    uint32_t scale = mxfp8_scale(most, is_floor);
    float factor = float_of((254 - scale) << 23);
#pragma unroll
    for (int i = 0; i < MXFP8_BLOCK; i += 4) {
        float x[4];
        widen<SIZE, 4>(dtype, in + i * SIZE / 4, x);
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] *= factor;
        narrow<1, 4>(TB_F8E4M3, x, out + i / 4);
    }
    return scale;
}

/* A number from 0 to 6 rounded to f4e2m1, plus E2M1_OFFSET. The step between numbers of that format is half of the
 * power of two at or below them, at least that of 1; it is the last place of 2^22 times that power. */
const uint32_t E2M1_OFFSET = (22U << 23) + 2 * 127;

INLINE uint32_t round_e2m1(float x) {
    uint32_t power = bits_of(fmaxf(x, 1.0f)) & F32_INF;
    return bits_of(__fmaf_rn(float_of(power), 0x1p22f, x)) - power + (power >> 22);
}

template <int SIZE>
INLINE uint32_t make_nvfp4(uint32_t dtype, const uint32_t *in, uint32_t most, divisor global, uint32_t *out) {
    const divisor six = {6.0f, 0x1.555556p-3f};
    uint32_t scale = most ? pack_e4m3(divide_one(divide_one(float_of(most), six), global), 0) & 0xff : 0;
    divisor by = divide_by(unpack_f16(scale << 7) * 256.0f * global.y);
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; i += 8) {
        float x[8];
        uint32_t codes = 0;
        widen<SIZE, 8>(dtype, in + i * SIZE / 4, x);
        if (by.y > 0) {
            divide_all<SIZE, 8>(x, by, 6.0f);
#pragma unroll
            for (int k = 0; k < 8; k++)
                codes += round_e2m1(x[k]) << (4 * k);
            codes -= E2M1_OFFSET * 0x11111111;
        }
        out[i / 8] = codes | nibble_signs<SIZE>(in + i * SIZE / 4);
    }
    return scale;
}

/* DTYPE: that of the source, or 0 if it is known at run time only. A row takes whole blocks, with the padding of scales
 * in tiles. */
template <int SIZE, int DTYPE, bool IS_MXFP8, bool IS_WHOLE>
INLINE void quantise_blocks(args_ref a, const tb__cuda_matrix &m, uint32_t first) {
    typedef block_of<SIZE, IS_MXFP8> B;
    enum { N = B::N, STEP = B::STEP };
    uint32_t dtype = DTYPE ? DTYPE : m.dtype;
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags));
    char *data = (char *)(m.data + dst_base(a, m.flags));
    uint8_t *scales = (uint8_t *)(m.scales + dst_base(a, m.flags));
    bool src_aligned = is_src_aligned(a, m.flags), dst_aligned = is_dst_aligned(a, m.flags);
    float scale_of_all = 1;
    if (!IS_MXFP8 && !find_scale(a, m, &scale_of_all))
        return;
    divisor global = divide_by(scale_of_all);
    uint32_t in[STEP][4 * B::LOADS], row[STEP], block[STEP];
    int64_t left[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t which = first + 128 * i;
        row[i] = divide(which, m.per_row);
        block[i] = which - row[i] * m.per_row.by;
        left[i] = row[i] < m.nrows ? m.columns - (int64_t)block[i] * N : 0;
        const char *from = src + row[i] * m.row_step + (int64_t)block[i] * (N * SIZE);
#pragma unroll
        for (int k = 0; k < B::LOADS; k++)
            load_slot<SIZE, B::PER_LOAD, IS_WHOLE>(from + 16 * k, left[i] - k * B::PER_LOAD, src_aligned,
                                                   in[i] + 4 * k);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t out[B::OUT / 4], scale, most = largest<SIZE, N>(dtype, in[i]);
        if (!IS_WHOLE && first + 128 * i >= m.nslots)
            return;
        if (most >= F32_INF) {
            record_bad<SIZE, N>(result_of(a, m), dtype, in[i], m.columns, row[i], (int64_t)block[i] * N);
            continue;
        }
        if constexpr (IS_MXFP8)
            scale = make_mxfp8<SIZE>(dtype, in[i], most, m.flags & TB__CUDA_FLOOR, out);
        else
            scale = make_nvfp4<SIZE>(dtype, in[i], most, global, out);
        int64_t tensor_row = m.first + row[i], at = tensor_row * m.data_step + (int64_t)block[i] * N;
        char *to = data + (IS_MXFP8 ? at : at / 2);
        int64_t nbytes = IS_MXFP8 ? left[i] : left[i] / 2;
#pragma unroll
        for (int k = 0; k < B::OUT; k += IS_MXFP8 ? 16 : 8) {
            if (IS_WHOLE || nbytes > k)
                store_slot<1, IS_MXFP8 ? 16 : 8, IS_WHOLE>(to + k, nbytes - k, dst_aligned, out + k / 4);
        }
        scales[scale_place(m, tensor_row, block[i])] =
            IS_WHOLE || (row[i] < m.nrows && block[i] < m.scale_columns) ? scale : 0;
    }
}

/* Tiles that are not whole have functions of their own, so that whole ones have the registers. */
template <int SIZE, bool IS_MXFP8>
static __device__ __noinline__ void quantise_other_tile(args_ref a, uint32_t place, uint32_t first) {
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, place);
    quantise_blocks<SIZE, 0, IS_MXFP8, false>(a, m, first);
}

template <int SIZE, bool IS_MXFP8> INLINE void quantise_tile(args_ref a) {
    enum { N = block_of<SIZE, IS_MXFP8>::N, TILE = 128 * block_of<SIZE, IS_MXFP8>::STEP };
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * TILE + threadIdx.x;
    bool is_whole = is_src_aligned(a, m.flags) && is_dst_aligned(a, m.flags) && m.columns == m.scale_columns * N &&
                    m.per_row.by == m.scale_columns &&
                    (uint64_t)(tile.tile + 1) * TILE <= m.nrows * (uint64_t)m.per_row.by;
    if (!is_whole)
        quantise_other_tile<SIZE, IS_MXFP8>(a, tile.place, first);
    else if (SIZE == 2 && m.dtype == TB_F16)
        quantise_blocks<SIZE, TB_F16, IS_MXFP8, true>(a, m, first);
    else
        quantise_blocks<SIZE, SIZE == 2 ? TB_BF16 : TB_F32, IS_MXFP8, true>(a, m, first);
}

/* ---- fp8: a scale to a block of rows, or to the tensor ----------------------------------------------------------- */

/* The elements of 16 bytes divided by a scale, at `to`; n of them exist. */
template <int SIZE, bool IS_WHOLE>
INLINE void store_fp8(uint32_t dtype, const uint32_t *in, divisor scale, bool is_power_of_two, char *to, int64_t n,
                      bool is_aligned) {
    enum { N = 16 / SIZE };
    float x[N];
    uint32_t out[N / 4];
    widen<SIZE, N>(dtype, in, x);
    if (is_power_of_two) {
        float factor = float_of((254U << 23) - bits_of(scale.y)); /* 1 / scale */
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] *= factor;
        narrow<1, N>(TB_F8E4M3, x, out);
    } else {
        divide_all<SIZE, N>(x, scale, 512.0f);
        narrow<1, N>(TB_F8E4M3, x, out);
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            out[i] |= byte_signs<SIZE>(in + i * SIZE);
    }
    store_slot<1, N, IS_WHOLE>(to, n, is_aligned, out);
}

template <int SIZE, int DTYPE, bool IS_WHOLE>
INLINE void quantise_fp8_slots(args_ref a, const tb__cuda_matrix &m, uint32_t down, uint32_t across) {
    enum { N = 16 / SIZE, LANES = FP8_BLOCK / N, ROWS = 256 / LANES, STEP = FP8_BLOCK / ROWS };
    __shared__ uint32_t mosts[8];
    uint32_t first = down * FP8_BLOCK + threadIdx.x / LANES, nrows = m.nrows;
    uint32_t dtype = DTYPE ? DTYPE : m.dtype;
    int64_t column = (int64_t)across * FP8_BLOCK + threadIdx.x % LANES * N, left = m.columns - column;
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags)) + column * SIZE;
    char *data = (char *)(m.data + dst_base(a, m.flags)) + column;
    bool src_aligned = is_src_aligned(a, m.flags), dst_aligned = is_dst_aligned(a, m.flags);
    uint32_t in[STEP][4], most = 0;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t row = first + i * ROWS;
        load_slot<SIZE, N, IS_WHOLE>(src + row * m.row_step, row < nrows ? left : 0, src_aligned, in[i]);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++)
        most = larger(most, largest<SIZE, N>(dtype, in[i]));
#pragma unroll
    for (int k = 1; k < 32; k *= 2)
        most = larger(most, __shfl_xor_sync(~0U, most, k));
    if (threadIdx.x % 32 == 0)
        mosts[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 8; k++)
        most = larger(most, mosts[k]);
    if (most >= F32_INF) {
#pragma unroll
        for (int i = 0; i < STEP; i++)
            record_bad<SIZE, N>(result_of(a, m), dtype, in[i], m.columns, first + i * ROWS, column);
        return;
    }
    bool is_power_of_two = m.flags & TB__CUDA_POWER_OF_TWO;
    float scale = fp8_scale(most, is_power_of_two);
    divisor by = divide_by(scale);
    if (threadIdx.x == 0) {
        int64_t at = (m.first / FP8_BLOCK + down) * m.scale_columns + across;
        store_element((float *)(m.scales + dst_base(a, m.flags)) + at, bits_of(scale), 4);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t row = first + i * ROWS;
        if (IS_WHOLE || row < nrows)
            store_fp8<SIZE, IS_WHOLE>(dtype, in[i], by, is_power_of_two, data + (m.first + row) * m.data_step, left,
                                      dst_aligned);
    }
}

template <int SIZE>
static __device__ __noinline__ void quantise_other_block(args_ref a, uint32_t place, uint32_t down, uint32_t across) {
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, place);
    quantise_fp8_slots<SIZE, 0, false>(a, m, down, across);
}

template <int SIZE> INLINE void quantise_fp8_block(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t down = divide(tile.tile, m.per_row), across = tile.tile - down * m.per_row.by;
    bool is_whole = is_src_aligned(a, m.flags) && is_dst_aligned(a, m.flags) && (down + 1) * FP8_BLOCK <= m.nrows &&
                    (int64_t)(across + 1) * FP8_BLOCK <= m.columns;
    if (!is_whole)
        quantise_other_block<SIZE>(a, tile.place, down, across);
    else if (SIZE == 2 && m.dtype == TB_F16)
        quantise_fp8_slots<SIZE, TB_F16, true>(a, m, down, across);
    else
        quantise_fp8_slots<SIZE, SIZE == 2 ? TB_BF16 : TB_F32, true>(a, m, down, across);
}

INLINE tile_kind kind_of_rows_tile(args_ref a, const tb__cuda_matrix &m, bool is_dst_aligned, uint32_t tile,
                                   uint32_t slots, int n) {
    return kind_of_tile(&m, is_src_aligned(a, m.flags) && is_dst_aligned, m.columns, tile, slots, n);
}

/* Loads STEP slots of plain rows, so many threads apart, and tells where the first of them is. */
template <int SIZE, int STEP, int THREADS, tile_kind KIND>
INLINE void load_rows(args_ref a, const tb__cuda_matrix &m, uint32_t tile, uint32_t (*in)[4], slot_place *at) {
    enum { N = 16 / SIZE, SLOTS = STEP * THREADS };
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags));
    bool is_aligned = is_src_aligned(a, m.flags);
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        at[i] = i == 0 || KIND != ROW_TILE ? find_slot(&m, tile, SLOTS, threadIdx.x + THREADS * i)
                                           : slot_place{at[0].row, at[0].j + THREADS * i, true};
        int64_t n = at[i].exists ? m.columns - (int64_t)at[i].j * N : 0;
        load_slot<SIZE, N, KIND != OTHER_TILE>(src + at[i].row * m.row_step + (int64_t)at[i].j * 16, n, is_aligned,
                                               in[i]);
    }
}

enum { TENSOR_STEP = 4, AMAX_STEP = 8 };

template <int SIZE, tile_kind KIND> INLINE void quantise_rows(args_ref a, const tb__cuda_matrix &m, uint32_t tile) {
    enum { N = 16 / SIZE };
    char *data = (char *)(m.data + dst_base(a, m.flags));
    bool dst_aligned = is_dst_aligned(a, m.flags);
    uint32_t in[TENSOR_STEP][4];
    slot_place at[TENSOR_STEP];
    float scale;
    if (!find_scale(a, m, &scale))
        return;
    divisor by = divide_by(scale);
    load_rows<SIZE, TENSOR_STEP, 128, KIND>(a, m, tile, in, at);
#pragma unroll
    for (int i = 0; i < TENSOR_STEP; i++) {
        int64_t column = (int64_t)at[i].j * N;
        if (KIND == OTHER_TILE && !at[i].exists)
            continue;
        if (largest<SIZE, N>(m.dtype, in[i]) >= F32_INF)
            record_bad<SIZE, N>(result_of(a, m), m.dtype, in[i], m.columns, at[i].row, column);
        store_fp8<SIZE, KIND != OTHER_TILE>(m.dtype, in[i], by, false,
                                            data + (m.first + at[i].row) * m.data_step + column, m.columns - column,
                                            dst_aligned);
    }
}

template <int SIZE>
static __device__ __noinline__ void quantise_other_rows(args_ref a, const tb__cuda_matrix *m, uint32_t tile,
                                                        bool is_whole) {
    if (is_whole)
        quantise_rows<SIZE, WHOLE_TILE>(a, *m, tile);
    else
        quantise_rows<SIZE, OTHER_TILE>(a, *m, tile);
}

template <int SIZE> INLINE void quantise_fp8_tensor(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    tile_kind kind = kind_of_rows_tile(a, m, is_dst_aligned(a, m.flags), tile.tile, 128 * TENSOR_STEP, 16 / SIZE);
    if (kind == ROW_TILE)
        quantise_rows<SIZE, ROW_TILE>(a, m, tile.tile);
    else
        quantise_other_rows<SIZE>(a, &m, tile.tile, kind == WHOLE_TILE);
}

/* ---- amax -------------------------------------------------------------------------------------------------------- */

template <int SIZE, tile_kind KIND> INLINE void find_amax_of(args_ref a, const tb__cuda_matrix &m, uint32_t tile) {
    enum { N = 16 / SIZE };
    uint32_t in[AMAX_STEP][4], most = 0;
    slot_place at[AMAX_STEP];
    load_rows<SIZE, AMAX_STEP, 128, KIND>(a, m, tile, in, at);
#pragma unroll
    for (int i = 0; i < AMAX_STEP; i++) {
        uint32_t here = largest<SIZE, N>(m.dtype, in[i]);
        most = larger(most, here);
        if (here >= F32_INF)
            record_bad<SIZE, N>(result_of(a, m), m.dtype, in[i], m.columns, at[i].row, (int64_t)at[i].j * N);
    }
#pragma unroll
    for (int k = 1; k < 32; k *= 2)
        most = larger(most, __shfl_xor_sync(~0U, most, k));
    /* Most warps find nothing larger than what is there. */
    tb__cuda_result *result = result_of(a, m);
    if (threadIdx.x % 32 == 0 && most > *(volatile uint32_t *)&result->amax)
        atomicMax(&result->amax, most);
}

template <int SIZE>
static __device__ __noinline__ void find_other_amax(args_ref a, const tb__cuda_matrix *m, uint32_t tile,
                                                    bool is_whole) {
    if (is_whole)
        find_amax_of<SIZE, WHOLE_TILE>(a, *m, tile);
    else
        find_amax_of<SIZE, OTHER_TILE>(a, *m, tile);
}

template <int SIZE> INLINE void find_amax(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    tile_kind kind = kind_of_rows_tile(a, m, true, tile.tile, 128 * AMAX_STEP, 16 / SIZE);
    if (kind == ROW_TILE)
        find_amax_of<SIZE, ROW_TILE>(a, m, tile.tile);
    else
        find_other_amax<SIZE>(a, &m, tile.tile, kind == WHOLE_TILE);
}

/* ---- Back to plain numbers --------------------------------------------------------------------------------------- */

INLINE float scale_of(const tb__cuda_matrix &m, const char *scales, float global, int64_t row, int64_t column) {
    switch (m.kind) {
    case TB__QUANT_FP8_TENSOR:
        return global;
    case TB__QUANT_FP8_BLOCK:
        return float_of((uint32_t)load_element((const float *)scales + row / 128 * m.scale_columns + column / 128, 4));
    case TB__QUANT_MXFP8: {
        uint32_t byte = (uint8_t)scales[scale_place(m, row, column / 32)];
        return byte == 255 ? float_of(F32_NAN) : byte ? float_of(byte << 23) : 0x1p-127f;
    }
    default: {
        uint32_t bits = widen_e4m3((uint8_t)scales[scale_place(m, row, column / 16)]);
        return is_nan_bits(bits) ? float_of(bits) : float_of(bits) * global;
    }
    }
}

/* The bits of a product, and what processors of the host make of NaN. */
INLINE uint32_t multiply_exactly(uint32_t x, uint32_t y) {
    if (is_nan_bits(x))
        return x | 0x400000;
    if (is_nan_bits(y))
        return y | 0x400000;
    float product = float_of(x) * float_of(y);
    return product == product ? bits_of(product) : 0xffc00000; /* of zero and infinity */
}

/* One element. */
static __device__ __noinline__ uint32_t dequantise_element(const tb__cuda_matrix *m, float global, int64_t row,
                                                           int64_t column) {
    int64_t at = row * m->data_step + column;
    const char *data = (const char *)m->data;
    uint32_t bits;
    if (m->kind == TB__QUANT_NVFP4) {
        uint32_t code = (uint32_t)((uint8_t)data[at / 2]) >> (at % 2 * 4) & 15, a = code & 7;
        bits = bits_of(a < 2 ? (float)a * 0.5f : float_of((a << 22) + (126U << 23))) | (code & 8) << 28;
    } else {
        bits = widen_e4m3((uint8_t)data[at]);
    }
    float scale = scale_of(*m, (const char *)m->scales, global, row, column);
    return narrow_exactly(m->dtype, multiply_exactly(bits, bits_of(scale)));
}

/* SIZE: bytes of an element of the destination. A slot is 16 bytes of it. */
template <int SIZE, bool IS_WHOLE> INLINE void dequantise_slots(args_ref a, uint32_t place, uint32_t first) {
    enum { N = 16 / SIZE, STEP = 4 };
    const tb__cuda_matrix *at_place = (const tb__cuda_matrix *)heap_at(a, place), m = *at_place;
    const char *data = (const char *)m.data, *scales = (const char *)m.scales;
    char *dst = (char *)(m.rows_at + dst_base(a, m.flags));
    bool is_nvfp4 = m.kind == TB__QUANT_NVFP4, dst_aligned = is_dst_aligned(a, m.flags);
    bool is_fast = m.flags & TB__CUDA_ALIGNED_SRC; /* slots begin and end with bytes of the data, in one block */
    uint32_t in[STEP][2];
    float global = 1, scale[STEP];
    if ((is_nvfp4 || m.kind == TB__QUANT_FP8_TENSOR) && !find_scale(a, m, &global))
        return;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 128 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by;
        int64_t column = m.first_column + (int64_t)j * N, at = (m.first + row) * m.data_step + column;
        if (!IS_WHOLE && (!is_fast || slot >= m.nslots || (int64_t)(j + 1) * N > m.columns))
            continue;
        scale[i] = scale_of(m, scales, global, m.first + row, column);
        if (is_nvfp4)
            in[i][0] = N == 8 ? *(const uint32_t *)(data + at / 2) : *(const uint16_t *)(data + at / 2);
        else if (N == 8)
            *(uint2 *)in[i] = __ldca((const uint2 *)(data + at));
        else
            in[i][0] = __ldca((const uint32_t *)(data + at));
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 128 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by, out[4];
        if (!IS_WHOLE && slot >= m.nslots)
            return;
        char *to = dst + row * m.row_step + (int64_t)j * 16;
        int64_t n = m.columns - (int64_t)j * N;
        bool is_done = false;
        if (IS_WHOLE || (is_fast && n >= N)) {
            float x[N];
            if (is_nvfp4) {
#pragma unroll
                for (int k = 0; k < N; k++) {
                    uint32_t code = in[i][0] >> (4 * k) & 15; /* as an f16, a 2^14-th of the value */
                    x[k] = unpack_f16((code & 7) << 9 | (code & 8) << 12) * 0x1p14f;
                }
            } else {
                widen<1, N>(TB_F8E4M3, in[i], x);
            }
#pragma unroll
            for (int k = 0; k < N; k++)
                x[k] *= scale[i];
            is_done = !has_nan<N>(x);
            if (is_done)
                narrow<SIZE, N>(m.dtype, x, out);
        }
        if (!is_done) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                out[k] = 0;
#pragma unroll
            for (int k = 0; k < N; k++) {
                if (k < n)
                    add_element<SIZE>(
                        out, k,
                        dequantise_element(at_place, global, m.first + row, m.first_column + (int64_t)j * N + k));
            }
        }
        store_slot<SIZE, N, IS_WHOLE>(to, n, dst_aligned, out);
    }
}

template <int SIZE>
static __device__ __noinline__ void dequantise_other_tile(args_ref a, uint32_t place, uint32_t first) {
    dequantise_slots<SIZE, false>(a, place, first);
}

template <int SIZE> INLINE void dequantise_tile(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix &m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * 512 + threadIdx.x;
    bool is_aligned = m.flags & TB__CUDA_ALIGNED_SRC && is_dst_aligned(a, m.flags);
    if (kind_of_tile(&m, is_aligned, m.columns, tile.tile, 512, 16 / SIZE) != OTHER_TILE)
        dequantise_slots<SIZE, true>(a, tile.place, first);
    else
        dequantise_other_tile<SIZE>(a, tile.place, first);
}

/* Results that are reset need not be uploaded before the next launch. */
extern "C" __global__ void __launch_bounds__(256) tb__take_results(const __grid_constant__ tb__cuda_args a) {
    uint32_t i = blockIdx.x * TB__CUDA_BLOCK_RESULTS + threadIdx.x;
    tb__cuda_result *from = (tb__cuda_result *)a.items + i;
    if (i >= a.nitems)
        return;
    ((tb__cuda_result *)a.results)[i] = *from;
    *from = tb__cuda_result{UINT64_MAX, 0, 0, 0, 0};
}

/* So many blocks of a kernel fit on a multiprocessor: enough loads under way. */
#define QUANT(name, threads, blocks, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        tb__##name(const __grid_constant__ tb__cuda_args a) {                                                          \
        __VA_ARGS__(a);                                                                                                \
    }
QUANT(mxfp8_2, 128, 8, quantise_tile<2, true>)
QUANT(mxfp8_4, 128, 6, quantise_tile<4, true>)
QUANT(nvfp4_2, 128, 10, quantise_tile<2, false>)
QUANT(nvfp4_4, 128, 8, quantise_tile<4, false>)
QUANT(fp8_block_2, 256, 4, quantise_fp8_block<2>)
QUANT(fp8_block_4, 256, 2, quantise_fp8_block<4>)
QUANT(fp8_tensor_2, 128, 8, quantise_fp8_tensor<2>)
QUANT(fp8_tensor_4, 128, 8, quantise_fp8_tensor<4>)
QUANT(amax_2, 128, 8, find_amax<2>)
QUANT(amax_4, 128, 8, find_amax<4>)
QUANT(dequantise_2, 128, 8, dequantise_tile<2>)
QUANT(dequantise_4, 128, 8, dequantise_tile<4>)
