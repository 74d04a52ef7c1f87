/* Transfers: begins, steps and ends the legs of a batch's flows together. */
#include "bus/transfer_inside.h"

#include "base/descriptors.h"

#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

static void signal_waiters(tb_transfer *t) {
    t->has_news = true;
    if (t->event >= 0)
        eventfd_write(t->event, 1);
    tb__loop_signal(t->batch->world->loop);
}

static void call_progress(tb_transfer *t) {
    tb_transfer_state state = {.size = sizeof state};
    if (!t->opts.progress)
        return;
    tb__transfer_get_state(t, &state);
    if (state.bytes_done == t->told && !t->has_ended)
        return;
    t->told = state.bytes_done;
    t->opts.progress(t->opts.arg, &state);
}

/* All ranks must count sends alike, also one that has begun fewer than its peers. */
static void update_send_count(tb_transfer *t) {
    uint64_t *count = &t->batch->nsends;
    for (size_t i = 0; i < t->nparts && t->is_send; i++) {
        if (t->parts[i].flow && tb__transfer_leg(t, i)->number > *count)
            *count = tb__transfer_leg(t, i)->number;
    }
}

static void finish_transfer(tb_transfer *t) {
    update_send_count(t);
    tb__phases_enter(&t->phases, TB_PHASE_WAIT);
    t->has_ended = true;
    t->ended = tb__seconds();
    t->batch->ended = tb__unix_seconds();
    t->task.deadline_ms = INT64_MAX;
    tb__batch_update_version(t->batch);
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].engine)
            tb__engine_end(t->parts[i].engine);
    }
    for (size_t i = 0; i < t->nparts; i++)
        tb__exchange_report_loss(t->parts[i].exchange);
}

/* Aborts all legs at the deadline, each with the name of what it waited for. A prepared receive ends when it is
 * decided, and is not held any longer. */
static void abort_at_deadline(tb_transfer *t) {
    t->is_late = true;
    for (size_t i = 0; i < t->nparts; i++) {
        char waits[TB__WHY_MAX];
        if (!t->parts[i].flow || !tb__transfer_leg(t, i)->is_under_way)
            continue;
        if (t->parts[i].engine)
            t->parts[i].engine->commit.may_proceed = t->parts[i].engine->commit.is_late = true;
        tb__flow_describe_wait(t->parts[i].flow, t->is_send, waits, sizeof waits);
        (void)tb__fail(TB_TIMEOUT, "%s of batch '%s' has not ended after %.1f s: %s%s",
                       t->is_send ? "the sending" : "the receiving", t->batch->name, tb__seconds() - t->begun, waits,
                       tb__shortage_text());
        tb__flow_abort(t->parts[i].flow, t->is_send, TB_TIMEOUT, tb_error_detail());
    }
}

/* The events that all pairs have reached. A failed pair neither reads nor changes the tensors any more: so the others
 * alone count for RELEASED and DECIDED. */
static unsigned events_of(const tb_transfer *t) {
    unsigned events = TB_RELEASED | TB_ARRIVED | TB_COMMITTED | TB_DECIDED, others = TB_RELEASED | TB_DECIDED;
    bool has_good = false;
    for (size_t i = 0; i < t->nparts; i++) {
        const tb__leg *leg = tb__transfer_leg(t, i);
        if (!leg)
            continue;
        events &= tb__part_events(t, &t->parts[i]);
        if (leg->status == TB_OK || leg->is_under_way)
            others &= tb__part_events(t, &t->parts[i]);
        has_good |= leg->status == TB_OK;
    }
    return events | (has_good ? others : 0U);
}

static void tell_groups(tb_transfer *t, uint64_t number, tb_status status, const char *why) {
    for (size_t i = 0; i < t->nparts && !t->has_told; i++) { /* several pairs of one group do no harm */
        if (t->parts[i].flow && t->parts[i].group)
            tb__whole_tell(t->parts[i].group, t->is_send, number, status, why);
    }
    t->has_told = true;
}

/* With whole_group, when this rank's part has ended: informs the groups' leads, and waits until all ranks have ended
 * theirs. Returns whether waiting is over; then t->status and t->why are the result. */
