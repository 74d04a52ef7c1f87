/* Device memory of tensors that an agent moves. The agent maps memory that can be shared. All other memory is copied
 * here, in the program's own process, through memory of tb_alloc: the agent may not use such a device, or the memory
 * may not be shareable. */
#include "bus/client/remote.h"

#include "device/host/memory.h"

#include <poll.h>
#include <stdatomic.h>
#include <string.h>

enum {
    STUCK_MS = 5000, /* for work that was cancelled */
    MOST_FDS = 2048, /* of all device memory in a frame */
};

static tb_status open_devices(remote_world *w) {
    for (const tb__device_ops *const *ops = atomic_load(&tb__devices); *ops && !w->has_devices; ops++) {
        tb__device *device;
        if (*ops == &tb__host_device_ops)
            continue;
        if (!tb__vec_reserve(&w->devices, 1))
            return TB_NO_MEMORY;
        tb_status status = (*ops)->open(&device);
        if (status == TB_REFUSED)
            continue;
        TB_TRY(status);
        w->devices.item[w->devices.count++] = device;
    }
    w->has_devices = true;
    return TB_OK;
}

/* A forked child has none of the devices' threads. */
void tb__remote_close_devices(remote_world *w) {
    for (size_t i = 0; i < w->devices.count && !tb__remote_is_inherited(w); i++)
        tb__device_close(w->devices.item[i]);
    free(w->devices.item);
}

tb_status tb__remote_find_device(remote_world *w, const void *at, size_t nbytes, tb__device **device,
                                 tb__memory *memory) {
    *device = NULL;
    TB_TRY(open_devices(w));
    for (size_t i = 0; i < w->devices.count; i++) {
        tb__device *d = w->devices.item[i];
        bool is_whole = d->ops->find(d, at, nbytes, memory);
        if (!is_whole && !d->ops->find(d, at, 1, memory))
            continue;
        memory->is_shareable &= is_whole; /* else it consists of several memories */
        *device = d;
        return is_whole ? TB_OK : tb__device_check_extent(d, at, nbytes);
    }
    return tb__memory_check_mapped(at, nbytes);
}

/* Its place among the batch's. */
static tb_status get_memory(remote_batch *b, tb__device *device, const tb__memory *m, size_t *out) {
    size_t i = 0;
    for (; i < b->memories.count; i++) {
        const tb__memory *known = &b->memories.item[i].memory;
        if (b->memories.item[i].device == device && known->base == m->base && known->epoch == m->epoch &&
            known->nbytes == m->nbytes)
            break;
    }
    if (i == b->memories.count) {
        remote_memory new = {.device = device, .memory = *m, .id = ++b->world->last_memory};
        if (!tb__vec_reserve(&b->memories, 1))
            return TB_NO_MEMORY;
        tb_status status = device->ops->list_ids ? device->ops->list_ids(device, m, &new.ids) : TB_OK;
        if (status != TB_OK) {
            free(new.ids.item);
            return status;
        }
        b->memories.item[b->memories.count++] = new;
    }
    *out = i;
    return TB_OK;
}

static tb_status describe_shared(remote_batch *b, remote_frame *f, tb__device *device, const tb__memory *m,
                                 const void *at, size_t nbytes, tb__payload_memory *out) {
    size_t memory, i = 0;
    TB_TRY(get_memory(b, device, m, &memory));
    while (i < f->memories.count && f->memories.item[i] != memory)
        i++;
    *out = (tb__payload_memory){.kind = TB__MEMORY_DEVICE,
                                .fd = (uint32_t)i,
                                .offset = (uint64_t)((const char *)at - (const char *)m->base),
                                .address = (uint64_t)(uintptr_t)at,
                                .nbytes = nbytes};
    return i < f->memories.count || tb__vec_push(&f->memories, memory) ? TB_OK : TB_NO_MEMORY;
}

/* A tensor in the memory; NULL: none any more. */
static const char *name_tensor_in(const remote_batch *b, const tb__memory *m) {
    uintptr_t first = (uintptr_t)m->base, last = first + m->nbytes;
    for (size_t i = 0; i < b->nregistered; i++) {
        const remote_tensor *t = &b->tensors.item[i];
        for (int j = 0; j < 3; j++) {
            if (t->areas[j].first < last && first < t->areas[j].last)
                return t->name;
        }
    }
    return NULL;
}

