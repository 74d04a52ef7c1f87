/* The shm transport in a process that has no file descriptors left: nobody spins, both ends hear whose limit it is, and
 * what waited goes on when there are some again. Both ends are in this process. */
#include "../tests/support/conformance.h"
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

enum { LIMIT = 64, LARGE = 3 << 20 };

static int taken[LIMIT], ntaken;

static void exhaust(void) {
    int fd;
    while ((fd = dup(STDERR_FILENO)) >= 0)
        taken[ntaken++] = fd;
    assert_true(ntaken < LIMIT);
}

static void relieve(void) {
    while (ntaken > 0)
        close(taken[--ntaken]);
}

typedef struct side {
    tb_transport t;
    int32_t rank;
    unsigned char address[TB_ADDRESS_MAX];
    size_t nbytes;
    char lost[256]; /* why */
} side;

static void note_loss(void *arg, int32_t rank, const char *why) {
    side *s = arg;
    (void)rank;
    snprintf(s->lost, sizeof s->lost, "%s", why);
}

static void open_side(side *s, int32_t rank) {
    tb_transport_env env = {.size = sizeof env, .rank = rank, .arg = s, .lost = note_loss};
    *s = (side){.rank = rank, .nbytes = sizeof s->address};
    assert_int_equal(tb__transport_open("shm", &env, &s->t), TB_OK);
    assert_int_equal(s->t.ops->address(s->t.context, s->address, &s->nbytes), TB_OK);
}

static void connect_to(const side *from, const side *to) {
    assert_int_equal(from->t.ops->connect(from->t.context, to->rank, to->address, to->nbytes), TB_OK);
}

static void progress(const side *s) {
    assert_int_equal(s->t.ops->progress(s->t.context), TB_OK);
}

/* Drives one end for a while, as the event loop does; returns how often it woke up. */
static int drive(const side *s, int ms) {
    struct pollfd fd = {.fd = s->t.ops->fd(s->t.context), .events = POLLIN};
    int64_t deadline_ms = tb__now_ms() + ms;
    int nwakes = 0;
    while (tb__now_ms() < deadline_ms) {
        progress(s);
        nwakes += poll(&fd, 1, tb__ms_until(deadline_ms)) > 0;
    }
    return nwakes;
}

/* A message from one to the other. */
typedef struct message {
    tb_op send, receive;
    tb_piece from, to;
} message;

static void post(message *m, const side *a, const side *b, size_t nbytes) {
    m->from = (tb_piece){malloc(nbytes), nbytes};
    m->to = (tb_piece){malloc(nbytes), nbytes};
    for (size_t i = 0; i < nbytes; i++) {
        ((unsigned char *)m->from.base)[i] = (unsigned char)(i * 7);
        ((unsigned char *)m->to.base)[i] = 0xee;
    }
    make_op(&m->send, TB_OP_SEND, b->rank, 9, &m->from, 1);
    make_op(&m->receive, TB_OP_RECV, a->rank, 9, &m->to, 1);
    assert_int_equal(tb__transport_post(&b->t, &m->receive), TB_OK);
    assert_int_equal(tb__transport_post(&a->t, &m->send), TB_OK);
}

static void arrives(message *m, const side *a, const side *b) {
    endpoints e = {a->t, b->t, a->rank, b->rank};
    work_until_done(&e, (tb_op *[]){&m->send, &m->receive}, 2);
    assert_int_equal(m->send.status, TB_OK);
    assert_int_equal(m->receive.status, TB_OK);
    assert_memory_equal(m->from.base, m->to.base, m->from.nbytes);
}

static void drop(message *m) {
    free(m->from.base);
    free(m->to.base);
}

static void close_both(side *a, side *b) {
    tb__transport_close(&a->t);
    tb__transport_close(&b->t);
}

static void accepting_waits(void **state) {
    (void)state;
    side a, b;
    message m;
    open_side(&a, 1);
    open_side(&b, 2);
    connect_to(&a, &b);
    connect_to(&b, &a);
    exhaust();
    assert_in_range(drive(&b, 1000), 1, 100);
    relieve();
    post(&m, &a, &b, 100);
    arrives(&m, &a, &b);
    drop(&m);
    close_both(&a, &b);
}

/* Both know each other, and the receiver can't read the sender's memory. */
static void meet_denied(side *a, side *b) {
    open_side(a, 1);
    open_side(b, 2);
    connect_to(a, b);
    connect_to(b, a);
    for (int i = 0; i < 10; i++) {
        progress(a);
        progress(b);
    }
    shm_find(a->t.context, b->rank)->it_can_read = false;
}

static void a_ring_is_made_later(void **state) {
    (void)state;
    side a, b;
    message m;
    meet_denied(&a, &b);
    exhaust();
    post(&m, &a, &b, LARGE);
    for (int i = 0; i < 10; i++) {
        progress(&a);
        progress(&b);
    }
    assert_null(shm_find(a.t.context, b.rank)->ring_out);
    assert_in_range(drive(&a, 500), 1, 100);
    relieve();
    arrives(&m, &a, &b);
    drop(&m);
    close_both(&a, &b);
}

static void a_ring_that_can_not_be_received(void **state) {
    (void)state;
    side a, b;
    message m;
    char number[64];
    meet_denied(&a, &b);
    post(&m, &a, &b, LARGE);
    for (int i = 0; i < 10 && !shm_find(a.t.context, b.rank)->ring_out; i++) {
        progress(&b);
        progress(&a);
    }
    exhaust();
    for (int i = 0; i < 10; i++) {
        progress(&b);
        progress(&a);
    }
    snprintf(number, sizeof number, "RLIMIT_NOFILE is %d", LIMIT);
    assert_non_null(strstr(b.lost, number));
    assert_non_null(strstr(b.lost, "a frame of it can't be received"));
    assert_non_null(strstr(a.lost, number));
    assert_non_null(strstr(a.lost, "it is out of file descriptors"));
    assert_int_equal(m.send.status, TB_LOST);
    assert_int_equal(m.receive.status, TB_LOST);
    relieve();
    drop(&m);
    close_both(&a, &b);
}

/* Also where some of them could be received. */
static void descriptors_that_can_not_be_received(void **state) {
    (void)state;
    enum { NFDS = 5 };
    side a, b;
    message m;
    char number[64];
    int fds[NFDS], got[NFDS];
    snprintf(number, sizeof number, "RLIMIT_NOFILE is %d", LIMIT);
    for (int nfree = 0; nfree < NFDS; nfree++) {
        uint64_t id;
        meet_denied(&a, &b);
        for (int i = 0; i < NFDS; i++)
            fds[i] = STDERR_FILENO;
        exhaust();
        for (int i = 0; i < nfree; i++)
            close(taken[--ntaken]);
        int before = ntaken;
        assert_int_equal(a.t.ops->fd_send(a.t.context, b.rank, fds, NFDS, &id), TB_OK);
        post(&m, &a, &b, 100);
        arrives(&m, &a, &b);
        assert_int_equal(b.t.ops->fd_take(b.t.context, a.rank, id, got, NFDS), TB_IO);
        assert_non_null(strstr(tb_error_detail(), number));
        exhaust();
        assert_int_equal(ntaken, before + nfree); /* none was kept */
        relieve();
        drop(&m);
        close_both(&a, &b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepting_waits),
        cmocka_unit_test(a_ring_is_made_later),
        cmocka_unit_test(a_ring_that_can_not_be_received),
        cmocka_unit_test(descriptors_that_can_not_be_received),
    };
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){LIMIT, LIMIT});
    return cmocka_run_group_tests(tests, NULL, NULL);
}
