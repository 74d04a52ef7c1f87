/* The plan cache: a model has thousands of tensors and a dozen distinct (layouts, shape), so plans and each rank's
 * routes are computed once and shared. It grows until its owner drops entries that were not used for long. */
#include "plan/plan.h"

#include "base/index.h"
#include "base/opts.h"

#include <string.h>

typedef struct plan_entry {
    tb_plan *plan;
    uint64_t hash, used; /* used: the time stamp of the last use */
} plan_entry;

typedef struct routes_entry {
    const tb_plan *plan; /* its `used` is not below that of its routes */
    int32_t rank;
    uint64_t rotation;
    uint64_t hash, used;
    tb_routes *routes;
    uint32_t *numbers; /* NULL until they are asked for */
} routes_entry;

struct tb_plan_cache {
    TB_VEC(plan_entry) plans;
    TB_VEC(routes_entry) routes;
    tb__index by_plan, by_routes;
    tb_routes *scratch;
    uint64_t hits, misses;
    uint64_t time;
    size_t nbytes; /* of all plans and routes */
};

static bool same_opts(const tb_plan *plan, const tb_plan_opts *opts) {
    const int32_t *hosts = opts->hosts;
    return plan->unbalanced == opts->unbalanced && plan->whole_rows == opts->whole_rows && !plan->hosts == !hosts &&
           (!hosts || (plan->nhosts == opts->nhosts && memcmp(plan->hosts, hosts, opts->nhosts * sizeof *hosts) == 0));
}

tb_status tb_plan_cache_get(tb_plan_cache *cache, const tb_layout *src, const tb_layout *dst, const tb_shape *shape,
                            tb_dtype dtype, const tb_plan_opts *opts, const tb_plan **out) {
    tb_plan_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    uint64_t hash = tb__hash(tb__hash(tb__hash(src->hash, dst->hash), (uint64_t)dtype), (uint64_t)shape->ndim);
    for (int d = 0; d < shape->ndim && d < TB_MAX_DIMS; d++)
        hash = tb__hash(hash, (uint64_t)shape->dim[d]);
    size_t probe = 0, at;
    while ((at = tb__index_next(&cache->by_plan, hash, &probe)) != TB__NOWHERE) {
        const tb_plan *plan = cache->plans.item[at].plan;
        if (plan->dtype == dtype && plan->shape.ndim == shape->ndim &&
            memcmp(plan->shape.dim, shape->dim, (size_t)shape->ndim * sizeof *shape->dim) == 0 &&
            tb_layout_equal(plan->src_layout, src) && tb_layout_equal(plan->dst_layout, dst) && same_opts(plan, &o)) {
            cache->hits++;
            cache->plans.item[at].used = cache->time;
            *out = plan;
            return TB_OK;
        }
    }
    tb_plan *plan;
    TB_TRY(tb_plan_create(src, dst, shape, dtype, opts, &plan));
    if (!tb__vec_reserve(&cache->plans, 1) || !tb__index_add(&cache->by_plan, hash, cache->plans.count)) {
        tb_plan_destroy(plan);
        return TB_NO_MEMORY;
    }
    cache->plans.item[cache->plans.count++] = (plan_entry){plan, hash, cache->time};
    cache->nbytes += tb__plan_nbytes(plan);
    cache->misses++;
    *out = plan;
    return TB_OK;
}

/* A copy without the scratch memory of planning. */
static tb_status copy_compact(const tb_routes *from, tb_routes **out) {
    tb_routes *copy;
    TB_TRY(tb_routes_create(&copy));
    size_t count = from->list.count;
    tb_status status = count == 0 || tb__vec_reserve(&copy->list, count) ? TB_OK : TB_NO_MEMORY;
    size_t nranks = 0;
    for (int round = 0; round < 2 && status == TB_OK; round++) { /* count, then copy; neighbours share rank lists */
        int32_t *next = NULL;
        if (round == 1) {
            copy->ranks = next = tb__malloc(nranks, sizeof *next);
            if (!next) {
                status = TB_NO_MEMORY;
                break;
            }
            copy->list.count = count;
        }
        for (size_t i = 0; i < count; i++) {
            const tb_route *route = &from->list.item[i], *last = i ? route - 1 : NULL;
            bool same_targets = last && last->targets == route->targets;
            bool same_contributors = last && last->contributors == route->contributors;
            if (round == 0) {
                nranks += (same_targets ? 0 : route->ntargets) + (same_contributors ? 0 : route->ncontributors);
                continue;
            }
            tb_route *to = &copy->list.item[i];
            *to = *route;
            to->targets = same_targets ? to[-1].targets : memcpy(next, route->targets, route->ntargets * sizeof *next);
            next += same_targets ? 0 : route->ntargets;
            if (route->ncontributors) {
                to->contributors = same_contributors
                                       ? to[-1].contributors
                                       : memcpy(next, route->contributors, route->ncontributors * sizeof *next);
                next += same_contributors ? 0 : route->ncontributors;
            }
        }
    }
    if (status != TB_OK) {
        tb_routes_destroy(copy);
        return status;
    }
    copy->max_slice = from->max_slice;
    *out = copy;
    return TB_OK;
}

