/* Sends and receives manifests, failures and goodbyes. */
#include "bus/world.h"

#include "base/int.h"
#include "base/log.h"

#include <stdio.h>
#include <string.h>

/* To the world's port. After the kind come the key and the sender's port. */
enum {
    MESSAGE_MANIFESTS, /* the receiver's port, if it gets all of them, else 0; then each with its rank and port */
    MESSAGE_BROKEN,    /* the receiver's port, if it is known, else 0; status, reason */
    MESSAGE_GONE,      /* the rank that has left, its port, the ranks that it has informed itself, its goodbye */
    MESSAGE_ASK,
    MESSAGE_ANSWER, /* a rank whose manifest is missing, and how many have come */
};

/* A member that waits asks its lead after ASK_MS, then after twice as long, and so on, and before its deadline; after
 * that it waits up to ANSWER_MS for the answer. */
enum { ASK_MS = 2000, ANSWER_MS = 250 };

static int compare_peers(const void *a, const void *b) {
    const tb__peer *const *x = a, *const *y = b;
    return ((*x)->rank > (*y)->rank) - ((*x)->rank < (*y)->rank);
}

size_t tb__handshake_find(const tb__handshake *handshake, const tb__peer *peer) {
    size_t i = 0;
    TB_BISECT(i, handshake->npeers, handshake->peers[i]->rank >= peer->rank);
    return i < handshake->npeers && handshake->peers[i] == peer ? i : TB__NOWHERE;
}

bool tb__handshake_is_lead(const tb__handshake *handshake) {
    return handshake->ranks[handshake->self].lead == handshake->self;
}

static size_t other_lead(const tb__handshake *handshake) {
    return handshake->leads[handshake->leads[0] == handshake->self];
}

/* A lead leads itself; a rank that is on both sides and leads none belongs to the first. */
static void choose_leads(tb__handshake *handshake, tb__peer *const *peers, const int *sides, size_t npeers) {
    size_t first[2] = {0, 0}; /* where there is one side only, they are the same */
    for (size_t i = npeers; i-- > 0;)
        first[sides[i]] = i;
    for (int side = 0; side < 2 && npeers > 0; side++)
        handshake->leads[side] = tb__handshake_find(handshake, peers[first[side]]);
    for (size_t i = npeers; i-- > 0;)
        handshake->ranks[tb__handshake_find(handshake, peers[i])].lead = handshake->leads[sides[i]];
    for (int side = 0; side < 2 && npeers > 0; side++)
        handshake->ranks[handshake->leads[side]].lead = handshake->leads[side];
}

tb_status tb__handshake_init(tb__handshake *handshake, tb_world *world, const char *key, const char *what,
                             tb__peer *const *peers, const int *sides, size_t npeers) {
    handshake->world = world;
    tb__loop_add_port(world->loop, &handshake->port);
    handshake->next = world->handshakes;
    world->handshakes = handshake;
    handshake->key = tb__strdup(key);
    handshake->peers = tb__malloc(npeers, sizeof *handshake->peers);
    handshake->ports = tb__calloc(npeers, sizeof *handshake->ports);
    handshake->ranks = tb__calloc(npeers, sizeof *handshake->ranks);
    if (!handshake->key || !handshake->peers || !handshake->ports || !handshake->ranks)
        return TB_NO_MEMORY;
    size_t kept = 0;
    if (npeers) {
        memcpy(handshake->peers, peers, npeers * sizeof *peers);
        qsort(handshake->peers, npeers, sizeof *handshake->peers, compare_peers);
    }
    for (size_t i = 0; i < npeers; i++) {
        if (!kept || handshake->peers[kept - 1] != handshake->peers[i])
            handshake->peers[kept++] = handshake->peers[i];
    }
    handshake->npeers = handshake->nunconfirmed = handshake->missing = kept;
    choose_leads(handshake, peers, sides, npeers);
    for (size_t i = 0; i < kept; i++) {
        const tb__peer *peer = handshake->peers[i];
        if (peer->rank == world->rank)
            handshake->self = i;
        if (peer->is_lost)
            return tb__fail(TB_LOST, "%s was lost before %s: %s", peer->label, what, peer->why);
    }
    return TB_OK;
}

