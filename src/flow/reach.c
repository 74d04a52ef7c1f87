/* Which buckets are staged, and for whom. When all senders have said where their tensors are, a reader decides for
 * every bucket whether it reads it in place, and asks for the others, with the reason (REACH). */
#include "flow/flow_inside.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>

/* ---- Why a bucket is staged -----------------------------------------------------------------------------------------
 */

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

static bool lane_unpacks_last(const tb__flow *flow, const lane *l) {
    bool is_any = false;
    for (size_t i = 0; l->first->is_coded && i < l->channel->nbuckets && !is_any; i++)
        is_any = tb__flow_unpacks_last(flow, l->channel->first_bucket + i);
    return is_any;
}

/* How a bucket would be read. */
typedef struct reading {
    tb__device *device; /* that copies; the host's if no other has to ... */
    int unit;           /* ... and which of its units */
} reading;

const char *tb__flow_why_not_accessed(tb__flow *flow, tb__device *device, int unit, const tb__memory *memory) {
    for (size_t i = flow->setup.accesses.count; i-- > 0;) {
        const tried_access *a = &flow->setup.accesses.item[i];
        if (a->device == device && a->unit == unit && a->base == memory->base)
            return a->why;
    }
    tried_access a = {.device = device, .unit = unit, .base = memory->base};
    if (tb__device_try_access(device, unit, memory->base, memory->nbytes) != TB_OK)
        a.why = tb__flow_keep_reason(flow, "rank %" PRId32 ": %s", flow->o.rank, tb_error_detail());
    (void)tb__vec_push(&flow->setup.accesses, a); /* else it is tried again */
    return a.why;
}

/* Why a device can't copy this, beside what it has to copy already; NULL: it can. */
static const char *add_memory(tb__flow *flow, reading *r, const tb__peer_memory *from) {
    tb__memory memory;
    tb__device *device = tb__peer_memory_find(from, &memory);
    if (device->ops == &tb__host_device_ops)
        return NULL;
    if (r->device->ops == &tb__host_device_ops) {
        r->device = device;
        r->unit = memory.index;
        return NULL;
    }
    if (r->device != device)
        return tb__flow_keep_reason(flow, "device %s of rank %" PRId32 " can't read memory of device %s",
                                    r->device->ops->name, flow->o.rank, device->ops->name);
    return r->unit == memory.index ? NULL : tb__flow_why_not_accessed(flow, device, r->unit, &memory);
}

/* Why a chunk can't be read from a sender; NULL: it can. */
static const char *why_staged_chunk(tb__flow *flow, const tb_chunk *chunk, const member *m, reading *r) {
    const remote_tensor *p = tb__member_find_tensor(m, chunk->tensor);
    if (!p)
        return tb__flow_keep_reason(flow, "rank %" PRId32 " did not say where it is", m->peer->rank);
    if (p->why_staged)
        return p->why_staged;
    return add_memory(flow, r, p->memory);
}

/* Why no bucket of the lane can be read; NULL: see why_staged_bucket. */
static const char *why_staged_lane(tb__flow *flow, const lane *l) {
    if (flow->o.staged || flow->o.checksum)
        return flow->o.staged ? tb__flow_keep_reason(flow, "rank %" PRId32 " has asked for it", flow->o.rank)
                              : "buckets have checksums";
    if (l->first->is_coded)
        return "it is converted on its way";
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (flow->members[l->senders[i]].setup.why_staged)
            return flow->members[l->senders[i]].setup.why_staged;
    }
    return NULL;
}

static reading begin_reading(const tb__flow *flow, const tb__flow_tensor *t) {
    tb__memory memory;
    if (t->is_gathered)
        return (reading){.device = tb__flow_slot_device(flow), .unit = flow->groups.unit};
    tb__device *device = tb__loop_find_memory(flow->o.loop, t->dst.base, 1, &memory);
    return (reading){.device = device, .unit = memory.index};
}

/* Why a chunk can't be read from these senders; NULL: it can. */
static const char *why_staged_piece(tb__flow *flow, const uint32_t *senders, uint32_t nsenders, const tb_chunk *chunk,
                                    reading *r) {
    const char *why = NULL;
    for (uint32_t i = 0; i < nsenders && !why; i++)
        why = why_staged_chunk(flow, chunk, &flow->members[senders[i]], r);
    return why;
}

