/* Axes: the closed form, and the code that it shares with tables of Explicit axes (axis_table.c). */
#include "layout/axis.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return a / b + (a % b != 0); /* a + b - 1 could overflow */
}

/* How many of the first x positions of a piece go to coordinates before r. */
static inline int64_t piece_before(int64_t size, int64_t ways, int64_t r, int64_t x) {
    return tb__min64(x, tb__min64(r * ceil_div(size, ways), size));
}

/* How many of the first x positions of a list of n a sharding stage gives to coordinates before r. */
static int64_t stage_before(const tb_placement *place, int64_t ways, int64_t n, int64_t r, int64_t x) {
    if (place->kind == TB_SHARD || n == 0)
        return piece_before(n, ways, r, x);
    if (place->kind == TB_STRIDED_SHARD) {
        int64_t size = ceil_div(n, place->split);
        int64_t whole = x / size, start = whole * size;
        return whole * piece_before(size, ways, r, size) + piece_before(tb__min64(size, n - start), ways, r, x - start);
    }
    int64_t before = 0;
    for (size_t j = 0; j < place->nsizes && x > 0; j++) {
        before += piece_before(place->sizes[j], ways, r, tb__min64(x, place->sizes[j]));
        x -= tb__min64(x, place->sizes[j]);
    }
    return before;
}

/* Length of the list that coordinate r keeps of a list of n. */
static int64_t stage_length(const tb_placement *place, int64_t ways, int64_t n, int64_t r) {
    if (place->kind == TB_EXPLICIT) {
        int64_t length = 0;
        for (size_t i = r ? place->list_ends[r - 1] : 0; i < place->list_ends[r]; i++)
            length += place->segments[i].stop - place->segments[i].start;
        return length;
    }
    return stage_before(place, ways, n, r + 1, n) - stage_before(place, ways, n, r, n);
}

/* Lists being built in an arena. */
typedef struct span_list {
    tb__span *item;
    size_t count, capacity;
} span_list;

static bool add_span(span_list *list, tb__arena *arena, int64_t start, int64_t stop) {
    tb__span *last = list->count ? &list->item[list->count - 1] : NULL;
    if (last && last->stop == start) {
        last->stop = stop;
        return true;
    }
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 4;
        tb__span *item = tb__arena_alloc(arena, capacity, sizeof *item);
        if (!item)
            return false;
        if (list->count)
            memcpy(item, list->item, list->count * sizeof *item);
        list->item = item;
        list->capacity = capacity;
    }
    int64_t offset = last ? last->offset + (last->stop - last->start) : 0;
    list->item[list->count++] = (tb__span){.start = start, .stop = stop, .offset = offset};
    return true;
}

/* Appends the indices at positions [lo, hi) of `from`. */
static bool select_positions(const span_list *from, int64_t lo, int64_t hi, span_list *to, tb__arena *arena) {
    size_t after = 0;
    TB_BISECT(after, from->count, from->item[after].offset > lo);
    for (size_t i = after - 1; lo < hi && i < from->count; i++) {
        const tb__span *span = &from->item[i];
        int64_t start = span->start + (lo - span->offset);
        int64_t taken = tb__min64(span->stop - start, hi - lo);
        if (!add_span(to, arena, start, start + taken))
            return false;
        lo += taken;
    }
    return true;
}

/* One function evaluates every sharding placement: it names the positions that coordinate r keeps of `from`. */
static bool apply_stage(const tb_placement *place, int64_t ways, int64_t n, int64_t r, const span_list *from,
                        span_list *to, tb__arena *arena) {
    if (place->kind == TB_EXPLICIT) {
        for (size_t i = r ? place->list_ends[r - 1] : 0; i < place->list_ends[r]; i++) {
            const tb_segment *s = &place->segments[i];
            if (s->start < s->stop && !select_positions(from, s->start, s->stop, to, arena))
                return false;
        }
        return true;
    }
    int64_t size = place->kind == TB_STRIDED_SHARD ? ceil_div(n, place->split) : n;
    for (int64_t start = 0, j = 0; start < n; start += size, j++) {
        if (place->kind == TB_BLOCK_SHARD)
            size = place->sizes[j];
        int64_t piece = tb__min64(size, n - start);
        int64_t lo = piece_before(piece, ways, r, piece), hi = piece_before(piece, ways, r + 1, piece);
        if (lo < hi && !select_positions(from, start + lo, start + hi, to, arena))
            return false;
    }
    return true;
}

