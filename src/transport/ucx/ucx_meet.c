/* Meeting a peer. Each end says hello, and sends nothing else before the other's hello has come.
 *
 * Hellos carry the number of the connection. An end that has lost a connection, and is asked to connect again, says
 * hello with the next number. Whoever hears a higher number than its own loses the connection that it has, if it has
 * not yet, and answers with a hello of that number. So it does not matter which end has noticed the loss, and both may
 * begin at once. Lower numbers are late, and ignored.
 *
 * An end whose hello is not answered begins the next connection after a while: where a link was cut for a minute the
 * kernel takes another one to try again, and a new endpoint works at once. If an answer comes later than that, it waits
 * longer.
 *
 * The hello is a tagged message, as the only one. Before UCX sends the first active message of an endpoint it asks the
 * peer which endpoint of its own that is, and the peer's UCX answers. An answer that has to wait, because the peer's
 * connection is still being made, is the end of its process if that connection fails then: UCX 1.13 calls it a bug.
 * Tagged messages ask nothing. Who has heard the peer's hello knows that the peer's connection is there, and so that
 * its answers need not wait. That is the case if the answer goes through the peer's endpoint of the same connection.
 * UCX takes the one that was made as the n-th for us, as ours was the n-th for the peer: so both ends make one for each
 * number, also for those that they have not used (ucx_reach). */
#include "transport/ucx/ucx.h"

#include "base/descriptors.h"

#include "base/checksum.h"
#include "base/log.h"

#include <inttypes.h>
#include <string.h>

enum {
    HELLO_TAG = UCX_MAGIC,
    HELLO_ROOM = sizeof(ucx_frame) + TB_ADDRESS_MAX,
    MOST_AHEAD = 100000,   /* connections that the other end has begun, and we have not heard of */
    LONGEST_PATIENCE = 64, /* beats */
};

/* ---- Connections ---------------------------------------------------------------------------------------------- */

uint64_t ucx_mark(uint64_t id, uint64_t number) {
    return number == 1 ? id : tb__hash(id, number);
}

ucx_peer *ucx_renew(ucx_peer *lost, uint64_t number) {
    ucx *u = lost->owner;
    ucx_peer *peer = tb__vec_reserve(&u->retired, 1) ? tb__calloc(1, sizeof *peer) : NULL;
    if (!peer)
        return NULL;
    peer->owner = u;
    peer->rank = lost->rank;
    peer->id = lost->id;
    peer->number = number;
    peer->nendpoints = lost->nendpoints;
    peer->patience = UCX_PATIENCE_AGAIN;
    for (size_t i = 0; i < u->peers.count; i++) {
        if (u->peers.item[i] == lost)
            u->peers.item[i] = peer;
    }
    u->retired.item[u->retired.count++] = lost;
    return peer;
}

void ucx_free_peer(ucx_peer *peer) {
    free(peer->address);
    free(peer->next);
    free(peer);
}

void ucx_free_retired(ucx *u) {
    for (size_t i = u->retired.count; i-- > 0;) {
        if (u->retired.item[i]->ntransfers > 0)
            continue;
        ucx_free_peer(u->retired.item[i]);
        u->retired.item[i] = u->retired.item[--u->retired.count];
    }
}

/* Whether the peer still has its end of a connection that there was before is not known before it answers. */
void ucx_ask(ucx_peer *peer) {
    if (peer->asked == peer->answered)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PING, .at = ++peer->asked});
}

/* ---- Endpoints ------------------------------------------------------------------------------------------------ */

tb_status ucx_check_address(const void *address, size_t nbytes, ucx_address *head) {
    if (nbytes < sizeof *head || (memcpy(head, address, sizeof *head), head->magic != UCX_MAGIC))
        return tb__fail(TB_INVALID, "its address is not one of transport ucx");
    if (head->version != UCX_VERSION)
        return tb__fail(TB_INVALID, "it speaks version %" PRIu32 " of transport ucx, we %d", head->version,
                        UCX_VERSION);
    const unsigned char *bytes = (const unsigned char *)address + sizeof *head;
    if (head->id == 0 || head->nbytes != nbytes - sizeof *head || head->checksum != tb__checksum(bytes, head->nbytes))
        return tb__fail(TB_INVALID, "its address has suffered on its way");
    return TB_OK;
}

/* Whose address it is; 0: it is none. */
static uint64_t id_of(const void *address, size_t nbytes) {
    ucx_address head;
    return ucx_check_address(address, nbytes, &head) == TB_OK ? head.id : 0;
}

