/* From tensors to chunks: each tensor's routes, with the roles this rank has in them. */
#include "ir/ir.h"

#include "base/dtype.h"
#include "base/int.h"
#include "base/opts.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <string.h>

enum { NAME_BITS = 22, PIECE_BITS = 18, SUB_BITS = 4 }; /* of an id; the target rank has the other 20 */
enum { MOST_CHUNKS = 1 << 21 };
enum { MIN_RELAYED_NBYTES = 64 << 10 }; /* smaller messages cost more than the pipelining gains */
#define MOST_NBYTES ((int64_t)1 << 62)

const char *tb_chunk_mode_name(tb_chunk_mode mode) {
    static const char *const names[] = {
        [TB_P2P] = "P2P", [TB_BROADCAST] = "BROADCAST", [TB_LOCAL] = "LOCAL", [TB_NONE] = "NONE"};
    return (unsigned)mode <= TB_NONE ? names[mode] : NULL;
}

tb_status tb__wire_dtype(tb_dtype src, tb_dtype dst, tb_dtype asked, tb_dtype *out) {
    tb_dtype wire = asked;
    if (!tb_dtype_bits(src) || !tb_dtype_bits(dst) || (asked != TB_DTYPE_NONE && !tb_dtype_bits(asked)))
        return tb__fail(TB_INVALID, "not a dtype: %d, %d or %d", (int)src, (int)dst, (int)asked);
    if (wire == TB_DTYPE_NONE)
        wire = tb_dtype_bits(dst) < tb_dtype_bits(src) ? dst : src;
    const tb_dtype step[3] = {src, wire, dst};
    for (int i = 0; i < 2; i++) {
        tb_dtype from = step[i], to = step[i + 1];
        if (from == to)
            continue;
        if (!tb__dtype_can_cast(from, to))
            return tb__fail(TB_REFUSED, "there is no cast from %s to %s", tb_dtype_name(from), tb_dtype_name(to));
        bool is_integer = tb__dtype_class_of(to) == TB__INTEGER;
        if (is_integer && !tb__dtype_has_values_of(to, from) && asked != to)
            return tb__fail(TB_REFUSED, "a cast from %s to %s may lose values; ask for it by wire dtype %s",
                            tb_dtype_name(from), tb_dtype_name(to), tb_dtype_name(to));
        if (!is_integer && tb_dtype_bits(to) <= 8 && asked != to)
            return tb__fail(TB_REFUSED, "a cast from %s to %s without scales loses range; ask for it by wire dtype %s",
                            tb_dtype_name(from), tb_dtype_name(to), tb_dtype_name(to));
    }
    *out = wire;
    return TB_OK;
}

const int32_t *tb__ir_ranks(tb__owned_ir *ir, const int32_t *ranks, uint32_t count) {
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++)
        hash = tb__hash(hash, (uint64_t)ranks[i]);
    size_t probe = 0, at;
    while ((at = tb__index_next(&ir->by_ranks, hash, &probe)) != TB__NOWHERE) {
        const struct tb__rank_list *list = &ir->lists.item[at];
        if (list->count == count && (!count || !memcmp(list->ranks, ranks, count * sizeof *ranks)))
            return list->ranks;
    }
    int32_t *copy = tb__arena_alloc(&ir->arena, count, sizeof *copy);
    if (!copy)
        return NULL;
    if (count)
        memcpy(copy, ranks, count * sizeof *copy);
    if (!tb__vec_reserve(&ir->lists, 1) || !tb__index_add(&ir->by_ranks, hash, ir->lists.count))
        return NULL;
    ir->lists.item[ir->lists.count++] = (struct tb__rank_list){count, copy};
    return copy;
}

/* A batch that is being turned into chunks. */
typedef struct builder {
    tb__owned_ir *ir;
    tb_plan_cache *cache;
    const tb_plan_opts *plan_opts;
    tb__ir_limits limits;
} builder;