tb_status tb__axis_list(const tb__axis *axis, int32_t coord, tb__arena *arena, tb__spans *out) {
    span_list list = {0};
    int64_t n = axis->length;
    if (n > 0 && !add_span(&list, arena, 0, n))
        return TB_NO_MEMORY;
    for (int i = 0; i < axis->nstages; i++) {
        const tb_placement *place = axis->stage[i].place;
        int64_t ways = axis->stage[i].ways, r = coord / axis->stage[i].stride % ways;
        span_list next = {0};
        if (!apply_stage(place, ways, n, r, &list, &next, arena))
            return TB_NO_MEMORY;
        list = next;
        n = stage_length(place, ways, n, r);
    }
    *out = (tb__spans){list.item, list.count};
    return TB_OK;
}

int64_t tb__axis_local(const tb__axis *axis, int32_t coord) {
    int64_t n = axis->length;
    for (int i = 0; i < axis->nstages; i++) {
        int64_t ways = axis->stage[i].ways;
        n = stage_length(axis->stage[i].place, ways, n, coord / axis->stage[i].stride % ways);
    }
    return n;
}

/* Distinct lengths that a list can have before a stage, over all coordinates of the stages before it. */
typedef TB_VEC(int64_t) lengths;

static bool lengths_after(const tb_placement *place, int64_t ways, const lengths *before, lengths *after) {
    for (size_t i = 0; i < before->count; i++) {
        int64_t n = before->item[i];
        for (int64_t r = 0; r < ways;) {
            int64_t length = stage_length(place, ways, n, r);
            if (!tb__vec_push(after, length))
                return false;
            r++;
            if (place->kind != TB_EXPLICIT) /* lengths never grow with r: jump to the first that is shorter */
                TB_BISECT(r, ways, stage_length(place, ways, n, r) != length);
        }
        if (place->kind == TB_EXPLICIT)
            break; /* an Explicit stage's lengths do not depend on n */
    }
    tb__vec_sort_unique(after, tb__compare_int64);
    return true;
}

static tb_status check_stage(const tb_placement *place, int dim, int64_t n) {
    if (place->kind == TB_BLOCK_SHARD) {
        int64_t sum = 0;
        for (size_t j = 0; j < place->nsizes; j++)
            sum += place->sizes[j];
        if (sum != n)
            return tb__fail(TB_INVALID,
                            "BlockShard sizes add up to %" PRId64 ", but there are %" PRId64
                            " indices to cut in dim %d",
                            sum, n, dim);
    }
    if (place->kind == TB_EXPLICIT) {
        size_t nsegments = place->nlists ? place->list_ends[place->nlists - 1] : 0;
        for (size_t i = 0; i < nsegments; i++) {
            const tb_segment *s = &place->segments[i];
            if (s->stop > n)
                return tb__fail(TB_INVALID,
                                "Explicit segment %" PRId64 "-%" PRId64 " ends past the %" PRId64
                                " indices there are in dim %d",
                                s->start, s->stop, n, dim);
        }
    }
    return TB_OK;
}

