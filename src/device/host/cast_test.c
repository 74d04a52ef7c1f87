/* Casts, over all inputs of the narrow formats and a structured sample of f32, by every set of kernels. */
#include "device/host/kernel.h"
#include "device/host/move.h"

#include "../tests/support/numbers.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LOW_PATTERNS = 4 };
#else
enum { LOW_PATTERNS = 16 };
#endif

static const tb_dtype floats[] = {TB_F32, TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2, TB_F64};
static const tb_dtype integers[] = {TB_U8, TB_U16, TB_U32, TB_U64, TB_I8, TB_I16, TB_I32, TB_I64};
enum { NFLOATS = sizeof floats / sizeof *floats, NINTEGERS = sizeof integers / sizeof *integers };

static void cast(void *dst, tb_dtype to, const void *src, tb_dtype from, int64_t n) {
    const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    tb__move copy = {
        .ndim = 1,
        .len = {n},
        .dst = dst,
        .dst_stride = {1},
        .nsrc = 1,
        .src = &src,
        .src_stride = stride,
        .src_dtype = from,
        .wire_dtype = to,
        .dst_dtype = to,
    };
    assert_int_equal(tb__moves_run(&copy, 1), TB_OK);
}

/* Casts the row by every set and compares with the reference. */
static void check_row(tb_dtype from, tb_dtype to, const void *row, size_t n) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    size_t from_size = number_size(from), size = number_size(to);
    uint8_t *got[TB__KERNEL_SETS_MAX];
    for (int s = 0; s < nsets; s++) {
        got[s] = malloc(n * size);
        tb__kernels_force(sets[s]);
        cast(got[s], to, row, from, (int64_t)n);
    }
    tb__kernels_force(NULL);
    for (size_t i = 0; i < n; i++) {
        uint64_t in = number_load(from, (const uint8_t *)row + i * from_size), expected = number_cast(from, to, in);
        for (int s = 0; s < nsets; s++) {
            uint64_t bits = number_load(to, got[s] + i * size);
            if (bits != expected)
                fail_msg("%s 0x%" PRIx64 " to %s: 0x%" PRIx64 ", not 0x%" PRIx64 " (%s)", tb_dtype_name(from), in,
                         tb_dtype_name(to), bits, expected, sets[s]->name);
        }
    }
    for (int s = 0; s < nsets; s++)
        free(got[s]);
}

static void test_narrow_inputs(void **state) {
    (void)state;
    for (int f = 1; f < NFLOATS - 1; f++) { /* all but f32 and f64 */
        size_t size = number_size(floats[f]), n = 1U << (8 * size);
        uint8_t *row = malloc(n * size);
        for (size_t i = 0; i < n; i++)
            number_store(floats[f], row + i * size, i);
        for (int t = 0; t < NFLOATS; t++)
            check_row(floats[f], floats[t], row, n);
        free(row);
    }
}

/* Every sign, exponent and upper 11 bits of the mantissa, which hold the last place and the tie of every format; the
 * lower 12 at, beside and between the ties. */
static void test_f32_inputs(void **state) {
    (void)state;
    static const uint32_t low[16] = {0,     1,     0x800, 0xfff, 0x7ff, 0x801, 0x400, 0xc00,
                                     0x555, 0xaaa, 0x123, 0xedc, 2,     0xffe, 0x3ff, 0x601};
    enum { UPPER = 1 << 11, N = UPPER * LOW_PATTERNS };
    uint32_t *row = malloc(N * sizeof *row);
    for (uint32_t head = 0; head < 512; head++) {
        for (uint32_t upper = 0; upper < UPPER; upper++) {
            for (uint32_t k = 0; k < LOW_PATTERNS; k++)
                row[upper * LOW_PATTERNS + k] = head << 23 | upper << 12 | low[k];
        }
        for (int t = 1; t < NFLOATS; t++)
            check_row(TB_F32, floats[t], row, N);
    }
    free(row);
}

