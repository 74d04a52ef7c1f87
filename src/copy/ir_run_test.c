/* IRs that are executed: made by tb_ir_create, read from JSON, of a batch, and built by hand; every element, every step
 * of every bucket, and what is refused. */
#include "bus/bus_test.h"

enum { NRANKS = 4, MOST_BUCKETS = 300 };

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

typedef struct steps {
    int told[MOST_BUCKETS];
    bool is_wrong;
} steps;

static void on_step(void *arg, size_t bucket, tb_bucket_step step) {
    steps *s = arg;
    s->is_wrong |= bucket >= MOST_BUCKETS || s->told[bucket] != (int)step;
    if (!s->is_wrong)
        s->told[bucket]++;
}

static void execute(tb_copy *copy, const tb_ir *ir, const tb_ir_part *parts, bool bus_ranks) {
    steps s = {0};
    tb_ir_execute_opts opts = {.size = sizeof opts, .bus_ranks = bus_ranks, .progress = on_step, .arg = &s};
    check(ir->nbuckets <= MOST_BUCKETS);
    check_ok(tb_ir_execute(copy, ir, parts, &opts));
    check(!s.is_wrong);
    for (size_t i = 0; i < MOST_BUCKETS; i++)
        check(s.told[i] == (i < ir->nbuckets ? TB_BUCKET_FINALISED + 1 : 0));
}

/* ---- Made by tb_ir_create ---------------------------------------------------------------------------------------- */

typedef struct job {
    const char *src, *dst;
    int nparts; /* that are summed up; 0: the source has the values */
    int64_t bucket_size;
    bool staged, by_json;
    bool has_zeros;       /* rank 3's part of a Partial target */
    const int32_t *hosts; /* for the planner: broadcasts are relayed; NULL: not known */
} job;

enum { ROWS = 18, COLUMNS = 10, NTENSORS = 3 };

static float value_at(int64_t row, int64_t column, int tensor, uint32_t version) {
    return (float)(row * COLUMNS + column + tensor * 500 + (int64_t)version * 2000);
}

typedef struct held {
    tb_local local;
    tb_binding binding;
    float *data;
    int64_t count;
} held;

static void hold(held *h, const char *text, int32_t seat) {
    tb_layout *layout;
    tb_shape shape = {2, {ROWS, COLUMNS}};
    check_ok(tb_layout_parse(text, &layout));
    check_ok(tb_layout_local(layout, &shape, seat, &h->local));
    tb_layout_destroy(layout);
    h->local.shape.ndim = 2;
    h->count = h->local.shape.dim[0] * h->local.shape.dim[1];
    check((h->data = tensor_alloc((size_t)h->count * sizeof *h->data + 1)));
    check_ok(tb_binding_contiguous(h->data, 0, TB_F32, &h->local.shape, &h->binding));
}

static void drop(held *h) {
    tb_local_fini(&h->local);
    tensor_free(h->data);
}

static float held_value(const held *h, int64_t i, int tensor, uint32_t version) {
    int64_t width = h->local.shape.dim[1];
    return value_at(global_index(&h->local, 0, i / width), global_index(&h->local, 1, i % width), tensor, version);
}

static tb_ir *make_ir(const job *j, int32_t seat) {
    static const char *const names[NTENSORS] = {"a", "b", "c"};
    tb_layout *src, *dst;
    tb_tensor_spec specs[NTENSORS];
    tb_plan_opts plan = {.size = sizeof plan, .hosts = j->hosts, .nhosts = j->hosts ? NRANKS : 0};
    tb_ir_opts opts = {.size = sizeof opts, .bucket_size = j->bucket_size, .plan = &plan};
    tb_ir *ir;
    check_ok(tb_layout_parse(j->src, &src));
    check_ok(tb_layout_parse(j->dst, &dst));
    for (int i = 0; i < NTENSORS; i++)
        specs[i] = (tb_tensor_spec){.size = sizeof specs[i],
                                    .name = names[i],
                                    .shape = {2, {ROWS, COLUMNS}},
                                    .src = src,
                                    .dst = dst,
                                    .src_dtype = TB_F32,
                                    .dst_dtype = TB_F32};
    check_ok(tb_ir_create(seat, specs, NTENSORS, NULL, &opts, &ir));
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    if (j->by_json) {
        char *text;
        check_ok(tb_ir_dump_json(ir, &text));
        tb_ir_destroy(ir);
        check_ok(tb_ir_parse_json(text, strlen(text), &ir));
        free(text);
    }
    return ir;
}

