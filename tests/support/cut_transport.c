/* Each endpoint has one of shm's inside. It keeps a list of the operations under way, so that it can end those of a
 * peer that is lost. */
#include "cut_transport.h"

#include "transport/transport.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <unistd.h>

enum { MAX_PEERS = 16 };

typedef struct tracked {
    struct endpoint *owner;
    tb_op *op;
    void (*done)(tb_op *op);
    void *arg;
    LIST_ENTRY(tracked) link;
} tracked;

typedef struct endpoint {
    tb_transport_env env;
    void *inner;
    int epoll, event;
    _Atomic uint64_t ncalls, at; /* at 0: never */
    atomic_bool holds_cancelled;
    bool is_over, has_told;
    int32_t peers[MAX_PEERS];
    bool is_lost[MAX_PEERS];
    size_t npeers;
    LIST_HEAD(tracked_list, tracked) ops;
    int32_t gone[MAX_PEERS]; /* peers that were cut off, for this one to hear of */
    size_t ngone;
    LIST_ENTRY(endpoint) link;
} endpoint;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list, and `gone` of all in it */
static LIST_HEAD(endpoint_list, endpoint) endpoints = LIST_HEAD_INITIALIZER(endpoints);
static _Thread_local endpoint *last_opened;
static atomic_bool has_happened;

void cut_arm(uint64_t n) {
    atomic_store(&has_happened, false);
    atomic_store(&last_opened->at, atomic_load(&last_opened->ncalls) + n);
}

void cut_hold_cancelled(void) {
    atomic_store(&has_happened, false);
    atomic_store(&last_opened->holds_cancelled, true);
}

bool cut_has_happened(void) {
    return atomic_load(&has_happened);
}

/* ---- Loss ------------------------------------------------------------------------------------------------------ */

static size_t find_peer(const endpoint *e, int32_t rank) {
    size_t i = 0;
    while (i < e->npeers && e->peers[i] != rank)
        i++;
    return i;
}

static bool is_lost(const endpoint *e, int32_t rank) {
    size_t i = find_peer(e, rank);
    return e->is_over || (i < e->npeers && e->is_lost[i]);
}

static void lose(endpoint *e, int32_t rank) {
    size_t i = find_peer(e, rank);
    if (i == e->npeers || e->is_lost[i])
        return;
    e->is_lost[i] = true;
    tracked *t;
    do { /* from the beginning: callbacks change the list */
        t = LIST_FIRST(&e->ops);
        while (t && t->op->peer != rank)
            t = LIST_NEXT(t, link);
        if (t)
            tb__shm_ops.cancel(e->inner, t->op);
    } while (t);
    e->env.lost(e->env.arg, rank, "it was cut off");
}

/* The others hear that they have lost this one: all, or one of them. */
static void tell_others(int32_t rank, int32_t only) {
    pthread_mutex_lock(&lock);
    for (endpoint *other = LIST_FIRST(&endpoints); other; other = LIST_NEXT(other, link)) {
        if (other->env.rank == rank || (only != TB_NO_RANK && other->env.rank != only) || other->ngone == MAX_PEERS)
            continue;
        other->gone[other->ngone++] = rank;
        eventfd_write(other->event, 1);
    }
    pthread_mutex_unlock(&lock);
}

void cut_link(int32_t one, int32_t other) {
    tell_others(one, other);
    tell_others(other, one);
}

static bool is_the_one(endpoint *e) {
    uint64_t n = atomic_fetch_add(&e->ncalls, 1) + 1, at = atomic_load(&e->at);
    if (at == 0 || n < at) /* above it, where another thread has called while it was armed */
        return false;
    atomic_store(&e->at, 0);
    atomic_store(&has_happened, true);
    return true;
}

