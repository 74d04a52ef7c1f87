/* States of this process's transfers, as the agent reports them: Events, and answers to queries. Events are recorded
 * whenever they arrive, whatever the reading thread waits for. */
#include "bus/client/remote.h"

#include "base/descriptors.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

static void publish(remote_transfer *t) {
    t->has_news = true;
    if (t->fd >= 0)
        eventfd_write(t->fd, 1);
}

void tb__remote_clear_news(remote_transfer *t) {
    eventfd_t unused;
    t->has_news = false;
    if (t->fd >= 0)
        eventfd_read(t->fd, &unused);
}

void tb__remote_read_states(remote_transfer *t, const tb__entries *states) {
    tb__arena scratch = {0};
    bool has_parts = states->count > 1; /* Events of progress have none */
    tb__arena *arena = has_parts ? &t->arena : &scratch;
    if (has_parts) {
        t->parts.count = 0;
        tb__arena_reset(arena);
    }
    for (size_t i = 0; i < states->count; i++) {
        remote_part part = {.pair = tb__arena_strdup(arena, states->item[i].pair_name)};
        const tb__state_payload *p = &part.at;
        if (!part.pair || tb__map_decode(&tb__state_schema, states->item[i].payload, arena, &part.at) != TB_OK)
            continue; /* if memory is short, the previous state stays */
        if (!*part.pair)
            t->state = p->state;
        else if (has_parts)
            (void)tb__vec_push(&t->parts, part);
        if (!*part.pair && has_parts)
            t->batch->last = (tb_batch_state){
                .version = p->received, .is_torn = p->is_torn, .is_mixed = p->is_mixed, .is_in_doubt = p->is_in_doubt};
    }
    tb__arena_fini(&scratch);
}

static unsigned event_of(tb__event_name name) {
    switch (name) {
    case TB__EVENT_RELEASED:
        return TB_RELEASED;
    case TB__EVENT_ARRIVED:
        return TB_ARRIVED;
    case TB__EVENT_COMMITTING:
        return TB_DECIDED;
    case TB__EVENT_COMMITTED:
        return TB_COMMITTED;
    default:
        return 0;
    }
}

static bool calls_user(const remote_transfer *t) {
    return t->opts.progress || t->opts.committing;
}

/* The agent has reported the tensors' version. If it does not use them any more, the mark is for later transfers. */
static void clear_mark(remote_batch *b) {
    for (int i = 0; i < 2; i++) {
        if (b->transfers[i] && !b->transfers[i]->has_ended && !b->transfers[i]->is_told_end)
            return;
    }
    if (b->mark && !b->is_given_up)
        atomic_store(b->mark, 0);
}

void tb__remote_on_event(void *world, const tb__message *m) {
    remote_world *w = world;
    remote_transfer *t = LIST_FIRST(&w->transfers);
    while (t && t->seq != m->seq)
        t = LIST_NEXT(t, link);
    if (!t || t->has_ended)
        return;
    tb__remote_read_states(t, &m->states);
    t->has_progress |= m->event == TB__EVENT_PROGRESS;
    t->told |= event_of(m->event);
    if (m->event == TB__EVENT_FAILED) {
        t->status = m->status == TB_OK ? TB_INTERNAL : m->status;
        snprintf(t->why, sizeof t->why, "%s", m->message);
    }
    t->is_told_end |= m->event == TB__EVENT_FAILED || m->event == TB__EVENT_COMMITTED;
    if (t->is_told_end && m->states.count > 1)
        clear_mark(t->batch);
    if (calls_user(t) && (t->is_told_end || t->has_progress || m->event == TB__EVENT_COMMITTING))
        return; /* the user's functions are called first, by the thread that reads */
    if (m->event == TB__EVENT_PROGRESS)
        return;
    t->events = t->told & ~(t->opts.hold ? 0U : (unsigned)TB_DECIDED);
    t->has_ended = t->is_told_end;
    publish(t);
}

void tb__remote_note_loss(remote_world *w) {
    for (remote_transfer *t = LIST_FIRST(&w->transfers); t; t = LIST_NEXT(t, link)) {
        if (t->has_ended || t->is_told_end)
            continue;
        t->status = w->link->broken;
        snprintf(t->why, sizeof t->why, "%s", w->link->why);
        t->has_ended = true;
        publish(t);
    }
}

static void call_progress(remote_transfer *t) {
    tb_transfer_state state = t->state;
    state.size = sizeof state;
    if (t->is_told_end) {
        state.status = t->status;
        state.events = t->told & ~(t->opts.hold ? 0U : (unsigned)TB_DECIDED);
    }
    t->has_progress = false;
    tb__link_unlock(t->batch->world->link);
    t->opts.progress(t->opts.arg, &state);
    tb__link_lock(t->batch->world->link);
}

