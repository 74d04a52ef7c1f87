/* Memory that is taken away, and ranks that leave the batch as soon as their calls have failed: the others hear the
 * reason, whether they hear first of it or of those who leave. */
#include "bus/bus_test.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

/* How a test goes. */
typedef struct way {
    int who; /* takes its memory away */
    bool staged;
    tb_commit commit;
} way;

static void make_batch(rank *r, setup *s, const way *w) {
    tb_batch_opts opts = {.size = sizeof opts, .staged = w->staged, .commit = w->commit};
    tb_tensor tensor = part_tensor(&s->w);
    check_ok(tb_batch_create(r->world, "step", &opts, &s->batch));
    check_ok(tb_batch_add(s->batch, s->pair, "w", &tensor));
    check_ok(tb_batch_register(s->batch, 0));
}

static void set_stage(rank *r, setup *s) {
    const char *layout = is_a(r) ? ROWS : COLUMNS;
    part_init(&s->w, layout, r->index, 40, 40);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s->pair));
}

static void clear_stage(setup *s) {
    tb_pair_destroy(s->pair);
    part_fini(&s->w);
}

static tb_transfer *begin(rank *r, setup *s) {
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(&s->w, 1);
    else
        part_poison(&s->w);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    return t;
}

/* Whoever has all that it needs may succeed. */
static void end(rank *r, setup *s, tb_transfer *t, bool may_succeed) {
    const way *w = r->scene->shared;
    const rank *who = &r->scene->ranks[w->who];
    char words[120];
    snprintf(words, sizeof words, "the memory of tensor 'w' on rank %d was invalidated; make batch 'step' again",
             (int)tb_world_rank(who->world));
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    if (status != TB_OK || !may_succeed)
        check_fails(status, TB_INVALID, words);
    check(status == TB_OK || !strstr(tb_error_detail(), "has given up"));
    check(status != TB_OK || part_holds(&s->w, 1));
    tb_transfer_destroy(t);
    tb_batch_destroy(s->batch);
}

static void run_ways(void (*body)(rank *r)) {
    for (int i = 0; i < 8; i++) {
        way w = {.who = i & 1 ? 0 : 2, .staged = i & 2, .commit = i & 4 ? TB_SHADOW : TB_IN_PLACE};
        run_ranks(body, 2, 2, &w);
    }
}

/* The memory is taken away before anybody begins. The second receiver comes when the others have left. */
static void come_late(rank *r) {
    const way *w = r->scene->shared;
    bool is_late = !is_a(r) && r->index == 1;
    setup s;
    set_stage(r, &s);
    make_batch(r, &s, w);
    if (r == &r->scene->ranks[w->who])
        check_ok(tb_world_invalidate(r->world, s.w.data, 1));
    meet(r);
    if (is_late)
        meet(r);
    end(r, &s, begin(r, &s), false);
    if (!is_late)
        meet(r);
    clear_stage(&s);
}

static void test_come_late(void **state) {
    (void)state;
    run_ways(come_late);
}

/* Nobody waits for anybody. */
static void in_the_rush(rank *r) {
    const way *w = r->scene->shared;
    setup s;
    set_stage(r, &s);
    for (int round = 0; round < 40; round++) {
        make_batch(r, &s, w);
        usleep((useconds_t)((round * 7 + (r->index + (is_a(r) ? 0 : 2)) * 13) % 5 * 50));
        tb_transfer *t = begin(r, &s);
        usleep((useconds_t)(round % 8 * 40));
        if (r == &r->scene->ranks[w->who])
            check_ok(tb_world_invalidate(r->world, s.w.data, 1));
        end(r, &s, t, true);
    }
    meet(r);
    clear_stage(&s);
}

static void test_in_the_rush(void **state) {
    (void)state;
    run_ways(in_the_rush);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_come_late),
        cmocka_unit_test(test_in_the_rush),
    };
    return cmocka_run_group_tests_name("invalidate_leave", tests, NULL, NULL);
}
