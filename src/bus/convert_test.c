/* Tensors that are converted on their way: quantised where they arrive or where they are sent, turned back into
 * numbers, and through transforms of the user's; every element against the reference, made from each rank's own part.
 */
#include "bus/bus_test.h"

#include "reshard/encode.h"

#include "../tests/support/quantised.h"

#include <inttypes.h>
#include <math.h>

enum { MOST_TENSORS = 5, MOST_SEATS = 3 };

/* One batch: tensors of one kind, from group a, which has numbers, to group b, which has them quantised, and back. */
typedef struct job {
    const char *encode, *scale_group, *layout[2];
    tb_dtype dtype;
    int ntensors;
    tb_shape shape;
    int64_t staging_bytes;
    uint32_t group_window;
    bool staged;
    tb_commit commit;
    int32_t nseats[2];
} job;

/* ---- What is expected ------------------------------------------------------------------------------------------ */

/* A value of the tensor, as bits of its dtype. */
static uint64_t value_of(const job *j, uint32_t version, int tensor, int64_t index) {
    uint64_t h = (uint64_t)index * 0x9e3779b97f4a7c15U + version * 0x2545f4914f6cdd1dU + (uint64_t)tensor * 77777;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9U;
    h ^= h >> 32;
    float f = (float)((int)(h % 2001) - 1000) * ldexpf(1, (int)(h >> 20 & 7) - 9);
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return number_cast(TB_F32, j->dtype, bits);
}

/* What a seat holds of a tensor, in numbers. */
typedef struct plain {
    tb_local local;
    int64_t count, columns, rows, matrix_rows;
    int64_t *index; /* global, of each element */
    uint8_t *data;
} plain;

static void plain_init(plain *p, const job *j, int which, int32_t seat) {
    tb_layout *layout;
    check_ok(tb_layout_parse(j->layout[which], &layout));
    check_ok(tb_layout_local(layout, &j->shape, seat, &p->local));
    tb_layout_destroy(layout);
    p->count = 1;
    for (int d = 0; d < j->shape.ndim; d++)
        p->count *= p->local.shape.dim[d];
    p->columns = p->local.shape.dim[j->shape.ndim - 1];
    p->rows = p->columns ? p->count / p->columns : 0;
    p->matrix_rows = j->shape.ndim > 1 ? p->local.shape.dim[j->shape.ndim - 2] : 1;
    p->index = malloc((size_t)p->count * sizeof *p->index + 1);
    check_ok(tb_alloc((size_t)p->count * number_size(j->dtype), (void **)&p->data));
    for (int64_t i = 0; i < p->count; i++) {
        int64_t rest = i, at = 0, step = 1;
        for (int d = j->shape.ndim; d-- > 0;) {
            int64_t n = p->local.shape.dim[d];
            at += global_index(&p->local, d, rest % n) * step;
            step *= j->shape.dim[d];
            rest /= n;
        }
        p->index[i] = at;
    }
}

static void plain_fill(plain *p, const job *j, uint32_t version, int tensor) {
    for (int64_t i = 0; i < p->count; i++)
        number_store(j->dtype, p->data + (size_t)i * number_size(j->dtype), value_of(j, version, tensor, p->index[i]));
}

static void plain_fini(plain *p) {
    tb_local_fini(&p->local);
    free(p->index);
    tb_free(p->data);
}

/* Quantised storage: matrices one after the other. */
typedef struct store {
    tb__quant_format format;
    int64_t nmatrices, rows, columns;
    tb__quant_size size;
    uint8_t *data, *scales;
    float scale;
} store;

static void store_init(store *s, const job *j, const plain *p) {
    tb__encoding e;
    check_ok(tb__encoding_parse(j->encode, &e));
    *s = (store){.format = e.format, .rows = p->matrix_rows, .columns = p->columns};
    s->nmatrices = p->matrix_rows ? p->rows / p->matrix_rows : 0;
    check_ok(tb__quant_measure(&s->format, s->rows, s->columns, &s->size));
    s->data = malloc((size_t)(s->nmatrices * s->size.data_nbytes) + 1);
    s->scales = malloc((size_t)(s->nmatrices * s->size.scale_nbytes) + 1);
}

static void store_poison(store *s) {
    memset(s->data, 0xa5, (size_t)(s->nmatrices * s->size.data_nbytes));
    memset(s->scales, 0xa5, (size_t)(s->nmatrices * s->size.scale_nbytes));
    s->scale = -1;
}

