/* Overlaps: random bindings against a map of their bytes, and large ones that no map could hold. */
#include "layout/overlap.h"
#include "base/mem.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { BASE = 1 << 20, MAP_BYTES = 1 << 16, MIDDLE = MAP_BYTES / 2, MOST_BINDINGS = 4 };

/* Addresses are never dereferenced. */
static void *address(uintptr_t number) {
    return (void *)number;
}

/* A map of one binding's halves of bytes, filled element by element. */
typedef struct map {
    uint8_t used[MAP_BYTES];
    uintptr_t first, last;
    bool is_folded; /* an element is used twice */
} map;

static void add_elements(map *m, const tb_binding *b, int d, int64_t element) {
    if (d < b->shape.ndim) {
        for (int64_t i = 0; i < b->shape.dim[d]; i++)
            add_elements(m, b, d + 1, element + i * b->strides[d]);
        return;
    }
    int64_t bits = tb_dtype_bits(b->dtype), at = 8 * (MIDDLE + b->offset) + element * bits;
    assert_true(at >= 0 && at + bits <= 8 * MAP_BYTES);
    for (int64_t i = at; i < at + bits; i += 4) {
        uint8_t half = i % 8 ? 2 : 1;
        m->is_folded |= (m->used[i / 8] & half) != 0;
        m->used[i / 8] |= half;
    }
}

static void make_map(map *m, const tb_binding *b) {
    memset(m, 0, sizeof *m);
    add_elements(m, b, 0, 0);
    for (size_t i = 0; i < MAP_BYTES; i++) {
        if (!m->used[i])
            continue;
        if (m->last == 0)
            m->first = BASE + i - MIDDLE;
        m->last = BASE + i + 1 - MIDDLE;
    }
}

static bool share(const map *a, const map *b) {
    for (size_t i = 0; i < MAP_BYTES; i++) {
        if (a->used[i] && b->used[i])
            return true;
    }
    return false;
}

static const tb_dtype dtypes[] = {TB_U8, TB_BF16, TB_F32, TB_F64, TB_F4E2M1, TB_F4E2M1};

/* Anything at all: strides of both signs and zero, dims of any length. */
static tb_binding random_binding(rng *r) {
    tb_binding b = {.base = address(BASE), .dtype = dtypes[rng_range(r, 0, 5)], .offset = rng_range(r, -40, 40)};
    b.shape.ndim = (int)rng_range(r, 0, 4);
    int64_t longest = b.shape.ndim > 2 ? 4 : 12, widest = rng_range(r, 1, 30);
    for (int d = 0; d < b.shape.ndim; d++) {
        b.shape.dim[d] = rng_range(r, rng_range(r, 0, 20) == 0 ? 0 : 1, longest);
        b.strides[d] = rng_range(r, rng_range(r, 0, 9) == 0 ? 0 : 1, widest) * (rng_range(r, 0, 2) == 0 ? -1 : 1);
    }
    return b;
}

/* A slice, in steps, of one matrix or cube that all of a case have in common, its dims in any order. */
static tb_binding random_slice(rng *r, const tb_shape *whole, tb_dtype dtype) {
    tb_binding b;
    assert_int_equal(tb_binding_contiguous(address(BASE), 0, dtype, whole, &b), TB_OK);
    int64_t first = 0;
    for (int d = 0; d < whole->ndim; d++) {
        int64_t by = rng_range(r, 1, 4), from = rng_range(r, 0, whole->dim[d] - 1);
        int64_t room = (whole->dim[d] - 1 - from) / by + 1;
        first += from * b.strides[d];
        b.shape.dim[d] = rng_range(r, 1, room);
        b.strides[d] *= by;
        if (rng_range(r, 0, 3) == 0) {
            first += (b.shape.dim[d] - 1) * b.strides[d];
            b.strides[d] = -b.strides[d];
        }
    }
    for (int d = b.shape.ndim - 1; d > 0; d--) {
        int other = (int)rng_range(r, 0, d);
        int64_t n = b.shape.dim[d], stride = b.strides[d];
        b.shape.dim[d] = b.shape.dim[other];
        b.strides[d] = b.strides[other];
        b.shape.dim[other] = n;
        b.strides[other] = stride;
    }
    int64_t bits = tb_dtype_bits(dtype);
    b.offset = first * bits / 8; /* a half that is left over is cut off: the slice then lies half a byte before */
    return b;
}

/* Two strides and long dims, which need a gcd. */
static tb_binding random_progression(rng *r) {
    tb_binding b = {.base = address(BASE), .dtype = dtypes[rng_range(r, 0, 5)], .offset = rng_range(r, -900, 900)};
    b.shape.ndim = (int)rng_range(r, 1, 2);
    for (int d = 0; d < b.shape.ndim; d++) {
        b.shape.dim[d] = rng_range(r, 1, d ? 5 : 40);
        b.strides[d] = rng_range(r, 2, d ? 9 : 60) * (rng_range(r, 0, 1) ? 1 : -1);
    }
    return b;
}

