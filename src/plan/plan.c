/* Plans: checks of source layout, target layout, shape and dtype together. */
#include "plan/plan.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/opts.h"

#include <inttypes.h>

/* The period of rotations; if replica sets differ in size, the exact one may be very long. A bounded one keeps the
 * cache bounded. */
enum { ROTATIONS = 64 };

static tb_status check_partial(const tb_layout *layout, tb_dtype dtype, const char *side) {
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *place = &layout->place[m];
        if (place->kind != TB_PARTIAL)
            continue;
        if (tb__dtype_class_of(dtype) == TB__OPAQUE)
            return tb__fail(TB_REFUSED, "%s: Partial(%s) of %s, which has no arithmetic", side,
                            tb__reduce_op_name(place->op), tb_dtype_name(dtype));
        if (tb__dtype_class_of(dtype) == TB__INTEGER && place->op == TB_AVG)
            return tb__fail(TB_REFUSED, "%s: Partial(avg) of integers (%s) would round", side, tb_dtype_name(dtype));
    }
    return TB_OK;
}

/* Two elements share a byte: lists may only begin and end on whole bytes. */
static tb_status check_packing(const tb__grid *grid, const char *side) {
    int d = grid->shape.ndim - 1;
    if (d < 0 || grid->shape.dim[d] % 2)
        return tb__fail(TB_REFUSED, "f4e2m1 is packed two to a byte along the last dim, which must be even");
    tb__arena arena = {0};
    tb_status status = TB_OK;
    for (int32_t c = 0; c < grid->axis[d].ncoords && status == TB_OK; c++) {
        tb__spans list = {0};
        status = tb__axis_list(&grid->axis[d], c, &arena, &list);
        for (size_t i = 0; i < list.count && status == TB_OK; i++) {
            if (list.item[i].start % 2 || list.item[i].stop % 2)
                status = tb__fail(TB_REFUSED,
                                  "%s: coordinate %" PRId32
                                  " of dim %d begins or ends inside a byte of f4e2m1 (%" PRId64 "-%" PRId64 ")",
                                  side, c, d, list.item[i].start, list.item[i].stop);
        }
        tb__arena_reset(&arena);
    }
    tb__arena_fini(&arena);
    return status;
}

/* Finds an index that the target wants and no source holds. Because layouts are products, each dim can be checked
 * alone. */
static tb_status check_coverage(const tb_plan *plan) {
    for (int d = 0; d < plan->shape.ndim; d++) {
        if (plan->shape.dim[d] == 0 || tb__axis_nclasses(&plan->dst.axis[d]) == 0)
            return TB_OK; /* nothing is wanted */
    }
    for (int d = 0; d < plan->shape.ndim; d++) {
        const tb__axis_table *wanted = plan->dst.axis[d].table;
        int64_t hole = -1;
        if (!wanted)
            hole = tb__axis_hole(&plan->src.axis[d], 0, plan->shape.dim[d]);
        for (size_t i = 0; wanted && i < wanted->nsegments && hole < 0; i++)
            hole = tb__axis_hole(&plan->src.axis[d], wanted->segment[i].start, wanted->segment[i].stop);
        if (hole >= 0)
            return tb__fail(TB_INVALID,
                            "index %" PRId64 " of dim %d is wanted by the target and held by no source rank", hole, d);
    }
    return TB_OK;
}

/* Cells are numbered with 64 bits. */
static tb_status check_cells(const tb__grid *grid) {
    tb__wide ncells = 1;
    for (int d = 0; d < grid->shape.ndim; d++) {
        ncells *= (uint32_t)tb__axis_nclasses(&grid->axis[d]);
        if (ncells >> 62)
            return tb__fail(TB_TOO_BIG, "the layout cuts the tensor into more than 2^62 cells");
    }
    return TB_OK;
}

static bool layouts_share_rank(const tb_layout *a, const tb_layout *b) {
    if (!a->ranks && !b->ranks)
        return a->first < b->first + b->nranks && b->first < a->first + a->nranks;
    if (a->nranks > b->nranks)
        return layouts_share_rank(b, a);
    for (int32_t i = 0; i < a->nranks; i++) {
        if (tb_layout_index_of(b, tb_layout_rank_at(a, i)) >= 0)
            return true;
    }
    return false;
}