static bool is_whole(tb_transfer *t) {
    tb_transfer_state state;
    bool is_over = true, is_cancelled = false;
    if (!t->opts.whole_group)
        return true;
    tb__transfer_get_state(t, &state);
    for (size_t i = 0; i < t->nparts; i++)
        is_cancelled |= t->parts[i].flow && tb__transfer_leg(t, i)->is_cancelled;
    if (t->status == TB_OK && t->is_undelivered && !is_cancelled)
        return false;
    if (t->status != TB_OK || !t->is_undelivered)
        tell_groups(t, state.attempt, t->status, t->why);
    for (size_t i = 0; i < t->nparts && t->status == TB_OK; i++) {
        tb__engine *group = t->parts[i].flow ? t->parts[i].group : NULL;
        tb_status status = TB_OK;
        if (!group)
            continue;
        is_over &= tb__whole_is_over(group, t->is_send, state.attempt, is_cancelled, t->is_late, &status);
        if (status != TB_OK) {
            t->status = status;
            snprintf(t->why, sizeof t->why, "%s", tb_error_detail());
        }
    }
    return is_over || t->status != TB_OK;
}

void tb__batch_deliver_later(tb_batch *batch, bool is_later) {
    tb__loop_lock(batch->world->loop);
    batch->is_delivered_later = is_later;
    tb__loop_unlock(batch->world->loop);
}

void tb__transfer_delivered(tb_transfer *t, tb_status status, const char *why) {
    tb__loop *loop = t->batch->world->loop;
    tb_transfer_state state;
    tb__loop_lock(loop);
    tb__transfer_get_state(t, &state);
    if (!t->has_ended && t->is_undelivered)
        tell_groups(t, state.attempt, status, why);
    t->is_undelivered = false;
    tb__loop_wake(loop);
    tb__loop_unlock(loop);
}

static void update_events(tb_transfer *t) {
    size_t nopen = 0, nended = 0;
    for (size_t i = 0; i < t->nparts; i++) {
        const tb__leg *leg = tb__transfer_leg(t, i);
        if (!leg)
            continue;
        nopen += !tb__leg_has_ended(leg);
        nended += tb__leg_has_ended(leg);
        if (leg->status != TB_OK && !t->failed)
            t->failed = leg;
    }
    bool is_over = false;
    if (nopen == 0) {
        t->status = t->failed ? t->failed->status : TB_OK;
        snprintf(t->why, sizeof t->why, "%s", t->failed ? t->failed->why : "");
        is_over = is_whole(t);
    }
    unsigned events = events_of(t);
    if (t->opts.whole_group && (!is_over || t->status != TB_OK))
        events &= ~(unsigned)TB_COMMITTED;
    bool has_news = events != t->events || nended != t->nended || is_over;
    t->events = events;
    tb__transfer_open_gates(t);
    t->nended = nended;
    if (is_over)
        finish_transfer(t);
    if (has_news)
        signal_waiters(t);
}

/* The time of the next step, if no event comes before. */
static int64_t next_deadline_ms(const tb_transfer *t) {
    int64_t when_ms = t->is_late ? INT64_MAX : t->deadline_ms;
    for (size_t i = 0; i < t->nparts; i++) {
        const tb__leg *leg = tb__transfer_leg(t, i);
        const tb__commit *commit = t->parts[i].flow && t->parts[i].engine ? &t->parts[i].engine->commit : NULL;
        if (leg && !tb__leg_has_ended(leg) && leg->wake_ms && leg->wake_ms < when_ms)
            when_ms = leg->wake_ms;
        if (commit && commit->wake_ms && commit->wake_ms < when_ms)
            when_ms = commit->wake_ms;
    }
    return when_ms;
}