static void run_job(rank *r) {
    const job *j = r->scene->shared;
    tb_copy *copy;
    held from[NTENSORS], to[NTENSORS];
    tb_ir_part parts[NTENSORS];
    check_ok(
        tb_copy_open(r->world, "c", NULL, &(tb_copy_opts){.size = sizeof(tb_copy_opts), .staged = j->staged}, &copy));
    tb_ir *ir = make_ir(j, r->index);
    for (int t = 0; t < NTENSORS; t++) {
        hold(&from[t], j->src, r->index);
        hold(&to[t], j->dst, r->index);
        parts[t] = (tb_ir_part){.size = sizeof parts[t],
                                .src = from[t].count ? &from[t].binding : NULL,
                                .dst = to[t].count ? &to[t].binding : NULL};
    }
    for (uint32_t version = 1; version <= 2; version++) {
        for (int t = 0; t < NTENSORS; t++) {
            for (int64_t i = 0; i < from[t].count; i++)
                ((float *)tensor_bytes(from[t].data))[i] =
                    held_value(&from[t], i, t, version) + (j->nparts ? (float)r->index * 10000 : 0);
            for (int64_t i = 0; i < to[t].count; i++)
                ((float *)tensor_bytes(to[t].data))[i] = -1;
        }
        meet(r);
        execute(copy, ir, parts, false);
        for (int t = 0; t < NTENSORS; t++) {
            for (int64_t i = 0; i < to[t].count; i++) {
                float wanted = held_value(&to[t], i, t, version);
                if (j->nparts) /* of ranks 0, 1, ... */
                    wanted = wanted * (float)j->nparts + 5000 * (float)(j->nparts * (j->nparts - 1));
                if (j->has_zeros && r->index == 3)
                    wanted = 0;
                check(((float *)tensor_bytes(to[t].data))[i] == wanted);
            }
        }
        meet(r);
    }
    tb_ir_destroy(ir);
    for (int t = 0; t < NTENSORS; t++) {
        drop(&from[t]);
        drop(&to[t]);
    }
    tb_copy_close(copy);
}

static void test_created(void **state) {
    (void)state;
    static const char *const layouts[][2] = {
        {"mesh=4 place=S0", "mesh=4 place=S1"},
        {"mesh=2 place=S1", "mesh=2 place=S0 ranks=2,3"},
        {"mesh=1 place=R", "mesh=4 place=R"},
        {"mesh=2,2 place=R,S0", "mesh=4 place=S1 ranks=3,0,2,1"},
        {"mesh=4 place=R", "mesh=3 place=S0 ranks=3,1,0"},
        {"mesh=3 place=P", "mesh=4 place=S0"},
        {"mesh=4 place=P", "mesh=2 place=R ranks=1,2"},
        {"mesh=2 place=P", "mesh=1 place=R ranks=3"},
        {"mesh=2 place=S0", "mesh=2 place=P ranks=2,3"},
    };
    static const int nparts[] = {0, 0, 0, 0, 0, 3, 4, 2, 0};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        for (int k = 0; k < 4; k++) {
            job j = {.src = layouts[i][0],
                     .dst = layouts[i][1],
                     .nparts = nparts[i],
                     .bucket_size = k % 2 ? 1 : 0, /* chunk by chunk, or in buckets */
                     .staged = k / 2,
                     .has_zeros = i == 8,
                     .by_json = (k + (int)i) % 2};
            run_ranks(run_job, NRANKS, 0, &j);
        }
    }
}

