/* The limit of file descriptors: see descriptors.h. */
#include "base/descriptors.h"

#include "base/process.h"

#include <stdatomic.h>
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

enum { SHORTAGE_MS = 1000 }; /* how long a recorded shortage counts */

static _Atomic(const char *) shortage;
static _Atomic int shortage_error;
static _Atomic int64_t shortage_end_ms;

void tb__shortage_record(const char *what, int error) {
    atomic_store(&shortage, what);
    atomic_store(&shortage_error, error);
    atomic_store(&shortage_end_ms, tb__now_ms() + SHORTAGE_MS);
}

const char *tb__shortage_text(void) {
    static _Thread_local char text[256];
    if (tb__now_ms() >= atomic_load(&shortage_end_ms))
        return "";
    snprintf(text, sizeof text, "; this process can't %s: %s", atomic_load(&shortage),
             tb__errno_text(atomic_load(&shortage_error)));
    return text;
}

void tb__listener_enable(int epoll, int listener, const void *data, bool listens) {
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
