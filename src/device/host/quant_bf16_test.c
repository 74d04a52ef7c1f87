/* Every bf16 with every scale of MXFP8: the kernels for AVX2 and AVX-512 have special cases there, chosen by
 * neighbouring numbers, and must give the bits of the portable kernels for all of them. */
#include "device/host/kernel.h"
#include "device/host/quant.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BLOCK = 32, TOGETHER = 128, EXPONENTS = 255, INF = 0x7f80, NEGATIVE = 0x8000, NSETS = 3 };

/* Room for a row of as many numbers as a case may have, and for all results. */
typedef struct rows {
    uint16_t *in;
    uint8_t *data[NSETS], *scales[NSETS];
    int64_t room, n;
} rows;

static void rows_init(rows *r, int64_t room) {
    *r = (rows){.in = malloc((size_t)room * sizeof *r->in), .room = room};
    assert_non_null(r->in);
    for (int s = 0; s < NSETS; s++) {
        r->data[s] = malloc((size_t)room);
        r->scales[s] = malloc((size_t)room / BLOCK + 2);
        assert_non_null(r->data[s]);
        assert_non_null(r->scales[s]);
    }
}

static void rows_fini(rows *r) {
    for (int s = 0; s < NSETS; s++) {
        free(r->data[s]);
        free(r->scales[s]);
    }
    free(r->in);
}

static void add(rows *r, uint32_t bits) {
    assert_true(r->n < r->room);
    r->in[r->n++] = (uint16_t)bits;
}

/* The portable one first; NULL: the machine can't run it. */
static const tb__kernels *set_of(int set) {
    const tb__kernels *const sets[NSETS] = {&tb__kernels_portable, tb__kernels_avx2(), tb__kernels_avx512()};
    return sets[set];
}

static tb_status quantise(const rows *r, int set, bool is_floor) {
    tb__quant_rows from = {.data = r->in, .dtype = TB_BF16, .stride = r->n};
    tb__quant_tensor to = {.format = {.kind = TB__QUANT_MXFP8, .is_floor = is_floor},
                           .rows = 1,
                           .columns = r->n,
                           .data = r->data[set],
                           .scales = r->scales[set]};
    memset(r->data[set], 0xa5, (size_t)r->n);
    memset(r->scales[set], 0xa5, (size_t)r->n / BLOCK + 2);
    tb__kernels_force(set_of(set));
    tb_status status = tb__quant_quantise(&to, 0, 1, &from);
    tb__kernels_force(NULL);
    return status;
}

static void check_rows(const rows *r) {
    for (int i = 0; i < 2 * NSETS; i++) {
        int s = i % NSETS;
        bool is_floor = i >= NSETS;
        const char *how = is_floor ? "floor" : "ceil";
        if (!set_of(s))
            continue;
        assert_int_equal(quantise(r, s, is_floor), TB_OK);
        for (int64_t k = 0; k < r->n; k++) {
            if (r->scales[0][k / BLOCK] != r->scales[s][k / BLOCK])
                fail_msg("%s, %s: the scale of block %ld is %d, not %d", set_of(s)->name, how, (long)(k / BLOCK),
                         r->scales[s][k / BLOCK], r->scales[0][k / BLOCK]);
            if (r->data[0][k] != r->data[s][k])
                fail_msg("%s, %s: 0x%04x at %ld with scale %d is 0x%02x, not 0x%02x", set_of(s)->name, how, r->in[k],
                         (long)k, r->scales[0][k / BLOCK], r->data[s][k], r->data[0][k]);
        }
        /* Nothing was written beyond the last one. */
        assert_int_equal(r->scales[s][(r->n + BLOCK - 1) / BLOCK], 0xa5);
    }
}

