/* A pool of threads. A job is a line, for a batch of copies one of bytes, cut into more pieces than there are threads;
 * each thread, the caller's too, takes the next piece until none is left. The caller waits only for threads that took
 * part, so that one which is slow to wake up holds nobody back. */
#include "exec/workers.h"

#include "base/mem.h"
#include "exec/kernel.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    PIECES_EACH = 16,        /* per thread: they are not equally fast */
    PIECE_BYTES = 128 << 10, /* less than this is not worth a piece */
    COPY_BYTES = 256,        /* what it costs to begin a copy, in bytes */
    SPINS = 500,             /* some microseconds: batches often follow one another */
};

typedef struct job {
    tb__work_fn *fn;
    void *arg;
    int64_t total, piece; /* lengths of the line and of a piece of it */
    uint64_t npieces;
    _Atomic uint64_t next;
} job;

typedef struct line {
    const tb__copy *copies;
    const int64_t *ends; /* of each copy */
    size_t n;
    bool stream;
} line;

static struct {
    pthread_mutex_t turn; /* held for a batch, and to change the threads */
    pthread_mutex_t lock; /* guards job, inside, stopping; never held for long */
    pthread_cond_t work, done;
    job *job;
    int inside; /* threads that are doing the job */
    bool stopping;
    _Atomic uint64_t batch; /* counts them, so that threads can look for a new one without the lock */
    pthread_t threads[TB__WORKERS_MAX];
    int nthreads;
    _Atomic int wanted;
} pool = {
    .turn = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
    .wanted = 1,
};

