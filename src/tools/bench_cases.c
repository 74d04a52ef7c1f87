/* The cases that are measured, and the tensors of each at a given size. */
#include "tools/bench.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define ROWS      "mesh=4 place=Shard(0)"
#define COLUMNS   "mesh=4 place=Shard(1)"
#define FULL      "mesh=4 place=Replicate"
#define SUM       "mesh=4 place=Partial(sum)"
#define TP_ROWS   "mesh=2,2 place=Replicate,Shard(0)"
#define TP_COLS   "mesh=2,2 place=Replicate,Shard(1)"
#define TP_COPIES "mesh=2,2 place=Replicate,Replicate"

__attribute__((format(printf, 4, 5))) static tb_status add(bench_job *job, bench_tensor tensor, const char *dst,
                                                           const char *name, ...) {
    va_list args;
    va_start(args, name);
    vsnprintf(tensor.name, sizeof tensor.name, name, args);
    va_end(args);
    tensor.src_layout = job->c->src;
    tensor.dst_layout = dst ? dst : job->c->dst;
    return tb__vec_push(&job->tensors, tensor) ? TB_OK : TB_NO_MEMORY;
}

/* About nbytes: square, or up to four times as high as wide, and evenly cut among the ranks of a side. */
static tb_shape matrix(int64_t nbytes, tb_dtype dtype) {
    int64_t n = nbytes / (tb_dtype_bits(dtype) / 8), columns = 1;
    while (4 * columns * columns <= n)
        columns *= 2;
    return (tb_shape){2, {n / columns / BENCH_SIDE * BENCH_SIDE, columns}};
}

static tb_status build_matrix(bench_job *job, int64_t size) {
    bench_tensor tensor = {.shape = matrix(size, TB_F32), .src_dtype = TB_F32, .dst_dtype = TB_F32};
    return add(job, tensor, NULL, "matrix");
}

static tb_status build_cast(bench_job *job, int64_t size) {
    bench_tensor tensor = {
        .shape = matrix(size, TB_F32), .src_dtype = TB_F32, .dst_dtype = TB_BF16, .values = BENCH_FLOATS};
    return add(job, tensor, NULL, "matrix");
}

/* The size is that of all contributions together. */
static tb_status build_partial(bench_job *job, int64_t size) {
    bench_tensor tensor = {
        .shape = matrix(size / BENCH_SIDE, TB_BF16), .src_dtype = TB_BF16, .dst_dtype = TB_BF16, .values = BENCH_TERMS};
    return add(job, tensor, NULL, "gradient");
}

static tb_status build_small(bench_job *job, int64_t size) {
    enum { TENSOR_BYTES = 64 << 10 };
    int64_t count = size / 4 / TENSOR_BYTES;
    for (int64_t i = 0; i < (count > 0 ? count : 1); i++) {
        bench_tensor tensor = {.shape = {2, {128, 128}}, .src_dtype = TB_F32, .dst_dtype = TB_F32};
        TB_TRY(add(job, tensor, NULL, "tensor.%" PRId64, i));
    }
    return TB_OK;
}

static bench_tensor weight(int64_t rows, int64_t columns) {
    return (bench_tensor){.shape = {2, {rows, columns}}, .src_dtype = TB_BF16, .dst_dtype = TB_BF16};
}

