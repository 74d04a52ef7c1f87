/* Matches sends with receives. Pure: both ends compute the same result, and the same error message. */
#ifndef TB_COPY_MATCH_H
#define TB_COPY_MATCH_H

#include "base/mem.h"

/* A view, its dimensions merged where memory has no gap between them. */
typedef struct tb__match_view {
    void *data;
    uint32_t item_bits;
    tb_dtype dtype; /* an integer as wide as an item; two 4-bit items are one byte */
    tb_shape shape; /* at least one dimension; [0] if it has no elements */
    int64_t nbytes; /* of all elements */
    int64_t strides[TB_MAX_DIMS];
    tb_shape common;     /* after matching: the shape that both ends use */
    bool is_invalidated; /* its memory was */
} tb__match_view;

typedef struct tb__match_op {
    uint64_t task_id;
    int32_t seat;      /* of the other end */
    uint32_t nviews;   /* at least 1 */
    size_t first_view; /* in the list of views */
    size_t number;     /* in the order of submission */
} tb__match_op;

/* One rank's operations with another rank, by task id, each once. */
typedef struct tb__match_end {
    const char *label; /* "rank 6 (inference 2)" */
    const tb__match_op *ops;
    size_t nops;
    tb__match_view *views;
} tb__match_end;

/* Checks and merges a view. The error message does not name the task. */
tb_status tb__match_read(const tb_copy_view *view, tb__match_view *out);

/* The unsigned dtype for items of so many bits; TB_DTYPE_NONE: there is none. */
tb_dtype tb__match_carrier(uint32_t item_bits);

/* Matches operations of equal position, one to one and view by view. Sets the common shapes at both ends. */
tb_status tb__match_ends(const tb__match_end *sender, const tb__match_end *receiver);

/* The strides of the view in its common shape. */
void tb__match_strides(const tb__match_view *view, int64_t *strides);

int tb__match_compare(const void *a, const void *b); /* of tb__match_op: by seat, then task id */

#endif
