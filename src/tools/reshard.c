/* tensorbus reshard: a checkpoint sharded one way becomes one sharded another way. */
#include "tools/guard.h"
#include "tools/model.h"

#include "base/descriptors.h"
#include "reshard/disk.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    SPEC,
    IN,
    OUT,
    HF,
    MAX_FILE_SIZE,
    MEMORY,
    THREADS,
    VERIFY,
    TRUST,
    UNINDEXED,
    SYNC,
    DRY_RUN,
    JSON,
    ALONE,
    TO,
    NOPTIONS = TO + 8
};

static const tool_option options[NOPTIONS + 1] = {
    [SPEC] = {"spec", "FILE", "the spec, in JSON: the form of each tensor in the source and in the target"},
    [IN] = {"in", "DIR", "the source: rank_0.safetensors and so on, or a Hugging Face model"},
    [OUT] = {"out", "DIR", "the target, created if needed; it must not contain checkpoint files"},
    [HF] = {"hf", NULL, "write a Hugging Face model with an index; the target has one rank"},
    [MAX_FILE_SIZE] = {"max-file-size", "SIZE", "with --hf: the largest file, such as 1.5GiB or 800MB; default: 5GiB"},
    [MEMORY] = {"memory", "SIZE", "the most memory to use, at least 16MiB; default: 1GiB"},
    [THREADS] = {"threads", "N", "default: one for each core, at most 16"},
    [VERIFY] = {"verify", NULL, "read everything back and compare it with the source"},
    [TRUST] = {"trust-replicas", NULL, "do not compare replicas in the source; read the first one only"},
    [UNINDEXED] = {"ignore-unindexed", NULL,
                   "continue although some *.safetensors files, or tensors in them, are not used"},
    [SYNC] = {"sync", NULL, "write all data to the disk before the files get their final names"},
    [DRY_RUN] = {"dry-run", NULL, "check the source against the spec and print what would be done"},
    [JSON] = {"json", NULL, "print JSON"},
    [ALONE] = {"tensors-only", NULL, "do not copy config.json, the tokenizer and other files that are not tensors"},
    [TO] = TOOL_MODEL_OPTIONS,
};

static const char details[] =
    "The spec has entries for single tensors, and rules, which are tried in order:\n"
    "  {\"src_mesh\": {\"mesh\": [2, 4], \"names\": [\"dp\", \"tp\"]}, \"dst_mesh\": [2],\n"
    "   \"tensors\": {\"lm_head.weight\": {\"shape\": [32000, 4096], \"dtype\": \"bf16\",\n"
    "               \"src\": \"R,Shard(0)\", \"dst\": {\"placements\": [[\"S\", 0]], \"dtype\": \"f16\"}}},\n"
    "   \"rules\": [{\"match\": \"*.q_proj.weight\", \"src\": {\"tp\": \"Shard(0)\"}, \"dst\": \"Shard(0)\"},\n"
    "             {\"match\": \"*.rotary_emb.*\", \"skip\": true},\n"
    "             {\"match\": \"*\"}]}\n"
    "Without \"src\" or \"dst\" a tensor is replicated over that side's mesh; without a mesh the side is rank 0.\n"
    "Shapes that the spec does not give are computed from the files. A tensor that has no entry and matches no\n"
    "rule is an error. So are replicas that differ: then the tensor is sharded, and needs a rule that says so.\n"
    "In \"dst\", \"quantisation\": \"mxfp8\", \"fp8_block\", \"fp8_tensor\" or \"nvfp4\" writes data and scales; in "
    "\"src\"\n"
    "it reads them. docs/reshard.md explains every key.\n"
    "\n"
    "For models of well-known families, --to replaces the spec; `tensorbus spec` prints the spec that it stands\n"
    "for.\n"
    "\n"
    "Files have temporary names until all are complete; a run that fails removes them. A run that is killed\n"
    "(SIGKILL) leaves them, and the next run into the same directory removes them. Only one run at a time can\n"
    "write into a directory.\n"
    "\n"
    "Examples:\n"
    "  tensorbus reshard --spec tp4_to_tp2.json --in step_1000 --out step_1000_tp2 --verify\n"
    "  tensorbus reshard --spec merge.json --in step_1000 --out model --hf --max-file-size 4GiB\n"
    "  tensorbus reshard --to vllm --tp 4 --in model --out model_tp4\n";

