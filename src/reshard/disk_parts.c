/* Parts of the target's tensors: views of both sides, the shape of what both have, and whether the parts make up the
 * whole. */
#include "base/dtype.h"
#include "ir/ir.h"
#include "plan/plan.h"
#include "reshard/disk_inside.h"
#include "reshard/view.h"

#include <inttypes.h>
#include <string.h>

struct tb__disk_grid {
    tb_layout *layout;
    tb_shape shape;
    tb__side side;
    tb__grid grid;
};

tb_status tb__disk_grid(tb__disk *disk, const tb_layout *layout, const tb_shape *shape, tb__side side,
                        const tb__grid **out) {
    uint64_t hash = tb__hash(layout->hash, (uint64_t)side);
    for (int d = 0; d < shape->ndim; d++)
        hash = tb__hash(hash, (uint64_t)shape->dim[d]);
    size_t probe = 0, i;
    while ((i = tb__index_next(&disk->grid_index, hash, &probe)) != TB__NOWHERE) {
        const struct tb__disk_grid *one = disk->grids.item[i];
        if (one->side == side && tb__disk_same_shape(&one->shape, shape) && tb_layout_equal(one->layout, layout)) {
            *out = &one->grid;
            return TB_OK;
        }
    }
    struct tb__disk_grid *made = tb__arena_alloc(&disk->arena, 1, sizeof *made);
    if (!made)
        return TB_NO_MEMORY;
    *made = (struct tb__disk_grid){.layout = tb__layout_ref(layout), .shape = *shape, .side = side};
    tb_status status = tb__grid_init(&made->grid, made->layout, shape, side);
    bool is_kept = status == TB_OK && tb__index_add(&disk->grid_index, hash, disk->grids.count) &&
                   tb__vec_push(&disk->grids, made);
    if (!is_kept) {
        if (status == TB_OK)
            tb__grid_fini(&made->grid);
        tb_layout_destroy(made->layout);
        return status == TB_OK ? TB_NO_MEMORY : status;
    }
    *out = &made->grid;
    return TB_OK;
}

void tb__disk_free_grids(tb__disk *disk) {
    for (size_t i = 0; i < disk->grids.count; i++) {
        tb__grid_fini(&disk->grids.item[i]->grid);
        tb_layout_destroy(disk->grids.item[i]->layout);
    }
    free(disk->grids.item);
    tb__index_fini(&disk->grid_index);
}

/* ---- Shapes -------------------------------------------------------------------------------------------------- */

static tb_status parse_view(tb__disk *disk, const tb__disk_part *part, const char *text, tb_view **out) {
    const char *view;
    TB_TRY(tb__spec_expand(part->rule, part->from->name, text, &disk->arena, &view));
    return view ? tb_view_parse(view, out) : TB_OK;
}

static tb_status fail_rule(const tb__disk_part *part, const char *side, tb_status status) {
    return tb__fail_within(status, "%s: %s", part->rule->where, side);
}

tb_status tb__disk_part_shape(tb__disk *disk, tb__disk_part *part) {
    const tb__disk_stored *from = part->from;
    tb_status status = parse_view(disk, part, part->rule->src_form.view, &part->src_view);
    if (status == TB_OK && part->src_view && from->quant.format.kind)
        status = tb__fail(TB_REFUSED, "it is quantised, and so can't have a view");
    if (status == TB_OK && (part->src_view || part->rule->dst_form.view) && tb_dtype_bits(from->dtype) < 8)
        status = tb__fail(TB_REFUSED, "it is %s, which can't have a view", tb_dtype_name(from->dtype));
    part->shape = from->shape;
    if (status == TB_OK && part->src_view)
        status = tb_view_apply(part->src_view, &from->shape, from->layout, &part->shape, &part->src);
    if (status != TB_OK)
        return fail_rule(part, "src", status);
    status = parse_view(disk, part, part->rule->dst_form.view, &part->dst_view);
    return status == TB_OK ? TB_OK : fail_rule(part, "dst", status);
}

/* The dim an operation means; of `ndim` before it. */
static tb_status which_dim(const tb__view_op *op, int ndim, int *out) {
    int64_t d = op->arg[0] < 0 ? op->arg[0] + ndim : op->arg[0];
    if (d < 0 || d >= ndim)
        return tb__fail(TB_INVALID, "there is no dim %" PRId64 " of %d", op->arg[0], ndim);
    *out = (int)d;
    return TB_OK;
}

