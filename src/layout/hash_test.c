/* Hashes of tensors: known values, and sums over the ranks of random layouts against an independent formula. */
#include "layout/hash.h"

#include "../tests/support/random_case.h"
#include "base/dtype.h"
#include "base/mem.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const tb_dtype dtypes[] = {TB_U8, TB_BF16, TB_F32, TB_F64, TB_F4E2M1, TB_BOOL, TB_F8E4M3, TB_I64};

static uint64_t model_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 13787848793156543929U;
    x ^= x >> 27;
    x *= 10723151780598845931U;
    return x ^ (x >> 31);
}

static uint64_t model_element(uint64_t index, uint64_t bits, tb_dtype dtype) {
    return model_mix((index + 1) * 11400714819323198485U + (tb_dtype_bits(dtype) == 64 ? model_mix(bits) : bits));
}

/* The bits of element number `at` of an array. */
static uint64_t bits_at(const uint8_t *array, int64_t at, tb_dtype dtype) {
    unsigned nbits = tb_dtype_bits(dtype);
    uint64_t bits = 0;
    if (nbits == 4)
        return array[at / 2] >> (at % 2 * 4) & 15;
    for (unsigned i = 0; i < nbits / 8; i++)
        bits |= (uint64_t)array[at * (nbits / 8) + i] << (8 * i);
    return bits;
}

static void set_bits(uint8_t *array, int64_t at, tb_dtype dtype, uint64_t bits) {
    unsigned nbits = tb_dtype_bits(dtype);
    if (nbits == 4) {
        array[at / 2] = (uint8_t)((array[at / 2] & 15 << (4 - at % 2 * 4)) | (int)bits << (at % 2 * 4));
        return;
    }
    for (unsigned i = 0; i < nbits / 8; i++)
        array[at * (nbits / 8) + i] = (uint8_t)(bits >> (8 * i));
}

static int64_t count(const tb_shape *shape) {
    int64_t n = 1;
    for (int d = 0; d < shape->ndim; d++)
        n *= shape->dim[d];
    return n;
}

static uint64_t model_hash(const uint8_t *array, int64_t n, tb_dtype dtype) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += model_element((uint64_t)i, bits_at(array, i, dtype), dtype);
    return sum;
}

static uint8_t *random_array(rng *r, int64_t n, tb_dtype dtype) {
    int64_t nbytes = tb__dtype_bytes(dtype, n) + 1;
    uint8_t *array = tb__malloc((size_t)nbytes, 1);
    assert_non_null(array);
    for (int64_t i = 0; i < nbytes; i++)
        array[i] = (uint8_t)rng_next(r);
    return array;
}

static void known_values(void **state) {
    (void)state;
    uint32_t values[] = {0, 1, 0x3f800000, 0xffffffff, 5, 6, 7, 8, 9, 10};
    uint64_t wide[] = {0, UINT64_C(0x3ff0000000000000)};
    tb_shape shape = {.ndim = 2, .dim = {2, 5}}, pair = {.ndim = 1, .dim = {2}}, scalar = {0};
    tb_binding b;
    uint64_t hash;
    int64_t start[TB_MAX_DIMS] = {0};
    assert_int_equal(tb_binding_contiguous(values, 0, TB_F32, &shape, &b), TB_OK);
    assert_int_equal(tb_hash_box(&b, &shape, start, &hash), TB_OK);
    assert_int_equal(hash, UINT64_C(0x4d781e9ec8d64435));
    assert_int_equal(tb_binding_contiguous(wide, 0, TB_F64, &pair, &b), TB_OK);
    assert_int_equal(tb_hash_box(&b, &pair, start, &hash), TB_OK);
    assert_int_equal(hash, UINT64_C(0x963e73536b80a9e2));
    assert_int_equal(tb_binding_contiguous(values, 0, TB_F32, &scalar, &b), TB_OK);
    assert_int_equal(tb_hash_box(&b, &scalar, start, &hash), TB_OK);
    assert_int_equal(hash, UINT64_C(0xe220a8397b1dcdaf)); /* the first number of splitmix64 with seed 0 */
}

static bool is_partial(const side *s) {
    for (int d = 0; d < s->mesh_ndim; d++) {
        if (s->place[d].kind == TB_PARTIAL)
            return true;
    }
    return false;
}

