/* Times what the library does on a GPU, by standing in for the driver's functions that the CUDA device calls; and does
 * what it is compared with. */
#include "bench/bench_driver.h"

#include "base/process.h"
#include "device/cuda/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { TIMEOUT_MS = 60000, FIRST = 0x5a };

/* Functions that the CUDA device has no use for. */
typedef CUresult elapsed_fn(float *ms, CUevent start, CUevent end);
typedef CUresult fill_fn(CUdeviceptr memory, unsigned char value, size_t nbytes, CUstream stream);

/* One thing that the GPU does, between two events. */
typedef struct interval {
    CUevent start, end;
    double began, ended; /* ms after the reset */
} interval;

static struct {
    pthread_mutex_t lock; /* the library's loop has a thread of its own */
    tb__cuda_api real;
    tb__gpu *gpu;
    elapsed_fn *elapsed;
    fill_fn *fill;
    CUstream stream;
    CUevent base; /* the reset */
    TB_VEC(interval) intervals;
    size_t nused; /* of the intervals; the events of the others can be used again */
    int64_t nlaunches;
    uint32_t *gate; /* in pinned memory: how many submissions the GPU may begin */
    uint32_t ngated;
    bool is_on, is_gated, has_failed;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

static tb_status check(CUresult result, const char *what) {
    return result == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(result, "%s", what);
}

/* The first time, loads what the bench needs of the driver. */
static tb_status get_gpu(void) {
    if (watch.gpu)
        return TB_OK;
    TB_TRY(tb__cuda_load());
    TB_TRY(tb__gpu_get(0, &watch.gpu));
    watch.real = tb__cuda;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *elapsed = library ? dlsym(library, "cuEventElapsedTime_v2") : NULL;
    void *fill = library ? dlsym(library, "cuMemsetD8Async") : NULL;
    if (library && !elapsed)
        elapsed = dlsym(library, "cuEventElapsedTime"); /* before CUDA 12.8 */
    memcpy(&watch.elapsed, &elapsed, sizeof elapsed);
    memcpy(&watch.fill, &fill, sizeof fill);
    if (elapsed && fill)
        return TB_OK;
    watch.gpu = NULL;
    return tb__fail(TB_REFUSED, "the driver has no cuEventElapsedTime or cuMemsetD8Async");
}

static tb_status wait_for(CUevent event) {
    int64_t deadline = tb__now_ms() + TIMEOUT_MS;
    CUresult result;
    while ((result = watch.real.cuEventQuery(event)) == CUDA_ERROR_NOT_READY) {
        if (tb__now_ms() >= deadline)
            return tb__fail(TB_TIMEOUT, "cuda:0 is not done after %d s", TIMEOUT_MS / 1000);
    }
    return check(result, "cuEventQuery");
}

/* ---- The gate ------------------------------------------------------------------------------------------------ */

/* What is timed is submitted behind a gate, together with its events: else the time between these has the CPU's in it,
 * which takes microseconds to submit. The gate is opened once all of it is submitted. */
static CUresult close_gate(CUstream stream) {
    return watch.real.cuStreamWaitValue32(stream, (CUdeviceptr)(uintptr_t)watch.gate, ++watch.ngated,
                                          CU_STREAM_WAIT_VALUE_GEQ);
}

static void open_gate(void) {
    __atomic_store_n(watch.gate, watch.ngated, __ATOMIC_RELEASE);
}

static tb_status make_gate(void) {
    void *memory;
    if (watch.gate)
        return TB_OK;
    TB_TRY(check(watch.real.cuMemHostAlloc(&memory, sizeof *watch.gate, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"));
    watch.gate = memory;
    open_gate();
    return TB_OK;
}

/* ---- What the library does ----------------------------------------------------------------------------------- */

/* Events of the next interval, the first recorded; NULL: not watched, or there are none. The lock is held until
 * `end_interval`, so that intervals end in the order in which they begin. */
static interval *begin_interval(CUstream stream) {
    pthread_mutex_lock(&watch.lock);
    if (!watch.is_on)
        return NULL;
    if (watch.nused == watch.intervals.count) {
        interval next = {0};
        if (watch.real.cuEventCreate(&next.start, CU_EVENT_DEFAULT) != CUDA_SUCCESS ||
            watch.real.cuEventCreate(&next.end, CU_EVENT_DEFAULT) != CUDA_SUCCESS ||
            !tb__vec_push(&watch.intervals, next)) {
            watch.has_failed = true;
            return NULL;
        }
    }
    interval *it = &watch.intervals.item[watch.nused++];
    if (watch.is_gated)
        watch.has_failed |= close_gate(stream) != CUDA_SUCCESS;
    watch.has_failed |= watch.real.cuEventRecord(it->start, stream) != CUDA_SUCCESS;
    return it;
}

static void end_interval(interval *it, CUstream stream) {
    if (it)
        watch.has_failed |= watch.real.cuEventRecord(it->end, stream) != CUDA_SUCCESS;
    open_gate();
    pthread_mutex_unlock(&watch.lock);
}

static CUresult launch_kernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **params,
                              void **extra) {
    interval *it = begin_interval(stream);
    CUresult result = watch.real.cuLaunchKernel(kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
                                                stream, params, extra);
    watch.nlaunches += it != NULL;
    end_interval(it, stream);
    return result;
}

static CUresult copy_async(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    interval *it = begin_interval(stream);
    CUresult result = watch.real.cuMemcpyAsync(dst, src, nbytes, stream);
    end_interval(it, stream);
    return result;
}

static CUresult upload_async(CUdeviceptr dst, const void *src, size_t nbytes, CUstream stream) {
    interval *it = begin_interval(stream);
    CUresult result = watch.real.cuMemcpyHtoDAsync(dst, src, nbytes, stream);
    end_interval(it, stream);
    return result;
}

tb_status bench_driver_watch(void) {
    TB_TRY(get_gpu());
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = make_gate();
    if (status == TB_OK)
        status = check(watch.real.cuEventCreate(&watch.base, CU_EVENT_DEFAULT), "cuEventCreate");
    if (status == TB_OK)
        status = check(watch.real.cuStreamCreate(&watch.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    tb__gpu_pop();
    TB_TRY(status);
    pthread_mutex_lock(&watch.lock);
    tb__cuda.cuLaunchKernel = launch_kernel;
    tb__cuda.cuMemcpyAsync = copy_async;
    tb__cuda.cuMemcpyHtoDAsync = upload_async;
    watch.is_on = true;
    pthread_mutex_unlock(&watch.lock);
    return TB_OK;
}

tb_status bench_driver_reset(void) {
    pthread_mutex_lock(&watch.lock);
    watch.nused = 0;
    watch.nlaunches = 0;
    watch.is_gated = true;
    pthread_mutex_unlock(&watch.lock);
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = check(watch.real.cuEventRecord(watch.base, watch.stream), "cuEventRecord");
    if (status == TB_OK)
        status = wait_for(watch.base);
    tb__gpu_pop();
    return status;
}

static int compare_intervals(const void *left, const void *right) {
    double a = ((const interval *)left)->began, b = ((const interval *)right)->began;
    return (a > b) - (a < b);
}

static tb_status read_interval(interval *it) {
    float began, ended;
    TB_TRY(wait_for(it->end));
    TB_TRY(check(watch.elapsed(&began, watch.base, it->start), "cuEventElapsedTime"));
    TB_TRY(check(watch.elapsed(&ended, watch.base, it->end), "cuEventElapsedTime"));
    it->began = (double)began;
    it->ended = (double)ended;
    return TB_OK;
}

static tb_status add_up(double *seconds) {
    double busy = 0, until = 0;
    for (size_t i = 0; i < watch.nused; i++)
        TB_TRY(read_interval(&watch.intervals.item[i]));
    qsort(watch.intervals.item, watch.nused, sizeof *watch.intervals.item, compare_intervals);
    for (size_t i = 0; i < watch.nused; i++) {
        const interval *it = &watch.intervals.item[i];
        double from = it->began > until ? it->began : until;
        busy += it->ended > from ? it->ended - from : 0;
        until = it->ended > until ? it->ended : until;
    }
    *seconds = 1e-3 * busy;
    return TB_OK;
}

tb_status bench_driver_spent(double *seconds, int64_t *nlaunches) {
    TB_TRY(tb__gpu_push(watch.gpu));
    pthread_mutex_lock(&watch.lock);
    tb_status status = watch.has_failed ? tb__fail(TB_IO, "events could not be made or recorded on cuda:0") : TB_OK;
    if (status == TB_OK)
        status = add_up(seconds);
    *nlaunches = watch.nlaunches;
    watch.is_gated = false;
    pthread_mutex_unlock(&watch.lock);
    tb__gpu_pop();
    return status;
}

/* ---- cuMemcpyAsync ------------------------------------------------------------------------------------------- */

static tb_status fill_now(CUdeviceptr memory, unsigned char value, size_t nbytes, CUstream stream, CUevent event) {
    TB_TRY(check(watch.fill(memory, value, nbytes, stream), "cuMemsetD8Async"));
    TB_TRY(check(watch.real.cuEventRecord(event, stream), "cuEventRecord"));
    return wait_for(event);
}

static tb_status make_events(bench_copy *copy) {
    CUstream stream;
    CUevent start, end;
    TB_TRY(check(watch.real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    TB_TRY(check(watch.real.cuEventCreate(&start, CU_EVENT_DEFAULT), "cuEventCreate"));
    TB_TRY(check(watch.real.cuEventCreate(&end, CU_EVENT_DEFAULT), "cuEventCreate"));
    copy->stream = stream;
    copy->start = start;
    copy->end = end;
    return TB_OK;
}

static tb_status allocate(size_t nbytes, CUdeviceptr *out) {
    CUresult result = watch.real.cuMemAlloc(out, nbytes);
    return result == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(result, "cuMemAlloc of %zu bytes on cuda:0", nbytes);
}

static tb_status make_offer(bench_offer *offer, size_t nbytes) {
    bench_copy copy = {.nbytes = nbytes};
    CUdeviceptr memory;
    CUipcMemHandle handle;
    TB_TRY(make_events(&copy));
    TB_TRY(allocate(nbytes, &memory));
    TB_TRY(fill_now(memory, FIRST, nbytes, copy.stream, copy.end));
    TB_TRY(check(watch.real.cuIpcGetMemHandle(&handle, memory), "cuIpcGetMemHandle"));
    _Static_assert(sizeof handle == sizeof offer->handle, "a handle has 64 bytes");
    memcpy(offer->handle, &handle, sizeof handle);
    return TB_OK;
}

tb_status bench_offer_init(bench_offer *offer, size_t nbytes) {
    TB_TRY(get_gpu());
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = make_offer(offer, nbytes > 0 ? nbytes : 1);
    tb__gpu_pop();
    return status;
}

static tb_status map_offer(const bench_offer *offer, CUdeviceptr *out) {
    CUipcMemHandle handle;
    memcpy(&handle, offer->handle, sizeof handle);
    return check(watch.real.cuIpcOpenMemHandle(out, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle");
}

static tb_status pin(size_t nbytes, int value, CUdeviceptr *out) {
    void *memory;
    TB_TRY(check(watch.real.cuMemHostAlloc(&memory, nbytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc"));
    memset(memory, value, nbytes);
    *out = (CUdeviceptr)(uintptr_t)memory;
    return TB_OK;
}

static tb_status make_copy(bench_copy *copy, bench_copy_kind kind, const bench_offer *offer) {
    CUdeviceptr src, dst;
    TB_TRY(make_gate());
    TB_TRY(make_events(copy));
    if (kind == BENCH_COPY_BETWEEN)
        TB_TRY(map_offer(offer, &src));
    else if (kind == BENCH_COPY_TO_GPU)
        TB_TRY(pin(copy->nbytes, FIRST, &src));
    else
        TB_TRY(allocate(copy->nbytes, &src));
    if (kind == BENCH_COPY_TO_HOST)
        TB_TRY(fill_now(src, FIRST, copy->nbytes, copy->stream, copy->end));
    if (kind == BENCH_COPY_TO_HOST)
        TB_TRY(pin(copy->nbytes, 0, &dst));
    else
        TB_TRY(allocate(copy->nbytes, &dst));
    if (kind != BENCH_COPY_TO_HOST)
        TB_TRY(fill_now(dst, 0, copy->nbytes, copy->stream, copy->end));
    copy->src = src;
    copy->dst = dst;
    return TB_OK;
}

static tb_status submit_copy(const bench_copy *copy, bool is_gated) {
    if (is_gated)
        TB_TRY(check(close_gate(copy->stream), "cuStreamWaitValue32"));
    TB_TRY(check(watch.real.cuEventRecord(copy->start, copy->stream), "cuEventRecord"));
    TB_TRY(check(watch.real.cuMemcpyAsync(copy->dst, copy->src, copy->nbytes, copy->stream), "cuMemcpyAsync"));
    return check(watch.real.cuEventRecord(copy->end, copy->stream), "cuEventRecord");
}

static tb_status run_copy(const bench_copy *copy, double *seconds) {
    float ms;
    pthread_mutex_lock(&watch.lock);
    tb_status status = submit_copy(copy, seconds != NULL);
    open_gate();
    pthread_mutex_unlock(&watch.lock);
    TB_TRY(status);
    TB_TRY(wait_for(copy->end));
    if (!seconds)
        return TB_OK;
    TB_TRY(check(watch.elapsed(&ms, copy->start, copy->end), "cuEventElapsedTime"));
    *seconds = 1e-3 * (double)ms;
    return TB_OK;
}

static tb_status verify_copy(const bench_copy *copy) {
    bench_copy back = *copy;
    CUdeviceptr host;
    TB_TRY(pin(copy->nbytes, 0, &host));
    back.src = copy->dst;
    back.dst = host;
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)host;
    tb_status status = run_copy(copy, NULL);
    if (status == TB_OK)
        status = run_copy(&back, NULL);
    for (size_t i = 0; i < copy->nbytes && status == TB_OK; i++) {
        if (bytes[i] != FIRST)
            status = tb__fail(TB_INTERNAL, "cuMemcpyAsync did not copy byte %zu of %zu", i, copy->nbytes);
    }
    watch.real.cuMemFreeHost((void *)(uintptr_t)host);
    return status;
}

tb_status bench_copy_init(bench_copy *copy, bench_copy_kind kind, const bench_offer *offer, size_t nbytes) {
    *copy = (bench_copy){.nbytes = nbytes > 0 ? nbytes : 1};
    TB_TRY(get_gpu());
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = make_copy(copy, kind, offer);
    if (status == TB_OK)
        status = verify_copy(copy);
    tb__gpu_pop();
    return status;
}

tb_status bench_copy_run(const bench_copy *copy, double *seconds) {
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = run_copy(copy, seconds);
    tb__gpu_pop();
    return status;
}

tb_status bench_fill(void *memory, size_t nbytes, unsigned char value) {
    static bench_copy own;
    TB_TRY(get_gpu());
    TB_TRY(tb__gpu_push(watch.gpu));
    tb_status status = own.stream ? TB_OK : make_events(&own);
    if (status == TB_OK)
        status = fill_now((CUdeviceptr)(uintptr_t)memory, value, nbytes, own.stream, own.end);
    tb__gpu_pop();
    return status;
}
