/* The demo through agents: three versions, and an agent that is killed while the second is under way. */
#include "bench/demo.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    LOSE = TOOL_NSTEPS, /* a move that ends with the loss of an agent */
    REOPEN,
};

/* ---- In a rank's process ------------------------------------------------------------------------------------- */

/* What is told is kept for the report. A rank that needs nothing of the halted one may have its part already: tensors
 * are written in place. The one whose agent is killed can't. */
static tb_status lose(demo *d, int rank) {
    demo_heard *heard = &d->bus->heard[rank];
    atomic_store(&heard->has_begun, true);
    heard->status = tool_client_move(&d->bus->client);
    heard->when_ns = tool_now_ns();
    snprintf(heard->sentence, sizeof heard->sentence, "%s", heard->status == TB_OK ? "" : tb_error_detail());
    if (heard->status == TB_OK && rank == d->bus->victim)
        return tb__fail(TB_INTERNAL, "version %d is said to have come, by an agent that was halted", DEMO_KILLED);
    return heard->status == TB_LOST ? TB_OK : heard->status;
}

static tb_status move(demo *d, tool_slot *slot) {
    TB_TRY(tool_client_move(&d->bus->client));
    slot->ended_ns = tool_now_ns();
    atomic_store(&slot->done, d->mover.end[0].parts.nbytes);
    return TB_OK;
}

tb_status demo_bus_work(demo *d, int rank, int step, tool_slot *slot) {
    tool_client *client = &d->bus->client;
    switch (step) {
    case TOOL_CONNECT:
        *client = (tool_client){.job = &d->job, .end = &d->mover.end[0], .rank = rank};
        return tool_client_open(client);
    case TOOL_MOVE:
        return move(d, slot);
    case LOSE:
        return lose(d, rank);
    case REOPEN:
        return tool_client_reopen(client);
    case TOOL_CLOSE:
        tool_client_close(client);
        break;
    default:
        break;
    }
    return tool_mover_do(&d->mover, (tool_step)step, slot);
}

/* ---- In the parent ------------------------------------------------------------------------------------------- */

void demo_bus_tick(demo *d) {
    demo_bus *bus = d->bus;
    if (!bus->is_to_kill)
        return;
    tool_show_line("version %d of %d  moving; the agent of %s is about to be killed", DEMO_KILLED, DEMO_NVERSIONS,
                   d->job.names[bus->victim].text);
    for (int rank = 0; rank < d->job.nranks; rank++) {
        if (!atomic_load(&bus->heard[rank].has_begun))
            return;
    }
    bus->is_to_kill = false;
    bus->killed_ns = tool_now_ns();
    tool_fleet_kill(bus->agents, bus->victim);
}

/* The agent is halted before, so that the version can't be complete when it is killed, however small the model is. */
static tb_status lose_agent(demo *d) {
    demo_bus *bus = d->bus;
    TB_TRY(demo_do(d, TOOL_PREPARE, NULL));
    tool_fleet_halt(bus->agents, bus->victim);
    bus->is_to_kill = true;
    TB_TRY(demo_do(d, LOSE, NULL));
    tool_show_line("version %d of %d  failed; the agent of %s is started again", DEMO_KILLED, DEMO_NVERSIONS,
                   d->job.names[bus->victim].text);
    int64_t start = tool_now_ns();
    TB_TRY(tool_fleet_restart(bus->agents, bus->victim));
    bus->restart_seconds = 1e-9 * (double)(tool_now_ns() - start);
    return demo_do(d, REOPEN, &bus->reopen_seconds);
}

static tb_status move_versions(demo *d) {
    TB_TRY(demo_do(d, TOOL_ALLOCATE, NULL));
    TB_TRY(demo_do(d, TOOL_PREPARE, NULL)); /* a program's tensors have values when they are registered */
    TB_TRY(demo_do(d, TOOL_CONNECT, NULL));
    while (d->nmoved < DEMO_NVERSIONS) {
        if (d->nmoved + 1 == DEMO_KILLED)
            TB_TRY(lose_agent(d));
        TB_TRY(demo_move_version(d));
    }
    return demo_do(d, TOOL_CLOSE, NULL);
}

static tb_status start(demo *d, const tool_ranks_opts *opts, tool_guard *guard) {
    demo_bus *bus = d->bus;
    void *shared;
    bus->victim = d->job.side[TOOL_SOURCE].nranks + (d->job.side[TOOL_TARGET].nranks > 1 ? 1 : 0);
    TB_TRY(tool_share((size_t)d->job.nranks * sizeof *bus->heard, &shared));
    bus->heard = shared;
    TB_TRY(tool_job_start(&d->job, opts, guard, &d->ranks));
    tool_show_line("starting a store and %d agents", d->job.nranks);
    return tool_fleet_create(&d->job, guard, &bus->agents);
}

/* A client's failure may only tell that an agent is gone: how that came about says more. */
tb_status demo_bus_run(demo *d, const tool_ranks_opts *opts, tool_guard *guard) {
    tb_status status = start(d, opts, guard);
    if (status == TB_OK) {
        status = move_versions(d);
        if (status != TB_OK && status != TB_CANCELLED)
            (void)tool_fleet_check(d->bus->agents);
    }
    tool_ranks_destroy(d->ranks);
    tool_fleet_destroy(d->bus->agents);
    return status;
}

void demo_bus_fini(demo_bus *bus, int nranks) {
    tool_unshare(bus->heard, (size_t)nranks * sizeof *bus->heard);
}

/* ---- Report -------------------------------------------------------------------------------------------------- */

static double ms_since(const demo_bus *bus, int64_t when_ns) {
    return 1e-6 * (double)(when_ns - bus->killed_ns);
}

/* Of the others, the one that heard of it last; -1: none did. */
static int find_last(const demo *d, int *nheard) {
    int last = -1;
    *nheard = 0;
    for (int rank = 0; rank < d->job.nranks; rank++) {
        const demo_heard *heard = &d->bus->heard[rank];
        if (rank == d->bus->victim || heard->status == TB_OK)
            continue;
        ++*nheard;
        if (last < 0 || heard->when_ns > d->bus->heard[last].when_ns)
            last = rank;
    }
    return last;
}

void demo_bus_add_report(tb__text *out, const demo *d) {
    const demo_bus *bus = d->bus;
    const demo_heard *own = &bus->heard[bus->victim];
    int nheard, last = find_last(d, &nheard), ndone = d->job.nranks - 1 - nheard;
    const char *victim = d->job.names[bus->victim].text;
    tb__text_add(out, "killed    the agent of %s, while version %d was under way\n", victim, DEMO_KILLED);
    tb__text_add(out, "          %s was told after %.1f ms: %s\n", victim, ms_since(bus, own->when_ns), own->sentence);
    if (last >= 0)
        tb__text_add(out, "          %d other%s after %.1f ms%s; %s: %s\n", nheard, nheard == 1 ? "" : "s",
                     ms_since(bus, bus->heard[last].when_ns), nheard == 1 ? "" : " at most", d->job.names[last].text,
                     bus->heard[last].sentence);
    if (ndone > 0)
        tb__text_add(out, "          %d had done their part before\n", ndone);
    tb__text_add(out, "restarted in %.0f ms; %.0f ms later all had made the pair and registered again\n",
                 bus->restart_seconds * 1e3, bus->reopen_seconds * 1e3);
}
