/* Results as a table and as JSON lines. */
#include "bench/bench.h"

#include <inttypes.h>

static const char *const unit_keys[] = {
    [BENCH_GB_PER_S] = "gb_per_s", [BENCH_US] = "us", [BENCH_GB] = "gb", [BENCH_LAUNCHES] = "launches"};

bool bench_has_mark(const bench_result *result) {
    return result->at_least > 0 || result->at_most > 0 || result->at_least_of_limit > 0;
}

bool bench_is_reached(const bench_result *result) {
    if (result->reason)
        return !bench_has_mark(result);
    return (result->at_least == 0 || result->ratio >= result->at_least) &&
           result->limit_ratio >= result->at_least_of_limit &&
           (result->at_most == 0 || result->ratio <= result->at_most);
}

static void add_figure(tool_table *table, const bench_result *r, double value) {
    static const char *const units[] = {[BENCH_GB_PER_S] = "", [BENCH_US] = " us", [BENCH_GB] = " GB"};
    if (r->unit == BENCH_LAUNCHES)
        tool_table_cell(table, "%.0f", value);
    else
        tool_table_cell(table, "%.2f%s", value, units[r->unit]);
}

static void add_mark(tool_table *table, const bench_result *r) {
    if (r->at_least > 0)
        tool_table_cell(table, "at least %.2f", r->at_least);
    else if (r->at_most > 0)
        tool_table_cell(table, "at most %.2f", r->at_most);
    else if (r->at_least_of_limit > 0)
        tool_table_cell(table, "%.2f of limit", r->at_least_of_limit);
    else
        tool_table_cell(table, "%s", "");
    tool_table_cell(table, "%s", !bench_has_mark(r) ? "" : bench_is_reached(r) ? "ok" : "missed");
}

/* What lines have in the last column: extra memory, or with GPUs the ratio of all ranks at once. */
void bench_table_init(tool_table *table, bool with_gpu) {
    static const struct {
        const char *title;
        int width; /* of what any line has there */
        bool is_number;
    } columns[] = {{"name", 18, false}, {"work", 60, false},       {"GB/s", 8, true},     {"against", 24, false},
                   {"GB/s", 8, true},   {"ratio", 5, true},        {"of limit", 8, true}, {"mark", 13, true},
                   {"", 6, false},      {"extra memory", 12, true}};
    size_t n = sizeof columns / sizeof *columns;
    for (size_t i = 0; i < n; i++) {
        tool_table_column(table, with_gpu && i == n - 1 ? "ratio at once" : columns[i].title, columns[i].is_number);
        tool_table_width(table, columns[i].width);
    }
}

void bench_add_row(tb__text *out, tool_table *table, const bench_result *r) {
    if (r->reason) {
        tb__text_add(out, "%s: %s: %s\n", r->name, r->is_failure ? "failed" : "not measured", r->reason);
        return;
    }
    tool_table_cell(table, "%s", r->name);
    tool_table_cell(table, "%s", r->work);
    add_figure(table, r, r->ours);
    tool_table_cell(table, "%s", r->against);
    add_figure(table, r, r->theirs);
    tool_table_cell(table, "%.2f", r->ratio);
    if (r->limit_ratio > 0)
        tool_table_cell(table, "%.2f", r->limit_ratio);
    else
        tool_table_cell(table, "%s", "");
    add_mark(table, r);
    if (r->extra_bytes >= 0)
        tool_table_cell(table, "%s", tool_size(r->extra_bytes).text);
    else if (r->wall_ratio > 0)
        tool_table_cell(table, "%.2f", r->wall_ratio);
    else
        tool_table_cell(table, "%s", "");
    tool_table_flush(table, out);
}

void bench_add_json(tb__text *out, const bench_result *r, const char *gpu) {
    tb__text_add(out, "{\"name\":");
    tb__text_add_json(out, r->name);
    tb__text_add(out, ",\"work\":");
    tb__text_add_json(out, r->work);
    if (*gpu) {
        tb__text_add(out, ",\"gpu\":");
        tb__text_add_json(out, gpu);
    }
    if (r->reason) {
        tb__text_add(out, ",\"%s\":", r->is_failure ? "failed" : "not_measured");
        tb__text_add_json(out, r->reason);
        tb__text_add(out, "}\n");
        return;
    }
    const char *unit = unit_keys[r->unit];
    tb__text_add(out, ",\"%s\":%.3f,\"ratio\":%.3f,\"against\":", unit, r->ours, r->ratio);
    tb__text_add_json(out, r->against);
    tb__text_add(out, ",\"against_%s\":%.3f,\"rounds\":%d", unit, r->theirs, r->rounds);
    if (r->at_least > 0)
        tb__text_add(out, ",\"at_least\":%.2f", r->at_least);
    if (r->at_most > 0)
        tb__text_add(out, ",\"at_most\":%.2f", r->at_most);
    if (r->limit_ratio > 0)
        tb__text_add(out, ",\"of_limit\":%.3f", r->limit_ratio);
    if (r->at_least_of_limit > 0)
        tb__text_add(out, ",\"at_least_of_limit\":%.2f", r->at_least_of_limit);
    if (bench_has_mark(r))
        tb__text_add(out, ",\"ok\":%s", bench_is_reached(r) ? "true" : "false");
    if (r->wall_ratio > 0)
        tb__text_add(out, ",\"wall_ratio\":%.3f", r->wall_ratio);
    if (r->extra_bytes >= 0)
        tb__text_add(out, ",\"extra_bytes\":%" PRId64, r->extra_bytes);
    tb__text_add(out, "}\n");
}
