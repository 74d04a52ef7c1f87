/* Links between hosts that are cut and mended, to be run by tests/hosts/bed 3 -- cut_test STORE. A trainer is on the
 * second host, an engine on the third; each is an agent, and a program that is its client. STORE is
 *
 *   own     `tensorbus store`, on the first host
 *   etcd    the same with etcd
 *   agent   the trainer's agent serves the store
 *   world   there are no agents: the programs are ranks, and the trainer's serves the store
 *
 * In each round a link is cut, while nothing moves or in the middle of a version, and mended a while later. A transfer
 * that the cut has ended names the rank at the other end. Then both programs make their pair again, under the same
 * name, and a new batch: after the mending, each with one call, or, if the cut has ended a transfer, from then on until
 * it succeeds. That is 5 seconds after the mending at the latest, and nothing has to be started again. The next version
 * is right in every element.
 *
 * Rounds take a second or twenty unless TB_CUTS is "all": then there are 21, of up to a minute. If it is "9-10", there
 * are these of them. */
#define BOARD_SEATS 2
#include "tests/hosts/agents.h"

#include <inttypes.h>

enum { TRAINER, ENGINE };
/* 8 MiB, through a link that takes 40 Mbit/s: what is done in between happens in the middle. */
enum { NTENSORS = 8, SIZE = 256 << 10, NELEMENTS = NTENSORS * SIZE };
enum { BACK_MS = 5000, TRY_MS = 3000 };

typedef enum way { BOTH, ONE, STORE, PEERS, STOP, NWAYS } way;

/* What cuts, what mends, and how it is told. BOTH and ONE also cut the engine's way to the store. To STOP the engine is
 * the same to others. */
static const struct {
    const char *cut, *mend, *told;
} ways[NWAYS] = {{"cut 2", "mend 2", "both directions"},
                 {"drop 2 100", "drop 2 0", "one direction"},
                 {"part 0 2", "join 0 2", "the way to the store"},
                 {"part 1 2", "join 1 2", "the way between the ranks"},
                 {NULL, NULL, "the engine is stopped"}};

typedef struct round {
    way way;
    int seconds;
    bool is_busy;
} round;

/* Whether ranks are processes of this program, and whether the store is on the first host, or where the trainer is. */
static bool are_worlds, is_apart;
static bool can_drop; /* packets; else links can only be cut as a whole */

static way way_of(const round *r) {
    if (!can_drop && r->way != STOP)
        return BOTH;
    return r->way == STORE && !is_apart ? PEERS : r->way;
}

/* Whether it ends a transfer: TCP makes good for a second. */
static bool is_loss(const round *r) {
    return r->is_busy && r->seconds > 1 && way_of(r) != STORE;
}

static const round all_rounds[] = {
    {BOTH, 1, false},   {BOTH, 1, true},   {ONE, 1, false},   {ONE, 1, true},   {STORE, 1, false},  {STORE, 1, true},
    {BOTH, 20, false},  {BOTH, 20, true},  {ONE, 20, false},  {ONE, 20, true},  {STORE, 20, false}, {STORE, 20, true},
    {PEERS, 20, false}, {PEERS, 20, true}, {BOTH, 60, false}, {BOTH, 60, true}, {ONE, 60, false},   {ONE, 60, true},
    {STORE, 60, false}, {STORE, 60, true}, {STOP, 20, false}};
enum { NROUNDS = sizeof all_rounds / sizeof *all_rounds };
/* With each store others, for the time that they take. */
static const round own_rounds[] = {{BOTH, 1, false}, {BOTH, 1, true}, {ONE, 1, false}, {STORE, 1, true}};
static const round etcd_rounds[] = {{BOTH, 1, false}, {ONE, 1, true}, {STORE, 1, false}};
static const round agent_rounds[] = {{BOTH, 20, false}, {BOTH, 1, true}};
static const round world_rounds[] = {{BOTH, 20, true}, {ONE, 1, true}};

static const struct {
    const char *name;
    const round *rounds;
    size_t nrounds;
} stores[] = {{"own", own_rounds, sizeof own_rounds / sizeof *own_rounds},
              {"etcd", etcd_rounds, sizeof etcd_rounds / sizeof *etcd_rounds},
              {"agent", agent_rounds, sizeof agent_rounds / sizeof *agent_rounds},
              {"world", world_rounds, sizeof world_rounds / sizeof *world_rounds}};

/* ---- In a client's process --------------------------------------------------------------------------------------- */

typedef struct client {
    int seat;
    float *data;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
} client;

static float value(int version, int i) {
    return (float)(((int64_t)i * 7 + (int64_t)version * 1000003) % (1 << 24));
}

static void drop(client *c) {
    tb_batch_destroy(c->batch);
    tb_pair_destroy(c->pair);
    c->batch = NULL;
    c->pair = NULL;
}

