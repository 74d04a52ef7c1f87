/* Copy services between processes, by runs and by IRs, and what remains when one of them is killed: those who wait for
 * it hear at once who it was, and a service of the same name works again when another has taken the seat. The first
 * process serves the store, kills, and watches. Then, those who end as soon as their own run has: the others have all
 * that they need. */
#include "bus/members_test.h"

#include "tensorbus/plan.h"

#include "../tests/support/tensor_memory.h"

enum { NMEMBERS = 3, VICTIM = 2, NROUNDS = 6, N = 5000 };

/* What the victim does in a round: it does not come to the run; it waits in it, and the others come when it is dead; it
 * is killed while it moves the first bucket of an IR. */
typedef enum way { STAYS_AWAY, WAITS, MOVES, NWAYS } way;

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
    tb_ir *ir;
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

static way way_of(const member *m) {
    return (way)(m->round % NWAYS);
}

static void fill(const member *m) {
    for (int i = 0; i < NMEMBERS * N; i++) {
        bytes_of(m->out)[i] = value(m->seat, i / N, m->round, i % N);
        bytes_of(m->in)[i] = UINT32_MAX;
    }
}

/* Everybody to everybody, itself too. */
static void submit(const member *m) {
    fill(m);
    for (int other = 0; other < NMEMBERS; other++) {
        tb_copy_view from = {.size = sizeof from, .data = m->out + other * N, .dtype = TB_U32, .ndim = 1, .shape = {N}},
                     to = from;
        to.data = m->in + other * N;
        must(m, tb_copy_submit_send(m->copy, &from, 1, other, id_of(m->seat, other)) == TB_OK, "send");
        must(m, tb_copy_submit_recv(m->copy, &to, 1, other, id_of(other, m->seat)) == TB_OK, "recv");
    }
}

/* The same as what is submitted: rows become columns. */
static tb_ir *make_ir(const member *m) {
    tb_layout *rows, *columns;
    tb_ir *ir = NULL;
    must(m, tb_layout_parse("mesh=3 place=S0", &rows) == TB_OK, "layout");
    must(m, tb_layout_parse("mesh=3 place=S1", &columns) == TB_OK, "layout");
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "t",
                           .shape = {2, {NMEMBERS, NMEMBERS * N}},
                           .src = rows,
                           .dst = columns,
                           .src_dtype = TB_U32,
                           .dst_dtype = TB_U32};
    must(m, tb_ir_create(m->seat, &spec, 1, NULL, NULL, &ir) == TB_OK, "IR");
    tb_layout_destroy(rows);
    tb_layout_destroy(columns);
    return ir;
}

static tb_status execute(const member *m, void (*progress)(void *arg, size_t bucket, tb_bucket_step step)) {
    tb_binding out, in;
    tb_ir_part part = {.size = sizeof part, .src = &out, .dst = &in};
    tb_ir_execute_opts opts = {.size = sizeof opts, .progress = progress, .arg = (void *)m};
    must(m, tb_binding_contiguous(m->out, 0, TB_U32, &(tb_shape){2, {1, NMEMBERS * N}}, &out) == TB_OK, "rows");
    must(m, tb_binding_contiguous(m->in, 0, TB_U32, &(tb_shape){2, {NMEMBERS, N}}, &in) == TB_OK, "columns");
    fill(m);
    return tb_ir_execute(m->copy, m->ir, &part, &opts);
}

static void exchange(const member *m, bool by_ir) {
    if (!by_ir)
        submit(m);
    must(m, (by_ir ? execute(m, NULL) : tb_copy_run(m->copy, 0)) == TB_OK, by_ir ? "execute" : "run");
    for (int other = 0; other < NMEMBERS; other++) {
        for (int i = 0; i < N; i++)
            must(m, bytes_of(m->in)[other * N + i] == value(other, m->seat, m->round, i), "a wrong value");
    }
}

/* The store may hear of a death later than the others do. */
static void open_service(member *m) {
    tb_copy_opts opts = {.size = sizeof opts, .staged = m->round % 2};
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb_status status;
    do {
        status = tb_copy_open(m->world, "c", NULL, &opts, &m->copy);
    } while (status == TB_LOST && m->round > 0 && tb__now_ms() < deadline_ms);
    must(m, status == TB_OK, "open");
}

static void await_kill(const member *m) {
    poll(NULL, 0, PATIENCE_MS);
    must(m, false, "nobody has killed it");
}

static void stop_moving(void *arg, size_t bucket, tb_bucket_step step) {
    (void)bucket;
    (void)step;
    say(arg, "held");
    await_kill(arg);
}

static void lose(const member *m) {
    char wanted[32];
    snprintf(wanted, sizeof wanted, "(a %d)", VICTIM);
    if (way_of(m) == MOVES) {
        if (m->seat != VICTIM)
            say(m, "held");
        must(m, execute(m, m->seat == VICTIM ? stop_moving : NULL) == TB_LOST && strstr(tb_error_detail(), wanted),
             "does not name the dead that moved");
        must(m, execute(m, NULL) == TB_LOST && strstr(tb_error_detail(), wanted), "works without the dead");
        tb_copy_close(m->copy);
        return;
    }
    submit(m);
    if (m->seat == VICTIM) {
        say(m, "held");
        if (way_of(m) == WAITS)
            tb_copy_run(m->copy, PATIENCE_MS);
        await_kill(m);
    }
    say(m, "held");
    if (way_of(m) == WAITS)
        must(m, hear_of(m->store, "killed", m->round, VICTIM, PATIENCE_MS, NULL, 0) == TB_OK, "killed");
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
    m.ir = make_ir(&m);
    return m;
}

static int finish(member *m) {
    tb_copy_close(m->copy);
    tb_world_destroy(m->world);
    tb_ir_destroy(m->ir);
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
    exchange(&m, m.round / 4 % 2);
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
        exchange(&m, false);
        exchange(&m, true);
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
