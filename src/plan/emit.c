/* Routes: their ranks, and the boxes of a cell or of its slices. */
#include "plan/walk.h"

#include <string.h>

static uint64_t cell_number(const tb__grid *grid, const int32_t *cls) {
    uint64_t number = 0;
    for (int d = 0; d < grid->shape.ndim; d++)
        number = number * (uint32_t)tb__axis_nclasses(&grid->axis[d]) + (uint32_t)cls[d];
    return number;
}

static tb_shape grid_cells(const tb__grid *grid) {
    tb_shape cells = {.ndim = grid->shape.ndim};
    for (int d = 0; d < cells.ndim; d++)
        cells.dim[d] = tb__axis_nclasses(&grid->axis[d]);
    return cells;
}

void tb_plan_grids(const tb_plan *plan, tb_shape *src, tb_shape *dst) {
    if (src)
        *src = grid_cells(&plan->src);
    if (dst)
        *dst = grid_cells(&plan->dst);
}

/* The runs of one axis that go into boxes. */
typedef struct runs {
    const tb__run *item;
    size_t count;
} runs;

/* Keeps the indices [lo, hi) of those that the runs hold, in their order. */
static tb_status trim_runs(runs *r, int64_t lo, int64_t hi, tb__arena *arena) {
    tb__run *kept = tb__arena_alloc(arena, r->count, sizeof *kept);
    size_t count = 0;
    if (!kept)
        return TB_NO_MEMORY;
    int64_t at = 0;
    for (size_t i = 0; i < r->count && at < hi; at += r->item[i++].len) {
        tb__run run = r->item[i];
        int64_t from = lo > at ? lo - at : 0, to = hi - at < run.len ? hi - at : run.len;
        if (from < to)
            kept[count++] = (tb__run){run.src + from, to - from, run.dst, run.shift + from};
    }
    *r = (runs){kept, count};
    return TB_OK;
}

tb_status tb__emit(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, const tb__parties *who,
                   const tb__slicing *slicing, const tb__slices *slices) {
    const tb_plan *plan = w->plan;
    int n = plan->shape.ndim;
    int32_t cls[TB_MAX_DIMS];
    int64_t stride[TB_MAX_DIMS] = {0}, step = 1; /* of the first target's local tensor */
    runs axis[TB_MAX_DIMS] = {0};
    tb__cell_classes(plan, cell, cls);
    for (int d = n - 1; d >= 0; d--) {
        const tb__axis *dst = &plan->dst.axis[d];
        TB_TRY(tb__pairing_runs(plan, d, cell->dim[d], who->src_holder[d], w->arena));
        axis[d] = (runs){cell->dim[d]->runs, cell->dim[d]->nruns};
        if (slices && !slices->is_whole && d == slicing->dim)
            TB_TRY(trim_runs(&axis[d], slices->lo * slicing->thickness, slices->hi * slicing->thickness, w->arena));
        stride[d] = step;
        step *= tb__axis_local(dst, tb__axis_holder(dst, cls[d], who->first_holder[d]));
    }
    tb_route route = {.source = who->source,
                      .ntargets = who->ntargets,
                      .targets = who->targets,
                      .ncontributors = who->ncontributors,
                      .contributors = who->contributors,
                      .src_cell = cell_number(&plan->src, set->cls),
                      .dst_cell = cell_number(&plan->dst, cls)};
    size_t at[TB_MAX_DIMS] = {0};
    for (int d = n; d >= 0;) {
        route.nelements = 1;
        route.order = 0;
        for (int e = 0; e < n; e++) {
            const tb__run *run = &axis[e].item[at[e]];
            route.len[e] = run->len;
            route.src.start[e] = run->src;
            route.dst.start[e] = tb__span_offset(run->dst, who->own_holder[e]) + run->shift;
            route.order += (tb__span_offset(run->dst, who->first_holder[e]) + run->shift) * stride[e];
            route.nelements *= run->len;
        }
        if (!tb__vec_push(&w->routes->list, route))
            return TB_NO_MEMORY;
        for (d = n - 1; d >= 0 && ++at[d] == axis[d].count; d--)
            at[d] = 0;
    }
    return TB_OK;
}

int32_t *tb__one_rank(tb__walk *w, int32_t rank) {
    int32_t *ranks = tb__arena_alloc(w->arena, 1, sizeof *ranks);
    if (ranks)
        *ranks = rank;
    return ranks;
}

tb_status tb__set_source(tb__walk *w, const tb__replica_set *set, int64_t m, tb__parties *who) {
    const tb__grid *src = &w->plan->src;
    int64_t nparts = src->partial.size;
    who->source = tb__holder_rank(src, set->cls, nparts, m, who->src_holder);
    if (src->partial.count == 0)
        return TB_OK;
    int32_t unused[TB_MAX_DIMS];
    int32_t first = tb__holder_rank(src, set->cls, nparts, m - m % nparts, unused);
    if (!w->contributors.ranks || w->contributors.first != first) { /* the first rank identifies the list */
        int32_t *ranks = tb__arena_alloc(w->arena, (size_t)nparts, sizeof *ranks);
        if (!ranks)
            return TB_NO_MEMORY;
        for (int64_t p = 0; p < nparts; p++)
            ranks[p] = tb__holder_rank(src, set->cls, nparts, m - m % nparts + p, unused);
        w->contributors.first = first;
        w->contributors.ranks = ranks;
    }
    who->ncontributors = (uint32_t)nparts;
    who->contributors = w->contributors.ranks;
    return TB_OK;
}