/* A new batch of the pair, which is made, or made again. */
static tb_status make(client *c, int patience_ms) {
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 1 << 20};
    tb_pair_opts pair = {.size = sizeof pair, .timeout_ms = patience_ms};
    const char *other = c->seat == TRAINER ? "engine" : "trainer";
    drop(c);
    tb_status status = tb_pair_create(c->world, "weights", other, "mesh=1 place=R", &pair, &c->pair);
    if (status == TB_OK)
        status = tb_batch_create(c->world, "step", &opts, &c->batch);
    for (int i = 0; i < NTENSORS && status == TB_OK; i++) {
        tb_tensor w = {
            .size = sizeof w, .data = c->data + (size_t)i * SIZE, .dtype = TB_F32, .ndim = 1, .shape = {SIZE}};
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        status = tb_batch_add(c->batch, c->pair, name, &w);
    }
    return status == TB_OK ? tb_batch_register(c->batch, patience_ms) : status;
}

/* Again and again, as a program does that does not know what has happened. */
static tb_status make_in_the_end(client *c) {
    tb_status status;
    int64_t deadline_ms = tb__now_ms() + DEADLINE_MS + JOIN_MS;
    do
        status = make(c, TRY_MS);
    while ((status == TB_TIMEOUT || status == TB_LOST) && tb__now_ms() < deadline_ms);
    return status;
}

static void note_progress(void *arg, const tb_transfer_state *state) {
    if (state->bytes_done > 0)
        atomic_store(&shared->seat[((client *)arg)->seat].moves, true);
}

