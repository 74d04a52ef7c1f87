/* The directory when its store ends and comes back. */
#include "bus/directory_test.h"
#include "bus/store/etcd_test.h"
#include "bus/store/roles_test.h"

static bool is_back(tb__directory *directory, const void *arg) {
    (void)arg;
    return tb__directory_is_connected(directory);
}

static bool is_replaced(tb__directory *directory, const void *arg) {
    (void)arg;
    return tb__directory_state(directory) == TB_CONFLICT;
}

/* A role: has seat 0 of "trainer" until another process has it. */
static int be_replaced(const char *url, const char *arg) {
    (void)arg;
    ear e;
    ear_init(&e);
    must(open_with_ear(url, "trainer", 0, 1, &e));
    /* It is seen before the call returns, and the other process may be that fast. */
    tb_status status = tb__directory_announce(e.directory, "old", 3, PATIENCE_MS);
    must(status == TB_CONFLICT ? TB_OK : status);
    if (!ear_await(&e, is_replaced, NULL))
        return BROKEN;
    if (!strstr(tb_error_detail(), "taken") || tb__directory_is_connected(e.directory))
        return BROKEN;
    status = tb__directory_publish(e.directory, "t", "trainer", 0, "", 0, PATIENCE_MS);
    if (status != TB_CONFLICT || !strstr(tb_error_detail(), "lost for good"))
        return BROKEN;
    must(tb__directory_withdraw(e.directory, "t", "trainer", 0, PATIENCE_MS));
    tb__directory_close(e.directory);
    return 0;
}

/* The tests. */

static void await_loss(ear *e) {
    struct timespec deadline = tb__time_of_ms(tb__now_ms() + PATIENCE_MS);
    bool is_late = false;
    pthread_mutex_lock(&e->lock);
    while (e->nlosses == 0 && !is_late)
        is_late = pthread_cond_timedwait(&e->heard, &e->lock, &deadline) == ETIMEDOUT;
    pthread_mutex_unlock(&e->lock);
    assert_false(is_late);
}

static void assert_member(tb__directory *directory, const char *group, int32_t rank, uint64_t incarnation) {
    tb__roster roster;
    assert_ok(tb__directory_roster(directory, group, &roster));
    assert_int_equal(roster.npresent, 1);
    assert_int_equal(roster.member[0].rank, rank);
    assert_int_equal(roster.member[0].incarnation, incarnation);
    assert_int_equal(roster.member[0].contact_nbytes, 1);
    tb__roster_fini(&roster);
}

/* Whoever served has been killed: one of the others does it, and all say again what they had said. */
static void killed_server(void **state) {
    const place *p = *state;
    enum { NROUNDS = 5 };
    ear a, b;
    ear_init(&a);
    ear_init(&b);
    pid_t pid = start_server("serve", p->url, "");
    assert_ok(open_with_ear(p->url, "trainer", 0, 1, &a));
    assert_ok(open_with_ear(p->url, "engine", 0, 1, &b));
    assert_ok(tb__directory_enter(b.directory, "more", 1, 2));
    assert_ok(tb__directory_announce(a.directory, "a", 1, PATIENCE_MS));
    assert_ok(tb__directory_announce(b.directory, "b", 1, PATIENCE_MS));
    assert_ok(tb__directory_publish(a.directory, "kept", "trainer", 0, "one", 3, PATIENCE_MS));
    assert_ok(tb__directory_publish(a.directory, "kept", "trainer", 0, "two", 3, PATIENCE_MS));
    assert_ok(tb__directory_publish(a.directory, "gone", "trainer", 0, "", 0, PATIENCE_MS));
    assert_ok(tb__directory_withdraw(a.directory, "gone", "trainer", 0, PATIENCE_MS));
    assert_ok(tb__directory_publish(b.directory, "kept", "more", 1, "", 0, PATIENCE_MS));
    kill_role(pid);
    /* Neither may have noticed yet; both have when they have heard of a loss. */
    await_loss(&a);
    await_loss(&b);
    assert_true(ear_await(&a, is_back, NULL));
    assert_true(ear_await(&b, is_back, NULL));
    ear *ears[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        await_members(ears[i], "trainer", 1);
        await_members(ears[i], "engine", 1);
        await_members(ears[i], "more", 1);
        await_notes(ears[i], "kept", 2);
        await_notes(ears[i], "gone", 0);
        assert_member(ears[i]->directory, "trainer", 0, 1);
        assert_member(ears[i]->directory, "engine", 1, 1);
    }
    /* Calls work, and newcomers get ranks that nobody has. */
    for (int i = 0; i < NROUNDS; i++) {
        assert_ok(tb__directory_publish(b.directory, "again", "engine", 0, "", 0, PATIENCE_MS));
        await_notes(&a, "again", 1);
        assert_ok(tb__directory_withdraw(b.directory, "again", "engine", 0, PATIENCE_MS));
        await_notes(&a, "again", 0);
    }
    tb__directory *late = open_directory(p->url, "late", 0, 1);
    assert_int_equal(tb__directory_rank(late), 2);
    tb__directory_close(late);
    tb__directory_close(a.directory);
    tb__directory_close(b.directory);
}

