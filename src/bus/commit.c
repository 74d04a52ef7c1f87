/* The state machine that commit.h describes: inputs, messages, proposals, outputs, events of the flows. */
#include "bus/engine.h"

#include "base/log.h"
#include "bus/exchange.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { ASK_AGAIN_MS = 100, PEERS_ANSWER_MS = 1000, STORE_ANSWERS_MS = 3000, APPLY_AGAIN_MS = 20, STUCK_MS = 5000 };
enum { MOST_QUESTIONS = 256 };

void (*tb__commit_on_transition)(const tb__engine *engine, const char *const names[4]);

static const struct transition {
    tb__commit_state state;
    tb__commit_input input;
    tb__commit_state next;
    tb__commit_output output;
    const char *names[4];
} transitions[] = {
#define TRANSITION(state, input, next, output)                                                                         \
    {COMMIT_##state, INPUT_##input, COMMIT_##next, OUTPUT_##output, {#state, #input, #next, #output}},
#include "bus/commit_table.h"
#undef TRANSITION
};

enum { NTRANSITIONS = sizeof transitions / sizeof *transitions };

static const struct transition *find_transition(tb__commit_state state, tb__commit_input input) {
    for (size_t i = 0; i < NTRANSITIONS; i++) {
        if (transitions[i].state == state && transitions[i].input == input)
            return &transitions[i];
    }
    return NULL;
}

bool tb__commit_table_has(const char *const names[4]) {
    for (size_t i = 0; i < NTRANSITIONS; i++) {
        int n = 0;
        while (n < 4 && strcmp(transitions[i].names[n], names[n]) == 0)
            n++;
        if (n == 4)
            return true;
    }
    return false;
}

static uint64_t store_now(const tb__commit *c) {
    return tb__directory_store_number(c->engine->batch->world->directory);
}

/* Called after a new input: wakes the driver, and threads in tb__commit_resolve. */
static void wake_driver(const tb__commit *c) {
    tb__loop_wake(c->engine->batch->world->loop);
    tb__loop_signal(c->engine->batch->world->loop);
}

static void set_reason(tb__reason *reason, tb_status status, const char *why) {
    reason->status = status;
    snprintf(reason->why, sizeof reason->why, "%s", why);
}

static bool is_lead(const tb__commit *c) {
    return c->engine->index == 0;
}

/* Prepared, and not decided as far as this rank knows. */
static bool is_undecided(const tb__commit *c) {
    return c->state >= COMMIT_PREPARED && c->state <= COMMIT_UNANSWERED;
}

static bool is_current(const tb__commit *c, const tb__nonce *nonce, uint64_t version) {
    const tb__vector *v = &c->engine->current;
    return v->version == version && tb__nonces_equal(&v->nonce, nonce);
}

static uint64_t hash_vector(const tb__vector *v) {
    uint64_t hash = 0;
    for (size_t i = 0; i < v->choices.count; i++) /* in any order */
        hash += tb__hash(tb__hash(0, v->choices.item[i].pair), v->choices.item[i].attempt);
    return hash;
}

/* The next part of the receive; NULL: there are no more. */
static tb__engine_part *next_part(const tb__commit *c, size_t *i) {
    tb__engine_part *part;
    while ((part = tb__engine_next_part(c->engine, i)) && !part->is_in)
        ;
    return part;
}

static size_t count_parts(const tb__commit *c) {
    size_t n = 0;
    for (size_t i = 0; next_part(c, &i);)
        n++;
    return n;
}

static const tb__outcome_record *find_outcome(const tb__commit *c, const tb__nonce *nonce, uint64_t version) {
    for (int i = 0; i < 2; i++) {
        const tb__outcome_record *o = &c->known[i];
        if (o->decision != TB__DECISION_NONE && o->version == version && tb__nonces_equal(&o->nonce, nonce))
            return o;
    }
    return NULL;
}

static void remember_outcome(tb__commit *c) {
    const tb__vector *v = &c->engine->current;
    if (find_outcome(c, &v->nonce, v->version))
        return;
    c->known[1] = c->known[0];
    c->known[0] = (tb__outcome_record){v->nonce, v->version, c->decision, c->aborted};
}

/* The versions this rank was prepared for, and those it has refused, belong to one nonce. */
static void use_nonce(tb__commit *c, const tb__nonce *nonce) {
    if (tb__nonces_equal(&c->prepared_nonce, nonce))
        return;
    c->prepared_nonce = *nonce;
    c->last_prepared = c->refused = 0;
    c->questions.count = 0;
}

static bool is_refused(const tb__commit *c) {
    const tb__vector *v = &c->engine->current;
    return tb__nonces_equal(&c->prepared_nonce, &v->nonce) && v->version <= c->refused;
}

/* Inputs that are looked up at each step. */
typedef struct conditions {
    int64_t now_ms;
    bool is_cancelled, memory_invalidated; /* of the receive */
    bool store_is_replaced;                /* the one that decides, and has not answered */
    bool is_over;                          /* waiting is over */
    bool has_all;                          /* all data has arrived */
    bool is_applied;                       /* all parts have been tried */
    const tb__engine_part *not_applied;    /* one that could not be; NULL: none */
} conditions;

static conditions look_up(const tb__commit *c) {
    conditions s = {.now_ms = tb__now_ms(), .has_all = true, .is_applied = true};
    const tb__engine_part *part;
    size_t n = 0;
    for (size_t i = 0; (part = next_part(c, &i)); n++) {
        const tb__leg *leg = tb__flow_leg(tb__engine_flow(part), false);
        s.is_cancelled |= leg->is_cancelled;
        s.memory_invalidated |= leg->memory_invalidated;
        s.has_all &= part->is_prepared;
        s.is_applied &= part->is_applied;
        if (part->is_applied && part->not_applied.status != TB_OK)
            s.not_applied = part;
    }
    s.has_all &= n > 0;
    s.is_over = c->is_late || s.is_cancelled;
    s.store_is_replaced = c->unanswered.status != TB_OK && store_now(c) != c->store_number;
    return s;
}

/* At the lead, in a receive for which it is prepared. */
static bool all_are_prepared(const tb__commit *c) {
    const tb__vector *v = &c->engine->current;
    for (int32_t seat = 0; seat < c->engine->size; seat++) {
        const tb__prepared_rank *r = &c->ranks[seat];
        if (r->version != v->version && (!tb__nonces_equal(&r->nonce, &v->nonce) || r->vector_hash != hash_vector(v)))
            return false;
    }
    return true;
}

/* Ranks that are prepared for other data, or connected to another store, could come to another decision. */
static void check_prepared_alike(tb__commit *c) {
    const tb__engine *engine = c->engine;
    const tb__vector *v = &engine->current;
    char why[TB__WHY_MAX];
    for (int32_t seat = 0; seat < engine->size; seat++) {
        const tb__prepared_rank *r = &c->ranks[seat];
        bool has_same_nonce = tb__nonces_equal(&r->nonce, &v->nonce);
        if (has_same_nonce && r->version == v->version && r->vector_hash == hash_vector(v) &&
            r->store_number == c->store_number)
            continue;
        if (r->store_number != c->store_number)
            snprintf(why, sizeof why, "%s was not at the same store as %s, which has to decide batch '%s'",
                     engine->peers[seat]->label, engine->peers[0]->label, engine->batch->name);
        else
            snprintf(why, sizeof why, "%s is prepared for another %s of version %" PRIu64 " of batch '%s' than %s",
                     engine->peers[seat]->label, has_same_nonce ? "vector" : "registration", v->version,
                     engine->batch->name, engine->peers[0]->label);
        set_reason(&c->reason, TB_LOST, why);
        return;
    }
}

static tb__commit_input find_prepared_input(tb__commit *c) {
    if (!is_lead(c))
        return c->reason.status != TB_OK ? INPUT_GIVES_UP : INPUT_NONE;
    bool are_all = all_are_prepared(c);
    if (c->reason.status == TB_OK && are_all)
        check_prepared_alike(c);
    if (c->reason.status != TB_OK)
        return INPUT_ABORTS_ALONE;
    return are_all ? INPUT_ALL_PREPARED : INPUT_NONE;
}

/* Whether the ranks that were asked have had their time. */
static bool has_heard_peers(const tb__commit *c, const conditions *s) {
    return c->nawaited == 0 || s->now_ms >= c->asked_ms + PEERS_ANSWER_MS;
}

/* The lead may still tell the others that it aborts, also after it has answered that it does not know. */
static tb__commit_input find_unanswered_input(tb__commit *c, const conditions *s) {
    bool waits_for_lead = !is_lead(c) && !s->is_over && s->now_ms < c->asked_ms + PEERS_ANSWER_MS;
    if (s->is_over || s->store_is_replaced) {
        c->wake_ms = c->asked_ms + PEERS_ANSWER_MS;
        return has_heard_peers(c, s) && !waits_for_lead ? INPUT_IS_OVER : INPUT_NONE;
    }
    c->wake_ms = c->asked_ms + ASK_AGAIN_MS;
    return s->now_ms >= c->wake_ms ? INPUT_ASKS_AGAIN : INPUT_NONE;
}

static tb__commit_input find_decided_input(tb__commit *c, const conditions *s) {
    if (c->holds && !c->may_proceed && !s->is_cancelled && !s->memory_invalidated)
        return INPUT_NONE;
    return s->now_ms < c->wake_ms && !s->is_over ? INPUT_NONE : INPUT_MAY_APPLY;
}

static tb__commit_input find_applying_input(tb__commit *c, const conditions *s) {
    if (!s->is_applied) {
        if (s->is_over && c->wake_ms == 0)
            c->wake_ms = s->now_ms + STUCK_MS;
        return INPUT_NONE;
    }
    if (!s->not_applied)
        return INPUT_HAS_APPLIED;
    bool lacks_memory = s->not_applied->not_applied.status == TB_NO_MEMORY;
    return lacks_memory && !s->is_over && c->state == COMMIT_APPLYING ? INPUT_LACKS_MEMORY : INPUT_CANNOT_APPLY;
}

static tb__commit_input find_doubt_input(tb__commit *c) {
    if (c->is_removed)
        return INPUT_IS_REMOVED;
    if (!c->is_wanted)
        return INPUT_NONE;
    c->is_wanted = false;
    return c->decision == TB__DECISION_COMMIT  ? INPUT_LEARNS_COMMIT
           : c->decision == TB__DECISION_ABORT ? INPUT_LEARNS_ABORT
                                               : INPUT_WANTS_TO_KNOW;
}

static tb__commit_input find_input(tb__commit *c, const conditions *s) {
    if (is_undecided(c) && c->decision != TB__DECISION_NONE)
        return c->decision == TB__DECISION_COMMIT ? INPUT_HEARS_COMMIT : INPUT_HEARS_ABORT;
    switch (c->state) {
    case COMMIT_IDLE:
        return s->has_all && c->engine->is_receiving && !is_refused(c) ? INPUT_HAS_ALL : INPUT_NONE;
    case COMMIT_PREPARED:
        return find_prepared_input(c);
    case COMMIT_PROPOSED:
        if (c->unanswered.status == TB_OK && s->is_over && s->now_ms >= c->wake_ms)
            set_reason(&c->unanswered, TB_TIMEOUT, "the store has not answered");
        return c->unanswered.status != TB_OK ? INPUT_NO_ANSWER : INPUT_NONE;
    case COMMIT_UNANSWERED:
        return find_unanswered_input(c, s);
    case COMMIT_DECIDED:
        return find_decided_input(c, s);
    case COMMIT_APPLYING:
    case COMMIT_APPLYING_LATE:
        return find_applying_input(c, s);
    case COMMIT_IN_DOUBT:
        return find_doubt_input(c);
    case COMMIT_ASKING:
        if (c->is_removed)
            return INPUT_IS_REMOVED;
        return c->decision != TB__DECISION_NONE || (c->unanswered.status != TB_OK && has_heard_peers(c, s))
                   ? INPUT_HAS_ANSWER
                   : INPUT_NONE;
    case TB__COMMIT_STATES:
        break;
    }
    return INPUT_NONE;
}

static void send_prepared(tb__commit *c) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, TB__ENGINE_PREPARED);
    tb__vector_pack(&pack, &c->engine->current);
    tb__pack_u64(&pack, c->store_number);
    tb__engine_send(c->engine, 0, &pack);
}

