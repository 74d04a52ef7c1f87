/* Which tensors can be reached. Senders tell readers where their tensors are (BIND), and readers try to map or read
 * them; what comes of it is in reach.c. */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

remote_tensor *tb__member_find_tensor(const member *m, uint32_t tensor) {
    size_t i = 0;
    TB_BISECT(i, m->setup.remote_tensors.count, m->setup.remote_tensors.item[i].tensor >= tensor);
    return i < m->setup.remote_tensors.count && m->setup.remote_tensors.item[i].tensor == tensor
               ? &m->setup.remote_tensors.item[i]
               : NULL;
}

/* ---- BIND ----------------------------------------------------------------------------------------------------- */

/* Marks the tensors that the reader gets from this rank. */
static void mark_tensors(const tb__flow *flow, const member *reader, bool *is_read) {
    const tb_ir *ir = flow->setup.ir;
    memset(is_read, 0, flow->o.ntensors * sizeof *is_read);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        if (!(l->is_channel_source || l->is_contributor) ||
            !tb__has_int32(l->first->targets, l->first->ntargets, reader->peer->rank))
            continue;
        const tb_bucket *first = &ir->buckets[l->channel->first_bucket], *last = first + l->channel->nbuckets;
        for (const tb_bucket *b = first; b < last; b++) {
            for (size_t j = 0; j < b->nentries; j++)
                is_read[ir->chunks[ir->entries[b->first_entry + j].chunk].tensor] = true;
        }
    }
}

/* ---- Reasons ---------------------------------------------------------------------------------------------------- */

/* Consecutive tensors mostly have the same reason. */
const char *tb__flow_keep_reason(tb__flow *flow, const char *format, ...) {
    char text[TB__REASON_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (flow->setup.last_reason && strcmp(flow->setup.last_reason, text) == 0)
        return flow->setup.last_reason;
    const char *kept = tb__arena_strdup(&flow->setup.arena, text);
    if (!kept)
        return "there is no memory for the reason";
    return flow->setup.last_reason = kept;
}

/* Packs a key of the memory for the peer. False: there is none, for the reason in `why`. */
static bool export_key(const tb__flow *flow, tb__region *region, tb__peer *peer, tb__pack *key,
                       char why[TB__REASON_MAX]) {
    int32_t rank = flow->o.rank;
    *why = '\0';
    if (!region)
        snprintf(why, TB__REASON_MAX, "rank %" PRId32 " has no elements of it", rank);
    else if (flow->o.hosts && flow->o.hosts[peer->rank] != flow->o.hosts[rank])
        snprintf(why, TB__REASON_MAX, "ranks %" PRId32 " and %" PRId32 " are on different machines", rank, peer->rank);
    else if (tb__region_export(region, peer, key) != TB_OK)
        snprintf(why, TB__REASON_MAX, "rank %" PRId32 " can't share it: %s", rank, tb_error_detail());
    else if (key->failed)
        snprintf(why, TB__REASON_MAX, "rank %" PRId32 " has no memory for its key", rank);
    return *why == '\0';
}

/* Packs the key, or an empty one and, with `says_why`, the reason. */
static void pack_key(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer, bool says_why) {
    tb__pack key = {0};
    char why[TB__REASON_MAX];
    bool has_key = export_key(flow, region, peer, &key, why);
    tb__pack_bytes(pack, key.data, has_key ? key.count : 0);
    if (!has_key && says_why)
        tb__pack_string(pack, why);
    tb__pack_fini(&key);
}

void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer) {
    pack_key(pack, flow, region, peer, false);
}

/* Packs where the tensor is, for the reader. */
static void pack_tensor(tb__pack *pack, const tb__flow *flow, const member *reader, size_t i) {
    const tb_binding *b = &flow->tensors[i].src;
    tb__pack_u64(pack, flow->tensors[i].key);
    tb__pack_u32(pack, flow->setup.overwritten[i]);
    pack_key(pack, flow, flow->setup.src_regions[i], reader->peer, true);
    /* A region begins where the binding's lowest element is: not at (0, 0, ...) where strides are negative. */
    int64_t back = 0;
    for (int d = 0; d < b->shape.ndim; d++) {
        if (b->strides[d] < 0)
            back -= b->strides[d] * (b->shape.dim[d] - 1);
    }
    tb__pack_u64(pack, (uint64_t)tb__dtype_bytes(b->dtype, back));
    for (int d = 0; d < b->shape.ndim; d++)
        tb__pack_i64(pack, b->strides[d]);
}

