/* Worlds of an MPI communicator, between four processes that mpirun or mpiexec has started. The argument says what is
 * tried out, because some of it takes an MPI that was initialised, or ends, in another way. */
#include "tensorbus/mpi.h"

#include "bus/bus_test.h"
#include "bus/mpi/bootstrap.h"
#include "bus/store/store.h"
#include "bus/world.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { NRANKS = 4, HALF = 2, ROWS = 512, COLUMNS = 1000 };

static int my_rank;

/* ---- A tensor between two halves -------------------------------------------------------------------------------- */

typedef struct halves {
    tb_world *world;
    const char *group, *other;
    tb_pair *pair;
    tb_batch *batch;
    part w;
} halves;

static void enter_with(tb_world *world, halves *h, const tb_batch_opts *opts) {
    bool is_first = my_rank < HALF;
    const char *layout = is_first ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    *h = (halves){.world = world, .group = is_first ? "a" : "b", .other = is_first ? "b" : "a"};
    part_init(&h->w, layout, my_rank % HALF, ROWS, COLUMNS);
    check_ok(tb_world_enter(world, h->group, my_rank % HALF, HALF));
    tb_pair_opts pair = {.size = sizeof pair, .group = h->group};
    check_ok(tb_pair_create(world, "p", h->other, layout, &pair, &h->pair));
    check_ok(tb_batch_create(world, "step", opts, &h->batch));
    tb_tensor w = part_tensor(&h->w);
    check_ok(tb_batch_add(h->batch, h->pair, "w", &w));
    check_ok(tb_batch_register(h->batch, 0));
}

static void enter(tb_world *world, halves *h) {
    enter_with(world, h, NULL);
}

static void leave(halves *h) {
    tb_batch_destroy(h->batch);
    tb_pair_destroy(h->pair);
    part_fini(&h->w);
}

static tb_transfer *begin(halves *h, const char *from, uint32_t version) {
    bool is_send = strcmp(h->group, from) == 0;
    tb_transfer *t = NULL;
    if (is_send)
        part_fill(&h->w, version);
    else
        part_poison(&h->w);
    check_ok((is_send ? tb_send : tb_recv)(h->batch, NULL, &t));
    return t;
}

static void end(halves *h, tb_transfer *t, uint32_t version) {
    check_ok(tb_wait(t, TB_COMMITTED, PATIENCE_MS));
    check(part_holds(&h->w, version));
    tb_transfer_destroy(t);
}

static void there_and_back(halves *h) {
    for (uint32_t version = 1; version <= 4; version++) {
        const char *from = version % 2 ? "a" : "b";
        end(h, begin(h, from, version), version);
    }
}

static tb_world *make_world(const char *transport, bool is_manual) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .transport = transport, .manual = is_manual};
    tb_world *world = NULL;
    check_ok(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world));
    check(world != NULL);
    return world;
}

/* ---- What is left behind ---------------------------------------------------------------------------------------- */

/* Folders in /tmp that this process has entered, and one of them. */
static int find_folders(char path[64]) {
    int count = 0;
    DIR *dir = opendir("/tmp");
    check(dir != NULL);
    for (const struct dirent *at; (at = readdir(dir));) {
        char entry[400];
        struct stat file;
        snprintf(entry, sizeof entry, "/tmp/%s/%ld", at->d_name, (long)getpid());
        if (strncmp(at->d_name, "tensorbus-mpi-", 14) != 0 || stat(entry, &file) != 0)
            continue;
        snprintf(path, 64, "/tmp/%.50s", at->d_name);
        count++;
    }
    closedir(dir);
    return count;
}

static int count_folders(void) {
    char unused[64];
    return find_folders(unused);
}

/* ---- Tests ------------------------------------------------------------------------------------------------------ */

