/* Sends and receives: short messages, and long ones in chunks. */
#include "transport/ucx/ucx.h"

#include "base/log.h"

#include <inttypes.h>
#include <string.h>

static void finish_op(ucx *u, ucx_posted *p, tb_status status) {
    p->op->status = status;
    if (status == TB_LOST)
        snprintf(p->op->why, sizeof p->op->why, "%s", p->peer->why ? p->peer->why : "it is lost");
    p->state = UCX_FINISHED;
    tb__waiters_add(&u->finished, &p->waiter);
    ucx_wake(u);
}

void ucx_complete_finished(ucx *u) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&u->finished)))
        tb__op_complete(((ucx_posted *)w)->op);
}

static ucx_posted *find_long(const tb__waiters *list, uint64_t id) {
    tb__waiter *w = list->first;
    while (w && ((ucx_posted *)w)->id != id)
        w = w->next;
    return (ucx_posted *)w;
}

/* Makes the operation, which is in no list, wait until UCX has completed its requests. */
static void await_ucx(ucx_posted *p) {
    p->state = UCX_ENDING;
    tb__waiters_add(&p->peer->ending, &p->waiter);
}

/* ---- Receiving ------------------------------------------------------------------------------------------------ */

static void send_done(ucx_peer *peer, uint64_t id) {
    ucx_send(peer, &(ucx_frame){.kind = UCX_DONE, .id = id});
}

/* The receive of a short message, which has no place in memory of a GPU. */
static tb_status fill(ucx_posted *p, const void *data, size_t nbytes) {
    if (!ucx_is_on_device(p->op))
        return tb__op_fill(p->op, p->nbytes, data, nbytes);
    snprintf(p->op->why, sizeof p->op->why, "its sender does not have it in memory of a GPU");
    return TB_INVALID;
}

/* Matches the receive with an unexpected message, or lets it wait. */
static void match_receive(ucx *u, ucx_posted *p) {
    tb__unexpected *a = (tb__unexpected *)tb__match_take_or_add(&u->unexpected, &u->receives, &p->waiter);
    p->state = UCX_WAITING;
    if (a)
        finish_op(u, p, fill(p, a->data, a->nbytes));
    free(a);
}

static bool on_message(ucx *u, ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    if (frame->nbytes != nbytes)
        return false;
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (p)
        finish_op(u, p, fill(p, data, nbytes));
    return p || frame->is_expected || tb__unexpected_add(&u->unexpected, peer->rank, frame->tag, data, nbytes);
}

/* Starts the receive of a long message, on its first chunk; NULL: the receive was cancelled, or is too small. */
static ucx_posted *begin_receive(ucx_peer *peer, const ucx_frame *frame) {
    ucx *u = peer->owner;
    ucx_posted *p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (!p)
        return NULL;
    if (frame->nbytes > p->nbytes) {
        finish_op(u, p, tb__op_too_big(p->op, p->nbytes, frame->nbytes));
        return NULL;
    }
    p->op->nbytes = frame->nbytes;
    p->state = UCX_RECEIVING;
    p->id = frame->id;
    tb__waiters_add(&peer->receiving, &p->waiter);
    return p;
}

ucx_posted *ucx_expect_chunk(ucx_peer *peer, const ucx_frame *frame, size_t nbytes) {
    ucx_posted *p = find_long(&peer->receiving, frame->id);
    if (!p)
        p = begin_receive(peer, frame);
    if (!p) {
        send_done(peer, frame->id);
        return NULL;
    }
    if ((frame->is_on_device != 0) != ucx_is_on_device(p->op)) {
        ucx_fail_peer(peer, "of a message, one end only is in memory of a GPU");
        return NULL;
    }
    size_t all = p->op->nbytes;
    size_t most = ucx_is_on_device(p->op) ? UCX_DEVICE_SIZE : UCX_CHUNK_MAX;
    if (nbytes == 0 || nbytes > most || frame->at > all || nbytes > all - frame->at || nbytes > all - p->coming)
        return NULL;
    p->coming += nbytes;
    return p;
}

void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx_posted *p = find_long(&peer->receiving, frame->id);
    if (!p) /* it was cancelled meanwhile */
        return;
    if (data)
        tb__pieces_scatter_on(p->op->pieces, p->op->npieces, &p->mark, frame->at, data, nbytes);
    p->got += nbytes;
    if (p->got < p->op->nbytes)
        return;
    tb__waiters_remove(&peer->receiving, &p->waiter);
    send_done(peer, p->id);
    finish_op(peer->owner, p, TB_OK);
}

/* Chunks of the message may still arrive; they find no receive. */
static void on_revoke(ucx *u, ucx_peer *peer, const ucx_frame *frame) {
    ucx_posted *p = find_long(&peer->receiving, frame->id);
    if (p)
        tb__waiters_remove(&peer->receiving, &p->waiter);
    else
        p = (ucx_posted *)tb__match_take(&u->receives, peer->rank, frame->tag);
    if (p && p->nrequests > 0)
        await_ucx(p);
    else if (p)
        finish_op(u, p, tb__op_withdrawn(p->op));
}

/* ---- Sending -------------------------------------------------------------------------------------------------- */

void ucx_send_chunks(ucx_peer *peer) {
    for (tb__waiter *w = peer->sending.first; w; w = w->next) {
        ucx_posted *p = (ucx_posted *)w;
        while (p->at < p->nbytes) {
            if (!ucx_may_send_chunk(peer))
                return;
            if (!ucx_send_chunk(p)) {
                ucx_fail_peer(peer, "no memory to send it a chunk");
                return;
            }
        }
    }
}