/* What the progress callback needs. */
typedef struct watch {
    tool_guard guard;
    int64_t began_ns, pass_ns; /* of the pass at hand */
    bool is_verifying;
} watch;

static tb_status show_progress(void *arg, const tb__disk_state *state) {
    enum { WIDTH = 30 };
    static const char full[] = "##############################", empty[] = "..............................";
    watch *w = arg;
    int64_t now = tool_now_ns();
    if (state->is_verifying != w->is_verifying) {
        w->is_verifying = state->is_verifying;
        w->pass_ns = now;
    }
    double seconds = (double)(now - w->pass_ns) / 1e9;
    int64_t total = state->bytes_total > 0 ? state->bytes_total : 1;
    double done = (double)state->bytes_done / (double)total;
    int marks = (int)(done * WIDTH);
    int64_t speed = seconds > 0 ? (int64_t)((double)state->bytes_done / seconds) : 0;
    tool_show_line("%s [%.*s%.*s] %3d%%  %s of %s  %s/s", state->is_verifying ? "verifying" : "resharding", marks, full,
                   WIDTH - marks, empty, (int)(done * 100), tool_size(state->bytes_done).text,
                   tool_size(state->bytes_total).text, tool_size(speed).text);
    return tool_guard_check(&w->guard);
}

static tb_status read_size(const char *text, const char *option, int64_t least, int64_t *out) {
    int64_t value;
    if (!text)
        return TB_OK;
    tb_status status = tb__read_size(text, &value);
    if (status != TB_OK)
        return tb__fail_within(status, "--%s", option);
    if (value < least)
        return tb__fail(TB_INVALID, "--%s: %s is too small; it is at least %s", option, text, tool_size(least).text);
    *out = value;
    return TB_OK;
}

static tb_status read_options(const char *const *value, tb__disk_opts *opts) {
    int64_t threads = 0;
    if (value[SPEC] && value[TO])
        return tb__fail(TB_INVALID, "--spec and --to exclude each other");
    for (int i = TO + 1; i < NOPTIONS; i++) {
        if (value[i] && !value[TO])
            return tb__fail(TB_INVALID, "--%s goes with --to", options[i].name);
    }
    for (int i = value[TO] ? IN : SPEC; i <= OUT; i++) {
        if (!value[i] && !(i == OUT && value[DRY_RUN]))
            return tb__fail(TB_INVALID, "--%s is missing; see `tensorbus reshard --help`", options[i].name);
    }
    *opts = (tb__disk_opts){.memory = INT64_C(1) << 30, .max_file_bytes = INT64_C(5) << 30};
    TB_TRY(read_size(value[MEMORY], "memory", TB__DISK_MIN_MEMORY, &opts->memory));
    TB_TRY(read_size(value[MAX_FILE_SIZE], "max-file-size", 1, &opts->max_file_bytes));
    if (value[THREADS]) {
        const char *at = value[THREADS];
        if (!tb__read_int(&at, &threads) || *at || threads < 1 || threads > 1024)
            return tb__fail(TB_INVALID, "--threads: '%.40s' is not a number between 1 and 1024", value[THREADS]);
    }
    opts->threads = (int)threads;
    opts->files = value[HF] ? TB__SPEC_HF : TB__SPEC_RANKS;
    opts->verify = value[VERIFY] != NULL;
    opts->trust_replicas = value[TRUST] != NULL;
    opts->sync = value[SYNC] != NULL;
    return TB_OK;
}

/* Not getrusage, which counts what the process had that started this program. */
static int64_t peak_memory(void) {
    return tool_read_kib("/proc/self/status", "VmHWM:");
}

static void add_dtypes(tb__text *out, const tb__disk_tensor *t) {
    const tb__disk_stored *from = t->parts[0].from;
    if (from->quant.format.kind)
        tb__text_add(out, "%s as ", tb__quant_name(from->quant.format.kind));
    tb__text_add(out, "%s", t->unknown ? t->unknown->unknown_dtype : tb_dtype_name(from->dtype));
    if (t->dst_quant.format.kind)
        tb__text_add(out, " to %s", tb__quant_name(t->dst_quant.format.kind));
    else if (t->dst_dtype != from->dtype)
        tb__text_add(out, " to %s", tb_dtype_name(t->dst_dtype));
}

