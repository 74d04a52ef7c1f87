/* Batches that carry a model: ranks that have some of its tensors only, or none; names that are tied or ignored. */
#include "bus/bus_test.h"

#define ON(rank) "mesh=1 place=Replicate ranks=" #rank
#define ROWS     "mesh=2 place=Shard(0)"

enum { MAX_TENSORS = 12, STAYS = -1 };

/* A matrix, and who has it, in group a and in group b; NULL: that group does not. */
typedef struct entry {
    const char *name, *layout[2];
    int64_t rows, columns;
    int source[2]; /* as received by a, and by b: the entry it comes from, plus 1; 0: this one */
} entry;

typedef struct model {
    const entry *entries;
    size_t count;
    tb_pair *pair;
    tb_batch *batch;
    bool has[MAX_TENSORS];
    part parts[MAX_TENSORS];
} model;

static const char *layout_of(const rank *r, const entry *e) {
    return e->layout[!is_a(r)];
}

static bool is_in_mesh(const char *layout, int32_t seat) {
    tb_layout *parsed;
    check_ok(tb_layout_parse(layout, &parsed));
    bool is_in = tb_layout_index_of(parsed, seat) >= 0;
    tb_layout_destroy(parsed);
    return is_in;
}

static void model_init(rank *r, model *m, const entry *entries, size_t count) {
    *m = (model){.entries = entries, .count = count};
    check(count <= MAX_TENSORS);
    check_ok(tb_pair_create(r->world, "p", other_group(r), ON(0), NULL, &m->pair));
    for (size_t i = 0; i < count; i++) {
        const char *layout = layout_of(r, &entries[i]);
        m->has[i] = layout && is_in_mesh(layout, r->index);
        if (m->has[i])
            part_init(&m->parts[i], layout, r->index, entries[i].rows, entries[i].columns);
        if (m->has[i] && m->parts[i].count == 0) { /* in the mesh, but there is nothing left for it */
            part_fini(&m->parts[i]);
            m->has[i] = false;
        }
    }
}

/* A batch of what this rank has. */
static void make_batch(rank *r, model *m, const tb_batch_opts *opts) {
    check_ok(tb_batch_create(r->world, "step", opts, &m->batch));
    check_ok(tb_batch_add_pair(m->batch, m->pair));
    for (size_t i = m->count; i-- > 0;) { /* the order does not matter */
        if (!m->has[i])
            continue;
        tb_tensor t = part_tensor(&m->parts[i]);
        t.layout = layout_of(r, &m->entries[i]);
        check_ok(tb_batch_add(m->batch, m->pair, m->entries[i].name, &t));
    }
}

static void model_fini(model *m) {
    tb_batch_destroy(m->batch);
    tb_pair_destroy(m->pair);
    for (size_t i = 0; i < m->count; i++) {
        if (m->has[i])
            part_fini(&m->parts[i]);
    }
}

/* Values say from which entry they are, and in which version. */
static uint32_t stamp(uint32_t version, size_t i) {
    return version * MAX_TENSORS + (uint32_t)i;
}

static void move(rank *r, model *m, const char *from, uint32_t version) {
    bool is_send = strcmp(r->group, from) == 0;
    tb_transfer *t = NULL;
    for (size_t i = 0; i < m->count; i++) {
        if (m->has[i] && is_send)
            part_fill(&m->parts[i], stamp(version, i));
        else if (m->has[i])
            part_poison(&m->parts[i]);
    }
    check_ok((is_send ? tb_send : tb_recv)(m->batch, NULL, &t));
    check_ok(tb_wait(t, is_send ? TB_RELEASED : TB_ARRIVED, -1));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    for (size_t i = 0; i < m->count; i++) {
        int source = m->entries[i].source[!is_a(r)];
        if (!m->has[i])
            continue;
        if (!is_send && source == STAYS)
            check(part_is_poison(&m->parts[i]));
        else
            check(part_holds(&m->parts[i], stamp(version, is_send || source == 0 ? i : (size_t)source - 1)));
    }
}

static void move_both_ways(rank *r, const entry *entries, size_t count, const tb_batch_opts *opts) {
    model m;
    model_init(r, &m, entries, count);
    make_batch(r, &m, opts);
    for (uint32_t version = 1; version <= 4; version++)
        move(r, &m, version % 2 ? "a" : "b", version);
    model_fini(&m);
}

