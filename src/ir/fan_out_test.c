/* Broadcasts relayed from host to host: their buckets follow one another, and are the same on all ranks that take
 * part. */
#include "ir/ir_test.h"

#include <stdio.h>

enum { MIB = 1 << 20, NRANKS = 4 };

typedef struct batch {
    const char *src, *dst; /* of each tensor */
    int ntensors;
    tb_shape shape; /* of f32 */
    int64_t band;
    bool is_coded;
    const int32_t *hosts; /* of ranks 0 to 3; NULL: not known */
    int64_t bucket_size, staging_bytes;
    bool is_direct, is_whole;
    size_t nbuckets;    /* of each channel */
    int64_t most_bytes; /* of a bucket */
} batch;

static void make(const batch *b, tb_ir **ir) {
    tb_layout *src, *dst;
    tb_tensor_spec spec[2];
    tb_plan_opts plan = {.size = sizeof plan, .hosts = b->hosts, .nhosts = b->hosts ? NRANKS : 0};
    tb_ir_opts opts = {.size = sizeof opts,
                       .plan = &plan,
                       .bucket_size = b->bucket_size,
                       .staging_bytes = b->staging_bytes,
                       .direct = b->is_direct};
    assert_int_equal(tb_layout_parse(b->src, &src), TB_OK);
    assert_int_equal(tb_layout_parse(b->dst, &dst), TB_OK);
    for (int i = 0; i < b->ntensors; i++)
        spec[i] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                   .name = i ? "b" : "a",
                                   .shape = b->shape,
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = TB_F32,
                                   .dst_dtype = TB_F32,
                                   .band = b->band,
                                   .coded = b->is_coded,
                                   .whole = b->is_whole};
    for (int32_t rank = 0; rank < NRANKS; rank++)
        assert_int_equal(tb_ir_create(rank, spec, (size_t)b->ntensors, NULL, &opts, &ir[rank]), TB_OK);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

/* The peer's channel from the same source. */
static const tb_channel *find_channel(const tb_ir *ir, int32_t source) {
    for (size_t i = 0; i < ir->nchannels; i++) {
        if (key_of(ir, &ir->channels[i])->source == source)
            return &ir->channels[i];
    }
    fail_msg("rank %d has no channel from rank %d", ir->rank, source);
    return NULL;
}

static void check_peer(const tb_ir *ir, const tb_channel *channel, const tb_ir *peer) {
    const tb_channel *other = find_channel(peer, ir->rank);
    assert_int_equal(other->nbuckets, channel->nbuckets);
    for (size_t i = 0; i < channel->nbuckets; i++) {
        const tb_bucket *x = &ir->buckets[channel->first_bucket + i], *y = &peer->buckets[other->first_bucket + i];
        assert_int_equal(x->total_bytes, y->total_bytes);
        assert_int_equal(x->nentries, y->nentries);
        for (size_t e = 0; e < x->nentries; e++) {
            const tb_chunk *c = &ir->chunks[ir->entries[x->first_entry + e].chunk];
            const tb_chunk *d = &peer->chunks[peer->entries[y->first_entry + e].chunk];
            assert_int_equal(c->id, d->id);
            assert_int_equal(c->part, d->part);
            assert_int_equal(c->nbytes, d->nbytes);
            assert_memory_equal(c->len, d->len, (size_t)c->ndim * sizeof *c->len);
        }
    }
}

static void check(const batch *b) {
    tb_ir *ir[NRANKS];
    size_t nchannels = 0;
    make(b, ir);
    for (int32_t rank = 0; rank < NRANKS; rank++) {
        for (size_t i = 0; i < ir[rank]->nchannels; i++) {
            int64_t nbytes = 0, most = 0;
            const tb_channel *channel = &ir[rank]->channels[i];
            const tb_chunk *key = key_of(ir[rank], channel);
            if (key->source != rank)
                continue;
            nchannels++;
            for (size_t k = 0; k < channel->nbuckets; k++) {
                const tb_bucket *bucket = &ir[rank]->buckets[channel->first_bucket + k];
                most = bucket->total_bytes > most ? bucket->total_bytes : most;
                nbytes += bucket->total_bytes;
            }
            if (channel->nbuckets != b->nbuckets || most != b->most_bytes)
                fail_msg("%s to %s: %zu buckets of up to %lld bytes, not %zu of %lld", b->src, b->dst,
                         channel->nbuckets, (long long)most, b->nbuckets, (long long)b->most_bytes);
            for (uint32_t t = 0; t < key->ntargets; t++)
                check_peer(ir[rank], channel, ir[key->targets[t]]);
            for (uint32_t p = 0; p < key->ncontributors; p++)
                check_peer(ir[rank], channel, ir[key->contributors[p]]);
            int64_t wanted = b->shape.dim[0] * b->shape.dim[1] * 4 * b->ntensors;
            assert_int_equal(nbytes, wanted / (key->ncontributors ? key->ncontributors : 1));
        }
    }
    assert_true(nchannels > 0);
    for (int32_t rank = 0; rank < NRANKS; rank++)
        tb_ir_destroy(ir[rank]);
}

static const int32_t apart[] = {0, 1, 2, 3}, two_away[] = {0, 0, 1, 1}, one_away[] = {0, 0, 0, 1};

