/* Shadowed receives: a second home for the targets, who is prepared, what is decided, and the copy that follows. */
#include "flow/flow_inside.h"

#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ASK_AGAIN_MS = 100, LEADS_WORD_MS = 1000, APPLY_AGAIN_MS = 20 };
enum { MOST_SPANS = 64 };

/* ---- Memory --------------------------------------------------------------------------------------------------- */

/* Only ranks that receive need it. */
bool tb__flow_has_shadow(const tb__flow *flow, size_t i) {
    const tb__flow_tensor *t = &flow->tensors[i];
    return !t->is_gathered && !t->has_own_shadow && flow->dst_regions[i];
}

tb_status tb__flow_make_shadow(tb__flow *flow) {
    bool *has = tb__calloc(flow->o.ntensors, sizeof *has);
    if (!has)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < flow->o.ntensors; i++)
        has[i] = tb__flow_has_shadow(flow, i);
    tb_status status = tb__flow_bind_beside(flow, false, has, &flow->shadow_of);
    free(has);
    TB_TRY(status);
    return tb__flow_prepare_copies(flow, COPY_COMMIT); /* nothing may fail once it is decided */
}

/* ---- Words between ranks --------------------------------------------------------------------------------------- */

static bool is_lead(const tb__flow *flow) {
    return flow->self == flow->o.shadow.lead;
}

/* Whoever is prepared may ask the store about the attempt. */
static void note_question(tb__flow *flow, uint64_t attempt) {
    size_t count = flow->questions.count;
    attempt_span *all = flow->questions.item, *last = count > 0 ? &all[count - 1] : NULL;
    if (last && attempt <= last->last + 1) {
        last->first = attempt < last->first ? attempt : last->first;
        last->last = attempt > last->last ? attempt : last->last;
        return;
    }
    if (last && count == MOST_SPANS) { /* then some are forgotten that were never asked */
        all[1].first = all[0].first;
        memmove(all, all + 1, --flow->questions.count * sizeof *all);
    }
    if (!tb__vec_push(&flow->questions, (attempt_span){attempt, attempt}))
        tb__log(TB_LOG_INFO, "no memory: what is decided about version %" PRIu64 " of %s stays in the store",
                tb__flow_number(flow, attempt), flow->what);
}

bool tb__flow_on_prepared(tb__flow *flow, member *from, uint64_t attempt, tb__unpack *message) {
    uint64_t store_number = tb__unpack_u64(message);
    if (!tb__unpack_is_done(message) || !flow->o.shadow.is_used)
        return false;
    from->prepared = attempt;
    from->store_number = store_number;
    note_question(flow, attempt);
    tb__loop_wake(flow->o.loop);
    return true;
}

static bool all_are_prepared(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->o.shadow.is_engine[i] && flow->members[i].prepared != flow->recv.attempt)
            return false;
    }
    return true;
}

/* Whether all who are prepared would ask in the store in which the lead proposes. Otherwise nothing may be proposed. */
static tb_status check_stores(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->o.shadow.is_engine[i] && flow->members[i].store_number != flow->store_number)
            return tb__fail(TB_LOST, "%s was not at the same store as %s, which has to decide %s",
                            flow->members[i].peer->label, flow->members[flow->self].peer->label, flow->what);
    }
    return TB_OK;
}

const member *tb__flow_find_missing(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        const member *m = &flow->members[i];
        bool is_needed =
            is_lead(flow) ? flow->o.shadow.is_engine[i] && m->prepared != flow->recv.attempt : i == flow->o.shadow.lead;
        if (m->is_gone && is_needed)
            return m;
    }
    return NULL;
}

static void tell_decided(tb__flow *flow, uint64_t attempt, tb__decision decision, tb_status status, const char *why) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (i == flow->self || !flow->o.shadow.is_engine[i])
            continue;
        tb__pack pack = {0};
        tb__flow_begin_message(flow, &pack, MESSAGE_DECIDED, attempt);
        tb__pack_u32(&pack, decision);
        tb__pack_status(&pack, status);
        tb__pack_string(&pack, why);
        tb__flow_send_message(flow, &flow->members[i], &pack);
    }
}

