/* Transfers of a process whose seat an agent has. */
#include "bus/client/remote.h"

#include <stdio.h>
#include <string.h>

enum { GRACE_MS = 11000 }; /* the agent asks the store for the outcome of a shadowed receive, and then answers */

/* The agent uses device memory from the call on, so this waits for the work on the stream, and copies, before. Also to
 * receive: elements that do not arrive stay as they are. */
static tb_status prepare_memory(remote_batch *b, bool is_send, const tb_transfer_opts *o, int64_t deadline_ms) {
    remote_world *w = b->world;
    const remote_transfer *other = b->copies.count > 0 ? b->transfers[!is_send] : NULL;
    if (other && !other->has_ended)
        return tb__fail(TB_REFUSED,
                        "batch '%s' is being %s, and its tensors are copied through host memory; wait for that",
                        b->name, is_send ? "received" : "sent");
    if (!b->invalidated)
        TB_TRY(tb__remote_check_memories(b));
    if ((b->copies.count == 0 && !o->stream) || b->agent_invalidated) /* the agent reports that */
        return TB_OK;
    if (b->invalidated)
        return tb__remote_fail_invalidated(b);
    tb__link_unlock(w->link);
    pthread_mutex_lock(&w->device_lock);
    tb_status status = o->stream ? tb__remote_wait_stream(b, o->stream, deadline_ms) : TB_OK;
    if (status == TB_OK)
        status = tb__remote_copy_out(b, deadline_ms);
    pthread_mutex_unlock(&w->device_lock);
    tb__link_lock(w->link);
    return status;
}

static bool has_succeeded(const remote_transfer *t, const remote_pair *pair) {
    for (size_t i = 0; i < t->parts.count; i++) {
        const remote_part *part = &t->parts.item[i];
        if (strcmp(part->pair, pair->name) == 0 && part->at.state.status == TB_OK)
            return true;
    }
    return false;
}

/* Copies what was received to device memory, of the pairs that have succeeded. Without the lock. */
static tb_status copy_received(const remote_transfer *t, bool is_all_well) {
    remote_batch *b = t->batch;
    const remote_pair *last = NULL;
    tb_status status = TB_OK;
    pthread_mutex_lock(&b->world->device_lock);
    for (size_t i = 0; i < b->nregistered && status == TB_OK; i++) {
        const remote_pair *pair = b->tensors.item[i].pair;
        bool is_first = pair != last;
        for (size_t j = 0; j < i && is_first; j++)
            is_first = b->tensors.item[j].pair != pair;
        last = pair;
        if (b->invalidated)
            status = tb__remote_fail_invalidated(b);
        else if (is_first && (is_all_well || has_succeeded(t, pair)))
            status = tb__remote_copy_back(b, pair, 0, UINT64_MAX, tb__now_ms() + b->world->timeout_ms);
    }
    pthread_mutex_unlock(&b->world->device_lock);
    return status;
}

tb_status tb__remote_deliver(remote_transfer *t) {
    tb__link *l = t->batch->world->link;
    unsigned now = (unsigned)TB_COMMITTED | (t->batch->opts.commit == TB_SHADOW ? 0U : (unsigned)TB_ARRIVED);
    if (t->is_send || t->batch->copies.count == 0 || (!(t->events & now) && !t->has_ended))
        return TB_OK;
    while (t->delivery == DELIVERING)
        tb__link_sleep(l);
    if (t->delivery == NOT_DELIVERED) {
        bool is_all_well = t->events & now;
        t->delivery = DELIVERING;
        tb__link_unlock(l);
        tb__saved_detail why = tb__save_detail();
        t->delivered = copy_received(t, is_all_well);
        snprintf(t->delivery_why, sizeof t->delivery_why, "%s", t->delivered == TB_OK ? "" : tb_error_detail());
        (void)tb__fail(TB_OK, "%s", why.text);
        tb__link_lock(l);
        t->delivery = DELIVERED;
        t->batch->is_torn_here |= t->delivered != TB_OK;
        if (t->delivered == TB_OK && t->status == TB_OK && t->events & TB_COMMITTED)
            t->batch->is_torn_here = false;
        tb__link_wake(l);
    }
    return t->delivered == TB_OK ? TB_OK : tb__fail(t->delivered, "%s", t->delivery_why);
}

