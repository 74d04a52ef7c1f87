/* Views of models as trainers and inference engines keep them: what becomes of their layouts, and whole parameters
 * moved from one to the other, with every element where it belongs. */
#include "base/mem.h"
#include "tensorbus/plan.h"

#include "../tests/support/elements.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_RANKS = 8, UNTOUCHED = -7 };

static void assert_shape(const tb_shape *shape, const tb_shape *expected) {
    assert_int_equal(shape->ndim, expected->ndim);
    for (int d = 0; d < shape->ndim; d++)
        assert_int_equal(shape->dim[d], expected->dim[d]);
}

/* A parameter in the memory of all ranks of a side. */
typedef struct param {
    tb_shape shape;
    tb_layout *layout;
    tb_binding binding[MAX_RANKS];
    int32_t *data[MAX_RANKS];
    int64_t count[MAX_RANKS];
} param;

/* `value` gives the elements of a source, by global index; without it, all are UNTOUCHED. */
static void param_init(param *p, const char *shape, const char *layout, int32_t (*value)(const int64_t *index)) {
    assert_ok(tb_shape_parse(shape, &p->shape));
    assert_ok(tb_layout_parse(layout, &p->layout));
    for (int32_t rank = 0; rank < tb_layout_nranks(p->layout); rank++) {
        tb_local local;
        assert_ok(tb_layout_local(p->layout, &p->shape, rank, &local));
        p->count[rank] = 1;
        for (int d = 0; d < local.shape.ndim; d++)
            p->count[rank] *= local.shape.dim[d];
        p->data[rank] = calloc((size_t)p->count[rank] + 1, sizeof *p->data[rank]);
        assert_ok(tb_binding_contiguous(p->data[rank], 0, TB_I32, &local.shape, &p->binding[rank]));
        for (int64_t i = 0; i < p->count[rank]; i++) {
            int64_t index[TB_MAX_DIMS], rest = i;
            for (int d = local.shape.ndim - 1; d >= 0; d--) {
                int64_t at = rest % local.shape.dim[d];
                size_t s = 0;
                rest /= local.shape.dim[d];
                for (; at >= local.segments[d][s].stop - local.segments[d][s].start; s++)
                    at -= local.segments[d][s].stop - local.segments[d][s].start;
                index[d] = local.segments[d][s].start + at;
            }
            p->data[rank][i] = value ? value(index) : UNTOUCHED;
        }
        tb_local_fini(&local);
    }
}

static void param_fini(param *p) {
    for (int rank = 0; rank < MAX_RANKS; rank++)
        free(p->data[rank]);
    tb_layout_destroy(p->layout);
    *p = (param){0};
}

/* A canonical tensor in a parameter. */
typedef struct part {
    tb_shape shape;
    tb_layout *layout;
    tb_binding binding[MAX_RANKS];
} part;

static void part_init(part *out, const param *p, const char *text) {
    tb_view *view;
    assert_ok(tb_view_parse(text, &view));
    assert_ok(tb_view_apply(view, &p->shape, p->layout, &out->shape, &out->layout));
    for (int32_t rank = 0; rank < tb_layout_nranks(p->layout); rank++) {
        tb_binding *boxes;
        size_t nboxes;
        assert_ok(tb_view_bind(view, &p->shape, p->layout, rank, &p->binding[rank], &out->binding[rank]));
        assert_ok(tb_binding_check(&out->binding[rank], p->count[rank] * (int64_t)sizeof(int32_t)));
        assert_ok(tb_view_padding(view, &p->shape, p->layout, rank, &p->binding[rank], &boxes, &nboxes));
        free(boxes);
    }
    tb_view_destroy(view);
}

static void part_fini(part *p) {
    tb_layout_destroy(p->layout);
}

static void assert_layout(const param *p, const char *view, const char *shape, const char *layout) {
    part out = {0};
    tb_shape expected;
    char *text;
    part_init(&out, p, view);
    assert_ok(tb_shape_parse(shape, &expected));
    assert_shape(&out.shape, &expected);
    assert_ok(tb_layout_format(out.layout, &text));
    tb_layout *wanted;
    assert_ok(tb_layout_parse(layout, &wanted));
    if (!tb_layout_equal(out.layout, wanted))
        print_error("is %s\nnot %s\n", text, layout);
    assert_true(tb_layout_equal(out.layout, wanted));
    tb_layout_destroy(wanted);
    free(text);
    part_fini(&out);
}

