/* A tensor cut up by a layout: per dim, the parts between two cuts and their holders. Because a layout is a product,
 * the cells of the picture are the products of those parts. */
#include "tools/svg.h"

#include "base/int.h"

#include <string.h>

enum {
    MOST_PARTS = 160,  /* along an axis of the picture */
    MOST_OWNERS = 256, /* that are listed for one cell */
};

static bool cuts(const tb_layout *layout, int ndim, int d) {
    for (int m = 0; layout && m < layout->ndim; m++) {
        const tb_placement *place = &layout->place[m];
        if (tb__placement_shards(place) && (place->dim < 0 ? place->dim + ndim : place->dim) == d &&
            (layout->shape[m] > 1 || place->kind == TB_EXPLICIT))
            return true;
    }
    return false;
}

svg_axes svg_choose_axes(const tb_layout *layout, const tb_layout *other, const tb_shape *shape) {
    svg_axes axes = {0};
    int n = shape->ndim, row = 0;
    if (n == 1)
        axes.column[axes.ncolumns++] = 0;
    if (n < 2)
        return axes;
    if (n > 2) {
        while (row < n && !cuts(layout, n, row) && !cuts(other, n, row))
            row++;
        row = row < n ? row : 0;
    }
    axes.row[axes.nrows++] = row;
    for (int d = 0; d < n; d++) {
        if (d != row)
            axes.column[axes.ncolumns++] = d;
    }
    return axes;
}

typedef TB_VEC(int64_t) bound_list;

/* Every index at which some coordinate's part begins or ends; may stop once there are more than MOST_PARTS. */
static tb_status find_bounds(const tb__axis *axis, bound_list *bounds) {
    tb__arena arena = {0};
    tb_status status = tb__vec_push(bounds, 0) && tb__vec_push(bounds, axis->length) ? TB_OK : TB_NO_MEMORY;
    for (int32_t c = 0; c < axis->ncoords && status == TB_OK; c++) {
        tb__spans list;
        tb__arena_reset(&arena);
        status = tb__axis_list(axis, c, &arena, &list);
        for (size_t i = 0; status == TB_OK && i < list.count; i++) {
            if (!tb__vec_push(bounds, list.item[i].start) || !tb__vec_push(bounds, list.item[i].stop))
                status = TB_NO_MEMORY;
            if (bounds->count > (size_t)8 * MOST_PARTS)
                tb__vec_sort_unique(bounds, tb__compare_int64);
            if (bounds->count > (size_t)4 * MOST_PARTS)
                break;
        }
        if (bounds->count > (size_t)4 * MOST_PARTS)
            break;
    }
    tb__arena_fini(&arena);
    tb__vec_sort_unique(bounds, tb__compare_int64);
    return status;
}

static tb_status class_at(const tb__axis *axis, int64_t index, tb__arena *arena, int32_t *out) {
    tb__span span = {.start = index, .stop = index + 1};
    const int32_t *found;
    size_t count;
    TB_TRY(tb__axis_meeting(axis, (tb__spans){&span, 1}, arena, &found, &count));
    *out = count > 0 ? found[0] : -1;
    return TB_OK;
}

/* 0..1023. Samples at even distances would show a pattern that is not there. */
static size_t scatter(size_t i) {
    return (i * 2654435761U >> 7) % 1024;
}

/* Sets the parts of a dim: those between two bounds or, if `nsamples` is given, as many of equal size. */
static tb_status set_parts(svg_cut *cut, int d, const bound_list *bounds, size_t nsamples) {
    const tb__axis *axis = &cut->grid.axis[d];
    svg_dim *dim = &cut->dim[d];
    size_t n = nsamples ? nsamples : bounds->count - 1;
    dim->length = axis->length;
    dim->is_sampled = nsamples > 0;
    dim->nparts = 0;
    dim->bound = tb__arena_alloc(&cut->arena, n + 1, sizeof *dim->bound);
    dim->cls = tb__arena_alloc(&cut->arena, n, sizeof *dim->cls);
    if (!dim->bound || !dim->cls)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n; i++) {
        int64_t start, probe;
        int32_t cls;
        if (nsamples) {
            start = (int64_t)((tb__wide)(uint64_t)axis->length * i / n);
            probe = (int64_t)((tb__wide)(uint64_t)axis->length * (1024 * i + scatter(i)) / n / 1024);
        } else {
            start = probe = bounds->item[i];
        }
        TB_TRY(class_at(axis, probe, &cut->arena, &cls));
        if (dim->nparts > 0 && dim->cls[dim->nparts - 1] == cls)
            continue;
        dim->bound[dim->nparts] = start;
        dim->cls[dim->nparts++] = cls;
    }
    dim->bound[dim->nparts] = axis->length;
    return TB_OK;
}

static size_t parts_along(const svg_cut *cut, const int *dims, int ndims) {
    size_t n = 1;
    for (int i = 0; i < ndims; i++)
        n *= cut->dim[dims[i]].nparts;
    return n;
}

