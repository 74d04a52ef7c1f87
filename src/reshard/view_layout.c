/* Computes the layout of a canonical tensor from that of the stored tensor.
 *
 * Each digit of the view has, for every coordinate of its storage dim's axis, a list of values. A mesh dim that moves
 * no digit's list is Replicate. The others must each belong to one canonical dim: then that dim's lists become Shard if
 * they have that form, else Explicit; several mesh dims of one Explicit are joined, and a mesh dim that moves two dims
 * is split in two. Joined mesh dims need not be neighbours, so the ranks are listed anew. */
#include "reshard/view.h"

#include <inttypes.h>
#include <string.h>

/* A dimension of the new mesh, before any are joined. */
typedef struct way {
    int axis;           /* that it cuts; -1: none */
    int64_t size;       /* coordinates */
    int64_t stride;     /* in the axis' coordinates, or in the old mesh if it cuts none */
    tb_placement place; /* the old one, borrowed; Shard for those that were split */
    int dim;            /* canonical dim that it belongs to; -1: none */
} way;

enum { MAX_WAYS = TB_MAX_DIMS + 1 };

typedef struct viewing {
    tb__form form;
    tb_shape shape; /* canonical */
    tb__grid grid;
    tb__arena arena;
    tb__share *share[TB_MAX_DIMS]; /* by axis and coordinate; NULL: the axis is whole in one canonical dim */
    int whole_dim[TB_MAX_DIMS];    /* by axis: that dim, or -1 */
    int nways;
    way way[MAX_WAYS];
} viewing;

static int dim_of_digit(const tb__form *form, int digit) {
    int d = 0;
    while (digit >= form->first_digit[d + 1])
        d++;
    return d;
}

static void collect_ways(viewing *v, const tb_layout *layout) {
    int nstages[TB_MAX_DIMS] = {0};
    int64_t stride = layout->nranks;
    for (int m = 0; m < layout->ndim; m++) {
        way *w = &v->way[v->nways++];
        *w = (way){.axis = -1, .size = layout->shape[m], .place = layout->place[m], .dim = -1};
        stride /= w->size;
        w->stride = stride;
        if (!tb__placement_shards(&w->place))
            continue;
        w->axis = w->place.dim < 0 ? w->place.dim + v->grid.shape.ndim : w->place.dim;
        w->stride = v->grid.axis[w->axis].stage[nstages[w->axis]++].stride;
        w->dim = v->whole_dim[w->axis];
    }
}

/* A coordinate without elements gets the others' lists for every digit but one, which is empty. */
static tb_status fill_empty(viewing *v, int axis) {
    int32_t ncoords = v->grid.axis[axis].ncoords, full = 0;
    tb__share *share = v->share[axis];
    while (full < ncoords && share[full].is_empty)
        full++;
    bool is_moving = false;
    for (int i = v->form.first_digit[v->form.ndim] - 1; i >= 0; i--) {
        if (v->form.digit[i].axis != axis)
            continue;
        bool moves = false;
        bool is_last = true; /* so far: one digit has to be empty */
        for (int j = 0; j < i; j++)
            is_last &= v->form.digit[j].axis != axis;
        for (int32_t c = full + 1; c < ncoords; c++)
            moves |= !share[c].is_empty && !tb__values_equal(&share[c].values[i], &share[full].values[i]);
        is_moving |= moves;
        for (int32_t c = 0; c < ncoords; c++) {
            if (!share[c].is_empty)
                continue;
            share[c].values[i] = (tb__values){0};
            if (moves || (is_last && !is_moving))
                continue;
            if (full < ncoords) {
                share[c].values[i] = share[full].values[i];
            } else {
                size_t capacity = 0;
                if (!tb__values_append(&share[c].values[i], &capacity, &v->arena, 0, v->form.digit[i].count))
                    return TB_NO_MEMORY;
            }
        }
    }
    return TB_OK;
}

/* Digits of one axis in one dim must be consecutive in the memory of every rank, so that all refuse alike. */
static tb_status check_merged(const viewing *v, int axis, const tb__share *share) {
    for (int d = 0; d < v->form.ndim; d++) {
        int fast = -1; /* the next faster digit with several values, if no other axis' stands between */
        for (int i = v->form.first_digit[d + 1] - 1; i >= v->form.first_digit[d]; i--) {
            if (v->form.digit[i].axis != axis) {
                fast = -1;
                continue;
            }
            if (share->values[i].length == 1)
                continue;
            if (fast >= 0 && share->step[i] != share->step[fast] * share->values[fast].length)
                return tb__fail(TB_REFUSED, "dim %d of the view is merged from dims that do not follow on one another",
                                d);
            fast = i;
        }
    }
    return TB_OK;
}