static void call_committing(remote_transfer *t, bool is_done) {
    t->is_committing = !is_done;
    tb__link_unlock(t->batch->world->link);
    t->opts.committing(t->opts.arg, is_done);
    tb__link_lock(t->batch->world->link);
}

static void let_proceed(remote_transfer *t) {
    tb__message m = {.kind = TB__PROCEED, .batch_id = t->batch->name};
    uint64_t seq;
    t->has_proceeded = true;
    if (t->opts.committing)
        call_committing(t, false);
    if (tb__link_post(t->batch->world->link, &m, NULL, 0, t->deadline_ms, &seq) == TB_OK)
        tb__link_drop_reply(t->batch->world->link, seq);
}

/* A receive that the agent released by itself, at its deadline, has changed the tensors already. */
static void call_at_end(remote_transfer *t) {
    if (t->opts.committing && t->told & TB_DECIDED && !t->has_proceeded && t->status == TB_OK)
        call_committing(t, false);
    if (t->opts.committing && t->is_committing)
        call_committing(t, true);
    if (t->opts.progress)
        call_progress(t);
    t->events = t->told & ~(t->opts.hold ? 0U : (unsigned)TB_DECIDED);
    t->has_ended = true;
    publish(t);
}

static bool call_one(remote_transfer *t) {
    if (!calls_user(t) || t->has_ended || t->ncalls > 0)
        return false;
    bool may_proceed = t->told & TB_DECIDED && !t->has_proceeded && (!t->opts.hold || t->may_proceed);
    if (!t->is_told_end && !(t->has_progress && t->opts.progress) && !(may_proceed && t->opts.committing) &&
        !(t->told & ~t->events & (unsigned)TB_DECIDED && t->opts.hold))
        return false;
    t->ncalls++;
    if (t->opts.hold && !(t->events & TB_DECIDED) && t->told & TB_DECIDED) {
        t->events = t->told;
        publish(t);
    }
    if (t->is_told_end) {
        call_at_end(t);
    } else {
        if (t->has_progress && t->opts.progress)
            call_progress(t);
        if (may_proceed && t->opts.committing)
            let_proceed(t);
    }
    t->ncalls--;
    tb__link_wake(t->batch->world->link);
    return true;
}

void tb__remote_call_user(remote_world *w) {
    remote_transfer *t = LIST_FIRST(&w->transfers);
    while (t) /* the list may change during a call */
        t = call_one(t) ? LIST_FIRST(&w->transfers) : LIST_NEXT(t, link);
}

tb_status tb__remote_query(remote_batch *b, tb__state_name what, tb__asked_direction direction, tb__link_reply **out) {
    tb__message message = {.kind = TB__QUERY_STATUS, .batch_id = b->name, .state_name = what, .asked = direction};
    *out = NULL;
    tb_status status = tb__link_call(b->world->link, &message, NULL, 0, 0, "told the status", out);
    if (status != TB_OK) {
        tb__link_reply_free(*out);
        *out = NULL;
    }
    if (b->world->link->is_over)
        tb__remote_note_loss(b->world);
    return status;
}

/* If the agent is gone, the last known state. */
tb_status tb__remote_batch_query(tb_batch *batch, tb_batch_state *out) {
    remote_batch *b = (remote_batch *)batch;
    tb__link_reply *reply = NULL;
    tb_status status = TB_OK;
    if (b->transfers[0])
        status = tb__remote_deliver(b->transfers[0]);
    if (b->is_registered && !b->world->link->is_over)
        status = tb__remote_query(b, TB__STATE_ALL, TB__ASKED_NONE, &reply);
    if (reply) {
        const tb__message *m = &reply->message;
        b->last = (tb_batch_state){.version = m->version.value,
                                   .is_mixed = m->mixed.value,
                                   .is_torn = m->torn.value,
                                   .is_in_doubt = m->in_doubt.value,
                                   .transfer_signal = m->transfer_signal.value};
        b->is_given_up &= !m->state || (strcmp(m->state, "idle") != 0 && strcmp(m->state, "failed") != 0);
        clear_mark(b);
    }
    *out = b->last;
    out->is_torn |= b->is_torn_here || (b->world->link->is_over && b->mark && atomic_load(b->mark));
    tb__link_reply_free(reply);
    return b->world->link->is_over ? TB_OK : status;
}

tb_status tb__remote_batch_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms, bool *out) {
    remote_batch *b = (remote_batch *)batch;
    tb__message m = {.kind = TB__QUERY_STATUS,
                     .batch_id = b->name,
                     .state_name = TB__STATE_TRANSFER_SIGNAL,
                     .question = question,
                     .group_name = group};
    tb__link_reply *reply = NULL;
    tb__link_lock(b->world->link);
    tb_status status = b->is_registered ? tb__link_call(b->world->link, &m, NULL, 0,
                                                        tb__remote_timeout(b->world, timeout_ms), "answered", &reply)
                                        : tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", b->name);
    tb__link_unlock(b->world->link);
    if (status == TB_OK && reply->message.question != question)
        status = tb__fail(TB_REFUSED, "the agent is of an earlier version, and answers no questions of groups");
    if (status == TB_OK)
        *out = reply->message.transfer_signal.value;
    tb__link_reply_free(reply);
    return status;
}

