/* Layouts: a mesh of distinct ranks and one placement per mesh dimension, from arrays, text or JSON. */
#include "layout/layout.h"

#include "base/int.h"
#include "base/text.h"

#include <inttypes.h>
#include <string.h>
#include <strings.h>

static tb_status mesh_size(int ndim, const int64_t *shape, int32_t *out) {
    if (ndim < 1 || ndim > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a mesh has 1 to %d dims, not %d", TB_MAX_DIMS, ndim);
    int64_t size = 1;
    for (int m = 0; m < ndim; m++) {
        if (shape[m] < 1)
            return tb__fail(TB_INVALID, "mesh dim %d has size %" PRId64 "; it must be at least 1", m, shape[m]);
        if (shape[m] > TB_MAX_RANKS / size)
            return tb__fail(TB_TOO_BIG, "the mesh has more than %d ranks", TB_MAX_RANKS);
        size *= shape[m];
    }
    *out = (int32_t)size;
    return TB_OK;
}

/* Checks a placement as far as that does not depend on the tensor's shape. */
static tb_status check_placement(const tb_placement *place, int m, int64_t ways) {
    const int64_t most = INT64_C(1) << 62;
    switch (place->kind) {
    case TB_REPLICATE:
    case TB_SHARD:
        return TB_OK;
    case TB_STRIDED_SHARD:
        if (place->split < 1)
            return tb__fail(TB_INVALID,
                            "mesh dim %d: StridedShard's split factor is %" PRId64 "; it must be at least 1", m,
                            place->split);
        return TB_OK;
    case TB_BLOCK_SHARD: {
        int64_t sum = 0;
        if (place->nsizes == 0)
            return tb__fail(TB_INVALID, "mesh dim %d: BlockShard has no block sizes", m);
        for (size_t j = 0; j < place->nsizes; j++) {
            if (place->sizes[j] < 0)
                return tb__fail(TB_INVALID, "mesh dim %d: BlockShard's size %" PRId64 " is negative", m,
                                place->sizes[j]);
            if (place->sizes[j] > most - sum)
                return tb__fail(TB_TOO_BIG, "mesh dim %d: BlockShard's sizes add up to more than 2^62", m);
            sum += place->sizes[j];
        }
        return TB_OK;
    }
    case TB_EXPLICIT:
        if ((int64_t)place->nlists != ways)
            return tb__fail(TB_INVALID, "mesh dim %d: Explicit has %zu lists for %" PRId64 " coordinates", m,
                            place->nlists, ways);
        for (size_t r = 0, i = 0; r < place->nlists; r++) {
            int64_t length = 0;
            if (place->list_ends[r] < i)
                return tb__fail(TB_INVALID, "mesh dim %d: Explicit's list %zu ends before it begins", m, r);
            for (; i < place->list_ends[r]; i++) {
                const tb_segment *s = &place->segments[i];
                if (s->start < 0 || s->stop < s->start)
                    return tb__fail(TB_INVALID, "mesh dim %d: Explicit segment %" PRId64 "-%" PRId64 " is not a range",
                                    m, s->start, s->stop);
                if (s->stop - s->start > most - length)
                    return tb__fail(TB_TOO_BIG, "mesh dim %d: an Explicit list has more than 2^62 indices", m);
                length += s->stop - s->start;
            }
        }
        return TB_OK;
    case TB_PARTIAL:
        if ((unsigned)place->op > TB_PRODUCT)
            return tb__fail(TB_INVALID, "mesh dim %d: %d is not a reduction", m, (int)place->op);
        return TB_OK;
    }
    return tb__fail(TB_INVALID, "mesh dim %d: %d is not a placement", m, (int)place->kind);
}

/* Stores the ranks, and a sorted list for lookups; of consecutive ranks only the first. */
static tb_status set_ranks(tb_layout *layout, const int32_t *ranks) {
    int32_t n = layout->nranks;
    bool consecutive = true;
    for (int32_t i = 0; ranks && i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= TB_MAX_RANKS)
            return tb__fail(TB_INVALID, "rank %" PRId32 " is not between 0 and %d", ranks[i], TB_MAX_RANKS - 1);
        consecutive &= ranks[i] == ranks[0] + i;
    }
    layout->first = ranks ? ranks[0] : 0;
    if (consecutive)
        return TB_OK;
    layout->ranks = tb__malloc((size_t)n, sizeof *layout->ranks);
    layout->by_rank = tb__malloc((size_t)n, sizeof *layout->by_rank);
    if (!layout->ranks || !layout->by_rank)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < n; i++) {
        layout->ranks[i] = ranks[i];
        layout->by_rank[i] = (uint64_t)ranks[i] << 32 | (uint32_t)i;
    }
    qsort(layout->by_rank, (size_t)n, sizeof *layout->by_rank, tb__compare_uint64);
    for (int32_t i = 1; i < n; i++) {
        if (layout->by_rank[i] >> 32 == layout->by_rank[i - 1] >> 32)
            return tb__fail(TB_INVALID, "rank %d is in the mesh twice", (int)(layout->by_rank[i] >> 32));
    }
    return TB_OK;
}

static void mix_hash(uint64_t *hash, const void *data, size_t nbytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < nbytes; i++)
        *hash = (*hash ^ p[i]) * 1099511628211U;
}

