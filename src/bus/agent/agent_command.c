/* The commands, except transfers. A batch belongs to one client. */
#include "bus/agent/agent_inside.h"

#include "base/process.h"

#include <inttypes.h>
#include <string.h>

static agent_batch *find_batch(const tb__agent *agent, const char *id) {
    for (agent_batch *b = LIST_FIRST(&agent->batches); b; b = LIST_NEXT(b, link)) {
        if (strcmp(b->id, id) == 0)
            return b;
    }
    return NULL;
}

tb_status tb__agent_get_batch(agent_job *job) {
    agent_batch *b = find_batch(job->agent, job->message.batch_id);
    if (!b || b->session != job->session || b->is_ending)
        return tb__fail(TB_INVALID, "there is no batch '%.100s'", job->message.batch_id);
    job->batch = b;
    return TB_OK;
}

static void release_batch_pair(const agent_batch *b, const agent_batch_pair *s) {
    tb__loop *loop = b->session->agent->world->loop;
    tb__loop_lock(loop);
    tb__pair_unref(s->held);
    tb__loop_unlock(loop);
    tb__agent_pair_remove_batch(s->pair);
}

/* Removes a pair whose tensors are gone already. */
static void remove_batch_pair(agent_batch *b, size_t i) {
    agent_batch_pair gone = b->batch_pairs.item[i];
    b->batch_pairs.count--;
    memmove(&b->batch_pairs.item[i], &b->batch_pairs.item[i + 1], (b->batch_pairs.count - i) * sizeof gone);
    tb__agent_update_version(b);
    release_batch_pair(b, &gone);
}

static void remove_round(agent_batch *b, uint64_t round) {
    for (size_t i = b->batch_pairs.count; i-- > 0;) {
        if (b->batch_pairs.item[i].round == round)
            remove_batch_pair(b, i);
    }
}

static void free_agent_batch(agent_batch *b) {
    for (size_t i = 0; i < b->batch_pairs.count; i++)
        release_batch_pair(b, &b->batch_pairs.item[i]);
    LIST_REMOVE(b, link);
    free(b->batch_pairs.item);
    free(b->id);
    free(b);
}

static void empty_agent_batch(void *arg) {
    tb__agent_batch_empty(arg);
}

static void finish_ending_batch(void *arg) {
    agent_job *cleanup_job = ((agent_batch *)arg)->cleanup_job;
    free_agent_batch(arg);
    if (cleanup_job)
        tb__agent_job_finish(cleanup_job);
}

/* Freeing the memory may take long. The batch's name is taken until then. */
static void end_batch(agent_batch *b) {
    b->is_ending = true;
    b->ending = (agent_work){.agent = b->session->agent,
                             .session = b->session,
                             .run = empty_agent_batch,
                             .after = finish_ending_batch,
                             .arg = b};
    tb__agent_run_in_background(&b->ending);
}

/* Cancels the batch's jobs; the batch ends with the last of them. */
static void begin_ending_batch(agent_batch *b) {
    b->is_ending = true;
    for (int i = 0; i < 2; i++) {
        if (b->transfers[i])
            tb__transfer_begin_cancel(b->transfers[i]);
    }
    atomic_store(&b->is_cancelled, true);
    tb__world_wake_waiters(b->session->agent->world);
    if (b->njobs == 0)
        end_batch(b);
}

void tb__agent_batch_job_ended(agent_batch *b) {
    if (--b->njobs == 0 && b->is_ending)
        end_batch(b);
}

/* `local` NULL: either side. */
static size_t find_batch_pair(const agent_batch *b, const char *pair, const char *local) {
    size_t i = 0;
    while (i < b->batch_pairs.count && (strcmp(b->batch_pairs.item[i].pair->name, pair) != 0 ||
                                        (local && strcmp(b->batch_pairs.item[i].pair->local, local) != 0)))
        i++;
    return i;
}

