/* The devices of this build, and the defaults of optional slots. */
#include "device/device.h"

#include "base/descriptors.h"
#include "base/index.h"
#include "base/mem.h"
#include "base/process.h"
#include "device/host/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TABLE_OF(name) &tb__##name##_device_ops,
static const tb__device_ops *const built_in[] = {TB__BUILT_IN_DEVICES(TABLE_OF) NULL};

const tb__device_ops *const *_Atomic tb__devices = built_in;

static tb_status refuse_name(const char *name) {
    char known[200] = "pinned";
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, ", %s", (*ops)->name);
    }
    return tb__fail(TB_INVALID, "there is no device '%.40s'; this build has %s", name, known);
}

/* The device of a name such as "cuda" or "cuda:1"; *index is -1 if no unit is named. NULL: there is none. */
static const tb__device_ops *find_device(const char *name, int *index) {
    const char *colon = strchr(name, ':');
    size_t length = colon ? (size_t)(colon - name) : strlen(name), ndigits = colon ? strlen(colon + 1) : 0;
    if (colon && (ndigits == 0 || ndigits > 6 || strspn(colon + 1, "0123456789") != ndigits))
        return NULL;
    *index = colon ? (int)strtol(colon + 1, NULL, 10) : -1;
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        if (strlen((*ops)->name) == length && memcmp((*ops)->name, name, length) == 0)
            return *ops;
    }
    return NULL;
}

tb_status tb__device_open(const char *name, tb__device **out) {
    int index;
    const tb__device_ops *ops = find_device(name, &index);
    return ops ? ops->open(out) : refuse_name(name);
}

void tb__device_close(tb__device *device) {
    if (device)
        device->ops->close(device);
}

void tb__memory_key_fini(tb__memory_key *key) {
    tb__pack_fini(&key->bytes);
    for (size_t i = 0; i < key->fds.count; i++)
        tb__fd_close(key->fds.item[i]);
    free(key->fds.item);
    *key = (tb__memory_key){0};
}

tb_status tb__memory_key_copy(const tb__memory_key *key, tb__memory_key *out) {
    *out = (tb__memory_key){0};
    tb__pack_raw(&out->bytes, key->bytes.data, key->bytes.count);
    tb_status status = out->bytes.failed || !tb__vec_reserve(&out->fds, key->fds.count) ? TB_NO_MEMORY : TB_OK;
    for (size_t i = 0; i < key->fds.count && status == TB_OK; i++) {
        int fd = tb__fd_own(fcntl(key->fds.item[i], F_DUPFD_CLOEXEC, 0));
        if (fd < 0)
            status = tb__fail(TB_IO, "fcntl: %s", tb__errno_text(errno));
        else
            out->fds.item[out->fds.count++] = fd;
    }
    if (status != TB_OK)
        tb__memory_key_fini(out);
    return status;
}

/* ---- Memory of programs ----------------------------------------------------------------------------------------- */

/* The first device that can do it. */
static tb_status alloc_pinned(size_t nbytes, void **out) {
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        if ((*ops)->pin)
            return tb__memory_alloc_pinned(nbytes, (*ops)->pin, (*ops)->unpin, out);
    }
    return tb__fail(TB_REFUSED, "pinned memory needs the driver of a GPU, and this build has no device that uses one");
}

tb_status tb_alloc_on(const char *device, size_t nbytes, void **out) {
    int index = -1;
    if (!device)
        return tb__fail(TB_INVALID, "tb_alloc_on: no device is named");
    if (strcmp(device, "pinned") == 0)
        return alloc_pinned(nbytes, out);
    const tb__device_ops *ops = find_device(device, &index);
    if (!ops)
        return refuse_name(device);
    if (!ops->alloc_on)
        return tb__fail(TB_REFUSED, "device %s has no memory for programs", ops->name);
    return ops->alloc_on(index, nbytes, out);
}

void *tb_torch_alloc(ptrdiff_t nbytes, int device, void *stream) {
    char name[32];
    void *ptr = NULL;
    (void)stream;
    snprintf(name, sizeof name, "cuda:%d", device);
    return nbytes >= 0 && device >= 0 && tb_alloc_on(name, (size_t)nbytes, &ptr) == TB_OK ? ptr : NULL;
}

