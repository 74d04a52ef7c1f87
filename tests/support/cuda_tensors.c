/* Tensors of tests in memory of a GPU, and their copies in host memory. A copy is read from the GPU when a thread first
 * looks at the tensor. What the thread has changed is written back before its next call of the library that uses
 * tensors: the linker puts the functions below in the place of those. */
#include "tensor_memory.h"

#include "tensorbus/plan.h"

#include "device/cuda/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/queue.h>

typedef struct tensor {
    char *base;
    size_t nbytes;
    char *copy, *before; /* as it is, and as it was read; NULL: it is not being looked at */
    LIST_ENTRY(tensor) link, open_link;
} tensor;

LIST_HEAD(tensor_list, tensor);

static struct {
    pthread_mutex_t lock;
    tb__device *device;
    tb__gpu *gpu;
    struct tensor_list all;
} tensors = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct tensor_list open_tensors; /* that this thread looks at */

_Noreturn static void die(const char *what) {
    fprintf(stderr, "tensors on a GPU: %s: %s\n", what, tb_error_detail());
    abort();
}

static void check_copy(CUresult result, const char *what, const tensor *t) {
    if (result == CUDA_SUCCESS)
        return;
    (void)tb__cuda_fail(result, "%zu bytes at %p", t->nbytes, (void *)t->base);
    die(what);
}

/* Functions that the library does not use: they wait. */
static void *waiting_function(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *address = library ? dlsym(library, name) : NULL;
    if (!address)
        die(name);
    return address;
}

static void read_gpu(char *to, const tensor *t) {
    CUresult (*copy)(void *, CUdeviceptr, size_t) =
        (CUresult(*)(void *, CUdeviceptr, size_t))(uintptr_t)waiting_function("cuMemcpyDtoH_v2");
    if (tb__gpu_push(tensors.gpu) != TB_OK)
        die("reading");
    check_copy(copy(to, (CUdeviceptr)t->base, t->nbytes), "reading", t);
    tb__gpu_pop();
}

static void write_gpu(const tensor *t, size_t first, size_t last) {
    CUresult (*copy)(CUdeviceptr, const void *, size_t) =
        (CUresult(*)(CUdeviceptr, const void *, size_t))(uintptr_t)waiting_function("cuMemcpyHtoD_v2");
    CUresult (*wait)(CUstream) = (CUresult(*)(CUstream))(uintptr_t)waiting_function("cuStreamSynchronize");
    if (tb__gpu_push(tensors.gpu) != TB_OK)
        die("writing");
    check_copy(copy((CUdeviceptr)t->base + first, t->copy + first, last - first), "writing", t);
    check_copy(wait(NULL), "writing", t);
    tb__gpu_pop();
}

/* With the lock held, in the process that uses the GPU: tests fork first. */
static void open_device(void) {
    if (!tensors.device && (tb__device_open("cuda", &tensors.device) != TB_OK || tb__gpu_get(0, &tensors.gpu) != TB_OK))
        die("opening the device");
}

void *cuda_tensor_alloc(size_t nbytes) {
    tensor *t = calloc(1, sizeof *t);
    void *p = NULL;
    if (!t)
        return NULL;
    pthread_mutex_lock(&tensors.lock);
    open_device();
    if (tensors.device->ops->alloc(tensors.device, 0, nbytes, &p) == TB_OK) {
        *t = (tensor){.base = p, .nbytes = nbytes};
        LIST_INSERT_HEAD(&tensors.all, t, link);
    } else {
        free(t);
    }
    pthread_mutex_unlock(&tensors.lock);
    return p;
}

static tensor *find(const void *p) {
    pthread_mutex_lock(&tensors.lock);
    tensor *t = LIST_FIRST(&tensors.all);
    while (t && !((const char *)p >= t->base && (const char *)p < t->base + (t->nbytes ? t->nbytes : 1)))
        t = LIST_NEXT(t, link);
    pthread_mutex_unlock(&tensors.lock);
    return t;
}

bool is_cuda_tensor(const void *p) {
    return find(p);
}

