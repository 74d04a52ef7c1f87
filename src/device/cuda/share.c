/* Sharing memory of GPUs with other processes. A key has the GPU's UUID, how the memory is shared, and its pieces;
 * descriptors travel beside it. The receiving process imports the pieces to consecutive addresses, once, however many
 * mappings there are. Keys that are received are not trusted: sizes and offsets are checked before the driver sees
 * them, and the driver checks that each piece is at least as long. */
#include "device/cuda/cuda.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/queue.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PIECES = 1 << 16, HANDLE_NBYTES = 64 };
static const uint64_t most_nbytes = (uint64_t)1 << 46; /* of one memory; fewer than a GPU has addresses */

_Static_assert(sizeof(CUipcMemHandle) == HANDLE_NBYTES && sizeof(CUmemFabricHandle) == HANDLE_NBYTES &&
                   sizeof(CUmemPoolPtrExportData) == HANDLE_NBYTES,
               "handles of all kinds have one size in keys");

/* Identifies the memory. */
typedef struct identity {
    uint64_t process, base, nbytes, epoch;
    uint32_t kind;
    bool is_writable; /* as it is mapped; false if there is no choice */
} identity;

typedef struct piece {
    unsigned char handle[HANDLE_NBYTES]; /* not of kind TB__SHARE_FD */
    uint64_t offset, nbytes;             /* in the memory; the last one may reach beyond it */
} piece;

/* A key that was received. */
typedef struct parsed_key {
    identity id;
    CUuuid uuid;
    piece *pieces;
    size_t npieces;
    uint64_t nbytes; /* of the pieces */
} parsed_key;

/* Memory of another process at addresses of this one. */
typedef struct import {
    identity id;
    tb__gpu *gpu;
    CUdeviceptr base;
    size_t nreserved, nmapped; /* bytes, from the base on */
    CUmemoryPool pool;         /* of kind TB__SHARE_POOL */
    CUmemAccess_flags flags;
    size_t nmappings;
    LIST_ENTRY(import) link;
} import;

typedef struct cuda_mapping {
    tb__mapping base;
    import *import; /* NULL: memory of this process itself */
} cuda_mapping;

static struct {
    pthread_mutex_t lock;
    LIST_HEAD(import_list, import) imports;
    bool has_no_read_only; /* the driver gives no read-only access */
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool is_vmm(uint32_t kind) {
    return kind == TB__SHARE_FD || kind == TB__SHARE_FABRIC;
}

/* ---- Sharing ----------------------------------------------------------------------------------------------------- */

/* The driver creates descriptors that are inherited across exec. */
static void keep_fd(int fd) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    tb__fd_mark(fd);
}

static tb_status add_fd(int fd, tb__memory_key *key) {
    if (tb__vec_push(&key->fds, fd))
        return TB_OK;
    tb__fd_close(fd);
    return TB_NO_MEMORY;
}

static tb_status export_fd(CUmemGenericAllocationHandle handle, tb__memory_key *key) {
    int fd = -1;
    CUresult result = tb__cuda.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "a descriptor of GPU memory, beside %zu others", key->fds.count);
    keep_fd(fd);
    return add_fd(fd, key);
}

CUresult tb__pool_export(CUmemoryPool pool, int *fd) {
    CUresult result = tb__cuda.cuMemPoolExportToShareableHandle(fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result == CUDA_SUCCESS)
        keep_fd(*fd);
    return result;
}

/* The driver exports memory of a pool only after the pool itself. */
static tb_status export_from_pool(const tb__memory_piece *p, tb__memory_key *key) {
    CUmemPoolPtrExportData data = {0};
    int fd = -1;
    CUresult result = tb__pool_export(p->pool, &fd);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "a descriptor of the pool that memory at 0x%llx is of", p->base);
    TB_TRY(add_fd(fd, key));
    result = tb__cuda.cuMemPoolExportPointer(&data, p->base);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuMemPoolExportPointer of memory at 0x%llx", p->base);
    tb__pack_raw(&key->bytes, &data, sizeof data);
    return TB_OK;
}

