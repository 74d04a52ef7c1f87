/* Local memory of tensors that peers may access. A region is registered with a transport when it is first exported
 * there. Once invalidated it stays invalid: accesses with its keys fail.
 *
 * All of this needs the loop's lock. */
#ifndef TB_LOOP_REGION_H
#define TB_LOOP_REGION_H

#include "loop/loop.h"

typedef struct tb__region tb__region;

/* A reference to the valid region of exactly these bytes, which is made if there is none. */
tb_status tb__region_get(tb__loop *loop, void *base, size_t nbytes, tb__region **out);
void tb__region_put(tb__region *region); /* NULL is allowed */

/* A key by which the peer can access the region. */
tb_status tb__region_export(tb__region *region, tb__peer *peer, tb_mem_key *out);

/* Makes every region that shares a byte with these invalid. */
void tb__regions_invalidate(tb__loop *loop, const void *base, size_t nbytes);

#endif
