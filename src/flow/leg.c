/* Legs: begin, step, end. Only leg.c and attempt.c (number, acknowledgements) write tb__leg. */
#include "flow/flow_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

tb__leg *tb__flow_leg(tb__flow *flow, bool is_send) {
    return is_send ? &flow->send : &flow->recv;
}

void tb__phases_enter(tb__phases *phases, tb_phase phase) {
    double now = tb__seconds();
    phases->seconds[phases->now] += now - phases->since;
    phases->since = now;
    phases->now = phase;
}

/* Enters the phase that fits the leg's copies and messages under way. */
static void enter_phase(tb__leg *leg) {
    if (!leg->is_under_way)
        return;
    tb_phase idle = leg->in_flight ? TB_PHASE_WIRE : TB_PHASE_WAIT;
    tb__phases_enter(leg->phases, leg->ncopies ? leg->copy_phase : idle);
}

void tb__leg_begin_copy(tb__leg *leg, tb_phase phase) {
    leg->ncopies++;
    leg->copy_phase = phase;
    enter_phase(leg);
}

void tb__leg_end_copy(tb__leg *leg) {
    leg->ncopies--;
    enter_phase(leg);
}

void tb__leg_begin_message(tb__leg *leg) {
    leg->in_flight++;
    enter_phase(leg);
}

void tb__leg_end_message(tb__leg *leg) {
    leg->in_flight--;
    enter_phase(leg);
}

void tb__leg_add_bytes(tb__leg *leg, int64_t nbytes) {
    leg->bytes_done += nbytes;
}

void tb__leg_add_total(tb__leg *leg, int64_t nbytes) {
    leg->bytes_total += nbytes;
}

void tb__leg_set_groups(tb__leg *leg, size_t done, size_t total) {
    leg->groups_done = (uint32_t)done;
    leg->groups_total = (uint32_t)total;
}

void tb__leg_release(tb__leg *leg) {
    leg->is_released = true;
}

void tb__leg_arrive(tb__leg *leg) {
    leg->is_arrived = true;
}

void tb__leg_complete(tb__leg *leg) {
    leg->is_complete = true;
}

void tb__leg_cancel(tb__leg *leg) {
    leg->is_cancelled = true;
}

void tb__leg_invalidate(tb__leg *leg) {
    leg->memory_invalidated = true;
}

void tb__leg_wake_at(tb__leg *leg, int64_t wake_ms) {
    leg->wake_ms = wake_ms;
}

void tb__leg_drop(tb__leg *leg, tb_status status, const char *why) {
    leg->is_under_way = false;
    leg->status = status;
    snprintf(leg->why, sizeof leg->why, "%s", why);
}

/* ---- Begin and end ---------------------------------------------------------------------------------------------- */

static void announce_attempt(tb__flow *flow, uint64_t attempt, uint64_t number) {
    if (!tb__flow_record_start(flow, attempt, number)) {
        tb_status status =
            tb__fail_within(TB_NO_MEMORY, "rank %" PRId32 ": the number of a transfer of %s", flow->o.rank, flow->what);
        tb__flow_fail_later(flow, status, tb_error_detail());
    }
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (i == flow->self)
            continue;
        tb__pack pack = {0};
        tb__flow_begin_message(flow, &pack, MESSAGE_START, attempt);
        tb__pack_u64(&pack, number);
        tb__flow_send_message(flow, &flow->members[i], &pack);
    }
}

void tb__flow_begin(tb__flow *flow, bool is_send, uint64_t number, tb__phases *phases) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    *leg = (tb__leg){.is_under_way = true,
                     .begun_ms = tb__now_ms(),
                     .number = number,
                     .bytes_total = leg->bytes_total,
                     .groups_total = leg->groups_total,
                     .phases = phases};
    tb__flow_skip_ended(flow, is_send);
    if (is_send) {
        tb__flow_forget_exposures(flow);
        if (flow->o.lead == flow->self && flow->report.broken.status == TB_OK && flow->ngone == 0 &&
            !tb__flow_find_abort(flow, tb__flow_last_attempt(flow, true) + 1)) {
            leg->attempt = tb__flow_issue_attempt(flow);
            announce_attempt(flow, leg->attempt, number);
        }
    } else {
        tb__flow_begin_groups(flow);
        tb__flow_begin_targets(flow);
    }
}

