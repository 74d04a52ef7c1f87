/* The receiving side of one transfer: read what is ready, put aside what has to be, write, and say so. */
#include "flow/flow_inside.h"

#include <inttypes.h>
#include <string.h>

/* ---- What may be done ------------------------------------------------------------------------------------------ */

bool tb__flow_may_write(const tb__flow *flow) {
    return (!flow->overwrites_any_source && !flow->overwrites_live) || flow->writable_attempt >= flow->recv.attempt;
}

/* What is put aside is not in the tensors yet. It must not wait for groups to be taken, for nothing arrives before all
 * of it was put aside. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket) {
    return l->overwrites_source || tb__flow_is_in_window(flow, bucket);
}

/* ---- What has been done ---------------------------------------------------------------------------------------- */

static tb_status check_places(const tb__flow *flow, const member *m) {
    for (size_t i = 0; m->is_reachable && i < m->places.count; i++) {
        const place *p = &m->places.item[i];
        if (!tb__transport_is_valid(m->peer->transport, p->remote))
            return tb__fail(m->peer->is_lost ? TB_LOST : TB_INVALID,
                            "the memory of tensor '%.100s' on %s was invalidated; make %s again",
                            flow->tensors[p->tensor].spec.name, m->peer->label, flow->what);
    }
    return TB_OK;
}

static tb_status withdrew(const tb__flow *flow, const member *m) {
    return tb__fail(TB_CANCELLED, "%s withdrew %s while it was being read", m->peer->label, flow->what);
}

/* All that comes from this sender is here: completes its exposure. */
static tb_status complete_exposure(tb__flow *flow, member *m) {
    uint64_t attempt = flow->recv.attempt, ready = attempt << 2 | EXPOSURE_READY;
    if (m->peer_exposure && !atomic_compare_exchange_strong(m->peer_exposure, &ready, attempt << 2 | EXPOSURE_COMPLETE))
        return withdrew(flow, m);
    m->is_concluded = true;
    m->peer->moved[0] += (uint64_t)m->sends_nbytes;
    return TB_OK;
}

static tb_status conclude(tb__flow *flow, member *m) {
    TB_TRY(check_places(flow, m));
    TB_TRY(complete_exposure(flow, m));
    tb__flow_tell(flow, m, MESSAGE_DONE, flow->recv.attempt);
    return TB_OK;
}

/* What was read of it may still have to be handed on; that needs it no more. Its word can be read, although its memory
 * is lost: the mapping stays. */
void tb__flow_conclude_gone(tb__flow *flow, member *m) {
    bool has_all = flow->recv.is_under_way && flow->recv.attempt && m->is_sender && !m->is_concluded && m->left == 0;
    if (has_all)
        (void)complete_exposure(flow, m); /* else it is needed, and the leg fails by that */
}

tb_status tb__flow_conclude(tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (m->is_sender && !m->is_concluded && m->left == 0 && flow->groups_done >= m->gathers_until)
            TB_TRY(conclude(flow, m));
    }
    return TB_OK;
}

/* Asked before an arrival is announced. */
tb_status tb__flow_check_exposures(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        const member *m = &flow->members[i];
        if (!m->is_sender || m->is_concluded || m->ready != flow->recv.attempt)
            continue;
        TB_TRY(check_places(flow, m));
        if (m->peer_exposure && atomic_load(m->peer_exposure) != (flow->recv.attempt << 2 | EXPOSURE_READY))
            return withdrew(flow, m);
    }
    return TB_OK;
}

tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket) {
    flow->buckets_left--;
    TB_TRY(tb__flow_count_group(flow, flow->ir->buckets[bucket].group));
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if (--m->left == 0 && flow->groups_done >= m->gathers_until)
            TB_TRY(conclude(flow, m));
    }
    return TB_OK;
}

/* ---- Steps ----------------------------------------------------------------------------------------------------- */

static bool are_ready(const tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (flow->members[l->senders[i]].ready != flow->recv.attempt)
            return false;
    }
    return true;
}

/* So many bytes are read by one copying, and so many copyings are under way: the leg shows how far it has come, and a
 * rank that is ready late does not wait for all that was there before. */
enum { COPYING_BYTES = 256 << 20, MOST_COPYINGS = 2 };

static bool can_read(const tb__flow *flow, const lane *l) {
    return l->is_target && !l->takes_staged && l->to_take < l->channel->nbuckets && are_ready(flow, l) &&
           (l->overwrites_source || tb__flow_may_write(flow)) &&
           tb__flow_admits(flow, l, &flow->ir->buckets[l->channel->first_bucket + l->to_take]);
}

