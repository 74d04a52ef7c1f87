/* What a rank sends to itself is paired by id, and by nothing else. */
#include "tensorbus/tensorbus.h"

#include "copy/match.h"

#include "../tests/support/asserts.h"

#include <stdio.h>
#include <string.h>

static uint64_t memory[256];

static tb_copy_view vector(int64_t n) {
    return (tb_copy_view){.size = sizeof(tb_copy_view), .data = memory, .dtype = TB_U8, .ndim = 1, .shape = {n}};
}

static void pairs_by_id(void **state) {
    (void)state;
    tb_copy_view a = vector(8), b = vector(16), c = vector(24);
    tb_copy_op sends[] = {{7, &a, 1}, {UINT64_MAX - 1, &b, 1}, {0, &c, 1}};
    tb_copy_op recvs[] = {{0, &c, 1}, {7, &a, 1}, {UINT64_MAX - 1, &b, 1}};
    size_t recv_of[3];
    assert_ok(tb_copy_match_local(3, sends, 3, recvs, 3, recv_of));
    assert_int_equal(recv_of[0], 1);
    assert_int_equal(recv_of[1], 2);
    assert_int_equal(recv_of[2], 0);
    assert_ok(tb_copy_match_local(3, NULL, 0, NULL, 0, NULL));
}

/* Data and scale under one id: as one operation, in their order. */
static void several_tensors_under_one_id(void **state) {
    (void)state;
    tb_copy_view both[] = {vector(64), vector(2)}, swapped[] = {vector(2), vector(64)};
    tb_copy_op send = {5, both, 2}, recv = {5, both, 2}, wrong = {5, swapped, 2}, one = {5, both, 1};
    size_t recv_of;
    assert_ok(tb_copy_match_local(1, &send, 1, &recv, 1, &recv_of));
    assert_int_equal(recv_of, 0);
    assert_fails(tb_copy_match_local(1, &send, 1, &wrong, 1, &recv_of), TB_CONFLICT, "tensor 0 of task 5 has 64 bytes");
    assert_fails(tb_copy_match_local(1, &send, 1, &one, 1, &recv_of), TB_CONFLICT, "task 5 has 2 tensors on rank 1");
    assert_fails(tb_copy_match_local(1, &one, 1, &recv, 1, &recv_of), TB_CONFLICT, "task 5 has 1 tensors on rank 1");
}

/* Under one id, and without one, operations are paired in their order. */
static void in_order(void **state) {
    (void)state;
    tb_copy_view data = vector(64), scale = vector(2), other = vector(8);
    for (int has_id = 0; has_id < 2; has_id++) {
        uint64_t id = has_id ? 5 : TB_NO_TASK;
        tb_copy_op sends[] = {{id, &data, 1}, {6, &other, 1}, {id, &scale, 1}};
        tb_copy_op recvs[] = {{id, &data, 1}, {id, &scale, 1}, {6, &other, 1}};
        tb_copy_op swapped[] = {{id, &scale, 1}, {id, &data, 1}, {6, &other, 1}};
        size_t recv_of[3] = {77, 77, 77};
        assert_fails(tb_copy_match_local(4, sends, 3, swapped, 3, recv_of), TB_CONFLICT,
                     has_id ? "tensor 0 of task 5 has 64 bytes" : "of operation 0 without a task id has 64 bytes");
        assert_fails(tb_copy_match_local(4, sends, 2, recvs, 3, recv_of), TB_CONFLICT,
                     has_id ? "rank 4 is to receive task 5 from rank 4"
                            : "is to receive operation 1 without a task id");
        assert_int_equal(recv_of[0], 77);
        assert_ok(tb_copy_match_local(4, sends, 3, recvs, 3, recv_of));
        assert_int_equal(recv_of[0], 0);
        assert_int_equal(recv_of[1], 2);
        assert_int_equal(recv_of[2], 1);
    }
    tb_copy_op sends[] = {{5, &data, 1}, {TB_NO_TASK, &data, 1}}, recv = {TB_NO_TASK, &data, 1};
    size_t recv_of[2];
    assert_fails(tb_copy_match_local(4, sends, 2, &recv, 1, recv_of), TB_CONFLICT, "rank 4 sends task 5 to rank 4");
}