void tb__handshake_fini(tb__handshake *handshake) {
    tb_world *world = handshake->world;
    tb__comm_destroy(handshake->comm);
    tb__loop_remove_port(world->loop, &handshake->port);
    for (tb__handshake **at = &world->handshakes; *at; at = &(*at)->next) {
        if (*at == handshake) {
            *at = handshake->next;
            break;
        }
    }
    for (size_t i = 0; i < handshake->npeers; i++) {
        tb__pack_fini(&handshake->ranks[i].manifest);
        tb__pack_fini(&handshake->ranks[i].goodbye);
    }
    free(handshake->key);
    free(handshake->peers);
    free(handshake->ports);
    free(handshake->ranks);
}

static tb__handshake *find_handshake(const tb_world *world, const char *key) {
    for (tb__handshake *at = world->handshakes; at; at = at->next) {
        if (at->key && strcmp(at->key, key) == 0)
            return at;
    }
    return NULL;
}

bool tb__handshake_exists(const tb_world *world, const char *key) {
    return find_handshake(world, key) != NULL;
}

static void begin_message(tb__pack *pack, uint32_t kind, const char *key, uint32_t port) {
    tb__pack_u32(pack, kind);
    tb__pack_string(pack, key);
    tb__pack_u32(pack, port);
}

static void send_message(tb__handshake *handshake, size_t to, tb__pack *pack) {
    if (tb__loop_send(handshake->peers[to], TB__PORT_WORLD, pack) == TB_OK)
        return;
    tb_status status = tb__fail_within(TB_NO_MEMORY, "a message to %s", handshake->peers[to]->label);
    if (handshake->on_broken && handshake->status == TB_OK)
        handshake->on_broken(handshake, to, status, tb_error_detail());
    else
        tb__log(TB_LOG_ERROR, "%s", tb_error_detail());
}

static void pack_row(const tb__handshake *handshake, tb__pack *pack, size_t at, const tb__pack *manifest) {
    tb__pack_u32(pack, (uint32_t)handshake->peers[at]->rank);
    tb__pack_u64(pack, handshake->peers[at]->incarnation);
    tb__pack_u32(pack, handshake->ports[at]);
    tb__pack_bytes(pack, manifest->data, manifest->count);
    pack->failed |= manifest->failed;
}

static void send_manifest(tb__handshake *handshake, size_t to, size_t at, const tb__pack *manifest) {
    tb__pack pack = {0};
    begin_message(&pack, MESSAGE_MANIFESTS, handshake->key, handshake->port.id);
    tb__pack_u32(&pack, 0);
    tb__pack_u32(&pack, 1);
    pack_row(handshake, &pack, at, manifest);
    send_message(handshake, to, &pack);
}

static bool are_peers_near(const tb__handshake *handshake) {
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (strcmp(handshake->peers[i]->host, handshake->peers[handshake->self]->host) != 0)
            return false;
    }
    return true;
}

/* Every manifest begins with the sender's transports for memory of devices; the first rank's also with an id. */
static void pack_comm(const tb__handshake *handshake, tb__pack *pack) {
    const tb__loop *loop = handshake->world->loop;
    unsigned char id[TB_COMM_ID_SIZE];
    uint32_t carriers = handshake->device ? tb__comm_carriers(loop, handshake->device, are_peers_near(handshake)) : 0;
    tb__comm_pack_carriers(loop, carriers, pack);
    if (handshake->self != 0 || !carriers)
        return;
    tb__comm_make_id(loop, carriers, id);
    tb__pack_raw(pack, id, sizeof id);
}

static void unpack_comm(tb__handshake *handshake, size_t at, tb__unpack *manifest) {
    tb__unpack names = *manifest;
    uint32_t count = tb__unpack_u32(&names);
    handshake->ranks[at].carriers = tb__comm_unpack_carriers(handshake->world->loop, manifest);
    const void *id = at == 0 && count > 0 ? tb__unpack_raw(manifest, TB_COMM_ID_SIZE) : NULL;
    if (id)
        memcpy(handshake->comm_id, id, TB_COMM_ID_SIZE);
}

