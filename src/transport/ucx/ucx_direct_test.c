/* Direct chunks of the ucx transport: which lanes have them, pieces of all lengths, and memory that UCX has when a peer
 * stands still or dies. Over TCP, or with the argument "shm" over UCX's shared memory. */
#include "../tests/support/ucx_ends.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static bool is_shm;

static void lanes_say_how_chunks_go(void **state) {
    (void)state;
    endpoints e;
    tb__ucx_direct = -1;
    make(&e);
    assert_int_equal(ucx_find(e.a.context, e.rank_b)->is_direct, is_shm);
    assert_int_equal(ucx_find(e.b.context, e.rank_a)->is_direct, is_shm);
    unmake(&e);
    tb__ucx_direct = 1;
}

enum { MESSAGE = 3 << 20, PIECES_MOST = MESSAGE / 100 + 2 };

/* Cuts memory into pieces of this length, each in a place of its own, with an empty one among them. */
static size_t cut(unsigned char *memory, size_t length, tb_piece *pieces) {
    size_t n = 0, at = 0;
    pieces[n++] = (tb_piece){memory, 0};
    for (; at < MESSAGE; at += pieces[n - 1].nbytes)
        pieces[n++] = (tb_piece){memory + at, MESSAGE - at < length ? MESSAGE - at : length};
    for (size_t i = 1; i < n / 2; i += 2) { /* not in the order of their addresses */
        tb_piece other = pieces[n - 1 - i];
        if (other.nbytes == pieces[i].nbytes) {
            pieces[n - 1 - i] = pieces[i];
            pieces[i] = other;
        }
    }
    return n;
}

static void pieces_of_all_lengths(void **state) {
    (void)state;
    static const size_t lengths[] = {100, 5000, 70000, 300000, MESSAGE};
    static unsigned char from[MESSAGE], to[MESSAGE], sent[MESSAGE], received[MESSAGE];
    static tb_piece out[PIECES_MOST], in[PIECES_MOST];
    enum { N = sizeof lengths / sizeof *lengths };
    endpoints e;
    make(&e);
    for (size_t i = 0; i < MESSAGE; i++)
        from[i] = (unsigned char)(i * 2654435761U >> 11);
    for (size_t i = 0; i < (size_t)N * N; i++) {
        tb_op send, receive;
        memset(to, 0, MESSAGE);
        size_t nout = cut(from, lengths[i / N], out), nin = cut(to, lengths[i % N], in);
        make_op(&send, TB_OP_SEND, e.rank_b, i, out, nout);
        make_op(&receive, TB_OP_RECV, e.rank_a, i, in, nin);
        post(&e.b, &receive);
        post(&e.a, &send);
        work_until_done(&e, (tb_op *[]){&send, &receive}, 2);
        assert_int_equal(receive.status, TB_OK);
        assert_int_equal(receive.nbytes, MESSAGE);
        tb__pieces_gather(out, nout, 0, sent, MESSAGE);
        tb__pieces_gather(in, nin, 0, received, MESSAGE);
        if (memcmp(sent, received, MESSAGE) != 0)
            fail_msg("pieces of %zu bytes came wrong in pieces of %zu", lengths[i / N], lengths[i % N]);
    }
    unmake(&e);
}

/* Memory of its own, so that it can be unmapped. */
static unsigned char *map_large(void) {
    unsigned char *memory = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    memset(memory, 1, LARGE);
    return memory;
}

/* A large message from a to b, of which some is there. */
typedef struct half_way {
    endpoints e;
    unsigned char *from, *to;
    tb_piece out, in;
    tb_op send, receive;
} half_way;

static void begin_half_way(half_way *h) {
    *h = (half_way){.from = map_large(), .to = map_large()};
    make(&h->e);
    h->out = (tb_piece){h->from, LARGE};
    h->in = (tb_piece){h->to, LARGE};
    make_op(&h->send, TB_OP_SEND, h->e.rank_b, 7, &h->out, 1);
    make_op(&h->receive, TB_OP_RECV, h->e.rank_a, 7, &h->in, 1);
    post(&h->e.b, &h->receive);
    post(&h->e.a, &h->send);
    work_until_half(&h->e);
}

/* Given up while the other end stands still: it is lost for it, and nobody touches the memory any more, which is gone.
 */
static void give_up_alone(bool is_send) {
    half_way h;
    begin_half_way(&h);
    tb_op *mine = is_send ? &h.send : &h.receive;
    const losses *lost = is_send ? &lost_by_a : &lost_by_b;
    ucx_peer *peer = ((ucx_posted *)mine->state)->peer;
    assert_true(((ucx_posted *)mine->state)->nrequests > 0);
    time_t before = seconds();
    tb__transport_cancel(is_send ? &h.e.a : &h.e.b, mine);
    assert_in_range(seconds() - before, 0, 5);
    assert_true(is_done(mine));
    assert_int_equal(mine->status, TB_CANCELLED);
    assert_int_equal(peer->nrequests, 0);
    assert_int_equal(munmap(is_send ? h.from : h.to, LARGE), 0);
    assert_int_equal(lost->count, 0); /* that is told by progress */
    work_until_lost(&h.e, lost);
    assert_string_equal(lost->why, "it stood still while an operation with it was given up");
    unmake(&h.e);
    munmap(is_send ? h.to : h.from, LARGE);
}

