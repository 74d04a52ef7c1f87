/* The moves of copies: between tensors of this rank and of senders, buckets, contributions and slots. */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "base/int.h"
#include "layout/overlap.h"

#include <string.h>

static int64_t element_offset(const int64_t *strides, int ndim, const int64_t *start) {
    int64_t offset = 0;
    for (int d = 0; d < ndim; d++)
        offset += start[d] * strides[d];
    return offset;
}

size_t tb__box_offset(const tb_binding *binding, const tb_box *box) {
    return (size_t)tb__dtype_offset(binding->dtype, element_offset(binding->strides, binding->shape.ndim, box->start));
}

int64_t tb__box_run(int ndim, const int64_t *len, const int64_t *strides, int *outer) {
    int64_t run = 1;
    int d = ndim;
    while (d > 0 && (strides[d - 1] == run || len[d - 1] == 1))
        run *= len[--d];
    *outer = d;
    return run;
}

void tb__box_run_start(int64_t n, int outer, const int64_t *len, const int64_t *start, int64_t *index) {
    for (int i = outer; i-- > 0;) {
        index[i] = start[i] + n % len[i];
        n /= len[i];
    }
}

char *tb__binding_at(const tb_binding *b, const int64_t *start) {
    return (char *)b->base + b->offset + tb__dtype_offset(b->dtype, element_offset(b->strides, b->shape.ndim, start));
}

bool tb__flow_is_in_place(const tb__flow *flow, const tb_chunk *chunk) {
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    if (chunk->is_coded || t->is_gathered)
        return false;
    if (chunk->source != flow->o.rank || !chunk->is_target || chunk->ncontributors > 0 ||
        t->src.dtype != t->dst.dtype || chunk->wire_dtype != t->src.dtype ||
        tb__binding_at(&t->src, chunk->src.start) != tb__binding_at(&t->dst, chunk->dst.start))
        return false;
    for (int d = 0; d < chunk->ndim; d++) {
        if (chunk->len[d] > 1 && t->src.strides[d] != t->dst.strides[d])
            return false;
    }
    return true;
}

static int64_t nelements(const tb_chunk *chunk) {
    int64_t n = 1;
    for (int d = 0; d < chunk->ndim; d++)
        n *= chunk->len[d];
    return n;
}

static int64_t raw_nbytes(const tb__flow *flow, const tb_chunk *chunk) {
    return tb__align(tb__dtype_bytes(flow->tensors[chunk->tensor].spec.src_dtype, nelements(chunk)), 64);
}

int64_t tb__flow_raw_size(const tb__flow *flow, const tb_bucket *bucket) {
    const tb_ir *ir = flow->setup.ir;
    int64_t nbytes = 0;
    for (size_t i = 0; i < bucket->nentries; i++)
        nbytes += raw_nbytes(flow, &ir->chunks[ir->entries[bucket->first_entry + i].chunk]);
    return nbytes;
}

int64_t tb__flow_bucket_nbytes(const tb__flow *flow, size_t bucket) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    int64_t nbytes = 0;
    for (size_t i = 0; i < b->nentries; i++)
        nbytes += flow->setup.ir->entries[b->first_entry + i].nbytes;
    return nbytes;
}

/* ---- Ends of moves --------------------------------------------------------------------------------------------- */

/* The source or destination of a chunk's move. */
typedef enum end_kind {
    END_SENDER, /* a sender's tensor, from its BIND */
    END_SOURCE, /* this rank's source tensor */
    END_TARGET, /* this rank's target tensor */
    END_BUCKET, /* a bucket's buffer, in the wire dtype */
    END_RAW,    /* a buffer of contributions, in the source dtype */
} end_kind;

typedef struct move_end {
    end_kind kind;
    member *member;    /* of SENDER */
    size_t raw_offset; /* of RAW: offset of the contribution in the buffer */
} move_end;

