/* Views: their text, and their effect on a shape and on one rank's memory. */
#include "reshard/view.h"

#include "base/text.h"

#include <inttypes.h>
#include <string.h>

static const struct {
    const char *name;
    int least, most; /* arguments */
} kinds[] = {
    [TB__SPLIT] = {"split", 2, 1 + TB_MAX_DIMS},
    [TB__MERGE] = {"merge", 2, 2},
    [TB__PERMUTE] = {"permute", 0, TB_MAX_DIMS},
    [TB__SLICE] = {"slice", 3, 3},
    [TB__PAD] = {"pad", 3, 3},
};

enum { NKINDS = sizeof kinds / sizeof *kinds };

static tb_status parse_op(const char **at, tb__view_op *out) {
    const char *begin = *at;
    size_t length = strspn(begin, "abcdefghijklmnopqrstuvwxyz");
    int kind = 0;
    while (kind < NKINDS && (strlen(kinds[kind].name) != length || strncmp(kinds[kind].name, begin, length) != 0))
        kind++;
    if (kind == NKINDS)
        return tb__fail(TB_INVALID, "expected split, merge, permute, slice or pad at '%.40s'", begin);
    tb__view_op op = {.kind = (tb__view_kind)kind};
    *at += length;
    if (!tb__accept(at, '('))
        return tb__fail(TB_INVALID, "expected '(' after %s at '%.40s'", kinds[kind].name, *at);
    while (!tb__accept(at, ')')) {
        if (op.nargs == kinds[kind].most)
            return tb__fail(TB_INVALID, "%s takes at most %d numbers, at '%.40s'", kinds[kind].name, kinds[kind].most,
                            begin);
        if ((op.nargs > 0 && !tb__accept(at, ',')) || !tb__read_int(at, &op.arg[op.nargs]))
            return tb__fail(TB_INVALID, "expected a number or ')' at '%.40s'", *at);
        op.nargs++;
    }
    if (op.nargs < kinds[kind].least)
        return tb__fail(TB_INVALID, "%s takes at least %d numbers, at '%.40s'", kinds[kind].name, kinds[kind].least,
                        begin);
    *out = op;
    return TB_OK;
}

tb_status tb_view_parse(const char *text, tb_view **out) {
    TB_VEC(tb__view_op) ops = {0};
    tb_status status = TB_OK;
    const char *at = text;
    for (tb__skip_space(&at); *at && status == TB_OK; tb__skip_space(&at)) {
        tb__view_op op;
        status = parse_op(&at, &op);
        if (status == TB_OK && !tb__vec_push(&ops, op))
            status = TB_NO_MEMORY;
    }
    tb_view *view = status == TB_OK ? tb__malloc(1, sizeof *view) : NULL;
    if (!view) {
        free(ops.item);
        return status == TB_OK ? TB_NO_MEMORY : tb__fail_within(status, "view '%.200s'", text);
    }
    *view = (tb_view){ops.count, ops.item};
    *out = view;
    return TB_OK;
}

void tb_view_destroy(tb_view *view) {
    if (!view)
        return;
    free(view->op);
    free(view);
}

/* Digits of one dim, slowest first. */
typedef struct digits {
    int count;
    tb__digit item[TB__MAX_DIGITS];
} digits;

static int64_t dim_length(const tb__form *form, int d) {
    int64_t length = 1;
    for (int i = form->first_digit[d]; i < form->first_digit[d + 1]; i++)
        length *= form->digit[i].count;
    return length;
}

tb_shape tb__form_shape(const tb__form *form) {
    tb_shape shape = {.ndim = form->ndim};
    for (int d = 0; d < form->ndim; d++)
        shape.dim[d] = dim_length(form, d);
    return shape;
}

static digits take_digits(const tb__form *form, int d) {
    digits out = {.count = form->first_digit[d + 1] - form->first_digit[d]};
    memcpy(out.item, form->digit + form->first_digit[d], (size_t)out.count * sizeof *out.item);
    return out;
}

