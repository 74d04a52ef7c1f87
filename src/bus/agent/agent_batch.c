/* Tensors of clients: where their memory is, here, as pairs come to a batch and go. */
#include "bus/agent/agent_inside.h"

#include "layout/overlap.h"

#include <inttypes.h>
#include <string.h>

/* A batch that is being filled, by a job's thread. */
typedef struct filling {
    agent_job *job;
    tb_batch *batch;
    tb__guest_file **files; /* by descriptor of the frame; NULL: not mapped yet */
    agent_share *share;     /* of the tensor before ... */
    tb_layout *layout;      /* ... and its layout */
    uint64_t nbytes;        /* of the tensor */
    tb__mirrored mirrored;  /* what of it is */
} filling;

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static tb_status map_file(filling *f, const tb__payload_memory *m, char **out) {
    agent_job *job = f->job;
    if (m->fd >= job->nfds)
        return tb__fail(TB_INVALID, "its memory is in descriptor %" PRIu32 ", but %zu came with the command", m->fd,
                        job->nfds);
    tb__guest_file *file = f->files[m->fd];
    if (!file) {
        pthread_mutex_lock(&job->session->guest_lock);
        tb_status status = tb__guest_take_file(&job->session->guest, job->fds[m->fd], &file);
        pthread_mutex_unlock(&job->session->guest_lock);
        TB_TRY(status);
        f->files[m->fd] = file;
        if (!tb__vec_push(&job->batch->files, ((agent_file){file, job->batch->round}))) {
            pthread_mutex_lock(&job->session->guest_lock);
            tb__guest_put_file(&job->session->guest, file);
            pthread_mutex_unlock(&job->session->guest_lock);
            f->files[m->fd] = NULL;
            return TB_NO_MEMORY;
        }
    }
    if (m->offset > file->nbytes || m->nbytes > file->nbytes - m->offset)
        return tb__fail(TB_INVALID, "its %" PRIu64 " bytes from %" PRIu64 " on run past its memory, which has %zu",
                        m->nbytes, m->offset, file->nbytes);
    *out = (char *)file->base + m->offset;
    return TB_OK;
}

/* One of the tensor's memories. */
static tb_status find_memory(filling *f, const tb__payload_memory *m, int memory, const char *what, uint64_t needed,
                             char **out) {
    *out = NULL;
    if (needed == 0)
        return TB_OK;
    f->nbytes += needed;
    if (m->kind == TB__MEMORY_NONE || m->nbytes < needed)
        return tb__fail(TB_INVALID, "%s %" PRIu64 " bytes, but %" PRIu64 " are given", what, needed, m->nbytes);
    if (m->kind == TB__MEMORY_FD) {
        f->mirrored.is_all = false;
        return map_file(f, m, out);
    }
    agent_mirror *mirror;
    TB_TRY(tb__agent_mirror(f->job->batch, m, f->share->held, &mirror));
    f->mirrored.is_mirror[memory] = true;
    f->mirrored.shift[memory] = mirror->address - (uint64_t)(uintptr_t)mirror->data;
    *out = mirror->data;
    return TB_OK;
}

void tb__agent_batch_empty(agent_batch *b) {
    agent_session *s = b->session;
    tb_batch_destroy(b->batch);
    pthread_mutex_lock(&s->guest_lock);
    for (size_t i = 0; i < b->files.count; i++)
        tb__guest_put_file(&s->guest, b->files.item[i].file);
    pthread_mutex_unlock(&s->guest_lock);
    free(b->files.item);
    tb__agent_mirrors_free(b);
}

static void drop_files(agent_batch *b, uint64_t round) {
    agent_session *s = b->session;
    size_t nkept = 0;
    pthread_mutex_lock(&s->guest_lock);
    for (size_t i = 0; i < b->files.count; i++) {
        if (b->files.item[i].round == round)
            tb__guest_put_file(&s->guest, b->files.item[i].file);
        else
            b->files.item[nkept++] = b->files.item[i];
    }
    pthread_mutex_unlock(&s->guest_lock);
    b->files.count = nkept;
}