static void both_ends_must_be_there(void **state) {
    (void)state;
    tb_copy_view v = vector(8);
    tb_copy_op five = {5, &v, 1}, six = {6, &v, 1}, both[] = {five, six};
    size_t recv_of[2];
    assert_fails(tb_copy_match_local(2, &five, 1, NULL, 0, recv_of), TB_CONFLICT, "rank 2 sends task 5 to rank 2");
    assert_fails(tb_copy_match_local(2, NULL, 0, &five, 1, recv_of), TB_CONFLICT, "rank 2 is to receive task 5");
    assert_fails(tb_copy_match_local(2, &five, 1, &six, 1, recv_of), TB_CONFLICT, "rank 2 sends task 5 to rank 2");
    assert_fails(tb_copy_match_local(2, &six, 1, &five, 1, recv_of), TB_CONFLICT, "rank 2 is to receive task 5");
    assert_fails(tb_copy_match_local(2, both, 2, &five, 1, recv_of), TB_CONFLICT, "rank 2 sends task 6 to rank 2");
    assert_fails(tb_copy_match_local(2, &five, 1, both, 2, recv_of), TB_CONFLICT, "rank 2 is to receive task 6");
    /* without views, only ids are paired */
    five.nviews = 0;
    recv_of[0] = 77;
    assert_ok(tb_copy_match_local(2, &five, 1, &five, 1, recv_of));
    assert_int_equal(recv_of[0], 0);
    five.views = NULL;
    assert_ok(tb_copy_match_local(2, &five, 1, &five, 1, recv_of));
    assert_fails(tb_copy_match_local(2, &five, 1, &six, 1, recv_of), TB_CONFLICT, "rank 2 sends task 5 to rank 2");
}

static tb_status match(tb_copy_view from, tb_copy_view to) {
    tb_copy_op send = {1, &from, 1}, recv = {1, &to, 1};
    size_t recv_of;
    return tb_copy_match_local(0, &send, 1, &recv, 1, &recv_of);
}

static void sizes_and_views(void **state) {
    (void)state;
    tb_copy_view bytes = vector(8),
                 halves = {.size = sizeof halves, .data = memory, .dtype = TB_F16, .ndim = 1, .shape = {4}};
    tb_copy_view other = {.size = sizeof other, .data = memory, .dtype = TB_BF16, .ndim = 2, .shape = {2, 2}};
    assert_ok(match(halves, other));
    assert_fails(match(bytes, halves), TB_CONFLICT, "items of 8 bits");
    assert_fails(match(bytes, vector(9)), TB_CONFLICT, "has 8 bytes on rank 0, which sends it, but 9");
    tb_copy_view bad = vector(-1);
    assert_fails(match(bad, bad), TB_INVALID, "rank 0: tensor 0 of task 1");
    bad = vector(4);
    bad.data = NULL;
    assert_fails(match(bad, bad), TB_INVALID, "NULL");
    bad.ndim = 9;
    assert_fails(match(bad, bad), TB_INVALID, "dimensions");
    bad = (tb_copy_view){.size = sizeof(tb_copy_view), .data = memory, .ndim = 0};
    assert_fails(match(bad, bad), TB_INVALID, "dtype");
    bad = vector(0);
    bad.data = NULL;
    assert_ok(match(bad, bad));
    assert_fails(match(bad, vector(1)), TB_CONFLICT, "has 0 bytes");
}

