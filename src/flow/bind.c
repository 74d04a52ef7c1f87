/* Who reaches what. Feeders tell readers where their tensors are; readers find out how they get there, and say what has
 * to be staged. */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "device/host/reader.h"

#include <inttypes.h>
#include <string.h>

/* Below this, reading a peer's memory run by run costs more than having it packed. */
enum { LEAST_RUN = 2048 };
enum { MOST_FEEDERS_READ = 1024 }; /* at a time, when they are not mapped */

place *tb__member_place(const member *m, uint32_t tensor) {
    size_t low = 0, high = m->places.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (m->places.item[middle].tensor < tensor)
            low = middle + 1;
        else
            high = middle;
    }
    return low < m->places.count && m->places.item[low].tensor == tensor ? &m->places.item[low] : NULL;
}

/* ---- BIND ----------------------------------------------------------------------------------------------------- */

static bool has_target(const lane *l, int32_t rank) {
    for (uint32_t i = 0; i < l->first->ntargets; i++) {
        if (l->first->targets[i] == rank)
            return true;
    }
    return false;
}

/* Marks the tensors that the reader gets of this rank. */
static void mark_tensors(const tb__flow *flow, const member *reader, bool *is_read) {
    const tb_ir *ir = flow->ir;
    memset(is_read, 0, flow->o.ntensors * sizeof *is_read);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        if (!(l->is_shipper || l->is_contributor) || !has_target(l, reader->peer->rank))
            continue;
        const tb_bucket *first = &ir->buckets[l->channel->first_bucket], *last = first + l->channel->nbuckets;
        for (const tb_bucket *b = first; b < last; b++) {
            for (size_t j = 0; j < b->nentries; j++)
                is_read[ir->chunks[ir->entries[b->first_entry + j].chunk].tensor] = true;
        }
    }
}

void tb__flow_pack_key(tb__pack *pack, const tb__flow *flow, const void *memory, tb__region *region, tb__peer *peer) {
    tb_mem_key key = {0};
    bool is_near = peer->rank == flow->o.rank ||
                   (!tb__flow_is_far(flow, peer->rank) && tb__loop_is_host_memory(flow->o.loop, memory));
    if (!region || !is_near || tb__region_export(region, peer, &key) != TB_OK)
        key.nbytes = 0; /* what it can't reach is sent to it */
    tb__pack_bytes(pack, key.bytes, key.nbytes);
}

static void send_bind(tb__flow *flow, member *reader, bool *is_read) {
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_BIND, 0);
    tb__pack_u32(&pack, flow->o.staged);
    tb__flow_pack_key(&pack, flow, flow->words, flow->words_region, reader->peer);
    tb__pack_u64(&pack, (uint64_t)((char *)reader->word - flow->words));
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
        tb__pack_u32(&pack, flow->overwritten[i]);
        tb__flow_pack_key(&pack, flow, b->base, flow->src_regions[i], reader->peer);
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
    if (flow->is_bound)
        return TB_OK;
    bool *is_read = tb__malloc(flow->o.ntensors, sizeof *is_read);
    if (!is_read)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_reader)
            send_bind(flow, &flow->members[i], is_read);
    }
    free(is_read);
    flow->is_bound = true;
    return TB_OK;
}

/* ---- What a reader reaches -------------------------------------------------------------------------------------- */

static tb_remote *import(member *m, const void *bytes, size_t nbytes) {
    tb_mem_key key = {.nbytes = (uint32_t)nbytes};
    tb_remote *remote;
    if (nbytes == 0 || nbytes > sizeof key.bytes)
        return NULL;
    memcpy(key.bytes, bytes, nbytes);
    return tb__transport_import(m->peer->transport, m->peer->wire, &key, &remote) == TB_OK ? remote : NULL;
}

/* Whether all of these bytes lie in the memory, of which the transport knows the size. None of them is touched. */
static tb_status check_inside(const member *m, tb_remote *remote, uint64_t first, uint64_t last) {
    return tb__transport_read(m->peer->transport, remote, (tb_range[]){{first, 0}, {last, 0}}, 2, NULL, 0);
}

char *tb__member_map(member *m, const void *key, size_t key_nbytes, size_t nbytes, tb_remote **remote) {
    const tb_transport *t = m->peer->transport;
    *remote = import(m, key, key_nbytes);
    char *map = *remote && check_inside(m, *remote, 0, nbytes) == TB_OK ? tb__transport_map(t, *remote) : NULL;
    if (*remote && !map) {
        t->ops->mem_release(t->context, *remote);
        *remote = NULL;
    }
    return map;
}

