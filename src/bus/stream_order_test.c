/* Order with work on streams: what is sent was written by work that had not ended when the send began; what is received
 * is not written before the work that was on the stream; work that is added after tb_stream_wait sees what it waits
 * for, and goes on whatever becomes of the transfer. Tensors are on the slow device, whose streams tests hold. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

#include <stdatomic.h>

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"
#define WHOLE   "mesh=1 place=Replicate"

enum { LITTLE_MS = 30 };

/* ---- Work of the program's ----------------------------------------------------------------------------------------
 */

/* What work does with a part. It must not ask the device where the part's bytes are. */
typedef struct deed {
    const part *part;
    uint32_t *bytes;
    uint32_t version;
    bool fills, poisons;
    atomic_bool is_right; /* it had the version, or poison for version 0, when the work came */
} deed;

static void do_deed(void *arg) {
    deed *d = arg;
    bool is_right = true;
    for (size_t i = 0; i < d->part->count; i++) {
        uint32_t value = d->version ? part_value(d->part, i, d->version) : POISON;
        if (d->fills)
            d->bytes[i] = value;
        is_right &= d->bytes[i] == value;
        if (d->poisons)
            d->bytes[i] = POISON;
    }
    atomic_store(&d->is_right, is_right);
}

static slow_work *add_deed(slow_stream *s, deed *d, const part *p, bool is_held) {
    d->part = p;
    d->bytes = part_bytes(p);
    return slow_stream_add(s, do_deed, d, is_held);
}

/* ---- Scenes ------------------------------------------------------------------------------------------------------ */

typedef struct way {
    tb_batch_opts opts;
    bool is_host_a, is_host_b; /* the tensors of that group are in host memory, else on the device */
    bool pads;                 /* the receivers' tensors have padding */
} way;

static tb_transfer_opts with_stream(slow_stream *const *s) {
    return (tb_transfer_opts){.size = sizeof(tb_transfer_opts), .stream = s};
}

static void set_up_way(rank *r, setup *s, const way *w) {
    const char *layout = r->size == 1 ? WHOLE : is_a(r) ? ROWS : COLUMNS;
    bool is_host = is_a(r) ? w->is_host_a : w->is_host_b, pads = !is_a(r) && w->pads;
    tb_batch_opts opts = w->opts;
    opts.size = sizeof opts;
    part_init(&s->w, layout, r->index, pads ? 18 : 16, 16);
    if (is_host) {
        tensor_free(s->w.data);
        check_ok(tb_alloc(s->w.count * sizeof *s->w.data, (void **)&s->w.data));
    }
    part_poison(&s->w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &s->batch));
    tb_tensor w_ = part_tensor(&s->w);
    w_.view = pads ? "pad(0,1,1)" : NULL;
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w_));
    check_ok(tb_batch_register(s->batch, 0));
}

static const way ways[] = {
    {.is_host_a = false},
    {.opts = {.staged = true}},
    {.opts = {.snapshot = true}},
    {.opts = {.checksum = true}},
    {.opts = {.commit = TB_SHADOW}},
    {.opts = {.commit = TB_SHADOW, .staged = true}},
    {.is_host_b = true},
    {.is_host_a = true},
};

static void run_ways(void (*body)(rank *r)) {
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        run_ranks(body, 1, 1, &ways[i]);
        run_ranks(body, 2, 2, &ways[i]);
    }
}

/* ---- Before transfers -------------------------------------------------------------------------------------------- */

/* The senders' work is held when all transfers have begun. */
static void send_what_is_written_later(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    set_up_way(r, &s, w);
    for (uint32_t version = 1; version <= 3; version++) {
        deed fill = {.fills = true, .version = version};
        slow_work *work = NULL;
        tb_transfer_opts opts = with_stream(&stream);
        part_poison(&s.w);
        if (is_a(r))
            work = add_deed(stream, &fill, &s.w, !w->is_host_a);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        if (!w->is_host_a)
            check_fails(tb_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, LITTLE_MS), TB_TIMEOUT, "");
        meet(r);
        if (is_a(r))
            slow_work_let_go(work);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&s.w, version));
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_send_after_work(void **state) {
    (void)state;
    run_ways(send_what_is_written_later);
}

