/* Encoded tensors: parts of quantised storage that views make, written in bands, read in boxes, and sent as mxfp8;
 * against the reference, one matrix at a time. */
#include "reshard/encode.h"

#include "base/dtype.h"
#include "device/device.h"

#include "../tests/support/quantised.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const encodings[] = {"mxfp8",           "mxfp8(floor)",
                                        "mxfp8(swizzled)", "mxfp8(floor,swizzled)",
                                        "fp8_block",       "fp8_block(power_of_two)",
                                        "fp8_tensor",      "fp8_tensor(power_of_two)",
                                        "nvfp4",           "nvfp4(swizzled)"};
enum { NENCODINGS = sizeof encodings / sizeof *encodings, POISON = 0xa5 };

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Runs listed moves on the host device. The buffer is that of sources and of destinations. */
static tb_status run_list(tb__move_list *list, void *buffer) {
    tb__device *host;
    tb__job *job;
    tb__fence fence = {0};
    assert_int_equal(tb__device_open("host", &host), TB_OK);
    assert_int_equal(host->ops->prepare(host, list->moves.item, list->moves.count, &job), TB_OK);
    tb__move_list_fini(list);
    assert_int_equal(host->ops->run(host, job, &(tb__run){.src_buffer = buffer, .dst_buffer = buffer}, &fence), TB_OK);
    while (!fence.is_done)
        host->ops->progress(host);
    host->ops->release(host, job);
    tb__device_close(host);
    return fence.status;
}

static tb_status write_rows(const tb__encoded *e, int64_t first, int64_t rows, const void *from, tb_dtype dtype) {
    tb__move_list list = {0};
    assert_int_equal(tb__encoded_list_write(e, first, rows, from, dtype, e->scale, "w", &list), TB_OK);
    return run_list(&list, NULL);
}

static tb_status read_box(const tb__encoded *e, int ndim, const int64_t *start, const int64_t *len, void *to,
                          tb_dtype dtype) {
    tb__move_list list = {0};
    assert_int_equal(tb__encoded_list_read(e, ndim, start, len, 0, dtype, "w", &list), TB_OK);
    return run_list(&list, to);
}

static tb_status pack(const tb__quant_format *format, const tb_binding *from, int64_t first_column, void *wire) {
    tb__move_list list = {0};
    TB_TRY(tb__mxfp8_list_pack(format, from, NULL, first_column, 0, "w", &list));
    return run_list(&list, wire);
}

static tb_status unpack(const tb__encoded *to, int ndim, const int64_t *start, const int64_t *len, void *wire) {
    tb__move_list list = {0};
    TB_TRY(tb__mxfp8_list_unpack(to, ndim, start, len, 0, &list));
    return run_list(&list, wire);
}

/* Storage of several matrices, and a part of it. */
typedef struct scene {
    tb__encoding encoding;
    tb_shape stored;
    int64_t nmatrices, rows, columns;
    tb__quant_size size;
    uint8_t *data, *scales;
    float scale;
    tb__encoded part;
    tb_dtype dtype;
    uint8_t *numbers;   /* the part's, row-major */
    uint8_t **expected; /* by matrix: all of its rows, those that the part does not have zero */
    bool *is_written;   /* by row of the storage */
} scene;

static int64_t row_of(const scene *s, int64_t i) {
    const tb_binding *b = &s->part.part;
    int64_t element = b->offset * 8 / tb_dtype_bits(b->dtype);
    for (int d = b->shape.ndim - 1; d-- > 0;) {
        element += i % b->shape.dim[d] * b->strides[d];
        i /= b->shape.dim[d];
    }
    return element / s->columns;
}

