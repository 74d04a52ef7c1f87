/* The driver's loop, waits, tasks and ports. Messages and peers are in peer.c. */
#include "loop/loop_inside.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/proof.h"
#include "loop/adopted.h"
#include "loop/comm.h"
#include "loop/share.h"
#include "loop/stream.h"

#include <errno.h>
#include <sched.h>
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

void tb__loop_lock(tb__loop *loop) {
    pthread_mutex_lock(&loop->lock);
}

void tb__loop_unlock(tb__loop *loop) {
    bool has_news = loop->has_news;
    loop->has_news = false;
    pthread_mutex_unlock(&loop->lock);
    if (has_news)
        pthread_cond_broadcast(&loop->changed);
}

/* Uses CLOCK_REALTIME, because ThreadSanitizer does not intercept pthread_mutex_clocklock. */
bool tb__loop_lock_until(tb__loop *loop, int64_t deadline_ms) {
    struct timespec until, left = tb__time_of_ms(tb__ms_until(deadline_ms));
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += left.tv_sec + (until.tv_nsec + left.tv_nsec) / 1000000000;
    until.tv_nsec = (until.tv_nsec + left.tv_nsec) % 1000000000;
    return pthread_mutex_timedlock(&loop->lock, &until) == 0;
}

static _Thread_local char this_thread; /* its address identifies the thread */

bool tb__loop_is_driver(const tb__loop *loop) {
    return atomic_load(&loop->driver) == &this_thread;
}

bool tb__loop_was_unlocked(tb__loop *loop) {
    bool was_unlocked = pthread_mutex_trylock(&loop->lock) == 0;
    if (was_unlocked)
        pthread_mutex_unlock(&loop->lock);
    return was_unlocked;
}

/* Threads that the driver woke at once would wait for its lock, and be woken once more. */
void tb__loop_signal(tb__loop *loop) {
    if (tb__loop_is_driver(loop))
        loop->has_news = true;
    else
        pthread_cond_broadcast(&loop->changed);
}

static void poke_driver(tb__loop *loop) {
    if (!loop->is_poked)
        eventfd_write(loop->wake, 1);
    loop->is_poked = true;
}

void tb__loop_wake(tb__loop *loop) {
    loop->step_again = true;
    if (!loop->is_in_step)
        poke_driver(loop);
}

void tb__loop_set_spin(tb__loop *loop, int microseconds) {
    loop->spin_us = microseconds;
}

/* ---- Steps ---------------------------------------------------------------------------------------------------- */

/* A step may release the lock, and tasks may be added or removed meanwhile; then the walk starts over. */
static bool step_tasks(tb__loop *loop) {
    bool did = false;
    for (tb__task *task = loop->tasks; task;) {
        uint64_t changes = loop->task_changes;
        task->is_stepping = true;
        did |= task->step(task);
        task->is_stepping = false;
        if (changes != loop->task_changes) {
            pthread_cond_broadcast(&loop->changed); /* tb__loop_remove_task may wait */
            return true;
        }
        task = task->next;
    }
    return did;
}

static tb_status begin_work(tb__submitted *it) {
    const tb__device_ops *ops = it->device->ops;
    if (it->is_cancelled)
        return tb__fail(TB_CANCELLED, "it was cancelled");
    return it->job ? ops->run(it->device, it->job, &it->run, &it->fence)
                   : ops->checksum(it->device, it->bytes, it->nbytes, &it->sum, &it->fence);
}

/* Gives submitted work to its devices, and cancels work there. */
static void begin_submitted(tb__loop *loop) {
    bool has_begun = false;
    for (tb__submitted *it = loop->submitted; it; it = it->next) {
        if (it->is_begun && it->is_cancelled && !it->fence.is_done)
            it->device->ops->cancel(it->device, &it->fence);
        if (it->is_begun)
            continue;
        it->is_begun = has_begun = true;
        tb_status status = begin_work(it);
        if (status == TB_OK)
            continue;
        it->fence = (tb__fence){.is_done = true, .status = status};
        snprintf(it->fence.why, sizeof it->fence.why, "%s", tb_error_detail());
    }
    if (has_begun && loop->nbegun_waiters > 0)
        pthread_cond_broadcast(&loop->changed);
}

/* The lock is released while devices work. `done` functions may submit more. A device may need progress without work,
 * for example to clear its descriptor; the host device does not. */
