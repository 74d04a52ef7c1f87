/* Quantised tensors as descriptors of matrices. */
#include "device/cuda/job.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

#define MOST_ELEMENTS ((int64_t)1 << 30) /* of a matrix; counts of slots are below 2^31 */

static int kernel_for(const tb__move *move, const tb__quantised *q) {
    tb_dtype dtype = move->kind == TB__MOVE_DEQUANTISE ? move->dst_dtype : move->src_dtype;
    bool is_f32 = dtype == TB_F32;
    if (move->kind == TB__MOVE_AMAX)
        return is_f32 ? TB__CUDA_amax_4 : TB__CUDA_amax_2;
    if (move->kind == TB__MOVE_DEQUANTISE)
        return is_f32 ? TB__CUDA_dequantise_4 : TB__CUDA_dequantise_2;
    switch (q->format.kind) {
    case TB__QUANT_MXFP8:
        return is_f32 ? TB__CUDA_mxfp8_4 : TB__CUDA_mxfp8_2;
    case TB__QUANT_FP8_BLOCK:
        return is_f32 ? TB__CUDA_fp8_block_4 : TB__CUDA_fp8_block_2;
    case TB__QUANT_FP8_TENSOR:
        return is_f32 ? TB__CUDA_fp8_tensor_4 : TB__CUDA_fp8_tensor_2;
    default:
        return is_f32 ? TB__CUDA_nvfp4_4 : TB__CUDA_nvfp4_2;
    }
}

/* Rows of the move from `first` on; it begins in the tensor where `q` says. */
typedef struct band {
    const tb__move *move;
    const tb__quantised *q; /* NULL: an amax */
    tb__quant_size size;    /* of the tensor */
    int64_t first, rows;
} band;

static uint32_t option_flags(const tb__quant_format *format) {
    return (format->is_floor ? TB__CUDA_FLOOR : 0) | (format->is_power_of_two ? TB__CUDA_POWER_OF_TWO : 0) |
           (format->is_swizzled ? TB__CUDA_SWIZZLED : 0);
}

/* Whether it writes a scale byte for each block of a row: then the slots are these blocks. */
static bool has_byte_scales(const band *b) {
    return b->move->kind == TB__MOVE_QUANTISE && b->size.scale_nbytes && b->size.band == 1;
}

/* Counts the slots of a row, and the rows, including those that only scales in tiles have. */
static void measure_slots(const band *b, int64_t slot, tb__cuda_matrix *m) {
    const tb__move *move = b->move;
    int64_t columns = move->len[1], rows = b->rows, per_row = (columns + slot - 1) / slot;
    if (move->kind == TB__MOVE_QUANTISE && b->q->format.kind == TB__QUANT_FP8_BLOCK) {
        per_row = b->size.scale_columns;
        rows = (rows + b->size.band - 1) / b->size.band;
    }
    if (has_byte_scales(b) && b->q->format.is_swizzled) {
        per_row = tb__align(per_row, 4);
        if (b->q->first + b->first + rows == b->q->rows)
            rows = tb__align(b->q->rows, 128) - b->q->first - b->first;
    }
    m->per_row = tb__cuda_divide_by((uint32_t)per_row);
    m->nslots = (uint32_t)(rows * per_row);
}

/* Lets tiles not cross rows, where the kernel gains from that and few of their slots are left unused. */
static void keep_tiles_in_rows(tb__cuda_matrix *m, int kernel) {
    bool gains = kernel == TB__CUDA_amax_2 || kernel == TB__CUDA_amax_4 || kernel == TB__CUDA_fp8_tensor_2 ||
                 kernel == TB__CUDA_fp8_tensor_4;
    uint32_t slots = tb__cuda_kernel_shapes[kernel].slots, per_row = m->per_row.by;
    uint32_t tiles = (per_row + slots - 1) / slots;
    if (!gains || (uint64_t)tiles * slots > per_row + per_row / 8)
        return;
    m->flags |= TB__CUDA_ROW_TILES;
    m->nslots = per_row;
    m->per_row = tb__cuda_divide_by(tiles);
}

static uint32_t count_tiles(const tb__cuda_matrix *m, int kernel) {
    uint32_t slots = tb__cuda_kernel_shapes[kernel].slots;
    return m->flags & TB__CUDA_ROW_TILES ? m->nrows * m->per_row.by : (m->nslots + slots - 1) / slots;
}

