/* What the tests of the protocol share: hex, and messages of random contents. */
#ifndef TB_BUS_PROTOCOL_TEST_H
#define TB_BUS_PROTOCOL_TEST_H

#include "../tests/support/random_case.h"
#include "bus/protocol/protocol.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* To be freed by the caller. */
static inline char *hex_of(tb__blob bytes) {
    char *text = malloc(2 * bytes.nbytes + 1);
    assert_non_null(text);
    for (size_t i = 0; i < bytes.nbytes; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", bytes.data[i]);
    text[2 * bytes.nbytes] = '\0';
    return text;
}

/* The map of a frame. */
static inline tb__blob map_of(const tb__bytes *frame) {
    assert_true(frame->count > TB__FRAME_HEADER);
    return (tb__blob){.data = frame->item + TB__FRAME_HEADER, .nbytes = frame->count - TB__FRAME_HEADER};
}

/* A copy of its own, so that reading beyond it is found. */
static inline tb__blob copy_of(const uint8_t *data, size_t nbytes) {
    uint8_t *copy = malloc(nbytes ? nbytes : 1);
    assert_non_null(copy);
    memcpy(copy, data, nbytes);
    return (tb__blob){.data = copy, .nbytes = nbytes};
}

#endif
