/* Transfers that are given up: cancelled on one side or the other, before, during and after; memory that is taken
 * away. */
#include "bus/bus_test.h"

#include <poll.h>

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

/* Two groups of tensors and a window of one: a receiver that does not take the first keeps the transfer under way. */
typedef struct stage {
    setup s;
    part second;
} stage;

static void set_stage(rank *r, stage *g) {
    const char *layout = is_a(r) ? ROWS : COLUMNS;
    tb_batch_opts opts = {.size = sizeof opts, .group_window = 1, .staged = r->scene->shared != NULL};
    part_init(&g->s.w, layout, r->index, 40, 40);
    part_init(&g->second, layout, r->index, 40, 40);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &g->s.pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &g->s.batch));
    tb_tensor first = part_tensor(&g->s.w), second = part_tensor(&g->second);
    second.group = 1;
    check_ok(tb_batch_add(g->s.batch, g->s.pair, "first", &first));
    check_ok(tb_batch_add(g->s.batch, g->s.pair, "second", &second));
    check_ok(tb_batch_register(g->s.batch, 0));
}

static void clear_stage(stage *g) {
    part_fini(&g->second);
    tear_down(&g->s);
}

static tb_transfer *begin(rank *r, stage *g, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r)) {
        part_fill(&g->s.w, version);
        part_fill(&g->second, version);
        check_ok(tb_send(g->s.batch, NULL, &t));
    } else {
        part_poison(&g->s.w);
        part_poison(&g->second);
        check_ok(tb_recv(g->s.batch, NULL, &t));
    }
    return t;
}

/* Everything works, as if nothing had been. */
static void once_more(rank *r, stage *g, uint32_t version) {
    tb_transfer *t = begin(r, g, version);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&g->s.w, version) && part_holds(&g->second, version));
    tb_transfer_destroy(t);
}

/* Sleeps until the first group is in. It is not taken: the second must not come. */
static void await_first(tb_transfer *t) {
    tb_transfer_state state = {.size = sizeof state};
    for (tb_transfer_query(t, &state); state.groups_done == 0; tb_transfer_query(t, &state)) {
        struct pollfd news = {.fd = tb_transfer_fd(t), .events = POLLIN};
        check(state.status == TB_OK);
        check(poll(&news, 1, PATIENCE_MS) == 1);
    }
    check(state.groups_done == 1);
}

/* Sleeps until it has failed. */
static void was_cancelled(tb_transfer *t, const char *who) {
    tb_transfer_state state = {.size = sizeof state};
    for (tb_transfer_query(t, &state); state.status == TB_OK; tb_transfer_query(t, &state)) {
        struct pollfd news = {.fd = tb_transfer_fd(t), .events = POLLIN};
        check(poll(&news, 1, PATIENCE_MS) == 1);
    }
    check_fails(state.status, TB_CANCELLED, who); /* a query tells, too */
    check(!(state.events & TB_COMMITTED));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, who);
    check_fails(tb_wait(t, TB_COMMITTED, 0), TB_CANCELLED, "batch 'step'");
    tb_cancel(t); /* nothing is left to cancel */
    check_fails(tb_wait(t, TB_COMMITTED, 0), TB_CANCELLED, who);
}

/* In round i, rank i cancels while the receivers hold the second group back. */
static void during(rank *r) {
    stage g;
    set_stage(r, &g);
    for (int round = 0; round < r->scene->nranks; round++) {
        const rank *who = &r->scene->ranks[round];
        char words[48];
        snprintf(words, sizeof words, "rank %d cancelled", (int)tb_world_rank(who->world));
        tb_transfer *t = begin(r, &g, 1);
        if (!is_a(r)) {
            await_first(t);
            check(part_holds(&g.s.w, 1));
        }
        meet(r);
        if (r == who) {
            tb_cancel(t);
            part_poison(&g.s.w);
            part_poison(&g.second);
        }
        was_cancelled(t, words);
        meet(r);
        check(r != who || (part_is_poison(&g.s.w) && part_is_poison(&g.second)));
        tb_transfer_destroy(t);
        once_more(r, &g, 2);
        meet(r);
    }
    clear_stage(&g);
}

static void test_cancel_during(void **state) {
    (void)state;
    run_ranks(during, 2, 2, NULL);
    run_ranks(during, 2, 2, "staged");
}

/* In round i, rank i cancels when all ranks of its side have begun and nobody of the other. A send fails with that on
 * all ranks of its side, and receivers wait for the next. A receive ends on that rank only, which then receives what
 * the senders send with all others. */
static void before(rank *r) {
    stage g;
    set_stage(r, &g);
    for (int round = 0; round < r->scene->nranks; round++) {
        const rank *who = &r->scene->ranks[round];
        bool is_mine = is_a(r) == is_a(who), is_over = is_mine && (is_a(r) || r == who);
        char words[48];
        snprintf(words, sizeof words, "rank %d cancelled", (int)tb_world_rank(who->world));
        tb_transfer *t = is_mine ? begin(r, &g, 1) : NULL;
        meet(r);
        if (r == who)
            tb_cancel(t);
        if (is_over) {
            was_cancelled(t, words);
            tb_transfer_destroy(t);
        }
        meet(r);
        if (is_over || !is_mine)
            t = begin(r, &g, 2);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&g.s.w, 2) && part_holds(&g.second, 2));
        tb_transfer_destroy(t);
        once_more(r, &g, 3);
        meet(r);
    }
    clear_stage(&g);
}

