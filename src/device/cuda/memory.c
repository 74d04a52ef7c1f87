/* Memory of GPUs: finding which GPU an address is on, and allocating memory that other processes can map. */
#include "device/cuda/cuda.h"

#include "base/int.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/memory.h"

#include <pthread.h>
#include <string.h>

/* ---- Finding memory ---------------------------------------------------------------------------------------------- */

/* The driver's attributes of an address. It writes 8, 32 or 64 bits, little-endian, so zeroed 64-bit fields suit
 * all. */
typedef struct attributes {
    uint64_t memory_type, ordinal, id, is_legacy, handle_types, mempool, is_managed;
} attributes;

/* Needs no current context. */
static CUresult ask(CUdeviceptr address, attributes *out) {
    CUpointer_attribute what[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                                  CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                  CU_POINTER_ATTRIBUTE_IS_MANAGED};
    void *where[] = {&out->memory_type,  &out->ordinal, &out->id,        &out->is_legacy,
                     &out->handle_types, &out->mempool, &out->is_managed};
    *out = (attributes){0};
    return tb__cuda.cuPointerGetAttributes(sizeof what / sizeof *what, what, where, address);
}

/* Of memory that is neither managed nor a pool's. */
static tb__share_kind share_kind(const attributes *a) {
    if (a->mempool || a->is_managed)
        return TB__SHARE_NONE;
    if (a->is_legacy)
        return TB__SHARE_LEGACY;
    return a->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? TB__SHARE_FD
           : a->handle_types & CU_MEM_HANDLE_TYPE_FABRIC              ? TB__SHARE_FABRIC
                                                                      : TB__SHARE_NONE;
}

/* Whether a pool can be exported is known only by exporting it, and never changes. If the handle is meanwhile that of
 * another pool, which can't be exported, sharing fails, and the memory is staged. */
static bool is_pool_shareable(CUmemoryPool pool) {
    static _Thread_local struct {
        CUmemoryPool pool;
        bool is_shareable;
    } last;
    int fd = -1;
    if (last.pool != pool) {
        last.pool = pool;
        last.is_shareable = tb__pool_export(pool, &fd) == CUDA_SUCCESS;
        if (last.is_shareable)
            tb__fd_close(fd);
    }
    return last.is_shareable;
}

/* cuMemGetAddressRange needs a current context. The GPU has one already, since memory was allocated on it. */
static bool find_range(int ordinal, CUdeviceptr address, tb__memory_piece *out) {
    tb__gpu *gpu;
    if (tb__gpu_get(ordinal, &gpu) != TB_OK || tb__gpu_push(gpu) != TB_OK)
        return false;
    CUresult result = tb__cuda.cuMemGetAddressRange(&out->base, &out->nbytes, address);
    if (result == CUDA_SUCCESS && out->pool && is_pool_shareable(out->pool))
        out->kind = TB__SHARE_POOL;
    tb__gpu_pop();
    return result == CUDA_SUCCESS && out->nbytes > 0 && address - out->base < out->nbytes;
}

bool tb__memory_find_piece(CUdeviceptr address, tb__memory_piece *out) {
    attributes a;
    if (ask(address, &a) != CUDA_SUCCESS || a.memory_type != CU_MEMORYTYPE_DEVICE || a.ordinal >= TB__MAX_GPUS)
        return false;
    *out = (tb__memory_piece){.ordinal = (int)a.ordinal,
                              .is_vmm = !a.is_legacy && !a.mempool && !a.is_managed,
                              .pool = (CUmemoryPool)(uintptr_t)a.mempool, // NOLINT(performance-no-int-to-ptr)
                              .is_managed = a.is_managed != 0,
                              .id = a.id,
                              .kind = share_kind(&a)};
    return find_range(out->ordinal, address, out);
}

