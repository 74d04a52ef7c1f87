/* ucx_row_col: a matrix on the GPU goes to two processes, half of its columns to each, by transport ucx; next to it the
 * same processes send as many contiguous bytes by the same transport, from memory of the GPU to memory of the GPU. */
#include "bench/bench.h"

#include "device/device.h"
#include "transport/transport.h"

#include <string.h>

enum { OPEN = TOOL_NSTEPS, MEET, SEND, LEAVE, NTARGETS = 2, NRANKS = 1 + NTARGETS };

/* What all processes share. */
typedef struct shared {
    unsigned char address[NRANKS][TB_ADDRESS_MAX];
    size_t address_nbytes[NRANKS], nbytes[NRANKS]; /* nbytes: that a target gets */
    _Atomic int32_t ready[NRANKS];                 /* messages that it has posted receives of */
} shared;

/* In each process a copy. */
typedef struct trial {
    tool_job job;
    tool_ranks *ranks;
    shared *shared;
    tool_mover mover;
    int rank, nsent;
    tb_transport transport;
    tb__device *device;
    void *memory;
    bool is_lost;
} trial;

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

static tb_status enter_device(void *arg, tb_mem_kind kind, int index) {
    const trial *t = arg;
    (void)kind;
    return t->device->ops->enter(t->device, index);
}

static void leave_device(void *arg, tb_mem_kind kind) {
    const trial *t = arg;
    (void)kind;
    t->device->ops->leave(t->device);
}

static void note_loss(void *arg, int32_t peer, const char *why) {
    (void)peer;
    (void)why;
    ((trial *)arg)->is_lost = true;
}

static tb_status open_transport(trial *t, int rank) {
    size_t each = (size_t)t->job.nbytes[TOOL_TARGET] / NTARGETS;
    t->rank = rank;
    t->shared->nbytes[rank] = rank > 0 ? (size_t)t->mover.end[0].parts.nbytes : 0;
    TB_TRY(tb__device_open("cuda", &t->device));
    TB_TRY(t->device->ops->alloc_for_transport(t->device, 0, (rank == 0 ? NTARGETS : 1) * each, &t->memory));
    tb_transport_env env = {.size = sizeof env,
                            .rank = rank,
                            .arg = t,
                            .lost = note_loss,
                            .enter_device = enter_device,
                            .leave_device = leave_device};
    TB_TRY(tb__transport_open("ucx", &env, &t->transport));
    if (!tb__transport_carries(&t->transport, TB_MEM_CUDA))
        return tb__fail(TB_REFUSED, "UCX %s takes no memory of GPUs: see `tensorbus doctor`", tb__ucx_found());
    t->shared->address_nbytes[rank] = TB_ADDRESS_MAX;
    return t->transport.ops->address(t->transport.context, t->shared->address[rank], &t->shared->address_nbytes[rank]);
}

static tb_status meet(const trial *t) {
    for (int i = 0; i < NRANKS; i++) {
        if (i != t->rank && (i == 0 || t->rank == 0))
            TB_TRY(t->transport.ops->connect(t->transport.context, i, t->shared->address[i],
                                             t->shared->address_nbytes[i]));
    }
    return TB_OK;
}

static void count_done(tb_op *op) {
    --*(int *)op->arg;
}

static tb_status post(const trial *t, int peer, tb_op_kind kind, const tb_piece *piece, int *left, tb_op *op) {
    *op = (tb_op){.kind = kind,
                  .peer = peer,
                  .tag = 1,
                  .pieces = piece,
                  .npieces = 1,
                  .is_expected = true,
                  .memory = TB_MEM_CUDA,
                  .done = count_done,
                  .arg = left};
    ++*left;
    return tb__transport_post(&t->transport, op);
}

