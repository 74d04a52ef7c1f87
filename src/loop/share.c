/* Shared device memory: see share.h. */
#include "loop/share.h"

#include "base/log.h"
#include "base/mem.h"
#include "device/host/memory.h"
#include "loop/adopted.h"
#include "loop/loop_inside.h"

#include <inttypes.h>
#include <string.h>

enum { MESSAGE_SHARE, MESSAGE_REVOKE, MESSAGE_REVOKED };
enum { MAX_FDS = 1 << 16 };

/* A peer that may map the memory. */
typedef struct holder {
    tb__peer *peer;
    uint64_t id;
    bool is_ending;             /* gets no new keys */
    uint64_t serial, confirmed; /* of the last REVOKE that was sent, and that was confirmed */
    struct holder *next;
} holder;

struct tb__share {
    tb__loop *loop;
    tb__device *device;
    tb__memory memory;
    size_t refs;
    holder *holders;
    tb__share *next;
};

/* Memory that a peer has shared with this process. */
struct tb__import {
    tb__peer *peer;
    uint64_t id;
    tb__device *device;
    tb__mapping *mapping; /* NULL: it could not be mapped: ... */
    char *why;
    bool is_ending;   /* it gets no new parts: unmap it when there are none */
    bool is_settling; /* its parts are being revoked */
    uint64_t serial, confirmed;
    size_t nrevoked; /* parts that were revoked and not released */
    tb__import_part *parts;
    tb__import *next;
};

static void begin_message(tb__pack *pack, uint32_t kind, uint64_t id) {
    tb__pack_u32(pack, kind);
    tb__pack_u64(pack, id);
}

/* ---- Owner ------------------------------------------------------------------------------------------------------- */

tb_status tb__share_get(tb__loop *loop, tb__device *device, const tb__memory *memory, tb__share **out) {
    tb__share *share = loop->shares;
    while (share && (share->device != device || share->memory.epoch != memory->epoch ||
                     share->memory.base != memory->base || share->memory.nbytes != memory->nbytes))
        share = share->next;
    if (!share) {
        share = tb__calloc(1, sizeof *share);
        if (!share)
            return TB_NO_MEMORY;
        *share = (tb__share){.loop = loop, .device = device, .memory = *memory, .next = loop->shares};
        loop->shares = share;
    }
    share->refs++;
    *out = share;
    return TB_OK;
}

static void free_if_unused(tb__share *share) {
    if (share->refs > 0 || share->holders)
        return;
    tb__share **at = &share->loop->shares;
    while (*at != share)
        at = &(*at)->next;
    *at = share->next;
    free(share);
}

/* If memory for the message is short, the holder stays unconfirmed, and an invalidation names it. */
static void send_revoke(holder *h, uint64_t offset, uint64_t nbytes) {
    tb__pack pack = {0};
    h->is_ending = true;
    begin_message(&pack, MESSAGE_REVOKE, h->id);
    tb__pack_u64(&pack, ++h->serial);
    tb__pack_u64(&pack, offset);
    tb__pack_u64(&pack, nbytes);
    if (tb__loop_send(h->peer, TB__PORT_LOOP, &pack) != TB_OK)
        tb__log(TB_LOG_WARN, "%s is not told to unmap device memory: %s", h->peer->label, tb_error_detail());
}

void tb__share_put(tb__share *share) {
    if (!share || --share->refs > 0)
        return;
    for (holder *h = share->holders; h; h = h->next)
        send_revoke(h, 0, share->memory.nbytes);
    free_if_unused(share);
}

/* Device memory travels as descriptors, or as a name that the driver of this machine knows. */
static tb_status send_share(tb__share *share, tb__peer *peer, uint64_t id) {
    tb__memory_key key = {0};
    tb__pack pack = {0};
    uint64_t fds = 0;
    tb_status status = tb__adopted_share(share->loop, share->device, &share->memory, &key);
    if (status == TB_OK && key.fds.count > 0)
        status = tb__peer_open(peer);
    if (status == TB_OK && key.fds.count > 0)
        status = tb__transport_send_fds(peer->transport, peer->transport_rank, key.fds.item, key.fds.count, &fds);
    if (status == TB_OK) {
        begin_message(&pack, MESSAGE_SHARE, id);
        tb__pack_string(&pack, share->device->ops->name);
        tb__pack_bytes(&pack, key.bytes.data, key.bytes.count);
        tb__pack_u32(&pack, (uint32_t)key.fds.count);
        tb__pack_u64(&pack, fds);
        status = tb__loop_send(peer, TB__PORT_LOOP, &pack);
    }
    tb__memory_key_fini(&key);
    return status;
}

