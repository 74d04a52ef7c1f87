/* Encoded tensors: rows of a canonical tensor, and their places in quantised storage. */
#include "reshard/encode.h"

#include <inttypes.h>
#include <string.h>

/* ---- The text form --------------------------------------------------------------------------------------------- */

static const struct option {
    const char *name;
    size_t offset; /* of a bool in tb__encoding */
    unsigned kinds;
} options[] = {
    {"floor", offsetof(tb__encoding, format.is_floor), 1U << TB__QUANT_MXFP8},
    {"ceil", SIZE_MAX, 1U << TB__QUANT_MXFP8},
    {"swizzled", offsetof(tb__encoding, format.is_swizzled), 1U << TB__QUANT_MXFP8 | 1U << TB__QUANT_NVFP4},
    {"rows", SIZE_MAX, 1U << TB__QUANT_MXFP8 | 1U << TB__QUANT_NVFP4},
    {"power_of_two", offsetof(tb__encoding, format.is_power_of_two),
     1U << TB__QUANT_FP8_BLOCK | 1U << TB__QUANT_FP8_TENSOR},
    {"sender", offsetof(tb__encoding, by_sender), 1U << TB__QUANT_MXFP8},
    {"receiver", SIZE_MAX, ~0U},
};

static bool is_word(const char *text, size_t length, const char *word) {
    return strlen(word) == length && strncmp(text, word, length) == 0;
}

static tb_status read_option(const char *text, size_t length, tb__encoding *out) {
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        const struct option *o = &options[i];
        if (!is_word(text, length, o->name) || !(o->kinds & 1U << out->format.kind))
            continue;
        if (o->offset != SIZE_MAX)
            *(bool *)((char *)out + o->offset) = true;
        return TB_OK;
    }
    return tb__fail(TB_INVALID, "%s has no option '%.*s'", tb__quant_name(out->format.kind),
                    (int)(length < 40 ? length : 40), text);
}

tb_status tb__encoding_parse(const char *text, tb__encoding *out) {
    tb__encoding e = {0};
    size_t length = strcspn(text, "(");
    for (tb__quant_kind kind = TB__QUANT_MXFP8; kind <= TB__QUANT_NVFP4; kind++) {
        if (is_word(text, length, tb__quant_name(kind)))
            e.format.kind = kind;
    }
    if (!e.format.kind)
        return tb__fail(TB_INVALID, "'%.60s' is none of mxfp8, fp8_block, fp8_tensor and nvfp4", text);
    const char *at = text + length;
    if (*at) {
        do {
            at++;
            size_t n = strcspn(at, ",)");
            TB_TRY(read_option(at, n, &e));
            at += n;
        } while (*at == ',');
        if (strcmp(at, ")") != 0)
            return tb__fail(TB_INVALID, "'%.60s' does not end with a parenthesis", text);
    }
    *out = e;
    return TB_OK;
}

