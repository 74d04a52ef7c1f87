/* Pairs that come to a registered batch and leave it, between transfers. */
#include "bus/bus_test.h"

typedef struct two {
    tb_pair *pairs[2];
    part parts[2];
    tb_batch *batch;
} two;

static const char *const names[] = {"p", "q"};

static void add(rank *r, two *t, int i) {
    tb_tensor w = part_tensor(&t->parts[i]);
    check_ok(tb_pair_create(r->world, names[i], other_group(r), "mesh=2 place=S0", NULL, &t->pairs[i]));
    check_ok(tb_batch_add(t->batch, t->pairs[i], "w", &w));
}

/* A version through the pairs that are there; `ngood` of them have it in the end. */
static void move(rank *r, two *t, uint32_t version, int ngood) {
    tb_transfer *moves = NULL;
    tb_transfer_state state = {.size = sizeof state};
    for (int i = 0; is_a(r) && i < 2; i++)
        part_fill(&t->parts[i], version);
    check_ok((is_a(r) ? tb_send : tb_recv)(t->batch, NULL, &moves));
    check_ok(tb_wait(moves, TB_COMMITTED, -1));
    for (int i = 0; i < ngood; i++) {
        check_ok(tb_transfer_pair(moves, t->pairs[i], &state));
        check(state.status == TB_OK && state.events & TB_COMMITTED && state.bytes_done == state.bytes_total);
        check(part_holds(&t->parts[i], version));
    }
    check_fails(tb_batch_add_pair(t->batch, t->pairs[1]), TB_REFUSED, "batch 'step'");
    check_fails(tb_batch_remove_pair(t->batch, t->pairs[0]), TB_REFUSED, "destroy that transfer first");
    tb_transfer_destroy(moves);
}

static void open_batch(rank *r, two *t) {
    tb_batch_opts opts = {.size = sizeof opts, .commit = *(const tb_commit *)r->scene->shared};
    *t = (two){0};
    check_ok(tb_batch_create(r->world, "step", &opts, &t->batch));
    for (int i = 0; i < 2; i++)
        part_init(&t->parts[i], "mesh=2 place=S0", r->index, 12, 4 + i);
}

static void close_batch(two *t) {
    tb_batch_destroy(t->batch);
    for (int i = 0; i < 2; i++) {
        tb_pair_destroy(t->pairs[i]);
        part_fini(&t->parts[i]);
    }
}

static void come_and_go(rank *r) {
    two t;
    tb_transfer *moves = NULL;
    tb_transfer_state state = {.size = sizeof state};
    open_batch(r, &t);
    check(tb_batch_epoch(t.batch) == 0);
    add(r, &t, 0);
    check_ok(tb_batch_register(t.batch, 0));
    check_ok(tb_batch_register(t.batch, 0));
    check(tb_batch_epoch(t.batch) == 1);
    tb_tensor w = part_tensor(&t.parts[0]);
    check_fails(tb_batch_add(t.batch, t.pairs[0], "x", &w), TB_REFUSED, "nothing can be added");
    check_ok(tb_pair_create(r->world, names[1], other_group(r), "mesh=2 place=S0", NULL, &t.pairs[1]));
    check_fails(tb_batch_remove_pair(t.batch, t.pairs[1]), TB_INVALID, "pair 'q' is not in batch 'step'");
    uint64_t version;
    bool is_torn;
    check_fails(tb_batch_version(t.batch, t.pairs[1], &version, &is_torn), TB_INVALID, "pair 'q' is not in");
    meet(r); /* who has not found the others yet would miss this one */
    tb_pair_destroy(t.pairs[1]);

    /* A second pair joins; the first goes on counting. */
    meet(r);
    add(r, &t, 1);
    move(r, &t, 1, 2); /* it is registered by that */
    check(tb_batch_epoch(t.batch) == 2);
    move(r, &t, 2, 2);
    meet(r);

    /* b leaves it. Who goes without it can; who does not is told who has left. */
    if (!is_a(r))
        check_ok(tb_batch_remove_pair(t.batch, t.pairs[1]));
    meet(r);
    if (is_a(r)) {
        for (int i = 0; i < 2; i++)
            part_fill(&t.parts[i], 3);
        check_ok(tb_send(t.batch, NULL, &moves));
        check_fails(tb_wait(moves, TB_COMMITTED, -1), TB_LOST, "(b ");
        check_ok(tb_transfer_pair(moves, t.pairs[0], &state));
        check(state.status == TB_OK && state.version == 3);
        check_ok(tb_transfer_pair(moves, t.pairs[1], &state));
        check(state.status == TB_LOST && strstr(tb_error_detail(), "(b "));
        tb_transfer_destroy(moves);
    } else {
        check_ok(tb_recv(t.batch, NULL, &moves));
        check_ok(tb_wait(moves, TB_COMMITTED, -1));
        check_fails(tb_transfer_pair(moves, t.pairs[1], &state), TB_INVALID, "pair 'q' has no part in this");
        tb_transfer_destroy(moves);
        check(part_holds(&t.parts[0], 3));
    }
    meet(r);
    if (is_a(r)) { /* both pairs lead to the same engine: it is skipped as a whole */
        tb_transfer_opts skips = {.size = sizeof skips, .skip_lost = true};
        check_fails(tb_send(t.batch, &skips, &moves), TB_LOST, "(b ");
    }
    meet(r);
    if (is_a(r))
        check_ok(tb_batch_remove_pair(t.batch, t.pairs[1]));
    meet(r);
    move(r, &t, 4, 1);
    check(tb_batch_epoch(t.batch) == 3);
    tb_pair_destroy(t.pairs[1]);

    /* It comes back. */
    meet(r);
    add(r, &t, 1);
    check_ok(tb_batch_register(t.batch, 0));
    check(tb_batch_epoch(t.batch) == 4);
    move(r, &t, 5, 2);
    check_ok(tb_batch_version(t.batch, t.pairs[0], &version, &is_torn));
    check(version == (is_a(r) ? 0 : 5));
    check_ok(tb_batch_version(t.batch, t.pairs[1], &version, &is_torn));
    check(version == (is_a(r) ? 0 : 5)); /* the same transfer has one number everywhere */
    meet(r);
    close_batch(&t);
}

