/* Sends and receives: short messages, offers, and the chunks of what has been taken. */
#include "transport/ucx/ucx.h"

#include "base/log.h"

#include <inttypes.h>
#include <string.h>

static void finish(ucx *u, ucx_posted *p, tb_status status) {
    p->op->status = status;
    p->state = UCX_FINISHED;
    tb__waiters_add(&u->finished, &p->waiter);
    ucx_wake(u);
}

void ucx_tell(ucx_posted *p) {
    tb_op *op = p->op;
    op->state = NULL;
    free(p);
    op->done(op);
}

void ucx_tell_all(ucx *u) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&u->finished)))
        ucx_tell((ucx_posted *)w);
}

static void answer(const ucx_arrival *a, ucx_kind kind) {
    ucx_send(a->peer, &(ucx_frame){.kind = kind, .offer = a->offer, .attempt = a->attempt}, NULL, 0);
}

/* ---- Receiving ------------------------------------------------------------------------------------------------ */

static void deliver(ucx *u, ucx_posted *p, const unsigned char *data, size_t nbytes) {
    tb_op *op = p->op;
    op->nbytes = nbytes;
    if (nbytes > p->nbytes) {
        finish(u, p, TB_TOO_BIG);
        return;
    }
    tb__pieces_scatter(op->pieces, op->npieces, 0, data, nbytes);
    finish(u, p, TB_OK);
}

/* Nobody can have it, or wants it. */
static void discard(ucx_arrival *a) {
    if (a->is_offer)
        answer(a, UCX_DONE);
    free(a);
}

static void begin_take(ucx *u, ucx_posted *p, ucx_arrival *a) {
    p->op->nbytes = a->nbytes;
    if (a->nbytes > p->nbytes) {
        discard(a);
        finish(u, p, TB_TOO_BIG);
        return;
    }
    p->state = UCX_TAKING;
    p->arrival = a;
    a->taker = p;
    a->coming = a->got = 0;
    a->attempt++;
    tb__waiters_add(&a->peer->taken, &a->waiter);
    answer(a, UCX_TAKE);
}

/* It is no longer being taken. */
static void untake(ucx_arrival *a) {
    tb__waiters_remove(&a->peer->taken, &a->waiter);
    a->taker->arrival = NULL;
    a->taker = NULL;
}

/* Lets it wait for UCX, which still has some of its memory. */
static void settle(ucx_posted *p) {
    p->state = UCX_SETTLING;
    tb__waiters_add(&p->peer->settling, &p->waiter);
}

/* Finds a receive for the offer, or lets it wait. */
static void match_offer(ucx *u, ucx_arrival *a) {
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, a->waiter.peer, a->waiter.tag);
    if (p)
        begin_take(u, p, a);
    else
        tb__match_add(&u->arrivals, &a->waiter);
}

/* Finds a message for the receive, or lets it wait. */
static void match_receive(ucx *u, ucx_posted *p) {
    ucx_arrival *a = (ucx_arrival *)tb__match_take(&u->arrivals, p->waiter.peer, p->waiter.tag);
    p->state = UCX_WAITING;
    if (!a) {
        tb__match_add(&u->receives, &p->waiter);
    } else if (a->is_offer) {
        begin_take(u, p, a);
    } else {
        deliver(u, p, a->data, a->nbytes);
        free(a);
    }
}

static ucx_arrival *new_arrival(ucx_peer *peer, const ucx_frame *frame, size_t nbytes) {
    ucx_arrival *a = tb__malloc(1, sizeof *a + nbytes);
    if (a)
        *a = (ucx_arrival){.waiter = {.peer = peer->rank, .tag = frame->tag},
                           .peer = peer,
                           .offer = frame->offer,
                           .nbytes = frame->nbytes};
    return a;
}

static bool on_message(ucx *u, ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    if (frame->nbytes != nbytes)
        return false;
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (p) {
        deliver(u, p, data, nbytes);
        return true;
    }
    if (tb__unwanted_take(&peer->unwanted, frame->tag))
        return true;
    ucx_arrival *a = new_arrival(peer, frame, nbytes);
    if (!a)
        return false;
    if (nbytes > 0)
        memcpy(a->data, data, nbytes);
    tb__match_add(&u->arrivals, &a->waiter);
    return true;
}

static bool on_offer(ucx *u, ucx_peer *peer, const ucx_frame *frame) {
    ucx_arrival *a = frame->nbytes > 0 ? new_arrival(peer, frame, 0) : NULL;
    if (!a)
        return false;
    a->is_offer = true;
    if (tb__unwanted_take(&peer->unwanted, frame->tag))
        discard(a);
    else
        match_offer(u, a);
    return true;
}

