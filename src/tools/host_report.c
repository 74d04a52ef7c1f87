/* What a plan sends from host to host, and by which ways broadcasts get there. */
#include "tools/tools.h"

#include <inttypes.h>

enum { MOST_ROWS = 32 }; /* of a table, unless all are asked for */

static tb_status fill(tool_load *load, const tool_plan_view *plan, const tb_ir_opts *opts) {
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "tensor",
                           .shape = plan->shape,
                           .src = plan->src,
                           .dst = plan->dst,
                           .src_dtype = plan->dtype,
                           .dst_dtype = plan->dtype};
    return tool_load_fill(load, &spec, 1, plan->stats.ranks, (size_t)plan->stats.nranks, opts);
}

static void add_rest(tb__text *out, size_t shown, size_t count) {
    if (shown < count)
        tb__text_add(out, "%sthe first %zu of %zu; --all shows the others%s\n", tool_dim(), shown, count, tool_plain());
    tb__text_add(out, "\n");
}

void tool_add_load(tb__text *out, const tool_load *load, bool all) {
    tool_table table = {0}, ways = {0};
    size_t shown = all || load->host_links.count <= MOST_ROWS ? load->host_links.count : MOST_ROWS;
    tool_table_columns(&table, "#from host", "#to host", "#bytes", "#");
    for (size_t i = 0; i < shown; i++) {
        const tool_link *l = &load->host_links.item[i];
        tool_table_cell(&table, "%" PRId32, l->from);
        tool_table_cell(&table, "%" PRId32, l->to);
        tool_table_cell(&table, "%" PRId64, l->nbytes);
        tool_table_cell(&table, "%s", l->nbytes >= 1024 ? tool_size(l->nbytes).text : "");
    }
    tool_table_finish_below(&table, out);
    add_rest(out, shown, load->host_links.count);
    if (load->ways.count == 0)
        return;
    shown = all || load->ways.count <= MOST_ROWS ? load->ways.count : MOST_ROWS;
    tool_table_columns(&ways, "handed on from rank to rank", "#bytes", "#");
    for (size_t i = 0; i < shown; i++) {
        const tool_way *w = &load->ways.item[i];
        tool_table_cell(&ways, "%s", w->text);
        tool_table_cell(&ways, "%" PRId64, w->nbytes);
        tool_table_cell(&ways, "%s", w->nbytes >= 1024 ? tool_size(w->nbytes).text : "");
    }
    tool_table_finish(&ways, out);
    add_rest(out, shown, load->ways.count);
}

tb_status tool_add_hosts(tb__text *out, const tool_plan_view *plan, const tb_ir_opts *opts, bool all) {
    tool_load load = {0};
    tb_status status = fill(&load, plan, opts);
    if (status == TB_OK)
        tool_add_load(out, &load, all);
    tool_load_fini(&load);
    return status;
}

tb_status tool_hosts_json(const tool_plan_view *plan, const tb_ir_opts *opts, char **out) {
    tool_load load = {0};
    tb__text text = {0};
    tb_status status = fill(&load, plan, opts);
    tb__text_add(&text, "\"hosts\":[");
    for (size_t i = 0; i < load.host_links.count; i++)
        tb__text_add(&text, "%s{\"from\":%" PRId32 ",\"to\":%" PRId32 ",\"bytes\":%" PRId64 "}", i ? "," : "",
                     load.host_links.item[i].from, load.host_links.item[i].to, load.host_links.item[i].nbytes);
    tb__text_add(&text, "],\"ways\":[");
    for (size_t i = 0; i < load.ways.count; i++)
        tb__text_add(&text, "%s{\"way\":\"%s\",\"bytes\":%" PRId64 "}", i ? "," : "", load.ways.item[i].text,
                     load.ways.item[i].nbytes);
    tb__text_add(&text, "]");
    tool_load_fini(&load);
    if (status == TB_OK)
        return tb__text_take(&text, out);
    tb__text_fini(&text);
    return status;
}
