/* Executes a plan from elsewhere: slices of parameters become operations of a copy service. Slices that are cast,
 * quantised or transformed use a buffer, which is filled before the run or written back after it. */
#include "copy/copy.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/opts.h"
#include "ir/ir.h"
#include "layout/overlap.h"
#include "reshard/encode.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef struct param {
    char *name;
    tb_copy_view view;
    tb_binding binding;
    tb_dtype wire;
    bool is_encoded;
    tb__encoded encoded;
    void *accumulator;
    int64_t nelements, left; /* of a quantised target: elements in the plan, and operations that have not arrived */
} param;

/* How an operation's data gets from its parameter to the wire, or back. */
typedef enum way { WAY_DIRECT, WAY_COPY, WAY_TRANSFORM, WAY_ACCUMULATE } way;

typedef struct operation {
    tb_reshard_op op;
    param *param;
    tb_binding slice; /* of the parameter */
    way way;
    char *buffer; /* the data on the wire; NULL: the slice itself, or the accumulator */
    tb_transform_piece piece;
} operation;

typedef struct allocation {
    tb__device *device; /* NULL: memory of tb_alloc */
    void *memory;
} allocation;

typedef struct execution {
    tb_copy *copy;
    tb_reshard_plan plan;
    tb_transform transform;
    param *params[2]; /* of targets, of sources */
    size_t nparams[2];
    operation *ops[2]; /* receives, sends */
    size_t nops[2];
    TB_VEC(allocation) allocations;
    bool is_stuck; /* a device may still use them */
    tb_reshard_counts counts;
} execution;

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

/* Allocates memory on the device of `like`, or on the host if that is NULL. */
static tb_status allocate(execution *x, const void *like, int64_t nbytes, void **out) {
    tb__memory memory;
    tb__device *device = like ? tb__loop_find_memory(x->copy->world->loop, like, 1, &memory) : NULL;
    if (device && device->ops == &tb__host_device_ops)
        device = NULL;
    if (!tb__vec_reserve(&x->allocations, 1))
        return TB_NO_MEMORY;
    TB_TRY(device ? device->ops->alloc(device, memory.index, (size_t)nbytes, out) : tb_alloc((size_t)nbytes, out));
    x->allocations.item[x->allocations.count++] = (allocation){device, *out};
    return TB_OK;
}

static void execution_fini(execution *x) {
    for (size_t i = 0; i < x->allocations.count && !x->is_stuck; i++) {
        allocation a = x->allocations.item[i];
        if (a.device)
            a.device->ops->free(a.device, a.memory);
        else
            tb_free(a.memory);
    }
    free(x->allocations.item);
    for (int is_send = 0; is_send < 2; is_send++) {
        for (size_t i = 0; x->params[is_send] && i < x->nparams[is_send] && !x->is_stuck; i++)
            free(x->params[is_send][i].name); /* jobs refer to them */
        free(x->params[is_send]);
        free(x->ops[is_send]);
    }
}

static tb_status run_moves(execution *x, const tb__move_list *list, void *dst_buffer) {
    tb__loop *loop = x->copy->world->loop;
    tb__loop_lock(loop);
    tb_status status = tb__copy_check_invalidated(x->copy);
    if (status == TB_OK && list->moves.count)
        status = tb__copy_run_moves(x->copy, list->moves.item, list->moves.count, dst_buffer, &x->is_stuck);
    tb__loop_unlock(loop);
    return status;
}

/* Copies a box, and casts it. */
static tb_status copy_box(execution *x, const tb_binding *from, const tb_binding *to) {
    const void *src = (const char *)from->base + from->offset;
    tb__move_list list = {0};
    tb__move move = {.ndim = from->shape.ndim,
                     .dst = (char *)to->base + to->offset,
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS]) & from->strides,
                     .src_dtype = from->dtype,
                     .wire_dtype = to->dtype,
                     .dst_dtype = to->dtype};
    memcpy(move.len, from->shape.dim, sizeof move.len);
    memcpy(move.dst_stride, to->strides, sizeof move.dst_stride);
    tb_status status = tb__move_list_add(&list, &move);
    if (status == TB_OK)
        status = run_moves(x, &list, NULL);
    tb__move_list_fini(&list);
    return status;
}