/* Each number up to an amax, of both signs, with that amax in each block; from the largest on, or from the smallest. */
static void fill_all(rows *r, uint32_t amax, bool is_rising) {
    r->n = 0;
    for (uint32_t i = 0; i <= amax; i++) {
        uint32_t bits = is_rising ? i : amax - i;
        if (r->n % BLOCK == 0) {
            add(r, amax);
            add(r, amax | NEGATIVE);
        }
        add(r, bits);
        add(r, bits | NEGATIVE);
    }
}

static void test_every_scale(void **state) {
    (void)state;
    if (!tb__kernels_avx2())
        skip();
    rows r;
    rows_init(&r, 2 * (INF + INF / 15 + 16));
    for (uint32_t exponent = 0; exponent < EXPONENTS; exponent++) {
        /* On both sides of where the scale is rounded up. */
        fill_all(&r, exponent << 7 | 0x60, false);
        check_rows(&r);
        fill_all(&r, exponent << 7 | 0x61, true);
        check_rows(&r);
    }
    rows_fini(&r);
}

/* As many of one number as are looked at together, so that nothing else decides which way they go; the largest first,
 * for what follows a small one is treated like it. Down to where all is 0. */
static void test_each_alone(void **state) {
    (void)state;
    if (!tb__kernels_avx2())
        skip();
    static const uint32_t most[] = {0x3f80, 0x3fe0, 0x3fe1, 0x3fff, 0x7f7f, 0x0990, 0x0900};
    rows r;
    rows_init(&r, 22 * 128 * TOGETHER);
    for (size_t m = 0; m < sizeof most / sizeof *most; m++) {
        r.n = 0;
        uint32_t least = most[m] > 21 * 128 ? most[m] - 21 * 128 : 0;
        for (uint32_t bits = most[m]; bits > least; bits--) {
            for (uint32_t i = 0; i < TOGETHER; i++)
                add(&r, (i % BLOCK == bits % BLOCK ? most[m] : bits) | (i % 3 == 0 ? NEGATIVE : 0));
        }
        check_rows(&r);
    }
    rows_fini(&r);
}

/* Small numbers among large ones, at changing places, in rows of each length; blocks with different scales. */
static void test_each_length(void **state) {
    (void)state;
    if (!tb__kernels_avx2())
        skip();
    static const uint32_t few[] = {0, 1, 0x3680, 0x3701, 0x3840, 0x38ff};
    rows r;
    rows_init(&r, 3 * TOGETHER);
    for (int64_t n = 1; n < 3 * TOGETHER; n++) {
        for (size_t f = 0; f < sizeof few / sizeof *few; f++) {
            r.n = 0;
            while (r.n < n)
                add(&r, 0x3b80 + (uint32_t)r.n / BLOCK * 3 % 8 * 128 + (uint32_t)r.n * 37 % 500);
            r.in[n * 5 / 8] = (uint16_t)few[f];
            r.in[n - 1] = (uint16_t)few[f];
            check_rows(&r);
        }
    }
    rows_fini(&r);
}

static void test_not_finite(void **state) {
    (void)state;
    if (!tb__kernels_avx2())
        skip();
    static const uint16_t bad[] = {0x7f80, 0xff80, 0x7fff, 0xff81};
    rows r;
    rows_init(&r, 3 * TOGETHER);
    for (uint32_t i = 0; i < 3 * TOGETHER - 7; i++)
        add(&r, 0x3f80 + i % 100);
    for (int64_t at = 0; at < r.n; at++) {
        uint16_t before = r.in[at];
        r.in[at] = bad[at % 4];
        char where[64];
        snprintf(where, sizeof where, "row 0, column %ld is not finite", (long)at);
        for (int i = 0; i < 2 * NSETS; i++) {
            if (!set_of(i % NSETS))
                continue;
            assert_int_equal(quantise(&r, i % NSETS, i >= NSETS), TB_INVALID);
            assert_non_null(strstr(tb_error_detail(), where));
        }
        r.in[at] = before;
    }
    rows_fini(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_scale),
        cmocka_unit_test(test_each_alone),
        cmocka_unit_test(test_each_length),
        cmocka_unit_test(test_not_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