static tb_binding choose_part(scene *s, rng *r) {
    bool is_block = s->encoding.format.kind == TB__QUANT_FP8_BLOCK;
    int64_t unit = is_block ? 128 : 1, first = rng_range(r, 0, (s->rows - 1) / unit) * unit;
    int64_t count = min64(rng_range(r, 1, (s->rows - first + unit - 1) / unit) * unit, s->rows - first);
    int64_t matrix = rng_range(r, 0, s->nmatrices - 1), pieces = rng_range(r, 2, 4), k = s->columns;
    tb_binding b = {.base = s->data, .dtype = s->size.data_dtype, .strides = {s->rows * k, k, 1}};
    int64_t at = 0;
    switch (rng_range(r, 0, 3)) {
    case 0: /* all of it */
        b.shape = (tb_shape){3, {s->nmatrices, s->rows, k}};
        break;
    case 1: /* some rows of every matrix */
        b.shape = (tb_shape){3, {s->nmatrices, count, k}};
        at = first;
        break;
    case 2: /* rows of one */
        b = (tb_binding){.base = s->data, .dtype = b.dtype, .shape = {2, {count, k}}, .strides = {k, 1}};
        at = matrix * s->rows + first;
        break;
    default: /* interleaved, every so many */
        if (is_block || s->rows % pieces != 0) {
            b.shape = (tb_shape){3, {s->nmatrices, s->rows, k}};
            break;
        }
        b.shape = (tb_shape){4, {pieces, s->nmatrices, s->rows / pieces, k}};
        memcpy(b.strides, (int64_t[]){k, s->rows * k, pieces * k, 1}, 4 * sizeof *b.strides);
    }
    b.offset = at * k * tb_dtype_bits(b.dtype) / 8;
    return b;
}

static void fill(scene *s, rng *r) {
    int64_t n = s->part.rows * s->columns;
    size_t size = number_size(s->dtype);
    s->numbers = malloc((size_t)n * size + 1);
    s->expected = calloc((size_t)s->nmatrices, sizeof *s->expected);
    s->is_written = calloc((size_t)(s->nmatrices * s->rows), sizeof *s->is_written);
    for (int64_t m = 0; m < s->nmatrices; m++)
        s->expected[m] = calloc((size_t)(s->rows * s->columns), size);
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = number_random(s->dtype, r);
        while (!isfinite(number_value(s->dtype, bits)))
            bits = number_random(s->dtype, r);
        int64_t row = row_of(s, i / s->columns), m = row / s->rows;
        number_store(s->dtype, s->numbers + (size_t)i * size, bits);
        number_store(s->dtype, s->expected[m] + (size_t)((row % s->rows) * s->columns + i % s->columns) * size, bits);
        s->is_written[row] = true;
    }
}

static void scene_make(scene *s, const char *encoding, rng *r) {
    *s = (scene){.nmatrices = rng_range(r, 1, 3)};
    assert_int_equal(tb__encoding_parse(encoding, &s->encoding), TB_OK);
    bool is_block = s->encoding.format.kind == TB__QUANT_FP8_BLOCK;
    s->rows = rng_range(r, 1, is_block ? 400 : 150);
    s->columns = rng_range(r, 1, 100) * 2;
    s->dtype = (tb_dtype[]){TB_F32, TB_F16, TB_BF16}[rng_range(r, 0, 2)];
    s->scale = (float)rng_range(r, 1, 1000) / 64;
    s->stored = (tb_shape){3, {s->nmatrices, s->rows, s->columns}};
    assert_int_equal(tb__quant_measure(&s->encoding.format, s->rows, s->columns, &s->size), TB_OK);
    s->data = malloc((size_t)(s->nmatrices * s->size.data_nbytes));
    s->scales = malloc((size_t)(s->nmatrices * s->size.scale_nbytes) + 1);
    memset(s->data, POISON, (size_t)(s->nmatrices * s->size.data_nbytes));
    memset(s->scales, POISON, (size_t)(s->nmatrices * s->size.scale_nbytes));
    tb_binding part = choose_part(s, r);
    assert_int_equal(tb__encoded_init(&s->encoding, &s->stored, s->data, s->scales, &s->scale, &part, &s->part), TB_OK);
    fill(s, r);
}

static void scene_fini(scene *s) {
    for (int64_t m = 0; m < s->nmatrices; m++)
        free(s->expected[m]);
    free(s->expected);
    free(s->is_written);
    free(s->numbers);
    free(s->data);
    free(s->scales);
}

static int64_t scale_place(const scene *s, int64_t row, int64_t c) {
    return s->encoding.format.is_swizzled ? tb__quant_swizzle(row, c, s->size.scale_columns)
                                          : row * s->size.scale_columns + c;
}

