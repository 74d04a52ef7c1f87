/* Cutting a line into parts for the members that serve it. */
#ifndef TB_PLAN_CUT_H
#define TB_PLAN_CUT_H

#include "plan/line.h"

/* A line, or that of one host, in equal parts. */
typedef struct tb__cuts {
    tb__wide line;
    int64_t nparts;
} tb__cuts;

/* How one pair (or, for a Partial source, one cell with all its receivers) is divided into slices at a cut. */
typedef struct tb__slicing {
    int dim;           /* -1: a scalar, in one piece */
    int64_t nslices;   /* along dim */
    int64_t thickness; /* indices per slice */
    tb__wide slice;    /* elements on the line per slice */
    tb__wide lo, hi;   /* an end of a part less than lo after a pair's beginning, or at most hi before its end, moves
                          there: half a slice, or more where that would cut off a sliver */
} tb__slicing;

/* Where part k begins. */
static inline tb__wide tb__part_start(const tb__cuts *c, int64_t k) {
    return tb__wide_div((tb__wide)(uint64_t)k * c->line, (uint64_t)c->nparts);
}

/* The part in which a position lies. */
int64_t tb__part_at(const tb__cuts *c, tb__wide position);

/* The member, of n, that serves part k, and the inverse: tensors of a batch rotate. */
static inline int64_t tb__part_member(int64_t k, int64_t n, uint64_t rotation) {
    return (int64_t)(((uint64_t)k + rotation % (uint64_t)n) % (uint64_t)n);
}

static inline int64_t tb__member_part(int64_t m, int64_t n, uint64_t rotation) {
    return (int64_t)(((uint64_t)m + (uint64_t)n - rotation % (uint64_t)n) % (uint64_t)n);
}

/* `weight`: the number of elements that the whole pair, or cell, has on the line. */
tb__slicing tb__slicing_choose(const tb_plan *plan, const tb__cuts *c, const tb__cell *cell, tb__wide weight);

/* The slices [lo, hi) that part k gets of the pair, or cell, that begins at `position`; lo == hi if none. */
typedef struct tb__slices {
    int64_t lo, hi;
    bool is_whole;
} tb__slices;

tb__slices tb__part_slices(const tb__cuts *c, const tb__slicing *slicing, int64_t k, tb__wide position);

#endif
