/* What one rank of a job does, step by step: it has its parts of the tensors, takes its seat in the world, sends or
 * receives, and verifies what has come. */
#include "bench/move.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

void tool_mover_init(tool_mover *mover, const tool_job *job, int rank) {
    int nsources = job->side[TOOL_SOURCE].nranks;
    *mover = (tool_mover){.job = job, .nends = job->is_local ? TOOL_NSIDES : 1};
    for (int i = 0; i < mover->nends; i++) {
        int which = job->is_local ? i : rank < nsources ? TOOL_SOURCE : TOOL_TARGET;
        bool is_behind = !job->is_local && which == TOOL_TARGET;
        mover->end[i] = (tool_end){.which = which, .seat = rank - (is_behind ? nsources : 0)};
    }
}

static tb_status allocate(tool_mover *mover) {
    for (int i = 0; i < mover->nends; i++) {
        tool_end *end = &mover->end[i];
        TB_TRY(tool_parts_init(&end->parts, mover->job, end->which, end->seat));
        TB_TRY(tool_parts_allocate(&end->parts));
    }
    return TB_OK;
}

static tb_status prepare(tool_mover *mover, tool_slot *slot) {
    mover->version++;
    for (int i = 0; i < mover->nends; i++)
        TB_TRY(tool_parts_prepare(&mover->end[i].parts, mover->version, &slot->done));
    return TB_OK;
}

tb_batch_opts tool_batch_opts(const tb__config *config, bool staged, bool checksum) {
    return (tb_batch_opts){.size = sizeof(tb_batch_opts),
                           .bucket_size = tb__config_bucket_size(config),
                           .staging_bytes = tb__config_staging_bytes(config),
                           .max_in_flight = tb__config_max_in_flight(config),
                           .staged = staged,
                           .checksum = checksum};
}

tb_tensor tool_part_tensor(const tool_part *part, const tool_side *side) {
    tb_tensor tensor = {.size = sizeof tensor,
                        .data = part->data,
                        .dtype = part->tensor->dtype[part->which],
                        .ndim = part->tensor->shape.ndim,
                        .strides = tool_part_is_coded(part) && part->tensor->is_transposed ? part->strides : NULL,
                        .layout = side->text[part->tensor->cut]};
    if (tool_part_is_coded(part) && part->tensor->encode && part->data) {
        tensor.encode = part->tensor->encode;
        tensor.scales = (char *)part->data + part->scales_at;
        tensor.scale = part->scale_at ? (float *)(void *)((char *)part->data + part->scale_at) : NULL;
    }
    memcpy(tensor.shape, part->tensor->shape.dim, sizeof tensor.shape);
    return tensor;
}

/* A rank that is at both ends does not wait for itself. */
static tb_status open_end(tool_mover *mover, int number) {
    tool_end *end = &mover->end[number];
    const tool_side *side = &mover->job->side[end->which], *remote = &mover->job->side[!end->which];
    tb_pair_opts opts = {.size = sizeof opts, .group = side->group, .no_wait = number + 1 < mover->nends};
    TB_TRY(tb_pair_create(mover->world, "move", remote->group, side->text[TOOL_CUT_COLUMN], &opts, &end->pair));
    for (size_t i = 0; i < end->parts.count; i++) {
        const tool_part *part = &end->parts.part[i];
        tb_tensor tensor = tool_part_tensor(part, side);
        TB_TRY(tb_batch_add(mover->batch, end->pair, part->tensor->name, &tensor));
    }
    return TB_OK;
}

static tb_status connect_ends(tool_mover *mover) {
    const tool_job *job = mover->job;
    tb_world_opts opts = {
        .size = sizeof opts, .timeout_ms = job->timeout_ms, .token = job->token, .transport = job->transport};
    char url[sizeof job->folder + 16];
    snprintf(url, sizeof url, "unix:%s/store", job->folder);
    const char *store = job->store ? job->store : url;
    for (int i = 0; i < mover->nends; i++) {
        const tool_side *side = &job->side[mover->end[i].which];
        int32_t seat = mover->end[i].seat;
        TB_TRY(i == 0 ? tb_world_join(store, side->group, seat, side->nranks, &opts, &mover->world)
                      : tb_world_enter(mover->world, side->group, seat, side->nranks));
    }
    tb_batch_opts batch = job->batch;
    batch.sends = mover->end[0].which == TOOL_SOURCE;
    TB_TRY(tb_batch_create(mover->world, "tensors", &batch, &mover->batch));
    for (int i = 0; i < mover->nends; i++)
        TB_TRY(open_end(mover, i));
    return tb_batch_register(mover->batch, 0);
}

