/* Frames: sending them through UCX, receiving them, and keeping their order. */
#include "transport/ucx/ucx.h"

#include <string.h>

ucx_transfer *ucx_new_transfer(ucx_peer *peer, const ucx_frame *frame, size_t nbytes, size_t room) {
    ucx *u = peer->owner;
    bool is_spare = frame->kind == UCX_CHUNK && room == nbytes && nbytes <= UCX_CHUNK_SIZE;
    ucx_transfer *t = is_spare ? u->spare : NULL;
    if (t) {
        u->spare = t->next;
        u->nspare--;
    } else {
        t = tb__malloc(1, sizeof *t + (is_spare ? UCX_CHUNK_SIZE : room));
        if (!t)
            return NULL;
    }
    *t = (ucx_transfer){.owner = u, .peer = peer, .frame = *frame, .nbytes = nbytes, .is_spare = is_spare};
    peer->ntransfers++;
    t->next = u->transfers;
    t->link = &u->transfers;
    if (t->next)
        t->next->link = &t->next;
    u->transfers = t;
    return t;
}

void ucx_release(ucx_transfer *t) {
    ucx *u = t->owner;
    t->peer->ntransfers--;
    *t->link = t->next;
    if (t->next)
        t->next->link = t->link;
    if (!t->is_spare || u->nspare == UCX_SPARE) {
        free(t);
        return;
    }
    t->next = u->spare;
    u->spare = t;
    u->nspare++;
}

void ucx_free_transfers(ucx *u) {
    ucx_transfer *const lists[] = {u->transfers, u->spare};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        for (ucx_transfer *t = lists[i], *next; t; t = next) {
            next = t->next;
            free(t);
        }
    }
    u->transfers = u->spare = NULL;
}

/* UCX accesses the operation's memory from now on. */
static void begin_direct(ucx_transfer *t, ucx_posted *p, bool is_sent) {
    t->direct = p;
    t->is_direct = true;
    t->is_sent = is_sent;
    t->is_on_device = ucx_is_on_device(p->op);
    p->nrequests++;
    t->peer->nrequests++;
    t->peer->ndirect += is_sent;
    t->owner->ndevice += t->is_on_device;
}

/* UCX has completed the request. */
static void end_transfer(ucx_transfer *t) {
    ucx_posted *p = t->direct;
    if (t->is_direct) {
        t->peer->nrequests--;
        t->peer->ndirect -= t->is_sent;
        t->owner->ndevice -= t->is_on_device;
    }
    ucx_release(t);
    if (p)
        ucx_on_request_done(p);
}

/* An error of the endpoint is also reported to on_endpoint_error, but that of a single request is not. */
void ucx_on_sent(void *request, ucs_status_t status, void *arg) {
    ucx_transfer *t = arg;
    ucx_peer *peer = t->peer;
    bool is_chunk = t->frame.kind == UCX_CHUNK;
    if (t->is_direct && status != UCS_OK)
        ucx_fail_peer_by_status(peer, status);
    if (is_chunk && !t->is_direct)
        peer->in_flight--;
    peer->owner->call->request_free(request);
    end_transfer(t);
    if (is_chunk)
        ucx_send_chunks(peer);
}

bool ucx_is_under_way(ucx_transfer *t, ucs_status_ptr_t request) {
    if (request && !UCS_PTR_IS_ERR(request))
        return true;
    if (request)
        ucx_fail_peer_by_status(t->peer, UCS_PTR_STATUS(request));
    end_transfer(t);
    return false;
}

void ucx_set_sender(ucx_transfer *t) {
    t->frame.rank = t->owner->env.rank;
    t->frame.from = t->frame.kind == UCX_HELLO ? ucx_connection_id(t->owner->id, t->peer->number) : t->peer->id_out;
    if (t->frame.kind != UCX_CHUNK)
        t->frame.serial = t->peer->serial_out++;
}

