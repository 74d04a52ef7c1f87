/* See nvshmem_library.h. */
#include "transport/nvshmem/nvshmem_library.h"

#include "base/mem.h"
#include "base/process.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum {
    CLOSE_SECONDS = 3, /* for a call that is under way */
    PART_MS = 2000,    /* for other ranks to close, too */
};

/* A communicator's memory: only the thread looks at the list. */
typedef struct allocated {
    struct allocated *next;
    uint64_t key;
    nvshmem_memory memory;
} allocated;

static struct library {
    pthread_mutex_t lock;   /* also held during calls that do not block */
    pthread_cond_t changed; /* of whatever is below */
    tb__owner process;      /* that has the thread */
    const void *owner;      /* NULL: nobody uses the library */
    const tb_transport_env *env;
    int event;
    bool has_thread, is_up, is_over, is_lost; /* lost: over, too */
    const char *calling;
    nvshmem_job *queue, *done; /* oldest first */
    struct allocated *memories;
    nvshmem_memory parting; /* a word for each rank, which is set when that closes */
    uint64_t parting_value;
    int pe, npes, device;
    char why[256]; /* it is over */
    const nvshmem_functions *call;
    const nvshmem_cuda *cuda;
} library = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- Losing it -------------------------------------------------------------------------------------------------- */

/* A thread in a call that waits for a lost rank keeps exit from ending: NVSHMEM and the driver wait for each other in
 * functions that they have registered with atexit. */
static void leave_thread_behind(int status, void *unused) {
    (void)unused;
    if (tb__is_inherited(&library.process))
        return;
    struct timespec until = tb__time_of_ms(tb__now_ms() + CLOSE_SECONDS * 1000);
    pthread_mutex_lock(&library.lock);
    while (library.calling && !library.is_lost && pthread_cond_timedwait(&library.changed, &library.lock, &until) == 0)
        ;
    bool is_stuck = library.calling;
    pthread_mutex_unlock(&library.lock);
    if (!is_stuck)
        return;
    fflush(NULL);
    _exit(status);
}

/* With the lock held. Functions that are registered later are called earlier: so once when NVSHMEM has been
 * initialised, and again when a thread is known to be stuck, which may be in that. */
static void watch_exit(void) {
    static bool is_registered, is_registered_again;
    if (!is_registered || (library.is_lost && !is_registered_again))
        on_exit(leave_thread_behind, NULL);
    is_registered_again |= library.is_lost;
    is_registered = true;
}

/* With the lock held. */
static void give_up(bool is_lost, const char *why) {
    if (!library.is_over)
        snprintf(library.why, sizeof library.why, "%s", why);
    library.is_over = true;
    library.is_lost |= is_lost;
    if (library.is_lost && library.calling)
        watch_exit();
}

/* ---- The thread ------------------------------------------------------------------------------------------------- */

static void append(nvshmem_job **list, nvshmem_job *job) {
    while (*list)
        list = &(*list)->next;
    job->next = NULL;
    *list = job;
}

__attribute__((format(printf, 2, 3))) static void fail(nvshmem_job *job, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(job->why, sizeof job->why, format, args);
    va_end(args);
    job->status = TB_IO;
}

static bool check_cuda(nvshmem_job *job, const char *function, int result) {
    const char *name = "?";
    if (result == 0)
        return true;
    library.cuda->error_name(result, &name);
    fail(job, "%s: %s", function, name);
    return false;
}

/* Before a call that may block. */
static void begin_call(const char *function) {
    pthread_mutex_lock(&library.lock);
    library.calling = function;
    pthread_mutex_unlock(&library.lock);
}

static bool make_streams(nvshmem_job *job, nvshmem_memory *m, size_t nwords) {
    const nvshmem_cuda *cuda = library.cuda;
    for (size_t i = 0; i < NVSHMEM_STREAMS; i++) {
        if (!check_cuda(job, "cuStreamCreate", cuda->stream_create(&m->streams[i], CUDA_NON_BLOCKING)))
            return false;
    }
    return check_cuda(job, "cuStreamCreate", cuda->stream_create(&m->watch, CUDA_NON_BLOCKING)) &&
           check_cuda(job, "cuEventCreate", cuda->event_create(&m->event, CUDA_NO_TIMING)) &&
           check_cuda(job, "cuMemHostAlloc", cuda->host_alloc((void **)&m->seen, nwords * sizeof *m->seen, 0));
}

