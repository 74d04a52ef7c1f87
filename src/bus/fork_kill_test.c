/* A rank is killed while a child that it has forked lives on: peers and the store notice that at once, and somebody
 * else can take the seat. */
#include "bus/members_test.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { NOTICE_MS = 20000 };
#else
enum { NOTICE_MS = 3000 };
#endif

enum { VICTIM, CHILD };

static const char *const groups[] = {"a", "b"};

typedef struct member {
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    float value;
} member;

static tb_status join(const char *url, const char *transport, int side, member *m) {
    char address[160];
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = PATIENCE_MS, .transport = transport};
    tb_tensor t = {.size = sizeof t, .data = &m->value, .dtype = TB_F32};
    snprintf(address, sizeof address, "%s?namespace=bus", url);
    TB_TRY(tb_world_join(address, groups[side], 0, 1, &opts, &m->world));
    TB_TRY(tb_pair_create(m->world, "p", groups[!side], "mesh=1 place=R", NULL, &m->pair));
    TB_TRY(tb_batch_create(m->world, "step", NULL, &m->batch));
    TB_TRY(tb_batch_add(m->batch, m->pair, "t", &t));
    return tb_batch_register(m->batch, 0);
}

static void leave(member *m) {
    tb_batch_destroy(m->batch);
    tb_pair_destroy(m->pair);
    tb_world_destroy(m->world);
}

/* Joins, forks, says so, and waits for its end; the child waits for its own. */
static int play_victim(const char *url, const char *transport) {
    member m = {.value = 1};
    char number[16];
    tb__store *store;
    if (join(url, transport, 0, &m) != TB_OK || tb__store_open(url, TOKEN, PATIENCE_MS, &store) != TB_OK) {
        fprintf(stderr, "the victim: %s\n", tb_error_detail());
        return BROKEN;
    }
    pid_t child = fork();
    if (child == 0) {
        for (;;)
            pause();
    }
    snprintf(number, sizeof number, "%d", (int)child);
    if (child < 0 || say_of(store, "child", 0, CHILD, number) != TB_OK)
        return BROKEN;
    for (;;)
        pause();
}

static void kill_parent(scene *s, const char *transport) {
    member m = {.value = -1};
    tb_transfer *t = NULL;
    char number[16];
    s->pids[VICTIM] = start_role("victim", s->place.url, transport);
    assert_ok(join(s->place.url, transport, 1, &m));
    assert_ok(hear_of(s->store, "child", 0, CHILD, PATIENCE_MS, number, sizeof number));
    pid_t child = (pid_t)strtol(number, NULL, 10);
    assert_ok(tb_recv(m.batch, NULL, &t));
    kill_role(s->pids[VICTIM]);
    s->pids[VICTIM] = 0;
    int64_t begun_ms = tb__now_ms();
    tb_status status = tb_wait(t, TB_ARRIVED, NOTICE_MS);
    int64_t noticed_ms = tb__now_ms() - begun_ms;
    tb_transfer_destroy(t);
    /* The seat is free, while the child is still there. */
    tb_world *next = NULL;
    char address[160];
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = NOTICE_MS, .transport = transport};
    snprintf(address, sizeof address, "%s?namespace=bus", s->place.url);
    tb_status seated = tb_world_join(address, "a", 0, 1, &opts, &next);
    bool is_alive = kill(child, SIGKILL) == 0;
    assert_int_equal(status, TB_LOST);
    assert_true(noticed_ms < NOTICE_MS);
    assert_int_equal(seated, TB_OK);
    assert_true(is_alive);
    assert_true(m.value == -1);
    tb_world_destroy(next);
    leave(&m);
}

static void over_shm(void **state) {
    kill_parent(*state, "shm");
}

static void over_ucx(void **state) {
    scene *s = *state;
    tb_world *world = NULL;
    char address[160];
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .transport = "ucx"};
    snprintf(address, sizeof address, "%s?namespace=probe", s->place.url);
    tb_status status = tb_world_join(address, "probe", 0, 1, &opts, &world);
    tb_world_destroy(world);
    if (status != TB_OK) {
        print_message("there is no transport ucx: %s\n", tb_error_detail());
        skip();
    }
    kill_parent(s, "ucx");
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "victim") == 0)
        return play_victim(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(over_shm, set_up, tear_down),
        cmocka_unit_test_setup_teardown(over_ucx, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