static ucx_arrival *find_taken(const ucx_peer *peer, uint64_t offer) {
    tb__waiter *w = peer->taken.first;
    while (w && ((ucx_arrival *)w)->offer != offer)
        w = w->next;
    return (ucx_arrival *)w;
}

static void on_revoke(ucx *u, const ucx_peer *peer, const ucx_frame *frame) {
    ucx_arrival *a = find_taken(peer, frame->offer);
    if (a) { /* its receive waits for another one, which must not meet bytes of this one */
        ucx_posted *p = a->taker;
        untake(a);
        free(a);
        if (p->nrequests > 0)
            settle(p);
        else
            match_receive(u, p);
        return;
    }
    size_t b = tb__match_bucket(peer->rank, frame->tag);
    for (tb__waiter *w = u->arrivals.bucket[b].first; w; w = w->next) {
        a = (ucx_arrival *)w;
        if (a->peer == peer && a->is_offer && a->offer == frame->offer) {
            tb__match_remove(&u->arrivals, w);
            free(a);
            return;
        }
    }
}

ucx_posted *ucx_expect_chunk(const ucx_peer *peer, const ucx_frame *frame, size_t nbytes) {
    ucx_arrival *a = find_taken(peer, frame->offer);
    if (!a || a->attempt != frame->attempt || nbytes > UCX_CHUNK_MOST || frame->at > a->nbytes ||
        nbytes > a->nbytes - frame->at || nbytes > a->nbytes - a->coming)
        return NULL;
    a->coming += nbytes;
    return a->taker;
}

void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx_arrival *a = find_taken(peer, frame->offer);
    if (!a || a->attempt != frame->attempt) /* any more */
        return;
    ucx_posted *p = a->taker;
    if (data)
        tb__pieces_scatter_on(p->op->pieces, p->op->npieces, &p->mark, frame->at, data, nbytes);
    a->got += nbytes;
    if (a->got < a->nbytes)
        return;
    untake(a);
    answer(a, UCX_DONE);
    free(a);
    finish(peer->owner, p, TB_OK);
}

/* ---- Sending -------------------------------------------------------------------------------------------------- */

static ucx_posted *find_offered(const ucx_peer *peer, uint64_t offer) {
    tb__waiter *w = peer->offered.first;
    while (w && ((ucx_posted *)w)->offer != offer)
        w = w->next;
    return (ucx_posted *)w;
}

void ucx_pump(ucx_peer *peer) {
    for (tb__waiter *w = peer->offered.first; w; w = w->next) {
        ucx_posted *p = (ucx_posted *)w;
        while (p->state == UCX_SENDING && p->at < p->nbytes) {
            if (!ucx_may_send_chunk(peer))
                return;
            if (!ucx_send_chunk(p)) {
                ucx_fail(peer, "there is no memory for what it is to be sent");
                return;
            }
        }
    }
}

static void send_message(ucx *u, ucx_posted *p) {
    tb_op *op = p->op;
    ucx_frame frame = {.kind = UCX_MESSAGE, .tag = op->tag, .nbytes = p->nbytes};
    if (p->nbytes <= UCX_SHORT) { /* a copy is on its way */
        ucx_send(p->peer, &frame, op->pieces, op->npieces);
        finish(u, p, TB_OK);
        return;
    }
    p->state = UCX_OFFERED;
    p->offer = frame.offer = ++p->peer->next_offer;
    frame.kind = UCX_OFFER;
    tb__waiters_add(&p->peer->offered, &p->waiter);
    ucx_send(p->peer, &frame, NULL, 0);
}

tb_status ucx_post_message(ucx *u, ucx_peer *peer, tb_op *op) {
    ucx_posted *p = tb__calloc(1, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    p->peer = peer;
    p->nbytes = tb__pieces_size(op->pieces, op->npieces);
    p->waiter.peer = op->peer;
    p->waiter.tag = op->tag;
    op->state = p;
    if (op->kind == TB_OP_RECV)
        match_receive(u, p);
    else
        send_message(u, p);
    ucx_wake(u);
    return TB_OK;
}

static void on_take(ucx_peer *peer, const ucx_frame *frame) {
    ucx_posted *p = find_offered(peer, frame->offer); /* none if it was revoked meanwhile */
    if (!p)
        return;
    p->state = UCX_SENDING;
    p->attempt = frame->attempt;
    p->at = 0;
    ucx_pump(peer);
}

bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx *u = peer->owner;
    ucx_posted *p;
    switch ((ucx_kind)frame->kind) {
    case UCX_HELLO:
        if (ucx_reach(peer, data, nbytes) != TB_OK)
            return false;
        peer->is_driven = frame->tag;
        ucx_watch_peer(peer);
        ucx_meet(peer);
        return true;
    case UCX_MESSAGE:
        return on_message(u, peer, frame, data, nbytes);
    case UCX_OFFER:
        return on_offer(u, peer, frame);
    case UCX_REVOKE:
        on_revoke(u, peer, frame);
        return true;
    case UCX_TAKE:
        on_take(peer, frame);
        return true;
    case UCX_STOP:
        p = find_offered(peer, frame->offer);
        if (p && p->attempt == frame->attempt)
            p->state = UCX_OFFERED;
        return true;
    case UCX_DONE:
        p = find_offered(peer, frame->offer);
        if (p) {
            tb__waiters_remove(&peer->offered, &p->waiter);
            if (p->nrequests > 0)
                settle(p);
            else
                finish(u, p, TB_OK);
        }
        return true;
    case UCX_BYE:
        ucx_fail(peer, "it has left");
        return true;
    case UCX_PING:
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG}, NULL, 0);
        return true;
    case UCX_PONG:
        return true;
    default:
        return false;
    }
}