static void on_comm_changed(tb__comm *comm) {
    tb__handshake *handshake = comm->arg;
    handshake->on_comm(handshake);
}

tb_status tb__handshake_make_comm(tb__handshake *handshake, size_t nbytes) {
    tb__comm_opts opts = {.carriers = handshake->ranks[0].carriers,
                          .id = handshake->comm_id,
                          .peers = handshake->peers,
                          .npeers = handshake->npeers,
                          .self = handshake->self,
                          .device = handshake->device,
                          .unit = handshake->unit,
                          .nbytes = nbytes,
                          .changed = on_comm_changed,
                          .arg = handshake};
    for (size_t i = 1; i < handshake->npeers; i++)
        opts.carriers &= handshake->ranks[i].carriers;
    return tb__comm_create(handshake->world->loop, &opts, &handshake->comm);
}

bool tb__handshake_awaits_comm(const tb__handshake *handshake) {
    return handshake->comm && !handshake->comm->is_ready;
}

static void send_own_manifest(tb__handshake *handshake) {
    tb__pack manifest = {0};
    uint32_t known = handshake->ports[handshake->self];
    pack_comm(handshake, &manifest);
    handshake->pack_manifest(handshake, &manifest);
    handshake->ports[handshake->self] = handshake->port.id;
    send_manifest(handshake, handshake->ranks[handshake->self].lead, handshake->self, &manifest);
    handshake->ports[handshake->self] = known;
    tb__pack_fini(&manifest);
}

/* To a lead that has dropped this rank's messages, or had them for an earlier handshake. */
static void send_again(tb__handshake *handshake, size_t lead) {
    if (lead == handshake->self || handshake->status != TB_OK)
        return;
    if (lead == handshake->ranks[handshake->self].lead)
        send_own_manifest(handshake);
    if (!tb__handshake_is_lead(handshake) || lead != other_lead(handshake))
        return;
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (handshake->ranks[i].lead == handshake->self && handshake->ranks[i].is_confirmed)
            send_manifest(handshake, lead, i, &handshake->ranks[i].manifest);
    }
}

