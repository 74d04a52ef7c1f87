/* Peers, and the messages between loops. A message is a frame: port, length, then the bytes if they fit. The bytes of a
 * longer message follow in parts, short enough to be sent before their receives are posted. All have one tag, so a
 * peer's messages stay in order. */
#include "loop/loop_inside.h"

#include "base/checksum.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/traffic.h"
#include "loop/comm.h"
#include "loop/share.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

enum {
    FRAME_HEADER = 12,     /* port, nbytes */
    FRAME_ROOM = 4096,     /* header and bytes */
    MAX_MESSAGE = 1 << 30, /* bytes */
    RANK_BITS = 20,
    RETRY_MS = 20, /* until an operation that failed for lack of memory is tried again */
};

_Static_assert(TB_MAX_RANKS == 1 << RANK_BITS, "a bus rank fits");

/* Different incarnations of a rank have different transport ranks (if there are fewer than 2,047 between them). */
int32_t tb__transport_rank(int32_t rank, uint64_t incarnation) {
    return (int32_t)((incarnation - 1) % 2047 << RANK_BITS | (uint64_t)rank);
}

/* ---- Contact -------------------------------------------------------------------------------------------------- */

/* Processes with equal ids can connect through local sockets: same boot of the same kernel, same network namespace. The
 * host name stands in for an unknown boot id. */
void tb__get_machine_id(const char *given, char host[TB__CONTACT_PREFIX]) {
    memset(host, 0, TB__CONTACT_PREFIX);
    if (given) {
        snprintf(host, TB__CONTACT_PREFIX, "%s", given);
        return;
    }
    struct stat net;
    struct utsname name;
    size_t n = tb__read_short_file("/proc/sys/kernel/random/boot_id", host, 37) ? strcspn(host, "\n") : 0;
    if (n == 0 && uname(&name) == 0)
        n = (size_t)snprintf(host, 37, "%.36s", name.nodename);
    if (stat("/proc/self/ns/net", &net) == 0)
        snprintf(host + n, TB__CONTACT_PREFIX - n, "/%" PRIx64, (uint64_t)net.st_ino);
}

tb_status tb__loop_contact(tb__loop *loop, tb__pack *out) {
    tb__pack pack = {0};
    tb__pack_raw(&pack, loop->host, sizeof loop->host);
    tb__pack_string(&pack, tb_version_string());
    tb__pack_u32(&pack, (uint32_t)loop->ntransports);
    for (size_t i = 0; i < loop->ntransports; i++) {
        unsigned char address[TB_ADDRESS_MAX];
        size_t nbytes = sizeof address;
        const tb_transport *t = &loop->transports[i];
        tb_status status = t->ops->address ? t->ops->address(t->context, address, &nbytes) : TB_OK;
        nbytes = t->ops->address ? nbytes : 0;
        if (status != TB_OK) {
            tb__pack_fini(&pack);
            return status;
        }
        tb__pack_string(&pack, t->ops->name);
        tb__pack_bytes(&pack, address, nbytes);
    }
    tb__pack_i64(&pack, loop->begun);
    if (pack.failed) {
        tb__pack_fini(&pack);
        return TB_NO_MEMORY;
    }
    *out = pack;
    return TB_OK;
}

/* ---- Receiving ------------------------------------------------------------------------------------------------ */

static void receive_frame(tb__peer *peer);

/* Whether no more messages are sent to it. */
static bool has_ended(const tb__peer *peer) {
    return peer->is_lost || peer->expected_loss;
}

/* Any post may detect a loss, in the middle of other work. So the ports are not called here, but in the driver's next
 * step; until then nothing is sent to the peer. */
static void mark_peer_lost(tb__peer *peer, const char *why) {
    tb__loop *loop = peer->loop;
    if (peer->is_lost || loop->stopping)
        return;
    peer->is_lost = true;
    peer->why = tb__strdup(why ? why : "it is gone");
    tb__log(TB_LOG_INFO, "%s is lost: %s", peer->label, peer->why ? peer->why : "");
    loop->nunreported++;
    tb__loop_wake(loop);
}

