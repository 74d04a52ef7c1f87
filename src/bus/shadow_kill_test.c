/* Shadow commits, and a process that is killed at a random moment: one that sends, one that receives, the receivers'
 * lead, or the one that serves the store. Versions go from two senders to three receivers, one after the other, until
 * somebody is dead; then each receiver that is left has all of one version, and all have the same, or say that they do
 * not know. Every second receive is held back for a moment. Tensors are in a file that the first process looks at; it
 * starts everybody, kills, and watches. */
#include "bus/store/store_test.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { USUAL_RUNS = 12, WINDOW_US = 150000 };
#else
enum { USUAL_RUNS = 40, WINDOW_US = 30000 };
#endif

enum { NSENDERS = 2, NRECEIVERS = 3, NMEMBERS = NSENDERS + NRECEIVERS, STORE = NMEMBERS, NPROCESSES };
/* Numbers of more versions are not exact. */
enum { MOST_VERSIONS = 500 };
enum { ROWS = 96, COLUMNS = 64, NTENSORS = 3, MOST = ROWS * COLUMNS, TIMEOUT_MS = 1000, BROKEN = 99 };

typedef struct board {
    atomic_int ncommitted;  /* first versions, by receivers */
    atomic_bool has_server; /* the store can be reached */
    atomic_bool is_over;    /* members need not wait for more */
    struct {
        atomic_bool is_done, is_in_doubt;
        atomic_uint_least64_t version; /* that it was told */
        float tensors[NTENSORS][MOST];
    } receiver[NRECEIVERS];
} board;

static board *open_board(const char *path) {
    FILE *file = fopen(path, "r+");
    board *b = file ? mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0) : MAP_FAILED;
    if (file)
        fclose(file);
    return b == MAP_FAILED ? NULL : b;
}

/* Element i of a receiver's or sender's part, in the whole tensor. */
static float value_of(int version, int tensor, int index) {
    return (float)(version * 30000 + tensor * 10000 + index);
}

static int part_size(bool is_sender) {
    return MOST / (is_sender ? NSENDERS : NRECEIVERS);
}

/* Senders have rows, receivers too, but others. */
static int first_of(bool is_sender, int seat) {
    return seat * part_size(is_sender);
}

/* ---- In a member ------------------------------------------------------------------------------------------------- */

typedef struct member {
    int position;
    board *board;
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    float *sources[NTENSORS];
} member;

static void must(const member *m, tb_status status) {
    if (status == TB_OK)
        return;
    fprintf(stderr, "member %d: %s: %s\n", m->position, tb_status_string(status), tb_error_detail());
    exit(BROKEN);
}

static bool is_sender(const member *m) {
    return m->position < NSENDERS;
}

static int seat_of(const member *m) {
    return is_sender(m) ? m->position : m->position - NSENDERS;
}

static void set_up_member(member *m, const char *url) {
    tb_world_opts opts = {.size = sizeof opts, .token = TOKEN, .timeout_ms = PATIENCE_MS, .workers = 1};
    tb_batch_opts batch = {.size = sizeof batch, .commit = TB_SHADOW, .staged = seat_of(m) == 1, .bucket_size = 8192};
    must(m, tb_world_join(url, is_sender(m) ? "a" : "b", seat_of(m), is_sender(m) ? NSENDERS : NRECEIVERS, &opts,
                          &m->world));
    must(m, tb_pair_create(m->world, "p", is_sender(m) ? "b" : "a",
                           is_sender(m) ? "mesh=2 place=S0" : "mesh=3 place=S0", NULL, &m->pair));
    must(m, tb_batch_create(m->world, "step", &batch, &m->batch));
    for (int i = 0; i < NTENSORS; i++) {
        char name[8] = {'t', (char)('0' + i)};
        must(m, tb_alloc((size_t)part_size(true) * sizeof(float), (void **)&m->sources[i]));
        tb_tensor t = {.size = sizeof t, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
        t.data = is_sender(m) ? m->sources[i] : m->board->receiver[seat_of(m)].tensors[i];
        must(m, tb_batch_add(m->batch, m->pair, name, &t));
    }
    must(m, tb_batch_register(m->batch, 0));
}

static int version_in(const board *b, int seat);

/* Until it lets the tensors change, or its time is up, they have the version before. */
static tb_status let_proceed(const member *m, tb_transfer *t, int version, int64_t begun_ms) {
    TB_TRY(tb_wait(t, TB_DECIDED, -1));
    nanosleep(&(struct timespec){.tv_nsec = version * 7919 % 1000000}, NULL);
    if (version_in(m->board, seat_of(m)) != version - 1 && tb__now_ms() - begun_ms < TIMEOUT_MS) {
        fprintf(stderr, "member %d was held back, and has version %d changed\n", m->position, version - 1);
        exit(BROKEN);
    }
    return tb_proceed(t);
}

static tb_status move(member *m, int version) {
    bool hold = !is_sender(m) && version > 1 && (version + seat_of(m)) % 2;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = version == 1 ? PATIENCE_MS : TIMEOUT_MS, .hold = hold};
    tb_transfer *t = NULL;
    for (int i = 0; is_sender(m) && i < NTENSORS; i++) {
        for (int j = 0; j < part_size(true); j++)
            m->sources[i][j] = value_of(version, i, first_of(true, seat_of(m)) + j);
    }
    int64_t begun_ms = tb__now_ms();
    TB_TRY((is_sender(m) ? tb_send : tb_recv)(m->batch, &opts, &t));
    tb_status status = hold ? let_proceed(m, t, version, begun_ms) : TB_OK;
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    tb_transfer_destroy(t);
    return status;
}

