/* Device memory of another process that this one uses as its own, for tensors that it moves on behalf of that
 * process: an agent, for its programs. Mapped memory can't be shared again: peers that read such tensors get the
 * owner's key.
 *
 * Any thread, without the loop's lock. */
#ifndef TB_LOOP_ADOPTED_H
#define TB_LOOP_ADOPTED_H

#include "loop/loop.h"

typedef struct tb__adopted tb__adopted;
struct tb__adopted {
    tb__loop *loop;
    tb__device *device;
    tb__mapping *mapping;
    tb__memory memory; /* as tb__loop_find_memory describes it */
    tb__memory_key key;
    tb__adopted *next;
};

/* Maps the memory for reading and writing. Takes ownership of the key, also if it fails. TB_REFUSED: this process has
 * no device of that name, or can't map the memory. */
tb_status tb__adopted_create(tb__loop *loop, const char *device, tb__memory_key *key, tb__adopted **out);
/* Call it when no tensor uses the memory. Memory that a device may still use stays mapped. NULL is allowed. */
void tb__adopted_destroy(tb__adopted *adopted);

/* The device of adopted memory that has all of these bytes; NULL: there is none. */
tb__device *tb__adopted_find(tb__loop *loop, const void *address, size_t nbytes, tb__memory *out);
/* As tb__device_share, also for adopted memory. *key is empty before. */
tb_status tb__adopted_share(tb__loop *loop, tb__device *device, const tb__memory *memory, tb__memory_key *key);

#endif