static void store_fini(store *s) {
    free(s->data);
    free(s->scales);
}

static tb__quant_tensor matrix_of(const store *s, int64_t m) {
    return (tb__quant_tensor){
        s->format, s->rows, s->columns, s->data + m * s->size.data_nbytes, s->scales + m * s->size.scale_nbytes,
        s->scale};
}

static float amax_of(const job *j, const plain *p) {
    float most = 0;
    for (int64_t i = 0; i < p->count; i++) {
        float f =
            (float)fabs(number_value(j->dtype, number_load(j->dtype, p->data + (size_t)i * number_size(j->dtype))));
        most = f > most ? f : most;
    }
    return most;
}

/* What all seats of group b have of a version in the end, worked out by one thread alone. */
typedef struct ending {
    plain plain[MOST_TENSORS][MOST_SEATS];
    store store[MOST_TENSORS][MOST_SEATS];
} ending;

static void ending_init(ending *e, const job *j) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            plain_init(&e->plain[t][seat], j, 1, seat);
            store_init(&e->store[t][seat], j, &e->plain[t][seat]);
        }
    }
}

static void ending_fini(ending *e, const job *j) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            plain_fini(&e->plain[t][seat]);
            store_fini(&e->store[t][seat]);
        }
    }
}

/* Whether two parts have their scale in common. */
static bool shares(const job *j, bool is_same_tensor, bool is_same_seat) {
    if (!j->scale_group)
        return is_same_tensor && is_same_seat;
    return strncmp(j->scale_group, "local:", 6) != 0 || is_same_seat;
}

static void ending_make(ending *e, const job *j, uint32_t version) {
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++)
            plain_fill(&e->plain[t][seat], j, version, t);
    }
    for (int t = 0; t < j->ntensors; t++) {
        for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
            store *s = &e->store[t][seat];
            float amax = 0;
            for (int u = 0; u < j->ntensors; u++) {
                for (int32_t k = 0; k < j->nseats[1]; k++) {
                    float one = shares(j, u == t, k == seat) ? amax_of(j, &e->plain[u][k]) : 0;
                    amax = one > amax ? one : amax;
                }
            }
            store_poison(s);
            if (s->format.kind == TB__QUANT_FP8_TENSOR || s->format.kind == TB__QUANT_NVFP4)
                check_ok(tb__quant_scale(&s->format, amax, &s->scale));
            for (int64_t m = 0; m < s->nmatrices; m++) {
                tb__quant_tensor to = matrix_of(s, m);
                int64_t skip = m * s->rows * s->columns;
                quantised_make(&to, &(tb__quant_rows){e->plain[t][seat].data + (size_t)skip * number_size(j->dtype),
                                                      j->dtype, s->columns});
            }
        }
    }
}

static void check_store(const store *got, const store *wanted) {
    check(memcmp(got->data, wanted->data, (size_t)(got->nmatrices * got->size.data_nbytes)) == 0);
    check(memcmp(got->scales, wanted->scales, (size_t)(got->nmatrices * got->size.scale_nbytes)) == 0);
    check(got->nmatrices == 0 || got->scale == wanted->scale);
}

