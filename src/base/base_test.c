/* Dtypes, text, sizes, memory, status and log. */
#include "base/dtype.h"
#include "base/index.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "base/mem.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static void dtypes(void **state) {
    (void)state;
    tb_dtype dtype;
    for (tb_dtype d = TB_DTYPE_NONE + 1; d < TB_DTYPE_COUNT; d++) {
        assert_int_equal(tb_dtype_parse(tb_dtype_name(d), &dtype), TB_OK);
        assert_int_equal(dtype, d);
        assert_true(tb_dtype_bits(d) > 0);
    }
    assert_int_equal(tb_dtype_parse("bfloat16", &dtype), TB_OK);
    assert_int_equal(dtype, TB_BF16);
    assert_int_equal(tb_dtype_parse("F8_E4M3", &dtype), TB_OK);
    assert_int_equal(dtype, TB_F8E4M3);
    assert_int_equal(tb_dtype_parse("float33", &dtype), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'float33' is not a dtype"));
    assert_null(tb_dtype_name(TB_DTYPE_NONE));
    assert_null(tb_dtype_name((tb_dtype)1000));
    assert_int_equal(tb_dtype_bits((tb_dtype)-1), 0);
    assert_int_equal(tb__dtype_packing(TB_F4E2M1), 2);
}

static void sizes(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t size; /* -1: refused */
    } cases[] = {{"0", 0},
                 {"17", 17},
                 {"4k", 4096},
                 {"16MiB", 16 << 20},
                 {"1 GiB", 1 << 30},
                 {"2tib", 2LL << 40},
                 {"", -1},
                 {"MiB", -1},
                 {"-1", -1},
                 {"12x", -1},
                 {"30MB", 30000000},
                 {"1kb", 1000},
                 {"2 GB", 2000000000},
                 {"1TB", 1000000000000},
                 {"1.5GiB", 3LL << 29},
                 {"1.5k", 1536},
                 {"0.1MB", 100000},
                 {"0.1GiB", 107374182},
                 {"0.0000000000000000000000001T", 0},
                 {"4194303.99999999999999999999T", (1LL << 62) - 1},
                 {"4194304.0T", 1LL << 62},
                 {"4194304.1T", -1},
                 {"1.5", -1},
                 {"1.5B", -1},
                 {"1.GiB", -1},
                 {".5GiB", -1},
                 {"1.5.5GiB", -1},
                 {"1.-5GiB", -1},
                 {"1. 5GiB", -1},
                 {"1.", -1},
                 {"1MiBx", -1},
                 {"4611686018427387904", 1LL << 62},
                 {"4611686018427387905", -1},
                 {"5000000T", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t size = -1;
        tb_status status = tb__read_size(cases[i].text, &size);
        assert_int_equal(size, cases[i].size);
        assert_int_equal(status == TB_OK, cases[i].size >= 0);
    }
}

static void growing_text(void **state) {
    (void)state;
    tb__text text = {0};
    char *out;
    for (int i = 0; i < 1000; i++)
        tb__text_add(&text, "%d,", i);
    tb__text_add_json(&text, "a\"b\\c\n\x01 \xC3\xA9 \xC3 \xED\xA0\x80");
    assert_int_equal(tb__text_take(&text, &out), TB_OK);
    assert_int_equal(strncmp(out, "0,1,2,", 6), 0);
    assert_non_null(strstr(out, "999,\"a\\\"b\\\\c\\u000a\\u0001 \xC3\xA9 ? ???\""));
    free(out);
    assert_int_equal(tb__text_take(&text, &out), TB_OK); /* empty is fine */
    assert_string_equal(out, "");
    free(out);
    tb__mem_fail_after(0);
    tb__text_add(&text, "x");
    tb__mem_fail_after(-1);
    assert_int_equal(tb__text_take(&text, &out), TB_NO_MEMORY);
}

