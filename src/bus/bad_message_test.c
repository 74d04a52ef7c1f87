/* Messages that no honest rank sends: where a tensor is said to be, and what else is used as an offset, a size or a
 * count. The batch is refused with a sentence, and the process lives on. */
#include "bus/bus_test.h"
#include "bus/exchange.h"
#include "flow/flow_inside.h"
#include "loop/loop_inside.h"

enum { SIDE = 64, SMALL = 64 };

/* What a BIND says, if not the truth. */
typedef struct lie {
    const char *words; /* of the refusal; NULL: it is none */
    uint64_t offset;
    int64_t strides[2]; /* 0: the true ones */
    bool is_word;       /* of the word: */
    uint64_t word_offset;
    bool has_small_words; /* the words' key is the one of a region of SMALL bytes */
    uint64_t tensor;      /* key of the tensor */
    bool twice, is_cut;
    bool is_unshared; /* its key is to device memory that was never shared */
} lie;

static tb__flow *flow_of(const tb_batch *batch) {
    const tb__exchange *exchange = batch->exchanges.item[0];
    return exchange->flows[strcmp(exchange->pair->sides[0].group, "a") != 0];
}

static void pack_key(tb__pack *pack, tb__region *region, tb__peer *peer) {
    tb__pack key = {0};
    check_ok(tb__region_export(region, peer, &key));
    tb__pack_bytes(pack, key.data, key.count);
    tb__pack_fini(&key);
}

static void pack_unshared_key(tb__pack *pack) {
    tb__pack key = {0};
    tb__pack_u32(&key, TB__KEY_SHARE);
    for (int i = 0; i < 3; i++)
        tb__pack_u64(&key, 77);
    tb__pack_bytes(pack, key.data, key.count);
    tb__pack_fini(&key);
}

/* With the lock held. */
static void send_lie(tb__flow *flow, const lie *l, tb__region *small) {
    tb__pack pack = {0};
    member *reader = NULL;
    for (size_t i = 0; i < flow->nmembers; i++)
        reader = flow->members[i].setup.is_reader ? &flow->members[i] : reader;
    flow->setup.is_bound = true; /* so that the truth is not told */
    tb__flow_begin_message(flow, &pack, MESSAGE_BIND, 0);
    tb__pack_u32(&pack, false);
    pack_key(&pack, l->has_small_words ? small : flow->direct.exposures_region, reader->peer);
    tb__pack_u64(&pack,
                 l->is_word ? l->word_offset : (uint64_t)((char *)reader->direct.exposure - flow->direct.exposures));
    tb__pack_bytes(&pack, NULL, 0); /* no staging memory on a device */
    uint32_t count = l->twice ? 2 : 1;
    tb__pack_u32(&pack, count);
    for (uint32_t i = 0; i < count; i++) {
        tb__pack_u64(&pack, l->tensor);
        tb__pack_u32(&pack, false);
        if (l->is_unshared)
            pack_unshared_key(&pack);
        else
            pack_key(&pack, flow->setup.src_regions[0], reader->peer);
        tb__pack_u64(&pack, l->offset);
        for (int d = 0; d < 2; d++)
            tb__pack_i64(&pack, l->strides[d] ? l->strides[d] : flow->tensors[0].src.strides[d]);
    }
    pack.count -= l->is_cut;
    check_ok(tb__loop_send(reader->peer, reader->port, &pack));
}

/* Whoever hears of a refusal early can't even begin. */
static tb_status move(rank *r, setup *s, tb_transfer **t) {
    tb_status status = (is_a(r) ? tb_send : tb_recv)(s->batch, NULL, t);
    return status == TB_OK ? tb_wait(*t, TB_COMMITTED, -1) : status;
}

/* From then on the rank maps memory of the slow device, wherever its tensor is. */
static void use_device(rank *r) {
#ifdef TB_SLOW_DEVICE
    void *memory = slow_device_alloc(1);
    check(tb__loop_find_device(r->world->loop, memory, 1)->ops == &slow_device_ops);
    slow_device_free(memory);
#else
    (void)r;
#endif
}

