/* FIFO lists of waiting operations and messages, and hash tables of them by (peer, tag). */
#ifndef TB_TRANSPORT_MATCH_H
#define TB_TRANSPORT_MATCH_H

#include "base/mem.h"

#include <stddef.h>
#include <stdint.h>

/* First member of an entry, which is in one list or table at a time. */
typedef struct tb__waiter {
    struct tb__waiter *next;
    int32_t peer;
    uint64_t tag;
} tb__waiter;

/* Zero-initialised is empty, here and below. */
typedef struct tb__waiters {
    tb__waiter *first, **last; /* last: link for the next entry, unless the list is empty */
} tb__waiters;

static inline void tb__waiters_add(tb__waiters *list, tb__waiter *w) {
    if (!list->first)
        list->last = &list->first;
    w->next = NULL;
    *list->last = w;
    list->last = &w->next;
}

/* Removes the entry that `at` points to. */
static inline tb__waiter *tb__waiters_unlink(tb__waiters *list, tb__waiter **at) {
    tb__waiter *w = *at;
    *at = w->next;
    if (list->last == &w->next)
        list->last = at;
    return w;
}

/* NULL if there is none. */
static inline tb__waiter *tb__waiters_take(tb__waiters *list) {
    return list->first ? tb__waiters_unlink(list, &list->first) : NULL;
}

/* Removes the entry, if it is there. */
static inline void tb__waiters_remove(tb__waiters *list, const tb__waiter *w) {
    tb__waiter **at = &list->first;
    while (*at && *at != w)
        at = &(*at)->next;
    if (*at)
        tb__waiters_unlink(list, at);
}

enum { TB__MATCH_BUCKETS = 1024 };

typedef struct tb__match {
    tb__waiters bucket[TB__MATCH_BUCKETS];
} tb__match;

static inline size_t tb__match_bucket(int32_t peer, uint64_t tag) {
    uint64_t h = (tag ^ (uint64_t)(uint32_t)peer << 40) * 0x9E3779B97F4A7C15U;
    return h >> 54;
}

static inline void tb__match_add(tb__match *m, tb__waiter *w) {
    tb__waiters_add(&m->bucket[tb__match_bucket(w->peer, w->tag)], w);
}

/* Removes the oldest entry with this peer and tag; NULL if there is none. */
static inline tb__waiter *tb__match_take(tb__match *m, int32_t peer, uint64_t tag) {
    tb__waiters *list = &m->bucket[tb__match_bucket(peer, tag)];
    for (tb__waiter **at = &list->first; *at; at = &(*at)->next) {
        if ((*at)->peer == peer && (*at)->tag == tag)
            return tb__waiters_unlink(list, at);
    }
    return NULL;
}

/* Removes the entry, if it is there. */
static inline void tb__match_remove(tb__match *m, const tb__waiter *w) {
    tb__waiters_remove(&m->bucket[tb__match_bucket(w->peer, w->tag)], w);
}

/* Removes the counterpart of a new entry from `others`. NULL: there is none, and the entry was added to `own`. */
static inline tb__waiter *tb__match_take_or_add(tb__match *others, tb__match *own, tb__waiter *w) {
    tb__waiter *other = tb__match_take(others, w->peer, w->tag);
    if (!other)
        tb__match_add(own, w);
    return other;
}

/* Removes any entry of this peer, or of all if peer is negative. NULL if there is none. */
static inline tb__waiter *tb__match_drain(tb__match *m, int32_t peer) {
    for (size_t b = 0; b < TB__MATCH_BUCKETS; b++) {
        tb__waiters *list = &m->bucket[b];
        for (tb__waiter **at = &list->first; *at; at = &(*at)->next) {
            if (peer < 0 || (*at)->peer == peer)
                return tb__waiters_unlink(list, at);
        }
    }
    return NULL;
}

/* Frees these entries. */
static inline void tb__match_free(tb__match *m, int32_t peer) {
    for (tb__waiter *w; (w = tb__match_drain(m, peer));)
        free(w);
}

#endif
