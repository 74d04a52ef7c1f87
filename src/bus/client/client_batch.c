/* Pairs and batches of a client. */
#include "bus/client/client.h"

#include "base/log.h"
#include "base/opts.h"
#include "device/host/memory.h"
#include "layout/overlap.h"
#include "reshard/encode.h"

#include <string.h>

/* ---- Pairs ----------------------------------------------------------------------------------------------------- */

static struct tb__client_pair *find_client_pair(const tb_client *c, const char *name) {
    for (size_t i = 0; i < c->pairs.count; i++) {
        if (strcmp(c->pairs.item[i].name, name) == 0)
            return &c->pairs.item[i];
    }
    return NULL;
}

/* A pair that was made again may have another layout. */
static tb_status remember_pair(tb_client *c, const char *name, const char *layout) {
    struct tb__client_pair *known = find_client_pair(c, name);
    struct tb__client_pair pair = {known ? NULL : tb__strdup(name), tb__strdup(layout)};
    if (known && pair.layout) {
        free(known->layout);
        known->layout = pair.layout;
        return TB_OK;
    }
    if (pair.name && pair.layout && tb__vec_push(&c->pairs, pair))
        return TB_OK;
    free(pair.name);
    free(pair.layout);
    return TB_NO_MEMORY;
}

tb_status tb_client_init_pair(tb_client *c, const char *name, const char *remote_group, const char *text,
                              int timeout_ms) {
    TB_TRY(tb__client_check(c, "client"));
    tb_layout *layout;
    tb__bytes mesh = {0}, placements = {0};
    TB_TRY(tb_layout_parse(text, &layout));
    tb_status status = tb__mesh_encode(layout, &mesh);
    if (status == TB_OK)
        status = tb__placements_encode(layout, &placements);
    tb_layout_destroy(layout);
    if (status == TB_OK) {
        tb__message message = {.kind = TB__INIT_PAIR,
                               .pair_name = name,
                               .local_name = c->group,
                               .expected_world_size = (uint64_t)c->size,
                               .remote_name = remote_group,
                               .mesh = {mesh.item, mesh.count},
                               .placements = {placements.item, placements.count}};
        status = tb__client_call(c, &message, NULL, 0, timeout_ms, "made the pair", NULL);
    }
    free(mesh.item);
    free(placements.item);
    return status == TB_OK ? remember_pair(c, name, text) : status;
}

/* ---- Batches --------------------------------------------------------------------------------------------------- */

/* The options' lists are the caller's. */
static tb_status keep_opts(tb_client_batch *b) {
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

tb_status tb_client_batch_create(tb_client *c, const char *name, const tb_batch_opts *opts, tb_client_batch **out) {
    TB_TRY(tb__client_check(c, "client"));
    tb_batch_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.transform)
        return tb__fail(TB_REFUSED, "an agent can't call a transform of this process");
    if (o.bucket_size < 0 || o.staging_bytes < 0)
        return tb__fail(TB_INVALID, "bucket_size and staging_bytes can't be negative");
    tb_client_batch *b = tb__calloc(1, sizeof *b);
    if (!b)
        return TB_NO_MEMORY;
    b->client = c;
    b->opts = o;
    c->refs++;
    LIST_INSERT_HEAD(&c->batches, b, link);
    b->name = tb__strdup(name);
    tb_status status = b->name ? keep_opts(b) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb_client_batch_destroy(b);
        return status;
    }
    *out = b;
    return TB_OK;
}

tb_status tb__client_describe_host(tb_client_batch *b, struct tb__client_tensor *mine, const void *at, size_t nbytes,
                                   tb__payload_memory *out) {
    tb__arena_file file;
    *out = (tb__payload_memory){.kind = TB__MEMORY_ADDRESS, .address = (uint64_t)(uintptr_t)at, .nbytes = nbytes};
    if (!tb__memory_find(at, nbytes, &file))
        return TB_OK;
    *out = (tb__payload_memory){
        .kind = TB__MEMORY_FD, .offset = (uint64_t)((const char *)at - (const char *)file.base), .nbytes = nbytes};
    size_t i = 0;
    while (i < b->fds.count && b->fds.item[i] != file.fd)
        i++;
    out->fd = (uint32_t)i;
    mine->fds[mine->nfds++] = out->fd;
    return i < b->fds.count || tb__vec_push(&b->fds, file.fd) ? TB_OK : TB_NO_MEMORY;
}

