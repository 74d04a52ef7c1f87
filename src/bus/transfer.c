/* Transfers: the legs of a batch's flows, stepped together, and what is told of them. */
#include "bus/accord.h"

#include "base/opts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* What the engine adds to a deadline before a wait without one of its own stops believing in it. */
enum { GRACE_MS = 2000 };

struct tb_transfer {
    tb__task task; /* first: the engine finds the transfer through it */
    tb_batch *batch;
    bool is_send;
    bool has_ended;
    tb_status status;
    char why[TB__WHY_MAX];
    unsigned events;
    int64_t deadline_ms;
    double begun, ended;
    tb__phases phases;
    int event; /* a descriptor, readable when there is news */
    tb_transfer_opts opts;
    int64_t told; /* bytes, to the callback */
    size_t nflows;
    tb__flow *flows[];
};

const char *tb_phase_name(tb_phase phase) {
    static const char *const names[] = {"plan", "wait", "pack", "wire", "unpack", "commit"};
    return (unsigned)phase < TB_PHASE_COUNT ? names[phase] : NULL;
}

/* ---- What is told ---------------------------------------------------------------------------------------------- */

static tb__leg *leg_of(const tb_transfer *t, size_t i) {
    return tb__flow_leg(t->flows[i], t->is_send);
}

static void get_state(const tb_transfer *t, tb_transfer_state *out) {
    *out = (tb_transfer_state){.status = t->status, .events = t->events, .attempt = UINT64_MAX};
    double now = t->has_ended ? t->ended : tb__seconds();
    for (size_t i = 0; i < t->nflows; i++) {
        const tb__leg *leg = leg_of(t, i);
        out->attempt = leg->attempt < out->attempt ? leg->attempt : out->attempt;
        out->bytes_done += leg->bytes_done;
        out->bytes_total += leg->bytes_total;
        out->groups_done += leg->groups_done;
        out->groups_total += leg->groups_total;
    }
    out->seconds = now - t->begun;
    memcpy(out->phase, t->phases.seconds, sizeof out->phase);
    if (!t->has_ended)
        out->phase[t->phases.now] += now - t->phases.since;
}

static void clear_news(const tb_transfer *t) {
    eventfd_t unused;
    eventfd_read(t->event, &unused);
}

static void tell(tb_transfer *t) {
    eventfd_write(t->event, 1);
    tb__engine_signal(t->batch->world->engine);
}

static void call_back(tb_transfer *t) {
    tb_transfer_state state;
    if (!t->opts.progress)
        return;
    get_state(t, &state);
    if (state.bytes_done == t->told && !t->has_ended)
        return;
    t->told = state.bytes_done;
    t->opts.progress(t->opts.arg, &state);
}

/* ---- Steps ----------------------------------------------------------------------------------------------------- */

static void finish(tb_transfer *t) {
    tb__phases_enter(&t->phases, TB_PHASE_WAIT);
    t->has_ended = true;
    t->ended = tb__seconds();
    t->task.deadline_ms = INT64_MAX;
}

/* The sentence is in tb_error_detail. */
static void fail(tb_transfer *t, tb_status status) {
    t->status = status;
    snprintf(t->why, sizeof t->why, "%s", tb_error_detail());
    for (size_t i = 0; i < t->nflows; i++)
        tb__flow_abort(t->flows[i], t->is_send, tb__fail(status, "%s", t->why));
    finish(t);
    tell(t);
}

static void describe_wait(const tb_transfer *t, char *out, size_t room) {
    snprintf(out, room, "nothing is missing");
    for (size_t i = 0; i < t->nflows; i++) {
        if (leg_of(t, i)->is_under_way) {
            tb__flow_describe_wait(t->flows[i], t->is_send, out, room);
            return;
        }
    }
}

