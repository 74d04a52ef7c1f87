/* Replica sets: their members, and absent receivers, which their lines do not serve.
 *
 * Which receivers are absent depends on the ranks of both meshes, which may be in any order, so there is no closed
 * form: every member is checked. It does not depend on the shape, so it is cached from tensor to tensor. */
#include "plan/line.h"

#include "base/int.h"

#include <string.h>

/* A receiver: the target classes of its cell, and its number among the cell's receivers. */
typedef struct tb__receiver {
    int32_t cls[TB_MAX_DIMS];
    int64_t index;
} tb__receiver;

typedef TB_VEC(tb__receiver) receiver_list;

/* The slots of an axis coordinate whose class has indices in common with the replica set. */
static tb_status overlapping_slots(const tb_plan *plan, const tb__replica_set *set, int d, int32_t coord,
                                   tb__arena *arena, const tb__slot **out, size_t *count) {
    const tb__axis *axis = &plan->dst.axis[d];
    TB_TRY(tb__axis_slots(axis, coord, arena, out, count));
    if (!axis->table)
        return TB_OK; /* one slot; whether it overlaps the replica set depends on the shape */
    tb__slot *kept = tb__arena_alloc(arena, *count, sizeof *kept);
    if (!kept)
        return TB_NO_MEMORY;
    size_t n = 0;
    for (size_t i = 0; i < *count; i++) {
        tb__pairing p = {.dst_class = (*out)[i].cls, .src = set->spans[d], .tally = set->tally[d]};
        tb__pairing_init(plan, d, &p);
        if (p.count > 0)
            kept[n++] = (*out)[i];
    }
    *out = kept;
    *count = n;
    return TB_OK;
}

/* Adds the target rank's receivers that could overlap the replica set at some shape. */
static tb_status add_wants(const tb_plan *plan, const tb__replica_set *set, int32_t rank, receiver_list *list,
                           tb__arena *arena) {
    tb__place place;
    int n = plan->shape.ndim;
    const tb__slot *slot[TB_MAX_DIMS];
    size_t count[TB_MAX_DIMS], at[TB_MAX_DIMS] = {0};
    if (!tb__grid_place(&plan->dst, rank, &place) || place.part != 0)
        return TB_OK;
    for (int d = 0; d < n; d++) {
        TB_TRY(overlapping_slots(plan, set, d, place.coord[d], arena, &slot[d], &count[d]));
        if (count[d] == 0)
            return TB_OK;
    }
    for (int d = n; d >= 0;) {
        tb__receiver r = {.index = 0};
        int32_t holder[TB_MAX_DIMS];
        for (int e = 0; e < n; e++) {
            r.cls[e] = slot[e][at[e]].cls;
            holder[e] = slot[e][at[e]].holder;
        }
        r.index = tb__holder_index(&plan->dst, r.cls, 1, holder, place.copy, 0);
        if (!tb__vec_push(list, r))
            return TB_NO_MEMORY;
        for (d = n - 1; d >= 0 && ++at[d] == count[d]; d--)
            at[d] = 0;
    }
    return TB_OK;
}

/* The same for all target ranks on a host. */
static tb_status add_host(const tb_plan *plan, const tb__replica_set *set, int32_t host, receiver_list *list,
                          tb__arena *arena) {
    size_t i = 0, ntargets = (size_t)plan->dst_layout->nranks;
    TB_BISECT(i, ntargets, plan->target_by_host[i] >> 32 >= (uint64_t)host);
    for (; i < ntargets && plan->target_by_host[i] >> 32 == (uint64_t)host; i++)
        TB_TRY(add_wants(plan, set, (int32_t)(uint32_t)plan->target_by_host[i], list, arena));
    return TB_OK;
}

static int compare_receivers(const void *a, const void *b) {
    const tb__receiver *x = a, *y = b;
    for (int d = 0; d < TB_MAX_DIMS; d++) { /* unused classes are zero */
        if (x->cls[d] != y->cls[d])
            return x->cls[d] < y->cls[d] ? -1 : 1;
    }
    return (x->index > y->index) - (x->index < y->index);
}

