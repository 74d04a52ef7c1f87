/* What one rank sends and receives: its place on the lines of the groups it has to do with, turned into routes. Sender
 * and receiver each find their own place, and cut a pair at the same slices, so the two lists agree without a word
 * exchanged. */
#include "plan/walk.h"

tb_status tb_plan_routes(const tb_plan *plan, int32_t rank, uint64_t rotation, tb_routes *routes) {
    routes->list.count = 0;
    routes->max_slice = 0;
    tb__arena_reset(&routes->arena);
    tb__walk w = {.plan = plan, .routes = routes, .arena = &routes->arena, .rank = rank, .rotation = rotation};
    tb_status status = tb__receive_all(&w);
    if (status == TB_OK)
        status = tb__send_all(&w);
    if (status != TB_OK)
        routes->list.count = 0;
    return status;
}

tb_status tb_routes_create(tb_routes **out) {
    tb_routes *routes = tb__calloc(1, sizeof *routes);
    if (!routes)
        return TB_NO_MEMORY;
    *out = routes;
    return TB_OK;
}

void tb_routes_destroy(tb_routes *routes) {
    if (!routes)
        return;
    free(routes->list.item);
    free(routes->ranks);
    tb__group_memory_destroy(routes->memory);
    tb__arena_fini(&routes->arena);
    free(routes);
}

size_t tb_routes_count(const tb_routes *routes) {
    return routes->list.count;
}

const tb_route *tb_routes_at(const tb_routes *routes, size_t i) {
    return &routes->list.item[i];
}
