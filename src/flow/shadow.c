/* Shadowed receives. Data lands in shadow memory; a complete receive is prepared, and waits until its owner has it
 * applied (the shadow is copied into the tensors) or discarded (the tensors keep their contents). */
#include "flow/flow_inside.h"

#include <stdio.h>

/* Whether the flow makes a shadow for the tensor. */
bool tb__flow_has_shadow(const tb__flow *flow, size_t i) {
    const tb__flow_tensor *t = &flow->tensors[i];
    return !t->is_gathered && !t->has_own_shadow && flow->setup.dst_regions[i];
}

tb_status tb__flow_make_shadow(tb__flow *flow) {
    bool *has = tb__calloc(flow->o.ntensors, sizeof *has);
    if (!has)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < flow->o.ntensors; i++)
        has[i] = tb__flow_has_shadow(flow, i);
    tb_status status = tb__flow_bind_duplicates(flow, false, has, &flow->shadow.live);
    free(has);
    TB_TRY(status);
    return tb__flow_prepare_copies(flow,
                                   COPY_COMMIT); /* now, because other ranks may have committed when applying fails */
}

void tb__flow_tell_owner(tb__flow *flow, tb__shadow_event event, tb_status status, const char *why) {
    if (flow->o.shadow.is_used)
        flow->o.shadow.event(flow->o.shadow.arg, event, flow->recv.attempt, status, why);
}

/* ---- Prepared --------------------------------------------------------------------------------------------------- */

void tb__flow_prepare(tb__flow *flow) {
    tb__leg_arrive(&flow->recv);
    flow->shadow.is_prepared = true;
    flow->shadow.would_end = false;
    tb__flow_tell_owner(flow, TB__SHADOW_PREPARED, TB_OK, "");
}

void tb__flow_would_end(tb__flow *flow, tb_status status, const char *why) {
    if (flow->shadow.would_end)
        return;
    flow->shadow.would_end = true;
    tb__flow_tell_owner(flow, TB__SHADOW_WOULD_END, status, why);
    tb__loop_wake(flow->o.loop);
}

bool tb__flow_step_prepared(tb__flow *flow) {
    bool tells;
    if (flow->shadow.would_end || flow->shadow.is_applying)
        return false;
    tb__fault reason = tb__flow_find_reason(flow, false, &tells);
    if (reason.status != TB_OK)
        tb__flow_would_end(flow, reason.status, reason.why);
    return reason.status != TB_OK;
}

/* ---- Discard ---------------------------------------------------------------------------------------------------- */

void tb__flow_discard(tb__flow *flow, bool is_aborted, tb_status status, const char *why) {
    tb__leg *leg = &flow->recv;
    flow->shadow.is_prepared = false;
    if (is_aborted) {
        tb__flow_end_leg(flow, false, status, why, why);
        return;
    }
    tb__leg_drop(leg, status, why);
    char reason[TB__REASON_MAX];
    tb__flow_reason_for_others(flow, status, leg->why, reason);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_sender)
            tb__flow_tell_abort(flow, i, leg->attempt, leg->number, status, reason);
    }
}

/* ---- Apply ------------------------------------------------------------------------------------------------------ */

static void call_applying(tb__flow *flow, bool is_done) {
    tb__loop_unlock(flow->o.loop);
    flow->o.shadow.applying(flow->o.shadow.arg, is_done);
    tb__loop_lock(flow->o.loop);
}

/* The receive may have been discarded meanwhile. */
static void end_apply(tb__flow *flow, tb_status status, const char *why) {
    tb__leg *leg = &flow->recv;
    flow->shadow.is_applying = false;
    if (status == TB_OK) {
        tb__flow_set_version(flow);
        flow->shadow.is_prepared = false;
        if (leg->is_under_way)
            tb__leg_complete(leg);
        for (size_t i = 0; i < flow->nmembers; i++) {
            if (flow->members[i].setup.is_sender)
                tb__flow_tell(flow, &flow->members[i], MESSAGE_COMMITTED, leg->attempt);
        }
    }
    tb__flow_tell_owner(flow, TB__SHADOW_APPLIED, status, why);
    tb__loop_wake(flow->o.loop);
    tb__loop_signal(flow->o.loop); /* tb_world_invalidate may wait for the memory */
}

static void mark_partly_applied(tb__flow *flow) {
    if (!flow->o.targets_are_mirrors)
        tb__flow_mark_torn(flow);
}

static void end_commit_copy(copy_op *c, tb_status status) {
    if (status == TB_OK)
        call_applying(c->flow, true);
    else
        mark_partly_applied(c->flow);
    end_apply(c->flow, status, c->why);
}

void tb__flow_apply(tb__flow *flow) {
    flow->shadow.is_applying = true;
    call_applying(flow, false);
    tb_status status = flow->copies.is_stuck
                           ? tb__fail(TB_TIMEOUT, "an earlier copy of %s has not finished", flow->what)
                           : tb__flow_check_memory(flow, false);
    copy_op *c = status == TB_OK ? tb__flow_new_copy_op(flow, false, COPY_COMMIT, 0) : NULL;
    if (!c) {
        end_apply(flow, status == TB_OK ? TB_NO_MEMORY : status, tb_error_detail());
        return;
    }
    c->end = end_commit_copy;
    tb__flow_set_mark(flow);
    tb__flow_start_copy_op(c);
}

void tb__flow_give_up_apply(tb__flow *flow) {
    char why[TB__WHY_MAX];
    mark_partly_applied(flow);
    tb__flow_give_up_copies(flow, why);
    tb__flow_tell_owner(flow, TB__SHADOW_APPLIED, TB_TIMEOUT, why);
}
