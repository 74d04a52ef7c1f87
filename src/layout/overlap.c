/* Finds overlapping bindings. Those whose spans intersect are compared in pairs: two share a byte if, for some indices,
 * the difference of their addresses is small enough. The difference is one linear form over the indices of both
 * (form.c). */
#include "layout/overlap.h"

#include "base/mem.h"
#include "layout/form.h"

#include <inttypes.h>

enum { STEPS = 1 << 20 }; /* of the search for one pair, one or two seconds; usual pairs take a few */

#define MOST_BYTES (INT64_C(1) << 58) /* more than an address space has */

/* A binding's bytes, counted in halves, because f4e2m1 has two elements to a byte: runs of `length` that begin at
 * `start` plus a choice of the dims. */
typedef struct box {
    size_t binding; /* its position in its list */
    bool is_other;  /* it is in the second list */
    bool is_packed;
    uintptr_t first, last;     /* its span */
    int64_t start, length;     /* start: beyond the span's first byte, 0 or 1 */
    int ndim;                  /* dims that are not part of the runs */
    tb__term dim[TB_MAX_DIMS]; /* ascending steps */
} box;

/* Elements reached before and after the one at index 0. */
static bool find_reach(const tb_binding *binding, int64_t *before, int64_t *after) {
    *before = *after = 0;
    for (int d = 0; d < binding->shape.ndim; d++) {
        int64_t reach, *side;
        if (__builtin_mul_overflow(binding->shape.dim[d] - 1, binding->strides[d], &reach) || reach == INT64_MIN)
            return false;
        side = reach < 0 ? before : after;
        if (__builtin_add_overflow(*side, reach < 0 ? -reach : reach, side))
            return false;
    }
    return true;
}

/* The span in halves of bytes: from base + offset, `low` before to `high` after. */
static tb_status find_halves(const tb_binding *binding, int64_t *low, int64_t *high) {
    int64_t halves = tb_dtype_bits(binding->dtype) / 4, before, after;
    if (!find_reach(binding, &before, &after) || before > MOST_BYTES || after > MOST_BYTES ||
        before + after > 2 * MOST_BYTES / halves - 1)
        return tb__fail(TB_TOO_BIG, "the binding spans more than 2^58 bytes");
    *low = before * halves;
    *high = (after + 1) * halves;
    return TB_OK;
}

tb_status tb__binding_span(const tb_binding *binding, uintptr_t *first, uintptr_t *last) {
    int64_t nelements, low, high;
    uintptr_t begin, end;
    TB_TRY(tb_shape_size(&binding->shape, binding->dtype, &nelements, NULL));
    if (nelements == 0) {
        *first = *last = (uintptr_t)binding->base;
        return TB_OK;
    }
    TB_TRY(find_halves(binding, &low, &high));
    if (__builtin_add_overflow((uintptr_t)binding->base, binding->offset, &begin) ||
        __builtin_add_overflow(begin, high / 2 + high % 2, &end) ||
        __builtin_sub_overflow(begin, low / 2 + low % 2, &begin))
        return tb__fail(TB_TOO_BIG, "the binding at %p, from byte %" PRId64 ", leaves the address space", binding->base,
                        binding->offset);
    *first = begin;
    *last = end;
    return TB_OK;
}

/* Lists the dims that have more than one index, ascending, in elements and without direction. Returns their number. */
static int list_dims(const tb_binding *binding, tb__term *out) {
    int count = 0;
    for (int d = 0; d < binding->shape.ndim; d++) {
        if (binding->shape.dim[d] == 1)
            continue;
        tb__term term = {.step = binding->strides[d] < 0 ? -binding->strides[d] : binding->strides[d],
                         .most = binding->shape.dim[d] - 1};
        int i = count++;
        for (; i > 0 && out[i - 1].step > term.step; i--)
            out[i] = out[i - 1];
        out[i] = term;
    }
    return count;
}

