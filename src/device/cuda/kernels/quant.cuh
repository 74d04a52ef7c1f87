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

/* Notes the first element that is not finite, among N from a column on. */
template <int N>
INLINE void record_bad(tb__cuda_result *result, const float *x, int64_t columns, uint32_t row, int64_t column) {
    int first = N;
#pragma unroll
    for (int i = N - 1; i >= 0; i--)
        first = (bits_of(x[i]) & F32_ABS) >= F32_INF ? i : first;
    if (first < N)
        atomicMin((unsigned long long *)&result->bad, (unsigned long long)((int64_t)row * columns + column + first));
}

INLINE tb__cuda_result *result_of(args_ref a, const tb__cuda_matrix &m) {
    return (tb__cuda_result *)a.results + m.result;
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

/* Whether all slots of a tile of flat rows exist, and are full; `n` elements each. */
INLINE bool is_tile_full(const tb__cuda_matrix &m, uint32_t end, int n) {
    return end <= m.nslots && m.columns == (int64_t)m.per_row.by * n;
}

/* ---- Division ---------------------------------------------------------------------------------------------------- */

/* Where the bits of magnitudes that quotients below are right for lie: 2^-60 to 2^60. */
INLINE bool is_moderate(float x) {
    uint32_t a = bits_of(x) & F32_ABS;
    return a >= 67U << 23 && a <= 187U << 23;
}

/* x / y, rounded to nearest even as by a division, but a zero may lose its sign; r is 1 / y, rounded. After the first
 * step the quotient is off by less than its last place, and the second one, with the exact remainder, rounds it
 * correctly. That takes a moderate y, and |x / y| below 2^60; x so small that the remainder is not exact gives some
 * number below 2^-30 instead, which is zero in all formats here. */
INLINE float refine_quotient(float x, float y, float r) {
    float q = x * r;
    q = __fmaf_rn(__fmaf_rn(-q, y, x), r, q);
    return __fmaf_rn(__fmaf_rn(-q, y, x), r, q);
}

static __device__ __noinline__ float divide_slowly(float x, float y) {
    return __fdiv_rn(x, y);
}

/* N numbers divided by a positive one, to be rounded to a format whose largest number is below `most`, a power of two:
 * what is beyond that comes out as some number beyond it. */
template <int N> INLINE void divide_all(float *x, float y, float most) {
    if (is_moderate(y)) {
        float r = __frcp_rn(y), limit = y * most;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float q = refine_quotient(fminf(fmaxf(x[i], -limit), limit), y, r);
            x[i] = copysignf(q, x[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = divide_slowly(x[i], y);
    }
}

INLINE float divide_one(float x, float y) {
    if (is_moderate(x) && is_moderate(y))
        return refine_quotient(x, y, __frcp_rn(y));
    return divide_slowly(x, y);
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

/* With one bit of fraction, and 1 the smallest normal number. */
INLINE uint32_t round_e2m1(float x) {
    uint32_t bits = bits_of(x), a = bits & F32_ABS;
    const uint32_t limit = 0x40c00000; /* 6 */
    a = a < limit ? a : limit;
    uint32_t small = bits_of(float_of(a) + 0x1p22f) - (149U << 23);
    uint32_t normal = (a + 0x1fffff + (a >> 22 & 1) - (126U << 23)) >> 22;
    return (a < 127U << 23 ? small : normal) | (bits >> 28 & 8);
}

/* The scale byte of a block, and its data: 8 or 4 elements to a thread. */
template <int N> INLINE uint32_t make_mxfp8(uint32_t most, bool is_floor, float *x, uint32_t *out) {
    uint32_t scale = mxfp8_scale(most, is_floor);
    float factor = float_of((254 - scale) << 23);
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] *= factor;
    narrow<1, N>(TB_F8E4M3, x, out);
    return scale;
}

template <int N> INLINE uint32_t make_nvfp4(uint32_t most, float global, float *x, uint32_t *out) {
    uint32_t scale = 0;
    if (most)
        scale = narrow_e4m3(bits_of(divide_one(divide_one(float_of(most), 6.0f), global)));
    float divisor = float_of(widen_e4m3(scale)) * global;
    if (divisor > 0) {
        divide_all<N>(x, divisor, 8.0f);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = copysignf(0.0f, x[i]);
    }
    *out = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        *out |= round_e2m1(x[i]) << (4 * i);
    return scale;
}

/* SIZE: bytes of an element, DTYPE: its dtype, or 0 if that is known at run time only. A row takes whole blocks, with the
 * padding of scales in tiles. */
template <int SIZE, int DTYPE, bool IS_MXFP8, bool IS_WHOLE>
INLINE void quantise_slots(args_ref a, const tb__cuda_matrix &m, uint32_t first) {
    enum { N = 16 / SIZE, BLOCK = IS_MXFP8 ? MXFP8_BLOCK : NVFP4_BLOCK, LANES = BLOCK / N, STEP = 4 };
    enum { OUT = IS_MXFP8 ? N : N / 2, OUT_WORDS = (OUT + 3) / 4 }; /* bytes */
    uint32_t nrows = m.nrows, dtype = DTYPE ? DTYPE : m.dtype;
    const tb__cuda_divisor per_row = m.per_row;
    int64_t columns = m.columns, row_step = m.row_step, data_step = m.data_step, scale_columns = m.scale_columns;
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags));
    char *data = (char *)(m.data + dst_base(a, m.flags));
    uint8_t *scales = (uint8_t *)(m.scales + dst_base(a, m.flags));
    bool src_aligned = is_src_aligned(a, m.flags), dst_aligned = is_dst_aligned(a, m.flags);
    float global = 1;
    if (!IS_MXFP8 && !find_scale(a, m, &global))
        return;
    uint32_t in[STEP][4], row[STEP], block[STEP], sub = first % LANES;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t which = (first + 128 * i) / LANES;
        row[i] = divide(which, per_row);
        block[i] = which - row[i] * per_row.by;
        int64_t column = (int64_t)block[i] * BLOCK + sub * N, n = row[i] < nrows ? columns - column : 0;
        load_slot<SIZE, N, IS_WHOLE>(src + row[i] * row_step + column * SIZE, n, src_aligned, in[i]);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float x[N];
        uint32_t out[OUT_WORDS];
        int64_t column = (int64_t)block[i] * BLOCK + sub * N, n = row[i] < nrows ? columns - column : 0;
        widen<SIZE, N>(dtype, in[i], x);
        uint32_t most = largest<SIZE, N>(dtype, in[i]), scale;
#pragma unroll
        for (int k = 1; k < LANES; k *= 2)
            most = larger(most, __shfl_xor_sync(~0U, most, k));
        if (most >= F32_INF) {
            record_bad<N>(result_of(a, m), x, m.columns, row[i], column);
            continue;
        }
        if constexpr (IS_MXFP8)
            scale = make_mxfp8<N>(most, m.flags & TB__CUDA_FLOOR, x, out);
        else
            scale = make_nvfp4<N>(most, global, x, out);
        if (!IS_WHOLE && first + 128 * i >= m.nslots)
            continue;
        int64_t tensor_row = m.first + row[i], at = tensor_row * data_step + column;
        if (IS_WHOLE || n > 0) {
            char *to = data + (IS_MXFP8 ? at : at / 2);
            if (IS_WHOLE || (dst_aligned && n >= N)) {
                if constexpr (OUT == 8)
                    __stcs((uint2 *)to, make_uint2(out[0], out[1]));
                else if constexpr (OUT == 4)
                    __stcs((uint32_t *)to, out[0]);
                else
                    __stcs((uint16_t *)to, (uint16_t)out[0]);
            } else {
                int64_t nbytes = IS_MXFP8 ? n : n / 2;
#pragma unroll
                for (int k = 0; k < OUT; k++) {
                    if (k < nbytes)
                        to[k] = (char)byte_of(out, k);
                }
            }
        }
        if (sub == 0)
            scales[scale_place(m, tensor_row, block[i])] =
                IS_WHOLE || (row[i] < nrows && block[i] < scale_columns) ? scale : 0;
    }
}

