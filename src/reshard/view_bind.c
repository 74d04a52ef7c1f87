/* The binding of a rank's part of a canonical tensor, and the padding in its storage. */
#include "base/dtype.h"
#include "reshard/view.h"

#include <inttypes.h>
#include <string.h>

/* A rank's place in the stored tensor, and its lists there. */
typedef struct place {
    bool is_member;
    tb__spans list[TB_MAX_DIMS];
} place;

static tb_status find_rank_place(const tb__grid *grid, int32_t rank, tb__arena *arena, place *out) {
    tb__place at;
    out->is_member = tb__grid_place(grid, rank, &at);
    for (int d = 0; d < grid->shape.ndim && out->is_member; d++)
        TB_TRY(tb__axis_list(&grid->axis[d], at.coord[d], arena, &out->list[d]));
    return TB_OK;
}

static tb_status check_binding(const place *at, const tb_shape *shape, const tb_binding *binding) {
    if (binding->shape.ndim != shape->ndim)
        return tb__fail(TB_INVALID, "the binding has %d dims, and the stored tensor %d", binding->shape.ndim,
                        shape->ndim);
    for (int d = 0; d < shape->ndim; d++) {
        int64_t length = 0;
        for (size_t i = 0; i < at->list[d].count; i++)
            length += at->list[d].item[i].stop - at->list[d].item[i].start;
        if (length != binding->shape.dim[d])
            return tb__fail(TB_INVALID, "dim %d of the binding is %" PRId64 " long, but the rank has %" PRId64, d,
                            binding->shape.dim[d], length);
    }
    return TB_OK;
}

/* The digits of a canonical dim are one dim in memory if each begins where the faster ones end. */
static tb_status bind_dim(const tb__form *form, const tb__share *share, const tb_binding *from, int d,
                          tb_binding *out) {
    int64_t length = 1, stride = 0;
    for (int i = form->first_digit[d + 1] - 1; i >= form->first_digit[d]; i--) {
        int axis = form->digit[i].axis;
        int64_t n = share[axis].values[i].length, step;
        if (n == 1)
            continue;
        if (__builtin_mul_overflow(share[axis].step[i], from->strides[axis], &step))
            return tb__fail(TB_TOO_BIG, "the stride of dim %d, %" PRId64 ", reaches beyond all memory", axis,
                            from->strides[axis]);
        if (length > 1 && step != stride * length)
            return tb__fail(TB_REFUSED, "dim %d of the view is merged from dims that do not follow on one another", d);
        stride = length > 1 ? stride : step;
        length *= n;
    }
    out->shape.dim[d] = length;
    out->strides[d] = length > 1 ? stride : 1;
    return TB_OK;
}

static tb_status bind_form(const tb__form *form, const place *at, const tb_binding *from, tb__arena *arena,
                           tb_binding *out, bool *is_empty) {
    tb__share *share = tb__arena_alloc(arena, (size_t)form->naxes, sizeof *share);
    if (!share)
        return TB_NO_MEMORY;
    *is_empty = !at->is_member;
    int64_t offset = 0;
    for (int a = 0; a < form->naxes && !*is_empty; a++) {
        int64_t before;
        TB_TRY(tb__share_find(form, a, at->list[a], arena, &share[a]));
        *is_empty = share[a].is_empty;
        if (*is_empty)
            break;
        if (__builtin_mul_overflow(share[a].origin, from->strides[a], &before) ||
            __builtin_add_overflow(offset, before, &offset) || offset > INT64_MAX / 64 || offset < INT64_MIN / 64)
            return tb__fail(TB_TOO_BIG, "the stride of dim %d, %" PRId64 ", reaches beyond all memory", a,
                            from->strides[a]);
    }
    *out = *from;
    out->shape = (tb_shape){.ndim = form->ndim};
    memset(out->strides, 0, sizeof out->strides);
    if (*is_empty)
        return TB_OK;
    for (int d = 0; d < form->ndim; d++)
        TB_TRY(bind_dim(form, share, from, d, out));
    int64_t bits = offset * (int64_t)tb_dtype_bits(from->dtype);
    if (bits % 8 != 0)
        return tb__fail(TB_REFUSED, "the part begins in the middle of a byte");
    out->offset += bits / 8;
    return TB_OK;
}