/* What a split was made of: its sizes tell, and where one is left out, what became of it. */
static tb_status undo_split(const tb__view_op *op, tb_shape *shape) {
    int n = op->nargs - 1, d;
    int64_t length = 1;
    TB_TRY(which_dim(op, shape->ndim - n + 1, &d));
    for (int i = 0; i < n; i++) {
        int64_t size = op->arg[i + 1] == -1 ? shape->dim[d + i] : op->arg[i + 1];
        if (__builtin_mul_overflow(length, size, &length))
            return tb__fail(TB_TOO_BIG, "the sizes multiply to more than 2^63");
    }
    shape->dim[d] = length;
    for (int i = d + 1; i + n - 1 < shape->ndim; i++)
        shape->dim[i] = shape->dim[i + n - 1];
    shape->ndim -= n - 1;
    return TB_OK;
}

static tb_status undo_permute(const tb__view_op *op, tb_shape *shape) {
    tb_shape before = *shape;
    if (op->nargs != shape->ndim)
        return tb__fail(TB_INVALID, "permute has %d numbers for %d dims", op->nargs, shape->ndim);
    for (int i = 0; i < op->nargs; i++) {
        int64_t d = op->arg[i] < 0 ? op->arg[i] + shape->ndim : op->arg[i];
        if (d < 0 || d >= shape->ndim)
            return tb__fail(TB_INVALID, "there is no dim %" PRId64 " of %d", op->arg[i], shape->ndim);
        before.dim[d] = shape->dim[i];
    }
    *shape = before;
    return TB_OK;
}

/* The least shape that the view can make *shape of. */
static tb_status undo_view(const tb_view *view, tb_shape *shape) {
    for (size_t i = view->nops; i-- > 0;) {
        const tb__view_op *op = &view->op[i];
        int d;
        switch (op->kind) {
        case TB__SPLIT:
            TB_TRY(undo_split(op, shape));
            break;
        case TB__PERMUTE:
            TB_TRY(undo_permute(op, shape));
            break;
        case TB__SLICE:
            TB_TRY(which_dim(op, shape->ndim, &d));
            if (__builtin_add_overflow(op->arg[1], op->arg[2], &shape->dim[d]))
                return tb__fail(TB_TOO_BIG, "the slice ends beyond 2^63");
            break;
        case TB__PAD:
            TB_TRY(which_dim(op, shape->ndim, &d));
            if (__builtin_add_overflow(shape->dim[d], op->arg[1], &shape->dim[d]) ||
                __builtin_add_overflow(shape->dim[d], op->arg[2], &shape->dim[d]))
                return tb__fail(TB_TOO_BIG, "the padding ends beyond 2^63");
            break;
        case TB__MERGE:
            return tb__fail(TB_INVALID, "the view merges dims, so that 'shape' is needed");
        }
    }
    return TB_OK;
}

tb_status tb__disk_target_shape(const tb__disk_part *parts, size_t count, tb_shape *out) {
    const tb_shape *said = NULL;
    for (size_t i = 0; i < count; i++) {
        const tb__spec_form *form = &parts[i].rule->dst_form;
        if (said && form->has_shape && !tb__disk_same_shape(said, &form->shape))
            return tb__fail(TB_INVALID, "%s says that it is %s, another rule says %s", parts[i].rule->where,
                            tb__disk_shape_text(&form->shape).text, tb__disk_shape_text(said).text);
        said = form->has_shape ? &form->shape : said;
    }
    for (size_t i = 0; i < count && !said; i++) {
        tb_shape least = parts[i].shape;
        tb_status status = parts[i].dst_view ? undo_view(parts[i].dst_view, &least) : TB_OK;
        if (status != TB_OK)
            return fail_rule(&parts[i], "dst: view", status);
        if (i > 0 && least.ndim != out->ndim)
            return tb__fail(TB_INVALID, "by %s it has %d dims, by another rule %d", parts[i].rule->where, least.ndim,
                            out->ndim);
        for (int d = 0; i > 0 && d < least.ndim; d++)
            least.dim[d] = least.dim[d] > out->dim[d] ? least.dim[d] : out->dim[d];
        *out = least;
    }
    if (said)
        *out = *said;
    return TB_OK;
}

