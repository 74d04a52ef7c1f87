/* Messages: the bytes that the protocol promises, round trips, and damage. */
#include "bus/protocol/protocol_test.h"

#include <msgpack.h>

static void expect_map(const tb__message *message, const char *hex) {
    tb__bytes frame = {0};
    assert_int_equal(tb__message_encode(message, &frame), TB_OK);
    char *got = hex_of(map_of(&frame));
    assert_string_equal(got, hex);
    size_t length = frame.item[0] | (size_t)frame.item[1] << 8 | (size_t)frame.item[2] << 16;
    assert_int_equal(length, frame.count - TB__FRAME_HEADER);
    free(got);
    free(frame.item);
}

static void test_promised_bytes(void **state) {
    (void)state;
    expect_map(
        &(tb__message){.kind = TB__CLEANUP_BATCH, .batch_id = "b"},
        "84a474797065ac436c65616e75704261746368a862617463685f6964a162a974696d657374616d70c0ae73656d6170686f72655f"
        "6e616d65c0");
    expect_map(
        &(tb__message){.kind = TB__TRANSFER, .batch_id = "b0", .direction = TB__SEND},
        "85a474797065a85472616e73666572a862617463685f6964a26230ad7472616e736665725f74797065a473656e64a974696d6573"
        "74616d70c0ae73656d6170686f72655f6e616d65c0");
    expect_map(&(tb__message){.kind = TB__INSPECT},
               "83a474797065a7496e7370656374a974696d657374616d70c0ae73656d6170686f72655f6e616d65c0");
    expect_map(&(tb__message){.kind = TB__REPLY, .seq = 1, .message = "", .report = {(const uint8_t *)"{}", 2}},
               "85a474797065a55265706c79a373657101a673746174757300a76d657373616765a0a67265706f7274c4027b7d");
}

