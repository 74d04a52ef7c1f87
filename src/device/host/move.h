/* Copies on the host: whole, or a thread's share. job.c does other kinds of moves. */
#ifndef TB_DEVICE_HOST_MOVE_H
#define TB_DEVICE_HOST_MOVE_H

#include "device/move.h"

/* A share of a copy: indices lo .. hi-1 of one dimension. */
typedef struct tb__move_share {
    int dim;
    int64_t lo, hi;
} tb__move_share;

/* Whether the bytes are copied as they are. */
bool tb__move_is_plain(const tb__move *copy);

/* The whole. */
tb__move_share tb__move_whole(const tb__move *copy);

/* The share from `from` to `to` of a copy that costs `of`. Adjacent shares meet, at a cache line of the destination if
 * possible. */
tb__move_share tb__move_cut(const tb__move *copy, int64_t from, int64_t to, int64_t of);

/* Does a share of a checked copy without mappings and buffers. With `stream`, stores bypass the cache, and the caller
 * calls the kernels' fence at the end. Uses the thread's floating-point environment. */
void tb__move_run(const tb__move *copy, tb__move_share part, bool stream);

/* Fills the page tables of this process for all memory of the share that has pages; allocates none. */
void tb__move_fill_page_tables(const tb__move *copy, tb__move_share part);

/* Checks all copies, then does them, split evenly among the threads; returns when all are done. On failure nothing was
 * written. For host memory only; from any thread. */
tb_status tb__moves_run(const tb__move *copies, size_t n);

/* Cumulative costs of moves, to divide them into shares of equal cost: move i costs ends[i] - ends[i - 1]. */
typedef struct tb__move_costs {
    const tb__move *moves;
    int64_t *ends;
    size_t n;
} tb__move_costs;

void tb__move_costs_measure(const tb__move_costs *costs);

static inline int64_t tb__move_costs_begin(const tb__move_costs *costs, size_t move) {
    return move ? costs->ends[move - 1] : 0;
}

/* Does the share from `from` to `to` of a move that costs `of`. */
typedef void tb__share_fn(void *arg, size_t move, int64_t from, int64_t to, int64_t of);

/* Calls fn for the moves' shares between costs `from` and `to`. */
void tb__move_costs_run(const tb__move_costs *costs, int64_t from, int64_t to, tb__share_fn *fn, void *arg);

#endif