/* The receivers' work is held when all data could have come. */
static void keep_what_is_read_later(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    bool is_held = !is_a(r) && !w->is_host_b;
    set_up_way(r, &s, w);
    for (uint32_t version = 1; version <= 3; version++) {
        deed look = {.version = 0};
        tb_transfer_opts opts = with_stream(&stream);
        part_poison(&s.w);
        if (is_a(r))
            part_fill(&s.w, version);
        slow_work *work = is_held ? add_deed(stream, &look, &s.w, true) : NULL;
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        if (!w->is_host_b)
            check_fails(tb_wait(t, TB_COMMITTED, LITTLE_MS), TB_TIMEOUT, "");
        meet(r);
        check(!is_held || part_is_poison(&s.w));
        if (is_held)
            slow_work_let_go(work);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(w->pads || part_holds(&s.w, version));
        check(!is_held || atomic_load(&look.is_right));
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_receive_after_work(void **state) {
    (void)state;
    run_ways(keep_what_is_read_later);
}

/* Padding, and what is converted, come after the work, too. */
static void test_other_writes(void **state) {
    tb_transform plain = {.size = sizeof plain};
    (void)state;
    run_ranks(keep_what_is_read_later, 1, 1, &(way){.pads = true});
    run_ranks(keep_what_is_read_later, 1, 1, &(way){.pads = true, .opts = {.commit = TB_SHADOW}});
    run_ranks(keep_what_is_read_later, 1, 1, &(way){.opts = {.transform = &plain}});
    run_ranks(send_what_is_written_later, 1, 1, &(way){.opts = {.transform = &plain}});
}

/* ---- After transfers --------------------------------------------------------------------------------------------- */

/* tb_stream_wait(TB_ARRIVED) does not wait for the work that the receive waits for itself. */
static void see_what_arrives(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create(), *other = slow_stream_create();
    set_up_way(r, &s, w);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer_opts opts = with_stream(&stream);
        deed looks[2] = {{.version = version}, {.version = version}};
        part_poison(&s.w);
        if (is_a(r)) {
            part_fill(&s.w, version);
            check_ok(tb_send(s.batch, &opts, &t));
        } else {
            slow_work *work = slow_stream_add(stream, NULL, NULL, true), *later[2];
            check_ok(tb_recv(s.batch, &opts, &t));
            check_ok(tb_stream_wait(t, TB_ARRIVED, &stream));
            check_ok(tb_stream_wait(t, TB_ARRIVED, &other));
            later[0] = add_deed(stream, &looks[0], &s.w, false);
            later[1] = add_deed(other, &looks[1], &s.w, false);
            check(!slow_work_wait(later[1], LITTLE_MS));
            slow_work_let_go(work);
            for (int i = 0; i < 2; i++) {
                check(slow_work_wait(later[i], PATIENCE_MS));
                check(atomic_load(&looks[i].is_right));
            }
        }
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        size_t count = slow_stream_count(stream);
        check_ok(tb_stream_wait(t, TB_COMMITTED, &stream)); /* it has come: the stream does not wait */
        check_ok(tb_stream_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, &stream));
        check(slow_stream_count(stream) == count);
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
    slow_stream_destroy(stream);
    slow_stream_destroy(other);
}

static void test_streams_wait_for_arrival(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        if (ways[i].opts.snapshot)
            continue;
        run_ranks(see_what_arrives, 1, 1, &ways[i]);
        run_ranks(see_what_arrives, 2, 2, &ways[i]);
    }
}

/* Senders overwrite their tensors by work that waits for RELEASED, receivers theirs by work that waits for COMMITTED.
 */
