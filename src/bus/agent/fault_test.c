/* Two groups of agents and their clients, all of them processes, of which one is killed at a random moment of a pair's,
 * a batch's or a transfer's making: a client, an agent, or the process that has the store. What remains ends in time,
 * says what is so, and leaves nothing behind. In half of the runs tensors are committed by shadow: then the ranks of b
 * that are left have the same version, all of it, or say that they do not know.
 *
 * Case i of a run has the seed TB_SEED + i, which decides who is killed and when. */
#include "../tests/support/random_case.h"
#include "bus/agent/process_test.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { SEATS = 2, NCLIENTS = 2 * SEATS, VERSIONS = 4, ROWS = 64, KEEPER = NCLIENTS, NAGENTS = NCLIENTS + 1 };

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { CALL_MS = 6000, USUAL_CASES = 6 };
#else
enum { CALL_MS = 1500, USUAL_CASES = 15 };
#endif

/* How a client ends. */
enum { DONE, FAILED, WRONG_DATA, BAD_STATE };

enum { MIXED = -1 };

typedef enum stage { STARTING, INIT, REGISTER, TRANSFER, ENDING } stage;

/* What a client tells, in memory that outlives it. */
typedef struct report {
    _Atomic int stage;
    _Atomic int64_t longest_ms; /* of its calls */
    _Atomic int64_t ended_ms;   /* the last of them */
    _Atomic uint32_t version;   /* the last that it was told had arrived, or left */
    _Atomic int held;           /* at its end: the version that all of its memory has; MIXED: there is none */
    _Atomic bool is_in_doubt;
    char why[300];
} report;

typedef struct plan {
    uint64_t seed;
    enum { NOBODY, CLIENT, AGENT } kind;
    int victim;  /* a position; KEEPER: the process with the store */
    int watched; /* the client whose stage says when */
    stage when;
    uint32_t version; /* in TRANSFER: before which */
    int delay_us;
    bool has_keeper; /* or the first agent has the store */
    bool is_shared;  /* tensors in memory of tb_alloc */
    bool is_shadow;
    int64_t columns;
} plan;

typedef struct run {
    plan plan;
    char folder[32];
    agent_process agents[NAGENTS];
    pid_t clients[NCLIENTS];
    report *reports;
} run;

static run running;         /* so that what is left of a failure can be ended */
static int nranks, ndoubts; /* whose versions were compared, and who did not know */

/* ---- A client -------------------------------------------------------------------------------------------------- */

typedef struct member {
    const plan *plan;
    report *report;
    int position;
    program *client;
    program_batch *batch;
    int64_t columns; /* of its part */
    int64_t rows;
    uint32_t *data;
} member;

static bool sends(const member *m) {
    return m->position < SEATS;
}

/* a has rows, b columns of the matrix. */
static uint32_t value_at(const member *m, int64_t i, uint32_t version) {
    int64_t seat = m->position % SEATS, row = i / m->columns, column = i % m->columns;
    row += sends(m) ? seat * m->rows : 0;
    column += sends(m) ? 0 : seat * m->columns;
    return version << 24 | (uint32_t)(row * m->plan->columns + column);
}

static void end(const member *m, int how, const char *why) {
    snprintf(m->report->why, sizeof m->report->why, "%s", why);
    _exit(how);
}

static int64_t count_of(const member *m) {
    return m->rows * m->columns;
}

static void note_held(const member *m) {
    int version = (int)(m->data[0] >> 24);
    for (int64_t i = 0; i < count_of(m); i++) {
        if (m->data[i] != value_at(m, i, (uint32_t)version))
            version = MIXED;
    }
    atomic_store(&m->report->held, version);
}

/* Whoever does not know asks again, by receiving once more: that fails, as somebody is gone, but the store may tell. */
static void look_at_memory(const member *m, tb_status status) {
    program_transfer_opts opts = {.timeout_ms = CALL_MS};
    if (sends(m) || !m->plan->is_shadow || !m->data)
        return;
    if (status == TB_IN_DOUBT)
        atomic_store(&m->report->is_in_doubt, program_transfer(m->batch, false, &opts) == TB_IN_DOUBT);
    note_held(m);
}

