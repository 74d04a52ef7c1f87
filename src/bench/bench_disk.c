/* reshard_disk and the like: a checkpoint on disk, in the page cache, from four tensor-parallel ranks to two, or a
 * model to vLLM's ranks or to FP8, next to `cp` of the same files. Both are programs that are started, so that each
 * pays for its start. */
#include "bench/bench.h"

#include "format/checkpoint.h"
#include "format/file.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RANKS = 4, WIDTH = 4096, NNAMES = 4, PATTERN = 1 << 20, NMATRICES = 7, NCASES = 3 };

/* Of each layer, by rows or by columns, as Llama's are. */
static const struct {
    const char *name;
    int64_t rows, columns;
    bool is_by_columns;
} matrices[NNAMES] = {
    {"q_proj", WIDTH, WIDTH, false},
    {"o_proj", WIDTH, WIDTH, true},
    {"up_proj", 3 * WIDTH, WIDTH, false},
    {"down_proj", WIDTH, 3 * WIDTH, true},
};

/* Of each layer of a Llama, in fourths of the hidden size. */
static const struct {
    const char *name;
    int rows, columns;
} llama[NMATRICES] = {
    {"self_attn.q_proj", 4, 4}, {"self_attn.k_proj", 1, 4}, {"self_attn.v_proj", 1, 4}, {"self_attn.o_proj", 4, 4},
    {"mlp.gate_proj", 12, 4},   {"mlp.up_proj", 12, 4},     {"mlp.down_proj", 4, 12},
};

static const char tp_spec[] = "{\"src_mesh\": [4], \"dst_mesh\": [2], \"rules\": ["
                              "{\"match\": \"*.[qu]*\", \"src\": \"Shard(0)\", \"dst\": \"Shard(0)\"},"
                              "{\"match\": \"*\", \"src\": \"Shard(1)\", \"dst\": \"Shard(1)\"}]}";

static const char fp8_spec[] =
    "{\"files\": \"hf\", \"rules\": [{\"match\": \"*\", \"dst\": {\"quantisation\": \"fp8_block\"}}]}";

typedef struct disk_case {
    const char *name, *work;
    double at_least;
    const char *spec;
    bool is_model; /* the source: a Llama of one rank; otherwise four ranks */
} disk_case;

static const disk_case cases[NCASES] = {
    {"reshard_disk", "checkpoint on disk, tp4 to tp2", 0.8, tp_spec, false},
    {"reshard_vllm", "model on disk to vLLM's fused tp4", 0.8, "{\"model\": \"llama\", \"to\": \"vllm\", \"tp\": 4}",
     true},
    {"reshard_fp8", "model on disk, bf16 to FP8 in blocks", 0.5, fp8_spec, true},
};

/* What it works with; all paths lie in the folder. */
typedef struct disk {
    const disk_case *c;
    char folder[80];
    char in[96], copy[96], out[96], spec[96], tool[512];
    int64_t nbytes; /* of the source */
    tool_guard *guard;
} disk;

static tb_status write_text(const disk *d, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", d->folder, name);
    FILE *file = fopen(path, "we");
    bool ok = file && fputs(text, file) >= 0;
    if (file)
        ok = fclose(file) == 0 && ok;
    return ok ? TB_OK : tb__fail(TB_IO, "can't write %s", path);
}

