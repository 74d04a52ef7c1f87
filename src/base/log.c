/* The log: one sink for the process, set by the program. */
#include "base/log.h"
#include "base/text.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic(tb_log_level) threshold = TB_LOG_OFF;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tb_log_fn sink;
static void *sink_arg;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Another thread may have held the lock at the fork. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

void tb_log_set(tb_log_level level, tb_log_fn fn, void *arg) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    sink = fn;
    sink_arg = arg;
    atomic_store(&threshold, fn ? level : TB_LOG_OFF);
    pthread_mutex_unlock(&lock);
}

void tb__log(tb_log_level level, const char *format, ...) {
    if (level > atomic_load_explicit(&threshold, memory_order_relaxed))
        return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    tb__text_tame(line);
    pthread_mutex_lock(&lock);
    if (sink)
        sink(sink_arg, level, line);
    pthread_mutex_unlock(&lock);
}