/* A call that fails ends the client: in an orderly way, or at once. */
static void must(const member *m, tb_status status, int64_t begun_ms) {
    int64_t now_ms = tb__now_ms();
    if (now_ms - begun_ms > atomic_load(&m->report->longest_ms))
        atomic_store(&m->report->longest_ms, now_ms - begun_ms);
    atomic_store(&m->report->ended_ms, now_ms);
    if (status == TB_OK)
        return;
    char why[300];
    snprintf(why, sizeof why, "%s: %s", tb_status_string(status), tb_error_detail());
    look_at_memory(m, status);
    if (m->plan->seed % 2) {
        program_batch_destroy(m->batch);
        program_close(m->client);
    }
    end(m, FAILED, why);
}

/* Every second version without waiting: the program sleeps on the transfer's descriptor. */
static void transfer(member *m, uint32_t version, int timeout_ms) {
    program_transfer_opts opts = {.timeout_ms = timeout_ms, .no_wait = version % 2 == 0};
    int64_t begun_ms = tb__now_ms();
    must(m, program_transfer(m->batch, sends(m), &opts), begun_ms);
    if (!opts.no_wait)
        return;
    tb_status status;
    while ((status = program_wait(m->batch, sends(m), TB_COMMITTED, 0)) == TB_TIMEOUT &&
           tb__now_ms() - begun_ms < PATIENCE_MS) {
        program_status now = {0};
        must(m, program_query(m->batch, &now), begun_ms);
        if (strcmp(now.state, "idle") == 0)
            continue;
        if (strcmp(now.state, "failed") == 0)
            break;
        struct pollfd news = {.fd = program_fd(m->batch, sends(m)), .events = POLLIN};
        poll(&news, 1, 50);
    }
    if (status == TB_TIMEOUT) /* the transfer's own */
        status = program_wait(m->batch, sends(m), TB_COMMITTED, 0);
    must(m, status, begun_ms);
}

static void set_stage(const member *m, stage now) {
    atomic_store(&m->report->stage, now);
}

static void get_memory(member *m, size_t nbytes) {
    m->data = NULL;
    if (m->plan->is_shared ? tb_alloc(nbytes, (void **)&m->data) != TB_OK : !(m->data = malloc(nbytes)))
        end(m, BAD_STATE, "no memory");
}

static void be_client(member *m, const char *path) {
    const plan *p = m->plan;
    int timeout_ms = p->kind == NOBODY ? PATIENCE_MS : CALL_MS;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = timeout_ms};
    m->rows = sends(m) ? ROWS / SEATS : ROWS;
    m->columns = sends(m) ? p->columns : p->columns / SEATS;
    int64_t count = count_of(m);
    get_memory(m, (size_t)count * sizeof *m->data);
    for (int64_t i = 0; i < count; i++)
        m->data[i] = value_at(m, i, 0);
    must(m, program_connect(path, &opts, &m->client), tb__now_ms());
    set_stage(m, INIT);
    must(m,
         program_pair(m->client, "p", sends(m) ? "b" : "a", sends(m) ? "mesh=2 place=S0" : "mesh=2 place=S1",
                      timeout_ms),
         tb__now_ms());
    set_stage(m, REGISTER);
    tb_tensor t = {.size = sizeof t, .data = m->data, .dtype = TB_U32, .ndim = 2, .shape = {ROWS, p->columns}};
    tb_batch_opts batch = {.size = sizeof batch, .commit = p->is_shadow ? TB_SHADOW : TB_IN_PLACE};
    must(m, program_batch_create(m->client, "step", &batch, &m->batch), tb__now_ms());
    must(m, program_add(m->batch, "p", "w", &t), tb__now_ms());
    must(m, program_register(m->batch, timeout_ms), tb__now_ms());
    set_stage(m, TRANSFER);
    for (uint32_t version = 1; version <= VERSIONS; version++) {
        for (int64_t i = 0; i < count && (sends(m) || !p->is_shadow); i++)
            m->data[i] = sends(m) ? value_at(m, i, version) : 0xdeadbeefU;
        transfer(m, version, timeout_ms);
        for (int64_t i = 0; i < count; i++) {
            if (m->data[i] != value_at(m, i, version))
                end(m, WRONG_DATA, "what has arrived is not what was sent");
        }
        atomic_store(&m->report->version, version);
    }
    set_stage(m, ENDING);
    look_at_memory(m, TB_OK);
    if (p->seed % 3)
        program_batch_destroy(m->batch);
    program_close(m->client);
    end(m, DONE, "");
}

