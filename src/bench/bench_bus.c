/* bus_model: the demo's model through agents, next to the same ranks that are on the bus themselves. Both move the same
 * memory between the same processes; in one case these do it, in the other their agents. */
#include "bench/bench.h"

#include "bench/fleet.h"

enum { BY_AGENTS = TOOL_NSTEPS, OPEN_CLIENTS }; /* more steps */

/* In each process a copy. */
typedef struct trial {
    const char *name;
    tool_job job;
    int64_t counted;
    tool_ranks *ranks;
    tool_fleet *agents;
    tool_mover mover;
    tool_client client;
} trial;

/* In a rank's process. Both ways end with the commit, because a client hears of nothing before. */
static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    switch (step) {
    case TOOL_ALLOCATE:
        tool_mover_init(&t->mover, &t->job, rank);
        t->client = (tool_client){.job = &t->job, .end = &t->mover.end[0], .rank = rank};
        break;
    case OPEN_CLIENTS:
        return tool_client_open(&t->client);
    case BY_AGENTS:
        return tool_client_move(&t->client);
    case TOOL_CLOSE:
        tool_client_close(&t->client);
        break;
    default:
        break;
    }
    TB_TRY(tool_mover_do(&t->mover, (tool_step)step, slot));
    if (step == TOOL_MOVE)
        slot->ended_ns = tool_now_ns();
    return TB_OK;
}

static tb_status measure(const trial *t, int step, double *gb_per_s) {
    double seconds;
    TB_TRY(tool_ranks_step(t->ranks, step, &seconds));
    *gb_per_s = 1e-9 * (double)t->counted / seconds;
    return TB_OK;
}

static tb_status run_round(const trial *t, bench_round *out) {
    TB_TRY(measure(t, TOOL_MOVE, &out->theirs));
    return measure(t, BY_AGENTS, &out->ours);
}

/* The last round's transfer through agents moves another version, which is verified. */
static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_round *out) {
    enum { WARM_UP = 2 };
    bench_round unused;
    tool_show_line("%s: making the tensors", t->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    tool_show_line("%s: connecting the ranks", t->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_CONNECT, NULL));
    TB_TRY(tool_ranks_step(t->ranks, OPEN_CLIENTS, NULL));
    tool_show_line("%s: warming up", t->name);
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(t, &unused));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        bench_round *round = &out[rounds->done - 1];
        tool_show_line("%s: round %d of %d", t->name, rounds->done, rounds->most);
        TB_TRY(measure(t, TOOL_MOVE, &round->theirs));
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(measure(t, BY_AGENTS, &round->ours));
    }
    tool_show_line("%s: verifying", t->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

tb_status bench_bus_run(const char *name, int64_t size, const char *memory, const tb_batch_opts *opts,
                        bench_rounds *rounds, tool_guard *guard, bench_round *out) {
    trial t = {.name = name};
    TB_TRY(bench_job_init(bench_case_of("model"), size, &t.job, &t.counted));
    t.job.batch = *opts;
    t.job.memory[TOOL_SOURCE] = t.job.memory[TOOL_TARGET] = memory;
    tb_status status = tool_job_start(&t.job, &(tool_ranks_opts){.work = work, .arg = &t}, guard, &t.ranks);
    if (status == TB_OK)
        status = tool_fleet_create(&t.job, guard, &t.agents);
    if (status == TB_OK) {
        status = run_rounds(&t, rounds, out);
        if (status != TB_OK && status != TB_CANCELLED)
            (void)tool_fleet_check(t.agents);
    }
    tool_ranks_destroy(t.ranks);
    tool_fleet_destroy(t.agents);
    tool_job_fini(&t.job);
    return status;
}
