/* Shared by the files of the CUDA device: the driver's functions, GPUs, jobs and runs. */
#ifndef TB_DEVICE_CUDA_CUDA_H
#define TB_DEVICE_CUDA_CUDA_H

#include "base/mem.h"
#include "device/device.h"

#include <cuda.h>
#include <stdatomic.h>
#include <sys/queue.h>

/* ---- The driver (api.c) ------------------------------------------------------------------------------------------ */

/* The functions that the device uses: X(name, version), as in cuda.h; the version is that of CUDA which brought this
 * form of the function, as in cudaTypedefs.h. */
#define TB__CUDA_FUNCTIONS(X)                                                                                          \
    X(cuInit, 2000)                                                                                                    \
    X(cuDriverGetVersion, 2020)                                                                                        \
    X(cuGetErrorName, 6000)                                                                                            \
    X(cuDeviceGetCount, 2000)                                                                                          \
    X(cuDeviceGet, 2000)                                                                                               \
    X(cuDeviceGetName, 2000)                                                                                           \
    X(cuDeviceGetUuid, 11040)                                                                                          \
    X(cuDeviceGetAttribute, 2000)                                                                                      \
    X(cuDeviceTotalMem, 3020)                                                                                          \
    X(cuDeviceCanAccessPeer, 4000)                                                                                     \
    X(cuDevicePrimaryCtxRetain, 7000)                                                                                  \
    X(cuDevicePrimaryCtxRelease, 11000)                                                                                \
    X(cuCtxPushCurrent, 4000)                                                                                          \
    X(cuCtxPopCurrent, 4000)                                                                                           \
    X(cuCtxGetCurrent, 4000)                                                                                           \
    X(cuCtxGetDevice, 2000)                                                                                            \
    X(cuCtxEnablePeerAccess, 4000)                                                                                     \
    X(cuThreadExchangeStreamCaptureMode, 10010)                                                                        \
    X(cuModuleLoadData, 2000)                                                                                          \
    X(cuModuleGetFunction, 2000)                                                                                       \
    X(cuFuncLoad, 12040)                                                                                               \
    X(cuLaunchKernel, 4000)                                                                                            \
    X(cuLaunchHostFunc, 10000)                                                                                         \
    X(cuPointerGetAttributes, 7000)                                                                                    \
    X(cuMemGetAddressRange, 3020)                                                                                      \
    X(cuMemAlloc, 3020)                                                                                                \
    X(cuMemFree, 3020)                                                                                                 \
    X(cuMemHostAlloc, 2020)                                                                                            \
    X(cuMemFreeHost, 2000)                                                                                             \
    X(cuMemHostRegister, 6050)                                                                                         \
    X(cuMemHostUnregister, 4000)                                                                                       \
    X(cuMemHostGetDevicePointer, 3020)                                                                                 \
    X(cuMemcpyAsync, 4000)                                                                                             \
    X(cuMemcpyHtoDAsync, 3020)                                                                                         \
    X(cuIpcGetMemHandle, 4010)                                                                                         \
    X(cuIpcOpenMemHandle, 11000)                                                                                       \
    X(cuIpcCloseMemHandle, 4010)                                                                                       \
    X(cuMemGetAllocationGranularity, 10020)                                                                            \
    X(cuMemCreate, 10020)                                                                                              \
    X(cuMemRelease, 10020)                                                                                             \
    X(cuMemRetainAllocationHandle, 11000)                                                                              \
    X(cuMemExportToShareableHandle, 10020)                                                                             \
    X(cuMemImportFromShareableHandle, 10020)                                                                           \
    X(cuMemAddressReserve, 10020)                                                                                      \
    X(cuMemAddressFree, 10020)                                                                                         \
    X(cuMemMap, 10020)                                                                                                 \
    X(cuMemUnmap, 10020)                                                                                               \
    X(cuMemSetAccess, 10020)                                                                                           \
    X(cuMemGetAccess, 10020)                                                                                           \
    X(cuMemPoolExportToShareableHandle, 11020)                                                                         \
    X(cuMemPoolImportFromShareableHandle, 11020)                                                                       \
    X(cuMemPoolExportPointer, 11020)                                                                                   \
    X(cuMemPoolImportPointer, 11020)                                                                                   \
    X(cuMemPoolDestroy, 11020)                                                                                         \
    X(cuMemFreeAsync, 11020)                                                                                           \
    X(cuStreamCreate, 2000)                                                                                            \
    X(cuStreamDestroy, 4000)                                                                                           \
    X(cuStreamWaitEvent, 3020)                                                                                         \
    X(cuStreamIsCapturing, 10000)                                                                                      \
    X(cuStreamGetCtx, 9020)                                                                                            \
    X(cuStreamWaitValue32, 11070)                                                                                      \
    X(cuStreamWriteValue32, 11070)                                                                                     \
    X(cuEventCreate, 2000)                                                                                             \
    X(cuEventDestroy, 4000)                                                                                            \
    X(cuEventRecord, 2000)                                                                                             \
    X(cuEventQuery, 2000)

