/* Processes that end as soon as their own part in a transfer is committed, without a word: what the others have got by
 * then is enough for them. The first process serves the store, starts the members, and collects how they ended.
 * TB_CONFIG=WORDS plays only the configurations that have these words in their names. */
#include "bus/members_test.h"

#include "bus/world.h"
#include "transport/transport.h"

#include <stdatomic.h>
#include <sys/prctl.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 2 };
#else
enum { ROUNDS = 8 };
#endif

enum { ROWS = 512, COLUMNS = 256, NTENSORS = 2 };

typedef enum leaver {
    LEAVE_SENDERS,
    LEAVE_RECEIVERS,
    LEAVE_FIRST, /* of each side */
    LEAVE_FIRST_SENDER,
    LEAVE_FIRST_RECEIVER,
} leaver;

/* One way to move a tensor, and who ends at once. */
typedef struct config {
    const char *name;
    int seats; /* of each side */
    bool staged, shadow, snapshot, checksum, is_ucx;
    bool is_encoded;  /* receivers have it quantised, with a scale that all of them agree on */
    bool is_copied;   /* each receiver has all of it: where they are on different hosts, one hands it on to the other */
    bool is_apart;    /* each sender has what one receiver wants */
    bool is_windowed; /* receivers take the second tensor when they are told */
    bool is_late;     /* all but the first of each side begin when they are told; those who leave have done so */
    bool is_late_receiver;   /* likewise, but senders do not wait */
    bool at_release;         /* they leave when their tensors are released */
    bool is_second;          /* they leave in the second transfer: by the first, all ranks are connected */
    bool is_late_connection; /* the last receiver takes its time to connect to the first sender, which has connected to
                                it */
    bool is_killed;
    leaver leaver;
} config;

