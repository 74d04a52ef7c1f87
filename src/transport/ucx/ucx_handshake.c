/* The handshake with a peer. Each end sends a hello, and nothing else before the other's hello has arrived. Then each
 * sends its proof (base/proof.h), and nothing else before the other's proof has arrived.
 *
 * A hello carries a code that shows that its sender has the key, so that nothing is kept for others, and UCX does not
 * see their addresses. A hello can be recorded and sent again; the proof can't, because it covers the nonces of both
 * ends. All later frames carry an id that is made of the nonces and the key: a frame without it is dropped. A process
 * that has sent a hello that was not asked for is a stranger until its proof has arrived.
 *
 * Hellos carry the number of the connection. An end that has lost a connection, and connects again, sends a hello with
 * the next number. An end that receives a higher number than its own loses its connection, if it has not yet, and
 * answers with a hello of that number. So it does not matter which end noticed the loss, and both may begin at once.
 * Hellos with lower numbers are late, and ignored.
 *
 * An end whose hello is not answered begins the next connection after some heartbeats: after a link was cut for a
 * minute, the kernel takes another minute to retransmit, while a new endpoint works at once. If the answer arrives
 * later than that, the limit is doubled.
 *
 * The hello is the only tagged message. Before UCX sends the first active message of an endpoint, it asks the peer's
 * UCX for the id of the matching endpoint. If the reply has to wait, because the peer's connection is still being made,
 * and that connection then fails, UCX 1.13 aborts the peer's process with an assertion. Tagged messages need no such
 * request. A received hello shows that the peer's connection exists, so that its replies do not wait; provided that
 * they use the peer's endpoint of the same connection. UCX pairs the n-th endpoint of one process with the n-th of the
 * other. So both ends create one endpoint for each connection number, also for numbers that they have not used
 * (ucx_connect_endpoint). */
#include "transport/ucx/ucx.h"

#include "base/descriptors.h"

#include "base/checksum.h"
#include "base/log.h"

#include <inttypes.h>
#include <string.h>

enum {
    HELLO_TAG = UCX_MAGIC,
    HELLO_HEAD = sizeof(ucx_frame) + sizeof(ucx_challenge),
    HELLO_ROOM = HELLO_HEAD + TB_ADDRESS_MAX,
    MAX_AHEAD = 100000,   /* how much higher than ours the number of a hello may be */
    MAX_HELLO_BEATS = 64, /* beats */
};

/* ---- Connections ---------------------------------------------------------------------------------------------- */

uint64_t ucx_connection_id(uint64_t id, uint64_t number) {
    return number == 1 ? id : tb__hash(id, number);
}

ucx_peer *ucx_replace_peer(ucx_peer *lost, uint64_t number) {
    ucx *u = lost->owner;
    ucx_peer *peer = tb__vec_reserve(&u->retired, 1) ? tb__calloc(1, sizeof *peer) : NULL;
    if (!peer)
        return NULL;
    peer->owner = u;
    peer->rank = lost->rank;
    peer->id = lost->id;
    peer->number = number;
    peer->nendpoints = lost->nendpoints;
    peer->max_unanswered_beats = UCX_HELLO_BEATS_AGAIN;
    for (size_t i = 0; i < u->peers.count; i++) {
        if (u->peers.item[i] == lost)
            u->peers.item[i] = peer;
    }
    u->retired.item[u->retired.count++] = lost;
    return peer;
}

void ucx_free_peer(ucx_peer *peer) {
    free(peer->address);
    free(peer->successor);
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

/* Only an answer shows whether the peer still has its end of an older connection. */
void ucx_ping(ucx_peer *peer) {
    if (peer->last_ping == peer->last_pong)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PING, .at = ++peer->last_ping});
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
        return tb__fail(TB_INVALID, "its address is corrupt: wrong length or checksum");
    return TB_OK;
}

/* The process id in an address; 0: it is not valid. */
static uint64_t id_of(const void *address, size_t nbytes) {
    ucx_address head;
    return ucx_check_address(address, nbytes, &head) == TB_OK ? head.id : 0;
}

/* For ucx_retry_hello. */
static bool keep_address(ucx_peer *peer, const void *address, size_t nbytes) {
    if (peer->address || peer->has_hello)
        return true;
    peer->address = tb__memdup(address, nbytes, 1);
    peer->address_nbytes = nbytes;
    return peer->address != NULL;
}

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    ucx_peer *peer = arg;
    if (!peer->ep || ep == peer->ep)
        ucx_fail_peer_by_status(peer, status);
}

