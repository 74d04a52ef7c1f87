/* One engine, two pairs: group b receives from a through pair p, and from c through pair q. Both pairs together are one
 * version. */
#include "bus/bus_test.h"

enum { NB = 2, NRANKS = 2 + NB };

typedef struct two {
    bool is_engine;
    int npairs;
    tb_pair *pairs[2];
    part parts[2];
    tb_batch *batch;
} two;

static bool is_c(const rank *r) {
    return strcmp(r->group, "c") == 0;
}

static tb_commit mode_of(const rank *r) {
    return *(const tb_commit *)r->scene->shared;
}

static void open_batch(rank *r, two *t) {
    tb_batch_opts opts = {.size = sizeof opts, .commit = mode_of(r), .group_window = 1};
    bool is_engine = !is_a(r) && !is_c(r);
    *t = (two){.is_engine = is_engine, .npairs = is_engine ? 2 : 1};
    check_ok(tb_batch_create(r->world, "step", &opts, &t->batch));
    for (int i = 0; i < t->npairs; i++) {
        bool is_p = is_engine ? i == 0 : is_a(r);
        const char *layout = is_engine ? "mesh=2 place=S0" : "mesh=1 place=R";
        part_init(&t->parts[i], layout, is_engine ? r->index : 0, 12, is_p ? 4 : 5);
        part_poison(&t->parts[i]);
        check_ok(tb_pair_create(r->world, is_p ? "p" : "q",
                                !is_engine ? "b"
                                : is_p     ? "a"
                                           : "c",
                                layout, NULL, &t->pairs[i]));
        tb_tensor w = part_tensor(&t->parts[i]);
        check_ok(tb_batch_add(t->batch, t->pairs[i], "w", &w));
    }
    check_ok(tb_batch_register(t->batch, 0));
}

static void close_batch(two *t) {
    tb_batch_destroy(t->batch);
    for (int i = 0; i < t->npairs; i++) {
        tb_pair_destroy(t->pairs[i]);
        part_fini(&t->parts[i]);
    }
}

static tb_transfer *begin(const two *t) {
    tb_transfer *moves = NULL;
    check_ok((t->is_engine ? tb_recv : tb_send)(t->batch, NULL, &moves));
    return moves;
}

static void fill(two *t, uint32_t version) {
    if (!t->is_engine)
        part_fill(&t->parts[0], version);
}

static void finish(const two *t, tb_transfer *moves, uint32_t version) {
    tb_transfer_state state = {.size = sizeof state};
    tb_batch_state batch = {.size = sizeof batch};
    check_ok(tb_wait(moves, TB_COMMITTED, -1));
    check_ok(tb_transfer_query(moves, &state));
    check(state.version == version);
    check_ok(tb_batch_query(t->batch, &batch));
    check(!t->is_engine || (batch.version == version && !batch.is_mixed && !batch.is_torn && !batch.is_in_doubt));
    for (int i = 0; i < t->npairs; i++)
        check(part_holds(&t->parts[i], version));
    tb_transfer_destroy(moves);
}

static void move(two *t, uint32_t version) {
    fill(t, version);
    finish(t, begin(t), version);
}

/* a has given up a version that c has not begun: the engine takes a's next, and c's lower one is superseded. */
static void superseded(rank *r) {
    two t;
    open_batch(r, &t);
    move(&t, 1);
    meet(r);
    tb_transfer *moves;
    if (is_a(r)) {
        moves = begin(&t);
        tb_cancel(moves);
        tb_transfer_destroy(moves);
    }
    meet(r);
    fill(&t, is_a(r) ? 3 : 2);
    moves = begin(&t);
    if (is_c(r)) {
        check_fails(tb_wait(moves, TB_COMMITTED, -1), TB_SUPERSEDED, "superseded");
        tb_transfer_destroy(moves);
        fill(&t, 3);
        moves = begin(&t);
    }
    finish(&t, moves, 3);
    move(&t, 4);
    meet(r);
    close_batch(&t);
}

