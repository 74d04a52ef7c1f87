/* The diagnostics of a flow: see report.h. */
#include "flow/flow_inside.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>

enum { RETRY_MS = 20 }; /* between attempts to tell a member that the flow is broken */

/* ---- Reasons ---------------------------------------------------------------------------------------------------- */

/* A message about a wait names the awaited rank, but not the waiting one, so that is put in front. */
const char *tb__flow_reason_for_others(const tb__flow *flow, tb_status status, const char *why,
                                       char reason[TB__REASON_MAX]) {
    bool is_wait = status == TB_TIMEOUT || status == TB_IN_DOUBT;
    const char *label = flow->members[flow->self].peer->label;
    snprintf(reason, TB__REASON_MAX, "%s%s%s", is_wait ? label : "", is_wait ? ": " : "", why);
    return reason;
}

/* A member that is gone and that the leg needs; NULL: none. A leg without an attempt needs all members: no further
 * transfer begins. But the START of an earlier one may still be on its way from the lead, or the choice of the engine's
 * lead among those that have started, so the leg waits REASON_MS for it. */
static const member *find_missing_member(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    bool has_offer = tb__flow_last_attempt(flow, is_send) < tb__flow_started(flow);
    bool is_idle = leg->awaits_choice || (!leg->attempt && !has_offer);
    int64_t now_ms = tb__now_ms(), wake_ms = INT64_MAX;
    for (size_t i = 0; i < flow->nmembers; i++) {
        const member *m = &flow->members[i];
        bool may_hear = has_offer || (!m->has_left && i != flow->o.lead);
        int64_t since_ms = has_offer && leg->begun_ms > m->gone_ms ? leg->begun_ms : m->gone_ms;
        int64_t over_ms = may_hear ? since_ms + REASON_MS : 0;
        if (m->is_gone && ((is_idle && now_ms >= over_ms) || tb__flow_needs(flow, is_send, m)))
            return m;
        wake_ms = m->is_gone && over_ms < wake_ms ? over_ms : wake_ms;
    }
    if (!leg->attempt)
        tb__leg_wake_at(leg, is_idle ? wake_ms : 0);
    return NULL;
}

tb__fault tb__fault_of(tb_status status, const char *why) {
    tb__fault fault = {.status = status};
    snprintf(fault.why, sizeof fault.why, "%s", why);
    return fault;
}

/* A leg that began after a failed attempt waits for the next one. If that attempt failed because memory was
 * invalidated, there is no next one, and that is why members leave. */
static tb__fault reason_for_missing(const tb__flow *flow, bool is_send, const member *gone) {
    const tb__leg *leg = is_send ? &flow->send : &flow->recv;
    uint64_t last = tb__flow_last_attempt(flow, is_send);
    const tb__abort *before = leg->attempt || !gone->has_left ? NULL : tb__flow_find_abort(flow, last);
    if (before && before->status == TB_INVALID)
        return tb__fault_of(before->status, before->why);
    return tb__fault_of(gone->gone_status, tb__member_why_gone(gone));
}

tb__fault tb__flow_find_reason(tb__flow *flow, bool is_send, bool *tells) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    tb_status status = TB_OK;
    *tells = false;
    if (flow->report.broken.status != TB_OK)
        return flow->report.broken;
    const tb__abort *abort = NULL;
    do {
        if (abort) /* superseded */
            tb__flow_count_attempt(flow, is_send);
        uint64_t next = tb__flow_last_attempt(flow, is_send) + 1;
        abort = tb__flow_find_abort(flow, leg->attempt ? leg->attempt : next);
    } while (abort && abort->status == TB_SUPERSEDED && leg->awaits_choice);
    if (abort) {
        if (!leg->attempt)
            tb__flow_count_attempt(flow, is_send);
        return tb__fault_of(abort->status, abort->why);
    }
    *tells = true;
    const member *gone = flow->ngone ? find_missing_member(flow, is_send) : NULL;
    if (leg->memory_invalidated)
        status = tb__flow_check_memory(flow, is_send);
    else if (gone)
        return reason_for_missing(flow, is_send, gone);
    else if (leg->is_cancelled)
        status = tb__fail(TB_CANCELLED, "rank %" PRId32 " cancelled %s", flow->o.rank, flow->what);
    return tb__fault_of(status, status == TB_OK ? "" : tb_error_detail());
}

