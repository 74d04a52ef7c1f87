/* Pairs, shared by all clients that ask for the same one. Each InitPair has a thread, which makes the pair, or waits
 * while another makes or ends it. */
#include "bus/agent/agent_inside.h"

#include "base/process.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

agent_pair *tb__agent_find_pair(const tb__agent *agent, const char *name, const char *local) {
    for (agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        if (strcmp(p->name, name) == 0 && strcmp(p->local, local) == 0)
            return p;
    }
    return NULL;
}

/* The pair must be in no list. */
static void free_agent_pair(agent_pair *p) {
    free(p->users.item);
    free(p->name);
    free(p->local);
    free(p->remote);
    free(p->layout);
    free(p);
}

static void free_if_over(agent_pair *p) {
    if (p->state == PAIR_OVER && p->nrequests == 0 && p->nbatches == 0)
        free_agent_pair(p);
}

static agent_pair *new_pair(agent_job *job, int32_t index, const char *layout) {
    const tb__message *m = &job->message;
    agent_pair *p = tb__calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->agent = job->agent;
    p->maker = job;
    p->index = index;
    p->name = tb__strdup(m->pair_name);
    p->local = tb__strdup(m->local_name);
    p->remote = tb__strdup(m->remote_name);
    p->layout = tb__strdup(layout);
    if (!p->name || !p->local || !p->remote || !p->layout) {
        free_agent_pair(p);
        return NULL;
    }
    LIST_INSERT_HEAD(&job->agent->pairs, p, link);
    return p;
}

bool tb__agent_pair_has_user(const agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id)
            return true;
    }
    return false;
}

/* Of the client that has asked for the pair. */
static tb_status add_user(agent_pair *p, const agent_job *job) {
    if (atomic_load(&job->is_cancelled) || tb__agent_pair_has_user(p, job->session))
        return TB_OK;
    return tb__vec_push(&p->users, job->session->id) ? TB_OK : TB_NO_MEMORY;
}

/* The pair is in no list any more: of one that was not made, `status` and `why` say why. */
static void end_making(agent_pair *p) {
    LIST_REMOVE(p, link);
    p->pair = NULL;
    p->state = PAIR_OVER;
    p->users.count = 0; /* only batches still have it */
    pthread_cond_broadcast(&p->agent->changed);
}

/* A pair that is PAIR_ENDING. Without the lock, since it may wait for the store. */
static void destroy_pair(void *arg) {
    tb_pair_destroy(((agent_pair *)arg)->pair); /* batches keep references */
}

static void finish_ending_pair(void *arg) {
    end_making(arg);
    free_if_over(arg);
}

static void end_unused_pairs(tb__agent *agent) {
    for (agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        if (p->state != PAIR_MADE || p->users.count > 0 || p->nbatches > 0 || p->nrequests > 0)
            continue;
        p->state = PAIR_ENDING;
        p->ending = (agent_work){.agent = agent, .run = destroy_pair, .after = finish_ending_pair, .arg = p};
        tb__agent_run_in_background(&p->ending);
    }
}

void tb__agent_pair_remove_batch(agent_pair *p) {
    tb__agent *agent = p->agent;
    p->nbatches--;
    free_if_over(p);
    end_unused_pairs(agent);
}

static void remove_user(agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id) {
            p->users.item[i] = p->users.item[--p->users.count];
            return;
        }
    }
}

/* The client has given up the pair; NULL: all pairs. */
static void give_up_pair(tb__agent *agent, const agent_session *s, const char *name, const char *local) {
    for (agent_job *job = LIST_FIRST(&agent->pair_requests); job; job = LIST_NEXT(job, request_link)) {
        const tb__message *m = &job->message;
        if (job->session == s && (!name || (strcmp(m->pair_name, name) == 0 && strcmp(m->local_name, local) == 0)))
            atomic_store(&job->is_cancelled, true);
    }
    for (agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        if (!name || (strcmp(p->name, name) == 0 && strcmp(p->local, local) == 0))
            remove_user(p, s);
    }
    pthread_cond_broadcast(&agent->changed);
    tb__world_wake_waiters(agent->world);
    end_unused_pairs(agent);
}

void tb__agent_drop_client_pairs(tb__agent *agent, const agent_session *s) {
    give_up_pair(agent, s, NULL, NULL);
}

tb_status tb__agent_cleanup_pair(agent_job *job) {
    give_up_pair(job->agent, job->session, job->message.pair_name, job->message.local_name);
    return TB_OK;
}

