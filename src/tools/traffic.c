/* Everybody's traffic: the routes of all senders, gathered by source and targets. */
#include "tools/tools.h"

#include "base/dtype.h"
#include "base/log.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

typedef struct outgoing {
    const tb_route *route;
} outgoing;

typedef TB_VEC(outgoing) outgoing_list;

bool tool_is_local(const tool_transfer *transfer) {
    return transfer->source == TB_NO_RANK || transfer->targets[0] == transfer->source;
}

static int compare_targets(const tb_route *a, const tb_route *b) {
    for (uint32_t i = 0; i < a->ntargets && i < b->ntargets; i++) {
        if (a->targets[i] != b->targets[i])
            return a->targets[i] < b->targets[i] ? -1 : 1;
    }
    return (a->ntargets > b->ntargets) - (a->ntargets < b->ntargets);
}

static int compare_routes(const void *left, const void *right) {
    const tb_route *a = ((const outgoing *)left)->route, *b = ((const outgoing *)right)->route;
    int order = compare_targets(a, b);
    return order ? order : (a->order > b->order) - (a->order < b->order);
}

static tb_status add_transfer(tool_plan_view *view, const outgoing *routes, size_t count) {
    const tb_route *first = routes[0].route;
    tool_transfer t = {.source = first->source, .ntargets = first->ntargets, .ncontributors = first->ncontributors};
    t.targets = tb__arena_alloc(&view->arena, t.ntargets, sizeof *t.targets);
    if (!t.targets)
        return TB_NO_MEMORY;
    memcpy(t.targets, first->targets, t.ntargets * sizeof *t.targets);
    memcpy(t.start, first->src.start, sizeof t.start);
    memcpy(t.len, first->len, sizeof t.len);
    t.nboxes = (int64_t)count;
    for (size_t i = 0; i < count; i++)
        t.nbytes += tb__dtype_bytes(view->dtype, routes[i].route->nelements);
    return tb__vec_push(&view->transfers, t) ? TB_OK : TB_NO_MEMORY;
}

/* Adds what `rank` sends, keeps, or fills with zeros. */
static tb_status add_rank(tool_plan_view *view, int32_t rank, tb_routes *routes, outgoing_list *list) {
    TB_TRY(tb_plan_routes(view->plan, rank, 0, routes));
    list->count = 0;
    for (size_t i = 0; i < tb_routes_count(routes); i++) {
        const tb_route *route = tb_routes_at(routes, i);
        bool is_mine = route->source == rank || (route->source == TB_NO_RANK && route->targets[0] == rank);
        if (is_mine && !tb__vec_push(list, (outgoing){route}))
            return TB_NO_MEMORY;
    }
    if (list->count > 1)
        qsort(list->item, list->count, sizeof *list->item, compare_routes);
    for (size_t i = 0, next; i < list->count; i = next) {
        next = i + 1;
        while (next < list->count && list->item[next].route->source == list->item[i].route->source &&
               compare_targets(list->item[next].route, list->item[i].route) == 0)
            next++;
        TB_TRY(add_transfer(view, list->item + i, next - i));
    }
    return TB_OK;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

tb_status tool_plan_view_init(tool_plan_view *view, tb_layout *src, tb_layout *dst, const tb_shape *shape,
                              tb_dtype dtype, const tb_plan_opts *opts) {
    *view = (tool_plan_view){.shape = *shape, .dtype = dtype, .src = src, .dst = dst};
    tb_status status = tb_plan_create(src, dst, shape, dtype, opts, &view->plan);
    if (status != TB_OK)
        tool_plan_view_fini(view);
    return status;
}

tb_status tool_plan_view_fill(tool_plan_view *view) {
    double start = now_ms();
    TB_TRY(tb_plan_check(view->plan));
    double checked = now_ms();
    view->stats.size = sizeof view->stats;
    TB_TRY(tb_plan_stats_compute(view->plan, &view->stats));
    tb_routes *routes;
    TB_TRY(tb_routes_create(&routes));
    outgoing_list list = {0};
    tb_status status = TB_OK;
    for (int32_t i = 0; i < view->stats.nranks && status == TB_OK; i++)
        status = add_rank(view, view->stats.ranks[i], routes, &list);
    free(list.item);
    tb_routes_destroy(routes);
    tb__log(TB_LOG_DEBUG, "checked the plan in %.1f ms; figures of %" PRId32 " ranks took %.1f ms", checked - start,
            view->stats.nranks, now_ms() - checked);
    return status;
}

void tool_plan_view_fini(tool_plan_view *view) {
    tb_plan_destroy(view->plan);
    tb_plan_stats_fini(&view->stats);
    tb_layout_destroy(view->src);
    tb_layout_destroy(view->dst);
    free(view->transfers.item);
    tb__arena_fini(&view->arena);
    *view = (tool_plan_view){0};
}
