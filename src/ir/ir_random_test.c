/* The IR of random batches: both ends of every channel build the same buckets, dumps read back. */
#include "ir/ir_test.h"
#include "plan/plan.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <stdio.h>

enum { MAX_TENSORS = 4, NRANKS = 80 };

/* A batch of random tensors. */
typedef struct batch {
    random_case c[MAX_TENSORS];
    tb_layout *src[MAX_TENSORS], *dst[MAX_TENSORS];
    tb_tensor_spec spec[MAX_TENSORS];
    char name[MAX_TENSORS][16];
    size_t count;
} batch;

static bool add_random(batch *b, uint64_t seed, tb_dtype dtype) {
    size_t i = b->count;
    random_case *c = &b->c[i];
    random_case_make(c, seed);
    tb_plan *plan;
    assert_int_equal(side_layout(&c->src, &b->src[i]), TB_OK);
    assert_int_equal(side_layout(&c->dst, &b->dst[i]), TB_OK);
    if (tb_plan_create(b->src[i], b->dst[i], &c->shape, dtype, NULL, &plan) != TB_OK) {
        tb_layout_destroy(b->src[i]);
        tb_layout_destroy(b->dst[i]);
        return false;
    }
    tb_plan_destroy(plan);
    snprintf(b->name[i], sizeof b->name[i], "t%" PRIu64, seed % 1000);
    b->spec[i] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                  .name = b->name[i],
                                  .shape = c->shape,
                                  .src = b->src[i],
                                  .dst = b->dst[i],
                                  .src_dtype = dtype,
                                  .dst_dtype = dtype};
    b->count++;
    return true;
}

static void free_batch(batch *b) {
    for (size_t i = 0; i < b->count; i++) {
        tb_layout_destroy(b->src[i]);
        tb_layout_destroy(b->dst[i]);
    }
    b->count = 0;
}

static bool same_list(const int32_t *a, uint32_t na, const int32_t *b, uint32_t nb) {
    return na == nb && (na == 0 || memcmp(a, b, na * sizeof *a) == 0);
}

/* The other rank's channel for the same source, targets and contributors must have the same buckets. */
static void check_peer(const tb_ir *ir, const tb_channel *channel, const tb_ir *peer, tb_chunk_mode mode) {
    const tb_chunk *key = key_of(ir, channel);
    for (size_t i = 0; i < peer->nchannels; i++) {
        const tb_channel *other = &peer->channels[i];
        const tb_chunk *k = key_of(peer, other);
        if (k->mode != mode || k->source != key->source ||
            !same_list(k->targets, k->ntargets, key->targets, key->ntargets) ||
            !same_list(k->contributors, k->ncontributors, key->contributors, key->ncontributors) ||
            k->is_coded != key->is_coded || (key->ncontributors && (k->op != key->op || k->divisor != key->divisor)))
            continue;
        assert_int_equal(channel->nbuckets, other->nbuckets);
        if (mode == TB_BROADCAST) {
            assert_int_equal(!channel->via, !other->via);
            assert_true(!channel->via || same_list(channel->via, key->ntargets, other->via, key->ntargets));
        }
        for (size_t b = 0; b < channel->nbuckets; b++) {
            const tb_bucket *x = &ir->buckets[channel->first_bucket + b], *y = &peer->buckets[other->first_bucket + b];
            assert_int_equal(x->group, y->group);
            assert_int_equal(x->nentries, y->nentries);
            assert_int_equal(x->total_bytes, y->total_bytes);
            for (size_t e = 0; e < x->nentries; e++) {
                const tb_bucket_entry *p = &ir->entries[x->first_entry + e], *q = &peer->entries[y->first_entry + e];
                const tb_chunk *c = &ir->chunks[p->chunk], *d = &peer->chunks[q->chunk];
                assert_int_equal(p->offset, q->offset);
                assert_int_equal(p->nbytes, q->nbytes);
                assert_int_equal(c->id, d->id);
                assert_int_equal(c->part, d->part);
                assert_int_equal(c->src_dtype, d->src_dtype);
                assert_memory_equal(c->len, d->len, (size_t)c->ndim * sizeof *c->len);
                assert_memory_equal(&c->src, &d->src, (size_t)c->ndim * sizeof *c->src.start);
            }
        }
        return;
    }
    fail_msg("rank %d has no channel like rank %d's", peer->rank, ir->rank);
}

