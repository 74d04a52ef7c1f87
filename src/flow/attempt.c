/* The attempts of a flow: see attempt.h. A rank may miss any number of attempts, so their record is bounded: one entry
 * for each run of consecutive numbers, and the last few failures; older neighbours are merged. */
#include "flow/flow_inside.h"

#include "base/int.h"

#include <string.h>

enum { MAX_ABORTS = 64, MAX_STARTS = 64, ABORT_ACK_MS = 1000 };

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

bool tb__flow_record_start(tb__flow *flow, uint64_t attempt, uint64_t number) {
    tb__flow_record_started(flow, attempt);
    flow->attempts.announced = attempt > flow->attempts.announced ? attempt : flow->attempts.announced;
    if (flow->attempts.starts.count && tb__flow_number(flow, attempt) == number)
        return true;
    if (flow->attempts.starts.count == MAX_STARTS)
        memmove(flow->attempts.starts.item, flow->attempts.starts.item + 1,
                --flow->attempts.starts.count * sizeof *flow->attempts.starts.item);
    return tb__vec_push(&flow->attempts.starts, (issued){attempt, number});
}

uint64_t tb__flow_number(const tb__flow *flow, uint64_t attempt) {
    size_t i = flow->attempts.starts.count;
    while (i > 0 && flow->attempts.starts.item[i - 1].attempt > attempt)
        i--;
    return i > 0 ? flow->attempts.starts.item[i - 1].number + (attempt - flow->attempts.starts.item[i - 1].attempt)
                 : attempt;
}

uint64_t tb__flow_last_number(const tb__flow *flow) {
    return flow->attempts.starts.count ? tb__flow_number(flow, flow->attempts.started) : 0;
}

static uint64_t *last_of(tb__flow *flow, bool is_send) {
    return is_send ? &flow->attempts.last_sent : &flow->attempts.last_received;
}

uint64_t tb__flow_last_attempt(const tb__flow *flow, bool is_send) {
    return is_send ? flow->attempts.last_sent : flow->attempts.last_received;
}

uint64_t tb__flow_count_attempt(tb__flow *flow, bool is_send) {
    return ++*last_of(flow, is_send);
}

uint64_t tb__flow_issue_attempt(tb__flow *flow) {
    struct flow_attempts *a = &flow->attempts;
    a->last_sent = (a->last_sent > a->started ? a->last_sent : a->started) + 1;
    return a->last_sent;
}

uint64_t tb__flow_started(const tb__flow *flow) {
    return flow->attempts.started;
}

void tb__flow_record_started(tb__flow *flow, uint64_t started) {
    flow->attempts.started = started > flow->attempts.started ? started : flow->attempts.started;
}

bool tb__flow_take_attempt(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    uint64_t last = tb__flow_last_attempt(flow, is_send);
    /* A rank that has left may have heard of a transfer before this one: its number is still to come. */
    bool is_announced =
        last < flow->attempts.announced || flow->o.lead >= flow->nmembers || flow->members[flow->o.lead].is_gone;
    if (!leg->attempt && !leg->awaits_choice && last < flow->attempts.started && is_announced) {
        leg->attempt = tb__flow_count_attempt(flow, is_send);
        leg->number = tb__flow_number(flow, leg->attempt);
        leg->wake_ms = 0;
    }
    return leg->attempt > 0;
}

void tb__flow_await_choice(tb__flow *flow) {
    flow->recv.awaits_choice = true;
}

void tb__flow_choose(tb__flow *flow, uint64_t attempt) {
    if (!flow->recv.awaits_choice || attempt == 0)
        return;
    flow->recv.awaits_choice = false;
    flow->attempts.last_received = attempt - 1;
    tb__loop_wake(flow->o.loop);
}

bool tb__flow_get_offer(const tb__flow *flow, uint64_t *attempt, uint64_t *number) {
    *attempt = tb__flow_next_attempt(flow, false);
    *number = tb__flow_number(flow, *attempt);
    return *attempt <= flow->attempts.started && flow->report.broken.status == TB_OK;
}

void tb__flow_supersede(tb__flow *flow, uint64_t attempt, const char *why) {
    uint64_t number = tb__flow_number(flow, attempt);
    tb__flow_record_abort(flow, attempt, number, TB_SUPERSEDED, why);
    tb__flow_tell_all_abort(flow, attempt, number, TB_SUPERSEDED, why);
}

/* ---- Failed attempts ------------------------------------------------------------------------------------------- */

/* The first entry that does not end before the attempt. */
static size_t find_abort_index(const tb__flow *flow, uint64_t attempt) {
    size_t i = 0;
    TB_BISECT(i, flow->attempts.aborts.count, flow->attempts.aborts.item[i].last >= attempt);
    return i;
}

const tb__abort *tb__flow_find_abort(const tb__flow *flow, uint64_t attempt) {
    size_t at = find_abort_index(flow, attempt);
    return at < flow->attempts.aborts.count && flow->attempts.aborts.item[at].first <= attempt
               ? &flow->attempts.aborts.item[at]
               : NULL;
}

bool tb__flow_is_aborted(const tb__flow *flow, uint64_t attempt) {
    return tb__flow_find_abort(flow, attempt) != NULL;
}

/* Whether a leg has, or waits for, an attempt in the gap between before[0] and before[1]. */
static bool is_in_use(const tb__flow *flow, const tb__abort *before) {
    const tb__leg *legs[] = {&flow->send, &flow->recv};
    const uint64_t last[] = {flow->attempts.last_sent, flow->attempts.last_received};
    for (int i = 0; i < 2; i++) {
        uint64_t attempt = legs[i]->attempt ? legs[i]->attempt : last[i] + 1;
        if (legs[i]->is_under_way && attempt > before[0].last && attempt < before[1].first)
            return true;
    }
    return false;
}