/* ---- Some tensors on some ranks -------------------------------------------------------------------------------- */

/* Two stages to three. */
static const entry stages[] = {
    {.name = "l.0", .layout = {ON(0), ON(0)}, .rows = 8, .columns = 6},
    {.name = "l.1", .layout = {ON(0), ON(0)}, .rows = 8, .columns = 6},
    {.name = "l.2", .layout = {ON(0), ON(1)}, .rows = 8, .columns = 6},
    {.name = "l.3", .layout = {ON(1), ON(1)}, .rows = 8, .columns = 6},
    {.name = "l.4", .layout = {ON(1), ON(2)}, .rows = 8, .columns = 6},
    {.name = "l.5", .layout = {ON(1), ON(2)}, .rows = 5, .columns = 7},
};

static void pipeline(rank *r) {
    move_both_ways(r, stages, sizeof stages / sizeof *stages, NULL);
    tb_batch_opts opts = {.size = sizeof opts, .staged = true, .bucket_size = 100};
    move_both_ways(r, stages, sizeof stages / sizeof *stages, &opts);
}

static void test_pipeline_stages(void **state) {
    (void)state;
    run_ranks(pipeline, 2, 3, NULL);
}

/* What is dense is on all ranks, and experts are where they are. */
static const entry experts[] = {
    {.name = "router", .layout = {ROWS, "mesh=4 place=Shard(1)"}, .rows = 8, .columns = 12},
    {.name = "few", .layout = {ROWS, "mesh=4 place=Shard(0)"}, .rows = 3, .columns = 5},
    {.name = "experts.0", .layout = {ON(0), ON(3)}, .rows = 6, .columns = 6},
    {.name = "experts.1", .layout = {ON(0), "mesh=2 place=Shard(0) ranks=0,1"}, .rows = 6, .columns = 6},
    {.name = "experts.2", .layout = {ON(1), "mesh=2 place=Shard(1) ranks=2,3"}, .rows = 6, .columns = 6},
    {.name = "experts.3", .layout = {ON(1), ON(2)}, .rows = 6, .columns = 6},
};

static void expert_ranks(rank *r) {
    move_both_ways(r, experts, sizeof experts / sizeof *experts, NULL);
}

static void test_experts_on_some_ranks(void **state) {
    (void)state;
    run_ranks(expert_ranks, 2, 4, NULL);
}

/* Idle are the first of a, which numbers the transfers, and the last of b. */
static const entry small[] = {
    {.name = "w", .layout = {"mesh=2 place=Shard(0) ranks=1,2", ON(0)}, .rows = 9, .columns = 5},
};

static void idle(rank *r) {
    move_both_ways(r, small, 1, NULL);
    move_both_ways(r, small, 0, NULL); /* a batch without tensors */
}

static void test_idle_ranks(void **state) {
    (void)state;
    run_ranks(idle, 3, 2, NULL);
}

/* A rank may also add what it has nothing of. */
static void add_all(rank *r) {
    model m;
    model_init(r, &m, stages, sizeof stages / sizeof *stages);
    make_batch(r, &m, NULL);
    for (size_t i = 0; i < m.count && r->index == 0; i++) {
        tb_tensor t = {.size = sizeof t, .dtype = TB_U32, .ndim = 2, .shape = {stages[i].rows, stages[i].columns}};
        t.layout = layout_of(r, &stages[i]);
        if (!m.has[i])
            check_ok(tb_batch_add(m.batch, m.pair, stages[i].name, &t));
    }
    move(r, &m, "a", 1);
    move(r, &m, "b", 2);
    model_fini(&m);
}

static void test_tensors_may_be_added_by_who_has_nothing_of_them(void **state) {
    (void)state;
    run_ranks(add_all, 2, 3, NULL);
}

/* ---- Names ----------------------------------------------------------------------------------------------------- */

