/* The reference transport passes the suite that it is the reference of. */
#include "../tests/support/conformance.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void make(endpoints *e) {
    tb_transport_env env = {.size = sizeof env, .rank = 3};
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    assert_int_equal(tb__transport_open("self", &env, &e->a), TB_OK);
    assert_int_equal(e->a.ops->address(e->a.context, address, &n), TB_OK);
    assert_int_equal(e->a.ops->connect(e->a.context, 3, address, n), TB_OK);
    e->b = e->a;
    e->rank_a = e->rank_b = 3;
}

static void unmake(endpoints *e) {
    tb__transport_close(&e->a);
}

static void self_conforms(void **state) {
    (void)state;
    conformance(make, unmake);
}

static void strangers_are_refused(void **state) {
    (void)state;
    endpoints e;
    tb_op op;
    tb_transport t;
    make(&e);
    assert_int_equal(e.a.ops->connect(e.a.context, 4, NULL, 0), TB_INVALID);
    make_op(&op, TB_OP_SEND, 4, 0, NULL, 0);
    assert_int_equal(tb__transport_post(&e.a, &op), TB_LOST);
    unmake(&e);
    assert_int_equal(tb__transport_open("pigeon", NULL, &t), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'pigeon'"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(self_conforms), cmocka_unit_test(strangers_are_refused)};
    return cmocka_run_group_tests_name("transport self", tests, NULL, NULL);
}