void ucx_send_transfer(ucx_transfer *t, const ucx_span *place) {
    ucx_peer *peer = t->peer;
    bool is_copied_chunk = t->frame.kind == UCX_CHUNK && !place;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                 .memory_type = UCS_MEMORY_TYPE_HOST,
                                 .flags = place ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER,
                                 .cb.send = ucx_on_sent,
                                 .user_data = t};
    size_t count = t->nbytes;
    const void *memory =
        place ? ucx_span_memory(t->direct->op, place, (ucp_dt_iov_t *)t->data, &param, &count) : t->data;
    ucx_set_sender(t);
    peer->in_flight += is_copied_chunk;
    bool is_entered = place && ucx_enter_device(peer->owner, t->direct->op->memory, t->direct->op->device);
    ucs_status_ptr_t request =
        peer->owner->call->am_send_nbx(peer->ep, UCX_ACTIVE_MESSAGE, &t->frame, sizeof t->frame, memory, count, &param);
    ucx_leave_device(peer->owner, is_entered);
    if (!ucx_is_under_way(t, request))
        peer->in_flight -= is_copied_chunk;
}

/* `op` is done when UCX has sent the frame; NULL: no operation. */
static void send_frame(ucx_peer *peer, const ucx_frame *frame, const tb_piece *pieces, size_t npieces, ucx_posted *op) {
    if (!peer->ep || peer->why)
        return; /* lose_peer ends the operations */
    size_t nbytes = tb__pieces_size(pieces, npieces);
    ucx_transfer *t = ucx_new_transfer(peer, frame, nbytes, nbytes);
    if (!t) {
        ucx_fail_peer(peer, "no memory to send it a frame");
        return;
    }
    tb__pieces_gather(pieces, npieces, 0, t->data, nbytes);
    t->direct = op;
    if (peer->has_hello)
        ucx_send_transfer(t, NULL);
    else
        ucx_queue_until_hello(t);
}

void ucx_send(ucx_peer *peer, const ucx_frame *frame) {
    send_frame(peer, frame, NULL, 0, NULL);
}

void ucx_send_for(ucx_posted *p, const ucx_frame *frame) {
    send_frame(p->peer, frame, p->op->pieces, p->op->npieces, p);
}

bool ucx_may_send_chunk(const ucx_peer *peer) {
    return peer->ep && peer->has_hello && !peer->why && peer->in_flight < UCX_WINDOW &&
           peer->ndirect < UCX_DIRECT_WINDOW;
}

/* Bytes of an iov list of the span; 0 for one piece. */
static size_t list_room(const ucx_span *place) {
    return place->npieces > 1 ? place->npieces * sizeof(ucp_dt_iov_t) : 0;
}

bool ucx_send_chunk(ucx_posted *p) {
    const tb_op *op = p->op;
    ucx_span place;
    bool is_direct = (p->peer->is_direct || ucx_is_on_device(op)) && ucx_span_next(p, p->at, UCX_DIRECT_SIZE, &place);
    size_t left = p->nbytes - p->at;
    size_t nbytes = is_direct ? place.nbytes : left < UCX_CHUNK_SIZE ? left : UCX_CHUNK_SIZE;
    ucx_frame frame = {.kind = UCX_CHUNK,
                       .is_on_device = ucx_is_on_device(op),
                       .id = p->id,
                       .tag = op->tag,
                       .nbytes = p->nbytes,
                       .at = p->at};
    ucx_transfer *t = ucx_new_transfer(p->peer, &frame, nbytes, is_direct ? list_room(&place) : nbytes);
    if (!t)
        return false;
    p->at += nbytes;
    if (is_direct)
        begin_direct(t, p, true);
    else
        tb__pieces_gather_on(op->pieces, op->npieces, &p->mark, frame.at, t->data, nbytes);
    ucx_send_transfer(t, is_direct ? &place : NULL);
    return true;
}

void ucx_detach_requests(ucx *u, const ucx_posted *p) {
    for (ucx_transfer *t = u->transfers; t; t = t->next) {
        if (t->direct == p)
            t->direct = NULL;
    }
}

static void on_received(void *request, ucs_status_t status, size_t length, void *arg) {
    ucx_transfer *t = arg;
    ucx_peer *peer = t->peer;
    if (status == UCS_OK)
        ucx_record_traffic(peer, true);
    if (status == UCS_OK && length == t->nbytes)
        ucx_on_chunk(peer, &t->frame, t->is_direct ? NULL : t->data, t->nbytes);
    else if (status == UCS_OK)
        ucx_fail_peer(peer, "a chunk of it was truncated");
    else if (status != UCS_ERR_CANCELED)
        ucx_fail_peer_by_status(peer, status);
    if (request)
        peer->owner->call->request_free(request);
    end_transfer(t);
}

