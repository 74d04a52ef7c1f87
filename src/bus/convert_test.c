/* Tensors that are converted on their way: quantised where they arrive or where they are sent, turned back into
 * numbers; every element against the reference, made from each rank's own part. */
#include "bus/convert_test.h"

#ifdef TB_SLOW_DEVICE /* with TB_CASES as many as one likes */
enum { USUAL_CASES = 10 };
#else
enum { USUAL_CASES = 40 };
#endif

#include <inttypes.h>
#include <math.h>

/* ---- A batch --------------------------------------------------------------------------------------------------- */

typedef struct member {
    tb_pair *pair;
    tb_batch *batch;
    plain plain[MOST_TENSORS];
    store store[MOST_TENSORS];
} member;

static void member_init(rank *r, member *m, const job *j) {
    tb_batch_opts opts = {.size = sizeof opts,
                          .staging_bytes = j->staging_bytes,
                          .group_window = j->group_window,
                          .staged = j->staged,
                          .commit = j->commit};
    int which = !is_a(r);
    check_ok(tb_pair_create(r->world, "p", other_group(r), j->layout[which], NULL, &m->pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &m->batch));
    for (int t = 0; t < j->ntensors; t++) {
        char name[8] = {'t', (char)('0' + t)};
        tb_tensor tensor = {.size = sizeof tensor, .dtype = j->dtype, .ndim = j->shape.ndim};
        memcpy(tensor.shape, j->shape.dim, sizeof tensor.shape);
        tensor.group = j->scale_group ? 3 : (uint32_t)t / 2;
        plain_init(&m->plain[t], j, which, r->index);
        tensor.data = m->plain[t].data;
        if (which == 1) {
            store *s = &m->store[t];
            store_init(s, j, &m->plain[t]);
            tensor.data = s->data;
            tensor.dtype = s->size.data_dtype;
            tensor.encode = t % 2 && j->odd_encode ? j->odd_encode : j->encode;
            tensor.scales = s->scales;
            tensor.scale = s->scale;
            tensor.scale_group = j->scale_group;
        }
        check_ok(tb_batch_add(m->batch, m->pair, name, &tensor));
    }
}

static void member_fini(rank *r, member *m, const job *j) {
    tb_batch_destroy(m->batch);
    tb_pair_destroy(m->pair);
    for (int t = 0; t < j->ntensors; t++) {
        plain_fini(&m->plain[t]);
        if (!is_a(r))
            store_fini(&m->store[t]);
    }
}

static void there(rank *r, member *m, const job *j, uint32_t version, ending *e) {
    for (int t = 0; t < j->ntensors; t++) {
        if (is_a(r))
            plain_fill(&m->plain[t], j, version, t);
        else
            store_poison(&m->store[t]);
    }
    check_ok(tb_reshard_execute(m->batch, "a", NULL, NULL, NULL));
    ending_make(e, j, version);
    for (int t = 0; !is_a(r) && t < j->ntensors; t++)
        check_store(&m->store[t], &e->store[t][r->index]);
    meet(r);
}

/* What b has of the last version goes back to a. */
static void back(rank *r, member *m, const job *j, const ending *e) {
    for (int t = 0; is_a(r) && t < j->ntensors; t++)
        memset(tensor_bytes(m->plain[t].data), 0xa5, (size_t)m->plain[t].count * number_size(j->dtype));
    check_ok(tb_reshard_execute(m->batch, "b", NULL, NULL, NULL));
    for (int t = 0; is_a(r) && t < j->ntensors; t++) {
        const plain *p = &m->plain[t];
        for (int64_t i = 0; i < p->count; i += 1 + p->count / 500)
            check(is_in_ending(e, j, t, p->index[i], number_load(j->dtype, plain_at(p, j, i))));
    }
    meet(r);
}

static void run_job(rank *r) {
    const job *j = r->scene->shared;
    member m;
    ending e;
    member_init(r, &m, j);
    ending_init(&e, j);
    there(r, &m, j, 1, &e);
    there(r, &m, j, 2, &e);
    back(r, &m, j, &e);
    there(r, &m, j, 3, &e);
    ending_fini(&e, j);
    meet(r);
    member_fini(r, &m, j);
}

/* ---- Cases ----------------------------------------------------------------------------------------------------- */