static void send_message(ucx_posted *p) {
    tb_op *op = p->op;
    ucx_frame frame = {.kind = UCX_MESSAGE, .is_expected = op->is_expected, .tag = op->tag, .nbytes = p->nbytes};
    if (p->nbytes <= TB_SHORT_MAX && !ucx_is_on_device(op)) { /* a copy is sent; the operation is done when UCX has sent
                                        it, because the process may exit then */
        p->nrequests = 1;
        await_ucx(p);
        ucx_send_for(p, &frame);
        return;
    }
    p->state = UCX_SENDING;
    p->id = ++p->peer->last_id;
    tb__waiters_add(&p->peer->sending, &p->waiter);
    ucx_send_chunks(p->peer);
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

static void on_done(ucx *u, ucx_peer *peer, const ucx_frame *frame) {
    ucx_posted *p = find_long(&peer->sending, frame->id); /* NULL if it was revoked meanwhile */
    if (!p)
        return;
    tb__waiters_remove(&peer->sending, &p->waiter);
    if (p->nrequests > 0)
        await_ucx(p);
    else
        finish_op(u, p, TB_OK);
}

bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    ucx *u = peer->owner;
    switch ((ucx_kind)frame->kind) {
    case UCX_HELLO:
        if (ucx_connect_endpoint(peer, data, nbytes) != TB_OK)
            return false;
        ucx_answer_hello(peer, frame->tag);
        return true;
    case UCX_PROOF:
        return ucx_on_proof(peer, data, nbytes);
    case UCX_MESSAGE:
        return on_message(u, peer, frame, data, nbytes);
    case UCX_REVOKE:
        on_revoke(u, peer, frame);
        return true;
    case UCX_DONE:
        on_done(u, peer, frame);
        return true;
    case UCX_BYE:
        ucx_fail_peer(peer, "it has left");
        return true;
    case UCX_PING:
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG, .at = frame->at});
        return true;
    case UCX_PONG:
        if (frame->at > peer->last_pong)
            peer->last_pong = frame->at;
        peer->reached_changed = true;
        ucx_wake(u);
        return true;
    default:
        return false;
    }
}

void ucx_on_request_done(ucx_posted *p) {
    p->nrequests--;
    if (p->nrequests > 0 || p->state != UCX_ENDING)
        return;
    tb__waiters_remove(&p->peer->ending, &p->waiter);
    finish_op(p->peer->owner, p, p->op->kind == TB_OP_SEND ? TB_OK : tb__op_withdrawn(p->op));
}

/* ---- Cancelling ------------------------------------------------------------------------------------------------ */

/* Waits until UCX has completed all requests of the operation, which is in no list. If the peer does not respond, it is
 * lost for that. */
static void await_requests(ucx *u, ucx_posted *p) {
    ucx_peer *peer = p->peer;
    if (peer->ep && !peer->why && ucx_progress_until_zero(u, &p->nrequests, UCX_CANCEL_TIMEOUT_MS))
        return;
    ucx_send(peer, &(ucx_frame){.kind = UCX_BYE}); /* in case the peer resumes */
    ucx_fail_peer(peer, "it stood still while an operation with it was given up");
    ucx_close_endpoint(peer);
    if (ucx_progress_until_zero(u, &p->nrequests, UCX_LOSE_TIMEOUT_MS))
        return;
    tb__log(TB_LOG_ERROR, "ucx: %zu requests of rank %" PRId32 " have not completed", p->nrequests, peer->rank);
    ucx_detach_requests(u, p);
    p->op->status = TB_TIMEOUT;
    snprintf(p->op->why, sizeof p->op->why, "UCX has not given back the memory");
}

void ucx_cancel_message(ucx *u, ucx_posted *p) {
    ucx_peer *peer = p->peer;
    if (p->state == UCX_FINISHED) {
        tb__waiters_remove(&u->finished, &p->waiter);
        tb__op_complete(p->op);
        return;
    }
    if (p->state == UCX_ENDING && p->op->kind == TB_OP_SEND && p->nbytes <= TB_SHORT_MAX &&
        !ucx_is_on_device(p->op)) { /* the copy is sent anyway */
        tb__waiters_remove(&peer->ending, &p->waiter);
        ucx_detach_requests(u, p);
        p->op->status = TB_OK;
        tb__op_complete(p->op);
        return;
    }
    p->op->status = TB_CANCELLED;
    if (p->state == UCX_ENDING) {
        tb__waiters_remove(&peer->ending, &p->waiter);
    } else if (p->state == UCX_SENDING) {
        tb__waiters_remove(&peer->sending, &p->waiter);
        ucx_send(peer, &(ucx_frame){.kind = UCX_REVOKE, .id = p->id, .tag = p->op->tag});
    } else if (p->state == UCX_RECEIVING) {
        tb__waiters_remove(&peer->receiving, &p->waiter);
        send_done(peer, p->id);
    } else {
        tb__match_remove(&u->receives, &p->waiter);
    }
    p->state = UCX_FINISHED;
    if (p->nrequests > 0)
        await_requests(u, p);
    ucx_wake(u);
    tb__op_complete(p->op);
}

void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->sending)) || (w = tb__waiters_take(&peer->receiving)))
        finish_op(u, (ucx_posted *)w, status);
    while ((w = tb__waiters_take(&peer->ending))) {
        ucx_posted *p = (ucx_posted *)w;
        ucx_detach_requests(u, p);
        finish_op(u, p, p->op->kind == TB_OP_SEND ? TB_OK : status);
    }
    while ((w = tb__match_drain(&u->receives, peer->rank)))
        finish_op(u, (ucx_posted *)w, status);
    tb__match_free(&u->unexpected, peer->rank);
}
