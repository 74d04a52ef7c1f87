/* Staged buckets. A bucket is announced to its receivers. One that can map the sender's buffer reads it there and sends
 * TAKEN; the sender revokes access to the buffer before it reuses it, and a read that ends later fails. Other receivers
 * ask for the bucket (GO), and it is sent to them. A receiver asks only when it has memory for it, and an announced
 * bucket is complete; so memory for receiving always becomes free again. A relay keeps a bucket until all its children
 * have it; these have higher ranks, so there is no cycle of waits. */
#include "flow/flow_inside.h"

#include "base/int.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

lane *tb__flow_lane(tb__flow *flow, size_t bucket) {
    return &flow->setup.lanes[flow->setup.ir->buckets[bucket].channel];
}

const tb_chunk *tb__flow_first_chunk(const tb__flow *flow, size_t bucket) {
    return &flow->setup.ir->chunks[flow->setup.ir->entries[flow->setup.ir->buckets[bucket].first_entry].chunk];
}

size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part) {
    size_t probe = 0, at;
    while ((at = tb__index_next(&flow->setup.by_bucket, tb__hash(id, part), &probe)) != TB__NOWHERE) {
        const tb_chunk *first = tb__flow_first_chunk(flow, at);
        if (first->id == id && first->part == part)
            return at;
    }
    return TB__NOWHERE;
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

bool tb__flow_has_room(const tb__flow *flow, pool which, size_t nbytes) {
    /* An empty pool takes any bucket: alignment may make it a few bytes longer than the limit it was cut to. */
    return flow->staged.pool_used[which] == 0 ||
           flow->staged.pool_used[which] + (int64_t)nbytes <= flow->staged.pool_size[which];
}

static void count_staged(tb__flow *flow, pool which, size_t nbytes) {
    flow->staged.pool_used[which] += (int64_t)nbytes;
    flow->staged.nbytes += (int64_t)nbytes;
    if (flow->staged.nbytes > flow->staged.nbytes_max)
        flow->staged.nbytes_max = flow->staged.nbytes;
}

void *tb__flow_stage(tb__flow *flow, pool which, size_t nbytes) {
    void *buffer;
    if (tb_alloc(nbytes, &buffer) != TB_OK)
        return NULL;
    count_staged(flow, which, nbytes);
    return buffer;
}

static void *stage_on_device(tb__flow *flow, bool is_send, size_t nbytes) {
    char *buffer = tb__staged_alloc_on_device(flow, is_send, nbytes);
    if (buffer)
        count_staged(flow, is_send ? POOL_SEND : POOL_RECEIVE, nbytes);
    return buffer;
}

void *tb__flow_stage_bucket(staged_bucket *p) {
    char *buffer = tb__staged_prefers_device(p) ? stage_on_device(p->flow, true, p->nbytes) : NULL;
    return buffer ? buffer : tb__flow_stage(p->flow, POOL_SEND, p->nbytes);
}

void *tb__flow_stage_received(tb__flow *flow, const announcement *a, pool which) {
    return a->is_on_device ? stage_on_device(flow, false, a->nbytes) : tb__flow_stage(flow, which, a->nbytes);
}

void tb__flow_unstage(tb__flow *flow, pool which, void *buffer, size_t nbytes) {
    if (!buffer)
        return;
    if (!tb__staged_find_device(flow, buffer))
        tb_free(buffer);
    flow->staged.pool_used[which] -= (int64_t)nbytes;
    flow->staged.nbytes -= (int64_t)nbytes;
}

static void raise_max(int64_t *most, int64_t nbytes) {
    *most = nbytes > *most ? nbytes : *most;
}

/* The size of the largest bucket in each pool; 0: the pool is not used. */
static void find_largest(const tb__flow *flow, int64_t largest[POOL_STASH]) {
    memset(largest, 0, POOL_STASH * sizeof *largest);
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool is_local = l->is_channel_source && l->is_target;
        for (size_t j = 0; j < l->channel->nbuckets; j++) {
            const tb_bucket *bucket = &flow->setup.ir->buckets[l->channel->first_bucket + j];
            int64_t raw = tb__flow_raw_size(flow, bucket), inputs = raw * ((int64_t)l->nsenders - 1);
            if ((l->is_channel_source || l->is_contributor) && !is_local)
                raise_max(&largest[POOL_SEND], l->is_contributor ? raw : bucket->total_bytes);
            if (l->is_channel_source && !is_local && l->nsenders > 1)
                raise_max(&largest[POOL_REDUCE], inputs + bucket->total_bytes);
            if (is_local && l->takes_staged)
                raise_max(&largest[POOL_COMBINE], inputs);
            if (l->is_target && l->takes_staged)
                raise_max(&largest[POOL_RECEIVE], bucket->total_bytes);
        }
    }
}