/* The bytes of a tensor that this rank reads, counted from element (0, 0, ...). */
typedef struct span {
    int64_t first, last; /* equal: none */
    bool is_bad;         /* they are more than there can be */
} span;

static void add_chunk(const tb_chunk *chunk, const place *p, tb_dtype dtype, span *out) {
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

/* By place. What is coded is not read in place. */
static void find_spans(const tb__flow *flow, const member *m, span *spans) {
    const tb_ir *ir = flow->ir;
    uint32_t position = (uint32_t)(m - flow->members);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        bool feeds = false;
        for (uint32_t j = 0; l->is_target && !l->first->is_coded && j < l->nsenders; j++)
            feeds |= l->senders[j] == position;
        for (size_t j = 0; feeds && j < l->channel->nbuckets; j++) {
            const tb_bucket *bucket = &ir->buckets[l->channel->first_bucket + j];
            for (size_t k = 0; k < bucket->nentries; k++) {
                const tb_chunk *chunk = &ir->chunks[ir->entries[bucket->first_entry + k].chunk];
                const place *p = tb__member_place(m, chunk->tensor);
                if (p)
                    add_chunk(chunk, p, flow->tensors[p->tensor].spec.src_dtype, &spans[p - m->places.item]);
            }
        }
    }
}

/* Whether the tensor's memory can be had without the sender's help; where it is not mapped, one byte tells. False: what
 * the sender says of it leads out of the memory. */
static bool reach(const tb__flow *flow, member *m, place *p, const span *read) {
    int64_t first, last;
    if (!p->remote) {
        m->is_reachable = false;
        return true;
    }
    bool is_bad = read->is_bad || p->offset > INT64_MAX ||
                  __builtin_add_overflow((int64_t)p->offset, read->first, &first) ||
                  __builtin_add_overflow((int64_t)p->offset, read->last, &last) || first < 0;
    tb_status status = is_bad ? tb__fail(TB_INVALID, "its offset and strides overflow")
                              : check_inside(m, p->remote, (uint64_t)first, (uint64_t)last);
    if (status == TB_INVALID && tb__transport_is_valid(m->peer->transport, p->remote)) {
        tb__prefix_detail("tensor '%.100s' is not inside of its memory", flow->tensors[p->tensor].spec.name);
        return false;
    }
    char byte;
    p->map = tb__transport_map(m->peer->transport, p->remote);
    if (status == TB_OK && !p->map && first < last)
        status = tb__transport_read(m->peer->transport, p->remote, &(tb_range){(size_t)first, 1}, 1,
                                    &(tb_piece){&byte, 1}, 1);
    m->is_reachable &= status == TB_OK; /* else it is sent */
    return true;
}

static bool reach_all(tb__flow *flow, member *m) {
    span *spans = tb__calloc(m->places.count, sizeof *spans);
    bool is_good = true;
    if (!spans) {
        tb__flow_no_room(flow, m);
        return true;
    }
    find_spans(flow, m, spans);
    for (size_t i = 0; i < m->places.count && is_good; i++)
        is_good = reach(flow, m, &m->places.item[i], &spans[i]);
    free(spans);
    return is_good;
}