static void test_come_and_go(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        tb_commit commit = i ? TB_SHADOW : TB_IN_PLACE;
        run_ranks(come_and_go, 2, 2, &commit);
    }
}

static void check_state(const two *t, uint64_t wanted, bool is_mixed) {
    tb_batch_state state = {.size = sizeof state};
    tb_batch_query(t->batch, &state);
    check(state.version == wanted && state.is_mixed == is_mixed && !state.is_torn);
}

/* Without one of its pairs an engine receives nothing, in place neither. What the batch has is the last version that
 * both pairs had together. */
static void together(rank *r) {
    two t;
    tb_transfer *moves = NULL;
    open_batch(r, &t);
    add(r, &t, 0);
    add(r, &t, 1);
    check_state(&t, 0, false);
    for (uint32_t version = 1; version <= 2; version++)
        move(r, &t, version, 2);
    check_state(&t, is_a(r) ? 0 : 2, false);
    meet(r);
    if (is_a(r))
        check_ok(tb_batch_remove_pair(t.batch, t.pairs[1]));
    meet(r);
    if (!is_a(r)) {
        tb_transfer_opts skips = {.size = sizeof skips, .skip_lost = true};
        check_ok(tb_recv(t.batch, NULL, &moves));
        check_fails(tb_wait(moves, TB_COMMITTED, -1), TB_LOST, "(a ");
        tb_transfer_destroy(moves);
        check(part_holds(&t.parts[0], 2) && part_holds(&t.parts[1], 2));
        check_state(&t, 2, false);
        check_fails(tb_recv(t.batch, &skips, &moves), TB_LOST, "(a ");
    }
    meet(r);
    if (!is_a(r)) {
        check_ok(tb_batch_remove_pair(t.batch, t.pairs[1]));
        check_state(&t, 2, false);
    }
    meet(r);
    move(r, &t, 3, 1);
    check_state(&t, is_a(r) ? 0 : 3, false);
    meet(r);
    move(r, &t, 4, 1);
    check_state(&t, is_a(r) ? 0 : 4, false);
    meet(r);
    tb_pair_destroy(t.pairs[1]);
    meet(r);
    add(r, &t, 1);
    check_ok(tb_batch_register(t.batch, 0));
    check_state(&t, 0, !is_a(r));
    move(r, &t, 5, 2);
    check_state(&t, is_a(r) ? 0 : 5, false);
    meet(r);
    close_batch(&t);
}

/* In place, the first ranks of both sides are three versions ahead of the others, which take each of these. */
static void ahead(rank *r) {
    two t;
    open_batch(r, &t);
    add(r, &t, 0);
    add(r, &t, 1);
    check_ok(tb_batch_register(t.batch, 0));
    if (r->index == 1)
        meet(r);
    for (uint32_t version = 1; version <= 3; version++)
        move(r, &t, version, 2);
    if (r->index == 0)
        meet(r);
    meet(r);
    close_batch(&t);
}

static void test_ahead(void **state) {
    (void)state;
    tb_commit commit = TB_IN_PLACE;
    run_ranks(ahead, 2, 2, &commit);
}

static void test_together(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        tb_commit commit = i ? TB_SHADOW : TB_IN_PLACE;
        run_ranks(together, 2, 2, &commit);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_come_and_go), cmocka_unit_test(test_together),
                                       cmocka_unit_test(test_ahead)};
    return cmocka_run_group_tests_name("epoch", tests, NULL, NULL);
}
