/* The CUDA device: memory of NVIDIA GPUs. A loop has one of them for all GPUs. Opening it costs nothing: the driver is
 * loaded, and GPUs are set up, when memory on them is first used.
 *
 * Runs are launched in progress, each on one of a few streams of its GPU, and end with a signal on that stream.
 * Progress polls the signals' words, and queries the driver only occasionally, for errors. After a while without a
 * change it submits, after the work, a function that wakes the loop, and lets the loop sleep. */
#include "device/cuda/cuda.h"

#include "base/mem.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/queue.h>
#include <time.h>

enum {
    SPIN_US = 2000,  /* after a launch, before the loop may sleep */
    QUERY_US = 1000, /* between queries of the driver */
    CHECK_MS = 100,  /* between queries while the loop sleeps, because an error does not wake it */
};

/* The part of a run that is on one GPU. */
typedef struct gpu_part {
    tb__gpu *gpu;
    tb__lane *lane; /* NULL: on a stream of the program */
    tb__cuda_launch *launch;
    tb__signal *signal;
    bool is_over, wakes;
    size_t waiter; /* if it wakes the loop */
} gpu_part;

typedef struct cuda_run cuda_run;

struct cuda_run {
    tb__fence *fence;
    tb__job *job; /* NULL: a checksum, or work on a stream of the program */
    tb__run what;
    uint32_t *parts; /* of `what`: a copy */
    tb__fence **after;
    struct {
        tb__gpu *gpu; /* NULL: it is no checksum */
        const void *address;
        size_t nbytes;
        uint64_t *out;
    } sum;
    bool is_launched, is_cancelled;
    tb_status status; /* of a launch that failed when parts of it were under way */
    char why[TB__FENCE_WHY_MAX];
    int64_t launched_us, asked_us;
    gpu_part *on;
    size_t non, nover;
    struct {
        tb__cuda_relay_list list; /* to be run, from `next` on */
        size_t next;
        bool is_begun, is_in; /* is_in: the first half of it has been run */
        tb__fence *fence;     /* of the half that is being run; NULL: none is */
    } relays;
    TAILQ_ENTRY(cuda_run) link;
};

