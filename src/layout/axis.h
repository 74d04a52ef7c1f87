/* An axis: how one tensor dimension is cut among the coordinates of the mesh dimensions that shard it.
 *
 * Seen from the indices, an axis is a partition of [0, length) into *classes*: the indices of a class are held by
 * exactly the same coordinates, its *holders*. For Shard, StridedShard and BlockShard each coordinate is a class of its
 * own, with itself as the only holder, and everything about it has a closed form, however many coordinates there are.
 * Where an Explicit placement takes part, indices may be held by several coordinates, twice by one, or by none; the
 * classes are then tabulated once. */
#ifndef TB_LAYOUT_AXIS_H
#define TB_LAYOUT_AXIS_H

#include "base/mem.h"
#include "base/wide.h"
#include "tensorbus/plan.h"

/* Limits against mistakes and attacks. */
enum {
    TB__MAX_SEGMENTS = 1 << 20,       /* of one list */
    TB__MAX_TABLE_SEGMENTS = 1 << 22, /* of all lists of an axis together */
};

typedef struct tb__axis {
    int64_t length;
    int32_t ncoords;
    int nstages;
    struct {
        const tb_placement *place;
        int64_t ways;
        int32_t stride; /* of this stage in the axis coordinate */
    } stage[TB_MAX_DIMS];
    struct tb__axis_table *table; /* NULL: closed form */
    bool distinct;                /* a coordinate that holds an index twice counts as a holder once */
    int64_t max_local;            /* the longest list of any coordinate */
} tb__axis;

/* `places` are the placements that shard this dimension, in mesh order; they must outlive the axis.
 * `distinct` is for sources: a second copy of an index in one place is never needed there. */
tb_status tb__axis_init(tb__axis *axis, int dim, int64_t length, int nstages, const tb_placement *const *places,
                        const int64_t *ways, bool distinct);
void tb__axis_fini(tb__axis *axis);
size_t tb__axis_nbytes(const tb__axis *axis); /* memory in bytes */

/* A run of global indices with its place in the holders' local order. */
typedef struct tb__span {
    int64_t start, stop;
    int64_t offset;         /* where there is one holder */
    const int64_t *offsets; /* one per holder, or NULL */
} tb__span;

typedef struct tb__spans {
    const tb__span *item;
    size_t count;
} tb__spans;

static inline int64_t tb__span_offset(const tb__span *span, int32_t holder) {
    return span->offsets ? span->offsets[holder] : span->offset;
}

/* The ordered list of indices that a coordinate holds, in local order. Spans live in the arena. */
tb_status tb__axis_list(const tb__axis *axis, int32_t coord, tb__arena *arena, tb__spans *out);

/* The length of that list. */
int64_t tb__axis_local(const tb__axis *axis, int32_t coord);

/* Classes: how many, the holders of one, and its indices in ascending order. */
int32_t tb__axis_nclasses(const tb__axis *axis);
int32_t tb__axis_nholders(const tb__axis *axis, int32_t cls);
int32_t tb__axis_holder(const tb__axis *axis, int32_t cls, int32_t holder); /* its coordinate */
tb_status tb__axis_class(const tb__axis *axis, int32_t cls, tb__arena *arena, tb__spans *out);

/* A coordinate's share in a class. One that holds an index twice has two slots in the class. */
typedef struct tb__slot {
    int32_t cls, holder;
} tb__slot;

/* The slots of a coordinate, in ascending order. */
tb_status tb__axis_slots(const tb__axis *axis, int32_t coord, tb__arena *arena, const tb__slot **out, size_t *count);
bool tb__axis_repeats(const tb__axis *axis, int32_t cls); /* whether a coordinate has two slots in it */
bool tb__axis_holds(const tb__axis *axis, int32_t cls, int32_t coord, int32_t *holder);

/* The classes that have an index in common with `spans`, ascending. */
tb_status tb__axis_meeting(const tb__axis *axis, tb__spans spans, tb__arena *arena, const int32_t **out, size_t *count);

/* The number of pairs of each class in a list of spans, counted once if counting takes a walk over the list. */
typedef struct tb__tally {
    size_t count;
    const int32_t *cls;     /* classes that have any, ascending */
    const tb__wide *before; /* pairs of all classes before; the last element is the total */
} tb__tally;

/* *out is NULL for the closed form, which needs no tally. `once`: an index counts once, however many coordinates hold
 * it; the functions below then count indices, not pairs. */
tb_status tb__axis_tally(const tb__axis *axis, tb__spans spans, bool once, tb__arena *arena, const tb__tally **out);

/* Number of (index, holder) pairs of the classes before `cls` whose index is in `spans`. With cls = nclasses: of all.
 * `tally` is that of the spans. */
tb__wide tb__axis_before(const tb__axis *axis, int32_t cls, tb__spans spans, const tb__tally *tally);

/* The class in which the pair number `position` of `spans` lies, counting as tb__axis_before does. */
int32_t tb__axis_seek(const tb__axis *axis, tb__spans spans, const tb__tally *tally, tb__wide position);

/* An index in [start, stop) that no coordinate holds, or -1. */
int64_t tb__axis_hole(const tb__axis *axis, int64_t start, int64_t stop);

/* The table of an axis with Explicit placements (axis_table.c). */
struct tb__axis_table *tb__axis_table_create(const tb__axis *axis, int dim, tb_status *status);
void tb__axis_table_destroy(struct tb__axis_table *table);

typedef struct tb__table_segment {
    int64_t start, stop;
    int32_t cls;
    size_t offsets; /* index of the first holder's local offset */
} tb__table_segment;

typedef struct tb__table_class {
    int32_t first_holder, nholders;
    bool repeats; /* a coordinate is among the holders twice */
    size_t first_span, nspans;
} tb__table_class;

typedef struct tb__axis_table {
    tb__table_segment *segment; /* ascending, disjoint */
    size_t nsegments;
    int64_t *offset;
    tb__table_class *cls;
    int32_t nclasses;
    int32_t *holder; /* coordinates, ascending within a class */
    tb__span *span;  /* of class 0, then of class 1, ... */
    tb__slot *slot;  /* of coordinate 0, then of coordinate 1, ... */
    size_t *slot_end;
} tb__axis_table;

/* The first segment that ends after `index`. */
size_t tb__table_find(const tb__axis_table *table, int64_t index);

#endif