static const char *const layouts[][3] = {{"mesh=1 place=Replicate"},
                                         {"mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", "mesh=2 place=Replicate"},
                                         {"mesh=3 place=Shard(0)", "mesh=3 place=Shard(1)", "mesh=3 place=Replicate"}};

static const char *choose_layout(rng *r, int32_t nseats, int64_t rows) {
    static _Thread_local char text[2][120];
    static _Thread_local int which;
    int64_t kind = rng_range(r, 0, 4), cut = rng_range(r, 0, rows);
    if (nseats != 2 || kind < 3)
        return layouts[nseats - 1][nseats == 1 ? 0 : kind % 3];
    char *out = text[which = !which];
    if (kind == 3)
        snprintf(out, sizeof *text, "mesh=2 place=StridedShard(0,%d)", (int)rng_range(r, 2, 3));
    else
        snprintf(out, sizeof *text, "mesh=2 place=Explicit(0, %d-%d; 0-%d)", (int)cut, (int)rows, (int)rows);
    return out;
}

static void test_random(void **state) {
    (void)state;
    static const char *const encodings[] = {
        "mxfp8",     "mxfp8(swizzled)",         "mxfp8(floor)", "nvfp4",           "fp8_tensor",
        "fp8_block", "fp8_block(power_of_two)", "mxfp8",        "nvfp4(swizzled)", "fp8_tensor(power_of_two)"};
    static const char *const scale_groups[] = {NULL, "w13", "local:w13"};
    uint64_t seed = test_seed();
    int64_t n = test_cases(USUAL_CASES);
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        bool is_block = strncmp(encodings[i % 10], "fp8_block", 9) == 0;
        job j = {.encode = encodings[i % 10],
                 .dtype = (tb_dtype[]){TB_F32, TB_F16, TB_BF16}[rng_range(&r, 0, 2)],
                 .ntensors = (int)rng_range(&r, 1, MOST_TENSORS),
                 .shape = {2, {rng_range(&r, 1, is_block ? 700 : 60), rng_range(&r, 1, 20) * (i % 5 == 3 ? 12 : 6)}},
                 .staging_bytes = (int64_t[]){0, 256 << 10, 2 << 20}[rng_range(&r, 0, 2)],
                 .group_window = (uint32_t)rng_range(&r, 0, 2),
                 .staged = rng_range(&r, 0, 1),
                 .commit = rng_range(&r, 0, 1) ? TB_SHADOW : TB_IN_PLACE,
                 .nseats = {(int32_t)rng_range(&r, 1, 2), (int32_t)rng_range(&r, 1, 3)}};
        bool is_global = strncmp(j.encode, "nvfp4", 5) == 0 || strncmp(j.encode, "fp8_tensor", 10) == 0;
        if (is_global) {
            j.scale_group = scale_groups[rng_range(&r, 0, 2)];
            j.staging_bytes = 0;
        } else if (rng_range(&r, 0, 3) == 0) {
            j.shape = (tb_shape){3, {rng_range(&r, 1, 5), is_block ? 128 : 9, rng_range(&r, 1, 8) * 6}};
        }
        for (int which = 0; which < 2; which++)
            j.layout[which] = choose_layout(&r, j.nseats[which], j.shape.dim[0]);
        if (is_block && j.staging_bytes)
            j.staging_bytes = 2 << 20; /* a band has 128 rows */
        if (strstr(j.layout[1], "Explicit"))
            j.staging_bytes = 0; /* no bands there */
        printf("case %d (seed %" PRIu64 "): %s %s, %s to %s, [%d, %d], %d tensors, staging %d%s%s, scale group %s\n",
               (int)i, seed + (uint64_t)i, j.encode, tb_dtype_name(j.dtype), j.layout[0], j.layout[1],
               (int)j.shape.dim[0], (int)j.shape.dim[1], j.ntensors, (int)j.staging_bytes, j.staged ? ", staged" : "",
               j.commit == TB_SHADOW ? ", shadow" : "", j.scale_group ? j.scale_group : "none");
        run_ranks(run_job, j.nseats[0], j.nseats[1], &j);
    }
}

