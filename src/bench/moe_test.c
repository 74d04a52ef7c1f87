/* The mixture-of-experts model on both sides, for several cuts: the canonical tensors agree, plans cover them, and
 * every element comes to where the other side looks for it. */
#include "bench/moe.h"

#include "../tests/support/elements.h"

#include <stdlib.h>

enum { MAX_RANKS = 16 };

/* A canonical tensor of a side, with what every rank has of it. */
typedef struct tensor {
    const char *name;
    tb_shape shape;
    tb_layout *layout;
    tb_binding binding[MAX_RANKS];
    bool has[MAX_RANKS];
} tensor;

typedef struct side {
    int32_t nranks;
    moe_rank rank[MAX_RANKS];
    void **data[MAX_RANKS]; /* of each parameter */
    TB_VEC(tensor) tensors;
    const char **names;
} side;

static tensor *find(side *s, const char *name) {
    for (size_t i = 0; i < s->tensors.count; i++) {
        if (strcmp(s->tensors.item[i].name, name) == 0)
            return &s->tensors.item[i];
    }
    tensor new = {.name = name};
    assert_true(tb__vec_push(&s->tensors, new));
    return &s->tensors.item[s->tensors.count - 1];
}

static int64_t size_of(const tb_local *local) {
    int64_t n = 1;
    for (int d = 0; d < local->shape.ndim; d++)
        n *= local->shape.dim[d];
    return n;
}

static void bind_param(const moe_param *p, int32_t rank, void **data, tb_binding *out) {
    tb_layout *layout;
    tb_local local;
    assert_ok(tb_layout_parse(p->layout, &layout));
    assert_ok(tb_layout_local(layout, &p->shape, rank, &local));
    if (!*data)
        *data = malloc((size_t)size_of(&local) * 2 + 1);
    assert_true(size_of(&local) > 0);
    assert_ok(tb_binding_contiguous(*data, 0, TB_BF16, &local.shape, out));
    tb_local_fini(&local);
    tb_layout_destroy(layout);
}

/* Ranks that have parts of one tensor describe it alike. */
static void add_part(side *s, int32_t rank, const tb_part *part) {
    const moe_param *p = &s->rank[rank].params.item[part->param];
    tensor *t = find(s, part->name);
    tb_layout *stored, *layout;
    tb_shape shape;
    tb_binding binding;
    bind_param(p, rank, &s->data[rank][part->param], &binding);
    assert_ok(tb_layout_parse(p->layout, &stored));
    assert_ok(tb_view_apply(part->view, &p->shape, stored, &shape, &layout));
    assert_ok(tb_view_bind(part->view, &p->shape, stored, rank, &binding, &t->binding[rank]));
    assert_int_equal(part->text != NULL, part->view != NULL);
    if (t->layout) {
        assert_true(tb_layout_equal(t->layout, layout));
        assert_memory_equal(&t->shape, &shape, sizeof shape);
        tb_layout_destroy(layout);
    } else {
        t->layout = layout;
        t->shape = shape;
    }
    t->has[rank] = true;
    tb_layout_destroy(stored);
}

static void side_init(side *s, const moe_model *model, int which, const moe_cut *cut) {
    *s = (side){.nranks = cut->tp * cut->pp * cut->dp};
    for (int32_t r = 0; r < s->nranks; r++) {
        assert_ok(moe_rank_init(&s->rank[r], model, which, cut, r));
        s->data[r] = calloc(s->rank[r].params.count, sizeof *s->data[r]);
        for (size_t i = 0; i < s->rank[r].parts.count; i++)
            add_part(s, r, &s->rank[r].parts.part[i]);
    }
    s->names = calloc(s->tensors.count, sizeof *s->names);
    for (size_t i = 0; i < s->tensors.count; i++)
        s->names[i] = s->tensors.item[i].name;
}

static void side_fini(side *s) {
    for (int32_t r = 0; r < s->nranks; r++) {
        for (size_t i = 0; i < s->rank[r].params.count; i++)
            free(s->data[r][i]);
        free(s->data[r]);
        moe_rank_fini(&s->rank[r]);
    }
    for (size_t i = 0; i < s->tensors.count; i++)
        tb_layout_destroy(s->tensors.item[i].layout);
    free(s->tensors.item);
    free(s->names);
}

/* Who is in a tensor's mesh has it in its list. */
static void assert_lists(const side *s) {
    for (size_t i = 0; i < s->tensors.count; i++) {
        const tensor *t = &s->tensors.item[i];
        for (int32_t r = 0; r < s->nranks; r++) {
            bool is_inside = tb_layout_index_of(t->layout, r) >= 0;
            if (is_inside && !t->has[r])
                print_error("%s on rank %d\n", t->name, (int)r);
            assert_true(!is_inside || t->has[r]);
        }
    }
}

