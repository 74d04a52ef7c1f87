/* The directory in one process, which opens it several times. */
#include "bus/directory_test.h"
#include "bus/store/etcd_test.h"

static void assert_note(tb__directory *directory, const char *topic, size_t i, const char *group, int32_t index,
                        const char *text) {
    tb__notes notes;
    tb__directory_notes(directory, topic, &notes);
    assert_true(i < notes.count);
    assert_string_equal(notes.item[i].group, group);
    assert_int_equal(notes.item[i].index, index);
    assert_int_equal(notes.item[i].nbytes, strlen(text));
    assert_memory_equal(notes.item[i].data, text, strlen(text));
    tb__notes_fini(&notes);
}

static size_t count_notes(tb__directory *directory, const char *topic) {
    tb__notes notes;
    tb__directory_notes(directory, topic, &notes);
    size_t count = notes.count;
    tb__notes_fini(&notes);
    return count;
}

static tb_status publish_text(tb__directory *directory, const char *topic, const char *group, int32_t index,
                              const char *text) {
    return tb__directory_publish(directory, topic, group, index, text, strlen(text), PATIENCE_MS);
}

static void announcing(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "trainer", 0, 2, &e));
    tb__directory *first = e.directory, *second = open_directory(p->url, "trainer", 1, 2);
    assert_int_equal(tb__directory_rank(first), 0);
    assert_int_equal(tb__directory_rank(second), 1);
    assert_int_equal(tb__directory_incarnation(second), 1);

    /* Who has not announced himself is not there. */
    tb__roster roster;
    assert_ok(tb__directory_roster(second, "trainer", &roster));
    assert_int_equal(roster.size, 0);
    assert_int_equal(roster.npresent, 0);
    tb__roster_fini(&roster);

    assert_ok(tb__directory_announce(second, "here\0it is", 10, PATIENCE_MS));
    assert_ok(tb__directory_roster(second, "trainer", &roster)); /* its own word counts at once */
    assert_int_equal(roster.size, 2);
    assert_int_equal(roster.npresent, 1);
    assert_false(roster.sizes_differ);
    assert_int_equal(roster.member[0].rank, TB_NO_RANK);
    assert_int_equal(roster.member[0].contact_nbytes, 0);
    assert_int_equal(roster.member[1].rank, 1);
    assert_int_equal(roster.member[1].incarnation, 1);
    assert_int_equal(roster.member[1].contact_nbytes, 10);
    assert_memory_equal(roster.member[1].contact, "here\0it is", 10);
    tb__roster_fini(&roster);
    await_members(&e, "trainer", 1);

    static const char longest[TB__DIRECTORY_MAX_CONTACT + 1];
    assert_fails(tb__directory_announce(first, longest, sizeof longest, PATIENCE_MS), TB_TOO_BIG, "4097 bytes");
    assert_ok(tb__directory_announce(first, longest, sizeof longest - 1, PATIENCE_MS));
    assert_int_equal(present(first, "trainer"), 2);
    tb__directory_close(second);
    await_members(&e, "trainer", 1);
    assert_true(tb__directory_is_connected(first));
    tb__directory_close(first);
    tb__directory_close(NULL);
}

/* What was looked at stays as it was, whatever the directory hears afterwards, and when it is closed. */
static void kept(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "g", 0, 1);
    tb__roster roster;
    tb__notes notes;
    assert_ok(tb__directory_announce(d, "before", 6, PATIENCE_MS));
    assert_ok(publish_text(d, "t", "g", 0, "first"));
    assert_ok(tb__directory_roster(d, "g", &roster));
    tb__directory_notes(d, "t", &notes);
    assert_ok(tb__directory_announce(d, "after", 5, PATIENCE_MS));
    assert_ok(publish_text(d, "t", "g", 0, "second"));
    assert_note(d, "t", 0, "g", 0, "second");
    tb__directory_close(d);
    assert_int_equal(roster.member[0].contact_nbytes, 6);
    assert_memory_equal(roster.member[0].contact, "before", 6);
    assert_int_equal(notes.count, 1);
    assert_int_equal(notes.item[0].nbytes, 5);
    assert_memory_equal(notes.item[0].data, "first", 5);
    tb__roster_fini(&roster);
    tb__notes_fini(&notes);
}

