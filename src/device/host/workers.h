/* The threads that work on tensors, shared by the whole process. They are started when there is work for them, sleep
 * when there is none, and are not there after a fork until there is work again. Whoever waits for work does pieces of
 * it, too, so that it is done even where no thread could be started. */
#ifndef TB_DEVICE_HOST_WORKERS_H
#define TB_DEVICE_HOST_WORKERS_H

#include "device/device.h"

#include <sys/queue.h>

enum {
    TB__WORKERS_MAX = 256,
    TB__STREAM_BYTES = 8 << 20, /* work that writes this much would push out of the cache what others have there */
    TB__PIECE_BYTES = 128 << 10 /* less than this is not worth a thread */
};

/* How many threads work at a time, the one that waits among them; 1 at first. */
void tb__workers_set(int n);
int tb__workers_count(void);

/* Does the part from .. to-1 of some work; of one piece of work several parts at once. What it writes past the cache it
 * fences itself. It runs in the default floating-point environment, and may not wait for work. */
typedef void tb__work_fn(void *arg, int64_t from, int64_t to);

/* Work on a line from 0 to total-1, which is cut into pieces. */
typedef struct tb__work tb__work;
struct tb__work {
    tb__work_fn *fn;
    void *arg;
    int64_t total; /* at least 1 */
    int64_t piece; /* length of a piece */
    /* Called once, by the thread that has done the last piece. The work is the caller's again. NULL: somebody waits. */
    void (*done)(tb__work *work);

    /* The pool's. */
    int64_t next; /* where the next piece begins */
    int ninside;  /* pieces under way */
    bool is_over;
    TAILQ_ENTRY(tb__work) link;
};

/* The pieces are done from now on. Needs no memory and can't fail. */
void tb__workers_submit(tb__work *work);
/* Does one piece of it, in this thread; false: all have been begun. Only while the work is not over. */
bool tb__workers_help(tb__work *work);
/* Begins no more pieces. The work is over when those under way are: `done` is called, here if there are none. */
void tb__workers_drop(tb__work *work);

/* Does all of it, `done` being NULL, and returns when it is over. */
void tb__workers_run(tb__work *work);

/* How long pieces should be of work that moves so many bytes, and is as long as that. */
int64_t tb__workers_piece(int64_t nbytes);

/* Calls fn(arg, from, to) for parts that make up 0 .. n-1, each once, and returns when all are done. With n the caller
 * says how finely the work may be split: what is not worth waking a thread for should be one. */
void tb__workers_for(int64_t n, tb__work_fn *fn, void *arg);

#endif
