/* Mirrors of client memory that can't be mapped. They are read before a transfer. Data received through a pair is
 * written back when it is complete: the elements of its tensors, and their padding. The rest of the memory belongs to
 * the program, which may have changed it meanwhile. */
#include "bus/agent/agent_inside.h"

#include "base/int.h"
#include "layout/overlap.h"

#include <stdlib.h>
#include <string.h>

enum { PIECES = TB__CLIENT_PROCESS_PIECES };

/* The position of the mirror, existing or not, among those of the batch: the first that does not end before these
 * bytes. */
static size_t find_mirror(const agent_batch *b, const tb__client_file *file, uint64_t at) {
    agent_mirror *const *m = b->mirrors.item;
    size_t i = 0;
    TB_BISECT(i, b->mirrors.count,
              m[i]->file == file ? m[i]->at + m[i]->nbytes > at : (uintptr_t)m[i]->file > (uintptr_t)file);
    return i;
}

static tb_status new_mirror(const tb__client_file *file, uint64_t at, size_t nbytes, agent_mirror **out) {
    agent_mirror *m = tb__calloc(1, sizeof *m);
    if (!m)
        return TB_NO_MEMORY;
    *m = (agent_mirror){.file = file, .at = at, .nbytes = nbytes, .refs = 1};
    tb_status status = tb_alloc(nbytes, (void **)&m->data);
    if (status == TB_OK)
        *out = m;
    else
        free(m);
    return status;
}

/* Mirrors must not overlap, because each is read as a whole. */
tb_status tb__agent_get_mirror(agent_batch *b, const tb__payload_memory *m, const tb__client_file *file,
                               const tb__client_maps *maps, agent_mirror **out) {
    uint64_t at = file ? m->offset : m->address;
    size_t i = find_mirror(b, file, at);
    agent_mirror *known = i < b->mirrors.count ? b->mirrors.item[i] : NULL;
    if (known && known->file == file && known->at < at + m->nbytes) {
        if (known->at != at || known->nbytes != m->nbytes)
            return tb__fail(TB_REFUSED, "its memory and another tensor's overlap without being the same; use memory of "
                                        "tb_alloc");
        known->refs++;
        *out = known;
        return TB_OK;
    }
    if (!file)
        TB_TRY(tb__client_maps_check(maps, m->address, m->nbytes));
    if (!tb__vec_reserve(&b->mirrors, 1))
        return TB_NO_MEMORY;
    TB_TRY(new_mirror(file, at, m->nbytes, out));
    agent_mirror **place = &b->mirrors.item[i];
    memmove(place + 1, place, (b->mirrors.count++ - i) * sizeof *place);
    *place = *out;
    return TB_OK;
}

void tb__agent_put_mirror(agent_batch *b, agent_mirror *mirror) {
    if (--mirror->refs > 0)
        return;
    agent_mirror **place = &b->mirrors.item[find_mirror(b, mirror->file, mirror->at)];
    b->mirrors.count--;
    memmove(place, place + 1, (size_t)(b->mirrors.item + b->mirrors.count - place) * sizeof *place);
    tb_free(mirror->data);
    free(mirror);
}

bool tb__agent_has_mirrors(const agent_batch *b) {
    return b->mirrors.count > 0;
}

bool tb__agent_is_mirrored(const agent_batch *b) {
    return b->mirrors.count > 0 && b->nmapped == 0;
}

tb_status tb__agent_read_mirrors(const agent_batch *b) {
    if (b->mirrors.count > 0 && tb__batch_has_invalidated(b->batch))
        return TB_OK; /* the transfer fails for that reason */
    for (size_t i = 0; i < b->mirrors.count; i++) {
        const agent_mirror *m = b->mirrors.item[i];
        TB_TRY(tb__client_read(&b->session->process, m->file, m->at, m->data, m->nbytes));
    }
    return TB_OK;
}

/* Collects pieces of equal length for one write. */
typedef struct writer {
    const tb__client_process *process;
    const tb__added_tensor *tensor;
    const char *base;            /* of the offsets, here ... */
    const tb__client_file *file; /* ... and in this file, or, if it is NULL, in the process */
    uint64_t at;
    size_t offsets[PIECES], count, nbytes;
} writer;

static tb_status flush_pieces(writer *w) {
    size_t count = w->count;
    w->count = 0;
    return count == 0 ? TB_OK : tb__client_write(w->process, w->file, w->at, w->base, w->offsets, count, w->nbytes);
}

/* Further pieces are in this memory area. */
static tb_status choose_memory(writer *w, int memory, const void *base) {
    TB_TRY(flush_pieces(w));
    w->base = base;
    const tb__mirrored *m = &w->tensor->mirrored;
    w->file = m->file[memory];
    w->at = (uint64_t)(uintptr_t)base + (w->file ? m->file_shift : m->shift)[memory];
    return TB_OK;
}

static tb_status write_piece(writer *w, size_t offset, size_t nbytes) {
    if (w->count == PIECES || w->nbytes != nbytes)
        TB_TRY(flush_pieces(w));
    w->nbytes = nbytes;
    w->offsets[w->count++] = offset;
    return TB_OK;
}

/* Runs of bytes, evenly spaced in each dim. */
typedef struct runs {
    size_t nbytes;
    int ndim;
    struct run_dim {
        size_t count, step;
    } dim[TB_MAX_DIMS];
} runs;

