/* The directory between processes: meeting, dying, coming back. */
#include "bus/directory_test.h"
#include "bus/store/etcd_test.h"
#include "bus/store/roles_test.h"

#include <fcntl.h>

enum { NCROWD = 32, NTRAINERS = 2, NENGINES = 3 };

/* Roles: what the other processes do. */

/* Takes the seats "group index size, group index size, ...", writes a note in each one's name, and announces itself. */
static int sit(const char *url, const char *arg) {
    tb__directory *directory = NULL;
    char group[32];
    int index, size, length;
    for (const char *at = arg; *at; at += length) {
        must_be(sscanf(at, "%31s %d %d%n", group, &index, &size, &length) == 3, "the role's argument");
        length += at[length] == ',';
        if (directory)
            must(tb__directory_enter(directory, group, index, size));
        else
            must(try_open(url, group, index, size, &directory));
        must(tb__directory_publish(directory, "sitting", group, index, group, strlen(group), PATIENCE_MS));
    }
    must(tb__directory_announce(directory, "sitting", 7, PATIENCE_MS));
    sleep_until_killed();
    return 0;
}

/* Every member has said that it has seen all the others, or has left, which it does after that. */
static bool all_are_done(tb__directory *directory, const void *arg) {
    const expected *group = arg;
    tb__notes notes;
    tb__roster roster;
    tb__directory_notes(directory, "done", &notes);
    must(tb__directory_roster(directory, group->name, &roster));
    int64_t ndone = 0;
    for (int32_t i = 0; i < group->count; i++) {
        bool is_done = roster.size == 0 || roster.member[i].rank == TB_NO_RANK;
        for (size_t n = 0; n < notes.count && !is_done; n++)
            is_done = strcmp(notes.item[n].group, group->name) == 0 && notes.item[n].index == i;
        ndone += is_done;
    }
    tb__notes_fini(&notes);
    tb__roster_fini(&roster);
    return ndone == group->count;
}

/* Whoever closes while it serves ends the store for the others: all wait for each other. */
static void part(ear *e, const char *group, int32_t index, const expected *groups, int ngroups) {
    tb_status status = tb__directory_publish(e->directory, "done", group, index, "", 0, PATIENCE_MS);
    if (status != TB_LOST)
        must(status);
    for (int i = 0; i < ngroups; i++)
        must_be(ear_await(e, all_are_done, &groups[i]), "not all are done");
    tb__directory_close(e->directory);
}

/* One of two groups, each of which waits for the other. */
static int meet(const char *url, const char *arg) {
    static const expected groups[] = {{"trainer", NTRAINERS}, {"engine", NENGINES}};
    char group[32], contact[64];
    int index, size;
    ear e;
    must_be(sscanf(arg, "%31s %d %d", group, &index, &size) == 3, "the role's argument");
    ear_init(&e);
    must(open_with_ear(url, group, index, size, &e));
    snprintf(contact, sizeof contact, "%s %d", group, index);
    must(tb__directory_announce(e.directory, contact, strlen(contact), PATIENCE_MS));
    for (int i = 0; i < 2; i++)
        must_be(ear_await(&e, has_members, &groups[i]), "not all have come");
    for (int i = 0; i < 2; i++) {
        tb__roster roster;
        must(tb__directory_roster(e.directory, groups[i].name, &roster));
        for (int32_t m = 0; m < roster.size; m++) {
            int length = snprintf(contact, sizeof contact, "%s %d", groups[i].name, m);
            must_be(roster.member[m].contact_nbytes == (size_t)length &&
                        memcmp(roster.member[m].contact, contact, (size_t)length) == 0,
                    "a contact");
        }
        tb__roster_fini(&roster);
    }
    must_be(tb__directory_count_contacts(e.directory, "", 0) == NTRAINERS + NENGINES, "the number of processes");
    part(&e, group, index, groups, 2);
    return 0;
}