static void a_send_is_given_up_alone(void **state) {
    (void)state;
    give_up_alone(true);
}

static void a_receive_is_given_up_alone(void **state) {
    (void)state;
    give_up_alone(false);
}

/* An end that leaves in the middle has its memory back when it has left. */
static void an_end_leaves_in_the_middle(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        half_way h;
        begin_half_way(&h);
        leave(i == 0 ? &h.e.a : &h.e.b, i == 0 ? &h.e.b : &h.e.a);
        assert_int_equal((i == 0 ? h.send : h.receive).status, TB_CANCELLED);
        assert_int_equal(munmap(i == 0 ? h.from : h.to, LARGE), 0);
        tb_transport left = i == 0 ? h.e.b : h.e.a;
        endpoints alone = {left, left, h.e.rank_b, h.e.rank_b};
        work_until_done(&alone, (tb_op *[]){i == 0 ? &h.receive : &h.send}, 1);
        assert_int_equal((i == 0 ? h.receive : h.send).status, TB_LOST);
        assert_int_equal(munmap(i == 0 ? h.to : h.from, LARGE), 0);
        tb__transport_close(&left);
    }
}

/* Takes part in one large message, until it is killed. */
static void move_large(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out, const void *arg) {
    (void)in;
    (void)out;
    connect_to(t, 0, address, nbytes);
    tb_piece piece = {map_large(), LARGE};
    tb_op op;
    make_op(&op, *(const tb_op_kind *)arg, 0, 7, &piece, 1);
    post(t, &op);
    for (endpoints e = {*t, *t, 1, 1};; rest(&e))
        t->ops->progress(t->context);
}

static void kill_in_the_middle(tb_op_kind mine, tb_op_kind theirs) {
    losses l = {0};
    unsigned char address[TB_ADDRESS_MAX];
    size_t n;
    stranger o;
    stranger_start(&o, move_large, &theirs);
    tb_transport t;
    open_one(&t, 0, &l, address, &n);
    stranger_tell(&o, address, n);
    connect_to(&t, 1, o.address, o.nbytes);
    unsigned char *memory = map_large();
    tb_piece piece = {memory, LARGE};
    tb_op op;
    make_op(&op, mine, 1, 7, &piece, 1);
    post(&t, &op);
    ucx *u = t.context;
    const ucx_posted *p = op.state;
    for (time_t deadline = seconds() + 60; p->nrequests == 0 && seconds() < deadline;)
        u->call->worker_progress(u->worker);
    assert_true(p->nrequests > 0);
    stranger_kill(&o);
    endpoints alone = {t, t, 0, 0};
    work_until_done(&alone, (tb_op *[]){&op}, 1);
    assert_int_equal(munmap(memory, LARGE), 0);
    assert_int_equal(op.status, TB_LOST);
    assert_int_equal(l.count, 1);
    assert_int_equal(l.rank, 1);
    tb__transport_close(&t);
    stranger_close(&o);
}

static void a_receiver_is_killed(void **state) {
    (void)state;
    kill_in_the_middle(TB_OP_SEND, TB_OP_RECV);
}

static void a_sender_is_killed(void **state) {
    (void)state;
    kill_in_the_middle(TB_OP_RECV, TB_OP_SEND);
}

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    is_shm = argc > 1 && strcmp(argv[1], "shm") == 0;
    tb__ucx_direct = 1;
    const struct CMUnitTest whole[] = {cmocka_unit_test(lanes_say_how_chunks_go),
                                       cmocka_unit_test(pieces_of_all_lengths)};
    /* UCX 1.13 crashes now and then when a connection of TCP breaks in the middle of a rendezvous. Chunks don't go that
     * way over TCP, unless a test like this one asks for it. */
    const struct CMUnitTest broken[] = {cmocka_unit_test(a_send_is_given_up_alone),
                                        cmocka_unit_test(a_receive_is_given_up_alone),
                                        cmocka_unit_test(an_end_leaves_in_the_middle),
                                        cmocka_unit_test(a_receiver_is_killed), cmocka_unit_test(a_sender_is_killed)};
    int nfailed = cmocka_run_group_tests_name("transport ucx, direct", whole, NULL, NULL);
    return nfailed || !is_shm ? nfailed : cmocka_run_group_tests_name("the same, broken off", broken, NULL, NULL);
}
