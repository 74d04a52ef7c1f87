/* Manifests and goodbyes, out and in. */
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

tb_status tb__assembly_init(tb__assembly *assembly, tb_world *world, const char *key, const char *what,
                            tb__peer *const *peers, size_t npeers) {
    assembly->world = world;
    tb__loop_add_port(world->loop, &assembly->port);
    assembly->next = world->assemblies;
    world->assemblies = assembly;
    assembly->key = tb__strdup(key);
    assembly->peers = tb__malloc(npeers, sizeof *assembly->peers);
    assembly->ports = tb__calloc(npeers, sizeof *assembly->ports);
    assembly->counts = tb__calloc(npeers, sizeof *assembly->counts);
    assembly->owes = tb__calloc(npeers, sizeof *assembly->owes);
    assembly->is_gone = tb__calloc(npeers, sizeof *assembly->is_gone);
    if (!assembly->key || !assembly->peers || !assembly->ports || !assembly->counts || !assembly->owes ||
        !assembly->is_gone)
        return TB_NO_MEMORY;
    size_t kept = 0;
    if (npeers) {
        memcpy(assembly->peers, peers, npeers * sizeof *peers);
        qsort(assembly->peers, npeers, sizeof *assembly->peers, compare_peers);
    }
    for (size_t i = 0; i < npeers; i++) {
        if (!kept || assembly->peers[kept - 1] != assembly->peers[i])
            assembly->peers[kept++] = assembly->peers[i];
    }
    assembly->npeers = assembly->nunknown = kept;
    for (size_t i = 0; i < kept; i++) {
        const tb__peer *peer = assembly->peers[i];
        if (peer->is_lost)
            return tb__fail(TB_LOST, "%s was lost before %s: %s", peer->label, what, peer->why);
    }
    return TB_OK;
}

void tb__assembly_fini(tb__assembly *assembly) {
    tb_world *world = assembly->world;
    tb__loop_remove_port(world->loop, &assembly->port);
    for (tb__assembly **at = &world->assemblies; *at; at = &(*at)->next) {
        if (*at == assembly) {
            *at = assembly->next;
            break;
        }
    }
    free(assembly->key);
    free(assembly->peers);
    free(assembly->ports);
    free(assembly->counts);
    free(assembly->owes);
    free(assembly->is_gone);
}

size_t tb__assembly_find(const tb__assembly *assembly, const tb__peer *peer) {
    for (size_t i = 0; i < assembly->npeers; i++) {
        if (assembly->peers[i] == peer)
            return i;
    }
    return TB__NOWHERE;
}

static tb__assembly *find(const tb_world *world, const char *key) {
    for (tb__assembly *at = world->assemblies; at; at = at->next) {
        if (at->key && strcmp(at->key, key) == 0)
            return at;
    }
    return NULL;
}

bool tb__assembly_exists(const tb_world *world, const char *key) {
    return find(world, key) != NULL;
}

/* ---- Out ------------------------------------------------------------------------------------------------------- */

static tb_status send(tb__assembly *assembly, size_t to, uint32_t kind, const tb__pack *body) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, kind);
    tb__pack_string(&pack, assembly->key);
    tb__pack_u32(&pack, assembly->port.id);
    if (body->count)
        tb__pack_raw(&pack, body->data, body->count);
    pack.failed |= body->failed;
    return tb__loop_send(assembly->peers[to], TB__PORT_WORLD, &pack);
}

tb_status tb__assembly_send(tb__assembly *assembly, size_t to, tb__pack *manifest) {
    tb_status status = send(assembly, to, MESSAGE_MANIFEST, manifest);
    tb__pack_fini(manifest);
    return status;
}

static void tell_broken(tb__assembly *assembly, size_t to) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, assembly->ports[to]);
    tb__pack_status(&pack, assembly->status);
    tb__pack_string(&pack, assembly->why);
    if (send(assembly, to, MESSAGE_BROKEN, &pack) != TB_OK)
        tb__log(TB_LOG_ERROR, "no memory to tell %s: %s", assembly->peers[to]->label, assembly->why);
    tb__pack_fini(&pack);
}

void tb__assembly_break(tb__assembly *assembly, tb_status status, bool tell) {
    if (assembly->status != TB_OK)
        return;
    assembly->status = status;
    snprintf(assembly->why, sizeof assembly->why, "%s", tb_error_detail());
    if (tell)
        tb__assembly_tell(assembly);
}

void tb__assembly_tell(tb__assembly *assembly) {
    for (size_t i = 0; i < assembly->npeers; i++) {
        if (assembly->ports[i] && assembly->peers[i]->rank != assembly->world->rank)
            tell_broken(assembly, i);
    }
}

