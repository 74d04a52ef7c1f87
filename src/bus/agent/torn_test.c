/* An agent that is killed: its program says which version it has, and that the tensors are torn if, and only if, the
 * agent may have begun to write them since it told. */
#include "bus/agent/process_test.h"

#include <pthread.h>

enum { SENDER, RECEIVER };
/* Each tensor is a group. The last does not come before the others are taken. */
enum { NTENSORS = 3, COUNT = 5000 };

/* When the agent is killed. */
typedef enum moment { IDLE, WAITING, HELD, HALF_WRITTEN } moment;

typedef struct plan {
    bool is_shared; /* tensors are in memory of tb_alloc */
    tb_commit commit;
    moment moment;
} plan;

typedef struct side {
    int seat;
    const plan *plan;
    const char *path; /* of the agent */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    uint32_t *data[NTENSORS];
    tb_status status;
    char why[512];
} side;

static void fill(side *s, uint32_t version) {
    for (int t = 0; t < NTENSORS; t++) {
        for (uint32_t i = 0; i < COUNT; i++)
            s->data[t][i] = version << 24 | (uint32_t)t << 16 | i;
    }
}

static bool holds(const side *s, int tensor, uint32_t version) {
    for (uint32_t i = 0; i < COUNT; i++) {
        if (s->data[tensor][i] != (version << 24 | (uint32_t)tensor << 16 | i))
            return false;
    }
    return true;
}

static tb_status open_side(side *s) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    tb_batch_opts batch = {.size = sizeof batch, .commit = s->plan->commit, .group_window = 1, .bucket_size = 4096};
    char url[100];
    snprintf(url, sizeof url, "agent:%s", s->path);
    TB_TRY(tb_world_join(url, two_groups[s->seat], 0, 1, &opts, &s->world));
    TB_TRY(tb_pair_create(s->world, "p", two_groups[!s->seat], "mesh=1 place=R", NULL, &s->pair));
    TB_TRY(tb_batch_create(s->world, "step", &batch, &s->batch));
    for (int t = 0; t < NTENSORS; t++) {
        size_t nbytes = COUNT * sizeof(uint32_t);
        char name[2] = {(char)('u' + t)};
        if (s->plan->is_shared)
            TB_TRY(tb_alloc(nbytes, (void **)&s->data[t]));
        else
            s->data[t] = test_malloc(nbytes);
        tb_tensor w = {.size = sizeof w, .data = s->data[t], .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
        w.group = (uint32_t)t;
        TB_TRY(tb_batch_add(s->batch, s->pair, name, &w));
    }
    fill(s, s->seat == SENDER);
    return tb_batch_register(s->batch, 0);
}

static void close_side(side *s) {
    tb_batch_destroy(s->batch);
    tb_pair_destroy(s->pair);
    tb_world_destroy(s->world);
    for (int t = 0; t < NTENSORS; t++)
        s->plan->is_shared ? tb_free(s->data[t]) : test_free(s->data[t]);
}

static tb_transfer *begin(const side *s, bool hold) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .hold = hold};
    tb_transfer *t = NULL;
    assert_ok((s->seat == SENDER ? tb_send : tb_recv)(s->batch, &opts, &t));
    return t;
}

static void *open_main(void *arg) {
    side *s = arg;
    s->status = open_side(s);
    if (s->status != TB_OK)
        snprintf(s->why, sizeof s->why, "%s", tb_error_detail());
    return NULL;
}

static void run_plan(two_agents *agents, const plan *p) {
    side sides[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        sides[i] = (side){.seat = i, .plan = p, .path = agents->agents[i].path};
        assert_int_equal(pthread_create(&threads[i], NULL, open_main, &sides[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        if (sides[i].status != TB_OK)
            fail_msg("%s", sides[i].why);
    }
    side *receiver = &sides[RECEIVER];
    tb_transfer *sends = begin(&sides[SENDER], false), *receives = begin(receiver, false);
    assert_ok(tb_wait(receives, TB_COMMITTED, PATIENCE_MS));
    assert_ok(tb_wait(sends, TB_COMMITTED, PATIENCE_MS));
    tb_transfer_destroy(sends);
    tb_transfer_destroy(receives);
    receives = sends = NULL;
    fill(&sides[SENDER], 2);
    if (p->moment != IDLE)
        receives = begin(receiver, p->moment == HELD);
    if (p->moment > WAITING)
        sends = begin(&sides[SENDER], false);
    if (p->moment == HELD)
        assert_ok(tb_wait(receives, TB_DECIDED, PATIENCE_MS));
    if (p->moment == HALF_WRITTEN)
        assert_ok(tb_wait_group(receives, 0, PATIENCE_MS));
    end_agent(&agents->agents[RECEIVER], SIGKILL);
    if (receives)
        assert_int_equal(tb_wait(receives, TB_COMMITTED, PATIENCE_MS), TB_LOST);
    tb_batch_state state = {.size = sizeof state};
    assert_ok(tb_batch_query(receiver->batch, &state));
    assert_int_equal(state.version, 1);
    assert_true(state.is_torn == (p->moment == HALF_WRITTEN));
    assert_true(holds(receiver, 0, p->moment == HALF_WRITTEN ? 2 : 1));
    assert_true(holds(receiver, NTENSORS - 1, 1));
    tb_transfer_destroy(receives);
    tb_transfer_destroy(sends);
    for (int i = 0; i < 2; i++)
        close_side(&sides[i]);
}

static void test_all(void **state) {
    static const plan plans[] = {
        {false, TB_IN_PLACE, IDLE},        {true, TB_IN_PLACE, IDLE},    {true, TB_SHADOW, IDLE},
        {false, TB_IN_PLACE, WAITING},     {true, TB_IN_PLACE, WAITING}, {true, TB_SHADOW, WAITING},
        {false, TB_SHADOW, HELD},          {true, TB_SHADOW, HELD},      {false, TB_IN_PLACE, HALF_WRITTEN},
        {true, TB_IN_PLACE, HALF_WRITTEN},
    };
    two_agents *agents = *state;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        run_plan(agents, &plans[i]);
        begin_agent(&agents->agents[RECEIVER], agents->folder, two_groups[RECEIVER], 0, 1, "30");
        await_agent(&agents->agents[RECEIVER]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_all, begin_two, end_two)};
    return cmocka_run_group_tests_name("torn", tests, NULL, NULL);
}
