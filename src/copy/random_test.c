/* Random graphs of operations: every rank works all of them out from the seed, fills what it sends, and knows every
 * byte that must be in its memory afterwards, gaps included. */
#include "bus/bus_test.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>

enum { MOST_OPS = 400, MOST_VIEWS = 3, OWN_DIMS = 5 };

/* One end of a tensor, in bytes of items; where it lies is a matter of its rank's memory. */
typedef struct end {
    size_t offset; /* of element (0, 0, ...) */
    tb_shape shape;
    int64_t strides[TB_MAX_DIMS]; /* items */
    tb_dtype dtype;
} end;

typedef struct tensor {
    int64_t nitems;
    int item_bytes;
    uint64_t salt;
    end ends[2]; /* the sender's, the receiver's */
} tensor;

typedef struct operation {
    uint64_t id;
    int32_t ranks[2];
    size_t nviews;
    tensor views[MOST_VIEWS];
} operation;

typedef struct graph {
    size_t nops;
    size_t nbytes[2][MAX_RANKS]; /* that a rank sends from, and receives into */
    operation ops[MOST_OPS];
} graph;

/* ---- Making one ------------------------------------------------------------------------------------------------ */

static tb_dtype pick_dtype(rng *r, int item_bytes) {
    static const tb_dtype of[9][4] = {[1] = {TB_U8, TB_I8, TB_F8E4M3, TB_BOOL},
                                      [2] = {TB_U16, TB_F16, TB_BF16, TB_I16},
                                      [4] = {TB_U32, TB_F32, TB_I32, TB_F32},
                                      [8] = {TB_U64, TB_F64, TB_I64, TB_F64}};
    return of[item_bytes][rng_range(r, 0, 3)];
}

/* Neighbouring dimensions are taken together now and then: both ends come from one shape, and so fit. */
static tb_shape coarsen(rng *r, const tb_shape *shape) {
    tb_shape out = {.ndim = 0};
    for (int d = 0; d < shape->ndim; d++) {
        if (out.ndim && rng_range(r, 0, 2) == 0)
            out.dim[out.ndim - 1] *= shape->dim[d];
        else
            out.dim[out.ndim++] = shape->dim[d];
    }
    return out;
}

/* Dimensions in any order in memory, with gaps, forwards or backwards. Returns the bytes that takes. */
static size_t lay_out(rng *r, end *e, int item_bytes, bool is_packed) {
    int order[TB_MAX_DIMS], n = e->shape.ndim;
    int64_t stride = 1, first = 0, last = 0;
    bool is_plain = rng_range(r, 0, 2) == 0;
    for (int d = 0; d < n; d++)
        order[d] = n - 1 - d; /* the innermost first */
    for (int d = is_packed; d < n && !is_plain; d++) {
        int other = (int)rng_range(r, d, n - 1), kept = order[d];
        order[d] = order[other];
        order[other] = kept;
    }
    for (int i = 0; i < n; i++) {
        int d = order[i];
        bool is_fixed = is_plain || (is_packed && i == 0);
        int64_t reach = stride * (e->shape.dim[d] > 0 ? e->shape.dim[d] - 1 : 0);
        e->strides[d] = !is_fixed && rng_range(r, 0, 4) == 0 ? -stride : stride;
        first -= e->strides[d] < 0 ? reach : 0;
        last += e->strides[d] < 0 ? 0 : reach;
        stride = stride * (e->shape.dim[d] > 0 ? e->shape.dim[d] : 1) + (is_plain ? 0 : rng_range(r, 0, 2));
    }
    e->offset = (size_t)(-first * item_bytes);
    return (size_t)((last - first + 1) * item_bytes);
}

