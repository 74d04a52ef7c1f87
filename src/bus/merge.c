/* Merges the tensor lists of a side's ranks. Ranks that describe a tensor differently, and ranks that hold a part of a
 * tensor that they have not added, are found by all ranks alike. */
#include "bus/exchange.h"

#include "reshard/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A tensor in one of the lists. */
typedef struct entry {
    const tb__tensor_description *desc;
    const tb__tensor_list *list;
    size_t at; /* in its list */
} entry;

/* The state of merging one side's lists. */
typedef struct side_merge {
    tb__exchange *exchange;
    int side;
    int32_t *seat_of; /* by bus rank */
    uint64_t *listed; /* by list: the number of the last tensor that was found in it */
} side_merge;

void tb__shape_text(const tb_shape *shape, char *out, size_t room) {
    size_t at = 0;
    out[0] = '\0';
    for (int d = 0; d < shape->ndim && at < room; d++)
        at += (size_t)snprintf(out + at, room - at, "%s%" PRId64, d ? "," : "", shape->dim[d]);
}

/* Made once for each text. */
static tb_status get_side_layout(tb__exchange *exchange, int side, const char *text, const tb_layout **out) {
    text = text ? text : exchange->pair->sides[side].layout;
    uint64_t hash = tb__hash((uint64_t)side, tb__name_hash(text));
    size_t probe = 0, i;
    while ((i = tb__index_next(&exchange->by_text, hash, &probe)) != TB__NOWHERE) {
        if (exchange->layouts.item[i].side == side && strcmp(exchange->layouts.item[i].text, text) == 0) {
            *out = exchange->layouts.item[i].layout;
            return TB_OK;
        }
    }
    tb_layout *layout;
    if (!tb__vec_reserve(&exchange->layouts, 1))
        return TB_NO_MEMORY;
    TB_TRY(tb__pair_layout(exchange->pair, side, text, &layout));
    if (!tb__index_add(&exchange->by_text, hash, exchange->layouts.count)) {
        tb_layout_destroy(layout);
        return TB_NO_MEMORY;
    }
    exchange->layouts.item[exchange->layouts.count++] = (struct tb__side_layout){text, side, layout};
    *out = layout;
    return TB_OK;
}

static const char *label_of(const side_merge *j, int32_t seat) {
    return j->exchange->pair->sides[j->side].peers[seat]->label;
}

static const char *layout_text(const side_merge *j, const tb__tensor_description *t) {
    return t->layout ? t->layout : j->exchange->pair->sides[j->side].layout;
}

static const char *wire_name(tb_dtype dtype) {
    return dtype == TB_DTYPE_NONE ? "none" : tb_dtype_name(dtype);
}

