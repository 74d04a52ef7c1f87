/* Linear forms with bounded indices, step*x + step*x + ..., and which values they take. The addresses of a binding's
 * elements are such a form, and so are the differences between two bindings' addresses. */
#ifndef TB_LAYOUT_FORM_H
#define TB_LAYOUT_FORM_H

#include "base/error.h"

/* step*x for 0 <= x <= most; neither is negative. */
typedef struct tb__term {
    int64_t step, most;
} tb__term;

/* Whether the form takes any value from lo to hi; lo <= hi. At most 2*TB_MAX_DIMS terms, by ascending steps; their sum
 * and the bounds stay below 2^61. If bounds and divisors don't decide, indices are tried: *steps is how many may still
 * be. TB_TOO_BIG, without a message, if those are not enough. */
tb_status tb__form_reaches(const tb__term *terms, int count, int64_t lo, int64_t hi, int64_t *steps, bool *reaches);

#endif
