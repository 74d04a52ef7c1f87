/* Quantisers: both sets of kernels against the reference, against other programs' results, in bands, on threads; and
 * refused input. */
#include "device/host/quant.h"

#include "device/host/kernel.h"
#include "device/host/workers.h"

#include "../tests/support/quantised.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { GUARD = 64 };

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
enum { NFORMATS = sizeof formats / sizeof *formats };

/* The last of those with AVX-512 stands for all: they quantise alike. */
static const tb__kernels *set_of(int set) {
    const tb__kernels *avx512 = tb__kernels_avx512();
    const tb__kernels *sets[] = {&tb__kernels_portable, tb__kernels_avx2(),
                                 avx512 ? &avx512[TB__AVX512_WAYS - 1] : NULL};
    return sets[set];
}

enum { NSETS = 3 };

static bool use_set(int set) {
    tb__kernels_force(set_of(set));
    return set_of(set) != NULL;
}

/* A quantised tensor in memory of its own, `shift` bytes off what malloc gives, with guards around its data and
 * scales. */
typedef struct held {
    tb__quant_tensor t;
    tb__quant_size size;
    uint8_t *data, *scales;
    int shift;
} held;

static held hold(tb__quant_format format, int64_t rows, int64_t columns, float scale, int shift) {
    held h = {.t = {.format = format, .rows = rows, .columns = columns, .scale = scale}, .shift = shift};
    assert_int_equal(tb__quant_measure(&format, rows, columns, &h.size), TB_OK);
    h.data = malloc((size_t)h.size.data_nbytes + (size_t)shift + 2 * GUARD);
    h.scales = malloc((size_t)h.size.scale_nbytes + 2 * GUARD);
    memset(h.data, 0xa5, (size_t)h.size.data_nbytes + (size_t)shift + 2 * GUARD);
    memset(h.scales, 0xa5, (size_t)h.size.scale_nbytes + 2 * GUARD);
    h.t.data = h.data + GUARD + shift;
    h.t.scales = h.scales + GUARD;
    return h;
}

static void drop(held *h) {
    for (int i = 0; i < GUARD; i++) {
        assert_int_equal(h->data[h->shift + i], 0xa5);
        assert_int_equal(h->data[GUARD + h->shift + h->size.data_nbytes + i], 0xa5);
        assert_int_equal(h->scales[i], 0xa5);
        assert_int_equal(h->scales[GUARD + h->size.scale_nbytes + i], 0xa5);
    }
    free(h->data);
    free(h->scales);
}

static void check_same(const held *a, const held *b, const char *what) {
    const uint8_t *x = a->t.data, *y = b->t.data;
    for (int64_t i = 0; i < a->size.data_nbytes; i++) {
        if (x[i] != y[i])
            fail_msg("%s, %s: data byte %ld of [%ld, %ld] is 0x%02x, not 0x%02x", what,
                     tb__quant_name(a->t.format.kind), (long)i, (long)a->t.rows, (long)a->t.columns, x[i], y[i]);
    }
    x = a->t.scales;
    y = b->t.scales;
    for (int64_t i = 0; i < a->size.scale_nbytes; i++) {
        if (x[i] != y[i])
            fail_msg("%s, %s: scale byte %ld of [%ld, %ld] is 0x%02x, not 0x%02x", what,
                     tb__quant_name(a->t.format.kind), (long)i, (long)a->t.rows, (long)a->t.columns, x[i], y[i]);
    }
}

/* Rows with a gap after the columns; NaN in the gaps, which must not be read. */
static tb__quant_rows make_rows(tb_dtype dtype, int64_t rows, int64_t columns, int64_t gap) {
    tb__quant_rows from = {.dtype = dtype, .stride = columns + gap};
    size_t nbytes = (size_t)(rows * from.stride) * number_size(dtype);
    from.data = malloc(nbytes + 1);
    memset(from.data, 0xff, nbytes);
    return from;
}