/* Quantised by the sender, in boxes of whole blocks; at times beside tensors that the receiver quantises. */
static void test_sender(void **state) {
    (void)state;
    static const char *const places[] = {"mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", "mesh=2 place=Replicate"};
    for (int i = 0; i < 18; i++) {
        job j = {.encode = i % 2 ? "mxfp8(sender)" : "mxfp8(sender,swizzled)",
                 .odd_encode = i % 3   ? NULL
                               : i % 2 ? "mxfp8"
                                       : "mxfp8(swizzled)",
                 .dtype = i % 4 < 2 ? TB_BF16 : TB_F32,
                 .ntensors = 3,
                 .shape = {2, {35, 192}},
                 .staging_bytes = i % 5 ? 0 : 64 << 10,
                 .nseats = {2, 2},
                 .layout = {places[i % 3], places[i / 3 % 3]}};
        run_ranks(run_job, 2, 2, &j);
    }
}

/* Experts that are dealt out by a list, band by band; where a row has several places, there are no bands. */
static void test_listed(void **state) {
    (void)state;
    static const char *const encodings[] = {"mxfp8", "fp8_block"};
    for (int i = 0; i < 4; i++) {
        job j = {.encode = encodings[i % 2],
                 .dtype = i / 2 ? TB_BF16 : TB_F32,
                 .ntensors = 2,
                 .shape = {3, {7, 128, 32}},
                 .staging_bytes = 64 << 10,
                 .staged = i / 2,
                 .nseats = {2, 3},
                 .layout = {"mesh=2 place=Shard(0)", "mesh=3 place=Explicit(0, 6-7,1-3; 3-6; 0-1)"}};
        run_ranks(run_job, 2, 3, &j);
    }
}

static void in_two_places(rank *r) {
    job j = {.encode = "mxfp8",
             .dtype = TB_F32,
             .ntensors = 1,
             .shape = {3, {7, 128, 32}},
             .staging_bytes = 64 << 10,
             .staged = true,
             .nseats = {1, 2},
             .layout = {"mesh=1 place=R", "mesh=2 place=Explicit(0, 6-7,1-3; 3-7,0-1)"}};
    member m;
    member_init(r, &m, &j);
    check_fails(tb_batch_register(m.batch, 0), TB_REFUSED, "has to be gathered before it is quantised");
    meet(r);
    member_fini(r, &m, &j);
}

static void test_in_two_places(void **state) {
    (void)state;
    run_ranks(in_two_places, 1, 2, NULL);
}