/* Puts the piece's handle into the key. */
static tb_status export_piece(const tb__memory_piece *p, tb__memory_key *key) {
    CUmemGenericAllocationHandle handle;
    unsigned char bytes[HANDLE_NBYTES] = {0};
    if (p->kind == TB__SHARE_LEGACY) {
        CUresult result = tb__cuda.cuIpcGetMemHandle((CUipcMemHandle *)bytes, p->base);
        if (result != CUDA_SUCCESS)
            return tb__cuda_fail(result, "cuIpcGetMemHandle of memory at 0x%llx", p->base);
        tb__pack_raw(&key->bytes, bytes, sizeof bytes);
        return TB_OK;
    }
    if (p->kind == TB__SHARE_POOL)
        return export_from_pool(p, key);
    CUresult result = tb__cuda.cuMemRetainAllocationHandle(&handle, (void *)p->base);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuMemRetainAllocationHandle of memory at 0x%llx", p->base);
    tb_status status = TB_OK;
    if (p->kind == TB__SHARE_FD) {
        status = export_fd(handle, key);
    } else {
        result = tb__cuda.cuMemExportToShareableHandle(bytes, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
        if (result != CUDA_SUCCESS)
            status = tb__cuda_fail(result, "a fabric handle of memory at 0x%llx", p->base);
        tb__pack_raw(&key->bytes, bytes, sizeof bytes);
    }
    tb__cuda.cuMemRelease(handle);
    return status;
}

/* The context is current. */
static tb_status export_pieces(const tb__memory *memory, const tb__gpu *gpu, tb__memory_key *key) {
    CUdeviceptr first = (CUdeviceptr)memory->base, at = first;
    tb__share_kind kind = TB__SHARE_NONE;
    for (size_t n = 0; n == 0 || at - first < memory->nbytes; n++) {
        tb__memory_piece p;
        if (!tb__memory_find_piece(at, &p) || p.base != at || p.kind == TB__SHARE_NONE || (n > 0 && p.kind != kind) ||
            n == MOST_PIECES)
            return tb__fail(TB_INVALID, "the memory at %p has changed, or has too many pieces", memory->base);
        if (n == 0) {
            kind = p.kind;
            tb__pack_u32(&key->bytes, kind);
            tb__pack_u64(&key->bytes, tb__cuda_process_id());
            tb__pack_u64(&key->bytes, first);
            tb__pack_u64(&key->bytes, memory->nbytes);
            tb__pack_u64(&key->bytes, memory->epoch);
            tb__pack_raw(&key->bytes, &gpu->uuid, sizeof gpu->uuid);
        }
        TB_TRY(export_piece(&p, key));
        tb__pack_u64(&key->bytes, at - first);
        tb__pack_u64(&key->bytes, p.nbytes);
        at += p.nbytes;
    }
    return key->bytes.failed ? TB_NO_MEMORY : TB_OK;
}

tb_status tb__cuda_share(tb__device *device, const tb__memory *memory, tb__memory_key *key) {
    tb__memory now;
    tb__gpu *gpu;
    if (!tb__cuda_find(device, memory->base, memory->nbytes, &now) || now.base != memory->base ||
        now.nbytes != memory->nbytes || now.epoch != memory->epoch)
        return tb__fail(TB_INVALID, "the memory at %p is gone", memory->base);
    if (!now.is_shareable)
        return tb__fail(TB_REFUSED, "the memory at %p on %s can't be shared: it was allocated without the right to",
                        memory->base, tb__gpu_unit_name(now.index));
    TB_TRY(tb__gpu_get(now.index, &gpu));
    TB_TRY(tb__gpu_push(gpu));
    tb_status status = export_pieces(memory, gpu, key);
    tb__gpu_pop();
    if (status != TB_OK)
        tb__memory_key_fini(key);
    return status;
}

/* ---- Keys -------------------------------------------------------------------------------------------------------- */

static tb_status bad_key(const tb__memory_key *key) {
    return tb__fail(TB_INVALID, "a key of GPU memory that is malformed: %zu bytes, %zu descriptors", key->bytes.count,
                    key->fds.count);
}

static bool is_kind(uint32_t kind) {
    return is_vmm(kind) || kind == TB__SHARE_LEGACY || kind == TB__SHARE_POOL;
}

static size_t count_fds(uint32_t kind, size_t npieces) {
    return kind == TB__SHARE_FD ? npieces : kind == TB__SHARE_POOL;
}

/* Pieces follow each other without gaps, none is empty, and the memory ends in the last one. */
static bool read_pieces(tb__unpack *u, parsed_key *out) {
    for (size_t i = 0; i < out->npieces; i++) {
        piece *p = &out->pieces[i];
        if (out->id.kind != TB__SHARE_FD) {
            const void *handle = tb__unpack_raw(u, HANDLE_NBYTES);
            if (handle)
                memcpy(p->handle, handle, HANDLE_NBYTES);
        }
        p->offset = tb__unpack_u64(u);
        p->nbytes = tb__unpack_u64(u);
        if (u->failed || p->offset != out->nbytes || p->nbytes == 0 || p->nbytes > most_nbytes - out->nbytes)
            return false;
        out->nbytes += p->nbytes;
    }
    return tb__unpack_is_done(u) && out->id.nbytes <= out->nbytes;
}

/* out->pieces is freed by the caller, also if this fails. */
static tb_status parse_key(const tb__memory_key *key, parsed_key *out) {
    tb__unpack u = {.at = key->bytes.data, .end = key->bytes.data + key->bytes.count};
    *out = (parsed_key){.id = {.kind = tb__unpack_u32(&u)}};
    out->id.process = tb__unpack_u64(&u);
    out->id.base = tb__unpack_u64(&u);
    out->id.nbytes = tb__unpack_u64(&u);
    out->id.epoch = tb__unpack_u64(&u);
    const void *uuid = tb__unpack_raw(&u, sizeof out->uuid);
    if (!uuid || !is_kind(out->id.kind))
        return bad_key(key);
    memcpy(&out->uuid, uuid, sizeof out->uuid);
    size_t each = (out->id.kind == TB__SHARE_FD ? 0 : HANDLE_NBYTES) + 2 * sizeof(uint64_t);
    out->npieces = (size_t)(u.end - u.at) / each;
    if (out->npieces == 0 || out->npieces > MOST_PIECES || (!is_vmm(out->id.kind) && out->npieces != 1) ||
        key->fds.count != count_fds(out->id.kind, out->npieces))
        return bad_key(key);
    out->pieces = tb__calloc(out->npieces, sizeof *out->pieces);
    if (!out->pieces)
        return TB_NO_MEMORY;
    return read_pieces(&u, out) ? TB_OK : bad_key(key);
}

/* ---- Importing --------------------------------------------------------------------------------------------------- */

/* The context is current, here and below. */
static tb_status check_size(const import *it, const parsed_key *key) {
    tb__memory_piece found;
    if (tb__memory_find_piece(it->base, &found) && found.base == it->base && found.nbytes == key->nbytes)
        return TB_OK;
    return tb__fail(TB_INVALID, "a key of %zu bytes of GPU memory, which has another size", (size_t)key->nbytes);
}

/* For a descriptor of something else the driver returns CUDA_ERROR_UNKNOWN, which otherwise means that the GPU has
 * failed. */
static CUresult known_error(CUresult result) {
    return result == CUDA_ERROR_UNKNOWN ? CUDA_ERROR_INVALID_HANDLE : result;
}

static tb_status open_legacy(import *to, const parsed_key *key) {
    CUipcMemHandle handle;
    memcpy(&handle, key->pieces[0].handle, sizeof handle);
    CUresult result = tb__cuda.cuIpcOpenMemHandle(&to->base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuIpcOpenMemHandle of %zu bytes on %s", (size_t)key->nbytes, to->gpu->unit);
    tb_status status = check_size(to, key);
    if (status != TB_OK)
        tb__cuda.cuIpcCloseMemHandle(to->base);
    return status;
}

/* cuMemFree would wait for streams that wait at gates, and this thread may be the one that opens them. The owner may
 * free the memory only when this is done, which takes a moment: nothing else is on the stream. */
static tb_status free_on_stream(const import *it, CUstream stream) {
    enum { MOST_MS = 1000 };
    tb__signal *signal;
    int64_t deadline = tb__now_ms() + MOST_MS;
    CUresult result = tb__cuda.cuMemFreeAsync(it->base, stream);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "cuMemFreeAsync on %s", it->gpu->unit);
    TB_TRY(tb__signal_get(it->gpu, &signal));
    tb_status status = tb__signal_send(signal, stream);
    while (status == TB_OK && !tb__signal_has_come(signal)) {
        status = tb__gpu_check(it->gpu);
        if (status == TB_OK && tb__now_ms() > deadline)
            status = tb__fail(TB_TIMEOUT, "%s has not freed imported memory within %d ms", it->gpu->unit, MOST_MS);
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    tb__signal_put(signal);
    return status;
}

static void close_in_pool(const import *it) {
    CUstream stream = NULL;
    CUresult result = tb__cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    tb_status status = result == CUDA_SUCCESS ? free_on_stream(it, stream)
                                              : tb__cuda_fail(result, "cuStreamCreate on %s", it->gpu->unit);
    if (status != TB_OK)
        tb__log(TB_LOG_WARN, "memory of another process may be held longer: %s", tb_error_detail());
    if (stream)
        tb__cuda.cuStreamDestroy(stream);
    tb__cuda.cuMemPoolDestroy(it->pool);
}

/* The pool is imported again for each memory in it: it is unknown whether two descriptors are of the same pool. */
static tb_status open_in_pool(import *to, const parsed_key *key, const tb__memory_key *given) {
    CUmemPoolPtrExportData data;
    memcpy(&data, key->pieces[0].handle, sizeof data);
    CUresult result = tb__cuda.cuMemPoolImportFromShareableHandle(&to->pool, (void *)(intptr_t)given->fds.item[0],
                                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(known_error(result), "importing a pool of memory on %s", to->gpu->unit);
    result = tb__cuda.cuMemPoolImportPointer(&to->base, to->pool, &data);
    if (result != CUDA_SUCCESS) {
        tb__cuda.cuMemPoolDestroy(to->pool);
        return tb__cuda_fail(known_error(result), "importing %zu bytes of a pool on %s", (size_t)key->nbytes,
                             to->gpu->unit);
    }
    tb_status status = check_size(to, key);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        close_in_pool(to);
        return tb__fail(status, "%s", why.text);
    }
    return TB_OK;
}

static CUresult import_handle(const parsed_key *key, const tb__memory_key *given, size_t i,
                              CUmemGenericAllocationHandle *out) {
    bool is_fd = key->id.kind == TB__SHARE_FD;
    void *handle = is_fd ? (void *)(intptr_t)given->fds.item[i] : (void *)key->pieces[i].handle;
    return known_error(tb__cuda.cuMemImportFromShareableHandle(
        out, handle, is_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC));
}

static tb_status map_piece(import *to, const parsed_key *key, const tb__memory_key *given, size_t i) {
    CUmemGenericAllocationHandle handle;
    const piece *p = &key->pieces[i];
    CUresult result = import_handle(key, given, i, &handle);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "importing piece %zu of %zu of memory on %s", i + 1, key->npieces, to->gpu->unit);
    result = tb__cuda.cuMemMap(to->base + p->offset, p->nbytes, 0, handle, 0);
    tb__cuda.cuMemRelease(handle); /* the mapping keeps the memory */
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "mapping %zu bytes, piece %zu of %zu of memory on %s", (size_t)p->nbytes, i + 1,
                             key->npieces, to->gpu->unit);
    to->nmapped += p->nbytes;
    return TB_OK;
}