static void several_groups(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "a", 0, 1), *other = open_directory(p->url, "b", 1, 2);
    assert_ok(tb__directory_enter(d, "b", 0, 2));
    assert_int_equal(present(d, "b"), 0);
    assert_ok(tb__directory_announce(d, "host1:x", 7, PATIENCE_MS));
    assert_ok(tb__directory_announce(other, "host2:y", 7, PATIENCE_MS));
    assert_ok(tb__directory_enter(d, "c", 6, 7));
    assert_fails(tb__directory_enter(d, "b", 0, 2), TB_CONFLICT, "already has seat 0 of group 'b'");
    assert_fails(tb__directory_enter(other, "c", 6, 7), TB_CONFLICT, "seat 6 of group 'c' is taken by process ");
    assert_non_null(strstr(tb_error_detail(), "(bus rank 0)"));
    assert_ok(publish_text(other, "look", "b", 1, "")); /* what it changes makes it look */
    tb__roster roster;
    const char *const groups[] = {"a", "b", "c"};
    const int32_t seats[] = {0, 0, 6}, sizes[] = {1, 2, 7}, npresent[] = {1, 2, 1};
    for (int i = 0; i < 3; i++) {
        assert_ok(tb__directory_roster(other, groups[i], &roster));
        assert_int_equal(roster.size, sizes[i]);
        assert_int_equal(roster.npresent, npresent[i]);
        assert_int_equal(roster.member[seats[i]].rank, tb__directory_rank(d));
        assert_memory_equal(roster.member[seats[i]].contact, "host1:x", 7);
        tb__roster_fini(&roster);
    }
    /* Processes, not seats. */
    assert_int_equal(tb__directory_count_contacts(other, "host", 4), 2);
    assert_int_equal(tb__directory_count_contacts(other, "host1", 5), 1);
    assert_int_equal(tb__directory_count_contacts(other, "host1:xy", 8), 0);
    assert_int_equal(tb__directory_count_contacts(other, NULL, 0), 2);
    tb__directory_close(other);
    tb__directory_close(d);
}

static void same_rank_again(void **state) {
    const place *p = *state;
    tb__directory *server = open_directory(p->url, "server", 0, 1), *d, *again;
    for (uint64_t round = 1; round < 4; round++) {
        d = open_directory(p->url, "g", 1, 2);
        assert_int_equal(tb__directory_rank(d), 2); /* of the block 1 to 2 */
        assert_int_equal(tb__directory_incarnation(d), round);
        tb__directory_close(d);
    }
    /* One process had two seats, which are then taken by two: a rank is of the seat that a process opens with. */
    d = open_directory(p->url, "x", 0, 1);
    assert_int_equal(tb__directory_rank(d), 3);
    assert_ok(tb__directory_enter(d, "y", 0, 1));
    tb__directory_close(d);
    d = open_directory(p->url, "y", 0, 1);
    again = open_directory(p->url, "x", 0, 1);
    assert_int_equal(tb__directory_rank(d), 4);
    assert_int_equal(tb__directory_incarnation(d), 1);
    assert_int_equal(tb__directory_rank(again), 3);
    assert_int_equal(tb__directory_incarnation(again), 2);
    tb__directory_close(again);
    tb__directory_close(d);
    tb__directory_close(server);
}