static bool are_equal(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

static const char *or_none(const char *text) {
    return text ? text : "none";
}

/* Describes the first difference; "" if there is none. */
static void find_difference(const side_merge *j, const tb__tensor_description *a, const tb__tensor_description *b,
                            char *out, size_t room) {
    out[0] = '\0';
    if (a->shape.ndim != b->shape.ndim ||
        memcmp(a->shape.dim, b->shape.dim, (size_t)a->shape.ndim * sizeof *a->shape.dim) != 0) {
        char left[96], right[96];
        tb__shape_text(&a->shape, left, sizeof left);
        tb__shape_text(&b->shape, right, sizeof right);
        snprintf(out, room, "shape [%s] and [%s]", left, right);
    } else if (a->dtype != b->dtype) {
        snprintf(out, room, "dtype %s and %s", tb_dtype_name(a->dtype), tb_dtype_name(b->dtype));
    } else if (a->wire_dtype != b->wire_dtype) {
        snprintf(out, room, "wire dtype %s and %s", wire_name(a->wire_dtype), wire_name(b->wire_dtype));
    } else if (a->group != b->group) {
        snprintf(out, room, "group %" PRIu32 " and %" PRIu32, a->group, b->group);
    } else if (a->layout != b->layout && strcmp(layout_text(j, a), layout_text(j, b)) != 0) {
        snprintf(out, room, "layout '%.80s' and '%.80s'", layout_text(j, a), layout_text(j, b));
    } else if (!are_equal(a->encode, b->encode)) {
        snprintf(out, room, "encoding %.80s and %.80s", or_none(a->encode), or_none(b->encode));
    } else if (!are_equal(a->scale_group, b->scale_group)) {
        snprintf(out, room, "scale group %.80s and %.80s", or_none(a->scale_group), or_none(b->scale_group));
    } else if (a->is_transformed != b->is_transformed) {
        snprintf(out, room, "only one of them transforms it");
    } else if (a->is_whole != b->is_whole) {
        snprintf(out, room, "only one of them transforms its pieces whole");
    }
}

static tb_status check_descriptions_equal(const side_merge *j, const entry *a, const entry *b) {
    char difference[256];
    find_difference(j, a->desc, b->desc, difference, sizeof difference);
    if (!*difference)
        return TB_OK;
    return tb__fail(TB_CONFLICT, "%s and %s describe tensor '%.100s' of %s differently: %s",
                    label_of(j, a->list->first_seat), label_of(j, b->list->first_seat), a->desc->name,
                    j->exchange->what, difference);
}

/* Whether a rank holds elements of the tensor: the last ranks of a mesh may have none. */
static bool holds_part(const tb__side_tensor *held, int32_t rank) {
    tb_local local;
    if (tb_layout_local(held->layout, &held->desc->shape, rank, &local) != TB_OK)
        return true;
    bool holds = true;
    for (int d = 0; d < held->desc->shape.ndim; d++)
        holds &= local.shape.dim[d] > 0;
    tb_local_fini(&local);
    return holds;
}

/* Checks that all ranks that hold a part of the tensor have it in their lists. */
static tb_status check_mesh(const side_merge *j, const tb__side_tensor *held, uint64_t number) {
    enum { NAMED = 4 };
    const tb__exchange_side *s = &j->exchange->sides[j->side];
    if (s->used.count == 1) /* all ranks have the same list */
        return TB_OK;
    char missing[200] = "";
    size_t at = 0, count = 0;
    int32_t n = tb_layout_nranks(held->layout);
    for (int32_t i = 0; i < n; i++) {
        int32_t seat = j->seat_of[tb_layout_rank_at(held->layout, i)];
        if (j->listed[tb__exchange_list(s, s->seats[seat].hash)->number] == number ||
            !holds_part(held, tb_layout_rank_at(held->layout, i)))
            continue;
        if (count++ < NAMED && at < sizeof missing)
            at += (size_t)snprintf(missing + at, sizeof missing - at, "%s%s", count > 1 ? ", " : "", label_of(j, seat));
    }
    if (count == 0)
        return TB_OK;
    if (count > NAMED && at < sizeof missing)
        snprintf(missing + at, sizeof missing - at, " and %zu more", count - NAMED);
    return tb__fail(TB_CONFLICT, "tensor '%.100s' was not added to %s by all ranks that hold a part of it: %s has not",
                    held->desc->name, j->exchange->what, missing);
}

static int compare_list_entries(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int c = strcmp(x->desc->name, y->desc->name);
    return c ? c : (x->list->number > y->list->number) - (x->list->number < y->list->number);
}

/* All tensors of all lists, by name, then by list. */
static tb_status gather_entries(const side_merge *j, entry **out, size_t *count) {
    const tb__exchange_side *s = &j->exchange->sides[j->side];
    size_t n = 0;
    for (size_t i = 0; i < s->used.count; i++)
        n += s->used.item[i]->tensors.count;
    entry *entries = tb__malloc(n, sizeof *entries);
    if (!entries)
        return TB_NO_MEMORY;
    n = 0;
    for (size_t i = 0; i < s->used.count; i++) {
        const tb__tensor_list *list = s->used.item[i];
        for (size_t k = 0; k < list->tensors.count; k++)
            entries[n++] = (entry){&list->tensors.item[k], list, k};
    }
    if (s->used.count > 1 && n > 1)
        qsort(entries, n, sizeof *entries, compare_list_entries);
    *out = entries;
    *count = n;
    return TB_OK;
}

static tb_status merge_entries(side_merge *j, const entry *entries, size_t count) {
    tb__exchange_side *s = &j->exchange->sides[j->side];
    const tb__tensor_list *own = s->is_here ? tb__exchange_list(s, s->hash) : NULL;
    for (size_t i = 0, next; i < count; i = next) {
        tb__side_tensor held = {.desc = entries[i].desc};
        uint64_t number = i + 1;
        for (next = i; next < count && strcmp(entries[next].desc->name, held.desc->name) == 0; next++) {
            if (next > i)
                TB_TRY(check_descriptions_equal(j, &entries[i], &entries[next]));
            size_t at = entries[next].list->number;
            j->listed[at] = number;
            if (entries[next].desc->memory) /* ranks without the tensor have 0, too */
                held.memory_kind = tb__hash(tb__hash(held.memory_kind, at + 1), entries[next].desc->memory);
            if (entries[next].list == own)
                held.mine = s->own.item[entries[next].at];
        }
        tb_status status = get_side_layout(j->exchange, j->side, held.desc->layout, &held.layout);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", held.desc->name);
        TB_TRY(check_mesh(j, &held, number));
        if (!tb__vec_push(&s->tensors, held))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* Numbers the lists in the order of their first seats. */
static tb_status number_lists(tb__exchange_side *s, const tb__pair_side *seats, int32_t *seat_of) {
    if (!tb__vec_reserve(&s->used, s->lists.count))
        return TB_NO_MEMORY;
    for (int32_t seat = 0; seat < seats->size; seat++) {
        tb__tensor_list *list = &s->lists.item[tb__exchange_list(s, s->seats[seat].hash) - s->lists.item];
        seat_of[seats->peers[seat]->rank] = seat;
        if (list->is_used)
            continue;
        list->is_used = true;
        list->first_seat = seat;
        list->number = s->used.count;
        s->used.item[s->used.count++] = list;
    }
    return TB_OK;
}

tb_status tb__exchange_merge(tb__exchange *exchange, int side) {
    tb__exchange_side *s = &exchange->sides[side];
    size_t nranks = (size_t)exchange->handshake.peers[exchange->handshake.npeers - 1]->rank + 1;
    side_merge j = {.exchange = exchange,
                    .side = side,
                    .seat_of = tb__calloc(nranks, sizeof *j.seat_of),
                    .listed = tb__calloc(s->lists.count, sizeof *j.listed)};
    entry *entries = NULL;
    size_t count = 0;
    tb_status status = j.seat_of && j.listed ? TB_OK : TB_NO_MEMORY;
    if (status == TB_OK)
        status = number_lists(s, &exchange->pair->sides[side], j.seat_of);
    if (status == TB_OK)
        status = gather_entries(&j, &entries, &count);
    if (status == TB_OK)
        status = merge_entries(&j, entries, count);
    free(entries);
    free(j.seat_of);
    free(j.listed);
    return status;
}
