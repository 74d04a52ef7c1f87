/* Process-wide services: a clock for deadlines, threads that block signals, and protection against fork. A forked child
 * may only destroy the objects that it inherits: it has neither their threads nor their descriptors, and locks and
 * memory are in whatever state other threads had them. */
#ifndef TB_BASE_PROCESS_H
#define TB_BASE_PROCESS_H

#include "base/error.h"

#include <pthread.h>
#include <sys/queue.h>
#include <sys/types.h>
#include <time.h>

/* The process that made an object. */
typedef struct tb__owner {
    unsigned nforks;
    pid_t pid;
} tb__owner;

extern unsigned tb__nforks; /* forks up to this process; changes in a forked child before fork returns */

void tb__owner_init(tb__owner *owner);

/* True in a forked child of the process that made the object. */
static inline bool tb__is_inherited(const tb__owner *of) {
    return of->nforks != tb__nforks;
}

/* TB_REFUSED in a forked child: "this WHAT belongs to process 123; a forked child can't use it: INSTEAD". */
tb_status tb__owner_check(const tb__owner *owner, const char *what, const char *instead);

/* Between these two calls, no thread can fork: fork waits. They are for a few system calls, and don't nest. */
void tb__delay_forks(void);
void tb__allow_forks(void);

/* Opens a descriptor that every forked child closes, as in tb__fd_own(socket(...)). Without this, a copy in a child
 * would keep a connection, a server's lock or its port in use after this process has closed it. No fork can happen
 * between opening and marking it. The value is the descriptor, or -1 with errno. */
#define tb__fd_own(open) (tb__delay_forks(), tb__fd_mark_and_allow_forks(open))
int tb__fd_mark_and_allow_forks(int fd);
/* The same for a descriptor that is already open. */
int tb__fd_mark(int fd);
/* Closes it here; -1 is allowed. A socket is shut down, also for copies in other processes. */
void tb__fd_close(int fd);

/* An owned descriptor that a forked child sees as closed. */
typedef struct tb__owned_fd {
    LIST_ENTRY(tb__owned_fd) link;
    int fd; /* -1 in a forked child, where it is closed */
} tb__owned_fd;

/* The struct must not move until it is closed. */
void tb__owned_fd_init(tb__owned_fd *owned, int fd);
void tb__owned_fd_close(tb__owned_fd *owned);

/* Reads a short file, such as one of /proc, and ends the text with '\0'. False: it can't be opened, see errno. */
bool tb__read_short_file(const char *path, char *out, size_t room);

/* The start time of a process, to detect a reused pid. False: unknown, see errno; ENOENT: no such process. */
bool tb__process_start_time(pid_t pid, uint64_t *out);

tb_status tb__start_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *arg);

/* A condition whose timed waits use CLOCK_MONOTONIC, like the times below. */
void tb__monotonic_cond_init(pthread_cond_t *cond);

static inline int64_t tb__now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The time of day, in seconds since 1970. */
static inline int64_t tb__unix_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec;
}

static inline struct timespec tb__time_of_ms(int64_t ms) {
    return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}

void tb__sleep_ms(int64_t ms); /* restarts after signals */

/* The time left, for poll and epoll_wait: never negative, and rounded so that sleeping it reaches the deadline. */
static inline int tb__ms_until(int64_t deadline_ms) {
    int64_t left = deadline_ms - tb__now_ms();
    return left < 0 ? 0 : left > 1 << 30 ? 1 << 30 : (int)left;
}

#endif