static void check_roles(const tb_ir *ir, const tb_chunk *c) {
    bool targets_me = false, in_targets = false, contributes = false;
    for (uint32_t i = 0; i < c->ntargets; i++) {
        targets_me |= c->targets[i] == ir->rank;
        in_targets |= c->targets[i] == c->source;
    }
    for (uint32_t i = 0; i < c->ncontributors; i++)
        contributes |= c->contributors[i] == ir->rank;
    assert_int_equal(c->is_source, c->source == ir->rank || contributes);
    switch (c->mode) {
    case TB_LOCAL:
        assert_true(c->is_target && targets_me && c->ntargets == 1);
        assert_true(c->source == ir->rank || c->source == TB_NO_RANK);
        break;
    case TB_NONE:
        assert_true(c->is_source && !c->is_target && contributes && c->source != ir->rank);
        break;
    case TB_P2P:
    case TB_BROADCAST:
        assert_false(in_targets);
        assert_int_equal(c->is_target, targets_me);
        assert_int_equal(c->mode == TB_P2P, c->ntargets == 1);
        break;
    }
}

/* A row takes a byte for each element, and three more. */
static const char extra[3];

static int64_t coded_size(const void *arg, int ndim, const int64_t *len) {
    int64_t rows = 1;
    assert_ptr_equal(arg, extra);
    for (int d = 0; d + 1 < ndim; d++)
        rows *= len[d];
    return rows * ((ndim ? len[ndim - 1] : 1) + (int64_t)sizeof extra);
}

/* The size of a chunk in the memory of the rank that combines it, for each contributor. */
static int64_t staged_size(const tb_chunk *c) {
    int64_t elements = 1;
    if (c->is_coded) {
        assert_int_equal(c->nbytes, coded_size(extra, c->ndim, c->len));
        return c->nbytes;
    }
    unsigned bits = tb_dtype_bits(c->wire_dtype);
    for (int d = 0; d < c->ndim; d++)
        elements *= c->len[d];
    assert_int_equal(c->nbytes, elements * bits / 8);
    if (c->ncontributors && tb_dtype_bits(c->src_dtype) > bits)
        bits = tb_dtype_bits(c->src_dtype);
    return elements * bits / 8;
}

/* Buckets are as large as the limits let them be, and no larger. staging_bytes of 0: nothing is staged. */
static void check_buckets(const tb_ir *ir, int64_t staging_bytes) {
    int64_t staged = 0;
    for (size_t i = 0; i < ir->nbuckets; i++) {
        const tb_bucket *bucket = &ir->buckets[i];
        const tb_chunk *first = &ir->chunks[ir->entries[bucket->first_entry].chunk];
        int64_t end = 0, limit = staging_bytes ? staging_bytes / 4 : INT64_MAX;
        if (staging_bytes && first->ncontributors)
            limit /= first->ncontributors;
        if (i > 0 && bucket[-1].channel == bucket->channel) {
            assert_true(bucket[-1].group <= bucket->group);
            bool fits = (bucket[-1].total_bytes + 63) / 64 * 64 + first->nbytes <= ir->bucket_size &&
                        (staged + 63) / 64 * 64 + staged_size(first) <= limit;
            assert_true(!fits || bucket[-1].group < bucket->group);
        }
        staged = 0;
        for (size_t e = 0; e < bucket->nentries; e++) {
            const tb_bucket_entry *entry = &ir->entries[bucket->first_entry + e];
            const tb_chunk *c = &ir->chunks[entry->chunk];
            assert_int_equal(entry->offset % 64, 0);
            assert_true(entry->offset >= end && entry->offset < end + 64);
            assert_int_equal(entry->nbytes, c->nbytes);
            end = entry->offset + entry->nbytes;
            staged = (staged + 63) / 64 * 64 + staged_size(c);
            assert_int_equal(c->group, bucket->group);
            assert_int_equal(c->is_coded, first->is_coded);
            check_roles(ir, c);
        }
        assert_int_equal(bucket->total_bytes, end);
        bool is_element = bucket->nentries == 1 && first->nbytes == tb_dtype_bits(first->wire_dtype) / 8;
        if (first->is_coded && bucket->nentries == 1) { /* rows stay whole */
            is_element = true;
            for (int d = 0; d + 1 < first->ndim; d++)
                is_element &= first->len[d] == 1;
        }
        assert_true(bucket->nentries == 1 || end <= ir->bucket_size);
        assert_true(staged <= limit || is_element);
    }
}

