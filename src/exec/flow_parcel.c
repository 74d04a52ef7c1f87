/* Staged buckets. A bucket is packed, announced to those who want it, sent to each when it asks for it, and unpacked
 * there. Nobody asks before it has memory for it, and what was announced is complete; so memory that is in use for
 * receiving always becomes free again.
 *
 * Reductions need the contributions of several ranks at once. All ranks pack contributions, and begin reductions, in
 * one order: that of buckets by group, then id. So the first unfinished reduction has its contributions packed or about
 * to be, and memory at the rank that combines them: it never waits for a later one. */
#include "exec/flow_inside.h"

#include <inttypes.h>
#include <string.h>

lane *tb__flow_lane(tb__flow *flow, size_t bucket) {
    return &flow->lanes[flow->ir->buckets[bucket].channel];
}

static const tb_chunk *first_chunk(const tb__flow *flow, size_t bucket) {
    return &flow->ir->chunks[flow->ir->entries[flow->ir->buckets[bucket].first_entry].chunk];
}

size_t tb__flow_find_bucket(const tb__flow *flow, uint64_t id, uint32_t part) {
    size_t probe = 0, at;
    while ((at = tb__index_next(&flow->by_bucket, tb__hash(id, part), &probe)) != TB__NOWHERE) {
        const tb_chunk *first = first_chunk(flow, at);
        if (first->id == id && first->part == part)
            return at;
    }
    return TB__NOWHERE;
}

/* The order of reductions: the same on every rank. */
static bool is_before(const tb__flow *flow, size_t a, size_t b) {
    const tb_chunk *x = first_chunk(flow, a), *y = first_chunk(flow, b);
    uint32_t gx = flow->ir->buckets[a].group, gy = flow->ir->buckets[b].group;
    if (gx != gy)
        return gx < gy;
    return x->id != y->id ? x->id < y->id : x->part < y->part;
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

static parcel *new_parcel(tb__flow *flow, lane *l, size_t bucket, bool is_send, size_t ncouriers) {
    parcel *p = tb__calloc(1, sizeof *p + ncouriers * sizeof *p->couriers);
    if (!p)
        return NULL;
    *p = (parcel){.flow = flow,
                  .lane = l,
                  .bucket = bucket,
                  .is_send = is_send,
                  .left = ncouriers,
                  .ncouriers = ncouriers,
                  .next = flow->parcels};
    for (size_t i = 0; i < ncouriers; i++)
        p->couriers[i].parcel = p;
    flow->parcels = p;
    return p;
}

static void free_parcel(parcel *p) {
    tb__flow *flow = p->flow;
    for (parcel **at = &flow->parcels; *at; at = &(*at)->next) {
        if (*at == p) {
            *at = p->next;
            break;
        }
    }
    tb__flow_unstage(flow, p->pool, p->buffer, p->nbytes);
    tb__flow_unstage(flow, p->output_pool, p->output, p->output_nbytes);
    free(p);
}

static tb__leg *leg_of(const parcel *p) {
    return p->is_send ? &p->flow->send : &p->flow->recv;
}

static void on_courier(tb_op *op) {
    courier *c = op->arg;
    parcel *p = c->parcel;
    c->is_done = true;
    p->left--;
    leg_of(p)->in_flight--;
    tb__leg_idle(leg_of(p));
    if (op->status != TB_OK && p->status == TB_OK)
        p->status = op->status;
    else if (op->kind == TB_OP_RECV && op->nbytes != c->piece.nbytes)
        p->status = TB_INVALID;
    tb__engine_wake(p->flow->o.engine);
}

static void post(courier *c, tb_op_kind kind) {
    tb__flow *flow = c->parcel->flow;
    const member *m = &flow->members[c->member];
    c->op = (tb_op){.kind = kind,
                    .peer = m->peer->wire,
                    .tag = c->tag,
                    .pieces = &c->piece,
                    .npieces = 1,
                    .done = on_courier,
                    .arg = c};
    c->is_posted = true;
    leg_of(c->parcel)->in_flight++;
    tb__leg_idle(leg_of(c->parcel));
    tb_status status = tb__transport_post(m->peer->transport, &c->op);
    if (status != TB_OK) {
        c->op.status = status;
        on_courier(&c->op);
    }
}

/* Takes what was announced: the receive is there before the sender hears that it may send. */
static void ask_for(courier *c, const announcement *a) {
    tb__flow *flow = c->parcel->flow;
    c->member = a->member;
    c->tag = a->tag;
    c->sum = a->sum;
    post(c, TB_OP_RECV);
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_GO, a->attempt);
    tb__pack_u64(&pack, a->tag);
    tb__flow_send_message(flow, &flow->members[a->member], &pack);
}

