/* The pieces that a target rank's part of a tensor is made of: boxes of what both sides have, from a plan or from the
 * layouts, with their places in the files of both. */
#include "base/dtype.h"
#include "base/int.h"
#include "plan/plan.h"
#include "reshard/disk_inside.h"

#include <inttypes.h>
#include <string.h>

/* Where a rank has its share of what both sides have, in its own part: elements. */
typedef struct place {
    int32_t rank;
    int64_t offset, stride[TB_MAX_DIMS];
} place;

static tb_status find_place(const tb_view *view, const tb_layout *layout, const tb_shape *shape, int32_t rank,
                            place *out) {
    tb_local local;
    tb_binding stored, bound;
    TB_TRY(tb_layout_local(layout, shape, rank, &local));
    tb_status status = tb_binding_contiguous(NULL, 0, TB_U8, &local.shape, &stored);
    tb_local_fini(&local);
    if (status == TB_OK && view)
        status = tb_view_bind(view, shape, layout, rank, &stored, &bound);
    else
        bound = stored;
    *out = (place){.rank = rank, .offset = bound.offset};
    memcpy(out->stride, bound.strides, sizeof out->stride);
    return status;
}

void tb__disk_piece_join(tb__disk_piece *p, bool by_target) {
    int n = 0;
    const int64_t *key = by_target ? p->dst_stride : p->src_stride;
    for (int d = 0; d < p->ndim; d++) {
        int64_t len = p->len[d], src = p->src_stride[d], dst = p->dst_stride[d], stride = key[d];
        int k = n;
        if (len == 1)
            continue;
        for (; k > 0 && key[k - 1] < stride; k--) {
            p->len[k] = p->len[k - 1];
            p->src_stride[k] = p->src_stride[k - 1];
            p->dst_stride[k] = p->dst_stride[k - 1];
        }
        p->len[k] = len;
        p->src_stride[k] = src;
        p->dst_stride[k] = dst;
        n++;
    }
    p->ndim = n;
    if (p->from && p->from->quant.format.kind)
        return; /* read by rows and columns */
    for (int d = n - 1; d > 0; d--) {
        if (p->src_stride[d - 1] != p->src_stride[d] * p->len[d] ||
            p->dst_stride[d - 1] != p->dst_stride[d] * p->len[d])
            continue;
        p->len[d] *= p->len[d - 1];
        for (int k = d - 1; k + 1 < p->ndim; k++) {
            p->len[k] = p->len[k + 1];
            p->src_stride[k] = p->src_stride[k + 1];
            p->dst_stride[k] = p->dst_stride[k + 1];
        }
        p->ndim--;
    }
}

