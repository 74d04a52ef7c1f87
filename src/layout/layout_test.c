/* Layouts: PyTorch's own, their text and JSON forms, and error messages. */
#include "layout/layout.h"

#include "../tests/support/random_case.h"
#include "base/text.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static FILE *open_golden(const char *name) {
    char path[4096];
    const char *folder = getenv("TB_GOLDEN");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "tests/golden", name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    return file;
}

static bool is_empty(const tb_shape *shape) {
    for (int d = 0; d < shape->ndim; d++) {
        if (shape->dim[d] == 0)
            return true;
    }
    return false;
}

static void check_local(const tb_local *local, const json_t *expected) {
    const json_t *shape = json_object_get(expected, "shape"), *dims = json_object_get(expected, "dims");
    assert_int_equal(local->shape.ndim, json_array_size(shape));
    for (int d = 0; d < local->shape.ndim; d++)
        assert_int_equal(local->shape.dim[d], json_integer_value(json_array_get(shape, (size_t)d)));
    if (is_empty(&local->shape)) {
        assert_true(json_is_null(dims));
        return;
    }
    for (int d = 0; d < local->shape.ndim; d++) {
        const json_t *segments = json_array_get(dims, (size_t)d);
        assert_int_equal(local->nsegments[d], json_array_size(segments));
        for (size_t i = 0; i < local->nsegments[d]; i++) {
            const json_t *pair = json_array_get(segments, i);
            assert_int_equal(local->segments[d][i].start, json_integer_value(json_array_get(pair, 0)));
            assert_int_equal(local->segments[d][i].stop, json_integer_value(json_array_get(pair, 1)));
        }
    }
}

static void golden_dtensor_layouts(void **state) {
    (void)state;
    FILE *file = open_golden("dtensor_layouts.jsonl");
    char *line = NULL;
    size_t size = 0, nlines = 0;
    while (getline(&line, &size, file) > 0) {
        json_t *json = json_loads(line, 0, NULL);
        tb_layout *layout;
        tb_shape shape;
        assert_int_equal(tb__shape_from_json(json_object_get(json, "shape"), &shape), TB_OK);
        assert_int_equal(tb__layout_from_json(json, &layout), TB_OK);
        const char *rank;
        json_t *expected;
        json_object_foreach(json_object_get(json, "locals"), rank, expected) {
            tb_local local;
            assert_int_equal(tb_layout_local(layout, &shape, atoi(rank), &local), TB_OK);
            check_local(&local, expected);
            tb_local_fini(&local);
        }
        tb_layout_destroy(layout);
        json_decref(json);
        nlines++;
    }
    assert_int_equal(nlines, 300);
    free(line);
    fclose(file);
}

/* The example that fixes the meaning of StridedShard. */
static void strided_shard_by_hand(void **state) {
    (void)state;
    static const int64_t expected[4][3] = {{0, 1, 5}, {2, 3, 6}, {4, 7, -1}, {8, -1, -1}};
    tb_layout *layout;
    tb_shape shape = {1, {9}};
    assert_int_equal(tb_layout_parse("mesh=4 place=StridedShard(0,2)", &layout), TB_OK);
    for (int32_t rank = 0; rank < 4; rank++) {
        tb_local local;
        int n = 0;
        assert_int_equal(tb_layout_local(layout, &shape, rank, &local), TB_OK);
        for (size_t i = 0; i < local.nsegments[0]; i++) {
            for (int64_t x = local.segments[0][i].start; x < local.segments[0][i].stop; x++)
                assert_int_equal(x, expected[rank][n++]);
        }
        assert_true(n == 3 || expected[rank][n] == -1);
        tb_local_fini(&local);
    }
    tb_layout_destroy(layout);
}