static void send_gone(tb__handshake *handshake, size_t to, size_t gone, uint32_t port, const tb__pack *goodbye) {
    tb__pack pack = {0};
    begin_message(&pack, MESSAGE_GONE, handshake->key, handshake->port.id);
    tb__pack_u32(&pack, (uint32_t)handshake->peers[gone]->rank);
    tb__pack_u64(&pack, handshake->peers[gone]->incarnation);
    tb__pack_u32(&pack, port);
    tb__pack_raw(&pack, goodbye->data, goodbye->count);
    pack.failed |= goodbye->failed;
    if (tb__loop_send(handshake->peers[to], TB__PORT_WORLD, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory to tell %s that %s leaves", handshake->peers[to]->label,
                handshake->peers[gone]->label);
}

/* Whether the rank that left has informed this one itself. `goodbye` begins with the list of those. */
static bool was_told(const tb__pack *goodbye, int32_t rank) {
    tb__unpack u = {goodbye->data, goodbye->data + goodbye->count, false};
    size_t count = tb__unpack_count(&u, 4);
    bool is_told = false;
    for (size_t i = 0; i < count; i++)
        is_told |= (int32_t)tb__unpack_u32(&u) == rank;
    return is_told;
}

static bool is_my_member(const tb__handshake *handshake, size_t at) {
    return at != handshake->self && handshake->ranks[at].lead == handshake->self;
}

/* Whether this rank forwards news to the peer: leads forward to each other and to their members. */
static bool must_tell(const tb__handshake *handshake, size_t at) {
    return tb__handshake_is_lead(handshake) && at != handshake->self &&
           (is_my_member(handshake, at) || at == other_lead(handshake));
}

void tb__handshake_tell_members(tb__handshake *handshake) {
    if (handshake->has_told || !tb__handshake_is_lead(handshake) || handshake->nunconfirmed > 0)
        return;
    handshake->has_told = true;
    tb__pack rows = {0};
    for (size_t i = 0; i < handshake->npeers; i++)
        pack_row(handshake, &rows, i, &handshake->ranks[i].manifest);
    for (size_t to = 0; to < handshake->npeers; to++) {
        if (!is_my_member(handshake, to))
            continue;
        tb__pack pack = {0};
        begin_message(&pack, MESSAGE_MANIFESTS, handshake->key, handshake->port.id);
        tb__pack_u32(&pack, handshake->ports[to]);
        tb__pack_u32(&pack, (uint32_t)handshake->npeers);
        tb__pack_raw(&pack, rows.data, rows.count);
        pack.failed |= rows.failed;
        send_message(handshake, to, &pack);
        for (size_t i = 0; i < handshake->npeers; i++) {
            if (handshake->ranks[i].is_gone && !was_told(&handshake->ranks[i].goodbye, handshake->peers[to]->rank))
                send_gone(handshake, to, i, handshake->ports[i], &handshake->ranks[i].goodbye);
        }
    }
    tb__pack_fini(&rows);
}

static void send_broken(tb__handshake *handshake, size_t to) {
    tb__pack pack = {0};
    begin_message(&pack, MESSAGE_BROKEN, handshake->key, handshake->port.id);
    tb__pack_u32(&pack, handshake->ports[to]);
    tb__pack_status(&pack, handshake->status);
    tb__pack_string(&pack, handshake->why);
    if (tb__loop_send(handshake->peers[to], TB__PORT_WORLD, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory to tell %s: %s", handshake->peers[to]->label, handshake->why);
}

void tb__handshake_break(tb__handshake *handshake, tb_status status, bool tell) {
    if (handshake->status != TB_OK)
        return;
    handshake->status = status;
    snprintf(handshake->why, sizeof handshake->why, "%s", tb_error_detail());
    if (tell)
        tb__handshake_send_broken(handshake);
}

/* Whether the peer gets news directly from this rank: its lead, the ranks that a lead informs, and all connected
 * peers. */
static bool is_near(const tb__handshake *handshake, size_t at) {
    return at != handshake->self && (at == handshake->ranks[handshake->self].lead || must_tell(handshake, at) ||
                                     (handshake->peers[at]->is_open && handshake->ports[at]));
}

void tb__handshake_send_broken(tb__handshake *handshake) {
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (is_near(handshake, i))
            send_broken(handshake, i);
    }
}

void tb__handshake_leave(tb__handshake *handshake, const tb__pack *goodbye) {
    tb__pack message = {0};
    uint32_t ntold = 0;
    for (size_t i = 0; i < handshake->npeers; i++)
        ntold += is_near(handshake, i);
    tb__pack_u32(&message, ntold);
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (is_near(handshake, i))
            tb__pack_u32(&message, (uint32_t)handshake->peers[i]->rank);
    }
    tb__pack_raw(&message, goodbye->data, goodbye->count);
    message.failed |= goodbye->failed;
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (is_near(handshake, i))
            send_gone(handshake, i, handshake->self, handshake->port.id, &message);
    }
    tb__pack_fini(&message);
}

void tb__early_manifest_fini(tb__early_manifest *early) {
    free(early->key);
    free(early->data);
}

static void drop_early_manifest(tb_world *world, size_t i) {
    tb__early_manifest_fini(&world->early.item[i]);
    world->early.item[i] = world->early.item[--world->early.count];
}

/* Replaces an earlier manifest of the same rank. */
static void keep_early_manifest(tb_world *world, const tb__early_manifest *row) {
    for (size_t i = world->early.count; i-- > 0;) {
        const tb__early_manifest *e = &world->early.item[i];
        if (e->rank == row->rank && e->incarnation == row->incarnation && strcmp(e->key, row->key) == 0)
            drop_early_manifest(world, i);
    }
    tb__early_manifest e = *row;
    e.key = tb__strdup(row->key);
    e.data = tb__memdup(row->data, row->nbytes, 1);
    if (!e.key || !e.data || !tb__vec_push(&world->early, e)) {
        tb__early_manifest_fini(&e);
        tb__log(TB_LOG_ERROR, "no memory for the manifest of rank %d for '%s'", (int)row->rank, row->key);
    }
}

