/* Threads without signals, descriptors that do not survive a fork. */
#include "base/process.h"

#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static LIST_HEAD(owned_list, tb__owned_fd) all = LIST_HEAD_INITIALIZER(all);

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    for (tb__owned_fd *owned = LIST_FIRST(&all); owned; owned = LIST_NEXT(owned, link)) {
        close(owned->fd);
        owned->fd = -1;
    }
    LIST_INIT(&all);
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void tb__owned_fd_init(tb__owned_fd *owned, int fd) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    owned->fd = fd;
    LIST_INSERT_HEAD(&all, owned, link);
    pthread_mutex_unlock(&lock);
}

void tb__owned_fd_close(tb__owned_fd *owned) {
    pthread_mutex_lock(&lock);
    if (owned->fd >= 0) {
        LIST_REMOVE(owned, link);
        /* A process that is just being spawned may have a copy, which must not keep a connection going. */
        shutdown(owned->fd, SHUT_RDWR);
        close(owned->fd);
        owned->fd = -1;
    }
    pthread_mutex_unlock(&lock);
}

tb_status tb__start_thread(pthread_t *thread, const char *name, void *(*run)(void *), void *arg) {
    /* The host program's handlers run on the host program's threads. */
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
