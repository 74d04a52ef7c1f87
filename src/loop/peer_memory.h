/* A peer's memory, as flows use it: memory that the peer's transport maps, or a mapping of device memory that the peer
 * has shared (share.h).
 *
 * All of this needs the loop's lock, unless it says otherwise. */
#ifndef TB_LOOP_PEER_MEMORY_H
#define TB_LOOP_PEER_MEMORY_H

#include "loop/loop.h"

typedef struct tb__peer_memory tb__peer_memory;

/* Imports memory by a key of the peer's tb__region_export. */
tb_status tb__peer_memory_import(tb__peer *peer, const void *key, size_t nbytes, tb__peer_memory **out);
/* No run of a job that uses it may be under way, and such a job must not be run again. NULL is allowed. */
void tb__peer_memory_release(tb__peer_memory *memory);

/* TB_INVALID unless bytes first .. last-1 lie inside of it. Does not access the memory. */
tb_status tb__peer_memory_check(tb__peer_memory *memory, uint64_t first, uint64_t last);
/* False once its owner has revoked it or is lost. Data read from it is valid only if this is still true afterwards. */
bool tb__peer_memory_is_valid(const tb__peer_memory *memory);
/* Whether its owner waits for its release. */
bool tb__peer_memory_is_revoked(const tb__peer_memory *memory);

bool tb__peer_memory_is_mapped(const tb__peer_memory *memory);
/* Where this process can read and write memory of the host; NULL: it is not mapped, or is a device's. */
void *tb__peer_memory_address(const tb__peer_memory *memory);
/* The base of a buffer there for runs of its device; NULL: it is not a device's. */
void *tb__peer_memory_buffer(const tb__peer_memory *memory);
/* The device that copies from it, and its memory there; the host device if every device can. */
tb__device *tb__peer_memory_find(const tb__peer_memory *memory, tb__memory *out);
/* The source of a move at this offset of mapped memory: an address, or an offset in *mapping. Bounds are not checked.
 */
void tb__peer_memory_source(const tb__peer_memory *memory, uint64_t offset, void **address, tb__mapping **mapping);

#endif