static tb_status check_begin(const remote_batch *b, bool is_send, const tb_transfer_opts *o) {
    if (o->hold && (is_send || b->opts.commit != TB_SHADOW))
        return tb__fail(TB_INVALID, "hold is for receiving with TB_SHADOW");
    if (o->whole_group && !is_send && b->copies.count > 0)
        return tb__fail(TB_REFUSED,
                        "batch '%s' has device memory that the program itself copies, after the agent has ended the "
                        "transfer, so it can't be received with whole_group",
                        b->name);
    if (b->transfers[is_send])
        return tb__fail(TB_REFUSED, "batch '%s' is already being %s; destroy that transfer first", b->name,
                        is_send ? "sent" : "received");
    return TB_OK;
}

/* The agent does not answer. It may begin yet: the batch keeps the tensors until it is destroyed. */
static void give_up_begun(const remote_transfer *t) {
    tb__message m = {.kind = TB__CANCEL, .batch_id = t->batch->name, .direction = t->is_send ? TB__SEND : TB__RECV};
    tb__saved_detail why = tb__save_detail();
    uint64_t seq;
    t->batch->is_given_up = true;
    tb__link_drop_reply(t->batch->world->link, t->seq);
    if (tb__link_post(t->batch->world->link, &m, NULL, 0, tb__now_ms(), &seq) == TB_OK)
        tb__link_drop_reply(t->batch->world->link, seq);
    (void)tb__fail(TB_TIMEOUT, "%s", why.text);
}

/* The transfer is in the world's list before the call, because events may arrive with the reply. */
static tb_status begin_transfer(remote_transfer *t) {
    remote_batch *b = t->batch;
    const tb_transfer_opts *o = &t->opts;
    int timeout_ms = tb__remote_timeout(b->world, o->timeout_ms);
    int64_t deadline_ms = tb__now_ms() + timeout_ms;
    tb__link_reply *reply;
    TB_TRY(check_begin(b, t->is_send, o));
    TB_TRY(tb__remote_register_locked(b, timeout_ms));
    TB_TRY(check_begin(b, t->is_send, o));
    b->transfers[t->is_send] = t;
    TB_TRY(prepare_memory(b, t->is_send, o, deadline_ms));
    if (o->progress || o->committing)
        TB_TRY(tb__remote_start_thread(b->world));
    t->deadline_ms = deadline_ms + GRACE_MS;
    int left_ms = tb__ms_until(deadline_ms);
    tb__message m = {.kind = TB__TRANSFER,
                     .batch_id = b->name,
                     .direction = t->is_send ? TB__SEND : TB__RECV,
                     .timeout_ms = (uint64_t)(left_ms > 0 ? left_ms : 1),
                     .no_wait = true,
                     .events = true,
                     .progress = o->progress,
                     .hold = o->hold || (o->committing && !t->is_send && b->opts.commit == TB_SHADOW),
                     .skip_lost = o->skip_lost,
                     .whole_group = o->whole_group,
                     .group_name = o->group};
    TB_TRY(tb__link_post(b->world->link, &m, NULL, 0, t->deadline_ms, &t->seq));
    tb_status status = tb__link_await_reply(b->world->link, t->seq, t->deadline_ms, "begun the transfer", &reply);
    if (!reply)
        give_up_begun(t);
    tb__link_reply_free(reply);
    return status;
}

static void free_transfer(remote_transfer *t) {
    tb__arena_fini(&t->arena);
    free(t->parts.item);
    if (!tb__remote_is_inherited(t->batch->world))
        tb__fd_close(t->fd);
    free(t);
}

