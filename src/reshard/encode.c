/* Encoded tensors: rows of a canonical tensor, and where they are in quantised storage. */
#include "reshard/encode.h"

#include "base/dtype.h"
#include "base/mem.h"
#include "device/host/move.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <string.h>

enum { MXFP8_BLOCK = 32, READ_BYTES = 256 << 10, COPY_BYTES = 1 << 20 };

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

/* Rows of a box that follow on one another in one matrix. */
typedef struct run {
    int64_t first, count; /* of the box */
    int64_t matrix, row;  /* where they begin in the storage */
} run;

/* The run that begins at row i, of `rows` in all. */
static run next_run(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len, int64_t i, int64_t rows) {
    int64_t row = storage_row(e, ndim, start, len, i);
    run r = {.first = i, .count = 1, .matrix = row / e->matrix_rows, .row = row % e->matrix_rows};
    while (i + r.count < rows && r.row + r.count < e->matrix_rows &&
           storage_row(e, ndim, start, len, i + r.count) == row + r.count)
        r.count++;
    return r;
}

static tb__quant_tensor matrix_at(const tb__encoded *e, int64_t matrix) {
    return (tb__quant_tensor){.format = e->encoding.format,
                              .rows = e->matrix_rows,
                              .columns = e->columns,
                              .data = e->data + matrix * e->size.data_nbytes,
                              .scales = e->scales ? e->scales + matrix * e->size.scale_nbytes : NULL,
                              .scale = e->scale ? *e->scale : 0};
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
        run r = next_run(e, b->shape.ndim, NULL, b->shape.dim, i, e->rows);
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
    return a > 0 ? band / a : 1; /* so many indices make up whole blocks of rows */
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

tb_status tb__encoded_write(const tb__encoded *e, int64_t first, int64_t rows, const void *from, tb_dtype dtype) {
    const tb_shape *shape = &e->part.shape;
    for (int64_t i = first; i < first + rows;) {
        run r = next_run(e, shape->ndim, NULL, shape->dim, i, first + rows);
        tb__quant_tensor to = matrix_at(e, r.matrix);
        tb__quant_rows plain = {(char *)from + tb__dtype_bytes(dtype, (i - first) * e->columns), dtype, e->columns};
        TB_TRY(tb__quant_quantise(&to, r.row, r.count, &plain));
        i += r.count;
    }
    return TB_OK;
}

typedef struct copying {
    const tb__encoded *from, *to;
    int64_t nparts;
} copying;

/* Scales in tiles of rows first .. stop-1, `offset` bytes into the scales; behind the last row, the padding of its
 * tiles. */
static tb_status visit_tiles(const tb__quant_size *size, int64_t offset, int64_t first, int64_t stop,
                             tb__encoded_visit *visit, void *arg) {
    for (int64_t row = first; row < stop; row++) {
        for (int64_t c = 0; c < size->scale_columns; c += 4)
            TB_TRY(visit(arg, true, (size_t)(offset + tb__quant_swizzle(row, c, size->scale_columns)), 4));
    }
    return TB_OK;
}

static tb_status visit_run(const tb__encoded *e, const run *r, tb__encoded_visit *visit, void *arg) {
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

static tb_status visit_rows(const tb__encoded *e, int64_t first, int64_t stop, tb__encoded_visit *visit, void *arg) {
    for (int64_t i = first; i < stop;) {
        run r = next_run(e, e->part.shape.ndim, NULL, e->part.shape.dim, i, stop);
        TB_TRY(visit_run(e, &r, visit, arg));
        i += r.count;
    }
    return TB_OK;
}

tb_status tb__encoded_each(const tb__encoded *e, tb__encoded_visit *visit, void *arg) {
    return visit_rows(e, 0, e->rows, visit, arg);
}

static tb_status copy_bytes(void *arg, bool is_scale, size_t offset, size_t nbytes) {
    const copying *c = arg;
    memcpy((is_scale ? c->to->scales : c->to->data) + offset, (is_scale ? c->from->scales : c->from->data) + offset,
           nbytes);
    return TB_OK;
}

static void copy_part(void *arg, int64_t from, int64_t to) {
    copying *c = arg;
    (void)visit_rows(c->from, c->from->rows * from / c->nparts, c->from->rows * to / c->nparts, copy_bytes, c);
}

void tb__encoded_copy(const tb__encoded *from, const tb__encoded *to) {
    copying c = {from, to, 1};
    /* Rows that share scales are copied by one. */
    if (from->rows > 0 && from->size.band <= 1) {
        int64_t nparts = from->rows * from->columns / COPY_BYTES;
        c.nparts = nparts < 1 ? 1 : nparts < from->rows ? nparts : from->rows;
    }
    if (from->rows > 0)
        tb__workers_for(c.nparts, copy_part, &c);
    if (to->scale && tb__encoding_is_global(&to->encoding))
        *to->scale = *from->scale;
}

static int64_t box_rows(int ndim, const int64_t *len) {
    int64_t n = 1;
    for (int d = 0; d + 1 < ndim; d++)
        n *= len[d];
    return n;
}

tb_status tb__encoded_read(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len, void *to,
                           tb_dtype dtype) {
    int64_t rows = box_rows(ndim, len), columns = len[ndim - 1], skip = start[ndim - 1];
    bool is_whole = columns == e->columns;
    int64_t row_nbytes = tb__dtype_bytes(dtype, e->columns);
    int64_t most = is_whole ? rows : READ_BYTES / row_nbytes > 0 ? READ_BYTES / row_nbytes : 1;
    char *buffer = is_whole ? NULL : tb__malloc((size_t)most, (size_t)row_nbytes);
    tb_status status = is_whole || buffer ? TB_OK : TB_NO_MEMORY;
    for (int64_t i = 0; i < rows && status == TB_OK;) {
        run r = next_run(e, ndim, start, len, i, i + most < rows ? i + most : rows);
        tb__quant_tensor from = matrix_at(e, r.matrix);
        char *out = (char *)to + tb__dtype_bytes(dtype, i * columns);
        tb__quant_rows plain = {is_whole ? out : buffer, dtype, e->columns};
        status = tb__quant_dequantise(&from, r.row, r.count, &plain);
        for (int64_t j = 0; !is_whole && status == TB_OK && j < r.count; j++)
            memcpy(out + tb__dtype_bytes(dtype, j * columns), buffer + j * row_nbytes + tb__dtype_bytes(dtype, skip),
                   (size_t)tb__dtype_bytes(dtype, columns));
        i += r.count;
    }
    free(buffer);
    return status;
}

/* ---- MXFP8 on the wire ----------------------------------------------------------------------------------------- */

static int64_t scales_of(int64_t columns) {
    return (columns + MXFP8_BLOCK - 1) / MXFP8_BLOCK;
}

int64_t tb__mxfp8_wire_nbytes(int ndim, const int64_t *len) {
    int64_t columns = ndim ? len[ndim - 1] : 1;
    return box_rows(ndim, len) * (columns + scales_of(columns));
}

static tb_status refuse_cut(int64_t column) {
    return tb__fail(TB_REFUSED,
                    "a block of %d elements is cut at column %" PRId64
                    " of the target, so the sender can't quantise it; let the receiver do it",
                    MXFP8_BLOCK, column);
}

tb_status tb__mxfp8_pack(const tb__quant_format *format, const tb_binding *from, int64_t first_column, void *wire) {
    int ndim = from->shape.ndim;
    const int64_t *len = from->shape.dim;
    int64_t columns = len[ndim - 1], rows = box_rows(ndim, len);
    if (first_column % MXFP8_BLOCK != 0)
        return refuse_cut(first_column);
    const void *src = (char *)from->base + from->offset;
    int64_t strides[TB_MAX_DIMS] = {0};
    memcpy(strides, from->strides, sizeof strides);
    bool is_plain = ndim <= 2 && (columns == 1 || strides[ndim - 1] == 1) && (ndim < 2 || strides[0] >= columns);
    char *rowed = is_plain ? NULL : tb__malloc((size_t)rows, (size_t)tb__dtype_bytes(from->dtype, columns));
    if (!is_plain) {
        tb__move copy = {.ndim = ndim,
                         .dst = rowed,
                         .nsrc = 1,
                         .src = &src,
                         .src_stride = (const int64_t(*)[TB_MAX_DIMS]) & strides,
                         .src_dtype = from->dtype,
                         .wire_dtype = from->dtype,
                         .dst_dtype = from->dtype};
        if (!rowed)
            return TB_NO_MEMORY;
        memcpy(copy.len, len, sizeof copy.len);
        for (int64_t d = ndim, stride = 1; d-- > 0; stride *= len[d])
            copy.dst_stride[d] = stride;
        tb_status status = tb__moves_run(&copy, 1);
        if (status != TB_OK) {
            free(rowed);
            return status;
        }
    }
    tb__quant_format plain = {.kind = TB__QUANT_MXFP8, .is_floor = format->is_floor};
    tb__quant_tensor to = {plain, rows, columns, wire, (char *)wire + rows * columns, 0};
    tb__quant_rows in = {rowed ? rowed : (void *)src, from->dtype, rowed || ndim < 2 ? columns : strides[0]};
    tb_status status = tb__quant_quantise(&to, 0, rows, &in);
    free(rowed);
    return status;
}

/* What tiles have too much in a row, and, if it is the last one, below it. */
static void clear_tiles(const tb__encoded *e, unsigned char *scales, int64_t row) {
    int64_t columns = (e->size.scale_columns + 3) / 4 * 4;
    int64_t stop = row < e->matrix_rows - 1 ? row + 1 : (e->matrix_rows + 127) / 128 * 128;
    for (int64_t r = row; r < stop; r++) {
        for (int64_t c = r < e->matrix_rows ? e->size.scale_columns : 0; c < columns; c++)
            scales[tb__quant_swizzle(r, c, e->size.scale_columns)] = 0;
    }
}

tb_status tb__mxfp8_unpack(const tb__encoded *to, int ndim, const int64_t *start, const int64_t *len,
                           const void *wire) {
    int64_t columns = len[ndim - 1], skip = start[ndim - 1], rows = box_rows(ndim, len), nscales = scales_of(columns);
    const unsigned char *data = wire, *scale = data + rows * columns;
    bool is_end = skip + columns == to->columns;
    if (skip % MXFP8_BLOCK != 0)
        return refuse_cut(skip);
    if (columns % MXFP8_BLOCK != 0 && !is_end)
        return refuse_cut(skip + columns);
    bool is_swizzled = to->encoding.format.is_swizzled;
    for (int64_t i = 0; i < rows; i++) {
        int64_t row = storage_row(to, ndim, start, len, i), r = row % to->matrix_rows, first = skip / MXFP8_BLOCK;
        unsigned char *scales = (unsigned char *)to->scales + row / to->matrix_rows * to->size.scale_nbytes;
        memcpy(to->data + row * to->columns + skip, data + i * columns, (size_t)columns);
        if (!is_swizzled)
            memcpy(scales + r * to->size.scale_columns + first, scale + i * nscales, (size_t)nscales);
        for (int64_t c = 0; is_swizzled && c < nscales; c++)
            scales[tb__quant_swizzle(r, first + c, to->size.scale_columns)] = scale[i * nscales + c];
        if (is_swizzled && is_end)
            clear_tiles(to, scales, r);
    }
    return TB_OK;
}