static uint64_t plain_alignment(const tb__move *move, const void *rows, int64_t step) {
    return (uintptr_t)rows | (move->len[0] > 1 ? (uint64_t)step : 0);
}

/* Whether slots of the quantised data begin on whole vectors, as the kernels load or store them, in one block. */
static bool is_data_aligned(const band *b, int64_t slot) {
    const tb__quantised *q = b->q;
    uint64_t nbytes = (uint64_t)tb__min64(b->size.data_dtype == TB_F4E2M1 ? slot / 2 : slot, 16);
    uint64_t step = (uint64_t)(b->size.data_dtype == TB_F4E2M1 ? q->columns / 2 : q->columns);
    return ((uintptr_t)q->data | (q->rows > 1 ? step : 0)) % nbytes == 0 && q->first_column % slot == 0 &&
           (b->move->kind == TB__MOVE_QUANTISE || q->rows == 1 || q->columns % slot == 0);
}

static void describe_tensor(const band *b, int64_t slot, bool is_scale_on_device, tb__cuda_matrix *m) {
    const tb__quantised *q = b->q;
    bool is_made = b->move->kind == TB__MOVE_QUANTISE;
    m->data = (uintptr_t)q->data;
    m->scales = (uintptr_t)q->scales;
    m->scale = is_scale_on_device ? (uintptr_t)q->scale : 0;
    m->kind = (uint8_t)q->format.kind;
    m->first = q->first + b->first;
    m->rows = q->rows;
    m->data_step = q->columns;
    m->first_column = is_made ? 0 : q->first_column;
    m->scale_columns = b->size.scale_columns;
    m->flags |= option_flags(&q->format);
    if (is_data_aligned(b, slot))
        m->flags |= is_made ? TB__CUDA_ALIGNED_DST : TB__CUDA_ALIGNED_SRC;
}

/* The matrix as it would be if it began where `from` does. */
static tb__cuda_matrix begin_with(tb__cuda_matrix m, const tb__cuda_matrix *from) {
    m.rows_at = from->rows_at;
    m.first = from->first;
    m.nrows = from->nrows;
    m.nslots = from->nslots;
    m.result = from->result;
    return m;
}

/* Adds the rows to the last matrix, if they follow its own, as chunks of a tensor do: kernels wait when they load a new
 * descriptor. No tile may have rows of both. */
static bool extend_matrix(tb__cuda_part_of_gpu *part, const tb__cuda_matrix *m, tb__cuda_quant *quant, int kernel,
                          uint32_t *first_tile) {
    if (part->quants.count == 0)
        return false;
    const tb__cuda_quant *before = &part->quants.item[part->quants.count - 1];
    tb__cuda_matrix *last = (tb__cuda_matrix *)(part->heap.item + (size_t)part->last_matrix * TB__CUDA_HEAP_UNIT);
    tb__cuda_matrix same = begin_with(*m, last);
    bool is_in_rows = m->flags & TB__CUDA_ROW_TILES;
    uint64_t slot_rows = last->nslots / last->per_row.by, slot_rows_of_m = m->nslots / m->per_row.by;
    bool fits = is_in_rows || (last->nslots % tb__cuda_kernel_shapes[kernel].slots == 0 &&
                               slot_rows * m->nrows == slot_rows_of_m * last->nrows); /* neither has padding */
    bool follows = memcmp(last, &same, sizeof same) == 0 && before->kind == quant->kind &&
                   before->format == quant->format && before->amax == quant->amax && before->scale == quant->scale &&
                   before->name == quant->name && before->columns == quant->columns &&
                   m->rows_at == last->rows_at + (uint64_t)last->nrows * (uint64_t)last->row_step &&
                   m->first == last->first + last->nrows && fits &&
                   ((int64_t)last->nrows + m->nrows) * m->columns <= MOST_ELEMENTS;
    if (!follows)
        return false;
    *first_tile = count_tiles(last, kernel);
    last->nrows += m->nrows;
    last->nslots += is_in_rows ? 0 : m->nslots;
    quant->first = before->first;
    quant->result = before->result;
    return true;
}

static tb_status add_matrix(tb__cuda_part_of_gpu *part, const tb__cuda_matrix *m, tb__cuda_quant *quant) {
    tb__cuda_matrix *to = tb__cuda_heap_add(part, sizeof *m, &part->last_matrix);
    if (!to)
        return TB_NO_MEMORY;
    quant->result = part->nresults++;
    *to = *m;
    to->result = quant->result;
    return TB_OK;
}

