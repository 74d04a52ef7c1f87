/* The host device: CPU memory. It owns all memory that no other device does; memory of tb_alloc can be shared with
 * other processes. */
#include "device/host/host.h"

#include "base/descriptors.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static tb_status host_open(tb__device **out) {
    tb__host_device *device = tb__calloc(1, sizeof *device);
    if (!device)
        return TB_NO_MEMORY;
    *device = (tb__host_device){.base = {.ops = &tb__host_device_ops}};
    device->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (device->wake < 0) {
        tb_status status = tb__fail(TB_IO, "an eventfd: %s", tb__errno_text(errno));
        free(device);
        return status;
    }
    LIST_INIT(&device->files);
    TAILQ_INIT(&device->waiting);
    TAILQ_INIT(&device->running);
    TAILQ_INIT(&device->ended);
    pthread_mutex_init(&device->lock, NULL);
    *out = &device->base;
    return TB_OK;
}

static void host_close(tb__device *base) {
    tb__host_device *device = (tb__host_device *)base;
    tb__fd_close(device->wake);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static bool host_find(tb__device *device, const void *address, size_t nbytes, tb__memory *out) {
    tb__arena_file file;
    (void)device;
    *out = (tb__memory){.base = (void *)(uintptr_t)address, .nbytes = nbytes};
    out->is_shareable = tb__memory_find(address, nbytes, &file);
    return true;
}

static tb_status host_alloc(tb__device *device, int index, size_t nbytes, void **out) {
    (void)device;
    (void)index;
    return tb_alloc(nbytes, out);
}

static tb_status host_alloc_on(int index, size_t nbytes, void **out) {
    if (index > 0)
        return tb__fail(TB_REFUSED, "there is no host:%d: the host's memory is one", index);
    return tb_alloc(nbytes, out);
}

static void host_free(tb__device *device, void *address) {
    (void)device;
    tb_free(address);
}

/* ---- Other processes -------------------------------------------------------------------------------------------- */

/* The contents of a tb__memory_key: a range of the descriptor's file. */
typedef struct key {
    uint64_t device, inode, offset, nbytes;
} key;

static tb_status host_share(tb__device *device, const tb__memory *memory, tb__memory_key *out) {
    tb__arena_file file;
    struct stat info;
    (void)device;
    if (!tb__memory_find(memory->base, memory->nbytes, &file))
        return tb__fail(TB_INVALID, "the memory at %p is no longer of tb_alloc", memory->base);
    int fd = tb__fd_own(fcntl(file.fd, F_DUPFD_CLOEXEC, 0));
    if (fd < 0)
        return tb__fail(TB_IO, "fcntl: %s", tb__errno_text(errno));
    if (fstat(fd, &info) != 0 || !tb__vec_push(&out->fds, fd)) {
        tb__fd_close(fd);
        return TB_NO_MEMORY;
    }
    key k = {.device = info.st_dev,
             .inode = info.st_ino,
             .offset = (uint64_t)((char *)memory->base - (char *)file.base),
             .nbytes = memory->nbytes};
    tb__pack_raw(&out->bytes, &k, sizeof k);
    return out->bytes.failed ? TB_NO_MEMORY : TB_OK;
}

static tb_status map_file(int fd, const struct stat *info, tb__host_file **out) {
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return tb__fail(TB_INVALID, "shared memory that is not sealed against shrinking");
    tb__host_file *file = tb__calloc(1, sizeof *file);
    if (!file)
        return TB_NO_MEMORY;
    *file = (tb__host_file){.device = info->st_dev, .inode = info->st_ino, .nbytes = (size_t)info->st_size};
    file->base = tb__map_shared(fd, file->nbytes, PROT_READ);
    if (!file->base) {
        tb_status status = tb__fail(errno == ENOMEM ? TB_NO_MEMORY : TB_IO, "map %zu bytes of shared memory: %s",
                                    file->nbytes, tb__errno_text(errno));
        free(file);
        return status;
    }
    *out = file;
    return TB_OK;
}

static tb_status host_map(tb__device *base, const tb__memory_key *given, bool is_writable, tb__mapping **out) {
    tb__host_device *device = (tb__host_device *)base;
    struct stat info;
    key k;
    if (is_writable)
        return tb__fail(TB_REFUSED, "host memory of other processes is mapped for reading only");
    if (given->bytes.count != sizeof k || given->fds.count != 1)
        return tb__fail(TB_INVALID, "a memory key of %zu bytes and %zu descriptors, not %zu and 1", given->bytes.count,
                        given->fds.count, sizeof k);
    int fd = given->fds.item[0];
    memcpy(&k, given->bytes.data, sizeof k);
    if (fstat(fd, &info) != 0)
        return tb__fail(TB_IO, "fstat: %s", tb__errno_text(errno));
    uint64_t nbytes = (uint64_t)info.st_size;
    if (k.device != info.st_dev || k.inode != info.st_ino || k.nbytes > nbytes || k.offset > nbytes - k.nbytes)
        return tb__fail(TB_INVALID, "a memory key that does not belong to its descriptor");
    tb__host_mapping *mapping = tb__calloc(1, sizeof *mapping);
    if (!mapping)
        return TB_NO_MEMORY;
    tb__host_file *file = LIST_FIRST(&device->files);
    while (file && (file->device != info.st_dev || file->inode != info.st_ino || k.offset + k.nbytes > file->nbytes))
        file = LIST_NEXT(file, link);
    if (!file) {
        tb_status status = map_file(fd, &info, &file);
        if (status != TB_OK) {
            free(mapping);
            return status;
        }
        LIST_INSERT_HEAD(&device->files, file, link);
    }
    file->refs++;
    *mapping = (tb__host_mapping){.base = {&tb__host_device_ops, file->base + k.offset, k.nbytes, 0}, .file = file};
    *out = &mapping->base;
    return TB_OK;
}

static void host_unmap(tb__device *device, tb__mapping *mapping) {
    tb__host_file *file = ((tb__host_mapping *)mapping)->file;
    (void)device;
    if (--file->refs == 0) {
        LIST_REMOVE(file, link);
        munmap(file->base, file->nbytes);
        free(file);
    }
    free(mapping);
}

static int host_fd(tb__device *device) {
    return ((tb__host_device *)device)->wake;
}

const tb__device_ops tb__host_device_ops = {
    .name = "host",
    .open = host_open,
    .close = host_close,
    .find = host_find,
    .alloc = host_alloc,
    .free = host_free,
    .alloc_on = host_alloc_on,
    .share = host_share,
    .map = host_map,
    .unmap = host_unmap,
    .prepare = tb__host_prepare,
    .release = tb__host_release,
    .run = tb__host_run_job,
    .checksum = tb__host_checksum,
    .cancel = tb__host_cancel,
    .progress = tb__host_progress,
    .fd = host_fd,
};