/* c gives up when its data is on the way. */
static void one_fails(rank *r) {
    two t;
    tb_batch_state state = {.size = sizeof state};
    open_batch(r, &t);
    move(&t, 1);
    meet(r);
    fill(&t, 2);
    tb_transfer *moves = is_c(r) ? NULL : begin(&t);
    meet(r);
    if (is_c(r)) {
        moves = begin(&t);
        tb_cancel(moves);
    }
    tb_status status = tb_wait(moves, TB_COMMITTED, -1);
    check_ok(tb_batch_query(t.batch, &state));
    if (status != TB_OK)
        check_fails(status, TB_CANCELLED, "cancelled");
    for (int i = 0; t.is_engine && i < t.npairs; i++) {
        uint64_t version;
        bool is_torn;
        check_ok(tb_batch_version(t.batch, t.pairs[i], &version, &is_torn));
        if (!is_torn)
            check(part_holds(&t.parts[i], (uint32_t)version));
        check(mode_of(r) == TB_IN_PLACE || version == (status == TB_OK ? 2 : 1));
        check(version == state.version || state.is_mixed || state.is_torn);
        check(!is_torn || state.is_torn);
    }
    check(!t.is_engine || mode_of(r) == TB_IN_PLACE || (!state.is_mixed && !state.is_torn));
    tb_transfer_destroy(moves);
    meet(r);
    move(&t, 3); /* what was mixed, or torn, is whole again */
    meet(r);
    close_batch(&t);
}

/* c comes again, as another process would: it counts on from what the engine has taken. */
static void restarted(rank *r) {
    two t;
    open_batch(r, &t);
    for (uint32_t version = 1; version <= 3; version++)
        move(&t, version);
    meet(r);
    if (is_c(r)) {
        close_batch(&t);
        open_batch(r, &t);
    } else if (t.is_engine) {
        tb_tensor w = part_tensor(&t.parts[1]);
        check_ok(tb_batch_remove_pair(t.batch, t.pairs[1]));
        tb_pair_destroy(t.pairs[1]);
        check_ok(tb_pair_create(r->world, "q", "c", "mesh=2 place=S0", NULL, &t.pairs[1]));
        check_ok(tb_batch_add(t.batch, t.pairs[1], "w", &w));
        check_ok(tb_batch_register(t.batch, 0));
    }
    meet(r);
    move(&t, 4);
    meet(r);
    close_batch(&t);
}

static void run_groups(void (*body)(rank *r), tb_commit commit) {
    scene s;
    scene_init(&s);
    s.body = body;
    s.nranks = NRANKS;
    s.shared = &commit;
    for (int i = 0; i < NRANKS; i++) {
        s.ranks[i] = (rank){.scene = &s, .group = i == 0 ? "a" : i == 1 ? "c" : "b", .size = 1};
        if (i >= 2) {
            s.ranks[i].index = i - 2;
            s.ranks[i].size = NB;
        }
        check(pthread_create(&s.ranks[i].thread, NULL, rank_main, &s.ranks[i]) == 0);
    }
    for (int i = 0; i < NRANKS; i++)
        pthread_join(s.ranks[i].thread, NULL);
    for (int i = 0; i < NRANKS; i++) {
        if (s.ranks[i].failure[0])
            print_error("%s\n", s.ranks[i].failure);
    }
    check(!s.has_failed);
    for (int i = 0; i < NRANKS; i++)
        tb_world_destroy(s.ranks[i].world);
    scene_fini(&s);
}

static void run_both_ways(void (*body)(rank *r)) {
    run_groups(body, TB_IN_PLACE);
    run_groups(body, TB_SHADOW);
}

static void test_superseded(void **state) {
    (void)state;
    run_both_ways(superseded);
}

static void test_one_fails(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++)
        run_both_ways(one_fails);
}

static void test_restarted(void **state) {
    (void)state;
    run_both_ways(restarted);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_superseded), cmocka_unit_test(test_one_fails),
                                       cmocka_unit_test(test_restarted)};
    return cmocka_run_group_tests_name("versions", tests, NULL, NULL);
}
