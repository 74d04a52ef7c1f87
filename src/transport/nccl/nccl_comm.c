/* Communicators: how they are connected, how they fail, and how they end.
 *
 * A rank whose communicator fails tells the others, so that it fails everywhere. What was not launched ends at once.
 * What was launched ends when NCCL has aborted it, which takes a thread: ncclCommAbort blocks. If that takes too long,
 * the operations complete with TB_TIMEOUT, and the thread is left behind. */
#include "transport/nccl/nccl.h"

#include "base/log.h"
#include "base/proof.h"

#include <stdarg.h>

struct ending {
    const nccl_functions *call;
    nccl_driver driver;
    void *context;
    nccl_handle *handle;
    bool is_abort;
    bool is_of_comm; /* a communicator refers to it */
    _Atomic enum { IN_THREAD, ENDED, LEFT } state;
    LIST_ENTRY(ending) link;
};

/* ---- The end of a handle ----------------------------------------------------------------------------------------- */

/* What was sent may still be in NCCL's buffers. */
static void finalize(const ending *e) {
    int state = NCCL_IN_PROGRESS, result = e->call->CommFinalize(e->handle);
    int64_t end = tb__now_ms() + NCCL_FINALIZE_MS;
    while (result == NCCL_IN_PROGRESS && e->call->CommGetAsyncError(e->handle, &state) == NCCL_SUCCESS &&
           state == NCCL_IN_PROGRESS && tb__now_ms() < end)
        tb__sleep_ms(1);
}

/* Not by ncclCommDestroy, which waits for the other ranks to do the same. */
static void *run_ending(void *arg) {
    ending *e = arg;
    void *context;
    e->driver.cuCtxPushCurrent_v2(e->context);
    if (!e->is_abort)
        finalize(e);
    e->call->CommAbort(e->handle);
    e->driver.cuCtxPopCurrent_v2(&context);
    if (atomic_exchange(&e->state, ENDED) == LEFT)
        free(e);
    return NULL;
}

/* NULL: there is no thread, and the handle leaks. */
static ending *begin_ending(nccl *n, const tb_comm *c, bool is_abort) {
    ending *e = tb__malloc(1, sizeof *e);
    pthread_t thread;
    if (!e)
        return NULL;
    *e = (ending){.call = n->call, .driver = n->driver, .context = c->gpu->context, .handle = c->handle};
    e->is_abort = is_abort;
    e->is_of_comm = true;
    if (tb__start_thread(&thread, "tb nccl end", run_ending, e) != TB_OK) {
        tb__log(TB_LOG_WARN, "nccl: a communicator is not freed: %s", tb_error_detail());
        free(e);
        return NULL;
    }
    pthread_detach(thread);
    LIST_INSERT_HEAD(&n->endings, e, link);
    return e;
}

bool nccl_endings_reap(nccl *n) {
    bool is_empty = true;
    for (ending *e = LIST_FIRST(&n->endings), *next; e; e = next) {
        next = LIST_NEXT(e, link);
        is_empty &= atomic_load(&e->state) == ENDED;
        if (atomic_load(&e->state) == ENDED && !e->is_of_comm) {
            LIST_REMOVE(e, link);
            free(e);
        }
    }
    return is_empty;
}

void nccl_endings_abandon(nccl *n) {
    for (ending *e; (e = LIST_FIRST(&n->endings));) {
        LIST_REMOVE(e, link);
        if (atomic_exchange(&e->state, LEFT) == ENDED)
            free(e);
        else
            tb__log(TB_LOG_WARN, "nccl: a communicator has not ended; its thread is left behind");
    }
}

/* ---- Connecting -------------------------------------------------------------------------------------------------- */

tb_status nccl_comm_id(void *context, unsigned char id[TB_COMM_ID_SIZE]) {
    nccl *n = context;
    nccl_id own;
    int result = n->call->GetUniqueId(&own);
    if (result != NCCL_SUCCESS)
        return tb__fail(TB_IO, "ncclGetUniqueId: %s (%s)", n->call->GetErrorString(result),
                        n->call->GetLastError(NULL));
    memset(id, 0, TB_COMM_ID_SIZE);
    memcpy(id, &own, sizeof own);
    return tb__random_bytes(id + sizeof own, sizeof(uint64_t)); /* by which the ranks name it to each other */
}

static tb_status connect_handle(const nccl *n, tb_comm *c, const unsigned char *id) {
    nccl_config config = nccl_non_blocking();
    nccl_id own;
    memcpy(&own, id, sizeof own);
    memcpy(&c->key, id + sizeof own, sizeof c->key);
    TB_TRY(nccl_enter(n, c->gpu));
    int result = n->call->CommInitRankConfig(&c->handle, (int)c->nranks, own, (int)c->self, &config);
    nccl_leave(n);
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
        return tb__fail(TB_IO, "ncclCommInitRankConfig: %s (%s)", n->call->GetErrorString(result),
                        n->call->GetLastError(NULL));
    return TB_OK;
}

static void free_comm(tb_comm *c) {
    free(c->ranks);
    free(c->presence);
    free(c);
}

