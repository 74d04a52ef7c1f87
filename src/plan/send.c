/* Routes that a rank sends: it computes its part of its replica sets' lines, and from that its receivers. */
#include "plan/walk.h"

/* Moves the pairing of axis d to the target class that holds pair number `position` of the replica set's indices. */
static tb_status move_to(tb__walk *w, const tb__replica_set *set, int d, tb__wide position, tb__pairing *p) {
    const tb__axis *axis = &w->plan->dst.axis[d];
    *p = (tb__pairing){.src_class = set->cls[d],
                       .dst_class = tb__axis_seek(axis, set->spans[d], set->tally[d], position),
                       .src = set->spans[d],
                       .tally = set->tally[d],
                       .total = set->total[d]};
    tb__pairing_init(w->plan, d, p);
    return tb__axis_class(axis, p->dst_class, w->arena, &p->dst);
}

static tb__wide pairs_of(const tb_plan *plan, int d, const tb__pairing *p) {
    return (tb__wide)(uint64_t)p->count * tb__class_weight(plan, d, p->dst_class);
}

/* The cell at a position of the line without absences. */
static tb_status cell_at(tb__walk *w, const tb__replica_set *set, tb__wide position, tb__pairing *pairing,
                         tb__cell *cell) {
    int n = w->plan->shape.ndim;
    tb__wide unit = tb__copies_weight(w->plan); /* pairs of later axes, times pairs of earlier ones */
    for (int d = 0; d < n; d++)
        unit *= set->total[d];
    for (int d = 0; d < n; d++) {
        unit = tb__wide_div(unit, set->total[d]);
        TB_TRY(move_to(w, set, d, tb__wide_div(position, unit), &pairing[d]));
        position -= pairing[d].before * unit;
        unit *= pairs_of(w->plan, d, &pairing[d]);
        cell->dim[d] = &pairing[d];
    }
    tb__cell_init(w->plan, cell);
    return TB_OK;
}

static tb_status next_cell(tb__walk *w, const tb__replica_set *set, tb__pairing *pairing, tb__cell *cell, bool *done) {
    int d = w->plan->shape.ndim - 1;
    for (; d >= 0; d--) {
        tb__wide next = pairing[d].before + pairs_of(w->plan, d, &pairing[d]);
        bool wraps = next == set->total[d];
        bool alone = wraps && pairing[d].before == 0;
        if (!alone) /* a pairing that stays where it is keeps its runs */
            TB_TRY(move_to(w, set, d, wraps ? 0 : next, &pairing[d]));
        if (!wraps)
            break;
    }
    *done = d < 0;
    if (!*done)
        tb__cell_init(w->plan, cell);
    return TB_OK;
}

/* Adds the routes by which part k of the line sends one cell. */
static tb_status send_cell(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, const tb__receivers *r,
                           int64_t k, tb__parties *who) {
    tb__cuts c = {set->line, set->nparts};
    tb__wide volume = (uint64_t)cell->volume;
    if (tb__serves_together(w->plan)) {
        tb__slicing slicing = tb__slicing_choose(w->plan, &c, cell, r->weight);
        tb__slices s = tb__part_slices(&c, &slicing, k, r->position);
        if (s.lo == s.hi)
            return TB_OK;
        tb__record_cut(w, &slicing, &c, k, r->position, r->weight);
        for (int64_t q = 0; q < r->count; q = r->repeats ? q + 1 : r->count) {
            TB_TRY(tb__set_targets(w, r, q, r->repeats ? q : r->count - 1, NULL, who));
            TB_TRY(tb__emit(w, set, cell, who, &slicing, &s));
        }
        return TB_OK;
    }
    tb__slicing slicing = tb__slicing_choose(w->plan, &c, cell, volume);
    tb__wide from = tb__part_start(&c, k), to = tb__part_start(&c, k + 1);
    int64_t q = from > r->position ? (int64_t)tb__wide_div(from - r->position, volume) : 0;
    while (q < r->count && r->position + (tb__wide)(uint64_t)q * volume < to) {
        tb__wide position = r->position + (tb__wide)(uint64_t)q * volume;
        tb__slices s = tb__part_slices(&c, &slicing, k, position);
        int64_t first = q, last = q;
        if (s.is_whole && !r->repeats)
            tb__whole_range(&c, &slicing, k, cell, r, &first, &last);
        if (s.lo < s.hi) {
            tb__record_cut(w, &slicing, &c, k, position, volume);
            TB_TRY(tb__set_targets(w, r, first, last, NULL, who));
            TB_TRY(tb__emit(w, set, cell, who, &slicing, &s));
        }
        q = last + 1;
    }
    return TB_OK;
}

