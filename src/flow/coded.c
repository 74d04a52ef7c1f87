/* Buckets of coded tensors. Conversions that come with tensorbus are moves. A user's conversion is a function on host
 * memory; boxes of tensors on other devices are copied to scratch memory before and back afterwards. Order of packing:
 * copies to scratch, functions, moves to the buffer. Order of unpacking: copies to scratch (a function need not write
 * all of a box), functions, moves from the buffer, copies from scratch. */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

static const tb_binding *binding_of(const tb__flow_tensor *t, bool packs) {
    return packs ? &t->src : &t->dst;
}

static tb_binding box_of(const tb__flow_tensor *t, const tb_chunk *chunk, bool packs) {
    tb_binding box = *binding_of(t, packs);
    box.offset += (int64_t)tb__box_offset(&box, packs ? &chunk->src : &chunk->dst);
    box.shape.ndim = chunk->ndim;
    memcpy(box.shape.dim, chunk->len, sizeof box.shape.dim);
    return box;
}

static int64_t nbytes_of(const tb_binding *box) {
    int64_t n = 1;
    for (int d = 0; d < box->shape.ndim; d++)
        n *= box->shape.dim[d];
    return tb__align(tb__dtype_bytes(box->dtype, n), 64);
}

/* The box in scratch memory: row-major, with offsets relative to the scratch memory. */
static tb_status scratch_of(const tb_binding *box, int64_t at, tb_binding *out) {
    return tb_binding_contiguous(NULL, at, box->dtype, &box->shape, out);
}

static bool is_called(const tb__codec *codec, bool packs) {
    return packs ? codec->call_pack != NULL : codec->call_unpack != NULL;
}

static bool needs_scratch(const tb__flow *flow, const tb_chunk *chunk, bool packs) {
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    const tb_binding *b = binding_of(t, packs);
    int last = chunk->ndim - 1;
    if (is_called(t->codec, packs))
        return !tb__loop_is_host_memory(flow->o.loop, b->base);
    return packs && t->codec->list_pack && t->codec->packs_rows && last >= 0 && chunk->len[last] > 1 &&
           b->strides[last] != 1;
}

bool tb__flow_needs_host(const tb__flow *flow, const tb_chunk *chunk, bool packs) {
    return is_called(flow->tensors[chunk->tensor].codec, packs) || needs_scratch(flow, chunk, packs);
}

/* ---- Moves ------------------------------------------------------------------------------------------------------- */

static tb_status list_scratch(const tb_binding *box, const tb_binding *scratch, bool is_back, tb__move_list *out) {
    const tb_binding *from = is_back ? scratch : box, *to = is_back ? box : scratch;
    const void *src = (const char *)from->base + from->offset;
    tb__mapping *mapping = is_back ? TB__IN_BUFFER : NULL;
    tb__move move = {.ndim = box->shape.ndim,
                     .dst = (char *)to->base + to->offset,
                     .is_dst_in_buffer = !is_back,
                     .nsrc = 1,
                     .src = &src,
                     .src_stride = (const int64_t(*)[TB_MAX_DIMS]) & from->strides,
                     .src_mapping = &mapping,
                     .src_dtype = box->dtype,
                     .wire_dtype = box->dtype,
                     .dst_dtype = box->dtype};
    memcpy(move.len, box->shape.dim, sizeof move.len);
    memcpy(move.dst_stride, to->strides, sizeof move.dst_stride);
    return tb__move_list_add(out, &move);
}

/* Without a codec at this end, the wire form must be the plain elements. */
static tb_status check_elements(const tb__flow *flow, const tb_chunk *chunk) {
    int64_t n = 1;
    for (int d = 0; d < chunk->ndim; d++)
        n *= chunk->len[d];
    int64_t nbytes = tb__dtype_bytes(chunk->wire_dtype, n);
    if (nbytes == chunk->nbytes)
        return TB_OK;
    return tb__fail(TB_INVALID,
                    "tensor '%.100s' has a piece of %" PRId64
                    " bytes on the wire, but nothing converts it here, and its "
                    "elements have %" PRId64,
                    flow->tensors[chunk->tensor].spec.name, chunk->nbytes, nbytes);
}

static tb_status list_chunk(tb__flow *flow, const tb_bucket_entry *entry, bool packs, const tb_binding *scratch,
                            tb__move_list *out) {
    const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    const tb__codec *codec = t->codec;
    if (is_called(codec, packs))
        return TB_OK;
    tb_status status;
    if (packs && codec->list_pack) {
        tb_binding box = box_of(t, chunk, true);
        status = codec->list_pack(codec->arg, chunk, scratch ? scratch : &box, scratch ? TB__IN_BUFFER : NULL,
                                  entry->offset, out);
    } else if (!packs && codec->list_unpack) {
        status = codec->list_unpack(codec->arg, chunk, entry->offset, out);
    } else {
        TB_TRY(check_elements(flow, chunk));
        return tb__flow_list_elements(flow, entry, packs, out);
    }
    return status == TB_OK ? TB_OK : tb__fail_within(status, "tensor '%.100s'", t->spec.name);
}

