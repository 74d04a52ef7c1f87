/* tensorbus diff: how two checkpoints differ, tensor by tensor. */
#include "reshard/disk_diff.h"
#include "tools/tools.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SPEC, ATOL, RTOL, ALL, JSON, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [SPEC] = {"spec", "FILE", "the spec that converts the first to the second; default: equal names, unsharded"},
    [ATOL] = {"atol", "X", "elements differ if |a - b| > ATOL + RTOL * |b|; default: 0"},
    [RTOL] = {"rtol", "X", "default: 0"},
    [ALL] = {"all", NULL, "also list tensors that do not differ"},
    [JSON] = {"json", NULL, "print JSON"},
};

static const char details[] =
    "Compares values, not dtypes: an f32 and a bf16 element with the same number are equal, and NaNs are equal.\n"
    "For each tensor that differs, the command prints the number of elements that differ, the largest\n"
    "difference with its index, and the mean difference of all elements. With --spec, which is one of\n"
    "`tensorbus reshard`, the checkpoints may be sharded, with other names and fused tensors: the first is the\n"
    "source of the spec, the second has the form of its target.\n"
    "\n"
    "The exit status is 0 if all tensors are within the tolerances, 1 if something differs or fails, 2 for bad\n"
    "input.\n"
    "\n"
    "Examples:\n"
    "  tensorbus diff model copy\n"
    "  tensorbus diff model_f32 model_bf16 --rtol 0.01\n"
    "  tensorbus diff model step_1000 --spec hf_to_tp4.json\n";

typedef struct report {
    bool is_json, has_all;
    size_t nequal, ndifferent;
    tb__text json;
    tool_table table;
} report;

static void add_index(tb__text *out, const tb__diff *d) {
    for (int i = 0; i < d->shape.ndim; i++)
        tb__text_add(out, "%s%" PRId64, i ? "," : "", d->index[i]);
}

static void add_number(tb__text *out, double x) {
    if (isfinite(x))
        tb__text_add(out, "%.9g", x);
    else
        tb__text_add(out, "null");
}

static void add_json(report *r, const tb__diff *d) {
    tb__text *out = &r->json;
    tb__text_add(out, "%s{\"name\":", out->count ? "," : "");
    tb__text_add_json(out, d->name);
    if (d->is_missing || d->has_other_shape) {
        tb__text_add(out, d->is_missing ? ",\"missing_in\":\"b\"}" : ",\"other_shape\":true}");
        return;
    }
    tb__text_add(out, ",\"a\":\"%s\",\"b\":\"%s\",\"elements\":%" PRId64 ",\"different\":%" PRId64 ",\"largest\":",
                 tb_dtype_name(d->a), tb_dtype_name(d->b), d->nelements, d->ndifferent);
    add_number(out, d->largest);
    tb__text_add(out, ",\"mean\":");
    add_number(out, d->mean);
    if (d->rank != TB_NO_RANK) {
        tb__text_add(out, ",\"rank\":%" PRId32 ",\"index\":[", d->rank);
        add_index(out, d);
        tb__text_add(out, "]");
    }
    tb__text_add(out, "}");
}

static void add_row(report *r, const tb__diff *d) {
    tool_table_cell(&r->table, "%s", d->name);
    if (d->is_missing || d->has_other_shape) {
        tool_table_cell(&r->table, d->is_missing ? "not in the second" : "of another shape");
        for (int i = 0; i < 3; i++)
            tool_table_cell(&r->table, " ");
        return;
    }
    tb__text where = {0};
    if (d->rank != TB_NO_RANK) {
        tb__text_add(&where, "[");
        add_index(&where, d);
        tb__text_add(&where, "], rank %" PRId32, d->rank);
    } else {
        tb__text_add(&where, " ");
    }
    tool_table_cell(&r->table, "%" PRId64 " of %" PRId64, d->ndifferent, d->nelements);
    tool_table_cell(&r->table, "%.6g", d->largest);
    tool_table_cell(&r->table, "%.6g", d->mean);
    tool_table_take(&r->table, &where);
}

