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
    if (o.no_wait)
        return begin_without_waiting(b, &message, &o);
    return tb__client_call(b->client, &message, NULL, 0, o.timeout_ms, "ended the transfer", NULL);
}

tb_status tb_client_proceed(tb_client_batch *b) {
    TB_TRY(tb__client_check(b->client, "batch"));
    tb__message message = {.kind = TB__PROCEED, .batch_id = b->name};
    return tb__client_call(b->client, &message, NULL, 0, 0, "let the transfer proceed", NULL);
}

/* ---- Wait ------------------------------------------------------------------------------------------------------ */

tb_status tb_client_wait(tb_client_batch *b, bool is_send, tb_event event, int timeout_ms) {
    TB_TRY(tb__client_check(b->client, "batch"));
    const tb__pending_transfer *t = find_transfer(b, is_send, NULL);
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
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms : tb__now_ms() + timeout_ms;
    while (!(t->events & (unsigned)event)) {
        if (t->status != TB_OK)
            return tb__fail(t->status, "%s", t->why);
        if (t->events & TB_COMMITTED)
            return tb__fail(TB_INVALID, "the transfer of batch '%s' has ended, and was not held back", b->name);
        tb_status status = tb__client_listen(b->client, deadline_ms, "told of an event");
        if (status == TB_TIMEOUT)
            return tb__fail(TB_TIMEOUT, "batch '%s' has not %s %s", b->name, events[i].what,
                            timeout_ms < 0 ? "by the transfer's deadline" : "so far");
        if (status != TB_OK && !(t->events & (unsigned)event) && t->status == TB_OK)
            return status;
    }
    return TB_OK;
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
