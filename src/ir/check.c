/* Checks an IR from an untrusted source, and hashes the fields that two ranks have in common. */
#include "ir/ir.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

static tb_status check_names(const tb_ir *ir) {
    for (size_t i = 0; i < ir->ntensors; i++) {
        if (!ir->names[i] || (i > 0 && strcmp(ir->names[i - 1], ir->names[i]) >= 0))
            return tb__fail(TB_INVALID, "name %zu is missing, or not in order", i);
    }
    return TB_OK;
}

/* ---- Channels -------------------------------------------------------------------------------------------------- */

static tb_status check_ranks(const char *what, const int32_t *ranks, uint32_t count) {
    int32_t *sorted = tb__malloc(count, sizeof *sorted);
    tb_status status = sorted ? TB_OK : TB_NO_MEMORY;
    if (sorted && count) {
        memcpy(sorted, ranks, count * sizeof *sorted);
        qsort(sorted, count, sizeof *sorted, tb__compare_int32);
    }
    for (uint32_t i = 0; i < count && status == TB_OK; i++) {
        if (sorted[i] < 0 || sorted[i] >= TB_MAX_RANKS || (i > 0 && sorted[i] == sorted[i - 1]))
            status = tb__fail(TB_INVALID, "rank %" PRId32 " of its %s is invalid, or listed twice", sorted[i], what);
    }
    free(sorted);
    return status;
}

/* Checks that each target is reached from the source, directly or by way of other targets. */
static tb_status check_via(const tb_channel *channel, const tb_chunk *key) {
    if (!channel->via)
        return TB_OK;
    if (key->mode != TB_BROADCAST)
        return tb__fail(TB_INVALID, "only a BROADCAST is relayed");
    for (uint32_t i = 0; i < key->ntargets; i++) {
        int32_t at = channel->via[i];
        uint32_t nsteps = 0;
        while (at != key->source && nsteps++ < key->ntargets) {
            uint32_t j = 0;
            while (j < key->ntargets && key->targets[j] != at)
                j++;
            if (j == key->ntargets)
                break;
            at = channel->via[j];
        }
        if (at != key->source)
            return tb__fail(TB_INVALID, "rank %" PRId32 " is not reached from rank %" PRId32, key->targets[i],
                            key->source);
    }
    return TB_OK;
}

/* Checks the fields that all chunks of a channel share, and this rank's role. */
static tb_status check_key(const tb_ir *ir, const tb_chunk *key) {
    bool is_target, is_source = key->source == ir->rank;
    if ((unsigned)key->mode > TB_NONE || (key->ntargets && !key->targets) ||
        (key->ncontributors && !key->contributors) || key->source < TB_NO_RANK || key->source >= TB_MAX_RANKS)
        return tb__fail(TB_INVALID, "mode %d, source %" PRId32 ", %" PRIu32 " targets, %" PRIu32 " contributors",
                        (int)key->mode, key->source, key->ntargets, key->ncontributors);
    TB_TRY(tb__chunk_check_key(key));
    TB_TRY(check_ranks("targets", key->targets, key->ntargets));
    TB_TRY(check_ranks("contributors", key->contributors, key->ncontributors));
    if (key->ncontributors && !tb__has_int32(key->contributors, key->ncontributors, key->source))
        return tb__fail(TB_INVALID, "rank %" PRId32 " combines, and contributes nothing", key->source);
    if ((unsigned)key->op > TB_PRODUCT || key->op == TB_AVG || key->divisor < 1 ||
        (key->divisor > 1 && key->op != TB_SUM))
        return tb__fail(TB_INVALID, "reduction %d with divisor %" PRIu64, (int)key->op, key->divisor);
    if (key->is_coded)
        return tb__fail(TB_REFUSED, "its chunks are coded; only a batch can convert them");
    is_target = tb__has_int32(key->targets, key->ntargets, ir->rank);
    bool contributes = is_source || tb__has_int32(key->contributors, key->ncontributors, ir->rank);
    bool only_reduces = contributes && !is_source && !is_target;
    if (!contributes && !is_target)
        return tb__fail(TB_INVALID, "rank %" PRId32 " has no part in it", ir->rank);
    if (key->source == TB_NO_RANK && key->mode != TB_LOCAL)
        return tb__fail(TB_INVALID, "it has no source");
    if (key->is_source != contributes || key->is_target != is_target || (key->mode == TB_NONE) != only_reduces)
        return tb__fail(TB_INVALID, "%s, is_source %d and is_target %d are not the role of rank %" PRId32,
                        tb_chunk_mode_name(key->mode), key->is_source, key->is_target, ir->rank);
    return TB_OK;
}

