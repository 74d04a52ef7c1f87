/* Shared by the files of the CUDA device: the driver's functions, GPUs, jobs and runs. */
#ifndef TB_DEVICE_CUDA_CUDA_H
#define TB_DEVICE_CUDA_CUDA_H

#include "device/device.h"

#include <cuda.h>

/* ---- The driver (api.c) ------------------------------------------------------------------------------------------ */

/* The functions that the device uses: X(name), as in cuda.h. */
#define TB__CUDA_FUNCTIONS(X)                                                                                          \
    X(cuInit)                                                                                                          \
    X(cuDriverGetVersion)                                                                                              \
    X(cuGetErrorName)                                                                                                  \
    X(cuDeviceGetCount)                                                                                                \
    X(cuDeviceGet)                                                                                                     \
    X(cuDeviceGetName)                                                                                                 \
    X(cuDeviceGetUuid)                                                                                                 \
    X(cuDeviceGetAttribute)                                                                                            \
    X(cuDeviceTotalMem)                                                                                                \
    X(cuDeviceCanAccessPeer)                                                                                           \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxGetState)                                                                                      \
    X(cuCtxPushCurrent)                                                                                                \
    X(cuCtxPopCurrent)                                                                                                 \
    X(cuCtxEnablePeerAccess)                                                                                           \
    X(cuModuleLoadData)                                                                                                \
    X(cuModuleGetFunction)                                                                                             \
    X(cuFuncLoad)                                                                                                      \
    X(cuLaunchKernel)                                                                                                  \
    X(cuLaunchHostFunc)                                                                                                \
    X(cuPointerGetAttributes)                                                                                          \
    X(cuMemGetAddressRange)                                                                                            \
    X(cuMemAlloc)                                                                                                      \
    X(cuMemFree)                                                                                                       \
    X(cuMemHostAlloc)                                                                                                  \
    X(cuMemFreeHost)                                                                                                   \
    X(cuMemHostRegister)                                                                                               \
    X(cuMemHostUnregister)                                                                                             \
    X(cuMemHostGetDevicePointer)                                                                                       \
    X(cuMemcpyAsync)                                                                                                   \
    X(cuMemcpyHtoDAsync)                                                                                               \
    X(cuMemsetD8Async)                                                                                                 \
    X(cuIpcGetMemHandle)                                                                                               \
    X(cuIpcOpenMemHandle)                                                                                              \
    X(cuIpcCloseMemHandle)                                                                                             \
    X(cuMemGetAllocationGranularity)                                                                                   \
    X(cuMemCreate)                                                                                                     \
    X(cuMemRelease)                                                                                                    \
    X(cuMemRetainAllocationHandle)                                                                                     \
    X(cuMemExportToShareableHandle)                                                                                    \
    X(cuMemImportFromShareableHandle)                                                                                  \
    X(cuMemAddressReserve)                                                                                             \
    X(cuMemAddressFree)                                                                                                \
    X(cuMemMap)                                                                                                        \
    X(cuMemUnmap)                                                                                                      \
    X(cuMemSetAccess)                                                                                                  \
    X(cuStreamCreate)                                                                                                  \
    X(cuStreamDestroy)                                                                                                 \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuStreamGetCtx)                                                                                                  \
    X(cuStreamWaitValue32)                                                                                             \
    X(cuStreamWriteValue32)                                                                                            \
    X(cuEventCreate)                                                                                                   \
    X(cuEventDestroy)                                                                                                  \
    X(cuEventRecord)                                                                                                   \
    X(cuEventQuery)                                                                                                    \
    X(cuEventElapsedTime)

#define TB__CUDA_FIELD(name) __typeof__(&name) name;
typedef struct tb__cuda_api {
    TB__CUDA_FUNCTIONS(TB__CUDA_FIELD)
} tb__cuda_api;

/* Valid once tb__cuda_load has succeeded. */
extern tb__cuda_api tb__cuda;

/* Loads libcuda.so.1, once. TB_REFUSED: there is no driver or no GPU; the sentence says what is missing. */
tb_status tb__cuda_load(void);
/* Whether CUDA memory can exist in this process: libcuda.so.1 is loaded, by us or by the program. Cheap. */
bool tb__cuda_is_in_use(void);