/* The tensors of one rank: as many layers as make `size` on four ranks, the last one narrower. */
static tb_status list_tensors(int64_t size, tb__arena *arena, tb__safetensor **out, size_t *count) {
    int64_t layer_bytes = (int64_t)8 * WIDTH * WIDTH * 2, nlayers = (size + layer_bytes - 1) / layer_bytes;
    tb__safetensor *tensors = tb__arena_alloc(arena, (size_t)nlayers, NNAMES * sizeof *tensors);
    if (!tensors)
        return TB_NO_MEMORY;
    *count = 0;
    for (int64_t i = 0; i < nlayers; i++) {
        int64_t left = size - i * layer_bytes;
        int64_t shrink = left < layer_bytes ? layer_bytes / left : 1; /* of the rows that are cut */
        for (int m = 0; m < NNAMES; m++) {
            char *name = tb__arena_alloc(arena, 48, 1);
            if (!name)
                return TB_NO_MEMORY;
            snprintf(name, 48, "layers.%" PRId64 ".%s", i, matrices[m].name);
            bool by_columns = matrices[m].is_by_columns;
            int64_t rows = by_columns ? matrices[m].rows / shrink : matrices[m].rows / RANKS / shrink;
            int64_t columns = by_columns ? matrices[m].columns / RANKS : matrices[m].columns;
            tensors[(*count)++] =
                (tb__safetensor){.name = name, .dtype = TB_BF16, .shape = {2, {rows > 0 ? rows : 1, columns}}};
        }
    }
    *out = tensors;
    return TB_OK;
}

/* As many layers as make `size`; one that is smaller, if that is less than a layer. */
static tb_status list_llama(disk *d, int64_t size, tb__arena *arena, tb__safetensor **out, size_t *count) {
    enum { FOURTHS = 2 * 16 + 2 * 4 + 3 * 48 }; /* of the hidden size times itself: a layer, sixteen times */
    int64_t hidden = WIDTH;
    while (hidden > 64 && FOURTHS * hidden * hidden / 8 > size)
        hidden /= 2;
    int64_t nlayers = size / (FOURTHS * hidden * hidden / 8) + 1;
    tb__safetensor *tensors = tb__arena_alloc(arena, (size_t)nlayers, NMATRICES * sizeof *tensors);
    if (!tensors)
        return TB_NO_MEMORY;
    *count = 0;
    for (int64_t i = 0; i < nlayers; i++) {
        for (int m = 0; m < NMATRICES; m++) {
            char *name = tb__arena_alloc(arena, 64, 1);
            if (!name)
                return TB_NO_MEMORY;
            snprintf(name, 64, "model.layers.%" PRId64 ".%s.weight", i, llama[m].name);
            tensors[(*count)++] =
                (tb__safetensor){.name = name,
                                 .dtype = TB_BF16,
                                 .shape = {2, {llama[m].rows * hidden / 4, llama[m].columns * hidden / 4}}};
        }
    }
    *out = tensors;
    tb__text config = {0};
    tb__text_add(&config,
                 "{\"model_type\": \"llama\", \"hidden_size\": %" PRId64 ", \"intermediate_size\": %" PRId64
                 ", \"num_hidden_layers\": %" PRId64 ", \"num_attention_heads\": 32, \"num_key_value_heads\": 8, "
                 "\"vocab_size\": 64}",
                 hidden, 3 * hidden, nlayers);
    tb_status status = config.failed ? TB_NO_MEMORY : write_text(d, "in/config.json", config.data);
    tb__text_fini(&config);
    return status;
}

static tb_status fill_tensor(tb__safetensors_writer *writer, size_t i, int64_t nbytes, const unsigned char *pattern) {
    for (int64_t done = 0; done < nbytes;) {
        int64_t n = nbytes - done < PATTERN ? nbytes - done : PATTERN;
        TB_TRY(tb__safetensors_write(writer, i, done, pattern, (size_t)n));
        done += n;
    }
    return TB_OK;
}

static tb_status write_rank(disk *d, int32_t rank, const tb__safetensor *tensors, size_t count,
                            const unsigned char *pattern) {
    char *path;
    tb__safetensors_writer *writer = NULL;
    TB_TRY(d->c->is_model ? tb__file_join(d->in, "model.safetensors", &path) : tb__rank_file_path(d->in, rank, &path));
    tb_status status = tb__safetensors_create(path, tensors, count, NULL, 0, &writer);
    free(path);
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        int64_t nbytes;
        status = tb_shape_size(&tensors[i].shape, TB_BF16, NULL, &nbytes);
        if (status == TB_OK)
            status = fill_tensor(writer, i, nbytes, pattern);
        if (status == TB_OK)
            status = tool_guard_check(d->guard);
        d->nbytes += nbytes;
    }
    if (status == TB_OK)
        status = tb__safetensors_commit(writer);
    tb__safetensors_writer_destroy(writer);
    return status;
}