/* Over ucx, each rank or two on a machine; where the planner knows that, machines relay to each other. */
static void test_between_machines(void **state) {
    (void)state;
    static const char *const apart[] = {"w", "x", "y", "z"}, *const two[] = {"w", "x", "x", "y"};
    static const int32_t apart_hosts[] = {0, 1, 2, 3}, two_hosts[] = {0, 1, 1, 2};
    static const job jobs[] = {
        {.src = "mesh=4 place=S0", .dst = "mesh=4 place=S1"},
        {.src = "mesh=1 place=R", .dst = "mesh=4 place=R", .bucket_size = 1},
        {.src = "mesh=1 place=R", .dst = "mesh=4 place=R", .hosts = apart_hosts},
        {.src = "mesh=1 place=R", .dst = "mesh=4 place=R", .hosts = apart_hosts, .bucket_size = 1, .by_json = true},
        {.src = "mesh=1 place=R", .dst = "mesh=3 place=R ranks=1..3", .hosts = two_hosts},
        {.src = "mesh=3 place=P", .dst = "mesh=4 place=R", .nparts = 3, .hosts = two_hosts},
        {.src = "mesh=4 place=P", .dst = "mesh=2 place=R ranks=1,2", .nparts = 4, .bucket_size = 1},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof *jobs; i++) {
        scene s;
        scene_init(&s);
        s.hosts = jobs[i].hosts == two_hosts ? two : apart;
        run_ranks_in(&s, run_job, NRANKS, 0, &jobs[i]);
    }
    tb_ir *ir = make_ir(&jobs[2], 0);
    bool is_relayed = false;
    for (size_t i = 0; i < ir->nchannels; i++)
        is_relayed |= ir->channels[i].via != NULL;
    check(is_relayed);
    tb_ir_destroy(ir);
}

/* ---- Of a batch -------------------------------------------------------------------------------------------------- */

static void of_batch(rank *r) {
    setup s;
    tb_ir *ir;
    tb_copy *copy;
    tb_binding mine;
    set_up(r, &s, "mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", 40, 40, NULL);
    check_ok(tb_world_enter(r->world, "all", is_a(r) ? r->index : 2 + r->index, 4));
    check_ok(tb_copy_open(r->world, "c", "all", NULL, &copy));
    check_ok(tb_batch_ir(s.batch, is_a(r), &ir));
    check_ok(tb_binding_contiguous(s.w.data, 0, TB_U32, &s.w.local.shape, &mine));
    tb_ir_part parts = {.size = sizeof parts, .src = is_a(r) ? &mine : NULL, .dst = is_a(r) ? NULL : &mine};
    for (uint32_t version = 1; version <= 2; version++) {
        if (is_a(r))
            part_fill(&s.w, version);
        else
            part_poison(&s.w);
        execute(copy, ir, &parts, true);
        check(part_holds(&s.w, version));
        meet(r);
    }
    tb_ir_destroy(ir);
    tb_copy_close(copy);
    tear_down(&s);
}

static void test_of_batch(void **state) {
    (void)state;
    run_ranks(of_batch, 2, 2, NULL);
}

/* ---- By hand ----------------------------------------------------------------------------------------------------- */

/* Four tensors of 8 floats: "copied", which rank 0 copies to itself; "cycle", which goes from 0 to 1 to 2 to 0, from
 * and to the same memory; "reduced", which ranks 0 and 2 add up, of which only 0 ships it, to 1; and "shared", which
 * rank 0 both keeps, in a chunk of its own, and broadcasts. Two chunks each, in one bucket or in two. */
enum { N = 8, NHAND = 4, MOST_CHUNKS = 12 };

typedef struct hand {
    tb_ir ir;
    tb_chunk chunks[MOST_CHUNKS];
    tb_bucket_entry entries[MOST_CHUNKS];
    tb_bucket buckets[MOST_CHUNKS];
    tb_channel channels[MOST_CHUNKS];
    bool is_in_buckets;
} hand;

static const char *const hand_names[NHAND] = {"copied", "cycle", "reduced", "shared"};

