/* Copy services between processes, and what remains when one of them is killed: those who wait for it hear at once who
 * it was, and a service of the same name works again when another has taken the seat. The first process serves the
 * store, kills, and watches. */
#include "bus/store/store_test.h"

#include <inttypes.h>

enum { NMEMBERS = 3, VICTIM = 2, NROUNDS = 3, N = 5000, BROKEN = 99 };

/* ---- In a member ----------------------------------------------------------------------------------------------- */

typedef struct member {
    int seat, round;
    tb__store *store; /* for what the first process and the members say to each other */
    tb_world *world;
    tb_copy *copy;
    uint32_t *out, *in;
} member;

static void must(const member *m, bool claim, const char *what) {
    if (claim)
        return;
    fprintf(stderr, "member %d, round %d: %s: %s\n", m->seat, m->round, what, tb_error_detail());
    exit(BROKEN);
}

static void name_key(char *out, size_t room, const char *what, int round, int seat) {
    snprintf(out, room, "%s/%d/%d", what, round, seat);
}

static void say(const member *m, const char *what) {
    char key[64];
    name_key(key, sizeof key, what, m->round, m->seat);
    must(m, tb__store_set(m->store, key, "", 0, TB__STORE_PERMANENT, NULL) == TB_OK, key);
}

static void hear(const member *m, const char *what, int seat) {
    char key[64];
    tb__store_value got = {0};
    name_key(key, sizeof key, what, m->round, seat);
    must(m, tb__store_wait(m->store, key, PATIENCE_MS, &got) == TB_OK, key);
    tb__store_value_fini(&got);
}

static uint32_t value(int from, int to, int round, int i) {
    return (uint32_t)(((from * NMEMBERS + to) * NROUNDS + round) * N + i);
}

static uint64_t id_of(int from, int to) {
    return (uint64_t)from * NMEMBERS + (uint64_t)to;
}

/* Everybody to everybody, itself too. */
static void submit(const member *m) {
    for (int other = 0; other < NMEMBERS; other++) {
        tb_copy_view from = {.data = m->out + other * N, .dtype = TB_U32, .ndim = 1, .shape = {N}}, to = from;
        to.data = m->in + other * N;
        for (int i = 0; i < N; i++) {
            m->out[other * N + i] = value(m->seat, other, m->round, i);
            m->in[other * N + i] = UINT32_MAX;
        }
        must(m, tb_copy_submit_send(m->copy, &from, 1, other, id_of(m->seat, other)) == TB_OK, "send");
        must(m, tb_copy_submit_recv(m->copy, &to, 1, other, id_of(other, m->seat)) == TB_OK, "recv");
    }
}

static void exchange(const member *m) {
    submit(m);
    must(m, tb_copy_run(m->copy, 0) == TB_OK, "run");
    for (int other = 0; other < NMEMBERS; other++) {
        for (int i = 0; i < N; i++)
            must(m, m->in[other * N + i] == value(other, m->seat, m->round, i), "a wrong value");
    }
}

/* The store may hear of a death later than the others do. */
static void open_service(member *m) {
    tb_copy_opts opts = {.size = sizeof opts, .staged = m->round == 1};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb_status status;
    do {
        status = tb_copy_open(m->world, "c", NULL, &opts, &m->copy);
    } while (status == TB_LOST && m->round > 0 && tb__now_ms() < deadline_ms);
    must(m, status == TB_OK, "open");
}

/* Round 0: it does not come to the run. Round 1: it waits in it, and the others come when it is dead. */
static void lose(const member *m) {
    submit(m);
    if (m->seat == VICTIM) {
        say(m, "held");
        if (m->round == 1)
            tb_copy_run(m->copy, PATIENCE_MS);
        poll(NULL, 0, PATIENCE_MS);
        must(m, false, "nobody has killed it");
    }
    say(m, "held");
    if (m->round == 1)
        hear(m, "killed", VICTIM);
    char wanted[32];
    snprintf(wanted, sizeof wanted, "(a %d)", VICTIM);
    must(m, tb_copy_run(m->copy, 0) == TB_LOST && strstr(tb_error_detail(), wanted), "does not name the dead");
    must(m, tb_copy_run(m->copy, 0) == TB_LOST && strstr(tb_error_detail(), wanted), "works without the dead");
    for (int i = 0; i < NMEMBERS * N; i++)
        must(m, m->in[i] == UINT32_MAX, "something was written");
    tb_copy_close(m->copy);
}

