/* Worlds whose store is killed, or silent: what is set up goes on, and new pairs can be made afterwards. Shadows are
 * decided in the store that is there. */
#include "bus/bus_test.h"

#include "bus/store/server.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

/* The process that serves the store, which a rank kills. */
typedef struct victim {
    pid_t pid;
    int delay_ms;
} victim;

static void sleep_until_killed(void) {
    for (;;)
        pause();
}

static int serve(const char *url) {
    tb__store_server *server;
    if (tb__store_server_start(url, NULL, &server) != TB_OK)
        return 1;
    sleep_until_killed();
    return 0;
}

/* Returns once it answers. */
static pid_t start_server(const char *url) {
    extern char **environ;
    char path[4096];
    assert_non_null(realpath(program_invocation_name, path));
    char *argv[] = {path, (char *)(uintptr_t)url, NULL};
    pid_t pid = -1;
    assert_int_equal(posix_spawn(&pid, path, NULL, NULL, argv, environ), 0);
    tb__store *store;
    tb_status status;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while ((status = tb__store_open(url, NULL, PATIENCE_MS, &store)) == TB_IO && tb__now_ms() < deadline_ms)
        poll(NULL, 0, 1);
    check_ok(status);
    tb__store_close(store);
    return pid;
}

static void kill_server(const victim *v) {
    poll(NULL, 0, v->delay_ms);
    check(kill(v->pid, SIGKILL) == 0);
    check(waitpid(v->pid, NULL, 0) == v->pid);
}

static bool is_killer(const rank *r) {
    return is_a(r) && r->index == 0;
}

/* A pair and a batch that did not exist before. */
static void make_another(rank *r) {
    setup s = {0};
    const char *layout = is_a(r) ? "mesh=2 place=S1" : "mesh=2 place=S0";
    part_init(&s.w, layout, r->index, 16, 8);
    check_ok(tb_pair_create(r->world, "another", other_group(r), layout, NULL, &s.pair));
    check_ok(tb_batch_create(r->world, "another", NULL, &s.batch));
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    check_ok(tb_batch_register(s.batch, 0));
    exchange(r, &s, "b", 3);
    tear_down(&s);
}

static void lose_while_moving(rank *r) {
    enum { NVERSIONS = 60 };
    setup s = {0};
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 32, 24, NULL);
    for (uint32_t version = 1; version <= NVERSIONS; version++) {
        if (version == 5 && is_killer(r))
            kill_server(r->scene->shared);
        exchange(r, &s, version % 2 ? "a" : "b", version);
    }
    make_another(r);
    exchange(r, &s, "a", NVERSIONS + 1);
    meet(r);
    tear_down(&s);
}

static void lose_while_setting_up(rank *r) {
    setup s = {0};
    check_ok(tb_world_wait(r->world, other_group(r), 0));
    meet(r);
    if (is_killer(r))
        kill_server(r->scene->shared);
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 32, 24, NULL);
    exchange(r, &s, "a", 1);
    make_another(r);
    meet(r);
    tear_down(&s);
}

/* ---- Shadows ---------------------------------------------------------------------------------------------------- */

static const tb_batch_opts shadow_opts = {.size = sizeof shadow_opts, .commit = TB_SHADOW};

static tb_transfer *begin(const rank *r, setup *s, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(&s->w, version);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    return t;
}

static void commit(const rank *r, setup *s, uint32_t version) {
    tb_transfer *t = begin(r, s, version);
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, version));
    tb_transfer_destroy(t);
}

/* Returns when this rank is at the store that came after, as all others are. */
static void change_store(rank *r) {
    meet(r);
    if (is_killer(r))
        kill_server(r->scene->shared);
    meet(r);
    make_another(r);
    meet(r);
}

static void lose_while_idle(rank *r) {
    setup s = {0};
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 32, 24, &shadow_opts);
    for (uint32_t version = 1; version <= 3; version++)
        commit(r, &s, version);
    change_store(r);
    for (uint32_t version = 4; version <= 6; version++)
        commit(r, &s, version);
    meet(r);
    tear_down(&s);
}

/* One receiver would ask in the store that is lost, the other in the one that came after: nothing can be decided in
 * both, so the first receiver gives it up, for all. */
static void lose_while_prepared(rank *r) {
    setup s = {0};
    tb_transfer *t = NULL;
    bool is_late = !is_a(r) && r->index == 0;
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 32, 24, &shadow_opts);
    commit(r, &s, 1);
    if (!is_late)
        t = begin(r, &s, 2);
    if (!is_a(r) && !is_late)
        check_ok(tb_wait(t, TB_ARRIVED, -1));
    change_store(r);
    if (is_late)
        t = begin(r, &s, 2);
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_LOST, "(b 1) was not at the same store as");
    check(is_a(r) || part_holds(&s.w, 1));
    tb_transfer_destroy(t);
    meet(r);
    commit(r, &s, 3);
    meet(r);
    tear_down(&s);
}

