/* Batches whose layouts are new each time, as when experts move in every step: what agents keep of their plans has a
 * bound in bytes. */
#include "bus/agent/agent_test.h"

#include <malloc.h>

enum {
    EXPERTS = 64,
    COLUMNS = 8,
    TENSORS = 20,
    WARM_UP = 20,
    ROUNDS = 60,
    SIDE = 2,
    LIMIT = 2 << 20,
    GROWTH = 16 << 20, /* of all that the test's process has; without a bound it is five times that */
};

/* Which experts each of two ranks has: a shuffle, cut in the middle. */
static void make_layout(uint64_t seed, char *out, size_t room) {
    int expert[EXPERTS] = {0};
    size_t n = (size_t)snprintf(out, room, "mesh=2 place=Explicit(0, ");
    for (int i = 0; i < EXPERTS; i++) {
        seed = seed * 6364136223846793005U + 1442695040888963407U;
        int j = (int)((seed >> 33) % (uint64_t)(i + 1));
        expert[i] = expert[j];
        expert[j] = i;
    }
    for (int i = 0; i < EXPERTS; i++)
        n += (size_t)snprintf(out + n, room - n, "%s%d-%d",
                              i == EXPERTS / 2 ? "; "
                              : i              ? ","
                                               : "",
                              expert[i], expert[i] + 1);
    snprintf(out + n, room - n, ")");
}

static void move_once(rank *r, program *client, uint32_t round) {
    part parts[TENSORS];
    char layouts[TENSORS][16 * EXPERTS], name[32];
    program_batch *batch = NULL;
    check_ok(program_batch_create(client, "step", NULL, &batch));
    for (int i = 0; i < TENSORS; i++) {
        make_layout(round * TENSORS + (uint32_t)i, layouts[i], sizeof layouts[i]);
        part_init(&parts[i], is_a(r) ? "mesh=2 place=S0" : layouts[i], r->index, EXPERTS, COLUMNS);
        tb_tensor t = part_tensor(&parts[i]);
        t.layout = is_a(r) ? NULL : layouts[i];
        snprintf(name, sizeof name, "experts.%d", i);
        check_ok(program_add(batch, "p", name, &t));
        if (is_a(r))
            part_fill(&parts[i], round + (uint32_t)i);
        else
            part_poison(&parts[i]);
    }
    check_ok(program_register(batch, 0));
    check_ok(program_transfer(batch, is_a(r), NULL));
    for (int i = 0; i < TENSORS; i++) {
        check(part_holds(&parts[i], round + (uint32_t)i));
        part_fini(&parts[i]);
    }
    program_batch_destroy(batch);
}

/* The number of the agent's report after `key`. */
static long long plans_of(rank *r, const char *key) {
    char *report;
    check_ok(tb__agent_report(seat_of(r)->agent, PATIENCE_MS, &report));
    const char *plans = strstr(report, "\"plans\":{"), *at = plans ? strstr(plans, key) : NULL;
    long long number = at ? strtoll(at + strlen(key), NULL, 10) : -1;
    free(report);
    check(number >= 0);
    return number;
}

/* Sanitizers have an allocator of their own, which mallinfo2 knows nothing of. */
static size_t heap_nbytes(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#else
    return mallinfo2().uordblks;
#endif
}

static void new_layouts(rank *r) {
    size_t before = 0;
    program *client = open_client(r);
    check_ok(program_pair(client, "p", other_group(r), "mesh=2 place=S0", 0));
    for (uint32_t round = 0; round < ROUNDS; round++) {
        move_once(r, client, round);
        meet(r);
        if (round == WARM_UP)
            before = heap_nbytes();
        check(plans_of(r, "\"bytes\":") <= LIMIT);
    }
    size_t after = heap_nbytes();
    if (r->index == 0 && is_a(r))
        print_message("%zu KiB after %d rounds, %zu after %d\n", before >> 10, WARM_UP, after >> 10, ROUNDS);
    check(after < before + GROWTH);
    check(plans_of(r, "\"limit\":") == LIMIT && plans_of(r, "\"evicted\":") > 0 && plans_of(r, "\"kept\":") > 0);
    long long hits = plans_of(r, "\"hits\":"), misses = plans_of(r, "\"misses\":");
    meet(r);
    move_once(r, client, ROUNDS - 1); /* what was used last is still there */
    check(plans_of(r, "\"hits\":") == hits + 1 && plans_of(r, "\"misses\":") == misses);
    meet(r);
    program_close(client);
}

static void test_new_layouts(void **state) {
    (void)state;
    agent_scene h = {.plan_bytes = LIMIT};
    run_agent_scene(&h, new_layouts, SIDE, SIDE);
}

/* Without layouts, each seat has tensors of its own. */
static void own_parts(rank *r) {
    uint32_t rows[8], scalar = POISON, count = 5 + (uint32_t)r->index;
    program_batch *batch = NULL;
    program *client = open_client(r);
    bool answer = true;
    tb_tensor t = {.size = sizeof t, .data = rows, .dtype = TB_U32, .ndim = 1, .shape = {count}};
    tb_tensor s = {.size = sizeof s, .data = &scalar, .dtype = TB_U32};
    check_ok(program_pair(client, "p", other_group(r), NULL, 0));
    check_ok(program_batch_create(client, "step", NULL, &batch));
    check_ok(program_add(batch, "p", "rows", &t));
    check_ok(program_add(batch, "p", "scalar", &s));
    for (uint32_t i = 0; i < 8; i++)
        rows[i] = is_a(r) ? 100 * count + i : POISON;
    scalar = is_a(r) ? count : POISON;
    check_fails(tb_batch_signal(batch->batch, NULL, 1, 0, &answer), TB_REFUSED, "has not been registered");
    check_ok(program_register(batch, 0));
    meet(r);
    check_ok(tb_batch_signal(batch->batch, NULL, 1, 0, &answer)); /* asked before anything is sent */
    check(!answer);
    check_fails(tb_batch_signal(batch->batch, other_group(r), 2, 0, &answer), TB_INVALID,
                "no registered pair of group");
    meet(r);
    check_ok(program_transfer(batch, is_a(r), NULL));
    for (uint32_t i = 0; i < 8; i++)
        check(rows[i] == (is_a(r) || i < count ? 100 * count + i : POISON));
    check(scalar == count);
    meet(r);
    program_batch_destroy(batch);
    program_close(client);
}

static void test_own_parts(void **state) {
    (void)state;
    agent_scene h = {0};
    run_agent_scene(&h, own_parts, SIDE, SIDE);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_new_layouts), cmocka_unit_test(test_own_parts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