static void free_streams(const nvshmem_memory *m) {
    const nvshmem_cuda *cuda = library.cuda;
    cuda->stream_synchronize(m->watch);
    for (size_t i = 0; i < NVSHMEM_STREAMS; i++)
        cuda->stream_destroy(m->streams[i]);
    cuda->stream_destroy(m->watch);
    cuda->event_destroy(m->event);
    cuda->host_free(m->seen);
}

/* The words are zero before any rank is told of a place in this memory. */
static bool make_memory(nvshmem_job *job, size_t nbytes, size_t nwords, nvshmem_memory *m) {
    const nvshmem_cuda *cuda = library.cuda;
    begin_call("nvshmem_malloc");
    m->base = library.call->malloc(nbytes + nwords * sizeof *m->words);
    if (!m->base) {
        fail(job, "nvshmem_malloc: there are no %zu bytes of symmetric memory", nbytes + nwords * sizeof *m->words);
        return false;
    }
    m->words = (uint64_t *)(void *)(m->base + nbytes);
    if (!make_streams(job, m, nwords))
        return false;
    memset(m->seen, 0, nwords * sizeof *m->seen);
    return check_cuda(job, "cuMemcpyAsync",
                      cuda->copy((uintptr_t)m->words, (uintptr_t)m->seen, nwords * sizeof *m->words, m->watch)) &&
           check_cuda(job, "cuStreamSynchronize", cuda->stream_synchronize(m->watch));
}

static void initialise(nvshmem_job *job) {
    nvshmem_attr attr = {.version = (1 << 16) + (int)sizeof attr,
                         .args = {.version = (1 << 16) + (int)sizeof attr.args,
                                  .uid = {.version = (1 << 16) + (int)sizeof attr.args.uid, .pe = -1, .npes = -1}}};
    begin_call("nvshmemx_hostlib_init_attr");
    int result = library.call->set_attr(job->pe, job->npes, &job->uid, &attr);
    if (result == 0)
        result = library.call->init(NVSHMEM_WITH_UID, &attr);
    if (result != 0)
        fail(job, "nvshmemx_hostlib_init_attr: %d", result);
    pthread_mutex_lock(&library.lock);
    watch_exit();
    pthread_mutex_unlock(&library.lock);
    library.pe = job->pe;
    library.npes = job->npes;
    library.device = job->device;
    library.parting_value = 1469598103934665603; /* FNV-1a of what only this set of ranks has */
    for (size_t i = 0; i < sizeof job->uid.bytes; i++)
        library.parting_value = (library.parting_value ^ (unsigned char)job->uid.bytes[i]) * 1099511628211;
    if (job->status == TB_OK)
        make_memory(job, 0, (size_t)job->npes, &library.parting);
}

static void allocate(nvshmem_job *job) {
    allocated *a = tb__calloc(1, sizeof *a);
    if (!a) {
        fail(job, "there was no memory");
        return;
    }
    make_memory(job, job->nbytes, NVSHMEM_SLOTS, &job->memory);
    a->key = job->key;
    a->memory = job->memory;
    a->next = library.memories;
    library.memories = a;
}

static void release(nvshmem_job *job) {
    allocated **at = &library.memories, *a;
    while ((*at)->key != job->key) /* it was allocated, or the library would be lost */
        at = &(*at)->next;
    a = *at;
    *at = a->next;
    begin_call("nvshmem_free");
    library.call->free(a->memory.base);
    free_streams(&a->memory);
    free(a);
}

/* The symmetric memory goes with it. */
static void finalize(void) {
    begin_call("nvshmemx_hostlib_finalize");
    while (library.memories) {
        allocated *a = library.memories;
        library.memories = a->next;
        free_streams(&a->memory);
        free(a);
    }
    free_streams(&library.parting);
    library.call->finalize();
}

static void run_job(nvshmem_job *job) {
    if (job->kind == JOB_UID) {
        begin_call("nvshmemx_get_uniqueid");
        int result = library.call->get_uniqueid(&job->uid);
        if (result != 0)
            fail(job, "nvshmemx_get_uniqueid: %d", result);
    } else if (job->kind == JOB_INIT) {
        initialise(job);
    } else if (job->kind == JOB_ALLOC) {
        allocate(job);
    } else if (job->kind == JOB_FREE) {
        release(job);
    } else {
        finalize();
    }
}

