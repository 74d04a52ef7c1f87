/* Copies, checked and cut. Plain ones become moves of bytes; the others go tile by tile through exec/tile.c. */
#include "exec/copy.h"

#include "base/dtype.h"
#include "base/error.h"
#include "base/wide.h"
#include "exec/kernel.h"
#include "exec/move.h"
#include "exec/tile.h"

#include <inttypes.h>
#include <stdlib.h>

static bool can_cast(tb_dtype dtype) {
    return tb__kernels_portable.widen[dtype] || dtype == TB_F32;
}

static bool is_plain(const tb__copy *copy) {
    return copy->nsrc == 1 && copy->avg_divisor <= 1 && copy->src_dtype == copy->wire_dtype &&
           copy->wire_dtype == copy->dst_dtype;
}

static bool is_empty(const tb__copy *copy) {
    for (int d = 0; d < copy->ndim; d++) {
        if (copy->len[d] == 0)
            return true;
    }
    return false;
}

static tb_status check_casts(const tb__copy *copy) {
    const tb_dtype step[3] = {copy->src_dtype, copy->wire_dtype, copy->dst_dtype};
    for (int i = 0; i < 2; i++) {
        if (step[i] != step[i + 1] && !(can_cast(step[i]) && can_cast(step[i + 1])))
            return tb__fail(TB_REFUSED, "there is no cast from %s to %s", tb_dtype_name(step[i]),
                            tb_dtype_name(step[i + 1]));
    }
    return TB_OK;
}

static tb_status check_reduction(const tb__copy *copy) {
    if (copy->nsrc == 1 && copy->avg_divisor <= 1)
        return TB_OK;
    if ((unsigned)copy->op >= TB__REDUCE_OPS)
        return tb__fail(TB_INVALID, "%d is no reduction", (int)copy->op);
    if (!tb__kernels_portable.combine[copy->src_dtype][copy->op])
        return tb__fail(TB_REFUSED, "%s is not reduced", tb_dtype_name(copy->src_dtype));
    bool divides = copy->avg_divisor > 1;
    if (divides && copy->op != TB_SUM && copy->op != TB_AVG)
        return tb__fail(TB_INVALID, "only a sum is divided, by %" PRIu64, copy->avg_divisor);
    if (divides && tb__dtype_class_of(copy->src_dtype) != TB__FLOAT)
        return tb__fail(TB_REFUSED, "there is no average of %s", tb_dtype_name(copy->src_dtype));
    return TB_OK;
}

/* The dimension along which packed elements share bytes; -1 if that is not to be told. */
static int packed_dim(const tb__copy *copy) {
    int found = -1;
    for (int d = 0; d < copy->ndim; d++) {
        bool is_unit = copy->dst_stride[d] == 1, is_even = copy->dst_stride[d] % 2 == 0;
        for (uint32_t k = 0; k < copy->nsrc; k++) {
            is_unit = is_unit && copy->src_stride[k][d] == 1;
            is_even = is_even && copy->src_stride[k][d] % 2 == 0;
        }
        if (is_unit && found < 0 && copy->len[d] % 2 == 0)
            found = d;
        else if (!is_even && copy->len[d] > 1)
            return -1;
    }
    return found;
}