static tb_status find_shares(viewing *v) {
    for (int a = 0; a < v->form.naxes; a++) {
        v->whole_dim[a] = tb__form_whole(&v->form, a);
        if (v->whole_dim[a] >= 0)
            continue;
        const tb__axis *axis = &v->grid.axis[a];
        v->share[a] = tb__arena_alloc(&v->arena, (size_t)axis->ncoords, sizeof *v->share[a]);
        if (!v->share[a])
            return TB_NO_MEMORY;
        for (int32_t c = 0; c < axis->ncoords; c++) {
            tb__spans list;
            TB_TRY(tb__axis_list(axis, c, &v->arena, &list));
            TB_TRY(tb__share_find(&v->form, a, list, &v->arena, &v->share[a][c]));
            if (!v->share[a][c].is_empty)
                TB_TRY(check_merged(v, a, &v->share[a][c]));
        }
        TB_TRY(fill_empty(v, a));
    }
    return TB_OK;
}

/* Whether the values of a digit depend on where a rank stands along part of its axis: on coord / stride % size. */
static bool depends_on(const viewing *v, int digit, int64_t stride, int64_t size) {
    int axis = v->form.digit[digit].axis;
    const tb__share *share = v->share[axis];
    for (int64_t c = 0; c < v->grid.axis[axis].ncoords; c++) {
        int64_t along = c / stride % size;
        if (along > 0 && !tb__values_equal(&share[c].values[digit], &share[c - along * stride].values[digit]))
            return true;
    }
    return false;
}

/* The canonical dims whose lists depend on it, one bit each. */
static unsigned dims_moved(const viewing *v, int axis, int64_t stride, int64_t size) {
    unsigned dims = 0;
    for (int i = 0; i < v->form.first_digit[v->form.ndim]; i++) {
        if (v->form.digit[i].axis == axis && depends_on(v, i, stride, size))
            dims |= 1U << dim_of_digit(&v->form, i);
    }
    return dims;
}

static bool is_single(unsigned bits) {
    return bits && !(bits & (bits - 1));
}

/* Splits a mesh dim that moves two canonical dims into one mesh dim for each. */
static tb_status split_way(viewing *v, int at) {
    way *w = &v->way[at];
    for (int64_t fast = 2; fast < w->size; fast++) {
        if (w->size % fast != 0)
            continue;
        unsigned slow_dims = dims_moved(v, w->axis, w->stride * fast, w->size / fast);
        unsigned fast_dims = dims_moved(v, w->axis, w->stride, fast);
        if (!is_single(slow_dims) || !is_single(fast_dims))
            continue;
        if (v->nways == MAX_WAYS)
            break;
        memmove(w + 1, w, (size_t)(v->nways++ - at) * sizeof *w);
        w[0].size /= fast;
        w[0].stride *= fast;
        w[0].dim = __builtin_ctz(slow_dims);
        w[1].size = fast;
        w[1].dim = __builtin_ctz(fast_dims);
        return TB_OK;
    }
    return tb__fail(TB_REFUSED, "the parts of dim %d of the stored tensor are no product of dims of the view", w->axis);
}

static bool is_all(const tb__values *values, int64_t count) {
    return values->count == 1 && values->item[0].start == 0 && values->item[0].stop == count;
}

/* A list that is equal on all coordinates, but incomplete, must be expressed by some mesh dim of its axis. */
static tb_status claim_constant(viewing *v, int digit) {
    int axis = v->form.digit[digit].axis, d = dim_of_digit(&v->form, digit);
    if (is_all(&v->share[axis][0].values[digit], v->form.digit[digit].count))
        return TB_OK;
    for (int i = 0; i < v->nways; i++) {
        if (v->way[i].axis == axis && v->way[i].dim == d)
            return TB_OK;
    }
    for (int i = 0; i < v->nways; i++) {
        if (v->way[i].axis == axis && v->way[i].dim < 0) {
            v->way[i].dim = d;
            return TB_OK;
        }
    }
    return tb__fail(TB_REFUSED, "the parts of dim %d of the stored tensor are no product of dims of the view", axis);
}