static tb_status make_box(const tb_binding *binding, box *out) {
    int64_t halves = tb_dtype_bits(binding->dtype) / 4, low, high;
    tb__term dims[TB_MAX_DIMS];
    TB_TRY(tb__binding_span(binding, &out->first, &out->last));
    if (out->first == out->last)
        return TB_OK;
    TB_TRY(find_halves(binding, &low, &high));
    out->is_packed = halves == 1;
    out->start = low % 2;
    out->length = halves;
    int ndim = list_dims(binding, dims);
    for (int d = 0; d < ndim; d++) {
        tb__term dim = {.step = dims[d].step * halves, .most = dims[d].most};
        if (dim.step <= out->length) /* the runs meet */
            out->length += dim.step * dim.most;
        else
            out->dim[out->ndim++] = dim;
    }
    return TB_OK;
}

/* Whether a and b have a half of a byte in common. */
static tb_status compare_halves(const box *a, const box *b, int64_t *steps, bool *is_shared) {
    /* Addresses in b count backwards, from its last run: then all steps are positive, and equal steps can be merged. */
    tb__term terms[2 * TB_MAX_DIMS];
    int64_t distance = 2 * (int64_t)(b->first - a->first) + b->start - a->start; /* of b's first run from a's */
    int count = 0;
    for (int i = 0, j = 0; i < a->ndim || j < b->ndim;) {
        bool from_a = j == b->ndim || (i < a->ndim && a->dim[i].step <= b->dim[j].step);
        const tb__term *dim = from_a ? &a->dim[i++] : &b->dim[j++];
        if (!from_a)
            distance += dim->step * dim->most;
        if (count > 0 && terms[count - 1].step == dim->step)
            terms[count - 1].most += dim->most;
        else
            terms[count++] = *dim;
    }
    return tb__form_reaches(terms, count, distance - (a->length - 1), distance + b->length - 1, steps, is_shared);
}

/* Whether two packed bindings share a byte. One of them is widened to whole bytes, which needs runs that all begin in
 * the same half. */
static tb_status compare_packed(const box *a, const box *b, int64_t *steps, bool *is_shared) {
    int d = 0;
    while (d < b->ndim && b->dim[d].step % 2 == 0)
        d++;
    box part = *b;
    if (d == b->ndim) {
        part.length = (b->start + b->length + 1) / 2 * 2;
        part.start = 0;
        /* Wider runs may meet; the form then finds that they leave no gap. */
        return compare_halves(a, &part, steps, is_shared);
    }
    /* Compare even and odd indices of the dim separately, each at twice the step. */
    part.dim[d].step = 2 * b->dim[d].step;
    for (int odd = 0; odd < 2; odd++) {
        part.dim[d].most = (b->dim[d].most - odd) / 2;
        int64_t start = b->start + odd * b->dim[d].step;
        part.first = b->first + (uintptr_t)(start / 2);
        part.start = start % 2;
        box sorted = part;
        for (int i = d; i + 1 < sorted.ndim && sorted.dim[i].step > sorted.dim[i + 1].step; i++) {
            tb__term larger = sorted.dim[i];
            sorted.dim[i] = sorted.dim[i + 1];
            sorted.dim[i + 1] = larger;
        }
        TB_TRY(compare_packed(a, &sorted, steps, is_shared));
        if (*is_shared)
            return TB_OK;
    }
    return TB_OK;
}

static bool is_even(const box *b) {
    for (int d = 0; d < b->ndim; d++) {
        if (b->dim[d].step % 2 != 0)
            return false;
    }
    return true;
}

static tb_status boxes_share_byte(const box *a, const box *b, bool *is_shared) {
    int64_t steps = STEPS;
    if (a->is_packed && b->is_packed)
        return is_even(a) ? compare_packed(b, a, &steps, is_shared) : compare_packed(a, b, &steps, is_shared);
    return compare_halves(a, b, &steps, is_shared);
}

/* Whether two indices address the same element. In the outermost dim where they differ, they differ by at least one
 * step; in the dims inside, by anything. */
static tb_status compare_with_itself(const tb_binding *binding, bool *is_shared) {
    tb__term dims[TB_MAX_DIMS], terms[TB_MAX_DIMS];
    int ndim = list_dims(binding, dims);
    int64_t steps = STEPS, inside = 0; /* inside: the most that the dims before d can reach */
    *is_shared = false;
    for (int d = 0; d < ndim && !*is_shared; d++) {
        if (dims[d].step <= inside || dims[d].step == 0) {
            for (int i = 0; i < d; i++)
                terms[i] = (tb__term){dims[i].step, 2 * dims[i].most};
            terms[d] = (tb__term){dims[d].step, dims[d].most - 1};
            int64_t wanted = inside - dims[d].step;
            TB_TRY(tb__form_reaches(terms, d + 1, wanted, wanted, &steps, is_shared));
        }
        inside += dims[d].step * dims[d].most;
    }
    return TB_OK;
}