static void set(const tb__quant_rows *rows, int64_t row, int64_t column, uint64_t bits) {
    size_t size = number_size(rows->dtype);
    number_store(rows->dtype, (char *)rows->data + (size_t)(row * rows->stride + column) * size, bits);
}

static uint64_t get(const tb__quant_rows *rows, int64_t row, int64_t column) {
    size_t size = number_size(rows->dtype);
    return number_load(rows->dtype, (char *)rows->data + (size_t)(row * rows->stride + column) * size);
}

static uint64_t bits_as(tb_dtype dtype, double value) {
    float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return number_cast(TB_F32, dtype, bits);
}

static bool is_finite(tb_dtype dtype, uint64_t bits) {
    return isfinite(number_value(dtype, bits));
}

/* Numbers as in real blocks: about as large as their neighbours, or much smaller; halves between codes; zeros. Then
 * another 16 of another magnitude. */
static void fill(const tb__quant_rows *rows, int64_t nrows, int64_t ncolumns, rng *g) {
    double unit = 1;
    for (int64_t r = 0; r < nrows; r++) {
        for (int64_t c = 0; c < ncolumns; c++) {
            int range = rows->dtype == TB_F16 ? 24 : 149;
            if (c % 16 == 0 && rng_range(g, 0, 3) != 0)
                unit = rng_range(g, 0, 9) ? ldexp(1, (int)rng_range(g, -range, range * 5 / 6)) : 0;
            double value = (double)rng_range(g, -(1 << 24), 1 << 24) * 0x1p-24 * unit;
            uint64_t bits;
            switch (rng_range(g, 0, 7)) {
            case 0: /* at, or next to, the middle between two codes */
                value = (double)(rng_range(g, -64, 64)) * ldexp(unit, (int)-rng_range(g, 1, 16));
                bits = bits_as(rows->dtype, value) + (uint64_t)rng_range(g, 0, 1);
                break;
            case 1:
                bits = bits_as(rows->dtype, rng_range(g, 0, 1) ? -0.0 : 0.0);
                break;
            case 2:
                bits = rng_range(g, 0, 5) ? bits_as(rows->dtype, value * 0x1p-7) : number_random(rows->dtype, g);
                break;
            default:
                bits = bits_as(rows->dtype, value);
            }
            set(rows, r, c, is_finite(rows->dtype, bits) ? bits : bits_as(rows->dtype, 1));
        }
    }
}

/* The scale that the format wants from its caller. */
static float scale_for(const tb__quant_format *format, const tb__quant_rows *from, int64_t rows, int64_t columns) {
    float amax = -1, scale = 0;
    assert_int_equal(tb__quant_amax(from, rows, columns, &amax), TB_OK);
    float expected = 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++)
            expected = fmaxf(expected, fabsf((float)number_value(from->dtype, get(from, r, c))));
    }
    assert_true(amax == expected);
    if (format->kind == TB__QUANT_NVFP4 || format->kind == TB__QUANT_FP8_TENSOR)
        assert_int_equal(tb__quant_scale(format, amax, &scale), TB_OK);
    return scale;
}

static void check_back(const held *h) {
    for (int d = 0; d < 3; d++) {
        int64_t rows = h->t.rows, columns = h->t.columns, first = rows / 3;
        tb__quant_rows to = make_rows(dtypes[d], rows, columns, d);
        assert_int_equal(tb__quant_dequantise(&h->t, first, rows - first, &to), TB_OK);
        for (int64_t r = first; r < rows; r++) {
            for (int64_t c = 0; c < columns + d; c++) {
                uint64_t expected = UINT64_MAX >> (64 - tb_dtype_bits(dtypes[d]));
                if (c < columns)
                    expected = quantised_value(&h->t, r, c, dtypes[d]);
                if (get(&to, r - first, c) != expected)
                    fail_msg("%s to %s: [%ld, %ld] is 0x%lx, not 0x%lx", tb__quant_name(h->t.format.kind),
                             tb_dtype_name(dtypes[d]), (long)r, (long)c, (unsigned long)get(&to, r - first, c),
                             (unsigned long)expected);
            }
        }
        free(to.data);
    }
}

