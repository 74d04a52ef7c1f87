/* What may be done with a dtype's values. */
#ifndef TB_BASE_DTYPE_H
#define TB_BASE_DTYPE_H

#include "tensorbus/tensorbus.h"

typedef enum tb__dtype_class {
    TB__OPAQUE, /* bits to be carried, not numbers to be added up */
    TB__INTEGER,
    TB__FLOAT,
} tb__dtype_class;

tb__dtype_class tb__dtype_class_of(tb_dtype dtype);

const char *tb__dtype_safetensors(tb_dtype dtype); /* "BF16", as in safetensors files; NULL if dtype is invalid */

/* Elements that share a byte: 2 for f4e2m1, else 1. */
static inline int64_t tb__dtype_packing(tb_dtype dtype) {
    return tb_dtype_bits(dtype) == 4 ? 2 : 1;
}

/* Bytes from one element to another that is so many elements away, which is even for f4e2m1. */
static inline int64_t tb__dtype_offset(tb_dtype dtype, int64_t elements) {
    return tb_dtype_bits(dtype) == 4 ? elements / 2 : elements * (tb_dtype_bits(dtype) / 8);
}

/* Bytes of so many contiguous elements. */
static inline int64_t tb__dtype_bytes(tb_dtype dtype, int64_t nelements) {
    int64_t packing = tb__dtype_packing(dtype), bits = tb_dtype_bits(dtype);
    return packing > 1 ? (nelements + packing - 1) / packing : nelements * (bits / 8);
}

/* Whether values can be cast from and to this dtype. */
static inline bool tb__dtype_is_castable(tb_dtype dtype) {
    return dtype == TB_F32 || dtype == TB_F16 || dtype == TB_BF16 || dtype == TB_F8E4M3 || dtype == TB_F8E5M2;
}

#endif