static unsigned events_of(const tb_transfer *t) {
    bool is_released = t->is_send, is_arrived = !t->is_send, is_committed = true;
    for (size_t i = 0; i < t->nflows; i++) {
        const tb__leg *leg = leg_of(t, i);
        is_released &= leg->is_released;
        is_arrived &= leg->is_arrived;
        is_committed &= leg->is_committed;
    }
    return (is_released ? TB_RELEASED : 0U) | (is_arrived ? TB_ARRIVED : 0U) | (is_committed ? TB_COMMITTED : 0U);
}

static void look_at_legs(tb_transfer *t) {
    bool is_under_way = false;
    for (size_t i = 0; i < t->nflows; i++) {
        const tb__leg *leg = leg_of(t, i);
        is_under_way |= leg->is_under_way;
        if (leg->status != TB_OK) {
            fail(t, tb__fail(leg->status, "%s", leg->why));
            return;
        }
    }
    unsigned events = events_of(t);
    if (!is_under_way)
        finish(t);
    if (events != t->events || !is_under_way) {
        t->events = events;
        tell(t);
    }
}

/* When it has to be looked at, whatever happens. */
static int64_t next_look(const tb_transfer *t) {
    int64_t when_ms = t->deadline_ms;
    for (size_t i = 0; i < t->nflows; i++) {
        const tb__leg *leg = leg_of(t, i);
        if (leg->is_under_way && leg->wake_ms && leg->wake_ms < when_ms)
            when_ms = leg->wake_ms;
    }
    return when_ms;
}

static bool step(tb__task *task) {
    tb_transfer *t = (tb_transfer *)task;
    if (t->has_ended)
        return false;
    uint32_t groups = 0, groups_after = 0;
    bool did = false;
    for (size_t i = 0; i < t->nflows; i++) {
        groups += leg_of(t, i)->groups_done;
        did |= tb__flow_step(t->flows[i], t->is_send);
        did |= leg_of(t, i)->status != TB_OK; /* also one that a message has ended */
        groups_after += leg_of(t, i)->groups_done;
    }
    look_at_legs(t); /* always: a leg may have been ended by a message, or by a loss */
    did |= t->has_ended;
    if (groups_after != groups)
        tell(t);
    if (!t->has_ended && tb__now_ms() >= t->deadline_ms) {
        char waits[TB__WHY_MAX];
        describe_wait(t, waits, sizeof waits);
        fail(t,
             tb__fail(TB_TIMEOUT, "%s of batch '%s' has not ended after %.1f s: %s",
                      t->is_send ? "the sending" : "the receiving", t->batch->name, tb__seconds() - t->begun, waits));
        did = true;
    }
    if (did)
        call_back(t);
    t->task.deadline_ms = t->has_ended ? INT64_MAX : next_look(t);
    return did;
}

/* ---- Begin ----------------------------------------------------------------------------------------------------- */

/* On which side of the accord this process acts. */
static tb_status choose_side(const tb__accord *accord, bool is_send, const char *group, int *out) {
    const tb__pair_side *sides = accord->pair->sides;
    if (!accord->sides[0].is_here || !accord->sides[1].is_here) {
        *out = accord->sides[1].is_here;
    } else if (group) {
        *out = strcmp(sides[1].group, group) == 0;
        if (strcmp(sides[*out].group, group) != 0)
            return tb__fail(TB_INVALID, "group '%.100s' is not in pair '%s'", group, accord->pair->name);
    } else {
        const tb_world *world = accord->world;
        int first = 0; /* the side whose group this process entered first */
        for (size_t i = world->seats.count; i-- > 0;) {
            for (int side = 0; side < 2; side++) {
                if (strcmp(world->seats.item[i].group, sides[side].group) == 0)
                    first = side;
            }
        }
        *out = is_send ? first : !first;
    }
    return TB_OK;
}

