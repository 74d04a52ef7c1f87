/* A peer's memory: see peer_memory.h. */
#include "loop/peer_memory.h"

#include "base/mem.h"
#include "loop/loop_inside.h"
#include "loop/region.h"
#include "loop/share.h"

#include <string.h>

struct tb__peer_memory {
    tb__peer *peer;
    tb_remote *remote;    /* of the transport; NULL: a part of shared device memory */
    char *map;            /* of `remote`; NULL: not mapped */
    tb__import_part part; /* without `remote` */
};

static tb_status import_remote(tb__peer_memory *memory, tb__unpack *key) {
    tb_mem_key theirs = {.nbytes = (uint32_t)(key->end - key->at)};
    if ((size_t)(key->end - key->at) > sizeof theirs.bytes)
        return tb__fail(TB_INVALID, "its key has %zu bytes", (size_t)(key->end - key->at));
    memcpy(theirs.bytes, key->at, theirs.nbytes);
    const tb__peer *peer = memory->peer;
    TB_TRY(tb__transport_import(peer->transport, peer->transport_rank, &theirs, &memory->remote));
    memory->map = tb__transport_map(peer->transport, memory->remote);
    return TB_OK;
}

static tb_status import_part(tb__peer_memory *memory, tb__unpack *key) {
    uint64_t id = tb__unpack_u64(key), offset = tb__unpack_u64(key), nbytes = tb__unpack_u64(key);
    if (!tb__unpack_is_done(key))
        return tb__fail(TB_INVALID, "its key is malformed");
    return tb__import_take(memory->peer, id, offset, nbytes, &memory->part);
}

tb_status tb__peer_memory_import(tb__peer *peer, const void *bytes, size_t nbytes, tb__peer_memory **out) {
    tb__unpack key = {bytes, (const unsigned char *)bytes + nbytes, false};
    tb__peer_memory *memory = tb__calloc(1, sizeof *memory);
    if (!memory)
        return TB_NO_MEMORY;
    memory->peer = peer;
    uint32_t kind = tb__unpack_u32(&key);
    tb_status status = kind == TB__KEY_SHARE                      ? import_part(memory, &key)
                       : kind == TB__KEY_TRANSPORT && !key.failed ? import_remote(memory, &key)
                                                                  : tb__fail(TB_INVALID, "its key is malformed");
    if (status != TB_OK) {
        free(memory);
        return status;
    }
    *out = memory;
    return TB_OK;
}

void tb__peer_memory_release(tb__peer_memory *memory) {
    if (!memory)
        return;
    const tb_transport *t = memory->peer->transport;
    if (memory->remote)
        t->ops->mem_release(t->context, memory->remote);
    else
        tb__import_release(&memory->part);
    free(memory);
}

tb_status tb__peer_memory_check(tb__peer_memory *memory, uint64_t first, uint64_t last) {
    tb_range ends[] = {{first, 0}, {last, 0}};
    if (memory->remote)
        return tb__transport_read(memory->peer->transport, memory->remote, ends, 2, NULL, 0);
    return tb__ranges_check(ends, 2, NULL, 0, memory->part.nbytes, memory->peer->rank);
}

bool tb__peer_memory_is_valid(const tb__peer_memory *memory) {
    return memory->remote ? tb__transport_is_valid(memory->peer->transport, memory->remote)
                          : !memory->part.is_revoked && !memory->peer->is_lost;
}

bool tb__peer_memory_is_revoked(const tb__peer_memory *memory) {
    return memory->part.is_revoked;
}

bool tb__peer_memory_is_mapped(const tb__peer_memory *memory) {
    return memory->map || !memory->remote;
}

void *tb__peer_memory_address(const tb__peer_memory *memory) {
    return memory->map;
}

void *tb__peer_memory_buffer(const tb__peer_memory *memory) {
    return memory->remote ? NULL : memory->part.mapping->base + memory->part.offset;
}

tb__device *tb__peer_memory_find(const tb__peer_memory *memory, tb__memory *out) {
    const tb__mapping *mapping = memory->part.mapping;
    if (memory->remote)
        return tb__loop_find_memory(memory->peer->loop, memory->map, 1, out);
    *out = (tb__memory){.base = mapping->base, .nbytes = mapping->nbytes, .index = mapping->index};
    return memory->part.device;
}

void tb__peer_memory_source(const tb__peer_memory *memory, uint64_t offset, void **address, tb__mapping **mapping) {
    *mapping = memory->map ? NULL : memory->part.mapping;
    *address = memory->map ? memory->map + offset : (void *)(uintptr_t)(offset + memory->part.offset); // NOLINT
}
