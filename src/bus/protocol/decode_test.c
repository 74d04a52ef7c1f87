/* Reading messages that were written by hand: what is taken, and the sentence for what is not. */
#include "bus/protocol/protocol_test.h"
#include "bus/protocol/value.h"

#include <math.h>
#include <msgpack.h>

/* Keys and values as they come. */
typedef struct by_hand {
    tb__bytes bytes;
    msgpack_packer packer;
} by_hand;

static int push_bytes(void *data, const char *bytes, size_t nbytes) {
    tb__bytes *out = data;
    assert_true(tb__vec_reserve(out, nbytes));
    memcpy(out->item + out->count, bytes, nbytes);
    out->count += nbytes;
    return 0;
}

static by_hand *begin(by_hand *h, size_t npairs) {
    h->bytes = (tb__bytes){0};
    msgpack_packer_init(&h->packer, &h->bytes, push_bytes);
    msgpack_pack_map(&h->packer, npairs);
    return h;
}

static void str(by_hand *h, const char *text) {
    msgpack_pack_str_with_body(&h->packer, text, strlen(text));
}

static void pair(by_hand *h, const char *key, const char *value) {
    str(h, key);
    if (value)
        str(h, value);
    else
        msgpack_pack_nil(&h->packer);
}

static void expect_refused(by_hand *h, const char *sentence) {
    tb__arena arena = {0};
    tb__message message;
    tb__blob map = copy_of(h->bytes.item, h->bytes.count);
    tb_status status = tb__message_decode(map, &arena, &message);
    assert_true(status == TB_INVALID || status == TB_TOO_BIG);
    assert_string_equal(tb_error_detail(), sentence);
    free((void *)map.data);
    free(h->bytes.item);
    tb__arena_fini(&arena);
}

static void test_refusals_name_the_field(void **state) {
    (void)state;
    by_hand h;
    begin(&h, 4);
    pair(&h, "type", "CleanupBatch");
    pair(&h, "timestamp", NULL);
    pair(&h, "semaphore_name", NULL);
    pair(&h, "batch", "b");
    expect_refused(&h, "CleanupBatch: batch_id is missing");

    begin(&h, 2);
    pair(&h, "type", "CleanupBatch");
    pair(&h, "timestamp", "now");
    expect_refused(&h, "CleanupBatch: timestamp is a string; it must be a number");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    str(&h, "batch_id");
    msgpack_pack_int(&h.packer, 5);
    expect_refused(&h, "Transfer: batch_id is a number; it must be a string");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    pair(&h, "batch_id", NULL);
    expect_refused(&h, "Transfer: batch_id is nil; it must be a string");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    pair(&h, "transfer_type", "sideways");
    expect_refused(&h, "Transfer: transfer_type is 'sideways'; it must be 'send' or 'recv'");

    begin(&h, 3);
    pair(&h, "type", "Transfer");
    pair(&h, "batch_id", "a");
    pair(&h, "batch_id", "b");
    expect_refused(&h, "Transfer: batch_id comes twice");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    pair(&h, "type", "Transfer");
    expect_refused(&h, "Transfer: type comes twice");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    str(&h, "batch_id");
    msgpack_pack_str_with_body(&h.packer, "a\0b", 3);
    expect_refused(&h, "Transfer: batch_id has a NUL in it");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    pair(&h, "batch_id", "\xc3(");
    expect_refused(&h, "Transfer: batch_id is not UTF-8");

    begin(&h, 2);
    pair(&h, "type", "Transfer");
    str(&h, "timestamp");
    msgpack_pack_double(&h.packer, NAN);
    expect_refused(&h, "Transfer: timestamp is not finite");

    begin(&h, 2);
    pair(&h, "type", "RegisterTensors");
    str(&h, "bucket_size");
    msgpack_pack_int(&h.packer, -1);
    expect_refused(&h, "RegisterTensors: bucket_size is a negative number; it must be a number that is not negative");

    begin(&h, 2);
    pair(&h, "type", "RegisterTensors");
    str(&h, "timeout_ms");
    msgpack_pack_uint64(&h.packer, 1ULL << 31);
    expect_refused(&h, "RegisterTensors: timeout_ms is 2147483648; it is at most 2147483647");

    begin(&h, 2);
    pair(&h, "type", "RegisterTensors");
    str(&h, "tensors");
    msgpack_pack_array(&h.packer, 1);
    msgpack_pack_array(&h.packer, 3);
    for (int i = 0; i < 3; i++)
        str(&h, "p");
    expect_refused(&h, "RegisterTensors: tensors has an item of 3; it must be an array of [str, bin]");

    begin(&h, 2);
    pair(&h, "type", "RegisterTensors");
    str(&h, "tensors");
    msgpack_pack_array(&h.packer, 1);
    msgpack_pack_array(&h.packer, 2);
    str(&h, "p");
    str(&h, "no bin");
    expect_refused(&h, "RegisterTensors: tensors is a string; it must be an array of [str, bin]");

    begin(&h, 2);
    pair(&h, "type", "CleanupBatch");
    msgpack_pack_int(&h.packer, 1);
    msgpack_pack_int(&h.packer, 1);
    expect_refused(&h, "CleanupBatch: a key is a number; it must be a string");

    begin(&h, 2);
    pair(&h, "type", "Reply");
    pair(&h, "report", "{}");
    expect_refused(&h, "Reply: report is a string; it must be bytes");

    begin(&h, 1);
    pair(&h, "type", "Explode");
    expect_refused(&h, "there is no command 'Explode'");

    begin(&h, 0);
    expect_refused(&h, "a message without a type");

    begin(&h, 1);
    str(&h, "type");
    msgpack_pack_nil(&h.packer);
    expect_refused(&h, "a message's type is nil; it must be a string");

    begin(&h, 1);
    str(&h, "type");
    assert_true(tb__vec_push(&h.bytes, 0xc1));
    expect_refused(&h, "a frame of 7 bytes: 0xc1 does not begin a MessagePack value");
}

