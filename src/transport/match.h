/* Who waits for what: entries found by (peer, tag), the oldest first. */
#ifndef TB_TRANSPORT_MATCH_H
#define TB_TRANSPORT_MATCH_H

#include <stddef.h>
#include <stdint.h>

/* The first member of whatever waits. */
typedef struct tb__waiter {
    struct tb__waiter *next;
    int32_t peer;
    uint64_t tag;
} tb__waiter;

enum { TB__MATCH_BUCKETS = 1024 };

/* Zero-initialised is empty. */
typedef struct tb__match {
    struct {
        tb__waiter *first, **last; /* last: where the next one goes; NULL while empty */
    } bucket[TB__MATCH_BUCKETS];
} tb__match;

static inline size_t tb__match_bucket(int32_t peer, uint64_t tag) {
    uint64_t h = (tag ^ (uint64_t)(uint32_t)peer << 40) * 0x9E3779B97F4A7C15U;
    return h >> 54;
}

static inline void tb__match_add(tb__match *m, tb__waiter *w) {
    size_t b = tb__match_bucket(w->peer, w->tag);
    if (!m->bucket[b].first)
        m->bucket[b].last = &m->bucket[b].first;
    w->next = NULL;
    *m->bucket[b].last = w;
    m->bucket[b].last = &w->next;
}

static inline void tb__match_unlink(tb__match *m, size_t b, tb__waiter **at) {
    tb__waiter *w = *at;
    *at = w->next;
    if (m->bucket[b].last == &w->next)
        m->bucket[b].last = at;
}

/* Takes out the oldest with this peer and tag; NULL if there is none. */
static inline tb__waiter *tb__match_take(tb__match *m, int32_t peer, uint64_t tag) {
    size_t b = tb__match_bucket(peer, tag);
    for (tb__waiter **at = &m->bucket[b].first; *at; at = &(*at)->next) {
        tb__waiter *w = *at;
        if (w->peer == peer && w->tag == tag) {
            tb__match_unlink(m, b, at);
            return w;
        }
    }
    return NULL;
}

/* Takes out one in particular, if it is there. */
static inline void tb__match_remove(tb__match *m, tb__waiter *w) {
    size_t b = tb__match_bucket(w->peer, w->tag);
    for (tb__waiter **at = &m->bucket[b].first; *at; at = &(*at)->next) {
        if (*at == w) {
            tb__match_unlink(m, b, at);
            return;
        }
    }
}

/* Takes out any with this peer; any at all if peer is negative. NULL if there is none. */
static inline tb__waiter *tb__match_drain(tb__match *m, int32_t peer) {
    for (size_t b = 0; b < TB__MATCH_BUCKETS; b++) {
        for (tb__waiter **at = &m->bucket[b].first; *at; at = &(*at)->next) {
            tb__waiter *w = *at;
            if (peer < 0 || w->peer == peer) {
                tb__match_unlink(m, b, at);
                return w;
            }
        }
    }
    return NULL;
}

#endif
