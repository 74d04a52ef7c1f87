/* What remains when a process is killed in the middle of a transfer. Eight processes in two groups go through as many
 * rounds; in each, one of them is killed while all hold a transfer that nobody can have finished, and another takes its
 * seat. The first process serves the store, kills, and watches. */
#include "bus/members_test.h"

#include "../tests/support/tensor_memory.h"

#include <dirent.h>
#include <inttypes.h>
#include <sys/prctl.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { NOTICE_MS = 20000 };
#else
enum { NOTICE_MS = 2000 };
#endif

enum { SEATS = 4, NMEMBERS = 2 * SEATS, ROWS = 64, COLUMNS = 48 };

/* ---- In a member ----------------------------------------------------------------------------------------------- */

/* Two tensors, of which the second can't arrive before the first was taken. */
typedef struct member {
    const char *url;
    int position; /* 0 to 3 are of group "a", 4 to 7 of group "b" */
    int round;
    tb__store *store; /* for what the first process and the members say to each other */
    tb_world *world;
    tb_pair *pair, *small_pair;
    tb_batch *batch, *small_batch;
    float *memory[2], small;
} member;

static void must(const member *m, tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "member %d, round %d: %s: %s\n", m->position, m->round, tb_status_string(status),
            tb_error_detail());
    exit(BROKEN);
}

static void must_be(const member *m, bool claim, const char *what) {
    if (claim)
        return;
    fprintf(stderr, "member %d, round %d: %s\n", m->position, m->round, what);
    exit(BROKEN);
}

static bool is_sender(const member *m) {
    return m->position < SEATS;
}

/* With whom it shares the small pair. */
static int other_of(int position) {
    return (position + SEATS) % NMEMBERS;
}

static void say(const member *m, const char *what, const char *value) {
    must(m, say_of(m->store, what, m->round, m->position, value));
}

static void join(member *m) {
    char alone[32];
    must(m, join_bus(m->url, is_sender(m) ? "a" : "b", m->position % SEATS, SEATS, &m->world));
    snprintf(alone, sizeof alone, "alone %d", m->position);
    must(m, tb_world_enter(m->world, alone, 0, 1));
}

static void say_rank(const member *m) {
    char rank[64];
    snprintf(rank, sizeof rank, "%" PRId32 " %" PRIu64, tb_world_rank(m->world), tb_world_incarnation(m->world));
    say(m, "rank", rank);
}

static tb_status make_main(member *m) {
    tb_batch_opts opts = {.size = sizeof opts, .group_window = 1, .staged = m->round % 2, .bucket_size = 1000};
    TB_TRY(tb_pair_create(m->world, "main", is_sender(m) ? "b" : "a",
                          is_sender(m) ? "mesh=4 place=S0" : "mesh=4 place=S1", NULL, &m->pair));
    TB_TRY(tb_batch_create(m->world, "main", &opts, &m->batch));
    for (uint32_t i = 0; i < 2; i++) {
        tb_tensor t = {
            .size = sizeof t, .data = m->memory[i], .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}, .group = i};
        TB_TRY(tb_batch_add(m->batch, m->pair, i ? "second" : "first", &t));
    }
    return TB_OK;
}

/* With one process of the other group, and nobody else. */
static void make_small(member *m) {
    char name[32], here[32], there[32];
    snprintf(name, sizeof name, "small %d", m->position % SEATS);
    snprintf(here, sizeof here, "alone %d", m->position);
    snprintf(there, sizeof there, "alone %d", other_of(m->position));
    tb_pair_opts opts = {.size = sizeof opts, .group = here};
    tb_tensor t = {.size = sizeof t, .data = &m->small, .dtype = TB_F32};
    must(m, tb_pair_create(m->world, name, there, "mesh=1 place=R", &opts, &m->small_pair));
    must(m, tb_batch_create(m->world, "small", NULL, &m->small_batch));
    must(m, tb_batch_add(m->small_batch, m->small_pair, "t", &t));
}