static void report_loss_to_ports(tb__peer *peer) {
    peer->loss_reported = true;
    peer->loop->nunreported--;
    for (tb__port *port = peer->loop->ports; port; port = port->next) {
        if (port->lost)
            port->lost(port, peer);
    }
    tb__shares_on_lost(peer);
    tb__comms_on_lost(peer);
}

/* For a peer that this process is not connected to: it is lost once its messages have been received. The last of them
 * may be in a socket that this process has not read yet. */
static void expect_loss(tb__peer *peer, const char *why) {
    tb__loop *loop = peer->loop;
    peer->expected_loss = tb__strdup(why);
    if (!peer->expected_loss || !tb__vec_push(&loop->ending, peer))
        mark_peer_lost(peer, why);
    tb__loop_wake(loop);
}

void tb__peers_report_losses(tb__loop *loop) {
    if (loop->nunreported == 0)
        return;
    while (loop->nunreported > 0) { /* ports may cause further losses */
        for (tb__peer *peer = loop->peers; peer; peer = peer->next) {
            if (peer->is_lost && !peer->loss_reported)
                report_loss_to_ports(peer);
        }
    }
    tb__loop_signal(loop);
}

/* Gives up the connection at this end, and tells the other end. */
static void disconnect_peer(tb__peer *peer, const char *why) {
    mark_peer_lost(peer, why);
    if (!peer->is_disconnected)
        tb__transport_disconnect(peer->transport, peer->transport_rank, why);
}

void tb__peers_mark_ended(tb__loop *loop, size_t count) {
    if (count == 0)
        return;
    for (size_t i = 0; i < count; i++) {
        tb__peer *peer = loop->ending.item[i];
        peer->is_disconnected |= !peer->is_receiving; /* otherwise the transport knows it */
        disconnect_peer(peer, peer->expected_loss);
    }
    loop->ending.count -= count;
    memmove(loop->ending.item, loop->ending.item + count, loop->ending.count * sizeof *loop->ending.item);
}

static void deliver_message(tb__peer *peer, uint32_t id, const unsigned char *data, size_t nbytes) {
    tb__loop *loop = peer->loop;
    tb__unpack message = {data, data + nbytes, false};
    if (peer->loss_reported)
        return;
    if (id == TB__PORT_LOOP || id == TB__PORT_TRANSPORTS) {
        if (!(id == TB__PORT_LOOP ? tb__shares_on_message : tb__comms_on_message)(peer, &message))
            disconnect_peer(peer, tb_error_detail());
        tb__loop_wake(loop);
        return;
    }
    for (tb__port *port = loop->ports; port; port = port->next) {
        if (port->id == id) {
            port->message(port, peer, &message);
            tb__loop_wake(loop);
            return;
        }
    }
    tb__log(TB_LOG_DEBUG, "a message of %s for port %" PRIu32 ", which is closed", peer->label, id);
}

typedef struct tb__next_receive {
    tb_op op;
    tb_piece piece;
} tb__next_receive;

static uint32_t frame_port(const tb__peer *peer, uint64_t *nbytes) {
    tb__unpack frame = {peer->inbox, peer->inbox + FRAME_HEADER, false};
    uint32_t port = tb__unpack_u32(&frame);
    *nbytes = tb__unpack_u64(&frame);
    return port;
}

static void receive_part(tb__peer *peer);
static tb_status post_parts(tb__peer *peer);

static bool retry_posts(tb__task *task) {
    tb__peer *peer = (tb__peer *)((char *)task - offsetof(tb__peer, retry_task));
    if (peer->is_lost || peer->loop->stopping || tb__now_ms() < task->deadline_ms)
        return false;
    task->deadline_ms = INT64_MAX;
    if (peer->unposted && post_parts(peer) == TB_LOST)
        mark_peer_lost(peer, tb_error_detail());
    if (!peer->is_receive_due)
        return true;
    peer->is_receive_due = false;
    if (peer->is_in_message)
        receive_part(peer);
    else
        receive_frame(peer);
    return true;
}

