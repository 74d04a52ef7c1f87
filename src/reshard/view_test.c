/* Views: random ones, element by element, against an evaluation that shares no code with the library. */
#include "reshard/view.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ELEMENTS = 4096 };

/* A view, one element at a time: which element of the stored tensor each canonical one is. */
typedef struct naive_view {
    tb_shape shape;
    int64_t count;
    int64_t stored[MAX_ELEMENTS];
    bool is_padding[MAX_ELEMENTS]; /* by stored element */
    bool has_merge;
    char text[512];
} naive_view;

static void assert_shape(const tb_shape *shape, const tb_shape *expected) {
    assert_int_equal(shape->ndim, expected->ndim);
    for (int d = 0; d < shape->ndim; d++)
        assert_int_equal(shape->dim[d], expected->dim[d]);
}

static void coords_of(const tb_shape *shape, int64_t index, int64_t *coord) {
    for (int d = shape->ndim - 1; d >= 0; d--) {
        coord[d] = index % shape->dim[d];
        index /= shape->dim[d];
    }
}

static int64_t index_of(const tb_shape *shape, const int64_t *coord) {
    int64_t index = 0;
    for (int d = 0; d < shape->ndim; d++)
        index = index * shape->dim[d] + coord[d];
    return index;
}

static void add_text(naive_view *v, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add_text(naive_view *v, const char *format, ...) {
    va_list args;
    size_t length = strlen(v->text);
    va_start(args, format);
    vsnprintf(v->text + length, sizeof v->text - length, format, args);
    va_end(args);
}

static void naive_slice(naive_view *v, int d, int64_t start, int64_t length, bool is_pad) {
    tb_shape shape = v->shape;
    int64_t n = 0;
    shape.dim[d] = length;
    for (int64_t i = 0; i < v->count; i++) {
        int64_t coord[TB_MAX_DIMS];
        coords_of(&v->shape, i, coord);
        if (coord[d] >= start && coord[d] < start + length)
            v->stored[n++] = v->stored[i];
        else if (is_pad)
            v->is_padding[v->stored[i]] = true;
    }
    v->count = n;
    v->shape = shape;
}

static void naive_permute(naive_view *v, const int *order) {
    static int64_t before[MAX_ELEMENTS];
    tb_shape shape = v->shape;
    memcpy(before, v->stored, (size_t)v->count * sizeof *before);
    for (int d = 0; d < shape.ndim; d++)
        shape.dim[d] = v->shape.dim[order[d]];
    for (int64_t i = 0; i < v->count; i++) {
        int64_t to[TB_MAX_DIMS], from[TB_MAX_DIMS] = {0};
        coords_of(&shape, i, to);
        for (int d = 0; d < shape.ndim; d++)
            from[order[d]] = to[d];
        v->stored[i] = before[index_of(&v->shape, from)];
    }
    v->shape = shape;
}

static int64_t random_divisor(rng *r, int64_t n) {
    int64_t divisor;
    do
        divisor = rng_range(r, 1, n);
    while (n % divisor != 0);
    return divisor;
}

static void random_split(naive_view *v, rng *r, int d) {
    int64_t n = v->shape.dim[d], a = random_divisor(r, n), b = rng_range(r, 0, 2) ? 1 : random_divisor(r, n / a);
    bool is_three = v->shape.ndim + 2 <= TB_MAX_DIMS && rng_range(r, 0, 2) == 0;
    int more = is_three ? 2 : 1;
    tb_shape shape = {.ndim = v->shape.ndim + more};
    for (int i = 0; i < shape.ndim; i++)
        shape.dim[i] = v->shape.dim[i <= d ? i : i - more < d ? d : i - more];
    shape.dim[d] = a;
    shape.dim[d + 1] = is_three ? b : n / a;
    if (is_three)
        shape.dim[d + 2] = n / a / b;
    add_text(v, "split(%d", d);
    int64_t open = rng_range(r, 0, 5);
    for (int i = 0; i <= more; i++)
        add_text(v, ",%" PRId64, i == open ? -1 : shape.dim[d + i]);
    add_text(v, ") ");
    v->shape = shape;
}

static void random_op(naive_view *v, rng *r) {
    int ndim = v->shape.ndim;
    if (ndim == 0)
        return;
    int d = (int)rng_range(r, 0, ndim - 1);
    int64_t n = v->shape.dim[d], choice = rng_range(r, 0, 9);
    if (choice < 4 && ndim < TB_MAX_DIMS) {
        random_split(v, r, d);
    } else if (choice < 6) {
        int order[TB_MAX_DIMS];
        add_text(v, "permute(");
        for (int i = 0; i < ndim; i++)
            order[i] = i;
        for (int i = ndim - 1; i > 0; i--) {
            int other = (int)rng_range(r, 0, i), swap = order[i];
            order[i] = order[other];
            order[other] = swap;
        }
        for (int i = 0; i < ndim; i++)
            add_text(v, "%s%d", i ? "," : "", rng_range(r, 0, 3) ? order[i] : order[i] - ndim);
        add_text(v, ") ");
        naive_permute(v, order);
    } else if (choice < 8) {
        int64_t start = rng_range(r, 0, n - 1), length = rng_range(r, 1, n - start);
        add_text(v, "slice(%d,%" PRId64 ",%" PRId64 ") ", d - (rng_range(r, 0, 1) ? ndim : 0), start, length);
        naive_slice(v, d, start, length, false);
    } else if (choice < 9) {
        int64_t before = rng_range(r, 0, 1) ? 0 : rng_range(r, 0, n - 1), after = rng_range(r, 0, n - 1 - before);
        add_text(v, "pad(%d,%" PRId64 ",%" PRId64 ") ", d, before, after);
        naive_slice(v, d, before, n - before - after, true);
    } else {
        int last = (int)rng_range(r, d, ndim - 1);
        add_text(v, "merge(%d,%d) ", d, last);
        v->has_merge |= last > d;
        for (int i = d + 1; i <= last; i++)
            v->shape.dim[d] *= v->shape.dim[i];
        for (int i = last + 1; i < ndim; i++)
            v->shape.dim[d + i - last] = v->shape.dim[i];
        v->shape.ndim -= last - d;
    }
}

/* What a rank has: which stored element each place of its memory holds. */
typedef struct memory {
    tb_shape shape;
    int64_t count;
    int64_t stored[4 * MAX_ELEMENTS];
} memory;

static void fill_memory(const side *s, const tb_shape *shape, int32_t m, memory *out) {
    static naive_list list[TB_MAX_DIMS];
    out->shape = (tb_shape){.ndim = shape->ndim};
    out->count = 1;
    for (int d = 0; d < shape->ndim; d++) {
        naive_local(s, shape, m, d, &list[d]);
        out->shape.dim[d] = list[d].count;
        out->count *= list[d].count;
    }
    assert_true(out->count <= 4 * MAX_ELEMENTS);
    for (int64_t i = 0; i < out->count; i++) {
        int64_t coord[TB_MAX_DIMS];
        coords_of(&out->shape, i, coord);
        for (int d = 0; d < shape->ndim; d++)
            coord[d] = list[d].index[coord[d]];
        out->stored[i] = index_of(shape, coord);
    }
}

static int64_t index_at(const tb_local *local, int d, int64_t position) {
    for (size_t i = 0;; i++) {
        const tb_segment *s = &local->segments[d][i];
        if (position < s->stop - s->start)
            return s->start + position;
        position -= s->stop - s->start;
    }
}

/* Adds 1 to every place of a box, and says how many elements it has. */
static int64_t mark_box(const tb_binding *box, int64_t size, unsigned char *marks) {
    int64_t count = 1;
    for (int d = 0; d < box->shape.ndim; d++)
        count *= box->shape.dim[d];
    for (int64_t i = 0; i < count; i++) {
        int64_t coord[TB_MAX_DIMS], at = box->offset;
        coords_of(&box->shape, i, coord);
        for (int d = 0; d < box->shape.ndim; d++)
            at += coord[d] * box->strides[d];
        assert_in_range(at, 0, size - 1);
        marks[at]++;
    }
    return count;
}

/* Every element of the part is the right one, none is there twice, none is missing. */
static void check_part(const naive_view *v, const memory *mem, const tb_local *local, const tb_binding *bound) {
    static unsigned char marks[4 * MAX_ELEMENTS], is_viewed[MAX_ELEMENTS];
    memset(marks, 0, sizeof marks);
    memset(is_viewed, 0, sizeof is_viewed);
    assert_shape(&bound->shape, &local->shape);
    int64_t count = mark_box(bound, mem->count, marks), expected = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t coord[TB_MAX_DIMS], at = bound->offset;
        coords_of(&bound->shape, i, coord);
        for (int d = 0; d < bound->shape.ndim; d++) {
            at += coord[d] * bound->strides[d];
            coord[d] = index_at(local, d, coord[d]);
        }
        assert_int_equal(mem->stored[at], v->stored[index_of(&v->shape, coord)]);
    }
    for (int64_t i = 0; i < v->count; i++)
        is_viewed[v->stored[i]] = 1;
    for (int64_t i = 0; i < mem->count; i++) {
        expected += is_viewed[mem->stored[i]];
        assert_true(marks[i] <= 1);
    }
    assert_int_equal(count, expected);
}