static tb_status check_init_pair(const tb__message *m, const tb__membership *found, int32_t *index) {
    tb__membership seat = *found;
    if (m->local_index.is_set && m->local_index.value != (uint64_t)seat.index)
        return tb__fail(TB_CONFLICT,
                        "the agent has seat %" PRId32 " in group '%s', not seat %" PRIu64 " as pair '%.100s' says",
                        seat.index, seat.group, m->local_index.value, m->pair_name);
    if (m->expected_world_size != (uint64_t)seat.size)
        return tb__fail(TB_CONFLICT,
                        "group '%s' has %" PRId32 " ranks, not %" PRIu64 " as is expected for pair '%.100s'",
                        seat.group, seat.size, m->expected_world_size, m->pair_name);
    *index = seat.index;
    return TB_OK;
}

static tb_status decode_pair_layout(const tb__message *m, char **out) {
    tb_layout *layout;
    bool has_mesh = m->mesh.nbytes > 0, has_placements = m->placements.nbytes > 0;
    if (has_mesh != has_placements)
        return tb__fail(TB_INVALID, "InitPair: pair '%.100s' has %s; both are given, or none", m->pair_name,
                        has_mesh ? "a mesh and no placements" : "placements and no mesh");
    if (!has_mesh)
        return (*out = tb__strdup(TB__NO_LAYOUT)) ? TB_OK : TB_NO_MEMORY;
    TB_TRY(tb__layout_decode(m->mesh, m->placements, &layout));
    tb_status status = tb_layout_format(layout, out);
    tb_layout_destroy(layout);
    return status;
}

/* Chooses the agent's seat in a local group of the pair that it is not in. The command may give it; otherwise it is
 * clear if the group has one seat, or as many as the agent's own group: then the agents are the same. An agent in the
 * pair's remote group needs it in the command. */
static tb_status choose_seat(const tb__agent *agent, const tb__message *m, int32_t *index) {
    uint64_t size = m->expected_world_size;
    if (strcmp(m->local_name, m->remote_name) == 0)
        return tb__fail(TB_INVALID, "a pair has two groups; '%.100s' can't be both of them", m->local_name);
    if (m->local_index.is_set && m->local_index.value >= size)
        return tb__fail(TB_INVALID, "seat %" PRIu64 " is none of the %" PRIu64 " seats of group '%.100s'",
                        m->local_index.value, size, m->local_name);
    tb__membership there;
    bool is_remote = tb__agent_find_seat(agent, m->remote_name, &there); /* the client may have used the wrong socket */
    if (!m->local_index.is_set && (is_remote || (size != 1 && size != (uint64_t)agent->size)))
        return tb__fail(TB_INVALID,
                        "this agent is %s %" PRId32 ", and has no seat in group '%.100s'%s%s; which of %" PRIu64
                        " seats it should take does not follow from the command: pass 'index'",
                        agent->group, agent->index, m->local_name, is_remote ? ", but in the other group, " : "",
                        is_remote ? m->remote_name : "", size);
    *index = m->local_index.is_set ? (int32_t)m->local_index.value : size == 1 ? 0 : agent->index;
    return TB_OK;
}

/* Waits until the pair is not being made or ended any more. If it could not be made, that may be because of a deadline
 * that is not this request's. */
static tb_status wait_for_pair(const agent_job *job, agent_pair *p) {
    tb__agent *agent = p->agent;
    struct timespec deadline = tb__time_of_ms(job->deadline_ms);
    bool is_ending = p->state == PAIR_ENDING, is_late = false;
    tb_status status = TB_OK;
    p->nrequests++;
    while (p->state == (is_ending ? PAIR_ENDING : PAIR_MAKING) && !atomic_load(&job->is_cancelled) && !is_late)
        is_late = pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) != 0;
    p->nrequests--;
    if (is_late) {
        char why[TB__WHY_MAX] = "an earlier one of its name is still being ended";
        if (!is_ending)
            tb__pair_describe_wait(agent->world, p->name, why, sizeof why);
        status = tb__fail(TB_TIMEOUT, "pair '%s': %s", p->name, *why ? why : "it is being made");
    } else if (p->state == PAIR_OVER && p->status != TB_TIMEOUT && p->status != TB_CANCELLED) {
        status = p->status == TB_OK ? TB_OK : tb__fail(p->status, "%s", p->why);
    }
    free_if_over(p);
    return status;
}

