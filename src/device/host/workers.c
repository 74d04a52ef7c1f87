/* A pool of threads and a queue of work. Each thread takes the next piece of the first work in the queue; a work leaves
 * the queue when its last piece has been taken, and is over when its last piece is done. A thread that is slow to wake
 * up delays no other. */
#include "device/host/workers.h"

#include "base/int.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    PIECES_EACH = 16,           /* per thread: they are not equally fast */
    MAX_PIECE_BYTES = 32 << 20, /* the driver of the loop helps, and has other things to do in between */
    SPINS = 500,                /* some microseconds: works often follow one another */
};

static struct {
    pthread_mutex_t changing; /* held to start and stop threads */
    pthread_mutex_t lock;     /* guards the rest; never held for long */
    pthread_cond_t submitted, over;
    TAILQ_HEAD(work_queue, tb__work) queue; /* pieces are left of these */
    bool is_stopping;
    _Atomic uint64_t nsubmitted; /* so that threads can look for more without the lock */
    pthread_t threads[TB__WORKERS_MAX];
    int nthreads;
    _Atomic int wanted;
} pool = {
    .changing = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .submitted = PTHREAD_COND_INITIALIZER,
    .over = PTHREAD_COND_INITIALIZER,
    .queue = TAILQ_HEAD_INITIALIZER(pool.queue),
    .wanted = 1,
};

static inline void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* With the lock held, when no piece is under way or left. Releases the lock to call `done`; the work may be freed then.
 */
static void end_work(tb__work *work) {
    if (!work->done) {
        work->is_over = true;
        pthread_cond_broadcast(&pool.over);
        return;
    }
    pthread_mutex_unlock(&pool.lock);
    work->done(work);
    pthread_mutex_lock(&pool.lock);
}

/* With the lock held; releases it while the piece is done. */
static void run_next_piece(tb__work *work) {
    int64_t from = work->next, to = from + tb__min64(work->piece, work->total - from);
    work->next = to;
    work->ninside++;
    if (to == work->total)
        TAILQ_REMOVE(&pool.queue, work, link);
    pthread_mutex_unlock(&pool.lock);
    work->fn(work->arg, from, to);
    pthread_mutex_lock(&pool.lock);
    if (--work->ninside == 0 && work->next == work->total)
        end_work(work);
}

