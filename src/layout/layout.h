/* Layouts inside the library: the layout itself, and a grid, which is a layout laid over one shape.
 *
 * A layout is a product: each tensor dimension is cut by the mesh dimensions that shard it, independently of the other
 * tensor dimensions. So a grid is one axis per tensor dimension (axis.h), plus the mesh dimensions that copy the tensor
 * (Replicate) and those over which it is a sum of contributions (Partial). */
#ifndef TB_LAYOUT_LAYOUT_H
#define TB_LAYOUT_LAYOUT_H

#include "layout/axis.h"
#include "tensorbus/plan.h"

#include <jansson.h>
#include <stdatomic.h>

struct tb_layout {
    atomic_int refs;
    int ndim; /* of the mesh */
    int64_t shape[TB_MAX_DIMS];
    tb_placement place[TB_MAX_DIMS]; /* owns its arrays */
    int32_t nranks;
    int32_t *ranks; /* row-major; NULL: first, first+1, ... */
    int32_t first;
    uint64_t *by_rank; /* rank << 32 | mesh index, ascending; NULL like ranks */
    uint64_t hash;
};

tb_layout *tb__layout_ref(const tb_layout *layout);
size_t tb__layout_nbytes(const tb_layout *layout); /* memory in bytes */
/* The lowest rank of the mesh that is not below `rank`; TB_NO_RANK: there is none. */
int32_t tb__layout_rank_from(const tb_layout *layout, int32_t rank);

/* Placements. A parsed one owns its arrays, which fini frees. */
tb_status tb__placement_parse(const char **at, tb_placement *out);
tb_status tb__placement_from_json(const json_t *json, tb_placement *out);
/* Only the fields of its kind: two copies of equal placements are equal field by field. */
tb_status tb__placement_copy(const tb_placement *from, tb_placement *out);
void tb__placement_fini(tb_placement *placement);
bool tb__placement_shards(const tb_placement *placement);
const char *tb__placement_tag(tb_placement_kind kind); /* "SS", as in JSON; NULL if kind is invalid */
const char *tb__reduce_op_name(tb_reduce_op op);
bool tb__reduce_op_read(const char *name, tb_reduce_op *out);

/* {"mesh":[2,2],"ranks":[4,5,6,7],"placements":[["R"],["S",1]]} */
tb_status tb__layout_from_json(const json_t *json, tb_layout **out);
tb_status tb__shape_from_json(const json_t *json, tb_shape *out);

/* The mesh dimensions of one role outside the axes. */
typedef struct tb__mesh_dims {
    int count;
    int64_t ways[TB_MAX_DIMS], stride[TB_MAX_DIMS];
    int64_t size; /* product of ways */
} tb__mesh_dims;

typedef struct tb__grid {
    const tb_layout *layout; /* borrowed */
    tb_shape shape;
    tb__axis axis[TB_MAX_DIMS];
    tb__mesh_dims axis_dims[TB_MAX_DIMS]; /* mesh dimensions that cut this axis */
    tb__mesh_dims copies;                 /* mesh dimensions over which every coordinate holds the same */
    tb__mesh_dims partial;                /* mesh dimensions over which coordinates hold different contributions */
    uint64_t avg_divisor;                 /* product of the sizes of Partial(avg) dims */
    tb_reduce_op op;                      /* of the partial dims; TB_SUM if all are avg */
} tb__grid;

typedef enum tb__side {
    TB__SOURCE,
    TB__TARGET, /* Partial(avg, min, max) puts the value everywhere: such mesh dimensions are copies */
} tb__side;

/* Checks that the layout fits the shape. The layout must outlive the grid. */
tb_status tb__grid_init(tb__grid *grid, const tb_layout *layout, const tb_shape *shape, tb__side side);
void tb__grid_fini(tb__grid *grid);
size_t tb__grid_nbytes(const tb__grid *grid); /* memory in bytes, without the layout */

/* The largest part of any rank, per dimension, and at least the tensor's own shape. */
tb_shape tb__grid_longest(const tb__grid *grid);

/* A rank's position in a grid. */
typedef struct tb__place {
    int32_t coord[TB_MAX_DIMS]; /* per axis */
    int32_t copy, part;         /* index in copies, in partial */
} tb__place;

bool tb__grid_place(const tb__grid *grid, int32_t rank, tb__place *out); /* false: not in the mesh */
int32_t tb__grid_rank(const tb__grid *grid, const tb__place *place);

#endif