static void make_bindings(rng *r, tb_binding *b, size_t n) {
    int64_t kind = rng_range(r, 0, 2);
    tb_shape whole = {.ndim = 2, .dim = {rng_range(r, 1, 12), rng_range(r, 1, 12)}};
    if (rng_range(r, 0, 1))
        whole = (tb_shape){.ndim = 3, .dim = {rng_range(r, 1, 6), rng_range(r, 1, 6), rng_range(r, 1, 6)}};
    tb_dtype dtype = dtypes[rng_range(r, 0, 5)];
    for (size_t i = 0; i < n; i++)
        b[i] = kind == 0 ? random_binding(r) : kind == 1 ? random_slice(r, &whole, dtype) : random_progression(r);
}

static void test_random(void **state) {
    (void)state;
    static map maps[MOST_BINDINGS];
    uint64_t seed = test_seed();
    int64_t cases = test_cases(20000), noverlaps = 0, nfolded = 0, nclose = 0;
    for (int64_t c = 0; c < cases; c++) {
        rng r = {seed + (uint64_t)c};
        tb_binding b[MOST_BINDINGS];
        size_t n = (size_t)rng_range(&r, 1, MOST_BINDINGS);
        make_bindings(&r, b, n);
        bool any = false, folded = false, close = false;
        for (size_t i = 0; i < n; i++) {
            uintptr_t first, last;
            make_map(&maps[i], &b[i]);
            assert_int_equal(tb__binding_span(&b[i], &first, &last), TB_OK);
            assert_true(maps[i].last == 0 ? first == last : first == maps[i].first && last == maps[i].last);
            folded |= maps[i].is_folded;
            for (size_t j = 0; j < i; j++) {
                any |= share(&maps[i], &maps[j]);
                close |= maps[i].first < maps[j].last && maps[j].first < maps[i].last;
            }
        }
        size_t x, y;
        tb_status status = tb__bindings_find_overlap(b, n, &x, &y);
        bool right = status == TB_OK && (x == n) == (!any && !folded) &&
                     (x == n || (x == y ? maps[x].is_folded : x < y && !folded && share(&maps[x], &maps[y])));
        bool marks[MOST_BINDINGS];
        size_t half = n / 2;
        status = tb__bindings_mark_overlaps(b, half, b + half, n - half, marks);
        for (size_t i = 0; i < half; i++) {
            bool expected = false;
            for (size_t j = half; j < n; j++)
                expected |= share(&maps[i], &maps[j]);
            right = right && marks[i] == expected;
        }
        if (status != TB_OK || !right)
            print_error("TB_SEED=%" PRIu64 " TB_CASES=1 repeats this case\n", seed + (uint64_t)c);
        assert_true(status == TB_OK && right);
        noverlaps += any;
        nfolded += folded;
        nclose += close && !any;
    }
    /* Every kind of case occurred, also spans that intersect without an overlap. */
    if (cases >= 1000)
        assert_true(noverlaps > cases / 10 && nfolded > cases / 20 && nclose > cases / 20);
}

static tb_binding matrix(int64_t offset, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
    return (tb_binding){.base = address(BASE),
                        .offset = offset,
                        .dtype = TB_BF16,
                        .shape = {.ndim = 2, .dim = {rows, columns}},
                        .strides = {row_stride, column_stride}};
}

static void expect(const tb_binding *b, size_t n, size_t a_wanted, size_t b_wanted) {
    size_t x = 99, y = 99;
    assert_int_equal(tb__bindings_find_overlap(b, n, &x, &y), TB_OK);
    assert_int_equal(x, a_wanted);
    assert_int_equal(y, b_wanted);
}

/* Slices of a matrix of [65536, 32768] bf16, 4 GiB. */
static void test_large(void **state) {
    (void)state;
    enum { ROWS = 65536, COLUMNS = 32768 };
    tb_binding b[3];
    /* Blocks of columns, next to one another and one too wide. */
    b[0] = matrix(0, ROWS, 1024, COLUMNS, 1);
    b[1] = matrix(2 * 1024, ROWS, 1024, COLUMNS, 1);
    b[2] = matrix(2 * 2048, ROWS, COLUMNS - 2048, COLUMNS, 1);
    expect(b, 3, 3, 3);
    b[1].shape.dim[1]++;
    expect(b, 3, 1, 2);
    /* Rows against columns. */
    b[0] = matrix(INT64_C(2) * 60000 * COLUMNS, 1, COLUMNS, COLUMNS, 1);
    b[1] = matrix(2 * 77, 60000, 1, COLUMNS, 1);
    expect(b, 2, 2, 2);
    b[1].shape.dim[0]++;
    expect(b, 2, 0, 1);
    /* Even and odd columns; transposed; every third against every fifth. */
    b[0] = matrix(0, ROWS, COLUMNS / 2, COLUMNS, 2);
    b[1] = matrix(2, COLUMNS / 2, ROWS, 2, COLUMNS);
    expect(b, 2, 2, 2);
    b[1] = matrix(2, ROWS, COLUMNS / 5, COLUMNS, 5);
    expect(b, 2, 0, 1);
    b[0] = matrix(0, ROWS, COLUMNS / 6, COLUMNS, 6);
    b[1] = matrix(6, ROWS, COLUMNS / 6, COLUMNS, 6);
    b[2] = matrix(10, ROWS, COLUMNS / 6, COLUMNS, 6);
    expect(b, 3, 3, 3);
    /* Two progressions that meet just once, at indices i and j: their steps have no common divisor. */
    const int64_t step = 67108859, i = 39999990, j = 39999000;
    b[0] = matrix(0, 1, i + 5, 0, step);
    b[1] = matrix(2 * (i * step - j * (step + 2)), 1, j + 1, 0, step + 2);
    expect(b, 2, 0, 1);
    b[1].shape.dim[1]--;
    expect(b, 2, 2, 2);
}