static void move(const part *from, const part *to) {
    tb_plan *plan;
    assert_shape(&from->shape, &to->shape);
    assert_ok(tb_plan_create(from->layout, to->layout, &from->shape, TB_I32, NULL, &plan));
    assert_ok(tb_plan_check(plan));
    move_elements(plan, from->binding, to->binding, MAX_RANKS);
    tb_plan_destroy(plan);
}

static void move_views(const param *from, const char *from_view, const param *to, const char *to_view) {
    part a = {0}, b = {0};
    part_init(&a, from, from_view);
    part_init(&b, to, to_view);
    move(&a, &b);
    part_fini(&a);
    part_fini(&b);
}

/* 8 query heads in 2 groups, each with a key and a value head; heads of 4 rows, 3 columns. */
enum { GROUPS = 2, PER_GROUP = 4, ROWS = 4, COLUMNS = 3, Q = 0, K = 1, V = 2 };

static int32_t qkv_value(int kind, int64_t head, int64_t row, int64_t column) {
    return (int32_t)(((kind * 100 + head) * 100 + row) * 100 + column);
}

/* Megatron: of each group the query heads, then key, then value. */
static int32_t interleaved(const int64_t *index) {
    int64_t group = index[0] / ((PER_GROUP + 2) * ROWS), head = index[0] / ROWS % (PER_GROUP + 2);
    int kind = head < PER_GROUP ? Q : head == PER_GROUP ? K : V;
    return qkv_value(kind, kind == Q ? group * PER_GROUP + head : group, index[0] % ROWS, index[1]);
}

static const char *const megatron[] = {"split(0,2,6,4) slice(1,0,4)", "split(0,2,6,4) slice(1,4,1)",
                                       "split(0,2,6,4) slice(1,5,1)"};

static void megatron_qkv(void **state) {
    (void)state;
    param p = {0};
    param_init(&p, "48,3", "mesh=2 place=S0", interleaved);
    assert_layout(&p, megatron[Q], "2,4,4,3", "mesh=2 place=S0");
    assert_layout(&p, megatron[K], "2,1,4,3", "mesh=2 place=S0");
    part q = {0}, v = {0};
    part_init(&q, &p, megatron[Q]);
    part_init(&v, &p, megatron[V]);
    static const int64_t strides[] = {1 /* one group only */, 4 * 3, 3, 1};
    assert_int_equal(q.binding[1].offset, 0);
    assert_int_equal(v.binding[1].offset, 5 * 4 * 3 * sizeof(int32_t));
    for (int d = 0; d < 4; d++)
        assert_int_equal(q.binding[0].strides[d], strides[d]);
    part_fini(&q);
    part_fini(&v);

    /* one group a rank: its query heads are next to one another, and need no dim of their own */
    assert_layout(&p, "split(0,2,6,4) slice(1,0,4) merge(0,2)", "32,3", "mesh=2 place=S0");
    param_fini(&p);

    /* two groups on a rank are apart; all ranks say so, whatever they hold */
    tb_view *view;
    tb_shape shape = {2, {72, 3}}, canonical;
    tb_layout *layout, *viewed;
    assert_ok(tb_layout_parse("mesh=2 place=S0", &layout));
    assert_ok(tb_view_parse("split(0,3,6,4) slice(1,0,4) merge(0,2)", &view));
    assert_int_equal(tb_view_apply(view, &shape, layout, &canonical, &viewed), TB_REFUSED);
    tb_view_destroy(view);
    tb_layout_destroy(layout);

    /* a rank that has half a group has no box of it */
    assert_ok(tb_layout_parse("mesh=4 place=S0", &layout));
    assert_ok(tb_view_parse("split(0,3,6,4) slice(1,0,4)", &view));
    assert_int_equal(tb_view_apply(view, &shape, layout, &canonical, &viewed), TB_REFUSED);
    assert_string_equal(tb_error_detail(),
                        "the part of dim 0 of the stored tensor is no box of even strides in the view");
    tb_view_destroy(view);
    tb_layout_destroy(layout);
}