/* Fails with the error's name: "cuMemAlloc of 4096 bytes on cuda:0: CUDA_ERROR_OUT_OF_MEMORY". */
__attribute__((format(printf, 2, 3))) tb_status tb__cuda_fail(CUresult result, const char *format, ...);

/* ---- GPUs (gpu.c) ------------------------------------------------------------------------------------------------ */

#include "device/cuda/kernels.h"

/* The names of the kernels' functions in the module (job.c). */
extern const char *const tb__cuda_kernel_names[TB__CUDA_NKERNELS];

/* A GPU in this process: its primary context, and the kernels in it. Process-wide, never freed. */
typedef struct tb__gpu {
    int ordinal;
    CUdevice device;
    CUuuid uuid;
    char name[64], unit[16]; /* "NVIDIA H200", "cuda:0" */
    int nprocessors;         /* streaming multiprocessors */
    CUcontext context;
    CUmodule module;
    CUfunction kernels[TB__CUDA_NKERNELS];
} tb__gpu;

/* Retains the primary context and loads the kernels, the first time. */
tb_status tb__gpu_get(int ordinal, tb__gpu **out);
int tb__gpu_count(void); /* 0 without a driver */
bool tb__gpu_find_uuid(const CUuuid *uuid, int *ordinal);

/* Makes the GPU's context current; each push is followed by a pop. */
tb_status tb__gpu_push(const tb__gpu *gpu);
void tb__gpu_pop(void);

/* ---- Jobs (job.c) ------------------------------------------------------------------------------------------------ */

/* tb__job has all descriptors of its moves in memory of the GPU that does them. */
tb_status tb__cuda_prepare(tb__device *device, const tb__move *moves, size_t nmoves, tb__job **out);
void tb__cuda_release(tb__device *device, tb__job *job);

/* When `run` is called: TB_INVALID if a part is listed twice. */
tb_status tb__cuda_check_parts(tb__job *job, const tb__run *run);

/* A run of a job, or a checksum, on one GPU. */
typedef struct tb__cuda_launch tb__cuda_launch;

/* How many GPUs the chosen parts need; the run launches on each of them. Usually 1. */
size_t tb__cuda_job_ngpus(const tb__job *job);
tb__gpu *tb__cuda_job_gpu(const tb__job *job, size_t i);

/* Submits the kernels and copies of GPU i of a job to a stream of that GPU, whose context is current. Nothing blocks.
 * *out holds what the kernels report, and is finished when the stream's work is done. */
tb_status tb__cuda_launch_job(tb__job *job, size_t i, const tb__run *run, CUstream stream, tb__cuda_launch **out);
tb_status tb__cuda_launch_checksum(tb__gpu *gpu, const void *address, size_t nbytes, uint64_t *sum, CUstream stream,
                                   tb__cuda_launch **out);
/* After the stream's work: takes results (amax, checksums), and frees it. Fails if a quantiser met an element that is
 * not finite; the sentence says where. */
tb_status tb__cuda_launch_finish(tb__cuda_launch *launch);
/* The same, for work that was cancelled or has failed: results are dropped. */
void tb__cuda_launch_discard(tb__cuda_launch *launch);

/* ---- Memory (memory.c, share.c) ---------------------------------------------------------------------------------- */

bool tb__cuda_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out);
tb_status tb__cuda_alloc(tb__device *device, int index, size_t nbytes, void **out);
void tb__cuda_free(tb__device *device, void *address);
tb_status tb__cuda_share(tb__device *device, const tb__memory *memory, tb__memory_key *key);
tb_status tb__cuda_map(tb__device *device, const tb__memory_key *key, tb__mapping **out);
void tb__cuda_unmap(tb__device *device, tb__mapping *mapping);

/* An address by which the GPU reads or writes host memory: registers the bytes with the driver, unless they are
 * pinned. Registrations are counted, and shared by overlapping ranges. */
typedef struct tb__cuda_pin tb__cuda_pin;
tb_status tb__cuda_pin_host(tb__gpu *gpu, const void *base, size_t nbytes, tb__cuda_pin **out, CUdeviceptr *address);
void tb__cuda_unpin(tb__cuda_pin *pin); /* NULL is allowed */

#endif