void tb__flow_tell_abort_decided(tb__flow *flow, uint64_t attempt, tb_status status, const char *why) {
    bool was_asked = flow->asked == attempt && flow->decision.attempt != attempt;
    if (flow->o.shadow.is_used && is_lead(flow) && !was_asked)
        tell_decided(flow, attempt, TB__DECISION_ABORT, status, why);
}

/* About the attempt that this rank is prepared for, or in doubt about. The lead may have given up the next one before
 * this rank is through with that: whoever is not prepared needs no decision to end. */
static void take_verdict(tb__flow *flow, uint64_t attempt, tb__decision decision, tb_status status, const char *why) {
    if (attempt != (flow->is_prepared ? flow->recv.attempt : flow->unknown_attempt) ||
        flow->decision.attempt == attempt)
        return;
    flow->decision.attempt = attempt;
    flow->decision.decision = decision;
    flow->decision.status = status;
    snprintf(flow->decision.why, sizeof flow->decision.why, "%s", why);
    tb__loop_wake(flow->o.loop);
    tb__loop_signal(flow->o.loop);
}

bool tb__flow_on_decided(tb__flow *flow, const member *from, uint64_t attempt, tb__unpack *message) {
    uint32_t decision = tb__unpack_u32(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool is_commit = decision == TB__DECISION_COMMIT;
    if (!tb__unpack_is_done(message) || !flow->o.shadow.is_used || from != &flow->members[flow->o.shadow.lead] ||
        (!is_commit && (decision != TB__DECISION_ABORT || status == TB_OK)))
        return false;
    if (!is_commit) /* a rank that is not prepared ends by that, too */
        tb__flow_note_abort(flow, attempt, tb__flow_number(flow, attempt), status, why);
    take_verdict(flow, attempt, (tb__decision)decision, status, why);
    return true;
}

/* ---- Decisions -------------------------------------------------------------------------------------------------- */

void tb__flow_prepare(tb__flow *flow) {
    flow->recv.is_arrived = true;
    flow->is_prepared = true;
    flow->gives_up = TB_OK;
    flow->awaits_answer = false;
    flow->unanswered = TB_OK;
    flow->store_number = flow->o.shadow.store_number(flow->o.shadow.arg);
    flow->members[flow->self].prepared = flow->recv.attempt;
    flow->members[flow->self].store_number = flow->store_number;
    if (is_lead(flow)) {
        note_question(flow, flow->recv.attempt);
        return;
    }
    tb__pack pack = {0};
    tb__flow_begin_message(flow, &pack, MESSAGE_PREPARED, flow->recv.attempt);
    tb__pack_u64(&pack, flow->store_number);
    tb__flow_send_message(flow, &flow->members[flow->o.shadow.lead], &pack);
}

void tb__flow_give_up(tb__flow *flow, tb_status status, const char *why) {
    if (flow->gives_up != TB_OK)
        return;
    flow->gives_up = status;
    snprintf(flow->gives_up_why, sizeof flow->gives_up_why, "%s", why);
    tb__loop_wake(flow->o.loop);
}

/* For the reason in tb_error_detail. */
static void leave_unanswered(tb__flow *flow, tb_status status) {
    flow->unanswered = status;
    snprintf(flow->unanswered_why, sizeof flow->unanswered_why, "%s", tb_error_detail());
}

void tb__flow_answer(tb__flow *flow, uint64_t attempt, tb_status status, tb__decision decision, tb_status reason,
                     const char *why) {
    if (attempt != flow->asked) /* it has ended otherwise, and the next one is under way */
        return;
    flow->awaits_answer = false;
    if (status == TB_OK)
        take_verdict(flow, attempt, decision, reason, why);
    else
        leave_unanswered(flow, status);
    tb__loop_wake(flow->o.loop);
    tb__loop_signal(flow->o.loop);
}

static tb_status propose(tb__flow *flow, uint64_t attempt, tb__decision decision, tb_status status, const char *why) {
    TB_TRY(flow->o.shadow.propose(flow->o.shadow.arg, flow->store_number, attempt, decision, status, why));
    flow->asked = attempt;
    flow->awaits_answer = true;
    flow->unanswered = TB_OK;
    return TB_OK;
}

static tb_status say_doubt(const tb__flow *flow, uint64_t attempt, const char *why) {
    return tb__fail(TB_IN_DOUBT, "whether version %" PRIu64 " of %s is committed is not known: %s",
                    tb__flow_number(flow, attempt), flow->what, why);
}

/* The rank keeps what it has, and does not say to other receivers that it was given up: it may not have been. Those who
 * fed it have nothing to wait for. The sentence is in tb_error_detail. */
static void end_alone(tb__flow *flow, tb_status status) {
    tb__leg *leg = &flow->recv;
    leg->is_under_way = false;
    leg->status = status;
    snprintf(leg->why, sizeof leg->why, "%s", tb_error_detail());
    flow->is_prepared = false;
    char words[TB__WORDS_MAX];
    tb__flow_own_words(flow, status, leg->why, words);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_sender)
            tb__flow_tell_abort(flow, i, leg->attempt, leg->number, status, words);
    }
}