/* The shape of a part without elements: that of the canonical layout. */
static tb_status shape_of_empty(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                                tb_shape *out) {
    tb_shape canonical;
    tb_layout *viewed;
    tb_local local;
    TB_TRY(tb_view_apply(view, shape, layout, &canonical, &viewed));
    tb_status status = tb_layout_local(viewed, &canonical, rank, &local);
    tb_layout_destroy(viewed);
    TB_TRY(status);
    *out = local.shape;
    tb_local_fini(&local);
    return TB_OK;
}

static tb_status bind_ops(const tb__view_op *ops, size_t nops, const tb_shape *shape, const tb_layout *layout,
                          int32_t rank, const tb_binding *binding, tb_binding *out, bool *is_empty) {
    tb__form form;
    tb__grid grid;
    tb__arena arena = {0};
    place at = {0};
    TB_TRY(tb__form_init(&form, shape, ops, nops));
    TB_TRY(tb__grid_init(&grid, layout, shape, TB__SOURCE));
    tb_status status = find_rank_place(&grid, rank, &arena, &at);
    if (status == TB_OK)
        status = check_binding(&at, shape, binding);
    if (status == TB_OK)
        status = bind_form(&form, &at, binding, &arena, out, is_empty);
    tb__arena_fini(&arena);
    tb__grid_fini(&grid);
    return status;
}

tb_status tb_view_bind(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                       const tb_binding *binding, tb_binding *out) {
    tb_binding bound;
    bool is_empty;
    TB_TRY(bind_ops(view ? view->op : NULL, view ? view->nops : 0, shape, layout, rank, binding, &bound, &is_empty));
    if (is_empty)
        TB_TRY(shape_of_empty(view, shape, layout, rank, &bound.shape));
    *out = bound;
    return TB_OK;
}

/* The padding at one end of a dim is the view's result if it sliced the padding instead. */
static tb_status find_padding(const tb_view *view, size_t pad, bool is_after, const tb_shape *shape,
                              const tb_layout *layout, int32_t rank, const tb_binding *binding, tb_binding *out,
                              bool *is_empty) {
    tb__view_op *ops = tb__memdup(view->op, pad + 1, sizeof *ops);
    if (!ops)
        return TB_NO_MEMORY;
    int64_t before = ops[pad].arg[1], after = ops[pad].arg[2];
    tb__form form;
    tb_status status = tb__form_init(&form, shape, ops, pad);
    if (status == TB_OK) {
        int64_t d = ops[pad].arg[0] < 0 ? ops[pad].arg[0] + form.ndim : ops[pad].arg[0];
        int64_t length = tb__form_shape(&form).dim[d];
        ops[pad] = (tb__view_op){TB__SLICE, 3, {d, is_after ? length - after : 0, is_after ? after : before}};
        status = bind_ops(ops, pad + 1, shape, layout, rank, binding, out, is_empty);
    }
    free(ops);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "the padding");
}

tb_status tb_view_padding(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                          const tb_binding *binding, tb_binding **out, size_t *count) {
    TB_VEC(tb_binding) boxes = {0};
    tb__form form;
    tb_status status = tb__form_init(&form, shape, view ? view->op : NULL, view ? view->nops : 0);
    for (size_t i = 0; view && i < 2 * view->nops && status == TB_OK; i++) {
        const tb__view_op *op = &view->op[i / 2];
        tb_binding box;
        bool is_empty;
        if (op->kind != TB__PAD || op->arg[1 + i % 2] == 0)
            continue;
        status = find_padding(view, i / 2, i % 2 == 1, shape, layout, rank, binding, &box, &is_empty);
        if (status == TB_OK && !is_empty && !tb__vec_push(&boxes, box))
            status = TB_NO_MEMORY;
    }
    if (status != TB_OK) {
        free(boxes.item);
        return status;
    }
    *out = boxes.item;
    *count = boxes.count;
    return TB_OK;
}