/* How often data changes hosts on its way to a target. Relays must have lower ranks than their receivers. */
static int count_steps(const tb_chunk *key, const int32_t *via, const int32_t *hosts, int32_t rank) {
    if (rank == key->source)
        return 0;
    for (uint32_t i = 0; i < key->ntargets; i++) {
        if (key->targets[i] != rank)
            continue;
        assert_true(via[i] == key->source || via[i] < rank);
        return count_steps(key, via, hosts, via[i]) + (hosts[via[i]] != hosts[rank]);
    }
    fail_msg("rank %d relays data that it does not get", rank);
    return 0;
}

/* A broadcast enters every other host once, leaves its own once, and each host sends it to one or two others. */
static void check_ways(const tb_chunk *key, const tb_channel *channel, const int32_t *hosts) {
    int enters[NRANKS] = {0}, leaves[NRANKS] = {0}, has[NRANKS] = {0}, nhosts = 0;
    for (uint32_t i = 0; i < key->ntargets; i++) {
        int32_t to = hosts[key->targets[i]], from = hosts[channel->via ? channel->via[i] : key->source];
        nhosts += to != hosts[key->source] && !has[to]++;
        enters[to] += from != to;
        leaves[from] += from != to;
    }
    for (int h = 0; h < NRANKS; h++)
        assert_int_equal(enters[h], has[h] > 0);
    assert_int_equal(leaves[hosts[key->source]], nhosts > 0);
    for (uint32_t i = 0; channel->via && i < key->ntargets; i++) {
        int steps = count_steps(key, channel->via, hosts, key->targets[i]);
        assert_true(leaves[hosts[key->targets[i]]] <= 2);
        assert_true(steps <= 4 || (size_t)steps <= channel->nbuckets || 1 << (steps - 2) < nhosts);
    }
}

/* Ids of what one rank receives are distinct. */
static void check_ids(const tb_ir *ir) {
    for (size_t i = 0; i < ir->nchunks; i++) {
        const tb_chunk *c = &ir->chunks[i];
        for (size_t j = 0; j < i; j++) {
            const tb_chunk *d = &ir->chunks[j];
            bool both = c->targets[0] == d->targets[0] && c->source != TB_NO_RANK && d->source != TB_NO_RANK;
            if (both)
                assert_true(c->id != d->id || c->part != d->part);
        }
    }
}

/* The group of each chunk is the one that its tensor was given, or that of the only band that it is in. */
static void check_groups(const tb_ir *ir, const batch *b) {
    for (size_t i = 0; i < ir->nchunks; i++) {
        const char *name = ir->names[ir->chunks[i].tensor];
        size_t t = 0;
        while (strcmp(b->spec[t].name, name) != 0)
            t++;
        const tb_chunk *c = &ir->chunks[i];
        int64_t band = b->spec[t].band, first = band ? c->dst.start[0] / band : 0;
        assert_int_equal(c->group, b->spec[t].group + first);
        assert_true(band == 0 || c->dst.start[0] + c->len[0] <= (first + 1) * band);
    }
}

static bool says(const tb_layout *layout, const char *word) {
    char *text;
    assert_int_equal(tb_layout_format(layout, &text), TB_OK);
    bool is_there = strstr(text, word);
    free(text);
    return is_there;
}