tb__receivers tb__receivers_of(const tb_plan *plan, const tb__replica_set *set, const tb__cell *cell) {
    tb__receivers r = {.position = cell->start, .count = cell->nreceivers};
    tb__cell_classes(plan, cell, r.cls);
    for (int d = 0; d < plan->shape.ndim; d++)
        r.repeats |= tb__axis_repeats(&plan->dst.axis[d], r.cls[d]);
    for (size_t i = 0; i < set->nabsent && set->absent[i].start <= cell->start; i++) {
        const tb__absent *a = &set->absent[i];
        if (a->start < cell->start) {
            r.position -= a->weight;
        } else {
            r.absent = a;
            r.count -= (int64_t)a->count;
        }
    }
    r.weight = (tb__wide)(uint64_t)cell->volume * (tb__counts_once(plan) ? 1 : (uint64_t)r.count);
    return r;
}

/* The position among all receivers of the q-th one that the line serves. */
static int64_t served_index(const tb__receivers *r, int64_t q) {
    return q + (int64_t)tb__absent_upto(r->absent, q);
}

/* Sets the targets to all receivers of a cell but the absent one, beginning after it. If all source ranks want a cell,
 * each omits itself; a separate list for each would take memory quadratic in their number. */
static tb_status set_others(tb__walk *w, const tb__receivers *r, const int32_t *own, tb__parties *who) {
    const tb__grid *dst = &w->plan->dst;
    int64_t n = r->count + 1, absent = r->absent->index[0];
    int32_t unused[TB_MAX_DIMS];
    if (!w->round.ranks || memcmp(w->round.cls, r->cls, sizeof r->cls) != 0) {
        w->round.ranks = tb__arena_alloc(w->arena, (size_t)(2 * n), sizeof *w->round.ranks);
        if (!w->round.ranks)
            return TB_NO_MEMORY;
        for (int64_t i = 0; i < n; i++)
            w->round.ranks[i] = w->round.ranks[n + i] = tb__holder_rank(dst, r->cls, 1, i, unused);
        memcpy(w->round.cls, r->cls, sizeof r->cls);
    }
    tb__holder_rank(dst, r->cls, 1, (absent + 1) % n, who->first_holder);
    memcpy(who->own_holder, own ? own : who->first_holder, sizeof who->own_holder);
    who->ntargets = (uint32_t)r->count;
    who->targets = w->round.ranks + absent + 1;
    return TB_OK;
}

tb_status tb__set_targets(tb__walk *w, const tb__receivers *r, int64_t first, int64_t last, const int32_t *own,
                          tb__parties *who) {
    if (r->absent && r->absent->count == 1 && first == 0 && last == r->count - 1 && !r->repeats)
        return set_others(w, r, own, who);
    const tb__grid *dst = &w->plan->dst;
    int32_t unused[TB_MAX_DIMS];
    int32_t first_rank = tb__holder_rank(dst, r->cls, 1, served_index(r, first), who->first_holder);
    memcpy(who->own_holder, own ? own : who->first_holder, sizeof who->own_holder);
    bool same = w->memo.ranks && w->memo.absent == r->absent && w->memo.first == first && w->memo.last == last &&
                memcmp(w->memo.cls, r->cls, sizeof r->cls) == 0;
    if (!same) {
        w->memo.ranks = tb__arena_alloc(w->arena, (size_t)(last - first + 1), sizeof *w->memo.ranks);
        if (!w->memo.ranks)
            return TB_NO_MEMORY;
        w->memo.ranks[0] = first_rank;
        for (int64_t q = first + 1; q <= last; q++)
            w->memo.ranks[q - first] = tb__holder_rank(dst, r->cls, 1, served_index(r, q), unused);
        memcpy(w->memo.cls, r->cls, sizeof r->cls);
        w->memo.absent = r->absent; /* allocated for this walk, so that its address identifies the replica set */
        w->memo.first = first;
        w->memo.last = last;
    }
    who->ntargets = (uint32_t)(last - first + 1);
    who->targets = w->memo.ranks;
    return TB_OK;
}

void tb__whole_range(const tb__cuts *c, const tb__slicing *slicing, int64_t k, const tb__cell *cell,
                     const tb__receivers *r, int64_t *first, int64_t *last) {
    tb__wide volume = (uint64_t)cell->volume;
    tb__wide from = tb__part_start(c, k), to = tb__part_start(c, k + 1) + slicing->hi;
    *first = from < r->position + slicing->lo ? 0 : (int64_t)tb__wide_div(from - slicing->lo - r->position, volume) + 1;
    *last = to < r->position + volume ? -1 : (int64_t)tb__wide_div(to - volume - r->position, volume);
    if (*last >= r->count)
        *last = r->count - 1;
}

void tb__record_cut(tb__walk *w, const tb__slicing *slicing, const tb__cuts *c, int64_t k, tb__wide position,
                    tb__wide weight) {
    bool is_cut = tb__part_start(c, k) > position || tb__part_start(c, k + 1) < position + weight;
    if (is_cut && slicing->lo + slicing->hi > w->routes->max_slice)
        w->routes->max_slice = slicing->lo + slicing->hi;
}

tb_status tb__emit_local(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, int32_t rank, int64_t m,
                         const int32_t *dst_holder) {
    tb__parties who = {.ntargets = 1};
    TB_TRY(tb__set_source(w, set, m, &who));
    memcpy(who.first_holder, dst_holder, sizeof who.first_holder);
    memcpy(who.own_holder, dst_holder, sizeof who.own_holder);
    who.targets = tb__one_rank(w, rank);
    if (!who.targets)
        return TB_NO_MEMORY;
    return tb__emit(w, set, cell, &who, NULL, NULL);
}
