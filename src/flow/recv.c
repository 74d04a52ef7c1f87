/* The steps of a receive: read what is exposed, accept staged buckets, write the stash, finish. */
#include "flow/flow_inside.h"

#include <string.h>

enum { MAX_COPY_OPS = 2 }; /* under way, so that a sender that gets ready late does not wait for all earlier reads */

/* ---- Targets ---------------------------------------------------------------------------------------------------- */

void tb__flow_begin_targets(tb__flow *flow) {
    flow->targets.has_written = false;
}

void tb__flow_set_mark(const tb__flow *flow) {
    if (flow->o.mark && !flow->o.targets_are_mirrors)
        atomic_store(flow->o.mark, 1);
}

void tb__flow_mark_written(tb__flow *flow) {
    if (flow->o.shadow.is_used)
        return;
    flow->targets.has_written = true;
    tb__flow_set_mark(flow);
}

void tb__flow_mark_torn(tb__flow *flow) {
    flow->targets.is_torn = true;
}

void tb__flow_set_version(tb__flow *flow) {
    flow->targets.version = tb__flow_number(flow, flow->recv.attempt);
    flow->targets.is_torn = false;
}

uint64_t tb__flow_version(const tb__flow *flow, bool *is_torn) {
    *is_torn = flow->targets.is_torn;
    return flow->targets.version;
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

/* Stashing does not write tensors. It must not wait for the window, because no group arrives before all is stashed. */
bool tb__flow_admits(const tb__flow *flow, const lane *l, const tb_bucket *bucket) {
    return l->is_stashed || tb__flow_is_in_window(flow, bucket);
}

tb_status tb__flow_bucket_arrived(tb__flow *flow, lane *l, size_t bucket) {
    size_t done = flow->groups.done;
    flow->targets.buckets_left--;
    tb__flow_tell_step(flow, bucket, TB_BUCKET_FINALISED);
    tb__leg_add_bytes(&flow->recv, tb__flow_bucket_nbytes(flow, bucket));
    TB_TRY(tb__flow_count_group(flow, flow->setup.ir->buckets[bucket].group));
    TB_TRY(tb__flow_count_arrived(flow, l));
    return flow->groups.done != done ? tb__flow_conclude(flow) : TB_OK; /* senders may have waited for these groups */
}

static void end_padding(copy_op *c, tb_status status) {
    c->flow->targets.is_clearing_padding = false;
    if (!c->flow->recv.is_ending)
        tb__flow_end_step_recv(c->flow, status, c->why);
}

/* Data and padding are disjoint, so the order does not matter. Shadows have no padding: COPY_COMMIT clears that of the
 * tensors. */
static tb_status clear_padding(tb__flow *flow) {
    flow->targets.is_clearing_padding = false;
    if (!flow->has_padding || flow->o.shadow.is_used)
        return TB_OK;
    copy_op *c = tb__flow_new_copy_op(flow, false, COPY_PADDING, 0);
    if (!c)
        return TB_NO_MEMORY;
    flow->targets.is_clearing_padding = true;
    c->end = end_padding;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

static tb_status open_transfer(tb__flow *flow) {
    TB_TRY(tb__flow_check_memory(flow, false));
    TB_TRY(tb__flow_check_remapped(flow, false));
    flow->targets.buckets_left = 0;
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        flow->targets.buckets_left += l->is_target ? l->channel->nbuckets : 0;
    }
    TB_TRY(tb__flow_open_groups(flow));
    tb__flow_cancel_rehearsal(flow);
    tb__flow_open_reads(flow);
    tb__staged_open_recv(flow);
    return clear_padding(flow);
}

/* All data has arrived. Without a shadow it is in the tensors. */
static tb_status finish_receive(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    if (flow->o.shadow.is_used) {
        TB_TRY(tb__flow_check_memory(flow, false));
        tb__flow_prepare(flow);
        return TB_OK;
    }
    tb__leg_arrive(leg);
    tb__leg_complete(leg);
    tb__flow_set_version(flow);
    return TB_OK;
}

static bool has_all(const tb__flow *flow) {
    return flow->targets.buckets_left == 0 && flow->staged.nrelays == 0 &&
           flow->groups.done == flow->setup.groups.count && !flow->targets.is_clearing_padding;
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
        return true; /* it needs other members now; the next step checks whether they are gone */
    }
    bool did = false;
    tb_status status = tb__flow_step_gathered(flow, &did);
    if (status != TB_OK) {
        tb__flow_await_reason(flow, false, status, tb_error_detail());
        return true;
    }
    if (did || has_all(flow))
        return did;
    bool may_copy = leg->ncopies < MAX_COPY_OPS;
    status = may_copy ? tb__staged_write_stash(flow, &did) : TB_OK;
    if (may_copy && !did && status == TB_OK)
        status = tb__flow_step_reads(flow, &did);
    if (!did && status == TB_OK)
        return (flow->targets.buckets_left > 0 || flow->staged.nrelays > 0) &&
               (tb__staged_step_in(flow) || tb__staged_step_reduce(flow, false));
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status, tb_error_detail());
    return true;
}

/* Called right after the last arrival: senders have got DONE, and may be gone before the next step. */
static bool try_finish_receive(tb__flow *flow) {
    const tb__leg *leg = &flow->recv;
    if (!leg->is_under_way || leg->is_ending || !leg->attempt || leg->failure.status != TB_OK || leg->is_complete ||
        flow->shadow.is_prepared || !has_all(flow))
        return false;
    tb_status status = finish_receive(flow);
    if (status != TB_OK)
        tb__flow_abort(flow, false, status, tb_error_detail());
    return true;
}

void tb__flow_end_step_recv(tb__flow *flow, tb_status status, const char *why) {
    if (status != TB_OK)
        tb__flow_await_reason(flow, false, status, why);
    else
        try_finish_receive(flow);
}

bool tb__flow_step_recv(tb__flow *flow) {
    bool did = step_receive(flow);
    return try_finish_receive(flow) || did;
}
