/* Refits between the four ranks of an MPI job, over MPI alone: a model whose sides are cut differently in every way,
 * several versions of it, every element checked. Started by mpirun or mpiexec. */
#include "bench/refit.h"

#include "tensorbus/mpi.h"

#include "bus/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { NRANKS = 4, REFITS = 3, NBYTES = 1 << 20 };

static int my_rank;

int tool_fail(int exit_status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return exit_status;
}

static void give_up(const char *what, const char *why) {
    fprintf(stderr, "rank %d: %s: %s\n", my_rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

#define must(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) != TB_OK)                                                                                           \
            give_up(#call, tb_error_detail());                                                                         \
    } while (0)

/* What this process is: a trainer, a rank of the engine, or both. */
typedef struct party {
    refit_job job;
    bool is_in[TOOL_NSIDES];
    refit_rank rank[TOOL_NSIDES];
    tb_world *world;
    tb_batch *batch;
} party;

static void all_do(party *p, tool_step step) {
    for (int which = 0; which < TOOL_NSIDES; which++) {
        if (p->is_in[which])
            must(refit_rank_do(&p->rank[which], step, NULL));
    }
}

static void meet(party *p, int first_engine) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = p->job.timeout_ms, .transport = "mpi"};
    must(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &p->world));
    for (int which = 0; which < TOOL_NSIDES; which++) {
        int32_t seat = which == TOOL_SOURCE ? my_rank : my_rank - first_engine;
        p->is_in[which] = seat >= 0 && seat < p->job.nranks[which];
        if (!p->is_in[which])
            continue;
        refit_rank_init(&p->rank[which], &p->job, which == TOOL_SOURCE ? seat : p->job.nranks[TOOL_SOURCE] + seat);
        must(tb_world_enter(p->world, refit_groups[which], seat, p->job.nranks[which]));
    }
}

static void make_batch(party *p) {
    bool is_both = p->is_in[TOOL_SOURCE] && p->is_in[TOOL_TARGET];
    for (int which = 0; which < TOOL_NSIDES; which++) {
        if (p->is_in[which])
            must(refit_rank_pair(&p->rank[which], p->world, is_both && which == TOOL_SOURCE));
    }
    must(refit_batch_create(&p->job, p->world, &p->batch));
    for (int which = 0; which < TOOL_NSIDES; which++) {
        if (p->is_in[which])
            must(refit_rank_add(&p->rank[which], p->batch));
    }
    must(tb_batch_register(p->batch, 0));
}

static void refit(party *p) {
    tb_transfer *transfer[TOOL_NSIDES] = {NULL};
    all_do(p, TOOL_PREPARE);
    MPI_Barrier(MPI_COMM_WORLD); /* nothing arrives before it is poisoned */
    for (int which = TOOL_NSIDES; which-- > 0;) {
        tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = p->job.timeout_ms, .group = refit_groups[which]};
        if (p->is_in[which])
            must((which == TOOL_SOURCE ? tb_send : tb_recv)(p->batch, &opts, &transfer[which]));
    }
    for (int which = 0; which < TOOL_NSIDES; which++) {
        if (p->is_in[which])
            must(tb_wait(transfer[which], TB_COMMITTED, -1));
        tb_transfer_destroy(transfer[which]);
    }
    all_do(p, TOOL_VERIFY);
}

/* How many of the others were met, each of them by MPI. */
static int count_peers(const party *p) {
    int count = 0;
    tb__loop_lock(p->world->loop);
    for (const tb__peer *peer = tb__loop_peers(p->world->loop); peer; peer = peer->next) {
        if (peer->rank == p->world->rank)
            continue;
        if (strcmp(peer->transport->ops->name, "mpi") != 0)
            give_up(peer->label, peer->transport->ops->name);
        count++;
    }
    tb__loop_unlock(p->world->loop);
    return count;
}

/* The engine's ranks are those from `first_engine` on. */
static void run(const moe_cut *trainer, const moe_cut *engine, int first_engine, tb_commit commit) {
    party p = {0};
    must(refit_job_init(&p.job, NBYTES, trainer, engine));
    p.job.batch.commit = commit;
    meet(&p, first_engine);
    all_do(&p, TOOL_ALLOCATE);
    make_batch(&p);
    for (int i = 0; i < REFITS; i++)
        refit(&p);
    if (count_peers(&p) != NRANKS - 1)
        give_up("peers", "some were not met");
    MPI_Barrier(MPI_COMM_WORLD); /* whoever leaves is lost to those who are not through yet */
    tb_batch_destroy(p.batch);
    all_do(&p, TOOL_CLOSE);
    tb_world_destroy(p.world);
    refit_job_fini(&p.job);
}

int main(int argc, char **argv) {
    int level, nranks;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (nranks != NRANKS || level < MPI_THREAD_MULTIPLE)
        give_up("MPI", "it takes four ranks, and all threads");
    /* All ranks train, and are the engine. */
    moe_cut trainer = {.tp = 2, .pp = 2, .dp = 1, .ep = 2, .etp = 1};
    moe_cut engine = {.tp = 1, .pp = 1, .dp = 4, .ep = 4, .etp = 1};
    run(&trainer, &engine, 0, TB_IN_PLACE);
    run(&trainer, &engine, 0, TB_SHADOW);
    /* Two train, and two are the engine. */
    run(&(moe_cut){.tp = 1, .pp = 2, .dp = 1, .ep = 1, .etp = 1},
        &(moe_cut){.tp = 2, .pp = 1, .dp = 1, .ep = 2, .etp = 1}, NRANKS / 2, TB_IN_PLACE);
    if (my_rank == 0)
        printf("%d refits\n", 3 * REFITS);
    MPI_Finalize();
    return 0;
}
