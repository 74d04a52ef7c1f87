/* The state of a transfer, and waiting for it. */
#include "bus/transfer_inside.h"

#include "base/opts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

/* Added to the transfer's deadline in waits without a timeout: the store may have to be asked for the outcome of a
 * shadowed receive. */
enum { GRACE_MS = 6000 };

const char *tb_phase_name(tb_phase phase) {
    static const char *const names[] = {"plan", "wait", "pack", "wire", "unpack", "commit"};
    return (unsigned)phase < TB_PHASE_COUNT ? names[phase] : NULL;
}

tb_status tb__transfer_check(const tb_transfer *t) {
    return tb__world_check(t->batch->world, "transfer");
}

/* ---- State ----------------------------------------------------------------------------------------------------- */

static void add_leg(const tb__flow *flow, const tb__leg *leg, tb_transfer_state *out) {
    uint64_t number = leg->attempt ? tb__flow_number(flow, leg->attempt) : 0;
    out->attempt = number < out->attempt ? number : out->attempt;
    out->bytes_done += leg->bytes_done;
    out->bytes_total += leg->bytes_total;
    out->groups_done += leg->groups_done;
    out->groups_total += leg->groups_total;
}

static void add_times(const tb_transfer *t, tb_transfer_state *out) {
    double now = t->has_ended ? t->ended : tb__seconds();
    out->version = out->events & TB_COMMITTED ? out->attempt : 0;
    out->seconds = now - t->begun;
    memcpy(out->phase, t->phases.seconds, sizeof out->phase);
    if (!t->has_ended)
        out->phase[t->phases.now] += now - t->phases.since;
}

void tb__transfer_get_state(const tb_transfer *t, tb_transfer_state *out) {
    *out = (tb_transfer_state){.size = sizeof *out, .status = t->status, .events = t->events, .attempt = UINT64_MAX};
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].flow)
            add_leg(t->parts[i].flow, tb__transfer_leg(t, i), out);
    }
    add_times(t, out);
}

unsigned tb__part_events(const tb_transfer *t, const tb__transfer_part *p) {
    const tb__leg *leg = tb__flow_leg(p->flow, t->is_send);
    return (leg->is_released ? TB_RELEASED : 0U) | (leg->is_arrived ? TB_ARRIVED : 0U) |
           (leg->is_committed ? TB_COMMITTED : 0U) |
           (p->commit && p->commit->holds && p->commit->is_decided ? TB_DECIDED : 0U);
}

static void clear_news(const tb_transfer *t) {
    eventfd_t unused;
    eventfd_read(t->event, &unused);
}

tb_status tb_transfer_query(const tb_transfer *t, tb_transfer_state *out) {
    TB_TRY(tb__struct_check(out, "a tb_transfer_state"));
    TB_TRY(tb__transfer_check(t));
    tb_transfer_state state;
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    tb__transfer_get_state(t, &state);
    clear_news(t);
    if (t->status != TB_OK)
        tb__set_detail("%s", t->why);
    tb__loop_unlock(loop);
    return tb__struct_write(out, &state, sizeof state, "a tb_transfer_state");
}

bool tb__transfer_pair_bytes(const tb_transfer *t, size_t i, const char **pair, int64_t *bytes_done) {
    if (i >= t->nparts)
        return false;
    tb__loop_lock(t->batch->world->loop);
    *pair = t->parts[i].exchange->pair->name;
    *bytes_done = t->parts[i].flow ? tb__flow_leg(t->parts[i].flow, t->is_send)->bytes_done : 0;
    tb__loop_unlock(t->batch->world->loop);
    return true;
}

static const tb__transfer_part *find_pair_part(const tb_transfer *t, const tb_pair *pair) {
    for (size_t i = 0; i < t->nparts; i++) {
        if (strcmp(t->parts[i].exchange->pair->name, pair->name) == 0)
            return &t->parts[i];
    }
    return NULL;
}

tb_status tb_transfer_pair(const tb_transfer *t, const tb_pair *pair, tb_transfer_state *out) {
    TB_TRY(tb__struct_check(out, "a tb_transfer_state"));
    TB_TRY(tb__transfer_check(t));
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    const tb__transfer_part *p = find_pair_part(t, pair);
    const tb__leg *leg = p && p->flow ? tb__flow_leg(p->flow, t->is_send) : NULL;
    tb_transfer_state state = {.attempt = UINT64_MAX};
    if (leg) {
        state.status = tb__leg_has_ended(leg) ? leg->status : TB_OK;
        state.events = tb__part_events(t, p);
        add_leg(p->flow, leg, &state);
    } else if (p) {
        state.status = p->status;
        state.attempt = 0;
    }
    add_times(t, &state);
    if (state.status != TB_OK)
        tb__set_detail("%s", leg ? leg->why : p->why);
    tb__loop_unlock(loop);
    if (!p)
        return tb__fail(TB_INVALID, "pair '%s' has no part in this transfer of batch '%s'", pair->name, t->batch->name);
    return tb__struct_write(out, &state, sizeof state, "a tb_transfer_state");
}