typedef struct cuda_device {
    tb__device base;
    pthread_mutex_t lock; /* runs, and their fences: streams are recorded and wait in any thread */
    tb__waker waker;
    _Atomic bool is_timer_set;
    _Atomic size_t nruns;
    TAILQ_HEAD(run_list, cuda_run) runs; /* as they came */
    tb__lanes *lanes[TB__MAX_GPUS];      /* NULL: it has used none there */
} cuda_device;

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Submits, after the part's work, a function that wakes the loop. If that fails, the timer wakes it. */
static void wake_after(cuda_device *device, gpu_part *part) {
    if (part->wakes || part->is_over || tb__gpu_push(part->gpu) != TB_OK)
        return;
    part->wakes = tb__lanes_wake_after(&device->lanes[part->gpu->ordinal], part->gpu, part->signal, &device->waker,
                                       &part->waiter) == TB_OK;
    tb__gpu_pop();
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

static cuda_run *find_run(cuda_device *device, const tb__fence *fence) {
    cuda_run *run = TAILQ_FIRST(&device->runs);
    while (run && run->fence != fence)
        run = TAILQ_NEXT(run, link);
    return run;
}

/* Whether all its work is on streams: relays are launched one after the other. */
static bool is_all_launched(const cuda_run *run) {
    return run->is_launched && run->relays.list.count == 0;
}

/* A fence because of which the run can't be launched: it has failed, or it is not done and its run is not on a GPU. */
static const tb__fence *find_obstacle(cuda_device *device, const cuda_run *run) {
    const tb__fence *failed = NULL;
    for (size_t i = 0; i < run->what.nafter; i++) {
        const tb__fence *fence = run->after[i];
        const cuda_run *before = fence->is_done ? NULL : find_run(device, fence);
        if (!fence->is_done && !(before && is_all_launched(before)))
            return fence;
        if (fence->is_done && fence->status != TB_OK && !failed)
            failed = fence;
    }
    return failed;
}

/* Makes the stream wait for the runs of this device's fences. */
static tb_status wait_for_runs(cuda_device *device, const cuda_run *run, CUstream stream) {
    for (size_t i = 0; i < run->what.nafter; i++) {
        const cuda_run *before = run->after[i]->is_done ? NULL : find_run(device, run->after[i]);
        for (size_t k = 0; before && k < before->non; k++) {
            CUresult result = before->on[k].is_over
                                  ? CUDA_SUCCESS
                                  : tb__cuda.cuStreamWaitEvent(stream, before->on[k].signal->event, 0);
            if (result != CUDA_SUCCESS)
                return tb__cuda_fail(result, "cuStreamWaitEvent on %s", before->on[k].gpu->unit);
        }
    }
    return TB_OK;
}

/* The GPU's context is current. The signal follows the submitted work, also after a failure. */
static tb_status submit(cuda_device *device, cuda_run *run, gpu_part *part) {
    TB_TRY(tb__lanes_choose(&device->lanes[part->gpu->ordinal], part->gpu, &part->lane));
    TB_TRY(tb__signal_get(part->gpu, &part->signal));
    CUstream stream = part->lane->stream;
    tb_status status = wait_for_runs(device, run, stream);
    if (status == TB_OK)
        status = run->job ? tb__cuda_launch_job(run->job, (size_t)(part - run->on), &run->what, stream, &part->launch)
                          : tb__cuda_launch_checksum(part->gpu, run->sum.address, run->sum.nbytes, run->sum.out, stream,
                                                     &part->launch);
    tb__saved_detail why = tb__save_detail();
    tb_status sent = tb__signal_send(part->signal, stream);
    run->non++;
    part->lane->nrunning++;
    if (status == TB_OK)
        return sent;
    return tb__fail(status, "%s", why.text);
}

static void note_failure(cuda_run *run, tb_status status) {
    if (run->status != TB_OK)
        return;
    run->status = status;
    snprintf(run->why, sizeof run->why, "%s", tb_error_detail());
}

static void launch(cuda_device *device, cuda_run *run) {
    size_t n = run->job ? tb__cuda_job_ngpus(run->job) : 1;
    run->is_launched = true;
    for (size_t i = 0; i < n && run->status == TB_OK; i++) {
        gpu_part *part = &run->on[i];
        part->gpu = run->job ? tb__cuda_job_gpu(run->job, i) : run->sum.gpu;
        tb_status status = tb__gpu_push(part->gpu);
        if (status == TB_OK) {
            status = submit(device, run, part);
            tb__gpu_pop();
        }
        if (status != TB_OK)
            note_failure(run, status);
    }
    run->launched_us = run->asked_us = now_us();
}

/* ---- Completing -------------------------------------------------------------------------------------------------- */

static void end_part(cuda_device *device, gpu_part *part) {
    if (part->lane)
        part->lane->nrunning--;
    /* A waiter whose signal has not come would delay the next one. */
    if (part->wakes && tb__signal_has_come(part->signal))
        tb__lanes_end_wait(device->lanes[part->gpu->ordinal], part->waiter);
    tb__signal_put(part->signal);
    part->signal = NULL;
}

static void free_run(cuda_run *run) {
    if (run) {
        free(run->parts);
        free(run->after);
        free(run->on);
        free(run->relays.list.item);
        free(run->relays.fence);
    }
    free(run);
}

static void complete(cuda_device *device, cuda_run *run, tb_status status, const char *why) {
    tb__fence *fence = run->fence;
    for (size_t i = 0; i < run->non; i++)
        end_part(device, &run->on[i]);
    TAILQ_REMOVE(&device->runs, run, link);
    fence->status = status;
    snprintf(fence->why, sizeof fence->why, "%s", why);
    fence->state = NULL;
    fence->is_done = true;
    free_run(run);
    atomic_fetch_sub(&device->nruns, 1);
}

/* Called when all its work on GPUs is over. */
static void finish(cuda_device *device, cuda_run *run) {
    for (size_t i = 0; i < run->non; i++) {
        gpu_part *part = &run->on[i];
        tb_status status = tb__gpu_check(part->gpu);
        if (status == TB_OK && run->is_cancelled)
            status = tb__fail(TB_CANCELLED, "it was cancelled");
        if (status != TB_OK || run->status != TB_OK) {
            if (part->launch)
                tb__cuda_launch_discard(part->launch);
        } else if (part->launch) {
            status = tb__cuda_launch_finish(part->launch);
        }
        part->launch = NULL;
        if (status != TB_OK)
            note_failure(run, status);
    }
    for (size_t i = 0; i < run->what.nafter && run->status == TB_OK; i++) {
        run->status = run->after[i]->status;
        snprintf(run->why, sizeof run->why, "%s", run->after[i]->why);
    }
    complete(device, run, run->status, run->why);
}

/* Notes the GPU's failure, if there is one. */
static void ask_driver(const gpu_part *part) {
    if (tb__gpu_push(part->gpu) != TB_OK)
        return;
    tb__signal_ask(part->signal, part->lane ? part->lane->stream : NULL);
    tb__gpu_pop();
}

/* A part is over when its signal has come, or will never come. */
static void look_at_parts(cuda_run *run, int64_t now) {
    bool may_ask = now - run->asked_us >= QUERY_US;
    for (size_t i = 0; i < run->non; i++) {
        gpu_part *part = &run->on[i];
        if (part->is_over)
            continue;
        if (may_ask && !tb__signal_has_come(part->signal))
            ask_driver(part);
        part->is_over = tb__signal_has_come(part->signal) || tb__gpu_check(part->gpu) != TB_OK;
        run->nover += part->is_over;
    }
    if (may_ask)
        run->asked_us = now;
}

static bool are_all_done(const cuda_run *run) {
    for (size_t i = 0; i < run->what.nafter; i++) {
        if (!run->after[i]->is_done)
            return false;
    }
    return true;
}

static bool start_half(cuda_device *device, cuda_run *run);

/* Runs the halves of relays one after the other, when all else is over. True: it is not done with them. */
static bool step_relays(cuda_device *device, cuda_run *run, bool *did) {
    bool is_over = run->relays.next == run->relays.list.count;
    const tb__fence *fence = run->relays.fence;
    if (fence && !fence->is_done)
        return true;
    if (fence && fence->status != TB_OK && run->status == TB_OK) {
        run->status = fence->status;
        snprintf(run->why, sizeof run->why, "%s", fence->why);
    }
    for (size_t i = 0; i < run->what.nafter && run->status == TB_OK; i++) {
        run->status = run->after[i]->status;
        snprintf(run->why, sizeof run->why, "%s", run->after[i]->why);
    }
    if (!is_over && !run->is_cancelled && run->status == TB_OK) {
        if (!run->relays.is_begun && !tb__cuda_begin_relays(run->job))
            return true; /* another run's are under way */
        run->relays.is_begun = *did = true;
        if (start_half(device, run))
            return true;
    }
    if (run->relays.is_begun)
        tb__cuda_end_relays(run->job);
    run->relays.is_begun = false;
    return false;
}

/* Returns whether anything has changed. */
static bool step_run(cuda_device *device, cuda_run *run, int64_t now) {
    if (!run->is_launched) {
        const tb__fence *obstacle = run->is_cancelled ? NULL : find_obstacle(device, run);
        if (obstacle && !obstacle->is_done)
            return false;
        if (run->is_cancelled)
            complete(device, run, TB_CANCELLED, "it was cancelled");
        else if (obstacle)
            complete(device, run, obstacle->status, obstacle->why);
        else
            launch(device, run);
        return true;
    }
    bool is_programs = run->non == 1 && !run->on[0].lane; /* its stream may be blocked for any time */
    if (run->is_cancelled && is_programs) {
        complete(device, run, TB_CANCELLED, "it was cancelled");
        return true;
    }
    bool did = false;
    look_at_parts(run, now);
    if (run->nover < run->non || !are_all_done(run) || step_relays(device, run, &did))
        return did;
    finish(device, run);
    return true;
}

/* Called when nothing has changed: returns whether the loop polls on. After a while it sleeps instead. */
static bool polls_on(cuda_device *device, int64_t now) {
    bool is_any_launched = false;
    for (cuda_run *run = TAILQ_FIRST(&device->runs); run; run = TAILQ_NEXT(run, link)) {
        if (run->is_launched && now - run->launched_us < SPIN_US)
            return true;
        is_any_launched |= run->is_launched;
    }
    if (!is_any_launched)
        return false;
    for (cuda_run *run = TAILQ_FIRST(&device->runs); run; run = TAILQ_NEXT(run, link)) {
        for (size_t i = 0; i < run->non; i++)
            wake_after(device, &run->on[i]);
    }
    tb__waker_set_timer(&device->waker, (int64_t)CHECK_MS * 1000000);
    device->is_timer_set = true;
    return atomic_load(&device->waker.was_woken); /* it was woken before the timer was set, which cleared that */
}

static bool cuda_progress(tb__device *base) {
    cuda_device *device = (cuda_device *)base;
    if (atomic_load(&device->nruns) == 0 && !device->is_timer_set)
        return false;
    pthread_mutex_lock(&device->lock);
    bool did = false;
    int64_t now = now_us();
    atomic_store(&device->waker.was_woken, false);
    if (device->is_timer_set) {
        /* Functions that have not been called yet may still make the descriptor readable. */
        device->is_timer_set = atomic_load(&device->waker.npending) > 0;
        tb__waker_set_timer(&device->waker, 0);
    }
    for (cuda_run *run = TAILQ_FIRST(&device->runs), *next; run; run = next) {
        next = TAILQ_NEXT(run, link);
        did |= step_run(device, run, now);
    }
    did = did || polls_on(device, now);
    pthread_mutex_unlock(&device->lock);
    return did;
}

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

static tb_status fill_run(cuda_run *run, const tb__run *what, size_t ngpus) {
    run->what = *what;
    run->on = tb__calloc(ngpus, sizeof *run->on);
    if (!run->on)
        return TB_NO_MEMORY;
    run->parts = tb__memdup(what->parts, what->parts ? what->nparts : 0, sizeof *what->parts);
    run->after = tb__memdup(what->after, what->nafter, sizeof *what->after);
    if (!run->parts || !run->after)
        return TB_NO_MEMORY;
    run->what.parts = what->parts ? run->parts : NULL;
    run->what.after = run->after;
    return TB_OK;
}

static tb_status create_run(tb__fence *fence, const tb__run *what, size_t ngpus, cuda_run **out) {
    cuda_run *run = tb__calloc(1, sizeof *run);
    if (!run)
        return TB_NO_MEMORY;
    tb_status status = fill_run(run, what, ngpus);
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    run->fence = fence;
    *out = run;
    return TB_OK;
}

/* With the lock held. */
static void insert_run(cuda_device *device, cuda_run *run) {
    run->fence->state = run;
    TAILQ_INSERT_TAIL(&device->runs, run, link);
    atomic_fetch_add(&device->nruns, 1);
}

/* `wakes`: the loop may be asleep. */
static void add_run(cuda_device *device, cuda_run *run, bool wakes) {
    pthread_mutex_lock(&device->lock);
    if (wakes) {
        device->is_timer_set = true;
        tb__waker_wake(&device->waker);
    }
    insert_run(device, run);
    pthread_mutex_unlock(&device->lock);
}

/* The next half of a relay, as a run of its own. False: there is none, or it has failed. */
static bool start_half(cuda_device *device, cuda_run *run) {
    tb__run what = {.src_buffer = run->what.src_buffer, .dst_buffer = run->what.dst_buffer};
    cuda_run *half;
    if (!run->relays.fence)
        run->relays.fence = tb__calloc(1, sizeof *run->relays.fence);
    tb__fence *fence = run->relays.fence;
    tb__job *job = tb__cuda_relay_job(run->job, run->relays.list.item[run->relays.next], !run->relays.is_in);
    tb_status status = fence ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK) {
        *fence = (tb__fence){0};
        status = create_run(fence, &what, tb__cuda_job_ngpus(job), &half);
    }
    if (status != TB_OK) {
        note_failure(run, status);
        return false;
    }
    half->job = job;
    insert_run(device, half);
    run->relays.next += run->relays.is_in;
    run->relays.is_in = !run->relays.is_in;
    return true;
}

