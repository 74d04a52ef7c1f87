/* The shm transport: the shared suite, the way around process_vm_readv, and peers that die. */
#include "transport/shm/shm.h"
#include "../tests/support/conformance.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static bool pretend_denied; /* as if the system forbade reading other processes */

static void open_one(tb_transport *t, int32_t rank, unsigned char *address, size_t *n) {
    tb_transport_env env = {.rank = rank};
    *n = TB_ADDRESS_MAX;
    assert_int_equal(tb__transport_open("shm", &env, t), TB_OK);
    assert_int_equal(t->ops->address(t->context, address, n), TB_OK);
}

static void make(endpoints *e) {
    unsigned char a[TB_ADDRESS_MAX], b[TB_ADDRESS_MAX];
    size_t na, nb;
    e->rank_a = 5;
    e->rank_b = 2;
    open_one(&e->a, e->rank_a, a, &na);
    open_one(&e->b, e->rank_b, b, &nb);
    assert_int_equal(e->a.ops->connect(e->a.context, e->rank_b, b, nb), TB_OK);
    assert_int_equal(e->b.ops->connect(e->b.context, e->rank_a, a, na), TB_OK);
    assert_int_equal(e->b.ops->connect(e->b.context, e->rank_a, a, na), TB_OK); /* again: nothing happens */
    if (!pretend_denied)
        return;
    for (int i = 0; i < 10; i++) {
        e->a.ops->progress(e->a.context);
        e->b.ops->progress(e->b.context);
    }
    shm_find(e->a.context, e->rank_b)->it_can_read = false;
    shm_find(e->b.context, e->rank_a)->it_can_read = false;
}

static void unmake(endpoints *e) {
    tb__transport_close(&e->a);
    tb__transport_close(&e->b);
}

static void shm_conforms(void **state) {
    (void)state;
    pretend_denied = false;
    conformance(make, unmake);
}

static void shm_conforms_through_the_ring(void **state) {
    (void)state;
    pretend_denied = true;
    conformance(make, unmake);
    pretend_denied = false;
}

/* A peer in another process. */
typedef struct other {
    pid_t pid;
    tb_transport here; /* rank 0; the other is rank 1 */
    int32_t lost;
    char why[64];
} other;

static void note_loss(void *arg, int32_t peer, const char *why) {
    other *o = arg;
    o->lost = peer;
    snprintf(o->why, sizeof o->why, "%s", why);
}

enum { MEMORY = 1 << 20 };

static void send_to_parent(tb_transport *t, uint64_t tag, const void *data, size_t n) {
    tb_piece piece = {(void *)data, n};
    tb_op op;
    endpoints e = {*t, *t, 1, 1};
    make_op(&op, TB_OP_SEND, 0, tag, &piece, 1);
    tb__transport_post(t, &op);
    work_until_done(&e, (tb_op *[]){&op}, 1);
}

/* Offers its memory, sends a little, and then does nothing but progress until it is killed. */
static void child(int in, int out) {
    tb_transport t;
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX];
    size_t n, got;
    open_one(&t, 1, mine, &n);
    if (write(out, mine, n) != (ssize_t)n || (got = (size_t)read(in, theirs, sizeof theirs)) != n)
        _exit(1);
    t.ops->connect(t.context, 0, theirs, got);
    unsigned char *memory = malloc(MEMORY);
    for (size_t i = 0; i < MEMORY; i++)
        memory[i] = (unsigned char)(i * 7);
    tb_mem_desc desc = {.base = memory, .nbytes = MEMORY, .fd = -1};
    tb_mem *mem;
    tb_mem_key key;
    t.ops->mem_register(t.context, &desc, &mem);
    t.ops->mem_export(t.context, mem, 0, &key);
    send_to_parent(&t, 1, &key, sizeof key);
    struct pollfd fd = {.fd = t.ops->fd(t.context), .events = POLLIN};
    for (;;) {
        poll(&fd, 1, -1);
        t.ops->progress(t.context);
    }
}

static void start_other(other *o) {
    int up[2], down[2];
    unsigned char mine[TB_ADDRESS_MAX], theirs[TB_ADDRESS_MAX];
    *o = (other){.lost = TB_NO_RANK};
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    o->pid = fork();
    assert_true(o->pid >= 0);
    if (o->pid == 0)
        child(down[0], up[1]);
    tb_transport_env env = {.rank = 0, .arg = o, .lost = note_loss};
    size_t n = sizeof mine;
    assert_int_equal(tb__transport_open("shm", &env, &o->here), TB_OK);
    assert_int_equal(o->here.ops->address(o->here.context, mine, &n), TB_OK);
    assert_int_equal(read(up[0], theirs, sizeof theirs), n);
    assert_int_equal(write(down[1], mine, n), n);
    assert_int_equal(o->here.ops->connect(o->here.context, 1, theirs, n), TB_OK);
    for (int i = 0; i < 2; i++) {
        close(up[i]);
        close(down[i]);
    }
}