/* Matrices of 100 rows in a row, which bands of whole blocks of 128 do not fit. */
static void stacked(rank *r) {
    enum { MATRICES = 20, ROWS = 100, COLUMNS = 128 };
    static float numbers[MATRICES * ROWS * COLUMNS], scales[MATRICES];
    static uint8_t data[MATRICES * ROWS * COLUMNS];
    tb_pair *pair;
    tb_batch *batch;
    tb_batch_opts opts = {.size = sizeof opts, .staging_bytes = 512 << 10};
    tb_tensor t = {.size = sizeof t, .data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {MATRICES * ROWS, COLUMNS}};
    if (!is_a(r))
        t = (tb_tensor){.size = sizeof(tb_tensor),
                        .data = data,
                        .dtype = TB_F8E4M3,
                        .ndim = 3,
                        .shape = {MATRICES, ROWS, COLUMNS},
                        .view = "merge(0,1)",
                        .encode = "fp8_block",
                        .scales = scales};
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_fails(
        tb_reshard_execute(batch, "a", NULL, NULL, NULL), TB_REFUSED,
        "tensor 'w' has to be gathered in bands of 128 rows, which end inside the blocks of its matrices of 100");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_stacked(void **state) {
    (void)state;
    run_ranks(stacked, 1, 1, NULL);
}

static void cut_blocks(rank *r) {
    job j = {.encode = "mxfp8(sender)",
             .dtype = TB_BF16,
             .ntensors = 1,
             .shape = {2, {4, 96}},
             .nseats = {2, 2},
             .layout = {"mesh=2 place=Shard(1)", "mesh=2 place=Shard(0)"}};
    static const char words[] = "tensor 't0': a block of 32 elements is cut at column 48 of the target";
    member m;
    tb_transfer *receiving = NULL; /* which begins first: one that comes after a failure would wait for the next */
    member_init(r, &m, &j);
    plain_fill(&m.plain[0], &j, 1, 0);
    check_ok(tb_batch_register(m.batch, 0));
    if (!is_a(r))
        check_ok(tb_recv(m.batch, NULL, &receiving));
    meet(r);
    if (is_a(r))
        check_fails(tb_reshard_execute(m.batch, "a", NULL, NULL, NULL), TB_REFUSED, words);
    else
        check_fails(tb_wait(receiving, TB_ARRIVED, -1), TB_REFUSED, words);
    tb_transfer_destroy(receiving);
    meet(r);
    member_fini(r, &m, &j);
}

static void test_blocks_are_cut(void **state) {
    (void)state;
    run_ranks(cut_blocks, 2, 2, NULL);
}

static void not_finite(rank *r) {
    job j = {.encode = "mxfp8",
             .dtype = TB_F32,
             .ntensors = 2,
             .shape = {2, {8, 32}},
             .nseats = {2, 1},
             .layout = {"mesh=2 place=Shard(0)", "mesh=1 place=Replicate"}};
    member m;
    member_init(r, &m, &j);
    for (int t = 0; t < 2; t++)
        plain_fill(&m.plain[t], &j, 1, t);
    if (is_a(r) && r->index == 1)
        ((float *)tensor_bytes(m.plain[1].data))[33] = NAN;
    check_fails(tb_reshard_execute(m.batch, "a", NULL, NULL, NULL), TB_INVALID, "tensor 't1': ");
    meet(r);
    ending e;
    ending_init(&e, &j);
    there(r, &m, &j, 2, &e); /* and the next one goes well */
    ending_fini(&e, &j);
    meet(r);
    member_fini(r, &m, &j);
}

static void test_not_finite(void **state) {
    (void)state;
    run_ranks(not_finite, 2, 1, NULL);
}

/* A tensor with one scale that does not fit into staging memory: it can't be gathered, but converted in place. */
static void too_large(rank *r) {
    job j = {.encode = "nvfp4",
             .dtype = TB_F32,
             .ntensors = 1,
             .shape = {2, {256, 256}},
             .staging_bytes = 256 << 10,
             .staged = true,
             .nseats = {1, 1},
             .layout = {"mesh=1 place=Replicate", "mesh=1 place=Replicate"}};
    member m;
    member_init(r, &m, &j);
    check_fails(tb_batch_register(m.batch, 0), TB_REFUSED, "has to be gathered before it is quantised");
    meet(r);
    member_fini(r, &m, &j);
#ifndef TB_SLOW_DEVICE /* where both may be on different devices */
    ending e;
    j.staged = false;
    meet(r);
    member_init(r, &m, &j);
    ending_init(&e, &j);
    there(r, &m, &j, 1, &e);
    ending_fini(&e, &j);
    meet(r);
    member_fini(r, &m, &j);
#endif
}

static void test_too_large(void **state) {
    (void)state;
    run_ranks(too_large, 1, 1, NULL);
}

/* q, k and v in one quantised matrix; w1 and w3 of experts in another, with a scale in common per expert. */
static void fused(rank *r) {
    enum { Q = 16, K = 8, HIDDEN = 64 };
    static const struct {
        const char *name, *view;
        int64_t first, rows;
    } parts[] = {{"q", "slice(0,0,16)", 0, Q}, {"k", "slice(0,16,8)", Q, K}, {"v", "slice(0,24,8)", Q + K, K}};
    tb_pair *pair;
    tb_batch *batch;
    float numbers[Q + K + K][HIDDEN];
    uint8_t data[(Q + K + K) / 2 * HIDDEN], scales[(Q + K + K) / 2 * HIDDEN / 32];
    for (int64_t i = 0; i < (Q + K + K) * HIDDEN; i++)
        numbers[i / HIDDEN][i % HIDDEN] = (float)((i * 7919 % 1000) - 500);
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? "mesh=1 place=R" : "mesh=2 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", r->scene->shared, &batch));
    memset(data, 0xa5, sizeof data);
    memset(scales, 0xa5, sizeof scales);
    for (int i = 0; i < 3; i++) {
        tb_tensor t = {.size = sizeof t,
                       .data = numbers[parts[i].first],
                       .dtype = TB_F32,
                       .ndim = 2,
                       .shape = {parts[i].rows, HIDDEN}};
        if (!is_a(r))
            t = (tb_tensor){.size = sizeof(tb_tensor),
                            .data = data,
                            .dtype = TB_F8E4M3,
                            .ndim = 2,
                            .shape = {Q + K + K, HIDDEN},
                            .layout = "mesh=2 place=BlockShard(0,16,8,8)",
                            .view = parts[i].view,
                            .encode = "mxfp8",
                            .scales = scales};
        check_ok(tb_batch_add(batch, pair, parts[i].name, &t));
    }
    check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
    char *dump;
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    check(strstr(dump, is_a(r) ? " sends " : "transform"));
    free(dump);
    if (!is_a(r)) {
        float mine[(Q + K + K) / 2][HIDDEN];
        uint8_t wanted[sizeof data], wanted_scales[sizeof scales];
        memcpy(mine, numbers[r->index * Q / 2], Q / 2 * sizeof *mine);
        memcpy(mine[Q / 2], numbers[Q + r->index * K / 2], K / 2 * sizeof *mine);
        memcpy(mine[Q / 2 + K / 2], numbers[Q + K + r->index * K / 2], K / 2 * sizeof *mine);
        tb__quant_tensor to = {{.kind = TB__QUANT_MXFP8}, (Q + K + K) / 2, HIDDEN, wanted, wanted_scales, 0};
        quantised_make(&to, &(tb__quant_rows){mine, TB_F32, HIDDEN});
        check(memcmp(data, wanted, sizeof data) == 0);
        check(memcmp(scales, wanted_scales, sizeof scales) == 0);
    }
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_fused(void **state) {
    (void)state;
    tb_batch_opts shadow = {.size = sizeof shadow, .commit = TB_SHADOW};
    run_ranks(fused, 1, 2, NULL);
    run_ranks(fused, 1, 2, &shadow);
}

