/* refit: a mixture-of-experts model of some 200 tensors, in bf16, from a trainer with pp2, tp2, ep2 to an inference
 * engine with dp4 and ep4, 4 to 4 ranks, next to memcpy. */
#include "bench/bench.h"

#include "bench/refit.h"

/* In each process a copy. */
typedef struct trial {
    refit_job job;
    refit_rank rank;
    tool_ranks *ranks;
} trial;

static tb_status work(void *arg, int number, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        refit_rank_init(&t->rank, &t->job, number);
    return refit_rank_do(&t->rank, (tool_step)step, slot);
}

static tb_status run_round(const trial *t, tool_buffers *buffers, bench_round *out) {
    double seconds;
    TB_TRY(tool_memcpy(buffers, &out->theirs));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &seconds));
    out->ours = 1e-9 * (double)t->job.delivered / seconds;
    return TB_OK;
}

/* The last round moves another version, which is verified. */
static tb_status run_rounds(trial *t, tool_buffers *buffers, bench_rounds *rounds, bench_round *out,
                            int64_t *extra_bytes) {
    enum { WARM_UP = 2 };
    bench_round unused;
    tool_show_line(BENCH_REFIT ": making the tensors");
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    int64_t before = tool_ranks_memory(t->ranks);
    tool_show_line(BENCH_REFIT ": connecting the ranks");
    TB_TRY(refit_job_connect(&t->job, t->ranks));
    tool_show_line(BENCH_REFIT ": warming up");
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(t, buffers, &unused));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line(BENCH_REFIT ": round %d of %d", rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(run_round(t, buffers, &out[rounds->done - 1]));
    }
    tool_show_line(BENCH_REFIT ": verifying");
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    int64_t after = tool_ranks_memory(t->ranks);
    *extra_bytes = before < 0 || after < 0 ? -1 : after > before ? after - before : 0;
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

tb_status bench_refit_run(tool_buffers *buffers, const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard,
                          bench_round *out, int64_t *extra_bytes) {
    static const moe_cut trainer = {.tp = 2, .pp = 2, .dp = 1, .ep = 2, .etp = 1},
                         engine = {.tp = 1, .pp = 1, .dp = 4, .ep = 4, .etp = 1};
    trial t = {.ranks = NULL};
    TB_TRY(refit_job_init(&t.job, (int64_t)buffers->nbytes, &trainer, &engine));
    t.job.batch = *opts;
    tb_status status = refit_job_start(&t.job, &(tool_ranks_opts){.work = work, .arg = &t}, guard, &t.ranks);
    if (status == TB_OK)
        status = run_rounds(&t, buffers, rounds, out, extra_bytes);
    tool_ranks_destroy(t.ranks);
    refit_job_fini(&t.job);
    return status;
}