static void add_hand_chunk(hand *h, const tb_chunk *key, uint64_t id, int half) {
    size_t at = h->ir.nchunks++;
    tb_bucket *b = half && h->is_in_buckets ? &h->buckets[h->ir.nbuckets - 1] : &h->buckets[h->ir.nbuckets++];
    tb_chunk *c = &h->chunks[at];
    *c = *key;
    c->id = id * 2 + (uint64_t)half;
    c->ndim = 1;
    c->len[0] = N / 2;
    c->src.start[0] = c->dst.start[0] = half * N / 2;
    c->src_dtype = c->wire_dtype = TB_F32;
    c->nbytes = N / 2 * 4;
    c->divisor = 1;
    if (b->nentries == 0) {
        b->channel = h->ir.nchannels - 1;
        b->first_entry = at;
        h->channels[b->channel].nbuckets++;
    }
    h->entries[at] = (tb_bucket_entry){.chunk = at, .offset = b->nentries * 64, .nbytes = c->nbytes};
    b->total_bytes = h->entries[at].offset + c->nbytes;
    b->nentries++;
}

static void add_hand_channel(hand *h, tb_chunk key, uint64_t id) {
    h->channels[h->ir.nchannels++] = (tb_channel){.first_bucket = h->ir.nbuckets, .max_in_flight = 2};
    for (int half = 0; half < 2; half++)
        add_hand_chunk(h, &key, id, half);
}

static void make_hand(hand *h, int32_t seat, bool is_in_buckets) {
    static const int32_t ranks[] = {0, 1, 2}, ends[] = {0, 2}, others[] = {1, 2};
    *h = (hand){.is_in_buckets = is_in_buckets};
    h->ir = (tb_ir){.rank = seat,
                    .bucket_size = 1,
                    .ntensors = NHAND,
                    .names = hand_names,
                    .chunks = h->chunks,
                    .entries = h->entries,
                    .buckets = h->buckets,
                    .channels = h->channels};
    if (seat == 0)
        add_hand_channel(
            h, (tb_chunk){.mode = TB_LOCAL, .is_source = true, .is_target = true, .ntargets = 1, .targets = ranks}, 1);
    for (int32_t s = 0; s < 3; s++) {
        int32_t t = (s + 1) % 3;
        if (seat == s || seat == t)
            add_hand_channel(h,
                             (tb_chunk){.mode = TB_P2P,
                                        .is_source = seat == s,
                                        .is_target = seat == t,
                                        .tensor = 1,
                                        .source = s,
                                        .ntargets = 1,
                                        .targets = &ranks[t]},
                             10 + (uint64_t)s);
    }
    if (seat < 3)
        add_hand_channel(h,
                         (tb_chunk){.mode = seat == 2 ? TB_NONE : TB_P2P,
                                    .is_source = seat != 1,
                                    .is_target = seat == 1,
                                    .tensor = 2,
                                    .ntargets = 1,
                                    .targets = &ranks[1],
                                    .ncontributors = 2,
                                    .contributors = ends},
                         20);
    if (seat == 0)
        add_hand_channel(
            h,
            (tb_chunk){
                .mode = TB_LOCAL, .is_source = true, .is_target = true, .tensor = 3, .ntargets = 1, .targets = ranks},
            30);
    if (seat < 3)
        add_hand_channel(h,
                         (tb_chunk){.mode = TB_BROADCAST,
                                    .is_source = seat == 0,
                                    .is_target = seat != 0,
                                    .tensor = 3,
                                    .ntargets = 2,
                                    .targets = others},
                         40);
    h->ir.nentries = h->ir.nchunks;
}

typedef struct hand_memory {
    float *src[NHAND], *dst[NHAND];
    tb_binding bindings[NHAND][2];
    tb_ir_part parts[NHAND];
} hand_memory;

static void hand_init(hand_memory *m) {
    tb_shape shape = {1, {N}};
    for (int t = 0; t < NHAND; t++) {
        check((m->src[t] = tensor_alloc(N * sizeof(float))));
        check((m->dst[t] = t == 1 ? m->src[t] : tensor_alloc(N * sizeof(float))));
        check_ok(tb_binding_contiguous(m->src[t], 0, TB_F32, &shape, &m->bindings[t][0]));
        check_ok(tb_binding_contiguous(m->dst[t], 0, TB_F32, &shape, &m->bindings[t][1]));
        m->parts[t] = (tb_ir_part){.size = sizeof m->parts[t], .src = &m->bindings[t][0], .dst = &m->bindings[t][1]};
    }
}

static float hand_value(int t, int32_t seat, int i, uint32_t version) {
    return (float)(t * 1000 + seat * 100 + i) + (float)version * 10000;
}

