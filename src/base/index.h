/* Finds positions in an array by hash. The caller keeps the array and compares; two entries may have the same hash.
 *
 *     size_t probe = 0, i;
 *     while ((i = tb__index_next(&index, hash, &probe)) != TB__NOWHERE)
 *         if (array[i] is the one)
 *             return i;
 *     ... make room in the array, tb__index_add(&index, hash, position), append: then a failure changes neither ...
 */
#ifndef TB_BASE_INDEX_H
#define TB_BASE_INDEX_H

#include "base/error.h"

#define TB__NOWHERE SIZE_MAX

/* Zero-initialised is empty. */
typedef struct tb__index {
    struct tb__index_slot {
        uint64_t hash;
        size_t position; /* plus 1; 0: free */
    } * slot;
    size_t nslots, count; /* nslots is a power of two */
} tb__index;

TB_API bool tb__index_add(tb__index *index, uint64_t hash, size_t position); /* false: no memory */
void tb__index_clear(tb__index *index);                                      /* keeps the memory */
TB_API size_t tb__index_next(const tb__index *index, uint64_t hash, size_t *probe);
TB_API void tb__index_fini(tb__index *index);

/* Mixes a value into a hash. */
static inline uint64_t tb__hash(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
    return hash ^ hash >> 32;
}

static inline uint64_t tb__hash_string(uint64_t hash, const char *string) {
    for (; *string; string++)
        hash = tb__hash(hash, (unsigned char)*string);
    return hash;
}

#endif
