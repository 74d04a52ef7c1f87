/* Which tensors can be reached. Senders tell readers where their tensors are (BIND); readers try to map or read them,
 * and answer which buckets have to be staged for them, and why (REACH). */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

/* Shorter contiguous runs of bytes cost more to read one by one than to have packed. */
enum { MIN_RUN = 2048 };
enum { MAX_SENDERS_READ = 1024 }; /* at once, if they are not mapped */

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

/* Packs a key of the memory for the peer. Returns NULL, or the reason why there is none. */
static const char *export_key(const tb__flow *flow, tb__region *region, tb__peer *peer, tb__pack *key) {
    if (!region)
        return "it has no elements here";
    if (flow->o.hosts && flow->o.hosts[peer->rank] != flow->o.hosts[flow->o.rank])
        return "it is on another machine";
    if (tb__region_export(region, peer, key) != TB_OK)
        return tb_error_detail();
    return key->failed ? "there is no memory for its key" : NULL;
}

/* Packs the key, or an empty one; then returns the reason. */
static const char *pack_key(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer) {
    tb__pack key = {0};
    const char *why = export_key(flow, region, peer, &key);
    tb__pack_bytes(pack, key.data, why ? 0 : key.count);
    tb__pack_fini(&key);
    return why;
}

void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer) {
    (void)pack_key(pack, flow, region, peer);
}

static void pack_key_or_why(tb__pack *pack, const tb__flow *flow, tb__region *region, tb__peer *peer) {
    const char *why = pack_key(pack, flow, region, peer);
    if (why)
        tb__pack_string(pack, why);
}

static void send_bind(tb__flow *flow, member *reader, bool *is_read) {
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_BIND, 0);
    tb__pack_u32(&pack, flow->o.staged);
    pack_key_or_why(&pack, flow, flow->direct.exposures_region, reader->peer);
    tb__pack_u64(&pack, (uint64_t)((char *)reader->direct.exposure - flow->direct.exposures));
    tb__flow_pack_key(&pack, flow, reader->peer->rank == flow->o.rank ? NULL : flow->staged.on_device.region,
                      reader->peer);
    mark_tensors(flow, reader, is_read);
    uint32_t count = 0;
    for (size_t i = 0; i < flow->o.ntensors; i++)
        count += is_read[i];
    tb__pack_u32(&pack, count);
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        if (!is_read[i])
            continue;
        const tb_binding *b = &flow->tensors[i].src;
        tb__pack_u64(&pack, flow->tensors[i].key);
        tb__pack_u32(&pack, flow->setup.overwritten[i]);
        pack_key_or_why(&pack, flow, flow->setup.src_regions[i], reader->peer);
        /* A region begins where the binding's lowest element is: not at (0, 0, ...) where strides are negative. */
        int64_t back = 0;
        for (int d = 0; d < b->shape.ndim; d++) {
            if (b->strides[d] < 0)
                back -= b->strides[d] * (b->shape.dim[d] - 1);
        }
        tb__pack_u64(&pack, (uint64_t)tb__dtype_bytes(b->dtype, back));
        for (int d = 0; d < b->shape.ndim; d++)
            tb__pack_i64(&pack, b->strides[d]);
    }
    tb__flow_send_message(flow, reader, &pack);
}

tb_status tb__flow_send_binds(tb__flow *flow) {
    if (flow->setup.is_bound)
        return TB_OK;
    bool *is_read = tb__malloc(flow->o.ntensors, sizeof *is_read);
    if (!is_read)
        return TB_NO_MEMORY;
    tb__staged_make_device_stage(flow);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader)
            send_bind(flow, &flow->members[i], is_read);
    }
    free(is_read);
    flow->setup.is_bound = true;
    return TB_OK;
}

/* ---- REACH ----------------------------------------------------------------------------------------------------- */

/* Copies a message into the flow's arena. */
static const char *keep_sentence(tb__flow *flow, const char *sentence) {
    const char *kept = tb__arena_strdup(&flow->setup.arena, sentence);
    return kept ? kept : "there is no memory for the reason";
}

