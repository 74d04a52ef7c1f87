/* Routes that a rank receives: it computes the positions of its (cell, receiver) pairs on the replica sets' lines, and
 * from these the members that serve it. */
#include "plan/walk.h"

#include <string.h>

/* Adds the routes of a cell of which this rank is receiver number `index`, served from the line. */
static tb_status receive_from_line(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, int64_t index,
                                   const int32_t *own) {
    tb__receivers r = tb__receivers_of(w->plan, set, cell);
    tb__cuts c = {set->line, set->nparts};
    bool together = tb__serves_together(w->plan);
    tb__wide position = r.position, weight = (uint64_t)cell->volume;
    int64_t q = index - (int64_t)tb__absent_before(r.absent, index); /* among those served */
    if (together)
        weight = r.weight;
    else
        position += (tb__wide)(uint64_t)q * weight;
    tb__slicing slicing = tb__slicing_choose(w->plan, &c, cell, weight);
    for (int64_t k = tb__part_at(&c, position); k < c.nparts && tb__part_start(&c, k) < position + weight; k++) {
        tb__slices s = tb__part_slices(&c, &slicing, k, position);
        if (s.lo == s.hi)
            continue;
        tb__parties who = {0};
        int64_t first = q, last = q;
        if (together && !r.repeats)
            first = 0, last = r.count - 1;
        else if (!together && s.is_whole && !r.repeats)
            tb__whole_range(&c, &slicing, k, cell, &r, &first, &last);
        tb__record_cut(w, &slicing, &c, k, position, weight);
        int64_t m = w->plan->unbalanced ? 0 : tb__part_member(k, set->nmembers, w->rotation);
        TB_TRY(tb__set_source(w, set, m, &who));
        TB_TRY(tb__set_targets(w, &r, first, last, own, &who));
        TB_TRY(tb__emit(w, set, cell, &who, &slicing, &s));
    }
    return TB_OK;
}

static tb_status receive_cell(tb__walk *w, const tb__place *place, const tb__cell *cell, const int32_t *own) {
    const tb_plan *plan = w->plan;
    int32_t cls[TB_MAX_DIMS], src_holder[TB_MAX_DIMS];
    int64_t m;
    tb__replica_set set = {0};
    for (int d = 0; d < plan->shape.ndim; d++) {
        set.cls[d] = cell->dim[d]->src_class;
        set.spans[d] = cell->dim[d]->src;
        set.tally[d] = cell->dim[d]->tally;
        set.total[d] = cell->dim[d]->total;
    }
    if (tb__replica_set_has(plan, &set, w->rank, src_holder, &m))
        return tb__emit_local(w, &set, cell, w->rank, m, own);
    TB_TRY(tb__replica_set_init(plan, &set, w->routes));
    tb__cell_classes(plan, cell, cls);
    bool is_served = false;
    if (plan->hosts && plan->src.partial.count == 0)
        TB_TRY(tb__serve_host(w, &set, cls, own, &is_served));
    if (is_served)
        return TB_OK;
    return receive_from_line(w, &set, cell, tb__holder_index(&plan->dst, cls, 1, own, place->copy, 0), own);
}

/* Adds the route of a target rank of a Partial(sum) dim that is not the first: it holds zeros. */
static tb_status receive_zeros(tb__walk *w, const tb__place *place) {
    tb_route route = {.source = TB_NO_RANK, .ntargets = 1, .nelements = 1};
    for (int d = 0; d < w->plan->shape.ndim; d++) {
        route.len[d] = tb__axis_local(&w->plan->dst.axis[d], place->coord[d]);
        route.nelements *= route.len[d];
    }
    if (route.nelements == 0)
        return TB_OK;
    route.targets = tb__one_rank(w, w->rank);
    return route.targets && tb__vec_push(&w->routes->list, route) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__receive_all(tb__walk *w) {
    const tb_plan *plan = w->plan;
    int n = plan->shape.ndim;
    tb__place place;
    tb__axis_pairings axis[TB_MAX_DIMS];
    if (!tb__grid_place(&plan->dst, w->rank, &place))
        return TB_OK;
    if (place.part != 0)
        return receive_zeros(w, &place);
    for (int d = 0; d < n; d++) {
        TB_TRY(tb__axis_list_pairings(plan, d, place.coord[d], &axis[d], w->arena));
        if (axis[d].count == 0)
            return TB_OK;
    }
    size_t at[TB_MAX_DIMS] = {0};
    for (int d = n; d >= 0;) {
        tb__cell cell;
        int32_t own[TB_MAX_DIMS] = {0};
        for (int e = 0; e < n; e++) {
            cell.dim[e] = &axis[e].pairing[at[e]];
            own[e] = axis[e].holder[at[e]];
        }
        tb__cell_init(plan, &cell);
        TB_TRY(receive_cell(w, &place, &cell, own));
        for (d = n - 1; d >= 0 && ++at[d] == axis[d].count; d--)
            at[d] = 0;
    }
    return TB_OK;
}
