/* A rank of a job as the client of an agent: the tensors are in its memory, the seat on the bus is the agent's. */
#include "tools/fleet.h"

#include "base/process.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

static const char pair[] = "move";

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
        TB_TRY(tb_client_batch_add(c->batch, pair, part->tensor->name, &tensor));
    }
    return TB_OK;
}

tb_status tool_client_open(tool_client *c) {
    const tool_job *job = c->job;
    const tool_side *side = &job->side[c->end->which], *remote = &job->side[!c->end->which];
    tb_client_opts opts = {.size = sizeof opts, .timeout_ms = job->timeout_ms, .name = job->names[c->rank].text};
    if (!c->client)
        TB_TRY(tb_client_connect(tool_agent_socket(job, c->rank).text, &opts, &c->client));
    TB_TRY(tb_client_batch_create(c->client, TOOL_CLIENT_BATCH, &job->batch, &c->batch));
    TB_TRY(tb_client_init_pair(c->client, pair, remote->group, side->text[TOOL_CUT_COLUMN], job->timeout_ms));
    TB_TRY(add_parts(c));
    return tb_client_register(c->batch, job->timeout_ms);
}

static void drop_batch(tool_client *c) {
    tb_client_batch_destroy(c->batch);
    c->batch = NULL;
}

void tool_client_close(tool_client *c) {
    drop_batch(c);
    tb_client_close(c->client);
    c->client = NULL;
}

/* A client whose agent is gone is of no use any more; any other keeps its connection. */
static void give_up(tool_client *c) {
    tb_client_status unused = {.size = sizeof unused};
    if (c->batch && tb_client_query(c->batch, &unused) != TB_LOST)
        drop_batch(c);
    else
        tool_client_close(c);
}

tb_status tool_client_reopen(tool_client *c) {
    enum { NAP_MS = 10 };
    int64_t deadline = tb__now_ms() + c->job->timeout_ms;
    for (;;) {
        give_up(c);
        tb_status status = tool_client_open(c);
        if (status != TB_LOST || tb__now_ms() >= deadline)
            return status;
        poll(NULL, 0, NAP_MS);
    }
}

tb_status tool_client_move(tool_client *c) {
    tb_client_transfer_opts opts = {.size = sizeof opts, .timeout_ms = c->job->timeout_ms};
    return tb_client_transfer(c->batch, c->end->which == TOOL_SOURCE, &opts);
}