static void test_any_order_and_unknown_keys(void **state) {
    (void)state;
    by_hand h;
    begin(&h, 7);
    pair(&h, "from_the_future", "x");
    pair(&h, "semaphore_name", "/done");
    str(&h, "blocking");
    msgpack_pack_false(&h.packer);
    pair(&h, "transfer_type", "recv");
    str(&h, "timestamp");
    msgpack_pack_float(&h.packer, 1.5F);
    pair(&h, "type", "Transfer");
    pair(&h, "batch_id", "b");
    tb__arena arena = {0};
    tb__message message;
    tb__blob map = {.data = h.bytes.item, .nbytes = h.bytes.count};
    assert_int_equal(tb__message_decode(map, &arena, &message), TB_OK);
    assert_int_equal(message.kind, TB__TRANSFER);
    assert_int_equal(message.direction, TB__RECV);
    assert_true(message.no_wait && message.timestamp.is_set && message.timestamp.value == 1.5);
    assert_string_equal(message.semaphore_name, "/done");
    assert_string_equal(message.batch_id, "b");
    assert_int_equal(message.commit, TB__COMMIT_UNSAID);
    assert_false(message.checksum.is_set);
    tb__arena_fini(&arena);
    free(h.bytes.item);
}

static void number(by_hand *h, const char *key, uint64_t value) {
    str(h, key);
    msgpack_pack_uint64(&h->packer, value);
}

static void flag(by_hand *h, const char *key) {
    str(h, key);
    msgpack_pack_true(&h->packer);
}

static void decode_by_hand(by_hand *h, tb__arena *arena, tb__message *out) {
    assert_int_equal(tb__message_decode((tb__blob){h->bytes.item, h->bytes.count}, arena, out), TB_OK);
    free(h->bytes.item);
}

/* What may be nil may be absent; a time may be an integer. */
static void test_defaults_may_be_absent(void **state) {
    (void)state;
    static const struct {
        int64_t given;
        double read;
    } times[] = {{0, 0}, {1700000000, 1700000000}, {-3, -3}, {INT64_MIN, -0x1p63}};
    by_hand h;
    tb__arena arena = {0};
    tb__message m;
    begin(&h, 5);
    pair(&h, "type", "InitPair");
    pair(&h, "pair_name", "p");
    pair(&h, "local_name", "a");
    pair(&h, "remote_name", "b");
    number(&h, "expected_world_size", 2);
    decode_by_hand(&h, &arena, &m);
    assert_true(m.mesh.nbytes == 0 && m.placements.nbytes == 0 && !m.timestamp.is_set && !m.semaphore_name);

    begin(&h, 3);
    pair(&h, "type", "RegisterTensors");
    pair(&h, "batch_id", "b");
    str(&h, "tensors");
    msgpack_pack_array(&h.packer, 0);
    decode_by_hand(&h, &arena, &m);
    assert_false(m.bucket_size.is_set);

    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        begin(&h, 3);
        pair(&h, "type", "CleanupBatch");
        pair(&h, "batch_id", "b");
        str(&h, "timestamp");
        msgpack_pack_int64(&h.packer, times[i].given);
        decode_by_hand(&h, &arena, &m);
        assert_true(m.timestamp.is_set && m.timestamp.value == times[i].read);
    }
    tb__arena_fini(&arena);
}

