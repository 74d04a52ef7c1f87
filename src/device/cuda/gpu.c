/* GPUs of this process. Each is set up when it is first used: its primary context, which the program's own libraries
 * use as well, the kernels, and access to and from the other GPUs in use. */
#include "device/cuda/cuda.h"

#include "base/mem.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

extern const unsigned char tb__cuda_fatbin[];

static pthread_mutex_t setup_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(tb__gpu *) gpus[TB__MAX_GPUS];

/* ---- Contexts ---------------------------------------------------------------------------------------------------- */

enum { MOST_PUSHED = 8 };

/* Contexts that this thread has pushed, innermost last. */
static _Thread_local struct {
    tb__gpu *gpus[MOST_PUSHED];
    int count;
    CUstreamCaptureMode mode; /* before the first push */
} pushed;

tb_status tb__gpu_check(const tb__gpu *gpu) {
    TB_TRY(tb__cuda_load());
    CUresult failure = atomic_load(&gpu->failure);
    if (failure == CUDA_SUCCESS)
        return TB_OK;
    return tb__fail(TB_IO, "%s (%s) has failed: %s", gpu->unit, gpu->name, tb__cuda_error_name(failure));
}

/* Whether all later calls in the context would give the same error. */
static bool is_sticky(CUresult result) {
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_UNKNOWN:
    case CUDA_ERROR_DEINITIALIZED:
        return true;
    default:
        return false;
    }
}

static void note_error(tb__gpu *gpu, CUresult result) {
    CUresult none = CUDA_SUCCESS;
    if (is_sticky(result))
        atomic_compare_exchange_strong(&gpu->failure, &none, result);
}

tb_status tb__gpu_note_error(CUresult result) {
    if (pushed.count == 0)
        return TB_OK;
    tb__gpu *gpu = pushed.gpus[pushed.count - 1];
    note_error(gpu, result);
    return tb__gpu_check(gpu);
}

/* While any thread captures a stream in the usual mode, calls like cuEventQuery would fail, and end the capture. */
tb_status tb__gpu_push(tb__gpu *gpu) {
    TB_TRY(tb__gpu_check(gpu));
    if (pushed.count == MOST_PUSHED)
        return tb__fail(TB_INTERNAL, "%d contexts are current at once", MOST_PUSHED);
    CUresult result = tb__cuda.cuCtxPushCurrent(gpu->context);
    if (result != CUDA_SUCCESS) {
        /* This one was valid: the program has destroyed it (cudaDeviceReset). */
        note_error(gpu, result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_ERROR_CONTEXT_IS_DESTROYED : result);
        return tb__cuda_fail(result, "cuCtxPushCurrent on %s", gpu->unit);
    }
    pushed.gpus[pushed.count++] = gpu;
    if (pushed.count == 1) {
        pushed.mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        tb__cuda.cuThreadExchangeStreamCaptureMode(&pushed.mode);
    }
    return TB_OK;
}

void tb__gpu_pop(void) {
    CUcontext unused;
    if (--pushed.count == 0)
        tb__cuda.cuThreadExchangeStreamCaptureMode(&pushed.mode);
    tb__cuda.cuCtxPopCurrent(&unused);
}

/* ---- Setup ------------------------------------------------------------------------------------------------------- */

static tb_status describe(tb__gpu *gpu) {
    CUresult result = tb__cuda.cuDeviceGet(&gpu->device, gpu->ordinal);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceGetName(gpu->name, sizeof gpu->name, gpu->device);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceGetUuid(&gpu->uuid, gpu->device);
    return result == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(result, "asking what %s is", gpu->unit);
}

/* Eagerly: a kernel that is loaded at its first launch would wait for other streams. The context is current. */
static tb_status load_kernels(tb__gpu *gpu) {
    CUresult result = tb__cuda.cuModuleLoadData(&gpu->module, tb__cuda_fatbin);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "loading kernels for %s (%s)", gpu->unit, gpu->name);
    for (int i = 0; i < TB__CUDA_NKERNELS; i++) {
        result = tb__cuda.cuModuleGetFunction(&gpu->kernels[i], gpu->module, tb__cuda_kernel_names[i]);
        if (result == CUDA_SUCCESS)
            result = tb__cuda.cuFuncLoad(gpu->kernels[i]);
        if (result != CUDA_SUCCESS)
            return tb__cuda_fail(result, "loading kernel %s for %s", tb__cuda_kernel_names[i], gpu->unit);
    }
    return TB_OK;
}

