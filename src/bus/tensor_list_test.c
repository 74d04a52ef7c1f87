/* Lists: what is packed comes out again, and what others may send instead is refused. */
#include "bus/exchange.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* Two tensors, a tie, two patterns. */
static void pack(tb__pack *out) {
    const tb_tie ties[] = {{"head", "embedding"}};
    const char *const ignored[] = {"*.inv_freq", "^buffer.[0-9]+"};
    tb_batch_opts opts = {.ties = ties, .nties = 1, .ignored = ignored, .nignored = 2};
    tb_batch batch = {0};
    char scalar[] = "a", matrix[] = "b", layout[] = "mesh=2 place=Shard(0)";
    tb__added_tensor first = {.name = scalar, .dtype = TB_F32}, second = {.name = matrix, .dtype = TB_BF16};
    second.wire_dtype = TB_F32;
    second.group = 7;
    second.shape = (tb_shape){.ndim = 2, .dim = {3, 5}};
    second.layout = layout;
    first.memory_kind = 5;
    second.memory_kind = 3;
    const tb__added_tensor *const tensors[] = {&first, &second};
    tb__matching_pack(&batch.matching, &opts);
    *out = (tb__pack){0};
    tb__tensor_list_pack(out, &batch, tensors, 2);
    assert_false(batch.matching.failed || out->failed);
    tb__pack_fini(&batch.matching);
}

/* A copy of its own, so that reading beyond it is found. */
static tb_status unpack(const unsigned char *data, size_t nbytes, tb__tensor_list *out) {
    unsigned char *copy = malloc(nbytes ? nbytes : 1);
    assert_non_null(copy);
    memcpy(copy, data, nbytes);
    return tb__tensor_list_init(out, copy, nbytes);
}

static void test_comes_out_as_it_went_in(void **state) {
    (void)state;
    tb__pack packed;
    tb__tensor_list list;
    pack(&packed);
    assert_int_equal(unpack(packed.data, packed.count, &list), TB_OK);
    assert_true(list.hash == tb__tensor_list_hash(packed.data, packed.count));
    assert_int_equal(list.ties.count, 1);
    assert_string_equal(list.ties.item[0].name, "head");
    assert_string_equal(list.ties.item[0].canonical, "embedding");
    assert_int_equal(list.ignored.count, 2);
    assert_string_equal(list.ignored.item[1], "^buffer.[0-9]+");
    assert_int_equal(list.tensors.count, 2);
    assert_string_equal(list.tensors.item[0].name, "a");
    assert_null(list.tensors.item[0].layout);
    assert_int_equal(list.tensors.item[0].shape.ndim, 0);
    const tb__tensor_description *t = &list.tensors.item[1];
    assert_string_equal(t->layout, "mesh=2 place=Shard(0)");
    assert_true(t->dtype == TB_BF16 && t->wire_dtype == TB_F32 && t->group == 7);
    assert_true(list.tensors.item[0].memory == 0 && t->memory == 1);
    assert_true(t->shape.ndim == 2 && t->shape.dim[0] == 3 && t->shape.dim[1] == 5);
    tb__tensor_list_fini(&list);
    tb__pack_fini(&packed);
}

static void test_hash_sees_every_byte(void **state) {
    (void)state;
    tb__pack packed;
    pack(&packed);
    uint64_t hash = tb__tensor_list_hash(packed.data, packed.count);
    for (size_t i = 0; i < packed.count; i++) {
        packed.data[i] ^= 1;
        assert_true(tb__tensor_list_hash(packed.data, packed.count) != hash);
        packed.data[i] ^= 1;
        assert_true(tb__tensor_list_hash(packed.data, i) != hash);
    }
    tb__pack_fini(&packed);
}

static void test_nonsense_is_refused(void **state) {
    (void)state;
    tb__pack packed;
    tb__tensor_list list;
    pack(&packed);
    for (size_t i = 0; i < packed.count; i++)
        assert_int_equal(unpack(packed.data, i, &list), TB_INVALID);
    for (size_t i = 0; i < packed.count; i++) { /* whatever a byte is, nothing is read that is not there */
        unsigned char was = packed.data[i];
        for (unsigned value = 0; value < 256; value += 51) {
            packed.data[i] = (unsigned char)value;
            if (unpack(packed.data, packed.count, &list) == TB_OK)
                tb__tensor_list_fini(&list);
        }
        packed.data[i] = was;
    }
    unsigned char *b = memchr(packed.data + packed.count - 80, 'b', 40);
    assert_non_null(b);
    *b = 'a'; /* a name that has come before */
    assert_int_equal(unpack(packed.data, packed.count, &list), TB_INVALID);
    tb__pack_fini(&packed);
}

static void test_memory_may_be_short(void **state) {
    (void)state;
    tb__pack packed;
    tb__tensor_list list;
    tb_status status = TB_NO_MEMORY;
    pack(&packed);
    int failures = 0;
    for (long n = 0; status != TB_OK; n++) {
        tb__mem_fail_after(n);
        status = unpack(packed.data, packed.count, &list);
        tb__mem_fail_after(-1);
        assert_true(status == TB_OK || status == TB_NO_MEMORY);
        failures += status != TB_OK;
    }
    assert_true(failures >= 3);
    tb__tensor_list_fini(&list);
    tb__pack_fini(&packed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_comes_out_as_it_went_in),
        cmocka_unit_test(test_hash_sees_every_byte),
        cmocka_unit_test(test_nonsense_is_refused),
        cmocka_unit_test(test_memory_may_be_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
