/* Memory of the fake driver's GPUs.
 *
 * A storage is a memfd. Addresses are reserved without access rights: where programs see them, and as an alias for each
 * GPU, into which storages are mapped, with the access that the GPU has. Addresses are never used again. */
#include "inside.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULE   ((size_t)2 << 20)
#define FILE_NAME "fake-cuda"

typedef struct storage {
    object_kind kind;
    int fd;
    size_t nbytes;
    fake_gpu *gpu;
    bool is_import; /* can't be exported again */
    int nusers;     /* handles and mappings */
    unsigned long long handle_types;
    CUmemoryPool pool; /* NULL: of none */
} storage;

/* Addresses. */
typedef struct space {
    uint64_t base;
    char *alias[MOST_GPUS];
    size_t nbytes;
    LIST_ENTRY(space) link;
} space;

/* A storage at addresses. */
typedef struct piece {
    uint64_t base;
    size_t nbytes;
    storage *storage;
    bool is_vmm;
    uint64_t id;
    uint32_t readers, writers; /* GPUs */
    LIST_ENTRY(piece) link;
} piece;

static LIST_HEAD(space_list, space) spaces;
static LIST_HEAD(piece_list, piece) pieces;

uint64_t next_memory_id(void) {
    static uint64_t last_id;
    return ++last_id;
}

/* ---- Storages ---------------------------------------------------------------------------------------------------- */

static storage *make_storage(fake_gpu *gpu, int fd, size_t nbytes) {
    storage *s = make_object(sizeof *s);
    *s = (storage){.kind = STORAGE, .fd = fd, .nbytes = nbytes, .gpu = gpu, .nusers = 1};
    return s;
}

/* With the lock held. NULL: the GPU has no more memory. */
static storage *create_storage(fake_gpu *gpu, size_t nbytes) {
    if (nbytes > fake.most_nbytes - gpu->nbytes_used)
        return NULL;
    char name[sizeof FILE_NAME + 8];
    snprintf(name, sizeof name, FILE_NAME "-%d", physical(gpu->ordinal));
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes) != 0)
        die("memfd: %s", strerror(errno));
    gpu->nbytes_used += nbytes;
    return make_storage(gpu, fd, nbytes);
}

static void drop_storage(storage *s) {
    if (--s->nusers > 0)
        return;
    if (!s->is_import)
        s->gpu->nbytes_used -= s->nbytes;
    close(s->fd);
    s->kind = DEAD;
}

/* Whether the descriptor is a storage's, whose name says which GPU it is on; *ordinal is this process's. */
static bool is_storage_file(int fd, size_t *nbytes, int *ordinal) {
    char path[64], name[64] = "";
    struct stat info;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 || strncmp(name, "/memfd:" FILE_NAME, 7 + strlen(FILE_NAME)) != 0 ||
        sscanf(name + 7 + strlen(FILE_NAME), "-%d", ordinal) != 1 || (*ordinal = visible(*ordinal)) < 0 ||
        fstat(fd, &info) != 0)
        return false;
    *nbytes = (size_t)info.st_size;
    return true;
}

static handle_bytes describe_handle(const storage *s) {
    struct stat info;
    fstat(s->fd, &info);
    return (handle_bytes){.pid = (int)getpid(), .fd = s->fd, .gpu = physical(s->gpu->ordinal), .inode = info.st_ino};
}

/* NULL: its process is gone, or has closed it. */
static storage *open_handle(const void *bytes) {
    handle_bytes h;
    char path[64];
    struct stat info;
    size_t nbytes;
    int ordinal;
    memcpy(&h, bytes, sizeof h);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    if (visible(h.gpu) < 0)
        return NULL;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (!is_storage_file(fd, &nbytes, &ordinal) || fstat(fd, &info) != 0 || info.st_ino != h.inode) {
        close(fd);
        return NULL;
    }
    storage *s = make_storage(&fake.gpus[ordinal], fd, nbytes);
    s->is_import = true;
    return s;
}

/* ---- Addresses --------------------------------------------------------------------------------------------------- */

static char *reserve(size_t nbytes) {
    char *p = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, nbytes, MADV_DONTFORK);
    madvise(p, nbytes, MADV_DONTDUMP);
    return p;
}

/* Aligned as granules are. */
static space *make_space(size_t nbytes) {
    char *seen = reserve(nbytes + GRANULE);
    if (!seen)
        return NULL;
    space *s = get(sizeof *s);
    *s = (space){.base = ((uint64_t)seen + GRANULE - 1) / GRANULE * GRANULE, .nbytes = nbytes};
    for (int i = 0; i < fake.ngpus; i++) {
        s->alias[i] = reserve(nbytes);
        if (!s->alias[i])
            die("there are no addresses left");
    }
    LIST_INSERT_HEAD(&spaces, s, link);
    return s;
}