static tb_status claim_ways(viewing *v) {
    for (int i = 0; i < v->nways; i++) {
        way *w = &v->way[i];
        if (w->axis < 0 || v->whole_dim[w->axis] >= 0 || w->dim >= 0)
            continue;
        unsigned dims = dims_moved(v, w->axis, w->stride, w->size);
        if (is_single(dims))
            w->dim = __builtin_ctz(dims);
        else if (dims)
            TB_TRY(split_way(v, i));
    }
    for (int i = 0; i < v->form.first_digit[v->form.ndim]; i++) {
        if (v->share[v->form.digit[i].axis])
            TB_TRY(claim_constant(v, i));
    }
    return TB_OK;
}

/* The values of a canonical dim: the product of those of its digits. */
static tb_status multiply_out(viewing *v, int d, const int64_t *coord, tb__values *out) {
    tb__values all = {0};
    size_t capacity = 0;
    int64_t width = 1;
    if (!tb__values_append(&all, &capacity, &v->arena, 0, 1))
        return TB_NO_MEMORY;
    for (int i = v->form.first_digit[d + 1] - 1; i >= v->form.first_digit[d]; i--) {
        const tb__digit *digit = &v->form.digit[i];
        tb__values whole = {.item = &(tb_segment){0, digit->count}, .count = 1, .length = digit->count};
        const tb__values *values =
            v->share[digit->axis] ? &v->share[digit->axis][coord[digit->axis]].values[i] : &whole;
        tb__values next = {0};
        capacity = 0;
        bool is_block = is_all(&all, width);
        for (size_t s = 0; s < values->count; s++) {
            int64_t start = values->item[s].start, stop = values->item[s].stop;
            if (is_block && !tb__values_append(&next, &capacity, &v->arena, start * width, stop * width))
                return TB_NO_MEMORY;
            for (int64_t x = start; x < stop && !is_block && all.count > 0; x++) {
                for (size_t j = 0; j < all.count; j++) {
                    if (!tb__values_append(&next, &capacity, &v->arena, x * width + all.item[j].start,
                                           x * width + all.item[j].stop))
                        return TB_NO_MEMORY;
                }
                if (next.count > TB__MAX_SEGMENTS)
                    return tb__fail(TB_TOO_BIG, "dim %d of the view would be cut into more than %d segments", d,
                                    TB__MAX_SEGMENTS);
            }
        }
        all = next;
        width *= digit->count;
    }
    *out = all;
    return TB_OK;
}

/* The mesh dims of a canonical dim, and its lists for all of their coordinates, the last varying fastest. */
typedef struct cut {
    int nways;
    int way[MAX_WAYS];
    int64_t ncoords;
    tb__values *list;
} cut;

static tb_status find_cut(viewing *v, int d, cut *out) {
    size_t nsegments = 0;
    *out = (cut){.ncoords = 1};
    for (int i = 0; i < v->nways; i++) {
        if (v->way[i].dim == d) {
            out->way[out->nways++] = i;
            out->ncoords *= v->way[i].size;
        }
    }
    out->list = tb__arena_alloc(&v->arena, (size_t)out->ncoords, sizeof *out->list);
    if (!out->list)
        return TB_NO_MEMORY;
    for (int64_t c = 0; c < out->ncoords && out->nways > 0; c++) {
        int64_t coord[TB_MAX_DIMS] = {0}, rest = c;
        for (int i = out->nways - 1; i >= 0; i--) {
            const way *w = &v->way[out->way[i]];
            coord[w->axis] += rest % w->size * w->stride;
            rest /= w->size;
        }
        TB_TRY(multiply_out(v, d, coord, &out->list[c]));
        nsegments += out->list[c].count;
        if (nsegments > TB__MAX_TABLE_SEGMENTS)
            return tb__fail(TB_TOO_BIG, "dim %d of the view would be cut into more than %d segments", d,
                            TB__MAX_TABLE_SEGMENTS);
    }
    return TB_OK;
}

/* Whether Shard on each of the mesh dims gives the same lists. */
static tb_status is_shard(viewing *v, int d, const cut *from, bool *out) {
    tb_placement shard = {.kind = TB_SHARD, .dim = d};
    const tb_placement *places[TB_MAX_DIMS];
    int64_t sizes[TB_MAX_DIMS];
    tb__axis axis;
    *out = false;
    if (from->nways > TB_MAX_DIMS)
        return TB_OK;
    for (int i = 0; i < from->nways; i++) {
        places[i] = &shard;
        sizes[i] = v->way[from->way[i]].size;
    }
    TB_TRY(tb__axis_init(&axis, d, v->shape.dim[d], from->nways, places, sizes, true));
    tb_status status = TB_OK;
    bool is_equal = true;
    for (int64_t c = 0; c < from->ncoords && is_equal && status == TB_OK; c++) {
        const tb__values *list = &from->list[c];
        tb__spans spans = {0};
        status = tb__axis_list(&axis, (int32_t)c, &v->arena, &spans);
        is_equal = status == TB_OK && spans.count == list->count && list->count <= 1 &&
                   (list->count == 0 ||
                    (spans.item[0].start == list->item[0].start && spans.item[0].stop == list->item[0].stop));
    }
    tb__axis_fini(&axis);
    *out = is_equal;
    return status;
}

