/* The driver's loop, waits, tasks and ports. Messages and peers are in peer.c. */
#include "exec/engine_inside.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

double tb__seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void tb__engine_lock(tb__engine *engine) {
    pthread_mutex_lock(&engine->lock);
}

void tb__engine_unlock(tb__engine *engine) {
    pthread_mutex_unlock(&engine->lock);
}

/* By CLOCK_REALTIME: ThreadSanitizer does not intercept pthread_mutex_clocklock. */
bool tb__engine_lock_until(tb__engine *engine, int64_t deadline_ms) {
    struct timespec until, left = tb__time_of_ms(tb__ms_until(deadline_ms));
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += left.tv_sec + (until.tv_nsec + left.tv_nsec) / 1000000000;
    until.tv_nsec = (until.tv_nsec + left.tv_nsec) % 1000000000;
    return pthread_mutex_timedlock(&engine->lock, &until) == 0;
}

static _Thread_local char this_thread; /* no other thread has one at its address */

bool tb__engine_is_driver(const tb__engine *engine) {
    return atomic_load(&engine->driver) == &this_thread;
}

bool tb__engine_was_unlocked(tb__engine *engine) {
    bool was_unlocked = pthread_mutex_trylock(&engine->lock) == 0;
    if (was_unlocked)
        pthread_mutex_unlock(&engine->lock);
    return was_unlocked;
}

void tb__engine_signal(tb__engine *engine) {
    pthread_cond_broadcast(&engine->changed);
}

void tb__engine_poke(tb__engine *engine) {
    eventfd_write(engine->wake, 1);
}

void tb__engine_wake(tb__engine *engine) {
    engine->again = true;
    if (!engine->is_turning)
        tb__engine_poke(engine);
}

void tb__engine_set_spin(tb__engine *engine, int microseconds) {
    engine->spin_us = microseconds;
}

/* ---- Turns ---------------------------------------------------------------------------------------------------- */

/* Tasks may come and go while the lock is free during a step, so the walk begins again where the list changed. */
static bool step_tasks(tb__engine *engine) {
    bool did = false;
    for (tb__task *task = engine->tasks; task;) {
        uint64_t changes = engine->task_changes;
        task->is_stepping = true;
        did |= task->step(task);
        task->is_stepping = false;
        if (changes != engine->task_changes) {
            pthread_cond_broadcast(&engine->changed); /* whoever removes it waits */
            return true;
        }
        task = task->next;
    }
    return did;
}

/* Gives devices what was submitted, and tells them what was cancelled. */
static void begin_submitted(tb__engine *engine) {
    for (tb__submitted *it = engine->submitted; it; it = it->next) {
        if (it->is_begun && it->is_cancelled && !it->fence.is_done)
            it->device->ops->cancel(it->device, &it->fence);
        if (it->is_begun)
            continue;
        it->is_begun = true;
        tb_status status = it->is_cancelled ? tb__fail(TB_CANCELLED, "it was cancelled")
                                            : it->device->ops->run(it->device, it->job, &it->run, &it->fence);
        if (status == TB_OK)
            continue;
        it->fence = (tb__fence){.is_done = true, .status = status};
        snprintf(it->fence.why, sizeof it->fence.why, "%s", tb_error_detail());
    }
}

/* The lock is free while devices work. Whoever is told that something is done may submit more. */
static bool progress_devices(tb__engine *engine) {
    bool did = false;
    if (!engine->submitted)
        return false;
    begin_submitted(engine);
    pthread_mutex_unlock(&engine->lock);
    for (size_t i = 0; i < engine->ndevices; i++)
        did |= engine->devices[i]->ops->progress(engine->devices[i]);
    pthread_mutex_lock(&engine->lock);
    for (tb__submitted **at = &engine->submitted, *it; (it = *at);) {
        if (!it->fence.is_done) {
            at = &it->next;
            continue;
        }
        *at = it->next;
        it->done(it);
        at = &engine->submitted;
        did = true;
    }
    return did;
}

