/* Expresses a list of indices of one storage dim in the digits that a view makes of the dim.
 *
 * The list may be long, so it is walked in *units*: runs of indices as long as all ends of the list's segments and all
 * digits allow. Digits finer than a unit are whole in every unit; at most one digit reaches across units. */
#include "reshard/view.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_UNITS = 1 << 20 }; /* of one list; more would take too long */

/* A digit, counted in units. */
typedef struct unit_digit {
    int index;             /* in the form */
    int64_t stride, count; /* of the digit */
    int64_t unit_stride;   /* in units; 0: the digit is whole in every unit */
    int64_t unit_count;
    int64_t inner; /* its values in one unit */
} unit_digit;

typedef struct run {
    int64_t start, stop; /* indices, from the first of the form */
    int64_t position;    /* of the first in the list */
} run;

typedef struct walk {
    int axis;
    int ndigits;
    int nmoving;                      /* those with more than one value; at least 1 */
    unit_digit digit[TB__MAX_DIGITS]; /* the moving ones, slowest first; then those that never move */
    run *run;
    size_t nruns;
    int64_t unit;
    int64_t count;     /* units in the view */
    int64_t *position; /* of each unit */
    int64_t *value;    /* of each unit, by digit */
} walk;

static int64_t gcd(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

bool tb__values_equal(const tb__values *a, const tb__values *b) {
    return a->count == b->count && (a->count == 0 || memcmp(a->item, b->item, a->count * sizeof *a->item) == 0);
}

bool tb__values_append(tb__values *values, size_t *capacity, tb__arena *arena, int64_t start, int64_t stop) {
    values->length += stop - start;
    if (values->count && values->item[values->count - 1].stop == start) {
        values->item[values->count - 1].stop = stop;
        return true;
    }
    if (values->count == *capacity) {
        size_t more = *capacity ? 2 * *capacity : 4;
        tb_segment *item = tb__arena_alloc(arena, more, sizeof *item);
        if (!item)
            return false;
        if (values->count)
            memcpy(item, values->item, values->count * sizeof *item);
        values->item = item;
        *capacity = more;
    }
    values->item[values->count++] = (tb_segment){start, stop};
    return true;
}

static void collect_digits(walk *w, const tb__form *form) {
    for (int i = 0; i < form->first_digit[form->ndim]; i++) {
        const tb__digit *digit = &form->digit[i];
        if (digit->axis != w->axis)
            continue;
        int at = w->ndigits++;
        /* wherever a digit of one value stands: it adds nothing to an index */
        int64_t stride = digit->count > 1 ? digit->stride : 1;
        for (; at > 0; at--) {
            const unit_digit *other = &w->digit[at - 1];
            if (digit->count == 1 || (other->count > 1 && other->stride > stride))
                break;
            w->digit[at] = *other;
        }
        w->digit[at] = (unit_digit){.index = i, .stride = stride, .count = digit->count, .inner = 1};
        w->nmoving += digit->count > 1;
    }
    w->nmoving += w->nmoving == 0;
}

/* Collects the parts of the list between the first and the last index of the form. */
static bool collect_runs(walk *w, int64_t first, tb__spans list, tb__arena *arena) {
    int64_t end = w->digit[0].stride * w->digit[0].count, position = 0;
    w->run = tb__arena_alloc(arena, list.count, sizeof *w->run);
    if (!w->run)
        return false;
    for (size_t i = 0; i < list.count; i++) {
        run r = {list.item[i].start - first, list.item[i].stop - first, position};
        position += r.stop - r.start;
        if (r.start < 0) {
            r.position -= r.start;
            r.start = 0;
        }
        r.stop = r.stop < end ? r.stop : end;
        if (r.start < r.stop)
            w->run[w->nruns++] = r;
    }
    return true;
}

static void choose_unit(walk *w) {
    int64_t unit = w->digit[0].stride * w->digit[0].count; /* no run ends after it */
    for (size_t i = 0; i < w->nruns; i++)
        unit = gcd(gcd(w->run[i].stop, w->run[i].start), unit);
    for (int i = 0; i < w->nmoving;) {
        const unit_digit *d = &w->digit[i];
        int64_t reach = d->stride * d->count, before = unit;
        bool is_whole = i == 0 ? unit % reach == 0 : unit % w->digit[i - 1].stride == 0;
        if (d->stride % unit != 0) {
            if (unit % d->stride != 0)
                unit = gcd(unit, d->stride);
            else if (!is_whole)
                unit = gcd(unit, reach);
        }
        i = unit == before ? i + 1 : 0;
    }
    for (int i = 0; i < w->nmoving; i++) {
        unit_digit *d = &w->digit[i];
        int64_t reach = d->stride * d->count;
        bool is_whole = i == 0 ? unit % reach == 0 : unit % w->digit[i - 1].stride == 0;
        if (d->stride % unit == 0) {
            d->unit_stride = d->stride / unit;
            d->unit_count = d->count;
        } else if (!is_whole) {
            d->unit_stride = 1;
            d->unit_count = reach / unit;
            d->inner = unit / d->stride;
        } else {
            d->inner = d->count;
        }
    }
    w->unit = unit;
}

static tb_status collect_units(walk *w, tb__arena *arena) {
    int64_t most = 0;
    for (size_t i = 0; i < w->nruns; i++) {
        most += (w->run[i].stop - w->run[i].start) / w->unit;
        if (most > MAX_UNITS)
            return tb__fail(TB_TOO_BIG, "dim %d is cut at too many odd places", w->axis);
    }
    w->position = tb__arena_alloc(arena, (size_t)most, sizeof *w->position);
    w->value = tb__arena_alloc(arena, (size_t)most * (size_t)w->ndigits, sizeof *w->value);
    if (!w->position || !w->value)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < w->nruns; i++) {
        for (int64_t at = w->run[i].start; at < w->run[i].stop; at += w->unit) {
            int64_t *value = w->value + w->count * w->ndigits, rest = at / w->unit;
            bool is_seen = true;
            for (int k = 0; k < w->ndigits && is_seen; k++) {
                const unit_digit *d = &w->digit[k];
                value[k] = d->unit_stride ? rest / d->unit_stride : 0;
                rest = d->unit_stride ? rest % d->unit_stride : rest;
                is_seen = !d->unit_stride || value[k] < d->unit_count;
            }
            if (!is_seen || rest != 0)
                continue; /* an index that a slice has removed */
            w->position[w->count++] = w->run[i].position + (at - w->run[i].start);
        }
    }
    return TB_OK;
}

