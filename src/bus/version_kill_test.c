/* Versions, and a process that is killed, or stopped for a while, or a link that is cut for a while, at a random
 * moment. Versions go from two senders to three receivers, one after the other. The victim is one that sends, one that
 * receives, the receivers' lead, the agent of one of these, or the process with the store. In the end each receiver
 * that is left says which version it has, and has all of it, or says that its tensors are torn, or mixed; by shadow,
 * all have the same, or say that they do not know. What a sender was told is committed, is. No call takes longer than
 * it may. Every second receive by shadow is held back for a moment.
 *
 * The first process starts everybody, does what happens, and watches. TB_CASES is how many times; the long runs are
 *
 *   TB_CASES=300 version_kill_test senders     two pairs, and the sender of one dies: in place and by shadow, through
 *                                              agents and without, in memory of tb_alloc and in other memory
 *   TB_CASES=300 version_kill_test agents      the agent of a receiver dies, in all of these ways
 *   TB_CASES=1000 version_kill_test anyone     by shadow; in tests/hosts/bed 3 links are cut, too */
#include "bus/version_kill_test.h"

#include "../tests/support/random_case.h"

#include <dirent.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { USUAL_RUNS = 8, USUAL_RUNS_OF_HOSTS = 3, WINDOW_US = 150000 };
#else
enum { USUAL_RUNS = 8, USUAL_RUNS_OF_HOSTS = 4, WINDOW_US = 30000 };
#endif

/* ---- What happens ------------------------------------------------------------------------------------------------ */

enum { KILL, STOP, CUT };

typedef struct event {
    int kind;
    int victim;      /* a process */
    int cut;         /* of cuts[] */
    int64_t wait_us; /* after all have the first version */
    int lasts_ms;
} event;

static const struct {
    const char *cut, *mend;
} cuts[] = {{"cut 1", "mend 1"},      {"cut 2", "mend 2"},        {"part 0 2", "join 0 2"},
            {"part 1 2", "join 1 2"}, {"drop 2 100", "drop 2 0"}, {"drop 1 100", "drop 1 0"}};
enum { NCUTS = sizeof cuts / sizeof *cuts };

/* Nothing is waited for in between: others notice that the process is gone, or silent. */
static void happen(const event *e, pid_t pids[NPROCESSES]) {
    struct timespec length = {e->lasts_ms / 1000, (long)(e->lasts_ms % 1000) * 1000000};
    nanosleep(&(struct timespec){.tv_nsec = e->wait_us * 1000}, NULL);
    if (e->kind == KILL) {
        if (e->victim == STORE)
            atomic_store(&shared->is_up[STORE], false);
        kill_role(pids[e->victim]);
        pids[e->victim] = 0;
        return;
    }
    if (e->kind == STOP)
        stop_role(pids[e->victim]);
    else
        assert_true(hosts_do(cuts[e->cut].cut));
    nanosleep(&length, NULL);
    if (e->kind == STOP)
        assert_int_equal(kill(pids[e->victim], SIGCONT), 0);
    else
        assert_true(hosts_do(cuts[e->cut].mend));
}

static void print_event(const way *w, const event *e) {
    char what[64];
    const char *who = e->victim == STORE ? "store" : e->victim >= AGENTS ? "agent" : "member";
    if (e->kind == CUT)
        snprintf(what, sizeof what, "'%s' for %d ms", cuts[e->cut].cut, e->lasts_ms);
    else if (e->kind == STOP)
        snprintf(what, sizeof what, "%s %d is stopped for %d ms", who, e->victim % NMEMBERS, e->lasts_ms);
    else
        snprintf(what, sizeof what, "%s %d is killed", who, e->victim % NMEMBERS);
    printf("%s after %" PRId64 " us; %s, %s, %s, %s memory\n", what, e->wait_us,
           w->has_two_pairs ? "two pairs" : "one pair", w->has_agents ? "agents" : "no agents",
           w->is_in_place ? "in place" : "shadow", w->is_shared ? "shared" : "ordinary");
    fflush(stdout);
}

/* ---- Checks ------------------------------------------------------------------------------------------------------ */

/* Of a member without a process, or without an agent, nothing more is known than what its library says. */
static bool is_gone(const event *e, int position) {
    return e->kind == KILL && e->victim == position;
}