static bool progress_devices(tb__loop *loop) {
    bool did = false;
    size_t ndevices = loop->submitted ? loop->ndevices : loop->ndevices - 1;
    if (ndevices == 0)
        return false;
    begin_submitted(loop);
    tb__loop_unlock(loop);
    for (size_t i = 0; i < ndevices; i++)
        did |= loop->devices[i]->ops->progress(loop->devices[i]);
    pthread_mutex_lock(&loop->lock);
    for (tb__submitted **at = &loop->submitted, *it; (it = *at);) {
        if (!it->fence.is_done) {
            at = &it->next;
            continue;
        }
        *at = it->next;
        it->done(it);
        at = &loop->submitted;
        did = true;
    }
    return did;
}

/* Transports, tasks and devices, once each. Returns whether there may be more to do. */
static bool step_loop(tb__loop *loop) {
    loop->is_in_step = true;
    atomic_store(&loop->driver, &this_thread);
    loop->step_again = false;
    size_t nending = loop->ending.count; /* messages they have sent are received in this step */
    for (size_t i = 0; i < loop->ntransports; i++) {
        const tb_transport *t = &loop->transports[i];
        tb_status status = t->ops->progress(t->context);
        if (status != TB_OK)
            tb__log(TB_LOG_ERROR, "transport %s: %s", t->ops->name, tb_error_detail());
    }
    tb__peers_open_met(loop);
    tb__peers_mark_ended(loop, nending);
    tb__peers_report_losses(loop);
    bool did = step_tasks(loop);
    did |= progress_devices(loop);
    loop->is_in_step = false;
    atomic_store(&loop->driver, NULL);
    return did || loop->step_again;
}

/* A timer that expires too early, for a task that is gone or has more time now, is left alone: most tasks end long
 * before their deadlines. It is set again when it has expired. */
