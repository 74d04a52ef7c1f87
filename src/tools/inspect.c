/* tensorbus inspect: lists the contents of a checkpoint, or the tensors that programs have registered with an agent. */
#include "tools/agents.h"

#include "format/checkpoint.h"

#include <inttypes.h>
#include <string.h>

enum { JSON, TOKEN_FILE, NOPTIONS };

static const tool_option options[NOPTIONS + 1] = {
    [JSON] = {"json", NULL, "print JSON"},
    [TOKEN_FILE] = {"token-file", "FILE", "its first line is the token of the agent"},
};

static const char details[] =
    "A checkpoint is a safetensors file, or a directory with one of these, looked for in this order:\n"
    "  model.safetensors               a model in one file\n"
    "  model.safetensors.index.json    a model in several files; its weight_map has the file of each tensor\n"
    "  rank_0.safetensors, rank_1...   a file for each rank\n"
    "Headers are checked completely; data is not read. Tensors are sorted by name. A dtype that tensorbus does\n"
    "not know is shown as the file spells it (C64). Files that the index of a model does not name, and other\n"
    "files beside those of ranks, are listed as ignored; `tensorbus reshard` refuses such a directory.\n"
    "\n"
    "An agent is given as agent:PATH, the path of its socket. For each tensor of its programs' batches the\n"
    "command shows shape and layout of the whole tensor, the bytes that the program has of it, and the device\n"
    "they are on.\n"
    "\n"
    "Examples:\n"
    "  tensorbus inspect Llama-3.1-8B --json\n"
    "  tensorbus inspect agent:/run/trainer-0.sock\n";

/* The output under construction. Files are added one after the other. */
typedef struct report {
    const char *path;
    tb__checkpoint_kind kind;
    bool is_json;
    size_t nfiles, ntensors;
    int64_t nbytes;
    int64_t index_nbytes; /* -1: missing in the index, or there is none */
    size_t nunindexed;    /* tensors of a model, or files of no rank */
    tb__text unindexed;
    TB_VEC(int32_t) ranks;
    tool_table tensors, files;
    tb__text tensors_json, files_json, metadata;
    tb__text first_notes; /* of the first file, so that the others need not repeat them */
} report;

static bool has_ranks(const report *r) {
    return r->kind == TB__CHECKPOINT_RANKS;
}

static bool has_several_files(const report *r) {
    return r->kind == TB__CHECKPOINT_INDEX || has_ranks(r);
}

static void take_plain(tool_table *table, const char *string) {
    tb__text cell = {0};
    tool_add_name(&cell, string);
    tool_table_take(table, &cell);
}

static const char *name_of(const report *r, const tb__safetensors *file) {
    const char *slash = strrchr(file->path, '/');
    return r->kind != TB__CHECKPOINT_FILE && slash ? slash + 1 : file->path;
}

static void begin_tables(report *r) {
    if (has_ranks(r)) {
        tool_table_columns(&r->files, "#rank");
        tool_table_columns(&r->tensors, "#rank");
    }
    tool_table_columns(&r->files, "file", "#tensors", "#bytes", "");
    tool_table_columns(&r->tensors, "tensor", "dtype", "shape", "#bytes", "");
    if (r->kind == TB__CHECKPOINT_INDEX)
        tool_table_columns(&r->tensors, "file");
}

static void add_bytes(tool_table *table, int64_t nbytes) {
    tool_table_cell(table, "%" PRId64, nbytes);
    tool_table_cell(table, "%s", nbytes >= 1024 ? tool_size(nbytes).text : "");
}