static const config configs[] = {
    {.name = "direct, sender", .seats = 1},
    {.name = "direct, receiver", .seats = 1, .leaver = LEAVE_RECEIVERS},
    {.name = "direct, sender is killed", .seats = 1, .is_killed = true},
    {.name = "direct, receiver is killed", .seats = 1, .is_killed = true, .leaver = LEAVE_RECEIVERS},
    {.name = "staged, sender", .seats = 1, .staged = true},
    {.name = "staged, receiver", .seats = 1, .staged = true, .leaver = LEAVE_RECEIVERS},
    {.name = "snapshot, sender", .seats = 1, .snapshot = true},
    {.name = "checksum, receiver", .seats = 1, .checksum = true, .leaver = LEAVE_RECEIVERS},
    {.name = "shadow, sender", .seats = 1, .shadow = true},
    {.name = "shadow, receiver", .seats = 1, .shadow = true, .leaver = LEAVE_RECEIVERS},
    {.name = "two and two, direct, senders", .seats = 2},
    {.name = "two and two, direct, receivers", .seats = 2, .leaver = LEAVE_RECEIVERS},
    {.name = "two and two, staged, senders", .seats = 2, .staged = true},
    {.name = "two and two, staged, receivers", .seats = 2, .staged = true, .leaver = LEAVE_RECEIVERS},
    {.name = "two and two, shadow, senders", .seats = 2, .shadow = true},
    {.name = "two and two, shadow, receivers", .seats = 2, .shadow = true, .leaver = LEAVE_RECEIVERS},
    {.name = "ucx, sender", .seats = 1, .is_ucx = true},
    {.name = "ucx, receiver", .seats = 1, .is_ucx = true, .leaver = LEAVE_RECEIVERS},
    {.name = "ucx, two and two, shadow, senders", .seats = 2, .is_ucx = true, .shadow = true},
    {.name = "ucx, two and two, shadow, receivers",
     .seats = 2,
     .is_ucx = true,
     .shadow = true,
     .leaver = LEAVE_RECEIVERS},
    {.name = "ucx, handed on, senders", .seats = 2, .is_ucx = true, .is_copied = true},
    {.name = "ucx, handed on, receivers", .seats = 2, .is_ucx = true, .is_copied = true, .leaver = LEAVE_RECEIVERS},
    {.name = "quantised, senders", .seats = 2, .is_encoded = true},
    {.name = "quantised, receivers", .seats = 2, .is_encoded = true, .leaver = LEAVE_RECEIVERS},
    {.name = "quantised, staged, the first receiver",
     .seats = 2,
     .staged = true,
     .is_encoded = true,
     .leaver = LEAVE_FIRST_RECEIVER},
    {.name = "the first of each, direct", .seats = 2, .is_apart = true, .is_windowed = true, .leaver = LEAVE_FIRST},
    {.name = "the first of each, staged",
     .seats = 2,
     .staged = true,
     .is_apart = true,
     .is_windowed = true,
     .leaver = LEAVE_FIRST},
    {.name = "the first of each, ucx",
     .seats = 2,
     .is_ucx = true,
     .is_apart = true,
     .is_windowed = true,
     .leaver = LEAVE_FIRST},
    {.name = "the others come later, ucx",
     .seats = 2,
     .is_ucx = true,
     .is_apart = true,
     .is_late = true,
     .leaver = LEAVE_FIRST},
    {.name = "a receiver comes later, direct", .seats = 2, .is_late_receiver = true, .leaver = LEAVE_FIRST_RECEIVER},
    {.name = "a receiver comes later, staged",
     .seats = 2,
     .staged = true,
     .is_late_receiver = true,
     .leaver = LEAVE_FIRST_RECEIVER},
    {.name = "a receiver comes later, ucx",
     .seats = 2,
     .is_ucx = true,
     .is_late_receiver = true,
     .leaver = LEAVE_FIRST_RECEIVER},
    {.name = "prepared, the sender is killed",
     .seats = 2,
     .shadow = true,
     .is_apart = true,
     .is_late = true,
     .at_release = true,
     .is_second = true,
     .is_killed = true,
     .leaver = LEAVE_FIRST_SENDER},
    {.name = "prepared, staged, the sender is killed",
     .seats = 2,
     .shadow = true,
     .staged = true,
     .is_apart = true,
     .is_late = true,
     .at_release = true,
     .is_second = true,
     .is_killed = true,
     .leaver = LEAVE_FIRST_SENDER},
    {.name = "half connected, the sender is killed",
     .seats = 2,
     .is_apart = true,
     .is_late = true,
     .is_late_connection = true,
     .at_release = true,
     .is_killed = true,
     .leaver = LEAVE_FIRST_SENDER},
    {.name = "half connected, prepared, staged, the sender is killed",
     .seats = 2,
     .shadow = true,
     .staged = true,
     .is_apart = true,
     .is_late = true,
     .is_late_connection = true,
     .at_release = true,
     .is_killed = true,
     .leaver = LEAVE_FIRST_SENDER},
    {.name = "the others come later, direct", .seats = 2, .is_apart = true, .is_late = true, .leaver = LEAVE_FIRST},
    {.name = "the others come later, staged",
     .seats = 2,
     .staged = true,
     .is_apart = true,
     .is_late = true,
     .leaver = LEAVE_FIRST},
};

/* All elements of what is quantised are the same: 448 is the largest number of its format. */
enum { ENCODED = 7, ENCODED_BYTE = 0x7e, ENCODED_LARGEST = 448 };

enum { NCONFIGS = sizeof configs / sizeof *configs };

/* ---- In a member ----------------------------------------------------------------------------------------------- */

typedef struct member {
    const config *c;
    int position, round; /* senders come first */
    tb__store *store;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    float *memory[NTENSORS]; /* where it is quantised: bytes */
    float scale;
} member;

static void must(const member *m, tb_status status, const char *what) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "'%s', round %d, member %d: %s: %s: %s\n", m->c->name, m->round, m->position, what,
            tb_status_string(status), tb_error_detail());
    exit(BROKEN);
}