/* Packs the marked tensors. */
static void pack_tensors(tb__pack *pack, const tb__flow *flow, const member *reader, const bool *which) {
    uint32_t count = 0;
    for (size_t i = 0; i < flow->o.ntensors; i++)
        count += which[i];
    tb__pack_u32(pack, count);
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        if (which[i])
            pack_tensor(pack, flow, reader, i);
    }
}

static void send_bind(tb__flow *flow, member *reader, bool *is_read) {
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_BIND, 0);
    tb__pack_u32(&pack, flow->o.staged);
    pack_key(&pack, flow, flow->direct.exposures_region, reader->peer, true);
    tb__pack_u64(&pack, (uint64_t)((char *)reader->direct.exposure - flow->direct.exposures));
    bool is_mapped = reader->peer->rank != flow->o.rank && !tb__staged_carries(flow, reader);
    tb__flow_pack_key(&pack, flow, is_mapped ? flow->staged.on_device[true].region : NULL, reader->peer);
    mark_tensors(flow, reader, is_read);
    pack_tensors(&pack, flow, reader, is_read);
    tb__flow_send_message(flow, reader, &pack);
}

tb_status tb__flow_send_binds(tb__flow *flow) {
    if (flow->setup.is_bound)
        return TB_OK;
    bool *is_read = tb__malloc(flow->o.ntensors, sizeof *is_read);
    if (!is_read)
        return TB_NO_MEMORY;
    tb__staged_make_device_stage(flow, true);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader)
            send_bind(flow, &flow->members[i], is_read);
    }
    free(is_read);
    flow->setup.is_bound = true;
    return TB_OK;
}

void tb__flow_prepare_send(tb__flow *flow) {
    if (flow->report.broken.status == TB_OK && tb__flow_ensure_plan(flow))
        (void)tb__flow_send_binds(flow); /* without memory for it, the first send does it */
}

/* This rank's own message is taken at once: nothing reads its tensors at their old addresses from now on. */
static void send_rebind(tb__flow *flow, member *reader, const bool *which) {
    tb__pack pack = {0};
    bool is_self = reader == &flow->members[flow->self];
    if (!is_self)
        tb__flow_begin_message(flow, &pack, MESSAGE_REBIND, 0);
    pack_tensors(&pack, flow, reader, which);
    if (!is_self) {
        tb__flow_send_message(flow, reader, &pack);
        return;
    }
    tb__unpack message = {
        .at = pack.data, .end = pack.failed ? pack.data : pack.data + pack.count, .failed = pack.failed};
    if (!tb__flow_on_rebind(flow, reader, &message))
        tb__flow_break(flow, pack.failed ? TB_NO_MEMORY : TB_INTERNAL, tb_error_detail());
    tb__pack_fini(&pack);
}

tb_status tb__flow_send_rebinds(tb__flow *flow, const bool *has_moved) {
    if (!flow->setup.is_bound) /* BIND, which is still to come, has the new addresses */
        return TB_OK;
    bool *which = tb__malloc(flow->o.ntensors, sizeof *which);
    if (!which)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < flow->nmembers; i++) {
        bool is_any = false;
        if (!flow->members[i].setup.is_reader || flow->members[i].is_gone)
            continue;
        mark_tensors(flow, &flow->members[i], which);
        for (size_t j = 0; j < flow->o.ntensors; j++)
            is_any |= which[j] &= has_moved[j];
        if (is_any)
            send_rebind(flow, &flow->members[i], which);
    }
    free(which);
    return TB_OK;
}

/* ---- Messages received ----------------------------------------------------------------------------------------- */

/* Imports the memory by the key in the message. NULL: *why is the reason, or the message is malformed. */
static tb__peer_memory *import_memory(tb__flow *flow, const member *m, tb__unpack *message, const char **why) {
    size_t nbytes;
    tb__peer_memory *memory = NULL;
    const void *bytes = tb__unpack_bytes(message, &nbytes);
    if (!message->failed && nbytes == 0)
        *why = tb__flow_keep_reason(flow, "%s", tb__unpack_string(message));
    if (message->failed || nbytes == 0)
        return NULL;
    if (tb__peer_memory_import(m->peer, bytes, nbytes, &memory) != TB_OK) {
        *why = tb__flow_keep_reason(flow, "rank %" PRId32 " can't map it: %s", flow->o.rank, tb_error_detail());
        return NULL;
    }
    return memory;
}

