/* What the commands do: pairs are shared by all clients that ask for the same, batches belong to one. */
#include "bus/agent/agent_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Pairs ----------------------------------------------------------------------------------------------------- */

static agent_pair *find_pair(const tb__agent *agent, const char *name) {
    agent_pair *p;
    LIST_FOREACH(p, &agent->pairs, link) {
        if (strcmp(p->name, name) == 0)
            return p;
    }
    return NULL;
}

static void free_pair(agent_pair *p) {
    LIST_REMOVE(p, link);
    tb_pair_destroy(p->pair);
    free(p->users.item);
    free(p->name);
    free(p->remote);
    free(p->layout);
    free(p);
}

/* One that nobody wants any more. */
static void drop_pair(agent_pair *p) {
    if (p->pair && p->users.count == 0 && p->nbatches == 0)
        free_pair(p);
}

static bool add_user(agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id)
            return true;
    }
    return s->is_gone || tb__vec_push(&p->users, s->id);
}

static void remove_user(agent_pair *p, const agent_session *s) {
    for (size_t i = 0; i < p->users.count; i++) {
        if (p->users.item[i] == s->id) {
            p->users.item[i] = p->users.item[--p->users.count];
            return;
        }
    }
}

static agent_pair *new_pair(tb__agent *agent, const tb__message *m, const char *layout) {
    agent_pair *p = tb__calloc(1, sizeof *p);
    if (!p)
        return NULL;
    LIST_INSERT_HEAD(&agent->pairs, p, link);
    p->name = tb__strdup(m->pair_name);
    p->remote = tb__strdup(m->remote_name);
    p->layout = tb__strdup(layout);
    if (p->name && p->remote && p->layout)
        return p;
    free_pair(p);
    return NULL;
}

static tb_status run_init_pair(agent_job *job) {
    tb_pair_opts opts = {.size = sizeof opts, .timeout_ms = tb__agent_job_timeout(job)};
    return tb_pair_create(job->agent->world, job->pair->name, job->pair->remote, job->pair->layout, &opts, &job->made);
}

static tb_status check_side(const tb__agent *agent, const tb__message *m) {
    if (strcmp(m->local_name, agent->group) != 0)
        return tb__fail(TB_INVALID, "this agent is %s %" PRId32 ", and has no seat in group '%.100s'", agent->group,
                        agent->index, m->local_name);
    if (m->expected_world_size != (uint64_t)agent->size)
        return tb__fail(TB_CONFLICT,
                        "group '%s' has %" PRId32 " ranks, not %" PRIu64 " as is expected for pair '%.100s'",
                        agent->group, agent->size, m->expected_world_size, m->pair_name);
    return TB_OK;
}

static tb_status get_layout(const tb__message *m, char **out) {
    tb_layout *layout;
    TB_TRY(tb__layout_decode(m->mesh, m->placements, &layout));
    tb_status status = tb_layout_format(layout, out);
    tb_layout_destroy(layout);
    return status;
}

/* Gives up a pair that a rank was lost from: it would never do anything again, and whoever asks for it wants it with
 * the rank that came in the lost one's place. */
static tb_status retire_lost(agent_pair **p) {
    char who[TB__WHY_MAX];
    if (!*p || !(*p)->pair || !tb__pair_is_lost((*p)->pair, who, sizeof who))
        return TB_OK;
    if ((*p)->nbatches > 0)
        return tb__fail(TB_LOST, "pair '%.100s' has lost %s; it can be made again when its batches are cleaned up",
                        (*p)->name, who);
    free_pair(*p);
    *p = NULL;
    return TB_OK;
}

/* Joins a pair that there is, or begins one. */
static tb_status init_pair(agent_job *job, const char *layout) {
    const tb__message *m = &job->message;
    agent_pair *p = find_pair(job->agent, m->pair_name);
    TB_TRY(retire_lost(&p));
    if (p && (strcmp(p->remote, m->remote_name) != 0 || strcmp(p->layout, layout) != 0))
        return tb__fail(TB_CONFLICT, "pair '%.100s' is with group '%s' and has layout '%.100s' here already", p->name,
                        p->remote, p->layout);
    if (p && p->pair) {
        if (!add_user(p, job->session))
            return TB_NO_MEMORY;
        tb__agent_job_end(job, TB_OK);
        return TB_OK;
    }
    job->pair = p ? p : new_pair(job->agent, m, layout);
    if (!job->pair)
        return TB_NO_MEMORY;
    if (p) {
        job->next = p->waiting;
        p->waiting = job;
    } else {
        tb__agent_job_start(job, run_init_pair);
    }
    return TB_OK;
}