static void send_decision(tb__commit *c, int32_t seat, const tb__vector *vector, tb__decision decision,
                          tb_status status, const char *why) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, TB__ENGINE_DECIDED);
    tb__vector_pack(&pack, vector);
    tb__pack_u32(&pack, decision);
    tb__pack_status(&pack, status);
    tb__pack_string(&pack, why);
    tb__engine_send(c->engine, seat, &pack);
}

/* No-op at ranks other than the lead. */
static void pass_on(tb__commit *c, tb__decision decision, tb_status status, const char *why) {
    for (int32_t seat = 1; is_lead(c) && seat < c->engine->size; seat++)
        send_decision(c, seat, &c->engine->current, decision, status, why);
}

/* The lead aborts: once for all pairs. */
static void pass_on_abort(tb__commit *c, tb_status status, const char *why) {
    if (c->announced == c->serial || c->engine->current.version == 0)
        return;
    c->announced = c->serial;
    pass_on(c, TB__DECISION_ABORT, status, why);
}

static void ask_peers(tb__commit *c) {
    const tb__engine *engine = c->engine;
    c->nawaited = 0;
    c->asked_ms = tb__now_ms();
    for (int32_t seat = 0; seat < engine->size; seat++) {
        tb__pack pack = {0};
        if (seat == engine->index || engine->peers[seat]->is_lost)
            continue;
        tb__pack_u32(&pack, TB__ENGINE_ASK);
        tb__vector_pack(&pack, &engine->current);
        tb__engine_send(c->engine, seat, &pack);
        c->nawaited++;
    }
}

