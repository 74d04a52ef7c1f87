/* Copies from memory that must be read: block by block, so that a block is still in the cache when it is copied. */
#include "device/host/reader.h"

#include "base/dtype.h"
#include "base/mem.h"
#include "device/host/host.h"

#include <string.h>

enum {
    BLOCK_BYTES = 1 << 20, /* of all sources together */
    MAX_RANGES = 1024,     /* per call */
};

tb__mapping *tb__host_map_reader(size_t nbytes, tb__host_read_fn *read, void *arg) {
    tb__host_mapping *mapping = tb__calloc(1, sizeof *mapping);
    if (!mapping)
        return NULL;
    *mapping =
        (tb__host_mapping){.base = {.ops = &tb__host_device_ops, .nbytes = nbytes}, .read = read, .read_arg = arg};
    return &mapping->base;
}

void tb__host_unmap_reader(tb__mapping *mapping) {
    free(mapping);
}

static int64_t count_elements(const tb__move *copy, const int64_t *len) {
    int64_t n = 1;
    for (int d = 0; d < copy->ndim; d++)
        n *= len[d];
    return n;
}

/* How much of the box is done at a time: outer dimensions are cut first. */
static void choose_block(const tb__move *copy, const int64_t *len, int64_t *block) {
    int64_t most = BLOCK_BYTES / (int64_t)copy->nsrc, nbytes;
    memcpy(block, len, sizeof copy->len);
    for (int d = 0; d < copy->ndim; d++) {
        nbytes = tb__dtype_bytes(copy->src_dtype, count_elements(copy, block));
        if (nbytes <= most)
            return;
        int64_t rows = block[d] * most / nbytes;
        if (rows > 64)
            rows -= rows % 64; /* whole bytes, and lines where it can be */
        else if (d == copy->ndim - 1)
            rows = block[d] < 64 ? block[d] : 64;
        block[d] = rows < 1 ? 1 : rows;
    }
}

/* Reads a block of source k, row-major. */
static tb_status read_block(const tb__move *copy, uint32_t k, const int64_t *start, const int64_t *len, char *to) {
    const tb__host_mapping *mapping = tb__host_reader(copy->src_mapping[k]);
    const int64_t *stride = copy->src_stride[k];
    tb_range ranges[MAX_RANGES];
    int64_t run = 1, index[TB_MAX_DIMS] = {0};
    int outer = copy->ndim;
    size_t nranges = 0, filled = 0;
    while (outer > 0 && (stride[outer - 1] == run || len[outer - 1] == 1))
        run *= len[--outer];
    size_t run_nbytes = (size_t)tb__dtype_bytes(copy->src_dtype, run);
    for (bool is_last = false; !is_last;) {
        int64_t at = 0;
        for (int d = 0; d < copy->ndim; d++)
            at += (start[d] + index[d]) * stride[d];
        ranges[nranges++] =
            (tb_range){(size_t)((int64_t)(uintptr_t)copy->src[k] + tb__dtype_offset(copy->src_dtype, at)), run_nbytes};
        int d = outer - 1;
        while (d >= 0 && ++index[d] == len[d])
            index[d--] = 0;
        is_last = d < 0;
        if (is_last || nranges == MAX_RANGES) {
            TB_TRY(mapping->read(mapping->read_arg, ranges, nranges, to + filled, nranges * run_nbytes));
            filled += nranges * run_nbytes;
            nranges = 0;
        }
    }
    return TB_OK;
}

/* Copies one block; only sources that must be read go through `bounce`. */
static tb_status run_block(const tb__move *copy, const int64_t *start, const int64_t *len, char *bounce,
                           const void **src, int64_t (*stride)[TB_MAX_DIMS], bool stream) {
    tb__move block = *copy;
    size_t used = 0, room = ((size_t)tb__dtype_bytes(copy->src_dtype, count_elements(copy, len)) + 63) / 64 * 64;
    int64_t at = 0;
    memcpy(block.len, len, sizeof block.len);
    for (uint32_t k = 0; k < copy->nsrc; k++) {
        if (tb__host_reader(copy->src_mapping[k])) {
            TB_TRY(read_block(copy, k, start, len, bounce + used));
            src[k] = bounce + used;
            used += room;
            int64_t step = 1;
            for (int d = copy->ndim; d-- > 0; step *= len[d])
                stride[k][d] = step;
            continue;
        }
        int64_t offset = 0;
        for (int d = 0; d < copy->ndim; d++)
            offset += start[d] * copy->src_stride[k][d];
        src[k] = (const char *)copy->src[k] + tb__dtype_offset(copy->src_dtype, offset);
        memcpy(stride[k], copy->src_stride[k], sizeof *stride);
    }
    for (int d = 0; d < copy->ndim; d++)
        at += start[d] * copy->dst_stride[d];
    block.dst = (char *)copy->dst + tb__dtype_offset(copy->dst_dtype, at);
    block.src = src;
    block.src_stride = (const int64_t(*)[TB_MAX_DIMS])stride;
    tb__move_run(&block, tb__move_whole(&block), stream);
    return TB_OK;
}

tb_status tb__host_read_and_run(const tb__move *copy, tb__move_share part, bool stream) {
    int64_t first[TB_MAX_DIMS] = {0}, len[TB_MAX_DIMS], block[TB_MAX_DIMS], start[TB_MAX_DIMS];
    memcpy(len, copy->len, sizeof len);
    if (part.dim >= 0) {
        first[part.dim] = part.lo;
        len[part.dim] = part.hi - part.lo;
    }
    if (part.lo >= part.hi || count_elements(copy, len) == 0)
        return TB_OK;
    choose_block(copy, len, block);
    size_t room = ((size_t)tb__dtype_bytes(copy->src_dtype, count_elements(copy, block)) + 63) / 64 * 64;
    char *bounce = tb__malloc(copy->nsrc, room);
    const void **src = tb__malloc(copy->nsrc, sizeof *src);
    int64_t(*stride)[TB_MAX_DIMS] = tb__malloc(copy->nsrc, sizeof *stride);
    tb_status status = bounce && src && stride ? TB_OK : TB_NO_MEMORY;
    memcpy(start, first, sizeof start);
    while (status == TB_OK) {
        int64_t now[TB_MAX_DIMS] = {0};
        for (int d = 0; d < copy->ndim; d++) {
            int64_t left = first[d] + len[d] - start[d];
            now[d] = left < block[d] ? left : block[d];
        }
        status = run_block(copy, start, now, bounce, src, stride, stream);
        int d = copy->ndim - 1;
        while (d >= 0 && (start[d] += block[d]) >= first[d] + len[d]) {
            start[d] = first[d];
            d--;
        }
        if (d < 0)
            break;
    }
    free(bounce);
    free(src);
    free(stride);
    return status;
}
