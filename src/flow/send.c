/* The steps of a send: take the snapshot, expose the tensors, send staged buckets, wait for all readers. */
#include "flow/flow_inside.h"

static void end_snapshot(copy_op *c, tb_status status) {
    (void)status;
    c->flow->snapshot.is_being_taken = false;
}

static tb_status take_snapshot(tb__flow *flow) {
    copy_op *c = tb__flow_new_copy_op(flow, true, COPY_SNAPSHOT, 0);
    if (!c)
        return TB_NO_MEMORY;
    flow->snapshot.attempt = flow->send.attempt;
    flow->snapshot.is_being_taken = true;
    c->end = end_snapshot;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

bool tb__flow_step_send(tb__flow *flow) {
    tb__leg *leg = &flow->send;
    tb_status status = tb__flow_send_binds(flow);
    if (status == TB_OK && (!tb__flow_take_attempt(flow, true) || !tb__flow_all_have_reach(flow)))
        return false;
    if (status == TB_OK && !flow->direct.is_exposed) {
        if (flow->snapshot.is_being_taken || tb__flow_awaits_stream(flow, true))
            return false;
        status = tb__flow_check_stream(flow, true);
        if (status == TB_OK)
            status = tb__flow_check_memory(flow, true);
        if (status == TB_OK && flow->snapshot.attempt != leg->attempt) /* else it was before the snapshot was taken */
            status = tb__flow_check_remapped(flow, true);
        if (status == TB_OK && flow->setup.snapshot_of && flow->snapshot.attempt != leg->attempt) {
            status = take_snapshot(flow);
        } else if (status == TB_OK) {
            tb__staged_open_send(flow);
            tb__flow_expose(flow);
        }
        if (status == TB_OK)
            return true;
    }
    if (status != TB_OK) {
        tb__flow_abort(flow, true, status, tb_error_detail());
        return true;
    }
    if (tb__staged_step_out(flow) || tb__staged_step_reduce(flow, true))
        return true;
    if (flow->direct.readers_left > 0 || flow->staged.sends_left > 0)
        return false;
    bool was_released = leg->is_released;
    tb__leg_release(leg);
    return !was_released;
}
