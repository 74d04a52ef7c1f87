/* Counts the messages of this process, for benchmarks: requests to the store and its answers, messages between ranks,
 * and connections opened. */
#ifndef TB_BASE_TRAFFIC_H
#define TB_BASE_TRAFFIC_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct tb__traffic {
    _Atomic uint64_t store, ranks;
} tb__traffic;

extern tb__traffic tb__traffic_total;

static inline void tb__count_message(_Atomic uint64_t *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

#endif