void tb_torch_free(void *ptr, ptrdiff_t nbytes, int device, void *stream) {
    (void)nbytes;
    (void)device;
    (void)stream;
    tb_free(ptr);
}

bool tb__devices_free(void *address) {
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        if ((*ops)->free_on && (*ops)->free_on(address))
            return true;
    }
    return false;
}

tb_status tb__device_check_extent(tb__device *device, const void *address, size_t nbytes) {
    tb__memory memory;
    int unit = 0;
    size_t known = 0; /* bytes from the address on */
    while (known < nbytes && device->ops->find(device, (const char *)address + known, 1, &memory)) {
        unit = known == 0 ? memory.index : unit;
        if (memory.index != unit)
            return tb__fail(TB_INVALID, "it begins on %s, and is on %s from byte %zu on: a tensor is on one of them",
                            tb__device_unit_name(device, unit), tb__device_unit_name(device, memory.index), known);
        known = (size_t)((char *)memory.base + memory.nbytes - (const char *)address);
    }
    if (known >= nbytes)
        return TB_OK;
    return tb__fail(TB_INVALID, "it has %zu bytes, but the memory on %s that it begins in ends after %zu of them",
                    nbytes, tb__device_unit_name(device, unit), known);
}

uint64_t tb__device_memory_kind(const tb__device *device, const tb__memory *memory) {
    return tb__hash(tb__hash_string(1, device->ops->name), (uint64_t)memory->index << 1 | memory->is_shareable) | 1;
}

/* ---- Defaults of slots ------------------------------------------------------------------------------------------- */

const char *tb__device_unit_name(tb__device *device, int index) {
    return device->ops->unit_name ? device->ops->unit_name(device, index) : device->ops->name;
}

tb_status tb__device_share(tb__device *device, const tb__memory *memory, tb__memory_key *key) {
    if (!device->ops->share || !memory->is_shareable)
        return tb__fail(TB_REFUSED, "memory of device %s at %p can't be shared", device->ops->name, memory->base);
    return device->ops->share(device, memory, key);
}

tb_status tb__mapping_source(const tb__mapping *mapping, const tb__device_ops *ops, const tb__move *move, uint32_t k,
                             const void **out) {
    if (mapping->ops != ops && mapping->ops != &tb__host_device_ops)
        return tb__fail(TB_INVALID, "device %s can't use what device %s has mapped", ops->name, mapping->ops->name);
    if (!mapping->base)
        return tb__fail(TB_INVALID, "device %s can't read what has no address", ops->name);
    if (!tb__move_source_fits(move, k, mapping->nbytes))
        return tb__fail(TB_INVALID, "a move from beyond the %zu bytes of a mapping", mapping->nbytes);
    *out = mapping->base + (uintptr_t)move->src[k];
    return TB_OK;
}

tb_status tb__device_map(tb__device *device, const tb__memory_key *key, bool is_writable, tb__mapping **out) {
    if (!device->ops->map)
        return tb__fail(TB_REFUSED, "device %s maps no memory of other processes", device->ops->name);
    return device->ops->map(device, key, is_writable, out);
}

tb_status tb__device_try_access(tb__device *device, int index, const void *address, size_t nbytes) {
    return device->ops->try_access ? device->ops->try_access(device, index, address, nbytes) : TB_OK;
}

static tb_status refuse_streams(const tb__device *device) {
    return tb__fail(TB_REFUSED, "device %s has no streams", device->ops->name);
}

tb_status tb__device_stream_record(tb__device *device, const void *stream, tb__fence *fence) {
    return device->ops->stream_record ? device->ops->stream_record(device, stream, fence) : refuse_streams(device);
}

tb_status tb__device_stream_wait(tb__device *device, const void *stream, const tb__fence *fence) {
    return device->ops->stream_wait ? device->ops->stream_wait(device, stream, fence) : refuse_streams(device);
}

tb_status tb__device_gate_create(tb__device *device, const void *stream, int64_t deadline_ms, tb__gate **out) {
    return device->ops->gate_create ? device->ops->gate_create(device, stream, deadline_ms, out)
                                    : refuse_streams(device);
}
