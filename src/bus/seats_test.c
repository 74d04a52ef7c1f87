/* Pairs without layouts: seat i sends to seat i, and each seat has tensors of its own, of any shapes. */
#include "bus/bus_test.h"

#include "base/index.h"

enum { SEATS = 3, MOST_TENSORS = 6, MOST_DIM = 6, ROUNDS = 12 };

/* A tensor of a seat. The seats of the same number draw the same. */
typedef struct own_tensor {
    char name[16], tied[16]; /* its name in group a, and in group b */
    int ndim;
    int64_t shape[3];
    size_t count;
    bool is_extra; /* only group a has it */
    uint32_t *data;
} own_tensor;

static uint64_t draw(uint64_t *state, uint64_t n) {
    *state = tb__hash(*state, 1);
    return *state % n;
}

static size_t draw_tensors(int round, int32_t seat, own_tensor out[MOST_TENSORS]) {
    uint64_t state = tb__hash((uint64_t)round + 77, (uint64_t)seat);
    size_t n = (size_t)draw(&state, MOST_TENSORS + 1);
    for (size_t i = 0; i < n; i++) {
        own_tensor t = {.ndim = (int)draw(&state, 4), .count = 1, .is_extra = draw(&state, 5) == 0};
        for (int d = 0; d < t.ndim; d++) {
            t.shape[d] = (int64_t)draw(&state, MOST_DIM);
            t.count *= (size_t)t.shape[d];
        }
        bool is_tied = !t.is_extra && i == 1;
        snprintf(t.name, sizeof t.name, t.is_extra ? (i % 2 ? "extra%zu" : "more%zu") : "w%zu", i);
        snprintf(t.tied, sizeof t.tied, is_tied ? "head" : "%s", t.name);
        out[i] = t;
    }
    return n;
}

static uint32_t value_of(const rank *r, size_t tensor, size_t i, int round) {
    return (uint32_t)(((size_t)round * SEATS + (size_t)r->index) << 20 | tensor << 16 | i);
}

static void exchange_own(rank *r, own_tensor *tensors, size_t n, tb_batch *batch, bool is_send, int round) {
    tb_transfer *t = NULL;
    for (size_t k = 0; k < n; k++) {
        for (size_t i = 0; tensors[k].data && i < tensors[k].count; i++)
            tensors[k].data[i] = is_send ? value_of(r, k, i, round) : POISON;
    }
    meet(r);
    check_ok((is_send ? tb_send : tb_recv)(batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    for (size_t k = 0; k < n && !is_send; k++) {
        for (size_t i = 0; tensors[k].data && i < tensors[k].count; i++)
            check(tensors[k].data[i] == (tensors[k].is_extra ? POISON : value_of(r, k, i, round)));
        check(!tensors[k].data || tensors[k].data[tensors[k].count] == ~POISON); /* nothing past its end */
    }
}

static void own_tensors(rank *r) {
    static const tb_tie tie = {"head", "w1"};
    static const char *const ignored[] = {"extra*", "^more[0-9]$"};
    tb_batch_opts opts = {.size = sizeof opts, .ties = &tie, .nties = 1, .ignored = ignored, .nignored = 2};
    tb_pair *pair;
    check_ok(tb_pair_create(r->world, "p", other_group(r), NULL, NULL, &pair));
    for (int round = 0; round < ROUNDS; round++) {
        own_tensor tensors[MOST_TENSORS];
        size_t n = draw_tensors(round, r->index, tensors);
        tb_batch *batch;
        opts.bucket_size = round % 2;
        check_ok(tb_batch_create(r->world, "step", &opts, &batch));
        check_ok(tb_batch_add_pair(batch, pair));
        for (size_t k = 0; k < n; k++) {
            if (!is_a(r) && tensors[k].is_extra)
                continue;
            tensors[k].data = malloc((tensors[k].count + 1) * sizeof *tensors[k].data);
            check(tensors[k].data);
            tensors[k].data[tensors[k].count] = ~POISON;
            tb_tensor t = {.size = sizeof t, .data = tensors[k].data, .dtype = TB_U32, .ndim = tensors[k].ndim};
            memcpy(t.shape, tensors[k].shape, sizeof tensors[k].shape);
            check_ok(tb_batch_add(batch, pair, is_a(r) ? tensors[k].name : tensors[k].tied, &t));
        }
        check_ok(tb_batch_register(batch, 0));
        exchange_own(r, tensors, n, batch, is_a(r), 2 * round);
        exchange_own(r, tensors, n, batch, !is_a(r), 2 * round + 1);
        meet(r);
        tb_batch_destroy(batch);
        for (size_t k = 0; k < n; k++)
            free(tensors[k].data);
        meet(r);
    }
    tb_pair_destroy(pair);
}

static void test_seats_send_to_seats(void **state) {
    (void)state;
    run_ranks(own_tensors, SEATS, SEATS, NULL);
}

/* A seat's tensor has the same shape on the other side; those of other seats do not matter. */
static void other_shape(rank *r) {
    uint32_t data[8] = {0};
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), NULL, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 1, .shape = {4 + r->index}};
    if (!is_a(r) && r->index == 1)
        t.shape[0] = 4;
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_fails(tb_batch_register(batch, 0), TB_CONFLICT,
                "tensor 'w@1' has shape [5] in group 'a' but [4] in group 'b'");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_another_shape_is_refused(void **state) {
    (void)state;
    run_ranks(other_shape, 2, 2, NULL);
}

static void other_size(rank *r) {
    tb_pair *pair = NULL;
    check_fails(tb_pair_create(r->world, "p", other_group(r), NULL, NULL, &pair), TB_CONFLICT,
                "pair 'p' has no layouts, so that seat i sends to seat i, but group 'a' has 2 ranks and group 'b' 3");
    meet(r);
    check(!pair);
}

static void test_groups_of_other_sizes_are_refused(void **state) {
    (void)state;
    run_ranks(other_size, 2, 3, NULL);
}

/* All see it, whoever comes first; the pair can be made once both agree. */
static void one_layout(rank *r) {
    tb_pair *pair = NULL;
    for (int round = 0; round < ROUNDS; round++) {
        bool has_layout = is_a(r) == (round % 2);
        meet(r);
        check_fails(tb_pair_create(r->world, "p", other_group(r), has_layout ? "mesh=2 place=S0" : NULL, NULL, &pair),
                    TB_CONFLICT,
                    round % 2 ? "pair 'p': group 'b' has made it without a layout, and group 'a' with one"
                              : "pair 'p': group 'a' has made it without a layout, and group 'b' with one");
        meet(r);
        check_ok(tb_pair_create(r->world, "p", other_group(r), NULL, NULL, &pair));
        meet(r);
        tb_pair_destroy(pair);
        pair = NULL;
        meet(r);
        check_fails(tb_pair_create(r->world, "p", other_group(r), is_a(r) && r->index == 1 ? "mesh=2 place=S0" : NULL,
                                   NULL, &pair),
                    TB_CONFLICT, "pair 'p': a 0 has layout 'none', but a 1 'mesh=2 place=Shard(0)'");
    }
}

static void test_a_layout_on_one_side_is_refused(void **state) {
    (void)state;
    run_ranks(one_layout, 2, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seats_send_to_seats),
        cmocka_unit_test(test_another_shape_is_refused),
        cmocka_unit_test(test_groups_of_other_sizes_are_refused),
        cmocka_unit_test(test_a_layout_on_one_side_is_refused),
    };
    return cmocka_run_group_tests_name("seats", tests, NULL, NULL);
}