static void free_space(space *s) {
    for (int i = 0; i < fake.ngpus; i++)
        munmap(s->alias[i], s->nbytes);
    LIST_REMOVE(s, link);
    free(s);
}

static space *find_space(uint64_t address) {
    space *s = LIST_FIRST(&spaces);
    while (s && address - s->base >= s->nbytes)
        s = LIST_NEXT(s, link);
    return s;
}

static piece *find_piece(uint64_t address) {
    piece *p = LIST_FIRST(&pieces);
    while (p && address - p->base >= p->nbytes)
        p = LIST_NEXT(p, link);
    return p;
}

static char *alias_of(uint64_t address, int gpu) {
    const space *s = find_space(address);
    return s->alias[gpu] + (address - s->base);
}

static piece *map_storage(uint64_t base, size_t nbytes, storage *s, bool is_vmm) {
    for (int i = 0; i < fake.ngpus; i++) {
        char *at = alias_of(base, i);
        if (mmap(at, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, s->fd, 0) == MAP_FAILED)
            die("mmap: %s", strerror(errno));
        madvise(at, nbytes, MADV_DONTFORK);
    }
    piece *p = get(sizeof *p);
    *p = (piece){.base = base, .nbytes = nbytes, .storage = s, .is_vmm = is_vmm, .id = next_memory_id()};
    LIST_INSERT_HEAD(&pieces, p, link);
    s->nusers++;
    return p;
}

static void set_access(const piece *p) {
    uint32_t peers = p->is_vmm || p->storage->pool ? 0 : p->storage->gpu->peers;
    for (int i = 0; i < fake.ngpus; i++) {
        int rights = (p->writers | peers) >> i & 1 ? PROT_READ | PROT_WRITE
                     : p->readers >> i & 1         ? PROT_READ
                                                   : PROT_NONE;
        if (mprotect(alias_of(p->base, i), p->nbytes, rights) != 0)
            die("mprotect: %s", strerror(errno));
    }
}

void give_peers_access(void) {
    for (const piece *p = LIST_FIRST(&pieces); p; p = LIST_NEXT(p, link))
        set_access(p);
}

static void unmap_storage(piece *p) {
    if (is_in_use_by_kernel(p->base, p->base + p->nbytes))
        die("memory at 0x%llx is freed while a kernel uses it", (unsigned long long)p->base);
    for (int i = 0; i < fake.ngpus; i++) {
        if (mmap(alias_of(p->base, i), p->nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                 -1, 0) == MAP_FAILED)
            die("mmap: %s", strerror(errno));
    }
    drop_storage(p->storage);
    LIST_REMOVE(p, link);
    free(p);
}

/* Memory of cuMemAlloc, and of cuIpcOpenMemHandle. */
static uint64_t place(storage *s) {
    space *at = make_space(s->nbytes);
    if (!at)
        return 0;
    piece *p = map_storage(at->base, s->nbytes, s, false);
    p->readers = p->writers = 1u << s->gpu->ordinal;
    set_access(p);
    drop_storage(s); /* the mapping has it now */
    return at->base;
}

static void displace(uint64_t address, const char *function, bool is_import) {
    piece *p = find_piece(address);
    if (!p || p->base != address || p->is_vmm || (p->storage->is_import && !p->storage->pool) != is_import)
        die("%s of what it can't free", function);
    unmap_storage(p);
    free_space(find_space(address));
}

void *reach(uint64_t address, int gpu) {
    const piece *p = find_piece(address);
    if (p) {
        uint32_t users = p->readers | p->writers;
        if (!p->is_vmm && !p->storage->pool)
            users |= p->storage->gpu->peers;
        if (!(users >> gpu & 1))
            die("GPU %d has no access to memory at 0x%llx", gpu, (unsigned long long)address);
        return alias_of(address, gpu);
    }
    if (!is_pinned((void *)address))
        die("a kernel uses 0x%llx, which is neither memory of a GPU nor pinned", (unsigned long long)address);
    return (void *)address;
}

void *look(const void *address, size_t nbytes) {
    lock();
    const piece *p = find_piece((uintptr_t)address);
    if (p && (uintptr_t)address + nbytes > p->base + p->nbytes)
        die("%zu bytes at %p are more than the memory of a GPU there", nbytes, address);
    void *at = p ? alias_of((uintptr_t)address, p->storage->gpu->ordinal) : NULL;
    unlock();
    return at;
}

/* ---- Pools --------------------------------------------------------------------------------------------------------
 */

uint64_t place_in_pool(CUmemoryPool pool, size_t nbytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    storage *s = create_storage(pool->gpu, (nbytes + page - 1) / page * page);
    if (s)
        s->pool = pool;
    return s ? place(s) : 0;
}

