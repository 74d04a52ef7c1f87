/* The transfer_signal, equal on all ranks of a group. Ranks ask by number; the lead answers each question once, with
 * its own signal when it first gets the question, and repeats that answer later. Skipped numbers have the answer of the
 * next one. The lead's driver answers: its program need not ask. */
#include "bus/engine.h"
#include "bus/exchange.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MOST_RUNS = 4096 }; /* of equal answers that the lead remembers */

/* A question that a rank waits for. */
struct tb__question {
    uint64_t number;
    tb__answer answer;
    tb__question *next;
};

static bool signal_at_lead(const tb__engine *engine) {
    const tb_transfer *sending = engine->batch->sending;
    const tb__engine_part *part;
    bool is_set = sending && tb__transfer_is_unread(sending);
    for (size_t i = 0; !is_set && (part = tb__engine_next_part(engine, &i));)
        is_set = tb__engine_flow(part) && tb__flow_is_offered(tb__engine_flow(part));
    return is_set;
}

/* At the lead. */
static tb__answer answer_question(tb__engine *engine, uint64_t number) {
    tb__signal *s = &engine->signal;
    if (number > s->last) {
        bool answer = signal_at_lead(engine);
        if (s->runs.count == 0 || s->answer != answer) {
            if (s->runs.count == MOST_RUNS)
                memmove(s->runs.item, s->runs.item + 1, --s->runs.count * sizeof *s->runs.item);
            if (!tb__vec_push(&s->runs, ((struct tb__answers){s->last + 1, answer})))
                return TB__NO_ANSWER; /* the next rank that asks gets the answer */
        }
        s->last = number;
        s->answer = answer;
    }
    for (size_t i = s->runs.count; i-- > 0;) {
        if (s->runs.item[i].first <= number)
            return s->runs.item[i].answer ? TB__ANSWER_YES : TB__ANSWER_NO;
    }
    return TB__ANSWER_FORGOTTEN;
}

static void send_signal(tb__engine *engine, int32_t seat, uint32_t kind, uint64_t number, tb__answer answer) {
    tb__pack pack = {0};
    tb__pack_u32(&pack, kind);
    tb__pack_u64(&pack, number);
    tb__pack_u32(&pack, answer);
    tb__engine_send(engine, seat, &pack);
}

bool tb__signal_message(tb__engine *engine, int32_t seat, uint32_t kind, tb__unpack *message) {
    uint64_t number = tb__unpack_u64(message);
    uint32_t answer = tb__unpack_u32(message);
    bool is_question = kind == TB__ENGINE_QUESTION;
    if (!tb__unpack_is_done(message) || number == 0 || answer > TB__ANSWER_FORGOTTEN ||
        (is_question ? engine->index : seat) != 0)
        return false;
    if (is_question) {
        send_signal(engine, seat, TB__ENGINE_ANSWER, number, answer_question(engine, number));
        return true;
    }
    for (tb__question *q = engine->signal.waiting; q; q = q->next) {
        if (q->number == number)
            q->answer = answer;
    }
    tb__loop_signal(engine->batch->world->loop);
    return true;
}

void tb__signal_fini(tb__signal *signal) {
    free(signal->runs.item);
}

typedef struct asking {
    tb__engine *engine;
    const tb__peer *lead;
    const tb__question *question;
    const atomic_bool *cancelled; /* NULL: it can't be */
} asking;

/* The reason why no answer can come any more; NULL: it can. */
static const tb__exchange *find_broken(const tb__engine *engine) {
    const tb__exchange *broken = NULL;
    const tb__engine_part *part;
    for (size_t i = 0; (part = tb__engine_next_part(engine, &i));) {
        if (part->exchange->state != EXCHANGE_BROKEN)
            return NULL;
        broken = part->exchange;
    }
    return broken;
}

static bool is_answered(void *arg) {
    const asking *a = arg;
    return a->question->answer != TB__NO_ANSWER || a->lead->is_lost || find_broken(a->engine) ||
           (a->cancelled && atomic_load(a->cancelled));
}

