/* The threads that do copies and other work on tensors, shared by the whole process. They are started when a batch
 * first needs them, sleep when there is none, and are not there after a fork until a batch needs them again. */
#ifndef TB_EXEC_WORKERS_H
#define TB_EXEC_WORKERS_H

#include "exec/copy.h"

enum {
    TB__WORKERS_MAX = 256,
    TB__STREAM_BYTES = 8 << 20, /* a batch that writes this much would push out of the cache what others have there */
};

/* How many threads a batch may use, the caller's among them; 1 at first. Waits for a batch under way. */
void tb__workers_set(int n);
int tb__workers_count(void);

/* Checks all copies, then does them, split evenly among the threads; returns when all are done. On failure nothing was
 * written. May be called from several threads, which then take turns. The floating-point environment is the default
 * one meanwhile. */
tb_status tb__workers_run(const tb__copy *copies, size_t n);

/* Does the part from .. to-1 of some work; of one piece of work several parts at once. What it writes past the cache it
 * fences itself. It may not call for the workers. */
typedef void tb__work_fn(void *arg, int64_t from, int64_t to);

/* Calls fn(arg, from, to) for parts that make up 0 .. n-1, each once, and returns when all are done: on the same
 * threads as copies, with which it takes turns, and in the same floating-point environment. With n the caller says how
 * finely the work may be split: what is not worth waking a thread for should be one. Needs no memory and can't fail. */
void tb__workers_for(int64_t n, tb__work_fn *fn, void *arg);

#endif
