/* Device memory that processes of one machine map from each other.
 *
 * The owner shares memory with a peer when the peer first gets a key to a part of it: once for each memory and peer,
 * however many regions, flows and batches lie in it. The peer maps it at once, but only if it uses that device itself:
 * otherwise the mapping would make it open a device that it does not use. Parts of the mapping are counted.
 *
 *     owner                                          importer
 *       |  SHARE id, device, key, descriptors          |
 *       | -------------------------------------------> |   maps it, or keeps the reason why it can't
 *       |  REVOKE id, serial, range                    |   memory in the range was invalidated, or the owner has no
 *       | -------------------------------------------> |   region in it any more: users are told to let go of their
 *       |  REVOKED id, serial, whether it is unmapped  |   parts; the last one that does so unmaps it
 *       | <------------------------------------------- |
 *
 * After a REVOKE, no new keys refer to that id: the memory is shared again under another one. A lost peer holds nothing
 * any more; what a lost peer has shared is revoked.
 *
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_SHARE_H
#define TB_LOOP_SHARE_H

#include "loop/loop.h"

/* ---- Owner ------------------------------------------------------------------------------------------------------- */

typedef struct tb__share tb__share;

/* A reference to the share of this memory. When the last one is dropped, all peers unmap it. */
tb_status tb__share_get(tb__loop *loop, tb__device *device, const tb__memory *memory, tb__share **out);
void tb__share_put(tb__share *share); /* NULL is allowed */

/* Lets the peer map the memory, unless that was done before. A message that is sent after this call can name it by *id,
 * and by offsets relative to *base. */
tb_status tb__share_with(tb__share *share, tb__peer *peer, uint64_t *id, const char **base);

/* Tells all peers to unmap memory in first .. last-1. */
void tb__shares_revoke(tb__loop *loop, uintptr_t first, uintptr_t last);
/* A peer that has not unmapped memory revoked there; NULL: there is none. */
const tb__peer *tb__shares_find_holder(const tb__loop *loop, uintptr_t first, uintptr_t last);

/* ---- Importer ---------------------------------------------------------------------------------------------------- */

typedef struct tb__import tb__import;

/* A part of memory that a peer has shared. It must not move while it is held. */
typedef struct tb__import_part tb__import_part;
struct tb__import_part {
    tb__import *import;
    tb__device *device;
    tb__mapping *mapping;
    uint64_t offset, nbytes; /* in the mapping */
    bool is_revoked;         /* release it, when no copy uses it any more */
    tb__import_part *next, **link;
};

/* TB_REFUSED if the memory could not be mapped; TB_INVALID if the peer has shared no such memory. */
tb_status tb__import_take(tb__peer *peer, uint64_t id, uint64_t offset, uint64_t nbytes, tb__import_part *out);
/* No run of a job that uses it may be under way, and such a job must not be run again. */
void tb__import_release(tb__import_part *part);

/* Called by the driver when some parts were revoked; for code that holds parts. */
typedef struct tb__revocation_watch tb__revocation_watch;
struct tb__revocation_watch {
    void (*revoked)(tb__revocation_watch *watch);
    tb__revocation_watch *next, **link;
};

void tb__loop_watch_revocations(tb__loop *loop, tb__revocation_watch *watch);
void tb__loop_unwatch_revocations(tb__revocation_watch *watch); /* one that is not watched is allowed */

/* ---- For the loop ------------------------------------------------------------------------------------------------ */

/* False: the message is malformed. */
bool tb__shares_on_message(tb__peer *from, tb__unpack *message);
void tb__shares_on_lost(tb__peer *peer);
/* When the loop is destroyed. `is_busy`: the device has unfinished work, so its mappings are kept. */
void tb__shares_free(tb__loop *loop, bool (*is_busy)(const tb__loop *loop, const tb__device *device));

#endif
