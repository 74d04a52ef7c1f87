/* Packs and announces outgoing buckets; unpacks received ones, from the sender's buffer if it is mapped; and the stash.
 * A bucket whose bytes lie in long runs is sent from the tensors, or received into them, without a buffer. */
#include "flow/flow_inside.h"

#include <string.h>

/* ---- Out ------------------------------------------------------------------------------------------------------- */

staged_bucket *tb__staged_bucket_create_out(tb__flow *flow, lane *l, size_t bucket) {
    const bucket_path *path = &flow->setup.paths[bucket];
    staged_bucket *p = tb__staged_bucket_create(flow, l, bucket, true, path->nstaged);
    for (uint32_t i = 0; p && i < path->nstaged; i++)
        p->messages[i].member = path->staged[i];
    if (p)
        p->kind = STAGED_OUT;
    return p;
}

static size_t next_to_send(const lane *l) {
    return l->channel->first_bucket + l->staged_lane.to_send;
}

static bool can_send(const lane *l) {
    return l->nstaged && l->staged_lane.to_send < l->channel->nbuckets &&
           l->staged_lane.in_flight < l->channel->max_in_flight;
}

static size_t packed_size(const tb__flow *flow, const lane *l, size_t bucket) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    return (size_t)(l->is_contributor ? tb__flow_raw_size(flow, b) : b->total_bytes);
}

/* Whether this rank packs the lane's buckets from its tensors: contributions, and buckets that are not reduced. */
static bool is_packed_here(const lane *l) {
    return l->nstaged && (l->is_contributor || (l->is_channel_source && !l->is_target && l->nsenders == 1));
}

void tb__staged_open_send(tb__flow *flow) {
    flow->staged.sends_left = 0;
    flow->staged.largest_out = 0;
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        lane *l = &flow->setup.lanes[i];
        l->staged_lane.to_send = tb__lane_next_staged(flow, l, 0);
        if (l->is_contributor || (l->is_channel_source && !l->is_target))
            flow->staged.sends_left += l->nstaged;
        for (size_t j = 0; is_packed_here(l) && (j = tb__lane_next_staged(flow, l, j)) < l->channel->nbuckets; j++) {
            int64_t nbytes = (int64_t)packed_size(flow, l, l->channel->first_bucket + j);
            flow->staged.largest_out = nbytes > flow->staged.largest_out ? nbytes : flow->staged.largest_out;
        }
    }
}

static uint32_t next_group(const tb__flow *flow, const lane *l) {
    return flow->setup.ir->buckets[next_to_send(l)].group;
}

/* Receivers may not accept a group before earlier ones have arrived. So later groups leave room for a bucket of the
 * lowest one. */
static bool can_pack(const tb__flow *flow, const lane *l, uint32_t lowest) {
    if (!can_send(l))
        return false;
    size_t nbytes = packed_size(flow, l, next_to_send(l));
    return next_group(flow, l) == lowest
               ? tb__flow_has_room(flow, POOL_SEND, nbytes)
               : flow->staged.pool_used[POOL_SEND] + (int64_t)nbytes + flow->staged.largest_out <=
                     flow->staged.pool_size[POOL_SEND];
}

/* The lane whose bucket is packed next: contributions in the order of reductions; others round robin, lower groups
 * first. */
static lane *choose_out(tb__flow *flow) {
    lane *contribution = NULL, *plain = NULL;
    size_t n = flow->setup.ir->nchannels;
    uint32_t lowest = UINT32_MAX;
    for (size_t i = 0; i < n; i++) {
        const lane *l = &flow->setup.lanes[i];
        if (is_packed_here(l) && l->staged_lane.to_send < l->channel->nbuckets && next_group(flow, l) < lowest)
            lowest = next_group(flow, l);
    }
    for (size_t i = 0; i < n; i++) {
        lane *l = &flow->setup.lanes[(flow->staged.next_lane + i) % n];
        if (!is_packed_here(l) || l->staged_lane.to_send == l->channel->nbuckets)
            continue;
        if (l->is_contributor &&
            (!contribution || tb__flow_is_before(flow, next_to_send(l), next_to_send(contribution))))
            contribution = l;
        if (!l->is_contributor && can_pack(flow, l, lowest) &&
            (!plain || next_group(flow, l) < next_group(flow, plain)))
            plain = l;
    }
    return contribution && can_pack(flow, contribution, lowest) ? contribution : plain;
}