/* A chunk in a bucket. */
typedef struct bucket_chunk {
    const tb_chunk *chunk;
    const tb_bucket_entry *entry;
    size_t raw_offset; /* its offset in a contribution to the bucket */
} bucket_chunk;

static void row_major_strides(const tb_chunk *chunk, const int64_t *len, int64_t *strides) {
    int64_t stride = 1;
    for (int d = chunk->ndim; d-- > 0;) {
        strides[d] = stride;
        stride *= len[d];
    }
}

/* The chunk's address and strides at this end. The address is relative to *mapping, unless that is NULL. */
static tb_status locate_end(tb__flow *flow, const move_end *e, const bucket_chunk *it, int64_t *strides, void **out,
                            tb__mapping **mapping) {
    const tb_chunk *chunk = it->chunk;
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    const int64_t *start = e->kind == END_TARGET ? chunk->dst.start : chunk->src.start;
    *mapping = NULL;
    if (e->kind == END_TARGET && t->is_gathered) { /* the slot begins with the tensor's band */
        int64_t in_band[TB_MAX_DIMS];
        memcpy(in_band, start, sizeof in_band);
        row_major_strides(chunk, t->dst.shape.dim, strides);
        if (t->spec.band)
            in_band[0] -= (int64_t)(chunk->group - t->spec.group) * t->spec.band;
        *out = tb__flow_slot(flow, chunk) + t->slot_offset +
               tb__dtype_offset(t->spec.dst_dtype, element_offset(strides, chunk->ndim, in_band));
        return TB_OK;
    }
    if (e->kind == END_SOURCE || e->kind == END_TARGET) {
        const tb_binding *binding = e->kind == END_SOURCE ? &t->src : &t->dst;
        memcpy(strides, binding->strides, sizeof binding->strides);
        *out = tb__binding_at(binding, start);
        return TB_OK;
    }
    if (e->kind == END_BUCKET || e->kind == END_RAW) {
        size_t offset = e->kind == END_BUCKET ? (size_t)it->entry->offset : e->raw_offset + it->raw_offset;
        row_major_strides(chunk, chunk->len, strides);
        *mapping = TB__IN_BUFFER;
        *out = (void *)offset; // NOLINT(performance-no-int-to-ptr)
        return TB_OK;
    }
    const remote_tensor *p = tb__member_find_tensor(e->member, chunk->tensor);
    int64_t offset =
        (int64_t)p->offset + tb__dtype_offset(t->spec.src_dtype, element_offset(p->strides, chunk->ndim, start));
    memcpy(strides, p->strides, sizeof p->strides);
    tb__peer_memory_source(p->memory, (uint64_t)offset, out, mapping);
    return TB_OK;
}

/* ---- Lists ----------------------------------------------------------------------------------------------------- */

/* The bytes of the tensor itself, if that is where the move ends. */
static tb__move_tensor tensor_at_end(const tb__flow *flow, const move_end *e, uint32_t tensor) {
    const tb__flow_tensor *t = &flow->tensors[tensor];
    bool is_source = e->kind == END_SOURCE || (e->kind == END_SENDER && e->member == &flow->members[flow->self]);
    tb__move_tensor out;
    if ((!is_source && (e->kind != END_TARGET || t->is_gathered)) ||
        tb__binding_span(is_source ? &t->src : &t->dst, &out.first, &out.last) != TB_OK)
        return (tb__move_tensor){0};
    return out;
}

