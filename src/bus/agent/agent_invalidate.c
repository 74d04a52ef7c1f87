/* Invalidate: memory of a client that is about to be freed. The client names it by its own addresses; tensors in it are
 * in mapped files, in device memory or in mirrors here. */
#include "bus/agent/agent_inside.h"

#include "layout/overlap.h"

#include <string.h>

/* A range of bytes in this process. */
typedef struct span {
    uintptr_t first, last;
} span;

typedef TB_VEC(span) spans;

/* Adds the part of a tensor's area that lies in the client's bytes. */
static tb_status add_span(const tb__message *m, uint64_t shift, uintptr_t first, uintptr_t last, spans *out) {
    uint64_t from = (uint64_t)first + shift, to = (uint64_t)last + shift, end = m->address + m->nbytes;
    from = from > m->address ? from : m->address;
    to = to < end ? to : end;
    span s = {(uintptr_t)(from - shift), (uintptr_t)(to - shift)};
    return from >= to || tb__vec_push(out, s) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_bytes(const tb__message *m, uint64_t shift, const void *base, size_t nbytes, spans *out) {
    return base ? add_span(m, shift, (uintptr_t)base, (uintptr_t)base + nbytes, out) : TB_OK;
}

static tb_status add_tensor(const tb__message *m, const tb__added_tensor *t, spans *out) {
    const tb__mirrored *known = &t->mirrored;
    const tb__encoded *e = &t->encoded;
    uintptr_t first, last;
    if (known->is_known[TB__SCALES])
        TB_TRY(add_bytes(m, known->shift[TB__SCALES], e->scales, (size_t)(e->matrices * e->size.scale_nbytes), out));
    if (known->is_known[TB__SCALE])
        TB_TRY(add_bytes(m, known->shift[TB__SCALE], e->scale, sizeof *e->scale, out));
    if (!known->is_known[TB__DATA])
        return TB_OK;
    if (tb__binding_span(&t->binding, &first, &last) == TB_OK)
        TB_TRY(add_span(m, known->shift[TB__DATA], first, last, out));
    for (size_t i = 0; i < t->npadding; i++) {
        if (tb__binding_span(&t->padding[i], &first, &last) == TB_OK)
            TB_TRY(add_span(m, known->shift[TB__DATA], first, last, out));
    }
    return TB_OK;
}

static tb_status find_spans(const agent_job *job, spans *out) {
    tb_status status = TB_OK;
    tb__loop_lock(job->agent->world->loop);
    for (size_t i = 0; i < job->batches.count; i++) {
        const tb_batch *batch = job->batches.item[i]->batch;
        for (size_t j = 0; j < batch->tensors.count && status == TB_OK; j++)
            status = add_tensor(&job->message, batch->tensors.item[j], out);
    }
    tb__loop_unlock(job->agent->world->loop);
    return status;
}

static int compare_spans(const void *left, const void *right) {
    const span *a = left, *b = right;
    return (a->first > b->first) - (a->first < b->first);
}

/* Merges spans that overlap or touch. */
static void merge_spans(spans *all) {
    size_t n = 0;
    if (all->count > 1)
        qsort(all->item, all->count, sizeof *all->item, compare_spans);
    for (size_t i = 0; i < all->count; i++) {
        span *last = n > 0 ? &all->item[n - 1] : NULL;
        if (last && all->item[i].first <= last->last)
            last->last = all->item[i].last > last->last ? all->item[i].last : last->last;
        else
            all->item[n++] = all->item[i];
    }
    all->count = n;
}

/* Waits for copies to the client's memory that are under way; later ones fail. */
static void await_delivery(agent_batch *b) {
    tb__agent *agent = b->session->agent;
    tb__agent_lock(agent);
    while (b->is_delivering)
        pthread_cond_wait(&agent->changed, &agent->lock);
    tb__agent_unlock(agent);
}

static tb_status run_invalidate(agent_job *job) {
    spans all = {0};
    tb_status status = find_spans(job, &all);
    merge_spans(&all);
    for (size_t i = 0; i < all.count && status == TB_OK; i++)
        status = tb__world_invalidate_until(job->agent->world, (const void *)all.item[i].first, // NOLINT
                                            all.item[i].last - all.item[i].first, job->deadline_ms);
    free(all.item);
    for (size_t i = 0; i < job->batches.count && status == TB_OK; i++)
        await_delivery(job->batches.item[i]);
    return status;
}

static void release_batches(agent_job *job) {
    while (job->batches.count > 0)
        tb__agent_batch_job_ended(job->batches.item[--job->batches.count]);
}

void tb__agent_finish_invalidate(agent_job *job) {
    release_batches(job);
    tb__agent_job_finish(job);
}

tb_status tb__agent_invalidate(agent_job *job) {
    uint64_t unused;
    if (__builtin_add_overflow(job->message.address, job->message.nbytes, &unused))
        return tb__fail(TB_INVALID, "the memory runs past the last address");
    for (agent_batch *b = LIST_FIRST(&job->agent->batches); b; b = LIST_NEXT(b, link)) {
        if (b->session != job->session || !b->batch || b->is_ending)
            continue;
        if (!tb__vec_push(&job->batches, b)) {
            release_batches(job);
            return TB_NO_MEMORY;
        }
        b->njobs++;
    }
    tb__agent_job_start(job, run_invalidate);
    return TB_OK;
}