static void test_cancel_before(void **state) {
    (void)state;
    run_ranks(before, 2, 2, NULL);
    run_ranks(before, 2, 2, "staged");
}

static void after(rank *r) {
    stage g;
    tb_transfer_state state = {.size = sizeof state};
    set_stage(r, &g);
    tb_transfer *t = begin(r, &g, 1);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_cancel(t);
    tb_transfer_query(t, &state);
    check(state.status == TB_OK && (state.events & TB_COMMITTED));
    check_ok(tb_wait(t, is_a(r) ? TB_RELEASED : TB_ARRIVED, 0));
    tb_transfer_destroy(t);
    once_more(r, &g, 2);
    clear_stage(&g);
}

static void test_cancel_after(void **state) {
    (void)state;
    run_ranks(after, 2, 2, NULL);
}

/* Destroying one that is under way cancels it. */
static void destroyed(rank *r) {
    stage g;
    set_stage(r, &g);
    tb_transfer *t = begin(r, &g, 1);
    if (!is_a(r))
        await_first(t);
    meet(r);
    if (!is_a(r) && r->index == 0) {
        tb_transfer_destroy(t);
    } else {
        was_cancelled(t, "cancelled batch 'step'");
        tb_transfer_destroy(t);
    }
    once_more(r, &g, 2);
    clear_stage(&g);
}

static void test_destroy_cancels(void **state) {
    (void)state;
    run_ranks(destroyed, 2, 2, NULL);
}

/* A receiver cancels while its bytes come in. What it does with its memory then stays. */
static void in_the_rush(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 64 << 10, .staged = r->scene->shared != NULL};
    set_up(r, &s, ROWS, COLUMNS, 1024, 1024, &opts);
    for (int round = 0; round < 10; round++) {
        if (is_a(r)) {
            part_fill(&s.w, 1);
            if (r->index == 0) /* whose beginning begins the transfer */
                meet(r);
            check_ok(tb_send(s.batch, NULL, &t));
            if (r->index != 0)
                meet(r);
            tb_wait(t, TB_COMMITTED, -1);
        } else {
            check_ok(tb_recv(s.batch, NULL, &t));
            meet(r);
            do
                tb_transfer_query(t, &state);
            while (state.status == TB_OK && !(state.events & TB_ARRIVED) &&
                   state.bytes_done < state.bytes_total / 4 + 1);
            tb_cancel(t);
            part_poison(&s.w);
        }
        tb_transfer_query(t, &state);
        if (state.status != TB_OK && state.status != TB_CANCELLED)
            fails(__FILE__, __LINE__, "a cancelled transfer", tb_error_detail());
        meet(r);
        check(is_a(r) || part_is_poison(&s.w));
        tb_transfer_destroy(t);
        meet(r);
    }
    exchange(r, &s, "a", 2);
    tear_down(&s);
}

static void test_nothing_is_written_after_cancel(void **state) {
    (void)state;
    run_ranks(in_the_rush, 2, 2, NULL);
    run_ranks(in_the_rush, 2, 2, "staged");
}

/* ---- Memory that is invalidated --------------------------------------------------------------------------------- */

typedef struct taken {
    const char *group; /* whose rank 1 takes it away */
    bool staged, snapshot;
} taken;

