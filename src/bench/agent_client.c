/* A rank of a job whose world is through an agent: the tensors are in its memory, the seat on the bus is the agent's.
 */
#include "bench/fleet.h"

#include "base/process.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

static const char pair_name[] = "move";

tool_agent_path tool_agent_socket(const tool_job *job, int rank) {
    tool_agent_path path;
    snprintf(path.text, sizeof path.text, "%s/agent-%d", job->folder, rank);
    return path;
}

static tb_status add_parts(const tool_client *c) {
    const tool_side *side = &c->job->side[c->end->which];
    for (size_t i = 0; i < c->end->parts.count; i++) {
        const tool_part *part = &c->end->parts.part[i];
        tb_tensor tensor = tool_part_tensor(part, side);
        TB_TRY(tb_batch_add(c->batch, c->pair, part->tensor->name, &tensor));
    }
    return TB_OK;
}

tb_status tool_client_open(tool_client *c) {
    const tool_job *job = c->job;
    const tool_side *side = &job->side[c->end->which], *remote = &job->side[!c->end->which];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = job->timeout_ms, .name = job->names[c->rank].text};
    tb_pair_opts pair = {.size = sizeof pair, .timeout_ms = job->timeout_ms};
    char url[sizeof(tool_agent_path) + 8];
    snprintf(url, sizeof url, "agent:%s", tool_agent_socket(job, c->rank).text);
    if (!c->world)
        TB_TRY(tb_world_join(url, NULL, 0, 0, &opts, &c->world));
    TB_TRY(tb_pair_create(c->world, pair_name, remote->group, side->text[TOOL_CUT_COLUMN], &pair, &c->pair));
    tb_batch_opts batch = job->batch;
    batch.sends = c->end->which == TOOL_SOURCE;
    TB_TRY(tb_batch_create(c->world, TOOL_CLIENT_BATCH, &batch, &c->batch));
    TB_TRY(add_parts(c));
    return tb_batch_register(c->batch, job->timeout_ms);
}

static void drop_batch(tool_client *c) {
    tb_batch_destroy(c->batch);
    tb_pair_destroy(c->pair);
    c->batch = NULL;
    c->pair = NULL;
}

void tool_client_close(tool_client *c) {
    drop_batch(c);
    tb_world_destroy(c->world);
    c->world = NULL;
}

tb_status tool_client_reopen(tool_client *c) {
    enum { NAP_MS = 10 };
    int64_t deadline = tb__now_ms() + c->job->timeout_ms;
    for (;;) {
        tool_client_close(c);
        tb_status status = tool_client_open(c);
        if (status != TB_LOST || tb__now_ms() >= deadline)
            return status;
        poll(NULL, 0, NAP_MS);
    }
}

tb_status tool_client_move(tool_client *c) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = c->job->timeout_ms};
    tb_transfer *transfer = NULL;
    TB_TRY((c->end->which == TOOL_SOURCE ? tb_send : tb_recv)(c->batch, &opts, &transfer));
    tb_status status = tb_wait(transfer, TB_COMMITTED, -1);
    tb_transfer_destroy(transfer);
    return status;
}