static tb_status cuda_run_job(tb__device *base, tb__job *job, const tb__run *what, tb__fence *fence) {
    cuda_device *device = (cuda_device *)base;
    cuda_run *run;
    pthread_mutex_lock(&device->lock); /* another thread may launch a run of the job */
    tb_status status = tb__cuda_check_parts(job, what);
    pthread_mutex_unlock(&device->lock);
    TB_TRY(status);
    TB_TRY(create_run(fence, what, tb__cuda_job_ngpus(job), &run));
    run->job = job;
    status = tb__cuda_choose_relays(job, what, &run->relays.list);
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    add_run(device, run, false);
    return TB_OK;
}

static tb_status cuda_checksum(tb__device *device, const void *address, size_t nbytes, uint64_t *out,
                               tb__fence *fence) {
    tb__memory memory;
    tb__gpu *gpu;
    cuda_run *run;
    if (!tb__cuda_find(device, address, nbytes, &memory))
        return tb__fail(TB_INVALID, "%zu bytes at %p are not in memory of a GPU", nbytes, address);
    TB_TRY(tb__gpu_get(memory.index, &gpu));
    TB_TRY(create_run(fence, &(tb__run){0}, 1, &run));
    run->sum.gpu = gpu;
    run->sum.address = address;
    run->sum.nbytes = nbytes;
    run->sum.out = out;
    add_run((cuda_device *)device, run, false);
    return TB_OK;
}

