/* Peers that were lost, and are connected again, over each transport that can do that (TB_TRANSPORT): whichever end has
 * noticed the loss, both ends lose the old connection, nothing of it reaches the new one, and that one works. */
#include "base/process.h"
#include "transport/ucx/ucx.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { RANK_A = 5, RANK_B = 2, PATIENCE_MS = 60000 };

typedef struct end {
    tb_transport t;
    int32_t rank;
    int nlosses;
    char why[128];
    unsigned char address[TB_ADDRESS_MAX];
    size_t nbytes;
} end;

static end a, b;

static void note_loss(void *arg, int32_t peer, const char *why) {
    end *e = arg;
    assert_int_equal(peer, e == &a ? RANK_B : RANK_A);
    e->nlosses++;
    snprintf(e->why, sizeof e->why, "%s", why);
}

static void connect_to(const end *from, const end *to) {
    if (from->t.ops->connect(from->t.context, to->rank, to->address, to->nbytes) != TB_OK)
        fail_msg("connect: %s", tb_error_detail());
}

static void open_end(end *e, int32_t rank) {
    *e = (end){.rank = rank, .nbytes = sizeof e->address};
    tb_transport_env env = {.size = sizeof env, .rank = rank, .arg = e, .lost = note_loss, .is_driven = true};
    if (tb__transport_open(getenv("TB_TRANSPORT"), &env, &e->t) != TB_OK)
        fail_msg("open: %s", tb_error_detail());
    assert_int_equal(e->t.ops->address(e->t.context, e->address, &e->nbytes), TB_OK);
}

static void work(void) {
    assert_int_equal(a.t.ops->progress(a.t.context), TB_OK);
    assert_int_equal(b.t.ops->progress(b.t.context), TB_OK);
    struct pollfd fds[2] = {{.fd = a.t.ops->fd(a.t.context), .events = POLLIN},
                            {.fd = b.t.ops->fd(b.t.context), .events = POLLIN}};
    poll(fds, 2, 10);
}

static void await_losses(int of_a, int of_b) {
    for (int64_t deadline_ms = tb__now_ms() + PATIENCE_MS; a.nlosses < of_a || b.nlosses < of_b; work())
        assert_true(tb__now_ms() < deadline_ms);
}

static void done(tb_op *op) {
    *(bool *)op->arg = true;
}

static tb_op op_of(tb_op_kind kind, const end *peer, uint64_t tag, const tb_piece *piece, bool *is_done) {
    *is_done = false;
    return (tb_op){
        .kind = kind, .peer = peer->rank, .tag = tag, .pieces = piece, .npieces = 1, .done = done, .arg = is_done};
}

/* A long message, with a value of its own. */
static void send_one(end *from, end *to, unsigned char value) {
    static unsigned char out[100000], in[sizeof out];
    tb_piece here = {out, sizeof out}, there = {in, sizeof in};
    bool is_sent, is_received;
    memset(out, value, sizeof out);
    memset(in, 0xEE, sizeof in);
    static uint64_t tag = 100;
    tb_op send = op_of(TB_OP_SEND, to, ++tag, &here, &is_sent);
    tb_op receive = op_of(TB_OP_RECV, from, tag, &there, &is_received);
    send.is_expected = true;
    assert_int_equal(tb__transport_post(&to->t, &receive), TB_OK);
    assert_int_equal(tb__transport_post(&from->t, &send), TB_OK);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (!*(bool *)send.arg || !*(bool *)receive.arg) {
        assert_true(tb__now_ms() < deadline_ms);
        work();
    }
    assert_int_equal(send.status, TB_OK);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(receive.nbytes, sizeof in);
    assert_memory_equal(in, out, sizeof in);
}

static int make(void **state) {
    (void)state;
    open_end(&a, RANK_A);
    open_end(&b, RANK_B);
    connect_to(&a, &b);
    connect_to(&b, &a);
    send_one(&a, &b, 1);
    send_one(&b, &a, 2);
    return 0;
}

static int unmake(void **state) {
    (void)state;
    tb__transport_close(&a.t);
    tb__transport_close(&b.t);
    return 0;
}

static void lose(const end *e, const end *peer) {
    e->t.ops->disconnect(e->t.context, peer->rank, "the test ends it");
}

static void connect_both(void) {
    connect_to(&a, &b);
    connect_to(&b, &a);
    send_one(&a, &b, 3);
    send_one(&b, &a, 4);
    for (int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
         !tb__transport_is_reached(&a.t, RANK_B) || !tb__transport_is_reached(&b.t, RANK_A); work())
        assert_true(tb__now_ms() < deadline_ms);
}

static void both_ends_lose_it(void **state) {
    (void)state;
    static unsigned char in[100];
    tb_piece there = {in, sizeof in};
    bool is_received;
    tb_op receive = op_of(TB_OP_RECV, &a, 9, &there, &is_received), late = receive;
    assert_int_equal(tb__transport_post(&b.t, &receive), TB_OK);
    lose(&a, &b);
    await_losses(1, 1);
    assert_string_equal(a.why, "the test ends it");
    assert_true(is_received);
    assert_int_equal(receive.status, TB_LOST);
    assert_int_equal(tb__transport_post(&b.t, &late), TB_LOST);
    connect_both();
    assert_int_equal(a.nlosses + b.nlosses, 2);
}

/* It is connected again before the other end has noticed anything. */
static void a_new_connection_ends_the_old_one(void **state) {
    (void)state;
    lose(&a, &b);
    while (a.nlosses == 0)
        assert_int_equal(a.t.ops->progress(a.t.context), TB_OK);
    connect_to(&a, &b);
    await_losses(1, 1);
    connect_both();
    assert_int_equal(a.nlosses + b.nlosses, 2);
}

static void both_may_begin(void **state) {
    (void)state;
    for (int i = 1; i <= 5; i++) {
        lose(&a, &b);
        lose(&b, &a);
        await_losses(i, i);
        connect_both();
        assert_int_equal(a.nlosses + b.nlosses, 2 * i);
    }
}

/* One end loses it again and again, and the other hears of some of that only. */
static void losses_may_add_up(void **state) {
    (void)state;
    for (int i = 1; i <= 5; i++) {
        lose(&a, &b);
        while (a.nlosses < i)
            assert_int_equal(a.t.ops->progress(a.t.context), TB_OK);
        connect_to(&a, &b);
    }
    connect_to(&b, &a);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (int seen[2] = {a.nlosses, 0}; b.nlosses == 0 || !tb__transport_is_reached(&b.t, RANK_A);) {
        assert_true(tb__now_ms() < deadline_ms);
        work();
        if (a.nlosses > seen[0])
            connect_to(&a, &b);
        if (b.nlosses > seen[1])
            connect_to(&b, &a);
        seen[0] = a.nlosses;
        seen[1] = b.nlosses;
    }
    connect_both();
}

int main(void) {
    const ucx_functions *unused;
    if (strcmp(getenv("TB_TRANSPORT"), "ucx") == 0) {
        setenv("UCX_TLS", "tcp", 1);
        if (ucx_load(&unused) != TB_OK) {
            printf("skipped: %s\n", tb_error_detail());
            return 77;
        }
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(both_ends_lose_it, make, unmake),
                                       cmocka_unit_test_setup_teardown(a_new_connection_ends_the_old_one, make, unmake),
                                       cmocka_unit_test_setup_teardown(both_may_begin, make, unmake),
                                       cmocka_unit_test_setup_teardown(losses_may_add_up, make, unmake)};
    return cmocka_run_group_tests_name("connecting again", tests, NULL, NULL);
}
