/* Staging memory on a device, so that data of tensors on one of its units does not pass through the host. It is made
 * once for each flow. Readers on the same machine map the sender's when they are bound (bind.c); the reader's exposure
 * shows whether the sender has reused a bucket's memory. Others receive buckets in a stage of their own, if transports
 * at both ends take memory of the device; the sender times some buckets each way, and takes the faster one. A bucket
 * that does not fit is staged in host memory. */
#include "flow/flow_inside.h"

#include "base/int.h"
#include "base/log.h"

#include <math.h>

enum {
    TIMED = 2, /* buckets each way, of which the faster one counts: the first may make connections, pin memory */
    TIMED_MIN = 1 << 20, /* bytes of one */
};

/* The transport that takes memory of the device to and from a member; NULL: none does. */
static const tb_transport *find_carrier(const tb__flow *flow, const member *m, const tb__device *device) {
    if (flow->o.comm && flow->o.comm->device == device && tb__comm_reaches(flow->o.comm, m->peer))
        return flow->o.comm->transport;
    return !flow->o.comm && tb__peer_carries(m->peer, device) ? m->peer->transport : NULL;
}

/* Whether a transport takes memory of the device to a reader, or from a sender. */
static bool has_carrier(const tb__flow *flow, bool is_send, const tb__device *device) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        const member *m = &flow->members[i];
        bool is_other_end = is_send ? m->setup.is_reader : m->setup.is_sender;
        if (is_other_end && i != flow->self && find_carrier(flow, m, device))
            return true;
    }
    return false;
}

/* Whether buckets of some of this rank's tensors on a device are to be staged there; *where is the first one's memory,
 * and *is_carried, whether a transport must be able to use the stage. */
static bool find_staged(const tb__flow *flow, bool is_send, tb__device **device, tb__memory *where, bool *is_carried) {
    tb__region *const *regions = is_send ? flow->setup.src_regions : flow->setup.dst_regions;
    for (size_t i = 0; i < flow->o.ntensors && !flow->o.checksum; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        if (!regions[i])
            continue;
        *device = tb__loop_find_memory(flow->o.loop, (is_send ? &t->src : &t->dst)->base, 1, where);
        if ((*device)->ops == &tb__host_device_ops || (flow->o.comm && flow->o.comm->unit != where->index))
            continue;
        *is_carried = has_carrier(flow, is_send, *device);
        if (*is_carried || (is_send && (flow->o.staged || t->spec.coded || !where->is_shareable)))
            return true;
    }
    return false;
}

/* Each direction and end has a quarter of the communicator's memory. */
static void take_comm_memory(const tb__flow *flow, bool is_send, device_stage *s) {
    char *all = tb__comm_memory(flow->o.comm);
    size_t part = flow->o.comm->nbytes / 4 / 256 * 256;
    s->is_of_comm = all != NULL;
    s->memory = all ? all + part * (2 * flow->o.direction + is_send) : NULL;
    s->nbytes = s->nbytes < part ? s->nbytes : part;
}

/* Without it, buckets are staged in host memory. */
void tb__staged_make_device_stage(tb__flow *flow, bool is_send) {
    device_stage *s = &flow->staged.on_device[is_send];
    tb__memory where;
    bool has_others = !is_send, is_carried;
    for (size_t i = 0; i < flow->nmembers; i++)
        has_others |= flow->members[i].setup.is_reader && i != flow->self;
    if (s->memory || !has_others || !find_staged(flow, is_send, &s->device, &where, &is_carried))
        return;
    s->unit = where.index;
    s->nbytes = (size_t)flow->staged.pool_size[is_send ? POOL_SEND : POOL_RECEIVE];
    if (is_carried && flow->o.comm)
        take_comm_memory(flow, is_send, s);
    __typeof__(s->device->ops->alloc) alloc = is_carried ? s->device->ops->alloc_for_transport : s->device->ops->alloc;
    if (!s->memory && alloc(s->device, s->unit, s->nbytes, (void **)&s->memory) != TB_OK)
        s->memory = NULL;
    else if (is_send && !s->is_of_comm && tb__region_get(flow->o.loop, s->memory, s->nbytes, &s->region) != TB_OK)
        tb__staged_free_device_stages(flow);
}

/* A message that the transport has not given back may still access its bucket's memory. */
void tb__staged_free_device_stages(tb__flow *flow) {
    for (int is_send = 0; is_send < 2; is_send++) {
        device_stage *s = &flow->staged.on_device[is_send];
        tb__region_put(s->region);
        if (s->memory && !s->is_of_comm && !flow->staged.held)
            s->device->ops->free(s->device, s->memory);
        *s = (device_stage){0};
    }
}