static ucs_status_t make_endpoint(ucx_peer *peer, const void *address) {
    ucx *u = peer->owner;
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)((const unsigned char *)address + sizeof(ucx_address)),
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_endpoint_error, .arg = peer}};
    ucx_sockets_snapshot(u);
    ucs_status_t status = u->call->ep_create(u->worker, &params, &peer->ep);
    ucx_sockets_adopt_new(u);
    peer->nendpoints++;
    if (status != UCS_OK)
        peer->ep = NULL;
    return status;
}

tb_status ucx_connect_endpoint(ucx_peer *peer, const void *address, size_t nbytes) {
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
    int error = ucx_try_descriptors(2); /* UCX aborts the process if it gets only one of two */
    if (error)
        return tb__fail(TB_REFUSED, "connecting to it through UCX: %s", tb__errno_text(error));
    if (peer->nendpoints >= peer->number)
        peer->number = peer->nendpoints + 1; /* an earlier endpoint failed */
    ucs_status_t status = UCS_OK;
    do { /* the last one is used; the others pair with endpoints that the peer has made without us */
        ucx_close_endpoint(peer);
        status = make_endpoint(peer, address);
    } while (status == UCS_OK && peer->nendpoints < peer->number);
    if (status != UCS_OK)
        return ucx_fail_by_choice(u, "connecting to it through UCX", status, TB_LOST);
    peer->is_direct = tb__ucx_direct >= 0 ? tb__ucx_direct : ucx_has_direct_lanes(u, peer->ep);
    ucx_send_hello(peer);
    ucx_await_peer(peer);
    ucx_wake(u);
    return TB_OK;
}

/* ---- Receiving hellos ------------------------------------------------------------------------------------------ */

/* Keeps the successor until the loss of the current connection has been reported. */
static void keep_successor(ucx_peer *peer, const ucx_successor *next, const void *address) {
    ucx_successor *copy = tb__malloc(1, sizeof *copy + next->nbytes);
    if (!copy)
        return; /* the peer will send another hello */
    *copy = *next;
    memcpy(copy->address, address, next->nbytes);
    free(peer->successor);
    peer->successor = copy;
}

void ucx_accept_successor(ucx_peer *lost) {
    ucx_successor *next = lost->successor;
    lost->successor = NULL;
    ucx_peer *peer = ucx_replace_peer(lost, next->number);
    if (peer && ucx_connect_endpoint(peer, next->address, next->nbytes) == TB_OK) {
        peer->serial_in = 1; /* the hello was serial 0 */
        peer->owner->hello_end = next->end;
        ucx_answer_hello(peer, next->is_driven);
    }
    free(next);
}

/* Restarts, with a higher number, a connection that has carried only hellos and our proof. */
static void restart_connection(ucx_peer *peer, uint64_t number, const void *address, size_t nbytes) {
    ucx_close_endpoint(peer);
    tb__match_free(&peer->owner->early, peer->rank);
    peer->has_challenge = false;
    peer->serial_in = 0;
    peer->number = number;
    if (ucx_connect_endpoint(peer, address, nbytes) != TB_OK)
        ucx_fail_peer(peer, "it can't be connected to");
}

/* Whether the hello belongs to our connection with the peer. One with a higher number replaces the connection. Invalid
 * hellos of number 1 pass, for ucx_on_active_message to reject. */
static bool is_current_hello(ucx *u, const ucx_frame *frame, const void *address, size_t nbytes) {
    ucx_successor next = {.number = frame->number > 1 ? frame->number : 1,
                          .is_driven = frame->tag,
                          .end = u->hello_end,
                          .nbytes = nbytes};
    ucx_peer *peer = frame->rank >= 0 ? ucx_find_or_add(u, frame->rank) : NULL;
    uint64_t id = id_of(address, nbytes);
    if (peer && peer->is_stranger && !peer->is_lost && peer->id != id)
        ucx_forget_stranger(peer);
    if (peer && peer->id == 0 && id != 0)
        peer->is_stranger = true;
    if (!peer || id == 0 || (peer->id != 0 && peer->id != id) || next.number > peer->number + MAX_AHEAD)
        return next.number == 1;
    if (peer->id == 0)
        peer->number = next.number;
    if (next.number < peer->number && !peer->has_hello && peer->max_unanswered_beats < MAX_HELLO_BEATS)
        peer->max_unanswered_beats *= 2; /* the peer answers, but late */
    if (next.number == peer->number && !ucx_has_failed(peer))
        return !peer->has_challenge;
    if (next.number <= peer->number || (peer->successor && peer->successor->number > next.number))
        return false;
    if (!ucx_has_failed(peer) && !peer->has_hello) {
        restart_connection(peer, next.number, address, nbytes);
        return true;
    }
    keep_successor(peer, &next, address);
    if (peer->is_lost && peer->successor)
        ucx_accept_successor(peer);
    else
        ucx_fail_peer(peer, "it has begun a new connection");
    return false;
}

