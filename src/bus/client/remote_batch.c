/* Batches of a process whose seat an agent has: the description of their tensors for the agent, and registration. */
#include "bus/client/remote.h"

#include "base/log.h"
#include "base/text.h"
#include "bus/world.h"
#include "device/host/memory.h"
#include "layout/overlap.h"
#include "reshard/encode.h"

#include <string.h>

tb_status tb__remote_describe_host(remote_frame *f, const void *at, size_t nbytes, tb__payload_memory *out) {
    tb__arena_file file;
    *out = (tb__payload_memory){.kind = TB__MEMORY_ADDRESS, .address = (uint64_t)(uintptr_t)at, .nbytes = nbytes};
    if (!tb__memory_find(at, nbytes, &file))
        return TB_OK;
    *out = (tb__payload_memory){.kind = TB__MEMORY_FD,
                                .offset = (uint64_t)((const char *)at - (const char *)file.base),
                                .address = (uint64_t)(uintptr_t)at,
                                .nbytes = nbytes};
    size_t i = 0;
    while (i < f->fds.count && f->fds.item[i] != file.fd)
        i++;
    out->fd = (uint32_t)i;
    return i < f->fds.count || tb__vec_push(&f->fds, file.fd) ? TB_OK : TB_NO_MEMORY;
}

/* A tensor that is being described. */
typedef struct description {
    remote_batch *batch;
    remote_frame *frame; /* NULL: it is only checked */
    remote_tensor *mine;
    const tb_tensor *tensor;
    const tb_layout *pair;
    tb_shape local; /* of this rank's part */
    tb__tensor_payload *payload;
} description;

/* *copy is SIZE_MAX unless the memory is copied. */
static tb_status describe_memory(const description *d, const void *at, size_t nbytes, tb__payload_memory *out,
                                 size_t *copy) {
    tb__device *device;
    tb__memory memory;
    *copy = SIZE_MAX;
    if (nbytes == 0)
        return TB_OK;
    int area = out == &d->payload->scales ? 1 : out == &d->payload->scale ? 2 : 0;
    d->mine->areas[area].first = (uintptr_t)at;
    d->mine->areas[area].last = (uintptr_t)at + nbytes;
    TB_TRY(tb__remote_find_device(d->batch->world, at, nbytes, &device, &memory));
    const char *unit = device ? tb__device_unit_name(device, memory.index) : "host", *said = d->tensor->memory;
    if (said && strcmp(said, unit) != 0 && !(device && strcmp(said, device->ops->name) == 0))
        return tb__fail(TB_REFUSED, "its memory is said to be on device '%.40s', but is on device '%s'", said, unit);
    if (!d->frame)
        return TB_OK;
    return device ? tb__remote_describe_device(d->batch, d->frame, device, &memory, at, nbytes, out, copy)
                  : tb__remote_describe_host(d->frame, at, nbytes, out);
}

static tb_status add_box(const description *d, const tb_binding *binding, size_t copy, bool is_read, bool is_written) {
    remote_box box = {.binding = *binding, .copy = copy, .is_read = is_read, .is_written = is_written};
    return tb__vec_push(&d->mine->boxes, box) ? TB_OK : TB_NO_MEMORY;
}

/* Only received elements are written back: the view's elements, and its padding. */
static tb_status add_viewed_boxes(const description *d, const tb_binding *storage, size_t copy) {
    const tb__tensor_payload *p = d->payload;
    const tb_layout *layout = p->layout ? p->layout : d->pair;
    tb_view *view;
    tb_binding viewed, *padding = NULL;
    size_t npadding = 0;
    TB_TRY(add_box(d, storage, copy, true, !d->tensor->view));
    if (!d->tensor->view)
        return TB_OK;
    TB_TRY(tb_view_parse(d->tensor->view, &view));
    int32_t seat = d->mine->pair->index;
    tb_status status = tb_view_bind(view, &p->shape, layout, seat, storage, &viewed);
    if (status == TB_OK)
        status = tb_view_padding(view, &p->shape, layout, seat, storage, &padding, &npadding);
    if (status == TB_OK)
        status = add_box(d, &viewed, copy, false, true);
    for (size_t i = 0; i < npadding && status == TB_OK; i++)
        status = add_box(d, &padding[i], copy, false, true);
    free(padding);
    tb_view_destroy(view);
    return status;
}

