/* The ucx transport, while two processes meet: one of them may be killed at any moment of it. */
#include "../tests/support/ucx_ends.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { NSTEPS = 24, UNTIL_WE_MET = -1, SETTLE_MS = 2 };

typedef struct other {
    pid_t pid;
    int up, down; /* what it says, what it is told */
} other;

static void must_write(int fd, const void *data, size_t nbytes) {
    if (write(fd, data, nbytes) != (ssize_t)nbytes)
        _exit(1);
}

/* Rank 1: connects when it is told an address, and lets UCX work once for each byte that it is told then. */
static void play(int in, int out) {
    tb_transport t;
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX], byte = 1;
    size_t n;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    open_one(&t, 1, NULL, mine, &n);
    must_write(out, mine, n);
    ssize_t got = read(in, theirs, sizeof theirs);
    if (got <= 0)
        _exit(1);
    if (got > 1)
        connect_to(&t, 0, theirs, (size_t)got);
    ucx *u = t.context;
    for (;;) {
        must_write(out, &byte, 1); /* we are ready for a step */
        if (read(in, &byte, 1) != 1)
            _exit(0);
        u->call->worker_progress(u->worker);
    }
}

static other start(unsigned char *address, size_t *nbytes) {
    int up[2], down[2];
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    other o = {.pid = fork(), .up = up[0], .down = down[1]};
    assert_true(o.pid >= 0);
    if (o.pid == 0) {
        close(up[0]);
        close(down[1]);
        play(down[0], up[1]);
    }
    close(up[1]);
    close(down[0]);
    ssize_t got = read(o.up, address, TB_ADDRESS_MAX);
    assert_true(got > 0);
    *nbytes = (size_t)got;
    return o;
}

static void end(const other *o) {
    kill(o->pid, SIGKILL);
    waitpid(o->pid, NULL, 0);
    close(o->up);
    close(o->down);
}

static void step(const other *o) {
    unsigned char byte;
    assert_int_equal(read(o->up, &byte, 1), 1);
    assert_int_equal(write(o->down, "x", 1), 1);
}

typedef enum who { US, THEM, BOTH } who;

/* It is killed after some steps. We hear of it, or never hear of anything, and go on. Returns whether we had met. */
static bool kill_after(int nsteps, who connects) {
    losses l = {0};
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX], byte = 7;
    size_t n, ntheirs;
    other o = start(theirs, &ntheirs);
    tb_transport t;
    open_one(&t, 0, &l, mine, &n);
    ucx *u = t.context;
    tb_piece piece = {&byte, 1};
    tb_op send;
    make_op(&send, TB_OP_SEND, 1, 1, &piece, 1);
    if (connects != THEM) {
        connect_to(&t, 1, theirs, ntheirs);
        post(&t, &send);
    }
    assert_true(write(o.down, connects == US ? (unsigned char *)"x" : mine, connects == US ? 1 : n) > 0);
    bool has_met = false;
    time_t deadline = seconds() + 60;
    for (int i = 0; nsteps == UNTIL_WE_MET ? !has_met && seconds() < deadline : i < nsteps; i++) {
        step(&o);
        poll(NULL, 0, SETTLE_MS);
        u->call->worker_progress(u->worker);
        const ucx_peer *peer = ucx_find(u, 1);
        has_met = peer && peer->is_met;
    }
    end(&o);
    struct pollfd fd = {.fd = t.ops->fd(t.context), .events = POLLIN};
    for (int i = 0; i < 20 && l.count == 0; i++) {
        assert_int_equal(t.ops->progress(t.context), TB_OK);
        poll(&fd, 1, 10);
    }
    tb__transport_close(&t);
    return has_met;
}

static void a_peer_is_killed_while_it_meets_us(void **state) {
    (void)state;
    for (who w = US; w <= BOTH; w++) {
        for (int i = 0; i < NSTEPS; i++) {
            printf("%d %d\n", w, i);
            fflush(stdout);
            kill_after(i, w);
        }
    }
}

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_peer_is_killed_while_it_meets_us)};
    return cmocka_run_group_tests_name("transport ucx, meeting", tests, NULL, NULL);
}