static tb_status find_routes(tb_plan_cache *cache, const tb_plan *plan, int32_t rank, uint64_t rotation,
                             routes_entry **out) {
    rotation %= plan->rotation_period;
    uint64_t hash = tb__hash(tb__hash((uint64_t)(uintptr_t)plan, (uint64_t)rank), rotation);
    size_t probe = 0, at;
    while ((at = tb__index_next(&cache->by_routes, hash, &probe)) != TB__NOWHERE) {
        routes_entry *entry = &cache->routes.item[at];
        if (entry->plan == plan && entry->rank == rank && entry->rotation == rotation) {
            entry->used = cache->time;
            *out = entry;
            return TB_OK;
        }
    }
    routes_entry entry = {.plan = plan, .rank = rank, .rotation = rotation, .hash = hash, .used = cache->time};
    TB_TRY(tb_plan_routes(plan, rank, rotation, cache->scratch));
    TB_TRY(copy_compact(cache->scratch, &entry.routes));
    if (!tb__vec_reserve(&cache->routes, 1) || !tb__index_add(&cache->by_routes, hash, cache->routes.count)) {
        tb_routes_destroy(entry.routes);
        return TB_NO_MEMORY;
    }
    cache->nbytes += tb__routes_nbytes(entry.routes);
    *out = &cache->routes.item[cache->routes.count++];
    **out = entry;
    return TB_OK;
}

tb_status tb_plan_cache_routes(tb_plan_cache *cache, const tb_plan *plan, int32_t rank, uint64_t rotation,
                               const tb_routes **out) {
    routes_entry *entry;
    TB_TRY(find_routes(cache, plan, rank, rotation, &entry));
    *out = entry->routes;
    return TB_OK;
}

tb_status tb__plan_cache_numbered(tb_plan_cache *cache, const tb_plan *plan, int32_t rank, uint64_t rotation,
                                  const tb_routes **routes, const uint32_t **numbers) {
    routes_entry *entry;
    TB_TRY(find_routes(cache, plan, rank, rotation, &entry));
    if (!entry->numbers) {
        TB_TRY(tb__plan_number(plan, entry->rotation, entry->routes, &entry->numbers));
        cache->nbytes += tb__mem_nbytes(entry->numbers);
    }
    *routes = entry->routes;
    *numbers = entry->numbers;
    return TB_OK;
}

/* ---- Eviction -------------------------------------------------------------------------------------------------- */

void tb__plan_cache_set_time(tb_plan_cache *cache, uint64_t time) {
    cache->time = time;
}

size_t tb__plan_cache_nbytes(const tb_plan_cache *cache) {
    return cache->nbytes;
}

uint64_t tb__plan_cache_oldest(const tb_plan_cache *cache) {
    uint64_t oldest = UINT64_MAX;
    for (size_t i = 0; i < cache->plans.count; i++)
        oldest = cache->plans.item[i].used < oldest ? cache->plans.item[i].used : oldest;
    for (size_t i = 0; i < cache->routes.count; i++)
        oldest = cache->routes.item[i].used < oldest ? cache->routes.item[i].used : oldest;
    return oldest;
}

static void drop_routes(tb_plan_cache *cache, uint64_t time) {
    size_t nkept = 0;
    for (size_t i = 0; i < cache->routes.count; i++) {
        routes_entry *entry = &cache->routes.item[i];
        if (entry->used > time) {
            cache->routes.item[nkept++] = *entry;
            continue;
        }
        cache->nbytes -= tb__routes_nbytes(entry->routes) + tb__mem_nbytes(entry->numbers);
        tb_routes_destroy(entry->routes);
        free(entry->numbers);
    }
    cache->routes.count = nkept;
}

static size_t drop_plans(tb_plan_cache *cache, uint64_t time) {
    size_t nkept = 0, count = cache->plans.count;
    for (size_t i = 0; i < count; i++) {
        plan_entry *entry = &cache->plans.item[i];
        if (entry->used > time) {
            cache->plans.item[nkept++] = *entry;
            continue;
        }
        cache->nbytes -= tb__plan_nbytes(entry->plan);
        tb_plan_destroy(entry->plan);
    }
    cache->plans.count = nkept;
    return count - nkept;
}

size_t tb__plan_cache_drop(tb_plan_cache *cache, uint64_t time) {
    drop_routes(cache, time);
    size_t ndropped = drop_plans(cache, time);
    tb__index_clear(&cache->by_plan);
    tb__index_clear(&cache->by_routes);
    for (size_t i = 0; i < cache->plans.count; i++)
        tb__index_add(&cache->by_plan, cache->plans.item[i].hash, i);
    for (size_t i = 0; i < cache->routes.count; i++)
        tb__index_add(&cache->by_routes, cache->routes.item[i].hash, i);
    return ndropped;
}

tb_status tb_plan_cache_create(tb_plan_cache **out) {
    tb_plan_cache *cache = tb__calloc(1, sizeof *cache);
    if (!cache)
        return TB_NO_MEMORY;
    tb_status status = tb_routes_create(&cache->scratch);
    if (status != TB_OK) {
        free(cache);
        return status;
    }
    *out = cache;
    return TB_OK;
}

void tb_plan_cache_destroy(tb_plan_cache *cache) {
    if (!cache)
        return;
    (void)tb__plan_cache_drop(cache, UINT64_MAX);
    tb_routes_destroy(cache->scratch);
    free(cache->routes.item);
    free(cache->plans.item);
    tb__index_fini(&cache->by_plan);
    tb__index_fini(&cache->by_routes);
    free(cache);
}

void tb_plan_cache_counters(const tb_plan_cache *cache, uint64_t *hits, uint64_t *misses) {
    *hits = cache->hits;
    *misses = cache->misses;
}
