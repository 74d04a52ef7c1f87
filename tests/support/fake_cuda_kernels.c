/* The kernels of the CUDA device on the CPU: descriptors become moves again, which the host's code does. A box or
 * matrix is done as a whole where its first tile is; the others are only counted. */
#include "fake_cuda_kernels.h"

#include "base/checksum.h"
#include "device/cuda/kernels.h"
#include "device/host/move.h"
#include "device/host/quant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SOURCES = 1024 };

typedef struct launch {
    const tb__cuda_args *args;
    const char *kernel;
    uint32_t slots; /* of an item */
    void *(*translate)(uint64_t device_address);
} launch;

static _Noreturn void die(const launch *l, const char *what) {
    fprintf(stderr, "fake CUDA kernel %s: %s\n", l->kernel, what);
    abort();
}

static bool is_kernel(const launch *l, const char *prefix) {
    return strncmp(l->kernel + strlen("tb__"), prefix, strlen(prefix)) == 0;
}

static void *src_at(const launch *l, uint64_t address, uint32_t flags) {
    return l->translate(address + (flags & TB__CUDA_SRC_IN_BUFFER ? l->args->src_buffer : 0));
}

static void *dst_at(const launch *l, uint64_t address, uint32_t flags) {
    return l->translate(address + (flags & TB__CUDA_DST_IN_BUFFER ? l->args->dst_buffer : 0));
}

/* The number of the i-th item. */
static uint32_t find_item(const launch *l, uint32_t i) {
    const tb__cuda_args *a = l->args;
    if (a->list)
        return ((const uint32_t *)l->translate(a->list))[i];
    uint32_t k = 0;
    while (k + 1 < a->nranges && a->ranges[k + 1].begin <= i)
        k++;
    return a->ranges[k].first + (i - a->ranges[k].begin);
}

/* ---- Copies, casts, reductions ----------------------------------------------------------------------------------- */

static void copy_pieces(const launch *l) {
    const tb__cuda_piece *pieces = l->translate(l->args->items);
    for (uint32_t i = 0; i < l->args->nitems; i++) {
        const tb__cuda_piece *p = &pieces[find_item(l, i)];
        if (p->flags & TB__CUDA_ZERO)
            memset(dst_at(l, p->dst, p->flags), 0, p->nbytes);
        else
            memcpy(dst_at(l, p->dst, p->flags), src_at(l, p->src, p->flags), p->nbytes);
    }
}

/* Integers of this size. */
static tb_dtype dtype_of_size(int64_t size) {
    return size == 8 ? TB_U64 : size == 4 ? TB_U32 : size == 2 ? TB_U16 : TB_U8;
}

/* Dimensions and the steps of one side, in elements; the row is the last dimension, if it has more than one. */
static void list_strides(const tb__cuda_box *box, const int64_t *steps, int64_t size, int64_t *stride) {
    for (uint32_t d = 0; d < box->ndim; d++)
        stride[box->ndim - 1 - d] = steps[d] / size;
    if (box->ndim < TB_MAX_DIMS)
        stride[box->ndim] = 1;
}

static void run_box(const launch *l, const tb__cuda_box *box, bool is_plain) {
    static const void *src[MOST_SOURCES];
    static int64_t src_stride[MOST_SOURCES][TB_MAX_DIMS];
    const tb__cuda_dim *dim = (const tb__cuda_dim *)(box + 1);
    int64_t dst_steps[TB_MAX_DIMS], src_steps[TB_MAX_DIMS], run = box->run;
    tb__move move = {.src_dtype = box->src_dtype,
                     .wire_dtype = box->wire_dtype,
                     .dst_dtype = box->dst_dtype,
                     .nsrc = box->nsrc,
                     .op = box->op,
                     .avg_divisor = (uint64_t)box->double_divisor,
                     .src = src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS])src_stride,
                     .dst = dst_at(l, box->dst, box->flags)};
    if (box->nsrc > MOST_SOURCES)
        die(l, "too many sources");
    if (is_plain) { /* rows of bytes; where no dimension is left for them, of one element */
        bool is_element = box->ndim == TB_MAX_DIMS;
        move.src_dtype = move.wire_dtype = move.dst_dtype = is_element ? dtype_of_size(run) : TB_U8;
        run = is_element ? 1 : run;
    }
    int64_t src_size = tb_dtype_bits(move.src_dtype) / 8, dst_size = tb_dtype_bits(move.dst_dtype) / 8;
    for (uint32_t d = 0; d < box->ndim; d++) {
        move.len[box->ndim - 1 - d] = dim[d].len.by;
        dst_steps[d] = dim[d].dst_step;
        src_steps[d] = dim[d].src_step;
    }
    move.ndim = (int)box->ndim + (run > 1);
    if (run > 1)
        move.len[box->ndim] = run;
    list_strides(box, dst_steps, dst_size, move.dst_stride);
    const int64_t *more = (const int64_t *)(dim + box->ndim);
    for (uint32_t k = 0; k<box->nsrc; k++, more += k> 1 ? 2 + box->ndim : 0) {
        src[k] = k ? src_at(l, (uint64_t)more[0], (uint32_t)more[1]) : src_at(l, box->src, box->flags);
        list_strides(box, k ? more + 2 : src_steps, src_size, src_stride[k]);
    }
    if (tb__move_check(&move) != TB_OK)
        die(l, tb_error_detail());
    tb__move_run(&move, tb__move_whole(&move), false);
}

/* ---- Quantised tensors ------------------------------------------------------------------------------------------- */