static tb_status add_chunk_moves(tb__flow *flow, tb__move_list *out, uint32_t bucket, const bucket_chunk *it,
                                 const move_end *from, size_t nfrom, const move_end *to) {
    const tb_chunk *chunk = it->chunk;
    const tb_tensor_spec *spec = &flow->tensors[chunk->tensor].spec;
    const void **src = tb__arena_alloc(&out->arena, nfrom, sizeof *src);
    tb__mapping **mappings = tb__arena_alloc(&out->arena, nfrom, sizeof *mappings), *to_buffer;
    int64_t(*strides)[TB_MAX_DIMS] = tb__arena_alloc(&out->arena, nfrom, sizeof *strides);
    if (!src || !strides || !mappings)
        return TB_NO_MEMORY;
    tb__move move = {.part = bucket,
                     .ndim = chunk->ndim,
                     .nsrc = (uint32_t)nfrom,
                     .src = src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
                     .src_mapping = mappings,
                     .src_dtype = spec->src_dtype,
                     .wire_dtype = chunk->wire_dtype,
                     .dst_dtype = spec->dst_dtype,
                     .op = chunk->op,
                     .avg_divisor = chunk->ncontributors ? chunk->divisor : 1};
    memcpy(move.len, chunk->len, sizeof move.len);
    for (size_t i = 0; i < nfrom; i++) {
        void *at = NULL;
        memset(strides[i], 0, sizeof *strides);
        TB_TRY(locate_end(flow, &from[i], it, strides[i], &at, &mappings[i]));
        src[i] = at;
    }
    for (size_t i = 0; i < nfrom && !move.src_tensor.last; i++)
        move.src_tensor = tensor_at_end(flow, &from[i], chunk->tensor);
    move.dst_tensor = tensor_at_end(flow, to, chunk->tensor);
    TB_TRY(locate_end(flow, to, it, move.dst_stride, &move.dst, &to_buffer));
    move.is_dst_in_buffer = to_buffer != NULL;
    if (nfrom && from[0].kind == END_BUCKET) { /* a bucket is reduced and in the wire dtype already */
        move.src_dtype = chunk->wire_dtype;
        move.avg_divisor = 1;
    }
    if (to->kind == END_BUCKET)
        move.dst_dtype = chunk->wire_dtype;
    if (to->kind == END_RAW) { /* contributions are not converted */
        move.wire_dtype = move.dst_dtype = spec->src_dtype;
        move.avg_divisor = 1;
    }
    return tb__vec_push(&out->moves, move) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__flow_list_elements(tb__flow *flow, const tb_bucket_entry *entry, bool packs, tb__move_list *out) {
    bucket_chunk it = {.chunk = &flow->setup.ir->chunks[entry->chunk], .entry = entry};
    move_end tensor = {.kind = packs ? END_SOURCE : END_TARGET}, bucket = {.kind = END_BUCKET};
    return add_chunk_moves(flow, out, 0, &it, packs ? &tensor : &bucket, 1, packs ? &bucket : &tensor);
}

/* Bytes between chunks are zeroed, so that a bucket's checksum depends on its tensors only. */
static tb_status add_gap(const tb__flow *flow, tb__move_list *out, uint32_t bucket, int64_t from, int64_t to) {
    tb__move zeros = {.part = bucket,
                      .ndim = 1,
                      .len = {to - from},
                      .dst = (void *)(uintptr_t)from, // NOLINT(performance-no-int-to-ptr)
                      .dst_stride = {1},
                      .dst_dtype = TB_U8,
                      .is_dst_in_buffer = true};
    return to > from && flow->o.checksum ? tb__move_list_add(out, &zeros) : TB_OK;
}

/* A chunk that is converted where its sender has it. */
static tb_status add_converted_chunk(tb__flow *flow, tb__move_list *out, uint32_t part, const bucket_chunk *it,
                                     const move_end *from, tb__gather_step step) {
    const tb__gather *gather = &flow->o.gather;
    int64_t strides[TB_MAX_DIMS] = {0};
    size_t first = out->moves.count;
    tb__mapping *mapping;
    void *at;
    TB_TRY(locate_end(flow, from, it, strides, &at, &mapping));
    TB_TRY(gather->list_chunk(gather->arg, it->chunk, step, at, strides, mapping, out));
    for (; first < out->moves.count; first++) {
        out->moves.item[first].part = part;
        out->moves.item[first].src_tensor = tensor_at_end(flow, from, it->chunk->tensor);
    }
    return TB_OK;
}

static tb_status add_converted_bucket(tb__flow *flow, tb__move_list *out, size_t index, uint32_t part,
                                      tb__gather_step step) {
    const tb_bucket *bucket = &flow->setup.ir->buckets[index];
    move_end from = {.kind = END_SENDER, .member = &flow->members[tb__flow_lane(flow, index)->senders[0]]};
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_bucket_entry *entry = &flow->setup.ir->entries[bucket->first_entry + i];
        bucket_chunk it = {.chunk = &flow->setup.ir->chunks[entry->chunk], .entry = entry};
        TB_TRY(add_converted_chunk(flow, out, part, &it, &from, step));
    }
    return TB_OK;
}