tb_status tb__remote_begin(tb_batch *batch, bool is_send, const tb_transfer_opts *opts, tb_transfer **out) {
    remote_batch *b = (remote_batch *)batch;
    remote_world *w = b->world;
    remote_transfer *t = tb__calloc(1, sizeof *t);
    if (!t)
        return TB_NO_MEMORY;
    *t = (remote_transfer){.base = b->base, .batch = b, .is_send = is_send, .opts = *opts, .seq = UINT64_MAX, .fd = -1};
    tb__link_lock(w->link);
    LIST_INSERT_HEAD(&w->transfers, t, link);
    tb_status status = begin_transfer(t);
    if (status == TB_OK) {
        b->refs++;
    } else {
        tb__saved_detail why = tb__save_detail();
        LIST_REMOVE(t, link);
        if (b->transfers[is_send] == t)
            b->transfers[is_send] = NULL;
        (void)tb__fail(status, "%s", why.text);
    }
    tb__link_unlock(w->link);
    if (status != TB_OK) {
        free_transfer(t);
        return status;
    }
    *out = (tb_transfer *)t;
    return TB_OK;
}

typedef struct waiting {
    const remote_transfer *t;
    unsigned event;
} waiting;

static bool has_event(void *arg) {
    const waiting *w = arg;
    return w->t->events & w->event || w->t->has_ended;
}

/* With a window, groups of tensors arrive when earlier ones are taken: waiting for the whole transfer takes all. */
static void take_groups(remote_transfer *t) {
    tb__message m = {.kind = TB__AWAIT_TENSORS, .batch_id = t->batch->name};
    uint64_t seq;
    if (t->is_send || t->batch->opts.group_window == 0 || t->has_ended || t->ngroups == UINT64_MAX)
        return;
    t->ngroups = UINT64_MAX;
    if (tb__link_post(t->batch->world->link, &m, NULL, 0, t->deadline_ms, &seq) == TB_OK)
        tb__link_drop_reply(t->batch->world->link, seq);
}

static tb_status fail_late(remote_transfer *t, int timeout_ms, const char *what) {
    if (timeout_ms < 0)
        return tb__fail(TB_TIMEOUT, "batch '%s' has not %s by the transfer's deadline: the agent at %s is silent",
                        t->batch->name, what, t->batch->world->link->path);
    return tb__fail(TB_TIMEOUT, "batch '%s' has not %s after %d ms", t->batch->name, what, timeout_ms);
}

static tb_status wait_for_event(remote_transfer *t, unsigned event, int timeout_ms, const char *what) {
    remote_world *w = t->batch->world;
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms : tb__now_ms() + timeout_ms;
    waiting wanted = {t, event};
    tb_status status = tb__link_wait(w->link, has_event, &wanted, deadline_ms, what);
    tb__remote_clear_news(t);
    if (w->link->is_over)
        tb__remote_note_loss(w);
    if (t->events & event)
        return tb__remote_deliver(t);
    if (t->has_ended) {
        (void)tb__remote_deliver(t);
        return t->status == TB_OK ? TB_OK : tb__fail(t->status, "%s", t->why);
    }
    return status == TB_TIMEOUT ? fail_late(t, timeout_ms, what) : status;
}

tb_status tb__remote_wait(tb_transfer *transfer, tb_event event, int timeout_ms) {
    remote_transfer *t = (remote_transfer *)transfer;
    const char *what;
    TB_TRY(tb__event_check(event, t->is_send, t->opts.hold, &what));
    take_groups(t);
    return wait_for_event(t, (unsigned)event, timeout_ms, what);
}

/* The event has happened when this returns, so work submitted to a stream later comes after it. */
tb_status tb__remote_stream_wait(tb_transfer *transfer, tb_event event, const void *stream) {
    (void)stream;
    return tb_wait(transfer, event, -1);
}

/* Tensors that the agent has written are here; tensors that are copied here are copied now. */
static tb_status deliver_groups(remote_transfer *t, uint32_t group) {
    remote_batch *b = t->batch;
    tb_status status = TB_OK;
    if (b->copies.count == 0 || b->opts.commit == TB_SHADOW || b->invalidated)
        return TB_OK;
    tb__link_unlock(b->world->link);
    pthread_mutex_lock(&b->world->device_lock);
    status = tb__remote_copy_back(b, NULL, 0, (uint64_t)group + 1, tb__now_ms() + b->world->timeout_ms);
    pthread_mutex_unlock(&b->world->device_lock);
    tb__link_lock(b->world->link);
    return status;
}