static tb_status check_parcel(const parcel *p) {
    const tb__flow *flow = p->flow;
    const char *who = "a rank";
    for (size_t i = 0; i < p->ncouriers && p->status != TB_OK; i++) {
        if (p->couriers[i].is_done && p->couriers[i].op.status != TB_OK)
            who = flow->members[p->couriers[i].member].peer->label;
    }
    return p->status == TB_OK
               ? TB_OK
               : tb__fail(p->status, "bucket %zu of %s could not be %s %s: %s", p->bucket, flow->what,
                          p->kind == PARCEL_OUT ? "sent to" : "received from", who, tb_status_string(p->status));
}

void tb__flow_drop_parcels(tb__flow *flow, bool is_send) {
    for (parcel *p = flow->parcels, *next; p; p = next) {
        next = p->next;
        if (p->is_send != is_send)
            continue;
        for (size_t i = 0; i < p->ncouriers; i++) {
            courier *c = &p->couriers[i];
            if (c->is_posted && !c->is_done)
                tb__transport_cancel(flow->members[c->member].peer->transport, &c->op);
        }
        free_parcel(p);
    }
    for (size_t i = 0; flow->ir && flow->lanes && is_send && i < flow->ir->nchannels; i++)
        flow->lanes[i].in_flight = 0;
}

/* ---- Out ------------------------------------------------------------------------------------------------------- */

static tb_status announce(parcel *p) {
    tb__flow *flow = p->flow;
    const tb_chunk *first = first_chunk(flow, p->bucket);
    uint64_t sum = tb__flow_sum(flow, p->buffer, p->nbytes);
    for (size_t i = 0; i < p->ncouriers; i++) {
        courier *c = &p->couriers[i];
        c->tag = tb__engine_new_tag(flow->o.engine);
        c->piece = (tb_piece){p->buffer, p->nbytes};
        tb__pack pack = {0};
        tb__flow_begin_message(flow, &pack, MESSAGE_BUCKET, flow->send.attempt);
        tb__pack_u64(&pack, first->id);
        tb__pack_u32(&pack, first->part);
        tb__pack_u64(&pack, c->tag);
        tb__pack_u64(&pack, p->nbytes);
        tb__pack_u64(&pack, sum);
        tb__flow_send_message(flow, &flow->members[c->member], &pack);
    }
    return TB_OK;
}

/* A bucket that goes to all who want it staged. */
static parcel *new_outgoing(tb__flow *flow, lane *l, size_t bucket) {
    parcel *p = new_parcel(flow, l, bucket, true, l->nstaged);
    for (uint32_t i = 0; p && i < l->nstaged; i++)
        p->couriers[i].member = l->staged[i];
    if (p)
        p->kind = PARCEL_OUT;
    return p;
}

static size_t next_to_send(const lane *l) {
    return l->channel->first_bucket + l->to_send;
}

static bool can_send(const lane *l) {
    return l->nstaged && l->to_send < l->channel->nbuckets && l->in_flight < l->channel->max_in_flight;
}

static size_t packed_size(const tb__flow *flow, const lane *l, size_t bucket) {
    const tb_bucket *b = &flow->ir->buckets[bucket];
    return (size_t)(l->is_contributor ? tb__flow_raw_size(flow, b) : b->total_bytes);
}

/* Contributions, and what is not reduced. */
static bool packs(const lane *l) {
    return l->nstaged && (l->is_contributor || (l->is_shipper && !l->is_target && l->nfeeders == 1));
}

void tb__flow_open_out(tb__flow *flow) {
    flow->largest_out = 0;
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        for (size_t j = 0; packs(l) && j < l->channel->nbuckets; j++) {
            int64_t nbytes = (int64_t)packed_size(flow, l, l->channel->first_bucket + j);
            flow->largest_out = nbytes > flow->largest_out ? nbytes : flow->largest_out;
        }
    }
}

static uint32_t next_group(const tb__flow *flow, const lane *l) {
    return flow->ir->buckets[next_to_send(l)].group;
}

/* Receivers may hold back a group until those before it have arrived. So it must not take the room that these need. */
static bool can_pack(const tb__flow *flow, const lane *l, uint32_t lowest) {
    if (!can_send(l))
        return false;
    size_t nbytes = packed_size(flow, l, next_to_send(l));
    return next_group(flow, l) == lowest
               ? tb__flow_has_room(flow, POOL_SEND, nbytes)
               : flow->pool_used[POOL_SEND] + (int64_t)nbytes + flow->largest_out <= flow->pool_size[POOL_SEND];
}

