/* The processes of version_kill_test.c: members that send or receive versions, their agents, and the store. What they
 * tell the first process is on a board, a file that all of them map. */
#ifndef TB_BUS_VERSION_KILL_TEST_H
#define TB_BUS_VERSION_KILL_TEST_H

#include "bus/agent/agent.h"
#include "bus/store/store_test.h"
#include "bus/trace_test.h"

#include "../tests/support/hosts.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { LATE_MS = 30000 };
#else
enum { LATE_MS = 8000 };
#endif

enum { NSENDERS = 2, NRECEIVERS = 3, NMEMBERS = NSENDERS + NRECEIVERS };
/* Positions of processes: members, their agents, the store. */
enum { AGENTS = NMEMBERS, STORE = 2 * NMEMBERS, NPROCESSES };
enum { MOST_VERSIONS = 500 }; /* numbers of more versions are not exact */
enum { ROWS = 96, COLUMNS = 64, NTENSORS = 3, MOST = ROWS * COLUMNS };
enum { TIMEOUT_MS = 1000, LONGEST_STOP_MS = 2500, BROKEN = 99 };

/* What a run is like. */
typedef struct way {
    bool has_two_pairs; /* the senders are two groups: half of each tensor comes through each of two pairs */
    bool has_agents;
    bool is_shared; /* tensors are in memory of tb_alloc */
    bool is_in_place;
} way;

typedef struct board {
    way way;
    atomic_int ncommitted;                     /* first versions, by receivers */
    atomic_bool is_up[NPROCESSES];             /* the store, or an agent, can be reached */
    atomic_bool is_mended;                     /* what was to happen has happened, and has ended */
    atomic_int limit;                          /* the last version */
    atomic_int leaving;                        /* members may leave; agents; the store */
    atomic_int told[NMEMBERS];                 /* the last version that it was told it has, or is committed */
    atomic_int_least64_t longest_ms[NMEMBERS]; /* of its transfers */
    struct {
        atomic_bool is_done;
        tb_batch_state state;
        uint64_t versions[2]; /* of its pairs */
        bool are_torn[2];
        float tensors[NTENSORS][MOST]; /* at the end */
    } receiver[NRECEIVERS];
} board;

static board *shared;

static bool open_board(const char *path) {
    FILE *file = fopen(path, "r+");
    shared = file ? mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0) : MAP_FAILED;
    if (file)
        fclose(file);
    return shared != MAP_FAILED;
}

