/* The log: one sink for the process, set by the program. Errors and warnings that repeat too often are counted instead
 * of written. */
#include "base/log.h"

#include "base/int.h"
#include "base/log_limit.h"
#include "base/process.h"
#include "base/text.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LAST_ONE "; more of these are counted, for a minute"

static _Atomic(tb_log_level) threshold = TB_LOG_OFF;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tb_log_fn sink;
static void *sink_arg;
static tb__log_limit limit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Another thread may have held the lock at the fork. Lines suppressed before the fork are reported by the parent. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    limit = (tb__log_limit){0};
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* Writes how many lines were suppressed in periods that have ended. Needs the lock. */
static void report_suppressed(int64_t now_ms) {
    char last[sizeof limit.kinds->last], line[sizeof last + 100];
    for (uint64_t n; (n = tb__log_limit_take(&limit, now_ms, last)) > 0;) {
        snprintf(line, sizeof line, "%" PRIu64 " more like this one were left out within a minute: %s", n, last);
        if (sink)
            sink(sink_arg, TB_LOG_WARN, line);
    }
}

void tb_log_set(tb_log_level level, tb_log_fn fn, void *arg) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    report_suppressed(INT64_MAX);
    sink = fn;
    sink_arg = arg;
    atomic_store(&threshold, fn ? level : TB_LOG_OFF);
    pthread_mutex_unlock(&lock);
}

static void write_line(void *arg, tb_log_level level, const char *line) {
    static const char *const names[] = {"off", "error", "warn", "info", "debug"};
    char text[1200];
    int n = snprintf(text, sizeof text, "%s: %.1180s\n", names[level], line);
    ssize_t unused = write((int)(intptr_t)arg, text, (size_t)n);
    (void)unused;
}

void tb_log_set_fd(tb_log_level level, int fd) {
    tb_log_set(level, fd < 0 ? NULL : write_line, (void *)(intptr_t)fd);
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
    int64_t now_ms = tb__now_ms();
    pthread_mutex_lock(&lock);
    report_suppressed(now_ms);
    uint64_t count = level <= TB_LOG_WARN ? tb__log_limit_count(&limit, now_ms, format, line) : 0;
    if (count == TB__LOG_BURST)
        snprintf(line + tb__min_size(strlen(line), sizeof line - sizeof LAST_ONE), sizeof LAST_ONE, LAST_ONE);
    if (sink && count <= TB__LOG_BURST)
        sink(sink_arg, level, line);
    pthread_mutex_unlock(&lock);
}