tb__role tb__route_role(const tb_route *route, int32_t rank) {
    tb__role role = {.is_source =
                         route->source == rank || tb__has_int32(route->contributors, route->ncontributors, rank),
                     .is_target = tb__has_int32(route->targets, route->ntargets, rank)};
    if (!role.is_target && route->source != rank)
        role.mode = TB_NONE;
    else if (route->source == TB_NO_RANK || route->targets[0] == route->source)
        role.mode = TB_LOCAL;
    else
        role.mode = route->ntargets > 1 ? TB_BROADCAST : TB_P2P;
    return role;
}

tb_chunk_mode tb_route_mode(const tb_route *route, int32_t rank) {
    return tb__route_role(route, rank).mode;
}

/* A chunk that is being cut into parts of up to most_bytes. */
typedef struct cutter {
    tb__owned_ir *ir;
    const tb_tensor_spec *spec; /* of a coded chunk; else it may be NULL */
    int64_t most_bytes;
    uint32_t *part;
} cutter;

/* Indices of dim d are cut in multiples of this: whole bytes, and for coded rows not at all. */
static int64_t thickness_of(const tb_chunk *chunk, int d) {
    if (d < chunk->ndim - 1)
        return 1;
    return chunk->is_coded ? chunk->len[d] : tb__dtype_packing(chunk->wire_dtype);
}

static void shorten_chunk(const cutter *c, tb_chunk *chunk, int d, int64_t at, int64_t rows) {
    int64_t packing = d == chunk->ndim - 1 ? tb__dtype_packing(chunk->wire_dtype) : 1;
    int64_t before = chunk->len[d] / packing;
    chunk->src.start[d] += at;
    chunk->dst.start[d] += at;
    chunk->len[d] = rows;
    if (c->spec && c->spec->coded && c->spec->coded_nbytes)
        chunk->nbytes = c->spec->coded_nbytes(c->spec->coded_arg, chunk->ndim, chunk->len);
    else
        chunk->nbytes = chunk->nbytes / before * (rows / packing);
}

/* Adds the chunk, or slices of the outermost dim that can be cut finely enough. */
static tb_status add_parts(const cutter *c, const tb_chunk *chunk, int d) {
    if (chunk->nbytes <= 0 || chunk->nbytes > MOST_NBYTES)
        return tb__fail(TB_INVALID, "a part of it has %" PRId64 " bytes on the wire", chunk->nbytes);
    if (chunk->nbytes <= c->most_bytes || d == chunk->ndim) {
        tb_chunk last = *chunk;
        last.part = (*c->part)++;
        if (c->ir->chunks.count == MOST_CHUNKS)
            return tb__fail(
                TB_TOO_BIG,
                "a rank's batch has more than %d chunks; more staging_bytes, or a larger bucket_size, would make "
                "them larger",
                MOST_CHUNKS);
        return tb__vec_push(&c->ir->chunks, last) ? TB_OK : TB_NO_MEMORY;
    }
    int64_t thickness = thickness_of(chunk, d), count = chunk->len[d] / thickness;
    int64_t each = chunk->nbytes / count + (chunk->nbytes % count != 0); /* coded rows may have less than a byte */
    int64_t rows = c->most_bytes / each * thickness;
    rows = rows > 0 ? rows : thickness;
    for (int64_t at = 0; at < chunk->len[d]; at += rows) {
        tb_chunk slice = *chunk;
        shorten_chunk(c, &slice, d, at, chunk->len[d] - at < rows ? chunk->len[d] - at : rows);
        TB_TRY(add_parts(c, &slice, d + 1));
    }
    return TB_OK;
}