/* Each key goes to its own member. */
static void test_members(void **state) {
    (void)state;
    by_hand h;
    tb__arena arena = {0};
    tb__message m;
    begin(&h, 15);
    pair(&h, "type", "RegisterTensors");
    pair(&h, "batch_id", "b");
    str(&h, "tensors");
    msgpack_pack_array(&h.packer, 1);
    msgpack_pack_array(&h.packer, 2);
    str(&h, "p");
    msgpack_pack_bin_with_body(&h.packer, "xyz", 3);
    number(&h, "bucket_size", 1);
    pair(&h, "timestamp", NULL);
    pair(&h, "semaphore_name", NULL);
    number(&h, "timeout_ms", 2);
    number(&h, "staging_bytes", 3);
    str(&h, "ties");
    msgpack_pack_array(&h.packer, 1);
    msgpack_pack_array(&h.packer, 2);
    str(&h, "head");
    str(&h, "embedding");
    str(&h, "ignored");
    msgpack_pack_array(&h.packer, 1);
    str(&h, "*.bias");
    number(&h, "group_window", 4);
    flag(&h, "snapshot");
    pair(&h, "commit", "shadow");
    flag(&h, "checksum");
    number(&h, "max_in_flight", 5);
    decode_by_hand(&h, &arena, &m);
    assert_true(m.max_in_flight == 5);
    assert_true(m.kind == TB__REGISTER_TENSORS && m.bucket_size.value == 1 && m.timeout_ms == 2 &&
                m.staging_bytes == 3);
    assert_true(m.group_window == 4 && m.snapshot && !m.staged && m.commit == TB__SHADOW && m.checksum.value);
    assert_true(m.tensors.count == 1 && m.tensors.item[0].payload.nbytes == 3 && m.ties.count == 1);
    assert_string_equal(m.tensors.item[0].pair_name, "p");
    assert_string_equal(m.ties.item[0].name, "head");
    assert_string_equal(m.ties.item[0].canonical, "embedding");
    assert_true(m.ignored.count == 1 && strcmp(m.ignored.item[0], "*.bias") == 0);

    static const char *const names[] = {"seq",   "version",    "rank",        "index",       "size",        "attempt",
                                        "bytes", "bytes_done", "bytes_total", "groups_done", "groups_total"};
    begin(&h, 18);
    pair(&h, "type", "Reply");
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        number(&h, names[i], i + 1);
    number(&h, "status", 7);
    pair(&h, "message", "m");
    pair(&h, "name", "n");
    pair(&h, "state", "s");
    pair(&h, "error", "e");
    flag(&h, "transfer_signal");
    decode_by_hand(&h, &arena, &m);
    const uint64_t got[] = {m.seq,
                            m.version.value,
                            m.rank.value,
                            m.index.value,
                            m.size.value,
                            m.attempt.value,
                            m.bytes.value,
                            m.bytes_done.value,
                            m.bytes_total.value,
                            m.groups_done.value,
                            m.groups_total.value};
    for (unsigned i = 0; i < sizeof got / sizeof *got; i++)
        assert_int_equal(got[i], i + 1);
    assert_true(m.status == TB_TIMEOUT && m.transfer_signal.is_set && m.transfer_signal.value && !m.seconds.is_set);
    assert_true(*m.message == 'm' && *m.name == 'n' && *m.state == 's' && *m.error == 'e');

    begin(&h, 9);
    pair(&h, "type", "InitPair");
    pair(&h, "pair_name", "p");
    pair(&h, "local_name", "l");
    number(&h, "expected_world_size", 4);
    pair(&h, "remote_name", "r");
    str(&h, "mesh_shape_payload");
    msgpack_pack_bin_with_body(&h.packer, "m", 1);
    str(&h, "placements_payload");
    msgpack_pack_bin_with_body(&h.packer, "", 0);
    pair(&h, "timestamp", NULL);
    pair(&h, "semaphore_name", "/s");
    tb__blob map = {h.bytes.item, h.bytes.count};
    assert_int_equal(tb__message_decode(map, &arena, &m), TB_OK);
    assert_true(*m.pair_name == 'p' && *m.local_name == 'l' && *m.remote_name == 'r' && m.expected_world_size == 4);
    assert_true(m.mesh.nbytes == 1 && *m.mesh.data == 'm' && m.placements.nbytes == 0);
    assert_true(!m.timestamp.is_set && strcmp(m.semaphore_name, "/s") == 0);
    free(h.bytes.item);
    tb__arena_fini(&arena);
}