static tb_status describe_plain(const description *d) {
    const tb_tensor *t = d->tensor;
    tb_binding binding;
    uintptr_t first, last;
    size_t copy;
    TB_TRY(tb_binding_contiguous(t->data, 0, t->dtype, &d->local, &binding));
    if (t->strides)
        memcpy(binding.strides, t->strides, (size_t)d->local.ndim * sizeof *t->strides);
    TB_TRY(tb__binding_span(&binding, &first, &last));
    if (first != last && !t->data)
        return tb__fail(TB_INVALID, "its data is NULL, but this rank holds elements of it");
    TB_TRY(describe_memory(d, (void *)first, last - first, &d->payload->data, &copy)); // NOLINT
    return copy == SIZE_MAX ? TB_OK : add_viewed_boxes(d, &binding, copy);
}

/* Describes contiguous bytes. */
static tb_status describe_bytes(const description *d, void *at, size_t nbytes, tb__payload_memory *out) {
    tb_shape shape = {.ndim = 1, .dim = {(int64_t)nbytes}};
    tb_binding binding;
    size_t copy;
    TB_TRY(describe_memory(d, at, nbytes, out, &copy));
    if (copy == SIZE_MAX)
        return TB_OK;
    TB_TRY(tb_binding_contiguous(at, 0, TB_U8, &shape, &binding));
    return add_box(d, &binding, copy, true, true);
}

static tb_status describe_encoded(const description *d) {
    const tb_tensor *t = d->tensor;
    tb__tensor_payload *p = d->payload;
    tb__encoding encoding;
    tb__encoded_size size;
    TB_TRY(tb__encoding_parse(t->encode, &encoding));
    TB_TRY(tb__encoded_measure(&encoding, &d->local, &size));
    TB_TRY(describe_bytes(d, t->data, size.data_nbytes, &p->data));
    if (t->scales)
        TB_TRY(describe_bytes(d, t->scales, size.scales_nbytes, &p->scales));
    return t->scale ? describe_bytes(d, t->scale, size.scale_nbytes, &p->scale) : TB_OK;
}

static tb_status describe_tensor(remote_batch *b, remote_tensor *mine, remote_frame *frame, tb__tensor_payload *p) {
    const tb_tensor *t = &mine->given;
    const tb_layout *pair = mine->pair->layout;
    tb_local local;
    p->dtype = t->dtype;
    p->shape.ndim = t->ndim;
    memcpy(p->shape.dim, t->shape, sizeof p->shape.dim);
    p->has_strides = t->strides;
    if (t->strides)
        memcpy(p->strides, t->strides, (size_t)t->ndim * sizeof *t->strides);
    p->view = t->view;
    p->encode = t->encode;
    p->scale_group = t->scale_group;
    p->group = t->group;
    p->wire_dtype = t->wire_dtype;
    if (t->layout)
        TB_TRY(tb_layout_parse(t->layout, &p->layout));
    if (tb_layout_index_of(p->layout ? p->layout : pair, mine->pair->index) < 0)
        return TB_OK; /* it has no part of it, also not of a scalar */
    TB_TRY(tb_layout_local(p->layout ? p->layout : pair, &p->shape, mine->pair->index, &local));
    description d = {
        .batch = b, .frame = frame, .mine = mine, .tensor = t, .pair = pair, .local = local.shape, .payload = p};
    d.local.ndim = t->ndim;
    tb_local_fini(&local);
    return t->encode ? describe_encoded(&d) : describe_plain(&d);
}

static void free_tensor(remote_tensor *t) {
    free(t->boxes.item);
    tb__remote_pair_unref(t->pair);
}