static void check_padding(const naive_view *v, const memory *mem, const tb_binding *boxes, size_t count) {
    static unsigned char marks[4 * MAX_ELEMENTS];
    memset(marks, 0, sizeof marks);
    for (size_t i = 0; i < count; i++)
        assert_true(mark_box(&boxes[i], mem->count, marks) > 0);
    for (int64_t i = 0; i < mem->count; i++)
        assert_int_equal(marks[i], v->is_padding[mem->stored[i]]);
}

/* Whether what a rank has of the canonical tensor is a box of even strides, if it has none twice: a product of one
 * set of indices for each dim, with places in memory that are evenly spaced along each dim. */
static bool is_box(const naive_view *v, const memory *mem) {
    static int64_t place[MAX_ELEMENTS]; /* by stored element; -1: not there */
    int64_t first = -1, held = 0, product = 1;
    int64_t order[TB_MAX_DIMS][MAX_ELEMENTS], length[TB_MAX_DIMS] = {0};
    memset(place, -1, sizeof place);
    for (int64_t i = mem->count - 1; i >= 0; i--)
        place[mem->stored[i]] = i;
    for (int64_t i = 0; i < v->count; i++) {
        held += place[v->stored[i]] >= 0;
        if (place[v->stored[i]] >= 0 && (first < 0 || place[v->stored[i]] < place[v->stored[first]]))
            first = i;
    }
    if (first < 0)
        return false;
    int64_t origin[TB_MAX_DIMS];
    coords_of(&v->shape, first, origin);
    for (int d = 0; d < v->shape.ndim; d++) {
        int64_t line[MAX_ELEMENTS] = {0}; /* places along the line through the first element */
        for (int64_t x = 0; x < v->shape.dim[d]; x++) {
            int64_t coord[TB_MAX_DIMS];
            memcpy(coord, origin, sizeof coord);
            coord[d] = x;
            int64_t at = place[v->stored[index_of(&v->shape, coord)]];
            if (at < 0)
                continue;
            int64_t k = length[d]++;
            for (; k > 0 && line[k - 1] > at; k--) {
                line[k] = line[k - 1];
                order[d][k] = order[d][k - 1];
            }
            line[k] = at;
            order[d][k] = x;
        }
        product *= length[d];
        for (int64_t k = 2; k < length[d]; k++) {
            if (line[k] - line[k - 1] != line[1] - line[0])
                return false;
        }
    }
    if (product != held)
        return false;
    for (int64_t i = 0; i < product; i++) {
        int64_t rest = i, coord[TB_MAX_DIMS], expected = place[v->stored[first]];
        for (int d = 0; d < v->shape.ndim; d++) {
            int64_t k = rest % length[d], along[TB_MAX_DIMS];
            rest /= length[d];
            coord[d] = order[d][k];
            memcpy(along, origin, sizeof along);
            along[d] = coord[d];
            expected += place[v->stored[index_of(&v->shape, along)]] - place[v->stored[first]];
        }
        if (place[v->stored[index_of(&v->shape, coord)]] != expected)
            return false;
    }
    return true;
}