static bool step_transfer(tb__task *task) {
    tb_transfer *t = (tb_transfer *)((char *)task - offsetof(tb_transfer, task));
    if (t->has_ended)
        return false;
    uint32_t groups_done = 0;
    size_t nended = t->nended;
    bool did = false;
    for (size_t i = 0; i < t->nparts; i++) {
        const tb__leg *leg = tb__transfer_leg(t, i);
        if (!leg)
            continue;
        did |= tb__flow_step(t->parts[i].flow, t->is_send);
        groups_done += leg->groups_done;
    }
    for (size_t i = 0; i < t->nparts; i++) /* repeated for each pair of an engine, which does no harm */
        did |= t->parts[i].flow && t->parts[i].engine && tb__engine_step(t->parts[i].engine);
    update_events(t); /* always: a leg may have been ended by a message, or by a loss */
    if (!t->has_ended && !t->is_late && tb__now_ms() >= t->deadline_ms) {
        abort_at_deadline(t);
        update_events(t);
        did = true;
    }
    did |= t->nended != nended;
    if (groups_done != t->groups_done)
        signal_waiters(t);
    t->groups_done = groups_done;
    if (did)
        call_progress(t);
    t->task.deadline_ms = t->has_ended ? INT64_MAX : next_deadline_ms(t);
    return did;
}

/* The side of the exchange for which this process acts. */
static tb_status choose_side(const tb__exchange *exchange, bool is_send, const char *group, int *out) {
    const tb__pair_side *sides = exchange->pair->sides;
    if (!exchange->sides[0].is_here || !exchange->sides[1].is_here) {
        *out = exchange->sides[1].is_here;
    } else if (group) {
        *out = strcmp(sides[1].group, group) == 0;
        if (strcmp(sides[*out].group, group) != 0)
            return tb__fail(TB_INVALID, "group '%.100s' is not in pair '%s'", group, exchange->pair->name);
    } else {
        const tb_world *world = exchange->world;
        int first = 0; /* the side whose group this process entered first */
        for (size_t i = world->memberships.count; i-- > 0;) {
            for (int side = 0; side < 2; side++) {
                if (strcmp(world->memberships.item[i].group, sides[side].group) == 0)
                    first = side;
            }
        }
        *out = is_send ? first : !first;
    }
    return TB_OK;
}

/* TB_LOST, or the exchange's failure, if it can't be used any more. A rank that has left after its part in this
 * transfer is not missed. */
static tb_status check_exchange_usable(const tb__exchange *exchange, const tb__flow *flow, bool is_send) {
    if (exchange->state == EXCHANGE_BROKEN)
        return tb__fail(exchange->handshake.status, "%s", exchange->handshake.why);
    bool may_begin = flow && tb__flow_may_begin(flow, is_send);
    if (flow && !may_begin)
        TB_TRY(tb__flow_check_loss(flow));
    for (size_t i = 0; i < exchange->handshake.npeers; i++) {
        if (exchange->handshake.ranks[i].is_gone && (exchange->handshake.peers[i]->is_lost || !may_begin))
            return tb__fail(TB_LOST, "%s has left %s of pair '%s'", exchange->handshake.peers[i]->label, exchange->what,
                            exchange->pair->name);
    }
    return TB_OK;
}

/* The reason is in tb_error_detail. */
static tb_status skip_part(tb__transfer_part *p, tb_status status) {
    p->status = status;
    p->why = tb__strdup(tb_error_detail());
    return p->why ? TB_OK : TB_NO_MEMORY;
}

static tb_status begin_part(tb_transfer *t, tb__exchange *exchange) {
    tb__transfer_part *p = &t->parts[t->nparts++];
    int side;
    *p = (tb__transfer_part){.exchange = exchange};
    TB_TRY(choose_side(exchange, t->is_send, t->opts.group, &side));
    int src = t->is_send ? side : !side;
    if (exchange->lost_ties[src])
        return tb__fail(TB_CONFLICT, "%s", exchange->lost_ties[src]);
    tb__flow *flow = exchange->flows[src];
    bool may_begin = flow && tb__flow_may_begin(flow, t->is_send);
    tb_status status = TB_OK;
    if (t->opts.skip_lost)
        status = check_exchange_usable(exchange, flow, t->is_send);
    else if (exchange->state == EXCHANGE_BROKEN && !may_begin)
        status = tb__fail(exchange->handshake.status, "%s", exchange->handshake.why);
    else if (flow && !may_begin)
        status = tb__flow_check_loss(flow);
    if (status == TB_OK && tb__batch_is_in_doubt(t->batch))
        status =
            tb__fail(TB_IN_DOUBT, "whether the last receive of batch '%s' is committed is not known", t->batch->name);
    if (status != TB_OK)
        return t->opts.skip_lost ? skip_part(p, status) : status;
    p->flow = flow;
    p->engine = t->is_send ? NULL : exchange->receives[src].engine;
    p->group = exchange->receives[!side].engine;
    return t->is_send ? TB_OK : tb__exchange_check_padding(exchange, !side);
}