/* The lane whose bucket is packed next: contributions in their order; others as they come round, lower groups first. */
static lane *choose_out(tb__flow *flow) {
    lane *contribution = NULL, *plain = NULL;
    size_t n = flow->ir->nchannels;
    uint32_t lowest = UINT32_MAX;
    for (size_t i = 0; i < n; i++) {
        const lane *l = &flow->lanes[i];
        if (packs(l) && l->to_send < l->channel->nbuckets && next_group(flow, l) < lowest)
            lowest = next_group(flow, l);
    }
    for (size_t i = 0; i < n; i++) {
        lane *l = &flow->lanes[(flow->next_lane_out + i) % n];
        if (!packs(l) || l->to_send == l->channel->nbuckets)
            continue;
        if (l->is_contributor && (!contribution || is_before(flow, next_to_send(l), next_to_send(contribution))))
            contribution = l;
        if (!l->is_contributor && can_pack(flow, l, lowest) &&
            (!plain || next_group(flow, l) < next_group(flow, plain)))
            plain = l;
    }
    return contribution && can_pack(flow, contribution, lowest) ? contribution : plain;
}

static tb_status pack_bucket(tb__flow *flow, lane *l) {
    size_t index = next_to_send(l), nbytes = packed_size(flow, l, index);
    parcel *p = l->is_contributor ? new_parcel(flow, l, index, true, 1) : new_outgoing(flow, l, index);
    if (!p)
        return TB_NO_MEMORY;
    if (l->is_contributor)
        p->couriers[0].member = l->shipper;
    p->kind = PARCEL_OUT;
    p->pool = POOL_SEND;
    p->nbytes = nbytes;
    p->buffer = tb__flow_stage(flow, POOL_SEND, nbytes);
    if (!p->buffer) {
        free_parcel(p);
        return TB_NO_MEMORY;
    }
    l->to_send++;
    l->in_flight++;
    end from = {.kind = END_SOURCE}, to = {.kind = l->is_contributor ? END_RAW : END_BUCKET, .buffer = p->buffer};
    tb__phases_enter(flow->send.phases, TB_PHASE_PACK);
    tb_status status = tb__flow_copy(flow, true, &flow->ir->buckets[index], &from, 1, to, false);
    tb__leg_idle(&flow->send);
    return status == TB_OK ? announce(p) : status;
}

bool tb__flow_step_out(tb__flow *flow) {
    tb_status status = TB_OK;
    bool did = false;
    for (parcel *p = flow->parcels, *next; p && status == TB_OK; p = next) {
        next = p->next;
        if (!p->is_send || p->kind != PARCEL_OUT)
            continue;
        status = check_parcel(p);
        if (status == TB_OK && p->left == 0) {
            p->lane->in_flight--;
            flow->sends_left--;
            free_parcel(p);
            did = true;
        }
    }
    lane *l = status == TB_OK && flow->sends_left > 0 ? choose_out(flow) : NULL;
    if (l) {
        flow->next_lane_out = (uint32_t)((size_t)(l - flow->lanes + 1) % flow->ir->nchannels);
        status = pack_bucket(flow, l);
        did = true;
    }
    if (status != TB_OK)
        tb__flow_doubt(flow, true, status);
    return did || status != TB_OK;
}

bool tb__flow_on_go(tb__flow *flow, member *from, tb__unpack *message) {
    uint64_t tag = tb__unpack_u64(message);
    if (!tb__unpack_is_done(message))
        return false;
    for (parcel *p = flow->parcels; p; p = p->next) {
        for (size_t i = 0; p->kind == PARCEL_OUT && i < p->ncouriers; i++) {
            courier *c = &p->couriers[i];
            if (c->tag == tag && !c->is_posted && &flow->members[c->member] == from) {
                post(c, TB_OP_SEND);
                return true;
            }
        }
    }
    return true; /* it was given up */
}

/* ---- In -------------------------------------------------------------------------------------------------------- */

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
    bool makes_sense = l->is_shipper ? l->nfeeders > 1 : l->is_target && l->shipper == a.member;
    return makes_sense && (int64_t)a.nbytes == nbytes && tb__vec_push(&flow->announcements, a);
}

static void forget(tb__flow *flow, size_t at) {
    memmove(flow->announcements.item + at, flow->announcements.item + at + 1,
            (--flow->announcements.count - at) * sizeof *flow->announcements.item);
}

