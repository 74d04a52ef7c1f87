/* Boxes of every shape against a naive loop. Destinations are poisoned: what lies in the gaps must not change. */
#include "device/host/move.h"
#include "device/host/kernel.h"
#include "device/host/workers.h"

#include "../tests/support/numbers.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const tb_dtype floats[] = {TB_F32, TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2};
enum { MAX_SOURCES = 3 };

#ifdef __SANITIZE_THREAD__
enum { CASES = 400, RUN_STEP = 5 };
#else
enum { CASES = 4000, RUN_STEP = 1 };
#endif

/* A strided place for a box: the bytes from its lowest element to its highest, and a margin on either side. */
typedef struct place {
    uint8_t *memory;
    size_t nbytes;
    uint8_t *origin;
    int64_t stride[TB_MAX_DIMS];
} place;

static place make_place(int ndim, const int64_t *len, size_t size, bool simple, rng *g) {
    place p = {0};
    /* Dimensions get their strides in a random order, with gaps at times, and at times backwards. */
    int order[TB_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        order[d] = ndim - 1 - d;
    for (int d = ndim - 1; !simple && d > 0; d--) {
        int other = (int)rng_range(g, 0, d), t = order[d];
        order[d] = order[other];
        order[other] = t;
    }
    int64_t step = rng_range(g, 0, 5) ? 1 : rng_range(g, 2, 3), low = 0, high = 0;
    for (int i = 0; i < ndim; i++) {
        int d = order[i];
        p.stride[d] = !simple && rng_range(g, 0, 7) == 0 ? -step : step;
        int64_t reach = (len[d] - 1) * p.stride[d];
        if (len[d] > 0)
            *(reach < 0 ? &low : &high) += reach;
        step *= len[d] > 0 ? len[d] : 1;
        step += rng_range(g, 0, 2) ? 0 : rng_range(g, 1, 9);
    }
    size_t margin = (size_t)rng_range(g, 64, 127);
    p.nbytes = (size_t)(high - low + 1) * size + 2 * margin;
    p.memory = malloc(p.nbytes);
    p.origin = p.memory + margin - low * (int64_t)size;
    return p;
}

typedef struct box_case {
    place src[MAX_SOURCES], dst;
    const void *src_origin[MAX_SOURCES];
    int64_t src_stride[MAX_SOURCES][TB_MAX_DIMS];
    uint8_t *expected;
    tb__move copy;
} box_case;

static void naive(box_case *c) {
    const tb__move *copy = &c->copy;
    int64_t index[TB_MAX_DIMS] = {0};
    for (int d = 0; d < copy->ndim; d++) {
        if (copy->len[d] == 0)
            return;
    }
    size_t src_size = number_size(copy->src_dtype), dst_size = number_size(copy->dst_dtype);
    for (;;) {
        uint64_t bits[MAX_SOURCES] = {0}, result = 0;
        int64_t at = 0;
        for (int d = 0; d < copy->ndim; d++)
            at += index[d] * copy->dst_stride[d];
        for (uint32_t k = 0; k < copy->nsrc; k++) {
            int64_t from = 0;
            for (int d = 0; d < copy->ndim; d++)
                from += index[d] * copy->src_stride[k][d];
            bits[k] = number_load(copy->src_dtype, (const uint8_t *)copy->src[k] + from * (int64_t)src_size);
        }
        if (copy->nsrc == 1 && copy->src_dtype == copy->dst_dtype && copy->src_dtype == copy->wire_dtype)
            result = bits[0];
        else if (copy->nsrc)
            result = number_reduce(copy->src_dtype, copy->wire_dtype, copy->dst_dtype, copy->op, 0, bits, copy->nsrc);
        number_store(copy->dst_dtype, c->expected + (c->dst.origin - c->dst.memory) + at * (int64_t)dst_size, result);
        int d = copy->ndim - 1;
        for (; d >= 0 && ++index[d] == copy->len[d]; d--)
            index[d] = 0;
        if (d < 0)
            return;
    }
}

static void make_case(box_case *c, int ndim, const int64_t *len, uint32_t nsrc, const tb_dtype dtype[3],
                      tb_reduce_op op, bool simple, rng *g) {
    *c = (box_case){.copy = {.ndim = ndim,
                             .nsrc = nsrc,
                             .src_dtype = dtype[0],
                             .wire_dtype = dtype[1],
                             .dst_dtype = dtype[2],
                             .op = op}};
    memcpy(c->copy.len, len, (size_t)ndim * sizeof *len);
    c->dst = make_place(ndim, len, number_size(dtype[2]), simple, g);
    memset(c->dst.memory, 0xa5, c->dst.nbytes);
    c->expected = malloc(c->dst.nbytes);
    memset(c->expected, 0xa5, c->dst.nbytes);
    for (uint32_t k = 0; k < nsrc; k++) {
        c->src[k] = make_place(ndim, len, number_size(dtype[0]), simple, g);
        for (size_t i = 0; i < c->src[k].nbytes; i++)
            c->src[k].memory[i] = (uint8_t)rng_next(g);
        c->src_origin[k] = c->src[k].origin;
        memcpy(c->src_stride[k], c->src[k].stride, sizeof c->src_stride[k]);
    }
    c->copy.dst = c->dst.origin;
    memcpy(c->copy.dst_stride, c->dst.stride, sizeof c->dst.stride);
    c->copy.src = c->src_origin;
    c->copy.src_stride = (const int64_t(*)[TB_MAX_DIMS])c->src_stride;
    naive(c);
}

static void free_case(box_case *c) {
    for (uint32_t k = 0; k < c->copy.nsrc; k++)
        free(c->src[k].memory);
    free(c->dst.memory);
    free(c->expected);
}

static void print_copy(const tb__move *copy) {
    printf("%s, %s, %s, %u sources\n", tb_dtype_name(copy->src_dtype), tb_dtype_name(copy->wire_dtype),
           tb_dtype_name(copy->dst_dtype), copy->nsrc);
    for (int d = 0; d < copy->ndim; d++) {
        printf("  len %" PRId64 ", dst %" PRId64, copy->len[d], copy->dst_stride[d]);
        for (uint32_t k = 0; k < copy->nsrc; k++)
            printf(", src %" PRId64, copy->src_stride[k][d]);
        printf("\n");
    }
}

static void check_memory(const box_case *c, const char *how) {
    if (memcmp(c->dst.memory, c->expected, c->dst.nbytes) == 0)
        return;
    print_copy(&c->copy);
    size_t i = 0;
    while (c->dst.memory[i] == c->expected[i])
        i++;
    fail_msg("%s: byte %td is 0x%02x, not 0x%02x", how, c->dst.memory + i - c->dst.origin, c->dst.memory[i],
             c->expected[i]);
}

/* In one go, in parts, kept in the cache or not, by every set of kernels. */
static void check_case(box_case *c, rng *g) {
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    assert_int_equal(tb__move_check(&c->copy), TB_OK);
    for (int s = 0; s < nsets; s++) {
        tb__kernels_force(sets[s]);
        for (int stream = 0; stream < 2; stream++) {
            memset(c->dst.memory, 0xa5, c->dst.nbytes);
            tb__move_run(&c->copy, tb__move_whole(&c->copy), stream);
            check_memory(c, stream ? "streamed" : "whole");
            memset(c->dst.memory, 0xa5, c->dst.nbytes);
            int64_t of = rng_range(g, 1, 1000), at = 0;
            while (at < of) {
                int64_t to = at + rng_range(g, 1, of - at);
                tb__move_run(&c->copy, tb__move_cut(&c->copy, at, to, of), stream);
                at = to;
            }
            check_memory(c, "in parts");
        }
    }
    tb__kernels_force(NULL);
}

static int random_shape(int64_t *len, int64_t most, rng *g) {
    int ndim = (int)rng_range(g, 0, TB_MAX_DIMS);
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        int64_t longest = rng_range(g, 0, 3) ? 5 : 200;
        len[d] = rng_range(g, rng_range(g, 0, 30) ? 1 : 0, longest);
        if (n * len[d] > most)
            len[d] = 1;
        n *= len[d] ? len[d] : 1;
    }
    return ndim;
}

