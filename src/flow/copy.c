/* Copy operations. All moves of one kind (moves.c) are prepared together when the first is needed, as a job whose parts
 * are the buckets, or the gathered groups. A copy operation (copy_op) runs some of the parts, then calls its `end`. */
#include "flow/flow_inside.h"

#include "base/log.h"
#include "layout/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Jobs ------------------------------------------------------------------------------------------------------ */

tb_status tb__flow_prepare_copies(tb__flow *flow, copy_kind kind) {
    prepared *out = &flow->copies.prepared[kind];
    tb__move_list list = {0};
    if (out->is_done)
        return TB_OK;
    tb_status status = tb__flow_list_copies(flow, kind, &list);
    if (status == TB_OK)
        status = tb__jobs_prepare(flow->o.loop, list.moves.item, list.moves.count, &out->jobs);
    out->is_done = status == TB_OK;
    tb__move_list_fini(&list);
    return status;
}

bool tb__flow_is_reading(const tb__flow *flow) {
    const copy_op *c = flow->copies.ops;
    while (c && c->kind != COPY_DIRECT && c->kind != COPY_STASH && c->kind != COPY_GATHERED)
        c = c->next;
    return c || flow->copies.is_rehearsing;
}

void tb__flow_forget_reads(tb__flow *flow) {
    const copy_kind kinds[] = {COPY_DIRECT, COPY_STASH, COPY_GATHERED};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tb__jobs_release(&flow->copies.prepared[kinds[i]].jobs);
        flow->copies.prepared[kinds[i]].is_done = false;
    }
}

void tb__flow_release_copies(tb__flow *flow) {
    for (int kind = 0; kind < COPY_KINDS; kind++) {
        tb__jobs_release(&flow->copies.prepared[kind].jobs);
        flow->copies.prepared[kind].is_done = false;
    }
}

/* ---- Copy operations ------------------------------------------------------------------------------------------- */

static tb_phase phase_of(const copy_op *c) {
    switch (c->kind) {
    case COPY_DIRECT:
    case COPY_STASH:
        return TB_PHASE_WIRE;
    case COPY_GATHERED:
        return c->converts ? TB_PHASE_WIRE : TB_PHASE_UNPACK;
    case COPY_COMMIT:
        return TB_PHASE_COMMIT;
    case COPY_PACK:
    case COPY_CONTRIBUTE:
    case COPY_COMBINE:
    case COPY_SNAPSHOT:
        return TB_PHASE_PACK;
    default:
        return c->is_send ? TB_PHASE_PACK : TB_PHASE_UNPACK;
    }
}

static void on_run_done(tb__jobs_run *run);

bool tb__copy_op_is_coded(const copy_op *c) {
    return (c->kind == COPY_PACK || c->kind == COPY_UNPACK) && tb__flow_first_chunk(c->flow, c->parts[0])->is_coded;
}

/* Sets `running` to the kind of the next run; COPY_KINDS: none. */
static tb_status next_run_of(copy_op *c) {
    if (tb__copy_op_is_coded(c))
        return tb__flow_step_coded(c);
    c->running = COPY_KINDS;
    return TB_OK;
}

static void submit_run(copy_op *c) {
    bool fills_scratch = c->running == COPY_SCRATCH_SRC || c->running == COPY_SCRATCH_DST;
    tb__run what = {.parts = tb__copy_is_whole(c->running) ? NULL : c->parts,
                    .nparts = c->nparts,
                    .src_buffer = c->scratch && c->running != COPY_UNPACK ? c->scratch : c->from,
                    .dst_buffer = fills_scratch ? c->scratch : c->to,
                    .after = c->after};
    c->run = (tb__jobs_run){.done = on_run_done};
    tb__stream_point_put(c->point);
    c->point = tb__stream_point_use(tb__copy_op_point(c));
    if (c->point) {
        c->after[0] = &c->point->submitted.fence;
        what.nafter = 1;
    }
    if (c->running == COPY_SUM)
        tb__jobs_submit_sum(c->flow->o.loop, c->from, c->nbytes, &c->run);
    else
        tb__jobs_submit(c->flow->o.loop, &c->flow->copies.prepared[c->running].jobs, &what, &c->run);
}

static bool writes_targets(const copy_op *c) {
    if (c->kind != COPY_DIRECT && c->kind != COPY_UNPACK && c->kind != COPY_COMBINE_IN)
        return c->kind == COPY_GATHERED;
    for (size_t i = 0; i < c->nparts && c->flow->groups.has_steps; i++) {
        if (!tb__group_has_step(tb__flow_group(c->flow, c->parts[i])))
            return true;
    }
    return !c->flow->groups.has_steps;
}

static bool has_work(const copy_op *c) {
    bool needs_scratch = c->running == COPY_SCRATCH_SRC || c->running == COPY_SCRATCH_DST;
    return c->flow->copies.prepared[c->running].jobs.count > 0 && (c->scratch || !needs_scratch);
}

