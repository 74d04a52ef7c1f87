/* Replica sets, cells, and positions on a replica set's line. See plan.h for the terms. */
#ifndef TB_PLAN_LINE_H
#define TB_PLAN_LINE_H

#include "plan/plan.h"

/* Whether a cell stands on the line once, with all receivers that the line serves, and not once for each. It does where
 * hosts are known: no member is on these receivers' hosts, and their data leaves the members' hosts once. */
static inline bool tb__counts_once(const tb_plan *plan) {
    return plan->hosts && plan->src.partial.count == 0;
}

/* Whether receivers of a cell are served together: cutting divides the elements, not the receivers. */
static inline bool tb__serves_together(const tb_plan *plan) {
    return plan->hosts || plan->src.partial.count > 0;
}

/* How many times the line counts an index of a target class, and each element of a cell on top of that. */
static inline uint64_t tb__class_weight(const tb_plan *plan, int d, int32_t cls) {
    return tb__counts_once(plan) ? 1 : (uint64_t)tb__axis_nholders(&plan->dst.axis[d], cls);
}

static inline uint64_t tb__copies_weight(const tb_plan *plan) {
    return tb__counts_once(plan) ? 1 : (uint64_t)plan->dst.copies.size;
}

/* One axis of a cell: a source class, a target class, and the indices they have in common. */
typedef struct tb__pairing {
    int32_t src_class, dst_class;
    tb__spans src, dst;
    const tb__tally *tally; /* of src, over the target classes */
    tb__wide total;         /* (index, holder) pairs of all target classes on the source class's indices; where cells
                               count once, indices */
    tb__wide before;        /* those of the target classes before dst_class */
    int64_t count;          /* indices in common */
    struct tb__run *runs;   /* the indices in common, in ascending order, for the source holder below */
    size_t nruns;
    int32_t runs_holder; /* -1: none yet */
} tb__pairing;

/* A run of indices that is contiguous at the source and at every holder of the target class. */
typedef struct tb__run {
    int64_t src, len;    /* where it begins in the source's local order */
    const tb__span *dst; /* it begins `shift` after this span's beginning */
    int64_t shift;
} tb__run;

/* Receivers of one cell that the line does not serve: they hold the elements themselves, or a member on their host
 * does. */
typedef struct tb__absent {
    int32_t cls[TB_MAX_DIMS]; /* the cell's target classes */
    tb__wide start;           /* of the cell on the line, if none were absent */
    int64_t volume;
    const int64_t *index; /* numbers among the cell's receivers, ascending */
    size_t count;
    tb__wide weight; /* elements by which they shorten the line */
} tb__absent;

typedef struct tb__replica_set {
    int32_t cls[TB_MAX_DIMS];
    tb__spans spans[TB_MAX_DIMS];
    const tb__tally *tally[TB_MAX_DIMS]; /* over the target classes */
    tb__wide total[TB_MAX_DIMS];
    int64_t nmembers;   /* ranks that can send */
    tb__wide line;      /* elements on it */
    int64_t nparts;     /* that it is cut into, at most one for each member */
    tb__absent *absent; /* ascending */
    size_t nabsent;
} tb__replica_set;

typedef struct tb__cell {
    tb__pairing *dim[TB_MAX_DIMS];
    tb__wide start; /* on the line, if no receiver were absent */
    int64_t volume;
    int64_t nreceivers;
} tb__cell;

/* The ranks that hold a cell of a grid, numbered: a holder per axis, a copy, and, for sources, a part (innermost). */
int64_t tb__holders_count(const tb__grid *grid, const int32_t *cls, int64_t nparts);
int32_t tb__holder_rank(const tb__grid *grid, const int32_t *cls, int64_t nparts, int64_t index, int32_t *holder);
int64_t tb__holder_index(const tb__grid *grid, const int32_t *cls, int64_t nparts, const int32_t *holder, int32_t copy,
                         int32_t part);

/* Whether the rank is a member of the replica set: if so, its holder numbers and its index. */
bool tb__replica_set_has(const tb_plan *plan, const tb__replica_set *set, int32_t rank, int32_t *holder,
                         int64_t *index);

/* Fills in the rest of a replica set whose classes, spans, tallies and totals are set. Valid until the next replica set
 * is. */
tb_status tb__replica_set_init(const tb_plan *plan, tb__replica_set *set, tb_routes *scratch);

/* Fills in before and count of a pairing whose classes, spans, tally and total are set. */
void tb__pairing_init(const tb_plan *plan, int d, tb__pairing *pairing);
tb_status tb__pairing_runs(const tb_plan *plan, int d, tb__pairing *pairing, int32_t src_holder, tb__arena *arena);

/* The pairings of one axis with a class that this coordinate holds, and its holder number in each. */
typedef struct tb__axis_pairings {
    tb__pairing *pairing;
    int32_t *holder;
    size_t count;
} tb__axis_pairings;

tb_status tb__axis_list_pairings(const tb_plan *plan, int d, int32_t coord, tb__axis_pairings *out, tb__arena *arena);

/* Fills in the rest of a cell whose pairings are set. */
void tb__cell_init(const tb_plan *plan, tb__cell *cell);
void tb__cell_classes(const tb_plan *plan, const tb__cell *cell, int32_t *cls);

/* The cell of a replica set with given target classes; its pairings are put into `pairing`, without the lists of the
 * target classes. */
void tb__replica_set_cell(const tb_plan *plan, const tb__replica_set *set, const int32_t *cls, tb__pairing *pairing,
                          tb__cell *cell);
/* Fills in the target classes' lists, which boxes are made from. */
tb_status tb__cell_lists(const tb_plan *plan, tb__cell *cell, tb__arena *arena);

/* The number of absent receivers before receiver `index`, and before the next one after `served` served ones. `absent`
 * may be NULL. */
size_t tb__absent_before(const tb__absent *absent, int64_t index);
size_t tb__absent_upto(const tb__absent *absent, int64_t served);

/* Converts a position on the line to one on the line without absences. */
tb__wide tb__line_expand(const tb_plan *plan, const tb__replica_set *set, tb__wide position);

#endif
