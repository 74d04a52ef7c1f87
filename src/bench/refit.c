/* What one rank of a refit does, step by step. */
#include "bench/refit.h"

#include "base/int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 64 };

const char *const refit_groups[TOOL_NSIDES] = {"trainer", "engine"};

/* ---- The job ------------------------------------------------------------------------------------------------- */

static tb_status weigh_rank(refit_job *job, int which, int32_t seat, int64_t *total) {
    moe_rank rank;
    TB_TRY(moe_rank_init(&rank, &job->model, which, &job->cut[which], seat));
    tb_status status = TB_OK;
    for (size_t i = 0; i < rank.params.count && status == TB_OK; i++) {
        int64_t stored = 0, used = 0;
        status = moe_param_size(&rank, &rank.params.item[i], &stored, &used);
        *total += stored;
        job->delivered += which == TOOL_TARGET ? used : 0;
    }
    moe_rank_fini(&rank);
    return status;
}

tb_status refit_job_init(refit_job *job, int64_t nbytes, const moe_cut *trainer, const moe_cut *engine) {
    int64_t total = 0, available = tool_read_kib("/proc/meminfo", "MemAvailable:");
    int n = 0;
    *job = (refit_job){.cut = {*trainer, *engine}, .batch = {.size = sizeof job->batch}};
    TB_TRY(moe_model_init(&job->model, nbytes));
    for (int which = 0; which < TOOL_NSIDES; which++) {
        const moe_cut *c = &job->cut[which];
        job->nranks[which] = c->tp * c->pp * c->dp;
        if (job->nranks[which] > TOOL_MAX_SIDE)
            return tb__fail(TB_TOO_BIG, "a side has at most %d ranks", TOOL_MAX_SIDE);
        for (int32_t i = 0; i < job->nranks[which]; i++) {
            snprintf(job->names[n].text, sizeof job->names[n].text, "%s %" PRId32, refit_groups[which], i);
            n++;
            TB_TRY(weigh_rank(job, which, i, &total));
        }
    }
    if (available > 0 && total > available)
        return tb__fail(TB_TOO_BIG, "the ranks would hold %s together, but only %s of memory are free",
                        tool_size(total).text, tool_size(available).text);
    int64_t patience_ms = 30000 + total / 100000;
    job->timeout_ms = (int)(patience_ms < 3600000 ? patience_ms : 3600000);
    return TB_OK;
}

void refit_job_fini(refit_job *job) {
    tool_folder_remove(job->folder);
    *job = (refit_job){0};
}

tb_status refit_job_start(refit_job *job, const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out) {
    enum { WAITS = 4 }; /* more than a step has, one after the other: a rank's own sentence says more */
    tool_ranks_opts full = *opts;
    TB_TRY(tool_folder_make(job->folder, sizeof job->folder));
    full.n = job->nranks[TOOL_SOURCE] + job->nranks[TOOL_TARGET];
    full.names = job->names;
    full.timeout_ms = WAITS * job->timeout_ms;
    return tool_ranks_create(&full, guard, out);
}

tb_status refit_job_connect(refit_job *job, tool_ranks *ranks) {
    tb_status status = tool_ranks_step(ranks, TOOL_CONNECT, NULL);
    tool_folder_remove(job->folder);
    return status;
}

/* ---- A rank -------------------------------------------------------------------------------------------------- */

void refit_rank_init(refit_rank *rank, const refit_job *job, int number) {
    int32_t nsources = job->nranks[TOOL_SOURCE];
    int which = number < nsources ? TOOL_SOURCE : TOOL_TARGET;
    *rank = (refit_rank){.job = job, .which = which, .seat = which == TOOL_SOURCE ? number : number - nsources};
}

/* All parameters lie in one stretch of memory. */
static tb_status allocate(refit_rank *rank, const moe_cut *cut) {
    int64_t nbytes = 0, stored, used;
    TB_TRY(moe_rank_init(&rank->model, &rank->job->model, rank->which, cut, rank->seat));
    size_t count = rank->model.params.count;
    int64_t *offset = tb__arena_alloc(&rank->model.arena, count, sizeof *offset);
    rank->data = tb__arena_alloc(&rank->model.arena, count, sizeof *rank->data);
    if (!offset || !rank->data)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        TB_TRY(moe_param_size(&rank->model, &rank->model.params.item[i], &stored, &used));
        offset[i] = nbytes;
        nbytes += tb__align(stored, ALIGNMENT);
    }
    void *memory;
    TB_TRY(tb_alloc((size_t)nbytes, &memory));
    rank->memory = memory;
    for (size_t i = 0; i < count; i++)
        rank->data[i] = rank->memory + offset[i];
    return TB_OK;
}

static void release(refit_rank *rank) {
    tb_free(rank->memory);
    rank->memory = NULL;
    moe_rank_fini(&rank->model);
}

