/* How long many ranks take to find each other: half of them are trainers, half engines; each joins, makes the pair, and
 * registers 300 tensors. First as threads of this process, which count messages; then as processes of their own, which
 * compete for CPU time.
 *
 *   bench/rendezvous [URL [RANKS...]]    a store that runs already, for example etcd://127.0.0.1:2379
 *
 * Without a URL the store is embedded. The exit status tells whether a figure is exceeded. */
#include "../tests/support/ranks.h"

#include <signal.h>
#include <sys/wait.h>

enum { TENSORS = 300, MOST_MESSAGES = 40, MOST_SECONDS = 30, MOST_GROWTH = 5, MOST_CPU_GROWTH = 8 };

static bool limit(const char *what, double value, double most, const char *unit) {
    bool is_good = value <= most;
    printf("  %-58s %9.2f %s   (at most %g) %s\n", what, value, unit, most, is_good ? "ok" : "TOO MUCH");
    return is_good;
}

/* A store of its own for each size, unless there is one. */
typedef struct place {
    char folder[32], url[200];
    tb__store_server *server;
} place;

static void place_open(place *p, const char *given, int number) {
    *p = (place){.folder = "/tmp/tb-bench-XXXXXX"};
    if (given) {
        snprintf(p->url, sizeof p->url, "%s?namespace=bench-%d-%d", given, (int)getpid(), number);
        return;
    }
    if (!mkdtemp(p->folder))
        must(TB_IO, p->folder);
    snprintf(p->url, sizeof p->url, "unix:%s/s", p->folder);
}

static void place_serve(place *p, const char *given) {
    if (!given)
        must(tb__store_server_start(p->url, NULL, &p->server), "store");
}

static void place_close(place *p, const char *given) {
    if (given)
        return;
    tb__store_server_stop(p->server);
    rmdir(p->folder);
}

/* What a rank does until it is ready. */
static void rendezvous(fleet_rank *r) {
    fleet_join(r);
    must(fleet_pair(r, NULL), "pair");
    fleet_add(r, RANKS_COLUMNS);
    must(tb_batch_register(r->batch, 0), "register");
}

static void body(fleet_rank *r) {
    rendezvous(r);
    fleet_meet(r);
    fleet_leave(r);
}

static void child(const char *url, int go, int out, int number, int nranks) {
    char byte;
    fleet f = {.url = url, .nranks = nranks, .ntensors = TENSORS, .timeout_ms = 120000};
    int half = nranks / 2;
    fleet_rank r = {
        .fleet = &f, .number = number, .index = number % half, .is_engine = number >= half, .rows = RANKS_ROWS / half};
    if (read(go, &byte, 1) != 0)
        _exit(1);
    rendezvous(&r);
    if (write(out, "r", 1) != 1)
        _exit(1);
    struct pollfd fd = {.fd = tb_world_fd(r.world), .events = POLLIN};
    for (;;) { /* others may need what this rank still has to send */
        poll(&fd, 1, -1);
        must(tb_world_progress(r.world), "progress");
    }
}

/* The CPU time of all processes, the store's included. */
static double run_processes(const char *given, int nranks) {
    place p;
    int go[2], ready[2];
    pid_t *pids = calloc((size_t)nranks, sizeof *pids);
    place_open(&p, given, 10000 + nranks);
    if (pipe(go) != 0 || pipe(ready) != 0)
        must(TB_IO, "pipe");
    for (int i = 0; i < nranks; i++) {
        pids[i] = fork();
        if (pids[i] < 0)
            must(TB_IO, "fork");
        if (pids[i] == 0) {
            close(go[1]);
            child(p.url, go[0], ready[1], i, nranks);
        }
    }
    close(ready[1]);
    place_serve(&p, given);
    double begin = (double)tb__now_ms(), before = cpu_seconds(RUSAGE_SELF) + cpu_seconds(RUSAGE_CHILDREN);
    close(go[1]);
    char byte;
    int nready = 0;
    while (nready < nranks && read(ready[0], &byte, 1) == 1)
        nready++;
    double seconds = ((double)tb__now_ms() - begin) / 1000;
    for (int i = 0; i < nranks; i++)
        kill(pids[i], SIGKILL);
    for (int i = 0; i < nranks; i++)
        waitpid(pids[i], NULL, 0);
    double cpu = cpu_seconds(RUSAGE_SELF) + cpu_seconds(RUSAGE_CHILDREN) - before;
    close(go[0]);
    close(ready[0]);
    place_close(&p, given);
    free(pids);
    if (nready < nranks) {
        fprintf(stderr, "only %d of %d processes are ready\n", nready, nranks);
        _exit(1);
    }
    printf("%5d processes: %7.2f s, %7.2f s of CPU time\n", nranks, seconds, cpu);
    fflush(stdout);
    return cpu;
}

int main(int argc, char **argv) {
    static const int sizes[] = {64, 256, 1024};
    const char *given = argc > 1 && *argv[1] ? argv[1] : NULL;
    int nsizes = argc > 2 ? argc - 2 : 3;
    bool is_good = true;
    double seconds[16] = {0}, messages[16] = {0};
    double few = argc > 2 ? 0 : run_processes(given, 100), many = argc > 2 ? 0 : run_processes(given, 400);
    for (int i = 0; i < nsizes && i < 16; i++) {
        int n = argc > 2 ? atoi(argv[i + 2]) : sizes[i];
        place p;
        place_open(&p, given, n);
        place_serve(&p, given);
        fleet f = {.url = p.url, .nranks = n, .ntensors = TENSORS, .body = body};
        run_fleet(&f);
        seconds[i] = f.meetings[1].at - f.meetings[0].at;
        double store = (double)(f.meetings[1].store - f.meetings[0].store) / n;
        double ranks = (double)(f.meetings[1].messages - f.meetings[0].messages) / n;
        messages[i] = store + ranks;
        printf(
            "%5d ranks: %7.2f s, %7.2f s of CPU time, %6.1f messages per rank: %.1f with the store, %.1f among ranks\n",
            n, seconds[i], f.meetings[1].cpu - f.meetings[0].cpu, messages[i], store, ranks);
        fflush(stdout);
        place_close(&p, given);
    }
    if (argc > 2)
        return 0;
    is_good &= limit("1,024 ranks: seconds", seconds[2], MOST_SECONDS, "s");
    is_good &= limit("1,024 ranks: messages per rank", messages[2], MOST_MESSAGES, " ");
    is_good &= limit("from 256 to 1,024 ranks: growth of the time", seconds[2] / seconds[1], MOST_GROWTH, "x");
    is_good &=
        limit("from 256 to 1,024 ranks: growth of all messages", 4 * messages[2] / messages[1], MOST_GROWTH, "x");
    is_good &= limit("from 100 to 400 processes: growth of the CPU time", many / few, MOST_CPU_GROWTH, "x");
    return is_good ? 0 : 1;
}