/* One that is in doubt asks again; its next receive can't begin, since somebody is gone, but it finds out. */
static void resolve(member *m) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_transfer *t = NULL;
    tb_status status = tb_recv(m->batch, &opts, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_ARRIVED, 0);
    tb_transfer_destroy(t);
    atomic_store(&m->board->receiver[seat_of(m)].is_in_doubt, status == TB_IN_DOUBT);
}

static int play(int position, const char *url, const char *path) {
    member m = {.position = position, .board = open_board(path)};
    tb_status status = TB_OK;
    if (!m.board)
        return BROKEN;
    set_up_member(&m, url);
    for (int version = 1; status == TB_OK && version < MOST_VERSIONS; version++) {
        status = move(&m, version);
        if (status == TB_OK && version == 1 && !is_sender(&m))
            atomic_fetch_add(&m.board->ncommitted, 1);
    }
    if (!is_sender(&m)) {
        uint64_t version;
        bool is_torn;
        /* Nobody leaves before all have asked: that would be another reason to give up, and hide one. */
        if (status == TB_IN_DOUBT)
            resolve(&m);
        must(&m, tb_batch_version(m.batch, m.pair, &version, &is_torn));
        atomic_store(&m.board->receiver[seat_of(&m)].version, version);
        atomic_store(&m.board->receiver[seat_of(&m)].is_done, true);
    }
    while (!atomic_load(&m.board->is_over))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    tb_batch_destroy(m.batch);
    tb_pair_destroy(m.pair);
    tb_world_destroy(m.world);
    for (int i = 0; i < NTENSORS; i++)
        tb_free(m.sources[i]);
    munmap(m.board, sizeof *m.board);
    return 0;
}

static int serve(const char *url, const char *path) {
    board *b = open_board(path);
    tb__store_server *server;
    if (!b || tb__store_server_start(url, TOKEN, &server) != TB_OK)
        return BROKEN;
    atomic_store(&b->has_server, true);
    while (!atomic_load(&b->is_over))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    /* Those who leave have something to say to it. */
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    tb__store_server_stop(server);
    munmap(b, sizeof *b);
    return 0;
}

static int play_role(const char *url, const char *arg) {
    char *path;
    int position = (int)strtol(arg, &path, 10);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody is left behind, whatever ends the first process */
    return position == STORE ? serve(url, path + 1) : play(position, url, path + 1);
}

/* ---- In the first process ---------------------------------------------------------------------------------------- */

static bool await(const atomic_bool *flag, int64_t deadline_ms) {
    while (!atomic_load(flag) && tb__now_ms() < deadline_ms)
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    return atomic_load(flag);
}

