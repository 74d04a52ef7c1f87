/* Copies an IR; the copy owns all of its memory. */
#include "ir/ir.h"

#include <string.h>

typedef struct mapping {
    tb__owned_ir *to;
    int32_t (*rank_of)(void *arg, int32_t rank);
    void *arg;
} mapping;

static int32_t map_rank(const mapping *m, int32_t rank) {
    return rank == TB_NO_RANK || !m->rank_of ? rank : m->rank_of(m->arg, rank);
}

static bool map_ranks(const mapping *m, const int32_t *ranks, uint32_t count, const int32_t **out) {
    int32_t *mapped = tb__malloc(count, sizeof *mapped);
    for (uint32_t i = 0; mapped && i < count; i++)
        mapped[i] = map_rank(m, ranks[i]);
    *out = mapped ? tb__ir_ranks(m->to, mapped, count) : NULL;
    free(mapped);
    return *out != NULL;
}

static bool copy_chunks(const mapping *m, const tb_ir *from) {
    for (size_t i = 0; i < from->nchunks; i++) {
        tb_chunk c = from->chunks[i];
        c.source = map_rank(m, c.source);
        if (!map_ranks(m, c.targets, c.ntargets, &c.targets) ||
            !map_ranks(m, c.contributors, c.ncontributors, &c.contributors) || !tb__vec_push(&m->to->chunks, c))
            return false;
    }
    return true;
}

static bool copy_channels(const mapping *m, const tb_ir *from) {
    for (size_t i = 0; i < from->nchannels; i++) {
        tb_channel c = from->channels[i];
        const tb_bucket *first = &from->buckets[c.first_bucket];
        uint32_t ntargets = from->chunks[from->entries[first->first_entry].chunk].ntargets;
        if ((c.via && !map_ranks(m, c.via, ntargets, &c.via)) || !tb__vec_push(&m->to->channels, c))
            return false;
    }
    return true;
}

static bool copy_all(const mapping *m, const tb_ir *from) {
    tb__owned_ir *to = m->to;
    to->view.rank = map_rank(m, from->rank);
    to->view.bucket_size = from->bucket_size;
    for (size_t i = 0; i < from->ntensors; i++) {
        const char *name = tb__arena_strdup(&to->arena, from->names[i]);
        if (!name || !tb__vec_push(&to->names, name))
            return false;
    }
    for (size_t i = 0; i < from->nentries; i++) {
        if (!tb__vec_push(&to->entries, from->entries[i]))
            return false;
    }
    for (size_t i = 0; i < from->nbuckets; i++) {
        if (!tb__vec_push(&to->buckets, from->buckets[i]))
            return false;
    }
    return copy_chunks(m, from) && copy_channels(m, from);
}

tb_status tb__ir_copy(const tb_ir *from, int32_t (*rank_of)(void *arg, int32_t rank), void *arg, tb_ir **out) {
    mapping m = {tb__calloc(1, sizeof *m.to), rank_of, arg};
    if (!m.to || !copy_all(&m, from)) {
        tb_ir_destroy(m.to ? &m.to->view : NULL);
        return TB_NO_MEMORY;
    }
    tb__ir_finish(m.to);
    *out = &m.to->view;
    return TB_OK;
}
