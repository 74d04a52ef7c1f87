/* The elements of the tensors that are moved: each is a function of the tensor's number and of its own place in the
 * whole tensor, so that any rank knows what it must have. */
#include "tools/bench.h"

#include <inttypes.h>
#include <string.h>

enum { SPOILT = 0xa5 };

static uint32_t mix(uint32_t seed, uint32_t index) {
    uint32_t x = (index ^ seed) * 0x9e3779b1u;
    return x ^ x >> 15;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_at(uint32_t seed, uint32_t index) {
    return (float)(int32_t)(mix(seed, index) >> 8);
}

/* To nearest, ties to even; for finite values. */
static uint16_t round_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static int32_t term_at(uint32_t seed, uint32_t index, uint32_t rank) {
    return (int32_t)((mix(seed, index) >> 8 ^ 11 * rank) & 31);
}

static uint16_t sum_at(uint32_t seed, uint32_t index) {
    int32_t sum = 0;
    for (uint32_t rank = 0; rank < BENCH_SIDE; rank++)
        sum += term_at(seed, index, rank);
    return round_to_bf16((float)sum);
}

/* Elements first .. first+n-1 of the tensor, which lie together at this side. */
static void write_run(const bench_part *part, void *dst, uint64_t start, size_t n) {
    uint32_t first = (uint32_t)start; /* values repeat after 2^32 elements */
    uint32_t *words = dst, seed = part->number * 0x85ebca6bu + 0x165667b1u, rank = (uint32_t)part->rank;
    uint16_t *halves = dst;
    float *floats = dst;
    bool is_source = part->is_source;
    switch (part->tensor->values) {
    case BENCH_BITS:
        if (part->tensor->src_dtype == TB_F32) {
            for (size_t i = 0; i < n; i++)
                words[i] = mix(seed, first + (uint32_t)i);
        } else {
            for (size_t i = 0; i < n; i++)
                halves[i] = (uint16_t)mix(seed, first + (uint32_t)i);
        }
        break;
    case BENCH_FLOATS:
        for (size_t i = 0; is_source && i < n; i++)
            floats[i] = float_at(seed, first + (uint32_t)i);
        for (size_t i = 0; !is_source && i < n; i++)
            halves[i] = round_to_bf16(float_at(seed, first + (uint32_t)i));
        break;
    case BENCH_TERMS:
        for (size_t i = 0; is_source && i < n; i++)
            halves[i] = round_to_bf16((float)term_at(seed, first + (uint32_t)i, rank));
        for (size_t i = 0; !is_source && i < n; i++)
            halves[i] = sum_at(seed, first + (uint32_t)i);
        break;
    }
}

static tb_dtype dtype_of(const bench_part *part) {
    return part->is_source ? part->tensor->src_dtype : part->tensor->dst_dtype;
}

static size_t element_size(const bench_part *part) {
    return tb_dtype_bits(dtype_of(part)) / 8;
}

static tb_status find_local(const bench_part *part, tb_local *out) {
    tb_layout *layout;
    TB_TRY(tb_layout_parse(part->is_source ? part->tensor->src_layout : part->tensor->dst_layout, &layout));
    tb_status status = tb_layout_local(layout, &part->tensor->shape, part->rank, out);
    tb_layout_destroy(layout);
    return status;
}

tb_status bench_part_size(bench_part *part) {
    tb_local local;
    TB_TRY(find_local(part, &local));
    tb_status status = tb_shape_size(&local.shape, dtype_of(part), NULL, &part->nbytes);
    tb_local_fini(&local);
    return status;
}

/* Calls `visit` for every run of elements that lie together both in the tensor and in the part. */
static tb_status each_run(const bench_part *part, tb_status (*visit)(const bench_part *, char *, uint64_t, size_t)) {
    tb_local local;
    TB_TRY(find_local(part, &local));
    const tb_segment whole = {0, 1};
    int last = local.shape.ndim - 1;
    int64_t width = part->tensor->shape.dim[last];
    size_t nbands = last > 0 ? local.nsegments[0] : 1;
    char *at = part->data;
    tb_status status = TB_OK;
    for (size_t b = 0; b < nbands; b++) {
        tb_segment band = last > 0 ? local.segments[0][b] : whole;
        for (int64_t row = band.start; row < band.stop; row++) {
            for (size_t s = 0; s < local.nsegments[last] && status == TB_OK; s++) {
                tb_segment run = local.segments[last][s];
                size_t n = (size_t)(run.stop - run.start);
                status = visit(part, at, (uint64_t)(row * width + run.start), n);
                at += n * element_size(part);
            }
        }
    }
    tb_local_fini(&local);
    return status;
}

static tb_status fill_run(const bench_part *part, char *at, uint64_t first, size_t n) {
    write_run(part, at, first, n);
    return TB_OK;
}

tb_status bench_part_fill(const bench_part *part) {
    if (part->nbytes == 0)
        return TB_OK;
    if (part->is_source)
        return each_run(part, fill_run);
    memset(part->data, SPOILT, (size_t)part->nbytes);
    return TB_OK;
}

static tb_status verify_run(const bench_part *part, char *at, uint64_t first, size_t n) {
    enum { PIECE = 2048 };
    uint32_t expected[PIECE];
    size_t size = element_size(part);
    for (size_t done = 0; done < n;) {
        size_t piece = n - done < PIECE ? n - done : PIECE;
        write_run(part, expected, first + done, piece);
        if (memcmp(at + done * size, expected, piece * size) != 0) {
            size_t i = 0;
            while (memcmp(at + (done + i) * size, (char *)expected + i * size, size) == 0)
                i++;
            return tb__fail(TB_INTERNAL, "tensor '%s': element %" PRIu64 " is wrong", part->tensor->name,
                            first + done + i);
        }
        done += piece;
    }
    return TB_OK;
}

tb_status bench_part_verify(const bench_part *part) {
    return part->nbytes == 0 || part->is_source ? TB_OK : each_run(part, verify_run);
}

void bench_fill_floats(void *dst, size_t n) {
    float *floats = dst;
    for (size_t i = 0; i < n; i++)
        floats[i] = float_at(1, (uint32_t)i);
}