/* Bands, where all targets of a box have it in the same place; coding, where nothing is reduced. */
static void make_special(tb_tensor_spec *spec, rng *r) {
    spec->coded = false;
    spec->band = 0;
    if (spec->shape.ndim > 0 && rng_range(r, 0, 3) == 0 && !says(spec->dst, "Explicit"))
        spec->band = rng_range(r, 1, 4);
    if (rng_range(r, 0, 3) == 0 && !says(spec->src, "Partial") && !says(spec->dst, "Partial")) {
        spec->coded = true;
        spec->coded_nbytes = coded_size;
        spec->coded_arg = extra;
    }
}

/* ---- Checks of untrusted IRs ------------------------------------------------------------------------------------- */

static bool has_coded(const tb_ir *ir) {
    for (size_t i = 0; i < ir->nchunks; i++) {
        if (ir->chunks[i].is_coded)
            return true;
    }
    return false;
}

/* Both ends of a pair have the same hash of the fields that they share. */
static void check_hashes(tb_ir *const *ir) {
    static uint64_t hashes[NRANKS][NRANKS];
    memset(hashes, 0, sizeof hashes);
    for (int32_t rank = 0; rank < NRANKS; rank++) {
        tb_status status = tb__ir_check(ir[rank]);
        if (status != (has_coded(ir[rank]) ? TB_REFUSED : TB_OK))
            fail_msg("rank %d: %s: %s", rank, tb_status_string(status), tb_error_detail());
        tb__ir_hash(ir[rank], hashes[rank], NRANKS);
    }
    for (int32_t a = 0; a < NRANKS; a++) {
        for (int32_t b = 0; b < a; b++)
            assert_int_equal(hashes[a][b], hashes[b][a]);
    }
}

static void change_byte(void *items, size_t count, size_t size, rng *r) {
    if (count)
        ((unsigned char *)items)[rng_range(r, 0, (int64_t)(count * size) - 1)] ^= (unsigned char)rng_range(r, 1, 255);
}

/* Changes a byte, but not pointers and counts of ranks. Either the check refuses the IR, or it can still be copied and
 * hashed. */
static void check_changed(const tb_ir *ir, rng *r) {
    tb_ir *copy, *again;
    assert_int_equal(tb__ir_copy(ir, NULL, NULL, &copy), TB_OK);
    tb_chunk *chunks = (tb_chunk *)(uintptr_t)copy->chunks;
    tb_channel *channels = (tb_channel *)(uintptr_t)copy->channels;
    switch (rng_range(r, 0, 3)) {
    case 0:
        change_byte(chunks, copy->nchunks, sizeof *chunks, r);
        break;
    case 1:
        change_byte((void *)(uintptr_t)copy->entries, copy->nentries, sizeof *copy->entries, r);
        break;
    case 2:
        change_byte((void *)(uintptr_t)copy->buckets, copy->nbuckets, sizeof *copy->buckets, r);
        break;
    default:
        change_byte(channels, copy->nchannels, sizeof *channels, r);
    }
    for (size_t i = 0; i < copy->nchunks; i++) {
        bool *flags[] = {&chunks[i].is_source, &chunks[i].is_target, &chunks[i].is_coded, &chunks[i].is_whole};
        for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
            *(unsigned char *)flags[k] &= 1; /* in C a bool is one or the other */
        chunks[i].targets = ir->chunks[i].targets;
        chunks[i].ntargets = ir->chunks[i].ntargets;
        chunks[i].contributors = ir->chunks[i].contributors;
        chunks[i].ncontributors = ir->chunks[i].ncontributors;
    }
    for (size_t i = 0; i < copy->nchannels; i++)
        channels[i].via = ir->channels[i].via;
    if (tb__ir_check(copy) == TB_OK) {
        uint64_t hashes[NRANKS] = {0};
        tb__ir_hash(copy, hashes, NRANKS);
        assert_int_equal(tb__ir_copy(copy, NULL, NULL, &again), TB_OK);
        tb_ir_destroy(again);
    } else {
        assert_true(strlen(tb_error_detail()) > 0);
    }
    tb_ir_destroy(copy);
}