/* Receivers that hold what the replica set holds, or are on a member's host; each once, in the order of the line. */
static tb_status find_absent(const tb_plan *plan, const tb__replica_set *set, receiver_list *list, tb__arena *arena) {
    int64_t nparts = plan->src.partial.size, n = tb__holders_count(&plan->src, set->cls, nparts);
    bool by_host = plan->hosts && plan->src.partial.count == 0;
    int32_t holder[TB_MAX_DIMS];
    for (int64_t m = 0; m < n; m++) {
        int32_t rank = tb__holder_rank(&plan->src, set->cls, nparts, m, holder);
        TB_TRY(by_host ? add_host(plan, set, plan->hosts[rank], list, arena) : add_wants(plan, set, rank, list, arena));
    }
    tb__vec_sort_unique(list, compare_receivers); /* several members on one host bring the same receivers */
    return TB_OK;
}

/* The same, grouped by cell. */
typedef struct run {
    int32_t cls[TB_MAX_DIMS];
    size_t first, count; /* in index */
} run;

typedef struct absentees {
    run *runs;
    int64_t *index;
    size_t nruns, nreceivers;
} absentees;

static void absentees_fini(absentees *a) {
    free(a->runs);
    free(a->index);
    *a = (absentees){0};
}

static tb_status absentees_init(absentees *a, const tb_plan *plan, const tb__replica_set *set, tb__arena *arena) {
    receiver_list list = {0};
    TB_VEC(run) runs = {0};
    tb_status status = find_absent(plan, set, &list, arena);
    *a = (absentees){.index = tb__malloc(list.count, sizeof *a->index), .nreceivers = list.count};
    if (!a->index)
        status = TB_NO_MEMORY;
    for (size_t i = 0; i < list.count && status == TB_OK; i++) {
        run *last = runs.count ? &runs.item[runs.count - 1] : NULL;
        a->index[i] = list.item[i].index;
        if (last && memcmp(last->cls, list.item[i].cls, sizeof last->cls) == 0) {
            last->count++;
            continue;
        }
        run new = {.first = i, .count = 1};
        memcpy(new.cls, list.item[i].cls, sizeof new.cls);
        if (!tb__vec_push(&runs, new))
            status = TB_NO_MEMORY;
    }
    a->runs = runs.item;
    a->nruns = runs.count;
    free(list.item);
    if (status != TB_OK)
        absentees_fini(a);
    return status;
}

/* The cached absent receivers of one replica set. */
typedef struct memory {
    tb_layout *src, *dst;
    int ndim;
    int32_t cls[TB_MAX_DIMS];
    absentees absent;
} memory;

enum { MEMORY_SLOTS = 256, MEMORY_RECEIVERS = 1 << 20 };

struct tb__replica_set_memory {
    memory slot[MEMORY_SLOTS]; /* by hash; a new entry replaces the old one */
    size_t nreceivers;
    absentees last; /* of a replica set that can't be cached */
};

static void forget_absentees(struct tb__replica_set_memory *memories, memory *m) {
    memories->nreceivers -= m->absent.nreceivers;
    tb_layout_destroy(m->src);
    tb_layout_destroy(m->dst);
    absentees_fini(&m->absent);
    *m = (memory){0};
}

void tb__replica_set_memory_destroy(struct tb__replica_set_memory *memories) {
    for (size_t i = 0; memories && i < MEMORY_SLOTS; i++)
        forget_absentees(memories, &memories->slot[i]);
    if (memories)
        absentees_fini(&memories->last);
    free(memories);
}

static bool is_shape_independent(const tb_plan *plan) {
    bool closed = !plan->hosts;
    for (int d = 0; d < plan->shape.ndim; d++)
        closed &= !plan->src.axis[d].table && !plan->dst.axis[d].table;
    return closed;
}