/* A tensor that is being described. */
typedef struct description {
    tb_client_batch *batch;
    struct tb__client_tensor *mine;
    const tb_tensor *tensor;
    tb_layout *pair;
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
    TB_TRY(tb__client_find_device(d->batch->client, at, nbytes, &device, &memory));
    const char *unit = device ? tb__device_unit_name(device, memory.index) : "host", *said = d->tensor->memory;
    if (said && strcmp(said, unit) != 0 && !(device && strcmp(said, device->ops->name) == 0))
        return tb__fail(TB_REFUSED, "its memory is said to be on device '%.40s', but is on device '%s'", said, unit);
    if (!device)
        return tb__client_describe_host(d->batch, d->mine, at, nbytes, out);
    d->mine->name = d->payload->name;
    return tb__client_describe_device(d->batch, d->mine, device, &memory, at, nbytes, out, copy);
}

static tb_status add_box(const description *d, const tb_binding *binding, size_t copy, bool is_read, bool is_written) {
    tb__client_box box = {.binding = *binding, .copy = copy, .is_read = is_read, .is_written = is_written};
    return tb__vec_push(&d->mine->boxes, box) ? TB_OK : TB_NO_MEMORY;
}

/* What is received is written back, and nothing else: the view's elements, and its padding. */
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
    int32_t seat = d->batch->client->index;
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
        return tb__fail(TB_INVALID, "its data is NULL, but this rank holds some of it");
    TB_TRY(describe_memory(d, (void *)first, last - first, &d->payload->data, &copy)); // NOLINT
    return copy == SIZE_MAX ? TB_OK : add_viewed_boxes(d, &binding, copy);
}

/* All of its bytes, which are side by side. */
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

static tb_status describe_tensor(tb_client_batch *b, struct tb__client_tensor *mine, const tb_tensor *t,
                                 tb_layout *pair, tb__tensor_payload *p) {
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
    TB_TRY(tb_layout_local(p->layout ? p->layout : pair, &p->shape, b->client->index, &local));
    description d = {.batch = b, .mine = mine, .tensor = t, .pair = pair, .local = local.shape, .payload = p};
    d.local.ndim = t->ndim;
    tb_local_fini(&local);
    return t->encode ? describe_encoded(&d) : describe_plain(&d);
}

static void free_tensor(struct tb__client_tensor *t) {
    free(t->payload.item);
    free(t->boxes.item);
}