static void end_pack(copy_op *c, tb_status status) {
    (void)status;
    if (c->flow->send.is_ending)
        return;
    tb__flow_tell_step(c->flow, c->parts[0], TB_BUCKET_PREPARED);
    tb__staged_bucket_announce(c->staged_bucket);
}

/* Whether all that get the bucket can map its buffer, and copy from there themselves. */
static bool is_mapped_by_all(const staged_bucket *p) {
    for (size_t i = 0; i < p->nmessages; i++) {
        if (!p->flow->members[p->messages[i].member].peer->transport->ops->mem_map)
            return false;
    }
    return true;
}

static tb_status pack_bucket(tb__flow *flow, lane *l) {
    size_t index = next_to_send(l), nbytes = packed_size(flow, l, index);
    staged_bucket *p = l->is_contributor ? tb__staged_bucket_create(flow, l, index, true, 1)
                                         : tb__staged_bucket_create_out(flow, l, index);
    if (!p)
        return TB_NO_MEMORY;
    if (l->is_contributor)
        p->messages[0].member = l->source;
    p->kind = STAGED_OUT;
    p->pool = POOL_SEND;
    p->nbytes = nbytes;
    if (!is_mapped_by_all(p))
        p->pieces = tb__flow_pieces(flow, l, index, false, &p->npieces);
    p->buffer = p->pieces ? NULL : tb__flow_stage_bucket(p);
    if (!p->pieces && !p->buffer) {
        tb__staged_bucket_destroy(p);
        return TB_NO_MEMORY;
    }
    l->staged_lane.to_send = tb__lane_next_staged(flow, l, l->staged_lane.to_send + 1);
    l->staged_lane.in_flight++;
    if (p->pieces) {
        tb__staged_bucket_announce(p);
        return TB_OK;
    }
    copy_op *c = tb__flow_new_copy_op(flow, true, l->is_contributor ? COPY_CONTRIBUTE : COPY_PACK, 1);
    if (!c)
        return TB_NO_MEMORY;
    c->parts[c->nparts++] = (uint32_t)index;
    c->to = p->buffer;
    c->staged_bucket = p;
    c->end = end_pack;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

bool tb__staged_step_out(tb__flow *flow) {
    tb_status status = TB_OK;
    bool did = false;
    for (staged_bucket *p = flow->staged.buckets, *next; p && status == TB_OK; p = next) {
        next = p->next;
        if (!p->is_send || p->kind != STAGED_OUT)
            continue;
        status = tb__staged_bucket_check(p);
        if (status == TB_OK && p->left == 0) {
            tb__flow_tell_step(flow, p->bucket, TB_BUCKET_FINALISED);
            p->lane->staged_lane.in_flight--;
            flow->staged.sends_left--;
            tb__staged_end_timing(p);
            tb__staged_bucket_destroy(p);
            did = true;
        }
    }
    bool may_pack = status == TB_OK && flow->staged.sends_left > 0 && !flow->staged.is_timing;
    lane *l = may_pack ? choose_out(flow) : NULL;
    if (l) {
        flow->staged.next_lane = (uint32_t)((size_t)(l - flow->setup.lanes + 1) % flow->setup.ir->nchannels);
        status = pack_bucket(flow, l);
        did = true;
    }
    if (status != TB_OK)
        tb__flow_await_reason(flow, true, status, tb_error_detail());
    return did || status != TB_OK;
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

void tb__staged_open_recv(tb__flow *flow) {
    memset(flow->staged.is_taken, 0, flow->setup.ir->nbuckets * sizeof *flow->staged.is_taken);
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++)
        flow->setup.lanes[i].staged_lane.to_combine = 0;
    tb__staged_drop_announcements(flow, 0, flow->recv.attempt - 1); /* of earlier transfers */
}

/* Reads the bucket in the sender's buffer. */
static void begin_read(staged_bucket *p, const announcement *a) {
    bucket_message *c = &p->messages[0];
    p->memory = a->memory;
    p->map = a->map;
    c->member = a->member;
    c->tag = a->tag;
    c->sum = a->sum;
    c->op.kind = TB_OP_RECV;
    c->piece = (tb_piece){a->map, a->nbytes};
    tb__leg_begin_message(&p->flow->recv);
}

static tb_status accept_announced(tb__flow *flow, const announcement *a, lane *l) {
    staged_bucket *p = tb__staged_bucket_create(flow, l, a->bucket, false, 1 + l->nchildren);
    if (!p)
        return TB_NO_MEMORY;
    p->kind = STAGED_IN;
    p->pool = l->is_stashed ? POOL_STASH : POOL_RECEIVE;
    p->nbytes = a->nbytes;
    flow->staged.nrelays += l->nchildren > 0;
    flow->staged.is_taken[a->bucket] = true;
    tb__flow_tell_step(flow, a->bucket, TB_BUCKET_LAUNCHED);
    if (a->map) {
        begin_read(p, a);
        return TB_OK;
    }
    /* A bucket that is relayed needs a buffer: the program may change its tensors once they have arrived. */
    if (!l->is_stashed && l->nchildren == 0 && tb__flow_may_write(flow))
        p->pieces = tb__flow_pieces(flow, l, a->bucket, true, &p->npieces);
    p->buffer = p->pieces ? NULL : tb__flow_stage_received(flow, a, p->pool);
    if (!p->pieces && !p->buffer) {
        tb__staged_bucket_destroy(p);
        return TB_NO_MEMORY;
    }
    if (p->pieces)
        tb__flow_mark_written(flow);
    for (uint32_t i = 0; i < l->nchildren; i++)
        p->messages[1 + i].member = l->children[i];
    p->messages[0].piece = (tb_piece){p->buffer, p->nbytes};
    tb__bucket_message_ask(&p->messages[0], a);
    return TB_OK;
}

/* The lowest group with buckets to relay that were not accepted yet. */
static uint32_t lowest_relay(const tb__flow *flow) {
    uint32_t lowest = UINT32_MAX;
    for (size_t i = 0; flow->setup.largest_relay && i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        const tb_bucket *b = &flow->setup.ir->buckets[l->channel->first_bucket];
        size_t j = 0;
        while (l->nchildren && j < l->channel->nbuckets && flow->staged.is_taken[l->channel->first_bucket + j])
            j++;
        if (l->nchildren && j < l->channel->nbuckets && b[j].group < lowest)
            lowest = b[j].group;
    }
    return lowest;
}

/* A child may not accept a bucket before earlier groups have arrived. So later groups leave room for a bucket of the
 * lowest one. */
static bool has_room(const tb__flow *flow, const lane *l, const announcement *a, uint32_t lowest) {
    if (l->is_stashed)
        return tb__flow_has_room(flow, POOL_STASH, a->nbytes);
    if (a->is_on_device && !tb__staged_alloc_on_device(flow, false, a->nbytes))
        return false;
    if (!l->nchildren || flow->setup.ir->buckets[a->bucket].group <= lowest)
        return tb__flow_has_room(flow, POOL_RECEIVE, a->nbytes);
    return flow->staged.pool_used[POOL_RECEIVE] + (int64_t)a->nbytes + flow->setup.largest_relay <=
           flow->staged.pool_size[POOL_RECEIVE];
}

/* Accepts announced buckets while there is memory for them. */
static tb_status accept_announcements(tb__flow *flow, bool *did) {
    uint32_t lowest = flow->staged.announcements.count ? lowest_relay(flow) : 0;
    for (size_t i = 0; i < flow->staged.announcements.count;) {
        announcement a = flow->staged.announcements.item[i];
        lane *l = tb__flow_lane(flow, a.bucket);
        if (a.attempt != flow->recv.attempt || l->is_channel_source ||
            !tb__flow_admits(flow, l, &flow->setup.ir->buckets[a.bucket]) ||
            !(a.map || has_room(flow, l, &a, lowest))) {
            i++;
            continue;
        }
        *did = true;
        TB_TRY(accept_announced(flow, &a, l));
        tb__staged_forget(flow, i);
    }
    return TB_OK;
}

static void end_unpack(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    staged_bucket *p = c->staged_bucket;
    p->is_unpacked = true;
    if (flow->recv.is_ending)
        return;
    status = tb__staged_bucket_end_read(p);
    if (status == TB_OK)
        status = tb__flow_bucket_arrived(flow, p->lane, p->bucket);
    if (p->left == 0)
        tb__staged_bucket_destroy(p);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static tb_status unpack_bucket(tb__flow *flow, staged_bucket *p) {
    lane *l = p->lane;
    char *from = p->map ? p->map : p->buffer;
    p->is_begun = true;
    if (l->is_stashed) {
        TB_TRY(tb__staged_stash(flow, l, p->bucket, p->buffer, p->nbytes));
        p->buffer = NULL;
    } else if (p->pieces) {
        TB_TRY(tb__flow_bucket_arrived(flow, l, p->bucket));
    } else {
        copy_op *c = tb__flow_new_copy_op(flow, false, COPY_UNPACK, 1);
        if (!c)
            return TB_NO_MEMORY;
        c->parts[c->nparts++] = (uint32_t)p->bucket;
        c->from = from;
        c->staged_bucket = p;
        c->end = end_unpack;
        tb__flow_start_copy_op(c);
        return TB_OK;
    }
    p->is_unpacked = true;
    return TB_OK;
}

/* Whether a received bucket can be written or stashed now. The stash takes the buffer, so all children must have the
 * bucket first. */
static bool can_unpack(const tb__flow *flow, const staged_bucket *p) {
    return !p->is_begun && (p->lane->is_stashed ? p->left == 0 : p->pieces || tb__flow_may_write(flow));
}

/* Advances a received bucket: checks it, announces it to children, unpacks it, and frees it when all are done. */
static tb_status process_received(tb__flow *flow, staged_bucket *p, bool *did) {
    bool is_checked;
    TB_TRY(tb__staged_bucket_check_sums(p, &is_checked));
    if (!is_checked)
        return TB_OK;
    if (!p->is_relayed) {
        tb__flow_tell_step(flow, p->bucket, TB_BUCKET_COMPLETE);
        *did = p->is_relayed = true;
        if (p->nmessages > 1)
            tb__staged_bucket_announce(p);
    }
    if (can_unpack(flow, p)) {
        *did = true;
        return unpack_bucket(flow, p); /* may free p */
    }
    if (p->is_unpacked && p->left == 0) {
        *did = true;
        tb__staged_bucket_destroy(p);
    }
    return TB_OK;
}

bool tb__staged_step_in(tb__flow *flow) {
    bool did = false;
    tb_status status = accept_announcements(flow, &did);
    bool took = false;
    for (staged_bucket *p = flow->staged.buckets, *next; p && status == TB_OK && !took; p = next) {
        next = p->next;
        if (p->kind != STAGED_IN)
            continue;
        status = tb__staged_bucket_check(p);
        if (status == TB_OK && (p->map || p->messages[0].is_done))
            status = process_received(flow, p, &took);
    }
    if (status != TB_OK) {
        tb__flow_await_reason(flow, false, status, tb_error_detail());
        return true;
    }
    return did || took;
}

/* ---- The stash ------------------------------------------------------------------------------------------------- */

bool tb__flow_unpacks_last(const tb__flow *flow, size_t bucket) {
    const tb_chunk *first = tb__flow_first_chunk(flow, bucket);
    return first->is_whole && first->is_target && flow->tensors[first->tensor].codec->unpacks_last;
}

tb_status tb__staged_stash(tb__flow *flow, lane *l, size_t bucket, char *buffer, size_t nbytes) {
    stashed s = {l, bucket, buffer, nbytes, tb__flow_first_chunk(flow, bucket)};
    bool is_last = tb__flow_unpacks_last(flow, bucket);
    if (is_last ? !tb__vec_push(&flow->staged.last, s) : !tb__vec_push(&flow->staged.stash, s))
        return TB_NO_MEMORY;
    if (is_last) {
        flow->staged.is_last_sorted = false;
        tb__flow_count_last(flow, flow->setup.ir->buckets[bucket].group, 1);
    }
    tb__flow_count_stashed(flow, l);
    return TB_OK;
}

/* Descending by group, tensor and place in the target. */
static int compare_last(const void *a, const void *b) {
    const tb_chunk *x = ((const stashed *)b)->first, *y = ((const stashed *)a)->first;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    for (int d = 0; d < x->ndim; d++) {
        if (x->dst.start[d] != y->dst.start[d])
            return x->dst.start[d] < y->dst.start[d] ? -1 : 1;
    }
    return 0;
}

/* A bucket of the stash that may be written now; NULL: none. */
static stashed *find_writable(tb__flow *flow) {
    for (size_t i = flow->staged.stash.count; i-- > 0 && tb__flow_may_write(flow);) {
        if (tb__flow_is_in_window(flow, &flow->setup.ir->buckets[flow->staged.stash.item[i].bucket]))
            return &flow->staged.stash.item[i];
    }
    return NULL;
}

/* Takes the next bucket that is unpacked last, if all others of its group have arrived. One at a time, because a
 * device may take longer for one than for the next. */
static bool take_last(tb__flow *flow, stashed *out) {
    struct flow_staged *staged = &flow->staged;
    const group *g = staged->last.count && !staged->is_last_running ? tb__flow_find_last(flow) : NULL;
    if (!g || !tb__flow_may_write(flow) || !tb__flow_is_in_window(flow, &(tb_bucket){.group = g->number}))
        return false;
    if (!staged->is_last_sorted)
        qsort(staged->last.item, staged->last.count, sizeof *staged->last.item, compare_last);
    staged->is_last_sorted = true;
    size_t at = staged->last.count - 1;
    while (staged->last.item[at].first->group != g->number)
        at--;
    *out = staged->last.item[at];
    memmove(&staged->last.item[at], &staged->last.item[at + 1],
            (--staged->last.count - at) * sizeof *staged->last.item);
    tb__flow_count_last(flow, g->number, -1);
    return true;
}

static bool take_stashed(tb__flow *flow, stashed *out) {
    stashed *at = find_writable(flow);
    if (!at)
        return take_last(flow, out);
    *out = *at;
    *at = flow->staged.stash.item[--flow->staged.stash.count];
    return true;
}

static void end_stash_write(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (tb__flow_unpacks_last(flow, c->parts[0]))
        flow->staged.is_last_running = false;
    tb__flow_unstage(flow, POOL_STASH, c->from, c->nbytes);
    if (flow->recv.is_ending)
        return;
    status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0]);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

tb_status tb__staged_write_stash(tb__flow *flow, bool *did) {
    if (flow->staged.stash.count == 0 && flow->staged.last.count == 0)
        return TB_OK;
    copy_op *c = tb__flow_new_copy_op(flow, false, COPY_UNPACK, 1);
    stashed s;
    if (!c || !take_stashed(flow, &s)) {
        tb__flow_free_copy_op(c);
        return c ? TB_OK : TB_NO_MEMORY;
    }
    *did = true;
    flow->staged.is_last_running |= tb__flow_unpacks_last(flow, s.bucket);
    c->parts[c->nparts++] = (uint32_t)s.bucket;
    c->from = s.buffer;
    c->nbytes = s.nbytes;
    c->end = end_stash_write;
    tb__flow_start_copy_op(c);
    return TB_OK;
}