/* Another process's memory is read; the process is killed in the middle of things; everybody hears of it, by name. */
static void a_killed_peer_is_noticed(void **state) {
    (void)state;
    other o;
    tb_mem_key key;
    tb_remote *remote;
    tb_op receive, send, waiting;
    static unsigned char large[1 << 20], got[MEMORY];
    tb_piece in = {&key, sizeof key}, out = {large, sizeof large}, more = {got, 1}, all = {got, sizeof got};
    start_other(&o);
    endpoints e = {o.here, o.here, 0, 0};
    make_op(&receive, TB_OP_RECV, 1, 1, &in, 1);
    assert_int_equal(tb__transport_post(&o.here, &receive), TB_OK);
    work_until_done(&e, (tb_op *[]){&receive}, 1);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(o.here.ops->mem_import(o.here.context, 1, &key, &remote), TB_OK);
    tb_status status = tb__transport_read(&o.here, remote, 0, &all, 1);
    if (status == TB_REFUSED) {
        printf("skipped: %s\n", tb_error_detail());
    } else {
        assert_int_equal(status, TB_OK);
        for (size_t i = 0; i < MEMORY; i++)
            assert_int_equal(got[i], (unsigned char)(i * 7));
    }
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1); /* that nobody receives */
    make_op(&waiting, TB_OP_RECV, 1, 3, &more, 1);
    assert_int_equal(tb__transport_post(&o.here, &send), TB_OK);
    assert_int_equal(tb__transport_post(&o.here, &waiting), TB_OK);
    o.here.ops->progress(o.here.context);
    kill(o.pid, SIGKILL);
    work_until_done(&e, (tb_op *[]){&send, &waiting}, 2);
    assert_int_equal(send.status, TB_LOST);
    assert_int_equal(waiting.status, TB_LOST);
    assert_int_equal(o.lost, 1);
    assert_true(strlen(o.why) > 0);
    assert_false(tb__transport_is_valid(&o.here, remote));
    assert_int_equal(tb__transport_read(&o.here, remote, 0, &all, 1), TB_LOST);
    assert_non_null(strstr(tb_error_detail(), "rank 1"));
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1);
    assert_int_equal(tb__transport_post(&o.here, &send), TB_LOST);
    o.here.ops->mem_release(o.here.context, remote);
    tb__transport_close(&o.here);
    waitpid(o.pid, NULL, 0);
}

/* Whoever connects and talks nonsense is shown the door; nobody else notices. */
static void nonsense_is_refused(void **state) {
    (void)state;
    endpoints e;
    unsigned char address[TB_ADDRESS_MAX], garbage[4096];
    size_t n = sizeof address;
    make(&e);
    e.b.ops->address(e.b.context, address, &n);
    memset(garbage, 0xA5, sizeof garbage);
    for (int i = 0; i < 20; i++) {
        tb_transport stranger;
        unsigned char unused[TB_ADDRESS_MAX];
        size_t nunused;
        open_one(&stranger, 9, unused, &nunused);
        assert_int_equal(stranger.ops->connect(stranger.context, e.rank_b, address, n), TB_OK);
        shm_peer *peer = shm_find(stranger.context, e.rank_b);
        for (int j = 0; j < i % 4; j++)
            send(peer->out.fd, garbage, (size_t)i * 200, MSG_NOSIGNAL | MSG_DONTWAIT);
        for (int j = 0; j < 10; j++)
            e.b.ops->progress(e.b.context);
        tb__transport_close(&stranger);
        for (int j = 0; j < 10; j++)
            e.b.ops->progress(e.b.context);
    }
    address[0] ^= 1;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    address[0] ^= 1;
    address[4] ^= 8;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "version"));
    unsigned char byte = 7, got = 0;
    tb_piece out = {&byte, 1}, in = {&got, 1};
    tb_op send_op, receive;
    make_op(&send_op, TB_OP_SEND, e.rank_b, 1, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 1, &in, 1);
    assert_int_equal(tb__transport_post(&e.a, &send_op), TB_OK);
    assert_int_equal(tb__transport_post(&e.b, &receive), TB_OK);
    work_until_done(&e, (tb_op *[]){&send_op, &receive}, 2);
    assert_int_equal(got, 7);
    unmake(&e);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(shm_conforms), cmocka_unit_test(shm_conforms_through_the_ring),
                                       cmocka_unit_test(a_killed_peer_is_noticed),
                                       cmocka_unit_test(nonsense_is_refused)};
    return cmocka_run_group_tests_name("transport shm", tests, NULL, NULL);
}
