/* Random batches, and what comes out of them. */
#include "random_batch.h"

#include "numbers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SHARES = 64 };

/* ---- Making one ------------------------------------------------------------------------------------------------ */

static bool has_partial(const side *s) {
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind == TB_PARTIAL)
            return true;
    }
    return false;
}

static const tb_dtype integers[] = {TB_U8, TB_U16, TB_U32, TB_U64, TB_I8, TB_I16, TB_I32, TB_I64};
static const tb_dtype floats[] = {TB_F32, TB_F16, TB_BF16, TB_F8E4M3, TB_F8E5M2, TB_F64};
static const tb_dtype opaque[] = {TB_BOOL, TB_E8M0};

static bool is_float(tb_dtype dtype) {
    return dtype == TB_F32 || dtype == TB_F16 || dtype == TB_BF16 || dtype == TB_F8E4M3 || dtype == TB_F8E5M2 ||
           dtype == TB_F64;
}

static bool is_integer(tb_dtype dtype) {
    return dtype >= TB_U8 && dtype <= TB_I64;
}

/* The least and the greatest value of an integer dtype, as floats: they only have to compare well. */
static double bound(tb_dtype dtype, bool is_greatest) {
    bool is_signed = dtype >= TB_I8;
    int bits = (int)tb_dtype_bits(dtype) - is_signed;
    double beyond = (double)(1ULL << (bits - 1)) * 2;
    return is_greatest ? beyond : is_signed ? -beyond : 0;
}

/* A cast that loses values without a word: to floats of 8 bits, and to integers that have fewer values. */
static bool loses(tb_dtype from, tb_dtype to) {
    if (is_float(to))
        return tb_dtype_bits(to) <= 8;
    return bound(from, false) < bound(to, false) || bound(from, true) > bound(to, true);
}

/* The rule: the narrower side's, the source's where they are equally wide; casts that lose only where asked for. */
static bool find_wire(tb_dtype src, tb_dtype dst, tb_dtype asked, tb_dtype *wire) {
    *wire = asked != TB_DTYPE_NONE ? asked : tb_dtype_bits(dst) < tb_dtype_bits(src) ? dst : src;
    const tb_dtype step[3] = {src, *wire, dst};
    for (int i = 0; i < 2; i++) {
        tb_dtype from = step[i], to = step[i + 1];
        bool has_cast = (is_float(from) && is_float(to)) || (is_integer(from) && is_integer(to));
        if (from != to && (!has_cast || (loses(from, to) && asked != to)))
            return false;
    }
    return true;
}

static void choose_dtypes(rng *r, bool has_integers, batch_tensor *t) {
    bool has_arithmetic = has_partial(&t->sides[0]) || has_partial(&t->sides[1]);
    if (has_integers && !has_arithmetic && rng_range(r, 0, 4) == 0) {
        t->dtype[0] = t->dtype[1] = opaque[rng_range(r, 0, 1)];
        return;
    }
    const tb_dtype *dtypes = has_integers ? integers : floats;
    int64_t last = has_integers ? 7 : 5;
    t->dtype[0] = t->dtype[1] = dtypes[rng_range(r, 0, last)];
    if (rng_range(r, 0, 1))
        t->dtype[1] = dtypes[rng_range(r, 0, last)];
    for (int from = 0; from < 2; from++) {
        tb_dtype wire;
        t->wire[from] = rng_range(r, 0, 2) ? TB_DTYPE_NONE : dtypes[rng_range(r, 0, last)];
        if (!find_wire(t->dtype[from], t->dtype[!from], t->wire[from], &wire) && rng_range(r, 0, 29))
            t->wire[from] = t->dtype[!from];
    }
}

/* Any seats in any order; now and then the first ones. */
static void choose_seats(rng *r, side *s, int32_t nseats) {
    int32_t seats[CASE_MAX_RANKS] = {0};
    bool is_shuffled = rng_range(r, 0, 3) > 0;
    for (int32_t i = 0; i < nseats; i++)
        seats[i] = i;
    for (int32_t i = 0; i < s->nranks; i++) {
        int32_t other = is_shuffled ? (int32_t)rng_range(r, i, nseats - 1) : i, swap = seats[other];
        seats[other] = seats[i];
        s->ranks[i] = seats[i] = swap;
    }
}