static bool is_empty(const tb_binding *b) {
    for (int d = 0; d < b->shape.ndim; d++) {
        if (b->shape.dim[d] == 0)
            return true;
    }
    return false;
}

static int64_t count_elements(const tb_binding *b) {
    int64_t n = 1;
    for (int d = 0; d < b->shape.ndim; d++)
        n *= b->shape.dim[d];
    return n;
}

/* ---- Parameters ------------------------------------------------------------------------------------------------ */

static tb_status read_encoded(const execution *x, const tb_reshard_param *given, param *p) {
    tb__encoding encoding;
    TB_TRY(tb__encoding_parse(given->encode, &encoding));
    if (p->view.strides)
        return tb__fail(TB_INVALID, "it is %s, and can't have strides", given->encode);
    TB_TRY(tb__encoded_init(&encoding, &p->binding.shape, p->view.data, given->scales, given->scale, &p->binding,
                            &p->encoded));
    if (p->view.dtype != p->encoded.size.data_dtype)
        return tb__fail(TB_INVALID, "its data is %s, but that of %s is %s", tb_dtype_name(p->view.dtype), given->encode,
                        tb_dtype_name(p->encoded.size.data_dtype));
    p->is_encoded = true;
    p->wire = given->buffer_dtype != TB_DTYPE_NONE ? given->buffer_dtype : TB_BF16;
    if (p->wire != TB_F32 && p->wire != TB_F16 && p->wire != TB_BF16)
        return tb__fail(TB_REFUSED, "%s is made of f32, f16 or bf16, not of %s", tb__quant_name(encoding.format.kind),
                        tb_dtype_name(p->wire));
    TB_TRY(tb__world_check_memory(x->copy->world, p->view.memory, given->scales, given->scales != NULL));
    return tb__world_check_memory(x->copy->world, p->view.memory, given->scale, given->scale != NULL);
}

static tb_status read_param(execution *x, const tb_reshard_param *given, bool is_source, param *p) {
    tb__match_view view;
    if (!given->view)
        return tb__fail(TB_INVALID, "it has no view");
    TB_TRY(tb__struct_read(&p->view, sizeof p->view, given->view, 0, "a tb_copy_view"));
    TB_TRY(tb__match_read(&p->view, &view));
    TB_TRY(tb__world_check_memory(x->copy->world, p->view.memory, p->view.data, p->view.data != NULL));
    p->binding = (tb_binding){.base = p->view.data, .dtype = p->view.dtype, .shape = view.given_shape};
    memcpy(p->binding.strides, view.given_strides, sizeof p->binding.strides);
    p->wire = given->buffer_dtype != TB_DTYPE_NONE ? given->buffer_dtype : p->view.dtype;
    if (!given->encode && (given->scales || given->scale))
        return tb__fail(TB_INVALID, "it has scales but no encoding");
    if (given->encode)
        TB_TRY(read_encoded(x, given, p));
    else if (p->wire != p->view.dtype)
        TB_TRY(tb__wire_dtype(is_source ? p->view.dtype : p->wire, is_source ? p->wire : p->view.dtype, TB_DTYPE_NONE,
                              &(tb_dtype){0}));
    tb__loop_lock(x->copy->world->loop);
    bool has_room = tb__vec_push(&x->copy->params, view);
    tb__loop_unlock(x->copy->world->loop);
    return has_room ? TB_OK : TB_NO_MEMORY;
}

static int compare_params(const void *a, const void *b) {
    return strcmp(((const param *)a)->name, ((const param *)b)->name);
}

