/* Which device a tensor is on, and streams: in host memory they order nothing, and waiting for one waits for the event;
 * on a GPU they are streams of the driver. stream_order_test.c has what they order on devices. */
#include "bus/bus_test.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

static void name_devices(rank *r) {
    static const char *const names[] = {"host", "slow", "slow:0", "slow:1", "cuda", "cuda:0", "cuda:1"};
    setup s;
    tb_batch *other;
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    tb_tensor t = part_tensor(&s.w);
    const char *device = tensor_device(s.w.data);
    check_ok(tb_batch_create(r->world, "other", NULL, &other));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char sentence[128], name[16];
        snprintf(sentence, sizeof sentence, "its memory is said to be on device '%s', but is on device '%s'", names[i],
                 device);
        snprintf(name, sizeof name, "x%zu", i);
        t.memory = names[i];
        if (strncmp(device, names[i], strlen(names[i])) == 0) /* all of it, or without the unit */
            check_ok(tb_batch_add(other, s.pair, name, &t));
        else
            check_fails(tb_batch_add(other, s.pair, name, &t), TB_REFUSED, sentence);
    }
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

/* A stream for transfers of a tensor: one of its own on a GPU, elsewhere the default one. */
static void *make_stream(const part *p) {
#ifdef TB_TEST_CUDA
    if (strcmp(tensor_device(p->data), "cuda:0") == 0)
        return cuda_stream_create();
#endif
    (void)p;
    return NULL;
}

static void sync_stream(void *stream) {
#ifdef TB_TEST_CUDA
    if (stream)
        cuda_stream_sync(stream);
#endif
    (void)stream;
}

static void free_stream(void *stream) {
#ifdef TB_TEST_CUDA
    if (stream)
        cuda_stream_destroy(stream);
#endif
    (void)stream;
}

static void use_streams(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_event event = is_a(r) ? TB_RELEASED : TB_ARRIVED;
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    void *handle = make_stream(&s.w);
    bool is_host = strcmp(tensor_device(s.w.data), "host") == 0;
    for (uint32_t version = 1; version <= 3; version++) {
        /* The default stream of the slow device is that of all ranks of this process. On a GPU, the first transfer
         * makes the calls of the driver that a waiting stream may hold back. */
        bool has_stream = is_host || (handle && version > 1);
        tb_transfer_opts opts = {.size = sizeof opts, .stream = has_stream ? &handle : NULL};
        if (is_a(r))
            part_fill(&s.w, version);
        else
            part_poison(&s.w);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_fails(tb_stream_wait(t, event, NULL), TB_INVALID, "stream is NULL");
        check_fails(tb_stream_wait(t, is_a(r) ? TB_ARRIVED : TB_RELEASED, &handle), TB_INVALID, "");
        check_ok(has_stream ? tb_stream_wait(t, event, &handle) : tb_wait(t, event, -1));
        sync_stream(handle);
        check(is_a(r) || part_holds(&s.w, version));
        check_ok(tb_wait(t, event, is_host ? 0 : -1)); /* on the host, waiting for the stream has waited for it */
        check_ok(has_stream ? tb_stream_wait(t, TB_COMMITTED, &handle) : tb_wait(t, TB_COMMITTED, -1));
        sync_stream(handle);
        tb_transfer_destroy(t);
    }
    free_stream(handle);
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
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    if (!is_a(r)) {
        void *handle = make_stream(&s.w);
        check_ok(tb_recv(s.batch, &opts, &t));
        check_fails(tb_stream_wait(t, TB_ARRIVED, &handle), TB_TIMEOUT, "(a ");
        check(part_is_poison(&s.w));
        tb_transfer_destroy(t);
        sync_stream(handle);
        free_stream(handle);
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