static void overwrite_what_is_released(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    set_up_way(r, &s, w);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer_opts opts = with_stream(&stream);
        deed look = {.version = version, .poisons = true};
        part_poison(&s.w);
        if (is_a(r))
            part_fill(&s.w, version);
        if (!is_a(r))
            meet(r);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_ok(tb_stream_wait(t, is_a(r) ? TB_RELEASED : TB_COMMITTED, &stream));
        slow_work *later = add_deed(stream, &look, &s.w, false);
        if (is_a(r) && !w->opts.snapshot)
            check(!slow_work_wait(later, LITTLE_MS)); /* nobody receives yet */
        if (is_a(r))
            meet(r);
        check(slow_work_wait(later, PATIENCE_MS));
        check(atomic_load(&look.is_right));
        check(part_is_poison(&s.w));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_streams_wait_for_release(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        run_ranks(overwrite_what_is_released, 1, 1, &ways[i]);
        run_ranks(overwrite_what_is_released, 2, 2, &ways[i]);
    }
}

/* Besides a tensor on the device, the batch has one in host memory, which streams do not order: for that one the event
 * has come about when tb_stream_wait returns. */
static void wait_with_host_memory(rank *r) {
    setup s;
    part v;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    part_init(&s.w, WHOLE, r->index, 16, 16);
    part_init(&v, WHOLE, r->index, 16, 16);
    tensor_free(v.data);
    check_ok(tb_alloc(v.count * sizeof *v.data, (void **)&v.data));
    tb_tensor tensors[] = {part_tensor(&s.w), part_tensor(&v)};
    check_ok(tb_pair_create(r->world, "p", other_group(r), WHOLE, NULL, &s.pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &tensors[0]));
    check_ok(tb_batch_add(s.batch, s.pair, "v", &tensors[1]));
    for (uint32_t version = 1; version <= 3; version++) {
        deed at_start = {.version = version, .fills = true}, at_end = {.version = version};
        tb_transfer_opts opts = with_stream(&stream);
        part_poison(&s.w);
        part_poison(&v);
        if (is_a(r)) {
            part_fill(&v, version);
            add_deed(stream, &at_start, &s.w, false);
        }
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_ok(tb_stream_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, &stream));
        check(part_holds(&v, version));
        if (is_a(r))
            check_ok(tb_wait(t, TB_RELEASED, 0));
        slow_work *later = add_deed(stream, &at_end, &s.w, false);
        check(slow_work_wait(later, PATIENCE_MS) && atomic_load(&at_end.is_right));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
    part_fini(&v);
    slow_stream_destroy(stream);
}

static void test_host_memory_besides(void **state) {
    (void)state;
    run_ranks(wait_with_host_memory, 1, 1, NULL);
}

/* A stream that waits goes on when the transfer has failed, is cancelled, or is late. */
typedef enum end { CANCELLED, DESTROYED, LATE, LOST, INVALIDATED, NENDS } end;