static void add_tensors(tb__text *out, const tb__disk *disk) {
    tool_table table = {0};
    tool_table_columns(&table, "tensor", "from", "shape", "dtype", "source", "target", "#bytes");
    for (size_t i = 0; i < disk->count; i++) {
        const tb__disk_tensor *t = &disk->tensors[i];
        tb__text shape = {0}, dtype = {0}, src = {0}, dst = {0};
        tool_add_shape(&shape, t->unknown ? &t->unknown->shape : &t->shape);
        add_dtypes(&dtype, t);
        tool_add_layout(&src, t->parts[0].from->layout);
        tool_add_layout(&dst, t->dst);
        tool_table_cell(&table, "%s", t->name);
        tb__text from = {0};
        if (t->nparts > 1 || strcmp(t->parts[0].from->name, t->name) != 0)
            tb__text_add(&from, "%s", t->parts[0].from->name);
        if (t->nparts > 1)
            tb__text_add(&from, " and %zu more", t->nparts - 1);
        tool_table_take(&table, &from);
        tool_table_take(&table, &shape);
        tool_table_take(&table, &dtype);
        tool_table_take(&table, &src);
        tool_table_take(&table, &dst);
        tool_table_cell(&table, "%" PRId64, t->dst_nbytes);
    }
    tool_table_finish(&table, out);
}

static tb_status add_ranks(tb__text *out, const tb__disk *disk) {
    tool_table table = {0};
    tb_status status = TB_OK;
    tool_table_columns(&table, "#rank", "#bytes", "");
    for (size_t i = 0; i < disk->nranks && status == TB_OK; i++) {
        int64_t nbytes = 0;
        status = tb__disk_rank_nbytes(disk, disk->ranks[i], &nbytes);
        tool_table_cell(&table, "%" PRId32, disk->ranks[i]);
        tool_table_cell(&table, "%" PRId64, nbytes);
        tool_table_cell(&table, "%s", tool_size(nbytes).text);
    }
    tool_table_finish(&table, out);
    return status;
}

static void add_json_layout(tb__text *out, const char *key, const tb_layout *layout) {
    char *text = NULL;
    tb__text_add(out, ",\"%s\":", key);
    if (tb_layout_format(layout, &text) == TB_OK)
        tb__text_add_json(out, text);
    else
        out->failed = true;
    free(text);
}

static void add_json_tensors(tb__text *out, const tb__disk *disk) {
    for (size_t i = 0; i < disk->count; i++) {
        const tb__disk_tensor *t = &disk->tensors[i];
        tb__text_add(out, i ? ",{\"name\":" : "{\"name\":");
        tb__text_add_json(out, t->name);
        tb__text_add(out, ",\"shape\":[");
        const tb_shape *shape = t->unknown ? &t->unknown->shape : &t->shape;
        for (int d = 0; d < shape->ndim; d++)
            tb__text_add(out, "%s%" PRId64, d ? "," : "", shape->dim[d]);
        const char *unknown = t->unknown ? t->unknown->unknown_dtype : NULL;
        tb__text_add(out, "],\"src_dtype\":\"%s\",\"dst_dtype\":\"%s\"",
                     unknown ? unknown : tb_dtype_name(t->parts[0].from->dtype),
                     unknown ? unknown : tb_dtype_name(t->dst_dtype));
        if (t->parts[0].from->quant.format.kind)
            tb__text_add(out, ",\"src_quantisation\":\"%s\"", tb__quant_name(t->parts[0].from->quant.format.kind));
        if (t->dst_quant.format.kind)
            tb__text_add(out, ",\"quantisation\":\"%s\"", tb__quant_name(t->dst_quant.format.kind));
        if (t->group) {
            tb__text_add(out, ",\"group\":");
            tb__text_add_json(out, t->group);
        }
        add_json_layout(out, "src", t->parts[0].from->layout);
        add_json_layout(out, "dst", t->dst);
        tb__text_add(out, ",\"from\":[");
        for (size_t k = 0; k < t->nparts; k++) {
            tb__text_add(out, k ? "," : "");
            tb__text_add_json(out, t->parts[k].from->name);
        }
        tb__text_add(out, "]");
        tb__text_add(out, ",\"bytes\":%" PRId64 "}", t->dst_nbytes);
    }
}

