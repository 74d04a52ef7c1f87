/* The steps of a receive: read what is ready, take what was sent, write what was put aside, and arrive. */
#include "flow/flow_inside.h"

#include <string.h>

enum { MOST_COPYINGS = 2 }; /* under way: a rank that is ready late does not wait for all that was there before */

/* What is put aside is not in the tensors yet. It must not wait for groups to be taken, for nothing arrives before all
 * of it was put aside. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket) {
    return l->overwrites_source || tb__flow_is_in_window(flow, bucket);
}

tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket) {
    flow->buckets_left--;
    TB_TRY(tb__flow_count_group(flow, flow->setup.ir->buckets[bucket].group));
    return tb__flow_count_arrived(flow, l);
}

tb_status tb__flow_put_aside(tb__flow *flow, lane *l, size_t bucket, char *buffer, size_t nbytes) {
    if (!tb__vec_push(&flow->stash, (stashed){l, bucket, buffer, nbytes}))
        return TB_NO_MEMORY;
    tb__flow_count_aside(flow, l);
    return TB_OK;
}

/* ---- Steps ----------------------------------------------------------------------------------------------------- */

/* What was put aside and may be written now; NULL: nothing. */
static stashed *find_writable(tb__flow *flow) {
    for (size_t i = flow->stash.count; i-- > 0 && tb__flow_may_write(flow);) {
        if (tb__flow_is_in_window(flow, &flow->setup.ir->buckets[flow->stash.item[i].bucket]))
            return &flow->stash.item[i];
    }
    return NULL;
}

static void end_write(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    tb__flow_unstage(flow, POOL_STASH, c->from, c->nbytes);
    if (flow->recv.is_ending)
        return;
    const char *why = c->why;
    if (status == TB_OK) {
        flow->recv.bytes_done += tb__flow_bucket_nbytes(flow, c->parts[0]);
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0]);
        why = tb_error_detail();
    }
    tb__flow_end_step_recv(flow, status, why);
}

static tb_status write_stash(tb__flow *flow, stashed *at) {
    stashed s = *at;
    copying *c = tb__flow_new_copying(flow, false, COPY_UNPACK, 1);
    if (!c)
        return TB_NO_MEMORY;
    *at = flow->stash.item[--flow->stash.count];
    c->parts[c->nparts++] = (uint32_t)s.bucket;
    c->from = s.buffer;
    c->nbytes = s.nbytes;
    c->end = end_write;
    tb_status status = tb__flow_start_copying(c);
    if (status != TB_OK)
        tb__flow_unstage(flow, POOL_STASH, s.buffer, s.nbytes);
    return status;
}

/* ---- A transfer ------------------------------------------------------------------------------------------------ */

static tb_status open_transfer(tb__flow *flow) {
    TB_TRY(tb__flow_check_memory(flow, false));
    flow->buckets_left = 0;
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        flow->buckets_left += l->is_target ? l->channel->nbuckets : 0;
    }
    TB_TRY(tb__flow_open_groups(flow));
    tb__flow_open_reads(flow);
    memset(flow->is_taken, 0, flow->setup.ir->nbuckets * sizeof *flow->is_taken);
    /* What was announced for transfers that are over will never be asked for. */
    size_t kept = 0;
    for (size_t i = 0; i < flow->announcements.count; i++) {
        if (flow->announcements.item[i].attempt >= flow->recv.attempt)
            flow->announcements.item[kept++] = flow->announcements.item[i];
    }
    flow->announcements.count = kept;
    return TB_OK;
}

void tb__flow_end_recv(tb__flow *flow) {
    while (flow->stash.count > 0) {
        stashed s = flow->stash.item[--flow->stash.count];
        tb__flow_unstage(flow, POOL_STASH, s.buffer, s.nbytes);
    }
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
    return flow->buckets_left == 0 && flow->nrelays == 0 && flow->groups_done == flow->setup.groups.count;
}

static bool step_receive(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    if (tb__flow_try_reach(flow))
        return true;
    if (!flow->setup.is_reached)
        return false;
    if (!leg->attempt) {
        if (!tb__flow_take_attempt(flow, false))
            return false;
        tb_status opened = open_transfer(flow);
        if (opened != TB_OK)
            tb__flow_abort(flow, false, opened, tb_error_detail());
        return true; /* from now on it needs others than before, who may be gone already: the next step looks */
    }
    bool did = false;
    tb_status status = tb__flow_hand_on(flow, &did);
    if (status != TB_OK) {
        tb__flow_abort(flow, false, status, tb_error_detail());
        return true;
    }
    if (did || has_all(flow))
        return did;
    stashed *aside = leg->ncopying < MOST_COPYINGS ? find_writable(flow) : NULL;
    did = aside != NULL;
    if (aside)
        status = write_stash(flow, aside);
    else if (leg->ncopying < MOST_COPYINGS)
        status = tb__flow_step_reads(flow, &did);
    if (!did)
        return (flow->buckets_left > 0 || flow->nrelays > 0) &&
               (tb__flow_step_in(flow) || tb__flow_step_reduce(flow, false));
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status, tb_error_detail());
    return true;
}

/* All senders have been told that they are not needed any more, and may be gone before the next step. */
static bool try_arrive(tb__flow *flow) {
    const tb__leg *leg = &flow->recv;
    if (!leg->is_under_way || leg->is_ending || !leg->attempt || leg->failure.status != TB_OK || leg->is_complete ||
        flow->shadow.is_prepared || !has_all(flow))
        return false;
    tb_status status = arrive(flow);
    if (status != TB_OK)
        tb__flow_abort(flow, false, status, tb_error_detail());
    return true;
}

void tb__flow_end_step_recv(tb__flow *flow, tb_status status, const char *why) {
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status, why);
    else
        try_arrive(flow);
}

bool tb__flow_step_recv(tb__flow *flow) {
    bool did = step_receive(flow);
    return try_arrive(flow) || did;
}