/* For an operation that failed for lack of memory. Disconnecting would need memory, too, so the peer could not be
 * notified. */
static void schedule_retry(tb__peer *peer) {
    if (!peer->retry_task.step) {
        peer->retry_task.step = retry_posts;
        tb__loop_add_task(peer->loop, &peer->retry_task);
    }
    peer->retry_task.deadline_ms = tb__now_ms() + RETRY_MS;
}

static void schedule_receive(tb__peer *peer) {
    peer->is_receive_due = true;
    schedule_retry(peer);
}

static void post_receive(tb__peer *peer, void (*done)(tb_op *op), void *base, size_t nbytes) {
    tb__next_receive *next = peer->receive;
    next->piece = (tb_piece){base, nbytes};
    next->op = (tb_op){.kind = TB_OP_RECV,
                       .peer = peer->transport_rank,
                       .tag = TB__TAG_MESSAGE,
                       .pieces = &next->piece,
                       .npieces = 1,
                       .done = done,
                       .arg = peer};
    tb_status status = tb__transport_post(peer->transport, &next->op);
    if (status == TB_NO_MEMORY)
        schedule_receive(peer);
    else if (status != TB_OK)
        disconnect_peer(peer, tb_error_detail());
}

/* Frees the inbox when nothing is received from the peer any more. The peer's struct stays, so buffers of reconnecting
 * peers would accumulate. */
static void free_inbox(tb__peer *peer) {
    free(peer->inbox);
    free(peer->message_bytes);
    peer->inbox = peer->message_bytes = NULL;
}

/* Whether the receive succeeded; if not, receiving has ended. */
static bool check_received(tb__peer *peer, const tb_op *op) {
    if (op->status == TB_OK)
        return true;
    if (op->status == TB_TOO_BIG)
        tb__set_detail("oversized frame: got %zu bytes, %zu are allowed", op->nbytes, peer->receive->piece.nbytes);
    else
        tb__set_detail("its frame can't be received: %s", tb__op_why(op));
    if (op->status != TB_LOST && op->status != TB_CANCELLED)
        disconnect_peer(peer, tb_error_detail());
    free_inbox(peer);
    return false;
}

static void on_part(tb_op *op) {
    tb__peer *peer = op->arg;
    uint64_t nbytes;
    if (!check_received(peer, op))
        return;
    uint32_t port = frame_port(peer, &nbytes);
    peer->received += op->nbytes;
    if (op->nbytes < peer->receive->piece.nbytes) {
        tb__set_detail("truncated message: got %zu of %" PRIu64 " bytes", peer->received, nbytes);
        disconnect_peer(peer, tb_error_detail());
        free_inbox(peer);
    } else if (peer->received < nbytes) {
        receive_part(peer);
    } else {
        unsigned char *body = peer->message_bytes;
        peer->message_bytes = NULL;
        peer->is_in_message = false;
        deliver_message(peer, port, body, nbytes);
        free(body);
        receive_frame(peer);
    }
}

static void on_frame(tb_op *op) {
    tb__peer *peer = op->arg;
    if (!check_received(peer, op))
        return;
    uint64_t nbytes;
    uint32_t port = frame_port(peer, &nbytes);
    size_t held = op->nbytes >= FRAME_HEADER ? op->nbytes - FRAME_HEADER : 0; /* bytes of the message */
    if (op->nbytes < FRAME_HEADER) {
        tb__set_detail("truncated frame: got %zu of %d bytes", op->nbytes, FRAME_HEADER);
        disconnect_peer(peer, tb_error_detail());
    } else if (nbytes == held) {
        deliver_message(peer, port, peer->inbox + FRAME_HEADER, nbytes);
        receive_frame(peer);
    } else if (held > 0) {
        tb__set_detail("wrong frame: it announces a message of %" PRIu64 " bytes and holds %zu", nbytes, held);
        disconnect_peer(peer, tb_error_detail());
    } else if (nbytes > MAX_MESSAGE) {
        tb__set_detail("wrong frame: it announces a message of %" PRIu64 " bytes, %d are allowed", nbytes, MAX_MESSAGE);
        disconnect_peer(peer, tb_error_detail());
    } else {
        peer->is_in_message = true;
        peer->received = 0;
        receive_part(peer);
    }
}

