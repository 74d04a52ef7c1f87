/* How often lines are measured, by a clock that the test sets, and how much they move. */
#include "bench/bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define SECOND ((int64_t)1000000000)

/* So many rounds are done where preparations take `before` and every round `each`; only the last says that it is. */
static int count(int most, int64_t budget, int64_t before, int64_t each) {
    int64_t now = 5 * SECOND;
    bench_rounds rounds = bench_rounds_begin(most, budget, now);
    int n = 0;
    bool was_last = false;
    for (now += before; bench_rounds_next(&rounds, now); now += each) {
        assert_false(was_last);
        assert_int_equal(rounds.done, ++n);
        was_last = rounds.is_last;
    }
    assert_true(was_last);
    assert_false(bench_rounds_next(&rounds, now));
    assert_int_equal(rounds.done, n);
    return n;
}

static void rounds(void **state) {
    (void)state;
    assert_int_equal(count(5, 15 * SECOND, 0, 0), 5);
    assert_int_equal(count(5, 15 * SECOND, SECOND, SECOND), 5);
    assert_int_equal(count(1, 15 * SECOND, SECOND, SECOND), 1);
    assert_int_equal(count(1000, 0, 100 * SECOND, 100 * SECOND), 1000); /* as many as were asked for */
    /* a slow machine: what there is time for, and at least one */
    assert_int_equal(count(5, 15 * SECOND, 3 * SECOND, 5 * SECOND), 2);
    assert_int_equal(count(5, 15 * SECOND, 60 * SECOND, 20 * SECOND), 1);
    assert_int_equal(count(1000, 15 * SECOND, 0, SECOND), 15);
}

/* However slow it is, the lines that follow the first come near their time, and nothing is made larger. */
static void sizes(void **state) {
    (void)state;
    const int64_t gib = (int64_t)1 << 30, budget = 15 * SECOND;
    assert_int_equal(bench_fit_size(gib, 0, budget), gib);
    assert_int_equal(bench_fit_size(gib, budget, budget), gib);
    assert_int_equal(bench_fit_size(gib, budget + 1, budget), gib / 2);
    assert_int_equal(bench_fit_size(gib, 3 * budget, budget), gib / 4);
    assert_int_equal(bench_fit_size(gib, 1000 * budget, budget), gib / 16);
    assert_int_equal(bench_fit_size(1 << 20, 1000 * budget, budget), 1 << 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(rounds), cmocka_unit_test(sizes)};
    return cmocka_run_group_tests_name("bench rounds", tests, NULL, NULL);
}
