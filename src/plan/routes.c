/* The routes that one rank sends and receives, from its positions on the lines of replica sets. Sender and receiver
 * each compute their own positions, and cut a pair at the same slices, so the two lists agree without communication. */
#include "plan/walk.h"

static _Thread_local int merge_dim, merge_ndim; /* qsort has no argument for them */

/* Orders boxes so that those which differ along merge_dim only are neighbours, in ascending order. */
static int compare_for_merge(const void *a, const void *b) {
    const tb_route *x = a, *y = b;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    if (x->ntargets != y->ntargets)
        return x->ntargets < y->ntargets ? -1 : 1;
    if (x->targets[0] != y->targets[0])
        return x->targets[0] < y->targets[0] ? -1 : 1;
    for (int i = 0; i < merge_ndim; i++) {
        int d = (merge_dim + 1 + i) % merge_ndim; /* merge_dim last */
        if (x->src.start[d] != y->src.start[d])
            return x->src.start[d] < y->src.start[d] ? -1 : 1;
        if (x->dst.start[d] != y->dst.start[d])
            return x->dst.start[d] < y->dst.start[d] ? -1 : 1;
        if (d != merge_dim && x->len[d] != y->len[d])
            return x->len[d] < y->len[d] ? -1 : 1;
    }
    return 0;
}

static bool boxes_are_adjacent(const tb_route *x, const tb_route *y) {
    if (x->source != y->source || x->source == TB_NO_RANK || x->ntargets != 1 || y->ntargets != 1 ||
        x->targets[0] != y->targets[0])
        return false;
    for (int d = 0; d < merge_ndim; d++) {
        int64_t step = d == merge_dim ? x->len[d] : 0;
        if (x->src.start[d] + step != y->src.start[d] || x->dst.start[d] + step != y->dst.start[d] ||
            (d != merge_dim && x->len[d] != y->len[d]))
            return false;
    }
    return true;
}

/* Boxes of neighbouring classes can be contiguous at both ends. Both ends see the same boxes, and merge them alike. */
static void merge_boxes(tb_routes *routes, int ndim) {
    tb_route *list = routes->list.item;
    merge_ndim = ndim;
    for (int d = ndim - 1; d >= 0 && routes->list.count > 1; d--) {
        merge_dim = d;
        qsort(list, routes->list.count, sizeof *list, compare_for_merge);
        size_t kept = 1;
        for (size_t i = 1; i < routes->list.count; i++) {
            tb_route *last = &list[kept - 1];
            if (boxes_are_adjacent(last, &list[i])) {
                last->len[d] += list[i].len[d];
                last->nelements += list[i].nelements;
            } else {
                list[kept++] = list[i];
            }
        }
        routes->list.count = kept;
    }
}

tb_status tb_plan_routes(const tb_plan *plan, int32_t rank, uint64_t rotation, tb_routes *routes) {
    routes->list.count = 0;
    routes->max_slice = 0;
    tb__arena_reset(&routes->arena);
    tb__walk w = {.plan = plan, .routes = routes, .arena = &routes->arena, .rank = rank};
    w.rotation = rotation % plan->rotation_period;
    tb_status status = tb__receive_all(&w);
    if (status == TB_OK)
        status = tb__send_all(&w);
    if (status != TB_OK)
        routes->list.count = 0;
    else if (plan->has_tables)
        merge_boxes(routes, plan->shape.ndim);
    return status;
}

tb_status tb_routes_create(tb_routes **out) {
    tb_routes *routes = tb__calloc(1, sizeof *routes);
    if (!routes)
        return TB_NO_MEMORY;
    *out = routes;
    return TB_OK;
}

size_t tb__routes_nbytes(const tb_routes *routes) {
    return tb__mem_nbytes(routes) + tb__mem_nbytes(routes->list.item) + tb__mem_nbytes(routes->ranks) +
           tb__arena_nbytes(&routes->arena);
}

void tb_routes_destroy(tb_routes *routes) {
    if (!routes)
        return;
    free(routes->list.item);
    free(routes->ranks);
    tb__replica_set_memory_destroy(routes->memory);
    tb__arena_fini(&routes->arena);
    free(routes);
}

size_t tb_routes_count(const tb_routes *routes) {
    return routes->list.count;
}

const tb_route *tb_routes_at(const tb_routes *routes, size_t i) {
    return &routes->list.item[i];
}
