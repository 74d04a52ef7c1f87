/* Transforms of the user's own: pieces that go as other bytes than their elements have, and what is refused. */
#include "bus/bus_test.h"

enum { SIDE = 12 };

static bool takes_w(void *arg, const char *name) {
    (void)arg;
    return name[0] == 'w';
}

static int64_t count_elements(const tb_transform_piece *piece) {
    int64_t n = 1;
    for (int d = 0; d < piece->ndim; d++)
        n *= piece->shape[d];
    return n;
}

/* Every number takes one byte more than it has, and the wire ends with the sum of what is on it. */
static int64_t wire_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 5 + 4;
}

static uint32_t *element_of(const tb_binding *box, int64_t i) {
    int64_t at = 0;
    for (int d = box->shape.ndim; d-- > 0; i /= box->shape.dim[d])
        at += i % box->shape.dim[d] * box->strides[d];
    return (uint32_t *)(void *)((char *)box->base + box->offset) + at;
}

static tb_status to_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    unsigned char *out = wire;
    uint32_t sum = 0;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x = *element_of(box, i) ^ 0x5a5a5a5a;
        out[5 * i] = 17;
        memcpy(out + 5 * i + 1, &x, sizeof x);
        sum += x;
    }
    memcpy(out + 5 * count_elements(piece), &sum, sizeof sum);
    return TB_OK;
}

static tb_status from_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    const unsigned char *in = wire;
    uint32_t sum = 0, expected;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x;
        memcpy(&x, in + 5 * i + 1, sizeof x);
        if (in[5 * i] != 17)
            return tb_error_set(TB_INVALID, "a byte is wrong");
        *element_of(box, i) = x ^ 0x5a5a5a5a;
        sum += x;
    }
    memcpy(&expected, in + 5 * count_elements(piece), sizeof expected);
    return sum == expected ? TB_OK : tb_error_set(TB_INVALID, "a sum is wrong");
}

static void transform(rank *r) {
    _Atomic int calls = 0;
    tb_transform own = {.size = sizeof own,
                        .arg = &calls,
                        .should_transform = takes_w,
                        .prepare_recv = wire_size,
                        .prepare_send = to_wire,
                        .finalize_recv = from_wire};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    const char *layout = is_a(r) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    part parts[2];
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        part_init(&parts[i], layout, r->index, SIDE, SIDE);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, i ? "w" : "bias", &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        for (int i = 0; i < 2; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        check(part_holds(&parts[0], version) && part_holds(&parts[1], version));
        check(calls == 2 * (int)version);
        meet(r);
    }
    char *dump;
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    check(strstr(dump, is_a(r) ? "to 2, coded" : "from 0, transform") || strstr(dump, is_a(r) ? "coded" : "transform"));
#ifndef TB_SLOW_DEVICE /* which is staged */
    check(strstr(dump, is_a(r) ? "read in place" : "direct"));
#endif
    free(dump);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&parts[0]);
    part_fini(&parts[1]);
}

static void test_transform(void **state) {
    (void)state;
    run_ranks(transform, 2, 2, NULL);
}

static int64_t half_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 2;
}

/* Pieces have a size of their own, and nothing makes or reads them. */
static void no_functions(rank *r) {
    tb_transform own = {.size = sizeof own, .prepare_recv = half_size};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    part p;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *receiving = NULL;
    static const char words[] = "tensor 'w' has a piece of 288 bytes on the wire, but nothing converts it here";
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&p, "mesh=1 place=R", r->index, SIDE, SIDE);
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_ok(tb_batch_register(batch, 0));
    if (!is_a(r))
        check_ok(tb_recv(batch, NULL, &receiving));
    meet(r);
    if (is_a(r))
        check_fails(tb_reshard_execute(batch, "a", NULL, NULL, NULL), TB_INVALID, words);
    else
        check_fails(tb_wait(receiving, TB_ARRIVED, -1), TB_INVALID, words);
    tb_transfer_destroy(receiving);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_no_functions(void **state) {
    (void)state;
    run_ranks(no_functions, 1, 1, NULL);
}

/* One side only. */
static void lone_transform(rank *r) {
    tb_transform own = {.size = sizeof own, .should_transform = takes_w};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_a(r) ? &own : NULL};
    part p;
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&p, "mesh=1 place=R", r->index, SIDE, SIDE);
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_fails(tb_batch_register(batch, 0), TB_CONFLICT, "one group transforms tensor 'w', the other does not");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_lone_transform(void **state) {
    (void)state;
    run_ranks(lone_transform, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transform),
        cmocka_unit_test(test_lone_transform),
        cmocka_unit_test(test_no_functions),
    };
    return cmocka_run_group_tests_name("transform", tests, NULL, NULL);
}
