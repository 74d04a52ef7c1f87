/* Whom a leg is waiting for: for those who have waited long enough, and for when one of them is gone. */
#include "flow/flow_inside.h"

#include <stdio.h>

typedef bool wait_test(const tb__flow *flow, bool is_send, const member *m);

/* Without whom the owner can't have the receive applied. */
static bool has_to_commit(const tb__flow *flow, const member *m) {
    const tb__shadow *owner = &flow->o.shadow;
    return owner->is_used && owner->needs(owner->arg, flow->recv.attempt, (size_t)(m - flow->members));
}

/* Before there is data. */
static bool has_to_come(const tb__flow *flow, bool is_send, const member *m) {
    const tb__leg *leg = is_send ? &flow->send : &flow->recv;
    if (is_send && flow->send_is_exposed)
        return m->is_reader && !tb__flow_is_served(flow, m);
    if (!is_send && flow->shadow.is_prepared)
        return has_to_commit(flow, m);
    if (leg->attempt == 0 && (!is_send || flow->self != flow->o.lead) && (is_send || flow->is_reached))
        return m == &flow->members[flow->o.lead];
    if (is_send)
        return m->is_reader && !m->has_reach;
    return m->is_sender && (flow->is_reached ? m->ready != leg->attempt && !m->is_concluded : !m->is_bound);
}

static bool is_announced(const tb__flow *flow, size_t bucket) {
    for (size_t i = 0; i < flow->staged.announcements.count; i++) {
        if (flow->staged.announcements.item[i].bucket == bucket &&
            flow->staged.announcements.item[i].attempt == flow->recv.attempt)
            return true;
    }
    return false;
}

/* Who sends what is staged, or hands it on, and has not: what it has announced waits for room here. */
static bool has_to_send(const tb__flow *flow, bool is_send, const member *m) {
    if (is_send || !flow->recv.attempt || !flow->is_planned)
        return false;
    for (const staged_bucket *p = flow->staged.buckets; p; p = p->next) {
        if (p->kind == STAGED_IN && !p->messages[0].is_done && &flow->members[p->messages[0].member] == m)
            return true;
    }
    for (size_t i = 0; i < flow->ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        bool is_from = l->is_target && l->takes_staged && !l->is_shipper && &flow->members[l->parent] == m;
        for (size_t j = 0; is_from && j < l->channel->nbuckets; j++) {
            size_t bucket = l->channel->first_bucket + j;
            if (!flow->staged.is_taken[bucket] && !is_announced(flow, bucket))
                return true;
        }
    }
    return false;
}

/* To whom this rank hands on what it has got. */
static bool has_to_take(const tb__flow *flow, bool is_send, const member *m) {
    for (const staged_bucket *p = flow->staged.buckets; p && !is_send; p = p->next) {
        for (size_t i = 1; p->kind == STAGED_IN && p->is_announced && i < p->nmessages; i++) {
            if (!p->messages[i].is_done && &flow->members[p->messages[i].member] == m)
                return true;
        }
    }
    return false;
}

/* Whose data is not all here. */
static bool has_more(const tb__flow *flow, bool is_send, const member *m) {
    return !is_send && flow->recv.attempt && m->is_sender && !m->is_concluded;
}

/* Whose contributions to what this rank ships are not all here. */
static bool has_to_contribute(const tb__flow *flow, bool is_send, const member *m) {
    for (const staged_bucket *p = flow->staged.buckets; p && is_send; p = p->next) {
        for (size_t i = 0; p->is_send && p->kind == STAGED_REDUCE && i < p->nmessages; i++) {
            if (!p->messages[i].is_done && &flow->members[p->messages[i].member] == m)
                return true;
        }
    }
    for (size_t i = 0; is_send && flow->send_is_exposed && i < flow->ir->nchannels; i++) {
        const lane *l = &flow->lanes[i];
        bool reduces = l->is_shipper && !l->is_target && l->nstaged && l->nsenders > 1;
        for (uint32_t j = 0; reduces && l->staged_lane.to_send < l->channel->nbuckets && j < l->nsenders; j++) {
            if (&flow->members[l->senders[j]] == m)
                return true;
        }
    }
    return false;
}

bool tb__flow_needs(const tb__flow *flow, bool is_send, const member *m) {
    if (is_send)
        return (m->is_reader && !(flow->send_is_exposed && tb__flow_is_served(flow, m))) ||
               has_to_contribute(flow, true, m);
    if (!flow->recv.attempt)
        return m->is_sender;
    return has_more(flow, false, m) || has_to_send(flow, false, m) || has_to_commit(flow, m);
}

/* That the leg has failed. */
static bool has_to_hear(const tb__flow *flow, bool is_send, const member *m) {
    return (is_send ? &flow->send : &flow->recv)->awaits_abort_acks && m->unacked[is_send] != 0;
}

/* The first member of which it is true, and how many others there are. */
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
    if (test == has_to_hear)
        return "to hear that it has failed";
    if (test == has_to_take)
        return "to receive";
    if (!is_send)
        return flow->shadow.is_prepared ? "to commit" : "to send";
    if (!flow->send.attempt)
        return "to send";
    return flow->send.is_released && !flow->snapshot_of ? "to commit" : "to receive";
}

void tb__flow_describe_wait(tb__flow *flow, bool is_send, char *out, size_t room) {
    static wait_test *const tests[] = {has_to_hear, has_to_come, has_to_send, has_to_take, has_more};
    const size_t ntests = sizeof tests / sizeof *tests;
    const char *first = NULL;
    size_t others = 0, i = 0;
    for (; i < ntests && !first; i++)
        first = find_awaited(flow, is_send, tests[i], &others);
    const char *what = what_for(flow, is_send, tests[i - 1]);
    if (!first && !is_send && flow->o.gather.awaits) {
        const member *m = tb__flow_find(flow, flow->o.gather.awaits(flow->o.gather.arg));
        first = m ? m->peer->label : NULL;
    }
    if (!first)
        snprintf(out, room, "data is still on its way");
    else if (others)
        snprintf(out, room, "waiting for %s and %zu others %s", first, others, what);
    else
        snprintf(out, room, "waiting for %s %s", first, what);
}