static void widen_range(const tb__flow *flow, size_t bucket, uint32_t range[2]) {
    const tb_ir *ir = flow->setup.ir;
    const tb_bucket *b = &ir->buckets[bucket];
    for (size_t i = 0; i < b->nentries; i++) {
        uint32_t tensor = ir->chunks[ir->entries[b->first_entry + i].chunk].tensor;
        range[0] = tensor < range[0] ? tensor : range[0];
        range[1] = tensor > range[1] ? tensor : range[1];
    }
}

/* The first and the last tensor that the operation copies. */
static void find_range(const copy_op *c, uint32_t range[2]) {
    const tb__flow *flow = c->flow;
    bool is_group = c->kind == COPY_MEASURE || c->kind == COPY_GATHERED;
    range[0] = UINT32_MAX;
    range[1] = 0;
    if (c->kind == COPY_SUM)
        widen_range(flow, c->staged_bucket->bucket, range);
    for (size_t i = 0; !is_group && i < c->nparts; i++)
        widen_range(flow, c->parts[i], range);
    for (size_t i = 0; is_group && i < flow->setup.ir->nbuckets; i++) {
        const tb_bucket *b = &flow->setup.ir->buckets[i];
        bool is_in = b->group >= c->parts[0] && b->group <= c->parts[c->nparts - 1]; /* they ascend */
        if (is_in && flow->setup.lanes[b->channel].is_target)
            widen_range(flow, i, range);
    }
    if (range[0] > range[1]) { /* all */
        range[0] = 0;
        range[1] = (uint32_t)flow->o.ntensors - 1;
    }
}

/* Where this rank has its part of a tensor. */
static tb__device *find_unit(const tb__flow *flow, uint32_t tensor, bool is_send, int *unit) {
    const tb__flow_tensor *t = &flow->tensors[tensor];
    tb__memory memory;
    tb__device *device = tb__loop_find_memory(flow->o.loop, (is_send ? &t->src : &t->dst)->base, 1, &memory);
    *unit = memory.index;
    return device;
}

/* The device that has failed, with its unit if the tensor is there. */
static const char *name_unit(const tb__flow *flow, const copy_op *c, uint32_t tensor) {
    int unit;
    tb__device *device = find_unit(flow, tensor, c->is_send, &unit);
    return device == c->run.failed ? tb__device_unit_name(device, unit) : c->run.failed->ops->name;
}

tb_status tb__flow_fail_copy_op(const copy_op *c, tb_status status, const char *why) {
    const tb__flow *flow = c->flow;
    bool is_group = c->kind == COPY_MEASURE || c->kind == COPY_GATHERED;
    bool is_direct = c->kind == COPY_DIRECT || c->kind == COPY_STASH;
    bool is_staged = c->kind == COPY_SUM || (c->nparts > 0 && !is_group && !is_direct);
    uint32_t range[2];
    char device[64] = "", names[160], inner[TB__WHY_MAX];
    find_range(c, range);
    const char *first = flow->tensors[range[0]].spec.name, *last = flow->tensors[range[1]].spec.name;
    snprintf(inner, sizeof inner, "%s", why); /* it may be tb_error_detail */
    if (c->run.failed)
        snprintf(device, sizeof device, ": the %s device", name_unit(flow, c, range[0]));
    if (range[0] == range[1])
        snprintf(names, sizeof names, "tensor '%.100s'", first);
    else
        snprintf(names, sizeof names, "%stensors '%.60s' ... '%.60s'", is_staged ? "a staged bucket of " : "", first,
                 last);
    return tb__fail(status, "%.60s%s could not %s %s of %.80s: %s", flow->members[flow->self].peer->label, device,
                    c->kind == COPY_SUM       ? "compute the checksum of"
                    : is_group || c->converts ? "convert"
                                              : "copy",
                    names, flow->what, inner);
}