static void record_decision(tb__commit *c, tb__decision decision, tb_status status, const char *why) {
    bool can_be = is_undecided(c) || c->state == COMMIT_IN_DOUBT || c->state == COMMIT_ASKING;
    if (!can_be || c->decision != TB__DECISION_NONE)
        return;
    c->decision = decision;
    set_reason(&c->aborted, status, why);
    wake_driver(c);
}

/* A rank that is not prepared fails by a decision to abort. TB__DECISION_NONE is the answer of a rank that was asked
 * and does not know. */
static bool on_decided(tb__commit *c, const tb__vector *vector, tb__unpack *message) {
    uint32_t decision = tb__unpack_u32(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    bool is_abort = decision == TB__DECISION_ABORT;
    if (!tb__unpack_is_done(message) || decision > TB__DECISION_ABORT || is_abort != (status != TB_OK))
        return false;
    c->nawaited -= c->nawaited > 0;
    if (is_abort)
        tb__engine_record_abort(c->engine, vector, status, why);
    if (decision != TB__DECISION_NONE && is_current(c, &vector->nonce, vector->version))
        record_decision(c, (tb__decision)decision, status, why);
    wake_driver(c);
    return true;
}

/* This rank's answer about a receive. A rank that was not prepared answers "abort", and never prepares. One that may
 * have been, and has forgotten the outcome, does not know. False: it is not a rank of that engine. */
static bool find_answer(tb__commit *c, const tb__vector *vector, tb__decision *decision, tb__reason *reason) {
    const tb__outcome_record *known = find_outcome(c, &vector->nonce, vector->version);
    *decision = TB__DECISION_NONE;
    reason->status = TB_OK;
    if (known) {
        *decision = known->decision;
        *reason = known->aborted;
        return true;
    }
    if (!tb__nonces_equal(&vector->nonce, &c->engine->nonce))
        return false;
    use_nonce(c, &vector->nonce);
    if (vector->version <= c->last_prepared)
        return true;
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "rank %" PRId32 " was not prepared for version %" PRIu64 " of batch '%s'",
             c->engine->batch->world->rank, vector->version, c->engine->batch->name);
    c->refused = vector->version > c->refused ? vector->version : c->refused;
    tb__engine_record_abort(c->engine, vector, TB_LOST, why);
    *decision = TB__DECISION_ABORT;
    set_reason(reason, TB_LOST, why);
    return true;
}