static void remove_main(member *m) {
    tb_batch_destroy(m->batch);
    tb_pair_destroy(m->pair);
    m->batch = NULL;
    m->pair = NULL;
}

static void remove_small(member *m) {
    tb_batch_destroy(m->small_batch);
    tb_pair_destroy(m->small_pair);
}

static tb_transfer *begin(const member *m, tb_batch *batch) {
    tb_transfer *t = NULL;
    must(m, (is_sender(m) ? tb_send : tb_recv)(batch, NULL, &t));
    return t;
}

static void move_small(member *m, float value) {
    m->small = is_sender(m) ? value : -1;
    tb_transfer *t = begin(m, m->small_batch);
    must(m, tb_wait(t, TB_COMMITTED, -1));
    must_be(m, m->small == value, "the small tensor is wrong");
    tb_transfer_destroy(t);
}

/* The local part's element i, in the whole tensor. */
static int index_of(const member *m, int i) {
    int width = is_sender(m) ? COLUMNS : COLUMNS / SEATS, seat = m->position % SEATS;
    int row = i / width + (is_sender(m) ? seat * (ROWS / SEATS) : 0);
    return row * COLUMNS + i % width + (is_sender(m) ? 0 : seat * width);
}

static void fill(const member *m, int version) {
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < ROWS * COLUMNS / SEATS; i++)
            ((float *)tensor_bytes(m->memory[t]))[i] =
                is_sender(m) ? (float)(version * 100000 + t * 10000 + index_of(m, i)) : -1;
    }
}

static void check(const member *m, int version) {
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < ROWS * COLUMNS / SEATS; i++)
            must_be(m,
                    ((float *)tensor_bytes(m->memory[t]))[i] == (float)(version * 100000 + t * 10000 + index_of(m, i)),
                    "a tensor is wrong");
    }
}

static tb_status move_main(const member *m, int version) {
    tb_transfer *t = NULL;
    fill(m, version);
    TB_TRY((is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t));
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    if (status == TB_OK)
        check(m, version);
    return status;
}

/* Again, until everybody has heard who is dead. */
static void meet(member *m) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (;;) {
        tb_status status = make_main(m);
        if (status == TB_OK)
            status = move_main(m, m->round);
        if (status == TB_OK)
            return;
        if (status != TB_LOST || m->round == 0 || tb__now_ms() > deadline_ms)
            must(m, status);
        remove_main(m);
    }
}

/* The first tensor has arrived, and nobody takes it. */
static void hold(const member *m, const tb_transfer *t) {
    tb_transfer_state state = {.size = sizeof state};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    do {
        struct pollfd news = {.fd = tb_transfer_fd(t), .events = POLLIN};
        tb_transfer_query(t, &state);
        must(m, state.status);
        must_be(m, tb__now_ms() < deadline_ms, "the first tensor does not arrive");
        if (!is_sender(m) && state.groups_done == 0)
            poll(&news, 1, 1000);
    } while (!is_sender(m) && state.groups_done == 0);
    must_be(m, !(state.events & (TB_COMMITTED | TB_ARRIVED | TB_RELEASED)), "it is over too early");
}

static void lose(const member *m, int victim) {
    char rank[64], wanted[64], when[32];
    must(m, hear_of(m->store, "rank", m->round, victim, PATIENCE_MS, rank, sizeof rank));
    fill(m, 50 + m->round);
    tb_transfer *t = begin(m, m->batch);
    hold(m, t);
    say(m, "held", "");
    tb_status status = is_sender(m) ? tb_wait(t, TB_COMMITTED, -1) : tb_wait_group(t, 1, PATIENCE_MS);
    snprintf(when, sizeof when, "%" PRId64, tb__now_ms());
    snprintf(wanted, sizeof wanted, "rank %d (%s %d)", (int)strtol(rank, NULL, 10), victim < SEATS ? "a" : "b",
             victim % SEATS);
    if (status != TB_LOST || !strstr(tb_error_detail(), wanted)) {
        fprintf(stderr, "member %d, round %d: %s: '%s' does not name %s\n", m->position, m->round,
                tb_status_string(status), tb_error_detail(), wanted);
        exit(BROKEN);
    }
    say(m, "lost", when);
    tb_transfer_destroy(t);
}