static void must_be(const member *m, bool claim, const char *what) {
    if (!claim) {
        fprintf(stderr, "'%s', round %d, member %d: %s\n", m->c->name, m->round, m->position, what);
        exit(BROKEN);
    }
}

static bool is_sender(const member *m) {
    return m->position < m->c->seats;
}

static int seat_of(const member *m) {
    return m->position % m->c->seats;
}

static bool leaves(const member *m) {
    if (m->c->leaver >= LEAVE_FIRST)
        return seat_of(m) == 0 &&
               (is_sender(m) ? m->c->leaver != LEAVE_FIRST_RECEIVER : m->c->leaver != LEAVE_FIRST_SENDER);
    return is_sender(m) == (m->c->leaver == LEAVE_SENDERS);
}

static bool has_rows(const member *m) {
    return is_sender(m) != m->c->is_encoded || m->c->is_apart;
}

static bool has_all(const member *m) {
    return m->c->is_copied && !is_sender(m);
}

static bool is_encoded(const member *m) {
    return m->c->is_encoded && !is_sender(m);
}

static int count_of(const member *m) {
    return ROWS * COLUMNS / (has_all(m) ? 1 : m->c->seats);
}

/* Where the local part's element i is in the whole tensor. */
static int index_of(const member *m, int i) {
    if (has_all(m))
        return i;
    int width = has_rows(m) ? COLUMNS : COLUMNS / m->c->seats;
    int row = i / width + (has_rows(m) ? seat_of(m) * ROWS / m->c->seats : 0);
    return row * COLUMNS + i % width + (has_rows(m) ? 0 : seat_of(m) * width);
}

static float value_of(const member *m, int tensor, int i) {
    if (m->c->is_encoded)
        return ENCODED;
    return (float)(tensor * ROWS * COLUMNS + index_of(m, i));
}

static void fill(const member *m) {
    for (int t = 0; t < NTENSORS; t++) {
        for (int i = 0; i < count_of(m); i++)
            m->memory[t][i] = is_sender(m) ? value_of(m, t, i) : -1;
    }
}

static void check_encoded(const member *m) {
    for (int t = 0; t < NTENSORS; t++) {
        for (int i = 0; i < count_of(m); i++)
            must_be(m, ((const unsigned char *)m->memory[t])[i] == ENCODED_BYTE, "an element is wrong");
    }
    must_be(m, m->scale == (float)ENCODED / ENCODED_LARGEST, "the scale is wrong");
}

static void check_elements(const member *m) {
    if (is_encoded(m)) {
        check_encoded(m);
        return;
    }
    for (int t = 0; t < NTENSORS; t++) {
        for (int i = 0; i < count_of(m); i++)
            must_be(m, m->memory[t][i] == value_of(m, t, i), "an element is wrong");
    }
}

static atomic_bool connects_late;

static tb_status connect_late(void *context, int32_t rank, const void *address, size_t nbytes) {
    if (atomic_load(&connects_late))
        usleep(100000); /* in which the other end is killed */
    return tb__shm_ops.connect(context, rank, address, nbytes);
}

static void join(member *m, const char *url) {
    char address[200], host[16];
    snprintf(address, sizeof address, "%s?namespace=bus%d-%d", url, (int)(m->c - configs), m->round);
    snprintf(host, sizeof host, "host %d", m->position);
    tb_transport_ops late = tb__shm_ops;
    late.name = "late";
    late.connect = connect_late;
    must(m, tb_transport_register(&late), "a transport");
    tb_world_opts opts = {.size = sizeof opts,
                          .token = TOKEN,
                          .timeout_ms = PATIENCE_MS,
                          .transport = m->c->is_ucx               ? "ucx"
                                       : m->c->is_late_connection ? "late"
                                                                  : NULL,
                          .host = m->c->is_ucx ? host : NULL};
    must(m, tb_world_join(address, is_sender(m) ? "a" : "b", seat_of(m), m->c->seats, &opts, &m->world), "join");
}