tb_status tb__remote_check_memories(const remote_batch *b) {
    for (size_t i = 0; i < b->memories.count; i++) {
        const remote_memory *m = &b->memories.item[i];
        const char *tensor = name_tensor_in(b, &m->memory);
        for (size_t j = 0; tensor && j < m->ids.count; j++) {
            tb__memory_change change = m->device->ops->check_id(m->device, &m->ids.item[j]);
            if (change != TB__MEMORY_SAME)
                return tb__fail(TB_INVALID,
                                "the memory of tensor '%.100s' was %s since it was registered; call "
                                "tb_world_invalidate before, and make batch '%s' again",
                                tensor, change == TB__MEMORY_GONE ? "freed or unmapped" : "remapped", b->name);
        }
    }
    return TB_OK;
}

/* Its descriptors come after those of the frame's host memory. */
static tb_status share_memory(const remote_memory *m, remote_frame *f, tb__blob *payload) {
    tb__memory_key key = {0}, *all = &f->key;
    tb_status status = tb__device_share(m->device, &m->memory, &key);
    if (status == TB_OK && !tb__vec_reserve(&all->fds, key.fds.count))
        status = TB_NO_MEMORY;
    if (status == TB_OK && all->fds.count + key.fds.count > MOST_FDS)
        status = tb__fail(TB_REFUSED, "it has more than %d descriptors", MOST_FDS);
    if (status == TB_OK) {
        tb__device_memory what = {.id = m->id,
                                  .fd = key.fds.count ? f->fds.count + all->fds.count : 0,
                                  .nfds = key.fds.count,
                                  .key = {key.bytes.data, key.bytes.count}};
        status = tb__map_encode_kept(&tb__device_memory_schema, &what, &f->arena, payload);
    }
    for (size_t i = 0; i < key.fds.count && status == TB_OK; i++)
        all->fds.item[all->fds.count++] = key.fds.item[i];
    if (status == TB_OK)
        key.fds.count = 0;
    tb__memory_key_fini(&key);
    return status;
}

tb_status tb__remote_share_memories(const remote_batch *b, remote_frame *f) {
    tb__entry *entries = tb__arena_alloc(&f->arena, f->memories.count, sizeof *entries);
    if (!entries)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < f->memories.count; i++) {
        const remote_memory *m = &b->memories.item[f->memories.item[i]];
        entries[i].pair_name = m->device->ops->name;
        TB_TRY(share_memory(m, f, &entries[i].payload));
    }
    f->message.memories = (tb__entries){f->memories.count, entries};
    return TB_OK;
}

static tb_status get_copy(remote_batch *b, tb__device *device, const void *at, size_t nbytes, size_t *out) {
    char *address = (char *)(uintptr_t)at;
    for (size_t i = 0; i < b->copies.count; i++) {
        const remote_copy *known = &b->copies.item[i];
        *out = i;
        if (known->address == address && known->nbytes == nbytes)
            return TB_OK;
        if (address < known->address + known->nbytes && known->address < address + nbytes)
            return tb__fail(TB_REFUSED, "its memory is copied, and overlaps another tensor's without being the same");
    }
    remote_copy copy = {.device = device, .address = address, .nbytes = nbytes};
    if (!device->ops->pin || tb_alloc_on("pinned", nbytes, (void **)&copy.buffer) != TB_OK)
        TB_TRY(tb_alloc(nbytes, (void **)&copy.buffer));
    *out = b->copies.count;
    if (tb__vec_push(&b->copies, copy))
        return TB_OK;
    tb_free(copy.buffer);
    return TB_NO_MEMORY;
}

tb_status tb__remote_describe_device(remote_batch *b, remote_frame *f, tb__device *device, const tb__memory *memory,
                                     const void *at, size_t nbytes, tb__payload_memory *out, size_t *copy) {
    *copy = SIZE_MAX;
    if (memory->is_shareable && device->ops->share && !b->world->copies_memory)
        return describe_shared(b, f, device, memory, at, nbytes, out);
    TB_TRY(get_copy(b, device, at, nbytes, copy));
    TB_TRY(tb__remote_describe_host(f, b->copies.item[*copy].buffer, nbytes, out));
    out->address = (uint64_t)(uintptr_t)at; /* Invalidate names it so */
    out->copied_from = tb__device_unit_name(device, memory->index);
    return TB_OK;
}

/* Makes progress until the work is done, which is cancelled at the deadline. */
static tb_status await_fence(tb__device *device, tb__fence *fence, int64_t deadline_ms, const char *what) {
    bool is_late = false;
    while (!fence->is_done) {
        struct pollfd fd = {.fd = device->ops->fd(device), .events = POLLIN};
        if (!device->ops->progress(device) && !fence->is_done)
            poll(&fd, 1, tb__ms_until(deadline_ms));
        if (fence->is_done || tb__now_ms() < deadline_ms)
            continue;
        if (is_late)
            break;
        is_late = true;
        deadline_ms = tb__now_ms() + STUCK_MS;
        device->ops->cancel(device, fence);
    }
    if (is_late)
        return tb__fail(TB_TIMEOUT, "device %s has not finished %s in time", device->ops->name, what);
    return fence->status == TB_OK ? TB_OK
                                  : tb__fail(fence->status, "device %s: %s: %s", device->ops->name, what, fence->why);
}