/* On one rank, from one quantised tensor to another. */
static void requantise(rank *r) {
    enum { ROWS = 256, COLUMNS = 128 };
    static float numbers[ROWS * COLUMNS], scales[ROWS / 128 * COLUMNS / 128], wanted_scales[ROWS / 128 * COLUMNS / 128];
    static uint8_t from[ROWS * COLUMNS], from_scales[ROWS * COLUMNS / 32], to[ROWS * COLUMNS], wanted[ROWS * COLUMNS];
    const char *encode = r->scene->shared;
    bool is_tensor = strcmp(encode, "fp8_tensor") == 0;
    float scale = -1, wanted_scale = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++) /* which mxfp8 has exactly */
        numbers[i] = (float)(i * 7919 % 15 - 7) * (i / COLUMNS % 2 ? 1 : 0.25F);
    tb__quant_tensor source = {{.kind = TB__QUANT_MXFP8}, ROWS, COLUMNS, from, from_scales, 0};
    tb__quant_rows rows = {numbers, TB_F32, COLUMNS};
    quantised_make(&source, &rows);
    tb__quant_tensor target = {
        {.kind = is_tensor ? TB__QUANT_FP8_TENSOR : TB__QUANT_FP8_BLOCK}, ROWS, COLUMNS, wanted, wanted_scales, 0};
    check_ok(tb__quant_scale(&(tb__quant_format){.kind = TB__QUANT_FP8_TENSOR}, 7, &wanted_scale));
    target.scale = wanted_scale;
    quantised_make(&target, &rows);
    tb_pair *pairs[2];
    tb_batch *batch;
    tb_pair_opts a = {.size = sizeof a, .group = "a", .no_wait = true}, b = {.size = sizeof b, .group = "b"};
    check_ok(tb_world_enter(r->world, "b", 0, 1));
    check_ok(tb_pair_create(r->world, "p", "b", "mesh=1 place=R", &a, &pairs[0]));
    check_ok(tb_pair_create(r->world, "p", "a", "mesh=1 place=R", &b, &pairs[1]));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    tb_tensor t = {.size = sizeof t, .dtype = TB_F8E4M3, .ndim = 2, .shape = {ROWS, COLUMNS}};
    t.data = from;
    t.encode = "mxfp8";
    t.scales = from_scales;
    check_ok(tb_batch_add(batch, pairs[0], "w", &t));
    t.data = to;
    t.encode = encode;
    t.scales = is_tensor ? NULL : scales;
    t.scale = is_tensor ? &scale : NULL;
    check_ok(tb_batch_add(batch, pairs[1], "w", &t));
    memset(to, 0xa5, sizeof to);
    memset(scales, 0xa5, sizeof scales);
    check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
    check(memcmp(to, wanted, sizeof to) == 0);
    check(!is_tensor || scale == wanted_scale);
    for (size_t i = 0; !is_tensor && i < sizeof scales / sizeof *scales; i++)
        check(scales[i] == wanted_scales[i]);
    tb_batch_destroy(batch);
    tb_pair_destroy(pairs[0]);
    tb_pair_destroy(pairs[1]);
}