/* Only a has buffers, only b has its own head, which is tied to the embedding. */
static const entry tied[] = {
    {.name = "buffer.0", .layout = {ON(0), NULL}, .rows = 3, .columns = 3, .source = {STAYS, STAYS}},
    {.name = "buffer.1", .layout = {ON(1), NULL}, .rows = 3, .columns = 3, .source = {STAYS, STAYS}},
    {.name = "embedding", .layout = {ROWS, ON(0)}, .rows = 8, .columns = 6},
    {.name = "head", .layout = {NULL, "mesh=3 place=Shard(1)"}, .rows = 8, .columns = 6, .source = {0, 3}},
};

/* Each says a part of it, and it counts for all. */
static void tie(rank *r) {
    const tb_tie ties[] = {{"head", "embedding"}};
    const char *const ignored[] = {"buffer.*"};
    tb_batch_opts opts = {.size = sizeof opts};
    if (is_a(r) && r->index == 1) {
        opts.ignored = ignored;
        opts.nignored = 1;
    } else if (!is_a(r)) {
        opts.ties = ties;
        opts.nties = 1;
    }
    move_both_ways(r, tied, sizeof tied / sizeof *tied, &opts);
}

static void test_ties_and_ignored_names(void **state) {
    (void)state;
    run_ranks(tie, 2, 3, NULL);
}

static void bad_options(rank *r) {
    tb_batch *batch = NULL;
    const tb_tie circle[] = {{"x", "y"}, {"y", "x"}}, nameless[] = {{"x", NULL}};
    const char *const bad[] = {"^("}, *const nothing[] = {NULL};
    tb_batch_opts opts = {.size = sizeof opts, .ties = circle, .nties = 2};
    check_fails(tb_batch_create(r->world, "step", &opts, &batch), TB_INVALID, "which is itself tied to");
    opts = (tb_batch_opts){.size = sizeof opts, .ties = nameless, .nties = 1};
    check_fails(tb_batch_create(r->world, "step", &opts, &batch), TB_INVALID, "tie 0 lacks a name");
    opts = (tb_batch_opts){.size = sizeof opts, .ignored = bad, .nignored = 1};
    check_fails(tb_batch_create(r->world, "step", &opts, &batch), TB_INVALID, "^(");
    opts = (tb_batch_opts){.size = sizeof opts, .ignored = nothing, .nignored = 1};
    check_fails(tb_batch_create(r->world, "step", &opts, &batch), TB_INVALID, "is NULL");
    check(!batch);
}

static void test_options_that_make_no_sense(void **state) {
    (void)state;
    run_ranks(bad_options, 1, 0, NULL);
}

/* ---- Conflicts ------------------------------------------------------------------------------------------------- */

/* What a 1 does, and what everybody hears of it. */
typedef struct conflict {
    const char *words, *also;
    const char *layout; /* that a 1 gives "x"; NULL: it does not add it */
    const char *extra;  /* that it adds, alone */
    bool has_wire_dtype, has_more_rows;
} conflict;

static void disagree(rank *r) {
    const conflict none = {.layout = ROWS};
    const conflict *c = r->scene->shared;
    bool is_odd = is_a(r) && r->index == 1;
    tb_pair *pair;
    tb_batch *batch;
    uint32_t data[64] = {0};
    check_ok(tb_pair_create(r->world, "p", other_group(r), ROWS, NULL, &pair));
    for (int round = 0; round < 2; round++) { /* the second time all are of one mind */
        tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_F32, .ndim = 2, .shape = {4, 4}}, x = t;
        x.layout = is_odd ? c->layout : ROWS;
        x.wire_dtype = is_odd && c->has_wire_dtype ? TB_BF16 : TB_DTYPE_NONE;
        x.shape[0] += is_odd && c->has_more_rows;
        check_ok(tb_batch_create(r->world, "step", NULL, &batch));
        check_ok(tb_batch_add_pair(batch, pair));
        check_ok(tb_batch_add(batch, pair, "y", &t));
        if (!is_odd || c->layout)
            check_ok(tb_batch_add(batch, pair, "x", &x));
        t.layout = ON(1);
        if (is_odd && c->extra)
            check_ok(tb_batch_add(batch, pair, c->extra, &t));
        if (round == 0) {
            check_fails(tb_batch_register(batch, 0), TB_CONFLICT, c->words);
            check(strstr(tb_error_detail(), c->also));
        } else {
            check_ok(tb_batch_register(batch, 0));
        }
        meet(r);
        tb_batch_destroy(batch);
        c = &none;
    }
    tb_pair_destroy(pair);
}