/* A device that reads host memory pins it, and must be done with it before it is unmapped. A sender does not wait for
 * that: it gives staging memory back when the data has been taken. So such memory is read by the host alone. */
char *tb__member_map(member *m, const void *key, size_t key_nbytes, size_t nbytes, const bucket_path *path,
                     tb__peer_memory **memory) {
    *memory = NULL;
    if (key_nbytes == 0 || tb__peer_memory_import(m->peer, key, key_nbytes, memory) != TB_OK)
        return NULL;
    bool is_inside = tb__peer_memory_check(*memory, 0, nbytes) == TB_OK;
    char *map = NULL;
    if (is_inside && path->is_unpacked_on_device && m->setup.stage)
        map = tb__peer_memory_buffer(*memory);
    else if (is_inside && path->is_unpacked_on_host)
        map = tb__peer_memory_address(*memory);
    if (!map) {
        tb__peer_memory_release(*memory);
        *memory = NULL;
    }
    return map;
}

/* The byte range of a tensor that this rank reads, relative to element (0, 0, ...). */
typedef struct span {
    int64_t first, last; /* equal: none */
    bool is_bad;         /* it overflows */
} span;

static void widen_span(const tb_chunk *chunk, const remote_tensor *p, tb_dtype dtype, span *out) {
    int64_t low = 0, high = 0, bits = tb_dtype_bits(dtype);
    for (int d = 0; d < chunk->ndim; d++) {
        int64_t start, stop;
        out->is_bad |= __builtin_mul_overflow(chunk->src.start[d], p->strides[d], &start);
        out->is_bad |= __builtin_mul_overflow(chunk->src.start[d] + chunk->len[d] - 1, p->strides[d], &stop);
        out->is_bad |= __builtin_add_overflow(low, start < stop ? start : stop, &low);
        out->is_bad |= __builtin_add_overflow(high, start < stop ? stop : start, &high);
    }
    out->is_bad |= __builtin_mul_overflow(low, bits, &low);
    out->is_bad |= __builtin_add_overflow(high, 1, &high);
    out->is_bad |= __builtin_mul_overflow(high, bits, &high);
    int64_t first = low / 8 - (low % 8 < 0), last = high / 8 + (high % 8 > 0); /* whole bytes */
    bool is_first = out->first == out->last;
    out->first = is_first || first < out->first ? first : out->first;
    out->last = is_first || last > out->last ? last : out->last;
}

/* The span of each remote tensor. Coded tensors are not read in place. */
static void find_spans(const tb__flow *flow, const member *m, span *spans) {
    const tb_ir *ir = flow->setup.ir;
    uint32_t position = (uint32_t)(m - flow->members);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool is_from = false;
        for (uint32_t j = 0; l->is_target && !l->first->is_coded && j < l->nsenders; j++)
            is_from |= l->senders[j] == position;
        for (size_t j = 0; is_from && j < l->channel->nbuckets; j++) {
            const tb_bucket *bucket = &ir->buckets[l->channel->first_bucket + j];
            for (size_t k = 0; k < bucket->nentries; k++) {
                const tb_chunk *chunk = &ir->chunks[ir->entries[bucket->first_entry + k].chunk];
                const remote_tensor *p = tb__member_find_tensor(m, chunk->tensor);
                if (p)
                    widen_span(chunk, p, flow->tensors[p->tensor].spec.src_dtype,
                               &spans[p - m->setup.remote_tensors.item]);
            }
        }
    }
}