/* Parts are numbered from *part on, and a coded chunk is measured as its tensor says. */
static tb_status add_chunk_parts(tb__owned_ir *ir, const tb_chunk *chunk, const tb_tensor_spec *spec,
                                 const tb__ir_limits *limits, uint32_t *part) {
    cutter c = {ir, spec, tb__chunk_limit(chunk, limits) / tb__chunk_widening(chunk), part};
    if (chunk->is_whole && chunk->nbytes > c.most_bytes)
        return tb__fail(TB_REFUSED,
                        "a piece of it has %" PRId64
                        " bytes on the wire, and is not to be cut: that takes staging_bytes "
                        "of four times as many",
                        chunk->nbytes);
    if (limits->chunk && limits->chunk < c.most_bytes && !chunk->is_whole)
        c.most_bytes = limits->chunk;
    return add_parts(&c, chunk, 0);
}

tb_status tb__ir_add(tb__owned_ir *ir, const tb_chunk *chunk, const tb__ir_limits *limits) {
    uint32_t part = 0;
    return add_chunk_parts(ir, chunk, NULL, limits, &part);
}

/* Relayed chunks are cut to the size of a bucket, so that one is sent to the next host while the next is received. All
 * ranks of the chunk know its targets and the hosts, and cut the same way. */
static tb__ir_limits limits_of(const builder *b, const tb_chunk *chunk) {
    tb__ir_limits limits = b->limits;
    bool is_cut = limits.staged != INT64_MAX && limits.bucket_size > 1 && tb__ir_uses_relays(chunk, b->plan_opts);
    if (is_cut)
        limits.chunk = limits.bucket_size > MIN_RELAYED_NBYTES ? limits.bucket_size : MIN_RELAYED_NBYTES;
    return limits;
}

/* Cuts the chunk where bands of the target meet: each is in a group of its own. */
static tb_status add_bands(builder *b, const tb_tensor_spec *spec, const tb_chunk *chunk) {
    cutter c = {.spec = spec};
    tb__ir_limits limits = limits_of(b, chunk);
    uint32_t part = 0;
    if (spec->band <= 0 || chunk->ndim == 0)
        return add_chunk_parts(b->ir, chunk, spec, &limits, &part);
    int64_t first = chunk->dst.start[0], stop = first + chunk->len[0];
    for (int64_t at = first, next; at < stop; at = next) {
        tb_chunk slice = *chunk;
        int64_t band = at / spec->band;
        next = (band + 1) * spec->band < stop ? (band + 1) * spec->band : stop;
        if (band > UINT32_MAX - spec->group)
            return tb__fail(TB_TOO_BIG, "there are more than 2^32 groups");
        slice.group = spec->group + (uint32_t)band;
        if (next - at < chunk->len[0])
            shorten_chunk(&c, &slice, 0, at - first, next - at);
        TB_TRY(add_chunk_parts(b->ir, &slice, spec, &limits, &part));
    }
    return TB_OK;
}

static tb_status measure_coded(const tb_tensor_spec *spec, tb_chunk *chunk) {
    tb_shape shape = {.ndim = chunk->ndim};
    memcpy(shape.dim, chunk->len, sizeof shape.dim);
    TB_TRY(tb_shape_size(&shape, chunk->wire_dtype, NULL, &chunk->nbytes));
    if (chunk->is_coded && spec->coded_nbytes)
        chunk->nbytes = spec->coded_nbytes(spec->coded_arg, chunk->ndim, chunk->len);
    return TB_OK;
}

