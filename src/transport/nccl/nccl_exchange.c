/* Exchanges: which rank launches what, and when.
 *
 * NCCL's kernels occupy the GPU until their counterparts run, so ranks that launch in different orders may wait for
 * each other for ever. Therefore messages of one sender to one receiver, over one communicator, are launched as an
 * exchange, on which both agree before. The sender OFFERs messages; the receiver ACCEPTs those whose receives are still
 * posted; the sender launches those that have not been cancelled meanwhile, and tells the receiver to START, which
 * launches the same ones in the same order. So a cancelled send is never launched. A receive that was cancelled after
 * it was accepted is launched into memory that nobody reads, if the sender had begun.
 *
 * An exchange needs the turn of both its ranks. A rank has one turn, for all its communicators. It gives it in the
 * order in which exchanges ask for it, and takes it back when the exchange is launched. Of the two turns, the one of
 * the rank with the lower number is taken first:
 *
 *   sender < receiver:  the sender's turn, OFFER,  the receiver's turn, ACCEPT,                     START
 *   sender > receiver:                     OFFER,  the receiver's turn, ACCEPT,  the sender's turn, START
 *
 * No deadlock: whoever has a turn waits for that of a rank with a higher number only, or for what was launched to end.
 * When a sender tells START it has both turns, so the exchanges of all ranks are ordered by that moment; each rank
 * launches in this order, on one stream. So the first launched exchange that has not ended waits for nothing: its
 * counterpart is launched, or will be as soon as the message is there. No livelock and no starvation: nobody gives back
 * a turn without having launched, but for exchanges that are over; and turns are given in the order of requests.
 *
 * A turn is not given while NCCL_MOST_RUNNING exchanges have not ended: what was launched can't be cancelled. */
#include "transport/nccl/nccl.h"

#include "base/log.h"

#include <time.h>

typedef enum exchange_state {
    ASKING,    /* for this rank's turn */
    OFFERED,   /* a send: until the receiver accepts */
    ACCEPTED,  /* a receive: until the sender starts */
    LAUNCHING, /* until NCCL has launched it */
    RUNNING,   /* until its event */
} exchange_state;

typedef struct slot {
    uint64_t tag;
    size_t nbytes;  /* of the message */
    posted *posted; /* NULL: not of this exchange any more */
} slot;

struct exchange {
    tb_comm *comm;
    int32_t peer;
    bool is_send, was_offered;
    uint32_t number; /* of the sender's, in its communicator */
    exchange_state state;
    uint32_t agreed; /* a bit for each slot */
    size_t count;
    slot slots[NCCL_MOST_OPS];
    void *event;        /* NULL: none is recorded */
    int64_t give_up_ms; /* when its peer, which has left and is gone, must have done its part; 0: it is there */
    TAILQ_ENTRY(exchange) link, next_waiting;
};

/* ---- Operations -------------------------------------------------------------------------------------------------- */