/* Data and scales of the part's rows are what the reference makes of whole matrices, and no other row was touched. */
static void check_storage(const scene *s) {
    int64_t row_nbytes = s->size.data_nbytes / s->rows, item = s->size.scale_dtype == TB_F32 ? 4 : 1;
    uint8_t *data = calloc(1, (size_t)s->size.data_nbytes), *scales = calloc(1, (size_t)s->size.scale_nbytes + 1);
    for (int64_t m = 0; m < s->nmatrices; m++) {
        tb__quant_tensor t = {s->encoding.format, s->rows, s->columns, data, scales, s->scale};
        quantised_make(&t, &(tb__quant_rows){s->expected[m], s->dtype, s->columns});
        const uint8_t *got = s->data + m * s->size.data_nbytes, *got_scales = s->scales + m * s->size.scale_nbytes;
        for (int64_t r = 0; r < s->rows; r++) {
            bool is_written = s->is_written[m * s->rows + r];
            for (int64_t i = 0; i < row_nbytes; i++)
                assert_int_equal(got[r * row_nbytes + i], is_written ? data[r * row_nbytes + i] : POISON);
            if (s->size.scale_nbytes == 0 || r % s->size.band != 0)
                continue;
            for (int64_t c = 0; c < s->size.scale_columns; c++) {
                int64_t at = scale_place(s, r / s->size.band, c) * item;
                for (int64_t i = 0; i < item; i++)
                    assert_int_equal(got_scales[at + i], is_written ? scales[at + i] : POISON);
            }
        }
    }
    free(data);
    free(scales);
}

static void written_in_bands(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(200);
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        scene s;
        scene_make(&s, encodings[i % NENCODINGS], &r);
        const tb_shape *shape = &s.part.part.shape;
        int64_t band = tb__encoded_band(&s.encoding.format, shape) * rng_range(&r, 1, 4);
        int64_t each = s.part.rows / shape->dim[0];
        for (int64_t at = 0; at < shape->dim[0]; at += band) {
            int64_t count = min64(band, shape->dim[0] - at);
            const uint8_t *from = s.numbers + (size_t)(at * each * s.columns) * number_size(s.dtype);
            assert_int_equal(write_rows(&s.part, at * each, count * each, from, s.dtype), TB_OK);
        }
        check_storage(&s);
        scene_fini(&s);
    }
}

/* Into other storage, of which the rest stays as it is. */
static void copied(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(50);
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        scene s;
        tb__move_list list = {0};
        scene_make(&s, encodings[i % NENCODINGS], &r);
        assert_int_equal(write_rows(&s.part, 0, s.part.rows, s.numbers, s.dtype), TB_OK);
        size_t data_nbytes = (size_t)(s.nmatrices * s.size.data_nbytes),
               scales_nbytes = (size_t)(s.nmatrices * s.size.scale_nbytes);
        uint8_t *data = s.data, *scales = s.scales;
        tb__encoded from = s.part;
        s.data = memset(malloc(data_nbytes), POISON, data_nbytes);
        s.scales = memset(malloc(scales_nbytes + 1), POISON, scales_nbytes);
        s.part.data = (char *)s.data;
        s.part.scales = (char *)s.scales;
        assert_int_equal(tb__encoded_list_copy(&from, &s.part, &list), TB_OK);
        assert_int_equal(run_list(&list, NULL), TB_OK);
        check_storage(&s);
        free(data);
        free(scales);
        scene_fini(&s);
    }
}

static void choose_box(const tb_shape *shape, rng *r, int64_t *start, int64_t *len) {
    for (int d = 0; d < shape->ndim; d++) {
        start[d] = rng_range(r, 0, shape->dim[d] - 1);
        len[d] = rng_range(r, 1, shape->dim[d] - start[d]);
        if (d == shape->ndim - 1 && rng_range(r, 0, 1)) {
            start[d] = 0;
            len[d] = shape->dim[d];
        }
    }
}

static void read_in_boxes(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(200);
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        scene s;
        scene_make(&s, encodings[i % NENCODINGS], &r);
        assert_int_equal(write_rows(&s.part, 0, s.part.rows, s.numbers, s.dtype), TB_OK);
        const tb_shape *shape = &s.part.part.shape;
        int64_t start[TB_MAX_DIMS], len[TB_MAX_DIMS], count = 1;
        choose_box(shape, &r, start, len);
        for (int d = 0; d < shape->ndim; d++)
            count *= len[d];
        uint8_t *out = malloc((size_t)count * number_size(s.dtype));
        assert_int_equal(read_box(&s.part, shape->ndim, start, len, out, s.dtype), TB_OK);
        for (int64_t e = 0; e < count; e++) {
            int64_t rest = e, column = 0, row = 0, step = 1;
            for (int d = shape->ndim; d-- > 0; rest /= len[d]) {
                int64_t index = start[d] + rest % len[d];
                if (d == shape->ndim - 1) {
                    column = index;
                } else {
                    row += index * step;
                    step *= shape->dim[d];
                }
            }
            row = row_of(&s, row);
            int64_t m = row / s.rows;
            tb__quant_tensor t = {s.encoding.format,
                                  s.rows,
                                  s.columns,
                                  s.data + m * s.size.data_nbytes,
                                  s.scales + m * s.size.scale_nbytes,
                                  s.scale};
            assert_int_equal(number_load(s.dtype, out + (size_t)e * number_size(s.dtype)),
                             quantised_value(&t, row % s.rows, column, s.dtype));
        }
        free(out);
        scene_fini(&s);
    }
}