tb_status tb__share_with(tb__share *share, tb__peer *peer, uint64_t *id, const char **base) {
    holder *h = share->holders;
    *base = share->memory.base;
    while (h && (h->peer != peer || h->is_ending))
        h = h->next;
    if (h) {
        *id = h->id;
        return TB_OK;
    }
    if (peer->is_lost)
        return tb__fail(TB_LOST, "its reader is lost");
    if (strncmp(peer->host, share->loop->host, TB__CONTACT_PREFIX) != 0)
        return tb__fail(TB_REFUSED, "rank %" PRId32 " is on another machine", peer->rank);
    h = tb__calloc(1, sizeof *h);
    if (!h)
        return TB_NO_MEMORY;
    *h = (holder){.peer = peer, .id = ++share->loop->last_share, .next = share->holders};
    tb_status status = send_share(share, peer, h->id);
    if (status != TB_OK) {
        free(h);
        return status;
    }
    share->holders = h;
    *id = h->id;
    return TB_OK;
}

static bool overlaps(const tb__share *share, uintptr_t first, uintptr_t last) {
    uintptr_t base = (uintptr_t)share->memory.base;
    return base < last && first < base + share->memory.nbytes;
}

void tb__shares_revoke(tb__loop *loop, uintptr_t first, uintptr_t last) {
    for (tb__share *share = loop->shares; share; share = share->next) {
        uintptr_t base = (uintptr_t)share->memory.base, end = base + share->memory.nbytes;
        if (!overlaps(share, first, last))
            continue;
        uint64_t from = first > base ? first - base : 0, to = (last < end ? last : end) - base;
        for (holder *h = share->holders; h; h = h->next)
            send_revoke(h, from, to - from);
    }
}

const tb__peer *tb__shares_find_holder(const tb__loop *loop, uintptr_t first, uintptr_t last) {
    for (const tb__share *share = loop->shares; share; share = share->next) {
        for (const holder *h = share->holders; h && overlaps(share, first, last); h = h->next) {
            if (h->confirmed < h->serial && !h->peer->is_lost)
                return h->peer;
        }
    }
    return NULL;
}

static void remove_holder(tb__share *share, holder *h) {
    holder **at = &share->holders;
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    free(h);
}

/* Serial 0: the peer could not map the memory, which may be shared with it again. */
static bool on_revoked(const tb__peer *from, uint64_t id, tb__unpack *message) {
    uint64_t serial = tb__unpack_u64(message);
    bool is_unmapped = tb__unpack_u32(message) != 0;
    if (!tb__unpack_is_done(message))
        return false;
    for (tb__share *share = from->loop->shares; share; share = share->next) {
        holder *h = share->holders;
        while (h && (h->peer != from || h->id != id))
            h = h->next;
        if (!h)
            continue;
        h->is_ending = true;
        h->confirmed = serial > h->confirmed ? serial : h->confirmed;
        if (is_unmapped)
            remove_holder(share, h);
        free_if_unused(share);
        tb__loop_signal(from->loop);
        return true;
    }
    return true; /* the memory is not shared any more */
}

/* ---- Importer ---------------------------------------------------------------------------------------------------- */

static tb__import *find_import(const tb__peer *peer, uint64_t id) {
    tb__import *import = peer->loop->imports;
    while (import && (import->peer != peer || import->id != id))
        import = import->next;
    return import;
}

static void tell_revoked(tb__import *import, uint64_t serial, bool is_unmapped) {
    tb__pack pack = {0};
    begin_message(&pack, MESSAGE_REVOKED, import->id);
    tb__pack_u64(&pack, serial);
    tb__pack_u32(&pack, is_unmapped);
    if (tb__loop_send(import->peer, TB__PORT_LOOP, &pack) != TB_OK)
        tb__log(TB_LOG_WARN, "%s is not told that its device memory is unmapped: %s", import->peer->label,
                tb_error_detail());
}

