/* The devices of this build, and the defaults of optional slots. */
#include "device/device.h"

#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static const tb__device_ops *const built_in[] = {
#ifdef TB_HAS_CUDA
    &tb__cuda_device_ops,
#endif
    &tb__host_device_ops, NULL};

const tb__device_ops *const *_Atomic tb__devices = built_in;

tb_status tb__device_open(const char *name, tb__device **out) {
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        if (strcmp((*ops)->name, name) == 0)
            return (*ops)->open(out);
    }
    return tb__fail(TB_INVALID, "there is no device '%.40s'", name);
}

void tb__device_close(tb__device *device) {
    if (device)
        device->ops->close(device);
}

void tb__memory_key_fini(tb__memory_key *key) {
    tb__pack_fini(&key->bytes);
    for (size_t i = 0; i < key->fds.count; i++)
        close(key->fds.item[i]);
    free(key->fds.item);
    *key = (tb__memory_key){0};
}

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

tb_status tb__device_map(tb__device *device, const tb__memory_key *key, tb__mapping **out) {
    if (!device->ops->map)
        return tb__fail(TB_REFUSED, "device %s maps no memory of other processes", device->ops->name);
    return device->ops->map(device, key, out);
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