static bool is_in_stage(const device_stage *s, const char *buffer) {
    return s->memory && buffer >= s->memory && buffer < s->memory + s->nbytes;
}

const device_stage *tb__staged_find_device(const tb__flow *flow, const char *buffer) {
    for (int is_send = 0; is_send < 2; is_send++) {
        if (is_in_stage(&flow->staged.on_device[is_send], buffer))
            return &flow->staged.on_device[is_send];
    }
    return NULL;
}

/* Moves *at behind buckets that are in the way of nbytes there. False: none was. */
static bool pass_buckets(const device_stage *s, const staged_bucket *list, size_t nbytes, size_t *at) {
    bool has_moved = false;
    for (const staged_bucket *p = list; p; p = p->next) {
        if (!is_in_stage(s, p->buffer))
            continue;
        size_t first = (size_t)(p->buffer - s->memory), last = first + (size_t)tb__align((int64_t)p->nbytes, 256);
        if (*at < last && first < *at + nbytes) {
            *at = last;
            has_moved = true;
        }
    }
    return has_moved;
}

char *tb__staged_alloc_on_device(const tb__flow *flow, bool is_send, size_t nbytes) {
    const device_stage *s = &flow->staged.on_device[is_send];
    size_t at = 0;
    while (pass_buckets(s, flow->staged.buckets, nbytes, &at) || pass_buckets(s, flow->staged.held, nbytes, &at))
        ;
    return nbytes <= s->nbytes && at <= s->nbytes - nbytes ? s->memory + at : NULL;
}

/* Whether this device does all moves between the bucket and its tensors. */
static bool is_copied_by(tb__flow *flow, size_t bucket, bool packs, const tb__device *device) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    tb__move_list list = {0};
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        if ((!packs && flow->tensors[chunk->tensor].is_gathered) ||
            (chunk->is_coded && tb__flow_needs_host(flow, chunk, packs)))
            return false;
    }
    bool is = tb__flow_list_bucket(flow, packs, bucket, &list) == TB_OK;
    for (size_t i = 0; i < list.moves.count && is; i++)
        is = tb__jobs_choose_device(flow->o.loop, &list.moves.item[i]) == device;
    tb__move_list_fini(&list);
    return is;
}

bool tb__staged_packs_on_device(tb__flow *flow, size_t bucket) {
    const device_stage *s = &flow->staged.on_device[true];
    const lane *l = tb__flow_lane(flow, bucket);
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    bool is = s->memory && l->is_channel_source && l->nsenders == 1;
    for (size_t i = 0; i < b->nentries && is; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        tb__memory where;
        is = tb__loop_find_memory(flow->o.loop, flow->tensors[chunk->tensor].src.base, 1, &where) == s->device &&
             where.index == s->unit;
    }
    return is && is_copied_by(flow, bucket, true, s->device);
}

bool tb__staged_unpacks_on_host(tb__flow *flow, size_t bucket) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    const tb__device *host = tb__loop_find_device(flow->o.loop, NULL, 0);
    tb__move_list list = {0};
    int64_t scratch = 0;
    bool is = true;
    for (size_t i = 0; i < b->nentries && is; i++) {
        const tb_bucket_entry *entry = &flow->setup.ir->entries[b->first_entry + i];
        const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        if (t->is_gathered)
            is = tb__flow_slot_device(flow) == host;
        else if (!chunk->is_coded)
            is = tb__loop_find_device(flow->o.loop, t->dst.base, 1) == host;
        else
            is = tb__flow_list_coded(flow, COPY_UNPACK, entry, &scratch, &list) == TB_OK;
    }
    for (size_t i = 0; i < list.moves.count && is; i++)
        is = tb__jobs_choose_device(flow->o.loop, &list.moves.item[i]) == host;
    tb__move_list_fini(&list);
    return is;
}

/* Whether the units that the bucket's targets are on can read this memory. */
static bool can_targets_read(tb__flow *flow, size_t bucket, const tb__memory *memory) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        tb__memory target;
        tb__device *device = tb__loop_find_memory(flow->o.loop, flow->tensors[chunk->tensor].dst.base, 1, &target);
        if (device->ops != &tb__host_device_ops && target.index != memory->index &&
            tb__flow_why_not_accessed(flow, device, target.index, memory))
            return false;
    }
    return true;
}

