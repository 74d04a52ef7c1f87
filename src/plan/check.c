/* Checks a whole plan independently of how it was made: by boxes and index lists only, without replica sets, lines or
 * cuts. */
#include "plan/plan.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

/* Order-independent sum of the routes seen, so that two ends that list the same routes have the same sum. */
typedef struct fingerprint {
    uint64_t a, b;
} fingerprint;

typedef struct list_memo {
    int32_t coord; /* -1: none */
    tb__spans spans;
    tb__arena arena;
} list_memo;

typedef struct checker {
    const tb_plan *plan;
    tb_routes *routes;
    fingerprint received, sent;        /* per (source, target) */
    fingerprint combined, contributed; /* per (source, contributor) */
    list_memo src[TB_MAX_DIMS], dst[TB_MAX_DIMS];
    TB_VEC(const tb_route *) boxes;
} checker;

static void mix_hash(uint64_t *h, uint64_t value) {
    *h = (*h ^ value) * 0x9E3779B97F4A7C15U;
    *h ^= *h >> 32;
}

static void add_fingerprint(fingerprint *sum, const tb_plan *plan, const tb_route *route, int32_t peer) {
    uint64_t a = 1, b = 2;
    uint64_t head[] = {(uint64_t)route->source, (uint64_t)peer,  (uint64_t)route->order, route->src_cell,
                       route->dst_cell,         route->ntargets, route->ncontributors};
    for (size_t i = 0; i < sizeof head / sizeof *head; i++)
        mix_hash(&a, head[i]), mix_hash(&b, head[i]);
    for (uint32_t i = 0; i < route->ntargets; i++)
        mix_hash(&a, (uint64_t)route->targets[i]), mix_hash(&b, (uint64_t)route->targets[i]);
    for (uint32_t i = 0; i < route->ncontributors; i++)
        mix_hash(&a, (uint64_t)route->contributors[i]), mix_hash(&b, (uint64_t)route->contributors[i]);
    for (int d = 0; d < plan->shape.ndim; d++) {
        mix_hash(&a, (uint64_t)route->src.start[d]), mix_hash(&b, (uint64_t)route->src.start[d]);
        mix_hash(&a, (uint64_t)route->len[d]), mix_hash(&b, (uint64_t)route->len[d]);
    }
    sum->a += a;
    sum->b += b;
}

static bool same_fingerprint(fingerprint x, fingerprint y) {
    return x.a == y.a && x.b == y.b;
}

static tb_status list_of(const tb__axis *axis, int32_t coord, list_memo *memo, tb__spans *out) {
    if (memo->coord != coord) {
        tb__arena_reset(&memo->arena);
        TB_TRY(tb__axis_list(axis, coord, &memo->arena, &memo->spans));
        memo->coord = coord;
    }
    *out = memo->spans;
    return TB_OK;
}

/* The span that contains a position; count if it is past the end. */
static size_t span_at(tb__spans list, int64_t position) {
    size_t i = 0;
    TB_BISECT(i, list.count, list.item[i].offset + (list.item[i].stop - list.item[i].start) > position);
    return i;
}

/* Whether positions [a, a+len) of one list and [b, b+len) of another are the same indices. */
static bool same_indices(tb__spans x, int64_t a, tb__spans y, int64_t b, int64_t len) {
    if (a < 0 || b < 0)
        return false;
    for (size_t i = span_at(x, a), j = span_at(y, b); len > 0;) {
        if (i == x.count || j == y.count)
            return false;
        const tb__span *p = &x.item[i], *q = &y.item[j];
        int64_t at = p->start + (a - p->offset);
        if (at != q->start + (b - q->offset))
            return false;
        int64_t run = p->stop - at < q->stop - at ? p->stop - at : q->stop - at;
        run = run < len ? run : len;
        a += run;
        b += run;
        len -= run;
        i += at + run == p->stop;
        j += at + run == q->stop;
    }
    return true;
}

