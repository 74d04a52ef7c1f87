/* The pieces of a target rank's part, by the layouts alone. A plan takes shortcuts; this code intersects the lists of
 * both sides, and can so verify a plan's results. */
#include "layout/layout.h"
#include "plan/plan.h"
#include "reshard/disk_inside.h"

#include <inttypes.h>

/* Indices that are consecutive on both sides. */
typedef struct run {
    int64_t src, dst, len;
} run;

typedef TB_VEC(run) runs;

static bool add_runs(const tb_local *src, const tb_local *dst, int d, runs *out) {
    int64_t to = 0;
    out->count = 0;
    for (size_t i = 0; i < dst->nsegments[d]; i++) {
        tb_segment want = dst->segments[d][i];
        int64_t from = 0;
        for (size_t k = 0; k < src->nsegments[d]; k++) {
            tb_segment have = src->segments[d][k];
            int64_t start = want.start > have.start ? want.start : have.start;
            int64_t stop = want.stop < have.stop ? want.stop : have.stop;
            if (start < stop &&
                !tb__vec_push(out, (run){from + start - have.start, to + start - want.start, stop - start}))
                return false;
            from += have.stop - have.start;
        }
        to += want.stop - want.start;
    }
    return true;
}

/* Every combination of a run in each dimension is a box. */
static tb_status add_boxes(const runs *per_dim, int ndim, tb__disk_box piece, tb__disk_boxes *out, int64_t *nelements) {
    size_t at[TB_MAX_DIMS] = {0};
    for (int d = 0; d < ndim; d++) {
        if (per_dim[d].count == 0)
            return TB_OK;
    }
    for (;;) {
        int64_t n = 1;
        for (int d = 0; d < ndim; d++) {
            run r = per_dim[d].item[at[d]];
            piece.src[d] = r.src;
            piece.dst[d] = r.dst;
            piece.len[d] = r.len;
            n *= r.len;
        }
        if (!tb__vec_push(out, piece))
            return TB_NO_MEMORY;
        *nelements += n;
        int d = ndim - 1;
        while (d >= 0 && ++at[d] == per_dim[d].count)
            at[d--] = 0;
        if (d < 0)
            return TB_OK;
    }
}

/* The ranks whose contributions are combined, in their order. */
static const int32_t *list_contributors(const tb__grid *grid, tb__place place, tb__arena *arena) {
    int32_t *ranks = tb__arena_alloc(arena, (size_t)grid->partial.size, sizeof *ranks);
    for (int32_t i = 0; ranks && i < grid->partial.size; i++) {
        place.part = i;
        ranks[i] = tb__grid_rank(grid, &place);
    }
    return ranks;
}

static tb_status add_source(const tb__disk_part *t, const tb__grid *grid, int32_t rank, const tb_local *dst,
                            runs *per_dim, tb__disk_boxes *out, tb__arena *arena, int64_t *nelements) {
    tb__place place;
    tb_local src;
    if (!tb__grid_place(grid, rank, &place) || place.copy != 0 || place.part != 0)
        return TB_OK;
    tb__disk_box piece = {.nsources = (uint32_t)grid->partial.size};
    piece.sources = list_contributors(grid, place, arena);
    if (!piece.sources)
        return TB_NO_MEMORY;
    TB_TRY(tb_layout_local(t->plan->src_layout, &t->shape, rank, &src));
    tb_status status = TB_OK;
    for (int d = 0; d < t->shape.ndim && status == TB_OK; d++)
        status = add_runs(&src, dst, d, &per_dim[d]) ? TB_OK : TB_NO_MEMORY;
    tb_local_fini(&src);
    return status == TB_OK ? add_boxes(per_dim, t->shape.ndim, piece, out, nelements) : status;
}

static tb_status add_sources(const tb__disk_part *t, const tb__grid *grid, const tb_local *dst, tb__disk_boxes *out,
                             tb__arena *arena) {
    int64_t wanted = 1, found = 0;
    runs per_dim[TB_MAX_DIMS] = {0};
    tb_status status = TB_OK;
    for (int d = 0; d < t->shape.ndim; d++)
        wanted *= dst->shape.dim[d];
    for (int32_t i = 0; i < tb_layout_nranks(t->plan->src_layout) && status == TB_OK; i++)
        status = add_source(t, grid, tb_layout_rank_at(t->plan->src_layout, i), dst, per_dim, out, arena, &found);
    for (int d = 0; d < TB_MAX_DIMS; d++)
        free(per_dim[d].item);
    if (status == TB_OK && found < wanted) /* more are found where Explicit lists share indices */
        status =
            tb__fail(TB_INTERNAL, "tensor '%.100s': the source has only %" PRId64 " of a part's %" PRId64 " elements",
                     t->from->name, found, wanted);
    return status;
}

tb_status tb__disk_layout_boxes(const tb__disk_part *t, int32_t rank, tb__disk_boxes *out, tb__arena *arena) {
    tb__grid src, dst;
    tb__place place;
    tb_local local;
    TB_TRY(tb__grid_init(&dst, t->plan->dst_layout, &t->shape, TB__TARGET));
    bool is_value = tb__grid_place(&dst, rank, &place) && place.part == 0;
    tb__grid_fini(&dst);
    TB_TRY(tb_layout_local(t->plan->dst_layout, &t->shape, rank, &local));
    tb_status status;
    if (is_value) {
        status = tb__grid_init(&src, t->plan->src_layout, &t->shape, TB__SOURCE);
        if (status == TB_OK) {
            status = add_sources(t, &src, &local, out, arena);
            tb__grid_fini(&src);
        }
    } else {
        tb__disk_box zeros = {0};
        for (int d = 0; d < t->shape.ndim; d++)
            zeros.len[d] = local.shape.dim[d];
        status = tb__vec_push(out, zeros) ? TB_OK : TB_NO_MEMORY;
    }
    tb_local_fini(&local);
    return status;
}