static tb_status make_explicit(viewing *v, int d, const cut *from, tb_placement *out) {
    size_t nsegments = 0;
    for (int64_t c = 0; c < from->ncoords; c++)
        nsegments += from->list[c].count;
    size_t *ends = tb__arena_alloc(&v->arena, (size_t)from->ncoords, sizeof *ends);
    tb_segment *segments = tb__arena_alloc(&v->arena, nsegments, sizeof *segments);
    if (!ends || !segments)
        return TB_NO_MEMORY;
    nsegments = 0;
    for (int64_t c = 0; c < from->ncoords; c++) {
        if (from->list[c].count)
            memcpy(segments + nsegments, from->list[c].item, from->list[c].count * sizeof *segments);
        nsegments += from->list[c].count;
        ends[c] = nsegments;
    }
    *out = (tb_placement){
        .kind = TB_EXPLICIT, .dim = d, .nlists = (size_t)from->ncoords, .list_ends = ends, .segments = segments};
    return TB_OK;
}

/* The new mesh, and the ways that each of its dims joins. */
typedef struct mesh {
    int ndim;
    int64_t shape[MAX_WAYS];
    tb_placement place[MAX_WAYS];
    int nways, order[MAX_WAYS]; /* the ways; joined ones are neighbours */
} mesh;

static void add_mesh_dim(mesh *m, const viewing *v, const int *ways, int count, const tb_placement *place) {
    m->place[m->ndim] = *place;
    m->shape[m->ndim] = 1;
    for (int i = 0; i < count; i++) {
        m->shape[m->ndim] *= v->way[ways[i]].size;
        m->order[m->nways++] = ways[i];
    }
    m->ndim++;
}

static tb_status build_mesh(viewing *v, mesh *m) {
    enum { UNKNOWN, SHARDED, LISTED };
    int spelling[TB_MAX_DIMS] = {0};
    for (int i = 0; i < v->nways; i++) {
        const way *w = &v->way[i];
        tb_placement place = w->place;
        if (w->axis >= 0 && w->dim < 0) {
            place = (tb_placement){.kind = TB_REPLICATE};
        } else if (w->axis >= 0 && v->whole_dim[w->axis] >= 0) {
            place.dim = w->dim;
        } else if (w->axis >= 0) {
            int d = w->dim;
            cut lists;
            if (spelling[d] == LISTED)
                continue;
            if (spelling[d] == UNKNOWN) {
                bool is_sharded;
                TB_TRY(find_cut(v, d, &lists));
                TB_TRY(is_shard(v, d, &lists, &is_sharded));
                spelling[d] = is_sharded ? SHARDED : LISTED;
                if (!is_sharded) {
                    TB_TRY(make_explicit(v, d, &lists, &place));
                    add_mesh_dim(m, v, lists.way, lists.nways, &place);
                    continue;
                }
            }
            place = (tb_placement){.kind = TB_SHARD, .dim = d};
        }
        add_mesh_dim(m, v, &i, 1, &place);
    }
    if (m->ndim > TB_MAX_DIMS)
        return tb__fail(TB_REFUSED, "the view needs a mesh of more than %d dims", TB_MAX_DIMS);
    return TB_OK;
}

/* The rank at a row-major index of the new mesh. */
static int32_t rank_at(const viewing *v, const mesh *m, int64_t index) {
    int64_t coord[TB_MAX_DIMS] = {0}, old = 0;
    for (int i = m->nways - 1; i >= 0; i--) {
        const way *w = &v->way[m->order[i]];
        int64_t along = index % w->size;
        index /= w->size;
        if (w->axis < 0)
            old += along * w->stride;
        else
            coord[w->axis] += along * w->stride;
    }
    for (int a = 0; a < v->form.naxes; a++) {
        const tb__mesh_dims *dims = &v->grid.axis_dims[a];
        for (int i = dims->count - 1; i >= 0; i--) {
            old += coord[a] % dims->ways[i] * dims->stride[i];
            coord[a] /= dims->ways[i];
        }
    }
    return tb_layout_rank_at(v->grid.layout, (int32_t)old);
}

