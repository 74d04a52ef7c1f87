/* ucx_row_col, nccl_row_col, nvshmem_row_col: a matrix on the GPU goes to two processes, half of its columns to each,
 * by one transport; next to it the same processes send as many contiguous bytes by the same transport, from memory of
 * the GPU to memory of the GPU. */
#include "bench/bench.h"

#include "device/device.h"
#include "transport/transport.h"

#include <string.h>

enum { OPEN = TOOL_NSTEPS, MEET, SEND, LEAVE, NTARGETS = 2, NRANKS = 1 + NTARGETS };
enum { NSLOTS = 64, MESSAGE_MAX = 4096 };

/* Messages of a transport with communicators from one process to another, which reads behind it. */
typedef struct mailbox {
    _Atomic uint32_t nwritten, nread;
    struct {
        uint32_t nbytes;
        unsigned char bytes[MESSAGE_MAX];
    } slot[NSLOTS];
} mailbox;

/* What all processes share. */
typedef struct shared {
    mailbox mail[NRANKS][NRANKS]; /* from, to */
    unsigned char comm_id[TB_COMM_ID_SIZE];
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
    tb_comm *comm; /* NULL: the transport has none */
    tb__device *device;
    char *memory;
    bool is_comm_memory, is_lost;
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

static void *driver_function(void *arg, tb_mem_kind kind, const char *name) {
    const trial *t = arg;
    (void)kind;
    return t->device->ops->driver_function(t->device, name);
}

static tb_status tell(void *arg, int32_t peer, const void *bytes, size_t nbytes) {
    const trial *t = arg;
    mailbox *box = &t->shared->mail[t->rank][peer];
    uint32_t at = atomic_load(&box->nwritten);
    if (nbytes > MESSAGE_MAX || at - atomic_load(&box->nread) == NSLOTS)
        return tb__fail(TB_TOO_BIG, "more messages between the ends of %s than there is room for", t->job.transport);
    box->slot[at % NSLOTS].nbytes = (uint32_t)nbytes;
    memcpy(box->slot[at % NSLOTS].bytes, bytes, nbytes);
    atomic_store(&box->nwritten, at + 1);
    return TB_OK;
}

static tb_status progress(const trial *t) {
    for (int from = 0; from < NRANKS; from++) {
        mailbox *box = &t->shared->mail[from][t->rank];
        for (uint32_t at; (at = atomic_load(&box->nread)) != atomic_load(&box->nwritten);) {
            t->transport.ops->told(t->transport.context, from, box->slot[at % NSLOTS].bytes,
                                   box->slot[at % NSLOTS].nbytes);
            atomic_store(&box->nread, at + 1);
        }
    }
    return t->transport.ops->progress(t->transport.context);
}

/* Bytes of all messages of a round. */
static size_t message_bytes(const trial *t) {
    return (size_t)t->job.nbytes[TOOL_TARGET];
}

static tb_status open_transport(trial *t, int rank) {
    t->rank = rank;
    t->shared->nbytes[rank] = rank > 0 ? (size_t)t->mover.end[0].parts.nbytes : 0;
    TB_TRY(tb__device_open("cuda", &t->device));
    tb_transport_env env = {.size = sizeof env,
                            .rank = rank,
                            .arg = t,
                            .lost = note_loss,
                            .enter_device = enter_device,
                            .leave_device = leave_device,
                            .device_function = driver_function,
                            .tell = tell};
    TB_TRY(tb__transport_open(t->job.transport, &env, &t->transport));
    if (!tb__transport_carries(&t->transport, TB_MEM_CUDA))
        return tb__fail(TB_REFUSED, "UCX %s takes no memory of GPUs: see `tensorbus doctor`", tb__ucx_found());
    if (t->transport.ops->comm_create)
        return rank == 0 ? t->transport.ops->comm_id(t->transport.context, t->shared->comm_id) : TB_OK;
    t->shared->address_nbytes[rank] = TB_ADDRESS_MAX;
    return t->transport.ops->address(t->transport.context, t->shared->address[rank], &t->shared->address_nbytes[rank]);
}

static tb_status connect_ranks(trial *t) {
    static const int32_t ranks[NRANKS] = {0, 1, 2};
    tb_comm_desc desc = {.size = sizeof desc,
                         .id = t->shared->comm_id,
                         .ranks = ranks,
                         .nranks = NRANKS,
                         .self = (size_t)t->rank,
                         .kind = TB_MEM_CUDA,
                         .nbytes = message_bytes(t)};
    int64_t deadline = tool_now_ns() + (int64_t)1000000 * t->job.timeout_ms;
    bool is_ready = false;
    TB_TRY(t->transport.ops->comm_create(t->transport.context, &desc, &t->comm));
    while (!is_ready) {
        TB_TRY(progress(t));
        TB_TRY(t->transport.ops->comm_check(t->transport.context, t->comm, &is_ready));
        if (tool_now_ns() >= deadline)
            return tb__fail(TB_TIMEOUT, "%s has not connected %d ranks", t->job.transport, NRANKS);
    }
    if (t->transport.ops->comm_memory)
        t->memory = t->transport.ops->comm_memory(t->transport.context, t->comm);
    t->is_comm_memory = t->memory;
    return TB_OK;
}

static tb_status meet(trial *t) {
    if (t->transport.ops->comm_create)
        TB_TRY(connect_ranks(t));
    if (!t->memory)
        TB_TRY(t->device->ops->alloc_for_transport(t->device, 0, message_bytes(t), (void **)&t->memory));
    for (int i = 0; i < NRANKS && !t->comm; i++) {
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
                  .comm = t->comm,
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
            piece[peer] = (tb_piece){t->memory + (t->rank == 0 ? (size_t)(peer - 1) * nbytes : 0), nbytes};
            TB_TRY(post(t, peer, t->rank == 0 ? TB_OP_SEND : TB_OP_RECV, &piece[peer], &left, &op[peer]));
            is_posted[peer] = true;
            nposted++;
            atomic_store(&t->shared->ready[t->rank], t->nsent);
        }
        TB_TRY(progress(t));
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
    if (t->comm)
        t->transport.ops->comm_destroy(t->transport.context, t->comm);
    tb__transport_close(&t->transport);
    if (!t->is_comm_memory)
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

/* What is measured in a set of processes. */
typedef struct carried_part {
    tb_status (*run)(trial *t, bench_rounds *rounds, void *out);
    void *out;
} carried_part;

typedef struct sent_times {
    double seconds[BENCH_MAX_ROUNDS];
    int count;
} sent_times;

static tb_status run_messages(trial *t, bench_rounds *rounds, void *out) {
    enum { WARM_UP = 2 };
    const int first[] = {TOOL_ALLOCATE, TOOL_PREPARE, OPEN, MEET};
    sent_times *sent = out;
    int64_t began_ns = tool_now_ns();
    double unused;
    tool_show_line("%s: connecting the ranks", t->job.transport);
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        TB_TRY(tool_ranks_step(t->ranks, first[i], NULL));
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(tool_ranks_step(t->ranks, SEND, &unused));
    do {
        tool_show_line("%s: contiguous messages, %d of %d", t->job.transport, sent->count + 1, rounds->most);
        TB_TRY(tool_ranks_step(t->ranks, SEND, &sent->seconds[sent->count]));
    } while (++sent->count < rounds->most &&
             (rounds->budget_ns == 0 || tool_now_ns() - began_ns < rounds->budget_ns / 3));
    TB_TRY(tool_ranks_step(t->ranks, LEAVE, NULL));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status run_moves(trial *t, bench_rounds *rounds, void *out) {
    enum { WARM_UP = 2 };
    bench_round *round = out;
    double moved;
    TB_TRY(tool_ranks_step(t->ranks, TOOL_ALLOCATE, NULL));
    TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
    TB_TRY(tool_job_connect(&t->job, t->ranks));
    for (int i = 0; i < WARM_UP; i++)
        TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &moved));
    while (bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", t->job.transport, rounds->done, rounds->most);
        if (rounds->is_last)
            TB_TRY(tool_ranks_step(t->ranks, TOOL_PREPARE, NULL));
        TB_TRY(tool_ranks_step(t->ranks, TOOL_MOVE, &moved));
        round[rounds->done - 1].ours = 1e-9 * (double)t->job.nbytes[TOOL_TARGET] / moved;
    }
    TB_TRY(tool_ranks_step(t->ranks, TOOL_VERIFY, NULL));
    return tool_ranks_step(t->ranks, TOOL_CLOSE, NULL);
}

static tb_status run_part(const carried_part *part, const char *transport, int64_t size, const tb_batch_opts *opts,
                          bench_rounds *rounds, tool_guard *guard, int64_t *nbytes) {
    trial t = {.rank = 0};
    void *memory;
    bench_gpu_case c = *bench_gpu_case_of("gpu_row_col");
    c.src = "mesh=1 place=Replicate";
    c.dst = "mesh=2 place=Shard(1)";
    TB_TRY(bench_gpu_job_init(&c, size, &t.job));
    t.job.batch = *opts;
    t.job.transport = transport;
    *nbytes = t.job.nbytes[TOOL_TARGET];
    tb_status status = tool_share(sizeof *t.shared, &memory);
    if (status == TB_OK) {
        t.shared = memory;
        status = tool_job_start(&t.job, &(tool_ranks_opts){.work = work, .arg = &t}, guard, &t.ranks);
    }
    if (status == TB_OK)
        status = part->run(&t, rounds, part->out);
    tool_ranks_destroy(t.ranks);
    tool_unshare(t.shared, sizeof *t.shared);
    tool_job_fini(&t.job);
    return status;
}

/* In two sets of processes, one after the other: NVSHMEM connects a process with one set of ranks only. */
tb_status bench_gpu_carried_run(const char *transport, int64_t size, const tb_batch_opts *opts, bench_rounds *rounds,
                                tool_guard *guard, bench_round *out) {
    sent_times sent = {.count = 0};
    int64_t nbytes;
    TB_TRY(run_part(&(carried_part){run_messages, &sent}, transport, size, opts, rounds, guard, &nbytes));
    TB_TRY(run_part(&(carried_part){run_moves, out}, transport, size, opts, rounds, guard, &nbytes));
    for (int i = 0; i < rounds->done; i++)
        out[i].theirs = 1e-9 * (double)nbytes / sent.seconds[i % sent.count];
    return TB_OK;
}
