/* Plans against Megatron's: every element comes from the rank and the place that Megatron's planner lists. */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct origin {
    int64_t rank, index;
} origin;

static int64_t get(const json_t *json, const char *key) {
    assert_true(json_is_integer(json_object_get(json, key)));
    return json_integer_value(json_object_get(json, key));
}

/* partition_stride is StridedShard; partition_sizes, per rank, are BlockShard with sizes times the ranks. */
static tb_layout *side_of(const json_t *json, const char *side, int dim, int32_t first) {
    char key[32];
    snprintf(key, sizeof key, "%s_world", side);
    int64_t world = get(json, key), sizes[64];
    snprintf(key, sizeof key, "%s_stride", side);
    int64_t stride = get(json, key);
    snprintf(key, sizeof key, "%s_sizes", side);
    const json_t *list = json_object_get(json, key);
    tb_placement place = {.kind = TB_SHARD, .dim = dim};
    if (json_is_array(list)) {
        place.kind = TB_BLOCK_SHARD;
        place.sizes = sizes;
        place.nsizes = json_array_size(list);
        for (size_t i = 0; i < place.nsizes; i++)
            sizes[i] = json_integer_value(json_array_get(list, i)) * world;
    } else if (stride > 1) {
        place.kind = TB_STRIDED_SHARD;
        place.split = stride;
    }
    int32_t ranks[64];
    for (int32_t i = 0; i < world; i++)
        ranks[i] = first + i;
    tb_layout *layout;
    assert_int_equal(tb_layout_create(1, &world, ranks, &place, &layout), TB_OK);
    return layout;
}

static void read_ops(const json_t *ops, int dim, origin *out) {
    for (size_t i = 0; i < json_array_size(ops); i++) {
        const json_t *op = json_array_get(ops, i);
        const json_t *src = json_array_get(json_array_get(op, 1), (size_t)dim);
        const json_t *dst = json_array_get(json_array_get(op, 2), (size_t)dim);
        int64_t from = json_integer_value(json_array_get(src, 0)), to = json_integer_value(json_array_get(dst, 0));
        int64_t n = json_integer_value(json_array_get(dst, 1)) - to;
        for (int64_t x = 0; x < n; x++)
            out[to + x] = (origin){json_integer_value(json_array_get(op, 0)), from + x};
    }
}

static void check_line(const json_t *json, tb_routes *routes) {
    int dim = (int)get(json, "dim");
    int64_t src_world = get(json, "src_world");
    const json_t *local = json_object_get(json, "src_local");
    tb_shape shape = {.ndim = (int)json_array_size(local)};
    for (int d = 0; d < shape.ndim; d++)
        shape.dim[d] = json_integer_value(json_array_get(local, (size_t)d)) * (d == dim ? src_world : 1);
    tb_layout *src = side_of(json, "src", dim, 0), *dst = side_of(json, "dst", dim, (int32_t)src_world);
    tb_plan *plan;
    assert_int_equal(tb_plan_create(src, dst, &shape, TB_BF16, NULL, &plan), TB_OK);
    assert_int_equal(tb_plan_check(plan), TB_OK);
    const char *rank;
    json_t *ops;
    json_object_foreach(json_object_get(json, "ops"), rank, ops) {
        static origin expected[4096], got[4096];
        int32_t target = atoi(rank);
        int64_t n = shape.dim[dim] / get(json, "dst_world");
        assert_true(n <= 4096);
        read_ops(ops, dim, expected);
        assert_int_equal(tb_plan_routes(plan, target, 0, routes), TB_OK);
        for (size_t i = 0; i < tb_routes_count(routes); i++) {
            const tb_route *route = tb_routes_at(routes, i);
            for (int d = 0; d < shape.ndim; d++)
                assert_true(d == dim || (route->len[d] == shape.dim[d] && route->src.start[d] == 0));
            for (int64_t x = 0; x < route->len[dim]; x++)
                got[route->dst.start[dim] + x] = (origin){route->source, route->src.start[dim] + x};
        }
        for (int64_t x = 0; x < n; x++) {
            assert_int_equal(got[x].rank, expected[x].rank);
            assert_int_equal(got[x].index, expected[x].index);
        }
        assert_true(tb_routes_count(routes) <= json_array_size(ops));
    }
    tb_plan_destroy(plan);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

static void golden_megatron_plans(void **state) {
    (void)state;
    char path[4096], *line = NULL;
    const char *folder = getenv("TB_GOLDEN");
    snprintf(path, sizeof path, "%s/megatron_tp.jsonl", folder ? folder : "tests/golden");
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t size = 0, nlines = 0;
    tb_routes *routes;
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    for (; getline(&line, &size, file) > 0; nlines++) {
        json_t *json = json_loads(line, 0, NULL);
        check_line(json, routes);
        json_decref(json);
    }
    assert_int_equal(nlines, 150);
    tb_routes_destroy(routes);
    free(line);
    fclose(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_megatron_plans)};
    return cmocka_run_group_tests_name("plan golden", tests, NULL, NULL);
}