static void memory(void **state) {
    (void)state;
    assert_null(tb__malloc(SIZE_MAX / 2, 3));
    assert_non_null(strstr(tb_error_detail(), "out of memory"));
    tb__arena arena = {0};
    for (int round = 0; round < 3; round++) {
        char *last = NULL;
        for (size_t i = 1; i < 2000; i++) {
            char *p = tb__arena_alloc(&arena, i, 7);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % _Alignof(max_align_t), 0);
            memset(p, (int)i, 7 * i);
            assert_true(last == NULL || *last == (char)(i - 1));
            last = p;
        }
        tb__arena_reset(&arena);
    }
    assert_non_null(tb__arena_alloc(&arena, 0, 8));
    assert_null(tb__arena_alloc(&arena, SIZE_MAX / 4, 8));
    tb__arena_fini(&arena);
}

static void indices(void **state) {
    (void)state;
    tb__index index = {0};
    size_t probe = 0;
    assert_int_equal(tb__index_next(&index, 1, &probe), TB__NOWHERE);
    for (size_t i = 0; i < 1000; i++)
        assert_true(tb__index_add(&index, i % 100 * 32, i)); /* many share a hash, and all the first slot */
    for (uint64_t h = 0; h < 100; h++) {
        size_t n = 0, at;
        for (probe = 0; (at = tb__index_next(&index, h * 32, &probe)) != TB__NOWHERE; n++)
            assert_int_equal(at % 100, h);
        assert_int_equal(n, 10);
    }
    probe = 0;
    assert_int_equal(tb__index_next(&index, 7, &probe), TB__NOWHERE);
    tb__index_fini(&index);
}

static void errors_say_where(void **state) {
    (void)state;
    char *longer = malloc(4096);
    memset(longer, 'x', 4095);
    longer[4095] = '\0';
    assert_int_equal(tb__fail(TB_INVALID, "%s", longer), TB_INVALID);
    assert_true(strlen(tb_error_detail()) < 600);
    free(longer);
    tb__fail(TB_IO, "no such %s", "file") == TB_IO ? (void)0 : fail();
    assert_int_equal(tb__fail_within(TB_IO, "line %d", 7), TB_IO);
    assert_string_equal(tb_error_detail(), "line 7: no such file");
    assert_int_equal(tb__fail(TB_INVALID, "'%s'", "\x1b[2J\n\x7f\xc2\x9b\xc3\xa9"), TB_INVALID);
    assert_string_equal(tb_error_detail(), "'?[2J ???\xc3\xa9'");
    assert_int_equal(tb__fail_within(TB_INVALID, "\r%d", 7), TB_INVALID);
    assert_string_equal(tb_error_detail(), " 7: '?[2J ???\xc3\xa9'");
    for (int s = 0; s > -8; s--)
        assert_true(strlen(tb_status_string((tb_status)s)) > 0);
}

static void keep(void *arg, tb_log_level level, const char *line) {
    snprintf(arg, 64, "%d %s", (int)level, line);
}

static void count_line(void *arg, tb_log_level level, const char *line) {
    struct {
        int nlines;
        char last[512];
    } *seen = arg;
    assert_int_equal(level, TB_LOG_WARN);
    seen->nlines++;
    snprintf(seen->last, sizeof seen->last, "%s", line);
}

static void log_floods(void **state) {
    (void)state;
    struct {
        int nlines;
        char last[512];
    } seen = {0};
    char last[sizeof((tb__log_kind *)0)->last];
    tb_log_set(TB_LOG_WARN, count_line, &seen);
    for (int i = 1; i <= 11000; i++) {
        tb__log(TB_LOG_WARN, "client %d is broken", i);
        if (i == TB__LOG_BURST)
            assert_string_equal(seen.last, "client 10 is broken; more of these are counted, for a minute");
    }
    assert_true(seen.nlines < 2 * TB__LOG_BURST); /* more than one burst only if this takes a minute */
    tb__log(TB_LOG_WARN, "another kind");
    assert_string_equal(seen.last, "another kind");
    tb_log_set(TB_LOG_OFF, NULL, NULL);
    assert_string_equal(seen.last, "10990 more like this one were left out within a minute: client 11000 is broken");

    static const char a[] = "a", b[] = "b";
    tb__log_limit limit = {0};
    for (uint64_t i = 1; i <= 12; i++)
        assert_int_equal(tb__log_limit_count(&limit, 1000, a, "line of a"), i);
    assert_int_equal(tb__log_limit_count(&limit, 1000, b, "line of b"), 1);
    assert_int_equal(tb__log_limit_take(&limit, 60999, last), 0); /* not over */
    assert_int_equal(tb__log_limit_take(&limit, 61000, last), 2);
    assert_string_equal(last, "line of a");
    assert_int_equal(tb__log_limit_take(&limit, 61000, last), 0);
    assert_int_equal(tb__log_limit_count(&limit, 61000, a, ""), 1);
    assert_int_equal(tb__log_limit_count(&limit, 61000, b, ""), 1);
    for (int i = 0; i < 2 * TB__LOG_KINDS; i++) /* more kinds than there is room for */
        assert_int_equal(tb__log_limit_count(&limit, 61000, last + i, ""), 1);
}