/* Adds the second reading of groups that are read twice. */
static tb_status add_second_reads(tb__flow *flow, tb__move_list *out) {
    for (size_t i = 0; i < flow->setup.ir->nbuckets; i++) {
        const lane *l = tb__flow_lane(flow, i);
        const group *g = l->is_target ? tb__flow_group(flow, i) : NULL;
        if (g && g->is_read_twice && !tb__lane_is_unreadable(flow, l))
            TB_TRY(add_converted_bucket(flow, out, i, g->number, TB__GATHER_WRITE));
    }
    return TB_OK;
}

static tb_status add_bucket(tb__flow *flow, tb__move_list *out, size_t index, const move_end *from, size_t nfrom,
                            const move_end *to) {
    const tb_bucket *bucket = &flow->setup.ir->buckets[index];
    const tb_bucket_entry *entries = &flow->setup.ir->entries[bucket->first_entry];
    bool is_pull = to->kind == END_TARGET && nfrom == 1 && from[0].kind == END_SENDER;
    size_t raw = 0;
    for (size_t i = 0; i < bucket->nentries; i++) {
        bucket_chunk it = {.chunk = &flow->setup.ir->chunks[entries[i].chunk], .entry = &entries[i], .raw_offset = raw};
        raw += (size_t)raw_nbytes(flow, it.chunk);
        if (to->kind == END_BUCKET && i + 1 < bucket->nentries)
            TB_TRY(add_gap(flow, out, (uint32_t)index, entries[i].offset + entries[i].nbytes, entries[i + 1].offset));
        if (!is_pull || !tb__flow_is_in_place(flow, it.chunk))
            TB_TRY(add_chunk_moves(flow, out, (uint32_t)index, &it, from, nfrom, to));
    }
    return TB_OK;
}

/* Whether buckets of the lane need a copy of this kind. */
static bool needs_copy(const tb__flow *flow, const lane *l, const bucket_path *path, copy_kind kind) {
    bool is_read = l->is_target && !path->takes_staged && !tb__lane_is_unreadable(flow, l),
         is_combined = l->is_channel_source && l->nsenders > 1;
    if (l->first->is_coded) {
        bool packs = kind == COPY_PACK || kind == COPY_SCRATCH_SRC;
        bool unpacks = kind == COPY_UNPACK || kind == COPY_SCRATCH_DST || kind == COPY_SCRATCH_BACK;
        return (packs && l->is_channel_source) || (unpacks && l->is_target);
    }
    switch (kind) {
    case COPY_DIRECT:
        return is_read && !l->is_stashed;
    case COPY_STASH:
        return is_read && l->is_stashed;
    case COPY_PACK:
        return path->nstaged && l->is_channel_source && l->nsenders == 1;
    case COPY_CONTRIBUTE:
        return path->nstaged && l->is_contributor;
    case COPY_UNPACK:
        return l->is_target && (path->takes_staged || l->is_stashed);
    case COPY_COMBINE:
        return is_combined &&
               ((path->nstaged && !l->is_target) || (l->is_target && path->takes_staged && l->is_stashed));
    case COPY_COMBINE_IN:
        return is_combined && l->is_target && path->takes_staged && !l->is_stashed;
    default:
        return false;
    }
}