#define TB__CUDA_FIELD(name, version) __typeof__(&(name)) name; // NOLINT(bugprone-macro-parentheses)
typedef struct tb__cuda_api {
    TB__CUDA_FUNCTIONS(TB__CUDA_FIELD)
} tb__cuda_api;

/* Valid once tb__cuda_load has succeeded. */
extern tb__cuda_api tb__cuda;

/* Loads libcuda.so.1 and initialises it, once. TB_REFUSED: there is no driver or no GPU, the process was forked after
 * the driver was initialised, or the driver has shut down; the error message says which. */
tb_status tb__cuda_load(void);
/* Whether CUDA memory can exist in this process: libcuda.so.1 is loaded, by us or by the program. Cheap. */
bool tb__cuda_is_in_use(void);
/* The function that the library exports under this name, once it is loaded; NULL: there is none. */
void *tb__cuda_find_exported(const char *name);
/* The functions, without initialising the driver. False: there are none, or no call may be made any more. */
bool tb__cuda_has_functions(void);
/* Whether the library has initialised the driver, in this process or in one that it was forked from. */
bool tb__cuda_was_initialised(void);
bool tb__cuda_is_inherited(void); /* in one that it was forked from: the driver can't be used here */
/* A random number of this process. */
uint64_t tb__cuda_process_id(void);

/* Fails with the error's name: "cuMemAlloc of 4096 bytes on cuda:0: CUDA_ERROR_OUT_OF_MEMORY". An error that the
 * context does not recover from also fails the GPU whose context is current. */
__attribute__((format(printf, 2, 3))) tb_status tb__cuda_fail(CUresult result, const char *format, ...);
const char *tb__cuda_error_name(CUresult result);

/* ---- GPUs (gpu.c) ------------------------------------------------------------------------------------------------ */

#include "device/cuda/kernels.h"

enum { TB__MAX_GPUS = 64 };

/* The names of the kernels' functions in the module (job.c). */
extern const char *const tb__cuda_kernel_names[TB__CUDA_NKERNELS];

/* A GPU in this process: its primary context, and the kernels in it. Process-wide, never freed. */
typedef struct tb__gpu {
    int ordinal;
    CUdevice device;
    CUuuid uuid;
    char name[64], unit[24]; /* "NVIDIA H200", "cuda:0" */
    CUcontext context;
    CUmodule module;
    CUfunction kernels[TB__CUDA_NKERNELS];
    _Atomic CUresult failure;                   /* the error that its context does not recover from */
    _Atomic CUresult peer_access[TB__MAX_GPUS]; /* result of enabling access to memory of cuMemAlloc on each GPU */
    struct tb__signal_pool *signals;            /* signal.c */
} tb__gpu;

/* Retains the primary context and loads the kernels, the first time. */
tb_status tb__gpu_get(int ordinal, tb__gpu **out);
int tb__gpu_count(void); /* 0 without a driver */
bool tb__gpu_find_uuid(const CUuuid *uuid, int *ordinal);
tb__gpu *tb__gpu_if_used(int ordinal); /* NULL: not used yet */
const char *tb__gpu_unit_name(int ordinal);
/* "GPU-01234567-89ab-..." */
typedef struct tb__gpu_uuid_text {
    char text[48];
} tb__gpu_uuid_text;
tb__gpu_uuid_text tb__gpu_format_uuid(const CUuuid *uuid);

/* Makes the GPU's context current; each push that succeeds is followed by a pop. Fails if the GPU has failed, or no
 * call may be made any more. Calls in between do not disturb captures of the program's streams. */
tb_status tb__gpu_push(tb__gpu *gpu);
void tb__gpu_pop(void);
/* Fails with the name of the GPU and of its error, if it has failed. */
tb_status tb__gpu_check(const tb__gpu *gpu);
/* If the error is one that contexts do not recover from, the GPU whose context is current has failed. Returns
 * tb__gpu_check of that GPU. */
tb_status tb__gpu_note_error(CUresult result);

/* ---- Signals (signal.c) ------------------------------------------------------------------------------------------ */

/* Reports that a stream has done all work before it: by a word in pinned memory, which is cheap to poll, and by an
 * event, for other streams and for errors. */
