/* One rank's routes in a plan, as a table and as JSON. */
#include "tools/tools.h"

#include "base/dtype.h"
#include "ir/ir.h"

#include <inttypes.h>

static const char *verb(const tb_route *route, tb__role r) {
    if (route->source == TB_NO_RANK)
        return "fills with zeros";
    switch (r.mode) {
    case TB_LOCAL:
        return "copies";
    case TB_NONE:
        return "contributes";
    case TB_P2P:
    case TB_BROADCAST:
        break;
    }
    if (r.is_target)
        return r.is_source ? "receives, contributes" : "receives";
    return "sends";
}

static void add_row(tool_table *table, const tool_plan_view *view, const tb_route *route, int32_t rank,
                    bool has_contributors) {
    enum { MOST_RUNS = 5 };
    tb__role r = tb__route_role(route, rank);
    int64_t nbytes = tb__dtype_bytes(view->dtype, route->nelements);
    tb__text cell = {0};
    tool_table_cell(table, "%s", verb(route, r));
    if (r.mode == TB_LOCAL) {
        tb__text_add(&cell, "itself");
    } else if (route->source == rank) {
        tb__text_add(&cell, "to ");
        tool_add_ranks(&cell, route->targets, route->ntargets, MOST_RUNS);
    } else {
        tb__text_add(&cell, r.is_target ? "from %" PRId32 : "at %" PRId32, route->source);
    }
    tool_table_take(table, &cell);
    tool_table_cell(table, "%s", tb_chunk_mode_name(r.mode));
    if (route->source != TB_NO_RANK)
        tool_add_box(&cell, view->shape.ndim, route->src.start, route->len);
    else
        tb__text_add(&cell, "-");
    tool_table_take(table, &cell);
    tool_add_box(&cell, view->shape.ndim, route->dst.start, route->len);
    tool_table_take(table, &cell);
    if (has_contributors) {
        tool_add_ranks(&cell, route->contributors, route->ncontributors, MOST_RUNS);
        tool_table_take(table, &cell);
    }
    tool_table_cell(table, "%" PRId64, nbytes);
    tool_table_cell(table, "%s", nbytes >= 1024 ? tool_size(nbytes).text : "");
}

static void add_table(tb__text *out, const tool_plan_view *view, const tb_routes *routes, int32_t rank, bool all) {
    enum { MOST_ROWS = 32 };
    size_t count = tb_routes_count(routes), shown = all || count <= MOST_ROWS ? count : MOST_ROWS;
    bool has_contributors = false;
    for (size_t i = 0; i < shown; i++)
        has_contributors |= tb_routes_at(routes, i)->ncontributors > 0;
    tool_table table = {0};
    tool_table_columns(&table, "", "peer", "kind", "box at source", "box at target");
    if (has_contributors)
        tool_table_columns(&table, "reduced over");
    tool_table_columns(&table, "#bytes", "#");
    for (size_t i = 0; i < shown; i++)
        add_row(&table, view, tb_routes_at(routes, i), rank, has_contributors);
    tool_table_finish(&table, out);
    if (shown < count)
        tb__text_add(out, "%s%zu more; --all shows them%s\n", tool_dim(), count - shown, tool_plain());
}

tb_status tool_add_rank(tb__text *out, const tool_plan_view *view, int32_t rank, bool all) {
    tb_routes *routes;
    TB_TRY(tb_routes_create(&routes));
    tb_status status = tb_plan_routes(view->plan, rank, 0, routes);
    tool_add_plan_heading(out, view);
    tb__text_add(out, "%srank %" PRId32 "%s\n", tool_bold(), rank, tool_plain());
    bool is_in = tb_layout_index_of(view->src, rank) >= 0 || tb_layout_index_of(view->dst, rank) >= 0;
    if (status == TB_OK && tb_routes_count(routes) > 0)
        add_table(out, view, routes, rank, all);
    else if (status == TB_OK)
        tb__text_add(out, "neither sends nor receives: %s\n",
                     is_in ? "nothing of its part moves" : "it is in neither mesh");
    tb_routes_destroy(routes);
    return status;
}

static void add_ranks_json(tb__text *out, const char *key, const int32_t *ranks, uint32_t count) {
    tb__text_add(out, ",\"%s\":[", key);
    for (uint32_t i = 0; i < count; i++)
        tb__text_add(out, "%s%" PRId32, i ? "," : "", ranks[i]);
    tb__text_add(out, "]");
}

/* A box like a local's dims: per dimension [start,stop). */
static void add_box_json(tb__text *out, const char *key, int ndim, const int64_t *start, const int64_t *len) {
    tb__text_add(out, ",\"%s\":[", key);
    for (int d = 0; d < ndim; d++)
        tb__text_add(out, "%s[%" PRId64 ",%" PRId64 "]", d ? "," : "", start[d], start[d] + len[d]);
    tb__text_add(out, "]");
}

static void add_route_json(tb__text *out, const tool_plan_view *view, const tb_route *route, int32_t rank) {
    tb__role r = tb__route_role(route, rank);
    int ndim = view->shape.ndim;
    tb__text_add(out, "{\"kind\":\"%s\",\"is_source\":%s,\"is_target\":%s,\"source\":", tb_chunk_mode_name(r.mode),
                 r.is_source ? "true" : "false", r.is_target ? "true" : "false");
    if (route->source == TB_NO_RANK)
        tb__text_add(out, "null");
    else
        tb__text_add(out, "%" PRId32, route->source);
    add_ranks_json(out, "targets", route->targets, route->ntargets);
    add_ranks_json(out, "contributors", route->contributors, route->ncontributors);
    if (route->source == TB_NO_RANK)
        tb__text_add(out, ",\"src\":null");
    else
        add_box_json(out, "src", ndim, route->src.start, route->len);
    add_box_json(out, "dst", ndim, route->dst.start, route->len);
    tb__text_add(out, ",\"bytes\":%" PRId64 "}", tb__dtype_bytes(view->dtype, route->nelements));
}

tb_status tool_add_rank_json(tb__text *out, const tool_plan_view *view, int32_t rank) {
    tb_routes *routes;
    TB_TRY(tb_routes_create(&routes));
    tb_status status = tb_plan_routes(view->plan, rank, 0, routes);
    tb__text_add(out, "{\"rank\":%" PRId32 ",\"routes\":[", rank);
    for (size_t i = 0; status == TB_OK && i < tb_routes_count(routes); i++) {
        tb__text_add(out, i ? "," : "");
        add_route_json(out, view, tb_routes_at(routes, i), rank);
    }
    tb__text_add(out, "]}\n");
    tb_routes_destroy(routes);
    return status;
}