static void set_timer(tb__loop *loop) {
    int64_t deadline = INT64_MAX;
    for (const tb__task *task = loop->tasks; task; task = task->next)
        deadline = task->deadline_ms < deadline ? task->deadline_ms : deadline;
    if (deadline >= loop->timer_ms)
        return;
    loop->timer_ms = deadline;
    struct itimerspec when = {.it_value = tb__time_of_ms(deadline > 0 ? deadline : 1)};
    timerfd_settime(loop->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

/* Sleeps, without the lock, until a descriptor is readable. Polls for a moment first: most waits are shorter than
 * waking up takes. The program's thread may need this core meanwhile, to begin what the driver polls for. */
static void wait_for_events(tb__loop *loop, int timeout_ms) {
    set_timer(loop);
    int spin_us = loop->tasks ? loop->spin_us : 0;
    tb__loop_unlock(loop);
    struct epoll_event event;
    int n = 0;
    if (spin_us > 0) {
        double until = tb__seconds() + spin_us * 1e-6;
        while ((n = epoll_wait(loop->epoll, &event, 1, 0)) == 0 && tb__seconds() < until)
            sched_yield();
    }
    if (n == 0)
        epoll_wait(loop->epoll, &event, 1, timeout_ms);
    pthread_mutex_lock(&loop->lock);
}

/* Descriptors are level-triggered: reset them before the step that checks everything. */
static void clear_wakeups(tb__loop *loop) {
    eventfd_t unused;
    uint64_t expirations;
    if (loop->is_poked)
        eventfd_read(loop->wake, &unused);
    loop->is_poked = false;
    if (loop->timer_ms <= tb__now_ms() && read(loop->timer, &expirations, sizeof expirations) == sizeof expirations)
        loop->timer_ms = INT64_MAX;
}

static void *run_driver(void *arg) {
    tb__loop *loop = arg;
    pthread_mutex_lock(&loop->lock);
    loop->is_driven = true;
    while (!loop->stopping) {
        clear_wakeups(loop);
        if (!step_loop(loop) && !loop->stopping)
            wait_for_events(loop, -1);
    }
    tb__loop_unlock(loop);
    return NULL;
}

/* Drives the loop until the condition is true or the deadline has passed. */
static bool drive_until_true(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    loop->is_driven = true;
    do { /* at least once: a call without a timeout must see pending events */
        clear_wakeups(loop);
        if (!step_loop(loop) && !is_true(arg))
            wait_for_events(loop, tb__ms_until(deadline_ms));
    } while (!is_true(arg) && tb__now_ms() < deadline_ms);
    bool result = is_true(arg);
    loop->is_driven = false;
    pthread_cond_broadcast(&loop->changed); /* another waiter may have to drive now */
    return result;
}

bool tb__loop_wait(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    while (!is_true(arg)) {
        if (!loop->is_driven && !loop->has_thread)
            return drive_until_true(loop, is_true, arg, deadline_ms);
        struct timespec until = tb__time_of_ms(deadline_ms < INT64_MAX / 2 ? deadline_ms : tb__now_ms() + (1 << 30));
        if (pthread_cond_timedwait(&loop->changed, &loop->lock, &until) == ETIMEDOUT)
            return is_true(arg);
    }
    return true;
}

bool tb__loop_wait_begun(tb__loop *loop, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms) {
    loop->nbegun_waiters++;
    bool result = tb__loop_wait(loop, is_true, arg, deadline_ms);
    loop->nbegun_waiters--;
    return result;
}

void tb__loop_progress(tb__loop *loop) {
    pthread_mutex_lock(&loop->lock);
    if (!loop->is_driven && !loop->has_thread) {
        loop->is_driven = true;
        clear_wakeups(loop);
        bool again = step_loop(loop);
        loop->is_driven = false;
        set_timer(loop);
        if (again)
            poke_driver(loop);
        pthread_cond_broadcast(&loop->changed);
    }
    pthread_mutex_unlock(&loop->lock);
}

int tb__loop_fd(const tb__loop *loop) {
    return loop->epoll;
}

/* ---- Tasks and ports ------------------------------------------------------------------------------------------ */

void tb__loop_add_task(tb__loop *loop, tb__task *task) {
    task->next = loop->tasks;
    task->is_stepping = false;
    loop->tasks = task;
    loop->task_changes++;
    tb__loop_wake(loop);
}

void tb__loop_remove_task(tb__loop *loop, tb__task *task) {
    for (tb__task **at = &loop->tasks; *at; at = &(*at)->next) {
        if (*at == task) {
            *at = task->next;
            loop->task_changes++;
            break;
        }
    }
    while (task->is_stepping)
        pthread_cond_wait(&loop->changed, &loop->lock);
}

void tb__loop_add_port(tb__loop *loop, tb__port *port) {
    port->id = ++loop->last_port;
    port->next = loop->ports;
    loop->ports = port;
}

void tb__loop_remove_port(tb__loop *loop, tb__port *port) {
    for (tb__port **at = &loop->ports; *at; at = &(*at)->next) {
        if (*at == port) {
            *at = port->next;
            return;
        }
    }
}

tb__device *tb__loop_find_memory(tb__loop *loop, const void *address, size_t nbytes, tb__memory *out) {
    tb__device *adopted = loop->ndevices > 1 ? tb__adopted_find(loop, address, nbytes, out) : NULL;
    size_t i = 0;
    if (adopted)
        return adopted;
    while (i + 1 < loop->ndevices && !loop->devices[i]->ops->find(loop->devices[i], address, nbytes, out))
        i++;
    if (i + 1 < loop->ndevices)
        atomic_store(&loop->is_device_used[i], true);
    else
        (void)loop->devices[i]->ops->find(loop->devices[i], address, nbytes, out);
    return loop->devices[i];
}

tb__device *tb__loop_find_device(tb__loop *loop, const void *address, size_t nbytes) {
    tb__memory unused;
    return tb__loop_find_memory(loop, address, nbytes, &unused);
}

bool tb__loop_is_host_memory(tb__loop *loop, const void *address) {
    return tb__loop_find_device(loop, address, 1)->ops == &tb__host_device_ops;
}

static void append_submitted(tb__loop *loop, tb__submitted *submitted) {
    submitted->is_cancelled = false;
    submitted->next = NULL;
    tb__submitted **last = &loop->submitted;
    while (*last)
        last = &(*last)->next;
    *last = submitted;
    tb__loop_wake(loop);
}

void tb__loop_submit(tb__loop *loop, tb__submitted *submitted) {
    submitted->fence = (tb__fence){0};
    submitted->is_begun = false;
    append_submitted(loop, submitted);
}

void tb__loop_follow(tb__loop *loop, tb__submitted *submitted) {
    submitted->is_begun = true;
    append_submitted(loop, submitted);
}

void tb__loop_cancel(tb__loop *loop, tb__submitted *submitted) {
    submitted->is_cancelled = true;
    tb__loop_wake(loop);
}

uint64_t tb__loop_new_tag(tb__loop *loop) {
    return TB__TAG_DATA | ++loop->last_tag;
}

/* ---- Create and destroy ---------------------------------------------------------------------------------------- */

/* Of transports. Any thread: the list of devices does not change while a transport is open. */
static tb__device *find_kind(const tb__loop *loop, tb_mem_kind kind) {
    size_t i = 0;
    while (i < loop->ndevices && loop->devices[i]->ops->transport_kind != kind)
        i++;
    return i < loop->ndevices ? loop->devices[i] : NULL;
}

static tb_status enter_device(void *arg, tb_mem_kind kind, int index) {
    tb__device *device = find_kind(((const tb__loop_transport *)arg)->loop, kind);
    return device ? device->ops->enter(device, index) : tb__fail(TB_INVALID, "there is no device of kind %d", kind);
}

static void leave_device(void *arg, tb_mem_kind kind) {
    tb__device *device = find_kind(((const tb__loop_transport *)arg)->loop, kind);
    device->ops->leave(device);
}

static void *device_function(void *arg, tb_mem_kind kind, const char *name) {
    tb__device *device = find_kind(((const tb__loop_transport *)arg)->loop, kind);
    return device ? device->ops->driver_function(device, name) : NULL;
}

static tb_status open_transport(tb__loop *loop, const tb__loop_opts *o, const char *name) {
    tb__proof_key key;
    _Static_assert(sizeof key == TB_KEY_SIZE, "transports get the whole key");
    tb__proof_key_derive(o->token, "rank", &key);
    tb_transport *t = &loop->transports[loop->ntransports];
    tb__loop_transport *caller = &loop->callers[loop->ntransports];
    *caller = (tb__loop_transport){loop, t};
    tb_transport_env env = {.size = sizeof env,
                            .rank = loop->transport_rank,
                            .arg = caller,
                            .lost = tb__peer_on_lost,
                            .reached = tb__peer_on_reached,
                            .is_driven = !o->manual,
                            .enter_device = enter_device,
                            .leave_device = leave_device,
                            .device_function = device_function,
                            .tell = tb__comm_tell,
                            .key = key.bytes};
    TB_TRY(tb__transport_open(name, &env, t));
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, t->ops->fd(t->context), &event) != 0) {
        tb__transport_close(t);
        return tb__fail(TB_IO, "watch transport %s: %s", name, strerror(errno));
    }
    loop->ntransports++;
    return TB_OK;
}

