/* Local memory that tensors live in, as far as peers may reach it. A region is known to a transport from the moment it
 * is first exported there. Once invalidated it stays so, under its epoch: whoever has a key to it fails by name.
 *
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_REGION_H
#define TB_LOOP_REGION_H

#include "loop/loop.h"

typedef struct tb__region tb__region;

/* The region of exactly these bytes; a new one if there is none that is valid. */
tb_status tb__region_get(tb__loop *loop, void *base, size_t nbytes, tb__region **out);
void tb__region_put(tb__region *region); /* NULL is allowed */

/* A key for the peer. */
tb_status tb__region_export(tb__region *region, tb__peer *peer, tb_mem_key *out);

/* Makes every region that shares a byte with these invalid. */
void tb__regions_invalidate(tb__loop *loop, const void *base, size_t nbytes);

#endif