static void sizes(void **state) {
    const place *p = *state;
    tb__directory *server = open_directory(p->url, "server", 0, 1), *refused;
    tb__directory *first = open_directory(p->url, "g", 0, 2);
    assert_fails(try_open(p->url, "g", 1, 3, &refused), TB_CONFLICT, "group 'g' has 2 seats according to process ");
    assert_non_null(strstr(tb_error_detail(), " in seat 0, and 3 according to this process"));
    assert_ok(tb__directory_announce(first, "", 0, PATIENCE_MS));
    assert_fails(tb__directory_enter(server, "g", 1, 3), TB_CONFLICT, "(bus rank 1) in seat 0, and 3 according");
    assert_fails(publish_text(server, "t", "g", 1, ""), TB_INVALID, "not this process's");
    /* They left the seat that they had claimed. */
    tb__directory *second = open_directory(p->url, "g", 1, 2);
    tb__directory_close(second);
    tb__directory_close(first);
    /* The group may come back with another size. */
    first = open_directory(p->url, "g", 2, 3);
    tb__directory_close(first);

    assert_fails(tb__directory_enter(server, "h", 0, 0), TB_INVALID, "has 0 seats");
    assert_fails(tb__directory_enter(server, "h", -1, 2), TB_INVALID, "seat -1 of group 'h' is not between 0 and 1");
    assert_fails(tb__directory_enter(server, "h", 2, 2), TB_INVALID, "seat 2 of group 'h' is not between 0 and 1");
    assert_fails(tb__directory_enter(server, "h", 0, TB_MAX_RANKS + 1), TB_TOO_BIG, "1048577 seats");
    assert_ok(tb__directory_enter(server, "h", TB_MAX_RANKS - 1, TB_MAX_RANKS));
    tb__directory_close(server);
}

/* Whoever claims later looks when the earlier one is there: exactly one of any two sizes is left. */
static void size_races(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "server", 0, 1);
    tb__store *store = open_store(p->url);
    tb__seat_bytes bytes = {0};
    tb__seat_record seat = {.size = 5, .rank = TB_NO_RANK, .pid = 77, .host = "far"};
    tb__seat_encode(&seat, &bytes);
    tb__key key = tb__key_of_seat("g", 4);
    assert_ok(tb__store_set(store, key.text, bytes.data, bytes.nbytes, TB__STORE_EPHEMERAL, NULL));
    assert_fails(tb__directory_enter(d, "g", 0, 1), TB_CONFLICT,
                 "5 seats according to process 77 on host far in seat 4");
    tb__store_close(store);
    assert_ok(tb__directory_enter(d, "g", 0, 1));
    tb__directory_close(d);
}

/* A process that claims its seat again finds its record gone, when its lease has just run out. */
static void no_record(void **state) {
    (void)state;
    tb__seat_record seat = {.size = 5};
    assert_false(tb__seat_decode(&(tb__store_value){0}, 0, &seat));
    assert_int_equal(seat.size, 5);
}

static void torn_group(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "g", 1, 3);
    tb__store *store = open_store(p->url);
    assert_ok(tb__directory_announce(d, "me", 2, PATIENCE_MS));
    /* No directory would do this. */
    tb__seat_bytes bytes = {0};
    tb__seat_record seat = {.size = 9, .rank = 5, .incarnation = 1, .pid = 77, .host = "far", .is_announced = true};
    tb__seat_encode(&seat, &bytes);
    tb__key key = tb__key_of_seat("g", 8);
    assert_ok(tb__store_set(store, key.text, bytes.data, bytes.nbytes, TB__STORE_PERMANENT, NULL));
    tb__roster roster;
    assert_ok(publish_text(d, "look", "g", 1, ""));
    assert_ok(tb__directory_roster(d, "g", &roster));
    assert_true(roster.sizes_differ);
    assert_int_equal(roster.size, 3);
    assert_int_equal(roster.npresent, 1);
    assert_int_equal(roster.member[1].rank, tb__directory_rank(d));
    tb__roster_fini(&roster);
    tb__store_close(store);
    tb__directory_close(d);
}

