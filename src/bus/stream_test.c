/* Which device a tensor is on, and streams: in host memory they order nothing, and waiting for one waits for the event.
 * stream_order_test.c has what they order on devices. */
#include "bus/bus_test.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

static const char *device_of(const part *p) {
    return is_slow_memory(p->data) ? "slow:0" : "host";
}

static void name_devices(rank *r) {
    setup s;
    tb_batch *other;
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    tb_tensor t = part_tensor(&s.w);
    check_ok(tb_batch_create(r->world, "other", NULL, &other));
    t.memory = is_slow_memory(s.w.data) ? "host" : "slow";
    char sentence[128];
    snprintf(sentence, sizeof sentence, "tensor 'x': its memory is said to be on device '%s', but is on device '%s'",
             t.memory, device_of(&s.w));
    check_fails(tb_batch_add(other, s.pair, "x", &t), TB_REFUSED, sentence);
    t.memory = "cuda";
    check_fails(tb_batch_add(other, s.pair, "x", &t), TB_REFUSED, "said to be on device 'cuda', but is on");
    t.memory = "slow:1";
    check_fails(tb_batch_add(other, s.pair, "x", &t), TB_REFUSED, "said to be on device 'slow:1', but is on");
    t.memory = device_of(&s.w);
    check_ok(tb_batch_add(other, s.pair, "x", &t));
    t.memory = is_slow_memory(s.w.data) ? "slow" : "host";
    check_ok(tb_batch_add(other, s.pair, "y", &t));
    t.memory = "cuda"; /* there is nothing that could be elsewhere */
    t.shape[0] = 0;
    t.data = NULL;
    check_ok(tb_batch_add(other, s.pair, "nothing", &t));
    tb_batch_destroy(other);
    tear_down(&s);
}

static void test_devices_are_named(void **state) {
    (void)state;
    run_ranks(name_devices, 2, 2, NULL);
}

static void use_streams(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    void *handle = NULL; /* of a default stream */
    tb_event event = is_a(r) ? TB_RELEASED : TB_ARRIVED;
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    bool is_host = !is_slow_memory(s.w.data); /* the default stream is that of all ranks of this process */
    tb_transfer_opts opts = {.size = sizeof opts, .stream = is_host ? &handle : NULL};
    for (uint32_t version = 1; version <= 3; version++) {
        if (is_a(r))
            part_fill(&s.w, version);
        else
            part_poison(&s.w);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_fails(tb_stream_wait(t, event, NULL), TB_INVALID, "stream is NULL");
        check_fails(tb_stream_wait(t, is_a(r) ? TB_ARRIVED : TB_RELEASED, &handle), TB_INVALID, "");
        check_ok(is_host ? tb_stream_wait(t, event, &handle) : tb_wait(t, event, -1));
        check_ok(tb_wait(t, event, 0)); /* it has come about */
        check(is_a(r) || part_holds(&s.w, version));
        check_ok(is_host ? tb_stream_wait(t, TB_COMMITTED, &handle) : tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_streams(void **state) {
    (void)state;
    run_ranks(use_streams, 2, 2, NULL);
}

/* The transfer's deadline ends the wait, and the sentence names who is missing. */
static void wait_in_vain(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    void *handle = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    if (!is_a(r)) {
        check_ok(tb_recv(s.batch, &opts, &t));
        check_fails(tb_stream_wait(t, TB_ARRIVED, &handle), TB_TIMEOUT, "(a ");
        check(part_is_poison(&s.w));
        tb_transfer_destroy(t);
    }
    meet(r);
    tear_down(&s);
}

static void test_streams_do_not_wait_forever(void **state) {
    (void)state;
    run_ranks(wait_in_vain, 2, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_devices_are_named),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_streams_do_not_wait_forever),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