/* Checks the stages one after the other for every length they can meet, and bounds the size of lists. */
static tb_status check_stages(tb__axis *axis, int dim) {
    tb_status status = TB_OK;
    lengths set = {0};
    if (!tb__vec_push(&set, axis->length))
        return TB_NO_MEMORY;
    double max_spans = 1;
    for (int i = 0; i < axis->nstages && status == TB_OK; i++) {
        const tb_placement *place = axis->stage[i].place;
        for (size_t j = 0; j < set.count && status == TB_OK; j++)
            status = check_stage(place, dim, set.item[j]);
        lengths next = {0};
        if (status == TB_OK && !lengths_after(place, axis->stage[i].ways, &set, &next))
            status = TB_NO_MEMORY;
        free(set.item);
        set = (lengths){next.item, next.count, next.capacity};
        if (place->kind == TB_STRIDED_SHARD)
            max_spans += (double)tb__min64(place->split, axis->length);
        else if (place->kind == TB_BLOCK_SHARD)
            max_spans += (double)place->nsizes;
        else if (place->kind == TB_EXPLICIT)
            max_spans *= 1 + (double)place->list_ends[place->nlists - 1];
        if (status == TB_OK && max_spans > TB__MAX_SEGMENTS)
            status = tb__fail(TB_TOO_BIG, "dim %d would be cut into more than %d segments", dim, TB__MAX_SEGMENTS);
    }
    for (size_t j = 0; j < set.count; j++)
        axis->max_local = set.item[j] > axis->max_local ? set.item[j] : axis->max_local;
    free(set.item);
    return status;
}

tb_status tb__axis_init(tb__axis *axis, int dim, int64_t length, int nstages, const tb_placement *const *places,
                        const int64_t *ways, bool distinct) {
    *axis = (tb__axis){.length = length, .ncoords = 1, .nstages = nstages, .max_local = length, .distinct = distinct};
    if (nstages == 0)
        return TB_OK;
    bool is_explicit = false;
    for (int i = nstages - 1; i >= 0; i--) {
        axis->stage[i].place = places[i];
        axis->stage[i].ways = ways[i];
        axis->stage[i].stride = axis->ncoords;
        axis->ncoords *= (int32_t)ways[i];
        is_explicit |= places[i]->kind == TB_EXPLICIT;
    }
    axis->max_local = 0;
    TB_TRY(check_stages(axis, dim));
    tb_status status = TB_OK;
    if (is_explicit)
        axis->table = tb__axis_table_create(axis, dim, &status);
    return status;
}

void tb__axis_fini(tb__axis *axis) {
    tb__axis_table_destroy(axis->table);
    axis->table = NULL;
}

size_t tb__axis_nbytes(const tb__axis *axis) {
    const tb__axis_table *t = axis->table;
    return t ? tb__mem_nbytes(t) + tb__mem_nbytes(t->segment) + tb__mem_nbytes(t->offset) + tb__mem_nbytes(t->cls) +
                   tb__mem_nbytes(t->holder) + tb__mem_nbytes(t->span) + tb__mem_nbytes(t->slot) +
                   tb__mem_nbytes(t->slot_end)
             : 0;
}

/* How many of the indices below x belong to coordinates before `coord` (closed form only). */
static int64_t count_before(const tb__axis *axis, int32_t coord, int64_t x) {
    if (coord == axis->ncoords)
        return x;
    int64_t before = 0, n = axis->length;
    for (int i = 0; i < axis->nstages; i++) {
        const tb_placement *place = axis->stage[i].place;
        int64_t ways = axis->stage[i].ways, r = coord / axis->stage[i].stride % ways;
        int64_t smaller = stage_before(place, ways, n, r, x);
        before += smaller;
        if (i + 1 == axis->nstages)
            break;
        x = stage_before(place, ways, n, r + 1, x) - smaller;
        n = stage_length(place, ways, n, r);
    }
    return before;
}