/* If the stash does not fit beside the other pools, they shrink to room for one bucket each. */
tb_status tb__staged_fit_stash(tb__flow *flow) {
    int64_t need = 0, last = 0, room = flow->o.own_staging_bytes, most_room = room, largest[POOL_STASH];
    find_largest(flow, largest);
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        for (size_t j = 0; l->is_target && l->is_stashed && j < l->channel->nbuckets; j++) {
            size_t bucket = l->channel->first_bucket + j;
            need += tb__align(flow->setup.ir->buckets[bucket].total_bytes, 64);
            last += tb__flow_unpacks_last(flow, bucket);
        }
    }
    for (int p = 0; p < POOL_STASH; p++) {
        room -= largest[p] ? flow->staged.pool_size[p] : 0;
        most_room -= largest[p];
    }
    if (need > room) {
        memcpy(flow->staged.pool_size, largest, sizeof largest);
        room = most_room;
    }
    flow->staged.pool_size[POOL_STASH] = room;
    if (need > room && last == 0)
        return tb__fail(TB_REFUSED,
                        "%s overwrites tensors that are still being read, and rank %" PRId32
                        " would have to put %" PRId64 " bytes aside; its staging_bytes of %" PRId64 " leave %" PRId64
                        " for that: raise them, or receive into other memory",
                        flow->what, flow->o.rank, need, flow->o.own_staging_bytes, room);
    if (need > room)
        return tb__fail(TB_REFUSED,
                        "transforms of %s want all of it to arrive first, and rank %" PRId32
                        " would have to put %" PRId64 " bytes aside; its staging_bytes of %" PRId64 " leave %" PRId64
                        " for that: raise them",
                        flow->what, flow->o.rank, need, flow->o.own_staging_bytes, room);
    return TB_OK;
}

/* ---- Buckets --------------------------------------------------------------------------------------------------- */

staged_bucket *tb__staged_bucket_create(tb__flow *flow, lane *l, size_t bucket, bool is_send, size_t nmessages) {
    staged_bucket *p = tb__calloc(1, sizeof *p + nmessages * sizeof *p->messages);
    if (!p)
        return NULL;
    *p = (staged_bucket){.flow = flow,
                         .lane = l,
                         .bucket = bucket,
                         .is_send = is_send,
                         .left = nmessages,
                         .nmessages = nmessages,
                         .next = flow->staged.buckets};
    for (size_t i = 0; i < nmessages; i++)
        p->messages[i].staged_bucket = p;
    flow->staged.buckets = p;
    return p;
}

/* Frees a bucket that is in no list any more. A bucket with a message that may still access its memory is kept. */
static void free_bucket(staged_bucket *p, bool is_held) {
    tb__flow *flow = p->flow;
    tb__peer_memory_release(p->memory);
    tb__region_put(p->region); /* before its memory is reused */
    flow->staged.nrelays -= p->kind == STAGED_IN && p->nmessages > 1;
    flow->staged.is_timing &= p->timed_from == 0;
    if (is_held) {
        p->next = flow->staged.held;
        flow->staged.held = p;
        return;
    }
    tb__flow_unstage(flow, p->pool, p->buffer, p->nbytes);
    tb__flow_unstage(flow, p->output_pool, p->output, p->output_nbytes);
    free(p->pieces);
    free(p);
}

