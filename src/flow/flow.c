/* A flow: creation, messages out, members that leave, breaking, and the dispatch of messages in. */
#include "flow/flow_inside.h"

#include "base/int.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Create and destroy ---------------------------------------------------------------------------------------- */

static tb_status add_members(tb__flow *flow) {
    const tb__flow_opts *o = &flow->o;
    flow->self = o->npeers;
    for (size_t i = 0; i < o->npeers; i++) {
        member *m = &flow->members[i];
        m->peer = o->peers[i];
        m->port = o->ports[i];
        if (m->peer->rank == o->rank)
            flow->self = i;
    }
    return flow->self < o->npeers ? TB_OK : tb__fail(TB_INTERNAL, "this rank is not in its own flow");
}

tb_status tb__flow_create(const tb__flow_opts *opts, tb__flow **out) {
    tb__flow *flow = tb__calloc(1, sizeof *flow);
    if (!flow)
        return TB_NO_MEMORY;
    flow->o = *opts;
    flow->nmembers = opts->npeers;
    flow->members = tb__calloc(opts->npeers, sizeof *flow->members);
    flow->tensors = tb__malloc(opts->ntensors, sizeof *flow->tensors);
    flow->what = tb__strdup(opts->what);
    tb_status status = flow->members && flow->tensors && flow->what ? add_members(flow) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__flow_destroy(flow);
        return status;
    }
    if (opts->ntensors)
        memcpy(flow->tensors, opts->tensors, opts->ntensors * sizeof *flow->tensors);
    for (size_t i = 0; i < opts->ntensors; i++)
        flow->has_padding |= opts->tensors[i].npadding > 0;
    flow->setup.ir = opts->ir;
    tb__flow_record_started(flow, opts->started);
    tb__flow_watch_revocations(flow);
    *out = flow;
    return TB_OK;
}

/* Flows whose memory a transport may still access. Only leak checkers look at the list. */
static _Atomic(tb__flow *) kept_flows;

bool tb__flow_free(tb__flow *flow) {
    tb__flow_set_stream_point(flow, true, NULL);
    tb__flow_set_stream_point(flow, false, NULL);
    tb__loop_unwatch_revocations(&flow->direct.watch);
    tb__flow_release_copies(flow);
    tb__staged_fini(flow);
    if (flow->members)
        tb__flow_unbind(flow);
    for (size_t i = 0; flow->members && i < flow->nmembers; i++)
        free(flow->members[i].gone_why);
    tb__flow_unplan(flow);
    tb__attempts_fini(&flow->attempts);
    tb__flow_free_groups(flow);
    free(flow->members);
    free(flow->tensors);
    free(flow->what);
    if (flow->staged.held) {
        flow->next_kept = atomic_exchange(&kept_flows, flow);
        return false;
    }
    free(flow);
    return true;
}

bool tb__flow_destroy(tb__flow *flow) {
    if (!flow)
        return true;
    tb__flow_fini_report(flow);
    return tb__flow_end_copies(flow) && tb__flow_free(flow);
}

member *tb__flow_find_member(tb__flow *flow, int32_t rank) {
    size_t at = 0;
    TB_BISECT(at, flow->nmembers, flow->members[at].peer->rank >= rank);
    return at < flow->nmembers && flow->members[at].peer->rank == rank ? &flow->members[at] : NULL;
}

/* ---- Messages out --------------------------------------------------------------------------------------------- */

void tb__flow_begin_message(tb__flow *flow, tb__pack *pack, message_kind kind, uint64_t attempt) {
    tb__pack_u32(pack, flow->o.direction);
    tb__pack_u32(pack, kind);
    tb__pack_u64(pack, attempt);
}

void tb__flow_send_message(tb__flow *flow, member *to, tb__pack *pack) {
    tb_status status = tb__loop_send(to->peer, to->port, pack);
    if (status == TB_OK)
        return;
    status = tb__fail_within(status, "rank %" PRId32 ": a message of %s to %s could not be sent", flow->o.rank,
                             flow->what, to->peer->label);
    tb__flow_miss_message(flow, to, status, tb_error_detail());
}

void tb__flow_tell(tb__flow *flow, member *to, message_kind kind, uint64_t attempt) {
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, kind, attempt);
    tb__flow_send_message(flow, to, &pack);
}

void tb__flow_send_gather_message(tb__flow *flow, int32_t rank, uint64_t attempt, tb__pack *message) {
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_GATHER, attempt);
    tb__pack_raw(&pack, message->data, message->count);
    pack.failed |= message->failed;
    member *to = tb__flow_find_member(flow, rank);
    if (to)
        tb__flow_send_message(flow, to, &pack);
    else
        tb__pack_fini(&pack);
}

