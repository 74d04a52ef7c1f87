/* Checks of moves, before a device does them. */
#include "device/move.h"

#include "base/dtype.h"

#include <inttypes.h>
#include <string.h>

/* Numbers that fill bytes. */
static bool can_reduce(tb_dtype dtype) {
    return tb__dtype_class_of(dtype) != TB__OPAQUE;
}

bool tb__move_is_empty(const tb__move *move) {
    for (int d = 0; d < move->ndim; d++) {
        if (move->len[d] == 0)
            return true;
    }
    return false;
}

static tb_status check_casts(const tb__move *move) {
    const tb_dtype step[3] = {move->src_dtype, move->wire_dtype, move->dst_dtype};
    for (int i = 0; i < 2; i++) {
        if (step[i] != step[i + 1] && !tb__dtype_can_cast(step[i], step[i + 1]))
            return tb__fail(TB_REFUSED, "there is no cast from %s to %s", tb_dtype_name(step[i]),
                            tb_dtype_name(step[i + 1]));
    }
    return TB_OK;
}

static tb_status check_reduction(const tb__move *move) {
    if (move->nsrc == 1 && move->avg_divisor <= 1)
        return TB_OK;
    if ((unsigned)move->op > TB_PRODUCT)
        return tb__fail(TB_INVALID, "%d is no reduction", (int)move->op);
    if (!can_reduce(move->src_dtype))
        return tb__fail(TB_REFUSED, "%s is not reduced", tb_dtype_name(move->src_dtype));
    bool divides = move->avg_divisor > 1;
    if (divides && move->op != TB_SUM && move->op != TB_AVG)
        return tb__fail(TB_INVALID, "only a sum is divided, by %" PRIu64, move->avg_divisor);
    if (divides && tb__dtype_class_of(move->src_dtype) != TB__FLOAT)
        return tb__fail(TB_REFUSED, "there is no average of %s", tb_dtype_name(move->src_dtype));
    return TB_OK;
}

int tb__move_packed_dim(const tb__move *move) {
    int found = -1;
    for (int d = 0; d < move->ndim; d++) {
        bool is_unit = move->dst_stride[d] == 1, is_even = move->dst_stride[d] % 2 == 0;
        for (uint32_t k = 0; k < move->nsrc; k++) {
            is_unit = is_unit && move->src_stride[k][d] == 1;
            is_even = is_even && move->src_stride[k][d] % 2 == 0;
        }
        if (is_unit && found < 0 && move->len[d] % 2 == 0)
            found = d;
        else if (!is_even && move->len[d] > 1)
            return -1;
    }
    return found;
}

/* Checks the addresses of a move that is not empty. */
static tb_status check_addresses(const tb__move *move) {
    bool has_dst = move->kind == TB__MOVE_COPY || move->kind == TB__MOVE_DEQUANTISE;
    bool is_in_buffer = move->kind == TB__MOVE_QUANTISE && move->is_dst_in_buffer;
    if (has_dst && !move->dst && !move->is_dst_in_buffer)
        return tb__fail(TB_INVALID, "a move to NULL");
    for (uint32_t k = 0; k < move->nsrc; k++) {
        if (!move->src[k] && !(move->src_mapping && move->src_mapping[k]))
            return tb__fail(TB_INVALID, "a move from NULL, source %" PRIu32, k);
    }
    const tb__quantised *q = move->quantised;
    if (q && !is_in_buffer && (!q->data || (!q->scales && q->format.kind != TB__QUANT_FP8_TENSOR)))
        return tb__fail(TB_INVALID, "a quantised tensor whose data or scales are at NULL");
    return TB_OK;
}

/* Checks the rows and columns of a matrix. Its scale is checked when the move is run. */
static tb_status check_quantised(const tb__move *move) {
    const tb__quantised *q = move->quantised;
    bool is_made = move->kind == TB__MOVE_QUANTISE;
    int64_t rows = move->len[0], columns = move->len[1];
    tb__quant_size size;
    TB_TRY(tb__quant_measure(&q->format, q->rows, q->columns, &size));
    if (q->first < 0 || q->first > q->rows || rows > q->rows - q->first)
        return tb__fail(TB_INVALID, "%" PRId64 " rows from %" PRId64 " on are not in a tensor of %" PRId64, rows,
                        q->first, q->rows);
    if (q->first_column < 0 || q->first_column > q->columns || columns > q->columns - q->first_column ||
        (is_made && columns != q->columns))
        return tb__fail(TB_INVALID, "%" PRId64 " of the %" PRId64 " columns of a quantised tensor, from %" PRId64 " on",
                        columns, q->columns, q->first_column);
    if (is_made && (q->first % size.band != 0 || (rows % size.band != 0 && q->first + rows != q->rows)))
        return tb__fail(TB_INVALID,
                        "rows %" PRId64 "-%" PRId64 " begin or end inside a block of %s, which has %" PRId64 " rows",
                        q->first, q->first + rows, tb__quant_name(q->format.kind), size.band);
    return TB_OK;
}