static void end_in_doubt(tb__flow *flow) {
    flow->unknown_attempt = flow->recv.attempt;
    end_alone(flow, say_doubt(flow, flow->unknown_attempt, flow->unanswered_why));
}

static void end_aborted(tb__flow *flow) {
    flow->is_prepared = false;
    tb__flow_end_leg(flow, false, tb__fail(flow->decision.status, "%s", flow->decision.why), flow->decision.why);
}

/* From the shadow into the tensors. Fails only where the tensors' memory was invalidated, or there is no memory to
 * begin with. `end` is called when it is done. */
static tb_status begin_commit(tb__flow *flow, void (*end)(copying *c, tb_status status)) {
    TB_TRY(tb__flow_check_memory(flow, false));
    copying *c = tb__flow_new_copying(flow, false, COPY_COMMIT, 0);
    if (!c)
        return TB_NO_MEMORY;
    flow->is_applying = true;
    c->end = end;
    return tb__flow_start_copying(c); /* it was prepared when the shadow was made */
}

/* With the lock held, which is free while functions of others are called. */
static void end_commit(tb__flow *flow, void (*committing)(void *arg, bool is_done), void *arg) {
    tb__loop_unlock(flow->o.loop);
    if (committing)
        committing(arg, true);
    tb__loop_lock(flow->o.loop);
    flow->is_applying = false;
    tb__loop_signal(flow->o.loop); /* somebody may wait for the memory */
}

static void call_committing(tb__flow *flow, void (*committing)(void *arg, bool is_done), void *arg) {
    if (!committing)
        return;
    tb__loop_unlock(flow->o.loop);
    committing(arg, false);
    tb__loop_lock(flow->o.loop);
}

/* Whoever has committed the last attempt has been told the end of the one before it, as everybody who was prepared for
 * the last one: nobody will ask about those any more. */
static void forget_old(tb__flow *flow, uint64_t attempt) {
    while (flow->questions.count && flow->questions.item[0].first + 2 <= attempt) {
        attempt_span *oldest = &flow->questions.item[0];
        flow->o.shadow.forget(flow->o.shadow.arg, oldest->first++);
        if (oldest->first > oldest->last)
            memmove(oldest, oldest + 1, --flow->questions.count * sizeof *oldest);
    }
}

static void tell_committed(tb__flow *flow, uint64_t attempt) {
    flow->version = tb__flow_number(flow, attempt);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_sender)
            tb__flow_tell(flow, &flow->members[i], MESSAGE_COMMITTED, attempt);
    }
    forget_old(flow, attempt);
}

