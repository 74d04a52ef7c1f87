/* What the tests share in which processes are members of a bus, and are killed. The first process serves a store,
 * through which it and the members talk, starts them, and watches. */
#ifndef TB_BUS_MEMBERS_TEST_H
#define TB_BUS_MEMBERS_TEST_H

#include "bus/store/store_test.h"

enum { MAX_MEMBERS = 8, BROKEN = 99 };

static inline void name_key(char *out, size_t room, const char *what, int round, int position) {
    snprintf(out, room, "%s/%d/%d", what, round, position);
}

/* What is said of the member at that position, by itself or by the first process. */
static inline tb_status say_of(tb__store *store, const char *what, int round, int position, const char *value) {
    char key[64];
    name_key(key, sizeof key, what, round, position);
    return tb__store_set(store, key, value, strlen(value), TB__STORE_PERMANENT, NULL);
}

/* Waits until it is said. `value` may be NULL. */
static inline tb_status hear_of(tb__store *store, const char *what, int round, int position, int timeout_ms,
                                char *value, size_t room) {
    char key[64];
    tb__store_value got;
    name_key(key, sizeof key, what, round, position);
    TB_TRY(await_key(store, key, timeout_ms, &got));
    if (value)
        snprintf(value, room, "%.*s", (int)got.nbytes, (const char *)got.data);
    tb__store_value_fini(&got);
    return TB_OK;
}

/* ---- In a member ----------------------------------------------------------------------------------------------- */

/* The bus has a namespace of its own in the store. */
static inline tb_status join_named_bus(const char *url, const char *bus, const char *group, int index, int size,
                                       tb_world **world) {
    char address[160];
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = PATIENCE_MS};
    snprintf(address, sizeof address, "%s?namespace=%s", url, bus);
    return tb_world_join(address, group, index, size, &opts, world);
}

static inline tb_status join_bus(const char *url, const char *group, int index, int size, tb_world **world) {
    return join_named_bus(url, "bus", group, index, size, world);
}

/* The only rank of a group, through the agent that run_with_agents has started for it. */
static inline tb_status join_agent(const char *group, tb_world **world) {
    char address[160];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    snprintf(address, sizeof address, "agent:%s/%s", getenv("TB_AGENTS"), group);
    return tb_world_join(address, group, 0, 1, &opts, world);
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

typedef struct scene {
    place place;
    tb__store_server *server;
    tb__store *store;
    pid_t pids[MAX_MEMBERS]; /* 0: is not there */
} scene;

static inline int set_up(void **state) {
    scene *s = calloc(1, sizeof *s);
    place_make(&s->place);
    assert_ok(tb__store_server_start(s->place.url, TOKEN, &s->server));
    s->store = open_store(s->place.url);
    *state = s;
    return 0;
}

static inline int tear_down(void **state) {
    scene *s = *state;
    for (int i = 0; i < MAX_MEMBERS; i++) {
        if (s->pids[i] > 0) { /* it may have ended by itself */
            kill(s->pids[i], SIGKILL);
            end_of(s->pids[i]);
        }
    }
    tb__store_close(s->store);
    tb__store_server_stop(s->server);
    place_remove(&s->place);
    free(s);
    return 0;
}

/* This program as "member", with the position and the first round as its argument. */
static inline void start_member(scene *s, int position, int round) {
    char arg[32];
    snprintf(arg, sizeof arg, "%d %d", position, round);
    s->pids[position] = start_role("member", s->place.url, arg);
}

/* The position of one that has ended, which can still be waited for; -1: none has. */
static inline int find_ended(const scene *s) {
    for (int i = 0; i < MAX_MEMBERS; i++) {
        siginfo_t info = {0};
        if (s->pids[i] > 0 && waitid(P_PID, (id_t)s->pids[i], &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
            info.si_pid == s->pids[i])
            return i;
    }
    return -1;
}

/* Waits until a member has said it. Fails as soon as any has ended without that. */
static inline void hear_member(const scene *s, const char *what, int round, int position, char *value, size_t room) {
    tb_status status;
    int ended = -1;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    /* Once more after one has ended: it may have been said just before. */
    while ((status = hear_of(s->store, what, round, position, 200, value, room)) == TB_TIMEOUT && ended < 0 &&
           tb__now_ms() < deadline_ms)
        ended = find_ended(s);
    if (status == TB_TIMEOUT && ended >= 0)
        fail_msg("member %d has ended in round %d", ended, round);
    assert_ok(status);
}

/* All end by themselves, as they should. */
static inline void end_members(scene *s) {
    for (int i = 0; i < MAX_MEMBERS; i++) {
        if (s->pids[i] == 0)
            continue;
        int end = end_of(s->pids[i]);
        s->pids[i] = 0;
        assert_int_equal(end, 0);
    }
}

/* Of the tool $TENSORBUS, with --no-gpu if TB_NO_GPU is set. */
static inline pid_t start_agent(const char *folder, const char *group) {
    extern char **environ;
    char path[80], store[80];
    const char *tool = getenv("TENSORBUS");
    pid_t pid;
    assert_non_null(tool);
    snprintf(path, sizeof path, "%s/%s", folder, group);
    snprintf(store, sizeof store, "unix:%s/store", folder);
    const char *argv[] = {tool,  "agent",    "--name", group,       "--rank", "0",         "--size", "1",  "--store",
                          store, "--socket", path,     "--timeout", "30",     "--workers", "1",      NULL, NULL};
    if (getenv("TB_NO_GPU"))
        argv[16] = "--no-gpu";
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", 1 /* O_WRONLY */, 0);
    assert_int_equal(posix_spawn(&pid, tool, &files, NULL, (char **)(uintptr_t)argv, environ), 0);
    posix_spawn_file_actions_destroy(&files);
    return pid;
}

/* Agents of the groups "a" and "b", of one rank each, and members 0 and 1, which `start` starts: all end by themselves,
 * the agents when they are told to. What is still there ends with the scene. */
static inline void run_with_agents(scene *s, void (*start)(scene *s)) {
    char folder[] = "/tmp/tb-agents-XXXXXX", path[80];
    pid_t *agents = &s->pids[MAX_MEMBERS - 2];
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < 2; i++)
        agents[i] = start_agent(folder, i == 0 ? "a" : "b");
    setenv("TB_AGENTS", folder, 1);
    start(s);
    unsetenv("TB_AGENTS");
    for (int i = 0; i < 2; i++) {
        int end = end_of(s->pids[i]);
        s->pids[i] = 0;
        assert_int_equal(end, 0);
    }
    for (int i = 2; i-- > 0;) {
        assert_int_equal(kill(agents[i], SIGTERM), 0);
        int end = end_of(agents[i]);
        agents[i] = 0;
        assert_int_equal(end, 0);
        snprintf(path, sizeof path, "%s/%s", folder, i == 0 ? "a" : "b");
        unlink(path);
    }
    assert_int_equal(rmdir(folder), 0);
}

#endif