/* Separate q, k and v, as checkpoints have them. */
static void megatron_to_separate(void **state) {
    (void)state;
    static const char *const shapes[] = {"32,3", "8,3", "8,3"}, *const views[] = {"split(0,2,4,4)", "split(0,2,1,4)",
                                                                                  "split(0,2,1,4)"};
    param from = {0};
    param_init(&from, "48,3", "mesh=2 place=S0", interleaved);
    for (int kind = Q; kind <= V; kind++) {
        param to = {0};
        param_init(&to, shapes[kind], "mesh=1 place=R", NULL);
        move_views(&from, megatron[kind], &to, views[kind]);
        for (int64_t i = 0; i < to.count[0]; i++)
            assert_int_equal(to.data[0][i], qkv_value(kind, i / COLUMNS / ROWS, i / COLUMNS % ROWS, i % COLUMNS));
        param_fini(&to);
    }
    param_fini(&from);
}

/* vLLM with more ranks than key heads: each of 8 ranks has one query head, and a copy of the key and value heads that
 * belong to it, one after the other in one tensor. The mesh is (kv heads, copies); the second cuts only the queries. */
#define VLLM_QKV "mesh=2,4 place=BlockShard(0,32,8,8),Explicit(0, 0-4,16-24; 4-8,16-24; 8-12,16-24; 12-16,16-24)"

static const char *const vllm[] = {"slice(0,0,32) split(0,2,4,4)", "slice(0,32,8) split(0,2,1,4)",
                                   "slice(0,40,8) split(0,2,1,4)"};

static void vllm_qkv(void **state) {
    (void)state;
    param to = {0}, from = {0};
    param_init(&from, "48,3", "mesh=2 place=S0", interleaved);
    param_init(&to, "48,3", VLLM_QKV, NULL);
    assert_layout(&to, vllm[Q], "2,4,4,3", "mesh=2,4 place=S0,S1");
    assert_layout(&to, vllm[K], "2,1,4,3", "mesh=2,4 place=S0,R");
    for (int kind = Q; kind <= V; kind++)
        move_views(&from, megatron[kind], &to, vllm[kind]);
    for (int rank = 0; rank < 8; rank++) {
        assert_int_equal(to.count[rank], 3 * ROWS * COLUMNS);
        for (int64_t i = 0; i < to.count[rank]; i++) {
            int kind = (int)(i / (ROWS * COLUMNS));
            assert_int_equal(to.data[rank][i],
                             qkv_value(kind, kind == Q ? rank : rank / PER_GROUP, i / COLUMNS % ROWS, i % COLUMNS));
        }
    }
    param_fini(&from);
    param_fini(&to);
}

static int32_t by_row(const int64_t *index) {
    return (int32_t)(index[0] * 100 + index[1]);
}

/* Each rank has its share of gate, then its share of up. */
static void gate_up(void **state) {
    (void)state;
    param to = {0}, gate = {0}, up = {0};
    param_init(&to, "20,2", "mesh=4 place=BlockShard(0,10,10)", NULL);
    param_init(&gate, "10,2", "mesh=2 place=S1", by_row);
    param_init(&up, "10,2", "mesh=3 place=S0", by_row);
    assert_layout(&to, "slice(0,0,10)", "10,2", "mesh=4 place=S0");
    assert_layout(&to, "slice(0,10,10)", "10,2", "mesh=4 place=S0");
    move_views(&gate, "", &to, "slice(0,0,10)");
    move_views(&up, "", &to, "slice(0,10,10)");
    for (int rank = 0; rank < 4; rank++) {
        int64_t rows = rank < 3 ? 3 : 1;
        assert_int_equal(to.count[rank], 2 * rows * 2);
        for (int64_t i = 0; i < to.count[rank]; i++)
            assert_int_equal(to.data[rank][i], (rank * 3 + i / 2 % rows) * 100 + i % 2);
    }
    param_fini(&to);
    param_fini(&gate);
    param_fini(&up);
}

static int32_t by_expert(const int64_t *index) {
    return (int32_t)((index[0] * 100 + index[1]) * 100 + index[2]);
}