/* The coordinate that holds `index`, and the end of the run of indices from there on that it holds (closed form). */
static int32_t find_coord(const tb__axis *axis, int64_t index, int64_t *run_stop) {
    int32_t coord = 0;
    int64_t n = axis->length, x = index, run = axis->length - index;
    for (int i = 0; i < axis->nstages; i++) {
        const tb_placement *place = axis->stage[i].place;
        int64_t ways = axis->stage[i].ways;
        int64_t size = n, start = 0;
        if (place->kind == TB_STRIDED_SHARD) {
            size = ceil_div(n, place->split);
            start = x / size * size;
            size = tb__min64(size, n - start);
        } else if (place->kind == TB_BLOCK_SHARD) {
            size_t j = 0;
            for (; x >= start + place->sizes[j]; j++)
                start += place->sizes[j];
            size = place->sizes[j];
        }
        int64_t part = ceil_div(size, ways), r = (x - start) / part;
        run = tb__min64(run, tb__min64((r + 1) * part, size) - (x - start));
        coord += (int32_t)r * axis->stage[i].stride;
        x = stage_before(place, ways, n, r + 1, x) - stage_before(place, ways, n, r, x);
        n = stage_length(place, ways, n, r);
    }
    *run_stop = index + run;
    return coord;
}

int32_t tb__axis_nclasses(const tb__axis *axis) {
    return axis->table ? axis->table->nclasses : axis->ncoords;
}

int32_t tb__axis_nholders(const tb__axis *axis, int32_t cls) {
    return axis->table ? axis->table->cls[cls].nholders : 1;
}

int32_t tb__axis_holder(const tb__axis *axis, int32_t cls, int32_t holder) {
    return axis->table ? axis->table->holder[axis->table->cls[cls].first_holder + holder] : cls;
}

tb_status tb__axis_class(const tb__axis *axis, int32_t cls, tb__arena *arena, tb__spans *out) {
    if (!axis->table)
        return tb__axis_list(axis, cls, arena, out);
    const tb__table_class *c = &axis->table->cls[cls];
    *out = (tb__spans){axis->table->span + c->first_span, c->nspans};
    return TB_OK;
}

tb_status tb__axis_slots(const tb__axis *axis, int32_t coord, tb__arena *arena, const tb__slot **out, size_t *count) {
    if (axis->table) {
        size_t first = coord ? axis->table->slot_end[coord - 1] : 0;
        *out = axis->table->slot + first;
        *count = axis->table->slot_end[coord] - first;
        return TB_OK;
    }
    tb__slot *slot = tb__arena_alloc(arena, 1, sizeof *slot);
    if (!slot)
        return TB_NO_MEMORY;
    *slot = (tb__slot){.cls = coord};
    *out = slot;
    *count = 1;
    return TB_OK;
}

bool tb__axis_repeats(const tb__axis *axis, int32_t cls) {
    return axis->table && axis->table->cls[cls].repeats;
}

bool tb__axis_holds(const tb__axis *axis, int32_t cls, int32_t coord, int32_t *holder) {
    int32_t i = 0, n = tb__axis_nholders(axis, cls);
    TB_BISECT(i, n, tb__axis_holder(axis, cls, i) >= coord);
    *holder = i;
    return i < n && tb__axis_holder(axis, cls, i) == coord;
}

tb_status tb__axis_meeting(const tb__axis *axis, tb__spans spans, tb__arena *arena, const int32_t **out,
                           size_t *count) {
    lengths seen = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < spans.count && status == TB_OK; i++) {
        int64_t at = spans.item[i].start, stop = spans.item[i].stop;
        size_t s = axis->table ? tb__table_find(axis->table, at) : 0;
        while (at < stop) {
            int64_t cls;
            if (axis->table) {
                if (s == axis->table->nsegments || axis->table->segment[s].start >= stop)
                    break;
                cls = axis->table->segment[s].cls;
                at = axis->table->segment[s++].stop;
            } else {
                cls = find_coord(axis, at, &at);
            }
            bool repeats = seen.count && seen.item[seen.count - 1] == cls;
            if (!repeats && !tb__vec_push(&seen, cls)) {
                status = TB_NO_MEMORY;
                break;
            }
        }
    }
    if (status == TB_OK) {
        tb__vec_sort_unique(&seen, tb__compare_int64);
        int32_t *classes = tb__arena_alloc(arena, seen.count, sizeof *classes);
        if (!classes)
            status = TB_NO_MEMORY;
        for (size_t i = 0; i < seen.count && classes; i++)
            classes[i] = (int32_t)seen.item[i];
        *out = classes;
        *count = seen.count;
    }
    free(seen.item);
    return status;
}

