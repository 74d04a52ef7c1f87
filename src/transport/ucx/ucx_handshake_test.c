/* The ucx transport, while two processes meet: one of them may be killed at any moment of it. */
#include "../tests/support/ucx_ends.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { NSTEPS = 24, UNTIL_WE_MET = -1, SETTLE_MS = 2 };

/* Rank 1: connects if it is told an address, and lets UCX work once for each byte that it is told then. */
static void play(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out, const void *arg) {
    (void)arg;
    unsigned char byte = 1;
    if (nbytes > 1)
        connect_to(t, 0, address, nbytes);
    ucx *u = t->context;
    /* It says when it is ready for a step. */
    while (write(out, &byte, 1) == 1 && read(in, &byte, 1) == 1)
        u->call->worker_progress(u->worker);
}

static void step(const stranger *o) {
    unsigned char byte;
    assert_int_equal(read(o->up, &byte, 1), 1);
    assert_int_equal(write(o->down, "x", 1), 1);
}

typedef enum who { US, THEM, BOTH } who;

/* It is killed after some steps. We hear of it, or never hear of anything, and go on. Returns whether we had met. */
static bool kill_after(int nsteps, who connects) {
    losses l = {0};
    unsigned char mine[TB_ADDRESS_MAX], byte = 7;
    size_t n;
    stranger o;
    stranger_start(&o, play, NULL);
    tb_transport t;
    open_one(&t, 0, &l, mine, &n);
    ucx *u = t.context;
    tb_piece piece = {&byte, 1};
    tb_op send;
    make_op(&send, TB_OP_SEND, 1, 1, &piece, 1);
    if (connects != THEM) {
        connect_to(&t, 1, o.address, o.nbytes);
        post(&t, &send);
    }
    stranger_tell(&o, mine, connects == US ? 1 : n); /* one byte is no address */
    bool has_met = false;
    time_t deadline = seconds() + 60;
    for (int i = 0; nsteps == UNTIL_WE_MET ? !has_met && seconds() < deadline : i < nsteps; i++) {
        step(&o);
        poll(NULL, 0, SETTLE_MS);
        u->call->worker_progress(u->worker);
        const ucx_peer *peer = ucx_find(u, 1);
        has_met = peer && peer->has_hello;
    }
    stranger_kill(&o);
    stranger_close(&o);
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