static tb_status prepare(refit_rank *rank) {
    rank->version++;
    for (size_t i = 0; i < rank->model.params.count; i++)
        TB_TRY((rank->which == TOOL_SOURCE ? moe_param_fill : moe_param_poison)(
            &rank->model, &rank->model.params.item[i], rank->version, rank->data[i]));
    return TB_OK;
}

static tb_status verify(const refit_rank *rank) {
    for (size_t i = 0; rank->which == TOOL_TARGET && i < rank->model.params.count; i++)
        TB_TRY(moe_param_check(&rank->model, &rank->model.params.item[i], rank->version, rank->data[i]));
    return TB_OK;
}

tb_status refit_batch_create(const refit_job *job, tb_world *world, tb_batch **out) {
    tb_batch_opts opts = job->batch;
    opts.ties = &moe_tie;
    opts.nties = 1;
    return tb_batch_create(world, "weights", &opts, out);
}

tb_status refit_rank_pair(refit_rank *rank, tb_world *world, bool no_wait) {
    tb_pair_opts opts = {.size = sizeof opts, .group = refit_groups[rank->which], .no_wait = no_wait};
    char layout[64];
    snprintf(layout, sizeof layout, "mesh=%" PRId32 " place=Replicate", rank->job->nranks[rank->which]);
    return tb_pair_create(world, "refit", refit_groups[!rank->which], layout, &opts, &rank->pair);
}

tb_status refit_rank_add(refit_rank *rank, tb_batch *batch) {
    TB_TRY(tb_batch_add_pair(batch, rank->pair)); /* a stage may have no layers */
    for (size_t i = 0; i < rank->model.parts.count; i++) {
        const tb_part *part = &rank->model.parts.part[i];
        const moe_param *param = &rank->model.params.item[part->param];
        tb_tensor tensor = {.size = sizeof tensor,
                            .data = rank->data[part->param],
                            .dtype = TB_BF16,
                            .ndim = param->shape.ndim,
                            .layout = param->layout,
                            .view = part->text};
        memcpy(tensor.shape, param->shape.dim, sizeof tensor.shape);
        TB_TRY(tb_batch_add(batch, rank->pair, part->name, &tensor));
    }
    return TB_OK;
}

static tb_status make_batch(refit_rank *rank) {
    TB_TRY(refit_batch_create(rank->job, rank->world, &rank->batch));
    TB_TRY(refit_rank_add(rank, rank->batch));
    return tb_batch_register(rank->batch, 0);
}

static tb_status connect_rank(refit_rank *rank) {
    const refit_job *job = rank->job;
    tb_world_opts opts = {.size = sizeof opts,
                          .timeout_ms = job->timeout_ms,
                          .token = job->token,
                          .transport = job->store ? NULL : "shm"};
    char url[sizeof job->folder + 16];
    snprintf(url, sizeof url, "unix:%s/store", job->folder);
    TB_TRY(tb_world_join(job->store ? job->store : url, refit_groups[rank->which], rank->seat, job->nranks[rank->which],
                         &opts, &rank->world));
    TB_TRY(refit_rank_pair(rank, rank->world, false));
    return make_batch(rank);
}

/* What follows the arrival is for the next transfer: its time does not count. */
static tb_status move(refit_rank *rank, tool_slot *slot) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = rank->job->timeout_ms};
    bool is_source = rank->which == TOOL_SOURCE;
    tb_transfer *transfer = NULL;
    TB_TRY((is_source ? tb_send : tb_recv)(rank->batch, &opts, &transfer));
    tb_status status = tb_wait(transfer, is_source ? TB_RELEASED : TB_ARRIVED, -1);
    slot->ended_ns = tool_now_ns();
    if (status == TB_OK)
        status = tb_wait(transfer, TB_COMMITTED, -1);
    tb_transfer_destroy(transfer);
    return status;
}

tb_status refit_rank_recut(refit_rank *rank, const moe_cut *engine) {
    tb_batch_destroy(rank->batch);
    rank->batch = NULL;
    if (rank->which == TOOL_TARGET) {
        release(rank);
        TB_TRY(allocate(rank, engine));
    }
    return make_batch(rank);
}

static void close_rank(refit_rank *rank) {
    tb_batch_destroy(rank->batch);
    tb_pair_destroy(rank->pair);
    tb_world_destroy(rank->world);
    release(rank);
}

tb_status refit_rank_do(refit_rank *rank, tool_step step, tool_slot *slot) {
    switch (step) {
    case TOOL_ALLOCATE:
        return allocate(rank, &rank->job->cut[rank->which]);
    case TOOL_PREPARE:
        return prepare(rank);
    case TOOL_CONNECT:
        return connect_rank(rank);
    case TOOL_MOVE:
        return move(rank, slot);
    case TOOL_VERIFY:
        return verify(rank);
    case TOOL_CLOSE:
        close_rank(rank);
        return TB_OK;
    case TOOL_NSTEPS:
        break;
    }
    return tb__fail(TB_INTERNAL, "there is no step %d", (int)step);
}