static void on_ask(tb__commit *c, int32_t seat, const tb__vector *vector) {
    tb__decision decision;
    tb__reason reason;
    if (find_answer(c, vector, &decision, &reason))
        send_decision(c, seat, vector, decision, decision == TB__DECISION_ABORT ? reason.status : TB_OK,
                      decision == TB__DECISION_ABORT ? reason.why : "");
}

/* A rank that is prepared may ask the store about the version. */
static void record_question(tb__commit *c, uint64_t version) {
    size_t i = 0;
    while (i < c->questions.count && c->questions.item[i] != version)
        i++;
    if (i < c->questions.count)
        return;
    if (c->questions.count == MOST_QUESTIONS || !tb__vec_push(&c->questions, version))
        tb__log(TB_LOG_INFO, "the decision about version %" PRIu64 " of batch '%s' stays in the store", version,
                c->engine->batch->name);
}

static void record_prepared(tb__commit *c, int32_t seat, const tb__vector *vector, uint64_t store_number) {
    if (tb__nonces_equal(&vector->nonce, &c->engine->nonce))
        use_nonce(c, &vector->nonce);
    c->ranks[seat] = (tb__prepared_rank){vector->version, vector->nonce, hash_vector(vector), store_number};
    if (tb__nonces_equal(&vector->nonce, &c->engine->nonce))
        record_question(c, vector->version);
    wake_driver(c);
}

