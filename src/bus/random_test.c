/* Random batches between real processes, which meet in a store. The first process only watches. In a test bed the
 * workers are dealt out to its hosts. With TB_AGENTS each process has an agent of its own, which is a process, too: the
 * tool in $TENSORBUS. */
#include "tensorbus/tensorbus.h"

#include "../tests/support/hosts.h"
#include "../tests/support/random_case.h"
#include "../tests/support/random_worker.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { USUAL_CASES = 150, HOSTS_CASES = 100, AGENTS_CASES = 50 };
#elif defined(TB_SLOW_DEVICE) /* with TB_CASES=500 as many as on the host */
enum { USUAL_CASES = 100, HOSTS_CASES = 100, AGENTS_CASES = 50 };
#else
enum { USUAL_CASES = 500, HOSTS_CASES = 200, AGENTS_CASES = 150 };
#endif

enum { NWORKERS = 8, WATCH_MS = 90000 };

/* What the processes share. */
typedef struct board {
    _Atomic uint32_t arrived; /* at barriers */
    _Atomic bool is_over;     /* somebody failed: the others need not say so too */
    struct {
        _Atomic uint64_t seed;
        _Atomic uint32_t steps;
        const char *_Atomic step; /* the same address in all, for they are forked */
    } worker[NWORKERS];
} board;

static board *shared;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- In a worker ----------------------------------------------------------------------------------------------- */

static int number;
static const char *store_url;

static void at(uint64_t seed, const char *step) {
    atomic_store(&shared->worker[number].seed, seed);
    atomic_store(&shared->worker[number].step, step);
    atomic_fetch_add(&shared->worker[number].steps, 1);
}

static bool is_first_to_fail(void) {
    return !atomic_exchange(&shared->is_over, true);
}

static void stop_agent(void);

static _Noreturn void give_up(void) {
    stop_agent();
    _exit(1);
}