/* w13 of 4 experts over 2 expert ranks, dealt out by a map, each cut in two: w1's share, then w3's, of every expert. */
static void experts(void **state) {
    (void)state;
    static const int64_t map[2][2] = {{3, 0}, {1, 2}};
    param to = {0}, w1 = {0};
    param_init(&to, "4,12,2", "mesh=2,2 place=Explicit(0, 3-4,0-1; 1-3),BlockShard(1,6,6)", NULL);
    assert_layout(&to, "slice(1,0,6)", "4,6,2", "mesh=2,2 place=Explicit(0, 3-4,0-1; 1-3),S1");
    assert_layout(&to, "slice(1,6,6)", "4,6,2", "mesh=2,2 place=Explicit(0, 3-4,0-1; 1-3),S1");
    param_init(&w1, "4,6,2", "mesh=3 place=S1", by_expert);
    move_views(&w1, "", &to, "slice(1,0,6)");

    /* one expert as a tensor of its own: the ranks without it have nothing */
    assert_layout(&to, "slice(0,0,1) slice(1,6,6) merge(0,1)", "6,2", "mesh=2 place=S0");
    for (int e = 0; e < 4; e++) {
        char stacked[64], single[64];
        snprintf(stacked, sizeof stacked, "slice(0,%d,1) slice(1,6,6) merge(0,1)", e);
        snprintf(single, sizeof single, "slice(0,%d,1) merge(0,1)", e);
        move_views(&w1, single, &to, stacked);
    }
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(to.count[rank], 2 * 6 * 2);
        for (int64_t i = 0; i < to.count[rank]; i++) {
            int64_t expert = map[rank / 2][i / 12], row = rank % 2 * 3 + i / 2 % 3;
            assert_int_equal(to.data[rank][i], (expert * 100 + row) * 100 + i % 2);
        }
    }
    param_fini(&to);
    param_fini(&w1);
}

/* 10 words, padded to 16 for 4 ranks here, and to 12 for 3 there. */
static void padded_vocabulary(void **state) {
    (void)state;
    param from = {0}, to = {0};
    param_init(&from, "16,2", "mesh=4 place=S0", by_row);
    param_init(&to, "12,2", "mesh=3 place=S0", NULL);
    assert_layout(&from, "pad(0,0,6)", "10,2", "mesh=3 place=S0");
    assert_layout(&to, "pad(0,0,2)", "10,2", "mesh=3 place=S0");
    move_views(&from, "pad(0,0,6)", &to, "pad(0,0,2)");
    tb_view *view;
    assert_ok(tb_view_parse("pad(0,0,2)", &view));
    for (int32_t rank = 0; rank < 3; rank++) {
        tb_binding *boxes;
        size_t nboxes;
        assert_ok(tb_view_padding(view, &to.shape, to.layout, rank, &to.binding[rank], &boxes, &nboxes));
        assert_int_equal(nboxes, rank == 2);
        for (size_t b = 0; b < nboxes; b++) {
            assert_int_equal(boxes[b].shape.dim[0], 2);
            for (int64_t i = 0; i < 4; i++) {
                int32_t *at = element_at(&boxes[b], &(tb_box){{0}}, boxes[b].shape.dim, i);
                assert_int_equal(*at, UNTOUCHED);
                *at = 0;
            }
        }
        free(boxes);
        for (int64_t i = 0; i < to.count[rank]; i++) {
            int64_t row = rank * 4 + i / 2;
            assert_int_equal(to.data[rank][i], row < 10 ? row * 100 + i % 2 : 0);
        }
    }
    tb_view_destroy(view);
    param_fini(&from);
    param_fini(&to);
}

