/* Integers: minimum, maximum, alignment, search, comparators for qsort, binary search. */
#ifndef TB_BASE_INT_H
#define TB_BASE_INT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline int64_t tb__min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t tb__max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline size_t tb__min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Rounds n up to a multiple. */
static inline int64_t tb__align(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* Whether the list contains the number. */
static inline bool tb__has_int32(const int32_t *list, size_t count, int32_t number) {
    for (size_t i = 0; i < count; i++) {
        if (list[i] == number)
            return true;
    }
    return false;
}

/* For qsort. */
static inline int tb__compare_int32(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static inline int tb__compare_int64(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static inline int tb__compare_uint64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Binary search: sets the variable i to the first number in i .. end-1 for which the claim, an expression in i, is
 * true; to `end` if there is none. The claim must be true for all numbers after that one. */
#define TB_BISECT(i, end, claim)                                                                                       \
    do {                                                                                                               \
        __typeof__(i) low_ = (i), high_ = (end);                                                                       \
        while (low_ < high_) {                                                                                         \
            (i) = low_ + (high_ - low_) / 2;                                                                           \
            if (claim)                                                                                                 \
                high_ = (i);                                                                                           \
            else                                                                                                       \
                low_ = (i) + 1;                                                                                        \
        }                                                                                                              \
        (i) = low_;                                                                                                    \
    } while (0)

#endif
