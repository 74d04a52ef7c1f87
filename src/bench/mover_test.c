/* Jobs of `tensorbus demo` and `bench` between processes, with tensors on the host, on a device whose memory nobody
 * else can touch, and on both: every kind of tensor arrives as it has to, all at once and one target after the other.
 */
#include "bench/move.h"

#include "../tests/support/asserts.h"
#include "../tests/support/slow_device.h"

#include <string.h>

int tool_fail(int exit_status, const char *format, ...) {
    (void)format;
    return exit_status;
}

static const tb_batch_opts batch_opts = {.size = sizeof(tb_batch_opts)};

/* In each process a copy. */
typedef struct trial {
    tool_job job;
    tool_mover mover;
    _Atomic int32_t *turn; /* shared */
    bool is_in_turn, is_spoiled;
} trial;

/* Spoils one byte of what has arrived in the target's memory, on whatever device that is. */
static tb_status spoil(const trial *t) {
    const tool_parts *parts = &t->mover.end[0].parts;
    if (t->mover.end[0].which == TOOL_SOURCE)
        return TB_OK;
    TB_TRY(tool_mirror_get(&parts->mirror));
    ((char *)parts->part[0].host)[parts->part[0].nbytes - 1] ^= 1;
    return tool_mirror_put(&parts->mirror);
}

/* What a target has received was read in place, whichever memory the two have. */
static tb_status check_reach(const trial *t) {
    char *dump;
    if (t->mover.end[0].which == TOOL_SOURCE)
        return TB_OK;
    TB_TRY(tb_batch_dump(t->mover.batch, false, &dump));
    tb_status status = strstr(dump, "staged") ? tb__fail(TB_INTERNAL, "%s", dump) : TB_OK;
    free(dump);
    return status;
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, rank);
    t->mover.turn = t->is_in_turn ? t->turn : NULL;
    TB_TRY(tool_mover_do(&t->mover, (tool_step)step, slot));
    if (step == TOOL_VERIFY)
        return check_reach(t);
    return step == TOOL_MOVE && t->is_spoiled ? spoil(t) : TB_OK;
}

static tb_status run_steps(trial *t, tool_ranks *ranks) {
    static const tool_step steps[] = {TOOL_PREPARE, TOOL_MOVE, TOOL_VERIFY};
    TB_TRY(tool_ranks_step(ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_job_connect(&t->job, ranks));
    for (int version = 0; version < 2; version++) {
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            atomic_store(t->turn, 0);
            TB_TRY(tool_ranks_step(ranks, steps[i], NULL));
        }
        int64_t verified = 0;
        for (int rank = 0; rank < t->job.nranks; rank++)
            verified += atomic_load(&tool_ranks_slot(ranks, rank)->done);
        assert_int_equal(verified, t->job.nbytes[TOOL_TARGET]);
    }
    return tool_ranks_step(ranks, TOOL_CLOSE, NULL);
}

static tb_status run_trial(trial *t) {
    tool_guard guard;
    tool_ranks *ranks = NULL;
    void *turn;
    assert_ok(tool_share(sizeof *t->turn, &turn));
    t->turn = turn;
    assert_ok(tool_guard_init(&guard));
    tb_status status = tool_job_start(&t->job, &(tool_ranks_opts){.work = work, .arg = t}, &guard, &ranks);
    if (status == TB_OK)
        status = run_steps(t, ranks);
    tool_ranks_destroy(ranks);
    tool_guard_fini(&guard);
    tool_unshare(turn, sizeof *t->turn);
    return status;
}

typedef struct kind {
    tool_tensor tensor;
    const char *src, *dst;
} kind;

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

static const kind kinds[] = {
    {{.name = "words", .shape = {2, {256, 320}}, .dtype = {TB_F32, TB_F32}}, ROWS, COLUMNS},
    {{.name = "cast", .shape = {2, {256, 320}}, .dtype = {TB_F32, TB_BF16}, .values = TOOL_FLOATS}, ROWS, COLUMNS},
    {{.name = "sum", .shape = {2, {256, 320}}, .dtype = {TB_BF16, TB_BF16}, .values = TOOL_TERMS, .nterms = 2},
     "mesh=2 place=Partial(sum)",
     ROWS},
    {{.name = "turned", .shape = {2, {256, 322}}, .dtype = {TB_F32, TB_F32}, .is_transposed = true}, ROWS, COLUMNS},
    {{.name = "turned", .shape = {2, {30, 70}}, .dtype = {TB_BF16, TB_BF16}, .is_transposed = true}, ROWS, ROWS},
    {{.name = "mxfp8",
      .shape = {2, {256, 320}},
      .dtype = {TB_BF16, TB_F8E4M3},
      .values = TOOL_FINITE,
      .encode = "mxfp8"},
     ROWS,
     ROWS},
    {{.name = "block",
      .shape = {2, {512, 320}},
      .dtype = {TB_BF16, TB_F8E4M3},
      .values = TOOL_FINITE,
      .encode = "fp8_block"},
     COLUMNS,
     ROWS},
    {{.name = "nvfp4",
      .shape = {2, {256, 320}},
      .dtype = {TB_BF16, TB_F4E2M1},
      .values = TOOL_FINITE,
      .encode = "nvfp4"},
     ROWS,
     ROWS},
};

static void init_trial(trial *t, const kind *k, const char *from, const char *to) {
    *t = (trial){.job = {.batch = batch_opts, .memory = {from, to}}};
    assert_ok(tool_side_init(&t->job.side[TOOL_SOURCE], TOOL_SOURCE, "from", k->src, 0));
    assert_ok(tool_side_init(&t->job.side[TOOL_TARGET], TOOL_TARGET, "to", k->dst, 0));
    assert_true(tb__vec_push(&t->job.tensors, k->tensor));
    assert_ok(tool_job_weigh(&t->job));
}

static bool is_on_gpu(void) {
    const char *device = getenv("TB_TEST_DEVICE");
    return device && strcmp(device, "cuda") == 0;
}

static void test_kinds(void **state) {
    const char *device = is_on_gpu() ? "cuda:0" : "slow:0", *other = is_on_gpu() ? "cuda:0" : "slow:1";
    const char *const memory[][TOOL_NSIDES] = {{NULL, NULL}, {device, other}, {device, "pinned"}, {"pinned", device}};
    (void)state;
    for (size_t m = 0; m < sizeof memory / sizeof *memory; m++) {
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            trial t;
            init_trial(&t, &kinds[i], memory[m][0], memory[m][1]);
            t.is_in_turn = i % 2;
            tb_status status = run_trial(&t);
            if (status != TB_OK)
                fail_msg("%s from %s to %s: %s", kinds[i].tensor.name, memory[m][0], memory[m][1], tb_error_detail());
            tool_job_fini(&t.job);
        }
    }
}

/* A byte that is wrong is found, wherever the tensor is. */
static void test_wrong(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        trial t;
        init_trial(&t, &kinds[i], NULL, i % 2 ? is_on_gpu() ? "cuda" : "slow" : NULL);
        t.is_spoiled = true;
        assert_fails(run_trial(&t), TB_INTERNAL, "is wrong at");
        assert_non_null(strstr(tb_error_detail(), kinds[i].tensor.name));
        tool_job_fini(&t.job);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kinds), cmocka_unit_test(test_wrong)};
    if (!is_on_gpu())
        slow_device_install();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