static void receive_part(tb__peer *peer) {
    uint64_t nbytes;
    (void)frame_port(peer, &nbytes);
    if (peer->is_lost || peer->loop->stopping)
        return;
    if (!peer->message_bytes && !(peer->message_bytes = tb__malloc(nbytes, 1))) {
        schedule_receive(peer);
        return;
    }
    size_t left = nbytes - peer->received;
    post_receive(peer, on_part, peer->message_bytes + peer->received, left < TB_SHORT_MAX ? left : TB_SHORT_MAX);
}

static void receive_frame(tb__peer *peer) {
    if (!peer->is_lost && !peer->loop->stopping)
        post_receive(peer, on_frame, peer->inbox, FRAME_ROOM);
}

static tb_status make_inbox(tb__peer *peer) {
    if (!peer->inbox && !(peer->inbox = tb__malloc(FRAME_ROOM, 1)))
        return TB_NO_MEMORY;
    if (!peer->receive && !(peer->receive = tb__calloc(1, sizeof *peer->receive)))
        return TB_NO_MEMORY;
    return TB_OK;
}

static void begin_receiving(tb__peer *peer) {
    if (!peer->is_receiving)
        receive_frame(peer);
    peer->is_receiving = true;
}

void tb__peer_on_lost(void *arg, int32_t transport_rank, const char *why) {
    tb__loop *loop = ((const tb__loop_transport *)arg)->loop;
    for (tb__peer *peer = loop->peers; peer; peer = peer->next) {
        if (peer->transport_rank == transport_rank && !peer->is_disconnected) {
            peer->is_disconnected = true;
            mark_peer_lost(peer, why);
        }
    }
}

tb__peer *tb__loop_find_by_transport_rank(tb__loop *loop, int32_t transport_rank) {
    size_t probe = 0, i;
    tb__peer *found = NULL; /* the newest */
    while ((i = tb__index_next(&loop->peer_index, tb__hash(0, (uint32_t)transport_rank), &probe)) != TB__NOWHERE) {
        tb__peer *peer = loop->all_peers.item[i];
        if (peer->transport_rank == transport_rank)
            found = peer;
    }
    return found;
}

/* Its messages are received at once: once its process has ended, connecting to it is impossible. */
static void mark_met(tb__peer *peer) {
    if (peer->is_open || peer->is_met || peer->is_lost)
        return;
    peer->is_met = make_inbox(peer) == TB_OK && tb__vec_push(&peer->loop->met, peer);
    if (peer->is_met)
        begin_receiving(peer);
    else
        tb__log(TB_LOG_ERROR, "no memory for the connection of %s", peer->label);
    tb__loop_wake(peer->loop);
}

void tb__peer_on_reached(void *arg, int32_t transport_rank) {
    tb__loop *loop = ((const tb__loop_transport *)arg)->loop;
    tb__peer *peer = tb__loop_find_by_transport_rank(loop, transport_rank);
    if (peer)
        mark_met(peer);
    else if (!tb__vec_push(&loop->strangers, transport_rank))
        tb__log(TB_LOG_ERROR, "no memory for the connection of transport rank %" PRId32, transport_rank);
    tb__loop_signal(loop);
}

void tb__peers_open_met(tb__loop *loop) {
    while (loop->met.count > 0) {
        tb__peer *peer = loop->met.item[--loop->met.count];
        peer->is_met = false;
        if (tb__peer_open(peer) != TB_OK)
            tb__log(TB_LOG_WARN, "%s has connected, but can't be connected to: %s", peer->label, tb_error_detail());
    }
}

/* ---- Sending -------------------------------------------------------------------------------------------------- */

/* A frame, and the parts that follow it. */
typedef struct tb__outgoing {
    tb__peer *peer;
    unsigned char header[FRAME_HEADER];
    tb__pack message;
    tb_piece frame[2];
    size_t nposted, nparts; /* the frame is the first part */
    size_t left;            /* parts that are not done */
    struct {
        tb_op op;
        tb_piece piece;
    } parts[];
} outgoing;