static pid_t begin_client(run *r, int position) {
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        member m = {.plan = &r->plan, .report = &r->reports[position], .position = position};
        be_client(&m, r->agents[position].path);
    }
    return pid;
}

/* ---- One case -------------------------------------------------------------------------------------------------- */

static void make_plan(plan *p, uint64_t seed) {
    rng r = {seed};
    *p = (plan){.seed = seed, .has_keeper = rng_range(&r, 0, 1), .is_shared = rng_range(&r, 0, 1)};
    p->kind = rng_range(&r, 0, 7) == 0 ? NOBODY : rng_range(&r, 0, 1) ? CLIENT : AGENT;
    p->victim = (int)rng_range(&r, 0, p->kind == AGENT && p->has_keeper ? KEEPER : NCLIENTS - 1);
    p->watched = (int)rng_range(&r, 0, NCLIENTS - 1);
    p->when = (stage)rng_range(&r, INIT, TRANSFER);
    p->version = (uint32_t)rng_range(&r, 1, VERSIONS);
    p->delay_us = (int)rng_range(&r, 0, 4000);
    p->columns = rng_range(&r, 0, 1) ? 32 : 32 << 10; /* 8 KiB, 8 MiB */
    p->is_shadow = rng_range(&r, 0, 1);
}

static void print_plan(const plan *p) {
    static const char *const kinds[] = {"nobody", "client", "agent"};
    static const char *const stages[] = {"", "InitPair", "RegisterTensors", "Transfer"};
    print_error("TB_SEED=%" PRIu64 " TB_CASES=1 repeats this case: %s %d is killed %d us into %s of client %d (version "
                "%" PRIu32 "), %s has the store, memory is %s, %" PRId64 " columns%s\n",
                p->seed, kinds[p->kind], p->victim, p->delay_us, stages[p->when], p->watched, p->version,
                p->has_keeper ? "a process of its own" : "the first agent", p->is_shared ? "shared" : "private",
                p->columns, p->is_shadow ? ", by shadow" : "");
}

static void begin_seat(run *r, int position) {
    if (position == KEEPER)
        begin_agent(&r->agents[KEEPER], r->folder, "keeper", 0, 1, "30");
    else
        begin_agent(&r->agents[position], r->folder, position < SEATS ? "a" : "b", position % SEATS, SEATS, "30");
    await_agent(&r->agents[position]);
}

/* Until the moment has come, or there is nothing left to wait for. */
static void await_moment(const run *r) {
    const plan *p = &r->plan;
    const report *watched = &r->reports[p->watched];
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (;;) {
        int now = atomic_load(&watched->stage);
        if (now > (int)p->when ||
            (now == (int)p->when && (now != TRANSFER || atomic_load(&watched->version) + 1 >= p->version)))
            break;
        assert_true(tb__now_ms() < deadline_ms);
        usleep(100);
    }
    usleep((useconds_t)p->delay_us);
}

static void check_clients(run *r, int64_t killed_ms) {
    const plan *p = &r->plan;
    for (int i = 0; i < NCLIENTS; i++) {
        const report *at = &r->reports[i];
        bool is_victim = p->kind == CLIENT && p->victim == i;
        int how = end_of(r->clients[i]);
        r->clients[i] = 0;
        if (how == -SIGKILL && is_victim)
            continue;
        if (how != DONE && (how != FAILED || p->kind == NOBODY))
            fail_msg("client %d ended with %d: %s", i, how, at->why);
        if (p->kind != NOBODY && atomic_load(&at->longest_ms) > CALL_MS + NOTICE_MS)
            fail_msg("a call of client %d took %" PRId64 " ms: %s", i, atomic_load(&at->longest_ms), at->why);
        if (p->kind == AGENT && p->victim == i && how == FAILED && atomic_load(&at->ended_ms) - killed_ms > NOTICE_MS)
            fail_msg("client %d noticed the death of its agent after %" PRId64 " ms", i,
                     atomic_load(&at->ended_ms) - killed_ms);
    }
}

