/* The driver's functions, and what this rank has on each GPU: a stream, and memory for what is dropped. */
#include "transport/nccl/nccl.h"

enum { NON_BLOCKING_STREAM = 1 };

tb_status nccl_driver_load(nccl *n) {
    struct {
        const char *name;
        void *slot;
    } slots[] = {
#define SLOT(name) {#name, &n->driver.name}
        SLOT(cuCtxGetCurrent),    SLOT(cuCtxPushCurrent_v2), SLOT(cuCtxPopCurrent_v2), SLOT(cuStreamCreate),
        SLOT(cuStreamDestroy_v2), SLOT(cuEventCreate),       SLOT(cuEventDestroy_v2),  SLOT(cuEventRecord),
        SLOT(cuEventQuery),       SLOT(cuMemAlloc_v2),       SLOT(cuMemFree_v2),       SLOT(cuGetErrorName),
#undef SLOT
    };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        void *function = n->env.device_function(n->env.arg, TB_MEM_CUDA, slots[i].name);
        if (!function)
            return tb__fail(TB_REFUSED, "transport nccl needs a GPU: there is no driver of CUDA that has %s",
                            slots[i].name);
        memcpy(slots[i].slot, &function, sizeof function);
    }
    return TB_OK;
}

const char *nccl_gpu_error(const nccl *n, int error) {
    const char *name = NULL;
    n->driver.cuGetErrorName(error, &name);
    return name ? name : "an unknown error";
}

tb_status nccl_enter(const nccl *n, const nccl_gpu *gpu) {
    return n->env.enter_device(n->env.arg, TB_MEM_CUDA, gpu->device);
}

void nccl_leave(const nccl *n) {
    n->env.leave_device(n->env.arg, TB_MEM_CUDA);
}

static tb_status make_stream(const nccl *n, nccl_gpu *gpu) {
    int result = n->driver.cuCtxGetCurrent(&gpu->context);
    if (result == GPU_SUCCESS)
        result = n->driver.cuStreamCreate(&gpu->stream, NON_BLOCKING_STREAM);
    return result == GPU_SUCCESS ? TB_OK
                                 : tb__fail(TB_IO, "a stream of GPU %d: %s", gpu->device, nccl_gpu_error(n, result));
}

tb_status nccl_gpu_get(nccl *n, int device, nccl_gpu **out) {
    LIST_FOREACH(*out, &n->gpus, link) {
        if ((*out)->device == device)
            return TB_OK;
    }
    nccl_gpu *gpu = tb__calloc(1, sizeof *gpu);
    if (!gpu)
        return TB_NO_MEMORY;
    gpu->device = device;
    tb_status status = nccl_enter(n, gpu);
    if (status == TB_OK) {
        status = make_stream(n, gpu);
        nccl_leave(n);
    }
    if (status != TB_OK) {
        free(gpu);
        return status;
    }
    LIST_INSERT_HEAD(&n->gpus, gpu, link);
    *out = gpu;
    return TB_OK;
}

void nccl_gpus_free(nccl *n, bool has_ended) {
    for (nccl_gpu *gpu = LIST_FIRST(&n->gpus), *next; gpu; gpu = next) {
        next = LIST_NEXT(gpu, link);
        if (has_ended && nccl_enter(n, gpu) == TB_OK) {
            n->driver.cuStreamDestroy_v2(gpu->stream);
            if (gpu->sink)
                n->driver.cuMemFree_v2((uintptr_t)gpu->sink);
            nccl_leave(n);
        }
        free(gpu);
    }
    LIST_INIT(&n->gpus);
}

/* A smaller one is left as it is until the process ends: freeing it would wait for the stream. */
void *nccl_gpu_sink(nccl *n, nccl_gpu *gpu, size_t nbytes) {
    uintptr_t address;
    if (gpu->sink_nbytes >= nbytes)
        return gpu->sink;
    int result = n->driver.cuMemAlloc_v2(&address, nbytes);
    if (result != GPU_SUCCESS) {
        tb__set_detail("%zu bytes of GPU %d: %s", nbytes, gpu->device, nccl_gpu_error(n, result));
        return NULL;
    }
    gpu->sink = (void *)address;
    gpu->sink_nbytes = nbytes;
    return gpu->sink;
}
