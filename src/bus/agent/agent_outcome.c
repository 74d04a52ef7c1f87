/* Results of transfers, by pair of a batch: the client's version, and why the last transfer failed; and delivery to the
 * client's memory. */
#include "bus/agent/agent_inside.h"

#include <stdio.h>
#include <string.h>

/* Of the groups of tensors from `first` to before `last`. Gives the lock up while it writes. */
static tb_status write_back_unless_abandoned(agent_batch *b, const tb_pair *pair, uint64_t first, uint64_t last) {
    tb__agent *agent = b->session->agent;
    while (b->is_delivering)
        pthread_cond_wait(&agent->changed, &agent->lock);
    if (b->is_abandoned)
        return tb__fail(TB_LOST, "the client of batch '%.100s' is gone", b->id);
    b->is_delivering = true;
    tb__agent_unlock(agent);
    tb_status status = tb__agent_write_mirrors(b, pair, first, last);
    tb__agent_lock(agent);
    b->is_delivering = false;
    pthread_cond_broadcast(&agent->changed);
    return status;
}

/* With shadow, what has arrived is not in the tensors yet. */
tb_status tb__agent_deliver_groups(agent_batch *b, uint32_t group) {
    uint64_t last = (uint64_t)group + 1;
    if (b->batch->opts.commit == TB_SHADOW || !tb__agent_has_mirrors(b))
        return TB_OK;
    uint64_t first = b->ngroups;
    b->ngroups = last > first ? last : first;
    for (size_t i = 0; i < b->batch_pairs.count && first < last; i++)
        TB_TRY(write_back_unless_abandoned(b, b->batch_pairs.item[i].held, first, last));
    return TB_OK;
}

static tb_status deliver_version(agent_batch *b, agent_batch_pair *s, uint64_t version) {
    tb_status status = write_back_unless_abandoned(b, s->held, 0, UINT64_MAX);
    s->committed = version;
    s->is_undelivered = status != TB_OK;
    s->is_torn = s->is_undelivered;
    if (status == TB_OK)
        s->version = s->received = version;
    return status;
}

static void keep_first(tb_status status, tb_status *first, char why[TB__WHY_MAX]) {
    if (status == TB_OK || *first != TB_OK)
        return;
    *first = status;
    snprintf(why, TB__WHY_MAX, "%s", tb_error_detail());
}

tb_status tb__agent_deliver_late(agent_batch *b) {
    tb_status first = TB_OK;
    char why[TB__WHY_MAX];
    uint64_t version;
    bool is_torn;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        agent_batch_pair *s = &b->batch_pairs.item[i];
        if (tb_batch_version(b->batch, s->held, &version, &is_torn) != TB_OK || s->committed == version)
            continue; /* a send and a receive may both check */
        keep_first(deliver_version(b, s, version), &first, why);
    }
    tb__agent_update_version(b);
    return first == TB_OK ? TB_OK : tb__fail(first, "%s", why);
}

/* Records the result of one pair. Returns a failure to write the client's memory. */
static tb_status record_pair_outcome(agent_batch *b, agent_batch_pair *s, const tb_transfer *t, bool is_send,
                                     tb_status status, const char *why) {
    tb_transfer_state state = {.size = sizeof state, .status = status};
    uint64_t version = 0;
    bool is_torn = false, has_part = t && tb_transfer_pair(t, s->held, &state) == TB_OK;
    char detail[TB__WHY_MAX];
    s->moved[is_send] = (uint64_t)state.bytes_done;
    snprintf(detail, sizeof detail, "%s", has_part ? tb_error_detail() : why);
    bool was_received = !is_send && tb_batch_version(b->batch, s->held, &version, &is_torn) == TB_OK;
    tb_status delivered = TB_OK;
    if (was_received && (state.version > 0 || s->committed != version)) {
        delivered = deliver_version(b, s, version);
        if (delivered != TB_OK)
            snprintf(detail, sizeof detail, "%s", tb_error_detail());
    }
    s->status = delivered == TB_OK ? state.status : delivered;
    snprintf(s->why, sizeof s->why, "%s", s->status == TB_OK ? "" : detail);
    if (is_send && state.version > 0)
        s->version = state.version;
    if (was_received) /* if the transfer has failed, groups that had arrived before are in the client's memory */
        s->is_torn = is_torn || s->is_undelivered || (s->status != TB_OK && b->ngroups > 0);
    return delivered == TB_OK ? TB_OK : tb__fail(delivered, "%s", detail);
}