/* Cuts the dims of one axis; if there are too many parts, the dims share the number that can be drawn. */
static tb_status cut_axis(svg_cut *cut, const int *dims, int ndims) {
    int ncut = 0;
    size_t most = MOST_PARTS, product = 1;
    bound_list bounds[TB_MAX_DIMS];
    memset(bounds, 0, sizeof bounds);
    tb_status status = TB_OK;
    for (int i = 0; i < ndims && status == TB_OK; i++) {
        status = find_bounds(&cut->grid.axis[dims[i]], &bounds[i]);
        ncut += bounds[i].count > 2;
        if (product <= MOST_PARTS)
            product *= bounds[i].count > 2 ? bounds[i].count - 1 : 1;
    }
    if (product > MOST_PARTS) {
        static const size_t share[] = {MOST_PARTS, MOST_PARTS, 12, 5, 3};
        most = ncut <= 4 ? share[ncut] : 2;
    }
    for (int i = 0; i < ndims && status == TB_OK; i++) {
        bool is_sampled = bounds[i].count > 0 && bounds[i].count - 1 > most;
        if (cut->grid.axis[dims[i]].length > 0)
            status = set_parts(cut, dims[i], &bounds[i], is_sampled ? most : 0);
    }
    for (int i = 0; i < ndims; i++)
        free(bounds[i].item);
    return status;
}

tb_status svg_cut_init(svg_cut *cut, const tb_layout *layout, const tb_shape *shape, const svg_axes *axes) {
    memset(cut, 0, sizeof *cut);
    cut->axes = *axes;
    TB_TRY(tb__grid_init(&cut->grid, layout, shape, TB__SOURCE));
    tb_status status = cut_axis(cut, axes->row, axes->nrows);
    if (status == TB_OK)
        status = cut_axis(cut, axes->column, axes->ncolumns);
    if (status != TB_OK) {
        svg_cut_fini(cut);
        return status;
    }
    cut->nrows = parts_along(cut, axes->row, axes->nrows);
    cut->ncolumns = parts_along(cut, axes->column, axes->ncolumns);
    return TB_OK;
}

void svg_cut_fini(svg_cut *cut) {
    tb__grid_fini(&cut->grid);
    tb__arena_fini(&cut->arena);
    free(cut->owners.item);
}

bool svg_cut_is_sampled(const svg_cut *cut) {
    bool result = false;
    for (int d = 0; d < cut->grid.shape.ndim; d++)
        result |= cut->dim[d].is_sampled;
    return result;
}

int svg_cut_dim(const svg_cut *cut, const int *dims, int ndims) {
    int found = ndims == 1 ? dims[0] : -1;
    for (int i = 0; ndims > 1 && i < ndims; i++) {
        if (cut->dim[dims[i]].nparts <= 1)
            continue;
        if (found >= 0)
            return -1;
        found = dims[i];
    }
    return found;
}

/* Where part `index` of an axis lies, as fractions; the dims are nested, the first outermost. */
static void locate(const svg_cut *cut, const int *dims, int ndims, size_t index, svg_cell *cell, int32_t *cls,
                   double *start, double *size) {
    size_t part[TB_MAX_DIMS] = {0};
    for (int i = ndims - 1; i >= 0; i--) {
        part[i] = index % cut->dim[dims[i]].nparts;
        index /= cut->dim[dims[i]].nparts;
    }
    *start = 0;
    *size = 1;
    for (int i = 0; i < ndims; i++) {
        const svg_dim *dim = &cut->dim[dims[i]];
        cell->start[dims[i]] = dim->bound[part[i]];
        cell->stop[dims[i]] = dim->bound[part[i] + 1];
        cls[dims[i]] = dim->cls[part[i]];
        *start += *size * (double)dim->bound[part[i]] / (double)dim->length;
        *size *= (double)(dim->bound[part[i] + 1] - dim->bound[part[i]]) / (double)dim->length;
    }
}

/* The ranks that hold a cell: a holder per dim, any copy, any contribution. */
static tb_status find_owners(svg_cut *cut, const int32_t *cls, int64_t *total) {
    const tb__grid *grid = &cut->grid;
    cut->owners.count = 0;
    *total = grid->copies.size * grid->partial.size;
    for (int d = 0; d < grid->shape.ndim; d++)
        *total *= cls[d] < 0 ? 0 : tb__axis_nholders(&grid->axis[d], cls[d]);
    for (int64_t i = 0; i < *total && i < MOST_OWNERS; i++) {
        tb__place place = {0};
        int64_t left = i;
        place.part = (int32_t)(left % grid->partial.size);
        left /= grid->partial.size;
        for (int d = grid->shape.ndim - 1; d >= 0; d--) {
            int32_t n = tb__axis_nholders(&grid->axis[d], cls[d]);
            place.coord[d] = tb__axis_holder(&grid->axis[d], cls[d], (int32_t)(left % n));
            left /= n;
        }
        place.copy = (int32_t)left;
        if (!tb__vec_push(&cut->owners, tb__grid_rank(grid, &place)))
            return TB_NO_MEMORY;
    }
    if (cut->owners.count > 1)
        qsort(cut->owners.item, cut->owners.count, sizeof *cut->owners.item, tb__compare_int32);
    return TB_OK;
}

tb_status svg_cut_cell(svg_cut *cut, size_t row, size_t column, svg_cell *out) {
    int32_t cls[TB_MAX_DIMS] = {0};
    *out = (svg_cell){0};
    locate(cut, cut->axes.row, cut->axes.nrows, row, out, cls, &out->y, &out->h);
    locate(cut, cut->axes.column, cut->axes.ncolumns, column, out, cls, &out->x, &out->w);
    TB_TRY(find_owners(cut, cls, &out->total_owners));
    out->owners = cut->owners.item;
    out->nowners = cut->owners.count;
    return TB_OK;
}
