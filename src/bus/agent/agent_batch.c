/* Adds a client's tensors to a batch: maps or mirrors their memory. */
#include "bus/agent/agent_inside.h"

#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The state of adding tensors to a batch, in a job's thread. */
typedef struct filling {
    agent_job *job;
    tb_batch *batch;
    struct known_area {
        const agent_batch_pair *user; /* the last pair that has a reference; NULL: it is not mapped yet */
        agent_area area;
    } * files, *memories;         /* by descriptor, and by device memory, of the frame */
    bool has_maps;                /* the maps of the client were read: */
    tb__client_maps maps;         /* of the client */
    agent_batch_pair *batch_pair; /* of the tensor before ... */
    tb_layout *layout;            /* ... and its layout */
    uint64_t nbytes;              /* of the tensor */
    tb__mirrored mirrored;        /* its mirrored part */
} filling;

static tb_status map_file(agent_job *job, uint64_t fd, const char *what, tb__client_file **out) {
    if (fd >= job->nfds)
        return tb__fail(TB_INVALID, "%s in descriptor %" PRIu64 ", but %zu came with the command", what, fd, job->nfds);
    pthread_mutex_lock(&job->session->process_lock);
    tb_status status = tb__client_process_map_file(&job->session->process, job->fds[fd], out);
    pthread_mutex_unlock(&job->session->process_lock);
    return status;
}

static void unmap_file(agent_session *s, tb__client_file *file) {
    pthread_mutex_lock(&s->process_lock);
    tb__client_process_unmap_file(&s->process, file);
    pthread_mutex_unlock(&s->process_lock);
}

static void put_area(agent_batch *b, const agent_area *area) {
    b->nmapped -= area->memory || (area->file && area->file->base);
    if (area->mirror)
        tb__agent_put_mirror(b, area->mirror);
    if (area->memory)
        tb__agent_unmap_memory(b->session, area->memory);
    if (area->file)
        unmap_file(b->session, area->file);
}

static void put_areas(agent_batch *b, agent_batch_pair *p) {
    for (size_t i = 0; i < p->areas.count; i++)
        put_area(b, &p->areas.item[i]);
    free(p->areas.item);
    p->areas.item = NULL;
    p->areas.count = p->areas.capacity = 0;
}

/* The pair of the tensor gets the reference. */
static tb_status keep_area(filling *f, agent_area area) {
    agent_batch *b = f->job->batch;
    b->nmapped += area.memory || (area.file && area.file->base);
    if (tb__vec_push(&f->batch_pair->areas, area))
        return TB_OK;
    put_area(b, &area);
    return TB_NO_MEMORY;
}

static tb_status check_inside(const tb__payload_memory *m, size_t nbytes) {
    if (m->offset <= nbytes && m->nbytes <= nbytes - m->offset)
        return TB_OK;
    return tb__fail(TB_INVALID, "its %" PRIu64 " bytes from %" PRIu64 " on run past its memory, which has %zu",
                    m->nbytes, m->offset, nbytes);
}

static tb_status find_client_file(filling *f, const tb__payload_memory *m, tb__client_file **out) {
    bool is_known = m->fd < f->job->nfds && f->files[m->fd].user == f->batch_pair;
    agent_area area = is_known ? f->files[m->fd].area : (agent_area){0};
    size_t nbytes;
    if (!is_known) {
        TB_TRY(map_file(f->job, m->fd, "its memory is", &area.file));
        TB_TRY(keep_area(f, area));
        f->files[m->fd] = (struct known_area){f->batch_pair, area};
    }
    *out = area.file;
    TB_TRY(tb__client_file_size(*out, &nbytes));
    return check_inside(m, nbytes);
}

/* For reports; the last place is for all devices without a place of their own. Returns the name with the batch's
 * lifetime. */
static const char *note_device(agent_batch *b, const char *name) {
    const size_t most = TB__AGENT_MAX_DEVICES;
    size_t i = 0;
    tb__agent_lock(b->session->agent);
    while (i + 1 < most && b->devices[i][0] && strcmp(b->devices[i], name) != 0)
        i++;
    if (!b->devices[i][0])
        snprintf(b->devices[i], sizeof b->devices[i], "%s", i + 1 < most ? name : "others");
    tb__agent_unlock(b->session->agent);
    return b->devices[i];
}