/* Mixes the ids of pieces: a tensor's memory has changed if any piece has. */
static uint64_t mix(uint64_t epoch, uint64_t id) {
    return (epoch ^ id) * 0x9e3779b97f4a7c15 ^ epoch >> 29;
}

/* VMM memory may have several pieces at consecutive addresses. Pieces of another GPU do not belong to it: this GPU may
 * have no access to them. */
static bool find_pieces(CUdeviceptr address, size_t nbytes, tb__memory *out) {
    tb__memory_piece first, next;
    if (!tb__memory_find_piece(address, &first))
        return false;
    CUdeviceptr last = address + nbytes, end = first.base + first.nbytes;
    uint64_t epoch = first.id;
    bool is_shareable = first.kind != TB__SHARE_NONE;
    if (last < address)
        return false;
    for (; end < last; end = next.base + next.nbytes) {
        if (!first.is_vmm || !tb__memory_find_piece(end, &next) || !next.is_vmm || next.base != end ||
            next.ordinal != first.ordinal)
            return false;
        is_shareable &= next.kind == first.kind;
        epoch = mix(epoch, next.id);
    }
    *out = (tb__memory){.base = (void *)first.base,
                        .nbytes = end - first.base,
                        .index = first.ordinal,
                        .epoch = epoch,
                        .is_shareable = is_shareable};
    return true;
}

/* ---- Memory of our own ------------------------------------------------------------------------------------------- */

/* An allocation. Freed ones are kept for the next: mapping and unmapping may wait for all work of the GPU. */
typedef struct block {
    CUdeviceptr base;
    size_t nbytes;
    tb__gpu *gpu;
    bool is_vmm, is_free;
    tb__memory memory; /* has as many bytes as were asked for */
} block;

/* Freed blocks that are kept for each GPU. */
enum { MOST_KEPT = 32 };
static const size_t most_kept_nbytes = (size_t)1 << 30;

static struct {
    pthread_mutex_t lock;
    TB_VEC(block *) blocks; /* by address */
    struct {
        size_t count, nbytes;
    } kept[TB__MAX_GPUS];
    _Atomic size_t nblocks;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Needs the lock. The first block that ends behind the address, which may not be in it. */
static size_t find_place(CUdeviceptr address) {
    size_t i = 0;
    TB_BISECT(i, pool.blocks.count, pool.blocks.item[i]->base + pool.blocks.item[i]->nbytes > address);
    return i;
}

/* Whether the address is in a block of ours; *is_found: and the block has all of these bytes. */
static bool find_block(CUdeviceptr address, size_t nbytes, tb__memory *out, bool *is_found) {
    if (atomic_load(&pool.nblocks) == 0)
        return false;
    pthread_mutex_lock(&pool.lock);
    size_t i = find_place(address);
    const block *b = i < pool.blocks.count && pool.blocks.item[i]->base <= address ? pool.blocks.item[i] : NULL;
    *is_found =
        b && !b->is_free && address - b->base <= b->memory.nbytes && nbytes <= b->memory.nbytes - (address - b->base);
    if (*is_found)
        *out = b->memory;
    pthread_mutex_unlock(&pool.lock);
    return b;
}

/* Used when the driver can't be called any more: in a forked child, after a failure, at the end of the program. An
 * address that is not mapped for the CPU counts as memory of a GPU: then its use fails with an error message, while the
 * host device would crash. */
static bool guess(const void *address, size_t nbytes, tb__memory *out) {
    *out = (tb__memory){.base = (void *)(uintptr_t)address, .nbytes = nbytes};
    return nbytes > 0 && tb__memory_check_mapped(address, 1) != TB_OK;
}

bool tb__cuda_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out) {
    bool is_found;
    attributes a;
    (void)device;
    if (!tb__cuda_is_in_use())
        return false;
    if (!tb__cuda_has_functions())
        return tb__cuda_was_initialised() && guess(address, nbytes, out);
    if (find_block((CUdeviceptr)address, nbytes, out, &is_found))
        return is_found;
    CUresult result = ask((CUdeviceptr)address, &a);
    if (result != CUDA_SUCCESS)
        return result != CUDA_ERROR_NOT_INITIALIZED && guess(address, nbytes, out);
    return a.memory_type == CU_MEMORYTYPE_DEVICE && find_pieces((CUdeviceptr)address, nbytes, out);
}

