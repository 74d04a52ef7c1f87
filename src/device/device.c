/* The devices of this build, and the defaults of optional slots. */
#include "device/device.h"

#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>

static const tb__device_ops *const built_in[] = {&tb__host_device_ops, NULL};

const tb__device_ops *const *_Atomic tb__devices = built_in;

tb_status tb__device_open(const char *name, int index, tb__device **out) {
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops; ops++) {
        if (strcmp((*ops)->name, name) == 0)
            return (*ops)->open(index, out);
    }
    return tb__fail(TB_INVALID, "there is no device '%.40s'", name);
}

void tb__device_close(tb__device *device) {
    if (device)
        device->ops->close(device);
}

tb_status tb__device_share(tb__device *device, const tb__memory *memory, tb__memory_key *key, int *fd) {
    if (!device->ops->share || !memory->is_shareable)
        return tb__fail(TB_REFUSED, "memory of device %s at %p can't be shared", device->ops->name, memory->base);
    return device->ops->share(device, memory, key, fd);
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

tb_status tb__device_map(tb__device *device, const tb__memory_key *key, int fd, tb__mapping **out) {
    if (!device->ops->map)
        return tb__fail(TB_REFUSED, "device %s maps no memory of other processes", device->ops->name);
    return device->ops->map(device, key, fd, out);
}