/* Submits the next run. False: none is left, or it has failed. */
static bool run_next(copy_op *c, tb_status *status) {
    while (*status == TB_OK && c->running != COPY_KINDS) {
        *status = c->running == COPY_SUM ? TB_OK : tb__flow_prepare_copies(c->flow, c->running);
        if (*status != TB_OK) {
            *status = tb__flow_fail_copy_op(c, *status, tb_error_detail());
            break;
        }
        if (writes_targets(c))
            tb__flow_mark_written(c->flow);
        if (c->running == COPY_SUM || has_work(c)) {
            submit_run(c);
            return true;
        }
        *status = next_run_of(c);
    }
    return false;
}

/* Whether a sender has revoked memory that the operation converted: the data may have been anything by then. */
static bool is_withdrawn(const copy_op *c) {
    for (size_t i = 0; i < c->nparts; i++) {
        const group *g =
            c->kind == COPY_GATHERED ? tb__flow_find_group(c->flow, c->parts[i]) : tb__flow_group(c->flow, c->parts[i]);
        if (tb__flow_check_exposures(c->flow, g) != TB_OK)
            return true;
    }
    return false;
}

/* Whether another rank is the cause of a failed run: the host device could not read that rank's memory, or it has
 * withdrawn it. */
static bool is_failed_read(const copy_op *c, tb_status status) {
    if (c->converts)
        return is_withdrawn(c);
    return (c->kind == COPY_DIRECT || c->kind == COPY_STASH) && c->run.failed &&
           c->run.failed->ops == &tb__host_device_ops &&
           (status == TB_LOST || status == TB_INVALID || status == TB_CANCELLED);
}

static bool has_ended_copies(void *arg) {
    const tb__flow *flow = arg;
    return flow->copies.nops == 0 && !flow->copies.is_rehearsing;
}

/* A flow that was destroyed while a device did not finish is freed with its last copy. */
static bool free_orphan(tb__flow *flow) {
    if (!flow->copies.is_orphan || !has_ended_copies(flow))
        return false;
    tb__quarantine_end(flow->copies.quarantine);
    (void)tb__flow_free(flow);
    return true;
}

/* A failure of this rank's own ends the leg at once. The leg can't close before `end` has returned. tb__flow_destroy
 * waits for the last line (nops). */
static void finish_copy_op(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    bool is_send = c->is_send;
    tb__leg *leg = tb__flow_leg(flow, is_send);
    for (copy_op **at = &flow->copies.ops; *at; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            break;
        }
    }
    if (flow->copies.is_stuck) {
        if (leg->is_ending) { /* else it was given up, or is a later one */
            tb__leg_end_copy(leg);
            tb__flow_close_leg(flow, is_send);
        }
        tb__flow_free_copy_op(c);
        flow->copies.nops--;
        if (!free_orphan(flow))
            tb__flow_release_revoked(flow);
        return;
    }
    if (status != TB_OK)
        snprintf(c->why, sizeof c->why, "%s", tb_error_detail());
    if (status != TB_OK && c->kind != COPY_COMMIT && !is_failed_read(c, status))
        tb__flow_abort(flow, is_send, status, c->why);
    c->end(c, status);
    tb__flow_free_copy_op(c);
    tb__leg_end_copy(leg);
    tb__flow_close_leg(flow, is_send);
    flow->copies.nops--;
    tb__flow_release_revoked(flow);
    tb__loop_wake(flow->o.loop);
    tb__loop_signal(flow->o.loop);
}

static void on_run_done(tb__jobs_run *run) {
    copy_op *c = (copy_op *)run;
    bool is_ending = tb__flow_leg(c->flow, c->is_send)->is_ending || c->flow->copies.is_stuck;
    tb_status status = TB_OK;
    if (run->status != TB_OK && (is_ending || is_failed_read(c, run->status)))
        status = tb__fail(run->status, "%s", run->why); /* the tensors of a stuck flow may be gone */
    else if (run->status != TB_OK)
        status = tb__flow_fail_copy_op(c, run->status, run->why);
    if (status == TB_OK && !is_ending)
        status = next_run_of(c);
    if (is_ending || !run_next(c, &status))
        finish_copy_op(c, status);
}

copy_op *tb__flow_new_copy_op(tb__flow *flow, bool is_send, copy_kind kind, size_t nparts) {
    copy_op *c = tb__calloc(1, sizeof *c);
    uint32_t *parts = tb__malloc(nparts, sizeof *parts);
    if (!c || !parts) {
        free(c);
        free(parts);
        return NULL;
    }
    *c = (copy_op){.flow = flow, .is_send = is_send, .kind = kind, .parts = parts};
    return c;
}