/* With the lock held, before and after. */
static void take_job(nvshmem_job *job) {
    const void *owner = library.owner;
    tb_transport_env env = *library.env;
    library.calling = "the driver";
    pthread_mutex_unlock(&library.lock);
    job->status = env.enter_device(env.arg, TB_MEM_CUDA, job->device);
    if (job->status != TB_OK)
        snprintf(job->why, sizeof job->why, "%s", tb_error_detail());
    bool is_entered = job->status == TB_OK;
    if (is_entered)
        run_job(job);
    pthread_mutex_lock(&library.lock);
    if (library.owner != owner) /* it was closed meanwhile, and env is gone */
        return;
    if (is_entered)
        env.leave_device(env.arg, TB_MEM_CUDA);
    if (job->status == TB_OK && job->kind == JOB_INIT)
        library.is_up = true;
    if (job->status == TB_OK && job->kind == JOB_FINALIZE) {
        library.is_up = false;
        library.is_over = library.is_lost; /* who has left is missed no more */
    }
    if (job->status != TB_OK && job->kind != JOB_UID)
        give_up(true, job->why); /* the others may wait for this rank, or have another view of the memory */
}

static void *run_thread(void *unused) {
    (void)unused;
    pthread_mutex_lock(&library.lock);
    for (;;) {
        nvshmem_job *job = library.queue;
        const void *owner = library.owner;
        if (!job) {
            pthread_cond_wait(&library.changed, &library.lock);
            continue;
        }
        library.queue = job->next;
        if (library.is_lost || (library.is_over && job->kind != JOB_FINALIZE)) {
            job->status = TB_LOST;
            snprintf(job->why, sizeof job->why, "%s", library.why);
        } else {
            take_job(job);
        }
        library.calling = NULL;
        if (library.owner == owner) {
            append(&library.done, job);
            eventfd_write(library.event, 1);
        } else {
            free(job);
        }
        pthread_cond_broadcast(&library.changed);
    }
    return NULL;
}

/* ---- Its users -------------------------------------------------------------------------------------------------- */

/* With the lock held, as all below. */
static tb_status start_thread(void) {
    pthread_t thread;
    if (library.has_thread && tb__is_inherited(&library.process))
        return tb__fail(TB_REFUSED, "NVSHMEM was in use when this process was forked, and can't be used in it");
    if (library.has_thread)
        return TB_OK;
    tb__monotonic_cond_init(&library.changed);
    TB_TRY(tb__start_thread(&thread, "tb-nvshmem", run_thread, NULL));
    pthread_detach(thread);
    tb__owner_init(&library.process);
    library.has_thread = true;
    return TB_OK;
}

static tb_status take(const void *owner, const tb_transport_env *env, int event) {
    if (library.is_over)
        return tb__fail(TB_REFUSED, "NVSHMEM can't be used in this process any more: %s", library.why);
    if (library.owner == owner)
        return TB_OK;
    if (library.owner)
        return tb__fail(TB_REFUSED, "another rank of this process uses NVSHMEM, which has one rank in a process");
    TB_TRY(nvshmem_load(env, &library.call, &library.cuda));
    if (library.call->init_status() != 0)
        return tb__fail(TB_REFUSED, "the program uses NVSHMEM itself, which can be used once in a process");
    TB_TRY(start_thread());
    library.owner = owner;
    library.env = env;
    library.event = event;
    return TB_OK;
}

tb_status nvshmem_library_take(const void *owner, const tb_transport_env *env, int event) {
    pthread_mutex_lock(&library.lock);
    tb_status status = take(owner, env, event);
    pthread_mutex_unlock(&library.lock);
    return status;
}

void nvshmem_library_leave(const void *owner) {
    pthread_mutex_lock(&library.lock);
    if (library.owner == owner)
        library.owner = NULL;
    pthread_mutex_unlock(&library.lock);
}

void nvshmem_library_add(nvshmem_job *job) {
    pthread_mutex_lock(&library.lock);
    append(&library.queue, job);
    pthread_cond_broadcast(&library.changed);
    pthread_mutex_unlock(&library.lock);
}

nvshmem_job *nvshmem_library_done(void) {
    pthread_mutex_lock(&library.lock);
    nvshmem_job *job = library.done;
    if (job)
        library.done = job->next;
    pthread_mutex_unlock(&library.lock);
    return job;
}

const char *nvshmem_library_calling(void) {
    pthread_mutex_lock(&library.lock);
    const char *calling = library.calling;
    pthread_mutex_unlock(&library.lock);
    return calling;
}

bool nvshmem_library_enter(void) {
    pthread_mutex_lock(&library.lock);
    if (library.is_up && !library.is_lost && !library.calling)
        return true;
    pthread_mutex_unlock(&library.lock);
    return false;
}

void nvshmem_library_exit(void) {
    pthread_mutex_unlock(&library.lock);
}