static tb_status add_json(tb__text *out, const tb__disk *disk, const char *const *value, double seconds) {
    tb__text_add(out, "{\"in\":");
    tb__text_add_json(out, value[IN]);
    if (value[OUT]) {
        tb__text_add(out, ",\"out\":");
        tb__text_add_json(out, value[OUT]);
    }
    tb__text_add(out, ",\"src_bytes\":%" PRId64 ",\"dst_bytes\":%" PRId64 ",\"skipped\":%zu,\"ranks\":[",
                 disk->src_nbytes, disk->dst_nbytes, disk->nskipped);
    for (size_t i = 0; i < disk->nranks; i++) {
        int64_t nbytes;
        TB_TRY(tb__disk_rank_nbytes(disk, disk->ranks[i], &nbytes));
        tb__text_add(out, "%s{\"rank\":%" PRId32 ",\"bytes\":%" PRId64 "}", i ? "," : "", disk->ranks[i], nbytes);
    }
    tb__text_add(out, "],\"tensors\":[");
    add_json_tensors(out, disk);
    tb__text_add(out, "]");
    const tb__checkpoint *model = tb__disk_model(disk);
    tb__text_add(out, ",\"unindexed\":");
    if (model)
        tool_add_unindexed_json(out, model);
    else
        tool_add_others_json(out, tb__disk_rank_files(disk));
    tb__text_add(out, ",\"replicated\":%zu,\"replica_bytes\":%" PRId64 ",\"replicas\":\"%s\"", disk->nreplicated,
                 disk->replica_nbytes, value[TRUST] ? "trusted" : "compared");
    if (!value[DRY_RUN])
        tb__text_add(out, ",\"seconds\":%.6f,\"verified\":%s,\"peak_memory\":%" PRId64, seconds,
                     value[VERIFY] ? "true" : "false", peak_memory());
    tb__text_add(out, "}\n");
    return TB_OK;
}

static void add_sizes(tb__text *out, const tb__disk *disk, const char *const *value) {
    const tb__checkpoint *model = tb__disk_model(disk);
    tb__text_add(out, "source    %s, ", value[IN]);
    tool_add_size(out, disk->src_nbytes);
    if (model && model->index_nbytes >= 0 && model->index_nbytes != model->nbytes)
        tb__text_add(out, "\nindex     says %" PRId64 " bytes, but its tensors have %" PRId64, model->index_nbytes,
                     model->nbytes);
    if (model && model->nunindexed > 0) {
        tb__text_add(out, "\nignored   ");
        tool_add_unindexed(out, model);
    }
    const tb__rank_files *ranks = tb__disk_rank_files(disk);
    if (ranks->nothers > 0) {
        tb__text_add(out, "\nignored   ");
        tool_add_others(out, ranks);
    }
    tb__text_add(out, "\ntarget    %s, ", value[OUT] ? value[OUT] : "not given");
    tool_add_size(out, disk->dst_nbytes);
    tb__text_add(out, "\ntensors   %zu", disk->count);
    if (disk->nskipped > 0)
        tb__text_add(out, ", and %zu left out", disk->nskipped);
    tb__text_add(out, "\nranks     ");
    tool_add_ranks(out, disk->ranks, disk->nranks, 16);
    tb__text_add(out, "\n");
    if (disk->nreplicated > 0)
        tb__text_add(out, "replicas  of %zu tensor%s, %s: %s\n", disk->nreplicated, disk->nreplicated == 1 ? "" : "s",
                     tool_size(disk->replica_nbytes).text,
                     value[TRUST]     ? "not compared"
                     : value[DRY_RUN] ? "will be compared with the first"
                                      : "the same as the first");
}

static tb_status report(tb__text *out, const tb__disk *disk, const char *const *value, double seconds) {
    if (value[JSON])
        return add_json(out, disk, value, seconds);
    add_sizes(out, disk, value);
    if (value[DRY_RUN]) {
        tb__text_add(out, "\n");
        TB_TRY(add_ranks(out, disk));
        tb__text_add(out, "\n");
        add_tensors(out, disk);
        return TB_OK;
    }
    int64_t speed = seconds > 0 ? (int64_t)((double)disk->dst_nbytes / seconds) : 0;
    tb__text_add(out, "took      %.2f s, %s/s%s\n", seconds, tool_size(speed).text, value[VERIFY] ? ", verified" : "");
    tb__text_add(out, "memory    %s at most\n", tool_size(peak_memory()).text);
    return TB_OK;
}

