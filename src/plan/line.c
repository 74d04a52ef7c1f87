/* Replica sets, cells, and positions on a replica set's line. */
#include "plan/line.h"

#include "base/int.h"

#include <string.h>

int64_t tb__holders_count(const tb__grid *grid, const int32_t *cls, int64_t nparts) {
    int64_t count = grid->copies.size * nparts;
    for (int d = 0; d < grid->shape.ndim; d++)
        count *= tb__axis_nholders(&grid->axis[d], cls[d]);
    return count;
}

int32_t tb__holder_rank(const tb__grid *grid, const int32_t *cls, int64_t nparts, int64_t index, int32_t *holder) {
    tb__place place;
    place.part = (int32_t)(index % nparts);
    index /= nparts;
    place.copy = (int32_t)(index % grid->copies.size);
    index /= grid->copies.size;
    for (int d = grid->shape.ndim - 1; d >= 0; d--) {
        int32_t n = tb__axis_nholders(&grid->axis[d], cls[d]);
        holder[d] = (int32_t)(index % n);
        index /= n;
        place.coord[d] = tb__axis_holder(&grid->axis[d], cls[d], holder[d]);
    }
    return tb__grid_rank(grid, &place);
}

int64_t tb__holder_index(const tb__grid *grid, const int32_t *cls, int64_t nparts, const int32_t *holder, int32_t copy,
                         int32_t part) {
    int64_t index = 0;
    for (int d = 0; d < grid->shape.ndim; d++)
        index = index * tb__axis_nholders(&grid->axis[d], cls[d]) + holder[d];
    return (index * grid->copies.size + copy) * nparts + part;
}

void tb__pairing_init(const tb_plan *plan, int d, tb__pairing *pairing) {
    const tb__axis *axis = &plan->dst.axis[d];
    pairing->before = tb__axis_before(axis, pairing->dst_class, pairing->src, pairing->tally);
    tb__wide upto = tb__axis_before(axis, pairing->dst_class + 1, pairing->src, pairing->tally);
    tb__wide pairs = upto - pairing->before;
    uint64_t weight = tb__class_weight(plan, d, pairing->dst_class);
    pairing->count = (int64_t)(weight == 1 ? pairs : tb__wide_div(pairs, weight));
    pairing->runs_holder = -1;
}

void tb__cell_init(const tb_plan *plan, tb__cell *cell) {
    int n = plan->shape.ndim;
    tb__wide after[TB_MAX_DIMS + 1]; /* pairs per index of the axes before, over all target classes of those after */
    after[n] = tb__copies_weight(plan);
    for (int d = n - 1; d >= 0; d--)
        after[d] = after[d + 1] * cell->dim[d]->total;
    cell->start = 0;
    cell->volume = 1;
    cell->nreceivers = plan->dst.copies.size;
    tb__wide pairs = 1;
    for (int d = 0; d < n; d++) {
        const tb__pairing *p = cell->dim[d];
        cell->start += pairs * p->before * after[d + 1];
        pairs *= (tb__wide)(uint64_t)p->count * tb__class_weight(plan, d, p->dst_class);
        cell->volume *= p->count;
        cell->nreceivers *= tb__axis_nholders(&plan->dst.axis[d], p->dst_class);
    }
}

void tb__cell_classes(const tb_plan *plan, const tb__cell *cell, int32_t *cls) {
    for (int d = 0; d < plan->shape.ndim; d++)
        cls[d] = cell->dim[d]->dst_class;
}