void nccl_nap(void) {
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

static void finish(posted *p, tb_status status) {
    nccl *n = p->comm->owner;
    p->op->status = status;
    p->exchange = NULL;
    p->is_finished = true;
    TAILQ_INSERT_TAIL(&n->finished, p, link);
    nccl_wake(n);
}

static void fail_op(posted *p) {
    finish(p, nccl_comm_failure_of(p->comm, p->op->peer, p->op));
}

/* One of the two ranks has left. */
static void leave_op(posted *p, tb_status status) {
    if (status == TB_LOST)
        snprintf(p->op->why, sizeof p->op->why, "rank %" PRId32 " has left", p->op->peer);
    finish(p, status);
}

void nccl_call_done(nccl *n) {
    for (posted *p; (p = TAILQ_FIRST(&n->finished));) {
        TAILQ_REMOVE(&n->finished, p, link);
        tb__op_complete(p->op);
    }
}

static void add_receive(posted *p) {
    p->exchange = NULL;
    TAILQ_INSERT_TAIL(&p->comm->receives, p, link);
}

tb_status nccl_post(void *context, tb_op *op) {
    nccl *n = context;
    tb_comm *c = op->comm;
    if (!c || op->memory != TB_MEM_CUDA || nccl_comm_position(c, op->peer) < 0)
        return tb__fail(TB_INVALID, "rank %" PRId32 " is not in this communicator", op->peer);
    tb_op failed = *op;
    if (nccl_comm_has_failed(c))
        return tb__fail(nccl_comm_failure_of(c, op->peer, &failed), "%s", failed.why);
    if (c->presence[nccl_comm_position(c, op->peer)] != NCCL_PRESENT)
        return tb__fail(TB_LOST, "rank %" PRId32 " has left", op->peer);
    posted *p = tb__op_begin(op, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    p->comm = c;
    if (op->kind == TB_OP_RECV)
        add_receive(p);
    else
        TAILQ_INSERT_TAIL(&c->sends, p, link);
    if (op->kind == TB_OP_SEND)
        nccl_wake(n);
    return TB_OK;
}

/* ---- Turns ------------------------------------------------------------------------------------------------------- */

static void ask_for_turn(exchange *x) {
    x->state = ASKING;
    TAILQ_INSERT_TAIL(&x->comm->owner->waiting, x, next_waiting);
    nccl_wake(x->comm->owner);
}

static void give_turn_back(exchange *x) {
    nccl *n = x->comm->owner;
    if (n->turn == x)
        n->turn = NULL;
    nccl_wake(n);
}

static bool is_launched(const exchange *x) {
    return x->state == LAUNCHING || x->state == RUNNING;
}

static bool is_op_launched(const posted *p) {
    return p->exchange && is_launched(p->exchange); // NOLINT: NULL once it is freed
}

/* Its operations have been taken from it. */
static void free_exchange(exchange *x) {
    nccl *n = x->comm->owner;
    if (x->state == ASKING && n->turn != x)
        TAILQ_REMOVE(&n->waiting, x, next_waiting);
    if (is_launched(x))
        n->nrunning--;
    if (x->event && nccl_enter(n, x->comm->gpu) == TB_OK) {
        n->driver.cuEventDestroy_v2(x->event);
        nccl_leave(n);
    }
    give_turn_back(x);
    TAILQ_REMOVE(&n->exchanges, x, link);
    free(x);
}

static exchange *make_exchange(tb_comm *c, int32_t peer, bool is_send, uint32_t number) {
    exchange *x = tb__calloc(1, sizeof *x);
    if (!x) {
        nccl_comm_fail(c, TB_NO_MEMORY, -1, 0, true, "rank %" PRId32 " has no memory", c->ranks[c->self]);
        return NULL;
    }
    x->comm = c;
    x->peer = peer;
    x->is_send = is_send;
    x->number = number;
    TAILQ_INSERT_TAIL(&c->owner->exchanges, x, link);
    return x;
}

static exchange *find_exchange(const tb_comm *c, int32_t peer, bool is_send, uint32_t number) {
    exchange *x = TAILQ_FIRST(&c->owner->exchanges);
    while (x && (x->comm != c || x->peer != peer || x->is_send != is_send || x->number != number || is_launched(x)))
        x = TAILQ_NEXT(x, link);
    return x;
}

/* ---- Launching --------------------------------------------------------------------------------------------------- */

static int launch_slot(nccl *n, exchange *x, slot *s) {
    tb_comm *c = x->comm;
    int position = nccl_comm_position(c, x->peer);
    if (x->is_send)
        return n->call->Send(s->posted->op->pieces->base, s->nbytes, NCCL_BYTES, position, c->handle, c->gpu->stream);
    void *to = s->posted ? s->posted->op->pieces->base : nccl_gpu_sink(n, c->gpu, s->nbytes);
    if (!to) {
        nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 ": %s", c->ranks[c->self], tb_error_detail());
        return NCCL_SUCCESS;
    }
    return n->call->Recv(to, s->nbytes, NCCL_BYTES, position, c->handle, c->gpu->stream);
}

static bool is_good(int result) {
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS;
}

static void launch_group(nccl *n, exchange *x) {
    tb_comm *c = x->comm;
    int result = n->call->GroupStart(), ended;
    for (size_t i = 0; is_good(result) && i < x->count; i++) {
        if (x->agreed >> i & 1U && x->slots[i].nbytes > 0)
            result = launch_slot(n, x, &x->slots[i]);
    }
    ended = n->call->GroupEnd();
    if (!is_good(result) || !is_good(ended))
        nccl_comm_fail_call(c, x->is_send ? "ncclSend" : "ncclRecv", is_good(result) ? ended : result);
}

/* What both have agreed on. The exchange has the turn. */
static void launch(exchange *x) {
    tb_comm *c = x->comm;
    nccl *n = c->owner;
    if (x->agreed == 0) {
        free_exchange(x);
        return;
    }
    x->state = LAUNCHING;
    n->nrunning++;
    n->nidle = 0;
    if (nccl_enter(n, c->gpu) != TB_OK) {
        nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 ": %s", c->ranks[c->self], tb_error_detail());
        return;
    }
    launch_group(n, x);
    nccl_leave(n);
    nccl_wake(n);
}