/* All devices of this build. */
static tb_status open_devices(tb__loop *loop) {
    for (const tb__device_ops *const *ops = tb__devices; *ops; ops++) {
        struct epoll_event event = {.events = EPOLLIN};
        tb__device *device;
        tb_status status = (*ops)->open(&device);
        if (status == TB_REFUSED)
            continue;
        TB_TRY(status);
        loop->devices[loop->ndevices++] = device;
        if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, (*ops)->fd(device), &event) != 0)
            return tb__fail(TB_IO, "watch device %s: %s", (*ops)->name, tb__errno_text(errno));
    }
    return TB_OK;
}

/* A missing transport is no error until a peer can't be reached without it. */
static void record_missing_transport(tb__loop *loop, const char *name) {
    size_t n = strlen(loop->missing);
    tb__log(TB_LOG_DEBUG, "transport %s: %s", name, tb_error_detail());
    snprintf(loop->missing + n, sizeof loop->missing - n, "%s%s: %s", n ? "; " : "", name, tb_error_detail());
}

static bool has_carrier(const tb__loop *loop, unsigned memory) {
    bool has = false;
    for (size_t i = 0; i < loop->ntransports; i++) {
        for (int kind = TB_MEM_HOST + 1; kind <= TB_MEM_CUDA; kind++)
            has |= memory >> kind & 1U && tb__transport_carries(&loop->transports[i], (tb_mem_kind)kind);
    }
    return has;
}

/* Whether a transport is opened if that is possible. Those with communicators are, where no other takes memory of their
 * kind; and if one was requested, network transports are, for all that it does not carry. */
static bool is_wanted(const tb__loop *loop, const tb__loop_opts *o, bool is_auto, const tb_transport_ops *ops) {
    if (loop->requested_comms)
        return !ops->comm_create && !ops->is_local;
    return is_auto && !o->is_local && !ops->is_by_request && !(ops->comm_create && has_carrier(loop, ops->memory));
}