/* Imports the memory by the key in the message. NULL: *why is the reason, or the message is malformed. */
static tb__peer_memory *import_memory(tb__flow *flow, const member *m, tb__unpack *message, const char **why) {
    size_t nbytes;
    tb__peer_memory *memory = NULL;
    const void *bytes = tb__unpack_bytes(message, &nbytes);
    if (!message->failed && nbytes == 0)
        *why = keep_sentence(flow, tb__unpack_string(message));
    if (message->failed || nbytes == 0)
        return NULL;
    if (tb__peer_memory_import(m->peer, bytes, nbytes, &memory) != TB_OK) {
        *why = keep_sentence(flow, tb_error_detail());
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
    if (is_inside && path->is_unpacked_on_device)
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
    if (status == TB_OK && first < last)
        status = tb__peer_memory_probe(p->memory, (uint64_t)first);
    if (status != TB_OK)
        p->why_staged = keep_sentence(flow, tb_error_detail());
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
    for (size_t i = 0; i < m->setup.remote_tensors.count && is_good; i++)
        is_good = reach_tensor(flow, &m->setup.remote_tensors.item[i], &spans[i]);
    free(spans);
    return is_good;
}

static size_t find_tensor(const tb__flow *flow, uint64_t key) {
    size_t i = 0;
    TB_BISECT(i, flow->o.ntensors, flow->tensors[i].key >= key);
    return i < flow->o.ntensors && flow->tensors[i].key == key ? i : TB__NOWHERE;
}

static bool unpack_remote_tensor(tb__flow *flow, member *m, tb__unpack *message) {
    uint64_t name = tb__unpack_u64(message);
    size_t tensor = message->failed ? TB__NOWHERE : find_tensor(flow, name);
    if (!message->failed && tensor == TB__NOWHERE)
        tb__set_detail("there is no tensor of key %" PRIu64, name);
    if (tensor == TB__NOWHERE)
        return false;
    remote_tensor p = {.tensor = (uint32_t)tensor};
    p.is_overwritten = tb__unpack_u32(message) != 0;
    p.memory = import_memory(flow, m, message, &p.why_staged);
    p.offset = tb__unpack_u64(message);
    for (int d = 0; d < flow->tensors[p.tensor].spec.shape.ndim; d++)
        p.strides[d] = tb__unpack_i64(message);
    bool is_in_order = m->setup.remote_tensors.count == 0 ||
                       m->setup.remote_tensors.item[m->setup.remote_tensors.count - 1].tensor < p.tensor;
    /* Capacity is reserved. tb__flow_unbind releases the memory, also after an error. */
    m->setup.remote_tensors.item[m->setup.remote_tensors.count++] = p;
    if (!is_in_order && !message->failed)
        tb__set_detail("tensors are not in order");
    return is_in_order && !message->failed;
}

static bool lane_overwrites_source(const tb__flow *flow, const lane *l) {
    const tb_ir *ir = flow->setup.ir;
    const tb_bucket *first = &ir->buckets[l->channel->first_bucket];
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        for (size_t j = 0; j < first[i].nentries; j++) {
            const tb_chunk *chunk = &ir->chunks[ir->entries[first[i].first_entry + j].chunk];
            for (uint32_t k = 0; k < l->nsenders; k++) {
                const remote_tensor *p = tb__member_find_tensor(&flow->members[l->senders[k]], chunk->tensor);
                if (p && p->is_overwritten && !tb__flow_is_in_place(flow, chunk))
                    return true;
            }
        }
    }
    return false;
}

/* How a bucket would be read. */
typedef struct reading {
    bool has_unmapped;        /* something is read by calls, which only the host device can do */
    const tb__device *device; /* that copies; the host's if no other has to */
} reading;

/* Why a device can't copy this, beside what it has to copy already; NULL: it can. */
static const char *add_device(reading *r, const tb__device *device) {
    if (device->ops == &tb__host_device_ops || device == r->device)
        return NULL;
    if (r->device->ops != &tb__host_device_ops)
        return "it is on a device that this rank's device can't read";
    r->device = device;
    return NULL;
}

/* Why a chunk can't be read from a sender; NULL: it can. */
static const char *why_staged_chunk(const tb__flow *flow, const tb_chunk *chunk, const member *m, reading *r) {
    const remote_tensor *p = tb__member_find_tensor(m, chunk->tensor);
    if (!p)
        return "its rank did not say where it is";
    if (p->why_staged)
        return p->why_staged;
    if (tb__peer_memory_is_mapped(p->memory))
        return add_device(r, tb__peer_memory_device(p->memory));
    int outer;
    int64_t run = tb__box_run(chunk->ndim, chunk->len, p->strides, &outer);
    bool is_short = tb__dtype_bytes(flow->tensors[chunk->tensor].spec.src_dtype, run) < MIN_RUN;
    r->has_unmapped = true;
    return outer > 0 && is_short ? "its memory can't be mapped, and it lies there in short runs" : NULL;
}

/* Why no bucket of the lane can be read; NULL: see why_staged_bucket. */
static const char *why_staged_lane(const tb__flow *flow, const lane *l) {
    if (flow->o.staged || flow->o.checksum)
        return flow->o.staged ? "this rank has asked for it" : "buckets have checksums";
    if (l->first->is_coded)
        return "it is converted on its way";
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (flow->members[l->senders[i]].setup.why_staged)
            return flow->members[l->senders[i]].setup.why_staged;
    }
    return NULL;
}

