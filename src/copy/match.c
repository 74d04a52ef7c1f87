/* Merges the dimensions of views, pairs operations by id, and splits shapes until they are equal. */
#include "copy/match.h"

#include "base/dtype.h"
#include "base/index.h"
#include "base/int.h"
#include "base/opts.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Views ----------------------------------------------------------------------------------------------------- */

tb_dtype tb__match_carrier(uint32_t item_bits) {
    switch (item_bits) {
    case 4:
    case 8:
        return TB_U8;
    case 16:
        return TB_U16;
    case 32:
        return TB_U32;
    case 64:
        return TB_U64;
    default:
        return TB_DTYPE_NONE;
    }
}

/* Removes dimensions of length 1. */
static void drop_unit_dims(tb__match_view *v) {
    int kept = 0;
    for (int d = 0; d < v->shape.ndim; d++) {
        if (v->shape.dim[d] == 1)
            continue;
        v->shape.dim[kept] = v->shape.dim[d];
        v->strides[kept++] = v->strides[d];
    }
    v->shape.ndim = kept;
}

/* Two 4-bit items in a byte become one item of 8 bits. */
static tb_status pair_items(tb__match_view *v) {
    int last = v->shape.ndim - 1;
    if (last < 0 || v->strides[last] != 1 || v->shape.dim[last] % 2)
        return tb__fail(TB_INVALID, "a view of 4-bit items must have an even last dimension, with stride 1");
    v->shape.dim[last] /= 2;
    for (int d = 0; d < last; d++) {
        if (v->strides[d] % 2)
            return tb__fail(TB_INVALID, "stride %" PRId64 " of a view of 4-bit items is odd", v->strides[d]);
        v->strides[d] /= 2;
    }
    return TB_OK;
}

static void merge_dims(tb__match_view *v) {
    int kept = 0;
    for (int d = 0; d < v->shape.ndim; d++) {
        if (kept && v->strides[kept - 1] == v->strides[d] * v->shape.dim[d]) {
            v->shape.dim[kept - 1] *= v->shape.dim[d];
            v->strides[kept - 1] = v->strides[d];
        } else {
            v->shape.dim[kept] = v->shape.dim[d];
            v->strides[kept++] = v->strides[d];
        }
    }
    v->shape.ndim = kept;
}