CUmemoryPool describe_in_pool(uint64_t address, handle_bytes *out) {
    const piece *p = find_piece(address);
    if (!p || p->base != address || !p->storage->pool || p->storage->is_import)
        return NULL;
    *out = describe_handle(p->storage);
    return p->storage->pool;
}

uint64_t import_to_pool(CUmemoryPool pool, const handle_bytes *handle) {
    storage *s = open_handle(handle);
    if (s)
        s->pool = pool;
    return s ? place(s) : 0;
}

/* ---- cuMemAlloc, IPC --------------------------------------------------------------------------------------------- */

CUresult cuMemAlloc(CUdeviceptr *out, size_t nbytes) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    storage *s = create_storage(current_gpu(), (nbytes + page - 1) / page * page);
    *out = s ? place(s) : 0;
    unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    lock();
    wait_for_parked_streams();
    displace(address, "cuMemFree", false);
    unlock();
    return CUDA_SUCCESS;
}

/* At once: it is not in the order of the stream. */
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    ENTER(NEEDS_CONTEXT | IS_UNSAFE);
    (void)stream;
    lock();
    displace(address, "cuMemFreeAsync", false);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT);
    lock();
    const piece *p = find_piece(address);
    bool is_good = p && !p->is_vmm && !p->storage->is_import && !p->storage->pool;
    if (is_good) {
        handle_bytes h = describe_handle(p->storage);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &h, sizeof h);
    }
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    handle_bytes h;
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    memcpy(&h, &handle, sizeof h);
    if (h.pid == (int)getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    storage *s = open_handle(&handle);
    *out = s ? place(s) : 0;
    unlock();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT);
    lock();
    displace(address, "cuIpcCloseMemHandle", true);
    unlock();
    return CUDA_SUCCESS;
}