void tb__staged_bucket_destroy(staged_bucket *p) {
    staged_bucket **at = &p->flow->staged.buckets;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    free_bucket(p, false);
}

tb__leg *tb__staged_bucket_leg(const staged_bucket *p) {
    return p->is_send ? &p->flow->send : &p->flow->recv;
}

static void on_bucket_message(tb_op *op) {
    bucket_message *c = op->arg;
    staged_bucket *p = c->staged_bucket;
    c->is_done = true;
    p->left--;
    tb__leg_end_message(tb__staged_bucket_leg(p));
    bool is_short = op->kind == TB_OP_RECV && op->nbytes != c->piece.nbytes;
    bool is_to_lost =
        op->kind == TB_OP_SEND && op->status == TB_LOST; /* find_missing_member decides whether that matters */
    if (op->status == TB_OK && is_short) {
        op->status = TB_INVALID;
        snprintf(op->why, sizeof op->why, "%zu bytes came, not %zu", op->nbytes, c->piece.nbytes);
    }
    if (p->status == TB_OK && !is_to_lost)
        p->status = op->status;
    tb__loop_wake(p->flow->o.loop);
}

static void post_message(bucket_message *c, tb_op_kind kind) {
    tb__flow *flow = c->staged_bucket->flow;
    const member *m = &flow->members[c->member];
    const device_stage *stage = tb__staged_find_device(flow, c->staged_bucket->buffer);
    c->op = (tb_op){.kind = kind,
                    .peer = m->peer->transport_rank,
                    .tag = c->tag,
                    .pieces = c->staged_bucket->pieces ? c->staged_bucket->pieces : &c->piece,
                    .npieces = c->staged_bucket->pieces ? c->staged_bucket->npieces : 1,
                    .is_expected = kind == TB_OP_SEND, /* the receive was posted before GO */
                    .memory = stage ? stage->device->ops->transport_kind : TB_MEM_HOST,
                    .device = stage ? stage->unit : 0,
                    .done = on_bucket_message,
                    .arg = c};
    c->is_posted = true;
    tb__leg_begin_message(tb__staged_bucket_leg(c->staged_bucket));
    tb_status status =
        stage && flow->o.comm ? tb__comm_post(flow->o.comm, m->peer, &c->op) : tb__peer_post(m->peer, &c->op);
    if (status != TB_OK) {
        c->op.status = status;
        snprintf(c->op.why, sizeof c->op.why, "%s", tb_error_detail());
        on_bucket_message(&c->op);
    }
}

void tb__bucket_message_ask(bucket_message *c, const announcement *a) {
    tb__flow *flow = c->staged_bucket->flow;
    c->member = a->member;
    c->tag = a->tag;
    c->sum = a->sum;
    post_message(c, TB_OP_RECV);
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_GO, a->attempt);
    tb__pack_u64(&pack, a->tag);
    tb__flow_send_message(flow, &flow->members[a->member], &pack);
}

tb_status tb__staged_bucket_end_read(staged_bucket *p) {
    tb__flow *flow = p->flow;
    bucket_message *c = &p->messages[0];
    member *from = &flow->members[c->member];
    if (!p->memory)
        return TB_OK;
    bool is_valid = tb__peer_memory_is_valid(p->memory) &&
                    (!flow->setup.paths[p->bucket].is_unpacked_on_device || tb__member_is_exposed(flow, from));
    tb__peer_memory_release(p->memory);
    p->memory = NULL;
    p->map = NULL;
    c->is_done = true;
    p->left--;
    tb__leg_end_message(&flow->recv);
    if (!is_valid)
        return tb__fail(from->peer->is_lost ? TB_LOST : TB_CANCELLED, "%s withdrew bucket %zu of %s while it was read",
                        from->peer->label, p->bucket, flow->what);
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_TAKEN, flow->recv.attempt);
    tb__pack_u64(&pack, c->tag);
    tb__flow_send_message(flow, from, &pack);
    return TB_OK;
}