/* What the victim had no part in goes on; what it had is lost at once. */
static void go_on(member *m, int victim) {
    if (m->position != other_of(victim)) {
        move_small(m, (float)(1000 + m->round));
        return;
    }
    tb_transfer *t = NULL;
    tb_status status = (is_sender(m) ? tb_send : tb_recv)(m->small_batch, NULL, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    must_be(m, status == TB_LOST, "the pair with the dead one is not lost");
    tb_transfer_destroy(t);
}

static void take_part(member *m, int first_round) {
    bool has_small = false;
    m->round = first_round;
    join(m);
    for (;; m->round++) {
        int victim = m->round;
        say_rank(m);
        meet(m);
        if (!has_small) {
            make_small(m);
            move_small(m, (float)m->round);
            has_small = true;
        }
        if (victim == NMEMBERS)
            return;
        lose(m, victim);
        go_on(m, victim);
        remove_main(m);
        if (m->position == other_of(victim)) {
            remove_small(m);
            has_small = false;
        }
    }
}

/* A role, as the argument says: which position, from which round on. */
static int play(const char *url, const char *arg) {
    char *end;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind, whatever ends the first process */
    member m = {.url = url, .position = (int)strtol(arg, &end, 10)};
    int first_round = (int)strtol(end, NULL, 10);
    must(&m, tb__store_open(url, TOKEN, PATIENCE_MS, &m.store));
    for (int t = 0; t < 2; t++)
        must_be(&m, (m.memory[t] = tensor_alloc(ROWS * COLUMNS / SEATS * sizeof(float))) != NULL, "no memory");
    take_part(&m, first_round);
    remove_small(&m);
    remove_main(&m);
    tb_world_destroy(m.world);
    tensor_free(m.memory[0]);
    tensor_free(m.memory[1]);
    tb__store_close(m.store);
    return 0;
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

static int count_shared_files(void) {
    DIR *folder = opendir("/dev/shm");
    int count = 0;
    for (struct dirent *e; folder && (e = readdir(folder));)
        count += strstr(e->d_name, "tensorbus") != NULL;
    if (folder)
        closedir(folder);
    return count;
}

static void kill_one(scene *s, int victim) {
    char value[64];
    for (int i = 0; i < NMEMBERS; i++)
        hear_member(s, "held", victim, i, value, sizeof value);
    int64_t killed_ms = tb__now_ms();
    kill_role(s->pids[victim]);
    start_member(s, victim, victim + 1);
    for (int i = 0; i < NMEMBERS; i++) {
        if (i == victim)
            continue;
        hear_member(s, "lost", victim, i, value, sizeof value);
        assert_in_range(strtoll(value, NULL, 10) - killed_ms, 0, NOTICE_MS);
    }
}

/* The new one is the same rank of the bus, and another incarnation of it. */
static void compare_ranks(scene *s, int victim) {
    char before[64], after[64], *at_before, *at_after;
    hear_member(s, "rank", victim, victim, before, sizeof before);
    hear_member(s, "rank", victim + 1, victim, after, sizeof after);
    assert_int_equal(strtol(before, &at_before, 10), strtol(after, &at_after, 10));
    assert_int_equal(strtol(before, &at_before, 10), strtol(after, &at_after, 10));
    assert_int_equal(strtoull(at_before, NULL, 10) + 1, strtoull(at_after, NULL, 10));
}

static void everyone_in_turn(void **state) {
    scene *s = *state;
    int nfiles = count_shared_files();
    for (int i = 0; i < NMEMBERS; i++)
        start_member(s, i, 0);
    for (int victim = 0; victim < NMEMBERS; victim++) {
        kill_one(s, victim);
        compare_ranks(s, victim);
    }
    end_members(s);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_true(count_shared_files() <= nfiles);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(everyone_in_turn, set_up, tear_down)};
    return cmocka_run_group_tests_name("kill", tests, NULL, NULL);
}
