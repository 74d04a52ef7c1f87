/* Runs on GPUs: fences, sleep, failures, streams of the program, gates. */
#include "../tests/support/cuda_program.h"

#include "base/checksum.h"
#include "base/int.h"
#include "base/process.h"

#include <poll.h>
#include <unistd.h>

enum { N = 100000 };

/* A device, memory on GPU 0, and a job that copies its first half to the second one. */
typedef struct bed {
    tb__device *device;
    char *memory;
    tb__job *job;
} bed;

static tb_status try_copy(tb__device *device, void *dst, const void *src, size_t nbytes, tb__job **out) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    tb__move move = {.ndim = 1,
                     .len = {(int64_t)nbytes},
                     .dst = dst,
                     .dst_stride = {1},
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = unit,
                     .src_dtype = TB_U8,
                     .wire_dtype = TB_U8,
                     .dst_dtype = TB_U8};
    return device->ops->prepare(device, &move, 1, out);
}

static tb__job *prepare_copy(tb__device *device, void *dst, const void *src, size_t nbytes) {
    tb__job *job;
    assert_ok(try_copy(device, dst, src, nbytes, &job));
    return job;
}

static void fill(bed *b, int value) {
    char *bytes = malloc(2 * N);
    memset(bytes, value, N);
    memset(bytes + N, 0, N);
    write_gpu(0, (CUdeviceptr)b->memory, bytes, 2 * N);
    free(bytes);
}

static void make_bed(bed *b) {
    void *p;
    assert_ok(tb__device_open("cuda", &b->device));
    assert_ok(b->device->ops->alloc(b->device, 0, 2 * N, &p));
    b->memory = p;
    fill(b, 1);
    b->job = prepare_copy(b->device, b->memory + N, b->memory, N);
}

static void free_bed(bed *b) {
    b->device->ops->release(b->device, b->job);
    b->device->ops->free(b->device, b->memory);
    tb__device_close(b->device);
    assert_null(current_context());
}

static bool is_copied(const bed *b, int value) {
    char *bytes = malloc(N);
    read_gpu(0, (CUdeviceptr)b->memory + N, bytes, N);
    bool is_all = true;
    for (int i = 0; i < N; i++)
        is_all &= bytes[i] == value;
    free(bytes);
    return is_all;
}

static void start_after(bed *b, tb__fence *const *after, size_t nafter, tb__fence *fence) {
    *fence = (tb__fence){0};
    assert_ok(b->device->ops->run(b->device, b->job, &(tb__run){.after = after, .nafter = nafter}, fence));
    assert_false(fence->is_done);
}

static void start(bed *b, tb__fence *fence) {
    start_after(b, NULL, 0, fence);
}

/* Asleep in between, as a loop is. *nsteps counts progress; it may be NULL. */
static bool wait_for(const bed *b, const tb__fence *fence, int timeout_ms, int *nsteps) {
    int64_t deadline = tb__now_ms() + timeout_ms;
    while (!fence->is_done && tb__now_ms() < deadline) {
        struct pollfd fd = {.fd = b->device->ops->fd(b->device), .events = POLLIN};
        if (nsteps)
            ++*nsteps;
        if (!b->device->ops->progress(b->device))
            poll(&fd, 1, tb__ms_until(deadline));
    }
    return fence->is_done;
}

static void assert_done(const bed *b, const tb__fence *fence) {
    assert_true(wait_for(b, fence, 30000, NULL));
    if (fence->status != TB_OK)
        fail_msg("%s: %s", tb_status_string(fence->status), fence->why);
}

static bool is_readable(const bed *b) {
    struct pollfd fd = {.fd = b->device->ops->fd(b->device), .events = POLLIN};
    return poll(&fd, 1, 0) == 1;
}

/* ---- Fences ------------------------------------------------------------------------------------------------------ */

static void test_runs(void **state) {
    bed b;
    tb__fence fences[20];
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 20; i++)
        start(&b, &fences[i]);
    for (int i = 0; i < 20; i++)
        assert_done(&b, &fences[i]);
    assert_true(is_copied(&b, 1));
    assert_false(b.device->ops->progress(b.device));
    assert_false(is_readable(&b));
    free_bed(&b);
}