static void notes(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "g", 2, 11, &e));
    tb__directory *d = e.directory, *other = open_directory(p->url, "g", 10, 11);
    assert_int_equal(count_notes(d, "pair"), 0);
    assert_ok(publish_text(d, "pair", "g", 2, "two"));
    assert_ok(publish_text(other, "pair", "g", 10, "ten"));
    assert_ok(tb__directory_enter(other, "f", 0, 1));
    assert_ok(publish_text(other, "pair", "f", 0, ""));
    assert_ok(publish_text(other, "pair2", "f", 0, "another topic"));
    assert_int_equal(count_notes(other, "pair"), 3);
    assert_note(other, "pair", 0, "f", 0, "");
    assert_note(other, "pair", 1, "g", 2, "two");
    assert_note(other, "pair", 2, "g", 10, "ten");
    await_notes(&e, "pair2", 1);
    assert_note(d, "pair", 2, "g", 10, "ten");

    assert_ok(publish_text(other, "pair", "g", 10, "TEN"));
    assert_note(other, "pair", 2, "g", 10, "TEN");
    assert_ok(tb__directory_withdraw(other, "pair", "f", 0, PATIENCE_MS));
    assert_ok(tb__directory_withdraw(other, "pair", "f", 0, PATIENCE_MS));
    assert_int_equal(count_notes(other, "pair"), 2);
    await_notes(&e, "pair", 2);
    assert_note(d, "pair", 1, "g", 10, "TEN");

    char *large = calloc(1, TB__DIRECTORY_MAX_NOTE + 1);
    assert_fails(tb__directory_publish(d, "pair", "g", 2, large, TB__DIRECTORY_MAX_NOTE + 1, PATIENCE_MS), TB_TOO_BIG,
                 "65537 bytes");
    memset(large, 'x', TB__DIRECTORY_MAX_NOTE);
    assert_ok(tb__directory_publish(d, "pair", "g", 2, large, TB__DIRECTORY_MAX_NOTE, PATIENCE_MS));
    assert_note(d, "pair", 0, "g", 2, large);
    free(large);
    assert_fails(publish_text(d, "pair", "g", 10, ""), TB_INVALID, "seat 10 of group 'g' is not this process's");
    assert_fails(tb__directory_withdraw(d, "pair", "f", 0, PATIENCE_MS), TB_INVALID,
                 "seat 0 of group 'f' is not this process's");
    tb__directory_close(other);
    await_notes(&e, "pair", 1);
    await_notes(&e, "pair2", 0);
    tb__directory_close(d);
}

/* More than one list of the store can bring. Nobody must go blind by that. */
static void too_many_notes(void **state) {
    const place *p = *state;
    enum { NBEFORE = 252, NMOST = 260 };
    char *large = calloc(1, TB__DIRECTORY_MAX_NOTE), topic[16];
    tb__store_server *server = NULL;
    tb__store *store;
    assert_ok(tb__store_open_or_serve(p->url, TOKEN, NULL, PATIENCE_MS, &store, &server));
    for (int i = 0; i < NBEFORE; i++) {
        tb__key key = tb__key_of_note("others", "h", i);
        assert_ok(tb__store_set(store, key.text, large, TB__DIRECTORY_MAX_NOTE, TB__STORE_PERMANENT, NULL));
    }
    tb__directory *d = open_directory(p->url, "g", 0, 1);
    assert_int_equal(count_notes(d, "others"), NBEFORE);
    tb_status status = TB_OK;
    for (int i = NBEFORE; i < NMOST && status == TB_OK; i++) {
        snprintf(topic, sizeof topic, "%d", i);
        status = tb__directory_publish(d, topic, "g", 0, large, TB__DIRECTORY_MAX_NOTE, PATIENCE_MS);
    }
    assert_int_equal(status, TB_TOO_BIG);
    assert_non_null(strstr(tb_error_detail(), "list 'now/'"));
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (count_notes(d, topic) > 0 && tb__now_ms() < deadline_ms) /* its deletion may come later than itself */
        tb__sleep_ms(1);
    assert_int_equal(count_notes(d, topic), 0);
    snprintf(topic, sizeof topic, "%d", NBEFORE);
    assert_ok(tb__directory_withdraw(d, topic, "g", 0, PATIENCE_MS));
    assert_ok(tb__directory_publish(d, "instead", "g", 0, large, TB__DIRECTORY_MAX_NOTE, PATIENCE_MS));
    assert_int_equal(count_notes(d, "instead"), 1);
    free(large);
    tb__directory_close(d);
    tb__store_close(store);
    tb__store_server_stop(server);
}