bool tb__flow_record_broken(tb__flow *flow, tb_status status, const char *why) {
    if (flow->report.broken.status != TB_OK)
        return false;
    flow->report.broken = tb__fault_of(status, why);
    return true;
}

void tb__flow_record_loss(tb__flow *flow, const char *why) {
    if (flow->report.loss.status == TB_OK)
        flow->report.loss = tb__fault_of(TB_LOST, why);
}

/* ---- Breaking later --------------------------------------------------------------------------------------------- */

/* A failure where a leg must not end at once, such as an unsent message, breaks the flow from a task of its own.
 * Members that missed a message are told that the flow is broken, repeatedly until that succeeds: memory was lacking,
 * and may be free later. */
static bool tell_uninformed(tb__flow *flow) {
    char reason[TB__REASON_MAX];
    bool did = false;
    tb__flow_reason_for_others(flow, flow->report.broken.status, flow->report.broken.why, reason);
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (!m->missed_message)
            continue;
        m->missed_message = false; /* a failed send sets it again */
        if (i != flow->self)
            tb__flow_tell_abort(flow, i, 0, 0, flow->report.broken.status, reason);
        did |= !m->missed_message;
    }
    return did;
}

static bool step_breaking(tb__task *task) {
    tb__flow *flow = (tb__flow *)((char *)task - offsetof(tb__flow, report.task));
    if (tb__now_ms() < task->deadline_ms)
        return false;
    bool did = true;
    if (flow->report.broken.status == TB_OK)
        tb__flow_break(flow, flow->report.failure.status, flow->report.failure.why);
    else
        did = tell_uninformed(flow);
    task->deadline_ms = INT64_MAX;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].missed_message)
            task->deadline_ms = tb__now_ms() + RETRY_MS;
    }
    return did;
}

void tb__flow_fail_later(tb__flow *flow, tb_status status, const char *why) {
    if (flow->report.failure.status == TB_OK)
        flow->report.failure = tb__fault_of(status, why);
    if (!flow->report.task.step) {
        flow->report.task.step = step_breaking;
        tb__loop_add_task(flow->o.loop, &flow->report.task);
    }
    flow->report.task.deadline_ms = tb__now_ms();
    tb__loop_wake(flow->o.loop);
}

void tb__flow_miss_message(tb__flow *flow, member *to, tb_status status, const char *why) {
    to->missed_message = true;
    tb__flow_fail_later(flow, status, why);
}

void tb__flow_fini_report(tb__flow *flow) {
    if (flow->report.task.step)
        tb__loop_remove_task(flow->o.loop, &flow->report.task);
}

/* ---- Waiting ---------------------------------------------------------------------------------------------------- */

typedef bool wait_test(const tb__flow *flow, bool is_send, const member *m);

/* Whether the owner needs the member to have the receive applied. */
static bool owes_commit(const tb__flow *flow, const member *m) {
    const tb__shadow *owner = &flow->o.shadow;
    return owner->is_used && owner->needs(owner->arg, flow->recv.attempt, (size_t)(m - flow->members));
}

/* Whether the member has to do something before data can flow: start, bind, reach, ready; of a send, finish reading. */
static bool owes_progress(const tb__flow *flow, bool is_send, const member *m) {
    const tb__leg *leg = is_send ? &flow->send : &flow->recv;
    if (is_send && flow->direct.is_exposed)
        return m->setup.is_reader && !tb__flow_is_served(flow, m);
    if (!is_send && flow->shadow.is_prepared)
        return owes_commit(flow, m);
    if (leg->attempt == 0 && (!is_send || flow->self != flow->o.lead) && (is_send || flow->setup.is_reached))
        return m == &flow->members[flow->o.lead];
    if (is_send)
        return m->setup.is_reader && !m->setup.has_reach;
    return m->setup.is_sender &&
           (flow->setup.is_reached ? m->direct.ready != leg->attempt && !m->direct.is_concluded : !m->setup.is_bound);
}