static tb_status accept(tb__flow *flow, const announcement *a, lane *l) {
    parcel *p = new_parcel(flow, l, a->bucket, false, 1);
    if (!p)
        return TB_NO_MEMORY;
    p->kind = PARCEL_IN;
    p->pool = l->is_flagged ? POOL_STASH : POOL_RECEIVE;
    p->nbytes = a->nbytes;
    p->buffer = tb__flow_stage(flow, p->pool, p->nbytes);
    if (!p->buffer) {
        free_parcel(p);
        return TB_NO_MEMORY;
    }
    p->couriers[0].piece = (tb_piece){p->buffer, p->nbytes};
    ask_for(&p->couriers[0], a);
    return TB_OK;
}

/* Asks for announced buckets while there is memory for them. */
static tb_status accept_all(tb__flow *flow, bool *did) {
    for (size_t i = 0; i < flow->announcements.count;) {
        announcement a = flow->announcements.item[i];
        lane *l = tb__flow_lane(flow, a.bucket);
        if (a.attempt != flow->recv.attempt || l->is_shipper ||
            !tb__flow_admits(flow, l, &flow->ir->buckets[a.bucket]) ||
            !tb__flow_has_room(flow, l->is_flagged ? POOL_STASH : POOL_RECEIVE, a.nbytes)) {
            i++;
            continue;
        }
        forget(flow, i);
        *did = true;
        TB_TRY(accept(flow, &a, l));
    }
    return TB_OK;
}

static tb_status unpack_bucket(tb__flow *flow, parcel *p) {
    lane *l = p->lane;
    size_t index = p->bucket;
    tb_status status = tb__flow_check_sums(p);
    if (status != TB_OK) {
        free_parcel(p);
        return status;
    }
    if (l->is_flagged) {
        status = tb__flow_put_aside(flow, l, index, p->buffer, p->nbytes);
        if (status == TB_OK)
            p->buffer = NULL;
    } else {
        end from = {.kind = END_BUCKET, .buffer = p->buffer};
        tb__phases_enter(flow->recv.phases, TB_PHASE_UNPACK);
        status = tb__flow_copy(flow, false, &flow->ir->buckets[index], &from, 1, (end){.kind = END_TARGET}, true);
        tb__leg_idle(&flow->recv);
        if (status == TB_OK)
            status = tb__flow_bucket_arrived(flow, l, index);
    }
    free_parcel(p);
    return status;
}

bool tb__flow_step_in(tb__flow *flow) {
    bool did = false;
    tb_status status = accept_all(flow, &did);
    for (parcel *p = flow->parcels; p && status == TB_OK; p = p->next) {
        if (p->kind != PARCEL_IN)
            continue;
        status = check_parcel(p);
        if (status == TB_OK && p->left == 0 && (p->lane->is_flagged || tb__flow_may_write(flow))) {
            status = unpack_bucket(flow, p);
            did = true;
            break;
        }
    }
    if (status != TB_OK) {
        tb__flow_doubt(flow, false, status);
        return true;
    }
    return did;
}

/* ---- Reductions ------------------------------------------------------------------------------------------------ */

static bool reduces(const lane *l, bool is_send) {
    return l->is_shipper && l->nfeeders > 1 &&
           (is_send ? l->nstaged && !l->is_target : l->is_target && l->takes_staged);
}

static size_t *position(lane *l, bool is_send) {
    return is_send ? &l->to_send : &l->to_take;
}

static lane *choose_reduction(tb__flow *flow, bool is_send) {
    lane *best = NULL;
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        lane *l = &flow->lanes[i];
        size_t at = *position(l, is_send);
        if (reduces(l, is_send) && at < l->channel->nbuckets &&
            (!best ||
             is_before(flow, l->channel->first_bucket + at, best->channel->first_bucket + *position(best, is_send))))
            best = l;
    }
    return best;
}

