/* The nccl transport: memory of GPUs, between the ranks of communicators of NCCL's, by ncclSend and ncclRecv.
 *
 * What ranks agree on, and how they fail together, they tell each other by the transport of their messages. Nothing
 * blocks: communicators connect and launch in threads of NCCL's and are polled; their end has a thread of its own. */
#include "transport/nccl/nccl.h"

#include "base/descriptors.h"

#include <errno.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum {
    NS_OF_US = 1000,
    NS_OF_MS = 1000000,
    NSPINS = 200, /* turns without news, after which the thread sleeps between two of them */
};

/* The descriptor is readable after so long; 0: not at all. */
static void set_timer(const nccl *n, long ns) {
    struct itimerspec when = {.it_value = {.tv_nsec = ns}};
    timerfd_settime(n->timer, 0, &when, NULL);
}

void nccl_wake(nccl *n) {
    set_timer(n, 1);
}

static bool is_connecting_or_failed(const nccl *n) {
    for (const tb_comm *c = LIST_FIRST(&n->comms); c; c = LIST_NEXT(c, link)) {
        bool has_ended = nccl_comm_is_aborted(c) && !nccl_exchanges_are_any(c) && !c->is_untold;
        if (c->failure != TB_OK ? !has_ended : !c->is_ready)
            return true;
    }
    return !LIST_EMPTY(&n->endings);
}

static void choose_sleep(nccl *n) {
    if (n->nrunning > 0)
        set_timer(n, ++n->nidle < NSPINS ? 1 : 50 * NS_OF_US);
    else
        set_timer(n, is_connecting_or_failed(n) ? NS_OF_MS : 0);
}

static tb_status nccl_progress(void *context) {
    nccl *n = context;
    for (tb_comm *c = LIST_FIRST(&n->comms), *next; c; c = next) {
        next = LIST_NEXT(c, link);
        nccl_comm_progress(c);
    }
    nccl_exchanges_progress(n);
    nccl_endings_reap(n);
    choose_sleep(n);
    nccl_call_done(n); /* which may post, and wake it */
    return TB_OK;
}

static int nccl_fd(void *context) {
    return ((const nccl *)context)->timer;
}

static tb_status nccl_open(const tb_transport_env *env, void **context) {
    if (!env->enter_device || !env->leave_device || !env->device_function || !env->tell)
        return tb__fail(TB_REFUSED, "transport nccl needs a world with GPUs");
    nccl *n = tb__calloc(1, sizeof *n);
    if (!n)
        return TB_NO_MEMORY;
    n->env = *env;
    TAILQ_INIT(&n->exchanges);
    TAILQ_INIT(&n->waiting);
    TAILQ_INIT(&n->finished);
    tb_status status = nccl_load(&n->call);
    if (status == TB_OK)
        status = nccl_driver_load(n);
    if (status == TB_OK) {
        n->timer = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
        if (n->timer < 0)
            status = tb__fail(TB_IO, "timerfd: %s", tb__errno_text(errno));
    }
    if (status != TB_OK) {
        free(n);
        return status;
    }
    *context = n;
    return TB_OK;
}

static void nccl_close(void *context) {
    nccl *n = context;
    for (tb_comm *c = LIST_FIRST(&n->comms); c; c = LIST_NEXT(c, link)) {
        if (c->presence[c->self] != NCCL_LEFT)
            nccl_comm_destroy(n, c);
    }
    for (tb_comm *c; (c = LIST_FIRST(&n->comms));)
        nccl_comm_end(c);
    int64_t end = tb__now_ms() + NCCL_ABORT_MS;
    while (!nccl_endings_reap(n) && tb__now_ms() < end)
        nccl_nap();
    bool is_over = nccl_endings_reap(n);
    nccl_endings_abandon(n);
    nccl_gpus_free(n, is_over);
    tb__fd_close(n->timer);
    free(n);
}

const tb_transport_ops tb__nccl_ops = {
    .size = sizeof(tb_transport_ops),
    .name = "nccl",
    .memory = 1U << TB_MEM_CUDA,
    .open = nccl_open,
    .close = nccl_close,
    .post = nccl_post,
    .cancel = nccl_cancel,
    .progress = nccl_progress,
    .fd = nccl_fd,
    .comm_id = nccl_comm_id,
    .comm_create = nccl_comm_create,
    .comm_check = nccl_comm_check,
    .comm_destroy = nccl_comm_destroy,
    .told = nccl_told,
    .peer_lost = nccl_comm_peer_lost,
};