static void fail_gpu(tb_comm *c, const char *what, int result) {
    nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 ": GPU %d: %s: %s", c->ranks[c->self], c->gpu->device, what,
                   nccl_gpu_error(c->owner, result));
}

/* Behind what was launched, or, after an abort, behind all that the stream has. False: the GPU has failed. */
static bool record_event(exchange *x) {
    tb_comm *c = x->comm;
    nccl *n = c->owner;
    enum { NO_TIMING = 2 };
    int result = -1;
    if (nccl_enter(n, c->gpu) == TB_OK) {
        result = n->driver.cuEventCreate(&x->event, NO_TIMING);
        if (result == GPU_SUCCESS && (result = n->driver.cuEventRecord(x->event, c->gpu->stream)) != GPU_SUCCESS) {
            n->driver.cuEventDestroy_v2(x->event);
            x->event = NULL;
        }
        nccl_leave(n);
    }
    if (result != GPU_SUCCESS)
        fail_gpu(c, "cuEventRecord", result);
    x->state = RUNNING;
    n->nidle = 0;
    give_turn_back(x);
    return result == GPU_SUCCESS;
}

static int query_event(const exchange *x) {
    const nccl *n = x->comm->owner;
    int result = GPU_NOT_READY;
    if (x->event && nccl_enter(n, x->comm->gpu) == TB_OK) {
        result = n->driver.cuEventQuery(x->event);
        nccl_leave(n);
    }
    return result;
}

static void complete_slot(slot *s, const exchange *x) {
    posted *p = s->posted;
    if (!p)
        return;
    s->posted = NULL;
    if (!x->is_send)
        p->op->nbytes = s->nbytes;
    finish(p, TB_OK);
}

/* Its event has come: all that it carried is there. */
static void complete_exchange(exchange *x) {
    for (size_t i = 0; i < x->count; i++)
        complete_slot(&x->slots[i], x);
    x->comm->owner->nidle = 0;
    free_exchange(x);
}

/* Of a communicator that has not failed. */
static void progress_launched(exchange *x) {
    tb_comm *c = x->comm;
    int state, result = c->owner->call->CommGetAsyncError(c->handle, &state);
    if (result != NCCL_SUCCESS || !is_good(state)) {
        nccl_comm_fail_call(c, x->is_send ? "ncclSend" : "ncclRecv", result != NCCL_SUCCESS ? result : state);
        return;
    }
    if (x->state == LAUNCHING && state == NCCL_SUCCESS)
        record_event(x);
    if (x->state != RUNNING)
        return;
    result = query_event(x);
    if (result == GPU_SUCCESS)
        complete_exchange(x);
    else if (result != GPU_NOT_READY)
        fail_gpu(c, "cuEventQuery", result);
    else if (x->give_up_ms && tb__now_ms() >= x->give_up_ms)
        nccl_comm_fail(c, TB_LOST, x->peer, 0, true, "rank %" PRId32 " is lost, with messages under way", x->peer);
}