static tb_status asking_result(const asking *a, bool *out) {
    const tb__engine *engine = a->engine;
    const char *batch = engine->batch->name;
    uint64_t number = a->question->number;
    const tb__exchange *broken = find_broken(engine);
    switch (a->question->answer) {
    case TB__ANSWER_NO:
    case TB__ANSWER_YES:
        *out = a->question->answer == TB__ANSWER_YES;
        return TB_OK;
    case TB__ANSWER_FORGOTTEN:
        return tb__fail(TB_REFUSED,
                        "question %" PRIu64 " about batch '%s' is too old: %s has answered %" PRIu64
                        " and does not remember it",
                        number, batch, a->lead->label, engine->signal.last);
    default:
        break;
    }
    if (a->cancelled && atomic_load(a->cancelled))
        return tb__fail(TB_CANCELLED, "question %" PRIu64 " about batch '%s' was given up", number, batch);
    if (a->lead->is_lost)
        return tb__fail(TB_LOST, "question %" PRIu64 " about batch '%s': %s was lost: %.200s", number, batch,
                        a->lead->label, a->lead->why ? a->lead->why : "its connection has ended");
    if (broken)
        return tb__fail(broken->handshake.status, "question %" PRIu64 " about batch '%s': %s", number, batch,
                        broken->handshake.why);
    return tb__fail(TB_TIMEOUT, "question %" PRIu64 " about batch '%s': %s has not answered", number, batch,
                    a->lead->label);
}

static tb_status find_engine(tb_batch *batch, const char *group, tb__engine **out) {
    if (!group) { /* the one that it joined first, unless the batch has another only */
        const tb__engine *first = batch->engines.count > 0 ? batch->engines.item[0] : NULL;
        group = batch->engines.count == 1 ? first->group : batch->world->memberships.item[0].group;
    }
    for (size_t i = 0; i < batch->engines.count; i++) {
        if (strcmp(batch->engines.item[i]->group, group) != 0)
            continue;
        *out = batch->engines.item[i];
        return (*out)->peers ? TB_OK : tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", batch->name);
    }
    return tb__fail(TB_INVALID, "batch '%s' has no registered pair of group '%.100s'", batch->name, group);
}

static tb_status ask_lead(tb__engine *engine, uint64_t number, int64_t deadline_ms, const atomic_bool *cancelled,
                          bool *out) {
    tb__signal *s = &engine->signal;
    tb__question question = {.number = number, .next = s->waiting};
    asking a = {engine, engine->peers[0], &question, cancelled};
    if (engine->index == 0) {
        question.answer = answer_question(engine, number);
        return question.answer == TB__NO_ANSWER ? TB_NO_MEMORY : asking_result(&a, out);
    }
    s->waiting = &question;
    send_signal(engine, 0, TB__ENGINE_QUESTION, number, TB__NO_ANSWER);
    tb__loop_wait(engine->batch->world->loop, is_answered, &a, deadline_ms);
    tb__question **at = &s->waiting;
    while (*at != &question)
        at = &(*at)->next;
    *at = question.next;
    TB_TRY(asking_result(&a, out));
    if (number >= s->last) {
        s->last = number;
        s->answer = *out;
    }
    return TB_OK;
}

tb_status tb__batch_ask_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms,
                               const atomic_bool *cancelled, bool *out) {
    tb__engine *engine = NULL;
    int64_t deadline_ms = tb__world_deadline(batch->world, timeout_ms);
    tb__loop_lock(batch->world->loop);
    tb_status status = find_engine(batch, group, &engine);
    if (status == TB_OK)
        status = ask_lead(engine, question, deadline_ms, cancelled, out);
    tb__loop_unlock(batch->world->loop);
    return status;
}

tb_status tb__local_batch_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms, bool *out) {
    return tb__batch_ask_signal(batch, group, question, timeout_ms, NULL, out);
}

size_t tb__batch_get_signals(const tb_batch *batch, tb__signal_state *out, size_t most) {
    size_t count = 0;
    tb__loop_lock(batch->world->loop);
    for (size_t i = 0; i < batch->engines.count && count < most; i++) {
        const tb__engine *engine = batch->engines.item[i];
        if (engine->signal.last == 0)
            continue;
        out[count] = (tb__signal_state){.question = engine->signal.last, .answer = engine->signal.answer};
        snprintf(out[count++].group, sizeof out->group, "%s", engine->group);
    }
    tb__loop_unlock(batch->world->loop);
    return count;
}