/* The placements point into the side they were made in. */
static void copy_side(const side *from, side *to) {
    *to = *from;
    for (int i = 0; i < to->mesh_ndim; i++) {
        to->place[i].sizes = to->sizes[i];
        to->place[i].list_ends = to->list_ends[i];
        to->place[i].segments = to->segments[i];
    }
}

/* Every element becomes a row. */
static void enlarge(rng *r, batch_tensor *t) {
    for (int which = 0; which < 2; which++) {
        for (int i = 0; i < t->sides[which].mesh_ndim; i++) {
            tb_placement *p = &t->sides[which].place[i];
            if (p->kind != TB_REPLICATE && p->kind != TB_PARTIAL && p->dim < 0)
                p->dim += t->shape.ndim;
        }
    }
    t->shape.dim[t->shape.ndim++] = rng_range(r, 1000, 4000);
}

static void make_tensor(rng *r, bool is_large, const int32_t nseats[2], batch_tensor *t) {
    static random_case c;
    do {
        random_case_make(&c, rng_next(r));
    } while (c.src.nranks > nseats[0] || c.dst.nranks > nseats[1]);
    t->shape = c.shape;
    copy_side(&c.src, &t->sides[0]);
    copy_side(&c.dst, &t->sides[1]);
    choose_dtypes(r, c.dtype == TB_I64, t);
    for (int which = 0; which < 2; which++) {
        choose_seats(r, &t->sides[which], nseats[which]);
        t->group[which] = (uint32_t)rng_range(r, 0, 2) * 7;
        t->takes_pair_layout[which] = rng_range(r, 0, 1);
    }
    if (is_large && t->shape.ndim < TB_MAX_DIMS)
        enlarge(r, t);
}

void random_batch_make(random_batch *b, uint64_t seed, const int32_t nseats[2]) {
    rng r = {seed};
    memset(b, 0, sizeof *b);
    b->seed = seed;
    b->is_large = rng_range(&r, 0, 59) == 0;
    b->ntensors = b->is_large ? 1 : (int)rng_range(&r, 1, BATCH_MAX_TENSORS);
    for (int i = 0; i < b->ntensors; i++) {
        make_tensor(&r, b->is_large, nseats, &b->tensor[i]);
        if (i > 0)
            b->tensor[i].takes_pair_layout[0] = b->tensor[i].takes_pair_layout[1] = false;
    }
}

void random_batch_print(const random_batch *b) {
    for (int i = 0; i < b->ntensors; i++) {
        const batch_tensor *t = &b->tensor[i];
        fprintf(stderr, "tensor t%d: shape", i);
        for (int d = 0; d < t->shape.ndim; d++)
            fprintf(stderr, "%c%" PRId64, d ? ',' : ' ', t->shape.dim[d]);
        fprintf(stderr, "\n");
        for (int which = 0; which < 2; which++) {
            tb_layout *layout;
            char *text;
            if (side_layout(&t->sides[which], &layout) != TB_OK)
                continue;
            if (tb_layout_format(layout, &text) == TB_OK) {
                fprintf(stderr, "  %s '%s' %s wire %s group %" PRIu32 "\n", which ? "dst" : "src", text,
                        tb_dtype_name(t->dtype[which]), t->wire[which] ? tb_dtype_name(t->wire[which]) : "any",
                        t->group[which]);
                free(text);
            }
            tb_layout_destroy(layout);
        }
    }
}

/* ---- What becomes of it ---------------------------------------------------------------------------------------- */

static bool has_product(const side *s) {
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind == TB_PARTIAL && s->place[i].op == TB_PRODUCT)
            return true;
    }
    return false;
}

/* Which indices of a dim any seat of the side holds; returns how many. */
static int64_t mark_indices(const side *s, const tb_shape *shape, int d, bool *marks) {
    static naive_list list;
    int64_t count = 0;
    memset(marks, 0, (size_t)shape->dim[d]);
    for (int32_t m = 0; m < s->nranks; m++) {
        naive_local(s, shape, m, d, &list);
        for (int64_t i = 0; i < list.count; i++)
            marks[list.index[i]] = true;
    }
    for (int64_t i = 0; i < shape->dim[d]; i++)
        count += marks[i];
    return count;
}

