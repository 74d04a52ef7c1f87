/* Whether bindings touch the same bytes. Exact: interleaved views of one allocation do not overlap, although the ranges
 * they span do. The memory itself is not accessed. */
#ifndef TB_LAYOUT_OVERLAP_H
#define TB_LAYOUT_OVERLAP_H

#include "base/error.h"

/* The bytes a binding spans, first .. last-1; equal if it has no elements. TB_TOO_BIG if there are more than 2^58, or
 * some are outside the address space. */
tb_status tb__binding_span(const tb_binding *binding, uintptr_t *first, uintptr_t *last);

/* Finds two of the n bindings that share a byte: *a < *b are their positions; *a == n: there are none. Two halves of
 * one byte count as shared. A binding that uses an element twice (stride 0, or strides that fold it onto itself) counts
 * as a pair of its own: *a == *b. TB_TOO_BIG, with a message that names the two, if that can't be decided at reasonable
 * cost. */
tb_status tb__bindings_find_overlap(const tb_binding *bindings, size_t n, size_t *a, size_t *b);

/* Marks each binding of the first list that shares a byte with any of the second: marks[i] says so. Marks are undefined
 * after a failure. */
tb_status tb__bindings_mark_overlaps(const tb_binding *bindings, size_t n, const tb_binding *others, size_t nothers,
                                     bool *marks);

#endif
