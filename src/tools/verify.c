/* tensorbus verify: whether two checkpoints have the same tensors, by hashes that do not depend on the sharding. */
#include "tools/hashes.h"
#include "tools/tools.h"

#include "base/text.h"

#include <inttypes.h>
#include <string.h>

enum { HASHES, SPEC, THREADS, JSON, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [HASHES] = {"hashes", "FILE", "compare with hashes that --json has printed; -: standard input"},
    [SPEC] = {"spec", "FILE", "the layouts of files of ranks: src for the first checkpoint, dst for the second"},
    [THREADS] = {"threads", "N", "default: one for each core"},
    [JSON] = {"json", NULL, "print JSON; for one checkpoint, the list of hashes"},
};

static const char details[] =
    "With two checkpoints, or with one and a list of hashes, prints which tensors differ, in the file of which\n"
    "rank, and in which box. With one checkpoint alone, prints the hash of each tensor.\n"
    "\n"
    "The hash of a tensor is a sum over its elements, computed from their bits and from their indices in the\n"
    "whole tensor. So it is the same however the tensor is divided into files. Each replica is compared. Dtypes\n"
    "are compared, too: values are not cast. docs/verify.md has the formula. A checkpoint is what `tensorbus\n"
    "inspect` takes; its files are mapped, and must not be shortened meanwhile.\n"
    "\n"
    "The exit status is 0 if all tensors are equal, 1 if something differs or fails, 2 for bad input.\n"
    "\n"
    "Examples:\n"
    "  tensorbus verify step_1000 step_1000_hf\n"
    "  tensorbus verify step_1000_tp4 model --spec tp4_to_hf.json\n"
    "  tensorbus verify model --json > model.hashes; tensorbus verify copy --hashes model.hashes\n";

typedef struct report {
    const hash_side *a, *b;
    bool is_json;
    size_t nequal, ndifferent;
    int64_t nbytes;
    tb__text lines; /* text, or members of a JSON array */
} report;

static void begin_line(report *r, const char *name) {
    r->ndifferent++;
    if (r->is_json) {
        tb__text_add(&r->lines, r->ndifferent > 1 ? ",{\"name\":" : "{\"name\":");
        tb__text_add_json(&r->lines, name);
    } else {
        tool_add_name(&r->lines, name);
        tb__text_add(&r->lines, ": ");
    }
}

static void add_missing(report *r, const char *name, const hash_side *in) {
    begin_line(r, name);
    if (r->is_json)
        tb__text_add(&r->lines, ",\"missing_in\":\"%s\"}", in == r->a ? "a" : "b");
    else
        tb__text_add(&r->lines, "is not in %s\n", in->path);
}

static void add_kind(report *r, const hash_tensor *a, const hash_tensor *b) {
    tb__text shapes[2] = {{0}};
    tool_add_shape(&shapes[0], &a->shown);
    tool_add_shape(&shapes[1], &b->shown);
    begin_line(r, a->name);
    tb__text_add(
        &r->lines, r->is_json ? ",\"a\":\"%s %s\",\"b\":\"%s %s\"}" : "%s %s in the first, %s %s in the second\n",
        a->dtype_name, shapes[0].data ? shapes[0].data : "", b->dtype_name, shapes[1].data ? shapes[1].data : "");
    r->lines.failed |= shapes[0].failed || shapes[1].failed;
    tb__text_fini(&shapes[0]);
    tb__text_fini(&shapes[1]);
}

