/* A trainer and two engines, each with an agent that is a process: one engine's agent is killed, the trainer goes on
 * without it, and it joins again. Nobody else registers again. */
#include "bus/agent/process_test.h"

#include <pthread.h>

enum { TRAINER, ENGINE_1, ENGINE_2, NPARTIES, COUNT = 5000, SOON_MS = 300 };

static const char *const groups[NPARTIES] = {"t", "x", "y"};
static const char *const pairs[NPARTIES] = {NULL, "tx", "ty"}; /* of the engines, with the trainer */

typedef struct party {
    agent_process agent;
    program *client;
    program_batch *batch;
    uint32_t *data;
} party;

typedef struct scene {
    char folder[32];
    bool is_shared;
    party parties[NPARTIES];
} scene;

static scene running;

/* ---- Calls that wait for each other ---------------------------------------------------------------------------- */

typedef struct call {
    party *party;
    enum { INIT, REGISTER, MOVE } what;
    int pair; /* an engine */
    bool skip_lost;
    int timeout_ms;
    tb_status status;
    char why[512];
    pthread_t thread;
} call;

static bool is_trainer(const party *p) {
    return p == &running.parties[TRAINER];
}

static void *call_main(void *arg) {
    call *c = arg;
    program_transfer_opts opts = {.skip_lost = c->skip_lost};
    const char *other = groups[is_trainer(c->party) ? c->pair : TRAINER];
    c->status = c->what == INIT       ? program_pair(c->party->client, pairs[c->pair], other, "mesh=1 place=R", 0)
                : c->what == REGISTER ? program_register(c->party->batch, c->timeout_ms)
                                      : program_transfer(c->party->batch, is_trainer(c->party), &opts);
    if (c->status != TB_OK)
        snprintf(c->why, sizeof c->why, "%s", tb_error_detail());
    return NULL;
}

static void run_calls(call *calls, size_t n) {
    for (size_t i = 0; i < n; i++)
        assert_int_equal(pthread_create(&calls[i].thread, NULL, call_main, &calls[i]), 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(pthread_join(calls[i].thread, NULL), 0);
}

static void expect_good(const call *calls, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (calls[i].status != TB_OK)
            fail_msg("call %zu: %s", i, calls[i].why);
    }
}

static void make_pair(int engine) {
    call calls[2] = {{.party = &running.parties[TRAINER], .what = INIT, .pair = engine},
                     {.party = &running.parties[engine], .what = INIT, .pair = engine}};
    run_calls(calls, 2);
    expect_good(calls, 2);
}

/* Sends a version to these engines; the trainer's own status. */
static tb_status move(uint32_t version, const int *engines, size_t n, bool skip_lost) {
    call calls[NPARTIES] = {{.party = &running.parties[TRAINER], .what = MOVE, .skip_lost = skip_lost}};
    for (uint32_t i = 0; i < COUNT; i++)
        running.parties[TRAINER].data[i] = version << 16 | i;
    for (size_t i = 0; i < n; i++)
        calls[i + 1] = (call){.party = &running.parties[engines[i]], .what = MOVE};
    run_calls(calls, n + 1);
    expect_good(calls + 1, n);
    for (size_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < COUNT; j++)
            assert_int_equal(running.parties[engines[i]].data[j], version << 16 | j);
    }
    if (calls[0].status != TB_OK)
        (void)tb_error_set(calls[0].status, calls[0].why);
    return calls[0].status;
}

/* ---- Parties --------------------------------------------------------------------------------------------------- */

static void connect_party(int i) {
    party *p = &running.parties[i];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    begin_agent(&p->agent, running.folder, groups[i], 0, 1, "30");
    await_agent(&p->agent);
    assert_ok(program_connect(p->agent.path, &opts, &p->client));
    assert_ok(program_batch_create(p->client, "step", NULL, &p->batch));
    if (!p->data && running.is_shared)
        assert_ok(tb_alloc(COUNT * sizeof *p->data, (void **)&p->data));
    else if (!p->data)
        assert_non_null(p->data = calloc(COUNT, sizeof *p->data));
}