/* The store is silent for longer than a question waits for its answer, and there is time to ask again. */
static void wait_while_silent(rank *r) {
    const victim *v = r->scene->shared;
    setup s = {0};
    set_up(r, &s, "mesh=2 place=S0", "mesh=2 place=S1", 32, 24, &shadow_opts);
    commit(r, &s, 1);
    meet(r);
    if (is_killer(r)) {
        int status;
        check(kill(v->pid, SIGSTOP) == 0);
        check(waitpid(v->pid, &status, WUNTRACED) == v->pid && WIFSTOPPED(status));
    }
    meet(r);
    tb_transfer *t = begin(r, &s, 2);
    if (is_killer(r)) {
        check_fails(tb_wait(t, TB_COMMITTED, 4000), TB_TIMEOUT, "to commit");
        check(kill(v->pid, SIGCONT) == 0);
    }
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 2));
    tb_transfer_destroy(t);
    change_store(r);
    tear_down(&s);
}

/* ---- Silence ---------------------------------------------------------------------------------------------------- */

/* The store does not answer, and the connection to it stands: a pair's calls keep to their own time, whatever the world
 * would allow. All of them together take far less than its timeout. */
static void calls_while_silent(void **state) {
    (void)state;
    enum { WORLD_MS = 120000, BOUND_MS = 20000, NPAIRS = 8 };
    static const char layout[] = "mesh=1 place=R";
    scene s;
    scene_init(&s);
    pid_t pid = start_server(s.url);
    tb_world *world;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = WORLD_MS};
    tb_pair_opts unmet = {.size = sizeof unmet, .no_wait = true}, brief = {.size = sizeof brief, .timeout_ms = 100};
    tb_pair *pairs[NPAIRS], *late;
    char name[16];
    int end;
    check_ok(tb_world_join(s.url, "a", 0, 1, &opts, &world));
    for (int i = 0; i < NPAIRS; i++) {
        snprintf(name, sizeof name, "p%d", i);
        check_ok(tb_pair_create(world, name, "b", layout, &unmet, &pairs[i]));
    }
    check(kill(pid, SIGSTOP) == 0);
    check(waitpid(pid, &end, WUNTRACED) == pid && WIFSTOPPED(end));
    int64_t begun_ms = tb__now_ms();
    tb_pair_destroy(pairs[0]);
    check_fails(tb_pair_create(world, "late", "b", layout, &brief, &late), TB_TIMEOUT, "nothing within");
    check_fails(tb_pair_create(world, "late", "b", layout, &brief, &late), TB_TIMEOUT, "within");
    for (int i = 1; i < NPAIRS; i++)
        tb_pair_destroy(pairs[i]);
    tb_world_destroy(world);
    check(tb__now_ms() - begun_ms < BOUND_MS);
    tb__store_server *server;
    check(kill(pid, SIGKILL) == 0);
    check(waitpid(pid, NULL, 0) == pid);
    check_ok(tb__store_server_start(s.url, NULL, &server)); /* which removes what the other has left */
    tb__store_server_stop(server);
    scene_fini(&s);
}

/* ---- Scenes ----------------------------------------------------------------------------------------------------- */

static void run_with_server(void (*body)(rank *r), int delay_ms) {
    scene s;
    scene_init(&s);
    victim v = {.pid = start_server(s.url), .delay_ms = delay_ms};
    run_ranks_in(&s, body, 2, 2, &v);
}

static void during_transfers(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++)
        run_with_server(lose_while_moving, i);
}

static void during_set_up(void **state) {
    (void)state;
    for (int i = 0; i < 10; i++)
        run_with_server(lose_while_setting_up, i);
}

static void between_shadows(void **state) {
    (void)state;
    run_with_server(lose_while_idle, 0);
}

static void between_the_prepared(void **state) {
    (void)state;
    run_with_server(lose_while_prepared, 0);
}

static void while_silent(void **state) {
    (void)state;
    run_with_server(wait_while_silent, 0);
}

int main(int argc, char **argv) {
    if (argc == 2)
        return serve(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(during_transfers), cmocka_unit_test(during_set_up),
                                       cmocka_unit_test(between_shadows),  cmocka_unit_test(between_the_prepared),
                                       cmocka_unit_test(while_silent),     cmocka_unit_test(calls_while_silent)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
