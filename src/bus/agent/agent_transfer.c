/* Transfers of a client's batch: their threads, events and queries. */
#include "bus/agent/agent_inside.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* In the order in which they come. */
static const struct {
    tb_event event;
    tb__event_name name;
} events[] = {{TB_RELEASED, TB__EVENT_RELEASED},
              {TB_ARRIVED, TB__EVENT_ARRIVED},
              {TB_DECIDED, TB__EVENT_COMMITTING},
              {TB_COMMITTED, TB__EVENT_COMMITTED}};

enum { RELEASED, ARRIVED, COMMITTING, COMMITTED, NEVENTS };

static void send_event(const agent_job *job, tb__event_name name, uint64_t attempt, tb_status status, const char *why,
                       tb__entries states) {
    tb__message event = {.kind = TB__EVENT,
                         .seq = job->seq,
                         .event = name,
                         .status = status,
                         .message = why,
                         .version = {.is_set = attempt > 0, .value = attempt},
                         .states = states};
    tb__agent_session_reply(job->session, &event);
}

/* In the thread of the world's loop, with its lock. */
static void on_progress(void *arg, const tb_transfer_state *state) {
    agent_job *job = arg;
    (void)state;
    atomic_store(&job->has_progress, true);
    tb__endpoint_wake(&job->agent->endpoint);
}

static void send_progress(agent_job *job, const tb_transfer *t) {
    tb__state_payload p = {.message = "", .state.size = sizeof p.state};
    tb__bytes bytes = {0};
    tb_transfer_query(t, &p.state);
    p.state.status = TB_OK; /* the result and its events follow when the data was delivered */
    p.state.events = 0;
    p.state.version = 0;
    if (tb__map_encode(&tb__state_schema, &p, &bytes) == TB_OK) {
        tb__entry entry = {.pair_name = "", .payload = {bytes.item, bytes.count}};
        send_event(job, TB__EVENT_PROGRESS, p.state.attempt, TB_OK, "", (tb__entries){1, &entry});
    }
    free(bytes.item);
}

void tb__agent_send_progress(tb__agent *agent) {
    for (agent_batch *b = LIST_FIRST(&agent->batches); b; b = LIST_NEXT(b, link)) {
        for (int i = 0; i < 2; i++) {
            if (b->transfers[i] && atomic_exchange(&b->busy[i]->has_progress, false))
                send_progress(b->busy[i], b->transfers[i]);
        }
    }
}

/* Version 1 answers at once. */
static bool answers_when_begun(const agent_job *job) {
    return job->message.no_wait && job->session->protocol > 1;
}

/* Sends the last events of a transfer that has ended. A failure to begin is in the Reply. */
static void send_final_events(agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    const tb__message *reply = &job->reply;
    if (!job->message.events || (answers_when_begun(job) && !job->is_answered))
        return;
    if (job->status != TB_OK) {
        send_event(job, TB__EVENT_FAILED, job->attempt, job->status, job->why, reply->states);
        return;
    }
    size_t first = is_send ? RELEASED : ARRIVED;
    if (!(job->told & (unsigned)events[first].event))
        send_event(job, events[first].name, reply->version.value, TB_OK, "", (tb__entries){0});
    send_event(job, TB__EVENT_COMMITTED, reply->version.value, TB_OK, "", reply->states);
}

/* The events that the client sees: mirrored memory is released as soon as it was read, and has arrived when it is
 * written back. */
static unsigned seen_by_client(const agent_batch *b, bool is_send, const tb_transfer_state *state) {
    unsigned seen = state->events;
    if (is_send && tb__agent_is_mirrored(b))
        seen |= TB_RELEASED;
    if (!is_send && tb__agent_has_mirrors(b) && !b->is_delivered) {
        seen &= ~(unsigned)TB_COMMITTED;
        if (b->batch->opts.commit != TB_SHADOW)
            seen &= ~(unsigned)TB_ARRIVED;
    }
    return seen;
}

/* Delivers a committed version also if the transfer can't begin: starting it may have found that an earlier receive is
 * committed. */
