/* Clients of agents that end as soon as their own transfer is committed, and agents that are killed then: the other
 * side has all that it needs. And clients that are idle while sends are given up: the next one arrives. */
#include "bus/agent/process_test.h"

#include <pthread.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 4, GIVEN_UP = 70 };
#else
enum { ROUNDS = 16, GIVEN_UP = 200 };
#endif

enum { COUNT = 200000, BROKEN = 99 };

/* ---- A client --------------------------------------------------------------------------------------------------- */

typedef struct user {
    int side;
    program *client;
    program_batch *batch;
    uint32_t *data;
    bool is_shared;
} user;

static uint32_t value_of(uint32_t version, size_t i) {
    return version * COUNT + (uint32_t)i;
}

static tb_status open_user(user *u, const char *path, const char *name, bool is_shadow) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    tb_batch_opts batch = {.size = sizeof batch, .commit = is_shadow ? TB_SHADOW : TB_IN_PLACE};
    TB_TRY(program_connect(path, &opts, &u->client));
    if (u->is_shared)
        TB_TRY(tb_alloc(COUNT * sizeof *u->data, (void **)&u->data));
    else
        u->data = malloc(COUNT * sizeof *u->data);
    TB_TRY(program_pair(u->client, name, two_groups[!u->side], "mesh=1 place=R", 0));
    TB_TRY(program_batch_create(u->client, name, &batch, &u->batch));
    tb_tensor t = {.size = sizeof t, .data = u->data, .dtype = TB_U32, .ndim = 1, .shape = {COUNT}};
    TB_TRY(program_add(u->batch, name, "w", &t));
    return program_register(u->batch, 0);
}

static void close_user(user *u) {
    program_batch_destroy(u->batch);
    program_close(u->client);
    if (u->is_shared)
        tb_free(u->data);
    else
        free(u->data);
}

static void fill(const user *u, uint32_t version) {
    for (size_t i = 0; i < COUNT; i++)
        u->data[i] = u->side == 0 ? value_of(version, i) : UINT32_MAX;
}

static bool holds(const user *u, uint32_t version) {
    for (size_t i = 0; i < COUNT; i++) {
        if (u->data[i] != value_of(version, i))
            return false;
    }
    return true;
}

/* ---- Clients that leave ------------------------------------------------------------------------------------------ */

static void must(const user *u, const char *name, bool claim, const char *what) {
    if (claim)
        return;
    fprintf(stderr, "side %d, %s: %s: %s\n", u->side, name, what, tb_error_detail());
    exit(BROKEN);
}

/* This program as a client: the agent's socket, its side, and the round. One side ends at once. */
static int play(const char *path, const char *arg) {
    char *end, name[16];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    user u = {.side = (int)strtol(arg, &end, 10)};
    int round = (int)strtol(end, NULL, 10);
    snprintf(name, sizeof name, "round %d", round);
    u.is_shared = round / 2 % 2;
    must(&u, name, open_user(&u, path, name, round / 4 % 2) == TB_OK, "open");
    fill(&u, 1);
    program_transfer_opts opts = {.no_wait = round / 8 % 2};
    must(&u, name, program_transfer(u.batch, u.side == 0, &opts) == TB_OK, "transfer");
    if (opts.no_wait)
        must(&u, name, program_wait(u.batch, u.side == 0, TB_COMMITTED, -1) == TB_OK, "wait");
    if (u.side == 0 && round % 2 == 0)
        _exit(0);
    must(&u, name, holds(&u, 1), "an element is wrong");
    if (u.side == 1 && round % 2 == 1)
        _exit(0);
    close_user(&u);
    return 0;
}

static pid_t start_client(const agent_process *agent, int side, int round) {
    extern char **environ;
    char arg[32];
    pid_t pid;
    snprintf(arg, sizeof arg, "%d %d", side, round);
    const char *argv[] = {"/proc/self/exe", "client", agent->path, arg, NULL};
    assert_int_equal(posix_spawn(&pid, argv[0], NULL, NULL, (char **)(uintptr_t)argv, environ), 0);
    return pid;
}

static void clients_end_when_they_are_through(void **state) {
    const two_agents *s = *state;
    for (int round = 0; round < ROUNDS; round++) {
        pid_t pids[2];
        for (int side = 0; side < 2; side++)
            pids[side] = start_client(&s->agents[side], side, round);
        int ends[2] = {end_of(pids[0]), end_of(pids[1])};
        assert_int_equal(ends[0], 0);
        assert_int_equal(ends[1], 0);
    }
}