static tb_status begin(tb_batch *batch, bool is_send, tb_transfer *t) {
    tb_transfer **slot = is_send ? &batch->sending : &batch->receiving;
    if (*slot)
        return tb__fail(TB_REFUSED, "batch '%s' is already being %s; destroy that transfer first", batch->name,
                        is_send ? "sent" : "received");
    for (size_t i = 0; i < batch->accords.count; i++) {
        const tb__accord *accord = batch->accords.item[i];
        int side;
        if (accord->state == ACCORD_BROKEN)
            return tb__fail(accord->all.status, "%s", accord->all.why);
        TB_TRY(choose_side(accord, is_send, t->opts.group, &side));
        t->flows[t->nflows++] = accord->flows[is_send ? side : !side];
        if (!is_send)
            TB_TRY(tb__accord_clear_padding(accord, !side));
    }
    for (size_t i = 0; i < t->nflows; i++)
        tb__flow_begin(t->flows[i], is_send, &t->phases);
    *slot = t;
    tb__engine_add_task(batch->world->engine, &t->task);
    return TB_OK;
}

static tb_status start(tb_batch *batch, bool is_send, const tb_transfer_opts *opts, tb_transfer **out) {
    tb_transfer_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    int64_t deadline_ms = tb__world_deadline(batch->world, o.timeout_ms);
    TB_TRY(tb_batch_register(batch, o.timeout_ms));
    tb_transfer *t = tb__calloc(1, sizeof *t + batch->accords.count * sizeof *t->flows);
    if (!t)
        return TB_NO_MEMORY;
    t->batch = batch;
    t->is_send = is_send;
    t->opts = o;
    t->begun = t->phases.since = tb__seconds();
    t->phases.now = TB_PHASE_WAIT;
    t->deadline_ms = t->task.deadline_ms = deadline_ms;
    t->task.step = step;
    t->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    tb_status status = t->event >= 0 ? TB_OK : tb__fail(TB_IO, "eventfd: %s", strerror(errno));
    if (status == TB_OK) {
        tb__engine_lock(batch->world->engine);
        status = begin(batch, is_send, t);
        tb__engine_unlock(batch->world->engine);
    }
    if (status != TB_OK) {
        if (t->event >= 0)
            close(t->event);
        free(t);
        return status;
    }
    atomic_fetch_add(&batch->refs, 1);
    *out = t;
    return TB_OK;
}

tb_status tb_send(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out) {
    return start(batch, true, opts, out);
}

tb_status tb_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out) {
    return start(batch, false, opts, out);
}

/* ---- Wait ------------------------------------------------------------------------------------------------------ */

typedef struct waiting {
    tb_transfer *t;
    unsigned event;
    uint32_t group;
} waiting;

static bool has_event(void *arg) {
    const waiting *w = arg;
    return (w->t->events & w->event) || w->t->has_ended;
}

static bool has_group(void *arg) {
    const waiting *w = arg;
    bool has_all = true;
    for (size_t i = 0; i < w->t->nflows; i++)
        has_all &= tb__flow_has_group(w->t->flows[i], w->group);
    return has_all || w->t->has_ended;
}

/* With the lock held; what came about, or why it did not. */
static tb_status wait(tb_transfer *t, bool (*is_true)(void *arg), waiting *w, int timeout_ms, const char *what) {
    tb__engine *engine = t->batch->world->engine;
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms + GRACE_MS : tb__now_ms() + timeout_ms;
    bool is_over = tb__engine_wait(engine, is_true, w, deadline_ms);
    clear_news(t);
    if (t->status != TB_OK && !(t->events & w->event))
        return tb__fail(t->status, "%s", t->why);
    if (is_over)
        return TB_OK;
    char waits[TB__WHY_MAX];
    describe_wait(t, waits, sizeof waits);
    if (timeout_ms < 0)
        return tb__fail(TB_TIMEOUT, "batch '%s' has not %s by the transfer's deadline: %s", t->batch->name, what,
                        waits);
    return tb__fail(TB_TIMEOUT, "batch '%s' has not %s after %d ms: %s", t->batch->name, what, timeout_ms, waits);
}