static void tensors_move_over(const char *transport) {
    halves h;
    char folder[64];
    struct stat file;
    tb_world *world = make_world(transport, false);
    check(find_folders(folder) == 1 && stat(folder, &file) == 0);
    check_ok(tb_world_wait(world, "all", PATIENCE_MS));
    enter(world, &h);
    there_and_back(&h);
    MPI_Barrier(MPI_COMM_WORLD);
    leave(&h);
    tb_world_destroy(world);
    check(count_folders() == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    check(stat(folder, &file) != 0); /* the last one has removed it */
}

static void tensors_move_over_mpi(void **state) {
    (void)state;
    tensors_move_over("mpi");
}

static void tensors_move_over_what_is_best(void **state) {
    (void)state;
    tensors_move_over(NULL);
    tensors_move_over("shm");
}

/* Each half has a rank on each of two hosts: tensors take both ways, and what is reported of peers says which. */
static void hosts_are_reached_by_mpi(void **state) {
    (void)state;
    static const char *const hosts[] = {"left", "right"};
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .host = hosts[my_rank % 2]};
    tb_world *world = NULL;
    halves h;
    int nnear[2] = {0}, nfar[2] = {0}; /* of each: those that nothing was exchanged with, and the others */
    check_ok(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world));
    enter(world, &h);
    there_and_back(&h);
    tb__loop_lock(world->loop);
    for (const tb__peer *p = tb__loop_peers(world->loop); p; p = p->next) {
        bool is_near = strcmp(p->host, hosts[my_rank % 2]) == 0;
        if (p->rank == world->rank)
            continue;
        check(strcmp(p->transport->ops->name, is_near ? "shm" : "mpi") == 0);
        ++(is_near ? nnear : nfar)[p->moved[0] > 0 && p->moved[1] > 0];
    }
    tb__loop_unlock(world->loop);
    check(nnear[0] == 0 && nnear[1] == 1 && nfar[0] == 1 && nfar[1] == 1);
    MPI_Barrier(MPI_COMM_WORLD);
    leave(&h);
    tb_world_destroy(world);
}

/* Many worlds, one after the other and two at once: communicators are given back. */
static void worlds_come_and_go(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        tb_world *world = make_world("mpi", false), *second = i % 4 ? NULL : make_world("mpi", false);
        halves h;
        if (second && i % 8) {
            enter(second, &h);
            there_and_back(&h);
            MPI_Barrier(MPI_COMM_WORLD); /* whoever leaves is lost to those who are not through yet */
            leave(&h);
        }
        tb_world_destroy(i % 2 ? world : second);
        tb_world_destroy(i % 2 ? second : world);
    }
}

/* The program's own messages and collectives, while a tensor is under way. */
static void the_program_goes_on_beside_it(void **state) {
    (void)state;
    enum { N = 30000 };
    static int out[N], in[N];
    halves h;
    tb_world *world = make_world("mpi", false);
    enter(world, &h);
    for (uint32_t version = 1; version <= 3; version++) {
        tb_transfer *t = begin(&h, "a", version);
        for (int i = 0; i < 20; i++) {
            int next = (my_rank + 1) % NRANKS, before = (my_rank + NRANKS - 1) % NRANKS, sum = 0;
            for (int k = 0; k < N; k++)
                out[k] = my_rank * N + k + i;
            MPI_Sendrecv(out, N, MPI_INT, next, i, in, N, MPI_INT, before, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            for (int k = 0; k < N; k++)
                check(in[k] == before * N + k + i);
            MPI_Allreduce(&i, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
            check(sum == NRANKS * i);
        }
        end(&h, t, version);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    leave(&h);
    tb_world_destroy(world);
}

/* What is wrong on one rank is told to all. */
static void all_fail_together(void **state) {
    (void)state;
    tb_world *world = NULL;
    char words[64];
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    check_fails(tb_world_from_mpi(MPI_COMM_NULL, "all", NULL, &world), TB_INVALID, "MPI_COMM_NULL");
    snprintf(words, sizeof words, "%s", my_rank == 2 ? "a group needs a name" : "rank 2 of the communicator: a group");
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, my_rank == 2 ? "" : "all", &opts, &world), TB_INVALID, words);
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, my_rank == 3 ? "odd" : "all", &opts, &world), TB_CONFLICT,
                "it says group 'odd', rank 0 says 'all'");
    opts.transport = my_rank == 1 ? "pigeon" : "mpi";
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world), TB_INVALID, "no transport 'pigeon'");
    check(count_folders() == 0 && !world);
    /* The transport is there now, but not for other worlds: those go without it. */
    char folder[] = "/tmp/tb-world-XXXXXX", url[64];
    check(mkdtemp(folder) != NULL);
    snprintf(url, sizeof url, "unix:%s/s", folder);
    opts.transport = "mpi";
    check_fails(tb_world_join(url, "own", 0, 1, &opts, &world), TB_REFUSED, "tb_world_from_mpi");
    opts.transport = NULL;
    check_ok(tb_world_join(url, "own", 0, 1, &opts, &world));
    tb_world_destroy(world);
    check(rmdir(folder) == 0);
}