/* One of many who come at once: "index fd", where the end of the pipe is the signal. */
static int crowd(const char *url, const char *arg) {
    static const expected everybody = {"crowd", NCROWD};
    int index, fd;
    char byte;
    ear e;
    must_be(sscanf(arg, "%d %d", &index, &fd) == 2, "the role's argument");
    must_be(read(fd, &byte, 1) == 0, "the signal");
    ear_init(&e);
    must(open_with_ear(url, "crowd", index, NCROWD, &e));
    must(tb__directory_announce(e.directory, "", 0, PATIENCE_MS));
    must_be(ear_await(&e, has_members, &everybody), "not all have come");
    tb__roster roster;
    bool is_seen[NCROWD] = {false};
    must(tb__directory_roster(e.directory, "crowd", &roster));
    for (int i = 0; i < NCROWD; i++) {
        int32_t rank = roster.member[i].rank;
        if (rank >= 0 && rank < NCROWD)
            is_seen[rank] = true;
        must_be(roster.member[i].incarnation == 1, "an incarnation");
    }
    for (int i = 0; i < NCROWD; i++)
        must_be(is_seen[i], "a rank that nobody has");
    must_be(roster.member[index].rank == tb__directory_rank(e.directory), "its own rank");
    tb__roster_fini(&roster);
    part(&e, "crowd", index, &everybody, 1);
    return 0;
}

/* The tests. */

static void meeting(void **state) {
    const place *p = *state;
    pid_t pids[NTRAINERS + NENGINES];
    char arg[64];
    for (int i = 0; i < NTRAINERS + NENGINES; i++) {
        bool is_trainer = i < NTRAINERS;
        snprintf(arg, sizeof arg, "%s %d %d", is_trainer ? "trainer" : "engine", is_trainer ? i : i - NTRAINERS,
                 is_trainer ? NTRAINERS : NENGINES);
        pids[i] = start_role("meet", p->url, arg);
    }
    for (int i = 0; i < NTRAINERS + NENGINES; i++)
        assert_int_equal(end_of(pids[i]), 0);
}

static void many_at_once(void **state) {
    const place *p = *state;
    pid_t pids[NCROWD];
    int gate[2];
    char arg[64];
    assert_int_equal(pipe(gate), 0);
    assert_int_equal(fcntl(gate[1], F_SETFD, FD_CLOEXEC), 0);
    for (int i = 0; i < NCROWD; i++) {
        snprintf(arg, sizeof arg, "%d %d", i, gate[0]);
        pids[i] = start_role("crowd", p->url, arg);
    }
    close(gate[0]);
    close(gate[1]);
    for (int i = 0; i < NCROWD; i++)
        assert_int_equal(end_of(pids[i]), 0);
}

static tb__member member_of(tb__directory *directory, const char *group, int32_t index) {
    tb__roster roster;
    assert_ok(tb__directory_roster(directory, group, &roster));
    assert_true(index < roster.size);
    tb__member member = roster.member[index];
    member.contact = NULL;
    tb__roster_fini(&roster);
    return member;
}

static void taken_seat(void **state) {
    const place *p = *state;
    ear e;
    tb__directory *d;
    char host[TB__MAX_HOST + 1] = "", wanted[256];
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "watch", 0, 1, &e));
    pid_t pid = start_role("sit", p->url, "trainer 2 3");
    await_members(&e, "trainer", 1);
    tb__member before = member_of(e.directory, "trainer", 2);
    assert_int_equal(before.rank, 3); /* of the block 1 to 3 */
    assert_int_equal(gethostname(host, sizeof host - 1), 0);
    snprintf(wanted, sizeof wanted, "seat 2 of group 'trainer' is taken by process %d on host %s (bus rank 3)",
             (int)pid, host);
    int64_t begun_ms = tb__now_ms();
    assert_fails(try_open(p->url, "trainer", 2, 3, &d), TB_CONFLICT, wanted);
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2); /* long before the timeout */
    assert_fails(tb__directory_enter(e.directory, "trainer", 2, 3), TB_CONFLICT, wanted);
    assert_int_equal(present(e.directory, "trainer"), 1);
    /* Nothing is between the death and the next one who comes. */
    kill_role(pid);
    assert_ok(try_open(p->url, "trainer", 2, 3, &d));
    assert_int_equal(tb__directory_rank(d), before.rank);
    assert_int_equal(tb__directory_incarnation(d), before.incarnation + 1);
    tb__directory_close(d);
    d = open_directory(p->url, "trainer", 2, 3);
    assert_int_equal(tb__directory_rank(d), before.rank);
    assert_int_equal(tb__directory_incarnation(d), before.incarnation + 2);
    tb__directory_close(d);
    tb__directory_close(e.directory);
}

