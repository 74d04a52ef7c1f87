/* What is sent against what is received. Pure: both ends come to the same result, and the same sentence. */
#ifndef TB_COPY_MATCH_H
#define TB_COPY_MATCH_H

#include "base/mem.h"

/* A view, its dimensions merged where memory has no gap between them. */
typedef struct tb__match_view {
    void *data;
    uint32_t item_bits;
    tb_dtype dtype; /* an integer as wide as an item; two 4-bit items are one byte */
    tb_shape shape; /* at least one dimension; [0] if it has no elements */
    int64_t nbytes; /* follows from the above */
    int64_t strides[TB_MAX_DIMS];
    tb_shape common;     /* of a pair that was matched: the shape in which both ends see it */
    bool is_invalidated; /* its memory was */
} tb__match_view;

typedef struct tb__match_op {
    uint64_t task_id;
    int32_t seat;      /* of the other end */
    uint32_t nviews;   /* at least 1 */
    size_t first_view; /* in the list of views */
    size_t number;     /* in the order of submission */
} tb__match_op;

/* The operations of one end that go to, or come from, one rank; by task id, each once. */
typedef struct tb__match_end {
    const char *label; /* "rank 6 (inference 2)" */
    const tb__match_op *ops;
    size_t nops;
    tb__match_view *views;
} tb__match_end;

/* Checks a view. The sentence does not name the task. */
tb_status tb__match_read(const tb_copy_view *view, tb__match_view *out);

/* The dtype that carries items of so many bits; TB_DTYPE_NONE: there are none of that size. */
tb_dtype tb__match_carrier(uint32_t item_bits);

/* Whether the operations belong together, one to one and view by view; those of equal position do, then. Sets the
 * common shapes, at both ends. */
tb_status tb__match_ends(const tb__match_end *sender, const tb__match_end *receiver);

/* How the view is strided in its common shape. */
void tb__match_strides(const tb__match_view *view, int64_t *strides);

int tb__match_compare(const void *a, const void *b); /* of tb__match_op: by seat, then task id */

#endif
