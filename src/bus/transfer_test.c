/* Transfers: what they deliver, what can be waited for, what is told of them. */
#include "bus/bus_test.h"

#include <poll.h>

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"
#define ALONE   "mesh=1 place=Replicate"

static bool is_readable(int fd, int timeout_ms) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

/* Waits until the transfer has got so far that its waits end with these words. */
static void await_sentence(tb_transfer *t, const char *words) {
    int64_t deadline = tb__now_ms() + PATIENCE_MS;
    do {
        check_fails(tb_wait(t, TB_COMMITTED, 5), TB_TIMEOUT, "");
        check(tb__now_ms() < deadline);
    } while (!strstr(tb_error_detail(), words));
}

/* ---- Data ------------------------------------------------------------------------------------------------------ */

static void many_times(rank *r) {
    setup s;
    set_up(r, &s, ROWS, "mesh=3 place=Shard(1)", 37, 53, NULL);
    for (uint32_t version = 1; version <= 5; version++)
        exchange(r, &s, "a", version);
    for (uint32_t version = 6; version <= 12; version++) /* back and forth */
        exchange(r, &s, version % 2 ? "a" : "b", version);
    tear_down(&s);
}

static void test_several_in_a_row_and_in_both_directions(void **state) {
    (void)state;
    run_ranks(many_times, 2, 3, NULL);
}

static void many_staged(rank *r) {
    setup s;
    tb_batch_opts opts = {.size = sizeof opts, .staged = true, .bucket_size = 256};
    set_up(r, &s, ROWS, "mesh=3 place=Shard(1)", 37, 53, &opts);
    for (uint32_t version = 1; version <= 6; version++)
        exchange(r, &s, version % 2 ? "a" : "b", version);
    tear_down(&s);
}

static void test_staged(void **state) {
    (void)state;
    run_ranks(many_staged, 2, 3, NULL);
}

/* Both sides send and receive the same batch at the same time, from different tensors. */
static void both_at_once(rank *r) {
    setup s;
    part out;
    tb_transfer *send, *recv;
    const char *layout = is_a(r) ? ROWS : COLUMNS;
    tb_batch *other;
    set_up(r, &s, ROWS, COLUMNS, 40, 30, NULL);
    part_init(&out, layout, r->index, 40, 30);
    tb_tensor tensor = part_tensor(&out);
    check_ok(tb_batch_create(r->world, "other", NULL, &other));
    check_ok(tb_batch_add(other, s.pair, "w", &tensor));
    for (uint32_t version = 1; version <= 4; version++) {
        tb_batch *outgoing = is_a(r) ? other : s.batch, *incoming = is_a(r) ? s.batch : other;
        part *from = is_a(r) ? &out : &s.w, *to = is_a(r) ? &s.w : &out;
        part_fill(from, version);
        part_poison(to);
        check_ok(tb_send(outgoing, NULL, &send));
        check_ok(tb_recv(incoming, NULL, &recv));
        check_ok(tb_wait(recv, TB_ARRIVED, -1));
        check(part_holds(to, version));
        check_ok(tb_wait(send, TB_RELEASED, -1));
        tb_transfer_destroy(send);
        tb_transfer_destroy(recv);
    }
    tb_batch_destroy(other);
    part_fini(&out);
    tear_down(&s);
}

static void test_two_batches_at_once(void **state) {
    (void)state;
    run_ranks(both_at_once, 2, 2, NULL);
}

/* Two threads of a process come to the batch at once: one registers it, one begins a transfer. */
typedef struct helper {
    tb_batch *batch;
    tb_status status;
} helper;

static void *help(void *arg) {
    helper *h = arg;
    h->status = tb_batch_register(h->batch, 0);
    return NULL;
}

static void two_threads(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    pthread_t thread;
    check_ok(tb_pair_create(r->world, "p", other_group(r), ALONE, NULL, &s.pair));
    part_init(&s.w, ALONE, 0, 8, 8);
    part_fill(&s.w, is_a(r) ? 1 : 2);
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    helper h = {.batch = s.batch};
    check(pthread_create(&thread, NULL, help, &h) == 0);
    tb_status status = (is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t);
    pthread_join(thread, NULL);
    check_ok(status);
    check_ok(h.status);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 1));
    tb_transfer_destroy(t);
    tear_down(&s);
}

