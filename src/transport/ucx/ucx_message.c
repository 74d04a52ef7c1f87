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

void ucx_tell_all(ucx *u) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&u->finished)))
        tb__op_tell(((ucx_posted *)w)->op);
}

static void answer(const ucx_offer *o, ucx_kind kind) {
    ucx_send(o->peer, &(ucx_frame){.kind = kind, .offer = o->arrival.id});
}

/* ---- Receiving ------------------------------------------------------------------------------------------------ */

/* Nobody can have it, or wants it. */
static void discard(tb__arrival *a) {
    if (a->is_offer)
        answer((ucx_offer *)a, UCX_DONE);
    free(a);
}

static void begin_take(ucx *u, ucx_posted *p, ucx_offer *o) {
    p->op->nbytes = o->arrival.nbytes;
    if (o->arrival.nbytes > p->nbytes) {
        discard(&o->arrival);
        finish(u, p, TB_TOO_BIG);
        return;
    }
    p->state = UCX_TAKING;
    p->taking = o;
    o->taker = p;
    tb__waiters_add(&o->peer->taken, &o->arrival.waiter);
    answer(o, UCX_TAKE);
}

/* It is no longer being taken. */
static void untake(ucx_offer *o) {
    tb__waiters_remove(&o->peer->taken, &o->arrival.waiter);
    o->taker->taking = NULL;
    o->taker = NULL;
}

/* Lets it wait for UCX, which still has some of its memory. */
static void settle(ucx_posted *p) {
    p->state = UCX_SETTLING;
    tb__waiters_add(&p->peer->settling, &p->waiter);
}

/* Finds a message for the receive, or lets it wait. */
static void match_receive(ucx *u, ucx_posted *p) {
    tb__arrival *a = (tb__arrival *)tb__match_meet(&u->arrivals, &u->receives, &p->waiter);
    p->state = UCX_WAITING;
    if (a && a->is_offer) {
        begin_take(u, p, (ucx_offer *)a);
    } else if (a) {
        finish(u, p, tb__op_fill(p->op, p->nbytes, a->data, a->nbytes));
        free(a);
    }
}

static bool on_message(ucx *u, ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    if (frame->nbytes != nbytes)
        return false;
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (p)
        finish(u, p, tb__op_fill(p->op, p->nbytes, data, nbytes));
    return p || frame->is_expected || tb__arrival_keep(&u->arrivals, peer->rank, frame->tag, data, nbytes);
}

static bool on_offer(ucx *u, ucx_peer *peer, const ucx_frame *frame) {
    ucx_offer *o = frame->nbytes > 0 ? tb__malloc(1, sizeof *o) : NULL;
    if (!o)
        return false;
    *o = (ucx_offer){.arrival = {.waiter = {.peer = peer->rank, .tag = frame->tag},
                                 .is_offer = true,
                                 .id = frame->offer,
                                 .nbytes = frame->nbytes},
                     .peer = peer};
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (p)
        begin_take(u, p, o);
    else if (frame->is_expected)
        discard(&o->arrival);
    else
        tb__match_add(&u->arrivals, &o->arrival.waiter);
    return true;
}

static ucx_offer *find_taken(const ucx_peer *peer, const ucx_frame *frame) {
    return (ucx_offer *)tb__offer_find(&peer->taken, frame->offer);
}

static void on_revoke(ucx *u, const ucx_peer *peer, const ucx_frame *frame) {
    ucx_offer *o = find_taken(peer, frame);
    if (!o) {
        tb__offer_drop(&u->arrivals, peer->rank, frame->tag, frame->offer);
        return;
    }
    ucx_posted *p = o->taker; /* it waits for another one, which must not meet bytes of this one */
    untake(o);
    free(o);
    if (p->nrequests > 0)
        settle(p);
    else
        match_receive(u, p);
}

ucx_posted *ucx_expect_chunk(const ucx_peer *peer, const ucx_frame *frame, size_t nbytes) {
    ucx_offer *o = find_taken(peer, frame);
    size_t all = o ? o->arrival.nbytes : 0;
    if (!o || nbytes > UCX_CHUNK_MOST || frame->at > all || nbytes > all - frame->at || nbytes > all - o->coming)
        return NULL;
    o->coming += nbytes;
    return o->taker;
}

void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx_offer *o = find_taken(peer, frame);
    if (!o) /* any more */
        return;
    ucx_posted *p = o->taker;
    if (data)
        tb__pieces_scatter_on(p->op->pieces, p->op->npieces, &p->mark, frame->at, data, nbytes);
    o->got += nbytes;
    if (o->got < o->arrival.nbytes)
        return;
    untake(o);
    answer(o, UCX_DONE);
    free(o);
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