static tb_status add_batch_pair(tb__agent *agent, agent_batch *b, agent_pair *p) {
    if (!tb__vec_push(&b->batch_pairs, (agent_batch_pair){.pair = p, .held = p->pair, .round = b->round}))
        return TB_NO_MEMORY;
    p->nbatches++;
    tb__loop_lock(agent->world->loop);
    p->pair->refs++;
    tb__loop_unlock(agent->world->loop);
    return TB_OK;
}

/* A rank without tensors takes part in all pairs that its client has made. */
static tb_status add_client_pairs(const agent_job *job, agent_batch *b) {
    for (agent_pair *p = LIST_FIRST(&job->agent->pairs); p; p = LIST_NEXT(p, link)) {
        if (p->state == PAIR_MADE && tb__agent_pair_has_user(p, job->session))
            TB_TRY(add_batch_pair(job->agent, b, p));
    }
    return b->batch_pairs.count > 0
               ? TB_OK
               : tb__fail(TB_INVALID, "batch '%.100s' has no tensors, and its client has made no pair", b->id);
}

const char *tb__agent_side_of(const agent_job *job, size_t tensor) {
    return job->message.sides.item[tensor];
}

/* The group for which the client has made the pair: the agent's own, if it has for that. */
static tb_status find_side(const agent_job *job, const char *pair, const char **out) {
    const tb__agent *agent = job->agent;
    const agent_pair *found = tb__agent_find_pair(agent, pair, agent->group);
    for (const agent_pair *p = LIST_FIRST(&agent->pairs); p && (!found || strcmp(found->local, agent->group) != 0);
         p = LIST_NEXT(p, link)) {
        if (strcmp(p->name, pair) != 0 || !tb__agent_pair_has_user(p, job->session))
            continue;
        if (found)
            return tb__fail(TB_INVALID,
                            "pair '%.100s' was made for group '%s' and for group '%s'; pass 'sides' to say for which "
                            "the tensors are",
                            pair, found->local, p->local);
        found = p;
    }
    *out = found ? found->local : agent->group;
    return TB_OK;
}

/* Fills in sides that are missing in the command. */
static tb_status complete_sides(agent_job *job) {
    const tb__entries *tensors = &job->message.tensors;
    if (job->message.sides.count > 0 || tensors->count == 0)
        return TB_OK;
    const char **sides = tb__arena_alloc(&job->arena, tensors->count, sizeof *sides);
    if (!sides)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < tensors->count; i++) {
        if (i > 0 && strcmp(tensors->item[i].pair_name, tensors->item[i - 1].pair_name) == 0)
            sides[i] = sides[i - 1];
        else
            TB_TRY(find_side(job, tensors->item[i].pair_name, &sides[i]));
    }
    job->message.sides = (tb__texts){tensors->count, sides};
    return TB_OK;
}

/* Adds the pairs of the tensors, none of which may be from an earlier round. */
static tb_status add_named_pairs(agent_job *job, agent_batch *b) {
    const tb__entries *tensors = &job->message.tensors;
    const char *last = NULL, *last_side = NULL;
    TB_TRY(complete_sides(job));
    if (job->message.sides.count != tensors->count)
        return tb__fail(TB_INVALID, "RegisterTensors has %zu tensors, and the sides of %zu", tensors->count,
                        job->message.sides.count);
    for (size_t i = 0; i < tensors->count; i++) {
        const char *name = tensors->item[i].pair_name, *side = tb__agent_side_of(job, i);
        if (last && strcmp(last, name) == 0 && strcmp(last_side, side) == 0)
            continue; /* like most */
        last = name;
        last_side = side;
        agent_pair *p = tb__agent_find_pair(job->agent, name, side);
        if (!p || p->state != PAIR_MADE)
            return tb__fail(TB_INVALID, "there is no pair '%.100s'", name);
        size_t known = find_batch_pair(b, name, side);
        if (known < b->batch_pairs.count && b->batch_pairs.item[known].round == b->round)
            continue;
        if (known < b->batch_pairs.count)
            return tb__fail(TB_CONFLICT, "pair '%.100s' is in batch '%.100s' already", name, b->id);
        TB_TRY(add_batch_pair(job->agent, b, p));
    }
    return TB_OK;
}