/* Sorts parameters by name. */
static tb_status read_params(execution *x, bool is_source, const tb_reshard_param *given, size_t count) {
    param *params = x->params[is_source] = tb__calloc(count, sizeof *params);
    if (!params)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        tb_reshard_param one;
        TB_TRY(tb__struct_read(&one, sizeof one, given, i, "a tb_reshard_param"));
        if (!one.name || !*one.name)
            return tb__fail(TB_INVALID, "parameter %zu has no name", i);
        x->nparams[is_source]++;
        if (!(params[i].name = tb__strdup(one.name)))
            return TB_NO_MEMORY;
        tb_status status = read_param(x, &one, is_source, &params[i]);
        if (status != TB_OK)
            return tb__fail_within(status, "parameter '%.100s'", one.name);
    }
    if (count)
        qsort(params, count, sizeof *params, compare_params);
    for (size_t i = 1; i < count; i++) {
        if (strcmp(params[i - 1].name, params[i].name) == 0)
            return tb__fail(TB_INVALID, "two %s are called '%.100s'", is_source ? "sources" : "targets",
                            params[i].name);
    }
    return TB_OK;
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

static tb_status check_slices(const param *p, const tb_reshard_op *op) {
    for (int d = 0; d < p->binding.shape.ndim; d++) {
        int64_t start = op->here.start[d], length = op->here.length[d];
        if (start < 0 || length < 0 || start > p->binding.shape.dim[d] || length > p->binding.shape.dim[d] - start)
            return tb__fail(TB_INVALID, "%" PRId64 " indices from %" PRId64 " on are not in dim %d, which has %" PRId64,
                            length, start, d, p->binding.shape.dim[d]);
        if (tb_dtype_bits(p->binding.dtype) == 4 && start * p->binding.strides[d] % 2)
            return tb__fail(TB_INVALID, "it begins at index %" PRId64 " of dim %d, inside a byte", start, d);
        if (op->there.start[d] < 0 || op->there.length[d] != length)
            return tb__fail(TB_INVALID,
                            "it has %" PRId64 " indices of dim %d here, but %" PRId64 " from %" PRId64
                            " on at the peer",
                            length, d, op->there.length[d], op->there.start[d]);
    }
    return TB_OK;
}

static bool is_transformed(const execution *x, const char *name, bool is_send) {
    const tb_transform *t = &x->transform;
    bool has_function = is_send ? t->prepare_send != NULL : t->finalize_recv != NULL;
    return has_function && (!t->should_transform || t->should_transform(t->arg, name));
}

/* The sizes of a piece's buffers; that of its elements if the transform does not set them. */
static tb_status measure_piece(const execution *x, const operation *o, tb_transform_piece *piece, int64_t *nbytes) {
    const tb_transform *t = &x->transform;
    piece->nbuffers = 1;
    if (t->list_buffers) {
        int count = t->list_buffers(t->arg, piece, piece->buffer_nbytes);
        if (count < 1 || count > TB_MAX_BUFFERS)
            return tb__fail(TB_INVALID, "its transform lists %d buffers, not 1 to %d", count, TB_MAX_BUFFERS);
        piece->nbuffers = (size_t)count;
    } else {
        piece->buffer_nbytes[0] = t->prepare_recv ? t->prepare_recv(t->arg, piece)
                                                  : tb__dtype_bytes(o->param->wire, count_elements(&o->slice));
    }
    *nbytes = 0;
    for (size_t i = 0; i < piece->nbuffers; i++) {
        if (piece->buffer_nbytes[i] < 1 || piece->buffer_nbytes[i] > INT64_C(1) << 58)
            return tb__fail(TB_INVALID, "its transform has a buffer of %" PRId64 " bytes", piece->buffer_nbytes[i]);
        piece->buffer_offset[i] = tb__align(*nbytes, 64);
        *nbytes = piece->buffer_offset[i] + piece->buffer_nbytes[i];
    }
    return TB_OK;
}