/* Every rank's part, in separate memory with gaps and with dims in any order, compared element by element. */
static void random_layouts(void **state) {
    (void)state;
    static random_case c;
    static naive_list lists[TB_MAX_DIMS];
    uint64_t seed = test_seed();
    int64_t cases = test_cases(2000), nparts = 0;
    for (int64_t i = 0; i < cases; i++) {
        random_case_make(&c, seed + (uint64_t)i);
        rng r = {seed + (uint64_t)i};
        tb_dtype dtype = dtypes[rng_range(&r, 0, 7)];
        tb__hash_force_portable(rng_range(&r, 0, 1));
        tb_layout *layout;
        int64_t total = count(&c.shape);
        if (total > 20000 || is_partial(&c.dst) || side_layout(&c.dst, &layout) != TB_OK)
            continue;
        uint8_t *whole = random_array(&r, total, dtype);
        for (int32_t m = 0; m < c.dst.nranks; m++) {
            tb_binding part = {.dtype = dtype, .shape.ndim = c.shape.ndim};
            for (int d = 0; d < c.shape.ndim; d++) {
                naive_local(&c.dst, &c.shape, m, d, &lists[d]);
                part.shape.dim[d] = lists[d].count;
            }
            int64_t n = count(&part.shape), stride = dtype == TB_F4E2M1 ? 2 : rng_range(&r, 1, 2);
            int order[TB_MAX_DIMS];
            for (int d = 0; d < c.shape.ndim; d++)
                order[d] = d;
            for (int d = c.shape.ndim - 1; d > 0 && rng_range(&r, 0, 2) == 0; d--) {
                int other = (int)rng_range(&r, 0, d), kept = order[d];
                order[d] = order[other];
                order[other] = kept;
            }
            for (int d = c.shape.ndim - 1; d >= 0; d--) {
                part.strides[order[d]] = stride;
                stride *= part.shape.dim[order[d]] > 0 ? part.shape.dim[order[d]] : 1;
            }
            uint8_t *memory = random_array(&r, stride + 1, dtype);
            part.base = memory;
            uint64_t expected = 0, hash;
            for (int64_t e = 0; e < n; e++) {
                int64_t rest = e, global = 0, at = 0, row = 1;
                for (int d = c.shape.ndim - 1; d >= 0; d--) {
                    int64_t k = rest % part.shape.dim[d];
                    rest /= part.shape.dim[d];
                    global += lists[d].index[k] * row;
                    row *= c.shape.dim[d];
                    at += k * part.strides[d];
                }
                uint64_t bits = bits_at(whole, global, dtype);
                set_bits(memory, at, dtype, bits);
                expected += model_element((uint64_t)global, bits, dtype);
            }
            assert_int_equal(tb_hash_part(layout, &c.shape, c.dst.ranks[m], &part, &hash), TB_OK);
            if (hash != expected) {
                random_case_print(&c);
                fail_msg("rank %" PRId32 ": %016" PRIx64 " instead of %016" PRIx64, c.dst.ranks[m], hash, expected);
            }
            nparts++;
            free(memory);
        }
        free(whole);
        tb_layout_destroy(layout);
    }
    tb__hash_force_portable(false);
    printf("%" PRId64 " parts\n", nparts);
    assert_true(nparts >= cases);
}

/* A tensor cut into boxes at random, recursively: the hashes of the boxes add up to that of the whole. */
static uint64_t sum_of_boxes(rng *r, uint8_t *whole, tb_dtype dtype, const tb_shape *shape, tb_shape box,
                             int64_t *start) {
    int d = (int)rng_range(r, 0, shape->ndim - 1);
    int64_t even = dtype == TB_F4E2M1 ? 2 : 1;
    if (box.dim[d] < 2 * even || rng_range(r, 0, 5) == 0) {
        tb_binding b;
        uint64_t hash;
        assert_int_equal(tb_binding_contiguous(whole, 0, dtype, shape, &b), TB_OK);
        int64_t first = 0;
        for (int i = 0; i < shape->ndim; i++)
            first += start[i] * b.strides[i];
        b.offset = tb__dtype_offset(dtype, first);
        b.shape = box;
        assert_int_equal(tb_hash_box(&b, shape, start, &hash), TB_OK);
        return hash;
    }
    int64_t n = box.dim[d], at = rng_range(r, 1, n / even - 1) * even;
    box.dim[d] = at;
    uint64_t sum = sum_of_boxes(r, whole, dtype, shape, box, start);
    box.dim[d] = n - at;
    start[d] += at;
    sum += sum_of_boxes(r, whole, dtype, shape, box, start);
    start[d] -= at;
    return sum;
}