/* Why a bucket can't be read from the lane's senders; NULL: it can. */
static const char *why_staged_bucket(tb__flow *flow, const lane *l, const tb_bucket *bucket, bool *is_for_device) {
    const tb_ir *ir = flow->setup.ir;
    const tb__device *host = tb__loop_find_device(flow->o.loop, NULL, 0);
    bool has_unmapped = false;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_chunk *chunk = &ir->chunks[ir->entries[bucket->first_entry + i].chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        reading r = {.device = t->is_gathered ? tb__flow_slot_device(flow)
                                              : tb__loop_find_device(flow->o.loop, t->dst.base, 1)};
        for (uint32_t j = 0; j < l->nsenders; j++) {
            const char *why = why_staged_chunk(flow, chunk, &flow->members[l->senders[j]], &r);
            if (why)
                return why;
        }
        if (r.has_unmapped && r.device != host)
            return "its memory can't be mapped, and a device would have to read it";
        has_unmapped |= r.has_unmapped;
        *is_for_device = (*is_for_device || i == 0) && r.device != host;
    }
    return l->nsenders > MAX_SENDERS_READ && has_unmapped ? "too many ranks would have to be read at a time" : NULL;
}

/* This rank's own data is never staged. The buckets of a reduced lane are all staged or none is: all ranks combine them
 * in one order. */
static void choose_paths(tb__flow *flow, lane *l) {
    const tb_bucket *buckets = &flow->setup.ir->buckets[l->channel->first_bucket];
    bucket_path *paths = &flow->setup.paths[l->channel->first_bucket];
    bool is_own = l->nsenders == 0 || (l->nsenders == 1 && l->senders[0] == flow->self);
    const char *why_all = is_own ? NULL : why_staged_lane(flow, l);
    for (size_t i = 0; i < l->channel->nbuckets && is_own && !l->first->is_coded; i++)
        (void)why_staged_bucket(flow, l, &buckets[i], &paths[i].is_for_device);
    for (size_t i = 0; i < l->channel->nbuckets && !is_own && !why_all; i++) {
        paths[i].why_staged = why_staged_bucket(flow, l, &buckets[i], &paths[i].is_for_device);
        paths[i].takes_staged = paths[i].why_staged != NULL;
        l->takes_staged |= paths[i].takes_staged;
        if (l->nsenders > 1)
            why_all = paths[i].why_staged;
    }
    for (size_t i = 0; i < l->channel->nbuckets && why_all; i++) {
        paths[i].why_staged = why_all;
        l->takes_staged = paths[i].takes_staged = true;
    }
    /* A rank that overwrites sources must not write staged buckets before all readers have stashed. Kept in
     * POOL_RECEIVE until then, they could block others' buckets for ever; so they go to the stash. */
    l->overwrites_source = lane_overwrites_source(flow, l) || (flow->setup.overwrites_any_source && l->takes_staged);
    for (uint32_t i = 0; l->overwrites_source && i < l->nsenders; i++)
        flow->members[l->senders[i]].setup.nstash += l->channel->nbuckets;
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        size_t bucket = l->channel->first_bucket + i;
        paths[i].is_unpacked_on_device = paths[i].takes_staged && tb__staged_unpacks_on_device(flow, l, bucket);
        paths[i].is_unpacked_on_host = paths[i].takes_staged && tb__staged_unpacks_on_host(flow, bucket);
    }
}

/* Packs the lane's staged buckets as runs of consecutive ones. Returns the number of runs. */
static uint32_t pack_staged(const tb__flow *flow, const lane *l, tb__pack *list) {
    const bucket_path *paths = &flow->setup.paths[l->channel->first_bucket];
    uint32_t nruns = 0;
    for (size_t i = 0, next; i < l->channel->nbuckets; i = next) {
        for (next = i + 1; next < l->channel->nbuckets && paths[next].takes_staged == paths[i].takes_staged &&
                           paths[next].is_unpacked_on_device == paths[i].is_unpacked_on_device;)
            next++;
        if (!paths[i].takes_staged)
            continue;
        const tb_chunk *first = tb__flow_first_chunk(flow, l->channel->first_bucket + i);
        tb__pack_u64(list, first->id);
        tb__pack_u32(list, first->part);
        tb__pack_u32(list, (uint32_t)(next - i));
        tb__pack_u32(list, paths[i].is_unpacked_on_device);
        tb__pack_string(list, paths[i].why_staged);
        nruns++;
    }
    return nruns;
}

static void send_reach(tb__flow *flow, member *sender) {
    uint32_t position = (uint32_t)(sender - flow->members), count = 0;
    tb__pack pack = {0}, list = {0};
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool is_from = false;
        bool is_asked = l->is_target && l->takes_staged && l->parent == l->source; /* relays know it without REACH */
        for (uint32_t j = 0; is_asked && j < l->nsenders; j++)
            is_from |= l->senders[j] == position;
        if (is_from)
            count += pack_staged(flow, l, &list);
    }
    tb__flow_begin_message(flow, &pack, MESSAGE_REACH, 0);
    tb__pack_u32(&pack, sender->setup.nstash > 0);
    tb__pack_u32(&pack, count);
    if (count)
        tb__pack_raw(&pack, list.data, list.count);
    pack.failed |= list.failed;
    tb__pack_fini(&list);
    tb__flow_send_message(flow, sender, &pack);
}

