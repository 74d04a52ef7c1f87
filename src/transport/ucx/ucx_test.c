/* The ucx transport: the shared suite, messages given up half way, and peers that leave, die or talk nonsense. The
 * first argument is "tcp" or "shm", the lanes; the second "copied" or "direct", how chunks go, whatever the lanes. */
#include "../tests/support/ucx_ends.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static bool is_shm; /* the lane */

/* Long messages are cut into chunks before any lane sees them, and shared memory takes its time when both ends are one
 * thread. */
static void ucx_conforms(void **state) {
    (void)state;
    conformance_without(is_shm ? "gigabytes" : NULL, make, unmake);
}

/* The receive's memory is left alone from then on, and the sender is rid of the message. */
static void a_receive_is_given_up_half_way(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    unsigned char *from = malloc(LARGE), *to = malloc(LARGE);
    tb_piece out = {from, LARGE}, in = {to, LARGE};
    tb_op send, receive;
    memset(from, 1, LARGE);
    make_op(&send, TB_OP_SEND, e.rank_b, 7, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 7, &in, 1);
    post(&e.b, &receive);
    post(&e.a, &send);
    work_until_half(&e);
    cancel(&e.b, &receive, &e.a);
    assert_int_equal(receive.status, TB_CANCELLED);
    memset(to, 0xEE, LARGE);
    work_until_done(&e, (tb_op *[]){&send}, 1);
    assert_int_equal(send.status, TB_OK);
    check(to, 0xEE);
    memset(from, 2, LARGE); /* nothing of the first message comes with the next */
    make_op(&send, TB_OP_SEND, e.rank_b, 8, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 8, &in, 1);
    post(&e.b, &receive);
    post(&e.a, &send);
    work_until_done(&e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    check(to, 2);
    free(from);
    free(to);
    unmake(&e);
}

/* The send's memory may become anything from then on; the receive is told, and the next message arrives. */
static void a_send_is_given_up_half_way(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    unsigned char *from = malloc(LARGE), *to = malloc(LARGE);
    tb_piece out = {from, LARGE}, in = {to, LARGE};
    tb_op send, receive;
    memset(from, 1, LARGE);
    make_op(&send, TB_OP_SEND, e.rank_b, 7, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 7, &in, 1);
    post(&e.b, &receive);
    post(&e.a, &send);
    work_until_half(&e);
    cancel(&e.a, &send, &e.b);
    assert_int_equal(send.status, TB_CANCELLED);
    memset(from, 2, LARGE);
    work_until_done(&e, (tb_op *[]){&receive}, 1);
    assert_int_equal(receive.status, TB_CANCELLED);
    make_op(&send, TB_OP_SEND, e.rank_b, 8, &out, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 8, &in, 1);
    post(&e.b, &receive);
    post(&e.a, &send);
    work_until_done(&e, (tb_op *[]){&send, &receive}, 2);
    assert_int_equal(receive.status, TB_OK);
    check(to, 2);
    free(from);
    free(to);
    unmake(&e);
}

/* As if UCX had handed over what a sent. */
static void hand_over(endpoints *e, const ucx_frame *frame, size_t header_length, const char *text) {
    ucp_am_recv_param_t param = {0};
    char data[16];
    snprintf(data, sizeof data, "%s", text);
    assert_int_equal(ucx_on_active_message(e->b.context, frame, header_length, data, strlen(data), &param), UCS_OK);
}

/* Whatever order active messages come in, equal tags keep theirs. */
static void frames_are_put_in_order(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    send_byte(&e, true, 1, 1);
    ucx_peer *peer = ucx_find(e.b.context, e.rank_a);
    static const char *const texts[] = {"first", "second", "third"};
    static const size_t order[] = {2, 0, 1};
    ucx_frame frame = {.kind = UCX_MESSAGE, .rank = e.rank_a, .from = peer->id_in, .tag = 3};
    uint64_t serial = peer->serial_in;
    tb_op receives[3];
    char got[3][16] = {{0}};
    tb_piece in[3];
    for (size_t i = 0; i < 3; i++) {
        frame.serial = serial + order[i];
        frame.nbytes = strlen(texts[order[i]]);
        hand_over(&e, &frame, sizeof frame, texts[order[i]]);
    }
    for (size_t i = 0; i < 3; i++) {
        in[i] = (tb_piece){got[i], sizeof got[i]};
        make_op(&receives[i], TB_OP_RECV, e.rank_a, 3, &in[i], 1);
        post(&e.b, &receives[i]);
    }
    work_until_done(&e, (tb_op *[]){&receives[0], &receives[1], &receives[2]}, 3);
    for (size_t i = 0; i < 3; i++)
        assert_string_equal(got[i], texts[i]);
    frame.serial = serial + 9; /* one that waits for others when its sender goes */
    hand_over(&e, &frame, sizeof frame, "late");
    unmake(&e);
}

/* Frames of unknown senders are ignored; invalid frames of a peer lose it. */
static void nonsense_is_refused(void **state) {
    (void)state;
    endpoints e;
    unsigned char address[TB_ADDRESS_MAX];
    size_t n = sizeof address;
    make(&e);
    send_byte(&e, true, 1, 1);
    ucx_peer *peer = ucx_find(e.b.context, e.rank_a);
    const ucx_frame good = {.kind = UCX_MESSAGE, .rank = e.rank_a, .from = peer->id_in, .serial = peer->serial_in};
    ucx_frame frame = good;
    hand_over(&e, &frame, sizeof frame - 1, "short");
    frame.from ^= 2;
    hand_over(&e, &frame, sizeof frame, "of another");
    frame = good;
    frame.kind = UCX_CHUNK;
    hand_over(&e, &frame, sizeof frame, "unasked");
    send_byte(&e, true, 2, 2);
    assert_int_equal(e.b.ops->address(e.b.context, address, &n), TB_OK);
    address[0] ^= 1;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    address[0] ^= 1;
    address[4] ^= 8;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "version"));
    address[4] ^= 8;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n - 1), TB_INVALID);
    address[n - 1] ^= 1;
    assert_int_equal(e.a.ops->connect(e.a.context, 7, address, n), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "corrupt"));
    assert_int_equal(lost_by_b.count, 0);
    frame = good;
    frame.serial = peer->serial_in;
    frame.kind = 99;
    hand_over(&e, &frame, sizeof frame, "?");
    work_until_lost(&e, &lost_by_b);
    assert_string_equal(lost_by_b.why, "it sent an invalid frame");
    unmake(&e);
}