static void test_requantise(void **state) {
    (void)state;
    run_ranks(requantise, 1, 0, "fp8_block");
    run_ranks(requantise, 1, 0, "fp8_tensor");
}

/* Two tensors gather together on a rank that has a part of one of them only; the other one's scale is agreed on
 * without it. */
static void apart(rank *r) {
    enum { ROWS = 4, COLUMNS = 32 };
    static const char *const names[] = {"mine", "others"};
    tb_pair *pair;
    tb_batch *batch;
    float numbers[ROWS][COLUMNS], scale[2] = {-1, -1};
    uint8_t data[2][ROWS * COLUMNS];
    for (int64_t i = 0; i < ROWS * COLUMNS; i++)
        numbers[i / COLUMNS][i % COLUMNS] = (float)(i + 1);
    check_ok(tb_pair_create(r->world, "p", other_group(r), is_a(r) ? "mesh=1 place=R" : "mesh=3 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    for (int i = 0; i < 2; i++) {
        tb_tensor t = {.size = sizeof t, .data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
        if (!is_a(r))
            t = (tb_tensor){.size = sizeof(tb_tensor),
                            .data = data[i],
                            .dtype = TB_F8E4M3,
                            .ndim = 2,
                            .shape = {ROWS, COLUMNS},
                            .layout = i == 0 ? "mesh=3 place=R" : "mesh=2 place=S0 ranks=1,2",
                            .encode = "fp8_tensor",
                            .scale = &scale[i],
                            .scale_group = i == 0 ? NULL : "w13"};
        check_ok(tb_batch_add(batch, pair, names[i], &t));
    }
    check_ok(tb_reshard_execute(batch, "a", &(tb_transfer_opts){.size = sizeof(tb_transfer_opts), .timeout_ms = 5000},
                                NULL, NULL));
    check(is_a(r) || scale[0] == ROWS * COLUMNS / 448.0F);
    check(is_a(r) || scale[1] == (r->index == 0 ? -1 : ROWS * COLUMNS / 448.0F));
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_apart(void **state) {
    (void)state;
    run_ranks(apart, 1, 3, NULL);
}

/* What goes with an encoding, and with which. */
static void wrong_tensors(rank *r) {
    static const struct {
        const char *encode, *scale_group, *words;
        bool has_scales;
    } wrong[] = {{NULL, NULL, "it has scales but no encoding", true},
                 {NULL, "w13", "it has scales but no encoding", false},
                 {"mxfp8", "w13", "mxfp8 has no scale that scale group 'w13' could have in common", true},
                 {"fp8_block", "local:w13", "fp8_block has no scale that scale group 'local:w13' could have", true},
                 {"mxfp8", NULL, "its scales are NULL", false},
                 {"fp8_tensor", "w13", "its `scale` is NULL", false}};
    tb_pair *pair;
    tb_batch *batch;
    uint8_t data[4 * 32] = {0}, scales[4] = {0};
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &batch));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tb_tensor t = {.size = sizeof t,
                       .data = data,
                       .dtype = TB_F8E4M3,
                       .ndim = 2,
                       .shape = {4, 32},
                       .encode = wrong[i].encode,
                       .scales = wrong[i].has_scales ? scales : NULL,
                       .scale_group = wrong[i].scale_group};
        check_fails(tb_batch_add(batch, pair, "w", &t), TB_INVALID, wrong[i].words);
    }
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
}

static void test_wrong_tensors(void **state) {
    (void)state;
    run_ranks(wrong_tensors, 1, 1, NULL);
}

int main(void) {
    number_cast(TB_F32, TB_F16, 0); /* these make their lists the first time, which threads must not do at once */
    number_cast(TB_F32, TB_BF16, 0);
    number_cast(TB_F32, TB_F8E4M3, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),        cmocka_unit_test(test_sender),    cmocka_unit_test(test_listed),
        cmocka_unit_test(test_in_two_places), cmocka_unit_test(test_stacked),   cmocka_unit_test(test_blocks_are_cut),
        cmocka_unit_test(test_not_finite),    cmocka_unit_test(test_too_large), cmocka_unit_test(test_fused),
        cmocka_unit_test(test_requantise),    cmocka_unit_test(test_apart),     cmocka_unit_test(test_wrong_tensors),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
