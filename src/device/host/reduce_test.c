/* Reductions against one-number-at-a-time arithmetic: every dtype and op, by every set of kernels. */
#include "device/host/kernel.h"
#include "device/host/move.h"

#include "../tests/support/numbers.h"

#include <fenv.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Integers, then floats. */
static const tb_dtype numbers[] = {TB_U8,  TB_U16,  TB_U32, TB_U64, TB_I8,     TB_I16,    TB_I32,
                                   TB_I64, TB_BF16, TB_F16, TB_F32, TB_F8E4M3, TB_F8E5M2, TB_F64};
enum { NNUMBERS = sizeof numbers / sizeof *numbers, NINTEGERS = 8, MAX_SOURCES = 20 };

/* Contiguous rows at random alignments. */
typedef struct rows {
    uint8_t *memory[MAX_SOURCES];
    const void *src[MAX_SOURCES];
    int64_t stride[MAX_SOURCES][TB_MAX_DIMS];
    uint8_t *dst, *expected;
    size_t dst_bytes, at;
    tb__move copy;
} rows;

static void make(rows *r, tb_dtype from, tb_dtype wire, tb_dtype to, tb_reduce_op op, uint64_t divisor, uint32_t nsrc,
                 size_t n, rng *g) {
    size_t size = number_size(from);
    for (uint32_t k = 0; k < nsrc; k++) {
        size_t at = (size_t)rng_range(g, 0, 15);
        r->memory[k] = malloc(n * size + at + 1);
        r->src[k] = r->memory[k] + at;
        r->stride[k][0] = 1;
        for (size_t i = 0; i < n; i++)
            number_store(from, r->memory[k] + at + i * size, number_random(from, g));
    }
    r->at = (size_t)rng_range(g, 1, 70);
    r->dst_bytes = n * number_size(to) + r->at + 64;
    r->dst = malloc(r->dst_bytes);
    r->expected = malloc(r->dst_bytes);
    memset(r->dst, 0xa5, r->dst_bytes);
    memset(r->expected, 0xa5, r->dst_bytes);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits[MAX_SOURCES];
        for (uint32_t k = 0; k < nsrc; k++)
            bits[k] = number_load(from, (const uint8_t *)r->src[k] + i * size);
        number_store(to, r->expected + r->at + i * number_size(to),
                     number_reduce(from, wire, to, op, divisor, bits, nsrc));
    }
    r->copy = (tb__move){
        .ndim = 1,
        .len = {(int64_t)n},
        .dst = r->dst + r->at,
        .dst_stride = {1},
        .nsrc = nsrc,
        .src = r->src,
        .src_stride = (const int64_t(*)[TB_MAX_DIMS])r->stride,
        .src_dtype = from,
        .wire_dtype = wire,
        .dst_dtype = to,
        .op = op,
        .avg_divisor = divisor,
    };
}

static void check(rows *r) {
    assert_int_equal(tb__moves_run(&r->copy, 1), TB_OK);
    if (memcmp(r->dst, r->expected, r->dst_bytes) != 0) {
        size_t i = 0;
        while (r->dst[i] == r->expected[i])
            i++;
        const tb__move *c = &r->copy;
        fail_msg("%s, %s, %s, op %d, divisor %" PRIu64 ", %u sources, %" PRId64
                 " elements: byte %zd is 0x%02x, not 0x%02x",
                 tb_dtype_name(c->src_dtype), tb_dtype_name(c->wire_dtype), tb_dtype_name(c->dst_dtype), (int)c->op,
                 c->avg_divisor, c->nsrc, c->len[0], (ssize_t)i - (ssize_t)r->at, r->dst[i], r->expected[i]);
    }
}

static void unmake(rows *r) {
    for (uint32_t k = 0; k < r->copy.nsrc; k++)
        free(r->memory[k]);
    free(r->dst);
    free(r->expected);
}

static void for_each_set(rows *r) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    for (int s = 0; s < nsets; s++) {
        memset(r->dst, 0xa5, r->dst_bytes);
        tb__kernels_force(sets[s]);
        check(r);
    }
    tb__kernels_force(NULL);
}

/* The kernels that make a result in one pass, with stores past the cache and without, at each place of a line. */
static void test_whole_reductions(void **state) {
    (void)state;
    enum { NBYTES = 64 + 4 * 700 + 64 };
    rng g = {test_seed()};
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    uint8_t *dst = aligned_alloc(64, (NBYTES + 63) / 64 * 64);
    for (int i = 0; i < 600; i++) {
        tb_dtype t = numbers[NINTEGERS + i % 5];
        size_t n = (size_t)rng_range(&g, 1, 700), at = i % 2 ? (size_t)rng_range(&g, 0, 63) : 0;
        for (tb_reduce_op op = TB_SUM; op <= TB_PRODUCT; op++) {
            rows r = {0};
            make(&r, t, t, t, op, 0, (uint32_t)rng_range(&g, 2, 5), n, &g);
            for (int s = 0; s < nsets * 2; s++) {
                tb__reduce_fn *reduce = sets[s / 2]->reduce[t][op];
                if (!reduce)
                    continue;
                memset(dst, 0xa5, NBYTES);
                reduce(dst + at, r.src, r.copy.nsrc, n, s % 2);
                sets[s / 2]->fence();
                assert_memory_equal(dst + at, r.expected + r.at, n * number_size(t));
                assert_int_equal(dst[at + n * number_size(t)], 0xa5);
            }
            unmake(&r);
        }
    }
    free(dst);
}