static bool is_announced(const tb__flow *flow, size_t bucket) {
    for (size_t i = 0; i < flow->staged.announcements.count; i++) {
        if (flow->staged.announcements.item[i].bucket == bucket &&
            flow->staged.announcements.item[i].attempt == flow->recv.attempt)
            return true;
    }
    return false;
}

/* Whether the member has not announced, or not sent, a staged bucket. One that it has announced waits for room at this
 * rank. */
static bool owes_staged_data(const tb__flow *flow, bool is_send, const member *m) {
    if (is_send || !flow->recv.attempt || !flow->setup.is_planned)
        return false;
    for (const staged_bucket *p = flow->staged.buckets; p; p = p->next) {
        if (p->kind == STAGED_IN && !p->messages[0].is_done && &flow->members[p->messages[0].member] == m)
            return true;
    }
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool is_from = l->is_target && l->takes_staged && !l->is_channel_source && &flow->members[l->parent] == m;
        for (size_t j = 0; is_from && j < l->channel->nbuckets; j++) {
            size_t bucket = l->channel->first_bucket + j;
            if (flow->setup.paths[bucket].takes_staged && !flow->staged.is_taken[bucket] && !is_announced(flow, bucket))
                return true;
        }
    }
    return false;
}

/* Whether this rank is relaying a bucket to the member. */
static bool owes_relay_receive(const tb__flow *flow, bool is_send, const member *m) {
    for (const staged_bucket *p = flow->staged.buckets; p && !is_send; p = p->next) {
        for (size_t i = 1; p->kind == STAGED_IN && p->is_announced && i < p->nmessages; i++) {
            if (!p->messages[i].is_done && &flow->members[p->messages[i].member] == m)
                return true;
        }
    }
    return false;
}

/* Whether buckets of the member are missing. */
static bool owes_data(const tb__flow *flow, bool is_send, const member *m) {
    return !is_send && flow->recv.attempt && m->setup.is_sender && !m->direct.is_concluded;
}

/* Whether contributions of the member to a reduction at this rank are missing. */
static bool owes_contribution(const tb__flow *flow, bool is_send, const member *m) {
    for (const staged_bucket *p = flow->staged.buckets; p && is_send; p = p->next) {
        for (size_t i = 0; p->is_send && p->kind == STAGED_REDUCE && i < p->nmessages; i++) {
            if (!p->messages[i].is_done && &flow->members[p->messages[i].member] == m)
                return true;
        }
    }
    for (size_t i = 0; is_send && flow->direct.is_exposed && i < flow->setup.ir->nchannels; i++) {
        const lane *l = &flow->setup.lanes[i];
        bool reduces = l->is_channel_source && !l->is_target && l->nstaged && l->nsenders > 1;
        for (uint32_t j = 0; reduces && l->staged_lane.to_send < l->channel->nbuckets && j < l->nsenders; j++) {
            if (&flow->members[l->senders[j]] == m)
                return true;
        }
    }
    return false;
}

bool tb__flow_needs(const tb__flow *flow, bool is_send, const member *m) {
    if (is_send)
        return (m->setup.is_reader && !(flow->direct.is_exposed && tb__flow_is_served(flow, m))) ||
               owes_contribution(flow, true, m);
    if (!flow->recv.attempt)
        return m->setup.is_sender;
    return owes_data(flow, false, m) || owes_staged_data(flow, false, m) || owes_commit(flow, m);
}

/* Whether the member has not acknowledged that the leg has failed. */
static bool owes_abort_ack(const tb__flow *flow, bool is_send, const member *m) {
    return (is_send ? &flow->send : &flow->recv)->awaits_abort_acks && m->unacked[is_send] != 0;
}