/* Work on a GPU can't be stopped. */
static void cuda_cancel(tb__device *base, tb__fence *fence) {
    cuda_device *device = (cuda_device *)base;
    pthread_mutex_lock(&device->lock);
    cuda_run *run = fence->is_done ? NULL : find_run(device, fence);
    if (run)
        run->is_cancelled = true;
    pthread_mutex_unlock(&device->lock);
}

/* ---- Streams of the program -------------------------------------------------------------------------------------- */

/* The stream's context is current. */
static tb_status record(cuda_run *run, tb__gpu *gpu, CUstream stream) {
    gpu_part *part = &run->on[0];
    part->gpu = gpu;
    TB_TRY(tb__signal_get(gpu, &part->signal));
    tb_status status = tb__signal_send(part->signal, stream);
    if (status != TB_OK) {
        tb__signal_put(part->signal);
        return status;
    }
    run->non = 1;
    run->is_launched = true;
    run->launched_us = run->asked_us = now_us();
    return TB_OK;
}

static tb_status cuda_stream_record(tb__device *device, const void *stream, tb__fence *fence) {
    cuda_run *run;
    CUstream handle;
    tb__gpu *gpu;
    TB_TRY(create_run(fence, &(tb__run){0}, 1, &run));
    tb_status status = tb__stream_push(stream, &handle, &gpu);
    if (status == TB_OK) {
        status = record(run, gpu, handle);
        tb__gpu_pop();
    }
    if (status != TB_OK) {
        free_run(run);
        return status;
    }
    add_run((cuda_device *)device, run, true);
    return TB_OK;
}