/* Calls that are made while nobody serves wait for the store, or do not notice. */
static void calls_meanwhile(void **state) {
    const place *p = *state;
    char topic[32];
    ear e;
    ear_init(&e);
    pid_t pid = start_server("serve", p->url, "");
    assert_ok(open_with_ear(p->url, "trainer", 0, 1, &e));
    assert_ok(tb__directory_announce(e.directory, "a", 1, PATIENCE_MS));
    kill_role(pid);
    for (int i = 0; i < 20; i++) {
        snprintf(topic, sizeof topic, "topic %d", i);
        assert_ok(tb__directory_publish(e.directory, topic, "trainer", 0, "", 0, PATIENCE_MS));
        assert_true(has_notes(e.directory, &(expected){topic, 1}));
    }
    assert_ok(tb__directory_enter(e.directory, "other", 0, 1));
    assert_int_equal(present(e.directory, "other"), 1);
    assert_true(tb__directory_is_connected(e.directory));
    tb__directory_close(e.directory);
}

/* Who sleeps while another process takes its place finds that out. */
static void taken_place(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    pid_t server = start_server("serve", p->url, "");
    assert_ok(open_with_ear(p->url, "watch", 0, 1, &e));
    pid_t pid = start_role("be_replaced", p->url, "");
    await_members(&e, "trainer", 1);
    stop_role(pid);
    kill_role(server);
    await_members(&e, "trainer", 0); /* the store is new, and knows nobody yet */
    tb__directory *d = open_directory(p->url, "trainer", 0, 1);
    assert_int_not_equal(tb__directory_rank(d), 1); /* which is still somebody's, as far as anybody knows */
    assert_ok(tb__directory_announce(d, "new", 3, PATIENCE_MS));
    await_members(&e, "trainer", 1);
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_int_equal(end_of(pid), 0);
    /* It harms nobody. */
    assert_int_equal(present(e.directory, "trainer"), 1);
    assert_ok(tb__directory_publish(d, "t", "trainer", 0, "", 0, PATIENCE_MS));
    tb__directory_close(d);
    tb__directory_close(e.directory);
}

static void go_on(pid_t pid) {
    assert_int_equal(kill(pid, SIGCONT), 0);
}

/* A thread's call that keeps the turn for as long as the store is silent. */
typedef struct holding {
    tb__directory *directory;
    tb_status status;
} holding;

enum { HOLDING_MS = 2000, BRIEF_MS = 100, BOUND_MS = 20000 };

static void *hold_turn(void *arg) {
    holding *h = arg;
    h->status = tb__directory_publish(h->directory, "held", "trainer", 0, "", 0, HOLDING_MS);
    return NULL;
}

/* The store does not answer, and the connection stands. Calls end in their time; what was not withdrawn, or not known
 * to be written, goes when the store answers: also what the store was never told, because another call had the turn. */
static void silent_store(void **state) {
    const place *p = *state;
    ear a, b;
    ear_init(&a);
    ear_init(&b);
    pid_t pid = start_server("serve", p->url, "");
    assert_ok(open_with_ear(p->url, "trainer", 0, 1, &a));
    assert_ok(open_with_ear(p->url, "watch", 0, 1, &b));
    static const char *const topics[] = {"kept", "gone", "gone, too", "again"};
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++)
        assert_ok(tb__directory_publish(a.directory, topics[i], "trainer", 0, "1", 1, PATIENCE_MS));
    await_notes(&b, "again", 1);
    stop_role(pid);
    int64_t begun_ms = tb__now_ms();
    holding h = {.directory = a.directory};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, hold_turn, &h), 0);
    poll(NULL, 0, BRIEF_MS); /* so that most often it has the turn; if not, all that follows holds none the less */
    assert_int_equal(tb__directory_withdraw(a.directory, "gone", "trainer", 0, BRIEF_MS), TB_TIMEOUT);
    assert_fails(tb__directory_withdraw(a.directory, "gone, too", "trainer", 0, PATIENCE_MS), TB_TIMEOUT,
                 "has not answered the last question");
    assert_fails(tb__directory_withdraw(a.directory, "again", "trainer", 0, PATIENCE_MS), TB_TIMEOUT,
                 "has not answered the last question");
    pthread_join(thread, NULL);
    assert_int_equal(h.status, TB_TIMEOUT);
    assert_int_equal(tb__directory_publish(a.directory, "late", "trainer", 0, "", 0, BRIEF_MS), TB_TIMEOUT);
    assert_true(tb__now_ms() - begun_ms < BOUND_MS);
    assert_true(tb__directory_is_connected(a.directory));
    go_on(pid);
    assert_ok(tb__directory_publish(a.directory, "again", "trainer", 0, "2", 1, PATIENCE_MS));
    await_notes(&b, "again", 1);
    await_notes(&b, "gone", 0);
    await_notes(&b, "gone, too", 0);
    await_notes(&b, "held", 0);
    await_notes(&b, "late", 0);
    await_notes(&b, "kept", 1);
    /* The same once more, for the thread that has made up for it. */
    stop_role(pid);
    assert_int_equal(tb__directory_withdraw(a.directory, "kept", "trainer", 0, BRIEF_MS), TB_TIMEOUT);
    go_on(pid);
    await_notes(&b, "kept", 0);
    await_notes(&b, "again", 1);
    /* Nobody waits for the answer when the directory is closed. */
    stop_role(pid);
    assert_int_equal(tb__directory_withdraw(a.directory, "again", "trainer", 0, BRIEF_MS), TB_TIMEOUT);
    begun_ms = tb__now_ms();
    tb__directory_close(a.directory);
    assert_true(tb__now_ms() - begun_ms < BOUND_MS);
    go_on(pid);
    await_notes(&b, "again", 0);
    tb__directory_close(b.directory);
    kill_role(pid);
    tb__store_server *server;
    assert_ok(tb__store_server_start(p->url, TOKEN, &server)); /* which removes what the other has left */
    tb__store_server_stop(server);
}

