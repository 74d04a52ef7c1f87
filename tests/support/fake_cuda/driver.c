/* Calls in general, GPUs and contexts. */
#include "fake_cuda.h"
#include "inside.h"

#include "device/cuda/cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { MOST_CONTEXTS = 32, MOST_FAULTS = 16 };

static _Thread_local struct {
    CUcontext contexts[MOST_CONTEXTS];
    int count;
    CUstreamCaptureMode mode;
} thread;

void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fake CUDA: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

void *get(size_t nbytes) {
    void *p = calloc(1, nbytes);
    if (!p)
        die("no memory");
    return p;
}

/* Objects that handles point to: they stay, so that the use of one that was destroyed is seen. */
typedef struct kept {
    struct kept *next;
    _Alignas(max_align_t) char bytes[];
} kept;

static _Atomic(kept *) all_kept;

void *make_object(size_t nbytes) {
    kept *k = get(sizeof *k + nbytes);
    k->next = atomic_load(&all_kept);
    while (!atomic_compare_exchange_weak(&all_kept, &k->next, k))
        ;
    return k->bytes;
}

void lock(void) {
    pthread_mutex_lock(&fake.lock);
}

void unlock(void) {
    pthread_mutex_unlock(&fake.lock);
}

uint64_t random_below(uint64_t n) {
    fake.random = fake.random * 6364136223846793005 + 1442695040888963407;
    return n ? (fake.random >> 33) % n : 0;
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static void make_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.changed, &attributes);
}

/* In a forked child, which can't use what its parent has initialised. */
static void reset(void) {
    fake.is_forked |= fake.is_initialised;
    fake.is_initialised = false;
    make_condition();
    unlock();
}

int physical(int ordinal) {
    return fake.physical[ordinal];
}

int visible(int gpu) {
    int i = 0;
    while (i < fake.ngpus && fake.physical[i] != gpu)
        i++;
    return i < fake.ngpus ? i : -1;
}

/* CUDA_VISIBLE_DEVICES: numbers of GPUs, in the order that this process sees them in. */
static void choose_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    for (int i = 0; i < MOST_GPUS; i++)
        fake.physical[i] = i;
    if (!text)
        return;
    for (char *end; n < fake.ngpus && *text; text = end + (*end == ',')) {
        long gpu = strtol(text, &end, 10);
        if (end == text || gpu < 0 || gpu >= fake.ngpus)
            break;
        fake.physical[n++] = (int)gpu;
    }
    fake.ngpus = n;
}

