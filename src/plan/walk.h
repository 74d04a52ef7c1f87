/* One rank's walk over a plan. Shared by receive.c, send.c and host.c. */
#ifndef TB_PLAN_WALK_H
#define TB_PLAN_WALK_H

#include "plan/cut.h"

typedef struct tb__walk {
    const tb_plan *plan;
    tb_routes *routes;
    tb__arena *arena;
    int32_t rank;
    uint64_t rotation;
    struct { /* the last list of receivers, which neighbouring routes often share */
        int32_t cls[TB_MAX_DIMS];
        int64_t first, last;
        const tb__absent *absent;
        int32_t *ranks;
    } memo;
    struct { /* all receivers of a cell, listed twice: any list of all but one is a slice of it */
        int32_t cls[TB_MAX_DIMS];
        int32_t *ranks;
    } round;
    struct { /* the last list of contributors, likewise */
        int32_t first;
        int32_t *ranks;
    } contributors;
} tb__walk;

/* The ranks of a route. */
typedef struct tb__parties {
    int32_t source;
    int32_t src_holder[TB_MAX_DIMS];
    uint32_t ntargets;
    const int32_t *targets;
    int32_t first_holder[TB_MAX_DIMS]; /* the first target's number among the holders, per axis */
    int32_t own_holder[TB_MAX_DIMS];   /* this rank's, if it is a target, else the first target's again */
    uint32_t ncontributors;
    const int32_t *contributors;
} tb__parties;

/* The receivers of a cell that the line serves. */
typedef struct tb__receivers {
    int32_t cls[TB_MAX_DIMS];
    bool repeats;      /* some rank is listed twice: then they are served one by one */
    tb__wide position; /* of the first on the line */
    tb__wide weight;   /* of all of them there */
    int64_t count;
    const tb__absent *absent; /* the others, or NULL */
} tb__receivers;

tb__receivers tb__receivers_of(const tb_plan *plan, const tb__replica_set *set, const tb__cell *cell);

/* Sets the source to member `m` of the replica set, and the contributors that it combines. */
tb_status tb__set_source(tb__walk *w, const tb__replica_set *set, int64_t m, tb__parties *who);

/* Sets the targets to the served receivers first..last. `own` is this rank's holder numbers if it is among them. */
tb_status tb__set_targets(tb__walk *w, const tb__receivers *r, int64_t first, int64_t last, const int32_t *own,
                          tb__parties *who);

/* Adds a route for each box of the cell's slices; without a slicing, of the whole cell. */
tb_status tb__emit(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, const tb__parties *who,
                   const tb__slicing *slicing, const tb__slices *slices);

/* Adds the routes of a cell that `rank`, member `m`, holds on both sides. */
tb_status tb__emit_local(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, int32_t rank, int64_t m,
                         const int32_t *dst_holder);

/* Updates max_slice, if an end of part k lies inside [position, position+weight) and is rounded to a slice. */
void tb__record_cut(tb__walk *w, const tb__slicing *slicing, const tb__cuts *c, int64_t k, tb__wide position,
                    tb__wide weight);

/* The served receivers that get the whole cell from part k. */
void tb__whole_range(const tb__cuts *c, const tb__slicing *slicing, int64_t k, const tb__cell *cell,
                     const tb__receivers *r, int64_t *first, int64_t *last);

int32_t *tb__one_rank(tb__walk *w, int32_t rank);

/* Where hosts are known: members of the replica set on this rank's host, if any, serve the receivers there. As a sender
 * (cls NULL), adds all this rank sends there; as a receiver, the one pair named. */
tb_status tb__serve_host(tb__walk *w, const tb__replica_set *set, const int32_t *cls, const int32_t *holder,
                         bool *is_served);

tb_status tb__receive_all(tb__walk *w);
tb_status tb__send_all(tb__walk *w);

#endif
