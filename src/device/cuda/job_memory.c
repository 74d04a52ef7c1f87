/* The memory of jobs: blocks for descriptors and results, and where the memory of moves is. */
#include "device/cuda/job.h"

#include "base/int.h"
#include "base/process.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

enum {
    BLOCK_MIN = 16 << 10,
    STAGING_NBYTES = 4 << 20,
    UPLOAD_MS = 20000,
    PAGE = 4096, /* of the host; GPUs map no smaller ones */
};
#define POOL_LIMIT ((size_t)128 << 20) /* bytes of unused blocks that are kept */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(unused_blocks, tb__cuda_block) unused = LIST_HEAD_INITIALIZER(unused);
static size_t unused_nbytes;

/* ---- Blocks ------------------------------------------------------------------------------------------------------ */

static int kinds_of(const tb__cuda_block *block) {
    return (block->pinned ? TB__CUDA_PINNED : 0) | (block->device ? TB__CUDA_DEVICE : 0);
}

/* The smallest unused block that is not much too large. */
static tb__cuda_block *take_unused(const tb__gpu *gpu, size_t nbytes, int kinds) {
    tb__cuda_block *best = NULL;
    pthread_mutex_lock(&lock);
    for (tb__cuda_block *b = LIST_FIRST(&unused); b; b = LIST_NEXT(b, link)) {
        if (b->gpu == gpu && kinds_of(b) == kinds && b->nbytes >= nbytes && b->nbytes / 4 <= nbytes &&
            (!best || b->nbytes < best->nbytes))
            best = b;
    }
    if (best) {
        LIST_REMOVE(best, link);
        unused_nbytes -= best->nbytes;
    }
    pthread_mutex_unlock(&lock);
    return best;
}

/* With the context. */
static void free_block(tb__cuda_block *block) {
    if (block->pinned)
        tb__cuda.cuMemFreeHost(block->pinned);
    if (block->device)
        tb__cuda.cuMemFree(block->device);
    free(block);
}

static tb_status fill_block(tb__cuda_block *block, int kinds) {
    CUresult result = CUDA_SUCCESS;
    const char *unit = block->gpu->unit;
    if (kinds & TB__CUDA_PINNED)
        result = tb__cuda.cuMemHostAlloc(&block->pinned, block->nbytes, CU_MEMHOSTALLOC_DEVICEMAP);
    if (result != CUDA_SUCCESS) {
        block->pinned = NULL;
        return tb__cuda_fail(result, "cuMemHostAlloc of %zu bytes for %s", block->nbytes, unit);
    }
    if (kinds & TB__CUDA_PINNED)
        result = tb__cuda.cuMemHostGetDevicePointer(&block->pinned_address, block->pinned, 0);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuMemHostGetDevicePointer on %s", unit);
    if (kinds & TB__CUDA_DEVICE)
        result = tb__cuda.cuMemAlloc(&block->device, block->nbytes);
    if (result != CUDA_SUCCESS) {
        block->device = 0;
        return tb__cuda_fail(result, "cuMemAlloc of %zu bytes on %s", block->nbytes, unit);
    }
    return TB_OK;
}

tb_status tb__cuda_block_get(tb__gpu *gpu, size_t nbytes, int kinds, tb__cuda_block **out) {
    nbytes = (size_t)tb__align((int64_t)(nbytes ? nbytes : 1), BLOCK_MIN);
    tb__cuda_block *block = take_unused(gpu, nbytes, kinds);
    if (!block) {
        block = tb__calloc(1, sizeof *block);
        if (!block)
            return TB_NO_MEMORY;
        block->gpu = gpu;
        block->nbytes = nbytes;
        tb_status status = fill_block(block, kinds);
        if (status != TB_OK) {
            free_block(block);
            return status;
        }
    }
    *out = block;
    return TB_OK;
}

void tb__cuda_block_put(tb__cuda_block *block) {
    if (!block)
        return;
    pthread_mutex_lock(&lock);
    bool is_kept = unused_nbytes + block->nbytes <= POOL_LIMIT;
    if (is_kept) {
        unused_nbytes += block->nbytes;
        LIST_INSERT_HEAD(&unused, block, link);
    }
    pthread_mutex_unlock(&lock);
    if (!is_kept && tb__gpu_push(block->gpu) == TB_OK) {
        free_block(block);
        tb__gpu_pop();
    }
}