static bool has_lost_agent(const event *e, int position) {
    return e->kind == KILL && e->victim == AGENTS + position;
}

static void check_one_receiver(int seat, bool has_agent) {
    const tb_batch_state *state = &shared->receiver[seat].state;
    float *tensors[NTENSORS];
    int n = part_size(false), npairs = shared->way.has_two_pairs ? 2 : 1;
    for (int i = 0; i < NTENSORS; i++)
        tensors[i] = shared->receiver[seat].tensors[i];
    int held = version_in(tensors, seat, 0, n);
    if (!state->is_torn && !state->is_mixed && held != (int)state->version)
        fail_msg("receiver %d was told that it has version %d, and has %d (-1: a mixture)", seat, (int)state->version,
                 held);
    if (!shared->way.is_in_place && has_agent && (state->is_torn || state->is_mixed))
        fail_msg("receiver %d has shadows, and is told that its tensors are torn, or mixed", seat);
    for (int p = 0; p < npairs; p++) {
        int version = version_in(tensors, seat, p * n / npairs, (p + 1) * n / npairs);
        if (shared->receiver[seat].are_torn[p] && !state->is_torn && !state->is_mixed)
            fail_msg("receiver %d: a pair is torn, and the batch is not", seat);
        if (!shared->receiver[seat].are_torn[p] && version != (int)shared->receiver[seat].versions[p])
            fail_msg("receiver %d was told that it has version %d through pair %d, and has %d", seat,
                     (int)shared->receiver[seat].versions[p], p, version);
        for (int s = 0; s < NSENDERS; s++) {
            /* In place, a sender knows of its own part only. */
            bool is_of_pair = shared->way.has_two_pairs ? s == p : !shared->way.is_in_place;
            if (is_of_pair && has_agent && !state->is_in_doubt && !shared->receiver[seat].are_torn[p] &&
                version < atomic_load(&shared->told[s]))
                fail_msg("sender %d was told that version %d is committed, and receiver %d has %d", s,
                         (int)atomic_load(&shared->told[s]), seat, version);
        }
    }
}

/* By shadow. Returns how many are in doubt. */
static int compare_receivers(const event *e) {
    int common = -1, ndoubts = 0;
    for (int seat = 0; seat < NRECEIVERS; seat++) {
        const tb_batch_state *state = &shared->receiver[seat].state;
        if (is_gone(e, seat + NSENDERS) || has_lost_agent(e, seat + NSENDERS))
            continue;
        ndoubts += state->is_in_doubt;
        if (state->is_in_doubt)
            continue;
        if (common >= 0 && common != (int)state->version)
            fail_msg("receivers have versions %d and %d", common, (int)state->version);
        common = (int)state->version;
    }
    for (int seat = 0; seat < NRECEIVERS && common >= 0; seat++) {
        int version = (int)shared->receiver[seat].state.version;
        if (shared->receiver[seat].state.is_in_doubt && version != common && version != common - 1)
            fail_msg("receiver %d is in doubt and has version %d, others %d", seat, version, common);
    }
    if (ndoubts > 0 && atomic_load(&shared->is_up[STORE]))
        fail_msg("%d receivers are in doubt, and the store can be asked", ndoubts);
    return ndoubts;
}

/* No rank has committed what another has aborted; what one has committed, all were prepared for; and what a sender was
 * told is committed, is. */
static void check_traces(const char *base, const event *e) {
    static unsigned char outcomes[NRECEIVERS][TRACED_VERSIONS];
    char path[160];
    memset(outcomes, 0, sizeof outcomes);
    for (int seat = 0; seat < NRECEIVERS; seat++) {
        int position = seat + NSENDERS;
        trace_path(base, position, path);
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        bool was_killed = shared->way.has_agents ? has_lost_agent(e, position) : is_gone(e, position);
        bool is_good = trace_read(file, was_killed, outcomes[seat]);
        fclose(file);
        if (!is_good)
            fail_msg("receiver %d has made a transition that the table does not have", seat);
    }
    for (int v = 1; v < TRACED_VERSIONS && !shared->way.is_in_place; v++) {
        unsigned all = 0, prepared = TRACED_PREPARED;
        for (int seat = 0; seat < NRECEIVERS; seat++) {
            all |= outcomes[seat][v];
            prepared &= outcomes[seat][v];
        }
        if ((all & TRACED_COMMIT) && ((all & TRACED_ABORT) || !prepared))
            fail_msg("version %d: some have committed, others %s", v, prepared ? "aborted" : "were not prepared");
        for (int s = 0; s < NSENDERS; s++) {
            if (v <= atomic_load(&shared->told[s]) && !(all & TRACED_COMMIT))
                fail_msg("sender %d was told that version %d is committed, and it is not", s, v);
        }
    }
}