tb_status tb__agent_batch_drop(agent_batch *b, size_t leaving) {
    tb_pair *pair = b->shares.item[leaving].held;
    uint64_t round = b->shares.item[leaving].round;
    bool is_last = true;
    TB_TRY(tb_batch_remove_pair(b->batch, pair));
    for (size_t i = 0; i < b->shares.count; i++)
        is_last &= i == leaving || b->shares.item[i].round != round;
    if (is_last)
        drop_files(b, round);
    tb__agent_mirrors_drop(b, pair);
    return TB_OK;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

/* This rank's part of the stored tensor. */
static tb_status get_local(const filling *f, const tb__tensor_payload *p, tb_shape *out) {
    tb_local local;
    TB_TRY(tb_layout_local(p->layout ? p->layout : f->layout, &p->shape, f->job->agent->index, &local));
    *out = local.shape;
    out->ndim = p->shape.ndim;
    tb_local_fini(&local);
    return TB_OK;
}

/* Its data begins `back` bytes after its memory, where strides are negative. */
static tb_status find_plain(filling *f, const tb__tensor_payload *p, const tb_shape *local, tb_tensor *t) {
    tb_binding b;
    uintptr_t first, last;
    char *memory;
    TB_TRY(tb_binding_contiguous((void *)(UINTPTR_MAX / 2), 0, p->dtype, local, &b)); // NOLINT: only measured
    if (p->has_strides)
        memcpy(b.strides, p->strides, sizeof b.strides);
    TB_TRY(tb__binding_span(&b, &first, &last));
    TB_TRY(find_memory(f, &p->data, TB__DATA, "this rank's part of it has", last - first, &memory));
    t->data = memory ? memory + (UINTPTR_MAX / 2 - first) : NULL;
    return TB_OK;
}

static tb_status find_encoded(filling *f, const tb__tensor_payload *p, const tb_shape *local, tb_tensor *t) {
    tb__encoding encoding;
    tb__encoded_size size;
    TB_TRY(tb__encoding_parse(p->encode, &encoding));
    TB_TRY(tb__encoded_measure(&encoding, local, &size));
    TB_TRY(find_memory(f, &p->data, TB__DATA, "its data has", size.data_nbytes, (char **)&t->data));
    TB_TRY(find_memory(f, &p->scales, TB__SCALES, "its scales have", size.scales_nbytes, (char **)&t->scales));
    return find_memory(f, &p->scale, TB__SCALE, "its scale has", size.scale_nbytes, (char **)&t->scale);
}

/* Where the stored tensor is, and its layout, which is to be freed. */
static tb_status locate(filling *f, const tb__tensor_payload *p, tb_tensor *t, char **layout) {
    tb_shape local;
    f->nbytes = 0;
    f->mirrored = (tb__mirrored){.is_all = true};
    TB_TRY(get_local(f, p, &local));
    TB_TRY(p->encode ? find_encoded(f, p, &local, t) : find_plain(f, p, &local, t));
    return p->layout ? tb_layout_format(p->layout, layout) : TB_OK;
}

static tb_status add(filling *f, const tb__tensor_payload *p) {
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
    tb_status status = locate(f, p, &t, &layout);
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s'", p->name);
    t.layout = layout;
    status = tb__batch_add(f->batch, f->share->held, p->name, &t, &f->mirrored); /* whose sentences name it */
    free(layout);
    if (status != TB_OK)
        return status;
    pthread_mutex_lock(&f->job->batch->lock);
    f->share->ntensors++;
    f->share->nbytes += f->nbytes;
    pthread_mutex_unlock(&f->job->batch->lock);
    return TB_OK;
}

static tb_status choose_pair(filling *f, const char *name) {
    const agent_batch *b = f->job->batch;
    if (f->share && strcmp(f->share->pair->name, name) == 0)
        return TB_OK;
    tb_layout_destroy(f->layout);
    f->layout = NULL;
    f->share = NULL;
    for (size_t i = 0; i < b->shares.count && !f->share; i++) {
        if (strcmp(b->shares.item[i].pair->name, name) == 0)
            f->share = &b->shares.item[i];
    }
    return f->share ? tb_layout_parse(f->share->pair->layout, &f->layout)
                    : tb__fail(TB_INTERNAL, "pair '%.100s' is gone", name);
}

static tb_status add_all(filling *f) {
    const tb__entries *entries = &f->job->message.tensors;
    for (size_t i = 0; i < entries->count; i++) {
        tb__tensor_payload p;
        if (entries->item[i].payload.nbytes == 0)
            continue; /* it takes part in the pair, below */
        TB_TRY(choose_pair(f, entries->item[i].pair_name));
        tb_status status = tb__tensor_decode(entries->item[i].payload, f->layout, &f->job->arena, &p);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor %zu", i);
        status = add(f, &p);
        tb_layout_destroy(p.layout);
        TB_TRY(status);
    }
    const agent_batch *b = f->job->batch;
    for (size_t i = 0; i < b->shares.count; i++) {
        if (b->shares.item[i].round == b->round)
            TB_TRY(tb_batch_add_pair(f->batch, b->shares.item[i].held));
    }
    return TB_OK;
}

/* While it waits for others, it can be asked for whom. */
static void set_registering(agent_batch *b, tb_batch *batch) {
    pthread_mutex_lock(&b->lock);
    b->registering = batch;
    pthread_mutex_unlock(&b->lock);
}

static tb_status fill(filling *f) {
    agent_batch *b = f->job->batch;
    TB_TRY(add_all(f));
    f->job->message.tensors = (tb__entries){0};
    tb__agent_job_drop_frame(f->job); /* now it waits for others, perhaps for long */
    set_registering(b, f->batch);
    tb_status status = tb__batch_register(f->batch, tb__agent_job_timeout(f->job), &b->is_unwanted);
    set_registering(b, NULL);
    return status;
}

/* What came with this round goes again; the loop forgets the shares. */
static void undo(agent_batch *b) {
    for (size_t i = 0; i < b->shares.count; i++) {
        if (b->shares.item[i].round != b->round)
            continue;
        (void)tb_batch_remove_pair(b->batch, b->shares.item[i].held); /* or it had not come so far */
        tb__agent_mirrors_drop(b, b->shares.item[i].held);
    }
    drop_files(b, b->round);
}

tb_status tb__agent_batch_fill(agent_job *job) {
    const tb__message *m = &job->message;
    filling f = {.job = job, .files = tb__calloc(job->nfds, sizeof *f.files)};
    tb_batch_opts opts = {.size = sizeof opts,
                          .bucket_size = (int64_t)m->bucket_size,
                          .staging_bytes = (int64_t)m->staging_bytes,
                          .group_window = (uint32_t)m->group_window,
                          .max_in_flight = (uint32_t)m->max_in_flight,
                          .staged = m->staged,
                          .commit = m->commit == TB__SHADOW ? TB_SHADOW : TB_IN_PLACE,
                          .checksum = job->agent->checksum || (m->checksum.is_set && m->checksum.value),
                          .snapshot = m->snapshot,
                          .ties = m->ties.item,
                          .nties = m->ties.count,
                          .ignored = m->ignored.item,
                          .nignored = m->ignored.count};
    agent_batch *b = job->batch;
    tb_status status = f.files ? TB_OK : TB_NO_MEMORY;
    f.batch = b->batch; /* which gets more pairs, if there is one */
    if (status == TB_OK && !f.batch)
        status = tb_batch_create(job->agent->world, b->id, &opts, &f.batch);
    if (status == TB_OK)
        status = fill(&f);
    tb_layout_destroy(f.layout);
    free(f.files);
    if (status == TB_OK) {
        job->registered = f.batch;
        return TB_OK;
    }
    tb__saved_detail why = tb__save_detail();
    if (b->batch)
        undo(b);
    else
        tb_batch_destroy(f.batch);
    return tb__fail(status, "%s", why.text);
}
