/* Batches: what can be added, and on what both sides must agree. */
#include "bus/bus_test.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"
#define ALONE   "mesh=1 place=Replicate"

static void make_pair(rank *r, const char *layout, tb_pair **out) {
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, out));
}

/* ---- Adding ---------------------------------------------------------------------------------------------------- */

static void add_mistakes(rank *r) {
    tb_pair *pair;
    tb_batch *batch = NULL;
    uint32_t data[16] = {0};
    int64_t strides[2] = {INT64_MAX / 2, 1};
    tb_tensor good = {.size = sizeof good, .data = data, .dtype = TB_U32, .ndim = 2, .shape = {4, 4}}, t;
    make_pair(r, ROWS, &pair);
    tb_batch_opts negative = {.size = sizeof negative, .bucket_size = -1},
                  small = {.size = sizeof small, .staging_bytes = 1000};
    check_fails(tb_batch_create(r->world, "", NULL, &batch), TB_INVALID, "a batch needs a name");
    check_fails(tb_batch_create(r->world, "step", &negative, &batch), TB_INVALID, "can't be negative");
    check_fails(tb_batch_create(r->world, "step", &small, &batch), TB_INVALID, "at least 65536");
    check(!batch);
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    check_fails(tb_batch_register(batch, 0), TB_INVALID, "batch 'step' has no tensors");
    check_fails(tb_batch_add(batch, pair, NULL, &good), TB_INVALID, "a tensor needs a name");
    t = good;
    t.size = 0;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "tensor 'x': a tb_tensor has size 0");
    struct {
        tb_tensor known;
        int64_t unknown;
    } newer = {.known = good, .unknown = 1};
    newer.known.size = sizeof newer;
    check_fails(tb_batch_add(batch, pair, "x", &newer.known), TB_REFUSED, "sets a field that tensorbus");
    t = good;
    t.ndim = 9;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "tensor 'x'");
    t = good;
    t.dtype = TB_DTYPE_COUNT;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "tensor 'x'");
    t = good;
    t.wire_dtype = TB_DTYPE_COUNT;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "which is not a dtype");
    t = good;
    t.shape[0] = -1;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "tensor 'x'");
    t = good;
    t.data = NULL;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "its data is NULL, but this rank holds 8 elements");
    t = good;
    t.layout = "mesh=3 place=R";
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "names rank 2 of group");
    t.layout = "nonsense";
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "tensor 'x'");
    t = good;
    t.group = UINT32_MAX;
    check_fails(tb_batch_add(batch, pair, "x", &t), TB_INVALID, "groups go up to");
    t = good;
    t.strides = strides;
    check(tb_batch_add(batch, pair, "x", &t) != TB_OK && strstr(tb_error_detail(), "tensor 'x'"));
    check_ok(tb_batch_add(batch, pair, "x", &good));
    check_ok(tb_batch_add(batch, pair, "x", &good));
    check_fails(tb_batch_register(batch, 0), TB_INVALID, "tensor 'x' is in batch 'step' twice");
    tb_batch_destroy(batch);
    tb_batch_destroy(NULL);
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    check_ok(tb_batch_add(batch, pair, "x", &good));
    check_ok(tb_batch_register(batch, 0));
    check_ok(tb_batch_register(batch, 0)); /* it is */
    check_fails(tb_batch_add(batch, pair, "y", &good), TB_REFUSED, "batch 'step' has been registered");
    tb_batch *again;
    check_ok(tb_batch_create(r->world, "step", NULL, &again));
    check_ok(tb_batch_add(again, pair, "x", &good));
    check_fails(tb_batch_register(again, 0), TB_CONFLICT, "there is a batch 'step' of pair 'p' already");
    tb_batch_destroy(again);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_what_can_not_be_added(void **state) {
    (void)state;
    run_ranks(add_mistakes, 2, 2, NULL);
}

/* ---- Agreement ------------------------------------------------------------------------------------------------- */

/* What a 1 does differently from everybody else, or all of a, and what is said of it. */
typedef struct difference {
    const char *words;
    tb_status status;
    bool whole_side, extra, lacking, longer, other_group, other_bucket;
    tb_dtype dtype;
} difference;