/* A rank that is late gets the receive's outcome. */
static void on_prepared(tb__commit *c, int32_t seat, const tb__vector *vector, uint64_t store_number) {
    const tb__outcome_record *known = find_outcome(c, &vector->nonce, vector->version);
    if (known)
        send_decision(c, seat, vector, known->decision, known->aborted.status, known->aborted.why);
    else
        record_prepared(c, seat, vector, store_number);
}

bool tb__commit_message(tb__commit *c, int32_t seat, uint32_t kind, tb__unpack *message) {
    tb__vector vector;
    if (!c->is_used || !tb__vector_unpack(message, &vector))
        return false;
    bool is_valid = false;
    if (kind == TB__ENGINE_DECIDED) {
        is_valid = on_decided(c, &vector, message);
    } else if (kind == TB__ENGINE_ASK) {
        is_valid = tb__unpack_is_done(message);
        if (is_valid)
            on_ask(c, seat, &vector);
    } else if (kind == TB__ENGINE_PREPARED && is_lead(c)) {
        uint64_t store_number = tb__unpack_u64(message);
        is_valid = tb__unpack_is_done(message);
        if (is_valid)
            on_prepared(c, seat, &vector, store_number);
    }
    tb__vector_fini(&vector);
    return is_valid;
}

static void name_question(const tb__nonce *nonce, uint64_t version, char *out, size_t room) {
    snprintf(out, room, "%016" PRIx64 "%016" PRIx64 "/%" PRIu64, nonce->word[0], nonce->word[1], version);
}

/* If nothing could be proposed, the lead can still abort on its own, unless it has proposed before. */
static void propose_decision(tb__commit *c) {
    char question[TB__QUESTION_ROOM];
    const tb__vector *v = &c->engine->current;
    name_question(&v->nonce, v->version, question, sizeof question);
    c->unanswered.status = TB_OK;
    c->wake_ms = tb__now_ms() + STORE_ANSWERS_MS;
    tb_status status = tb__commit_log_propose(c->engine->batch->world->commit_log, c, c->store_number, question,
                                              ++c->nproposals, c->proposal, c->reason.status, c->reason.why);
    bool may_abort_alone = is_lead(c) && !c->has_proposed && is_undecided(c);
    c->has_proposed |= status == TB_OK;
    if (status != TB_OK && may_abort_alone)
        record_decision(c, TB__DECISION_ABORT, status, tb_error_detail());
    else if (status != TB_OK)
        set_reason(&c->unanswered, status, tb_error_detail());
}

void tb__commit_answer(tb__commit *c, uint64_t proposal, tb__decision decision, tb_status status, const char *why) {
    if (proposal <= c->nproposals_before)
        return;
    /* a missing answer to an earlier proposal does not concern the present one */
    bool is_asked = proposal == c->nproposals && (c->state == COMMIT_PROPOSED || c->state == COMMIT_ASKING);
    if (decision != TB__DECISION_NONE)
        record_decision(c, decision, status, why);
    else if (is_asked)
        set_reason(&c->unanswered, status, why);
    wake_driver(c);
}

/* When the lead has committed a version, all ranks were prepared for it, and so know the outcomes before it. */
static void delete_old_questions(tb__commit *c) {
    char question[TB__QUESTION_ROOM];
    while (c->questions.count > 2) {
        name_question(&c->engine->current.nonce, c->questions.item[0], question, sizeof question);
        tb__commit_log_forget(c->engine->batch->world->commit_log, question);
        memmove(c->questions.item, c->questions.item + 1, --c->questions.count * sizeof *c->questions.item);
    }
}