static int compare_first(const void *a, const void *b) {
    const box *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Adds the boxes of those that have elements. */
static tb_status add_boxes(const tb_binding *bindings, size_t n, bool is_other, box *boxes, size_t *count) {
    for (size_t i = 0; i < n; i++) {
        box made = {.binding = i, .is_other = is_other};
        tb_status status = make_box(&bindings[i], &made);
        if (status != TB_OK)
            return tb__fail_within(status, "binding %zu", i);
        if (made.first < made.last)
            boxes[(*count)++] = made;
    }
    return TB_OK;
}

static tb_status fail_pair(tb_status status, const box *a, const box *b) {
    if (status == TB_TOO_BIG)
        tb__set_detail("whether binding %zu overlaps with binding %zu%s takes too long to find out", a->binding,
                       b->binding, b->is_other ? " of the others" : "");
    return status;
}

static tb_status find_pair(box *boxes, size_t count, size_t n, size_t *a, size_t *b) {
    qsort(boxes, count, sizeof *boxes, compare_first);
    for (size_t i = 0; i < count; i++) {
        for (size_t j = i + 1; j < count && boxes[j].first < boxes[i].last; j++) {
            bool is_shared;
            tb_status status = boxes_share_byte(&boxes[i], &boxes[j], &is_shared);
            size_t x = boxes[i].binding, y = boxes[j].binding;
            if (status != TB_OK)
                return fail_pair(status, &boxes[x < y ? i : j], &boxes[x < y ? j : i]);
            if (is_shared) {
                *a = x < y ? x : y;
                *b = x < y ? y : x;
                return TB_OK;
            }
        }
    }
    *a = *b = n;
    return TB_OK;
}

tb_status tb__bindings_find_overlap(const tb_binding *bindings, size_t n, size_t *a, size_t *b) {
    box *boxes = tb__malloc(n, sizeof *boxes);
    if (!boxes)
        return TB_NO_MEMORY;
    size_t count = 0;
    tb_status status = add_boxes(bindings, n, false, boxes, &count);
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        bool is_shared;
        size_t k = boxes[i].binding;
        status = compare_with_itself(&bindings[k], &is_shared);
        if (status == TB_TOO_BIG)
            tb__set_detail("whether binding %zu overlaps with itself takes too long to find out", k);
        if (status == TB_OK && is_shared) {
            *a = *b = k;
            goto out;
        }
    }
    if (status == TB_OK)
        status = find_pair(boxes, count, n, a, b);
out:
    free(boxes);
    return status;
}

tb_status tb__bindings_mark_overlaps(const tb_binding *bindings, size_t n, const tb_binding *others, size_t nothers,
                                     bool *marks) {
    if (n > SIZE_MAX - nothers)
        return tb__fail(TB_TOO_BIG, "%zu and %zu bindings", n, nothers);
    box *boxes = tb__malloc(n + nothers, sizeof *boxes);
    if (!boxes)
        return TB_NO_MEMORY;
    size_t count = 0;
    tb_status status = add_boxes(bindings, n, false, boxes, &count);
    if (status == TB_OK)
        status = add_boxes(others, nothers, true, boxes, &count);
    for (size_t i = 0; i < n; i++)
        marks[i] = false;
    qsort(boxes, count, sizeof *boxes, compare_first);
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        for (size_t j = i + 1; j < count && boxes[j].first < boxes[i].last && status == TB_OK; j++) {
            if (boxes[i].is_other == boxes[j].is_other)
                continue;
            const box *ours = boxes[i].is_other ? &boxes[j] : &boxes[i];
            const box *other = boxes[i].is_other ? &boxes[i] : &boxes[j];
            bool is_shared;
            if (marks[ours->binding])
                continue;
            status = boxes_share_byte(ours, other, &is_shared);
            if (status == TB_OK)
                marks[ours->binding] = is_shared;
            else
                status = fail_pair(status, ours, other);
        }
    }
    free(boxes);
    return status;
}