/* Receives the data of a rendezvous. */
static ucs_status_t fetch_chunk(ucx_posted *p, const ucx_frame *frame, void *descriptor, size_t nbytes) {
    ucx_peer *peer = p->peer;
    ucx_span place;
    bool is_direct = ucx_span_all(p, frame->at, nbytes, &place);
    ucx_transfer *t = ucx_new_transfer(peer, frame, nbytes, is_direct ? list_room(&place) : nbytes);
    if (!t) {
        ucx_fail_peer(peer, "no memory to receive from it");
        return UCS_OK;
    }
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                 .memory_type = UCS_MEMORY_TYPE_HOST,
                                 .cb.recv_am = on_received,
                                 .user_data = t};
    size_t count = nbytes;
    void *memory = is_direct ? ucx_span_memory(p->op, &place, (ucp_dt_iov_t *)t->data, &param, &count) : t->data;
    if (is_direct)
        begin_direct(t, p, false);
    const ucx_functions *call = peer->owner->call;
    bool is_entered = ucx_enter_device(peer->owner, p->op->memory, p->op->device);
    ucs_status_ptr_t request = call->am_recv_data_nbx(peer->owner->worker, descriptor, memory, count, &param);
    ucx_leave_device(peer->owner, is_entered);
    if (UCS_PTR_IS_ERR(request) || !request)
        on_received(NULL, UCS_PTR_STATUS(request), nbytes, t);
    return UCS_INPROGRESS;
}

static void handle_in_order(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    peer->serial_in++;
    if (!peer->why && !ucx_on_frame(peer, frame, data, nbytes))
        ucx_fail_peer(peer, "it sent an invalid frame");
}

/* UCX does not keep the order of active messages. */
static void queue_early(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes) {
    tb__unexpected *e = tb__unexpected_create(peer->rank, frame->serial, sizeof *frame + nbytes);
    if (!e) {
        ucx_fail_peer(peer, "no memory to receive from it");
        return;
    }
    memcpy(e->data, frame, sizeof *frame);
    if (nbytes > 0)
        memcpy(e->data + sizeof *frame, data, nbytes);
    tb__match_add(&peer->owner->early, &e->waiter);
}

/* Handles frames that have waited for the previous one. */
static void handle_early(ucx_peer *peer) {
    tb__unexpected *e;
    while ((e = (tb__unexpected *)tb__match_take(&peer->owner->early, peer->rank, peer->serial_in))) {
        ucx_frame frame;
        memcpy(&frame, e->data, sizeof frame);
        handle_in_order(peer, &frame, e->data + sizeof frame, e->nbytes - sizeof frame);
        free(e);
    }
}

/* The sender of a frame; NULL: unknown, failed, or of another connection. */
static ucx_peer *sender_of(ucx *u, const ucx_frame *frame) {
    ucx_peer *peer = frame->rank >= 0 ? ucx_find(u, frame->rank) : NULL;
    if (!peer || ucx_has_failed(peer))
        return NULL;
    if (frame->kind == UCX_HELLO)
        return peer->id == 0 || ucx_connection_id(peer->id, peer->number) == frame->from ? peer : NULL;
    return peer->has_challenge && peer->id_in == frame->from ? peer : NULL;
}

ucs_status_t ucx_on_active_message(void *arg, const void *header, size_t header_length, void *data, size_t nbytes,
                                   const ucp_am_recv_param_t *param) {
    bool is_elsewhere = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
    ucx_frame frame;
    if (header_length != sizeof frame)
        return UCS_OK;
    memcpy(&frame, header, sizeof frame);
    ucx_peer *peer = sender_of(arg, &frame);
    if (!peer)
        return UCS_OK;
    ucx_record_traffic(peer, frame.kind == UCX_CHUNK);
    if (frame.kind == UCX_CHUNK) {
        ucx_posted *p = ucx_expect_chunk(peer, &frame, nbytes);
        if (!p)
            return UCS_OK;
        if (is_elsewhere)
            return fetch_chunk(p, &frame, data, nbytes);
        if (ucx_is_on_device(p->op))
            ucx_fail_peer(peer, "it sent to memory of a GPU without a rendezvous");
        else
            ucx_on_chunk(peer, &frame, data, nbytes);
    } else if (is_elsewhere || frame.serial < peer->serial_in) {
        ucx_fail_peer(peer, "it sent a frame out of order, or by rendezvous");
    } else if (frame.serial > peer->serial_in) {
        queue_early(peer, &frame, data, nbytes);
    } else {
        handle_in_order(peer, &frame, data, nbytes);
        handle_early(peer);
    }
    return UCS_OK;
}
