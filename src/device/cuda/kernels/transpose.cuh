/* Transposes: the source is contiguous along one dimension, the destination along another. A tile goes through shared
 * memory in words, which hold several elements that are side by side in the destination. */
#pragma once

#include "access.cuh"

template <int E> struct transposed {
    typedef uint32_t word;
    enum { SIDE = TB__CUDA_TRANSPOSE_SIDE, PACK = 4 / E };
};

template <> struct transposed<8> {
    typedef uint64_t word;
    enum { SIDE = TB__CUDA_TRANSPOSE_SIDE / 2, PACK = 1 };
};

template <int E> struct vector_of {
    uint64_t half[2];
    __device__ __forceinline__ uint64_t get(int i) const {
        uint64_t x = half[i * E / 8] >> (i * E % 8 * 8);
        return E == 8 ? x : x & ((1ULL << (E * 8 % 64)) - 1);
    }
};

/* Up to 16 / E elements of a source line, `n` of which exist. */
template <int E> INLINE vector_of<E> load_line(const char *p, int64_t n, bool is_aligned) {
    enum { N = 16 / E };
    uint4 v = is_aligned && n >= N ? __ldca((const uint4 *)p) : load_bytes(p, n < N ? (int)n * E : 16);
    return vector_of<E>{{(uint64_t)v.y << 32 | v.x, (uint64_t)v.w << 32 | v.z}};
}

/* Dimension 0 of the box is the destination's, with SIDE words of PACK elements in a tile, dimension 1 the source's,
 * with SIDE elements. */
template <int E> INLINE void transpose_tile(args_ref a) {
    typedef transposed<E> t;
    typedef typename t::word word;
    enum {
        SIDE = t::SIDE,
        PACK = t::PACK,
        PER_LINE = 16 / E,                     /* elements of a vector */
        STEP = SIDE * SIDE / (256 * PER_LINE), /* groups of PACK vectors that a thread loads */
        PER_OUT = 16 / (int)sizeof(word),      /* words of a vector that is stored */
        OUT_STEP = SIDE * SIDE / (256 * PER_OUT)
    };
    __shared__ word tile[SIDE][SIDE + 1];
    tb__cuda_tile which = find_tile(a, blockIdx.x);
    const tb__cuda_box *box = (const tb__cuda_box *)heap_at(a, which.place);
    const tb__cuda_dim *dim = (const tb__cuda_dim *)(box + 1);
    uint32_t rest = divide(which.tile, box->per_row), along = which.tile - rest * box->per_row.by;
    uint32_t outer = divide(rest, box->across), across = rest - outer * box->across.by;
    /* Where the tile is: `outer` counts in the dimensions after these two. */
    int64_t first0 = (int64_t)along * SIDE * PACK, first1 = (int64_t)across * SIDE;
    int64_t src = (int64_t)(box->src + src_base(a, box->flags)), dst = (int64_t)(box->dst + dst_base(a, box->flags));
    src += first0 * dim[0].src_step + first1 * E;
    dst += first0 * E + first1 * dim[1].dst_step;
    for (uint32_t d = 2; d < box->ndim; d++) {
        uint32_t next = divide(outer, dim[d].len), index = outer - next * dim[d].len.by;
        src += (int64_t)index * dim[d].src_step;
        dst += (int64_t)index * dim[d].dst_step;
        outer = next;
    }
    int64_t n0 = dim[0].len.by - first0, n1 = dim[1].len.by - first1, step0 = dim[0].src_step, step1 = dim[1].dst_step;
    bool src_aligned = is_src_aligned(a, box->flags), dst_aligned = is_dst_aligned(a, box->flags);

    vector_of<E> v[STEP][PACK];
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        int at = i * 256 + threadIdx.x, line = at / (SIDE / PER_LINE), first = at % (SIDE / PER_LINE) * PER_LINE;
#pragma unroll
        for (int k = 0; k < PACK; k++) {
            int64_t row = line * PACK + k;
            v[i][k] = load_line<E>((const char *)(src + row * step0 + (int64_t)first * E), row < n0 ? n1 - first : 0,
                                   src_aligned);
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        int at = i * 256 + threadIdx.x, line = at / (SIDE / PER_LINE), first = at % (SIDE / PER_LINE) * PER_LINE;
#pragma unroll
        for (int e = 0; e < PER_LINE; e++) {
            word w = 0;
#pragma unroll
            for (int k = 0; k < PACK; k++)
                w |= (word)v[i][k].get(e) << (k * E * 8 % 64);
            tile[line][first + e] = w;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OUT_STEP; i++) {
        int at = i * 256 + threadIdx.x, line = at / (SIDE / PER_OUT), first = at % (SIDE / PER_OUT) * PER_OUT;
        char *to = (char *)(dst + line * step1 + (int64_t)first * PACK * E);
        int64_t n = line < n1 ? n0 - (int64_t)first * PACK : 0;
        word w[PER_OUT];
#pragma unroll
        for (int k = 0; k < PER_OUT; k++)
            w[k] = tile[first + k][line];
        uint4 out;
        if constexpr (PER_OUT == 4)
            out = make_uint4(w[0], w[1], w[2], w[3]);
        else
            out = make_uint4((uint32_t)w[0], (uint32_t)((uint64_t)w[0] >> 32), (uint32_t)w[1],
                             (uint32_t)((uint64_t)w[1] >> 32));
        if (dst_aligned && n >= PER_LINE)
            __stwb((uint4 *)to, out);
        else
            store_bytes(to, out, n < PER_LINE ? (int)n * E : 16);
    }
}

#define TRANSPOSE(E)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) tb__transpose_##E(const __grid_constant__ tb__cuda_args a) {     \
        transpose_tile<E>(a);                                                                                          \
    }
TRANSPOSE(1)
TRANSPOSE(2)
TRANSPOSE(4)
TRANSPOSE(8)
