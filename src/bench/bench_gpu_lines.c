/* What `tensorbus bench --gpu` measures, line after line. */
#include "base/int.h"
#include "bench/bench.h"
#include "tools/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMCPY "cuMemcpyAsync"

/* Runs a case in the rounds of the line, and gives what it measured to `take`. */
static tb_status measure(bench *b, bench_other *o, const bench_gpu_case *c,
                         void (*take)(bench_other *o, const bench_gpu_round *rounds)) {
    bench_gpu_round *rounds = tb__calloc((size_t)b->rounds, sizeof *rounds);
    if (!rounds)
        return TB_NO_MEMORY;
    tb_status status = bench_gpu_case_run(c, b->size, &b->batch, &o->rounds, &b->guard, rounds);
    if (status == TB_OK)
        take(o, rounds);
    free(rounds);
    return status;
}

static void take_rates(bench_other *o, const bench_gpu_round *rounds) {
    double wall[BENCH_MAX_ROUNDS];
    for (int i = 0; i < o->rounds.done; i++) {
        o->round[i] = rounds[i].gpu;
        wall[i] = rounds[i].wall;
    }
    o->result.wall_ratio = bench_median(wall, o->rounds.done);
}

static tb_status run_case(bench *b, bench_other *o) {
    const bench_gpu_case *c = o->arg;
    bool is_to_host = strcmp(c->memory[TOOL_TARGET], "pinned") == 0;
    bool is_from_host = strcmp(c->memory[TOOL_SOURCE], "pinned") == 0;
    o->result.work = c->work;
    o->result.against = is_to_host || is_from_host ? MEMCPY ", pinned" : c->nreads ? MEMCPY ", as many" : MEMCPY;
    o->result.at_least = c->at_least;
    return measure(b, o, c, take_rates);
}

static void take_launches(bench_other *o, const bench_gpu_round *rounds) {
    for (int i = 0; i < o->rounds.done; i++)
        o->round[i] = (bench_round){.ours = (double)rounds[i].nlaunches, .theirs = 1};
}

static tb_status run_launches(bench *b, bench_other *o) {
    o->result.work = "kernel launches for a target's part of " BENCH_GPU_SMALL;
    o->result.against = "one";
    o->result.unit = BENCH_LAUNCHES;
    o->result.at_most = 4;
    return measure(b, o, bench_gpu_case_of(BENCH_GPU_SMALL), take_launches);
}

static tb_status run_latency(bench *b, bench_other *o) {
    o->result.work = "a version of 4 KiB, from the write on, 1 to 1 rank";
    o->result.against = MEMCPY " and a flag";
    o->result.unit = BENCH_US;
    return bench_gpu_latency_run(&b->batch, &o->rounds, &b->guard, o->round);
}

/* Commands cost the same for a model of any size, about 0.15 ms on an H200. */
static tb_status run_bus(bench *b, bench_other *o) {
    enum { TIMES = 2 }; /* the size, for a model that takes some milliseconds */
    o->result.work = "the model through agents, 4 to 4 ranks at once";
    o->result.against = "without agents";
    o->result.at_least = 0.95;
    return bench_bus_run(BENCH_GPU_BUS, TIMES * b->size, "cuda:0", &b->batch, &o->rounds, &b->guard, o->round);
}

/* Packing and sending by CUDA IPC share the memory of one GPU: 0.5 is the most. Ranks of NCCL and NVSHMEM that share a
 * GPU take turns, so there is no mark for these. Each bucket costs three turns, of 0.14 ms on an H200: so they are
 * larger than by default, unless the settings say another size. */
static tb_status run_carried(bench *b, bench_other *o) {
    enum { DEFAULT = 16 << 20, LARGE = 128 << 20, NBUCKETS = 16 };
    tb_batch_opts opts = b->batch;
    if (opts.bucket_size == DEFAULT && b->size > (int64_t)NBUCKETS * DEFAULT) {
        opts.bucket_size = tb__min64(LARGE, b->size / NBUCKETS);
        opts.staging_bytes = NBUCKETS * opts.bucket_size;
    }
    const char *lanes = getenv("UCX_TLS");
    bool is_ucx = strcmp(b->transport, "ucx") == 0;
    snprintf(b->carried_work, sizeof b->carried_work, "f32 matrix, 1 process to the columns of 2, by %s", b->transport);
    snprintf(b->carried_against, sizeof b->carried_against, "contiguous, by %s", b->transport);
    o->result.work = b->carried_work;
    o->result.against = b->carried_against;
    if (is_ucx)
        o->result.at_least = lanes && !strstr(lanes, "cuda_ipc") && !strstr(lanes, "all") ? 0.90 : 0.45;
    return bench_gpu_carried_run(b->transport, b->size, &opts, &o->rounds, &b->guard, o->round);
}

/* gpu_replicate needs most: the matrix five times, and as much for copies; and each process has a context. */
static int64_t choose_size(int64_t gpu_nbytes) {
    enum { TIMES = 12, RESERVE_GIB = 6 };
    int64_t size = (int64_t)2 << 30, room = gpu_nbytes - ((int64_t)RESERVE_GIB << 30);
    while (size > (int64_t)64 << 20 && TIMES * size > room)
        size /= 2;
    return size;
}

tb_status bench_gpu_run(bench *b) {
    tool_gpus gpus;
    tool_show_line("looking at the GPU");
    TB_TRY(tool_gpus_look(&gpus));
    if (!b->is_size_given)
        b->size = choose_size((int64_t)gpus.gpu[0].nbytes);
    b->is_size_given = true; /* it goes by the GPU, not by how long a line takes */
    snprintf(b->gpu, sizeof b->gpu, "%s", gpus.gpu[0].name);
    if (b->transport)
        return bench_run_other(b, bench_gpu_carried_name(b->transport).text, NULL, run_carried);
    for (size_t i = 0; i < bench_gpu_ncases; i++)
        TB_TRY(bench_run_other(b, bench_gpu_cases[i].name, &bench_gpu_cases[i], run_case));
    TB_TRY(bench_run_other(b, BENCH_GPU_LAUNCHES, NULL, run_launches));
    TB_TRY(bench_run_other(b, BENCH_GPU_LATENCY, NULL, run_latency));
    TB_TRY(bench_run_other(b, BENCH_GPU_BUS, NULL, run_bus));
    return b->with_peers ? bench_gpu_torch_run(b) : TB_OK;
}
