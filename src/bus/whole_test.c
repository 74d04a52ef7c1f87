/* whole_group: TB_COMMITTED comes when all ranks of a side have ended the transfer. Rows go from rank i to rank i, so
 * that in place no rank needs another one of its side; the last rank of each side has no rows. Everything also through
 * agents, which copy to and from memory of the programs' own. */
#include "bus/agent/agent_test.h"

#include <sys/mman.h>

enum { NRANKS = 3, LATE = 1, ROWS = 12, COLUMNS = 8, MEMORY = 4096 };
#define LAYOUT "mesh=2 place=Shard(0)"

static const tb_transfer_opts whole = {.size = sizeof whole, .whole_group = true};

typedef enum way { CANCELS, LEAVES, FORGETS, PROTECTS, NWAYS } way;

typedef struct shared {
    void (*body)(rank *r);
    bool has_agents;
    tb_batch_opts opts;
    way way;
} shared;

typedef struct shared_scene {
    agent_scene agents; /* first */
    const shared *shared;
} shared_scene;

static const shared *shared_of(const rank *r) {
    return r->scene->shared ? r->scene->shared : ((const shared_scene *)r->scene)->shared;
}

/* As set_up, but the agents can't map the tensors. */
static void set_up_whole(rank *r, setup *s) {
    const shared *o = shared_of(r);
    part_init(&s->w, LAYOUT, r->index, ROWS, COLUMNS);
    if (o->has_agents) {
        tensor_free(s->w.data);
        s->w.data = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        check(s->w.data != MAP_FAILED);
    }
    part_poison(&s->w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), LAYOUT, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", &o->opts, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w));
    check_ok(tb_batch_register(s->batch, 0));
}

static void tear_down_whole(const rank *r, setup *s) {
    if (s->batch)
        tb_batch_destroy(s->batch);
    tb_pair_destroy(s->pair);
    if (shared_of(r)->has_agents) {
        munmap(s->w.data, MEMORY);
        tb_local_fini(&s->w.local);
    } else {
        part_fini(&s->w);
    }
}

static void run_with_agent(rank *r) {
    char address[100];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    snprintf(address, sizeof address, "agent:%s", seat_of(r)->path);
    check_ok(tb_world_join(address, r->group, r->index, r->size, &opts, &r->world));
    shared_of(r)->body(r);
    tb_world_destroy(r->world);
    r->world = NULL;
}

static void run_both(shared o) {
    if (o.way != PROTECTS)
        run_ranks(o.body, NRANKS, NRANKS, &o);
    o.has_agents = true;
    shared_scene h = {.shared = &o};
    run_agent_scene(&h.agents, run_with_agent, NRANKS, NRANKS);
}

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
    const shared *o = shared_of(r);
    bool is_shadow = o->opts.commit == TB_SHADOW, is_late = !is_a(r) && r->index == LATE;
    setup s;
    set_up_whole(r, &s);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = is_late ? NULL : begin(r, &s, &whole, version);
        if (is_a(r) && r->index != LATE && !is_shadow)
            check_ok(tb_wait(t, TB_RELEASED, -1));
        if (!is_a(r) && !is_late) {
            check_ok(tb_wait(t, TB_ARRIVED, -1));
            check(is_shadow ? part_is_poison(&s.w) || s.w.count == 0 : part_holds(&s.w, version));
        }
        if (t) {
            check_fails(tb_wait(t, TB_COMMITTED, SOON_MS), TB_TIMEOUT, o->has_agents ? "" : "waiting for rank ");
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
    tear_down_whole(r, &s);
}

static void test_late(void **state) {
    (void)state;
    run_both((shared){wait_for_late, .opts = {.size = sizeof(tb_batch_opts)}});
    run_both((shared){wait_for_late, .opts = {.size = sizeof(tb_batch_opts), .commit = TB_SHADOW}});
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

/* The late receiver, whose sender is late, too, cancels, leaves the batch, does not set the option, or has protected
 * its memory, so that its agent can't write it. The others hear of it, by name, and keep what they have received. */
static void fail_by_late(rank *r) {
    way w = shared_of(r)->way;
    setup s;
    set_up_whole(r, &s);
    bool is_late = !is_a(r) && r->index == LATE;
    tb_transfer_opts brief = {.size = sizeof brief, .whole_group = true, .timeout_ms = 6000};
    if (!is_a(r) && !is_late) {
        tb_transfer *t = begin(r, &s, w == FORGETS ? &brief : &whole, 1);
        check_ok(tb_wait(t, TB_ARRIVED, -1));
        check(part_holds(&s.w, 1));
        meet(r);
        if (w == CANCELS)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "(b 1): ");
        else if (w == PROTECTS)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IO, "(b 1): ");
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
        if (t && w >= FORGETS)
            check_ok(tb_wait(t, TB_COMMITTED, -1));
        if (r->index == LATE && w >= FORGETS) {
            t = begin(r, &s, NULL, 1);
            check_ok(tb_wait(t, TB_COMMITTED, -1));
        }
        meet(r);
        tb_transfer_destroy(t);
    } else {
        tb_transfer *t = w == LEAVES ? NULL : begin(r, &s, w == FORGETS ? NULL : &whole, 1);
        if (w == PROTECTS)
            check(mprotect(s.w.data, MEMORY, PROT_NONE) == 0);
        meet(r);
        if (w == PROTECTS)
            check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IO, "can't be written");
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
    tear_down_whole(r, &s);
}

static void test_failures(void **state) {
    (void)state;
    for (way w = 0; w < NWAYS; w++)
        run_both((shared){fail_by_late, .opts = {.size = sizeof(tb_batch_opts)}, .way = w});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