/* ---- Uploads ----------------------------------------------------------------------------------------------------- */

typedef struct uploader {
    tb__gpu *gpu;
    CUstream stream;
    CUevent event;
    tb__cuda_block *staging;
} uploader;

static tb_status wait_for_event(const uploader *u) {
    int64_t deadline = tb__now_ms() + UPLOAD_MS;
    for (int i = 0;; i++) {
        CUresult result = tb__cuda.cuEventQuery(u->event);
        if (result == CUDA_SUCCESS)
            return TB_OK;
        if (result != CUDA_ERROR_NOT_READY)
            return tb__cuda_fail(result, "uploading descriptors to %s", u->gpu->unit);
        if (tb__now_ms() >= deadline)
            return tb__fail(TB_TIMEOUT, "%s did not take the descriptors of a job within %d s", u->gpu->unit,
                            UPLOAD_MS / 1000);
        if (i > 100)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

static tb_status upload_piece(const uploader *u, CUdeviceptr to, const char *from, size_t nbytes) {
    void *pinned = u->staging->pinned;
    if (!pinned)
        return tb__fail(TB_INTERNAL, "a block for descriptors without pinned memory");
    memcpy(pinned, from, nbytes);
    CUresult result = tb__cuda.cuMemcpyHtoDAsync(to, pinned, nbytes, u->stream);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuEventRecord(u->event, u->stream);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "uploading %zu bytes of descriptors to %s", nbytes, u->gpu->unit);
    return wait_for_event(u);
}

static tb_status open_uploader(uploader *u, size_t nbytes) {
    CUresult result = tb__cuda.cuStreamCreate(&u->stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuEventCreate(&u->event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "a stream on %s", u->gpu->unit);
    return tb__cuda_block_get(u->gpu, tb__min_size(nbytes, STAGING_NBYTES), TB__CUDA_PINNED, &u->staging);
}

tb_status tb__cuda_upload(tb__gpu *gpu, CUdeviceptr to, const void *from, size_t nbytes) {
    uploader u = {.gpu = gpu};
    tb_status status = open_uploader(&u, nbytes);
    for (size_t at = 0; at < nbytes && status == TB_OK; at += STAGING_NBYTES)
        status = upload_piece(&u, to + at, (const char *)from + at, tb__min_size(nbytes - at, STAGING_NBYTES));
    if (u.event)
        tb__cuda.cuEventDestroy(u.event);
    if (u.stream)
        tb__cuda.cuStreamDestroy(u.stream);
    if (status == TB_OK)
        tb__cuda_block_put(u.staging); /* else a copy may still read it */
    return status;
}

/* ---- Where memory is --------------------------------------------------------------------------------------------- */

/* The first span that ends beyond the address. */
static size_t find_span(const tb__cuda_spans *spans, uintptr_t at) {
    size_t i = 0;
    TB_BISECT(i, spans->list.count, spans->list.item[i].end > at);
    return i;
}

static bool is_in_span(const tb__cuda_spans *spans, size_t i, uintptr_t begin, uintptr_t end) {
    return i < spans->list.count && spans->list.item[i].begin <= begin && end <= spans->list.item[i].end;
}

/* Cut so that it overlaps no other; neighbours in host memory are joined. */
static tb_status add_span(tb__cuda_spans *spans, size_t i, tb__cuda_span span) {
    tb__cuda_span *list = spans->list.item;
    if (i > 0 && list[i - 1].end > span.begin)
        span.begin = list[i - 1].end;
    if (i < spans->list.count && list[i].begin < span.end)
        span.end = list[i].begin;
    if (span.begin >= span.end)
        return TB_OK;
    if (i > 0 && list[i - 1].end == span.begin && list[i - 1].gpu < 0 && span.gpu < 0) {
        list[i - 1].end = span.end;
        return TB_OK;
    }
    if (!tb__vec_push(&spans->list, span))
        return TB_NO_MEMORY;
    list = spans->list.item;
    memmove(&list[i + 1], &list[i], (spans->list.count - 1 - i) * sizeof *list);
    list[i] = span;
    return TB_OK;
}

tb_status tb__cuda_find_gpu(tb__cuda_spans *spans, tb__device *device, uintptr_t begin, uintptr_t end, int *out) {
    size_t i = spans->last;
    if (!is_in_span(spans, i, begin, end))
        i = find_span(spans, begin);
    if (is_in_span(spans, i, begin, end)) {
        spans->last = i;
        *out = spans->list.item[i].gpu;
        return TB_OK;
    }
    tb__memory memory;
    tb__cuda_span span = {.begin = begin & ~(uintptr_t)(PAGE - 1), .end = (end + PAGE - 1) & ~(uintptr_t)(PAGE - 1)};
    span.gpu = -1;
    if (tb__cuda_find(device, (void *)begin, end - begin, &memory)) {
        span = (tb__cuda_span){
            .begin = (uintptr_t)memory.base, .end = (uintptr_t)memory.base + memory.nbytes, .gpu = memory.index};
    } else if (tb__cuda_find(device, (void *)begin, 1, &memory)) { /* the other bytes must be on the same GPU */
        TB_TRY(tb__device_check_extent(device, (void *)begin, end - begin));
        span = (tb__cuda_span){.begin = begin, .end = end, .gpu = memory.index};
    }
    *out = span.gpu;
    return add_span(spans, i, span);
}

tb_status tb__cuda_span_access(tb__cuda_spans *spans, const tb__gpu *gpu, uintptr_t begin, uintptr_t end,
                               bool is_written) {
    uint64_t bit = (uint64_t)1 << gpu->ordinal;
    tb_status status = TB_OK;
    for (size_t i = find_span(spans, begin); i < spans->list.count && spans->list.item[i].begin < end; i++) {
        tb__cuda_span *span = &spans->list.item[i];
        uint64_t *can = is_written ? &span->can_write : &span->can_read;
        if (*can & bit)
            continue;
        if (span->cannot & bit && !is_written)
            return TB_REFUSED;
        TB_TRY(tb__gpu_push((tb__gpu *)(uintptr_t)gpu));
        status = tb__memory_give_access(gpu, span->begin, span->end - span->begin, is_written);
        tb__gpu_pop();
        *(status == TB_OK ? can : &span->cannot) |= bit;
        TB_TRY(status);
    }
    return TB_OK;
}

/* ---- Host memory ------------------------------------------------------------------------------------------------- */

/* The first range that ends beyond the address. */
static size_t find_range(const tb__cuda_host_ranges *ranges, uintptr_t address) {
    size_t i = 0;
    TB_BISECT(i, ranges->count, ranges->item[i].end > address);
    return i;
}

static bool is_in_range(const tb__cuda_host_ranges *ranges, size_t i, uintptr_t begin, uintptr_t end) {
    return i < ranges->count && ranges->item[i].begin <= begin && end <= ranges->item[i].end;
}

tb_status tb__cuda_host_pin(tb__cuda_host_ranges *ranges, tb__gpu *gpu, uintptr_t begin, uintptr_t end) {
    if (is_in_range(ranges, find_range(ranges, begin), begin, end))
        return TB_OK;
    tb__cuda_host_range new = {.begin = begin, .end = end};
    if (!tb__vec_reserve(ranges, 1))
        return TB_NO_MEMORY;
    TB_TRY(tb__cuda_pin_host(gpu, &new.begin, &new.end, &new.pin));
    size_t i = find_range(ranges, new.begin);
    memmove(&ranges->item[i + 1], &ranges->item[i], (ranges->count++ - i) * sizeof new);
    ranges->item[i] = new;
    return TB_OK;
}

void tb__cuda_host_fini(tb__cuda_host_ranges *ranges) {
    for (size_t i = 0; i < ranges->count; i++)
        tb__cuda_unpin(ranges->item[i].pin);
    free(ranges->item);
}

bool tb__cuda_is_host(const tb__cuda_host_ranges *ranges, uintptr_t address) {
    return is_in_range(ranges, find_range(ranges, address), address, address + 1);
}