int tb_transfer_fd(const tb_transfer *t) {
    return tb__transfer_check(t) == TB_OK ? t->event : -1;
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

static bool has_received_group(void *arg) {
    const waiting *w = arg;
    bool has_all = true;
    for (size_t i = 0; i < w->t->nparts; i++)
        has_all &= !w->t->parts[i].flow || tb__flow_has_group(w->t->parts[i].flow, w->group);
    return has_all || w->t->has_ended;
}

static void describe_transfer_wait(const tb_transfer *t, char *out, size_t room) {
    snprintf(out, room, "nothing is missing");
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].flow && !tb__leg_has_ended(tb__transfer_leg(t, i))) {
            tb__flow_describe_wait(t->parts[i].flow, t->is_send, out, room);
            return;
        }
    }
}

/* Waits for a condition. With the lock held. */
static tb_status wait_until_true(tb_transfer *t, bool (*is_true)(void *arg), waiting *w, int timeout_ms,
                                 const char *what) {
    tb__loop *loop = t->batch->world->loop;
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms + GRACE_MS : tb__now_ms() + timeout_ms;
    bool is_over = tb__loop_wait(loop, is_true, w, deadline_ms);
    clear_news(t);
    if (t->status != TB_OK && !(t->events & w->event))
        return tb__fail(t->status, "%s", t->why);
    if (is_over)
        return TB_OK;
    char waits[TB__WHY_MAX];
    describe_transfer_wait(t, waits, sizeof waits);
    if (timeout_ms < 0)
        return tb__fail(TB_TIMEOUT, "batch '%s' has not %s by the transfer's deadline: %s", t->batch->name, what,
                        waits);
    return tb__fail(TB_TIMEOUT, "batch '%s' has not %s after %d ms: %s", t->batch->name, what, timeout_ms, waits);
}

static void take_groups(tb_transfer *t, uint32_t group) {
    for (size_t i = 0; !t->is_send && i < t->nparts; i++) {
        if (t->parts[i].flow)
            tb__flow_take_groups(t->parts[i].flow, group);
    }
}

tb_status tb_wait(tb_transfer *t, tb_event event, int timeout_ms) {
    TB_TRY(tb__transfer_check(t));
    static const struct {
        tb_event event;
        const char *what;
        bool of_send, of_recv;
    } events[] = {{TB_RELEASED, "been released", true, false},
                  {TB_ARRIVED, "arrived", false, true},
                  {TB_COMMITTED, "been committed", true, true},
                  {TB_DECIDED, "been decided", false, true}};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (events[i].event != event)
            continue;
        if (event == TB_DECIDED && !t->opts.hold)
            return tb__fail(TB_INVALID, "the transfer was not begun with hold");
        if (t->is_send ? !events[i].of_send : !events[i].of_recv)
            return tb__fail(TB_INVALID, "%s",
                            t->is_send ? "what is sent is released, and does not arrive here"
                                       : "what is received arrives, and is not released");
        tb__loop *loop = t->batch->world->loop;
        tb__loop_lock(loop);
        take_groups(t, UINT32_MAX);
        tb_status status =
            wait_until_true(t, has_event, &(waiting){.t = t, .event = event}, timeout_ms, events[i].what);
        tb__loop_unlock(loop);
        return status;
    }
    return tb__fail(TB_INVALID, "%d is not an event", (int)event);
}

/* The event has happened when this returns, so work submitted to a stream later comes after it. */
tb_status tb_stream_wait(tb_transfer *t, tb_event event, const void *stream) {
    if (!stream)
        return tb__fail(TB_INVALID, "stream is NULL; it points to a handle");
    return tb_wait(t, event, -1);
}

tb_status tb__transfer_wait_any(tb_transfer *t, unsigned events) {
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    take_groups(t, UINT32_MAX);
    tb_status status = wait_until_true(t, has_event, &(waiting){.t = t, .event = events}, -1, "gone on");
    tb__loop_unlock(loop);
    return status;
}

tb_status tb_wait_group(tb_transfer *t, uint32_t group, int timeout_ms) {
    TB_TRY(tb__transfer_check(t));
    if (t->is_send)
        return tb__fail(TB_INVALID, "groups arrive where they are received");
    if (group == UINT32_MAX)
        return tb__fail(TB_INVALID, "groups go up to %" PRIu32, UINT32_MAX - 1);
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    waiting w = {.t = t, .group = group};
    bool had = has_received_group(&w) && !t->has_ended;
    tb_status status = had ? TB_OK : wait_until_true(t, has_received_group, &w, timeout_ms, "all of the group");
    if (status == TB_OK)
        take_groups(t, group);
    tb__loop_unlock(loop);
    return status;
}