static tb_status begin_bus_transfer(agent_job *job, bool is_send, tb_transfer **out) {
    agent_batch *b = job->batch;
    tb_transfer_opts opts = {.size = sizeof opts,
                             .timeout_ms = tb__agent_job_timeout(job),
                             .skip_lost = job->message.skip_lost,
                             .whole_group = job->message.whole_group,
                             .hold = job->message.hold,
                             .group = job->message.group_name};
    if (job->message.progress) {
        opts.progress = on_progress;
        opts.arg = job;
    }
    if (!is_send)
        tb__batch_deliver_later(b->batch, tb__agent_has_mirrors(b));
    TB_TRY(tb__agent_read_mirrors(b)); /* also to receive: elements that do not arrive stay as they are */
    tb_status status = is_send ? tb_send(b->batch, &opts, out) : tb_recv(b->batch, &opts, out);
    tb__saved_detail why = tb__save_detail();
    tb__agent_lock(job->agent);
    tb_status delivered = tb__agent_deliver_late(b);
    tb__agent_unlock(job->agent);
    TB_TRY(delivered);
    return status == TB_OK ? TB_OK : tb__fail(status, "%s", why.text);
}

/* Sends the events that the client sees and was not told. A job's. */
static void tell_events(agent_job *job, const tb_transfer *t, bool is_send) {
    tb_transfer_state state = {.size = sizeof state};
    tb_transfer_query(t, &state);
    tb__agent_lock(job->agent);
    unsigned seen = seen_by_client(job->batch, is_send, &state) & ~(unsigned)TB_COMMITTED & ~job->told;
    for (size_t i = 0; i < NEVENTS; i++) {
        if (seen & (unsigned)events[i].event)
            send_event(job, events[i].name, state.attempt, TB_OK, "", (tb__entries){0});
    }
    job->told |= seen;
    tb__agent_unlock(job->agent);
    tb__endpoint_wake(&job->agent->endpoint);
}

/* Waits for the transfer's events in order, and sends them, if the client wants them. */
static tb_status await_events(agent_job *job, tb_transfer *t, bool is_send) {
    unsigned held = job->message.hold ? TB_DECIDED : 0U;
    if (!job->message.events)
        return TB_OK;
    /* If a pair has failed, not everything arrives; the others are held nevertheless. */
    if (!is_send || !tb__agent_is_mirrored(job->batch))
        TB_TRY(tb__transfer_wait_any(t, is_send ? (unsigned)TB_RELEASED : TB_ARRIVED | held));
    tell_events(job, t, is_send);
    if (!held)
        return TB_OK;
    TB_TRY(tb__transfer_wait_any(t, held));
    tell_events(job, t, is_send);
    return TB_OK;
}

/* With whole_group, the other ranks wait until the client's memory is written. */
static void deliver_before_end(agent_job *job, tb_transfer *t, tb_status *status, char why[TB__WHY_MAX]) {
    tb__agent_lock(job->agent);
    tb__agent_record_end(job->batch, t, false, status, why);
    tb__agent_unlock(job->agent);
    if (*status == TB_OK && job->message.events)
        tell_events(job, t, false);
    tb__transfer_delivered(t, *status, why);
}

static void record_past(agent_batch *b, const tb_transfer_state *state, bool is_send, tb_status status) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    b->past[b->npast++ % TB__AGENT_MAX_PAST] = (agent_past){
        .state = *state,
        .is_send = is_send,
        .status = status,
        .when = (double)now.tv_sec + (double)now.tv_nsec / 1e9,
    };
}