/* Tries it, instead of asking whether it is possible. The program may have enabled it already. */
static void enable_peer(tb__gpu *from, const tb__gpu *to) {
    if (tb__gpu_push(from) != TB_OK)
        return;
    CUresult result = tb__cuda.cuCtxEnablePeerAccess(to->context, 0);
    tb__gpu_pop();
    from->peer_access[to->ordinal] = result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED ? CUDA_SUCCESS : result;
}

/* With the lock held. */
static tb_status set_up(tb__gpu *gpu) {
    TB_TRY(describe(gpu));
    CUresult result = tb__cuda.cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "the primary context of %s (%s)", gpu->unit, gpu->name);
    tb_status status = tb__gpu_push(gpu);
    if (status == TB_OK) {
        status = load_kernels(gpu);
        tb__gpu_pop();
    }
    if (status == TB_OK)
        status = tb__signals_create(&gpu->signals);
    if (status != TB_OK)
        tb__cuda.cuDevicePrimaryCtxRelease(gpu->device);
    return status;
}

static tb_status set_up_locked(int ordinal, tb__gpu **out) {
    if ((*out = atomic_load(&gpus[ordinal])))
        return TB_OK;
    tb__gpu *gpu = tb__calloc(1, sizeof *gpu);
    if (!gpu)
        return TB_NO_MEMORY;
    gpu->ordinal = ordinal;
    for (int i = 0; i < TB__MAX_GPUS; i++)
        gpu->peer_access[i] = i == ordinal ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    snprintf(gpu->unit, sizeof gpu->unit, "%s", tb__gpu_unit_name(ordinal));
    tb_status status = set_up(gpu);
    if (status != TB_OK) {
        free(gpu);
        return status;
    }
    for (int i = 0; i < TB__MAX_GPUS; i++) {
        tb__gpu *other = atomic_load(&gpus[i]);
        if (other) {
            enable_peer(gpu, other);
            enable_peer(other, gpu);
        }
    }
    atomic_store(&gpus[ordinal], gpu);
    tb__memory_grant_to_new_gpu();
    tb__share_grant_to_new_gpu();
    *out = gpu;
    return TB_OK;
}

tb_status tb__gpu_get(int ordinal, tb__gpu **out) {
    TB_TRY(tb__cuda_load());
    int count = tb__gpu_count();
    if (ordinal < 0 || ordinal >= count)
        return tb__fail(TB_INVALID, "there is no cuda:%d: this process sees %d GPU%s", ordinal, count,
                        count == 1 ? "" : "s");
    if ((*out = atomic_load(&gpus[ordinal])))
        return TB_OK;
    pthread_mutex_lock(&setup_lock);
    tb_status status = set_up_locked(ordinal, out);
    pthread_mutex_unlock(&setup_lock);
    return status;
}

tb__gpu *tb__gpu_if_used(int ordinal) {
    return atomic_load(&gpus[ordinal]);
}

int tb__gpu_count(void) {
    int count;
    if (tb__cuda_load() != TB_OK || tb__cuda.cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return 0;
    return count < TB__MAX_GPUS ? count : TB__MAX_GPUS;
}

bool tb__gpu_find_uuid(const CUuuid *uuid, int *ordinal) {
    int count = tb__gpu_count();
    for (int i = 0; i < count; i++) {
        CUdevice device;
        CUuuid other;
        if (tb__cuda.cuDeviceGet(&device, i) == CUDA_SUCCESS &&
            tb__cuda.cuDeviceGetUuid(&other, device) == CUDA_SUCCESS && memcmp(&other, uuid, sizeof other) == 0) {
            *ordinal = i;
            return true;
        }
    }
    return false;
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

static char unit_names[TB__MAX_GPUS][24];

static void name_units(void) {
    for (int i = 0; i < TB__MAX_GPUS; i++)
        snprintf(unit_names[i], sizeof unit_names[i], "cuda:%d", i);
}

const char *tb__gpu_unit_name(int ordinal) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, name_units);
    return ordinal >= 0 && ordinal < TB__MAX_GPUS ? unit_names[ordinal] : "cuda";
}

tb__gpu_uuid_text tb__gpu_format_uuid(const CUuuid *uuid) {
    static const char digits[] = "0123456789abcdef";
    tb__gpu_uuid_text out = {"GPU-"};
    char *at = out.text + 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *at++ = '-';
        *at++ = digits[(unsigned char)uuid->bytes[i] >> 4];
        *at++ = digits[(unsigned char)uuid->bytes[i] & 15];
    }
    return out;
}
