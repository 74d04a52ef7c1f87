/* Shared by transports that match messages with receives themselves: unexpected messages, and the begin and end of
 * operations. */
#ifndef TB_TRANSPORT_MESSAGE_H
#define TB_TRANSPORT_MESSAGE_H

#include "transport/match.h"
#include "transport/transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A short message that came before its receive was posted. */
typedef struct tb__unexpected {
    tb__waiter waiter;
    size_t nbytes;
    unsigned char data[];
} tb__unexpected;

/* The caller fills in `data`. NULL: no memory. */
static inline tb__unexpected *tb__unexpected_create(int32_t peer, uint64_t tag, size_t nbytes) {
    tb__unexpected *a = tb__malloc(1, sizeof *a + nbytes);
    if (a)
        *a = (tb__unexpected){.waiter = {.peer = peer, .tag = tag}, .nbytes = nbytes};
    return a;
}

/* Keeps a copy of an unexpected message. False: no memory. */
static inline bool tb__unexpected_add(tb__match *unexpected, int32_t peer, uint64_t tag, const void *data,
                                      size_t nbytes) {
    tb__unexpected *a = tb__unexpected_create(peer, tag, nbytes);
    if (!a)
        return false;
    if (nbytes > 0)
        memcpy(a->data, data, nbytes);
    tb__match_add(unexpected, &a->waiter);
    return true;
}

/* Allocates a transport's state of an operation, `size` bytes that begin with a waiter. NULL: no memory. */
static inline void *tb__op_begin(tb_op *op, size_t size) {
    tb__waiter *w = tb__calloc(1, size);
    if (w) {
        w->peer = op->peer;
        w->tag = op->tag;
        op->state = w;
    }
    return w;
}

/* Fails a receive with too little room for a message of nbytes; returns its status. */
static inline tb_status tb__op_too_big(tb_op *op, size_t room, size_t nbytes) {
    op->nbytes = nbytes;
    snprintf(op->why, sizeof op->why, "%zu bytes came with tag %" PRIu64 ", more than the %zu there is room for",
             nbytes, op->tag, room);
    return TB_TOO_BIG;
}

/* Fails a receive whose message was cancelled by the sender; returns its status. */
static inline tb_status tb__op_withdrawn(tb_op *op) {
    snprintf(op->why, sizeof op->why, "its sender has cancelled it");
    return TB_CANCELLED;
}

/* Copies a message into a receive with `room` bytes; returns the receive's status. */
static inline tb_status tb__op_fill(tb_op *op, size_t room, const void *data, size_t nbytes) {
    op->nbytes = nbytes;
    if (nbytes > room)
        return tb__op_too_big(op, room, nbytes);
    tb__pieces_scatter(op->pieces, op->npieces, 0, data, nbytes);
    return TB_OK;
}

/* Frees a transport's state of an operation, and calls `done`. */
static inline void tb__op_complete(tb_op *op) {
    free(op->state);
    op->state = NULL;
    op->done(op);
}

#endif