/* ---- What ranks tell each other ---------------------------------------------------------------------------------- */

tb_status nccl_tell(tb_comm *c, int32_t peer, nccl_message kind, tb__pack *body) {
    const nccl *n = c->owner;
    tb__pack message = {0};
    tb__pack_u32(&message, kind);
    tb__pack_u64(&message, c->key);
    tb__pack_raw(&message, body->data, body->count);
    tb_status status =
        message.failed || body->failed ? TB_NO_MEMORY : n->env.tell(n->env.arg, peer, message.data, message.count);
    tb__pack_fini(&message);
    tb__pack_fini(body);
    if (status == TB_NO_MEMORY) /* else the peer is lost, and peer_lost will be called */
        nccl_comm_fail(c, TB_NO_MEMORY, -1, 0, true, "rank %" PRId32 " has no memory", c->ranks[c->self]);
    return status;
}

static void tell_agreed(tb_comm *c, int32_t peer, nccl_message kind, uint32_t number, uint32_t agreed) {
    tb__pack body = {0};
    tb__pack_u32(&body, number);
    tb__pack_u32(&body, agreed);
    nccl_tell(c, peer, kind, &body);
}

/* Takes sends from the communicator's list. */
static void fill_offer(exchange *x) {
    tb_comm *c = x->comm;
    size_t nbytes = 0;
    for (posted *p = TAILQ_FIRST(&c->sends), *next; p && x->count < NCCL_MOST_OPS; p = next) {
        next = TAILQ_NEXT(p, link);
        size_t size = p->op->pieces->nbytes;
        if (p->op->peer != x->peer)
            continue;
        if (x->count > 0 && size > NCCL_MOST_NBYTES - nbytes)
            break;
        nbytes += size < NCCL_MOST_NBYTES ? size : NCCL_MOST_NBYTES;
        TAILQ_REMOVE(&c->sends, p, link);
        p->exchange = x;
        x->slots[x->count++] = (slot){p->op->tag, size, p};
    }
}

static void offer(exchange *x) {
    tb__pack body = {0};
    fill_offer(x);
    if (x->count == 0) { /* all were cancelled */
        free_exchange(x);
        return;
    }
    x->state = OFFERED;
    x->was_offered = true;
    tb__pack_u32(&body, x->number);
    tb__pack_u32(&body, (uint32_t)x->count);
    for (size_t i = 0; i < x->count; i++) {
        tb__pack_u64(&body, x->slots[i].tag);
        tb__pack_u64(&body, x->slots[i].nbytes);
    }
    nccl_tell(x->comm, x->peer, NCCL_OFFER, &body);
}

static posted *find_receive(const tb_comm *c, int32_t peer, uint64_t tag) {
    posted *p = TAILQ_FIRST(&c->receives);
    while (p && (p->op->peer != peer || p->op->tag != tag))
        p = TAILQ_NEXT(p, link);
    return p;
}

/* The receiver has the turn. */
static void accept(exchange *x) {
    tb_comm *c = x->comm;
    for (size_t i = 0; i < x->count; i++) {
        slot *s = &x->slots[i];
        posted *p = find_receive(c, x->peer, s->tag);
        if (!p)
            continue; /* it was cancelled */
        TAILQ_REMOVE(&c->receives, p, link);
        size_t room = p->op->pieces->nbytes;
        if (room < s->nbytes) {
            finish(p, tb__op_too_big(p->op, room, s->nbytes));
            continue;
        }
        p->exchange = x;
        s->posted = p;
        x->agreed |= 1U << i;
    }
    tell_agreed(c, x->peer, NCCL_ACCEPT, x->number, x->agreed);
    if (x->agreed == 0)
        free_exchange(x);
    else
        x->state = ACCEPTED;
}

/* The sender has both turns. */
static void start(exchange *x) {
    for (size_t i = 0; i < x->count; i++) {
        if (!x->slots[i].posted)
            x->agreed &= ~(1U << i);
    }
    tell_agreed(x->comm, x->peer, NCCL_START, x->number, x->agreed);
    launch(x);
}