void nvshmem_library_lose(const char *why) {
    pthread_mutex_lock(&library.lock);
    give_up(true, why);
    pthread_mutex_unlock(&library.lock);
}

void nvshmem_library_end(const char *why) {
    pthread_mutex_lock(&library.lock);
    give_up(false, why);
    pthread_mutex_unlock(&library.lock);
}

bool nvshmem_library_is_over(void) {
    pthread_mutex_lock(&library.lock);
    bool is_over = library.is_over;
    pthread_mutex_unlock(&library.lock);
    return is_over;
}

bool nvshmem_library_is_lost(void) {
    pthread_mutex_lock(&library.lock);
    bool is_lost = library.is_lost;
    pthread_mutex_unlock(&library.lock);
    return is_lost;
}

static void free_jobs(nvshmem_job **list) {
    while (*list) {
        nvshmem_job *job = *list;
        *list = job->next;
        free(job);
    }
}

/* ---- Parting ---- */

/* With the lock held, in the GPU's context. Tells all ranks that this one closes, and waits for all others to do so. */
static bool have_all_parted(void) {
    nvshmem_memory *m = &library.parting;
    const nvshmem_cuda *cuda = library.cuda;
    size_t nbytes = (size_t)library.npes * sizeof *m->words;
    int64_t until = tb__now_ms() + PART_MS;
    for (int pe = 0; pe < library.npes; pe++) {
        if (pe != library.pe)
            library.call->set_signal(&m->words[library.pe], library.parting_value, NVSHMEM_SIGNAL_SET, pe,
                                     m->streams[0]);
    }
    library.call->quiet(m->streams[0]);
    for (;;) {
        int nseen = 1, result = cuda->copy((uintptr_t)m->seen, (uintptr_t)m->words, nbytes, m->watch);
        if (result != 0 || cuda->event_record(m->event, m->watch) != 0)
            return false;
        while ((result = cuda->event_query(m->event)) == CUDA_NOT_READY && tb__now_ms() < until + PART_MS)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        for (int pe = 0; result == 0 && pe < library.npes; pe++)
            nseen += pe != library.pe && m->seen[pe] == library.parting_value;
        if (nseen == library.npes || result != 0 || tb__now_ms() >= until)
            return nseen == library.npes;
    }
}

void nvshmem_library_part(const void *owner) {
    nvshmem_job *job = tb__calloc(1, sizeof *job);
    struct timespec until = tb__time_of_ms(tb__now_ms() + CLOSE_SECONDS * 1000);
    pthread_mutex_lock(&library.lock);
    bool may_part = job && library.owner == owner && library.is_up && !library.is_lost;
    while (may_part && (library.calling || library.queue) &&
           pthread_cond_timedwait(&library.changed, &library.lock, &until) == 0)
        ;
    may_part = may_part && library.is_up && !library.calling && !library.queue &&
               library.env->enter_device(library.env->arg, TB_MEM_CUDA, library.device) == TB_OK;
    bool is_agreed = may_part && have_all_parted();
    if (may_part)
        library.env->leave_device(library.env->arg, TB_MEM_CUDA);
    if (is_agreed) {
        *job = (nvshmem_job){.kind = JOB_FINALIZE, .device = library.device};
        append(&library.queue, job);
        pthread_cond_broadcast(&library.changed);
    } else {
        free(job);
    }
    until = tb__time_of_ms(tb__now_ms() + CLOSE_SECONDS * 1000);
    while (is_agreed && library.is_up && pthread_cond_timedwait(&library.changed, &library.lock, &until) == 0)
        ;
    pthread_mutex_unlock(&library.lock);
}

bool nvshmem_library_abandon(const void *owner) {
    pthread_mutex_lock(&library.lock);
    if (library.owner != owner) {
        pthread_mutex_unlock(&library.lock);
        return true;
    }
    bool was_in_use = library.is_up || library.queue || library.calling;
    free_jobs(&library.queue);
    struct timespec until = tb__time_of_ms(tb__now_ms() + CLOSE_SECONDS * 1000);
    while (library.calling && !library.is_lost &&
           pthread_cond_timedwait(&library.changed, &library.lock, &until) != ETIMEDOUT)
        ;
    free_jobs(&library.done);
    bool is_idle = !library.calling;
    if (was_in_use && (library.is_up || !is_idle))
        give_up(true, "the world that used it was left while its ranks were connected");
    library.owner = NULL;
    pthread_mutex_unlock(&library.lock);
    return is_idle;
}