static bool find_scale(const launch *l, const tb__cuda_matrix *m, tb__cuda_result *result, float *scale) {
    *scale = m->scale ? *(const float *)l->translate(m->scale) : result->scale;
    if (*scale > 0 && isfinite(*scale))
        return true;
    memcpy(&result->bad_scale, scale, sizeof *scale);
    result->has_bad_scale = 1;
    return false;
}

static void quantise(const launch *l, const tb__cuda_matrix *m, const tb__quant_tensor *to, tb__cuda_result *result) {
    tb__quant_rows from = {.data = src_at(l, m->rows_at, m->flags),
                           .dtype = m->dtype,
                           .stride = m->row_step / (int64_t)(tb_dtype_bits(m->dtype) / 8)};
    tb__quant_job job;
    float amax = 0;
    if (tb__quant_begin(&job, to, to ? m->first : 0, m->nrows, m->columns, &from) != TB_OK)
        die(l, tb_error_detail());
    if (job.nparts)
        tb__quant_run(&job, 0, job.nparts);
    if (tb__quant_end(&job, &amax) != TB_OK)
        result->bad = (uint64_t)atomic_load(&job.bad);
    memcpy(&result->amax, &amax, sizeof amax);
}

static void dequantise(const launch *l, const tb__cuda_matrix *m, const tb__quant_tensor *from) {
    tb__quant_rows to = {.data = dst_at(l, m->rows_at, m->flags),
                         .dtype = m->dtype,
                         .stride = m->row_step / (int64_t)(tb_dtype_bits(m->dtype) / 8)};
    tb__dequant_job job;
    if (tb__dequant_begin(&job, from, m->first, m->nrows, m->first_column, m->columns, &to) != TB_OK)
        die(l, tb_error_detail());
    if (job.nparts)
        tb__dequant_run(&job, 0, job.nparts);
}

static void run_matrix(const launch *l, const tb__cuda_matrix *m) {
    tb__cuda_result *result = (tb__cuda_result *)l->translate(l->args->results) + m->result;
    bool is_back = is_kernel(l, "dequantise");
    if (is_kernel(l, "amax")) {
        quantise(l, m, NULL, result);
        return;
    }
    tb__quant_tensor tensor = {.format = {.kind = m->kind,
                                          .is_floor = m->flags & TB__CUDA_FLOOR,
                                          .is_power_of_two = m->flags & TB__CUDA_POWER_OF_TWO,
                                          .is_swizzled = m->flags & TB__CUDA_SWIZZLED},
                               .rows = m->rows,
                               .columns = m->data_step,
                               .data = is_back ? l->translate(m->data) : dst_at(l, m->data, m->flags)};
    if (m->kind != TB__QUANT_FP8_TENSOR)
        tensor.scales = is_back ? l->translate(m->scales) : dst_at(l, m->scales, m->flags);
    bool has_scale = m->kind == TB__QUANT_FP8_TENSOR || m->kind == TB__QUANT_NVFP4;
    if (has_scale && !find_scale(l, m, result, &tensor.scale))
        return;
    if (is_back)
        dequantise(l, m, &tensor);
    else
        quantise(l, m, &tensor, result);
}

/* ---- Launches ---------------------------------------------------------------------------------------------------- */

static void run_tiles(const launch *l) {
    const tb__cuda_tile *tiles = l->translate(l->args->items);
    bool is_plain = is_kernel(l, "copy") || is_kernel(l, "transpose");
    bool is_box = is_plain || is_kernel(l, "cast") || is_kernel(l, "reduce") || is_kernel(l, "number");
    for (uint32_t i = 0; i < l->args->nitems; i++) {
        tb__cuda_tile tile = tiles[find_item(l, i)];
        const void *at = l->translate(l->args->heap + (uint64_t)tile.place * TB__CUDA_HEAP_UNIT);
        uint32_t nslots = is_box ? ((const tb__cuda_box *)at)->nslots : ((const tb__cuda_matrix *)at)->nslots;
        if ((uint64_t)tile.tile * l->slots >= nslots)
            die(l, "a tile beyond its box or matrix");
        if (tile.tile == 0 && is_box)
            run_box(l, at, is_plain);
        else if (tile.tile == 0)
            run_matrix(l, at);
    }
}

static void sum_blocks(const launch *l) {
    const char *bytes = l->translate(l->args->items);
    uint64_t *sums = l->translate(l->args->results);
    for (uint32_t i = 0; i < l->args->nitems; i++)
        sums[i] = tb__checksum_block(bytes + (size_t)i * TB__CHECKSUM_BLOCK, TB__CHECKSUM_BLOCK);
}

bool fake_cuda_launch(const char *kernel, unsigned grid, void **params, void *(*translate)(uint64_t device_address)) {
    static const struct {
        const char *name;
        uint32_t blocks, slots;
    } kernels[] = {
#define KERNEL(name, threads, blocks, slots) {"tb__" #name, blocks, slots},
        TB__CUDA_KERNELS(KERNEL)};
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        launch l = {.args = params[0], .kernel = kernel, .slots = kernels[i].slots, .translate = translate};
        if (strcmp(kernels[i].name, kernel) != 0)
            continue;
        bool is_pieces = i == TB__CUDA_copy_pieces || i == TB__CUDA_copy_shifted_pieces;
        if (!is_pieces && grid != l.args->nitems * kernels[i].blocks)
            die(&l, "not as many blocks as items");
        if (is_pieces)
            copy_pieces(&l);
        else if (i == TB__CUDA_checksum)
            sum_blocks(&l);
        else
            run_tiles(&l);
        return true;
    }
    return false;
}
