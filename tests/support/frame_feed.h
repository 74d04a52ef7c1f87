/* Gives a frame reader bytes that are in memory, as a socket would. */
#ifndef TB_TESTS_FRAME_FEED_H
#define TB_TESTS_FRAME_FEED_H

#include "bus/protocol/protocol.h"

#include <string.h>

static inline tb_status frame_feed(tb__frame_reader *reader, const void *data, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        uint8_t *at;
        size_t room;
        TB_TRY(tb__frame_room(reader, &at, &room));
        room = room < nbytes - done ? room : nbytes - done;
        memcpy(at, (const uint8_t *)data + done, room);
        tb__frame_filled(reader, room);
        done += room;
    }
    return TB_OK;
}

#endif
