/* Pairs, shared by all clients that ask for the same one. Threads make and end a pair, since both may wait for other
 * ranks; a client that asks meanwhile waits, and its command is tried again then. */
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

static agent_pair *new_pair(tb__agent *agent, const tb__message *m, int32_t index, const char *layout) {
    agent_pair *p = tb__calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->agent = agent;
    p->index = index;
    p->name = tb__strdup(m->pair_name);
    p->local = tb__strdup(m->local_name);
    p->remote = tb__strdup(m->remote_name);
    p->layout = tb__strdup(layout);
    if (!p->name || !p->local || !p->remote || !p->layout) {
        free_agent_pair(p);
        return NULL;
    }
    LIST_INSERT_HEAD(&agent->pairs, p, link);
    return p;
}

static void wait_for_pair(agent_pair *p, agent_job *job) {
    agent_job **at = &p->waiting;
    while (*at)
        at = &(*at)->next;
    job->next = NULL;
    *at = job;
}

/* The pair has failed or ended: tries the waiting commands again. */
static void retry_init_pair(agent_job *waiting) {
    tb_status status;
    for (agent_job *job = waiting, *next; job; job = next) {
        next = job->next;
        if (job->session->is_gone) /* no client is left to cancel it */
            tb__agent_job_end(job, tb__fail(TB_CANCELLED, "the client is gone"));
        else if (tb__now_ms() >= job->deadline_ms)
            tb__agent_job_end(job, tb__fail(TB_TIMEOUT,
                                            "pair '%.100s' could not be made in time, and nobody else who "
                                            "asked for it could",
                                            job->message.pair_name));
        else if ((status = tb__agent_init_pair(job)) != TB_OK)
            tb__agent_job_end(job, status);
    }
}

int64_t tb__agent_pairs_expire(tb__agent *agent) {
    int64_t now = tb__now_ms(), next = INT64_MAX;
    for (agent_pair *p = LIST_FIRST(&agent->pairs); p; p = LIST_NEXT(p, link)) {
        for (agent_job **at = &p->waiting; *at;) {
            agent_job *job = *at;
            if (job->deadline_ms > now) {
                next = job->deadline_ms < next ? job->deadline_ms : next;
                at = &job->next;
                continue;
            }
            *at = job->next;
            char why[TB__WHY_MAX] = "an earlier one of its name is still being ended";
            if (p->state != PAIR_ENDING)
                tb__pair_describe_wait(agent->world, p->name, why, sizeof why);
            tb__agent_job_end(job, tb__fail(TB_TIMEOUT, "pair '%s': %s", p->name, *why ? why : "it is being made"));
        }
    }
    return next;
}

bool tb__agent_pair_has_user(const agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id)
            return true;
    }
    return false;
}

static bool add_user(agent_pair *p, const agent_session *s) {
    return tb__agent_pair_has_user(p, s) || s->is_gone || tb__vec_push(&p->users, s->id);
}

/* For a job that has asked for the pair. */
static bool add_job_user(agent_pair *p, const agent_job *job) {
    return job->is_unwanted || add_user(p, job->session);
}

static void remove_user(agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id) {
            p->users.item[i] = p->users.item[--p->users.count];
            return;
        }
    }
}

static void end_unused_pair(agent_pair *p);

static void destroy_pair(void *arg) {
    tb_pair_destroy(((agent_pair *)arg)->pair); /* batches keep references */
}

static void finish_ending_pair(void *arg) {
    agent_pair *p = arg;
    agent_job *waiting = p->waiting;
    LIST_REMOVE(p, link);
    p->waiting = NULL;
    p->pair = NULL;
    p->state = PAIR_OVER;
    p->users.count = 0; /* only batches still have it */
    end_unused_pair(p);
    retry_init_pair(waiting);
}

static void end_pair(agent_pair *p) {
    p->state = PAIR_ENDING;
    tb__agent_run_in_background(p->agent, NULL, destroy_pair, finish_ending_pair, p);
}

/* Ends a pair without users. */
static void end_unused_pair(agent_pair *p) {
    if (p->users.count > 0 || p->nbatches > 0 || p->nchecks > 0)
        return;
    if (p->state == PAIR_MADE)
        end_pair(p);
    else if (p->state == PAIR_OVER)
        free_agent_pair(p);
}

void tb__agent_pair_remove_batch(agent_pair *p) {
    p->nbatches--;
    end_unused_pair(p);
}

static bool has_waiting_client(const agent_pair *p) {
    bool is_wanted = !p->maker->session->is_gone && !p->maker->is_unwanted;
    for (const agent_job *job = p->waiting; job; job = job->next)
        is_wanted |= !job->session->is_gone;
    return is_wanted;
}