static tb_status add_coded_bucket(tb__flow *flow, tb__move_list *out, size_t index, copy_kind kind) {
    const tb_bucket *bucket = &flow->setup.ir->buckets[index];
    const tb_bucket_entry *entries = &flow->setup.ir->entries[bucket->first_entry];
    move_end source = {.kind = END_SOURCE}, target = {.kind = END_TARGET};
    size_t first = out->moves.count;
    int64_t scratch = 0;
    for (size_t j = 0; j < bucket->nentries; j++) {
        if (kind == COPY_PACK && j + 1 < bucket->nentries)
            TB_TRY(add_gap(flow, out, (uint32_t)index, entries[j].offset + entries[j].nbytes, entries[j + 1].offset));
        TB_TRY(tb__flow_list_coded(flow, kind, &entries[j], &scratch, out));
        for (uint32_t tensor = flow->setup.ir->chunks[entries[j].chunk].tensor; first < out->moves.count; first++) {
            tb__move *move = &out->moves.item[first];
            move->part = (uint32_t)index;
            move->src_tensor = tensor_at_end(flow, &source, tensor);
            move->dst_tensor = tensor_at_end(flow, &target, tensor);
        }
    }
    return TB_OK;
}

static tb_status add_coded_lane(tb__flow *flow, tb__move_list *out, const lane *l, copy_kind kind) {
    for (size_t i = 0; i < l->channel->nbuckets; i++)
        TB_TRY(add_coded_bucket(flow, out, l->channel->first_bucket + i, kind));
    return TB_OK;
}

tb_status tb__flow_list_bucket(tb__flow *flow, bool packs, size_t bucket, tb__move_list *out) {
    move_end tensor = {.kind = packs ? END_SOURCE : END_TARGET}, buffer = {.kind = END_BUCKET};
    if (tb__flow_first_chunk(flow, bucket)->is_coded)
        return add_coded_bucket(flow, out, bucket, packs ? COPY_PACK : COPY_UNPACK);
    return add_bucket(flow, out, bucket, packs ? &tensor : &buffer, 1, packs ? &buffer : &tensor);
}

static tb_status add_lane(tb__flow *flow, tb__move_list *out, const lane *l, copy_kind kind) {
    move_end one = {.kind = kind == COPY_UNPACK ? END_BUCKET : END_SOURCE}, to = {.kind = END_BUCKET}, *from = &one;
    size_t nfrom = 1;
    bool is_combined = kind == COPY_COMBINE || kind == COPY_COMBINE_IN;
    if (kind == COPY_DIRECT || kind == COPY_UNPACK || kind == COPY_COMBINE_IN)
        to.kind = END_TARGET;
    else if (kind == COPY_CONTRIBUTE)
        to.kind = END_RAW;
    if (is_combined || kind == COPY_DIRECT || kind == COPY_STASH) {
        nfrom = l->nsenders;
        from = tb__arena_alloc(&out->arena, nfrom, sizeof *from);
        if (!from)
            return TB_NO_MEMORY;
    }
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        size_t bucket = l->channel->first_bucket + i;
        if (!needs_copy(flow, l, &flow->setup.paths[bucket], kind))
            continue;
        const group *g = kind == COPY_DIRECT ? tb__flow_group(flow, bucket) : NULL;
        if (g && g->is_converted) {
            TB_TRY(add_converted_bucket(flow, out, bucket, (uint32_t)bucket,
                                        g->is_read_twice ? TB__GATHER_MEASURE : TB__GATHER_WRITE));
            continue;
        }
        size_t raw = (size_t)tb__flow_raw_size(flow, &flow->setup.ir->buckets[bucket]), others = 0;
        for (size_t j = 0; from != &one && j < nfrom; j++) {
            bool is_raw = is_combined && l->senders[j] != flow->self;
            from[j] = (move_end){.kind = !is_combined ? END_SENDER
                                         : is_raw     ? END_RAW
                                                      : END_SOURCE,
                                 .member = &flow->members[l->senders[j]],
                                 .raw_offset = is_raw ? raw * others++ : 0};
        }
        TB_TRY(add_bucket(flow, out, bucket, from, nfrom, &to));
    }
    return TB_OK;
}