/* Random f64, and the ties and overflows of f32, with what is beside them. */
static void test_f64_inputs(void **state) {
    (void)state;
    enum { N = 1 << 15 };
    rng r = {test_seed()};
    uint64_t *row = malloc(N * sizeof *row);
    for (int i = 0; i < N; i++) {
        uint64_t x = number_random(TB_F64, &r);
        if (i % 2) { /* within reach of f32, beside a tie of its last place */
            uint64_t exponent = (uint64_t)rng_range(&r, 1023 - 152, 1023 + 128);
            x = (x & 0x800fffffe0000000) | exponent << 52 | (0x10000000 + (uint64_t)rng_range(&r, -1, 1));
        }
        row[i] = x;
    }
    for (int t = 0; t < NFLOATS - 1; t++)
        check_row(TB_F64, floats[t], row, N);
    free(row);
}

/* All pairs: of 8 and 16 bits all inputs, of the others random ones. */
static void test_integers(void **state) {
    (void)state;
    enum { N = 1 << 16 };
    rng r = {test_seed()};
    uint8_t *row = malloc(N * sizeof(uint64_t));
    for (int f = 0; f < NINTEGERS; f++) {
        size_t size = number_size(integers[f]);
        for (uint64_t i = 0; i < N; i++)
            number_store(integers[f], row + i * size, size <= 2 ? i : number_random(integers[f], &r));
        for (int t = 0; t < NINTEGERS; t++)
            check_row(integers[f], integers[t], row, N);
    }
    free(row);
}

/* Rows that are narrowed together, of each length; what is between them stays. */
static void test_rows(void **state) {
    (void)state;
    enum { ROWS = 9, MOST = 300, NBYTES = ROWS * 4 * (MOST + 64) };
    rng r = {test_seed()};
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    uint8_t *src = malloc(NBYTES), *dst = aligned_alloc(64, (NBYTES + 63) / 64 * 64), *expected = malloc(NBYTES);
    for (int i = 0; i < NBYTES / 4; i++)
        number_store(TB_F32, src + 4 * (size_t)i, number_random(TB_F32, &r));
    for (int64_t n = 1; n <= MOST; n++) {
        tb_dtype to = floats[1 + n % 4];
        int64_t size = (int64_t)number_size(to), rows = rng_range(&r, 1, ROWS), gap = rng_range(&r, 0, 3) * 4;
        int64_t step = (n * size + 31) / 32 * 32 + rng_range(&r, 0, 1) * 32;
        memset(expected, 0xa5, NBYTES);
        for (int64_t k = 0; k < rows * n; k++)
            number_store(to, expected + k / n * step + k % n * size,
                         number_cast(TB_F32, to, number_load(TB_F32, src + k / n * (4 * n + gap) + k % n * 4)));
        for (int s = 0; s < nsets; s++) {
            if (!sets[s]->narrow_rows[to])
                continue;
            memset(dst, 0xa5, NBYTES);
            sets[s]->narrow_rows[to]((char *)dst, step, (const char *)src, 4 * n + gap, rows, (size_t)n);
            sets[s]->fence();
            assert_memory_equal(dst, expected, NBYTES);
        }
    }
    free(src);
    free(dst);
    free(expected);
}

static void test_lengths_and_alignments(void **state) {
    (void)state;
    rng r = {test_seed()};
    uint8_t src[8 * 100 + 8], dst[8 * 100 + 8], before[sizeof dst];
    for (int f = 0; f < NFLOATS; f++) {
        for (int t = 0; t < NFLOATS; t++) {
            size_t from_size = number_size(floats[f]), size = number_size(floats[t]);
            for (size_t n = 0; n < 100; n++) {
                int64_t from_at = rng_range(&r, 0, 7), at = rng_range(&r, 0, 7);
                for (size_t i = 0; i < n; i++)
                    number_store(floats[f], src + from_at + i * from_size, number_random(floats[f], &r));
                memset(dst, 0xa5, sizeof dst);
                memcpy(before, dst, sizeof dst);
                cast(dst + at, floats[t], src + from_at, floats[f], (int64_t)n);
                for (size_t i = 0; i < n; i++) {
                    uint64_t in = number_load(floats[f], src + from_at + i * from_size);
                    number_store(floats[t], before + at + i * size, number_cast(floats[f], floats[t], in));
                }
                assert_memory_equal(dst, before, sizeof dst);
            }
        }
    }
}

