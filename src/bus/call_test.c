/* Calls by a descriptor: what they make, what they wait for, and how they are given up; many tensors in one call. */
#include "bus/agent/agent_test.h"

#define LAYOUT "mesh=1 place=R"

static tb_status end_call(tb_call *call, void **out) {
    struct pollfd news = {.fd = tb_call_fd(call), .events = POLLIN};
    check(poll(&news, 1, PATIENCE_MS) == 1);
    return tb_call_result(call, out);
}

static void is_waiting(tb_call *call) {
    struct pollfd news = {.fd = tb_call_fd(call), .events = POLLIN};
    check(poll(&news, 1, 50) == 0);
    check_fails(tb_call_result(call, NULL), TB_TIMEOUT, "has not ended");
}

static void destroy_at_once(tb_call *call) {
    int64_t begun_ms = tb__now_ms();
    tb_call_destroy(call);
    check(tb__now_ms() - begun_ms < PATIENCE_MS / 4);
}

/* ---- Joining --------------------------------------------------------------------------------------------------- */

static void test_join(void **state) {
    (void)state;
    char folder[] = "/tmp/tb_call-XXXXXX", url[64];
    tb_call *call = NULL;
    void *world = NULL, *none = &call;
    check(mkdtemp(folder));
    snprintf(url, sizeof url, "unix:%s/store", folder);
    check_ok(tb_call_join(url, "a", 0, 1, NULL, &call));
    memset(url, 'x', 3); /* it was copied */
    check_ok(end_call(call, &world));
    check(world && tb_world_rank(world) == 0);
    check_ok(tb_call_result(call, &none));
    check(!none);
    tb_call_destroy(call);
    tb_world_destroy(world);

    check_ok(tb_call_join("unix:", "a", 0, 1, NULL, &call));
    check_fails(end_call(call, &world), TB_INVALID, "no path");
    tb_call_destroy(call);
    snprintf(url, sizeof url, "unix:%s/store", folder);
    check_ok(tb_call_join(url, "a", 0, 1, NULL, &call)); /* nobody takes the world */
    check_ok(end_call(call, NULL));
    tb_call_destroy(call);
    tb_call_destroy(NULL);
    check(rmdir(folder) == 0);
}

/* It goes on without us, until its deadline. */
static void test_join_given_up(void **state) {
    (void)state;
    tb_call *call = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = 2000};
    check_ok(tb_call_join("agent:/nowhere/at/all", "a", 0, 1, &opts, &call));
    is_waiting(call);
    destroy_at_once(call);
    check_ok(tb_call_join("agent:/nowhere/at/all", "a", 0, 1, &opts, &call));
    check_fails(end_call(call, NULL), TB_IO, "is the agent running?");
    tb_call_destroy(call);
    tb__sleep_ms(2100);
}

/* ---- Pairs and registrations ----------------------------------------------------------------------------------- */

static tb_tensor tensor_of(float *data) {
    return (tb_tensor){.size = sizeof(tb_tensor), .data = data, .dtype = TB_F32, .ndim = 1, .shape = {4}};
}

/* Rank a waits alone and gives up; then both do it in earnest, and move the tensors. */
static void pair_and_register(rank *r, tb_world *world) {
    float data[2][4] = {{0}};
    tb_call *call = NULL;
    void *made = NULL;
    tb_batch *batch = NULL;
    tb_transfer *t = NULL;
    if (is_a(r)) {
        check_ok(tb_call_pair(world, "p", "b", LAYOUT, NULL, &call));
        is_waiting(call);
        destroy_at_once(call);
    }
    meet(r);
    check_ok(tb_call_pair(world, "p", other_group(r), LAYOUT, NULL, &call));
    check_ok(end_call(call, &made));
    tb_call_destroy(call);
    tb_pair *pair = made;

    const char *names[] = {"v", "w"};
    tb_tensor tensors[] = {tensor_of(data[0]), tensor_of(data[1])};
    check_ok(tb_batch_create(world, "step", NULL, &batch));
    check_ok(tb_batch_add_all(batch, pair, names, tensors, 2, NULL));
    if (is_a(r)) {
        check_ok(tb_call_register(batch, 0, &call));
        is_waiting(call);
        destroy_at_once(call);
    }
    meet(r);
    tb_transfer_opts opts = {.size = sizeof opts, .group = is_a(r) ? "a" : "b", .timeout_ms = PATIENCE_MS};
    tb_status (*begin)(tb_batch *, const tb_transfer_opts *, tb_call **) = is_a(r) ? tb_call_send : tb_call_recv;
    if (is_a(r)) { /* nobody else is there to register it */
        check_ok(begin(batch, &opts, &call));
        is_waiting(call);
        destroy_at_once(call);
    }
    meet(r);
    data[0][3] = data[1][0] = is_a(r) ? 5 : 0;
    check_ok(begin(batch, &opts, &call));
    check_ok(end_call(call, &made));
    tb_call_destroy(call);
    t = made;
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(data[0][3] == 5 && data[1][0] == 5);
    tb_transfer_destroy(t);
    meet(r);
    check_ok(begin(batch, &opts, &call)); /* nobody takes the transfer: it is cancelled, and the next one succeeds */
    check_ok(end_call(call, NULL));
    meet(r);
    tb_call_destroy(call);
    meet(r);
    opts.timeout_ms = -1;
    check_fails(begin(batch, &opts, &call), TB_INVALID, "can't be negative");

    check_ok(tb_call_register(batch, 0, &call));
    check_ok(end_call(call, NULL));
    tb_call_destroy(call);
    data[0][3] = data[1][0] = is_a(r) ? 7 : 0;
    check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(data[0][3] == 7 && data[1][0] == 7);
    tb_transfer_destroy(t);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void on_the_bus(rank *r) {
    pair_and_register(r, r->world);
}

static void test_pair_and_register(void **state) {
    (void)state;
    run_ranks(on_the_bus, 1, 1, NULL);
}

static void by_an_agent(rank *r) {
    program *client = open_client(r);
    pair_and_register(r, client->world);
    program_close(client);
}

static void test_by_an_agent(void **state) {
    (void)state;
    run_agents(by_an_agent, 1, 1);
}

/* ---- Many tensors ---------------------------------------------------------------------------------------------- */

static void many(rank *r) {
    float data[4] = {0};
    const char *names[] = {"u", "v", "w"};
    tb_tensor tensors[] = {tensor_of(data), tensor_of(data), tensor_of(data)};
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    check_ok(tb_pair_create(r->world, "p", other_group(r), LAYOUT, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    size_t nadded = 9;
    tensors[1].ndim = TB_MAX_DIMS + 1;
    check_fails(tb_batch_add_all(batch, pair, names, tensors, 3, &nadded), TB_INVALID, "tensor 'v'");
    check(nadded == 1);
    check_ok(tb_batch_register(batch, 0)); /* 'u' is there, on both sides */
    check_fails(tb_batch_add_all(batch, pair, names, tensors, 3, NULL), TB_REFUSED, "has been registered");
    check_ok(tb_batch_add_all(batch, pair, NULL, NULL, 0, &nadded));
    check(nadded == 0);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_add_all(void **state) {
    (void)state;
    run_ranks(many, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_join),
        cmocka_unit_test(test_join_given_up),
        cmocka_unit_test(test_pair_and_register),
        cmocka_unit_test(test_by_an_agent),
        cmocka_unit_test(test_add_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
