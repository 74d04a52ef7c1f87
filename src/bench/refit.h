/* A refit: the trainer's weights of a mixture-of-experts model go to an inference engine, whose ranks are cut
 * otherwise. What `tensorbus bench` and the tests lead processes through. */
#ifndef TB_BENCH_REFIT_H
#define TB_BENCH_REFIT_H

#include "bench/moe.h"

typedef struct refit_job {
    moe_model model;
    moe_cut cut[TOOL_NSIDES];
    tb_batch_opts batch;
    char folder[80];   /* where the ranks meet; "": none */
    const char *store; /* where they meet instead, each by the transport that suits; NULL: in the folder, by shm */
    const char *token; /* of that store; NULL: none */
    /* Set by refit_job_init: */
    int32_t nranks[TOOL_NSIDES];
    tool_rank_name names[TOOL_NSIDES * TOOL_MAX_SIDE];
    int64_t delivered; /* bytes that all ranks of the engine receive together */
    int timeout_ms;    /* for each wait of a rank */
} refit_job;

/* A model of `nbytes`, and whether there is room for what all ranks have of it. */
tb_status refit_job_init(refit_job *job, int64_t nbytes, const moe_cut *trainer, const moe_cut *engine);
void refit_job_fini(refit_job *job);

/* Makes the folder that the ranks will meet in, and forks them, trainers first; of the options work and arg count. */
tb_status refit_job_start(refit_job *job, const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out);

/* The step CONNECT. */
tb_status refit_job_connect(refit_job *job, tool_ranks *ranks);

/* A rank, in its process. */
typedef struct refit_rank {
    const refit_job *job;
    int which;
    int32_t seat;
    moe_rank model;
    char *memory;
    char **data; /* of each parameter */
    uint32_t version;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
} refit_rank;

void refit_rank_init(refit_rank *rank, const refit_job *job, int number);
tb_status refit_rank_do(refit_rank *rank, tool_step step, tool_slot *slot);

/* The step CONNECT in parts, for processes that meet in another way, or are of both sides. Such a process has entered a
 * world as refit_groups[which] on each of its seats, makes the pair for both, the first time with no_wait, and one
 * batch, to which it adds both. World and batch are its own: CLOSE does not end them. */
extern const char *const refit_groups[TOOL_NSIDES];
tb_status refit_rank_pair(refit_rank *rank, tb_world *world, bool no_wait);
tb_status refit_batch_create(const refit_job *job, tb_world *world, tb_batch **out);
tb_status refit_rank_add(refit_rank *rank, tb_batch *batch);

/* Between transfers, on all ranks: the engine is cut otherwise from now on. Its ranks get other memory, and everybody
 * another batch. */
tb_status refit_rank_recut(refit_rank *rank, const moe_cut *engine);

#endif