tb_status tb__staged_bucket_check(const staged_bucket *p) {
    const tb__flow *flow = p->flow;
    const bucket_message *failed = NULL;
    if (p->status == TB_OK)
        return TB_OK;
    for (size_t i = 0; i < p->nmessages; i++) {
        if (p->messages[i].is_done && p->messages[i].op.status != TB_OK)
            failed = &p->messages[i];
    }
    return tb__fail(p->status, "bucket %zu of %s could not be %s %s: %s", p->bucket, flow->what,
                    failed && failed->op.kind == TB_OP_SEND ? "sent to" : "received from",
                    failed ? flow->members[failed->member].peer->label : "a rank",
                    failed ? tb__op_why(&failed->op) : tb_status_string(p->status));
}

/* Returns whether one of them may still access the bucket's memory. */
static bool cancel_messages(staged_bucket *p) {
    bool is_held = false;
    for (size_t i = 0; i < p->nmessages; i++) {
        bucket_message *c = &p->messages[i];
        if (!c->is_posted || c->is_done)
            continue;
        tb__transport_cancel(c->op.comm ? p->flow->o.comm->transport : p->flow->members[c->member].peer->transport,
                             &c->op);
        is_held |= c->op.status == TB_TIMEOUT;
    }
    return is_held;
}

static void drop_buckets(tb__flow *flow, bool is_send) {
    for (staged_bucket **at = &flow->staged.buckets, *p; (p = *at);) {
        if (p->is_send != is_send) {
            at = &p->next;
            continue;
        }
        bool is_held = cancel_messages(p);
        *at = p->next;
        free_bucket(p, is_held);
    }
    for (size_t i = 0; flow->setup.ir && flow->setup.lanes && is_send && i < flow->setup.ir->nchannels; i++)
        flow->setup.lanes[i].staged_lane.in_flight = 0;
}

const tb__flow_tensor *tb__staged_find_held(const tb__flow *flow, uintptr_t first, uintptr_t last) {
    const tb_ir *ir = flow->setup.ir;
    uintptr_t from, to;
    for (const staged_bucket *p = flow->staged.held; p; p = p->next) {
        const tb_bucket *bucket = &ir->buckets[p->bucket];
        for (size_t i = 0; p->pieces && i < bucket->nentries; i++) {
            const tb__flow_tensor *t = &flow->tensors[ir->chunks[ir->entries[bucket->first_entry + i].chunk].tensor];
            if (tb__binding_span(p->is_send ? &t->src : &t->dst, &from, &to) == TB_OK && from < last && first < to)
                return t;
        }
    }
    return NULL;
}

void tb__staged_close(tb__flow *flow, bool is_send) {
    drop_buckets(flow, is_send);
    while (!is_send && flow->staged.stash.count > 0) {
        stashed s = flow->staged.stash.item[--flow->staged.stash.count];
        tb__flow_unstage(flow, POOL_STASH, s.buffer, s.nbytes);
    }
    while (!is_send && flow->staged.last.count > 0) {
        stashed s = flow->staged.last.item[--flow->staged.last.count];
        tb__flow_unstage(flow, POOL_STASH, s.buffer, s.nbytes);
    }
}

tb_status tb__staged_init(tb__flow *flow) {
    for (int p = 0; p < POOL_STASH; p++)
        flow->staged.pool_size[p] = flow->o.own_staging_bytes / 4;
    flow->staged.is_taken = tb__calloc(flow->setup.ir->nbuckets, sizeof *flow->staged.is_taken);
    return flow->staged.is_taken ? TB_OK : TB_NO_MEMORY;
}

void tb__staged_fini(tb__flow *flow) {
    tb__staged_close(flow, true);
    tb__staged_close(flow, false);
    tb__staged_drop_announcements(flow, 0, UINT64_MAX);
    tb__staged_free_device_stages(flow);
    free(flow->staged.announcements.item);
    free(flow->staged.stash.item);
    free(flow->staged.last.item);
    free(flow->staged.is_taken);
}