static void complete_parts(outgoing *out, size_t count) {
    out->left -= count;
    if (out->left > 0)
        return;
    if (--out->peer->nunsent == 0)
        tb__loop_wake(out->peer->loop); /* a flow may wait for messages to be sent */
    tb__pack_fini(&out->message);
    free(out);
}

static void on_part_sent(tb_op *op) {
    complete_parts(op->arg, 1);
}

/* Posts the remaining parts of peer->unposted. They must directly follow the frame, or the peer would take the next
 * message for them. So after a lack of memory they are retried before anything else is sent. */
static tb_status post_parts(tb__peer *peer) {
    outgoing *out = peer->unposted;
    tb_status status = TB_OK;
    while (out->nposted < out->nparts && (status = tb__peer_post(peer, &out->parts[out->nposted].op)) == TB_OK)
        out->nposted++;
    if (status != TB_OK && status != TB_LOST && out->nposted > 0) {
        schedule_retry(peer);
        return TB_OK;
    }
    peer->unposted = NULL;
    if (status != TB_OK)
        complete_parts(out, out->nparts - out->nposted);
    return status;
}

static outgoing *new_outgoing(tb__peer *peer, uint32_t port, tb__pack *message) {
    size_t nbytes = message->count;
    bool is_short = nbytes <= FRAME_ROOM - FRAME_HEADER;
    size_t nparts = is_short ? 1 : 1 + (nbytes + TB_SHORT_MAX - 1) / TB_SHORT_MAX;
    outgoing *out = tb__malloc(1, sizeof *out + nparts * sizeof *out->parts);
    if (!out)
        return NULL;
    *out = (outgoing){.peer = peer, .message = *message, .nparts = nparts, .left = nparts};
    *message = (tb__pack){0};
    tb__pack header = {.data = out->header, .capacity = FRAME_HEADER};
    tb__pack_u32(&header, port);
    tb__pack_u64(&header, nbytes);
    out->frame[0] = (tb_piece){out->header, FRAME_HEADER};
    out->frame[1] = (tb_piece){out->message.data, nbytes};
    for (size_t i = 0; i < nparts; i++) {
        size_t at = i ? (i - 1) * TB_SHORT_MAX : 0, left = nbytes - at;
        unsigned char *from = at ? out->message.data + at : out->message.data; /* an empty message has no data */
        out->parts[i].piece = (tb_piece){from, left < TB_SHORT_MAX ? left : TB_SHORT_MAX};
        out->parts[i].op = (tb_op){.kind = TB_OP_SEND,
                                   .peer = peer->transport_rank,
                                   .tag = TB__TAG_MESSAGE,
                                   .pieces = i ? &out->parts[i].piece : out->frame,
                                   .npieces = is_short ? 2 : 1,
                                   .done = on_part_sent,
                                   .arg = out};
    }
    peer->nunsent++;
    return out;
}

tb_status tb__loop_send(tb__peer *peer, uint32_t port, tb__pack *message) {
    tb_status status = tb__peer_open(peer);
    if (status == TB_OK && peer->unposted && !has_ended(peer))
        status = post_parts(peer);
    if (status == TB_LOST)
        mark_peer_lost(peer, tb_error_detail());
    outgoing *out = message->failed || has_ended(peer) || peer->unposted ? NULL : new_outgoing(peer, port, message);
    if (!out) {
        bool is_short = message->failed || !has_ended(peer);
        tb__pack_fini(message);
        return is_short ? tb__fail(TB_NO_MEMORY, "no memory for a message") : TB_OK;
    }
    peer->unposted = out;
    tb__count_message(&tb__traffic_total.ranks);
    status = post_parts(peer);
    tb__loop_wake(peer->loop);
    if (status == TB_LOST) {
        mark_peer_lost(peer, tb_error_detail());
        return TB_OK;
    }
    return status;
}

/* ---- Peers ---------------------------------------------------------------------------------------------------- */