tb_status nccl_comm_create(void *context, const tb_comm_desc *desc, tb_comm **out) {
    nccl *n = context;
    tb_comm *c = tb__calloc(1, sizeof *c);
    tb_status status = c ? nccl_gpu_get(n, desc->device, &c->gpu) : TB_NO_MEMORY;
    if (status == TB_OK && (!(c->ranks = tb__memdup(desc->ranks, desc->nranks, sizeof *c->ranks)) ||
                            !(c->presence = tb__calloc(desc->nranks, sizeof *c->presence))))
        status = TB_NO_MEMORY;
    if (status == TB_OK) {
        c->owner = n;
        c->nranks = desc->nranks;
        c->self = desc->self;
        c->lost = -1;
        TAILQ_INIT(&c->sends);
        TAILQ_INIT(&c->receives);
        status = connect_handle(n, c, desc->id);
    }
    if (status != TB_OK) {
        if (c)
            free_comm(c);
        return status;
    }
    LIST_INSERT_HEAD(&n->comms, c, link);
    nccl_wake(n);
    *out = c;
    return TB_OK;
}

tb_comm *nccl_comm_find(const nccl *n, uint64_t key) {
    tb_comm *c = LIST_FIRST(&n->comms);
    while (c && c->key != key)
        c = LIST_NEXT(c, link);
    return c;
}

int nccl_comm_position(const tb_comm *c, int32_t rank) {
    size_t i = 0;
    while (i < c->nranks && c->ranks[i] != rank)
        i++;
    return i < c->nranks && i != c->self ? (int)i : -1;
}

tb_status nccl_comm_check(void *context, tb_comm *c, bool *is_ready) {
    (void)context;
    *is_ready = c->is_ready && c->failure == TB_OK;
    return nccl_comm_has_failed(c) ? tb__fail(c->failure, "%s", c->why) : TB_OK;
}

bool nccl_comm_has_failed(const tb_comm *c) {
    return c->failure != TB_OK && tb__now_ms() >= c->loss_ms;
}

/* ---- Failing ----------------------------------------------------------------------------------------------------- */

/* False: there was no memory for it. */
static bool tell_failure(tb_comm *c, int64_t grace_ms) {
    bool is_told = true;
    for (size_t i = 0; i < c->nranks; i++) {
        if (i == c->self || c->ranks[i] == c->lost || c->presence[i] == NCCL_LOST)
            continue;
        tb__pack body = {0};
        tb__pack_status(&body, c->failure);
        tb__pack_i64(&body, c->lost);
        tb__pack_i64(&body, grace_ms);
        tb__pack_string(&body, c->why);
        is_told &= nccl_tell(c, c->ranks[i], NCCL_FAILED, &body) != TB_NO_MEMORY;
    }
    return is_told;
}

void nccl_comm_fail(tb_comm *c, tb_status status, int32_t lost, int64_t grace_ms, bool tells, const char *format, ...) {
    va_list args;
    if (c->failure != TB_OK)
        return;
    va_start(args, format);
    vsnprintf(c->why, sizeof c->why, format, args); // NOLINT: va_start has initialised it
    va_end(args);
    c->failure = status;
    c->lost = lost;
    c->abort_ms = tb__now_ms() + grace_ms;
    c->give_up_ms = c->abort_ms + NCCL_ABORT_MS;
    tb__log(TB_LOG_INFO, "nccl: a communicator of %zu ranks has failed: %s", c->nranks, c->why);
    c->is_untold = tells && !tell_failure(c, grace_ms);
    nccl_wake(c->owner);
}

void nccl_comm_fail_call(tb_comm *c, const char *function, int result) {
    const nccl_functions *call = c->owner->call;
    nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 ": %s: %s (%s)", c->ranks[c->self], function,
                   call->GetErrorString(result), call->GetLastError(c->handle));
    c->loss_ms = tb__now_ms() + NCCL_LOSS_MS;
}

tb_status nccl_comm_failure_of(const tb_comm *c, int32_t peer, tb_op *op) {
    snprintf(op->why, sizeof op->why, "%.*s", (int)sizeof op->why - 1, c->why);
    return c->failure == TB_LOST && peer != c->lost ? TB_IO : c->failure;
}

/* NCCL was the first to see it. */
static void explain_failure(tb_comm *c, int32_t peer, const char *why) {
    c->failure = TB_LOST;
    c->lost = peer;
    c->loss_ms = 0;
    snprintf(c->why, sizeof c->why, "rank %" PRId32 " is lost: %s", peer, why);
}

void nccl_comm_peer_lost(void *context, int32_t peer, const char *why) {
    nccl *n = context;
    for (tb_comm *c = LIST_FIRST(&n->comms); c; c = LIST_NEXT(c, link)) {
        int position = nccl_comm_position(c, peer);
        if (position < 0 || c->presence[position] == NCCL_LOST)
            continue;
        bool is_orderly = c->presence[position] == NCCL_LEFT || c->presence[c->self] == NCCL_LEFT;
        c->presence[position] = NCCL_LOST;
        if (is_orderly)
            nccl_exchanges_part(c, peer, true, TB_LOST);
        else if (tb__now_ms() < c->loss_ms)
            explain_failure(c, peer, why);
        else
            nccl_comm_fail(c, TB_LOST, peer, 0, true, "rank %" PRId32 " is lost: %s", peer, why);
    }
    nccl_wake(n);
}

