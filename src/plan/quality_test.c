/* How good plans are on tensors of real sizes: the busiest sender against its lower bound, and what balance costs in
 * chunks. */
#include "plan/plan.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

/* A mesh of 1 to 3 dims over 2 to 64 ranks with Replicate, Shard and StridedShard, `first` its first rank. */
static tb_layout *random_side(rng *r, int ndim, int32_t first, bool permuted) {
    int mesh_ndim = (int)rng_range(r, 1, 3);
    int64_t mesh[3], n = 1;
    tb_placement place[3] = {0};
    for (int i = 0; i < mesh_ndim; i++) {
        mesh[i] = rng_range(r, i ? 1 : 2, 8);
        while (n * mesh[i] > 64)
            mesh[i]--;
        n *= mesh[i];
        int64_t choice = rng_range(r, 0, 9);
        place[i].kind = choice < 4 ? TB_REPLICATE : choice < 9 ? TB_SHARD : TB_STRIDED_SHARD;
        place[i].dim = (int)rng_range(r, 0, ndim - 1);
        place[i].split = rng_range(r, 1, 4);
    }
    int32_t ranks[64];
    for (int32_t i = 0; i < n; i++)
        ranks[i] = first + i;
    for (int32_t i = (int32_t)n - 1; i > 0 && permuted; i--) {
        int32_t other = (int32_t)rng_range(r, 0, i), swap = ranks[i];
        ranks[i] = ranks[other];
        ranks[other] = swap;
    }
    tb_layout *layout;
    assert_int_equal(tb_layout_create(mesh_ndim, mesh, ranks, place, &layout), TB_OK);
    return layout;
}

static void busiest_sender_and_chunks(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(2000), close = 0, moving = 0, chunks = 0, unbalanced_chunks = 0;
    double worst = 1, worst_chunks = 1;
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        tb_shape shape = {.ndim = (int)rng_range(&r, 1, 3)};
        for (int d = 0; d < shape.ndim; d++)
            shape.dim[d] = rng_range(&r, 1024, 8192);
        tb_layout *src = random_side(&r, shape.ndim, 0, rng_range(&r, 0, 1));
        int32_t first = rng_range(&r, 0, 1) ? 64 : (int32_t)rng_range(&r, 0, 16);
        tb_layout *dst = random_side(&r, shape.ndim, first, rng_range(&r, 0, 1));
        tb_plan *plan, *simple;
        tb_plan_stats stats = {.size = sizeof stats}, simple_stats = {.size = sizeof simple_stats};
        tb_plan_opts opts = {.size = sizeof opts, .unbalanced = true};
        assert_int_equal(tb_plan_create(src, dst, &shape, TB_BF16, NULL, &plan), TB_OK);
        assert_int_equal(tb_plan_create(src, dst, &shape, TB_BF16, &opts, &simple), TB_OK);
        assert_int_equal(tb_plan_check(plan), TB_OK);
        assert_int_equal(tb_plan_stats_compute(plan, &stats), TB_OK);
        assert_int_equal(tb_plan_stats_compute(simple, &simple_stats), TB_OK);
        if (stats.min_max_send > 0) {
            double ratio = (double)stats.max_send / (double)stats.min_max_send;
            moving++;
            close += ratio <= 1.05;
            worst = ratio > worst ? ratio : worst;
            /* Nobody can send less than an element: a line of one element over two members is the only case beyond
             * 1.5. */
            if (ratio > 1.5 && stats.max_send - stats.min_max_send >= (int64_t)sizeof(uint16_t)) {
                printf("TB_SEED=%" PRIu64 " TB_CASES=1: %.3f of the bound\n", seed + (uint64_t)i, ratio);
                fail();
            }
        } else {
            assert_int_equal(stats.max_send, 0);
        }
        chunks += stats.nchunks;
        unbalanced_chunks += simple_stats.nchunks;
        double more = (double)stats.nchunks / (double)simple_stats.nchunks;
        worst_chunks = more > worst_chunks ? more : worst_chunks;
        tb_plan_stats_fini(&stats);
        tb_plan_stats_fini(&simple_stats);
        tb_plan_destroy(plan);
        tb_plan_destroy(simple);
        tb_layout_destroy(src);
        tb_layout_destroy(dst);
    }
    printf("%" PRId64 " pairs that move data: %.2f%% within 1.05 of the bound, worst %.3f\n", moving,
           100.0 * (double)close / (double)(moving ? moving : 1), worst);
    printf("chunks: %" PRId64 ", %.3f times those without balancing; worst pair %.2f\n", chunks,
           (double)chunks / (double)unbalanced_chunks, worst_chunks);
    assert_true(100 * close >= 99 * moving);
    assert_true(chunks <= 2 * unbalanced_chunks);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(busiest_sender_and_chunks)};
    return cmocka_run_group_tests_name("plan quality", tests, NULL, NULL);
}