static void add(int who, int engine) {
    tb_tensor t = {.size = sizeof t, .data = running.parties[who].data, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    assert_ok(program_add(running.parties[who].batch, pairs[engine], "w", &t));
}

static void leave(int i) {
    party *p = &running.parties[i];
    program_batch_destroy(p->batch);
    program_close(p->client);
    p->batch = NULL;
    p->client = NULL;
}

static void expect_pair(int engine, tb_status status, uint64_t version) {
    program_pair_state state = {0};
    assert_ok(program_query_pair(running.parties[TRAINER].batch, pairs[engine], &state));
    assert_int_equal(state.status, status);
    if (status == TB_OK) /* of one that failed nothing was sent */
        assert_int_equal(state.version, version);
    assert_true((status == TB_OK) == (state.error[0] == '\0'));
    assert_false(state.is_torn);
}

/* ---- What happens ---------------------------------------------------------------------------------------------- */

static void start(void) {
    call calls[NPARTIES];
    for (int i = 0; i < NPARTIES; i++)
        connect_party(i);
    for (int i = ENGINE_1; i < NPARTIES; i++) {
        make_pair(i);
        add(TRAINER, i);
        add(i, i);
    }
    for (int i = 0; i < NPARTIES; i++)
        calls[i] = (call){.party = &running.parties[i], .what = REGISTER};
    run_calls(calls, NPARTIES);
    expect_good(calls, NPARTIES);
}

/* Whoever has the pair in the batch can't add it again, in whatever way. */
static void expect_refusals(void) {
    party *trainer = &running.parties[TRAINER];
    program_batch *twin = NULL;
    program_pair_state state = {0};
    tb_tensor t = {.size = sizeof t, .data = trainer->data, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    assert_fails(program_add(trainer->batch, "tx", "v", &t), TB_REFUSED, "nothing can be added");
    assert_ok(program_register(trainer->batch, 0)); /* there is nothing new */
    assert_ok(program_batch_create(trainer->client, "step", NULL, &twin));
    assert_ok(program_add(twin, "tx", "w", &t));
    assert_fails(program_register(twin, 0), TB_CONFLICT, "pair 'tx' is in batch 'step' already");
    program_batch_destroy(twin);
    assert_fails(program_query_pair(trainer->batch, "tz", &state), TB_INVALID, "there is no pair 'tz'");
}

/* Nothing comes or goes while something is under way. */
static void expect_patience(void) {
    party *trainer = &running.parties[TRAINER];
    program_transfer_opts opts = {.no_wait = true, .timeout_ms = PATIENCE_MS};
    assert_ok(program_transfer(trainer->batch, true, &opts));
    assert_fails(program_remove_pair(trainer->batch, "ty"), TB_REFUSED, "destroy that transfer first");
    call calls[2] = {{.party = &running.parties[ENGINE_1], .what = MOVE},
                     {.party = &running.parties[ENGINE_2], .what = MOVE}};
    run_calls(calls, 2);
    expect_good(calls, 2);
    assert_ok(program_wait(trainer->batch, true, TB_COMMITTED, -1));
}

static void join_again(void) {
    party *trainer = &running.parties[TRAINER];
    assert_ok(program_remove_pair(trainer->batch, "ty"));
    assert_ok(move(4, (int[]){ENGINE_1}, 1, false));
    connect_party(ENGINE_2);
    make_pair(ENGINE_2);
    add(TRAINER, ENGINE_2);
    add(ENGINE_2, ENGINE_2);
    call early = {.party = trainer, .what = REGISTER, .timeout_ms = SOON_MS};
    run_calls(&early, 1); /* the engine is not there so far: the batch stays what it was */
    assert_int_equal(early.status, TB_TIMEOUT);
    assert_ok(program_remove_pair(trainer->batch, "ty")); /* or the next transfer would wait for the engine, too */
    assert_ok(move(5, (int[]){ENGINE_1}, 1, false));
    add(TRAINER, ENGINE_2);
    call calls[2] = {{.party = trainer, .what = REGISTER}, {.party = &running.parties[ENGINE_2], .what = REGISTER}};
    run_calls(calls, 2);
    expect_good(calls, 2);
}

/* Coming and going again and again, on both sides, leaves no descriptors behind in the agents. */
static void go_in_circles(void) {
    static const int who[] = {TRAINER, ENGINE_2};
    int nfiles[2] = {0};
    for (int round = 0; round < 6; round++) {
        call calls[2];
        for (int i = 0; i < 2; i++) {
            assert_ok(program_remove_pair(running.parties[who[i]].batch, "ty"));
            add(who[i], ENGINE_2);
            calls[i] = (call){.party = &running.parties[who[i]], .what = REGISTER};
        }
        run_calls(calls, 2);
        expect_good(calls, 2);
        assert_ok(move(10 + (uint32_t)round, (int[]){ENGINE_1, ENGINE_2}, 2, false));
        for (int i = 0; i < 2; i++) {
            int now = count_files(running.parties[who[i]].agent.pid);
            if (round == 1)
                nfiles[i] = now;
            assert_true(round < 1 || now <= nfiles[i]);
        }
    }
}

static void test_engines_come_and_go(void **state) {
    (void)state;
    static const int both[] = {ENGINE_1, ENGINE_2};
    start();
    expect_refusals();
    assert_ok(move(1, both, 2, false));
    expect_pair(ENGINE_1, TB_OK, 1);
    expect_pair(ENGINE_2, TB_OK, 1);
    end_agent(&running.parties[ENGINE_2].agent, SIGKILL);
    tb_status status = move(2, both, 1, true); /* the loss may not be known when it begins */
    assert_true(status == TB_OK || status == TB_LOST);
    assert_ok(move(3, both, 1, true));
    expect_pair(ENGINE_1, TB_OK, 3);
    expect_pair(ENGINE_2, TB_LOST, 1);
    assert_fails(move(3, NULL, 0, false), TB_LOST, "y 0");
    leave(ENGINE_2);
    join_again();
    assert_ok(move(6, both, 2, false));
    expect_pair(ENGINE_1, TB_OK, 6);
    expect_pair(ENGINE_2, TB_OK, 6);
    expect_patience();
    go_in_circles();
}

static int set_up(void **state) {
    running = (scene){.folder = "/tmp/tb-engines-XXXXXX", .is_shared = *state != NULL};
    assert_non_null(mkdtemp(running.folder));
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    for (int i = NPARTIES; i-- > 0;) {
        party *p = &running.parties[i];
        leave(i);
        if (running.is_shared)
            tb_free(p->data);
        else
            free(p->data);
        end_agent(&p->agent, SIGTERM);
    }
    empty_folder(running.folder);
    return 0;
}

int main(void) {
    static int shared;
    const struct CMUnitTest tests[] = {
        {"test_engines_come_and_go, mapped memory", test_engines_come_and_go, set_up, tear_down, &shared},
        {"test_engines_come_and_go, memory of their own", test_engines_come_and_go, set_up, tear_down, NULL},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