static tb_status check_contributors(const checker *c, const tb_route *route, const tb__place *source) {
    const tb__grid *grid = &c->plan->src;
    if (grid->partial.count == 0)
        return route->ncontributors == 0
                   ? TB_OK
                   : tb__fail(TB_INTERNAL, "the route has contributors, but the source is not Partial");
    if (route->ncontributors != (uint64_t)grid->partial.size)
        return tb__fail(TB_INTERNAL, "the route has %" PRIu32 " contributors, not %" PRId64, route->ncontributors,
                        grid->partial.size);
    for (uint32_t i = 0; i < route->ncontributors; i++) {
        tb__place place = *source;
        place.part = (int32_t)i;
        if (route->contributors[i] != tb__grid_rank(grid, &place))
            return tb__fail(TB_INTERNAL, "contributor %" PRIu32 " is the wrong rank, %" PRId32, i,
                            route->contributors[i]);
    }
    return TB_OK;
}

/* Checks a route of a target: at the given positions, the source must hold the same indices. */
static tb_status check_source(checker *c, const tb_route *route, const tb__place *target) {
    const tb_plan *plan = c->plan;
    tb__place source;
    if (!tb__grid_place(&plan->src, route->source, &source))
        return tb__fail(TB_INTERNAL, "source %" PRId32 " is not in the source mesh", route->source);
    for (int d = 0; d < plan->shape.ndim; d++) {
        tb__spans from, to;
        TB_TRY(list_of(&plan->src.axis[d], source.coord[d], &c->src[d], &from));
        TB_TRY(list_of(&plan->dst.axis[d], target->coord[d], &c->dst[d], &to));
        if (!same_indices(from, route->src.start[d], to, route->dst.start[d], route->len[d]))
            return tb__fail(TB_INTERNAL,
                            "rank %" PRId32 " holds other indices at %" PRId64 " than the target at %" PRId64
                            ", dim %d",
                            route->source, route->src.start[d], route->dst.start[d], d);
    }
    return check_contributors(c, route, &source);
}

static _Thread_local int sweep_dim; /* qsort has no argument for it */

static int compare_starts(const void *a, const void *b) {
    const tb_route *x = *(const tb_route *const *)a, *y = *(const tb_route *const *)b;
    int64_t s = x->dst.start[sweep_dim], t = y->dst.start[sweep_dim];
    return (s > t) - (s < t);
}

static bool boxes_overlap(const tb_route *a, const tb_route *b, int ndim) {
    for (int d = 0; d < ndim; d++) {
        if (a->dst.start[d] + a->len[d] <= b->dst.start[d] || b->dst.start[d] + b->len[d] <= a->dst.start[d])
            return false;
    }
    return true;
}

/* Sweeps along the dim that separates the boxes best. */
static tb_status check_disjoint(checker *c) {
    int ndim = c->plan->shape.ndim;
    size_t n = c->boxes.count, most = 0;
    int best = 0;
    if (n < 2)
        return TB_OK;
    for (int d = 0; d < ndim; d++) {
        size_t distinct = 1;
        sweep_dim = d;
        qsort(c->boxes.item, n, sizeof *c->boxes.item, compare_starts);
        for (size_t i = 1; i < n; i++)
            distinct += c->boxes.item[i]->dst.start[d] != c->boxes.item[i - 1]->dst.start[d];
        if (distinct > most) {
            most = distinct;
            best = d;
        }
    }
    sweep_dim = best;
    qsort(c->boxes.item, n, sizeof *c->boxes.item, compare_starts);
    for (size_t i = 0; i < n; i++) {
        const tb_route *a = c->boxes.item[i];
        for (size_t j = i + 1; j < n; j++) {
            const tb_route *b = c->boxes.item[j];
            if (ndim && b->dst.start[best] >= a->dst.start[best] + a->len[best])
                break;
            if (boxes_overlap(a, b, ndim))
                return tb__fail(TB_INTERNAL, "two boxes overlap, from ranks %" PRId32 " and %" PRId32, a->source,
                                b->source);
        }
    }
    return TB_OK;
}