static void drop_user(agent_pair *p, const agent_session *s) {
    tb_world *world = p->agent->world;
    remove_user(p, s);
    if (p->nchecks > 0) { /* clients that are left begin again */
        atomic_store(&p->checks_cancelled, true);
        tb__world_wake_waiters(world);
    }
    if (p->state == PAIR_MAKING && !has_waiting_client(p)) {
        atomic_store(&p->is_cancelled, true);
        tb__world_wake_waiters(world);
    }
    end_unused_pair(p);
}

void tb__agent_drop_client_pairs(tb__agent *agent, const agent_session *s) {
    agent_pair *p, *next;
    for (p = LIST_FIRST(&agent->pairs); p; p = next) {
        next = LIST_NEXT(p, link);
        drop_user(p, s);
    }
}

/* Commands of the client that still ask for the pair end. */
static void stop_waiting(agent_pair *p, const agent_session *s) {
    if (p->state == PAIR_MAKING && p->maker->session == s)
        p->maker->is_unwanted = true;
    for (agent_job **at = &p->waiting; *at;) {
        agent_job *job = *at;
        if (job->session != s) {
            at = &job->next;
            continue;
        }
        *at = job->next;
        tb__agent_job_end(job, tb__fail(TB_CANCELLED, "pair '%.100s' was given up", p->name));
    }
}

tb_status tb__agent_cleanup_pair(agent_job *job) {
    const tb__message *m = &job->message;
    agent_pair *p = tb__agent_find_pair(job->agent, m->pair_name, m->local_name);
    if (p) {
        stop_waiting(p, job->session);
        drop_user(p, job->session);
    }
    return TB_OK;
}

static tb_status run_init_pair(agent_job *job) {
    agent_pair *p = job->pair;
    int left_ms = tb__ms_until(job->deadline_ms);
    tb_pair_opts opts = {.size = sizeof opts, .group = p->local, .timeout_ms = left_ms > 0 ? left_ms : 1};
    return tb__local_pair_create(job->agent->world, p->name, p->remote,
                                 tb__pair_has_layout(p->layout) ? p->layout : NULL, &opts, &p->is_cancelled,
                                 &job->made);
}

/* Pings the ranks of an existing pair: its connections may be dead without this end knowing. */
static tb_status run_check_pair(agent_job *job) {
    return tb__pair_ping(job->made, job->deadline_ms, &job->pair->checks_cancelled);
}

static void check_pair(agent_pair *p, agent_job *job) {
    if (tb__pair_ping(p->pair, tb__now_ms(), NULL) == TB_OK) {
        tb__agent_job_end(job, add_job_user(p, job) ? TB_OK : TB_NO_MEMORY);
        return;
    }
    tb__loop_lock(p->agent->world->loop);
    p->pair->refs++;
    tb__loop_unlock(p->agent->world->loop);
    p->nchecks++;
    job->pair = p;
    job->made = p->pair;
    tb__agent_job_start(job, run_check_pair);
}

static void finish_check(agent_job *job) {
    agent_pair *p = job->pair;
    tb__loop *loop = p->agent->world->loop;
    bool is_there = job->status == TB_OK && p->state == PAIR_MADE && p->pair == job->made;
    tb__loop_lock(loop);
    tb__pair_unref(job->made);
    tb__loop_unlock(loop);
    if (--p->nchecks == 0)
        atomic_store(&p->checks_cancelled, false);
    job->pair = NULL;
    job->made = NULL;
    job->next = NULL;
    bool has_room = !is_there || add_job_user(p, job);
    end_unused_pair(p); /* if it has no users */
    if (is_there)
        tb__agent_job_end(job, has_room ? TB_OK : TB_NO_MEMORY);
    else if (job->status == TB_OK || job->status == TB_LOST || job->status == TB_CANCELLED)
        retry_init_pair(job);
    else
        tb__agent_job_finish(job);
}

