/* XXH3 (64 bits, no seed) of blocks of 64 KiB, which are all whole: base/checksum.h. Within 1 KiB the accumulators are
 * sums, which threads add up in any order; then eight threads mix the sums of a block's 64 KiB in their order. */
#pragma once

#include "access.cuh"

/* XXH3's default secret, as little-endian words. */
static __constant__ uint64_t secret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

enum : uint64_t {
    PRIME32_1 = 0x9e3779b1,
    PRIME32_2 = 0x85ebca77,
    PRIME32_3 = 0xc2b2ae3d,
    PRIME64_1 = 0x9e3779b185ebca87,
    PRIME64_2 = 0xc2b2ae3d27d4eb4f,
    PRIME64_3 = 0x165667b19e3779f9,
    PRIME64_4 = 0x85ebca77c2b2ae63,
    PRIME64_5 = 0x27d4eb2f165667c5,
    MIX_1 = 0x165667919e3779f9
};

/* A word of the secret that begins anywhere. */
INLINE uint64_t secret_at(const uint64_t *words, int byte) {
    uint64_t low = words[byte / 8];
    return byte % 8 ? low >> (byte % 8 * 8) | words[byte / 8 + 1] << (64 - byte % 8 * 8) : low;
}

INLINE uint64_t multiply_halves(uint64_t x) {
    return (x & 0xffffffff) * (x >> 32);
}

INLINE uint64_t fold_product(uint64_t x, uint64_t y) {
    return x * y ^ __umul64hi(x, y);
}

extern "C" __global__ void __launch_bounds__(256) tb__checksum(const __grid_constant__ tb__cuda_args a) {
    enum { BLOCK = 65536, STRIPES = 16 };
    __shared__ uint64_t sums[64][8], words[24], mixed[8];
    const char *block = (const char *)a.items + (uint64_t)blockIdx.x * BLOCK;
    uint32_t part = threadIdx.x / 4, pair = threadIdx.x % 4; /* 1 KiB, and two of the eight accumulators */
    const char *from = block + part * 1024 + pair * 16;
    bool is_aligned = ((uint64_t)block & 15) == 0;
    uint64_t even = 0, odd = 0;
    if (threadIdx.x < 24)
        words[threadIdx.x] = secret[threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 v[STRIPES / 2];
#pragma unroll
        for (int i = 0; i < STRIPES / 2; i++) {
            const char *p = from + (half * 8 + i) * 64;
            v[i] = is_aligned ? *(const uint4 *)p : load_bytes(p, 16);
        }
#pragma unroll
        for (int i = 0; i < STRIPES / 2; i++) {
            int n = half * 8 + i;
            bool is_last = n == STRIPES - 1 && part == 63; /* this one stripe has keys of its own */
            uint64_t x = (uint64_t)v[i].y << 32 | v[i].x, y = (uint64_t)v[i].w << 32 | v[i].z;
            uint64_t x_key = words[n + pair * 2], y_key = words[n + pair * 2 + 1];
            if (is_last) {
                x_key = secret_at(words, 121 + (int)pair * 16);
                y_key = secret_at(words, 121 + (int)pair * 16 + 8);
            }
            even += y + multiply_halves(x ^ x_key);
            odd += x + multiply_halves(y ^ y_key);
        }
    }
    sums[part][pair * 2] = even;
    sums[part][pair * 2 + 1] = odd;
    __syncthreads();
    if (threadIdx.x < 8) {
        const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
        uint64_t acc = 0, key = words[16 + threadIdx.x];
#pragma unroll
        for (int i = 0; i < 8; i++)
            acc = threadIdx.x == (uint32_t)i ? start[i] : acc;
        for (int k = 0; k < 63; k++) {
            acc += sums[k][threadIdx.x];
            acc = (acc ^ acc >> 47 ^ key) * PRIME32_1;
        }
        mixed[threadIdx.x] = acc + sums[63][threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t sum = (uint64_t)BLOCK * PRIME64_1;
        for (int i = 0; i < 4; i++)
            sum += fold_product(mixed[2 * i] ^ secret_at(words, 11 + 16 * i),
                                mixed[2 * i + 1] ^ secret_at(words, 11 + 16 * i + 8));
        sum ^= sum >> 37;
        sum *= MIX_1;
        ((uint64_t *)a.results)[blockIdx.x] = sum ^ sum >> 32;
    }
}
