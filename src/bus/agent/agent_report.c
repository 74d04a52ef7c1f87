/* The agent's state as JSON: for Inspect, and for other threads of the process, which wait until the loop has written
 * it. */
#include "bus/agent/agent_inside.h"

#include "base/process.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SENTENCE = 700 };

/* "key":"text", after a comma if it is not the first member of its object. */
static void report_text(tb__text *out, const char *key, const char *text) {
    tb__text_add(out, "%s\"%s\":", out->count > 0 && out->data[out->count - 1] != '{' ? "," : "", key);
    tb__text_add_json(out, text);
}

static void report_phases(tb__text *out, const tb_transfer_state *state) {
    tb__text_add(out, "\"phases\":{");
    for (int i = 0; i < TB_PHASE_COUNT; i++)
        tb__text_add(out, "%s\"%s\":%.6f", i ? "," : "", tb_phase_name((tb_phase)i), state->phase[i]);
    tb__text_add(out, "}");
}

static void report_transfer(tb__text *out, const tb_transfer_state *state, bool is_send) {
    tb__text_add(out,
                 "{\"direction\":\"%s\",\"attempt\":%" PRIu64 ",\"bytes_done\":%" PRId64 ",\"bytes_total\":%" PRId64
                 ",\"groups_done\":%" PRIu32 ",\"groups_total\":%" PRIu32 ",\"seconds\":%.6f,\"gb_per_s\":%.3f,",
                 is_send ? "send" : "recv", state->attempt, state->bytes_done, state->bytes_total, state->groups_done,
                 state->groups_total, state->seconds,
                 state->seconds > 0 ? (double)state->bytes_done / state->seconds / 1e9 : 0.0);
    report_phases(out, state);
    tb__text_add(out, "}");
}