void nccl_comm_on_leave(tb_comm *c, int32_t peer) {
    unsigned char *presence = &c->presence[nccl_comm_position(c, peer)];
    if (*presence != NCCL_PRESENT)
        return;
    *presence = NCCL_LEFT;
    nccl_exchanges_part(c, peer, false, TB_LOST);
    nccl_wake(c->owner);
}

void nccl_comm_on_failed(nccl *n, int32_t peer, tb__unpack *message) {
    tb_comm *c = nccl_comm_find(n, tb__unpack_u64(message));
    tb_status status = tb__unpack_status(message);
    int64_t lost = tb__unpack_i64(message), grace_ms = tb__unpack_i64(message);
    const char *why = tb__unpack_string(message);
    bool is_good = tb__unpack_is_done(message) && status != TB_OK && grace_ms >= 0 && grace_ms <= NCCL_GRACE_MS;
    if (c && is_good && nccl_comm_position(c, peer) >= 0)
        nccl_comm_fail(c, status, (int32_t)lost, grace_ms, false, "%s", why);
    if (c && is_good && status == TB_IO)
        c->loss_ms = tb__now_ms() + NCCL_LOSS_MS;
}

/* ---- Progress, and the end --------------------------------------------------------------------------------------- */

static void check_connection(tb_comm *c) {
    int state;
    int result = c->owner->call->CommGetAsyncError(c->handle, &state);
    if (result == NCCL_SUCCESS && state == NCCL_IN_PROGRESS)
        return;
    if (result == NCCL_SUCCESS && state == NCCL_SUCCESS)
        c->is_ready = true;
    else
        nccl_comm_fail_call(c, "ncclCommInitRankConfig", result != NCCL_SUCCESS ? result : state);
}

/* False: something that was launched has not ended. */
static bool progress_failed(tb_comm *c) {
    int64_t now = tb__now_ms();
    if (c->is_untold)
        c->is_untold = !tell_failure(c, 0);
    bool is_over = nccl_comm_has_failed(c) && nccl_exchanges_fail(c, now >= c->give_up_ms);
    if (c->handle && (now >= c->abort_ms || is_over)) {
        c->ending = begin_ending(c->owner, c, true);
        c->handle = NULL;
    }
    return is_over;
}

static bool have_all_left(const tb_comm *c) {
    size_t i = 0;
    while (i < c->nranks && c->presence[i] != NCCL_PRESENT)
        i++;
    return i == c->nranks;
}

/* What is launched has a second to end. */
static void await_launched(tb_comm *c) {
    for (int64_t end = tb__now_ms() + NCCL_GRACE_MS; c->failure == TB_OK && nccl_exchanges_are_launched(c);
         nccl_nap()) {
        nccl_exchanges_progress_launched(c);
        if (tb__now_ms() >= end)
            nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 " has left while messages were under way",
                           c->ranks[c->self]);
    }
    while (c->failure != TB_OK && !progress_failed(c))
        nccl_nap();
}

/* What NCCL has for it may be needed until all ranks have left. */
void nccl_comm_end(tb_comm *c) {
    await_launched(c);
    nccl_exchanges_part(c, -1, true, TB_CANCELLED);
    if (c->handle)
        c->ending = begin_ending(c->owner, c, c->failure != TB_OK);
    if (c->ending)
        c->ending->is_of_comm = false;
    LIST_REMOVE(c, link);
    nccl_wake(c->owner);
    free_comm(c);
}

void nccl_comm_progress(tb_comm *c) {
    bool is_over = true;
    if (!c->is_ready && c->failure == TB_OK)
        check_connection(c);
    if (c->failure != TB_OK)
        is_over = progress_failed(c);
    if (c->presence[c->self] == NCCL_LEFT && is_over && !nccl_exchanges_are_launched(c) &&
        (c->failure != TB_OK || have_all_left(c)))
        nccl_comm_end(c);
}

bool nccl_comm_is_aborted(const tb_comm *c) {
    return !c->handle && (!c->ending || atomic_load(&c->ending->state) == ENDED);
}

static void tell_of_leaving(tb_comm *c) {
    for (size_t i = 0; i < c->nranks; i++) {
        tb__pack nothing = {0};
        if (i != c->self && c->presence[i] != NCCL_LOST)
            nccl_tell(c, c->ranks[i], NCCL_LEAVE, &nothing);
    }
}

void nccl_comm_destroy(void *context, tb_comm *c) {
    nccl_exchanges_part(c, -1, false, TB_CANCELLED);
    if (!c->is_ready) /* the others can't be connected without it */
        nccl_comm_fail(c, TB_LOST, c->ranks[c->self], 0, true, "rank %" PRId32 " has left before all were connected",
                       c->ranks[c->self]);
    await_launched(c);
    c->presence[c->self] = NCCL_LEFT;
    if (c->failure == TB_OK)
        tell_of_leaving(c);
    nccl_call_done(context);
    nccl_wake(context);
}