/* What ends too early is not taken for host memory. */
static void test_beyond(void **state) {
    bed b;
    tb__job *none;
    (void)state;
    make_bed(&b);
    assert_fails(try_copy(b.device, b.memory + N, b.memory, N + 1, &none), TB_INVALID,
                 "bytes, but the memory on cuda:0 that it begins in ends after ");
    assert_fails(try_copy(b.device, b.memory, b.memory + 1, 2 * N, &none), TB_INVALID,
                 "bytes, but the memory on cuda:0 that it begins in ends after ");
    free_bed(&b);
}

/* A run that takes long: the loop polls for a moment, then sleeps until it is woken, and is quiet afterwards. On a busy
 * machine some rounds take longer. */
static void test_sleep(void **state) {
    const fake_cuda_control *control = need_fake();
    bed b;
    tb__fence fence;
    int64_t polled_ms = INT64_MAX, woken_ms = INT64_MAX;
    (void)state;
    make_bed(&b);
    for (int round = 0; round < 10; round++) {
        int nsteps = 0;
        control->hold_kernel(0);
        start(&b, &fence);
        int64_t began = tb__now_ms();
        while (b.device->ops->progress(b.device))
            ;
        polled_ms = tb__min64(polled_ms, tb__now_ms() - began);
        assert_false(fence.is_done);
        assert_false(wait_for(&b, &fence, 30, &nsteps));
        assert_in_range(nsteps, 1, 3);
        control->let_go();
        began = tb__now_ms();
        assert_true(wait_for(&b, &fence, 30000, NULL));
        woken_ms = tb__min64(woken_ms, tb__now_ms() - began);
    }
    assert_in_range(polled_ms, 1, 100);
    assert_in_range(woken_ms, 0, 80); /* not by the timer */
    tb__sleep_ms(20);
    for (int i = 0; i < 3; i++)
        b.device->ops->progress(b.device);
    assert_false(is_readable(&b));
    free_bed(&b);
}

/* A function on a stream may be called when the device is closed. */
static void test_late_wake(void **state) {
    const fake_cuda_control *control = need_fake();
    (void)state;
    for (int i = 0; i < 20; i++) {
        bed b;
        tb__fence fence;
        make_bed(&b);
        control->hold_kernel(0);
        start(&b, &fence);
        while (b.device->ops->progress(b.device))
            ;
        control->let_go();
        while (!fence.is_done)
            b.device->ops->progress(b.device);
        free_bed(&b);
    }
}

/* Runs of this device are ordered on the GPU: nobody waits in between. */
static void test_order(void **state) {
    const fake_cuda_control *control = fake_cuda();
    bed b;
    tb__fence first, second, third;
    (void)state;
    make_bed(&b);
    tb__job *back = prepare_copy(b.device, b.memory, b.memory + N, N);
    if (control)
        control->hold_kernel(0);
    start(&b, &first);
    tb__fence *after[] = {&first};
    second = third = (tb__fence){0};
    assert_ok(b.device->ops->run(b.device, back, &(tb__run){.after = after, .nafter = 1}, &second));
    tb__fence *both[] = {&first, &second};
    start_after(&b, both, 2, &third);
    after[0] = both[0] = both[1] = NULL;
    if (control) {
        b.device->ops->progress(b.device);
        assert_int_equal(control->count_calls("cuStreamWaitEvent") > 0, 1);
        tb__sleep_ms(5);
        assert_true(is_copied(&b, 0));
        control->let_go();
    }
    assert_done(&b, &third);
    assert_true(first.is_done && second.is_done);
    assert_true(is_copied(&b, 1));
    b.device->ops->release(b.device, back);
    free_bed(&b);
}