tb_status tb__cuda_list_ids(tb__device *device, const tb__memory *memory, tb__memory_ids *out) {
    CUdeviceptr at = (CUdeviceptr)memory->base, last = at + (memory->nbytes ? memory->nbytes : 1);
    tb__memory_piece p;
    (void)device;
    for (; at < last; at = p.base + p.nbytes) {
        if (!tb__memory_find_piece(at, &p))
            return TB_OK; /* its use fails with the device's message */
        if (!tb__vec_push(out, ((tb__memory_id){(const void *)p.base, p.id})))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* One call of the driver, which needs no context and waits for nothing. If it fails, so will the memory's use. */
tb__memory_change tb__cuda_check_id(tb__device *device, const tb__memory_id *id) {
    uint64_t type = 0, now = 0;
    CUpointer_attribute what[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
    void *where[] = {&type, &now};
    (void)device;
    if (!tb__cuda_has_functions() ||
        tb__cuda.cuPointerGetAttributes(2, what, where, (CUdeviceptr)id->base) != CUDA_SUCCESS)
        return TB__MEMORY_SAME;
    return type != CU_MEMORYTYPE_DEVICE ? TB__MEMORY_GONE : now == id->id ? TB__MEMORY_SAME : TB__MEMORY_REMAPPED;
}

tb_status tb__vmm_grant(CUdeviceptr base, size_t nbytes, const tb__gpu *gpu, CUmemAccess_flags flags) {
    CUmemAccessDesc access[TB__MAX_GPUS] = {{.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal}, .flags = flags}};
    size_t n = 1;
    for (int i = 0; i < TB__MAX_GPUS; i++) {
        const tb__gpu *other = tb__gpu_if_used(i);
        if (other && i != gpu->ordinal && atomic_load(&other->peer_access[gpu->ordinal]) == CUDA_SUCCESS)
            access[n++] = (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, i}, .flags = flags};
    }
    CUresult result = tb__cuda.cuMemSetAccess(base, nbytes, access, n);
    if (result != CUDA_SUCCESS && n > 1) /* other GPUs try again when they need it */
        result = tb__cuda.cuMemSetAccess(base, nbytes, access, 1);
    return result == CUDA_SUCCESS ? TB_OK
                                  : tb__cuda_fail(result, "access to %zu bytes of memory on %s", nbytes, gpu->unit);
}

static tb_status refuse_access(const tb__gpu *gpu, const tb__memory_piece *p, CUresult result) {
    if (p->pool)
        return tb__fail(TB_REFUSED, "%s can't access memory of a pool (cudaMallocAsync) on %s", gpu->unit,
                        tb__gpu_unit_name(p->ordinal));
    return tb__fail(TB_REFUSED, "%s can't access memory of %s: %s", gpu->unit, tb__gpu_unit_name(p->ordinal),
                    tb__cuda_error_name(result));
}

/* By their attributes, memory that was imported through CUDA IPC and VMM memory look alike; only the latter has an
 * allocation handle. */
static bool is_mapped_by_vmm(const tb__memory_piece *p) {
    CUmemGenericAllocationHandle handle;
    if (!p->is_vmm || tb__cuda.cuMemRetainAllocationHandle(&handle, (void *)p->base) != CUDA_SUCCESS)
        return false;
    tb__cuda.cuMemRelease(handle);
    return true;
}

/* Of VMM memory each piece has rights of its own, also that of the program's own mappings. */
static tb_status give_access_to_piece(const tb__gpu *gpu, const tb__memory_piece *p, bool is_written) {
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal};
    CUmemAccess_flags wanted = is_written ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    CUmemAccessDesc access = {.location = location, .flags = wanted};
    unsigned long long has = 0;
    if (p->is_managed)
        return TB_OK;
    if (!is_mapped_by_vmm(p)) {
        CUresult enabled = p->pool ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : gpu->peer_access[p->ordinal];
        return enabled == CUDA_SUCCESS ? TB_OK : refuse_access(gpu, p, enabled);
    }
    CUresult result = tb__cuda.cuMemGetAccess(&has, &location, p->base);
    if (result == CUDA_SUCCESS && (has & wanted) == wanted)
        return TB_OK;
    result = tb__cuda.cuMemSetAccess(p->base, p->nbytes, &access, 1);
    if (result != CUDA_SUCCESS && !is_written) { /* not every driver has read-only access */
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        result = tb__cuda.cuMemSetAccess(p->base, p->nbytes, &access, 1);
    }
    return result == CUDA_SUCCESS ? TB_OK : refuse_access(gpu, p, result);
}