static void make_code(const ucx *u, unsigned char *hello, size_t nbytes, uint8_t out[TB__SHA256_NBYTES]) {
    memset(hello + sizeof(ucx_frame) + offsetof(ucx_challenge, code), 0, TB__SHA256_NBYTES);
    tb__hmac_sha256(u->key.bytes, sizeof u->key.bytes, hello, nbytes, out);
}

/* The id of a process with this rank, in proofs. */
static void write_end_id(tb__proof_end *end, uint64_t id, int32_t rank) {
    memset(end->id, 0, sizeof end->id);
    memcpy(end->id, &id, sizeof id);
    memcpy(end->id + sizeof id, &rank, sizeof rank);
}

/* Whether the hello's sender has the key; then hello_end is its end. */
static bool is_hello_genuine(ucx *u, const ucx_frame *frame, size_t nbytes) {
    ucx_challenge challenge;
    uint8_t code[TB__SHA256_NBYTES];
    memcpy(&challenge, u->hello + sizeof *frame, sizeof challenge);
    make_code(u, u->hello, nbytes, code);
    write_end_id(&u->hello_end, id_of(u->hello + HELLO_HEAD, nbytes - HELLO_HEAD), frame->rank);
    memcpy(u->hello_end.nonce, challenge.nonce, sizeof challenge.nonce);
    return tb__is_equal_in_constant_time(code, challenge.code, sizeof code);
}

static void on_hello(ucx *u, ucs_status_t status, size_t nbytes) {
    ucx_frame frame;
    if (status != UCS_OK || nbytes < HELLO_HEAD)
        return;
    memcpy(&frame, u->hello, sizeof frame);
    const unsigned char *address = u->hello + HELLO_HEAD;
    bool is_genuine = is_hello_genuine(u, &frame, nbytes);
    if (is_genuine && (frame.rank == u->env.rank || id_of(address, nbytes - HELLO_HEAD) == u->id)) {
        if (tb__may_warn(&u->warn_again_ms))
            tb__log(TB_LOG_WARN, "ucx: a hello was refused: it is our own, or claims our rank %" PRId32, frame.rank);
        return;
    }
    if (!is_genuine) {
        if (tb__may_warn(&u->warn_again_ms))
            tb__log(TB_LOG_WARN,
                    "ucx: a hello from a process that claims rank %" PRId32
                    " was refused: its sender does not have the token of the bus",
                    frame.rank);
        return;
    }
    if (frame.kind == UCX_HELLO && is_current_hello(u, &frame, address, nbytes - HELLO_HEAD))
        ucx_on_active_message(u, &frame, sizeof frame, u->hello + HELLO_HEAD, nbytes - HELLO_HEAD,
                              &(ucp_am_recv_param_t){0});
}

static size_t count_strangers(const ucx *u) {
    size_t count = 0;
    for (size_t i = 0; i < u->peers.count; i++)
        count += u->peers.item[i]->is_stranger && !ucx_has_failed(u->peers.item[i]);
    return count;
}

static bool is_crowded(ucx *u) {
    u->is_deaf = count_strangers(u) >= UCX_STRANGERS;
    return u->is_deaf;
}

void ucx_listen_again(ucx *u) {
    if (u->is_deaf && !is_crowded(u) && ucx_receive_hellos(u) != TB_OK)
        tb__log(TB_LOG_ERROR, "%s", tb_error_detail());
}

void ucx_forget_stranger(ucx_peer *peer) {
    ucx_close_endpoint(peer);
    tb__match_free(&peer->owner->early, peer->rank);
    free(peer->address);
    peer->address = NULL;
    free(peer->successor);
    peer->successor = NULL;
    peer->id = peer->nendpoints = peer->serial_in = 0;
    peer->number = 1;
    peer->has_challenge = peer->is_stranger = false;
    peer->stranger_beats = 0;
}

static void on_hello_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *arg) {
    ucx *u = arg;
    u->listening = NULL;
    on_hello(u, status, info->length);
    u->call->request_free(request);
    if (status != UCS_ERR_CANCELED && !is_crowded(u) && ucx_receive_hellos(u) != TB_OK)
        tb__log(TB_LOG_ERROR, "%s", tb_error_detail());
}

tb_status ucx_receive_hellos(ucx *u) {
    ucp_tag_recv_info_t info = {0};
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_RECV_INFO,
                                 .cb.recv = on_hello_received,
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
        on_hello(u, UCS_OK, info.length); /* it had arrived already */
        if (is_crowded(u))
            return TB_OK;
    }
}

void ucx_stop_receiving_hellos(ucx *u) {
    if (u->listening)
        u->call->request_cancel(u->worker, u->listening);
    while (u->listening && u->call->worker_progress(u->worker) > 0) {
    }
}

