/* The cases of `tensorbus bench --gpu`, and the tensors of each. */
#include "bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define GPU     "cuda:0"
#define PINNED  "pinned"
#define ROWS    "mesh=4 place=Shard(0)"
#define COLUMNS "mesh=4 place=Shard(1)"
#define FULL    "mesh=4 place=Replicate"
#define SUM     "mesh=4 place=Partial(sum)"
#define ONE     "mesh=1 place=Replicate"

enum { SIDE = TOOL_DEFAULT_RANKS };

static tb_status push(tool_tensors *tensors, tool_tensor tensor) {
    return tb__vec_push(tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

/* About nbytes, with as many columns; cut evenly, and in blocks of 128 rows where it is large. */
static tb_shape matrix(int64_t nbytes, tb_dtype dtype, int64_t columns) {
    int64_t rows = nbytes / (columns * tb_dtype_bits(dtype) / 8), step = rows >= 128 * SIDE ? 128 * SIDE : SIDE;
    return (tb_shape){2, {rows >= step ? rows / step * step : step, columns}};
}

static tb_status build_matrix(tool_tensors *tensors, int64_t size) {
    return push(tensors,
                (tool_tensor){.name = "matrix", .shape = matrix(size, TB_F32, 16384), .dtype = {TB_F32, TB_F32}});
}

static tb_status build_model(tool_tensors *tensors, int64_t size) {
    tool_llama llama;
    return tool_llama_add(tensors, size, &llama);
}

static tb_status build_many(tool_tensors *tensors, int64_t count, tb_shape shape) {
    for (int64_t i = 0; i < (count > 0 ? count : 1); i++) {
        tool_tensor tensor = {.shape = shape, .dtype = {TB_F32, TB_F32}};
        snprintf(tensor.name, sizeof tensor.name, "tensor.%" PRId64, i);
        TB_TRY(push(tensors, tensor));
    }
    return TB_OK;
}

/* With 2 GiB these are 4,096 tensors, 65,536, and 1 Mi. */
static tb_status build_small(tool_tensors *tensors, int64_t size) {
    return build_many(tensors, size >> 19, (tb_shape){2, {128, 128}});
}

static tb_status build_tiny(tool_tensors *tensors, int64_t size) {
    return build_many(tensors, size >> 15, (tb_shape){1, {128}});
}

static tb_status build_tiny_1m(tool_tensors *tensors, int64_t size) {
    return build_many(tensors, size >> 11, (tb_shape){1, {128}});
}

/* A target's rows have an odd number of elements: they begin at any multiple of 4 bytes, and a source's at others. */
static tb_status build_rows4(tool_tensors *tensors, int64_t size) {
    return push(tensors,
                (tool_tensor){.name = "matrix", .shape = matrix(size, TB_F32, SIDE * 4097), .dtype = {TB_F32, TB_F32}});
}

/* Each of 4 targets gets 8 of the 32 elements of a row. */
static tb_status build_runs32(tool_tensors *tensors, int64_t size) {
    return push(tensors, (tool_tensor){.name = "matrix", .shape = matrix(size, TB_F32, 32), .dtype = {TB_F32, TB_F32}});
}

static tb_status build_cast(tool_tensors *tensors, int64_t size) {
    return push(tensors, (tool_tensor){.name = "matrix",
                                       .shape = matrix(size, TB_F32, 16384),
                                       .dtype = {TB_F32, TB_BF16},
                                       .values = TOOL_FLOATS});
}

static tb_status build_coded(tool_tensors *tensors, int64_t size, const char *encode, tb_dtype dtype) {
    return push(tensors, (tool_tensor){.name = "matrix",
                                       .shape = matrix(size, TB_BF16, 8192),
                                       .dtype = {TB_BF16, dtype},
                                       .values = TOOL_FINITE,
                                       .encode = encode});
}

static tb_status build_mxfp8(tool_tensors *tensors, int64_t size) {
    return build_coded(tensors, size, "mxfp8", TB_F8E4M3);
}

static tb_status build_fp8_block(tool_tensors *tensors, int64_t size) {
    return build_coded(tensors, size, "fp8_block", TB_F8E4M3);
}

static tb_status build_nvfp4(tool_tensors *tensors, int64_t size) {
    return build_coded(tensors, size, "nvfp4", TB_F4E2M1);
}

/* The size is that of all contributions together. */
static tb_status build_partial(tool_tensors *tensors, int64_t size) {
    return push(tensors, (tool_tensor){.name = "gradient",
                                       .shape = matrix(size / SIDE, TB_BF16, 16384),
                                       .dtype = {TB_BF16, TB_BF16},
                                       .values = TOOL_TERMS,
                                       .nterms = SIDE});
}

static tb_status build_transposed(tool_tensors *tensors, int64_t size, tb_dtype dtype) {
    return push(tensors, (tool_tensor){.name = "matrix",
                                       .shape = matrix(size, dtype, 8192),
                                       .dtype = {dtype, dtype},
                                       .is_transposed = true});
}

static tb_status build_transposed_f32(tool_tensors *tensors, int64_t size) {
    return build_transposed(tensors, size, TB_F32);
}

static tb_status build_transposed_bf16(tool_tensors *tensors, int64_t size) {
    return build_transposed(tensors, size, TB_BF16);
}

const bench_gpu_case bench_gpu_cases[] = {
    {"gpu_row_col", "f32 matrix, Shard(0) to Shard(1)", 0.95, 0, ROWS, COLUMNS, {GPU, GPU}, build_matrix},
    {"gpu_model", "small Llama, bf16, Shard(0) to 2x2 DPxTP", 0.95, 0, NULL, NULL, {GPU, GPU}, build_model},
    {"gpu_replicate", "f32 matrix, Shard(0) to Replicate", 0.95, 0, ROWS, FULL, {GPU, GPU}, build_matrix},
    {BENCH_GPU_SMALL, "tensors of 64 KiB, all to each target", 0.90, 0, FULL, FULL, {GPU, GPU}, build_small},
    {"gpu_tiny", "tensors of 512 bytes, all to each target", 0.85, 0, FULL, FULL, {GPU, GPU}, build_tiny},
    {"gpu_tiny_1m", "tensors of 512 bytes, 1 Mi of them, 1 to 1 rank", 0.85, 0, ONE, ONE, {GPU, GPU}, build_tiny_1m},
    {"gpu_rows4",
     "f32 matrix to columns, rows at multiples of 4 bytes",
     0.80,
     0,
     ROWS,
     COLUMNS,
     {GPU, GPU},
     build_rows4},
    {"gpu_runs32", "f32 matrix to columns, runs of 32 bytes", 0.60, 0, ROWS, COLUMNS, {GPU, GPU}, build_runs32},
    {"gpu_cast", "f32 to bf16, Shard(0) to Shard(1), reads and writes", 0.95, 1, ROWS, COLUMNS, {GPU, GPU}, build_cast},
    {"gpu_mxfp8", "bf16 to MXFP8, reads and writes", 0.95, 1, ROWS, ROWS, {GPU, GPU}, build_mxfp8},
    {"gpu_fp8_block",
     "bf16 to FP8 in blocks of 128, reads and writes",
     0.95,
     1,
     ROWS,
     ROWS,
     {GPU, GPU},
     build_fp8_block},
    {"gpu_nvfp4", "bf16 to NVFP4, both reads and the write", 0.70, 2, ROWS, ROWS, {GPU, GPU}, build_nvfp4},
    {"gpu_partial",
     "bf16 Partial(sum) over 4 to Shard(0), reads and writes",
     0.95,
     SIDE,
     SUM,
     ROWS,
     {GPU, GPU},
     build_partial},
    {"gpu_transpose_f32",
     "f32 matrix, transposed by its target",
     0.85,
     0,
     ROWS,
     ROWS,
     {GPU, GPU},
     build_transposed_f32},
    {"gpu_transpose_bf16",
     "bf16 matrix, transposed by its target",
     0.80,
     0,
     ROWS,
     ROWS,
     {GPU, GPU},
     build_transposed_bf16},
    {"gpu_to_host",
     "f32 matrix, Shard(0) to Shard(0), to pinned memory",
     0.95,
     0,
     ROWS,
     ROWS,
     {GPU, PINNED},
     build_matrix},
    {"host_to_gpu",
     "f32 matrix, Shard(0) to Shard(0), from pinned memory",
     0.95,
     0,
     ROWS,
     ROWS,
     {PINNED, GPU},
     build_matrix},
};

const size_t bench_gpu_ncases = sizeof bench_gpu_cases / sizeof *bench_gpu_cases;

const bench_gpu_case *bench_gpu_case_of(const char *name) {
    const bench_gpu_case *c = bench_gpu_cases;
    while (strcmp(c->name, name) != 0)
        c++;
    return c;
}

bool bench_gpu_is_line(const char *name, size_t length) {
    static const char *const others[] = {BENCH_GPU_LAUNCHES, BENCH_GPU_LATENCY, BENCH_GPU_BUS};
    for (size_t i = 0; i < bench_gpu_ncases; i++) {
        if (strlen(bench_gpu_cases[i].name) == length && strncmp(bench_gpu_cases[i].name, name, length) == 0)
            return true;
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (strlen(others[i]) == length && strncmp(others[i], name, length) == 0)
            return true;
    }
    return false;
}

bench_carried_name bench_gpu_carried_name(const char *transport) {
    bench_carried_name name;
    snprintf(name.text, sizeof name.text, "%s_row_col", transport);
    return name;
}

tb_status bench_gpu_job_init(const bench_gpu_case *c, int64_t size, tool_job *job) {
    *job = (tool_job){.memory = {c->memory[TOOL_SOURCE], c->memory[TOOL_TARGET]}};
    tb_status status = tool_side_init(&job->side[TOOL_SOURCE], TOOL_SOURCE, "from", c->src, 0);
    if (status == TB_OK)
        status = tool_side_init(&job->side[TOOL_TARGET], TOOL_TARGET, "to", c->dst, 0);
    if (status == TB_OK)
        status = c->build(&job->tensors, size);
    if (status == TB_OK)
        status = tool_job_weigh(job);
    if (status != TB_OK)
        tool_job_fini(job);
    return status;
}

int64_t bench_gpu_payload(const bench_gpu_case *c, const tool_parts *parts) {
    int64_t nbytes = 0;
    for (size_t i = 0; i < parts->count; i++) {
        const tool_part *part = &parts->part[i];
        int64_t read = part->nelements * tb_dtype_bits(part->tensor->dtype[TOOL_SOURCE]) / 8;
        nbytes += c->nreads > 0 ? (c->nreads * read + part->nbytes) / 2 : part->nbytes;
    }
    /* cuMemcpyAsync is slower by a fifth where the size is not round; this one is nobody's. */
    return c->nreads > 0 && nbytes > 64 << 20 ? nbytes >> 21 << 21 : nbytes;
}