bool tb__encoding_is_global(const tb__encoding *encoding) {
    return encoding->format.kind == TB__QUANT_FP8_TENSOR || encoding->format.kind == TB__QUANT_NVFP4;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------ */

static int64_t count_rows(const tb_shape *shape) {
    int64_t n = 1;
    for (int d = 0; d + 1 < shape->ndim; d++)
        n *= shape->dim[d];
    return shape->ndim && shape->dim[shape->ndim - 1] ? n : 0;
}

/* The row of the storage that is row i of a box of the part. */
static int64_t storage_row(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len, int64_t i) {
    const tb_binding *b = &e->part;
    int64_t element = b->offset * 8 / tb_dtype_bits(b->dtype);
    for (int d = ndim - 1; d-- > 0;) {
        element += ((start ? start[d] : 0) + i % len[d]) * b->strides[d];
        i /= len[d];
    }
    return element / e->columns;
}

tb__encoded_run tb__encoded_next_run(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len,
                                     int64_t i, int64_t rows) {
    int64_t row = storage_row(e, ndim, start, len, i);
    tb__encoded_run r = {.first = i, .count = 1, .matrix = row / e->matrix_rows, .row = row % e->matrix_rows};
    while (i + r.count < rows && r.row + r.count < e->matrix_rows &&
           storage_row(e, ndim, start, len, i + r.count) == row + r.count)
        r.count++;
    return r;
}

static tb_status check_part(const tb__encoded *e) {
    const tb_binding *b = &e->part;
    int last = b->shape.ndim - 1;
    int64_t element = b->offset * 8 / tb_dtype_bits(b->dtype);
    bool is_whole = last >= 0 && b->shape.dim[last] == e->columns && (e->columns == 1 || b->strides[last] == 1) &&
                    element % e->columns == 0;
    for (int d = 0; d < last; d++)
        is_whole &= b->shape.dim[d] == 1 || b->strides[d] % e->columns == 0;
    if (!is_whole)
        return tb__fail(TB_REFUSED, "it is quantised, and its view does not leave rows of the last dim whole");
    int64_t band = e->size.band;
    for (int64_t i = 0; band > 1 && i < e->rows;) {
        tb__encoded_run r = tb__encoded_next_run(e, b->shape.ndim, NULL, b->shape.dim, i, e->rows);
        if (r.row % band != 0 || ((r.row + r.count) % band != 0 && r.row + r.count != e->matrix_rows))
            return tb__fail(TB_REFUSED,
                            "its rows %" PRId64 " to %" PRId64 " of a quantised matrix are not whole blocks of %" PRId64
                            " rows",
                            r.row, r.row + r.count, band);
        i += r.count;
    }
    return TB_OK;
}

tb_status tb__encoded_measure(const tb__encoding *encoding, const tb_shape *stored, tb__encoded_size *out) {
    tb__encoded_size s = {0};
    if (stored->ndim == 0)
        return tb__fail(TB_REFUSED, "a scalar can't be %s", tb__quant_name(encoding->format.kind));
    s.columns = stored->dim[stored->ndim - 1];
    s.matrix_rows = stored->ndim > 1 ? stored->dim[stored->ndim - 2] : 1;
    s.matrices = s.matrix_rows > 0 ? count_rows(stored) / s.matrix_rows : 0;
    TB_TRY(tb__quant_measure(&encoding->format, s.matrix_rows, s.columns, &s.matrix));
    s.data_nbytes = (size_t)(s.matrices * s.matrix.data_nbytes);
    s.scales_nbytes = (size_t)(s.matrices * s.matrix.scale_nbytes);
    s.scale_nbytes = s.matrices > 0 && tb__encoding_is_global(encoding) ? sizeof(float) : 0;
    *out = s;
    return TB_OK;
}

tb_status tb_encode_nbytes(const char *encode, const tb_shape *part, size_t *data, size_t *scales, size_t *scale) {
    tb__encoding encoding;
    tb__encoded_size size;
    if (!encode)
        return tb__fail(TB_INVALID, "an encoding has a name");
    TB_TRY(tb__encoding_parse(encode, &encoding));
    TB_TRY(tb_shape_size(part, TB_U8, NULL, NULL));
    TB_TRY(tb__encoded_measure(&encoding, part, &size));
    if (data)
        *data = size.data_nbytes;
    if (scales)
        *scales = size.scales_nbytes;
    if (scale)
        *scale = size.scale_nbytes;
    return TB_OK;
}

tb_status tb__encoded_init(const tb__encoding *encoding, const tb_shape *stored, void *data, void *scales, float *scale,
                           const tb_binding *part, tb__encoded *out) {
    tb__encoded e = {.encoding = *encoding, .data = data, .scales = scales, .scale = scale, .part = *part};
    const char *name = tb__quant_name(encoding->format.kind);
    tb__encoded_size size;
    TB_TRY(tb__encoded_measure(encoding, stored, &size));
    e.columns = size.columns;
    e.matrix_rows = size.matrix_rows;
    e.matrices = size.matrices;
    e.size = size.matrix;
    e.rows = count_rows(&part->shape);
    if (size.scales_nbytes > 0 && !scales)
        return tb__fail(TB_INVALID, "it is %s, and its scales are NULL", name);
    if (size.matrices > 0 && e.size.scale_dtype == TB_F32 && (uintptr_t)scales % sizeof(float) != 0)
        return tb__fail(TB_INVALID, "the scales of %s are floats, but not aligned like floats", name);
    if (size.scale_nbytes > 0 && !scale)
        return tb__fail(TB_INVALID, "%s has a scale for the whole tensor, and its `scale` is NULL", name);
    if (e.rows > 0)
        TB_TRY(check_part(&e));
    *out = e;
    return TB_OK;
}

int64_t tb__encoded_band(const tb__quant_format *format, const tb_shape *part) {
    int64_t rows = 1, band = format->kind == TB__QUANT_FP8_BLOCK ? 128 : 1;
    for (int d = 1; d + 1 < part->ndim; d++)
        rows *= part->dim[d];
    int64_t a = band, b = rows;
    while (b > 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a > 0 ? band / a : 1; /* indices that make up whole blocks of rows */
}

bool tb__encoded_takes_bands(const tb__encoded *e, int64_t band) {
    const tb_shape *shape = &e->part.shape;
    if (e->rows == 0 || shape->ndim < 2)
        return true;
    int64_t each = e->rows / shape->dim[0];
    for (int64_t at = band; at < shape->dim[0]; at += band) {
        int64_t row = storage_row(e, shape->ndim, NULL, shape->dim, at * each);
        if (row % e->matrix_rows % e->size.band != 0)
            return false;
    }
    return true;
}

/* Visits scales in tiles of rows first .. stop-1, `offset` bytes into the scales; after the last row, also the padding
 * of its tiles. */
static tb_status visit_tiles(const tb__quant_size *size, int64_t offset, int64_t first, int64_t stop,
                             tb__encoded_visit *visit, void *arg) {
    for (int64_t row = first; row < stop; row++) {
        for (int64_t c = 0; c < size->scale_columns; c += 4)
            TB_TRY(visit(arg, true, (size_t)(offset + tb__quant_swizzle(row, c, size->scale_columns)), 4));
    }
    return TB_OK;
}

static tb_status visit_run(const tb__encoded *e, const tb__encoded_run *r, tb__encoded_visit *visit, void *arg) {
    const tb__quant_size *size = &e->size;
    int64_t row_nbytes = size->data_nbytes / e->matrix_rows;
    int64_t data = r->matrix * size->data_nbytes + r->row * row_nbytes, scales = r->matrix * size->scale_nbytes;
    TB_TRY(visit(arg, false, (size_t)data, (size_t)(r->count * row_nbytes)));
    if (size->scale_nbytes == 0)
        return TB_OK;
    if (e->encoding.format.is_swizzled) {
        int64_t stop = r->row + r->count;
        if (stop == e->matrix_rows)
            stop = (stop + 127) / 128 * 128;
        return visit_tiles(size, scales, r->row, stop, visit, arg);
    }
    int64_t each = size->scale_nbytes / size->scale_rows, band = size->band > 1 ? size->band : 1;
    int64_t first = r->row / band, stop = (r->row + r->count + band - 1) / band;
    return visit(arg, true, (size_t)(scales + first * each), (size_t)((stop - first) * each));
}

tb_status tb__encoded_each(const tb__encoded *e, tb__encoded_visit *visit, void *arg) {
    for (int64_t i = 0; i < e->rows;) {
        tb__encoded_run r = tb__encoded_next_run(e, e->part.shape.ndim, NULL, e->part.shape.dim, i, e->rows);
        TB_TRY(visit_run(e, &r, visit, arg));
        i += r.count;
    }
    return TB_OK;
}
