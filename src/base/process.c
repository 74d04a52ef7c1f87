/* Threads that block signals, and descriptors in forked children. */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

unsigned tb__nforks;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* fork() takes the write lock, which has precedence. */
#define FORK_LOCK_INITIALIZER PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP
static pthread_rwlock_t fork_lock = FORK_LOCK_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static LIST_HEAD(owned_list, tb__owned_fd) all = LIST_HEAD_INITIALIZER(all);

/* One bit for each descriptor that a forked child closes. The system assigns the lowest free number, so numbers stay
 * below this limit while fewer descriptors are open. */
enum { MAX_FDS = 1 << 20, WORD_BITS = 64 };
static _Atomic uint64_t closed_in_child[MAX_FDS / WORD_BITS];
static _Atomic int last_fd = -1; /* the highest that was ever owned */

static void before_fork(void) {
    pthread_mutex_lock(&lock);
    pthread_rwlock_wrlock(&fork_lock);
}

static void after_fork_in_parent(void) {
    pthread_rwlock_unlock(&fork_lock);
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    tb__nforks++;
    for (tb__owned_fd *owned = LIST_FIRST(&all); owned; owned = LIST_NEXT(owned, link))
        owned->fd = -1;
    LIST_INIT(&all);
    for (int at = 0; at <= last_fd; at += WORD_BITS) {
        for (uint64_t word = atomic_exchange(&closed_in_child[at / WORD_BITS], 0); word; word &= word - 1)
            close(at + __builtin_ctzll(word));
    }
    pthread_rwlock_unlock(&fork_lock);
    fork_lock = (pthread_rwlock_t)FORK_LOCK_INITIALIZER; /* threads that wait for it exist in the parent only */
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void tb__owner_init(tb__owner *owner) {
    pthread_once(&once, watch_forks);
    *owner = (tb__owner){.nforks = tb__nforks, .pid = getpid()};
}

tb_status tb__owner_check(const tb__owner *owner, const char *what, const char *instead) {
    if (!tb__is_inherited(owner))
        return TB_OK;
    return tb__fail(TB_REFUSED, "this %s belongs to process %d; a forked child can't use it: %s", what, (int)owner->pid,
                    instead);
}

void tb__delay_forks(void) {
    pthread_once(&once, watch_forks);
    pthread_rwlock_rdlock(&fork_lock);
}

void tb__allow_forks(void) {
    pthread_rwlock_unlock(&fork_lock);
}

int tb__fd_mark(int fd) {
    if (fd < 0 || fd >= MAX_FDS)
        return fd;
    int last = last_fd;
    while (last < fd && !atomic_compare_exchange_weak(&last_fd, &last, fd))
        ;
    atomic_fetch_or(&closed_in_child[fd / WORD_BITS], (uint64_t)1 << fd % WORD_BITS);
    return fd;
}

int tb__fd_mark_and_allow_forks(int fd) {
    int error = errno;
    tb__fd_mark(fd);
    tb__allow_forks();
    errno = error;
    return fd;
}

void tb__fd_close(int fd) {
    if (fd < 0)
        return;
    tb__delay_forks();
    /* Clear the bit first: once the descriptor is closed, another thread may get its number. */
    if (fd < MAX_FDS)
        atomic_fetch_and(&closed_in_child[fd / WORD_BITS], ~((uint64_t)1 << fd % WORD_BITS));
    /* A process that is being spawned may have a copy, which must not keep the connection open. */
    shutdown(fd, SHUT_RDWR);
    close(fd);
    tb__allow_forks();
}

void tb__owned_fd_init(tb__owned_fd *owned, int fd) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    tb__fd_mark(fd);
    owned->fd = fd;
    LIST_INSERT_HEAD(&all, owned, link);
    pthread_mutex_unlock(&lock);
}

void tb__owned_fd_close(tb__owned_fd *owned) {
    pthread_mutex_lock(&lock);
    if (owned->fd >= 0) {
        LIST_REMOVE(owned, link);
        tb__fd_close(owned->fd);
        owned->fd = -1;
    }
    pthread_mutex_unlock(&lock);
}

tb_status tb__start_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *arg) {
    /* The program's signal handlers run on the program's own threads. */
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int error = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return tb__fail(TB_IO, "starting the thread %s: %s", name, strerror(error));
    pthread_setname_np(*thread, name);
    return TB_OK;
}

void tb__monotonic_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

void tb__sleep_ms(int64_t ms) {
    struct timespec left = tb__time_of_ms(ms);
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

bool tb__read_short_file(const char *path, char *out, size_t room) {
    int fd = tb__fd_own(open(path, O_RDONLY | O_CLOEXEC));
    ssize_t n = fd >= 0 ? read(fd, out, room - 1) : 0;
    tb__fd_close(fd);
    out[n > 0 ? n : 0] = '\0';
    return fd >= 0;
}

/* Field 22 of /proc/PID/stat, counted from the end of the process name, which may contain any character. */
bool tb__process_start_time(pid_t pid, uint64_t *out) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (!tb__read_short_file(path, line, sizeof line))
        return false;
    const char *at = strrchr(line, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    *out = at ? strtoull(at, NULL, 10) : 0;
    errno = at ? errno : ENOENT;
    return at;
}
