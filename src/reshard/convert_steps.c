/* Divides gathered tensors into steps, each of them a group of the flow. The program's groups keep their order; within
 * one, tensors that are not gathered come first. */
#include "reshard/convert_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

enum { SLOT_NBYTES = 8 << 20 }; /* of a slot, unless more is needed: it stays in the cache */

/* ---- Sizes ----------------------------------------------------------------------------------------------------- */

static bool is_same_shape(const tb_shape *a, const tb_shape *b) {
    return a->ndim == b->ndim && memcmp(a->dim, b->dim, (size_t)a->ndim * sizeof *a->dim) == 0;
}

static bool is_same_format(const tb__quant_format *a, const tb__quant_format *b) {
    return a->kind == b->kind && a->is_floor == b->is_floor && a->is_power_of_two == b->is_power_of_two &&
           a->is_swizzled == b->is_swizzled;
}

/* The longest part of any target, dim by dim. Consecutive tensors often have the same layout and shape. */
static tb_status find_most(const tb_tensor_spec *spec, const tb_tensor_spec *before, const tb_shape *known,
                           tb_shape *out) {
    if (before && before->dst == spec->dst && is_same_shape(&before->shape, &spec->shape)) {
        *out = *known;
        return TB_OK;
    }
    tb_shape most = {.ndim = spec->shape.ndim};
    for (int32_t i = 0; i < tb_layout_nranks(spec->dst); i++) {
        tb_local local;
        TB_TRY(tb_layout_local(spec->dst, &spec->shape, tb_layout_rank_at(spec->dst, i), &local));
        for (int d = 0; d < most.ndim; d++)
            most.dim[d] = local.shape.dim[d] > most.dim[d] ? local.shape.dim[d] : most.dim[d];
        tb_local_fini(&local);
    }
    *out = most;
    return TB_OK;
}

static tb_status measure_slots(tb__convert *c, const tb__flow_tensor *tensors) {
    const entry *before = NULL;
    for (size_t i = 0; i < c->nentries; i++) {
        entry *e = &c->entries[i];
        if (!tensors[i].is_gathered)
            continue;
        TB_TRY(find_most(&tensors[i].spec, before ? &tensors[before - c->entries].spec : NULL,
                         before ? &before->most : NULL, &e->most));
        int64_t n = 1;
        for (int d = 0; d < e->most.ndim; d++)
            n *= e->most.dim[d];
        e->nbytes = tb__align(tb__dtype_bytes(e->dtype, n), 64);
        before = e;
    }
    return TB_OK;
}

/* ---- The order ------------------------------------------------------------------------------------------------- */

typedef struct item {
    size_t index; /* of the entry */
    uint32_t host;
    bool is_gathered;
    const char *scale_group; /* "": none */
} item;

static int compare_items(const void *a, const void *b) {
    const item *x = a, *y = b;
    if (x->host != y->host)
        return x->host < y->host ? -1 : 1;
    if (x->is_gathered != y->is_gathered)
        return x->is_gathered ? 1 : -1;
    int c = strcmp(x->scale_group, y->scale_group);
    return c ? c : (x->index > y->index) - (x->index < y->index);
}

static item *sort_items(const tb__convert *c, const tb__flow_tensor *tensors) {
    item *items = tb__malloc(c->nentries, sizeof *items);
    for (size_t i = 0; items && i < c->nentries; i++) {
        const entry *e = &c->entries[i];
        bool is_global = e->how.dst_encoding && tb__encoding_is_global(e->how.dst_encoding);
        items[i] = (item){.index = i,
                          .host = tensors[i].spec.group,
                          .is_gathered = tensors[i].is_gathered,
                          .scale_group = is_global && e->how.scale_group ? e->how.scale_group : ""};
    }
    if (items)
        qsort(items, c->nentries, sizeof *items, compare_items);
    return items;
}

/* ---- Units ----------------------------------------------------------------------------------------------------- */