/* All sets give what the reference gives. */
static void check_case(tb__quant_format format, const tb__quant_rows *from, int64_t rows, int64_t columns, float scale,
                       int shift) {
    held expected = hold(format, rows, columns, scale, 0);
    quantised_make(&expected.t, from);
    for (int s = 0; s < NSETS; s++) {
        if (!use_set(s))
            continue;
        held got = hold(format, rows, columns, scale, shift);
        assert_int_equal(tb__quant_quantise(&got.t, 0, rows, from), TB_OK);
        check_same(&got, &expected, set_of(s)->name);
        check_back(&got);
        drop(&got);
    }
    drop(&expected);
    tb__kernels_force(NULL);
}

static void test_random(void **state) {
    (void)state;
    rng g = {test_seed()};
    int64_t cases = test_cases(300);
    tb__workers_set(2);
    for (int64_t i = 0; i < cases; i++) {
        const tb__quant_format *format = &formats[i % NFORMATS];
        tb_dtype dtype = dtypes[rng_range(&g, 0, 2)];
        bool is_tall = rng_range(&g, 0, 5) == 0;
        int64_t rows = is_tall ? rng_range(&g, 100, 300) : rng_range(&g, 0, 9);
        int64_t columns = is_tall ? rng_range(&g, 0, 90) : rng_range(&g, 0, 400);
        if (rng_range(&g, 0, 3) == 0)
            columns -= columns % 32; /* whole blocks */
        if (format->kind == TB__QUANT_NVFP4)
            columns += columns % 2;
        tb__quant_rows from = make_rows(dtype, rows, columns, rng_range(&g, 0, 1) * rng_range(&g, 1, 40));
        fill(&from, rows, columns, &g);
        float scale = scale_for(format, &from, rows, columns);
        check_case(*format, &from, rows, columns, scale, (int)rng_range(&g, 0, 1) * (int)rng_range(&g, 1, 31));
        /* A group's scale is larger than the tensor's own; one that is too small saturates. */
        if (scale > 0)
            check_case(*format, &from, rows, columns, (float)ldexp(scale * 1.3F, (int)rng_range(&g, 0, 8) - 4) + 1e-30F,
                       0);
        free(from.data);
    }
}

/* Every bf16 up to the amax of its block, for exponents that are usual and for those at both ends. */
static void test_all_bf16(void **state) {
    (void)state;
    static const uint32_t amax[] = {0x0001, 0x0040, 0x007f, 0x0080, 0x0460, 0x0461, 0x0480, 0x0580,
                                    0x05e0, 0x0600, 0x0661, 0x067f, 0x0680, 0x0700, 0x0880, 0x0900,
                                    0x0960, 0x0980, 0x0a7f, 0x3f80, 0x3fe0, 0x3fe1, 0x7f7f};
    for (size_t i = 0; i < sizeof amax / sizeof *amax; i++) {
        uint32_t least = amax[i] > 40 * 128 ? amax[i] - 40 * 128 : 0, n = amax[i] - least + 1;
        int64_t columns = (n + 15) / 16 * 32;
        tb__quant_rows from = make_rows(TB_BF16, 1, columns, 0);
        for (int64_t c = 0; c < columns; c++) {
            uint32_t bits = least + (uint32_t)(c / 2);
            bits = c % 32 == 0 || bits > amax[i] ? amax[i] : bits;
            set(&from, 0, c, bits | (c % 2 ? 0x8000 : 0));
        }
        check_case(formats[0], &from, 1, columns, 0, 0);
        check_case(formats[1], &from, 1, columns, 0, 0);
        free(from.data);
    }
}