/* Read-only, where the driver has that, unless the right to write is asked for. */
static tb_status grant(import *to) {
    bool has_no_choice = shared.has_no_read_only || to->id.is_writable;
    to->flags = has_no_choice ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    tb_status status = tb__vmm_grant(to->base, to->nmapped, to->gpu, to->flags);
    if (status == TB_OK || has_no_choice || tb__gpu_check(to->gpu) != TB_OK)
        return status;
    to->flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    TB_TRY(tb__vmm_grant(to->base, to->nmapped, to->gpu, to->flags));
    shared.has_no_read_only = true;
    return TB_OK;
}

static void unmap_pieces(const import *from) {
    if (from->nmapped)
        tb__cuda.cuMemUnmap(from->base, from->nmapped);
    tb__cuda.cuMemAddressFree(from->base, from->nreserved);
}

static tb_status map_pieces(import *to, const parsed_key *key, const tb__memory_key *given) {
    to->nreserved = key->nbytes;
    CUresult result = tb__cuda.cuMemAddressReserve(&to->base, to->nreserved, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return tb__cuda_fail(result, "addresses for %zu bytes of memory on %s", to->nreserved, to->gpu->unit);
    tb_status status = TB_OK;
    for (size_t i = 0; i < key->npieces && status == TB_OK; i++)
        status = map_piece(to, key, given, i);
    if (status == TB_OK)
        status = grant(to);
    if (status != TB_OK)
        unmap_pieces(to);
    return status;
}

static void close_import(import *it) {
    LIST_REMOVE(it, link);
    if (tb__gpu_push(it->gpu) == TB_OK) {
        if (it->id.kind == TB__SHARE_LEGACY) {
            tb__cuda.cuIpcCloseMemHandle(it->base);
        } else if (it->id.kind == TB__SHARE_POOL) {
            close_in_pool(it);
        } else {
            unmap_pieces(it);
        }
        tb__gpu_pop();
    }
    free(it);
}

static import *find_import(const identity *id) {
    import *it = LIST_FIRST(&shared.imports);
    while (it && (it->id.process != id->process || it->id.base != id->base || it->id.nbytes != id->nbytes ||
                  it->id.epoch != id->epoch || it->id.kind != id->kind || it->id.is_writable != id->is_writable))
        it = LIST_NEXT(it, link);
    return it;
}

static tb_status open_import(tb__gpu *gpu, const parsed_key *key, const tb__memory_key *given, import **out) {
    import *it = tb__calloc(1, sizeof *it);
    if (!it)
        return TB_NO_MEMORY;
    *it = (import){.id = key->id, .gpu = gpu};
    tb_status status = tb__gpu_push(gpu);
    if (status == TB_OK) {
        status = key->id.kind == TB__SHARE_LEGACY ? open_legacy(it, key)
                 : key->id.kind == TB__SHARE_POOL ? open_in_pool(it, key, given)
                                                  : map_pieces(it, key, given);
        tb__gpu_pop();
    }
    if (status != TB_OK) {
        free(it);
        return status;
    }
    LIST_INSERT_HEAD(&shared.imports, it, link);
    *out = it;
    return TB_OK;
}

/* With the lock held. */
static tb_status get_import(tb__gpu *gpu, const parsed_key *key, const tb__memory_key *given, import **out) {
    *out = find_import(&key->id);
    if (!*out)
        TB_TRY(open_import(gpu, key, given, out));
    (*out)->nmappings++;
    return TB_OK;
}

/* ---- Mappings ---------------------------------------------------------------------------------------------------- */

/* Memory of this process needs no import, which the driver would refuse. */
static tb_status use_own(tb__device *device, const identity *id, cuda_mapping *mapping) {
    tb__memory memory;
    if (!tb__cuda_find(device, (void *)id->base, id->nbytes, &memory) || memory.epoch != id->epoch ||
        (CUdeviceptr)memory.base != id->base)
        return tb__fail(TB_INVALID, "the memory at %p is gone", (void *)id->base);
    mapping->base = (tb__mapping){device->ops, (char *)id->base, id->nbytes, memory.index};
    return TB_OK;
}

static tb_status fill_mapping(tb__device *device, const parsed_key *key, const tb__memory_key *given,
                              cuda_mapping *mapping) {
    tb__gpu *gpu;
    int ordinal;
    TB_TRY(tb__cuda_load());
    if (key->id.process == tb__cuda_process_id())
        return use_own(device, &key->id, mapping);
    if (!tb__gpu_find_uuid(&key->uuid, &ordinal))
        return tb__fail(TB_REFUSED, "the memory is on %s, which this process does not see",
                        tb__gpu_format_uuid(&key->uuid).text);
    TB_TRY(tb__gpu_get(ordinal, &gpu));
    pthread_mutex_lock(&shared.lock);
    tb_status status = get_import(gpu, key, given, &mapping->import);
    pthread_mutex_unlock(&shared.lock);
    if (status == TB_OK)
        mapping->base = (tb__mapping){device->ops, (char *)mapping->import->base, key->id.nbytes, ordinal};
    return status;
}

tb_status tb__cuda_map(tb__device *device, const tb__memory_key *key, bool is_writable, tb__mapping **out) {
    parsed_key parsed;
    cuda_mapping *mapping = NULL;
    tb_status status = parse_key(key, &parsed);
    parsed.id.is_writable = is_writable && is_vmm(parsed.id.kind); /* other kinds always are */
    if (status == TB_OK) {
        mapping = tb__calloc(1, sizeof *mapping);
        status = mapping ? fill_mapping(device, &parsed, key, mapping) : TB_NO_MEMORY;
    }
    free(parsed.pieces);
    if (status != TB_OK) {
        free(mapping);
        return status;
    }
    *out = &mapping->base;
    return TB_OK;
}

void tb__cuda_unmap(tb__device *device, tb__mapping *given) {
    cuda_mapping *mapping = (cuda_mapping *)given;
    (void)device;
    if (mapping->import && !tb__cuda_is_inherited()) {
        pthread_mutex_lock(&shared.lock);
        if (--mapping->import->nmappings == 0)
            close_import(mapping->import);
        pthread_mutex_unlock(&shared.lock);
    }
    free(mapping);
}

void tb__share_grant_to_new_gpu(void) {
    pthread_mutex_lock(&shared.lock);
    for (const import *it = LIST_FIRST(&shared.imports); it; it = LIST_NEXT(it, link)) {
        if (is_vmm(it->id.kind) && tb__gpu_push(it->gpu) == TB_OK) {
            (void)tb__vmm_grant(it->base, it->nmapped, it->gpu, it->flags);
            tb__gpu_pop();
        }
    }
    pthread_mutex_unlock(&shared.lock);
}