static void test_random_boxes(void **state) {
    (void)state;
    rng g = {test_seed()};
    static const tb_dtype plain[] = {TB_U8, TB_BF16, TB_F32, TB_F64, TB_BOOL, TB_E8M0};
    int64_t cases = test_cases(CASES);
    for (int64_t i = 0; i < cases; i++) {
        int64_t len[TB_MAX_DIMS];
        int ndim = random_shape(len, 4000, &g);
        tb_dtype dtype[3];
        uint32_t nsrc = (uint32_t)rng_range(&g, 0, MAX_SOURCES);
        for (int k = 0; k < 3; k++)
            dtype[k] = floats[rng_range(&g, 0, 4)];
        if (nsrc <= 1 && rng_range(&g, 0, 1))
            dtype[0] = dtype[1] = dtype[2] = plain[rng_range(&g, 0, 5)];
        box_case c;
        make_case(&c, ndim, len, nsrc, dtype, (tb_reduce_op)rng_range(&g, TB_SUM, TB_PRODUCT), rng_range(&g, 0, 2) == 0,
                  &g);
        check_case(&c, &g);
        free_case(&c);
    }
}

/* Every element size both ways round, at sizes that are and are not made of whole tiles. */
static void test_transposes(void **state) {
    (void)state;
    rng g = {test_seed()};
    static const tb_dtype plain[] = {TB_U8, TB_BF16, TB_F32, TB_F64};
    static const int64_t sides[] = {1, 3, 16, 64, 65, 200};
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < 6; i++) {
            for (int j = 0; j < 6; j++) {
                for (int64_t run = 1; run <= 12; run += RUN_STEP) {
                    /* dst[a][b][run] from src[b][a][run] */
                    int64_t a = sides[i], b = sides[j], n = a * b * run;
                    size_t size = number_size(plain[t]),
                           offset = rng_range(&g, 0, 1) ? 0 : (size_t)rng_range(&g, 0, 63);
                    uint8_t *src = malloc((size_t)n * size), *dst = aligned_alloc(64, (n * size + 255) / 64 * 64);
                    for (size_t k = 0; k < n * size; k++)
                        src[k] = (uint8_t)rng_next(&g);
                    const void *from = src;
                    const int64_t stride[1][TB_MAX_DIMS] = {{run, a * run, 1}};
                    tb__move copy = {.ndim = 3,
                                     .len = {a, b, run},
                                     .dst = dst + offset,
                                     .dst_stride = {b * run, run, 1},
                                     .nsrc = 1,
                                     .src = &from,
                                     .src_stride = stride};
                    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = plain[t];
                    for (int stream = 0; stream < 2; stream++) {
                        memset(dst, 0, n * size + offset);
                        tb__move_run(&copy, tb__move_whole(&copy), stream);
                        for (int64_t x = 0; x < a; x++) {
                            for (int64_t y = 0; y < b; y++)
                                assert_memory_equal(dst + offset + (x * b + y) * run * size,
                                                    src + (y * a + x) * run * size, run * size);
                        }
                    }
                    free(src);
                    free(dst);
                }
            }
        }
    }
}

