/* Boxes of quantised source tensors as plain numbers: the data and scales of a box are read to memory as a small
 * tensor, which begins with a block, and dequantised. */
#include "reshard/disk_inside.h"

#include "base/dtype.h"
#include "base/int.h"
#include "device/host/quant.h"

#include <inttypes.h>
#include <string.h>

enum {
    GAP = 4 << 10, /* a gap of fewer bytes between two rows is read too: cheaper than a second call */
    ALIGNMENT = 64,
    TILE_BYTES = 512,
};

static tb_status read_scale(const tb__disk_source *source, float *out) {
    TB_TRY(tb__safetensors_read(source->file, source->tensor, 0, sizeof *out, out));
    if (*out > 0 && *out - *out == 0)
        return TB_OK;
    return tb__file_fail(TB_INVALID, source->file->path, "tensor '%.100s' is %g; a scale is positive and finite",
                         source->tensor->name, (double)*out);
}

static tb_status find_source(const tb__disk_input *input, int32_t rank, const char *name, tb__disk_source *out) {
    *out = tb__disk_input_find(input, rank, name);
    if (out->tensor)
        return TB_OK;
    return tb__fail(TB_INTERNAL, "rank %" PRId32 " has no tensor '%.100s', but is asked for it", rank, name);
}

tb_status tb__disk_origin_find(const tb__disk_input *input, const tb__disk_stored *t, int32_t rank,
                               tb__disk_origin *out) {
    tb__disk_source scale;
    *out = (tb__disk_origin){.scale = 0};
    TB_TRY(find_source(input, rank, t->name, &out->data));
    out->shape = tb__disk_quant_part(&t->quant, &out->data.tensor->shape);
    if (t->quant.scales_name)
        TB_TRY(find_source(input, rank, t->quant.scales_name, &out->scales));
    if (!t->quant.scale_name)
        return TB_OK;
    TB_TRY(find_source(input, rank, t->quant.scale_name, &scale));
    return read_scale(&scale, &out->scale);
}

/* The sizes that a quantised tensor's format determines. */
typedef struct terms {
    tb__quant_size size;
    int64_t align;      /* columns that are read together: of a block, or of a byte */
    int64_t together;   /* rows that are read together; only one such band is read at a time */
    int64_t scale_size; /* bytes of a scale */
    int64_t plain_size; /* and of a number */
} terms;

static tb_status terms_init(const tb__disk_stored *t, int64_t rows, int64_t columns, terms *out) {
    *out = (terms){0};
    TB_TRY(tb__quant_measure(&t->quant.format, rows, columns, &out->size));
    out->align = out->size.block ? out->size.block : 1;
    out->together = tb__disk_quant_rows(&t->quant.format);
    out->scale_size = out->size.scale_dtype == TB_F32 ? 4 : 1;
    out->plain_size = tb_dtype_bits(t->dtype) / 8;
    return TB_OK;
}

static int64_t scale_columns(const terms *of, int64_t columns) {
    return of->size.block ? (columns + of->size.block - 1) / of->size.block : 0;
}

static int64_t scale_nbytes(const terms *of, int64_t rows, int64_t columns) {
    return (rows + of->size.band - 1) / of->size.band * scale_columns(of, columns) * of->scale_size;
}

/* The size of the tiles that hold these scales of a row. */
static int64_t tiles_nbytes(int64_t nscales) {
    return ((nscales + 3) / 4 + 1) * TILE_BYTES;
}

bool tb__disk_dequant_step(const tb__disk_stored *t, const int64_t *len, int64_t nbytes, int64_t *step) {
    terms of;
    int last = t->shape.ndim - 1;
    int64_t rows = last > 0 ? len[last - 1] : 1, columns = len[last];
    if (terms_init(t, 0, 0, &of) != TB_OK)
        return false;
    for (;;) {
        int64_t width = columns + 2 * tb__max64(of.align, 2); /* whole blocks at both ends */
        int64_t raw =
            tb__max64(rows * width, t->quant.format.is_swizzled ? tiles_nbytes(scale_columns(&of, width)) : 0);
        raw = tb__max64(raw, scale_nbytes(&of, rows, width));
        int64_t plain = tb__align(rows * width * of.plain_size, ALIGNMENT);
        if (plain + tb__align(scale_nbytes(&of, rows, width), ALIGNMENT) + raw <= nbytes)
            break;
        if (rows > 1)
            rows = (rows + 1) / 2;
        else if (columns > of.align)
            columns = ((columns + 1) / 2 + of.align - 1) / of.align * of.align;
        else
            return false;
    }
    for (int d = 0; d < last; d++)
        step[d] = 1;
    if (last > 0)
        step[last - 1] = rows;
    step[last] = columns;
    return true;
}

/* The window of a part's matrix that is read for a box. */
typedef struct window {
    terms of;
    const tb__disk_origin *origin;
    int64_t matrix;        /* index of the matrix */
    int64_t columns;       /* of the matrix */
    int64_t first, width;  /* columns, from the beginning of a block on */
    unsigned char *scales; /* of blocks, row after row */
    unsigned char *raw;    /* bytes read from the files */
    int64_t raw_nbytes;
} window;