/* Whether a member is lost, not only gone: it can't come back, so no transfer begins any more. */
static bool has_lost_member(const tb__flow *flow) {
    for (size_t i = 0; flow->ngone && i < flow->nmembers; i++) {
        if (flow->members[i].is_gone && !flow->members[i].has_left)
            return true;
    }
    return false;
}

void tb__flow_tell_abort(tb__flow *flow, size_t position, uint64_t attempt, uint64_t number, tb_status status,
                         const char *why) {
    tb__pack pack = {0};
    if (position == flow->self) {
        tb__flow_record_abort(flow, attempt, number, status, why);
        return;
    }
    tb__flow_begin_message(flow, &pack, MESSAGE_ABORT, attempt);
    tb__pack_u64(&pack, number);
    tb__pack_status(&pack, status);
    tb__pack_string(&pack, why);
    tb__pack_u32(&pack, status == TB_LOST && has_lost_member(flow));
    tb__flow_send_message(flow, &flow->members[position], &pack);
}

void tb__flow_tell_all_abort(tb__flow *flow, uint64_t attempt, uint64_t number, tb_status status, const char *why) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (i != flow->self)
            tb__flow_tell_abort(flow, i, attempt, number, status, why);
    }
}

/* ---- Breaking, and members that leave -------------------------------------------------------------------------- */

static void break_flow(tb__flow *flow, tb_status status, const char *why, bool tells) {
    char reason[TB__REASON_MAX];
    if (!tb__flow_record_broken(flow, status, why))
        return;
    tb__flow_fail_leg(flow, true, &flow->report.broken, false);
    tb__flow_fail_leg(flow, false, &flow->report.broken, false);
    if (tells)
        tb__flow_tell_all_abort(flow, 0, 0, status,
                                tb__flow_reason_for_others(flow, status, flow->report.broken.why, reason));
    tb__loop_wake(flow->o.loop);
}

void tb__flow_break(tb__flow *flow, tb_status status, const char *why) {
    break_flow(flow, status, why, true);
}

/* The member takes no further part, for this reason. Legs that still need it fail in their next step. */
static void drop_member(tb__flow *flow, member *m, tb_status status, const char *why, bool has_left) {
    if (m->is_gone)
        return;
    m->is_gone = true;
    m->gone_status = status;
    m->gone_why = tb__strdup(why);
    m->gone_ms = tb__now_ms();
    m->has_left = has_left;
    flow->ngone++;
    tb__staged_drop_sends(flow, m);
    tb__flow_check_exposure_of(flow, m);
    tb__flow_conclude_gone(flow, m);
    tb__loop_wake(flow->o.loop);
}

const char *tb__member_why_gone(const member *m) {
    return m->gone_why ? m->gone_why : m->peer->label;
}

void tb__flow_on_peer_lost(tb__flow *flow, size_t position) {
    member *m = &flow->members[position];
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "%s was lost during %s: %s", m->peer->label, flow->what,
             m->peer->why ? m->peer->why : "?");
    drop_member(flow, m, TB_LOST, why, false);
}

void tb__flow_on_peer_failed(tb__flow *flow, size_t position, const char *why) {
    drop_member(flow, &flow->members[position], TB_LOST, why, false);
}

/* A member that leaves may know, before this rank does, why the transfer has failed, so its goodbye says that.
 * Invalidated memory stays invalid: then later transfers fail for the same reason. */
void tb__flow_on_peer_left(tb__flow *flow, size_t position, uint64_t started, const tb__failure *last) {
    member *m = &flow->members[position];
    tb_status status = last->status == TB_INVALID ? TB_INVALID : TB_LOST;
    tb__flow_record_started(flow, started);
    if (last->attempt)
        tb__flow_record_abort(flow, last->attempt, last->number, last->status, last->why);
    char why[TB__WHY_MAX];
    if (status == TB_INVALID)
        snprintf(why, sizeof why, "%s", last->why);
    else
        snprintf(why, sizeof why, "%s has given up %s%s%s", m->peer->label, flow->what, *last->why ? ": " : "",
                 last->why);
    drop_member(flow, m, status, why, true);
}

/* For other ranks: without the note that tensors are torn. A rank with TB_IN_DOUBT does not report a failed attempt,
 * because others may have committed it. */