tb_status tb__disk_part_plan(tb__disk *disk, const tb__disk_tensor *t, tb__disk_part *part) {
    /* The first replica serves everything: what is read twice is in the page cache the second time. */
    const tb_plan_opts opts = {.size = sizeof opts, .unbalanced = true};
    const tb_layout *src = part->src ? part->src : part->from->layout;
    tb_dtype dtype = part->from->dtype;
    tb_shape shape = t->shape;
    tb_layout *viewed = NULL;
    tb_status status = TB_OK;
    if (part->dst_view)
        status = tb_view_apply(part->dst_view, &t->shape, t->dst, &shape, &viewed);
    if (status == TB_OK && !tb__disk_same_shape(&shape, &part->shape))
        status = tb__fail(TB_INVALID, "'%.100s' gives %s, but there is room for %s", part->from->name,
                          tb__disk_shape_text(&part->shape).text, tb__disk_shape_text(&shape).text);
    if (status == TB_OK)
        status = tb_plan_cache_get(disk->plans, src, viewed ? viewed : t->dst, &shape, dtype, &opts, &part->plan);
    tb_layout_destroy(viewed);
    if (status != TB_OK)
        return fail_rule(part, "dst", status);
    /* A dtype in a spec asks for what may be lost, too. */
    bool may_lose = tb_dtype_bits(t->band_dtype) <= 8 || tb__dtype_class_of(t->band_dtype) == TB__INTEGER;
    return tb__wire_dtype(dtype, t->band_dtype, may_lose ? t->band_dtype : TB_DTYPE_NONE, &part->wire_dtype);
}

/* ---- Whether the parts make up the whole ----------------------------------------------------------------------- */

typedef TB_VEC(tb_segment) segments;

/* What a part takes of a target's dimension: ascending, for its digits are those of an index. */
static tb_status list_taken(const tb__form *form, int axis, segments *out) {
    const tb__digit *digit[TB__MAX_DIGITS] = {NULL};
    int64_t at[TB__MAX_DIGITS] = {0}, run = 1;
    int n = 0;
    for (int i = 0; i < form->first_digit[form->ndim]; i++) { /* slowest first */
        const tb__digit *one = &form->digit[i];
        int k = n;
        if (one->axis != axis || one->count == 1)
            continue;
        for (; k > 0 && digit[k - 1]->stride < one->stride; k--)
            digit[k] = digit[k - 1];
        digit[k] = one;
        n++;
    }
    while (n > 0 && digit[n - 1]->stride == run)
        run *= digit[--n]->count;
    for (;;) {
        int64_t start = form->start[axis];
        for (int i = 0; i < n; i++)
            start += at[i] * digit[i]->stride;
        if (out->count > 0 && out->item[out->count - 1].stop == start)
            out->item[out->count - 1].stop += run;
        else if (!tb__vec_push(out, ((tb_segment){start, start + run})))
            return TB_NO_MEMORY;
        int i = n - 1;
        while (i >= 0 && ++at[i] == digit[i]->count)
            at[i--] = 0;
        if (i < 0)
            return TB_OK;
    }
}

static bool overlap(const segments *a, const segments *b) {
    if (a->item[0].start >= b->item[b->count - 1].stop || b->item[0].start >= a->item[a->count - 1].stop)
        return false;
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        if (a->item[i].start < b->item[k].stop && b->item[k].start < a->item[i].stop)
            return true;
        if (a->item[i].stop <= b->item[k].stop)
            i++;
        else
            k++;
    }
    return false;
}

/* What a part takes of the target, or padding of its view. */
typedef struct cover {
    const tb__disk_part *part;
    bool is_padding;
    segments dim[TB_MAX_DIMS];
    int64_t nelements;
} cover;

typedef TB_VEC(cover) covers;

static bool same_cover(const cover *a, const cover *b, int ndim) {
    for (int d = 0; d < ndim; d++) {
        size_t n = a->dim[d].count;
        if (n != b->dim[d].count || memcmp(a->dim[d].item, b->dim[d].item, n * sizeof *a->dim[d].item) != 0)
            return false;
    }
    return true;
}

static void free_cover(cover *one) {
    for (int d = 0; d < TB_MAX_DIMS; d++)
        free(one->dim[d].item);
}

