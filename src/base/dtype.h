/* Properties of dtypes: sizes, and which arithmetic and casts are allowed. */
#ifndef TB_BASE_DTYPE_H
#define TB_BASE_DTYPE_H

#include "tensorbus/tensorbus.h"

typedef enum tb__dtype_class {
    TB__OPAQUE, /* bits that are only carried, without arithmetic */
    TB__INTEGER,
    TB__FLOAT,
} tb__dtype_class;

tb__dtype_class tb__dtype_class_of(tb_dtype dtype);

const char *tb__dtype_safetensors(tb_dtype dtype); /* "BF16", as in safetensors files; NULL if dtype is invalid */

/* Elements that share a byte: 2 for f4e2m1, else 1. */
static inline int64_t tb__dtype_packing(tb_dtype dtype) {
    return tb_dtype_bits(dtype) == 4 ? 2 : 1;
}

/* The distance in bytes of two elements that are `elements` apart, an even number for f4e2m1. */
static inline int64_t tb__dtype_offset(tb_dtype dtype, int64_t elements) {
    return tb_dtype_bits(dtype) == 4 ? elements / 2 : elements * (tb_dtype_bits(dtype) / 8);
}

/* The size of contiguous elements. */
static inline int64_t tb__dtype_bytes(tb_dtype dtype, int64_t nelements) {
    int64_t packing = tb__dtype_packing(dtype), bits = tb_dtype_bits(dtype);
    return packing > 1 ? (nelements + packing - 1) / packing : nelements * (bits / 8);
}

/* Floats of at most 32 bits, which are summed in f32. */
static inline bool tb__dtype_is_small_float(tb_dtype dtype) {
    return dtype != TB_F64 && tb__dtype_class_of(dtype) == TB__FLOAT;
}

/* Whether values can be cast: floats to floats, integers to integers. */
static inline bool tb__dtype_can_cast(tb_dtype from, tb_dtype to) {
    tb__dtype_class class = tb__dtype_class_of(from);
    return class != TB__OPAQUE && class == tb__dtype_class_of(to);
}

/* Whether the integer dtype can represent all values of another one. */
bool tb__dtype_has_values_of(tb_dtype dtype, tb_dtype of);

#endif