/* The goodbye in `goodbyes`. */
static void take_goodbye(tb__handshake *handshake, size_t at) {
    const tb__pack *kept = &handshake->ranks[at].goodbye;
    tb__unpack goodbye = {kept->data, kept->data + kept->count, false};
    size_t ntold = tb__unpack_count(&goodbye, 4);
    tb__unpack_raw(&goodbye, ntold * 4);
    handshake->ranks[at].gone_port = 0;
    handshake->ranks[at].is_gone = true;
    handshake->on_gone(handshake, at, &goodbye);
}

static void take_manifest(tb__handshake *handshake, size_t at, const tb__early_manifest *row) {
    handshake->ports[at] = row->port;
    if (handshake->status != TB_OK) { /* the peer makes the handshake again with another manifest */
        if (is_near(handshake, at))
            send_broken(handshake, at);
        return;
    }
    tb__unpack manifest = {row->data, row->data + row->nbytes, false};
    unpack_comm(handshake, at, &manifest);
    handshake->on_manifest(handshake, at, &manifest);
    if (handshake->status != TB_OK)
        return;
    handshake->ranks[at].is_confirmed = true;
    handshake->nunconfirmed--;
    if (tb__handshake_is_lead(handshake)) {
        tb__pack *copy = &handshake->ranks[at].manifest;
        tb__pack_fini(copy);
        *copy = (tb__pack){0};
        tb__pack_raw(copy, row->data, row->nbytes);
        if (handshake->ranks[at].lead == handshake->self && other_lead(handshake) != handshake->self)
            send_manifest(handshake, other_lead(handshake), at, copy);
    }
    handshake->on_confirmed(handshake, at);
    if (handshake->ranks[at].gone_port == row->port && handshake->status == TB_OK)
        take_goodbye(handshake, at);
}

void tb__handshake_forget(tb__handshake *handshake, size_t peer) {
    handshake->nunconfirmed += handshake->ranks[peer].is_confirmed;
    handshake->ranks[peer].is_confirmed = false;
    handshake->ports[peer] = 0;
    handshake->ranks[peer].is_gone = false;
    handshake->has_told = false;
    send_again(handshake, peer);
}

tb_status tb__handshake_announce(tb__handshake *handshake) {
    tb_world *world = handshake->world;
    send_own_manifest(handshake);
    TB_TRY(handshake->status == TB_OK ? TB_OK : tb__fail(handshake->status, "%s", handshake->why));
    for (size_t i = world->early.count; i-- > 0;) {
        tb__early_manifest e = world->early.item[i];
        const tb__peer *peer = tb__loop_find_peer(world->loop, e.rank, e.incarnation);
        size_t at = peer ? tb__handshake_find(handshake, peer) : TB__NOWHERE;
        if (at == TB__NOWHERE || handshake->ports[at] != 0 || strcmp(e.key, handshake->key) != 0)
            continue;
        world->early.item[i] = world->early.item[--world->early.count];
        take_manifest(handshake, at, &e);
        tb__early_manifest_fini(&e);
    }
    return TB_OK;
}

static tb__early_manifest read_row(tb__unpack *message, const tb__peer *from, const char *key) {
    tb__early_manifest row = {.from = from, .key = (char *)key};
    row.rank = (int32_t)tb__unpack_u32(message);
    row.incarnation = tb__unpack_u64(message);
    row.port = tb__unpack_u32(message);
    row.data = (unsigned char *)tb__unpack_bytes(message, &row.nbytes);
    message->failed |= row.port == 0 || row.rank < 0;
    return row;
}

/* Whether manifests and goodbyes of the rank may come from this peer: from itself, or from a lead. */
static bool may_speak_for(const tb__handshake *handshake, size_t from, size_t at) {
    return from == at || from == handshake->ranks[handshake->self].lead ||
           (tb__handshake_is_lead(handshake) && from == other_lead(handshake));
}

/* A rank of the handshake whose number another process has by now is gone. */
static void lose_replaced(const tb__handshake *handshake, const tb__early_manifest *row) {
    size_t i = 0;
    TB_BISECT(i, handshake->npeers, handshake->peers[i]->rank >= row->rank);
    if (i < handshake->npeers && handshake->peers[i]->rank == row->rank &&
        handshake->peers[i]->incarnation < row->incarnation)
        tb__peer_report_lost(handshake->peers[i], "another process has taken its place");
}