/* Tiles that are not whole have functions of their own, so that whole ones have the registers. */
template <int SIZE, bool IS_MXFP8>
static __device__ __noinline__ void quantise_other_tile(args_ref a, uint32_t place, uint32_t first) {
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, place);
    quantise_slots<SIZE, 0, IS_MXFP8, false>(a, m, first);
}

template <int SIZE, bool IS_MXFP8> INLINE void quantise_tile(args_ref a) {
    enum { TILE = 512, BLOCK = IS_MXFP8 ? MXFP8_BLOCK : NVFP4_BLOCK, LANES = BLOCK * SIZE / 16 };
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * TILE + threadIdx.x;
    bool is_whole = is_src_aligned(a, m.flags) && is_dst_aligned(a, m.flags) && m.columns == m.scale_columns * BLOCK &&
                    m.per_row.by == m.scale_columns &&
                    (uint64_t)(tile.tile + 1) * TILE / LANES <= m.nrows * (uint64_t)m.per_row.by;
    if (!is_whole)
        quantise_other_tile<SIZE, IS_MXFP8>(a, tile.place, first);
    else if (SIZE == 2 && m.dtype == TB_F16)
        quantise_slots<SIZE, TB_F16, IS_MXFP8, true>(a, m, first);
    else
        quantise_slots<SIZE, SIZE == 2 ? TB_BF16 : TB_F32, IS_MXFP8, true>(a, m, first);
}

