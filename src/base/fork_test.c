/* Descriptors in children that are forked while other threads open and close them. */
#include "base/process.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { NFORKS = 2000, NTHREADS = 4, MOST_FDS = 64 };

static atomic_bool is_done;

static void *open_and_close(void *arg) {
    char text[64];
    tb__owned_fd owned;
    while (!is_done) {
        int fd = tb__fd_own(eventfd(0, EFD_CLOEXEC));
        tb__owned_fd_init(&owned, tb__fd_own(eventfd(0, EFD_CLOEXEC)));
        tb__read_short_file("/proc/self/stat", text, sizeof text);
        tb__owned_fd_close(&owned);
        tb__fd_close(fd);
    }
    return arg;
}

static int count_fds(void) {
    int count = 0;
    for (int fd = 0; fd < MOST_FDS; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void children_have_none(void **state) {
    (void)state;
    pthread_t threads[NTHREADS];
    int before = count_fds(), nbad = 0;
    for (int i = 0; i < NTHREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, open_and_close, NULL), 0);
    for (int i = 0; i < NFORKS; i++) {
        int status = -1;
        pid_t child = fork();
        if (child == 0)
            _exit(count_fds() != before);
        assert_true(child > 0 && waitpid(child, &status, 0) == child);
        nbad += status != 0;
    }
    is_done = true;
    for (int i = 0; i < NTHREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(nbad, 0);
    assert_int_equal(count_fds(), before);
}

/* A child may open and close its own, and fork in turn. */
static void children_go_on(void **state) {
    (void)state;
    int fd = tb__fd_own(eventfd(0, EFD_CLOEXEC)), before = count_fds(), status = -1;
    pid_t child = fork();
    if (child == 0) {
        int own = tb__fd_own(eventfd(0, EFD_CLOEXEC));
        pid_t grandchild = fork();
        if (grandchild == 0)
            _exit(count_fds() != before - 1);
        bool is_good = own >= 0 && waitpid(grandchild, &status, 0) == grandchild && status == 0;
        tb__fd_close(own);
        _exit(!is_good || count_fds() != before - 1);
    }
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    assert_int_equal(status, 0);
    tb__fd_close(fd);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(children_have_none), cmocka_unit_test(children_go_on)};
    return cmocka_run_group_tests_name("fork", tests, NULL, NULL);
}