static void nap(void) {
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static bool await(const atomic_bool *flag, int64_t deadline_ms) {
    while (!atomic_load(flag) && tb__now_ms() < deadline_ms)
        nap();
    return atomic_load(flag);
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* Of an element of the whole tensor. */
static float value_of(int version, int tensor, int index) {
    return (float)(version * 30000 + tensor * 10000 + index);
}

static int part_size(bool is_sender) {
    return MOST / (is_sender ? NSENDERS : NRECEIVERS);
}

/* The index in the whole tensor of a receiver's i-th element. */
static int index_at(int seat, int i) {
    int n = part_size(false);
    return shared->way.has_two_pairs ? (i < n / 2 ? 0 : MOST / 2) + seat * n / 2 + i % (n / 2) : seat * n + i;
}

/* Which version is in a receiver's elements from `first` to before `last`, all of them; -1: none is. */
static int version_in(float *const tensors[NTENSORS], int seat, int first, int last) {
    int version = ((int)tensors[0][first] - index_at(seat, first)) / 30000;
    for (int t = 0; t < NTENSORS; t++) {
        for (int i = first; i < last; i++) {
            if (tensors[t][i] != value_of(version, t, index_at(seat, i)))
                return -1;
        }
    }
    return version;
}

/* ---- In a member ------------------------------------------------------------------------------------------------- */

typedef struct member {
    int position;
    tb_world *world;
    tb_pair *pairs[2];
    int npairs;
    tb_batch *batch;
    float *tensors[NTENSORS];
} member;

static void must(const member *m, tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "member %d: %s: %s\n", m->position, tb_status_string(status), tb_error_detail());
    exit(BROKEN);
}

static void must_be(const member *m, bool claim, const char *what) {
    if (claim)
        return;
    fprintf(stderr, "member %d: %s\n", m->position, what);
    exit(BROKEN);
}

static bool is_sender(int position) {
    return position < NSENDERS;
}

static int seat_of(int position) {
    return is_sender(position) ? position : position - NSENDERS;
}

static bool is_c(int position) {
    return shared->way.has_two_pairs && position == 1;
}

static const char *group_of(int position) {
    return is_c(position) ? "c" : is_sender(position) ? "a" : "b";
}

static int32_t index_of(int position) {
    return is_c(position) ? 0 : seat_of(position);
}

static int32_t size_of(int position) {
    return !is_sender(position) ? NRECEIVERS : shared->way.has_two_pairs ? 1 : NSENDERS;
}

static const char *token_of_run(void) {
    return hosts_count() > 0 ? hosts_token : TOKEN;
}

static void agent_path(const char *base, int position, char out[160]) {
    snprintf(out, 160, "%s.agent%d", base, position);
}

static void join(member *m, const char *url, const char *base) {
    tb_world_opts opts = {.size = sizeof opts, .token = token_of_run(), .timeout_ms = PATIENCE_MS, .workers = 1};
    char path[160], agent[180];
    agent_path(base, m->position, path);
    snprintf(agent, sizeof agent, "agent:%s", path);
    must(m, tb_world_join(shared->way.has_agents ? agent : url, group_of(m->position), index_of(m->position),
                          size_of(m->position), &opts, &m->world));
}

static void set_up_member(member *m, const char *url, const char *base) {
    int seat = seat_of(m->position), n = part_size(is_sender(m->position));
    bool has_two = shared->way.has_two_pairs, sends = is_sender(m->position);
    tb_batch_opts opts = {.size = sizeof opts,
                          .commit = shared->way.is_in_place ? TB_IN_PLACE : TB_SHADOW,
                          .staged = seat == 1,
                          .bucket_size = 8192};
    const char *layout = !sends ? "mesh=3 place=S0" : has_two ? "mesh=1 place=R" : "mesh=2 place=S0";
    join(m, url, base);
    m->npairs = has_two && !sends ? 2 : 1;
    must(m, tb_batch_create(m->world, "step", &opts, &m->batch));
    for (int i = 0; i < NTENSORS; i++) {
        size_t nbytes = (size_t)n * sizeof(float);
        if (shared->way.is_shared)
            must(m, tb_alloc(nbytes, (void **)&m->tensors[i]));
        else
            must_be(m, (m->tensors[i] = malloc(nbytes)) != NULL, "no memory");
        for (int j = 0; j < n && !sends; j++)
            m->tensors[i][j] = value_of(0, i, index_at(seat, j));
    }
    for (int p = 0; p < m->npairs; p++) {
        bool is_q = p == 1 || is_c(m->position);
        must(m, tb_pair_create(m->world, is_q ? "q" : "p", sends ? "b" : is_q ? "c" : "a", layout, NULL, &m->pairs[p]));
        for (int i = 0; i < NTENSORS; i++) {
            char name[8] = {'t', (char)('0' + i)};
            tb_tensor t = {.size = sizeof t, .dtype = TB_F32, .ndim = 2, .shape = {has_two ? ROWS / 2 : ROWS, COLUMNS}};
            t.data = m->tensors[i] + p * n / 2;
            must(m, tb_batch_add(m->batch, m->pairs[p], name, &t));
        }
    }
    must(m, tb_batch_register(m->batch, 0));
}

/* Until it lets the tensors change, or its time is up, they have the version before. */
static tb_status let_proceed(const member *m, tb_transfer *t, int version, int64_t begun_ms) {
    TB_TRY(tb_wait(t, TB_DECIDED, -1));
    nanosleep(&(struct timespec){.tv_nsec = version * 7919 % 1000000}, NULL);
    bool is_as_before = version_in(m->tensors, seat_of(m->position), 0, part_size(false)) == version - 1;
    must_be(m, is_as_before || tb__now_ms() - begun_ms >= TIMEOUT_MS, "was held back, and its tensors have changed");
    return tb_proceed(t);
}

static tb_status move(member *m, int version) {
    bool sends = is_sender(m->position);
    bool hold = !sends && !shared->way.is_in_place && version > 1 && (version + seat_of(m->position)) % 2;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = version == 1 ? PATIENCE_MS : TIMEOUT_MS, .hold = hold};
    tb_transfer *t = NULL;
    for (int i = 0; sends && i < NTENSORS; i++) {
        for (int j = 0; j < part_size(true); j++)
            m->tensors[i][j] = value_of(version, i, seat_of(m->position) * part_size(true) + j);
    }
    int64_t begun_ms = tb__now_ms();
    tb_status status = (sends ? tb_send : tb_recv)(m->batch, &opts, &t);
    if (status == TB_OK && hold)
        status = let_proceed(m, t, version, begun_ms);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    int64_t took_ms = tb__now_ms() - begun_ms;
    if (version > 1 && took_ms > atomic_load(&shared->longest_ms[m->position]))
        atomic_store(&shared->longest_ms[m->position], took_ms);
    tb_transfer_destroy(t);
    return status;
}

/* One that is in doubt asks again, by receiving. That fails, since nobody sends, but it finds out. Once all can be
 * reached again, it knows soon. */
static tb_status resolve(member *m) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_status status = TB_IN_DOUBT;
    for (int64_t deadline_ms = tb__now_ms() + LATE_MS; status == TB_IN_DOUBT && tb__now_ms() < deadline_ms; nap()) {
        bool is_last = atomic_load(&shared->is_mended);
        tb_transfer *t = NULL;
        status = tb_recv(m->batch, &opts, &t);
        if (status == TB_OK)
            status = tb_wait(t, TB_ARRIVED, 0);
        tb_transfer_destroy(t);
        if (is_last && !atomic_load(&shared->is_up[STORE]))
            break; /* nobody can know */
    }
    return status;
}

