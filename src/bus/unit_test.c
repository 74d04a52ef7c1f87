/* Tensors on several units of one device: they move in one batch, are named by their unit, and get snapshots and
 * shadows there. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

enum { NTENSORS = 3, COUNT = 100 };

static const char *const names[NTENSORS] = {"x", "y", "z"}, *const units[NTENSORS] = {"slow:0", "slow:1", "host"};

static void check_dump(const rank *r, tb_batch *batch) {
    char *dump, wanted[64];
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    for (int i = 0; i < NTENSORS; i++) {
        bool is_host = strcmp(units[i], "host") == 0;
        snprintf(wanted, sizeof wanted, "  %s [0:100]%s%s %s", names[i], is_host ? "" : " on ", is_host ? "" : units[i],
                 is_a(r) ? "to " : "from ");
        check(strstr(dump, wanted));
    }
    free(dump);
}

static void move_units(rank *r) {
    tb_batch_opts opts = *(const tb_batch_opts *)r->scene->shared;
    uint32_t *data[NTENSORS];
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *t = NULL;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < NTENSORS; i++) {
        check_ok(tb_alloc_on(units[i], COUNT * sizeof **data, (void **)&data[i]));
        tb_tensor x = {.size = sizeof x,
                       .data = data[i],
                       .dtype = TB_U32,
                       .ndim = 1,
                       .shape = {COUNT},
                       .memory = units[(i + 1) % NTENSORS]};
        check_fails(tb_batch_add(batch, pair, names[i], &x), TB_REFUSED, units[i]);
        x.memory = units[i];
        check_ok(tb_batch_add(batch, pair, names[i], &x));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        for (uint32_t i = 0; i < NTENSORS * COUNT; i++)
            ((uint32_t *)tensor_bytes(data[i / COUNT]))[i % COUNT] = is_a(r) ? version * 1000 + i : 0;
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        check_ok(tb_wait(t, TB_COMMITTED, -1));
        for (uint32_t i = 0; i < NTENSORS * COUNT; i++)
            check(((uint32_t *)tensor_bytes(data[i / COUNT]))[i % COUNT] == version * 1000 + i);
        tb_transfer_destroy(t);
    }
    check_dump(r, batch);
    for (int unit = 0; unit < 2; unit++) /* of the rank that has a duplicate of it */
        check(!(opts.snapshot || opts.commit == TB_SHADOW) || slow_device_count_allocations(unit) > 0);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    for (int i = 0; i < NTENSORS; i++)
        tb_free(data[i]);
}

static void test_units(void **state) {
    (void)state;
    run_ranks(move_units, 1, 1, &(tb_batch_opts){.size = sizeof(tb_batch_opts)});
    run_ranks(move_units, 1, 1, &(tb_batch_opts){.size = sizeof(tb_batch_opts), .snapshot = true});
    run_ranks(move_units, 1, 1, &(tb_batch_opts){.size = sizeof(tb_batch_opts), .commit = TB_SHADOW});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_units),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