static tb_status fail_in_doubt(const tb__commit *c, const char *why) {
    return tb__fail(TB_IN_DOUBT, "whether version %" PRIu64 " of batch '%s' is committed is not known: %s",
                    c->engine->current.version, c->engine->batch->name, why);
}

static tb_status fail_not_applied(const tb__commit *c, const tb__engine_part *part) {
    return tb__fail(part->not_applied.status,
                    "version %" PRIu64 " of batch '%s' is committed, but not on this rank: %s",
                    c->engine->current.version, c->engine->batch->name, part->not_applied.why);
}

static void become_prepared(tb__commit *c) {
    const tb__vector *v = &c->engine->current;
    c->store_number = store_now(c);
    use_nonce(c, &v->nonce);
    c->last_prepared = v->version > c->last_prepared ? v->version : c->last_prepared;
    if (is_lead(c))
        record_prepared(c, 0, v, c->store_number);
    else
        send_prepared(c);
}

static void propose(tb__commit *c, tb__commit_output output) {
    if (output == OUTPUT_ASK_ALL) {
        char why[TB__WHY_MAX];
        snprintf(why, sizeof why, "rank %" PRId32 " did not hear the end of it", c->engine->batch->world->rank);
        set_reason(&c->reason, TB_LOST, why);
        ask_peers(c);
    }
    if (output != OUTPUT_PROPOSE_AGAIN)
        c->proposal = output == OUTPUT_PROPOSE_COMMIT ? TB__DECISION_COMMIT : TB__DECISION_ABORT;
    propose_decision(c);
}

static void discard_parts(tb__commit *c, bool is_aborted, tb_status status, const char *why) {
    tb__engine_part *part;
    for (size_t i = 0; (part = next_part(c, &i));) {
        part->is_prepared = false;
        tb__flow_discard(tb__engine_flow(part), is_aborted, status, why);
    }
}

static void apply_parts(tb__commit *c) {
    tb__engine_part *part;
    c->wake_ms = 0;
    for (size_t i = 0; (part = next_part(c, &i));)
        part->is_applied &= part->not_applied.status == TB_OK;
    for (size_t i = 0; (part = next_part(c, &i));) {
        if (!part->is_applied)
            tb__flow_apply(tb__engine_flow(part));
    }
}

static void finish_apply(tb__commit *c, bool is_failure) {
    tb__engine_part *part;
    c->wake_ms = 0;
    for (size_t i = 0; (part = next_part(c, &i));) {
        part->is_prepared = false;
        if (is_failure && part->not_applied.status != TB_OK) {
            tb_status status = fail_not_applied(c, part);
            tb__saved_detail why = tb__save_detail();
            tb__flow_discard(tb__engine_flow(part), false, status, why.text);
        }
    }
    if (is_lead(c) && !is_failure)
        delete_old_questions(c);
}

static void leave_unknown(tb__commit *c) {
    c->wake_ms = 0;
    tb_status status = fail_in_doubt(c, c->unanswered.why);
    tb__saved_detail why = tb__save_detail();
    discard_parts(c, false, status, why.text);
}

static void perform_output(tb__commit *c, tb__commit_output output) {
    switch (output) {
    case OUTPUT_NOTHING:
        c->wake_ms = c->state == COMMIT_DECIDED ? tb__now_ms() + APPLY_AGAIN_MS : 0;
        break;
    case OUTPUT_KEEP:
        remember_outcome(c);
        break;
    case OUTPUT_TELL_LEAD:
        become_prepared(c);
        break;
    case OUTPUT_PASS_ON:
        c->wake_ms = 0;
        c->is_decided = true;
        remember_outcome(c);
        pass_on(c, TB__DECISION_COMMIT, TB_OK, "");
        break;
    case OUTPUT_DISCARD:
        if (c->decision == TB__DECISION_NONE) { /* the lead aborts alone */
            c->decision = TB__DECISION_ABORT;
            c->aborted = c->reason;
        }
        c->wake_ms = 0;
        remember_outcome(c);
        pass_on_abort(c, c->aborted.status, c->aborted.why);
        discard_parts(c, true, c->aborted.status, c->aborted.why);
        break;
    case OUTPUT_PROPOSE_COMMIT:
    case OUTPUT_PROPOSE_ABORT:
    case OUTPUT_PROPOSE_AGAIN:
    case OUTPUT_ASK_ALL:
        propose(c, output);
        break;
    case OUTPUT_ASK_PEERS:
        ask_peers(c);
        break;
    case OUTPUT_LEAVE_UNKNOWN:
        leave_unknown(c);
        break;
    case OUTPUT_APPLY:
        remember_outcome(c); /* also one that is learnt late */
        apply_parts(c);
        break;
    case OUTPUT_FINISH:
    case OUTPUT_FAIL:
        finish_apply(c, output == OUTPUT_FAIL);
        break;
    case TB__COMMIT_OUTPUTS:
        break;
    }
}

