/* RLIMIT_NOFILE, and loops that run into it. */
#include "base/descriptors.h"

#include "base/process.h"

#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
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

void tb__listen_in(int epoll, int listener, const void *data, bool listens) {
    struct epoll_event event = {.events = listens ? EPOLLIN : 0, .data.ptr = (void *)data};
    epoll_ctl(epoll, EPOLL_CTL_MOD, listener, &event);
}

bool tb__may_warn(int64_t *again_ms) {
    enum { WARN_MS = 10000 };
    if (tb__now_ms() < *again_ms)
        return false;
    *again_ms = tb__now_ms() + WARN_MS;
    return true;
}