/* After a failure, a peer that has said goodbye to this handshake sends its next manifest for another one. */
static bool is_for_next(const tb__handshake *handshake, size_t at, uint32_t port) {
    uint32_t gone_port = handshake->ranks[at].gone_port;
    return handshake->status != TB_OK && gone_port != 0 && gone_port != port;
}

static void on_manifests(tb_world *world, const char *key, tb__peer *from, tb__unpack *message) {
    tb__handshake *handshake = find_handshake(world, key);
    uint32_t port = tb__unpack_u32(message);
    size_t count = tb__unpack_count(message, 16);
    size_t sender = handshake ? tb__handshake_find(handshake, from) : TB__NOWHERE;
    if (port != 0 && (!handshake || handshake->port.id != port))
        return; /* they are for an earlier handshake of this name */
    for (size_t i = 0; i < count; i++) {
        tb__early_manifest row = read_row(message, from, key);
        if (message->failed) {
            tb__log(TB_LOG_WARN, "%s sent truncated manifests about '%s'", from->label, key);
            return;
        }
        if (row.rank == world->rank && (!handshake || row.port != handshake->port.id))
            continue; /* our own, of an earlier handshake: it was delivered after we left, and must not be forwarded */
        const tb__peer *peer = tb__loop_find_peer(world->loop, row.rank, row.incarnation);
        size_t at = handshake && peer ? tb__handshake_find(handshake, peer) : TB__NOWHERE;
        if (at == TB__NOWHERE && sender != TB__NOWHERE)
            lose_replaced(handshake, &row);
        if (at != TB__NOWHERE && (sender == TB__NOWHERE || !may_speak_for(handshake, sender, at)))
            continue;
        if (at != TB__NOWHERE && handshake->ports[at] == 0 && !is_for_next(handshake, at, row.port)) {
            take_manifest(handshake, at, &row);
        } else if (port == 0 && (at == TB__NOWHERE || handshake->ports[at] != row.port)) {
            keep_early_manifest(world, &row);
            if (row.rank == from->rank)
                tb__losses_tell(world, from);
        }
    }
}

static void on_broken_message(tb__handshake *handshake, size_t at, uint32_t sender_port, tb__unpack *message) {
    uint32_t port = tb__unpack_u32(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool is_ours = port == handshake->port.id || (port == 0 && handshake->ports[at] == sender_port);
    if (is_ours && !message->failed && status != TB_OK && handshake->on_broken)
        handshake->on_broken(handshake, at, status, why);
}

/* When a lead is gone, so are its members, as far as others know them only through it: they send it their manifests
 * again. */
static void forget_members(tb__handshake *handshake, size_t lead) {
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (i != lead && i != handshake->self && handshake->ranks[i].lead == lead && handshake->ranks[i].is_confirmed &&
            !handshake->ranks[i].is_gone)
            tb__handshake_forget(handshake, i);
    }
}

/* Goodbyes of all owners begin with this flag, after the ranks that were informed. */
static bool had_agreed(const tb__unpack *goodbye) {
    tb__unpack u = *goodbye;
    size_t ntold = tb__unpack_count(&u, 4);
    tb__unpack_raw(&u, ntold * 4);
    return tb__unpack_u32(&u) != 0;
}

static void on_gone(tb__handshake *handshake, size_t at, uint32_t port, const tb__unpack *goodbye) {
    bool is_lead = tb__handshake_is_lead(handshake), is_known = handshake->ports[at] == port;
    /* One that had agreed has not had what this rank sent for the present handshake: it would be sent twice, and might
     * be taken for the next one. */
    if (!is_known && handshake->nunconfirmed > 0 && !had_agreed(goodbye))
        send_again(handshake, at);
    if ((is_known && handshake->ranks[at].is_gone) || (!is_known && handshake->nunconfirmed == 0))
        return;
    tb__pack *kept = &handshake->ranks[at].goodbye;
    tb__pack_fini(kept);
    *kept = (tb__pack){0};
    tb__pack_raw(kept, goodbye->at, (size_t)(goodbye->end - goodbye->at));
    handshake->ranks[at].gone_port = port;
    if (kept->failed || !is_known) {
        handshake->ranks[at].gone_port = kept->failed ? 0 : port; /* its manifest may still come, by way of a lead */
        return;
    }
    take_goodbye(handshake, at);
    if (!handshake->ranks[at].is_gone && at != handshake->self && handshake->ranks[at].lead == at && is_lead)
        forget_members(handshake, at);
    for (size_t i = 0; is_lead && i < handshake->npeers; i++) {
        /* what came from the other lead goes to members only */
        bool is_next = handshake->ranks[at].lead == handshake->self || i != other_lead(handshake);
        if (i != at && is_next && must_tell(handshake, i) && !was_told(kept, handshake->peers[i]->rank))
            send_gone(handshake, i, at, port, kept);
    }
}