/* ---- fp8: a scale to a block of rows, or to the tensor ----------------------------------------------------------- */

/* N numbers divided by a scale, at `to`, of which n exist. */
template <int N, bool IS_WHOLE>
INLINE void store_fp8(float *x, float scale, bool is_power_of_two, char *to, int64_t n, bool is_aligned) {
    uint32_t out[N / 4];
    if (is_power_of_two) {
        float factor = float_of((254U << 23) - bits_of(scale)); /* 1 / scale */
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] *= factor;
    } else {
        divide_all<N>(x, scale, 512.0f);
    }
    narrow<1, N>(TB_F8E4M3, x, out);
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
        for (int i = 0; i < STEP; i++) {
            float x[N];
            widen<SIZE, N>(dtype, in[i], x);
            record_bad<N>(result_of(a, m), x, m.columns, first + i * ROWS, column);
        }
        return;
    }
    bool is_power_of_two = m.flags & TB__CUDA_POWER_OF_TWO;
    float scale = fp8_scale(most, is_power_of_two);
    if (threadIdx.x == 0) {
        int64_t at = (m.first / FP8_BLOCK + down) * m.scale_columns + across;
        store_element((float *)(m.scales + dst_base(a, m.flags)) + at, bits_of(scale), 4);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float x[N];
        uint32_t row = first + i * ROWS;
        widen<SIZE, N>(dtype, in[i], x);
        if (IS_WHOLE || row < nrows)
            store_fp8<N, IS_WHOLE>(x, scale, is_power_of_two, data + (m.first + row) * m.data_step, left, dst_aligned);
    }
}

template <int SIZE>
static __device__ __noinline__ void quantise_other_block(args_ref a, uint32_t place, uint32_t down, uint32_t across) {
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, place);
    quantise_fp8_slots<SIZE, 0, false>(a, m, down, across);
}

template <int SIZE> INLINE void quantise_fp8_block(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
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

template <int SIZE, bool IS_WHOLE> INLINE void quantise_fp8_flat(args_ref a, const tb__cuda_matrix &m, uint32_t first) {
    enum { N = 16 / SIZE, STEP = 4 };
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags));
    char *data = (char *)(m.data + dst_base(a, m.flags));
    bool src_aligned = is_src_aligned(a, m.flags), dst_aligned = is_dst_aligned(a, m.flags);
    uint32_t in[STEP][4], dtype = m.dtype;
    float scale;
    if (!find_scale(a, m, &scale))
        return;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 128 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by;
        int64_t n = slot < m.nslots ? m.columns - (int64_t)j * N : 0;
        load_slot<SIZE, N, IS_WHOLE>(src + row * m.row_step + (int64_t)j * 16, n, src_aligned, in[i]);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 128 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by;
        float x[N];
        if (!IS_WHOLE && slot >= m.nslots)
            return;
        widen<SIZE, N>(dtype, in[i], x);
        if (largest<SIZE, N>(dtype, in[i]) >= F32_INF)
            record_bad<N>(result_of(a, m), x, m.columns, row, (int64_t)j * N);
        store_fp8<N, IS_WHOLE>(x, scale, false, data + (m.first + row) * m.data_step + (int64_t)j * N,
                               m.columns - (int64_t)j * N, dst_aligned);
    }
}

template <int SIZE> static __device__ __noinline__ void quantise_other_flat(args_ref a, uint32_t place, uint32_t first) {
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, place);
    quantise_fp8_flat<SIZE, false>(a, m, first);
}

template <int SIZE> INLINE void quantise_fp8_tensor(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * 512 + threadIdx.x;
    if (is_src_aligned(a, m.flags) && is_dst_aligned(a, m.flags) && is_tile_full(m, (tile.tile + 1) * 512, 16 / SIZE))
        quantise_fp8_flat<SIZE, true>(a, m, first);
    else
        quantise_other_flat<SIZE>(a, tile.place, first);
}

/* ---- amax -------------------------------------------------------------------------------------------------------- */