/* Copies the arrays and strings that the tensor's description points to. */
static tb_status keep_given(remote_batch *b, remote_tensor *mine, const tb_tensor *t, const char *name) {
    const char **texts[] = {&mine->given.layout,      &mine->given.view,   &mine->given.encode,
                            &mine->given.scale_group, &mine->given.memory, &mine->name};
    int64_t *strides = t->strides ? tb__arena_alloc(&b->arena, (size_t)t->ndim, sizeof *strides) : NULL;
    mine->given = *t;
    mine->name = name;
    if (t->strides && !strides)
        return TB_NO_MEMORY;
    if (strides)
        memcpy(strides, t->strides, (size_t)t->ndim * sizeof *strides);
    mine->given.strides = strides;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (*texts[i] && !(*texts[i] = tb__arena_strdup(&b->arena, *texts[i])))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* Adds its payload to the frame; NULL: checks the tensor. */
static tb_status encode_tensor(remote_batch *b, remote_tensor *t, remote_frame *frame) {
    tb__tensor_payload p = {.name = t->name};
    t->boxes.count = 0;
    pthread_mutex_lock(&b->world->device_lock);
    tb_status status = describe_tensor(b, t, frame, &p);
    pthread_mutex_unlock(&b->world->device_lock);
    if (status == TB_OK && frame)
        status = tb__tensor_encode(&p, t->pair->layout, &frame->payloads);
    tb_layout_destroy(p.layout);
    return status;
}

bool tb__remote_batch_has(const remote_batch *b, const char *pair) {
    for (size_t i = 0; i < b->nregistered; i++) {
        if (strcmp(b->tensors.item[i].pair->name, pair) == 0)
            return true;
    }
    return false;
}

static tb_status check_idle(const remote_batch *b) {
    if (!b->transfers[0] && !b->transfers[1] && !b->is_busy)
        return TB_OK;
    return tb__fail(TB_REFUSED, "batch '%s' is being %s; destroy that transfer first", b->name,
                    b->transfers[0] ? "received" : "sent");
}

static tb_status check_add(const remote_batch *b, const remote_pair *pair) {
    if (pair->world != b->world)
        return tb__fail(TB_INVALID, "pair '%s' is of another world", pair->name);
    if (tb__remote_batch_has(b, pair->name))
        return tb__fail(TB_REFUSED, "batch '%s' has been registered; nothing can be added to it", b->name);
    return check_idle(b);
}

static tb_status add_tensor(remote_batch *b, remote_pair *pair, const char *name, const tb_tensor *t) {
    remote_tensor mine = {.pair = pair};
    TB_TRY(check_add(b, pair));
    if (t->ndim < 0 || t->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a tensor has 0 to %d dimensions, not %d", TB_MAX_DIMS, t->ndim);
    pair->refs++;
    tb_status status = keep_given(b, &mine, t, name);
    if (status == TB_OK)
        status = encode_tensor(b, &mine, NULL);
    if (status == TB_OK && !tb__vec_push(&b->tensors, mine))
        status = TB_NO_MEMORY;
    if (status != TB_OK)
        free_tensor(&mine);
    return status;
}

tb_status tb__remote_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor) {
    remote_batch *b = (remote_batch *)batch;
    tb__link_lock(b->world->link);
    tb_status status = add_tensor(b, (remote_pair *)pair, name, tensor);
    tb__link_unlock(b->world->link);
    if (status != TB_OK)
        tb__prefix_detail("tensor '%.100s'", name);
    return status;
}

tb_status tb__remote_batch_add_pair(tb_batch *batch, tb_pair *pair) {
    remote_batch *b = (remote_batch *)batch;
    remote_tensor none = {.pair = (remote_pair *)pair};
    tb_status status = check_add(b, none.pair);
    if (status == TB_OK)
        status = tb__vec_push(&b->tensors, none) ? TB_OK : TB_NO_MEMORY;
    none.pair->refs += status == TB_OK;
    return status;
}

static void frame_fini(remote_frame *f) {
    tb__arena_fini(&f->arena);
    free(f->fds.item);
    free(f->memories.item);
    free(f->payloads.item);
    tb__memory_key_fini(&f->key);
}

/* Describes the tensors that the agent does not have. */
static tb_status fill_frame(remote_batch *b, remote_frame *f) {
    size_t n = b->tensors.count - b->nregistered, at = 0;
    tb__entry *entries = tb__arena_alloc(&f->arena, n, sizeof *entries);
    const char **sides = tb__arena_alloc(&f->arena, n, sizeof *sides);
    bool is_second_seat = false;
    if (!entries || !sides)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        remote_tensor *t = &b->tensors.item[b->nregistered + i];
        size_t start = f->payloads.count;
        tb_status status = t->name ? encode_tensor(b, t, f) : TB_OK;
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", t->name);
        entries[i] = (tb__entry){t->pair->name, {NULL, f->payloads.count - start}};
        sides[i] = t->pair->group;
        is_second_seat |= strcmp(sides[i], b->world->link->group) != 0;
    }
    for (size_t i = 0; i < n; at += entries[i++].payload.nbytes) /* they do not move any more */
        entries[i].payload.data = entries[i].payload.nbytes ? f->payloads.item + at : NULL;
    f->message.tensors = (tb__entries){n, entries};
    if (is_second_seat)
        f->message.sides = (tb__texts){n, sides};
    return TB_OK;
}