/* Runs of every length, at every alignment of either side. */
static void test_runs(void **state) {
    (void)state;
    enum { NBYTES = 16 * 1500 };
    rng g = {test_seed()};
    uint8_t *src = malloc(NBYTES), *dst = malloc(NBYTES), *expected = malloc(NBYTES);
    for (size_t i = 0; i < NBYTES; i++)
        src[i] = (uint8_t)rng_next(&g);
    for (int64_t run = 1; run < 1300; run += run < 300 ? 1 : 37) {
        int64_t gap = rng_range(&g, 0, 2) ? rng_range(&g, 1, 64) : 0, offset = rng_range(&g, 0, 63);
        const void *from = src + rng_range(&g, 0, 63);
        const int64_t stride[1][TB_MAX_DIMS] = {{run + rng_range(&g, 1, 64), 1}};
        tb__move copy = {.ndim = 2, .len = {15, run}, .dst = dst + offset, .dst_stride = {run + gap, 1}};
        copy.nsrc = 1;
        copy.src = &from;
        copy.src_stride = stride;
        copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_U8;
        memset(expected, 0xa5, NBYTES);
        for (int64_t i = 0; i < 15; i++)
            memcpy(expected + offset + i * (run + gap), (const uint8_t *)from + i * stride[0][0], run);
        for (int stream = 0; stream < 2; stream++) {
            memset(dst, 0xa5, NBYTES);
            tb__move_run(&copy, tb__move_whole(&copy), stream);
            assert_memory_equal(dst, expected, NBYTES);
        }
        /* A lone one, and a part of it. */
        const int64_t end_to_end[1][TB_MAX_DIMS] = {{1}};
        copy.ndim = 1;
        copy.len[0] = run;
        copy.dst_stride[0] = 1;
        copy.src_stride = end_to_end;
        memset(expected + offset + run, 0xa5, NBYTES - (size_t)(offset + run));
        for (int stream = 0; stream < 2; stream++) {
            memset(dst, 0xa5, NBYTES);
            tb__move_run(&copy, (tb__move_share){0, 0, run / 3}, stream);
            tb__move_run(&copy, (tb__move_share){0, run / 3, run}, stream);
            assert_memory_equal(dst, expected, NBYTES);
        }
    }
    free(src);
    free(dst);
    free(expected);
}