tb_status tb__remote_wait_group(tb_transfer *transfer, uint32_t group, int timeout_ms) {
    remote_transfer *t = (remote_transfer *)transfer;
    if (t->is_send)
        return tb__fail(TB_INVALID, "groups arrive where they are received");
    remote_world *w = t->batch->world;
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms : tb__now_ms() + timeout_ms;
    tb__message m = {.kind = TB__AWAIT_TENSORS, .batch_id = t->batch->name, .group = tb__some_uint(group)};
    tb_status status = TB_OK;
    if (!t->has_ended) {
        int left_ms = tb__ms_until(deadline_ms);
        status = tb__link_call(w->link, &m, NULL, 0, left_ms > 0 ? left_ms : 1, "received the group", NULL);
        if (status == TB_OK)
            return deliver_groups(t, group);
        if (status == TB_TIMEOUT && !t->has_ended)
            return status;
        if (status == TB_INVALID) /* it has ended; the last Event has the result */
            return wait_for_event(t, TB_COMMITTED, -1, "all of the group");
    }
    if (w->link->is_over)
        tb__remote_note_loss(w);
    if (!t->has_ended)
        return status;
    (void)tb__remote_deliver(t);
    return t->status == TB_OK ? TB_OK : tb__fail(t->status, "%s", t->why);
}

tb_status tb__remote_proceed(tb_transfer *transfer) {
    remote_transfer *t = (remote_transfer *)transfer;
    tb__link *l = t->batch->world->link;
    tb__message m = {.kind = TB__PROCEED, .batch_id = t->batch->name};
    tb_status status = TB_OK;
    if (!t->opts.hold)
        return tb__fail(TB_INVALID, "the transfer was not begun with hold");
    t->may_proceed = true;
    if (t->opts.committing) /* the reading thread calls it, and lets the agent go on */
        tb__link_wake(l);
    else if (!t->has_ended)
        status = tb__link_call(l, &m, NULL, 0, 0, "let the transfer proceed", NULL);
    if (status == TB_REFUSED) /* it has ended meanwhile */
        status = TB_OK;
    return status;
}

/* The tensors are in use until the agent has reported the end, or has ended itself. */
static void cancel_and_wait(remote_transfer *t) {
    remote_world *w = t->batch->world;
    tb__message m = {.kind = TB__CANCEL, .batch_id = t->batch->name, .direction = t->is_send ? TB__SEND : TB__RECV};
    waiting none = {t, 0};
    uint64_t seq;
    if (t->has_ended)
        return;
    if (tb__link_post(w->link, &m, NULL, 0, INT64_MAX, &seq) == TB_OK)
        tb__link_drop_reply(w->link, seq);
    if (tb__link_wait(w->link, has_event, &none, INT64_MAX, "ended the transfer") != TB_OK) {
        tb__link_await_end(w->link);
        tb__remote_note_loss(w);
    }
}

void tb__remote_cancel(tb_transfer *transfer) {
    cancel_and_wait((remote_transfer *)transfer);
}

void tb__remote_transfer_destroy(tb_transfer *transfer) {
    remote_transfer *t = (remote_transfer *)transfer;
    remote_batch *b = t->batch;
    remote_world *w = b->world;
    if (!tb__remote_is_inherited(w)) {
        tb__link_lock(w->link);
        cancel_and_wait(t);
        while (t->ncalls > 0)
            tb__link_sleep(w->link);
        (void)tb__remote_deliver(t); /* if it has succeeded and was not waited for */
        LIST_REMOVE(t, link);
        b->transfers[t->is_send] = NULL;
        tb__link_unlock(w->link);
        free_transfer(t);
    } else if (!tb__remote_is_half_changed(w)) {
        LIST_REMOVE(t, link);
        free_transfer(t);
    }
    tb__remote_batch_unref(b);
}
