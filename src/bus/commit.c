/* The state machine that commit.h describes: transitions, then messages, proposals, steps and events. */
#include "bus/exchange.h"

#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ASK_AGAIN_MS = 100, LEAD_ABORTS_MS = 1000, APPLY_AGAIN_MS = 20, STUCK_MS = 5000 };
enum { MOST_SPANS = 64 };
enum { MESSAGE_PREPARED, MESSAGE_DECIDED };

static tb__flow *flow_of(const tb__commit_machine *c) {
    return c->exchange->flows[c->src];
}

static uint64_t store_now(const tb__commit_machine *c) {
    return tb__directory_store_number(c->exchange->world->directory);
}

/* Called after a new input: wakes the driver, and tb__commit_resolve. */
static void wake_driver(const tb__commit_machine *c) {
    tb__loop_wake(c->exchange->world->loop);
    tb__loop_signal(c->exchange->world->loop);
}

static void set_reason(tb__reason *reason, tb_status status, const char *why) {
    reason->status = status;
    snprintf(reason->why, sizeof reason->why, "%s", why);
}

/* ---- Transitions ------------------------------------------------------------------------------------------------ */

/* Outputs of a transition, in the order in which they are performed. */
enum {
    SEND_PREPARED = 1,
    SEND_COMMIT = 2, /* DECIDED */
    PROPOSE = 4,     /* to abort, if there is a reason; else to commit */
    APPLY = 8,
    GIVE_UP_APPLY = 16,
    DISCARD_ABORTED = 32,
    DISCARD_UNKNOWN = 64,
    DISCARD_NOT_APPLIED = 128,
    FORGET = 256, /* answers that no rank will ask for again */
};

/* Inputs that are looked up at each step. */
typedef struct conditions {
    int64_t now_ms;
    bool is_cancelled, memory_invalidated; /* of the receive */
    bool store_is_replaced;                /* the one that decides, and has not answered */
} conditions;

/* The store has answered, or has failed to. */
static bool has_answer(const tb__commit_machine *c) {
    return c->decision != TB__DECISION_NONE || c->unanswered.status != TB_OK;
}

static bool all_are_prepared(const tb__commit_machine *c) {
    for (size_t i = 0; i < c->exchange->handshake.npeers; i++) {
        if (c->receivers[i].is_receiver && c->receivers[i].prepared != c->attempt)
            return false;
    }
    return true;
}

/* A receiver connected to another store could be told another decision. */
static void check_stores(tb__commit_machine *c) {
    const tb__exchange *exchange = c->exchange;
    char why[TB__WHY_MAX];
    for (size_t i = 0; i < exchange->handshake.npeers; i++) {
        if (!c->receivers[i].is_receiver || c->receivers[i].store_number == c->store_number)
            continue;
        snprintf(why, sizeof why, "%s was not at the same store as %s, which has to decide %s",
                 exchange->handshake.peers[i]->label, exchange->handshake.peers[c->lead]->label, exchange->what);
        set_reason(&c->reason, TB_LOST, why);
        return;
    }
}

static unsigned follow_decision(tb__commit_machine *c) {
    c->wake_ms = 0;
    c->is_decided = c->decision == TB__DECISION_COMMIT;
    c->state = c->is_decided ? COMMIT_DECIDED : COMMIT_IDLE;
    return c->is_decided ? SEND_COMMIT : DISCARD_ABORTED;
}

/* Makes at most one transition, and returns what is to be done. Only this function and follow_decision set the state.
 */
