/* The agent's state as JSON: for Inspect, and for other threads of the process. */
#include "bus/agent/agent_inside.h"

#include "base/process.h"
#include "base/text.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SENTENCE = 700 };

/* A JSON string; invalid UTF-8 becomes ?. */
static json_t *text(const char *string) {
    json_t *json = json_string(string);
    char *clean = json ? NULL : tb__strdup(string);
    for (char *at = clean; at && *at;) {
        int length = tb__utf8_length(at);
        if (length == 0)
            *at = '?';
        at += length ? length : 1;
    }
    if (clean)
        json = json_string(clean);
    free(clean);
    return json;
}

static json_int_t number(uint64_t value) {
    return (json_int_t)value;
}

static json_t *report_transfer(const tb_transfer_state *state, bool is_send) {
    json_t *phases = json_object();
    for (int i = 0; i < TB_PHASE_COUNT; i++)
        json_object_set_new(phases, tb_phase_name((tb_phase)i), json_real(state->phase[i]));
    return json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:o}", "direction", is_send ? "send" : "recv", "attempt",
                     number(state->attempt), "bytes_done", state->bytes_done, "bytes_total", state->bytes_total,
                     "groups_done", number(state->groups_done), "groups_total", number(state->groups_total), "seconds",
                     state->seconds, "gb_per_s",
                     state->seconds > 0 ? (double)state->bytes_done / state->seconds / 1e9 : 0.0, "phases", phases);
}

static json_t *report_clients(const tb__agent *agent, const agent_session *asker) {
    json_t *all = json_array();
    for (const agent_session *s = LIST_FIRST(&agent->sessions); s; s = LIST_NEXT(s, link)) {
        if (s != asker && !s->is_gone && s->has_greeted)
            json_array_append_new(all, json_pack("{s:o,s:I,s:I,s:I}", "name", text(s->name), "pid",
                                                 (json_int_t)s->process.pid, "commands", number(s->nframes - 1),
                                                 "under_way", number(s->njobs)));
    }
    return all;
}

/* Whether no rank of the pair is lost; `why` names a lost one. */
static bool has_all_ranks(const tb__agent *agent, const tb_pair *pair, char why[SENTENCE]) {
    bool is_lost = false;
    tb__loop_lock(agent->world->loop);
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < pair->sides[side].size && !is_lost; i++) {
            const tb__peer *peer = pair->sides[side].peers[i];
            is_lost = peer->is_lost;
            if (is_lost)
                snprintf(why, SENTENCE, "%s was lost: %s", peer->label, peer->why ? peer->why : "it is gone");
        }
    }
    tb__loop_unlock(agent->world->loop);
    return !is_lost;
}

static json_t *report_pair(const tb__agent *agent, const agent_pair *p) {
    char why[SENTENCE] = "";
    const char *state = "ready", *remote_layout = "";
    if (p->state == PAIR_MAKING) {
        state = "waiting";
        tb__pair_describe_wait(agent->world, p->name, why, sizeof why);
    } else {
        remote_layout = p->pair->sides[!p->pair->side].layout;
        if (!has_all_ranks(agent, p->pair, why))
            state = "lost";
    }
    return json_pack("{s:o,s:o,s:o,s:o,s:o,s:s,s:o,s:I,s:I,s:I,s:I}", "name", text(p->name), "local", text(p->local),
                     "remote", text(p->remote), "layout", text(p->layout), "remote_layout", text(remote_layout),
                     "state", state, "why", text(why), "clients", number(p->users.count), "batches",
                     number(p->nbatches), "sent", number(p->moved[1]), "received", number(p->moved[0]));
}

static json_t *report_pairs(tb__agent *agent) {
    json_t *all = json_array();
    for (const agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        if (p->state != PAIR_ENDING) /* a thread is destroying it */
            json_array_append_new(all, report_pair(agent, p));
    }
    return all;
}

/* The last transfers that ended, the newest at the end. */
static json_t *report_past(const agent_batch *b) {
    json_t *all = json_array();
    for (uint64_t i = b->npast > TB__AGENT_MAX_PAST ? b->npast - TB__AGENT_MAX_PAST : 0; i < b->npast; i++) {
        const agent_past *past = &b->past[i % TB__AGENT_MAX_PAST];
        json_t *transfer = report_transfer(&past->state, past->is_send);
        json_object_set_new(transfer, "version", json_integer((json_int_t)past->state.version));
        json_object_set_new(transfer, "succeeded", json_boolean(past->status == TB_OK));
        json_object_set_new(transfer, "when", json_real(past->when));
        json_array_append_new(all, transfer);
    }
    return all;
}

/* NULL: it is being changed, or destroyed. */
static const tb_batch *get_stable(const agent_batch *b) {
    return b->is_changing || b->is_ending ? NULL : b->batch;
}