tb_status tb__copy_check(const tb__copy *copy) {
    if (copy->ndim < 0 || copy->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a copy of %d dimensions; at most %d", copy->ndim, TB_MAX_DIMS);
    for (int d = 0; d < copy->ndim; d++) {
        if (copy->len[d] < 0)
            return tb__fail(TB_INVALID, "a copy of length %" PRId64 " in dimension %d", copy->len[d], d);
    }
    tb_dtype dtypes[3] = {copy->dst_dtype, copy->src_dtype, copy->wire_dtype};
    for (int i = 0; i < (copy->nsrc ? 3 : 1); i++) {
        if (!tb_dtype_bits(dtypes[i]))
            return tb__fail(TB_INVALID, "%d is no dtype", (int)dtypes[i]);
    }
    if (copy->nsrc) {
        TB_TRY(check_casts(copy));
        TB_TRY(check_reduction(copy));
    }
    if (is_empty(copy))
        return TB_OK;
    if (!copy->dst)
        return tb__fail(TB_INVALID, "a copy to NULL");
    for (uint32_t k = 0; k < copy->nsrc; k++) {
        if (!copy->src[k])
            return tb__fail(TB_INVALID, "a copy from NULL, source %" PRIu32, k);
    }
    if (tb__dtype_packing(copy->dst_dtype) > 1 && packed_dim(copy) < 0)
        return tb__fail(TB_INVALID, "a box of %s whose elements do not fill bytes", tb_dtype_name(copy->dst_dtype));
    return TB_OK;
}

/* Bytes of n elements; n*bits fits because a tensor has at most 2^62 bytes. */
static int64_t bytes_of(int64_t n, tb_dtype dtype) {
    unsigned bits = tb_dtype_bits(dtype);
    return bits == 4 ? n / 2 : n * (int64_t)(bits / 8);
}

static int64_t count_elements(const tb__copy *copy) {
    int64_t n = 1;
    for (int d = 0; d < copy->ndim; d++)
        n *= copy->len[d];
    return n;
}

int64_t tb__copy_written(const tb__copy *copy) {
    return bytes_of(count_elements(copy), copy->dst_dtype);
}

int64_t tb__copy_traffic(const tb__copy *copy) {
    int64_t written = tb__copy_written(copy);
    return copy->nsrc ? written + (int64_t)copy->nsrc * bytes_of(count_elements(copy), copy->src_dtype) : written;
}

tb__part tb__copy_whole(const tb__copy *copy) {
    return copy->ndim ? (tb__part){0, 0, copy->len[0]} : (tb__part){-1, 0, 1};
}

/* Long enough to be cut finely; if none is, the longest. Outer ones first, so that runs stay whole. */
static int choose_dim(const tb__copy *copy) {
    int best = -1, longest = 0;
    for (int d = 0; d < copy->ndim; d++) {
        if (copy->len[d] > copy->len[longest])
            longest = d;
        if (copy->len[d] >= 64 && (best < 0 || llabs(copy->dst_stride[d]) > llabs(copy->dst_stride[best])))
            best = d;
    }
    return best < 0 ? longest : best;
}

static int64_t cut_at(const tb__copy *copy, int dim, int64_t at, int64_t of) {
    int64_t len = copy->len[dim];
    if (at >= of)
        return len;
    int64_t index = (int64_t)((tb__wide)len * (tb__wide)at / (tb__wide)of);
    if (llabs(copy->dst_stride[dim]) != 1)
        return index;
    /* A line holds 64 bytes' worth; the first may hold fewer. */
    unsigned bits = tb_dtype_bits(copy->dst_dtype);
    int64_t per_line = 64 * 8 / bits, first = 0;
    if (copy->dst_stride[dim] == 1)
        first = (int64_t)(-(uintptr_t)copy->dst & 63) * 8 / bits;
    return index < first ? 0 : index - (index - first) % per_line;
}

tb__part tb__copy_cut(const tb__copy *copy, int64_t from, int64_t to, int64_t of) {
    if (copy->ndim == 0)
        return (tb__part){-1, 0, from == 0};
    int dim = choose_dim(copy);
    return (tb__part){dim, cut_at(copy, dim, from, of), cut_at(copy, dim, to, of)};
}

static void move_bytes(const tb__copy *copy, tb__part part, bool stream) {
    unsigned bits = tb_dtype_bits(copy->dst_dtype);
    bool is_packed = bits == 4;
    int pairs = is_packed ? packed_dim(copy) : -1;
    tb__box box = {.ndim = copy->ndim, .run = is_packed ? 1 : bits / 8, .dst = copy->dst};
    int64_t size = (int64_t)box.run, start = 0, src_start = 0;
    for (int d = 0; d < copy->ndim; d++) {
        int64_t dst_step = copy->dst_stride[d] * size, src_step = copy->nsrc ? copy->src_stride[0][d] * size : 0;
        int64_t lo = d == part.dim ? part.lo : 0, hi = d == part.dim ? part.hi : copy->len[d];
        if (d == pairs) { /* bytes, not elements */
            lo /= 2;
            hi /= 2;
        } else if (is_packed) {
            dst_step /= 2;
            src_step /= 2;
        }
        box.len[d] = hi - lo;
        box.dst_step[d] = dst_step;
        box.src_step[d] = src_step;
        start += lo * dst_step;
        src_start += lo * src_step;
    }
    box.dst += start;
    if (copy->nsrc)
        box.src = (const char *)copy->src[0] + src_start;
    tb__move(&box, stream);
}

void tb__copy_run(const tb__copy *copy, tb__part part, bool stream) {
    if (part.lo >= part.hi || is_empty(copy))
        return;
    if (copy->nsrc == 0 || is_plain(copy))
        move_bytes(copy, part, stream);
    else
        tb__tiles_run(copy, part, stream);
}