/* Pairs of one class. */
typedef struct pairs {
    int32_t cls;
    tb__wide count;
} pairs;

static int compare_pairs(const void *a, const void *b) {
    const pairs *x = a, *y = b;
    return (x->cls > y->cls) - (x->cls < y->cls);
}

/* Adds up pairs of the same class. */
static tb_status make_tally(pairs *list, size_t count, tb__arena *arena, const tb__tally **out) {
    tb__tally *tally = tb__arena_alloc(arena, 1, sizeof *tally);
    int32_t *cls = tb__arena_alloc(arena, count, sizeof *cls);
    tb__wide *before = tb__arena_alloc(arena, count + 1, sizeof *before);
    if (!tally || !cls || !before)
        return TB_NO_MEMORY;
    *tally = (tb__tally){.cls = cls, .before = before};
    if (count)
        qsort(list, count, sizeof *list, compare_pairs);
    tb__wide sum = 0;
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || list[i].cls != list[i - 1].cls) {
            cls[tally->count] = list[i].cls;
            before[tally->count++] = sum;
        }
        sum += list[i].count;
    }
    before[tally->count] = sum;
    *out = tally;
    return TB_OK;
}

tb_status tb__axis_tally(const tb__axis *axis, tb__spans spans, bool once, tb__arena *arena, const tb__tally **out) {
    const tb__axis_table *table = axis->table;
    *out = NULL;
    if (!table)
        return TB_OK;
    TB_VEC(pairs) list = {0};
    for (size_t i = 0; i < spans.count; i++) {
        int64_t start = spans.item[i].start, stop = spans.item[i].stop;
        for (size_t s = tb__table_find(table, start); s < table->nsegments && table->segment[s].start < stop; s++) {
            const tb__table_segment *segment = &table->segment[s];
            int64_t from = segment->start > start ? segment->start : start;
            tb__wide overlap = (uint64_t)(tb__min64(segment->stop, stop) - from);
            pairs p = {segment->cls, once ? overlap : overlap * (uint32_t)table->cls[segment->cls].nholders};
            if (!tb__vec_push(&list, p)) {
                free(list.item);
                return TB_NO_MEMORY;
            }
        }
    }
    tb_status status = make_tally(list.item, list.count, arena, out);
    free(list.item);
    return status;
}

tb__wide tb__axis_before(const tb__axis *axis, int32_t cls, tb__spans spans, const tb__tally *tally) {
    tb__wide before = 0;
    if (tally) {
        size_t i = 0;
        TB_BISECT(i, tally->count, tally->cls[i] >= cls);
        return tally->before[i];
    }
    for (size_t i = 0; i < spans.count; i++)
        before +=
            (uint64_t)(count_before(axis, cls, spans.item[i].stop) - count_before(axis, cls, spans.item[i].start));
    return before;
}

int32_t tb__axis_seek(const tb__axis *axis, tb__spans spans, const tb__tally *tally, tb__wide position) {
    int32_t i = 0, last = tally ? (int32_t)tally->count - 1 : tb__axis_nclasses(axis) - 1;
    TB_BISECT(i, last, (tally ? tally->before[i + 1] : tb__axis_before(axis, i + 1, spans, NULL)) > position);
    return tally ? tally->cls[i] : i;
}

int64_t tb__axis_hole(const tb__axis *axis, int64_t start, int64_t stop) {
    if (!axis->table)
        return -1;
    const tb__axis_table *table = axis->table;
    for (size_t s = tb__table_find(table, start); start < stop; s++) {
        if (s == table->nsegments || table->segment[s].start > start)
            return start;
        start = table->segment[s].stop;
    }
    return -1;
}