/* A whole tensor: to its snapshot, or from its shadow. */
static tb_status add_tensor(tb__move_list *out, const tb_binding *from, const tb_binding *to) {
    const void **src = tb__arena_alloc(&out->arena, 1, sizeof *src);
    tb__mapping **mapping = tb__arena_alloc(&out->arena, 1, sizeof *mapping);
    int64_t(*strides)[TB_MAX_DIMS] = tb__arena_alloc(&out->arena, 1, sizeof *strides), count;
    TB_TRY(tb_shape_size(&to->shape, to->dtype, &count, NULL));
    if (count == 0)
        return TB_OK;
    if (!src || !strides || !mapping)
        return TB_NO_MEMORY;
    *mapping = NULL;
    *src = tb__binding_at(from, (int64_t[TB_MAX_DIMS]){0});
    memcpy(strides, from->strides, sizeof *strides);
    tb__move move = {.ndim = to->shape.ndim,
                     .nsrc = 1,
                     .src = src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS])strides,
                     .src_mapping = mapping,
                     .dst = tb__binding_at(to, (int64_t[TB_MAX_DIMS]){0}),
                     .src_dtype = from->dtype,
                     .wire_dtype = from->dtype,
                     .dst_dtype = from->dtype};
    memcpy(move.len, to->shape.dim, sizeof move.len);
    memcpy(move.dst_stride, to->strides, sizeof move.dst_stride);
    return tb__vec_push(&out->moves, move) ? TB_OK : TB_NO_MEMORY;
}

static tb_status add_padding(tb__move_list *out, const tb__flow_tensor *t) {
    for (size_t i = 0; i < t->npadding; i++) {
        const tb_binding *b = &t->padding[i];
        tb__move zeros = {.ndim = b->shape.ndim, .dst = (char *)b->base + b->offset, .dst_dtype = b->dtype};
        memcpy(zeros.len, b->shape.dim, sizeof zeros.len);
        memcpy(zeros.dst_stride, b->strides, sizeof zeros.dst_stride);
        tb_status status = tb__move_check(&zeros);
        if (status != TB_OK)
            return tb__fail_within(status, "the padding of tensor '%.100s'", t->spec.name);
        TB_TRY(tb__move_list_add(out, &zeros));
    }
    return TB_OK;
}

static tb_status add_tensors(tb__flow *flow, tb__move_list *out, copy_kind kind) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        if (kind == COPY_SNAPSHOT)
            TB_TRY(add_tensor(out, &flow->setup.snapshot_of[i], &t->src));
        else
            TB_TRY(add_padding(out, t));
        if (kind == COPY_COMMIT && tb__flow_has_shadow(flow, i))
            TB_TRY(add_tensor(out, &t->dst, &flow->shadow.live[i]));
    }
    const tb__shadow *owner = &flow->o.shadow;
    return kind == COPY_COMMIT && owner->list ? owner->list(owner->arg, out) : TB_OK;
}

bool tb__copy_is_whole(copy_kind kind) {
    return kind == COPY_SNAPSHOT || kind == COPY_COMMIT || kind == COPY_PADDING;
}

tb_status tb__flow_list_copies(tb__flow *flow, copy_kind kind, tb__move_list *out) {
    if (tb__copy_is_whole(kind))
        return add_tensors(flow, out, kind);
    if (kind == COPY_GATHERED)
        TB_TRY(add_second_reads(flow, out));
    if (kind == COPY_MEASURE || kind == COPY_GATHERED)
        return tb__flow_list_gathered(flow, kind, out);
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        if (!l->first->is_coded)
            TB_TRY(add_lane(flow, out, l, kind));
        else if (needs_copy(flow, l, &flow->setup.paths[l->channel->first_bucket], kind))
            TB_TRY(add_coded_lane(flow, out, l, kind));
    }
    return TB_OK;
}