/* ---- Agents that leave ------------------------------------------------------------------------------------------- */

typedef struct call {
    user *user;
    const agent_process *agent;
    enum { OPEN, MOVE } what;
    bool is_shadow, kills; /* its agent, when it is through */
    tb_status status;
    char why[600];
    pthread_t thread;
} call;

static void *call_main(void *arg) {
    call *c = arg;
    if (c->what == OPEN)
        c->status = open_user(c->user, c->agent->path, "p", c->is_shadow);
    else
        c->status = program_transfer(c->user->batch, c->user->side == 0, NULL);
    snprintf(c->why, sizeof c->why, "%s", c->status == TB_OK ? "" : tb_error_detail());
    if (c->what == MOVE && c->kills)
        kill(c->agent->pid, SIGKILL);
    return NULL;
}

static void call_both(call calls[2], int what) {
    for (int i = 0; i < 2; i++) {
        calls[i].what = what;
        assert_int_equal(pthread_create(&calls[i].thread, NULL, call_main, &calls[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(calls[i].thread, NULL), 0);
    for (int i = 0; i < 2; i++) {
        if (calls[i].status != TB_OK)
            fail_msg("side %d: %s", i, calls[i].why);
    }
}

static void open_both(const two_agents *s, user users[2], call calls[2], bool is_shadow) {
    for (int i = 0; i < 2; i++) {
        users[i] = (user){.side = i, .is_shared = is_shadow};
        calls[i] = (call){.user = &users[i], .agent = &s->agents[i], .is_shadow = is_shadow};
    }
    call_both(calls, OPEN);
}

static void agents_end_when_they_are_through(void **state) {
    two_agents *s = *state;
    for (int round = 0; round < ROUNDS / 2; round++) {
        user users[2];
        call calls[2];
        int victim = round % 2;
        open_both(s, users, calls, round / 2 % 2);
        for (int i = 0; i < 2; i++)
            fill(&users[i], 1);
        calls[victim].kills = true;
        call_both(calls, MOVE);
        assert_true(holds(&users[1], 1));
        for (int i = 0; i < 2; i++)
            close_user(&users[i]);
        for (int i = 2; i-- > 0;) /* the store may have been in the one that was killed */
            end_agent(&s->agents[i], SIGKILL);
        for (int i = 0; i < 2; i++) {
            begin_agent(&s->agents[i], s->folder, two_groups[i], 0, 1, "30");
            await_agent(&s->agents[i]);
        }
    }
}

/* ---- Clients that are idle --------------------------------------------------------------------------------------- */

static void *receive_next(void *arg) {
    call *c = arg;
    c->status = program_transfer(c->user->batch, false, NULL);
    snprintf(c->why, sizeof c->why, "%s", c->status == TB_OK ? "" : tb_error_detail());
    return NULL;
}

static void idle_clients_hear_of_the_next(void **state) {
    const two_agents *s = *state;
    user users[2];
    call calls[2];
    open_both(s, users, calls, false);
    for (uint32_t round = 1; round <= 2; round++) {
        program_transfer_opts hasty = {.timeout_ms = 1};
        for (int i = 0; i < GIVEN_UP; i++)
            assert_int_equal(program_transfer(users[0].batch, true, &hasty), TB_TIMEOUT);
        fill(&users[0], round);
        fill(&users[1], round);
        assert_int_equal(pthread_create(&calls[1].thread, NULL, receive_next, &calls[1]), 0);
        assert_ok(program_transfer(users[0].batch, true, NULL));
        assert_int_equal(pthread_join(calls[1].thread, NULL), 0);
        if (calls[1].status != TB_OK)
            fail_msg("%s", calls[1].why);
        assert_true(holds(&users[1], round));
    }
    for (int i = 0; i < 2; i++)
        close_user(&users[i]);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "client") == 0)
        return play(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(clients_end_when_they_are_through, begin_two, end_two),
        cmocka_unit_test_setup_teardown(agents_end_when_they_are_through, begin_two, end_two),
        cmocka_unit_test_setup_teardown(idle_clients_hear_of_the_next, begin_two, end_two),
    };
    return cmocka_run_group_tests_name("leave", tests, NULL, NULL);
}
