/* Local memory of tensors that peers may access. A region of host memory is registered with a transport when it is
 * first exported there; one of a device is shared (share.h). Once invalidated it stays invalid: accesses with its keys
 * fail.
 *
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_REGION_H
#define TB_LOOP_REGION_H

#include "loop/loop.h"

typedef struct tb__region tb__region;

/* A reference to the valid region of exactly these bytes, which is made if there is none. */
tb_status tb__region_get(tb__loop *loop, void *base, size_t nbytes, tb__region **out);
void tb__region_put(tb__region *region); /* NULL is allowed */

/* The region's device, and its memory there at the time when the region was made. */
tb__device *tb__region_find(const tb__region *region, tb__memory *out);

/* The first field of a key; then the transport's key, or id, offset and length of shared memory. */
enum { TB__KEY_TRANSPORT = 1, TB__KEY_SHARE = 2 };

/* Packs a key by which the peer can import the region (peer_memory.h). */
tb_status tb__region_export(tb__region *region, tb__peer *peer, tb__pack *key);

/* Makes every region that shares a byte with these invalid, and revokes device memory there. */
void tb__regions_invalidate(tb__loop *loop, const void *base, size_t nbytes);

/* Memory that a device may still use after work that the device did not finish was given up. It counts as in use until
 * the work is done. */
typedef struct tb__quarantine tb__quarantine;

/* `what` names its user: "tensors of batch 'step'". NULL: there is no memory, and all memory counts as in use. */
tb__quarantine *tb__quarantine_create(tb__loop *loop, const char *what);
void tb__quarantine_add(tb__quarantine *quarantine, uintptr_t first, uintptr_t last); /* NULL is allowed */
void tb__quarantine_end(tb__quarantine *quarantine);                                  /* NULL is allowed */
/* The user of memory in quarantine that shares a byte with this; NULL: there is none. */
const char *tb__quarantine_find(const tb__loop *loop, uintptr_t first, uintptr_t last);

#endif