static void names(void **state) {
    const place *p = *state;
    char slashes[TB__DIRECTORY_MAX_NAME + 2], tildes[TB__DIRECTORY_MAX_NAME + 1];
    memset(slashes, '/', sizeof slashes);
    memset(tildes, '~', sizeof tildes);
    slashes[TB__DIRECTORY_MAX_NAME] = tildes[TB__DIRECTORY_MAX_NAME] = '\0';
    const char *const valid[] = {"a",  "a/b",      "a~1b", "a b", "100%", "%2f", "/",       "~",     "//",
                                 "0/", "été 日本", "?",    ".",   "..",   "'",   "a/0/b/1", slashes, tildes};
    enum { NVALID = sizeof valid / sizeof *valid };
    tb__directory *d = open_directory(p->url, "first", 0, 1);
    assert_ok(tb__directory_announce(d, "c", 1, PATIENCE_MS));
    for (int i = 0; i < NVALID; i++) {
        assert_ok(tb__directory_enter(d, valid[i], i, i + 1));
        assert_ok(publish_text(d, valid[NVALID - 1 - i], valid[i], i, valid[i]));
    }
    tb__directory *other = open_directory(p->url, "other", 0, 1);
    for (int i = 0; i < NVALID; i++) {
        tb__roster roster;
        assert_ok(tb__directory_roster(other, valid[i], &roster));
        assert_int_equal(roster.size, i + 1);
        assert_int_equal(roster.npresent, 1);
        assert_int_equal(roster.member[i].rank, 0);
        tb__roster_fini(&roster);
        assert_int_equal(count_notes(other, valid[NVALID - 1 - i]), 1);
        assert_note(other, valid[NVALID - 1 - i], 0, valid[i], i, valid[i]);
    }
    tb__roster roster;
    slashes[TB__DIRECTORY_MAX_NAME] = '/';
    slashes[TB__DIRECTORY_MAX_NAME + 1] = '\0';
    assert_fails(tb__directory_enter(d, slashes, 0, 1), TB_INVALID, "group's name has 201 bytes");
    assert_fails(tb__directory_roster(d, "", &roster), TB_INVALID, "a group needs a name");
    assert_fails(publish_text(d, "a\nb", "first", 0, ""), TB_INVALID, "topic's name has a control character, 0x0a, at");
    assert_fails(try_open(p->url, "\x7f", 0, 1, &other), TB_INVALID, "0x7f, at byte 0");
    tb__directory_close(other);
    tb__directory_close(d);
}

static void token(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "g", 0, 2), *other;
    const tb__directory_opts wrong = {.token = TOKEN "x", .timeout_ms = PATIENCE_MS};
    assert_fails(tb__directory_open(p->url, "g", 1, 2, &wrong, &other), TB_DENIED, "token");
    tb__directory_close(d);
}

/* Those that the log has only counted come as one line: "9 more like this one ...". */
static void count_warnings(void *arg, tb_log_level level, const char *line) {
    if (level == TB_LOG_WARN && strstr(line, "is not a valid seat or note"))
        *(_Atomic int *)arg += strstr(line, " more like this one ") ? atoi(line) : 1;
}