/* Whether the ranks at a coordinate of an Explicit mesh dim hold anything. */
static bool holds_some(const tb_placement *p, int64_t coord) {
    return p->kind != TB_EXPLICIT || p->list_ends[coord] > (coord ? p->list_ends[coord - 1] : 0);
}

static bool is_only_cut(const mesh *m, int d) {
    for (int i = 0; i < m->ndim; i++) {
        const tb_placement *p = &m->place[i];
        if (i != d && p->kind != TB_REPLICATE && p->kind != TB_PARTIAL && p->dim == m->place[d].dim)
            return false;
    }
    return true;
}

/* Removes ranks that hold nothing from the mesh, coordinate by coordinate: one expert of a stack is on few ranks, and
 * the others hold nothing of it. */
static tb_status drop_idle(viewing *v, mesh *m, int d, int32_t *ranks, int64_t *nranks) {
    tb_placement *p = &m->place[d];
    int64_t before = m->shape[d], kept = 0, inner = 1, left = 0;
    for (int64_t c = 0; c < before; c++)
        kept += holds_some(p, c);
    if (kept == before || kept == 0)
        return TB_OK;
    for (int i = d + 1; i < m->ndim; i++)
        inner *= m->shape[i];
    for (int64_t i = 0; i < *nranks; i++) {
        if (holds_some(p, i / inner % before))
            ranks[left++] = ranks[i];
    }
    size_t *ends = tb__arena_alloc(&v->arena, (size_t)kept, sizeof *ends);
    if (!ends)
        return TB_NO_MEMORY;
    size_t at = 0;
    int64_t n = v->shape.dim[p->dim], part = (n + kept - 1) / kept;
    bool is_alone = is_only_cut(m, d);             /* else its lists select from another one's */
    bool is_whole = is_alone, is_shard = is_alone; /* each has all of it, or its part */
    for (int64_t c = 0; c < before; c++) {
        if (!holds_some(p, c))
            continue;
        const tb_segment *first = &p->segments[c ? p->list_ends[c - 1] : 0];
        size_t count = p->list_ends[c] - (c ? p->list_ends[c - 1] : 0);
        int64_t start = (int64_t)at * part, stop = start + part < n ? start + part : n;
        is_whole &= count == 1 && first->start == 0 && first->stop == n;
        is_shard &= count == 1 && first->start == start && first->stop == stop;
        ends[at++] = p->list_ends[c];
    }
    p->list_ends = ends; /* what is left out had no segments */
    p->nlists = (size_t)kept;
    if (is_whole)
        *p = (tb_placement){.kind = TB_REPLICATE};
    else if (is_shard)
        *p = (tb_placement){.kind = TB_SHARD, .dim = p->dim};
    m->shape[d] = kept;
    *nranks = left;
    return TB_OK;
}

static tb_status build_layout(viewing *v, const tb_layout *layout, tb_layout **out) {
    mesh m = {0};
    TB_TRY(find_shares(v));
    collect_ways(v, layout);
    TB_TRY(claim_ways(v));
    TB_TRY(build_mesh(v, &m));
    int32_t *ranks = tb__arena_alloc(&v->arena, (size_t)layout->nranks, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < layout->nranks; i++)
        ranks[i] = rank_at(v, &m, i);
    int64_t nranks = layout->nranks;
    for (int d = 0; d < m.ndim; d++)
        TB_TRY(drop_idle(v, &m, d, ranks, &nranks));
    return tb_layout_create(m.ndim, m.shape, ranks, m.place, out);
}

tb_status tb_view_apply(const tb_view *view, const tb_shape *shape, const tb_layout *layout, tb_shape *out_shape,
                        tb_layout **out_layout) {
    viewing v = {0};
    tb_layout *made;
    TB_TRY(tb__form_init(&v.form, shape, view ? view->op : NULL, view ? view->nops : 0));
    TB_TRY(tb__grid_init(&v.grid, layout, shape, TB__SOURCE));
    v.shape = tb__form_shape(&v.form);
    tb_status status = build_layout(&v, layout, &made);
    tb__arena_fini(&v.arena);
    tb__grid_fini(&v.grid);
    TB_TRY(status);
    *out_shape = v.shape;
    *out_layout = made;
    return TB_OK;
}
