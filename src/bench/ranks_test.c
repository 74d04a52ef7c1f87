/* Processes that work step by step, of which none is left behind, and folders, of which nothing is. */
#include "bench/move.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATIENCE_MS = 60000 };

/* In place of the one that prints: what ranks say arrives here. */
static int nsaid;
static char said[512];

int tool_fail(int exit_status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof said, format, args);
    va_end(args);
    nsaid++;
    return exit_status;
}

static const tool_rank_name names[] = {{"red"}, {"green"}, {"blue"}, {"white"}};

enum { CREW = sizeof names / sizeof *names, NSTEPS = 8 };

static void hang(void) {
    for (;;)
        pause();
}

/* All have ended a step before the next one begins. */
static tb_status meet(void *arg, int rank, int step, tool_slot *slot) {
    _Atomic int *sum = arg;
    if (step > 0 && atomic_load(&sum[step - 1]) != 1 + 2 + 3 + 4)
        return tb__fail(TB_INTERNAL, "step %d began too early", step);
    atomic_fetch_add(&sum[step], rank + 1);
    atomic_fetch_add(&slot->done, step + rank);
    return TB_OK;
}

static tb_status fail_one(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)step;
    (void)slot;
    if (rank == 2)
        return tb__fail(TB_REFUSED, "it is too late");
    hang();
    return TB_OK;
}

static tb_status kill_one(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)step;
    (void)slot;
    if (rank == 1)
        kill(getpid(), SIGKILL);
    hang();
    return TB_OK;
}

/* The last one fails for a reason of its own, after the others have failed because of it. */
static tb_status follow_one(void *arg, int rank, int step, tool_slot *slot) {
    _Atomic int *nlost = arg;
    (void)step;
    (void)slot;
    if (rank < CREW - 1) {
        atomic_fetch_add(nlost, 1);
        return tb__fail(TB_LOST, "white is lost");
    }
    while (atomic_load(nlost) < CREW - 1)
        sched_yield();
    return tb__fail(TB_IO, "the disk is full");
}

static tb_status exit_one(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)step;
    (void)slot;
    if (rank == 0)
        _exit(23);
    hang();
    return TB_OK;
}

static tb_status speak(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)step;
    (void)slot;
    if (rank == 3)
        fprintf(stderr, "first\nsecond"); /* whose line does not end */
    return TB_OK;
}

static tb_status be_late(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)step;
    (void)slot;
    if (rank == 1 || rank == 3)
        hang();
    return TB_OK;
}

typedef tb_status (*work_fn)(void *, int, int, tool_slot *);