/* Around the places where exponents change: a power of two, and 1.75 times one, for every exponent. */
static void test_exponents(void **state) {
    (void)state;
    static const uint32_t around[] = {0, 1, 0x5fffff, 0x600000, 0x600001, 0x7fffff};
    enum { COLUMNS = 255 * 6 * 32 };
    tb__quant_rows from = make_rows(TB_F32, 1, COLUMNS, 0);
    for (int64_t c = 0; c < COLUMNS; c++) {
        uint32_t block = (uint32_t)(c / 32), amax = (block / 6) << 23 | around[block % 6];
        uint32_t bits = (uint32_t)(c % 32) * (amax / 31);
        set(&from, 0, c, c % 32 == 7 ? amax : bits > amax ? amax : bits);
    }
    for (int i = 0; i < 3; i++)
        check_case(formats[i], &from, 1, COLUMNS, 0, 0);
    for (int64_t block = 0; block < COLUMNS / 32; block++) {
        tb__quant_rows one = {.data = (float *)from.data + 32 * block, .dtype = TB_F32, .stride = 32};
        for (int i = 3; i < 5; i++)
            check_case(formats[i], &one, 1, 32, 0, 0);
        check_case(formats[7], &one, 1, 32, scale_for(&formats[7], &one, 1, 32), 0);
    }
    free(from.data);
}

/* NVFP4's block scales: the middles between two of them, and what is next to those. */
static void test_scale_ties(void **state) {
    (void)state;
    enum { COLUMNS = 126 * 3 * 16 };
    tb__quant_rows from = make_rows(TB_F32, 1, COLUMNS, 0);
    for (unsigned block = 0; block < 126 * 3; block++) {
        unsigned code = block / 3;
        double middle = (number_value(TB_F8E4M3, code) + number_value(TB_F8E4M3, code + 1)) / 2;
        for (int k = 0; k < 16; k++)
            set(&from, 0, block * 16 + k, bits_as(TB_F32, middle * 6 * (k - 7) / 9) + (k > 7 ? block % 3 - 1 : 0));
        set(&from, 0, block * 16, bits_as(TB_F32, -6 * middle) + block % 3 - 1);
    }
    check_case(formats[7], &from, 1, COLUMNS, 1, 0);
    free(from.data);
}

static void check_golden(const json_t *block, tb__quant_format format, const char *rule) {
    const json_t *in = json_object_get(block, "bf16"), *golden = json_object_get(block, rule);
    const json_t *codes = json_object_get(golden, "e4m3");
    assert_int_equal(json_array_size(in), 32);
    assert_int_equal(json_array_size(codes), 32);
    tb__quant_rows bf16 = make_rows(TB_BF16, 1, 32, 0), f32 = make_rows(TB_F32, 1, 32, 0);
    for (size_t i = 0; i < 32; i++) {
        uint64_t bits = (uint16_t)json_integer_value(json_array_get(in, i));
        set(&bf16, 0, (int64_t)i, bits);
        set(&f32, 0, (int64_t)i, bits << 16);
    }
    const tb__quant_rows *sources[] = {&bf16, &f32};
    for (int k = 0; k < 4; k++) {
        if (!use_set(k / 2))
            continue;
        held h = hold(format, 1, 32, 0, 0);
        assert_int_equal(tb__quant_quantise(&h.t, 0, 1, sources[k % 2]), TB_OK);
        assert_int_equal(*(uint8_t *)h.t.scales, json_integer_value(json_object_get(golden, "e8m0")));
        for (size_t i = 0; i < 32; i++)
            assert_int_equal(((uint8_t *)h.t.data)[i], json_integer_value(json_array_get(codes, i)));
        drop(&h);
    }
    tb__kernels_force(NULL);
    free(bf16.data);
    free(f32.data);
}

