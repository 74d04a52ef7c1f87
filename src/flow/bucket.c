/* Parcels: buckets that go as messages. One is announced to those who want it, and sent to each when it asks for it.
 * Nobody asks before it has memory for it, and what was announced is complete; so memory that is in use for receiving
 * always becomes free again. A rank that hands a bucket on keeps it until all have it to whom it does; these have
 * higher ranks, so that the last of them waits for nobody. */
#include "flow/flow_inside.h"

#include <inttypes.h>
#include <string.h>

lane *tb__flow_lane(tb__flow *flow, size_t bucket) {
    return &flow->lanes[flow->ir->buckets[bucket].channel];
}

const tb_chunk *tb__flow_first_chunk(const tb__flow *flow, size_t bucket) {
    return &flow->ir->chunks[flow->ir->entries[flow->ir->buckets[bucket].first_entry].chunk];
}

size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part) {
    size_t probe = 0, at;
    while ((at = tb__index_next(&flow->by_bucket, tb__hash(id, part), &probe)) != TB__NOWHERE) {
        const tb_chunk *first = tb__flow_first_chunk(flow, at);
        if (first->id == id && first->part == part)
            return at;
    }
    return TB__NOWHERE;
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

bool tb__flow_has_room(const tb__flow *flow, pool which, size_t nbytes) {
    /* Something always fits: alignment may make a bucket a few bytes longer than it was cut to be. */
    return flow->pool_used[which] == 0 || flow->pool_used[which] + (int64_t)nbytes <= flow->pool_size[which];
}

void *tb__flow_stage(tb__flow *flow, pool which, size_t nbytes) {
    void *buffer;
    if (tb_alloc(nbytes, &buffer) != TB_OK)
        return NULL;
    flow->pool_used[which] += (int64_t)nbytes;
    flow->staged += (int64_t)nbytes;
    if (flow->staged > flow->staged_most)
        flow->staged_most = flow->staged;
    return buffer;
}

void tb__flow_unstage(tb__flow *flow, pool which, void *buffer, size_t nbytes) {
    if (!buffer)
        return;
    tb_free(buffer);
    flow->pool_used[which] -= (int64_t)nbytes;
    flow->staged -= (int64_t)nbytes;
}

/* ---- Parcels --------------------------------------------------------------------------------------------------- */

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
                         .next = flow->staged_buckets};
    for (size_t i = 0; i < nmessages; i++)
        p->messages[i].staged_bucket = p;
    flow->staged_buckets = p;
    return p;
}

void tb__staged_bucket_destroy(staged_bucket *p) {
    tb__flow *flow = p->flow;
    for (staged_bucket **at = &flow->staged_buckets; *at; at = &(*at)->next) {
        if (*at == p) {
            *at = p->next;
            break;
        }
    }
    tb__flow_unstage(flow, p->pool, p->buffer, p->nbytes);
    tb__flow_unstage(flow, p->output_pool, p->output, p->output_nbytes);
    flow->nrelays -= p->kind == STAGED_IN && p->nmessages > 1;
    free(p->pieces);
    free(p);
}

tb__leg *tb__staged_bucket_leg(const staged_bucket *p) {
    return p->is_send ? &p->flow->send : &p->flow->recv;
}

static void on_courier(tb_op *op) {
    bucket_message *c = op->arg;
    staged_bucket *p = c->staged_bucket;
    c->is_done = true;
    p->left--;
    tb__staged_bucket_leg(p)->in_flight--;
    tb__leg_idle(tb__staged_bucket_leg(p));
    bool is_short = op->kind == TB_OP_RECV && op->nbytes != c->piece.nbytes;
    bool is_to_lost = op->kind == TB_OP_SEND && op->status == TB_LOST; /* whether it is needed is another question */
    if (p->status == TB_OK && !is_to_lost)
        p->status = op->status == TB_OK && is_short ? TB_INVALID : op->status;
    tb__loop_wake(p->flow->o.loop);
}

static void post(bucket_message *c, tb_op_kind kind) {
    tb__flow *flow = c->staged_bucket->flow;
    const member *m = &flow->members[c->member];
    c->op = (tb_op){.kind = kind,
                    .peer = m->peer->wire,
                    .tag = c->tag,
                    .pieces = c->staged_bucket->pieces ? c->staged_bucket->pieces : &c->piece,
                    .npieces = c->staged_bucket->pieces ? c->staged_bucket->npieces : 1,
                    .is_expected = kind == TB_OP_SEND, /* whoever says GO has posted the receive before */
                    .done = on_courier,
                    .arg = c};
    c->is_posted = true;
    tb__staged_bucket_leg(c->staged_bucket)->in_flight++;
    tb__leg_idle(tb__staged_bucket_leg(c->staged_bucket));
    tb_status status = tb__peer_post(m->peer, &c->op);
    if (status != TB_OK) {
        c->op.status = status;
        on_courier(&c->op);
    }
}

