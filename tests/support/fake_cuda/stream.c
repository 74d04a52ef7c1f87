/* Streams of the fake driver: queues of work, which one thread does. It takes any stream whose first item may go on. */
#include "inside.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum work_kind { KERNEL, COPY, RECORD, WAIT_EVENT, WAIT_VALUE, WRITE_VALUE, CALL } work_kind;

typedef struct work {
    work_kind kind;
    CUfunction function; /* of a kernel */
    unsigned grid;
    tb__cuda_args args;
    uint64_t to, from, nbytes;
    void *bytes; /* of a copy from memory that is not pinned */
    unsigned value;
    CUevent event;
    uint64_t times; /* that the event was recorded */
    CUhostFn call;
    void *argument;
    int64_t due_us; /* 0: it has not been looked at */
    bool is_held;
    TAILQ_ENTRY(work) link;
} work;

struct CUstream_st {
    object_kind kind;
    CUcontext context;
    TAILQ_HEAD(work_list, work) queue;
    bool is_blocking; /* it waits for the default stream, and the other way round */
    bool is_busy;
    CUstreamCaptureStatus capture;
    LIST_ENTRY(CUstream_st) link;
};

struct CUevent_st {
    object_kind kind;
    fake_gpu *gpu;
    uint64_t nrecorded, ndone;
    int64_t done_us; /* when it was done last */
};

struct CUfunc_st {
    object_kind kind;
    char name[64];
};

static LIST_HEAD(stream_list, CUstream_st) streams;
static bool has_thread;
static countdown kernel_fault = {.n = -1}, kernel_hold = {.n = -1};

enum { MOST_USED = 4096 };

/* What the kernel that is being executed has used, and on which GPU. */
static struct {
    bool is_on;
    int gpu;
    size_t nused;
    uint64_t used[MOST_USED];
} executing;

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- Doing it ---------------------------------------------------------------------------------------------------- */

bool is_in_use_by_kernel(uint64_t first, uint64_t last) {
    for (size_t i = 0; executing.is_on && i < executing.nused; i++) {
        if (executing.used[i] >= first && executing.used[i] < last)
            return true;
    }
    return false;
}

static void *translate(uint64_t address) {
    if (!address)
        return NULL;
    lock();
    void *p = reach(address, executing.gpu);
    if (executing.nused < MOST_USED)
        executing.used[executing.nused++] = address;
    unlock();
    return p;
}

static bool is_touching(const work *w) {
    return w->kind == KERNEL || w->kind == COPY;
}

static void touch(const work *w) {
    if (w->kind == COPY)
        memcpy(translate(w->to), w->bytes ? w->bytes : translate(w->from), w->nbytes);
    else if (!launch_kernel(w->function->name, w->grid, &w->args, translate))
        die("there is no kernel %s", w->function->name);
}

static void drop_work(CUstream stream, work *w) {
    TAILQ_REMOVE(&stream->queue, w, link);
    free(w->bytes);
    free(w);
}

void stream_fail(fake_gpu *gpu) {
    for (CUstream s = LIST_FIRST(&streams); s; s = LIST_NEXT(s, link)) {
        if (s->context->gpu != gpu || s->is_busy)
            continue;
        for (work *w = TAILQ_FIRST(&s->queue), *next; w; w = next) {
            next = TAILQ_NEXT(w, link);
            drop_work(s, w);
        }
    }
}

static bool may_go_on(work *w, int64_t now) {
    switch (w->kind) {
    case KERNEL:
    case COPY:
        if (w->due_us == 0) {
            int64_t most = random_below(20) == 0 ? fake.most_us * 10 : fake.most_us;
            w->due_us = now + (int64_t)random_below((uint64_t)most + 1);
        }
        return now >= w->due_us && !w->is_held;
    case WAIT_EVENT:
        return w->event->ndone >= w->times;
    case WAIT_VALUE: {
        uint32_t word = atomic_load((_Atomic uint32_t *)w->to);
        return (int32_t)(word - w->value) >= 0;
    }
    default:
        return true;
    }
}

