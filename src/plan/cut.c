/* Cutting a line: see cut.h. */
#include "plan/cut.h"

#include "base/dtype.h"

enum {
    SLICES_PER_PART = 64,   /* how finely a cut should be able to divide a member's part */
    SLIVERS_PER_PART = 128, /* less than this fraction of a part is not worth a chunk of its own ... */
    SMALLEST_PART = 4096,   /* ... in parts of at least so many elements */
};

int64_t tb__part_at(const tb__cuts *c, tb__wide position) {
    tb__wide n = (position + 1) * (uint64_t)c->nparts;
    return (int64_t)(tb__wide_div(n + c->line - 1, c->line) - 1);
}

/* The outermost dim whose slices are fine enough for the balance: it keeps the longest contiguous runs whole. */
tb__slicing tb__slicing_choose(const tb_plan *plan, const tb__cuts *c, const tb__cell *cell, tb__wide weight) {
    tb__wide needed = tb__wide_div(weight * (uint64_t)c->nparts * SLICES_PER_PART, c->line);
    tb__slicing best = {.dim = -1, .nslices = 1, .thickness = 1};
    for (int d = 0; d < plan->shape.ndim - plan->whole_rows; d++) {
        int64_t thickness = d == plan->shape.ndim - 1 ? tb__dtype_packing(plan->dtype) : 1;
        int64_t nslices = cell->dim[d]->count / thickness;
        if (best.dim < 0 || nslices > best.nslices)
            best = (tb__slicing){.dim = d, .nslices = nslices, .thickness = thickness};
        if ((uint64_t)nslices >= needed)
            break;
    }
    best.slice = tb__wide_div(weight, (uint64_t)best.nslices);
    best.hi = best.slice / 2;
    best.lo = best.slice - best.hi;
    tb__wide part = tb__wide_div(c->line, (uint64_t)c->nparts), sliver = part / SLIVERS_PER_PART;
    if (2 * sliver >= weight)
        sliver = (weight - 1) / 2; /* lo and hi must not meet */
    if (part >= SMALLEST_PART && sliver > best.hi) {
        best.hi = sliver;
        best.lo = sliver + 1;
    }
    return best;
}

/* The slice boundary nearest to `from`, of a pair that begins at `position`. */
static int64_t nearest_slice(const tb__slicing *slicing, tb__wide from, tb__wide position) {
    tb__wide end = position + slicing->slice * (uint64_t)slicing->nslices;
    if (from < position + slicing->lo)
        return 0;
    if (from + slicing->hi >= end)
        return slicing->nslices;
    return (int64_t)tb__wide_div(from - position + slicing->slice / 2, slicing->slice);
}

tb__slices tb__part_slices(const tb__cuts *c, const tb__slicing *slicing, int64_t k, tb__wide position) {
    tb__slices s = {.lo = nearest_slice(slicing, tb__part_start(c, k), position),
                    .hi = nearest_slice(slicing, tb__part_start(c, k + 1), position)};
    s.is_whole = s.lo == 0 && s.hi == slicing->nslices;
    return s;
}
