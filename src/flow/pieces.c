/* Buckets that need no buffer: if their bytes lie in long runs in this rank's tensors, the message is sent from there,
 * or received there. The other end may use a buffer: the bytes on the wire are the same. */
#include "flow/flow_inside.h"

#include "base/dtype.h"

#include <string.h>

/* Shorter runs are faster to pack than to list. */
enum { MIN_MEAN_RUN = 2048 };

typedef TB_VEC(tb_piece) pieces;

/* Appends the contiguous runs of a chunk. */
static bool add_runs(const tb_chunk *chunk, const tb_binding *b, const int64_t *start, size_t most, pieces *out) {
    int outer;
    int64_t run = tb__box_run(chunk->ndim, chunk->len, b->strides, &outer), count = 1, index[TB_MAX_DIMS];
    for (int i = 0; i < outer; i++)
        count *= chunk->len[i];
    if (out->count + (size_t)count > most || !tb__vec_reserve(out, (size_t)count))
        return false;
    memcpy(index, start, sizeof index);
    for (int64_t n = 0; n < count; n++) {
        tb__box_run_start(n, outer, chunk->len, start, index);
        out->item[out->count++] = (tb_piece){tb__binding_at(b, index), (size_t)tb__dtype_bytes(b->dtype, run)};
    }
    return true;
}

/* `gap`: memory for the bytes between chunks. */
static bool add_entries(const tb__flow *flow, const tb_bucket *bucket, bool is_target, char *gap, pieces *out) {
    size_t most = (size_t)bucket->total_bytes / MIN_MEAN_RUN + 1;
    int64_t at = 0;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_bucket_entry *entry = &flow->setup.ir->entries[bucket->first_entry + i];
        const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        const tb_binding *b = is_target ? &t->dst : &t->src;
        if (b->dtype != chunk->wire_dtype || (is_target && t->is_gathered) ||
            !tb__loop_is_host_memory(flow->o.loop, b->base))
            return false;
        if (entry->offset > at && !tb__vec_push(out, (tb_piece){gap, (size_t)(entry->offset - at)}))
            return false;
        if (!add_runs(chunk, b, is_target ? chunk->dst.start : chunk->src.start, most, out))
            return false;
        at = entry->offset + entry->nbytes;
    }
    return true;
}

tb_piece *tb__flow_pieces(tb__flow *flow, const lane *l, size_t bucket, bool is_target, size_t *count) {
    pieces list = {0};
    if (flow->o.staged || flow->o.checksum || l->first->is_coded || l->nsenders != 1)
        return NULL;
    if (!add_entries(flow, &flow->setup.ir->buckets[bucket], is_target, flow->staged.gaps[is_target], &list)) {
        free(list.item);
        return NULL;
    }
    *count = list.count;
    return list.item;
}