/* Reads rows of a matrix of bytes into w->raw, without gaps. Short gaps between them in the file are read, too. */
static tb_status read_rows(const window *w, const tb__disk_source *from, int64_t offset, int64_t stride, int64_t rows,
                           int64_t nbytes) {
    int64_t span = (rows - 1) * stride + nbytes;
    if (stride - nbytes > GAP || span > w->raw_nbytes) {
        for (int64_t r = 0; r < rows; r++)
            TB_TRY(tb__safetensors_read(from->file, from->tensor, offset + r * stride, (size_t)nbytes,
                                        w->raw + r * nbytes));
        return TB_OK;
    }
    TB_TRY(tb__safetensors_read(from->file, from->tensor, offset, (size_t)span, w->raw));
    for (int64_t r = 1; r < rows && stride > nbytes; r++)
        memmove(w->raw + r * nbytes, w->raw + r * stride, (size_t)nbytes);
    return TB_OK;
}

/* Reads scales in tiles; the rows are in one row of tiles. */
static tb_status read_tiles(const window *w, int64_t row, int64_t rows) {
    int64_t all = w->of.size.scale_columns, first = w->first / w->of.size.block, n = scale_columns(&w->of, w->width);
    int64_t tile = first / 4, ntiles = (first + n + 3) / 4 - tile;
    int64_t offset = w->matrix * w->of.size.scale_nbytes + tb__quant_swizzle(row / 128 * 128, tile * 4, all);
    TB_TRY(tb__safetensors_read(w->origin->scales.file, w->origin->scales.tensor, offset, (size_t)(ntiles * TILE_BYTES),
                                w->raw));
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c++)
            w->scales[r * n + c] = w->raw[tb__quant_swizzle((row + r) % 128, first % 4 + c, ntiles * 4)];
    }
    return TB_OK;
}

static tb_status read_scales(const window *w, const tb__quant_format *format, int64_t row, int64_t rows) {
    const tb__quant_size *size = &w->of.size;
    if (size->block == 0)
        return TB_OK;
    if (format->is_swizzled)
        return read_tiles(w, row, rows);
    int64_t each = w->of.scale_size, stride = size->scale_columns * each;
    int64_t nbytes = scale_columns(&w->of, w->width) * each, n = (rows + size->band - 1) / size->band;
    int64_t offset = w->matrix * size->scale_nbytes + row / size->band * stride + w->first / size->block * each;
    TB_TRY(read_rows(w, &w->origin->scales, offset, stride, n, nbytes));
    memcpy(w->scales, w->raw, (size_t)(n * nbytes));
    return TB_OK;
}

static tb_status read_data(const window *w, int64_t row, int64_t rows) {
    tb_dtype dtype = w->of.size.data_dtype;
    int64_t offset = w->matrix * w->of.size.data_nbytes + tb__dtype_bytes(dtype, row * w->columns + w->first);
    return read_rows(w, &w->origin->data, offset, tb__dtype_bytes(dtype, w->columns), rows,
                     tb__dtype_bytes(dtype, w->width));
}

/* Band by band, since several share no scales. */
static tb_status dequantise(const tb__disk_stored *t, const window *w, int64_t row, int64_t rows, unsigned char *to) {
    for (int64_t end = row + rows, n; row < end; row += n) {
        n = w->of.together > 1 ? tb__min64(end - row, w->of.together - row % w->of.together) : end - row;
        TB_TRY(read_scales(w, &t->quant.format, row, n));
        TB_TRY(read_data(w, row, n));
        const tb__quant_tensor tensor = {.format = {.kind = t->quant.format.kind},
                                         .rows = n,
                                         .columns = w->width,
                                         .data = w->raw,
                                         .scales = w->scales,
                                         .scale = w->origin->scale};
        const tb__quant_rows plain = {.data = to, .dtype = t->dtype, .stride = w->width};
        TB_TRY(tb__quant_dequantise(&tensor, 0, n, &plain));
        to += n * w->width * w->of.plain_size;
    }
    return TB_OK;
}

tb_status tb__disk_dequantise(const tb__disk_stored *t, const tb__disk_origin *origin, const int64_t *start,
                              const int64_t *len, unsigned char *stage, size_t nbytes, const void **out,
                              int64_t *stride) {
    int last = t->shape.ndim - 1;
    int64_t row = last > 0 ? start[last - 1] : 0, rows = last > 0 ? len[last - 1] : 1;
    window w = {.origin = origin, .columns = origin->shape.dim[last]};
    TB_TRY(terms_init(t, tb__disk_matrix_rows(&origin->shape), w.columns, &w.of));
    for (int d = 0; d < last - 1; d++)
        w.matrix = w.matrix * origin->shape.dim[d] + start[d];
    int64_t packing = tb__dtype_packing(w.of.size.data_dtype), end = start[last] + len[last];
    w.first = start[last] / w.of.align * w.of.align;
    w.width = (end + packing - 1) / packing * packing - w.first;
    int64_t plain_nbytes = tb__align(rows * w.width * w.of.plain_size, ALIGNMENT);
    int64_t band = w.of.together > 1 ? tb__min64(rows, w.of.together) : rows;
    w.scales = stage + plain_nbytes;
    w.raw = w.scales + tb__align(scale_nbytes(&w.of, band, w.width), ALIGNMENT);
    w.raw_nbytes = (int64_t)nbytes - (w.raw - stage);
    TB_TRY(dequantise(t, &w, row, rows, stage));
    for (int d = 0; d < last; d++)
        stride[d] = w.width; /* those of the rows; the other dims have one index */
    stride[last] = 1;
    *out = stage + (start[last] - w.first) * w.of.plain_size;
    return TB_OK;
}
