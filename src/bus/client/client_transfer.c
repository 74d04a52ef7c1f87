/* Transfers of a client. The agent's events for a transfer that was begun with no_wait are recorded whenever they
 * arrive, whatever the client is waiting for. */
#include "bus/client/client.h"

#include "base/opts.h"

#include <stdio.h>
#include <string.h>

enum { GRACE_MS = 5000 };

/* ---- What is told ---------------------------------------------------------------------------------------------- */

static const struct {
    tb_event event;
    const char *what;
    bool of_send, of_recv;
} events[] = {[TB__EVENT_RELEASED] = {TB_RELEASED, "been released", true, false},
              [TB__EVENT_ARRIVED] = {TB_ARRIVED, "arrived", false, true},
              [TB__EVENT_COMMITTING] = {TB_DECIDED, "been decided", false, true},
              [TB__EVENT_COMMITTED] = {TB_COMMITTED, "been committed", true, true}};

enum { NEVENTS = sizeof events / sizeof *events };

void tb__client_on_event(tb_client *c, const tb__message *m) {
    for (tb__pending_transfer *t = c->transfers; t; t = t->next) {
        if (t->seq != m->seq)
            continue;
        if (m->event != TB__EVENT_FAILED) {
            t->events |= (unsigned)events[m->event].event;
        } else {
            t->status = m->status == TB_OK ? TB_INTERNAL : m->status;
            snprintf(t->why, sizeof t->why, "%s", m->message);
        }
    }
}

static void forget_transfer(tb_client *c, tb__pending_transfer *gone) {
    tb__pending_transfer **at = &c->transfers;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    free(gone);
}

void tb__client_forget(tb_client *c, const tb_client_batch *b) {
    for (tb__pending_transfer *t = c->transfers, *next; t; t = next) {
        next = t->next;
        if (!b || t->batch == b)
            forget_transfer(c, t);
    }
}

static tb__pending_transfer *find_transfer(const tb_client_batch *b, bool is_send, const tb__pending_transfer *but) {
    tb__pending_transfer *t = b->client->transfers;
    while (t && (t == but || t->batch != b || t->is_send != is_send))
        t = t->next;
    return t;
}

/* ---- Begin ----------------------------------------------------------------------------------------------------- */

static int64_t deadline_of(const tb_client *c, const tb_client_transfer_opts *o) {
    return tb__now_ms() + (o->timeout_ms > 0 ? o->timeout_ms : c->timeout_ms);
}

/* Device memory is the agent's from the call on: so the work on the stream is waited for, and copies are made, before.
 * Also to receive: what does not arrive stays as it is. */
static tb_status prepare_memory(const tb_client_batch *b, bool is_send, const tb_client_transfer_opts *o) {
    int64_t deadline_ms = deadline_of(b->client, o);
    const tb__pending_transfer *other = b->copies.count > 0 ? find_transfer(b, !is_send, NULL) : NULL;
    if (other && other->status == TB_OK && !(other->events & TB_COMMITTED))
        return tb__fail(TB_REFUSED,
                        "batch '%s' is being %s, and its tensors are copied through host memory; wait for that",
                        b->name, is_send ? "received" : "sent");
    if (o->stream)
        TB_TRY(tb__client_wait_stream(b, o->stream, deadline_ms));
    return tb__client_copy_out(b, deadline_ms);
}

static bool is_first_of_pair(const tb_client_batch *b, size_t tensor) {
    for (size_t i = 0; i < tensor; i++) {
        if (strcmp(b->tensors.item[i].pair, b->tensors.item[tensor].pair) == 0)
            return false;
    }
    return true;
}

/* Copies what was received to device memory, of the pairs that have succeeded. */
static tb_status deliver_received(tb_client_batch *b, tb_status status) {
    size_t npairs = 0;
    for (size_t i = 0; i < b->nregistered && b->copies.count > 0; i++)
        npairs += is_first_of_pair(b, i);
    for (size_t i = 0; i < b->nregistered && npairs > 0; i++) {
        const char *pair = b->tensors.item[i].pair;
        tb_client_pair_state state = {.size = sizeof state, .status = status};
        if (!is_first_of_pair(b, i))
            continue;
        if (npairs > 1 && status != TB_OK)
            TB_TRY(tb_client_query_pair(b, pair, &state));
        if (state.status == TB_OK)
            TB_TRY(tb__client_copy_back(b, pair, tb__now_ms() + b->client->timeout_ms));
    }
    return TB_OK;
}