static tb_status add_chunk(builder *b, uint32_t tensor, const tb_tensor_spec *spec, const tb_plan *plan, tb_dtype wire,
                           const tb_route *route, uint32_t number) {
    if (number >> PIECE_BITS)
        return tb__fail(TB_TOO_BIG, "rank %" PRId32 "'s part is cut into more than 2^%d boxes", route->targets[0],
                        PIECE_BITS);
    tb__role role = tb__route_role(route, b->ir->view.rank);
    tb_chunk chunk = {
        .mode = role.mode,
        .is_source = role.is_source,
        .is_target = role.is_target,
        .is_coded = spec->coded,
        .tensor = tensor,
        .group = spec->group,
        .id = ((((uint64_t)route->targets[0] << NAME_BITS | tensor) << PIECE_BITS) | number) << SUB_BITS,
        .source = route->source,
        .ntargets = route->ntargets,
        .ncontributors = route->ncontributors,
        .op = plan->src.op,
        .divisor = plan->src.avg_divisor,
        .src_cell = route->src_cell,
        .dst_cell = route->dst_cell,
        .ndim = plan->shape.ndim,
        .src = route->src,
        .dst = route->dst,
        .order = route->order,
        .src_dtype = spec->src_dtype,
        .wire_dtype = wire,
        .is_whole = spec->coded && spec->whole,
        .memory_kind = spec->memory_kind,
    };
    if (spec->coded && (route->ncontributors || route->source == TB_NO_RANK))
        return tb__fail(TB_REFUSED, "a Partial tensor can't be converted on its way");
    memcpy(chunk.len, route->len, (size_t)chunk.ndim * sizeof *chunk.len);
    TB_TRY(measure_coded(spec, &chunk));
    chunk.targets = tb__ir_ranks(b->ir, route->targets, route->ntargets);
    chunk.contributors = tb__ir_ranks(b->ir, route->contributors, route->ncontributors);
    if (!chunk.targets || !chunk.contributors)
        return TB_NO_MEMORY;
    return add_bands(b, spec, &chunk);
}

static tb_status add_tensor(builder *b, uint32_t index, const tb_tensor_spec *spec) {
    int32_t rank = b->ir->view.rank;
    tb_dtype wire = spec->src_dtype;
    if (!spec->coded_nbytes)
        TB_TRY(tb__wire_dtype(spec->src_dtype, spec->dst_dtype, spec->wire_dtype, &wire));
    tb_plan_opts opts;
    TB_TRY(tb__opts_read(&opts, sizeof opts, b->plan_opts));
    opts.whole_rows |= spec->coded;
    const tb_plan *plan;
    const tb_routes *routes;
    const uint32_t *numbers;
    /* Also if the rank takes no part, so that all ranks refuse alike. */
    TB_TRY(tb_plan_cache_get(b->cache, spec->src, spec->dst, &spec->shape, spec->src_dtype, &opts, &plan));
    if (tb_layout_index_of(spec->src, rank) < 0 && tb_layout_index_of(spec->dst, rank) < 0)
        return TB_OK;
    TB_TRY(tb__plan_cache_numbered(b->cache, plan, rank, index, &routes, &numbers));
    for (size_t i = 0; i < tb_routes_count(routes); i++)
        TB_TRY(add_chunk(b, index, spec, plan, wire, tb_routes_at(routes, i), numbers[i]));
    return TB_OK;
}