/* Adds the routes that member `m` of the replica set sends from the line. */
static tb_status send_part(tb__walk *w, const tb__replica_set *set, int64_t m) {
    tb__cuts c = {set->line, set->nparts};
    if (set->line == 0 || (w->plan->unbalanced && m != 0))
        return TB_OK;
    int64_t k = w->plan->unbalanced ? 0 : tb__member_part(m, set->nmembers, w->rotation);
    if (k >= c.nparts)
        return TB_OK;
    tb__wide from = tb__part_start(&c, k), to = tb__part_start(&c, k + 1);
    if (from == to)
        return TB_OK;
    tb__parties who = {0};
    TB_TRY(tb__set_source(w, set, m, &who));
    tb__pairing pairing[TB_MAX_DIMS] = {0};
    tb__cell cell;
    TB_TRY(cell_at(w, set, tb__line_expand(w->plan, set, from), pairing, &cell));
    for (bool done = false; !done;) {
        tb__receivers r = tb__receivers_of(w->plan, set, &cell);
        if (r.position >= to)
            break;
        if (r.count > 0)
            TB_TRY(send_cell(w, set, &cell, &r, k, &who));
        TB_TRY(next_cell(w, set, pairing, &cell, &done));
    }
    return TB_OK;
}

/* Adds the routes of a Partial source's contributor: it contributes to the cells that each other member sends or
 * keeps. */
static tb_status send_contributions(tb__walk *w, const tb__replica_set *set, int64_t m) {
    int64_t nparts = w->plan->src.partial.size, first = m - m % nparts;
    for (int64_t other = first; other < first + nparts; other++)
        TB_TRY(send_part(w, set, other));
    for (size_t i = 0; i < set->nabsent; i++) {
        const tb__absent *a = &set->absent[i];
        for (size_t j = 0; j < a->count; j++) {
            int32_t src_holder[TB_MAX_DIMS], dst_holder[TB_MAX_DIMS];
            int32_t rank = tb__holder_rank(&w->plan->dst, a->cls, 1, a->index[j], dst_holder);
            int64_t member;
            if (rank == w->rank || !tb__replica_set_has(w->plan, set, rank, src_holder, &member) ||
                member - member % nparts != first)
                continue;
            tb__pairing pairing[TB_MAX_DIMS];
            tb__cell cell;
            tb__replica_set_cell(w->plan, set, a->cls, pairing, &cell);
            TB_TRY(tb__cell_lists(w->plan, &cell, w->arena));
            TB_TRY(tb__emit_local(w, set, &cell, rank, member, dst_holder));
        }
    }
    return TB_OK;
}

static tb_status send_replica_set(tb__walk *w, const tb__place *place, tb__replica_set *set, const int32_t *holder) {
    const tb_plan *plan = w->plan;
    bool unused;
    TB_TRY(tb__replica_set_init(plan, set, w->routes));
    int64_t m = tb__holder_index(&plan->src, set->cls, plan->src.partial.size, holder, place->copy, place->part);
    if (plan->src.partial.count > 0)
        return send_contributions(w, set, m);
    TB_TRY(send_part(w, set, m));
    return plan->hosts ? tb__serve_host(w, set, NULL, NULL, &unused) : TB_OK;
}

/* One source class of an axis that this rank holds. */
typedef struct holding {
    int32_t cls, holder;
    tb__spans spans;
    const tb__tally *tally;
    tb__wide total;
} holding;

static tb_status axis_holdings(tb__walk *w, int d, int32_t coord, holding **out, size_t *count) {
    const tb__axis *src = &w->plan->src.axis[d], *dst = &w->plan->dst.axis[d];
    const tb__slot *slot;
    TB_TRY(tb__axis_slots(src, coord, w->arena, &slot, count));
    *out = tb__arena_alloc(w->arena, *count, sizeof **out);
    if (!*out)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < *count; i++) {
        holding *h = &(*out)[i];
        *h = (holding){.cls = slot[i].cls, .holder = slot[i].holder};
        TB_TRY(tb__axis_class(src, h->cls, w->arena, &h->spans));
        TB_TRY(tb__axis_tally(dst, h->spans, tb__counts_once(w->plan), w->arena, &h->tally));
        h->total = tb__axis_before(dst, tb__axis_nclasses(dst), h->spans, h->tally);
    }
    return TB_OK;
}

tb_status tb__send_all(tb__walk *w) {
    const tb_plan *plan = w->plan;
    int n = plan->shape.ndim;
    tb__place place;
    holding *axis[TB_MAX_DIMS];
    size_t count[TB_MAX_DIMS];
    if (!tb__grid_place(&plan->src, w->rank, &place))
        return TB_OK;
    for (int d = 0; d < n; d++) {
        TB_TRY(axis_holdings(w, d, place.coord[d], &axis[d], &count[d]));
        if (count[d] == 0)
            return TB_OK;
    }
    size_t at[TB_MAX_DIMS] = {0};
    for (int d = n; d >= 0;) {
        tb__replica_set set = {0};
        int32_t holder[TB_MAX_DIMS];
        for (int e = 0; e < n; e++) {
            const holding *h = &axis[e][at[e]];
            set.cls[e] = h->cls;
            set.spans[e] = h->spans;
            set.tally[e] = h->tally;
            set.total[e] = h->total;
            holder[e] = h->holder;
        }
        TB_TRY(send_replica_set(w, &place, &set, holder));
        for (d = n - 1; d >= 0 && ++at[d] == count[d]; d--)
            at[d] = 0;
    }
    return TB_OK;
}