/* It is decided, so what is missing is waited for until the deadline: memory. Whatever else fails is final. */
static void fail_commit(tb__flow *flow, tb_status status) {
    const tb__leg *leg = &flow->recv;
    flow->is_applying = false;
    if (status == TB_NO_MEMORY && !leg->is_late && !leg->is_cancelled)
        flow->apply_again_ms = tb__now_ms() + APPLY_AGAIN_MS;
    else
        end_alone(flow, status);
    tb__loop_wake(flow->o.loop);
    tb__loop_signal(flow->o.loop);
}

static tb_status say_missed(const tb__flow *flow, uint64_t attempt, tb_status status) {
    return tb__fail_within(status, "version %" PRIu64 " of %s is committed, but not on this rank",
                           tb__flow_number(flow, attempt), flow->what);
}

static void on_committed(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    tb__leg *leg = &flow->recv;
    if (status != TB_OK) {
        fail_commit(flow, say_missed(flow, leg->attempt, status));
        return;
    }
    end_commit(flow, leg->committing, leg->committing_arg);
    tell_committed(flow, leg->attempt);
    flow->is_prepared = false;
    leg->is_complete = true;
}

static void end_committed(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    flow->is_applying = true;
    if (!leg->is_committing)
        call_committing(flow, leg->committing, leg->committing_arg);
    leg->is_committing = true;
    flow->apply_again_ms = 0;
    tb_status status = begin_commit(flow, on_committed);
    if (status != TB_OK)
        fail_commit(flow, say_missed(flow, leg->attempt, status));
}

static bool is_held(const tb__flow *flow) {
    const tb__leg *leg = &flow->recv;
    return leg->holds && !leg->may_proceed && !leg->is_cancelled && !leg->memory_invalidated;
}

/* Others are told at once, whatever holds this rank back. */
static bool step_decided(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    if (flow->is_applying)
        return false;
    if (tb__now_ms() < flow->apply_again_ms && !leg->is_late && !leg->is_cancelled) {
        leg->wake_ms = flow->apply_again_ms;
        return false;
    }
    bool is_new = !leg->is_decided;
    leg->is_decided = true;
    if (is_new && is_lead(flow))
        tell_decided(flow, leg->attempt, TB__DECISION_COMMIT, TB_OK, "");
    if (is_held(flow))
        return is_new;
    end_committed(flow);
    return true;
}

/* What this rank is for: TB_OK, to commit, or to abort, for this reason. */
static tb_status choose(tb__flow *flow) {
    bool tells;
    if (flow->gives_up != TB_OK)
        return tb__fail(flow->gives_up, "%s", flow->gives_up_why);
    return tb__flow_find_reason(flow, false, &tells);
}

/* Proposes what this rank is for, if it is for anything. Nobody but the lead proposes to commit, so as long as it has
 * not, its word is enough to abort. */
static bool step_undecided(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    bool has_the_word = is_lead(flow) && flow->asked != leg->attempt;
    tb_status status = choose(flow);
    if (status == TB_OK && (!is_lead(flow) || !all_are_prepared(flow)))
        return false;
    if (status == TB_OK && has_the_word)
        status = check_stores(flow);
    char why[TB__WHY_MAX] = "";
    if (status != TB_OK)
        snprintf(why, sizeof why, "%s", tb_error_detail());
    tb_status asking = TB_OK;
    if (status == TB_OK || !has_the_word)
        asking = propose(flow, leg->attempt, status == TB_OK ? TB__DECISION_COMMIT : TB__DECISION_ABORT, status, why);
    if (asking != TB_OK && !has_the_word)
        leave_unanswered(flow, asking);
    else if (asking != TB_OK)
        take_verdict(flow, leg->attempt, TB__DECISION_ABORT, asking, tb_error_detail());
    else if (status != TB_OK && has_the_word)
        take_verdict(flow, leg->attempt, TB__DECISION_ABORT, status, why);
    return true;
}

/* A store that is silent is asked until the deadline. One that has another in its place never answers any more, but the
 * lead may be about to give up for all. */