static void tell_a_lie(rank *r) {
    const lie *l = r->scene->shared;
    tb_transfer *t = NULL;
    tb__region *small = NULL;
    void *memory;
    setup s;
    check_ok(tb_alloc(SMALL, &memory));
    use_device(r);
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, NULL);
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 1);
        tb__loop_lock(r->world->loop);
        check_ok(tb__flow_plan(flow_of(s.batch)));
        check_ok(tb__region_get(r->world->loop, memory, SMALL, &small));
        send_lie(flow_of(s.batch), l, small);
        tb__loop_unlock(r->world->loop);
    }
    tb_status status = move(r, &s, &t);
    if (l->words) {
        check_fails(status, TB_INVALID, l->words);
        check(strstr(tb_error_detail(), "(a 0) sent an invalid message about batch 'step'"));
        check(is_a(r) || part_is_poison(&s.w));
    } else {
        check_ok(status);
    }
    tb_transfer_destroy(t);
    meet(r);
    tb__loop_lock(r->world->loop);
    tb__region_put(small);
    tb__loop_unlock(r->world->loop);
    tb_free(memory);
    tear_down(&s);
}

static void test_places(void **state) {
    (void)state;
    static const char outside[] = "tensor 'w' is not inside of its memory", word[] = "its exposure";
    const int64_t most = INT64_MAX, least = INT64_MIN;
    const lie lies[] = {
        {.words = NULL},
        {.words = outside, .offset = 1},
        {.words = outside, .offset = (uint64_t)SIDE * SIDE * 4},
        {.words = outside, .offset = (uint64_t)1 << 40},
        {.words = outside, .offset = INT64_MAX},
        {.words = outside, .offset = UINT64_MAX},
        {.words = outside, .offset = UINT64_MAX - 3},
        {.words = outside, .strides = {SIDE + 1}},
        {.words = outside, .strides = {(int64_t)1 << 40}},
        {.words = outside, .strides = {most, 1}},
        {.words = outside, .strides = {1, most}},
        {.words = outside, .strides = {least, least}},
        {.words = outside, .strides = {-SIDE, 1}},
        {.words = outside, .strides = {-SIDE, -1}, .offset = 4},
        {.words = outside, .strides = {-((int64_t)1 << 40), 1}, .offset = (uint64_t)1 << 62},
        {.words = NULL, .strides = {-SIDE, -1}, .offset = ((uint64_t)SIDE * SIDE - 1) * 4},
        {.words = word, .is_word = true, .word_offset = (uint64_t)1 << 40},
        {.words = word, .is_word = true, .word_offset = UINT64_MAX - 7},
        {.words = word, .is_word = true, .word_offset = 4},
        {.words = word, .is_word = true, .word_offset = SMALL, .has_small_words = true},
        {.words = "there is no tensor of key 77", .tensor = 77},
        {.words = "tensors are not in order", .twice = true},
        {.words = "truncated or malformed", .is_cut = true},
        {.words = NULL, .is_unshared = true},
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++)
        run_ranks(tell_a_lie, 1, 1, &lies[i]);
}

/* A bucket that is announced twice must not count for two. */
static void announce_twice(rank *r) {
    tb_batch_opts opts = {.size = sizeof opts, .staged = true, .bucket_size = 4096};
    tb_transfer *t = NULL;
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, &opts);
    exchange(r, &s, "a", 1);
    meet(r);
    if (is_a(r)) {
        tb__flow *flow = flow_of(s.batch);
        tb__loop_lock(r->world->loop);
        const tb_chunk *first = tb__flow_first_chunk(flow, 0);
        for (int i = 0; i < 2; i++) {
            tb__pack pack = {0};
            tb__flow_begin_message(flow, &pack, MESSAGE_BUCKET, 2);
            tb__pack_u64(&pack, first->id);
            tb__pack_u32(&pack, first->part);
            tb__pack_u64(&pack, TB__NOWHERE - (size_t)i);
            tb__pack_u64(&pack, (uint64_t)flow->setup.ir->buckets[0].total_bytes);
            tb__pack_u64(&pack, 0);
            tb__pack_u32(&pack, 0);
            tb__pack_bytes(&pack, NULL, 0);
            for (size_t m = 0; m < flow->nmembers; m++) {
                if (flow->members[m].setup.is_reader)
                    check_ok(tb__loop_send(flow->members[m].peer, flow->members[m].port, &pack));
            }
        }
        tb__loop_unlock(r->world->loop);
    }
    part_poison(&s.w);
    check_fails(move(r, &s, &t), TB_INVALID, "it announces bucket 0 twice");
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_announcements(void **state) {
    (void)state;
    run_ranks(announce_twice, 1, 1, NULL);
}

/* Frames that don't follow src/loop/peer.c: who receives one disconnects. */
typedef struct bad_frame {
    size_t nbytes;
    uint64_t announced; /* bytes of the message, if there is room to say so */
    const char *words;
} bad_frame;