/* Replaces dims d .. d+replaced-1 by `count` dims. */
static tb_status replace_dims(tb__form *form, int d, int replaced, const digits *dims, int count) {
    tb__form old = *form;
    int ndigits = old.first_digit[d];
    if (old.ndim - replaced + count > TB_MAX_DIMS)
        return tb__fail(TB_TOO_BIG, "that makes more than %d dims", TB_MAX_DIMS);
    form->ndim = d;
    for (int i = 0; i < count; i++) {
        if (ndigits + dims[i].count > TB__MAX_DIGITS)
            return tb__fail(TB_TOO_BIG, "the view is too long");
        form->first_digit[form->ndim++] = ndigits;
        memcpy(form->digit + ndigits, dims[i].item, (size_t)dims[i].count * sizeof *form->digit);
        ndigits += dims[i].count;
    }
    for (int i = d + replaced; i < old.ndim; i++) {
        int n = old.first_digit[i + 1] - old.first_digit[i];
        if (ndigits + n > TB__MAX_DIGITS)
            return tb__fail(TB_TOO_BIG, "the view is too long");
        form->first_digit[form->ndim++] = ndigits;
        memcpy(form->digit + ndigits, old.digit + old.first_digit[i], (size_t)n * sizeof *form->digit);
        ndigits += n;
    }
    form->first_digit[form->ndim] = ndigits;
    return TB_OK;
}

static tb_status read_dim(const tb__form *form, int64_t written, int *out) {
    int64_t d = written < 0 ? written + form->ndim : written;
    if (d < 0 || d >= form->ndim)
        return tb__fail(TB_INVALID, "there is no dim %" PRId64 " of %d", written, form->ndim);
    *out = (int)d;
    return TB_OK;
}

/* Computes the sizes of a split, including the one that is left out. */
static tb_status split_sizes(const tb__view_op *op, int64_t length, int64_t *sizes) {
    int64_t product = 1;
    int open = -1;
    for (int i = 0; i < op->nargs - 1; i++) {
        sizes[i] = op->arg[i + 1];
        if (sizes[i] == -1 && open < 0)
            open = i;
        else if (sizes[i] < 1)
            return tb__fail(TB_INVALID, "%" PRId64 " is not a size; one of them may be -1", sizes[i]);
        else if (__builtin_mul_overflow(product, sizes[i], &product))
            return tb__fail(TB_TOO_BIG, "the sizes multiply to more than 2^63");
    }
    if (open >= 0 ? length % product != 0 : length != product)
        return tb__fail(TB_INVALID, "a dim of %" PRId64 " can't be split into parts that multiply to %" PRId64, length,
                        product);
    if (open >= 0)
        sizes[open] = length / product;
    return TB_OK;
}

/* Takes `size` values off the fast end of `from`. */
static tb_status split_off(digits *from, int64_t size, digits *out) {
    tb__digit taken[TB__MAX_DIGITS];
    tb__digit last = from->count ? from->item[from->count - 1] : (tb__digit){0};
    int n = 0;
    while (size > 1) {
        tb__digit *digit = &from->item[from->count - 1];
        if (size % digit->count == 0) {
            size /= digit->count;
            taken[n++] = *digit;
            from->count--;
        } else if (digit->count % size == 0) {
            taken[n++] = (tb__digit){digit->axis, digit->stride, size};
            digit->stride *= size;
            digit->count /= size;
            size = 1;
        } else {
            return tb__fail(TB_REFUSED,
                            "the dim was merged from one of %" PRId64 " and others; it can't be split at %" PRId64,
                            digit->count, size);
        }
    }
    /* a digit of one value is kept, because it determines the ranks that hold it */
    if (n == 0)
        taken[n++] = (tb__digit){last.axis, last.stride, 1};
    out->count = n;
    for (int i = 0; i < n; i++)
        out->item[i] = taken[n - 1 - i];
    return TB_OK;
}

static tb_status apply_split(tb__form *form, const tb__view_op *op) {
    int d, count = op->nargs - 1;
    int64_t sizes[TB_MAX_DIMS] = {0};
    digits parts[TB_MAX_DIMS];
    TB_TRY(read_dim(form, op->arg[0], &d));
    TB_TRY(split_sizes(op, dim_length(form, d), sizes));
    digits from = take_digits(form, d);
    for (int i = count - 1; i > 0; i--) {
        TB_TRY(split_off(&from, sizes[i], &parts[i]));
        if (from.count == 0) /* only sizes of 1 are left */
            from = (digits){1, {{parts[i].item[0].axis, parts[i].item[0].stride * parts[i].item[0].count, 1}}};
    }
    parts[0] = from;
    return replace_dims(form, d, 1, parts, count);
}

/* Merges neighbouring digits of an axis that form one digit, or of which one has a single value. */
static void join_digits(digits *dim) {
    for (int i = dim->count - 1; i > 0; i--) {
        tb__digit *slow = &dim->item[i - 1], *fast = &dim->item[i];
        if (slow->axis != fast->axis)
            continue;
        if (fast->count == 1)
            *fast = *slow;
        else if (slow->count == 1 || slow->stride == fast->stride * fast->count)
            fast->count *= slow->count;
        else
            continue;
        memmove(slow, fast, (size_t)(dim->count - i) * sizeof *slow);
        dim->count--;
    }
}

