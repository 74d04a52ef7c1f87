/* Source and target in one allocation, and how much memory a transfer may use. Every rank is in both groups: it sends
 * as one and receives as the other. */
#include "bus/bus_test.h"
#include "bus/exchange.h"
#include "flow/flow_inside.h"

enum { SIDE = 48, NRANKS = 4 }; /* a square matrix: all parts have the same size */

typedef struct way {
    const char *layout_a, *layout_b;
    bool staged;
    int64_t shift; /* of the target from the source, in elements; beyond the part: apart */
    int64_t staging_bytes;
    bool is_refused;
} way;

/* What a rank in both groups makes: the pair from each side, and a batch with the matrix in both. */
static void set_up_both(rank *r, const way *w, tb_pair **pairs, tb_batch **batch) {
    tb_pair_opts a = {.size = sizeof a, .group = "a", .no_wait = true}, b = {.size = sizeof b, .group = "b"};
    check_ok(tb_world_enter(r->world, "b", r->index, r->size));
    check_ok(tb_pair_create(r->world, "p", "b", w->layout_a, &a, &pairs[0]));
    check_ok(tb_pair_create(r->world, "p", "a", w->layout_b, &b, &pairs[1]));
    tb_batch_opts opts = {
        .size = sizeof opts, .staged = w->staged, .bucket_size = 1024, .staging_bytes = w->staging_bytes};
    check_ok(tb_batch_create(r->world, "step", &opts, batch));
}

static void reshard(rank *r) {
    const way *w = r->scene->shared;
    tb_pair *pairs[2];
    tb_batch *batch;
    part from, to;
    set_up_both(r, w, pairs, &batch);
    part_init(&from, w->layout_a, r->index, SIDE, SIDE);
    part_init(&to, w->layout_b, r->index, SIDE, SIDE);
    uint32_t *memory;
    size_t room = from.count + (size_t)w->shift + to.count;
    check((memory = tensor_alloc(room * sizeof *memory)));
    uint32_t *homes[2] = {from.data, to.data};
    from.data = memory;
    to.data = memory + w->shift;
    tb_tensor source = part_tensor(&from), target = part_tensor(&to);
    check_ok(tb_batch_add(batch, pairs[0], "w", &source));
    check_ok(tb_batch_add(batch, pairs[1], "w", &target));
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *send, *recv;
        for (size_t i = 0; i < room; i++)
            ((uint32_t *)tensor_bytes(memory))[i] = POISON;
        part_fill(&from, version);
        meet(r); /* nobody may send into what is being filled */
        check_ok(tb_send(batch, NULL, &send));
        check_ok(tb_recv(batch, NULL, &recv));
        check_ok(tb_wait(recv, TB_ARRIVED, -1));
        check(part_holds(&to, version));
        check_ok(tb_wait(send, TB_COMMITTED, -1));
        tb_transfer_destroy(send);
        tb_transfer_destroy(recv);
        meet(r);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
    from.data = homes[0];
    to.data = homes[1];
    part_fini(&from);
    part_fini(&to);
    tensor_free(memory);
}

#define ROWS    "mesh=4 place=Shard(0)"
#define COLUMNS "mesh=4 place=Shard(1)"
#define TURNED  "mesh=4 place=Shard(0) ranks=1,2,3,0"

static void test_one_buffer_for_source_and_target(void **state) {
    (void)state;
    const way ways[] = {
        {ROWS, COLUMNS, .shift = 0}, {COLUMNS, ROWS, .shift = 0}, {ROWS, TURNED, .shift = 0},
        {ROWS, COLUMNS, .shift = 5}, {ROWS, ROWS, .shift = 7},    {ROWS, COLUMNS, .shift = SIDE * SIDE},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        way w = ways[i];
        run_ranks(reshard, NRANKS, 0, &w);
        w.staged = true;
        run_ranks(reshard, NRANKS, 0, &w);
    }
}

/* ---- Limits ---------------------------------------------------------------------------------------------------- */

enum { BIG = 1024 }; /* 4 MiB: a MiB per rank, against 64 KiB of staging memory */

static void onto_itself(rank *r) {
    const way *w = r->scene->shared;
    tb_pair *pairs[2];
    tb_batch *batch;
    tb_transfer *send, *recv;
    part from;
    set_up_both(r, w, pairs, &batch);
    part_init(&from, ROWS, r->index, BIG, BIG);
    part_fill(&from, 1);
    tb_tensor tensor = part_tensor(&from);
    check_ok(tb_batch_add(batch, pairs[0], "w", &tensor));
    check_ok(tb_batch_add(batch, pairs[1], "w", &tensor));
    check_ok(tb_send(batch, NULL, &send));
    check_ok(tb_recv(batch, NULL, &recv));
    if (w->is_refused) {
        check_fails(tb_wait(recv, TB_ARRIVED, -1), TB_REFUSED, "bytes aside; its staging_bytes of 65536 leave");
        check_fails(tb_wait(send, TB_RELEASED, -1), TB_REFUSED, "overwrites tensors that are still being read");
    } else {
        check_ok(tb_wait(recv, TB_ARRIVED, -1));
        check_ok(tb_wait(send, TB_RELEASED, -1));
    }
    check(part_holds(&from, 1));
    tb_transfer_destroy(send);
    tb_transfer_destroy(recv);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
    part_fini(&from);
}