static tb_status set_hosts(tb_plan *plan, const tb_plan_opts *opts) {
    const tb_layout *sides[2] = {plan->src_layout, plan->dst_layout};
    for (int s = 0; s < 2; s++) {
        for (int32_t i = 0; i < sides[s]->nranks; i++) {
            int32_t rank = tb_layout_rank_at(sides[s], i);
            if ((size_t)rank >= opts->nhosts)
                return tb__fail(TB_INVALID, "the host map covers %zu ranks, but rank %" PRId32 " is in a mesh",
                                opts->nhosts, rank);
            if (opts->hosts[rank] < 0)
                return tb__fail(TB_INVALID, "the host of rank %" PRId32 " is negative", rank);
        }
    }
    size_t ntargets = (size_t)plan->dst_layout->nranks;
    plan->hosts = tb__memdup(opts->hosts, opts->nhosts, sizeof *plan->hosts);
    plan->target_by_host = tb__malloc(ntargets, sizeof *plan->target_by_host);
    if (!plan->hosts || !plan->target_by_host)
        return TB_NO_MEMORY;
    plan->nhosts = opts->nhosts;
    for (size_t i = 0; i < ntargets; i++) {
        uint32_t rank = (uint32_t)tb_layout_rank_at(plan->dst_layout, (int32_t)i);
        plan->target_by_host[i] = (uint64_t)(uint32_t)plan->hosts[rank] << 32 | rank;
    }
    qsort(plan->target_by_host, ntargets, sizeof *plan->target_by_host, tb__compare_uint64);
    return TB_OK;
}

static tb_status init_plan(tb_plan *plan, const tb_plan_opts *callers) {
    tb_plan_opts opts;
    TB_TRY(tb__opts_read(&opts, sizeof opts, callers));
    TB_TRY(tb_shape_size(&plan->shape, plan->dtype, NULL, NULL));
    tb_status status = tb__grid_init(&plan->src, plan->src_layout, &plan->shape, TB__SOURCE);
    if (status != TB_OK)
        return tb__fail_within(status, "src");
    status = tb__grid_init(&plan->dst, plan->dst_layout, &plan->shape, TB__TARGET);
    if (status != TB_OK)
        return tb__fail_within(status, "dst");
    const tb__grid *sides[2] = {&plan->src, &plan->dst};
    for (int i = 0; i < 2; i++) {
        tb_shape longest = tb__grid_longest(sides[i]);
        status = tb_shape_size(&longest, plan->dtype, NULL, NULL);
        if (status != TB_OK)
            return tb__fail_within(status, "%s: the largest local part", i ? "dst" : "src");
    }
    TB_TRY(check_partial(plan->src_layout, plan->dtype, "src"));
    TB_TRY(check_partial(plan->dst_layout, plan->dtype, "dst"));
    if (tb__dtype_packing(plan->dtype) > 1) {
        TB_TRY(check_packing(&plan->src, "src"));
        TB_TRY(check_packing(&plan->dst, "dst"));
    }
    TB_TRY(check_cells(&plan->src));
    TB_TRY(check_cells(&plan->dst));
    TB_TRY(check_coverage(plan));
    plan->meshes_overlap = layouts_share_rank(plan->src_layout, plan->dst_layout);
    plan->rotation_period = (uint64_t)(plan->src.copies.size * plan->src.partial.size);
    for (int d = 0; d < plan->shape.ndim; d++) {
        plan->has_tables |= plan->src.axis[d].table || plan->dst.axis[d].table;
        if (plan->src.axis[d].table)
            plan->rotation_period = ROTATIONS;
    }
    if (opts.hosts) { /* a host may have any number of members; still, all members of a replica set take turns */
        uint64_t n = plan->rotation_period;
        plan->rotation_period = (ROTATIONS + n - 1) / n * n;
        TB_TRY(set_hosts(plan, &opts));
    }
    plan->whole_rows = opts.whole_rows;
    if (opts.unbalanced) {
        plan->unbalanced = true;
        plan->rotation_period = 1;
    }
    return TB_OK;
}

tb_status tb_plan_create(const tb_layout *src, const tb_layout *dst, const tb_shape *shape, tb_dtype dtype,
                         const tb_plan_opts *opts, tb_plan **out) {
    tb_plan *plan = tb__calloc(1, sizeof *plan);
    if (!plan)
        return TB_NO_MEMORY;
    plan->src_layout = tb__layout_ref(src);
    plan->dst_layout = tb__layout_ref(dst);
    plan->shape = *shape;
    plan->dtype = dtype;
    tb_status status = init_plan(plan, opts);
    if (status != TB_OK) {
        tb_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return TB_OK;
}

size_t tb__plan_nbytes(const tb_plan *plan) {
    return tb__mem_nbytes(plan) + tb__grid_nbytes(&plan->src) + tb__grid_nbytes(&plan->dst) +
           tb__layout_nbytes(plan->src_layout) + tb__layout_nbytes(plan->dst_layout) + tb__mem_nbytes(plan->hosts) +
           tb__mem_nbytes(plan->target_by_host);
}

void tb_plan_destroy(tb_plan *plan) {
    if (!plan)
        return;
    tb__grid_fini(&plan->src);
    tb__grid_fini(&plan->dst);
    tb_layout_destroy(plan->src_layout);
    tb_layout_destroy(plan->dst_layout);
    free(plan->hosts);
    free(plan->target_by_host);
    free(plan);
}