/* Rows of every kind that a set of kernels streams, also long ones, and zeros; nothing beside them is written. */
static void test_streams(void **state) {
    (void)state;
    enum { NBYTES = 1 << 20, NCASES = 300 };
    rng g = {test_seed()};
    uint8_t *src = malloc(NBYTES), *dst = malloc(NBYTES), *expected = malloc(NBYTES);
    const tb__kernels *sets[TB__KERNEL_SETS_MAX];
    int nsets = tb__kernels_list(sets);
    for (size_t i = 0; i < NBYTES; i++)
        src[i] = (uint8_t)rng_next(&g);
    for (int c = 0; c < NCASES; c++) {
        int64_t n = c % 3 ? rng_range(&g, 1, 9) : 1, most = (NBYTES - 4096) / n;
        int64_t run = rng_range(&g, 1, c % 2 ? most : most < 9000 ? most : 9000), room = most - run;
        int64_t gap = rng_range(&g, 0, 1) ? -run & 63 : rng_range(&g, 0, room < 200 ? room : 200);
        gap = gap > room ? room : gap;
        char *to = (char *)dst + rng_range(&g, 0, 130), *from = (char *)src + rng_range(&g, 0, 130);
        memset(expected, 0xa5, NBYTES);
        for (int64_t i = 0; i < n; i++)
            memcpy(expected + (to - (char *)dst) + i * (run + gap), from + i * run, (size_t)run);
        for (int s = 0; s < nsets; s++) {
            memset(dst, 0xa5, NBYTES);
            sets[s]->stream_rows(to, run + gap, from, run, n, (size_t)run);
            sets[s]->fence();
            assert_memory_equal(dst, expected, NBYTES);
            for (int64_t i = 0; i < n; i++)
                sets[s]->stream(to + i * (run + gap), from + (n - 1 - i) * run, (size_t)run, from);
            for (int64_t i = 0; i < n; i++)
                assert_memory_equal(to + i * (run + gap), from + (n - 1 - i) * run, (size_t)run);
            sets[s]->stream_zeros(to, (size_t)run);
            sets[s]->fence();
            for (int64_t i = 0; i < run; i++)
                assert_int_equal(to[i], 0);
            assert_true(to + run == (char *)dst + NBYTES || n > 1 || (uint8_t)to[run] == 0xa5);
        }
    }
    free(src);
    free(dst);
    free(expected);
}