/* Merges the two oldest adjacent entries. If none are adjacent, merges two with a gap between them: this rank has
 * finished the attempts in the gap, or had no part in them. A gap with a leg's current attempt is kept, because that
 * may still commit. */
static void merge_two_aborts(tb__flow *flow) {
    tb__abort *item = flow->attempts.aborts.item;
    size_t n = flow->attempts.aborts.count, at = 0;
    while (at + 1 < n && item[at].last + 1 < item[at + 1].first)
        at++;
    if (at + 1 == n) {
        for (at = 0; is_in_use(flow, &item[at]);)
            at++;
    }
    item[at + 1].first = item[at].first;
    free(item[at].why);
    memmove(item + at, item + at + 1, (--flow->attempts.aborts.count - at) * sizeof *item);
}

void tb__flow_record_abort(tb__flow *flow, uint64_t attempt, uint64_t number, tb_status status, const char *why) {
    if (tb__flow_find_abort(flow, attempt))
        return;
    tb__staged_drop_announcements(flow, attempt, attempt);
    if (flow->attempts.aborts.count == MAX_ABORTS)
        merge_two_aborts(flow);
    tb__abort abort = {attempt, attempt, number, status, NULL};
    size_t at = find_abort_index(flow, attempt);
    if (tb__flow_find_abort(flow, attempt) || !tb__vec_reserve(&flow->attempts.aborts, 1) ||
        !(abort.why = tb__strdup(why)))
        return; /* without a record, the leg ends at its deadline */
    memmove(flow->attempts.aborts.item + at + 1, flow->attempts.aborts.item + at,
            (flow->attempts.aborts.count++ - at) * sizeof *flow->attempts.aborts.item);
    flow->attempts.aborts.item[at] = abort;
}

uint64_t tb__flow_next_attempt(const tb__flow *flow, bool is_send) {
    uint64_t next = tb__flow_last_attempt(flow, is_send) + 1;
    for (const tb__abort *abort; (abort = tb__flow_find_abort(flow, next));)
        next = abort->last + 1;
    return next;
}

bool tb__flow_is_offered(const tb__flow *flow) {
    bool is_taken = flow->recv.is_under_way && flow->recv.attempt && !flow->recv.is_arrived;
    return (is_taken || tb__flow_next_attempt(flow, false) <= flow->attempts.started) &&
           flow->report.broken.status == TB_OK;
}

/* A receiver skips attempts that failed before it began. A sender skips those with lower numbers than its own. If its
 * own number has failed, it stops before that attempt and fails with it: sent with the next attempt, it would be mixed
 * with another version. Within an entry, numbers count back from the last attempt. */
void tb__flow_skip_ended(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    uint64_t *last = last_of(flow, is_send);
    for (const tb__abort *abort; (abort = tb__flow_find_abort(flow, *last + 1)); *last = abort->last) {
        if (!is_send || abort->number < leg->number)
            continue;
        uint64_t back = abort->number - leg->number, most = abort->last - (*last + 1);
        back = back < most ? back : most;
        *last = abort->last - back - 1;
        leg->number = abort->number - back;
        return;
    }
}

void tb__attempts_fini(struct flow_attempts *attempts) {
    for (size_t i = 0; i < attempts->aborts.count; i++)
        free(attempts->aborts.item[i].why);
    free(attempts->aborts.item);
    free(attempts->starts.item);
}

/* ---- Acknowledged aborts --------------------------------------------------------------------------------------- */

/* Without a lead there is one attempt only, which can't be mistaken for another. */
static bool needs_abort_acks(const tb__flow *flow) {
    return flow->o.lead < flow->nmembers;
}

void tb__flow_ack_abort(tb__flow *flow, member *to, uint64_t attempt) {
    if (needs_abort_acks(flow))
        tb__flow_tell(flow, to, MESSAGE_ABORT_ACK, attempt);
}

void tb__flow_on_abort_ack(member *from, uint64_t attempt) {
    for (int is_send = 0; is_send < 2; is_send++) {
        if (from->unacked[is_send] == attempt)
            from->unacked[is_send] = 0;
    }
}

/* A rank that knows of the failure when it begins to receive skips the attempt. So the leg does not end, for its user,
 * before all members know. Silent ones are given ABORT_ACK_MS. */
void tb__flow_await_abort_acks(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    leg->wake_ms = leg->acks_ms = tb__now_ms() + ABORT_ACK_MS;
    for (size_t i = 0; i < flow->nmembers; i++) {
        bool is_asked = i != flow->self && needs_abort_acks(flow);
        flow->members[i].unacked[is_send] = is_asked ? leg->attempt : 0;
        leg->awaits_abort_acks |= is_asked;
    }
}

/* If no further transfer can begin, acknowledgements do not matter. */
bool tb__flow_step_abort_acks(tb__flow *flow, bool is_send) {
    tb__leg *leg = tb__flow_leg(flow, is_send);
    bool is_over = flow->report.broken.status != TB_OK || flow->ngone > 0 || tb__now_ms() >= leg->acks_ms;
    if (!leg->awaits_abort_acks)
        return false;
    leg->wake_ms = leg->acks_ms;
    for (size_t i = 0; i < flow->nmembers && !is_over; i++) {
        if (flow->members[i].unacked[is_send] != 0)
            return false;
    }
    leg->awaits_abort_acks = false;
    leg->wake_ms = 0;
    return true;
}
