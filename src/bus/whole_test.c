/* whole_group: TB_COMMITTED comes when all ranks of a side have ended the transfer. Rows go from rank i to rank i, so
 * that in place no rank needs another one of its side; the last rank of each side has no rows. */
#include "bus/bus_test.h"

enum { NRANKS = 3, LATE = 1, ROWS = 12, COLUMNS = 8 };
#define LAYOUT "mesh=2 place=Shard(0)"

static const tb_transfer_opts whole = {.size = sizeof whole, .whole_group = true};

static tb_transfer *begin(const rank *r, setup *s, const tb_transfer_opts *opts, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, opts, &t));
    return t;
}

static void expect_committed(tb_transfer *t, bool wanted) {
    tb_transfer_state state = {.size = sizeof state};
    check_ok(tb_transfer_query(t, &state));
    check(!(state.events & TB_COMMITTED) == !wanted);
    check((state.version != 0) == wanted);
}

/* ---- A rank that is late -------------------------------------------------------------------------------------------
 */

/* All but the late receiver have what they need. None of their transfers ends before it has received, too. */
static void wait_for_late(rank *r) {
    const tb_batch_opts *opts = r->scene->shared;
    bool is_shadow = opts && opts->commit == TB_SHADOW, is_late = !is_a(r) && r->index == LATE;
    setup s;
    set_up(r, &s, LAYOUT, LAYOUT, ROWS, COLUMNS, opts);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = is_late ? NULL : begin(r, &s, &whole, version);
        if (is_a(r) && r->index != LATE && !is_shadow)
            check_ok(tb_wait(t, TB_RELEASED, -1));
        if (!is_a(r) && !is_late) {
            check_ok(tb_wait(t, TB_ARRIVED, -1));
            check(is_shadow ? part_is_poison(&s.w) || s.w.count == 0 : part_holds(&s.w, version));
        }
        if (t) {
            check_fails(tb_wait(t, TB_COMMITTED, SOON_MS), TB_TIMEOUT, "waiting for rank ");
            expect_committed(t, false);
        }
        meet(r);
        if (is_late)
            t = begin(r, &s, &whole, version);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        expect_committed(t, true);
        check(part_holds(&s.w, version));
        tb_transfer_destroy(t);
        meet(r);
    }
    tear_down(&s);
}

static void test_late(void **state) {
    (void)state;
    const tb_batch_opts in_place = {.size = sizeof in_place}, shadow = {.size = sizeof shadow, .commit = TB_SHADOW};
    run_ranks(wait_for_late, NRANKS, NRANKS, &in_place);
    run_ranks(wait_for_late, NRANKS, NRANKS, &shadow);
}

/* Without the option, a rank's transfer ends with its own part. */
static void end_alone(rank *r) {
    setup s;
    set_up(r, &s, LAYOUT, LAYOUT, ROWS, COLUMNS, NULL);
    bool is_late = r->index == LATE;
    tb_transfer *t = is_late ? NULL : begin(r, &s, NULL, 1);
    if (r->index == 0) {
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        expect_committed(t, true);
    }
    meet(r);
    if (is_late)
        t = begin(r, &s, NULL, 1);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    tear_down(&s);
}

static void test_alone(void **state) {
    (void)state;
    run_ranks(end_alone, 2, 2, NULL);
}

/* ---- A rank that does not end it -----------------------------------------------------------------------------------
 */

typedef enum way { CANCELS, LEAVES, FORGETS, NWAYS } way;

/* The late receiver, whose sender is late, too, cancels, leaves the batch, or does not set the option. The others hear
 * of it, by name, and keep what they have received. */
static void fail_by_late(rank *r) {
    way w = *(const way *)r->scene->shared;
    setup s;
    set_up(r, &s, LAYOUT, LAYOUT, ROWS, COLUMNS, NULL);
    bool is_late = !is_a(r) && r->index == LATE;
    tb_transfer_opts brief = {.size = sizeof brief, .whole_group = true, .timeout_ms = 6000};
    if (!is_a(r) && !is_late) {
        tb_transfer *t = begin(r, &s, w == FORGETS ? &brief : &whole, 1);
        check_ok(tb_wait(t, TB_ARRIVED, -1));
        check(part_holds(&s.w, 1));
        meet(r);
        if (w == CANCELS)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "(b 1): ");
        else if (w == LEAVES)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_LOST, "(b 1)");
        else if (r->index == 0)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, "(b 1), which has not received it with whole_group");
        else
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, "but not by all of group 'b': ");
        expect_committed(t, false);
        check(part_holds(&s.w, 1));
        meet(r);
        tb_transfer_destroy(t);
    } else if (is_a(r)) {
        tb_transfer *t = r->index == LATE ? NULL : begin(r, &s, NULL, 1);
        meet(r);
        if (t && w == FORGETS)
            check_ok(tb_wait(t, TB_COMMITTED, -1));
        if (r->index == LATE && w == FORGETS) {
            t = begin(r, &s, NULL, 1);
            check_ok(tb_wait(t, TB_COMMITTED, -1));
        }
        meet(r);
        tb_transfer_destroy(t);
    } else {
        tb_transfer *t = w == LEAVES ? NULL : begin(r, &s, w == FORGETS ? NULL : &whole, 1);
        meet(r);
        if (w == CANCELS)
            tb_cancel(t);
        if (w == FORGETS)
            check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        if (w == LEAVES) {
            tb_batch_destroy(s.batch);
            s.batch = NULL;
        }
        meet(r);
    }
    if (s.batch)
        tb_batch_destroy(s.batch);
    tb_pair_destroy(s.pair);
    part_fini(&s.w);
}

static void test_failures(void **state) {
    (void)state;
    for (way w = 0; w < NWAYS; w++)
        run_ranks(fail_by_late, NRANKS, NRANKS, &w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