static size_t find_tensor(const tb__flow *flow, uint64_t key) {
    size_t low = 0, high = flow->o.ntensors;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (flow->tensors[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < flow->o.ntensors && flow->tensors[low].key == key ? low : TB__NOWHERE;
}

static bool read_place(tb__flow *flow, member *m, tb__unpack *message) {
    uint64_t name = tb__unpack_u64(message);
    size_t tensor = message->failed ? TB__NOWHERE : find_tensor(flow, name);
    if (!message->failed && tensor == TB__NOWHERE)
        tb__set_detail("there is no tensor of key %" PRIu64, name);
    if (tensor == TB__NOWHERE)
        return false;
    place p = {.tensor = (uint32_t)tensor};
    p.overwrites_source = tb__unpack_u32(message) != 0;
    size_t nbytes;
    const void *key = tb__unpack_bytes(message, &nbytes);
    p.offset = tb__unpack_u64(message);
    for (int d = 0; d < flow->tensors[p.tensor].spec.shape.ndim; d++)
        p.strides[d] = tb__unpack_i64(message);
    if (message->failed)
        return false;
    if (m->places.count && m->places.item[m->places.count - 1].tensor >= p.tensor) {
        tb__set_detail("tensors are not in order");
        return false;
    }
    p.remote = import(m, key, nbytes);
    m->places.item[m->places.count++] = p; /* there is room */
    return true;
}

/* Both parts that this rank has of the tensor. */
static bool is_on_host(const tb__flow *flow, const tb__flow_tensor *t) {
    return tb__loop_is_host_memory(flow->o.loop, t->src.base) && tb__loop_is_host_memory(flow->o.loop, t->dst.base);
}

/* Whether the chunks of a lane are worth reading from this member: what is not mapped is read by the host device, run
 * by run, which can combine it with other host memory only, and write it only there. */
static bool can_read_from(const tb__flow *flow, const lane *l, const member *m) {
    const tb_ir *ir = flow->ir;
    const tb_bucket *first = &ir->buckets[l->channel->first_bucket];
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        for (size_t j = 0; j < first[i].nentries; j++) {
            const tb_chunk *chunk = &ir->chunks[ir->entries[first[i].first_entry + j].chunk];
            const place *p = tb__member_place(m, chunk->tensor);
            if (!p)
                return false;
            int outer;
            int64_t run = tb__box_run(chunk->ndim, chunk->len, p->strides, &outer);
            tb_dtype dtype = flow->tensors[chunk->tensor].spec.src_dtype;
            int64_t nbytes = tb__dtype_bytes(dtype, run);
            if (!p->map && ((outer > 0 && nbytes < LEAST_RUN) || !is_on_host(flow, &flow->tensors[chunk->tensor])))
                return false;
        }
    }
    return true;
}

static bool lane_is_flagged(const tb__flow *flow, const lane *l) {
    const tb_ir *ir = flow->ir;
    const tb_bucket *first = &ir->buckets[l->channel->first_bucket];
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        for (size_t j = 0; j < first[i].nentries; j++) {
            const tb_chunk *chunk = &ir->chunks[ir->entries[first[i].first_entry + j].chunk];
            for (uint32_t k = 0; k < l->nsenders; k++) {
                const place *p = tb__member_place(&flow->members[l->senders[k]], chunk->tensor);
                if (p && p->overwrites_source && !tb__flow_is_in_place(flow, chunk))
                    return true;
            }
        }
    }
    return false;
}

static bool all_mapped(const tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        const member *m = &flow->members[l->senders[i]];
        for (size_t j = 0; j < m->places.count; j++) {
            if (!m->places.item[j].map)
                return false;
        }
    }
    return true;
}

static void choose_path(tb__flow *flow, lane *l) {
    bool is_own = l->nsenders == 1 && l->senders[0] == flow->self; /* nothing could be gained by staging */
    l->takes_staged = (flow->o.staged || flow->o.checksum || l->first->is_coded) && l->nsenders && !is_own;
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if ((!m->is_reachable || tb__flow_is_far(flow, m->peer->rank) || !can_read_from(flow, l, m)) && !is_own)
            l->takes_staged = true;
    }
    if (l->nsenders > MOST_FEEDERS_READ && !is_own)
        l->takes_staged |= !all_mapped(flow, l);
    /* A rank that overwrites its own sources does not write what comes staged before it may write anything: held back
     * in the memory through which others' data has to come, it could hold them up for ever. */
    l->overwrites_source = lane_is_flagged(flow, l) || (flow->overwrites_any_source && l->takes_staged);
    for (uint32_t i = 0; l->overwrites_source && i < l->nsenders; i++)
        flow->members[l->senders[i]].naside += l->channel->nbuckets;
}

static void send_reach(tb__flow *flow, member *sender) {
    uint32_t position = (uint32_t)(sender - flow->members), count = 0;
    tb__pack pack = {0}, list = {0};
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        bool feeds = false;
        bool is_asked =
            l->is_target && l->takes_staged && l->parent == l->shipper; /* others know that they hand it on */
        for (uint32_t j = 0; is_asked && j < l->nsenders; j++)
            feeds |= l->senders[j] == position;
        if (!feeds)
            continue;
        tb__pack_u64(&list, l->first->id);
        tb__pack_u32(&list, l->first->part);
        count++;
    }
    tb__flow_begin_message(flow, &pack, MESSAGE_REACH, 0);
    tb__pack_u32(&pack, sender->naside > 0);
    tb__pack_u32(&pack, count);
    if (count)
        tb__pack_raw(&pack, list.data, list.count);
    pack.failed |= list.failed;
    tb__pack_fini(&list);
    tb__flow_send_message(flow, sender, &pack);
}

