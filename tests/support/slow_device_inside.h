/* What the files of the slow device share: slow_device.c (memory, and what tests ask for) and slow_device_runs.c (jobs
 * and their runs). */
#ifndef TB_TESTS_SLOW_DEVICE_INSIDE_H
#define TB_TESTS_SLOW_DEVICE_INSIDE_H

#include "random_case.h"
#include "slow_device.h"

#include <pthread.h>
#include <sys/queue.h>

typedef struct slow_run slow_run;
TAILQ_HEAD(slow_runs, slow_run);

typedef struct slow_device {
    tb__device base;
    int wake; /* an eventfd: a run has ended */
    size_t njobs, nmappings, nallocations;
    struct slow_runs waiting; /* for fences that come first */
    struct slow_runs begun;   /* the thread's */
    struct slow_runs ended;   /* their fences are not told yet */
    pthread_t thread;
    bool is_stopping;
} slow_device;

typedef struct allocation {
    size_t offset, nbytes;
    uint64_t epoch;
    int unit;
    bool is_shareable;
    slow_device *device; /* NULL: a test's */
    LIST_ENTRY(allocation) link;
} allocation;

/* No address of it is ever seen: the mapping is the device's alone. It is not freed, so that jobs that use it too late
 * are noticed. */
typedef struct slow_mapping {
    tb__mapping base;
    void *pages;
    size_t npages_bytes;
    size_t nruns; /* under way, of jobs that use it */
    bool is_unmapped;
    LIST_ENTRY(slow_mapping) link;
} slow_mapping;

/* Counts down to a fault; negative: there is none. */
typedef struct fault {
    long after;
    tb_status status;
    char why[TB__FENCE_WHY_MAX];
} fault;

/* One lock guards all of it: memory, runs of all devices, and the faults that tests ask for. */
typedef struct slow_state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int fd;
    char *seen, *alias; /* the two mappings of the pool; NULL: it is not there yet */
    size_t used;
    uint64_t nallocations;
    size_t nbuffer_runs;
    LIST_HEAD(allocations, allocation) allocations;
    LIST_HEAD(slow_mappings, slow_mapping) mappings;
    rng random;
    int64_t most_us;
    fault calls[SLOW_DEVICE_NCALLS], run, hold;
    uint64_t times_let_go; /* runs that were held before the last time go on */
} slow_state;

extern slow_state slow;

_Noreturn void slow_die(const char *what);
void slow_lock(void);
void slow_unlock(void);
/* The address by which the device reaches its memory; host memory as it is. */
void *slow_translate(const void *address);
/* Whether this call fails, as a test asked for. */
tb_status slow_check_call(slow_device_call call);
/* With the lock held. Whether it is this one's turn. */
bool slow_strikes(fault *f);

/* slow_device_runs.c */
void *slow_do_runs(void *device); /* the device's thread */
tb_status slow_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
void slow_release(tb__device *device, tb__job *job);
tb_status slow_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence);
tb_status slow_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence);
void slow_cancel(tb__device *device, tb__fence *fence);
bool slow_progress(tb__device *device);

#endif
