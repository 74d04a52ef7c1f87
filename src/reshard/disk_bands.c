/* Parts of target ranks: the tensors written for them, their division into bands, and bands that are quantised. */
#include "reshard/disk_inside.h"

#include "base/dtype.h"
#include "base/int.h"
#include "device/host/quant.h"
#include "plan/plan.h"

tb_status tb__disk_part_tensors(const tb__disk_tensor *t, int32_t rank, tb__safetensor out[TB__DISK_SLOTS]) {
    tb_local local;
    TB_TRY(tb_layout_local(t->dst, &t->shape, rank, &local));
    tb_shape shape = local.shape;
    tb_local_fini(&local);
    TB_TRY(tb__disk_quant_tensors(&t->dst_quant, t->name, t->dst_dtype, &shape, out));
    if (t->unknown)
        out[TB__DISK_DATA] = *t->unknown;
    return TB_OK;
}

/* The size of a row, before and after quantising: data has at most half the bytes, and scales 1 for 16 elements, or 4
 * for more. */
static int64_t row_bytes(const tb__disk_tensor *t, int64_t columns) {
    return tb__dtype_bytes(t->band_dtype, columns) + 8;
}

enum { ALIGNMENT = 64 }; /* of the scales behind the data */

int64_t tb__disk_least_band(const tb__disk_tensor *t) {
    if (!t->dst_quant.format.kind)
        return 0;
    tb_shape longest = tb__grid_longest(t->grid);
    int64_t nbytes =
        tb__disk_quant_rows(&t->dst_quant.format) * row_bytes(t, longest.dim[longest.ndim - 1]) + ALIGNMENT;
    return tb__align(nbytes, ALIGNMENT);
}

/* Cuts whole rows, several of them together. */
static void cut_quantised(tb__disk_bands *b, const tb__disk_tensor *t, int64_t band_bytes) {
    int64_t columns = b->shape.dim[b->shape.ndim - 1], together = tb__disk_quant_rows(&t->dst_quant.format);
    b->dim = b->shape.ndim > 1 ? b->shape.ndim - 2 : 0;
    b->rows = b->shape.ndim > 1 ? (band_bytes - ALIGNMENT) / row_bytes(t, columns) / together * together : columns;
    b->rows = b->rows > 0 ? b->rows : together;
}

static void cut_plain(tb__disk_bands *b, tb_dtype dtype, int64_t most) {
    const tb_shape *shape = &b->shape;
    int64_t inner = 1;
    int d = shape->ndim;
    while (d > 0 && shape->dim[d - 1] <= most / (inner ? inner : 1))
        inner *= shape->dim[--d];
    if (d > 0) { /* the whole does not fit */
        int64_t packing = d == shape->ndim ? tb__dtype_packing(dtype) : 1;
        b->dim = d - 1;
        b->rows = most / (inner ? inner : 1);
        b->rows -= b->rows % packing;
    } else if (shape->ndim > 0) {
        b->rows = shape->dim[0] ? shape->dim[0] : 1;
    }
}

void tb__disk_bands_init(tb__disk_bands *b, const tb__disk_tensor *t, const tb_shape *shape, int64_t band_bytes) {
    int64_t outer = 1, step = 1, most = band_bytes * 8 / tb_dtype_bits(t->band_dtype);
    *b = (tb__disk_bands){.shape = *shape, .rows = 1, .per_outer = 1};
    for (int i = shape->ndim - 1; i >= 0; i--) {
        b->stride[i] = step;
        step *= shape->dim[i];
    }
    if (t->dst_quant.format.kind)
        cut_quantised(b, t, band_bytes);
    else
        cut_plain(b, t->band_dtype, most);
    if (shape->ndim > 0)
        b->per_outer = (shape->dim[b->dim] + b->rows - 1) / b->rows;
    for (int i = 0; i < b->dim; i++)
        outer *= shape->dim[i];
    b->count = outer * b->per_outer;
}

void tb__disk_bands_at(const tb__disk_bands *b, int64_t i, tb__disk_band *out) {
    int64_t outer = i / b->per_outer;
    out->first = 0;
    out->nelements = 1;
    for (int d = b->shape.ndim - 1; d >= 0; d--) {
        out->start[d] = 0;
        out->len[d] = b->shape.dim[d];
        if (d == b->dim) {
            out->start[d] = i % b->per_outer * b->rows;
            out->len[d] = out->len[d] - out->start[d] < b->rows ? out->len[d] - out->start[d] : b->rows;
        } else if (d < b->dim) {
            out->start[d] = outer % b->shape.dim[d];
            outer /= b->shape.dim[d];
            out->len[d] = 1;
        }
        out->first += out->start[d] * b->stride[d];
        out->nelements *= out->len[d];
    }
}

static int64_t band_rows(const tb__disk_bands *b, const tb__disk_band *band) {
    return b->shape.ndim > 1 ? band->len[b->shape.ndim - 2] : 1;
}

tb_status tb__disk_quantise(const tb__disk_tensor *t, const tb__disk_bands *b, const tb__disk_band *band, float scale,
                            const void *from, unsigned char *to, tb__disk_quantised *out) {
    const tb__quant_format *format = &t->dst_quant.format;
    int last = b->shape.ndim - 1;
    int64_t columns = b->shape.dim[last], rows = band_rows(b, band), all = tb__disk_matrix_rows(&b->shape);
    int64_t above = last > 0 ? band->start[last - 1] : 0; /* rows of the same matrix, whole blocks of them */
    int64_t matrix = all * columns;
    tb__quant_size here, before, whole;
    TB_TRY(tb__quant_measure(format, rows, columns, &here));
    TB_TRY(tb__quant_measure(format, above, columns, &before));
    TB_TRY(tb__quant_measure(format, all, columns, &whole));
    unsigned char *scales = to + tb__align(here.data_nbytes, ALIGNMENT);
    *out = (tb__disk_quantised){
        .data = to,
        .scales = scales,
        .data_nbytes = (size_t)here.data_nbytes,
        .scale_nbytes = (size_t)here.scale_nbytes,
        .data_offset = tb__dtype_bytes(here.data_dtype, band->first),
        .scale_offset = (matrix ? band->first / matrix * whole.scale_nbytes : 0) + before.scale_nbytes,
    };
    const tb__quant_tensor tensor = {
        .format = *format, .rows = rows, .columns = columns, .data = to, .scales = scales, .scale = scale};
    const tb__quant_rows plain = {.data = (void *)from, .dtype = t->band_dtype, .stride = columns};
    return tb__quant_quantise(&tensor, 0, rows, &plain);
}

tb_status tb__disk_band_amax(const tb__disk_tensor *t, const tb__disk_bands *b, const tb__disk_band *band,
                             const void *from, float *out) {
    int64_t columns = b->shape.dim[b->shape.ndim - 1];
    const tb__quant_rows plain = {.data = (void *)from, .dtype = t->band_dtype, .stride = columns};
    return tb__quant_amax(&plain, band_rows(b, band), columns, out);
}