/* Withdrawn while the store is lost, and not said again when it is back. */
static void withdrawn_meanwhile(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    pid_t pid = start_server("serve", p->url, "");
    assert_ok(open_with_ear(p->url, "trainer", 0, 1, &e));
    assert_ok(tb__directory_publish(e.directory, "kept", "trainer", 0, "", 0, PATIENCE_MS));
    assert_ok(tb__directory_publish(e.directory, "gone", "trainer", 0, "", 0, PATIENCE_MS));
    kill_role(pid);
    assert_ok(tb__directory_withdraw(e.directory, "gone", "trainer", 0, PATIENCE_MS));
    await_loss(&e);
    assert_true(ear_await(&e, is_back, NULL));
    await_notes(&e, "kept", 1);
    await_notes(&e, "gone", 0);
    tb__directory_close(e.directory);
}

/* Nobody can take etcd's place: the directory stays lost until etcd is back. */
static void killed_etcd(void **state) {
    const place *p = *state;
    tb__directory *hasty;
    ear e;
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "trainer", 0, 1, &e));
    assert_ok(
        tb__directory_open(p->url, "hasty", 0, 1, &(tb__directory_opts){.token = TOKEN, .timeout_ms = 3000}, &hasty));
    assert_ok(tb__directory_announce(e.directory, "a", 1, PATIENCE_MS));
    assert_ok(tb__directory_publish(e.directory, "kept", "trainer", 0, "", 0, PATIENCE_MS));
    assert_ok(tb__directory_publish(e.directory, "gone", "trainer", 0, "", 0, PATIENCE_MS));
    etcd_kill(&the_etcd);
    assert_true(ear_await(&e, is_lost, NULL));
    assert_fails(tb__directory_state(e.directory), TB_LOST, "the connection was lost");
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (tb__directory_is_connected(hasty) && tb__now_ms() < deadline_ms)
        poll(NULL, 0, 10);
    assert_fails(tb__directory_publish(hasty, "t", "hasty", 0, "", 0, 3000), TB_LOST, "the store is lost: ");
    /* What was known stays known, and withdrawing waits for nobody. */
    assert_int_equal(present(e.directory, "trainer"), 1);
    assert_true(has_notes(e.directory, &(expected){"kept", 1}));
    int64_t begun_ms = tb__now_ms();
    assert_ok(tb__directory_withdraw(e.directory, "gone", "trainer", 0, PATIENCE_MS));
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    etcd_run(&the_etcd);
    assert_true(ear_await(&e, is_back, NULL));
    await_members(&e, "trainer", 1);
    await_notes(&e, "kept", 1);
    await_notes(&e, "gone", 0);
    assert_member(e.directory, "trainer", 0, 1);
    tb_status status;
    do /* the machine may be busy */
        status = tb__directory_publish(hasty, "t", "hasty", 0, "", 0, 3000);
    while ((status == TB_LOST || status == TB_TIMEOUT) && tb__now_ms() < deadline_ms);
    assert_ok(status);
    await_notes(&e, "t", 1);
    tb__directory_close(hasty);
    tb__directory_close(e.directory);
}

static int test_etcd(void) {
    const struct CMUnitTest tests[] = {AT_A_PLACE(killed_etcd)};
    return etcd_is_missing() ? SKIPPED : cmocka_run_group_tests(tests, start_the_etcd, stop_the_etcd);
}

static const role roles[] = {{"serve", serve}, {"be_replaced", be_replaced}};

int main(int argc, char **argv) {
    int end;
    if (has_played(roles, sizeof roles / sizeof *roles, argc, argv, &end))
        return end;
    if (argc == 2 && strcmp(argv[1], "etcd") == 0)
        return test_etcd();
    const struct CMUnitTest tests[] = {AT_A_PLACE(killed_server), AT_A_PLACE(calls_meanwhile), AT_A_PLACE(taken_place),
                                       AT_A_PLACE(silent_store), AT_A_PLACE(withdrawn_meanwhile)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