static void expect_no_child(void) {
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

/* One step, which has the outcome given; afterwards this process must have no child. */
static void expect_outcome(work_fn work, int timeout_ms, tb_status expected, const char *sentence) {
    tool_guard guard;
    tool_ranks *ranks;
    void *counters;
    assert_int_equal(tool_share(sizeof(_Atomic int), &counters), TB_OK);
    tool_ranks_opts opts = {.n = CREW, .names = names, .timeout_ms = timeout_ms, .work = work, .arg = counters};
    assert_int_equal(tool_guard_init(&guard), TB_OK);
    assert_int_equal(tool_ranks_create(&opts, &guard, &ranks), TB_OK);
    assert_int_equal(tool_ranks_step(ranks, 0, NULL), expected);
    if (sentence)
        assert_string_equal(tb_error_detail(), sentence);
    tool_ranks_destroy(ranks);
    tool_guard_fini(&guard);
    expect_no_child();
    tool_unshare(counters, sizeof(_Atomic int));
}

static void ranks_step_together(void **state) {
    (void)state;
    tool_guard guard;
    tool_ranks *ranks;
    void *sums;
    assert_int_equal(tool_share(NSTEPS * sizeof(_Atomic int), &sums), TB_OK);
    tool_ranks_opts opts = {.n = CREW, .names = names, .timeout_ms = PATIENCE_MS, .work = meet, .arg = sums};
    nsaid = 0;
    signal(SIGHUP, SIG_IGN); /* what is ignored stays so */
    assert_int_equal(tool_guard_init(&guard), TB_OK);
    raise(SIGHUP);
    assert_int_equal(tool_ranks_create(&opts, &guard, &ranks), TB_OK);
    for (int step = 0; step < NSTEPS; step++) {
        double seconds = -1;
        assert_int_equal(tool_ranks_step(ranks, step, &seconds), TB_OK);
        assert_true(seconds >= 0 && seconds < PATIENCE_MS);
        for (int rank = 0; rank < CREW; rank++)
            assert_int_equal(atomic_load(&tool_ranks_slot(ranks, rank)->done), step + rank);
    }
    assert_true(tool_ranks_memory(ranks) != 0);
    tool_ranks_destroy(ranks);
    tool_guard_fini(&guard);
    signal(SIGHUP, SIG_DFL);
    expect_no_child();
    assert_int_equal(nsaid, 0);
    tool_unshare(sums, NSTEPS * sizeof(_Atomic int));
}

static void who_fails_is_named_and_the_others_are_ended(void **state) {
    (void)state;
    expect_outcome(fail_one, PATIENCE_MS, TB_REFUSED, "blue: it is too late");
    expect_outcome(kill_one, PATIENCE_MS, TB_LOST, "green was ended by signal 9 (Killed)");
    expect_outcome(exit_one, PATIENCE_MS, TB_LOST, "red ended with exit status 23");
    expect_outcome(follow_one, PATIENCE_MS, TB_IO, "white: the disk is full");
}

static void a_step_has_a_deadline(void **state) {
    (void)state;
    expect_outcome(be_late, 100, TB_TIMEOUT, NULL);
    assert_non_null(strstr(tb_error_detail(), "not ready after 100 ms: "));
    assert_non_null(strstr(tb_error_detail(), "green"));
    assert_non_null(strstr(tb_error_detail(), "white"));
}

static void what_ranks_say_is_passed_on(void **state) {
    (void)state;
    nsaid = 0;
    expect_outcome(speak, PATIENCE_MS, TB_OK, NULL);
    assert_int_equal(nsaid, 2);
    assert_string_equal(said, "white: second");
}

static void folders_go_with_all_that_is_in_them(void **state) {
    (void)state;
    char path[80], inside[128];
    assert_int_equal(tool_folder_make(path, sizeof path), TB_OK);
    snprintf(inside, sizeof inside, "%s/x", path);
    assert_int_equal(mkdir(inside, 0700), 0);
    snprintf(inside, sizeof inside, "%s/x/y", path);
    int fd = open(inside, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    snprintf(inside, sizeof inside, "%s", path);
    tool_folder_remove(path);
    assert_string_equal(path, "");
    assert_int_equal(access(inside, F_OK), -1);
    tool_folder_remove(path);
    assert_int_equal(tool_folder_make(path, 10), TB_INVALID);
    assert_string_equal(path, "");
}

/* Every rank tells that it is there, then holds on to its end of the pipe until it is ended. */
static int announcement[2];

static tb_status announce_and_hang(void *arg, int rank, int step, tool_slot *slot) {
    (void)arg;
    (void)rank;
    (void)step;
    (void)slot;
    if (write(announcement[1], "!", 1) == 1)
        hang();
    return TB_OK;
}

static bool read_before_deadline(int fd, char *byte, ssize_t *n) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    if (poll(&poll_fd, 1, PATIENCE_MS) != 1)
        return false;
    *n = read(fd, byte, 1);
    return true;
}

/* A process with a crew gets the signal; how it ends is returned. The pipe's end tells that the ranks have ended, too.
 */
static int signal_parent(int number, bool whole_group) {
    char byte;
    ssize_t n = -1;
    int wait_status;
    assert_int_equal(pipe(announcement), 0);
    pid_t parent = fork();
    assert_true(parent >= 0);
    if (parent == 0) {
        tool_guard guard;
        tool_ranks *ranks = NULL;
        setpgid(0, 0);
        close(announcement[0]);
        tool_ranks_opts opts = {.n = CREW, .names = names, .timeout_ms = PATIENCE_MS, .work = announce_and_hang};
        if (tool_guard_init(&guard) != TB_OK || tool_ranks_create(&opts, &guard, &ranks) != TB_OK)
            _exit(90);
        tb_status status = tool_ranks_step(ranks, 0, NULL);
        tool_ranks_destroy(ranks);
        if (waitpid(-1, NULL, WNOHANG) != -1 || status != TB_CANCELLED)
            _exit(91);
        tool_guard_fini(&guard);
        _exit(92);
    }
    close(announcement[1]);
    for (int rank = 0; rank < CREW; rank++) {
        assert_true(read_before_deadline(announcement[0], &byte, &n));
        assert_int_equal(n, 1);
    }
    assert_int_equal(kill(whole_group ? -parent : parent, number), 0);
    assert_int_equal(waitpid(parent, &wait_status, 0), parent);
    assert_true(read_before_deadline(announcement[0], &byte, &n));
    assert_int_equal(n, 0);
    close(announcement[0]);
    assert_true(WIFSIGNALED(wait_status));
    return WTERMSIG(wait_status);
}

static void signals_leave_no_process(void **state) {
    (void)state;
    signal(SIGINT, SIG_DFL); /* whoever runs tests in the background ignores it */
    assert_int_equal(signal_parent(SIGINT, false), SIGINT);
    assert_int_equal(signal_parent(SIGINT, true), SIGINT);
    assert_int_equal(signal_parent(SIGTERM, false), SIGTERM);
    assert_int_equal(signal_parent(SIGTERM, true), SIGTERM);
    assert_int_equal(signal_parent(SIGKILL, false), SIGKILL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_step_together),
        cmocka_unit_test(who_fails_is_named_and_the_others_are_ended),
        cmocka_unit_test(a_step_has_a_deadline),
        cmocka_unit_test(what_ranks_say_is_passed_on),
        cmocka_unit_test(folders_go_with_all_that_is_in_them),
        cmocka_unit_test(signals_leave_no_process),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
