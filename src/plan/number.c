/* The index of a box among all boxes of its target, by target offset. Both ends of a transfer need it, so it must
 * follow from the target's boxes alone.
 *
 * Where no cell is ever cut among replicas, a target's boxes are a product of per-axis runs, and the index has a closed
 * form: a source with a thousand targets does not list the boxes of each. Otherwise the target's boxes are listed. */
#include "plan/line.h"

#include "base/index.h"
#include "base/int.h"

#include <string.h>

/* Sorted beginnings: of runs of one coordinate of one axis, or of boxes of one target. */
typedef struct starts {
    int32_t key; /* the coordinate, or the target */
    int axis;    /* -1: of boxes */
    int64_t *at;
    size_t count;
} starts;

typedef struct numbering {
    const tb_plan *plan;
    uint64_t rotation;
    tb_routes *others; /* of targets */
    tb__arena arena;
    TB_VEC(starts) known;
    tb__index by_key;
} numbering;

static tb_status run_starts(numbering *n, int d, int32_t coord, starts *out) {
    tb__axis_pairings pairings;
    TB_TRY(tb__axis_list_pairings(n->plan, d, coord, &pairings, &n->arena));
    size_t count = 0;
    for (size_t i = 0; i < pairings.count; i++) {
        TB_TRY(tb__pairing_runs(n->plan, d, &pairings.pairing[i], 0, &n->arena));
        count += pairings.pairing[i].nruns;
    }
    out->at = tb__arena_alloc(&n->arena, count, sizeof *out->at);
    if (!out->at)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < pairings.count; i++) {
        const tb__pairing *p = &pairings.pairing[i];
        for (size_t r = 0; r < p->nruns; r++)
            out->at[out->count++] = tb__span_offset(p->runs[r].dst, pairings.holder[i]) + p->runs[r].shift;
    }
    return TB_OK;
}

/* Row-major offset of a route's box in the local tensor of a target. */
static int64_t offset_in(const tb_plan *plan, const tb__place *place, const tb_box *box) {
    int64_t offset = 0;
    for (int d = 0; d < plan->shape.ndim; d++)
        offset = offset * tb__axis_local(&plan->dst.axis[d], place->coord[d]) + box->start[d];
    return offset;
}

static tb_status box_starts(numbering *n, int32_t target, starts *out) {
    tb__place place;
    tb__grid_place(&n->plan->dst, target, &place);
    TB_TRY(tb_plan_routes(n->plan, target, n->rotation, n->others));
    size_t count = tb_routes_count(n->others);
    out->at = tb__arena_alloc(&n->arena, count, sizeof *out->at);
    if (!out->at)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        const tb_route *route = tb_routes_at(n->others, i);
        for (uint32_t t = 0; t < route->ntargets; t++) {
            if (route->targets[t] == target)
                out->at[out->count++] = offset_in(n->plan, &place, &route->dst);
        }
    }
    return TB_OK;
}

static tb_status find_starts(numbering *n, int axis, int32_t key, const starts **out) {
    uint64_t hash = tb__hash((uint64_t)axis + 1, (uint64_t)key);
    size_t probe = 0, at;
    while ((at = tb__index_next(&n->by_key, hash, &probe)) != TB__NOWHERE) {
        *out = &n->known.item[at];
        if ((*out)->axis == axis && (*out)->key == key)
            return TB_OK;
    }
    starts new = {.key = key, .axis = axis};
    TB_TRY(axis < 0 ? box_starts(n, key, &new) : run_starts(n, axis, key, &new));
    qsort(new.at, new.count, sizeof *new.at, tb__compare_int64);
    if (!tb__vec_reserve(&n->known, 1) || !tb__index_add(&n->by_key, hash, n->known.count))
        return TB_NO_MEMORY;
    *out = &n->known.item[n->known.count];
    n->known.item[n->known.count++] = new;
    return TB_OK;
}

static size_t index_of(const starts *s, int64_t start) {
    size_t i = 0;
    TB_BISECT(i, s->count, s->at[i] >= start);
    return i;
}

static bool never_cuts(const tb_plan *plan) {
    bool single = plan->src.copies.size * plan->src.partial.size == 1 || plan->unbalanced;
    return single && !plan->has_tables && !plan->hosts;
}

static tb_status number_route(numbering *n, bool is_product, const tb_route *route, uint64_t *out) {
    const starts *s;
    tb__place place;
    if (route->source == TB_NO_RANK) {
        *out = 0;
        return TB_OK;
    }
    if (!is_product) {
        TB_TRY(find_starts(n, -1, route->targets[0], &s));
        *out = index_of(s, route->order);
        return TB_OK;
    }
    tb__grid_place(&n->plan->dst, route->targets[0], &place);
    uint64_t index = 0, scale = 1;
    int64_t left = route->order;
    for (int d = n->plan->shape.ndim - 1; d >= 0; d--) {
        int64_t length = tb__axis_local(&n->plan->dst.axis[d], place.coord[d]);
        TB_TRY(find_starts(n, d, place.coord[d], &s));
        index += index_of(s, left % length) * scale;
        scale *= s->count;
        left /= length;
    }
    *out = index;
    return TB_OK;
}

tb_status tb__plan_number(const tb_plan *plan, uint64_t rotation, const tb_routes *routes, uint32_t **out) {
    numbering n = {.plan = plan, .rotation = rotation};
    size_t count = tb_routes_count(routes);
    uint32_t *numbers = tb__malloc(count, sizeof *numbers);
    tb_status status = numbers ? tb_routes_create(&n.others) : TB_NO_MEMORY;
    bool is_product = never_cuts(plan);
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        uint64_t index = 0;
        status = number_route(&n, is_product, tb_routes_at(routes, i), &index);
        if (status == TB_OK && index > UINT32_MAX)
            status = tb__fail(TB_TOO_BIG, "a target's part is cut into more than 2^32 boxes");
        numbers[i] = (uint32_t)index;
    }
    tb_routes_destroy(n.others);
    tb__arena_fini(&n.arena);
    free(n.known.item);
    tb__index_fini(&n.by_key);
    if (status != TB_OK) {
        free(numbers);
        return status;
    }
    *out = numbers;
    return TB_OK;
}
