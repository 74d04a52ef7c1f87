/* Extents: the stretches, free or in use, that arenas are cut into. They are found by address, and the first free one
 * that is long enough by size, both in logarithmic time. Pure bookkeeping: the memory itself is never read, because
 * peers can write to it. */
#ifndef TB_DEVICE_HOST_EXTENT_H
#define TB_DEVICE_HOST_EXTENT_H

#include "base/error.h"

typedef struct tb__extent {
    uintptr_t start;
    size_t nbytes; /* neighbours of one arena leave no gap between them */
    size_t asked;  /* in use: what the caller asked for, at most nbytes */
    bool is_used;
    void (*unpin)(void *address);   /* in use: called before it is freed; NULL: nothing is */
    bool is_offered;                /* free, and tb__extents_fit may choose it */
    struct tb__extent *prev, *next; /* neighbours in the same arena; NULL at its ends */
    struct tb__memory_arena *arena;
    /* The tree: a treap by start. */
    struct tb__extent *left, *right;
    size_t longest; /* offered extent in this subtree; 0: none */
    uint32_t priority;
} tb__extent;

/* Zero-initialised is empty. */
typedef struct tb__extents {
    tb__extent *root;
    uint32_t random;
} tb__extents;

/* The caller keeps the neighbours' links and owns the extents. No two may share a byte. */
void tb__extents_add(tb__extents *extents, tb__extent *extent);
void tb__extents_remove(tb__extents *extents, tb__extent *extent);

/* After nbytes or is_offered of an extent have changed. */
void tb__extents_update(tb__extents *extents, const tb__extent *extent);

/* The extent with the highest start that is not above the address; NULL: none. */
tb__extent *tb__extents_at(const tb__extents *extents, uintptr_t address);

/* The first offered one that is at least so long; NULL: none. */
tb__extent *tb__extents_fit(const tb__extents *extents, size_t nbytes);

#endif
