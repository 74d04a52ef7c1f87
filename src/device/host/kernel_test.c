/* Which set of kernels is used: by name, by measuring, and by what another process has measured. */
#include "device/host/kernel.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmocka.h>

static void test_measure(void **state) {
    (void)state;
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    double rate[TB__KERNEL_SETS_MAX];
    int n = tb__kernels_list(sets);
    assert_int_equal(tb__kernels_measure(sets, n, rate), TB_OK);
    for (int i = 0; i < n; i++)
        assert_true(rate[i] > 0);
}

static void test_select(void **state) {
    (void)state;
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int n = tb__kernels_list(sets);
    for (int i = 0; i < n; i++) {
        assert_int_equal(tb__kernels_select(sets[i]->name), TB_OK);
        assert_ptr_equal(tb__kernels_get(), sets[i]);
        tb__kernels_choose(); /* changes nothing */
        assert_ptr_equal(tb__kernels_get(), sets[i]);
    }
    assert_int_equal(tb__kernels_select("auto"), TB_OK);
    assert_ptr_equal(tb__kernels_get(), sets[n - 1]);
    assert_int_equal(tb__kernels_select("fast"), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'fast' is no way of copying that this machine has: auto, "));
    assert_ptr_equal(tb__kernels_get(), sets[n - 1]);
}

static void write_file(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void read_file(const char *path, char text[64]) {
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, 64, f));
    fclose(f);
}

static bool is_in_list(const tb__kernels *set) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    for (int i = tb__kernels_list(sets) - 1; i >= 0; i--) {
        if (sets[i] == set)
            return true;
    }
    return false;
}

static void test_file(void **state) {
    (void)state;
    char folder[] = "/tmp/kernel_test-XXXXXX", path[64], text[64], expected[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/copy", folder);

    /* the first process measures; what it found is what others use */
    const tb__kernels *found = tb__kernels_fastest(path);
    assert_true(is_in_list(found));
    read_file(path, text);
    snprintf(expected, sizeof expected, "%s\n", found->name);
    assert_string_equal(text, expected);
    write_file(path, "portable\n");
    assert_ptr_equal(tb__kernels_fastest(path), &tb__kernels_portable);

    /* a name of another machine, or anything else, is replaced */
    write_file(path, "sve2 of another machine, and more text than any name has, which is all of this\n");
    found = tb__kernels_fastest(path);
    assert_true(is_in_list(found));
    read_file(path, text);
    snprintf(expected, sizeof expected, "%s\n", found->name);
    assert_string_equal(text, expected);

    /* one that another process does not let go is not waited for for ever, and not changed */
    write_file(path, "portable\n");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_true(is_in_list(tb__kernels_fastest(path)));
    close(fd);
    read_file(path, text);
    assert_string_equal(text, "portable\n");

    /* nor is what a link points to */
    char link[64];
    snprintf(link, sizeof link, "%s/link", folder);
    write_file(path, "untouched\n");
    assert_int_equal(symlink(path, link), 0);
    assert_true(is_in_list(tb__kernels_fastest(link)));
    read_file(path, text);
    assert_string_equal(text, "untouched\n");

    unlink(link);
    unlink(path);
    assert_true(is_in_list(tb__kernels_fastest("/proc/there/is/none")));
    assert_int_equal(rmdir(folder), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_measure),
        cmocka_unit_test(test_select),
        cmocka_unit_test(test_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
