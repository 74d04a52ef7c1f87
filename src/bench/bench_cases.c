/* The cases that are measured, and the tensors of each at a given size. */
#include "bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define ROWS    "mesh=4 place=Shard(0)"
#define COLUMNS "mesh=4 place=Shard(1)"
#define FULL    "mesh=4 place=Replicate"
#define SUM     "mesh=4 place=Partial(sum)"

enum { SIDE = TOOL_DEFAULT_RANKS };

/* About nbytes: square, or up to four times as high as wide, and evenly cut among the ranks of a side. */
static tb_shape matrix(int64_t nbytes, tb_dtype dtype) {
    int64_t n = nbytes / (tb_dtype_bits(dtype) / 8), columns = 1;
    while (4 * columns * columns <= n)
        columns *= 2;
    return (tb_shape){2, {n / columns / SIDE * SIDE, columns}};
}

static tb_status build_matrix(tool_tensors *tensors, int64_t size) {
    tool_tensor tensor = {.name = "matrix", .shape = matrix(size, TB_F32), .dtype = {TB_F32, TB_F32}};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

static tb_status build_cast(tool_tensors *tensors, int64_t size) {
    tool_tensor tensor = {
        .name = "matrix", .shape = matrix(size, TB_F32), .dtype = {TB_F32, TB_BF16}, .values = TOOL_FLOATS};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

/* The size is that of all contributions together. */
static tb_status build_partial(tool_tensors *tensors, int64_t size) {
    tool_tensor tensor = {.name = "gradient",
                          .shape = matrix(size / SIDE, TB_BF16),
                          .dtype = {TB_BF16, TB_BF16},
                          .values = TOOL_TERMS,
                          .nterms = SIDE};
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

static tb_status build_many(tool_tensors *tensors, int64_t count, tb_shape shape) {
    for (int64_t i = 0; i < (count > 0 ? count : 1); i++) {
        tool_tensor tensor = {.shape = shape, .dtype = {TB_F32, TB_F32}};
        snprintf(tensor.name, sizeof tensor.name, "tensor.%" PRId64, i);
        if (!tb__vec_push(tensors, tensor))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status build_small(tool_tensors *tensors, int64_t size) {
    enum { TENSOR_BYTES = 64 << 10 };
    return build_many(tensors, size / 4 / TENSOR_BYTES, (tb_shape){2, {128, 128}});
}

/* 65,536 of them, of 512 bytes, where the size is 1 GiB. */
static tb_status build_tiny(tool_tensors *tensors, int64_t size) {
    enum { SHARE = 16 << 10 };
    return build_many(tensors, size / SHARE, (tb_shape){1, {128}});
}

static tb_status build_model(tool_tensors *tensors, int64_t size) {
    tool_llama llama;
    return tool_llama_add(tensors, size, &llama);
}

const bench_case bench_cases[] = {
    {.work = "f32 matrix, Shard(0) to Shard(1), 4 to 4 ranks",
     .nlines = 2,
     .line = {{"row_col", BENCH_MEMCPY, .at_least_of_limit = 0.90}, {"row_col_hand", BENCH_HAND, 0.97}},
     .src = ROWS,
     .dst = COLUMNS,
     .build = build_matrix},
    {.work = "the same from and to malloc'ed memory",
     .nlines = 1,
     .line = {{"foreign", BENCH_MEMCPY, 0.45}},
     .src = ROWS,
     .dst = COLUMNS,
     .is_foreign = true,
     .build = build_matrix},
    {.work = "small Llama, bf16, Shard(0) on 4 to 2x2 DPxTP",
     .nlines = 1,
     .line = {{"model", BENCH_MEMCPY, 0.90}},
     .build = build_model},
    {.work = "f32 matrix, Shard(0) to Replicate, 4 to 4 ranks",
     .nlines = 1,
     .line = {{"replicate", BENCH_MEMCPY, 0.90}},
     .src = ROWS,
     .dst = FULL,
     .build = build_matrix},
    {.work = "f32 matrix, Shard(0) to Shard(0), the same 4 ranks",
     .nlines = 1,
     .line = {{"local", BENCH_MEMCPY, 0.95}},
     .src = ROWS,
     .dst = ROWS,
     .is_local = true,
     .build = build_matrix},
    {.work = "tensors of 64 KiB, Shard(0) to Shard(0), 4 to 4 ranks",
     .nlines = 1,
     .line = {{"small", BENCH_MEMCPY, 0.75}},
     .src = ROWS,
     .dst = ROWS,
     .build = build_small},
    {.work = "tensors of 512 bytes, Replicate to Replicate, 4 to 4 ranks",
     .nlines = 1,
     .line = {{BENCH_TINY, BENCH_MEMCPY}},
     .src = FULL,
     .dst = FULL,
     .build = build_tiny},
    {.work = "f32 to bf16, Shard(0) to Shard(1), input bytes",
     .nlines = 1,
     .line = {{"cast", BENCH_CAST, 0.95}},
     .src = ROWS,
     .dst = COLUMNS,
     .build = build_cast},
    {.work = "bf16 Partial(sum) over 4 to Shard(0), 4 reads and 1 write",
     .nlines = 1,
     .line = {{"partial", BENCH_MEMCPY_TRAFFIC, 0.85}},
     .src = SUM,
     .dst = ROWS,
     .build = build_partial},
};

const size_t bench_ncases = sizeof bench_cases / sizeof *bench_cases;

const bench_case *bench_case_of(const char *line) {
    for (size_t i = 0; i < bench_ncases; i++) {
        for (int l = 0; l < bench_cases[i].nlines; l++) {
            if (strcmp(bench_cases[i].line[l].name, line) == 0)
                return &bench_cases[i];
        }
    }
    return NULL;
}

static tb_status fill_job(const bench_case *c, int64_t size, tool_job *job) {
    TB_TRY(tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "from", c->src, SIDE));
    TB_TRY(tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "to", c->dst, SIDE));
    TB_TRY(c->build(&job->tensors, size));
    return tool_job_weigh(job);
}

tb_status bench_job_init(const bench_case *c, int64_t size, tool_job *job, int64_t *counted) {
    *job = (tool_job){.is_foreign = c->is_foreign, .is_local = c->is_local};
    tb_status status = fill_job(c, size, job);
    if (status != TB_OK) {
        tool_job_fini(job);
        return status;
    }
    switch (c->line[0].against) {
    case BENCH_MEMCPY:
    case BENCH_HAND:
        *counted = job->nbytes[TOOL_TARGET];
        break;
    case BENCH_CAST:
        *counted = job->nbytes[TOOL_SOURCE];
        break;
    case BENCH_MEMCPY_TRAFFIC:
        *counted = job->nbytes[TOOL_SOURCE] + job->nbytes[TOOL_TARGET];
        break;
    }
    return TB_OK;
}