static tb_status run_transfer(agent_job *job) {
    tb__agent *agent = job->agent;
    agent_batch *b = job->batch;
    bool is_send = job->message.direction == TB__SEND;
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    tb_status status = begin_bus_transfer(job, is_send, &t);
    tb__agent_lock(agent);
    b->transfers[is_send] = t;
    bool is_late = t && (b->is_ending || b->is_given_up[is_send]); /* before the transfer began */
    if (status == TB_OK && answers_when_begun(job))
        tb__agent_job_answer(job, TB_OK);
    tb__agent_unlock(agent);
    tb__endpoint_wake(&agent->endpoint);
    if (is_late)
        tb_cancel(t);
    if (status == TB_OK && job->session->protocol == 1) /* other clients allow groups of tensors by AwaitTensors */
        tb__transfer_take_groups(t);
    if (status == TB_OK)
        status = await_events(job, t, is_send);
    char why[TB__WHY_MAX] = "";
    bool is_whole = job->message.whole_group && !is_send && tb__agent_has_mirrors(b);
    if (status == TB_OK && is_whole)
        status = tb__transfer_wait_moved(t);
    bool is_delivered = status == TB_OK && is_whole;
    if (is_delivered)
        deliver_before_end(job, t, &status, why);
    if (status == TB_OK)
        status = tb__transfer_wait_any(t, TB_COMMITTED);
    if (status != TB_OK && !*why)
        snprintf(why, sizeof why, "%s", tb_error_detail());
    tb__agent_lock(agent);
    if (is_delivered)
        tb__agent_update_version(b);
    else
        tb__agent_record_end(b, t, is_send, &status, why);
    if (t)
        tb_transfer_query(t, &state);
    state.events = seen_by_client(b, is_send, &state);
    job->attempt = state.attempt;
    record_past(b, &state, is_send, status);
    b->transfers[is_send] = NULL;
    if (atomic_exchange(&job->has_progress, false))
        send_progress(job, t);
    while (!is_send && b->nawaiting > 0) /* they end soon, since the transfer has ended */
        pthread_cond_wait(&agent->changed, &agent->lock);
    if (t && job->session->protocol > 1)
        tb__agent_put_states(job, b, t, state.events, &job->reply);
    tb__agent_unlock(agent);
    tb_transfer_destroy(t);
    if (status != TB_OK)
        return tb__fail(status, "%s", why);
    job->reply = (tb__message){.states = job->reply.states,
                               .attempt = tb__some_uint(state.attempt),
                               .version = tb__some_uint(state.version),
                               .bytes = tb__some_uint((uint64_t)state.bytes_done),
                               .seconds = tb__some_float(state.seconds)};
    return TB_OK;
}

/* Commit mode and checksums are fixed at registration. */
static tb_status check_modes(const tb__message *m, const tb_batch *batch) {
    bool is_shadow = batch->opts.commit == TB_SHADOW;
    if (m->commit != TB__COMMIT_UNSAID && (m->commit == TB__SHADOW) != is_shadow)
        return tb__fail(TB_REFUSED, "batch '%.100s' was registered to be committed %s", m->batch_id,
                        is_shadow ? "by shadow" : "in place");
    if (m->checksum.is_set && m->checksum.value != batch->opts.checksum)
        return tb__fail(TB_REFUSED, "batch '%.100s' was registered %s checksums", m->batch_id,
                        batch->opts.checksum ? "with" : "without");
    return TB_OK;
}

static tb_status check_free(const agent_batch *b, bool is_send) {
    TB_TRY(tb__agent_check_registered(b));
    if (b->is_changing)
        return tb__fail(TB_REFUSED, "pairs are being added to batch '%.100s' or removed from it", b->id);
    if (b->busy[is_send])
        return tb__fail(TB_REFUSED, "batch '%.100s' is already being %s", b->id, is_send ? "sent" : "received");
    if (b->busy[!is_send] && tb__agent_has_mirrors(b)) /* both would use one copy of the tensors */
        return tb__fail(TB_REFUSED,
                        "batch '%.100s' is being %s, and its tensors are copied through the agent; wait for that, or "
                        "use memory of tb_alloc",
                        b->id, is_send ? "received" : "sent");
    return TB_OK;
}

tb_status tb__agent_begin_transfer(agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    agent_batch *b = job->batch;
    TB_TRY(check_free(b, is_send));
    TB_TRY(check_modes(&job->message, b->batch));
    b->busy[is_send] = job;
    b->error[0] = '\0';
    b->is_given_up[is_send] = false;
    if (!is_send) {
        b->ngroups = 0;
        b->is_delivered = false;
    }
    if (job->message.no_wait && !answers_when_begun(job))
        tb__agent_job_answer(job, TB_OK);
    tb__agent_job_start(job, run_transfer);
    return TB_OK;
}

