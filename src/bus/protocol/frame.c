/* Splits a stream into frames: bytes are collected in a buffer, which grows as they arrive. */
#include "bus/protocol/protocol.h"

#include <string.h>

enum { STEP = 64 << 10, KEEP = 1 << 20 };

static size_t length_at(const uint8_t *p) {
    return (size_t)p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16 | (size_t)p[3] << 24;
}

/* Moves unread bytes to the front, and frees a buffer that a large frame has enlarged. */
static void forget_taken(tb__frame_reader *reader) {
    tb__bytes *bytes = &reader->bytes;
    bytes->count -= reader->taken;
    if (reader->taken > 0 && bytes->count > 0)
        memmove(bytes->item, bytes->item + reader->taken, bytes->count);
    reader->taken = 0;
    if (bytes->count == 0 && bytes->capacity > KEEP) {
        free(bytes->item);
        *bytes = (tb__bytes){0};
    }
}

tb_status tb__frame_room(tb__frame_reader *reader, uint8_t **at, size_t *nbytes) {
    forget_taken(reader);
    tb__bytes *bytes = &reader->bytes;
    if (bytes->capacity - bytes->count < STEP / 2 && !tb__vec_reserve(bytes, STEP))
        return TB_NO_MEMORY;
    *at = bytes->item + bytes->count;
    *nbytes = bytes->capacity - bytes->count;
    return TB_OK;
}

void tb__frame_filled(tb__frame_reader *reader, size_t nbytes) {
    reader->bytes.count += nbytes;
}

tb_status tb__frame_add(tb__frame_reader *reader, const void *data, size_t nbytes) {
    forget_taken(reader);
    if (!tb__vec_reserve(&reader->bytes, nbytes))
        return TB_NO_MEMORY;
    memcpy(reader->bytes.item + reader->bytes.count, data, nbytes);
    reader->bytes.count += nbytes;
    return TB_OK;
}

tb_status tb__frame_next(tb__frame_reader *reader, tb__blob *map, bool *has_frame) {
    *has_frame = false;
    size_t waiting = reader->bytes.count - reader->taken;
    if (waiting < TB__FRAME_HEADER)
        return TB_OK;
    const uint8_t *start = reader->bytes.item + reader->taken;
    size_t length = length_at(start), most = reader->max_nbytes ? reader->max_nbytes : TB__FRAME_MAX;
    if (length > most)
        return tb__fail(TB_TOO_BIG, "a frame of %zu bytes where at most %zu are allowed", length, most);
    if (waiting - TB__FRAME_HEADER < length)
        return TB_OK;
    *map = (tb__blob){.data = start + TB__FRAME_HEADER, .nbytes = length};
    reader->taken += TB__FRAME_HEADER + length;
    *has_frame = true;
    return TB_OK;
}

bool tb__frame_is_between(const tb__frame_reader *reader) {
    return reader->bytes.count == reader->taken;
}

void tb__frame_reader_fini(tb__frame_reader *reader) {
    free(reader->bytes.item);
    *reader = (tb__frame_reader){0};
}
