/* Streams of the program: what they are, and gates, which hold them.
 *
 * A gate is a word in pinned memory that the stream waits for. Opening it stores a number there, without a call of the
 * driver, whose locks may be held by a call that waits for that very stream. A thread of the process opens gates at
 * their deadline. */
#include "device/cuda/cuda.h"

#include "base/mem.h"
#include "base/process.h"

#include <sys/queue.h>

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

/* Whether the handle is a default stream, that of the calling thread's current context. */
static bool is_default(CUstream stream) {
    return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* Makes some context current, if there is one that can be used. */
static bool push_any(void) {
    for (int i = 0; i < TB__MAX_GPUS; i++) {
        tb__gpu *gpu = tb__gpu_if_used(i);
        if (gpu && tb__gpu_push(gpu) == TB_OK)
            return true;
    }
    return false;
}

/* Almost any call with a stream that takes part in a capture ends the capture, and so does any use of the default
 * stream while a blocking stream of its context is captured. This one does not. */
static CUresult check_capture(CUstream stream) {
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = tb__cuda.cuStreamIsCapturing(stream, &capture);
    return result == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                                                                              : result;
}

/* The driver may need any current context for this; the default stream's context is the current one. */
static CUresult get_context(CUstream stream, CUcontext *out) {
    if (is_default(stream)) {
        CUresult result = tb__cuda.cuCtxGetCurrent(out);
        return result == CUDA_SUCCESS && !*out ? CUDA_ERROR_INVALID_CONTEXT : result;
    }
    bool is_pushed = push_any();
    CUresult result = check_capture(stream);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuStreamGetCtx(stream, out);
    if (is_pushed)
        tb__gpu_pop();
    return result;
}

static tb_status find_gpu(CUcontext context, tb__gpu **out) {
    CUcontext unused;
    CUdevice device = 0;
    CUresult result = tb__cuda.cuCtxPushCurrent(context);
    if (result == CUDA_SUCCESS) {
        result = tb__cuda.cuCtxGetDevice(&device);
        tb__cuda.cuCtxPopCurrent(&unused);
    }
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "the GPU of a stream");
    TB_TRY(tb__gpu_get(device, out)); /* handles of devices are their ordinals */
    if ((*out)->context != context)
        return tb__fail(TB_REFUSED, "the stream is not one of the primary context of %s", (*out)->unit);
    return TB_OK;
}

tb_status tb__stream_push(const void *stream, CUstream *handle, tb__gpu **gpu) {
    CUcontext context = NULL;
    *handle = *(const CUstream *)stream;
    TB_TRY(tb__cuda_load());
    CUresult result = get_context(*handle, &context);
    if (result == CUDA_ERROR_INVALID_CONTEXT && is_default(*handle))
        return tb__fail(TB_INVALID, "the default stream is that of the calling thread's GPU, and it has none");
    if (result == CUDA_SUCCESS) {
        TB_TRY(find_gpu(context, gpu));
        TB_TRY(tb__gpu_push(*gpu));
        result = is_default(*handle) ? check_capture(*handle) : CUDA_SUCCESS;
        if (result == CUDA_SUCCESS)
            return TB_OK;
        tb__gpu_pop();
    }
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return tb__fail(TB_REFUSED, "the stream %p is being captured to a graph, which can't contain transfers",
                        (const void *)*handle);
    return tb__cuda_fail(result, "the context of the stream %p", (const void *)*handle);
}

/* ---- Gates ------------------------------------------------------------------------------------------------------- */

struct tb__gate {
    tb__signal *signal; /* its word: the stream goes on when it has the signal's value */
    int64_t deadline_ms;
    LIST_ENTRY(tb__gate) link;
};

static struct {
    pthread_mutex_t lock; /* never held during a call of the driver */
    pthread_cond_t changed;
    bool has_thread;
    LIST_HEAD(gate_list, tb__gate) closed;
} gates = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void open_word(const tb__gate *gate) {
    atomic_store_explicit(gate->signal->word, gate->signal->value, memory_order_release);
}

/* Needs the lock. Opens gates whose deadline has passed; returns the next deadline. */
static int64_t open_late_gates(void) {
    int64_t now = tb__now_ms(), next = INT64_MAX;
    for (tb__gate *gate = LIST_FIRST(&gates.closed); gate; gate = LIST_NEXT(gate, link)) {
        if (gate->deadline_ms <= now)
            open_word(gate);
        else if (gate->deadline_ms < next)
            next = gate->deadline_ms;
    }
    return next;
}

static void *open_gates_in_time(void *unused) {
    (void)unused;
    pthread_mutex_lock(&gates.lock);
    for (;;) {
        int64_t next = open_late_gates();
        if (next == INT64_MAX) {
            pthread_cond_wait(&gates.changed, &gates.lock);
        } else {
            struct timespec until = tb__time_of_ms(next);
            pthread_cond_timedwait(&gates.changed, &gates.lock, &until);
        }
    }
    return NULL;
}

/* Before a stream waits: the thread must be there to open its gate. */
static tb_status list_gate(tb__gate *gate) {
    pthread_t thread;
    tb_status status = TB_OK;
    pthread_mutex_lock(&gates.lock);
    if (!gates.has_thread) {
        tb__monotonic_cond_init(&gates.changed);
        status = tb__start_thread(&thread, "tb-cuda-gates", open_gates_in_time, NULL);
        gates.has_thread = status == TB_OK;
        if (gates.has_thread)
            pthread_detach(thread);
    }
    if (status == TB_OK) {
        LIST_INSERT_HEAD(&gates.closed, gate, link);
        pthread_cond_signal(&gates.changed);
    }
    pthread_mutex_unlock(&gates.lock);
    return status;
}

/* The context is current. */
static tb_status close_stream(tb__gate *gate, CUstream stream, tb__gpu *gpu) {
    TB_TRY(tb__signal_get(gpu, &gate->signal));
    gate->signal->value++;
    TB_TRY(list_gate(gate));
    CUresult result =
        tb__cuda.cuStreamWaitValue32(stream, gate->signal->address, gate->signal->value, CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS)
        return TB_OK;
    tb_status status = tb__cuda_fail(result, "cuStreamWaitValue32 on %s", gpu->unit);
    pthread_mutex_lock(&gates.lock);
    LIST_REMOVE(gate, link);
    pthread_mutex_unlock(&gates.lock);
    return status;
}

tb_status tb__cuda_gate_create(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out) {
    CUstream handle = NULL;
    tb__gpu *gpu = NULL;
    (void)device;
    tb__gate *gate = tb__calloc(1, sizeof *gate);
    if (!gate)
        return TB_NO_MEMORY;
    gate->deadline_ms = deadline_ms;
    tb_status status = tb__stream_push(stream, &handle, &gpu);
    if (status == TB_OK) {
        status = close_stream(gate, handle, gpu);
        tb__gpu_pop();
    }
    if (status == TB_OK) {
        *out = gate;
        return TB_OK;
    }
    if (gate->signal)
        open_word(gate);
    tb__signal_put(gate->signal);
    free(gate);
    return status;
}

/* The word may be used again at once: the stream goes on if it is the value that it waits for, or any later one. */
void tb__cuda_gate_open(tb__gate *gate) {
    if (!tb__cuda_is_inherited()) {
        pthread_mutex_lock(&gates.lock);
        LIST_REMOVE(gate, link);
        pthread_mutex_unlock(&gates.lock);
        open_word(gate);
        tb__signal_put(gate->signal);
    }
    free(gate);
}