/* Does not wait any longer for devices that copy the shadows. */
static void give_up_apply(tb__commit *c) {
    const tb__engine_part *part;
    for (size_t i = 0; (part = next_part(c, &i));) {
        if (!part->is_applied)
            tb__flow_give_up_apply(tb__engine_flow(part));
    }
}

bool tb__commit_step(tb__commit *c) {
    bool did = false;
    for (;;) {
        const conditions s = look_up(c);
        tb__commit_input input = find_input(c, &s);
        if (c->state == COMMIT_APPLYING && !s.is_applied && c->wake_ms && s.now_ms >= c->wake_ms) {
            c->wake_ms = INT64_MAX;
            give_up_apply(c);
            did = true;
            continue;
        }
        const struct transition *t = find_transition(c->state, input);
        if (!t)
            return did;
        if (tb__commit_on_transition)
            tb__commit_on_transition(c->engine, t->names);
        c->state = t->next;
        perform_output(c, t->output);
        did = true;
    }
}

bool tb__commit_is_open(const tb__commit *c) {
    return c->state == COMMIT_IDLE;
}

static void on_shadow_event(void *arg, tb__shadow_event event, uint64_t attempt, tb_status status, const char *why) {
    tb__engine_part *part = arg;
    (void)attempt;
    if (!part->engine)
        return;
    tb__commit *c = &part->engine->commit;
    tb__engine_ensure_current(part->engine);
    switch (event) {
    case TB__SHADOW_PREPARED:
        part->is_prepared = true;
        break;
    case TB__SHADOW_WOULD_END:
        if (c->reason.status == TB_OK)
            set_reason(&c->reason, status, why);
        break;
    case TB__SHADOW_FAILED: /* at once, before the ABORT that follows makes prepared ranks ask the store */
        if (c->state == COMMIT_IDLE && part->engine->is_receiving)
            pass_on_abort(c, status, why);
        break;
    case TB__SHADOW_APPLIED:
        part->is_applied = true;
        set_reason(&part->not_applied, status, why);
        (void)tb__commit_step(c);
        break;
    }
}

static bool needs_peer(void *arg, uint64_t attempt, size_t position) {
    const tb__engine_part *part = arg;
    const tb__engine *engine = part->engine;
    const tb__peer *peer = part->exchange->handshake.peers[position];
    const tb__pair_side *side = &part->exchange->pair->sides[!part->src];
    (void)attempt;
    if (!engine)
        return false;
    if (engine->index != 0)
        return peer == side->peers[0];
    for (int32_t seat = 1; seat < side->size; seat++) {
        if (side->peers[seat] == peer)
            return engine->current.version == 0 || engine->commit.ranks[seat].version != engine->current.version;
    }
    return false;
}

/* For the program, all pairs change at once: calls its function before the first pair, and after the last. */
static void on_applying(void *arg, bool is_done) {
    const tb__engine_part *part = arg;
    tb__commit *c = &part->engine->commit;
    c->ndone += is_done;
    if (c->committing && (is_done ? c->ndone == count_parts(c) : !c->is_committing))
        c->committing(c->committing_arg, is_done);
    c->is_committing = true;
}

static tb_status list_shadows(void *arg, tb__move_list *out) {
    const tb__engine_part *part = arg;
    return tb__exchange_list_shadows(&part->exchange->shadows[part->src], out);
}