/* The checker finds what it has to. */
static void test_checker(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool is_good;
    } logs[] = {{"x 1 IDLE HAS_ALL PREPARED TELL_LEAD\nx 1 PREPARED HEARS_COMMIT DECIDED PASS_ON\n", true},
                {"x 1 IDLE HAS_ALL DECIDED PASS_ON\n", false},                 /* not in the table */
                {"x 1 PREPARED HEARS_COMMIT DECIDED PASS_ON\n", false},        /* not after IDLE */
                {"x 1 IDLE HAS_ALL PREPARED TELL_LEAD\nx 1 PREPARED", false}}; /* cut off */
    for (size_t i = 0; i < sizeof logs / sizeof *logs; i++) {
        unsigned char outcomes[TRACED_VERSIONS] = {0};
        FILE *file = fmemopen((void *)(uintptr_t)logs[i].text, strlen(logs[i].text), "r");
        assert_non_null(file);
        assert_true(trace_read(file, false, outcomes) == logs[i].is_good);
        fclose(file);
    }
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static int count_torn; /* batches that were torn or mixed, of all runs */

static void make_board(const char *path, const way *w) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(ftruncate(fileno(file), sizeof(board)), 0);
    fclose(file);
    assert_true(open_board(path));
    shared->way = *w;
    atomic_store(&shared->limit, MOST_VERSIONS);
}

static void start_all(const char *url, const char *base, pid_t pids[NPROCESSES]) {
    char arg[160];
    for (int i = STORE; i >= 0; i--) {
        pids[i] = 0;
        if (i >= AGENTS && i < STORE && !shared->way.has_agents)
            continue;
        snprintf(arg, sizeof arg, "%d:%s", i, base);
        pids[i] = start_role("member", url, arg);
        if (i == STORE)
            assert_true(await(&shared->is_up[STORE], tb__now_ms() + PATIENCE_MS));
    }
}

/* Those that are left, a kind of process after the other. */
static void end_all(pid_t pids[NPROCESSES], bool is_well) {
    static const int first[] = {0, AGENTS, STORE, NPROCESSES};
    for (int kind = 0; kind < 3; kind++) {
        atomic_store(&shared->leaving, kind + 1);
        for (int i = first[kind]; i < first[kind + 1]; i++) {
            if (!pids[i])
                continue;
            if (!is_well)
                kill(pids[i], SIGKILL);
            int end = end_of(pids[i]);
            pids[i] = 0;
            if (is_well && end != 0)
                fail_msg("process %d ended with %d", i, end);
        }
    }
}

/* After what has happened: some more versions, if they can be had, and then the ends of all. */
static bool await_ends(const event *e) {
    int last = 0;
    bool are_done = true;
    for (int i = 0; i < NMEMBERS; i++)
        last = atomic_load(&shared->told[i]) > last ? atomic_load(&shared->told[i]) : last;
    atomic_store(&shared->limit, last + 5 < MOST_VERSIONS ? last + 5 : MOST_VERSIONS);
    atomic_store(&shared->is_mended, true);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    for (int seat = 0; seat < NRECEIVERS; seat++)
        are_done &= is_gone(e, seat + NSENDERS) || await(&shared->receiver[seat].is_done, deadline_ms);
    return are_done;
}

static void remove_folder(const char *path) {
    DIR *folder = opendir(path);
    char name[400];
    assert_non_null(folder);
    for (const struct dirent *entry; (entry = readdir(folder));) {
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(name);
    }
    closedir(folder);
    assert_int_equal(rmdir(path), 0);
}