static void begin_init_pair(agent_job *job) {
    char *layout = NULL;
    tb_status status = check_side(job->agent, &job->message);
    if (status == TB_OK)
        status = get_layout(&job->message, &layout);
    if (status == TB_OK)
        status = init_pair(job, layout);
    free(layout);
    if (status != TB_OK)
        tb__agent_job_end(job, status);
}

static void finish_init_pair(agent_job *job) {
    agent_pair *p = job->pair;
    tb_status status = job->status;
    char why[TB__WHY_MAX];
    snprintf(why, sizeof why, "%s", job->why);
    agent_job *waiting = p->waiting;
    p->waiting = NULL;
    p->pair = job->made;
    job->next = waiting; /* it is one of those who asked */
    for (agent_job *next; job; job = next) {
        next = job->next;
        bool has_room = status != TB_OK || add_user(p, job->session);
        tb__agent_job_end(job, !has_room ? TB_NO_MEMORY : status == TB_OK ? TB_OK : tb__fail(status, "%s", why));
    }
    if (status == TB_OK)
        drop_pair(p); /* if all of them have gone meanwhile */
    else
        free_pair(p);
}

/* ---- Batches --------------------------------------------------------------------------------------------------- */

static agent_batch *find_batch(const tb__agent *agent, const char *id) {
    agent_batch *b;
    LIST_FOREACH(b, &agent->batches, link) {
        if (strcmp(b->id, id) == 0)
            return b;
    }
    return NULL;
}

/* The client's own, and one that is not on its way out. */
static tb_status get_batch(const agent_job *job, agent_batch **out) {
    agent_batch *b = find_batch(job->agent, job->message.batch_id);
    if (!b || b->session != job->session || b->is_doomed)
        return tb__fail(TB_INVALID, "there is no batch '%.100s'", job->message.batch_id);
    *out = b;
    return TB_OK;
}

static void end_batch(agent_batch *b) {
    agent_job *farewell = b->farewell;
    for (size_t i = 0; i < b->pairs.count; i++)
        b->pairs.item[i]->nbatches--;
    for (size_t i = 0; i < b->pairs.count; i++)
        drop_pair(b->pairs.item[i]);
    tb__agent_batch_free(b);
    if (farewell)
        tb__agent_job_end(farewell, TB_OK);
}

/* Ends it when its last job has ended, which is made to be soon. */
static void doom_batch(agent_batch *b) {
    pthread_mutex_lock(&b->lock);
    b->is_doomed = true;
    for (int i = 0; i < 2; i++) {
        if (b->transfers[i])
            tb_cancel(b->transfers[i]);
    }
    pthread_mutex_unlock(&b->lock);
    if (b->njobs == 0)
        end_batch(b);
}

static void leave_batch(agent_batch *b) {
    if (--b->njobs == 0 && b->is_doomed)
        end_batch(b);
}

static bool has_pair(const agent_batch *b, const agent_pair *p) {
    for (size_t i = 0; i < b->pairs.count; i++) {
        if (b->pairs.item[i] == p)
            return true;
    }
    return false;
}

static tb_status take_pairs(const agent_job *job, agent_batch *b) {
    const tb__entries *tensors = &job->message.tensors;
    const char *last = NULL;
    for (size_t i = 0; i < tensors->count; i++) {
        const char *name = tensors->item[i].pair_name;
        if (last && strcmp(last, name) == 0)
            continue; /* as most do */
        last = name;
        agent_pair *p = find_pair(job->agent, name);
        if (!p || !p->pair)
            return tb__fail(TB_INVALID, "there is no pair '%.100s'", name);
        if (has_pair(b, p))
            continue;
        if (!tb__vec_push(&b->pairs, p))
            return TB_NO_MEMORY;
        p->nbatches++;
    }
    return TB_OK;
}

static void begin_register(agent_job *job) {
    const char *id = job->message.batch_id;
    agent_batch *b = NULL;
    tb_status status =
        find_batch(job->agent, id) ? tb__fail(TB_CONFLICT, "there is a batch '%.100s' already", id) : TB_OK;
    if (status == TB_OK) {
        b = tb__calloc(1, sizeof *b);
        status = b && (b->id = tb__strdup(id)) ? TB_OK : TB_NO_MEMORY;
    }
    if (status != TB_OK) {
        free(b);
        tb__agent_job_end(job, status);
        return;
    }
    pthread_mutex_init(&b->lock, NULL);
    b->session = job->session;
    b->ntensors = job->message.tensors.count;
    LIST_INSERT_HEAD(&job->agent->batches, b, link);
    status = take_pairs(job, b);
    if (status != TB_OK) {
        end_batch(b);
        tb__agent_job_end(job, status);
        return;
    }
    job->batch = b;
    b->njobs++;
    tb__agent_job_start(job, tb__agent_batch_fill);
}