static tb_status make_piece(execution *x, operation *o, bool is_send) {
    tb_transform_piece *piece = &o->piece;
    int64_t nbytes;
    *piece = (tb_transform_piece){.size = sizeof *piece, .name = o->param->name, .dtype = o->param->wire};
    piece->ndim = o->slice.shape.ndim;
    memcpy(piece->shape, o->slice.shape.dim, sizeof piece->shape);
    memcpy(piece->src_start, is_send ? o->op.here.start : o->op.there.start, sizeof piece->src_start);
    memcpy(piece->dst_start, is_send ? o->op.there.start : o->op.here.start, sizeof piece->dst_start);
    TB_TRY(measure_piece(x, o, piece, &nbytes));
    TB_TRY(allocate(x, NULL, nbytes, (void **)&o->buffer));
    memset(o->buffer, 0, (size_t)nbytes);
    return TB_OK;
}

static tb_status read_accumulated(execution *x, operation *o) {
    param *p = o->param;
    int64_t nbytes;
    TB_TRY(tb_shape_size(&p->binding.shape, p->wire, NULL, &nbytes));
    if (!p->accumulator && nbytes)
        TB_TRY(allocate(x, p->view.data, nbytes, &p->accumulator));
    p->nelements += count_elements(&o->slice);
    p->left++;
    return TB_OK;
}

static tb_status read_op(execution *x, operation *o, bool is_send) {
    param key = {.name = (char *)(uintptr_t)o->op.param};
    o->param =
        x->nparams[is_send] ? bsearch(&key, x->params[is_send], x->nparams[is_send], sizeof key, compare_params) : NULL;
    if (!o->param)
        return tb__fail(TB_INVALID, "there is no such %s", is_send ? "source" : "target");
    param *p = o->param;
    TB_TRY(check_slices(p, &o->op));
    o->slice = p->binding;
    int64_t nbytes;
    for (int d = 0; d < p->binding.shape.ndim; d++) {
        o->slice.offset += tb__dtype_offset(p->binding.dtype, o->op.here.start[d] * p->binding.strides[d]);
        o->slice.shape.dim[d] = o->op.here.length[d];
    }
    bool transforms = !is_empty(&o->slice) && is_transformed(x, p->name, is_send);
    if (transforms && p->is_encoded)
        return tb__fail(TB_REFUSED, "it is encoded, and a transform is to convert it, too");
    o->way = transforms                    ? WAY_TRANSFORM
             : p->is_encoded && !is_send   ? WAY_ACCUMULATE
             : p->is_encoded               ? WAY_COPY
             : p->wire != p->binding.dtype ? WAY_COPY
                                           : WAY_DIRECT;
    if (o->way == WAY_TRANSFORM)
        return make_piece(x, o, is_send);
    if (o->way == WAY_ACCUMULATE)
        return read_accumulated(x, o);
    TB_TRY(tb_shape_size(&o->slice.shape, p->wire, NULL, &nbytes));
    return o->way == WAY_COPY && nbytes ? allocate(x, p->view.data, nbytes, (void **)&o->buffer) : TB_OK;
}

static tb_status read_ops(execution *x, bool is_send, const tb_reshard_op *given, size_t count) {
    operation *ops = x->ops[is_send] = tb__calloc(count, sizeof *ops);
    if (!ops)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        TB_TRY(tb__struct_read(&ops[i].op, sizeof ops[i].op, given, i, "a tb_reshard_op"));
        if (!ops[i].op.param)
            return tb__fail(TB_INVALID, "%s %zu has no parameter", is_send ? "send" : "receive", i);
        tb_status status = read_op(x, &ops[i], is_send);
        if (status != TB_OK)
            return tb__fail_within(status, "%s %zu, of parameter '%.100s'", is_send ? "send" : "receive", i,
                                   ops[i].op.param);
        x->nops[is_send]++;
    }
    return TB_OK;
}

static tb_status check_accumulators(const execution *x) {
    for (size_t i = 0; i < x->nparams[0]; i++) {
        const param *p = &x->params[0][i];
        int64_t n = count_elements(&p->binding);
        if (p->left && p->nelements != n)
            return tb__fail(TB_INVALID,
                            "the plan has %" PRId64
                            " elements of parameter '%.100s', which is quantised and has %" PRId64,
                            p->nelements, p->name, n);
    }
    return TB_OK;
}