/* After those of files: the descriptors of device memory, and the mark's. */
static tb_status add_fds(const remote_batch *b, remote_frame *f) {
    tb__arena_file file = {0};
    if (!tb__vec_reserve(&f->fds, f->key.fds.count + 1))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < f->key.fds.count; i++)
        f->fds.item[f->fds.count++] = f->key.fds.item[i];
    (void)tb__memory_find(b->mark, sizeof *b->mark, &file); /* tb_alloc made it */
    f->message.mark = tb__some_uint(f->fds.count);
    f->message.mark_offset = (uint64_t)((const char *)b->mark - (const char *)file.base);
    f->fds.item[f->fds.count++] = file.fd;
    return TB_OK;
}

static tb_status send_frame(const remote_batch *b, remote_frame *f, int timeout_ms, bool *is_unmapped) {
    tb__link_reply *reply = NULL;
    pthread_mutex_lock(&b->world->device_lock);
    tb_status status = tb__remote_share_memories(b, f);
    pthread_mutex_unlock(&b->world->device_lock);
    *is_unmapped = status == TB_REFUSED;
    if (status == TB_OK)
        status = add_fds(b, f);
    if (status == TB_OK) {
        status = tb__link_call(b->world->link, &f->message, f->fds.item, f->fds.count, timeout_ms,
                               "registered the batch", &reply);
        *is_unmapped = status == TB_REFUSED && reply && reply->message.unmapped.value;
    }
    tb__link_reply_free(reply);
    return status;
}

/* *is_unmapped: the agent can't map device memory. */
static tb_status send_tensors(remote_batch *b, const tb__message *message, int timeout_ms, bool *is_unmapped) {
    remote_frame frame = {.message = *message};
    tb_status status = fill_frame(b, &frame);
    if (status == TB_OK)
        status = send_frame(b, &frame, timeout_ms, is_unmapped);
    frame_fini(&frame);
    return status;
}

static tb_status register_new(remote_batch *b, int timeout_ms) {
    const tb_batch_opts *o = &b->opts;
    tb__message message = {.kind = TB__REGISTER_TENSORS,
                           .batch_id = b->name,
                           .bucket_size = tb__some_uint((uint64_t)o->bucket_size),
                           .staging_bytes = (uint64_t)o->staging_bytes,
                           .group_window = o->group_window,
                           .max_in_flight = o->max_in_flight,
                           .ties = {o->nties, o->ties},
                           .ignored = {o->nignored, o->ignored},
                           .snapshot = o->snapshot,
                           .sends = o->sends,
                           .staged = o->staged,
                           .commit = o->commit == TB_SHADOW ? TB__SHADOW : TB__COMMIT_UNSAID,
                           .checksum = {.is_set = o->checksum, .value = o->checksum}};
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    bool is_unmapped = false;
    for (size_t i = b->nregistered; i < b->tensors.count; i++)
        TB_TRY(tb__remote_await_pair(b->tensors.item[i].pair, deadline_ms));
    int left_ms = tb__ms_until(deadline_ms);
    left_ms = left_ms > 0 ? left_ms : 1;
    tb_status status = send_tensors(b, &message, left_ms, &is_unmapped);
    if (is_unmapped && !b->world->copies_memory) {
        tb__log(TB_LOG_INFO, "batch '%s': device memory is copied through host memory: %s", b->name, tb_error_detail());
        b->world->copies_memory = true;
        status = send_tensors(b, &message, left_ms, &is_unmapped);
    }
    return status;
}