static bool is_left(const plan *p, int position) {
    return p->kind == NOBODY || p->victim != position;
}

/* What b has, if it is committed by shadow. */
static void check_versions(const run *r) {
    const report *known = NULL;
    for (int i = SEATS; i < NCLIENTS && r->plan.is_shadow; i++) {
        const report *at = &r->reports[i];
        int held = atomic_load(&at->held);
        if (!is_left(&r->plan, i))
            continue;
        nranks++;
        ndoubts += atomic_load(&at->is_in_doubt);
        if (held == MIXED)
            fail_msg("client %d has parts of several versions: %s", i, at->why);
        if (known) {
            bool is_open = atomic_load(&at->is_in_doubt) || atomic_load(&known->is_in_doubt);
            if (abs(held - atomic_load(&known->held)) > is_open)
                fail_msg("client %d has version %d, and another %d: %s", i, held, atomic_load(&known->held), at->why);
        }
        known = at;
    }
}

/* A new process takes the seat, whatever the old one has left; then all go, and take everything along. */
static void check_agents(run *r) {
    const plan *p = &r->plan;
    for (int i = 0; i < NAGENTS; i++) {
        if (r->agents[i].pid)
            await_agent(&r->agents[i]); /* unharmed */
    }
    if (p->kind == AGENT)
        begin_seat(r, p->victim);
    for (int i = 0; i < NAGENTS;
         i++) /* the one with the store, which is the last or the first, comes last or does not */
        end_agent(&r->agents[i], SIGTERM);
}

static void run_case(uint64_t seed) {
    run *r = &running;
    plan *p = &r->plan;
    report *reports = r->reports;
    *r = (run){.folder = "/tmp/tb-fault-XXXXXX", .reports = reports};
    make_plan(p, seed);
    memset(reports, 0, NCLIENTS * sizeof *reports);
    assert_non_null(mkdtemp(r->folder));
    if (p->has_keeper)
        begin_seat(r, KEEPER);
    for (int i = 0; i < NCLIENTS; i++)
        begin_seat(r, i);
    pid_t clients[NCLIENTS];
    for (int i = 0; i < NCLIENTS; i++)
        clients[i] = r->clients[i] = begin_client(r, i);
    int64_t killed_ms = 0;
    if (p->kind != NOBODY) {
        await_moment(r);
        if (p->kind == AGENT)
            end_agent(&r->agents[p->victim], SIGKILL);
        else
            kill(r->clients[p->victim], SIGKILL);
        killed_ms = tb__now_ms();
    }
    check_clients(r, killed_ms);
    check_versions(r);
    memcpy(r->clients, clients, sizeof clients);
    memset(r->clients, 0, sizeof r->clients);
    check_agents(r);
    if (rmdir(r->folder) != 0)
        fail_msg("something is left in %s", r->folder);
}

static void test_kill_anyone(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t cases = test_cases(USUAL_CASES);
    for (int64_t i = 0; i < cases; i++) {
        running.plan.seed = seed + (uint64_t)i;
        run_case(seed + (uint64_t)i);
    }
    printf("%" PRId64 " runs, %d ranks had a whole version, of which %d did not know it for sure\n", cases, nranks,
           ndoubts);
}

static int set_up(void **state) {
    (void)state;
    running.reports =
        mmap(NULL, NCLIENTS * sizeof *running.reports, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return running.reports == MAP_FAILED;
}

/* After a failure: nothing goes on. */
static int tear_down(void **state) {
    (void)state;
    bool has_failed = false;
    for (int i = 0; i < NCLIENTS + NAGENTS; i++) {
        pid_t pid = i < NCLIENTS ? running.clients[i] : running.agents[i - NCLIENTS].pid;
        has_failed |= pid > 0;
        if (pid > 0 && kill(pid, SIGKILL) == 0)
            waitpid(pid, NULL, 0);
    }
    if (has_failed || access(running.folder, F_OK) == 0)
        print_plan(&running.plan);
    munmap(running.reports, NCLIENTS * sizeof *running.reports);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_kill_anyone, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