/* Between hosts: at a port, of whichever address is reached. */
static void ranks_meet_at_a_port(void **state) {
    (void)state;
    static tb__bootstrap_info info;
    tb__store_server *server = NULL;
    tb__store *store;
    char url[BOOTSTRAP_URL];
    if (my_rank == 0)
        check_ok(tb__bootstrap_serve("all", false, &info, &server));
    MPI_Bcast(&info, (int)sizeof info, MPI_BYTE, 0, MPI_COMM_WORLD);
    check_ok(tb__bootstrap_enter_folder(&info));
    check_ok(tb__bootstrap_find(&info, tb__now_ms() + PATIENCE_MS, url));
    check(strncmp(url, "tcp://", 6) == 0);
    check_fails(tb__store_open(url, "a guess of more than thirty-two bytes", PATIENCE_MS, &store), TB_DENIED, "token");
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .token = info.token};
    tb_world *world;
    check_ok(tb_world_join(url, "all", my_rank, NRANKS, &opts, &world));
    check_ok(tb_world_wait(world, "all", PATIENCE_MS));
    MPI_Barrier(MPI_COMM_WORLD);
    tb_world_destroy(world);
    MPI_Barrier(MPI_COMM_WORLD);
    tb__bootstrap_leave_folder(&info);
    tb__store_server_stop(server);
    MPI_Barrier(MPI_COMM_WORLD);
    info.naddresses = 1; /* nobody is there any more */
    check_fails(tb__bootstrap_find(&info, tb__now_ms() + PATIENCE_MS, url), TB_TIMEOUT, "answers at none");
}

static double seconds_of(const struct rusage *use) {
    return (double)(use->ru_utime.tv_sec + use->ru_stime.tv_sec) +
           1e-6 * (double)(use->ru_utime.tv_usec + use->ru_stime.tv_usec);
}

/* A world that has peers and waits for their messages. */
static void idle_worlds_sleep(void **state) {
    (void)state;
    halves h;
    struct rusage before, after;
    tb_world *world = make_world("mpi", false);
    enter(world, &h);
    there_and_back(&h);
    MPI_Barrier(MPI_COMM_WORLD);
    getrusage(RUSAGE_SELF, &before);
    struct timespec second = {.tv_sec = 1};
    nanosleep(&second, NULL);
    getrusage(RUSAGE_SELF, &after);
    double used = seconds_of(&after) - seconds_of(&before);
    check(used < 0.4);
    MPI_Barrier(MPI_COMM_WORLD);
    leave(&h);
    tb_world_destroy(world);
}

/* Somebody leaves without a word to the others, and is found out. */
static void who_leaves_is_lost(void **state) {
    (void)state;
    halves h;
    tb_world *world = make_world("mpi", false);
    enter(world, &h);
    there_and_back(&h);
    MPI_Barrier(MPI_COMM_WORLD);
    if (my_rank == NRANKS - 1) {
        leave(&h);
        tb_world_destroy(world);
        return;
    }
    tb_transfer *t = NULL;
    tb_status status = (my_rank < HALF ? tb_send : tb_recv)(h.batch, NULL, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, PATIENCE_MS);
    /* Those who send to it; the other one may have all of its own before it hears of it. */
    check(status == TB_LOST || (my_rank >= HALF && status != TB_TIMEOUT));
    tb_transfer_destroy(t);
    leave(&h);
    tb_world_destroy(world);
}

