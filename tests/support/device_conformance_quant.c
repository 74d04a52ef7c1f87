/* Quantised tensors: every format from and to every dtype, in bands, and what can't be quantised. */
#include "device_conformance_inside.h"

#include "quantised.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const tb_dtype dtypes[] = {TB_F32, TB_F16, TB_BF16};
static const tb__quant_format formats[] = {
    {.kind = TB__QUANT_MXFP8},
    {.kind = TB__QUANT_MXFP8, .is_floor = true},
    {.kind = TB__QUANT_MXFP8, .is_swizzled = true},
    {.kind = TB__QUANT_FP8_BLOCK},
    {.kind = TB__QUANT_FP8_BLOCK, .is_power_of_two = true},
    {.kind = TB__QUANT_FP8_TENSOR},
    {.kind = TB__QUANT_FP8_TENSOR, .is_power_of_two = true},
    {.kind = TB__QUANT_NVFP4},
    {.kind = TB__QUANT_NVFP4, .is_swizzled = true},
};
enum { NFORMATS = sizeof formats / sizeof *formats, GUARD = 96, MOST_BANDS = 400 };

/* Plain rows, a quantised tensor made of them, and plain rows made of that. */
typedef struct matrix {
    tb__quant_format format;
    tb_dtype dtype, back_dtype;
    int64_t rows, columns, stride;
    tb__quant_size size;
    area plain, quantised, back;
    size_t plain_offset, scales_offset, back_offset;
    float amax, scale;
    /* Of the moves. */
    const void *src;
    int64_t src_stride[1][TB_MAX_DIMS];
    tb__quantised parts[MOST_BANDS];
    const void *srcs[MOST_BANDS];
} matrix;

static uint64_t random_number(suite *s, tb_dtype dtype, double unit) {
    float x = (float)((double)rng_range(&s->g, -(1 << 20), 1 << 20) * 0x1p-20 * unit);
    uint32_t wide;
    memcpy(&wide, &x, sizeof wide);
    uint64_t bits = rng_range(&s->g, 0, 9) ? number_cast(TB_F32, dtype, wide) : number_random(dtype, &s->g);
    return isfinite(number_value(dtype, bits)) ? bits : 0;
}

static uint8_t *plain_at(const matrix *m, int64_t row, int64_t column) {
    return m->plain.image + m->plain_offset + (size_t)(row * m->stride + column) * number_size(m->dtype);
}

static void fill_matrix(suite *s, matrix *m) {
    double unit = 1;
    m->amax = 0;
    memset(m->plain.image, 0xff, m->plain.nbytes); /* NaN in the gaps */
    for (int64_t r = 0; r < m->rows; r++) {
        for (int64_t c = 0; c < m->columns; c++) {
            if (c % 16 == 0 && rng_range(&s->g, 0, 3) != 0)
                unit = rng_range(&s->g, 0, 9) ? ldexp(1, (int)rng_range(&s->g, -30, 12)) : 0;
            uint64_t bits = random_number(s, m->dtype, unit);
            number_store(m->dtype, plain_at(m, r, c), bits);
            m->amax = fmaxf(m->amax, fabsf((float)number_value(m->dtype, bits)));
        }
    }
    put_area(s, &m->plain);
    if (m->format.kind == TB__QUANT_FP8_TENSOR || m->format.kind == TB__QUANT_NVFP4)
        assert_ok(tb__quant_scale(&m->format, m->amax, &m->scale));
}

static tb__device *choose_owner(suite *s) {
    return rng_range(&s->g, 0, 2) ? s->device : s->host;
}

static void make_matrix(suite *s, matrix *m, tb__quant_format format, tb_dtype dtype, int64_t rows, int64_t columns) {
    *m = (matrix){.format = format,
                  .dtype = dtype,
                  .back_dtype = dtypes[rng_range(&s->g, 0, 2)],
                  .rows = rows,
                  .columns = columns,
                  .stride = columns + (rng_range(&s->g, 0, 1) ? rng_range(&s->g, 1, 9) : 0)};
    assert_ok(tb__quant_measure(&format, rows, columns, &m->size));
    m->plain_offset = GUARD + (size_t)rng_range(&s->g, 0, 5) * number_size(dtype);
    m->plain = make_area(s, choose_owner(s), m->plain_offset + (size_t)(rows * m->stride) * number_size(dtype) + GUARD);
    m->scales_offset = (GUARD + (size_t)m->size.data_nbytes + GUARD + 63) / 64 * 64;
    m->quantised = make_area(s, s->device, m->scales_offset + (size_t)m->size.scale_nbytes + GUARD);
    m->back_offset = GUARD;
    m->back = make_area(s, choose_owner(s), 2 * GUARD + (size_t)(rows * m->stride) * number_size(m->back_dtype));
    m->src_stride[0][0] = m->stride;
    m->src_stride[0][1] = 1;
    fill_matrix(s, m);
    memset(m->quantised.image, POISON, m->quantised.nbytes);
    put_area(s, &m->quantised);
    memset(m->back.image, POISON, m->back.nbytes);
    put_area(s, &m->back);
}