/* Pairs change only between transfers. */
static tb_status begin_change(agent_job *job, agent_batch *b) {
    if (b->is_changing)
        return tb__fail(TB_REFUSED, "pairs are being added to batch '%.100s' or removed from it", b->id);
    if (b->busy[0] || b->busy[1])
        return tb__fail(TB_REFUSED, "batch '%.100s' is being %s; pairs are added and removed between transfers", b->id,
                        b->busy[1] ? "sent" : "received");
    b->is_changing = true;
    job->batch = b;
    return TB_OK;
}

/* Adds pairs to a registered batch. */
static tb_status extend_batch(agent_job *job, agent_batch *b) {
    TB_TRY(begin_change(job, b));
    b->round++;
    tb_status status = add_named_pairs(job, b);
    if (status == TB_OK && job->message.tensors.count == 0)
        status = tb__fail(TB_INVALID, "no tensors are given for batch '%.100s'", b->id);
    if (status == TB_OK) {
        tb__agent_job_start(job, tb__agent_batch_fill);
        return TB_OK;
    }
    tb__saved_detail why = tb__save_detail();
    remove_round(b, b->round);
    b->is_changing = false;
    return tb__fail(status, "%s", why.text);
}

static tb_status begin_register(agent_job *job) {
    const char *id = job->message.batch_id;
    agent_batch *b = find_batch(job->agent, id);
    if (b && b->session == job->session && b->batch && !b->is_ending)
        return extend_batch(job, b);
    if (b)
        return tb__fail(TB_CONFLICT, "there is a batch '%.100s' already", id);
    b = tb__calloc(1, sizeof *b);
    if (!b || !(b->id = tb__strdup(id))) {
        free(b);
        return TB_NO_MEMORY;
    }
    b->session = job->session;
    b->round = 1;
    LIST_INSERT_HEAD(&job->agent->batches, b, link);
    tb_status status = job->message.tensors.count > 0 ? add_named_pairs(job, b) : add_client_pairs(job, b);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        free_agent_batch(b);
        return tb__fail(status, "%s", why.text);
    }
    job->batch = b;
    tb__agent_job_start(job, tb__agent_batch_fill);
    return TB_OK;
}

static tb_status run_remove_pair(agent_job *job) {
    return tb__agent_batch_drop(job->batch, job->leaving);
}

static void finish_remove_pair(agent_job *job) {
    agent_batch *b = job->batch;
    for (size_t i = b->batch_pairs.count; i-- > 0 && job->status == TB_OK;) { /* both sides of it */
        if (strcmp(b->batch_pairs.item[i].pair->name, job->message.pair_name) == 0)
            remove_batch_pair(b, i);
    }
    b->is_changing = false;
    tb__agent_job_finish(job);
}

tb_status tb__agent_check_registered(const agent_batch *b) {
    return b->batch ? TB_OK : tb__fail(TB_REFUSED, "batch '%.100s' is being registered", b->id);
}

/* The whole batch, or one pair of it. */
static tb_status begin_cleanup(agent_job *job) {
    agent_batch *b = job->batch;
    const char *pair = job->message.pair_name;
    if (!pair) {
        b->cleanup_job = job;
        begin_ending_batch(b);
        return TB_OK;
    }
    job->leaving = find_batch_pair(b, pair, NULL);
    TB_TRY(tb__agent_check_registered(b));
    if (job->leaving == b->batch_pairs.count)
        return tb__fail(TB_INVALID, "pair '%.100s' is not in batch '%.100s'", pair, b->id);
    TB_TRY(begin_change(job, b));
    tb__agent_job_start(job, run_remove_pair);
    return TB_OK;
}

static tb_status reply_report(agent_job *job) {
    tb__plans_state plans = {0};
    TB_TRY(tb__agent_make_report(job->agent, job->session, job->message.lists_tensors, &job->text));
    tb__local_world_plans(job->agent->world, &plans);
    job->reply = (tb__message){.report = {(const uint8_t *)job->text, strlen(job->text)},
                               .plan_hits = tb__some_uint(plans.hits),
                               .plan_misses = tb__some_uint(plans.misses),
                               .plan_bytes = tb__some_uint(plans.nbytes)};
    return TB_OK;
}

