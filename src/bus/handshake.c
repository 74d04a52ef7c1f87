/* Sends and receives manifests, confirmations, failures and goodbyes. */
#include "bus/world.h"

#include "base/log.h"

#include <stdio.h>
#include <string.h>

enum { MESSAGE_MANIFEST, MESSAGE_RECEIVED, MESSAGE_BROKEN, MESSAGE_GONE }; /* to the world's port */

/* ---- Life ------------------------------------------------------------------------------------------------------ */

static int compare_peers(const void *a, const void *b) {
    const tb__peer *const *x = a, *const *y = b;
    return ((*x)->rank > (*y)->rank) - ((*x)->rank < (*y)->rank);
}

tb_status tb__handshake_init(tb__handshake *handshake, tb_world *world, const char *key, const char *what,
                             tb__peer *const *peers, size_t npeers) {
    handshake->world = world;
    tb__loop_add_port(world->loop, &handshake->port);
    handshake->next = world->handshakes;
    world->handshakes = handshake;
    handshake->key = tb__strdup(key);
    handshake->peers = tb__malloc(npeers, sizeof *handshake->peers);
    handshake->ports = tb__calloc(npeers, sizeof *handshake->ports);
    handshake->is_confirmed = tb__calloc(npeers, sizeof *handshake->is_confirmed);
    handshake->must_resend = tb__calloc(npeers, sizeof *handshake->must_resend);
    handshake->is_gone = tb__calloc(npeers, sizeof *handshake->is_gone);
    if (!handshake->key || !handshake->peers || !handshake->ports || !handshake->is_confirmed ||
        !handshake->must_resend || !handshake->is_gone)
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
    handshake->npeers = handshake->nunconfirmed = kept;
    for (size_t i = 0; i < kept; i++) {
        const tb__peer *peer = handshake->peers[i];
        if (peer->is_lost)
            return tb__fail(TB_LOST, "%s was lost before %s: %s", peer->label, what, peer->why);
    }
    return TB_OK;
}

void tb__handshake_fini(tb__handshake *handshake) {
    tb_world *world = handshake->world;
    tb__loop_remove_port(world->loop, &handshake->port);
    for (tb__handshake **at = &world->handshakes; *at; at = &(*at)->next) {
        if (*at == handshake) {
            *at = handshake->next;
            break;
        }
    }
    free(handshake->key);
    free(handshake->peers);
    free(handshake->ports);
    free(handshake->is_confirmed);
    free(handshake->must_resend);
    free(handshake->is_gone);
}

size_t tb__handshake_find(const tb__handshake *handshake, const tb__peer *peer) {
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (handshake->peers[i] == peer)
            return i;
    }
    return TB__NOWHERE;
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

/* ---- Out ------------------------------------------------------------------------------------------------------- */

static tb_status send_handshake(tb__handshake *handshake, size_t to, uint32_t kind, const tb__pack *body) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, kind);
    tb__pack_string(&pack, handshake->key);
    tb__pack_u32(&pack, handshake->port.id);
    if (body->count)
        tb__pack_raw(&pack, body->data, body->count);
    pack.failed |= body->failed;
    return tb__loop_send(handshake->peers[to], TB__PORT_WORLD, &pack);
}

tb_status tb__handshake_send_manifest(tb__handshake *handshake, size_t to, tb__pack *manifest) {
    tb_status status = send_handshake(handshake, to, MESSAGE_MANIFEST, manifest);
    tb__pack_fini(manifest);
    return status;
}

