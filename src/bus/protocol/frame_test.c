/* Frames: however the bytes of a stream arrive, the same frames come out, and memory follows what has arrived. */
#include "bus/protocol/protocol_test.h"

#include "../tests/support/frame_feed.h"

enum { NFRAMES = 40 };

/* Frames of these lengths, whose bytes are their number. */
static tb__bytes make_stream(rng *r, size_t *lengths) {
    tb__bytes stream = {0};
    for (int i = 0; i < NFRAMES; i++) {
        lengths[i] = (size_t)rng_range(r, 0, rng_range(r, 0, 5) == 0 ? 300000 : 50);
        assert_true(tb__vec_reserve(&stream, lengths[i] + 4));
        for (int k = 0; k < 4; k++)
            stream.item[stream.count++] = (uint8_t)(lengths[i] >> (8 * k));
        memset(stream.item + stream.count, i, lengths[i]);
        stream.count += lengths[i];
    }
    return stream;
}

static int take_frames(tb__frame_reader *reader, const size_t *lengths, int seen) {
    tb__blob map;
    bool has_frame;
    while (assert_int_equal(tb__frame_next(reader, &map, &has_frame), TB_OK), has_frame) {
        assert_true(seen < NFRAMES);
        assert_int_equal(map.nbytes, lengths[seen]);
        for (size_t i = 0; i < map.nbytes; i++)
            assert_int_equal(map.data[i], seen);
        seen++;
    }
    return seen;
}

/* `read` gets as many bytes at a time as there is room for, the other way as many as it likes. */
static void check_stream(rng *r, bool read, int64_t largest) {
    size_t lengths[NFRAMES];
    tb__bytes stream = make_stream(r, lengths);
    tb__frame_reader reader = {0};
    int seen = 0;
    for (size_t at = 0; at < stream.count;) {
        size_t n = (size_t)rng_range(r, 0, largest), room = 0;
        n = n < stream.count - at ? n : stream.count - at;
        if (read) {
            uint8_t *where;
            assert_int_equal(tb__frame_room(&reader, &where, &room), TB_OK);
            assert_true(room > 0);
            n = n < room ? n : room;
            memcpy(where, stream.item + at, n);
            tb__frame_filled(&reader, n);
        } else {
            assert_int_equal(frame_feed(&reader, stream.item + at, n), TB_OK);
        }
        at += n;
        seen = take_frames(&reader, lengths, seen);
    }
    assert_int_equal(seen, NFRAMES);
    assert_true(tb__frame_is_between(&reader));
    tb__frame_reader_fini(&reader);
    free(stream.item);
}

static void test_any_pieces(void **state) {
    (void)state;
    rng r = {test_seed()};
    for (int64_t i = 0; i < test_cases(20); i++) {
        check_stream(&r, true, i % 2 ? 100000 : 5000);
        check_stream(&r, false, i % 2 ? 1000000 : 3000);
    }
}

static void test_byte_by_byte(void **state) {
    (void)state;
    static const uint8_t stream[] = {3, 0, 0, 0, 'a', 'b', 'c', 0, 0, 0, 0, 1, 0, 0, 0, 'd'};
    tb__frame_reader reader = {0};
    char got[8] = {0};
    size_t nframes = 0;
    for (size_t i = 0; i < sizeof stream; i++) {
        tb__blob map;
        bool has_frame;
        assert_int_equal(frame_feed(&reader, &stream[i], 1), TB_OK);
        assert_int_equal(tb__frame_next(&reader, &map, &has_frame), TB_OK);
        assert_int_equal(has_frame, i == 6 || i == 10 || i == 15);
        assert_int_equal(tb__frame_is_between(&reader), has_frame);
        if (has_frame) {
            strncat(got, (const char *)map.data, map.nbytes);
            nframes++;
        }
    }
    assert_int_equal(nframes, 3);
    assert_string_equal(got, "abcd");
    tb__frame_reader_fini(&reader);
}

static tb_status next_after(size_t max_nbytes, size_t length, size_t *capacity) {
    tb__frame_reader reader = {.max_nbytes = max_nbytes};
    uint8_t header[] = {(uint8_t)length, (uint8_t)(length >> 8), (uint8_t)(length >> 16), (uint8_t)(length >> 24), 1};
    tb__blob map;
    bool has_frame;
    assert_int_equal(frame_feed(&reader, header, sizeof header), TB_OK);
    tb_status status = tb__frame_next(&reader, &map, &has_frame);
    assert_false(has_frame);
    uint8_t *at;
    size_t room;
    assert_int_equal(tb__frame_room(&reader, &at, &room), TB_OK);
    *capacity = reader.bytes.capacity;
    tb__frame_reader_fini(&reader);
    return status;
}

static void test_claims(void **state) {
    (void)state;
    size_t capacity;
    assert_int_equal(next_after(0, TB__FRAME_MAX, &capacity), TB_OK);
    assert_true(capacity < 100000);
    assert_int_equal(next_after(0, TB__FRAME_MAX + 1, &capacity), TB_TOO_BIG);
    assert_string_equal(tb_error_detail(), "a frame of 67108865 bytes where at most 67108864 are allowed");
    assert_int_equal(next_after(0, UINT32_MAX, &capacity), TB_TOO_BIG);
    assert_int_equal(next_after(TB__HELLO_MAX, TB__HELLO_MAX, &capacity), TB_OK);
    assert_int_equal(next_after(TB__HELLO_MAX, TB__HELLO_MAX + 1, &capacity), TB_TOO_BIG);
}

/* What a large frame needed is given back. */
static void test_memory_is_given_back(void **state) {
    (void)state;
    tb__frame_reader reader = {0};
    static const uint8_t header[] = {0, 0, 0x40, 0}; /* 4 MiB */
    assert_int_equal(frame_feed(&reader, header, sizeof header), TB_OK);
    tb__blob map;
    bool has_frame = false;
    while (!has_frame) {
        uint8_t *at;
        size_t room;
        assert_int_equal(tb__frame_room(&reader, &at, &room), TB_OK);
        assert_true(reader.bytes.capacity <= 2 * reader.bytes.count + (128 << 10));
        memset(at, 7, room);
        tb__frame_filled(&reader,
                         reader.bytes.count + room > (4 << 20) + 4 ? (4 << 20) + 4 - reader.bytes.count : room);
        assert_int_equal(tb__frame_next(&reader, &map, &has_frame), TB_OK);
    }
    assert_int_equal(map.nbytes, 4 << 20);
    uint8_t *at;
    size_t room;
    assert_int_equal(tb__frame_room(&reader, &at, &room), TB_OK);
    assert_true(reader.bytes.capacity <= 1 << 20);
    tb__frame_reader_fini(&reader);
}

static void test_memory_may_be_short(void **state) {
    (void)state;
    tb__frame_reader reader = {0};
    uint8_t *at;
    size_t room;
    tb__mem_fail_after(0);
    tb_status fed = frame_feed(&reader, "1234", 4), roomed = tb__frame_room(&reader, &at, &room);
    tb__mem_fail_after(-1);
    assert_true(fed == TB_NO_MEMORY && roomed == TB_NO_MEMORY);
    tb__frame_reader_fini(&reader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_pieces),
        cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_claims),
        cmocka_unit_test(test_memory_is_given_back),
        cmocka_unit_test(test_memory_may_be_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
