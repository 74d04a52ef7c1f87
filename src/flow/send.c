/* The sending side of one transfer: expose, serve, wait until everybody is done. */
#include "flow/flow_inside.h"

#include <inttypes.h>

static uint64_t word_of(uint64_t attempt, unsigned state) {
    return attempt << 2 | state;
}

static bool all_have_reach(const tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_reader && !flow->members[i].has_reach)
            return false;
    }
    return true;
}

/* Once nobody needs what this rank is going to overwrite any more, it may. A rank whose sources are out of reach, in a
 * snapshot, waits for nobody: readers put things aside for reasons of their own, too, and may need this rank to get
 * there. */
static void try_open(tb__flow *flow) {
    for (size_t i = 0; flow->overwrites_any_source && i < flow->nmembers; i++) {
        if (flow->members[i].is_reader && flow->members[i].stashes && !flow->members[i].has_stashed)
            return;
    }
    flow->writable_attempt = flow->send.attempt;
}

void tb__flow_on_stashed(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->send_is_exposed || flow->send.attempt != attempt)
        return;
    from->has_stashed = true;
    try_open(flow);
}

static void note_served(tb__flow *flow) {
    flow->send.is_complete = flow->readers_left == 0 && flow->committers_left == 0;
}

static void end_snapshot(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    flow->is_taking_snapshot = false;
    if (status != TB_OK && !flow->send.is_ending)
        tb__flow_abort(flow, true, status);
}

static tb_status take_snapshot(tb__flow *flow) {
    copying *c = tb__flow_new_copying(flow, true, COPY_SNAPSHOT, 0);
    if (!c)
        return TB_NO_MEMORY;
    flow->snapshot_attempt = flow->send.attempt;
    flow->is_taking_snapshot = true;
    c->end = end_snapshot;
    tb_status status = tb__flow_start_copying(c);
    flow->is_taking_snapshot &= status == TB_OK;
    return status;
}

static tb_status expose(tb__flow *flow) {
    tb__leg *leg = &flow->send;
    tb__staged_open_send(flow);
    flow->readers_left = flow->committers_left = 0;
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (!m->is_reader)
            continue;
        m->has_stashed = m->is_done = m->has_committed = false;
        flow->readers_left++;
        flow->committers_left += flow->o.shadow.is_used;
        atomic_store(m->word, word_of(leg->attempt, EXPOSURE_READY));
    }
    flow->send_is_exposed = true;
    try_open(flow);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].is_reader)
            tb__flow_tell(flow, &flow->members[i], MESSAGE_READY, leg->attempt);
    }
    leg->is_released = flow->snapshot_of != NULL;
    note_served(flow);
    return TB_OK;
}

void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->send_is_exposed || flow->send.attempt != attempt || from->is_done || !from->is_reader)
        return;
    tb__flow_on_stashed(flow, from, attempt); /* of one that is gone, the message may be lost */
    from->is_done = true;
    flow->readers_left--;
    flow->send.bytes_done += from->reads_nbytes;
    from->peer->moved[1] += (uint64_t)from->reads_nbytes;
    note_served(flow);
}

void tb__flow_read_word(tb__flow *flow, member *reader) {
    if (reader->word && atomic_load(reader->word) == word_of(flow->send.attempt, EXPOSURE_COMPLETE))
        tb__flow_on_done(flow, reader, flow->send.attempt);
}

void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->send_is_exposed || flow->send.attempt != attempt || from->has_committed || !from->is_reader)
        return;
    from->has_committed = true;
    flow->committers_left -= flow->o.shadow.is_used;
    note_served(flow);
}

bool tb__flow_is_served(const tb__flow *flow, const member *reader) {
    return reader->is_done && (reader->has_committed || !flow->o.shadow.is_used);
}

void tb__flow_revoke(tb__flow *flow) {
    if (!flow->send_is_exposed)
        return;
    flow->send_is_exposed = false;
    for (size_t i = 0; i < flow->nmembers; i++) {
        uint64_t ready = word_of(flow->send.attempt, EXPOSURE_READY);
        if (flow->members[i].is_reader)
            atomic_compare_exchange_strong(flow->members[i].word, &ready,
                                           word_of(flow->send.attempt, EXPOSURE_REVOKED));
    }
}

bool tb__flow_step_send(tb__flow *flow) {
    tb__leg *leg = &flow->send;
    tb_status status = tb__flow_send_binds(flow);
    if (status == TB_OK && (!tb__flow_take_attempt(flow, true) || !all_have_reach(flow)))
        return false;
    if (status == TB_OK && !flow->send_is_exposed) {
        if (flow->is_taking_snapshot)
            return false;
        status = tb__flow_check_memory(flow, true);
        if (status == TB_OK)
            status = flow->snapshot_of && flow->snapshot_attempt != leg->attempt ? take_snapshot(flow) : expose(flow);
        if (status == TB_OK)
            return true;
    }
    if (status != TB_OK) {
        tb__flow_abort(flow, true, status);
        return true;
    }
    if (tb__staged_step_out(flow) || tb__staged_step_reduce(flow, true))
        return true;
    if (flow->readers_left > 0 || flow->staged.sends_left > 0)
        return false;
    bool was_released = leg->is_released;
    leg->is_released = true;
    return !was_released;
}