static void differ(rank *r) {
    const difference *d = r->scene->shared;
    bool is_odd = is_a(r) && (d->whole_side || r->index == 1);
    tb_pair *pair;
    tb_batch *batch;
    uint64_t data[64] = {0};
    make_pair(r, ROWS, &pair);
    for (int round = 0; round < 2; round++) { /* the second time all are of one mind */
        tb_batch_opts opts = {.size = sizeof opts, .bucket_size = is_odd && d->other_bucket ? 4096 : 8192};
        tb_tensor t = {.size = sizeof t,
                       .data = data,
                       .dtype = is_odd && d->dtype ? d->dtype : TB_U32,
                       .ndim = 2,
                       .shape = {4, 4}};
        t.group = is_odd && d->other_group;
        t.shape[1] += is_odd && d->longer;
        check_ok(tb_batch_create(r->world, "step", &opts, &batch));
        check_ok(tb_batch_add(batch, pair, "x", &t));
        if (!(is_odd && d->lacking))
            check_ok(tb_batch_add(batch, pair, "y", &t));
        if (is_odd && d->extra)
            check_ok(tb_batch_add(batch, pair, "z", &t));
        if (round == 0)
            check_fails(tb_batch_register(batch, 0), d->status, d->words);
        else
            check_ok(tb_batch_register(batch, 0)); /* whoever comes first */
        meet(r);
        tb_batch_destroy(batch);
        is_odd = false;
    }
    tb_pair_destroy(pair);
}

static void test_disagreement_is_found_by_all(void **state) {
    (void)state;
    const difference ways[] = {
        {.words = "(a 0) has not", .status = TB_CONFLICT, .extra = true},
        {.words = "tensor 'y' was not added to batch 'step' by all ranks that hold a part of it: rank",
         .status = TB_CONFLICT,
         .lacking = true},
        {.words = "describe tensor 'x' of batch 'step' differently: shape [4,4] and [4,5]",
         .status = TB_CONFLICT,
         .longer = true},
        {.words = "differently: dtype u32 and i32", .status = TB_CONFLICT, .dtype = TB_I32},
        {.words = "differently: group 0 and 1", .status = TB_CONFLICT, .other_group = true},
        {.words = "have different bucket sizes for batch 'step'", .status = TB_CONFLICT, .other_bucket = true},
        {.words = "batch 'step': unmatched parameters: 1 only in group 'a' ('z')",
         .status = TB_CONFLICT,
         .extra = true,
         .whole_side = true},
        {.words = "batch 'step': unmatched parameters: 1 only in group 'b' ('y')",
         .status = TB_CONFLICT,
         .lacking = true,
         .whole_side = true},
        {.words = "tensor 'x' has shape [4,5] in group 'a' but [4,4] in group 'b'",
         .status = TB_CONFLICT,
         .longer = true,
         .whole_side = true},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_ranks(differ, 2, 2, &ways[i]);
}

/* b 0 fails at once, by the manifests that came before it, so a 0 never gets the manifest of b 0. Then one of the sides
 * destroys the batch and registers it again before the other has. */
static void register_again(rank *r) {
    bool is_first = is_a(r) == (strcmp(r->scene->shared, "a") == 0);
    tb_pair *pair;
    tb_batch *batch;
    uint32_t data[64] = {0};
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 2, .shape = {4, 4}};
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = is_a(r) && r->index == 1 ? 4096 : 8192};
    make_pair(r, is_a(r) ? ROWS : ALONE, &pair);
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    check_ok(tb_batch_add(batch, pair, "x", &t));
    if (!is_a(r))
        meet(r);
    check_fails(tb_batch_register(batch, 0), TB_CONFLICT, "have different bucket sizes");
    if (is_a(r))
        meet(r);
    else
        tb_batch_destroy(batch);
    meet(r);
    if (!is_first)
        tb__sleep_ms(100); /* until the other side has sent its manifests */
    if (is_a(r))
        tb_batch_destroy(batch);
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    check_ok(tb_batch_add(batch, pair, "x", &t));
    check_ok(tb_batch_register(batch, 0));
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

/* In the manual world of b 0, its first manifest is delivered while it registers the second time: to itself only. */
static void test_one_side_registers_again_first(void **state) {
    (void)state;
    const char *first[] = {"a", "b"};
    for (int i = 0; i < 4; i++) {
        scene s;
        scene_init(&s);
        s.is_b_manual = i >= 2;
        run_ranks_in(&s, register_again, 2, 1, first[i % 2]);
    }
}