void tb__flow_free_copy_op(copy_op *c) {
    if (!c)
        return;
    free(c->parts);
    c->parts = NULL;
    tb_free(c->scratch);
    c->scratch = NULL;
    tb__stream_point_put(c->point);
    c->point = NULL;
    c->is_over = true;
    if (c->nholders == 0)
        free(c);
}

void tb__flow_start_copy_op(copy_op *c) {
    tb__flow *flow = c->flow;
    tb__leg *leg = tb__flow_leg(flow, c->is_send);
    c->running = c->kind;
    flow->copies.nops++;
    c->next = flow->copies.ops;
    flow->copies.ops = c;
    tb__leg_begin_copy(leg, phase_of(c));
    tb_status status = tb__copy_op_is_coded(c) ? tb__flow_begin_coded(c) : TB_OK;
    if (!run_next(c, &status))
        finish_copy_op(c, status);
}

void tb__flow_cancel_copy_ops(tb__flow *flow, bool is_send) {
    for (copy_op *c = flow->copies.ops; c; c = c->next) {
        if (c->is_send == is_send)
            tb__jobs_cancel(flow->o.loop, &c->run);
    }
}

static void on_rehearsed(tb__jobs_run *run) {
    tb__flow *flow = (tb__flow *)((char *)run - offsetof(tb__flow, copies.rehearsal));
    flow->copies.is_rehearsing = false;
    if (free_orphan(flow))
        return;
    tb__flow_release_revoked(flow);
    tb__loop_signal(flow->o.loop);
}

/* Jobs of groups that are gathered can be prepared only when there are slots. A job that can't be prepared fails the
 * first transfer. */
void tb__flow_rehearse(tb__flow *flow) {
    bool has_started = flow->recv.attempt || tb__flow_last_attempt(flow, false) < tb__flow_started(flow);
    if (has_started || flow->copies.is_rehearsing || flow->o.gather.slots_nbytes > 0 ||
        tb__flow_prepare_copies(flow, COPY_DIRECT) != TB_OK)
        return;
    flow->copies.rehearsal = (tb__jobs_run){.done = on_rehearsed};
    flow->copies.is_rehearsing =
        tb__jobs_rehearse(flow->o.loop, &flow->copies.prepared[COPY_DIRECT].jobs, &flow->copies.rehearsal);
}

void tb__flow_cancel_rehearsal(tb__flow *flow) {
    if (flow->copies.is_rehearsing)
        tb__jobs_cancel(flow->o.loop, &flow->copies.rehearsal);
}

static bool has_ended_rehearsal(void *arg) {
    return !((const tb__flow *)arg)->copies.is_rehearsing;
}

bool tb__flow_end_rehearsal(tb__flow *flow) {
    tb__flow_cancel_rehearsal(flow);
    return has_ended_rehearsal(flow) || tb__loop_wait(flow->o.loop, has_ended_rehearsal, flow, tb__now_ms() + STUCK_MS);
}

void tb__flow_give_up_copies(tb__flow *flow, char why[TB__WHY_MAX]) {
    flow->copies.is_stuck = true;
    snprintf(why, TB__WHY_MAX, "a device of rank %" PRId32 " has not finished a copy of %.60s: its tensors stay in use",
             flow->o.rank, flow->what);
    if (tb__loop_is_driver(flow->o.loop))
        tb__flow_break(flow, TB_TIMEOUT, why);
    else
        tb__flow_fail_later(flow, TB_TIMEOUT, why);
}

static void quarantine_binding(tb__quarantine *q, const tb_binding *b) {
    uintptr_t first, last;
    if (tb__binding_span(b, &first, &last) == TB_OK)
        tb__quarantine_add(q, first, last);
}

static void quarantine_tensors(tb__flow *flow) {
    char what[160];
    snprintf(what, sizeof what, "a copy of %.80s that a device has not finished", flow->what);
    tb__quarantine *q = flow->copies.quarantine = tb__quarantine_create(flow->o.loop, what);
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        quarantine_binding(q, tb__flow_live(flow, i, true));
        quarantine_binding(q, tb__flow_live(flow, i, false));
        for (size_t j = 0; j < flow->tensors[i].npadding; j++)
            quarantine_binding(q, &flow->tensors[i].padding[j]);
    }
}

bool tb__flow_end_copies(tb__flow *flow) {
    for (int is_send = 0; is_send < 2; is_send++)
        tb__flow_cancel_copy_ops(flow, is_send);
    tb__flow_cancel_rehearsal(flow);
    int64_t stuck_ms = flow->copies.is_stuck ? 0 : tb__now_ms() + STUCK_MS;
    if (has_ended_copies(flow) || tb__loop_wait(flow->o.loop, has_ended_copies, flow, stuck_ms))
        return true;
    tb__log(TB_LOG_ERROR, "%s: a device has not finished a copy; the memory that it uses is not given back",
            flow->what);
    flow->copies.is_stuck = flow->copies.is_orphan = true;
    quarantine_tensors(flow);
    return false;
}