/* One half leaves as soon as its own part is committed; the other one has all that it needs. */
static void who_is_through_may_leave(void **state) {
    (void)state;
    for (uint32_t round = 1; round <= 12; round++) {
        halves h;
        tb_world *world = make_world("mpi", false);
        enter(world, &h);
        tb_transfer *t = begin(&h, "a", round);
        check_ok(tb_wait(t, TB_COMMITTED, PATIENCE_MS));
        check(part_holds(&h.w, round));
        tb_transfer_destroy(t);
        if ((my_rank < HALF) == (round % 2 == 1)) {
            leave(&h);
            tb_world_destroy(world);
            MPI_Barrier(MPI_COMM_WORLD);
            continue;
        }
        MPI_Barrier(MPI_COMM_WORLD);
        t = NULL;
        check_fails((my_rank < HALF ? tb_send : tb_recv)(h.batch, NULL, &t) == TB_OK
                        ? tb_wait(t, TB_COMMITTED, PATIENCE_MS)
                        : TB_LOST,
                    TB_LOST, "rank ");
        tb_transfer_destroy(t);
        leave(&h);
        tb_world_destroy(world);
    }
}

/* ---- MPIs of other kinds ---------------------------------------------------------------------------------------- */

static void a_manual_world_needs_no_threads(void **state) {
    (void)state;
    tb_world *world = NULL;
    halves h;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world), TB_REFUSED, "MPI_THREAD_MULTIPLE");
    world = make_world("mpi", true);
    enter(world, &h);
    there_and_back(&h);
    MPI_Barrier(MPI_COMM_WORLD);
    leave(&h);
    tb_world_destroy(world);
}

static void *make_elsewhere(void *arg) {
    (void)arg;
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .manual = true};
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world), TB_REFUSED, "this is another one");
    return NULL;
}

static void another_thread_is_refused(void **state) {
    (void)state;
    pthread_t thread;
    check(pthread_create(&thread, NULL, make_elsewhere, NULL) == 0);
    pthread_join(thread, NULL);
}

static void a_single_thread_is_refused(void **state) {
    (void)state;
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS, .manual = true};
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world), TB_REFUSED, "MPI_THREAD_FUNNELED");
}

/* MPICH 4.0 unlocks a lock that another thread may have when it calls back from MPI_Finalize, so there nobody else may
 * be in it. */
#ifdef MPICH
enum { IS_MANUAL = true };
#else
enum { IS_MANUAL = false };
#endif

static tb_world *enter_world(halves *h) {
    tb_world *world = make_world("mpi", IS_MANUAL);
    enter(world, h);
    there_and_back(h);
    MPI_Barrier(MPI_COMM_WORLD);
    return world;
}

/* MPI ends first: what waits is told, nothing crashes, and the folder goes. */
static void mpi_may_end_first(void **state) {
    (void)state;
    halves h;
    tb_world *world = enter_world(&h);
    tb_transfer *t;
    check_ok(tb_recv(h.batch, NULL, &t)); /* all of them, so that nothing comes */
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    check_fails(tb_wait(t, TB_COMMITTED, PATIENCE_MS), TB_LOST, "was lost"); /* by it, or by another that was faster */
    tb_transfer_destroy(t);
    leave(&h);
    tb_world_destroy(world);
    check(count_folders() == 0);
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", NULL, &world), TB_INVALID, "finalised");
}

/* One half finalises MPI as soon as its own part is committed. */
static void who_is_through_may_finalize(void **state) {
    (void)state;
    halves h;
    tb_world *world = enter_world(&h);
    end(&h, begin(&h, "a", 5), 5);
    MPI_Finalize();
    leave(&h);
    tb_world_destroy(world);
}

/* MPI ends on one rank while it sends buckets, in several worlds: each transfer ends, and what is not lost is all
 * there. */
static void mpi_may_end_midway(void **state) {
    (void)state;
    enum { NWORLDS = 4 };
    tb_world *worlds[NWORLDS];
    halves h[NWORLDS];
    tb_transfer *t[NWORLDS];
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = 16 << 10}; /* many buckets under way */
    for (int i = 0; i < NWORLDS; i++) {
        worlds[i] = make_world("mpi", IS_MANUAL);
        enter_with(worlds[i], &h[i], &opts);
        end(&h[i], begin(&h[i], "a", 1), 1); /* all is set up, so that the next one is buckets only */
    }
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < NWORLDS; i++) {
        bool is_send = my_rank < HALF;
        if (is_send)
            part_fill(&h[i].w, 5);
        else
            part_poison(&h[i].w);
        t[i] = NULL;
        tb_status status = (is_send ? tb_send : tb_recv)(h[i].batch, NULL, &t[i]);
        check(status == TB_OK || status == TB_LOST); /* the first rank may have been faster */
    }
    if (my_rank == 0)
        MPI_Finalize();
    for (int i = 0; i < NWORLDS; i++) {
        tb_status status = t[i] ? tb_wait(t[i], TB_COMMITTED, PATIENCE_MS) : TB_LOST;
        check(status == TB_LOST || (status == TB_OK && part_holds(&h[i].w, 5)));
        tb_transfer_destroy(t[i]);
    }
    if (my_rank != 0)
        MPI_Finalize();
    for (int i = 0; i < NWORLDS; i++) {
        leave(&h[i]);
        tb_world_destroy(worlds[i]);
    }
    check(count_folders() == 0);
}