/* The ranks that have a part of any of the unit's tensors. */
static tb_status find_ranks(const tb__convert *c, const tb__flow_tensor *tensors, unit *u) {
    TB_VEC(int32_t) ranks = {0};
    for (size_t i = 0; i < u->count; i++) {
        const tb_tensor_spec *spec = &tensors[c->order[u->first + i]].spec;
        for (int32_t j = 0; j < tb_layout_nranks(spec->dst); j++) {
            tb_local local;
            int32_t rank = tb_layout_rank_at(spec->dst, j);
            tb_status status = tb_layout_local(spec->dst, &spec->shape, rank, &local);
            bool has_part = true;
            for (int d = 0; status == TB_OK && d < spec->shape.ndim; d++)
                has_part &= local.shape.dim[d] > 0;
            if (status == TB_OK)
                tb_local_fini(&local);
            if (status == TB_OK && has_part && !tb__vec_push(&ranks, rank))
                status = TB_NO_MEMORY;
            if (status != TB_OK) {
                free(ranks.item);
                return status;
            }
        }
    }
    u->ranks = ranks.item;
    u->nranks = tb__vec_sort_unique(&ranks, tb__compare_int32);
    return TB_OK;
}

static bool is_local(const char *scale_group) {
    return !scale_group || strncmp(scale_group, "local:", 6) == 0;
}

static tb_status check_unit(const tb__convert *c, const tb__flow_tensor *tensors, const unit *u) {
    const entry *first = &c->entries[c->order[u->first]];
    for (size_t i = 1; i < u->count; i++) {
        const entry *e = &c->entries[c->order[u->first + i]];
        if (!is_same_format(&e->dst_encoding.format, &first->dst_encoding.format))
            return tb__fail(
                TB_CONFLICT, "tensors '%.100s' and '%.100s' are in scale group '%.100s', but encoded differently",
                tensors[c->order[u->first]].spec.name, tensors[c->order[u->first + i]].spec.name, e->how.scale_group);
    }
    return TB_OK;
}

/* State while steps are assigned. */
typedef struct walk {
    tb__convert *c;
    tb__flow_tensor *tensors;
    int64_t slot;   /* preferred size */
    uint32_t group; /* the next one */
    int64_t used;   /* bytes used in the previous group's slot; negative: nothing can be added to that group */
    TB_VEC(uint32_t) hosts;
    TB_VEC(size_t) first_units; /* by group */
    TB_VEC(int64_t) sizes;      /* by group */
} walk;

static tb_status begin_group(walk *w, uint32_t host, size_t first_unit) {
    if (w->group == UINT32_MAX - 1 || !tb__vec_push(&w->hosts, host) || !tb__vec_push(&w->first_units, first_unit) ||
        !tb__vec_push(&w->sizes, 0))
        return TB_NO_MEMORY;
    w->group++;
    return TB_OK;
}

/* Consecutive rows of a target's part. */
typedef struct rows {
    int64_t start, stop;
    int64_t shift; /* position in the part minus position in the tensor */
} rows;

typedef TB_VEC(rows) rows_list;

static int compare_rows(const void *a, const void *b) {
    return (((const rows *)a)->start > ((const rows *)b)->start) -
           (((const rows *)a)->start < ((const rows *)b)->start);
}

