/* Structs whose size is the caller's: older and newer than ours. */
#include "base/opts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

typedef struct ours {
    size_t size;
    int64_t a, b;
} ours;

typedef struct newer {
    ours known;
    int64_t c;
} newer;

enum { OLDER = offsetof(ours, b) };

static void assert_fails(tb_status status, tb_status wanted, const char *word) {
    assert_int_equal(status, wanted);
    assert_non_null(strstr(tb_error_detail(), word));
}

static void options(void **state) {
    (void)state;
    ours o;
    assert_int_equal(tb__opts_read(&o, sizeof o, NULL), TB_OK);
    assert_true(o.size == sizeof o && o.a == 0 && o.b == 0);
    assert_int_equal(tb__opts_read(&o, sizeof o, &(ours){OLDER, 1, 2}), TB_OK);
    assert_true(o.size == sizeof o && o.a == 1 && o.b == 0);
    assert_int_equal(tb__opts_read(&o, sizeof o, &(newer){{sizeof(newer), 1, 2}, 0}), TB_OK);
    assert_true(o.size == sizeof o && o.a == 1 && o.b == 2);
    o.a = 7;
    assert_fails(tb__opts_read(&o, sizeof o, &(newer){{sizeof(newer), 1, 2}, 3}), TB_REFUSED, "does not know");
    assert_fails(tb__opts_read(&o, sizeof o, &(ours){0}), TB_INVALID, "an options struct has size 0");
    assert_fails(tb__opts_read(&o, sizeof o, &(ours){(uintptr_t)&o, 1, 2}), TB_INVALID, "sizeof the struct");
    assert_int_equal(o.a, 7);
}

static void arrays(void **state) {
    (void)state;
    ours o;
    newer given[] = {{{sizeof(newer), 1, 2}, 0}, {{sizeof(newer), 3, 4}, 0}, {{sizeof(ours), 5, 6}, 0}};
    assert_int_equal(tb__struct_read(&o, sizeof o, given, 1, "a thing"), TB_OK);
    assert_true(o.size == sizeof o && o.a == 3 && o.b == 4);
    assert_fails(tb__struct_read(&o, sizeof o, given, 2, "a thing"), TB_INVALID, "the first in its array has");
    given[1].c = 1;
    assert_fails(tb__struct_read(&o, sizeof o, given, 1, "a thing"), TB_REFUSED, "a thing has 32 bytes");
    assert_fails(tb__struct_read(&o, sizeof o, &(ours){3, 1, 2}, 0, "a thing"), TB_INVALID, "a thing has size 3");
}

static void results(void **state) {
    (void)state;
    ours result = {.a = 1, .b = 2}, taken;
    ours older = {.size = OLDER, .b = 77};
    newer more = {{.size = sizeof more}, 77};
    assert_int_equal(tb__struct_write(&older, &result, sizeof result, "a thing"), TB_OK);
    assert_true(older.size == OLDER && older.a == 1 && older.b == 77);
    assert_int_equal(tb__struct_write(&more, &result, sizeof result, "a thing"), TB_OK);
    assert_true(more.known.size == sizeof more && more.known.a == 1 && more.known.b == 2 && more.c == 0);
    assert_fails(tb__struct_write(&(ours){0}, &result, sizeof result, "a thing"), TB_INVALID, "a thing has size 0");

    tb__struct_take(&taken, sizeof taken, &older);
    assert_true(taken.a == 1 && taken.b == 0 && older.size == OLDER && older.a == 0 && older.b == 77);
    tb__struct_take(&taken, sizeof taken, &more);
    assert_true(taken.a == 1 && taken.b == 2 && more.known.size == sizeof more && more.known.a == 0);
    tb__struct_take(&taken, sizeof taken, &(ours){0}); /* never filled in */
    assert_true(taken.a == 0 && taken.b == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(options), cmocka_unit_test(arrays), cmocka_unit_test(results)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