void tb__commit_own_flow(tb__engine_part *part, tb__shadow *owner) {
    if (part->exchange->sides[!part->src].commit != TB_SHADOW)
        return;
    *owner = (tb__shadow){.is_used = true,
                          .arg = part,
                          .event = on_shadow_event,
                          .needs = needs_peer,
                          .applying = on_applying,
                          .list = list_shadows};
}

tb_status tb__commit_init(tb__commit *c, tb__engine *engine) {
    tb_world *world = engine->batch->world;
    *c = (tb__commit){.engine = engine, .is_used = engine->batch->opts.commit == TB_SHADOW};
    if (!c->is_used)
        return TB_OK;
    if (!world->commit_log)
        TB_TRY(tb__commit_log_create(world->loop, world->directory, &world->commit_log));
    c->ranks = tb__calloc((size_t)engine->size, sizeof *c->ranks);
    return c->ranks ? TB_OK : TB_NO_MEMORY;
}

void tb__commit_fini(tb__commit *c) {
    if (c->is_used && c->engine->batch->world->commit_log)
        tb__commit_log_drop(c->engine->batch->world->commit_log, c);
    free(c->ranks);
    free(c->questions.item);
}

static void set_committing(tb__commit *c, const tb_transfer_opts *opts) {
    c->committing = opts->committing;
    c->committing_arg = opts->arg;
    c->is_committing = false;
    c->ndone = 0;
}

void tb__commit_begin(tb__commit *c, const tb_transfer_opts *opts) {
    c->serial++;
    c->nproposals_before = c->nproposals;
    c->holds = opts->hold;
    c->may_proceed = c->is_late = c->is_decided = c->has_proposed = c->is_removed = false;
    c->decision = TB__DECISION_NONE;
    c->reason.status = c->unanswered.status = TB_OK;
    c->nawaited = 0;
    c->wake_ms = 0;
    set_committing(c, opts);
}

bool tb__commit_is_in_doubt(const tb__commit *c) {
    return c->state >= COMMIT_IN_DOUBT;
}

void tb__commit_remove(tb__commit *c) {
    if (!tb__commit_is_in_doubt(c))
        return;
    c->is_removed = true;
    (void)tb__commit_step(c);
}

static bool awaits_nothing(void *arg) {
    const tb__commit *c = arg;
    const conditions s = look_up(c);
    if (c->state == COMMIT_APPLYING_LATE)
        return s.is_applied;
    return c->state != COMMIT_ASKING || c->decision != TB__DECISION_NONE ||
           (c->unanswered.status != TB_OK && has_heard_peers(c, &s));
}

tb_status tb__commit_resolve(tb__commit *c, int64_t deadline_ms, const tb_transfer_opts *opts) {
    if (!tb__commit_is_in_doubt(c))
        return TB_OK;
    tb__loop *loop = c->engine->batch->world->loop;
    if (c->state == COMMIT_APPLYING_LATE)
        return fail_in_doubt(c, "another thread is copying it");
    (void)tb__commit_step(c); /* an answer may have arrived since the last transfer */
    if (c->decision == TB__DECISION_NONE && c->state == COMMIT_IN_DOUBT) {
        c->is_wanted = true;
        (void)tb__commit_step(c);
    }
    int64_t until_ms = c->asked_ms + PEERS_ANSWER_MS; /* the wait itself does not look at the time */
    if (!tb__loop_wait(loop, awaits_nothing, c, until_ms < deadline_ms ? until_ms : deadline_ms))
        tb__loop_wait(loop, awaits_nothing, c, deadline_ms);
    (void)tb__commit_step(c);
    if (!tb__commit_is_in_doubt(c)) /* another thread has found out */
        return TB_OK;
    if (c->state == COMMIT_APPLYING_LATE)
        return fail_in_doubt(c, "another thread is copying it");
    if (c->decision == TB__DECISION_NONE)
        return fail_in_doubt(c, c->state == COMMIT_ASKING ? "the store has not answered" : c->unanswered.why);
    set_committing(c, opts);
    c->is_wanted = true;
    (void)tb__commit_step(c);
    if (!tb__loop_wait(loop, awaits_nothing, c, deadline_ms + STUCK_MS))
        give_up_apply(c);
    (void)tb__commit_step(c);
    const conditions s = look_up(c);
    return tb__commit_is_in_doubt(c) && s.not_applied ? fail_not_applied(c, s.not_applied) : TB_OK;
}
