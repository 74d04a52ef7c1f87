/* What tests do as a program that uses CUDA itself, beside the library: with the driver that is found, real or fake. */
#ifndef TB_TESTS_CUDA_PROGRAM_H
#define TB_TESTS_CUDA_PROGRAM_H

#include "asserts.h"
#include "device/cuda/cuda.h"
#include "fake_cuda/fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define assert_cuda(call)                                                                                              \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS)                                                                                   \
            fail_msg("%s: %s", #call, tb__cuda_error_name(result_));                                                   \
    } while (0)

/* A function of the driver that the library does not use. */
static inline void *driver_function(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *address = dlsym(library, name);
    if (!address)
        fail_msg("the driver has no %s", name);
    return address;
}

#define DRIVER_CALL(name, type, ...) ((CUresult(*) type)(uintptr_t)driver_function(name))(__VA_ARGS__)

static inline CUcontext current_context(void) {
    CUcontext context;
    assert_cuda(DRIVER_CALL("cuCtxGetCurrent", (CUcontext *), &context));
    return context;
}

/* NULL: none. */
static inline void set_context(CUcontext context) {
    assert_cuda(DRIVER_CALL("cuCtxSetCurrent", (CUcontext), context));
}

static inline CUcontext primary_context(int ordinal) {
    CUcontext context;
    CUdevice device;
    assert_cuda(tb__cuda.cuDeviceGet(&device, ordinal));
    assert_cuda(tb__cuda.cuDevicePrimaryCtxRetain(&context, device));
    return context;
}

/* In the context of a GPU, whichever is current. */
static inline void write_gpu(int ordinal, CUdeviceptr to, const void *bytes, size_t nbytes) {
    CUcontext before = current_context();
    set_context(primary_context(ordinal));
    assert_cuda(DRIVER_CALL("cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t), to, bytes, nbytes));
    set_context(before);
}

static inline void read_gpu(int ordinal, CUdeviceptr from, void *bytes, size_t nbytes) {
    CUcontext before = current_context();
    set_context(primary_context(ordinal));
    assert_cuda(DRIVER_CALL("cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t), bytes, from, nbytes));
    set_context(before);
}

/* ---- Memory ---- */

static inline CUdeviceptr alloc_legacy_on(int ordinal, size_t nbytes) {
    CUdeviceptr address;
    CUcontext before = current_context();
    set_context(primary_context(ordinal));
    assert_cuda(tb__cuda.cuMemAlloc(&address, nbytes));
    set_context(before);
    return address;
}

static inline CUdeviceptr alloc_legacy(size_t nbytes) {
    return alloc_legacy_on(0, nbytes);
}

static inline void free_legacy(CUdeviceptr address) {
    CUcontext before = current_context();
    set_context(primary_context(0));
    assert_cuda(tb__cuda.cuMemFree(address));
    set_context(before);
}

enum { PIECE = 2 << 20 };

/* VMM memory, of pieces of PIECE bytes; `handle_types` as in CUmemAllocationProp. */
static inline void map_vmm_on(int ordinal, CUdeviceptr at, size_t npieces, int handle_types) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal},
                                .requestedHandleTypes = (CUmemAllocationHandleType)handle_types};
    CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (size_t i = 0; i < npieces; i++) {
        CUmemGenericAllocationHandle handle;
        assert_cuda(tb__cuda.cuMemCreate(&handle, PIECE, &prop, 0));
        assert_cuda(tb__cuda.cuMemMap(at + i * PIECE, PIECE, 0, handle, 0));
        assert_cuda(tb__cuda.cuMemRelease(handle));
    }
    assert_cuda(tb__cuda.cuMemSetAccess(at, npieces * PIECE, &access, 1));
}

static inline void map_vmm(CUdeviceptr at, size_t npieces, int handle_types) {
    map_vmm_on(0, at, npieces, handle_types);
}

static inline CUdeviceptr alloc_vmm_on(int ordinal, size_t npieces, int handle_types) {
    CUdeviceptr at;
    assert_cuda(tb__cuda.cuMemAddressReserve(&at, npieces * PIECE, 0, 0, 0));
    map_vmm_on(ordinal, at, npieces, handle_types);
    return at;
}

static inline CUdeviceptr alloc_vmm(size_t npieces, int handle_types) {
    return alloc_vmm_on(0, npieces, handle_types);
}

static inline void free_vmm(CUdeviceptr at, size_t npieces) {
    assert_cuda(tb__cuda.cuMemUnmap(at, npieces * PIECE));
    assert_cuda(tb__cuda.cuMemAddressFree(at, npieces * PIECE));
}

/* Memory of a pool of its own, as of cudaMallocFromPoolAsync, when it is there; it is freed as legacy memory is. */
static inline CUmemoryPool make_pool_on(int ordinal, int handle_types) {
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = (CUmemAllocationHandleType)handle_types,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal}};
    CUmemoryPool pool;
    assert_cuda(DRIVER_CALL("cuMemPoolCreate", (CUmemoryPool *, const CUmemPoolProps *), &pool, &props));
    return pool;
}

/* Whether the driver shares memory of pools by descriptors; the fake one does. */
static inline bool has_shared_pools(void) {
    int types = 0;
    CUdevice gpu;
    assert_cuda(tb__cuda.cuDeviceGet(&gpu, 0));
    assert_cuda(tb__cuda.cuDeviceGetAttribute(&types, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, gpu));
    return types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

static inline CUdeviceptr alloc_from_pool_on(int ordinal, CUmemoryPool pool, size_t nbytes) {
    CUdeviceptr address;
    CUcontext before = current_context();
    CUstream stream;
    set_context(primary_context(ordinal));
    assert_cuda(tb__cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    assert_cuda(DRIVER_CALL("cuMemAllocFromPoolAsync", (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &address,
                            nbytes, pool, stream));
    assert_cuda(DRIVER_CALL("cuStreamSynchronize", (CUstream), stream));
    assert_cuda(tb__cuda.cuStreamDestroy(stream));
    set_context(before);
    return address;
}

/* ---- Streams ---- */

static inline CUstream make_stream_of(int ordinal, unsigned flags) {
    CUcontext before = current_context();
    CUstream stream;
    set_context(primary_context(ordinal));
    assert_cuda(tb__cuda.cuStreamCreate(&stream, flags));
    set_context(before);
    return stream;
}

static inline CUstream make_stream(int ordinal) {
    return make_stream_of(ordinal, CU_STREAM_NON_BLOCKING);
}

/* ---- Whether there is a driver ---- */

/* For main: ends a test where there is no GPU, as a skip. */
static inline void need_gpu(void) {
    if (tb__cuda_load() == TB_OK)
        return;
    printf("skipped: %s\n", tb_error_detail());
    exit(77);
}

/* For tests of faults, which a real driver does not have on demand. */
static inline const fake_cuda_control *need_fake(void) {
    const fake_cuda_control *control = fake_cuda();
    if (!control)
        skip();
    return control;
}

#endif