void ucx_give_back(ucx_posted *p) {
    p->nrequests--;
    if (p->nrequests > 0 || p->state != UCX_SETTLING)
        return;
    tb__waiters_remove(&p->peer->settling, &p->waiter);
    if (p->op->kind == TB_OP_SEND)
        finish(p->peer->owner, p, TB_OK);
    else
        match_receive(p->peer->owner, p);
}

/* ---- Giving up ------------------------------------------------------------------------------------------------ */

/* Returns when UCX has nothing of the operation any more, which is in no list. A peer that stands still for so long is
 * given up for it. */
static void await_requests(ucx *u, ucx_posted *p) {
    ucx_peer *peer = p->peer;
    if (peer->ep && !peer->why && ucx_await(u, &p->nrequests, UCX_CANCEL_TIMEOUT_MS))
        return;
    ucx_send(peer, &(ucx_frame){.kind = UCX_BYE}, NULL, 0); /* for when it moves again; it may get through */
    ucx_fail(peer, "it stood still while an operation with it was given up");
    ucx_hang_up(peer);
    if (ucx_await(u, &p->nrequests, UCX_LOSE_TIMEOUT_MS))
        return;
    tb__log(TB_LOG_ERROR, "ucx: %zu requests of rank %" PRId32 " have not come back", p->nrequests, peer->rank);
    ucx_disown(u, p);
}

void ucx_cancel_message(ucx *u, ucx_posted *p) {
    ucx_arrival *a = p->arrival;
    if (p->state == UCX_FINISHED) {
        tb__waiters_remove(&u->finished, &p->waiter);
        ucx_tell(p);
        return;
    }
    p->op->status = TB_CANCELLED;
    if (p->state == UCX_SETTLING) {
        tb__waiters_remove(&p->peer->settling, &p->waiter);
    } else if (p->op->kind == TB_OP_SEND) {
        tb__waiters_remove(&p->peer->offered, &p->waiter);
        ucx_send(p->peer, &(ucx_frame){.kind = UCX_REVOKE, .offer = p->offer, .tag = p->op->tag}, NULL, 0);
    } else if (a) { /* the message is all there at the sender, for another receive */
        untake(a);
        answer(a, UCX_STOP);
        match_offer(u, a);
    } else {
        tb__match_remove(&u->receives, &p->waiter);
    }
    p->state = UCX_FINISHED;
    if (p->nrequests > 0)
        await_requests(u, p);
    ucx_wake(u);
    ucx_tell(p);
}

void ucx_forget_message(ucx *u, ucx_peer *peer, uint64_t tag) {
    ucx_arrival *a = (ucx_arrival *)tb__match_take(&u->arrivals, peer->rank, tag);
    if (a)
        discard(a);
    else
        tb__unwanted_add(&peer->unwanted, tag);
}

void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->offered)))
        finish(u, (ucx_posted *)w, status);
    while ((w = tb__waiters_take(&peer->settling))) {
        ucx_posted *p = (ucx_posted *)w;
        finish(u, p, p->op->kind == TB_OP_SEND ? TB_OK : status);
    }
    while ((w = tb__waiters_take(&peer->taken))) {
        ucx_arrival *a = (ucx_arrival *)w;
        ucx_posted *p = a->taker;
        untake(a);
        free(a);
        finish(u, p, status);
    }
    while ((w = tb__match_drain(&u->receives, peer->rank)))
        finish(u, (ucx_posted *)w, status);
    while ((w = tb__match_drain(&u->arrivals, peer->rank)))
        free(w);
    tb__unwanted_fini(&peer->unwanted);
}