/* Keeps the sentence of the transfer's own failure. */
static tb_status end_receive(tb_client_batch *b, tb_status status) {
    tb__saved_detail why = tb__save_detail();
    tb_status delivered = deliver_received(b, status);
    return status == TB_OK ? delivered : tb__fail(status, "%s", why.text);
}

/* The transfer is added before the call, because events may arrive with the reply. An earlier one is removed when the
 * agent has accepted this. */
static tb_status begin_without_waiting(tb_client_batch *b, tb__message *message, const tb_client_transfer_opts *o) {
    tb_client *c = b->client;
    tb__pending_transfer *t = tb__calloc(1, sizeof *t);
    if (!t)
        return TB_NO_MEMORY;
    *t = (tb__pending_transfer){.next = c->transfers,
                                .batch = b,
                                .is_send = message->direction == TB__SEND,
                                .seq = c->nframes,
                                .deadline_ms =
                                    tb__now_ms() + (o->timeout_ms ? o->timeout_ms : c->timeout_ms) + GRACE_MS};
    c->transfers = t;
    tb_status status = tb__client_call(c, message, NULL, 0, o->timeout_ms, "begun the transfer", NULL);
    tb__pending_transfer *gone = status == TB_OK ? find_transfer(b, t->is_send, t) : t;
    if (gone)
        forget_transfer(c, gone);
    return status;
}

tb_status tb_client_transfer(tb_client_batch *b, bool is_send, const tb_client_transfer_opts *opts) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb_client_transfer_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.hold && !o.no_wait)
        return tb__fail(TB_INVALID, "hold is for transfers with no_wait: who waits can't call tb_client_proceed");
    tb__message message = {.kind = TB__TRANSFER,
                           .batch_id = b->name,
                           .direction = is_send ? TB__SEND : TB__RECV,
                           .no_wait = o.no_wait,
                           .events = o.no_wait,
                           .hold = o.hold,
                           .skip_lost = o.skip_lost,
                           .semaphore_name = o.semaphore};
    TB_TRY(prepare_memory(b, is_send, &o));
    if (o.no_wait)
        return begin_without_waiting(b, &message, &o);
    tb_status status = tb__client_call(b->client, &message, NULL, 0, o.timeout_ms, "ended the transfer", NULL);
    return is_send ? status : end_receive(b, status);
}

tb_status tb_client_proceed(tb_client_batch *b) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__message message = {.kind = TB__PROCEED, .batch_id = b->name};
    return tb__client_call(b->client, &message, NULL, 0, 0, "let the transfer proceed", NULL);
}

/* ---- Wait ------------------------------------------------------------------------------------------------------ */

/* What has arrived, or was committed, is in the tensors when the wait for that returns. */
static tb_status deliver_once(tb_client_batch *b, tb__pending_transfer *t) {
    unsigned now = (unsigned)TB_COMMITTED | (b->opts.commit == TB_SHADOW ? 0U : (unsigned)TB_ARRIVED);
    if (t->is_send || t->is_delivered || (!(t->events & now) && t->status == TB_OK))
        return TB_OK;
    t->is_delivered = true;
    return end_receive(b, t->status == TB_OK ? TB_OK : tb__fail(t->status, "%s", t->why));
}

static tb_status wait_for_event(tb_client_batch *b, tb__pending_transfer *t, size_t event, int timeout_ms) {
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms : tb__now_ms() + timeout_ms;
    unsigned wanted = (unsigned)events[event].event;
    while (!(t->events & wanted)) {
        if (t->status != TB_OK) {
            TB_TRY(deliver_once(b, t));
            return tb__fail(t->status, "%s", t->why);
        }
        if (t->events & TB_COMMITTED)
            return tb__fail(TB_INVALID, "the transfer of batch '%s' has ended, and was not held back", b->name);
        tb_status status = tb__client_listen(b->client, deadline_ms, "told of an event");
        if (status == TB_TIMEOUT)
            return tb__fail(TB_TIMEOUT, "batch '%s' has not %s %s", b->name, events[event].what,
                            timeout_ms < 0 ? "by the transfer's deadline" : "so far");
        if (status != TB_OK && !(t->events & wanted) && t->status == TB_OK)
            return status;
    }
    return deliver_once(b, t);
}

