/* Statistics of a whole plan, and the lower bound over all choices of replicas. */
#include "plan/plan.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/opts.h"

#include <inttypes.h>
#include <string.h>

static tb_status set_ranks(const tb_plan *plan, tb_plan_stats *s) {
    const tb_layout *src = plan->src_layout, *dst = plan->dst_layout;
    size_t most = (size_t)src->nranks + (size_t)dst->nranks;
    s->ranks = tb__malloc(most, sizeof *s->ranks);
    if (!s->ranks)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < src->nranks; i++)
        s->ranks[s->nranks++] = tb_layout_rank_at(src, i);
    for (int32_t i = 0; i < dst->nranks; i++) {
        int32_t rank = tb_layout_rank_at(dst, i);
        if (tb_layout_index_of(src, rank) < 0)
            s->ranks[s->nranks++] = rank;
    }
    qsort(s->ranks, (size_t)s->nranks, sizeof *s->ranks, tb__compare_int32);
    s->send_bytes = tb__calloc((size_t)s->nranks, sizeof *s->send_bytes);
    s->recv_bytes = tb__calloc((size_t)s->nranks, sizeof *s->recv_bytes);
    s->egress_bytes = tb__calloc((size_t)s->nranks, sizeof *s->egress_bytes);
    s->reduce_bytes = tb__calloc((size_t)s->nranks, sizeof *s->reduce_bytes);
    return s->send_bytes && s->recv_bytes && s->egress_bytes && s->reduce_bytes ? TB_OK : TB_NO_MEMORY;
}

/* Adds count*nbytes; sums beyond INT64_MAX become INT64_MAX. */
static void add_saturating(int64_t *sum, int64_t nbytes, uint64_t count) {
    int64_t product;
    if (__builtin_mul_overflow(nbytes, count, &product) || __builtin_add_overflow(*sum, product, sum))
        *sum = INT64_MAX;
}

static void add_route(const tb_plan *plan, tb_plan_stats *s, int32_t i, const tb_route *route) {
    int32_t rank = s->ranks[i];
    int64_t nbytes = tb__dtype_bytes(plan->dtype, route->nelements);
    if (route->source == TB_NO_RANK)
        return;
    if (route->source != rank) {
        for (uint32_t t = 0; t < route->ntargets; t++)
            add_saturating(&s->recv_bytes[i], nbytes, route->targets[t] == rank);
        return;
    }
    add_saturating(&s->reduce_bytes[i], nbytes, route->ncontributors ? route->ncontributors - 1 : 0);
    add_saturating(&s->nchunks, route->ntargets, 1);
    if (route->targets[0] == rank) {
        add_saturating(&s->local_bytes, nbytes, 1);
        return;
    }
    add_saturating(&s->send_bytes[i], nbytes, route->ntargets);
    add_saturating(&s->total_bytes, nbytes, route->ntargets);
    add_saturating(&s->egress_bytes[i], nbytes, 1);
}

/* The lower bound: the bytes a replica set sends, divided by the number of its members; the largest over all of
 * them. */
static tb_status set_bound(const tb_plan *plan, tb_routes *scratch, tb_plan_stats *s) {
    tb_plan balanced = *plan; /* the bound is of balanced plans without hosts */
    balanced.hosts = NULL;
    balanced.unbalanced = false;
    int n = plan->shape.ndim;
    int32_t cls[TB_MAX_DIMS] = {0};
    for (int d = 0; d < n; d++) {
        if (tb__axis_nclasses(&plan->src.axis[d]) == 0)
            return TB_OK;
    }
    for (int d = n; d >= 0;) {
        tb__wide line;
        int64_t nmembers;
        tb__arena_reset(&scratch->arena);
        TB_TRY(tb__plan_line(&balanced, cls, scratch, &line, &nmembers));
        tb__wide nbytes = line * tb_dtype_bits(plan->dtype) / 8;
        tb__wide share = tb__wide_div(nbytes + (uint64_t)nmembers - 1, (uint64_t)nmembers);
        int64_t told = share > INT64_MAX ? INT64_MAX : (int64_t)share;
        s->min_max_send = told > s->min_max_send ? told : s->min_max_send;
        if (line % (uint64_t)nmembers && s->max_slice < tb__dtype_bytes(plan->dtype, 1)) /* no cut divides an element */
            s->max_slice = tb__dtype_bytes(plan->dtype, 1);
        for (d = n - 1; d >= 0 && ++cls[d] == tb__axis_nclasses(&plan->src.axis[d]); d--)
            cls[d] = 0;
    }
    return TB_OK;
}

static tb_status compute_stats(const tb_plan *plan, tb_routes *routes, tb_plan_stats *s) {
    TB_TRY(set_ranks(plan, s));
    tb__wide max_slice = 0;
    for (int32_t i = 0; i < s->nranks; i++) {
        TB_TRY(tb_plan_routes(plan, s->ranks[i], 0, routes));
        for (size_t r = 0; r < tb_routes_count(routes); r++)
            add_route(plan, s, i, tb_routes_at(routes, r));
        max_slice = routes->max_slice > max_slice ? routes->max_slice : max_slice;
        s->max_send = s->send_bytes[i] > s->max_send ? s->send_bytes[i] : s->max_send;
    }
    tb__wide slice_bytes = (max_slice * tb_dtype_bits(plan->dtype) + 7) / 8;
    s->max_slice = slice_bytes > INT64_MAX ? INT64_MAX : (int64_t)slice_bytes;
    return set_bound(plan, routes, s);
}

tb_status tb_plan_stats_compute(const tb_plan *plan, tb_plan_stats *out) {
    tb_routes *routes;
    TB_TRY(tb_routes_create(&routes));
    tb_plan_stats stats = {.size = sizeof stats};
    tb_status status = compute_stats(plan, routes, &stats);
    tb_routes_destroy(routes);
    if (status == TB_OK)
        status = tb__struct_write(out, &stats, sizeof stats, "a tb_plan_stats");
    if (status != TB_OK)
        tb_plan_stats_fini(&stats);
    return status;
}

void tb_plan_stats_fini(tb_plan_stats *stats) {
    tb_plan_stats taken;
    tb__struct_take(&taken, sizeof taken, stats);
    free(taken.ranks);
    free(taken.send_bytes);
    free(taken.recv_bytes);
    free(taken.egress_bytes);
    free(taken.reduce_bytes);
}
