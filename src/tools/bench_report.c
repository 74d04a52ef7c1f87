/* Results as a table and as JSON lines. */
#include "tools/bench.h"

#include <inttypes.h>

bool bench_is_reached(const bench_result *result) {
    return result->at_least == 0 || result->ratio >= result->at_least;
}

void bench_add_table(tb__text *out, const bench_results *results) {
    tool_table table = {0};
    tool_table_column(&table, "name", false);
    tool_table_column(&table, "work", false);
    tool_table_column(&table, "GB/s", true);
    tool_table_column(&table, "against", false);
    tool_table_column(&table, "GB/s", true);
    tool_table_column(&table, "ratio", true);
    tool_table_column(&table, "at least", true);
    tool_table_column(&table, "", false);
    tool_table_column(&table, "extra memory", true);
    for (size_t i = 0; i < results->count; i++) {
        const bench_result *r = &results->item[i];
        if (r->reason)
            continue;
        tool_table_cell(&table, "%s", r->name);
        tool_table_cell(&table, "%s", r->work);
        tool_table_cell(&table, "%.2f", r->gb_per_s);
        tool_table_cell(&table, "%s", r->against);
        tool_table_cell(&table, "%.2f", r->against_gb_per_s);
        tool_table_cell(&table, "%.2f", r->ratio);
        if (r->at_least > 0)
            tool_table_cell(&table, "%.2f", r->at_least);
        else
            tool_table_cell(&table, "%s", "");
        tool_table_cell(&table, "%s", r->at_least == 0 ? "" : bench_is_reached(r) ? "ok" : "below");
        if (r->extra_bytes >= 0)
            tool_table_cell(&table, "%s", tool_size(r->extra_bytes).text);
        else
            tool_table_cell(&table, "%s", "");
    }
    tool_table_finish(&table, out);
    for (size_t i = 0; i < results->count; i++) {
        if (results->item[i].reason)
            tb__text_add(out, "%s: not measured: %s\n", results->item[i].name, results->item[i].reason);
    }
}

static void add_result(tb__text *out, const bench_result *r) {
    tb__text_add(out, "{\"name\":");
    tb__text_add_json(out, r->name);
    tb__text_add(out, ",\"work\":");
    tb__text_add_json(out, r->work);
    if (r->reason) {
        tb__text_add(out, ",\"not_measured\":");
        tb__text_add_json(out, r->reason);
        tb__text_add(out, "}\n");
        return;
    }
    tb__text_add(out, ",\"gb_per_s\":%.3f,\"ratio\":%.3f,\"against\":", r->gb_per_s, r->ratio);
    tb__text_add_json(out, r->against);
    tb__text_add(out, ",\"against_gb_per_s\":%.3f,\"rounds\":%d", r->against_gb_per_s, r->rounds);
    if (r->at_least > 0)
        tb__text_add(out, ",\"at_least\":%.2f,\"ok\":%s", r->at_least, bench_is_reached(r) ? "true" : "false");
    if (r->extra_bytes >= 0)
        tb__text_add(out, ",\"extra_bytes\":%" PRId64, r->extra_bytes);
    tb__text_add(out, "}\n");
}

void bench_add_json(tb__text *out, const bench_results *results) {
    for (size_t i = 0; i < results->count; i++)
        add_result(out, &results->item[i]);
}