static void on_offer(tb_comm *c, int32_t peer, tb__unpack *message) {
    uint32_t number = tb__unpack_u32(message);
    size_t count = tb__unpack_count(message, 2 * sizeof(uint64_t));
    if (message->failed || count == 0 || count > NCCL_MOST_OPS)
        return;
    exchange *x = make_exchange(c, peer, false, number);
    if (!x)
        return;
    for (x->count = 0; x->count < count; x->count++) {
        slot *s = &x->slots[x->count];
        s->tag = tb__unpack_u64(message);
        s->nbytes = tb__unpack_u64(message);
    }
    ask_for_turn(x);
}

/* What the receiver has not accepted is dropped. */
static void on_accept(tb_comm *c, int32_t peer, tb__unpack *message) {
    uint32_t number = tb__unpack_u32(message), agreed = tb__unpack_u32(message);
    exchange *x = find_exchange(c, peer, true, number);
    if (message->failed || (x && x->state != OFFERED))
        return;
    if (!x) { /* all its messages were cancelled */
        if (agreed)
            tell_agreed(c, peer, NCCL_START, number, 0);
        return;
    }
    x->agreed = agreed & (uint32_t)(((uint64_t)1 << x->count) - 1);
    for (size_t i = 0; i < x->count; i++) {
        if (!(x->agreed >> i & 1U))
            complete_slot(&x->slots[i], x);
    }
    if (x->agreed == 0)
        free_exchange(x);
    else if (c->owner->turn == x)
        start(x);
    else
        ask_for_turn(x);
}

/* Receives whose sends were cancelled wait on. */
static void on_start(tb_comm *c, int32_t peer, tb__unpack *message) {
    exchange *x = find_exchange(c, peer, false, tb__unpack_u32(message));
    uint32_t agreed = tb__unpack_u32(message);
    if (!x || x->state != ACCEPTED || message->failed)
        return;
    x->agreed &= agreed;
    for (size_t i = 0; i < x->count; i++) {
        posted *p = x->slots[i].posted;
        if (!p || x->agreed >> i & 1U)
            continue;
        x->slots[i].posted = NULL;
        add_receive(p);
    }
    launch(x);
}

void nccl_told(void *context, int32_t peer, const void *bytes, size_t nbytes) {
    nccl *n = context;
    tb__unpack message = {bytes, (const unsigned char *)bytes + nbytes, false};
    uint32_t kind = tb__unpack_u32(&message);
    if (kind == NCCL_FAILED) {
        nccl_comm_on_failed(n, peer, &message);
        return;
    }
    tb_comm *c = nccl_comm_find(n, tb__unpack_u64(&message));
    if (!c || c->failure != TB_OK || nccl_comm_position(c, peer) < 0)
        return; /* the sender hears of it, or has */
    if (kind == NCCL_LEAVE)
        nccl_comm_on_leave(c, peer);
    else if (kind == NCCL_OFFER && c->presence[c->self] == NCCL_PRESENT)
        on_offer(c, peer, &message);
    else if (kind == NCCL_ACCEPT)
        on_accept(c, peer, &message);
    else if (kind == NCCL_START)
        on_start(c, peer, &message);
    nccl_exchanges_progress(n);
}

/* ---- Progress ---------------------------------------------------------------------------------------------------- */

static bool has_offer(const tb_comm *c, int32_t peer) {
    for (const exchange *x = TAILQ_FIRST(&c->owner->exchanges); x; x = TAILQ_NEXT(x, link)) {
        if (x->comm == c && x->peer == peer && x->is_send && !is_launched(x))
            return true;
    }
    return false;
}

/* One exchange with each receiver at a time is being agreed on. */
static void offer_sends(tb_comm *c) {
    int32_t last = -1;
    for (posted *p = TAILQ_FIRST(&c->sends), *next; p; p = next) {
        next = TAILQ_NEXT(p, link);
        int32_t peer = p->op->peer;
        if (peer == last || has_offer(c, last = peer))
            continue;
        exchange *x = make_exchange(c, peer, true, ++c->noffered);
        if (!x)
            return;
        if (c->owner->env.rank < peer)
            ask_for_turn(x);
        else
            offer(x);
        next = TAILQ_FIRST(&c->sends); /* more than this one may have gone with it */
    }
}