static void test_known_values(void **state) {
    (void)state;
    static const struct {
        float in;
        uint16_t f16, bf16;
        uint8_t e4m3, e5m2;
    } known[] = {
        {0.0F, 0, 0, 0, 0},
        {-0.0F, 0x8000, 0x8000, 0x80, 0x80},
        {1.0F, 0x3c00, 0x3f80, 0x38, 0x3c},
        {-2.0F, 0xc000, 0xc000, 0xc0, 0xc0},
        {448.0F, 0x5f00, 0x43e0, 0x7e, 0x5f},
        {464.0F, 0x5f40, 0x43e8, 0x7e, 0x5f},
        {1e6F, 0x7c00, 0x4974, 0x7e, 0x7b},
        {65519.0F, 0x7bff, 0x4780, 0x7e, 0x7b},
        {65520.0F, 0x7c00, 0x4780, 0x7e, 0x7b},
        {-INFINITY, 0xfc00, 0xff80, 0xfe, 0xfb},
        {0x1p-24F, 0x0001, 0x3380, 0, 0},
        {0x1p-25F, 0x0000, 0x3300, 0, 0},
        {0x1p-10F, 0x1400, 0x3a80, 0, 0x14},
        {0x1.8p-10F, 0x1600, 0x3ac0, 1, 0x16},
        {0x1p-17F, 0x0080, 0x3700, 0, 0},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint16_t f16, bf16;
        uint8_t e4m3, e5m2;
        cast(&f16, TB_F16, &known[i].in, TB_F32, 1);
        cast(&bf16, TB_BF16, &known[i].in, TB_F32, 1);
        cast(&e4m3, TB_F8E4M3, &known[i].in, TB_F32, 1);
        cast(&e5m2, TB_F8E5M2, &known[i].in, TB_F32, 1);
        assert_int_equal(f16, known[i].f16);
        assert_int_equal(bf16, known[i].bf16);
        assert_int_equal(e4m3, known[i].e4m3);
        assert_int_equal(e5m2, known[i].e5m2);
    }
}

static void test_golden_e4m3(void **state) {
    (void)state;
    const char *folder = getenv("TB_GOLDEN");
    if (!folder)
        skip();
    char path[4096];
    snprintf(path, sizeof path, "%s/e4m3_codes.json", folder);
    json_error_t error;
    json_t *codes = json_load_file(path, JSON_DECODE_ANY, &error);
    if (!codes)
        fail_msg("%s: %s", path, error.text);
    assert_int_equal(json_array_size(codes), 256);
    for (size_t i = 0; i < 256; i++) {
        double golden = json_number_value(json_array_get(codes, i)); /* NaN is -12345 */
        uint8_t code = (uint8_t)i;
        float value;
        cast(&value, TB_F32, &code, TB_F8E4M3, 1);
        if (golden == -12345)
            assert_true(isnan(value));
        else
            assert_true((double)value == golden && !signbit(value) == !signbit(golden));
    }
    json_decref(codes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_values),  cmocka_unit_test(test_golden_e4m3),
        cmocka_unit_test(test_narrow_inputs), cmocka_unit_test(test_f32_inputs),
        cmocka_unit_test(test_f64_inputs),    cmocka_unit_test(test_integers),
        cmocka_unit_test(test_rows),          cmocka_unit_test(test_lengths_and_alignments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