/* One end connects; the other answers all the same. */
static void one_end_is_enough_to_connect(void **state) {
    (void)state;
    endpoints e = {.rank_a = 5, .rank_b = 2};
    unsigned char a[TB_ADDRESS_MAX], b[TB_ADDRESS_MAX];
    size_t na, nb;
    tb_op send;
    open_one(&e.a, e.rank_a, NULL, a, &na);
    open_one(&e.b, e.rank_b, NULL, b, &nb);
    make_op(&send, TB_OP_SEND, e.rank_a, 1, NULL, 0);
    assert_int_equal(tb__transport_post(&e.b, &send), TB_LOST);
    connect_to(&e.a, e.rank_b, b, nb);
    send_byte(&e, true, 1, 3);
    send_byte(&e, false, 1, 4);
    connect_to(&e.b, e.rank_a, a, na);
    send_byte(&e, false, 1, 5);
    unmake(&e);
}

/* What was sent before arrives, what waits is told, and all that comes after fails by name. */
static void a_peer_that_leaves_is_lost(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    send_byte(&e, true, 1, 1);
    unsigned char value = 9, got = 0, more;
    tb_piece out = {&value, 1}, in = {&got, 1}, in_more = {&more, 1};
    tb_op send, receive, waiting;
    make_op(&send, TB_OP_SEND, e.rank_b, 2, &out, 1);
    make_op(&waiting, TB_OP_RECV, e.rank_a, 3, &in_more, 1);
    make_op(&receive, TB_OP_RECV, e.rank_a, 2, &in, 1);
    post(&e.b, &waiting);
    post(&e.b, &receive);
    post(&e.a, &send);
    tb__transport_close(&e.a);
    assert_true(is_done(&send));
    endpoints alone = {e.b, e.b, e.rank_b, e.rank_b};
    work_until_done(&alone, (tb_op *[]){&receive, &waiting}, 2);
    assert_int_equal(receive.status, TB_OK);
    assert_int_equal(got, 9);
    assert_int_equal(waiting.status, TB_LOST);
    assert_int_equal(lost_by_b.count, 1);
    assert_int_equal(lost_by_b.rank, e.rank_a);
    assert_string_equal(lost_by_b.why, "it has left");
    make_op(&send, TB_OP_SEND, e.rank_a, 2, &out, 1);
    assert_int_equal(tb__transport_post(&e.b, &send), TB_LOST);
    assert_non_null(strstr(tb_error_detail(), "it has left"));
    tb__transport_close(&e.b);
}

/* Says hello, sends a byte, and then does nothing but progress until it is killed. */
static void send_a_byte(tb_transport *t, const unsigned char *address, size_t nbytes, int in, int out,
                        const void *arg) {
    (void)in;
    (void)out;
    (void)arg;
    unsigned char byte = 1;
    connect_to(t, 0, address, nbytes);
    tb_piece piece = {&byte, 1};
    tb_op op;
    make_op(&op, TB_OP_SEND, 0, 1, &piece, 1);
    post(t, &op);
    struct pollfd fd = {.fd = t->ops->fd(t->context), .events = POLLIN};
    for (;;) {
        t->ops->progress(t->context);
        poll(&fd, 1, -1);
    }
}