/* One look at everything. Whether there may be more to do at once. */
static bool turn(tb__engine *engine) {
    engine->is_turning = true;
    atomic_store(&engine->driver, &this_thread);
    engine->again = false;
    for (size_t i = 0; i < engine->ntransports; i++) {
        const tb_transport *t = &engine->transports[i];
        tb_status status = t->ops->progress(t->context);
        if (status != TB_OK)
            tb__log(TB_LOG_ERROR, "transport %s: %s", t->ops->name, tb_error_detail());
    }
    tb__peers_tell_losses(engine);
    bool did = step_tasks(engine);
    did |= progress_devices(engine);
    engine->is_turning = false;
    atomic_store(&engine->driver, NULL);
    return did || engine->again;
}

static void set_timer(tb__engine *engine) {
    int64_t deadline = INT64_MAX;
    for (const tb__task *task = engine->tasks; task; task = task->next)
        deadline = task->deadline_ms < deadline ? task->deadline_ms : deadline;
    if (deadline == engine->timer_ms)
        return;
    engine->timer_ms = deadline;
    struct itimerspec when = {0}; /* never */
    if (deadline != INT64_MAX)
        when.it_value = tb__time_of_ms(deadline > 0 ? deadline : 1);
    timerfd_settime(engine->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

/* Sleeps, without the lock, until a transport, a timer or a poke has something to say. A short look before: waking up
 * costs much more than what is mostly waited for. */
static void sleep_until(tb__engine *engine, int timeout_ms) {
    set_timer(engine);
    int spin_us = engine->tasks ? engine->spin_us : 0;
    pthread_mutex_unlock(&engine->lock);
    struct epoll_event event;
    int n = 0;
    if (spin_us > 0) {
        double until = tb__seconds() + spin_us * 1e-6;
        while ((n = epoll_wait(engine->epoll, &event, 1, 0)) == 0 && tb__seconds() < until)
            ;
    }
    if (n == 0)
        epoll_wait(engine->epoll, &event, 1, timeout_ms);
    pthread_mutex_lock(&engine->lock);
}

/* What woke us is level-triggered: taken back before the turn that looks at everything. */
static void take_wakes(tb__engine *engine) {
    eventfd_t unused;
    uint64_t expirations;
    eventfd_read(engine->wake, &unused);
    if (read(engine->timer, &expirations, sizeof expirations) == sizeof expirations)
        engine->timer_ms = INT64_MAX - 1; /* to be set again */
}

static void *drive(void *arg) {
    tb__engine *engine = arg;
    pthread_mutex_lock(&engine->lock);
    engine->is_driven = true;
    while (!engine->stopping) {
        take_wakes(engine);
        if (!turn(engine) && !engine->stopping)
            sleep_until(engine, -1);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* Drives until it is true or the deadline has passed. */
static bool drive_until(tb__engine *engine, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    engine->is_driven = true;
    do { /* at least once: who only looks wants to see what is there */
        take_wakes(engine);
        if (!turn(engine) && !is_true(arg))
            sleep_until(engine, tb__ms_until(deadline_ms));
    } while (!is_true(arg) && tb__now_ms() < deadline_ms);
    bool result = is_true(arg);
    engine->is_driven = false;
    pthread_cond_broadcast(&engine->changed); /* somebody else may have to drive now */
    return result;
}

bool tb__engine_wait(tb__engine *engine, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    while (!is_true(arg)) {
        if (!engine->is_driven && !engine->has_thread)
            return drive_until(engine, is_true, arg, deadline_ms);
        struct timespec until = tb__time_of_ms(deadline_ms < INT64_MAX / 2 ? deadline_ms : tb__now_ms() + (1 << 30));
        if (pthread_cond_timedwait(&engine->changed, &engine->lock, &until) == ETIMEDOUT)
            return is_true(arg);
    }
    return true;
}

void tb__engine_progress(tb__engine *engine) {
    pthread_mutex_lock(&engine->lock);
    if (!engine->is_driven && !engine->has_thread) {
        engine->is_driven = true;
        take_wakes(engine);
        bool again = turn(engine);
        engine->is_driven = false;
        set_timer(engine);
        if (again)
            tb__engine_poke(engine);
        pthread_cond_broadcast(&engine->changed);
    }
    pthread_mutex_unlock(&engine->lock);
}

int tb__engine_fd(const tb__engine *engine) {
    return engine->epoll;
}

/* ---- Tasks and ports ------------------------------------------------------------------------------------------ */

void tb__engine_add_task(tb__engine *engine, tb__task *task) {
    task->next = engine->tasks;
    task->is_stepping = false;
    engine->tasks = task;
    engine->task_changes++;
    tb__engine_wake(engine);
}

void tb__engine_remove_task(tb__engine *engine, tb__task *task) {
    for (tb__task **at = &engine->tasks; *at; at = &(*at)->next) {
        if (*at == task) {
            *at = task->next;
            engine->task_changes++;
            break;
        }
    }
    while (task->is_stepping)
        pthread_cond_wait(&engine->changed, &engine->lock);
}

void tb__engine_add_port(tb__engine *engine, tb__port *port) {
    port->id = ++engine->last_port;
    port->next = engine->ports;
    engine->ports = port;
}

void tb__engine_remove_port(tb__engine *engine, tb__port *port) {
    for (tb__port **at = &engine->ports; *at; at = &(*at)->next) {
        if (*at == port) {
            *at = port->next;
            return;
        }
    }
}

tb__device *tb__engine_find_device(const tb__engine *engine, const void *address, size_t nbytes) {
    tb__memory memory;
    size_t i = 0;
    while (i + 1 < engine->ndevices && !engine->devices[i]->ops->find(engine->devices[i], address, nbytes, &memory))
        i++;
    return engine->devices[i];
}

bool tb__engine_is_host_memory(const tb__engine *engine, const void *address) {
    return tb__engine_find_device(engine, address, 1)->ops == &tb__host_device_ops;
}

void tb__engine_submit(tb__engine *engine, tb__submitted *submitted) {
    submitted->fence = (tb__fence){0};
    submitted->is_begun = submitted->is_cancelled = false;
    submitted->next = NULL;
    tb__submitted **last = &engine->submitted;
    while (*last)
        last = &(*last)->next;
    *last = submitted;
    tb__engine_wake(engine);
}

void tb__engine_cancel(tb__engine *engine, tb__submitted *submitted) {
    submitted->is_cancelled = true;
    tb__engine_wake(engine);
}

uint64_t tb__engine_new_tag(tb__engine *engine) {
    return TB__TAG_DATA | ++engine->last_tag;
}

/* ---- Life ----------------------------------------------------------------------------------------------------- */

static tb_status open_transport(tb__engine *engine, const tb__engine_opts *o, const char *name) {
    tb_transport_env env = {.size = sizeof env,
                            .rank = engine->wire,
                            .arg = engine,
                            .lost = tb__peer_on_lost,
                            .reached = tb__peer_on_reached,
                            .is_driven = !o->manual};
    tb_transport *t = &engine->transports[engine->ntransports];
    TB_TRY(tb__transport_open(name, &env, t));
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(engine->epoll, EPOLL_CTL_ADD, t->ops->fd(t->context), &event) != 0) {
        tb__transport_close(t);
        return tb__fail(TB_IO, "watch transport %s: %s", name, strerror(errno));
    }
    engine->ntransports++;
    return TB_OK;
}

/* All that this machine has. */
static tb_status open_devices(tb__engine *engine) {
    for (const tb__device_ops *const *ops = tb__devices; *ops; ops++) {
        for (int index = 0;; index++) {
            struct epoll_event event = {.events = EPOLLIN};
            tb__device *device;
            tb_status status = (*ops)->open(index, &device);
            if (status == TB_REFUSED)
                break;
            TB_TRY(status);
            engine->devices[engine->ndevices++] = device;
            if (epoll_ctl(engine->epoll, EPOLL_CTL_ADD, (*ops)->fd(device), &event) != 0)
                return tb__fail(TB_IO, "watch device %s: %s", (*ops)->name, tb__errno_text(errno));
            if (engine->ndevices == TB__MAX_DEVICES)
                return tb__fail(TB_TOO_BIG, "more than %d devices", TB__MAX_DEVICES - 1);
        }
    }
    return TB_OK;
}

/* What is not there is of no concern before somebody can't be reached without it. */
static void note_missing(tb__engine *engine, const char *name) {
    size_t n = strlen(engine->missing);
    tb__log(TB_LOG_DEBUG, "transport %s: %s", name, tb_error_detail());
    snprintf(engine->missing + n, sizeof engine->missing - n, "%s%s: %s", n ? "; " : "", name, tb_error_detail());
}

/* `self` for this process; for the others, what the registry has, or the one that was asked for. */
static tb_status open_transports(tb__engine *engine, const tb__engine_opts *o) {
    bool is_auto = !o->transport || strcmp(o->transport, "auto") == 0;
    bool is_known = is_auto;
    engine->is_asked = !is_auto;
    if (is_auto && o->is_local)
        snprintf(engine->missing, sizeof engine->missing,
                 "the store is one that only this host reaches, so no transport to others was opened");
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++) {
        const char *name = (*ops)->name;
        bool is_asked = !is_auto && strcmp(name, o->transport) == 0;
        bool is_needed = *ops == &tb__self_ops || is_asked || (is_auto && (*ops)->is_local);
        is_known |= is_asked;
        if (is_needed)
            TB_TRY(open_transport(engine, o, name));
        else if (is_auto && !o->is_local && open_transport(engine, o, name) != TB_OK)
            note_missing(engine, name);
    }
    return is_known ? TB_OK : tb__fail(TB_INVALID, "there is no transport '%.40s'", o->transport);
}

static tb_status open_descriptors(tb__engine *engine) {
    struct epoll_event event = {.events = EPOLLIN};
    engine->epoll = tb__fd_own(epoll_create1(EPOLL_CLOEXEC));
    engine->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    engine->timer = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (engine->epoll < 0 || engine->wake < 0 || engine->timer < 0 ||
        epoll_ctl(engine->epoll, EPOLL_CTL_ADD, engine->wake, &event) != 0 ||
        epoll_ctl(engine->epoll, EPOLL_CTL_ADD, engine->timer, &event) != 0)
        return tb__fail(TB_IO, "an event loop: %s", tb__errno_text(errno));
    return TB_OK;
}

tb_status tb__engine_create(const tb__engine_opts *opts, tb__engine **out) {
    tb__engine *engine = tb__calloc(1, sizeof *engine);
    if (!engine)
        return TB_NO_MEMORY;
    engine->epoll = engine->wake = engine->timer = -1;
    engine->timer_ms = INT64_MAX;
    engine->rank = opts->rank;
    engine->wire = tb__wire_rank(opts->rank, opts->incarnation);
    tb__get_host(opts->host, engine->host);
    pthread_mutex_init(&engine->lock, NULL);
    tb__monotonic_cond_init(&engine->changed);
    tb_status status = open_descriptors(engine);
    if (status == TB_OK)
        status = open_devices(engine);
    if (status == TB_OK)
        status = open_transports(engine, opts);
    if (status == TB_OK && !opts->manual) {
        engine->has_thread = true;
        status = tb__start_thread(&engine->thread, "tensorbus", drive, engine);
        engine->has_thread = status == TB_OK;
    }
    if (status != TB_OK) {
        tb__engine_destroy(engine);
        return status;
    }
    *out = engine;
    return TB_OK;
}

void tb__engine_destroy(tb__engine *engine) {
    if (!engine)
        return;
    if (engine->has_thread) {
        pthread_mutex_lock(&engine->lock);
        engine->stopping = true;
        tb__engine_poke(engine);
        pthread_mutex_unlock(&engine->lock);
        pthread_join(engine->thread, NULL);
    }
    engine->stopping = true; /* what ends now tells nobody */
    for (size_t i = 0; i < engine->ntransports; i++)
        tb__transport_close(&engine->transports[i]);
    tb__peers_free(engine);
    for (size_t i = 0; i < engine->ndevices; i++)
        tb__device_close(engine->devices[i]);
    if (engine->timer >= 0)
        tb__fd_close(engine->timer);
    if (engine->wake >= 0)
        tb__fd_close(engine->wake);
    if (engine->epoll >= 0)
        tb__fd_close(engine->epoll);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}