static void report_clients(tb__text *out, const tb__agent *agent, const agent_session *asker) {
    const char *comma = "";
    for (const agent_session *s = LIST_FIRST(&agent->sessions); s; s = LIST_NEXT(s, link)) {
        if (s == asker || s->is_gone || !s->has_greeted)
            continue;
        tb__text_add(out, "%s{", comma);
        report_text(out, "name", s->name);
        tb__text_add(out, ",\"pid\":%ld,\"commands\":%" PRIu64 ",\"under_way\":%zu}", (long)s->process.pid,
                     s->nframes - 1, s->njobs);
        comma = ",";
    }
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

static void report_pairs(tb__text *out, tb__agent *agent) {
    const char *comma = "";
    pthread_mutex_lock(&agent->pair_lock);
    for (const agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        char why[SENTENCE] = "";
        const char *state = "ready", *remote_layout = "";
        if (p->state == PAIR_ENDING)
            continue; /* a thread is destroying it */
        if (p->state == PAIR_MAKING) {
            state = "waiting";
            tb__pair_describe_wait(agent->world, p->name, why, sizeof why);
        } else {
            remote_layout = p->pair->sides[!p->pair->side].layout;
            if (!has_all_ranks(agent, p->pair, why))
                state = "lost";
        }
        tb__text_add(out, "%s{", comma);
        report_text(out, "name", p->name);
        report_text(out, "local", p->local);
        report_text(out, "remote", p->remote);
        report_text(out, "layout", p->layout);
        report_text(out, "remote_layout", remote_layout);
        tb__text_add(out, ",\"state\":\"%s\"", state);
        report_text(out, "why", why);
        tb__text_add(out, ",\"clients\":%zu,\"batches\":%zu,\"sent\":%" PRIu64 ",\"received\":%" PRIu64 "}",
                     p->users.count, p->nbatches, p->moved[1], p->moved[0]);
        comma = ",";
    }
    pthread_mutex_unlock(&agent->pair_lock);
}

/* The last questions about the transfer_signal, and the groups' answers. */
static void report_signals(tb__text *out, const agent_batch *b) {
    enum { MOST = 16 };
    tb__signal_state signals[MOST];
    size_t n = b->batch && !b->is_changing ? tb__batch_get_signals(b->batch, signals, MOST) : 0;
    for (size_t i = 0; i < n; i++) {
        tb__text_add(out, "%s{", i ? "," : "");
        report_text(out, "group", signals[i].group);
        tb__text_add(out, ",\"question\":%" PRIu64 ",\"transfer_signal\":%s}", signals[i].question,
                     signals[i].answer ? "true" : "false");
    }
}

/* This rank's part of each tensor. Shapes and layouts are of the whole. */
static void report_tensors(tb__text *out, const agent_batch *b) {
    size_t n = b->batch && !b->is_changing ? b->batch->tensors.count : 0;
    tb__text_add(out, ",\"list\":[");
    for (size_t i = 0; i < n; i++) {
        const tb__added_tensor *t = b->batch->tensors.item[i];
        int64_t nbytes = 0;
        (void)tb_shape_size(&t->binding.shape, t->binding.dtype, NULL, &nbytes);
        tb__text_add(out, "%s{", i ? "," : "");
        report_text(out, "name", t->name);
        report_text(out, "pair", t->pair->name);
        report_text(out, "dtype", t->encode ? t->encode : tb_dtype_name(t->dtype));
        tb__text_add(out, ",\"shape\":[");
        for (int d = 0; d < t->shape.ndim; d++)
            tb__text_add(out, "%s%" PRId64, d ? "," : "", t->shape.dim[d]);
        tb__text_add(out, "]");
        report_text(out, "layout", t->layout ? t->layout : t->pair->sides[t->pair->side].layout);
        tb__text_add(out, ",\"bytes\":%" PRId64, nbytes);
        report_text(out, "memory", t->mirrored.device ? t->mirrored.device : "");
        tb__text_add(out, "}");
    }
    tb__text_add(out, "]");
}

static void report_batch(tb__text *out, agent_batch *b, bool lists_tensors) {
    tb_transfer_state now[2] = {{.size = sizeof *now}, {.size = sizeof *now}}, last;
    bool is_moving[2], was_send;
    char error[TB__WHY_MAX], why[SENTENCE] = "", devices[sizeof b->devices + 16] = "";
    pthread_mutex_lock(&b->lock);
    for (int i = 0; i < 2; i++) {
        is_moving[i] = b->is_busy[i];
        if (b->transfers[i])
            tb_transfer_query(b->transfers[i], &now[i]);
    }
    last = b->last;
    was_send = b->was_send;
    snprintf(error, sizeof error, "%s", b->error);
    for (size_t i = 0, at = 0; i < sizeof b->devices / sizeof *b->devices && b->devices[i][0]; i++)
        at += (size_t)snprintf(devices + at, sizeof devices - at, "%s%s", i ? "," : "", b->devices[i]);
    uint64_t version = b->version, nbytes = 0;
    bool is_mixed = b->is_mixed, is_torn = tb__agent_is_torn(b), is_in_doubt = b->received.is_in_doubt;
    size_t ntensors = 0;
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        ntensors += b->batch_pairs.item[i].ntensors;
        nbytes += b->batch_pairs.item[i].nbytes;
    }
    if (b->registering)
        tb__batch_describe_wait(b->registering, why, sizeof why);
    bool is_ending = b->is_ending;
    pthread_mutex_unlock(&b->lock);
    const char *state = is_ending                      ? "ending"
                        : !b->batch || *why            ? "registering"
                        : is_moving[0] && is_moving[1] ? "sending and receiving"
                        : is_moving[1]                 ? "sending"
                        : is_moving[0]                 ? "receiving"
                        : *error                       ? "failed"
                                                       : "idle";
    tb__text_add(out, "{");
    report_text(out, "id", b->id);
    report_text(out, "client", b->session->name);
    tb__text_add(out, ",\"pid\":%ld,\"pairs\":[", (long)b->session->process.pid);
    for (size_t i = 0; i < b->batch_pairs.count; i++) {
        tb__text_add(out, "%s", i ? "," : "");
        tb__text_add_json(out, b->batch_pairs.item[i].pair->name);
    }
    tb__text_add(out,
                 "],\"tensors\":%zu,\"memory\":\"%s\",\"bytes\":%" PRIu64 ",\"state\":\"%s\",\"version\":%" PRIu64
                 ",\"mixed\":%s,\"torn\":%s,\"in_doubt\":%s,\"transfers\":[",
                 ntensors, devices, nbytes, state, version, is_mixed ? "true" : "false", is_torn ? "true" : "false",
                 is_in_doubt ? "true" : "false");
    for (int i = 0; i < 2; i++) {
        if (is_moving[i])
            report_transfer(out, &now[i], i == 1);
        if (i == 0 && is_moving[0] && is_moving[1])
            tb__text_add(out, ",");
    }
    tb__text_add(out, "],\"signals\":[");
    report_signals(out, b);
    tb__text_add(out, "],\"last\":");
    if (last.seconds > 0)
        report_transfer(out, &last, was_send);
    else
        tb__text_add(out, "null");
    report_text(out, "error", error);
    report_text(out, "why", why);
    if (lists_tensors)
        report_tensors(out, b);
    tb__text_add(out, "}");
}

