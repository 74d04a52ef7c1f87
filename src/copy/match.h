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
    uint64_t memory_kind; /* of its data (device.h) */
    tb_shape common;      /* set by matching: the shape that both ends use ... */
    uint64_t common_kind; /* ... and the kinds of memory of both */
    bool is_invalidated;  /* its memory was */
    /* The original ones, for copies that cast and broadcast. */
    tb_dtype given_dtype;
    tb_shape given_shape;
    int64_t given_strides[TB_MAX_DIMS];
} tb__match_view;

typedef struct tb__match_op {
    uint64_t task_id; /* for operations without one: the number of earlier ones with the same seat */
    bool has_no_id;   /* it was submitted with TB_NO_TASK */
    int32_t seat;     /* of the other end */
    uint32_t nviews;
    size_t first_view; /* in the list of views */
    size_t number;     /* in the order of submission */
} tb__match_op;

/* "task 7", or "operation 2 without a task id". */
typedef struct tb__op_name {
    char text[64];
} tb__op_name;
tb__op_name tb__match_name(const tb__match_op *op);

/* One rank's operations with another rank, as tb__match_compare sorts them. */
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

/* Matches operations of equal position, one to one and view by view. Sets the common shapes at both ends. `converts`:
 * if dtypes or shapes differ, the source is cast and broadcast to the target, and both views get their given dtypes;
 * only for copies within a rank. */
tb_status tb__match_ends(const tb__match_end *sender, const tb__match_end *receiver, bool converts);

/* The strides of the view in its common shape. */
void tb__match_strides(const tb__match_view *view, int64_t *strides);

/* Of tb__match_op: by seat, those without a task id last, by task id, and as submitted. */
int tb__match_compare(const void *a, const void *b);
bool tb__match_is_same_task(const tb__match_op *a, const tb__match_op *b);

#endif
