/* Waking a loop that sleeps, by functions that the driver calls when a stream gets to them. */
#include "device/cuda/cuda.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <pthread.h>
#include <sys/timerfd.h>

/* Functions may be called when the device is closed, or never, so they know the waker by its number. */
static struct {
    pthread_mutex_t lock; /* never held during a call of the driver */
    uint64_t last_id;
    LIST_HEAD(waker_list, tb__waker) open;
} wakers = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* In a forked child that can't use the driver, the lock may be another thread's of the parent. */
tb_status tb__waker_open(tb__waker *w) {
    w->fd = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (w->fd < 0)
        return tb__fail(TB_IO, "a timer for a device: %s", tb__errno_text(errno));
    if (tb__cuda_is_inherited())
        return TB_OK;
    pthread_mutex_lock(&wakers.lock);
    w->id = ++wakers.last_id;
    LIST_INSERT_HEAD(&wakers.open, w, link);
    pthread_mutex_unlock(&wakers.lock);
    return TB_OK;
}

void tb__waker_close(tb__waker *w) {
    if (w->id && !tb__cuda_is_inherited()) {
        pthread_mutex_lock(&wakers.lock);
        LIST_REMOVE(w, link);
        pthread_mutex_unlock(&wakers.lock);
    }
    tb__fd_close(w->fd);
}

void tb__waker_set_timer(const tb__waker *w, int64_t ns) {
    struct itimerspec when = {.it_value = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}};
    timerfd_settime(w->fd, 0, &when, NULL);
}

void tb__waker_wake(tb__waker *w) {
    atomic_store(&w->was_woken, true);
    tb__waker_set_timer(w, 1);
}

/* On a thread of the driver, which allows no call of its own. */
static void CUDA_CB wake_loop(void *id) {
    pthread_mutex_lock(&wakers.lock);
    for (tb__waker *w = LIST_FIRST(&wakers.open); w; w = LIST_NEXT(w, link)) {
        if (w->id == (uintptr_t)id) {
            tb__waker_wake(w);
            atomic_fetch_sub(&w->npending, 1);
        }
    }
    pthread_mutex_unlock(&wakers.lock);
}

CUresult tb__waker_call(tb__waker *w, CUstream stream) {
    atomic_fetch_add(&w->npending, 1);
    CUresult result = tb__cuda.cuLaunchHostFunc(stream, wake_loop, (void *)w->id);
    if (result != CUDA_SUCCESS)
        atomic_fetch_sub(&w->npending, 1);
    return result;
}