/* The group that receives through this part. */
static const char *engine_name(const tb_transfer *t, const tb__transfer_part *p) {
    int side = 0;
    (void)choose_side(p->exchange, t->is_send, t->opts.group, &side); /* has succeeded */
    return p->exchange->pair->sides[t->is_send ? !side : side].group;
}

/* An engine receives through all of its pairs, or through none. */
static tb_status skip_engines(tb_transfer *t) {
    for (size_t i = 0; i < t->nparts; i++) {
        for (size_t j = 0; !t->parts[i].flow && j < t->nparts; j++) {
            tb__transfer_part *other = &t->parts[j];
            if (!other->flow || strcmp(engine_name(t, other), engine_name(t, &t->parts[i])) != 0)
                continue;
            other->flow = NULL;
            tb__set_detail("%s", t->parts[i].why);
            TB_TRY(skip_part(other, t->parts[i].status));
        }
    }
    return TB_OK;
}

/* A shadow is applied when its own flow does not read the tensors any more; other flows may still read them. */
static tb_status check_clashes(const tb_transfer *sends, const tb_transfer *receives) {
    for (size_t i = 0; sends && receives && i < receives->nparts; i++) {
        const tb__transfer_part *r = &receives->parts[i];
        for (size_t j = 0; r->flow && j < sends->nparts; j++) {
            const tb__transfer_part *s = &sends->parts[j];
            if (s->flow && s->flow != r->flow)
                TB_TRY(tb__exchange_check_clash(r->exchange, r->flow, s->exchange, s->flow));
        }
    }
    return TB_OK;
}

static tb_status begin_parts(tb_batch *batch, bool is_send, tb__stream_point *point, tb_transfer *t) {
    tb_transfer **slot = is_send ? &batch->sending : &batch->receiving;
    size_t nflows = 0;
    if (*slot)
        return tb__fail(TB_REFUSED, "batch '%s' is already being %s; destroy that transfer first", batch->name,
                        is_send ? "sent" : "received");
    for (size_t i = 0; i < batch->exchanges.count; i++)
        TB_TRY(begin_part(t, batch->exchanges.item[i]));
    TB_TRY(skip_engines(t));
    for (size_t i = 0; i < t->nparts; i++)
        nflows += t->parts[i].flow != NULL;
    if (nflows == 0)
        return tb__fail(t->parts[0].status, "%s", t->parts[0].why);
    TB_TRY(check_clashes(is_send ? t : batch->sending, is_send ? batch->receiving : t));
    batch->nsends += is_send;
    for (size_t i = 0; i < t->nparts; i++) {
        if (!t->parts[i].flow)
            continue;
        tb__flow_set_stream_point(t->parts[i].flow, is_send, point);
        tb__flow_begin(t->parts[i].flow, is_send, batch->nsends, &t->phases);
    }
    for (size_t i = 0; i < t->nparts; i++) {
        tb__engine *engine = t->parts[i].flow ? t->parts[i].engine : NULL;
        if (engine && !engine->is_receiving)
            tb__engine_begin(engine, &t->opts);
    }
    *slot = t;
    tb__loop_add_task(batch->world->loop, &t->task);
    return TB_OK;
}

/* Asks for unknown outcomes of earlier receives. A version that was committed is written after the point, too. */
static tb_status resolve_doubts(tb_batch *batch, const tb_transfer_opts *opts, tb__stream_point *point,
                                int64_t deadline_ms) {
    tb_status status = TB_OK;
    for (size_t i = 0; i < batch->engines.count && (status == TB_OK || opts->skip_lost); i++) {
        tb__engine *engine = batch->engines.item[i];
        const tb__engine_part *part;
        for (size_t j = 0;
             point && tb__commit_is_in_doubt(&engine->commit) && (part = tb__engine_next_part(engine, &j));) {
            if (part->is_in)
                tb__flow_set_stream_point(tb__engine_flow(part), false, point);
        }
        status = tb__commit_resolve(&engine->commit, deadline_ms, opts);
    }
    return opts->skip_lost ? TB_OK : status;
}