static void test_refused_where_staging_memory_is_too_small(void **state) {
    (void)state;
    way w = {ROWS, COLUMNS, .staging_bytes = 64 << 10, .is_refused = true};
    run_ranks(onto_itself, NRANKS, 0, &w);
    w.staged = true;
    run_ranks(onto_itself, NRANKS, 0, &w);
}

/* It could not be put aside, and need not be. */
static void test_what_is_there_already_is_left_alone(void **state) {
    (void)state;
    way w = {ROWS, ROWS, .staging_bytes = 64 << 10};
    run_ranks(onto_itself, NRANKS, 0, &w);
    w.staged = true;
    run_ranks(onto_itself, NRANKS, 0, &w);
}

/* Ten times as much as there is memory for, in plain layouts and with a reduction. */
static void much(rank *r) {
    const way *w = r->scene->shared;
    enum { STAGING = 128 << 10 };
    tb_batch_opts opts = {.size = sizeof opts, .staged = true, .staging_bytes = STAGING};
    setup s;
    set_up(r, &s, w->layout_a, w->layout_b, 1024, 1024, &opts);
    bool is_partial = strstr(w->layout_a, "Partial") != NULL;
    for (uint32_t version = 1; version <= 2; version++) {
        tb_transfer *t = NULL;
        if (is_a(r))
            part_fill(&s.w, version);
        else
            part_poison(&s.w);
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        const tb__flow *flow = s.batch->exchanges.item[0]->flows[0]; /* from a to b */
        check(flow->staged.nbytes_max <= STAGING && flow->staged.nbytes == 0);
        check(flow->staged.nbytes_max > 0 || !is_a(r)); /* receivers may read what is staged where it is */
        for (size_t i = 0; is_partial && !is_a(r) && i < s.w.count; i++)
            check(part_bytes(&s.w)[i] == 2 * part_value(&s.w, i, version));
        check(is_partial || part_holds(&s.w, version));
        tb_transfer_destroy(t);
    }
    tear_down(&s);
}

static void test_staging_memory_is_bounded(void **state) {
    (void)state;
    const way ways[] = {
        {.layout_a = "mesh=2 place=Shard(0)", .layout_b = "mesh=2 place=Shard(1)"},
        {.layout_a = "mesh=2 place=Shard(0)", .layout_b = "mesh=2 place=Replicate"},
        {.layout_a = "mesh=2 place=Partial(sum)", .layout_b = "mesh=2 place=Shard(0)"},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        run_ranks(much, 2, 2, &ways[i]);
}

/* ---- Targets --------------------------------------------------------------------------------------------------- */

static void overlapping_targets(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    uint32_t memory[24] = {0};
    const char *layout = "mesh=1 place=Replicate";
    int64_t overlapping[2] = {3, 1}, crossed[2] = {1, 1}, *strides = r->scene->shared ? crossed : overlapping;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &s.pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
    tb_tensor x = {.size = sizeof x, .data = memory, .dtype = TB_U32, .ndim = 2, .shape = {3, 3}}, y = x;
    y.data = memory + (is_a(r) || r->scene->shared ? 9 : 8);
    if (!is_a(r))
        y.strides = strides;
    check_ok(tb_batch_add(s.batch, s.pair, "x", &x));
    check_ok(tb_batch_add(s.batch, s.pair, "y", &y));
    check_ok(tb_batch_register(s.batch, 0));
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_INVALID,
                r->scene->shared ? "tensor 'y' of batch 'step' has several elements in the same memory"
                                 : "tensors 'x' and 'y' of batch 'step' would be received into the same memory");
    check(strstr(tb_error_detail(), "rank "));
    tb_transfer_destroy(t);
    meet(r);
    tb_batch_destroy(s.batch);
    tb_pair_destroy(s.pair);
}

static void test_overlapping_targets_are_refused_by_name(void **state) {
    (void)state;
    run_ranks(overlapping_targets, 1, 1, NULL);
    run_ranks(overlapping_targets, 1, 1, "crossed");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_buffer_for_source_and_target),
        cmocka_unit_test(test_what_is_there_already_is_left_alone),
        cmocka_unit_test(test_refused_where_staging_memory_is_too_small),
        cmocka_unit_test(test_staging_memory_is_bounded),
        cmocka_unit_test(test_overlapping_targets_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