/* A run that is cancelled on the GPU ends when the GPU has ended it; so do those behind it. */
static void test_cancel(void **state) {
    const fake_cuda_control *control = need_fake();
    bed b;
    tb__fence fence, behind, waiting, never = {0}, *after[] = {&fence}, *nothing[] = {&never};
    (void)state;
    make_bed(&b);
    control->hold_kernel(0);
    start(&b, &fence);
    start_after(&b, after, 1, &behind);
    start_after(&b, nothing, 1, &waiting);
    while (b.device->ops->progress(b.device))
        ;
    b.device->ops->cancel(b.device, &fence);
    b.device->ops->cancel(b.device, &waiting);
    assert_true(wait_for(&b, &waiting, 1000, NULL));
    assert_int_equal(waiting.status, TB_CANCELLED);
    assert_false(wait_for(&b, &fence, 30, NULL));
    control->let_go();
    assert_true(wait_for(&b, &fence, 30000, NULL));
    assert_true(wait_for(&b, &behind, 30000, NULL));
    assert_int_equal(fence.status, TB_CANCELLED);
    assert_int_equal(behind.status, TB_CANCELLED);
    assert_string_equal(behind.why, fence.why);
    free_bed(&b);
}

static void test_checksum(void **state) {
    bed b;
    uint64_t sum = 0;
    tb__fence fence = {0};
    char *bytes = malloc(N);
    (void)state;
    make_bed(&b);
    memset(bytes, 1, N);
    assert_ok(b.device->ops->checksum(b.device, b.memory, N, &sum, &fence));
    assert_done(&b, &fence);
    assert_true(sum == tb__checksum(bytes, N));
    fence = (tb__fence){0};
    assert_fails(b.device->ops->checksum(b.device, bytes, N, &sum, &fence), TB_INVALID, "not in memory of a GPU");
    free(bytes);
    free_bed(&b);
}

/* ---- Host memory ------------------------------------------------------------------------------------------------- */

static void run_with_buffer(bed *b, tb__job *job, void *buffer) {
    tb__fence fence = {0};
    assert_ok(b->device->ops->run(b->device, job, &(tb__run){.dst_buffer = buffer}, &fence));
    assert_done(b, &fence);
}

/* Buffers of runs may be freed before the job is released, and other memory be where they were. */
static void test_freed_buffers(void **state) {
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    const size_t nbytes = ((size_t)1 << 30) + ((size_t)100 << 20); /* too large to be kept when it is freed */
    bed b;
    char *before = NULL;
    tb__job *job;
    (void)state;
    make_bed(&b);
    const void *src = b.memory;
    tb__move move = {.ndim = 1,
                     .len = {N},
                     .is_dst_in_buffer = true,
                     .dst_stride = {1},
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = unit,
                     .src_dtype = TB_U8,
                     .wire_dtype = TB_U8,
                     .dst_dtype = TB_U8};
    assert_ok(b.device->ops->prepare(b.device, &move, 1, &job));
    for (int i = 1; i < 4; i++) {
        void *p;
        assert_ok(tb_alloc(i == 3 ? N : nbytes, &p));
        char *bytes = p;
        fill(&b, i);
        memset(bytes, 77, N);
        run_with_buffer(&b, job, bytes);
        for (int k = 0; k < N; k++)
            assert_int_equal(bytes[k], i);
        assert_true(bytes != before);
        before = bytes;
        tb_free(p);
    }
    static char elsewhere[N];
    tb__fence fence = {0};
    assert_ok(b.device->ops->run(b.device, job, &(tb__run){.dst_buffer = elsewhere}, &fence));
    assert_true(wait_for(&b, &fence, 30000, NULL));
    assert_int_equal(fence.status, TB_INVALID);
    b.device->ops->release(b.device, job);
    free_bed(&b);
}