/* How the units are nested: along digit[i] there are length[i] values, one every `every[i]` units. */
typedef struct nest {
    int depth; /* fastest first */
    int digit[TB__MAX_DIGITS];
    int64_t length[TB__MAX_DIGITS], every[TB__MAX_DIGITS];
} nest;

static bool differs_only_in(const walk *w, int64_t a, int64_t b, int digit) {
    for (int k = 0; k < w->ndigits; k++) {
        if (k != digit && w->value[a * w->ndigits + k] != w->value[b * w->ndigits + k])
            return false;
    }
    return true;
}

/* The only digit that differs between two units, or -1. If none differs, an index is held twice in a row: returns the
 * fastest unused digit that stays evenly spaced, preferably one of several values. */
static int moving_digit(const walk *w, int64_t a, int64_t b, unsigned used) {
    int moving = -1;
    for (int k = 0; k < w->ndigits; k++) {
        if (w->value[a * w->ndigits + k] == w->value[b * w->ndigits + k])
            continue;
        if (moving >= 0 || used >> k & 1)
            return -1;
        moving = k;
    }
    int64_t step = w->position[b] - w->position[a];
    for (int i = 2 * w->ndigits - 1; i >= 0 && moving < 0; i--) {
        int k = i % w->ndigits;
        const unit_digit *d = &w->digit[k];
        if (!(used >> k & 1) && (i < w->ndigits || d->count > 1) && (d->inner == 1 || step == d->stride * d->inner))
            moving = k;
    }
    return moving;
}

static bool find_nest(const walk *w, nest *out) {
    unsigned used = 0;
    int64_t block = 1;
    *out = (nest){0};
    while (block < w->count) {
        int digit = moving_digit(w, 0, block, used);
        if (digit < 0)
            return false;
        int64_t length = 1;
        while (length * block < w->count && differs_only_in(w, 0, length * block, digit))
            length++;
        out->digit[out->depth] = digit;
        out->length[out->depth] = length;
        out->every[out->depth++] = block;
        used |= 1U << digit;
        block *= length;
    }
    return block == w->count;
}