static tb_status found(void *arg, const tb__diff *d) {
    report *r = arg;
    bool differs = d->is_missing || d->has_other_shape || d->ndifferent > 0;
    r->nequal += !differs;
    r->ndifferent += differs;
    if (!differs && !r->has_all)
        return TB_OK;
    if (r->is_json)
        add_json(r, d);
    else
        add_row(r, d);
    return TB_OK;
}

static tb_status only_b(void *arg, const char *name) {
    report *r = arg;
    r->ndifferent++;
    if (r->is_json) {
        tb__text_add(&r->json, "%s{\"name\":", r->json.count ? "," : "");
        tb__text_add_json(&r->json, name);
        tb__text_add(&r->json, ",\"missing_in\":\"a\"}");
        return TB_OK;
    }
    tool_table_cell(&r->table, "%s", name);
    tool_table_cell(&r->table, "not in the first");
    for (int i = 0; i < 3; i++)
        tool_table_cell(&r->table, " ");
    return TB_OK;
}

static tb_status read_tolerance(const char *text, const char *name, double *out) {
    char *end = NULL;
    if (!text)
        return TB_OK;
    *out = strtod(text, &end);
    return end != text && !*end && isfinite(*out) && *out >= 0
               ? TB_OK
               : tb__fail(TB_INVALID, "--%s: '%.40s' is not a number from 0 on", name, text);
}

static tb_status compare(const char *const *value, report *r) {
    static const char same[] = "{\"rules\": [{\"match\": \"*\"}]}";
    tb__diff_opts opts = {0};
    tb__spec *spec = NULL;
    tb__disk *disk = NULL;
    if (!value[TOOL_SECOND_OPERAND])
        return tb__fail(TB_INVALID, "the second checkpoint is missing");
    TB_TRY(read_tolerance(value[ATOL], "atol", &opts.absolute));
    TB_TRY(read_tolerance(value[RTOL], "rtol", &opts.relative));
    tb_status status = value[SPEC] ? tb__spec_load(value[SPEC], value[TOOL_OPERAND], NULL, &spec)
                                   : tb__spec_parse(same, sizeof same - 1, &spec);
    if (status == TB_OK)
        status = tb__disk_open(spec, value[TOOL_OPERAND], true, &disk);
    if (status == TB_OK)
        status = tb__disk_diff(disk, value[TOOL_SECOND_OPERAND], &opts, found, only_b, r);
    tb__disk_close(disk);
    tb__spec_destroy(spec);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    report r = {.is_json = value[JSON] != NULL, .has_all = value[ALL] != NULL};
    tool_table_columns(&r.table, "tensor", "#different", "#largest", "#mean", "where");
    tb_status status = compare(value, &r);
    tb__text out = {0}, table = {0};
    bool has_rows = r.ndifferent > 0 || (r.has_all && r.nequal > 0);
    if (r.is_json)
        tb__text_add(&out, "{\"equal\":%zu,\"different\":%zu,\"tensors\":[%s]}\n", r.nequal, r.ndifferent,
                     r.json.data ? r.json.data : "");
    tool_table_finish(&r.table, &table);
    if (!r.is_json)
        tb__text_add(&out, "%s%s: %zu of %zu tensors\n", has_rows && table.data ? table.data : "",
                     r.ndifferent ? "different" : "equal", r.ndifferent ? r.ndifferent : r.nequal,
                     r.nequal + r.ndifferent);
    tb__text_fini(&table);
    tb__text_fini(&r.json);
    if (status != TB_OK) {
        tb__text_fini(&out);
        return tool_fail_status(status);
    }
    int exit_status = tool_print(&out);
    return exit_status ? exit_status : r.ndifferent > 0;
}

const tool_command tool_diff = {
    .name = "diff",
    .summary = "compare the values of two checkpoints, of any sharding and dtype",
    .usage = "CHECKPOINT CHECKPOINT [--spec FILE] [--atol X] [--rtol X] [--all] [--json]",
    .operand = "CHECKPOINT",
    .has_second_operand = true,
    .details = details,
    .options = options,
    .run = run,
};
