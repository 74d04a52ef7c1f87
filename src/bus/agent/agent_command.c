/* What the commands do. A batch belongs to one client. */
#include "bus/agent/agent_inside.h"

#include "base/process.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- Batches --------------------------------------------------------------------------------------------------- */

static agent_batch *find_batch(const tb__agent *agent, const char *id) {
    for (agent_batch *b = LIST_FIRST(&agent->batches); b; b = LIST_NEXT(b, link)) {
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

static void free_batch(agent_batch *b) {
    tb__engine *engine = b->session->agent->world->engine;
    tb__engine_lock(engine);
    for (size_t i = 0; i < b->held.count; i++)
        tb__pair_unref(b->held.item[i]);
    tb__engine_unlock(engine);
    for (size_t i = 0; i < b->pairs.count; i++)
        tb__agent_leave_pair(b->pairs.item[i]);
    pthread_mutex_destroy(&b->lock);
    LIST_REMOVE(b, link);
    free(b->pairs.item);
    free(b->held.item);
    free(b->id);
    free(b);
}

static void empty_batch(void *arg) {
    tb__agent_batch_empty(arg);
}

static void after_batch(void *arg) {
    agent_job *farewell = ((agent_batch *)arg)->farewell;
    free_batch(arg);
    if (farewell)
        tb__agent_job_end(farewell,
                          farewell->status == TB_OK ? TB_OK : tb__fail(farewell->status, "%s", farewell->why));
}

/* It may take a while to give back its memory. Its name is taken until then. */
static void end_batch(agent_batch *b) {
    b->is_doomed = true;
    tb__agent_chore(b->session->agent, b->session, empty_batch, after_batch, b);
}

/* Ends it when its last job has ended, which is made to be soon. */
static void doom_batch(agent_batch *b) {
    pthread_mutex_lock(&b->lock);
    b->is_doomed = true;
    for (int i = 0; i < 2; i++) {
        if (b->transfers[i])
            tb__transfer_give_up(b->transfers[i]);
    }
    pthread_mutex_unlock(&b->lock);
    if (!b->batch) {
        atomic_store(&b->is_unwanted, true);
        tb__world_stir(b->session->agent->world);
    }
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
        agent_pair *p = tb__agent_find_pair(job->agent, name);
        if (!p || p->state != PAIR_MADE)
            return tb__fail(TB_INVALID, "there is no pair '%.100s'", name);
        if (has_pair(b, p))
            continue;
        if (!tb__vec_reserve(&b->held, 1) || !tb__vec_push(&b->pairs, p))
            return TB_NO_MEMORY;
        p->nbatches++;
        b->held.item[b->held.count++] = p->pair;
        tb__engine_lock(job->agent->world->engine);
        p->pair->refs++;
        tb__engine_unlock(job->agent->world->engine);
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
        tb__agent_job_answer(job, status);
        free_batch(b);
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
    TB_TRY(tb__agent_fetch(b)); /* also to receive: what does not arrive stays as it is */
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
    bool is_late = t && b->is_doomed; /* whoever wanted it has gone before it began */
    pthread_mutex_unlock(&b->lock);
    if (is_late)
        tb_cancel(t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    if (status == TB_OK && !is_send)
        status = tb__agent_deliver(b);
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

/* How a batch is committed, and whether it is summed, is settled when it is registered. */
static tb_status check_modes(const tb__message *m, const tb_batch *batch) {
    bool is_shadow = batch->opts.commit == TB_SHADOW;
    if (m->commit != TB__COMMIT_UNSAID && (m->commit == TB__SHADOW) != is_shadow)
        return tb__fail(TB_REFUSED, "batch '%.100s' was registered to be committed %s", m->batch_id,
                        is_shadow ? "by shadow" : "in place");
    if (m->checksum.is_set && m->checksum.value != batch->opts.checksum)
        return tb__fail(TB_REFUSED, "batch '%.100s' was registered %s checksums", m->batch_id,
                        batch->opts.checksum ? "with" : "without");
    return TB_OK;
}

static void begin_transfer(agent_job *job) {
    bool is_send = job->message.direction == TB__SEND;
    agent_batch *b = NULL;
    tb_status status = get_batch(job, &b);
    if (status == TB_OK && !b->batch)
        status = tb__fail(TB_REFUSED, "batch '%.100s' is being registered", b->id);
    if (status == TB_OK)
        status = check_modes(&job->message, b->batch);
    if (status == TB_OK && b->is_busy[is_send])
        status = tb__fail(TB_REFUSED, "batch '%.100s' is already being %s", b->id, is_send ? "sent" : "received");
    if (status != TB_OK) {
        tb__agent_job_end(job, status);
        return;
    }
    job->batch = b;
    b->njobs++;
    b->is_busy[is_send] = true;
    pthread_mutex_lock(&b->lock);
    b->error[0] = '\0';
    pthread_mutex_unlock(&b->lock);
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
    tb_transfer_state state = {0};
    pthread_mutex_lock(&b->lock);
    const tb_transfer *t = b->transfers[0] ? b->transfers[0] : b->transfers[1];
    bool is_busy = b->is_busy[0] || b->is_busy[1], is_send = t ? t == b->transfers[1] : b->is_busy[1];
    if (t)
        tb_transfer_query(t, &state);
    else if (!is_busy)
        state = b->last;
    snprintf(error, sizeof error, "%s", b->error);
    uint64_t version = b->version;
    pthread_mutex_unlock(&b->lock);
    *r = (tb__message){.state = !b->batch  ? "registering"
                                : !is_busy ? (*error ? "failed" : "idle")
                                : is_send  ? "sending"
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
    job->deadline_ms = tb__now_ms() + tb__agent_job_timeout(job);
    switch (job->message.kind) {
    case TB__INIT_PAIR:
        tb__agent_init_pair(job);
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

static void finish_register(agent_job *job) {
    agent_batch *b = job->batch;
    b->batch = job->registered;
    b->nbytes = job->nbytes;
    if (job->status == TB_OK || b->farewell) {
        tb__agent_job_end(job, job->status == TB_OK ? TB_OK : tb__fail(job->status, "%s", job->why));
    } else {
        b->is_doomed = true;
        b->farewell = job; /* told when its name is free again */
    }
    leave_batch(b);
}

static void finish_transfer(agent_job *job) {
    agent_batch *b = job->batch;
    b->is_busy[job->message.direction == TB__SEND] = false;
    count_transfer(job);
    if (job->status != TB_OK) {
        pthread_mutex_lock(&b->lock);
        snprintf(b->error, sizeof b->error, "%s", job->why);
        pthread_mutex_unlock(&b->lock);
    }
    tb__agent_job_end(job, job->status == TB_OK ? TB_OK : tb__fail(job->status, "%s", job->why));
    leave_batch(b);
}

void tb__agent_finish(agent_job *job) {
    if (job->message.kind == TB__INIT_PAIR)
        tb__agent_finish_init_pair(job);
    else if (job->message.kind == TB__REGISTER_TENSORS)
        finish_register(job);
    else
        finish_transfer(job);
}

void tb__agent_forget(tb__agent *agent, agent_session *s) {
    agent_batch *b, *next;
    for (b = LIST_FIRST(&agent->batches); b; b = next) {
        next = LIST_NEXT(b, link);
        if (b->session == s && !b->is_doomed)
            doom_batch(b);
    }
    tb__agent_forget_pairs(agent, s);
}
