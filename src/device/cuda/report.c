/* Queries of the CUDA driver, for reports. */
#include "device/cuda/report.h"

#ifdef TB_HAS_CUDA

#include "device/cuda/cuda.h"

#include <string.h>

tb_status tb__cuda_describe_driver(tb__cuda_driver *out) {
    tb__cuda_driver found = {0};
    TB_TRY(tb__cuda_load());
    CUresult result = tb__cuda.cuDriverGetVersion(&found.version);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuDriverGetVersion");
    found.ngpus = tb__gpu_count();
    *out = found;
    return TB_OK;
}

static bool has(CUdevice device, CUdevice_attribute attribute) {
    int value = 0;
    return tb__cuda.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value;
}

static CUresult describe(CUdevice device, tb__cuda_gpu *out) {
    CUuuid uuid;
    int major, minor;
    CUresult result = tb__cuda.cuDeviceGetName(out->name, sizeof out->name, device);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceGetUuid(&uuid, device);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceTotalMem(&out->nbytes, device);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (result == CUDA_SUCCESS)
        result = tb__cuda.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(out->uuid, tb__gpu_format_uuid(&uuid).text, sizeof out->uuid);
    out->capability = major * 10 + minor;
    return CUDA_SUCCESS;
}

tb_status tb__cuda_describe_gpu(int ordinal, tb__cuda_gpu *out) {
    tb__cuda_gpu found = {0};
    CUdevice device;
    TB_TRY(tb__cuda_load());
    CUresult result = tb__cuda.cuDeviceGet(&device, ordinal);
    if (result == CUDA_SUCCESS)
        result = describe(device, &found);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "asking what cuda:%d is", ordinal);
    found.has_ipc = has(device, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED); /* of memory and events alike */
    found.has_vmm = has(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    found.has_vmm_fd = has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    found.has_fabric = has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
    found.has_read_only_pinning = has(device, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
    *out = found;
    return TB_OK;
}

bool tb__cuda_can_reach(int from, int to) {
    CUdevice a, b;
    int is_possible = 0;
    return tb__cuda_load() == TB_OK && tb__cuda.cuDeviceGet(&a, from) == CUDA_SUCCESS &&
           tb__cuda.cuDeviceGet(&b, to) == CUDA_SUCCESS &&
           tb__cuda.cuDeviceCanAccessPeer(&is_possible, a, b) == CUDA_SUCCESS && is_possible;
}

#else

static tb_status refuse(void) {
    return tb__fail(TB_REFUSED, "this build of tensorbus has no CUDA device: there was no nvcc, or TB_CUDA was off");
}

tb_status tb__cuda_describe_driver(tb__cuda_driver *out) {
    (void)out;
    return refuse();
}

tb_status tb__cuda_describe_gpu(int ordinal, tb__cuda_gpu *out) {
    (void)ordinal;
    (void)out;
    return refuse();
}

bool tb__cuda_can_reach(int from, int to) {
    (void)from;
    (void)to;
    return false;
}

#endif