/* For saying hello again. */
static bool keep_address(ucx_peer *peer, const void *address, size_t nbytes) {
    if (peer->address || peer->is_met)
        return true;
    peer->address = tb__memdup(address, nbytes, 1);
    peer->address_nbytes = nbytes;
    return peer->address != NULL;
}

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    ucx_peer *peer = arg;
    if (!peer->ep || ep == peer->ep)
        ucx_break(peer, status);
}

static ucs_status_t make_endpoint(ucx_peer *peer, const void *address) {
    ucx *u = peer->owner;
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)((const unsigned char *)address + sizeof(ucx_address)),
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_endpoint_error, .arg = peer}};
    ucx_sockets_look(u);
    ucs_status_t status = u->call->ep_create(u->worker, &params, &peer->ep);
    ucx_sockets_take_new(u);
    peer->nendpoints++;
    if (status != UCS_OK)
        peer->ep = NULL;
    return status;
}

tb_status ucx_reach(ucx_peer *peer, const void *address, size_t nbytes) {
    ucx *u = peer->owner;
    ucx_address head;
    TB_TRY(ucx_check_address(address, nbytes, &head));
    if (peer->id != 0 && peer->id != head.id)
        return tb__fail(TB_INVALID, "another process has its number: UCX id %" PRIx64 ", before %" PRIx64, head.id,
                        peer->id);
    peer->id = head.id;
    if (peer->ep)
        return TB_OK;
    if (!keep_address(peer, address, nbytes))
        return TB_NO_MEMORY;
    int error = ucx_try_descriptors(2); /* UCX ends the process if it gets one of two */
    if (error)
        return tb__fail(TB_REFUSED, "connecting to it through UCX: %s", tb__errno_text(error));
    if (peer->nendpoints >= peer->number)
        peer->number = peer->nendpoints + 1; /* one could not be made */
    ucs_status_t status = UCS_OK;
    do { /* the last one is it; the others are for connections that the peer has begun without us */
        ucx_hang_up(peer);
        status = make_endpoint(peer, address);
    } while (status == UCS_OK && peer->nendpoints < peer->number);
    if (status != UCS_OK)
        return ucx_fail_by_choice(u, "connecting to it through UCX", status, TB_LOST);
    peer->is_direct = tb__ucx_direct >= 0 ? tb__ucx_direct : ucx_has_direct_lanes(u, peer->ep);
    ucx_say_hello(peer);
    ucx_await_peer(peer);
    ucx_wake(u);
    return TB_OK;
}

/* ---- Hearing -------------------------------------------------------------------------------------------------- */

/* Keeps what is needed to take up a connection when the one before is told to be lost. */
static void keep_next(ucx_peer *peer, const ucx_next *next, const void *address) {
    ucx_next *copy = tb__malloc(1, sizeof *copy + next->nbytes);
    if (!copy)
        return; /* the peer says hello again */
    *copy = *next;
    memcpy(copy->address, address, next->nbytes);
    free(peer->next);
    peer->next = copy;
}

void ucx_take_next(ucx_peer *lost) {
    ucx_next *next = lost->next;
    lost->next = NULL;
    ucx_peer *peer = ucx_renew(lost, next->number);
    if (peer && ucx_reach(peer, next->address, next->nbytes) == TB_OK) {
        peer->serial_in = 1; /* after the hello */
        ucx_meet(peer, next->is_driven);
    }
    free(next);
}

/* Begins again, under a higher number, a connection that has carried nothing but our hello. */
static void restart_connection(ucx_peer *peer, uint64_t number, const void *address, size_t nbytes) {
    ucx_hang_up(peer);
    peer->number = number;
    if (ucx_reach(peer, address, nbytes) != TB_OK)
        ucx_fail(peer, "it can't be connected to");
}

/* Whether the hello belongs to the connection that we have with the peer. A later one takes its place. What makes no
 * sense is left to others. */
static bool is_current(ucx *u, const ucx_frame *frame, const void *address, size_t nbytes) {
    ucx_next next = {frame->number > 1 ? frame->number : 1, frame->tag, nbytes};
    ucx_peer *peer = frame->rank >= 0 ? ucx_find_or_add(u, frame->rank) : NULL;
    uint64_t id = id_of(address, nbytes);
    if (!peer || id == 0 || (peer->id != 0 && peer->id != id) || next.number > peer->number + MOST_AHEAD)
        return next.number == 1;
    if (peer->id == 0)
        peer->number = next.number;
    if (next.number < peer->number && !peer->is_met && peer->patience < LONGEST_PATIENCE)
        peer->patience *= 2; /* it answers, but late */
    if (next.number == peer->number && !ucx_is_over(peer))
        return !peer->is_met;
    if (next.number <= peer->number || (peer->next && peer->next->number > next.number))
        return false;
    if (!ucx_is_over(peer) && !peer->is_met) {
        restart_connection(peer, next.number, address, nbytes);
        return true;
    }
    keep_next(peer, &next, address);
    if (peer->is_lost && peer->next)
        ucx_take_next(peer);
    else
        ucx_fail(peer, "it has begun a new connection");
    return false;
}