/* A job that uses a part of a tensor in the heap: the program can copy all of the tensor, and what is beside it. */
static void test_tensor_in_heap(void **state) {
    enum { FIRST = 1000, LAST = 9000 };
    static const int64_t unit[1][TB_MAX_DIMS] = {{1}};
    bed b;
    char *heap = malloc(3 * LAST);
    tb__job *jobs[2];
    tb__fence fence;
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 2; i++) {
        const void *src = b.memory;
        tb__move move = {.ndim = 1,
                         .len = {1000},
                         .dst = heap + FIRST + 2000 * i,
                         .dst_stride = {1},
                         .dst_tensor = {(uintptr_t)heap + FIRST, (uintptr_t)heap + LAST},
                         .nsrc = 1,
                         .src = &src,
                         .src_stride = unit,
                         .src_dtype = TB_U8,
                         .wire_dtype = TB_U8,
                         .dst_dtype = TB_U8};
        assert_ok(b.device->ops->prepare(b.device, &move, 1, &jobs[i]));
    }
    memset(heap, 0, 3 * LAST);
    for (int i = 0; i < 2; i++) {
        fence = (tb__fence){0};
        assert_ok(b.device->ops->run(b.device, jobs[i], &(tb__run){0}, &fence));
        assert_done(&b, &fence);
    }
    for (int i = 0; i < 3 * LAST; i++)
        assert_int_equal(heap[i], (i >= FIRST && i < FIRST + 1000) || (i >= FIRST + 2000 && i < FIRST + 3000));
    for (int i = 0; i < 2; i++) {
        write_gpu(0, (CUdeviceptr)b.memory, heap + FIRST, LAST - FIRST);
        read_gpu(0, (CUdeviceptr)b.memory, heap + FIRST, LAST - FIRST);
        read_gpu(0, (CUdeviceptr)b.memory, heap, FIRST);
        read_gpu(0, (CUdeviceptr)b.memory, heap + LAST, LAST);
        b.device->ops->release(b.device, jobs[i]);
    }
    free(heap);
    free_bed(&b);
}

/* Calls that fail at a launch fail its fence, and nothing else. */
static void test_failed_launch(void **state) {
    const fake_cuda_control *control = need_fake();
    bed b;
    tb__fence fence, behind;
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 5; i++) {
        static const char *const calls[] = {"cuStreamCreate", "cuLaunchKernel", "cuCtxPushCurrent",
                                            "cuStreamWriteValue32", "cuEventRecord"};
        static const CUresult results[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                                           CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_FOUND};
        start(&b, &fence);
        tb__fence *after[] = {&fence};
        start_after(&b, after, 1, &behind);
        control->fail_call(calls[i], 0, results[i]);
        if (i == 1)
            control->fail_call("cuMemcpyAsync", 0, results[i]); /* whichever it takes */
        assert_true(wait_for(&b, &behind, 30000, NULL));
        control->mend();
        assert_int_equal(fence.status, i == 0 ? TB_NO_MEMORY : TB_IO);
        assert_non_null(strstr(fence.why, tb__cuda_error_name(results[i])));
        assert_non_null(strstr(fence.why, i == 1 ? "" : "cuda:0"));
        assert_true(i < 2 || strstr(fence.why, calls[i]));
        assert_string_equal(behind.why, fence.why);
        start(&b, &fence);
        assert_done(&b, &fence);
    }
    free_bed(&b);
}

/* ---- Streams of the program -------------------------------------------------------------------------------------- */

/* Work on a stream of the program, which stands still until the word is set. */
typedef struct brake {
    CUstream stream;
    _Atomic uint32_t *word;
} brake;

