/* The table of an axis on which an Explicit placement takes part: the lists of all coordinates, cut wherever any of
 * them begins or ends, and the cuts sorted into classes by their holders. */
#include "layout/axis.h"

#include "base/index.h"
#include "base/int.h"

#include <string.h>

/* One run of indices in one coordinate's list. */
typedef struct held {
    int64_t start, stop, offset;
    int32_t coord;
} held;

typedef TB_VEC(held) held_list;

static int compare_held(const void *a, const void *b) {
    const held *x = a, *y = b;
    if (x->start != y->start)
        return x->start < y->start ? -1 : 1;
    if (x->coord != y->coord)
        return x->coord < y->coord ? -1 : 1;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static tb_status collect_lists(const tb__axis *axis, int dim, held_list *all) {
    tb__arena arena = {0};
    tb_status status = TB_OK;
    for (int32_t coord = 0; coord < axis->ncoords && status == TB_OK; coord++) {
        tb__spans list;
        tb__arena_reset(&arena);
        status = tb__axis_list(axis, coord, &arena, &list);
        for (size_t i = 0; i < list.count && status == TB_OK; i++) {
            const tb__span *s = &list.item[i];
            if (all->count == TB__MAX_TABLE_SEGMENTS)
                status = tb__fail(TB_TOO_BIG, "dim %d has more than %d Explicit segments", dim, TB__MAX_TABLE_SEGMENTS);
            else if (!tb__vec_push(all, (held){s->start, s->stop, s->offset, coord}))
                status = TB_NO_MEMORY;
        }
    }
    tb__arena_fini(&arena);
    if (all->count)
        qsort(all->item, all->count, sizeof *all->item, compare_held);
    return status;
}

/* The table while it grows. */
typedef struct builder {
    TB_VEC(tb__table_segment) segments;
    TB_VEC(int64_t) offsets;
    TB_VEC(tb__table_class) classes;
    TB_VEC(int32_t) holders;
    tb__index by_holders;
} builder;

/* The class with these holders, made if it is new; -1 if memory is short. */
static int32_t class_of(builder *b, const held *active, size_t count) {
    if (!tb__vec_reserve(&b->holders, count))
        return -1;
    int32_t *key = b->holders.item + b->holders.count; /* stays there if the class is new */
    uint64_t hash = count;
    for (size_t i = 0; i < count; i++) {
        key[i] = active[i].coord;
        hash = tb__hash(hash, (uint64_t)key[i]);
    }
    size_t probe = 0, at;
    while ((at = tb__index_next(&b->by_holders, hash, &probe)) != TB__NOWHERE) {
        const tb__table_class *c = &b->classes.item[at];
        if ((size_t)c->nholders == count && memcmp(b->holders.item + c->first_holder, key, count * sizeof *key) == 0)
            return (int32_t)at;
    }
    tb__table_class new = {.first_holder = (int32_t)b->holders.count, .nholders = (int32_t)count};
    for (size_t i = 1; i < count; i++)
        new.repeats |= key[i] == key[i - 1];
    if (!tb__vec_reserve(&b->classes, 1) || !tb__index_add(&b->by_holders, hash, b->classes.count))
        return -1;
    b->classes.item[b->classes.count++] = new;
    b->holders.count += count;
    return (int32_t)b->classes.count - 1;
}

/* Whether [start, ...) with these offsets carries on the last segment at every holder. */
static bool continues_segment(const builder *b, int64_t start, int32_t cls, const held *active, size_t count) {
    if (b->segments.count == 0)
        return false;
    const tb__table_segment *last = &b->segments.item[b->segments.count - 1];
    if (last->cls != cls || last->stop != start)
        return false;
    for (size_t i = 0; i < count; i++) {
        if (b->offsets.item[last->offsets + i] + (last->stop - last->start) != active[i].offset)
            return false;
    }
    return true;
}

static tb_status add_segment(builder *b, int dim, int64_t start, int64_t stop, const held *active, size_t count) {
    int32_t cls = class_of(b, active, count);
    if (cls < 0)
        return TB_NO_MEMORY;
    if (continues_segment(b, start, cls, active, count)) {
        b->segments.item[b->segments.count - 1].stop = stop;
        return TB_OK;
    }
    if (b->offsets.count + count > TB__MAX_TABLE_SEGMENTS || b->holders.count > TB__MAX_TABLE_SEGMENTS)
        return tb__fail(TB_TOO_BIG, "Explicit lists of dim %d overlap in more than %d places", dim,
                        TB__MAX_TABLE_SEGMENTS);
    tb__table_segment segment = {start, stop, cls, b->offsets.count};
    if (!tb__vec_push(&b->segments, segment))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        if (!tb__vec_push(&b->offsets, active[i].offset))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* Sweeps over the indices. `active` holds the runs that contain the current index, sorted by coordinate, each trimmed
 * to begin there. */
static tb_status sweep_lists(builder *b, int dim, const held_list *all, bool distinct) {
    held_list active = {0}, firsts = {0};
    tb_status status = TB_OK;
    size_t next = 0, work = 0;
    int64_t at = 0;
    while (status == TB_OK && (next < all->count || active.count)) {
        if (active.count == 0)
            at = all->item[next].start;
        while (next < all->count && all->item[next].start == at) {
            if (!tb__vec_push(&active, all->item[next])) {
                status = TB_NO_MEMORY;
                goto out;
            }
            held run = all->item[next++];
            size_t i = active.count - 1;
            while (i > 0 && (active.item[i - 1].coord > run.coord ||
                             (active.item[i - 1].coord == run.coord && active.item[i - 1].offset > run.offset))) {
                active.item[i] = active.item[i - 1];
                i--;
            }
            active.item[i] = run;
        }
        work += active.count;
        if (work > (size_t)8 * TB__MAX_TABLE_SEGMENTS) {
            status = tb__fail(TB_TOO_BIG, "Explicit lists of dim %d overlap too often to be told apart", dim);
            break;
        }
        int64_t stop = next < all->count ? all->item[next].start : INT64_MAX;
        for (size_t i = 0; i < active.count; i++)
            stop = active.item[i].stop < stop ? active.item[i].stop : stop;
        size_t nholders = active.count;
        const held *holders = active.item;
        if (distinct) {
            firsts.count = 0;
            for (size_t i = 0; i < active.count; i++) {
                if ((i == 0 || active.item[i].coord != active.item[i - 1].coord) &&
                    !tb__vec_push(&firsts, active.item[i]))
                    status = TB_NO_MEMORY;
            }
            nholders = firsts.count;
            holders = firsts.item;
        }
        if (status == TB_OK)
            status = add_segment(b, dim, at, stop, holders, nholders);
        size_t kept = 0;
        for (size_t i = 0; i < active.count; i++) {
            held run = active.item[i];
            run.offset += stop - run.start;
            run.start = stop;
            if (run.start < run.stop)
                active.item[kept++] = run;
        }
        active.count = kept;
        at = stop;
    }
out:
    free(active.item);
    free(firsts.item);
    return status;
}

/* Lists the spans of every class and the slots of every coordinate, by counting first. */
static tb_status index_classes(tb__axis_table *table, int32_t ncoords) {
    table->span = tb__calloc(table->nsegments, sizeof *table->span);
    table->slot_end = tb__calloc((size_t)ncoords + 1, sizeof *table->slot_end);
    if (!table->span || !table->slot_end)
        return TB_NO_MEMORY;
    for (size_t s = 0; s < table->nsegments; s++)
        table->cls[table->segment[s].cls].nspans++;
    size_t nspans = 0, nslots = 0;
    for (int32_t c = 0; c < table->nclasses; c++) {
        tb__table_class *cls = &table->cls[c];
        cls->first_span = nspans;
        nspans += cls->nspans;
        cls->nspans = 0;
        nslots += (size_t)cls->nholders;
        for (int32_t h = 0; h < cls->nholders; h++)
            table->slot_end[table->holder[cls->first_holder + h]]++;
    }
    for (size_t s = 0; s < table->nsegments; s++) {
        const tb__table_segment *segment = &table->segment[s];
        tb__table_class *cls = &table->cls[segment->cls];
        table->span[cls->first_span + cls->nspans++] =
            (tb__span){.start = segment->start, .stop = segment->stop, .offsets = table->offset + segment->offsets};
    }
    table->slot = tb__calloc(nslots, sizeof *table->slot);
    if (!table->slot)
        return TB_NO_MEMORY;
    size_t start = 0;
    for (int32_t coord = 0; coord < ncoords; coord++) { /* counts become starts, then ends as they are filled */
        size_t n = table->slot_end[coord];
        table->slot_end[coord] = start;
        start += n;
    }
    for (int32_t c = 0; c < table->nclasses; c++) {
        for (int32_t h = 0; h < table->cls[c].nholders; h++) {
            int32_t coord = table->holder[table->cls[c].first_holder + h];
            table->slot[table->slot_end[coord]++] = (tb__slot){c, h};
        }
    }
    return TB_OK;
}

struct tb__axis_table *tb__axis_table_create(const tb__axis *axis, int dim, tb_status *status) {
    held_list all = {0};
    builder b = {0};
    tb__axis_table *table = tb__calloc(1, sizeof *table);
    *status = table ? collect_lists(axis, dim, &all) : TB_NO_MEMORY;
    if (*status == TB_OK)
        *status = sweep_lists(&b, dim, &all, axis->distinct);
    free(all.item);
    tb__index_fini(&b.by_holders);
    if (!table)
        return NULL;
    *table = (tb__axis_table){.segment = b.segments.item,
                              .nsegments = b.segments.count,
                              .offset = b.offsets.item,
                              .cls = b.classes.item,
                              .nclasses = (int32_t)b.classes.count,
                              .holder = b.holders.item};
    if (*status == TB_OK)
        *status = index_classes(table, axis->ncoords);
    if (*status != TB_OK) {
        tb__axis_table_destroy(table);
        return NULL;
    }
    return table;
}

void tb__axis_table_destroy(struct tb__axis_table *table) {
    if (!table)
        return;
    free(table->segment);
    free(table->offset);
    free(table->cls);
    free(table->holder);
    free(table->span);
    free(table->slot);
    free(table->slot_end);
    free(table);
}

size_t tb__table_find(const tb__axis_table *table, int64_t index) {
    size_t i = 0;
    TB_BISECT(i, table->nsegments, table->segment[i].stop > index);
    return i;
}
