/* The agent's loop. */
#include "bus/agent/agent_inside.h"

#include "base/descriptors.h"
#include "base/int.h"
#include "base/log.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

enum { EVENTS = 64, DEFAULT_TIMEOUT_MS = 30000 };

static tb_status watch_fd(const tb__agent *agent, int fd, const void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = (void *)what};
    return epoll_ctl(agent->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? TB_OK
                                                                   : tb__fail(TB_IO, "epoll_ctl: %s", strerror(errno));
}

static tb_status open_agent(tb__agent *agent, const tb__agent_opts *o) {
    char url[sizeof agent->listener.address.url];
    tb__address address;
    if (strlen(o->socket) >= sizeof address.path)
        return tb__fail(TB_INVALID, "the path of the agent's socket has %zu bytes, and may have %zu: %.200s",
                        strlen(o->socket), sizeof address.path - 1, o->socket);
    agent->epoll = epoll_create1(EPOLL_CLOEXEC);
    agent->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    agent->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    agent->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (agent->epoll < 0 || agent->wake < 0 || agent->stop < 0 || agent->spare < 0)
        return tb__fail(TB_IO, "the agent's descriptors: %s", tb__errno_text(errno));
    snprintf(url, sizeof url, "unix:%s", o->socket);
    TB_TRY(tb__address_parse(url, &address));
    TB_TRY(tb__listener_open(&address, true, &agent->listener));
    TB_TRY(watch_fd(agent, agent->listener.socket.fd, &agent->listener));
    TB_TRY(watch_fd(agent, agent->wake, &agent->wake));
    TB_TRY(watch_fd(agent, agent->stop, &agent->stop));
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
    agent->epoll = agent->wake = agent->stop = agent->spare = -1;
    agent->listener.socket.fd = agent->listener.lock.fd = -1;
    agent->index = opts->index;
    agent->size = opts->size;
    agent->checksum = opts->checksum;
    agent->no_gpu = opts->no_gpu;
    agent->timeout_ms = opts->timeout_ms ? opts->timeout_ms : DEFAULT_TIMEOUT_MS;
    agent->begun_ms = tb__now_ms();
    pthread_mutex_init(&agent->done_lock, NULL);
    pthread_mutex_init(&agent->enter_lock, NULL);
    pthread_mutex_init(&agent->report_lock, NULL);
    tb__monotonic_cond_init(&agent->report_made);
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
    eventfd_write(agent->stop, 1);
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

/* Releases sessions that are gone, and frees those without jobs. Releasing one may close another, because a reply to it
 * fails. */
static void release_sessions(tb__agent *agent) {
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
            tb__agent_session_watch(s);
    }
}

/* Work between events. Returns how long to sleep. */
static int do_housekeeping(tb__agent *agent) {
    int64_t next = tb__agent_pairs_expire(agent), other = close_expired_sessions(agent);
    release_sessions(agent);
    next = tb__min64(next, other);
    if (agent->is_full)
        tb__agent_listen_again(agent);
    if (agent->is_full && !agent->is_stopping)
        next = tb__min64(next, tb__now_ms() + TB__RELISTEN_MS);
    return next == INT64_MAX ? -1 : tb__ms_until(next) + 1;
}

/* The second stop ends the loop at once; tb__agent_destroy then ends what still runs. */
static void on_stop(tb__agent *agent) {
    eventfd_t times = 0;
    eventfd_read(agent->stop, &times);
    agent->is_forced = agent->is_stopping || times > 1;
    if (agent->is_stopping)
        return;
    agent->is_stopping = true;
    epoll_ctl(agent->epoll, EPOLL_CTL_DEL, agent->listener.socket.fd, NULL);
    tb__log(TB_LOG_INFO, "agent: stopping; %zu commands are under way", agent->njobs);
}

static void on_epoll_event(tb__agent *agent, const struct epoll_event *event) {
    eventfd_t unused;
    if (event->data.ptr == &agent->listener) {
        tb__agent_accept(agent);
    } else if (event->data.ptr == &agent->stop) {
        on_stop(agent);
    } else if (event->data.ptr == &agent->wake) {
        eventfd_read(agent->wake, &unused);
        tb__agent_reap_jobs(agent);
        tb__agent_serve_reports(agent);
    } else {
        agent_session *s = event->data.ptr;
        if (!s->is_gone && event->events & EPOLLOUT)
            tb__agent_session_writable(s);
        if (!s->is_gone && event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
            if (s->is_closing ||
                !(event->events & EPOLLIN)) /* the connection has ended, which epoll would report again and again */
                tb__agent_session_close(s);
            else
                tb__agent_session_readable(s);
        }
    }
}

tb_status tb__agent_run(tb__agent *agent) {
    struct epoll_event events[EVENTS];
    int sleep_ms = -1;
    while (!agent->is_forced && (!agent->is_stopping || agent->njobs > 0)) {
        int n = epoll_wait(agent->epoll, events, EVENTS, sleep_ms);
        if (n < 0 && errno != EINTR)
            return tb__fail(TB_IO, "epoll_wait: %s", strerror(errno));
        for (int i = 0; i < n; i++)
            on_epoll_event(agent, &events[i]);
        sleep_ms = do_housekeeping(agent);
    }
    return TB_OK;
}

void tb__agent_destroy(tb__agent *agent) {
    if (!agent)
        return;
    agent_session *s;
    for (s = LIST_FIRST(&agent->sessions); s; s = LIST_NEXT(s, link))
        tb__agent_session_close(s);
    release_sessions(agent);
    while (agent->njobs > 0) { /* jobs of closed sessions give up, and have deadlines */
        eventfd_t unused;
        struct pollfd end = {.fd = agent->wake, .events = POLLIN};
        poll(&end, 1, do_housekeeping(agent));
        eventfd_read(agent->wake, &unused);
        tb__agent_reap_jobs(agent);
        release_sessions(agent);
    }
    if (agent->listener.socket.fd >= 0)
        tb__listener_close(&agent->listener);
    tb_world_destroy(agent->world);
    tb__fd_close(agent->epoll);
    tb__fd_close(agent->wake);
    tb__fd_close(agent->stop);
    tb__fd_close(agent->spare);
    pthread_mutex_destroy(&agent->done_lock);
    pthread_mutex_destroy(&agent->enter_lock);
    pthread_mutex_destroy(&agent->report_lock);
    pthread_cond_destroy(&agent->report_made);
    free(agent->report);
    free(agent->group);
    free(agent->token);
    free(agent);
}
