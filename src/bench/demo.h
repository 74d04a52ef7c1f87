/* `tensorbus demo`: what its files share. */
#ifndef TB_BENCH_DEMO_H
#define TB_BENCH_DEMO_H

#include "bench/fleet.h"

enum { DEMO_NVERSIONS = 3 };

/* What was measured of one version. */
typedef struct demo_version {
    double seconds;
    double phase[TB_PHASE_COUNT]; /* of the rank that was slowest in it */
} demo_version;

/* A client of an agent that was killed, or whose pair was broken by that. */
typedef struct demo_heard {
    _Atomic bool has_begun; /* to move the version that is to fail */
    tb_status status;
    int64_t when_ns;
    char sentence[240];
} demo_heard;

/* With --bus: everything goes through agents, and one of them is killed. */
typedef struct demo_bus {
    tool_fleet *agents;
    tool_client client; /* in a rank's process: that rank */
    int victim;         /* the rank whose agent is killed */
    bool is_to_kill;    /* when all have begun */
    int64_t killed_ns;
    double restart_seconds, reopen_seconds;
    demo_heard *heard; /* by rank, in shared memory */
} demo_bus;

enum { DEMO_KILLED = 2 }; /* the version during which that is */

typedef struct demo {
    tool_job job;
    tool_llama llama;
    tool_ranks *ranks;
    tool_mover mover; /* in a rank's process: that rank */
    int nmoved;       /* versions */
    int step;         /* a tool_step, or one of demo_bus.c */
    demo_version version[DEMO_NVERSIONS];
    int64_t nverified;      /* bytes, of all versions */
    char gpu[64];           /* the GPU that tensors are on; "": none */
    double memcpy_gb_per_s; /* 0: not measured */
    int nthreads;           /* of memcpy */
    demo_bus *bus;          /* NULL: the ranks are on the bus themselves */
} demo;

/* Leads the ranks through a step. */
tb_status demo_do(demo *d, int step, double *seconds);

/* Fills, moves and verifies the next version. */
tb_status demo_move_version(demo *d);

/* (demo_bus.c) The same as without agents, from the first step to the last; `tick` kills the agent in time. */
tb_status demo_bus_run(demo *d, const tool_ranks_opts *opts, tool_guard *guard);
tb_status demo_bus_work(demo *d, int rank, int step, tool_slot *slot); /* in a rank's process */
void demo_bus_tick(demo *d);
void demo_bus_add_report(tb__text *out, const demo *d);
void demo_bus_fini(demo_bus *bus, int nranks);

/* (demo_report.c) The moving line: which version, what is done with it, how much of that; and the report. */
void demo_show_progress(const demo *d);
void demo_add_report(tb__text *out, const demo *d);

#endif
