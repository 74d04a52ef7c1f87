/* Quotients as kernels make them (kernels/quant.cuh, refine_quotient with one step) are those of a division, for every
 * f16 and bf16 and every divisor. Exponents shift both, so that significands suffice. */
#include "../tests/support/asserts.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* How many quotients of numbers with so many bits of fraction, divided by y, are wrong. */
static inline unsigned count_wrong(uint32_t y_bits, int fraction) {
    float y = from_bits(0x3f800000 | y_bits), r = 1 / y;
    unsigned wrong = 0;
    for (uint32_t i = 0; i < 1U << fraction; i++) {
        float x = from_bits(0x3f800000 | i << (23 - fraction)), q = x * r;
        q = fmaf(fmaf(-q, y, x), r, q);
        wrong += q != x / y;
    }
    return wrong;
}

static unsigned count_all(uint32_t first, uint32_t step, int fraction) {
    unsigned wrong = 0;
    for (uint32_t y = first; y < 1U << 23; y += step)
        wrong += count_wrong(y, fraction);
    return wrong;
}

#if defined __x86_64__
__attribute__((target("avx2,fma"))) static unsigned count_all_fast(uint32_t first, uint32_t step, int fraction) {
    unsigned wrong = 0;
    for (uint32_t y = first; y < 1U << 23; y += step)
        wrong += count_wrong(y, fraction);
    return wrong;
}
#endif

/* Every step-th divisor: all of them take long for f16, and where fmaf is a function. */
static void check(int fraction, uint32_t step) {
#if defined __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        assert_int_equal(count_all_fast((uint32_t)rand() % step, step, fraction), 0);
        return;
    }
#endif
    assert_int_equal(count_all((uint32_t)rand() % (step * 64), step * 64, fraction), 0);
}

static void test_bf16(void **state) {
    (void)state;
    check(7, getenv("TB_CASES") ? 1 : 4);
}

static void test_f16(void **state) {
    (void)state;
    check(10, getenv("TB_CASES") ? 1 : 64);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bf16), cmocka_unit_test(test_f16)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