/* In boxes of whole blocks, from a source with strides of its own. */
static void sent_as_mxfp8(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(200);
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        scene s;
        scene_make(&s, encodings[i % 4], &r);
        const tb_shape *shape = &s.part.part.shape;
        int last = shape->ndim - 1;
        int64_t width = rng_range(&r, 1, 3) * 32, height = rng_range(&r, 1, shape->dim[0]);
        for (int64_t at = 0; at < shape->dim[0]; at += height) {
            for (int64_t column = 0; column < s.columns; column += width) {
                tb_binding box = {.base = s.numbers, .dtype = s.dtype, .shape = *shape};
                int64_t start[TB_MAX_DIMS] = {at}, stride = 1;
                start[last] += column;
                box.shape.dim[0] = min64(height, shape->dim[0] - at);
                box.shape.dim[last] = min64(width, s.columns - column);
                for (int d = shape->ndim; d-- > 0; stride *= shape->dim[d]) {
                    box.strides[d] = stride;
                    box.offset += start[d] * stride * (int64_t)number_size(s.dtype);
                }
                void *wire = malloc((size_t)tb__mxfp8_wire_nbytes(shape->ndim, box.shape.dim));
                assert_int_equal(pack(&s.encoding.format, &box, column, wire), TB_OK);
                assert_int_equal(unpack(&s.part, shape->ndim, start, box.shape.dim, wire), TB_OK);
                free(wire);
            }
        }
        check_storage(&s);
        scene_fini(&s);
    }
}

/* Rows that are not the last ones of their matrix: what their tiles have too much beside them is zero all the same. */
static void tiles_of_some_rows(void **state) {
    (void)state;
    enum { ROWS = 9, COLUMNS = 96 };
    float numbers[ROWS * COLUMNS];
    uint8_t data[2][ROWS * COLUMNS], scales[2][512], wire[4 * (COLUMNS + 3)];
    for (int i = 0; i < ROWS * COLUMNS; i++)
        numbers[i] = (float)(i % 37 - 18);
    tb__encoding mxfp8;
    tb__encoded part[2];
    tb_shape stored = {2, {ROWS, COLUMNS}};
    assert_int_equal(tb__encoding_parse("mxfp8(swizzled)", &mxfp8), TB_OK);
    for (int i = 0; i < 2; i++) {
        tb_binding rows = {.base = data[i],
                           .offset = (int64_t)2 * COLUMNS,
                           .dtype = TB_F8E4M3,
                           .shape = {2, {4, COLUMNS}},
                           .strides = {COLUMNS, 1}};
        assert_int_equal(tb__encoded_init(&mxfp8, &stored, data[i], scales[i], NULL, &rows, &part[i]), TB_OK);
        memset(data[i], 0xa5, sizeof data[i]);
        memset(scales[i], 0xa5, sizeof scales[i]);
    }
    tb_binding box = {.base = numbers, .dtype = TB_F32, .shape = {2, {4, COLUMNS}}, .strides = {COLUMNS, 1}};
    assert_int_equal(write_rows(&part[0], 0, 4, numbers, TB_F32), TB_OK);
    assert_int_equal(pack(&mxfp8.format, &box, 0, wire), TB_OK);
    assert_int_equal(unpack(&part[1], 2, (int64_t[]){0, 0}, box.shape.dim, wire), TB_OK);
    assert_memory_equal(data[0], data[1], sizeof data[0]);
    assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
}

