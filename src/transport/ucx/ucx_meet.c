/* Meeting a peer. Each end says hello, and sends nothing else before the other's hello has come.
 *
 * The hello is a tagged message, as the only one. Before UCX sends the first active message of an endpoint it asks the
 * peer which endpoint of its own that is, and the peer's UCX answers. An answer that has to wait, because the peer's
 * connection is still being made, is the end of its process if that connection fails then: UCX 1.13 calls it a bug.
 * Tagged messages ask nothing. Who has heard the peer's hello knows that the peer's connection is there, and so that
 * its answers need not wait. */
#include "transport/ucx/ucx.h"

#include "base/log.h"

#include <string.h>

enum {
    HELLO_TAG = UCX_MAGIC,
    HELLO_ROOM = sizeof(ucx_frame) + TB_ADDRESS_MAX,
};

/* ---- Hearing -------------------------------------------------------------------------------------------------- */

static void hear(ucx *u, ucs_status_t status, size_t nbytes) {
    ucx_frame frame;
    if (status != UCS_OK || nbytes < sizeof frame)
        return;
    memcpy(&frame, u->hello, sizeof frame);
    if (frame.kind == UCX_HELLO)
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
    ucx_frame frame = {.kind = UCX_HELLO, .tag = u->env.is_driven};
    size_t nbytes = sizeof frame + u->address_nbytes;
    ucx_transfer *t = ucx_new_transfer(peer, &frame, nbytes, nbytes);
    if (!t) {
        ucx_fail(peer, "there is no memory for what it is to be told");
        return;
    }
    ucx_sign(t);
    memcpy(t->data, &t->frame, sizeof t->frame);
    memcpy(t->data + sizeof t->frame, u->address, u->address_nbytes);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = ucx_on_sent,
                                 .user_data = t};
    ucx_is_under_way(t, u->call->tag_send_nbx(peer->ep, t->data, nbytes, HELLO_TAG, &param));
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

void ucx_meet(ucx_peer *peer) {
    peer->is_met = true;
    ucx_sockets_take_accepted(peer->owner);
    for (ucx_transfer *t; (t = take_held(peer));)
        ucx_dispatch(t, NULL);
}

void ucx_drop_held(ucx_peer *peer) {
    for (ucx_transfer *t; (t = take_held(peer));)
        ucx_release(t);
}