static void both_ends_build_the_same_buckets(void **state) {
    (void)state;
    static batch b;
    static tb_ir *ir[NRANKS];
    uint64_t seed = test_seed();
    int64_t n = test_cases(600), least_part = tb__min_part_nbytes;
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        for (int t = 0; t < MAX_TENSORS; t++)
            add_random(&b, seed * 1000 + (uint64_t)i * 10 + (uint64_t)t, TB_F32);
        for (size_t t = 0; t < b.count; t++) {
            static const tb_dtype dtypes[][3] = {
                {TB_F32, TB_F32}, {TB_F32, TB_BF16}, {TB_BF16, TB_F32}, {TB_BF16, TB_F32, TB_F32}};
            const tb_dtype *dtype = dtypes[rng_range(&r, 0, 3)];
            b.spec[t].src_dtype = dtype[0];
            b.spec[t].dst_dtype = dtype[1];
            b.spec[t].wire_dtype = dtype[2];
            b.spec[t].group = (uint32_t)rng_range(&r, 0, i % 3);
            make_special(&b.spec[t], &r);
        }
        tb_plan_cache *cache;
        assert_int_equal(tb_plan_cache_create(&cache), TB_OK);
        int32_t hosts[NRANKS], nhosts = (int32_t)rng_range(&r, 1, i % 2 ? 4 : NRANKS);
        for (int32_t rank = 0; rank < NRANKS; rank++)
            hosts[rank] = (int32_t)rng_range(&r, 0, nhosts - 1);
        tb_plan_opts plan = {.size = sizeof plan, .hosts = i % 3 ? hosts : NULL, .nhosts = i % 3 ? NRANKS : 0};
        tb_ir_opts opts = {.size = sizeof opts,
                           .plan = &plan,
                           .bucket_size = (int64_t[]){1, 100, 256, 1 << 20}[rng_range(&r, 0, 3)],
                           .staging_bytes = (int64_t[]){64, 256, 4096, 1 << 20}[rng_range(&r, 0, 3)],
                           .direct = rng_range(&r, 0, 4) == 0};
        tb__min_part_nbytes =
            (int64_t[]){1, 64, 1024}[rng_range(&r, 0, 2)]; /* such tensors are cut for other hosts, too */
        for (int32_t rank = 0; rank < NRANKS; rank++)
            assert_int_equal(tb_ir_create(rank, b.spec, b.count, rank % 2 ? cache : NULL, &opts, &ir[rank]), TB_OK);
        for (int32_t rank = 0; rank < NRANKS; rank++) {
            check_buckets(ir[rank], opts.direct ? 0 : opts.staging_bytes);
            check_ids(ir[rank]);
            check_groups(ir[rank], &b);
            if (i % 20 == 0)
                check_dumps(ir[rank]);
            for (size_t c = 0; c < ir[rank]->nchannels; c++) {
                const tb_channel *channel = &ir[rank]->channels[c];
                const tb_chunk *key = key_of(ir[rank], channel);
                if (key->source == rank && key->mode == TB_BROADCAST && plan.hosts)
                    check_ways(key, channel, hosts);
                if (key->source == rank && key->mode != TB_LOCAL) {
                    for (uint32_t t = 0; t < key->ntargets; t++)
                        check_peer(ir[rank], channel, ir[key->targets[t]], key->mode);
                }
                for (uint32_t p = 0; p < key->ncontributors && key->source == rank; p++) {
                    if (key->contributors[p] != rank)
                        check_peer(ir[rank], channel, ir[key->contributors[p]], TB_NONE);
                }
            }
        }
        check_hashes(ir);
        for (int32_t rank = 0; rank < NRANKS; rank++) {
            check_changed(ir[rank], &r);
            tb_ir_destroy(ir[rank]);
        }
        tb_plan_cache_destroy(cache);
        free_batch(&b);
    }
    tb__min_part_nbytes = least_part;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(both_ends_build_the_same_buckets)};
    return cmocka_run_group_tests_name("ir, random batches", tests, NULL, NULL);
}
