/* Jobs of plain copies, many of which lie end to end: what is copied, by parts, and what is left alone. */
#include "device/host/host.h"

#include "../tests/support/random_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { NPARTS = 3, MAX_MOVES = 60, ROOM = 64 << 10, NCASES = 300 };

typedef struct copies {
    uint8_t src[ROOM], dst[ROOM], expected[ROOM];
    tb__move move[MAX_MOVES];
    const void *from[MAX_MOVES];
    int64_t stride[MAX_MOVES][1][TB_MAX_DIMS];
    tb__mapping *in_buffer;
} copies;

static void run(const tb__device_ops *ops, tb__device *device, tb__job *job, copies *c, const uint32_t *parts,
                size_t nparts) {
    tb__fence fence = {0};
    tb__run what = {.parts = parts, .nparts = nparts, .src_buffer = c->src, .dst_buffer = c->dst};
    assert_int_equal(ops->run(device, job, &what, &fence), TB_OK);
    while (!fence.is_done)
        ops->progress(device);
    assert_int_equal(fence.status, TB_OK);
}

/* Moves of one part often go on where the one before ends, on both sides, on one, or on none; a few are columns. */
static size_t make_moves(copies *c, rng *r, bool in_buffers) {
    static const tb_dtype dtypes[] = {TB_U8, TB_BF16, TB_F32, TB_F64};
    size_t n = (size_t)rng_range(r, 1, MAX_MOVES);
    int64_t to = rng_range(r, 0, 3) * 8, from = rng_range(r, 0, 3) * 8;
    for (size_t i = 0; i < n; i++) {
        tb_dtype dtype = dtypes[rng_range(r, 0, 3)];
        int64_t size = tb_dtype_bits(dtype) / 8, rows = rng_range(r, 1, 3), columns = 8 * rng_range(r, 1, 8);
        bool has_gaps = rng_range(r, 0, 7) == 0;
        int64_t pitch = has_gaps ? columns + 8 : columns;
        c->stride[i][0][0] = pitch;
        c->stride[i][0][1] = 1;
        c->from[i] = in_buffers ? (const void *)(uintptr_t)from : c->src + from; // NOLINT
        c->move[i] = (tb__move){.part = (uint32_t)rng_range(r, 0, 1 + i % 2 * (NPARTS - 2)),
                                .ndim = 2,
                                .len = {rows, columns},
                                .dst = in_buffers ? (void *)(uintptr_t)to : c->dst + to, // NOLINT
                                .dst_stride = {columns, 1},
                                .nsrc = 1,
                                .src = &c->from[i],
                                .src_stride = (const int64_t(*)[TB_MAX_DIMS])c->stride[i],
                                .src_mapping = in_buffers ? &c->in_buffer : NULL,
                                .is_dst_in_buffer = in_buffers,
                                .src_dtype = dtype,
                                .wire_dtype = dtype,
                                .dst_dtype = dtype};
        to += rows * columns * size + (rng_range(r, 0, 3) ? 0 : 8);
        from += rows * pitch * size + (rng_range(r, 0, 3) ? 0 : 8);
        if (from > ROOM / 2) /* elsewhere, and back to what was read before */
            from = rng_range(r, 0, 9) * 8;
        if (to > ROOM - 8 * 72 * 8)
            return i + 1;
    }
    return n;
}

static void expect(copies *c, size_t n, uint32_t part, bool in_buffers) {
    for (size_t i = 0; i < n; i++) {
        const tb__move *m = &c->move[i];
        size_t size = tb_dtype_bits(m->dst_dtype) / 8, run = (size_t)m->len[1] * size;
        size_t to = in_buffers ? (uintptr_t)m->dst : (size_t)((uint8_t *)m->dst - c->dst);
        size_t from = in_buffers ? (uintptr_t)m->src[0] : (size_t)((const uint8_t *)m->src[0] - c->src);
        for (size_t row = 0; m->part == part && row < (size_t)m->len[0]; row++)
            memcpy(c->expected + to + row * run, c->src + from + row * (size_t)c->stride[i][0][0] * size, run);
    }
}

static void shuffle(copies *c, size_t n, rng *r) {
    for (size_t i = n; i-- > 1;) {
        size_t k = (size_t)rng_range(r, 0, (int64_t)i);
        tb__move t = c->move[i];
        c->move[i] = c->move[k];
        c->move[k] = t;
    }
}

static void check_case(const tb__device_ops *ops, tb__device *device, copies *c, rng *r, bool in_buffers) {
    tb__job *job;
    size_t n = make_moves(c, r, in_buffers);
    for (size_t i = 0; i < ROOM; i++)
        c->src[i] = (uint8_t)rng_next(r);
    memset(c->dst, 0xa5, ROOM);
    memset(c->expected, 0xa5, ROOM);
    for (uint32_t part = 0; part < NPARTS; part++) /* before their order changes: expect finds strides by number */
        if (part != 1)
            expect(c, n, part, in_buffers);
    uint8_t *without = malloc(ROOM);
    assert_non_null(without);
    memcpy(without, c->expected, ROOM);
    expect(c, n, 1, in_buffers);
    shuffle(c, n, r);
    assert_int_equal(ops->prepare(device, c->move, n, &job), TB_OK);
    run(ops, device, job, c, (const uint32_t[]){2, 0}, 2);
    assert_memory_equal(c->dst, without, ROOM);
    run(ops, device, job, c, (const uint32_t[]){1}, 1);
    assert_memory_equal(c->dst, c->expected, ROOM);
    memset(c->dst, 0xa5, ROOM);
    run(ops, device, job, c, NULL, 0);
    assert_memory_equal(c->dst, c->expected, ROOM);
    ops->release(device, job);
    free(without);
}

static void test_neighbours(void **state) {
    (void)state;
    const tb__device_ops *ops = &tb__host_device_ops;
    rng r = {test_seed()};
    tb__device *device;
    copies *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->in_buffer = TB__IN_BUFFER;
    assert_int_equal(ops->open(&device), TB_OK);
    for (int i = 0; i < NCASES; i++)
        check_case(ops, device, c, &r, i % 2);
    ops->close(device);
    free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_neighbours)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