static void nonsense(void **state) {
    const place *p = *state;
    static const char *const entries[][2] = {
        {"now/", "5"},
        {"now/else", ""},
        {"now/groups/g", "1 1 1 1 1 h\n"},
        {"now/groups/g/01", "2 1 1 1 1 h\n"},
        {"now/groups/g/1048576", "2 1 1 1 1 h\n"},
        {"now/groups/~2/1", "2 1 1 1 1 h\n"},
        {"now/groups/g~/1", "2 1 1 1 1 h\n"},
        {"now/groups//1", "2 1 1 1 1 h\n"},
        {"now/groups/g/1/1", "2 1 1 1 1 h\n"},
        {"now/groups/g/2", ""},
        {"now/groups/g/3", "4"},
        {"now/groups/g/4", "4 1 1 1 1 h\n"},
        {"now/groups/g/5", "9 -1 1 1 1 h\n"},
        {"now/groups/g/6", "9 1 0 1 1 h\n"},
        {"now/groups/g/7", "9 1 1 1 2 h\n"},
        {"now/groups/g/8", "9 1 1 1 1 h"},
        {"now/groups/g/9", "99999999999999999999 1 1 1 1 h\n"},
        {"now/notes/t/g", ""},
        {"now/notes/t/g/-1", ""},
    };
    enum { NENTRIES = sizeof entries / sizeof *entries };
    _Atomic int nwarnings = 0;
    tb_log_set(TB_LOG_WARN, count_warnings, &nwarnings);
    tb__directory *d = open_directory(p->url, "g", 0, 2);
    tb__store *store = open_store(p->url);
    for (int i = 0; i < NENTRIES; i++)
        set_text(store, entries[i][0], entries[i][1]);
    assert_ok(tb__directory_announce(d, "", 0, PATIENCE_MS));
    assert_int_equal(present(d, "g"), 1);
    assert_int_equal(count_notes(d, "t"), 0);
    assert_ok(tb__directory_enter(d, "h", 0, 1));
    tb__directory *other;
    if (store_of_places) { /* etcd lets everybody write */
        set_text(store, "next_rank", "-3");
        assert_fails(try_open(p->url, "i", 0, 1, &other), TB_INVALID,
                     "take a block for 'blocks/i/1': it is not a counter");
        set_text(store, "next_rank", "1048576");
    } else {
        assert_fails(tb__store_set(store, "next_rank", "-3", 2, TB__STORE_PERMANENT, NULL), TB_DENIED, "a counter");
        assert_ok(tb__store_count(store, "next_rank", 1048576, 0, NULL));
    }
    assert_fails(try_open(p->url, "i", 0, 1, &other), TB_TOO_BIG, "has reached 1048576");
    tb__store_close(store);
    tb__directory_close(d);
    tb_log_set(TB_LOG_OFF, NULL, NULL);
    /* Each is told at least once, but not with every change that follows: two threads may look at the same time. */
    assert_in_range(nwarnings, NENTRIES, 3 * NENTRIES);
}

static tb_status publish_answer(tb__directory *directory) {
    TB_TRY(publish_text(directory, "answer", "g", 0, "heard"));
    expected want = {"answer", 1};
    return has_notes(directory, &want) ? TB_OK : TB_INTERNAL;
}

static bool is_answered(tb__directory *directory, const void *arg) {
    (void)directory;
    ear *e = (ear *)(uintptr_t)arg;
    pthread_mutex_lock(&e->lock);
    bool is_over = e->answered != TB_INTERNAL;
    pthread_mutex_unlock(&e->lock);
    return is_over;
}

/* `changed` may call the directory. */
static void answering(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    e.answer = publish_answer;
    assert_ok(open_with_ear(p->url, "g", 0, 2, &e));
    tb__directory *other = open_directory(p->url, "g", 1, 2);
    assert_ok(tb__directory_announce(other, "", 0, PATIENCE_MS));
    assert_true(ear_await(&e, is_answered, &e));
    assert_int_equal(e.answered, TB_OK);
    tb__directory_close(e.directory);
    tb__directory_close(other);
}

static bool was_told_more(tb__directory *directory, const void *arg) {
    (void)directory;
    const expected *want = arg;
    ear *e = (ear *)(uintptr_t)want->name;
    pthread_mutex_lock(&e->lock);
    bool is_so = (int64_t)e->count >= want->count;
    pthread_mutex_unlock(&e->lock);
    return is_so;
}