static void make_tensor(rng *r, graph *g, const operation *op, tensor *t) {
    static const int64_t lengths[] = {1, 2, 3, 4, 5, 8, 7};
    tb_shape shape = {.ndim = (int)rng_range(r, 0, OWN_DIMS)};
    int kind = (int)rng_range(r, 0, 30);
    for (int d = 0; d < shape.ndim; d++)
        shape.dim[d] = lengths[rng_range(r, 0, 6)];
    if (kind == 0 && shape.ndim)
        shape.dim[rng_range(r, 0, shape.ndim - 1)] = 0;
    if (kind == 1 && shape.ndim)
        shape.dim[0] *= 100;
    t->nitems = 1;
    for (int d = 0; d < shape.ndim; d++)
        t->nitems *= shape.dim[d];
    t->item_bytes = 1 << rng_range(r, 0, 3);
    t->salt = rng_next(r);
    bool is_packed = t->item_bytes == 1 && shape.ndim > 0 && rng_range(r, 0, 3) == 0;
    for (int i = 0; i < 2; i++) {
        end *e = &t->ends[i];
        size_t *used = &g->nbytes[i][op->ranks[i]];
        e->shape = coarsen(r, &shape);
        e->dtype = is_packed ? TB_F4E2M1 : pick_dtype(r, t->item_bytes);
        *used = (*used + 7) / 8 * 8 + (size_t)rng_range(r, 0, 2) * 8;
        size_t nbytes = lay_out(r, e, t->item_bytes, is_packed);
        e->offset += *used;
        *used += nbytes;
    }
}

static void make_graph(graph *g, uint64_t seed, int32_t nranks) {
    rng r = {seed};
    memset(g->nbytes, 0, sizeof g->nbytes);
    g->nops = (size_t)(rng_range(&r, 0, 9) == 0 ? 0 : rng_range(&r, 1, rng_range(&r, 0, 1) ? MOST_OPS : 20));
    uint64_t id = rng_next(&r);
    for (size_t i = 0; i < g->nops; i++) {
        operation *op = &g->ops[i];
        op->id = id += (uint64_t)rng_range(&r, 1, 1000) * 0x9E3779B97F4A7C15U | 1; /* wraps, and is never the same */
        if (rng_range(&r, 0, 3) == 0)
            op->id = TB_NO_TASK;
        op->ranks[0] = (int32_t)rng_range(&r, 0, nranks - 1);
        op->ranks[1] = (int32_t)rng_range(&r, 0, nranks - 1);
        op->nviews = (size_t)(rng_range(&r, 0, 2) == 0 ? rng_range(&r, 2, MOST_VIEWS) : 1);
        for (size_t j = 0; j < op->nviews; j++)
            make_tensor(&r, g, op, &op->views[j]);
    }
}

/* ---- Bytes ----------------------------------------------------------------------------------------------------- */

/* Calls `memory[...] = value` for all items, in row-major order. */
static void write_items(const tensor *t, const end *e, unsigned char *memory) {
    int64_t index[TB_MAX_DIMS] = {0};
    for (int64_t n = 0; n < t->nitems; n++) {
        int64_t at = 0;
        for (int d = 0; d < e->shape.ndim; d++)
            at += index[d] * e->strides[d];
        uint64_t value = (t->salt + (uint64_t)n) * 0xD1B54A32D192ED03U;
        value ^= value >> 29;
        memcpy(memory + (int64_t)e->offset + at * t->item_bytes, &value, (size_t)t->item_bytes);
        for (int d = e->shape.ndim; d-- > 0 && ++index[d] == e->shape.dim[d];)
            index[d] = 0;
    }
}

/* A byte is two items of 4 bits. */
static tb_copy_view view_of(const end *e, unsigned char *memory, int64_t *strides) {
    bool is_packed = e->dtype == TB_F4E2M1;
    int last = e->shape.ndim - 1;
    tb_copy_view v = {
        .size = sizeof v, .data = memory + e->offset, .dtype = e->dtype, .ndim = e->shape.ndim, .strides = strides};
    for (int d = 0; d <= last; d++) {
        v.shape[d] = is_packed && d == last ? e->shape.dim[d] * 2 : e->shape.dim[d];
        strides[d] = is_packed && d != last ? e->strides[d] * 2 : e->strides[d];
    }
    return v;
}

/* `step` tensors at a time. */
static void submit(tb_copy *copy, const operation *op, int which, unsigned char *memory, size_t step) {
    tb_copy_view views[MOST_VIEWS];
    int64_t strides[MOST_VIEWS][TB_MAX_DIMS];
    for (size_t i = 0; i < op->nviews; i++)
        views[i] = view_of(&op->views[i].ends[which], memory, strides[i]);
    for (size_t i = 0; i < op->nviews; i += step)
        check_ok((which ? tb_copy_submit_recv : tb_copy_submit_send)(
            copy, views + i, step < op->nviews - i ? step : op->nviews - i, op->ranks[!which], op->id));
}

