/* Results of transfers, by pair of a batch: which version the client has, why the last transfer failed; and delivery to
 * the client's memory. */
#include "bus/agent/agent_inside.h"

#include <stdio.h>
#include <string.h>

/* ---- Delivery -------------------------------------------------------------------------------------------------- */

static tb_status write_back_unless_abandoned(agent_batch *b, const tb_pair *pair) {
    pthread_mutex_lock(&b->lock);
    bool is_abandoned = b->is_abandoned;
    pthread_mutex_unlock(&b->lock);
    return is_abandoned ? tb__fail(TB_LOST, "the client of batch '%.100s' is gone", b->id)
                        : tb__agent_write_mirrors(b, pair);
}

/* Whether the version is delivered already: a send and a receive may both check. */
static bool has_version(agent_batch *b, const agent_batch_pair *s, uint64_t version) {
    pthread_mutex_lock(&b->lock);
    bool is_known = s->committed == version;
    pthread_mutex_unlock(&b->lock);
    return is_known;
}

static tb_status deliver_version(agent_batch *b, agent_batch_pair *s, uint64_t version) {
    tb_status status = write_back_unless_abandoned(b, s->held);
    pthread_mutex_lock(&b->lock);
    s->committed = version;
    s->is_undelivered = status != TB_OK;
    s->is_torn = s->is_undelivered;
    if (status == TB_OK)
        s->version = version;
    pthread_mutex_unlock(&b->lock);
    return status;
}

tb_status tb__agent_deliver_late(agent_batch *b) {
    tb_status first = TB_OK;
    char why[TB__WHY_MAX];
    uint64_t version;
    bool is_torn;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        agent_batch_pair *s = &b->batch_pairs.item[i];
        if (tb_batch_version(b->batch, s->held, &version, &is_torn) != TB_OK || has_version(b, s, version))
            continue;
        tb_status status = deliver_version(b, s, version);
        if (status != TB_OK && first == TB_OK) {
            first = status;
            snprintf(why, sizeof why, "%s", tb_error_detail());
        }
    }
    tb__agent_update_version(b);
    return first == TB_OK ? TB_OK : tb__fail(first, "%s", why);
}

/* ---- The end of a transfer ------------------------------------------------------------------------------------- */

/* Records the result of one pair. Returns a failure to write the client's memory. */
static tb_status record_pair_outcome(agent_batch *b, agent_batch_pair *s, const tb_transfer *t, bool is_send,
                                     tb_status status, const char *why) {
    tb_transfer_state state = {.size = sizeof state, .status = status};
    uint64_t version = 0;
    bool is_torn = false, has_part = t && tb_transfer_pair(t, s->held, &state) == TB_OK;
    char detail[TB__WHY_MAX];
    snprintf(detail, sizeof detail, "%s", has_part ? tb_error_detail() : why);
    bool was_received = !is_send && tb_batch_version(b->batch, s->held, &version, &is_torn) == TB_OK;
    tb_status delivered = TB_OK;
    if (was_received && (state.version > 0 || !has_version(b, s, version))) {
        delivered = deliver_version(b, s, version);
        if (delivered != TB_OK)
            snprintf(detail, sizeof detail, "%s", tb_error_detail());
    }
    pthread_mutex_lock(&b->lock);
    s->status = delivered == TB_OK ? state.status : delivered;
    snprintf(s->why, sizeof s->why, "%s", s->status == TB_OK ? "" : detail);
    if (is_send && state.version > 0)
        s->version = state.version;
    if (was_received)
        s->is_torn = is_torn || s->is_undelivered;
    pthread_mutex_unlock(&b->lock);
    return delivered == TB_OK ? TB_OK : tb__fail(delivered, "%s", detail);
}

tb_status tb__agent_record_end(agent_batch *b, const tb_transfer *t, bool is_send, tb_status status, const char *why) {
    tb_status first = TB_OK;
    char detail[TB__WHY_MAX];
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        tb_status delivered = record_pair_outcome(b, &b->batch_pairs.item[i], t, is_send, status, why);
        if (delivered != TB_OK && first == TB_OK) {
            first = delivered;
            snprintf(detail, sizeof detail, "%s", tb_error_detail());
        }
    }
    tb__agent_update_version(b);
    return first == TB_OK ? TB_OK : tb__fail(first, "%s", detail);
}

void tb__agent_update_version(agent_batch *b) {
    pthread_mutex_lock(&b->lock);
    tb__versions versions = TB__NO_VERSIONS;
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        tb__versions_add(&versions, b->batch_pairs.item[i].version);
    b->is_mixed = tb__versions_differ(&versions);
    tb__versions_update_common(&versions, &b->version);
    pthread_mutex_unlock(&b->lock);
}

/* ---- What is told ---------------------------------------------------------------------------------------------- */

bool tb__agent_is_torn(const agent_batch *b) {
    bool torn = false;
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        torn |= b->batch_pairs.item[i].is_torn;
    return torn;
}

void tb__agent_put_outcomes(agent_job *job, agent_batch *b, tb__message *reply) {
    size_t n = b->batch_pairs.count;
    tb__outcome *item = tb__arena_alloc(&job->arena, n, sizeof *item);
    char(*why)[TB__WHY_MAX] = tb__arena_alloc(&job->arena, n, sizeof *why);
    if (!item || !why)
        return;
    pthread_mutex_lock(&b->lock);
    for (size_t i = 0; i < n; i++) {
        const agent_batch_pair *s = &b->batch_pairs.item[i];
        memcpy(why[i], s->why, sizeof why[i]);
        item[i] = (tb__outcome){.pair_name = s->pair->name,
                                .status = s->status,
                                .message = why[i],
                                .version = s->version,
                                .is_torn = s->is_torn};
    }
    pthread_mutex_unlock(&b->lock);
    reply->pairs = (tb__outcomes){.count = n, .item = item};
}

void tb__agent_record_moved(agent_job *job, const tb_transfer *t) {
    const agent_batch *b = job->batch;
    const char *name;
    int64_t done;
    job->moved = tb__arena_alloc(&job->arena, b->batch_pairs.count, sizeof *job->moved);
    if (!job->moved)
        return;
    memset(job->moved, 0, b->batch_pairs.count * sizeof *job->moved);
    for (size_t i = 0; tb__transfer_pair_bytes(t, i, &name, &done); i++) {
        for (size_t j = 0; j < b->batch_pairs.count; j++) {
            if (strcmp(b->batch_pairs.item[j].pair->name, name) == 0)
                job->moved[j] += done;
        }
    }
}