/* Adds to this rank's own message, which other ranks do not get, that its tensors are partly written. */
static void say_torn(tb__flow *flow) {
    static const char torn[] = "; a part of it has been written: the tensors are torn";
    char why[TB__WHY_MAX];
    tb__flow_mark_torn(flow);
    snprintf(why, sizeof why, "%s", flow->recv.why);
    snprintf(flow->recv.why, sizeof flow->recv.why, "%.*s%s", (int)(sizeof why - sizeof torn), why, torn);
}

void tb__flow_close_leg(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    if (!leg->is_ending || leg->ncopies > 0)
        return;
    leg->is_ending = leg->is_under_way = false;
    tb__staged_close(flow, is_send);
    tb__loop_wake(flow->o.loop);
}

/* The leg ends when no copy is under way any more. */
static void begin_end(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    leg->is_ending = true;
    leg->stuck_ms = tb__now_ms() + STUCK_MS;
    tb__flow_cancel_copy_ops(flow, is_send);
    tb__flow_close_leg(flow, is_send);
}

/* Whether a leg that fails without an attempt fails the next one, which other ranks of its side may wait for, too. A
 * receive that was cancelled, or is late, must not stop a sender that has yet to begin: the next receive gets that. */
static bool fails_next_attempt(const tb__flow *flow, bool is_send, tb_status status) {
    bool has_started = tb__flow_last_attempt(flow, is_send) < tb__flow_started(flow);
    return is_send || (status != TB_TIMEOUT && (status != TB_CANCELLED || has_started));
}

void tb__flow_end_leg(tb__flow *flow, bool is_send, tb_status status, const char *why, const char *told) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    leg->status = status;
    snprintf(leg->why, sizeof leg->why, "%s", why);
    if (is_send)
        tb__flow_revoke(flow);
    begin_end(flow, is_send);
    if (!leg->attempt && told && fails_next_attempt(flow, is_send, status)) {
        leg->attempt = tb__flow_count_attempt(flow, is_send);
        if (!is_send) /* one that awaits a choice may have started */
            leg->number = leg->attempt <= tb__flow_started(flow) ? tb__flow_number(flow, leg->attempt)
                                                                 : tb__flow_last_number(flow) + 1;
    }
    if (leg->attempt) {
        tb__flow_record_abort(flow, leg->attempt, leg->number, status, leg->why); /* for the other leg, too */
        if (!is_send)
            tb__flow_tell_owner(flow, TB__SHADOW_FAILED, status, told ? told : leg->why);
        if (told) {
            tb__flow_tell_all_abort(flow, leg->attempt, leg->number, status, told);
            tb__flow_await_abort_acks(flow, is_send);
        }
    }
    if (!is_send && leg->attempt && flow->targets.has_written && !flow->o.targets_are_mirrors)
        say_torn(flow);
    tb__loop_wake(flow->o.loop);
}

static void end_complete(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    leg->is_committed = true;
    leg->is_released |= is_send;
    begin_end(flow, is_send); /* all receivers have the staged buckets */
}

/* Whether messages of this rank would be lost if the process ended now. */
static bool has_unsent(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].peer->nunsent > 0 && !flow->members[i].peer->is_lost)
            return true;
    }
    return false;
}

/* A complete leg does not depend on other ranks any more. It ends when its messages have been sent, so that they are
 * not lost if the process exits; or, without them, when it is cancelled or at its deadline. */
static bool step_complete(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    bool did = is_send && tb__staged_step_out(flow);
    bool is_sent = !is_send || flow->staged.sends_left == 0;
    leg->wake_ms = 0;
    leg->is_released |= is_send && is_sent;
    if ((!is_sent || has_unsent(flow)) && !leg->is_cancelled)
        return did;
    end_complete(flow, is_send);
    return true;
}