bool tb__staged_unpacks_on_device(tb__flow *flow, const lane *l, size_t bucket) {
    const member *m = &flow->members[l->source];
    const device_stage *s = &flow->staged.on_device[false];
    tb__memory memory;
    tb__device *device = NULL;
    if (l->nsenders != 1 || l->parent != l->source || l->nchildren > 0 || l->is_stashed)
        return false;
    if (m->setup.stage && m->direct.peer_exposure)
        device = tb__peer_memory_find(m->setup.stage, &memory);
    else if (s->memory && find_carrier(flow, m, s->device) &&
             (size_t)flow->setup.ir->buckets[bucket].total_bytes <= s->nbytes)
        device = tb__loop_find_memory(flow->o.loop, s->memory, 1, &memory);
    return device && is_copied_by(flow, bucket, false, device) && can_targets_read(flow, bucket, &memory);
}

/* ---- Transports ------------------------------------------------------------------------------------------------- */

bool tb__staged_carries(const tb__flow *flow, const member *to) {
    const device_stage *s = &flow->staged.on_device[true];
    return s->memory && find_carrier(flow, to, s->device);
}

/* The first receiver that gets the bucket by a transport; NULL: all map the stage. */
static const member *find_carried(const staged_bucket *p) {
    for (size_t i = 0; i < p->nmessages; i++) {
        const member *m = &p->flow->members[p->messages[i].member];
        if (tb__staged_carries(p->flow, m))
            return m;
    }
    return NULL;
}

static bool is_decided(const tb__peer *peer) {
    return peer->timed[0].count >= TIMED && peer->timed[1].count >= TIMED;
}

/* Whether the program has named the transport for memory of the device. */
static bool is_requested(const tb__flow *flow) {
    return flow->o.comm && flow->o.comm->is_requested;
}

static bool is_only_outgoing(const staged_bucket *p) {
    for (const staged_bucket *other = p->flow->staged.buckets; other; other = other->next) {
        if (other != p && other->is_send && other->kind == STAGED_OUT)
            return false;
    }
    return true;
}

/* The first buckets that are large enough, and go alone, are timed, from when they are packed until they have been
 * received. */
bool tb__staged_prefers_device(staged_bucket *p) {
    const bucket_path *path = &p->flow->setup.paths[p->bucket];
    const member *to = find_carried(p);
    if (!path->is_packed_on_device || path->nstaged_on_device != path->nstaged)
        return false;
    if (!to || is_requested(p->flow))
        return true;
    const struct tb__timed *timed = to->peer->timed;
    if (is_decided(to->peer))
        return timed[true].rate >= timed[false].rate;
    if (p->nbytes < TIMED_MIN || !is_only_outgoing(p))
        return true;
    p->timed_from = tb__seconds();
    p->flow->staged.is_timing = true;
    return timed[true].count < TIMED;
}

static void describe_way(const tb__flow *flow, const member *to, tb__text *out) {
    const device_stage *s = &flow->staged.on_device[true];
    const tb__peer *peer = to->peer;
    const struct tb__timed *t = peer->timed;
    const char *unit = tb__device_unit_name(s->device, s->unit), *name = find_carrier(flow, to, s->device)->ops->name;
    if (is_requested(flow))
        tb__text_add(out, "buckets of %s go to %s by %s from its memory", unit, peer->label, name);
    else if (is_decided(peer))
        tb__text_add(out, "buckets of %s go to %s by %s from %s: %.3g GB/s, by way of %s %.3g GB/s", unit, peer->label,
                     name, t[1].rate >= t[0].rate ? "its memory" : "host memory", 1e-9 * fmax(t[0].rate, t[1].rate),
                     t[1].rate >= t[0].rate ? "host memory" : "its memory", 1e-9 * fmin(t[0].rate, t[1].rate));
    else
        tb__text_add(out,
                     "buckets of %s go to %s by %s from its memory; whether host memory is faster is known when %d of "
                     "at least 1 MiB have been timed each way",
                     unit, peer->label, name, TIMED);
}

void tb__staged_describe_way(const tb__flow *flow, const member *to, tb__text *out) {
    if (!tb__staged_carries(flow, to))
        return;
    tb__text_add(out, "  ");
    describe_way(flow, to, out);
    tb__text_add(out, "\n");
}

void tb__staged_end_timing(staged_bucket *p) {
    const member *to = find_carried(p);
    tb__text text = {0};
    if (p->timed_from == 0 || !to)
        return;
    tb__peer *peer = to->peer;
    struct tb__timed *timed = &peer->timed[tb__staged_find_device(p->flow, p->buffer) != NULL];
    double rate = (double)p->nbytes / (tb__seconds() - p->timed_from);
    bool was_decided = is_decided(peer);
    timed->count++;
    timed->rate = fmax(timed->rate, rate);
    if (was_decided || !is_decided(peer))
        return;
    describe_way(p->flow, to, &text);
    tb__log(TB_LOG_INFO, "%s", text.data ? text.data : "");
    tb__text_fini(&text);
}
