/* The state of a transfer, and waiting for it. */
#include "bus/transfer_inside.h"

#include "base/descriptors.h"

#include <errno.h>
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

bool tb__transfer_is_unread(const tb_transfer *t) {
    tb_transfer_state state;
    tb__transfer_get_state(t, &state);
    return state.attempt && !(state.events & TB_RELEASED);
}

unsigned tb__part_events(const tb_transfer *t, const tb__transfer_part *p) {
    const tb__leg *leg = tb__flow_leg(p->flow, t->is_send);
    return (leg->is_released ? TB_RELEASED : 0U) | (leg->is_arrived ? TB_ARRIVED : 0U) |
           (leg->is_committed ? TB_COMMITTED : 0U) |
           (p->engine && p->engine->commit.holds && p->engine->commit.is_decided ? TB_DECIDED : 0U);
}

static void clear_news(tb_transfer *t) {
    eventfd_t unused;
    if (t->has_news && t->event >= 0)
        eventfd_read(t->event, &unused);
    t->has_news = false;
}

tb_status tb__local_transfer_query(const tb_transfer *t, tb_transfer_state *out) {
    tb__transfer_get_state(t, out);
    clear_news((tb_transfer *)(uintptr_t)t); // NOLINT(performance-no-int-to-ptr)
    if (t->status != TB_OK)
        tb__set_detail("%s", t->why);
    return TB_OK;
}

static const tb__transfer_part *find_pair_part(const tb_transfer *t, const tb_pair *pair) {
    for (size_t i = 0; i < t->nparts; i++) {
        if (strcmp(t->parts[i].exchange->pair->name, pair->name) == 0)
            return &t->parts[i];
    }
    return NULL;
}

tb_status tb__local_transfer_pair(const tb_transfer *t, const tb_pair *pair, tb_transfer_state *out) {
    const tb__transfer_part *p = find_pair_part(t, pair);
    if (!p)
        return tb__fail(TB_INVALID, "pair '%s' has no part in this transfer of batch '%s'", pair->name, t->batch->name);
    const tb__leg *leg = p->flow ? tb__flow_leg(p->flow, t->is_send) : NULL;
    *out = (tb_transfer_state){.status = p->status};
    if (leg) {
        *out = (tb_transfer_state){.status = tb__leg_has_ended(leg) ? leg->status : TB_OK,
                                   .events = tb__part_events(t, p),
                                   .attempt = UINT64_MAX};
        add_leg(p->flow, leg, out);
    }
    add_times(t, out);
    if (out->status != TB_OK)
        tb__set_detail("%s", leg ? leg->why : p->why);
    return TB_OK;
}

/* Most programs wait by tb_wait. */
int tb__local_transfer_fd(const tb_transfer *transfer) {
    tb_transfer *t = (tb_transfer *)(uintptr_t)transfer; // NOLINT(performance-no-int-to-ptr)
    tb__loop_lock(t->batch->world->loop);
    if (t->event < 0) {
        t->event = tb__fd_own(eventfd(t->has_news, EFD_CLOEXEC | EFD_NONBLOCK));
        if (t->event < 0)
            tb__set_detail("eventfd: %s", tb__errno_text(errno));
    }
    tb__loop_unlock(t->batch->world->loop);
    return t->event;
}

typedef struct waiting {
    tb_transfer *t;
    unsigned event;
    uint32_t group;
    const tb__device *device; /* copies that it has begun will do; NULL: none will */
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
    tb_transfer_state state;
    tb__transfer_get_state(t, &state);
    for (size_t i = 0; i < t->nparts && t->opts.whole_group && !t->has_ended; i++) {
        const tb__engine *group = t->parts[i].flow ? t->parts[i].group : NULL;
        if (group && group->whole.all[t->is_send].number < state.attempt)
            tb__whole_describe_wait(group, t->is_send, state.attempt, out, room);
    }
}