/* The first member that passes the test, and how many others do. */
static const char *find_awaited(const tb__flow *flow, bool is_send, wait_test *is_awaited, size_t *others) {
    const char *first = NULL;
    *others = 0;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (!is_awaited(flow, is_send, &flow->members[i]))
            continue;
        *others += first != NULL;
        first = first ? first : flow->members[i].peer->label;
    }
    return first;
}

static const char *what_for(const tb__flow *flow, bool is_send, wait_test *test) {
    if (test == owes_abort_ack)
        return "to hear that it has failed";
    if (test == owes_relay_receive)
        return "to receive";
    if (!is_send)
        return flow->shadow.is_prepared ? "to commit" : "to send";
    if (!flow->send.attempt)
        return "to send";
    return flow->send.is_released && !flow->setup.snapshot_of ? "to commit" : "to receive";
}

void tb__flow_describe_wait(tb__flow *flow, bool is_send, char *out, size_t room) {
    static wait_test *const tests[] = {owes_abort_ack, owes_progress, owes_staged_data, owes_relay_receive, owes_data};
    const size_t ntests = sizeof tests / sizeof *tests;
    const char *first = NULL;
    size_t others = 0, i = 0;
    for (; i < ntests && !first; i++)
        first = find_awaited(flow, is_send, tests[i], &others);
    const char *what = what_for(flow, is_send, tests[i - 1]);
    if (!first && !is_send && flow->o.gather.awaits) {
        const member *m = tb__flow_find_member(flow, flow->o.gather.awaits(flow->o.gather.arg));
        first = m ? m->peer->label : NULL;
    }
    uint64_t attempt, number;
    bool is_copying = i == ntests && (is_send ? &flow->send : &flow->recv)->ncopies > 0;
    if (tb__flow_awaits_stream(flow, is_send))
        snprintf(out, room, "the work that was on this rank's stream before has not finished");
    else if (!is_send && flow->recv.awaits_choice && tb__flow_get_offer(flow, &attempt, &number))
        snprintf(out, room, "version %" PRIu64 " is offered through this pair, and not yet through all others", number);
    else if (is_copying)
        snprintf(out, room, "this rank's own copies have not finished");
    else if (!first)
        snprintf(out, room, "data is still on its way");
    else if (others)
        snprintf(out, room, "waiting for %s and %zu others %s", first, others, what);
    else
        snprintf(out, room, "waiting for %s %s", first, what);
}

/* ---- Dump ------------------------------------------------------------------------------------------------------- */

static void add_box(tb__text *t, const tb_box *box, const tb_chunk *c) {
    tb__text_add(t, "[");
    for (int d = 0; d < c->ndim; d++)
        tb__text_add(t, "%s%" PRId64 ":%" PRId64, d ? ", " : "", box->start[d], box->start[d] + c->len[d]);
    tb__text_add(t, "]");
}

/* How a received piece gets into the tensor. */
static const char *write_back(const tb__flow *flow, const lane *l, const bucket_path *path, const tb_chunk *c) {
    const tb__flow_tensor *t = &flow->tensors[c->tensor];
    if (t->is_gathered || (c->is_coded && (t->codec->list_unpack || t->codec->call_unpack)))
        return "transform";
    if (tb__flow_is_in_place(flow, c))
        return "in place";
    return path->why_taken || l->is_stashed || c->is_coded ? "copy" : "direct";
}

static void add_ranks(tb__text *t, const int32_t *ranks, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        tb__text_add(t, "%s%" PRId32, i ? "," : "", ranks[i]);
}

/* Where this rank has the tensor, if that is not host memory. */
static void add_unit(tb__text *t, const tb__flow *flow, uint32_t tensor, bool is_send) {
    int unit;
    tb__device *device = find_unit(flow, tensor, is_send, &unit);
    if (device->ops != &tb__host_device_ops)
        tb__text_add(t, " on %s", tb__device_unit_name(device, unit));
}