static void make_batch(member *m) {
    char layout[48];
    snprintf(layout, sizeof layout, has_all(m) ? "mesh=%d place=R" : "mesh=%d place=Shard(%d)", m->c->seats,
             has_rows(m) ? 0 : 1);
    tb_batch_opts opts = {.size = sizeof opts,
                          .bucket_size = 64 << 10,
                          .staged = m->c->staged,
                          .snapshot = m->c->snapshot && is_sender(m),
                          .checksum = m->c->checksum,
                          .group_window = m->c->is_windowed ? 1 : 0,
                          .commit = m->c->shadow ? TB_SHADOW : TB_IN_PLACE};
    must(m, tb_pair_create(m->world, "p", is_sender(m) ? "b" : "a", layout, NULL, &m->pair), "pair");
    must(m, tb_batch_create(m->world, "step", &opts, &m->batch), "batch");
    for (uint32_t t = 0; t < NTENSORS; t++) {
        tb_tensor tensor = {.size = sizeof tensor,
                            .data = m->memory[t],
                            .dtype = TB_F32,
                            .ndim = 2,
                            .shape = {ROWS, COLUMNS},
                            .group = m->c->is_windowed ? t : 0};
        if (is_encoded(m)) {
            tensor.dtype = TB_F8E4M3;
            tensor.encode = "fp8_tensor";
            tensor.scale = &m->scale;
            tensor.scale_group = "both";
        }
        must(m, tb_batch_add(m->batch, m->pair, t ? "second" : "first", &tensor), "add");
    }
    must(m, tb_batch_register(m->batch, 0), "register");
}

static void wait_word(const member *m, const char *what) {
    must(m, hear_of(m->store, what, m->round, (int)(m->c - configs), PATIENCE_MS, NULL, 0), what);
}

static void say(const member *m, const char *what) {
    char key[48];
    snprintf(key, sizeof key, "%s %d", what, (int)(m->c - configs));
    must(m, say_of(m->store, key, m->round, m->position, ""), what);
}

/* The start of a transfer goes to ranks that are connected by it, which takes a while. */
static bool has_sent_all(const member *m) {
    bool has_all = true;
    tb__loop_lock(m->world->loop);
    for (const tb__peer *peer = tb__loop_peers(m->world->loop); peer; peer = peer->next)
        has_all &= peer->nunsent == 0;
    tb__loop_unlock(m->world->loop);
    return has_all;
}

static void die(const member *m) {
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (m->c->is_late_connection && !has_sent_all(m)) {
        must_be(m, tb__now_ms() < deadline_ms, "its messages are not sent");
        usleep(100);
    }
    if (m->c->is_killed)
        kill(getpid(), SIGKILL);
    _exit(0);
}

/* What is left of the pair moves nothing more, and says who is missing. */
static void next_is_lost(const member *m) {
    tb_transfer *t = NULL;
    tb_status status = (is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, PATIENCE_MS);
    must_be(m, status == TB_LOST, "the next transfer is not lost");
    must_be(m, strstr(tb_error_detail(), "rank ") && strstr(tb_error_detail(), "lost"), tb_error_detail());
    tb_transfer_destroy(t);
}

static void move(member *m) {
    tb_transfer *t = NULL;
    bool is_first = seat_of(m) == 0;
    if (m->c->is_second) {
        must(m, (is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t), "begin");
        must(m, tb_wait(t, TB_COMMITTED, PATIENCE_MS), "the first transfer");
        tb_transfer_destroy(t);
        fill(m);
    }
    atomic_store(&connects_late, m->c->is_late_connection && m->position == 2 * m->c->seats - 1);
    say(m, "ready");
    wait_word(m, "begin");
    if (!is_first && (m->c->is_late || (m->c->is_late_receiver && !is_sender(m))))
        wait_word(m, "left");
    must(m, (is_sender(m) ? tb_send : tb_recv)(m->batch, NULL, &t), "begin");
    if (m->c->is_windowed && !is_sender(m)) {
        must(m, tb_wait_group(t, 0, PATIENCE_MS), "the first tensor");
        say(m, "half");
        wait_word(m, is_first ? "half" : "left");
    }
    must(m, tb_wait(t, leaves(m) && m->c->at_release ? TB_RELEASED : TB_COMMITTED, PATIENCE_MS), "the transfer");
    if (leaves(m)) {
        if (!is_sender(m))
            check_elements(m);
        die(m);
    }
    check_elements(m);
    tb_transfer_destroy(t);
}