bool tb__contact_read(const void *contact, size_t nbytes, tb__contact *out) {
    tb__unpack reader = {contact, (const unsigned char *)contact + nbytes, false};
    const void *host = tb__unpack_raw(&reader, TB__CONTACT_PREFIX);
    const char *version = tb__unpack_string(&reader);
    uint32_t ntransports = tb__unpack_u32(&reader);
    size_t used = 0, ignored;
    *out = (tb__contact){.begun = 0};
    if (reader.failed)
        return false;
    memcpy(out->host, host, TB__CONTACT_PREFIX);
    snprintf(out->version, sizeof out->version, "%s", version);
    for (uint32_t i = 0; i < ntransports && !reader.failed; i++) {
        const char *name = tb__unpack_string(&reader);
        tb__unpack_bytes(&reader, &ignored);
        if (!reader.failed && used < sizeof out->transports && strcmp(name, tb__self_ops.name) != 0)
            used +=
                (size_t)snprintf(out->transports + used, sizeof out->transports - used, "%s%s", used ? "," : "", name);
    }
    if (reader.failed)
        return false;
    if (reader.at < reader.end) /* 0.1 ends here */
        out->begun = tb__unpack_i64(&reader);
    return !reader.failed;
}

tb_status tb__contact_check_version(const void *contact, size_t nbytes, const char *label) {
    tb__unpack reader = {contact, (const unsigned char *)contact + nbytes, false};
    tb__unpack_raw(&reader, TB__CONTACT_PREFIX);
    const char *theirs = tb__unpack_string(&reader), *ours = tb_version_string();
    if (reader.failed)
        theirs = NULL;
    if (theirs && strncmp(ours, theirs, (size_t)(strrchr(ours, '.') + 1 - ours)) == 0)
        return TB_OK;
    return tb__fail(TB_REFUSED, "%s has tensorbus %.32s, we have %s: all ranks of a bus must have one version", label,
                    theirs ? theirs : "of an unknown version", ours);
}

/* The process's address for this transport; NULL: the process has not opened the transport. */
static const void *find_address(tb__unpack transports, const char *transport, size_t *nbytes) {
    uint32_t count = tb__unpack_u32(&transports);
    for (uint32_t i = 0; i < count && !transports.failed; i++) {
        const char *name = tb__unpack_string(&transports);
        const void *address = tb__unpack_bytes(&transports, nbytes);
        if (!transports.failed && strcmp(name, transport) == 0)
            return address;
    }
    return NULL;
}

/* The loop's first transport that reaches a process with these addresses. The other end finds the same one, because
 * both compare the same lists in the same order. NULL: none does; `why` may say more. */
static const tb_transport *choose_transport(const tb__loop *loop, bool is_here, bool is_near, tb__unpack transports,
                                            const void **address, size_t *nbytes, char *why, size_t room) {
    for (size_t i = 0; i < loop->ntransports; i++) {
        const tb_transport *t = &loop->transports[i];
        bool is_self = t->ops == &tb__self_ops;
        if (is_self != is_here || !t->ops->connect || (t->ops->is_local && !is_near && !loop->is_transport_requested))
            continue;
        *address = find_address(transports, t->ops->name, nbytes);
        tb__set_detail("%s", "");
        if (*address && tb__transport_reaches(t, *address, *nbytes))
            return t;
        if (*address && *tb_error_detail())
            snprintf(why, room, "; %s: %s", t->ops->name, tb_error_detail());
    }
    return NULL;
}

/* The message lists the transports of both ends. */
static tb_status fail_no_transport(const tb__loop *loop, const char *label, tb__unpack transports, const char *why) {
    char theirs[128] = "", ours[128] = "";
    uint32_t count = tb__unpack_u32(&transports);
    for (uint32_t i = 0; i < count && !transports.failed; i++) {
        size_t n = strlen(theirs), unused;
        const char *name = tb__unpack_string(&transports);
        tb__unpack_bytes(&transports, &unused);
        snprintf(theirs + n, sizeof theirs - n, "%s%s", n ? ", " : "", name);
    }
    for (size_t i = 0; i < loop->ntransports; i++) {
        size_t n = strlen(ours);
        snprintf(ours + n, sizeof ours - n, "%s%s", n ? ", " : "", loop->transports[i].ops->name);
    }
    return tb__fail(TB_REFUSED,
                    "%s has no transport in common with us, or is on another host: it has %s, we have %s%s%s%s", label,
                    theirs, ours, why, *loop->missing ? "; " : "", loop->missing);
}