void tb__agent_record_end(agent_batch *b, const tb_transfer *t, bool is_send, tb_status *status,
                          char why[TB__WHY_MAX]) {
    tb_status first = TB_OK;
    char detail[TB__WHY_MAX] = "";
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        keep_first(record_pair_outcome(b, &b->batch_pairs.item[i], t, is_send, *status, why), &first, detail);
    tb__agent_update_version(b);
    b->is_delivered |= first == TB_OK && !is_send;
    if (first != TB_OK && *status == TB_OK) {
        *status = first;
        memcpy(why, detail, sizeof detail);
    }
}

void tb__agent_update_version(agent_batch *b) {
    tb__versions versions = TB__NO_VERSIONS, received = TB__NO_VERSIONS;
    bool is_delivered = true;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        tb__versions_add(&versions, b->batch_pairs.item[i].version);
        tb__versions_add(&received, b->batch_pairs.item[i].received);
        is_delivered &= !b->batch_pairs.item[i].is_undelivered;
    }
    b->is_mixed = tb__versions_differ(&versions);
    tb__versions_update_common(&versions, &b->version);
    tb_batch_state state = {.size = sizeof state};
    if (!b->batch || tb_batch_query(b->batch, &state) != TB_OK)
        return;
    if (is_delivered)
        b->received = state;
    else
        b->received.is_mixed = tb__versions_differ(&received);
    b->received.is_torn = state.is_torn || tb__agent_is_torn(b);
    b->received.is_in_doubt = state.is_in_doubt;
}

/* Mirrored tensors count as received when they were delivered. */
tb_batch_state tb__agent_get_received(agent_batch *b) {
    tb_batch_state now = {.size = sizeof now}, state;
    bool is_known = b->batch && !b->is_changing && tb_batch_query(b->batch, &now) == TB_OK;
    if (is_known && !tb__agent_has_mirrors(b))
        return now;
    state = b->received;
    state.transfer_signal = now.transfer_signal;
    return state;
}

void tb__agent_put_states(agent_job *job, agent_batch *b, const tb_transfer *t, unsigned events, tb__message *out) {
    size_t n = b->batch_pairs.count;
    tb__entry *item = tb__arena_alloc(&job->arena, n + 1, sizeof *item);
    tb_batch_state received = tb__agent_get_received(b);
    tb__state_payload all = {.state.size = sizeof all.state,
                             .received = received.version,
                             .is_torn = received.is_torn,
                             .is_mixed = received.is_mixed,
                             .is_in_doubt = received.is_in_doubt};
    if (!item || (t && tb_transfer_query(t, &all.state) != TB_OK))
        return;
    all.message = all.state.status == TB_OK ? "" : tb_error_detail();
    all.state.events = events;
    item[0].pair_name = "";
    tb_status status = tb__map_encode_kept(&tb__state_schema, &all, &job->arena, &item[0].payload);
    for (size_t i = 0; i < n && status == TB_OK; i++) {
        const agent_batch_pair *s = &b->batch_pairs.item[i];
        char why[TB__WHY_MAX] = "";
        tb__state_payload p = {.state.size = sizeof p.state, .message = why};
        if (t && tb_transfer_pair(t, s->held, &p.state) == TB_OK && p.state.status != TB_OK)
            snprintf(why, sizeof why, "%s", tb_error_detail());
        if (strcmp(s->pair->local, job->agent->group) != 0)
            p.side = s->pair->local;
        if (s->is_undelivered && s->status != TB_OK) {
            p.state.status = s->status;
            snprintf(why, sizeof why, "%s", s->why);
        }
        p.received = s->received;
        p.is_torn = s->is_torn;
        p.state.events &= events | ~(unsigned)(TB_ARRIVED | TB_COMMITTED);
        item[i + 1].pair_name = s->pair->name;
        status = tb__map_encode_kept(&tb__state_schema, &p, &job->arena, &item[i + 1].payload);
    }
    if (status == TB_OK)
        out->states = (tb__entries){n + 1, item};
}

bool tb__agent_is_torn(const agent_batch *b) {
    bool torn = false;
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        torn |= b->batch_pairs.item[i].is_torn;
    return torn;
}

void tb__agent_put_outcomes(agent_job *job, agent_batch *b, tb__message *reply) {
    size_t n = b->batch_pairs.count;
    tb__outcome *item = tb__arena_alloc(&job->arena, n, sizeof *item);
    if (!item)
        return;
    for (size_t i = 0; i < n; i++) {
        const agent_batch_pair *s = &b->batch_pairs.item[i];
        item[i] = (tb__outcome){.pair_name = s->pair->name,
                                .status = s->status,
                                .message = s->why,
                                .version = job->session->protocol > 1 ? s->received : s->version,
                                .is_torn = s->is_torn};
    }
    reply->pairs = (tb__outcomes){.count = n, .item = item};
}
