/* The IR: both ends of every channel build the same buckets, roles are told apart from transports, dumps read back. */
#include "ir/ir.h"
#include "plan/plan.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

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
    b->spec[i] = (tb_tensor_spec){.name = b->name[i],
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

static const tb_chunk *key_of(const tb_ir *ir, const tb_channel *channel) {
    return &ir->chunks[ir->entries[ir->buckets[channel->first_bucket].first_entry].chunk];
}

/* The other rank's channel for the same source, targets and contributors must have the same buckets. */
static void check_peer(const tb_ir *ir, const tb_channel *channel, const tb_ir *peer, tb_transport_kind transport) {
    const tb_chunk *key = key_of(ir, channel);
    for (size_t i = 0; i < peer->nchannels; i++) {
        const tb_channel *other = &peer->channels[i];
        const tb_chunk *k = key_of(peer, other);
        if (k->transport != transport || k->source != key->source ||
            !same_list(k->targets, k->ntargets, key->targets, key->ntargets) ||
            !same_list(k->contributors, k->ncontributors, key->contributors, key->ncontributors) ||
            k->is_coded != key->is_coded || (key->ncontributors && (k->op != key->op || k->divisor != key->divisor)))
            continue;
        assert_int_equal(channel->nbuckets, other->nbuckets);
        if (transport == TB_BROADCAST) {
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
    switch (c->transport) {
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
        assert_int_equal(c->transport == TB_P2P, c->ntargets == 1);
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

/* What a chunk takes in the memory of the rank that combines it, for each contributor. */
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

/* How many hosts away from the source a target is, if all who hand it on have lower ranks. */
static int count_steps(const tb_chunk *key, const int32_t *via, const int32_t *hosts, int32_t rank) {
    if (rank == key->source)
        return 0;
    for (uint32_t i = 0; i < key->ntargets; i++) {
        if (key->targets[i] != rank)
            continue;
        assert_true(via[i] == key->source || via[i] < rank);
        return count_steps(key, via, hosts, via[i]) + (hosts[via[i]] != hosts[rank]);
    }
    fail_msg("rank %d hands on what it does not get", rank);
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

static void check_dumps(const tb_ir *ir) {
    char *json, *again, *text;
    tb_ir *parsed;
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    assert_int_equal(tb_ir_parse_json(json, strlen(json), &parsed), TB_OK);
    assert_int_equal(tb_ir_dump_json(parsed, &again), TB_OK);
    assert_string_equal(json, again);
    assert_int_equal(tb_ir_dump_text(parsed, &text), TB_OK);
    assert_non_null(strstr(text, "rank "));
    free(json);
    free(again);
    free(text);
    tb_ir_destroy(parsed);
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

static void both_ends_build_the_same_buckets(void **state) {
    (void)state;
    static batch b;
    static tb_ir *ir[NRANKS];
    uint64_t seed = test_seed();
    int64_t n = test_cases(600), least_part = tb__least_part;
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
        tb__least_part = (int64_t[]){1, 64, 1024}[rng_range(&r, 0, 2)]; /* such tensors are cut for other hosts, too */
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
                if (key->source == rank && key->transport == TB_BROADCAST && plan.hosts)
                    check_ways(key, channel, hosts);
                if (key->source == rank && key->transport != TB_LOCAL) {
                    for (uint32_t t = 0; t < key->ntargets; t++)
                        check_peer(ir[rank], channel, ir[key->targets[t]], key->transport);
                }
                for (uint32_t p = 0; p < key->ncontributors && key->source == rank; p++) {
                    if (key->contributors[p] != rank)
                        check_peer(ir[rank], channel, ir[key->contributors[p]], TB_NONE);
                }
            }
        }
        for (int32_t rank = 0; rank < NRANKS; rank++)
            tb_ir_destroy(ir[rank]);
        tb_plan_cache_destroy(cache);
        free_batch(&b);
    }
    tb__least_part = least_part;
}

static tb_ir *make(int32_t rank, const char *src_text, const char *dst_text, tb_shape shape, tb_dtype dtype,
                   int64_t bucket_size) {
    tb_layout *src, *dst;
    tb_ir *ir;
    tb_ir_opts opts = {.size = sizeof opts, .bucket_size = bucket_size};
    assert_int_equal(tb_layout_parse(src_text, &src), TB_OK);
    assert_int_equal(tb_layout_parse(dst_text, &dst), TB_OK);
    tb_tensor_spec spec[2] = {
        {.name = "b", .shape = shape, .src = src, .dst = dst, .src_dtype = dtype, .dst_dtype = dtype}};
    spec[1] = spec[0];
    spec[1].name = "a";
    assert_int_equal(tb_ir_create(rank, spec, 2, NULL, &opts, &ir), TB_OK);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    return ir;
}

/* A self-copy that travels in a bucket reads and writes: its write is not dropped. */
static void a_self_copy_keeps_its_write(void **state) {
    (void)state;
    tb_ir *ir = make(1, "mesh=2 place=S0", "mesh=2 place=S0", (tb_shape){1, {64}}, TB_F32, 1 << 20);
    assert_int_equal(ir->nchunks, 2);
    assert_int_equal(ir->nbuckets, 1); /* both tensors in one bucket */
    assert_string_equal(ir->names[0], "a");
    for (size_t i = 0; i < ir->nchunks; i++) {
        assert_int_equal(ir->chunks[i].transport, TB_LOCAL);
        assert_true(ir->chunks[i].is_source && ir->chunks[i].is_target);
    }
    tb_ir_destroy(ir);
}

/* A source that keeps a copy and broadcasts to others has two channels, and both ends' buffers have the same size. */
static void a_local_chunk_is_never_bundled_with_a_broadcast(void **state) {
    (void)state;
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=3 place=R", (tb_shape){1, {64}}, TB_F32, 1 << 20);
    assert_int_equal(ir->nchannels, 2);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_chunk *key = key_of(ir, &ir->channels[i]);
        assert_int_equal(ir->buckets[ir->channels[i].first_bucket].nentries, 2);
        if (key->transport == TB_LOCAL) {
            assert_int_equal(key->ntargets, 1);
        } else {
            assert_int_equal(key->transport, TB_BROADCAST);
            assert_int_equal(key->ntargets, 2);
            assert_true(key->targets[0] != 0 && key->targets[1] != 0);
        }
    }
    tb_ir_destroy(ir);
}

static void bucket_sizes(void **state) {
    (void)state;
    tb_shape shape = {1, {100}};
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 1);
    assert_int_equal(ir->nbuckets, 2); /* 1: no coalescing */
    tb_ir_destroy(ir);
    ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 400);
    assert_int_equal(ir->nbuckets, 2); /* as large as a bucket: alone */
    tb_ir_destroy(ir);
    ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", shape, TB_F32, 848);
    assert_int_equal(ir->nbuckets, 1);
    assert_int_equal(ir->entries[1].offset, 448); /* aligned to 64 */
    assert_int_equal(ir->buckets[0].total_bytes, 848);
    assert_int_equal(ir->channels[0].max_in_flight, 2);
    tb_ir_destroy(ir);
}

/* A rank that combines holds what all contribute to a bucket, before the cast to the wire dtype: the staging memory is
 * divided among them. */
static void contributions_fit_into_staging_memory(void **state) {
    (void)state;
    static const struct {
        const char *src;
        int64_t staging_bytes, bucket_size;
        bool direct;
        size_t nbuckets; /* of the first channel */
        int64_t total_bytes;
    } cases[] = {
        {"mesh=4 place=P", 131072, 1 << 20, false, 1, 4096}, /* 4 contributors, 2 tensors, 1024 floats of each */
        {"mesh=4 place=P", 131071, 1 << 20, false, 2, 2048},
        {"mesh=4 place=P", 16384, 1 << 20, false, 8, 512}, /* cut to 256 floats */
        {"mesh=4 place=P", 16384, 100, false, 8, 512},     /* larger than a bucket: alone, but not cut further */
        {"mesh=4 place=P", 16384, 1 << 20, true, 1, 4096},
        {"mesh=1 place=R", 65536, 1 << 20, false, 1, 16384}, /* nobody contributes: only the wire dtype counts */
        {"mesh=1 place=R", 65535, 1 << 20, false, 2, 8192},
        {"mesh=1 place=R", 65536, 8192, false, 2, 8192},
        {"mesh=1 place=R", 65535, 1 << 20, true, 1, 16384},
    };
    tb_layout *src, *dst;
    tb_ir *ir;
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=9", &dst), TB_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(tb_layout_parse(cases[i].src, &src), TB_OK);
        tb_tensor_spec spec[2] = {
            {.name = "a", .shape = {1, {4096}}, .src = src, .dst = dst, .src_dtype = TB_F32, .dst_dtype = TB_BF16}};
        spec[1] = spec[0];
        spec[1].name = "b";
        tb_ir_opts opts = {.size = sizeof opts,
                           .bucket_size = cases[i].bucket_size,
                           .staging_bytes = cases[i].staging_bytes,
                           .direct = cases[i].direct};
        assert_int_equal(tb_ir_create(0, spec, 2, NULL, &opts, &ir), TB_OK);
        assert_int_equal(key_of(ir, &ir->channels[0])->transport, TB_P2P);
        assert_int_equal(ir->channels[0].nbuckets, cases[i].nbuckets);
        assert_int_equal(ir->buckets[0].total_bytes, cases[i].total_bytes);
        tb_ir_destroy(ir);
        tb_layout_destroy(src);
    }
    tb_layout_destroy(dst);
}