void tb__agent_finish_init_pair(agent_job *job) {
    agent_pair *p = job->pair;
    tb_status status = job->status;
    if (!p) { /* a group was entered */
        job->next = NULL;
        if (status == TB_OK)
            retry_init_pair(job);
        else
            tb__agent_job_finish(job);
        return;
    }
    if (p->maker != job) {
        finish_check(job);
        return;
    }
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "%s", job->why);
    agent_job *waiting = p->waiting;
    p->waiting = NULL;
    p->maker = NULL;
    if (status == TB_OK) {
        p->pair = job->made;
        p->state = PAIR_MADE;
    } else {
        LIST_REMOVE(p, link);
        free_agent_pair(p);
    }
    if (status == TB_TIMEOUT || status == TB_CANCELLED) { /* the first client's deadline; others may have more time */
        tb__agent_job_finish(job);
        retry_init_pair(waiting);
        return;
    }
    job->next = waiting;
    for (agent_job *next; job; job = next) {
        next = job->next;
        bool has_room = status != TB_OK || add_job_user(p, job);
        tb__agent_job_end(job, !has_room ? TB_NO_MEMORY : status == TB_OK ? TB_OK : tb__fail(status, "%s", why));
    }
    if (status == TB_OK)
        end_unused_pair(p); /* if all clients are gone */
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

/* The agent is not in the pair's local group. Which seat it takes there follows from the command if it says so, if
 * there is one seat only, or if the group has as many as the agent's own: then they are the same agents. Who is in the
 * pair's other group has to say so. */
static tb_status choose_seat(const tb__agent *agent, const tb__message *m, int32_t *index) {
    uint64_t size = m->expected_world_size;
    if (strcmp(m->local_name, m->remote_name) == 0)
        return tb__fail(TB_INVALID, "a pair has two groups; '%.100s' can't be both of them", m->local_name);
    if (m->local_index.is_set && m->local_index.value >= size)
        return tb__fail(TB_INVALID, "seat %" PRIu64 " is none of the %" PRIu64 " seats of group '%.100s'",
                        m->local_index.value, size, m->local_name);
    tb__membership there;
    bool is_remote = tb__agent_find_seat(agent, m->remote_name, &there); /* a client at the wrong socket, perhaps */
    if (!m->local_index.is_set && (is_remote || (size != 1 && size != (uint64_t)agent->size)))
        return tb__fail(TB_INVALID,
                        "this agent is %s %" PRId32 ", and has no seat in group '%.100s'%s%s; which of %" PRIu64
                        " seats it should take does not follow from the command: pass 'index'",
                        agent->group, agent->index, m->local_name, is_remote ? ", but in the other group, " : "",
                        is_remote ? m->remote_name : "", size);
    *index = m->local_index.is_set ? (int32_t)m->local_index.value : size == 1 ? 0 : agent->index;
    return TB_OK;
}

static tb_status run_enter_for_pair(agent_job *job) {
    const tb__message *m = &job->message;
    int32_t index = 0;
    TB_TRY(choose_seat(job->agent, m, &index));
    return tb__agent_enter(job->agent, m->local_name, index, (int32_t)m->expected_world_size);
}

/* Uses an existing pair, or makes one. */
static tb_status init_pair(agent_job *job, int32_t index, const char *layout) {
    const tb__message *m = &job->message;
    tb__agent *agent = job->agent;
    agent_pair *p = tb__agent_find_pair(agent, m->pair_name, m->local_name);
    if (p && p->state == PAIR_MADE && tb__pair_is_stale(p->pair)) {
        end_pair(p);
        p = tb__agent_find_pair(agent, m->pair_name, m->local_name);
    }
    if (p && (p->state == PAIR_ENDING || atomic_load(&p->is_cancelled))) {
        wait_for_pair(p, job);
        return TB_OK;
    }
    if (p && (strcmp(p->remote, m->remote_name) != 0 || strcmp(p->layout, layout) != 0))
        return tb__fail(TB_CONFLICT, "pair '%.100s' is with group '%s' and has layout '%.100s' here already", p->name,
                        p->remote, p->layout);
    if (p && p->state == PAIR_MADE) {
        check_pair(p, job);
    } else if (p) {
        wait_for_pair(p, job);
    } else {
        p = new_pair(agent, m, index, layout);
        if (!p)
            return TB_NO_MEMORY;
        p->maker = job;
        job->pair = p;
        tb__agent_job_start(job, run_init_pair);
    }
    return TB_OK;
}

tb_status tb__agent_init_pair(agent_job *job) {
    char *layout = NULL;
    int32_t index = 0;
    tb__membership seat;
    tb_status status = decode_pair_layout(&job->message, &layout);
    bool has_seat = status == TB_OK && tb__agent_find_seat(job->agent, job->message.local_name, &seat);
    if (has_seat)
        status = check_init_pair(&job->message, &seat, &index);
    else if (status == TB_OK)
        status = choose_seat(job->agent, &job->message, &index);
    if (status == TB_OK && has_seat)
        status = init_pair(job, index, layout);
    else if (status == TB_OK)
        tb__agent_job_start(job, run_enter_for_pair); /* then it is tried again */
    free(layout);
    return status;
}