static tb_status reply_dump(agent_job *job) {
    TB_TRY(tb__agent_check_registered(job->batch));
    TB_TRY(tb_batch_dump(job->batch->batch, job->message.direction == TB__SEND, &job->text));
    job->reply.report = (tb__blob){(const uint8_t *)job->text, strlen(job->text)};
    return TB_OK;
}

bool tb__agent_find_seat(const tb__agent *agent, const char *group, tb__membership *out) {
    tb__loop_lock(agent->world->loop); /* seats may be added meanwhile */
    const tb__membership *known = tb__world_find_membership(agent->world, group);
    *out = known ? *known : (tb__membership){0};
    tb__loop_unlock(agent->world->loop);
    return known;
}

/* A seat that the agent has stays its own: others of its clients may use it, too. */
tb_status tb__agent_enter(tb__agent *agent, const char *group, int32_t index, int32_t size) {
    tb__membership seat;
    tb_status status = TB_OK;
    pthread_mutex_lock(&agent->enter_lock); /* clients may ask for one group at the same time */
    if (!tb__agent_find_seat(agent, group, &seat))
        status = tb_world_enter(agent->world, group, index, size);
    else if (seat.index != index || seat.size != size)
        status = tb__fail(TB_CONFLICT,
                          "the agent has seat %" PRId32 " of %" PRId32 " in group '%.100s', not seat %" PRId32
                          " of %" PRId32,
                          seat.index, seat.size, group, index, size);
    pthread_mutex_unlock(&agent->enter_lock);
    return status;
}

static tb_status run_enter(agent_job *job) {
    const tb__message *m = &job->message;
    return tb__agent_enter(job->agent, m->group_name, (int32_t)m->seat, (int32_t)m->seats);
}

/* Does not wait for a client that has gone. */
static tb_status run_await_members(agent_job *job) {
    enum { LOOK_MS = 200 };
    tb_status status = TB_TIMEOUT;
    while (status == TB_TIMEOUT && !atomic_load(&job->session->is_gone)) {
        int left_ms = tb__ms_until(job->deadline_ms);
        status = tb_world_wait(job->agent->world, job->message.group_name,
                               left_ms < 1         ? 1
                               : left_ms < LOOK_MS ? left_ms
                                                   : LOOK_MS);
        if (left_ms == 0)
            break;
    }
    return status;
}

static tb_status run_list_groups(agent_job *job) {
    int left_ms = tb__ms_until(job->deadline_ms);
    TB_TRY(tb_world_groups(job->agent->world, left_ms < 1 ? 1 : left_ms, &job->text));
    job->reply.report = (tb__blob){(const uint8_t *)job->text, strlen(job->text)};
    return TB_OK;
}

static void finish_register(agent_job *job) {
    agent_batch *b = job->batch;
    if (b->is_changing) {
        if (job->status != TB_OK)
            remove_round(b, b->round);
        else
            tb__agent_update_version(b);
        b->is_changing = false;
        tb__agent_job_finish(job);
        return;
    }
    b->batch = job->registered;
    if (job->status == TB_OK || b->cleanup_job) {
        tb__agent_job_finish(job);
    } else {
        b->is_ending = true;
        b->cleanup_job = job; /* answered when the batch's name is free again */
    }
}

enum {
    HAS_BATCH = 1, /* the command names a batch, job->batch */
    MAY_WAIT = 2,  /* it starts a thread, or waits for one: their number is limited */
    IS_NEW = 4,    /* it begins new work, which a stopping agent refuses */
};

/* A command is answered at once, with the status that `now` returns; or `begin` starts it, unless it fails; or it runs
 * in a thread. */
