/* What one rank of the demo does: joins, makes its pair and its batch, then fills and sends version after version, or
 * receives and verifies them. */
#include "tools/demo.h"

#include <inttypes.h>

int tool_job_side(const tool_job *job, int rank, int32_t *seat) {
    bool is_source = rank < job->side[TOOL_SOURCE].nranks;
    *seat = is_source ? rank : rank - job->side[TOOL_SOURCE].nranks;
    return is_source ? TOOL_SOURCE : TOOL_TARGET;
}

typedef struct rank_run {
    const tool_job *job;
    const tool_side *side, *remote;
    int32_t seat;
    bool is_source;
    tool_rank_state *state;
    tool_parts parts;
    char *memory; /* of all parts */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
} rank_run;

static void enter_stage(rank_run *run, uint32_t version, tool_stage stage) {
    atomic_store(&run->state->done, 0);
    atomic_store(&run->state->step, (int)version * TOOL_NSTAGES + (int)stage);
}

static tb_status add_tensors(rank_run *run) {
    for (size_t i = 0; i < run->parts.count; i++) {
        const tool_part *part = &run->parts.part[i];
        const tool_weight *weight = part->weight;
        tb_tensor tensor = {.data = part->nelements > 0 ? run->memory + part->offset : NULL,
                            .dtype = TB_BF16,
                            .ndim = weight->shape.ndim,
                            .layout = run->side->text[weight->cut]};
        for (int d = 0; d < tensor.ndim; d++)
            tensor.shape[d] = weight->shape.dim[d];
        TB_TRY(tb_batch_add(run->batch, run->pair, weight->name, &tensor));
    }
    return TB_OK;
}

static tb_status connect_rank(rank_run *run) {
    const tool_job *job = run->job;
    tb_world_opts world = {.size = sizeof world, .timeout_ms = job->timeout_ms};
    TB_TRY(tb_world_join(job->url, run->side->group, run->seat, run->side->nranks, &world, &run->world));
    TB_TRY(
        tb_pair_create(run->world, "weights", run->remote->group, run->side->text[TOOL_CUT_COLUMN], NULL, &run->pair));
    tb_batch_opts batch = {.size = sizeof batch,
                           .bucket_size = tb__config_bucket_size(job->config),
                           .staging_bytes = tb__config_staging_bytes(job->config),
                           .max_in_flight = tb__config_max_in_flight(job->config)};
    TB_TRY(tb_batch_create(run->world, "model", &batch, &run->batch));
    TB_TRY(add_tensors(run));
    return tb_batch_register(run->batch, 0);
}

/* New values at the source; at the target, values that are wrong everywhere. People count versions from 1. */
static void prepare(rank_run *run, uint32_t version) {
    enter_stage(run, version, TOOL_PREPARE);
    for (size_t i = 0; i < run->parts.count; i++) {
        const tool_part *part = &run->parts.part[i];
        (run->is_source ? tool_part_fill : tool_part_poison)(part, version + 1, run->memory + part->offset);
        atomic_fetch_add(&run->state->done, part->nelements * TOOL_ELEMENT);
    }
}

static void note_progress(void *arg, const tb_transfer_state *transfer) {
    tool_rank_state *state = arg;
    atomic_store(&state->done, transfer->bytes_done);
}

static tb_status finish_transfer(rank_run *run, uint32_t version, tb_transfer *transfer) {
    TB_TRY(tb_wait(transfer, run->is_source ? TB_RELEASED : TB_ARRIVED, -1));
    run->state->arrived_ns[version] = tool_now_ns();
    TB_TRY(tb_wait(transfer, TB_COMMITTED, -1));
    tb_transfer_state end;
    tb_transfer_query(transfer, &end);
    for (int phase = 0; phase < TB_PHASE_COUNT; phase++)
        run->state->phase[version][phase] = end.phase[phase];
    return TB_OK;
}

static tb_status move(rank_run *run, uint32_t version) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = run->job->timeout_ms};
    opts.progress = note_progress;
    opts.arg = run->state;
    /* The clock starts when the slowest rank is ready. */
    enter_stage(run, version, TOOL_MOVE);
    TB_TRY(tool_barrier_wait(&run->job->shared->barrier, run->job->timeout_ms, &run->state->began_ns[version]));
    tb_transfer *transfer = NULL;
    TB_TRY((run->is_source ? tb_send : tb_recv)(run->batch, &opts, &transfer));
    tb_status status = finish_transfer(run, version, transfer);
    tb_transfer_destroy(transfer);
    return status;
}

static tb_status verify(rank_run *run, uint32_t version) {
    if (run->is_source)
        return TB_OK;
    enter_stage(run, version, TOOL_VERIFY);
    TB_TRY(tool_parts_check(&run->parts, version + 1, run->memory, &run->state->done));
    run->state->nverified += run->parts.nelements;
    return TB_OK;
}

static tb_status run_versions(rank_run *run) {
    for (uint32_t version = 0; version < TOOL_NVERSIONS; version++) {
        prepare(run, version);
        TB_TRY(move(run, version));
        TB_TRY(verify(run, version));
    }
    enter_stage(run, TOOL_NVERSIONS, TOOL_PREPARE);
    /* Nobody leaves while others still count on him. */
    int64_t released_ns;
    return tool_barrier_wait(&run->job->shared->barrier, run->job->timeout_ms, &released_ns);
}

static tb_status run_rank(rank_run *run, const tool_model *model) {
    TB_TRY(tool_parts_init(&run->parts, model, run->side, run->seat));
    if (run->parts.nbytes > 0) {
        void *memory;
        TB_TRY(tb_alloc((size_t)run->parts.nbytes, &memory));
        run->memory = memory;
    }
    TB_TRY(connect_rank(run));
    return run_versions(run);
}

tb_status tool_rank_work(void *arg, int rank) {
    const tool_job *job = arg;
    rank_run run = {.job = job, .state = &job->shared->rank[rank]};
    int which = tool_job_side(job, rank, &run.seat);
    run.is_source = which == TOOL_SOURCE;
    run.side = &job->side[which];
    run.remote = &job->side[run.is_source ? TOOL_TARGET : TOOL_SOURCE];
    tb_status status = run_rank(&run, &job->model);
    tb_batch_destroy(run.batch);
    tb_pair_destroy(run.pair);
    tb_world_destroy(run.world);
    tb_free(run.memory);
    tool_parts_fini(&run.parts);
    return status;
}