/* The absent receivers of a replica set, from the cache if possible; valid until the next call with the same scratch.
 */
static tb_status find_or_list_absentees(const tb_plan *plan, const tb__replica_set *set, tb_routes *scratch,
                                        const absentees **out) {
    struct tb__replica_set_memory *memories = scratch->memory;
    if (!memories)
        memories = scratch->memory = tb__calloc(1, sizeof *memories);
    if (!memories)
        return TB_NO_MEMORY;
    if (!is_shape_independent(plan)) {
        absentees_fini(&memories->last);
        *out = &memories->last;
        return absentees_init(&memories->last, plan, set, &scratch->arena);
    }
    size_t nbytes = (size_t)plan->shape.ndim * sizeof *set->cls;
    uint64_t hash = plan->src_layout->hash * 3 + plan->dst_layout->hash;
    for (int d = 0; d < plan->shape.ndim; d++)
        hash = (hash ^ (uint64_t)set->cls[d]) * 0x9E3779B97F4A7C15U;
    memory *m = &memories->slot[hash >> 32 & (MEMORY_SLOTS - 1)];
    if (m->src != plan->src_layout || m->dst != plan->dst_layout || m->ndim != plan->shape.ndim ||
        memcmp(m->cls, set->cls, nbytes) != 0) {
        absentees absent;
        TB_TRY(absentees_init(&absent, plan, set, &scratch->arena));
        forget_absentees(memories, m);
        for (size_t i = 0; memories->nreceivers + absent.nreceivers > MEMORY_RECEIVERS && i < MEMORY_SLOTS; i++)
            forget_absentees(memories, &memories->slot[i]);
        *m = (memory){.src = tb__layout_ref(plan->src_layout),
                      .dst = tb__layout_ref(plan->dst_layout),
                      .ndim = plan->shape.ndim,
                      .absent = absent};
        memcpy(m->cls, set->cls, nbytes);
        memories->nreceivers += absent.nreceivers;
    }
    *out = &m->absent;
    return TB_OK;
}

/* Removes absent receivers that have indices in common with the replica set at this shape from the line. */
static tb_status set_absent(const tb_plan *plan, tb__replica_set *set, const absentees *absent, tb__arena *arena) {
    set->absent = tb__arena_alloc(arena, absent->nruns, sizeof *set->absent);
    if (!set->absent)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < absent->nruns; i++) {
        const run *r = &absent->runs[i];
        tb__pairing pairing[TB_MAX_DIMS];
        tb__cell cell;
        tb__replica_set_cell(plan, set, r->cls, pairing, &cell);
        if (cell.volume == 0)
            continue;
        tb__absent *a = &set->absent[set->nabsent++];
        *a = (tb__absent){
            .start = cell.start, .volume = cell.volume, .index = absent->index + r->first, .count = r->count};
        memcpy(a->cls, r->cls, sizeof a->cls);
        if (!tb__counts_once(plan))
            a->weight = (tb__wide)(uint64_t)cell.volume * a->count;
        else if (a->count == (uint64_t)cell.nreceivers)
            a->weight = (uint64_t)cell.volume; /* all receivers are absent */
        set->line -= a->weight;
    }
    return TB_OK;
}

int64_t tb__min_part_nbytes = 256 << 10; /* smaller parts are not worth a chunk of their own to every receiver */

/* Where cells count once, every cut costs each receiver of the cell a chunk. Short lines need not be cut to keep all
 * members busy: tensors of a batch take turns with the member they begin with. */
static int64_t count_parts(const tb_plan *plan, const tb__replica_set *set) {
    if (!tb__counts_once(plan))
        return set->nmembers;
    tb__wide nbytes = (set->line * tb_dtype_bits(plan->dtype) + 7) / 8;
    tb__wide worth = tb__wide_div(nbytes + (uint64_t)tb__min_part_nbytes - 1, (uint64_t)tb__min_part_nbytes);
    if (worth >= (uint64_t)set->nmembers)
        return set->nmembers;
    return worth > 0 ? (int64_t)worth : 1;
}