static void free_matrix(matrix *m) {
    free_area(&m->plain);
    free_area(&m->quantised);
    free_area(&m->back);
}

static tb__quantised quantised_part(const matrix *m, int64_t first) {
    return (tb__quantised){.format = m->format,
                           .rows = m->rows,
                           .columns = m->columns,
                           .first = first,
                           .data = m->quantised.at + GUARD,
                           .scales = m->size.scale_nbytes ? m->quantised.at + m->scales_offset : NULL,
                           .scale = &m->scale};
}

/* Moves of all rows, in bands of random heights. */
static size_t list_bands(suite *s, matrix *m, tb__move_kind kind, tb__move *moves) {
    size_t n = 0;
    for (int64_t first = 0; first < m->rows && n < MOST_BANDS; n++) {
        int64_t band = kind == TB__MOVE_QUANTISE ? m->size.band : 1;
        int64_t rows = n + 1 == MOST_BANDS ? m->rows : band * rng_range(&s->g, 1, 1 + m->rows / band);
        rows = rows > m->rows - first ? m->rows - first : rows;
        m->parts[n] = quantised_part(m, first);
        m->srcs[n] = m->plain.at + m->plain_offset + (size_t)(first * m->stride) * number_size(m->dtype);
        size_t back_size = number_size(m->back_dtype);
        moves[n] = (tb__move){.kind = kind,
                              .part = (uint32_t)n,
                              .ndim = 2,
                              .len = {rows, m->columns},
                              .dst = m->back.at + m->back_offset + (size_t)(first * m->stride) * back_size,
                              .dst_stride = {m->stride, 1},
                              .dst_dtype = m->back_dtype,
                              .src_dtype = m->dtype,
                              .nsrc = kind != TB__MOVE_DEQUANTISE,
                              .src = &m->srcs[n],
                              .src_stride = (const int64_t(*)[TB_MAX_DIMS])m->src_stride,
                              .quantised = kind == TB__MOVE_AMAX ? NULL : &m->parts[n]};
        first += rows;
    }
    return n;
}

static tb__quant_tensor image_of(const matrix *m) {
    return (tb__quant_tensor){.format = m->format,
                              .rows = m->rows,
                              .columns = m->columns,
                              .data = m->quantised.image + GUARD,
                              .scales = m->quantised.image + m->scales_offset,
                              .scale = m->scale};
}

static void expect_quantised(matrix *m) {
    tb__quant_tensor to = image_of(m);
    tb__quant_rows from = {.data = plain_at(m, 0, 0), .dtype = m->dtype, .stride = m->stride};
    quantised_make(&to, &from);
}

static void expect_back(matrix *m) {
    tb__quant_tensor from = image_of(m);
    size_t size = number_size(m->back_dtype);
    for (int64_t r = 0; r < m->rows; r++) {
        for (int64_t c = 0; c < m->columns; c++)
            number_store(m->back_dtype, m->back.image + m->back_offset + (size_t)(r * m->stride + c) * size,
                         quantised_value(&from, r, c, m->back_dtype));
    }
}

static void check_amax(suite *s, matrix *m, tb__move *moves) {
    for (int i = 0; i < 2; i++) {
        float amax = i ? m->amax * 2 + 1 : 0;
        size_t n = list_bands(s, m, TB__MOVE_AMAX, moves);
        for (size_t k = 0; k < n; k++)
            moves[k].amax = &amax;
        run_moves(s, m->plain.owner == s->host ? s->host : s->device, moves, n, NULL);
        assert_true(amax == (i ? m->amax * 2 + 1 : m->amax)); /* raised, never lowered */
        for (size_t k = 0; k < n; k++)
            moves[k].amax = NULL;
    }
}