/* The last questions about the transfer_signal, and the groups' answers. */
static json_t *report_signals(const agent_batch *b) {
    enum { MOST = 16 };
    tb__signal_state signals[MOST];
    json_t *all = json_array();
    const tb_batch *batch = get_stable(b);
    size_t n = batch ? tb__batch_get_signals(batch, signals, MOST) : 0;
    for (size_t i = 0; i < n; i++)
        json_array_append_new(all, json_pack("{s:o,s:I,s:b}", "group", text(signals[i].group), "question",
                                             number(signals[i].question), "transfer_signal", signals[i].answer));
    return all;
}

/* This rank's part of each tensor. Shapes and layouts are of the whole. */
static json_t *report_tensors(const agent_batch *b) {
    const tb_batch *batch = get_stable(b);
    size_t n = batch ? batch->tensors.count : 0;
    json_t *all = json_array();
    for (size_t i = 0; i < n; i++) {
        const tb__added_tensor *t = batch->tensors.item[i];
        int64_t nbytes = 0;
        json_t *shape = json_array();
        (void)tb_shape_size(&t->binding.shape, t->binding.dtype, NULL, &nbytes);
        for (int d = 0; d < t->shape.ndim; d++)
            json_array_append_new(shape, json_integer(t->shape.dim[d]));
        const char *layout = t->layout ? t->layout : t->pair->sides[t->pair->side].layout;
        json_array_append_new(all, json_pack("{s:o,s:o,s:o,s:o,s:o,s:I,s:o}", "name", text(t->name), "pair",
                                             text(t->pair->name), "dtype",
                                             text(t->encode ? t->encode : tb_dtype_name(t->dtype)), "shape", shape,
                                             "layout", text(layout), "bytes", nbytes, "memory",
                                             text(t->mirrored.device ? t->mirrored.device : "")));
    }
    return all;
}

static json_t *report_batch(agent_batch *b, bool lists_tensors) {
    char why[SENTENCE] = "", devices[sizeof b->devices + 16] = "";
    json_t *pairs = json_array(), *transfers = json_array();
    for (int i = 0; i < 2; i++) {
        tb_transfer_state now = {.size = sizeof now};
        if (b->transfers[i])
            tb_transfer_query(b->transfers[i], &now);
        if (b->busy[i])
            json_array_append_new(transfers, report_transfer(&now, i == 1));
    }
    for (size_t i = 0, at = 0; i < TB__AGENT_MAX_DEVICES && b->devices[i][0]; i++)
        at += (size_t)snprintf(devices + at, sizeof devices - at, "%s%s", i ? "," : "", b->devices[i]);
    uint64_t nbytes = 0;
    size_t ntensors = 0;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        json_array_append_new(pairs, text(b->batch_pairs.item[i].pair->name));
        ntensors += b->batch_pairs.item[i].ntensors;
        nbytes += b->batch_pairs.item[i].nbytes;
    }
    if (b->registering)
        tb__batch_describe_wait(b->registering, why, sizeof why);
    const char *state = b->is_ending               ? "ending"
                        : !b->batch || *why        ? "registering"
                        : b->busy[0] && b->busy[1] ? "sending and receiving"
                        : b->busy[1]               ? "sending"
                        : b->busy[0]               ? "receiving"
                        : *b->error                ? "failed"
                                                   : "idle";
    json_t *history = report_past(b);
    json_t *last = json_array_size(history) > 0 ? json_array_get(history, json_array_size(history) - 1) : NULL;
    json_t *batch = json_pack(
        "{s:o,s:o,s:I,s:o,s:I,s:o,s:I,s:s,s:I,s:b,s:b,s:b,s:o,s:o,s:O?,s:o,s:o,s:o}", "id", text(b->id), "client",
        text(b->session->name), "pid", (json_int_t)b->session->process.pid, "pairs", pairs, "tensors", number(ntensors),
        "memory", text(devices), "bytes", number(nbytes), "state", state, "version", number(b->version), "mixed",
        b->is_mixed, "torn", tb__agent_is_torn(b), "in_doubt", b->received.is_in_doubt, "transfers", transfers,
        "signals", report_signals(b), "last", last, "history", history, "error", text(b->error), "why", text(why));
    if (lists_tensors)
        json_object_set_new(batch, "list", report_tensors(b));
    return batch;
}

/* Whether this is the newest connection with the newest incarnation of its rank; the newest is first in the list.
 * `moved` has the bytes of all connections with the rank. */
static bool is_newest(const tb__peer *all, const tb__peer *peer, uint64_t moved[2]) {
    bool is_newest = true, is_behind = true;
    moved[0] = moved[1] = 0;
    for (const tb__peer *p = all; p; p = p->next) {
        if (p->rank != peer->rank)
            continue;
        is_behind &= p != peer;
        is_newest &= p->incarnation < peer->incarnation || (p->incarnation == peer->incarnation && !is_behind);
        moved[0] += p->moved[0];
        moved[1] += p->moved[1];
    }
    return is_newest;
}

