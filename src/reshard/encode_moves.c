/* Encoded tensors as moves: quantising into their storage, reading it, copying it, and mxfp8 on the wire. */
#include "reshard/encode.h"

#include "base/dtype.h"

#include <inttypes.h>
#include <string.h>

enum { MXFP8_BLOCK = 32, TILE_ROWS = 128, TILE_COLUMNS = 4, TILE_BYTES = 512 };

static int64_t count_rows(int ndim, const int64_t *len) {
    int64_t n = 1;
    for (int d = 0; d + 1 < ndim; d++)
        n *= len[d];
    return n;
}

/* An offset in a buffer, as an address in a move. */
static void *in_buffer(int64_t offset) {
    return (void *)(uintptr_t)offset; // NOLINT(performance-no-int-to-ptr)
}

static tb__quantised matrix_at(const tb__encoded *e, int64_t matrix, int64_t first) {
    return (tb__quantised){.format = e->encoding.format,
                           .rows = e->matrix_rows,
                           .columns = e->columns,
                           .first = first,
                           .data = e->data + matrix * e->size.data_nbytes,
                           .scales = e->scales ? e->scales + matrix * e->size.scale_nbytes : NULL,
                           .scale = e->scale};
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------- */

/* The source of bytes; NULL in place of it: zeros. */
typedef struct source {
    const char *at;
    tb__mapping *mapping; /* NULL: `at` is an address */
    int64_t row_stride;   /* of rows of bytes; 0: it is in tiles, like the destination */
} source;

static tb_status add_bytes(tb__move_list *out, char *dst, const source *src, int ndim, const int64_t *len,
                           const int64_t *dst_stride, const int64_t *src_stride) {
    int64_t strides[1][TB_MAX_DIMS] = {{0}};
    const void *at = src ? src->at : NULL;
    tb__mapping *mapping = src ? src->mapping : NULL;
    tb__move move = {.ndim = ndim,
                     .dst = dst,
                     .nsrc = src != NULL,
                     .src = &at,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
                     .src_mapping = &mapping,
                     .src_dtype = TB_U8,
                     .wire_dtype = TB_U8,
                     .dst_dtype = TB_U8};
    memcpy(move.len, len, (size_t)ndim * sizeof *len);
    memcpy(move.dst_stride, dst_stride, (size_t)ndim * sizeof *dst_stride);
    if (src)
        memcpy(strides[0], src_stride, (size_t)ndim * sizeof *src_stride);
    return tb__move_is_empty(&move) ? TB_OK : tb__move_list_add(out, &move);
}

/* Contiguous bytes. */
static tb_status add_run(tb__move_list *out, char *dst, const char *src, int64_t nbytes) {
    int64_t unit = 1;
    return add_bytes(out, dst, &(source){.at = src}, 1, &nbytes, &unit, &unit);
}

/* Dims of a box of scales in tiles. */
typedef struct tile_dims {
    int n;
    int64_t len[3], in_tiles[3]; /* strides there ... */
    int64_t step[3];             /* ... and in indices */
    int64_t count;               /* indices that they cover */
} tile_dims;

/* The longest box of rows that begins at `row`, of nrows: within 32 rows of a tile, of whole 32, or of whole tiles. */
static tile_dims next_rows(int64_t row, int64_t nrows, int64_t scale_columns) {
    int64_t across = (scale_columns + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_BYTES;
    if (row % 32 != 0 || nrows < 32) {
        int64_t n = 32 - row % 32 < nrows ? 32 - row % 32 : nrows;
        return (tile_dims){1, {n}, {16}, {1}, n};
    }
    if (row % TILE_ROWS != 0 || nrows < TILE_ROWS) {
        int64_t n = (TILE_ROWS - row % TILE_ROWS) / 32 < nrows / 32 ? (TILE_ROWS - row % TILE_ROWS) / 32 : nrows / 32;
        return (tile_dims){2, {n, 32}, {4, 16}, {32, 1}, n * 32};
    }
    int64_t n = nrows / TILE_ROWS;
    return (tile_dims){3, {n, 4, 32}, {across, 4, 16}, {TILE_ROWS, 32, 1}, n * TILE_ROWS};
}

static tile_dims next_columns(int64_t column, int64_t ncolumns) {
    if (column % TILE_COLUMNS != 0 || ncolumns < TILE_COLUMNS) {
        int64_t n = TILE_COLUMNS - column % TILE_COLUMNS < ncolumns ? TILE_COLUMNS - column % TILE_COLUMNS : ncolumns;
        return (tile_dims){1, {n}, {1}, {1}, n};
    }
    int64_t n = ncolumns / TILE_COLUMNS;
    return (tile_dims){2, {n, TILE_COLUMNS}, {TILE_BYTES, 1}, {TILE_COLUMNS, 1}, n * TILE_COLUMNS};
}

/* Copies rows and columns of scales to their places in the tiles of a matrix. */
static tb_status add_tiles(tb__move_list *out, char *tiles, int64_t scale_columns, int64_t row, int64_t nrows,
                           int64_t column, int64_t ncolumns, const source *from) {
    for (int64_t r = row; r < row + nrows;) {
        tile_dims rows = next_rows(r, row + nrows - r, scale_columns);
        for (int64_t c = column; c < column + ncolumns;) {
            tile_dims columns = next_columns(c, column + ncolumns - c);
            int64_t len[5], dst[5], src[5], place = tb__quant_swizzle(r, c, scale_columns);
            int ndim = 0;
            source at = from ? *from : (source){0};
            at.at += at.row_stride ? (r - row) * at.row_stride + c - column : place;
            for (int d = 0; d < rows.n; d++, ndim++) {
                len[ndim] = rows.len[d];
                dst[ndim] = rows.in_tiles[d];
                src[ndim] = at.row_stride ? rows.step[d] * at.row_stride : rows.in_tiles[d];
            }
            for (int d = 0; d < columns.n; d++, ndim++) {
                len[ndim] = columns.len[d];
                dst[ndim] = columns.in_tiles[d];
                src[ndim] = at.row_stride ? columns.step[d] : columns.in_tiles[d];
            }
            TB_TRY(add_bytes(out, tiles + place, from ? &at : NULL, ndim, len, dst, src));
            c += columns.count;
        }
        r += rows.count;
    }
    return TB_OK;
}

/* Zeroes the places in tiles of columns, or of rows below the matrix's last one, that have no scales. */
static tb_status add_tile_padding(tb__move_list *out, const tb__encoded *e, const tb__encoded_run *r) {
    char *tiles = e->scales + r->matrix * e->size.scale_nbytes;
    int64_t columns = e->size.scale_columns, all = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    int64_t below = (e->matrix_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS - e->matrix_rows;
    TB_TRY(add_tiles(out, tiles, columns, r->row, r->count, columns, all - columns, NULL));
    if (r->row + r->count < e->matrix_rows)
        return TB_OK;
    return add_tiles(out, tiles, columns, e->matrix_rows, below, 0, all, NULL);
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

/* The rows of a box in memory. From each multiple of `even` on, so many of them lie `stride` elements apart, which is
 * no less than a row. */
typedef struct row_source {
    const tb_binding *from;
    tb__mapping *mapping;
    int64_t rows, columns, even, stride;
    int outer; /* dims that count runs of even rows */
} row_source;

static row_source rows_of(const tb_binding *from, tb__mapping *mapping) {
    int d = from->shape.ndim - 1;
    const int64_t *len = from->shape.dim;
    row_source s = {.from = from, .mapping = mapping, .columns = len[d], .even = 1, .stride = len[d]};
    s.rows = count_rows(from->shape.ndim, len);
    for (; d > 0; d--) {
        int64_t step = from->strides[d - 1];
        if (len[d - 1] == 1)
            continue;
        if (s.even == 1 && step >= s.columns)
            s.stride = step;
        else if (s.even == 1 || step != s.stride * s.even)
            break;
        s.even *= len[d - 1];
    }
    s.outer = d > 0 ? d : 0;
    return s;
}

/* Adds a move of `count` rows from this one on, which are evenly spaced. The caller has set the destination. */
static tb_status add_rows(tb__move_list *out, const row_source *s, int64_t row, int64_t count, tb__move move) {
    const tb_binding *from = s->from;
    int64_t element = row % s->even * s->stride, rest = row / s->even;
    for (int d = s->outer; d-- > 0; rest /= from->shape.dim[d])
        element += rest % from->shape.dim[d] * from->strides[d];
    const void *src = (const char *)from->base + from->offset + tb__dtype_bytes(from->dtype, 1) * element;
    move.ndim = 2;
    move.len[0] = count;
    move.len[1] = s->columns;
    move.nsrc = 1;
    move.src = &src;
    move.src_stride = (const int64_t[1][TB_MAX_DIMS]){{s->stride, 1}};
    move.src_mapping = s->mapping ? &s->mapping : NULL;
    move.src_dtype = from->dtype;
    return tb__move_list_add(out, &move);
}

/* ---- Storage ----------------------------------------------------------------------------------------------------- */

tb_status tb__encoded_list_write(const tb__encoded *e, int64_t first, int64_t rows, const void *from, tb_dtype dtype,
                                 const float *scale, const char *name, tb__move_list *out) {
    const tb_shape *shape = &e->part.shape;
    for (int64_t i = first; i < first + rows;) {
        tb__encoded_run r = tb__encoded_next_run(e, shape->ndim, NULL, shape->dim, i, first + rows);
        const void *src = (const char *)from + tb__dtype_bytes(dtype, (i - first) * e->columns);
        tb__quantised q = matrix_at(e, r.matrix, r.row);
        q.scale = scale;
        tb__move move = {.kind = TB__MOVE_QUANTISE,
                         .ndim = 2,
                         .len = {r.count, e->columns},
                         .nsrc = 1,
                         .src = &src,
                         .src_stride = (const int64_t[1][TB_MAX_DIMS]){{e->columns, 1}},
                         .src_dtype = dtype,
                         .quantised = &q,
                         .name = name};
        TB_TRY(tb__move_list_add(out, &move));
        i += r.count;
    }
    return TB_OK;
}

/* The rows of the box, from row i on, that are evenly spaced in memory and consecutive in one matrix. */
static tb__encoded_run next_even_run(const tb__encoded *e, const int64_t *start, const row_source *s, int64_t i) {
    int64_t stop = i - i % s->even + s->even;
    return tb__encoded_next_run(e, s->from->shape.ndim, start, s->from->shape.dim, i, stop < s->rows ? stop : s->rows);
}

bool tb__encoded_takes_box(const tb__encoded *e, const int64_t *start, const tb_binding *from) {
    int last = from->shape.ndim - 1;
    if (last < 0 || start[last] != 0 || from->shape.dim[last] != e->columns ||
        (e->columns > 1 && from->strides[last] != 1))
        return false;
    row_source s = rows_of(from, NULL);
    for (int64_t i = 0; e->size.band > 1 && i < s.rows;) {
        tb__encoded_run r = next_even_run(e, start, &s, i);
        int64_t stop = r.row + r.count;
        if (r.row % e->size.band != 0 || (stop % e->size.band != 0 && stop != e->matrix_rows))
            return false;
        i += r.count;
    }
    return true;
}

tb_status tb__encoded_list_write_box(const tb__encoded *e, const int64_t *start, const tb_binding *from,
                                     tb__mapping *mapping, const float *scale, const char *name, tb__move_list *out) {
    row_source s = rows_of(from, mapping);
    for (int64_t i = 0; i < s.rows;) {
        tb__encoded_run r = next_even_run(e, start, &s, i);
        tb__quantised q = matrix_at(e, r.matrix, r.row);
        q.scale = scale;
        TB_TRY(add_rows(out, &s, i, r.count, (tb__move){.kind = TB__MOVE_QUANTISE, .quantised = &q, .name = name}));
        i += r.count;
    }
    return TB_OK;
}

/* The row of the part that is row i of a box of it. */
static int64_t part_row(const tb_shape *part, const int64_t *start, const int64_t *len, int64_t i) {
    int64_t row = 0, each = 1;
    for (int d = part->ndim - 1; d-- > 0; each *= part->dim[d], i /= len[d])
        row += (start[d] + i % len[d]) * each;
    return row;
}

tb_status tb__encoded_list_amax(const tb_shape *part, const int64_t *start, const tb_binding *from,
                                tb__mapping *mapping, float *amax, const char *name, tb__move_list *out) {
    row_source s = rows_of(from, mapping);
    const int64_t *len = from->shape.dim;
    for (int64_t i = 0, n; i < s.rows; i += n) {
        int64_t first = part_row(part, start, len, i);
        for (n = 1; (i + n) % s.even != 0 && part_row(part, start, len, i + n) == first + n;)
            n++;
        TB_TRY(
            add_rows(out, &s, i, n, (tb__move){.kind = TB__MOVE_AMAX, .amax = amax, .first_row = first, .name = name}));
    }
    return TB_OK;
}

tb_status tb__encoded_list_scale(const float *from, float *to, tb__move_list *out) {
    const void *src = from;
    tb__move move = {.dst = to,
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = (const int64_t[1][TB_MAX_DIMS]){{0}},
                     .src_dtype = TB_F32,
                     .wire_dtype = TB_F32,
                     .dst_dtype = TB_F32};
    return tb__move_list_add(out, &move);
}

tb_status tb__encoded_list_copy(const tb__encoded *from, const tb__encoded *to, tb__move_list *out) {
    const tb__quant_size *size = &to->size;
    if (to->rows > 0 && to->rows == to->matrices * to->matrix_rows) { /* all of it */
        TB_TRY(add_run(out, to->data, from->data, to->matrices * size->data_nbytes));
        return add_run(out, to->scales, from->scales, to->matrices * size->scale_nbytes);
    }
    for (int64_t i = 0; i < to->rows;) {
        tb__encoded_run r = tb__encoded_next_run(to, to->part.shape.ndim, NULL, to->part.shape.dim, i, to->rows);
        int64_t row_nbytes = size->data_nbytes / to->matrix_rows, scales = r.matrix * size->scale_nbytes;
        int64_t data = r.matrix * size->data_nbytes + r.row * row_nbytes;
        i += r.count;
        TB_TRY(add_run(out, to->data + data, from->data + data, r.count * row_nbytes));
        if (size->scale_nbytes == 0)
            continue;
        if (to->encoding.format.is_swizzled) {
            TB_TRY(add_tiles(out, to->scales + scales, size->scale_columns, r.row, r.count, 0, size->scale_columns,
                             &(source){.at = from->scales + scales}));
            TB_TRY(add_tile_padding(out, to, &r));
            continue;
        }
        int64_t each = size->scale_nbytes / size->scale_rows;
        int64_t first = r.row / size->band, stop = (r.row + r.count + size->band - 1) / size->band;
        scales += first * each;
        TB_TRY(add_run(out, to->scales + scales, from->scales + scales, (stop - first) * each));
    }
    return TB_OK;
}

tb_status tb__encoded_list_read(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len,
                                int64_t offset, tb_dtype dtype, const char *name, tb__move_list *out) {
    int64_t rows = count_rows(ndim, len), columns = len[ndim - 1];
    for (int64_t i = 0; i < rows;) {
        tb__encoded_run r = tb__encoded_next_run(e, ndim, start, len, i, rows);
        tb__quantised q = matrix_at(e, r.matrix, r.row);
        q.first_column = start[ndim - 1];
        tb__move move = {.kind = TB__MOVE_DEQUANTISE,
                         .ndim = 2,
                         .len = {r.count, columns},
                         .dst = in_buffer(offset + tb__dtype_bytes(dtype, i * columns)),
                         .dst_stride = {columns, 1},
                         .is_dst_in_buffer = true,
                         .dst_dtype = dtype,
                         .quantised = &q,
                         .name = name};
        TB_TRY(tb__move_list_add(out, &move));
        i += r.count;
    }
    return TB_OK;
}

/* ---- MXFP8 on the wire ------------------------------------------------------------------------------------------- */

static int64_t scales_of(int64_t columns) {
    return (columns + MXFP8_BLOCK - 1) / MXFP8_BLOCK;
}

int64_t tb__mxfp8_wire_nbytes(int ndim, const int64_t *len) {
    int64_t columns = ndim ? len[ndim - 1] : 1;
    return count_rows(ndim, len) * (columns + scales_of(columns));
}

static tb_status refuse_cut(int64_t column) {
    return tb__fail(TB_REFUSED,
                    "a block of %d elements is cut at column %" PRId64
                    " of the target, so the sender can't quantise it; let the receiver do it",
                    MXFP8_BLOCK, column);
}

tb_status tb__mxfp8_list_pack(const tb__quant_format *format, const tb_binding *from, tb__mapping *mapping,
                              int64_t first_column, int64_t offset, const char *name, tb__move_list *out) {
    row_source s = rows_of(from, mapping);
    if (first_column % MXFP8_BLOCK != 0)
        return refuse_cut(first_column);
    for (int64_t i = 0; i < s.rows; i += s.even) {
        tb__quantised q = {.format = {.kind = TB__QUANT_MXFP8, .is_floor = format->is_floor},
                           .rows = s.rows,
                           .columns = s.columns,
                           .first = i,
                           .data = in_buffer(offset),
                           .scales = in_buffer(offset + s.rows * s.columns)};
        tb__move move = {.kind = TB__MOVE_QUANTISE, .is_dst_in_buffer = true, .quantised = &q, .name = name};
        TB_TRY(add_rows(out, &s, i, s.even, move));
    }
    return TB_OK;
}

tb_status tb__mxfp8_list_unpack(const tb__encoded *to, int ndim, const int64_t *start, const int64_t *len,
                                int64_t offset, tb__move_list *out) {
    int64_t columns = len[ndim - 1], skip = start[ndim - 1], rows = count_rows(ndim, len), nscales = scales_of(columns);
    bool is_end = skip + columns == to->columns, is_swizzled = to->encoding.format.is_swizzled;
    if (skip % MXFP8_BLOCK != 0)
        return refuse_cut(skip);
    if (columns % MXFP8_BLOCK != 0 && !is_end)
        return refuse_cut(skip + columns);
    for (int64_t i = 0; i < rows;) {
        tb__encoded_run r = tb__encoded_next_run(to, ndim, start, len, i, rows);
        char *data = to->data + (r.matrix * to->matrix_rows + r.row) * to->columns + skip;
        char *scales = to->scales + r.matrix * to->size.scale_nbytes;
        source from = {in_buffer(offset + i * columns), TB__IN_BUFFER, columns};
        TB_TRY(add_bytes(out, data, &from, 2, (int64_t[]){r.count, columns}, (int64_t[]){to->columns, 1},
                         (int64_t[]){columns, 1}));
        from = (source){in_buffer(offset + rows * columns + i * nscales), TB__IN_BUFFER, nscales};
        int64_t first = skip / MXFP8_BLOCK, all = to->size.scale_columns;
        if (is_swizzled)
            TB_TRY(add_tiles(out, scales, all, r.row, r.count, first, nscales, &from));
        else
            TB_TRY(add_bytes(out, scales + r.row * all + first, &from, 2, (int64_t[]){r.count, nscales},
                             (int64_t[]){all, 1}, (int64_t[]){nscales, 1}));
        if (is_swizzled && is_end)
            TB_TRY(add_tile_padding(out, to, &r));
        i += r.count;
    }
    return TB_OK;
}