/* Several parts may have the same padding. */
static tb_status add_cover(const tb__disk_tensor *t, const tb__disk_part *part, const tb__form *form, bool is_padding,
                           covers *out) {
    cover one = {.part = part, .is_padding = is_padding, .nelements = 1};
    tb_status status = TB_OK;
    for (int a = 0; a < t->shape.ndim && status == TB_OK; a++) {
        int64_t length = 0;
        status = list_taken(form, a, &one.dim[a]);
        for (size_t i = 0; i < one.dim[a].count; i++)
            length += one.dim[a].item[i].stop - one.dim[a].item[i].start;
        one.nelements *= length;
    }
    bool is_known = false;
    for (size_t i = 0; i < out->count && is_padding && !is_known; i++)
        is_known = out->item[i].is_padding && same_cover(&out->item[i], &one, t->shape.ndim);
    if (status == TB_OK && !is_known && !tb__vec_push(out, one))
        status = TB_NO_MEMORY;
    if (status != TB_OK || is_known)
        free_cover(&one);
    return status;
}

/* The padding at one end of a dim is what the view would show if it sliced that instead. */
static tb_status add_padding(const tb__disk_tensor *t, const tb__disk_part *part, size_t pad, covers *out) {
    tb__form form;
    tb__view_op *ops = tb__memdup(part->dst_view->op, pad + 1, sizeof *ops);
    if (!ops)
        return TB_NO_MEMORY;
    const tb__view_op op = ops[pad];
    tb_status status = tb__form_init(&form, &t->shape, ops, pad);
    int d = 0;
    if (status == TB_OK)
        status = which_dim(&op, form.ndim, &d);
    int64_t length = status == TB_OK ? tb__form_shape(&form).dim[d] : 0;
    for (int i = 0; i < 2 && status == TB_OK; i++) {
        if (op.arg[1 + i] == 0)
            continue;
        ops[pad] = (tb__view_op){TB__SLICE, 3, {d, i ? length - op.arg[2] : 0, op.arg[1 + i]}};
        status = tb__form_init(&form, &t->shape, ops, pad + 1);
        if (status == TB_OK)
            status = add_cover(t, part, &form, true, out);
    }
    free(ops);
    return status;
}

static tb_status find_covers(tb__disk_tensor *t, const tb__disk_part *part, covers *out) {
    size_t nops = part->dst_view ? part->dst_view->nops : 0;
    tb__form form;
    TB_TRY(tb__form_init(&form, &t->shape, nops ? part->dst_view->op : NULL, nops));
    TB_TRY(add_cover(t, part, &form, false, out));
    for (size_t i = 0; i < nops; i++) {
        const tb__view_op *op = &part->dst_view->op[i];
        if (op->kind != TB__PAD || (op->arg[1] == 0 && op->arg[2] == 0))
            continue;
        t->has_padding = true;
        TB_TRY(add_padding(t, part, i, out));
    }
    return TB_OK;
}

static tb_status compare_covers(const tb__disk_tensor *t, const covers *all) {
    int64_t total = 1, taken = 0;
    for (int d = 0; d < t->shape.ndim; d++)
        total *= t->shape.dim[d];
    for (size_t i = 0; i < all->count; i++) {
        const cover *one = &all->item[i];
        taken += one->nelements;
        for (size_t k = 0; k < i; k++) {
            const cover *other = &all->item[k];
            bool meet = true;
            for (int d = 0; d < t->shape.ndim && meet; d++)
                meet = overlap(&one->dim[d], &other->dim[d]);
            if (meet)
                return tb__fail(TB_INVALID, "%s'%.100s' and %s'%.100s' become the same elements of it",
                                other->is_padding ? "padding of " : "", other->part->from->name,
                                one->is_padding ? "padding of " : "", one->part->from->name);
        }
    }
    if (taken == total)
        return TB_OK;
    return tb__fail(TB_INVALID, "its %zu part%s and padding have %" PRId64 " of its %" PRId64 " elements", t->nparts,
                    t->nparts == 1 ? "" : "s", taken, total);
}

tb_status tb__disk_check_cover(tb__disk_tensor *t) {
    covers all = {0};
    tb_status status = TB_OK;
    if (t->nparts == 1 && !t->parts[0].dst_view)
        return TB_OK;
    for (size_t i = 0; i < t->nparts && status == TB_OK; i++) {
        status = find_covers(t, &t->parts[i], &all);
        if (status != TB_OK)
            status = fail_rule(&t->parts[i], "dst", status);
    }
    if (status == TB_OK)
        status = compare_covers(t, &all);
    for (size_t i = 0; i < all.count; i++)
        free_cover(&all.item[i]);
    free(all.item);
    return status;
}
