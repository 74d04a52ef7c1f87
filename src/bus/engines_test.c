/* Several engines, each a pair of one batch: what happens to one does not concern the others. Two trainers send to
 * three engines of two ranks each. In the middle of the second version a rank of the second engine is killed, and the
 * others commit; the third goes to them alone; then that engine comes back, and the fourth goes to all. */
#include "bus/store/store_test.h"

#include <inttypes.h>
#include <sys/prctl.h>

enum { NTRAINERS = 2, NENGINES = 3, SEATS = 2, NPROCESSES = NTRAINERS + NENGINES * SEATS };
enum { ROWS = 24, COLUMNS = 16, MOST = ROWS * COLUMNS, VICTIM = NTRAINERS + SEATS, BROKEN = 99 };

/* ---- In a process ------------------------------------------------------------------------------------------------ */

typedef struct process {
    int position; /* trainers, then the engines' ranks */
    bool is_back; /* of the engine that comes back */
    tb__store *store;
    tb_world *world;
    tb_pair *pairs[NENGINES];
    tb_batch *batch;
    float *w;
} process;

#define must(p, status) must_at(p, status, __LINE__)
static void must_at(const process *p, tb_status status, int line) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "process %d, line %d: %s: %s\n", p->position, line, tb_status_string(status), tb_error_detail());
    exit(BROKEN);
}

static void must_be(const process *p, bool claim, const char *what) {
    if (claim)
        return;
    fprintf(stderr, "process %d: %s (last failure: %s)\n", p->position, what, tb_error_detail());
    exit(BROKEN);
}

static bool is_trainer(const process *p) {
    return p->position < NTRAINERS;
}

static int engine_of(const process *p) {
    return (p->position - NTRAINERS) / SEATS;
}

static int seat_of(const process *p) {
    return is_trainer(p) ? p->position : (p->position - NTRAINERS) % SEATS;
}

static void name_key(char *out, size_t room, const char *what, int position) {
    snprintf(out, room, "%s/%d", what, position);
}

static void say(const process *p, const char *what) {
    char key[64];
    name_key(key, sizeof key, what, p->position);
    must(p, tb__store_set(p->store, key, "", 0, TB__STORE_PERMANENT, NULL));
}

static void hear(const process *p, const char *what, int position) {
    char key[64];
    tb__store_value got;
    name_key(key, sizeof key, what, position);
    must(p, await_key(p->store, key, PATIENCE_MS, &got));
    tb__store_value_fini(&got);
}

static void join(process *p, const char *url) {
    char there[128], group[24] = "trainer";
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = PATIENCE_MS};
    if (!is_trainer(p))
        snprintf(group, sizeof group, "engine %d", engine_of(p));
    snprintf(there, sizeof there, "%s?namespace=bus", url);
    must(p, tb_world_join(there, group, seat_of(p), is_trainer(p) ? NTRAINERS : SEATS, &opts, &p->world));
}