static void peer_fini(tb__peer *peer) {
    if (peer->unposted)
        complete_parts(peer->unposted, peer->unposted->left);
    free(peer->why);
    free(peer->expected_loss);
    free(peer->receive);
    free(peer->inbox);
    free(peer->message_bytes);
}

tb__peer *tb__loop_find_peer(tb__loop *loop, int32_t rank, uint64_t incarnation) {
    return tb__loop_find_by_transport_rank(loop, tb__transport_rank(rank, incarnation));
}

tb__peer *tb__loop_peers(const tb__loop *loop) {
    return loop->peers;
}

bool tb__loop_has_unreported_losses(const tb__loop *loop) {
    return loop->nunreported > 0;
}

bool tb__peer_can_reconnect(const tb__peer *peer) {
    return peer->transport->ops->disconnect != NULL;
}

int32_t tb__loop_count_near(const tb__loop *loop) {
    int32_t count = 1;
    for (const tb__peer *peer = loop->peers; peer; peer = peer->next)
        count += !peer->is_lost && peer->rank != loop->rank && strncmp(peer->host, loop->host, TB__CONTACT_PREFIX) == 0;
    return count;
}

bool tb__peer_is_reached(const tb__peer *peer) {
    return !has_ended(peer) && (!peer->is_open || tb__transport_is_reached(peer->transport, peer->transport_rank));
}

tb_status tb__peer_open(tb__peer *peer) {
    if (peer->is_open || has_ended(peer))
        return TB_OK;
    TB_TRY(make_inbox(peer));
    tb__count_message(&tb__traffic_total.ranks);
    tb_status status = peer->transport->ops->connect(peer->transport->context, peer->transport_rank, peer->address,
                                                     peer->address_nbytes);
    if (status == TB_LOST) {
        if (peer->is_receiving) {
            expect_loss(peer, tb_error_detail());
        } else {
            peer->is_disconnected = true;
            mark_peer_lost(peer, tb_error_detail());
        }
        return TB_OK;
    }
    if (status != TB_OK)
        return tb__fail_within(status, "%s", peer->label);
    peer->is_open = true;
    begin_receiving(peer);
    return TB_OK;
}

void tb__peer_report_lost(tb__peer *peer, const char *why) {
    if (!peer->is_receiving && !has_ended(peer))
        expect_loss(peer, why);
}

bool tb__peer_carries(const tb__peer *peer, const tb__device *device) {
    tb_mem_kind kind = device->ops->transport_kind;
    return kind != TB_MEM_HOST && tb__transport_carries(peer->transport, kind);
}

tb_status tb__peer_post(tb__peer *peer, tb_op *op) {
    TB_TRY(tb__peer_open(peer));
    if (has_ended(peer))
        return tb__fail(TB_LOST, "%s",
                        peer->why             ? peer->why
                        : peer->expected_loss ? peer->expected_loss
                                              : "it is gone");
    return tb__transport_post(peer->transport, op);
}

/* Asks a known peer, if its connection stands, to answer (tb__peer_is_reached). */
static tb_status check_known_peer(tb__peer *known, tb__unpack transports) {
    const tb_transport *t = known->transport;
    size_t nbytes = 0;
    const void *address = find_address(transports, t->ops->name, &nbytes);
    if (known->is_lost || !known->is_open || !t->ops->is_reached || !address)
        return TB_OK;
    return t->ops->connect(t->context, known->transport_rank, address, nbytes);
}