/* Layouts that are said in the simplest way that says them. */
static void layouts(void **state) {
    (void)state;
    static const struct {
        const char *shape, *layout, *view, *new_shape, *new_layout;
    } cases[] = {
        {"8,6", "mesh=2,3 place=S0,S1 ranks=5..10", "permute(1,0)", "6,8", "mesh=2,3 place=S1,S0 ranks=5..10"},
        {"8,6", "mesh=2,2 place=P,S-1", "split(1,2,3)", "8,2,3", "mesh=2,2 place=P,S1"},
        {"8", "mesh=2 place=S0", "split(0,2,4)", "2,4", "mesh=2 place=S0"},
        {"8", "mesh=2 place=S0", "split(0,1,8)", "1,8", "mesh=2 place=S1"},
        /* both dims move with one mesh dim, which is split */
        {"8", "mesh=8 place=S0", "split(0,2,4)", "2,4", "mesh=2,4 place=S0,S1"},
        /* two mesh dims, a dim each */
        {"8", "mesh=2,4 place=S0,S0", "split(0,2,4)", "2,4", "mesh=2,4 place=S0,S1"},
        /* two pieces: every rank has its share of both */
        {"8", "mesh=2 place=StridedShard(0,2)", "split(0,2,4)", "2,4", "mesh=2 place=S1"},
        {"2,4", "mesh=2 place=S1", "merge(0,1)", "8", "mesh=2 place=Explicit(0, 0-2,4-6; 2-4,6-8)"},
        /* mesh dims that together make one list are joined, wherever they stand */
        {"12", "mesh=2,2,2 place=S0,R,S0", "slice(0,2,8)", "8",
         "mesh=4,2 place=Explicit(0, 0-1; 1-4; 4-7; 7-8),R "
         "ranks=0,2,1,3,4,6,5,7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_shape shape, viewed_shape, new_shape;
        tb_layout *layout, *viewed, *new_layout;
        tb_view *view;
        char *text;
        assert_ok(tb_shape_parse(cases[i].shape, &shape));
        assert_ok(tb_shape_parse(cases[i].new_shape, &new_shape));
        assert_ok(tb_layout_parse(cases[i].layout, &layout));
        assert_ok(tb_layout_parse(cases[i].new_layout, &new_layout));
        assert_ok(tb_view_parse(cases[i].view, &view));
        assert_ok(tb_view_apply(view, &shape, layout, &viewed_shape, &viewed));
        assert_ok(tb_layout_format(viewed, &text));
        assert_shape(&viewed_shape, &new_shape);
        if (!tb_layout_equal(viewed, new_layout))
            print_error("case %zu is %s\n", i, text);
        assert_true(tb_layout_equal(viewed, new_layout));
        free(text);
        tb_view_destroy(view);
        tb_layout_destroy(layout);
        tb_layout_destroy(viewed);
        tb_layout_destroy(new_layout);
    }
}

static void wrong_views(void **state) {
    (void)state;
    static const struct {
        const char *view;
        tb_status status;
        const char *sentence;
    } cases[] = {
        {"split", TB_INVALID, "view 'split': expected '(' after split at ''"},
        {"split(0)", TB_INVALID, "view 'split(0)': split takes at least 2 numbers, at 'split(0)'"},
        {"merge(0,1,2)", TB_INVALID, "view 'merge(0,1,2)': merge takes at most 2 numbers, at 'merge(0,1,2)'"},
        {"pad(0,1 2)", TB_INVALID, "view 'pad(0,1 2)': expected a number or ')' at '2)'"},
        {"split(2,2,-1)", TB_INVALID, "operation 0 of the view, split: there is no dim 2 of 2"},
        {"split(0,5,-1)", TB_INVALID,
         "operation 0 of the view, split: a dim of 12 can't be split into parts that multiply to 5"},
        {"split(0,3,3)", TB_INVALID,
         "operation 0 of the view, split: a dim of 12 can't be split into parts that multiply to 9"},
        {"split(0,-1,-1)", TB_INVALID, "operation 0 of the view, split: -1 is not a size; one of them may be -1"},
        {"split(0,0,-1)", TB_INVALID, "operation 0 of the view, split: 0 is not a size; one of them may be -1"},
        {"merge(1,0)", TB_INVALID, "operation 0 of the view, merge: dims 1 to 0 are no range"},
        {"permute(0,1) permute(0,0)", TB_INVALID, "operation 1 of the view, permute: dim 0 stands there twice"},
        {"permute(0)", TB_INVALID, "operation 0 of the view, permute: 1 numbers for 2 dims"},
        {"slice(0,11,2)", TB_INVALID, "operation 0 of the view, slice: 2 indices from 11 on are not in a dim of 12"},
        {"slice(0,0,0)", TB_INVALID, "operation 0 of the view, slice: 0 indices from 0 on are not in a dim of 12"},
        {"pad(0,6,6)", TB_INVALID, "operation 0 of the view, pad: a dim of 12 can't have padding of 6 and 6"},
        {"merge(0,1) slice(0,1,5)", TB_REFUSED,
         "operation 1 of the view, slice: the dim was merged from several, and the slice does not keep them whole"},
        {"merge(0,1) split(0,-1,3)", TB_REFUSED,
         "operation 1 of the view, split: the dim was merged from one of 5 and others; it can't be split at 3"},
        {"split(0,1,1,1,1,1,1,1,12)", TB_TOO_BIG, "operation 0 of the view, split: that makes more than 8 dims"},
    };
    tb_layout *layout, *viewed = NULL;
    tb_shape shape = {2, {12, 5}}, canonical;
    assert_ok(tb_layout_parse("mesh=1 place=R", &layout));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_view *view = NULL;
        tb_status status = tb_view_parse(cases[i].view, &view);
        if (status == TB_OK)
            status = tb_view_apply(view, &shape, layout, &canonical, &viewed);
        assert_string_equal(tb_error_detail(), cases[i].sentence);
        assert_int_equal(status, cases[i].status);
        assert_null(viewed);
        tb_view_destroy(view);
    }
    tb_binding binding, bound;
    assert_ok(tb_binding_contiguous(NULL, 0, TB_U8, &(tb_shape){2, {12, 4}}, &binding));
    assert_int_equal(tb_view_bind(NULL, &shape, layout, 0, &binding, &bound), TB_INVALID);
    assert_string_equal(tb_error_detail(), "dim 1 of the binding is 4 long, but the rank has 5");

    /* two numbers to a byte */
    tb_view *view;
    assert_ok(tb_view_parse("slice(1,1,4)", &view));
    assert_ok(tb_binding_contiguous(NULL, 0, TB_F4E2M1, &shape, &binding));
    assert_int_equal(tb_view_bind(view, &shape, layout, 0, &binding, &bound), TB_REFUSED);
    assert_string_equal(tb_error_detail(), "the part begins in the middle of a byte");
    tb_view_destroy(view);
    tb_layout_destroy(layout);
}

