/* Refits between processes: a model of some 200 tensors from 4 to 4 ranks that are cut differently in every way,
 * several versions of it, every element checked; and experts that are dealt out anew in between. In a test bed the
 * ranks are dealt out to its hosts. */
#include "bench/refit.h"

#include "../tests/support/hosts.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { RECUT = TOOL_NSTEPS, REFITS = 3, MAX_MAPS = 3 };

/* In place of the one that begins with the command's name: what ranks say. */
int tool_fail(int exit_status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprint_error(format, args);
    va_end(args);
    print_error("\n");
    return exit_status;
}

static void assert_ok(tb_status status) {
    if (status != TB_OK)
        print_error("%s\n", tb_error_detail());
    assert_int_equal(status, TB_OK);
}

/* In each process a copy. */
typedef struct trial {
    refit_job job;
    refit_rank rank;
    moe_cut next[MAX_MAPS]; /* what the engine is cut to, one after the other */
    int nnext, at;
    uint64_t hits, misses; /* of plans, that there should be */
} trial;

static tb_status check_counters(const trial *t) {
    uint64_t hits, misses;
    tb_world_plan_counters(t->rank.world, &hits, &misses);
    if (hits == t->hits && misses == t->misses)
        return TB_OK;
    return tb__fail(TB_INTERNAL, "%" PRIu64 " plans were ready and %" PRIu64 " made, not %" PRIu64 " and %" PRIu64,
                    hits, misses, t->hits, t->misses);
}

/* Plans are made by the first transfer of a batch; the last recut is to what there was at first. */
static tb_status work(void *arg, int number, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE && t->job.store)
        hosts_enter(number);
    if (step == TOOL_ALLOCATE)
        refit_rank_init(&t->rank, &t->job, number);
    if (step == TOOL_CONNECT)
        t->misses = 1;
    if (step == RECUT) {
        bool is_last = t->at == t->nnext - 1;
        t->hits += is_last;
        t->misses += !is_last;
        return refit_rank_recut(&t->rank, &t->next[t->at++]);
    }
    TB_TRY(refit_rank_do(&t->rank, (tool_step)step, slot));
    return step == TOOL_VERIFY ? check_counters(t) : TB_OK;
}

static void refit(tool_ranks *ranks) {
    static const tool_step steps[] = {TOOL_PREPARE, TOOL_MOVE, TOOL_VERIFY};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        assert_ok(tool_ranks_step(ranks, steps[i], NULL));
}

static void run(trial *t, const moe_cut *trainer, const moe_cut *engine, bool staged) {
    enum { NBYTES = 1 << 20 };
    tool_guard guard;
    tool_ranks *ranks;
    assert_ok(refit_job_init(&t->job, NBYTES, trainer, engine));
    t->job.batch.staged = staged;
    char url[64];
    if (hosts_count() > 0) {
        hosts_store(url, sizeof url);
        t->job.store = url;
        t->job.token = hosts_token;
    }
    assert_ok(tool_guard_init(&guard));
    assert_ok(refit_job_start(&t->job, &(tool_ranks_opts){.work = work, .arg = t}, &guard, &ranks));
    assert_ok(tool_ranks_step(ranks, TOOL_ALLOCATE, NULL));
    assert_ok(refit_job_connect(&t->job, ranks));
    for (int i = 0; i < REFITS; i++)
        refit(ranks);
    for (int i = 0; i < t->nnext; i++) {
        assert_ok(tool_ranks_step(ranks, RECUT, NULL));
        refit(ranks);
    }
    assert_ok(tool_ranks_step(ranks, TOOL_CLOSE, NULL));
    tool_ranks_destroy(ranks);
    tool_guard_fini(&guard);
    refit_job_fini(&t->job);
}

#define CUT(tensor, pipeline, data, expert, expert_tensor)                                                             \
    (&(moe_cut){.tp = (tensor), .pp = (pipeline), .dp = (data), .ep = (expert), .etp = (expert_tensor)})

static void test_everything_differs(void **state) {
    (void)state;
    run(&(trial){0}, CUT(2, 2, 1, 2, 1), CUT(1, 1, 4, 4, 1), false);
    run(&(trial){0}, CUT(1, 2, 2, 2, 1), CUT(4, 1, 1, 1, 4), false);
}

static void test_staged(void **state) {
    (void)state;
    run(&(trial){0}, CUT(2, 2, 1, 2, 1), CUT(2, 1, 2, 4, 1), true);
}

/* Ten slots for eight experts; copies go from one expert to another, and back. */
static void test_experts_move(void **state) {
    (void)state;
    static const int64_t maps[2][2 * 5] = {{7, 0, 3, 2, 5, 1, 4, 6, 0, 7}, {1, 0, 3, 2, 4, 5, 6, 7, 4, 2}};
    moe_cut cuts[2];
    for (int i = 0; i < 2; i++)
        cuts[i] = (moe_cut){.tp = 2, .pp = 1, .dp = 2, .ep = 2, .etp = 2, .map = maps[i], .nslots = 5};
    trial t = {.next = {cuts[1], cuts[0]}, .nnext = 2};
    run(&t, CUT(2, 2, 1, 1, 1), &cuts[0], false);
}

int main(void) {
    if (hosts_count() > 0)
        hosts_need_ucx();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everything_differs),
        cmocka_unit_test(test_staged),
        cmocka_unit_test(test_experts_move),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