tb__failure tb__flow_last_failure(const tb__flow *flow) {
    const tb__leg *leg = flow->send.status != TB_OK ? &flow->send : &flow->recv;
    const tb__abort *abort = leg->status != TB_IN_DOUBT ? tb__flow_find_abort(flow, leg->attempt) : NULL;
    if (leg->status == TB_OK || !abort)
        return (tb__failure){.status = leg->status, .why = leg->status == TB_OK ? "" : leg->why};
    return (tb__failure){leg->status, abort->why, leg->attempt, leg->number};
}

bool tb__flow_may_begin(const tb__flow *flow, bool is_send) {
    return flow->report.broken.status == TB_OK && ((flow->ngone == 0 && flow->report.loss.status == TB_OK) ||
                                                   tb__flow_next_attempt(flow, is_send) <= flow->attempts.started);
}

tb_status tb__flow_check_loss(const tb__flow *flow) {
    const tb__fault *loss = &flow->report.loss;
    return loss->status == TB_OK ? TB_OK : tb__fail(loss->status, "%s", loss->why);
}

/* ---- Messages in ---------------------------------------------------------------------------------------------- */

void tb__flow_fail_no_memory(tb__flow *flow, const member *from) {
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "rank %" PRId32 " has no memory for a message of %s about %s", flow->o.rank,
             from->peer->label, flow->what);
    tb__flow_fail_later(flow, TB_NO_MEMORY, why);
}

/* Attempt 0: the rank's flow is broken. If another member's loss broke it, this rank need not break: it may not need
 * either of them. A member that knows of a loss says so in the abort, because this rank may learn of that loss only
 * after its program has begun the next transfer. */
static bool on_abort(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message) {
    uint64_t number = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool has_lost = tb__unpack_u32(message) != 0;
    if (!tb__unpack_is_done(message) || status == TB_OK)
        return false;
    if (has_lost)
        tb__flow_record_loss(flow, why);
    if (attempt == 0 && status == TB_LOST)
        tb__flow_on_peer_failed(flow, (size_t)(from - flow->members), why);
    else if (attempt == 0)
        break_flow(flow, status, why, false);
    else
        tb__flow_record_abort(flow, attempt, number, status, why);
    if (attempt != 0)
        tb__flow_ack_abort(flow, from, attempt);
    return true;
}

static bool on_start(tb__flow *flow, const member *from, uint64_t attempt, tb__unpack *message) {
    uint64_t number = tb__unpack_u64(message);
    if (!tb__unpack_is_done(message) || from != &flow->members[flow->o.lead])
        return false;
    if (!tb__flow_record_start(flow, attempt, number))
        tb__flow_fail_no_memory(flow, from);
    return true;
}

static bool on_message(tb__flow *flow, member *from, message_kind kind, uint64_t attempt, tb__unpack *message) {
    switch (kind) {
    case MESSAGE_BIND:
        return !tb__flow_ensure_plan(flow) || tb__flow_on_bind(flow, from, message);
    case MESSAGE_REACH:
        return tb__flow_on_reach(flow, from, message);
    case MESSAGE_START:
        return on_start(flow, from, attempt, message);
    case MESSAGE_READY:
        return tb__member_on_ready(from, attempt);
    case MESSAGE_BUCKET:
        return tb__staged_on_bucket(flow, from, attempt, message);
    case MESSAGE_GO:
        return tb__staged_on_go(flow, from, message);
    case MESSAGE_TAKEN:
        return tb__staged_on_taken(flow, from, message);
    case MESSAGE_STASHED:
        tb__flow_on_stashed(flow, from, attempt);
        return from->setup.is_reader;
    case MESSAGE_DONE:
        tb__flow_on_done(flow, from, attempt);
        return from->setup.is_reader;
    case MESSAGE_GATHER:
        return flow->o.gather.on_message &&
               flow->o.gather.on_message(flow->o.gather.arg, from->peer->rank, attempt, message);
    case MESSAGE_ABORT:
        return on_abort(flow, from, attempt, message);
    case MESSAGE_COMMITTED:
        tb__flow_on_committed(flow, from, attempt);
        return from->setup.is_reader;
    case MESSAGE_ABORT_ACK:
        tb__flow_on_abort_ack(from, attempt);
        return true;
    case MESSAGE_REBIND:
        return tb__flow_on_rebind(flow, from, message);
    case MESSAGE_KINDS:
        break;
    }
    return false;
}

bool tb__flow_message(tb__flow *flow, size_t position, tb__unpack *message) {
    uint32_t kind = tb__unpack_u32(message);
    uint64_t attempt = tb__unpack_u64(message);
    if (message->failed)
        return false;
    if (flow->report.broken.status != TB_OK)
        return true;
    return on_message(flow, &flow->members[position], (message_kind)kind, attempt, message);
}
