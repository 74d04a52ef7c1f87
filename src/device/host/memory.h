/* tb_alloc: memory that peers can map. It is cut from *arenas*, which are parts of memfds that are sealed against
 * shrinking and mapped shared, in huge pages where the kernel gives them. Arenas without allocations are kept, so that
 * the next ones find warm pages: up to 1 GiB, or as much as the arenas in use have, if that is more. A process has few
 * memfds, however much it allocates: one more each time that what it has doubles, and one for each 64 GiB. */
#ifndef TB_DEVICE_HOST_MEMORY_H
#define TB_DEVICE_HOST_MEMORY_H

#include "base/error.h"

/* The file that an arena is a part of. The descriptor and the addresses last as long as the allocation by which it was
 * found: to keep them longer, duplicate the descriptor. Not all of the file is mapped. Peers that are given it can
 * write to all of it, other allocations included. */
typedef struct tb__arena_file {
    void *base; /* byte 0 of the file */
    size_t nbytes;
    int fd;
    bool is_adopted; /* another process's. If it is not, memory that is freed leaves the file */
} tb__arena_file;

/* Memory of tb_alloc in pages of its own, which `pin` has pinned; tb_free unpins it first. */
tb_status tb__memory_alloc_pinned(size_t nbytes, tb_status (*pin)(void *, size_t), void (*unpin)(void *), void **out);
bool tb__memory_has_pinned(void); /* whether there is any */

/* The file that holds all of these bytes, which must be in one live allocation. False: they are not memory of tb_alloc.
 */
bool tb__memory_find(const void *ptr, size_t nbytes, tb__arena_file *out);

/* TB_INVALID unless the CPU can read the first and the last of these bytes. Addresses of a device, or of memory that
 * was freed, would end the program. */
tb_status tb__memory_check_mapped(const void *ptr, size_t nbytes);

/* An arena of this process that is not given back to the system, for devices that have pinned its pages. */
typedef struct tb__memory_arena tb__memory_arena;
typedef struct tb__held_arena {
    tb__memory_arena *arena;
    char *base; /* whole pages, in which there is nothing but memory of tb_alloc */
    size_t nbytes;
    bool is_shared; /* by small allocations */
} tb__held_arena;

/* Holds the arena of this address, which is in a live allocation. False: it is none of this process's own. */
bool tb__memory_hold(const void *ptr, tb__held_arena *out);
void tb__memory_let_go(tb__memory_arena *arena); /* NULL is allowed */

/* Maps the memory of another process, a memfd that is sealed against shrinking, so that peers can map tensors in it
 * like those of tb_alloc. The caller keeps the descriptor. *base is byte 0 of the file. */
tb_status tb__memory_adopt(int fd, void **base, size_t *nbytes);
void tb__memory_abandon(void *base); /* no tensor in it is used any more */

#endif