static void use_turn(exchange *x) {
    if (!x->is_send)
        accept(x);
    else if (x->was_offered)
        start(x);
    else
        offer(x);
}

static void give_turns(nccl *n) {
    for (exchange *x; !n->turn && n->nrunning < NCCL_MOST_RUNNING;) {
        x = TAILQ_FIRST(&n->waiting);
        while (x && (!x->comm->is_ready || x->comm->failure != TB_OK))
            x = TAILQ_NEXT(x, next_waiting);
        if (!x)
            return;
        TAILQ_REMOVE(&n->waiting, x, next_waiting);
        n->turn = x;
        use_turn(x);
    }
}

void nccl_exchanges_progress(nccl *n) {
    for (tb_comm *c = LIST_FIRST(&n->comms); c; c = LIST_NEXT(c, link)) {
        if (c->is_ready && c->failure == TB_OK)
            offer_sends(c);
    }
    for (exchange *x = TAILQ_FIRST(&n->exchanges), *next; x; x = next) {
        next = TAILQ_NEXT(x, link);
        if (is_launched(x) && x->comm->failure == TB_OK)
            progress_launched(x);
    }
    give_turns(n);
}

/* ---- Cancelling, failing ----------------------------------------------------------------------------------------- */

/* Takes an operation out of wherever it is. */
static void withdraw(posted *p) {
    tb_comm *c = p->comm;
    if (p->is_finished)
        TAILQ_REMOVE(&c->owner->finished, p, link);
    else if (!p->exchange && p->op->kind == TB_OP_SEND)
        TAILQ_REMOVE(&c->sends, p, link);
    else if (!p->exchange)
        TAILQ_REMOVE(&c->receives, p, link);
    for (size_t i = 0; p->exchange && i < p->exchange->count; i++) {
        if (p->exchange->slots[i].posted == p)
            p->exchange->slots[i].posted = NULL;
    }
}

static void fail_unlaunched(exchange *x) {
    for (size_t i = 0; i < x->count; i++) {
        posted *p = x->slots[i].posted;
        x->slots[i].posted = NULL;
        if (p)
            fail_op(p);
    }
    free_exchange(x);
}

static void give_up(exchange *x) {
    for (size_t i = 0; i < x->count; i++) {
        posted *p = x->slots[i].posted;
        x->slots[i].posted = NULL;
        if (p)
            finish(p, TB_TIMEOUT);
    }
    free_exchange(x);
}

/* Nobody wants its messages any more. If its counterpart has been accepted, the sender says that nothing comes; the
 * receiver waits for that, unless the sender is lost. */
static void part(exchange *x, bool is_lost, tb_status status) {
    for (size_t i = 0; i < x->count; i++) {
        posted *p = x->slots[i].posted;
        x->slots[i].posted = NULL;
        if (p)
            leave_op(p, status);
    }
    if (x->is_send && x->state == ASKING && x->was_offered)
        tell_agreed(x->comm, x->peer, NCCL_START, x->number, 0);
    if (x->is_send || x->state != ACCEPTED || is_lost)
        free_exchange(x);
}

void nccl_exchanges_part(tb_comm *c, int32_t peer, bool is_lost, tb_status status) {
    for (exchange *x = TAILQ_FIRST(&c->owner->exchanges), *next; x; x = next) {
        next = TAILQ_NEXT(x, link);
        if (x->comm != c || (peer >= 0 && x->peer != peer))
            continue;
        if (!is_launched(x))
            part(x, is_lost, status);
        else if (is_lost)
            x->give_up_ms = tb__now_ms() + NCCL_GRACE_MS;
    }
    struct posted_list *lists[] = {&c->sends, &c->receives};
    for (size_t i = 0; i < 2; i++) {
        for (posted *p = TAILQ_FIRST(lists[i]), *next; p; p = next) {
            next = TAILQ_NEXT(p, link);
            if (peer >= 0 && p->op->peer != peer)
                continue;
            TAILQ_REMOVE(lists[i], p, link);
            leave_op(p, status);
        }
    }
}