static tb_status transfer(client *c) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = DEADLINE_MS, .progress = note_progress, .arg = c};
    tb_transfer *t = NULL;
    tb_status status = (c->seat == TRAINER ? tb_send : tb_recv)(c->batch, &opts, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

static tb_status move(client *c, int version) {
    for (int i = 0; i < NELEMENTS; i++)
        c->data[i] = c->seat == TRAINER ? value(version, i) : -1;
    tb_status status = transfer(c);
    for (int i = 0; i < NELEMENTS && status == TB_OK; i++) {
        if (c->data[i] == value(version, i))
            continue;
        fprintf(stderr, "%s: element %d of version %d is %.0f, not %.0f\n", name_of(c->seat), i, version, c->data[i],
                value(version, i));
        exit(1);
    }
    return status;
}

/* The first step makes the pair. Each round has two: a version, and the pair again. The last is a version. */
static tb_status do_step(client *c, int step, const round *rounds) {
    if (step == 1)
        return make(c, JOIN_MS);
    if (step % 2 == 0)
        return move(c, step);
    return is_loss(&rounds[step / 2 - 1]) ? make_in_the_end(c) : make(c, BACK_MS);
}

static const char *group_of(int seat) {
    return seat == TRAINER ? "trainer" : "engine";
}

static _Noreturn void be_client(int seat, const round *rounds, int nsteps) {
    client c = {.seat = seat};
    char path[64], agent[80];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = JOIN_MS, .token = token};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(seat + 1);
    path_of(seat, path);
    snprintf(agent, sizeof agent, "agent:%s", path);
    tb_status status = tb_alloc(NELEMENTS * sizeof(float), (void **)&c.data);
    if (status == TB_OK)
        status = tb_world_join(are_worlds ? url : agent, group_of(seat), 0, 1, &opts, &c.world);
    if (status != TB_OK) {
        fprintf(stderr, "%s: %s\n", name_of(seat), tb_error_detail());
        exit(1);
    }
    for (int step = 1; step <= nsteps; step++) {
        while (atomic_load(&shared->next) < step)
            nap(); /* the first process ends us if it does not come so far */
        note_status(seat, do_step(&c, step, rounds));
        atomic_store(&shared->seat[seat].done, step);
    }
    drop(&c);
    tb_world_destroy(c.world);
    tb_free(c.data);
    exit(0);
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static pid_t clients[NSEATS];

static void await_done(int step, int patience_ms) {
    int64_t deadline_ms = tb__now_ms() + patience_ms;
    for (int i = 0; i < NSEATS; i++) {
        while (atomic_load(&shared->seat[i].done) < step) {
            if (tb__now_ms() > deadline_ms)
                fail("%s has not come to the end of step %d", name_of(i), step);
            if (waitpid(clients[i], NULL, WNOHANG) == clients[i])
                fail("the program of %s has ended", name_of(i));
            nap();
        }
    }
}

static void must_be_well(const char *what) {
    for (int i = 0; i < NSEATS; i++) {
        if (shared->seat[i].status != TB_OK)
            fail("%s: %s", name_of(i), what);
    }
}

/* Both ends of a transfer that a cut has ended are told that the other is lost. */
static void must_name_each_other(void) {
    for (int i = 0; i < NSEATS; i++) {
        char name[32];
        snprintf(name, sizeof name, "(%s)", name_of(!i));
        if (shared->seat[i].status != TB_LOST || !strstr(shared->seat[i].sentence, name))
            fail("%s is not told that %s is lost", name_of(i), name_of(!i));
    }
}

static void sleep_until(int64_t ms) {
    while (tb__now_ms() < ms)
        nap();
}

static void cut(way w) {
    if (w == STOP)
        kill(are_worlds ? clients[ENGINE] : agents[ENGINE], SIGSTOP);
    else
        must_do(ways[w].cut);
}

static void mend(way w) {
    if (w == STOP)
        kill(are_worlds ? clients[ENGINE] : agents[ENGINE], SIGCONT);
    else
        must_do(ways[w].mend);
}

/* Returns the step after it. */
static int run_round(const round *r, int number, int step) {
    printf("round %d: %s, %d s, %s: ", number, ways[way_of(r)].told, r->seconds, r->is_busy ? "busy" : "idle");
    fflush(stdout);
    if (r->is_busy)
        must_do("shape 1 40mbit");
    begin(step);
    if (r->is_busy)
        await_middle(ENGINE);
    else
        await_done(step, DEADLINE_MS + SLACK_MS);
    cut(way_of(r));
    int64_t mended_ms = tb__now_ms() + r->seconds * 1000;
    if (is_loss(r)) {
        await_done(step, r->seconds * 1000);
        must_name_each_other();
        begin(++step);
    }
    sleep_until(mended_ms);
    mend(way_of(r));
    mended_ms = tb__now_ms();
    if (r->is_busy)
        must_do("shape 1 off");
    if (!is_loss(r)) {
        await_done(step, DEADLINE_MS + SLACK_MS);
        must_be_well("a version");
        begin(++step);
    }
    int64_t since_ms = r->is_busy && !is_loss(r) ? tb__now_ms() : mended_ms;
    await_done(step, DEADLINE_MS + SLACK_MS);
    int64_t took_ms = tb__now_ms() - since_ms;
    must_be_well("making the pair again");
    if (took_ms > BACK_MS)
        fail("making the pair again took %" PRId64 " ms", took_ms);
    printf("the pair was there again after %" PRId64 " ms\n", took_ms);
    fflush(stdout);
    return step + 1;
}

static void end_all(void) {
    for (int i = 0; i < NSEATS; i++) {
        if (end_of(clients[i], name_of(i)) != 0)
            fail("the program of %s has failed", name_of(i));
    }
    for (int i = NSEATS - 1; i >= 0 && !are_worlds; i--) {
        kill(agents[i], SIGTERM);
        if (end_of(agents[i], "an agent that was told to") != 0)
            fail("the agent of %s has failed", name_of(i));
    }
    if (store == 0)
        return;
    kill(store, SIGTERM);
    end_of(store, "the store");
}

static void run(const round *rounds, size_t nrounds, const char *where) {
    int nsteps = 2 + 2 * (int)nrounds, step = 1;
    are_worlds = strcmp(where, "world") == 0;
    is_apart = !are_worlds && strcmp(where, "agent") != 0;
    can_drop = hosts_do("part 0 2") && hosts_do("join 0 2") && hosts_do("drop 2 100") && hosts_do("drop 2 0");
    if (is_apart)
        start_store(strcmp(where, "etcd") == 0);
    else
        snprintf(url, sizeof url, "tcp://%s:7000", getenv("BED_ADDR_1"));
    for (int i = 0; i < NSEATS; i++) {
        if (!are_worlds)
            start_agent_at(i + 1, i, group_of(i), 0, 1);
        clients[i] = fork();
        if (clients[i] == 0)
            be_client(i, rounds, nsteps);
    }
    begin(step);
    await_done(step, 2 * JOIN_MS + SLACK_MS);
    must_be_well("making the pair");
    step++;
    for (size_t i = 0; i < nrounds; i++)
        step = run_round(&rounds[i], (int)i + 1, step);
    begin(step);
    await_done(step, DEADLINE_MS + SLACK_MS);
    must_be_well("the last version");
    end_all();
}

int main(int argc, char **argv) {
    const char *cuts = getenv("TB_CUTS");
    bool is_all = cuts && strcmp(cuts, "all") == 0;
    int from = 0, to = 0;
    tool = getenv("TENSORBUS");
    for (size_t i = 0; i < sizeof stores / sizeof *stores && argc == 2 && hosts_count() == 3 && tool; i++) {
        if (strcmp(argv[1], stores[i].name) != 0)
            continue;
        board_make((const char *const[NSEATS]){"trainer 0", "engine 0"});
        int status = make_folder(strcmp(argv[1], "etcd") == 0);
        if (status != 0)
            return status;
        if (is_all)
            run(all_rounds, NROUNDS, argv[1]);
        else if (cuts && sscanf(cuts, "%d-%d", &from, &to) == 2 && from >= 1 && from <= to && to <= NROUNDS)
            run(&all_rounds[from - 1], (size_t)to - (size_t)from + 1, argv[1]);
        else
            run(stores[i].rounds, stores[i].nrounds, argv[1]);
        return 0;
    }
    fprintf(stderr, "to be run by tests/hosts/bed 3 -- %s own|etcd|agent|world, with the command in $TENSORBUS\n",
            argv[0]);
    return 2;
}