static tb_status write_source(disk *d, int64_t size) {
    tb__arena arena = {0};
    tb__safetensor *tensors = NULL;
    size_t count = 0;
    unsigned char *pattern = tb__arena_alloc(&arena, PATTERN, 1);
    tb_status status = !pattern         ? TB_NO_MEMORY
                       : d->c->is_model ? list_llama(d, size, &arena, &tensors, &count)
                                        : list_tensors(size, &arena, &tensors, &count);
    for (int i = 0; status == TB_OK && i < PATTERN; i++) /* finite numbers */
        pattern[i] = (unsigned char)(i * 2654435761U >> 24 & (i % 2 ? 0xbf : 0xff));
    for (int32_t rank = 0; rank < (d->c->is_model ? 1 : RANKS) && status == TB_OK; rank++)
        status = write_rank(d, rank, tensors, count, pattern);
    tb__arena_fini(&arena);
    return status;
}

/* What can be written and read a dozen times in the time there is, as fast as the first files are written. */
static tb_status fit_source(disk *d, const bench_rounds *rounds, int64_t *size) {
    enum { PROBE = 256 << 20, TIMES = 12 };
    if (rounds->budget_ns == 0 || *size <= PROBE)
        return TB_OK;
    int64_t began = tool_now_ns();
    TB_TRY(write_source(d, PROBE));
    int64_t took = (tool_now_ns() - began) * TIMES * (*size / PROBE),
            fitting = bench_fit_size(*size, took, rounds->budget_ns);
    d->nbytes = 0;
    if (fitting < *size)
        tool_say("%s moves %s instead of %s, because writing is slow here", d->c->name, tool_size(fitting).text,
                 tool_size(*size).text);
    *size = fitting;
    return TB_OK;
}

/* Times a program; what keeps it from running goes to `reason`. */
static tb_status time_program(const disk *d, const char *const *argv, tb__text *said, tb__text *reason,
                              double *gb_per_s) {
    int64_t began = tool_now_ns();
    TB_TRY(bench_program_run(argv, d->folder, d->guard, "cp is not there", said, reason));
    *gb_per_s = (double)d->nbytes / (double)(tool_now_ns() - began);
    return TB_OK;
}

static void find_peak(const tb__text *said, int64_t *peak) {
    json_t *json = said->data ? json_loads(said->data, 0, NULL) : NULL;
    const json_t *value = json_object_get(json, "peak_memory");
    if (json_is_integer(value) && json_integer_value(value) > *peak)
        *peak = json_integer_value(value);
    json_decref(json);
}

/* One of the two, and away with what it made. The better of its times in this round counts. */
static tb_status run_once(const disk *d, const char *const *argv, const char *made, double *best, int64_t *peak,
                          tb__text *reason) {
    tb__text said = {0};
    char gone[96];
    double gb_per_s = 0;
    tb_status status = reason->count == 0 ? time_program(d, argv, &said, reason, &gb_per_s) : TB_OK;
    *best = gb_per_s > *best ? gb_per_s : *best;
    find_peak(&said, peak);
    snprintf(gone, sizeof gone, "%s", made);
    tool_folder_remove(gone);
    tb__text_fini(&said);
    return status;
}

/* Memory that was free for a while is slow to take where a hypervisor has had it back, and two programs in turn would
 * find it so in turn: each runs twice, once after the other one and once after itself. */