/* Operations without an id keep their order; the others are rotated, by as many as this end likes. */
static void submit_all(tb_copy *copy, const rank *r, const graph *g, rng *own, unsigned char *in, unsigned char *out) {
    for (int has_id = 0; has_id < 2; has_id++) {
        size_t start = has_id ? (size_t)rng_range(own, 0, MOST_OPS) : 0;
        for (size_t i = 0; i < g->nops; i++) {
            const operation *op = &g->ops[(start + i) % g->nops];
            size_t step = has_id && rng_range(own, 0, 1) ? 1 : MOST_VIEWS;
            for (int which = 0; which < 2 && (op->id != TB_NO_TASK) == has_id; which++) {
                if (op->ranks[which] == r->index)
                    submit(copy, op, which, which ? in : out, step);
            }
        }
    }
}

static unsigned char *allocate(size_t nbytes, bool is_shared) {
    void *data;
    if (is_shared)
        check((data = tensor_alloc_any(nbytes + 1)));
    else
        check((data = malloc(nbytes + 1)));
    return data;
}

static void release(unsigned char *data, bool is_shared) {
    if (is_shared)
        tensor_free(data);
    else
        free(data);
}

static void run_graph(const rank *r, tb_copy *copy, graph *g, uint64_t seed) {
    make_graph(g, seed, r->size);
    rng own = {seed * MAX_RANKS + (uint64_t)r->index};
    size_t nsent = g->nbytes[0][r->index], nreceived = g->nbytes[1][r->index];
    bool is_shared = rng_range(&own, 0, 2) > 0;
    unsigned char *out = allocate(nsent, is_shared), *in = allocate(nreceived, is_shared);
    unsigned char *sent = allocate(nsent, false), *wanted = allocate(nreceived, false);
    memset(tensor_bytes(out), 0x5a, nsent);
    memset(tensor_bytes(in), 0xa5, nreceived);
    memset(wanted, 0xa5, nreceived);
    for (size_t i = 0; i < g->nops; i++) {
        const operation *op = &g->ops[i];
        for (size_t j = 0; j < op->nviews; j++) {
            if (op->ranks[0] == r->index)
                write_items(&op->views[j], &op->views[j].ends[0], tensor_bytes(out));
            if (op->ranks[1] == r->index)
                write_items(&op->views[j], &op->views[j].ends[1], wanted);
        }
    }
    memcpy(sent, tensor_bytes(out), nsent);
    submit_all(copy, r, g, &own, in, out);
    check_ok(tb_copy_run(copy, 0));
    check(memcmp(tensor_bytes(in), wanted, nreceived) == 0);
    check(memcmp(tensor_bytes(out), sent, nsent) == 0);
    release(out, is_shared);
    release(in, is_shared);
    free(sent);
    free(wanted);
}

/* ---- Running --------------------------------------------------------------------------------------------------- */

typedef struct job {
    uint64_t seed;
    int64_t ncases;
    bool staged;
} job;

static void run_cases(rank *r) {
    const job *j = r->scene->shared;
    tb_copy_opts opts = {.size = sizeof opts, .staged = j->staged, .staging_bytes = 64 << 10, .bucket_size = 3000};
    graph *g = malloc(sizeof *g);
    tb_copy *copy;
    check(g);
    check_ok(tb_copy_open(r->world, "random", NULL, &opts, &copy));
    for (int64_t i = 0; i < j->ncases; i++)
        run_graph(r, copy, g, j->seed + (uint64_t)i);
    tb_copy_close(copy);
    free(g);
}

static uint64_t seed;

static void direct(void **state) {
    (void)state;
    job j = {.seed = seed, .ncases = test_cases(60)};
    run_ranks(run_cases, 4, 0, &j);
}

static void staged(void **state) {
    (void)state;
    job j = {.seed = seed, .ncases = test_cases(60), .staged = true};
    run_ranks(run_cases, 4, 0, &j);
}

static void alone(void **state) {
    (void)state;
    job j = {.seed = seed, .ncases = test_cases(60)};
    run_ranks(run_cases, 1, 0, &j);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(direct),
        cmocka_unit_test(staged),
        cmocka_unit_test(alone),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("copy random", tests, NULL, NULL);
}