static void set_hash(tb_layout *layout) {
    uint64_t h = 1469598103934665603U;
    mix_hash(&h, layout->shape, (size_t)layout->ndim * sizeof *layout->shape);
    mix_hash(&h, &layout->first, sizeof layout->first);
    if (layout->ranks)
        mix_hash(&h, layout->ranks, (size_t)layout->nranks * sizeof *layout->ranks);
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *p = &layout->place[m];
        mix_hash(&h, &p->kind, sizeof p->kind);
        mix_hash(&h, &p->dim, sizeof p->dim);
        mix_hash(&h, &p->split, sizeof p->split);
        mix_hash(&h, &p->op, sizeof p->op);
        if (p->nsizes)
            mix_hash(&h, p->sizes, p->nsizes * sizeof *p->sizes);
        if (p->nlists) {
            mix_hash(&h, p->list_ends, p->nlists * sizeof *p->list_ends);
            mix_hash(&h, p->segments, p->list_ends[p->nlists - 1] * sizeof *p->segments);
        }
    }
    layout->hash = h;
}

static bool same_array(const void *a, const void *b, size_t count, size_t size) {
    return count == 0 || memcmp(a, b, count * size) == 0;
}

static bool placement_equal(const tb_placement *a, const tb_placement *b) {
    return a->kind == b->kind && a->dim == b->dim && a->split == b->split && a->op == b->op && a->nsizes == b->nsizes &&
           a->nlists == b->nlists && same_array(a->sizes, b->sizes, a->nsizes, sizeof *a->sizes) &&
           same_array(a->list_ends, b->list_ends, a->nlists, sizeof *a->list_ends) &&
           same_array(a->segments, b->segments, a->nlists ? a->list_ends[a->nlists - 1] : 0, sizeof *a->segments);
}

bool tb_layout_equal(const tb_layout *a, const tb_layout *b) {
    if (a == b)
        return true;
    if (a->hash != b->hash || a->ndim != b->ndim || a->first != b->first || !a->ranks != !b->ranks ||
        !same_array(a->shape, b->shape, (size_t)a->ndim, sizeof *a->shape) ||
        !same_array(a->ranks, b->ranks, a->ranks ? (size_t)a->nranks : 0, sizeof *a->ranks))
        return false;
    for (int m = 0; m < a->ndim; m++) {
        if (!placement_equal(&a->place[m], &b->place[m]))
            return false;
    }
    return true;
}

tb_status tb_layout_create(int mesh_ndim, const int64_t *mesh_shape, const int32_t *ranks,
                           const tb_placement *placements, tb_layout **out) {
    int32_t nranks;
    TB_TRY(mesh_size(mesh_ndim, mesh_shape, &nranks));
    for (int m = 0; m < mesh_ndim; m++)
        TB_TRY(check_placement(&placements[m], m, mesh_shape[m]));
    tb_layout *layout = tb__calloc(1, sizeof *layout);
    if (!layout)
        return TB_NO_MEMORY;
    atomic_init(&layout->refs, 1);
    layout->ndim = mesh_ndim;
    layout->nranks = nranks;
    memcpy(layout->shape, mesh_shape, (size_t)mesh_ndim * sizeof *mesh_shape);
    tb_status status = set_ranks(layout, ranks);
    for (int m = 0; m < mesh_ndim && status == TB_OK; m++)
        status = tb__placement_copy(&placements[m], &layout->place[m]);
    if (status != TB_OK) {
        tb_layout_destroy(layout);
        return status;
    }
    set_hash(layout);
    *out = layout;
    return TB_OK;
}

tb_layout *tb__layout_ref(const tb_layout *layout) {
    tb_layout *mine = (tb_layout *)layout; /* the count is the only thing that ever changes */
    atomic_fetch_add_explicit(&mine->refs, 1, memory_order_relaxed);
    return mine;
}

void tb_layout_destroy(tb_layout *layout) {
    if (!layout || atomic_fetch_sub_explicit(&layout->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (int m = 0; m < layout->ndim; m++)
        tb__placement_fini(&layout->place[m]);
    free(layout->ranks);
    free(layout->by_rank);
    free(layout);
}

size_t tb__layout_nbytes(const tb_layout *layout) {
    size_t nbytes = tb__mem_nbytes(layout) + tb__mem_nbytes(layout->ranks) + tb__mem_nbytes(layout->by_rank);
    for (int m = 0; m < layout->ndim; m++) {
        const tb_placement *p = &layout->place[m];
        nbytes += tb__mem_nbytes(p->sizes) + tb__mem_nbytes(p->list_ends) + tb__mem_nbytes(p->segments);
    }
    return nbytes;
}

int32_t tb_layout_nranks(const tb_layout *layout) {
    return layout->nranks;
}

int32_t tb_layout_rank_at(const tb_layout *layout, int32_t index) {
    return layout->ranks ? layout->ranks[index] : layout->first + index;
}

/* The position in by_rank of the lowest rank that is not below this one. */
static int32_t lower_rank(const tb_layout *layout, int32_t rank) {
    int32_t i = 0;
    TB_BISECT(i, layout->nranks, (int32_t)(layout->by_rank[i] >> 32) >= rank);
    return i;
}

int32_t tb_layout_index_of(const tb_layout *layout, int32_t rank) {
    if (!layout->ranks)
        return rank >= layout->first && rank - layout->first < layout->nranks ? rank - layout->first : -1;
    int32_t i = lower_rank(layout, rank);
    if (i == layout->nranks || (int32_t)(layout->by_rank[i] >> 32) != rank)
        return -1;
    return (int32_t)(uint32_t)layout->by_rank[i];
}

int32_t tb__layout_rank_from(const tb_layout *layout, int32_t rank) {
    if (!layout->ranks) {
        int32_t from = rank > layout->first ? rank : layout->first;
        return from - layout->first < layout->nranks ? from : TB_NO_RANK;
    }
    int32_t i = lower_rank(layout, rank);
    return i < layout->nranks ? (int32_t)(layout->by_rank[i] >> 32) : TB_NO_RANK;
}