/* Copies what the tensor's description points to. */
static tb_status keep_given(tb_client_batch *b, struct tb__client_tensor *mine, const tb_tensor *t) {
    const char **texts[] = {&mine->given.layout,      &mine->given.view,   &mine->given.encode,
                            &mine->given.scale_group, &mine->given.memory, &mine->name};
    int64_t *strides = t->strides ? tb__arena_alloc(&b->arena, (size_t)t->ndim, sizeof *strides) : NULL;
    mine->given = *t;
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

static tb_status encode_tensor(tb_client_batch *b, const tb_tensor *t, tb_layout *pair, const char *name,
                               struct tb__client_tensor *mine) {
    tb__tensor_payload p = {.name = name};
    tb_status status = describe_tensor(b, mine, t, pair, &p);
    if (status == TB_OK)
        status = tb__tensor_encode(&p, pair, &mine->payload);
    tb_layout_destroy(p.layout);
    return status;
}

static tb_status add_tensor(tb_client_batch *b, const struct tb__client_pair *pair, const char *name,
                            const tb_tensor *t) {
    struct tb__client_tensor mine = {.pair = pair->name};
    tb_layout *layout;
    TB_TRY(tb_layout_parse(pair->layout, &layout));
    tb_status status = encode_tensor(b, t, layout, name, &mine);
    tb_layout_destroy(layout);
    if (status == TB_OK && mine.name)
        status = keep_given(b, &mine, t);
    if (status == TB_OK && !tb__vec_push(&b->tensors, mine))
        status = TB_NO_MEMORY;
    if (status != TB_OK)
        free_tensor(&mine);
    return status;
}

/* Describes a tensor anew: its memory is not mapped, but copied. */
static tb_status encode_again(tb_client_batch *b, struct tb__client_tensor *t) {
    const struct tb__client_pair *pair = find_client_pair(b->client, t->pair);
    struct tb__client_tensor again = {.pair = t->pair};
    tb_layout *layout;
    TB_TRY(tb_layout_parse(pair->layout, &layout));
    tb_status status = encode_tensor(b, &t->given, layout, t->name, &again);
    tb_layout_destroy(layout);
    if (status != TB_OK) {
        free_tensor(&again);
        return tb__fail_within(status, "tensor '%.100s'", t->name);
    }
    again.name = t->name;
    again.given = t->given;
    free_tensor(t);
    *t = again;
    return TB_OK;
}

/* Whether the agent has the pair in this batch. */
static bool has_pair(const tb_client_batch *b, const char *pair) {
    for (size_t i = 0; i < b->nregistered; i++) {
        if (strcmp(b->tensors.item[i].pair, pair) == 0)
            return true;
    }
    return false;
}

tb_status tb_client_batch_add(tb_client_batch *b, const char *pair, const char *name, const tb_tensor *tensor) {
    TB_TRY(tb__client_check(b->client, "batch"));
    const struct tb__client_pair *known = find_client_pair(b->client, pair);
    if (!known)
        return tb__fail(TB_INVALID, "tensor '%.100s': there is no pair '%.100s'", name, pair);
    if (has_pair(b, pair))
        return tb__fail(TB_REFUSED, "batch '%s' has been registered; nothing can be added to its pairs", b->name);
    tb_tensor t;
    tb_status status = tb__struct_read(&t, sizeof t, tensor, 0, "a tb_tensor");
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s'", name);
    if (t.ndim < 0 || t.ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a tensor has 0 to %d dimensions, not %d", TB_MAX_DIMS, t.ndim);
    status = add_tensor(b, known, name, &t);
    if (status != TB_OK)
        tb__prefix_detail("tensor '%.100s'", name);
    return status;
}

tb_status tb_client_batch_add_pair(tb_client_batch *b, const char *pair) {
    TB_TRY(tb__client_check(b->client, "batch"));
    const struct tb__client_pair *known = find_client_pair(b->client, pair);
    if (!known)
        return tb__fail(TB_INVALID, "there is no pair '%.100s'", pair);
    if (has_pair(b, pair))
        return tb__fail(TB_REFUSED, "batch '%s' has been registered; nothing can be added to its pairs", b->name);
    return tb__vec_push(&b->tensors, (struct tb__client_tensor){.pair = known->name}) ? TB_OK : TB_NO_MEMORY;
}

/* The descriptors that the new tensors use, at their indices. The others may be closed by now: any descriptor fills
 * their places. */
static tb_status gather_fds(const tb_client_batch *b, int **out, size_t *count) {
    int *fds = tb__malloc(b->fds.count, sizeof *fds);
    size_t n = 0;
    int any = -1;
    if (!fds)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < b->fds.count; i++)
        fds[i] = -1;
    for (size_t i = b->nregistered; i < b->tensors.count; i++) {
        const struct tb__client_tensor *t = &b->tensors.item[i];
        for (size_t j = 0; j < t->nfds; j++) {
            any = fds[t->fds[j]] = b->fds.item[t->fds[j]];
            n = t->fds[j] >= n ? t->fds[j] + 1 : n;
        }
    }
    for (size_t i = 0; i < n; i++)
        fds[i] = fds[i] < 0 ? any : fds[i];
    *out = fds;
    *count = n;
    return TB_OK;
}

/* With the descriptors of device memory after those of files. */
static tb_status call_with_memories(tb_client_batch *b, tb__message *message, const int *fds, size_t nfds,
                                    int timeout_ms) {
    tb__memory_key key = {0}; /* for the descriptors */
    tb_status status = tb__client_share_memories(b, nfds, &message->memories, &key);
    int *all = tb__malloc(nfds + key.fds.count, sizeof *all);
    if (status == TB_OK && !all)
        status = TB_NO_MEMORY;
    if (status == TB_OK) {
        memcpy(all, fds, nfds * sizeof *all);
        if (key.fds.count > 0)
            memcpy(all + nfds, key.fds.item, key.fds.count * sizeof *all);
        status =
            tb__client_call(b->client, message, all, nfds + key.fds.count, timeout_ms, "registered the batch", NULL);
    } else {
        b->client->is_unmapped = status == TB_REFUSED;
    }
    for (size_t i = 0; i < message->memories.count; i++)
        free((void *)(uintptr_t)message->memories.item[i].payload.data);
    free((void *)(uintptr_t)message->memories.item);
    message->memories = (tb__entries){0};
    tb__memory_key_fini(&key);
    free(all);
    return status;
}

static tb_status send_tensors(tb_client_batch *b, tb__message *message, int timeout_ms) {
    size_t n = b->tensors.count - b->nregistered, nfds = 0;
    int *fds = NULL;
    tb__entry *entries = tb__malloc(n, sizeof *entries);
    tb_status status = entries ? gather_fds(b, &fds, &nfds) : TB_NO_MEMORY;
    for (size_t i = 0; i < n && status == TB_OK; i++) {
        const struct tb__client_tensor *t = &b->tensors.item[b->nregistered + i];
        entries[i] = (tb__entry){t->pair, {t->payload.item, t->payload.count}};
    }
    message->tensors = (tb__entries){n, entries};
    if (status == TB_OK)
        status = call_with_memories(b, message, fds, nfds, timeout_ms);
    free(entries);
    free(fds);
    return status;
}

/* The agent can't map device memory. */
static tb_status copy_from_now_on(tb_client_batch *b) {
    tb__log(TB_LOG_INFO, "batch '%s': device memory is copied through host memory: %s", b->name, tb_error_detail());
    b->client->copies_memory = true;
    for (size_t i = b->nregistered; i < b->tensors.count; i++) {
        if (b->tensors.item[i].name)
            TB_TRY(encode_again(b, &b->tensors.item[i]));
    }
    return TB_OK;
}

tb_status tb_client_register(tb_client_batch *b, int timeout_ms) {
    TB_TRY(tb__client_check(b->client, "batch"));
    const tb_batch_opts *o = &b->opts;
    tb__message message = {.kind = TB__REGISTER_TENSORS,
                           .batch_id = b->name,
                           .bucket_size = (uint64_t)o->bucket_size,
                           .staging_bytes = (uint64_t)o->staging_bytes,
                           .group_window = o->group_window,
                           .max_in_flight = o->max_in_flight,
                           .ties = {o->nties, o->ties},
                           .ignored = {o->nignored, o->ignored},
                           .snapshot = o->snapshot,
                           .staged = o->staged,
                           .commit = o->commit == TB_SHADOW ? TB__SHADOW : TB__COMMIT_UNSAID,
                           .checksum = {.is_set = o->checksum, .value = o->checksum}};
    if (b->is_registered && b->nregistered == b->tensors.count)
        return tb__fail(TB_REFUSED, "batch '%s' has been registered already", b->name);
    bool is_empty = b->tensors.count == 0; /* then this rank is idle in all pairs */
    for (size_t i = 0; is_empty && i < b->client->pairs.count; i++)
        TB_TRY(tb_client_batch_add_pair(b, b->client->pairs.item[i].name));
    tb_status status = send_tensors(b, &message, timeout_ms);
    if (status == TB_REFUSED && b->client->is_unmapped && !b->client->copies_memory) {
        status = copy_from_now_on(b);
        if (status == TB_OK)
            status = send_tensors(b, &message, timeout_ms);
    }
    if (status == TB_OK) {
        b->is_registered = true;
        b->nregistered = b->tensors.count;
    }
    b->may_be_registered = status == TB_TIMEOUT;
    return status;
}

static void forget_tensors(tb_client_batch *b, const char *pair) {
    size_t nkept = 0, nregistered = 0;
    for (size_t i = 0; i < b->tensors.count; i++) {
        if (strcmp(b->tensors.item[i].pair, pair) == 0) {
            free_tensor(&b->tensors.item[i]);
            continue;
        }
        nregistered += i < b->nregistered;
        b->tensors.item[nkept++] = b->tensors.item[i];
    }
    b->tensors.count = nkept;
    b->nregistered = nregistered;
}

tb_status tb_client_batch_remove_pair(tb_client_batch *b, const char *pair) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__message message = {.kind = TB__CLEANUP_BATCH, .batch_id = b->name, .pair_name = pair};
    bool is_there = has_pair(b, pair), is_new = false;
    for (size_t i = b->nregistered; i < b->tensors.count; i++)
        is_new |= strcmp(b->tensors.item[i].pair, pair) == 0;
    if (!is_there && !is_new)
        return tb__fail(TB_INVALID, "pair '%.100s' is not in batch '%.100s'", pair, b->name);
    if (is_there || b->may_be_registered) {
        tb_status status = tb__client_call(b->client, &message, NULL, 0, 0, "removed the pair", NULL);
        if (status != TB_OK && (is_there || status != TB_INVALID)) /* the agent may not have the pair */
            return status;
    }
    forget_tensors(b, pair);
    return TB_OK;
}