static void note_progress(void *arg, const tb_transfer_state *state) {
    tool_slot *slot = arg;
    atomic_store(&slot->done, state->bytes_done);
}

tb_status tool_take_turn(_Atomic int32_t *turn, int32_t seat, int timeout_ms) {
    struct timespec nap = {.tv_nsec = 20000};
    int64_t deadline = tool_now_ns() + (int64_t)1000000 * timeout_ms;
    while (atomic_load(turn) != seat) {
        if (tool_now_ns() >= deadline)
            return tb__fail(TB_TIMEOUT, "the turn has not come after %d ms", timeout_ms);
        nanosleep(&nap, NULL);
    }
    return TB_OK;
}

static tb_status begin(tool_mover *mover, tool_end *end, tool_slot *slot) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = mover->job->timeout_ms};
    opts.progress = note_progress;
    opts.arg = slot;
    if (end->which == TOOL_SOURCE)
        return tb_send(mover->batch, &opts, &end->transfer);
    if (mover->turn)
        TB_TRY(tool_take_turn(mover->turn, end->seat, mover->job->timeout_ms));
    return tb_recv(mover->batch, &opts, &end->transfer);
}

/* What follows the arrival is for the next transfer: its time does not count. */
static tb_status move(tool_mover *mover, tool_slot *slot) {
    for (int i = 0; i < mover->nends; i++)
        TB_TRY(begin(mover, &mover->end[i], slot));
    for (int i = mover->nends - 1; i >= 0; i--) {
        tool_end *end = &mover->end[i];
        TB_TRY(tb_wait(end->transfer, end->which == TOOL_SOURCE ? TB_RELEASED : TB_ARRIVED, -1));
        if (mover->turn && end->which == TOOL_TARGET)
            atomic_store(mover->turn, end->seat + 1);
    }
    slot->ended_ns = tool_now_ns();
    for (int i = 0; i < mover->nends; i++) {
        tool_end *end = &mover->end[i];
        tb_transfer_state state = {.size = sizeof state};
        TB_TRY(tb_wait(end->transfer, TB_COMMITTED, -1));
        tb_transfer_query(end->transfer, &state);
        memcpy(slot->phase, state.phase, sizeof slot->phase);
    }
    for (int i = 0; i < mover->nends; i++) {
        tb_transfer_destroy(mover->end[i].transfer);
        mover->end[i].transfer = NULL;
    }
    return TB_OK;
}

static tb_status verify(const tool_mover *mover, tool_slot *slot) {
    for (int i = 0; i < mover->nends; i++) {
        if (mover->end[i].which == TOOL_TARGET)
            TB_TRY(tool_parts_check(&mover->end[i].parts, mover->version, &slot->done));
    }
    return TB_OK;
}

static void close_ends(tool_mover *mover) {
    tb_batch_destroy(mover->batch);
    for (int i = 0; i < mover->nends; i++)
        tb_pair_destroy(mover->end[i].pair);
    tb_world_destroy(mover->world);
    for (int i = 0; i < mover->nends; i++)
        tool_parts_fini(&mover->end[i].parts);
}

tb_status tool_mover_do(tool_mover *mover, tool_step step, tool_slot *slot) {
    switch (step) {
    case TOOL_ALLOCATE:
        return allocate(mover);
    case TOOL_PREPARE:
        return prepare(mover, slot);
    case TOOL_CONNECT:
        return connect_ends(mover);
    case TOOL_MOVE:
        return move(mover, slot);
    case TOOL_VERIFY:
        return verify(mover, slot);
    case TOOL_CLOSE:
        close_ends(mover);
        return TB_OK;
    case TOOL_NSTEPS:
        break;
    }
    return tb__fail(TB_INTERNAL, "there is no step %d", (int)step);
}

tb_status tool_job_start(tool_job *job, const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out) {
    enum { WAITS = 4 }; /* more than a step has, one after the other: a rank's own sentence says more */
    tool_ranks_opts full = *opts;
    TB_TRY(tool_folder_make(job->folder, sizeof job->folder));
    full.n = job->nranks;
    full.names = job->names;
    full.timeout_ms = WAITS * job->timeout_ms;
    return tool_ranks_create(&full, guard, out);
}

tb_status tool_job_connect(tool_job *job, tool_ranks *ranks) {
    tb_status status = tool_ranks_step(ranks, TOOL_CONNECT, NULL);
    tool_folder_remove(job->folder);
    return status;
}