void tb__assembly_leave(tb__assembly *assembly, const tb__pack *goodbye) {
    for (size_t i = 0; i < assembly->npeers; i++) { /* also to this process: its manifest may still be on its way */
        if (send(assembly, i, MESSAGE_GONE, goodbye) != TB_OK)
            tb__log(TB_LOG_ERROR, "no memory to tell %s that this process leaves", assembly->peers[i]->label);
    }
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

void tb__early_fini(tb__early *early) {
    free(early->key);
    free(early->data);
}

static void drop_early(tb_world *world, size_t i) {
    tb__early_fini(&world->early.item[i]);
    world->early.item[i] = world->early.item[--world->early.count];
}

/* Kept until this process has the assembly. What the same peer sent before is out of date. */
static void keep_early(tb_world *world, tb__peer *from, const char *key, uint32_t port, const tb__unpack *u) {
    for (size_t i = world->early.count; i-- > 0;) {
        const tb__early *e = &world->early.item[i];
        if (e->from == from && strcmp(e->key, key) == 0)
            drop_early(world, i);
    }
    size_t nbytes = (size_t)(u->end - u->at);
    tb__early e = {.from = from, .key = tb__strdup(key), .port = port, .nbytes = nbytes};
    e.data = tb__memdup(u->at, nbytes, 1);
    if (!e.key || !e.data || !tb__vec_push(&world->early, e)) {
        tb__early_fini(&e);
        tb__log(TB_LOG_ERROR, "no memory for what %s says about '%s'", from->label, key);
    }
}

static void take(tb__assembly *assembly, size_t at, uint32_t port, tb__unpack *manifest) {
    assembly->ports[at] = port;
    if (assembly->status != TB_OK) { /* it belongs to what failed; the next one is for the next of this name */
        tell_broken(assembly, at);
        return;
    }
    tb_status status = TB_OK;
    if (assembly->owes[at])
        status = assembly->tell(assembly, at);
    assembly->owes[at] = false;
    assembly->come(assembly, at, manifest);
    if (assembly->status != TB_OK)
        return;
    tb__pack received = {0};
    tb__pack_u32(&received, port);
    if (status == TB_OK)
        status = send(assembly, at, MESSAGE_RECEIVED, &received);
    tb__pack_fini(&received);
    if (status != TB_OK && assembly->broken)
        assembly->broken(assembly, at, status, tb_error_detail());
}

/* A rank that has given up while others were missing makes it again, or will be missing: it is told again what we have
 * to say, which it may have forgotten, too. */
void tb__assembly_forget(tb__assembly *assembly, size_t peer) {
    assembly->nunknown += assembly->counts[peer];
    assembly->counts[peer] = false;
    assembly->ports[peer] = 0;
    assembly->owes[peer] = true;
    assembly->is_gone[peer] = false;
}

tb_status tb__assembly_announce(tb__assembly *assembly) {
    tb_world *world = assembly->world;
    for (size_t i = 0; i < assembly->npeers; i++)
        TB_TRY(assembly->tell(assembly, i));
    for (size_t i = world->early.count; i-- > 0;) {
        tb__early e = world->early.item[i];
        size_t at = tb__assembly_find(assembly, e.from);
        if (at == TB__NOWHERE || assembly->ports[at] != 0 || strcmp(e.key, assembly->key) != 0)
            continue;
        world->early.item[i] = world->early.item[--world->early.count];
        tb__unpack u = {e.data, e.data + e.nbytes, false};
        take(assembly, at, e.port, &u);
        tb__early_fini(&e);
    }
    return TB_OK;
}

static void on_received(tb__assembly *assembly, size_t at, tb__unpack *message) {
    if (tb__unpack_u32(message) != assembly->port.id || assembly->counts[at] || assembly->status != TB_OK)
        return;
    assembly->counts[at] = true;
    assembly->nunknown--;
    assembly->counted(assembly, at);
}

static void on_broken(tb__assembly *assembly, size_t at, tb__unpack *message) {
    bool is_ours = tb__unpack_u32(message) == assembly->port.id;
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    if (is_ours && !message->failed && status != TB_OK && assembly->broken)
        assembly->broken(assembly, at, status, why);
}

static void on_gone(tb_world *world, tb__assembly *assembly, tb__peer *from, size_t at, uint32_t port,
                    tb__unpack *message) {
    for (size_t i = world->early.count; i-- > 0;) {
        if (world->early.item[i].from == from && world->early.item[i].port == port)
            drop_early(world, i);
    }
    if (at != TB__NOWHERE && assembly->ports[at] == port) {
        assembly->is_gone[at] = true;
        assembly->gone(assembly, at, message);
    }
}

void tb__assemblies_message(tb__port *world_port, tb__peer *from, tb__unpack *message) {
    tb_world *world = (tb_world *)((char *)world_port - offsetof(tb_world, port));
    uint32_t kind = tb__unpack_u32(message);
    const char *key = tb__unpack_string(message);
    uint32_t port = tb__unpack_u32(message);
    if (message->failed || kind > MESSAGE_GONE || port == 0) {
        tb__log(TB_LOG_WARN, "%s sent a message that makes no sense", from->label);
        return;
    }
    tb__assembly *assembly = find(world, key);
    size_t at = assembly ? tb__assembly_find(assembly, from) : TB__NOWHERE;
    bool is_known = at != TB__NOWHERE && assembly->ports[at] == port;
    if (kind == MESSAGE_GONE)
        on_gone(world, assembly, from, at, port, message);
    else if (kind == MESSAGE_RECEIVED && is_known)
        on_received(assembly, at, message);
    else if (kind == MESSAGE_BROKEN && is_known)
        on_broken(assembly, at, message);
    else if (kind == MESSAGE_MANIFEST && at != TB__NOWHERE && assembly->ports[at] == 0)
        take(assembly, at, port, message);
    else if (kind == MESSAGE_MANIFEST && !is_known) /* what is known has only been told again */
        keep_early(world, from, key, port, message);
}

void tb__assemblies_lost(tb_world *world, const tb__peer *peer) {
    for (size_t i = world->early.count; i-- > 0;) {
        if (world->early.item[i].from == peer)
            drop_early(world, i);
    }
}