/* ---- Sending hellos -------------------------------------------------------------------------------------------- */

void ucx_send_hello(ucx_peer *peer) {
    ucx *u = peer->owner;
    ucx_frame frame = {.kind = UCX_HELLO, .tag = u->env.is_driven, .number = peer->number};
    size_t nbytes = HELLO_HEAD + u->address_nbytes;
    ucx_challenge challenge = {0};
    ucx_transfer *t = ucx_new_transfer(peer, &frame, nbytes, nbytes);
    if (!t) {
        ucx_fail_peer(peer, "no memory to send it a frame");
        return;
    }
    if (tb__random_bytes(challenge.nonce, sizeof challenge.nonce) != TB_OK) {
        ucx_release(t);
        ucx_fail_peer(peer, "there are no random numbers for a hello");
        return;
    }
    write_end_id(&peer->mine, u->id, u->env.rank);
    memcpy(peer->mine.nonce, challenge.nonce, sizeof challenge.nonce);
    peer->serial_out = 0; /* a hello is the first frame, also of a restarted connection */
    peer->unanswered_beats = 0;
    ucx_set_sender(t);
    memcpy(t->data, &t->frame, sizeof t->frame);
    memcpy(t->data + sizeof t->frame, &challenge, sizeof challenge);
    memcpy(t->data + HELLO_HEAD, u->address, u->address_nbytes);
    make_code(u, t->data, nbytes, challenge.code);
    memcpy(t->data + sizeof t->frame, &challenge, sizeof challenge);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = ucx_on_sent,
                                 .user_data = t};
    ucx_is_under_way(t, u->call->tag_send_nbx(peer->ep, t->data, nbytes, HELLO_TAG, &param));
}

void ucx_retry_hello(ucx_peer *peer) {
    restart_connection(peer, peer->number + 1, peer->address, peer->address_nbytes);
}

void ucx_queue_until_hello(ucx_transfer *t) {
    ucx_peer *peer = t->peer;
    if (!peer->queued)
        peer->last_queued = &peer->queued;
    *peer->last_queued = t;
    peer->last_queued = &t->next_queued;
    t->owner->nqueued++;
}

static ucx_transfer *take_queued(ucx_peer *peer) {
    ucx_transfer *t = peer->queued;
    if (t) {
        peer->queued = t->next_queued;
        peer->owner->nqueued--;
    }
    return t;
}

/* The secret id of the frames from one end to the other. */
static uint64_t secret_id(const ucx *u, const tb__proof_end *from, const tb__proof_end *to) {
    uint8_t bytes[TB__PROOF_NBYTES];
    uint64_t id;
    tb__proof_make(&u->key, "connection", UCX_VERSION, from, to, bytes);
    memcpy(&id, bytes, sizeof id);
    return id;
}

void ucx_answer_hello(ucx_peer *peer, bool is_driven) {
    ucx *u = peer->owner;
    peer->theirs = u->hello_end;
    peer->has_challenge = true;
    peer->is_challenge_driven = is_driven;
    peer->id_out = secret_id(u, &peer->mine, &peer->theirs);
    peer->id_in = secret_id(u, &peer->theirs, &peer->mine);
    ucx_transfer *t = ucx_new_transfer(peer, &(ucx_frame){.kind = UCX_PROOF}, TB__PROOF_NBYTES, TB__PROOF_NBYTES);
    if (!t) {
        ucx_fail_peer(peer, "no memory to send it a frame");
        return;
    }
    tb__proof_make(&u->key, "rank", UCX_VERSION, &peer->mine, &peer->theirs, t->data);
    ucx_send_transfer(t, NULL);
}

static void complete_handshake(ucx_peer *peer) {
    peer->has_hello = true;
    peer->is_stranger = false;
    peer->is_driven = peer->is_challenge_driven;
    peer->reached_changed = true;
    free(peer->address);
    peer->address = NULL;
    ucx_watch_peer(peer);
    ucx_sockets_adopt_accepted(peer->owner);
    for (ucx_transfer *t; (t = take_queued(peer));)
        ucx_send_transfer(t, NULL);
    if (peer->number > 1)
        ucx_ping(peer); /* our hello may have been ignored as late */
    ucx_send_chunks(peer);
}

bool ucx_on_proof(ucx_peer *peer, const unsigned char *proof, size_t nbytes) {
    if (peer->has_hello)
        return false;
    if (tb__proof_accepts(&peer->owner->key, "rank", UCX_VERSION, &peer->theirs, &peer->mine, proof, nbytes))
        complete_handshake(peer);
    else
        ucx_fail_peer(peer, "it does not have the token of the bus");
    return true;
}

void ucx_drop_queued(ucx_peer *peer) {
    for (ucx_transfer *t; (t = take_queued(peer));)
        ucx_release(t);
}