static tb_status add_band(tb__job *job, uint32_t gpu, const band *b, const void *const *src, bool is_scale_on_device) {
    const tb__move *move = b->move;
    bool is_source = move->kind != TB__MOVE_DEQUANTISE;
    bool is_there = is_source ? move->src_mapping && move->src_mapping[0] == TB__IN_BUFFER : move->is_dst_in_buffer;
    tb__cuda_part_of_gpu *part = &job->gpus[gpu];
    tb_dtype dtype = is_source ? move->src_dtype : move->dst_dtype;
    int64_t size = tb_dtype_bits(dtype) / 8, step = (is_source ? move->src_stride[0][0] : move->dst_stride[0]) * size;
    int64_t slot = has_byte_scales(b) ? b->size.block : 16 / size;
    const char *rows = (const char *)(is_source ? src[0] : move->dst) + b->first * step;
    tb__cuda_matrix m = {.rows_at = (uintptr_t)rows,
                         .row_step = step,
                         .columns = move->len[1],
                         .first = move->first_row + b->first, /* of an amax */
                         .nrows = (uint32_t)b->rows,
                         .dtype = (uint8_t)dtype};
    if (is_there)
        m.flags |= is_source ? TB__CUDA_SRC_IN_BUFFER : TB__CUDA_DST_IN_BUFFER;
    if (is_source && move->kind == TB__MOVE_QUANTISE && move->is_dst_in_buffer)
        m.flags |= TB__CUDA_DST_IN_BUFFER;
    if (plain_alignment(move, rows, step) % 16 == 0)
        m.flags |= is_source ? TB__CUDA_ALIGNED_SRC : TB__CUDA_ALIGNED_DST;
    if (b->q)
        describe_tensor(b, slot, is_scale_on_device, &m);
    int kernel = kernel_for(move, b->q);
    measure_slots(b, slot, &m);
    keep_tiles_in_rows(&m, kernel);
    bool needs_scale = b->q && (b->q->format.kind == TB__QUANT_FP8_TENSOR || b->q->format.kind == TB__QUANT_NVFP4);
    tb__cuda_quant quant = {.step = (uint32_t)job->steps.count,
                            .kind = move->kind,
                            .format = b->q ? b->q->format.kind : 0,
                            .first = (b->q ? b->q->first : move->first_row) + b->first,
                            .columns = move->len[1],
                            .scale = needs_scale && !is_scale_on_device ? b->q->scale : NULL,
                            .needs_scale = needs_scale && !is_scale_on_device,
                            .amax = move->amax,
                            .name = move->name};
    uint32_t first_tile = 0;
    if (!extend_matrix(part, &m, &quant, kernel, &first_tile))
        TB_TRY(add_matrix(part, &m, &quant));
    if (!tb__vec_push(&part->quants, quant))
        return TB_NO_MEMORY;
    return tb__cuda_add_tiles(job, gpu, kernel, part->last_matrix, first_tile, count_tiles(&m, kernel));
}

static tb_status check_stride(const tb__move *move) {
    int64_t stride = move->kind == TB__MOVE_DEQUANTISE ? move->dst_stride[0] : move->src_stride[0][0];
    return stride < move->len[1]
               ? tb__fail(TB_INVALID, "rows of %" PRId64 " elements can't begin every %" PRId64, move->len[1], stride)
               : TB_OK;
}

tb_status tb__cuda_add_matrix(tb__job *job, uint32_t gpu, const tb__move *move, const void *const *src,
                              bool is_scale_on_device) {
    band b = {.move = move, .q = move->kind == TB__MOVE_AMAX ? NULL : move->quantised};
    if (!b.q && move->kind != TB__MOVE_AMAX)
        return tb__fail(TB_INTERNAL, "a quantised tensor without its format was not refused");
    TB_TRY(check_stride(move));
    if (b.q)
        TB_TRY(tb__quant_measure(&b.q->format, b.q->rows, b.q->columns, &b.size));
    if (move->len[1] > MOST_ELEMENTS)
        return tb__fail(TB_REFUSED, "a quantised tensor with rows of %" PRId64 " elements", move->len[1]);
    int64_t most = tb__max64(MOST_ELEMENTS / tb__max64(move->len[1], 128) / 128, 1) * 128;
    for (; b.first < move->len[0]; b.first += b.rows) {
        b.rows = tb__min64(most, move->len[0] - b.first);
        TB_TRY(add_band(job, gpu, &b, src, is_scale_on_device));
    }
    return TB_OK;
}