static void add_engine(process *p, int engine) {
    char name[24], remote[24] = "trainer";
    snprintf(name, sizeof name, "pair %d", engine);
    if (is_trainer(p))
        snprintf(remote, sizeof remote, "engine %d", engine);
    tb_tensor w = {.size = sizeof w, .data = p->w, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    must(p, tb_pair_create(p->world, name, remote, is_trainer(p) ? "mesh=2 place=S0" : "mesh=2 place=S1", NULL,
                           &p->pairs[engine]));
    must(p, tb_batch_add(p->batch, p->pairs[engine], "w", &w));
}

static void fill(const process *p, int version) {
    int count = MOST / NTRAINERS;
    for (int i = 0; i < count; i++)
        p->w[i] = (float)(version * 1000 + seat_of(p) * count + i);
}

static bool holds(const process *p, int version) {
    int width = COLUMNS / SEATS;
    for (int i = 0; i < ROWS * width; i++) {
        int index = i / width * COLUMNS + seat_of(p) * width + i % width;
        if (p->w[i] != (float)(version * 1000 + index))
            return false;
    }
    return true;
}

static tb_transfer_state state_of(const process *p, const tb_transfer *t, int engine) {
    tb_transfer_state state = {.size = sizeof state};
    must(p, tb_transfer_pair(t, p->pairs[engine], &state));
    return state;
}

/* The second engine holds the second version up; the others have it. */
static void lose_one(process *p) {
    tb_transfer *t = NULL;
    fill(p, 2);
    must(p, tb_send(p->batch, NULL, &t));
    for (int i = NTRAINERS; i < NPROCESSES; i++) {
        if ((i - NTRAINERS) / SEATS != 1)
            hear(p, "committed 2", i);
    }
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (int engine = 0; engine < NENGINES; engine += 2) { /* they have said so to us before, by another way */
        while (!(state_of(p, t, engine).events & TB_COMMITTED) && tb__now_ms() < deadline_ms)
            must_be(p, tb_wait(t, TB_COMMITTED, 1) == TB_TIMEOUT, "it has ended without the second engine");
        must_be(p, state_of(p, t, engine).version == 2, "an engine does not have version 2");
    }
    must_be(p, !(state_of(p, t, 1).events & TB_COMMITTED), "the second engine has committed");
    say(p, "seen");
    must_be(p, tb_wait(t, TB_COMMITTED, -1) == TB_LOST && strstr(tb_error_detail(), "(engine 1 0)"),
            "the loss is not told");
    must(p, tb_wait(t, TB_RELEASED, 0));
    must_be(p, state_of(p, t, 1).status == TB_LOST, "its pair does not tell it");
    must_be(p, state_of(p, t, 0).status == TB_OK && state_of(p, t, 2).status == TB_OK, "others were lost, too");
    tb_transfer_destroy(t);
}

static void send_version(process *p, int version, bool skips) {
    tb_transfer_opts opts = {.size = sizeof opts, .skip_lost = skips};
    tb_transfer *t = NULL;
    fill(p, version);
    must(p, tb_send(p->batch, &opts, &t));
    must(p, tb_wait(t, TB_COMMITTED, -1));
    must_be(p, state_of(p, t, 1).status == (skips ? TB_LOST : TB_OK), "the second engine's state is wrong");
    tb_transfer_destroy(t);
}

static void train(process *p) {
    tb_transfer *t = NULL;
    for (int engine = 0; engine < NENGINES; engine++)
        add_engine(p, engine);
    must(p, tb_batch_register(p->batch, 0));
    must_be(p, tb_batch_epoch(p->batch) == 1, "the first epoch is not 1");
    send_version(p, 1, false);
    lose_one(p);
    must_be(p, tb_send(p->batch, NULL, &t) == TB_LOST && strstr(tb_error_detail(), "(engine 1 0)"),
            "a lost engine is not refused by name");
    send_version(p, 3, true);
    must(p, tb_batch_remove_pair(p->batch, p->pairs[1]));
    tb_pair_destroy(p->pairs[1]);
    say(p, "removed");
    for (int seat = 0; seat < SEATS; seat++) /* else the pair could be made with processes that are about to go */
        hear(p, "back", VICTIM + seat);
    add_engine(p, 1);
    must(p, tb_batch_register(p->batch, 0));
    must_be(p, tb_batch_epoch(p->batch) == 3, "it has not become epoch 3");
    send_version(p, 4, false);
}

static void receive(process *p, int version) {
    char what[32];
    tb_transfer *t = NULL;
    must(p, tb_recv(p->batch, NULL, &t));
    must(p, tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    must_be(p, holds(p, version), "the tensor is wrong");
    snprintf(what, sizeof what, "committed %d", version);
    say(p, what);
}

/* In the engine that is about to be lost. */
static void get_lost(process *p) {
    tb_transfer *t = NULL;
    if (p->position == VICTIM) {
        say(p, "held");
        for (;;)
            pause();
    }
    must(p, tb_recv(p->batch, NULL, &t));
    must_be(p, tb_wait(t, TB_COMMITTED, -1) == TB_LOST && strstr(tb_error_detail(), "(engine 1 0)"),
            "the loss is not told");
    tb_transfer_destroy(t);
    must_be(p, holds(p, 1), "the version before is gone");
}

static void serve(process *p) {
    uint64_t version;
    bool is_torn;
    int engine = engine_of(p);
    add_engine(p, engine);
    must(p, tb_batch_register(p->batch, 0));
    for (int i = p->is_back ? 4 : 1; i <= 4; i++) {
        if (engine == 1 && i == 2) {
            get_lost(p);
            return;
        }
        receive(p, i);
    }
    must(p, tb_batch_version(p->batch, p->pairs[engine], &version, &is_torn));
    must_be(p, version == 4 && !is_torn, "the version is wrong");
    must_be(p, tb_batch_epoch(p->batch) == 1, "it has registered again");
}

static int play(const char *url, const char *arg) {
    char *end;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind, whatever ends the first process */
    process p = {.position = (int)strtol(arg, &end, 10)};
    p.is_back = strcmp(end, " back") == 0;
    tb_batch_opts opts = {.size = sizeof opts};
    opts.commit = !is_trainer(&p) && engine_of(&p) < 2 ? TB_SHADOW : TB_IN_PLACE;
    must(&p, tb__store_open(url, TOKEN, PATIENCE_MS, &p.store));
    must(&p, tb_alloc(MOST * sizeof(float), (void **)&p.w));
    join(&p, url);
    if (p.is_back)
        say(&p, "back");
    must(&p, tb_batch_create(p.world, "step", &opts, &p.batch));
    if (is_trainer(&p))
        train(&p);
    else
        serve(&p);
    tb_batch_destroy(p.batch);
    for (int i = 0; i < NENGINES; i++)
        tb_pair_destroy(p.pairs[i]);
    tb_world_destroy(p.world);
    tb_free(p.w);
    tb__store_close(p.store);
    return 0;
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static void start(pid_t *pids, int position, const place *p, bool is_back) {
    char arg[32];
    snprintf(arg, sizeof arg, "%d%s", position, is_back ? " back" : "");
    pids[position] = start_role("process", p->url, arg);
}

/* Fails as soon as somebody has ended who should not have. */
static void hear_of(tb__store *store, const char *what, int position) {
    char key[64];
    tb__store_value got = {0};
    name_key(key, sizeof key, what, position);
    assert_ok(await_key(store, key, PATIENCE_MS, &got));
    tb__store_value_fini(&got);
}

static void one_is_lost_and_comes_back(void **state) {
    (void)state;
    place p;
    tb__store_server *server;
    pid_t pids[NPROCESSES];
    place_make(&p);
    assert_ok(tb__store_server_start(p.url, TOKEN, &server));
    tb__store *store = open_store(p.url);
    for (int i = 0; i < NPROCESSES; i++)
        start(pids, i, &p, false);
    hear_of(store, "held", VICTIM);
    for (int i = 0; i < NTRAINERS; i++)
        hear_of(store, "seen", i);
    kill_role(pids[VICTIM]);
    assert_int_equal(end_of(pids[VICTIM + 1]), 0);
    for (int i = 0; i < NTRAINERS; i++)
        hear_of(store, "removed", i);
    for (int i = 0; i < SEATS; i++)
        start(pids, VICTIM + i, &p, true);
    for (int i = 0; i < NPROCESSES; i++)
        assert_int_equal(end_of(pids[i]), 0);
    tb__store_close(store);
    tb__store_server_stop(server);
    place_remove(&p);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "process") == 0)
        return play(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_is_lost_and_comes_back)};
    return cmocka_run_group_tests_name("engines", tests, NULL, NULL);
}