tb_status tb_client_cleanup(tb_client_batch *b) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__message message = {.kind = TB__CLEANUP_BATCH, .batch_id = b->name};
    TB_TRY(tb__client_call(b->client, &message, NULL, 0, 0, "cleaned up", NULL));
    b->is_registered = false;
    b->nregistered = 0;
    tb__client_forget(b->client, b);
    return TB_OK;
}

void tb__client_batch_end(tb_client_batch *b) {
    if ((b->is_registered || b->may_be_registered) && b->client->broken == TB_OK)
        (void)tb_client_cleanup(b); /* which is refused in a forked child */
}

void tb_client_batch_destroy(tb_client_batch *b) {
    if (!b)
        return;
    if (tb__client_is_half_changed(b->client)) {
        b->client->refs--;
        return;
    }
    tb__client_batch_end(b);
    LIST_REMOVE(b, link);
    tb__client_forget(b->client, b);
    tb__client_unref(b->client);
    tb__arena_fini(&b->arena);
    for (size_t i = 0; i < b->tensors.count; i++)
        free_tensor(&b->tensors.item[i]);
    for (size_t i = 0; i < b->copies.count; i++)
        tb_free(b->copies.item[i].buffer);
    free(b->copies.item);
    free(b->memories.item);
    free(b->tensors.item);
    free(b->fds.item);
    free(b->name);
    free(b);
}