/* Any contents, by the table: the tests below hold the table itself against bytes. */
static const char *random_text(rng *r, tb__arena *arena) {
    static const char *const pieces[] = {"a", "layer.", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x9a\x8c", "/", " ", "9"};
    int64_t count = rng_range(r, 0, rng_range(r, 0, 9) == 0 ? 300 : 8);
    char *text = tb__arena_alloc(arena, (size_t)count * 6 + 1, 1);
    assert_non_null(text);
    *text = '\0';
    for (int64_t i = 0; i < count; i++)
        strcat(text, pieces[rng_range(r, 0, 7)]);
    return text;
}

static uint64_t random_uint(rng *r, uint64_t max) {
    uint64_t value = rng_next(r) >> rng_range(r, 0, 63);
    return max && value > max ? value % max : value;
}

static tb__blob random_bytes(rng *r, tb__arena *arena) {
    size_t nbytes = (size_t)rng_range(r, 0, rng_range(r, 0, 9) == 0 ? 70000 : 40);
    uint8_t *data = tb__arena_alloc(arena, nbytes, 1);
    assert_non_null(data);
    for (size_t i = 0; i < nbytes; i++)
        data[i] = (uint8_t)rng_next(r);
    return (tb__blob){.data = data, .nbytes = nbytes};
}

static void fill_lists(rng *r, tb__arena *arena, const tb__field *field, void *at) {
    size_t count = (size_t)rng_range(r, 0, 20);
    tb__entry *entries = tb__arena_alloc(arena, count, sizeof *entries);
    tb_tie *ties = tb__arena_alloc(arena, count, sizeof *ties);
    const char **texts = tb__arena_alloc(arena, count, sizeof *texts);
    tb__outcome *outcomes = tb__arena_alloc(arena, count, sizeof *outcomes);
    assert_true(entries && ties && texts && outcomes);
    for (size_t i = 0; i < count; i++) {
        entries[i] = (tb__entry){random_text(r, arena), random_bytes(r, arena)};
        ties[i] = (tb_tie){random_text(r, arena), random_text(r, arena)};
        texts[i] = random_text(r, arena);
        outcomes[i] = (tb__outcome){random_text(r, arena), (tb_status)-rng_range(r, 0, 12), random_text(r, arena),
                                    random_uint(r, 0), rng_range(r, 0, 1)};
    }
    if (field->type == TB__FIELD_ENTRIES)
        *(tb__entries *)at = (tb__entries){.count = count, .item = entries};
    else if (field->type == TB__FIELD_TIES)
        *(tb__ties *)at = (tb__ties){.count = count, .item = ties};
    else if (field->type == TB__FIELD_OUTCOMES)
        *(tb__outcomes *)at = (tb__outcomes){.count = count, .item = outcomes};
    else
        *(tb__texts *)at = (tb__texts){.count = count, .item = texts};
}

static void fill_field(rng *r, tb__arena *arena, const tb__field *field, void *at) {
    switch (field->type) {
    case TB__FIELD_TEXT:
    case TB__FIELD_SENTENCE:
        *(const char **)at = random_text(r, arena);
        break;
    case TB__FIELD_CHOICE: {
        unsigned n = 0;
        while (field->choices[n])
            n++;
        *(unsigned *)at = (unsigned)rng_range(r, 0, field->rule == TB__OPTION ? n : n - 1);
        break;
    }
    case TB__FIELD_STATUS:
        *(tb_status *)at = (tb_status)-rng_range(r, 0, 11);
        break;
    case TB__FIELD_UINT:
        *(uint64_t *)at = random_uint(r, field->max);
        break;
    case TB__FIELD_BOOL:
    case TB__FIELD_UNLESS:
        *(bool *)at = rng_range(r, 0, 1);
        break;
    case TB__FIELD_MAYBE_UINT:
        *(tb__maybe_uint *)at = tb__some_uint(random_uint(r, field->max));
        break;
    case TB__FIELD_MAYBE_FLOAT:
        *(tb__maybe_float *)at = tb__some_float((double)rng_range(r, -1000000, 1000000) / 7);
        break;
    case TB__FIELD_MAYBE_BOOL:
        *(tb__maybe_bool *)at = tb__some_bool(rng_range(r, 0, 1));
        break;
    case TB__FIELD_BIN:
        *(tb__blob *)at = random_bytes(r, arena);
        break;
    case TB__FIELD_ENTRIES:
    case TB__FIELD_TIES:
    case TB__FIELD_TEXTS:
    case TB__FIELD_OUTCOMES:
        fill_lists(r, arena, field, at);
        break;
    default:
        fail_msg("%s has a type that no message has", field->name);
    }
}

static void random_message(rng *r, tb__arena *arena, tb__message *out) {
    *out = (tb__message){.kind = (tb__message_kind)rng_range(r, 0, TB__MESSAGE_KINDS - 1)};
    const tb__schema *schema = tb__message_schema(out->kind);
    for (size_t i = 0; i < schema->nfields; i++) {
        if (schema->fields[i].rule == TB__REQUIRED || rng_range(r, 0, 1))
            fill_field(r, arena, &schema->fields[i], (char *)out + schema->fields[i].offset);
    }
    if (out->kind == TB__HELLO)
        out->protocol = TB__PROTOCOL_VERSION;
}

/* Everything that a message says is in its bytes, so two messages are equal if their bytes are. */
static void expect_equivalent(const tb__message *a, const tb__message *b) {
    tb__bytes first = {0}, second = {0};
    assert_int_equal(tb__message_encode(a, &first), TB_OK);
    assert_int_equal(tb__message_encode(b, &second), TB_OK);
    assert_int_equal(first.count, second.count);
    assert_memory_equal(first.item, second.item, first.count);
    free(first.item);
    free(second.item);
}

/* Another decoder sees one map, with the keys of the table in their order and no others. */
static void expect_keys(tb__blob map, const tb__schema *schema) {
    msgpack_unpacked unpacked;
    msgpack_unpacked_init(&unpacked);
    size_t used = 0;
    assert_int_equal(msgpack_unpack_next(&unpacked, (const char *)map.data, map.nbytes, &used), MSGPACK_UNPACK_SUCCESS);
    assert_int_equal(used, map.nbytes);
    assert_int_equal(unpacked.data.type, MSGPACK_OBJECT_MAP);
    const msgpack_object_map *pairs = &unpacked.data.via.map;
    assert_true(pairs->size >= 1 && pairs->ptr[0].key.via.str.size == 4);
    assert_memory_equal(pairs->ptr[0].val.via.str.ptr, schema->name, strlen(schema->name));
    uint32_t at = 1;
    for (size_t i = 0; i < schema->nfields; i++) {
        const char *name = schema->fields[i].name;
        bool is_here = at < pairs->size && pairs->ptr[at].key.via.str.size == strlen(name) &&
                       memcmp(pairs->ptr[at].key.via.str.ptr, name, strlen(name)) == 0;
        assert_true(is_here || schema->fields[i].rule == TB__OPTION);
        at += is_here;
    }
    assert_int_equal(at, pairs->size);
    msgpack_unpacked_destroy(&unpacked);
}

static void test_random_messages_come_back(void **state) {
    (void)state;
    rng r = {test_seed()};
    tb__arena arena = {0};
    for (int64_t i = 0; i < test_cases(3000); i++) {
        tb__message message, back;
        tb__bytes frame = {0};
        random_message(&r, &arena, &message);
        assert_int_equal(tb__message_encode(&message, &frame), TB_OK);
        expect_keys(map_of(&frame), tb__message_schema(message.kind));
        assert_int_equal(tb__message_decode(map_of(&frame), &arena, &back), TB_OK);
        assert_int_equal(back.kind, message.kind);
        expect_equivalent(&message, &back);
        free(frame.item);
        tb__arena_reset(&arena);
    }
    tb__arena_fini(&arena);
}

/* Refused with a sentence, or taken for something that can be written again and then reads the same. */
static bool accepts(tb__blob map, tb__arena *arena) {
    tb__message message, again;
    tb_status status = tb__message_decode(map, arena, &message);
    if (status != TB_OK) {
        assert_true(status == TB_INVALID || status == TB_TOO_BIG);
        assert_true(*tb_error_detail());
        return false;
    }
    if (message.kind == TB__HELLO &&
        (message.protocol < TB__OLDEST_PROTOCOL || message.protocol > TB__PROTOCOL_VERSION))
        return true;
    tb__bytes frame = {0};
    assert_int_equal(tb__message_encode(&message, &frame), TB_OK);
    assert_int_equal(tb__message_decode(map_of(&frame), arena, &again), TB_OK);
    expect_equivalent(&message, &again);
    free(frame.item);
    return true;
}

static void test_damaged_messages(void **state) {
    (void)state;
    rng r = {test_seed()};
    tb__arena arena = {0};
    for (int64_t i = 0; i < test_cases(150); i++) {
        tb__message message;
        tb__bytes frame = {0};
        random_message(&r, &arena, &message);
        assert_int_equal(tb__message_encode(&message, &frame), TB_OK);
        tb__blob map = map_of(&frame);
        size_t step = map.nbytes / 300 + 1;
        for (size_t n = 0; n < map.nbytes; n += step) {
            tb__blob cut = copy_of(map.data, n);
            assert_false(accepts(cut, &arena));
            free((void *)cut.data);
        }
        for (int change = 0; change < 300; change++) {
            tb__blob other = copy_of(map.data, map.nbytes);
            for (int64_t k = rng_range(&r, 1, 3); k > 0; k--)
                ((uint8_t *)other.data)[rng_range(&r, 0, (int64_t)other.nbytes - 1)] = (uint8_t)rng_next(&r);
            (void)accepts(other, &arena);
            free((void *)other.data);
        }
        tb__bytes longer = {0};
        assert_int_equal(tb__message_encode(&message, &longer), TB_OK);
        assert_true(tb__vec_push(&longer, 0xc0));
        assert_false(accepts(map_of(&longer), &arena));
        assert_non_null(strstr(tb_error_detail(), "after the MessagePack value"));
        free(longer.item);
        free(frame.item);
        tb__arena_reset(&arena);
    }
    tb__arena_fini(&arena);
}

static void test_memory_may_be_short(void **state) {
    (void)state;
    rng r = {test_seed()};
    tb__arena made = {0}, arena = {0};
    for (int i = 0; i < 50; i++) {
        tb__message message, back;
        tb__bytes frame = {0};
        random_message(&r, &made, &message);
        tb_status status = TB_NO_MEMORY;
        for (long n = 0; status != TB_OK; n++) {
            tb__mem_fail_after(n);
            status = tb__message_encode(&message, &frame);
            tb__mem_fail_after(-1);
            assert_true(status == TB_OK || (status == TB_NO_MEMORY && frame.count == 0));
        }
        status = TB_NO_MEMORY;
        for (long n = 0; status != TB_OK; n++) {
            tb__mem_fail_after(n);
            status = tb__message_decode(map_of(&frame), &arena, &back);
            tb__mem_fail_after(-1);
            assert_true(status == TB_OK || status == TB_NO_MEMORY);
            if (status == TB_OK)
                expect_equivalent(&message, &back);
            tb__arena_fini(&arena);
            arena = (tb__arena){0};
        }
        free(frame.item);
    }
    tb__arena_fini(&made);
}

static void test_encoder_refuses(void **state) {
    (void)state;
    tb__bytes frame = {0};
    assert_int_equal(tb__message_encode(&(tb__message){.kind = TB__CLEANUP_BATCH}, &frame), TB_INVALID);
    assert_string_equal(tb_error_detail(), "CleanupBatch: batch_id is not set");
    assert_int_equal(tb__message_encode(&(tb__message){.kind = TB__CLEANUP_BATCH, .batch_id = "\xff"}, &frame),
                     TB_INVALID);
    assert_string_equal(tb_error_detail(), "CleanupBatch: batch_id is not UTF-8");
    tb__message late = {.kind = TB__TRANSFER, .batch_id = "b", .timeout_ms = UINT64_C(1) << 40};
    assert_int_equal(tb__message_encode(&late, &frame), TB_TOO_BIG);
    assert_int_equal(tb__message_encode(&(tb__message){.kind = TB__MESSAGE_KINDS}, &frame), TB_INVALID);
    uint8_t *large = calloc(1, (64 << 20) + 1);
    assert_non_null(large);
    tb__entry entry = {.pair_name = "p", .payload = {.data = large, .nbytes = 64 << 20}};
    tb__message big = {.kind = TB__REGISTER_TENSORS, .batch_id = "b", .tensors = {.count = 1, .item = &entry}};
    assert_int_equal(tb__message_encode(&big, &frame), TB_TOO_BIG);
    assert_int_equal(frame.count, 0);
    entry.payload.nbytes = 63 << 20;
    assert_int_equal(tb__message_encode(&big, &frame), TB_OK);
    free(large);
    free(frame.item);
}

/* A sentence gets through whatever it quotes. */
static void test_sentences_are_cleaned(void **state) {
    (void)state;
    char *text = malloc(10001);
    assert_non_null(text);
    memset(text, 0xe2, 10000);
    text[10000] = '\0';
    memcpy(text, "a\xff\xc3\xa9", 4);
    tb__message reply = {.kind = TB__REPLY, .status = TB_LOST, .message = text}, back;
    tb__bytes frame = {0};
    tb__arena arena = {0};
    assert_int_equal(tb__message_encode(&reply, &frame), TB_OK);
    assert_int_equal(tb__message_decode(map_of(&frame), &arena, &back), TB_OK);
    assert_int_equal(back.status, TB_LOST);
    assert_int_equal(strlen(back.message), TB__MAX_SENTENCE);
    assert_memory_equal(back.message, "a?\xc3\xa9??", 6);
    tb__arena_fini(&arena);
    free(frame.item);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_promised_bytes),   cmocka_unit_test(test_random_messages_come_back),
        cmocka_unit_test(test_damaged_messages), cmocka_unit_test(test_memory_may_be_short),
        cmocka_unit_test(test_encoder_refuses),  cmocka_unit_test(test_sentences_are_cleaned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