static tb_status map_device_memory(filling *f, const tb__payload_memory *m, char **out, const char **device) {
    agent_job *job = f->job;
    bool is_known = m->fd < job->message.memories.count && f->memories[m->fd].user == f->batch_pair;
    agent_area area = is_known ? f->memories[m->fd].area : (agent_area){0};
    if (!is_known) {
        TB_TRY(tb__agent_map_memory(job, m->fd, &area.memory));
        TB_TRY(keep_area(f, area));
        f->memories[m->fd] = (struct known_area){f->batch_pair, area};
    }
    const tb__adopted *adopted = area.memory->adopted;
    TB_TRY(check_inside(m, adopted->memory.nbytes));
    *out = (char *)adopted->memory.base + m->offset;
    *device = note_device(job->batch, tb__device_unit_name(adopted->device, adopted->memory.index));
    return TB_OK;
}

/* `file` NULL: it is at an address. */
static tb_status mirror_memory(filling *f, const tb__payload_memory *m, const tb__client_file *file, char **out) {
    agent_area area = {0};
    if (!file && !f->has_maps)
        TB_TRY(tb__client_process_read_maps(&f->job->session->process, &f->maps));
    f->has_maps |= !file;
    TB_TRY(tb__agent_get_mirror(f->job->batch, m, file, &f->maps, &area.mirror));
    TB_TRY(keep_area(f, area));
    *out = area.mirror->data;
    return TB_OK;
}

/* Finds one of the tensor's memory areas. */
static tb_status map_memory(filling *f, const tb__payload_memory *m, int memory, const char *what, uint64_t needed,
                            char **out) {
    *out = NULL;
    if (needed == 0)
        return TB_OK;
    f->nbytes += needed;
    tb_status status = TB_OK;
    if (m->kind == TB__MEMORY_NONE || m->nbytes < needed)
        return tb__fail(TB_INVALID, "%s %" PRIu64 " bytes, but %" PRIu64 " are given", what, needed, m->nbytes);
    tb__client_file *file = NULL;
    if (m->kind == TB__MEMORY_FD)
        TB_TRY(find_client_file(f, m, &file));
    const tb__client_file *unmapped = file && !file->base ? file : NULL;
    const char *device = NULL;
    char where[64] = "host";
    if (m->copied_from)
        snprintf(where, sizeof where, "%s (copied by the client)", m->copied_from);
    else if (unmapped)
        snprintf(where, sizeof where, "host (file that is not sealed; copied)");
    if (m->kind != TB__MEMORY_DEVICE)
        device = note_device(f->job->batch, where);
    if (m->kind == TB__MEMORY_ADDRESS || unmapped) {
        status = mirror_memory(f, m, unmapped, out);
        f->mirrored.is_mirror[memory] = status == TB_OK;
        f->mirrored.file[memory] = unmapped;
        f->mirrored.file_shift[memory] = m->offset - (uint64_t)(uintptr_t)*out;
    } else if (file) {
        f->mirrored.is_all = false;
        *out = (char *)file->base + m->offset;
    } else {
        f->mirrored.is_all = false;
        status = map_device_memory(f, m, out, &device);
    }
    if (memory == TB__DATA)
        f->mirrored.device = device;
    f->mirrored.is_known[memory] = status == TB_OK && (m->kind == TB__MEMORY_ADDRESS || m->address);
    f->mirrored.shift[memory] = m->address - (uint64_t)(uintptr_t)*out;
    return status;
}

void tb__agent_batch_empty(agent_batch *b) {
    tb_batch_destroy(b->batch);
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        put_areas(b, &b->batch_pairs.item[i]);
    if (b->mark_file)
        unmap_file(b->session, b->mark_file);
    free(b->mirrors.item);
}

tb_status tb__agent_batch_drop(agent_batch *b, size_t leaving) {
    const char *name = b->batch_pairs.item[leaving].pair->name;
    TB_TRY(tb_batch_remove_pair(b->batch, b->batch_pairs.item[leaving].held)); /* both sides of it */
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        if (strcmp(b->batch_pairs.item[i].pair->name, name) == 0)
            put_areas(b, &b->batch_pairs.item[i]);
    }
    return TB_OK;
}

/* This rank's part of the stored tensor. */
static tb_status get_local(const filling *f, const tb__tensor_payload *p, tb_shape *out) {
    tb_local local;
    TB_TRY(tb_layout_local(p->layout ? p->layout : f->layout, &p->shape, f->batch_pair->pair->index, &local));
    *out = local.shape;
    out->ndim = p->shape.ndim;
    tb_local_fini(&local);
    return TB_OK;
}