/* Needs the lock. Holds the signals that the stream has to wait for. */
static size_t hold_signals(const cuda_run *run, tb__signal **out) {
    size_t n = 0;
    for (size_t i = 0; i < run->non; i++) {
        if (run->on[i].is_over)
            continue;
        tb__signal_hold(run->on[i].signal);
        out[n++] = run->on[i].signal;
    }
    return n;
}

/* A run that has not been launched yet is launched here, unless it waits for others. The lock is free, and the run may
 * end, while the stream is made to wait: if the stream is full, that may last until a gate is opened, by a thread that
 * may need the lock first. */
static tb_status cuda_stream_wait(tb__device *base, const void *stream, const tb__fence *fence) {
    cuda_device *device = (cuda_device *)base;
    CUstream handle;
    tb__gpu *gpu;
    tb__signal *signals[TB__MAX_GPUS];
    size_t n = 0;
    TB_TRY(tb__stream_push(stream, &handle, &gpu));
    tb_status status = TB_OK;
    pthread_mutex_lock(&device->lock);
    cuda_run *run = find_run(device, fence);
    if (run && !run->is_launched && !run->is_cancelled && !find_obstacle(device, run))
        launch(device, run);
    if (run && is_all_launched(run))
        n = hold_signals(run, signals);
    else if (run)
        status = tb__fail(TB_REFUSED, "a stream on %s can't wait for work that has not begun", gpu->unit);
    pthread_mutex_unlock(&device->lock);
    for (size_t i = 0; i < n; i++) {
        CUresult result = status == TB_OK ? tb__cuda.cuStreamWaitEvent(handle, signals[i]->event, 0) : CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            status = tb__cuda_fail(result, "cuStreamWaitEvent on %s", gpu->unit);
        tb__signal_put(signals[i]);
    }
    tb__gpu_pop();
    return status;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static tb_status cuda_open(tb__device **out) {
    cuda_device *device = tb__calloc(1, sizeof *device);
    if (!device)
        return TB_NO_MEMORY;
    device->base.ops = &tb__cuda_device_ops;
    TAILQ_INIT(&device->runs);
    tb_status status = tb__waker_open(&device->waker);
    if (status != TB_OK) {
        free(device);
        return status;
    }
    pthread_mutex_init(&device->lock, NULL);
    *out = &device->base;
    return TB_OK;
}

static void cuda_close(tb__device *base) {
    cuda_device *device = (cuda_device *)base;
    for (int i = 0; i < TB__MAX_GPUS; i++)
        tb__lanes_destroy(device->lanes[i], tb__gpu_if_used(i));
    tb__waker_close(&device->waker);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static int cuda_fd(tb__device *device) {
    return ((cuda_device *)device)->waker.fd;
}

static const char *cuda_unit_name(tb__device *device, int index) {
    (void)device;
    return tb__gpu_unit_name(index);
}

static tb_status cuda_enter(tb__device *device, int index) {
    tb__gpu *gpu;
    (void)device;
    TB_TRY(tb__gpu_get(index, &gpu));
    return tb__gpu_push(gpu);
}

static void cuda_leave(tb__device *device) {
    (void)device;
    tb__gpu_pop();
}

static void *cuda_driver_function(tb__device *device, const char *name) {
    (void)device;
    return tb__cuda_find_exported(name);
}

static int cuda_current_unit(tb__device *device) {
    (void)device;
    return tb__cuda_load() == TB_OK ? tb__cuda_current_ordinal() : 0;
}

const tb__device_ops tb__cuda_device_ops = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .find = tb__cuda_find,
    .list_ids = tb__cuda_list_ids,
    .check_id = tb__cuda_check_id,
    .alloc = tb__cuda_alloc,
    .free = tb__cuda_free,
    .alloc_on = tb__cuda_alloc_on,
    .free_on = tb__cuda_free_on,
    .pin = tb__cuda_pin_pages,
    .unpin = tb__cuda_unpin_pages,
    .unit_name = cuda_unit_name,
    .transport_kind = TB_MEM_CUDA,
    .alloc_for_transport = tb__cuda_alloc_for_transport,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .driver_function = cuda_driver_function,
    .current_unit = cuda_current_unit,
    .share = tb__cuda_share,
    .map = tb__cuda_map,
    .unmap = tb__cuda_unmap,
    .try_access = tb__cuda_try_access,
    .stream_record = cuda_stream_record,
    .stream_wait = cuda_stream_wait,
    .gate_create = tb__cuda_gate_create,
    .gate_open = tb__cuda_gate_open,
    .prepare = tb__cuda_prepare,
    .release = tb__cuda_release,
    .run = cuda_run_job,
    .checksum = cuda_checksum,
    .cancel = cuda_cancel,
    .progress = cuda_progress,
    .fd = cuda_fd,
};