static tb_status run_round(const disk *d, bench_round *out, int64_t *peak, tb__text *reason) {
    const char *const copy[] = {"cp", "-r", d->in, d->copy, NULL};
    const char *const reshard[] = {d->tool, "reshard", "--spec", d->spec,  "--in",
                                   d->in,   "--out",   d->out,   "--json", NULL};
    *out = (bench_round){0};
    TB_TRY(run_once(d, copy, d->copy, &out->theirs, peak, reason));
    TB_TRY(run_once(d, reshard, d->out, &out->ours, peak, reason));
    TB_TRY(run_once(d, reshard, d->out, &out->ours, peak, reason));
    return run_once(d, copy, d->copy, &out->theirs, peak, reason);
}

static tb_status run_rounds(disk *d, int64_t size, bool is_size_given, bench_rounds *rounds, bench_round *out,
                            int64_t *peak, tb__text *reason) {
    double unused = 0;
    ssize_t length = readlink("/proc/self/exe", d->tool, sizeof d->tool - 1);
    if (length < 0)
        return tb__fail(TB_IO, "can't find this program's own file");
    d->tool[length] = '\0';
    snprintf(d->in, sizeof d->in, "%s/in", d->folder);
    snprintf(d->copy, sizeof d->copy, "%s/copy", d->folder);
    snprintf(d->out, sizeof d->out, "%s/out", d->folder);
    snprintf(d->spec, sizeof d->spec, "%s/spec.json", d->folder);
    if (mkdir(d->in, 0777) != 0)
        return tb__fail(TB_IO, "can't make %s", d->in);
    tool_show_line("%s: writing the checkpoint", d->c->name);
    TB_TRY(write_text(d, "spec.json", d->c->spec));
    tb_status status = is_size_given ? TB_OK : fit_source(d, rounds, &size);
    if (status == TB_OK)
        status = write_source(d, size);
    if (status == TB_IO) { /* no room for it, say */
        tb__text_add(reason, "%s", tb_error_detail());
        return TB_OK;
    }
    TB_TRY(status);
    tool_show_line("%s: verifying", d->c->name);
    const char *const verify[] = {d->tool, "reshard", "--spec", d->spec,    "--in", d->in,
                                  "--out", d->out,    "--json", "--verify", NULL};
    TB_TRY(run_once(d, verify, d->out, &unused, peak, reason));
    while (reason->count == 0 && bench_rounds_next(rounds, tool_now_ns())) {
        tool_show_line("%s: round %d of %d", d->c->name, rounds->done, rounds->most);
        TB_TRY(run_round(d, &out[rounds->done - 1], peak, reason));
    }
    return TB_OK;
}

static tb_status run_case(bench *b, bench_other *o) {
    enum { TIMES = 4, SHARE = 4 }; /* the size, so that it is 4 GiB unless another is asked for; of a line's time */
    disk d = {.c = o->arg, .guard = &b->guard};
    tb__text why = {0};
    o->result.work = d.c->work;
    o->result.against = "cp";
    o->result.at_least = d.c->at_least;
    o->result.extra_bytes = 0;
    o->rounds.budget_ns *= SHARE;
    TB_TRY(tool_folder_make(d.folder, sizeof d.folder));
    tb_status status =
        run_rounds(&d, TIMES * b->size, b->is_size_given, &o->rounds, o->round, &o->result.extra_bytes, &why);
    tool_folder_remove(d.folder);
    if (status == TB_OK && why.count > 0)
        status = tb__text_take(&why, &o->result.reason);
    tb__text_fini(&why);
    return status;
}

bool bench_disk_is_line(const char *name, size_t length) {
    for (int i = 0; i < NCASES; i++) {
        if (strlen(cases[i].name) == length && strncmp(cases[i].name, name, length) == 0)
            return true;
    }
    return false;
}

tb_status bench_disk_run(bench *b) {
    for (int i = 0; i < NCASES; i++)
        TB_TRY(bench_run_other(b, cases[i].name, &cases[i], run_case));
    return TB_OK;
}