/* A rank outside the mesh, and one whose shard is empty. */
static void nothing_there(void **state) {
    (void)state;
    tb_layout *layout;
    tb_view *view;
    tb_shape shape = {2, {6, 4}}, none = {2, {0, 4}};
    tb_binding binding, bound, *boxes;
    size_t nboxes;
    assert_ok(tb_layout_parse("mesh=4 place=S0", &layout));
    assert_ok(tb_view_parse("split(0,3,2) pad(2,1,0)", &view));
    assert_ok(tb_binding_contiguous(NULL, 0, TB_U8, &none, &binding));
    assert_ok(tb_view_bind(view, &shape, layout, 3, &binding, &bound));
    assert_shape(&bound.shape, &((tb_shape){3, {0, 2, 3}}));
    assert_ok(tb_view_padding(view, &shape, layout, 3, &binding, &boxes, &nboxes));
    assert_int_equal(nboxes, 0);
    free(boxes);
    binding.shape.dim[1] = 0;
    assert_ok(tb_view_bind(view, &shape, layout, 9, &binding, &bound));
    assert_shape(&bound.shape, &((tb_shape){3, {0, 0, 0}}));
    tb_view_destroy(view);
    tb_layout_destroy(layout);
}

/* Every allocation fails once; nothing leaks or is half made, which asan sees. */
static void out_of_memory(void **state) {
    (void)state;
    tb_layout *layout;
    tb_shape shape = {2, {48, 3}}, local = {2, {12, 3}}, canonical;
    tb_binding binding, bound;
    assert_ok(tb_layout_parse(VLLM_QKV, &layout));
    assert_ok(tb_binding_contiguous(NULL, 0, TB_U8, &local, &binding));
    bool is_done = false;
    for (long n = 0; !is_done; n++) {
        tb_view *view = NULL;
        tb_layout *viewed = NULL;
        tb_binding *boxes = NULL;
        size_t nboxes = 0;
        assert_true(n < 1000);
        tb__mem_fail_after(n);
        tb_status status = tb_view_parse("slice(0,0,32) pad(0,16,0) split(0,4,4)", &view);
        if (status == TB_OK)
            status = tb_view_apply(view, &shape, layout, &canonical, &viewed);
        if (status == TB_OK)
            status = tb_view_bind(view, &shape, layout, 1, &binding, &bound);
        if (status == TB_OK)
            status = tb_view_padding(view, &shape, layout, 1, &binding, &boxes, &nboxes);
        tb__mem_fail_after(-1);
        is_done = status == TB_OK;
        assert_true(is_done || status == TB_NO_MEMORY);
        free(boxes);
        tb_layout_destroy(viewed);
        tb_view_destroy(view);
    }
    tb_layout_destroy(layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(megatron_qkv),  cmocka_unit_test(megatron_to_separate),
        cmocka_unit_test(vllm_qkv),      cmocka_unit_test(gate_up),
        cmocka_unit_test(experts),       cmocka_unit_test(padded_vocabulary),
        cmocka_unit_test(layouts),       cmocka_unit_test(wrong_views),
        cmocka_unit_test(nothing_there), cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
