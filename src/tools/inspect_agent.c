/* tensorbus inspect agent:PATH: the tensors that programs have registered with an agent, and the devices they are on.
 */
#include "tools/agents.h"

#include <inttypes.h>

enum { TIMEOUT_MS = 5000 };

static void take_shape(tool_table *table, const json_t *tensor) {
    tb_shape shape = {0};
    tb__text text = {0};
    size_t i;
    json_t *length;
    json_array_foreach(json_object_get(tensor, "shape"), i, length) {
        if (shape.ndim < TB_MAX_DIMS)
            shape.dim[shape.ndim++] = json_integer_value(length);
    }
    tool_add_shape(&text, &shape);
    tool_table_take(table, &text);
}

static void add_batch(tb__text *out, const json_t *batch) {
    const json_t *list = json_object_get(batch, "list");
    tool_table table = {0};
    size_t i;
    json_t *tensor;
    tb__text_add(out, "\n%sbatch %s%s of %s (%" PRId64 "), %s, %zu tensors\n", tool_bold(), tool_json_text(batch, "id"),
                 tool_plain(), tool_json_text(batch, "client"), tool_json_int(batch, "pid"),
                 tool_json_text(batch, "state"), json_array_size(list));
    if (json_array_size(list) == 0)
        return;
    tool_table_columns(&table, "tensor", "pair", "dtype", "shape", "layout", "#bytes", "memory");
    json_array_foreach(list, i, tensor) {
        tool_table_cell(&table, "%s", tool_json_text(tensor, "name"));
        tool_table_cell(&table, "%s", tool_json_text(tensor, "pair"));
        tool_table_cell(&table, "%s", tool_json_text(tensor, "dtype"));
        take_shape(&table, tensor);
        tool_table_cell(&table, "%s", tool_json_text(tensor, "layout"));
        tool_table_cell(&table, "%" PRId64, tool_json_int(tensor, "bytes"));
        tool_table_cell(&table, "%s", tool_json_text(tensor, "memory"));
    }
    tool_table_finish(&table, out);
}

static void add_agent(tb__text *out, const char *path, const json_t *report) {
    const json_t *batches = json_object_get(report, "batches");
    size_t i;
    json_t *batch;
    tb__text_add(out, "agent    ");
    tool_add_seat(out, report);
    tb__text_add(out, ", ");
    tool_add_name(out, path);
    tb__text_add(out, "\nbatches  %zu\n", json_array_size(batches));
    json_array_foreach(batches, i, batch) {
        add_batch(out, batch);
    }
}

static void add_agent_json(tb__text *out, const char *path, const json_t *report) {
    char *batches = json_dumps(json_object_get(report, "batches"), JSON_COMPACT);
    tb__text_add(out, "{\"path\":");
    tb__text_add_json(out, path);
    tb__text_add(out, ",\"kind\":\"agent\",\"batches\":%s}\n", batches ? batches : "");
    out->failed |= !batches;
    free(batches);
}

int tool_inspect_agent(const char *socket, const char *token_file, bool is_json) {
    char token[TB__TOKEN_ROOM];
    tool_agents agents = {.socket = socket, .name = "tensorbus inspect", .lists_tensors = true};
    tb__text out = {0};
    tb_status status = token_file ? tool_read_token(token_file, token) : TB_OK;
    agents.token = token_file ? token : NULL;
    if (status == TB_OK)
        status = tool_agents_find(&agents);
    if (status == TB_OK)
        tool_agents_ask(&agents, TIMEOUT_MS);
    const tool_agent_view *view = status == TB_OK ? &agents.list.item[0] : NULL;
    if (view && !view->report) {
        status = tb__fail(view->status, "%s", view->why);
    } else if (view && is_json) {
        add_agent_json(&out, socket, view->report);
    } else if (view) {
        tool_json_clean(view->report);
        add_agent(&out, socket, view->report);
    }
    tool_agents_fini(&agents);
    return status == TB_OK ? tool_print(&out) : tool_fail_status(status);
}