static void report_batches(tb__text *out, const tb__agent *agent, bool lists_tensors) {
    const char *comma = "";
    for (agent_batch *b = LIST_FIRST(&agent->batches); b; b = LIST_NEXT(b, link)) {
        tb__text_add(out, "%s", comma);
        report_batch(out, b, lists_tensors);
        comma = ",";
    }
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
static void report_peers(tb__text *out, const tb_world *world) {
    const char *comma = "";
    uint64_t moved[2];
    tb__loop_lock(world->loop);
    const tb__peer *self = tb__loop_find_peer(world->loop, world->rank, world->incarnation);
    const tb__peer *all = tb__loop_peers(world->loop);
    for (const tb__peer *p = all; p; p = p->next) {
        if (p == self || !is_newest(all, p, moved))
            continue;
        tb__text_add(out, "%s{\"rank\":%" PRId32, comma, p->rank);
        report_text(out, "label", p->label);
        report_text(out, "host", p->host);
        tb__text_add(out, ",\"transport\":\"%s\",\"sent\":%" PRIu64 ",\"received\":%" PRIu64 ",\"alive\":%s",
                     p->transport->ops->name, moved[1], moved[0], p->is_lost ? "false" : "true");
        report_text(out, "why", p->is_lost && p->why ? p->why : "");
        tb__text_add(out, "}");
        comma = ",";
    }
    tb__loop_unlock(world->loop);
}

static void report_totals(tb__text *out, const tb__agent *agent) {
    static const char *const names[] = {"recv", "send"};
    for (int i = 0; i < 2; i++) {
        const agent_totals *t = &agent->totals[i];
        tb__text_add(
            out, "%s\"%s\":{\"transfers\":%" PRIu64 ",\"failures\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"seconds\":%.6f}",
            i ? "," : "", names[i], t->ndone, t->nfailed, t->nbytes, t->seconds);
    }
}

static void report_plans(tb__text *out, const tb_world *world) {
    tb__plans_state s;
    tb__plans_query(world, &s);
    tb__text_add(out,
                 "\"plans\":{\"kept\":%zu,\"bytes\":%zu,\"limit\":%zu,\"hits\":%" PRIu64 ",\"misses\":%" PRIu64
                 ",\"evicted\":%" PRIu64 "}",
                 s.kept, s.nbytes, s.limit, s.hits, s.misses, s.evicted);
}

tb_status tb__agent_make_report(tb__agent *agent, const agent_session *asker, bool lists_tensors, char **out) {
    tb__text text = {0};
    bool is_connected = tb__directory_is_connected(agent->world->directory);
    tb__text_add(&text, "{");
    report_text(&text, "group", agent->group);
    tb__text_add(&text,
                 ",\"index\":%" PRId32 ",\"size\":%" PRId32 ",\"rank\":%" PRId32 ",\"incarnation\":%" PRIu64
                 ",\"pid\":%ld,\"version\":\"%s\",\"protocol\":%d,\"state\":\"%s\",\"uptime\":%.3f",
                 agent->index, agent->size, agent->world->rank, agent->world->incarnation, (long)getpid(),
                 tb_version_string(), TB__PROTOCOL_VERSION, agent->is_stopping ? "stopping" : "serving",
                 (double)(tb__now_ms() - agent->begun_ms) / 1e3);
    tb__text_add(&text, ",\"store\":{\"connected\":%s", is_connected ? "true" : "false");
    report_text(&text, "why", is_connected ? "" : tb_error_detail());
    tb__text_add(&text, "},\"clients\":[");
    report_clients(&text, agent, asker);
    tb__text_add(&text, "],\"pairs\":[");
    report_pairs(&text, agent);
    tb__text_add(&text, "],\"batches\":[");
    report_batches(&text, agent, lists_tensors);
    tb__text_add(&text, "],\"peers\":[");
    report_peers(&text, agent->world);
    tb__text_add(&text, "],\"totals\":{");
    report_totals(&text, agent);
    tb__text_add(&text, "},");
    report_plans(&text, agent->world);
    tb__text_add(&text, "}");
    return tb__text_take(&text, out);
}

void tb__agent_serve_reports(tb__agent *agent) {
    pthread_mutex_lock(&agent->report_lock);
    uint64_t asked = agent->nasked;
    bool is_due = asked > agent->nreports;
    pthread_mutex_unlock(&agent->report_lock);
    if (!is_due)
        return;
    char *report = NULL;
    tb__agent_make_report(agent, NULL, false, &report);
    pthread_mutex_lock(&agent->report_lock);
    free(agent->report);
    agent->report = report;
    agent->nreports = asked;
    pthread_cond_broadcast(&agent->report_made);
    pthread_mutex_unlock(&agent->report_lock);
}

tb_status tb__agent_report(tb__agent *agent, int timeout_ms, char **out) {
    struct timespec deadline = tb__time_of_ms(tb__now_ms() + timeout_ms);
    char *copy = NULL;
    int error = 0;
    pthread_mutex_lock(&agent->report_lock);
    uint64_t mine = ++agent->nasked;
    tb__endpoint_wake(&agent->endpoint);
    while (agent->nreports < mine && error == 0)
        error = pthread_cond_timedwait(&agent->report_made, &agent->report_lock, &deadline);
    bool is_there = agent->nreports >= mine;
    if (is_there && agent->report)
        copy = tb__strdup(agent->report);
    pthread_mutex_unlock(&agent->report_lock);
    if (!is_there)
        return tb__fail(TB_TIMEOUT, "the agent's loop has not answered in %d ms", timeout_ms);
    if (!copy)
        return tb__fail(TB_NO_MEMORY, "no memory for a report");
    *out = copy;
    return TB_OK;
}