static void invalidate(rank *r) {
    const taken *how = r->scene->shared;
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .staged = how->staged, .snapshot = how->snapshot};
    const rank *who = &r->scene->ranks[strcmp(how->group, "a") == 0 ? 1 : 3];
    char words[100];
    set_up(r, &s, ROWS, COLUMNS, 32, 32, &opts);
    exchange(r, &s, "a", 1);
    meet(r);
    if (r == who)
        check_ok(tb_world_invalidate(r->world, (char *)s.w.data + s.w.count * 2, 1)); /* one byte is enough */
    meet(r);
    snprintf(words, sizeof words, "the memory of tensor 'w' on rank %d", (int)tb_world_rank(who->world));
    for (int round = 0; round < 2; round++) { /* and it stays so */
        if (!is_a(r))
            part_poison(&s.w);
        bool is_lead = is_a(r) && r->index == 0; /* who comes too late for a failure waits for the next transfer */
        if (is_lead)
            meet(r);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
        if (!is_lead)
            meet(r);
        tb_status status = tb_wait(t, TB_COMMITTED, -1);
        /* Others of its side may have done all they have to do. */
        if (r == who || is_a(r) != is_a(who) || status != TB_OK)
            check_fails(status, TB_INVALID, words);
        check(r != who || is_a(r) || part_is_poison(&s.w));
        tb_transfer_destroy(t);
        meet(r);
    }
    tb_batch_destroy(s.batch);
    tb_tensor w = part_tensor(&s.w); /* made again, it works */
    check_ok(tb_batch_create(r->world, "step", &opts, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    exchange(r, &s, "a", 3);
    tear_down(&s);
}

static void test_invalidated_memory_fails_by_name(void **state) {
    (void)state;
    const taken ways[] = {{"a", false, false}, {"b", false, false}, {"a", true, false},
                          {"b", true, false},  {"a", false, true},  {"a", true, true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_ranks(invalidate, 2, 2, &ways[i]);
}

/* A sender comes to a transfer that the receivers have given up meanwhile. It must not become a part of the next one,
 * which the other sender has begun: that is another version. */
static void come_late(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    bool is_late = is_a(r) && r->index == 1;
    set_up(r, &s, ROWS, COLUMNS, 32, 32, NULL);
    exchange(r, &s, "a", 1);
    meet(r);
    part_fill(&s.w, 2);
    if (!is_late)
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    if (is_a(r) && !is_late) /* they take its part */
        check_ok(tb_wait(t, TB_COMMITTED, -1));
    meet(r);
    tb_transfer_destroy(t); /* the receivers give up */
    meet(r);
    if (is_late) {
        check_ok(tb_send(s.batch, NULL, &t));
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "cancelled");
        tb_transfer_destroy(t);
    }
    exchange(r, &s, "a", 3);
    tear_down(&s);
}

static void test_late_sender(void **state) {
    (void)state;
    run_ranks(come_late, 2, 2, NULL);
}

/* The other way round: one sender has waited for the one that begins transfers, in vain. */
static void begin_late(rank *r) {
    static const char in_vain[] = "(a 1): the sending of batch 'step'";
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_opts soon = {.size = sizeof soon, .timeout_ms = 300};
    set_up(r, &s, ROWS, COLUMNS, 32, 32, NULL);
    exchange(r, &s, "a", 1);
    meet(r);
    part_fill(&s.w, 2);
    for (int tries = 0; tries < 3 && is_a(r) && r->index == 1; tries++) {
        check_ok(tb_send(s.batch, &soon, &t));
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, "(a 0) to send");
        tb_transfer_destroy(t);
    }
    meet(r);
    if (is_a(r) && r->index == 0) {
        check_ok(tb_send(s.batch, NULL, &t));
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, in_vain);
        tb_transfer_destroy(t);
    }
    meet(r);
    part_fill(&s.w, is_a(r) ? 3 : 0);
    /* Whoever hears only now of what the other gave up fails by that once more. */
    for (tb_status status = TB_TIMEOUT; status == TB_TIMEOUT; tb_transfer_destroy(t)) {
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
        status = tb_wait(t, TB_COMMITTED, -1);
        check(status == TB_OK || (status == TB_TIMEOUT && strstr(tb_error_detail(), in_vain)));
    }
    check(part_holds(&s.w, 3));
    tear_down(&s);
}

static void test_late_lead(void **state) {
    (void)state;
    run_ranks(begin_late, 2, 2, NULL);
}

/* A receiver's time is up while one of the senders is missing: all say whose it was, also with a shadow, where the
 * lead's word ends it. */
static void one_is_late(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_batch_opts opts = {.size = sizeof opts, .commit = r->scene->shared ? TB_SHADOW : TB_IN_PLACE};
    tb_transfer_opts soon = {.size = sizeof soon, .timeout_ms = 500};
    bool is_late = !is_a(r) && r->index == 0, is_missing = is_a(r) && r->index == 1;
    set_up(r, &s, ROWS, COLUMNS, 32, 32, &opts);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t)); /* one that is well */
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    t = NULL;
    meet(r);
    if (is_a(r) && !is_missing)
        check_ok(tb_send(s.batch, NULL, &t));
    if (!is_a(r))
        check_ok(tb_recv(s.batch, is_late ? &soon : NULL, &t));
    tb_status status = is_missing ? TB_OK : tb_wait(t, TB_COMMITTED, -1);
    if (!is_a(r) || status != TB_OK) /* in place a sender is done when its own part is taken */
        check_fails(status, TB_TIMEOUT, is_late ? "the receiving of batch 'step'" : "(b 0): the receiving of batch");
    check(!r->scene->shared || is_missing || status != TB_OK);
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_whose_time_is_up(void **state) {
    (void)state;
    run_ranks(one_is_late, 2, 2, NULL);
    run_ranks(one_is_late, 2, 2, "shadow");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late_sender),
        cmocka_unit_test(test_late_lead),
        cmocka_unit_test(test_whose_time_is_up),
        cmocka_unit_test(test_cancel_during),
        cmocka_unit_test(test_cancel_before),
        cmocka_unit_test(test_cancel_after),
        cmocka_unit_test(test_destroy_cancels),
        cmocka_unit_test(test_nothing_is_written_after_cancel),
        cmocka_unit_test(test_invalidated_memory_fails_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