static bool is_same_list(const int32_t *a, uint32_t na, const int32_t *b, uint32_t nb) {
    return na == nb && (na == 0 || memcmp(a, b, na * sizeof *a) == 0);
}

static bool is_same_key(const tb_chunk *a, const tb_chunk *b) {
    return a->mode == b->mode && a->source == b->source && a->is_coded == b->is_coded && a->is_source == b->is_source &&
           a->is_target == b->is_target && (a->ncontributors == 0 || (a->op == b->op && a->divisor == b->divisor)) &&
           (a->ntargets == 0 || b->targets) && (b->ncontributors == 0 || b->contributors) &&
           is_same_list(a->targets, a->ntargets, b->targets, b->ntargets) &&
           is_same_list(a->contributors, a->ncontributors, b->contributors, b->ncontributors);
}

/* ---- Chunks ---------------------------------------------------------------------------------------------------- */

static tb_status check_chunk(const tb_ir *ir, const tb_chunk *c) {
    const int64_t most = INT64_C(1) << 62;
    int64_t nbytes;
    if (c->tensor >= ir->ntensors)
        return tb__fail(TB_INVALID, "there is no tensor %" PRIu32, c->tensor);
    if (c->ndim < 0 || c->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "it has %d dims", c->ndim);
    tb_shape shape = {.ndim = c->ndim};
    for (int d = 0; d < c->ndim; d++) {
        if (c->len[d] < 1 || c->len[d] > most || c->src.start[d] < 0 || c->dst.start[d] < 0 ||
            c->src.start[d] > most - c->len[d] || c->dst.start[d] > most - c->len[d])
            return tb__fail(TB_INVALID, "its box is out of range in dim %d", d);
        shape.dim[d] = c->len[d];
    }
    TB_TRY(tb__wire_dtype(c->src_dtype, c->wire_dtype, c->wire_dtype, &(tb_dtype){0}));
    TB_TRY(tb_shape_size(&shape, c->src_dtype, NULL, &nbytes)); /* as a contribution it may be larger */
    TB_TRY(tb_shape_size(&shape, c->wire_dtype, NULL, &nbytes));
    if (nbytes != c->nbytes)
        return tb__fail(TB_INVALID, "it has %" PRId64 " bytes, and its shape %" PRId64, c->nbytes, nbytes);
    return TB_OK;
}

/* Chunks and ids that were checked. */
typedef struct seen {
    bool *chunks;
    tb__index by_id;
} seen;

/* Chunks of zeros have no sender, and no rank asks for them by id. */
static tb_status check_id(const tb_ir *ir, seen *s, size_t chunk) {
    const tb_chunk *c = &ir->chunks[chunk];
    size_t probe = 0, at;
    if (c->source == TB_NO_RANK)
        return TB_OK;
    while ((at = tb__index_next(&s->by_id, tb__hash(c->id, c->part), &probe)) != TB__NOWHERE) {
        if (ir->chunks[at].id == c->id && ir->chunks[at].part == c->part)
            return tb__fail(TB_INVALID, "two chunks have id %016" PRIx64 " part %" PRIu32, c->id, c->part);
    }
    return tb__index_add(&s->by_id, tb__hash(c->id, c->part), chunk) ? TB_OK : TB_NO_MEMORY;
}