static inline void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* The first copy that ends beyond `at`. */
static size_t find_copy(const line *l, int64_t at) {
    size_t low = 0, high = l->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (l->ends[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void run_stretch(const line *l, int64_t from, int64_t to) {
    for (size_t i = find_copy(l, from); i < l->n; i++) {
        int64_t start = i ? l->ends[i - 1] : 0, length = l->ends[i] - start;
        if (start >= to)
            return;
        if (length < PIECE_BYTES) { /* whole, to whoever has its start */
            if (start >= from)
                tb__copy_run(&l->copies[i], tb__copy_whole(&l->copies[i]), l->stream);
            continue;
        }
        int64_t a = from > start ? from - start : 0, b = min64(to - start, length);
        tb__copy_run(&l->copies[i], tb__copy_cut(&l->copies[i], a, b, length), l->stream);
    }
}

static void run_copies(void *arg, int64_t from, int64_t to) {
    const line *l = arg;
    run_stretch(l, from, to);
    if (l->stream)
        tb__kernels_get()->fence();
}

static void take_pieces(job *j) {
    for (;;) {
        uint64_t p = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (p >= j->npieces)
            return;
        int64_t from = (int64_t)p * j->piece;
        j->fn(j->arg, from, from + min64(j->piece, j->total - from));
    }
}

static void *work(void *arg) {
    (void)arg;
    fesetenv(FE_DFL_ENV); /* a thread inherits its creator's */
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.stopping && (!pool.job || seen == atomic_load_explicit(&pool.batch, memory_order_relaxed)))
            pthread_cond_wait(&pool.work, &pool.lock);
        if (pool.stopping)
            break;
        seen = atomic_load_explicit(&pool.batch, memory_order_relaxed);
        job *j = pool.job;
        pool.inside++;
        pthread_mutex_unlock(&pool.lock);
        take_pieces(j);
        pthread_mutex_lock(&pool.lock);
        if (--pool.inside == 0)
            pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
        for (int i = 0; i < SPINS && seen == atomic_load_explicit(&pool.batch, memory_order_relaxed); i++)
            pause_briefly();
        pthread_mutex_lock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* The child has no threads but the one that forked, whoever held the locks. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.turn, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.job = NULL;
    pool.inside = 0;
    pool.stopping = false;
    pool.nthreads = 0;
}

/* Before anybody can have a lock: the end of a child takes one, too. */
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* Fewer threads than wanted are no failure: the caller can do it all. */
static void start_threads(void) {
    int wanted = atomic_load(&pool.wanted) - 1;
    if (pool.nthreads >= wanted)
        return;
    /* Signals are the host program's business, in the host program's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.nthreads < wanted && pthread_create(&pool.threads[pool.nthreads], NULL, work, NULL) == 0) {
        pthread_setname_np(pool.threads[pool.nthreads], "tensorbus-copy");
        pool.nthreads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void stop_threads(void) {
    pthread_mutex_lock(&pool.lock);
    pool.stopping = true;
    /* Also for those that spin. */
    atomic_fetch_add_explicit(&pool.batch, 1, memory_order_relaxed);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    while (pool.nthreads > 0)
        pthread_join(pool.threads[--pool.nthreads], NULL);
    pool.stopping = false;
}

void tb__workers_set(int n) {
    n = n < 1 ? 1 : n > TB__WORKERS_MAX ? TB__WORKERS_MAX : n;
    pthread_mutex_lock(&pool.turn);
    atomic_store(&pool.wanted, n);
    if (pool.nthreads > n - 1)
        stop_threads();
    pthread_mutex_unlock(&pool.turn);
}

int tb__workers_count(void) {
    return atomic_load(&pool.wanted);
}

/* Also when the library is unloaded: nothing may run in it any more. */
__attribute__((destructor)) static void at_exit(void) {
    tb__workers_set(1);
}

static void run_alone(const tb__copy *copies, size_t n, bool stream) {
    for (size_t i = 0; i < n; i++)
        tb__copy_run(&copies[i], tb__copy_whole(&copies[i]), stream);
    if (stream)
        tb__kernels_get()->fence();
}

/* In at most `most` pieces, of which there is at least one. */
static void run_together(job *j, int64_t most) {
    /* No piece may be empty: rounded up, fewer may do. */
    j->piece = (j->total - 1) / most + 1;
    j->npieces = (uint64_t)((j->total - 1) / j->piece + 1);
    pthread_mutex_lock(&pool.turn);
    start_threads();
    pthread_mutex_lock(&pool.lock);
    pool.job = j;
    atomic_fetch_add_explicit(&pool.batch, 1, memory_order_relaxed);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);

    take_pieces(j);

    pthread_mutex_lock(&pool.lock);
    pool.job = NULL; /* who has not begun has missed it */
    while (pool.inside > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.turn);
}

/* False if there is no memory for the line. */
static bool run_split(const tb__copy *copies, size_t n, bool stream, int threads) {
    int64_t *ends = tb__malloc(n, sizeof *ends), total = 0;
    if (!ends)
        return false;
    for (size_t i = 0; i < n; i++) {
        total += tb__copy_traffic(&copies[i]) + COPY_BYTES;
        ends[i] = total;
    }
    line l = {.copies = copies, .ends = ends, .n = n, .stream = stream};
    job j = {.fn = run_copies, .arg = &l, .total = total};
    run_together(&j, min64((int64_t)threads * PIECES_EACH, total / PIECE_BYTES + 1));
    free(ends);
    return true;
}

tb_status tb__workers_run(const tb__copy *copies, size_t n) {
    int64_t written = 0, traffic = 0;
    for (size_t i = 0; i < n; i++) {
        TB_TRY(tb__copy_check(&copies[i]));
        written += tb__copy_written(&copies[i]);
        traffic += tb__copy_traffic(&copies[i]);
    }
    int threads = tb__workers_count();
    bool stream = written >= TB__STREAM_BYTES;
    fenv_t env;
    fegetenv(&env);
    fesetenv(FE_DFL_ENV);
    if (threads == 1 || traffic / 2 < PIECE_BYTES || !run_split(copies, n, stream, threads))
        run_alone(copies, n, stream);
    fesetenv(&env);
    return TB_OK;
}

void tb__workers_for(int64_t n, tb__work_fn *fn, void *arg) {
    if (n <= 0)
        return;
    int threads = tb__workers_count();
    fenv_t env;
    fegetenv(&env);
    fesetenv(FE_DFL_ENV);
    if (threads == 1 || n == 1) {
        fn(arg, 0, n);
    } else {
        job j = {.fn = fn, .arg = arg, .total = n};
        run_together(&j, min64((int64_t)threads * PIECES_EACH, n));
    }
    fesetenv(&env);
}