void tb__bucket_message_ask(bucket_message *c, const announcement *a) {
    tb__flow *flow = c->staged_bucket->flow;
    c->member = a->member;
    c->tag = a->tag;
    c->sum = a->sum;
    post(c, TB_OP_RECV);
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_GO, a->attempt);
    tb__pack_u64(&pack, a->tag);
    tb__flow_send_message(flow, &flow->members[a->member], &pack);
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
                    failed ? flow->members[failed->member].peer->label : "a rank", tb_status_string(p->status));
}

void tb__flow_drop_staged(tb__flow *flow, bool is_send) {
    for (staged_bucket *p = flow->staged_buckets, *next; p; p = next) {
        next = p->next;
        if (p->is_send != is_send)
            continue;
        for (size_t i = 0; i < p->nmessages; i++) {
            bucket_message *c = &p->messages[i];
            const tb__peer *peer = flow->members[c->member].peer;
            if (!c->is_posted || c->is_done)
                continue;
            tb__transport_cancel(peer->transport, &c->op);
            if (c->op.status == TB_TIMEOUT && p->pieces)
                flow->held_by = &flow->members[c->member];
        }
        tb__staged_bucket_destroy(p);
    }
    for (size_t i = 0; flow->ir && flow->lanes && is_send && i < flow->ir->nchannels; i++)
        flow->lanes[i].in_flight = 0;
}

static bool is_outgoing(const staged_bucket *p, size_t i) {
    return p->kind == STAGED_OUT || (p->kind == STAGED_IN && i > 0);
}

void tb__flow_drop_sends(tb__flow *flow, const member *to) {
    for (staged_bucket *p = flow->staged_buckets; p; p = p->next) {
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
    p->is_announced = true;
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
        tb__flow_send_message(flow, &flow->members[c->member], &pack);
    }
}

bool tb__flow_on_go(tb__flow *flow, member *from, tb__unpack *message) {
    uint64_t tag = tb__unpack_u64(message);
    if (!tb__unpack_is_done(message))
        return false;
    for (staged_bucket *p = flow->staged_buckets; p; p = p->next) {
        for (size_t i = p->kind == STAGED_IN; p->is_announced && i < p->nmessages; i++) {
            bucket_message *c = &p->messages[i];
            if (c->tag == tag && !c->is_posted && &flow->members[c->member] == from) {
                post(c, TB_OP_SEND);
                return true;
            }
        }
    }
    return true; /* it was given up */
}

bool tb__flow_on_bucket(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message) {
    uint64_t id = tb__unpack_u64(message);
    uint32_t part = tb__unpack_u32(message);
    announcement a = {.attempt = attempt, .member = (uint32_t)(from - flow->members)};
    a.tag = tb__unpack_u64(message);
    a.nbytes = tb__unpack_u64(message);
    a.sum = tb__unpack_u64(message);
    a.bucket = tb__unpack_is_done(message) && flow->is_planned ? tb__flow_find_bucket(flow, id, part) : TB__NOWHERE;
    if (a.bucket == TB__NOWHERE)
        return false;
    const lane *l = tb__flow_lane(flow, a.bucket);
    const tb_bucket *bucket = &flow->ir->buckets[a.bucket];
    int64_t nbytes = l->is_shipper ? tb__flow_raw_size(flow, bucket) : bucket->total_bytes;
    bool makes_sense = l->is_shipper ? l->nsenders > 1 : l->is_target && l->parent == a.member;
    if (!makes_sense || (int64_t)a.nbytes != nbytes) {
        tb__set_detail("it announces %zu bytes of bucket %zu, which has %" PRId64 " and comes from %s", a.nbytes,
                       a.bucket, nbytes, makes_sense ? "it" : "elsewhere");
        return false;
    }
    if (tb__flow_find_abort(flow, attempt))
        return true;
    bool is_known = !l->is_shipper && attempt == flow->recv.attempt && flow->is_taken[a.bucket];
    for (size_t i = 0; i < flow->announcements.count && !is_known; i++) {
        const announcement *other = &flow->announcements.item[i];
        is_known = other->bucket == a.bucket && other->member == a.member && other->attempt == attempt;
    }
    if (is_known) {
        tb__set_detail("it announces bucket %zu twice", a.bucket);
        return false;
    }
    if (!tb__vec_push(&flow->announcements, a))
        tb__flow_no_room(flow, from);
    return true;
}

void tb__flow_forget_bucket(tb__flow *flow, size_t at) {
    memmove(flow->announcements.item + at, flow->announcements.item + at + 1,
            (--flow->announcements.count - at) * sizeof *flow->announcements.item);
}
