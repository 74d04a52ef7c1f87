/* The agent's loop. */
#include "bus/agent/agent_inside.h"

#include "base/log.h"
#include "base/process.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 30000 };

static tb_status open_agent(tb__agent *agent, const tb__agent_opts *o) {
    char url[TB__STORE_MAX_URL + 1];
    tb__address address;
    if (strlen(o->socket) >= sizeof address.path)
        return tb__fail(TB_INVALID, "the path of the agent's socket has %zu bytes, and may have %zu: %.200s",
                        strlen(o->socket), sizeof address.path - 1, o->socket);
    snprintf(url, sizeof url, "unix:%s", o->socket);
    TB_TRY(tb__address_parse(url, &address));
    TB_TRY(tb__endpoint_open(&agent->endpoint, &address, true));
    tb_world_opts world = {.size = sizeof world,
                           .token = o->token,
                           .timeout_ms = agent->timeout_ms,
                           .workers = o->workers,
                           .transport = o->transport,
                           .host = o->host,
                           .plan_bytes = o->plan_bytes};
    return tb_world_join(o->store, o->group, o->index, o->size, &world, &agent->world);
}

tb_status tb__agent_create(const tb__agent_opts *opts, tb__agent **out) {
    tb__agent *agent = tb__calloc(1, sizeof *agent);
    if (!agent)
        return TB_NO_MEMORY;
    agent->endpoint.what = "agent";
    agent->endpoint.accepted = tb__agent_accepted;
    agent->endpoint.ready = tb__agent_session_ready;
    agent->index = opts->index;
    agent->size = opts->size;
    agent->checksum = opts->checksum;
    agent->no_gpu = opts->no_gpu;
    agent->timeout_ms = opts->timeout_ms ? opts->timeout_ms : DEFAULT_TIMEOUT_MS;
    agent->begun_ms = tb__now_ms();
    pthread_mutex_init(&agent->lock, NULL);
    pthread_mutex_init(&agent->enter_lock, NULL);
    tb__monotonic_cond_init(&agent->changed);
    agent->group = tb__strdup(opts->group);
    agent->token = opts->token ? tb__strdup(opts->token) : NULL;
    tb_status status = agent->group && (!opts->token || agent->token) ? open_agent(agent, opts) : TB_NO_MEMORY;
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        tb__agent_destroy(agent);
        return tb__fail(status, "%s", why.text);
    }
    *out = agent;
    return TB_OK;
}

int32_t tb__agent_rank(const tb__agent *agent) {
    return tb_world_rank(agent->world);
}

void tb__agent_stop(tb__agent *agent) {
    atomic_fetch_add(&agent->nstops, 1);
    tb__endpoint_wake(&agent->endpoint);
}

/* Closes sessions that have not sent a Hello in time, and closing ones that do not take their replies. Returns the next
 * deadline. */
static int64_t close_expired_sessions(tb__agent *agent) {
    int64_t now = tb__now_ms(), next = INT64_MAX;
    for (agent_session *s = LIST_FIRST(&agent->sessions); s; s = LIST_NEXT(s, link)) {
        if (s->is_gone || (s->has_greeted && !s->is_closing))
            continue;
        if (s->deadline_ms <= now)
            tb__agent_session_close(s);
        else if (s->deadline_ms < next)
            next = s->deadline_ms;
    }
    return next;
}

/* Releases sessions that are gone, frees those without jobs, and sends the queued replies of the others. Releasing one
 * may close another, because a reply to it fails. */
static void serve_sessions(tb__agent *agent) {
    agent_session *s, *next;
    for (s = LIST_FIRST(&agent->sessions); s; s = next) {
        next = LIST_NEXT(s, link);
        if (!s->is_gone || s->has_released)
            continue;
        tb__agent_session_release(s);
        next = LIST_FIRST(&agent->sessions);
    }
    for (s = LIST_FIRST(&agent->sessions); s; s = next) {
        next = LIST_NEXT(s, link);
        if (s->has_released && s->njobs == 0)
            tb__agent_session_free(s);
        else
            tb__agent_session_flush(s);
    }
}

/* The second stop ends the loop at once; tb__agent_destroy then ends what still runs. */
static void check_stop(tb__agent *agent) {
    unsigned nstops = atomic_load(&agent->nstops);
    agent->is_forced = nstops > 1;
    if (nstops == 0 || agent->is_stopping)
        return;
    agent->is_stopping = true;
    tb__endpoint_stop(&agent->endpoint);
    tb__log(TB_LOG_INFO, "agent: stopping; %zu commands are under way", agent->njobs);
}

/* Sleeps, handles events, and does the work that is due. */
static void step_agent(tb__agent *agent) {
    int64_t next_ms = close_expired_sessions(agent);
    serve_sessions(agent);
    tb__agent_unlock(agent);
    bool is_woken = tb__endpoint_step(&agent->endpoint, next_ms);
    tb__agent_lock(agent);
    if (!is_woken)
        return;
    check_stop(agent);
    tb__agent_send_progress(agent);
    tb__agent_do_waiting_work(agent);
}

void tb__agent_run(tb__agent *agent) {
    tb__agent_lock(agent);
    while (!agent->is_forced && (!agent->is_stopping || agent->njobs > 0))
        step_agent(agent);
    serve_sessions(agent); /* replies of the last jobs */
    tb__agent_unlock(agent);
}

void tb__agent_destroy(tb__agent *agent) {
    if (!agent)
        return;
    agent_session *s;
    tb__agent_lock(agent);
    if (agent->endpoint.is_open)
        tb__endpoint_stop(&agent->endpoint);
    for (s = LIST_FIRST(&agent->sessions); s; s = LIST_NEXT(s, link))
        tb__agent_session_close(s);
    serve_sessions(agent);
    while (agent->njobs > 0) /* jobs of closed sessions give up, and have deadlines */
        step_agent(agent);
    serve_sessions(agent);
    tb__agent_unlock(agent);
    while (atomic_load(&agent->nthreads) > 0) /* they only have to end */
        tb__sleep_ms(1);
    tb_world_destroy(agent->world);
    tb__endpoint_close(&agent->endpoint);
    pthread_mutex_destroy(&agent->lock);
    pthread_mutex_destroy(&agent->enter_lock);
    pthread_cond_destroy(&agent->changed);
    free(agent->group);
    free(agent->token);
    free(agent);
}