static tb_status choose_all_paths(tb__flow *flow) {
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        if (flow->setup.lanes[i].is_target)
            choose_paths(flow, &flow->setup.lanes[i]);
    }
    TB_TRY(tb__flow_choose_slots(flow));
    return tb__staged_fit_stash(flow);
}

/* When all senders have sent BIND: decides what is staged, and sends REACH. */
bool tb__flow_try_reach(tb__flow *flow) {
    if (flow->setup.is_reached)
        return false;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_sender && !flow->members[i].setup.is_bound)
            return false;
    }
    tb_status status = choose_all_paths(flow);
    if (status != TB_OK) {
        tb__flow_break(flow, status, tb_error_detail());
        return true;
    }
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_sender)
            send_reach(flow, &flow->members[i]);
    }
    flow->setup.is_reached = true;
    return true;
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
        from->setup.why_staged = "its rank has asked for it";
    else if (!from->direct.peer_exposure && !from->setup.why_staged)
        from->setup.why_staged = "its rank's exposure can't be mapped";
    size_t count = tb__unpack_count(message, 24);
    if (!tb__vec_reserve(&from->setup.remote_tensors, count)) {
        tb__flow_fail_no_memory(flow, from);
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        if (!unpack_remote_tensor(flow, from, message))
            return false;
    }
    if (!tb__unpack_is_done(message) || !reach_tensors(flow, from))
        return false;
    from->setup.is_bound = true;
    tb__flow_try_reach(flow);
    return true;
}

/* Stages `count` buckets of a lane for the member, from this one on. False: it is not a target of them, or asks twice.
 */
static bool stage_for(tb__flow *flow, const member *to, size_t bucket, uint32_t count, bool on_device,
                      const char *why) {
    lane *l = tb__flow_lane(flow, bucket);
    uint32_t position = (uint32_t)(to - flow->members);
    if (!tb__has_int32(l->first->targets, l->first->ntargets, to->peer->rank) ||
        count > l->channel->first_bucket + l->channel->nbuckets - bucket) {
        tb__set_detail("it asks for %" PRIu32 " buckets from %zu on, which it is not to get", count, bucket);
        return false;
    }
    for (bucket_path *p = &flow->setup.paths[bucket]; p < &flow->setup.paths[bucket + count]; p++) {
        if (p->nstaged && p->staged[p->nstaged - 1] == position) {
            tb__set_detail("it asks for bucket %zu twice", (size_t)(p - flow->setup.paths));
            return false;
        }
        if (!p->staged)
            p->staged = tb__arena_alloc(&flow->setup.arena, l->first->ntargets, sizeof *p->staged);
        if (!p->staged) {
            tb__flow_fail_no_memory(flow, to);
            return true;
        }
        l->nstaged += p->nstaged == 0;
        if (on_device && p->nstaged_on_device++ == 0)
            p->is_packed_on_device = tb__staged_packs_on_device(flow, (size_t)(p - flow->setup.paths));
        p->staged[p->nstaged++] = position;
        p->why_staged = p->why_staged ? p->why_staged : why;
    }
    return true;
}

bool tb__flow_on_reach(tb__flow *flow, member *from, tb__unpack *message) {
    if (!from->setup.is_reader || from->setup.has_reach || !flow->setup.is_planned)
        return false;
    from->setup.must_stash = tb__unpack_u32(message) != 0;
    size_t nruns = tb__unpack_count(message, 20);
    for (size_t i = 0; i < nruns; i++) {
        uint64_t id = tb__unpack_u64(message);
        uint32_t part = tb__unpack_u32(message), count = tb__unpack_u32(message);
        bool on_device = tb__unpack_u32(message) != 0;
        const char *why = tb__unpack_string(message);
        size_t bucket = message->failed ? TB__NOWHERE : tb__flow_find_bucket(flow, id, part);
        if (bucket == TB__NOWHERE || !stage_for(flow, from, bucket, count, on_device, keep_sentence(flow, why)))
            return false;
    }
    from->setup.has_reach = tb__unpack_is_done(message);
    return from->setup.has_reach;
}

size_t tb__lane_next_staged(const tb__flow *flow, const lane *l, size_t from) {
    while (from < l->channel->nbuckets && flow->setup.paths[l->channel->first_bucket + from].nstaged == 0)
        from++;
    return from;
}

bool tb__flow_all_have_reach(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader && !flow->members[i].setup.has_reach)
            return false;
    }
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
}