/* From the device to the buffer, or back. */
static tb_status add_box(const remote_batch *b, const remote_box *box, bool is_back, tb__move_list *out) {
    const remote_copy *copy = &b->copies.item[box->copy];
    const tb_binding *at = &box->binding;
    char *there = (char *)at->base + at->offset, *here = copy->buffer + (there - copy->address);
    const void *src = is_back ? here : there;
    tb__move move = {.ndim = at->shape.ndim,
                     .dst = is_back ? there : here,
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = &at->strides,
                     .src_dtype = at->dtype,
                     .wire_dtype = at->dtype,
                     .dst_dtype = at->dtype};
    memcpy(move.len, at->shape.dim, sizeof move.len);
    memcpy(move.dst_stride, at->strides, sizeof move.dst_stride);
    return tb__move_is_empty(&move) ? TB_OK : tb__move_list_add(out, &move);
}

/* Which boxes: of a pair, unless it is NULL, and of its groups of tensors from `first` to before `last`. */
typedef struct boxes {
    const remote_pair *pair;
    uint64_t first, last;
    bool is_back;
} boxes;

/* Lists the boxes of all tensors on one device. */
static tb_status list_boxes(const remote_batch *b, const tb__device *device, const boxes *of, tb__move_list *out) {
    for (size_t i = 0; i < b->nregistered; i++) {
        const remote_tensor *t = &b->tensors.item[i];
        if ((of->pair && t->pair != of->pair) || t->given.group < of->first || t->given.group >= of->last)
            continue;
        for (size_t j = 0; j < t->boxes.count; j++) {
            const remote_box *box = &t->boxes.item[j];
            if (b->copies.item[box->copy].device == device && (of->is_back ? box->is_written : box->is_read))
                TB_TRY(add_box(b, box, of->is_back, out));
        }
    }
    return TB_OK;
}

/* A job that the device does not finish is not freed. */
static tb_status run_moves(tb__device *device, const tb__move_list *list, int64_t deadline_ms) {
    tb__job *job;
    tb__fence *fence = tb__calloc(1, sizeof *fence);
    if (!fence)
        return TB_NO_MEMORY;
    tb_status status = device->ops->prepare(device, list->moves.item, list->moves.count, &job);
    if (status != TB_OK) {
        free(fence);
        return status;
    }
    status = device->ops->run(device, job, &(tb__run){0}, fence);
    bool is_over = status != TB_OK;
    if (status == TB_OK) {
        status = await_fence(device, fence, deadline_ms, "copying tensors");
        is_over = fence->is_done;
    }
    if (is_over) {
        device->ops->release(device, job);
        free(fence);
    }
    return status;
}

static tb_status copy_boxes(const remote_batch *b, const boxes *of, int64_t deadline_ms) {
    for (size_t i = 0; i < b->world->devices.count && b->copies.count > 0; i++) {
        tb__device *device = b->world->devices.item[i];
        tb__move_list list = {0};
        tb_status status = list_boxes(b, device, of, &list);
        if (status == TB_OK && list.moves.count > 0)
            status = run_moves(device, &list, deadline_ms);
        tb__move_list_fini(&list);
        TB_TRY(status);
    }
    return TB_OK;
}

tb_status tb__remote_copy_out(const remote_batch *b, int64_t deadline_ms) {
    return copy_boxes(b, &(boxes){.last = UINT64_MAX}, deadline_ms);
}

tb_status tb__remote_copy_back(const remote_batch *b, const remote_pair *pair, uint64_t first, uint64_t last,
                               int64_t deadline_ms) {
    return copy_boxes(b, &(boxes){pair, first, last, true}, deadline_ms);
}

tb_status tb__remote_wait_stream(const remote_batch *b, const void *stream, int64_t deadline_ms) {
    tb__device *device = b->memories.count ? b->memories.item[0].device
                         : b->copies.count ? b->copies.item[0].device
                                           : NULL;
    if (!device)
        return TB_OK;
    tb__fence *fence = tb__calloc(1, sizeof *fence);
    if (!fence)
        return TB_NO_MEMORY;
    tb_status status = tb__device_stream_record(device, stream, fence);
    bool is_over = status != TB_OK;
    if (status == TB_OK) {
        status = await_fence(device, fence, deadline_ms, "the work on the stream");
        is_over = fence->is_done;
    }
    if (is_over)
        free(fence);
    return status;
}