template <int SIZE, bool IS_WHOLE> INLINE void find_amax_of(args_ref a, const tb__cuda_matrix &m, uint32_t first) {
    enum { N = 16 / SIZE, STEP = 8 };
    const char *src = (const char *)(m.rows_at + src_base(a, m.flags));
    bool src_aligned = is_src_aligned(a, m.flags);
    uint32_t in[STEP][4], most = 0, dtype = m.dtype;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t slot = first + 256 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by;
        int64_t n = slot < m.nslots ? m.columns - (int64_t)j * N : 0;
        load_slot<SIZE, N, IS_WHOLE>(src + row * m.row_step + (int64_t)j * 16, n, src_aligned, in[i]);
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        uint32_t here = largest<SIZE, N>(dtype, in[i]);
        most = larger(most, here);
        if (here >= F32_INF) {
            float x[N];
            widen<SIZE, N>(dtype, in[i], x);
            uint32_t slot = first + 256 * i, row = divide(slot, m.per_row), j = slot - row * m.per_row.by;
            record_bad<N>(result_of(a, m), x, m.columns, row, (int64_t)j * N);
        }
    }
#pragma unroll
    for (int k = 1; k < 32; k *= 2)
        most = larger(most, __shfl_xor_sync(~0U, most, k));
    /* Most warps find nothing larger than what is there. */
    tb__cuda_result *result = result_of(a, m);
    if (threadIdx.x % 32 == 0 && most > *(volatile uint32_t *)&result->amax)
        atomicMax(&result->amax, most);
}

template <int SIZE> static __device__ __noinline__ void find_other_amax(args_ref a, uint32_t place, uint32_t first) {
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, place);
    find_amax_of<SIZE, false>(a, m, first);
}

template <int SIZE> INLINE void find_amax(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * 2048 + threadIdx.x;
    if (is_src_aligned(a, m.flags) && is_tile_full(m, (tile.tile + 1) * 2048, 16 / SIZE))
        find_amax_of<SIZE, true>(a, m, first);
    else
        find_other_amax<SIZE>(a, tile.place, first);
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
            *(uint2 *)in[i] = __ldcs((const uint2 *)(data + at));
        else
            in[i][0] = __ldcs((const uint32_t *)(data + at));
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
                    add_element<SIZE>(out, k,
                                      dequantise_element(at_place, global, m.first + row,
                                                         m.first_column + (int64_t)j * N + k));
            }
        }
        store_slot<SIZE, N, IS_WHOLE>(to, n, dst_aligned, out);
    }
}

template <int SIZE> static __device__ __noinline__ void dequantise_other_tile(args_ref a, uint32_t place, uint32_t first) {
    dequantise_slots<SIZE, false>(a, place, first);
}

template <int SIZE> INLINE void dequantise_tile(args_ref a) {
    tb__cuda_tile tile = find_tile(a, blockIdx.x);
    const tb__cuda_matrix m = *(const tb__cuda_matrix *)heap_at(a, tile.place);
    uint32_t first = tile.tile * 512 + threadIdx.x;
    bool is_aligned = m.flags & TB__CUDA_ALIGNED_SRC && is_dst_aligned(a, m.flags);
    if (is_aligned && is_tile_full(m, (tile.tile + 1) * 512, 16 / SIZE))
        dequantise_slots<SIZE, true>(a, tile.place, first);
    else
        dequantise_other_tile<SIZE>(a, tile.place, first);
}

/* So many blocks of a kernel fit on a multiprocessor: enough loads under way. */
#define QUANT(name, threads, blocks, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                      \
        tb__##name(const __grid_constant__ tb__cuda_args a) {                                                          \
        __VA_ARGS__(a);                                                                                                \
    }
QUANT(mxfp8_2, 128, 6, quantise_tile<2, true>)
QUANT(mxfp8_4, 128, 6, quantise_tile<4, true>)
QUANT(nvfp4_2, 128, 6, quantise_tile<2, false>)
QUANT(nvfp4_4, 128, 6, quantise_tile<4, false>)
QUANT(fp8_block_2, 256, 3, quantise_fp8_block<2>)
QUANT(fp8_block_4, 256, 2, quantise_fp8_block<4>)
QUANT(fp8_tensor_2, 128, 8, quantise_fp8_tensor<2>)
QUANT(fp8_tensor_4, 128, 8, quantise_fp8_tensor<4>)
QUANT(amax_2, 256, 3, find_amax<2>)
QUANT(amax_4, 256, 3, find_amax<4>)
QUANT(dequantise_2, 128, 8, dequantise_tile<2>)
QUANT(dequantise_4, 128, 8, dequantise_tile<4>)
