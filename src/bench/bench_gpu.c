/* A case of `tensorbus bench --gpu`: the ranks move its tensors, and its targets copy as many bytes by cuMemcpyAsync.
 *
 * Processes that use one GPU at a time take turns on it, and the time between two events of one of them has the turns
 * of the others in it. So the ratio is measured with one target at a time, each of which tells how long the GPU was
 * busy for it; beside it all of them work at once, and the clock counts. */
#include "bench/bench_driver.h"

#include <string.h>

enum {
    OFFER = TOOL_NSTEPS, /* more steps: memory for copies, in the first source ... */
    OPEN,                /* ... and in targets */
    COPY,                /* all targets at once */
    COPY_IN_TURN,
    MOVE_IN_TURN,
};

/* What all processes share. */
typedef struct shared {
    _Atomic int32_t turn;
    bench_offer offer;
    int64_t offered; /* bytes */
} shared;

/* In each process a copy. */
typedef struct trial {
    const bench_gpu_case *c;
    tool_job job;
    tool_ranks *ranks;
    shared *shared;
    tool_mover mover;
    bench_copy copy;
} trial;

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

static bench_copy_kind copy_kind(const bench_gpu_case *c) {
    if (strcmp(c->memory[TOOL_TARGET], "pinned") == 0)
        return BENCH_COPY_TO_HOST;
    return strcmp(c->memory[TOOL_SOURCE], "pinned") == 0 ? BENCH_COPY_TO_GPU : BENCH_COPY_BETWEEN;
}

/* Tells the parent how much a target is to copy. */
static tb_status allocate(trial *t, int rank, tool_slot *slot) {
    tool_mover_init(&t->mover, &t->job, rank);
    const tool_end *end = &t->mover.end[0];
    TB_TRY(tool_mover_do(&t->mover, TOOL_ALLOCATE, slot));
    atomic_store(&slot->done, end->which == TOOL_TARGET ? bench_gpu_payload(t->c, &end->parts) : 0);
    return end->which == TOOL_TARGET ? bench_driver_watch() : TB_OK;
}

static tb_status copy_in_turn(trial *t, tool_slot *slot) {
    int32_t seat = t->mover.end[0].seat;
    TB_TRY(tool_take_turn(&t->shared->turn, seat, t->job.timeout_ms));
    TB_TRY(bench_copy_run(&t->copy, &slot->gpu_seconds));
    atomic_store(&t->shared->turn, seat + 1);
    return TB_OK;
}

static tb_status move_in_turn(trial *t, bool is_target, tool_slot *slot) {
    if (is_target)
        TB_TRY(bench_driver_reset());
    t->mover.turn = &t->shared->turn;
    TB_TRY(tool_mover_do(&t->mover, TOOL_MOVE, slot));
    t->mover.turn = NULL;
    return is_target ? bench_driver_spent(&slot->gpu_seconds, &slot->nlaunches) : TB_OK;
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    bool is_target = step != TOOL_ALLOCATE && t->mover.end[0].which == TOOL_TARGET;
    slot->gpu_seconds = 0;
    slot->nlaunches = 0;
    switch (step) {
    case TOOL_ALLOCATE:
        return allocate(t, rank, slot);
    case OFFER:
        return rank == 0 && copy_kind(t->c) == BENCH_COPY_BETWEEN
                   ? bench_offer_init(&t->shared->offer, (size_t)t->shared->offered)
                   : TB_OK;
    case OPEN:
        return is_target ? bench_copy_init(&t->copy, copy_kind(t->c), &t->shared->offer,
                                           (size_t)bench_gpu_payload(t->c, &t->mover.end[0].parts))
                         : TB_OK;
    case COPY:
        return is_target ? bench_copy_run(&t->copy, NULL) : TB_OK;
    case COPY_IN_TURN:
        return is_target ? copy_in_turn(t, slot) : TB_OK;
    case MOVE_IN_TURN:
        return move_in_turn(t, is_target, slot);
    default:
        return tool_mover_do(&t->mover, (tool_step)step, slot);
    }
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

/* How long the GPU was busy for all targets. */
static tb_status do_in_turn(const trial *t, int step, double *gpu_seconds, int64_t *nlaunches) {
    *gpu_seconds = 0;
    *nlaunches = 0;
    atomic_store(&t->shared->turn, 0);
    TB_TRY(tool_ranks_step(t->ranks, step, NULL));
    for (int rank = 0; rank < t->job.nranks; rank++) {
        const tool_slot *slot = tool_ranks_slot(t->ranks, rank);
        *gpu_seconds += slot->gpu_seconds;
        *nlaunches = slot->nlaunches > *nlaunches ? slot->nlaunches : *nlaunches;
    }
    return *gpu_seconds > 0 ? TB_OK : tb__fail(TB_INTERNAL, "the GPU was not used");
}

static tb_status run_round(const trial *t, double payload, bool is_last, bench_gpu_round *out) {
    double copied, moved, copied_at_once, moved_at_once;
    int64_t unused;
    TB_TRY(do_in_turn(t, COPY_IN_TURN, &copied, &unused));
    TB_TRY(do_in_turn(t, MOVE_IN_TURN, &moved, &out->nlaunches));
    if (is_last) { /* both ways are verified */
        TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
        TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    }
    TB_TRY(tool_ranks_step(t->ranks, COPY, &copied_at_once));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &moved_at_once));
    out->gpu = (bench_round){.ours = 1e-9 * payload / moved, .theirs = 1e-9 * payload / copied};
    out->wall = copied_at_once / moved_at_once;
    return is_last ? tool_ranks_step(t->ranks, TOOL_VERIFY, NULL) : TB_OK;
}

/* Makes the tensors, connects the ranks, and has memory for the copies. */
static tb_status prepare(trial *t, double *payload) {
    tool_show_line("%s: making the tensors", t->c->name);
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    *payload = 0;
    for (int rank = 0; rank < t->job.nranks; rank++) {
        int64_t theirs = atomic_load(&tool_ranks_slot(t->ranks, rank)->done);
        t->shared->offered = theirs > t->shared->offered ? theirs : t->shared->offered;
        *payload += (double)theirs;
    }
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, OFFER, NULL));
    TB_TRY(tool_ranks_step(t->ranks, OPEN, NULL));
    tool_show_line("%s: connecting the ranks", t->c->name);
    return tool_job_connect(&t->job, t->ranks);
}

static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_gpu_round *out) {
    enum { WARM_UP = 2 };
    double payload;
    TB_TRY(prepare(t, &payload));
    tool_show_line("%s: warming up", t->c->name);
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(t, payload, false, &out[0]));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", t->c->name, rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(run_round(t, payload, rounds->is_last, &out[rounds->done - 1]));
    }
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

tb_status bench_gpu_case_run(const bench_gpu_case *c, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                             tool_guard *guard, bench_gpu_round *out) {
    trial t = {.c = c};
    void *memory;
    TB_TRY(bench_gpu_job_init(c, size, &t.job));
    t.job.batch = *opts;
    tb_status status = tool_share(sizeof *t.shared, &memory);
    if (status == TB_OK) {
        t.shared = memory;
        status = tool_job_start(&t.job, &(tool_ranks_opts){.work = work, .arg = &t}, guard, &t.ranks);
    }
    if (status == TB_OK)
        status = run_rounds(&t, rounds, out);
    tool_ranks_destroy(t.ranks);
    tool_unshare(t.shared, sizeof *t.shared);
    tool_job_fini(&t.job);
    return status;
}