tb_status tb__match_read(const tb_copy_view *view, tb__match_view *out) {
    if (view->ndim < 0 || view->ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a view has 0 to %d dimensions, not %d", TB_MAX_DIMS, view->ndim);
    tb_shape shape = {.ndim = view->ndim};
    memcpy(shape.dim, view->shape, (size_t)view->ndim * sizeof *shape.dim);
    tb__match_view v = {.data = view->data, .item_bits = tb_dtype_bits(view->dtype)};
    v.dtype = tb__match_carrier(v.item_bits);
    tb_binding binding;
    int64_t nelements;
    TB_TRY(tb_shape_size(&shape, view->dtype, &nelements, &v.nbytes));
    if (nelements > 0 && !view->data)
        return tb__fail(TB_INVALID, "a view's data is NULL, but it has %" PRId64 " elements", nelements);
    TB_TRY(tb_binding_contiguous(view->data, 0, view->dtype, &shape, &binding));
    if (view->strides)
        memcpy(binding.strides, view->strides, (size_t)view->ndim * sizeof *view->strides);
    uintptr_t first, last;
    TB_TRY(tb__binding_span(&binding, &first, &last));
    v.given_dtype = view->dtype;
    v.shape = v.given_shape = shape;
    memcpy(v.strides, binding.strides, sizeof v.strides);
    memcpy(v.given_strides, binding.strides, sizeof v.given_strides);
    drop_unit_dims(&v);
    if (nelements == 0) {
        v.shape = (tb_shape){.ndim = 1};
    } else {
        if (v.item_bits == 4)
            TB_TRY(pair_items(&v));
        drop_unit_dims(&v);
        merge_dims(&v);
    }
    if (v.shape.ndim == 0)
        v.shape = (tb_shape){.ndim = 1, .dim = {1}};
    if (v.shape.ndim == 1 && v.shape.dim[0] <= 1)
        v.strides[0] = 1;
    *out = v;
    return TB_OK;
}

/* ---- Shapes ---------------------------------------------------------------------------------------------------- */

/* From the last dimension on: of two lengths the shorter one must divide the longer one, whose quotient is compared
 * with the next. */
static bool split_to_common(const tb_shape *a, const tb_shape *b, tb_shape *out) {
    int64_t dims[2 * TB_MAX_DIMS], left_a = 1, left_b = 1;
    int i = a->ndim, j = b->ndim, n = 0;
    if (a->dim[0] == 0 || b->dim[0] == 0) {
        *out = (tb_shape){.ndim = 1};
        return a->dim[0] == b->dim[0];
    }
    for (;;) {
        while (left_a == 1 && i > 0)
            left_a = a->dim[--i];
        while (left_b == 1 && j > 0)
            left_b = b->dim[--j];
        int64_t step = tb__min64(left_a, left_b);
        if (step == 1)
            break;
        if (left_a % step || left_b % step || n == TB_MAX_DIMS)
            return false;
        dims[n++] = step;
        left_a /= step;
        left_b /= step;
    }
    if (left_a != left_b)
        return false;
    if (n == 0)
        dims[n++] = 1;
    *out = (tb_shape){.ndim = n};
    for (int d = 0; d < n; d++)
        out->dim[d] = dims[n - 1 - d];
    return true;
}

void tb__match_strides(const tb__match_view *view, int64_t *strides) {
    int i = view->shape.ndim;
    int64_t left = 1, stride = 1;
    for (int d = view->common.ndim; d-- > 0;) {
        while (left == 1 && i > 0) {
            left = view->shape.dim[--i];
            stride = view->strides[i];
        }
        strides[d] = stride;
        if (view->common.dim[d] > 0) {
            left /= view->common.dim[d];
            stride *= view->common.dim[d];
        }
    }
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

/* Below zero if `a` comes first; without the order of submission. */
static int compare_tasks(const tb__match_op *a, const tb__match_op *b) {
    if (a->has_no_id != b->has_no_id)
        return a->has_no_id ? 1 : -1;
    return (a->task_id > b->task_id) - (a->task_id < b->task_id);
}

int tb__match_compare(const void *a, const void *b) {
    const tb__match_op *x = a, *y = b;
    if (x->seat != y->seat)
        return x->seat < y->seat ? -1 : 1;
    int order = compare_tasks(x, y);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

bool tb__match_is_same_task(const tb__match_op *a, const tb__match_op *b) {
    return a->seat == b->seat && compare_tasks(a, b) == 0;
}

tb__op_name tb__match_name(const tb__match_op *op) {
    tb__op_name name;
    snprintf(name.text, sizeof name.text, op->has_no_id ? "operation %" PRIu64 " without a task id" : "task %" PRIu64,
             op->task_id);
    return name;
}

static void name_shape(const tb_shape *shape, char *out, size_t room) {
    size_t at = 0;
    out[0] = '\0';
    for (int d = 0; d < shape->ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%" PRId64, d ? "," : "", shape->dim[d]);
}

/* The source's strides in the target's shape, by PyTorch's broadcasting rules: from the last dimension on, lengths are
 * equal, or the source's is 1 or missing. */
static bool broadcast_strides(const tb__match_view *from, const tb__match_view *to, int64_t *strides) {
    int missing = to->given_shape.ndim - from->given_shape.ndim;
    if (missing < 0)
        return false;
    for (int d = 0; d < to->given_shape.ndim; d++) {
        int64_t length = d < missing ? 1 : from->given_shape.dim[d - missing];
        if (length != 1 && length != to->given_shape.dim[d])
            return false;
        strides[d] = length == 1 ? 0 : from->given_strides[d - missing];
    }
    return true;
}

static bool can_convert(const tb__match_view *from, const tb__match_view *to) {
    return from->given_dtype == to->given_dtype ? from->item_bits >= 8
                                                : tb__dtype_can_cast(from->given_dtype, to->given_dtype);
}

/* Both views get the target's shape, and their own dtypes. */
static tb_status convert_views(const char *label, const char *task, uint32_t i, tb__match_view *from,
                               tb__match_view *to) {
    int64_t strides[TB_MAX_DIMS] = {0};
    if (!can_convert(from, to))
        return tb__fail(TB_REFUSED, "tensor %" PRIu32 " of %s on %s: there is no cast from %s to %s", i, task, label,
                        tb_dtype_name(from->given_dtype), tb_dtype_name(to->given_dtype));
    if (!broadcast_strides(from, to, strides)) {
        char left[100], right[100];
        name_shape(&from->given_shape, left, sizeof left);
        name_shape(&to->given_shape, right, sizeof right);
        return tb__fail(TB_CONFLICT, "tensor %" PRIu32 " of %s on %s: [%s] can't be broadcast to [%s]", i, task, label,
                        left, right);
    }
    from->dtype = from->given_dtype;
    to->dtype = to->given_dtype;
    from->shape = from->common = to->shape = to->common = to->given_shape;
    memcpy(from->strides, strides, sizeof strides);
    memcpy(to->strides, to->given_strides, sizeof to->strides);
    from->nbytes = to->nbytes; /* zero if there is nothing to copy */
    return TB_OK;
}

static tb_status match_views(const tb__match_end *sender, const tb__match_end *receiver, const char *task, uint32_t i,
                             tb__match_view *from, tb__match_view *to) {
    if (from->nbytes != to->nbytes)
        return tb__fail(TB_CONFLICT,
                        "tensor %" PRIu32 " of %s has %" PRId64 " bytes on %s, which sends it, but %" PRId64
                        " on %s, which receives it",
                        i, task, from->nbytes, sender->label, to->nbytes, receiver->label);
    if (from->item_bits != to->item_bits)
        return tb__fail(TB_CONFLICT,
                        "tensor %" PRIu32 " of %s has items of %" PRIu32 " bits on %s, which sends it, but of %" PRIu32
                        " on %s, which receives it",
                        i, task, from->item_bits, sender->label, to->item_bits, receiver->label);
    if (!split_to_common(&from->shape, &to->shape, &from->common)) {
        char left[100], right[100];
        name_shape(&from->shape, left, sizeof left);
        name_shape(&to->shape, right, sizeof right);
        return tb__fail(
            TB_CONFLICT,
            "tensor %" PRIu32
            " of %s is strided like [%s] on %s, which sends it, and like [%s] on %s, which receives it: these "
            "can't be split into equal parts",
            i, task, left, sender->label, right, receiver->label);
    }
    to->common = from->common;
    from->common_kind = to->common_kind = tb__hash(tb__hash(1, from->memory_kind), to->memory_kind);
    return TB_OK;
}

static bool must_convert(const tb__match_view *from, const tb__match_view *to) {
    return from->given_dtype != to->given_dtype || from->nbytes != to->nbytes;
}

static tb_status match_op_views(const tb__match_end *sender, const tb__match_end *receiver, const tb__match_op *x,
                                const tb__match_op *y, bool converts) {
    tb__op_name task = tb__match_name(x);
    if (x->nviews != y->nviews)
        return tb__fail(TB_CONFLICT,
                        "%s has %" PRIu32 " tensors on %s, which sends it, but %" PRIu32 " on %s, which receives it",
                        task.text, x->nviews, sender->label, y->nviews, receiver->label);
    for (uint32_t i = 0; i < x->nviews; i++) {
        tb__match_view *from = &sender->views[x->first_view + i], *to = &receiver->views[y->first_view + i];
        TB_TRY(converts && must_convert(from, to) ? convert_views(sender->label, task.text, i, from, to)
                                                  : match_views(sender, receiver, task.text, i, from, to));
    }
    return TB_OK;
}

tb_status tb__match_ends(const tb__match_end *sender, const tb__match_end *receiver, bool converts) {
    for (size_t i = 0; i < sender->nops || i < receiver->nops; i++) {
        const tb__match_op *x = i < sender->nops ? &sender->ops[i] : NULL;
        const tb__match_op *y = i < receiver->nops ? &receiver->ops[i] : NULL;
        int order = !y ? -1 : !x ? 1 : compare_tasks(x, y);
        if (order < 0)
            return tb__fail(TB_CONFLICT, "%s sends %s to %s, which does not receive it", sender->label,
                            tb__match_name(x).text, receiver->label);
        if (order > 0)
            return tb__fail(TB_CONFLICT, "%s is to receive %s from %s, which does not send it", receiver->label,
                            tb__match_name(y).text, sender->label);
        TB_TRY(match_op_views(sender, receiver, x, y, converts));
    }
    return TB_OK;
}

/* ---- On one rank ----------------------------------------------------------------------------------------------- */

typedef TB_VEC(tb__match_op) op_list;
typedef TB_VEC(tb__match_view) view_list;

static tb_status read_ops(const char *label, const tb_copy_op *given, size_t n, op_list *ops, view_list *views) {
    uint64_t nwithout = 0;
    for (size_t i = 0; i < n; i++) {
        const tb_copy_op *g = &given[i];
        tb__match_op op = {.task_id = g->task_id,
                           .has_no_id = g->task_id == TB_NO_TASK,
                           .nviews = (uint32_t)g->nviews,
                           .first_view = views->count,
                           .number = i};
        if (op.has_no_id)
            op.task_id = nwithout++;
        if (g->nviews > UINT32_MAX)
            return tb__fail(TB_TOO_BIG, "%s: %s has %zu tensors", label, tb__match_name(&op).text, g->nviews);
        if (!tb__vec_push(ops, op) || !tb__vec_reserve(views, g->nviews))
            return TB_NO_MEMORY;
        for (size_t j = 0; j < g->nviews; j++) {
            tb_copy_view view;
            tb_status status = tb__struct_read(&view, sizeof view, g->views, j, "a tb_copy_view");
            if (status == TB_OK)
                status = tb__match_read(&view, &views->item[views->count]);
            if (status != TB_OK)
                return tb__fail_within(status, "%s: tensor %zu of %s", label, j, tb__match_name(&op).text);
            views->count++;
        }
    }
    if (n)
        qsort(ops->item, n, sizeof *ops->item, tb__match_compare);
    return TB_OK;
}

tb_status tb_copy_match_local(int32_t rank, const tb_copy_op *sends, size_t nsends, const tb_copy_op *recvs,
                              size_t nrecvs, size_t *recv_of) {
    char label[32];
    op_list out = {0}, in = {0};
    view_list views = {0};
    snprintf(label, sizeof label, "rank %" PRId32, rank);
    tb_status status = read_ops(label, sends, nsends, &out, &views);
    if (status == TB_OK)
        status = read_ops(label, recvs, nrecvs, &in, &views);
    if (status == TB_OK) {
        tb__match_end sender = {.label = label, .ops = out.item, .nops = nsends, .views = views.item};
        tb__match_end receiver = {.label = label, .ops = in.item, .nops = nrecvs, .views = views.item};
        status = tb__match_ends(&sender, &receiver, false);
    }
    for (size_t i = 0; i < nsends && status == TB_OK; i++)
        recv_of[out.item[i].number] = in.item[i].number;
    free(out.item);
    free(in.item);
    free(views.item);
    return status;
}