static bool holds_twice(const memory *mem) {
    static unsigned char seen[MAX_ELEMENTS];
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < mem->count; i++) {
        if (seen[mem->stored[i]]++)
            return true;
    }
    return false;
}

static bool is_said(const char *words) {
    return strstr(tb_error_detail(), words) != NULL;
}

typedef struct tally {
    int64_t accepted, no_box, no_product, other, padded;
} tally;

/* A rank that holds nothing twice and a box of even strides is never the reason to refuse. (Each dim is looked at by
 * itself, so one that holds nothing of the tensor because of one dim may be, for another.) */
static void check_refusal(const naive_view *v, const side *s, const tb_shape *shape, tally *t) {
    static memory mem;
    if (!is_said("no box of even strides")) {
        t->no_product += is_said("no product of dims");
        t->other += !is_said("no product of dims");
        return;
    }
    t->no_box++;
    bool is_reason = v->has_merge;
    for (int32_t m = 0; m < s->nranks && !is_reason; m++) {
        fill_memory(s, shape, m, &mem);
        is_reason = holds_twice(&mem) || !is_box(v, &mem);
    }
    assert_true(is_reason);
}

/* Storage with gaps gives the same part with gaps. */
static void check_spread(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                         const tb_binding *binding, const tb_binding *bound) {
    tb_binding spread = *binding, again;
    bool is_empty = false;
    spread.offset = 5;
    for (int d = 0; d < shape->ndim; d++)
        spread.strides[d] *= 3;
    assert_int_equal(tb_view_bind(view, shape, layout, rank, &spread, &again), TB_OK);
    assert_shape(&again.shape, &bound->shape);
    for (int d = 0; d < bound->shape.ndim; d++)
        is_empty |= bound->shape.dim[d] == 0;
    assert_true(is_empty || again.offset == 5 + 3 * bound->offset);
    for (int d = 0; d < bound->shape.ndim && !is_empty; d++)
        assert_true(bound->shape.dim[d] == 1 || again.strides[d] == 3 * bound->strides[d]);
}