/* With the lock held, which is free while work is done that takes time. */
static void do_work(CUstream stream, work *w) {
    fake_gpu *gpu = stream->context->gpu;
    stream->is_busy = true;
    if (is_touching(w) && strikes(&kernel_fault)) {
        gpu->error = (CUresult)kernel_fault.result;
    } else if (is_touching(w)) {
        executing.is_on = true;
        executing.nused = 0;
        executing.gpu = gpu->ordinal;
        unlock();
        touch(w);
        lock();
        executing.is_on = false;
    } else if (w->kind == CALL) {
        unlock();
        w->call(w->argument);
        lock();
    } else if (w->kind == RECORD) {
        if (w->event->ndone < w->times)
            w->event->ndone = w->times;
        w->event->done_us = now_us();
    } else if (w->kind == WRITE_VALUE) {
        atomic_store((_Atomic uint32_t *)w->to, w->value);
    }
    stream->is_busy = false;
    drop_work(stream, w);
    if (gpu->error != CUDA_SUCCESS)
        stream_fail(gpu);
    pthread_cond_broadcast(&fake.changed);
}

static void wait_a_moment(void) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 50000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&fake.changed, &fake.lock, &until);
}

static void *do_all_work(void *unused) {
    (void)unused;
    lock();
    for (;;) {
        CUstream chosen = NULL;
        int64_t now = now_us();
        uint64_t nready = 0;
        bool is_any = false;
        for (CUstream s = LIST_FIRST(&streams), next; s; s = next) {
            work *w = TAILQ_FIRST(&s->queue);
            next = LIST_NEXT(s, link);
            if (!w && s->kind == DEAD)
                LIST_REMOVE(s, link);
            is_any |= w != NULL;
            if (w && may_go_on(w, now) && random_below(++nready) == 0) // NOLINT: what is freed is in no queue
                chosen = s;
        }
        if (chosen)
            do_work(chosen, TAILQ_FIRST(&chosen->queue));
        else if (is_any)
            wait_a_moment(); /* words may change */
        else
            pthread_cond_wait(&fake.changed, &fake.lock);
    }
    return NULL;
}

void wait_for_parked_streams(void) {
    for (CUstream s = LIST_FIRST(&streams); s;) {
        work *w = TAILQ_FIRST(&s->queue);
        if (w && w->kind == WAIT_VALUE && !may_go_on(w, 0)) {
            wait_a_moment();
            s = LIST_FIRST(&streams);
        } else {
            s = LIST_NEXT(s, link);
        }
    }
}

void fail_kernel(long n, int result) {
    lock();
    kernel_fault = (countdown){n, result};
    unlock();
}

void hold_kernel(long n) {
    lock();
    kernel_hold = (countdown){n, 0};
    unlock();
}

