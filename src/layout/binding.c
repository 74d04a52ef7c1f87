/* Bindings: where a rank keeps its part of a tensor. */
#include "base/error.h"

#include <inttypes.h>

tb_status tb_binding_contiguous(void *base, int64_t offset, tb_dtype dtype, const tb_shape *shape, tb_binding *out) {
    TB_TRY(tb_shape_size(shape, dtype, NULL, NULL));
    tb_binding binding = {.base = base, .offset = offset, .dtype = dtype, .shape = *shape};
    int64_t stride = 1;
    for (int d = shape->ndim - 1; d >= 0; d--) {
        binding.strides[d] = stride;
        stride *= shape->dim[d] > 0 ? shape->dim[d] : 1;
    }
    *out = binding;
    return TB_OK;
}

tb_status tb_binding_check(const tb_binding *binding, int64_t nbytes) {
    int64_t nelements;
    TB_TRY(tb_shape_size(&binding->shape, binding->dtype, &nelements, NULL));
    int64_t bits = tb_dtype_bits(binding->dtype);
    int64_t lo = 0, hi = 0; /* elements before and after the first */
    for (int d = 0; d < binding->shape.ndim && nelements > 0; d++) {
        int64_t reach;
        if (__builtin_mul_overflow(binding->shape.dim[d] - 1, binding->strides[d], &reach) ||
            __builtin_add_overflow(reach < 0 ? lo : hi, reach, reach < 0 ? &lo : &hi))
            return tb__fail(TB_TOO_BIG, "the stride of dim %d, %" PRId64 ", reaches beyond all memory", d,
                            binding->strides[d]);
    }
    if (nelements == 0)
        return TB_OK;
    /* In bits, so that packed dtypes need no special case. */
    int64_t first, last;
    if (__builtin_mul_overflow(lo, bits, &first) || __builtin_add_overflow(hi, 1, &last) ||
        __builtin_mul_overflow(last, bits, &last) || binding->offset < 0 || binding->offset > nbytes ||
        first < -8 * (binding->offset < INT64_MAX / 8 ? binding->offset : INT64_MAX / 8) ||
        (last + 7) / 8 > nbytes - binding->offset)
        return tb__fail(TB_INVALID,
                        "the binding covers elements %" PRId64 " to %" PRId64 " from byte %" PRId64
                        ", outside an allocation of %" PRId64 " bytes",
                        lo, hi, binding->offset, nbytes);
    return TB_OK;
}