/* Random layouts against the naive evaluation, and through their text form. */
static void random_layouts(void **state) {
    (void)state;
    static random_case c;
    static naive_list list;
    uint64_t seed = test_seed();
    int64_t n = test_cases(5000);
    for (int64_t i = 0; i < n; i++) {
        tb_layout *layout, *again;
        char *text;
        random_case_make(&c, seed + (uint64_t)i);
        assert_int_equal(side_layout(&c.dst, &layout), TB_OK);
        for (int32_t m = 0; m < c.dst.nranks; m++) {
            tb_local local;
            assert_int_equal(tb_layout_local(layout, &c.shape, c.dst.ranks[m], &local), TB_OK);
            for (int d = 0; d < c.shape.ndim; d++) {
                naive_local(&c.dst, &c.shape, m, d, &list);
                int64_t at = 0;
                assert_int_equal(local.shape.dim[d], list.count);
                for (size_t s = 0; s < local.nsegments[d]; s++) {
                    for (int64_t x = local.segments[d][s].start; x < local.segments[d][s].stop; x++)
                        assert_int_equal(x, list.index[at++]);
                }
            }
            tb_local_fini(&local);
        }
        assert_int_equal(tb_layout_format(layout, &text), TB_OK);
        assert_int_equal(tb_layout_parse(text, &again), TB_OK);
        assert_true(tb_layout_equal(layout, again));
        free(text);
        tb_layout_destroy(again);
        tb_layout_destroy(layout);
    }
}

static void text_forms(void **state) {
    (void)state;
    static const struct {
        const char *in, *out;
    } forms[] = {
        {"mesh=4 place=S0", "mesh=4 place=Shard(0)"},
        {"mesh=2,2 place=R,S1 ranks=4..7", "mesh=2,2 place=Replicate,Shard(1) ranks=4..7"},
        {"  place = x", NULL},
        {"ranks=9,3 mesh=2 place=P", "mesh=2 place=Partial(sum) ranks=9,3"},
        {"mesh=2 place=Partial(avg)", "mesh=2 place=Partial(avg)"},
        {"mesh=2 place=s-1", "mesh=2 place=Shard(-1)"},
        {"mesh=2 place=StridedShard( 0 , 2 )", "mesh=2 place=StridedShard(0,2)"},
        {"mesh=3 place=BlockShard(0,4,12,8)", "mesh=3 place=BlockShard(0,4,12,8)"},
        {"mesh=2 place=Explicit(0, 0-3,5-6; 3-5)", "mesh=2 place=Explicit(0, 0-3,5-6; 3-5)"},
        {"mesh=3 place=Explicit(0, 0-3; ; 3-5)", "mesh=3 place=Explicit(0, 0-3; ; 3-5)"},
        {"mesh=2 place=Explicit(0,;)", "mesh=2 place=Explicit(0, ; )"},
        {"mesh=5 place=R ranks=0,1,2,7,9", "mesh=5 place=Replicate ranks=0..2,7,9"},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        tb_layout *layout;
        char *text;
        tb_status status = tb_layout_parse(forms[i].in, &layout);
        if (!forms[i].out) {
            assert_int_equal(status, TB_INVALID);
            continue;
        }
        assert_int_equal(status, TB_OK);
        assert_int_equal(tb_layout_format(layout, &text), TB_OK);
        assert_string_equal(text, forms[i].out);
        free(text);
        tb_layout_destroy(layout);
    }
}

/* Each wrong text, and a word that the message must contain. */
static void wrong_texts(void **state) {
    (void)state;
    static const struct {
        const char *text, *word;
    } wrong[] = {
        {"", "needs mesh= and place="},
        {"mesh=4", "needs mesh= and place="},
        {"mesh=4 place=S0 mesh=4", "twice"},
        {"mesh=4 place=S0,S1", "1 dims, but there are 2 placements"},
        {"mesh=0 place=R", "at least 1"},
        {"mesh=-3 place=R", "at least 1"},
        {"mesh=1048577 place=R", "more than 1048576 ranks"},
        {"mesh=1024,1025 place=R,R", "more than 1048576 ranks"},
        {"mesh=1,1,1,1,1,1,1,1,1 place=R", "at most 8"},
        {"mesh=2 place=R ranks=3,3", "rank 3 is in the mesh twice"},
        {"mesh=2 place=R ranks=0..2", "2 places, but 3 ranks"},
        {"mesh=2 place=R ranks=5..4", "backwards"},
        {"mesh=2 place=R ranks=0,1048576", "not between"},
        {"mesh=2 place=R ranks=0..99999999999", "not between"},
        {"mesh=2 place=Q", "not a placement"},
        {"mesh=2 place=Shard", "parentheses"},
        {"mesh=2 place=Shard(0", "expected ')'"},
        {"mesh=2 place=Shard(9)", "between -8 and 7"},
        {"mesh=2 place=StridedShard(0)", "expected ','"},
        {"mesh=2 place=StridedShard(0,0)", "at least 1"},
        {"mesh=2 place=BlockShard(0,-1,3)", "negative"},
        {"mesh=2 place=BlockShard(0,4611686018427387904,1)", "2^62"},
        {"mesh=2 place=Explicit(0, 0-3)", "1 lists for 2"},
        {"mesh=2 place=Explicit(0, 3-1; 0-1)", "not a range"},
        {"mesh=2 place=Explicit(0, 0-1,; 0-1)", "expected a segment"},
        {"mesh=2 place=Partial(mean)", "sum, avg, min, max or product"},
        {"mesh=2 place=R x", "expected mesh="},
        {"mesh=99999999999999999999 place=R", "mesh="},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tb_layout *layout;
        tb_status status = tb_layout_parse(wrong[i].text, &layout);
        if (status == TB_OK || !strstr(tb_error_detail(), wrong[i].word))
            fail_msg("'%s' gave %d '%s', not '%s'", wrong[i].text, status, tb_error_detail(), wrong[i].word);
    }
}