static void add_piece(tb__text *t, const tb__flow *flow, bool is_send, size_t bucket, const tb_chunk *c) {
    const bucket_path *path = &flow->setup.paths[bucket];
    const lane *l = &flow->setup.lanes[flow->setup.ir->buckets[bucket].channel];
    tb__text_add(t, "  %s ", flow->tensors[c->tensor].spec.name);
    if (is_send) {
        add_box(t, &c->src, c);
        add_unit(t, flow, c->tensor, true);
        /* For its own data, this rank has decided by itself. */
        bool is_own_staged = l->is_channel_source && l->is_target && l->nsenders == 1 && path->why_taken;
        uint32_t nstaged = path->nstaged + is_own_staged;
        tb__text_add(t, " to ");
        add_ranks(t, c->targets, c->ntargets);
        tb__text_add(t, ", %s", c->is_coded ? "coded" : nstaged == c->ntargets ? "staged" : "read in place");
        if (!c->is_coded && nstaged > 0 && nstaged < c->ntargets)
            tb__text_add(t, " or staged");
        if (!c->is_coded && nstaged > 0)
            tb__text_add(t, " (%s)", path->why_staged ? path->why_staged : path->why_taken);
    } else {
        add_box(t, &c->dst, c);
        add_unit(t, flow, c->tensor, false);
        tb__text_add(t, " from ");
        if (c->ncontributors)
            add_ranks(t, c->contributors, c->ncontributors);
        else if (c->source == TB_NO_RANK)
            tb__text_add(t, "nobody: zeros");
        else
            add_ranks(t, &c->source, 1);
        if (l->parent != l->source)
            tb__text_add(t, " by way of %" PRId32, flow->members[l->parent].peer->rank);
        tb__text_add(t, ", %s", write_back(flow, l, path, c));
        if (path->why_taken && !c->is_coded)
            tb__text_add(t, ", staged (%s)", path->why_taken);
        else if (l->nsenders > 0 && !c->is_coded)
            tb__text_add(t, ", mapped");
        for (uint32_t i = 0; i < l->nchildren; i++)
            tb__text_add(t, "%s%" PRId32, i ? "," : ", relayed to ", flow->members[l->children[i]].peer->rank);
    }
    tb__text_add(t, ", %s %" PRId64 " bytes, id %016" PRIx64, tb_chunk_mode_name(c->mode), c->nbytes, c->id);
    if (c->part)
        tb__text_add(t, " part %" PRIu32, c->part);
    tb__text_add(t, "\n");
}

tb_status tb__flow_dump(const tb__flow *flow, bool is_send, char **out) {
    bool is_known = flow->setup.is_planned && (is_send || flow->setup.is_reached);
    for (size_t i = 0; is_send && is_known && i < flow->nmembers; i++)
        is_known = !flow->members[i].setup.is_reader || flow->members[i].setup.has_reach;
    if (!is_known)
        return tb__fail(TB_REFUSED, "%s has not been %s yet: the first transfer decides how tensors are moved",
                        flow->what, is_send ? "sent" : "received");
    tb__text t = {0};
    size_t count = 0;
    for (size_t i = 0; i < flow->setup.ir->nchunks; i++)
        count += is_send ? flow->setup.ir->chunks[i].is_source : flow->setup.ir->chunks[i].is_target;
    tb__text_add(&t, "%s, rank %" PRId32 " %s %zu pieces:\n", flow->what, flow->o.rank, is_send ? "sends" : "receives",
                 count);
    for (size_t i = 0; i < flow->setup.ir->nbuckets; i++) {
        const tb_bucket *b = &flow->setup.ir->buckets[i];
        for (size_t j = 0; j < b->nentries; j++) {
            const tb_chunk *c = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + j].chunk];
            if (is_send ? c->is_source : c->is_target)
                add_piece(&t, flow, is_send, i, c);
        }
    }
    for (size_t i = 0; is_send && i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader && i != flow->self)
            tb__staged_describe_way(flow, &flow->members[i], &t);
    }
    return tb__text_take(&t, out);
}