tb_status tb__pairing_runs(const tb_plan *plan, int d, tb__pairing *pairing, int32_t src_holder, tb__arena *arena) {
    if (pairing->runs_holder == src_holder)
        return TB_OK;
    tb__spans src = pairing->src, dst = pairing->dst;
    int32_t nholders = tb__axis_nholders(&plan->dst.axis[d], pairing->dst_class);
    size_t i = 0, j = 0; /* walk the shorter list, and search the longer one */
    if (src.count && dst.count) {
        tb__spans longer = src.count > dst.count ? src : dst;
        int64_t first = src.count > dst.count ? dst.item[0].start : src.item[0].start;
        size_t *at = src.count > dst.count ? &i : &j;
        TB_BISECT(*at, longer.count, longer.item[*at].stop > first);
    }
    size_t capacity = 0, count = 0;
    tb__run *runs = NULL;
    while (i < src.count && j < dst.count) {
        const tb__span *a = &src.item[i], *b = &dst.item[j];
        int64_t start = a->start > b->start ? a->start : b->start;
        int64_t stop = a->stop < b->stop ? a->stop : b->stop;
        if (start < stop) {
            tb__run run = {tb__span_offset(a, src_holder) + (start - a->start), stop - start, b, start - b->start};
            tb__run *last = count ? &runs[count - 1] : NULL;
            bool joins = last && last->src + last->len == run.src;
            for (int32_t h = 0; joins && h < nholders; h++)
                joins = tb__span_offset(last->dst, h) + last->shift + last->len == tb__span_offset(b, h) + run.shift;
            if (joins) {
                last->len += run.len;
            } else {
                if (count == capacity) {
                    capacity = capacity ? 2 * capacity : 4;
                    tb__run *grown = tb__arena_alloc(arena, capacity, sizeof *grown);
                    if (!grown)
                        return TB_NO_MEMORY;
                    if (count)
                        memcpy(grown, runs, count * sizeof *grown);
                    runs = grown;
                }
                runs[count++] = run;
            }
        }
        if (a->stop < b->stop)
            i++;
        else
            j++;
    }
    pairing->runs = runs;
    pairing->nruns = count;
    pairing->runs_holder = src_holder;
    return TB_OK;
}

tb_status tb__axis_list_pairings(const tb_plan *plan, int d, int32_t coord, tb__axis_pairings *out, tb__arena *arena) {
    const tb__axis *src = &plan->src.axis[d], *dst = &plan->dst.axis[d];
    const tb__slot *slot;
    size_t nslots, capacity = 0;
    *out = (tb__axis_pairings){0};
    TB_TRY(tb__axis_slots(dst, coord, arena, &slot, &nslots));
    for (size_t i = 0; i < nslots; i++) {
        tb__spans mine;
        const int32_t *cls;
        size_t nclasses;
        TB_TRY(tb__axis_class(dst, slot[i].cls, arena, &mine));
        TB_TRY(tb__axis_meeting(src, mine, arena, &cls, &nclasses));
        if (out->count + nclasses > capacity) {
            capacity = 2 * out->count + nclasses;
            tb__pairing *pairing = tb__arena_alloc(arena, capacity, sizeof *pairing);
            int32_t *holder = tb__arena_alloc(arena, capacity, sizeof *holder);
            if (!pairing || !holder)
                return TB_NO_MEMORY;
            if (out->count) {
                memcpy(pairing, out->pairing, out->count * sizeof *pairing);
                memcpy(holder, out->holder, out->count * sizeof *holder);
            }
            out->pairing = pairing;
            out->holder = holder;
        }
        for (size_t j = 0; j < nclasses; j++) {
            tb__pairing *p = &out->pairing[out->count];
            *p = (tb__pairing){.src_class = cls[j], .dst_class = slot[i].cls, .dst = mine};
            TB_TRY(tb__axis_class(src, cls[j], arena, &p->src));
            TB_TRY(tb__axis_tally(dst, p->src, tb__counts_once(plan), arena, &p->tally));
            p->total = tb__axis_before(dst, tb__axis_nclasses(dst), p->src, p->tally);
            tb__pairing_init(plan, d, p);
            out->holder[out->count++] = slot[i].holder;
        }
    }
    return TB_OK;
}

void tb__replica_set_cell(const tb_plan *plan, const tb__replica_set *set, const int32_t *cls, tb__pairing *pairing,
                          tb__cell *cell) {
    for (int d = 0; d < plan->shape.ndim; d++) {
        tb__pairing *p = &pairing[d];
        *p = (tb__pairing){.src_class = set->cls[d],
                           .dst_class = cls[d],
                           .src = set->spans[d],
                           .tally = set->tally[d],
                           .total = set->total[d]};
        tb__pairing_init(plan, d, p);
        cell->dim[d] = p;
    }
    tb__cell_init(plan, cell);
}

tb_status tb__cell_lists(const tb_plan *plan, tb__cell *cell, tb__arena *arena) {
    for (int d = 0; d < plan->shape.ndim; d++)
        TB_TRY(tb__axis_class(&plan->dst.axis[d], cell->dim[d]->dst_class, arena, &cell->dim[d]->dst));
    return TB_OK;
}