/* `self` for this process; for peers all transports of the registry, or the requested one. */
static tb_status open_transports(tb__loop *loop, const tb__loop_opts *o) {
    bool is_auto = !o->transport || strcmp(o->transport, "auto") == 0;
    const tb_transport_ops *requested = NULL;
    for (const tb_transport_ops *const *ops = tb__transports; *ops && !is_auto; ops++)
        requested = strcmp((*ops)->name, o->transport) == 0 ? *ops : requested;
    if (!is_auto && !requested)
        return tb__fail(TB_INVALID, "there is no transport '%.40s'", o->transport);
    loop->requested_comms = requested && requested->comm_create ? requested : NULL;
    loop->is_transport_requested = requested && !loop->requested_comms;
    if (is_auto && o->is_local)
        snprintf(loop->missing, sizeof loop->missing,
                 "the store can be reached on this machine only, so no network transport was opened");
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++) {
        bool is_needed = *ops == &tb__self_ops || *ops == requested || (is_auto && (*ops)->is_local);
        if (is_needed)
            TB_TRY(open_transport(loop, o, (*ops)->name));
        else if (is_wanted(loop, o, is_auto, *ops) && open_transport(loop, o, (*ops)->name) != TB_OK)
            record_missing_transport(loop, (*ops)->name);
    }
    return TB_OK;
}

static tb_status open_descriptors(tb__loop *loop) {
    struct epoll_event event = {.events = EPOLLIN};
    loop->epoll = tb__fd_own(epoll_create1(EPOLL_CLOEXEC));
    loop->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    loop->timer = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (loop->epoll < 0 || loop->wake < 0 || loop->timer < 0 ||
        epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->wake, &event) != 0 ||
        epoll_ctl(loop->epoll, EPOLL_CTL_ADD, loop->timer, &event) != 0)
        return tb__fail(TB_IO, "create an event loop: %s", tb__errno_text(errno));
    return TB_OK;
}

tb_status tb__loop_create(const tb__loop_opts *opts, tb__loop **out) {
    tb__loop *loop = tb__calloc(1, sizeof *loop);
    if (!loop)
        return TB_NO_MEMORY;
    loop->epoll = loop->wake = loop->timer = -1;
    loop->timer_ms = INT64_MAX;
    loop->rank = opts->rank;
    loop->transport_rank = tb__transport_rank(opts->rank, opts->incarnation);
    tb__get_machine_id(opts->host, loop->host);
    loop->begun = tb__unix_seconds();
    pthread_mutex_init(&loop->lock, NULL);
    pthread_mutex_init(&loop->adopted_lock, NULL);
    tb__monotonic_cond_init(&loop->changed);
    tb_status status = open_descriptors(loop);
    if (status == TB_OK)
        status = open_devices(loop);
    if (status == TB_OK)
        status = open_transports(loop, opts);
    if (status == TB_OK && !opts->manual) {
        loop->has_thread = true;
        status = tb__start_thread(&loop->thread, "tensorbus", run_driver, loop);
        loop->has_thread = status == TB_OK;
    }
    if (status != TB_OK) {
        tb__loop_destroy(loop);
        return status;
    }
    *out = loop;
    return TB_OK;
}

static bool is_device_busy(const tb__loop *loop, const tb__device *device) {
    const tb__submitted *unfinished = loop->submitted;
    while (unfinished && unfinished->device != device)
        unfinished = unfinished->next;
    return unfinished != NULL;
}

void tb__loop_destroy(tb__loop *loop) {
    if (!loop)
        return;
    if (loop->has_thread) {
        pthread_mutex_lock(&loop->lock);
        loop->stopping = true;
        poke_driver(loop);
        pthread_mutex_unlock(&loop->lock);
        pthread_join(loop->thread, NULL);
    }
    loop->stopping = true; /* losses are not reported any more */
    tb__stream_points_drain(loop);
    for (size_t i = 0; i < loop->ntransports; i++)
        tb__transport_close(&loop->transports[i]);
    tb__shares_free(loop, is_device_busy);
    tb__peers_free(loop);
    for (size_t i = 0; i < loop->ndevices; i++) {
        if (!is_device_busy(loop, loop->devices[i])) /* a busy device is not closed */
            tb__device_close(loop->devices[i]);
    }
    if (loop->timer >= 0)
        tb__fd_close(loop->timer);
    if (loop->wake >= 0)
        tb__fd_close(loop->wake);
    if (loop->epoll >= 0)
        tb__fd_close(loop->epoll);
    pthread_cond_destroy(&loop->changed);
    pthread_mutex_destroy(&loop->lock);
    pthread_mutex_destroy(&loop->adopted_lock);
    free(loop->regions);
    free(loop);
}