/* What runs into the same directory left there when they were killed. */
static void say_removed(const char *dir, const tb__leftovers *removed) {
    if (removed->count > 0)
        tool_say("%s: removed %zu temporary file%s (%s) of a run that was killed", dir, removed->count,
                 removed->count == 1 ? "" : "s", tool_size(removed->nbytes).text);
    if (removed->nstuck > 0)
        tool_say("%s: %zu temporary file%s of a run that was killed can't be removed", dir, removed->nstuck,
                 removed->nstuck == 1 ? "" : "s");
}

static tb_status reshard(const tb__disk *disk, const char *dir, const tb__disk_opts *wanted, double *seconds) {
    tb__disk_opts opts = *wanted;
    tb__leftovers removed = {0};
    watch w = {.began_ns = tool_now_ns()};
    w.pass_ns = w.began_ns;
    TB_TRY(tool_guard_init(&w.guard));
    opts.progress = show_progress;
    opts.arg = &w;
    opts.removed = &removed;
    tb_status status = tb__disk_run(disk, dir, &opts);
    *seconds = (double)(tool_now_ns() - w.began_ns) / 1e9;
    tool_hide_line();
    say_removed(dir, &removed);
    tool_guard_fini(&w.guard); /* a signal that came takes effect here, when all is tidy */
    return status;
}

static tb_status read_spec(const char *const *value, tb__spec **out) {
    tb__text notes = {0};
    json_t *json;
    if (!value[TO]) {
        tb_status status = tb__spec_load(value[SPEC], value[IN], &notes, out);
        tool_say_notes(&notes);
        return status;
    }
    TB_TRY(tool_model_spec(value[IN], &options[TO], &value[TO], &json));
    tb_status status = tb__spec_from_json(json, out);
    json_decref(json);
    return status;
}

static tb_status run_all(const char *const *value, tb__text *out) {
    tb__disk_opts opts;
    tb__spec *spec = NULL;
    tb__disk *disk = NULL;
    double seconds = 0;
    TB_TRY(read_options(value, &opts));
    tb__descriptor_limit_raise(); /* every rank's file is open at once */
    tb_status status = read_spec(value, &spec);
    if (status == TB_OK)
        status = tb__disk_open(spec, value[IN], value[UNINDEXED] != NULL, &disk);
    if (status == TB_OK && spec->files != TB__SPEC_RANKS) {
        if (value[HF] && spec->files != TB__SPEC_HF)
            status = tb__fail(TB_INVALID, "--hf: the spec has other 'files'");
        opts.files = spec->files;
    }
    if (status == TB_OK && value[MAX_FILE_SIZE] && opts.files != TB__SPEC_HF)
        status = tb__fail(TB_INVALID, "--max-file-size goes with --hf");
    if (status == TB_OK && opts.files == TB__SPEC_HF && disk->nranks != 1)
        status = tb__fail(TB_INVALID, "--hf: the target is one rank, but the spec has %zu", disk->nranks);
    if (status == TB_OK && !value[DRY_RUN])
        status = reshard(disk, value[OUT], &opts, &seconds);
    if (status == TB_OK && !value[DRY_RUN] && !value[ALONE])
        status = tool_copy_companions(value[IN], value[OUT]);
    if (status == TB_OK)
        status = report(out, disk, value, seconds);
    tb__disk_close(disk);
    tb__spec_destroy(spec);
    return status;
}

static int run(const tb__config *config, const char *const *value) {
    (void)config;
    tb__text out = {0};
    tb_status status = run_all(value, &out);
    if (status == TB_OK)
        return tool_print(&out);
    tb__text_fini(&out);
    return tool_fail_status(status);
}

const tool_command tool_reshard = {
    .name = "reshard",
    .summary = "convert a checkpoint to another sharding, dtype or format",
    .usage = "--spec FILE --in DIR --out DIR [--memory SIZE] [--verify] [--trust-replicas] [--json]\n"
             "--spec FILE --in DIR --out DIR --hf [--max-file-size SIZE] ...\n"
             "--to FORM [--tp N] [--pp N] [--ep N] [--from-form FORM] ... --in DIR --out DIR\n"
             "--spec FILE --in DIR --dry-run [--json]",
    .details = details,
    .options = options,
    .run = run,
};