/* An unknown key may hold anything, but not at any depth. */
static void test_nesting_is_bounded(void **state) {
    (void)state;
    for (size_t depth = 1; depth < 2000000; depth = depth < 40 ? depth + 1 : depth * 10) {
        by_hand h;
        begin(&h, 5);
        pair(&h, "type", "CleanupBatch");
        pair(&h, "batch_id", "b");
        pair(&h, "timestamp", NULL);
        pair(&h, "semaphore_name", NULL);
        str(&h, "x");
        for (size_t i = 0; i < depth; i++)
            assert_true(tb__vec_push(&h.bytes, (uint8_t)(i % 2 ? 0x81 : 0x91)));
        for (size_t i = 1; i < depth; i += 2) /* what a map has at its key lies above what it has at its value */
            assert_true(tb__vec_push(&h.bytes, 0x01));
        assert_true(tb__vec_push(&h.bytes, 0x01));
        tb__arena arena = {0};
        tb__message message;
        tb__blob map = {.data = h.bytes.item, .nbytes = h.bytes.count};
        tb_status status = tb__message_decode(map, &arena, &message);
        assert_int_equal(status, depth < TB__MAX_NESTING ? TB_OK : TB_TOO_BIG);
        if (status != TB_OK)
            assert_non_null(strstr(tb_error_detail(), "nested deeper than 16"));
        tb__arena_fini(&arena);
        free(h.bytes.item);
    }
}

/* Whatever headers claim, nothing is allocated for it: here every allocation fails, and the answer is the same. */
static void test_claims_allocate_nothing(void **state) {
    (void)state;
    static const char *const claims[] = {"\xdd\xff\xff\xff\xff", "\xdf\xff\xff\xff\xff", "\xdb\xff\xff\xff\xff",
                                         "\xc6\xff\xff\xff\xff", "\xc9\xff\xff\xff\xff", "\xdc\xff\xff"};
    static const char *const keys[] = {"tensors", "ties", "ignored", "unknown", "batch_id"};
    for (size_t i = 0; i < sizeof claims / sizeof *claims; i++) {
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            by_hand h;
            begin(&h, 2);
            pair(&h, "type", "RegisterTensors");
            str(&h, keys[k]);
            push_bytes(&h.bytes, claims[i], strlen(claims[i]));
            tb__arena arena = {0};
            tb__message message;
            tb__blob map = {.data = h.bytes.item, .nbytes = h.bytes.count};
            tb__mem_fail_after(0);
            tb_status status = tb__message_decode(map, &arena, &message);
            tb__mem_fail_after(-1);
            assert_int_equal(status, TB_INVALID);
            assert_non_null(strstr(tb_error_detail(), "ends in the middle of a value"));
            tb__arena_fini(&arena);
            free(h.bytes.item);
        }
    }
    by_hand h; /* as many items as claimed, but too small to be what they should */
    begin(&h, 2);
    pair(&h, "type", "RegisterTensors");
    str(&h, "tensors");
    msgpack_pack_array(&h.packer, 1000000);
    for (int i = 0; i < 1000000; i++)
        assert_true(tb__vec_push(&h.bytes, 0xc0));
    tb__mem_fail_after(0);
    expect_refused(&h, "RegisterTensors: tensors has fewer than 1000000 items of its kind");
    tb__mem_fail_after(-1);
}

static void test_hello_of_another_version(void **state) {
    (void)state;
    by_hand h;
    begin(&h, 3);
    pair(&h, "type", "Hello");
    str(&h, "version");
    msgpack_pack_int(&h.packer, 7);
    str(&h, "client"); /* not what it is today */
    msgpack_pack_int(&h.packer, 7);
    tb__arena arena = {0};
    tb__message message;
    assert_int_equal(tb__message_decode((tb__blob){h.bytes.item, h.bytes.count}, &arena, &message), TB_OK);
    assert_int_equal(message.kind, TB__HELLO);
    assert_int_equal(tb__hello_check(&message), TB_REFUSED);
    assert_string_equal(tb_error_detail(),
                        "the client speaks version 7 of the bus protocol, the agent versions 1 to 2");
    message.protocol = TB__PROTOCOL_VERSION;
    assert_int_equal(tb__hello_check(&message), TB_OK);
    free(h.bytes.item);
    tb__arena_fini(&arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals_name_the_field),  cmocka_unit_test(test_any_order_and_unknown_keys),
        cmocka_unit_test(test_defaults_may_be_absent),   cmocka_unit_test(test_members),
        cmocka_unit_test(test_nesting_is_bounded),       cmocka_unit_test(test_claims_allocate_nothing),
        cmocka_unit_test(test_hello_of_another_version),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