/* A note that this process publishes while `changed` runs is a change, too. */
static void told_of_own_changes(void **state) {
    const place *p = *state;
    ear e;
    ear_init(&e);
    assert_ok(open_with_ear(p->url, "g", 0, 2, &e));
    tb__directory *other = open_directory(p->url, "g", 1, 2);
    assert_ok(tb__directory_announce(other, "", 0, PATIENCE_MS));
    await_members(&e, "g", 1);
    pthread_mutex_lock(&e.lock);
    e.answer = publish_answer;
    expected want = {(const char *)&e, (int64_t)e.count + 2};
    pthread_mutex_unlock(&e.lock);
    assert_ok(publish_text(other, "go", "g", 1, ""));
    assert_true(ear_await(&e, was_told_more, &want));
    assert_int_equal(e.answered, TB_OK);
    tb__directory_close(e.directory);
    tb__directory_close(other);
}

enum { NTHREADS = 4, NROUNDS = 25 };

typedef struct talker {
    tb__directory *directory;
    int number, nfailures;
    pthread_t thread;
} talker;

/* Whatever others do, a thread finds what it has said last. */
static void *talk(void *arg) {
    talker *t = arg;
    char topic[16], text[16];
    snprintf(topic, sizeof topic, "%d", t->number);
    for (int round = 0; round < NROUNDS; round++) {
        tb__notes found;
        snprintf(text, sizeof text, "%d", round);
        t->nfailures += publish_text(t->directory, topic, "g", 0, text) != TB_OK;
        tb__directory_notes(t->directory, topic, &found);
        if (found.count != 1 || found.item[0].nbytes != strlen(text) ||
            memcmp(found.item[0].data, text, strlen(text)) != 0)
            t->nfailures++;
        tb__notes_fini(&found);
        t->nfailures += tb__directory_withdraw(t->directory, topic, "g", 0, PATIENCE_MS) != TB_OK;
        t->nfailures += count_notes(t->directory, topic) != 0;
        t->nfailures += present(t->directory, "g") != 1;
    }
    return NULL;
}

static void threads(void **state) {
    const place *p = *state;
    talker talkers[NTHREADS];
    tb__directory *d = open_directory(p->url, "g", 0, 1);
    assert_ok(tb__directory_announce(d, "", 0, PATIENCE_MS));
    for (int i = 0; i < NTHREADS; i++) {
        talkers[i] = (talker){.directory = d, .number = i};
        assert_int_equal(pthread_create(&talkers[i].thread, NULL, talk, &talkers[i]), 0);
    }
    for (int i = 0; i < NTHREADS; i++) {
        pthread_join(talkers[i].thread, NULL);
        assert_int_equal(talkers[i].nfailures, 0);
    }
    tb__directory_close(d);
}

/* Every call, with one allocation after the other failing; then with enough memory. */
static void no_memory(void **state) {
    const place *p = *state;
    tb__directory *d = NULL;
    tb_status status = TB_NO_MEMORY;
    for (long n = 0; status != TB_OK; n++) {
        tb__mem_fail_after(n);
        status = try_open(p->url, "g", 0, 1, &d);
        tb__mem_fail_after(-1);
        assert_in_range(n, 0, 1000);
    }
    assert_ok(tb__directory_announce(d, "c", 1, PATIENCE_MS));
    assert_ok(publish_text(d, "t", "g", 0, "x"));
    for (int call = 0; call < 3; call++) {
        status = TB_NO_MEMORY;
        for (long n = 0; status != TB_OK; n++) {
            tb__roster roster = {0};
            tb__mem_fail_after(n);
            status = call == 0   ? tb__directory_roster(d, "g", &roster)
                     : call == 1 ? publish_text(d, "t", "g", 0, "y")
                                 : tb__directory_enter(d, "h", 0, 1);
            tb__mem_fail_after(-1);
            assert_true(status == TB_OK || status == TB_NO_MEMORY);
            tb__roster_fini(&roster);
            assert_in_range(n, 0, 1000);
        }
    }
    assert_int_equal(present(d, "g"), 1);
    assert_int_equal(present(d, "h"), 1);
    assert_note(d, "t", 0, "g", 0, "y");
    tb__directory_close(d);
}