/* A peer is connected later, when it is used, unless its transport needs that now. */
static tb_status connect_new_peer(tb__peer *peer, bool is_again) {
    tb__loop *loop = peer->loop;
    for (size_t i = 0; i < loop->strangers.count; i++) {
        if (loop->strangers.item[i] != peer->transport_rank)
            continue;
        loop->strangers.item[i--] = loop->strangers.item[--loop->strangers.count];
        mark_met(peer);
    }
    return is_again || !peer->transport->ops->reports_strangers ? tb__peer_open(peer) : TB_OK;
}

tb_status tb__loop_meet(tb__loop *loop, int32_t rank, uint64_t incarnation, const void *contact, size_t nbytes,
                        const char *label, tb__peer **out) {
    int32_t transport_rank = tb__transport_rank(rank, incarnation);
    uint64_t hash = tb__checksum(contact, nbytes);
    tb__peer *known = tb__loop_find_peer(loop, rank, incarnation);
    bool may_renew = known && known->is_disconnected && tb__peer_can_reconnect(known);
    /* A new store may assign the rank and incarnation of a process that died with the old store. */
    if (known && known->contact != hash && !may_renew)
        return tb__fail(TB_CONFLICT,
                        "%s has the number of another process, %s, which we met before the store was lost: one of them "
                        "has to be started again",
                        label, known->label);
    const void *address = NULL;
    size_t address_nbytes = 0;
    tb__unpack reader = {contact, (const unsigned char *)contact + nbytes, false};
    char why[128] = "";
    const char *host = tb__unpack_raw(&reader, TB__CONTACT_PREFIX);
    tb__unpack_string(&reader); /* the version */
    *out = known;
    if (known && !may_renew)
        return check_known_peer(known, reader);
    TB_TRY(tb__contact_check_version(contact, nbytes, label));
    bool is_near = memcmp(loop->host, host, TB__CONTACT_PREFIX) == 0;
    const tb_transport *transport = choose_transport(loop, transport_rank == loop->transport_rank, is_near, reader,
                                                     &address, &address_nbytes, why, sizeof why);
    if (!transport)
        return fail_no_transport(loop, label, reader, why);
    /* Peers of one machine are mostly consecutive. */
    const char *shared =
        loop->peers && strncmp(loop->peers->host, host, TB__CONTACT_PREFIX) == 0 ? loop->peers->host : NULL;
    size_t host_nbytes = shared ? 0 : strnlen(host, TB__CONTACT_PREFIX) + 1, label_nbytes = strlen(label) + 1;
    tb__peer *peer = tb__arena_alloc(&loop->peer_memory, 1, sizeof *peer + address_nbytes + label_nbytes + host_nbytes);
    if (!peer || !tb__vec_reserve(&loop->all_peers, 1) ||
        !tb__index_add(&loop->peer_index, tb__hash(0, (uint32_t)transport_rank), loop->all_peers.count))
        return TB_NO_MEMORY;
    char *behind = (char *)(peer + 1); /* aligned, as addresses need it */
    *peer = (tb__peer){.loop = loop,
                       .rank = rank,
                       .incarnation = incarnation,
                       .transport_rank = transport_rank,
                       .contact = hash,
                       .transport = transport,
                       .label = memcpy(behind + address_nbytes, label, label_nbytes),
                       .host = shared,
                       .address = behind,
                       .address_nbytes = address_nbytes};
    if (address_nbytes > 0)
        memcpy(behind, address, address_nbytes);
    if (!shared) {
        char *copy = memcpy(behind + address_nbytes + label_nbytes, host, host_nbytes - 1);
        copy[host_nbytes - 1] = '\0';
        peer->host = copy;
    }
    loop->all_peers.item[loop->all_peers.count++] = peer;
    peer->next = loop->peers;
    loop->peers = peer;
    *out = peer;
    return connect_new_peer(peer, known != NULL);
}

void tb__peers_free(tb__loop *loop) {
    while (loop->peers) {
        tb__peer *peer = loop->peers;
        loop->peers = peer->next;
        peer_fini(peer);
    }
    tb__arena_fini(&loop->peer_memory);
    free(loop->all_peers.item);
    free(loop->strangers.item);
    free(loop->met.item);
    free(loop->ending.item);
    tb__index_fini(&loop->peer_index);
}