static void test_conflicts_are_named_on_all_ranks(void **state) {
    (void)state;
    const conflict conflicts[] = {
        {.words = "(a 0) and rank",
         .also = "differently: wire dtype none and bf16",
         .layout = ROWS,
         .has_wire_dtype = true},
        {.words = "(a 1) describe tensor 'x'", .also = "[4,4] and [5,4]", .layout = ROWS, .has_more_rows = true},
        {.words = "tensor 'x' of batch 'step' differently",
         .also = "Shard(0)' and 'mesh=2 place=Shard(1)",
         .layout = "mesh=2 place=Shard(1)"},
        {.words = "tensor 'x' was not added to batch 'step'", .also = "(a 1) has not"},
        {.words = "batch 'step': unmatched parameters: 1 only in group 'a'",
         .also = "('z')",
         .layout = ROWS,
         .extra = "z"},
    };
    for (size_t i = 0; i < sizeof conflicts / sizeof *conflicts; i++)
        run_ranks(disagree, 2, 2, &conflicts[i]);
}

/* Two tied names must have one shape, and nobody may tie a name twice. */
static void tie_apart(rank *r) {
    tb_pair *pair;
    tb_batch *batch;
    uint32_t data[64] = {0};
    const tb_tie ties[] = {{"head", "x"}, {"head", "y"}};
    check_ok(tb_pair_create(r->world, "p", other_group(r), ON(0), NULL, &pair));
    for (int round = 0; round < 2; round++) {
        tb_batch_opts opts = {.size = sizeof opts, .ties = &ties[is_a(r) && round == 1], .nties = 1};
        tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 2, .shape = {4, 4}};
        check_ok(tb_batch_create(r->world, "step", &opts, &batch));
        check_ok(tb_batch_add(batch, pair, "x", &t));
        check_ok(tb_batch_add(batch, pair, "y", &t));
        t.shape[1] = 5;
        if (!is_a(r))
            check_ok(tb_batch_add(batch, pair, "head", &t));
        check_fails(tb_batch_register(batch, 0), TB_CONFLICT,
                    round == 0 ? "tensor 'x' has shape [4,4] in group 'a' but 'head', which is tied to it, [4,5] in"
                               : "'head' is tied twice");
        meet(r);
        tb_batch_destroy(batch);
    }
    tb_pair_destroy(pair);
}

static void test_ties_that_do_not_fit(void **state) {
    (void)state;
    run_ranks(tie_apart, 1, 1, NULL);
}

/* ---- Coming and going ------------------------------------------------------------------------------------------ */

/* b 0 is tired of waiting for a 1, gives up, and comes again with something else. */
static void come_again(rank *r) {
    model m;
    model_init(r, &m, stages, sizeof stages / sizeof *stages);
    if (!is_a(r) && r->index == 0) {
        check_ok(tb_batch_create(r->world, "step", NULL, &m.batch));
        tb_tensor t = {.size = sizeof t, .data = m.parts[0].data, .dtype = TB_I32, .ndim = 1, .shape = {3}};
        check_ok(tb_batch_add(m.batch, m.pair, "l.0", &t));
        check_fails(tb_batch_register(m.batch, SOON_MS), TB_TIMEOUT, "has not registered batch 'step' of pair 'p'");
        tb_batch_destroy(m.batch);
    }
    if (is_a(r) && r->index == 1)
        meet(r);
    make_batch(r, &m, NULL);
    if (!(is_a(r) && r->index == 1)) {
        check_fails(tb_batch_register(m.batch, SOON_MS), TB_TIMEOUT, "has not registered");
        meet(r);
    }
    move(r, &m, "a", 1);
    move(r, &m, "b", 2);
    model_fini(&m);
}

static void test_who_left_may_come_with_something_else(void **state) {
    (void)state;
    run_ranks(come_again, 2, 3, NULL);
}

/* ---- Plans ----------------------------------------------------------------------------------------------------- */