/* Which version is in the receiver's memory, all of it; -1: none is. */
static int version_in(const board *b, int seat) {
    const float *first = b->receiver[seat].tensors[0];
    int version = (int)(first[0] - (float)first_of(false, seat)) / 30000;
    for (int t = 0; t < NTENSORS; t++) {
        for (int i = 0; i < part_size(false); i++) {
            if (b->receiver[seat].tensors[t][i] != value_of(version, t, first_of(false, seat) + i))
                return -1;
        }
    }
    return version;
}

/* Returns how many were in doubt. */
static int check_receivers(const board *b, int victim) {
    int common = -1, ndoubts = 0, versions[NRECEIVERS];
    for (int seat = 0; seat < NRECEIVERS; seat++) {
        versions[seat] = version_in(b, seat);
        if (seat + NSENDERS == victim)
            continue;
        if (versions[seat] < 1 || versions[seat] != (int)atomic_load(&b->receiver[seat].version))
            fail_msg("receiver %d was told that it has version %d, and has %d (-1: a mixture)", seat,
                     (int)atomic_load(&b->receiver[seat].version), versions[seat]);
        if (atomic_load(&b->receiver[seat].is_in_doubt))
            ndoubts++;
        else if (common < 0)
            common = versions[seat];
        else if (common != versions[seat])
            fail_msg("receivers have versions %d and %d", common, versions[seat]);
    }
    for (int seat = 0; seat < NRECEIVERS && common >= 0; seat++) {
        if (seat + NSENDERS != victim && versions[seat] != common && versions[seat] != common - 1)
            fail_msg("receiver %d is in doubt and has version %d, others %d", seat, versions[seat], common);
    }
    return ndoubts;
}

static int run_once(rng *r) {
    place p;
    char path[128], arg[160], lock[128];
    pid_t pids[NPROCESSES];
    int victim = (int)rng_range(r, 0, NPROCESSES - 1);
    int64_t wait_us = rng_range(r, 0, WINDOW_US);
    printf("process %d is killed after %" PRId64 " us\n", victim, wait_us);
    fflush(stdout);
    place_make(&p);
    snprintf(path, sizeof path, "%s/board", p.folder);
    snprintf(lock, sizeof lock, "%s.lock", p.path);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(ftruncate(fileno(file), sizeof(board)), 0);
    fclose(file);
    board *b = open_board(path);
    assert_non_null(b);
    for (int i = STORE; i >= 0; i--) {
        snprintf(arg, sizeof arg, "%d:%s", i, path);
        pids[i] = start_role("member", p.url, arg);
        if (i == STORE)
            assert_true(await(&b->has_server, tb__now_ms() + PATIENCE_MS));
    }
    int64_t deadline_ms = tb__now_ms() + PATIENCE_MS;
    while (atomic_load(&b->ncommitted) < NRECEIVERS && tb__now_ms() < deadline_ms)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    nanosleep(&(struct timespec){.tv_nsec = wait_us * 1000}, NULL);
    bool has_begun = atomic_load(&b->ncommitted) == NRECEIVERS;
    kill_role(pids[victim]);
    bool all_done = true;
    for (int seat = 0; seat < NRECEIVERS; seat++)
        all_done &= seat + NSENDERS == victim || await(&b->receiver[seat].is_done, tb__now_ms() + PATIENCE_MS);
    int ndoubts = has_begun && all_done ? check_receivers(b, victim) : 0;
    atomic_store(&b->is_over, true);
    for (int i = 0; i < NPROCESSES; i++) {
        if (i == victim)
            continue;
        if (!all_done)
            kill(pids[i], SIGKILL);
        int end = end_of(pids[i]);
        if (all_done && end != 0)
            fail_msg("process %d ended with %d after %d was killed", i, end, victim);
    }
    assert_true(has_begun && all_done);
    munmap(b, sizeof *b);
    unlink(path);
    unlink(p.path);
    unlink(lock);
    place_remove(&p);
    return ndoubts;
}

static void anyone_at_any_moment(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t n = test_cases(USUAL_RUNS);
    int ndoubts = 0;
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        printf("TB_SEED=%" PRIu64 " TB_CASES=1: ", seed + (uint64_t)i);
        ndoubts += run_once(&r);
    }
    printf("%" PRId64 " kills, %d ranks in doubt\n", n, ndoubts);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "member") == 0)
        return play_role(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(anyone_at_any_moment)};
    return cmocka_run_group_tests_name("shadow_kill", tests, NULL, NULL);
}
