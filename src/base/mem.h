/* Memory: checked allocation, an arena, growable arrays. Every allocation of the library goes through here, so that
 * tests can make the n-th one fail. */
#ifndef TB_BASE_MEM_H
#define TB_BASE_MEM_H

#include "base/error.h"

#include <stdlib.h>

/* Like calloc, malloc and realloc of count*size bytes; NULL, with tb_error_detail, if that overflows or fails. */
TB_API void *tb__calloc(size_t count, size_t size);
TB_API void *tb__malloc(size_t count, size_t size);
TB_API void *tb__realloc(void *ptr, size_t count, size_t size);
void *tb__memdup(const void *from, size_t count, size_t size);
TB_API char *tb__strdup(const char *string);

/* Bytes that an allocation takes, including the allocator's overhead; 0 for NULL. */
size_t tb__mem_nbytes(const void *ptr);

/* Addresses without memory that begin at a multiple of TB__HUGE_PAGE, to map something there; NULL, with errno. */
enum { TB__HUGE_PAGE = 2 << 20 };
void *tb__reserve_addresses(size_t nbytes);

/* Maps the file's first bytes, shared with all who map it, with mmap's protection. Huge pages of the file are mapped as
 * such, for which addresses have to be as far from a multiple of TB__HUGE_PAGE as offsets in the file are. NULL, with
 * errno; else munmap ends it. */
void *tb__map_shared(int fd, size_t nbytes, int protection);

/* For tests: after `n` more allocations on this thread, all fail; negative: none. */
void tb__mem_fail_after(long n);

/* Memory that is freed all at once. Zero-initialised: empty. */
typedef struct tb__arena {
    struct tb__arena_block *head, *spare;
    char *next, *end;
} tb__arena;

void *tb__arena_alloc(tb__arena *arena, size_t count, size_t size);
char *tb__arena_strdup(tb__arena *arena, const char *string);
void tb__arena_reset(tb__arena *arena); /* frees all allocations, but keeps the memory */
void tb__arena_fini(tb__arena *arena);
size_t tb__arena_nbytes(const tb__arena *arena); /* that the arena occupies */

/* TB_VEC(int) v = {0}; if (!tb__vec_push(&v, 1)) return TB_NO_MEMORY; ... free(v.item); */
#define TB_VEC(type)                                                                                                   \
    struct {                                                                                                           \
        type *item;                                                                                                    \
        size_t count, capacity;                                                                                        \
    }
#define tb__vec_push(v, ...) (tb__vec_reserve(v, 1) ? ((v)->item[(v)->count++] = (__VA_ARGS__), true) : false)
#define tb__vec_reserve(v, more)                                                                                       \
    (((v)->item && (v)->count + (more) <= (v)->capacity) ||                                                            \
     tb__vec_grow((void **)&(v)->item, &(v)->capacity, (v)->count + (more), sizeof *(v)->item))

/* Sorts and removes duplicates; returns the new count. */
#define tb__vec_sort_unique(v, compare)                                                                                \
    ((v)->count = (v)->count ? tb__sort_unique((v)->item, (v)->count, sizeof *(v)->item, compare) : 0)

TB_API bool tb__vec_grow(void **items, size_t *capacity, size_t need, size_t size);
size_t tb__sort_unique(void *items, size_t count, size_t size, int (*compare)(const void *a, const void *b));

#endif
