/* Cleaning up after commands that fork processes or make files. */
#ifndef TB_TOOLS_GUARD_H
#define TB_TOOLS_GUARD_H

#include "tools/tools.h"

#include <signal.h>

/* While it exists, signals that would end this process (those it does not ignore) are delayed, so that it can clean up
 * first; fini delivers them. */
typedef struct tool_guard {
    sigset_t before, ending;
    struct sigaction child_action;
    int fd;     /* readable when a signal has come or a child has ended */
    int caught; /* the first signal that came, or 0 */
} tool_guard;

tb_status tool_guard_init(tool_guard *guard);
void tool_guard_fini(tool_guard *guard);
tb_status tool_guard_check(tool_guard *guard); /* TB_CANCELLED once a signal came */
void tool_guard_drop(const tool_guard *guard); /* in a child: undoes the guard */

/* A file in each of the folders below, which is locked while a process uses the folder. */
#define TOOL_FOLDER_LOCK "in_use.lock"

/* A folder under TMPDIR, whose name is short enough for a socket in it. */
tb_status tool_folder_make(char *path, size_t size);
void tool_folder_remove(char *path); /* with its contents; sets the path to "", for which it does nothing */

/* Memory that is shared with processes forked later, zero at first. */
tb_status tool_share(size_t nbytes, void **out);
void tool_unshare(void *ptr, size_t nbytes);

int64_t tool_now_ns(void); /* CLOCK_MONOTONIC */

#endif
