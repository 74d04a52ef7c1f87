/* The threads that do copies, shared by the whole process. They are started when a batch first needs them, sleep when
 * there is none, and are not there after a fork until a batch needs them again. */
#ifndef TB_EXEC_WORKERS_H
#define TB_EXEC_WORKERS_H

#include "exec/copy.h"

enum { TB__WORKERS_MAX = 256 };

/* How many threads a batch may use, the caller's among them; 1 at first. Waits for a batch under way. */
void tb__workers_set(int n);
int tb__workers_count(void);

/* Checks all copies, then does them, split evenly among the threads; returns when all are done. On failure nothing was
 * written. May be called from several threads, which then take turns. The floating-point environment is the default
 * one meanwhile. */
tb_status tb__workers_run(const tb__copy *copies, size_t n);

#endif