static int play(const char *url, const char *arg) {
    char *end, address[128];
    member m = {.seat = (int)strtol(arg, &end, 10)};
    m.round = (int)strtol(end, NULL, 10);
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = PATIENCE_MS};
    must(&m, tb__store_open(url, TOKEN, PATIENCE_MS, &m.store) == TB_OK, "store");
    snprintf(address, sizeof address, "%s?namespace=bus", url);
    must(&m, tb_world_join(address, "a", m.seat, NMEMBERS, &opts, &m.world) == TB_OK, "join");
    must(&m, tb_alloc(sizeof *m.out * NMEMBERS * N, (void **)&m.out) == TB_OK, "memory");
    m.in = malloc(sizeof *m.in * NMEMBERS * N);
    must(&m, m.in != NULL, "memory");
    for (; m.round < NROUNDS; m.round++) {
        open_service(&m);
        exchange(&m);
        exchange(&m);
        if (m.round < NROUNDS - 1)
            lose(&m);
    }
    tb_copy_close(m.copy);
    tb_world_destroy(m.world);
    tb_free(m.out);
    free(m.in);
    tb__store_close(m.store);
    return 0;
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

typedef struct scene {
    place place;
    tb__store_server *server;
    tb__store *store;
    pid_t pids[NMEMBERS]; /* 0: has ended */
} scene;

static int set_up(void **state) {
    scene *s = calloc(1, sizeof *s);
    place_make(&s->place);
    assert_ok(tb__store_server_start(s->place.url, TOKEN, &s->server));
    s->store = open_store(s->place.url);
    *state = s;
    return 0;
}

static int tear_down(void **state) {
    scene *s = *state;
    for (int i = 0; i < NMEMBERS; i++) {
        if (s->pids[i] > 0) {
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

static void start(scene *s, int seat, int round) {
    char arg[32];
    snprintf(arg, sizeof arg, "%d %d", seat, round);
    s->pids[seat] = start_role("member", s->place.url, arg);
}

/* Fails as soon as a member has ended. */
static void hear_of(scene *s, const char *what, int round, int seat) {
    char key[64];
    tb__store_value got = {0};
    tb_status status = TB_TIMEOUT;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    name_key(key, sizeof key, what, round, seat);
    while (status == TB_TIMEOUT && tb__now_ms() < deadline_ms) {
        for (int i = 0; i < NMEMBERS; i++) {
            if (waitpid(s->pids[i], NULL, WNOHANG) == s->pids[i]) {
                s->pids[i] = 0;
                fail_msg("member %d has ended in round %d", i, round);
            }
        }
        status = tb__store_wait(s->store, key, 200, &got);
    }
    assert_ok(status);
    tb__store_value_fini(&got);
}

static void the_same_seat_again_and_again(void **state) {
    scene *s = *state;
    for (int i = 0; i < NMEMBERS; i++)
        start(s, i, 0);
    for (int round = 0; round < NROUNDS - 1; round++) {
        char key[64];
        for (int i = 0; i < NMEMBERS; i++)
            hear_of(s, "held", round, i);
        kill_role(s->pids[VICTIM]);
        name_key(key, sizeof key, "killed", round, VICTIM);
        set_text(s->store, key, "");
        start(s, VICTIM, round + 1);
    }
    for (int i = 0; i < NMEMBERS; i++) {
        int end = end_of(s->pids[i]);
        s->pids[i] = 0;
        assert_int_equal(end, 0);
    }
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_same_seat_again_and_again, set_up, tear_down)};
    return cmocka_run_group_tests_name("copy kill", tests, NULL, NULL);
}
