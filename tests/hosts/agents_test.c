/* Agents between hosts, to be run by tests/hosts/bed 3 -- agents_test STORE, where STORE is "own" (`tensorbus store`)
 * or "etcd"; it serves on the first host. A trainer has two seats there, an engine two on each of the others, where
 * both hosts have all of the weights. Each seat is an agent, which is a process of the command in $TENSORBUS; beside it
 * is a program that is its client.
 *
 * Versions go in place and by shadow, and every element is looked at. One agent is killed in the middle of a version:
 * everybody is told whom that was, and the engine keeps the version that it had. Then it comes back, and all goes on.
 */
#include "tests/hosts/agents.h"
#include "tests/support/program.h"

#include <inttypes.h>
#include <jansson.h>

enum { NTRAINERS = 2, SEATS_OF_HOST = 2 };
/* 8 MiB leave the trainer's host, through a link that takes 40 Mbit/s: what is done in between happens in the middle.
 */
enum { ROWS = 2048, COLUMNS = 1024 };
enum { PLACE, SHADOW, NKINDS };

static const char *const kinds[NKINDS] = {"place", "shadow"}; /* pairs, and batches */
static const int64_t nelements = (int64_t)ROWS * COLUMNS / 2; /* of each seat, whichever side it is of */

/* What is done, one after the other, by all clients. */
static const struct {
    enum { MOVE, LOSE, REOPEN } what;
    int kind;
} steps[] = {{MOVE, PLACE},  {MOVE, SHADOW}, {MOVE, PLACE},   {MOVE, SHADOW}, {MOVE, PLACE},
             {MOVE, SHADOW}, {LOSE, SHADOW}, {REOPEN, PLACE}, {MOVE, PLACE},  {MOVE, SHADOW}};
enum { NSTEPS = sizeof steps / sizeof *steps };

static bool is_trainer(int seat) {
    return seat < NTRAINERS;
}

static int index_of(int seat) {
    return is_trainer(seat) ? seat : seat - NTRAINERS;
}

static int host_of(int seat) {
    return seat / SEATS_OF_HOST;
}

/* ---- In a client's process --------------------------------------------------------------------------------------- */

typedef struct client {
    int seat;
    program *agent;
    program_batch *batch[NKINDS];
    float *data[NKINDS];
    int version[NKINDS]; /* what the tensors hold: the step that it came by */
} client;

static _Noreturn void give_up(const client *c, const char *what) {
    fprintf(stderr, "%s: %s: %s\n", name_of(c->seat), what, tb_error_detail());
    exit(1);
}

static float value(int version, int64_t row, int64_t column) {
    return (float)((row * COLUMNS + column + (int64_t)version * 1000003) % (1 << 24));
}

/* Trainers have rows; of the engine's seats, those of one host have all columns between them. */
static float value_at(const client *c, int version, int64_t i) {
    int64_t width = COLUMNS / 2, half = index_of(c->seat) % 2;
    return is_trainer(c->seat) ? value(version, half * (ROWS / 2) + i / COLUMNS, i % COLUMNS)
                               : value(version, i / width, half * width + i % width);
}

static void look_for(const client *c, int kind, int version) {
    for (int64_t i = 0; i < nelements; i++) {
        float expected = value_at(c, version, i);
        if (c->data[kind][i] == expected)
            continue;
        fprintf(stderr, "%s, %s: element %" PRId64 " of version %d is %.0f, not %.0f\n", name_of(c->seat), kinds[kind],
                i, version, c->data[kind][i], expected);
        exit(1);
    }
}

/* The agent is up once it listens. */
static tb_status connect_agent(client *c) {
    char path[64];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = JOIN_MS, .token = token};
    path_of(c->seat, path);
    return program_connect(path, &opts, &c->agent);
}