static tb_status init_line(const tb_plan *plan, tb__replica_set *set, tb_routes *scratch) {
    set->nmembers = plan->unbalanced ? 1 : tb__holders_count(&plan->src, set->cls, plan->src.partial.size);
    set->absent = NULL;
    set->nabsent = 0;
    set->line = tb__copies_weight(plan);
    for (int d = 0; d < plan->shape.ndim; d++)
        set->line *= set->total[d];
    if (set->line == 0 || (!plan->meshes_overlap && !plan->hosts))
        return TB_OK;
    const absentees *absent;
    TB_TRY(find_or_list_absentees(plan, set, scratch, &absent));
    size_t nreceivers = (size_t)(plan->dst_layout->nranks / plan->dst.partial.size);
    if (plan->src.partial.count == 0 && !plan->has_tables && absent->nreceivers == nreceivers && !plan->hosts) {
        set->line = 0; /* every target rank is a member: nothing moves */
        return TB_OK;
    }
    return set_absent(plan, set, absent, &scratch->arena);
}

tb_status tb__replica_set_init(const tb_plan *plan, tb__replica_set *set, tb_routes *scratch) {
    TB_TRY(init_line(plan, set, scratch));
    set->nparts = count_parts(plan, set);
    return TB_OK;
}

bool tb__replica_set_has(const tb_plan *plan, const tb__replica_set *set, int32_t rank, int32_t *holder,
                         int64_t *index) {
    tb__place place;
    if (!plan->meshes_overlap || !tb__grid_place(&plan->src, rank, &place))
        return false;
    for (int d = 0; d < plan->shape.ndim; d++) {
        if (!tb__axis_holds(&plan->src.axis[d], set->cls[d], place.coord[d], &holder[d]))
            return false;
    }
    *index = tb__holder_index(&plan->src, set->cls, plan->src.partial.size, holder, place.copy, place.part);
    return true;
}

size_t tb__absent_before(const tb__absent *a, int64_t index) {
    size_t i = 0;
    TB_BISECT(i, a ? a->count : 0, a->index[i] >= index);
    return i;
}

size_t tb__absent_upto(const tb__absent *a, int64_t served) {
    size_t i = 0;
    TB_BISECT(i, a ? a->count : 0, a->index[i] - (int64_t)i > served); /* more before it are served */
    return i;
}

tb__wide tb__line_expand(const tb_plan *plan, const tb__replica_set *set, tb__wide position) {
    for (size_t i = 0; i < set->nabsent && set->absent[i].start <= position; i++) {
        const tb__absent *a = &set->absent[i];
        if (tb__counts_once(plan)) {
            position += a->weight;
            continue;
        }
        tb__wide served = tb__wide_div(position - a->start, (uint64_t)a->volume);
        size_t passed = served > INT64_MAX ? a->count : tb__absent_upto(a, (int64_t)served);
        position += (tb__wide)(uint64_t)a->volume * passed;
    }
    return position;
}

tb_status tb__plan_line(const tb_plan *plan, const int32_t *classes, tb_routes *scratch, tb__wide *line,
                        int64_t *nmembers) {
    tb__replica_set set;
    for (int d = 0; d < plan->shape.ndim; d++) {
        const tb__axis *axis = &plan->dst.axis[d];
        set.cls[d] = classes[d];
        TB_TRY(tb__axis_class(&plan->src.axis[d], classes[d], &scratch->arena, &set.spans[d]));
        TB_TRY(tb__axis_tally(axis, set.spans[d], tb__counts_once(plan), &scratch->arena, &set.tally[d]));
        set.total[d] = tb__axis_before(axis, tb__axis_nclasses(axis), set.spans[d], set.tally[d]);
    }
    TB_TRY(tb__replica_set_init(plan, &set, scratch));
    *line = set.line;
    *nmembers = set.nmembers;
    return TB_OK;
}
