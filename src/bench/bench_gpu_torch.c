/* How fast PyTorch does what lines of `tensorbus bench --gpu` measure: one program, bench/peers/gpu_torch.py, measures
 * all of them. */
#include "base/mem.h"
#include "bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define SLICES "slice copies of PyTorch"
#define MANY   "_foreach_copy_ of PyTorch"

enum { MAX_PEERS = 32, FIRST_ARGS = 3 };

static const struct {
    const char *line, *name, *work;
} peers[] = {
    {"gpu_row_col", "gpu_row_col_torch", SLICES},
    {"gpu_model", "gpu_model_torch", SLICES},
    {"gpu_replicate", "gpu_replicate_torch", SLICES},
    {"gpu_small", "gpu_small_torch", MANY},
    {"gpu_tiny", "gpu_tiny_torch", MANY},
    {"gpu_tiny_1m", "gpu_tiny_1m_torch", MANY},
    {"gpu_rows4", "gpu_rows4_torch", SLICES},
    {"gpu_runs32", "gpu_runs32_torch", SLICES},
    {"gpu_cast", "gpu_cast_torch", SLICES ", which cast"},
    {"gpu_mxfp8", "gpu_mxfp8_torch", "operations of PyTorch"},
    {"gpu_fp8_block", "gpu_fp8_block_torch", "operations of PyTorch"},
    {"gpu_partial", "gpu_partial_torch", "torch.sum"},
    {"gpu_transpose_f32", "gpu_transpose_f32_torch", SLICES},
    {"gpu_transpose_bf16", "gpu_transpose_bf16_torch", SLICES},
    {"gpu_to_host", "gpu_to_host_torch", SLICES},
    {"host_to_gpu", "host_to_gpu_torch", SLICES},
};

enum { NPEERS = sizeof peers / sizeof *peers };
_Static_assert((int)NPEERS <= (int)MAX_PEERS, "an argument for each");

/* "gpu_model:64x32+0,32x64+1,32"; of many equal tensors "gpu_small:COUNTxLENGTH". */
static tb_status describe_work(const char *line, int64_t size, tb__text *out) {
    static const char *const cuts[TOOL_CUT_COUNT] = {
        [TOOL_CUT_COLUMN] = "+0", [TOOL_CUT_ROW] = "+1", [TOOL_CUT_NORM] = ""};
    const bench_gpu_case *c = bench_gpu_case_of(line);
    tool_job job;
    TB_TRY(bench_gpu_job_init(c, size, &job));
    tb__text_add(out, "%s:", line);
    size_t count = job.tensors.count;
    const tb_shape *first = &job.tensors.item[0].shape;
    for (size_t i = 0; !c->src && i < count; i++) {
        const tool_tensor *t = &job.tensors.item[i];
        tb__text_add(out, "%s%" PRId64, i ? "," : "", t->shape.dim[0]);
        if (t->shape.ndim > 1)
            tb__text_add(out, "x%" PRId64, t->shape.dim[1]);
        tb__text_add(out, "%s", cuts[t->cut]);
    }
    if (c->src && count > 1)
        tb__text_add(out, "%zux%" PRId64, count, first->dim[0] * (first->ndim > 1 ? first->dim[1] : 1));
    else if (c->src)
        tb__text_add(out, "%" PRId64 "x%" PRId64, first->dim[0], first->dim[1]);
    tool_job_fini(&job);
    return TB_OK;
}

/* What the program says of the line: rates, or why there are none. */
static void find_result(const char *line, const tb__text *said, const tb__text *reason, bench_result *out) {
    size_t length = strlen(line);
    tb__text why = {0};
    if (reason->count)
        tb__text_add(&why, "%s", reason->data);
    const char *at = reason->count ? NULL : said->data;
    while (at && !(strncmp(at, line, length) == 0 && at[length] == ' ')) {
        at = strchr(at, '\n');
        at = at ? at + 1 : NULL;
    }
    if (at && sscanf(at + length, " GB/s %lf against %lf", &out->ours, &out->theirs) == 2 && out->theirs > 0)
        out->ratio = out->ours / out->theirs;
    else if (at)
        tb__text_add(&why, "%.*s", (int)strcspn(at, "\n"), at);
    else if (why.count == 0)
        tb__text_add(&why, "gpu_torch.py told no rate of it");
    if (why.count)
        (void)tb__text_take(&why, &out->reason);
    tb__text_fini(&why);
}

static tb_status run_program(bench *b, const char **argv, tb__text *said, tb__text *reason) {
    static const char missing[] = "python3 with torch is not installed: pip install torch";
    static const char look[] = "import sys, importlib.util\nsys.exit(0 if importlib.util.find_spec('torch') else 127)";
    const char *const ask[] = {"python3", "-c", look, NULL};
    char program[640], folder[80];
    if (!bench_find_file("gpu_torch.py", program, sizeof program)) {
        tb__text_add(reason, "gpu_torch.py is not where it was installed");
        return TB_OK;
    }
    argv[1] = program;
    TB_TRY(tool_folder_make(folder, sizeof folder));
    tb_status status = bench_program_run(ask, folder, &b->guard, missing, said, reason);
    if (status == TB_OK && reason->count == 0)
        status = bench_program_run(argv, folder, &b->guard, missing, said, reason);
    tool_folder_remove(folder);
    return status;
}

static tb_status publish_all(bench *b, const tb__text *said, const tb__text *reason) {
    for (size_t i = 0; i < NPEERS; i++) {
        bench_result result = {.name = peers[i].name,
                               .work = peers[i].work,
                               .against = "one copy_",
                               .rounds = b->rounds,
                               .extra_bytes = -1};
        if (!bench_is_wanted(b, peers[i].line))
            continue;
        find_result(peers[i].line, said, reason, &result);
        TB_TRY(bench_publish(b, result));
    }
    return TB_OK;
}

tb_status bench_gpu_torch_run(bench *b) {
    tb__text works[NPEERS] = {{0}}, said = {0}, reason = {0};
    const char *argv[MAX_PEERS + FIRST_ARGS + 1] = {"python3"};
    char rounds[24];
    size_t n = FIRST_ARGS;
    tb_status status = TB_OK;
    snprintf(rounds, sizeof rounds, "%d", b->rounds);
    argv[2] = rounds;
    tool_show_line("what PyTorch takes for the same");
    for (size_t i = 0; i < NPEERS && status == TB_OK; i++) {
        if (!bench_is_wanted(b, peers[i].line))
            continue;
        status = describe_work(peers[i].line, b->size, &works[i]);
        argv[n++] = works[i].data;
    }
    if (status == TB_OK && n > FIRST_ARGS)
        status = run_program(b, argv, &said, &reason);
    if (status == TB_OK)
        status = publish_all(b, &said, &reason);
    for (size_t i = 0; i < NPEERS; i++)
        tb__text_fini(&works[i]);
    tb__text_fini(&said);
    tb__text_fini(&reason);
    return status;
}