static tb_status apply_merge(tb__form *form, const tb__view_op *op) {
    int first, last;
    TB_TRY(read_dim(form, op->arg[0], &first));
    TB_TRY(read_dim(form, op->arg[1], &last));
    if (last < first)
        return tb__fail(TB_INVALID, "dims %d to %d are no range", first, last);
    digits all = {.count = form->first_digit[last + 1] - form->first_digit[first]};
    memcpy(all.item, form->digit + form->first_digit[first], (size_t)all.count * sizeof *all.item);
    join_digits(&all);
    return replace_dims(form, first, last - first + 1, &all, 1);
}

static tb_status apply_permute(tb__form *form, const tb__view_op *op) {
    digits dims[TB_MAX_DIMS];
    unsigned seen = 0;
    int ndim = form->ndim;
    if (op->nargs != ndim)
        return tb__fail(TB_INVALID, "%d numbers for %d dims", op->nargs, ndim);
    for (int i = 0; i < ndim; i++) {
        int d;
        TB_TRY(read_dim(form, op->arg[i], &d));
        if (seen >> d & 1)
            return tb__fail(TB_INVALID, "dim %d stands there twice", d);
        seen |= 1U << d;
        dims[i] = take_digits(form, d);
    }
    return replace_dims(form, 0, ndim, dims, ndim);
}

static tb_status apply_slice(tb__form *form, int64_t dim, int64_t start, int64_t length) {
    int d;
    TB_TRY(read_dim(form, dim, &d));
    int64_t rest = dim_length(form, d);
    if (start < 0 || length < 1 || start > rest || length > rest - start)
        return tb__fail(TB_INVALID, "%" PRId64 " indices from %" PRId64 " on are not in a dim of %" PRId64, length,
                        start, rest);
    for (int i = form->first_digit[d]; i < form->first_digit[d + 1]; i++) {
        tb__digit *digit = &form->digit[i];
        rest /= digit->count;
        if (start % rest == 0 && length % rest == 0) {
            form->start[digit->axis] += start / rest * digit->stride;
            digit->count = length / rest;
            return TB_OK;
        }
        if (start / rest != (start + length - 1) / rest)
            break;
        form->start[digit->axis] += start / rest * digit->stride;
        digit->count = 1;
        start %= rest;
    }
    return tb__fail(TB_REFUSED, "the dim was merged from several, and the slice does not keep them whole");
}

static tb_status apply_op(tb__form *form, const tb__view_op *op) {
    switch (op->kind) {
    case TB__SPLIT:
        return apply_split(form, op);
    case TB__MERGE:
        return apply_merge(form, op);
    case TB__PERMUTE:
        return apply_permute(form, op);
    case TB__SLICE:
        return apply_slice(form, op->arg[0], op->arg[1], op->arg[2]);
    case TB__PAD: {
        int d;
        int64_t length, before = op->arg[1], after = op->arg[2];
        TB_TRY(read_dim(form, op->arg[0], &d));
        length = dim_length(form, d);
        if (before < 0 || after < 0 || before >= length || after >= length - before)
            return tb__fail(TB_INVALID, "a dim of %" PRId64 " can't have padding of %" PRId64 " and %" PRId64, length,
                            before, after);
        return apply_slice(form, d, before, length - before - after);
    }
    }
    return tb__fail(TB_INTERNAL, "%d is not an operation of views", (int)op->kind);
}

tb_status tb__form_init(tb__form *form, const tb_shape *storage, const tb__view_op *ops, size_t nops) {
    TB_TRY(tb_shape_size(storage, TB_U8, NULL, NULL));
    *form = (tb__form){.ndim = storage->ndim, .naxes = storage->ndim};
    for (int d = 0; d < storage->ndim; d++) {
        if (storage->dim[d] == 0)
            return tb__fail(TB_REFUSED, "dim %d of the stored tensor is empty; views need elements", d);
        form->digit[d] = (tb__digit){d, 1, storage->dim[d]};
        form->first_digit[d] = d;
        form->length[d] = storage->dim[d];
    }
    form->first_digit[form->ndim] = form->ndim;
    for (size_t i = 0; i < nops; i++) {
        tb_status status = apply_op(form, &ops[i]);
        if (status != TB_OK)
            return tb__fail_within(status, "operation %zu of the view, %s", i, kinds[ops[i].kind].name);
    }
    return TB_OK;
}