typedef struct tb__signal {
    tb__gpu *gpu;
    CUevent event;
    _Atomic uint32_t *word;
    CUdeviceptr address; /* of the word */
    uint32_t value;      /* of the word when the signal has come; each use has the next one */
    bool is_silent;      /* the stream will not write it: query the event, ... */
    bool is_recorded;    /* ... if it is on the stream */
    _Atomic uint32_t refs;
    struct tb__signal *next;
} tb__signal;

tb_status tb__signals_create(struct tb__signal_pool **out);
/* The GPU's context is current, here and in `send`. */
tb_status tb__signal_get(tb__gpu *gpu, tb__signal **out);
/* After a failure, work before it may be on the stream nevertheless: tb__signal_ask finds out when it is done. */
tb_status tb__signal_send(tb__signal *signal, CUstream stream);
/* Queries the driver about the work before the signal: records the GPU's failure, and completes a signal that could not
 * be sent if that work is done. */
void tb__signal_ask(tb__signal *signal, CUstream stream);
void tb__signal_hold(tb__signal *signal); /* needs one more put */
void tb__signal_put(tb__signal *signal);  /* NULL is allowed. The signal need not have come */

static inline bool tb__signal_has_come(const tb__signal *signal) {
    return atomic_load_explicit(signal->word, memory_order_acquire) == signal->value;
}

/* ---- Waking a loop (wake.c) -------------------------------------------------------------------------------------- */

/* A loop's descriptor: a timer, which functions on streams make readable at once. */
typedef struct tb__waker {
    uint64_t id;
    int fd;
    _Atomic int npending; /* functions that have not been called */
    _Atomic bool was_woken;
    LIST_ENTRY(tb__waker) link;
} tb__waker;

tb_status tb__waker_open(tb__waker *waker);
void tb__waker_close(tb__waker *waker);
/* Sets the timer, and clears earlier wakeups. 0: never. */
void tb__waker_set_timer(const tb__waker *waker, int64_t ns);
void tb__waker_wake(tb__waker *waker);
/* Puts a function on the stream that wakes the loop. The stream's context is current. */
CUresult tb__waker_call(tb__waker *waker, CUstream stream);

/* ---- Streams of our own (lanes.c) -------------------------------------------------------------------------------- */

/* A stream on which runs are launched. */
typedef struct tb__lane {
    CUstream stream;
    size_t nrunning;
} tb__lane;

/* A loop's streams on one GPU, whose context is current, except in `destroy`. */
typedef struct tb__lanes tb__lanes;

/* The lane with the least work. *lanes is created if it is NULL, here and below. */
tb_status tb__lanes_choose(tb__lanes **lanes, const tb__gpu *gpu, tb__lane **out);
/* Submits, after the signal, a function that wakes the loop, on a stream that is reserved until tb__lanes_end_wait. */
tb_status tb__lanes_wake_after(tb__lanes **lanes, const tb__gpu *gpu, const tb__signal *signal, tb__waker *waker,
                               size_t *out);
void tb__lanes_end_wait(tb__lanes *lanes, size_t waiter);
void tb__lanes_destroy(tb__lanes *lanes, tb__gpu *gpu); /* NULL is allowed */

/* ---- Streams of the program (stream.c) --------------------------------------------------------------------------- */

/* Finds the GPU of a stream, and makes its context current until tb__gpu_pop. Refuses streams that are being captured,
 * and those of contexts other than the primary ones. */
tb_status tb__stream_push(const void *stream, CUstream *handle, tb__gpu **gpu);

tb_status tb__cuda_gate_create(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out);
void tb__cuda_gate_open(tb__gate *gate);

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

/* Relays of the chosen parts, which are run after all else, one after the other: first `in`, then `work`, as jobs of
 * their own. Runs of one job take turns with them. */
typedef TB_VEC(size_t) tb__cuda_relay_list;
tb_status tb__cuda_choose_relays(const tb__job *job, const tb__run *run, tb__cuda_relay_list *out);
tb__job *tb__cuda_relay_job(tb__job *job, size_t relay, bool is_in);
bool tb__cuda_begin_relays(tb__job *job); /* false: another run is executing them */
void tb__cuda_end_relays(tb__job *job);

/* Submits the kernels and copies of GPU i of a job to a stream of that GPU, whose context is current. Nothing blocks.
 * *out holds what the kernels report, and is finished when the stream's work is done. */
tb_status tb__cuda_launch_job(tb__job *job, size_t i, const tb__run *run, CUstream stream, tb__cuda_launch **out);
tb_status tb__cuda_launch_checksum(tb__gpu *gpu, const void *address, size_t nbytes, uint64_t *sum, CUstream stream,
                                   tb__cuda_launch **out);
/* After the stream's work: takes results (amax, checksums), and frees it. Fails if a quantiser met an element that is
 * not finite; the error message says where. */