static void random_boxes(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    int64_t cases = test_cases(2000);
    for (int64_t i = 0; i < cases; i++) {
        rng r = {seed + (uint64_t)i};
        tb_shape shape = {.ndim = (int)rng_range(&r, 1, 4)};
        tb_dtype dtype = dtypes[rng_range(&r, 0, 7)];
        for (int d = 0; d < shape.ndim; d++)
            shape.dim[d] = 2 * rng_range(&r, 0, shape.ndim == 1 ? 400 : 12);
        uint8_t *whole = random_array(&r, count(&shape), dtype);
        int64_t start[TB_MAX_DIMS] = {0};
        tb__hash_force_portable(rng_range(&r, 0, 1));
        uint64_t expected = model_hash(whole, count(&shape), dtype);
        assert_int_equal(sum_of_boxes(&r, whole, dtype, &shape, shape, start), expected);
        int64_t n = count(&shape);
        if (n > 1) { /* one element changed, or two that differ swapped: another hash */
            int64_t a = rng_range(&r, 0, n - 1), b = rng_range(&r, 0, n - 1);
            uint64_t at_a = bits_at(whole, a, dtype), at_b = bits_at(whole, b, dtype);
            set_bits(whole, a, dtype, at_b);
            set_bits(whole, b, dtype, at_a);
            assert_int_equal(sum_of_boxes(&r, whole, dtype, &shape, shape, start) == expected, at_a == at_b);
            set_bits(whole, a, dtype, at_a ^ 1);
            set_bits(whole, b, dtype, a == b ? at_a ^ 1 : at_b);
            assert_int_not_equal(sum_of_boxes(&r, whole, dtype, &shape, shape, start), expected);
        }
        free(whole);
    }
    tb__hash_force_portable(false);
}

static void fails(tb_status expected, const char *sentence, tb_status status) {
    assert_int_equal(status, expected);
    assert_string_equal(tb_error_detail(), sentence);
}

static void wrong_boxes(void **state) {
    (void)state;
    uint8_t bytes[32] = {0};
    uint64_t hash = 7;
    int64_t start[TB_MAX_DIMS] = {0};
    tb_shape shape = {.ndim = 2, .dim = {4, 6}}, box = {.ndim = 2, .dim = {2, 6}}, flat = {.ndim = 1, .dim = {6}};
    tb_binding b;
    tb_binding_contiguous(bytes, 0, TB_U8, &flat, &b);
    fails(TB_INVALID, "the box has 1 dims, and the tensor has 2", tb_hash_box(&b, &shape, start, &hash));
    tb_binding_contiguous(bytes, 0, TB_U8, &box, &b);
    start[0] = 3;
    fails(TB_INVALID, "dim 0: the box has 2 indices from 3, and the tensor has 4",
          tb_hash_box(&b, &shape, start, &hash));
    start[0] = 0;
    b.base = NULL;
    fails(TB_INVALID, "the box has 12 bytes, and its base is NULL", tb_hash_box(&b, &shape, start, &hash));
    b.base = bytes;
    b.dtype = TB_DTYPE_NONE;
    assert_int_equal(tb_hash_box(&b, &shape, start, &hash), TB_INVALID);
    tb_layout *layout;
    assert_int_equal(tb_layout_parse("mesh=2 place=S0", &layout), TB_OK);
    b.dtype = TB_U8;
    assert_int_equal(tb_hash_part(layout, &shape, 1, &b, &hash), TB_OK);
    b.shape.dim[0] = 3;
    fails(TB_INVALID, "dim 0: the part has 3 indices, and rank 1 has 2 by the layout",
          tb_hash_part(layout, &shape, 1, &b, &hash));
    tb_layout_destroy(layout);
    assert_int_equal(tb_layout_parse("mesh=2 place=Explicit(0,0-1;1-4)", &layout), TB_OK);
    tb_binding_contiguous(bytes, 0, TB_F4E2M1, &(tb_shape){.ndim = 1, .dim = {3}}, &b);
    assert_int_equal(tb_hash_part(layout, &(tb_shape){.ndim = 1, .dim = {4}}, 1, &b, &hash), TB_OK);
    tb_layout_destroy(layout);
    assert_int_equal(tb_layout_parse("mesh=2 place=P", &layout), TB_OK);
    fails(TB_REFUSED, "mesh dim 0 is Partial: contributions have no hash",
          tb_hash_part(layout, &(tb_shape){.ndim = 1, .dim = {3}}, 1, &b, &hash));
    tb_layout_destroy(layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values),
        cmocka_unit_test(random_layouts),
        cmocka_unit_test(random_boxes),
        cmocka_unit_test(wrong_boxes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