static void check_matrix(suite *s, tb__quant_format format, tb_dtype dtype, int64_t rows, int64_t columns) {
    static matrix m;
    static tb__move moves[MOST_BANDS];
    char what[128];
    make_matrix(s, &m, format, dtype, rows, columns);
    snprintf(what, sizeof what, "%s of %s, %" PRId64 " x %" PRId64, tb__quant_name(format.kind), tb_dtype_name(dtype),
             rows, columns);
    check_amax(s, &m, moves);
    size_t n = list_bands(s, &m, TB__MOVE_QUANTISE, moves);
    tb__job *job;
    assert_ok(s->device->ops->prepare(s->device, moves, n, &job));
    memset(m.parts, POISON, sizeof m.parts); /* they were copied */
    for (int run = 0; run < 2; run++) {      /* the second one with other numbers and another scale */
        tb__fence fence = {0};
        if (run)
            fill_matrix(s, &m);
        assert_ok(s->device->ops->run(s->device, job, &(tb__run){0}, &fence));
        expect_quantised(&m);
        wait_for_one(s, &fence);
        if (fence.status != TB_OK)
            fail_msg("%s: %s: %s", what, tb_status_string(fence.status), fence.why);
        check_area(s, &m.quantised, what);
        check_area(s, &m.plain, what);
    }
    s->device->ops->release(s->device, job);
    n = list_bands(s, &m, TB__MOVE_DEQUANTISE, moves);
    run_moves(s, s->device, moves, n, NULL);
    expect_back(&m);
    check_area(s, &m.back, what);
    free_matrix(&m);
}

/* The plain rows are in the buffer of a run. */
static void check_buffer(suite *s, tb__quant_format format) {
    static matrix m;
    static tb__move moves[MOST_BANDS];
    make_matrix(s, &m, format, TB_BF16, 130, 96);
    size_t n = list_bands(s, &m, TB__MOVE_QUANTISE, moves);
    for (size_t i = 0; i < n; i++) {
        moves[i].src_mapping = in_buffer;
        m.srcs[i] = (void *)(uintptr_t)((const uint8_t *)m.srcs[i] - m.plain.at);
    }
    run_moves(s, s->device, moves, n, m.plain.at);
    expect_quantised(&m);
    check_area(s, &m.quantised, "quantised from a buffer");
    n = list_bands(s, &m, TB__MOVE_DEQUANTISE, moves);
    for (size_t i = 0; i < n; i++) {
        moves[i].is_dst_in_buffer = true;
        moves[i].dst = (void *)(uintptr_t)((uint8_t *)moves[i].dst - m.back.at);
    }
    run_moves(s, s->device, moves, n, m.back.at);
    expect_back(&m);
    check_area(s, &m.back, "to a buffer");
    free_matrix(&m);
}

/* Some columns of some rows, from any one on. */
static void check_columns(suite *s, tb__quant_format format) {
    static matrix m;
    static tb__move moves[MOST_BANDS];
    make_matrix(s, &m, format, TB_F32, rng_range(&s->g, 1, 150), rng_range(&s->g, 1, 80) * 30);
    run_moves(s, s->device, moves, list_bands(s, &m, TB__MOVE_QUANTISE, moves), NULL);
    expect_quantised(&m);
    tb__quant_tensor from = image_of(&m);
    size_t n = list_bands(s, &m, TB__MOVE_DEQUANTISE, moves), size = number_size(m.back_dtype);
    for (size_t i = 0; i < n; i++) {
        int64_t first = rng_range(&s->g, 0, m.columns), columns = rng_range(&s->g, 0, m.columns - first);
        m.parts[i].first_column = first;
        moves[i].len[1] = columns;
        for (int64_t r = m.parts[i].first; r < m.parts[i].first + moves[i].len[0]; r++) {
            for (int64_t c = 0; c < columns; c++)
                number_store(m.back_dtype, m.back.image + m.back_offset + (size_t)(r * m.stride + c) * size,
                             quantised_value(&from, r, first + c, m.back_dtype));
        }
    }
    run_moves(s, s->device, moves, n, NULL);
    check_area(s, &m.back, "some columns");
    free_matrix(&m);
}

