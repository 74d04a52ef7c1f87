/* Access to memory of a device, through a copy in host memory, which the device itself reads and writes. Only devices
 * use addresses of their memory. */
#include "tools/mirror.h"

#include "base/process.h"
#include "device/device.h"

#include <poll.h>
#include <string.h>

/* Sets `host`, and opens the device that copies, unless that is the host. */
static tb_status open_device(tool_mirror *mirror, const char *device) {
    if (device && strcmp(device, "pinned") != 0 && strcmp(device, tb__host_device_ops.name) != 0) {
        mirror->host = tb__malloc(mirror->nbytes, 1);
        return mirror->host ? tb__device_open(device, &mirror->device) : TB_NO_MEMORY;
    }
    mirror->host = mirror->memory;
    return TB_OK;
}

tb_status tool_mirror_init(tool_mirror *mirror, const char *device, size_t nbytes) {
    *mirror = (tool_mirror){.nbytes = nbytes, .is_foreign = !device};
    tb_status status = TB_OK;
    if (device)
        status = tb_alloc_on(device, nbytes, &mirror->memory);
    else if (!(mirror->memory = tb__malloc(nbytes, 1)))
        status = TB_NO_MEMORY;
    if (status == TB_OK)
        status = open_device(mirror, device);
    if (status != TB_OK)
        tool_mirror_fini(mirror);
    return status;
}

void tool_mirror_fini(tool_mirror *mirror) {
    tb__device_close(mirror->device);
    if (mirror->host != mirror->memory)
        free(mirror->host);
    if (mirror->is_foreign)
        free(mirror->memory);
    else
        tb_free(mirror->memory);
    *mirror = (tool_mirror){0};
}

static tb_status wait_for(tb__device *device, const tb__fence *fence) {
    enum { TIMEOUT_MS = 60000 };
    int64_t deadline = tb__now_ms() + TIMEOUT_MS;
    while (!fence->is_done) {
        if (device->ops->progress(device))
            continue;
        if (tb__now_ms() >= deadline)
            return tb__fail(TB_TIMEOUT, "device %s has not copied the tensors after %d s", device->ops->name,
                            TIMEOUT_MS / 1000);
        poll(&(struct pollfd){.fd = device->ops->fd(device), .events = POLLIN}, 1, tb__ms_until(deadline));
    }
    return fence->status == TB_OK ? TB_OK : tb__fail(fence->status, "%s", fence->why);
}

static tb_status copy(const tool_mirror *mirror, void *to, const void *from) {
    static const int64_t stride[1][TB_MAX_DIMS] = {{1}};
    tb__device *device = mirror->device;
    tb__move move = {
        .ndim = 1,
        .len = {(int64_t)mirror->nbytes},
        .dst = to,
        .dst_stride = {1},
        .nsrc = 1,
        .src = &from,
        .src_stride = stride,
        .src_dtype = TB_U8,
        .wire_dtype = TB_U8,
        .dst_dtype = TB_U8,
        .name = "the tensors",
    };
    tb__fence fence = {0};
    tb__job *job;
    if (!device || mirror->nbytes == 0)
        return TB_OK;
    TB_TRY(device->ops->prepare(device, &move, 1, &job));
    tb_status status = device->ops->run(device, job, &(tb__run){0}, &fence);
    if (status == TB_OK)
        status = wait_for(device, &fence);
    if (status != TB_TIMEOUT) /* the device still uses it */
        device->ops->release(device, job);
    return status;
}

tb_status tool_mirror_put(const tool_mirror *mirror) {
    return copy(mirror, mirror->memory, mirror->host);
}

tb_status tool_mirror_get(const tool_mirror *mirror) {
    return copy(mirror, mirror->host, mirror->memory);
}