static void on_inner_loss(void *arg, int32_t rank, const char *why) {
    endpoint *e = arg;
    size_t i = find_peer(e, rank);
    if (i == e->npeers || e->is_lost[i])
        return;
    e->is_lost[i] = true;
    e->env.lost(e->env.arg, rank, why);
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

static void on_done(tb_op *op) {
    tracked *t = op->arg;
    if (op->status == TB_CANCELLED && is_lost(t->owner, op->peer))
        op->status = TB_LOST;
    size_t nbytes = 0;
    for (size_t i = 0; i < op->npieces; i++)
        nbytes += op->pieces[i].nbytes;
    if (op->status == TB_CANCELLED && nbytes > TB_SHORT_MAX && atomic_load(&t->owner->holds_cancelled)) {
        op->status = TB_TIMEOUT;
        atomic_store(&has_happened, true);
    }
    LIST_REMOVE(t, link);
    op->done = t->done;
    op->arg = t->arg;
    free(t);
    op->done(op);
}

static tb_status cut_post(void *context, tb_op *op) {
    endpoint *e = context;
    if (is_the_one(e)) {
        e->is_over = true;
        eventfd_write(e->event, 1);
        tell_others(e->env.rank, TB_NO_RANK);
    }
    if (is_lost(e, op->peer))
        return tb__fail(TB_LOST, "it was cut off");
    tracked *t = tb__malloc(1, sizeof *t);
    if (!t)
        return TB_NO_MEMORY;
    *t = (tracked){.owner = e, .op = op, .done = op->done, .arg = op->arg};
    op->done = on_done;
    op->arg = t;
    LIST_INSERT_HEAD(&e->ops, t, link);
    tb_status status = tb__shm_ops.post(e->inner, op);
    if (status != TB_OK) {
        LIST_REMOVE(t, link);
        op->done = t->done;
        op->arg = t->arg;
        free(t);
    }
    return status;
}

static void cut_cancel(void *context, tb_op *op) {
    endpoint *e = context;
    if (op->state && is_the_one(e)) {
        tell_others(e->env.rank, op->peer);
        lose(e, op->peer); /* which ends the operation, too */
        return;
    }
    tb__shm_ops.cancel(e->inner, op);
}

static tb_status cut_progress(void *context) {
    endpoint *e = context;
    eventfd_t unused;
    int32_t gone[MAX_PEERS];
    eventfd_read(e->event, &unused);
    pthread_mutex_lock(&lock);
    size_t ngone = e->ngone;
    for (size_t i = 0; i < ngone; i++)
        gone[i] = e->gone[i];
    e->ngone = 0;
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < ngone; i++)
        lose(e, gone[i]);
    for (size_t i = 0; e->is_over && !e->has_told && i < e->npeers; i++)
        lose(e, e->peers[i]);
    e->has_told = e->is_over;
    return tb__shm_ops.progress(e->inner);
}

/* ---- Life ------------------------------------------------------------------------------------------------------ */

static void cut_close(void *context) {
    endpoint *e = context;
    pthread_mutex_lock(&lock);
    LIST_REMOVE(e, link);
    pthread_mutex_unlock(&lock);
    tb__shm_ops.close(e->inner);
    close(e->epoll);
    close(e->event);
    free(e);
}

static tb_status cut_open(const tb_transport_env *env, void **context) {
    endpoint *e = tb__calloc(1, sizeof *e);
    if (!e)
        return TB_NO_MEMORY;
    e->env = *env;
    LIST_INIT(&e->ops);
    tb_transport_env inner = *env;
    inner.arg = e;
    inner.lost = on_inner_loss;
    inner.reached = NULL;
    tb_status status = tb__shm_ops.open(&inner, &e->inner);
    if (status != TB_OK) {
        free(e);
        return status;
    }
    struct epoll_event event = {.events = EPOLLIN};
    e->epoll = epoll_create1(EPOLL_CLOEXEC);
    e->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_ctl(e->epoll, EPOLL_CTL_ADD, e->event, &event);
    epoll_ctl(e->epoll, EPOLL_CTL_ADD, tb__shm_ops.fd(e->inner), &event);
    pthread_mutex_lock(&lock);
    LIST_INSERT_HEAD(&endpoints, e, link);
    pthread_mutex_unlock(&lock);
    last_opened = e;
    *context = e;
    return TB_OK;
}

static tb_status cut_address(void *context, void *buffer, size_t *nbytes) {
    return tb__shm_ops.address(((endpoint *)context)->inner, buffer, nbytes);
}

static tb_status cut_connect(void *context, int32_t rank, const void *address, size_t nbytes) {
    endpoint *e = context;
    if (is_lost(e, rank))
        return tb__fail(TB_LOST, "it was cut off");
    if (find_peer(e, rank) == e->npeers) {
        if (e->npeers == MAX_PEERS)
            return tb__fail(TB_TOO_BIG, "more than %d peers", MAX_PEERS);
        e->peers[e->npeers++] = rank;
    }
    return tb__shm_ops.connect(e->inner, rank, address, nbytes);
}

static int cut_fd(void *context) {
    return ((endpoint *)context)->epoll;
}

static const tb_transport_ops cut_ops = {
    .size = sizeof cut_ops,
    .name = "cut",
    .memory = 1U << TB_MEM_HOST,
    .open = cut_open,
    .close = cut_close,
    .address = cut_address,
    .connect = cut_connect,
    .post = cut_post,
    .cancel = cut_cancel,
    .progress = cut_progress,
    .fd = cut_fd,
};

void cut_register(void) {
    if (tb_transport_register(&cut_ops) != TB_OK)
        abort();
}