static tb_status decide(tb__flow *flow) {
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        if (flow->lanes[i].is_target)
            choose_path(flow, &flow->lanes[i]);
    }
    return tb__staged_fit_stash(flow);
}

/* Once all senders have told: what is staged, and who hears of it. */
bool tb__flow_try_reach(tb__flow *flow) {
    if (flow->is_reached)
        return false;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_sender && !flow->members[i].is_bound)
            return false;
    }
    tb_status status = decide(flow);
    if (status != TB_OK) {
        tb__flow_break(flow, status);
        return true;
    }
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_sender)
            send_reach(flow, &flow->members[i]);
    }
    flow->is_reached = true;
    return true;
}

/* The word by which the sender says what this rank may read, in memory of the sender's that is mapped here. Where it is
 * not, there is none. */
static bool find_word(member *from, uint64_t offset) {
    char *words = tb__transport_map(from->peer->transport, from->words);
    uint64_t last;
    if (!words)
        return true;
    tb_status status = __builtin_add_overflow(offset, sizeof(uint64_t), &last)
                           ? tb__fail(TB_INVALID, "its offset is %" PRIu64, offset)
                           : check_inside(from, from->words, offset, last);
    if (status == TB_INVALID && tb__transport_is_valid(from->peer->transport, from->words)) {
        tb__prefix_detail("its word lies outside of its memory");
        return false;
    }
    if (((uintptr_t)words + offset) % sizeof(uint64_t) != 0) {
        tb__set_detail("its word at byte %" PRIu64 " is not aligned", offset);
        return false;
    }
    if (status == TB_OK)
        from->peer_exposure = (_Atomic uint64_t *)(void *)(words + offset);
    return true;
}

bool tb__flow_on_bind(tb__flow *flow, member *from, tb__unpack *message) {
    if (!from->is_sender || from->is_bound) {
        tb__set_detail("unexpected BIND: it has sent one already, or this rank reads nothing from it");
        return false;
    }
    bool wants_staging = tb__unpack_u32(message) != 0;
    size_t nbytes;
    const void *key = tb__unpack_bytes(message, &nbytes);
    uint64_t offset = tb__unpack_u64(message);
    if (message->failed)
        return false;
    from->words = import(from, key, nbytes);
    if (from->words && !find_word(from, offset))
        return false;
    from->is_reachable = from->peer_exposure && !wants_staging;
    size_t count = tb__unpack_count(message, 24);
    if (!tb__vec_reserve(&from->places, count)) {
        tb__flow_no_room(flow, from);
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        if (!read_place(flow, from, message))
            return false;
    }
    if (!tb__unpack_is_done(message) || !reach_all(flow, from))
        return false;
    from->is_bound = true;
    tb__flow_try_reach(flow);
    return true;
}

bool tb__flow_on_reach(tb__flow *flow, member *from, tb__unpack *message) {
    if (!from->is_reader || from->has_reach || !flow->is_planned)
        return false;
    from->stashes = tb__unpack_u32(message) != 0;
    size_t count = tb__unpack_count(message, 12);
    for (size_t i = 0; i < count; i++) {
        uint64_t id = tb__unpack_u64(message);
        uint32_t part = tb__unpack_u32(message);
        size_t bucket = tb__flow_find_bucket(flow, id, part);
        if (bucket == TB__NOWHERE)
            return false;
        lane *l = tb__flow_lane(flow, bucket);
        uint32_t position = (uint32_t)(from - flow->members);
        if (!has_target(l, from->peer->rank) || (l->nstaged && l->staged[l->nstaged - 1] == position)) {
            tb__set_detail("it asks for bucket %zu twice, or is not to get it", bucket);
            return false;
        }
        l->staged[l->nstaged++] = position;
    }
    from->has_reach = tb__unpack_is_done(message);
    return from->has_reach;
}

void tb__flow_unbind(tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (!m->peer) /* the flow could not be made */
            continue;
        const tb_transport *t = m->peer->transport;
        for (size_t j = 0; j < m->places.count; j++) {
            tb__host_unmap_reader(m->places.item[j].reader);
            if (m->places.item[j].remote)
                t->ops->mem_release(t->context, m->places.item[j].remote);
        }
        free(m->places.item);
        if (m->words)
            t->ops->mem_release(t->context, m->words);
    }
}