/* What a receiver says in the end. */
static void report(member *m, tb_status status) {
    int seat = seat_of(m->position);
    tb_batch_state state = {.size = sizeof state};
    if (status == TB_IN_DOUBT) {
        must(m, tb_batch_query(m->batch, &state));
        must_be(m, state.is_in_doubt, "is in doubt, and its batch does not say so");
        status = resolve(m);
    }
    must(m, tb_batch_query(m->batch, &state));
    must_be(m, state.is_in_doubt == (status == TB_IN_DOUBT), "its batch is wrong about a doubt");
    shared->receiver[seat].state = state;
    for (int p = 0; p < m->npairs; p++) {
        uint64_t version = state.version;
        bool is_torn = state.is_torn || state.is_mixed;
        status = tb_batch_version(m->batch, m->pairs[p], &version, &is_torn);
        if (status != TB_LOST) /* its agent is gone */
            must(m, status);
        shared->receiver[seat].versions[p] = version;
        shared->receiver[seat].are_torn[p] = is_torn;
    }
    for (int i = 0; i < NTENSORS; i++)
        memcpy(shared->receiver[seat].tensors[i], m->tensors[i], (size_t)part_size(false) * sizeof(float));
    atomic_store(&shared->receiver[seat].is_done, true);
}

static int play(int position, const char *url, const char *base) {
    member m = {.position = position};
    tb_status status = TB_OK;
    if (!shared->way.has_agents && !trace_open(base, position))
        return BROKEN;
    set_up_member(&m, url, base);
    for (int version = 1; status == TB_OK && version <= atomic_load(&shared->limit); version++) {
        status = move(&m, version);
        if (status != TB_OK)
            break;
        if (!is_sender(position))
            must_be(&m, version_in(m.tensors, seat_of(position), 0, part_size(false)) == version,
                    "has received a version, and does not have it");
        atomic_store(&shared->told[position], version);
        if (version == 1 && !is_sender(position))
            atomic_fetch_add(&shared->ncommitted, 1);
    }
    if (!is_sender(position))
        report(&m, status);
    while (atomic_load(&shared->leaving) < 1)
        nap(); /* nobody leaves before all have asked: that would be another reason to give up, and hide one */
    tb_batch_destroy(m.batch);
    for (int p = 0; p < m.npairs; p++)
        tb_pair_destroy(m.pairs[p]);
    tb_world_destroy(m.world);
    for (int i = 0; i < NTENSORS; i++)
        shared->way.is_shared ? tb_free(m.tensors[i]) : free(m.tensors[i]);
    return 0;
}

/* ---- In other processes ------------------------------------------------------------------------------------------ */

static void *stop_agent(void *arg) {
    while (atomic_load(&shared->leaving) < 2)
        nap();
    tb__agent_stop(arg);
    return NULL;
}

static int be_agent(int position, const char *url, const char *base) {
    char path[160];
    pthread_t thread;
    tb__agent *agent;
    agent_path(base, position, path);
    tb__agent_opts opts = {.socket = path,
                           .store = url,
                           .group = group_of(position),
                           .index = index_of(position),
                           .size = size_of(position),
                           .token = token_of_run(),
                           .timeout_ms = PATIENCE_MS,
                           .workers = 1};
    if (!trace_open(base, position) || tb__agent_create(&opts, &agent) != TB_OK) {
        fprintf(stderr, "agent %d: %s\n", position, tb_error_detail());
        return BROKEN;
    }
    atomic_store(&shared->is_up[AGENTS + position], true);
    if (pthread_create(&thread, NULL, stop_agent, agent) != 0)
        return BROKEN;
    tb__agent_run(agent);
    pthread_join(thread, NULL);
    tb__agent_destroy(agent);
    return 0;
}

static int be_store(const char *url) {
    tb__store_server *server;
    if (tb__store_server_start(url, token_of_run(), &server) != TB_OK) {
        fprintf(stderr, "store: %s\n", tb_error_detail());
        return BROKEN;
    }
    atomic_store(&shared->is_up[STORE], true);
    while (atomic_load(&shared->leaving) < 3)
        nap();
    tb__store_server_stop(server);
    return 0;
}

/* Members and their agents are on all hosts, the store on the first. */
static int play_role(const char *url, const char *arg) {
    char *base;
    int position = (int)strtol(arg, &base, 10);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind, whatever ends the first process */
    if (!open_board(++base))
        return BROKEN;
    if (hosts_count() > 0)
        hosts_enter(position == STORE ? 0 : position % NMEMBERS);
    return position == STORE    ? be_store(url)
           : position >= AGENTS ? be_agent(position - AGENTS, url, base)
                                : play(position, url, base);
}

#endif