/* Checks the rows of plain numbers that a matrix is made from or converted to. */
static tb_status check_rows(const tb__move *move) {
    bool is_source = move->kind != TB__MOVE_DEQUANTISE;
    if (move->ndim != 2 || (is_source && move->nsrc != 1))
        return tb__fail(TB_INVALID, "quantised tensors have rows and columns, and one source");
    if (move->kind == TB__MOVE_AMAX ? !move->amax : !move->quantised)
        return tb__fail(TB_INVALID, "a quantised tensor without its format, or an amax without a place");
    const int64_t *stride = is_source ? move->src_stride[0] : move->dst_stride;
    if (move->len[1] > 1 && stride[1] != 1)
        return tb__fail(TB_INVALID, "the elements of a row that is quantised lie side by side");
    tb_dtype dtype = is_source ? move->src_dtype : move->dst_dtype;
    if (dtype != TB_F32 && dtype != TB_F16 && dtype != TB_BF16)
        return tb__fail(TB_INVALID, "quantised tensors are made from, and turned into, f32, f16 and bf16, not %s",
                        tb_dtype_bits(dtype) ? tb_dtype_name(dtype) : "an invalid dtype");
    if (move->kind != TB__MOVE_AMAX)
        TB_TRY(check_quantised(move));
    return tb__move_is_empty(move) ? TB_OK : check_addresses(move);
}

tb_status tb__move_check(const tb__move *move) {
    if (move->ndim < 0 || move->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a copy of %d dimensions; at most %d", move->ndim, TB_MAX_DIMS);
    for (int d = 0; d < move->ndim; d++) {
        if (move->len[d] < 0)
            return tb__fail(TB_INVALID, "a copy of length %" PRId64 " in dimension %d", move->len[d], d);
    }
    if ((unsigned)move->kind > TB__MOVE_AMAX)
        return tb__fail(TB_INVALID, "%d is no kind of move", (int)move->kind);
    if (move->kind != TB__MOVE_COPY)
        return check_rows(move);
    tb_dtype dtypes[3] = {move->dst_dtype, move->src_dtype, move->wire_dtype};
    for (int i = 0; i < (move->nsrc ? 3 : 1); i++) {
        if (!tb_dtype_bits(dtypes[i]))
            return tb__fail(TB_INVALID, "%d is no dtype", (int)dtypes[i]);
    }
    if (move->nsrc) {
        TB_TRY(check_casts(move));
        TB_TRY(check_reduction(move));
    }
    if (tb__move_is_empty(move))
        return TB_OK;
    TB_TRY(check_addresses(move));
    if (tb__dtype_packing(move->dst_dtype) > 1 && tb__move_packed_dim(move) < 0)
        return tb__fail(TB_INVALID, "a box of %s whose elements do not fill bytes", tb_dtype_name(move->dst_dtype));
    return TB_OK;
}

/* Bytes of n elements; n*bits fits because a tensor has at most 2^62 bytes. */
static int64_t bytes_of(int64_t n, tb_dtype dtype) {
    unsigned bits = tb_dtype_bits(dtype);
    return bits == 4 ? n / 2 : n * (int64_t)(bits / 8);
}

static int64_t count_elements(const tb__move *move) {
    int64_t n = 1;
    for (int d = 0; d < move->ndim; d++)
        n *= move->len[d];
    return n;
}

int64_t tb__move_written(const tb__move *move) {
    if (move->kind == TB__MOVE_AMAX)
        return 0;
    if (move->kind == TB__MOVE_QUANTISE)
        return count_elements(move);
    return bytes_of(count_elements(move), move->dst_dtype);
}

int64_t tb__move_traffic(const tb__move *move) {
    int64_t written = tb__move_written(move);
    if (move->kind == TB__MOVE_DEQUANTISE)
        return written + count_elements(move);
    return move->nsrc ? written + (int64_t)move->nsrc * bytes_of(count_elements(move), move->src_dtype) : written;
}

bool tb__move_source_fits(const tb__move *move, uint32_t k, size_t nbytes) {
    uint64_t offset = (uintptr_t)move->src[k];
    int64_t low = 0, high = 1, reach; /* of elements, from the first one */
    for (int d = 0; d < move->ndim; d++) {
        if (move->len[d] == 0)
            return true;
        if (__builtin_mul_overflow(move->len[d] - 1, move->src_stride[k][d], &reach) ||
            __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high))
            return false;
    }
    int64_t bits = tb_dtype_bits(move->src_dtype);
    if (offset > INT64_MAX / 8 || __builtin_mul_overflow(low, bits, &low) || __builtin_mul_overflow(high, bits, &high))
        return false;
    int64_t at = (int64_t)offset * 8;
    return !__builtin_add_overflow(at, low, &low) && !__builtin_add_overflow(at, high, &high) && low >= 0 &&
           (uint64_t)high / 8 + (high % 8 != 0) <= nbytes;
}

/* ---- Lists ------------------------------------------------------------------------------------------------------- */

static void *copy_into(tb__arena *arena, const void *from, size_t count, size_t size) {
    void *to = tb__arena_alloc(arena, count, size);
    return to && count ? memcpy(to, from, count * size) : to;
}

tb_status tb__move_list_add(tb__move_list *list, const tb__move *move) {
    tb__arena *arena = &list->arena;
    tb__move copy = *move;
    copy.src = copy_into(arena, move->src, move->nsrc, sizeof *move->src);
    copy.src_stride = copy_into(arena, move->src_stride, move->nsrc, sizeof *move->src_stride);
    if (move->src_mapping)
        copy.src_mapping = copy_into(arena, move->src_mapping, move->nsrc, sizeof *move->src_mapping);
    if (move->quantised)
        copy.quantised = copy_into(arena, move->quantised, 1, sizeof *move->quantised);
    bool has_all =
        copy.src && copy.src_stride && !copy.src_mapping == !move->src_mapping && !copy.quantised == !move->quantised;
    return has_all && tb__vec_push(&list->moves, copy) ? TB_OK : TB_NO_MEMORY;
}

void tb__move_list_fini(tb__move_list *list) {
    tb__arena_fini(&list->arena);
    free(list->moves.item);
}