static void free_import(tb__import *import) {
    tb__import **at = &import->peer->loop->imports;
    while (*at != import)
        at = &(*at)->next;
    *at = import->next;
    if (import->mapping)
        import->device->ops->unmap(import->device, import->mapping);
    free(import->why);
    free(import);
}

/* Unmaps memory that was revoked, and confirms it, when no part of it is held any more. */
static void settle_import(tb__import *import) {
    if (!import->is_ending || import->is_settling || import->nrevoked > 0)
        return;
    bool is_unused = import->parts == NULL;
    tb__import told = *import;
    import->confirmed = import->serial;
    if (is_unused)
        free_import(import);
    if (is_unused || told.confirmed < told.serial)
        tell_revoked(&told, told.serial, is_unused);
}

tb_status tb__import_take(tb__peer *peer, uint64_t id, uint64_t offset, uint64_t nbytes, tb__import_part *out) {
    tb__import *import = find_import(peer, id);
    if (!import || import->is_ending)
        return tb__fail(TB_INVALID, "its owner has not shared it, or has revoked it");
    if (!import->mapping)
        return tb__fail(TB_REFUSED, "%s", import->why ? import->why : "it could not be mapped");
    if (offset > import->mapping->nbytes || nbytes > import->mapping->nbytes - offset)
        return tb__fail(TB_INVALID, "%" PRIu64 " bytes from %" PRIu64 " of shared memory that has %zu", nbytes, offset,
                        import->mapping->nbytes);
    *out = (tb__import_part){.import = import,
                             .device = import->device,
                             .mapping = import->mapping,
                             .offset = offset,
                             .nbytes = nbytes,
                             .next = import->parts,
                             .link = &import->parts};
    if (out->next)
        out->next->link = &out->next;
    import->parts = out;
    return TB_OK;
}

void tb__import_release(tb__import_part *part) {
    *part->link = part->next;
    if (part->next)
        part->next->link = part->link;
    part->import->nrevoked -= part->is_revoked;
    settle_import(part->import);
}

static void revoke_parts(tb__import *import, uint64_t first, uint64_t last) {
    import->is_ending = true;
    for (tb__import_part *part = import->parts; part; part = part->next) {
        bool meets = !part->is_revoked && part->offset < last && first < part->offset + part->nbytes;
        part->is_revoked |= meets;
        import->nrevoked += meets;
    }
}

/* Watches release parts, which must not free an import that is still in use here. */
static void call_watches(tb__loop *loop) {
    for (tb__revocation_watch *watch = loop->revocation_watches, *next; watch; watch = next) {
        next = watch->next;
        watch->revoked(watch);
    }
}

static bool on_revoke(const tb__peer *from, uint64_t id, tb__unpack *message) {
    uint64_t serial = tb__unpack_u64(message), offset = tb__unpack_u64(message), nbytes = tb__unpack_u64(message), last;
    tb__import *import = find_import(from, id);
    if (!tb__unpack_is_done(message) || __builtin_add_overflow(offset, nbytes, &last))
        return false;
    if (!import)
        return true;
    import->serial = serial > import->serial ? serial : import->serial;
    import->is_settling = true;
    revoke_parts(import, offset, last);
    if (import->nrevoked > 0)
        call_watches(from->loop);
    import->is_settling = false;
    settle_import(import);
    return true;
}

/* The device of this name, if the process uses it, also if only to pin host memory; else NULL, with tb_error_detail. */
static tb__device *find_used_device(const tb__loop *loop, const char *name) {
    for (size_t i = 0; i < loop->ndevices; i++) {
        if (strcmp(loop->devices[i]->ops->name, name) != 0 || loop->devices[i]->ops == &tb__host_device_ops)
            continue;
        bool is_used = loop->is_device_used[i] || (loop->devices[i]->ops->pin && tb__memory_has_pinned());
        if (!is_used)
            tb__set_detail("it has no memory of its own on device %s", name);
        return is_used ? loop->devices[i] : NULL;
    }
    tb__set_detail("it has no device %.40s", name);
    return NULL;
}

