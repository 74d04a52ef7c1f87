/* What the files of the slow device share: slow_device.c (memory, and what tests ask for), slow_device_runs.c (jobs and
 * their runs) and slow_device_streams.c. */
#ifndef TB_TESTS_SLOW_DEVICE_INSIDE_H
#define TB_TESTS_SLOW_DEVICE_INSIDE_H

#include "random_case.h"
#include "slow_device.h"

#include <pthread.h>
#include <sys/queue.h>

typedef struct slow_run slow_run;
TAILQ_HEAD(slow_runs, slow_run);
TAILQ_HEAD(slow_queue, slow_work);
LIST_HEAD(slow_gates, slow_work);

/* What tb__fence.state points to begins with this. */
typedef struct slow_pending {
    bool is_mark; /* a slow_work, else a slow_run */
} slow_pending;

typedef enum slow_work_kind {
    SLOW_WORK, /* a test's */
    SLOW_MARK, /* completes a fence */
    SLOW_WAIT, /* for a run */
    SLOW_GATE,
} slow_work_kind;

struct slow_work {
    slow_pending pending; /* of a mark */
    slow_work_kind kind;
    slow_stream *stream;
    bool may_pass; /* it is not held, or what it waits for has come */
    bool is_done;
    void (*fn)(void *arg);
    void *arg;
    struct slow_device *device; /* whose fence, run or gate it is */
    tb__fence *fence;           /* of a mark; NULL: it is done, or about to be */
    tb_status status;           /* for the fence */
    const slow_run *run;
    int64_t deadline_ms;
    TAILQ_ENTRY(slow_work) link; /* in the stream */
    TAILQ_ENTRY(slow_work) mark_link;
    LIST_ENTRY(slow_work) gate_link;
};

typedef struct slow_device {
    tb__device base;
    int wake; /* an eventfd: a run has ended */
    size_t njobs, nmappings, nallocations;
    struct slow_runs waiting; /* for fences that come first */
    struct slow_runs begun;   /* the thread's */
    struct slow_runs ended;   /* their fences are not told yet */
    struct slow_queue marks;  /* likewise */
    size_t nmarks;            /* whose fences are not done */
    struct slow_gates gates;  /* not freed */
    pthread_t thread;
    bool is_stopping;
} slow_device;

typedef struct allocation {
    size_t offset, nbytes;
    uint64_t epoch;
    int unit;
    bool is_shareable;
    slow_device *device; /* NULL: the program's */
    LIST_ENTRY(allocation) link;
} allocation;

typedef struct pinned {
    void *address;
    size_t nbytes;
    LIST_ENTRY(pinned) link;
} pinned;

/* No address of it is ever seen: the mapping is the device's alone. It is not freed, so that jobs that use it too late
 * are noticed. */
typedef struct slow_mapping {
    tb__mapping base;
    char *pages;
    char *seen; /* of one that can be written: addresses without access, by which moves name it */
    size_t npages_bytes;
    size_t nruns; /* under way, of jobs that use it */
    bool is_unmapped;
    LIST_ENTRY(slow_mapping) link, writable_link;
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
    LIST_HEAD(pins, pinned) pins;
    LIST_HEAD(slow_mappings, slow_mapping) mappings;
    LIST_HEAD(slow_writable, slow_mapping) writable; /* those that can be written, and are mapped */
    rng random;
    int64_t most_us;
    fault calls[SLOW_DEVICE_NCALLS], run, hold;
    uint64_t times_let_go; /* runs that were held before the last time go on */
    size_t nheld;          /* runs that are held, or were, and have not ended */
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

int64_t slow_now_us(void);
/* With the lock held: until then at the latest, or until something changes. */
void slow_wait_until(int64_t us);

/* slow_device_runs.c */
void *slow_do_runs(void *device); /* the device's thread */
tb_status slow_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
void slow_release(tb__device *device, tb__job *job);
tb_status slow_run_job(tb__device *device, tb__job *job, const tb__run *what, tb__fence *fence);
tb_status slow_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out, tb__fence *fence);
void slow_cancel(tb__device *device, tb__fence *fence);
bool slow_progress(tb__device *device);
void slow_complete_fence(tb__fence *fence, tb_status status, const char *why);

/* slow_device_streams.c. All but the slots: with the lock held. */
void slow_streams_reset(void);
void slow_streams_end_run(const slow_run *run); /* streams that wait for it go on */
void slow_cancel_mark(slow_work *mark);
bool slow_complete_marks(slow_device *device);
/* Opens the device's gates whose time has come; returns when the next one's comes, in microseconds. */
int64_t slow_open_late_gates(slow_device *device);
tb_status slow_stream_record(tb__device *device, const void *stream, tb__fence *fence);
tb_status slow_stream_wait(tb__device *device, const void *stream, const tb__fence *fence);
tb_status slow_gate_create(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out);
void slow_gate_open(tb__gate *gate);

#endif