static unsigned make_transition(tb__commit_machine *c, const conditions *s) {
    bool is_over = c->is_late || s->is_cancelled; /* nothing is waited for any more */
    bool is_undecided = c->state >= COMMIT_PREPARED && c->state <= COMMIT_UNANSWERED;
    if (is_undecided && c->decision != TB__DECISION_NONE)
        return follow_decision(c);
    switch (c->state) {
    case COMMIT_IDLE:
        if (!c->is_prepared)
            return 0;
        c->is_prepared = false;
        c->state = COMMIT_PREPARED;
        return SEND_PREPARED;
    case COMMIT_PREPARED:
        if (c->reason.status == TB_OK && (!c->is_lead || !all_are_prepared(c)))
            return 0;
        if (c->is_lead && c->reason.status == TB_OK)
            check_stores(c);
        if (c->is_lead && c->reason.status != TB_OK) {
            c->decision = TB__DECISION_ABORT;
            c->aborted = c->reason;
            return follow_decision(c);
        }
        c->state = COMMIT_PROPOSED;
        return PROPOSE;
    case COMMIT_PROPOSED:
        if (!has_answer(c))
            return 0;
        c->state = COMMIT_UNANSWERED;
        c->wake_ms = s->now_ms + (s->store_is_replaced ? LEAD_ABORTS_MS : ASK_AGAIN_MS);
        return 0;
    case COMMIT_UNANSWERED:
        is_over |= s->store_is_replaced && c->is_lead;
        if (!is_over && s->now_ms < c->wake_ms)
            return 0;
        c->wake_ms = 0;
        if (is_over || s->store_is_replaced) {
            c->state = COMMIT_OUTCOME_UNKNOWN;
            return DISCARD_UNKNOWN;
        }
        c->unanswered.status = TB_OK;
        c->state = COMMIT_PROPOSED;
        return PROPOSE;
    case COMMIT_DECIDED:
        if ((c->holds && !c->may_proceed && !s->is_cancelled && !s->memory_invalidated) ||
            (s->now_ms < c->wake_ms && !is_over))
            return 0;
        c->wake_ms = 0;
        c->is_applied = false;
        c->state = COMMIT_APPLYING;
        return APPLY;
    case COMMIT_APPLYING:
        if (!c->is_applied && is_over && c->wake_ms == 0)
            c->wake_ms = s->now_ms + STUCK_MS;
        if (!c->is_applied)
            return c->wake_ms && s->now_ms >= c->wake_ms ? GIVE_UP_APPLY : 0;
        c->wake_ms = 0;
        if (c->not_applied.status == TB_NO_MEMORY && !is_over) {
            c->wake_ms = s->now_ms + APPLY_AGAIN_MS;
            c->state = COMMIT_DECIDED;
            return 0;
        }
        c->state = COMMIT_IDLE;
        return c->not_applied.status == TB_OK ? FORGET : DISCARD_NOT_APPLIED;
    case COMMIT_OUTCOME_UNKNOWN:
        if (!c->is_wanted)
            return 0;
        c->is_wanted = false;
        if (c->decision == TB__DECISION_COMMIT) {
            c->is_applied = false;
            c->state = COMMIT_APPLYING_LATE;
            return SEND_COMMIT | APPLY;
        }
        c->unanswered.status = TB_OK;
        c->state = c->decision == TB__DECISION_ABORT ? COMMIT_IDLE : COMMIT_ASKING_AGAIN;
        return c->decision == TB__DECISION_ABORT ? 0 : PROPOSE;
    case COMMIT_ASKING_AGAIN:
        c->state = has_answer(c) ? COMMIT_OUTCOME_UNKNOWN : c->state;
        return 0;
    case COMMIT_APPLYING_LATE:
        if (!c->is_applied)
            return 0;
        c->state = c->not_applied.status == TB_OK ? COMMIT_IDLE : COMMIT_OUTCOME_UNKNOWN;
        return c->not_applied.status == TB_OK ? FORGET : 0;
    }
    return 0;
}

/* ---- Messages --------------------------------------------------------------------------------------------------- */

static void begin_message(const tb__commit_machine *c, tb__pack *pack, uint32_t kind, uint64_t attempt) {
    tb__pack_u32(pack, (uint32_t)(TB__EXCHANGE_COMMIT + c->src));
    tb__pack_u32(pack, kind);
    tb__pack_u64(pack, attempt);
}

static void send_prepared(const tb__commit_machine *c) {
    tb__pack pack = {0};
    begin_message(c, &pack, MESSAGE_PREPARED, c->attempt);
    tb__pack_u64(&pack, c->store_number);
    tb__flow_send_owner_message(flow_of(c), c->lead, &pack);
}

/* Does nothing at other ranks than the lead. */
static void send_decided(const tb__commit_machine *c, uint64_t attempt, tb__decision decision, tb_status status,
                         const char *why) {
    for (size_t i = 0; c->is_lead && i < c->exchange->handshake.npeers; i++) {
        if (i == c->lead || !c->receivers[i].is_receiver)
            continue;
        tb__pack pack = {0};
        begin_message(c, &pack, MESSAGE_DECIDED, attempt);
        tb__pack_u32(&pack, decision);
        tb__pack_status(&pack, status);
        tb__pack_string(&pack, why);
        tb__flow_send_owner_message(flow_of(c), i, &pack);
    }
}