/* Why a bucket can't be read from the lane's senders; NULL: it can. If that is so because of some of its tensors, the
 * reason names the first of them. */
static const char *why_staged_bucket(tb__flow *flow, const lane *l, const tb_bucket *bucket, bool *is_for_device) {
    const tb_ir *ir = flow->setup.ir;
    const char *first_why = NULL, *first_name = NULL;
    bool is_any_read = false;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_chunk *chunk = &ir->chunks[ir->entries[bucket->first_entry + i].chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        reading r = begin_reading(flow, t);
        const char *why = why_staged_piece(flow, l->senders, l->nsenders, chunk, &r);
        if (why && !first_why) {
            first_why = why;
            first_name = t->spec.name;
        }
        is_any_read |= !why;
        *is_for_device = (*is_for_device || i == 0) && r.device->ops != &tb__host_device_ops;
    }
    if (first_why && is_any_read)
        return tb__flow_keep_reason(flow, "tensor '%.100s' is in its bucket: %s", first_name, first_why);
    return first_why;
}

/* This rank's own data is never staged: where one unit of a device can't read what another one has, the device itself
 * copies it through host memory. The buckets of a reduced lane are all staged or none is: all ranks combine them
 * in one order. */
static void choose_paths(tb__flow *flow, lane *l) {
    const tb_bucket *buckets = &flow->setup.ir->buckets[l->channel->first_bucket];
    bucket_path *paths = &flow->setup.paths[l->channel->first_bucket];
    bool is_own = l->nsenders == 0 || (l->nsenders == 1 && l->senders[0] == flow->self);
    const char *why_all = is_own ? NULL : why_staged_lane(flow, l);
    for (size_t i = 0; i < l->channel->nbuckets && is_own && !l->first->is_coded; i++)
        paths[i].why_taken = why_staged_bucket(flow, l, &buckets[i], &paths[i].is_for_device);
    for (size_t i = 0; i < l->channel->nbuckets && !is_own && !why_all; i++) {
        paths[i].why_taken = why_staged_bucket(flow, l, &buckets[i], &paths[i].is_for_device);
        paths[i].takes_staged = paths[i].why_taken != NULL;
        l->takes_staged |= paths[i].takes_staged;
        if (l->nsenders > 1)
            why_all = paths[i].why_taken;
    }
    for (size_t i = 0; i < l->channel->nbuckets && why_all; i++) {
        paths[i].why_taken = why_all;
        l->takes_staged = paths[i].takes_staged = true;
    }
    /* A rank that overwrites sources must not write staged buckets before all readers have stashed. Kept in
     * POOL_RECEIVE until then, they could block others' buckets for ever; so they go to the stash. */
    l->is_stashed = lane_overwrites_source(flow, l) || (flow->setup.overwrites_any_source && l->takes_staged) ||
                    lane_unpacks_last(flow, l);
    for (uint32_t i = 0; l->is_stashed && i < l->nsenders; i++)
        flow->members[l->senders[i]].setup.nstash += l->channel->nbuckets;
    for (size_t i = 0; i < l->channel->nbuckets; i++) {
        size_t bucket = l->channel->first_bucket + i;
        paths[i].is_unpacked_on_device = paths[i].takes_staged && tb__staged_unpacks_on_device(flow, l, bucket);
        paths[i].is_unpacked_on_host = paths[i].takes_staged && tb__staged_unpacks_on_host(flow, bucket);
    }
}

/* The first of a bucket's tensors that can't be read from this sender; TB__NOWHERE: there is none. */
static size_t find_unreachable(tb__flow *flow, uint32_t sender, const tb_bucket *bucket, const char **why) {
    const tb_ir *ir = flow->setup.ir;
    for (size_t i = 0; i < bucket->nentries; i++) {
        const tb_chunk *chunk = &ir->chunks[ir->entries[bucket->first_entry + i].chunk];
        reading r = begin_reading(flow, &flow->tensors[chunk->tensor]);
        *why = why_staged_piece(flow, &sender, 1, chunk, &r);
        if (*why)
            return chunk->tensor;
    }
    return TB__NOWHERE;
}

