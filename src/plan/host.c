/* Receivers that have a member of the replica set on their own host are served by the members there: each such host has
 * its own line, short enough to walk. */
#include "plan/walk.h"

#include <string.h>

/* One pair of a host's line. */
typedef struct pair {
    const tb__absent *cell;
    int32_t rank;
    int32_t holder[TB_MAX_DIMS];
} pair;

typedef struct host_line {
    tb__cuts cuts;
    const int64_t *members; /* numbers in the replica set */
    pair *pairs;
    size_t npairs;
    const int32_t *cls, *holder; /* the pair this rank receives; NULL: it sends */
} host_line;

/* Members of the replica set on this rank's host. */
static tb_status find_members(tb__walk *w, const tb__replica_set *set, host_line *line) {
    const tb__grid *src = &w->plan->src;
    int32_t holder[TB_MAX_DIMS], host = w->plan->hosts[w->rank];
    int64_t n = tb__holders_count(src, set->cls, 1);
    int64_t *members = tb__arena_alloc(w->arena, (size_t)n, sizeof *members);
    if (!members)
        return TB_NO_MEMORY;
    line->members = members;
    for (int64_t m = 0; m < n; m++) {
        if (w->plan->hosts[tb__holder_rank(src, set->cls, 1, m, holder)] == host)
            members[line->cuts.nparts++] = m;
    }
    return TB_OK;
}

/* Receivers on this rank's host that do not hold the elements themselves. */
static tb_status find_pairs(tb__walk *w, const tb__replica_set *set, host_line *line) {
    const tb_plan *plan = w->plan;
    size_t most = 0;
    for (size_t i = 0; i < set->nabsent; i++)
        most += set->absent[i].count;
    line->pairs = tb__arena_alloc(w->arena, most, sizeof *line->pairs);
    if (!line->pairs)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < set->nabsent; i++) {
        const tb__absent *a = &set->absent[i];
        for (size_t j = 0; j < a->count; j++) {
            pair p = {.cell = a};
            int32_t unused[TB_MAX_DIMS];
            int64_t unused_index;
            p.rank = tb__holder_rank(&plan->dst, a->cls, 1, a->index[j], p.holder);
            if (plan->hosts[p.rank] != plan->hosts[w->rank] ||
                tb__replica_set_has(plan, set, p.rank, unused, &unused_index))
                continue;
            line->pairs[line->npairs++] = p;
            line->cuts.line += (uint64_t)a->volume;
        }
    }
    return TB_OK;
}

static bool is_own(const tb__walk *w, const host_line *line, const pair *p) {
    size_t nbytes = (size_t)w->plan->shape.ndim * sizeof(int32_t);
    return line->cls && p->rank == w->rank && memcmp(p->cell->cls, line->cls, nbytes) == 0 &&
           memcmp(p->holder, line->holder, nbytes) == 0;
}

/* Adds the routes by which member `m` sends pairs[0 .. count-1] the same slices of one cell, if this rank takes
 * part. */
static tb_status emit_pairs(tb__walk *w, const tb__replica_set *set, const tb__cell *cell, const host_line *line,
                            int64_t m, const pair *pairs, size_t count, const tb__slicing *slicing,
                            const tb__slices *slices) {
    tb__parties who = {.ntargets = (uint32_t)count};
    TB_TRY(tb__set_source(w, set, m, &who));
    int32_t *ranks = tb__arena_alloc(w->arena, count, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    memcpy(who.first_holder, pairs[0].holder, sizeof who.first_holder);
    memcpy(who.own_holder, pairs[0].holder, sizeof who.own_holder);
    bool concerns = !line->cls && who.source == w->rank;
    for (size_t i = 0; i < count; i++) {
        ranks[i] = pairs[i].rank;
        if (is_own(w, line, &pairs[i])) {
            concerns = true;
            memcpy(who.own_holder, pairs[i].holder, sizeof who.own_holder);
        }
    }
    who.targets = ranks;
    return concerns ? tb__emit(w, set, cell, &who, slicing, slices) : TB_OK;
}

static tb_status walk_line(tb__walk *w, const tb__replica_set *set, const host_line *line) {
    const tb_plan *plan = w->plan;
    const tb__cuts *c = &line->cuts;
    tb__wide position = 0;
    for (size_t i = 0, next; i < line->npairs; i = next) {
        tb__cell cell;
        tb__pairing pairing[TB_MAX_DIMS];
        const tb__absent *at = line->pairs[i].cell;
        tb__replica_set_cell(plan, set, at->cls, pairing, &cell);
        TB_TRY(tb__cell_lists(plan, &cell, w->arena));
        tb__wide volume = (uint64_t)cell.volume;
        tb__slicing slicing = tb__slicing_choose(plan, c, &cell, volume);
        bool repeats = tb__receivers_of(plan, set, &cell).repeats;
        next = i + 1;
        for (int64_t k = tb__part_at(c, position); k < c->nparts && tb__part_start(c, k) < position + volume; k++) {
            tb__slices s = tb__part_slices(c, &slicing, k, position);
            if (s.lo == s.hi)
                continue;
            if (s.is_whole && !repeats) { /* later pairs that get the same from the same member */
                tb__wide p = position + volume;
                while (next < line->npairs && line->pairs[next].cell == at &&
                       tb__part_slices(c, &slicing, k, p).is_whole) {
                    p += volume;
                    next++;
                }
            }
            tb__record_cut(w, &slicing, c, k, position, volume);
            int64_t m = line->members[plan->unbalanced ? 0 : tb__part_member(k, c->nparts, w->rotation)];
            TB_TRY(emit_pairs(w, set, &cell, line, m, line->pairs + i, next - i, &slicing, &s));
        }
        position += volume * (next - i);
    }
    return TB_OK;
}

tb_status tb__serve_host(tb__walk *w, const tb__replica_set *set, const int32_t *cls, const int32_t *holder,
                         bool *is_served) {
    host_line line = {.cls = cls, .holder = holder};
    TB_TRY(find_members(w, set, &line));
    *is_served = line.cuts.nparts > 0;
    if (!*is_served)
        return TB_OK;
    if (w->plan->unbalanced)
        line.cuts.nparts = 1;
    TB_TRY(find_pairs(w, set, &line));
    return walk_line(w, set, &line);
}
