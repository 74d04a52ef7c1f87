/* An agent: owns a seat on the bus, and moves tensors for programs of the same user that connect to its socket. One
 * loop sleeps on all descriptors; commands that have to wait for other ranks are done by threads of their own, so that
 * none holds up another. A program that dies takes its batches along, and nothing else. */
#ifndef TB_BUS_AGENT_AGENT_H
#define TB_BUS_AGENT_AGENT_H

#include "base/error.h"

typedef struct tb__agent tb__agent;

typedef struct tb__agent_opts {
    const char *socket; /* a path */
    const char *store;  /* a URL */
    const char *group;
    int32_t index, size;
    const char *token;            /* of the store, and of clients; NULL: none is asked for */
    int timeout_ms;               /* of joining, and of commands that do not say; 0: 30 s */
    int workers;                  /* 0: as many as there are cores for this rank */
    const char *transport, *host; /* as in tb_world_opts */
    bool checksum;                /* all batches have it */
    int64_t plan_bytes;           /* as in tb_world_opts */
} tb__agent_opts;

/* Joins the bus and listens. */
tb_status tb__agent_create(const tb__agent_opts *opts, tb__agent **out);

/* Serves until it is told to stop; then takes no new commands, and returns when those under way have ended, or when it
 * is told again. */
tb_status tb__agent_run(tb__agent *agent);

/* From any thread, or a signal handler. */
void tb__agent_stop(tb__agent *agent);

void tb__agent_destroy(tb__agent *agent);

int32_t tb__agent_rank(const tb__agent *agent);

/* What the agent does, as docs/protocol.md says of Inspect: a JSON object, to be freed by the caller. From any thread
 * while the agent runs, but that of tb__agent_run; TB_TIMEOUT if that has not answered in time. */
tb_status tb__agent_report(tb__agent *agent, int timeout_ms, char **out);

#endif
