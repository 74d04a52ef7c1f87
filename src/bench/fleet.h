/* A store and an agent for each rank of a job, all of them processes of their own; and the job's ranks as clients of
 * these agents. For `tensorbus demo --bus`, and the lines of `tensorbus bench` that go through agents. */
#ifndef TB_BENCH_FLEET_H
#define TB_BENCH_FLEET_H

#include "bench/move.h"

/* ---- Processes (fleet.c) ------------------------------------------------------------------------------------- */

typedef struct tool_fleet tool_fleet;

/* Forks the store and the agents, in the job's folder, and waits until all of them can be reached. There must be no
 * other thread in this process. Job and guard must outlive them. If this process is killed they end, and the store
 * removes the folder. */
tb_status tool_fleet_create(const tool_job *job, tool_guard *guard, tool_fleet **out);

/* Ends all of them; none is left when it returns. NULL is allowed. */
void tool_fleet_destroy(tool_fleet *agents);

/* The agent of a rank: takes no more steps, is killed, comes again. */
void tool_fleet_halt(tool_fleet *agents, int rank);
void tool_fleet_kill(tool_fleet *agents, int rank);
tb_status tool_fleet_restart(tool_fleet *agents, int rank);

/* Who has ended without being told to, and how: TB_LOST. Else the last sentence of failure stays what it was. */
tb_status tool_fleet_check(tool_fleet *agents);

/* ---- A rank's work (agent_client.c) -------------------------------------------------------------------------- */

#define TOOL_CLIENT_BATCH "tensors" /* what its batch is called */

/* A rank that has its parts of the tensors, and moves them through its agent. */
typedef struct tool_client {
    const tool_job *job;
    const tool_end *end;
    int rank;
    tb_world *world; /* NULL: not joined */
    tb_pair *pair;   /* NULL: not made */
    tb_batch *batch; /* NULL: not registered */
} tool_client;

/* Connects to the rank's agent, where that has not been done, makes the pair and registers the parts. */
tb_status tool_client_open(tool_client *client);

/* The same after something was lost: the agent, or one of the pair's ranks. What is left is given up first. Others may
 * not have heard of the loss yet, and then it is tried again, until the job's deadline. */
tb_status tool_client_reopen(tool_client *client);

/* Sends or receives, until the version is committed. */
tb_status tool_client_move(tool_client *client);

void tool_client_close(tool_client *client);

/* Where the agent of a rank listens. */
typedef struct tool_agent_path {
    char text[108];
} tool_agent_path;

tool_agent_path tool_agent_socket(const tool_job *job, int rank);

#endif