/* ---- Transfers ------------------------------------------------------------------------------------------------- */

static tb_status begin(agent_job *job, bool is_send, tb_transfer **out) {
    agent_batch *b = job->batch;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = tb__agent_job_timeout(job)};
    if (is_send)
        TB_TRY(tb__agent_batch_fetch(b));
    return is_send ? tb_send(b->batch, &opts, out) : tb_recv(b->batch, &opts, out);
}

/* What went through each of the batch's pairs. Where there is no memory for it, nobody will know. */
static void note_moved(agent_job *job, const tb_transfer *t) {
    const agent_batch *b = job->batch;
    const char *name;
    int64_t done;
    job->moved = tb__arena_alloc(&job->arena, b->pairs.count, sizeof *job->moved);
    if (!job->moved)
        return;
    memset(job->moved, 0, b->pairs.count * sizeof *job->moved);
    for (size_t i = 0; tb__transfer_share(t, i, &name, &done); i++) {
        for (size_t j = 0; j < b->pairs.count; j++) {
            if (strcmp(b->pairs.item[j]->name, name) == 0)
                job->moved[j] += done;
        }
    }
}

static tb_status run_transfer(agent_job *job) {
    agent_batch *b = job->batch;
    bool is_send = job->message.direction == TB__SEND;
    tb_transfer *t = NULL;
    tb_transfer_state state = {0};
    tb_status status = begin(job, is_send, &t);
    pthread_mutex_lock(&b->lock);
    b->transfers[is_send] = t;
    b->error[0] = '\0';
    bool is_late = t && b->is_doomed; /* whoever wanted it has gone before it began */
    pthread_mutex_unlock(&b->lock);
    if (is_late)
        tb_cancel(t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    if (status == TB_OK && !is_send)
        status = tb__agent_batch_deliver(b);
    char why[TB__WHY_MAX] = "";
    if (status != TB_OK)
        snprintf(why, sizeof why, "%s", tb_error_detail());
    pthread_mutex_lock(&b->lock);
    if (t)
        tb_transfer_query(t, &state);
    b->last = state;
    b->was_send = is_send;
    b->transfers[is_send] = NULL;
    if (status == TB_OK)
        b->version = state.attempt;
    snprintf(b->error, sizeof b->error, "%s", why);
    pthread_mutex_unlock(&b->lock);
    if (status == TB_OK)
        note_moved(job, t);
    tb_transfer_destroy(t);
    if (status != TB_OK)
        return tb__fail(status, "%s", why);
    job->reply = (tb__message){.attempt = tb__some_uint(state.attempt),
                               .version = tb__some_uint(state.attempt),
                               .bytes = tb__some_uint((uint64_t)state.bytes_done),
                               .seconds = tb__some_float(state.seconds)};
    return TB_OK;
}

static void begin_transfer(agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    agent_batch *b = NULL;
    tb_status status = get_batch(job, &b);
    if (status == TB_OK && !b->batch)
        status = tb__fail(TB_REFUSED, "batch '%.100s' is being registered", b->id);
    if (status == TB_OK && b->is_busy[is_send])
        status = tb__fail(TB_REFUSED, "batch '%.100s' is already being %s", b->id, is_send ? "sent" : "received");
    if (status != TB_OK) {
        tb__agent_job_end(job, status);
        return;
    }
    job->batch = b;
    b->njobs++;
    b->is_busy[is_send] = true;
    if (job->message.no_wait)
        tb__agent_job_answer(job, TB_OK);
    tb__agent_job_start(job, run_transfer);
}

static bool is_asked(tb__state_name asked, tb__state_name name) {
    return asked == TB__STATE_ALL || asked == name;
}

static void query(agent_job *job) {
    agent_batch *b = NULL;
    tb__state_name asked = job->message.state_name;
    tb__message *r = &job->reply;
    tb_status status = get_batch(job, &b);
    if (status != TB_OK) {
        tb__agent_job_end(job, status);
        return;
    }
    char error[TB__WHY_MAX];
    tb_transfer_state state;
    pthread_mutex_lock(&b->lock);
    const tb_transfer *t = b->transfers[0] ? b->transfers[0] : b->transfers[1];
    bool is_send = t ? t == b->transfers[1] : b->was_send;
    state = b->last;
    if (t)
        tb_transfer_query(t, &state);
    snprintf(error, sizeof error, "%s", b->error);
    uint64_t version = b->version;
    pthread_mutex_unlock(&b->lock);
    *r = (tb__message){.state = !b->batch ? "registering"
                                : !t      ? (*error ? "failed" : "idle")
                                : is_send ? "sending"
                                          : "receiving"};
    if (is_asked(asked, TB__STATE_TRANSFER_SIGNAL))
        r->transfer_signal = tb__some_bool(t && is_send && state.attempt && !(state.events & TB_RELEASED));
    if (is_asked(asked, TB__STATE_PROGRESS)) {
        r->bytes_done = tb__some_uint((uint64_t)state.bytes_done);
        r->bytes_total = tb__some_uint((uint64_t)state.bytes_total);
        r->groups_done = tb__some_uint(state.groups_done);
        r->groups_total = tb__some_uint(state.groups_total);
        r->attempt = tb__some_uint(state.attempt);
        r->seconds = tb__some_float(state.seconds);
    }
    if (is_asked(asked, TB__STATE_VERSION))
        r->version = tb__some_uint(version);
    if (is_asked(asked, TB__STATE_ERROR))
        r->error = error;
    tb__agent_job_end(job, TB_OK);
}

static void cleanup(agent_job *job) {
    agent_batch *b = NULL;
    tb_status status = get_batch(job, &b);
    if (status != TB_OK) {
        tb__agent_job_end(job, status);
        return;
    }
    b->farewell = job;
    doom_batch(b);
}

static void inspect(agent_job *job) {
    char *report = NULL;
    tb_status status = tb__agent_make_report(job->agent, job->session, &report);
    if (status == TB_OK)
        job->reply.report = (tb__blob){(const uint8_t *)report, strlen(report)};
    tb__agent_job_end(job, status);
    free(report);
}

/* ---- All of them ----------------------------------------------------------------------------------------------- */

void tb__agent_do(agent_job *job) {
    switch (job->message.kind) {
    case TB__INIT_PAIR:
        begin_init_pair(job);
        break;
    case TB__REGISTER_TENSORS:
        begin_register(job);
        break;
    case TB__TRANSFER:
        begin_transfer(job);
        break;
    case TB__QUERY_STATUS:
        query(job);
        break;
    case TB__CLEANUP_BATCH:
        cleanup(job);
        break;
    case TB__INSPECT:
        inspect(job);
        break;
    case TB__HELLO:
    case TB__REPLY:
    case TB__MESSAGE_KINDS:
        tb__agent_job_end(job, tb__fail(TB_INVALID, "that is no command"));
        break;
    }
}

static void count_transfer(const agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    agent_totals *totals = &job->agent->totals[is_send];
    const agent_batch *b = job->batch;
    if (job->status != TB_OK) {
        totals->nfailed++;
        return;
    }
    totals->ndone++;
    totals->nbytes += job->reply.bytes.value;
    totals->seconds += job->reply.seconds.value;
    for (size_t i = 0; job->moved && i < b->pairs.count; i++)
        b->pairs.item[i]->moved[is_send] += (uint64_t)job->moved[i];
}

void tb__agent_finish(agent_job *job) {
    agent_batch *b = job->batch;
    bool is_register = job->message.kind == TB__REGISTER_TENSORS;
    tb_status status = job->status;
    if (job->message.kind == TB__INIT_PAIR) {
        finish_init_pair(job);
        return;
    }
    if (is_register) {
        b->batch = job->registered;
        b->nbytes = job->nbytes;
    }
    if (job->message.kind == TB__TRANSFER) {
        b->is_busy[job->message.direction == TB__SEND] = false;
        count_transfer(job);
    }
    if (status != TB_OK)
        tb__set_detail("%s", job->why);
    tb__agent_job_end(job, status);
    if (is_register && status != TB_OK)
        b->is_doomed = true;
    leave_batch(b);
}

void tb__agent_forget(tb__agent *agent, agent_session *s) {
    agent_batch *b, *next_batch;
    agent_pair *p, *next_pair;
    for (b = LIST_FIRST(&agent->batches); b; b = next_batch) {
        next_batch = LIST_NEXT(b, link);
        if (b->session == s && !b->is_doomed)
            doom_batch(b);
    }
    for (p = LIST_FIRST(&agent->pairs); p; p = next_pair) {
        next_pair = LIST_NEXT(p, link);
        remove_user(p, s);
        drop_pair(p);
    }
}
