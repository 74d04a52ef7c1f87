/* Grids: a layout laid over one shape; what one rank holds. */
#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

static void add_mesh_dim(tb__mesh_dims *dims, int64_t ways, int64_t stride) {
    dims->ways[dims->count] = ways;
    dims->stride[dims->count] = stride;
    dims->count++;
    dims->size *= ways;
}

/* Partial ops must agree, except sum with avg. */
static tb_status add_partial(tb__grid *grid, const tb_placement *place, int64_t ways, bool *has_partial) {
    tb_reduce_op op = place->op == TB_AVG ? TB_SUM : place->op;
    if (*has_partial && op != grid->op)
        return tb__fail(TB_INVALID, "Partial(%s) is mixed with another reduction; only sum and avg go together",
                        tb__reduce_op_name(place->op));
    *has_partial = true;
    grid->op = op;
    if (place->op == TB_AVG)
        grid->avg_divisor *= (uint64_t)ways;
    return TB_OK;
}

/* Explicit lists that repeat indices can make a part larger than the tensor. */
tb_shape tb__grid_longest(const tb__grid *grid) {
    tb_shape longest = grid->shape;
    for (int d = 0; d < longest.ndim; d++)
        longest.dim[d] = grid->axis[d].max_local > longest.dim[d] ? grid->axis[d].max_local : longest.dim[d];
    return longest;
}

static tb_status init_axes(tb__grid *grid, tb__side side) {
    const tb_layout *layout = grid->layout;
    for (int d = 0; d < grid->shape.ndim; d++) {
        const tb_placement *places[TB_MAX_DIMS];
        int64_t ways[TB_MAX_DIMS];
        int n = 0;
        for (int m = 0; m < layout->ndim; m++) {
            const tb_placement *place = &layout->place[m];
            if (!tb__placement_shards(place) || (place->dim < 0 ? place->dim + grid->shape.ndim : place->dim) != d)
                continue;
            places[n] = place;
            ways[n++] = layout->shape[m];
        }
        TB_TRY(tb__axis_init(&grid->axis[d], d, grid->shape.dim[d], n, places, ways, side == TB__SOURCE));
    }
    tb_shape longest = tb__grid_longest(grid);
    tb_status status = tb_shape_size(&longest, TB_U8, NULL, NULL);
    return status == TB_OK ? TB_OK : tb__fail_within(status, "the largest local part");
}

tb_status tb__grid_init(tb__grid *grid, const tb_layout *layout, const tb_shape *shape, tb__side side) {
    *grid = (tb__grid){.layout = layout, .shape = *shape, .avg_divisor = 1, .copies.size = 1, .partial.size = 1};
    TB_TRY(tb_shape_size(shape, TB_U8, NULL, NULL));
    for (int d = 0; d < TB_MAX_DIMS; d++)
        grid->axis_dims[d].size = 1;
    bool has_partial = false;
    int64_t stride = layout->nranks;
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *place = &layout->place[m];
        int64_t ways = layout->shape[m];
        stride /= ways;
        if (place->kind == TB_REPLICATE) {
            add_mesh_dim(&grid->copies, ways, stride);
        } else if (place->kind == TB_PARTIAL) {
            TB_TRY(add_partial(grid, place, ways, &has_partial));
            bool everywhere = side == TB__TARGET && place->op != TB_SUM;
            add_mesh_dim(everywhere ? &grid->copies : &grid->partial, ways, stride);
        } else {
            int d = place->dim < 0 ? place->dim + shape->ndim : place->dim;
            if (d < 0 || d >= shape->ndim)
                return tb__fail(TB_INVALID, "mesh dim %d shards dim %d of a tensor that has %d dims", m, place->dim,
                                shape->ndim);
            add_mesh_dim(&grid->axis_dims[d], ways, stride);
        }
    }
    if (side == TB__TARGET && has_partial && grid->op == TB_PRODUCT)
        return tb__fail(TB_REFUSED, "Partial(product) can't be a target");
    tb_status status = init_axes(grid, side);
    if (status != TB_OK)
        tb__grid_fini(grid);
    return status;
}