static void what_is_handed_on_goes_in_buckets(void **state) {
    (void)state;
    const batch all = {.src = "mesh=1 place=R",
                       .dst = "mesh=3 place=R ranks=1..3",
                       .ntensors = 1,
                       .shape = {2, {1024, 1024}},
                       .hosts = apart,
                       .bucket_size = MIB,
                       .nbuckets = 4,
                       .most_bytes = MIB};
    batch b = all;
    check(&b);
    b.hosts = two_away; /* one relays to the other, on the same host */
    b.dst = "mesh=2 place=R ranks=2,3";
    check(&b);
    b.bucket_size = MIB + 2048; /* rows stay whole where they can */
    check(&b);
    b = all;
    b.ntensors = 2;
    b.shape.dim[0] = 128;
    b.nbuckets = 1; /* small ones share a bucket */
    check(&b);
    b = all;
    b.staging_bytes = MIB; /* less than a bucket can be staged */
    b.nbuckets = 16;
    b.most_bytes = MIB / 4;
    check(&b);
    b = all;
    b.bucket_size = 100; /* not too small */
    b.nbuckets = 64;
    b.most_bytes = MIB / 16;
    check(&b);
    b = all;
    b.band = 400; /* 400, 400 and 224 rows, each a group */
    b.nbuckets = 5;
    check(&b);
    b = all;
    b.is_coded = true;
    b.shape = (tb_shape){2, {2, MIB / 2}}; /* rows of coded tensors are never cut */
    b.nbuckets = 2;
    b.most_bytes = 2 * MIB;
    check(&b);
    b = all;
    b.src = "mesh=2 place=P"; /* each ships a half, and contributes to the other's half */
    b.dst = "mesh=2 place=R ranks=2,3";
    b.nbuckets = 2;
    check(&b);
}

static void what_is_not_handed_on_stays_whole(void **state) {
    (void)state;
    const batch all = {.src = "mesh=1 place=R",
                       .dst = "mesh=3 place=R ranks=1..3",
                       .ntensors = 1,
                       .shape = {2, {1024, 1024}},
                       .bucket_size = MIB,
                       .nbuckets = 1,
                       .most_bytes = 4 * MIB};
    batch b = all;
    check(&b); /* hosts are not known */
    b.hosts = apart;
    b.dst = "mesh=1 place=R ranks=1"; /* there is no other target to relay it to */
    check(&b);
    b.src = "mesh=2 place=P";
    b.dst = "mesh=2 place=R ranks=2,3";
    b.hosts = one_away; /* the sources reach both themselves */
    b.most_bytes = 2 * MIB;
    check(&b);
    b = all;
    b.hosts = apart;
    b.bucket_size = 1; /* every chunk alone, and whole */
    check(&b);
    b = all;
    b.hosts = apart;
    b.is_direct = true;
    check(&b);
    b = all;
    b.hosts = apart;
    b.is_coded = b.is_whole = true; /* not even for relays */
    check(&b);
    b.ntensors = 2;
    b.bucket_size = 64 * MIB; /* and each alone */
    b.nbuckets = 2;
    check(&b);
    b.is_whole = false;
    b.nbuckets = 1;
    b.most_bytes = 8 * MIB;
    check(&b);
}

/* Replicas take turns with small tensors, each of which goes to all other hosts in one piece; large ones they share. */
static void replicas_take_turns(void **state) {
    (void)state;
    enum { NTENSORS = 6 };
    static const struct {
        int64_t nelements; /* of f32 */
        size_t nchunks;    /* of each replica */
    } cases[] = {{2048, NTENSORS / 2}, {MIB / 16, NTENSORS / 2}, {MIB / 8, NTENSORS}};
    static const char *const names[NTENSORS] = {"a", "b", "c", "d", "e", "f"};
    tb_plan_opts plan = {.size = sizeof plan, .hosts = two_away, .nhosts = NRANKS};
    tb_ir_opts opts = {.size = sizeof opts, .plan = &plan};
    tb_layout *src, *dst;
    assert_int_equal(tb_layout_parse("mesh=2 place=R", &src), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=2 place=R ranks=2,3", &dst), TB_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_tensor_spec spec[NTENSORS];
        tb_ir *ir[NRANKS];
        for (size_t t = 0; t < NTENSORS; t++)
            spec[t] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                       .name = names[t],
                                       .shape = {1, {cases[i].nelements}},
                                       .src = src,
                                       .dst = dst,
                                       .src_dtype = TB_F32,
                                       .dst_dtype = TB_F32};
        for (int32_t rank = 0; rank < NRANKS; rank++)
            assert_int_equal(tb_ir_create(rank, spec, NTENSORS, NULL, &opts, &ir[rank]), TB_OK);
        for (int32_t rank = 0; rank < 2; rank++) {
            int64_t nbytes = 0;
            assert_int_equal(ir[rank]->nchannels, 1);
            assert_int_equal(ir[rank]->nchunks, cases[i].nchunks);
            for (size_t c = 0; c < ir[rank]->nchunks; c++)
                nbytes += ir[rank]->chunks[c].nbytes;
            assert_int_equal(nbytes, cases[i].nelements * 4 * NTENSORS / 2);
            for (int32_t target = 2; target < NRANKS; target++)
                check_peer(ir[rank], &ir[rank]->channels[0], ir[target]);
        }
        for (int32_t rank = 0; rank < NRANKS; rank++)
            tb_ir_destroy(ir[rank]);
    }
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_handed_on_goes_in_buckets),
        cmocka_unit_test(what_is_not_handed_on_stays_whole),
        cmocka_unit_test(replicas_take_turns),
    };
    return cmocka_run_group_tests_name("fan-out", tests, NULL, NULL);
}