static void check_case(const naive_view *v, const side *s, const tb_shape *shape, tally *t) {
    static memory mem;
    tb_layout *layout, *viewed;
    tb_view *view;
    tb_shape canonical;
    assert_int_equal(side_layout(s, &layout), TB_OK);
    assert_int_equal(tb_view_parse(v->text, &view), TB_OK);
    tb_status status = tb_view_apply(view, shape, layout, &canonical, &viewed);
    if (status != TB_OK) {
        assert_int_equal(status, TB_REFUSED);
        check_refusal(v, s, shape, t);
        tb_view_destroy(view);
        tb_layout_destroy(layout);
        return;
    }
    assert_shape(&canonical, &v->shape);
    assert_true(tb_layout_nranks(viewed) <= s->nranks); /* those who hold nothing may be left out */
    t->accepted++;
    for (int32_t m = 0; m < s->nranks; m++) {
        tb_binding binding, bound, *boxes;
        size_t nboxes;
        tb_local local;
        fill_memory(s, shape, m, &mem);
        assert_int_equal(tb_binding_contiguous(NULL, 0, TB_U8, &mem.shape, &binding), TB_OK);
        status = tb_view_bind(view, shape, layout, s->ranks[m], &binding, &bound);
        if (status == TB_REFUSED && is_said("do not follow on one another")) { /* merged across storage dims */
            assert_true(v->has_merge);
            continue;
        }
        assert_int_equal(status, TB_OK);
        assert_int_equal(tb_layout_local(viewed, &canonical, s->ranks[m], &local), TB_OK);
        check_part(v, &mem, &local, &bound);
        tb_local_fini(&local);
        check_spread(view, shape, layout, s->ranks[m], &binding, &bound);
        status = tb_view_padding(view, shape, layout, s->ranks[m], &binding, &boxes, &nboxes);
        if (status == TB_REFUSED)
            continue; /* what is left out need not be a box */
        assert_int_equal(status, TB_OK);
        check_padding(v, &mem, boxes, nboxes);
        t->padded += nboxes > 0;
        free(boxes);
    }
    tb_layout_destroy(viewed);
    tb_view_destroy(view);
    tb_layout_destroy(layout);
}

/* What is being checked, for the one who has to repeat it. */
static struct {
    bool is_running;
    uint64_t seed;
    const random_case *c;
    const char *view;
} current;

static int print_current(void **state) {
    (void)state;
    if (!current.is_running)
        return 0;
    printf("TB_SEED=%" PRIu64 " TB_CASES=1 repeats this case; last error: %s\nview '%s'\n", current.seed,
           tb_error_detail(), current.view);
    random_case_print(current.c);
    return 0;
}

static void random_views(void **state) {
    (void)state;
    static random_case c;
    static naive_view v;
    uint64_t seed = test_seed();
    int64_t n = test_cases(10000);
    tally t = {0};
    for (int64_t i = 0; i < n; i++) {
        rng r = {seed + (uint64_t)i};
        random_case_make(&c, rng_next(&r));
        memset(&v, 0, sizeof v);
        v.shape = c.shape;
        v.count = 1;
        for (int d = 0; d < c.shape.ndim; d++)
            v.count *= c.shape.dim[d];
        if (v.count == 0 || v.count > MAX_ELEMENTS)
            continue;
        for (int64_t e = 0; e < v.count; e++)
            v.stored[e] = e;
        for (int64_t nops = rng_range(&r, 0, 5); nops > 0; nops--)
            random_op(&v, &r);
        current.is_running = true;
        current.seed = seed + (uint64_t)i;
        current.c = &c;
        current.view = v.text;
        check_case(&v, rng_range(&r, 0, 1) ? &c.src : &c.dst, &c.shape, &t);
        current.is_running = false;
    }
    printf("%" PRId64 " accepted, %" PRId64 " with padding; %" PRId64 " no box, %" PRId64 " no product, %" PRId64
           " other\n",
           t.accepted, t.padded, t.no_box, t.no_product, t.other);
    assert_true(n < 1000 || t.accepted > n / 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(random_views, print_current),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