tb_status tb_client_wait(tb_client_batch *b, bool is_send, tb_event event, int timeout_ms) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__pending_transfer *t = find_transfer(b, is_send, NULL);
    size_t i = 0;
    while (i < NEVENTS && events[i].event != event)
        i++;
    if (i == NEVENTS)
        return tb__fail(TB_INVALID, "%d is not an event", (int)event);
    if (is_send ? !events[i].of_send : !events[i].of_recv)
        return tb__fail(TB_INVALID, "%s",
                        is_send ? "what is sent is released, and does not arrive here"
                                : "what is received arrives, and is not released");
    if (!t)
        return tb__fail(TB_INVALID, "no %s of batch '%s' was begun with no_wait", is_send ? "sending" : "receiving",
                        b->name);
    return wait_for_event(b, t, i, timeout_ms);
}

/* The event has happened when this returns, so work submitted to a stream later comes after it. */
tb_status tb_client_stream_wait(tb_client_batch *b, bool is_send, tb_event event, const void *stream) {
    if (!stream)
        return tb__fail(TB_INVALID, "stream is NULL; it points to a handle");
    return tb_client_wait(b, is_send, event, -1);
}

/* ---- Questions ------------------------------------------------------------------------------------------------- */

static tb_status query_agent(tb_client_batch *b, tb__client_reply **out) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__message message = {.kind = TB__QUERY_STATUS, .batch_id = b->name};
    return tb__client_call(b->client, &message, NULL, 0, 0, "told the status", out);
}

static unsigned read_events(const tb__texts *names) {
    unsigned found = 0;
    for (size_t i = 0; i < names->count; i++) {
        for (size_t j = 0; j < NEVENTS; j++) {
            if (strcmp(names->item[i], tb__event_name_text((tb__event_name)j)) == 0)
                found |= (unsigned)events[j].event;
        }
    }
    return found;
}

tb_status tb_client_query(tb_client_batch *b, tb_client_status *out) {
    tb__client_reply *reply;
    TB_TRY(query_agent(b, &reply));
    const tb__message *m = &reply->message;
    tb_client_status now = {.transfer_signal = m->transfer_signal.value,
                            .version = m->version.value,
                            .attempt = m->attempt.value,
                            .bytes_done = (int64_t)m->bytes_done.value,
                            .bytes_total = (int64_t)m->bytes_total.value,
                            .groups_done = (uint32_t)m->groups_done.value,
                            .groups_total = (uint32_t)m->groups_total.value,
                            .seconds = m->seconds.value,
                            .events = read_events(&m->reached),
                            .is_torn = m->torn.value,
                            .is_mixed = m->mixed.value};
    snprintf(now.state, sizeof now.state, "%s", m->state ? m->state : "");
    snprintf(now.error, sizeof now.error, "%s", m->error ? m->error : "");
    tb__client_reply_free(reply);
    return tb__struct_write(out, &now, sizeof now, "a tb_client_status");
}

tb_status tb_client_query_pair(tb_client_batch *b, const char *pair, tb_client_pair_state *out) {
    tb__client_reply *reply;
    const tb__outcome *found = NULL;
    TB_TRY(query_agent(b, &reply));
    const tb__outcomes *pairs = &reply->message.pairs;
    for (size_t i = 0; i < pairs->count && !found; i++) {
        if (strcmp(pairs->item[i].pair_name, pair) == 0)
            found = &pairs->item[i];
    }
    tb_client_pair_state state = {0};
    if (found) {
        state = (tb_client_pair_state){.status = found->status, .version = found->version, .is_torn = found->is_torn};
        snprintf(state.error, sizeof state.error, "%s", found->message);
    }
    tb__client_reply_free(reply);
    if (!found)
        return tb__fail(TB_INVALID, "pair '%.100s' is not in batch '%s'", pair, b->name);
    return tb__struct_write(out, &state, sizeof state, "a tb_client_pair_state");
}