/* The source sends to each target when that has posted its receive. */
static tb_status send_bytes(trial *t) {
    tb_op op[NRANKS] = {0};
    tb_piece piece[NRANKS];
    int left = 0, nposted = 0, nwanted = t->rank == 0 ? NTARGETS : 1;
    bool is_posted[NRANKS] = {false};
    int64_t deadline = tool_now_ns() + (int64_t)1000000 * t->job.timeout_ms;
    t->nsent++;
    while (nposted < nwanted || left > 0) {
        for (int peer = 0; peer < NRANKS && nposted < nwanted; peer++) {
            bool is_end = t->rank == 0 ? peer > 0 && atomic_load(&t->shared->ready[peer]) >= t->nsent : peer == 0;
            if (!is_end || is_posted[peer])
                continue;
            size_t nbytes = t->shared->nbytes[t->rank == 0 ? peer : t->rank];
            piece[peer] = (tb_piece){(char *)t->memory + (t->rank == 0 ? (size_t)(peer - 1) * nbytes : 0), nbytes};
            TB_TRY(post(t, peer, t->rank == 0 ? TB_OP_SEND : TB_OP_RECV, &piece[peer], &left, &op[peer]));
            is_posted[peer] = true;
            nposted++;
            atomic_store(&t->shared->ready[t->rank], t->nsent);
        }
        TB_TRY(t->transport.ops->progress(t->transport.context));
        if (t->is_lost || tool_now_ns() >= deadline)
            return tb__fail(TB_TIMEOUT, "the other process %s", t->is_lost ? "is lost" : "does not come");
    }
    for (int i = 0; i < NRANKS; i++) {
        if (op[i].status != TB_OK)
            return tb__fail(op[i].status, "a contiguous message: %s", tb__op_why(&op[i]));
    }
    return TB_OK;
}

static tb_status leave(trial *t) {
    tb__transport_close(&t->transport);
    t->device->ops->free(t->device, t->memory);
    tb__device_close(t->device);
    return TB_OK;
}

static tb_status work(void *arg, int rank, int step, tool_slot *slot) {
    trial *t = arg;
    if (step == TOOL_ALLOCATE)
        tool_mover_init(&t->mover, &t->job, rank);
    switch (step) {
    case OPEN:
        return open_transport(t, rank);
    case MEET:
        return meet(t);
    case SEND:
        return send_bytes(t);
    case LEAVE:
        return leave(t);
    default:
        return tool_mover_do(&t->mover, (tool_step)step, slot);
    }
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

static tb_status run_round(const trial *t, bool is_last, bench_round *out) {
    double sent, moved, nbytes = 1e-9 * (double)t->job.nbytes[TOOL_TARGET];
    if (is_last)
        TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, SEND, &sent));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &moved));
    *out = (bench_round){.ours = nbytes / moved, .theirs = nbytes / sent};
    return is_last ? tool_ranks_step(t->ranks, TOOL_VERIFY, NULL) : TB_OK;
}

static tb_status run_rounds(trial *t, bench_rounds *rounds, bench_round *out) {
    enum { WARM_UP = 2 };
    const int first[] = {TOOL_ALLOCATE, TOOL_PREPARE, OPEN, MEET};
    tool_show_line(BENCH_GPU_UCX ": connecting the ranks");
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        TB_TRY(tool_ranks_step(t->ranks, first[i], NULL));
    TB_TRY(tool_job_connect(&t->job, t->ranks));
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(run_round(t, false, &out[0]));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line(BENCH_GPU_UCX ": round %d of %d", rounds->done, rounds->most);
        TB_TRY(run_round(t, rounds->is_last, &out[rounds->done - 1]));
    }
    TB_TRY(tool_ranks_step(t->ranks, LEAVE, NULL));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

tb_status bench_gpu_ucx_run(int64_t size, const tb_batch_opts *opts, bench_rounds *rounds, tool_guard *guard,
                            bench_round *out) {
    trial t = {.rank = 0};
    void *memory;
    bench_gpu_case c = *bench_gpu_case_of("gpu_row_col");
    c.src = "mesh=1 place=Replicate";
    c.dst = "mesh=2 place=Shard(1)";
    TB_TRY(bench_gpu_job_init(&c, size, &t.job));
    t.job.batch = *opts;
    t.job.transport = "ucx";
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