/* ---- Before the run -------------------------------------------------------------------------------------------- */

static tb_status bind_buffer(const operation *o, tb_binding *out) {
    return tb_binding_contiguous(o->buffer, 0, o->param->wire, &o->slice.shape, out);
}

/* Functions of the user need host memory: a slice on a device is copied there, and back. */
static tb_status bind_host(execution *x, const operation *o, tb_binding *out) {
    void *scratch;
    int64_t nbytes;
    *out = o->slice;
    if (tb__loop_is_host_memory(x->copy->world->loop, o->slice.base))
        return TB_OK;
    TB_TRY(tb_shape_size(&o->slice.shape, o->slice.dtype, NULL, &nbytes));
    TB_TRY(allocate(x, NULL, nbytes, &scratch));
    TB_TRY(tb_binding_contiguous(scratch, 0, o->slice.dtype, &o->slice.shape, out));
    return copy_box(x, &o->slice, out);
}

static tb_status begin_call(execution *x) {
    tb__loop *loop = x->copy->world->loop;
    tb__loop_lock(loop);
    tb_status status = tb__copy_check_invalidated(x->copy);
    x->copy->copies_local = status == TB_OK;
    tb__loop_unlock(loop);
    return status;
}

static tb_status end_call(execution *x, tb_status status) {
    tb__saved_detail why = tb__save_detail();
    tb__loop *loop = x->copy->world->loop;
    tb__loop_lock(loop);
    x->copy->copies_local = false;
    tb_status now = tb__copy_check_invalidated(x->copy);
    tb__loop_signal(loop);
    tb__loop_unlock(loop);
    return status == TB_OK ? now : tb__fail(status, "%s", why.text);
}

static tb_status call_send(execution *x, operation *o) {
    const tb_transform *t = &x->transform;
    tb_binding part;
    TB_TRY(bind_host(x, o, &part));
    TB_TRY(begin_call(x));
    return end_call(x, t->prepare_send(t->arg, &o->piece, &part, o->buffer));
}

/* Dequantises a slice. */
static tb_status decode_slice(execution *x, const operation *o) {
    tb__move_list list = {0};
    const param *p = o->param;
    tb_status status = tb__encoded_list_read(&p->encoded, o->slice.shape.ndim, o->op.here.start, o->slice.shape.dim, 0,
                                             p->wire, p->name, &list);
    if (status == TB_OK)
        status = run_moves(x, &list, o->buffer);
    tb__move_list_fini(&list);
    return status;
}

static tb_status fill_buffer(execution *x, operation *o) {
    tb_binding buffer;
    if (o->way == WAY_TRANSFORM)
        return call_send(x, o);
    if (o->way != WAY_COPY || is_empty(&o->slice))
        return TB_OK;
    if (o->param->is_encoded)
        return decode_slice(x, o);
    TB_TRY(bind_buffer(o, &buffer));
    return copy_box(x, &o->slice, &buffer);
}

static tb_copy_view view_of(const tb_binding *b) {
    tb_copy_view v = {.size = sizeof v, .dtype = b->dtype, .ndim = b->shape.ndim, .strides = b->strides};
    v.data = is_empty(b) ? NULL : (char *)b->base + b->offset;
    memcpy(v.shape, b->shape.dim, sizeof v.shape);
    return v;
}

static tb_status submit_views(const execution *x, const operation *o, bool is_send, const tb_copy_view *views,
                              size_t nviews) {
    return is_send ? tb_copy_submit_send(x->copy, views, nviews, o->op.peer, o->op.task_id)
                   : tb_copy_submit_recv(x->copy, views, nviews, o->op.peer, o->op.task_id);
}