static int run_once(const way *w, const event *e) {
    place p;
    char base[128], url[128];
    pid_t pids[NPROCESSES];
    int ndoubts = 0;
    print_event(w, e);
    place_make(&p);
    snprintf(base, sizeof base, "%s/board", p.folder);
    snprintf(url, sizeof url, "%s", p.url);
    if (hosts_count() > 0)
        hosts_store(url, sizeof url);
    make_board(base, w);
    start_all(url, base, pids);
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (atomic_load(&shared->ncommitted) < NRECEIVERS && tb__now_ms() < deadline_ms)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    bool is_well = atomic_load(&shared->ncommitted) == NRECEIVERS;
    if (is_well)
        happen(e, pids);
    is_well = is_well && await_ends(e);
    end_all(pids, is_well);
    assert_true(is_well);
    check_traces(base, e);
    for (int seat = 0; seat < NRECEIVERS; seat++) {
        const tb_batch_state *state = &shared->receiver[seat].state;
        if (is_gone(e, seat + NSENDERS))
            continue;
        check_one_receiver(seat, !has_lost_agent(e, seat + NSENDERS));
        count_torn += state->is_torn || state->is_mixed;
    }
    for (int i = 0; i < NMEMBERS; i++) {
        if (atomic_load(&shared->longest_ms[i]) > TIMEOUT_MS + LATE_MS)
            fail_msg("a transfer of member %d took %" PRId64 " ms", i, (int64_t)atomic_load(&shared->longest_ms[i]));
    }
    if (!w->is_in_place)
        ndoubts = compare_receivers(e);
    munmap(shared, sizeof *shared);
    remove_folder(p.folder);
    return ndoubts;
}

static void run_all(void (*choose)(rng *r, int64_t i, way *w, event *e)) {
    uint64_t seed = test_seed();
    int64_t n = test_cases(hosts_count() > 0 ? USUAL_RUNS_OF_HOSTS : USUAL_RUNS);
    int ndoubts = 0;
    count_torn = 0;
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        way w = {0};
        event e = {.wait_us = rng_range(&r, 0, WINDOW_US), .lasts_ms = (int)rng_range(&r, 0, LONGEST_STOP_MS)};
        choose(&r, (int64_t)(seed + (uint64_t)i), &w, &e);
        printf("TB_SEED=%" PRIu64 " TB_CASES=1: ", seed + (uint64_t)i);
        ndoubts += run_once(&w, &e);
    }
    printf("%" PRId64 " runs, %d ranks in doubt, %d batches torn or mixed\n", n, ndoubts, count_torn);
}

/* All ways in turn. */
static void choose_sender(rng *r, int64_t i, way *w, event *e) {
    *w = (way){.has_two_pairs = true, .has_agents = i & 1, .is_shared = i & 2, .is_in_place = i & 4};
    e->victim = (int)rng_range(r, 0, NSENDERS - 1);
    if (w->has_agents && rng_range(r, 0, 1))
        e->victim += AGENTS;
}

/* That of a receiver, which may be writing. */
static void choose_agent(rng *r, int64_t i, way *w, event *e) {
    *w = (way){.has_two_pairs = i & 1, .has_agents = true, .is_shared = i & 2, .is_in_place = i & 4};
    e->victim = AGENTS + (int)rng_range(r, NSENDERS, NMEMBERS - 1);
}

static void choose_anyone(rng *r, int64_t i, way *w, event *e) {
    bool is_in_bed = hosts_count() > 0;
    (void)i;
    *w = (way){.has_two_pairs = rng_range(r, 0, 1), .has_agents = rng_range(r, 0, 1), .is_shared = rng_range(r, 0, 1)};
    e->kind = is_in_bed && rng_range(r, 0, 3) ? CUT : rng_range(r, 0, 2) ? KILL : STOP;
    e->cut = (int)rng_range(r, 0, NCUTS - 1);
    e->victim = (int)rng_range(r, 0, w->has_agents ? STORE : NMEMBERS);
    if (!w->has_agents && e->victim == NMEMBERS)
        e->victim = STORE;
}

static void senders(void **state) {
    (void)state;
    run_all(choose_sender);
}

static void agents(void **state) {
    (void)state;
    run_all(choose_agent);
}

static void anyone(void **state) {
    (void)state;
    run_all(choose_anyone);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play_role(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_checker), cmocka_unit_test(senders),
                                       cmocka_unit_test(agents), cmocka_unit_test(anyone)};
    if (argc == 2)
        cmocka_set_test_filter(argv[1]);
    if (hosts_count() > 0)
        hosts_need_ucx();
    return cmocka_run_group_tests_name("version_kill", tests, NULL, NULL);
}