/* ---- Values ---------------------------------------------------------------------------------------------------- */

static void each_param(side *s, tb_status (*visit)(const moe_rank *, const moe_param *, uint32_t, void *)) {
    for (int32_t r = 0; r < s->nranks; r++) {
        for (size_t i = 0; i < s->rank[r].params.count; i++)
            assert_ok(visit(&s->rank[r], &s->rank[r].params.item[i], 1, s->data[r][i]));
    }
}

static void clear_padding(const side *s, int32_t rank, const tb_part *part) {
    const moe_param *p = &s->rank[rank].params.item[part->param];
    tb_layout *layout;
    tb_binding binding, *boxes;
    size_t nboxes;
    assert_ok(tb_layout_parse(p->layout, &layout));
    bind_param(p, rank, &s->data[rank][part->param], &binding);
    assert_ok(tb_view_padding(part->view, &p->shape, layout, rank, &binding, &boxes, &nboxes));
    for (size_t b = 0; b < nboxes; b++) {
        int64_t n = 1;
        for (int d = 0; d < boxes[b].shape.ndim; d++)
            n *= boxes[b].shape.dim[d];
        for (int64_t i = 0; i < n; i++)
            *(uint16_t *)element_at(&boxes[b], &(tb_box){{0}}, boxes[b].shape.dim, i) = 0;
    }
    free(boxes);
    tb_layout_destroy(layout);
}

static void check_all(const side *s) {
    for (int32_t r = 0; r < s->nranks; r++) {
        for (size_t i = 0; i < s->rank[r].params.count; i++)
            assert_ok(moe_param_check(&s->rank[r], &s->rank[r].params.item[i], 1, s->data[r][i]));
    }
}

/* ---- Cuts ------------------------------------------------------------------------------------------------------ */

static void refit(const moe_cut *trainer, const moe_cut *engine) {
    moe_model model;
    side src, dst;
    tb_match match = {.size = sizeof match};
    assert_ok(moe_model_init(&model, MOE_MIN_BYTES));
    side_init(&src, &model, TOOL_SOURCE, trainer);
    side_init(&dst, &model, TOOL_TARGET, engine);
    assert_lists(&src);
    assert_lists(&dst);
    assert_in_range(src.tensors.count, 190, 220);
    assert_int_equal(dst.tensors.count, src.tensors.count + 1);
    each_param(&src, moe_param_fill);
    each_param(&dst, moe_param_poison);

    tb_match_opts opts = {.size = sizeof opts, .ties = &moe_tie, .nties = 1};
    assert_ok(tb_match_names(src.names, src.tensors.count, dst.names, dst.tensors.count, &opts, &match));
    assert_int_equal(match.nmatched, dst.tensors.count);
    for (size_t i = 0; i < match.nmatched; i++) {
        const tensor *from = &src.tensors.item[match.source[i]], *to = &dst.tensors.item[match.target[i]];
        tb_plan *plan;
        assert_memory_equal(&from->shape, &to->shape, sizeof from->shape);
        assert_ok(tb_plan_create(from->layout, to->layout, &from->shape, TB_BF16, NULL, &plan));
        assert_ok(tb_plan_check(plan));
        move_elements(plan, from->binding, to->binding, dst.nranks);
        tb_plan_destroy(plan);
    }
    tb_match_fini(&match);
    for (int32_t r = 0; r < dst.nranks; r++) {
        for (size_t i = 0; i < dst.rank[r].parts.count; i++)
            clear_padding(&dst, r, &dst.rank[r].parts.part[i]);
    }
    check_all(&dst);
    side_fini(&src);
    side_fini(&dst);
}

#define CUT(tensor, pipeline, data, expert, expert_tensor)                                                             \
    (&(moe_cut){.tp = (tensor), .pp = (pipeline), .dp = (data), .ep = (expert), .etp = (expert_tensor)})

static void test_one_rank(void **state) {
    (void)state;
    refit(CUT(1, 1, 1, 1, 1), CUT(1, 1, 1, 1, 1));
}

