/* Moves on several devices: one job per device, prepared once and run together.
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_JOBS_H
#define TB_LOOP_JOBS_H

#include "loop/loop.h"

enum { TB__JOBS_MAX = 4 };

typedef struct tb__jobs {
    struct {
        tb__device *device;
        tb__job *job;
    } item[TB__JOBS_MAX];
    size_t count;
} tb__jobs;

/* Chooses the device that does the move. */
tb__device *tb__jobs_choose_device(tb__loop *loop, const tb__move *move);

/* `moves` may be freed after the call; the memory and mappings that they name must stay until the jobs are released. */
tb_status tb__jobs_prepare(tb__loop *loop, const tb__move *moves, size_t nmoves, tb__jobs *out);
void tb__jobs_release(tb__jobs *jobs); /* no run may be under way */

/* A run of all jobs, or a checksum. Set `done` and zero the rest before submitting. */
typedef struct tb__jobs_run tb__jobs_run;
struct tb__jobs_run {
    /* Called once, by the driver, never from inside tb__jobs_submit. */
    void (*done)(tb__jobs_run *run);
    tb_status status; /* when done: the first failure, its message, and the device that failed */
    char why[TB__FENCE_WHY_MAX];
    const tb__device *failed;

    size_t left; /* jobs that are not done */
    struct tb__jobs_item {
        tb__submitted submitted;
        tb__jobs_run *run; /* NULL: there is no such job, or it is done */
    } item[TB__JOBS_MAX];
};

/* The arrays that `what` points to must stay until the run is done. There must be at least one job. */
void tb__jobs_submit(tb__loop *loop, const tb__jobs *jobs, const tb__run *what, tb__jobs_run *run);
/* Rehearses the host's job (tb__run.is_rehearsal). False: there is none, and `done` is not called. */
bool tb__jobs_rehearse(tb__loop *loop, const tb__jobs *jobs, tb__jobs_run *run);
/* Computes a checksum of the bytes, on their device. */
void tb__jobs_submit_sum(tb__loop *loop, const void *bytes, size_t nbytes, tb__jobs_run *run);
static inline uint64_t tb__jobs_sum(const tb__jobs_run *run) {
    return run->item[0].submitted.sum;
}

/* Whether all jobs that are not done have begun on this device. */
bool tb__jobs_are_begun_on(const tb__jobs_run *run, const tb__device *device);

/* `done` is called soon, with TB_CANCELLED or another status. */
void tb__jobs_cancel(tb__loop *loop, tb__jobs_run *run);

#endif