static int compare_names(const void *a, const void *b) {
    const tb_tensor_spec *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static tb_status add_tensors(builder *b, const tb_tensor_spec *tensors, size_t count) {
    if (count > (size_t)1 << NAME_BITS)
        return tb__fail(TB_TOO_BIG, "a batch has at most 2^%d tensors", NAME_BITS);
    tb_tensor_spec *sorted = tb__malloc(count, sizeof *sorted);
    if (!sorted)
        return TB_NO_MEMORY;
    tb_status status = TB_OK;
    for (size_t i = 0; i < count && status == TB_OK; i++)
        status = tb__struct_read(&sorted[i], sizeof sorted[i], tensors, i, "a tb_tensor_spec");
    if (status == TB_OK)
        qsort(sorted, count, sizeof *sorted, compare_names);
    for (size_t i = 0; i < count && status == TB_OK; i++) {
        const char *name = tb__arena_strdup(&b->ir->arena, sorted[i].name);
        if (!name || !tb__vec_push(&b->ir->names, name)) {
            status = TB_NO_MEMORY;
        } else if (i > 0 && strcmp(name, sorted[i - 1].name) == 0) {
            status = tb__fail(TB_INVALID, "tensor '%.100s' is in the batch twice", name);
        } else {
            status = add_tensor(b, (uint32_t)i, &sorted[i]);
            if (status != TB_OK)
                tb__prefix_detail("tensor '%.100s'", name);
        }
    }
    free(sorted);
    return status;
}

tb_status tb_ir_create(int32_t rank, const tb_tensor_spec *tensors, size_t ntensors, tb_plan_cache *cache,
                       const tb_ir_opts *opts, tb_ir **out) {
    tb_ir_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.bucket_size < 0 || o.staging_bytes < 0)
        return tb__fail(TB_INVALID, "bucket_size and staging_bytes can't be negative");
    int64_t bucket_size = o.bucket_size ? o.bucket_size : 16 << 20;
    int64_t staging_bytes = o.staging_bytes ? o.staging_bytes : 256 << 20;
    tb__owned_ir *ir = tb__calloc(1, sizeof *ir);
    if (!ir)
        return TB_NO_MEMORY;
    ir->view.rank = rank;
    ir->view.bucket_size = bucket_size;
    builder b = {.ir = ir, .cache = cache, .plan_opts = o.plan};
    b.limits = (tb__ir_limits){.bucket_size = bucket_size, .staged = o.direct ? INT64_MAX : staging_bytes / 4};
    tb_status status = cache ? TB_OK : tb_plan_cache_create(&b.cache);
    if (status == TB_OK)
        status = add_tensors(&b, tensors, ntensors);
    if (status == TB_OK)
        status = tb__ir_pack(ir, &b.limits, o.max_in_flight ? o.max_in_flight : 2);
    if (status == TB_OK)
        status = tb__ir_fan_out(ir, o.plan);
    if (!cache)
        tb_plan_cache_destroy(b.cache);
    if (status != TB_OK) {
        tb_ir_destroy(&ir->view);
        return status;
    }
    tb__ir_finish(ir);
    *out = &ir->view;
    return TB_OK;
}

void tb__ir_finish(tb__owned_ir *ir) {
    ir->view.ntensors = ir->names.count;
    ir->view.names = ir->names.item;
    ir->view.nchunks = ir->chunks.count;
    ir->view.chunks = ir->chunks.item;
    ir->view.nentries = ir->entries.count;
    ir->view.entries = ir->entries.item;
    ir->view.nbuckets = ir->buckets.count;
    ir->view.buckets = ir->buckets.item;
    ir->view.nchannels = ir->channels.count;
    ir->view.channels = ir->channels.item;
}

size_t tb__ir_nbytes(const tb_ir *view) {
    const tb__owned_ir *ir = (const tb__owned_ir *)view;
    return tb__mem_nbytes(ir) + tb__arena_nbytes(&ir->arena) + tb__mem_nbytes(ir->names.item) +
           tb__mem_nbytes(ir->chunks.item) + tb__mem_nbytes(ir->entries.item) + tb__mem_nbytes(ir->buckets.item) +
           tb__mem_nbytes(ir->channels.item) + tb__mem_nbytes(ir->lists.item) + tb__mem_nbytes(ir->by_ranks.slot);
}

void tb__ir_ref(tb_ir *view) {
    ((tb__owned_ir *)view)->nshares++;
}

void tb_ir_destroy(tb_ir *view) {
    tb__owned_ir *ir = (tb__owned_ir *)view;
    if (!ir)
        return;
    if (ir->nshares > 0) {
        ir->nshares--;
        return;
    }
    free(ir->names.item);
    free(ir->chunks.item);
    free(ir->entries.item);
    free(ir->buckets.item);
    free(ir->channels.item);
    free(ir->lists.item);
    tb__index_fini(&ir->by_ranks);
    tb__arena_fini(&ir->arena);
    free(ir);
}