static void test_golden(void **state) {
    (void)state;
    char path[4096], *line = NULL;
    const char *folder = getenv("TB_GOLDEN");
    snprintf(path, sizeof path, "%s/mxfp8.jsonl", folder ? folder : "tests/golden");
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t size = 0, nlines = 0;
    for (; getline(&line, &size, file) > 0; nlines++) {
        json_t *block = json_loads(line, 0, NULL);
        assert_non_null(block);
        check_golden(block, formats[0], "ceil");
        check_golden(block, formats[1], "floor");
        json_decref(block);
    }
    assert_int_equal(nlines, 200);
    free(line);
    fclose(file);
}

/* Band by band from a small buffer, with any number of threads, past the cache or not: always the same. */
static void check_bands_and_threads(rng *g, int64_t columns, int64_t gap) {
    enum { ROWS = 300 };
    for (int i = 0; i < NFORMATS; i++) {
        tb__quant_rows from = make_rows(TB_BF16, ROWS, columns, gap);
        fill(&from, 32, columns, g);
        size_t row_bytes = (size_t)from.stride * 2;
        for (size_t r = 32; r < ROWS; r++)
            memcpy((char *)from.data + r * row_bytes, (char *)from.data + (r * 7 % 32) * row_bytes, row_bytes);
        float scale = scale_for(&formats[i], &from, 32, columns);
        held whole = hold(formats[i], ROWS, columns, scale, 0), again = hold(formats[i], ROWS, columns, scale, 5);
        tb__workers_set(1);
        use_set(0);
        assert_int_equal(tb__quant_quantise(&whole.t, 0, ROWS, &from), TB_OK);
        tb__kernels_force(NULL);
        tb__workers_set(3);
        assert_int_equal(tb__quant_quantise(&again.t, 0, ROWS, &from), TB_OK);
        check_same(&again, &whole, "threads");
        memset(again.t.data, 0x77, (size_t)again.size.data_nbytes);
        memset(again.t.scales, 0x77, (size_t)again.size.scale_nbytes);
        /* Last band first. */
        int64_t step = again.size.band == 1 ? 97 : again.size.band, last = (ROWS - 1) / step * step;
        for (int64_t first = last; first >= 0; first -= step) {
            tb__quant_rows part = from;
            part.data = (char *)from.data + (size_t)first * row_bytes;
            int64_t rows = ROWS - first < step ? ROWS - first : step;
            assert_int_equal(tb__quant_quantise(&again.t, first, rows, &part), TB_OK);
        }
        check_same(&again, &whole, "bands");
        drop(&whole);
        drop(&again);
        free(from.data);
    }
}

static void test_bands_and_threads(void **state) {
    (void)state;
    rng g = {test_seed()};
    check_bands_and_threads(&g, 8192 + 1024 + 38, 10);
    check_bands_and_threads(&g, 160, 0); /* rows of whole blocks without gaps */
}

/* Enough to be written past the cache, aligned for it and not. */
static void test_large(void **state) {
    (void)state;
    rng g = {test_seed()};
    enum { ROWS = 4097, COLUMNS = 4096 };
    tb__quant_rows from = make_rows(TB_BF16, ROWS, COLUMNS, 0);
    fill(&from, 64, COLUMNS, &g);
    for (size_t r = 64; r < ROWS; r++)
        memcpy((char *)from.data + r * 2 * COLUMNS, (char *)from.data + (r * 11 % 64) * 2 * COLUMNS, 2 * COLUMNS);
    tb__workers_set(2);
    static const int one_of_each[] = {0, 3, 5, 7};
    for (int k = 0; k < 4; k++) {
        int i = one_of_each[k];
        held expected = hold(formats[i], ROWS, COLUMNS, 1.5F, 0);
        use_set(0);
        assert_int_equal(tb__quant_quantise(&expected.t, 0, ROWS, &from), TB_OK);
        tb__kernels_force(NULL);
        for (size_t at = 0; at <= 33; at += at ? 1 : 32) { /* from a multiple of 64 */
            held got = hold(formats[i], ROWS, COLUMNS, 1.5F, 0);
            got.t.data = (uint8_t *)got.t.data + (at - (uintptr_t)got.t.data) % 64;
            assert_int_equal(tb__quant_quantise(&got.t, 0, ROWS, &from), TB_OK);
            check_same(&got, &expected, at % 32 ? "unaligned" : "aligned");
            free(got.data);
            free(got.scales);
        }
        drop(&expected);
    }
    free(from.data);
}