static const struct command {
    unsigned flags;
    tb_status (*now)(agent_job *job);
    tb_status (*begin)(agent_job *job); /* the job may have ended when it returns TB_OK */
    tb_status (*run)(agent_job *job);
    void (*finish)(agent_job *job); /* when its thread has ended; NULL: it is answered */
} commands[TB__MESSAGE_KINDS] = {
    [TB__INIT_PAIR] = {MAY_WAIT | IS_NEW, .begin = tb__agent_init_pair, .finish = tb__agent_finish_init_pair},
    [TB__REGISTER_TENSORS] = {MAY_WAIT | IS_NEW, .begin = begin_register, .finish = finish_register},
    [TB__TRANSFER] = {HAS_BATCH | MAY_WAIT | IS_NEW, .begin = tb__agent_begin_transfer,
                      .finish = tb__agent_finish_transfer},
    [TB__QUERY_STATUS] = {HAS_BATCH, .begin = tb__agent_query_status, .finish = tb__agent_finish_query},
    [TB__CLEANUP_BATCH] = {HAS_BATCH, .begin = begin_cleanup, .finish = finish_remove_pair},
    [TB__PROCEED] = {HAS_BATCH, .now = tb__agent_proceed},
    [TB__INSPECT] = {.now = reply_report},
    [TB__ENTER] = {MAY_WAIT | IS_NEW, .run = run_enter},
    [TB__AWAIT_MEMBERS] = {MAY_WAIT | IS_NEW, .run = run_await_members},
    [TB__CLEANUP_PAIR] = {.now = tb__agent_cleanup_pair},
    [TB__AWAIT_TENSORS] = {HAS_BATCH | MAY_WAIT, .begin = tb__agent_await_tensors},
    [TB__CANCEL] = {HAS_BATCH, .now = tb__agent_cancel},
    [TB__INVALIDATE] = {MAY_WAIT, .begin = tb__agent_invalidate, .finish = tb__agent_finish_invalidate},
    [TB__DUMP] = {HAS_BATCH, .now = reply_dump},
    [TB__LIST_GROUPS] = {MAY_WAIT | IS_NEW, .run = run_list_groups},
};

static tb_status check_command(agent_job *job) {
    const tb__message *m = &job->message;
    const struct command *c = &commands[m->kind];
    const char *name = tb__message_schema(m->kind)->name;
    if (!c->now && !c->begin && !c->run)
        return tb__fail(TB_INVALID, "a %s is not a command", name);
    if (m->kind >= TB__ENTER && job->session->protocol < 2)
        return tb__fail(TB_INVALID, "a %s is a command of version 2 of the protocol; this client speaks version 1",
                        name);
    if (job->agent->is_stopping && c->flags & IS_NEW)
        return tb__fail(TB_REFUSED, "the agent is stopping");
    bool removes_pair = m->kind == TB__CLEANUP_BATCH && m->pair_name;
    bool asks_group = m->kind == TB__QUERY_STATUS && m->question;
    if (c->flags & MAY_WAIT || removes_pair || asks_group)
        TB_TRY(tb__agent_job_begin(job));
    return c->flags & HAS_BATCH ? tb__agent_get_batch(job) : TB_OK;
}

void tb__agent_run_command(agent_job *job) {
    const struct command *c = &commands[job->message.kind];
    job->deadline_ms = tb__now_ms() + tb__agent_job_timeout(job);
    tb_status status = check_command(job);
    if (status == TB_OK && c->run)
        tb__agent_job_start(job, c->run);
    else if (status == TB_OK && c->begin)
        status = c->begin(job);
    else if (status == TB_OK)
        tb__agent_job_end(job, c->now(job));
    if (status != TB_OK)
        tb__agent_job_end(job, status);
}

void tb__agent_finish_command(agent_job *job) {
    const struct command *c = &commands[job->message.kind];
    agent_batch *b = job->batch;
    (c->finish ? c->finish : tb__agent_job_finish)(job);
    if (b)
        tb__agent_batch_job_ended(b);
}

void tb__agent_drop_client(tb__agent *agent, agent_session *s) {
    agent_batch *b, *next;
    for (b = LIST_FIRST(&agent->batches); b; b = next) {
        next = LIST_NEXT(b, link);
        if (b->session != s)
            continue;
        b->is_abandoned = true;
        if (!b->is_ending)
            begin_ending_batch(b);
    }
    tb__agent_drop_client_pairs(agent, s);
}
