/* The transport of examples/transport.c does what every transport must do. */
int example_main(void);
#define main example_main
#include "../../examples/transport.c" // NOLINT: its functions are static
#undef main

#include "../support/conformance.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static void connect_to(tb_transport *from, tb_transport *to, int32_t rank) {
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    assert_int_equal(to->ops->address(to->context, address, &n), TB_OK);
    assert_true(from->ops->reaches(from->context, address, n));
    assert_int_equal(from->ops->connect(from->context, rank, address, n), TB_OK);
}

static void note_loss(void *arg, int32_t peer, const char *why) {
    (void)arg;
    (void)peer;
    (void)why;
}

static void make(endpoints *e) {
    tb_transport_env env = {.size = sizeof env, .rank = 5, .lost = note_loss};
    assert_int_equal(tb__transport_open("threads", &env, &e->a), TB_OK);
    env.rank = 2;
    assert_int_equal(tb__transport_open("threads", &env, &e->b), TB_OK);
    e->rank_a = 5;
    e->rank_b = 2;
    connect_to(&e->a, &e->b, 2);
    connect_to(&e->b, &e->a, 5);
}

static void unmake(endpoints *e) {
    tb__transport_close(&e->a);
    tb__transport_close(&e->b);
}

static void it_conforms(void **state) {
    (void)state;
    assert_int_equal(tb_transport_register(&threads), TB_OK);
    conformance(make, unmake);
}

static void it_moves_a_matrix(void **state) {
    (void)state;
    assert_int_equal(example_main(), EXIT_SUCCESS);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(it_conforms), cmocka_unit_test(it_moves_a_matrix)};
    return cmocka_run_group_tests_name("transport of the examples", tests, NULL, NULL);
}