tb_status tb__cuda_launch_finish(tb__cuda_launch *launch);
/* The same, for work that was cancelled or has failed: results are dropped. */
void tb__cuda_launch_discard(tb__cuda_launch *launch);

/* ---- Memory (memory.c, share.c, pin.c) --------------------------------------------------------------------------- */

bool tb__cuda_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out);
tb_status tb__cuda_list_ids(tb__device *device, const tb__memory *memory, tb__memory_ids *out);
tb__memory_change tb__cuda_check_id(tb__device *device, const tb__memory_id *id);
tb_status tb__cuda_alloc(tb__device *device, int index, size_t nbytes, void **out);
tb_status tb__cuda_alloc_for_transport(tb__device *device, int index, size_t nbytes, void **out);
void tb__cuda_free(tb__device *device, void *address);
tb_status tb__cuda_share(tb__device *device, const tb__memory *memory, tb__memory_key *key);
tb_status tb__cuda_map(tb__device *device, const tb__memory_key *key, bool is_writable, tb__mapping **out);
void tb__cuda_unmap(tb__device *device, tb__mapping *mapping);

/* How memory can be shared with other processes. */
typedef enum tb__share_kind {
    TB__SHARE_NONE,
    TB__SHARE_LEGACY, /* cuIpcGetMemHandle */
    TB__SHARE_FD,     /* of VMM memory: a descriptor for each piece */
    TB__SHARE_FABRIC, /* of VMM memory: a fabric handle for each piece */
    TB__SHARE_POOL,   /* of a pool (cudaMallocAsync) that exports: a descriptor of the pool, and a handle in it */
} tb__share_kind;

/* An allocation, or a piece of VMM memory: the memory of one handle. */
typedef struct tb__memory_piece {
    CUdeviceptr base;
    size_t nbytes;
    int ordinal;
    bool is_vmm, is_managed;
    CUmemoryPool pool; /* NULL: it is of none */
    uint64_t id;       /* BUFFER_ID */
    tb__share_kind kind;
} tb__memory_piece;

/* False: no GPU has memory there. */
bool tb__memory_find_piece(CUdeviceptr address, tb__memory_piece *out);

/* A descriptor of a pool, which every forked child closes. */
CUresult tb__pool_export(CUmemoryPool pool, int *fd);

/* Lets kernels of the GPU read memory on any GPU, and write it if requested: the library's own, imported, and the
 * program's. TB_REFUSED, with the driver's reason, if that is impossible: a kernel that accessed it nevertheless would
 * end all work of its process on the GPU. */
tb_status tb__memory_give_access(const tb__gpu *gpu, CUdeviceptr address, size_t nbytes, bool is_written);
/* The same, of mappings and of memory that `find` has found, for the units of the device. */
tb_status tb__cuda_try_access(tb__device *device, int index, const void *address, size_t nbytes);

/* Lets the GPU use VMM memory that is on it, and all GPUs in use that can reach it. */
tb_status tb__vmm_grant(CUdeviceptr base, size_t nbytes, const tb__gpu *gpu, CUmemAccess_flags flags);
/* A GPU that is used for the first time can use all memory that the library has allocated and mapped. */
void tb__memory_grant_to_new_gpu(void);
void tb__share_grant_to_new_gpu(void);

/* Host memory that GPUs read and write, by the host's addresses: registers the bytes with the driver, and no others,
 * unless they are pinned. Registrations are counted, and shared by overlapping ranges. Memory without write access can
 * be read. The bytes may be in several registrations side by side: kernels don't see that, but the driver refuses
 * copies that cross from one to the next. */
typedef struct tb__cuda_pin tb__cuda_pin;
tb_status tb__cuda_pin_bytes(tb__gpu *gpu, const void *base, size_t nbytes, tb__cuda_pin **out);
/* The same for a job: the bytes from *first to *last, or, if these are memory of tb_alloc, the whole arena, which is
 * not given back to the system before the end. *first and *last are set to what was pinned. */
tb_status tb__cuda_pin_host(tb__gpu *gpu, uintptr_t *first, uintptr_t *last, tb__cuda_pin **out);
void tb__cuda_unpin(tb__cuda_pin *pin); /* NULL is allowed */

/* For tb_alloc_on (program.c). */
/* The GPU whose context is current in this thread, or else the first. */
int tb__cuda_current_ordinal(void);
tb_status tb__cuda_alloc_on(int index, size_t nbytes, void **out);
bool tb__cuda_free_on(void *address);
tb_status tb__cuda_pin_pages(void *address, size_t nbytes);
void tb__cuda_unpin_pages(void *address);

#endif