/* Tests whether the tensor can be read directly. False: the sender's offset and strides lead outside of the memory. */
static bool reach_tensor(tb__flow *flow, remote_tensor *p, const span *read) {
    int64_t first, last;
    if (!p->memory)
        return true;
    bool is_bad = read->is_bad || p->offset > INT64_MAX ||
                  __builtin_add_overflow((int64_t)p->offset, read->first, &first) ||
                  __builtin_add_overflow((int64_t)p->offset, read->last, &last) || first < 0;
    tb_status status = is_bad ? tb__fail(TB_INVALID, "its offset and strides overflow")
                              : tb__peer_memory_check(p->memory, (uint64_t)first, (uint64_t)last);
    if (status == TB_INVALID && tb__peer_memory_is_valid(p->memory)) {
        tb__prefix_detail("tensor '%.100s' is not inside of its memory", flow->tensors[p->tensor].spec.name);
        return false;
    }
    if (status != TB_OK)
        p->why_staged =
            tb__flow_keep_reason(flow, "rank %" PRId32 " can't read it: %s", flow->o.rank, tb_error_detail());
    else if (!tb__peer_memory_is_mapped(p->memory)) /* system calls that read it take longer than staging */
        p->why_staged = tb__flow_keep_reason(flow, "rank %" PRId32 " can't map its memory", flow->o.rank);
    return true;
}

static bool reach_tensors(tb__flow *flow, member *m) {
    span *spans = tb__calloc(m->setup.remote_tensors.count, sizeof *spans);
    bool is_good = true;
    if (!spans) {
        tb__flow_fail_no_memory(flow, m);
        return true;
    }
    find_spans(flow, m, spans);
    for (size_t i = 0; i < m->setup.remote_tensors.count && is_good; i++) {
        remote_tensor *p = &m->setup.remote_tensors.item[i];
        is_good = p->is_tried || reach_tensor(flow, p, &spans[i]);
        p->is_tried = true;
    }
    free(spans);
    return is_good;
}

static size_t find_tensor(const tb__flow *flow, uint64_t key) {
    size_t i = 0;
    TB_BISECT(i, flow->o.ntensors, flow->tensors[i].key >= key);
    return i < flow->o.ntensors && flow->tensors[i].key == key ? i : TB__NOWHERE;
}

/* False: there is no such tensor. The caller checks whether the message is malformed. */
static bool unpack_remote_tensor(tb__flow *flow, const member *m, tb__unpack *message, remote_tensor *out) {
    uint64_t name = tb__unpack_u64(message);
    size_t tensor = message->failed ? TB__NOWHERE : find_tensor(flow, name);
    if (!message->failed && tensor == TB__NOWHERE)
        tb__set_detail("there is no tensor of key %" PRIu64, name);
    if (tensor == TB__NOWHERE)
        return false;
    *out = (remote_tensor){.tensor = (uint32_t)tensor};
    out->is_overwritten = tb__unpack_u32(message) != 0;
    out->memory = import_memory(flow, m, message, &out->why_staged);
    out->offset = tb__unpack_u64(message);
    for (int d = 0; d < flow->tensors[tensor].spec.shape.ndim; d++)
        out->strides[d] = tb__unpack_i64(message);
    return true;
}

/* Appends a tensor. Capacity is reserved. tb__flow_unbind releases the memory, also after an error. */
static bool add_remote_tensor(tb__flow *flow, member *m, tb__unpack *message) {
    remote_tensor p;
    if (!unpack_remote_tensor(flow, m, message, &p))
        return false;
    bool is_in_order = m->setup.remote_tensors.count == 0 ||
                       m->setup.remote_tensors.item[m->setup.remote_tensors.count - 1].tensor < p.tensor;
    m->setup.remote_tensors.item[m->setup.remote_tensors.count++] = p;
    if (!is_in_order && !message->failed)
        tb__set_detail("tensors are not in order");
    return is_in_order && !message->failed;
}

/* Finds this rank's exposure in the mapped memory of the sender; leaves NULL if that is not mapped. False: the offset
 * is bad. */
static bool map_exposure(member *from, uint64_t offset) {
    char *exposures = tb__peer_memory_address(from->direct.exposures);
    uint64_t last;
    if (!exposures)
        return true;
    tb_status status = __builtin_add_overflow(offset, sizeof(uint64_t), &last)
                           ? tb__fail(TB_INVALID, "its offset is %" PRIu64, offset)
                           : tb__peer_memory_check(from->direct.exposures, offset, last);
    if (status == TB_INVALID && tb__peer_memory_is_valid(from->direct.exposures)) {
        tb__prefix_detail("its exposure lies outside of its memory");
        return false;
    }
    if (((uintptr_t)exposures + offset) % sizeof(uint64_t) != 0) {
        tb__set_detail("its exposure at byte %" PRIu64 " is not aligned", offset);
        return false;
    }
    if (status == TB_OK)
        from->direct.peer_exposure = (_Atomic uint64_t *)(void *)(exposures + offset);
    return true;
}

