/* Checked allocation, the arena, growable arrays. */
#include "base/mem.h"

#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct tb__arena_block {
    struct tb__arena_block *prev;
    size_t size;
    max_align_t data[];
};

static _Thread_local long fail_after = -1;

void tb__mem_fail_after(long n) {
    fail_after = n;
}

static bool is_refused(size_t count, size_t size) {
    if (fail_after > 0)
        fail_after--;
    else if (fail_after == 0)
        return true;
    return size != 0 && count > PTRDIFF_MAX / size;
}

static void *check_result(void *ptr, size_t count, size_t size) {
    if (!ptr)
        tb__set_detail("out of memory: %zu times %zu bytes", count, size);
    return ptr;
}

/* glibc's calloc does not take the blocks that free keeps for malloc, of up to 1,032 bytes. */
static void *allocate_zeros(size_t count, size_t size) {
    enum { KEPT = 1032 };
    size_t nbytes = count * size;
    if (nbytes == 0 || nbytes > KEPT)
        return calloc(count ? count : 1, size ? size : 1);
    void *ptr = malloc(nbytes);
    return ptr ? memset(ptr, 0, nbytes) : NULL;
}

void *tb__calloc(size_t count, size_t size) {
    return check_result(is_refused(count, size) ? NULL : allocate_zeros(count, size), count, size);
}

void *tb__malloc(size_t count, size_t size) {
    return check_result(is_refused(count, size) ? NULL : malloc(count && size ? count * size : 1), count, size);
}

void *tb__realloc(void *ptr, size_t count, size_t size) {
    return check_result(is_refused(count, size) ? NULL : realloc(ptr, count && size ? count * size : 1), count, size);
}

void *tb__memdup(const void *from, size_t count, size_t size) {
    void *copy = tb__malloc(count, size);
    return copy && count ? memcpy(copy, from, count * size) : copy;
}

char *tb__strdup(const char *string) {
    return tb__memdup(string, strlen(string) + 1, 1);
}

size_t tb__mem_nbytes(const void *ptr) {
    return ptr ? malloc_usable_size((void *)ptr) + sizeof(size_t) : 0;
}

static size_t round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

void *tb__reserve_addresses(size_t nbytes) {
    nbytes = round_up(nbytes, (size_t)sysconf(_SC_PAGESIZE));
    char *space = mmap(NULL, nbytes + TB__HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return NULL;
    size_t before = round_up((uintptr_t)space, TB__HUGE_PAGE) - (uintptr_t)space;
    if (before > 0)
        munmap(space, before);
    munmap(space + before + nbytes, TB__HUGE_PAGE - before);
    return space + before;
}

void *tb__map_shared(int fd, size_t nbytes, int protection) {
    void *at = nbytes >= TB__HUGE_PAGE ? tb__reserve_addresses(nbytes) : NULL;
    void *map = mmap(at, nbytes, protection, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
    int error = errno;
    if (map != MAP_FAILED)
        return map;
    if (at)
        munmap(at, nbytes);
    errno = error;
    return NULL;
}

bool tb__vec_grow(void **items, size_t *capacity, size_t need, size_t size) {
    size_t doubled = *capacity * 2 > 8 ? *capacity * 2 : 8;
    size_t wanted = doubled > need ? doubled : need;
    void *grown = tb__realloc(*items, wanted, size);
    if (!grown)
        return false;
    *items = grown;
    *capacity = wanted;
    return true;
}

/* The first block is a small one: most arenas hold one message, and malloc keeps blocks of that size at hand. */
enum { BLOCK_SIZE = 16 * 1024, FIRST_BLOCK_SIZE = 960 };

static bool add_arena_block(tb__arena *arena, size_t nbytes) {
    struct tb__arena_block *block = arena->spare;
    if (block && block->size >= nbytes) {
        arena->spare = block->prev;
    } else {
        size_t usual = arena->head ? BLOCK_SIZE : FIRST_BLOCK_SIZE, size = nbytes > usual ? nbytes : usual;
        block = tb__malloc(1, sizeof *block + size);
        if (!block)
            return false;
        block->size = size;
    }
    block->prev = arena->head;
    arena->head = block;
    arena->next = (char *)block->data;
    arena->end = arena->next + block->size;
    return true;
}

void *tb__arena_alloc(tb__arena *arena, size_t count, size_t size) {
    if (size != 0 && count > (PTRDIFF_MAX - 4096) / size)
        return check_result(NULL, count, size);
    size_t align = _Alignof(max_align_t);
    size_t nbytes = count && size ? (count * size + align - 1) / align * align : align; /* 0 bytes have an address,
                                                                                         * too */
    if ((size_t)(arena->end - arena->next) < nbytes && !add_arena_block(arena, nbytes))
        return NULL;
    void *p = arena->next;
    arena->next += nbytes;
    return p;
}

char *tb__arena_strdup(tb__arena *arena, const char *string) {
    size_t nbytes = strlen(string) + 1;
    char *copy = tb__arena_alloc(arena, nbytes, 1);
    return copy ? memcpy(copy, string, nbytes) : NULL;
}

void tb__arena_reset(tb__arena *arena) {
    /* Usually there is one block, which stays in place. */
    while (arena->head && arena->head->prev) {
        struct tb__arena_block *block = arena->head;
        arena->head = block->prev;
        block->prev = arena->spare;
        arena->spare = block;
    }
    if (arena->head) {
        arena->next = (char *)arena->head->data;
        arena->end = arena->next + arena->head->size;
    }
}

static size_t blocks_nbytes(const struct tb__arena_block *block) {
    size_t nbytes = 0;
    for (; block; block = block->prev)
        nbytes += tb__mem_nbytes(block);
    return nbytes;
}

size_t tb__arena_nbytes(const tb__arena *arena) {
    return blocks_nbytes(arena->head) + blocks_nbytes(arena->spare);
}

static void free_blocks(struct tb__arena_block *block) {
    while (block) {
        struct tb__arena_block *prev = block->prev;
        free(block);
        block = prev;
    }
}

void tb__arena_fini(tb__arena *arena) {
    free_blocks(arena->head);
    free_blocks(arena->spare);
    *arena = (tb__arena){0};
}

size_t tb__sort_unique(void *items, size_t count, size_t size, int (*compare)(const void *a, const void *b)) {
    char *item = items;
    size_t kept = count > 0;
    if (count > 1)
        qsort(items, count, size, compare);
    for (size_t i = 1; i < count; i++) {
        if (compare(item + (kept - 1) * size, item + i * size) == 0)
            continue;
        memmove(item + kept * size, item + i * size, size);
        kept++;
    }
    return kept;
}
