/* Batches of views: tensors that are stored in another form than they travel, and what becomes of their padding. */
#include "bus/bus_test.h"

#include <inttypes.h>

enum { WIDTH = 4, STRIDE = 6, MOST_ROWS = 64 };

/* Rows of a rank's storage, with one before and one after, and columns that belong to somebody else. */
typedef struct rows {
    int64_t first, count; /* of all ranks' rows */
    uint32_t cell[(MOST_ROWS + 2) * STRIDE];
} rows;

static uint32_t *cell(rows *s, int64_t row, int64_t column) {
    return &s->cell[(row + 1) * STRIDE + column];
}

static void poison(rows *s) {
    for (size_t i = 0; i < sizeof s->cell / sizeof *s->cell; i++)
        s->cell[i] = POISON;
}

/* Whatever is not one of the rank's cells is as it was. */
static bool neighbours_are_poison(rows *s) {
    for (int64_t row = -1; row <= MOST_ROWS; row++) {
        for (int64_t column = 0; column < STRIDE; column++) {
            bool is_ours = row >= 0 && row < s->count && column < WIDTH;
            if (!is_ours && *cell(s, row, column) != POISON)
                return false;
        }
    }
    return true;
}

static void rows_init(rows *s, int64_t total, int32_t seat, int32_t size) {
    int64_t each = (total + size - 1) / size;
    s->first = seat * each < total ? seat * each : total;
    s->count = total - s->first < each ? total - s->first : each;
    check(s->count <= MOST_ROWS);
    poison(s);
}

static void add(tb_batch *batch, tb_pair *pair, const char *name, rows *s, int64_t total, const char *view) {
    const int64_t strides[2] = {STRIDE, 1};
    tb_tensor t = {.size = sizeof t,
                   .data = cell(s, 0, 0),
                   .dtype = TB_U32,
                   .ndim = 2,
                   .shape = {total, WIDTH},
                   .strides = strides};
    t.view = view;
    check_ok(tb_batch_add(batch, pair, name, &t));
}