/* Each code of E4M3 under each E8M0 scale, NaN among them, and each of E2M1 under each E4M3. */
static void test_all_codes(void **state) {
    (void)state;
    held mxfp8 = hold(formats[0], 256, 256, 0, 0), nvfp4 = hold(formats[7], 127, 16, 0.37F, 0);
    for (int64_t r = 0; r < 256; r++) {
        memset((uint8_t *)mxfp8.t.scales + r * 8, (int)r, 8);
        for (int64_t c = 0; c < 256; c++)
            ((uint8_t *)mxfp8.t.data)[r * 256 + c] = (uint8_t)c;
    }
    for (int64_t r = 0; r < 127; r++) {
        ((uint8_t *)nvfp4.t.scales)[r] = (uint8_t)r;
        for (int64_t k = 0; k < 8; k++)
            ((uint8_t *)nvfp4.t.data)[r * 8 + k] = (uint8_t)(2 * k | (2 * k + 1) << 4);
    }
    float *got = malloc(256 * 256 * sizeof *got);
    tb__quant_rows to = {.data = got, .dtype = TB_F32, .stride = 256};
    for (int s = 0; s < NSETS; s++) {
        if (!use_set(s))
            continue;
        assert_int_equal(tb__quant_dequantise(&mxfp8.t, 0, 256, &to), TB_OK);
        for (int i = 0; i < 256 * 256; i++) {
            double expected = i / 256 == 255 ? NAN : number_value(TB_F8E4M3, i % 256U) * ldexp(1, i / 256 - 127);
            assert_true(isnan(expected) ? isnan(got[i]) : got[i] == (float)expected);
            assert_true(isnan(expected) || !signbit(got[i]) == !signbit(expected));
        }
        check_back(&nvfp4);
    }
    tb__kernels_force(NULL);
    free(got);
    drop(&mxfp8);
    drop(&nvfp4);
}

static void test_known_values(void **state) {
    (void)state;
    /* A nibble's order and ties, NVFP4's scales for an amax of 6 * 448: global 1, block scale 448. */
    float x[32] = {2688, -2688, 224, 112, 336, -0.0F, 560, 784, 1120, 1568, 2240, 2016, 1, -1, 448, 672, 3};
    tb__quant_rows from = {.data = x, .dtype = TB_F32, .stride = 32};
    float scale = scale_for(&formats[7], &from, 1, 32);
    assert_true(scale == 1);
    held h = hold(formats[7], 1, 32, scale, 0);
    assert_int_equal(tb__quant_quantise(&h.t, 0, 1, &from), TB_OK);
    static const uint8_t data[16] = {0xf7, 0x01, 0x82, 0x42, 0x64, 0x66, 0x80, 0x32, 0x07};
    assert_memory_equal(h.t.data, data, 16);
    assert_int_equal(((uint8_t *)h.t.scales)[0], 0x7e);
    assert_int_equal(((uint8_t *)h.t.scales)[1], 0x30);
    drop(&h);
    /* Zeros: E8M0 byte 0, f32 scale 1, E4M3 byte 0; signs stay. */
    memset(x, 0, sizeof x);
    x[1] = -0.0F;
    for (int i = 0; i < NFORMATS; i++) {
        scale = scale_for(&formats[i], &from, 1, 32);
        h = hold(formats[i], 1, 32, scale, 0);
        assert_int_equal(tb__quant_quantise(&h.t, 0, 1, &from), TB_OK);
        bool is_nvfp4 = formats[i].kind == TB__QUANT_NVFP4;
        assert_int_equal(((uint8_t *)h.t.data)[0], is_nvfp4 ? 0x80 : 0);
        assert_int_equal(((uint8_t *)h.t.data)[1], is_nvfp4 ? 0 : 0x80);
        if (formats[i].kind == TB__QUANT_FP8_BLOCK)
            assert_true(*(float *)h.t.scales == 1);
        else if (h.size.scale_nbytes > 0)
            assert_int_equal(*(uint8_t *)h.t.scales, 0);
        else
            assert_true(scale == 1);
        drop(&h);
    }
}

