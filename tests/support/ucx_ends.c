#include "ucx_ends.h"

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

losses lost_by_a, lost_by_b;
bool ends_are_driven = true;
unsigned char ends_key[TB_KEY_SIZE] = "the key of the ends of a test";

bool choose_lanes(int argc, char **argv) {
    bool is_shm = argc > 1 && strcmp(argv[1], "shm") == 0;
    setenv("UCX_TLS", is_shm ? "posix" : "tcp", 1);
    setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
    tb__ucx_has_backup_driver = false; /* the ends work when tests say so */
    if (is_shm)
        setenv("UCX_KEEPALIVE_INTERVAL", "1s", 1); /* nothing else tells of a peer that is killed there */
    const ucx_functions *unused;
    if (ucx_load(&unused) == TB_OK)
        return true;
    printf("skipped: %s\n", tb_error_detail());
    return false;
}

static void note_loss(void *arg, int32_t rank, const char *why) {
    losses *l = arg;
    l->count++;
    l->rank = rank;
    snprintf(l->why, sizeof l->why, "%s", why);
}

void open_one(tb_transport *t, int32_t rank, losses *l, unsigned char *address, size_t *n) {
    tb_transport_env env = {.size = sizeof env,
                            .rank = rank,
                            .arg = l,
                            .lost = l ? note_loss : NULL,
                            .is_driven = ends_are_driven,
                            .key = ends_key};
    *n = TB_ADDRESS_MAX;
    if (tb__transport_open("ucx", &env, t) != TB_OK)
        fail_msg("open: %s", tb_error_detail());
    assert_int_equal(t->ops->address(t->context, address, n), TB_OK);
}

void connect_to(const tb_transport *t, int32_t rank, const unsigned char *address, size_t n) {
    if (t->ops->connect(t->context, rank, address, n) != TB_OK)
        fail_msg("connect: %s", tb_error_detail());
}

void make(endpoints *e) {
    unsigned char a[TB_ADDRESS_MAX], b[TB_ADDRESS_MAX];
    size_t na, nb;
    lost_by_a = lost_by_b = (losses){0};
    e->rank_a = 5;
    e->rank_b = 2;
    open_one(&e->a, e->rank_a, &lost_by_a, a, &na);
    open_one(&e->b, e->rank_b, &lost_by_b, b, &nb);
    connect_to(&e->a, e->rank_b, b, nb);
    connect_to(&e->b, e->rank_a, a, na);
    connect_to(&e->b, e->rank_a, a, na); /* again: nothing happens */
}

static void *close_it(void *arg) {
    tb__transport_close(arg);
    return NULL;
}

void unmake(endpoints *e) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, close_it, &e->a), 0);
    tb__transport_close(&e->b);
    pthread_join(thread, NULL);
}

void post(const tb_transport *t, tb_op *op) {
    if (tb__transport_post(t, op) != TB_OK)
        fail_msg("post: %s", tb_error_detail());
}

void progress(endpoints *e) {
    assert_int_equal(e->a.ops->progress(e->a.context), TB_OK);
    assert_int_equal(e->b.ops->progress(e->b.context), TB_OK);
}

time_t seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

void rest(endpoints *e) {
    struct pollfd fds[2] = {{.fd = e->a.ops->fd(e->a.context), .events = POLLIN},
                            {.fd = e->b.ops->fd(e->b.context), .events = POLLIN}};
    poll(fds, 2, 1000);
}

void work_until_lost(endpoints *e, const losses *l) {
    for (time_t deadline = seconds() + 60; l->count == 0 && seconds() < deadline; rest(e))
        progress(e);
    assert_int_equal(l->count, 1);
}

void send_byte(endpoints *e, bool from_a, uint64_t tag, unsigned char value) {
    unsigned char got = 0;
    tb_piece out = {&value, 1}, in = {&got, 1};
    tb_op send, receive;
    make_op(&send, TB_OP_SEND, from_a ? e->rank_b : e->rank_a, tag, &out, 1);
    make_op(&receive, TB_OP_RECV, from_a ? e->rank_a : e->rank_b, tag, &in, 1);
    post(from_a ? &e->a : &e->b, &send);
    post(from_a ? &e->b : &e->a, &receive);
    work_until_done(e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(got, value);
}

void work_until_half(endpoints *e) {
    ucx *a = e->a.context, *b = e->b.context;
    const ucx_peer *peer = ucx_find(b, e->rank_a);
    size_t got = 0, nbytes = 0;
    for (time_t deadline = seconds() + 60; got == 0 && seconds() < deadline;) {
        a->call->worker_progress(a->worker);
        b->call->worker_progress(b->worker);
        const ucx_posted *receive = (const ucx_posted *)peer->receiving.first;
        got = receive ? receive->got : 0;
        nbytes = receive ? receive->op->nbytes : 0;
    }
    assert_in_range(got, 1, nbytes - 1);
}

void check(const unsigned char *memory, unsigned char value) {
    for (size_t i = 0; i < LARGE; i++) {
        if (memory[i] != value)
            fail_msg("byte %zu is %d, not %d", i, memory[i], value);
    }
}

void cancel(tb_transport *t, tb_op *op, const tb_transport *other) {
    cancel_or_close(t, op, other);
    assert_true(is_done(op));
}

void leave(tb_transport *t, const tb_transport *other) {
    cancel_or_close(t, NULL, other);
}

static _Noreturn void be_stranger(stranger_part *part, int in, int out, const void *arg) {
    tb_transport t;
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX];
    size_t n;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    open_one(&t, 1, NULL, mine, &n);
    if (write(out, mine, n) != (ssize_t)n)
        _exit(1);
    ssize_t got = read(in, theirs, sizeof theirs);
    if (got <= 0)
        _exit(1);
    part(&t, theirs, (size_t)got, in, out, arg);
    _exit(0);
}

void stranger_start(stranger *o, stranger_part *part, const void *arg) {
    int up[2], down[2];
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    *o = (stranger){.pid = fork(), .up = up[0], .down = down[1]};
    assert_true(o->pid >= 0);
    if (o->pid == 0) {
        close(up[0]);
        close(down[1]);
        be_stranger(part, down[0], up[1], arg);
    }
    close(up[1]);
    close(down[0]);
    ssize_t got = read(o->up, o->address, sizeof o->address);
    assert_true(got > 0);
    o->nbytes = (size_t)got;
}

void stranger_tell(const stranger *o, const void *bytes, size_t nbytes) {
    assert_int_equal(write(o->down, bytes, nbytes), nbytes);
}

void stranger_kill(const stranger *o) {
    kill(o->pid, SIGKILL);
    waitpid(o->pid, NULL, 0);
}

void stranger_close(const stranger *o) {
    close(o->up);
    close(o->down);
}
