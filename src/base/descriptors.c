/* RLIMIT_NOFILE. */
#include "base/descriptors.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

unsigned long long tb__descriptor_limit(void) {
    struct rlimit limit = {0};
    getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
}

void tb__descriptor_limit_raise(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

const char *tb__errno_text(int error) {
    static _Thread_local char text[160];
    if (error == EMFILE)
        snprintf(text, sizeof text,
                 "%s: process %d is out of file descriptors, its RLIMIT_NOFILE is %llu; raise it (ulimit -n)",
                 strerror(error), (int)getpid(), tb__descriptor_limit());
    else
        snprintf(text, sizeof text, "%s%s", strerror(error),
                 error == ENFILE ? ": the machine is out of file descriptors (sysctl fs.file-max)" : "");
    return text;
}