/* Data and scales are in the buffer of a run. */
static void check_to_buffer(suite *s, tb__quant_format format) {
    static matrix m;
    static tb__move moves[MOST_BANDS];
    make_matrix(s, &m, format, TB_F16, 140, 64);
    size_t n = list_bands(s, &m, TB__MOVE_QUANTISE, moves);
    for (size_t i = 0; i < n; i++) {
        moves[i].is_dst_in_buffer = true;
        m.parts[i].data = (void *)(uintptr_t)GUARD;
        m.parts[i].scales = m.size.scale_nbytes ? (void *)(uintptr_t)m.scales_offset : NULL;
    }
    run_moves(s, s->device, moves, n, m.quantised.at);
    expect_quantised(&m);
    check_area(s, &m.quantised, "quantised to a buffer");
    free_matrix(&m);
}

void check_quantised(suite *s) {
    for (int f = 0; f < NFORMATS; f++) {
        bool is_even = formats[f].kind == TB__QUANT_NVFP4;
        for (int d = 0; d < 3; d++) {
            for (int i = 0; i < 2; i++) {
                int64_t rows = i == 0 ? rng_range(&s->g, 1, 4) : rng_range(&s->g, 1, 200 / LESS);
                int64_t columns = i == 0 ? rng_range(&s->g, 1, 10) * 32 : rng_range(&s->g, 1, 200);
                check_matrix(s, formats[f], dtypes[d], rows, columns + (is_even && columns % 2));
            }
            check_matrix(s, formats[f], dtypes[d], 5, 8 * rng_range(&s->g, 950, 1030)); /* rows of whole tiles */
        }
        check_matrix(s, formats[f], TB_F32, 0, 64);
        if (s->traits->nunits <= 1) { /* a buffer must be where all units reach it */
            check_buffer(s, formats[f]);
            check_to_buffer(s, formats[f]);
        }
        for (int i = 0; i < 4; i++)
            check_columns(s, formats[f]);
    }
}

/* The sentence says which element, counted in the tensor. */
static void check_bad_element(suite *s, tb__quant_format format, tb_dtype dtype, uint64_t bits) {
    static matrix m;
    static tb__move moves[MOST_BANDS];
    char text[64];
    make_matrix(s, &m, format, dtype, 200, 160);
    int64_t row = rng_range(&s->g, 0, 199), column = rng_range(&s->g, 0, 159);
    number_store(dtype, plain_at(&m, row, column), bits);
    put_area(s, &m.plain);
    size_t n = list_bands(s, &m, TB__MOVE_QUANTISE, moves);
    tb__fence fence = try_moves(s, s->device, moves, n);
    snprintf(text, sizeof text, "row %" PRId64 ", column %" PRId64 " ", row, column);
    assert_int_equal(fence.status, TB_INVALID);
    if (!strstr(fence.why, text))
        fail_msg("'%s' does not say %s", fence.why, text);
    float amax = 0;
    n = list_bands(s, &m, TB__MOVE_AMAX, moves);
    for (size_t i = 0; i < n; i++)
        moves[i].amax = &amax;
    fence = try_moves(s, m.plain.owner == s->host ? s->host : s->device, moves, n);
    assert_int_equal(fence.status, TB_INVALID);
    assert_non_null(strstr(fence.why, "not finite"));
    /* What was there before, and beside it, is as it was. */
    check_area(s, &m.plain, "the source");
    uint8_t *got = malloc(m.quantised.nbytes);
    assert_non_null(got);
    get_area(s, &m.quantised, got);
    for (size_t i = 0; i < GUARD; i++)
        assert_true(got[i] == POISON && got[m.quantised.nbytes - 1 - i] == POISON);
    free(got);
    free_matrix(&m);
}

void check_not_finite(suite *s) {
    static const uint64_t bad[3][3] = {{0x7f800000, 0xff800000, 0x7fc00001}, /* f32 */
                                       {0x7c00, 0xfc00, 0xfe01},
                                       {0x7f80, 0xff80, 0x7fc1}};
    for (int f = 0; f < NFORMATS; f++) {
        for (int d = 0; d < 3; d++)
            check_bad_element(s, formats[f], dtypes[d], bad[d][rng_range(&s->g, 0, 2)]);
    }
    /* A scale that can't be: prepare or the fence says so. */
    static matrix m;
    static tb__move moves[MOST_BANDS];
    make_matrix(s, &m, (tb__quant_format){.kind = TB__QUANT_FP8_TENSOR}, TB_F32, 4, 4);
    m.scale = 0;
    tb__fence fence = try_moves(s, s->device, moves, list_bands(s, &m, TB__MOVE_QUANTISE, moves));
    assert_int_equal(fence.status, TB_INVALID);
    assert_non_null(strstr(fence.why, "scale"));
    check_area(s, &m.quantised, "with a bad scale");
    free_matrix(&m);
}