static tb_status make_pair(agent_job *job, int32_t index, const char *layout, bool *is_done) {
    tb__agent *agent = job->agent;
    int left_ms = tb__ms_until(job->deadline_ms);
    agent_pair *p = new_pair(job, index, layout);
    if (!p)
        return TB_NO_MEMORY;
    tb_pair_opts opts = {.size = sizeof opts, .group = p->local, .timeout_ms = left_ms > 0 ? left_ms : 1};
    tb__agent_unlock(agent);
    tb_status status =
        tb__local_pair_create(agent->world, p->name, p->remote, tb__pair_has_layout(layout) ? layout : NULL, &opts,
                              &job->is_cancelled, &p->pair);
    tb__agent_lock(agent);
    p->maker = NULL;
    if (status == TB_OK) {
        p->state = PAIR_MADE;
        pthread_cond_broadcast(&agent->changed);
        *is_done = true;
        return add_user(p, job);
    }
    p->status = status;
    snprintf(p->why, sizeof p->why, "%s", tb_error_detail());
    end_making(p);
    free_if_over(p);
    return status;
}

/* Pings the ranks of an existing pair: its connections may be dead without this end knowing. */
static tb_status check_pair(const agent_job *job, agent_pair *p, bool *is_done) {
    tb__agent *agent = job->agent;
    tb__loop *loop = agent->world->loop;
    tb_pair *pair = p->pair;
    p->nrequests++;
    tb__loop_lock(loop);
    pair->refs++;
    tb__loop_unlock(loop);
    tb__agent_unlock(agent);
    tb_status status = tb__pair_ping(pair, job->deadline_ms, &job->is_cancelled);
    if (status == TB_LOST && tb__pair_is_stale(pair))
        status = TB_OK; /* then it is made again */
    else if (status == TB_OK)
        *is_done = true;
    tb__agent_lock(agent);
    tb__loop_lock(loop);
    tb__pair_unref(pair);
    tb__loop_unlock(loop);
    p->nrequests--;
    *is_done &= p->state == PAIR_MADE;
    if (*is_done)
        status = add_user(p, job);
    free_if_over(p);
    return status;
}

/* Uses the pair if it exists, or takes the next step towards it. */
static tb_status step_request(agent_job *job, int32_t index, const char *layout, bool *is_done) {
    tb__agent *agent = job->agent;
    const tb__message *m = &job->message;
    agent_pair *p = tb__agent_find_pair(agent, m->pair_name, m->local_name);
    if (!p)
        return make_pair(job, index, layout, is_done);
    if (p->state == PAIR_MADE && tb__pair_is_stale(p->pair)) {
        p->state = PAIR_ENDING;
        tb__agent_unlock(agent);
        destroy_pair(p);
        tb__agent_lock(agent);
        finish_ending_pair(p);
        return TB_OK;
    }
    if (p->state == PAIR_ENDING || (p->maker && atomic_load(&p->maker->is_cancelled)))
        return wait_for_pair(job, p);
    if (strcmp(p->remote, m->remote_name) != 0 || strcmp(p->layout, layout) != 0)
        return tb__fail(TB_CONFLICT, "pair '%.100s' is with group '%s' and has layout '%.100s' here already", p->name,
                        p->remote, p->layout);
    return p->state == PAIR_MADE ? check_pair(job, p, is_done) : wait_for_pair(job, p);
}

/* Finds the agent's seat in the pair's local group, or takes one. */
static tb_status take_seat(const agent_job *job, int32_t *index) {
    const tb__message *m = &job->message;
    tb__membership seat;
    if (tb__agent_find_seat(job->agent, m->local_name, &seat))
        return check_init_pair(m, &seat, index);
    TB_TRY(choose_seat(job->agent, m, index));
    return tb__agent_enter(job->agent, m->local_name, *index, (int32_t)m->expected_world_size);
}

static tb_status run_init_pair(agent_job *job) {
    tb__agent *agent = job->agent;
    char *layout = NULL;
    int32_t index = 0;
    bool is_done = false;
    TB_TRY(decode_pair_layout(&job->message, &layout));
    tb_status status = take_seat(job, &index);
    tb__agent_lock(agent);
    while (status == TB_OK && !is_done && !atomic_load(&job->is_cancelled))
        status = step_request(job, index, layout, &is_done);
    tb__agent_unlock(agent);
    free(layout);
    if (atomic_load(&job->is_cancelled))
        return tb__fail(TB_CANCELLED, "pair '%.100s' was given up", job->message.pair_name);
    return status;
}

tb_status tb__agent_init_pair(agent_job *job) {
    LIST_INSERT_HEAD(&job->agent->pair_requests, job, request_link);
    tb__agent_job_start(job, run_init_pair);
    return TB_OK;
}

void tb__agent_finish_init_pair(agent_job *job) {
    LIST_REMOVE(job, request_link);
    end_unused_pairs(job->agent); /* if the client is gone */
    tb__agent_job_finish(job);
}