static bool is_outgoing(const staged_bucket *p, size_t i) {
    return p->kind == STAGED_OUT || (p->kind == STAGED_IN && i > 0);
}

void tb__staged_drop_sends(tb__flow *flow, const member *to) {
    for (staged_bucket *p = flow->staged.buckets; p; p = p->next) {
        for (size_t i = 0; p->is_announced && i < p->nmessages; i++) {
            bucket_message *c = &p->messages[i];
            if (!is_outgoing(p, i) || c->is_posted || c->is_done || &flow->members[c->member] != to)
                continue;
            c->is_done = true;
            p->left--;
        }
    }
}

/* ---- Messages --------------------------------------------------------------------------------------------------- */

void tb__staged_bucket_announce(staged_bucket *p) {
    tb__flow *flow = p->flow;
    const tb_chunk *first = tb__flow_first_chunk(flow, p->bucket);
    if (tb__staged_bucket_begin_sum(p))
        return;
    uint64_t sum = p->kind == STAGED_IN ? p->messages[0].sum : p->sum;
    bool is_on_device = tb__staged_find_device(flow, p->buffer);
    p->is_announced = true;
    if (p->is_send)
        tb__flow_tell_step(flow, p->bucket, TB_BUCKET_LAUNCHED);
    if (p->buffer && !p->lane->is_contributor) /* on failure the bucket is sent instead */
        (void)tb__region_get(flow->o.loop, p->buffer, p->nbytes, &p->region);
    for (size_t i = p->kind == STAGED_IN; i < p->nmessages; i++) {
        bucket_message *c = &p->messages[i];
        if (flow->members[c->member].is_gone) {
            c->is_done = true;
            p->left--;
            continue;
        }
        c->tag = tb__loop_new_tag(flow->o.loop);
        c->piece = (tb_piece){p->buffer, p->nbytes};
        tb__pack pack = {0};
        tb__flow_begin_message(flow, &pack, MESSAGE_BUCKET, tb__staged_bucket_leg(p)->attempt);
        tb__pack_u64(&pack, first->id);
        tb__pack_u32(&pack, first->part);
        tb__pack_u64(&pack, c->tag);
        tb__pack_u64(&pack, p->nbytes);
        tb__pack_u64(&pack, sum);
        tb__pack_u32(&pack, is_on_device);
        bool is_carried = is_on_device && tb__staged_carries(flow, &flow->members[c->member]);
        tb__flow_pack_key(&pack, flow, is_carried ? NULL : p->region, flow->members[c->member].peer);
        tb__flow_send_message(flow, &flow->members[c->member], &pack);
    }
}

/* The message announced to the member under this tag, and not asked for yet; NULL: its leg has ended. */
static bucket_message *find_announced(const tb__flow *flow, const member *to, uint64_t tag) {
    for (staged_bucket *p = flow->staged.buckets; p; p = p->next) {
        for (size_t i = p->kind == STAGED_IN; p->is_announced && i < p->nmessages; i++) {
            bucket_message *c = &p->messages[i];
            if (c->tag == tag && !c->is_posted && !c->is_done && &flow->members[c->member] == to)
                return c;
        }
    }
    return NULL;
}

bool tb__staged_on_go(tb__flow *flow, member *from, tb__unpack *message) {
    uint64_t tag = tb__unpack_u64(message);
    bucket_message *c = tb__unpack_is_done(message) ? find_announced(flow, from, tag) : NULL;
    if (c && tb__staged_find_device(flow, c->staged_bucket->buffer) && !tb__staged_carries(flow, from)) {
        tb__set_detail("it asks for bucket %zu, which it said that it could take from a device",
                       c->staged_bucket->bucket);
        return false;
    }
    if (c)
        post_message(c, TB_OP_SEND);
    return !message->failed;
}

bool tb__staged_on_taken(tb__flow *flow, const member *from, tb__unpack *message) {
    uint64_t tag = tb__unpack_u64(message);
    bucket_message *c = tb__unpack_is_done(message) ? find_announced(flow, from, tag) : NULL;
    if (c) {
        c->is_done = true;
        c->staged_bucket->left--;
    }
    return !message->failed;
}