static void test_same_dtype(void **state) {
    (void)state;
    rng g = {test_seed()};
    for (int t = 0; t < NNUMBERS; t++) {
        for (tb_reduce_op op = TB_SUM; op <= TB_PRODUCT; op++) {
            bool is_avg = op == TB_AVG;
            if (is_avg && t < NINTEGERS)
                continue;
            for (uint32_t nsrc = 1; nsrc <= 5; nsrc++) {
                for (int i = 0; i < 20; i++) {
                    rows r = {0};
                    size_t n = i == 0 ? 5001 : (size_t)rng_range(&g, 0, 140);
                    make(&r, numbers[t], numbers[t], numbers[t], op, is_avg ? 2 + nsrc : 0, nsrc, n, &g);
                    for_each_set(&r);
                    unmake(&r);
                }
            }
        }
    }
}

static void test_casts_after(void **state) {
    (void)state;
    rng g = {test_seed()};
    for (int i = 0; i < 6000; i++) {
        rows r = {0};
        tb_dtype d[3];
        bool is_float = rng_range(&g, 0, 2) > 0;
        for (int k = 0; k < 3; k++)
            d[k] = numbers[is_float ? rng_range(&g, NINTEGERS, NNUMBERS - 1) : rng_range(&g, 0, NINTEGERS - 1)];
        tb_reduce_op op = (tb_reduce_op)rng_range(&g, TB_SUM, TB_PRODUCT);
        uint64_t divisor = is_float && op <= TB_AVG ? (uint64_t)rng_range(&g, 0, 7) : 0;
        make(&r, d[0], d[1], d[2], op, divisor, (uint32_t)rng_range(&g, 1, 4), (size_t)rng_range(&g, 1, 200), &g);
        for_each_set(&r);
        unmake(&r);
    }
}

static void test_many_sources(void **state) {
    (void)state;
    rng g = {test_seed()};
    for (uint32_t nsrc = 6; nsrc <= MAX_SOURCES; nsrc++) {
        for (int t = 0; t < NNUMBERS; t++) {
            rows r = {0};
            make(&r, numbers[t], numbers[t], numbers[t], TB_SUM, 0, nsrc, 77, &g);
            for_each_set(&r);
            unmake(&r);
        }
    }
}

/* The sum is rounded once: three times 1 and a 512th is not what rounding after each addition gives. */
static void test_rounded_once(void **state) {
    (void)state;
    const uint16_t one = 0x3f80, small = 0x3b80; /* 1 and 2^-8, half of 1's last place */
    const void *src[3] = {&one, &small, &small};
    const int64_t stride[3][TB_MAX_DIMS] = {{0}};
    uint16_t sum = 0;
    tb__move copy = {.dst = &sum, .nsrc = 3, .src = src, .src_stride = stride, .op = TB_SUM};
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_BF16;
    assert_int_equal(tb__moves_run(&copy, 1), TB_OK);
    assert_int_equal(sum, 0x3f81);
}

/* The caller's rounding mode and exception flags have no influence, and are unchanged afterwards. */
static void test_environment(void **state) {
    (void)state;
    rng g = {test_seed()};
    rows r = {0};
    make(&r, TB_F32, TB_BF16, TB_BF16, TB_SUM, 0, 3, 3000, &g);
    feclearexcept(FE_ALL_EXCEPT);
    assert_int_equal(fesetround(FE_UPWARD), 0);
    check(&r);
    assert_int_equal(fegetround(), FE_UPWARD);
    assert_int_equal(fetestexcept(FE_ALL_EXCEPT), 0);
    fesetround(FE_TONEAREST);
    unmake(&r);
}

static void test_refused(void **state) {
    (void)state;
    uint8_t a[8] = {0}, b[8] = {0}, out[8];
    const void *src[2] = {a, b};
    const int64_t stride[2][TB_MAX_DIMS] = {{1}, {1}};
    tb__move copy = {.ndim = 1, .len = {1}, .dst = out, .dst_stride = {1}, .nsrc = 2, .src = src, .src_stride = stride};
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_BOOL;
    assert_int_equal(tb__moves_run(&copy, 1), TB_REFUSED);
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_I32;
    copy.avg_divisor = 2;
    assert_int_equal(tb__moves_run(&copy, 1), TB_REFUSED);
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_F32;
    copy.op = TB_MAX;
    assert_int_equal(tb__moves_run(&copy, 1), TB_INVALID);
    copy.op = (tb_reduce_op)9;
    assert_int_equal(tb__moves_run(&copy, 1), TB_INVALID);
    copy.op = TB_AVG;
    copy.dst_dtype = TB_I64;
    assert_int_equal(tb__moves_run(&copy, 1), TB_REFUSED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_reductions), cmocka_unit_test(test_same_dtype),
        cmocka_unit_test(test_casts_after),      cmocka_unit_test(test_many_sources),
        cmocka_unit_test(test_rounded_once),     cmocka_unit_test(test_environment),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