static tb_status check_bucket(const tb_ir *ir, const tb_bucket *b, const tb_chunk *key, seen *s) {
    int64_t end = 0;
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_bucket_entry *e = &ir->entries[b->first_entry + i];
        if (e->chunk >= ir->nchunks || s->chunks[e->chunk])
            return tb__fail(TB_INVALID, "entry %zu has chunk %zu, which does not exist, or is in a bucket already", i,
                            e->chunk);
        const tb_chunk *c = &ir->chunks[e->chunk];
        s->chunks[e->chunk] = true;
        tb_status status = check_chunk(ir, c);
        if (status == TB_OK && (!is_same_key(key, c) || c->group != b->group))
            status = tb__fail(TB_INVALID, "it belongs to another channel or group");
        if (status == TB_OK && (e->nbytes != c->nbytes || e->offset < end || e->offset % TB__BUCKET_ALIGN ||
                                e->offset > (INT64_C(1) << 62) - e->nbytes))
            status =
                tb__fail(TB_INVALID, "%" PRId64 " bytes at offset %" PRId64 " of its bucket", e->nbytes, e->offset);
        if (status == TB_OK)
            status = check_id(ir, s, e->chunk);
        if (status != TB_OK)
            return tb__fail_within(status, "chunk %zu", e->chunk);
        end = e->offset + e->nbytes;
    }
    return end == b->total_bytes
               ? TB_OK
               : tb__fail(TB_INVALID, "it has %" PRId64 " bytes, but its chunks end at %" PRId64, b->total_bytes, end);
}

static tb_status check_channel(const tb_ir *ir, size_t index, size_t *nbuckets, size_t *nentries, seen *s) {
    const tb_channel *channel = &ir->channels[index];
    const tb_chunk *key = NULL;
    if (channel->first_bucket != *nbuckets || channel->nbuckets == 0 || channel->nbuckets > ir->nbuckets - *nbuckets ||
        channel->max_in_flight == 0)
        return tb__fail(TB_INVALID, "buckets %zu to %zu, %" PRIu32 " of them in flight", channel->first_bucket,
                        channel->first_bucket + channel->nbuckets, channel->max_in_flight);
    for (size_t i = 0; i < channel->nbuckets; i++, ++*nbuckets) {
        const tb_bucket *b = &ir->buckets[*nbuckets];
        if (b->channel != index || b->first_entry != *nentries || b->nentries == 0 ||
            b->nentries > ir->nentries - *nentries || (i > 0 && b->group < b[-1].group))
            return tb__fail(TB_INVALID, "bucket %zu: channel %zu, group %" PRIu32 ", entries %zu to %zu", *nbuckets,
                            b->channel, b->group, b->first_entry, b->first_entry + b->nentries);
        *nentries += b->nentries;
        size_t first = ir->entries[b->first_entry].chunk;
        if (!key && first < ir->nchunks) {
            key = &ir->chunks[first];
            TB_TRY(check_key(ir, key));
            TB_TRY(check_via(channel, key));
        }
        tb_status status = check_bucket(ir, b, key ? key : &(tb_chunk){0}, s);
        if (status != TB_OK)
            return tb__fail_within(status, "bucket %zu", *nbuckets);
    }
    return TB_OK;
}

tb_status tb__ir_check(const tb_ir *ir) {
    seen s = {.chunks = tb__calloc(ir->nchunks, sizeof *s.chunks)};
    size_t nbuckets = 0, nentries = 0;
    tb_status status = s.chunks ? check_names(ir) : TB_NO_MEMORY;
    for (size_t i = 0; i < ir->nchannels && status == TB_OK; i++) {
        status = check_channel(ir, i, &nbuckets, &nentries, &s);
        if (status != TB_OK)
            tb__prefix_detail("channel %zu", i);
    }
    if (status == TB_OK && (nbuckets != ir->nbuckets || nentries != ir->nentries || nentries != ir->nchunks))
        status = tb__fail(TB_INVALID, "%zu of %zu buckets, %zu of %zu entries and %zu chunks are in channels", nbuckets,
                          ir->nbuckets, nentries, ir->nentries, ir->nchunks);
    free(s.chunks);
    tb__index_fini(&s.by_id);
    return status;
}

