/* What transports that match messages with receives themselves have in common: short messages that come before their
 * receives, and how operations begin and end. */
#ifndef TB_TRANSPORT_MESSAGE_H
#define TB_TRANSPORT_MESSAGE_H

#include "transport/match.h"
#include "transport/transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A short message that came before its receive, in one block of memory. */
typedef struct tb__arrival {
    tb__waiter waiter;
    size_t nbytes;
    unsigned char data[];
} tb__arrival;

/* The bytes are the caller's to fill in. NULL: there is no memory. */
static inline tb__arrival *tb__arrival_create(int32_t peer, uint64_t tag, size_t nbytes) {
    tb__arrival *a = tb__malloc(1, sizeof *a + nbytes);
    if (a)
        *a = (tb__arrival){.waiter = {.peer = peer, .tag = tag}, .nbytes = nbytes};
    return a;
}

/* A message that nobody waits for is kept. False: there is no memory. */
static inline bool tb__arrival_keep(tb__match *arrivals, int32_t peer, uint64_t tag, const void *data, size_t nbytes) {
    tb__arrival *a = tb__arrival_create(peer, tag, nbytes);
    if (!a)
        return false;
    if (nbytes > 0)
        memcpy(a->data, data, nbytes);
    tb__match_add(arrivals, &a->waiter);
    return true;
}

/* What a transport has of an operation: so much memory, which begins with a waiter. NULL: there is none. */
static inline void *tb__op_begin(tb_op *op, size_t size) {
    tb__waiter *w = tb__calloc(1, size);
    if (w) {
        w->peer = op->peer;
        w->tag = op->tag;
        op->state = w;
    }
    return w;
}

/* A message of nbytes is for a receive that has room for fewer; returns what that ends with. */
static inline tb_status tb__op_too_big(tb_op *op, size_t room, size_t nbytes) {
    op->nbytes = nbytes;
    snprintf(op->why, sizeof op->why, "%zu bytes came with tag %" PRIu64 ", more than the %zu there is room for",
             nbytes, op->tag, room);
    return TB_TOO_BIG;
}

/* The send of a message that has come in part was cancelled; returns what the receive ends with. */
static inline tb_status tb__op_withdrawn(tb_op *op) {
    snprintf(op->why, sizeof op->why, "its sender has cancelled it");
    return TB_CANCELLED;
}

/* Puts a message into a receive that has room for so many bytes; returns what it ends with. */
static inline tb_status tb__op_fill(tb_op *op, size_t room, const void *data, size_t nbytes) {
    op->nbytes = nbytes;
    if (nbytes > room)
        return tb__op_too_big(op, room, nbytes);
    tb__pieces_scatter(op->pieces, op->npieces, 0, data, nbytes);
    return TB_OK;
}

/* Frees what a transport has of an operation that is over, and tells so. */
static inline void tb__op_tell(tb_op *op) {
    free(op->state);
    op->state = NULL;
    op->done(op);
}

#endif