void tb__grid_fini(tb__grid *grid) {
    for (int d = 0; d < grid->shape.ndim && d < TB_MAX_DIMS; d++)
        tb__axis_fini(&grid->axis[d]);
}

size_t tb__grid_nbytes(const tb__grid *grid) {
    size_t nbytes = 0;
    for (int d = 0; d < grid->shape.ndim; d++)
        nbytes += tb__axis_nbytes(&grid->axis[d]);
    return nbytes;
}

/* Converts an index in the mesh to an index in `dims`, and back. */
static int32_t index_in(const tb__mesh_dims *dims, int32_t mesh_index) {
    int64_t index = 0;
    for (int i = 0; i < dims->count; i++)
        index = index * dims->ways[i] + mesh_index / dims->stride[i] % dims->ways[i];
    return (int32_t)index;
}

static int64_t mesh_offset(const tb__mesh_dims *dims, int32_t index) {
    int64_t offset = 0, left = index;
    for (int i = dims->count - 1; i > 0; i--) {
        offset += left % dims->ways[i] * dims->stride[i];
        left /= dims->ways[i];
    }
    return dims->count ? offset + left * dims->stride[0] : 0;
}

bool tb__grid_place(const tb__grid *grid, int32_t rank, tb__place *out) {
    int32_t index = tb_layout_index_of(grid->layout, rank);
    if (index < 0)
        return false;
    for (int d = 0; d < grid->shape.ndim; d++)
        out->coord[d] = index_in(&grid->axis_dims[d], index);
    out->copy = index_in(&grid->copies, index);
    out->part = index_in(&grid->partial, index);
    return true;
}

int32_t tb__grid_rank(const tb__grid *grid, const tb__place *place) {
    int64_t index = mesh_offset(&grid->copies, place->copy) + mesh_offset(&grid->partial, place->part);
    for (int d = 0; d < grid->shape.ndim; d++)
        index += mesh_offset(&grid->axis_dims[d], place->coord[d]);
    return tb_layout_rank_at(grid->layout, (int32_t)index);
}

tb_status tb_layout_check(const tb_layout *layout, const tb_shape *shape) {
    tb__grid grid;
    TB_TRY(tb__grid_init(&grid, layout, shape, TB__SOURCE));
    tb__grid_fini(&grid);
    return TB_OK;
}

static tb_status fill_local(const tb__grid *grid, int32_t rank, tb_local *local, tb__arena *arena) {
    tb__place place;
    local->shape.ndim = grid->shape.ndim;
    if (!tb__grid_place(grid, rank, &place))
        return TB_OK;
    for (int d = 0; d < grid->shape.ndim; d++) {
        tb__spans list;
        TB_TRY(tb__axis_list(&grid->axis[d], place.coord[d], arena, &list));
        local->segments[d] = tb__malloc(list.count, sizeof *local->segments[d]);
        if (!local->segments[d])
            return TB_NO_MEMORY;
        local->nsegments[d] = list.count;
        for (size_t i = 0; i < list.count; i++) {
            local->segments[d][i] = (tb_segment){list.item[i].start, list.item[i].stop};
            local->shape.dim[d] += list.item[i].stop - list.item[i].start;
        }
    }
    return TB_OK;
}

tb_status tb_layout_local(const tb_layout *layout, const tb_shape *shape, int32_t rank, tb_local *out) {
    tb__grid grid;
    TB_TRY(tb__grid_init(&grid, layout, shape, TB__SOURCE));
    tb__arena arena = {0};
    tb_local local = {0};
    tb_status status = fill_local(&grid, rank, &local, &arena);
    tb__arena_fini(&arena);
    tb__grid_fini(&grid);
    if (status != TB_OK) {
        tb_local_fini(&local);
        return status;
    }
    *out = local;
    return TB_OK;
}

void tb_local_fini(tb_local *local) {
    for (int d = 0; d < TB_MAX_DIMS; d++)
        free(local->segments[d]);
    *local = (tb_local){0};
}