/* An element that is wanted and held by nobody. Layouts are products, so dims can be looked at one by one. */
static bool has_hole(const batch_tensor *t, int from) {
    static bool held[4096], wanted[4096];
    bool is_wanted = true, is_missing = false;
    for (int d = 0; d < t->shape.ndim; d++) {
        is_wanted &= mark_indices(&t->sides[!from], &t->shape, d, wanted) > 0;
        mark_indices(&t->sides[from], &t->shape, d, held);
        for (int64_t i = 0; i < t->shape.dim[d]; i++)
            is_missing |= wanted[i] && !held[i];
    }
    return is_wanted && is_missing;
}

tb_status random_batch_outcome(const random_batch *b, int from) {
    for (int i = 0; i < b->ntensors; i++) {
        const batch_tensor *t = &b->tensor[i];
        tb_dtype wire;
        if (!find_wire(t->dtype[from], t->dtype[!from], t->wire[from], &wire) || has_product(&t->sides[!from]))
            return TB_REFUSED;
        if (has_hole(t, from))
            return TB_INVALID;
    }
    return TB_OK;
}

void holding_make(const batch_tensor *t, int which, int32_t seat, holding *out) {
    static naive_list list[TB_MAX_DIMS];
    const side *s = &t->sides[which];
    int64_t coord[TB_MAX_DIMS];
    int32_t m = 0;
    *out = (holding){.shape.ndim = t->shape.ndim};
    while (m < s->nranks && s->ranks[m] != seat)
        m++;
    if (m == s->nranks)
        return;
    mesh_coords(s, m, coord);
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind != TB_PARTIAL)
            continue;
        out->share = out->share * s->mesh[i] + coord[i];
        out->gets_zeros |= s->place[i].op == TB_SUM && coord[i] != 0;
    }
    out->count = 1;
    for (int d = 0; d < t->shape.ndim; d++) {
        naive_local(s, &t->shape, m, d, &list[d]);
        out->shape.dim[d] = list[d].count;
        out->count *= list[d].count;
    }
    out->element = malloc((size_t)(out->count + 1) * sizeof *out->element);
    if (!out->element)
        abort();
    for (int64_t i = 0; i < out->count; i++) {
        int64_t left = i, scale = 1;
        out->element[i] = 0;
        for (int d = t->shape.ndim - 1; d >= 0; d--) {
            out->element[i] += list[d].index[left % list[d].count] * scale;
            scale *= t->shape.dim[d];
            left /= list[d].count;
        }
    }
}

void holding_fini(holding *h) {
    free(h->element);
    h->element = NULL;
}

uint64_t batch_value(const random_batch *b, int tensor, int from, int version, int64_t element, int64_t share) {
    rng r = {b->seed * 0x9E3779B97F4A7C15U + (uint64_t)((tensor * 2 + from) * 64 + version)};
    r.state = rng_next(&r) + (uint64_t)element * MOST_SHARES + (uint64_t)share;
    return number_random(b->tensor[tensor].dtype[from], &r);
}

uint64_t batch_arrival(const random_batch *b, int tensor, int from, int version, int64_t element) {
    const batch_tensor *t = &b->tensor[tensor];
    const side *s = &t->sides[from];
    uint64_t bits[MOST_SHARES], divisor = 1;
    int64_t nshares = 1;
    tb_reduce_op op = TB_SUM;
    tb_dtype wire;
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind != TB_PARTIAL)
            continue;
        nshares *= s->mesh[i];
        if (s->place[i].op == TB_AVG)
            divisor *= (uint64_t)s->mesh[i];
        else
            op = s->place[i].op;
    }
    for (int64_t i = 0; i < nshares; i++)
        bits[i] = batch_value(b, tensor, from, version, element, i);
    find_wire(t->dtype[from], t->dtype[!from], t->wire[from], &wire);
    return number_reduce(t->dtype[from], wire, t->dtype[!from], op, divisor, bits, (size_t)nshares);
}
