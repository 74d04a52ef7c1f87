/* Views inside the library.
 *
 * Every view turns a storage dim into *digits*: a storage index is the storage dim's first index plus digit * stride,
 * summed over its digits. Splits make digits, slices shorten them and move the first index, permutations carry them
 * around; a canonical dim has one digit, or several after a merge, the slowest first.
 *
 * What a rank holds of a storage dim is an ordered list of indices (axis.h). It can be expressed in digits if it is a
 * product of one list for each digit, and its positions are evenly spaced along every digit: then each digit has a
 * stride in the rank's memory, and its list contains the digit's values that the rank has. */
#ifndef TB_RESHARD_VIEW_H
#define TB_RESHARD_VIEW_H

#include "layout/layout.h"

enum { TB__MAX_DIGITS = 16 }; /* of all dims together */

typedef enum tb__view_kind { TB__SPLIT, TB__MERGE, TB__PERMUTE, TB__SLICE, TB__PAD } tb__view_kind;

typedef struct tb__view_op {
    tb__view_kind kind;
    int nargs;
    int64_t arg[1 + TB_MAX_DIMS]; /* as written */
} tb__view_op;

struct tb_view {
    size_t nops;
    tb__view_op *op;
};

typedef struct tb__digit {
    int axis;       /* the storage dim */
    int64_t stride; /* in its indices */
    int64_t count;
} tb__digit;

/* The result of a view for a shape. */
typedef struct tb__form {
    int ndim;
    int first_digit[TB_MAX_DIMS + 1]; /* of each dim; one more at the end */
    tb__digit digit[TB__MAX_DIGITS];
    int naxes;
    int64_t length[TB_MAX_DIMS]; /* of each storage dim */
    int64_t start[TB_MAX_DIMS];  /* its first index */
} tb__form;

tb_status tb__form_init(tb__form *form, const tb_shape *storage, const tb__view_op *ops, size_t nops);
tb_shape tb__form_shape(const tb__form *form);
int tb__form_whole(const tb__form *form, int axis); /* the dim that is the unchanged storage dim, or -1 */

/* Some values of a digit, in the order a rank has them: adjacent segments are joined. */
typedef struct tb__values {
    tb_segment *item;
    size_t count;
    int64_t length;
} tb__values;

/* A rank's share of a storage dim, by digit of the form; entries of other storage dims' digits stay. */
typedef struct tb__share {
    bool is_empty;
    int64_t origin; /* position of the first element in the rank's list */
    tb__values values[TB__MAX_DIGITS];
    int64_t step[TB__MAX_DIGITS]; /* positions from one value to the next; only where there are two */
} tb__share;

/* The share of ranks that hold `list` of storage dim `axis`. TB_REFUSED if it is no product. Lists in the arena. */
tb_status tb__share_find(const tb__form *form, int axis, tb__spans list, tb__arena *arena, tb__share *out);

bool tb__values_equal(const tb__values *a, const tb__values *b);
bool tb__values_append(tb__values *values, size_t *capacity, tb__arena *arena, int64_t start, int64_t stop);

#endif