/* Memory for all contributions to a bucket, and for what becomes of them. */
static tb_status begin_reduction(tb__flow *flow, lane *l, bool is_send, bool *did) {
    size_t index = l->channel->first_bucket + *position(l, is_send);
    const tb_bucket *bucket = &flow->ir->buckets[index];
    pool from = is_send ? POOL_REDUCE : POOL_COMBINE, to = is_send ? POOL_REDUCE : POOL_STASH;
    size_t raw = (size_t)tb__flow_raw_size(flow, bucket), inputs = raw * (l->nfeeders - 1);
    size_t output = is_send || l->is_flagged ? (size_t)bucket->total_bytes : 0;
    bool fits = from == to ? tb__flow_has_room(flow, from, inputs + output)
                           : tb__flow_has_room(flow, from, inputs) && tb__flow_has_room(flow, to, output);
    if (!fits || (is_send && l->in_flight >= l->channel->max_in_flight) ||
        (!is_send && (flow->members[flow->self].ready != flow->recv.attempt || !tb__flow_admits(flow, l, bucket))))
        return TB_OK;
    parcel *p = new_parcel(flow, l, index, is_send, l->nfeeders - 1);
    if (!p)
        return TB_NO_MEMORY;
    *did = true;
    p->kind = PARCEL_REDUCE;
    p->pool = from;
    p->nbytes = inputs;
    p->buffer = tb__flow_stage(flow, from, inputs);
    p->output_pool = to;
    p->output_nbytes = output;
    p->output = output ? tb__flow_stage(flow, to, output) : NULL;
    if (!p->buffer || (output && !p->output)) {
        free_parcel(p);
        return TB_NO_MEMORY;
    }
    ++*position(l, is_send);
    l->in_flight += is_send;
    for (uint32_t i = 0, j = 0; i < l->nfeeders; i++) {
        if (l->feeders[i] == flow->self)
            continue;
        p->couriers[j].member = l->feeders[i];
        p->couriers[j].piece = (tb_piece){p->buffer + j * raw, raw};
        j++;
    }
    return TB_OK;
}

/* Asks for the contributions that were announced. */
static bool ask_for_inputs(parcel *p) {
    tb__flow *flow = p->flow;
    uint64_t attempt = leg_of(p)->attempt;
    bool did = false;
    for (size_t i = 0; i < p->ncouriers; i++) {
        courier *c = &p->couriers[i];
        for (size_t j = 0; !c->is_posted && j < flow->announcements.count; j++) {
            announcement a = flow->announcements.item[j];
            if (a.attempt != attempt || a.bucket != p->bucket || a.member != c->member)
                continue;
            forget(flow, j);
            ask_for(c, &a);
            did = true;
        }
    }
    return did;
}

/* The contributions become a bucket to be shipped or put aside, or this rank's tensors. */
static tb_status combine(parcel *p) {
    tb__flow *flow = p->flow;
    lane *l = p->lane;
    size_t index = p->bucket;
    tb__leg *leg = leg_of(p);
    TB_TRY(tb__flow_check_sums(p));
    end *from = tb__malloc(l->nfeeders, sizeof *from);
    if (!from)
        return TB_NO_MEMORY;
    for (uint32_t i = 0, j = 0; i < l->nfeeders; i++) {
        if (l->feeders[i] == flow->self)
            from[i] = (end){.kind = END_SOURCE};
        else
            from[i] = (end){.kind = END_RAW, .buffer = p->couriers[j++].piece.base};
    }
    end to = p->output ? (end){.kind = END_BUCKET, .buffer = p->output} : (end){.kind = END_TARGET};
    tb__phases_enter(leg->phases, p->is_send ? TB_PHASE_PACK : TB_PHASE_UNPACK);
    tb_status status = tb__flow_copy(flow, p->is_send, &flow->ir->buckets[index], from, l->nfeeders, to, !p->output);
    tb__leg_idle(leg);
    free(from);
    if (status == TB_OK && p->is_send) {
        parcel *out = new_outgoing(flow, l, index);
        if (!out)
            return TB_NO_MEMORY;
        out->pool = p->output_pool;
        out->buffer = p->output;
        out->nbytes = p->output_nbytes;
        p->output = NULL;
        status = announce(out);
    } else if (status == TB_OK && p->output) {
        status = tb__flow_put_aside(flow, l, index, p->output, p->output_nbytes);
        if (status == TB_OK)
            p->output = NULL;
    } else if (status == TB_OK) {
        status = tb__flow_bucket_arrived(flow, l, index);
    }
    free_parcel(p);
    return status;
}

bool tb__flow_step_reduce(tb__flow *flow, bool is_send) {
    bool did = false;
    lane *l = choose_reduction(flow, is_send);
    tb_status status = l ? begin_reduction(flow, l, is_send, &did) : TB_OK;
    for (parcel *p = flow->parcels; p && status == TB_OK; p = p->next) {
        if (p->kind != PARCEL_REDUCE || p->is_send != is_send)
            continue;
        did |= ask_for_inputs(p);
        status = check_parcel(p);
        if (status == TB_OK && p->left == 0 && (p->output || tb__flow_may_write(flow))) {
            status = combine(p);
            did = true;
            break;
        }
    }
    if (status != TB_OK)
        tb__flow_doubt(flow, is_send, status);
    return did || status != TB_OK;
}
