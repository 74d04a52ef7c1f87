/* Worlds whose store is killed: what is set up goes on, and new pairs can be made afterwards. */
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

int main(int argc, char **argv) {
    if (argc == 2)
        return serve(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(during_transfers), cmocka_unit_test(during_set_up)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