__attribute__((constructor)) static void set_up(void) {
    make_condition();
    fake.ngpus = (int)setting("FAKE_CUDA_GPUS", 1);
    if (fake.ngpus > MOST_GPUS)
        die("more than %d GPUs", MOST_GPUS);
    fake.most_nbytes = setting("FAKE_CUDA_MEMORY", (uint64_t)8 << 30);
    fake.most_us = (int64_t)setting("FAKE_CUDA_DELAY_US", 300);
    fake.random = setting("FAKE_CUDA_SEED", 1);
    choose_visible();
    for (int i = 0; i < MOST_GPUS; i++) {
        fake.gpus[i] = (fake_gpu){.ordinal = i};
        fake.gpus[i].primary = (struct CUctx_st){.kind = CONTEXT, .gpu = &fake.gpus[i]};
    }
    pthread_atfork(lock, unlock, reset);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

typedef struct counted {
    const char *function;
    long ncalls;
    countdown fault;
} counted;

static counted calls[256];
static size_t ncounted;
static long ncalls;

/* By the name without its version. */
static counted *count_of(const char *function) {
    const char *version = strstr(function, "_v");
    size_t length = version ? (size_t)(version - function) : strlen(function);
    for (size_t i = 0; i < ncounted; i++) {
        if (strncmp(calls[i].function, function, length) == 0 && !calls[i].function[length])
            return &calls[i];
    }
    calls[ncounted] = (counted){.function = strndup(function, length), .fault = {.n = -1}};
    return &calls[ncounted++];
}

bool strikes(countdown *c) {
    return c->n >= 0 && c->n-- == 0;
}

static CUresult check_call(const char *function, int needs) {
    counted *c = count_of(function);
    ncalls++;
    c->ncalls++;
    if (fake.is_shut_down)
        return CUDA_ERROR_DEINITIALIZED;
    if ((needs & NEEDS_INIT) && !fake.is_initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (strikes(&c->fault))
        return (CUresult)c->fault.result;
    if ((needs & NEEDS_CONTEXT) == NEEDS_CONTEXT) {
        if (thread.count == 0)
            die("%s is called without a current context", function);
        CUresult error = current_gpu()->error;
        if (error != CUDA_SUCCESS)
            return error;
    }
    if ((needs & IS_UNSAFE) && fake.ncaptures > 0 && thread.mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        end_captures();
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult enter(const char *function, int needs) {
    lock();
    CUresult result = check_call(function, needs);
    unlock();
    return result;
}

void *check_handle(const void *handle, object_kind kind, const char *what) {
    if (!handle || *(const object_kind *)handle != kind)
        die("%s is no such thing, or was destroyed", what);
    return (void *)(uintptr_t)handle;
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    ENTER(NEEDS_NOTHING);
    if (fake.is_forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (fake.ngpus == 0)
        return CUDA_ERROR_NO_DEVICE;
    fake.is_initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(NEEDS_NOTHING);
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

#define ERROR_NAME(name)                                                                                               \
    case name:                                                                                                         \
        *text = #name;                                                                                                 \
        return CUDA_SUCCESS;

CUresult cuGetErrorName(CUresult error, const char **text) {
    switch (error) {
        ERROR_NAME(CUDA_ERROR_INVALID_VALUE)
        ERROR_NAME(CUDA_ERROR_OUT_OF_MEMORY)
        ERROR_NAME(CUDA_ERROR_NOT_INITIALIZED)
        ERROR_NAME(CUDA_ERROR_DEINITIALIZED)
        ERROR_NAME(CUDA_ERROR_NO_DEVICE)
        ERROR_NAME(CUDA_ERROR_INVALID_DEVICE)
        ERROR_NAME(CUDA_ERROR_INVALID_CONTEXT)
        ERROR_NAME(CUDA_ERROR_CONTEXT_IS_DESTROYED)
        ERROR_NAME(CUDA_ERROR_INVALID_HANDLE)
        ERROR_NAME(CUDA_ERROR_NOT_FOUND)
        ERROR_NAME(CUDA_ERROR_NOT_READY)
        ERROR_NAME(CUDA_ERROR_NO_BINARY_FOR_GPU)
        ERROR_NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
        ERROR_NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        ERROR_NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        ERROR_NAME(CUDA_ERROR_LAUNCH_FAILED)
        ERROR_NAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
        ERROR_NAME(CUDA_ERROR_ECC_UNCORRECTABLE)
        ERROR_NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        ERROR_NAME(CUDA_ERROR_NOT_SUPPORTED)
        ERROR_NAME(CUDA_ERROR_NOT_PERMITTED)
        ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        ERROR_NAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    default:
        *text = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

typedef struct named_function {
    const char *name;
    void *address;
    int version;
} named_function;

#define NAMED(name, version) {#name, (void *)(uintptr_t)(name), version},
static const named_function named[] = {TB__CUDA_FUNCTIONS(NAMED)};

CUresult cuGetProcAddress(const char *symbol, void **address, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    const char *without = getenv("FAKE_CUDA_WITHOUT");
    (void)flags;
    ENTER(NEEDS_NOTHING);
    *address = NULL;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (without && strcmp(without, symbol) == 0)
        return CUDA_ERROR_NOT_FOUND;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
        if (strcmp(named[i].name, symbol) != 0)
            continue;
        if (version < named[i].version)
            die("cuGetProcAddress of an older version of %s", symbol);
        *address = named[i].address;
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- GPUs -------------------------------------------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *count) {
    ENTER(NEEDS_INIT);
    *count = fake.ngpus;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(NEEDS_INIT);
    if (ordinal < 0 || ordinal >= fake.ngpus)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    ENTER(NEEDS_INIT);
    (void)device;
    snprintf(name, (size_t)room, "Fake GPU");
    return CUDA_SUCCESS;
}

/* The same in all processes. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(NEEDS_INIT);
    memset(uuid, 0xfa, sizeof *uuid);
    uuid->bytes[15] = (char)physical(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *nbytes, CUdevice device) {
    ENTER(NEEDS_INIT);
    (void)device;
    *nbytes = fake.most_nbytes;
    return CUDA_SUCCESS;
}

/* What this process has taken is missing; what others have is not. */
CUresult cuMemGetInfo(size_t *nfree, size_t *total) {
    ENTER(NEEDS_CONTEXT);
    lock();
    *nfree = fake.most_nbytes - current_gpu()->nbytes_used;
    *total = fake.most_nbytes;
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(NEEDS_INIT);
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 4;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = !getenv("FAKE_CUDA_NO_VMM");
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        *value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        *value = getenv("FAKE_CUDA_FABRIC") != NULL;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
    default:
        *value = 0;
        return CUDA_SUCCESS;
    }
}

bool can_be_peers(int from, int to) {
    return from == to || !getenv("FAKE_CUDA_NO_PEERS");
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice from, CUdevice to) {
    ENTER(NEEDS_INIT);
    *can = from != to && can_be_peers(from, to);
    return CUDA_SUCCESS;
}

/* ---- Contexts ---------------------------------------------------------------------------------------------------- */

CUcontext current_context(void) {
    return thread.contexts[thread.count - 1];
}

fake_gpu *current_gpu(void) {
    return current_context()->gpu;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(NEEDS_INIT);
    *context = &fake.gpus[device].primary;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(NEEDS_INIT);
    (void)device;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    ENTER(NEEDS_INIT);
    lock();
    fake.gpus[device].is_reset = true;
    stream_fail(&fake.gpus[device]);
    unlock();
    return CUDA_SUCCESS;
}

/* The form without parameters for execution affinity, which cuda.h no longer declares. */
__attribute__((visibility("default"))) CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    ENTER(NEEDS_INIT);
    (void)flags;
    CUcontext made = make_object(sizeof *made);
    if (thread.count == MOST_CONTEXTS)
        die("too many contexts");
    *made = (struct CUctx_st){.kind = CONTEXT, .gpu = &fake.gpus[device]};
    thread.contexts[thread.count++] = *context = made;
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) {
    ENTER(NEEDS_INIT);
    ((CUcontext)check_handle(context, CONTEXT, "a context"))->kind = DEAD;
    if (thread.count > 0 && thread.contexts[thread.count - 1] == context)
        thread.count--;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(NEEDS_INIT);
    check_handle(context, CONTEXT, "a context");
    if (context == &context->gpu->primary && context->gpu->is_reset)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (thread.count == MOST_CONTEXTS)
        die("too many contexts are pushed");
    thread.contexts[thread.count++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(NEEDS_INIT);
    if (thread.count == 0)
        die("a context is popped, but none is current");
    *context = thread.contexts[--thread.count];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(NEEDS_INIT);
    *context = thread.count ? thread.contexts[thread.count - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(NEEDS_INIT);
    if (context)
        check_handle(context, CONTEXT, "a context");
    thread.count -= thread.count > 0;
    if (context)
        thread.contexts[thread.count++] = context;
    return CUDA_SUCCESS;
}

/* By which a program may ask whether there is one. */
CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(NEEDS_INIT);
    if (thread.count == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_gpu()->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    check_handle(peer, CONTEXT, "a context");
    if (!can_be_peers(current_gpu()->ordinal, peer->gpu->ordinal))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    uint32_t bit = 1u << current_gpu()->ordinal;
    lock();
    bool was_enabled = peer->gpu->peers & bit;
    peer->gpu->peers |= bit;
    give_peers_access();
    unlock();
    return was_enabled ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER(NEEDS_INIT);
    CUstreamCaptureMode before = thread.mode;
    thread.mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- What tests ask for ------------------------------------------------------------------------------------------ */

static void fail_call(const char *function, long n, int result) {
    lock();
    count_of(function)->fault = (countdown){n, result};
    unlock();
}

static void shut_down(void) {
    lock();
    fake.is_shut_down = true;
    unlock();
}

static long count_calls(const char *function) {
    lock();
    long n = function ? count_of(function)->ncalls : ncalls;
    unlock();
    return n;
}

static void set_delay(int64_t most_us) {
    lock();
    fake.most_us = most_us;
    unlock();
}

static void mend(void) {
    lock();
    for (size_t i = 0; i < ncounted; i++)
        calls[i].fault.n = -1;
    unlock();
    fail_kernel(-1, 0);
    hold_kernel(-1);
    let_go();
}

static bool has_context(void) {
    return thread.count > 0;
}

__attribute__((visibility("default"))) extern const fake_cuda_control fake_cuda_controls;
const fake_cuda_control fake_cuda_controls = {fail_call, fail_kernel, hold_kernel, let_go, set_delay,
                                              mend,      shut_down,   count_calls, look,   has_context};