/* Shapes of views with gaps are split until they are equal. */
static void shapes_are_split(void **state) {
    (void)state;
    int64_t wide[] = {100, 1}, deep[] = {80, 20, 1}, back[] = {-100, -1};
    tb_copy_view m64 = {
        .size = sizeof m64, .data = memory, .dtype = TB_U8, .ndim = 2, .shape = {6, 4}, .strides = wide};
    tb_copy_view m234 = {
        .size = sizeof m234, .data = memory, .dtype = TB_U8, .ndim = 3, .shape = {2, 3, 4}, .strides = deep};
    tb_copy_view m38 = {
        .size = sizeof m38, .data = memory, .dtype = TB_U8, .ndim = 2, .shape = {3, 8}, .strides = wide};
    tb_copy_view m83 = {
        .size = sizeof m83, .data = memory, .dtype = TB_U8, .ndim = 2, .shape = {8, 3}, .strides = wide};
    tb_copy_view mirrored = {
        .size = sizeof mirrored, .data = memory + 200, .dtype = TB_U8, .ndim = 2, .shape = {6, 4}, .strides = back};
    assert_ok(match(m64, m234));
    assert_ok(match(m64, m38));
    assert_ok(match(m64, mirrored));
    assert_ok(match(m83, vector(24)));
    assert_ok(match(vector(24), m64));
    assert_fails(match(m64, m83), TB_CONFLICT, "like [6,4] on rank 0, which sends it, and like [8,3]");
    assert_fails(match(m234, m38), TB_CONFLICT, "like [2,3,4] on rank 0, which sends it, and like [3,8]");
    assert_fails(match(m83, m38), TB_CONFLICT, "can't be split");
}

/* More dimensions than a tensor may have are refused, not cut off. */
static void too_fine(void **state) {
    (void)state;
    tb_copy_view a = {.size = sizeof a, .data = memory, .dtype = TB_U8, .ndim = 8}, b = a;
    int64_t strides_a[8], strides_b[8];
    for (int d = 0; d < 8; d++) {
        a.shape[d] = d == 7 ? 2 : 4;
        b.shape[d] = d == 0 ? 2 : 4;
        strides_a[d] = (int64_t)3 << 3 * (7 - d);
        strides_b[d] = strides_a[d];
    }
    a.strides = strides_a;
    b.strides = strides_b;
    assert_fails(match(a, b), TB_CONFLICT, "can't be split");
}

static void four_bits(void **state) {
    (void)state;
    int64_t odd[] = {7, 1}, even[] = {8, 1}, turned[] = {1, 8};
    tb_copy_view a = {.size = sizeof a, .data = memory, .dtype = TB_F4E2M1, .ndim = 2, .shape = {3, 6}};
    tb_copy_view b = a;
    b.strides = even;
    assert_ok(match(a, b));
    b.strides = odd;
    assert_fails(match(a, b), TB_INVALID, "stride 7");
    b.strides = turned;
    assert_fails(match(a, b), TB_INVALID, "even last dimension");
    a.shape[1] = 5;
    assert_fails(match(a, a), TB_INVALID, "even last dimension");
    tb_copy_view bytes = vector(9);
    a.shape[1] = 6;
    assert_fails(match(a, bytes), TB_CONFLICT, "items of 4 bits");
}

static void memory_is_short(void **state) {
    (void)state;
    tb_copy_view both[] = {vector(64), vector(2)};
    tb_copy_op ops[] = {{5, both, 2}, {6, both, 1}};
    size_t recv_of[2];
    int failures = 0;
    for (long n = 0;; n++, failures++) {
        tb__mem_fail_after(n);
        tb_status status = tb_copy_match_local(1, ops, 2, ops, 2, recv_of);
        tb__mem_fail_after(-1);
        if (status == TB_OK)
            break;
        assert_int_equal(status, TB_NO_MEMORY);
    }
    assert_true(failures > 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_by_id),     cmocka_unit_test(several_tensors_under_one_id),
        cmocka_unit_test(in_order),        cmocka_unit_test(both_ends_must_be_there),
        cmocka_unit_test(sizes_and_views), cmocka_unit_test(shapes_are_split),
        cmocka_unit_test(too_fine),        cmocka_unit_test(four_bits),
        cmocka_unit_test(memory_is_short),
    };
    return cmocka_run_group_tests_name("match", tests, NULL, NULL);
}