static remote_part *find_part(const remote_transfer *t, const remote_pair *pair) {
    bool is_first_seat = strcmp(pair->group, pair->world->link->group) == 0;
    for (size_t i = 0; i < t->parts.count; i++) {
        remote_part *part = &t->parts.item[i];
        if (strcmp(part->pair, pair->name) == 0 &&
            (part->at.side ? strcmp(part->at.side, pair->group) == 0 : is_first_seat))
            return part;
    }
    return NULL;
}

tb_status tb__remote_batch_version(tb_batch *batch, const tb_pair *pair, uint64_t *version, bool *is_torn) {
    remote_batch *b = (remote_batch *)batch;
    const remote_pair *p = (const remote_pair *)pair;
    tb__link_reply *reply = NULL;
    remote_transfer read = {.batch = b};
    if (b->transfers[0])
        (void)tb__remote_deliver(b->transfers[0]);
    tb_status status = tb__remote_batch_has(b, p->name)
                           ? tb__remote_query(b, TB__STATE_VERSION, TB__ASKED_RECV, &reply)
                           : tb__fail(TB_INVALID, "pair '%s' is not in batch '%s'", p->name, b->name);
    if (reply)
        tb__remote_read_states(&read, &reply->message.states);
    const remote_part *part = find_part(&read, p);
    if (status == TB_OK && part) {
        *version = part->at.received;
        *is_torn = part->at.is_torn || b->is_torn_here;
    } else if (status == TB_OK) {
        status = tb__fail(TB_INVALID, "pair '%s' is not in batch '%s'", p->name, b->name);
    }
    tb__link_reply_free(reply);
    tb__arena_fini(&read.arena);
    free(read.parts.item);
    return status;
}

/* Asks the agent about a transfer that has not ended. */
static tb_status update_state(remote_transfer *t) {
    tb__link_reply *reply = NULL;
    if (t->has_ended)
        return tb__remote_deliver(t);
    tb_status status =
        tb__remote_query(t->batch, TB__STATE_PROGRESS, t->is_send ? TB__ASKED_SEND : TB__ASKED_RECV, &reply);
    if (status == TB_OK && !t->has_ended)
        tb__remote_read_states(t, &reply->message.states);
    tb__link_reply_free(reply);
    return t->has_ended ? tb__remote_deliver(t) : status;
}

tb_status tb__remote_transfer_query(const tb_transfer *transfer, tb_transfer_state *out) {
    remote_transfer *t = (remote_transfer *)(uintptr_t)transfer;
    tb_status status = update_state(t);
    *out = t->state;
    out->status = t->status;
    out->events = t->events;
    if (!(out->events & TB_COMMITTED))
        out->version = 0;
    tb__remote_clear_news(t);
    if (t->has_ended && t->status != TB_OK)
        tb__set_detail("%s", t->why);
    return t->has_ended ? TB_OK : status;
}

tb_status tb__remote_transfer_pair(const tb_transfer *transfer, const tb_pair *pair, tb_transfer_state *out) {
    remote_transfer *t = (remote_transfer *)(uintptr_t)transfer;
    const remote_pair *p = (const remote_pair *)pair;
    tb_status status = update_state(t);
    const remote_part *part = find_part(t, p);
    if (part) {
        *out = part->at.state;
        status = TB_OK;
        if (out->status != TB_OK)
            tb__set_detail("%s", part->at.message);
    } else if (t->has_ended && t->status != TB_OK && tb__remote_batch_has(t->batch, p->name)) { /* the agent is gone */
        *out = (tb_transfer_state){.status = t->status};
        status = TB_OK;
        tb__set_detail("%s", t->why);
    } else if (status == TB_OK) {
        status = tb__fail(TB_INVALID, "pair '%s' has no part in this transfer of batch '%s'", p->name, t->batch->name);
    }
    return status;
}

int tb__remote_transfer_fd(const tb_transfer *transfer) {
    remote_transfer *t = (remote_transfer *)(uintptr_t)transfer;
    remote_world *w = t->batch->world;
    tb__link_lock(w->link);
    if (t->fd < 0) {
        t->fd = tb__fd_own(eventfd(t->has_news, EFD_CLOEXEC | EFD_NONBLOCK));
        if (t->fd < 0)
            tb__set_detail("eventfd: %s", tb__errno_text(errno));
    }
    int fd = t->fd >= 0 && tb__remote_start_thread(w) == TB_OK ? t->fd : -1;
    tb__link_unlock(w->link);
    return fd;
}