static bool step_unanswered(tb__flow *flow) {
    tb__leg *leg = &flow->recv;
    int64_t now_ms = tb__now_ms();
    bool is_gone = flow->o.shadow.store_number(flow->o.shadow.arg) != flow->store_number;
    bool is_over = leg->is_late || leg->is_cancelled || (is_gone && is_lead(flow));
    if (!is_over && !leg->wake_ms) {
        leg->wake_ms = now_ms + (is_gone ? LEADS_WORD_MS : ASK_AGAIN_MS);
        return true;
    }
    if (!is_over && now_ms < leg->wake_ms)
        return false;
    leg->wake_ms = 0;
    if (is_over || is_gone) {
        end_in_doubt(flow);
        return true;
    }
    flow->unanswered = TB_OK;
    return step_undecided(flow);
}

bool tb__flow_step_prepared(tb__flow *flow) {
    if (flow->decision.attempt == flow->recv.attempt) {
        flow->recv.wake_ms = 0;
        if (flow->decision.decision == TB__DECISION_COMMIT)
            return step_decided(flow);
        end_aborted(flow);
        return true;
    }
    if (flow->awaits_answer)
        return false;
    return flow->unanswered != TB_OK ? step_unanswered(flow) : step_undecided(flow);
}

/* ---- Doubts ---------------------------------------------------------------------------------------------------- */

bool tb__flow_outcome_is_unknown(const tb__flow *flow) {
    return flow->unknown_attempt != 0;
}

bool tb__flow_awaits_answer(const tb__flow *flow) {
    return flow->awaits_answer && flow->decision.attempt < flow->unknown_attempt;
}

tb_status tb__flow_ask_again(tb__flow *flow) {
    if (flow->awaits_answer || flow->decision.attempt >= flow->unknown_attempt)
        return TB_OK;
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "rank %" PRId32 " did not hear the end of it", flow->o.rank);
    tb_status status = propose(flow, flow->unknown_attempt, TB__DECISION_ABORT, TB_LOST, why);
    return status == TB_OK ? TB_OK : say_doubt(flow, flow->unknown_attempt, tb_error_detail());
}

static void on_settled(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    flow->unanswered = status;
    if (status != TB_OK)
        snprintf(flow->unanswered_why, sizeof flow->unanswered_why, "%s", tb_error_detail());
    flow->is_copied = true;
}

static bool is_copied(void *arg) {
    return ((const tb__flow *)arg)->is_copied;
}

static tb_status settle_commit(tb__flow *flow, uint64_t attempt, void (*committing)(void *arg, bool is_done),
                               void *arg) {
    call_committing(flow, committing, arg);
    flow->is_copied = false;
    tb_status status = begin_commit(flow, on_settled);
    if (status == TB_OK) {
        tb__loop_wait(flow->o.loop, is_copied, flow, INT64_MAX);
        if (flow->unanswered != TB_OK)
            status = tb__fail(flow->unanswered, "%s", flow->unanswered_why);
    }
    if (status != TB_OK) {
        flow->is_applying = false;
        return say_missed(flow, attempt, status);
    }
    end_commit(flow, committing, arg);
    return TB_OK;
}

tb_status tb__flow_settle(tb__flow *flow, void (*committing)(void *arg, bool is_done), void *arg) {
    uint64_t attempt = flow->unknown_attempt;
    if (attempt == 0)
        return TB_OK;
    if (flow->decision.attempt != attempt)
        return say_doubt(flow, attempt, flow->awaits_answer ? "the store has not answered" : flow->unanswered_why);
    if (flow->is_settling)
        return say_doubt(flow, attempt, "another thread is about to copy it");
    if (flow->decision.decision == TB__DECISION_COMMIT) {
        flow->is_settling = true;
        if (is_lead(flow))
            tell_decided(flow, attempt, TB__DECISION_COMMIT, TB_OK, "");
        tb_status status = settle_commit(flow, attempt, committing, arg);
        if (status == TB_OK)
            tell_committed(flow, attempt);
        flow->is_settling = false;
        TB_TRY(status);
    }
    flow->unknown_attempt = 0;
    return TB_OK;
}