/* All columns of a matrix, each of them a binding. */
static void test_many(void **state) {
    (void)state;
    enum { SIDE = 4096 };
    tb_binding *b = tb__malloc(SIDE, sizeof *b);
    bool *marks = tb__malloc(SIDE, sizeof *marks);
    assert_true(b && marks);
    for (int64_t i = 0; i < SIDE; i++)
        b[i] = matrix(2 * i, SIDE, 1, SIDE, 1);
    expect(b, SIDE, SIDE, SIDE);
    assert_int_equal(tb__bindings_mark_overlaps(b, SIDE / 2, b + SIDE / 2, SIDE / 2, marks), TB_OK);
    for (int i = 0; i < SIDE / 2; i++)
        assert_false(marks[i]);
    tb_binding row = matrix(INT64_C(2) * SIDE * 1000 + 2 * 5, 1, 10, SIDE, 1);
    assert_int_equal(tb__bindings_mark_overlaps(b, SIDE, &row, 1, marks), TB_OK);
    for (int i = 0; i < SIDE; i++)
        assert_true(marks[i] == (i >= 5 && i < 15));
    b[SIDE - 1].offset -= 2;
    expect(b, SIDE, SIDE - 2, SIDE - 1);
    free(b);
    free(marks);
}

static void test_sentences(void **state) {
    (void)state;
    uintptr_t first = 1, last = 2;
    tb_binding b[2] = {matrix(0, 2, 2, INT64_MAX / 2, 1), matrix(-2 * BASE, 2, 2, 2, 1)};
    size_t x = 7, y = 8;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(tb__binding_span(&b[i], &first, &last), TB_TOO_BIG);
        assert_int_equal(tb__bindings_find_overlap(b + i, 1, &x, &y), TB_TOO_BIG);
        assert_non_null(strstr(tb_error_detail(), "binding 0: "));
    }
    b[0] = matrix(0, 2, 2, INT64_MIN, 1);
    assert_int_equal(tb__binding_span(&b[0], &first, &last), TB_TOO_BIG);
    b[0] = matrix(0, 2, -1, 2, 1);
    assert_int_equal(tb__binding_span(&b[0], &first, &last), TB_INVALID);
    assert_true(first == 1 && last == 2 && x == 7 && y == 8);
    /* A stride that is never used, and a dim with one element. */
    b[0] = matrix(0, 1, 3, INT64_MIN, 1);
    expect(b, 1, 1, 1);
    b[0].shape.dim[1] = 0;
    expect(b, 1, 1, 1);
    expect(b, 0, 0, 0);

    /* Sixteen strides without any order to them: a knapsack. */
    rng r = {12345};
    for (int i = 0; i < 2; i++) {
        b[i] = (tb_binding){.base = address((uintptr_t)1 << 58), .dtype = TB_U8, .shape = {.ndim = TB_MAX_DIMS}};
        for (int d = 0; d < TB_MAX_DIMS; d++) {
            b[i].shape.dim[d] = 8;
            b[i].strides[d] = rng_range(&r, INT64_C(1) << 49, INT64_C(1) << 50);
        }
        b[i].offset = i;
    }
    bool mark;
    assert_int_equal(tb__bindings_mark_overlaps(&b[0], 1, &b[1], 1, &mark), TB_TOO_BIG);
    assert_string_equal(tb_error_detail(),
                        "whether binding 0 overlaps with binding 0 of the others takes too long to find out");

    tb__mem_fail_after(0);
    assert_int_equal(tb__bindings_mark_overlaps(&b[0], 1, &b[1], 1, &mark), TB_NO_MEMORY);
    assert_int_equal(tb__bindings_find_overlap(b, 2, &x, &y), TB_NO_MEMORY);
    tb__mem_fail_after(-1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_sentences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