static tb_status list_rows(const tb_tensor_spec *spec, rows_list *out) {
    for (int32_t i = 0; i < tb_layout_nranks(spec->dst); i++) {
        tb_local local;
        int64_t at = 0;
        bool has_room = true;
        TB_TRY(tb_layout_local(spec->dst, &spec->shape, tb_layout_rank_at(spec->dst, i), &local));
        for (size_t j = 0; j < local.nsegments[0] && has_room; j++) {
            tb_segment s = local.segments[0][j];
            has_room = tb__vec_push(out, (rows){s.start, s.stop, at - s.start});
            at += s.stop - s.start;
        }
        tb_local_fini(&local);
        if (!has_room)
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* Whether bands of one target are bands of all: each row has the same position in all parts, and only one in a part.
 * Explicit lists may be different. */
static tb_status find_bands(const tb_tensor_spec *spec, bool *has_bands) {
    rows_list list = {0};
    tb_status status = list_rows(spec, &list);
    *has_bands = true;
    if (status == TB_OK && list.count)
        qsort(list.item, list.count, sizeof *list.item, compare_rows);
    rows reach = {0}; /* all overlapping rows up to here */
    for (size_t i = 0; i < list.count && status == TB_OK; i++) {
        const rows *next = &list.item[i];
        *has_bands &= next->start >= reach.stop || next->shift == reach.shift;
        reach = next->stop > reach.stop ? *next : reach;
    }
    free(list.item);
    return status;
}

/* Cuts a tensor that is too large for a slot into bands, if that is possible. */
static tb_status cut_bands(const walk *w, size_t index, bool *is_cut) {
    entry *e = &w->c->entries[index];
    const tb__quant_format *format = &e->dst_encoding.format;
    int64_t row = 1, step = tb__encoded_band(format, &e->most);
    for (int d = 1; d < e->most.ndim; d++)
        row *= e->most.dim[d];
    row = tb__dtype_bytes(e->dtype, row);
    if (e->most.ndim < 2 || row == 0 || row * step > w->c->most_nbytes || step >= e->most.dim[0] ||
        tb__encoding_is_global(&e->dst_encoding))
        return TB_OK;
    TB_TRY(find_bands(&w->tensors[index].spec, is_cut));
    if (!*is_cut)
        return TB_OK;
    int64_t fit = w->slot / row / step * step;
    e->band = fit > step ? fit : step;
    e->nbytes = tb__align(row * e->band, 64);
    if (e->how.dst && !tb__encoded_takes_bands(e->how.dst, e->band))
        return tb__fail(TB_REFUSED,
                        "tensor '%.100s' has to be gathered in bands of %" PRId64
                        " rows, which end inside the blocks of its matrices of %" PRId64
                        " rows; more staging_bytes would gather it whole",
                        e->name, e->band, e->how.dst->matrix_rows);
    return TB_OK;
}

tb_status tb__convert_measure_slot(void *convert, uint32_t group, size_t *nbytes) {
    const tb__convert *c = convert;
    *nbytes = (size_t)c->group_nbytes[group];
    if (c->group_nbytes[group] <= c->most_nbytes)
        return TB_OK;
    return tb__fail(TB_REFUSED,
                    "tensor '%.100s' has to be gathered before it is quantised, which takes %" PRId64
                    " bytes; staging_bytes leave %" PRId64 " for that",
                    c->entries[c->order[c->units.item[c->unit_of[group]].first]].name, c->group_nbytes[group],
                    c->most_nbytes);
}

static tb_status add_unit(walk *w, uint32_t host, unit u) {
    tb__convert *c = w->c;
    int64_t nbytes = 0;
    size_t first = c->order[u.first];
    u.is_global = tb__encoding_is_global(&c->entries[first].dst_encoding);
    TB_TRY(check_unit(c, w->tensors, &u));
    for (size_t i = 0; i < u.count; i++)
        nbytes += c->entries[c->order[u.first + i]].nbytes;
    bool is_cut = false;
    if (u.count == 1 && nbytes > w->slot)
        TB_TRY(cut_bands(w, first, &is_cut));
    if (is_cut)
        nbytes = c->entries[first].nbytes;
    if (is_cut || w->used < 0 || w->used + nbytes > w->slot) {
        TB_TRY(begin_group(w, host, c->units.count));
        w->used = 0;
    }
    u.group = w->group - 1;
    for (size_t i = 0; i < u.count; i++) {
        size_t index = c->order[u.first + i];
        w->tensors[index].spec.group = u.group;
        w->tensors[index].spec.band = c->entries[index].band;
        w->tensors[index].slot_offset = c->entries[index].slot_offset = (size_t)w->used;
        c->entries[index].unit = c->units.count;
        w->used += c->entries[index].nbytes;
    }
    w->sizes.item[u.group] = w->used;
    if (u.is_global && !is_local(c->entries[first].how.scale_group))
        TB_TRY(find_ranks(c, w->tensors, &u));
    if (!tb__vec_push(&c->units, u)) {
        free(u.ranks);
        return TB_NO_MEMORY;
    }
    if (is_cut) {
        const entry *e = &c->entries[first];
        for (int64_t at = e->band; at < e->most.dim[0]; at += e->band) {
            TB_TRY(begin_group(w, host, c->units.count - 1));
            w->sizes.item[w->group - 1] = nbytes;
        }
        w->used = -1;
    }
    return TB_OK;
}

/* Items a .. b-1 are of one group of the program. */
static tb_status add_host(walk *w, const item *items, size_t a, size_t b, size_t *norder) {
    tb__convert *c = w->c;
    w->used = -1;
    if (!items[a].is_gathered) {
        TB_TRY(begin_group(w, items[a].host, c->units.count));
        for (; a < b && !items[a].is_gathered; a++)
            w->tensors[items[a].index].spec.group = w->group - 1;
    }
    while (a < b) {
        unit u = {.first = *norder};
        const char *name = items[a].scale_group;
        do {
            c->order[(*norder)++] = items[a++].index;
            u.count++;
        } while (a < b && *name && strcmp(items[a].scale_group, name) == 0);
        TB_TRY(add_unit(w, items[a - 1].host, u));
    }
    return TB_OK;
}

static int compare_scale_groups(const void *a, const void *b) {
    return strcmp(((const item *)a)->scale_group, ((const item *)b)->scale_group);
}

static tb_status check_scale_groups(const item *items, size_t n) {
    item *sorted = tb__memdup(items, n, sizeof *sorted);
    if (!sorted)
        return TB_NO_MEMORY;
    qsort(sorted, n, sizeof *sorted, compare_scale_groups);
    tb_status status = TB_OK;
    for (size_t i = 1; i < n && status == TB_OK; i++) {
        const item *x = &sorted[i - 1], *y = &sorted[i];
        if (*x->scale_group && x->host != y->host && strcmp(x->scale_group, y->scale_group) == 0)
            status = tb__fail(TB_CONFLICT, "scale group '%.100s' has tensors in groups %" PRIu32 " and %" PRIu32,
                              x->scale_group, x->host, y->host);
    }
    free(sorted);
    return status;
}

static tb_status walk_items(walk *w, const item *items) {
    size_t n = w->c->nentries, norder = 0;
    TB_TRY(check_scale_groups(items, n));
    for (size_t a = 0, b; a < n; a = b) {
        for (b = a + 1; b < n && items[b].host == items[a].host;)
            b++;
        TB_TRY(add_host(w, items, a, b, &norder));
    }
    w->c->ngroups = w->group;
    return tb__vec_push(&w->first_units, w->c->units.count) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__convert_steps(tb__convert *c, tb__flow_tensor *tensors) {
    TB_TRY(measure_slots(c, tensors));
    item *items = sort_items(c, tensors);
    c->order = tb__malloc(c->nentries, sizeof *c->order);
    walk w = {.c = c, .tensors = tensors, .used = -1};
    w.slot = c->most_nbytes / 2 < SLOT_NBYTES ? c->most_nbytes / 2 : SLOT_NBYTES;
    tb_status status = items && c->order ? walk_items(&w, items) : TB_NO_MEMORY;
    free(items);
    c->user_groups = w.hosts.item;
    c->unit_of = w.first_units.item;
    c->group_nbytes = w.sizes.item;
    return status;
}