static tb_status open_kind(client *c, int kind) {
    tb_batch_opts opts = {
        .size = sizeof opts, .bucket_size = 1 << 20, .commit = kind == SHADOW ? TB_SHADOW : TB_IN_PLACE};
    tb_tensor w = {.size = sizeof w, .data = c->data[kind], .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
    tb_status status = program_pair(c->agent, kinds[kind], is_trainer(c->seat) ? "engine" : "trainer",
                                    is_trainer(c->seat) ? "mesh=2 place=S0" : "mesh=2,2 place=R,S1", JOIN_MS);
    if (status == TB_OK)
        status = program_batch_create(c->agent, kinds[kind], &opts, &c->batch[kind]);
    if (status == TB_OK)
        status = program_add(c->batch[kind], kinds[kind], "w", &w);
    return status == TB_OK ? program_register(c->batch[kind], JOIN_MS) : status;
}

static void drop_batches(client *c) {
    for (int kind = 0; kind < NKINDS; kind++) {
        program_batch_destroy(c->batch[kind]);
        c->batch[kind] = NULL;
    }
}

static tb_status open_all(client *c) {
    tb_status status = c->agent ? TB_OK : connect_agent(c);
    for (int kind = 0; kind < NKINDS && status == TB_OK; kind++)
        status = open_kind(c, kind);
    return status;
}

/* Whoever has not heard of the new agent yet meets the old one, which is gone. */
static tb_status reopen(client *c) {
    int64_t deadline_ms = tb__now_ms() + JOIN_MS;
    tb_status status;
    do {
        drop_batches(c);
        if (c->seat == VICTIM) {
            program_close(c->agent);
            c->agent = NULL;
        }
        status = open_all(c);
    } while (status == TB_LOST && tb__now_ms() < deadline_ms);
    return status;
}

static tb_status move(client *c, int kind) {
    bool is_send = is_trainer(c->seat);
    int64_t deadline_ms = tb__now_ms() + DEADLINE_MS + SLACK_MS;
    program_transfer_opts opts = {.timeout_ms = DEADLINE_MS, .no_wait = true};
    program_status now = {0};
    tb_status status = program_transfer(c->batch[kind], is_send, &opts);
    while (status == TB_OK) {
        status = program_wait(c->batch[kind], is_send, TB_COMMITTED, LOOK_MS);
        if (status != TB_TIMEOUT || tb__now_ms() > deadline_ms)
            break;
        status = program_query(c->batch[kind], &now);
        if (status == TB_OK && now.bytes_done > 0)
            atomic_store(&shared->seat[c->seat].moves, true);
    }
    return status;
}

static tb_status do_step(client *c, int step) {
    int kind = steps[step].kind;
    if (steps[step].what == REOPEN)
        return reopen(c);
    for (int64_t i = 0; i < nelements && is_trainer(c->seat); i++)
        c->data[kind][i] = value_at(c, step + 1, i);
    tb_status status = move(c, kind);
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", status == TB_OK ? "" : tb_error_detail());
    if (status == TB_OK || is_trainer(c->seat))
        c->version[kind] = step + 1;
    look_for(c, kind, c->version[kind]); /* of a version that failed nothing may be in the tensors */
    return status == TB_OK ? TB_OK : tb_error_set(status, sentence);
}

/* Half of them have their tensors in memory that the agent can use where it is; for the others it has to copy. */
static float *get_memory(const client *c) {
    size_t nbytes = (size_t)nelements * sizeof(float);
    void *memory = NULL;
    if (c->seat % 2 ? !(memory = malloc(nbytes)) : tb_alloc(nbytes, &memory) != TB_OK)
        give_up(c, "memory");
    return memory;
}

static _Noreturn void be_client(int seat) {
    client c = {.seat = seat};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    hosts_enter(host_of(seat));
    for (int kind = 0; kind < NKINDS; kind++) {
        c.data[kind] = get_memory(&c);
        for (int64_t i = 0; i < nelements; i++)
            c.data[kind][i] = -1;
    }
    if (open_all(&c) != TB_OK)
        give_up(&c, "connecting");
    atomic_store(&shared->seat[seat].done, 0);
    for (int step = 0; step < NSTEPS; step++) {
        while (atomic_load(&shared->next) <= step)
            nap(); /* the first process ends us if it does not come so far */
        tb_status status = do_step(&c, step);
        note_status(seat, status);
        atomic_store(&shared->seat[seat].done, step + 1);
    }
    drop_batches(&c);
    program_close(c.agent);
    for (int kind = 0; kind < NKINDS; kind++)
        (seat % 2 ? free : tb_free)(c.data[kind]);
    exit(0);
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static pid_t clients[NSEATS];

static void start_agent(int seat) {
    start_agent_at(host_of(seat), seat, is_trainer(seat) ? "trainer" : "engine", index_of(seat),
                   is_trainer(seat) ? NTRAINERS : NSEATS - NTRAINERS);
}

static void start_all(bool is_etcd) {
    start_store(is_etcd);
    for (int i = 0; i < NSEATS; i++) {
        atomic_store(&shared->seat[i].done, -1);
        start_agent(i);
        clients[i] = fork();
        if (clients[i] == 0)
            be_client(i);
    }
}

static void await_done(int nsteps) {
    int64_t deadline_ms = tb__now_ms() + JOIN_MS + DEADLINE_MS + SLACK_MS;
    for (int i = 0; i < NSEATS; i++) {
        while (atomic_load(&shared->seat[i].done) < nsteps) {
            if (tb__now_ms() > deadline_ms)
                fail("%s has not come to the end of step %d", name_of(i), nsteps);
            if (waitpid(clients[i], NULL, WNOHANG) == clients[i])
                fail("the program of %s has ended", name_of(i));
            nap();
        }
    }
}

static void run_step(int step) {
    begin(step + 1);
    await_done(step + 1);
    for (int i = 0; i < NSEATS; i++) {
        if (shared->seat[i].status != TB_OK)
            fail("%s does not come through step %d", name_of(i), step + 1);
    }
}

static json_t *ask_status(int seat) {
    char command[512], path[64];
    json_error_t error;
    path_of(seat, path);
    snprintf(command, sizeof command, "'%s' status --json --socket '%s' --token-file '%s' --timeout 20", tool, path,
             token_path);
    FILE *said = popen(command, "re");
    json_t *root = said ? json_loadf(said, 0, &error) : NULL;
    if (!said || pclose(said) != 0 || !root)
        fail("tensorbus status of %s can't be read", name_of(seat));
    return root;
}

/* Every agent knows all the others, each by the transport that leads there. */
static void look_at_peers(bool is_victim_there) {
    for (int seat = 0; seat < NSEATS; seat++) {
        int nalive = 0, nlost = 0;
        if (seat == VICTIM && !is_victim_there)
            continue;
        json_t *root = ask_status(seat), *peer;
        size_t i;
        json_array_foreach(json_object_get(json_array_get(json_object_get(root, "agents"), 0), "peers"), i, peer) {
            int rank = 0;
            const char *transport = json_string_value(json_object_get(peer, "transport"));
            const char *label = json_string_value(json_object_get(peer, "label"));
            while (rank < NSEATS && label && !strstr(label, name_of(rank)))
                rank++;
            if (!label || !transport || rank == NSEATS || rank == seat)
                fail("%s has a peer that it should not have: %s", name_of(seat), label ? label : "it has no name");
            if (strcmp(transport, host_of(rank) == host_of(seat) ? "shm" : "ucx") != 0)
                fail("%s reaches %s by %s", name_of(seat), name_of(rank), transport);
            bool is_alive = json_is_true(json_object_get(peer, "alive"));
            if (!is_alive && rank != VICTIM)
                fail("%s has lost %s", name_of(seat), name_of(rank));
            nalive += is_alive;
            nlost += !is_alive;
        }
        json_decref(root);
        int expected = is_victim_there ? NSEATS - 1 : NSEATS - 2;
        if (nalive != expected || (!is_victim_there && nlost != 1))
            fail("%s knows %d agents that are there and %d that are not; %d are there", name_of(seat), nalive, nlost,
                 expected);
    }
}

static void kill_agent(int step) {
    must_do("shape 0 40mbit");
    begin(step + 1);
    await_middle(VICTIM);
    int64_t since_ms = tb__now_ms();
    kill(agents[VICTIM], SIGKILL);
    end_of(agents[VICTIM], "an agent that was killed");
    await_done(step + 1);
    tell_all(since_ms);
    for (int i = 0; i < NSEATS; i++) {
        if (shared->seat[i].status != TB_LOST)
            fail("%s does not hear that an agent is lost", name_of(i));
        if (i != VICTIM && !strstr(shared->seat[i].sentence, name_of(VICTIM)))
            fail("%s is not told which agent was lost", name_of(i));
    }
    must_do("shape 0 off");
    look_at_peers(false);
    start_agent(VICTIM);
}

/* The store's host last. */
static void end_all(void) {
    for (int i = 0; i < NSEATS; i++) {
        if (end_of(clients[i], name_of(i)) != 0)
            fail("the program of %s has failed", name_of(i));
    }
    for (int i = NSEATS - 1; i >= 0; i--) {
        kill(agents[i], SIGTERM);
        if (end_of(agents[i], "an agent that was told to") != 0)
            fail("the agent of %s has failed", name_of(i));
    }
    kill(store, SIGTERM);
    end_of(store, "the store");
}

int main(int argc, char **argv) {
    bool is_etcd = argc == 2 && strcmp(argv[1], "etcd") == 0;
    tool = getenv("TENSORBUS");
    if (hosts_count() != 3 || !tool || argc != 2 || (!is_etcd && strcmp(argv[1], "own") != 0)) {
        fprintf(stderr, "to be run by tests/hosts/bed 3 -- %s own|etcd, with the command in $TENSORBUS\n", argv[0]);
        return 2;
    }
    board_make((const char *const[NSEATS]){"trainer 0", "trainer 1", "engine 0", "engine 1", "engine 2", "engine 3"});
    int status = make_folder(is_etcd);
    if (status != 0)
        return status;
    start_all(is_etcd);
    await_done(0);
    look_at_peers(true);
    for (int step = 0; step < NSTEPS; step++) {
        if (steps[step].what == LOSE)
            kill_agent(step);
        else
            run_step(step);
    }
    look_at_peers(true);
    end_all();
    return 0;
}
