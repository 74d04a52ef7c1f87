/* Order with the program's own work on streams. A send waits for its point as a whole, before it reads anything: other
 * ranks read its tensors, too. In a receive, only the runs that write tensors wait, on the device. */
#include "flow/flow_inside.h"

void tb__flow_set_stream_point(tb__flow *flow, bool is_send, tb__stream_point *point) {
    tb__stream_point **at = &flow->copies.points[is_send];
    (void)tb__stream_point_use(point);
    tb__stream_point_put(*at);
    *at = point;
}

bool tb__flow_awaits_stream(const tb__flow *flow, bool is_send) {
    const tb__stream_point *point = flow->copies.points[is_send];
    if (!point || point->is_reached)
        return false;
    return is_send ? flow->send.attempt && tb__flow_all_have_reach(flow) && !flow->direct.is_exposed
                   : flow->recv.ncopies > 0;
}

tb_status tb__flow_check_stream(const tb__flow *flow, bool is_send) {
    const tb__stream_point *point = flow->copies.points[is_send];
    if (!point || point->status == TB_OK)
        return TB_OK;
    return tb__fail(point->status, "%.60s: the stream that %.80s is sent after has failed: %s",
                    flow->members[flow->self].peer->label, flow->what, point->why);
}

/* ---- Runs ------------------------------------------------------------------------------------------------------ */

/* Whether the next run accesses targets, or their shadows. */
static bool accesses_targets(const copy_op *c) {
    switch (c->running) {
    case COPY_DIRECT:
    case COPY_UNPACK:
    case COPY_COMBINE_IN:
    case COPY_GATHERED:
    case COPY_COMMIT:
    case COPY_PADDING:
    case COPY_SCRATCH_DST:
    case COPY_SCRATCH_BACK:
        return true;
    default:
        return false;
    }
}

tb__stream_point *tb__copy_op_point(const copy_op *c) {
    const tb__flow *flow = c->flow;
    bool writes_shadow = flow->o.shadow.is_used && c->running != COPY_COMMIT;
    return !c->is_send && accesses_targets(c) && !writes_shadow ? flow->copies.points[false] : NULL;
}

/* Whether its buckets have arrived when its only run is done. */
static bool is_last_step(const copy_op *c) {
    return (c->kind == COPY_DIRECT || c->kind == COPY_UNPACK || c->kind == COPY_COMBINE_IN) && !tb__copy_op_is_coded(c);
}

static bool writes_last(const copy_op *c) {
    return !c->is_send && (c->kind == COPY_PADDING || is_last_step(c));
}

bool tb__flow_has_begun_writes(const tb__flow *flow, const tb__device *device) {
    const tb__leg *leg = &flow->recv;
    size_t nbuckets = 0;
    if (leg->is_arrived)
        return true;
    if (!leg->is_under_way || leg->is_ending || !leg->attempt || leg->failure.status != TB_OK || flow->groups.has_steps)
        return false;
    for (const copy_op *c = flow->copies.ops; c; c = c->next) {
        if (!writes_last(c))
            continue;
        if (!tb__jobs_are_begun_on(&c->run, device))
            return false;
        nbuckets += c->nparts;
    }
    return nbuckets == flow->targets.buckets_left;
}

/* ---- Held fences ------------------------------------------------------------------------------------------------ */

static tb_status hold_fences(copy_op *c, tb__held_fences *held) {
    if (!tb__vec_push(&held->ops, c))
        return TB_NO_MEMORY;
    c->nholders++;
    for (size_t i = 0; i < TB__JOBS_MAX; i++) {
        if (c->run.item[i].run && !tb__vec_push(&held->fences, &c->run.item[i].submitted.fence))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

tb_status tb__flow_hold_writes(tb__flow *flow, tb__held_fences *held) {
    for (copy_op *c = flow->copies.ops; c; c = c->next) {
        if (writes_last(c))
            TB_TRY(hold_fences(c, held));
    }
    return TB_OK;
}

void tb__held_fences_release(tb__held_fences *held) {
    for (size_t i = 0; i < held->ops.count; i++) {
        copy_op *c = held->ops.item[i];
        if (--c->nholders == 0 && c->is_over)
            free(c);
    }
    free(held->ops.item);
    free(held->fences.item);
    *held = (tb__held_fences){0};
}