/* Layouts that are valid by themselves, and shapes they do not fit. */
static void wrong_shapes(void **state) {
    (void)state;
    static const struct {
        const char *layout, *shape, *word;
    } wrong[] = {
        {"mesh=2 place=S1", "8", "tensor that has 1 dims"},
        {"mesh=2 place=S-2", "8", "tensor that has 1 dims"},
        {"mesh=2 place=S0", "", "tensor that has 0 dims"},
        {"mesh=2 place=BlockShard(0,4,4)", "9", "add up to 8, but there are 9"},
        {"mesh=3,2 place=S0,BlockShard(0,3)", "8", "add up to 3, but there are 2"},
        {"mesh=2 place=Explicit(0, 0-3; 3-9)", "8", "past the 8"},
        {"mesh=3,1 place=S0,Explicit(0, 0-3)", "8", "past the 2"},
        {"mesh=2,2 place=Partial(sum),Partial(max)", "8", "mixed"},
        {"mesh=2 place=StridedShard(0,1000000000)", "1000000000", "segments"},
        {"mesh=1 place=R", "4611686018427387904,2", "2^62"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tb_layout *layout;
        tb_shape shape;
        assert_int_equal(tb_layout_parse(wrong[i].layout, &layout), TB_OK);
        assert_int_equal(tb_shape_parse(wrong[i].shape, &shape), TB_OK);
        tb_status status = tb_layout_check(layout, &shape);
        if (status == TB_OK || !strstr(tb_error_detail(), wrong[i].word))
            fail_msg("'%s' on '%s' gave %d '%s', not '%s'", wrong[i].layout, wrong[i].shape, status, tb_error_detail(),
                     wrong[i].word);
        tb_layout_destroy(layout);
    }
}

/* At the limits of sizes nothing overflows. */
static void huge_shapes(void **state) {
    (void)state;
    tb_layout *layout;
    tb_local local;
    tb_shape shape = {1, {INT64_C(1) << 62}};
    assert_int_equal(tb_layout_parse("mesh=3,1024,1024 place=S0,StridedShard(0,7),S0", &layout), TB_TOO_BIG);
    assert_int_equal(tb_layout_parse("mesh=3,512,512 place=S0,StridedShard(0,7),S0", &layout), TB_OK);
    int64_t sum = 0;
    for (int32_t rank = 0; rank < 3 * 512 * 512; rank += 511) {
        assert_int_equal(tb_layout_local(layout, &shape, rank, &local), TB_OK);
        sum += local.shape.dim[0] > 0;
        for (size_t i = 0; i < local.nsegments[0]; i++) {
            assert_in_range(local.segments[0][i].start, 0, shape.dim[0]);
            assert_in_range(local.segments[0][i].stop, local.segments[0][i].start, shape.dim[0]);
        }
        tb_local_fini(&local);
    }
    assert_int_equal(sum, (3 * 512 * 512 + 510) / 511);
    tb_layout_destroy(layout);
    static const char *const factors[] = {"9223372036854775807", "9223372036854775800", "1000000000000"};
    for (size_t i = 0; i < 3; i++) { /* more pieces than indices: each index is a piece, and goes to coordinate 0 */
        char text[64];
        snprintf(text, sizeof text, "mesh=4 place=StridedShard(0,%s)", factors[i]);
        shape = (tb_shape){1, {9}};
        assert_int_equal(tb_layout_parse(text, &layout), TB_OK);
        assert_int_equal(tb_layout_local(layout, &shape, 0, &local), TB_OK);
        assert_int_equal(local.shape.dim[0], 9);
        tb_local_fini(&local);
        tb_layout_destroy(layout);
    }
    shape = (tb_shape){3, {0, INT64_C(1) << 40, INT64_C(1) << 40}};
    assert_int_equal(tb_shape_size(&shape, TB_U8, NULL, NULL), TB_TOO_BIG);
    shape = (tb_shape){1, {(INT64_C(1) << 59) + 1}};
    assert_int_equal(tb_shape_size(&shape, TB_F64, NULL, NULL), TB_TOO_BIG);
    assert_int_equal(tb_shape_size(&shape, TB_F4E2M1, NULL, NULL), TB_OK);
}

/* A fused qkv: three logical tensors in three row ranges of one allocation. */
static void bindings(void **state) {
    (void)state;
    tb_binding b;
    tb_shape q = {2, {8, 16}}, kv = {2, {4, 16}};
    int64_t nbytes = (8 + 4 + 4) * 16 * 2;
    char memory[512];
    assert_int_equal(tb_binding_contiguous(memory, 0, TB_BF16, &q, &b), TB_OK);
    assert_int_equal(b.strides[0], 16);
    assert_int_equal(b.strides[1], 1);
    assert_int_equal(tb_binding_check(&b, nbytes), TB_OK);
    assert_int_equal(tb_binding_contiguous(memory, (8 + 4) * 16 * 2, TB_BF16, &kv, &b), TB_OK);
    assert_int_equal(tb_binding_check(&b, nbytes), TB_OK);
    assert_int_equal(tb_binding_check(&b, nbytes - 1), TB_INVALID);
    b.strides[0] = -16; /* upside down: reaches before the allocation's beginning only if there is no room */
    assert_int_equal(tb_binding_check(&b, nbytes), TB_OK);
    b.offset = 2 * 16 * 2;
    assert_int_equal(tb_binding_check(&b, nbytes), TB_INVALID);
    b.offset = -1;
    assert_int_equal(tb_binding_check(&b, nbytes), TB_INVALID);
    b.offset = 0;
    b.strides[0] = INT64_MAX;
    assert_int_equal(tb_binding_check(&b, nbytes), TB_TOO_BIG);
    tb_shape packed = {1, {7}};
    assert_int_equal(tb_binding_contiguous(memory, 0, TB_F4E2M1, &packed, &b), TB_OK);
    assert_int_equal(tb_binding_check(&b, 4), TB_OK);
    assert_int_equal(tb_binding_check(&b, 3), TB_INVALID);
}

/* The lowest rank that is not below another one, against a linear search. */
static void rank_from(void **state) {
    (void)state;
    static const char *const texts[] = {"mesh=4 place=S0", "mesh=2,2 place=S0,R ranks=7,2,9,4",
                                        "mesh=3 place=R ranks=5..7"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        tb_layout *layout;
        assert_int_equal(tb_layout_parse(texts[i], &layout), TB_OK);
        for (int32_t rank = 0; rank < 12; rank++) {
            int32_t lowest = TB_NO_RANK;
            for (int32_t k = 0; k < tb_layout_nranks(layout); k++) {
                int32_t at = tb_layout_rank_at(layout, k);
                if (at >= rank && (lowest == TB_NO_RANK || at < lowest))
                    lowest = at;
            }
            assert_int_equal(tb__layout_rank_from(layout, rank), lowest);
        }
        tb_layout_destroy(layout);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_dtensor_layouts),
        cmocka_unit_test(rank_from),
        cmocka_unit_test(strided_shard_by_hand),
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(text_forms),
        cmocka_unit_test(wrong_texts),
        cmocka_unit_test(wrong_shapes),
        cmocka_unit_test(huge_shapes),
        cmocka_unit_test(bindings),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
