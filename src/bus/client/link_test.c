/* A connection that fails on this side: only what the peer does says that it uses no memory of this process any more.
 */
#include "bus/client/link.h"

#include "base/descriptors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATIENCE_MS = 30000, LARGE = 8 << 20 };

typedef struct scene {
    tb__link *link;
    int peer;
} scene;

static int begin(void **state) {
    static scene s;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0 ||
        tb__link_create("the peer", " is gone", &s.link) != TB_OK)
        return -1;
    tb__owned_fd_init(&s.link->socket, ends[0]);
    s.peer = ends[1];
    *state = &s;
    return 0;
}

static int end(void **state) {
    scene *s = *state;
    tb__link_close(s->link);
    if (s->peer >= 0)
        close(s->peer);
    return 0;
}

static tb_status send_some(scene *s, size_t nbytes, const int *fds, size_t nfds) {
    tb__bytes frame = {.item = calloc(nbytes, 1), .count = nbytes};
    assert_non_null(frame.item);
    tb_status status = tb__link_send(s->link, &frame, fds, nfds, tb__now_ms() + PATIENCE_MS, NULL);
    free(frame.item);
    return status;
}

/* A descriptor that can't be sent is no loss of the peer: later frames arrive. */
static void test_wrong_descriptor(void **state) {
    scene *s = *state;
    int closed = dup(s->peer);
    char bytes[8];
    close(closed);
    tb__link_lock(s->link);
    assert_int_equal(send_some(s, 8, &closed, 1), TB_IO);
    assert_string_equal(tb_error_detail(), "the peer: a frame can't be sent: Bad file descriptor");
    assert_false(s->link->is_over);
    assert_int_equal(s->link->nframes, 0);
    assert_int_equal(send_some(s, 8, NULL, 0), TB_OK);
    assert_int_equal(recv(s->peer, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    assert_int_equal(s->link->nframes, 1);
    tb__link_unlock(s->link);
}

static void *send_large(void *arg) {
    scene *s = arg;
    tb__link_lock(s->link);
    tb_status status = send_some(s, LARGE, NULL, 0);
    tb__link_unlock(s->link);
    return (void *)(intptr_t)status;
}

static bool is_half_sent(const scene *s) {
    char byte;
    return recv(s->peer, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

/* This process gives the connection up while a frame is being sent. The peer may still write to its memory. */
static void test_given_up(void **state) {
    scene *s = *state;
    pthread_t thread;
    void *status;
    assert_int_equal(pthread_create(&thread, NULL, send_large, s), 0);
    while (!is_half_sent(s))
        usleep(1000);
    tb__link_lock(s->link);
    tb__link_break(s->link, "it is given up");
    tb__link_unlock(s->link);
    char *taken = malloc(LARGE); /* there is room for the rest of the frame now */
    assert_non_null(taken);
    assert_true(recv(s->peer, taken, LARGE, 0) > 0);
    free(taken);
    pthread_join(thread, &status);
    assert_int_equal((intptr_t)status, TB_LOST);
    assert_false(s->link->is_over);
    close(s->peer);
    s->peer = -1;
    tb__link_lock(s->link);
    tb__link_await_end(s->link);
    tb__link_unlock(s->link);
    assert_true(s->link->is_over);
}

/* The peer has closed the connection, which is found by sending. */
static void test_closed(void **state) {
    scene *s = *state;
    close(s->peer);
    s->peer = -1;
    tb__link_lock(s->link);
    assert_int_equal(send_some(s, 8, NULL, 0), TB_LOST);
    assert_true(s->link->is_over);
    tb__link_unlock(s->link);
}

static bool never(void *arg) {
    (void)arg;
    return false;
}

static bool is_heard(void *arg) {
    return ((scene *)arg)->link->heard_ms > 0;
}

static void *send_late(void *arg) {
    scene *s = arg;
    usleep(3000 * TB__LINK_RECV_MS);
    return (void *)(intptr_t)send(s->peer, "\1", 1, 0);
}

/* The thread sleeps in recv first, and then in poll. */
static void test_late_bytes(void **state) {
    scene *s = *state;
    pthread_t thread;
    tb__link_let_block(s->link);
    assert_true(s->link->may_block);
    assert_int_equal(pthread_create(&thread, NULL, send_late, s), 0);
    tb__link_lock(s->link);
    assert_int_equal(tb__link_wait(s->link, is_heard, s, tb__now_ms() + PATIENCE_MS, "said a word"), TB_OK);
    assert_int_equal(tb__link_wait(s->link, never, s, tb__now_ms() + 5, "said another"), TB_TIMEOUT);
    tb__link_unlock(s->link);
    pthread_join(thread, NULL);
}

/* A process that has a copy of the peer's end, as one that the peer has forked, does not hide the peer's end. */
static void test_peer_killed(void **state) {
    scene *s = *state;
    pid_t child = fork();
    if (child == 0) {
        usleep(500 * TB__LINK_RECV_MS);
        _exit(0);
    }
    tb__link_let_block(s->link);
    s->link->pidfd = tb__fd_own((int)syscall(SYS_pidfd_open, child, 0));
    assert_true(s->link->pidfd >= 0);
    tb__link_lock(s->link);
    assert_int_equal(tb__link_wait(s->link, never, s, tb__now_ms() + PATIENCE_MS, "said a word"), TB_LOST);
    assert_string_equal(tb_error_detail(), "the peer is gone: its process has ended");
    tb__link_unlock(s->link);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_wrong_descriptor, begin, end),
                                       cmocka_unit_test_setup_teardown(test_given_up, begin, end),
                                       cmocka_unit_test_setup_teardown(test_closed, begin, end),
                                       cmocka_unit_test_setup_teardown(test_late_bytes, begin, end),
                                       cmocka_unit_test_setup_teardown(test_peer_killed, begin, end)};
    return cmocka_run_group_tests_name("link", tests, NULL, NULL);
}