static int compare_dims(const void *a, const void *b) {
    const struct run_dim *x = a, *y = b;
    return (x->step > y->step) - (x->step < y->step);
}

/* In units of half a byte. False: some of them begin or end within a byte. */
static bool find_runs(const tb_binding *b, runs *out) {
    size_t unit = tb_dtype_bits(b->dtype) / 4, length = unit;
    struct run_dim dims[TB_MAX_DIMS] = {0};
    int n = 0;
    bool is_whole = true;
    *out = (runs){0};
    for (int d = 0; d < b->shape.ndim; d++) {
        if (b->shape.dim[d] == 1 || b->strides[d] == 0)
            continue;
        is_whole &= unit > 1 || b->strides[d] > 0;
        dims[n++] = (struct run_dim){(size_t)b->shape.dim[d], (size_t)llabs(b->strides[d]) * unit};
    }
    qsort(dims, (size_t)n, sizeof *dims, compare_dims);
    for (int d = 0; d < n; d++) {
        if (dims[d].step <= length) { /* they meet */
            length += dims[d].step * (dims[d].count - 1);
            continue;
        }
        is_whole &= dims[d].step % 2 == 0;
        out->dim[out->ndim++] = (struct run_dim){dims[d].count, dims[d].step / 2};
    }
    out->nbytes = length / 2;
    return is_whole && length % 2 == 0;
}

/* The offset of the next run; false: that was the last. */
static bool next_run(const runs *r, size_t at[TB_MAX_DIMS], size_t *offset) {
    for (int d = 0; d < r->ndim; d++) {
        *offset += r->dim[d].step;
        if (++at[d] < r->dim[d].count)
            return true;
        *offset -= r->dim[d].step * r->dim[d].count;
        at[d] = 0;
    }
    return false;
}

/* The lowest element comes first, wherever the binding begins. Its span was measured: nothing overflows. */
static tb_status write_binding(writer *w, const tb_binding *b) {
    uintptr_t first, last;
    runs r;
    size_t at[TB_MAX_DIMS] = {0}, offset = 0;
    TB_TRY(tb__binding_span(b, &first, &last));
    if (first == last)
        return TB_OK;
    TB_TRY(choose_memory(w, TB__DATA, (const void *)first)); // NOLINT(performance-no-int-to-ptr)
    if (!find_runs(b, &r))
        return write_piece(w, 0, last - first); /* elements of two runs share a byte */
    do
        TB_TRY(write_piece(w, offset, r.nbytes));
    while (next_run(&r, at, &offset));
    return TB_OK;
}

static tb_status write_encoded_run(void *arg, bool is_scale, size_t offset, size_t nbytes) {
    writer *w = arg;
    const tb__encoded *e = &w->tensor->encoded;
    const char *base = is_scale ? e->scales : e->data;
    int memory = is_scale ? TB__SCALES : TB__DATA;
    if (!w->tensor->mirrored.is_mirror[memory])
        return TB_OK;
    if (w->base != base)
        TB_TRY(choose_memory(w, memory, base));
    return write_piece(w, offset, nbytes);
}

static tb_status write_encoded(writer *w) {
    const tb__encoded *e = &w->tensor->encoded;
    size_t nmatrices = (size_t)e->matrices;
    if (e->rows == 0)
        return TB_OK;
    if (e->rows == e->matrices * e->matrix_rows) {
        TB_TRY(write_encoded_run(w, false, 0, nmatrices * (size_t)e->size.data_nbytes));
        if (e->size.scale_nbytes > 0)
            TB_TRY(write_encoded_run(w, true, 0, nmatrices * (size_t)e->size.scale_nbytes));
    } else {
        TB_TRY(tb__encoded_each(e, write_encoded_run, w));
    }
    if (!w->tensor->mirrored.is_mirror[TB__SCALE])
        return TB_OK;
    TB_TRY(choose_memory(w, TB__SCALE, e->scale));
    return write_piece(w, 0, sizeof *e->scale);
}

static tb_status write_tensor(writer *w) {
    const tb__added_tensor *t = w->tensor;
    if (t->encode)
        return write_encoded(w);
    if (!t->mirrored.is_mirror[TB__DATA])
        return TB_OK;
    TB_TRY(write_binding(w, &t->binding));
    for (size_t i = 0; i < t->npadding; i++)
        TB_TRY(write_binding(w, &t->padding[i]));
    return TB_OK;
}

tb_status tb__agent_write_mirrors(const agent_batch *b, const tb_pair *pair, uint64_t first, uint64_t last) {
    const tb__added_tensor *const *tensors;
    size_t count;
    if (!tb__agent_has_mirrors(b))
        return TB_OK;
    if (tb__batch_has_invalidated(b->batch))
        return tb__fail(TB_INVALID, "memory of batch '%.100s' was invalidated", b->id);
    if (b->batch->mark)
        atomic_store(b->batch->mark, 1);
    tb__batch_get_received(b->batch, pair, &tensors, &count);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i]->group < first || tensors[i]->group >= last)
            continue;
        writer w = {.process = &b->session->process, .tensor = tensors[i]};
        TB_TRY(write_tensor(&w));
        TB_TRY(flush_pieces(&w));
    }
    return TB_OK;
}