/* The experts of `experts`, on other ranks of a. */
static const entry moved_experts[] = {
    {.name = "router", .layout = {ROWS, "mesh=4 place=Shard(1)"}, .rows = 8, .columns = 12},
    {.name = "experts.0", .layout = {ON(1), ON(3)}, .rows = 6, .columns = 6},
    {.name = "experts.1", .layout = {ON(0), "mesh=2 place=Shard(0) ranks=0,1"}, .rows = 6, .columns = 6},
    {.name = "experts.2", .layout = {ON(0), "mesh=2 place=Shard(1) ranks=2,3"}, .rows = 6, .columns = 6},
    {.name = "experts.3", .layout = {ON(1), ON(2)}, .rows = 6, .columns = 6},
};

/* Between two meetings: a rank plans as soon as somebody who is ahead has sent it something. */
static void check_counters(rank *r, uint64_t hits, uint64_t misses) {
    uint64_t h, m;
    meet(r);
    tb_world_plan_counters(r->world, &h, &m);
    meet(r);
    check(h == hits && m == misses);
}

static void plan_again(rank *r) {
    model m;
    model_init(r, &m, experts, sizeof experts / sizeof *experts);
    make_batch(r, &m, NULL);
    check_ok(tb_batch_register(m.batch, 0));
    check_counters(r, 0, 0);
    for (uint32_t version = 1; version <= 3; version++)
        move(r, &m, "a", version);
    check_counters(r, 0, 1);
    tb_batch_destroy(m.batch);
    make_batch(r, &m, NULL);
    move(r, &m, "a", 4);
    check_counters(r, 1, 1);
    move(r, &m, "b", 5);
    check_counters(r, 1, 2);
    tb_batch_destroy(m.batch);
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 128};
    make_batch(r, &m, &opts);
    move(r, &m, "a", 6);
    check_counters(r, 1, 3);
    model_fini(&m);
    model_init(r, &m, moved_experts, sizeof moved_experts / sizeof *moved_experts);
    make_batch(r, &m, NULL);
    move(r, &m, "a", 7);
    check_counters(r, 1, 4);
    tb_batch_destroy(m.batch);
    make_batch(r, &m, NULL);
    move(r, &m, "a", 8);
    check_counters(r, 2, 4);
    model_fini(&m);
}

static void test_plans_are_kept(void **state) {
    (void)state;
    run_ranks(plan_again, 2, 4, NULL);
}

enum { PLAN_BYTES = 512 << 10 };

/* More plans than are kept: the first is made again, and the last is there. */
static void plan_many(rank *r) {
    enum { MANY = 66 };
    tb_pair *pair;
    tb_batch *batch;
    uint32_t data[MANY] = {0};
    check_ok(tb_pair_create(r->world, "p", other_group(r), ON(0), NULL, &pair));
    for (int i = 0; i < MANY + 2; i++) {
        tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 1};
        tb_transfer *transfer = NULL;
        t.shape[0] = i < MANY ? i + 1 : i == MANY ? MANY : 1;
        check_ok(tb_batch_create(r->world, "step", NULL, &batch));
        check_ok(tb_batch_add(batch, pair, "w", &t));
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &transfer));
        check_ok(tb_wait(transfer, TB_COMMITTED, -1));
        tb_transfer_destroy(transfer);
        tb_batch_destroy(batch);
        check(tb_world_plan_bytes(r->world) > 0 && tb_world_plan_bytes(r->world) <= PLAN_BYTES);
        check_counters(r, i >= MANY, (uint64_t)(i < MANY ? i + 1 : i == MANY ? MANY : MANY + 1));
    }
    tb_pair_destroy(pair);
}

static void test_the_oldest_plan_goes(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.plan_bytes = PLAN_BYTES;
    run_ranks_in(&s, plan_many, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pipeline_stages),
        cmocka_unit_test(test_experts_on_some_ranks),
        cmocka_unit_test(test_idle_ranks),
        cmocka_unit_test(test_tensors_may_be_added_by_who_has_nothing_of_them),
        cmocka_unit_test(test_ties_and_ignored_names),
        cmocka_unit_test(test_options_that_make_no_sense),
        cmocka_unit_test(test_conflicts_are_named_on_all_ranks),
        cmocka_unit_test(test_ties_that_do_not_fit),
        cmocka_unit_test(test_who_left_may_come_with_something_else),
        cmocka_unit_test(test_plans_are_kept),
        cmocka_unit_test(test_the_oldest_plan_goes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