static void hand_fill(const hand_memory *m, int32_t seat, uint32_t version) {
    for (int t = 0; t < NHAND; t++) {
        for (int i = 0; i < N; i++) {
            ((float *)tensor_bytes(m->dst[t]))[i] = -1;
            ((float *)tensor_bytes(m->src[t]))[i] = hand_value(t, seat, i, version);
        }
    }
}

/* `is_done`: else nothing was written. */
static void hand_check(const hand_memory *m, int32_t seat, uint32_t version, bool is_done) {
    for (int i = 0; i < N; i++) {
        const float got[NHAND] = {((float *)tensor_bytes(m->dst[0]))[i], ((float *)tensor_bytes(m->dst[1]))[i],
                                  ((float *)tensor_bytes(m->dst[2]))[i], ((float *)tensor_bytes(m->dst[3]))[i]};
        bool has_cycle = is_done && seat < 3;
        check(got[0] == (is_done && seat == 0 ? hand_value(0, 0, i, version) : -1));
        check(got[1] == hand_value(1, has_cycle ? (seat + 2) % 3 : seat, i, version));
        check(got[2] == (is_done && seat == 1 ? hand_value(2, 0, i, version) + hand_value(2, 2, i, version) : -1));
        check(got[3] == (is_done && seat < 3 ? hand_value(3, 0, i, version) : -1));
    }
}

static void hand_fini(hand_memory *m) {
    for (int t = 0; t < NHAND; t++) {
        tensor_free(m->src[t]);
        if (t != 1)
            tensor_free(m->dst[t]);
    }
}

static void by_hand(rank *r) {
    const job *j = r->scene->shared;
    tb_copy *copy;
    hand h;
    hand_memory m;
    hand_init(&m);
    make_hand(&h, r->index, j->bucket_size > 1);
    check_ok(
        tb_copy_open(r->world, "c", NULL, &(tb_copy_opts){.size = sizeof(tb_copy_opts), .staged = j->staged}, &copy));
    for (uint32_t version = 1; version <= 3; version++) {
        hand_fill(&m, r->index, version);
        meet(r);
        execute(copy, &h.ir, m.parts, false);
        hand_check(&m, r->index, version, true);
        meet(r);
    }
    tb_copy_close(copy);
    hand_fini(&m);
}

static void test_by_hand(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++)
        run_ranks(by_hand, NRANKS, 0, &(job){.bucket_size = k % 2 ? 1 : 1000, .staged = k / 2});
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

typedef struct mistake {
    const char *what;
    tb_status status;
    const char *words;
} mistake;

static void make_mistake(const rank *r, hand *h, hand_memory *m, const char *what) {
    static const int32_t far[] = {9}, twice[] = {1, 1};
    static const char *const other_names[NHAND] = {"copied", "cycle", "reduced", "spared"};
    if (r->index == 1 && strcmp(what, "names") == 0)
        h->ir.names = other_names;
    if (r->index != 0)
        return;
    if (strcmp(what, "offset") == 0)
        h->entries[1].offset = 8;
    if (strcmp(what, "size") == 0)
        h->chunks[0].nbytes = h->entries[0].nbytes = 12;
    if (strcmp(what, "box") == 0)
        h->chunks[1].dst.start[0]++;
    if (strcmp(what, "negative") == 0)
        h->chunks[1].src.start[0] = -1;
    if (strcmp(what, "peer") == 0)
        h->chunks[2].targets = h->chunks[3].targets = far;
    if (strcmp(what, "twice") == 0)
        h->chunks[h->ir.nchunks - 1].targets = h->chunks[h->ir.nchunks - 2].targets = twice;
    if (strcmp(what, "id") == 0)
        h->chunks[3].id = h->chunks[0].id;
    if (strcmp(what, "hash") == 0)
        h->chunks[3].id = 99;
    if (strcmp(what, "role") == 0)
        h->chunks[0].is_target = h->chunks[1].is_target = false;
    if (strcmp(what, "chunk") == 0)
        h->entries[1].chunk = 1000;
    if (strcmp(what, "again") == 0)
        h->entries[1].chunk = 0;
    if (strcmp(what, "overlap") == 0)
        h->chunks[1].dst.start[0] = 0;
    if (strcmp(what, "part") == 0)
        m->parts[0].dst = NULL;
    if (strcmp(what, "whose") == 0)
        make_hand(h, 1, true);
    if (strcmp(what, "rank") == 0)
        h->ir.rank = 1;
    if (strcmp(what, "dtype") == 0)
        m->bindings[0][0].dtype = TB_F16;
    if (strcmp(what, "bucket") == 0)
        h->buckets[1].first_entry++;
}

