/* The worker threads of the process. They are started on first use, also after a fork, and sleep when there is no work.
 * A thread that waits for work does pieces of it, too, so that it completes even if no thread could be started. */
#ifndef TB_DEVICE_HOST_WORKERS_H
#define TB_DEVICE_HOST_WORKERS_H

#include "device/device.h"

#include <sys/queue.h>

enum {
    TB__WORKERS_MAX = 256,
    TB__STREAM_BYTES = 8 << 20, /* work that writes this much bypasses the cache */
    TB__PIECE_BYTES = 128 << 10 /* shorter pieces are not worth a thread */
};

/* The number of threads that work at a time, including the one that waits; initially 1. */
void tb__workers_set(int n);
int tb__workers_count(void);

/* Does units from .. to-1 of some work; several threads may call it for one work at a time. It has to fence its
 * streaming stores. It runs in the default floating-point environment, and must not wait for other work. */
typedef void tb__work_fn(void *arg, int64_t from, int64_t to);

/* Units of work 0 .. total-1, which are divided into pieces. */
typedef struct tb__work tb__work;
struct tb__work {
    tb__work_fn *fn;
    void *arg;
    int64_t total; /* at least 1 */
    int64_t piece; /* length of a piece */
    /* Called once, by the thread that has done the last piece; the pool does not use the struct any more. NULL:
     * tb__workers_run waits. */
    void (*done)(tb__work *work);

    /* The pool's. */
    int64_t next; /* where the next piece begins */
    int ninside;  /* pieces under way */
    bool is_over;
    TAILQ_ENTRY(tb__work) link;
};

/* Queues the work. Needs no memory and can't fail. */
void tb__workers_submit(tb__work *work);
/* Does one piece in this thread; false: all pieces have begun. Only until `done` is called. */
bool tb__workers_help(tb__work *work);
/* Begins no more pieces. `done` is called when those under way are done; here, if there are none. */
void tb__workers_cancel(tb__work *work);

/* Does all of it and returns when it is done; work->done must be NULL. */
void tb__workers_run(tb__work *work);

/* The length of pieces for work whose units are bytes. */
int64_t tb__workers_piece(int64_t nbytes);

/* Calls fn(arg, from, to) for parts that make up 0 .. n-1, each once, and returns when all are done. n limits how
 * finely the work is split: it should be 1 for work that is not worth waking a thread for. */
void tb__workers_for(int64_t n, tb__work_fn *fn, void *arg);

#endif
