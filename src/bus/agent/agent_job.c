/* Jobs: commands that run, and background work. A job's thread only does the job's own work; the loop handles its
 * result. */
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
    atomic_fetch_add(&s->nbytes, job->nbytes);
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
    if (!job->session)
        return; /* background work has no frame */
    size_t before = atomic_fetch_sub(&job->session->nbytes, job->nbytes);
    if (before > TB__AGENT_MAX_HELD)
        tb__endpoint_wake(&job->agent->endpoint); /* the session may be read again */
    free(job->frame);
    job->frame = NULL;
    job->nbytes = 0;
}

int tb__agent_job_timeout(const agent_job *job) {
    uint64_t asked = job->message.timeout_ms;
    return asked == 0 ? job->agent->timeout_ms : asked > INT32_MAX ? INT32_MAX : (int)asked;
}

static void *job_main(void *arg) {
    agent_job *job = arg;
    tb__agent *agent = job->agent;
    if (job->work)
        job->work(job->arg);
    else
        job->status = job->run(job);
    if (job->status != TB_OK)
        snprintf(job->why, sizeof job->why, "%s", tb_error_detail());
    pthread_mutex_lock(&agent->done_lock);
    job->next = agent->done;
    agent->done = job;
    pthread_mutex_unlock(&agent->done_lock);
    tb__endpoint_wake(&agent->endpoint);
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
    tb_status status = tb__start_thread(&job->thread, "tb-job", job_main, job);
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
    if (job->session) {
        job->session->njobs--;
        job->session->nbegun -= job->is_begun;
    }
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

static void finish_background_job(agent_job *job) {
    if (job->after)
        job->after(job->arg);
    free_job(job);
}

static void start_background_job(agent_job *job) {
    if (tb__start_thread(&job->thread, "tb-background", job_main, job) == TB_OK) {
        job->agent->nbackground++;
        return;
    }
    job->work(job->arg);
    finish_background_job(job);
}

void tb__agent_run_in_background(tb__agent *agent, agent_session *s, void (*work)(void *arg), void (*after)(void *arg),
                                 void *arg) {
    agent_job *job = tb__calloc(1, sizeof *job);
    if (!job) {
        work(arg);
        if (after)
            after(arg);
        return;
    }
    *job = (agent_job){.agent = agent, .session = s, .work = work, .after = after, .arg = arg};
    agent->njobs++;
    if (s)
        s->njobs++;
    if (agent->nbackground < TB__AGENT_MAX_BACKGROUND) {
        start_background_job(job);
        return;
    }
    job->next = agent->background; /* their order does not matter */
    agent->background = job;
}

static void start_background_jobs(tb__agent *agent) {
    while (agent->background && agent->nbackground < TB__AGENT_MAX_BACKGROUND) {
        agent_job *job = agent->background;
        agent->background = job->next;
        start_background_job(job);
    }
}

void tb__agent_reap_jobs(tb__agent *agent) {
    pthread_mutex_lock(&agent->done_lock);
    agent_job *list = agent->done, *news = agent->raised_jobs;
    agent->done = agent->raised_jobs = NULL;
    pthread_mutex_unlock(&agent->done_lock);
    for (agent_job *job = news, *next; job; job = next) { /* first: some of them may have ended, too */
        next = job->next_raised;
        tb__agent_send_events(job);
    }
    for (agent_job *job = list, *next; job; job = next) {
        next = job->next;
        pthread_join(job->thread, NULL);
        if (!job->work) {
            tb__agent_finish_command(job);
            continue;
        }
        agent->nbackground--;
        finish_background_job(job);
    }
    start_background_jobs(agent);
}