static void mistaken(rank *r) {
    const mistake *k = r->scene->shared;
    tb_copy *copy;
    hand h;
    hand_memory m;
    hand_init(&m);
    hand_fill(&m, r->index, 1);
    make_hand(&h, r->index, true);
    make_mistake(r, &h, &m, k->what);
    check_ok(tb_copy_open(r->world, "c", NULL, NULL, &copy));
    if (strcmp(k->what, "operations") == 0 && r->index == 2)
        check_fails(tb_copy_run(copy, 0), k->status, k->words);
    else if (strcmp(k->what, "late") != 0)
        check_fails(tb_ir_execute(copy, &h.ir, m.parts, NULL), k->status, k->words);
    else if (r->index != 3)
        check_fails(tb_ir_execute(copy, &h.ir, m.parts,
                                  &(tb_ir_execute_opts){.size = sizeof(tb_ir_execute_opts), .timeout_ms = SOON_MS}),
                    k->status, k->words);
    hand_check(&m, r->index, 1, false);
    meet(r);
    hand_fini(&m);
    hand_init(&m);
    make_hand(&h, r->index, true);
    hand_fill(&m, r->index, 2);
    meet(r);
    execute(copy, &h.ir, m.parts, false);
    hand_check(&m, r->index, 2, true);
    meet(r);
    tb_copy_close(copy);
    hand_fini(&m);
}

static void test_mistakes(void **state) {
    (void)state;
    static const mistake all[] = {
        {"offset", TB_INVALID, "(a 0): channel 0: bucket 0: chunk 1: 16 bytes at offset 8 of its bucket"},
        {"size", TB_INVALID, "chunk 0: it has 12 bytes, and its shape 16"},
        {"box", TB_INVALID, "chunk 1, of tensor 'copied': indices 5 to 9 of dim 0 are not in its target, which has 8"},
        {"negative", TB_INVALID, "chunk 1: its box is out of range in dim 0"},
        {"peer", TB_INVALID, "there is no rank 9 in the group"},
        {"twice", TB_INVALID, "rank 1 of its targets is invalid, or listed twice"},
        {"id", TB_INVALID, "two chunks have id 0000000000000002 part 0"},
        {"hash", TB_CONFLICT, "have different chunks or buckets for each other"},
        {"names", TB_CONFLICT, "have different chunks or buckets for each other"},
        {"role", TB_INVALID, "LOCAL, is_source 1 and is_target 0 are not the role of rank 0"},
        {"chunk", TB_INVALID, "entry 1 has chunk 1000, which does not exist, or is in a bucket already"},
        {"again", TB_INVALID, "entry 1 has chunk 0, which does not exist, or is in a bucket already"},
        {"overlap", TB_INVALID, "two of its chunks would be written to the same memory"},
        {"part", TB_INVALID, "chunk 0, of tensor 'copied': it has no target, or one of other dims"},
        {"rank", TB_INVALID, "channel 0: rank 1 has no part in it"},
        {"whose", TB_INVALID, "(a 0): it is the IR of rank 1"},
        {"dtype", TB_INVALID, "its source is f16, not f32"},
        {"bucket", TB_INVALID, "bucket 1: channel 1, group 0, entries 3 to 5"},
        {"operations", TB_CONFLICT, "executes an IR, and the other one runs operations"},
        {"late", TB_TIMEOUT, "(a 3) has not come to run 1"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        run_ranks(mistaken, NRANKS, 0, &all[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_created), cmocka_unit_test(test_between_machines), cmocka_unit_test(test_of_batch),
        cmocka_unit_test(test_by_hand), cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests_name("ir run", tests, NULL, NULL);
}
