/* How the host device does a copy: whole, or the share of one of several threads. Moves of other kinds are job.c's. */
#ifndef TB_DEVICE_HOST_MOVE_H
#define TB_DEVICE_HOST_MOVE_H

#include "device/move.h"

/* What of a copy is to be done: indices lo .. hi-1 of one dimension. */
typedef struct tb__part {
    int dim;
    int64_t lo, hi;
} tb__part;

/* The whole. */
tb__part tb__move_whole(const tb__move *copy);

/* A share for one of several threads: what lies from `from` to `to` if the copy is `of` long. Shares that meet there
 * meet here, on a line of the destination if they can. */
tb__part tb__move_cut(const tb__move *copy, int64_t from, int64_t to, int64_t of);

/* Does a part of a copy that was checked, whose addresses are addresses. With `stream`, the destination is not left in
 * the cache, and the caller ends with the kernels' fence. Arithmetic is that of the thread's floating-point
 * environment. */
void tb__move_run(const tb__move *copy, tb__part part, bool stream);

/* Checks all copies, then does them, split evenly among the threads; returns when all are done. On failure nothing was
 * written. For host memory only; from any thread. */
tb_status tb__moves_run(const tb__move *copies, size_t n);

/* Moves one after the other on a *line*, which can be cut into pieces of like cost: ends[i] is where move i ends. */
typedef struct tb__line {
    const tb__move *moves;
    int64_t *ends;
    size_t n;
} tb__line;

void tb__line_measure(const tb__line *line);

static inline int64_t tb__line_begin(const tb__line *line, size_t move) {
    return move ? line->ends[move - 1] : 0;
}

/* Does the share from `from` to `to` of a move that is `of` long. */
typedef void tb__line_fn(void *arg, size_t move, int64_t from, int64_t to, int64_t of);

/* Does what lies from `from` to `to`. */
void tb__line_run(const tb__line *line, int64_t from, int64_t to, tb__line_fn *fn, void *arg);

#endif