static void missing_rank(rank *r) {
    setup s;
    make_pair(r, ROWS, &s.pair);
    part_init(&s.w, ROWS, r->index, 8, 8);
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    if (is_a(r) && r->index == 1) {
        meet(r);
    } else {
        check_fails(tb_batch_register(s.batch, 50), TB_TIMEOUT, "has not registered batch 'step' of pair 'p'");
        tb_transfer *t = NULL;
        check_fails((is_a(r) ? tb_send : tb_recv)(
                        s.batch, &(tb_transfer_opts){.size = sizeof(tb_transfer_opts), .timeout_ms = 50}, &t),
                    TB_TIMEOUT, "of 4 ranks have)");
        meet(r);
    }
    exchange(r, &s, "a", 1); /* waiting goes on where it ended */
    tear_down(&s);
}

static void test_timeout_names_who_is_missing(void **state) {
    (void)state;
    run_ranks(missing_rank, 2, 2, NULL);
}

/* The two sides call it by different names: each is told what the other one calls it. */
static void other_name(rank *r) {
    setup s;
    const char *others = is_a(r) ? "of pair 'p' (1 of 2 ranks have); it has registered 'theirs'"
                                 : "of pair 'p' (1 of 2 ranks have); it has registered 'ours'";
    int64_t deadline_ms = tb__now_ms() + 60000;
    make_pair(r, "mesh=1 place=R", &s.pair);
    part_init(&s.w, "mesh=1 place=R", r->index, 8, 8);
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_create(r->world, is_a(r) ? "ours" : "theirs", NULL, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    do
        check_fails(tb_batch_register(s.batch, 50), TB_TIMEOUT, "has not registered batch");
    while (!strstr(tb_error_detail(), others) && tb__now_ms() < deadline_ms); /* it may register later than this rank */
    check_fails(tb_batch_register(s.batch, 50), TB_TIMEOUT, others);
    meet(r);
    tear_down(&s);
}

static void test_timeout_tells_what_the_peer_has_registered(void **state) {
    (void)state;
    run_ranks(other_name, 1, 1, NULL);
}

/* ---- Casts ----------------------------------------------------------------------------------------------------- */

typedef struct cast {
    tb_dtype from, to, wire;
    const char *refusal; /* NULL: it works */
} cast;

static void convert(rank *r) {
    const cast *c = r->scene->shared;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *t = NULL;
    float wide[16] = {0};
    uint16_t narrow[32] = {0}; /* bf16 is the upper half of f32 */
    tb_dtype dtype = is_a(r) ? c->from : c->to;
    void *data = dtype == TB_F32 ? (void *)wide : (void *)narrow;
    for (int i = 0; is_a(r) && i < 16; i++) {
        wide[i] = (float)i - 4.5F;
        uint32_t bits;
        memcpy(&bits, &wide[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
    make_pair(r, ALONE, &pair);
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    tb_tensor tensor = {.size = sizeof tensor,
                        .data = data,
                        .dtype = dtype,
                        .ndim = 1,
                        .shape = {16},
                        .wire_dtype = is_a(r) ? c->wire : 0};
    check_ok(tb_batch_add(batch, pair, "x", &tensor));
    check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
    if (c->refusal) {
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_REFUSED, c->refusal);
    } else {
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        for (int i = 0; i < 16; i++) {
            float value = wide[i];
            uint32_t bits = (uint32_t)narrow[i] << 16;
            if (dtype == TB_BF16)
                memcpy(&value, &bits, sizeof value);
            check(value == (float)i - 4.5F);
        }
    }
    tb_transfer_destroy(t);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_dtypes_may_differ(void **state) {
    (void)state;
    const cast casts[] = {
        {TB_F32, TB_BF16, TB_DTYPE_NONE, NULL},    {TB_BF16, TB_F32, TB_DTYPE_NONE, NULL},
        {TB_F32, TB_F32, TB_BF16, NULL},           /* small halves survive it */
        {TB_F32, TB_F8E4M3, TB_DTYPE_NONE, "'x'"}, /* the scale would be lost */
        {TB_F32, TB_U32, TB_DTYPE_NONE, "'x'"},
    };
    for (size_t i = 0; i < sizeof casts / sizeof *casts; i++)
        run_ranks(convert, 1, 1, &casts[i]);
}

/* ---- Several pairs --------------------------------------------------------------------------------------------- */

/* Pipeline stages: "a" has two ranks, "b" three, and a 1 talks to "c", which is b 2 alone, as well. */
static void two_pairs(rank *r) {
    tb_pair *first, *second = NULL;
    tb_batch *batch;
    tb_transfer *t = NULL;
    part x, y;
    bool is_in_second = is_a(r) ? r->index == 1 : r->index == 2;
    if (is_in_second)
        check_ok(tb_world_enter(r->world, is_a(r) ? "late a" : "late b", 0, 1));
    make_pair(r, is_a(r) ? ROWS : "mesh=3 place=Shard(1)", &first);
    part_init(&x, is_a(r) ? ROWS : "mesh=3 place=Shard(1)", r->index, 12, 9);
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    tb_tensor tensor = part_tensor(&x);
    check_ok(tb_batch_add(batch, first, "x", &tensor));
    if (is_in_second) {
        tb_pair_opts opts = {.size = sizeof opts, .group = is_a(r) ? "late a" : "late b"};
        check_ok(tb_pair_create(r->world, "q", is_a(r) ? "late b" : "late a", ALONE, &opts, &second));
        part_init(&y, ALONE, 0, 5, 5);
        tensor = part_tensor(&y);
        check_ok(tb_batch_add(batch, second, "y", &tensor));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        if (is_a(r))
            part_fill(&x, version);
        if (is_a(r) && second)
            part_fill(&y, version + 10);
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        check(part_holds(&x, version) && (!second || part_holds(&y, version + 10)));
        tb_transfer_destroy(t);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(first);
    tb_pair_destroy(second);
    part_fini(&x);
    if (second)
        part_fini(&y);
}

static void test_pairs_with_different_ranks(void **state) {
    (void)state;
    run_ranks(two_pairs, 2, 3, NULL);
}

/* ---- Life ------------------------------------------------------------------------------------------------------ */

static void again_and_again(rank *r) {
    setup s;
    make_pair(r, is_a(r) ? ROWS : COLUMNS, &s.pair);
    part_init(&s.w, is_a(r) ? ROWS : COLUMNS, r->index, 20, 20);
    for (uint32_t round = 1; round <= 20; round++) { /* nobody waits for anybody: some are a round ahead */
        tb_tensor w = part_tensor(&s.w);
        check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
        check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
        exchange(r, &s, round % 2 ? "a" : "b", round);
        tb_batch_destroy(s.batch);
    }
    tb_pair_destroy(s.pair);
    part_fini(&s.w);
}

static void test_a_name_can_be_used_again(void **state) {
    (void)state;
    run_ranks(again_and_again, 2, 2, NULL);
}

/* b 0 is served and goes; b 1 is served after that. What needs b 0 again fails, by its name. With a second pair, b 0
 * has also chosen the version for b 1. */
static void leave_early(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_pair *second = NULL;
    part x;
    set_up(r, &s, ALONE, "mesh=2 place=Replicate", 64, 64, NULL);
    if (r->scene->shared) {
        const char *layout = is_a(r) ? ALONE : "mesh=2 place=Shard(0)";
        check_ok(tb_pair_create(r->world, "q", other_group(r), layout, NULL, &second));
        part_init(&x, layout, r->index, 6, 6);
        tb_tensor tensor = part_tensor(&x);
        check_ok(tb_batch_add(s.batch, second, "x", &tensor));
    }
    exchange(r, &s, "a", 1);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        check_ok(tb_send(s.batch, NULL, &t));
        meet(r);
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        check_ok(tb_send(s.batch, NULL, &t));
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_LOST, "(b 0) has given up batch 'step'");
        tb_transfer_destroy(t);
    } else if (r->index == 0) {
        exchange(r, &s, "a", 2);
        tb_batch_destroy(s.batch);
        s.batch = NULL;
        meet(r);
    } else {
        meet(r);
        exchange(r, &s, "a", 2);
        check_ok(tb_recv(s.batch, NULL, &t));
        check_fails(tb_wait(t, TB_ARRIVED, -1), TB_LOST, "has given up batch 'step'");
        tb_transfer_destroy(t);
    }
    meet(r);
    tear_down(&s);
    tb_pair_destroy(second);
    if (second)
        part_fini(&x);
}

static void test_who_is_not_needed_may_go(void **state) {
    (void)state;
    run_ranks(leave_early, 1, 2, NULL);
    run_ranks(leave_early, 1, 2, "two pairs");
}

/* A sender does its part of a version and destroys its batch before the other one begins. Nobody is lost by that. */
static void leave_before_others_begin(rank *r) {
    setup s;
    tb_transfer_opts opts = {.size = sizeof opts, .skip_lost = true};
    tb_transfer *t = NULL;
    bool is_early = is_a(r) && r->index == 0, is_late = is_a(r) && r->index == 1;
    set_up(r, &s, "mesh=2 place=Shard(0)", "mesh=1 place=Replicate", 16, 8, NULL);
    exchange(r, &s, "a", 1);
    if (is_a(r))
        part_fill(&s.w, 2);
    else
        part_poison(&s.w);
    if (!is_late)
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    if (is_early) {
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        tb_transfer_destroy(t);
        tear_down(&s);
    }
    meet(r);
    if (is_early)
        return;
    if (is_late) {
        usleep(SOON_MS * 1000); /* until it has heard of that */
        check_ok(tb_send(s.batch, &opts, &t));
    }
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 2));
    tb_transfer_destroy(t);
    tear_down(&s);
}

static void test_leave_before_others_begin(void **state) {
    (void)state;
    run_ranks(leave_before_others_begin, 2, 1, NULL);
}

/* The plan of the next transfer, before and after one: what tb_ir_create makes of the layouts. */
static void plan_as_data(rank *r) {
    static int32_t ranks[4];
    setup s = {0};
    tb_ir *ir, *wanted, *none = NULL;
    tb_layout *layouts[2];
    char *got, *expected, text[2][80];
    tb_batch *batch;
    check_ok(tb_batch_create(r->world, "other", NULL, &batch));
    check_fails(tb_batch_ir(batch, true, &none), TB_REFUSED, "batch 'other' has not been registered yet");
    tb_batch_destroy(batch);
    ranks[is_a(r) ? r->index : 2 + r->index] = tb_world_rank(r->world);
    meet(r);
    snprintf(text[0], sizeof text[0], ROWS " ranks=%d,%d", (int)ranks[0], (int)ranks[1]);
    snprintf(text[1], sizeof text[1], COLUMNS " ranks=%d,%d", (int)ranks[2], (int)ranks[3]);
    for (int i = 0; i < 2; i++)
        check_ok(tb_layout_parse(text[i], &layouts[i]));
    set_up(r, &s, ROWS, COLUMNS, 40, 40, &(tb_batch_opts){.size = sizeof(tb_batch_opts), .bucket_size = 1000});
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "w",
                           .shape = {2, {40, 40}},
                           .src = layouts[0],
                           .dst = layouts[1],
                           .src_dtype = TB_U32,
                           .dst_dtype = TB_U32};
    check_ok(tb_ir_create(tb_world_rank(r->world), &spec, 1, NULL,
                          &(tb_ir_opts){.size = sizeof(tb_ir_opts), .bucket_size = 1000}, &wanted));
    check(wanted->nchunks == 2);
    check_ok(tb_ir_dump_json(wanted, &expected));
    for (uint32_t version = 1; version <= 2; version++) {
        check_ok(tb_batch_ir(s.batch, is_a(r), &ir));
        check_ok(tb_ir_dump_json(ir, &got));
        tb_ir_destroy(ir);
        check(strcmp(got, expected) == 0);
        free(got);
        exchange(r, &s, "a", version);
    }
    free(expected);
    tb_ir_destroy(wanted);
    meet(r);
    tear_down(&s);
    for (int i = 0; i < 2; i++)
        tb_layout_destroy(layouts[i]);
}

static void test_plan_as_data(void **state) {
    (void)state;
    run_ranks(plan_as_data, 2, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_can_not_be_added),
        cmocka_unit_test(test_disagreement_is_found_by_all),
        cmocka_unit_test(test_one_side_registers_again_first),
        cmocka_unit_test(test_timeout_names_who_is_missing),
        cmocka_unit_test(test_timeout_tells_what_the_peer_has_registered),
        cmocka_unit_test(test_dtypes_may_differ),
        cmocka_unit_test(test_pairs_with_different_ranks),
        cmocka_unit_test(test_a_name_can_be_used_again),
        cmocka_unit_test(test_plan_as_data),
        cmocka_unit_test(test_who_is_not_needed_may_go),
        cmocka_unit_test(test_leave_before_others_begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
