/* Signals: events and words in pinned memory, by which streams report their progress. More are made when there are too
 * few, and kept, because making them may wait for the GPU. */
#include "device/cuda/cuda.h"

#include "base/mem.h"

#include <pthread.h>

struct tb__signal_pool {
    pthread_mutex_t lock;
    tb__signal *free;
    tb__signal *late; /* given back before they have come */
};

/* Words that the GPU writes and the CPU polls: a cache line each. */
enum { LINE = 64, NWORDS = 64 };

tb_status tb__signals_create(struct tb__signal_pool **out) {
    *out = tb__calloc(1, sizeof **out);
    if (!*out)
        return TB_NO_MEMORY;
    pthread_mutex_init(&(*out)->lock, NULL);
    return TB_OK;
}

/* Needs the lock. Frees late signals that have come meanwhile. */
static void collect_late(struct tb__signal_pool *pool) {
    for (tb__signal **at = &pool->late, *signal; (signal = *at);) {
        if (!tb__signal_has_come(signal)) {
            at = &signal->next;
            continue;
        }
        *at = signal->next;
        signal->next = pool->free;
        pool->free = signal;
    }
}

static tb__signal *take_free(struct tb__signal_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    if (!pool->free)
        collect_late(pool);
    tb__signal *signal = pool->free;
    if (signal)
        pool->free = signal->next;
    pthread_mutex_unlock(&pool->lock);
    return signal;
}

/* Adds signals without events, and takes one. Calls of the driver are made without the lock: they may wait for a stream
 * that only goes on when somebody gives a signal back. */
static tb_status add_signals(tb__gpu *gpu, tb__signal **out) {
    void *words;
    CUdeviceptr address;
    tb__signal *signals = tb__calloc(NWORDS, sizeof *signals);
    if (!signals)
        return TB_NO_MEMORY;
    CUresult result =
        tb__cuda.cuMemHostAlloc(&words, (size_t)NWORDS * LINE, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuMemHostGetDevicePointer(&address, words, 0);
    if (result != CUDA_SUCCESS) {
        free(signals);
        return tb__cuda_fail(result, "pinned memory for signals of %s", gpu->unit);
    }
    for (size_t i = 0; i < NWORDS; i++) {
        signals[i] = (tb__signal){.gpu = gpu, .address = address + i * LINE, .next = &signals[i + 1]};
        signals[i].word = (_Atomic uint32_t *)((char *)words + i * LINE);
        atomic_init(signals[i].word, 0);
    }
    pthread_mutex_lock(&gpu->signals->lock);
    signals[NWORDS - 1].next = gpu->signals->free;
    gpu->signals->free = &signals[1];
    pthread_mutex_unlock(&gpu->signals->lock);
    *out = &signals[0];
    return TB_OK;
}

tb_status tb__signal_get(tb__gpu *gpu, tb__signal **out) {
    tb__signal *signal = take_free(gpu->signals);
    if (!signal)
        TB_TRY(add_signals(gpu, &signal));
    if (!signal->event) {
        CUresult result = tb__cuda.cuEventCreate(&signal->event, CU_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS) {
            atomic_store(&signal->refs, 1);
            tb__signal_put(signal);
            return tb__cuda_fail(result, "cuEventCreate on %s", gpu->unit);
        }
    }
    atomic_store(&signal->refs, 1);
    *out = signal;
    return TB_OK;
}

tb_status tb__signal_send(tb__signal *signal, CUstream stream) {
    const char *unit = signal->gpu->unit;
    signal->value++;
    CUresult written =
        tb__cuda.cuStreamWriteValue32(stream, signal->address, signal->value, CU_STREAM_WRITE_VALUE_DEFAULT);
    CUresult recorded = tb__cuda.cuEventRecord(signal->event, stream);
    signal->is_silent = written != CUDA_SUCCESS;
    signal->is_recorded = recorded == CUDA_SUCCESS;
    if (written != CUDA_SUCCESS)
        return tb__cuda_fail(written, "cuStreamWriteValue32 on a stream of %s", unit);
    return recorded == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(recorded, "cuEventRecord on a stream of %s", unit);
}

void tb__signal_ask(tb__signal *signal, CUstream stream) {
    CUresult result = CUDA_SUCCESS;
    if (!signal->is_recorded) {
        result = tb__cuda.cuEventRecord(signal->event, stream);
        signal->is_recorded = result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuEventQuery(signal->event);
    if (result == CUDA_SUCCESS && signal->is_silent)
        atomic_store(signal->word, signal->value);
    else if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
        (void)tb__cuda_fail(result, "cuEventQuery on %s", signal->gpu->unit);
}

void tb__signal_hold(tb__signal *signal) {
    atomic_fetch_add(&signal->refs, 1);
}

void tb__signal_put(tb__signal *signal) {
    if (!signal || atomic_fetch_sub(&signal->refs, 1) > 1)
        return;
    struct tb__signal_pool *pool = signal->gpu->signals;
    if (signal->is_silent) /* the stream will not write it */
        atomic_store(signal->word, signal->value);
    tb__signal **list = tb__signal_has_come(signal) ? &pool->free : &pool->late;
    pthread_mutex_lock(&pool->lock);
    signal->next = *list;
    *list = signal;
    pthread_mutex_unlock(&pool->lock);
}
