/* 128-bit counts, for sums over many ranks of sizes that fill 62 bits by themselves. */
#ifndef TB_BASE_WIDE_H
#define TB_BASE_WIDE_H

#include <stdint.h>

__extension__ typedef unsigned __int128 tb__wide;

/* a / b, by the machine's 64-bit division where both fit: an order of magnitude cheaper. */
static inline tb__wide tb__wide_div(tb__wide a, tb__wide b) {
    if (((a | b) >> 64) == 0)
        return (uint64_t)a / (uint64_t)b;
    return a / b;
}

#endif