void tb__flow_fail_leg(tb__flow *flow, bool is_send, const tb__fault *fault, bool tells) {
    char reason[TB__REASON_MAX];
    if (!tb__flow_leg(flow, is_send)->is_under_way || tb__flow_leg(flow, is_send)->is_ending)
        return;
    if (tb__flow_leg(flow, is_send)->is_complete) {
        end_complete(flow, is_send);
        return;
    }
    const char *told = tells ? tb__flow_reason_for_others(flow, fault->status, fault->why, reason) : NULL;
    if (!is_send && flow->shadow.is_prepared)
        tb__flow_would_end(flow, fault->status, told ? told : fault->why);
    else
        tb__flow_end_leg(flow, is_send, fault->status, fault->why, told);
}

void tb__flow_await_reason(tb__flow *flow, bool is_send, tb_status status, const char *why) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    if ((status != TB_LOST && status != TB_INVALID && status != TB_CANCELLED) || leg->is_cancelled) {
        tb__flow_abort(flow, is_send, status, why);
        return;
    }
    leg->failure = tb__fault_of(status, why);
    leg->wake_ms = tb__now_ms() + REASON_MS;
}

void tb__flow_abort(tb__flow *flow, bool is_send, tb_status status, const char *why) {
    tb__fault fault = tb__fault_of(status, why);
    tb__flow_fail_leg(flow, is_send, &fault, true);
}

void tb__flow_fail_waiting(tb__flow *flow, tb_status status, const char *why) {
    tb__fault fault = tb__fault_of(status, why);
    tb__flow_fail_leg(flow, false, &fault, false);
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

/* Waits for copies that are under way; in vain, if a device does not finish them. Then the leg ends, and the flow is of
 * no use any more. */
static bool step_ending(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    char why[TB__WHY_MAX];
    leg->wake_ms = leg->stuck_ms;
    if (tb__now_ms() < leg->stuck_ms)
        return false;
    leg->is_ending = leg->is_under_way = false;
    leg->status = leg->status == TB_OK ? TB_TIMEOUT : leg->status;
    tb__flow_give_up_copies(flow, why);
    size_t length = strnlen(leg->why, sizeof leg->why - strlen(why) - sizeof "; ");
    snprintf(leg->why + length, sizeof leg->why - length, "%s%s", length ? "; " : "", why);
    return true;
}

bool tb__flow_step(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    bool tells;
    if (leg->is_ending)
        return step_ending(flow, is_send);
    if (!leg->is_under_way)
        return tb__flow_step_abort_acks(flow, is_send);
    if (leg->is_complete)
        return step_complete(flow, is_send);
    if (!is_send && flow->shadow.is_prepared)
        return tb__flow_step_prepared(flow);
    tb__fault reason = tb__flow_find_reason(flow, is_send, &tells);
    if (reason.status != TB_OK) {
        tb__flow_fail_leg(flow, is_send, &reason, tells);
        return true;
    }
    if (leg->failure.status != TB_OK) {
        if (tb__now_ms() < leg->wake_ms)
            return false;
        tb__flow_fail_leg(flow, is_send, &leg->failure, true);
        return true;
    }
    const member *unreachable = is_send ? NULL : tb__flow_find_unreachable(flow);
    if (unreachable) {
        tb_status status = tb__fail(TB_INVALID, "%s; make %s again", unreachable->setup.why_unreachable, flow->what);
        tb__flow_await_reason(flow, false, status, tb_error_detail());
        return true;
    }
    if (!flow->setup.is_planned) {
        tb__phases_enter(leg->phases, TB_PHASE_PLAN);
        (void)tb__flow_ensure_plan(flow);
        enter_phase(leg);
        return true; /* the plan says which members are needed; the next step checks whether they are gone */
    }
    return is_send ? tb__flow_step_send(flow) : tb__flow_step_recv(flow);
}