/* All ranks but this one. */
static json_t *report_peers(const tb_world *world) {
    json_t *peers = json_array();
    uint64_t moved[2];
    tb__loop_lock(world->loop);
    const tb__peer *self = tb__loop_find_peer(world->loop, world->rank, world->incarnation);
    const tb__peer *all = tb__loop_peers(world->loop);
    for (const tb__peer *p = all; p; p = p->next) {
        if (p == self || !is_newest(all, p, moved))
            continue;
        json_array_append_new(peers,
                              json_pack("{s:I,s:o,s:o,s:s,s:I,s:I,s:b,s:o}", "rank", (json_int_t)p->rank, "label",
                                        text(p->label), "host", text(p->host), "transport", p->transport->ops->name,
                                        "sent", number(moved[1]), "received", number(moved[0]), "alive", !p->is_lost,
                                        "why", text(p->is_lost && p->why ? p->why : "")));
    }
    tb__loop_unlock(world->loop);
    return peers;
}

/* [bound, count] of each bound */
static json_t *report_histogram(double first, const agent_histogram *histogram) {
    json_t *pairs = json_array();
    double bound = first;
    for (int i = 0; i < AGENT_BOUNDS; i++, bound *= 4)
        json_array_append_new(pairs, json_pack("[f,I]", bound, number(histogram->count[i])));
    return pairs;
}

static json_t *report_totals(const agent_totals *t) {
    return json_pack("{s:I,s:I,s:I,s:f,s:o,s:o}", "transfers", number(t->ndone), "failures", number(t->nfailed),
                     "bytes", number(t->nbytes), "seconds", t->seconds, "by_seconds",
                     report_histogram(AGENT_FIRST_SECONDS, &t->by_seconds), "by_bytes",
                     report_histogram(AGENT_FIRST_NBYTES, &t->by_nbytes));
}

static json_t *report_plans(const tb_world *world) {
    tb__plans_state s = {0};
    tb__local_world_plans(world, &s);
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I}", "kept", number(s.kept), "bytes", number(s.nbytes), "limit",
                     number(s.limit), "hits", number(s.hits), "misses", number(s.misses), "evicted", number(s.evicted));
}

tb_status tb__agent_make_report(tb__agent *agent, const agent_session *asker, bool lists_tensors, char **out) {
    bool is_connected = tb__directory_is_connected(agent->world->directory);
    json_t *store =
        json_pack("{s:b,s:o}", "connected", is_connected, "why", text(is_connected ? "" : tb_error_detail()));
    json_t *batches = json_array();
    for (agent_batch *b = LIST_FIRST(&agent->batches); b; b = LIST_NEXT(b, link))
        json_array_append_new(batches, report_batch(b, lists_tensors));
    json_t *report = json_pack("{s:o,s:I,s:I,s:I,s:I,s:I,s:s,s:I,s:s,s:f,s:o,s:o,s:o,s:o,s:o,s:{s:o,s:o},s:o}", "group",
                               text(agent->group), "index", (json_int_t)agent->index, "size", (json_int_t)agent->size,
                               "rank", (json_int_t)agent->world->rank, "incarnation", number(agent->world->incarnation),
                               "pid", (json_int_t)getpid(), "version", tb_version_string(), "protocol",
                               (json_int_t)TB__PROTOCOL_VERSION, "state", agent->is_stopping ? "stopping" : "serving",
                               "uptime", (double)(tb__now_ms() - agent->begun_ms) / 1e3, "store", store, "clients",
                               report_clients(agent, asker), "pairs", report_pairs(agent), "batches", batches, "peers",
                               report_peers(agent->world), "totals", "recv", report_totals(&agent->totals[0]), "send",
                               report_totals(&agent->totals[1]), "plans", report_plans(agent->world));
    *out = report ? json_dumps(report, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(report);
    return *out ? TB_OK : tb__fail(TB_NO_MEMORY, "no memory for a report");
}

tb_status tb__agent_report(tb__agent *agent, int timeout_ms, char **out) {
    int64_t until_ms = tb__now_ms() + timeout_ms;
    while (pthread_mutex_trylock(&agent->lock) != 0) {
        if (tb__now_ms() >= until_ms)
            return tb__fail(TB_TIMEOUT, "the agent's loop has not answered in %d ms", timeout_ms);
        tb__sleep_ms(1); /* ThreadSanitizer does not know pthread_mutex_clocklock */
    }
    tb_status status = tb__agent_make_report(agent, NULL, false, out);
    tb__agent_unlock(agent);
    return status;
}