static tb_status map_import(tb__import *import, const char *device, const void *bytes, size_t nbytes, size_t nfds,
                            uint64_t fds) {
    tb__memory_key key = {0};
    const tb__peer *peer = import->peer;
    tb_status status = TB_OK;
    tb__pack_raw(&key.bytes, bytes, nbytes);
    if (key.bytes.failed || !tb__vec_reserve(&key.fds, nfds))
        status = TB_NO_MEMORY;
    if (status == TB_OK && nfds > 0) {
        status = tb__transport_take_fds(peer->transport, peer->transport_rank, fds, key.fds.item, nfds);
        key.fds.count = status == TB_OK ? nfds : 0;
    }
    import->device = status == TB_OK ? find_used_device(peer->loop, device) : NULL;
    if (status == TB_OK)
        status = import->device ? tb__device_map(import->device, &key, false, &import->mapping) : TB_REFUSED;
    tb__memory_key_fini(&key);
    return status;
}

static bool on_share(tb__peer *from, uint64_t id, tb__unpack *message) {
    size_t nbytes;
    const char *device = tb__unpack_string(message);
    const void *bytes = tb__unpack_bytes(message, &nbytes);
    uint32_t nfds = tb__unpack_u32(message);
    uint64_t fds = tb__unpack_u64(message);
    if (!tb__unpack_is_done(message) || nfds > MAX_FDS || find_import(from, id))
        return false;
    tb__import *import = tb__calloc(1, sizeof *import);
    if (!import)
        return true; /* keys that name it are refused */
    *import = (tb__import){.peer = from, .id = id, .next = from->loop->imports};
    from->loop->imports = import;
    if (map_import(import, device, bytes, nbytes, nfds, fds) != TB_OK) {
        import->why = tb__strdup(tb_error_detail());
        tell_revoked(import, 0, false);
    }
    return true;
}

/* ---- Both -------------------------------------------------------------------------------------------------------- */

void tb__loop_watch_revocations(tb__loop *loop, tb__revocation_watch *watch) {
    watch->next = loop->revocation_watches;
    watch->link = &loop->revocation_watches;
    if (watch->next)
        watch->next->link = &watch->next;
    loop->revocation_watches = watch;
}

void tb__loop_unwatch_revocations(tb__revocation_watch *watch) {
    if (!watch->link)
        return;
    *watch->link = watch->next;
    if (watch->next)
        watch->next->link = watch->link;
    watch->link = NULL;
}

bool tb__shares_on_message(tb__peer *from, tb__unpack *message) {
    uint32_t kind = tb__unpack_u32(message);
    uint64_t id = tb__unpack_u64(message);
    tb__set_detail("it sent a malformed message of kind %" PRIu32 " about device memory", kind);
    switch (kind) {
    case MESSAGE_SHARE:
        return on_share(from, id, message);
    case MESSAGE_REVOKE:
        return on_revoke(from, id, message);
    case MESSAGE_REVOKED:
        return on_revoked(from, id, message);
    default:
        return false;
    }
}

static void drop_holders(tb__loop *loop, const tb__peer *peer) {
    for (tb__share *share = loop->shares, *next; share; share = next) {
        next = share->next;
        for (holder *h = share->holders, *after; h; h = after) {
            after = h->next;
            if (h->peer == peer)
                remove_holder(share, h);
        }
        free_if_unused(share);
    }
}

void tb__shares_on_lost(tb__peer *peer) {
    tb__loop *loop = peer->loop;
    bool has_imports = false;
    drop_holders(loop, peer);
    for (tb__import *import = loop->imports; import; import = import->next) {
        if (import->peer != peer)
            continue;
        import->is_settling = has_imports = true;
        revoke_parts(import, 0, UINT64_MAX);
    }
    if (has_imports)
        call_watches(loop);
    for (tb__import *import = loop->imports, *next; import; import = next) {
        next = import->next;
        if (import->peer != peer)
            continue;
        import->is_settling = false;
        settle_import(import);
    }
}

void tb__shares_free(tb__loop *loop, bool (*is_busy)(const tb__loop *loop, const tb__device *device)) {
    while (loop->shares) {
        tb__share *share = loop->shares;
        while (share->holders)
            remove_holder(share, share->holders);
        loop->shares = share->next;
        free(share);
    }
    for (tb__import *import = loop->imports, *next; import; import = next) {
        next = import->next;
        if (!import->parts && !(import->mapping && is_busy(loop, import->device)))
            free_import(import); /* else a device may still use it for unfinished work */
    }
}