static void ignore(tb_op *op) {
    (void)op;
}

static void send_bad_frame(rank *r) {
    static unsigned char bytes[8192];
    static tb_piece piece;
    static tb_op op;
    const bad_frame *f = r->scene->shared;
    tb_transfer *t = NULL;
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, NULL);
    meet(r);
    if (is_a(r)) {
        for (size_t i = 0; i < 8; i++)
            bytes[4 + i] = (unsigned char)(f->announced >> (8 * i));
        tb__loop_lock(r->world->loop);
        const tb__peer *peer = tb__loop_peers(r->world->loop);
        while (peer->rank == r->world->rank)
            peer = peer->next;
        piece = (tb_piece){bytes, f->nbytes};
        op = (tb_op){
            .kind = TB_OP_SEND, .peer = peer->transport_rank, .tag = TB__TAG_MESSAGE, .pieces = &piece, .npieces = 1};
        op.done = ignore;
        check_ok(tb__transport_post(peer->transport, &op));
        tb__loop_unlock(r->world->loop);
    }
    tb_status status = move(r, &s, &t);
    check_fails(status, TB_LOST, is_a(r) ? "(b 0) was lost" : f->words);
    check(is_a(r) || strstr(tb_error_detail(), "(a 0) was lost"));
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_frames(void **state) {
    (void)state;
    const bad_frame frames[] = {
        {7, 0, ": truncated frame: got 7 of 12 bytes"},
        {20, 3, ": wrong frame: it announces a message of 3 bytes and holds 8"},
        {12, (uint64_t)1 << 40, ": wrong frame: it announces a message of 1099511627776 bytes, 1073741824 are allowed"},
        {5000, 4988, ": oversized frame: got 5000 bytes, 4096 are allowed"},
    };
    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++)
        run_ranks(send_bad_frame, 1, 1, &frames[i]);
}

/* Messages about shared device memory that don't follow src/loop/share.c. */
typedef struct bad_share {
    uint32_t kind; /* SHARE, REVOKE, REVOKED */
    const char *device;
    uint64_t words[3];
    size_t nwords;
    bool is_harmless;
} bad_share;

static void send_bad_share(rank *r) {
    const bad_share *f = r->scene->shared;
    tb_transfer *t = NULL;
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, NULL);
    meet(r);
    if (is_a(r)) {
        tb__pack pack = {0};
        part_fill(&s.w, 1);
        tb__pack_u32(&pack, f->kind);
        tb__pack_u64(&pack, 77);
        if (f->device) {
            tb__pack_string(&pack, f->device);
            tb__pack_bytes(&pack, "key", 3);
            tb__pack_u32(&pack, (uint32_t)f->words[0]);
        }
        for (size_t i = f->device != NULL; i < f->nwords; i++)
            tb__pack_u64(&pack, f->words[i]);
        tb__loop_lock(r->world->loop);
        const tb__peer *peer = tb__loop_peers(r->world->loop);
        while (peer->rank == r->world->rank)
            peer = peer->next;
        check_ok(tb__loop_send((tb__peer *)(uintptr_t)peer, TB__PORT_LOOP, &pack));
        tb__loop_unlock(r->world->loop);
    }
    tb_status status = move(r, &s, &t);
    if (f->is_harmless)
        check_ok(status);
    else
        check_fails(status, TB_LOST, is_a(r) ? "(b 0) was lost" : "malformed message of kind");
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&s);
}

static void test_shares(void **state) {
    (void)state;
    const bad_share shares[] = {
        {.kind = 9},
        {.kind = 0},
        {.kind = 0, .device = "slow", .words = {1 << 20, 5}, .nwords = 2}, /* so many descriptors */
        {.kind = 0, .device = "slow", .words = {3, 5}, .nwords = 2, .is_harmless = true},
        {.kind = 0, .device = "host", .words = {0, 0}, .nwords = 2, .is_harmless = true},
        {.kind = 0, .device = "none", .words = {0, 0}, .nwords = 2, .is_harmless = true},
        {.kind = 1, .words = {1}, .nwords = 1},
        {.kind = 1, .words = {1, UINT64_MAX, 2}, .nwords = 3},
        {.kind = 1, .words = {1, 0, 2}, .nwords = 3, .is_harmless = true},
        {.kind = 2, .words = {1, 2, 3}, .nwords = 3},
    };
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        run_ranks(send_bad_share, 1, 1, &shares[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_places), cmocka_unit_test(test_announcements),
                                       cmocka_unit_test(test_frames), cmocka_unit_test(test_shares)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