static void move(rank *r, tb_batch *batch, const char *from) {
    tb_transfer *t = NULL;
    check_ok((strcmp(r->group, from) == 0 ? tb_send : tb_recv)(batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
}

/* ---- Padding --------------------------------------------------------------------------------------------------- */

/* A vocabulary of ten rows, which one side pads to 16, of which some ranks have nothing else, and the other in front,
 * to 12. */
enum { VOCABULARY = 10, PADDED_A = 16, PADDED_B = 12, BEFORE_B = 1 };

static uint32_t word(int64_t row, int64_t column, uint32_t version) {
    return version * 1000 + (uint32_t)(row * WIDTH + column) + 1;
}

static void fill(rows *s, int64_t before, uint32_t version) {
    poison(s);
    for (int64_t i = 0; i < s->count; i++) {
        int64_t row = s->first + i - before;
        for (int64_t c = 0; c < WIDTH && row >= 0 && row < VOCABULARY; c++)
            *cell(s, i, c) = word(row, c, version);
    }
}

static bool holds(rows *s, int64_t before, uint32_t version, uint32_t padding) {
    bool is_good = neighbours_are_poison(s);
    for (int64_t i = 0; i < s->count; i++) {
        int64_t row = s->first + i - before;
        for (int64_t c = 0; c < WIDTH; c++) {
            uint32_t wanted = row >= 0 && row < VOCABULARY ? word(row, c, version) : padding;
            is_good &= *cell(s, i, c) == wanted;
        }
    }
    return is_good;
}

static void pad(rank *r) {
    const bool *staged = r->scene->shared;
    tb_pair *pair;
    tb_batch *batch;
    rows *s = malloc(sizeof *s);
    int64_t total = is_a(r) ? PADDED_A : PADDED_B, before = is_a(r) ? 0 : BEFORE_B;
    tb_batch_opts opts = {.size = sizeof opts, .staged = *staged};
    check(s);
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? "mesh=4 place=Shard(0)" : "mesh=3 place=Shard(0)",
                            NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    rows_init(s, total, r->index, r->size);
    add(batch, pair, "embedding", s, total, is_a(r) ? "pad(0, 0, 6)" : "pad(0, 1, 1)");
    for (uint32_t version = 1; version <= 4; version++) {
        const char *from = version % 2 ? "a" : "b";
        bool is_send = strcmp(r->group, from) == 0;
        if (is_send)
            fill(s, before, version);
        else
            poison(s);
        move(r, batch, from);
        check(holds(s, before, version, is_send ? POISON : 0));
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    free(s);
}

static void test_padding_differs_and_becomes_zero(void **state) {
    (void)state;
    for (int staged = 0; staged < 2; staged++)
        run_ranks(pad, 4, 3, &(const bool){staged});
}

/* The process is both sides. What it receives has its padding where something is sent from. */
static void pad_over_source(rank *r) {
    tb_pair *a, *b;
    tb_batch *batch;
    tb_transfer *send = NULL, *receive = NULL;
    uint32_t memory[10];
    tb_pair_opts opts_a = {.size = sizeof opts_a, .group = "a", .no_wait = true},
                 opts_b = {.size = sizeof opts_b, .group = "b"};
    check_ok(tb_world_enter(r->world, "b", 0, 1));
    check_ok(tb_pair_create(r->world, "p", "b", "mesh=1 place=Replicate", &opts_a, &a));
    check_ok(tb_pair_create(r->world, "p", "a", "mesh=1 place=Replicate", &opts_b, &b));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    check_ok(tb_batch_add(
        batch, a, "w",
        &(tb_tensor){.size = sizeof(tb_tensor), .data = memory, .dtype = TB_U32, .ndim = 1, .shape = {8}}));
    check_ok(tb_batch_add(batch, b, "w",
                          &(tb_tensor){.size = sizeof(tb_tensor),
                                       .data = memory,
                                       .dtype = TB_U32,
                                       .ndim = 1,
                                       .shape = {10},
                                       .view = "pad(0, 2, 0)"}));
    for (uint32_t i = 0; i < 10; i++)
        memory[i] = i;
    check_ok(tb_send(batch, NULL, &send));
    check_fails(tb_recv(batch, NULL, &receive), TB_REFUSED, "tensor 'w' is sent from memory that is padding");
    for (uint32_t i = 0; i < 10; i++)
        check(memory[i] == i);
    tb_transfer_destroy(send);
    tb_batch_destroy(batch);
    tb_pair_destroy(a);
    tb_pair_destroy(b);
}

static void test_padding_must_not_be_a_source(void **state) {
    (void)state;
    run_ranks(pad_over_source, 1, 0, NULL);
}

/* ---- linear_qkv ------------------------------------------------------------------------------------------------ */

/* a stores, for each of four groups of heads, two heads of q, one of k and one of v, each of two rows; b stores q, k
 * and v apart. */
enum { GROUPS = 4, HEAD = 2, Q_HEADS = 2, GROUP_ROWS = (Q_HEADS + 2) * HEAD };

typedef struct stored {
    const char *name, *view_a, *view_b, *layout_b;
    int64_t heads, first_row; /* in a group */
} stored;

static const stored parts[] = {
    {"q", "split(0, 4, 4, 2) slice(1, 0, 2)", "split(0, 4, 2, 2)", "mesh=2 place=Replicate", Q_HEADS, 0},
    {"k", "split(0, 4, 4, 2) slice(1, 2, 1)", "split(0, 4, 1, 2)", "mesh=2 place=Shard(0)", 1, Q_HEADS *HEAD},
    {"v", "split(0, 4, 4, 2) slice(1, 3, 1)", "split(0, 4, 1, 2)", "mesh=2 place=Shard(0)", 1, (Q_HEADS + 1) * HEAD},
};

/* The row in a's storage of a row in b's. */
static int64_t row_in_a(const stored *p, int64_t row) {
    int64_t per_group = p->heads * HEAD;
    return row / per_group * GROUP_ROWS + p->first_row + row % per_group;
}

static bool rows_hold(rows *s, const stored *p, uint32_t version) {
    bool is_good = neighbours_are_poison(s);
    for (int64_t i = 0; i < s->count; i++) {
        int64_t row = p ? row_in_a(p, s->first + i) : s->first + i;
        for (int64_t c = 0; c < WIDTH; c++)
            is_good &= *cell(s, i, c) == word(row, c, version);
    }
    return is_good;
}

static void fill_rows(rows *s, const stored *p, uint32_t version) {
    for (int64_t i = 0; i < s->count; i++) {
        int64_t row = p ? row_in_a(p, s->first + i) : s->first + i;
        for (int64_t c = 0; c < WIDTH; c++)
            *cell(s, i, c) = word(row, c, version);
    }
}

static void qkv(rank *r) {
    tb_pair *pair;
    tb_batch *batch;
    rows *s = malloc(3 * sizeof *s);
    check(s);
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=2 place=Shard(0)", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    rows_init(&s[0], (int64_t)GROUPS * GROUP_ROWS, r->index, r->size);
    for (int i = 0; i < 3; i++) {
        const int64_t strides[2] = {STRIDE, 1};
        int64_t total = GROUPS * (is_a(r) ? GROUP_ROWS : parts[i].heads * HEAD);
        bool is_whole = !is_a(r) && i == 0;
        rows *mine = is_a(r) ? &s[0] : &s[i];
        rows_init(mine, total, is_whole ? 0 : r->index, is_whole ? 1 : r->size);
        tb_tensor t = {.size = sizeof t,
                       .data = cell(mine, 0, 0),
                       .dtype = TB_U32,
                       .ndim = 2,
                       .shape = {total, WIDTH},
                       .strides = strides};
        t.view = is_a(r) ? parts[i].view_a : parts[i].view_b;
        t.layout = is_a(r) ? NULL : parts[i].layout_b;
        check_ok(tb_batch_add(batch, pair, parts[i].name, &t));
    }
    for (uint32_t version = 1; version <= 4; version++) {
        const char *from = version % 2 ? "a" : "b";
        bool is_send = strcmp(r->group, from) == 0;
        for (int i = 0; i < (is_a(r) ? 1 : 3); i++) {
            poison(&s[i]);
            if (is_send)
                fill_rows(&s[i], is_a(r) ? NULL : &parts[i], version);
        }
        move(r, batch, from);
        for (int i = 0; i < (is_a(r) ? 1 : 3); i++)
            check(rows_hold(&s[i], is_a(r) ? NULL : &parts[i], version));
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    free(s);
}

static void test_qkv_is_taken_apart_and_put_together(void **state) {
    (void)state;
    run_ranks(qkv, 2, 2, NULL);
}

/* ---- Mistakes -------------------------------------------------------------------------------------------------- */

static void mistakes(rank *r) {
    tb_pair *pair;
    tb_batch *batch;
    uint32_t data[32] = {0};
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=Replicate", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    tb_tensor t = {.size = sizeof t, .data = data, .dtype = TB_U32, .ndim = 1, .shape = {12}, .view = "fold(0)"};
    check_fails(tb_batch_add(batch, pair, "w", &t), TB_INVALID, "tensor 'w'");
    t.view = "split(0, 5, 2)";
    check_fails(tb_batch_add(batch, pair, "w", &t), TB_INVALID, "tensor 'w'");
    t.view = is_a(r) ? "split(0, 3, 4)" : "split(0, 4, 3)";
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_fails(tb_batch_register(batch, 0), TB_CONFLICT,
                "tensor 'w' has shape [3,4] in group 'a' but [4,3] in group 'b'");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_mistakes(void **state) {
    (void)state;
    run_ranks(mistakes, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_padding_differs_and_becomes_zero),
        cmocka_unit_test(test_padding_must_not_be_a_source),
        cmocka_unit_test(test_qkv_is_taken_apart_and_put_together),
        cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