/* Waits for a condition. With the lock held. */
static tb_status wait_until_true(tb_transfer *t, bool (*is_true)(void *arg), waiting *w, int timeout_ms,
                                 const char *what) {
    tb__loop *loop = t->batch->world->loop;
    int64_t deadline_ms = timeout_ms < 0 ? t->deadline_ms + GRACE_MS : tb__now_ms() + timeout_ms;
    bool is_over = (w->device ? tb__loop_wait_begun : tb__loop_wait)(loop, is_true, w, deadline_ms);
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

tb_status tb__local_wait(tb_transfer *t, tb_event event, int timeout_ms) {
    const char *what;
    TB_TRY(tb__event_check(event, t->is_send, t->opts.hold, &what));
    take_groups(t, UINT32_MAX);
    return wait_until_true(t, has_event, &(waiting){.t = t, .event = event}, timeout_ms, what);
}

tb_status tb__transfer_wait_any(tb_transfer *t, unsigned events) {
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    tb_status status = wait_until_true(t, has_event, &(waiting){.t = t, .event = events}, -1, "gone on");
    tb__loop_unlock(loop);
    return status;
}

/* All legs have ended; the transfer's status has the result. */
static bool has_moved(void *arg) {
    const tb_transfer *t = ((const waiting *)arg)->t;
    size_t nlegs = 0;
    for (size_t i = 0; i < t->nparts; i++)
        nlegs += t->parts[i].flow != NULL;
    return t->nended == nlegs || t->has_ended;
}

tb_status tb__transfer_wait_moved(tb_transfer *t) {
    tb__loop *loop = t->batch->world->loop;
    tb__loop_lock(loop);
    tb_status status = wait_until_true(t, has_moved, &(waiting){.t = t}, -1, "moved");
    tb__loop_unlock(loop);
    return status;
}

void tb__transfer_take_groups(tb_transfer *t) {
    tb__loop_lock(t->batch->world->loop);
    take_groups(t, UINT32_MAX);
    tb__loop_unlock(t->batch->world->loop);
}

tb_status tb__local_wait_group(tb_transfer *t, uint32_t group, int timeout_ms) {
    if (t->is_send)
        return tb__fail(TB_INVALID, "groups arrive where they are received");
    waiting w = {.t = t, .group = group};
    bool had = has_received_group(&w) && !t->has_ended;
    tb_status status = had ? TB_OK : wait_until_true(t, has_received_group, &w, timeout_ms, "all of the group");
    if (status == TB_OK)
        take_groups(t, group);
    return status;
}

/* The device whose streams order the batch's tensors; NULL: all are in host memory. Host memory is not ordered by
 * streams: *is_on_host says whether any tensor is there. */
static tb_status find_stream_device(const tb_batch *batch, tb__device **out, bool *is_on_host) {
    const tb__added_tensor *first = NULL;
    *out = NULL;
    *is_on_host = false;
    for (size_t i = 0; i < batch->tensors.count; i++) {
        const tb__added_tensor *t = batch->tensors.item[i];
        *is_on_host |= t->is_on_host;
        if (!t->device || t->device == *out)
            continue;
        if (!t->device->ops->stream_record)
            return tb__fail(TB_REFUSED, "tensor '%.100s' of batch '%s' is on device '%s', which has no streams",
                            t->name, batch->name, t->device->ops->name);
        if (*out)
            return tb__fail(TB_REFUSED,
                            "tensor '%.100s' of batch '%s' is on device '%s', and tensor '%.100s' on device '%s': a "
                            "stream orders one of them only",
                            first->name, batch->name, first->device->ops->name, t->name, t->device->ops->name);
        *out = t->device;
        first = t;
    }
    return TB_OK;
}

tb_status tb__batch_record_stream(tb_batch *batch, const void *stream, tb__stream_point **out) {
    tb__loop *loop = batch->world->loop;
    tb__device *device;
    bool is_on_host;
    tb__loop_lock(loop);
    tb_status status = find_stream_device(batch, &device, &is_on_host);
    tb__loop_unlock(loop);
    *out = NULL;
    return status == TB_OK && device ? tb__stream_point_create(loop, device, stream, out) : status;
}

/* Whether all data has arrived, or is being written by copies that the device has begun. */
static bool has_begun_writes(void *arg) {
    const waiting *w = arg;
    const tb_transfer *t = w->t;
    if (has_event(arg))
        return true;
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].flow && !tb__flow_has_begun_writes(t->parts[i].flow, w->device))
            return false;
    }
    return true;
}

