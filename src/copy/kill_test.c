/* Copy services between processes, and what remains when one of them is killed: those who wait for it hear at once who
 * it was, and a service of the same name works again when another has taken the seat. The first process serves the
 * store, kills, and watches. Then, those who end as soon as their own run has: the others have all that they need. */
#include "bus/members_test.h"

#include "../tests/support/tensor_memory.h"

enum { NMEMBERS = 3, VICTIM = 2, NROUNDS = 3, N = 5000 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { NLEAVING = 2 };
#else
enum { NLEAVING = 10 };
#endif

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

static void say(const member *m, const char *what) {
    must(m, say_of(m->store, what, m->round, m->seat, "") == TB_OK, what);
}

static uint32_t value(int from, int to, int round, int i) {
    return (uint32_t)(((from * NMEMBERS + to) * NROUNDS + round) * N + i);
}

static uint64_t id_of(int from, int to) {
    return (uint64_t)from * NMEMBERS + (uint64_t)to;
}

static uint32_t *bytes_of(const uint32_t *data) {
    return tensor_bytes(data);
}

/* Everybody to everybody, itself too. */
static void submit(const member *m) {
    for (int other = 0; other < NMEMBERS; other++) {
        tb_copy_view from = {.size = sizeof from, .data = m->out + other * N, .dtype = TB_U32, .ndim = 1, .shape = {N}},
                     to = from;
        to.data = m->in + other * N;
        for (int i = 0; i < N; i++) {
            bytes_of(m->out)[other * N + i] = value(m->seat, other, m->round, i);
            bytes_of(m->in)[other * N + i] = UINT32_MAX;
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
            must(m, bytes_of(m->in)[other * N + i] == value(other, m->seat, m->round, i), "a wrong value");
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
        must(m, hear_of(m->store, "killed", m->round, VICTIM, PATIENCE_MS, NULL, 0) == TB_OK, "killed");
    char wanted[32];
    snprintf(wanted, sizeof wanted, "(a %d)", VICTIM);
    must(m, tb_copy_run(m->copy, 0) == TB_LOST && strstr(tb_error_detail(), wanted), "does not name the dead");
    must(m, tb_copy_run(m->copy, 0) == TB_LOST && strstr(tb_error_detail(), wanted), "works without the dead");
    for (int i = 0; i < NMEMBERS * N; i++)
        must(m, bytes_of(m->in)[i] == UINT32_MAX, "something was written");
    tb_copy_close(m->copy);
}

static member begin(const char *url, const char *arg) {
    char *end;
    member m = {.seat = (int)strtol(arg, &end, 10)};
    m.round = (int)strtol(end, NULL, 10);
    must(&m, tb__store_open(url, TOKEN, PATIENCE_MS, &m.store) == TB_OK, "store");
    m.out = tensor_alloc(sizeof *m.out * NMEMBERS * N);
    m.in = tensor_alloc(sizeof *m.in * NMEMBERS * N);
    must(&m, m.out && m.in, "memory");
    return m;
}

static int finish(member *m) {
    tb_copy_close(m->copy);
    tb_world_destroy(m->world);
    tensor_free(m->out);
    tensor_free(m->in);
    tb__store_close(m->store);
    return 0;
}

/* One run; the victim, or all others, end right after it without a word. */
static int play_leaving(const char *url, const char *arg) {
    member m = begin(url, arg);
    char bus[16];
    bool leaves = (m.seat == VICTIM) == (m.round % 4 < 2);
    snprintf(bus, sizeof bus, "leaving%d", m.round);
    must(&m, join_named_bus(url, bus, "a", m.seat, NMEMBERS, &m.world) == TB_OK, "join");
    tb_copy_opts opts = {.size = sizeof opts, .staged = m.round % 2};
    must(&m, tb_copy_open(m.world, "c", NULL, &opts, &m.copy) == TB_OK, "open");
    exchange(&m);
    if (leaves)
        _exit(0);
    must(&m, hear_of(m.store, "left", m.round, 0, PATIENCE_MS, NULL, 0) == TB_OK, "left");
    submit(&m);
    must(&m, tb_copy_run(m.copy, 0) == TB_LOST && strstr(tb_error_detail(), "(a "), "works without the others");
    return finish(&m);
}

static int play(const char *url, const char *arg) {
    member m = begin(url, arg);
    must(&m, join_bus(url, "a", m.seat, NMEMBERS, &m.world) == TB_OK, "join");
    for (; m.round < NROUNDS; m.round++) {
        open_service(&m);
        exchange(&m);
        exchange(&m);
        if (m.round < NROUNDS - 1)
            lose(&m);
    }
    return finish(&m);
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

static void the_same_seat_again_and_again(void **state) {
    scene *s = *state;
    for (int i = 0; i < NMEMBERS; i++)
        start_member(s, i, 0);
    for (int round = 0; round < NROUNDS - 1; round++) {
        for (int i = 0; i < NMEMBERS; i++)
            hear_member(s, "held", round, i, NULL, 0);
        kill_role(s->pids[VICTIM]);
        assert_ok(say_of(s->store, "killed", round, VICTIM, ""));
        start_member(s, VICTIM, round + 1);
    }
    end_members(s);
}

static void who_is_through_may_end(void **state) {
    scene *s = *state;
    for (int round = 0; round < NLEAVING; round++) {
        for (int i = 0; i < NMEMBERS; i++) {
            char arg[32];
            snprintf(arg, sizeof arg, "%d %d", i, round);
            s->pids[i] = start_role("leaving", s->place.url, arg);
        }
        for (int i = 0; i < NMEMBERS; i++) {
            if ((i == VICTIM) != (round % 4 < 2))
                continue;
            int end = end_of(s->pids[i]);
            s->pids[i] = 0;
            assert_int_equal(end, 0);
        }
        assert_ok(say_of(s->store, "left", round, 0, ""));
        end_members(s);
    }
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    if (argc == 4 && strcmp(argv[1], "leaving") == 0)
        return play_leaving(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_same_seat_again_and_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_is_through_may_end, set_up, tear_down)};
    return cmocka_run_group_tests_name("copy kill", tests, NULL, NULL);
}