bool tb__flow_on_bind(tb__flow *flow, member *from, tb__unpack *message) {
    if (!from->setup.is_sender || from->setup.is_bound) {
        tb__set_detail("unexpected BIND: it has sent one already, or this rank reads nothing from it");
        return false;
    }
    bool wants_staging = tb__unpack_u32(message) != 0;
    from->direct.exposures = import_memory(flow, from, message, &from->setup.why_staged);
    uint64_t offset = tb__unpack_u64(message);
    size_t stage_nbytes;
    const void *stage = tb__unpack_bytes(message, &stage_nbytes);
    if (message->failed || (from->direct.exposures && !map_exposure(from, offset)))
        return false;
    if (stage_nbytes > 0) /* else, or without memory for it, its buckets are staged in host memory */
        (void)tb__peer_memory_import(from->peer, stage, stage_nbytes, &from->setup.stage);
    if (wants_staging)
        from->setup.why_staged = tb__flow_keep_reason(flow, "rank %" PRId32 " has asked for it", from->peer->rank);
    else if (!from->direct.peer_exposure && !from->setup.why_staged)
        from->setup.why_staged = tb__flow_keep_reason(
            flow, "rank %" PRId32 " can't map the word that shows whether rank %" PRId32 " has withdrawn it",
            flow->o.rank, from->peer->rank);
    size_t count = tb__unpack_count(message, 24);
    if (!tb__vec_reserve(&from->setup.remote_tensors, count)) {
        tb__flow_fail_no_memory(flow, from);
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        if (!add_remote_tensor(flow, from, message))
            return false;
    }
    if (!tb__unpack_is_done(message) || !reach_tensors(flow, from))
        return false;
    from->setup.is_bound = true;
    tb__flow_try_reach(flow);
    return true;
}

/* Replaces a tensor that the member has sent before; its memory is released when nothing reads it any more. */
static bool replace_remote_tensor(tb__flow *flow, member *m, tb__unpack *message) {
    remote_tensor now, *p;
    if (!unpack_remote_tensor(flow, m, message, &now))
        return false;
    p = tb__member_find_tensor(m, now.tensor);
    bool is_good = !message->failed && p && p->is_overwritten == now.is_overwritten;
    if (!is_good && !message->failed)
        tb__set_detail("it has not sent tensor '%.100s' before, or not so", flow->tensors[now.tensor].spec.name);
    tb__peer_memory *gone = is_good ? p->memory : now.memory;
    if (gone)
        flow->direct.replaced.item[flow->direct.replaced.count++] = gone; /* capacity is reserved */
    if (is_good)
        *p = now;
    return is_good;
}

/* It may come in the middle of a receive, but not of one that has this sender's READY. Reads from other senders that
 * are under way go on; then all reads are prepared anew. A sender that has revoked memory must send all of its tensors
 * again. */
bool tb__flow_on_rebind(tb__flow *flow, member *from, tb__unpack *message) {
    if (!from->setup.is_bound) {
        tb__set_detail("unexpected REBIND: it has not sent BIND");
        return false;
    }
    size_t count = tb__unpack_count(message, 24);
    if (!tb__vec_reserve(&flow->direct.replaced, count)) {
        tb__flow_fail_no_memory(flow, from);
        return true;
    }
    bool is_good = true;
    for (size_t i = 0; i < count && is_good; i++)
        is_good = replace_remote_tensor(flow, from, message);
    if (from->setup.is_revoked && count >= from->setup.remote_tensors.count)
        tb__flow_readmit(from);
    flow->direct.is_revoking = true;
    tb__flow_release_revoked(flow);
    if (!is_good || !tb__unpack_is_done(message) || !reach_tensors(flow, from))
        return false;
    if (flow->setup.is_reached)
        tb__flow_check_reach(flow, from);
    return true;
}

void tb__flow_unbind(tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        for (size_t j = 0; j < m->setup.remote_tensors.count; j++)
            tb__peer_memory_release(m->setup.remote_tensors.item[j].memory);
        free(m->setup.remote_tensors.item);
        tb__peer_memory_release(m->setup.stage);
        tb__peer_memory_release(m->direct.exposures);
    }
    while (flow->direct.replaced.count > 0)
        tb__peer_memory_release(flow->direct.replaced.item[--flow->direct.replaced.count]);
    free(flow->direct.replaced.item);
}