void let_go(void) {
    lock();
    for (CUstream s = LIST_FIRST(&streams); s; s = LIST_NEXT(s, link)) {
        for (work *w = TAILQ_FIRST(&s->queue); w; w = TAILQ_NEXT(w, link))
            w->is_held = false;
    }
    pthread_cond_broadcast(&fake.changed);
    unlock();
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

/* With the lock held. */
static CUstream make_stream(CUcontext context) {
    CUstream s = make_object(sizeof *s);
    *s = (struct CUstream_st){.kind = STREAM, .context = context};
    TAILQ_INIT(&s->queue);
    LIST_INSERT_HEAD(&streams, s, link);
    return s;
}

static bool is_default(CUstream stream) {
    return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* With the lock held. */
static CUstream resolve(CUstream stream) {
    if (!is_default(stream))
        return check_handle(stream, STREAM, "a stream");
    fake_gpu *gpu = current_gpu();
    if (!gpu->null_stream)
        gpu->null_stream = make_stream(&gpu->primary);
    return gpu->null_stream;
}

void end_captures(void) {
    for (CUstream s = LIST_FIRST(&streams); s; s = LIST_NEXT(s, link)) {
        if (s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE)
            s->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    }
}

/* With the lock held. Whether the handle is that of the default stream, which depends on the blocking streams of the
 * context, and one of these is being captured. */
static bool depends_on_capture(CUstream given) {
    if (given && given != CU_STREAM_LEGACY)
        return false;
    for (CUstream s = LIST_FIRST(&streams); s; s = LIST_NEXT(s, link)) {
        if (s->is_blocking && s->capture != CU_STREAM_CAPTURE_STATUS_NONE && s->context == current_context())
            return true;
    }
    return false;
}

/* With the lock held. What is not recorded in a capture ends it. */
static CUresult check_use(CUstream given) {
    bool is_implicit = depends_on_capture(given);
    if (!is_implicit && resolve(given)->capture == CU_STREAM_CAPTURE_STATUS_NONE)
        return CUDA_SUCCESS;
    end_captures();
    return is_implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* Appends work. */
static CUresult submit(CUstream given, work like) {
    lock();
    CUstream stream = resolve(given);
    CUresult result = stream->context->gpu->error;
    if (result == CUDA_SUCCESS)
        result = check_use(given);
    if (result == CUDA_SUCCESS) {
        work *w = get(sizeof *w);
        *w = like;
        w->is_held = is_touching(w) && strikes(&kernel_hold);
        if (w->kind == RECORD)
            w->times = ++w->event->nrecorded;
        TAILQ_INSERT_TAIL(&stream->queue, w, link);
        pthread_t thread;
        if (!has_thread && pthread_create(&thread, NULL, do_all_work, NULL) != 0)
            die("no thread");
        has_thread = true;
        pthread_cond_broadcast(&fake.changed);
    }
    unlock();
    return result;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    lock();
    *out = make_stream(current_context());
    (*out)->is_blocking = !(flags & CU_STREAM_NON_BLOCKING);
    unlock();
    return CUDA_SUCCESS;
}

/* Its work goes on. */
CUresult cuStreamDestroy(CUstream stream) {
    ENTER(NEEDS_INIT);
    lock();
    ((CUstream)check_handle(stream, STREAM, "a stream"))->kind = DEAD;
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *out) {
    ENTER(NEEDS_INIT);
    if (is_default(stream) && (cuCtxGetCurrent(out) != CUDA_SUCCESS || !*out))
        return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    CUresult result = check_use(stream);
    *out = is_default(stream) ? current_context() : resolve(stream)->context;
    unlock();
    return result;
}

CUresult cuStreamSynchronize(CUstream given) {
    ENTER(NEEDS_CONTEXT);
    lock();
    CUstream stream = resolve(given);
    while (!TAILQ_EMPTY(&stream->queue))
        wait_a_moment();
    CUresult error = stream->context->gpu->error;
    unlock();
    return error;
}

CUresult cuStreamIsCapturing(CUstream given, CUstreamCaptureStatus *out) {
    ENTER(is_default(given) ? NEEDS_CONTEXT : NEEDS_INIT);
    lock();
    CUresult result = resolve(given)->context->gpu->error;
    *out = resolve(given)->capture;
    if (result == CUDA_SUCCESS && depends_on_capture(given))
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    unlock();
    return result;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(NEEDS_CONTEXT);
    (void)mode;
    lock();
    resolve(stream)->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    fake.ncaptures++;
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER(NEEDS_CONTEXT);
    *graph = NULL;
    lock();
    CUstreamCaptureStatus *capture = &resolve(stream)->capture;
    bool is_good = *capture == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    *capture = CU_STREAM_CAPTURE_STATUS_NONE;
    fake.ncaptures--;
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    if (flags != CU_STREAM_WAIT_VALUE_GEQ)
        die("a stream waits for a value in another way than GEQ");
    return submit(stream, (work){.kind = WAIT_VALUE, .to = address, .value = value});
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    return submit(stream, (work){.kind = WRITE_VALUE, .to = address, .value = value});
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    ENTER(NEEDS_CONTEXT);
    return submit(stream, (work){.kind = CALL, .call = function, .argument = argument});
}

/* ---- Events ------------------------------------------------------------------------------------------------------ */

CUresult cuEventCreate(CUevent *out, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    *out = make_object(sizeof **out);
    **out = (struct CUevent_st){.kind = EVENT, .gpu = current_gpu()};
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    ENTER(NEEDS_INIT);
    ((CUevent)check_handle(event, EVENT, "an event"))->kind = DEAD;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    check_handle(event, EVENT, "an event");
    lock();
    bool is_same = resolve(stream)->context->gpu == event->gpu;
    unlock();
    if (!is_same)
        return CUDA_ERROR_INVALID_HANDLE;
    return submit(stream, (work){.kind = RECORD, .event = event});
}

CUresult cuEventQuery(CUevent event) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    check_handle(event, EVENT, "an event");
    lock();
    CUresult error = event->gpu->error;
    bool is_done = event->ndone == event->nrecorded;
    unlock();
    return error != CUDA_SUCCESS ? error : is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Of which only the bench has need. */
CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    ENTER(NEEDS_CONTEXT);
    check_handle(start, EVENT, "an event");
    check_handle(end, EVENT, "an event");
    lock();
    bool is_done = start->ndone == start->nrecorded && end->ndone == end->nrecorded;
    *ms = 1e-3f * (float)(end->done_us - start->done_us);
    unlock();
    return is_done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    check_handle(event, EVENT, "an event");
    return submit(stream, (work){.kind = WAIT_EVENT, .event = event, .times = event->nrecorded});
}

/* ---- Kernels and copies ------------------------------------------------------------------------------------------ */

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER(NEEDS_CONTEXT);
    if (!image)
        die("a module without an image");
    lock();
    wait_for_parked_streams();
    unlock();
    *out = (CUmodule)(uintptr_t)image;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    ENTER(NEEDS_CONTEXT);
    (void)module;
    *out = make_object(sizeof **out);
    (*out)->kind = FUNCTION;
    strncpy((*out)->name, name, sizeof(*out)->name - 1);
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function) {
    ENTER(NEEDS_CONTEXT);
    check_handle(function, FUNCTION, "a kernel");
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_nbytes, CUstream stream, void **params,
                        void **extra) {
    ENTER(NEEDS_CONTEXT);
    check_handle(function, FUNCTION, "a kernel");
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 || block_y != 1 || block_z != 1 ||
        extra)
        return CUDA_ERROR_INVALID_VALUE;
    (void)shared_nbytes;
    work w = {.kind = KERNEL, .function = function, .grid = grid_x};
    memcpy(&w.args, params[0], sizeof w.args);
    return submit(stream, w);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    lock();
    bool is_good = !is_partly_pinned((void *)to, nbytes) && !is_partly_pinned((void *)from, nbytes);
    unlock();
    if (!is_good)
        return CUDA_ERROR_INVALID_VALUE;
    return nbytes ? submit(stream, (work){.kind = COPY, .to = to, .from = from, .nbytes = nbytes}) : CUDA_SUCCESS;
}

/* What is not pinned is read at once. */
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    work w = {.kind = COPY, .to = to, .from = (uint64_t)from, .nbytes = nbytes};
    lock();
    bool is_read_now = !is_pinned(from), is_good = !is_partly_pinned(from, nbytes);
    unlock();
    if (nbytes == 0 || !is_good)
        return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (is_read_now) {
        w.bytes = get(nbytes);
        memcpy(w.bytes, from, nbytes);
    }
    return submit(stream, w);
}

/* Of which only the bench has need. */
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_CONTEXT);
    work w = {.kind = COPY, .to = to, .nbytes = nbytes, .bytes = get(nbytes)};
    memset(w.bytes, value, nbytes);
    return submit(stream, w);
}
