/* What one rank does in a plan: its routes, as a table and as JSON. */
#include "tools/tools.h"

#include <inttypes.h>

/* A rank's part in a route. */
typedef struct role {
    bool is_source, is_target, is_contributor;
    tb_transport_kind kind;
} role;

static bool is_among(int32_t rank, const int32_t *ranks, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (ranks[i] == rank)
            return true;
    }
    return false;
}

static role role_of(const tb_route *route, int32_t rank) {
    role r = {.is_source = route->source == rank,
              .is_target = is_among(rank, route->targets, route->ntargets),
              .is_contributor = is_among(rank, route->contributors, route->ncontributors)};
    if (!r.is_source && !r.is_target)
        r.kind = TB_NONE;
    else if (route->source == TB_NO_RANK || route->source == route->targets[0])
        r.kind = TB_LOCAL;
    else
        r.kind = route->ntargets > 1 ? TB_BROADCAST : TB_P2P;
    return r;
}

static const char *verb(const tb_route *route, role r) {
    if (route->source == TB_NO_RANK)
        return "fills with zeros";
    if (r.is_source)
        return r.is_target ? "copies" : "sends";
    if (r.is_target)
        return r.is_contributor ? "receives, contributes" : "receives";
    return "contributes";
}

static void add_row(tool_table *table, const tool_plan_view *view, const tb_route *route, int32_t rank,
                    bool has_contributors) {
    enum { MOST_RUNS = 5 };
    role r = role_of(route, rank);
    int64_t nbytes = tool_route_bytes(route, view->dtype);
    tb__text cell = {0};
    tool_table_cell(table, "%s", verb(route, r));
    if (r.kind == TB_LOCAL) {
        tb__text_add(&cell, "itself");
    } else if (r.is_source) {
        tb__text_add(&cell, "to ");
        tool_add_ranks(&cell, route->targets, route->ntargets, MOST_RUNS);
    } else {
        tb__text_add(&cell, r.is_target ? "from %" PRId32 : "at %" PRId32, route->source);
    }
    tool_table_take(table, &cell);
    tool_table_cell(table, "%s", tb_transport_kind_name(r.kind));
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
    tool_table_column(&table, "", false);
    tool_table_column(&table, "peer", false);
    tool_table_column(&table, "kind", false);
    tool_table_column(&table, "box at source", false);
    tool_table_column(&table, "box at target", false);
    if (has_contributors)
        tool_table_column(&table, "reduced over", false);
    tool_table_column(&table, "bytes", true);
    tool_table_column(&table, "", true);
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
    role r = role_of(route, rank);
    int ndim = view->shape.ndim;
    tb__text_add(out, "{\"kind\":\"%s\",\"is_source\":%s,\"is_target\":%s,\"source\":", tb_transport_kind_name(r.kind),
                 r.is_source || r.is_contributor ? "true" : "false", r.is_target ? "true" : "false");
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
    tb__text_add(out, ",\"bytes\":%" PRId64 "}", tool_route_bytes(route, view->dtype));
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