static void death(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "watch", 0, 1, &e));
    pid_t pid = start_role("sit", p->url, "a 0 1,b 1 2");
    await_members(&e, "a", 1);
    await_members(&e, "b", 1);
    await_notes(&e, "sitting", 2);
    int32_t rank = member_of(e.directory, "a", 0).rank;
    assert_int_equal(member_of(e.directory, "b", 1).rank, rank);
    kill_role(pid);
    await_members(&e, "a", 0);
    await_members(&e, "b", 0);
    await_notes(&e, "sitting", 0);
    /* Its two seats are taken by two, of whom one gets the rank. */
    pid_t pids[] = {start_role("sit", p->url, "a 0 1"), start_role("sit", p->url, "b 1 2")};
    await_members(&e, "a", 1);
    await_members(&e, "b", 1);
    tb__member a = member_of(e.directory, "a", 0), b = member_of(e.directory, "b", 1);
    assert_int_not_equal(a.rank, b.rank);
    assert_true(a.rank == rank || b.rank == rank);
    assert_int_equal(a.rank == rank ? a.incarnation : b.incarnation, 2);
    assert_int_equal(a.rank == rank ? b.incarnation : a.incarnation, 1);
    kill_role(pids[0]);
    kill_role(pids[1]);
    tb__directory_close(e.directory);
}

/* A server that is there but does nothing. */
static void silent_store(void **state) {
    const place *p = *state;
    const tb__directory_opts hasty = {.token = TOKEN, .timeout_ms = 100};
    pid_t pid = start_server("sit", p->url, "engine 0 1");
    tb__directory *d = open_directory(p->url, "trainer", 0, 1), *late;
    tb_status status;
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    do /* the machine may be busy */
        status = tb__directory_open(p->url, "hasty", 0, 1, &hasty, &late);
    while ((status == TB_TIMEOUT || status == TB_CONFLICT) && tb__now_ms() < deadline_ms);
    assert_ok(status);
    stop_role(pid);
    assert_int_equal(tb__directory_publish(late, "t", "hasty", 0, "", 0, hasty.timeout_ms), TB_TIMEOUT);
    assert_int_equal(tb__directory_enter(late, "more", 0, 1), TB_TIMEOUT);
    assert_true(tb__directory_is_connected(late));
    tb__directory *none;
    assert_int_equal(tb__directory_open(p->url, "none", 0, 1, &hasty, &none), TB_TIMEOUT);
    /* Closing asks nobody. */
    int64_t begun_ms = tb__now_ms();
    tb__directory_close(d);
    assert_true(tb__now_ms() - begun_ms < PATIENCE_MS / 2);
    /* What timed out may have come about; then the seat is its own, and entering succeeds. */
    assert_int_equal(kill(pid, SIGCONT), 0);
    do
        status = tb__directory_enter(late, "more", 0, 1);
    while (status == TB_TIMEOUT && tb__now_ms() < deadline_ms);
    assert_ok(status);
    tb__directory_close(late);
    kill_role(pid);
    d = open_directory(p->url, "trainer", 0, 1);
    tb__directory_close(d);
}

/* A forked child can close what it has inherited, and that harms nobody. */
static void forked_child(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "g", 0, 1);
    assert_ok(tb__directory_announce(d, "", 0, PATIENCE_MS));
    pid_t pid = fork();
    if (pid == 0) {
        tb__directory_close(d);
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(end_of(pid), 0);
    assert_ok(tb__directory_publish(d, "t", "g", 0, "", 0, PATIENCE_MS));
    assert_int_equal(present(d, "g"), 1);
    tb__directory_close(d);
}

static const role roles[] = {{"sit", sit}, {"meet", meet}, {"crowd", crowd}};

static int test_etcd(void) {
    const struct CMUnitTest tests[] = {
        AT_A_PLACE(meeting), AT_A_PLACE(many_at_once), AT_A_PLACE(taken_seat),
        AT_A_PLACE(death),   AT_A_PLACE(forked_child),
    };
    return etcd_is_missing() ? SKIPPED : cmocka_run_group_tests(tests, start_the_etcd, stop_the_etcd);
}

int main(int argc, char **argv) {
    int end;
    if (has_played(roles, sizeof roles / sizeof *roles, argc, argv, &end))
        return end;
    if (argc == 2 && strcmp(argv[1], "etcd") == 0)
        return test_etcd();
    const struct CMUnitTest tests[] = {
        AT_A_PLACE(meeting), AT_A_PLACE(many_at_once), AT_A_PLACE(taken_seat),
        AT_A_PLACE(death),   AT_A_PLACE(silent_store), AT_A_PLACE(forked_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