static void add_to_histogram(agent_histogram *histogram, double first, double value) {
    double bound = first;
    for (int i = 0; i < AGENT_BOUNDS; i++, bound *= 4)
        histogram->count[i] += value <= bound;
}

static void count_transfer(const agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    agent_totals *totals = &job->agent->totals[is_send];
    const agent_batch *b = job->batch;
    if (job->status != TB_OK) {
        totals->nfailed++;
        return;
    }
    totals->ndone++;
    totals->nbytes += job->reply.bytes.value;
    totals->seconds += job->reply.seconds.value;
    add_to_histogram(&totals->by_seconds, AGENT_FIRST_SECONDS, job->reply.seconds.value);
    add_to_histogram(&totals->by_nbytes, AGENT_FIRST_NBYTES, (double)job->reply.bytes.value);
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        b->batch_pairs.item[i].pair->moved[is_send] += b->batch_pairs.item[i].moved[is_send];
}

void tb__agent_finish_transfer(agent_job *job) {
    agent_batch *b = job->batch;
    b->busy[job->message.direction == TB__SEND] = NULL;
    count_transfer(job);
    if (job->status != TB_OK)
        snprintf(b->error, sizeof b->error, "%s", job->why);
    if (b->batch_pairs.count > 1)
        tb__agent_put_outcomes(job, b, &job->reply);
    send_final_events(job);
    tb__agent_job_finish(job);
}

static bool is_asked(tb__state_name asked, tb__state_name name) {
    return asked == TB__STATE_ALL || asked == name;
}

static tb__texts name_events(agent_job *job, unsigned seen) {
    const char **names = tb__arena_alloc(&job->arena, NEVENTS, sizeof *names);
    size_t n = 0;
    for (size_t i = 0; names && i < NEVENTS; i++) {
        if (seen & (unsigned)events[i].event)
            names[n++] = tb__event_name_text(events[i].name);
    }
    return (tb__texts){.count = n, .item = names};
}

/* `signal` NULL: this rank's own. */
static void reply_status(agent_job *job, const bool *signal) {
    agent_batch *b = job->batch;
    tb__state_name asked = job->message.state_name;
    tb__message *r = &job->reply;
    tb_batch_state received = tb__agent_get_received(b);
    tb_transfer_state state = {.size = sizeof state};
    const tb_transfer *t = b->transfers[0] ? b->transfers[0] : b->transfers[1];
    bool is_busy = b->busy[0] || b->busy[1], is_send = t ? t == b->transfers[1] : b->busy[1] != NULL;
    unsigned seen = 0;
    if (t) {
        tb_transfer_query(t, &state);
        seen = seen_by_client(b, is_send, &state);
    } else if (!is_busy && b->npast > 0) {
        state = b->past[(b->npast - 1) % TB__AGENT_MAX_PAST].state;
        seen = state.events;
    }
    *r = (tb__message){.state = !b->batch  ? "registering"
                                : !is_busy ? (*b->error ? "failed" : "idle")
                                : is_send  ? "sending"
                                           : "receiving"};
    if (is_asked(asked, TB__STATE_TRANSFER_SIGNAL))
        r->transfer_signal = tb__some_bool(signal ? *signal : received.transfer_signal);
    r->question = signal ? job->message.question : 0;
    if (is_asked(asked, TB__STATE_PROGRESS)) {
        r->bytes_done = tb__some_uint((uint64_t)state.bytes_done);
        r->bytes_total = tb__some_uint((uint64_t)state.bytes_total);
        r->groups_done = tb__some_uint(state.groups_done);
        r->groups_total = tb__some_uint(state.groups_total);
        r->attempt = tb__some_uint(state.attempt);
        r->seconds = tb__some_float(state.seconds);
        r->reached = name_events(job, seen);
    }
    if (is_asked(asked, TB__STATE_VERSION)) {
        bool is_old = job->session->protocol == 1;
        r->version = tb__some_uint(is_old ? b->version : received.version);
        r->torn = tb__some_bool(is_old ? tb__agent_is_torn(b) : received.is_torn);
        r->mixed = tb__some_bool(is_old ? b->is_mixed : received.is_mixed);
        r->in_doubt = tb__some_bool(received.is_in_doubt);
        tb__agent_put_outcomes(job, b, r);
    }
    if (is_asked(asked, TB__STATE_ERROR))
        r->error = b->error;
    if (job->message.asked != TB__ASKED_NONE) {
        bool of_send = job->message.asked == TB__ASKED_SEND;
        tb_transfer_state now = {.size = sizeof now};
        const tb_transfer *one = b->transfers[of_send];
        if (one)
            tb_transfer_query(one, &now);
        tb__agent_put_states(job, b, one, one ? seen_by_client(b, of_send, &now) : 0, r);
    }
    tb__agent_job_end(job, TB_OK);
}