bool tb__staged_on_bucket(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message) {
    uint64_t id = tb__unpack_u64(message);
    uint32_t part = tb__unpack_u32(message);
    announcement a = {.attempt = attempt, .member = (uint32_t)(from - flow->members)};
    a.tag = tb__unpack_u64(message);
    a.nbytes = tb__unpack_u64(message);
    a.sum = tb__unpack_u64(message);
    bool is_on_device = tb__unpack_u32(message) != 0;
    size_t key_nbytes;
    const void *key = tb__unpack_bytes(message, &key_nbytes);
    a.bucket =
        tb__unpack_is_done(message) && flow->setup.is_planned ? tb__flow_find_bucket(flow, id, part) : TB__NOWHERE;
    if (a.bucket == TB__NOWHERE)
        return false;
    const lane *l = tb__flow_lane(flow, a.bucket);
    const tb_bucket *bucket = &flow->setup.ir->buckets[a.bucket];
    int64_t nbytes = l->is_channel_source ? tb__flow_raw_size(flow, bucket) : bucket->total_bytes;
    bool is_from_sender = l->is_channel_source ? l->nsenders > 1 : l->is_target && l->parent == a.member;
    if (!is_from_sender || (int64_t)a.nbytes != nbytes) {
        tb__set_detail("it announces %zu bytes of bucket %zu, which has %" PRId64 " and comes from %s", a.nbytes,
                       a.bucket, nbytes, is_from_sender ? "it" : "elsewhere");
        return false;
    }
    if (tb__flow_find_abort(flow, attempt))
        return true;
    a.is_on_device = is_on_device && flow->setup.paths[a.bucket].is_unpacked_on_device && !from->setup.stage;
    bool is_known = !l->is_channel_source && attempt == flow->recv.attempt && flow->staged.is_taken[a.bucket];
    for (size_t i = 0; i < flow->staged.announcements.count && !is_known; i++) {
        const announcement *other = &flow->staged.announcements.item[i];
        is_known = other->bucket == a.bucket && other->member == a.member && other->attempt == attempt;
    }
    if (is_known) {
        tb__set_detail("it announces bucket %zu twice", a.bucket);
        return false;
    }
    /* Buckets that are combined, relayed or stashed need a buffer of this rank. */
    if (!l->is_channel_source && l->nchildren == 0 && !l->is_stashed)
        a.map = tb__member_map(from, key, key_nbytes, a.nbytes, &flow->setup.paths[a.bucket], &a.memory);
    if (!tb__vec_push(&flow->staged.announcements, a)) {
        tb__peer_memory_release(a.memory);
        tb__flow_fail_no_memory(flow, from);
    }
    return true;
}

void tb__staged_drop_announcements(tb__flow *flow, uint64_t first, uint64_t last) {
    size_t kept = 0;
    for (size_t i = 0; i < flow->staged.announcements.count; i++) {
        const announcement *a = &flow->staged.announcements.item[i];
        if (a->attempt >= first && a->attempt <= last)
            tb__peer_memory_release(a->memory);
        else
            flow->staged.announcements.item[kept++] = *a;
    }
    flow->staged.announcements.count = kept;
}

void tb__staged_drop_revoked(tb__flow *flow) {
    size_t kept = 0;
    for (size_t i = 0; i < flow->staged.announcements.count; i++) {
        const announcement *a = &flow->staged.announcements.item[i];
        if (a->memory && tb__peer_memory_is_revoked(a->memory))
            tb__peer_memory_release(a->memory);
        else
            flow->staged.announcements.item[kept++] = *a;
    }
    flow->staged.announcements.count = kept;
}

void tb__staged_forget(tb__flow *flow, size_t at) {
    memmove(flow->staged.announcements.item + at, flow->staged.announcements.item + at + 1,
            (--flow->staged.announcements.count - at) * sizeof *flow->staged.announcements.item);
}