static void log_lines(void **state) {
    (void)state;
    char line[64] = "";
    tb__log(TB_LOG_ERROR, "nobody listens");
    tb_log_set(TB_LOG_WARN, keep, line);
    tb__log(TB_LOG_INFO, "too fine");
    assert_string_equal(line, "");
    tb__log(TB_LOG_WARN, "rank %d", 3);
    assert_string_equal(line, "2 rank 3");
    tb_log_set(TB_LOG_DEBUG, NULL, NULL);
    tb__log(TB_LOG_ERROR, "nobody listens");
    assert_string_equal(line, "2 rank 3");
}

static void log_to_descriptor(void **state) {
    (void)state;
    int fd[2];
    char text[1300], many[1101];
    assert_int_equal(pipe2(fd, O_NONBLOCK), 0);
    tb_log_set_fd(TB_LOG_WARN, fd[1]);
    tb__log(TB_LOG_INFO, "too fine");
    tb__log(TB_LOG_WARN, "rank %d", 3);
    assert_int_equal(read(fd[0], text, sizeof text), 13);
    assert_memory_equal(text, "warn: rank 3\n", 13);
    memset(many, 'x', sizeof many - 1);
    many[sizeof many - 1] = '\0';
    tb__log(TB_LOG_ERROR, "%s", many);
    ssize_t n = read(fd[0], text, sizeof text);
    assert_true(n > 1000);
    assert_int_equal(text[n - 1], '\n');
    tb_log_set_fd(TB_LOG_WARN, -1);
    tb__log(TB_LOG_ERROR, "nobody listens");
    assert_int_equal(read(fd[0], text, sizeof text), -1);
    close(fd[0]);
    close(fd[1]);
}

/* Where huge pages of the file can be mapped whole; a shorter file may be anywhere. */
static void shared_mappings(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 4096, TB__HUGE_PAGE, 3 * (size_t)TB__HUGE_PAGE + 5};
    int fd = memfd_create("base_test", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 4 * (off_t)TB__HUGE_PAGE), 0);
    for (size_t i = 0; i < 4; i++) {
        char *one = tb__map_shared(fd, sizes[i], PROT_READ | PROT_WRITE),
             *other = tb__map_shared(fd, sizes[i], PROT_READ);
        assert_non_null(one);
        assert_non_null(other);
        assert_true(sizes[i] < TB__HUGE_PAGE || (uintptr_t)one % TB__HUGE_PAGE == 0);
        one[sizes[i] - 1] = (char)(i + 1);
        assert_int_equal(other[sizes[i] - 1], i + 1);
        assert_int_equal(munmap(one, sizes[i]), 0);
        assert_int_equal(munmap(other, sizes[i]), 0);
    }
    close(fd);
    for (size_t i = 0; i < 4; i++) {
        assert_null(tb__map_shared(fd, sizes[i], PROT_READ));
        assert_int_equal(errno, EBADF);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes),       cmocka_unit_test(sizes),
        cmocka_unit_test(growing_text), cmocka_unit_test(memory),
        cmocka_unit_test(indices),      cmocka_unit_test(errors_say_where),
        cmocka_unit_test(log_lines),    cmocka_unit_test(log_to_descriptor),
        cmocka_unit_test(log_floods),   cmocka_unit_test(shared_mappings),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
