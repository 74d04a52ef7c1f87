/* The streams of a loop on one GPU: lanes, on which runs are launched, and waiters, which wake the loop. */
#include "device/cuda/cuda.h"

#include "base/mem.h"

enum { NLANES = 4 };

/* A stream that waits for a signal, to wake the loop. */
typedef struct waiter {
    CUstream stream;
    bool is_busy;
} waiter;

struct tb__lanes {
    tb__lane lanes[NLANES];
    TB_VEC(waiter) waiters;
};

static tb_status create_stream(const tb__gpu *gpu, CUstream *out) {
    CUresult result = tb__cuda.cuStreamCreate(out, CU_STREAM_NON_BLOCKING);
    return result == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(result, "cuStreamCreate on %s", gpu->unit);
}

static bool make_lanes(tb__lanes **lanes) {
    if (!*lanes)
        *lanes = tb__calloc(1, sizeof **lanes);
    return *lanes;
}

tb_status tb__lanes_choose(tb__lanes **lanes, const tb__gpu *gpu, tb__lane **out) {
    if (!make_lanes(lanes))
        return TB_NO_MEMORY;
    tb__lane *best = (*lanes)->lanes;
    for (int i = 1; i < NLANES; i++)
        best = (*lanes)->lanes[i].nrunning < best->nrunning ? &(*lanes)->lanes[i] : best;
    if (!best->stream)
        TB_TRY(create_stream(gpu, &best->stream));
    *out = best;
    return TB_OK;
}

static tb_status get_waiter(tb__lanes *lanes, const tb__gpu *gpu, size_t *out) {
    waiter w = {0};
    size_t i = 0;
    while (i < lanes->waiters.count && lanes->waiters.item[i].is_busy)
        i++;
    if (i == lanes->waiters.count) {
        if (!tb__vec_reserve(&lanes->waiters, 1))
            return TB_NO_MEMORY;
        TB_TRY(create_stream(gpu, &w.stream));
        lanes->waiters.item[lanes->waiters.count++] = w;
    }
    *out = i;
    return TB_OK;
}

tb_status tb__lanes_wake_after(tb__lanes **lanes, const tb__gpu *gpu, const tb__signal *signal, tb__waker *waker,
                               size_t *out) {
    size_t i;
    if (!make_lanes(lanes))
        return TB_NO_MEMORY;
    TB_TRY(get_waiter(*lanes, gpu, &i));
    waiter *w = &(*lanes)->waiters.item[i];
    CUresult result = tb__cuda.cuStreamWaitEvent(w->stream, signal->event, 0);
    if (result == CUDA_SUCCESS)
        result = tb__waker_call(waker, w->stream);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "waiting for %s", gpu->unit);
    w->is_busy = true;
    *out = i;
    return TB_OK;
}

void tb__lanes_end_wait(tb__lanes *lanes, size_t i) {
    lanes->waiters.item[i].is_busy = false;
}

static void destroy_streams(const tb__lanes *lanes) {
    for (int i = 0; i < NLANES; i++) {
        if (lanes->lanes[i].stream)
            tb__cuda.cuStreamDestroy(lanes->lanes[i].stream);
    }
    for (size_t i = 0; i < lanes->waiters.count; i++)
        tb__cuda.cuStreamDestroy(lanes->waiters.item[i].stream);
}

void tb__lanes_destroy(tb__lanes *lanes, tb__gpu *gpu) {
    if (!lanes)
        return;
    if (tb__gpu_push(gpu) == TB_OK) {
        destroy_streams(lanes);
        tb__gpu_pop();
    }
    free(lanes->waiters.item);
    free(lanes);
}