bool nccl_exchanges_are_launched(const tb_comm *c) {
    const exchange *x = TAILQ_FIRST(&c->owner->exchanges);
    while (x && (x->comm != c || !is_launched(x)))
        x = TAILQ_NEXT(x, link);
    return x;
}

void nccl_exchanges_progress_launched(tb_comm *c) {
    for (exchange *x = TAILQ_FIRST(&c->owner->exchanges), *next; x && c->failure == TB_OK; x = next) {
        next = TAILQ_NEXT(x, link);
        if (x->comm == c && is_launched(x))
            progress_launched(x);
    }
}

/* What was launched before the failure may have been carried all the same. */
static void fail_launched(exchange *x, bool gives_up) {
    tb_comm *c = x->comm;
    bool is_aborted = nccl_comm_is_aborted(c);
    int state = NCCL_IN_PROGRESS, result;
    if (c->handle && x->state == LAUNCHING)
        c->owner->call->CommGetAsyncError(c->handle, &state);
    if (state == NCCL_SUCCESS || (is_aborted && !x->event))
        record_event(x);
    bool may_be_good = x->event && c->handle;
    if (is_aborted && !x->event) {
        fail_unlaunched(x);
        return;
    }
    result = query_event(x);
    if (result == GPU_SUCCESS && may_be_good)
        complete_exchange(x);
    else if (result != GPU_NOT_READY && is_aborted)
        fail_unlaunched(x);
    else if (gives_up)
        give_up(x);
}

bool nccl_exchanges_fail(tb_comm *c, bool gives_up) {
    bool is_over = true;
    for (exchange *x = TAILQ_FIRST(&c->owner->exchanges), *next; x; x = next) {
        next = TAILQ_NEXT(x, link);
        if (x->comm != c)
            continue;
        if (is_launched(x))
            fail_launched(x, gives_up);
        else
            fail_unlaunched(x);
    }
    for (posted *p; (p = TAILQ_FIRST(&c->sends)) || (p = TAILQ_FIRST(&c->receives));) {
        withdraw(p);
        fail_op(p);
    }
    for (exchange *x = TAILQ_FIRST(&c->owner->exchanges); x; x = TAILQ_NEXT(x, link))
        is_over &= x->comm != c;
    return is_over;
}

bool nccl_exchanges_are_any(const tb_comm *c) {
    exchange *x = TAILQ_FIRST(&c->owner->exchanges);
    while (x && x->comm != c)
        x = TAILQ_NEXT(x, link);
    return x;
}

/* Waits for what was launched; after a second, aborts the communicator. */
static void await_launched(posted *p) {
    tb_comm *c = p->comm;
    for (int64_t end = tb__now_ms() + NCCL_GRACE_MS; is_op_launched(p); nccl_nap()) {
        if (c->failure == TB_OK)
            progress_launched(p->exchange);
        if (c->failure != TB_OK)
            nccl_comm_progress(c);
        else if (tb__now_ms() >= end)
            nccl_comm_fail(c, TB_IO, -1, 0, true, "rank %" PRId32 " has cancelled what was under way",
                           c->ranks[c->self]);
    }
}

/* An offer of nothing must not keep the turn, which the receiver may never answer. */
static void end_empty_offer(exchange *x) {
    if (!x->is_send || x->state != OFFERED)
        return;
    for (size_t i = 0; i < x->count; i++) {
        if (x->slots[i].posted)
            return;
    }
    free_exchange(x);
}

void nccl_cancel(void *context, tb_op *op) {
    (void)context;
    posted *p = op->state;
    await_launched(p);
    bool is_kept = p->is_finished && op->status == TB_TIMEOUT;
    exchange *x = p->exchange;
    withdraw(p);
    if (x)
        end_empty_offer(x);
    op->status = is_kept ? TB_TIMEOUT : TB_CANCELLED;
    tb__op_complete(op);
}