/* Two to a byte: rows of 6 out of 10, from the second byte on. */
static void test_packed(void **state) {
    (void)state;
    uint8_t src[20], dst[20];
    for (int i = 0; i < 20; i++)
        src[i] = (uint8_t)(i * 17);
    memset(dst, 0xa5, sizeof dst);
    const void *from = src + 1;
    const int64_t stride[1][TB_MAX_DIMS] = {{10, 1}};
    tb__move copy = {.ndim = 2, .len = {3, 6}, .dst = dst + 1, .dst_stride = {8, 1}, .nsrc = 1, .src = &from};
    copy.src_stride = stride;
    copy.src_dtype = copy.wire_dtype = copy.dst_dtype = TB_F4E2M1;
    assert_int_equal(tb__moves_run(&copy, 1), TB_OK);
    uint8_t expected[20];
    memset(expected, 0xa5, sizeof expected);
    for (size_t i = 0; i < 3; i++)
        memcpy(expected + 1 + 4 * i, src + 1 + 5 * i, 3);
    assert_memory_equal(dst, expected, sizeof dst);

    copy.nsrc = 0;
    assert_int_equal(tb__moves_run(&copy, 1), TB_OK);
    for (size_t i = 0; i < 3; i++)
        memset(expected + 1 + 4 * i, 0, 3);
    assert_memory_equal(dst, expected, sizeof dst);

    copy.nsrc = 1;
    copy.len[1] = 5;
    assert_int_equal(tb__moves_run(&copy, 1), TB_INVALID);
    copy.len[1] = 6;
    copy.dst_stride[0] = 7;
    assert_int_equal(tb__moves_run(&copy, 1), TB_INVALID);
    copy.dst_stride[0] = 8;
    copy.dst_stride[1] = -1;
    assert_int_equal(tb__moves_run(&copy, 1), TB_INVALID);
}

static void test_bad_copies(void **state) {
    (void)state;
    uint8_t a[64] = {0}, out[64];
    const void *src[1] = {a};
    const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    const tb__move good = {.ndim = 1,
                           .len = {4},
                           .dst = out,
                           .dst_stride = {1},
                           .nsrc = 1,
                           .src = src,
                           .src_stride = stride,
                           .src_dtype = TB_F32,
                           .wire_dtype = TB_F32,
                           .dst_dtype = TB_F32};
    tb__move copy = good;
    assert_int_equal(tb__move_check(&copy), TB_OK);
    copy.ndim = 9;
    assert_int_equal(tb__move_check(&copy), TB_INVALID);
    copy = good;
    copy.len[0] = -1;
    assert_int_equal(tb__move_check(&copy), TB_INVALID);
    copy = good;
    copy.dst_dtype = TB_DTYPE_COUNT;
    assert_int_equal(tb__move_check(&copy), TB_INVALID);
    copy = good;
    copy.dst = NULL;
    assert_int_equal(tb__move_check(&copy), TB_INVALID);
    copy.len[0] = 0;
    assert_int_equal(tb__move_check(&copy), TB_OK);
    copy = good;
    src[0] = NULL;
    assert_int_equal(tb__move_check(&copy), TB_INVALID);
    src[0] = a;
    copy.dst_dtype = TB_I32;
    assert_int_equal(tb__move_check(&copy), TB_REFUSED);
    copy = good;
    copy.wire_dtype = TB_I64;
    assert_int_equal(tb__move_check(&copy), TB_REFUSED);
    assert_string_equal(tb_error_detail(), "there is no cast from f32 to i64");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs),         cmocka_unit_test(test_streams), cmocka_unit_test(test_transposes),
        cmocka_unit_test(test_random_boxes), cmocka_unit_test(test_packed),  cmocka_unit_test(test_bad_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