static void check_not_finite(int columns, int64_t gap) {
    enum { ROWS = 140 };
    static const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xff81};
    tb__quant_rows from = make_rows(TB_BF16, ROWS, columns, gap);
    for (int64_t r = 0; r < ROWS; r++) {
        for (int64_t c = 0; c < columns; c++)
            set(&from, r, c, 0x3f80 + (uint64_t)(r + c) % 100);
    }
    tb__workers_set(3);
    for (int i = 0; i < NFORMATS; i++) {
        for (int k = 0; k < 2; k++) {
            if (!use_set(k))
                continue;
            /* The first in the order of rows, wherever the others are. */
            const int64_t at[3][2] = {{130 + k, columns - 10 + k}, {131 + k, 5}, {139, columns - 1}};
            for (int b = 0; b < 3; b++)
                set(&from, at[b][0], at[b][1], bad[(i + 2 * k) % 4]);
            held h = hold(formats[i], ROWS + 128, columns, 1, 0);
            char where[80], shifted[80];
            snprintf(where, sizeof where, "row %d, column %d is not finite", 130 + k, columns - 10 + k);
            snprintf(shifted, sizeof shifted, "row %d, column %d is not finite", 258 + k, columns - 10 + k);
            float amax = -1;
            assert_int_equal(tb__quant_amax(&from, ROWS, columns, &amax), TB_INVALID);
            assert_non_null(strstr(tb_error_detail(), where));
            assert_true(amax == -1);
            assert_int_equal(tb__quant_quantise(&h.t, 128, ROWS, &from), TB_INVALID);
            assert_non_null(strstr(tb_error_detail(), shifted));
            for (int b = 0; b < 3; b++)
                set(&from, at[b][0], at[b][1], 0x3f80);
            assert_int_equal(tb__quant_quantise(&h.t, 128, ROWS, &from), TB_OK);
            drop(&h);
        }
    }
    tb__kernels_force(NULL);
    free(from.data);
}

static void test_not_finite(void **state) {
    (void)state;
    check_not_finite(9000, 3);
    check_not_finite(160, 0);
}

static void refuse(tb_status status, tb_status expected, const char *sentence) {
    assert_int_equal(status, expected);
    if (!strstr(tb_error_detail(), sentence))
        fail_msg("\"%s\" does not have \"%s\"", tb_error_detail(), sentence);
}