/* Groups go in their order, not in that of names, and share no bucket; names keep their numbers. */
static void groups_are_apart(void **state) {
    (void)state;
    tb_layout *src, *dst;
    tb_ir *ir;
    char *text;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=1", &dst), TB_OK);
    static const char *const names[] = {"a", "b", "c", "d"};
    static const uint32_t groups[] = {7, 0, 7, 2};
    tb_tensor_spec spec[4];
    for (size_t i = 0; i < 4; i++)
        spec[i] = (tb_tensor_spec){.name = names[i],
                                   .shape = {1, {16}},
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = TB_F32,
                                   .dst_dtype = TB_F32,
                                   .group = groups[i]};
    assert_int_equal(tb_ir_create(0, spec, 4, NULL, NULL, &ir), TB_OK);
    assert_int_equal(ir->nchannels, 1);
    assert_int_equal(ir->nbuckets, 3);
    static const uint32_t tensors[] = {1, 3, 0, 2};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(ir->chunks[i].tensor, tensors[i]);
    assert_int_equal(ir->buckets[0].group, 0);
    assert_int_equal(ir->buckets[1].group, 2);
    assert_int_equal(ir->buckets[2].group, 7);
    assert_int_equal(ir->buckets[2].nentries, 2);
    assert_int_equal(tb_ir_dump_text(ir, &text), TB_OK);
    assert_non_null(strstr(text, "bucket 0: 1 chunks, 64 bytes\n"));
    assert_non_null(strstr(text, "bucket 2: 2 chunks, 128 bytes, group 7\n"));
    free(text);
    check_dumps(ir);
    char *json;
    tb_ir *parsed;
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    *strstr(json, "0,\"total_bytes\"") = '3'; /* before group 2 */
    assert_int_equal(tb_ir_parse_json(json, strlen(json), &parsed), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'group' is 2, not between 3"));
    free(json);
    tb_ir_destroy(ir);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

/* A bit for each element; less than a byte is nothing. */
static int64_t bits_size(const void *arg, int ndim, const int64_t *len) {
    int64_t n = *(const int64_t *)arg;
    for (int d = 0; d < ndim; d++)
        n *= len[d];
    return n / 8;
}

static void coded_rows_of_less_than_a_byte(void **state) {
    (void)state;
    tb_layout *src, *dst;
    tb_ir *ir;
    int64_t bits = 1, total = 0;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=1 place=R ranks=1", &dst), TB_OK);
    tb_ir_opts opts = {.size = sizeof opts, .staging_bytes = 64 << 10};
    tb_tensor_spec spec = {.name = "x",
                           .shape = {2, {1 << 20, 2}},
                           .src = src,
                           .dst = dst,
                           .src_dtype = TB_U8,
                           .dst_dtype = TB_U8,
                           .coded = true,
                           .coded_nbytes = bits_size,
                           .coded_arg = &bits};
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, &opts, &ir), TB_OK);
    assert_true(ir->nchunks >= 16);
    for (size_t i = 0; i < ir->nchunks; i++) {
        assert_true(ir->chunks[i].nbytes <= 16 << 10);
        total += ir->chunks[i].nbytes;
    }
    assert_int_equal(total, 1 << 18);
    tb_ir_destroy(ir);
    bits = -8;
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x': a part of it has -2097152 bytes on the wire"));
    spec.shape.dim[1] = 1; /* cut into rows of an eighth of a byte */
    spec.band = 1;
    bits = 1;
    assert_int_equal(tb_ir_create(0, &spec, 1, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x': a part of it has 0 bytes on the wire"));
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

static void ids_are_made_of_target_name_and_box(void **state) {
    (void)state;
    tb_ir *ir = make(1, "mesh=2 place=S0", "mesh=1 place=R ranks=5", (tb_shape){1, {8}}, TB_F32, 1);
    assert_int_equal(ir->nchunks, 2);
    for (uint64_t i = 0; i < 2; i++) /* rank 1 sends the second of rank 5's two boxes */
        assert_int_equal(ir->chunks[i].id, ((UINT64_C(5) << 22 | i) << 18 | 1) << 4);
    tb_ir_destroy(ir);
}

static void partial_sources_and_targets(void **state) {
    (void)state;
    tb_shape shape = {1, {8}};
    tb_ir *ir = make(2, "mesh=2 place=R", "mesh=2 place=P ranks=2,3", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->chunks[0].transport, TB_P2P);
    tb_ir_destroy(ir);
    ir = make(3, "mesh=2 place=R", "mesh=2 place=P ranks=2,3", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->nchunks, 2); /* zeros: target only, no source */
    assert_int_equal(ir->chunks[0].source, TB_NO_RANK);
    assert_true(ir->chunks[0].is_target && !ir->chunks[0].is_source);
    tb_ir_destroy(ir);
    ir = make(0, "mesh=2 place=P", "mesh=1 place=R ranks=4", shape, TB_F32, 1 << 20);
    bool ships = false, helps = false; /* the role of shipper is spread: rank 0 ships half, and helps with the rest */
    for (size_t i = 0; i < ir->nchunks; i++) {
        ships |= ir->chunks[i].transport == TB_P2P && ir->chunks[i].source == 0;
        helps |= ir->chunks[i].transport == TB_NONE && ir->chunks[i].source == 1;
        assert_int_equal(ir->chunks[i].ncontributors, 2);
        assert_int_equal(ir->chunks[i].op, TB_SUM);
        assert_int_equal(ir->chunks[i].divisor, 1);
    }
    assert_true(ships && helps);
    tb_ir_destroy(ir);
    ir = make(0, "mesh=2,3 place=P,Partial(avg)", "mesh=1 place=R ranks=9", shape, TB_F32, 1 << 20);
    assert_int_equal(ir->chunks[0].op, TB_SUM);
    assert_int_equal(ir->chunks[0].divisor, 3);
    tb_ir_destroy(ir);
}

static void wire_dtypes(void **state) {
    (void)state;
    tb_dtype wire;
    assert_int_equal(tb__wire_dtype(TB_F32, TB_BF16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F32, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_F16, TB_BF16, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(wire, TB_F16);
    assert_int_equal(tb__wire_dtype(TB_F32, TB_F32, TB_BF16, &wire), TB_OK);
    assert_int_equal(wire, TB_BF16);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_DTYPE_NONE, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_BF16, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_BF16, TB_F8E4M3, TB_F8E4M3, &wire), TB_OK);
    assert_int_equal(tb__wire_dtype(TB_F8E4M3, TB_F8E4M3, TB_DTYPE_NONE, &wire), TB_OK);
    assert_int_equal(tb__wire_dtype(TB_I32, TB_F32, TB_DTYPE_NONE, &wire), TB_REFUSED);
    assert_int_equal(tb__wire_dtype(TB_F32, (tb_dtype)99, TB_DTYPE_NONE, &wire), TB_INVALID);
}

static void wrong_batches(void **state) {
    (void)state;
    tb_layout *layout;
    tb_ir *ir;
    assert_int_equal(tb_layout_parse("mesh=1 place=R", &layout), TB_OK);
    tb_tensor_spec spec[2] = {
        {.name = "x", .shape = {1, {4}}, .src = layout, .dst = layout, .src_dtype = TB_F32, .dst_dtype = TB_F32}};
    spec[1] = spec[0];
    assert_int_equal(tb_ir_create(0, spec, 2, NULL, NULL, &ir), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "'x' is in the batch twice"));
    spec[0].dst_dtype = TB_I32;
    assert_int_equal(tb_ir_create(0, spec, 1, NULL, NULL, &ir), TB_REFUSED);
    assert_non_null(strstr(tb_error_detail(), "tensor 'x'"));
    tb_ir_opts opts = {0};
    assert_int_equal(tb_ir_create(0, spec, 1, NULL, &opts, &ir), TB_INVALID); /* size not set */
    assert_int_equal(tb_ir_create(0, NULL, 0, NULL, NULL, &ir), TB_OK);       /* an empty batch is fine */
    assert_int_equal(ir->nchunks, 0);
    tb_ir_destroy(ir);
    tb_layout_destroy(layout);
}

static void replace(char *text, const char *from, const char *to) {
    char *at = strstr(text, from);
    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    while (*to)
        *at++ = *to++;
}

/* Numbers that are good by themselves and overflow together. */
static void huge_dumps(void **state) {
    (void)state;
    static const struct {
        const char *src, *offset, *word;
    } wrong[] = {{"4611686018427387904", "0", "a box ends past 2^62"}, {"0", "4611686018427387904", "go past 2^62"}};
    for (size_t i = 0; i < 2; i++) {
        char text[1024];
        tb_ir *ir;
        int n =
            snprintf(text, sizeof text,
                     "{\"rank\":2,\"bucket_size\":1,\"tensors\":[\"w\"],\"channels\":[{\"transport\":\"P2P\","
                     "\"source\":0,\"targets\":[2],\"contributors\":[],\"max_in_flight\":2,\"buckets\":[{"
                     "\"group\":0,\"total_bytes\":1,\"chunks\":[{\"tensor\":0,\"id\":\"0000200000000000\",\"part\":0,"
                     "\"is_source\":false,\"is_target\":true,\"op\":\"sum\",\"divisor\":1,"
                     "\"shape\":[4611686018427387904],\"src\":[%s],\"dst\":[0],\"src_cell\":0,\"dst_cell\":0,"
                     "\"order\":0,\"src_dtype\":\"u8\",\"wire_dtype\":\"u8\",\"offset\":%s,\"nbytes\":"
                     "4611686018427387904}]}]}]}",
                     wrong[i].src, wrong[i].offset);
        assert_int_equal(tb_ir_parse_json(text, (size_t)n, &ir), TB_INVALID);
        assert_non_null(strstr(tb_error_detail(), wrong[i].word));
    }
}

/* Each falsification of a good dump is found. */
static void wrong_dumps(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *word;
    } wrong[] = {
        {"\"rank\":0", "\"rank\":x", "line 1"},
        {"\"rank\":0", "\"bank\":0", "'rank' is missing"},
        {"\"a\",\"b\"", "\"b\",\"a\"", "in order"},
        {"\"P2P\"", "\"P3P\"", "'transport'"},
        {"\"targets\":[1]", "\"targets\":[0]", "sends to itself"},
        {"\"offset\":448", "\"offset\":449", "multiple of 64"},
        {"\"offset\":448", "\"offset\":384", "multiple of 64"},
        {"\"nbytes\":400", "\"nbytes\":404", "the shape has 400"},
        {"\"total_bytes\":848", "\"total_bytes\":849", "end at 848"},
        {"\"shape\":[100]", "\"shape\":[ -1]", "out of range"},
        {"\"tensor\":1", "\"tensor\":2", "between 0 and 1"},
        {"\"wire_dtype\":\"f32\"", "\"wire_dtype\":\"f33\"", "not a dtype"},
        {"\"src_dtype\":\"f32\"", "\"src_dtype\":\"i32\"", "no cast from i32 to f32"},
        {"\"src_dtype\":\"f32\"", "\"src_dtype\":12345", "'src_dtype' is missing"},
        {"\"is_source\":true", "\"is_source\":null", "true or false"},
        {"\"group\":0", "\"grope\":0", "'group' is missing"},
        {"\"max_in_flight\":2", "\"via\":[1],\"yyy\":1", "'via' does not say"},
    };
    char *json;
    tb_ir *ir = make(0, "mesh=1 place=R", "mesh=1 place=R ranks=1", (tb_shape){1, {100}}, TB_F32, 848);
    assert_int_equal(tb_ir_dump_json(ir, &json), TB_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *copy = strdup(json);
        tb_ir *parsed;
        replace(copy, wrong[i].from, wrong[i].to);
        tb_status status = tb_ir_parse_json(copy, strlen(copy), &parsed);
        if (status != TB_INVALID || !strstr(tb_error_detail(), wrong[i].word))
            fail_msg("%s gave %d '%s'", wrong[i].to, status, tb_error_detail());
        free(copy);
    }
    free(json);
    tb_ir_destroy(ir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_ends_build_the_same_buckets),
        cmocka_unit_test(a_self_copy_keeps_its_write),
        cmocka_unit_test(a_local_chunk_is_never_bundled_with_a_broadcast),
        cmocka_unit_test(bucket_sizes),
        cmocka_unit_test(contributions_fit_into_staging_memory),
        cmocka_unit_test(groups_are_apart),
        cmocka_unit_test(coded_rows_of_less_than_a_byte),
        cmocka_unit_test(ids_are_made_of_target_name_and_box),
        cmocka_unit_test(partial_sources_and_targets),
        cmocka_unit_test(wire_dtypes),
        cmocka_unit_test(wrong_batches),
        cmocka_unit_test(huge_dumps),
        cmocka_unit_test(wrong_dumps),
    };
    return cmocka_run_group_tests_name("ir", tests, NULL, NULL);
}
