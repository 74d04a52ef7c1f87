/* Executes an IR as a run of a copy service: checks it, sends each rank a hash of the fields that both share, and gives
 * it to the run's flow. */
#include "copy/copy.h"

#include "base/dtype.h"
#include "base/opts.h"
#include "ir/ir.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <string.h>

typedef struct execution {
    tb_copy *copy;
    tb_ir_execute_opts opts;
    tb_ir *ir; /* in ranks of the bus */
    tb__flow_tensor *tensors;
    tb_binding *boxes; /* of targets */
    uint64_t *hashes;
    uint8_t *steps;  /* by bucket: number of steps reported */
    bool is_foreign; /* a rank of the IR is not in the group ... */
    int32_t foreign; /* ... this one */
} execution;

/* ---- Progress -------------------------------------------------------------------------------------------------- */

/* Reports the steps of a bucket, each once, up to this one. */
static void tell_steps(void *arg, size_t bucket, tb_bucket_step step) {
    execution *x = arg;
    for (; x->steps[bucket] <= (unsigned)step; x->steps[bucket]++) {
        if (x->opts.progress)
            x->opts.progress(x->opts.arg, bucket, (tb_bucket_step)x->steps[bucket]);
    }
}

/* ---- Ranks ----------------------------------------------------------------------------------------------------- */

static int32_t seat_of(void *arg, int32_t rank) {
    execution *x = arg;
    const tb_copy *copy = x->copy;
    for (int32_t seat = 0; seat < copy->size && x->opts.bus_ranks; seat++) {
        if (copy->handshake.peers[copy->position[seat]]->rank == rank)
            return seat;
    }
    if (!x->opts.bus_ranks && rank >= 0 && rank < copy->size)
        return rank;
    x->is_foreign = true;
    x->foreign = rank;
    return 0;
}

static int32_t bus_rank_of(void *arg, int32_t seat) {
    const tb_copy *copy = ((const execution *)arg)->copy;
    return copy->handshake.peers[copy->position[seat]]->rank;
}

/* *seats: a copy in which ranks are seats. */
static tb_status map_ranks(execution *x, const tb_ir *ir, tb_ir **seats) {
    TB_TRY(tb__ir_copy(ir, seat_of, x, seats));
    if (x->is_foreign)
        return tb__fail(TB_INVALID, "there is no rank %" PRId32 " in the group", x->foreign);
    if ((*seats)->rank != x->copy->index)
        return tb__fail(TB_INVALID, "it is the IR of rank %" PRId32, ir->rank);
    tb__ir_hash(*seats, x->hashes, x->copy->size);
    return tb__ir_copy(*seats, bus_rank_of, x, &x->ir);
}

/* ---- Parts ----------------------------------------------------------------------------------------------------- */

static tb_status check_box(const tb_chunk *c, const tb_binding *b, const tb_box *box, const char *what) {
    if (!b || !b->base || b->shape.ndim != c->ndim)
        return tb__fail(TB_INVALID, "it has no %s, or one of other dims", what);
    for (int d = 0; d < c->ndim; d++) {
        if (box->start[d] > b->shape.dim[d] || c->len[d] > b->shape.dim[d] - box->start[d])
            return tb__fail(TB_INVALID,
                            "indices %" PRId64 " to %" PRId64 " of dim %d are not in its %s, which has %" PRId64,
                            box->start[d], box->start[d] + c->len[d], d, what, b->shape.dim[d]);
    }
    return TB_OK;
}

static tb_status check_chunk(const execution *x, const tb_chunk *c) {
    const tb__flow_tensor *t = &x->tensors[c->tensor];
    if (t->spec.src_dtype != c->src_dtype || t->spec.shape.ndim != c->ndim)
        return tb__fail(TB_INVALID, "it is %s of %d dims, and other chunks of its tensor are %s of %d",
                        tb_dtype_name(c->src_dtype), c->ndim, tb_dtype_name(t->spec.src_dtype), t->spec.shape.ndim);
    if (c->is_source)
        TB_TRY(check_box(c, &t->src, &c->src, "source"));
    if (c->is_source && t->src.dtype != c->src_dtype)
        return tb__fail(TB_INVALID, "its source is %s, not %s", tb_dtype_name(t->src.dtype),
                        tb_dtype_name(c->src_dtype));
    if (!c->is_target)
        return TB_OK;
    TB_TRY(check_box(c, &t->dst, &c->dst, "target"));
    return tb__wire_dtype(c->src_dtype, t->dst.dtype, c->wire_dtype, &(tb_dtype){0});
}

static tb_status add_memory(execution *x, const tb_binding *b, const bool **is_invalidated) {
    tb_copy *copy = x->copy;
    uintptr_t first, last;
    TB_TRY(tb_shape_size(&b->shape, b->dtype, NULL, NULL));
    TB_TRY(tb__binding_span(b, &first, &last));
    tb__match_view *v = &copy->params.item[copy->params.count]; /* there is room */
    *v = (tb__match_view){.data = (char *)b->base + b->offset, .dtype = b->dtype, .shape = b->shape};
    memcpy(v->strides, b->strides, sizeof v->strides);
    *is_invalidated = &v->is_invalidated;
    copy->params.count++;
    return TB_OK;
}

/* Without a part, it has no elements here. */
static tb_status read_part(execution *x, const tb_ir_part *given, tb__flow_tensor *t, int ndim, tb_dtype dtype) {
    tb_binding nothing = {.dtype = dtype, .shape.ndim = ndim ? ndim : 1};
    t->src = given->src ? *given->src : nothing;
    t->dst = given->dst ? *given->dst : nothing;
    if (given->src)
        TB_TRY(add_memory(x, &t->src, &t->src_invalidated));
    if (given->dst)
        TB_TRY(add_memory(x, &t->dst, &t->dst_invalidated));
    t->spec.src_dtype = t->spec.wire_dtype = dtype;
    t->spec.dst_dtype = t->dst.dtype;
    t->spec.shape.ndim = ndim;
    return TB_OK;
}