/* Fences of the copies that are missing until the data has arrived. */
static tb_status hold_writes(const tb_transfer *t, tb__held_fences *held) {
    for (size_t i = 0; i < t->nparts && !t->has_ended; i++) {
        if (t->parts[i].flow)
            TB_TRY(tb__flow_hold_writes(t->parts[i].flow, held));
    }
    return TB_OK;
}

static tb_status wait_for_arrival(tb_transfer *t, tb__device *device, const void *stream) {
    tb__loop *loop = t->batch->world->loop;
    tb__held_fences held = {0};
    waiting w = {.t = t, .event = TB_ARRIVED, .device = device};
    tb__loop_lock(loop);
    take_groups(t, UINT32_MAX);
    tb_status status = wait_until_true(t, has_begun_writes, &w, -1, "arrived");
    if (status == TB_OK)
        status = hold_writes(t, &held);
    tb__loop_unlock(loop);
    for (size_t i = 0; i < held.fences.count && status == TB_OK; i++)
        status = tb__device_stream_wait(device, stream, held.fences.item[i]);
    tb__loop_lock(loop);
    tb__held_fences_release(&held);
    tb__loop_unlock(loop);
    return status;
}

static bool is_in_use(const tb_transfer *t) {
    for (size_t i = 0; i < t->nparts; i++) {
        if (t->parts[i].flow && tb__transfer_leg(t, i)->is_under_way)
            return true;
    }
    return false;
}

void tb__transfer_open_gates(tb_transfer *t) {
    bool opens_all = !is_in_use(t);
    size_t n = 0;
    for (size_t i = 0; i < t->gates.count; i++) {
        tb__transfer_gate *g = &t->gates.item[i];
        if (opens_all || (t->events & (unsigned)g->event))
            g->ops->gate_open(g->gate);
        else
            t->gates.item[n++] = *g;
    }
    t->gates.count = n;
}

/* Whether the event has happened, or can't happen any more: then *status is the reason. Needs the lock. */
static bool is_settled(const tb_transfer *t, tb_event event, tb_status *status) {
    bool has_come = t->events & (unsigned)event;
    *status = has_come || t->status == TB_OK ? TB_OK : tb__fail(t->status, "%s", t->why);
    return has_come || t->has_ended;
}

/* The device opens the gate if no thread drives the loop. */
static tb_status wait_at_gate(tb_transfer *t, tb__device *device, tb_event event, const void *stream) {
    tb__loop *loop = t->batch->world->loop;
    tb__transfer_gate gate = {.event = event, .ops = device->ops};
    tb_status status;
    tb__loop_lock(loop);
    bool is_over = is_settled(t, event, &status);
    tb__loop_unlock(loop);
    if (is_over)
        return status;
    TB_TRY(tb__device_gate_create(device, stream, t->deadline_ms + GRACE_MS, &gate.gate));
    tb__loop_lock(loop);
    is_over = is_settled(t, event, &status);
    if (!is_over && !tb__vec_push(&t->gates, gate))
        status = TB_NO_MEMORY;
    if (is_over || status != TB_OK)
        device->ops->gate_open(gate.gate);
    else
        tb__transfer_open_gates(t);
    tb__loop_unlock(loop);
    return status;
}

tb_status tb__local_stream_wait(tb_transfer *t, tb_event event, const void *stream) {
    const char *what;
    tb__device *device;
    bool is_on_host;
    TB_TRY(tb__event_check(event, t->is_send, t->opts.hold, &what));
    tb__loop_lock(t->batch->world->loop);
    tb_status status = find_stream_device(t->batch, &device, &is_on_host);
    tb__loop_unlock(t->batch->world->loop);
    TB_TRY(status);
    if (device && event == TB_ARRIVED)
        return wait_for_arrival(t, device, stream);
    return device && !is_on_host ? wait_at_gate(t, device, event, stream) : tb_wait(t, event, -1);
}