static void hear(ucx *u, ucs_status_t status, size_t nbytes) {
    ucx_frame frame;
    if (status != UCS_OK || nbytes < sizeof frame)
        return;
    memcpy(&frame, u->hello, sizeof frame);
    if (frame.kind == UCX_HELLO && is_current(u, &frame, u->hello + sizeof frame, nbytes - sizeof frame))
        ucx_on_active_message(u, &frame, sizeof frame, u->hello + sizeof frame, nbytes - sizeof frame,
                              &(ucp_am_recv_param_t){0});
}

static void on_heard(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *arg) {
    ucx *u = arg;
    u->listening = NULL;
    hear(u, status, info->length);
    u->call->request_free(request);
    if (status != UCS_ERR_CANCELED && ucx_listen(u) != TB_OK)
        tb__log(TB_LOG_ERROR, "%s", tb_error_detail());
}

tb_status ucx_listen(ucx *u) {
    ucp_tag_recv_info_t info = {0};
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_RECV_INFO,
                                 .cb.recv = on_heard,
                                 .user_data = u,
                                 .recv_info.tag_info = &info};
    if (!u->hello && !(u->hello = tb__malloc(1, HELLO_ROOM)))
        return TB_NO_MEMORY;
    for (;;) {
        ucs_status_ptr_t request =
            u->call->tag_recv_nbx(u->worker, u->hello, HELLO_ROOM, HELLO_TAG, UINT64_MAX, &param);
        if (UCS_PTR_IS_ERR(request))
            return tb__fail(TB_IO, "listening with UCX: %s", u->call->status_string(UCS_PTR_STATUS(request)));
        if (request) {
            u->listening = request;
            return TB_OK;
        }
        hear(u, UCS_OK, info.length); /* it was there already */
    }
}

void ucx_listen_no_more(ucx *u) {
    if (u->listening)
        u->call->request_cancel(u->worker, u->listening);
    while (u->listening && u->call->worker_progress(u->worker) > 0) {
    }
}

/* ---- Saying --------------------------------------------------------------------------------------------------- */

void ucx_say_hello(ucx_peer *peer) {
    ucx *u = peer->owner;
    ucx_frame frame = {.kind = UCX_HELLO, .tag = u->env.is_driven, .number = peer->number};
    size_t nbytes = sizeof frame + u->address_nbytes;
    ucx_transfer *t = ucx_new_transfer(peer, &frame, nbytes, nbytes);
    if (!t) {
        ucx_fail(peer, "there is no memory for what it is to be told");
        return;
    }
    peer->serial_out = 0; /* it is the first, also of a connection that goes on under another number */
    peer->unheard = 0;
    ucx_sign(t);
    memcpy(t->data, &t->frame, sizeof t->frame);
    memcpy(t->data + sizeof t->frame, u->address, u->address_nbytes);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = ucx_on_sent,
                                 .user_data = t};
    ucx_is_under_way(t, u->call->tag_send_nbx(peer->ep, t->data, nbytes, HELLO_TAG, &param));
}

void ucx_say_hello_again(ucx_peer *peer) {
    restart_connection(peer, peer->number + 1, peer->address, peer->address_nbytes);
}

void ucx_hold(ucx_transfer *t) {
    ucx_peer *peer = t->peer;
    if (!peer->held)
        peer->last_held = &peer->held;
    *peer->last_held = t;
    peer->last_held = &t->later;
    t->owner->nheld++;
}

static ucx_transfer *take_held(ucx_peer *peer) {
    ucx_transfer *t = peer->held;
    if (t) {
        peer->held = t->later;
        peer->owner->nheld--;
    }
    return t;
}

void ucx_meet(ucx_peer *peer, bool is_driven) {
    peer->is_met = true;
    peer->is_driven = is_driven;
    peer->has_news = true;
    free(peer->address);
    peer->address = NULL;
    ucx_watch_peer(peer);
    ucx_sockets_take_accepted(peer->owner);
    for (ucx_transfer *t; (t = take_held(peer));)
        ucx_dispatch(t, NULL);
    if (peer->number > 1)
        ucx_ask(peer); /* our hello may have come too late */
    ucx_send_chunks(peer);
}

void ucx_drop_held(ucx_peer *peer) {
    for (ucx_transfer *t; (t = take_held(peer));)
        ucx_release(t);
}