tb_status tb__remote_register_locked(remote_batch *b, int timeout_ms) {
    while (b->is_busy)
        tb__link_sleep(b->world->link);
    if (b->tensors.count == 0)
        return tb__fail(TB_INVALID, "batch '%s' has no tensors", b->name);
    if (b->nregistered == b->tensors.count)
        return TB_OK;
    b->is_busy = true;
    tb_status status = register_new(b, tb__remote_timeout(b->world, timeout_ms));
    if (status == TB_OK) {
        b->is_registered = true;
        b->nregistered = b->tensors.count;
        b->epoch++;
    }
    b->may_be_registered = status == TB_TIMEOUT || status == TB_CANCELLED;
    b->is_busy = false;
    tb__link_wake(b->world->link);
    return status;
}

static void forget_tensors(remote_batch *b, const char *pair) {
    size_t nkept = 0, nregistered = 0;
    for (size_t i = 0; i < b->tensors.count; i++) {
        if (strcmp(b->tensors.item[i].pair->name, pair) == 0) {
            free_tensor(&b->tensors.item[i]);
            continue;
        }
        nregistered += i < b->nregistered;
        b->tensors.item[nkept++] = b->tensors.item[i];
    }
    b->tensors.count = nkept;
    b->nregistered = nregistered;
    b->epoch++;
}

tb_status tb__remote_batch_remove_pair(tb_batch *batch, tb_pair *removed) {
    remote_batch *b = (remote_batch *)batch;
    const char *pair = ((remote_pair *)removed)->name;
    tb__message message = {.kind = TB__CLEANUP_BATCH, .batch_id = b->name, .pair_name = pair};
    bool is_there = tb__remote_batch_has(b, pair), is_new = false;
    for (size_t i = b->nregistered; i < b->tensors.count; i++)
        is_new |= strcmp(b->tensors.item[i].pair->name, pair) == 0;
    if (!is_there && !is_new)
        return tb__fail(TB_INVALID, "pair '%.100s' is not in batch '%.100s'", pair, b->name);
    TB_TRY(check_idle(b));
    if (is_there || b->may_be_registered) {
        tb_status status = tb__link_call(b->world->link, &message, NULL, 0, 0, "removed the pair", NULL);
        if (status != TB_OK && (is_there || status != TB_INVALID)) /* the agent may not have the pair */
            return status;
    }
    forget_tensors(b, pair);
    return TB_OK;
}

tb_status tb__remote_batch_rebind(tb_batch *batch, const tb_rebinding *tensors, size_t count) {
    return count == 0
               ? TB_OK
               : tb__fail(TB_REFUSED,
                          "tensor '%.100s' has moved, and an agent has batch '%.100s': destroy the batch and make "
                          "it again, or copy the tensor to where it was",
                          tensors[0].name, ((remote_batch *)batch)->name);
}

/* Lists the tensors that this process copies; the agent knows only the copies. */
static void add_copied(tb__text *text, const remote_batch *b, bool is_send) {
    for (size_t i = 0; i < b->nregistered; i++) {
        const remote_tensor *t = &b->tensors.item[i];
        for (size_t j = 0; j < t->boxes.count; j++) {
            const remote_copy *copy = &b->copies.item[t->boxes.item[j].copy];
            tb__memory memory;
            if (!(is_send ? t->boxes.item[j].is_read : t->boxes.item[j].is_written) ||
                !copy->device->ops->find(copy->device, copy->address, copy->nbytes, &memory))
                continue;
            tb__text_add(text, "  %s on %s is copied by its program %s: %s\n", t->name,
                         tb__device_unit_name(copy->device, memory.index),
                         is_send ? "to host memory before each send" : "from host memory after each receive",
                         memory.is_shareable ? "the agent can't map its memory" : "its memory can't be shared");
        }
    }
}