/* With negative strides, the tensor's data does not begin at the start of its memory. */
static tb_status locate_plain(filling *f, const tb__tensor_payload *p, const tb_shape *local, tb_tensor *t) {
    tb_binding b;
    uintptr_t first, last;
    char *memory;
    TB_TRY(tb_binding_contiguous((void *)(UINTPTR_MAX / 2), 0, p->dtype, local, &b)); // NOLINT: only measured
    if (p->has_strides)
        memcpy(b.strides, p->strides, sizeof b.strides);
    TB_TRY(tb__binding_span(&b, &first, &last));
    TB_TRY(map_memory(f, &p->data, TB__DATA, "this rank's part of it has", last - first, &memory));
    t->data = memory ? memory + (UINTPTR_MAX / 2 - first) : NULL;
    return TB_OK;
}

static tb_status locate_encoded(filling *f, const tb__tensor_payload *p, const tb_shape *local, tb_tensor *t) {
    tb__encoding encoding;
    tb__encoded_size size;
    TB_TRY(tb__encoding_parse(p->encode, &encoding));
    TB_TRY(tb__encoded_measure(&encoding, local, &size));
    TB_TRY(map_memory(f, &p->data, TB__DATA, "its data has", size.data_nbytes, (char **)&t->data));
    TB_TRY(map_memory(f, &p->scales, TB__SCALES, "its scales have", size.scales_nbytes, (char **)&t->scales));
    return map_memory(f, &p->scale, TB__SCALE, "its scale has", size.scale_nbytes, (char **)&t->scale);
}

/* Finds the stored tensor's memory, and its layout, which is to be freed. */
static tb_status locate_tensor(filling *f, const tb__tensor_payload *p, tb_tensor *t, char **layout) {
    tb_shape local;
    f->nbytes = 0;
    f->mirrored = (tb__mirrored){.is_all = true};
    bool is_outside = tb_layout_index_of(p->layout ? p->layout : f->layout, f->batch_pair->pair->index) < 0;
    TB_TRY(get_local(f, p, &local));
    if (!is_outside)
        TB_TRY(p->encode ? locate_encoded(f, p, &local, t) : locate_plain(f, p, &local, t));
    return p->layout ? tb_layout_format(p->layout, layout) : TB_OK;
}

static tb_status add_client_tensor(filling *f, const tb__tensor_payload *p) {
    tb_tensor t = {.size = sizeof t,
                   .dtype = p->dtype,
                   .ndim = p->shape.ndim,
                   .strides = p->has_strides ? p->strides : NULL,
                   .wire_dtype = p->wire_dtype,
                   .group = p->group,
                   .view = p->view,
                   .encode = p->encode,
                   .scale_group = p->scale_group};
    char *layout = NULL;
    memcpy(t.shape, p->shape.dim, sizeof t.shape);
    tb_status status = locate_tensor(f, p, &t, &layout);
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s'", p->name);
    t.layout = layout;
    status = tb__batch_add_mirrored(f->batch, f->batch_pair->held, p->name, &t,
                                    &f->mirrored); /* its error messages name the tensor */
    free(layout);
    if (status != TB_OK)
        return status;
    tb__agent_lock(f->job->agent);
    f->batch_pair->ntensors++;
    f->batch_pair->nbytes += f->nbytes;
    tb__agent_unlock(f->job->agent);
    return TB_OK;
}

static bool is_of(const agent_batch_pair *p, const char *name, const char *side) {
    return strcmp(p->pair->name, name) == 0 && strcmp(p->pair->local, side) == 0;
}

static tb_status choose_pair(filling *f, const char *name, const char *side) {
    const agent_batch *b = f->job->batch;
    if (f->batch_pair && is_of(f->batch_pair, name, side))
        return TB_OK;
    tb_layout_destroy(f->layout);
    f->layout = NULL;
    f->batch_pair = NULL;
    for (size_t i = 0; i < b->batch_pairs.count && !f->batch_pair; i++) {
        if (is_of(&b->batch_pairs.item[i], name, side))
            f->batch_pair = &b->batch_pairs.item[i];
    }
    return f->batch_pair ? tb__pair_layout_parse(f->batch_pair->pair->layout, f->batch_pair->pair->index, &f->layout)
                         : tb__fail(TB_INTERNAL, "pair '%.100s' is gone", name);
}

