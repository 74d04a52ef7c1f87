/* Merges the dimensions of views, pairs operations by id, and splits shapes until they are equal. */
#include "copy/match.h"

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
    v.shape = shape;
    memcpy(v.strides, binding.strides, sizeof v.strides);
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

/* From the last dimension on: of two lengths the shorter one must divide the longer one, whose rest meets the next. */
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

int tb__match_compare(const void *a, const void *b) {
    const tb__match_op *x = a, *y = b;
    if (x->seat != y->seat)
        return x->seat < y->seat ? -1 : 1;
    return (x->task_id > y->task_id) - (x->task_id < y->task_id);
}

static void name_shape(const tb_shape *shape, char *out, size_t room) {
    size_t at = 0;
    out[0] = '\0';
    for (int d = 0; d < shape->ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%" PRId64, d ? "," : "", shape->dim[d]);
}

static tb_status match_views(const tb__match_end *sender, const tb__match_end *receiver, uint64_t id, uint32_t i,
                             tb__match_view *from, tb__match_view *to) {
    if (from->nbytes != to->nbytes)
        return tb__fail(TB_CONFLICT,
                        "tensor %" PRIu32 " of task %" PRIu64 " has %" PRId64
                        " bytes on %s, which sends it, but %" PRId64 " on %s, which receives it",
                        i, id, from->nbytes, sender->label, to->nbytes, receiver->label);
    if (from->item_bits != to->item_bits)
        return tb__fail(TB_CONFLICT,
                        "tensor %" PRIu32 " of task %" PRIu64 " has items of %" PRIu32
                        " bits on %s, which sends it, but of %" PRIu32 " on %s, which receives it",
                        i, id, from->item_bits, sender->label, to->item_bits, receiver->label);
    if (!split_to_common(&from->shape, &to->shape, &from->common)) {
        char left[100], right[100];
        name_shape(&from->shape, left, sizeof left);
        name_shape(&to->shape, right, sizeof right);
        return tb__fail(TB_CONFLICT,
                        "tensor %" PRIu32 " of task %" PRIu64
                        " is strided like [%s] on %s, which sends it, and like [%s] on %s, which receives it: these "
                        "can't be split into equal parts",
                        i, id, left, sender->label, right, receiver->label);
    }
    to->common = from->common;
    return TB_OK;
}

tb_status tb__match_ends(const tb__match_end *sender, const tb__match_end *receiver) {
    for (size_t i = 0; i < sender->nops || i < receiver->nops; i++) {
        const tb__match_op *x = i < sender->nops ? &sender->ops[i] : NULL;
        const tb__match_op *y = i < receiver->nops ? &receiver->ops[i] : NULL;
        if (!y || (x && x->task_id < y->task_id))
            return tb__fail(TB_CONFLICT, "%s sends task %" PRIu64 " to %s, which does not receive it", sender->label,
                            x->task_id, receiver->label);
        if (!x || x->task_id > y->task_id)
            return tb__fail(TB_CONFLICT, "%s is to receive task %" PRIu64 " from %s, which does not send it",
                            receiver->label, y->task_id, sender->label);
        if (x->nviews != y->nviews)
            return tb__fail(TB_CONFLICT,
                            "task %" PRIu64 " has %" PRIu32 " tensors on %s, which sends it, but %" PRIu32
                            " on %s, which receives it",
                            x->task_id, x->nviews, sender->label, y->nviews, receiver->label);
        for (uint32_t j = 0; j < x->nviews; j++)
            TB_TRY(match_views(sender, receiver, x->task_id, j, &sender->views[x->first_view + j],
                               &receiver->views[y->first_view + j]));
    }
    return TB_OK;
}

/* ---- On one rank ----------------------------------------------------------------------------------------------- */

typedef TB_VEC(tb__match_op) op_list;
typedef TB_VEC(tb__match_view) view_list;

static tb_status read_ops(const char *label, const char *verb, const tb_copy_op *given, size_t n, op_list *ops,
                          view_list *views) {
    for (size_t i = 0; i < n; i++) {
        const tb_copy_op *g = &given[i];
        tb__match_op op = {
            .task_id = g->task_id, .nviews = (uint32_t)g->nviews, .first_view = views->count, .number = i};
        if (g->nviews == 0 || g->nviews > UINT32_MAX)
            return tb__fail(TB_INVALID, "%s: task %" PRIu64 " has %zu tensors", label, g->task_id, g->nviews);
        if (!tb__vec_push(ops, op) || !tb__vec_reserve(views, g->nviews))
            return TB_NO_MEMORY;
        for (size_t j = 0; j < g->nviews; j++) {
            tb_copy_view view;
            tb_status status = tb__struct_read(&view, sizeof view, g->views, j, "a tb_copy_view");
            if (status == TB_OK)
                status = tb__match_read(&view, &views->item[views->count]);
            if (status != TB_OK)
                return tb__fail_within(status, "%s: tensor %zu of task %" PRIu64, label, j, g->task_id);
            views->count++;
        }
    }
    if (n)
        qsort(ops->item, n, sizeof *ops->item, tb__match_compare);
    for (size_t i = 1; i < n; i++) {
        if (ops->item[i - 1].task_id == ops->item[i].task_id)
            return tb__fail(TB_CONFLICT, "%s %s task %" PRIu64 " twice", label, verb, ops->item[i].task_id);
    }
    return TB_OK;
}

tb_status tb_copy_match_local(int32_t rank, const tb_copy_op *sends, size_t nsends, const tb_copy_op *recvs,
                              size_t nrecvs, size_t *recv_of) {
    char label[32];
    op_list out = {0}, in = {0};
    view_list views = {0};
    snprintf(label, sizeof label, "rank %" PRId32, rank);
    tb_status status = read_ops(label, "sends", sends, nsends, &out, &views);
    if (status == TB_OK)
        status = read_ops(label, "receives", recvs, nrecvs, &in, &views);
    if (status == TB_OK) {
        tb__match_end sender = {.label = label, .ops = out.item, .nops = nsends, .views = views.item};
        tb__match_end receiver = {.label = label, .ops = in.item, .nops = nrecvs, .views = views.item};
        status = tb__match_ends(&sender, &receiver);
    }
    for (size_t i = 0; i < nsends && status == TB_OK; i++)
        recv_of[out.item[i].number] = in.item[i].number;
    free(out.item);
    free(in.item);
    free(views.item);
    return status;
}