static void test_refusals(void **state) {
    (void)state;
    tb__quant_size size;
    tb__quant_format bad[] = {{.kind = 0},
                              {.kind = 9},
                              {.kind = TB__QUANT_NVFP4, .is_floor = true},
                              {.kind = TB__QUANT_MXFP8, .is_power_of_two = true},
                              {.kind = TB__QUANT_FP8_BLOCK, .is_swizzled = true}};
    static const char *const sentences[] = {"0 is no kind", "9 is no kind", "no exponent rule", "powers of two",
                                            "tiles"};
    for (int i = 0; i < 5; i++)
        refuse(tb__quant_measure(&bad[i], 1, 2, &size), TB_INVALID, sentences[i]);
    refuse(tb__quant_measure(&formats[7], 4, 33, &size), TB_REFUSED, "rows of 33 would end inside one");
    refuse(tb__quant_measure(&formats[0], -1, 32, &size), TB_INVALID, "-1 x 32");
    refuse(tb__quant_measure(&formats[3], INT64_MAX, 32, &size), TB_INVALID, "too large for fp8_block");
    refuse(tb__quant_measure(&formats[3], (int64_t)1 << 31, (int64_t)1 << 31, &size), TB_INVALID, "too large");

    float x[256] = {0}, scale;
    held h = hold(formats[3], 300, 1, 0, 0), t = hold(formats[5], 300, 1, 0, 0);
    tb__quant_rows from = {.data = x, .dtype = TB_F32, .stride = 1};
    refuse(tb__quant_quantise(&h.t, 64, 128, &from), TB_INVALID,
           "rows 64-192 begin or end inside a block of fp8_block");
    refuse(tb__quant_quantise(&h.t, 0, 100, &from), TB_INVALID, "begin or end inside");
    refuse(tb__quant_quantise(&h.t, 256, 45, &from), TB_INVALID, "45 rows from 256 on are not in a tensor of 300");
    refuse(tb__quant_quantise(&h.t, -128, 128, &from), TB_INVALID, "not in a tensor");
    refuse(tb__quant_quantise(&t.t, 0, 1, &from), TB_INVALID, "is 0; it must be positive and finite");
    refuse(tb__quant_dequantise(&t.t, 0, 1, &from), TB_INVALID, "must be positive and finite");
    from.stride = 0;
    refuse(tb__quant_quantise(&h.t, 0, 128, &from), TB_INVALID, "can't begin every 0");
    from.stride = INT64_MAX;
    refuse(tb__quant_quantise(&h.t, 0, 128, &from), TB_INVALID, "can't begin every");
    from = (tb__quant_rows){.data = x, .dtype = TB_F64, .stride = 1};
    refuse(tb__quant_quantise(&h.t, 0, 128, &from), TB_INVALID, "not f64");
    refuse(tb__quant_dequantise(&h.t, 0, 128, &from), TB_INVALID, "not f64");
    refuse(tb__quant_amax(&from, 1, 1, &scale), TB_INVALID, "not f64");
    refuse(tb__quant_scale(&formats[0], 1, &scale), TB_INVALID, "mxfp8 has no scale for the whole");
    refuse(tb__quant_scale(&formats[5], -1, &scale), TB_INVALID, "-1");
    refuse(tb__quant_scale(&formats[5], INFINITY, &scale), TB_INVALID, "inf");
    refuse(tb__quant_scale(&formats[7], NAN, &scale), TB_INVALID, "nan");
    drop(&h);
    drop(&t);
}

static void test_sizes(void **state) {
    (void)state;
    static const struct {
        int format;
        int64_t rows, columns, data, scale_rows, scale_columns, scales;
    } known[] = {
        {0, 3, 65, 195, 3, 3, 9},      {2, 3, 65, 195, 3, 3, 512}, {2, 129, 160, 20640, 129, 5, 2048},
        {3, 129, 128, 16512, 2, 1, 8}, {3, 0, 5, 0, 0, 1, 0},      {5, 7, 9, 63, 0, 0, 0},
        {7, 5, 34, 85, 5, 3, 15},      {8, 5, 34, 85, 5, 3, 512},  {0, 4, 0, 0, 4, 0, 0},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        tb__quant_size size;
        assert_int_equal(tb__quant_measure(&formats[known[i].format], known[i].rows, known[i].columns, &size), TB_OK);
        assert_int_equal(size.data_nbytes, known[i].data);
        assert_int_equal(size.scale_rows, known[i].scale_rows);
        assert_int_equal(size.scale_columns, known[i].scale_columns);
        assert_int_equal(size.scale_nbytes, known[i].scales);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),    cmocka_unit_test(test_known_values), cmocka_unit_test(test_golden),
        cmocka_unit_test(test_all_bf16), cmocka_unit_test(test_exponents),    cmocka_unit_test(test_scale_ties),
        cmocka_unit_test(test_random),   cmocka_unit_test(test_all_codes),    cmocka_unit_test(test_bands_and_threads),
        cmocka_unit_test(test_large),    cmocka_unit_test(test_not_finite),   cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