/* Whether every unit has the values and the position that the nesting implies. */
static bool check_nest(const walk *w, const nest *n) {
    for (int64_t u = 0; u < w->count; u++) {
        int64_t position = w->position[0], rest = u, moved[TB__MAX_DIGITS] = {0};
        for (int i = 0; i < n->depth; i++) {
            int64_t at = rest % n->length[i];
            rest /= n->length[i];
            position += n->length[i] > 1 ? at * (w->position[n->every[i]] - w->position[0]) : 0;
            moved[n->digit[i]] = at * n->every[i];
        }
        if (position != w->position[u])
            return false;
        for (int k = 0; k < w->ndigits; k++) {
            if (w->value[u * w->ndigits + k] != w->value[moved[k] * w->ndigits + k])
                return false;
        }
    }
    return true;
}

static tb_status refuse_axis(const walk *w) {
    return tb__fail(TB_REFUSED, "the part of dim %d of the stored tensor is no box of even strides in the view",
                    w->axis);
}

static tb_status fill_share(const walk *w, const nest *n, tb__arena *arena, tb__share *out) {
    out->origin = w->position[0];
    for (int k = 0; k < w->ndigits; k++) {
        const unit_digit *d = &w->digit[k];
        tb__values values = {0};
        size_t capacity = 0;
        int64_t length = 1, every = 1, step = d->stride;
        for (int i = 0; i < n->depth; i++) {
            if (n->digit[i] == k) {
                length = n->length[i];
                every = n->every[i];
            }
        }
        if (length > 1) {
            step = w->position[every] - w->position[0];
            if (d->inner > 1 && step != d->stride * d->inner)
                return refuse_axis(w);
            step = d->inner > 1 ? d->stride : step;
        }
        for (int64_t i = 0; i < length; i++) {
            int64_t value = w->value[i * every * w->ndigits + k];
            if (!tb__values_append(&values, &capacity, arena, value * d->inner, (value + 1) * d->inner))
                return TB_NO_MEMORY;
        }
        out->values[d->index] = values;
        out->step[d->index] = step;
    }
    return TB_OK;
}

int tb__form_whole(const tb__form *form, int axis) {
    for (int d = 0; d < form->ndim; d++) {
        const tb__digit *digit = &form->digit[form->first_digit[d]];
        if (form->first_digit[d + 1] - form->first_digit[d] == 1 && digit->axis == axis &&
            digit->count == form->length[axis])
            return d;
    }
    return -1;
}

/* If the storage dim is a canonical dim, any list will do. */
static tb_status share_whole(const tb__form *form, int axis, int whole, tb__spans list, tb__arena *arena,
                             tb__share *out) {
    out->is_empty = list.count == 0;
    out->origin = 0;
    for (int i = 0; i < form->first_digit[form->ndim] && !out->is_empty; i++) {
        size_t capacity = 0;
        if (form->digit[i].axis != axis)
            continue;
        bool is_whole = i == form->first_digit[whole];
        out->values[i] = (tb__values){0};
        out->step[i] = 1;
        for (size_t s = 0; s < (is_whole ? list.count : 1); s++) {
            if (!tb__values_append(&out->values[i], &capacity, arena, is_whole ? list.item[s].start : 0,
                                   is_whole ? list.item[s].stop : 1))
                return TB_NO_MEMORY;
        }
    }
    return TB_OK;
}

static tb_status share_walk(const tb__form *form, walk *w, tb__spans list, tb__arena *scratch, tb__arena *arena,
                            tb__share *out) {
    nest n;
    collect_digits(w, form);
    if (w->digit[0].count == 0)
        return tb__fail(TB_INTERNAL, "the view has lost dim %d", w->axis);
    if (!collect_runs(w, form->start[w->axis], list, scratch))
        return TB_NO_MEMORY;
    out->is_empty = w->nruns == 0;
    if (out->is_empty)
        return TB_OK;
    choose_unit(w);
    TB_TRY(collect_units(w, scratch));
    out->is_empty = w->count == 0;
    if (out->is_empty)
        return TB_OK;
    if (!find_nest(w, &n) || !check_nest(w, &n))
        return refuse_axis(w);
    return fill_share(w, &n, arena, out);
}

tb_status tb__share_find(const tb__form *form, int axis, tb__spans list, tb__arena *arena, tb__share *out) {
    walk w = {.axis = axis};
    tb__arena scratch = {0};
    int whole = tb__form_whole(form, axis);
    if (whole >= 0)
        return share_whole(form, axis, whole, list, arena, out);
    tb_status status = share_walk(form, &w, list, &scratch, arena, out);
    tb__arena_fini(&scratch);
    return status;
}