/* One comes when the others have given up: all hear of it in time. */
static void one_comes_too_late(void **state) {
    (void)state;
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = 500};
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    if (my_rank == 1)
        MPI_Barrier(comm);
    check_fails(tb_world_from_mpi(MPI_COMM_WORLD, "all", &opts, &world), TB_TIMEOUT, "not all ranks");
    if (my_rank != 1)
        MPI_Barrier(comm);
    check(count_folders() == 0);
    MPI_Barrier(comm);
}

/* ---- Which of them ---------------------------------------------------------------------------------------------- */

typedef struct program {
    const char *name;
    int level;
    const struct CMUnitTest *tests;
    size_t ntests;
} program;

static const struct CMUnitTest usual[] = {
    cmocka_unit_test(tensors_move_over_mpi),
    cmocka_unit_test(tensors_move_over_what_is_best),
    cmocka_unit_test(hosts_are_reached_by_mpi),
    cmocka_unit_test(worlds_come_and_go),
    cmocka_unit_test(the_program_goes_on_beside_it),
    cmocka_unit_test(all_fail_together),
    cmocka_unit_test(ranks_meet_at_a_port),
    cmocka_unit_test(idle_worlds_sleep),
    cmocka_unit_test(who_leaves_is_lost),
    cmocka_unit_test(who_is_through_may_leave),
};
static const struct CMUnitTest funneled[] = {
    cmocka_unit_test(a_manual_world_needs_no_threads),
    cmocka_unit_test(another_thread_is_refused),
};
static const struct CMUnitTest single[] = {cmocka_unit_test(a_single_thread_is_refused)};
static const struct CMUnitTest finalized[] = {cmocka_unit_test(mpi_may_end_first)};
static const struct CMUnitTest through[] = {cmocka_unit_test(who_is_through_may_finalize)};
static const struct CMUnitTest midway[] = {cmocka_unit_test(mpi_may_end_midway)};
static const struct CMUnitTest late[] = {cmocka_unit_test(one_comes_too_late)};

static const program programs[] = {
    {"usual", MPI_THREAD_MULTIPLE, usual, sizeof usual / sizeof *usual},
    {"funneled", MPI_THREAD_FUNNELED, funneled, sizeof funneled / sizeof *funneled},
    {"single", MPI_THREAD_SINGLE, single, 1},
    {"finalized", MPI_THREAD_MULTIPLE, finalized, 1},
    {"through", MPI_THREAD_MULTIPLE, through, 1},
    {"midway", MPI_THREAD_MULTIPLE, midway, 1},
    {"late", MPI_THREAD_MULTIPLE, late, 1},
};

int main(int argc, char **argv) {
    const program *p = NULL;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        if (argc == 2 && strcmp(argv[1], programs[i].name) == 0)
            p = &programs[i];
    }
    if (!p)
        return 2;
    int level, nranks, is_finalised = 0;
    MPI_Init_thread(&argc, &argv, p->level, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (nranks != NRANKS || level < p->level)
        MPI_Abort(MPI_COMM_WORLD, 2);
    int failures = 0;
    for (size_t i = 0; i < p->ntests && failures == 0; i++) {
        failures = _cmocka_run_group_tests(p->name, &p->tests[i], 1, NULL, NULL);
        MPI_Finalized(&is_finalised);
        if (failures > 0 && !is_finalised)
            MPI_Abort(MPI_COMM_WORLD, 1); /* the others may be waiting */
    }
    if (!is_finalised)
        MPI_Finalize();
    fflush(NULL);
    return failures > 0;
}