static void barrier(void) {
    static uint32_t nbarriers;
    uint32_t wanted = ++nbarriers * NWORKERS;
    int64_t deadline_ms = now_ms() + RANDOM_PATIENCE_MS;
    atomic_fetch_add(&shared->arrived, 1);
    while (atomic_load(&shared->arrived) < wanted) {
        if (now_ms() > deadline_ms) {
            if (is_first_to_fail())
                fprintf(stderr, "worker %d: the others do not come\n", number);
            give_up();
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* ---- The agent of a worker ------------------------------------------------------------------------------------- */

static bool has_agents;
static pid_t agent;
static char agent_path[96];

static tb_status start_agent(const char *group, int32_t seat, int32_t nseats, const char *host) {
    extern char **environ;
    char rank[16], size[16];
    const char *tool = getenv("TENSORBUS");
    snprintf(rank, sizeof rank, "%d", (int)seat);
    snprintf(size, sizeof size, "%d", (int)nseats);
    snprintf(agent_path, sizeof agent_path, "%.60s.%d", store_url + strlen("unix:"), number);
    const char *argv[] = {tool,
                          "agent",
                          "--name",
                          group,
                          "--rank",
                          rank,
                          "--size",
                          size,
                          "--store",
                          store_url,
                          "--socket",
                          agent_path,
                          "--timeout",
                          "60",
                          "--workers",
                          "1",
                          "--transport",
                          "shm",
                          host ? "--host" : NULL,
                          host,
                          NULL};
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    int error = tool ? posix_spawn(&agent, tool, &files, NULL, (char **)(uintptr_t)argv, environ) : ENOENT;
    posix_spawn_file_actions_destroy(&files);
    return error == 0 ? TB_OK : tb_error_set(TB_IO, strerror(error));
}

static void stop_agent(void) {
    if (agent <= 0)
        return;
    kill(agent, SIGTERM);
    waitpid(agent, NULL, 0);
    agent = 0;
}

static tb_status join(const char *group, int32_t seat, int32_t nseats, const char *host, tb_world **out) {
    const char *transport = getenv("TB_TRANSPORT");
    tb_world_opts opts = {.size = sizeof opts,
                          .token = hosts_count() ? hosts_token : NULL,
                          .timeout_ms = RANDOM_PATIENCE_MS,
                          .transport = transport       ? transport
                                       : hosts_count() ? "auto"
                                                       : "shm",
                          .host = hosts_count() ? NULL : host};
    if (!has_agents)
        return tb_world_join(store_url, group, seat, nseats, &opts, out);
    char url[sizeof agent_path + 8];
    tb_status status = start_agent(group, seat, nseats, host);
    snprintf(url, sizeof url, "agent:%s", agent_path);
    return status == TB_OK ? tb_world_join(url, group, seat, nseats, &opts, out) : status;
}

static void work(uint64_t seed, int64_t ncases) {
    if (hosts_count())
        hosts_enter(number);
    random_pool pool = {.number = number,
                        .nworkers = NWORKERS,
                        .barrier = barrier,
                        .join = join,
                        .leave = stop_agent,
                        .has_agents = has_agents,
                        .at = at,
                        .is_first_to_fail = is_first_to_fail,
                        .give_up = give_up};
    random_work(&pool, seed, ncases);
}

/* ---- In the first process -------------------------------------------------------------------------------------- */

static uint64_t steps_of_all(void) {
    uint64_t sum = 0;
    for (int i = 0; i < NWORKERS; i++)
        sum += atomic_load(&shared->worker[i].steps);
    return sum;
}

static void say_who_hangs(void) {
    fprintf(stderr, "nothing happens any more:\n");
    for (int i = 0; i < NWORKERS; i++) {
        const char *step = atomic_load(&shared->worker[i].step);
        fprintf(stderr, "  worker %d, TB_SEED=%" PRIu64 " TB_CASES=1: %s\n", i, atomic_load(&shared->worker[i].seed),
                step ? step : "not begun");
    }
}

/* True: all ended well. Ends those that are left otherwise. */
static bool watch(pid_t *pids) {
    int left = NWORKERS;
    bool is_good = true;
    uint64_t steps = 0;
    int64_t moved_ms = now_ms();
    while (left > 0 && is_good) {
        int status;
        for (int i = 0; i < NWORKERS; i++) {
            if (pids[i] > 0 && waitpid(pids[i], &status, WNOHANG) == pids[i]) {
                is_good &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
                if (WIFSIGNALED(status))
                    fprintf(stderr, "worker %d: %s, TB_SEED=%" PRIu64 " TB_CASES=1\n", i, strsignal(WTERMSIG(status)),
                            atomic_load(&shared->worker[i].seed));
                pids[i] = 0;
                left--;
            }
        }
        if (steps_of_all() != steps) {
            steps = steps_of_all();
            moved_ms = now_ms();
        } else if (now_ms() - moved_ms > WATCH_MS) {
            say_who_hangs();
            is_good = false;
        }
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    for (int i = 0; i < NWORKERS; i++) {
        if (pids[i] > 0) {
            kill(pids[i], SIGKILL);
            waitpid(pids[i], NULL, 0);
        }
    }
    return is_good;
}

static void random_batches_between_processes(void **state) {
    (void)state;
    char folder[] = "/tmp/tb-random-XXXXXX", path[64], url[80];
    pid_t pids[NWORKERS];
    uint64_t seed = test_seed();
    has_agents = getenv("TB_AGENTS");
    int64_t ncases = test_cases(hosts_count() ? HOSTS_CASES : has_agents ? AGENTS_CASES : USUAL_CASES);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(url, sizeof url, "unix:%s", path);
    if (hosts_count())
        hosts_store(url, sizeof url);
    fflush(NULL);
    for (int i = 0; i < NWORKERS; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            number = i;
            store_url = url;
            work(seed, ncases);
            exit(0); /* not _exit: leaks are looked for */
        }
    }
    bool is_good = watch(pids);
    unlink(path); /* of a server that was killed */
    rmdir(folder);
    munmap(shared, sizeof *shared);
    assert_true(is_good);
    printf("%" PRId64 " random batches\n", ncases);
}

int main(void) {
    if (hosts_count())
        hosts_need_ucx();
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_batches_between_processes)};
    return cmocka_run_group_tests_name("random", tests, NULL, NULL);
}