static tb_status check_box(const tb_plan *plan, const tb_route *route) {
    int64_t volume = 1;
    for (int d = 0; d < plan->shape.ndim; d++) {
        if (route->len[d] < 1)
            return tb__fail(TB_INTERNAL, "a box is empty");
        volume *= route->len[d];
    }
    return volume == route->nelements
               ? TB_OK
               : tb__fail(TB_INTERNAL, "a box of %" PRId64 " elements, not %" PRId64, volume, route->nelements);
}

static tb_status check_rank(checker *c, int32_t rank) {
    const tb_plan *plan = c->plan;
    tb__place place;
    bool receives = tb__grid_place(&plan->dst, rank, &place);
    int64_t wanted = receives ? 1 : 0, covered = 0;
    for (int d = 0; d < plan->shape.ndim && receives; d++)
        wanted *= tb__axis_local(&plan->dst.axis[d], place.coord[d]);
    TB_TRY(tb_plan_routes(plan, rank, 0, c->routes));
    c->boxes.count = 0;
    for (size_t i = 0; i < tb_routes_count(c->routes); i++) {
        const tb_route *route = tb_routes_at(c->routes, i);
        bool mine = tb__has_int32(route->targets, route->ntargets, rank), sends = route->source == rank;
        TB_TRY(check_box(plan, route));
        if (mine) {
            if (route->source == TB_NO_RANK ? place.part == 0 : place.part != 0)
                return tb__fail(TB_INTERNAL, "the target gets values instead of zeros, or zeros instead of values");
            if (route->source != TB_NO_RANK)
                TB_TRY(check_source(c, route, &place));
            covered += route->nelements;
            if (!tb__vec_push(&c->boxes, route))
                return TB_NO_MEMORY;
        }
        if (route->source != TB_NO_RANK && mine)
            add_fingerprint(&c->received, plan, route, rank);
        for (uint32_t t = 0; t < route->ntargets && sends; t++)
            add_fingerprint(&c->sent, plan, route, route->targets[t]);
        for (uint32_t p = 0; p < route->ncontributors && sends; p++) {
            if (route->contributors[p] != rank)
                add_fingerprint(&c->combined, plan, route, route->contributors[p]);
        }
        if (!mine && !sends)
            add_fingerprint(&c->contributed, plan, route, rank);
    }
    if (covered != wanted)
        return tb__fail(TB_INTERNAL, "%" PRId64 " elements are written, not %" PRId64, covered, wanted);
    return check_disjoint(c);
}

static tb_status check_all(checker *c) {
    const tb_layout *sides[2] = {c->plan->src_layout, c->plan->dst_layout};
    for (int s = 0; s < 2; s++) {
        for (int32_t i = 0; i < sides[s]->nranks; i++) {
            int32_t rank = tb_layout_rank_at(sides[s], i);
            if (s == 1 && tb_layout_index_of(sides[0], rank) >= 0)
                continue;
            tb_status status = check_rank(c, rank);
            if (status != TB_OK)
                return tb__fail_within(status, "plan of rank %" PRId32, rank);
        }
    }
    if (!same_fingerprint(c->received, c->sent))
        return tb__fail(TB_INTERNAL, "senders and receivers have different routes");
    if (!same_fingerprint(c->combined, c->contributed))
        return tb__fail(TB_INTERNAL, "contributors and the ranks that combine have different routes");
    return TB_OK;
}

tb_status tb_plan_check(const tb_plan *plan) {
    checker c = {.plan = plan};
    for (int d = 0; d < TB_MAX_DIMS; d++)
        c.src[d].coord = c.dst[d].coord = -1;
    tb_status status = tb_routes_create(&c.routes);
    if (status == TB_OK)
        status = check_all(&c);
    for (int d = 0; d < TB_MAX_DIMS; d++) {
        tb__arena_fini(&c.src[d].arena);
        tb__arena_fini(&c.dst[d].arena);
    }
    free(c.boxes.item);
    tb_routes_destroy(c.routes);
    return status;
}
