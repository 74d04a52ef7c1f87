/* Shapes: text form, and the check that no size can overflow later. */
#include "base/dtype.h"
#include "base/text.h"
#include "layout/layout.h"

#include <inttypes.h>

tb_status tb_shape_parse(const char *text, tb_shape *out) {
    tb_shape shape = {0};
    const char *at = text;
    tb__skip_space(&at);
    if (*at) {
        do {
            int64_t n;
            if (shape.ndim == TB_MAX_DIMS)
                return tb__fail(TB_INVALID, "shape '%.80s' has more than %d dims", text, TB_MAX_DIMS);
            if (!tb__read_int(&at, &n) || n < 0)
                return tb__fail(TB_INVALID, "shape '%.80s' is not a list of sizes such as 4096,1024", text);
            shape.dim[shape.ndim++] = n;
        } while (tb__accept(&at, ','));
        tb__skip_space(&at);
        if (*at)
            return tb__fail(TB_INVALID, "shape '%.80s' is not a list of sizes such as 4096,1024", text);
    }
    *out = shape;
    return TB_OK;
}

tb_status tb__shape_from_json(const json_t *json, tb_shape *out) {
    tb_shape shape = {0};
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "'shape' is not an array of sizes");
    if (json_array_size(json) > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "'shape' has more than %d dims", TB_MAX_DIMS);
    shape.ndim = (int)json_array_size(json);
    for (int d = 0; d < shape.ndim; d++) {
        const json_t *n = json_array_get(json, (size_t)d);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return tb__fail(TB_INVALID, "'shape' dim %d is not a size", d);
        shape.dim[d] = json_integer_value(n);
    }
    *out = shape;
    return TB_OK;
}

tb_status tb_shape_size(const tb_shape *shape, tb_dtype dtype, int64_t *nelements, int64_t *nbytes) {
    const int64_t most = INT64_C(1) << 62;
    int64_t bits = tb_dtype_bits(dtype);
    if (bits == 0)
        return tb__fail(TB_INVALID, "%d is not a dtype", (int)dtype);
    if (shape->ndim < 0 || shape->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a tensor has 0 to %d dims, not %d", TB_MAX_DIMS, shape->ndim);
    int64_t size = 1; /* of the tensor if its empty dims had one element, so that no stride overflows either */
    bool is_empty = false;
    for (int d = 0; d < shape->ndim; d++) {
        int64_t n = shape->dim[d];
        if (n < 0)
            return tb__fail(TB_INVALID, "dim %d of the shape is negative (%" PRId64 ")", d, n);
        is_empty |= n == 0;
        if (n > 0 && size > most / n)
            return tb__fail(TB_TOO_BIG, "the dims of the shape multiply to more than 2^62");
        size *= n > 0 ? n : 1;
    }
    if (bits >= 8 && size > most / (bits / 8))
        return tb__fail(TB_TOO_BIG, "the tensor has more than 2^62 bytes");
    size = is_empty ? 0 : size;
    if (nelements)
        *nelements = size;
    if (nbytes)
        *nbytes = tb__dtype_bytes(dtype, size);
    return TB_OK;
}
