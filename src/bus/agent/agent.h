/* An agent: a daemon with a seat on the bus that moves tensors for programs of the same user, which connect to its
 * socket. One loop sleeps on all descriptors; commands that have to wait for other ranks run in separate threads, so
 * that none delays another. When a program dies, only its batches end. */
#ifndef TB_BUS_AGENT_AGENT_H
#define TB_BUS_AGENT_AGENT_H

#include "base/error.h"

typedef struct tb__agent tb__agent;

typedef struct tb__agent_opts {
    const char *socket; /* a path */
    const char *store;  /* a URL */
    const char *group;
    int32_t index, size;
    const char *token;            /* for the store, and expected from clients; NULL: none */
    int timeout_ms;               /* for joining, and for commands without a timeout; 0: 30 s */
    int workers;                  /* 0: as many as there are cores for this rank */
    const char *transport, *host; /* as in tb_world_opts */
    bool checksum;                /* all batches have it */
    int64_t plan_bytes;           /* as in tb_world_opts */
    bool no_gpu;                  /* device memory of programs is not mapped: they copy it through host memory */
} tb__agent_opts;

/* Joins the bus and listens. */
tb_status tb__agent_create(const tb__agent_opts *opts, tb__agent **out);

/* Serves until tb__agent_stop. Then it accepts no new commands, and returns when those that run have ended, or at the
 * second tb__agent_stop. */
void tb__agent_run(tb__agent *agent);

/* From any thread, or a signal handler. */
void tb__agent_stop(tb__agent *agent);

void tb__agent_destroy(tb__agent *agent);

int32_t tb__agent_rank(const tb__agent *agent);

/* The agent's state as the JSON object of Inspect (docs/protocol.md), to be freed by the caller. From any thread;
 * TB_TIMEOUT if its loop is stuck. */
tb_status tb__agent_report(tb__agent *agent, int timeout_ms, char **out);

#endif
