/* Casts of rows between any two floats, or any two integers. Floats are cast by way of f32, also f64, as in PyTorch.
 * Integers keep their low bits. */
#include "device/host/cast.h"

#include "base/dtype.h"
#include "device/host/kernel.h"

#include <string.h>

enum { BLOCK = 256 };

typedef double f64_any __attribute__((aligned(1), may_alias));
typedef float f32_any __attribute__((aligned(1), may_alias));

static void to_f32(const tb__kernels *kernels, float *dst, const void *src, tb_dtype from, size_t n) {
    if (from != TB_F64) {
        kernels->widen[from](dst, src, n);
        return;
    }
    f32_any *out = dst;
    const f64_any *in = src;
    for (size_t i = 0; i < n; i++)
        out[i] = (float)in[i];
}

static void from_f32(const tb__kernels *kernels, void *dst, tb_dtype to, const float *src, size_t n) {
    if (to != TB_F64) {
        kernels->narrow[to](dst, src, n);
        return;
    }
    f64_any *out = dst;
    const f32_any *in = src;
    for (size_t i = 0; i < n; i++)
        out[i] = (double)in[i];
}

/* Integer i of a row, as 64 bits; negative numbers keep their value. */
#define LOAD_INTEGERS(dtype, type)                                                                                     \
    case dtype: {                                                                                                      \
        typedef type any __attribute__((aligned(1), may_alias));                                                       \
        for (size_t i = 0; i < n; i++)                                                                                 \
            dst[i] = (uint64_t)((const any *)src)[i];                                                                  \
        break;                                                                                                         \
    }

static void load_integers(uint64_t *dst, const void *src, tb_dtype from, size_t n) {
    switch (from) {
        LOAD_INTEGERS(TB_U8, uint8_t)
        LOAD_INTEGERS(TB_U16, uint16_t)
        LOAD_INTEGERS(TB_U32, uint32_t)
        LOAD_INTEGERS(TB_I8, int8_t)
        LOAD_INTEGERS(TB_I16, int16_t)
        LOAD_INTEGERS(TB_I32, int32_t)
    default:
        memcpy(dst, src, n * sizeof *dst);
    }
}

#define STORE_INTEGERS(bits, type)                                                                                     \
    case bits: {                                                                                                       \
        typedef type any __attribute__((aligned(1), may_alias));                                                       \
        for (size_t i = 0; i < n; i++)                                                                                 \
            ((any *)dst)[i] = (type)src[i];                                                                            \
        break;                                                                                                         \
    }

static void store_integers(void *dst, tb_dtype to, const uint64_t *src, size_t n) {
    switch (tb_dtype_bits(to)) {
        STORE_INTEGERS(8, uint8_t)
        STORE_INTEGERS(16, uint16_t)
        STORE_INTEGERS(32, uint32_t)
    default:
        memcpy(dst, src, n * sizeof *src);
    }
}

void tb__cast_row(void *dst, tb_dtype to, const void *src, tb_dtype from, size_t n) {
    const tb__kernels *kernels = tb__kernels_get();
    bool is_integer = tb__dtype_class_of(from) == TB__INTEGER;
    size_t from_size = tb_dtype_bits(from) / 8, to_size = tb_dtype_bits(to) / 8;
    if (to == from) {
        if (dst != src)
            memcpy(dst, src, n * to_size);
        return;
    }
    if (from == TB_F32) {
        from_f32(kernels, dst, to, src, n);
        return;
    }
    if (to == TB_F32) {
        to_f32(kernels, dst, src, from, n);
        return;
    }
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t now = n - i < BLOCK ? n - i : BLOCK;
        const char *in = (const char *)src + i * from_size;
        char *out = (char *)dst + i * to_size;
        if (is_integer) {
            uint64_t block[BLOCK];
            load_integers(block, in, from, now);
            store_integers(out, to, block, now);
        } else {
            float block[BLOCK];
            to_f32(kernels, block, in, from, now);
            from_f32(kernels, out, to, block, now);
        }
    }
}