static tb_status submit_buffers(const execution *x, const operation *o, bool is_send) {
    tb_copy_view views[TB_MAX_BUFFERS];
    for (size_t i = 0; i < o->piece.nbuffers; i++)
        views[i] = (tb_copy_view){.size = sizeof views[i],
                                  .data = o->buffer + o->piece.buffer_offset[i],
                                  .dtype = TB_U8,
                                  .ndim = 1,
                                  .shape = {o->piece.buffer_nbytes[i]}};
    return submit_views(x, o, is_send, views, o->piece.nbuffers);
}

static tb_status submit_operation(const execution *x, const operation *o, bool is_send) {
    const param *p = o->param;
    tb_binding box = o->slice;
    if (o->way == WAY_TRANSFORM && (x->transform.list_buffers || x->transform.prepare_recv))
        return submit_buffers(x, o, is_send);
    if (o->way == WAY_ACCUMULATE) {
        TB_TRY(tb_binding_contiguous(p->accumulator, 0, p->wire, &p->binding.shape, &box));
        box.shape = o->slice.shape;
        for (int d = 0; d < box.shape.ndim; d++)
            box.offset += tb__dtype_offset(p->wire, o->op.here.start[d] * box.strides[d]);
    } else if (o->way != WAY_DIRECT) {
        TB_TRY(bind_buffer(o, &box));
    }
    tb_copy_view view = view_of(&box);
    return submit_views(x, o, is_send, &view, 1);
}

static tb_status prepare(execution *x) {
    TB_TRY(read_params(x, false, x->plan.targets, x->plan.ntargets));
    TB_TRY(read_params(x, true, x->plan.sources, x->plan.nsources));
    TB_TRY(read_ops(x, false, x->plan.recvs, x->plan.nrecvs));
    TB_TRY(read_ops(x, true, x->plan.sends, x->plan.nsends));
    TB_TRY(check_accumulators(x));
    for (int is_send = 0; is_send < 2; is_send++) {
        for (size_t i = 0; i < x->nops[is_send]; i++) {
            operation *o = &x->ops[is_send][i];
            tb_status status = is_send ? fill_buffer(x, o) : TB_OK;
            if (status == TB_OK)
                status = submit_operation(x, o, is_send);
            if (status != TB_OK)
                return tb__fail_within(status, "%s %zu, of parameter '%.100s'", is_send ? "send" : "receive", i,
                                       o->param->name);
        }
    }
    return TB_OK;
}

/* ---- After the run --------------------------------------------------------------------------------------------- */

static tb_status list_quantise(const param *p, float *scale, bool measures, tb__move_list *list) {
    tb_shape shape = {.ndim = 2, .dim = {p->encoded.rows, p->encoded.columns}};
    tb_binding box;
    if (measures) {
        TB_TRY(tb_binding_contiguous(p->accumulator, 0, p->wire, &shape, &box));
        return tb__encoded_list_amax(&shape, (const int64_t[]){0, 0}, &box, NULL, scale, p->name, list);
    }
    TB_TRY(tb__encoded_list_write(&p->encoded, 0, p->encoded.rows, p->accumulator, p->wire, scale, p->name, list));
    return scale ? tb__encoded_list_scale(scale, p->encoded.scale, list) : TB_OK;
}

/* Called when all slices of the parameter are in its accumulator. A scale for the whole tensor needs its largest
 * magnitude first. */
static tb_status quantise(execution *x, const param *p) {
    bool is_global = tb__encoding_is_global(&p->encoded.encoding);
    float *number = NULL; /* a device may use it for longer than this call */
    tb_status status = TB_OK;
    if (!p->accumulator)
        return TB_OK;
    if (is_global)
        TB_TRY(allocate(x, NULL, sizeof *number, (void **)&number));
    for (int measures = is_global; measures >= 0 && status == TB_OK; measures--) {
        tb__move_list list = {0};
        if (measures)
            *number = 0;
        status = list_quantise(p, number, measures, &list);
        if (status == TB_OK)
            status = run_moves(x, &list, NULL);
        if (status == TB_OK && measures)
            status = tb__quant_scale(&p->encoded.encoding.format, *number, number);
        tb__move_list_fini(&list);
    }
    return status;
}

