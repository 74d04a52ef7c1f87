/* Targets that do not store numbers row after row: transposed, or quantised with scales behind the data. What they have
 * to hold is worked out on the host, from the values that were sent. */
#include "bench/move.h"

#include "device/host/quant.h"
#include "reshard/encode.h"

#include <string.h>

bool tool_part_is_coded(const tool_part *part) {
    return part->which == TOOL_TARGET && (part->tensor->is_transposed || part->tensor->encode);
}

tb_status tool_part_measure(tool_part *part) {
    const tool_tensor *tensor = part->tensor;
    tb__encoding encoding;
    tb__encoded_size size;
    part->strides[0] = 1;
    part->strides[1] = part->local.shape.dim[0];
    if (tensor->is_transposed)
        return TB_OK;
    TB_TRY(tb__encoding_parse(tensor->encode, &encoding));
    TB_TRY(tb__encoded_measure(&encoding, &part->local.shape, &size));
    if (size.data_nbytes % sizeof(float) || (size.scale_nbytes > 0 && size.scales_nbytes % sizeof(float)))
        return tb__fail(TB_REFUSED, "%s: scales would not be aligned behind the data", tensor->name);
    part->scales_at = (int64_t)size.data_nbytes;
    part->scale_at = size.scale_nbytes > 0 ? part->scales_at + (int64_t)size.scales_nbytes : 0;
    part->nbytes = (int64_t)(size.data_nbytes + size.scales_nbytes + size.scale_nbytes);
    return TB_OK;
}

/* In squares that stay in the cache. */
static void transpose(const char *from, int64_t rows, int64_t columns, size_t element, char *to) {
    enum { SQUARE = 32 };
    for (int64_t i0 = 0; i0 < rows; i0 += SQUARE) {
        for (int64_t j0 = 0; j0 < columns; j0 += SQUARE) {
            for (int64_t i = i0; i < rows && i < i0 + SQUARE; i++) {
                for (int64_t j = j0; j < columns && j < j0 + SQUARE; j++)
                    memcpy(to + (size_t)(j * rows + i) * element, from + (size_t)(i * columns + j) * element, element);
            }
        }
    }
}

static tb_status quantise(const tool_part *part, void *plain, char *out) {
    int64_t rows = part->local.shape.dim[0], columns = part->local.shape.dim[1];
    tb__encoding encoding;
    tb__quant_rows from = {.data = plain, .dtype = part->tensor->dtype[TOOL_SOURCE], .stride = columns};
    tb__quant_tensor to = {.rows = rows, .columns = columns, .data = out, .scales = out + part->scales_at};
    TB_TRY(tb__encoding_parse(part->tensor->encode, &encoding));
    to.format = encoding.format;
    if (part->scale_at) {
        float amax;
        TB_TRY(tb__quant_amax(&from, rows, columns, &amax));
        TB_TRY(tb__quant_scale(&to.format, amax, &to.scale));
        memcpy(out + part->scale_at, &to.scale, sizeof to.scale);
    }
    return tb__quant_quantise(&to, 0, rows, &from);
}

tb_status tool_part_expect(const tool_part *part, uint32_t version, void *out) {
    const tb_shape *shape = &part->local.shape;
    size_t element = tb_dtype_bits(part->tensor->dtype[TOOL_SOURCE]) / 8;
    tool_part plain = *part; /* the same elements, as they are sent */
    if (part->nelements == 0)
        return TB_OK;
    plain.which = TOOL_SOURCE;
    plain.host = tb__malloc((size_t)part->nelements, element);
    if (!plain.host)
        return TB_NO_MEMORY;
    tb_status status = tool_part_fill(&plain, version);
    if (status == TB_OK && part->tensor->is_transposed)
        transpose(plain.host, shape->dim[0], shape->dim[1], element, out);
    else if (status == TB_OK)
        status = quantise(part, plain.host, out);
    free(plain.host);
    return status;
}