static tb_status list_plan_boxes(const tb__disk_part *part, int32_t rank, tb_routes *routes, tb__disk_boxes *out) {
    TB_TRY(tb_plan_routes(part->plan, rank, 0, routes));
    for (size_t i = 0; i < tb_routes_count(routes); i++) {
        const tb_route *route = tb_routes_at(routes, i);
        if (!tb__has_int32(route->targets, route->ntargets, rank))
            continue; /* the rank of this number is a source, too */
        tb__disk_box box = {.nsources = 1, .sources = &route->source};
        if (route->source == TB_NO_RANK) {
            box.nsources = 0;
        } else if (route->ncontributors > 0) {
            box.nsources = route->ncontributors;
            box.sources = route->contributors;
        }
        memcpy(box.len, route->len, sizeof box.len);
        memcpy(box.src, route->src.start, sizeof box.src);
        memcpy(box.dst, route->dst.start, sizeof box.dst);
        if (!tb__vec_push(out, box))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

typedef TB_VEC(place) places;

static tb_status source_place(const tb__disk_part *part, int32_t rank, places *known, const place **out) {
    for (size_t i = 0; i < known->count; i++) {
        if (known->item[i].rank == rank) {
            *out = &known->item[i];
            return TB_OK;
        }
    }
    place one;
    TB_TRY(find_place(part->src_view, part->from->layout, &part->from->shape, rank, &one));
    if (!tb__vec_push(known, one))
        return TB_NO_MEMORY;
    *out = &known->item[known->count - 1];
    return TB_OK;
}

static tb_status add_piece(const tb__disk_part *part, const tb__disk_box *box, const place *target, places *known,
                           tb__disk_pieces *out, tb__arena *arena) {
    const place *source = NULL;
    tb__disk_piece piece = {.from = part->from,
                            .nsources = box->nsources,
                            .wire_dtype = part->wire_dtype,
                            .op = part->plan->src.op,
                            .avg_divisor = box->nsources > 1 ? part->plan->src.avg_divisor : 1,
                            .ndim = part->shape.ndim,
                            .dst = target->offset};
    for (int d = 0; d < piece.ndim; d++) {
        if (box->len[d] == 0)
            return TB_OK;
    }
    if (box->nsources > 0) {
        int32_t *ranks = tb__arena_alloc(arena, box->nsources, sizeof *ranks);
        if (!ranks)
            return TB_NO_MEMORY;
        memcpy(ranks, box->sources, box->nsources * sizeof *ranks);
        piece.sources = ranks;
        TB_TRY(source_place(part, ranks[0], known, &source)); /* those that are combined have it alike */
        piece.src = source->offset;
    }
    for (int d = 0; d < piece.ndim; d++) {
        piece.len[d] = box->len[d];
        piece.dst_stride[d] = target->stride[d];
        piece.dst += box->dst[d] * target->stride[d];
        piece.src_stride[d] = source ? source->stride[d] : 0;
        piece.src += source ? box->src[d] * source->stride[d] : 0;
    }
    tb__disk_piece_join(&piece, true);
    return tb__vec_push(&out->list, piece) ? TB_OK : TB_NO_MEMORY;
}

static tb_status list_part(const tb__disk_tensor *t, const tb__disk_part *part, int32_t rank, bool by_plan,
                           tb_routes *routes, tb__disk_pieces *out, tb__arena *arena) {
    tb__disk_boxes boxes = {0};
    places known = {0};
    place target;
    tb_status status =
        by_plan ? list_plan_boxes(part, rank, routes, &boxes) : tb__disk_layout_boxes(part, rank, &boxes, arena);
    if (status == TB_OK && boxes.count > 0)
        status = find_place(part->dst_view, t->dst, &t->shape, rank, &target);
    for (size_t i = 0; i < boxes.count && status == TB_OK; i++)
        status = add_piece(part, &boxes.item[i], &target, &known, out, arena);
    free(boxes.item);
    free(known.item);
    return status;
}

static int64_t piece_end(const tb__disk_piece *piece) {
    int64_t end = piece->dst + 1;
    for (int d = 0; d < piece->ndim; d++)
        end += (piece->len[d] - 1) * piece->dst_stride[d];
    return end;
}

static int compare_pieces(const void *left, const void *right) {
    const tb__disk_piece *a = left, *b = right;
    return (a->dst > b->dst) - (a->dst < b->dst);
}

/* Pieces that lie before a band, or after it, need not be looked at one by one. */
static tb_status sort_pieces(tb__disk_pieces *pieces) {
    pieces->reach.count = 0;
    if (pieces->list.count == 0)
        return TB_OK;
    qsort(pieces->list.item, pieces->list.count, sizeof *pieces->list.item, compare_pieces);
    int64_t reach = 0;
    for (size_t i = 0; i < pieces->list.count; i++) {
        int64_t end = piece_end(&pieces->list.item[i]);
        reach = end > reach ? end : reach;
        if (!tb__vec_push(&pieces->reach, reach))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

/* The first piece that can reach beyond `start`. */
static size_t first_piece(const tb__disk_pieces *pieces, int64_t start) {
    size_t i = 0;
    TB_BISECT(i, pieces->reach.count, pieces->reach.item[i] > start);
    return i;
}

tb_status tb__disk_list_pieces(const tb__disk_tensor *t, int32_t rank, bool by_plan, tb_routes *routes,
                               tb__disk_pieces *out, tb__arena *arena) {
    out->list.count = 0;
    for (size_t i = 0; i < t->nparts; i++)
        TB_TRY(list_part(t, &t->parts[i], rank, by_plan, routes, out, arena));
    return sort_pieces(out);
}

/* Brings what of the piece lies in the band, which are the elements from `band->first` on. The dims before `dim` have
 * been cut already; each of the others reaches less far than one step of the dim before it. */
static tb_status gather_piece(tb__disk_gather *g, tb_dtype dtype, const tb__disk_band *band,
                              const tb__disk_piece *piece, int dim, unsigned char *to) {
    int64_t low = band->first - piece->dst, high = low + band->nelements, span = 1; /* of the dims behind this one */
    for (int d = dim + 1; d < piece->ndim; d++)
        span += (piece->len[d] - 1) * piece->dst_stride[d];
    if (dim >= piece->ndim)
        return low <= 0 && high > 0 ? tb__disk_gather_piece(g, piece, to + tb__dtype_bytes(dtype, -low), dtype) : TB_OK;
    int64_t stride = piece->dst_stride[dim], len = piece->len[dim];
    /* Indices that lie in the band in part, and those that do as a whole. */
    int64_t begin = low < span ? 0 : (low - span) / stride + 1, end = high <= 0 ? 0 : (high - 1) / stride + 1;
    int64_t whole = low <= 0 ? 0 : (low - 1) / stride + 1, whole_end = high < span ? 0 : (high - span) / stride + 1;
    end = end < len ? end : len;
    whole_end = whole_end < end ? whole_end : end;
    for (int64_t i = begin; i < end; i++) {
        tb__disk_piece one = *piece;
        bool is_whole = i >= whole && i < whole_end;
        one.len[dim] = is_whole ? whole_end - i : 1;
        one.dst += i * stride;
        one.src += i * piece->src_stride[dim];
        if (is_whole)
            TB_TRY(tb__disk_gather_piece(g, &one, to + tb__dtype_bytes(dtype, one.dst - band->first), dtype));
        else
            TB_TRY(gather_piece(g, dtype, band, &one, dim + 1, to));
        i += one.len[dim] - 1;
    }
    return TB_OK;
}

tb_status tb__disk_gather_band(tb__disk_gather *g, const tb__disk_tensor *t, const tb__disk_pieces *pieces,
                               const tb__disk_band *band, unsigned char *to) {
    if (t->has_padding)
        memset(to, 0, (size_t)tb__dtype_bytes(t->band_dtype, band->nelements));
    for (size_t i = first_piece(pieces, band->first); i < pieces->list.count; i++) {
        const tb__disk_piece *piece = &pieces->list.item[i];
        if (piece->dst >= band->first + band->nelements)
            break;
        TB_TRY(gather_piece(g, t->band_dtype, band, piece, 0, to));
    }
    return TB_OK;
}