tb_status tb__memory_give_access(const tb__gpu *gpu, CUdeviceptr address, size_t nbytes, bool is_written) {
    tb__memory_piece p;
    for (CUdeviceptr at = address, last = address + (nbytes ? nbytes : 1); at < last; at = p.base + p.nbytes) {
        if (!tb__memory_find_piece(at, &p))
            return tb__fail(TB_INVALID, "the memory at 0x%llx is gone", at);
        if (p.ordinal != gpu->ordinal)
            TB_TRY(give_access_to_piece(gpu, &p, is_written));
    }
    return TB_OK;
}

tb_status tb__cuda_try_access(tb__device *device, int index, const void *address, size_t nbytes) {
    tb__gpu *gpu;
    (void)device;
    TB_TRY(tb__gpu_get(index, &gpu));
    return tb__memory_give_access(gpu, (CUdeviceptr)address, nbytes, false);
}

void tb__memory_grant_to_new_gpu(void) {
    pthread_mutex_lock(&pool.lock);
    for (size_t i = 0; i < pool.blocks.count; i++) {
        const block *b = pool.blocks.item[i];
        if (b->is_vmm && tb__gpu_push(b->gpu) == TB_OK) {
            (void)tb__vmm_grant(b->base, b->nbytes, b->gpu, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
            tb__gpu_pop();
        }
    }
    pthread_mutex_unlock(&pool.lock);
}

/* Fabric handles work where the machine is set up for them, which only a try shows. */
static CUresult create_handle(const tb__gpu *gpu, size_t nbytes, CUmemGenericAllocationHandle *out) {
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal},
        .requestedHandleTypes =
            (CUmemAllocationHandleType)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC)};
    CUresult result = tb__cuda.cuMemCreate(out, nbytes, &prop, 0);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY)
        return result;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return tb__cuda.cuMemCreate(out, nbytes, &prop, 0);
}

/* The mapping alone keeps the memory. */
static CUresult map_new(size_t nbytes, CUmemGenericAllocationHandle handle, CUdeviceptr *out) {
    CUresult result = tb__cuda.cuMemAddressReserve(out, nbytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = tb__cuda.cuMemMap(*out, nbytes, 0, handle, 0);
    if (result != CUDA_SUCCESS)
        tb__cuda.cuMemAddressFree(*out, nbytes);
    return result;
}

static void free_memory(CUdeviceptr base, size_t nbytes, bool is_vmm) {
    if (is_vmm) {
        tb__cuda.cuMemUnmap(base, nbytes);
        tb__cuda.cuMemAddressFree(base, nbytes);
    } else {
        tb__cuda.cuMemFree(base);
    }
}

static tb_status map_block(block *b, CUmemGenericAllocationHandle handle) {
    CUresult result = map_new(b->nbytes, handle, &b->base);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "addresses for %zu bytes of memory on %s", b->nbytes, b->gpu->unit);
    tb_status status = tb__vmm_grant(b->base, b->nbytes, b->gpu, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    if (status != TB_OK)
        free_memory(b->base, b->nbytes, true);
    return status;
}

static bool has_vmm(const tb__gpu *gpu) {
    int has = 0;
    return tb__cuda.cuDeviceGetAttribute(&has, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, gpu->device) ==
               CUDA_SUCCESS &&
           has;
}

static size_t granularity(const tb__gpu *gpu) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal},
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    size_t nbytes;
    if (tb__cuda.cuMemGetAllocationGranularity(&nbytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS)
        return (size_t)2 << 20;
    return nbytes;
}