tb_status tb__remote_batch_dump(tb_batch *batch, bool is_send, char **out) {
    remote_batch *b = (remote_batch *)batch;
    tb__message m = {.kind = TB__DUMP, .batch_id = b->name, .direction = is_send ? TB__SEND : TB__RECV};
    tb__link_reply *reply = NULL;
    tb__text text = {0};
    tb_status status = b->is_registered ? tb__link_call(b->world->link, &m, NULL, 0, 0, "told the plan", &reply)
                                        : tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", b->name);
    if (status == TB_OK) {
        tb__text_add(&text, "%.*s", (int)reply->message.report.nbytes, (const char *)reply->message.report.data);
        add_copied(&text, b, is_send);
    }
    tb__link_reply_free(reply);
    return status == TB_OK ? tb__text_take(&text, out) : status;
}

tb_status tb__remote_batch_ir(tb_batch *batch, bool is_send, tb_ir **out) {
    const remote_batch *b = (const remote_batch *)batch;
    (void)is_send;
    (void)out;
    return tb__fail(TB_REFUSED, "batch '%s' is moved by an agent, which has its plan; tb_batch_dump shows it", b->name);
}

uint64_t tb__remote_batch_epoch(tb_batch *batch) {
    return ((const remote_batch *)batch)->epoch;
}

tb_status tb__remote_batch_roles(tb_batch *batch, const char *from, bool *sends, bool *receives, const char **to) {
    const remote_batch *b = (const remote_batch *)batch;
    for (size_t i = 0; i < b->tensors.count; i++) {
        const remote_pair *p = b->tensors.item[i].pair;
        bool is_source = strcmp(p->group, from) == 0, is_target = strcmp(p->remote, from) == 0;
        *sends |= is_source;
        *receives |= is_target;
        *to = is_source ? p->remote : is_target ? p->group : *to;
    }
    return *to ? TB_OK : tb__fail(TB_INVALID, "group '%.100s' is in no pair of batch '%s'", from, b->name);
}

bool tb__remote_mark_invalidated(remote_world *w, uintptr_t first, uintptr_t last) {
    bool is_used = false;
    for (remote_batch *b = LIST_FIRST(&w->batches); b; b = LIST_NEXT(b, link)) {
        for (size_t i = 0; i < b->tensors.count; i++) {
            const remote_tensor *t = &b->tensors.item[i];
            for (int j = 0; j < 3; j++) {
                bool meets = t->areas[j].first < last && first < t->areas[j].last;
                b->invalidated = meets && !b->invalidated ? t->name : b->invalidated;
                is_used |= meets;
            }
        }
    }
    return is_used;
}

void tb__remote_note_invalidated(remote_world *w) {
    for (remote_batch *b = LIST_FIRST(&w->batches); b; b = LIST_NEXT(b, link))
        b->agent_invalidated |= b->invalidated && b->is_registered && b->nregistered == b->tensors.count;
}

tb_status tb__remote_fail_invalidated(const remote_batch *b) {
    return tb__fail(TB_INVALID, "the memory of tensor '%.100s' on rank %d was invalidated; make batch '%s' again",
                    b->invalidated, (int)b->world->link->rank, b->name);
}

/* Makes the agent end the batch, if it has it. The tensors are in use until it has answered, or has ended: a stopped
 * agent may continue, and write. */
static void end_batch(remote_batch *b) {
    tb__link *l = b->world->link;
    tb__message message = {.kind = TB__CLEANUP_BATCH, .batch_id = b->name};
    uint64_t seq;
    tb__link_reply *reply = NULL;
    if (!b->is_registered && !b->may_be_registered)
        return;
    if (tb__link_post(l, &message, NULL, 0, INT64_MAX, &seq) == TB_OK)
        (void)tb__link_await_reply(l, seq, INT64_MAX, "cleaned up", &reply);
    if (!reply)
        tb__link_await_end(l);
    tb__link_reply_free(reply);
}