static tb_status run_ask_signal(agent_job *job) {
    const tb__message *m = &job->message;
    int left_ms = tb__ms_until(job->deadline_ms);
    return tb__batch_ask_signal(job->batch->batch, m->group_name, m->question, left_ms > 0 ? left_ms : 1,
                                &job->batch->is_cancelled, &job->signal);
}

void tb__agent_finish_query(agent_job *job) {
    tb_status status = job->status == TB_OK ? tb__agent_get_batch(job) : tb__fail(job->status, "%s", job->why);
    if (status == TB_OK)
        reply_status(job, &job->signal);
    else
        tb__agent_job_end(job, status); /* the batch may be ending by now */
}

tb_status tb__agent_query_status(agent_job *job) {
    agent_batch *b = job->batch;
    if (job->message.question == 0) {
        reply_status(job, NULL);
        return TB_OK;
    }
    TB_TRY(tb__agent_check_registered(b));
    if (b->is_changing)
        return tb__fail(TB_REFUSED, "batch '%.100s' is being registered", b->id);
    tb__agent_job_start(job, run_ask_signal);
    return TB_OK;
}

tb_status tb__agent_proceed(agent_job *job) {
    agent_batch *b = job->batch;
    return b->transfers[0] ? tb_proceed(b->transfers[0])
                           : tb__fail(TB_REFUSED, "batch '%.100s' is not being received", b->id);
}

/* Answered at once: the end is told by an Event. */
tb_status tb__agent_cancel(agent_job *job) {
    agent_batch *b = job->batch;
    bool is_send = job->message.direction == TB__SEND;
    b->is_given_up[is_send] = true;
    if (b->transfers[is_send])
        tb__transfer_begin_cancel(b->transfers[is_send]);
    return TB_OK;
}

static tb_status run_await_tensors(agent_job *job) {
    agent_batch *b = job->batch;
    uint32_t group = (uint32_t)job->message.group.value;
    tb__agent_lock(job->agent);
    tb_transfer *t = b->transfers[0];
    b->nawaiting += t != NULL;
    tb__agent_unlock(job->agent);
    if (!t)
        return tb__fail(TB_INVALID, "batch '%.100s' is not being received", b->id);
    tb_status status = tb_wait_group(t, group, tb__ms_until(job->deadline_ms));
    tb__agent_lock(job->agent);
    if (status == TB_OK)
        status = tb__agent_deliver_groups(b, group);
    b->nawaiting--;
    pthread_cond_broadcast(&job->agent->changed);
    tb__agent_unlock(job->agent);
    return status;
}

tb_status tb__agent_await_tensors(agent_job *job) {
    agent_batch *b = job->batch;
    if (job->message.group.is_set) {
        tb__agent_job_start(job, run_await_tensors);
        return TB_OK;
    }
    if (b->transfers[0])
        tb__transfer_take_groups(b->transfers[0]);
    tb__agent_job_end(job, TB_OK);
    return TB_OK;
}