static void *run_worker(void *arg) {
    (void)arg;
    fesetenv(FE_DFL_ENV); /* a thread inherits its creator's */
    pthread_mutex_lock(&pool.lock);
    while (!pool.is_stopping) {
        tb__work *work = TAILQ_FIRST(&pool.queue);
        if (work) {
            run_next_piece(work);
            continue;
        }
        uint64_t seen = atomic_load_explicit(&pool.nsubmitted, memory_order_relaxed);
        pthread_mutex_unlock(&pool.lock);
        for (int i = 0; i < SPINS && seen == atomic_load_explicit(&pool.nsubmitted, memory_order_relaxed); i++)
            pause_briefly();
        pthread_mutex_lock(&pool.lock);
        if (TAILQ_EMPTY(&pool.queue) && !pool.is_stopping)
            pthread_cond_wait(&pool.submitted, &pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* The child has only the thread that forked; the locks may have been held by others. */
static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.changing, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.submitted, NULL);
    pthread_cond_init(&pool.over, NULL);
    TAILQ_INIT(&pool.queue);
    pool.is_stopping = false;
    pool.nthreads = 0;
}

/* At load time, before any lock can be held: the exit of a child takes one, too. */
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* Fewer threads than wanted are no failure: waiting threads can do all of it. */
static void start_threads(void) {
    pthread_mutex_lock(&pool.changing);
    int wanted = atomic_load(&pool.wanted) - 1;
    if (pool.nthreads < wanted) {
        /* Signals are handled by the program's threads. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (pool.nthreads < wanted && pthread_create(&pool.threads[pool.nthreads], NULL, run_worker, NULL) == 0) {
            pthread_setname_np(pool.threads[pool.nthreads], "tensorbus-copy");
            pool.nthreads++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_mutex_unlock(&pool.changing);
}

static void stop_threads(void) {
    pthread_mutex_lock(&pool.lock);
    pool.is_stopping = true;
    atomic_fetch_add_explicit(&pool.nsubmitted, 1, memory_order_relaxed); /* for those that spin */
    pthread_cond_broadcast(&pool.submitted);
    pthread_mutex_unlock(&pool.lock);
    while (pool.nthreads > 0)
        pthread_join(pool.threads[--pool.nthreads], NULL);
    pthread_mutex_lock(&pool.lock);
    pool.is_stopping = false;
    pthread_mutex_unlock(&pool.lock);
}

void tb__workers_set(int n) {
    n = n < 1 ? 1 : n > TB__WORKERS_MAX ? TB__WORKERS_MAX : n;
    pthread_mutex_lock(&pool.changing);
    atomic_store(&pool.wanted, n);
    if (pool.nthreads > n - 1)
        stop_threads();
    pthread_mutex_unlock(&pool.changing);
}

int tb__workers_count(void) {
    return atomic_load(&pool.wanted);
}

/* Also when the library is unloaded: nothing may run in it any more. */
__attribute__((destructor)) static void at_exit(void) {
    tb__workers_set(1);
}

void tb__workers_submit(tb__work *work) {
    work->next = 0;
    work->ninside = 0;
    work->is_over = false;
    bool is_shared = work->total > work->piece && tb__workers_count() > 1;
    if (is_shared)
        start_threads();
    pthread_mutex_lock(&pool.lock);
    TAILQ_INSERT_TAIL(&pool.queue, work, link);
    if (is_shared) {
        atomic_fetch_add_explicit(&pool.nsubmitted, 1, memory_order_relaxed);
        pthread_cond_broadcast(&pool.submitted);
    }
    pthread_mutex_unlock(&pool.lock);
}

bool tb__workers_help(tb__work *work) {
    fenv_t env;
    fegetenv(&env);
    fesetenv(FE_DFL_ENV);
    pthread_mutex_lock(&pool.lock);
    bool has_piece = work->next < work->total;
    if (has_piece)
        run_next_piece(work);
    pthread_mutex_unlock(&pool.lock);
    fesetenv(&env);
    return has_piece;
}

void tb__workers_cancel(tb__work *work) {
    pthread_mutex_lock(&pool.lock);
    if (work->next < work->total) {
        TAILQ_REMOVE(&pool.queue, work, link);
        work->next = work->total;
        if (work->ninside == 0)
            end_work(work);
    }
    pthread_mutex_unlock(&pool.lock);
}

static void run_alone(tb__work *work) {
    fenv_t env;
    fegetenv(&env);
    fesetenv(FE_DFL_ENV);
    work->fn(work->arg, 0, work->total);
    fesetenv(&env);
}

void tb__workers_run(tb__work *work) {
    if (work->total <= work->piece || tb__workers_count() == 1) {
        run_alone(work);
        return;
    }
    tb__workers_submit(work);
    while (tb__workers_help(work)) {
    }
    pthread_mutex_lock(&pool.lock);
    while (!work->is_over)
        pthread_cond_wait(&pool.over, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

int64_t tb__workers_piece(int64_t nbytes) {
    int count = tb__workers_count();
    if (count == 1) /* nobody to share with */
        return MAX_PIECE_BYTES;
    int64_t piece = nbytes / ((int64_t)count * PIECES_EACH) + 1;
    return piece < TB__PIECE_BYTES ? TB__PIECE_BYTES : tb__min64(piece, MAX_PIECE_BYTES);
}

void tb__workers_for(int64_t n, tb__work_fn *fn, void *arg) {
    if (n <= 0)
        return;
    int64_t npieces = tb__min64((int64_t)tb__workers_count() * PIECES_EACH, n);
    tb__workers_run(&(tb__work){.fn = fn, .arg = arg, .total = n, .piece = (n - 1) / npieces + 1});
}