/* The agent drops a batch of which it had no pair before; otherwise its registration continues until the deadline, and
 * its outcome is unknown here. Keeps the error message. */
static void give_up_registration(remote_batch *b) {
    tb__saved_detail why = tb__save_detail();
    if (!b->is_registered)
        end_batch(b);
    b->may_be_registered = b->is_registered;
    tb__set_detail("%s", why.text);
}

tb_status tb__remote_batch_register(tb_batch *batch, int timeout_ms, const atomic_bool *cancelled) {
    remote_batch *b = (remote_batch *)batch;
    tb__link_lock(b->world->link);
    tb_status status = tb__remote_begin_cancellable(b->world, cancelled);
    if (status == TB_OK)
        status = tb__remote_register_locked(b, timeout_ms);
    tb__link_cancelled = NULL;
    if (status == TB_CANCELLED)
        give_up_registration(b);
    tb__link_unlock(b->world->link);
    return status;
}

static void free_batch(remote_batch *b) {
    for (size_t i = 0; i < b->tensors.count; i++)
        free_tensor(&b->tensors.item[i]);
    for (size_t i = 0; i < b->copies.count; i++)
        tb_free(b->copies.item[i].buffer);
    tb_free(b->mark);
    tb__arena_fini(&b->arena);
    free(b->copies.item);
    for (size_t i = 0; i < b->memories.count; i++)
        free(b->memories.item[i].ids.item);
    free(b->memories.item);
    free(b->tensors.item);
    free(b->name);
    free(b);
}

void tb__remote_batch_unref(remote_batch *b) {
    remote_world *w = b->world;
    bool is_child = tb__remote_is_inherited(w);
    if (!is_child)
        tb__link_lock(w->link);
    bool is_last = --b->refs == 0;
    if (is_last && !is_child)
        end_batch(b);
    if (is_last && !tb__remote_is_half_changed(w)) {
        LIST_REMOVE(b, link);
        free_batch(b);
    }
    if (!is_child)
        tb__link_unlock(w->link);
    if (is_last)
        tb__remote_unref(w);
}

void tb__remote_batch_destroy(tb_batch *batch) {
    tb__remote_batch_unref((remote_batch *)batch);
}

/* Copies the options' lists. */
static tb_status keep_opts(remote_batch *b) {
    tb_batch_opts *o = &b->opts;
    tb_tie *ties = tb__arena_alloc(&b->arena, o->nties, sizeof *ties);
    const char **ignored = tb__arena_alloc(&b->arena, o->nignored, sizeof *ignored);
    bool has_room = ties && ignored;
    for (size_t i = 0; i < o->nties && has_room; i++) {
        ties[i] =
            (tb_tie){tb__arena_strdup(&b->arena, o->ties[i].name), tb__arena_strdup(&b->arena, o->ties[i].canonical)};
        has_room = ties[i].name && ties[i].canonical;
    }
    for (size_t i = 0; i < o->nignored && has_room; i++)
        has_room = (ignored[i] = tb__arena_strdup(&b->arena, o->ignored[i]));
    o->ties = ties;
    o->ignored = ignored;
    return has_room ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__remote_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out) {
    remote_world *w = (remote_world *)world;
    if (opts->transform)
        return tb__fail(TB_REFUSED, "a transform needs a process that is on the bus itself: an agent can't call one of "
                                    "this process");
    remote_batch *b = tb__calloc(1, sizeof *b);
    if (!b)
        return TB_NO_MEMORY;
    *b = (remote_batch){.base = w->base, .world = w, .refs = 1, .opts = *opts, .name = tb__strdup(name)};
    tb_status status = b->name ? keep_opts(b) : TB_NO_MEMORY;
    if (status == TB_OK)
        status = tb_alloc(sizeof *b->mark, (void **)&b->mark);
    if (status != TB_OK) {
        free_batch(b);
        return status;
    }
    tb__link_lock(w->link);
    atomic_init(b->mark, 0);
    LIST_INSERT_HEAD(&w->batches, b, link);
    tb__link_unlock(w->link);
    atomic_fetch_add(&w->refs, 1);
    *out = (tb_batch *)b;
    return TB_OK;
}