static void send_message(ucx_posted *p) {
    tb_op *op = p->op;
    ucx_frame frame = {.kind = UCX_MESSAGE, .is_expected = op->is_expected, .tag = op->tag, .nbytes = p->nbytes};
    if (p->nbytes <= UCX_SHORT) { /* a copy goes; it is sent when UCX has taken it: our process may end then */
        p->nrequests = 1;
        settle(p);
        ucx_send_for(p, &frame);
        return;
    }
    p->state = UCX_OFFERED;
    p->offer = frame.offer = ++p->peer->next_offer;
    frame.kind = UCX_OFFER;
    tb__waiters_add(&p->peer->offered, &p->waiter);
    ucx_send(p->peer, &frame);
}

tb_status ucx_post_message(ucx *u, ucx_peer *peer, tb_op *op) {
    ucx_posted *p = tb__op_begin(op, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    p->peer = peer;
    p->nbytes = tb__pieces_size(op->pieces, op->npieces);
    if (op->kind == TB_OP_RECV)
        match_receive(u, p);
    else
        send_message(p);
    ucx_wake(u);
    return TB_OK;
}

static void on_take(ucx_peer *peer, const ucx_frame *frame) {
    ucx_posted *p = find_offered(peer, frame->offer); /* none if it was revoked meanwhile */
    if (!p)
        return;
    p->state = UCX_SENDING;
    ucx_pump(peer);
}

bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx *u = peer->owner;
    ucx_posted *p;
    switch ((ucx_kind)frame->kind) {
    case UCX_HELLO:
        if (ucx_reach(peer, data, nbytes) != TB_OK)
            return false;
        ucx_meet(peer, frame->tag);
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
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG, .at = frame->at});
        return true;
    case UCX_PONG:
        if (frame->at > peer->answered)
            peer->answered = frame->at;
        peer->has_news = true;
        ucx_wake(u);
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
    ucx_send(peer, &(ucx_frame){.kind = UCX_BYE}); /* for when it moves again; it may get through */
    ucx_fail(peer, "it stood still while an operation with it was given up");
    ucx_hang_up(peer);
    if (ucx_await(u, &p->nrequests, UCX_LOSE_TIMEOUT_MS))
        return;
    tb__log(TB_LOG_ERROR, "ucx: %zu requests of rank %" PRId32 " have not come back", p->nrequests, peer->rank);
    ucx_disown(u, p);
    p->op->status = TB_TIMEOUT;
}

void ucx_cancel_message(ucx *u, ucx_posted *p) {
    ucx_offer *o = p->taking;
    if (p->state == UCX_FINISHED) {
        tb__waiters_remove(&u->finished, &p->waiter);
        tb__op_tell(p->op);
        return;
    }
    if (p->state == UCX_SETTLING && p->op->kind == TB_OP_SEND && p->nbytes <= UCX_SHORT) { /* the copy goes anyway */
        tb__waiters_remove(&p->peer->settling, &p->waiter);
        ucx_disown(u, p);
        p->op->status = TB_OK;
        tb__op_tell(p->op);
        return;
    }
    p->op->status = TB_CANCELLED;
    if (p->state == UCX_SETTLING) {
        tb__waiters_remove(&p->peer->settling, &p->waiter);
    } else if (p->op->kind == TB_OP_SEND) {
        tb__waiters_remove(&p->peer->offered, &p->waiter);
        ucx_send(p->peer, &(ucx_frame){.kind = UCX_REVOKE, .offer = p->offer, .tag = p->op->tag});
    } else if (o) {
        untake(o);
        discard(&o->arrival);
    } else {
        tb__match_remove(&u->receives, &p->waiter);
    }
    p->state = UCX_FINISHED;
    if (p->nrequests > 0)
        await_requests(u, p);
    ucx_wake(u);
    tb__op_tell(p->op);
}

void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->offered)))
        finish(u, (ucx_posted *)w, status);
    while ((w = tb__waiters_take(&peer->settling))) {
        ucx_posted *p = (ucx_posted *)w;
        ucx_disown(u, p);
        finish(u, p, p->op->kind == TB_OP_SEND ? TB_OK : status);
    }
    while ((w = tb__waiters_take(&peer->taken))) {
        ucx_offer *o = (ucx_offer *)w;
        ucx_posted *p = o->taker;
        untake(o);
        free(o);
        finish(u, p, status);
    }
    while ((w = tb__match_drain(&u->receives, peer->rank)))
        finish(u, (ucx_posted *)w, status);
    tb__match_free(&u->arrivals, peer->rank);
}