static void send_broken(tb__handshake *handshake, size_t to) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, handshake->ports[to]);
    tb__pack_status(&pack, handshake->status);
    tb__pack_string(&pack, handshake->why);
    if (send_handshake(handshake, to, MESSAGE_BROKEN, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory to tell %s: %s", handshake->peers[to]->label, handshake->why);
    tb__pack_fini(&pack);
}

void tb__handshake_break(tb__handshake *handshake, tb_status status, bool tell) {
    if (handshake->status != TB_OK)
        return;
    handshake->status = status;
    snprintf(handshake->why, sizeof handshake->why, "%s", tb_error_detail());
    if (tell)
        tb__handshake_send_broken(handshake);
}

void tb__handshake_send_broken(tb__handshake *handshake) {
    for (size_t i = 0; i < handshake->npeers; i++) {
        if (handshake->ports[i] && handshake->peers[i]->rank != handshake->world->rank)
            send_broken(handshake, i);
    }
}

void tb__handshake_leave(tb__handshake *handshake, const tb__pack *goodbye) {
    for (size_t i = 0; i < handshake->npeers;
         i++) { /* this process included: its own manifest may still be on the way */
        if (send_handshake(handshake, i, MESSAGE_GONE, goodbye) != TB_OK)
            tb__log(TB_LOG_ERROR, "no memory to tell %s that this process leaves", handshake->peers[i]->label);
    }
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

void tb__early_manifest_fini(tb__early_manifest *early) {
    free(early->key);
    free(early->data);
}

static void drop_early_manifest(tb_world *world, size_t i) {
    tb__early_manifest_fini(&world->early.item[i]);
    world->early.item[i] = world->early.item[--world->early.count];
}

/* Replaces an earlier manifest of the same peer. */
static void keep_early_manifest(tb_world *world, tb__peer *from, const char *key, uint32_t port, const tb__unpack *u) {
    for (size_t i = world->early.count; i-- > 0;) {
        const tb__early_manifest *e = &world->early.item[i];
        if (e->from == from && strcmp(e->key, key) == 0)
            drop_early_manifest(world, i);
    }
    size_t nbytes = (size_t)(u->end - u->at);
    tb__early_manifest e = {.from = from, .key = tb__strdup(key), .port = port, .nbytes = nbytes};
    e.data = tb__memdup(u->at, nbytes, 1);
    if (!e.key || !e.data || !tb__vec_push(&world->early, e)) {
        tb__early_manifest_fini(&e);
        tb__log(TB_LOG_ERROR, "no memory for what %s says about '%s'", from->label, key);
    }
}

static void take_manifest(tb__handshake *handshake, size_t at, uint32_t port, tb__unpack *manifest) {
    handshake->ports[at] = port;
    if (handshake->status != TB_OK) { /* the peer makes the handshake again with another manifest */
        send_broken(handshake, at);
        return;
    }
    tb_status status = TB_OK;
    if (handshake->must_resend[at])
        status = handshake->send_manifest(handshake, at);
    handshake->must_resend[at] = false;
    handshake->on_manifest(handshake, at, manifest);
    if (handshake->status != TB_OK)
        return;
    tb__pack received = {0};
    tb__pack_u32(&received, port);
    if (status == TB_OK)
        status = send_handshake(handshake, at, MESSAGE_RECEIVED, &received);
    tb__pack_fini(&received);
    if (status != TB_OK && handshake->on_broken)
        handshake->on_broken(handshake, at, status, tb_error_detail());
}

/* The peer may have dropped our manifest, so it is sent again when the peer comes back. */
void tb__handshake_forget(tb__handshake *handshake, size_t peer) {
    handshake->nunconfirmed += handshake->is_confirmed[peer];
    handshake->is_confirmed[peer] = false;
    handshake->ports[peer] = 0;
    handshake->must_resend[peer] = true;
    handshake->is_gone[peer] = false;
}

tb_status tb__handshake_announce(tb__handshake *handshake) {
    tb_world *world = handshake->world;
    for (size_t i = 0; i < handshake->npeers; i++)
        TB_TRY(handshake->send_manifest(handshake, i));
    for (size_t i = world->early.count; i-- > 0;) {
        tb__early_manifest e = world->early.item[i];
        size_t at = tb__handshake_find(handshake, e.from);
        if (at == TB__NOWHERE || handshake->ports[at] != 0 || strcmp(e.key, handshake->key) != 0)
            continue;
        world->early.item[i] = world->early.item[--world->early.count];
        tb__unpack u = {e.data, e.data + e.nbytes, false};
        take_manifest(handshake, at, e.port, &u);
        tb__early_manifest_fini(&e);
    }
    return TB_OK;
}

static void on_confirmation(tb__handshake *handshake, size_t at, tb__unpack *message) {
    if (tb__unpack_u32(message) != handshake->port.id || handshake->is_confirmed[at] || handshake->status != TB_OK)
        return;
    handshake->is_confirmed[at] = true;
    handshake->nunconfirmed--;
    handshake->on_confirmed(handshake, at);
}

static void on_broken_message(tb__handshake *handshake, size_t at, tb__unpack *message) {
    bool is_ours = tb__unpack_u32(message) == handshake->port.id;
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    if (is_ours && !message->failed && status != TB_OK && handshake->on_broken)
        handshake->on_broken(handshake, at, status, why);
}

static void on_gone_message(tb_world *world, tb__handshake *handshake, tb__peer *from, size_t at, uint32_t port,
                            tb__unpack *message) {
    for (size_t i = world->early.count; i-- > 0;) {
        if (world->early.item[i].from == from && world->early.item[i].port == port)
            drop_early_manifest(world, i);
    }
    if (at != TB__NOWHERE && handshake->ports[at] == port) {
        handshake->is_gone[at] = true;
        handshake->on_gone(handshake, at, message);
    }
}

void tb__handshake_on_message(tb__port *world_port, tb__peer *from, tb__unpack *message) {
    tb_world *world = (tb_world *)((char *)world_port - offsetof(tb_world, port));
    uint32_t kind = tb__unpack_u32(message);
    const char *key = tb__unpack_string(message);
    uint32_t port = tb__unpack_u32(message);
    if (message->failed || kind > MESSAGE_GONE || port == 0) {
        tb__log(TB_LOG_WARN, "%s sent an invalid handshake message: %s, kind %u, port %u", from->label,
                message->failed ? "truncated" : "complete", (unsigned)kind, (unsigned)port);
        return;
    }
    tb__handshake *handshake = find_handshake(world, key);
    size_t at = handshake ? tb__handshake_find(handshake, from) : TB__NOWHERE;
    bool is_known = at != TB__NOWHERE && handshake->ports[at] == port;
    if (kind == MESSAGE_GONE)
        on_gone_message(world, handshake, from, at, port, message);
    else if (kind == MESSAGE_RECEIVED && is_known)
        on_confirmation(handshake, at, message);
    else if (kind == MESSAGE_BROKEN && is_known)
        on_broken_message(handshake, at, message);
    else if (kind == MESSAGE_MANIFEST && at != TB__NOWHERE && handshake->ports[at] == 0)
        take_manifest(handshake, at, port, message);
    else if (kind == MESSAGE_MANIFEST && !is_known) /* else the peer has repeated a manifest that we already have */
        keep_early_manifest(world, from, key, port, message);
}

void tb__handshake_on_lost(tb_world *world, const tb__peer *peer) {
    for (size_t i = world->early.count; i-- > 0;) {
        if (world->early.item[i].from == peer)
            drop_early_manifest(world, i);
    }
}