static void end_while_a_stream_waits(rank *r) {
    const end how = *(const end *)r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    set_up_way(r, &s, &ways[0]);
    tb_transfer_opts opts = with_stream(&stream);
    opts.timeout_ms = how == LATE ? SOON_MS : 0;
    if (is_a(r)) {
        check_ok(tb_send(s.batch, &opts, &t));
        check_ok(tb_stream_wait(t, TB_RELEASED, &stream));
        check_ok(tb_stream_wait(t, TB_COMMITTED, &stream));
        slow_work *later = slow_stream_add(stream, NULL, NULL, false);
        check(!slow_work_wait(later, LITTLE_MS));
        meet(r);
        if (how == CANCELLED)
            tb_cancel(t);
        if (how == DESTROYED)
            tb_transfer_destroy(t);
        if (how == INVALIDATED)
            check_ok(tb_world_invalidate(r->world, s.w.data, s.w.count * sizeof *s.w.data));
        check(slow_work_wait(later, PATIENCE_MS));
        if (how != DESTROYED) {
            tb_status wanted = how == LATE        ? TB_TIMEOUT
                               : how == CANCELLED ? TB_CANCELLED
                               : how == LOST      ? TB_LOST
                                                  : TB_INVALID;
            check_fails(tb_wait(t, TB_COMMITTED, -1), wanted, "");
            size_t count = slow_stream_count(stream);
            check_fails(tb_stream_wait(t, TB_RELEASED, &stream), wanted, "");
            check(slow_stream_count(stream) == count);
            tb_transfer_destroy(t);
        }
    } else {
        meet(r);
        if (how == LOST) { /* it leaves the batch */
            tb_batch_destroy(s.batch);
            s.batch = NULL;
        }
    }
    meet(r);
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_streams_go_on(void **state) {
    (void)state;
    for (end how = CANCELLED; how < NENDS; how++)
        run_ranks(end_while_a_stream_waits, 1, 1, &how);
}

/* A receive whose sender gives up: waiting for its arrival returns the failure. */
static void wait_for_what_never_comes(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    set_up_way(r, &s, &ways[0]);
    tb_transfer_opts opts = with_stream(&stream);
    slow_work *work = slow_stream_add(stream, NULL, NULL, is_a(r));
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    meet(r);
    if (is_a(r))
        tb_cancel(t);
    else
        check_fails(tb_stream_wait(t, TB_ARRIVED, &stream), TB_CANCELLED, "cancelled batch 'step'");
    tb_transfer_destroy(t);
    meet(r);
    slow_work_let_go(work);
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_arrival_that_fails(void **state) {
    (void)state;
    run_ranks(wait_for_what_never_comes, 1, 1, NULL);
}

/* ---- Streams that fail, or never end ------------------------------------------------------------------------------
 */

static void wait_for_work_in_vain(rank *r) {
    const bool is_send = *(const bool *)r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    set_up_way(r, &s, &ways[0]);
    bool is_held = is_a(r) == is_send;
    slow_work *work = slow_stream_add(stream, NULL, NULL, is_held);
    tb_transfer_opts opts = with_stream(&stream);
    opts.timeout_ms = is_held ? SOON_MS : 0;
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT,
                "the work that was on this rank's stream before has not finished");
    check(part_is_poison(&s.w));
    tb_transfer_destroy(t);
    tear_down(&s);
    tb_world_destroy(r->world); /* does not wait for the stream either */
    r->world = NULL;
    meet(r);
    slow_work_let_go(work);
    slow_stream_destroy(stream);
}

static void test_work_that_never_ends(void **state) {
    (void)state;
    for (int is_send = 0; is_send < 2; is_send++)
        run_ranks(wait_for_work_in_vain, 1, 1, &(bool){is_send});
}

static void fail_stream(rank *r) {
    const bool is_send = *(const bool *)r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    char sentence[100];
    set_up_way(r, &s, &ways[0]);
    if (is_a(r) == is_send)
        slow_stream_fail(stream, TB_IO, "the program's kernel has failed");
    tb_transfer_opts opts = with_stream(&stream);
    if (!is_a(r))
        check_ok(tb_recv(s.batch, &opts, &t));
    meet(r);
    if (is_a(r))
        check_ok(tb_send(s.batch, &opts, &t));
    snprintf(sentence, sizeof sentence, "(%s 0)", is_send ? "a" : "b");
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IO, sentence);
    check(strstr(tb_error_detail(), "the program's kernel has failed"));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_streams_that_fail(void **state) {
    (void)state;
    for (int is_send = 0; is_send < 2; is_send++)
        run_ranks(fail_stream, 1, 1, &(bool){is_send});
}

/* ---- What is refused -----------------------------------------------------------------------------------------------
 */

static tb__device_ops other_ops; /* a second device with streams: what is unit 1 of the slow device */

static tb_status other_open(tb__device **out) {
    TB_TRY(slow_device_ops.open(out));
    (*out)->ops = &other_ops;
    return TB_OK;
}

static bool other_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out) {
    return slow_device_ops.find(device, address, nbytes, out) && out->index == 1;
}