/* Some seat of b has that element with that value. */
static bool is_in_ending(const ending *e, const job *j, int tensor, int64_t index, uint64_t bits) {
    for (int32_t seat = 0; seat < j->nseats[1]; seat++) {
        const plain *p = &e->plain[tensor][seat];
        const store *s = &e->store[tensor][seat];
        for (int64_t i = 0; i < p->count; i++) {
            if (p->index[i] != index)
                continue;
            int64_t row = i / p->columns;
            tb__quant_tensor m = matrix_of(s, row / s->rows);
            if (quantised_value(&m, row % s->rows, i % p->columns, j->dtype) == bits)
                return true;
        }
    }
    return false;
}

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
        tb_tensor tensor = {.dtype = j->dtype, .ndim = j->shape.ndim};
        memcpy(tensor.shape, j->shape.dim, sizeof tensor.shape);
        tensor.group = j->scale_group ? 3 : (uint32_t)t / 2;
        plain_init(&m->plain[t], j, which, r->index);
        tensor.data = m->plain[t].data;
        if (which == 1) {
            store *s = &m->store[t];
            store_init(s, j, &m->plain[t]);
            tensor.data = s->data;
            tensor.dtype = s->size.data_dtype;
            tensor.encode = j->encode;
            tensor.scales = s->scales;
            tensor.scale = &s->scale;
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
        memset(m->plain[t].data, 0xa5, (size_t)m->plain[t].count * number_size(j->dtype));
    check_ok(tb_reshard_execute(m->batch, "b", NULL, NULL, NULL));
    for (int t = 0; is_a(r) && t < j->ntensors; t++) {
        const plain *p = &m->plain[t];
        for (int64_t i = 0; i < p->count; i += 1 + p->count / 500)
            check(
                is_in_ending(e, j, t, p->index[i], number_load(j->dtype, p->data + (size_t)i * number_size(j->dtype))));
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
    int64_t n = test_cases(40);
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

/* Quantised by the sender, in boxes of whole blocks. */
static void test_sender(void **state) {
    (void)state;
    static const char *const places[] = {"mesh=2 place=Shard(0)", "mesh=2 place=Shard(1)", "mesh=2 place=Replicate"};
    for (int i = 0; i < 18; i++) {
        job j = {.encode = i % 2 ? "mxfp8(sender)" : "mxfp8(sender,swizzled)",
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
    tb_tensor t = {.data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {MATRICES * ROWS, COLUMNS}};
    if (!is_a(r))
        t = (tb_tensor){.data = data,
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
        ((float *)(void *)m.plain[1].data)[33] = NAN;
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

/* A tensor with one scale that does not fit. */
static void too_large(rank *r) {
    job j = {.encode = "nvfp4",
             .dtype = TB_F32,
             .ntensors = 1,
             .shape = {2, {256, 256}},
             .staging_bytes = 256 << 10,
             .nseats = {1, 1},
             .layout = {"mesh=1 place=Replicate", "mesh=1 place=Replicate"}};
    member m;
    member_init(r, &m, &j);
    check_fails(tb_batch_register(m.batch, 0), TB_REFUSED, "has to be gathered before it is quantised");
    meet(r);
    member_fini(r, &m, &j);
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
        tb_tensor t = {.data = numbers[parts[i].first], .dtype = TB_F32, .ndim = 2, .shape = {parts[i].rows, HIDDEN}};
        if (!is_a(r))
            t = (tb_tensor){.data = data,
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
        tb_tensor t = {.data = numbers, .dtype = TB_F32, .ndim = 2, .shape = {ROWS, COLUMNS}};
        if (!is_a(r))
            t = (tb_tensor){.data = data[i],
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
        tb_tensor t = {.data = data,
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

/* ---- The user's own -------------------------------------------------------------------------------------------- */

enum { SIDE = 12 };

static bool takes_w(void *arg, const char *name) {
    (void)arg;
    return name[0] == 'w';
}

static int64_t count_elements(const tb_transform_piece *piece) {
    int64_t n = 1;
    for (int d = 0; d < piece->ndim; d++)
        n *= piece->shape[d];
    return n;
}

/* Every number takes one byte more than it has, and the wire ends with the sum of what is on it. */
static int64_t wire_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 5 + 4;
}

static uint32_t *element_of(const tb_binding *box, int64_t i) {
    int64_t at = 0;
    for (int d = box->shape.ndim; d-- > 0; i /= box->shape.dim[d])
        at += i % box->shape.dim[d] * box->strides[d];
    return (uint32_t *)(void *)((char *)box->base + box->offset) + at;
}

static tb_status to_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, void *wire) {
    unsigned char *out = wire;
    uint32_t sum = 0;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x = *element_of(box, i) ^ 0x5a5a5a5a;
        out[5 * i] = 17;
        memcpy(out + 5 * i + 1, &x, sizeof x);
        sum += x;
    }
    memcpy(out + 5 * count_elements(piece), &sum, sizeof sum);
    return TB_OK;
}

static tb_status from_wire(void *arg, const tb_transform_piece *piece, const tb_binding *box, const void *wire) {
    const unsigned char *in = wire;
    uint32_t sum = 0, expected;
    ++*(_Atomic int *)arg;
    for (int64_t i = 0; i < count_elements(piece); i++) {
        uint32_t x;
        memcpy(&x, in + 5 * i + 1, sizeof x);
        if (in[5 * i] != 17)
            return tb_error_set(TB_INVALID, "a byte is wrong");
        *element_of(box, i) = x ^ 0x5a5a5a5a;
        sum += x;
    }
    memcpy(&expected, in + 5 * count_elements(piece), sizeof expected);
    return sum == expected ? TB_OK : tb_error_set(TB_INVALID, "a sum is wrong");
}

static void transform(rank *r) {
    _Atomic int calls = 0;
    tb_transform own = {.arg = &calls,
                        .should_transform = takes_w,
                        .prepare_recv = wire_size,
                        .prepare_send = to_wire,
                        .finalize_recv = from_wire};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    const char *layout = is_a(r) ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    part parts[2];
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        part_init(&parts[i], layout, r->index, SIDE, SIDE);
        tb_tensor t = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, i ? "w" : "bias", &t));
    }
    for (uint32_t version = 1; version <= 3; version++) {
        for (int i = 0; i < 2; i++) {
            if (is_a(r))
                part_fill(&parts[i], version);
            else
                part_poison(&parts[i]);
        }
        check_ok(tb_reshard_execute(batch, "a", NULL, NULL, NULL));
        check(part_holds(&parts[0], version) && part_holds(&parts[1], version));
        check(calls == 2 * (int)version);
        meet(r);
    }
    char *dump;
    check_ok(tb_batch_dump(batch, is_a(r), &dump));
    check(strstr(dump, is_a(r) ? "to 2, coded" : "from 0, transform") || strstr(dump, is_a(r) ? "coded" : "transform"));
    check(strstr(dump, is_a(r) ? "read in place" : "direct"));
    free(dump);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&parts[0]);
    part_fini(&parts[1]);
}

static void test_transform(void **state) {
    (void)state;
    run_ranks(transform, 2, 2, NULL);
}

static int64_t half_size(void *arg, const tb_transform_piece *piece) {
    (void)arg;
    return count_elements(piece) * 2;
}

/* Pieces have a size of their own, and nothing makes or reads them. */
static void no_functions(rank *r) {
    tb_transform own = {.prepare_recv = half_size};
    tb_batch_opts opts = {.size = sizeof opts, .transform = &own};
    part p;
    tb_pair *pair;
    tb_batch *batch;
    tb_transfer *receiving = NULL;
    static const char words[] = "tensor 'w' has a piece of 288 bytes on the wire, but nothing converts it here";
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&p, "mesh=1 place=R", r->index, SIDE, SIDE);
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_ok(tb_batch_register(batch, 0));
    if (!is_a(r))
        check_ok(tb_recv(batch, NULL, &receiving));
    meet(r);
    if (is_a(r))
        check_fails(tb_reshard_execute(batch, "a", NULL, NULL, NULL), TB_INVALID, words);
    else
        check_fails(tb_wait(receiving, TB_ARRIVED, -1), TB_INVALID, words);
    tb_transfer_destroy(receiving);
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_no_functions(void **state) {
    (void)state;
    run_ranks(no_functions, 1, 1, NULL);
}

/* One side only. */
static void lone_transform(rank *r) {
    tb_transform own = {.should_transform = takes_w};
    tb_batch_opts opts = {.size = sizeof opts, .transform = is_a(r) ? &own : NULL};
    part p;
    tb_pair *pair;
    tb_batch *batch;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    part_init(&p, "mesh=1 place=R", r->index, SIDE, SIDE);
    tb_tensor t = part_tensor(&p);
    check_ok(tb_batch_add(batch, pair, "w", &t));
    check_fails(tb_batch_register(batch, 0), TB_CONFLICT, "one group transforms tensor 'w', the other does not");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&p);
}

static void test_lone_transform(void **state) {
    (void)state;
    run_ranks(lone_transform, 1, 1, NULL);
}

int main(void) {
    number_cast(TB_F32, TB_F16, 0); /* these make their lists the first time, which threads must not do at once */
    number_cast(TB_F32, TB_BF16, 0);
    number_cast(TB_F32, TB_F8E4M3, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),         cmocka_unit_test(test_sender),
        cmocka_unit_test(test_listed),         cmocka_unit_test(test_in_two_places),
        cmocka_unit_test(test_stacked),        cmocka_unit_test(test_blocks_are_cut),
        cmocka_unit_test(test_not_finite),     cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_fused),          cmocka_unit_test(test_apart),
        cmocka_unit_test(test_wrong_tensors),  cmocka_unit_test(test_transform),
        cmocka_unit_test(test_lone_transform), cmocka_unit_test(test_no_functions),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
