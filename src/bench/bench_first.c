/* first: the first transfer of a batch next to the second one. Every round has ranks of its own: what the first
 * transfer sets up is set up once in the life of a batch. */
#include "bench/bench.h"

/* In each process a copy. */
typedef struct trial {
    tool_job job;
    int64_t counted;
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
} trial;

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, rank);
    return tool_mover_do(&t->mover, (tool_step)step, slot);
}

static tb_status move(const trial *t, double *gb_per_s) {
    double seconds;
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &seconds));
    *gb_per_s = 1e-9 * (double)t->counted / seconds;
    return TB_OK;
}

/* Tensors have values when they are registered, and others when they are sent: a program does something in between. */
static tb_status run_round(trial *t, bench_round *out) {
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    TB_TRY(tool_job_connect(&t->job, t->ranks));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    TB_TRY(move(t, &out->ours));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    TB_TRY(move(t, &out->theirs));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

tb_status bench_first_run(int64_t size, const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard,
                          bench_round *out) {
    trial t = {.ranks = NULL};
    TB_TRY(bench_job_init(bench_case_of("model"), size, &t.job, &t.counted));
    t.job.batch = *opts;
    tb_status status = TB_OK;
    while (status == TB_OK && bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line(BENCH_FIRST ": round %d of %d", rounds->done, rounds->most);
        status = tool_job_start(&t.job, &(tool_ranks_opts){.work = work, .arg = &t}, guard, &t.ranks);
        if (status == TB_OK)
            status = run_round(&t, &out[rounds->done - 1]);
        tool_ranks_destroy(t.ranks);
        t.ranks = NULL;
    }
    tool_job_fini(&t.job);
    return status;
}