static void on_gone_message(tb_world *world, const char *key, tb__peer *from, tb__unpack *message) {
    int32_t rank = (int32_t)tb__unpack_u32(message);
    uint64_t incarnation = tb__unpack_u64(message);
    uint32_t port = tb__unpack_u32(message);
    tb__handshake *handshake = find_handshake(world, key);
    const tb__peer *peer = tb__loop_find_peer(world->loop, rank, incarnation);
    size_t sender = handshake ? tb__handshake_find(handshake, from) : TB__NOWHERE;
    size_t at = handshake && peer ? tb__handshake_find(handshake, peer) : TB__NOWHERE;
    if (message->failed)
        return;
    for (size_t i = world->early.count; i-- > 0;) {
        const tb__early_manifest *e = &world->early.item[i];
        bool is_its_own = e->rank == rank && e->incarnation == incarnation && e->port == port;
        /* manifests that a leaving lead has forwarded belonged to the handshake that it has left */
        bool is_passed_on = e->from == from && from == peer && strcmp(e->key, key) == 0;
        if (is_its_own || is_passed_on)
            drop_early_manifest(world, i);
    }
    if (sender != TB__NOWHERE && at != TB__NOWHERE && may_speak_for(handshake, sender, at))
        on_gone(handshake, at, port, message);
}

