/* How large a layout is, and how much work it asks for, so that no input takes seconds. */
#ifndef TB_TESTS_FUZZ_COST_H
#define TB_TESTS_FUZZ_COST_H

#include "fuzz.h"
#include "layout/layout.h"

static inline bool has_explicit(const tb_layout *layout) {
    for (int m = 0; m < layout->ndim; m++) {
        if (layout->place[m].kind == TB_EXPLICIT)
            return true;
    }
    return false;
}

static inline void note_sizes(const tb_layout *layout, const tb_shape *shape) {
    for (int d = 0; d < shape->ndim; d++)
        note_magnitude(0, shape->dim[d]);
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *place = &layout->place[m];
        note_magnitude(1, layout->shape[m]);
        note_magnitude(2, place->split);
        if (place->nsizes)
            note_magnitude(3, place->sizes[0]);
        if (place->nlists && place->list_ends[0])
            note_magnitude(4, place->segments[0].stop);
    }
}

/* An upper bound of the segments in one rank's list of dim d. */
static inline double count_segments(const tb_layout *layout, const tb_shape *shape, int d) {
    double count = 1, length = (double)shape->dim[d];
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *place = &layout->place[m];
        if (!tb__placement_shards(place) || (place->dim < 0 ? place->dim + shape->ndim : place->dim) != d)
            continue;
        if (place->kind == TB_STRIDED_SHARD) {
            count += (double)place->split < length ? (double)place->split : length;
        } else if (place->kind == TB_BLOCK_SHARD) {
            count += (double)place->nsizes;
        } else if (place->kind == TB_EXPLICIT) { /* which may repeat the whole list */
            count *= 1 + (double)place->list_ends[place->nlists - 1];
            length *= 1 + (double)place->list_ends[place->nlists - 1];
        }
    }
    return count;
}

/* Whether the lists of so many ranks are quickly made. */
static inline bool lists_are_short(const tb_layout *layout, const tb_shape *shape, int32_t nranks) {
    double count = 0;
    for (int d = 0; d < shape->ndim; d++)
        count += count_segments(layout, shape, d) * (double)nranks;
    return count <= 1 << 14;
}

#endif