static int play(const char *url, const char *arg) {
    char *end;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind, whatever ends the first process */
    long which = strtol(arg, &end, 10);
    member m = {.c = &configs[which]};
    m.round = (int)strtol(end, &end, 10);
    m.position = (int)strtol(end, NULL, 10);
    must(&m, tb__store_open(url, TOKEN, PATIENCE_MS, &m.store), "the store");
    for (int t = 0; t < NTENSORS; t++)
        must(&m, tb_alloc((size_t)count_of(&m) * sizeof(float), (void **)&m.memory[t]), "memory");
    fill(&m);
    join(&m, url);
    make_batch(&m);
    move(&m);
    say(&m, "done");
    wait_word(&m, "gone");
    next_is_lost(&m);
    tb_batch_destroy(m.batch);
    tb_pair_destroy(m.pair);
    tb_world_destroy(m.world);
    for (int t = 0; t < NTENSORS; t++)
        tb_free(m.memory[t]);
    tb__store_close(m.store);
    return 0;
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

static void hear_all(const scene *s, const config *c, const char *what, int round, int first, int step) {
    char key[48];
    snprintf(key, sizeof key, "%s %d", what, (int)(c - configs));
    for (int i = first; i < 2 * c->seats; i += step)
        hear_member(s, key, round, i, NULL, 0);
}

static void tell_all(const scene *s, const config *c, const char *what, int round) {
    assert_ok(say_of(s->store, what, round, (int)(c - configs), ""));
}

static bool is_leaver(const config *c, int position) {
    const member m = {.c = c, .position = position};
    return leaves(&m);
}

/* Those who leave are through before anybody else has to be. */
static void await_leavers(scene *s, const config *c) {
    for (int i = 0; i < 2 * c->seats; i++) {
        if (!is_leaver(c, i))
            continue;
        int end = end_of(s->pids[i]);
        s->pids[i] = 0;
        if (c->is_killed)
            assert_int_equal(end, -SIGKILL);
        else
            assert_int_equal(end, 0);
    }
}

static void play_round(scene *s, const config *c, int round) {
    for (int i = 0; i < 2 * c->seats; i++) {
        char arg[64];
        snprintf(arg, sizeof arg, "%d %d %d", (int)(c - configs), round, i);
        s->pids[i] = start_role("member", s->place.url, arg);
    }
    hear_all(s, c, "ready", round, 0, 1);
    tell_all(s, c, "begin", round);
    if (c->is_windowed) {
        hear_all(s, c, "half", round, c->seats, 1);
        tell_all(s, c, "half", round);
    }
    await_leavers(s, c);
    tell_all(s, c, "left", round);
    for (int i = 0; i < 2 * c->seats; i++) {
        char key[48], value[8];
        snprintf(key, sizeof key, "done %d", (int)(c - configs));
        if (!is_leaver(c, i))
            hear_member(s, key, round, i, value, sizeof value);
    }
    tell_all(s, c, "gone", round);
    end_members(s);
}

static void who_has_everything_ends_well(void **state) {
    const char *only = getenv("TB_CONFIG");
    for (int i = 0; i < NCONFIGS; i++) {
        if (only && !strstr(configs[i].name, only))
            continue;
        for (int round = 0; round < ROUNDS; round++)
            play_round(*state, &configs[i], round);
    }
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(who_has_everything_ends_well, set_up, tear_down)};
    return cmocka_run_group_tests_name("exit", tests, NULL, NULL);
}