static void test_four_ranks(void **state) {
    (void)state;
    refit(CUT(2, 2, 1, 2, 1), CUT(2, 1, 2, 4, 1));
    refit(CUT(2, 2, 1, 2, 1), CUT(1, 1, 4, 4, 1));
    refit(CUT(1, 2, 2, 2, 1), CUT(4, 1, 1, 1, 4)); /* a key head has copies */
    refit(CUT(1, 4, 1, 1, 1), CUT(2, 1, 2, 2, 2)); /* stages of one layer and of two */
    refit(CUT(2, 1, 2, 1, 2), CUT(1, 4, 1, 1, 1));
    refit(CUT(1, 1, 4, 2, 1), CUT(2, 2, 1, 2, 1)); /* the trainer's experts have copies */
}

static void test_more_ranks(void **state) {
    (void)state;
    refit(CUT(2, 3, 2, 2, 2), CUT(8, 1, 1, 4, 2));
    refit(CUT(2, 6, 1, 1, 2), CUT(4, 2, 2, 8, 1));
}

/* Ten slots for eight experts, in no order. */
static void test_redundant_experts(void **state) {
    (void)state;
    static const int64_t maps[2][2 * 5] = {{7, 0, 3, 2, 5, 1, 4, 6, 0, 7}, {1, 0, 3, 2, 4, 5, 6, 7, 4, 2}};
    for (int i = 0; i < 2; i++) {
        moe_cut cut = {.tp = 2, .pp = 1, .dp = 2, .ep = 2, .etp = 2, .map = maps[i], .nslots = 5};
        refit(CUT(2, 2, 1, 2, 1), &cut);
    }
}

static void test_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {MOE_MIN_BYTES, 1 << 20, 3500001, (int64_t)1 << 30};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        moe_model model;
        side s;
        int64_t nbytes = 0;
        assert_ok(moe_model_init(&model, sizes[i]));
        if (i + 1 == sizeof sizes / sizeof *sizes) { /* not in memory */
            assert_in_range(model.hidden, 2000, 2200);
            assert_true(model.vocabulary > 4 * model.hidden);
            continue;
        }
        side_init(&s, &model, TOOL_SOURCE, CUT(1, 1, 1, 1, 1));
        for (size_t k = 0; k < s.tensors.count; k++) {
            int64_t more;
            assert_ok(tb_shape_size(&s.tensors.item[k].shape, TB_BF16, NULL, &more));
            nbytes += more;
        }
        assert_in_range(nbytes, sizes[i] - 4 * model.hidden, sizes[i] + 4 * model.hidden);
        side_fini(&s);
    }
    moe_model model;
    assert_int_equal(moe_model_init(&model, MOE_MIN_BYTES - 1), TB_INVALID);
}

static void test_what_can_not_be(void **state) {
    (void)state;
    moe_model model;
    moe_rank rank;
    assert_ok(moe_model_init(&model, MOE_MIN_BYTES));
    assert_int_equal(moe_rank_init(&rank, &model, TOOL_SOURCE, CUT(4, 1, 1, 1, 1), 0), TB_INVALID);
    assert_string_equal(tb_error_detail(), "2 groups of heads can't be dealt out to tp 4");
    assert_int_equal(moe_rank_init(&rank, &model, TOOL_SOURCE, CUT(2, 2, 1, 4, 1), 0), TB_INVALID);
    assert_int_equal(moe_rank_init(&rank, &model, TOOL_TARGET, CUT(1, 1, 3, 3, 1), 0), TB_INVALID);
    assert_int_equal(moe_rank_init(&rank, &model, TOOL_TARGET, CUT(2, 1, 1, 1, 1), 2), TB_INVALID);
    assert_int_equal(moe_rank_init(&rank, &model, TOOL_TARGET, CUT(2, 0, 1, 1, 1), 0), TB_INVALID);
}

static void test_memory_runs_out(void **state) {
    (void)state;
    moe_model model;
    moe_rank rank;
    assert_ok(moe_model_init(&model, MOE_MIN_BYTES));
    for (int which = 0; which < TOOL_NSIDES; which++) {
        tb_status status = TB_NO_MEMORY;
        for (long n = 0; status != TB_OK; n++) {
            tb__mem_fail_after(n);
            status = moe_rank_init(&rank, &model, which, CUT(1, 6, 1, 1, 1), 0);
            tb__mem_fail_after(-1);
            assert_true(status == TB_OK || status == TB_NO_MEMORY);
        }
        moe_rank_fini(&rank);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_rank),        cmocka_unit_test(test_four_ranks),
        cmocka_unit_test(test_more_ranks),      cmocka_unit_test(test_redundant_experts),
        cmocka_unit_test(test_sizes),           cmocka_unit_test(test_what_can_not_be),
        cmocka_unit_test(test_memory_runs_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