/* VMM memory, if it is asked for and can be shared, else that of cuMemAlloc. */
static tb_status fill_block(block *b, bool may_be_vmm) {
    CUmemGenericAllocationHandle handle;
    CUresult result =
        may_be_vmm && has_vmm(b->gpu) ? create_handle(b->gpu, b->nbytes, &handle) : CUDA_ERROR_NOT_SUPPORTED;
    b->is_vmm = result == CUDA_SUCCESS;
    if (b->is_vmm) {
        tb_status status = map_block(b, handle);
        tb__cuda.cuMemRelease(handle);
        return status;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        result = tb__cuda.cuMemAlloc(&b->base, b->nbytes);
    return result == CUDA_SUCCESS ? TB_OK : tb__cuda_fail(result, "%zu bytes of memory on %s", b->nbytes, b->gpu->unit);
}

/* With the lock held; the context is current. */
static tb_status create_block(tb__gpu *gpu, size_t nbytes, bool may_be_vmm, block **out) {
    block *b = tb__calloc(1, sizeof *b);
    tb__memory_piece piece;
    if (!b)
        return TB_NO_MEMORY;
    *b = (block){.gpu = gpu, .nbytes = nbytes};
    tb_status status = fill_block(b, may_be_vmm);
    if (status == TB_OK && !tb__memory_find_piece(b->base, &piece)) {
        free_memory(b->base, nbytes, b->is_vmm);
        status = tb__fail(TB_IO, "the driver does not know memory that it has allocated on %s", gpu->unit);
    }
    if (status != TB_OK) {
        free(b);
        return status;
    }
    b->memory = (tb__memory){.base = (void *)b->base,
                             .index = gpu->ordinal,
                             .epoch = piece.id,
                             .is_shareable = piece.kind != TB__SHARE_NONE};
    *out = b;
    return TB_OK;
}

/* With the lock held. */
static bool insert_block(block *b) {
    size_t i = find_place(b->base);
    if (!tb__vec_reserve(&pool.blocks, 1))
        return false;
    memmove(&pool.blocks.item[i + 1], &pool.blocks.item[i], (pool.blocks.count - i) * sizeof *pool.blocks.item);
    pool.blocks.item[i] = b;
    atomic_store(&pool.nblocks, ++pool.blocks.count);
    return true;
}

/* With the lock held. The smallest free block that has room, without wasting more than half of it. */
static block *take_kept(const tb__gpu *gpu, size_t nbytes, bool may_be_vmm) {
    block *best = NULL;
    for (size_t i = 0; i < pool.blocks.count; i++) {
        block *b = pool.blocks.item[i];
        if (b->is_free && b->gpu == gpu && (may_be_vmm || !b->is_vmm) && b->nbytes >= nbytes &&
            b->nbytes / 2 <= nbytes && (!best || b->nbytes < best->nbytes))
            best = b;
    }
    if (best) {
        best->is_free = false;
        pool.kept[gpu->ordinal].count--;
        pool.kept[gpu->ordinal].nbytes -= best->nbytes;
    }
    return best;
}

/* With the lock held. */
static void destroy_block(size_t i) {
    block *b = pool.blocks.item[i];
    if (tb__gpu_push(b->gpu) == TB_OK) {
        free_memory(b->base, b->nbytes, b->is_vmm);
        tb__gpu_pop();
    }
    memmove(&pool.blocks.item[i], &pool.blocks.item[i + 1], (pool.blocks.count - i - 1) * sizeof *pool.blocks.item);
    atomic_store(&pool.nblocks, --pool.blocks.count);
    free(b);
}

/* Needs the lock. Frees all kept blocks of a GPU. Returns whether there were any. */
static bool destroy_kept(const tb__gpu *gpu) {
    bool did = false;
    for (size_t i = pool.blocks.count; i-- > 0;) {
        if (!pool.blocks.item[i]->is_free || pool.blocks.item[i]->gpu != gpu)
            continue;
        pool.kept[gpu->ordinal].count--;
        pool.kept[gpu->ordinal].nbytes -= pool.blocks.item[i]->nbytes;
        destroy_block(i);
        did = true;
    }
    return did;
}

/* Needs the lock, so that a new GPU finds the block in the list, or the block is granted to it. */
static tb_status add_block(tb__gpu *gpu, size_t nbytes, bool may_be_vmm, block **out) {
    tb_status status = create_block(gpu, nbytes, may_be_vmm, out);
    if (status == TB_NO_MEMORY && destroy_kept(gpu))
        status = create_block(gpu, nbytes, may_be_vmm, out);
    if (status != TB_OK || insert_block(*out))
        return status;
    free_memory((*out)->base, nbytes, (*out)->is_vmm);
    free(*out);
    return TB_NO_MEMORY;
}

static tb_status alloc_block(int index, size_t nbytes, bool may_be_vmm, void **out) {
    tb__gpu *gpu;
    TB_TRY(tb__gpu_get(index, &gpu));
    if (nbytes > SIZE_MAX / 4)
        return tb__fail(TB_NO_MEMORY, "%zu bytes are more than %s has", nbytes, gpu->unit);
    TB_TRY(tb__gpu_push(gpu));
    size_t whole = (size_t)tb__align((int64_t)(nbytes ? nbytes : 1), (int64_t)granularity(gpu));
    pthread_mutex_lock(&pool.lock);
    block *b = take_kept(gpu, whole, may_be_vmm);
    tb_status status = b ? TB_OK : add_block(gpu, whole, may_be_vmm, &b);
    if (status == TB_OK) {
        b->memory.nbytes = nbytes;
        *out = (void *)b->base;
    }
    pthread_mutex_unlock(&pool.lock);
    tb__gpu_pop();
    return status;
}

tb_status tb__cuda_alloc(tb__device *device, int index, size_t nbytes, void **out) {
    (void)device;
    return alloc_block(index, nbytes, true, out);
}

/* Before 1.22, UCX does not use CUDA IPC for VMM memory whose handles are descriptors, and does not say so. */
tb_status tb__cuda_alloc_for_transport(tb__device *device, int index, size_t nbytes, void **out) {
    (void)device;
    return alloc_block(index, nbytes, false, out);
}

void tb__cuda_free(tb__device *device, void *address) {
    (void)device;
    if (!address || tb__cuda_is_inherited())
        return;
    pthread_mutex_lock(&pool.lock);
    size_t i = find_place((CUdeviceptr)address);
    if (i < pool.blocks.count && pool.blocks.item[i]->base == (CUdeviceptr)address && !pool.blocks.item[i]->is_free) {
        block *b = pool.blocks.item[i];
        int gpu = b->gpu->ordinal;
        if (pool.kept[gpu].count < MOST_KEPT && b->nbytes <= most_kept_nbytes - pool.kept[gpu].nbytes) {
            b->is_free = true;
            pool.kept[gpu].count++;
            pool.kept[gpu].nbytes += b->nbytes;
        } else {
            destroy_block(i);
        }
    }
    pthread_mutex_unlock(&pool.lock);
}
