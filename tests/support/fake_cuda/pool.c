/* Pools of the fake driver, whose memory is in memory.c. A pool that is shared is a file with its name: who has no
 * descriptor of it can't import memory of it. */
#include "inside.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    static uint64_t nmade;
    ENTER(NEEDS_INIT);
    if (props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || props->location.id >= fake.ngpus)
        return CUDA_ERROR_INVALID_VALUE;
    CUmemoryPool pool = make_object(sizeof *pool);
    lock();
    *pool = (struct CUmemPoolHandle_st){.kind = POOL, .gpu = &fake.gpus[props->location.id]};
    pool->name = (pool_name){.pid = (int)getpid(), .gpu = physical(props->location.id), .number = ++nmade};
    pool->handle_types = props->handleTypes;
    unlock();
    *out = pool;
    return CUDA_SUCCESS;
}

/* Memory of it stays as long as it is used. */
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTER(NEEDS_INIT);
    lock();
    ((CUmemoryPool)check_handle(pool, POOL, "a pool"))->kind = DEAD;
    unlock();
    return CUDA_SUCCESS;
}

/* The memory is there at once: it is not in the order of the stream. */
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t nbytes, CUmemoryPool pool, CUstream stream) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    (void)stream;
    lock();
    check_handle(pool, POOL, "a pool");
    *out = pool->is_import ? 0 : place_in_pool(pool, nbytes);
    unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType type,
                                          unsigned long long flags) {
    ENTER(NEEDS_INIT);
    (void)flags;
    check_handle(pool, POOL, "a pool");
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(pool->handle_types & type) || pool->is_import)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("fake-pool", 0);
    if (fd < 0 || pwrite(fd, &pool->name, sizeof pool->name, 0) != (ssize_t)sizeof pool->name)
        die("the file of a pool can't be written");
    pool->is_exported = true;
    memcpy(out, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, CUmemAllocationHandleType type,
                                            unsigned long long flags) {
    ENTER(NEEDS_INIT);
    pool_name name;
    (void)flags;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        pread((int)(intptr_t)handle, &name, sizeof name, 0) != (ssize_t)sizeof name || visible(name.gpu) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUmemoryPool pool = make_object(sizeof *pool);
    *pool = (struct CUmemPoolHandle_st){
        .kind = POOL, .gpu = &fake.gpus[visible(name.gpu)], .name = name, .is_import = true};
    *out = pool;
    return CUDA_SUCCESS;
}

typedef struct pointer_bytes {
    pool_name name;
    handle_bytes handle;
} pointer_bytes;

_Static_assert(sizeof(pointer_bytes) <= sizeof(CUmemPoolPtrExportData), "they are exported in it");

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr address) {
    pointer_bytes bytes = {0};
    ENTER(NEEDS_INIT);
    lock();
    CUmemoryPool pool = describe_in_pool(address, &bytes.handle);
    unlock();
    if (!pool || !pool->is_exported)
        return CUDA_ERROR_INVALID_VALUE;
    bytes.name = pool->name;
    memset(out, 0, sizeof *out);
    memcpy(out, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
    pointer_bytes bytes;
    ENTER(NEEDS_INIT);
    memcpy(&bytes, data, sizeof bytes);
    check_handle(pool, POOL, "a pool");
    if (!pool->is_import || memcmp(&bytes.name, &pool->name, sizeof bytes.name) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    *out = import_to_pool(pool, &bytes.handle);
    unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