/* Another process is killed in the middle of things: everybody hears of it, and the others go on. */
static void a_killed_peer_is_noticed(void **state) {
    (void)state;
    losses l = {0};
    unsigned char mine[TB_ADDRESS_MAX], beside[TB_ADDRESS_MAX], byte = 0, more;
    static unsigned char large[8 << 20];
    size_t n, nbeside;
    stranger o;
    stranger_start(&o, send_a_byte, NULL);
    endpoints e = {.rank_a = 0, .rank_b = 2};
    open_one(&e.a, 0, &l, mine, &n);
    open_one(&e.b, 2, NULL, beside, &nbeside);
    stranger_tell(&o, mine, n);
    connect_to(&e.a, 1, o.address, o.nbytes);
    connect_to(&e.a, 2, beside, nbeside);
    tb_piece in = {&byte, 1}, out = {large, sizeof large}, in_more = {&more, 1};
    tb_op receive, send, waiting;
    make_op(&receive, TB_OP_RECV, 1, 1, &in, 1);
    post(&e.a, &receive);
    work_until_done(&e, (tb_op *[]){&receive}, 1);
    assert_int_equal(byte, 1);
    assert_int_equal(kill(o.pid, SIGSTOP), 0); /* so that nobody takes the message */
    assert_int_equal(waitpid(o.pid, NULL, WUNTRACED), o.pid);
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1);
    make_op(&waiting, TB_OP_RECV, 1, 3, &in_more, 1);
    post(&e.a, &send);
    post(&e.a, &waiting);
    progress(&e);
    stranger_kill(&o);
    work_until_done(&e, (tb_op *[]){&send, &waiting}, 2);
    assert_int_equal(send.status, TB_LOST);
    assert_int_equal(waiting.status, TB_LOST);
    assert_int_equal(l.count, 1);
    assert_int_equal(l.rank, 1);
    assert_true(strlen(l.why) > 0);
    make_op(&send, TB_OP_SEND, 1, 2, &out, 1);
    assert_int_equal(tb__transport_post(&e.a, &send), TB_LOST);
    send_byte(&e, true, 1, 8);
    unmake(&e);
    stranger_close(&o);
}

static int64_t cpu_us(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
}

/* While nothing happens, nobody works: 300 ms of it take no third of that from the processor. */
static void idleness_costs_nothing(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    send_byte(&e, true, 1, 1);
    for (int i = 0; i < 8; i++)
        progress(&e);
    int64_t before = cpu_us();
    struct pollfd fds[2] = {{.fd = e.a.ops->fd(e.a.context), .events = POLLIN},
                            {.fd = e.b.ops->fd(e.b.context), .events = POLLIN}};
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        poll(fds, 2, 100);
        progress(&e);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < 300);
    assert_in_range(cpu_us() - before, 0, 100000);
    unmake(&e);
}

/* A process that was forked while UCX was in use could wait for ever for the threads it lacks. */
static void a_fork_is_refused(void **state) {
    (void)state;
    endpoints e;
    make(&e);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        tb_transport t;
        tb_transport_env env = {.size = sizeof env, .rank = 9};
        _exit(tb__transport_open("ucx", &env, &t) == TB_REFUSED && strstr(tb_error_detail(), "forked") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    unmake(&e);
}

static void memory_may_run_out(void **state) {
    (void)state;
    tb_transport t;
    tb_transport_env env = {.size = sizeof env, .rank = 1};
    tb_status status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK && n < 100; n++) {
        tb__mem_fail_after(n);
        status = tb__transport_open("ucx", &env, &t);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
    }
    assert_int_equal(status, TB_OK);
    tb__transport_close(&t);
}

int main(int argc, char **argv) {
    is_shm = argc > 1 && strcmp(argv[1], "shm") == 0;
    tb__ucx_direct = argc > 2 && strcmp(argv[2], "direct") == 0;
    if (!choose_lanes(argc, argv))
        return 77;
    const struct CMUnitTest tests[] = {cmocka_unit_test(ucx_conforms),
                                       cmocka_unit_test(a_receive_is_given_up_half_way),
                                       cmocka_unit_test(a_send_is_given_up_half_way),
                                       cmocka_unit_test(frames_are_put_in_order),
                                       cmocka_unit_test(nonsense_is_refused),
                                       cmocka_unit_test(one_end_is_enough_to_connect),
                                       cmocka_unit_test(a_peer_that_leaves_is_lost),
                                       cmocka_unit_test(a_killed_peer_is_noticed),
                                       cmocka_unit_test(a_fork_is_refused),
                                       cmocka_unit_test(idleness_costs_nothing),
                                       cmocka_unit_test(memory_may_run_out)};
    return cmocka_run_group_tests_name("transport ucx", tests, NULL, NULL);
}