static tb_status call_recv(execution *x, operation *o) {
    const tb_transform *t = &x->transform;
    tb_binding part;
    TB_TRY(bind_host(x, o, &part));
    TB_TRY(begin_call(x));
    TB_TRY(end_call(x, t->finalize_recv(t->arg, &o->piece, &part, o->buffer)));
    return part.base == o->slice.base ? TB_OK : copy_box(x, &part, &o->slice);
}

static tb_status write_back(execution *x, operation *o) {
    tb_binding buffer;
    switch (o->way) {
    case WAY_DIRECT:
        x->counts.direct++;
        return TB_OK;
    case WAY_COPY:
        x->counts.copied++;
        if (is_empty(&o->slice))
            return TB_OK;
        TB_TRY(bind_buffer(o, &buffer));
        return copy_box(x, &buffer, &o->slice);
    case WAY_TRANSFORM:
        x->counts.transformed++;
        return call_recv(x, o);
    case WAY_ACCUMULATE:
        x->counts.accumulated++;
        return --o->param->left == 0 ? quantise(x, o->param) : TB_OK;
    }
    return TB_OK;
}

static tb_status finish(execution *x) {
    for (size_t i = 0; i < x->nops[0]; i++) {
        operation *o = &x->ops[0][i];
        tb_status status = write_back(x, o);
        if (status != TB_OK)
            return tb__fail_within(status, "%s: receive %zu, of parameter '%.100s'", x->copy->what, i, o->param->name);
    }
    return TB_OK;
}

/* ---- Execution ------------------------------------------------------------------------------------------------- */

static tb_status read_plan(execution *x, const tb_reshard_plan *plan) {
    TB_TRY(tb__struct_read(&x->plan, sizeof x->plan, plan, 0, "a tb_reshard_plan"));
    return x->plan.transform
               ? tb__struct_read(&x->transform, sizeof x->transform, x->plan.transform, 0, "a tb_transform")
               : TB_OK;
}

/* All ranks enter the run. A rank that could not prepare it reports why there. */
static tb_status execute(execution *x, const tb_reshard_plan *plan, int64_t deadline_ms) {
    tb_copy *copy = x->copy;
    tb_status status = read_plan(x, plan);
    if (status == TB_OK)
        status = prepare(x);
    if (status != TB_OK) {
        status = tb__fail_within(status, "%s", copy->peers[copy->self].label);
        copy->refused = tb__fault_of(status, tb_error_detail());
    }
    int64_t left_ms = tb__ms_until(deadline_ms);
    TB_TRY(tb_copy_run(copy, left_ms > 0 ? (int)left_ms : 1));
    copy->deadline_ms = deadline_ms;
    return finish(x);
}

tb_status tb_reshard_execute_plan(tb_copy *copy, const tb_reshard_plan *plan, int timeout_ms,
                                  tb_reshard_counts *counts) {
    execution x = {.copy = copy, .counts.size = sizeof x.counts};
    TB_TRY(tb__world_check(copy->world, "copy service"));
    if (timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    if (counts)
        TB_TRY(tb__struct_check(counts, "a tb_reshard_counts"));
    if (copy->is_running || copy->params.count)
        return tb__fail(TB_REFUSED, "%s: a run is under way", copy->what);
    int64_t deadline_ms = copy->deadline_ms = tb__world_deadline(copy->world, timeout_ms);
    tb_status status = execute(&x, plan, deadline_ms);
    tb__saved_detail why = tb__save_detail();
    tb__loop_lock(copy->world->loop);
    copy->params.count = 0;
    tb__loop_unlock(copy->world->loop);
    execution_fini(&x);
    if (status != TB_OK)
        return tb__fail(status, "%s", why.text);
    return counts ? tb__struct_write(counts, &x.counts, sizeof x.counts, "a tb_reshard_counts") : TB_OK;
}
