/* From chunks to buckets. Both ends of a channel do this on their own and must arrive at the same buckets, so nothing
 * here may depend on the rank that does it: chunks are sorted by fields that both ends know. */
#include "ir/ir.h"

#include "base/int.h"

#include <string.h>

static int compare_lists(const int32_t *a, uint32_t na, const int32_t *b, uint32_t nb) {
    if (a == b)
        return 0;
    for (uint32_t i = 0; i < na && i < nb; i++) {
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    }
    return (na > nb) - (na < nb);
}

/* Compares the fields that chunks of one bucket share. A reduce-only chunk is keyed by the targets of the source, like
 * the chunk that it belongs to there, so that all members of a reduction have the same order. */
static int compare_keys(const tb_chunk *x, const tb_chunk *y) {
    if (x->mode != y->mode)
        return x->mode < y->mode ? -1 : 1;
    if (x->is_coded != y->is_coded)
        return x->is_coded ? 1 : -1;
    if (x->memory_kind != y->memory_kind)
        return x->memory_kind < y->memory_kind ? -1 : 1;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    int c = compare_lists(x->targets, x->ntargets, y->targets, y->ntargets);
    if (!c)
        c = compare_lists(x->contributors, x->ncontributors, y->contributors, y->ncontributors);
    if (c || x->ncontributors == 0)
        return c;
    if (x->op != y->op)
        return x->op < y->op ? -1 : 1;
    return (x->divisor > y->divisor) - (x->divisor < y->divisor);
}

static int compare_chunks(const void *a, const void *b) {
    const tb_chunk *x = a, *y = b;
    int c = compare_keys(x, y);
    if (c)
        return c;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return (x->part > y->part) - (x->part < y->part);
}

int64_t tb__chunk_limit(const tb_chunk *chunk, const tb__ir_limits *limits) {
    if (limits->staged == INT64_MAX || chunk->ncontributors == 0)
        return limits->staged;
    return limits->staged / chunk->ncontributors;
}

int64_t tb__chunk_widening(const tb_chunk *chunk) {
    int src = tb_dtype_bits(chunk->src_dtype), wire = tb_dtype_bits(chunk->wire_dtype);
    return chunk->ncontributors && src > wire ? src / wire : 1;
}

/* Whether a chunk fits behind what a bucket has, in the wire dtype and as contributions, which are aligned alike. */
static bool fits_bucket(const tb_chunk *chunk, const tb_bucket *bucket, int64_t staged, const tb__ir_limits *limits) {
    if (chunk->nbytes > limits->bucket_size - tb__align(bucket->total_bytes, TB__BUCKET_ALIGN))
        return false;
    return limits->staged == INT64_MAX || chunk->nbytes * tb__chunk_widening(chunk) <=
                                              tb__chunk_limit(chunk, limits) - tb__align(staged, TB__BUCKET_ALIGN);
}

/* Adds chunk i to the last bucket of the channel, or to a new one if it does not fit or begins a group. *staged is the
 * size of the last bucket's contributions. */
static bool add_entry(tb__owned_ir *ir, tb_channel *channel, size_t i, const tb__ir_limits *limits, int64_t *staged) {
    const tb_chunk *chunk = &ir->chunks.item[i];
    tb_bucket *bucket = channel->nbuckets ? &ir->buckets.item[ir->buckets.count - 1] : NULL;
    bool is_alone = chunk->is_whole || (bucket && ir->chunks.item[i - 1].is_whole);
    if (!bucket || is_alone || bucket->group != chunk->group || !fits_bucket(chunk, bucket, *staged, limits)) {
        tb_bucket new = {.channel = ir->channels.count - 1, .group = chunk->group, .first_entry = ir->entries.count};
        if (!tb__vec_push(&ir->buckets, new))
            return false;
        channel->nbuckets++;
        bucket = &ir->buckets.item[ir->buckets.count - 1];
        *staged = 0;
    }
    tb_bucket_entry entry = {
        .chunk = i, .offset = tb__align(bucket->total_bytes, TB__BUCKET_ALIGN), .nbytes = chunk->nbytes};
    if (!tb__vec_push(&ir->entries, entry))
        return false;
    bucket->nentries++;
    bucket->total_bytes = entry.offset + entry.nbytes;
    if (limits->staged != INT64_MAX)
        *staged = tb__align(*staged, TB__BUCKET_ALIGN) + chunk->nbytes * tb__chunk_widening(chunk);
    return true;
}

tb_status tb__ir_pack(tb__owned_ir *ir, const tb__ir_limits *limits, uint32_t max_in_flight) {
    tb_chunk *chunks = ir->chunks.item;
    size_t n = ir->chunks.count;
    if (n)
        qsort(chunks, n, sizeof *chunks, compare_chunks);
    tb_channel *channel = NULL;
    int64_t staged = 0;
    for (size_t i = 0; i < n; i++) {
        if (!channel || compare_keys(&chunks[i - 1], &chunks[i]) != 0) {
            tb_channel new = {.first_bucket = ir->buckets.count, .max_in_flight = max_in_flight};
            if (!tb__vec_push(&ir->channels, new))
                return TB_NO_MEMORY;
            channel = &ir->channels.item[ir->channels.count - 1];
        }
        if (!add_entry(ir, channel, i, limits, &staged))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}
