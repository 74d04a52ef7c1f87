/* A program receives from two groups through its agent, into memory of its own, and the agent of one of them is killed:
 * it has what came from the other, and what it wrote itself. */
#include "bus/agent/process_test.h"

#include <pthread.h>

enum { RECEIVER, SENDER, VICTIM, NPARTIES, COUNT = 20000 };

static const char *const groups[NPARTIES] = {"r", "x", "y"};
static const char *const pairs[NPARTIES] = {NULL, "rx", "ry"};

typedef struct party {
    agent_process agent;
    program *client;
    program_batch *batch;
    uint32_t *data[NPARTIES]; /* by pair */
} party;

static char folder[32];
static party parties[NPARTIES];

/* Calls that wait for each other. */
typedef struct call {
    int who, pair; /* pair 0: register, or move */
    bool moves;
    tb_status status;
    char why[512];
    pthread_t thread;
} call;

static void *call_main(void *arg) {
    call *c = arg;
    party *p = &parties[c->who];
    const char *other = groups[c->who == RECEIVER ? c->pair : RECEIVER];
    c->status = c->moves  ? program_transfer(p->batch, c->who != RECEIVER, NULL)
                : c->pair ? program_pair(p->client, pairs[c->pair], other, "mesh=1 place=R", 0)
                          : program_register(p->batch, 0);
    if (c->status != TB_OK)
        snprintf(c->why, sizeof c->why, "%s", tb_error_detail());
    return NULL;
}

static void run_calls(call *calls, size_t n) {
    for (size_t i = 0; i < n; i++)
        assert_int_equal(pthread_create(&calls[i].thread, NULL, call_main, &calls[i]), 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(pthread_join(calls[i].thread, NULL), 0);
        if (calls[i].status != TB_OK)
            fail_msg("call %zu: %s", i, calls[i].why);
    }
}

static void fill(uint32_t *data, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++)
        data[i] = version << 16 | i;
}

static void expect(const uint32_t *data, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(data[i], version << 16 | i);
}

static void open_all(void) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    for (int i = 0; i < NPARTIES; i++) {
        party *p = &parties[i];
        begin_agent(&p->agent, folder, groups[i], 0, 1, "60");
        await_agent(&p->agent);
        assert_ok(program_connect(p->agent.path, &opts, &p->client));
        assert_ok(program_batch_create(p->client, "step", NULL, &p->batch));
    }
    for (int pair = SENDER; pair < NPARTIES; pair++) {
        call makes[] = {{.who = RECEIVER, .pair = pair}, {.who = pair, .pair = pair}};
        run_calls(makes, 2);
        for (int i = 0; i < 2; i++) {
            party *p = &parties[i ? pair : RECEIVER];
            assert_non_null(p->data[pair] = calloc(COUNT, sizeof(uint32_t)));
            tb_tensor t = {.size = sizeof t, .data = p->data[pair], .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
            assert_ok(program_add(p->batch, pairs[pair], "w", &t));
        }
    }
    call registers[] = {{.who = RECEIVER}, {.who = SENDER}, {.who = VICTIM}};
    run_calls(registers, NPARTIES);
}

static void close_all(void) {
    for (int i = NPARTIES; i-- > 0;) {
        party *p = &parties[i];
        program_batch_destroy(p->batch);
        program_close(p->client);
        for (int j = 0; j < NPARTIES; j++)
            free(p->data[j]);
        end_agent(&p->agent, SIGTERM);
    }
}

static void begin(int who) {
    program_transfer_opts opts = {.no_wait = true, .timeout_ms = PATIENCE_MS};
    assert_ok(program_transfer(parties[who].batch, who != RECEIVER, &opts));
}

static void await_bytes(int64_t nbytes) {
    program_status status = {0};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    do {
        assert_ok(program_query(parties[RECEIVER].batch, &status));
        assert_true(tb__now_ms() < deadline_ms);
    } while (status.bytes_total == 0 || status.bytes_done < nbytes);
}

static void expect_pair(int pair, tb_status status, uint64_t version) {
    program_pair_state state = {0};
    assert_ok(program_query_pair(parties[RECEIVER].batch, pairs[pair], &state));
    assert_int_equal(state.status, status);
    assert_int_equal(state.version, version);
    assert_false(state.is_torn);
}

static void expect_status(uint64_t version, bool is_mixed) {
    program_status status = {0};
    assert_ok(program_query(parties[RECEIVER].batch, &status));
    assert_int_equal(status.version, version);
    assert_true(status.is_mixed == is_mixed);
    assert_false(status.is_torn);
}

static void test_sender_is_killed(void **state) {
    (void)state;
    party *r = &parties[RECEIVER];
    open_all();
    for (uint32_t version = 1; version <= 2; version++) {
        call moves[] = {
            {.who = RECEIVER, .moves = true}, {.who = SENDER, .moves = true}, {.who = VICTIM, .moves = true}};
        fill(parties[SENDER].data[SENDER], version);
        fill(parties[VICTIM].data[VICTIM], version);
        run_calls(moves, NPARTIES);
        expect(r->data[SENDER], version);
        expect(r->data[VICTIM], version);
    }
    expect_status(2, false);

    fill(parties[SENDER].data[SENDER], 3);
    fill(r->data[SENDER], 99);
    begin(RECEIVER);
    end_agent(&parties[VICTIM].agent, SIGKILL); /* version 3 can't be complete any more: nothing of it is received */
    assert_fails(program_wait(r->batch, false, TB_COMMITTED, PATIENCE_MS), TB_LOST, "y 0");
    expect(r->data[SENDER], 99);
    expect(r->data[VICTIM], 2);
    expect_pair(SENDER, TB_LOST, 2);
    expect_pair(VICTIM, TB_LOST, 2);
    expect_status(2, false);

    assert_ok(program_remove_pair(r->batch, pairs[VICTIM]));
    begin(RECEIVER);
    await_bytes(0);
    fill(r->data[VICTIM], 77);
    begin(SENDER);
    assert_ok(program_wait(r->batch, false, TB_COMMITTED, PATIENCE_MS));
    assert_ok(program_wait(parties[SENDER].batch, true, TB_COMMITTED, PATIENCE_MS));
    expect(r->data[SENDER], 3);
    expect(r->data[VICTIM], 77);
    expect_pair(SENDER, TB_OK, 3);
    expect_status(3, false);
}

static int set_up(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/tb-deliver-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    close_all();
    empty_folder(folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_sender_is_killed, set_up, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