static const char *why_unreachable(tb__flow *flow, const lane *l, uint32_t sender) {
    for (size_t i = l->channel->first_bucket; i < l->channel->first_bucket + l->channel->nbuckets; i++) {
        const char *why;
        size_t tensor = flow->setup.paths[i].takes_staged
                            ? TB__NOWHERE
                            : find_unreachable(flow, sender, &flow->setup.ir->buckets[i], &why);
        if (tensor != TB__NOWHERE)
            return tb__flow_keep_reason(flow,
                                        "tensor '%.100s' on %s has moved to memory that can't be read in place: %s",
                                        flow->tensors[tensor].spec.name, flow->members[sender].peer->label, why);
    }
    return NULL;
}

void tb__flow_check_reach(tb__flow *flow, member *from) {
    uint32_t position = (uint32_t)(from - flow->members);
    flow->direct.nunreachable -= from->setup.why_unreachable != NULL;
    from->setup.why_unreachable = NULL;
    for (size_t i = 0; i < flow->setup.ir->nchannels && position != flow->self && !from->setup.why_unreachable; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool is_from = false;
        for (uint32_t j = 0; l->is_target && !l->first->is_coded && j < l->nsenders; j++)
            is_from |= l->senders[j] == position;
        if (is_from)
            from->setup.why_unreachable = why_unreachable(flow, l, position);
    }
    flow->direct.nunreachable += from->setup.why_unreachable != NULL;
}

const member *tb__flow_find_unreachable(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers && flow->direct.nunreachable > 0; i++) {
        const member *m = &flow->members[i];
        if (m->setup.why_unreachable && flow->recv.attempt && m->direct.ready == flow->recv.attempt &&
            !m->direct.is_concluded)
            return m;
    }
    return NULL;
}

/* ---- REACH ------------------------------------------------------------------------------------------------------- */

/* Packs the lane's staged buckets as runs of consecutive ones. Returns the number of runs. */
static uint32_t pack_staged(const tb__flow *flow, const lane *l, tb__pack *list) {
    const bucket_path *paths = &flow->setup.paths[l->channel->first_bucket];
    uint32_t nruns = 0;
    for (size_t i = 0, next; i < l->channel->nbuckets; i = next) {
        for (next = i + 1; next < l->channel->nbuckets && paths[next].takes_staged == paths[i].takes_staged &&
                           paths[next].is_unpacked_on_device == paths[i].is_unpacked_on_device &&
                           paths[next].why_taken == paths[i].why_taken;)
            next++;
        if (!paths[i].takes_staged)
            continue;
        const tb_chunk *first = tb__flow_first_chunk(flow, l->channel->first_bucket + i);
        tb__pack_u64(list, first->id);
        tb__pack_u32(list, first->part);
        tb__pack_u32(list, (uint32_t)(next - i));
        tb__pack_u32(list, paths[i].is_unpacked_on_device);
        tb__pack_string(list, paths[i].why_taken);
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
    tb__staged_make_device_stage(flow, false);
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        if (flow->setup.lanes[i].is_target)
            choose_paths(flow, &flow->setup.lanes[i]);
    }
    TB_TRY(tb__flow_choose_slots(flow));
    return tb__staged_fit_stash(flow);
}

/* When all senders have sent BIND: decides what is staged, and sends REACH. Buckets may lie in the communicator's
 * memory, which is there when it is ready: a receive begins after that. */
bool tb__flow_try_reach(tb__flow *flow) {
    if (flow->setup.is_reached || (flow->o.comm && !flow->o.comm->is_ready && !flow->o.comm->has_failed))
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
    tb__flow_rehearse(flow);
    return true;
}

/* Stages `count` buckets of a lane for the member, from this one on. False: it is not a target of them, or asks twice.
 */
static bool stage_for(tb__flow *flow, const member *to, size_t bucket, uint32_t count, bool on_device,
                      const char *why) {
    lane *l = tb__flow_lane(flow, bucket);
    uint32_t position = (uint32_t)(to - flow->members);
    on_device &= to->peer->transport->ops->mem_map || tb__staged_carries(flow, to);
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
        if (bucket == TB__NOWHERE ||
            !stage_for(flow, from, bucket, count, on_device, tb__flow_keep_reason(flow, "%s", why)))
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