/* The next lane that can be read, round and round, so that no sender waits for all others. */
static lane *find_ready(tb__flow *flow) {
    size_t n = flow->ir->nchannels;
    for (size_t i = 0; i < n; i++) {
        size_t at = (flow->next_lane_in + i) % n;
        if (!can_read(flow, &flow->lanes[at]))
            continue;
        flow->next_lane_in = (uint32_t)((at + 1) % n);
        return &flow->lanes[at];
    }
    return NULL;
}

/* By tensor and rank, where memory was taken away. */
static tb_status name_invalid(tb__flow *flow, const copying *c, tb_status status) {
    for (size_t i = 0; i < c->nparts && status == TB_INVALID; i++) {
        const lane *l = tb__flow_lane(flow, c->parts[i]);
        for (uint32_t j = 0; j < l->nsenders && status == TB_INVALID; j++) {
            tb_status named = check_places(flow, &flow->members[l->senders[j]]);
            if (named != TB_OK)
                return named;
        }
    }
    return status;
}

static void end_read(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (flow->recv.is_ending)
        return;
    status = name_invalid(flow, c, status);
    for (size_t i = 0; i < c->nparts && status == TB_OK; i++) {
        flow->recv.bytes_done += tb__flow_bucket_nbytes(flow, c->parts[i]);
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[i]), c->parts[i]);
    }
    tb__flow_end_step_recv(flow, status);
}

static void end_aside(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (status == TB_OK && !flow->recv.is_ending)
        status = tb__staged_put_aside(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0], c->to, c->nbytes);
    else
        tb__flow_unstage(flow, POOL_STASH, c->to, c->nbytes);
    if (!flow->recv.is_ending)
        tb__flow_end_step_recv(flow, name_invalid(flow, c, status));
}

static tb_status read_aside(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take, nbytes = (size_t)flow->ir->buckets[index].total_bytes;
    copying *c = tb__flow_new_copying(flow, false, COPY_ASIDE, 1);
    char *buffer = c ? tb__flow_stage(flow, POOL_STASH, nbytes) : NULL;
    if (!buffer) {
        tb__flow_drop_copying(c);
        return TB_NO_MEMORY;
    }
    c->parts[c->nparts++] = (uint32_t)index;
    c->to = buffer;
    c->nbytes = nbytes;
    c->end = end_aside;
    l->to_take++;
    tb_status status = tb__flow_start_copying(c);
    if (status != TB_OK)
        tb__flow_unstage(flow, POOL_STASH, buffer, nbytes);
    return status;
}

static void end_own_unpack(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    free(c->from);
    if (flow->recv.is_ending)
        return;
    if (status == TB_OK) {
        flow->recv.bytes_done += tb__flow_bucket_nbytes(flow, c->parts[0]);
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0]);
    }
    tb__flow_end_step_recv(flow, status);
}

static tb_status begin_own(tb__flow *flow, size_t bucket, copy_kind kind, char *buffer,
                           void (*end)(copying *c, tb_status status)) {
    copying *c = tb__flow_new_copying(flow, false, kind, 1);
    tb_status status = TB_NO_MEMORY;
    if (c) {
        c->parts[c->nparts++] = (uint32_t)bucket;
        c->from = kind == COPY_UNPACK ? buffer : NULL;
        c->to = kind == COPY_PACK ? buffer : NULL;
        c->end = end;
        status = tb__flow_start_copying(c);
    }
    if (status != TB_OK)
        free(buffer);
    return status;
}

static void end_own_pack(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (flow->recv.is_ending || status != TB_OK)
        free(c->to);
    if (flow->recv.is_ending)
        return;
    if (status == TB_OK)
        status = begin_own(flow, c->parts[0], COPY_UNPACK, c->to, end_own_unpack);
    if (status != TB_OK)
        tb__flow_end_step_recv(flow, status);
}

/* Of this rank with itself: by way of a buffer, as if it came from another. */
static tb_status convert_own(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take++;
    char *buffer = tb__malloc((size_t)flow->ir->buckets[index].total_bytes, 1);
    return buffer ? begin_own(flow, index, COPY_PACK, buffer, end_own_pack) : TB_NO_MEMORY;
}

/* All that is ready and of one group, beginning with this lane. */
static tb_status read_buckets(tb__flow *flow, lane *first) {
    size_t n = flow->ir->nchannels, count = 0;
    uint32_t number = flow->ir->buckets[first->channel->first_bucket + first->to_take].group;
    int64_t nbytes = 0;
    for (size_t i = 0; i < n; i++)
        count += flow->lanes[i].is_target ? flow->lanes[i].channel->nbuckets - flow->lanes[i].to_take : 0;
    copying *c = tb__flow_new_copying(flow, false, COPY_DIRECT, count);
    if (!c)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n && nbytes < COPYING_BYTES; i++) {
        lane *l = &flow->lanes[((size_t)(first - flow->lanes) + i) % n];
        while (nbytes < COPYING_BYTES && !l->overwrites_source && !l->first->is_coded && can_read(flow, l)) {
            size_t index = l->channel->first_bucket + l->to_take;
            if (flow->ir->buckets[index].group != number)
                break;
            nbytes += flow->ir->buckets[index].total_bytes;
            c->parts[c->nparts++] = (uint32_t)index;
            l->to_take++;
        }
    }
    c->end = end_read;
    return tb__flow_start_copying(c);
}