/* The first answer holds for everybody, also when whoever gave it is gone. */
static void deciding(void **state) {
    const place *p = *state;
    tb__directory *d = open_directory(p->url, "g", 0, 2), *other = open_directory(p->url, "g", 1, 2);
    char *answer;
    uint64_t store = tb__directory_store_number(d);
    assert_true(store == tb__directory_store_number(other));
    assert_ok(tb__directory_decide(other, store, "3/1/7/0/12", "commit", PATIENCE_MS, &answer));
    assert_string_equal(answer, "commit");
    free(answer);
    tb__directory_close(other);
    for (int i = 0; i < 2; i++) {
        assert_ok(tb__directory_decide(d, store, "3/1/7/0/12", "abort", PATIENCE_MS, &answer));
        assert_string_equal(answer, "commit");
        free(answer);
    }
    assert_ok(tb__directory_decide(d, store, "3/1/7/0/13", "abort", PATIENCE_MS, &answer));
    assert_string_equal(answer, "abort");
    free(answer);
    if (!store_of_places) /* in etcd everybody can */
        assert_fails(tb__directory_forget(d, "3/1/7/0/12", PATIENCE_MS), TB_DENIED, "only the process that made it");
    assert_ok(tb__directory_forget(d, "3/1/7/0/13", PATIENCE_MS));
    assert_ok(tb__directory_forget(d, "3/1/7/0/13", PATIENCE_MS));
    assert_ok(tb__directory_decide(d, store, "3/1/7/0/13", "again", PATIENCE_MS, &answer));
    assert_string_equal(answer, "again");
    free(answer);
    assert_fails(tb__directory_decide(d, store + 1, "3/1/7/0/14", "abort", PATIENCE_MS, &answer), TB_IN_DOUBT,
                 "another one");
    tb__store *store_of_all = open_store(p->url); /* emptied, behind the directory's back */
    tb_status marked = tb__store_set(store_of_all, "mark", "another", 7, TB__STORE_PERMANENT, NULL);
    tb__store_close(store_of_all);
    assert_int_equal(marked, store_of_places ? TB_OK : TB_DENIED);
    if (marked == TB_OK)
        assert_fails(tb__directory_decide(d, store, "3/1/7/0/14", "abort", PATIENCE_MS, &answer), TB_IN_DOUBT,
                     "another one");
    char longest[TB__STORE_MAX_KEY + 1];
    memset(longest, 'q', sizeof longest);
    longest[TB__STORE_MAX_KEY] = '\0';
    assert_fails(tb__directory_decide(d, store, longest, "", PATIENCE_MS, &answer), TB_TOO_BIG, "question");
    tb__directory_close(d);
}

int main(int argc, char **argv) {
    bool is_etcd = argc == 2 && strcmp(argv[1], "etcd") == 0;
    const struct CMUnitTest tests[] = {
        AT_A_PLACE(announcing),      AT_A_PLACE(kept),       AT_A_PLACE(several_groups),
        AT_A_PLACE(same_rank_again), AT_A_PLACE(sizes),      AT_A_PLACE(size_races),
        AT_A_PLACE(no_record),       AT_A_PLACE(torn_group), AT_A_PLACE(notes),
        AT_A_PLACE(too_many_notes),  AT_A_PLACE(names),      AT_A_PLACE(token),
        AT_A_PLACE(nonsense),        AT_A_PLACE(answering),  AT_A_PLACE(told_of_own_changes),
        AT_A_PLACE(threads),         AT_A_PLACE(no_memory),  AT_A_PLACE(deciding),
    };
    if (is_etcd)
        return etcd_is_missing() ? SKIPPED : cmocka_run_group_tests(tests, start_the_etcd, stop_the_etcd);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