/* ---- VMM --------------------------------------------------------------------------------------------------------- */

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    ENTER(NEEDS_INIT);
    (void)prop;
    (void)option;
    *nbytes = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t nbytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    ENTER(NEEDS_INIT | IS_UNSAFE);
    (void)flags;
    if (getenv("FAKE_CUDA_NO_VMM"))
        return CUDA_ERROR_NOT_SUPPORTED;
    if ((prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) && !getenv("FAKE_CUDA_FABRIC"))
        return CUDA_ERROR_NOT_PERMITTED;
    if (nbytes == 0 || nbytes % GRANULE || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        prop->location.id >= fake.ngpus)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    storage *s = create_storage(&fake.gpus[prop->location.id], nbytes);
    if (s)
        s->handle_types = prop->requestedHandleTypes;
    *out = (CUmemGenericAllocationHandle)s;
    unlock();
    return s ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static storage *storage_of(CUmemGenericAllocationHandle handle) {
    return check_handle((const void *)handle, STORAGE, "a handle of memory");
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(NEEDS_INIT);
    lock();
    drop_storage(storage_of(handle));
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    ENTER(NEEDS_INIT);
    lock();
    piece *p = find_piece((uint64_t)address);
    bool is_good = p && p->is_vmm;
    if (is_good) {
        p->storage->nusers++;
        *out = (CUmemGenericAllocationHandle)p->storage;
    }
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    ENTER(NEEDS_INIT);
    (void)flags;
    lock();
    const storage *s = storage_of(handle);
    bool is_good = (s->handle_types & type) && !s->is_import;
    int fd = -1;
    if (is_good && type == CU_MEM_HANDLE_TYPE_FABRIC) {
        handle_bytes h = describe_handle(s);
        memset(out, 0, CU_IPC_HANDLE_SIZE);
        memcpy(out, &h, sizeof h);
    } else if (is_good) {
        fd = dup(s->fd);
        is_good = fd >= 0;
        memcpy(out, &fd, sizeof fd);
    }
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
                                        CUmemAllocationHandleType type) {
    ENTER(NEEDS_INIT);
    storage *s = NULL;
    size_t nbytes;
    int ordinal;
    lock();
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        s = open_handle(handle);
    } else if (is_storage_file((int)(intptr_t)handle, &nbytes, &ordinal)) {
        s = make_storage(&fake.gpus[ordinal], fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0), nbytes);
        s->is_import = true;
    }
    *out = (CUmemGenericAllocationHandle)s;
    unlock();
    return s ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t nbytes, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    ENTER(NEEDS_INIT);
    (void)alignment;
    (void)address;
    (void)flags;
    if (nbytes == 0 || nbytes % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    const space *s = make_space(nbytes);
    unlock();
    if (!s)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = s->base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    ENTER(NEEDS_INIT);
    lock();
    space *s = find_space(address);
    if (!s || s->base != address || s->nbytes != nbytes)
        die("addresses are freed that were not reserved");
    for (const piece *p = LIST_FIRST(&pieces); p; p = LIST_NEXT(p, link)) {
        if (p->base >= address && p->base < address + nbytes)
            die("addresses are freed at which memory is mapped");
    }
    free_space(s);
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER(NEEDS_INIT);
    (void)flags;
    lock();
    storage *s = storage_of(handle);
    const space *at = find_space(address);
    bool is_good = at && nbytes <= at->nbytes - (address - at->base) && offset == 0 && nbytes % GRANULE == 0 &&
                   !find_piece(address) && !find_piece(address + nbytes - 1);
    bool is_there = nbytes <= s->nbytes;
    if (is_good && is_there)
        map_storage(address, nbytes, s, true);
    unlock();
    return !is_good ? CUDA_ERROR_INVALID_VALUE : is_there ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/* Whole pieces only. */
CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    ENTER(NEEDS_INIT);
    lock();
    for (CUdeviceptr end = address + nbytes; address < end;) {
        piece *p = find_piece(address);
        if (!p || p->base != address || p->nbytes > end - address || !p->is_vmm)
            die("memory is unmapped that is not mapped, or a part of a piece");
        address += p->nbytes;
        unmap_storage(p);
    }
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access, size_t count) {
    ENTER(NEEDS_INIT);
    for (size_t i = 0; i < count; i++) {
        if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ && getenv("FAKE_CUDA_NO_READ_ONLY"))
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    lock();
    for (CUdeviceptr end = address + nbytes; address < end;) {
        piece *p = find_piece(address);
        if (!p || p->base != address || p->nbytes > end - address || !p->is_vmm)
            die("access to memory that is not mapped");
        for (size_t i = 0; i < count; i++) {
            if (!can_be_peers(access[i].location.id, p->storage->gpu->ordinal)) {
                unlock();
                return CUDA_ERROR_INVALID_DEVICE;
            }
        }
        for (size_t i = 0; i < count; i++) {
            uint32_t bit = 1u << access[i].location.id;
            p->readers = access[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? p->readers | bit : p->readers & ~bit;
            p->writers = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? p->writers | bit : p->writers & ~bit;
        }
        set_access(p);
        address += p->nbytes;
    }
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    ENTER(NEEDS_INIT);
    lock();
    const piece *p = find_piece(address);
    uint32_t bit = 1u << location->id;
    bool is_good = p && p->is_vmm;
    if (is_good)
        *flags = p->writers & bit   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : p->readers & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                    : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- What is known of addresses ---------------------------------------------------------------------------------- */

static void put_attribute(CUpointer_attribute what, void *out, const piece *p, const pinned_range *r) {
    switch (what) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = p ? CU_MEMORYTYPE_DEVICE : r ? CU_MEMORYTYPE_HOST : 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = p ? p->storage->gpu->ordinal : r ? 0 : -2;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)out = p ? p->id : r ? r->id : 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(bool *)out = p && !p->is_vmm && !p->storage->is_import && !p->storage->pool;
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)out = p ? p->storage->handle_types : 0;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)out = p ? p->storage->pool : NULL;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(bool *)out = false;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: /* of VMM memory the driver tells the reservation's, which helps nobody
                                                 */
        if (p && p->is_vmm)
            die("the range of an address of VMM memory is asked for");
        *(CUdeviceptr *)out = p ? p->base : r ? r->base : 0;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = p ? p->nbytes : r ? r->nbytes : 0;
        break;
    default:
        die("an attribute of pointers that the fake driver does not know");
    }
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *what, void **out, CUdeviceptr address) {
    ENTER(NEEDS_INIT);
    for (int i = 0; i < fake.ngpus; i++) {
        if (fake.gpus[i].error != CUDA_SUCCESS)
            return fake.gpus[i].error;
    }
    lock();
    for (unsigned i = 0; i < count; i++)
        put_attribute(what[i], out[i], find_piece(address), find_pinned(address));
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    ENTER(NEEDS_CONTEXT);
    lock();
    const piece *p = find_piece(address);
    if (p) {
        *base = p->base;
        *nbytes = p->nbytes;
    }
    unlock();
    return p ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- Copies that the caller waits for ---------------------------------------------------------------------------- */

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t nbytes) {
    ENTER(NEEDS_CONTEXT);
    lock();
    bool is_good = !is_partly_pinned(from, nbytes);
    if (nbytes && is_good)
        memcpy(reach(to, current_gpu()->ordinal), from, nbytes);
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t nbytes) {
    ENTER(NEEDS_CONTEXT);
    lock();
    bool is_good = !is_partly_pinned(to, nbytes);
    if (nbytes && is_good)
        memcpy(to, reach(from, current_gpu()->ordinal), nbytes);
    unlock();
    return is_good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
