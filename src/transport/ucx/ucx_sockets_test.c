/* The ucx transport: a peer that is killed is noticed by the end of its connection, whatever processes it has started
 * that are still there. If they held the connection it would be missed later, for its silence. */
#include "../tests/support/ucx_ends.h"

#include <poll.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef enum way { FORK, SPAWN } way;

/* What the other end does. */
typedef struct habits {
    way way;
    bool connects;
} habits;

extern char **environ;

/* Starts a process that is there until `in`, a pipe, is closed at its other end. */
static void start_another(way w, int in) {
    pid_t pid = 0;
    char byte, name[] = "cat", *argv[] = {name, NULL};
    posix_spawn_file_actions_t actions;
    if (w == FORK) {
        pid = fork();
        if (pid == 0)
            _exit(read(in, &byte, 1) == 0 ? 0 : 1);
        return;
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in, 0);
    if (posix_spawnp(&pid, "cat", &actions, NULL, argv, environ) != 0)
        _exit(1);
    posix_spawn_file_actions_destroy(&actions);
}

/* Rank 1: says hello to rank 0 or waits for its hello, starts another process when it has met it, says so, and works
 * until it is killed. */
static void play(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out, const void *arg) {
    const habits *h = arg;
    if (h->connects)
        connect_to(t, 0, address, nbytes);
    struct pollfd fd = {.fd = t->ops->fd(t->context), .events = POLLIN};
    for (bool has_told = false;;) {
        t->ops->progress(t->context);
        const ucx_peer *peer = ucx_find(t->context, 0);
        if (!has_told && peer && peer->has_hello) {
            start_another(h->way, in);
            has_told = write(out, "x", 1) == 1;
        }
        poll(&fd, 1, 100);
    }
}

static void kill_one(way w, bool they_connect) {
    losses l = {0};
    unsigned char mine[TB_ADDRESS_MAX], byte;
    size_t n;
    stranger o;
    stranger_start(&o, play, &(habits){w, they_connect});
    tb_transport t;
    open_one(&t, 0, &l, mine, &n);
    if (!they_connect)
        connect_to(&t, 1, o.address, o.nbytes);
    stranger_tell(&o, mine, n);
    endpoints e = {.a = t, .b = t, .rank_a = 0, .rank_b = 0};
    struct pollfd fds[2] = {{.fd = t.ops->fd(t.context), .events = POLLIN}, {.fd = o.up, .events = POLLIN}};
    for (time_t deadline = seconds() + 60; !(fds[1].revents & POLLIN) && seconds() < deadline;) {
        assert_int_equal(t.ops->progress(t.context), TB_OK);
        poll(fds, 2, 100);
    }
    assert_int_equal(read(o.up, &byte, 1), 1);
    stranger_kill(&o);
    work_until_lost(&e, &l);
    assert_null(strstr(l.why, "nothing has come"));
    tb__transport_close(&t);
    close(o.down); /* what it has started ends */
    assert_int_equal(poll(&(struct pollfd){.fd = o.up, .events = POLLIN}, 1, 60000), 1);
    close(o.up);
}

static void a_killed_peer_has_forked(void **state) {
    (void)state;
    kill_one(FORK, true);
    kill_one(FORK, false);
}

static void a_killed_peer_has_started_a_program(void **state) {
    (void)state;
    kill_one(SPAWN, true);
    kill_one(SPAWN, false);
}

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_killed_peer_has_forked),
                                       cmocka_unit_test(a_killed_peer_has_started_a_program)};
    return cmocka_run_group_tests_name("transport ucx, sockets", tests, NULL, NULL);
}