static void add_ints(tb__text *out, const char *key, int ndim, const int64_t *values) {
    tb__text_add(out, ",\"%s\":[", key);
    for (int d = 0; d < ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", values[d]);
    tb__text_add(out, "]");
}

static void add_rank(tb__text *out, const char *key, int32_t rank, bool is_json) {
    if (rank == TB_NO_RANK)
        return;
    if (is_json)
        tb__text_add(out, ",\"rank_%s\":%" PRId32, key, rank);
    else
        tb__text_add(out, ", rank %" PRId32 " of the %s", rank, key);
}

static void add_difference(report *r, const hash_tensor *a, const hash_difference *d, bool is_first) {
    tb__text *out = &r->lines;
    if (r->is_json) {
        tb__text_add(out, "%s{\"elements\":%" PRId64 ",\"of\":%" PRId64, is_first ? "" : ",", d->count, d->of);
        add_rank(out, "a", d->rank_a, true);
        add_rank(out, "b", d->rank_b, true);
        add_ints(out, "start", a->shape.ndim, d->start);
        add_ints(out, "size", a->shape.ndim, d->len);
        tb__text_add(out, "}");
        return;
    }
    tb__text_add(out, "\n  ");
    tool_add_box(out, a->shape.ndim, d->start, d->len);
    add_rank(out, "first", d->rank_a, false);
    add_rank(out, "second", d->rank_b, false);
    tb__text_add(out, ": %" PRId64 " of %" PRId64 " elements", d->count, d->of);
}

static void add_tiles(report *r, const hash_tensor *a, const hash_tensor *b) {
    for (size_t i = 0; a->tiles && b->tiles && a->ntiles > 1 && a->ntiles == b->ntiles && i < a->ntiles; i++) {
        if (a->tiles[i] == b->tiles[i])
            continue;
        int64_t first = (int64_t)i * HASH_TILE;
        if (r->is_json)
            tb__text_add(&r->lines, ",\"elements_from\":%" PRId64, first);
        else
            tb__text_add(&r->lines, ", first in the %d elements from number %" PRId64, HASH_TILE, first);
        return;
    }
}

static bool has_same_hash(const hash_tensor *a, const hash_tensor *b) {
    for (int32_t i = 0; i < a->nreplicas; i++) {
        if (a->hash[i] != b->hash[0])
            return false;
    }
    for (int32_t i = 0; i < b->nreplicas; i++) {
        if (b->hash[i] != a->hash[0])
            return false;
    }
    return true;
}

static bool has_same_kind(const hash_tensor *a, const hash_tensor *b) {
    bool is_same = strcmp(a->dtype_name, b->dtype_name) == 0 && a->shown.ndim == b->shown.ndim;
    for (int d = 0; is_same && d < a->shown.ndim; d++)
        is_same = a->shown.dim[d] == b->shown.dim[d];
    return is_same;
}

static tb_status compare_tensor(report *r, const hash_tensor *a, const hash_tensor *b) {
    hash_difference *found = NULL;
    size_t count = 0;
    if (!has_same_kind(a, b)) {
        add_kind(r, a, b);
        return TB_OK;
    }
    if (has_same_hash(a, b)) {
        r->nequal++;
        return TB_OK;
    }
    TB_TRY(hash_compare(a, b, &found, &count));
    begin_line(r, a->name);
    tb__text_add(&r->lines,
                 r->is_json ? ",\"hash_a\":\"%016" PRIx64 "\",\"hash_b\":\"%016" PRIx64 "\""
                            : "%016" PRIx64 " in the first, %016" PRIx64 " in the second",
                 a->hash[0], b->hash[0]);
    add_tiles(r, a, b);
    if (r->is_json)
        tb__text_add(&r->lines, ",\"boxes\":[");
    for (size_t i = 0; i < count; i++)
        add_difference(r, a, &found[i], i == 0);
    tb__text_add(&r->lines, r->is_json ? "]}" : "\n");
    free(found);
    return TB_OK;
}

static tb_status compare(report *r) {
    for (size_t i = 0; i < r->a->count; i++) {
        const hash_tensor *a = &r->a->tensors[i], *b = hash_side_find(r->b, a->name);
        if (b)
            TB_TRY(compare_tensor(r, a, b));
        else
            add_missing(r, a->name, r->b);
    }
    for (size_t i = 0; i < r->b->count; i++) {
        if (!hash_side_find(r->a, r->b->tensors[i].name))
            add_missing(r, r->b->tensors[i].name, r->a);
    }
    return TB_OK;
}

static int deliver(report *r) {
    tb__text out = {0};
    const char *lines = r->lines.data ? r->lines.data : "";
    if (r->is_json)
        tb__text_add(&out, "{\"equal\":%zu,\"different\":[%s]}\n", r->nequal, lines);
    else if (r->ndifferent == 0)
        tb__text_add(&out, "equal: %zu tensors\n", r->nequal);
    else
        tb__text_add(&out, "%sdifferent: %zu of %zu tensors\n", lines, r->ndifferent, r->ndifferent + r->nequal);
    out.failed |= r->lines.failed;
    int status = tool_print(&out);
    return status == TOOL_OK && r->ndifferent > 0 ? TOOL_FAILED : status;
}

static int list(const hash_side *side, bool is_json) {
    tb__text out = {0};
    if (is_json) {
        tool_add_hashes(&out, side);
        return tool_print(&out);
    }
    tool_table table = {0};
    tool_table_columns(&table, "hash", "dtype", "shape", "tensor");
    for (size_t i = 0; i < side->count; i++) {
        const hash_tensor *t = &side->tensors[i];
        tb__text shape = {0}, name = {0};
        tool_table_cell(&table, "%016" PRIx64, t->hash[0]);
        tool_table_cell(&table, "%s", t->dtype_name);
        tool_add_shape(&shape, &t->shown);
        tool_table_take(&table, &shape);
        tool_add_name(&name, t->name);
        tool_table_take(&table, &name);
    }
    tool_table_finish(&table, &out);
    return tool_print(&out);
}

/* What one replica of a rank's tensor has, and another one lacks, is told by comparing them with the first. */
static tb_status refuse_unequal_replicas(const hash_side *side) {
    for (size_t i = 0; i < side->count; i++) {
        const hash_tensor *t = &side->tensors[i];
        for (int32_t k = 1; k < t->nreplicas; k++) {
            if (t->hash[k] != t->hash[0])
                return tb__fail(TB_INVALID, "tensor '%.100s': replicas differ; compare them with another checkpoint",
                                t->name);
        }
    }
    return TB_OK;
}

static tb_status run_sides(const char *const *value, const tb__spec *spec, int threads, hash_side *a, hash_side *b) {
    TB_TRY(hash_side_open(a, value[TOOL_OPERAND], spec, NULL));
    if (value[HASHES])
        TB_TRY(hash_side_load(b, value[HASHES]));
    else if (value[TOOL_SECOND_OPERAND])
        TB_TRY(hash_side_open(b, value[TOOL_SECOND_OPERAND], spec, a));
    TB_TRY(hash_side_compute(a, threads));
    if (value[TOOL_SECOND_OPERAND])
        return hash_side_compute(b, threads);
    return value[HASHES] ? TB_OK : refuse_unequal_replicas(a);
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    hash_side a = {0}, b = {0};
    tb__spec *spec = NULL;
    int64_t threads = 0;
    if (value[HASHES] && value[TOOL_SECOND_OPERAND])
        return tool_fail(TOOL_BAD_INPUT, "--hashes takes the place of the second checkpoint");
    if (value[THREADS]) {
        const char *at = value[THREADS];
        if (!tb__read_int(&at, &threads) || *at || threads < 1 || threads > 1024)
            return tool_fail(TOOL_BAD_INPUT, "--threads: '%.40s' is not a number between 1 and 1024", value[THREADS]);
    }
    tb_status status = value[SPEC] ? tb__spec_load(value[SPEC], value[TOOL_OPERAND], NULL, &spec) : TB_OK;
    if (status == TB_OK)
        status = run_sides(value, spec, (int)threads, &a, &b);
    report r = {.a = &a, .b = &b, .is_json = value[JSON] != NULL};
    bool is_list = !value[HASHES] && !value[TOOL_SECOND_OPERAND];
    if (status == TB_OK && !is_list)
        status = compare(&r);
    int exit_status = status != TB_OK ? tool_fail_status(status) : is_list ? list(&a, r.is_json) : deliver(&r);
    tb__text_fini(&r.lines);
    hash_side_close(&b);
    hash_side_close(&a);
    tb__spec_destroy(spec);
    return exit_status;
}

const tool_command tool_verify = {
    .name = "verify",
    .summary = "compare checkpoints by hashes that do not depend on the sharding",
    .usage = "CHECKPOINT [CHECKPOINT] [--spec FILE] [--threads N] [--json]\n"
             "CHECKPOINT --hashes FILE [--spec FILE] [--threads N] [--json]",
    .operand = "CHECKPOINT",
    .has_second_operand = true,
    .details = details,
    .options = options,
    .run = run,
};