static tb_status read_some(tb__flow *flow, lane *l) {
    if (l->overwrites_source)
        return read_aside(flow, l);
    return l->first->is_coded ? convert_own(flow, l) : read_buckets(flow, l);
}

/* ---- A transfer ------------------------------------------------------------------------------------------------ */

static void end_padding(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    flow->is_clearing_padding = false;
    if (!flow->recv.is_ending)
        tb__flow_end_step_recv(flow, status);
}

/* Data and padding are different memory, so they are written in any order. A shadow's padding is the tensors'. */
static tb_status clear_padding(tb__flow *flow) {
    size_t n = 0;
    for (size_t i = 0; i < flow->o.ntensors && !flow->o.shadow.is_used; i++)
        n += flow->tensors[i].npadding;
    flow->is_clearing_padding = false;
    if (n == 0)
        return TB_OK;
    copying *c = tb__flow_new_copying(flow, false, COPY_PADDING, 0);
    if (!c)
        return TB_NO_MEMORY;
    flow->is_clearing_padding = true;
    c->end = end_padding;
    return tb__flow_start_copying(c);
}

static tb_status open_transfer(tb__flow *flow) {
    TB_TRY(tb__flow_check_memory(flow, false));
    flow->buckets_left = 0;
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        flow->lanes[i].to_take = 0;
        flow->buckets_left += flow->lanes[i].is_target ? flow->lanes[i].channel->nbuckets : 0;
    }
    TB_TRY(tb__flow_open_groups(flow));
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        m->left = m->nbuckets;
        m->aside_left = m->naside;
        m->is_concluded = false;
    }
    tb__staged_open_recv(flow);
    flow->next_lane_in = flow->ir->nchannels ? (uint32_t)flow->self % (uint32_t)flow->ir->nchannels : 0;
    return clear_padding(flow);
}

/* All of it is here. In place it is live, too. */
static tb_status arrive(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    if (flow->o.shadow.is_used) {
        TB_TRY(tb__flow_check_memory(flow, false));
        tb__flow_prepare(flow);
        return TB_OK;
    }
    leg->is_arrived = leg->is_complete = true;
    flow->version = tb__flow_number(flow, leg->attempt);
    flow->is_torn = false;
    return TB_OK;
}

static bool has_all(const tb__flow *flow) {
    return flow->buckets_left == 0 && flow->staged.nrelays == 0 && flow->groups_done == flow->groups.count &&
           !flow->is_clearing_padding;
}

static bool step(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    if (tb__flow_try_reach(flow))
        return true;
    if (!flow->is_reached)
        return false;
    if (!leg->attempt) {
        if (!tb__flow_take_attempt(flow, false))
            return false;
        tb_status status = open_transfer(flow);
        if (status != TB_OK)
            tb__flow_abort(flow, false, status);
        return true; /* from now on it needs others than before, who may be gone already: the next step looks */
    }
    bool did = false;
    tb_status status = tb__flow_hand_on(flow, &did);
    if (status != TB_OK) {
        tb__flow_abort(flow, false, status);
        return true;
    }
    if (did || has_all(flow))
        return did;
    bool may_copy = leg->ncopying < MOST_COPYINGS;
    status = may_copy ? tb__staged_write_stash(flow, &did) : TB_OK;
    lane *l = may_copy && !did && status == TB_OK ? find_ready(flow) : NULL;
    if (l)
        status = read_some(flow, l);
    else if (!did && status == TB_OK)
        return (flow->buckets_left > 0 || flow->staged.nrelays > 0) &&
               (tb__staged_step_in(flow) || tb__staged_step_reduce(flow, false));
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status);
    return true;
}

/* All who fed it know by now that they are not needed any more, and may be gone before the next step. */
static bool try_arrive(tb__flow *flow) {
    const tb__leg *leg = &flow->recv;
    if (!leg->is_under_way || leg->is_ending || !leg->attempt || leg->doubt != TB_OK || leg->is_complete ||
        flow->shadow.is_prepared || !has_all(flow))
        return false;
    tb_status status = arrive(flow);
    if (status != TB_OK)
        tb__flow_abort(flow, false, status);
    return true;
}

void tb__flow_end_step_recv(tb__flow *flow, tb_status status) {
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status);
    else
        try_arrive(flow);
}

bool tb__flow_step_recv(tb__flow *flow) {
    bool did = step(flow);
    return try_arrive(flow) || did;
}