static void add_tensor_json(report *r, const tb__safetensors *file, const tb__safetensor *t, int32_t rank) {
    tb__text *out = &r->tensors_json;
    tb__text_add(out, r->ntensors ? ",{\"name\":" : "{\"name\":");
    tb__text_add_json(out, t->name);
    tb__text_add(out, ",\"dtype\":\"%s\",\"shape\":[", tb__safetensor_dtype_name(t));
    for (int d = 0; d < t->shape.ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", t->shape.dim[d]);
    tb__text_add(out, "],\"bytes\":%" PRId64 ",\"file\":", t->nbytes);
    tb__text_add_json(out, name_of(r, file));
    tb__text_add(out, ",\"offset\":%" PRId64, file->data_start + t->offset);
    if (has_ranks(r))
        tb__text_add(out, ",\"rank\":%" PRId32, rank);
    tb__text_add(out, "}");
}

static void add_tensor(report *r, const tb__safetensors *file, const tb__safetensor *t, int32_t rank) {
    if (r->is_json) {
        add_tensor_json(r, file, t, rank);
    } else {
        tb__text shape = {0};
        if (has_ranks(r))
            tool_table_cell(&r->tensors, "%" PRId32, rank);
        take_plain(&r->tensors, t->name);
        tool_table_cell(&r->tensors, "%s", tb__safetensor_dtype_name(t));
        tool_add_shape(&shape, &t->shape);
        tool_table_take(&r->tensors, &shape);
        add_bytes(&r->tensors, t->nbytes);
        if (r->kind == TB__CHECKPOINT_INDEX)
            take_plain(&r->tensors, name_of(r, file));
    }
    r->ntensors++;
    r->nbytes += t->nbytes; /* sizes of existing files: far from 2^63 */
}

/* A line for each; values may be whole documents, and are cut. */
static void add_notes(report *r, const tb__safetensors *file) {
    enum { MOST = 100 };
    tb__text lines = {0};
    for (size_t i = 0; i < file->header.nmetadata; i++) {
        const tb__safetensors_metadata *note = &file->header.metadata[i];
        tb__text value = {0};
        tool_add_name(&value, note->value);
        tb__text_add(&lines, "metadata    ");
        tool_add_name(&lines, note->key);
        tb__text_add(&lines, value.count > MOST ? ": %.*s...\n" : ": %.*s\n", MOST, value.data ? value.data : "");
        lines.failed |= value.failed;
        tb__text_fini(&value);
    }
    if (r->nfiles == 0) {
        tb__text_add(&r->metadata, "%s", lines.data ? lines.data : "");
        r->first_notes = lines;
        return;
    }
    if (strcmp(lines.data ? lines.data : "", r->first_notes.data ? r->first_notes.data : "") != 0) {
        tb__text_add(&r->metadata, "of file     ");
        tool_add_name(&r->metadata, name_of(r, file));
        tb__text_add(&r->metadata, "\n%s", lines.data ? lines.data : "");
    }
    r->metadata.failed |= lines.failed;
    tb__text_fini(&lines);
}

static void add_file_json(report *r, const tb__safetensors *file, int32_t rank) {
    const tb__safetensors_header *h = &file->header;
    tb__text *out = &r->files_json;
    tb__text_add(out, r->nfiles ? ",{\"file\":" : "{\"file\":");
    tb__text_add_json(out, name_of(r, file));
    if (has_ranks(r))
        tb__text_add(out, ",\"rank\":%" PRId32, rank);
    tb__text_add(out, ",\"tensors\":%zu,\"bytes\":%" PRId64 ",\"metadata\":{", h->count, h->data_nbytes);
    for (size_t i = 0; i < h->nmetadata; i++) {
        tb__text_add(out, i ? "," : "");
        tb__text_add_json(out, h->metadata[i].key);
        tb__text_add(out, ":");
        tb__text_add_json(out, h->metadata[i].value);
    }
    tb__text_add(out, "}}");
}

static void add_file(report *r, const tb__safetensors *file, int32_t rank) {
    if (r->is_json) {
        add_file_json(r, file, rank);
    } else {
        if (has_ranks(r))
            tool_table_cell(&r->files, "%" PRId32, rank);
        take_plain(&r->files, name_of(r, file));
        tool_table_cell(&r->files, "%zu", file->header.count);
        add_bytes(&r->files, file->header.data_nbytes);
        add_notes(r, file);
    }
    r->nfiles++;
}

static tb_status look_at_ranks(report *r) {
    tb__rank_files ranks;
    TB_TRY(tb__rank_files_init(r->path, &ranks));
    tb_status status = TB_OK;
    for (size_t i = 0; i < ranks.count && status == TB_OK; i++) { /* one at a time: there may be thousands */
        tb__safetensors *file;
        status = tb__safetensors_open(ranks.files[i].path, &file);
        if (status != TB_OK)
            break;
        add_file(r, file, ranks.files[i].rank);
        for (size_t k = 0; k < file->header.count; k++)
            add_tensor(r, file, file->header.by_name[k], ranks.files[i].rank);
        tb__safetensors_close(file);
        status = tb__vec_push(&r->ranks, ranks.files[i].rank) ? TB_OK : TB_NO_MEMORY;
    }
    r->nunindexed = ranks.nothers;
    (r->is_json ? tool_add_others_json : tool_add_others)(&r->unindexed, &ranks);
    tb__rank_files_fini(&ranks);
    return status;
}

static tb_status look_at_model(report *r) {
    tb__checkpoint *c;
    TB_TRY(tb__checkpoint_open(r->path, &c));
    for (size_t i = 0; i < c->nfiles; i++)
        add_file(r, c->files[i], TB_NO_RANK);
    for (size_t i = 0; i < c->count; i++)
        add_tensor(r, c->files[c->tensors[i].file], c->tensors[i].tensor, TB_NO_RANK);
    r->index_nbytes = c->index_nbytes;
    r->nunindexed = c->nunindexed;
    (r->is_json ? tool_add_unindexed_json : tool_add_unindexed)(&r->unindexed, c);
    tb__checkpoint_close(c);
    return TB_OK;
}

static void add_json(tb__text *out, report *r) {
    static const char *const kinds[] = {"file", "model", "index", "ranks"};
    tb__text_add(out, "{\"path\":");
    tb__text_add_json(out, r->path);
    tb__text_add(out, ",\"kind\":\"%s\",\"bytes\":%" PRId64, kinds[r->kind], r->nbytes);
    if (r->index_nbytes >= 0)
        tb__text_add(out, ",\"index_bytes\":%" PRId64, r->index_nbytes);
    if (r->kind == TB__CHECKPOINT_INDEX)
        tb__text_add(out, ",\"ignored\":%zu", r->nunindexed);
    tb__text_add(out, ",\"files\":[%s]", r->files_json.data ? r->files_json.data : "");
    if (r->kind == TB__CHECKPOINT_INDEX || r->nunindexed > 0)
        tb__text_add(out, ",\"unindexed\":%s", r->unindexed.data ? r->unindexed.data : "[]");
    tb__text_add(out, ",\"tensors\":[%s]}\n", r->tensors_json.data ? r->tensors_json.data : "");
}

/* Lists ranks without a file between others: one may have been forgotten. */
static void add_missing_ranks(tb__text *out, const report *r) {
    TB_VEC(int32_t) missing = {0};
    int32_t next = 0;
    for (size_t i = 0; i < r->ranks.count; i++) {
        for (; next < r->ranks.item[i] && !out->failed; next++)
            out->failed = !tb__vec_push(&missing, next);
        next = r->ranks.item[i] + 1;
    }
    if (missing.count > 0) {
        tb__text_add(out, "; no file for ");
        tool_add_ranks(out, missing.item, missing.count, 16);
    }
    free(missing.item);
}

static void add_heading(tb__text *out, const report *r) {
    tb__text_add(out, "checkpoint  ");
    tool_add_name(out, r->path);
    if (r->kind == TB__CHECKPOINT_MODEL)
        tb__text_add(out, ", a model in one file");
    else if (r->kind == TB__CHECKPOINT_INDEX)
        tb__text_add(out, ", a model in %zu file%s with an index", r->nfiles, r->nfiles == 1 ? "" : "s");
    tb__text_add(out, "\ntensors     %zu, ", r->ntensors);
    tool_add_size(out, r->nbytes);
    if (has_ranks(r)) {
        tb__text_add(out, "\nranks       ");
        tool_add_ranks(out, r->ranks.item, r->ranks.count, 16);
        add_missing_ranks(out, r);
    }
    tb__text_add(out, "\n");
    if (r->index_nbytes >= 0 && r->index_nbytes != r->nbytes)
        tb__text_add(out, "index       says %" PRId64 " bytes\n", r->index_nbytes);
    if (r->nunindexed > 0)
        tb__text_add(out, "ignored     %s\n", r->unindexed.data ? r->unindexed.data : "");
    tb__text_add(out, "%s", r->metadata.data ? r->metadata.data : "");
}

static void add_tables(tb__text *out, report *r) {
    add_heading(out, r);
    if (has_several_files(r) && r->nfiles > 0) {
        tool_table_finish_below(&r->files, out);
    }
    if (r->ntensors > 0) {
        tool_table_finish_below(&r->tensors, out);
    }
}

static void free_report(report *r) {
    tb__text rest = {0};
    if (r->files.ncolumns > 0)
        tool_table_finish(&r->files, &rest);
    if (r->tensors.ncolumns > 0)
        tool_table_finish(&r->tensors, &rest);
    tb__text_fini(&rest);
    tb__text_fini(&r->files_json);
    tb__text_fini(&r->tensors_json);
    tb__text_fini(&r->metadata);
    tb__text_fini(&r->first_notes);
    tb__text_fini(&r->unindexed);
    free(r->ranks.item);
}

static int run(const tb__config *config, const char *const *value) {
    static const char agent[] = "agent:";
    (void)config;
    if (strncmp(value[TOOL_OPERAND], agent, sizeof agent - 1) == 0)
        return tool_inspect_agent(value[TOOL_OPERAND] + sizeof agent - 1, value[TOKEN_FILE], value[JSON] != NULL);
    if (value[TOKEN_FILE])
        return tool_fail(2, "--token-file is for agents: agent:PATH");
    report r = {.path = value[TOOL_OPERAND], .is_json = value[JSON] != NULL, .index_nbytes = -1};
    tb__text out = {0};
    tb_status status = tb__checkpoint_look(r.path, &r.kind);
    if (status == TB_OK) {
        begin_tables(&r);
        status = has_ranks(&r) ? look_at_ranks(&r) : look_at_model(&r);
    }
    if (status == TB_OK && r.is_json)
        add_json(&out, &r);
    else if (status == TB_OK)
        add_tables(&out, &r);
    out.failed |=
        r.files_json.failed || r.tensors_json.failed || r.metadata.failed || r.first_notes.failed || r.unindexed.failed;
    free_report(&r);
    return status == TB_OK ? tool_print(&out) : tool_fail_status(status);
}

const tool_command tool_inspect = {
    .name = "inspect",
    .summary = "list the tensors of a checkpoint, or of the programs of an agent",
    .usage = "CHECKPOINT_OR_AGENT [--json] [--token-file FILE]",
    .operand = "CHECKPOINT_OR_AGENT",
    .details = details,
    .options = options,
    .run = run,
};
