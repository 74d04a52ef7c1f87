/* Reductions of staged buckets. A reduction needs the contributions of several ranks at once. All ranks pack
 * contributions, and begin reductions, in one order: by group, then id. So the contributions to the first unfinished
 * reduction are packed or next to be, and it has memory at the rank that combines them: it never waits for a later one.
 */
#include "flow/flow_inside.h"

bool tb__flow_is_before(const tb__flow *flow, size_t a, size_t b) {
    const tb_chunk *x = tb__flow_first_chunk(flow, a), *y = tb__flow_first_chunk(flow, b);
    uint32_t gx = flow->setup.ir->buckets[a].group, gy = flow->setup.ir->buckets[b].group;
    if (gx != gy)
        return gx < gy;
    return x->id != y->id ? x->id < y->id : x->part < y->part;
}

/* ---- Reductions ------------------------------------------------------------------------------------------------ */

static bool is_reduced_here(const lane *l, bool is_send) {
    return l->is_channel_source && l->nsenders > 1 &&
           (is_send ? l->nstaged && !l->is_target : l->is_target && l->takes_staged);
}

static size_t *next_bucket(lane *l, bool is_send) {
    return is_send ? &l->staged_lane.to_send : &l->staged_lane.to_combine;
}

static lane *choose_reduction(tb__flow *flow, bool is_send) {
    lane *best = NULL;
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        lane *l = &flow->setup.lanes[i];
        size_t at = *next_bucket(l, is_send);
        if (is_reduced_here(l, is_send) && at < l->channel->nbuckets &&
            (!best || tb__flow_is_before(flow, l->channel->first_bucket + at,
                                         best->channel->first_bucket + *next_bucket(best, is_send))))
            best = l;
    }
    return best;
}

/* Allocates memory for the contributions to a bucket and for the result. */
static tb_status begin_reduction(tb__flow *flow, lane *l, bool is_send, bool *did) {
    size_t index = l->channel->first_bucket + *next_bucket(l, is_send);
    const tb_bucket *bucket = &flow->setup.ir->buckets[index];
    pool from = is_send ? POOL_REDUCE : POOL_COMBINE, to = is_send ? POOL_REDUCE : POOL_STASH;
    size_t raw = (size_t)tb__flow_raw_size(flow, bucket), inputs = raw * (l->nsenders - 1);
    size_t output = is_send || l->is_stashed ? (size_t)bucket->total_bytes : 0;
    bool fits = from == to ? tb__flow_has_room(flow, from, inputs + output)
                           : tb__flow_has_room(flow, from, inputs) && tb__flow_has_room(flow, to, output);
    if (!fits || (is_send && l->staged_lane.in_flight >= l->channel->max_in_flight) ||
        (!is_send &&
         (flow->members[flow->self].direct.ready != flow->recv.attempt || !tb__flow_admits(flow, l, bucket))))
        return TB_OK;
    staged_bucket *p = tb__staged_bucket_create(flow, l, index, is_send, l->nsenders - 1);
    if (!p)
        return TB_NO_MEMORY;
    *did = true;
    p->kind = STAGED_REDUCE;
    p->pool = from;
    p->nbytes = inputs;
    p->buffer = tb__flow_stage(flow, from, inputs);
    p->output_pool = to;
    p->output_nbytes = output;
    p->output = output ? tb__flow_stage(flow, to, output) : NULL;
    if (!p->buffer || (output && !p->output)) {
        tb__staged_bucket_destroy(p);
        return TB_NO_MEMORY;
    }
    tb__flow_tell_step(flow, index, TB_BUCKET_PREPARED);
    ++*next_bucket(l, is_send);
    l->staged_lane.in_flight += is_send;
    for (uint32_t i = 0, j = 0; i < l->nsenders; i++) {
        if (l->senders[i] == flow->self)
            continue;
        p->messages[j].member = l->senders[i];
        p->messages[j].piece = (tb_piece){p->buffer + j * raw, raw};
        j++;
    }
    return TB_OK;
}

/* Asks for the contributions that were announced. */
static bool ask_for_inputs(staged_bucket *p) {
    tb__flow *flow = p->flow;
    uint64_t attempt = tb__staged_bucket_leg(p)->attempt;
    bool did = false;
    for (size_t i = 0; i < p->nmessages; i++) {
        bucket_message *c = &p->messages[i];
        for (size_t j = 0; !c->is_posted && j < flow->staged.announcements.count; j++) {
            announcement a = flow->staged.announcements.item[j];
            if (a.attempt != attempt || a.bucket != p->bucket || a.member != c->member)
                continue;
            tb__staged_forget(flow, j);
            tb__bucket_message_ask(c, &a);
            did = true;
        }
    }
    return did;
}

/* Sends, stashes or counts the result of a reduction. */
static tb_status use_output(staged_bucket *p) {
    tb__flow *flow = p->flow;
    if (p->is_send) {
        staged_bucket *out = tb__staged_bucket_create_out(flow, p->lane, p->bucket);
        if (!out)
            return TB_NO_MEMORY;
        out->pool = p->output_pool;
        out->buffer = p->output;
        out->nbytes = p->output_nbytes;
        p->output = NULL;
        tb__staged_bucket_announce(out);
        return TB_OK;
    }
    if (p->output) {
        TB_TRY(tb__staged_stash(flow, p->lane, p->bucket, p->output, p->output_nbytes));
        p->output = NULL;
        return TB_OK;
    }
    return tb__flow_bucket_arrived(flow, p->lane, p->bucket);
}

static void end_combine(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    staged_bucket *p = c->staged_bucket;
    bool is_send = p->is_send;
    if (tb__staged_bucket_leg(p)->is_ending)
        return;
    status = use_output(p);
    tb__staged_bucket_destroy(p);
    if (!is_send)
        tb__flow_end_step_recv(flow, status, tb_error_detail());
    else if (status != TB_OK)
        tb__flow_await_reason(flow, true, status, tb_error_detail());
}

/* Combines the contributions into a bucket to be sent or stashed, or into this rank's tensors. */
static tb_status combine_contributions(staged_bucket *p) {
    tb__flow *flow = p->flow;
    copy_op *c = tb__flow_new_copy_op(flow, p->is_send, p->output ? COPY_COMBINE : COPY_COMBINE_IN, 1);
    if (!c)
        return TB_NO_MEMORY;
    p->is_begun = true;
    c->parts[c->nparts++] = (uint32_t)p->bucket;
    c->from = p->buffer;
    c->to = p->output;
    c->staged_bucket = p;
    c->end = end_combine;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

bool tb__staged_step_reduce(tb__flow *flow, bool is_send) {
    bool did = false;
    lane *l = choose_reduction(flow, is_send);
    tb_status status = l ? begin_reduction(flow, l, is_send, &did) : TB_OK;
    for (staged_bucket *p = flow->staged.buckets; p && status == TB_OK; p = p->next) {
        if (p->kind != STAGED_REDUCE || p->is_send != is_send || p->is_begun)
            continue;
        did |= ask_for_inputs(p);
        status = tb__staged_bucket_check(p);
        if (status != TB_OK || p->left > 0 || !(p->output || tb__flow_may_write(flow)))
            continue;
        bool is_checked;
        status = tb__staged_bucket_check_sums(p, &is_checked);
        if (status == TB_OK && is_checked) {
            status = combine_contributions(p);
            did = true;
            break;
        }
    }
    if (status != TB_OK)
        tb__flow_await_reason(flow, is_send, status, tb_error_detail());
    return did || status != TB_OK;
}