static tb_status add_all_tensors(filling *f) {
    const tb__entries *entries = &f->job->message.tensors;
    for (size_t i = 0; i < entries->count; i++) {
        tb__tensor_payload p;
        if (entries->item[i].payload.nbytes == 0)
            continue; /* the pair is added below */
        TB_TRY(choose_pair(f, entries->item[i].pair_name, tb__agent_side_of(f->job, i)));
        tb_status status = tb__tensor_decode(entries->item[i].payload, f->layout, &f->job->arena, &p);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor %zu", i);
        status = add_client_tensor(f, &p);
        tb_layout_destroy(p.layout);
        TB_TRY(status);
    }
    const agent_batch *b = f->job->batch;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        if (b->batch_pairs.item[i].round == b->round)
            TB_TRY(tb_batch_add_pair(f->batch, b->batch_pairs.item[i].held));
    }
    return TB_OK;
}

/* Maps the mark: when this process has ended, the client reads there whether it may have been writing. */
static tb_status map_mark(filling *f) {
    agent_job *job = f->job;
    const tb__message *m = &job->message;
    agent_batch *b = job->batch;
    size_t size = sizeof *f->batch->mark;
    if (!m->mark.is_set || b->mark_file)
        return TB_OK;
    TB_TRY(map_file(job, m->mark.value, "the mark is", &b->mark_file));
    if (!b->mark_file->base)
        return tb__fail(TB_DENIED, "the mark is in memory that is not sealed against shrinking");
    if (b->mark_file->nbytes < size || m->mark_offset > b->mark_file->nbytes - size || m->mark_offset % size != 0)
        return tb__fail(TB_INVALID, "the mark at %" PRIu64 " is not in its memory, which has %zu bytes", m->mark_offset,
                        b->mark_file->nbytes);
    f->batch->mark = (_Atomic uint32_t *)((char *)b->mark_file->base + m->mark_offset);
    return TB_OK;
}

static tb_status fill_batch(filling *f) {
    agent_batch *b = f->job->batch;
    TB_TRY(map_mark(f));
    TB_TRY(add_all_tensors(f));
    tb__agent_lock(f->job->agent);
    f->job->message.tensors = f->job->message.memories = (tb__entries){0};
    tb__agent_job_drop_frame(f->job); /* registering may take long */
    b->registering = f->batch;        /* for tb__agent_make_report, which describes the wait */
    tb__agent_unlock(f->job->agent);
    tb_status status = tb__local_batch_register(f->batch, tb__agent_job_timeout(f->job), &b->is_cancelled);
    tb__agent_lock(f->job->agent);
    b->registering = NULL;
    tb__agent_unlock(f->job->agent);
    return status;
}

/* Removes what this round has added; the loop removes the batch_pairs. */
static void undo_round(agent_batch *b) {
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        if (b->batch_pairs.item[i].round != b->round)
            continue;
        (void)tb_batch_remove_pair(b->batch, b->batch_pairs.item[i].held); /* fails if the pair is not there */
        put_areas(b, &b->batch_pairs.item[i]);
    }
}

tb_status tb__agent_batch_fill(agent_job *job) {
    const tb__message *m = &job->message;
    filling f = {.job = job,
                 .files = tb__calloc(job->nfds, sizeof *f.files),
                 .memories = tb__calloc(m->memories.count, sizeof *f.memories)};
    tb_batch_opts opts = {.size = sizeof opts,
                          .bucket_size = m->bucket_size.is_set ? (int64_t)m->bucket_size.value : 1,
                          .staging_bytes = (int64_t)m->staging_bytes,
                          .group_window = (uint32_t)m->group_window,
                          .max_in_flight = (uint32_t)m->max_in_flight,
                          .staged = m->staged,
                          .commit = m->commit == TB__SHADOW ? TB_SHADOW : TB_IN_PLACE,
                          .checksum = job->agent->checksum || (m->checksum.is_set && m->checksum.value),
                          .snapshot = m->snapshot,
                          .sends = m->sends,
                          .ties = m->ties.item,
                          .nties = m->ties.count,
                          .ignored = m->ignored.item,
                          .nignored = m->ignored.count};
    agent_batch *b = job->batch;
    tb_status status = f.files && f.memories ? TB_OK : TB_NO_MEMORY;
    f.batch = b->batch; /* NULL: it has to be made */
    if (status == TB_OK && !f.batch)
        status = tb_batch_create(job->agent->world, b->id, &opts, &f.batch);
    if (status == TB_OK)
        status = fill_batch(&f);
    tb_layout_destroy(f.layout);
    free(f.files);
    free(f.memories);
    free(f.maps.item);
    if (status == TB_OK) {
        job->registered = f.batch;
        return TB_OK;
    }
    tb__saved_detail why = tb__save_detail();
    if (b->batch)
        undo_round(b);
    else
        tb_batch_destroy(f.batch);
    return tb__fail(status, "%s", why.text);
}