static tb_status read_parts(execution *x, const tb_ir_part *parts) {
    const tb_ir *ir = x->ir;
    for (size_t i = 0; i < ir->ntensors; i++) {
        x->tensors[i].key = i;
        x->tensors[i].spec = (tb_tensor_spec){.size = sizeof(tb_tensor_spec), .name = ir->names[i]};
    }
    for (size_t i = 0; i < ir->nchunks; i++) {
        const tb_chunk *c = &ir->chunks[i];
        tb__flow_tensor *t = &x->tensors[c->tensor];
        tb_ir_part part;
        if (t->spec.src_dtype == TB_DTYPE_NONE) {
            TB_TRY(tb__struct_read(&part, sizeof part, parts, c->tensor, "a tb_ir_part"));
            tb_status status = read_part(x, &part, t, c->ndim, c->src_dtype);
            if (status != TB_OK)
                return tb__fail_within(status, "tensor '%.100s'", t->spec.name);
        }
        tb_status status = check_chunk(x, c);
        if (status != TB_OK)
            return tb__fail_within(status, "chunk %zu, of tensor '%.100s'", i, t->spec.name);
    }
    for (size_t i = 0; i < ir->ntensors; i++) { /* tensors of which this rank has no chunk */
        if (x->tensors[i].spec.src_dtype == TB_DTYPE_NONE)
            TB_TRY(read_part(x, &(tb_ir_part){0}, &x->tensors[i], 1, TB_U8));
    }
    return TB_OK;
}

/* No two chunks may be written to the same memory. */
static tb_status check_targets(const execution *x) {
    const tb_ir *ir = x->ir;
    size_t n = 0, a, b;
    for (size_t i = 0; i < ir->nchunks; i++) {
        const tb_chunk *c = &ir->chunks[i];
        if (!c->is_target)
            continue;
        tb_binding *box = &x->boxes[n++];
        *box = x->tensors[c->tensor].dst;
        for (int d = 0; d < c->ndim; d++)
            box->offset += tb__dtype_offset(box->dtype, c->dst.start[d] * box->strides[d]);
        memcpy(box->shape.dim, c->len, sizeof box->shape.dim);
    }
    a = b = n;
    TB_TRY(tb__bindings_find_overlap(x->boxes, n, &a, &b));
    return a < n ? tb__fail(TB_INVALID, "two of its chunks would be written to the same memory") : TB_OK;
}

/* ---- Execution ------------------------------------------------------------------------------------------------- */

static tb_status prepare(execution *x, const tb_ir *ir, const tb_ir_part *parts) {
    tb_ir *seats = NULL;
    TB_TRY(tb__ir_check(ir));
    x->hashes = tb__calloc((size_t)x->copy->size, sizeof *x->hashes);
    x->tensors = tb__calloc(ir->ntensors, sizeof *x->tensors);
    x->boxes = tb__calloc(ir->nchunks, sizeof *x->boxes);
    x->steps = tb__calloc(ir->nbuckets, 1);
    if (!x->hashes || !x->tensors || !x->boxes || !x->steps)
        return TB_NO_MEMORY;
    tb_status status = map_ranks(x, ir, &seats);
    tb_ir_destroy(seats);
    TB_TRY(status);
    tb__loop_lock(x->copy->world->loop);
    status = tb__vec_reserve(&x->copy->params, 2 * ir->ntensors) ? read_parts(x, parts) : TB_NO_MEMORY;
    tb__loop_unlock(x->copy->world->loop);
    TB_TRY(status);
    return check_targets(x);
}

static tb_status execute(execution *x, const tb_ir *ir, const tb_ir_part *parts) {
    tb_copy *copy = x->copy;
    tb_status status = prepare(x, ir, parts);
    if (status != TB_OK) {
        status = tb__fail_within(status, "the IR of %s", copy->peers[copy->self].label);
        copy->refused = tb__fault_of(status, tb_error_detail());
    } else {
        copy->ir = x->ir;
        copy->ir_hashes = x->hashes;
        copy->ir_tensors = x->tensors;
        copy->on_bucket = tell_steps;
        copy->on_bucket_arg = x;
    }
    TB_TRY(tb_copy_run(copy, x->opts.timeout_ms));
    for (size_t i = 0; i < ir->nbuckets; i++)
        tell_steps(x, i, TB_BUCKET_FINALISED);
    return TB_OK;
}

tb_status tb_ir_execute(tb_copy *copy, const tb_ir *ir, const tb_ir_part *parts, const tb_ir_execute_opts *opts) {
    execution x = {.copy = copy};
    TB_TRY(tb__world_check(copy->world, "copy service"));
    TB_TRY(tb__opts_read(&x.opts, sizeof x.opts, opts));
    if (x.opts.timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    if (copy->is_running || copy->params.count || copy->ir)
        return tb__fail(TB_REFUSED, "%s: a run is under way", copy->what);
    tb_status status = execute(&x, ir, parts);
    tb__saved_detail why = tb__save_detail();
    tb__loop_lock(copy->world->loop);
    copy->params.count = 0;
    copy->ir = NULL;
    copy->ir_hashes = NULL;
    copy->ir_tensors = NULL;
    copy->on_bucket = NULL;
    tb__loop_unlock(copy->world->loop);
    tb_ir_destroy(x.ir);
    free(x.tensors);
    free(x.boxes);
    free(x.hashes);
    free(x.steps);
    return status == TB_OK ? TB_OK : tb__fail(status, "%s", why.text);
}