static void record_decision(tb__commit_machine *c, uint64_t attempt, tb__decision decision, tb_status status,
                            const char *why) {
    if (attempt != c->attempt || c->decision != TB__DECISION_NONE)
        return;
    c->decision = decision;
    set_reason(&c->aborted, status, why);
    wake_driver(c);
}

/* A rank that is not prepared fails by the lead's decision to abort. */
static bool on_decided(tb__commit_machine *c, uint64_t attempt, tb__unpack *message) {
    uint32_t decision = tb__unpack_u32(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool is_commit = decision == TB__DECISION_COMMIT;
    if (!tb__unpack_is_done(message) || (!is_commit && (decision != TB__DECISION_ABORT || status == TB_OK)))
        return false;
    if (!is_commit)
        tb__flow_record_abort(flow_of(c), attempt, tb__flow_number(flow_of(c), attempt), status, why);
    record_decision(c, attempt, (tb__decision)decision, status, why);
    return true;
}

/* A rank that is prepared may ask the store about the attempt. */
static void record_question(tb__commit_machine *c, uint64_t attempt) {
    size_t count = c->questions.count;
    tb__attempt_span *all = c->questions.item, *last = count > 0 ? &all[count - 1] : NULL;
    if (last && attempt <= last->last + 1) {
        last->first = attempt < last->first ? attempt : last->first;
        last->last = attempt > last->last ? attempt : last->last;
        return;
    }
    if (last && count == MOST_SPANS) { /* merging spans deletes attempts between them, too, which does no harm */
        all[1].first = all[0].first;
        memmove(all, all + 1, --c->questions.count * sizeof *all);
    }
    if (!tb__vec_push(&c->questions, (tb__attempt_span){attempt, attempt}))
        tb__log(TB_LOG_INFO, "no memory: what is decided about version %" PRIu64 " of %s stays in the store",
                tb__flow_number(flow_of(c), attempt), c->exchange->what);
}

static void record_prepared(tb__commit_machine *c, size_t position, uint64_t attempt, uint64_t store_number) {
    c->receivers[position].prepared = attempt;
    c->receivers[position].store_number = store_number;
    record_question(c, attempt);
    wake_driver(c);
}

bool tb__commit_message(tb__commit_machine *c, size_t from, tb__unpack *message) {
    uint32_t kind = tb__unpack_u32(message);
    uint64_t attempt = tb__unpack_u64(message);
    if (c->is_used && kind == MESSAGE_DECIDED && from == c->lead)
        return on_decided(c, attempt, message);
    uint64_t store_number = tb__unpack_u64(message);
    if (kind != MESSAGE_PREPARED || !tb__unpack_is_done(message) || !c->is_lead || !c->receivers[from].is_receiver)
        return false;
    record_prepared(c, from, attempt, store_number);
    return true;
}

/* ---- The store -------------------------------------------------------------------------------------------------- */

/* Unique to the batch, because the lead's port is. */
static void name_question(const tb__commit_machine *c, uint64_t attempt, char *out, size_t room) {
    const tb__peer *lead = c->exchange->handshake.peers[c->lead];
    snprintf(out, room, "%" PRId32 "/%" PRIu64 "/%" PRIu32 "/%d/%" PRIu64, lead->rank, lead->incarnation,
             c->exchange->handshake.ports[c->lead], c->src, attempt);
}

/* If nothing could be proposed, the lead can still abort on its own, unless it has proposed to commit before. */
static void propose_decision(tb__commit_machine *c) {
    char question[TB__QUESTION_ROOM];
    name_question(c, c->attempt, question, sizeof question);
    tb__decision decision = c->reason.status == TB_OK ? TB__DECISION_COMMIT : TB__DECISION_ABORT;
    tb_status status = tb__commit_log_propose(c->exchange->world->commit_log, c, c->store_number, question, c->attempt,
                                              decision, c->reason.status, c->reason.why);
    c->has_proposed |= status == TB_OK;
    if (status != TB_OK && c->is_lead && !c->has_proposed)
        record_decision(c, c->attempt, TB__DECISION_ABORT, status, tb_error_detail());
    else if (status != TB_OK)
        set_reason(&c->unanswered, status, tb_error_detail());
}

void tb__commit_answer(tb__commit_machine *c, uint64_t attempt, tb__decision decision, tb_status status,
                       const char *why) {
    if (attempt != c->attempt || (c->state != COMMIT_PROPOSED && c->state != COMMIT_ASKING_AGAIN))
        return;
    if (decision == TB__DECISION_NONE)
        set_reason(&c->unanswered, status, why);
    else
        record_decision(c, attempt, decision, status, why);
    wake_driver(c);
}

/* When the lead has committed an attempt, all ranks were prepared for it, and so know how the one before it ended. */
static void delete_old_questions(tb__commit_machine *c) {
    char question[TB__QUESTION_ROOM];
    while (c->questions.count && c->questions.item[0].first + 2 <= c->attempt) {
        tb__attempt_span *oldest = &c->questions.item[0];
        name_question(c, oldest->first++, question, sizeof question);
        tb__commit_log_forget(c->exchange->world->commit_log, question);
        if (oldest->first > oldest->last)
            memmove(oldest, oldest + 1, --c->questions.count * sizeof *oldest);
    }
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

static tb_status fail_outcome_unknown(const tb__commit_machine *c, const char *why) {
    return tb__fail(TB_IN_DOUBT, "whether version %" PRIu64 " of %s is committed is not known: %s",
                    tb__flow_number(flow_of(c), c->attempt), c->exchange->what, why);
}

static tb_status fail_not_applied(const tb__commit_machine *c) {
    return tb__fail(c->not_applied.status, "version %" PRIu64 " of %s is committed, but not on this rank: %s",
                    tb__flow_number(flow_of(c), c->attempt), c->exchange->what, c->not_applied.why);
}

static void perform_outputs(tb__commit_machine *c, unsigned outputs) {
    if (outputs & SEND_PREPARED && !c->is_lead)
        send_prepared(c);
    if (outputs & SEND_COMMIT)
        send_decided(c, c->attempt, TB__DECISION_COMMIT, TB_OK, "");
    if (outputs & PROPOSE)
        propose_decision(c);
    if (outputs & APPLY)
        tb__flow_apply(flow_of(c));
    if (outputs & GIVE_UP_APPLY)
        tb__flow_give_up_apply(flow_of(c));
    if (outputs & DISCARD_ABORTED)
        tb__flow_discard(flow_of(c), true, c->aborted.status, c->aborted.why);
    if (outputs & DISCARD_UNKNOWN)
        tb__flow_discard(flow_of(c), false, fail_outcome_unknown(c, c->unanswered.why), tb_error_detail());
    if (outputs & DISCARD_NOT_APPLIED)
        tb__flow_discard(flow_of(c), false, fail_not_applied(c), tb_error_detail());
    if (outputs & FORGET)
        delete_old_questions(c);
}

bool tb__commit_step(tb__commit_machine *c) {
    bool did = false;
    for (;;) {
        const tb__leg *leg = tb__flow_leg(flow_of(c), false);
        const conditions s = {.now_ms = tb__now_ms(),
                              .is_cancelled = leg->is_cancelled,
                              .memory_invalidated = leg->memory_invalidated,
                              .store_is_replaced = c->unanswered.status != TB_OK && store_now(c) != c->store_number};
        tb__commit_state before = c->state;
        unsigned outputs = make_transition(c, &s);
        if (c->state == before && outputs == 0)
            return did;
        perform_outputs(c, outputs);
        did = true;
    }
}

/* ---- What the flow says ----------------------------------------------------------------------------------------- */

static void on_shadow_event(void *arg, tb__shadow_event event, uint64_t attempt, tb_status status, const char *why) {
    tb__commit_machine *c = arg;
    switch (event) {
    case TB__SHADOW_PREPARED:
        c->is_prepared = true;
        c->attempt = attempt;
        c->store_number = store_now(c);
        c->has_proposed = false;
        c->decision = TB__DECISION_NONE;
        c->reason.status = c->unanswered.status = TB_OK;
        if (c->is_lead)
            record_prepared(c, c->lead, attempt, c->store_number);
        break;
    case TB__SHADOW_WOULD_END:
        set_reason(&c->reason, status, why);
        break;
    case TB__SHADOW_FAILED: /* at once, before the ABORT that follows makes prepared ranks ask the store */
        send_decided(c, attempt, TB__DECISION_ABORT, status, why);
        break;
    case TB__SHADOW_APPLIED:
        c->is_applied = true;
        set_reason(&c->not_applied, status, why);
        (void)tb__commit_step(c);
        break;
    }
}

static bool needs_peer(void *arg, uint64_t attempt, size_t position) {
    const tb__commit_machine *c = arg;
    const tb__receiver *r = &c->receivers[position];
    return c->is_lead ? r->is_receiver && r->prepared != attempt : position == c->lead;
}

static void on_applying(void *arg, bool is_done) {
    tb__commit_machine *c = arg;
    if (c->committing && (is_done || !c->is_committing))
        c->committing(c->committing_arg, is_done);
    c->is_committing = true;
}

static tb_status list_shadows(void *arg, tb__move_list *out) {
    const tb__commit_machine *c = arg;
    return tb__exchange_list_shadows(&c->exchange->shadows[c->src], out);
}

/* ---- Life ------------------------------------------------------------------------------------------------------- */

tb_status tb__commit_init(tb__commit_machine *c, tb__exchange *exchange, int src, tb__shadow *owner) {
    const tb__pair_side *receivers = &exchange->pair->sides[!src];
    tb_world *world = exchange->world;
    *c = (tb__commit_machine){.exchange = exchange, .src = src, .is_used = exchange->sides[!src].commit == TB_SHADOW};
    if (!c->is_used)
        return TB_OK;
    if (!world->commit_log)
        TB_TRY(tb__commit_log_create(world->loop, world->directory, &world->commit_log));
    c->receivers = tb__calloc(exchange->handshake.npeers, sizeof *c->receivers);
    if (!c->receivers)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < receivers->size; i++)
        c->receivers[tb__handshake_find(&exchange->handshake, receivers->peers[i])].is_receiver = true;
    c->lead = tb__handshake_find(&exchange->handshake, receivers->peers[0]);
    c->is_lead = receivers->peers[0]->rank == world->rank;
    *owner = (tb__shadow){.is_used = true,
                          .arg = c,
                          .event = on_shadow_event,
                          .needs = needs_peer,
                          .applying = on_applying,
                          .list = list_shadows};
    return TB_OK;
}

void tb__commit_fini(tb__commit_machine *c) {
    if (c->is_used && c->exchange->world->commit_log)
        tb__commit_log_drop(c->exchange->world->commit_log, c);
    free(c->receivers);
    free(c->questions.item);
}

static void set_committing(tb__commit_machine *c, const tb_transfer_opts *opts) {
    c->committing = opts->committing;
    c->committing_arg = opts->arg;
    c->is_committing = false;
}

void tb__commit_begin(tb__commit_machine *c, const tb_transfer_opts *opts) {
    c->holds = opts->hold;
    c->may_proceed = c->is_late = c->is_decided = false;
    set_committing(c, opts);
}

/* ---- Outcomes that are not known -------------------------------------------------------------------------------- */

bool tb__commit_outcome_is_unknown(const tb__commit_machine *c) {
    return c->state >= COMMIT_OUTCOME_UNKNOWN;
}

static bool awaits_nothing(void *arg) {
    const tb__commit_machine *c = arg;
    return c->state == COMMIT_ASKING_AGAIN ? has_answer(c) : c->state != COMMIT_APPLYING_LATE;
}

tb_status tb__commit_resolve(tb__commit_machine *c, int64_t deadline_ms, const tb_transfer_opts *opts) {
    char why[TB__WHY_MAX];
    if (!tb__commit_outcome_is_unknown(c))
        return TB_OK;
    tb__loop *loop = c->exchange->world->loop;
    (void)tb__commit_step(c); /* an answer may have come since the last transfer */
    if (c->decision == TB__DECISION_NONE && c->state == COMMIT_OUTCOME_UNKNOWN) {
        snprintf(why, sizeof why, "rank %" PRId32 " did not hear the end of it", c->exchange->world->rank);
        set_reason(&c->reason, TB_LOST, why);
        c->is_wanted = true;
        (void)tb__commit_step(c);
    }
    tb__loop_wait(loop, awaits_nothing, c, deadline_ms);
    (void)tb__commit_step(c);
    if (!tb__commit_outcome_is_unknown(c)) /* another thread has found out */
        return TB_OK;
    if (c->state == COMMIT_APPLYING_LATE)
        return fail_outcome_unknown(c, "another thread is copying it");
    if (c->decision == TB__DECISION_NONE)
        return fail_outcome_unknown(c,
                                    c->state == COMMIT_ASKING_AGAIN ? "the store has not answered" : c->unanswered.why);
    set_committing(c, opts);
    c->is_wanted = true;
    (void)tb__commit_step(c);
    if (!tb__loop_wait(loop, awaits_nothing, c, deadline_ms + STUCK_MS))
        tb__flow_give_up_apply(flow_of(c));
    return tb__commit_outcome_is_unknown(c) ? fail_not_applied(c) : TB_OK;
}