static void free_transfer(tb_transfer *t) {
    for (size_t i = 0; i < t->nparts; i++)
        free(t->parts[i].why);
    free(t->gates.item);
    free(t);
}

tb_status tb__local_begin(tb_batch *batch, bool is_send, const tb_transfer_opts *opts, tb_transfer **out) {
    tb_transfer_opts o = *opts;
    if (!is_send) /* a manual world may not have handled the end of an earlier transfer, which must not end this one */
        tb__loop_progress(batch->world->loop);
    if (o.hold && (is_send || batch->opts.commit != TB_SHADOW))
        return tb__fail(TB_INVALID, "hold is for receiving with TB_SHADOW");
    int64_t deadline_ms = tb__world_deadline(batch->world, o.timeout_ms);
    TB_TRY(tb_batch_register(batch, o.timeout_ms));
    tb__stream_point *point = NULL;
    tb_status status = o.stream ? tb__batch_record_stream(batch, o.stream, &point) : TB_OK;
    tb__loop_lock(batch->world->loop);
    batch->nstarting++; /* while the lock is free, pairs must not go */
    if (status == TB_OK)
        status = resolve_doubts(batch, &o, point, deadline_ms);
    tb__batch_update_version(batch);
    batch->nstarting--;
    tb_transfer *t = status == TB_OK ? tb__calloc(1, sizeof *t + batch->exchanges.count * sizeof *t->parts) : NULL;
    if (t) {
        t->base = batch->base;
        t->batch = batch;
        t->is_send = is_send;
        t->opts = o;
        t->is_undelivered = batch->is_delivered_later && o.whole_group && !is_send;
        t->begun = t->phases.since = tb__seconds();
        t->phases.now = TB_PHASE_WAIT;
        t->deadline_ms = t->task.deadline_ms = deadline_ms;
        t->task.step = step_transfer;
        t->event = -1;
        status = begin_parts(batch, is_send, point, t);
    }
    tb__stream_point_put(point);
    tb__loop_unlock(batch->world->loop);
    if (status != TB_OK || !t) {
        if (t)
            free_transfer(t);
        return status == TB_OK ? TB_NO_MEMORY : status;
    }
    atomic_fetch_add(&batch->refs, 1);
    *out = t;
    return TB_OK;
}

tb_status tb__local_proceed(tb_transfer *t) {
    if (!t->opts.hold)
        return tb__fail(TB_INVALID, "the transfer was not begun with hold");
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].engine)
            t->parts[i].engine->commit.may_proceed = true;
    }
    tb__loop_wake(t->batch->world->loop);
    return TB_OK;
}

static bool has_ended(void *arg) {
    return ((const tb_transfer *)arg)->has_ended;
}

/* A step may be running in the loop's thread, so the next step ends the legs. */
static void mark_cancelled(tb_transfer *t) {
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].flow)
            tb__leg_cancel(tb__transfer_leg(t, i));
    }
    tb__loop_wake(t->batch->world->loop);
}

static void cancel_and_wait(tb_transfer *t) {
    mark_cancelled(t);
    tb__loop_wait(t->batch->world->loop, has_ended, t, INT64_MAX);
}

void tb__transfer_begin_cancel(tb_transfer *t) {
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    if (!t->has_ended)
        mark_cancelled(t);
    tb__loop_unlock(loop);
}

void tb__local_cancel(tb_transfer *t) {
    if (!t->has_ended)
        cancel_and_wait(t);
}

void tb__local_transfer_destroy(tb_transfer *t) {
    tb_batch *batch = t->batch;
    if (!tb__world_is_inherited(batch->world)) {
        tb__loop *loop = batch->world->loop;
        tb__loop_lock(loop);
        if (!t->has_ended)
            cancel_and_wait(t);
        tb__loop_remove_task(loop, &t->task);
        if (t->is_send)
            batch->sending = NULL;
        else
            batch->receiving = NULL;
        tb__loop_unlock(loop);
        tb__fd_close(t->event);
    }
    free_transfer(t);
    tb__batch_unref(batch);
}
