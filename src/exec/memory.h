/* Memory that peers can map: what tb_alloc hands out. It is cut from *arenas*, each of them one memfd that is sealed
 * against shrinking and mapped shared, in huge pages where the kernel gives them. Arenas without allocations are kept,
 * so that the next ones find warm pages: up to 1 GiB, or as much as the arenas in use have, if that is more. */
#ifndef TB_EXEC_MEMORY_H
#define TB_EXEC_MEMORY_H

#include "base/error.h"

/* An arena, as far as others need to know it. The descriptor and the mapping last as long as the allocation by which
 * it was found: whoever needs them longer duplicates the descriptor. Peers that are given it can write to the whole
 * arena, other allocations included. */
typedef struct tb__arena_file {
    void *base; /* byte 0 of the file */
    size_t nbytes;
    int fd;
} tb__arena_file;

/* The arena that all of these bytes lie in, inside of one live allocation; of no bytes, their address. False: they are
 * no memory of tb_alloc. */
bool tb__memory_find(const void *ptr, size_t nbytes, tb__arena_file *out);

#endif