static void close_tensor(tensor *t) {
    LIST_REMOVE(t, open_link);
    free(t->copy);
    free(t->before);
    t->copy = t->before = NULL;
}

bool cuda_tensor_free(void *p) {
    tensor *t = find(p);
    if (!t)
        return false;
    if (t->copy)
        close_tensor(t);
    pthread_mutex_lock(&tensors.lock);
    LIST_REMOVE(t, link);
    tensors.device->ops->free(tensors.device, t->base);
    pthread_mutex_unlock(&tensors.lock);
    free(t);
    return true;
}

bool cuda_tensor_bytes(const void *p, void **bytes) {
    tensor *t = find(p);
    if (!t)
        return false;
    if (!t->copy) {
        t->copy = malloc(t->nbytes + 1);
        t->before = malloc(t->nbytes + 1);
        if (!t->copy || !t->before)
            die("no memory");
        read_gpu(t->before, t);
        memcpy(t->copy, t->before, t->nbytes);
        LIST_INSERT_HEAD(&open_tensors, t, open_link);
    }
    *bytes = t->copy + ((const char *)p - t->base);
    return true;
}

void cuda_tensors_flush(void) {
    tensor *t;
    while ((t = LIST_FIRST(&open_tensors)) && t->copy && t->before) {
        size_t first = 0, last = t->nbytes;
        while (first < last && t->copy[first] == t->before[first])
            first++;
        while (first < last && t->copy[last - 1] == t->before[last - 1])
            last--;
        if (first < last)
            write_gpu(t, first, last);
        close_tensor(t);
    }
}

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

void *cuda_stream_create(void) {
    CUstream stream;
    if (tb__gpu_push(tensors.gpu) != TB_OK || tb__cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        die("a stream");
    tb__gpu_pop();
    return stream;
}

void cuda_stream_sync(void *stream) {
    CUresult (*wait)(CUstream) = (CUresult(*)(CUstream))(uintptr_t)waiting_function("cuStreamSynchronize");
    if (tb__gpu_push(tensors.gpu) != TB_OK || wait(stream) != CUDA_SUCCESS)
        die("waiting for a stream");
    tb__gpu_pop();
}

void cuda_stream_destroy(void *stream) {
    if (tb__gpu_push(tensors.gpu) != TB_OK || tb__cuda.cuStreamDestroy(stream) != CUDA_SUCCESS)
        die("a stream");
    tb__gpu_pop();
}

/* ---- Calls of the library ---------------------------------------------------------------------------------------- */

/* BEFORE(name, (declared parameters), (arguments)): a function of the library, after what is due before it. */
#define BEFORE(name, declared, arguments)                                                                              \
    tb_status __real_##name declared;                                                                                  \
    tb_status __wrap_##name declared;                                                                                  \
    tb_status __wrap_##name declared {                                                                                 \
        cuda_tensors_flush();                                                                                          \
        return __real_##name arguments;                                                                                \
    }

BEFORE(tb_send, (tb_batch * batch, const tb_transfer_opts *opts, tb_transfer **out), (batch, opts, out))
BEFORE(tb_recv, (tb_batch * batch, const tb_transfer_opts *opts, tb_transfer **out), (batch, opts, out))
BEFORE(tb_wait, (tb_transfer * transfer, tb_event event, int timeout_ms), (transfer, event, timeout_ms))
BEFORE(tb_wait_group, (tb_transfer * transfer, uint32_t group, int timeout_ms), (transfer, group, timeout_ms))
BEFORE(tb_proceed, (tb_transfer * transfer), (transfer))
BEFORE(tb_transfer_query, (const tb_transfer *transfer, tb_transfer_state *out), (transfer, out))
BEFORE(tb_copy_run, (tb_copy * copy, int timeout_ms), (copy, timeout_ms))
BEFORE(tb_reshard_execute_plan,
       (tb_copy * copy, const tb_reshard_plan *plan, int timeout_ms, tb_reshard_counts *counts),
       (copy, plan, timeout_ms, counts))
BEFORE(tb_ir_execute, (tb_copy * copy, const tb_ir *ir, const tb_ir_part *parts, const tb_ir_execute_opts *opts),
       (copy, ir, parts, opts))