tb_status tb__flow_list_coded(tb__flow *flow, copy_kind kind, const tb_bucket_entry *entry, int64_t *at,
                              tb__move_list *out) {
    const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    bool packs = kind == COPY_PACK || kind == COPY_SCRATCH_SRC, has_scratch = needs_scratch(flow, chunk, packs);
    tb_binding box = box_of(t, chunk, packs), scratch;
    tb_status status = TB_OK;
    if (has_scratch)
        TB_TRY(scratch_of(&box, *at, &scratch));
    if (kind == COPY_PACK || kind == COPY_UNPACK)
        status = list_chunk(flow, entry, packs, has_scratch ? &scratch : NULL, out);
    else if (has_scratch)
        status = list_scratch(&box, &scratch, kind == COPY_SCRATCH_BACK, out);
    *at += has_scratch ? nbytes_of(&box) : 0;
    return status;
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

tb_status tb__flow_begin_coded(copy_op *c) {
    const tb__flow *flow = c->flow;
    const tb_bucket *bucket = &flow->setup.ir->buckets[c->parts[0]];
    bool packs = c->kind == COPY_PACK;
    int64_t nbytes = 0;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[bucket->first_entry + i].chunk];
        tb_binding box = box_of(&flow->tensors[chunk->tensor], chunk, packs);
        nbytes += needs_scratch(flow, chunk, packs) ? nbytes_of(&box) : 0;
    }
    c->running = packs ? COPY_SCRATCH_SRC : COPY_SCRATCH_DST;
    return nbytes ? tb_alloc((size_t)nbytes, (void **)&c->scratch) : TB_OK;
}

/* Fails if the leg was cancelled, or its memory invalidated, during the user's function. */
static tb_status check_wanted(tb__flow *flow, bool is_send) {
    const tb__leg *leg = is_send ? &flow->send : &flow->recv;
    if (leg->memory_invalidated)
        return tb__flow_check_memory(flow, is_send);
    return leg->is_cancelled ? tb__fail(TB_CANCELLED, "rank %" PRId32 " cancelled %s", flow->o.rank, flow->what)
                             : TB_OK;
}

static tb_status call_user(const copy_op *c, const tb_bucket_entry *entry, int64_t at) {
    tb__flow *flow = c->flow;
    const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
    const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
    const tb__codec *codec = t->codec;
    bool packs = c->kind == COPY_PACK;
    char *wire = (packs ? c->to : c->from) + entry->offset;
    tb_binding box = box_of(t, chunk, packs), scratch;
    if (needs_scratch(flow, chunk, packs)) {
        TB_TRY(scratch_of(&box, at, &scratch));
        scratch.base = c->scratch;
        box = scratch;
    }
    tb__loop_unlock(flow->o.loop);
    tb_status status =
        packs ? codec->call_pack(codec->arg, chunk, &box, wire) : codec->call_unpack(codec->arg, chunk, &box, wire);
    tb__loop_lock(flow->o.loop);
    return status == TB_OK ? check_wanted(flow, c->is_send) : tb__fail_within(status, "tensor '%.100s'", t->spec.name);
}

static tb_status call_all(const copy_op *c) {
    tb__flow *flow = c->flow;
    const tb_bucket *bucket = &flow->setup.ir->buckets[c->parts[0]];
    bool packs = c->kind == COPY_PACK;
    int64_t at = 0;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_bucket_entry *entry = &flow->setup.ir->entries[bucket->first_entry + i];
        const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        tb_binding box = box_of(t, chunk, packs);
        if (is_called(t->codec, packs))
            TB_TRY(call_user(c, entry, at));
        at += needs_scratch(flow, chunk, packs) ? nbytes_of(&box) : 0;
    }
    return TB_OK;
}

tb_status tb__flow_step_coded(copy_op *c) {
    switch (c->running) {
    case COPY_SCRATCH_SRC:
    case COPY_SCRATCH_DST:
        c->running = c->kind;
        return call_all(c);
    case COPY_UNPACK:
        c->running = c->scratch ? COPY_SCRATCH_BACK : COPY_KINDS;
        return TB_OK;
    default:
        c->running = COPY_KINDS;
        return TB_OK;
    }
}
