/* The heartbeat of the ucx transport, with beats that are shorter than in life. */
#include "../tests/support/ucx_ends.h"
#include "base/process.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/timerfd.h>

#include <cmocka.h>

enum { BEAT_MS = 20, NEVER_MS = 3600000 };

static void make_with(endpoints *e, int beat_ms) {
    tb__ucx_heartbeat_ms = beat_ms;
    make(e);
    send_byte(e, true, 1, 1);
    send_byte(e, false, 1, 2);
}

/* Lets the ends work for so many beats. */
static void live(endpoints *e, int nbeats) {
    struct pollfd fds[2] = {{.fd = e->a.ops->fd(e->a.context), .events = POLLIN},
                            {.fd = e->b.ops->fd(e->b.context), .events = POLLIN}};
    for (int64_t end = tb__now_ms() + (int64_t)nbeats * BEAT_MS; tb__now_ms() < end; poll(fds, 2, BEAT_MS))
        progress(e);
}

/* As one whose machine is gone: nothing comes, and its connections stay. */
static void a_silent_peer_is_lost(void **state) {
    (void)state;
    endpoints e;
    make_with(&e, BEAT_MS);
    ucx *a = e.a.context;
    assert_true(a->is_timer_set);
    unsigned char byte;
    tb_piece in = {&byte, 1};
    tb_op receive;
    make_op(&receive, TB_OP_RECV, e.rank_b, 2, &in, 1);
    post(&e.a, &receive);
    endpoints alone = {e.a, e.a, e.rank_a, e.rank_a};
    int64_t before = tb__now_ms();
    work_until_lost(&alone, &lost_by_a);
    assert_true(tb__now_ms() - before >= (UCX_LOSE_BEATS - 2) * BEAT_MS);
    assert_string_equal(lost_by_a.why, "nothing has come from it for 13 s");
    assert_int_equal(lost_by_a.rank, e.rank_b);
    assert_int_equal(receive.status, TB_LOST);
    live(&alone, 2);
    assert_false(a->is_timer_set); /* there is nobody left */
    unmake(&e);
}

/* Two that have nothing to say to each other ask, and answer. */
static void an_idle_peer_is_not(void **state) {
    (void)state;
    endpoints e;
    make_with(&e, BEAT_MS);
    const ucx_peer *b = ucx_find(e.a.context, e.rank_b);
    uint64_t said = b->serial_in;
    live(&e, 4 * UCX_LOSE_BEATS);
    assert_int_equal(lost_by_a.count + lost_by_b.count, 0);
    assert_true(b->serial_in > said);
    send_byte(&e, true, 3, 3);
    unmake(&e);
}

/* Its driver is in a function of the host's, as it were. Its process lives, and the bytes move. */
static void a_peer_whose_driver_is_away_is_not(void **state) {
    (void)state;
    static unsigned char from[4 << 20], to[sizeof from];
    tb_piece out = {from, sizeof from}, in = {to, sizeof to};
    tb_op send, receive;
    endpoints e;
    tb__ucx_has_backup_driver = true;
    make_with(&e, BEAT_MS);
    memset(from, 5, sizeof from);
    make_op(&receive, TB_OP_RECV, e.rank_a, 9, &in, 1);
    post(&e.b, &receive);
    make_op(&send, TB_OP_SEND, e.rank_b, 9, &out, 1);
    post(&e.a, &send);
    endpoints alone = {e.a, e.a, e.rank_a, e.rank_a};
    live(&alone, 3 * UCX_LOSE_BEATS);
    assert_int_equal(lost_by_a.count, 0);
    for (time_t deadline = seconds() + 60; !is_done(&send) && seconds() < deadline; rest(&alone))
        progress(&alone);
    assert_int_equal(send.status, TB_OK);
    assert_false(is_done(&receive)); /* told by the driver only */
    work_until_done(&e, (tb_op *[]){&receive}, 1);
    assert_int_equal(receive.status, TB_OK);
    assert_memory_equal(from, to, sizeof from);
    send_byte(&e, true, 3, 3);
    assert_int_equal(lost_by_a.count + lost_by_b.count, 0);
    unmake(&e);
    tb__ucx_has_backup_driver = false;
}

/* Whoever works only when its program waits can't answer in between. */
static void who_is_not_driven_is_left_alone(void **state) {
    (void)state;
    endpoints e;
    ends_are_driven = false;
    make_with(&e, BEAT_MS);
    ends_are_driven = true;
    const ucx *a = e.a.context;
    live(&e, 2); /* until nobody's hello is awaited */
    assert_false(a->is_timer_set);
    ucx_find(e.a.context, e.rank_b)->is_driven = true; /* one of two is not enough */
    ucx_watch_peer(ucx_find(e.a.context, e.rank_b));
    assert_false(a->is_timer_set);
    unmake(&e);
}

/* Once, as if it were time. */
static void beat(ucx *u) {
    assert_int_equal(timerfd_settime(u->timer, 0, &(struct itimerspec){.it_value = {.tv_nsec = 1}}, NULL), 0);
    assert_int_equal(poll(&(struct pollfd){.fd = u->timer, .events = POLLIN}, 1, 1000), 1);
    ucx_heartbeat(u);
}

/* What a sender asks comes after its chunks: it need not. */
static void a_sender_is_told_unasked(void **state) {
    (void)state;
    endpoints e;
    make_with(&e, NEVER_MS);
    progress(&e);
    ucx_peer *b = ucx_find(e.a.context, e.rank_b), *a = ucx_find(e.b.context, e.rank_a);
    uint64_t said = b->serial_in;
    ucx_record_traffic(a, false);
    beat(e.b.context);
    assert_int_equal(a->serial_out, said);
    ucx_record_traffic(a, true);
    beat(e.b.context);
    b->has_received = false;
    for (time_t deadline = seconds() + 60; !b->has_received && seconds() < deadline; rest(&e))
        progress(&e);
    assert_true(b->has_received);
    assert_int_equal(b->serial_in, said + 1);
    unmake(&e);
}

int main(int argc, char **argv) {
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_silent_peer_is_lost), cmocka_unit_test(an_idle_peer_is_not),
                                       cmocka_unit_test(a_peer_whose_driver_is_away_is_not),
                                       cmocka_unit_test(who_is_not_driven_is_left_alone),
                                       cmocka_unit_test(a_sender_is_told_unasked)};
    return cmocka_run_group_tests_name("transport ucx, heartbeat", tests, NULL, NULL);
}
