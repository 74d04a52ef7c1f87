/* Mirrors of memory that only the system reaches: read before a transfer, and written back after one that received.
 * What is between the elements of a tensor, and other tensors' elements, may change meanwhile, so only its own are
 * written. */
#include "bus/agent/agent_inside.h"

#include <stdlib.h>
#include <string.h>

enum { PIECES = TB__GUEST_PIECES };

/* What is mirrored is read as a whole, so nothing of it may be in two mirrors. */
tb_status tb__agent_mirror(agent_batch *b, const tb__memory *m, agent_mirror **out) {
    for (size_t i = 0; i < b->mirrors.count; i++) {
        agent_mirror *known = &b->mirrors.item[i];
        if (known->address == m->address && known->nbytes == m->nbytes) {
            *out = known;
            return TB_OK;
        }
        if (m->address < known->address + known->nbytes && known->address < m->address + m->nbytes)
            return tb__fail(TB_REFUSED, "its memory and another tensor's overlap without being the same; use memory of "
                                        "tb_alloc");
    }
    TB_TRY(tb__guest_check(&b->session->guest, m->address, m->nbytes, false));
    agent_mirror new = {.address = m->address, .nbytes = m->nbytes};
    TB_TRY(tb_alloc(new.nbytes, (void **)&new.data));
    if (!tb__vec_push(&b->mirrors, new)) {
        tb_free(new.data);
        return TB_NO_MEMORY;
    }
    *out = &b->mirrors.item[b->mirrors.count - 1];
    return TB_OK;
}

static void free_mirror(agent_mirror *m) {
    tb_free(m->data);
    free(m->runs.item);
}

void tb__agent_mirrors_drop(agent_batch *b, const tb_pair *pair) {
    size_t nkept = 0;
    for (size_t i = 0; i < b->mirrors.count; i++) {
        agent_mirror *m = &b->mirrors.item[i];
        size_t nruns = 0;
        for (size_t j = 0; j < m->runs.count; j++) {
            if (m->runs.item[j].pair != pair)
                m->runs.item[nruns++] = m->runs.item[j];
        }
        m->runs.count = nruns;
        if (nruns == 0)
            free_mirror(m);
        else
            b->mirrors.item[nkept++] = *m;
    }
    b->mirrors.count = nkept;
}

bool tb__agent_has_mirrors(const agent_batch *b) {
    return b->mirrors.count > 0;
}

bool tb__agent_is_mirrored(const agent_batch *b) {
    return b->mirrors.count > 0 && b->files.count == 0;
}

void tb__agent_mirrors_free(agent_batch *b) {
    for (size_t i = 0; i < b->mirrors.count; i++)
        free_mirror(&b->mirrors.item[i]);
    free(b->mirrors.item);
    b->mirrors.item = NULL;
    b->mirrors.count = 0;
}

/* ---- Runs ------------------------------------------------------------------------------------------------------ */

tb_status tb__agent_mirror_add_all(agent_mirror *m, const tb_pair *pair, size_t nbytes) {
    return tb__vec_push(&m->runs, ((agent_runs){.pair = pair, .nbytes = nbytes})) ? TB_OK : TB_NO_MEMORY;
}

typedef struct dim {
    size_t count, step;
} dim;

static int compare_dims(const void *a, const void *b) {
    const dim *x = a, *y = b;
    return (x->step > y->step) - (x->step < y->step);
}

/* The mirror begins with the lowest element, wherever the binding does. Its span was measured: nothing overflows. */
tb_status tb__agent_mirror_add(agent_mirror *m, const tb_pair *pair, const tb_binding *b) {
    int bits = tb_dtype_bits(b->dtype), n = 0;
    if (bits % 8 != 0)
        return tb__agent_mirror_add_all(m, pair, m->nbytes); /* a byte has elements of two runs */
    agent_runs runs = {.pair = pair, .nbytes = (size_t)bits / 8};
    dim dims[TB_MAX_DIMS] = {0};
    for (int d = 0; d < b->shape.ndim; d++) {
        if (b->shape.dim[d] > 1 && b->strides[d] != 0)
            dims[n++] = (dim){(size_t)b->shape.dim[d], (size_t)llabs(b->strides[d]) * ((size_t)bits / 8)};
    }
    qsort(dims, (size_t)n, sizeof *dims, compare_dims);
    for (int d = 0; d < n; d++) {
        if (dims[d].step == runs.nbytes) { /* they meet */
            runs.nbytes *= dims[d].count;
            continue;
        }
        runs.count[runs.ndim] = dims[d].count;
        runs.step[runs.ndim++] = dims[d].step;
    }
    return tb__vec_push(&m->runs, runs) ? TB_OK : TB_NO_MEMORY;
}

/* The offset of the next run; false: that was the last. */
static bool next_run(const agent_runs *runs, size_t at[TB_MAX_DIMS], size_t *offset) {
    for (int d = 0; d < runs->ndim; d++) {
        *offset += runs->step[d];
        if (++at[d] < runs->count[d])
            return true;
        *offset -= runs->step[d] * runs->count[d];
        at[d] = 0;
    }
    return false;
}

static tb_status write_runs(const tb__guest *guest, const agent_mirror *m, const agent_runs *runs) {
    size_t at[TB_MAX_DIMS] = {0}, offset = 0, offsets[PIECES], n = 0;
    bool has_more = true;
    while (has_more) {
        offsets[n++] = offset;
        has_more = next_run(runs, at, &offset);
        if (n < PIECES && has_more)
            continue;
        TB_TRY(tb__guest_write(guest, m->address, m->data, offsets, n, runs->nbytes));
        n = 0;
    }
    return TB_OK;
}

/* ---- To and fro ------------------------------------------------------------------------------------------------ */

tb_status tb__agent_fetch(const agent_batch *b) {
    for (size_t i = 0; i < b->mirrors.count; i++) {
        const agent_mirror *m = &b->mirrors.item[i];
        TB_TRY(tb__guest_read(&b->session->guest, m->address, m->data, m->nbytes));
    }
    return TB_OK;
}

tb_status tb__agent_deliver(const agent_batch *b) {
    for (size_t i = 0; i < b->mirrors.count; i++) {
        const agent_mirror *m = &b->mirrors.item[i];
        for (size_t j = 0; j < m->runs.count; j++)
            TB_TRY(write_runs(&b->session->guest, m, &m->runs.item[j]));
    }
    return TB_OK;
}