static void test_several_threads(void **state) {
    (void)state;
    run_ranks(two_threads, 1, 1, NULL);
}

/* ---- Waits ----------------------------------------------------------------------------------------------------- */

static void early_receiver(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    if (is_a(r)) {
        meet(r);
        exchange(r, &s, "a", 7);
    } else {
        check_ok(tb_recv(s.batch, NULL, &t));
        await_sentence(t, "(a ");
        check_fails(tb_wait(t, TB_ARRIVED, 0), TB_TIMEOUT, "waiting for rank");
        check_fails(tb_wait(t, TB_ARRIVED, 20), TB_TIMEOUT, "batch 'step' has not arrived after 20 ms");
        check_fails(tb_wait_group(t, 0, 0), TB_TIMEOUT, "(a ");
        tb_transfer_query(t, &state);
        check(state.status == TB_OK && state.events == 0 && state.attempt == 0 && state.bytes_done == 0);
        check(!is_readable(tb_transfer_fd(t), 0));
        check(part_is_poison(&s.w));
        meet(r);
        check(is_readable(tb_transfer_fd(t), PATIENCE_MS));
        check_ok(tb_wait(t, TB_ARRIVED, -1));
        check_ok(tb_wait(t, TB_ARRIVED, 0));
        check_ok(tb_wait(t, TB_COMMITTED, 0));
        check_ok(tb_wait_group(t, 0, 0));
        check(part_holds(&s.w, 7));
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_recv_long_before_send(void **state) {
    (void)state;
    run_ranks(early_receiver, 2, 2, NULL);
}

static void early_sender(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    if (!is_a(r)) {
        meet(r);
        exchange(r, &s, "a", 3);
    } else {
        part_fill(&s.w, 3);
        check_ok(tb_send(s.batch, NULL, &t));
        await_sentence(t, "(b ");
        check_fails(tb_wait(t, TB_RELEASED, 0), TB_TIMEOUT, "waiting for rank");
        check_fails(tb_wait(t, TB_COMMITTED, 20), TB_TIMEOUT, "batch 'step' has not been committed after 20 ms");
        tb_transfer_query(t, &state);
        check(state.status == TB_OK && state.events == 0);
        meet(r);
        check(is_readable(tb_transfer_fd(t), PATIENCE_MS));
        check_ok(tb_wait(t, TB_RELEASED, -1));
        check(!is_readable(tb_transfer_fd(t), 0));
        check_ok(tb_wait(t, TB_COMMITTED, 0));
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_send_long_before_recv(void **state) {
    (void)state;
    run_ranks(early_sender, 2, 2, NULL);
}

static void wrong_waits(rank *r) {
    setup s;
    tb_transfer *t = NULL, *second = NULL;
    set_up(r, &s, ALONE, ALONE, 4, 4, NULL);
    check_fails((is_a(r) ? tb_send : tb_recv)(
                    s.batch, &(tb_transfer_opts){.size = sizeof(tb_transfer_opts), .timeout_ms = -1}, &t),
                TB_INVALID, "timeout_ms");
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_fails((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &second), TB_REFUSED, "batch 'step' is already being");
    check(!second);
    check_fails(tb_wait(t, is_a(r) ? TB_ARRIVED : TB_RELEASED, 0), TB_INVALID, "");
    check_fails(tb_wait(t, (tb_event)3, 0), TB_INVALID, "3 is not an event");
    check_fails(tb_wait_group(t, is_a(r) ? 0 : UINT32_MAX, 0), TB_INVALID, "group");
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    tb_transfer_destroy(NULL);
    tear_down(&s);
}

static void test_what_makes_no_sense(void **state) {
    (void)state;
    run_ranks(wrong_waits, 1, 1, NULL);
}

static void late(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    set_up(r, &s, ROWS, COLUMNS, 16, 16, NULL);
    for (int round = 0; round < 2; round++) { /* first nobody sends, then nobody receives */
        if (is_a(r) == (round == 1)) {
            check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, is_a(r) ? "(b " : "(a ");
            check(strstr(tb_error_detail(), "of batch 'step' has not ended after"));
            tb_transfer_query(t, &state);
            check(state.status == TB_TIMEOUT && state.events == 0 && state.seconds >= SOON_MS * 1e-3 - 0.01);
            check(!is_readable(tb_transfer_fd(t), 0));
            check(round == 1 || part_is_poison(&s.w));
            tb_transfer_destroy(t);
        }
        meet(r);
    }
    exchange(r, &s, "a", 4);
    exchange(r, &s, "b", 5);
    exchange(r, &s, "a", 6);
    tear_down(&s);
}

static void test_deadline_names_who_is_missing(void **state) {
    (void)state;
    run_ranks(late, 2, 2, NULL);
}

/* ---- What is told ---------------------------------------------------------------------------------------------- */

typedef struct told {
    int calls;
    bool is_sane;
    tb_transfer_state last;
} told;

static void on_progress(void *arg, const tb_transfer_state *state) {
    told *t = arg;
    t->is_sane &= t->calls == 0 || (state->bytes_done >= t->last.bytes_done && state->seconds >= t->last.seconds);
    t->is_sane &= state->bytes_done <= state->bytes_total && state->groups_done <= state->groups_total;
    t->calls++;
    t->last = *state;
}

static void tell_progress(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    tb_batch_opts batch = {.size = sizeof batch, .bucket_size = 4096, .staged = r->scene->shared != NULL};
    set_up(r, &s, ROWS, COLUMNS, 100, 200, &batch);
    for (uint64_t attempt = 1; attempt <= 3; attempt++) {
        told seen = {.is_sane = true};
        tb_transfer_opts opts = {.size = sizeof opts, .progress = on_progress, .arg = &seen};
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_query(t, &state);
        check(seen.is_sane && seen.calls >= 1);
        check(state.status == TB_OK && state.attempt == attempt);
        check(state.events == (unsigned)(TB_COMMITTED | (is_a(r) ? TB_RELEASED : TB_ARRIVED)));
        check(state.bytes_done == 100 * 100 * 4 && state.bytes_total == 100 * 100 * 4);
        check(is_a(r) || (state.groups_done == 1 && state.groups_total == 1));
        check(seen.last.bytes_done == state.bytes_done && seen.last.events == state.events);
        double sum = 0;
        for (int phase = 0; phase < TB_PHASE_COUNT; phase++) {
            check(state.phase[phase] >= 0);
            sum += state.phase[phase];
        }
        check(sum - state.seconds < 1e-3 && state.seconds - sum < 1e-3);
        check(attempt == 1 || state.phase[TB_PHASE_PLAN] == 0); /* it is planned once */
        check(is_a(r) || state.phase[TB_PHASE_WIRE] > 0);
        check(!batch.staged || state.phase[is_a(r) ? TB_PHASE_PACK : TB_PHASE_UNPACK] > 0);
        tb_transfer_state again = {.size = sizeof again};
        tb_transfer_query(t, &again);
        check(again.seconds == state.seconds); /* it stands still */
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_progress_and_timings(void **state) {
    (void)state;
    run_ranks(tell_progress, 2, 2, NULL);
    run_ranks(tell_progress, 2, 2, "staged");
}

static void test_phase_names(void **state) {
    (void)state;
    assert_string_equal(tb_phase_name(TB_PHASE_PLAN), "plan");
    assert_string_equal(tb_phase_name(TB_PHASE_COMMIT), "commit");
    assert_null(tb_phase_name(TB_PHASE_COUNT));
    assert_null(tb_phase_name((tb_phase)-1));
}

/* ---- Groups ---------------------------------------------------------------------------------------------------- */

enum { LAYERS = 5 };

typedef struct layers {
    tb_pair *pair;
    tb_batch *batch;
    part layer[LAYERS];
} layers;

static void set_up_layers(rank *r, layers *s, const tb_batch_opts *opts) {
    const char *layout = is_a(r) ? ROWS : COLUMNS;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", opts, &s->batch));
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "layer%d", LAYERS - i); /* the order of names is not that of groups */
        part_init(&s->layer[i], layout, r->index, 20, 30);
        tb_tensor t = part_tensor(&s->layer[i]);
        t.group = is_a(r) ? 0 : (uint32_t)(10 * i); /* the receiving side's count */
        check_ok(tb_batch_add(s->batch, s->pair, name, &t));
    }
}

static void receive_layers(rank *r, layers *s, uint32_t window) {
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    for (int i = 0; i < LAYERS; i++)
        part_poison(&s->layer[i]);
    check_ok(tb_recv(s->batch, NULL, &t));
    for (uint32_t i = 0; i < LAYERS; i++) {
        check_ok(tb_wait_group(t, 10 * i, -1));
        check_ok(tb_wait_group(t, 10 * i, 0));
        check(part_holds(&s->layer[i], i + 1));
        /* Taking this one made room for the next `window`. Nobody else was allowed to come. */
        if (i + window + 1 < LAYERS)
            check_fails(tb_wait_group(t, 10 * (i + window + 1), 5), TB_TIMEOUT, "");
        for (uint32_t j = i + window + 1; j < LAYERS; j++)
            check(part_is_poison(&s->layer[j]));
        tb_transfer_query(t, &state);
        check(state.groups_total == LAYERS && state.groups_done > i && state.groups_done <= i + 1 + window);
    }
    check_ok(tb_wait(t, TB_ARRIVED, -1));
    tb_transfer_destroy(t);
    (void)r;
}

static void layer_by_layer(rank *r) {
    const tb_batch_opts *opts = r->scene->shared;
    layers s;
    tb_transfer *t = NULL;
    set_up_layers(r, &s, opts);
    for (int round = 0; round < 2; round++) {
        if (is_a(r)) {
            for (int i = 0; i < LAYERS; i++)
                part_fill(&s.layer[i], (uint32_t)i + 1);
            check_ok(tb_send(s.batch, NULL, &t));
            check_ok(tb_wait(t, TB_RELEASED, -1));
            tb_transfer_destroy(t);
        } else {
            receive_layers(r, &s, opts->group_window);
        }
    }
    /* Waiting for everything takes all groups as they come. */
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_ok(tb_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, -1));
    tb_transfer_destroy(t);
    tb_batch_destroy(s.batch);
    tb_pair_destroy(s.pair);
    for (int i = 0; i < LAYERS; i++)
        part_fini(&s.layer[i]);
}

static void test_groups_come_in_order_and_in_a_window(void **state) {
    (void)state;
    for (uint32_t window = 1; window <= 2; window++) {
        tb_batch_opts opts = {.size = sizeof opts, .group_window = window};
        run_ranks(layer_by_layer, 2, 2, &opts);
        opts.staged = true;
        run_ranks(layer_by_layer, 2, 2, &opts);
    }
}

/* ---- Snapshots ------------------------------------------------------------------------------------------------- */

static void overwrite(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .snapshot = true, .staged = r->scene->shared != NULL};
    set_up(r, &s, ROWS, COLUMNS, 64, 48, &opts);
    for (uint32_t version = 1; version <= 3; version++) {
        /* The first time everybody has to find out where everything is, for which receivers must have come. */
        if (is_a(r)) {
            part_fill(&s.w, version);
            check_ok(tb_send(s.batch, NULL, &t));
            check_ok(tb_wait(t, TB_RELEASED, -1));
            part_fill(&s.w, 99);
            if (version > 1)
                await_sentence(t, "(b ");
            meet(r);
        } else {
            if (version > 1)
                meet(r);
            part_poison(&s.w);
            check_ok(tb_recv(s.batch, NULL, &t));
            if (version == 1)
                meet(r);
            check_ok(tb_wait(t, TB_ARRIVED, -1));
            check(part_holds(&s.w, version));
        }
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_snapshot_keeps_the_old_values(void **state) {
    (void)state;
    run_ranks(overwrite, 2, 2, NULL);
    run_ranks(overwrite, 2, 2, "staged");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_several_in_a_row_and_in_both_directions),
        cmocka_unit_test(test_staged),
        cmocka_unit_test(test_two_batches_at_once),
        cmocka_unit_test(test_several_threads),
        cmocka_unit_test(test_recv_long_before_send),
        cmocka_unit_test(test_send_long_before_recv),
        cmocka_unit_test(test_what_makes_no_sense),
        cmocka_unit_test(test_deadline_names_who_is_missing),
        cmocka_unit_test(test_progress_and_timings),
        cmocka_unit_test(test_phase_names),
        cmocka_unit_test(test_groups_come_in_order_and_in_a_window),
        cmocka_unit_test(test_snapshot_keeps_the_old_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