static void blocks_that_are_cut(void **state) {
    (void)state;
    float numbers[64] = {0}, scale = 1;
    uint8_t data[4 * 64], scales[8], wire[66];
    tb__encoding mxfp8, block;
    tb__encoded part;
    assert_int_equal(tb__encoding_parse("mxfp8(sender)", &mxfp8), TB_OK);
    assert_true(mxfp8.by_sender);
    tb_binding whole = {.base = data, .dtype = TB_F8E4M3, .shape = {2, {4, 64}}, .strides = {64, 1}};
    tb_shape stored = {2, {4, 64}};
    assert_int_equal(tb__encoded_init(&mxfp8, &stored, data, scales, NULL, &whole, &part), TB_OK);
    tb_binding box = {.base = numbers, .dtype = TB_F32, .shape = {2, {1, 40}}, .strides = {64, 1}};
    assert_int_equal(pack(&mxfp8.format, &box, 8, wire), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "a block of 32 elements is cut at column 8"));
    assert_int_equal(pack(&mxfp8.format, &box, 0, wire), TB_OK);
    assert_int_equal(unpack(&part, 2, (int64_t[]){0, 0}, (int64_t[]){1, 40}, wire), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "cut at column 40"));

    tb_binding columns = {.base = data, .dtype = TB_F8E4M3, .shape = {2, {4, 32}}, .strides = {64, 1}};
    assert_int_equal(tb__encoded_init(&mxfp8, &stored, data, scales, NULL, &columns, &part), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "does not leave rows of the last dim whole"));
    assert_int_equal(tb__encoding_parse("fp8_block", &block), TB_OK);
    tb_binding rows = {.base = data, .offset = 64, .dtype = TB_F8E4M3, .shape = {2, {3, 64}}, .strides = {64, 1}};
    assert_int_equal(tb__encoded_init(&block, &stored, data, scales, NULL, &rows, &part), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "its rows 1 to 4 of a quantised matrix are not whole blocks of 128"));
    assert_int_equal(tb__encoded_init(&block, &stored, data, (char *)&scale + 1, NULL, &whole, &part), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "not aligned like floats"));
    assert_int_equal(tb__encoded_init(&block, &stored, data, NULL, NULL, &whole, &part), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "its scales are NULL"));
}

static void texts(void **state) {
    (void)state;
    static const struct {
        const char *text, *why;
    } bad[] = {{"", "is none of"},
               {"fp8", "is none of"},
               {"mxfp8(", "has no option ''"},
               {"mxfp8(floor", "does not end"},
               {"mxfp8(floor))", "does not end"},
               {"mxfp8(power_of_two)", "mxfp8 has no option 'power_of_two'"},
               {"fp8_block(sender)", "fp8_block has no option 'sender'"},
               {"nvfp4(floor)", "nvfp4 has no option 'floor'"}};
    tb__encoding e;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(tb__encoding_parse(bad[i].text, &e), TB_INVALID);
        if (!strstr(tb_error_detail(), bad[i].why))
            fail_msg("'%s': %s", bad[i].text, tb_error_detail());
    }
    assert_int_equal(tb__encoding_parse("nvfp4(swizzled,receiver)", &e), TB_OK);
    assert_true(e.format.kind == TB__QUANT_NVFP4 && e.format.is_swizzled && !e.by_sender);
}

static void sizes(void **state) {
    (void)state;
    tb_shape part = {2, {128, 64}}, scalar = {0};
    size_t data = 0, scales = 0, scale = 9;
    assert_int_equal(tb_encode_nbytes("mxfp8", &part, &data, &scales, &scale), TB_OK);
    assert_true(data == 128 * 64 && scales == 128 * 2 && scale == 0);
    assert_int_equal(tb_encode_nbytes("nvfp4", &part, &data, &scales, &scale), TB_OK);
    assert_true(data == 128 * 32 && scales == 128 * 4 && scale == 4);
    assert_int_equal(tb_encode_nbytes("fp8_tensor", &part, &data, NULL, NULL), TB_OK);
    assert_int_equal(tb_encode_nbytes("fp9", &part, &data, NULL, NULL), TB_INVALID);
    assert_int_equal(tb_encode_nbytes(NULL, &part, &data, NULL, NULL), TB_INVALID);
    assert_int_equal(tb_encode_nbytes("mxfp8", &scalar, &data, NULL, NULL), TB_REFUSED);
    part.dim[0] = -1;
    assert_int_equal(tb_encode_nbytes("mxfp8", &part, &data, NULL, NULL), TB_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_in_bands),
        cmocka_unit_test(copied),
        cmocka_unit_test(read_in_boxes),
        cmocka_unit_test(sent_as_mxfp8),
        cmocka_unit_test(tiles_of_some_rows),
        cmocka_unit_test(blocks_that_are_cut),
        cmocka_unit_test(texts),
        cmocka_unit_test(sizes),
    };
    return cmocka_run_group_tests_name("encode", tests, NULL, NULL);
}