tb_status tb_wait(tb_transfer *t, tb_event event, int timeout_ms) {
    static const struct {
        tb_event event;
        const char *what;
        bool of_send, of_recv;
    } events[] = {{TB_RELEASED, "been released", true, false},
                  {TB_ARRIVED, "arrived", false, true},
                  {TB_COMMITTED, "been committed", true, true}};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (events[i].event != event)
            continue;
        if (t->is_send ? !events[i].of_send : !events[i].of_recv)
            return tb__fail(TB_INVALID, "%s",
                            t->is_send ? "what is sent is released, and does not arrive here"
                                       : "what is received arrives, and is not released");
        tb__engine *engine = t->batch->world->engine;
        tb__engine_lock(engine);
        for (size_t j = 0; !t->is_send && j < t->nflows; j++)
            tb__flow_take_groups(t->flows[j], UINT32_MAX);
        tb_status status = wait(t, has_event, &(waiting){.t = t, .event = event}, timeout_ms, events[i].what);
        tb__engine_unlock(engine);
        return status;
    }
    return tb__fail(TB_INVALID, "%d is not an event", (int)event);
}

tb_status tb_wait_group(tb_transfer *t, uint32_t group, int timeout_ms) {
    if (t->is_send)
        return tb__fail(TB_INVALID, "groups arrive where they are received");
    if (group == UINT32_MAX)
        return tb__fail(TB_INVALID, "groups go up to %" PRIu32, UINT32_MAX - 1);
    tb__engine *engine = t->batch->world->engine;
    tb__engine_lock(engine);
    waiting w = {.t = t, .group = group};
    bool had = has_group(&w) && !t->has_ended;
    tb_status status = had ? TB_OK : wait(t, has_group, &w, timeout_ms, "all of the group");
    for (size_t i = 0; status == TB_OK && i < t->nflows; i++)
        tb__flow_take_groups(t->flows[i], group);
    tb__engine_unlock(engine);
    return status;
}

void tb_transfer_query(const tb_transfer *t, tb_transfer_state *out) {
    tb__engine *engine = t->batch->world->engine;
    tb__engine_lock(engine);
    get_state(t, out);
    clear_news(t);
    if (t->status != TB_OK)
        tb__set_detail("%s", t->why);
    tb__engine_unlock(engine);
}

int tb_transfer_fd(const tb_transfer *t) {
    return t->event;
}

/* ---- End ------------------------------------------------------------------------------------------------------- */

static bool has_ended(void *arg) {
    return ((const tb_transfer *)arg)->has_ended;
}

/* A step may be under way in the engine's thread, so ending it is left to that. */
static void begin_to_cancel(tb_transfer *t) {
    for (size_t i = 0; i < t->nflows; i++)
        leg_of(t, i)->is_cancelled = true;
    tb__engine_wake(t->batch->world->engine);
}

static void cancel(tb_transfer *t) {
    begin_to_cancel(t);
    tb__engine_wait(t->batch->world->engine, has_ended, t, INT64_MAX);
}

void tb__transfer_give_up(tb_transfer *t) {
    tb__engine *engine = t->batch->world->engine;
    tb__engine_lock(engine);
    if (!t->has_ended)
        begin_to_cancel(t);
    tb__engine_unlock(engine);
}

void tb_cancel(tb_transfer *t) {
    tb__engine *engine = t->batch->world->engine;
    tb__engine_lock(engine);
    if (!t->has_ended)
        cancel(t);
    tb__engine_unlock(engine);
}

void tb_transfer_destroy(tb_transfer *t) {
    if (!t)
        return;
    tb_batch *batch = t->batch;
    tb__engine *engine = batch->world->engine;
    tb__engine_lock(engine);
    if (!t->has_ended)
        cancel(t);
    tb__engine_remove_task(engine, &t->task);
    if (t->is_send)
        batch->sending = NULL;
    else
        batch->receiving = NULL;
    tb__engine_unlock(engine);
    close(t->event);
    free(t);
    tb__batch_unref(batch);
}