static void make_brake(brake *k) {
    void *word;
    k->stream = make_stream(0);
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    k->word = word;
    *k->word = 0;
    assert_cuda(tb__cuda.cuStreamWaitValue32(k->stream, (CUdeviceptr)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    set_context(NULL);
}

static void release_brake(brake *k) {
    *k->word = 1;
}

static void sync_stream(CUstream stream) {
    set_context(primary_context(0));
    assert_cuda(DRIVER_CALL("cuStreamSynchronize", (CUstream), stream));
    set_context(NULL);
}

static void free_brake(brake *k) {
    release_brake(k);
    sync_stream(k->stream);
    assert_cuda(tb__cuda.cuStreamDestroy(k->stream));
}

static void test_record(void **state) {
    bed b;
    brake k;
    tb__fence fence = {0}, run;
    (void)state;
    make_bed(&b);
    make_brake(&k);
    assert_ok(b.device->ops->stream_record(b.device, &k.stream, &fence));
    assert_true(is_readable(&b)); /* the loop may be asleep */
    assert_false(wait_for(&b, &fence, 30, NULL));
    /* A run that waits for the program's work. */
    tb__fence *after[] = {&fence};
    start_after(&b, after, 1, &run);
    assert_false(wait_for(&b, &run, 30, NULL));
    assert_true(is_copied(&b, 0));
    release_brake(&k);
    assert_done(&b, &run);
    assert_true(fence.is_done && fence.status == TB_OK && is_copied(&b, 1));
    free_brake(&k);
    /* One that has nothing to wait for. */
    CUstream stream = make_stream(0);
    fence = (tb__fence){0};
    assert_ok(b.device->ops->stream_record(b.device, &stream, &fence));
    assert_false(fence.is_done);
    assert_done(&b, &fence);
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    free_bed(&b);
}

/* A fence of a stream that stands still is given up at once; what it needed is used again later. */
static void test_cancelled_record(void **state) {
    bed b;
    brake k;
    (void)state;
    make_bed(&b);
    make_brake(&k);
    for (int i = 0; i < 100; i++) {
        tb__fence fence = {0};
        assert_ok(b.device->ops->stream_record(b.device, &k.stream, &fence));
        if (i % 10 == 0)
            assert_false(wait_for(&b, &fence, 5, NULL));
        b.device->ops->cancel(b.device, &fence);
        assert_true(wait_for(&b, &fence, 1000, NULL));
        assert_int_equal(fence.status, TB_CANCELLED);
    }
    tb__fence fence;
    start(&b, &fence);
    assert_done(&b, &fence);
    free_brake(&k);
    start(&b, &fence);
    assert_done(&b, &fence);
    free_bed(&b);
}

/* Work of the program after a run. */
static void test_stream_wait(void **state) {
    const fake_cuda_control *control = fake_cuda();
    bed b;
    tb__fence fence, other = {0}, blocked;
    (void)state;
    make_bed(&b);
    CUstream stream = make_stream(0);
    void *p;
    assert_ok(b.device->ops->alloc(b.device, 0, N, &p));
    if (control)
        control->hold_kernel(0);
    start(&b, &fence); /* not launched yet: progress has not been called */
    assert_ok(b.device->ops->stream_wait(b.device, &stream, &fence));
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemcpyAsync((CUdeviceptr)p, (CUdeviceptr)b.memory + N, N, stream));
    set_context(NULL);
    if (control) {
        tb__sleep_ms(5);
        control->let_go();
    }
    sync_stream(stream);
    char *bytes = calloc(1, N);
    read_gpu(0, (CUdeviceptr)p, bytes, N);
    for (int i = 0; i < N; i++)
        assert_int_equal(bytes[i], 1);
    free(bytes);
    assert_done(&b, &fence);
    assert_ok(b.device->ops->stream_wait(b.device, &stream, &fence)); /* nothing to wait for */
    tb__fence *after[] = {&other};
    start_after(&b, after, 1, &blocked);
    assert_fails(b.device->ops->stream_wait(b.device, &stream, &blocked), TB_REFUSED, "has not begun");
    other.is_done = true;
    assert_done(&b, &blocked);
    b.device->ops->free(b.device, p);
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    free_bed(&b);
}

/* The default stream is that of the thread's context. */
static void test_default_stream(void **state) {
    bed b;
    tb__fence fence = {0};
    CUstream defaults[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 3; i++) {
        fence = (tb__fence){0};
        assert_fails(b.device->ops->stream_record(b.device, &defaults[i], &fence), TB_INVALID, "calling thread");
        set_context(primary_context(0));
        assert_ok(b.device->ops->stream_record(b.device, &defaults[i], &fence));
        assert_true(current_context() == primary_context(0));
        set_context(NULL);
        assert_done(&b, &fence);
    }
    free_bed(&b);
}

static void test_other_context(void **state) {
    bed b;
    CUcontext context;
    CUstream stream;
    tb__fence fence = {0};
    (void)state;
    make_bed(&b);
    assert_cuda(DRIVER_CALL("cuCtxCreate_v2", (CUcontext *, unsigned, CUdevice), &context, 0, 0));
    assert_cuda(tb__cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    assert_fails(b.device->ops->stream_record(b.device, &stream, &fence), TB_REFUSED, "primary context of cuda:0");
    assert_true(current_context() == context);
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    assert_cuda(DRIVER_CALL("cuCtxDestroy_v2", (CUcontext), context));
    set_context(NULL);
    free_bed(&b);
}

static CUstream captured; /* NULL: none is */

static void begin_capture(CUstream stream) {
    set_context(primary_context(0));
    assert_cuda(
        DRIVER_CALL("cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode), stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    captured = stream;
}

static CUresult end_capture(void) {
    CUgraph graph;
    CUstream stream = captured;
    captured = NULL;
    return DRIVER_CALL("cuStreamEndCapture", (CUstream, CUgraph *), stream, &graph);
}

/* The library's last call has not ended the capture. */
static void check_captured(const char *step) {
    CUstreamCaptureStatus status;
    assert_cuda(tb__cuda.cuStreamIsCapturing(captured, &status));
    if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        fail_msg("%s has ended the capture", step);
}

#define IN_CAPTURE(step)                                                                                               \
    do {                                                                                                               \
        step;                                                                                                          \
        check_captured(#step);                                                                                         \
    } while (0)

/* Streams that are being captured are refused; captures go on, whatever the library does meanwhile. */
static void test_capture(void **state) {
    const fake_cuda_control *control = fake_cuda();
    bed b;
    tb__fence fence = {0}, run, recorded = {0};
    tb__gate *gate;
    void *p;
    (void)state;
    make_bed(&b);
    CUstream stream = make_stream_of(0, CU_STREAM_DEFAULT), free_stream = make_stream(0);
    CUstream legacy[] = {NULL, CU_STREAM_LEGACY};
    start(&b, &run);
    assert_done(&b, &run); /* its streams are made */
    begin_capture(stream);
    const tb__device_ops *ops = b.device->ops;
    IN_CAPTURE((void)0);
    IN_CAPTURE(assert_fails(ops->stream_record(b.device, &stream, &fence), TB_REFUSED, "captured"));
    IN_CAPTURE(assert_fails(ops->stream_wait(b.device, &stream, &run), TB_REFUSED, "captured"));
    IN_CAPTURE(assert_fails(ops->gate_create(b.device, &stream, tb__now_ms(), &gate), TB_REFUSED, "captured"));
    for (int i = 0; i < 2; i++) {
        IN_CAPTURE(assert_fails(ops->stream_record(b.device, &legacy[i], &fence), TB_REFUSED, "captured"));
        IN_CAPTURE(assert_fails(ops->gate_create(b.device, &legacy[i], 0, &gate), TB_REFUSED, "captured"));
    }
    IN_CAPTURE(assert_ok(ops->stream_record(b.device, &free_stream, &recorded)));
    IN_CAPTURE(start(&b, &run));
    IN_CAPTURE(assert_ok(ops->alloc(b.device, 0, (size_t)300 << 20, &p)));
    IN_CAPTURE(assert_done(&b, &run));
    IN_CAPTURE(assert_done(&b, &recorded));
    IN_CAPTURE(ops->free(b.device, p));
    IN_CAPTURE(b.job = (ops->release(b.device, b.job), prepare_copy(b.device, b.memory + N, b.memory, N)));
    if (control)
        control->hold_kernel(0);
    IN_CAPTURE(start(&b, &run));
    IN_CAPTURE(assert_true(wait_for(&b, &run, 30, NULL) || control)); /* the loop goes to sleep */
    if (control)
        control->let_go();
    IN_CAPTURE(assert_done(&b, &run));
    assert_cuda(end_capture());
    set_context(NULL);
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    assert_cuda(tb__cuda.cuStreamDestroy(free_stream));
    free_bed(&b);
}

/* Whatever a test has left behind when it failed. */
static int clean_thread(void **state) {
    (void)state;
    if (captured)
        (void)end_capture();
    while (current_context())
        set_context(NULL);
    return 0;
}

/* ---- Gates ------------------------------------------------------------------------------------------------------- */

static void test_gates(void **state) {
    enum { GATES = 70 };
    bed b;
    CUstream streams[3];
    tb__gate *gates[GATES];
    tb__fence fences[3] = {0};
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 3; i++)
        streams[i] = make_stream(0);
    for (int i = 0; i < GATES; i++)
        assert_ok(b.device->ops->gate_create(b.device, &streams[i % 2], tb__now_ms() + 60000, &gates[i]));
    for (int i = 0; i < 3; i++)
        assert_ok(b.device->ops->stream_record(b.device, &streams[i], &fences[i]));
    assert_done(&b, &fences[2]); /* it has no gate */
    for (int i = 0; i < GATES; i += 2)
        b.device->ops->gate_open(gates[i]);
    assert_done(&b, &fences[0]);
    assert_false(wait_for(&b, &fences[1], 20, NULL));
    for (int i = GATES - 1; i > 0; i -= 2)
        b.device->ops->gate_open(gates[i]);
    assert_done(&b, &fences[1]);
    for (int i = 0; i < 3; i++)
        assert_cuda(tb__cuda.cuStreamDestroy(streams[i]));
    free_bed(&b);
}

/* A stream that can't be made to wait is said to be so at once, by the driver's name for it. */
static void test_failed_gate(void **state) {
    const fake_cuda_control *control = need_fake();
    bed b;
    CUstream stream;
    tb__gate *gate;
    tb__fence fence = {0};
    (void)state;
    make_bed(&b);
    stream = make_stream(0);
    control->fail_call("cuStreamWaitValue32", 0, CUDA_ERROR_NOT_FOUND);
    assert_fails(b.device->ops->gate_create(b.device, &stream, tb__now_ms() + 60000, &gate), TB_IO,
                 "cuStreamWaitValue32 on cuda:0: CUDA_ERROR_NOT_FOUND");
    assert_ok(b.device->ops->stream_record(b.device, &stream, &fence));
    assert_done(&b, &fence); /* nothing holds it */
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    free_bed(&b);
}

/* A gate that nobody opens opens by itself, at its time. */
static void test_deadlines(void **state) {
    bed b;
    tb__gate *gates[3];
    tb__fence fences[3] = {0};
    CUstream streams[3];
    int64_t began = tb__now_ms();
    static const int after_ms[] = {300, 100, 0};
    (void)state;
    make_bed(&b);
    for (int i = 0; i < 3; i++) {
        streams[i] = make_stream(0);
        assert_ok(b.device->ops->gate_create(b.device, &streams[i], began + after_ms[i], &gates[i]));
        assert_ok(b.device->ops->stream_record(b.device, &streams[i], &fences[i]));
    }
    for (int i = 2; i >= 0; i--) {
        assert_true(wait_for(&b, &fences[i], 30000, NULL));
        assert_true(tb__now_ms() >= began + after_ms[i]);
        assert_true(i == 0 || !fences[0].is_done || tb__now_ms() >= began + after_ms[0]);
    }
    for (int i = 0; i < 3; i++) {
        b.device->ops->gate_open(gates[i]);
        assert_cuda(tb__cuda.cuStreamDestroy(streams[i]));
    }
    free_bed(&b);
}

static void *free_memory(void *arg) {
    CUdeviceptr p = *(CUdeviceptr *)arg;
    free_legacy(p);
    return NULL;
}

/* Opening a gate waits for no call of the driver, even one that waits for the gate. */
static void test_gate_and_free(void **state) {
    bed b;
    tb__gate *gate, *other;
    pthread_t thread;
    (void)state;
    make_bed(&b);
    CUstream stream = make_stream(0), second = make_stream(0);
    CUdeviceptr p = alloc_legacy(1000);
    assert_ok(b.device->ops->gate_create(b.device, &stream, tb__now_ms() + 60000, &gate));
    assert_ok(b.device->ops->gate_create(b.device, &second, tb__now_ms() + 60000, &other));
    assert_int_equal(pthread_create(&thread, NULL, free_memory, &p), 0);
    tb__sleep_ms(20);
    int64_t began = tb__now_ms();
    b.device->ops->gate_open(other);
    b.device->ops->gate_open(gate);
    assert_in_range(tb__now_ms() - began, 0, 1000);
    pthread_join(thread, NULL);
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    assert_cuda(tb__cuda.cuStreamDestroy(second));
    free_bed(&b);
}

/* ---- Failures ---------------------------------------------------------------------------------------------------- */

/* The last test: the GPU can't be used after it. */
static void test_sticky_error(void **state) {
    const fake_cuda_control *control = need_fake();
    bed b, asleep;
    tb__fence fence, held, recorded = {0}, later = {0};
    void *p;
    uint64_t sum;
    tb__gate *gate;
    (void)state;
    make_bed(&b);
    make_bed(&asleep);
    CUstream stream = make_stream(0);
    brake k;
    make_brake(&k);
    CUdeviceptr programs = alloc_legacy(1000);
    control->hold_kernel(0);
    start(&asleep, &held);
    while (asleep.device->ops->progress(asleep.device))
        ;
    assert_ok(b.device->ops->stream_record(b.device, &k.stream, &recorded));
    control->fail_kernel(0, CUDA_ERROR_ILLEGAL_ADDRESS);
    start(&b, &fence);
    assert_true(wait_for(&b, &fence, 30000, NULL));
    assert_int_equal(fence.status, TB_IO);
    assert_non_null(strstr(fence.why, "cuda:0 (Fake GPU) has failed: CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_true(wait_for(&b, &recorded, 30000, NULL));
    assert_int_equal(recorded.status, TB_IO);
    /* Nothing wakes the other loop but its timer. */
    assert_true(wait_for(&asleep, &held, 30000, NULL));
    assert_string_equal(held.why, fence.why);
    /* All that follows fails by name. */
    start(&b, &fence);
    assert_true(wait_for(&b, &fence, 30000, NULL));
    assert_non_null(strstr(fence.why, "cuda:0 (Fake GPU) has failed: CUDA_ERROR_ILLEGAL_ADDRESS"));
    const char *why = "cuda:0 (Fake GPU) has failed: CUDA_ERROR_ILLEGAL_ADDRESS";
    assert_fails(b.device->ops->alloc(b.device, 0, (size_t)1 << 30, &p), TB_IO, why);
    assert_fails(b.device->ops->stream_record(b.device, &stream, &later), TB_IO, "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_fails(b.device->ops->gate_create(b.device, &stream, 0, &gate), TB_IO, "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_ok(b.device->ops->checksum(b.device, b.memory, N, &sum, &later));
    assert_true(wait_for(&b, &later, 30000, NULL));
    assert_non_null(strstr(later.why, why));
    /* The driver knows nothing any more, but memory of the program is not taken for the host's. */
    tb__memory memory;
    assert_true(b.device->ops->find(b.device, (void *)programs, 1000, &memory));
    assert_false(b.device->ops->find(b.device, &b, sizeof b, &memory));
    for (int i = 0; i < 2; i++) {
        bed *x = i ? &asleep : &b;
        x->device->ops->release(x->device, x->job);
        x->device->ops->free(x->device, x->memory);
        tb__device_close(x->device);
    }
    assert_null(current_context());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_runs, clean_thread),
        cmocka_unit_test_teardown(test_beyond, clean_thread),
        cmocka_unit_test_teardown(test_sleep, clean_thread),
        cmocka_unit_test_teardown(test_late_wake, clean_thread),
        cmocka_unit_test_teardown(test_order, clean_thread),
        cmocka_unit_test_teardown(test_cancel, clean_thread),
        cmocka_unit_test_teardown(test_checksum, clean_thread),
        cmocka_unit_test_teardown(test_freed_buffers, clean_thread),
        cmocka_unit_test_teardown(test_tensor_in_heap, clean_thread),
        cmocka_unit_test_teardown(test_failed_launch, clean_thread),
        cmocka_unit_test_teardown(test_record, clean_thread),
        cmocka_unit_test_teardown(test_cancelled_record, clean_thread),
        cmocka_unit_test_teardown(test_stream_wait, clean_thread),
        cmocka_unit_test_teardown(test_default_stream, clean_thread),
        cmocka_unit_test_teardown(test_other_context, clean_thread),
        cmocka_unit_test_teardown(test_capture, clean_thread),
        cmocka_unit_test_teardown(test_gates, clean_thread),
        cmocka_unit_test_teardown(test_failed_gate, clean_thread),
        cmocka_unit_test_teardown(test_deadlines, clean_thread),
        cmocka_unit_test_teardown(test_gate_and_free, clean_thread),
        cmocka_unit_test_teardown(test_sticky_error, clean_thread),
    };
    need_gpu();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