/* ---- Hashes ---------------------------------------------------------------------------------------------------- */

static uint64_t hash_text(uint64_t h, const char *text) {
    while (*text)
        h = tb__hash(h, (unsigned char)*text++);
    return tb__hash(h, 0);
}

static uint64_t hash_ranks(uint64_t h, const int32_t *ranks, uint32_t count) {
    h = tb__hash(h, count);
    for (uint32_t i = 0; i < count; i++)
        h = tb__hash(h, (uint64_t)ranks[i]);
    return h;
}

static uint64_t hash_chunk(uint64_t h, const tb_chunk *c, const tb_bucket_entry *e) {
    const uint64_t values[] = {c->id,        c->part,       c->tensor,           (uint64_t)c->ndim,
                               c->src_dtype, c->wire_dtype, (uint64_t)e->offset, (uint64_t)e->nbytes};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        h = tb__hash(h, values[i]);
    for (int d = 0; d < c->ndim; d++)
        h = tb__hash(tb__hash(h, (uint64_t)c->len[d]), (uint64_t)c->src.start[d]);
    return h;
}

/* Modes, roles and positions in targets differ between ranks. */
static uint64_t hash_channel(const tb_ir *ir, const tb_channel *channel, const tb_chunk *key, uint64_t h) {
    h = tb__hash(h, (uint64_t)key->source);
    h = hash_ranks(h, key->targets, key->ntargets);
    h = hash_ranks(h, key->contributors, key->ncontributors);
    if (key->ncontributors) /* otherwise op and divisor are unused */
        h = tb__hash(tb__hash(h, key->op), key->divisor);
    for (size_t i = 0; i < channel->nbuckets; i++) {
        const tb_bucket *b = &ir->buckets[channel->first_bucket + i];
        h = tb__hash(tb__hash(h, b->group), b->nentries);
        for (size_t j = 0; j < b->nentries; j++) {
            const tb_bucket_entry *e = &ir->entries[b->first_entry + j];
            h = hash_chunk(h, &ir->chunks[e->chunk], e);
        }
    }
    return h;
}

static void add_hash(uint64_t *hashes, int32_t n, int32_t rank, uint64_t h) {
    if (rank >= 0 && rank < n)
        hashes[rank] += h;
}

void tb__ir_hash(const tb_ir *ir, uint64_t *hashes, int32_t n) {
    uint64_t names = 0;
    for (size_t i = 0; i < ir->ntensors; i++)
        names = hash_text(names, ir->names[i]);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_channel *channel = &ir->channels[i];
        const tb_chunk *key = &ir->chunks[ir->entries[ir->buckets[channel->first_bucket].first_entry].chunk];
        uint64_t h = hash_channel(ir, channel, key, names), with_via = h;
        if (key->mode != TB_NONE) /* a rank that only contributes does not know the relays */
            with_via = hash_ranks(h, channel->via, channel->via ? key->ntargets : 0);
        if (!tb__has_int32(key->targets, key->ntargets, key->source))
            add_hash(hashes, n, key->source, with_via);
        for (uint32_t j = 0; j < key->ntargets; j++)
            add_hash(hashes, n, key->targets[j], with_via);
        for (uint32_t j = 0; j < key->ncontributors; j++) {
            if (key->contributors[j] != key->source &&
                !tb__has_int32(key->targets, key->ntargets, key->contributors[j]))
                add_hash(hashes, n, key->contributors[j], h);
        }
    }
}
