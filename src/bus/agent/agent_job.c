/* Jobs: commands that run, and background work. */
#include "bus/agent/agent_inside.h"

#include "base/log.h"
#include "bus/agent/semaphore.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

agent_job *tb__agent_job_create(agent_session *s, tb__blob map) {
    if (tb__frame_is_between(&s->connection.in) && !tb__agent_session_keep_fds(s))
        return NULL;
    agent_job *job = tb__calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->frame = tb__memdup(map.data, map.nbytes, 1);
    if (!job->frame) {
        free(job);
        return NULL;
    }
    job->nbytes = map.nbytes;
    s->nbytes += job->nbytes;
    job->agent = s->agent;
    job->session = s;
    job->seq = s->nframes++;
    job->fds = s->fds.item; /* those that came with the frame */
    job->nfds = s->fds.count;
    s->fds = (tb__fds){0};
    s->njobs++;
    s->agent->njobs++;
    return job;
}

void tb__agent_job_drop_frame(agent_job *job) {
    if (job->session->nbytes > TB__AGENT_MAX_HELD)
        tb__endpoint_wake(&job->agent->endpoint); /* the session may be read again */
    job->session->nbytes -= job->nbytes;
    free(job->frame);
    job->frame = NULL;
    job->nbytes = 0;
}

int tb__agent_job_timeout(const agent_job *job) {
    uint64_t asked = job->message.timeout_ms;
    return asked == 0 ? job->agent->timeout_ms : asked > INT32_MAX ? INT32_MAX : (int)asked;
}

/* The thread has given the lock back; the agent may be gone after this. */
static void end_thread(tb__agent *agent) {
    tb__endpoint_wake(&agent->endpoint);
    atomic_fetch_sub(&agent->nthreads, 1);
}

/* Its thread ends by end_thread. */
static tb_status start_thread(tb__agent *agent, void *(*run)(void *arg), void *arg) {
    pthread_t thread;
    atomic_fetch_add(&agent->nthreads, 1);
    tb_status status = tb__start_thread(&thread, "tb-job", run, arg);
    if (status == TB_OK)
        pthread_detach(thread);
    else
        atomic_fetch_sub(&agent->nthreads, 1);
    return status;
}

static void *job_main(void *arg) {
    agent_job *job = arg;
    tb__agent *agent = job->agent;
    job->status = job->run(job);
    if (job->status != TB_OK)
        snprintf(job->why, sizeof job->why, "%s", tb_error_detail());
    tb__agent_lock(agent);
    tb__agent_finish_command(job);
    tb__agent_unlock(agent);
    end_thread(agent);
    return NULL;
}

tb_status tb__agent_job_begin(agent_job *job) {
    tb__agent *agent = job->agent;
    if (job->session->nbegun >= TB__AGENT_MAX_COMMANDS)
        return tb__fail(TB_TOO_BIG, "%d commands are under way; wait for one", TB__AGENT_MAX_COMMANDS);
    if (agent->nbegun >= TB__AGENT_MAX_THREADS)
        return tb__fail(TB_TOO_BIG, "%d commands of all the agent's clients are under way; wait for one",
                        TB__AGENT_MAX_THREADS);
    job->is_begun = true;
    job->session->nbegun++;
    agent->nbegun++;
    return TB_OK;
}

void tb__agent_job_start(agent_job *job, tb_status (*run)(agent_job *job)) {
    job->run = run;
    if (job->batch)
        job->batch->njobs++;
    tb_status status = start_thread(job->agent, job_main, job);
    if (status == TB_OK)
        return; /* the job belongs to its thread now */
    job->status = status;
    snprintf(job->why, sizeof job->why, "%s", tb_error_detail());
    tb__agent_finish_command(job);
}

/* The semaphore is the client's, which made it for this command; it is gone when it has been posted. */
static void post_semaphore(const agent_job *job) {
    const char *name = job->message.semaphore_name;
    if (name && tb__semaphore_post(name) != TB_OK)
        tb__log(TB_LOG_WARN, "agent: semaphore '%.100s' was not posted: %s", name, tb_error_detail());
}

void tb__agent_job_answer(agent_job *job, tb_status status) {
    job->reply.kind = TB__REPLY;
    job->reply.seq = job->seq;
    job->reply.status = status;
    job->reply.message = status == TB_OK ? "" : tb_error_detail();
    if (!job->is_answered)
        tb__agent_session_reply(job->session, &job->reply);
    job->is_answered = true;
}

static void free_job(agent_job *job) {
    for (size_t i = 0; i < job->nfds; i++)
        close(job->fds[i]);
    free(job->fds);
    free(job->text);
    free(job->batches.item);
    tb__arena_fini(&job->arena);
    tb__agent_job_drop_frame(job);
    job->agent->njobs--;
    job->agent->nbegun -= job->is_begun;
    job->session->njobs--;
    job->session->nbegun -= job->is_begun;
    free(job);
}

void tb__agent_job_end(agent_job *job, tb_status status) {
    agent_session *s = job->session;
    tb__agent_job_answer(job, status);
    post_semaphore(job);
    free_job(job);
    if (s->is_closing)
        tb__agent_session_close_when_sent(s);
}

void tb__agent_job_finish(agent_job *job) {
    tb__agent_job_end(job, job->status == TB_OK ? TB_OK : tb__fail(job->status, "%s", job->why));
}

/* A copy, since `after` may free it. */
static void finish_work(agent_work work) {
    work.after(work.arg);
    work.agent->njobs--;
    if (work.session)
        work.session->njobs--;
}

static bool start_work(tb__agent *agent);

static void *work_main(void *arg) {
    agent_work *work = arg;
    tb__agent *agent = work->agent;
    work->run(work->arg);
    tb__agent_lock(agent);
    finish_work(*work);
    agent->nbackground--;
    (void)start_work(agent);
    tb__agent_unlock(agent);
    end_thread(agent);
    return NULL;
}

/* The next that waits. False: there is none, or too many run, or there is no thread for it. */
static bool start_work(tb__agent *agent) {
    agent_work *work = SLIST_FIRST(&agent->background);
    if (!work || agent->nbackground == TB__AGENT_MAX_BACKGROUND || start_thread(agent, work_main, work) != TB_OK)
        return false;
    SLIST_REMOVE_HEAD(&agent->background, link);
    agent->nbackground++;
    return true;
}

void tb__agent_run_in_background(agent_work *work) {
    tb__agent *agent = work->agent;
    agent->njobs++;
    if (work->session)
        work->session->njobs++;
    SLIST_INSERT_HEAD(&agent->background, work, link); /* their order does not matter */
    if (!start_work(agent))
        tb__endpoint_wake(&agent->endpoint);
}

void tb__agent_do_waiting_work(tb__agent *agent) {
    agent_work *work = SLIST_FIRST(&agent->background);
    if (!work || agent->nbackground > 0 || start_work(agent))
        return;
    SLIST_REMOVE_HEAD(&agent->background, link);
    tb__agent_unlock(agent);
    work->run(work->arg);
    tb__agent_lock(agent);
    finish_work(*work);
    tb__endpoint_wake(&agent->endpoint);
}