/* A lead that has not made the handshake answers that it is missing itself. */
static void answer(tb_world *world, const char *key, tb__peer *from, uint32_t port) {
    const tb__handshake *handshake = find_handshake(world, key);
    size_t at = handshake ? tb__handshake_find(handshake, from) : TB__NOWHERE, nhave = 1, missing = TB__NOWHERE;
    bool is_known = at != TB__NOWHERE && handshake->ports[at] == port;
    if (is_known)
        missing = tb__handshake_find_missing(handshake, &nhave);
    tb__pack pack = {0};
    begin_message(&pack, MESSAGE_ANSWER, key, port);
    tb__pack_u32(&pack, (uint32_t)(missing != TB__NOWHERE ? handshake->peers[missing]->rank : world->rank));
    tb__pack_u32(&pack, (uint32_t)nhave);
    tb__pack_u32(&pack, is_known && missing == TB__NOWHERE);
    if (tb__loop_send(from, TB__PORT_WORLD, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory for an answer to %s", from->label);
}

static void on_answer(tb__handshake *handshake, uint32_t port, tb__unpack *message) {
    int32_t rank = (int32_t)tb__unpack_u32(message);
    size_t nhave = tb__unpack_u32(message), i = 0;
    bool has_all = tb__unpack_u32(message) != 0;
    if (message->failed || port != handshake->port.id || has_all)
        return;
    TB_BISECT(i, handshake->npeers, handshake->peers[i]->rank >= rank);
    handshake->missing = i;
    handshake->nhave = nhave;
    tb__loop_signal(handshake->world->loop);
}

void tb__handshake_on_message(tb__port *world_port, tb__peer *from, tb__unpack *message) {
    tb_world *world = (tb_world *)((char *)world_port - offsetof(tb_world, port));
    uint32_t kind = tb__unpack_u32(message);
    const char *key = tb__unpack_string(message);
    uint32_t port = tb__unpack_u32(message);
    if (kind == TB__WORLD_LOST && !message->failed) {
        tb__losses_on_message(world, from, message);
        return;
    }
    if (message->failed || kind > MESSAGE_ANSWER || port == 0) {
        tb__log(TB_LOG_WARN, "%s sent an invalid handshake message: %s, kind %u, port %u", from->label,
                message->failed ? "truncated" : "complete", (unsigned)kind, (unsigned)port);
        return;
    }
    tb__handshake *handshake = find_handshake(world, key);
    size_t at = handshake ? tb__handshake_find(handshake, from) : TB__NOWHERE;
    if (kind == MESSAGE_MANIFESTS)
        on_manifests(world, key, from, message);
    else if (kind == MESSAGE_GONE)
        on_gone_message(world, key, from, message);
    else if (kind == MESSAGE_ASK)
        answer(world, key, from, port);
    else if (kind == MESSAGE_BROKEN && at != TB__NOWHERE)
        on_broken_message(handshake, at, port, message);
    else if (kind == MESSAGE_ANSWER && at != TB__NOWHERE)
        on_answer(handshake, port, message);
}

void tb__handshake_on_lost(tb_world *world, const tb__peer *peer) {
    for (size_t i = world->early.count; i-- > 0;) {
        const tb__early_manifest *e = &world->early.item[i];
        if (e->from == peer || (e->rank == peer->rank && e->incarnation == peer->incarnation))
            drop_early_manifest(world, i);
    }
}

static bool must_ask(const tb__handshake *handshake) {
    return handshake->nunconfirmed > 0 && handshake->status == TB_OK && !tb__handshake_is_lead(handshake);
}

static void ask_leads(tb_world *world) {
    for (tb__handshake *at = world->handshakes; at; at = at->next) {
        tb__pack pack = {0};
        if (!must_ask(at))
            continue;
        at->missing = at->npeers; /* a rank that was missing before may have come */
        begin_message(&pack, MESSAGE_ASK, at->key, at->port.id);
        if (tb__loop_send(at->peers[at->ranks[at->self].lead], TB__PORT_WORLD, &pack) != TB_OK)
            tb__log(TB_LOG_ERROR, "no memory to ask for missing ranks");
    }
}

typedef struct waiting {
    const tb_world *world;
    bool (*is_true)(void *arg);
    void *arg;
} waiting;

static bool is_true_or_answered(void *arg) {
    const waiting *w = arg;
    bool is_answered = true;
    for (const tb__handshake *at = w->world->handshakes; at; at = at->next)
        is_answered &= !must_ask(at) || at->missing < at->npeers;
    return is_answered || w->is_true(w->arg);
}

bool tb__handshakes_wait(tb_world *world, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    waiting w = {world, is_true, arg};
    int64_t delay_ms = ASK_MS, now_ms;
    while ((now_ms = tb__now_ms()) < deadline_ms) {
        int64_t left_ms = deadline_ms - now_ms;
        if (tb__loop_wait(world->loop, is_true, arg, now_ms + tb__min64(delay_ms, left_ms - left_ms / 4)))
            return true;
        ask_leads(world);
        delay_ms *= 2;
    }
    tb__loop_wait(world->loop, is_true_or_answered, &w, deadline_ms + ANSWER_MS);
    return is_true(arg);
}

const char *tb__handshake_next_early(const tb__handshake *handshake, size_t peer, size_t *next) {
    const tb__peer *p = handshake->peers[peer];
    const tb_world *world = handshake->world;
    while (*next < world->early.count) {
        const tb__early_manifest *e = &world->early.item[(*next)++];
        if (e->rank == p->rank && e->incarnation == p->incarnation)
            return e->key;
    }
    return NULL;
}

size_t tb__handshake_find_missing(const tb__handshake *handshake, size_t *nhave) {
    *nhave = handshake->npeers - handshake->nunconfirmed;
    if (handshake->nunconfirmed == 0)
        return TB__NOWHERE;
    if (!tb__handshake_is_lead(handshake)) {
        bool is_known = handshake->missing < handshake->npeers;
        *nhave = is_known ? handshake->nhave : 1;
        return is_known ? handshake->missing : handshake->ranks[handshake->self].lead;
    }
    size_t lead = other_lead(handshake), i = 0;
    if (!handshake->ranks[lead].is_confirmed)
        return lead;
    while (handshake->ranks[i].is_confirmed)
        i++;
    return i;
}