static void refuse_streams(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch *both;
    void *p[2];
    slow_stream *stream = slow_stream_create(), *program = slow_stream_create();
    set_up_way(r, &s, &ways[0]);
    tb_transfer_opts opts = with_stream(&stream);
    slow_stream_set_captured(stream, true);
    check_fails((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t), TB_REFUSED, "is being captured");
    opts.stream = &program;
    slow_work *work = slow_stream_add(program, NULL, NULL, !is_a(r));
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    check_fails(tb_stream_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, &stream), TB_REFUSED, "is being captured");
    slow_work_let_go(work);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    slow_stream_set_captured(stream, false);
    check_ok(tb_batch_create(r->world, "both", NULL, &both));
    for (int i = 0; i < 2; i++) {
        check_ok(tb_alloc_on(i == 0 ? "slow:0" : "slow:1", 16, &p[i]));
        check_ok(tb_batch_add(
            both, s.pair, i == 0 ? "x" : "y",
            &(tb_tensor){.size = sizeof(tb_tensor), .data = p[i], .dtype = TB_F32, .ndim = 1, .shape = {4}}));
    }
    opts.stream = &stream;
    check_fails((is_a(r) ? tb_send : tb_recv)(both, &opts, &t), TB_REFUSED,
                "tensor 'x' of batch 'both' is on device 'slow', and tensor 'y' on device 'other'");
    tb_batch_destroy(both);
    tb_free(p[0]);
    tb_free(p[1]);
    meet(r);
    tear_down(&s);
    slow_stream_destroy(stream);
    slow_stream_destroy(program);
}

static void test_refused_streams(void **state) {
    static const tb__device_ops *const devices[] = {&other_ops, &slow_device_ops, &tb__host_device_ops, NULL};
    (void)state;
    other_ops = slow_device_ops;
    other_ops.name = "other";
    other_ops.open = other_open;
    other_ops.find = other_find;
    atomic_store(&tb__devices, devices);
    run_ranks(refuse_streams, 1, 1, NULL);
    slow_device_install();
}

/* ---- All together --------------------------------------------------------------------------------------------------
 */

/* Lets go of work after a while, as a GPU would. */
typedef struct hand {
    pthread_t thread;
    slow_work *work;
    unsigned us;
} hand;

static void *let_go_later(void *arg) {
    const hand *h = arg;
    usleep(h->us);
    slow_work_let_go(h->work);
    return NULL;
}

/* A stream on each rank, which fills the tensors, or looks at them and poisons them; versions follow at once. */
static void stream_versions(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    slow_stream *stream = slow_stream_create();
    deed deeds[20] = {{0}};
    set_up_way(r, &s, w);
    for (uint32_t version = 1; version <= 20; version++) {
        deed *d = &deeds[version - 1];
        hand h = {.work = slow_stream_add(stream, NULL, NULL, true),
                  .us = (version * 7919U + (unsigned)is_a(r) * 31U) % 3000U};
        tb_transfer_opts opts = with_stream(&stream);
        *d = (deed){.version = version, .fills = is_a(r), .poisons = !is_a(r)};
        if (is_a(r))
            add_deed(stream, d, &s.w, false);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check(pthread_create(&h.thread, NULL, let_go_later, &h) == 0);
        bool is_shadow = w->opts.commit == TB_SHADOW;
        check_ok(tb_stream_wait(t, is_a(r) ? TB_RELEASED : is_shadow ? TB_COMMITTED : TB_ARRIVED, &stream));
        if (!is_a(r))
            add_deed(stream, d, &s.w, false);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        check(pthread_join(h.thread, NULL) == 0);
    }
    check(slow_work_wait(slow_stream_add(stream, NULL, NULL, false), PATIENCE_MS));
    for (int i = 0; i < 20; i++)
        check(atomic_load(&deeds[i].is_right));
    meet(r);
    tear_down(&s);
    slow_stream_destroy(stream);
}

static void test_versions_on_streams(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++)
        run_ranks(stream_versions, 2, 2, &ways[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_send_after_work),
        cmocka_unit_test(test_receive_after_work),
        cmocka_unit_test(test_other_writes),
        cmocka_unit_test(test_streams_wait_for_arrival),
        cmocka_unit_test(test_streams_wait_for_release),
        cmocka_unit_test(test_host_memory_besides),
        cmocka_unit_test(test_streams_go_on),
        cmocka_unit_test(test_arrival_that_fails),
        cmocka_unit_test(test_work_that_never_ends),
        cmocka_unit_test(test_streams_that_fail),
        cmocka_unit_test(test_refused_streams),
        cmocka_unit_test(test_versions_on_streams),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
