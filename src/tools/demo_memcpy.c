/* The yardstick: how fast this machine copies memory when it does nothing else. */
#include "tools/demo.h"

#include "base/process.h"

#include <sched.h>
#include <string.h>

enum { LARGEST = 256 << 20, MAX_THREADS = 64, ROUNDS = 4 };

/* One thread's share. Small amounts are copied many times, so that starting threads does not count. */
typedef struct share {
    char *to;
    const char *from;
    size_t nbytes;
    int64_t repeats;
} share;

static void *copy_share(void *arg) {
    const share *s = arg;
    for (int64_t i = 0; i < s->repeats; i++) {
        memcpy(s->to, s->from, s->nbytes);
        __asm__ volatile("" ::: "memory"); /* or all but one copy would be left out */
    }
    return NULL;
}

static int count_cores(void) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return n < MAX_THREADS ? n : MAX_THREADS;
}

static tb_status run_threads(share *shares, int n) {
    pthread_t thread[MAX_THREADS];
    int started = 0;
    tb_status status = TB_OK;
    while (started < n && status == TB_OK) {
        status = tb__start_thread(&thread[started], "tb-memcpy", copy_share, &shares[started]);
        started += status == TB_OK;
    }
    for (int i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    return status;
}

/* The fastest of some rounds; the first one warms the memory. */
static tb_status measure(share *shares, int n, double *rate) {
    int64_t copied = 0;
    double best = 0;
    for (int i = 0; i < n; i++)
        copied += (int64_t)shares[i].nbytes * shares[i].repeats;
    for (int round = 0; round < ROUNDS; round++) {
        int64_t began = tool_now_ns();
        TB_TRY(run_threads(shares, n));
        double seconds = (double)(tool_now_ns() - began) * 1e-9;
        if (round > 0 && (double)copied / seconds > best)
            best = (double)copied / seconds;
    }
    *rate = best;
    return TB_OK;
}

tb_status tool_measure_memcpy(int64_t nbytes, double *rate, int *nthreads) {
    share shares[MAX_THREADS];
    int n = count_cores();
    int64_t size = nbytes < LARGEST ? nbytes : LARGEST;
    size_t each = (size_t)(size / n) + 1, total = each * (size_t)n;
    void *from, *to;
    TB_TRY(tb_alloc(total, &from));
    tb_status status = tb_alloc(total, &to);
    if (status != TB_OK) {
        tb_free(from);
        return status;
    }
    memset(from, 1, total); /* pages that were never written may all be the same one */
    for (int i = 0; i < n; i++)
        shares[i] = (share){.to = (char *)to + each * (size_t)i,
                            .from = (char *)from + each * (size_t)i,
                            .nbytes = each,
                            .repeats = LARGEST / (int64_t)total + 1};
    status = measure(shares, n, rate);
    tb_free(to);
    tb_free(from);
    if (status == TB_OK)
        *nthreads = n;
    return status;
}
