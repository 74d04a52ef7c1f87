/* Many ranks as threads of one process, each with a manual world of its own: half of them are trainers, half engines,
 * and a pair "p" leads from the trainers to the engines. */
#ifndef TB_TESTS_RANKS_H
#define TB_TESTS_RANKS_H

#include "base/process.h"
#include "base/traffic.h"
#include "bus/store/server.h"
#include "tensorbus/plan.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

enum { RANKS_ROWS = 1024, RANKS_COLUMNS = 4, RANKS_MEETINGS = 8 };

typedef struct fleet fleet;

typedef struct fleet_rank {
    fleet *fleet;
    int number, index; /* of all, and of its group */
    bool is_engine;
    int rows; /* of each tensor that it has */
    tb_world *world;
    tb_pair *pair;
    tb_batch *batch;
    float *memory; /* of all tensors */
    int met;       /* how often it has met the others */
    pthread_t thread;
} fleet_rank;

struct fleet {
    const char *url;
    int nranks, ntensors, timeout_ms;
    void (*body)(fleet_rank *r);
    void *arg;
    fleet_rank *ranks;
    struct {
        atomic_int count;
        int all; /* an eventfd, readable when all have come */
        double at;
        uint64_t store, messages;
        double cpu;
    } meetings[RANKS_MEETINGS];
};

static inline void must(tb_status status, const char *what) {
    if (status != TB_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, tb_status_string(status), tb_error_detail());
        _exit(1);
    }
}

static inline double cpu_seconds(int who) {
    struct rusage use;
    getrusage(who, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static inline void fleet_measure(fleet *f, int meeting) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    f->meetings[meeting].at = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    f->meetings[meeting].store = tb__traffic_total.store;
    f->meetings[meeting].messages = tb__traffic_total.ranks;
    f->meetings[meeting].cpu = cpu_seconds(RUSAGE_SELF);
}

/* Waits for all ranks, and drives the rank's world meanwhile: others may need what it still has to send. */
static inline void fleet_meet(fleet_rank *r) {
    fleet *f = r->fleet;
    int meeting = ++r->met;
    if (atomic_fetch_add(&f->meetings[meeting].count, 1) + 1 == f->nranks) {
        fleet_measure(f, meeting);
        eventfd_write(f->meetings[meeting].all, 1);
    }
    struct pollfd fds[2] = {{.fd = f->meetings[meeting].all, .events = POLLIN},
                            {.fd = r->world ? tb_world_fd(r->world) : -1, .events = POLLIN}};
    while (poll(fds, 2, -1) < 0 || !fds[0].revents)
        must(tb_world_progress(r->world), "progress");
}

static inline void fleet_join(fleet_rank *r) {
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = r->fleet->timeout_ms, .manual = true};
    must(tb_world_join(r->fleet->url, r->is_engine ? "engine" : "trainer", r->index, r->fleet->nranks / 2, &opts,
                       &r->world),
         "join");
}

static inline tb_status fleet_pair(fleet_rank *r, const char *layout) {
    char own[64];
    snprintf(own, sizeof own, "mesh=%d place=S0", r->fleet->nranks / 2);
    return tb_pair_create(r->world, "p", r->is_engine ? "trainer" : "engine", layout ? layout : own, NULL, &r->pair);
}

static inline void fleet_add(fleet_rank *r, int64_t columns) {
    char name[64];
    size_t count = (size_t)r->rows * RANKS_COLUMNS;
    must(tb_batch_create(r->world, "b", NULL, &r->batch), "batch");
    r->memory = calloc((size_t)r->fleet->ntensors * count * 2, sizeof *r->memory);
    for (int i = 0; i < r->fleet->ntensors; i++) {
        tb_tensor t = {.size = sizeof t, .dtype = TB_F32, .ndim = 2, .data = r->memory + (size_t)i * count};
        t.shape[0] = r->rows * (r->fleet->nranks / 2);
        t.shape[1] = columns;
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.down_proj.weight", i / 100, i % 100);
        must(tb_batch_add(r->batch, r->pair, name, &t), "add");
    }
}

static inline void fleet_leave(fleet_rank *r) {
    tb_batch_destroy(r->batch);
    tb_pair_destroy(r->pair);
    tb_world_destroy(r->world);
    free(r->memory);
    r->batch = NULL;
    r->pair = NULL;
    r->world = NULL;
    r->memory = NULL;
}

static inline void *fleet_rank_main(void *arg) {
    fleet_rank *r = arg;
    r->fleet->body(r);
    return NULL;
}

static inline void run_fleet(fleet *f) {
    f->ranks = calloc((size_t)f->nranks, sizeof *f->ranks);
    f->timeout_ms = f->timeout_ms ? f->timeout_ms : 120000;
    struct rlimit files = {.rlim_cur = 1 << 18,
                           .rlim_max = 1 << 18}; /* 20 for each rank; needs root if the limit is low */
    if (setrlimit(RLIMIT_NOFILE, &files) != 0 && getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1 << 20);
    for (int i = 0; i < RANKS_MEETINGS; i++) {
        f->meetings[i].count = 0;
        f->meetings[i].all = eventfd(0, EFD_CLOEXEC);
    }
    fleet_measure(f, 0);
    for (int i = 0; i < f->nranks; i++) {
        int half = f->nranks / 2;
        f->ranks[i] =
            (fleet_rank){.fleet = f, .number = i, .index = i % half, .is_engine = i >= half, .rows = RANKS_ROWS / half};
        if (pthread_create(&f->ranks[i].thread, &attr, fleet_rank_main, &f->ranks[i]) != 0) {
            fprintf(stderr, "no thread for rank %d\n", i);
            _exit(1);
        }
    }
    for (int i = 0; i < f->nranks; i++)
        pthread_join(f->ranks[i].thread, NULL);
    for (int i = 0; i < RANKS_MEETINGS; i++)
        close(f->meetings[i].all);
    pthread_attr_destroy(&attr);
    free(f->ranks);
}

#endif