/* One layer of a Llama: grouped-query attention and a gated MLP, cut for tensor parallelism as usual. */
static tb_status add_layer(bench_job *job, int64_t hidden, int64_t layer) {
    int64_t kv = hidden / 2, inner = hidden / 4 * 11;
    bench_tensor norm = {.shape = {1, {hidden}}, .src_dtype = TB_BF16, .dst_dtype = TB_BF16};
    const struct {
        const char *name, *dst;
        bench_tensor tensor;
    } parts[] = {
        {"input_layernorm", TP_COPIES, norm},
        {"self_attn.q_proj", TP_ROWS, weight(hidden, hidden)},
        {"self_attn.k_proj", TP_ROWS, weight(kv, hidden)},
        {"self_attn.v_proj", TP_ROWS, weight(kv, hidden)},
        {"self_attn.o_proj", TP_COLS, weight(hidden, hidden)},
        {"post_attention_layernorm", TP_COPIES, norm},
        {"mlp.gate_proj", TP_ROWS, weight(inner, hidden)},
        {"mlp.up_proj", TP_ROWS, weight(inner, hidden)},
        {"mlp.down_proj", TP_COLS, weight(hidden, inner)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        TB_TRY(add(job, parts[i].tensor, parts[i].dst, "layers.%" PRId64 ".%s", layer, parts[i].name));
    return TB_OK;
}

/* As wide as the size allows, up to 1024, and then as deep: 39 layers and 354 tensors at 1 GiB. */
static tb_status build_model(bench_job *job, int64_t size) {
    int64_t hidden = 1024;
    while (hidden > 64 && hidden * hidden > size / 256)
        hidden /= 2;
    int64_t vocabulary = 125 * (hidden / 4), per_layer = hidden * hidden / 4 * 45;
    int64_t layers = (size / 2 - 2 * vocabulary * hidden) / per_layer;
    TB_TRY(add(job, weight(vocabulary, hidden), TP_ROWS, "embed_tokens"));
    for (int64_t i = 0; i < (layers > 0 ? layers : 1); i++)
        TB_TRY(add_layer(job, hidden, i));
    bench_tensor norm = {.shape = {1, {hidden}}, .src_dtype = TB_BF16, .dst_dtype = TB_BF16};
    TB_TRY(add(job, norm, TP_COPIES, "norm"));
    return add(job, weight(vocabulary, hidden), TP_ROWS, "lm_head");
}

const bench_case bench_cases[] = {
    {.work = "f32 matrix, Shard(0) to Shard(1), 4 to 4 ranks",
     .nlines = 2,
     .line = {{"row_col", BENCH_MEMCPY, 0.85}, {"row_col_hand", BENCH_HAND, 0.95}},
     .src = ROWS,
     .dst = COLUMNS,
     .build = build_matrix},
    {.work = "the same from and to malloc'ed memory",
     .nlines = 1,
     .line = {{"foreign", BENCH_MEMCPY, 0.25}},
     .src = ROWS,
     .dst = COLUMNS,
     .is_foreign = true,
     .build = build_matrix},
    {.work = "small Llama, bf16, Shard(0) on 4 to 2x2 DPxTP",
     .nlines = 1,
     .line = {{"model", BENCH_MEMCPY, 0.85}},
     .src = ROWS,
     .dst = TP_ROWS,
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
     .line = {{"small", BENCH_MEMCPY, 0.60}},
     .src = ROWS,
     .dst = ROWS,
     .build = build_small},
    {.work = "f32 to bf16, Shard(0) to Shard(1), input bytes",
     .nlines = 1,
     .line = {{"cast", BENCH_CAST, 0.90}},
     .src = ROWS,
     .dst = COLUMNS,
     .build = build_cast},
    {.work = "bf16 Partial(sum) over 4 to Shard(0), 4 reads and 1 write",
     .nlines = 1,
     .line = {{"partial", BENCH_MEMCPY_TRAFFIC, 0.60}},
     .src = SUM,
     .dst = ROWS,
     .build = build_partial},
};

const size_t bench_ncases = sizeof bench_cases / sizeof *bench_cases;

/* Counts what the ranks of both sides hold. */
static tb_status count(bench_job *job) {
    int64_t held[2] = {0, 0};
    for (size_t i = 0; i < job->tensors.count; i++) {
        for (int rank = 0; rank < 2 * BENCH_SIDE; rank++) {
            bench_part part = {
                .tensor = &job->tensors.item[i], .rank = rank % BENCH_SIDE, .is_source = rank < BENCH_SIDE};
            TB_TRY(bench_part_size(&part));
            held[part.is_source] += part.nbytes;
        }
    }
    switch (job->c->line[0].against) {
    case BENCH_MEMCPY:
    case BENCH_HAND:
        job->counted = held[false];
        break;
    case BENCH_CAST:
        job->counted = held[true];
        break;
    case BENCH_MEMCPY_TRAFFIC:
        job->counted = held[true] + held[false];
        break;
    }
    return TB_OK;
}

tb_status bench_job_init(const bench_case *c, int64_t size, bench_job *job) {
    *job = (bench_job){.c = c};
    tb_status status = c->build(job, size);
    if (status == TB_OK)
        status = count(job);
    if (status != TB_OK)
        bench_job_fini(job);
    return status;
}

void bench_job_fini(bench_job *job) {
    free(job->tensors.item);
    *job = (bench_job){0};
}
