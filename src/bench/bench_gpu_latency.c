/* gpu_latency: how long one version of 4 KiB takes from the producer's write to the consumer's memory, both on one GPU;
 * next to two processes that do nothing else: the first fills the memory and sets a flag, the second waits for the flag
 * in a loop, and copies. Contexts of two processes take turns on a GPU, which is most of the time of either. */
#include "bench/bench_driver.h"

#include <string.h>

enum { MEASURE = TOOL_NSTEPS, OFFER, OPEN, VERSIONS = 100, NBYTES = 4096, SETTLE_NS = 200000 };

/* What both processes share. */
typedef struct shared {
    _Atomic int32_t ready, go, over; /* versions that the target waits for, that are written, that have arrived */
    _Atomic int64_t began_ns;
    bench_offer offer;
    double ours, theirs; /* us, medians of the last step */
} shared;

/* In each process a copy. */
typedef struct trial {
    tool_job job;
    tool_ranks *ranks;
    shared *shared;
    tool_mover mover;
    bench_copy copy;
    int32_t count; /* of versions and copies so far */
} trial;

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

static tb_status wait_until(const trial *t, _Atomic int32_t *count, int32_t wanted) {
    int64_t deadline = tool_now_ns() + (int64_t)1000000 * t->job.timeout_ms;
    while (atomic_load(count) < wanted) {
        if (tool_now_ns() >= deadline)
            return tb__fail(TB_TIMEOUT, "the other process is not there after %d ms", t->job.timeout_ms);
    }
    return TB_OK;
}

/* The source begins when the target has been waiting for a while. */
static tb_status write_version(trial *t) {
    TB_TRY(wait_until(t, &t->shared->ready, ++t->count));
    int64_t until = tool_now_ns() + SETTLE_NS;
    while (tool_now_ns() < until)
        continue;
    atomic_store(&t->shared->began_ns, tool_now_ns());
    return bench_fill(t->mover.end[0].parts.mirror.memory, NBYTES, (unsigned char)t->count);
}

static tb_status send(trial *t, tool_slot *slot) {
    TB_TRY(write_version(t));
    TB_TRY(tool_mover_do(&t->mover, TOOL_MOVE, slot));
    return wait_until(t, &t->shared->over, t->count);
}

static tb_status offer_copy(trial *t) {
    TB_TRY(write_version(t));
    atomic_store(&t->shared->go, t->count);
    return wait_until(t, &t->shared->over, t->count);
}

static double us_since_write(const trial *t, int64_t now_ns) {
    return 1e-3 * (double)(now_ns - atomic_load(&t->shared->began_ns));
}

static tb_status receive(trial *t, tool_slot *slot, double *us) {
    atomic_store(&t->shared->ready, ++t->count);
    slot->ended_ns = 0;
    TB_TRY(tool_mover_do(&t->mover, TOOL_MOVE, slot));
    *us = us_since_write(t, slot->ended_ns);
    atomic_store(&t->shared->over, t->count);
    return TB_OK;
}

static tb_status take_copy(trial *t, double *us) {
    atomic_store(&t->shared->ready, ++t->count);
    TB_TRY(wait_until(t, &t->shared->go, t->count));
    TB_TRY(bench_copy_run(&t->copy, NULL));
    *us = us_since_write(t, tool_now_ns());
    atomic_store(&t->shared->over, t->count);
    return TB_OK;
}

/* Every byte of the last version. */
static tb_status verify(const trial *t) {
    const tool_mirror *mirror = &t->mover.end[0].parts.mirror;
    TB_TRY(tool_mirror_get(mirror));
    for (int i = 0; i < NBYTES; i++) {
        if ((unsigned char)mirror->host[i] != (unsigned char)t->count)
            return tb__fail(TB_INTERNAL, "byte %d is 0x%02x, not 0x%02x", i, (unsigned char)mirror->host[i],
                            (unsigned char)t->count);
    }
    return TB_OK;
}

static tb_status measure(trial *t, tool_slot *slot) {
    double ours[VERSIONS], theirs[VERSIONS];
    bool is_source = t->mover.end[0].which == TOOL_SOURCE;
    for (int i = 0; i < VERSIONS; i++) {
        TB_TRY(is_source ? offer_copy(t) : take_copy(t, &theirs[i]));
        TB_TRY(is_source ? send(t, slot) : receive(t, slot, &ours[i]));
    }
    if (is_source)
        return TB_OK;
    t->shared->ours = bench_median(ours, VERSIONS);
    t->shared->theirs = bench_median(theirs, VERSIONS);
    return verify(t);
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, rank);
    bool is_source = t->mover.end[0].which == TOOL_SOURCE;
    switch (step) {
    case OFFER:
        return is_source ? bench_offer_init(&t->shared->offer, NBYTES) : TB_OK;
    case OPEN:
        return is_source ? TB_OK : bench_copy_init(&t->copy, BENCH_COPY_BETWEEN, &t->shared->offer, NBYTES);
    case MEASURE:
        return measure(t, slot);
    default:
        return tool_mover_do(&t->mover, (tool_step)step, slot);
    }
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_round *out) {
    tool_show_line(BENCH_GPU_LATENCY ": connecting");
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, OFFER, NULL));
    TB_TRY(tool_ranks_step(t->ranks, OPEN, NULL));
    TB_TRY(tool_job_connect(&t->job, t->ranks));
    TB_TRY(tool_ranks_step(t->ranks, MEASURE, NULL));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line(BENCH_GPU_LATENCY ": round %d of %d", rounds->done, rounds->most);
        TB_TRY(tool_ranks_step(t->ranks, MEASURE, NULL));
        out[rounds->done - 1] = (bench_round){t->shared->ours, t->shared->theirs};
    }
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status build_page(tool_tensors *tensors, int64_t size) {
    tool_tensor tensor = {.name = "page", .shape = {1, {size / 4}}, .dtype = {TB_F32, TB_F32}};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

tb_status bench_gpu_latency_run(const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard, bench_round *out) {
    static const bench_gpu_case page = {.src = "mesh=1 place=Replicate",
                                        .dst = "mesh=1 place=Replicate",
                                        .memory = {"cuda:0", "cuda:0"},
                                        .build = build_page};
    trial t = {.ranks = NULL};
    void *memory;
    TB_TRY(bench_gpu_job_init(&page, NBYTES, &t.job));
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
