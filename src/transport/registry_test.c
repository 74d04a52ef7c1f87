/* What may be registered as a transport. */
#include "transport/transport.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static tb_status refuse_open(const tb_transport_env *env, void **context) {
    (void)env;
    (void)context;
    return tb__fail(TB_REFUSED, "opened");
}

/* A transport of this name, with the functions of `self` but for `open`. */
static tb_transport_ops named(const char *name) {
    tb_transport_ops ops = tb__self_ops;
    ops.name = name;
    ops.open = refuse_open;
    return ops;
}

static size_t count(const char *name, size_t *at) {
    size_t n = 0;
    for (size_t i = 0; tb__transports[i]; i++) {
        if (strcmp(tb__transports[i]->name, name) == 0) {
            *at = i;
            n++;
        }
    }
    return n;
}

static void is_refused(const tb_transport_ops *ops, tb_status expected, const char *sentence) {
    assert_int_equal(tb_transport_register(ops), expected);
    assert_non_null(strstr(tb_error_detail(), sentence));
}

static void incomplete_tables_are_refused(void **state) {
    (void)state;
    tb_transport_ops ops = named("incomplete");
    size_t at;
    ops.size = 0; /* forgotten */
    is_refused(&ops, TB_INVALID, "size 0");
    ops.size = offsetof(tb_transport_ops, progress);
    is_refused(&ops, TB_INVALID, "'incomplete' lacks");
    ops.size = sizeof ops;
    ops.connect = NULL;
    is_refused(&ops, TB_INVALID, "'incomplete' lacks");
    ops = named("incomplete");
    ops.memory = 1U << TB_MEM_CUDA;
    is_refused(&ops, TB_INVALID, "'incomplete' does not carry host memory");
    ops = named(NULL);
    is_refused(&ops, TB_INVALID, "name");
    is_refused(NULL, TB_INVALID, "name");
    assert_int_equal(count("incomplete", &at), 0);
}

/* The table is copied: what is behind its size is not read, and it may go. */
static void a_shorter_table_has_the_defaults(void **state) {
    (void)state;
    tb_transport_ops ops = named("shorter");
    tb_transport t;
    size_t at, shm;
    ops.size = offsetof(tb_transport_ops, is_reached);
    memset((char *)&ops + ops.size, 0xEE, sizeof ops - ops.size);
    assert_int_equal(tb_transport_register(&ops), TB_OK);
    memset(&ops, 0xEE, sizeof ops);
    assert_int_equal(count("shorter", &at), 1);
    assert_int_equal(count("shm", &shm), 1);
    assert_int_equal(at, shm + 1);
    assert_null(tb__transports[at]->is_reached);
    assert_null(tb__transports[at]->disconnect);
    assert_int_equal(tb__transport_open("shorter", &(tb_transport_env){0}, &t), TB_REFUSED);
    assert_string_equal(tb_error_detail(), "opened");
}

/* A table of a later version, with slots that this one does not know. */
static void a_longer_table_is_cut(void **state) {
    (void)state;
    struct {
        tb_transport_ops ops;
        void (*later)(void);
    } longer = {.ops = named("longer")};
    size_t at;
    longer.ops.size = sizeof longer;
    assert_int_equal(tb_transport_register(&longer.ops), TB_OK);
    assert_int_equal(count("longer", &at), 1);
    assert_ptr_equal(tb__transports[at]->open, refuse_open);
}

static tb_status note_size(void *context, tb_op *op) {
    *(size_t *)context = op->size;
    return TB_OK;
}

/* A transport of a later version sees which fields the library has. */
static void operations_have_their_size(void **state) {
    (void)state;
    tb_transport_ops ops = named("sizes");
    size_t size = 0;
    ops.post = note_size;
    assert_int_equal(tb__transport_post(&(tb_transport){&ops, &size}, &(tb_op){.kind = TB_OP_RECV}), TB_OK);
    assert_int_equal(size, sizeof(tb_op));
}

static void names_are_taken_once(void **state) {
    (void)state;
    tb_transport_ops ops = named("twice");
    size_t at;
    assert_int_equal(tb_transport_register(&ops), TB_OK);
    assert_int_equal(tb_transport_register(&ops), TB_OK);
    assert_int_equal(count("twice", &at), 1);
    ops.open = tb__self_ops.open;
    is_refused(&ops, TB_CONFLICT, "another transport 'twice'");
    ops = named("shm");
    is_refused(&ops, TB_CONFLICT, "another transport 'shm'");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(incomplete_tables_are_refused), cmocka_unit_test(a_shorter_table_has_the_defaults),
        cmocka_unit_test(a_longer_table_is_cut), cmocka_unit_test(operations_have_their_size),
        cmocka_unit_test(names_are_taken_once)};
    return cmocka_run_group_tests_name("transports", tests, NULL, NULL);
}
