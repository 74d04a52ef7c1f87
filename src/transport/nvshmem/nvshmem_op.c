/* Operations: offers, grants, puts and signals. */
#include "transport/nvshmem/nvshmem.h"

#include "base/process.h"
#include "transport/message.h"

#include <sys/eventfd.h>
#include <time.h>

enum { PATIENCE_MS = 1000 }; /* with what is under way, when it is cancelled */

static void wake(const tb_comm *c) {
    eventfd_write(c->owner->event, 1);
}

static bool enter_gpu(const tb_comm *c) {
    const tb_transport_env *env = &c->owner->env;
    return env->enter_device(env->arg, TB_MEM_CUDA, c->device) == TB_OK;
}

static void leave_gpu(const tb_comm *c) {
    c->owner->env.leave_device(c->owner->env.arg, TB_MEM_CUDA);
}

/* Whether the driver's call succeeded. If not, nobody knows any more what the GPU does with the memory. */
static bool check_cuda(tb_comm *c, const char *function, int result) {
    const char *name = "?";
    char why[160];
    if (result == 0)
        return true;
    c->owner->cuda->error_name(result, &name);
    snprintf(why, sizeof why, "%s: %s", function, name);
    nvshmem_library_lose(why);
    nvshmem_fail(c, TB_IO, TB_NO_RANK, false, why);
    return false;
}

/* ---- Ending them ------------------------------------------------------------------------------------------------- */

/* `done` is called in progress. */
static void end(tb_comm *c, nvshmem_posted *p, tb_status status) {
    p->stage = OP_ENDED;
    p->status = status;
    tb__waiters_add(&c->ended, &p->waiter);
    wake(c);
}

/* It is in no list any more. */
static void complete(tb_comm *c, nvshmem_posted *p, tb_status status) {
    tb_op *op = p->op;
    if (p->event)
        c->owner->cuda->event_destroy(p->event);
    if (!op) {
        free(p);
        return;
    }
    c->nposted--;
    op->status = status;
    tb__op_complete(op);
}

/* The put goes on without its operation. */
static void abandon(tb_comm *c, nvshmem_posted *p, tb_status status) {
    tb_op *op = p->op;
    p->op = NULL;
    op->state = NULL;
    c->nposted--;
    op->status = status;
    op->done(op);
}

static void complete_ended(tb_comm *c) {
    nvshmem_posted *p;
    while ((p = (nvshmem_posted *)tb__waiters_take(&c->ended)))
        complete(c, p, p->status);
}

/* Any operation that is not being put. */
static nvshmem_posted *take_idle(tb_comm *c) {
    tb__waiter *w = tb__match_drain(&c->receives, -1);
    w = w ? w : tb__match_drain(&c->offered, -1);
    w = w ? w : tb__waiters_take(&c->wanted);
    w = w ? w : tb__waiters_take(&c->granted);
    return (nvshmem_posted *)w;
}

static void empty_slot(tb_comm *c, size_t slot, bool is_kept) {
    c->slots[slot].receive = NULL;
    c->slots[slot].is_kept = is_kept;
    c->ngranted--;
}

static tb_status status_of_failed(const tb_comm *c, int32_t peer) {
    return peer == c->lost ? TB_LOST : TB_IO;
}

static void end_failed(tb_comm *c, nvshmem_posted *p) {
    if (p->op)
        snprintf(p->op->why, sizeof p->op->why, "%.*s", (int)sizeof p->op->why - 1, c->why);
    end(c, p, status_of_failed(c, p->waiter.peer));
}

static void end_left(tb_comm *c, nvshmem_posted *p) {
    if (p->op)
        snprintf(p->op->why, sizeof p->op->why, "rank %" PRId32 " has left the communicator", p->waiter.peer);
    end(c, p, TB_LOST);
}

static void end_left_in(tb_comm *c, tb__waiters *list, int32_t peer) {
    for (tb__waiter **at = &list->first; *at;) {
        if ((*at)->peer == peer)
            end_left(c, (nvshmem_posted *)tb__waiters_unlink(list, at));
        else
            at = &(*at)->next;
    }
}

/* It has put what it was going to put before it left: puts here go on, since its memory is there until all have left,
 * and what was granted is looked at once more. */
void nvshmem_end_with(tb_comm *c, int32_t peer) {
    tb__waiter *w;
    while ((w = tb__match_drain(&c->receives, peer)) || (w = tb__match_drain(&c->offered, peer)))
        end_left(c, (nvshmem_posted *)w);
    end_left_in(c, &c->wanted, peer);
    end_left_in(c, &c->granted, peer);
    for (size_t i = 0; i < NVSHMEM_SLOTS; i++) {
        if (c->slots[i].receive && c->slots[i].receive->waiter.peer == peer)
            c->slots[i].receive->nlooks = 1;
    }
    wake(c);
}

/* Puts are left alone: what they write and read is memory of the communicator, which is not freed before they end. */
void nvshmem_end_all(tb_comm *c) {
    nvshmem_posted *p;
    while ((p = take_idle(c)))
        end_failed(c, p);
    for (size_t i = 0; i < NVSHMEM_SLOTS; i++) {
        p = c->slots[i].receive;
        if (p) {
            empty_slot(c, i, true);
            end_failed(c, p);
        }
    }
    wake(c);
}

static void complete_failed_puts(tb_comm *c) {
    tb__waiter *w = c->put.first;
    while (w) {
        nvshmem_posted *p = (nvshmem_posted *)w;
        w = w->next;
        if (!p->op)
            continue;
        snprintf(p->op->why, sizeof p->op->why, "%.*s", (int)sizeof p->op->why - 1, c->why);
        abandon(c, p, status_of_failed(c, p->waiter.peer));
        w = c->put.first; /* `done` may have done anything */
    }
}

/* ---- Posting ---------------------------------------------------------------------------------------------------- */

static tb_status check_op(const tb_comm *c, const tb_op *op) {
    size_t pe = nvshmem_find(c, op->peer);
    if (pe == SIZE_MAX || pe == c->pe)
        return tb__fail(TB_INVALID, "rank %" PRId32 " is not another rank of the communicator", op->peer);
    uintptr_t at = (uintptr_t)op->pieces[0].base, base = (uintptr_t)c->memory.base;
    if (c->status != TB_OK)
        return TB_OK; /* it completes with that */
    if (!c->is_ready)
        return tb__fail(TB_INVALID, "the communicator is not ready, and has no memory yet");
    if (at < base || at - base > c->nbytes || op->pieces[0].nbytes > c->nbytes - (at - base))
        return tb__fail(TB_INVALID, "%zu bytes at %p are not in the communicator's memory", op->pieces[0].nbytes,
                        op->pieces[0].base);
    return TB_OK;
}

tb_status nvshmem_post(void *context, tb_op *op) {
    nvshmem *u = context;
    tb_comm *c = op->comm;
    if (!c || c->is_destroyed || op->memory != TB_MEM_CUDA)
        return tb__fail(TB_INVALID, "transport nvshmem carries memory of GPUs, by a communicator");
    TB_TRY(check_op(c, op));
    nvshmem_posted *p = tb__op_begin(op, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    c->nposted++;
    if (c->status != TB_OK || c->members[nvshmem_find(c, op->peer)].has_left) {
        (c->status != TB_OK ? end_failed : end_left)(c, p);
        return TB_OK;
    }
    if (op->kind == TB_OP_RECV) {
        p->stage = RECV_WAITING;
        tb__match_add(&c->receives, &p->waiter);
        return TB_OK;
    }
    p->stage = SEND_OFFERED;
    p->nbytes = op->pieces[0].nbytes;
    p->waiter.tag = p->id = ++u->nids;
    tb__match_add(&c->offered, &p->waiter);
    nvshmem_tell(c, op->peer, &(nvshmem_message){.kind = TELL_OFFER, .id = p->id, .tag = op->tag, .nbytes = p->nbytes});
    return TB_OK;
}

/* ---- Messages ---------------------------------------------------------------------------------------------------- */

static void drop(const tb_comm *c, int32_t peer, uint64_t id) {
    nvshmem_tell(c, peer, &(nvshmem_message){.kind = TELL_DROP, .id = id});
}

/* A sender offers only what this rank has posted a receive for; if there is none, it was cancelled. */
static void take_offer(tb_comm *c, int32_t peer, const nvshmem_message *m) {
    nvshmem_posted *p = (nvshmem_posted *)tb__match_take(&c->receives, peer, m->tag);
    size_t room = p ? p->op->pieces[0].nbytes : 0;
    if (!p || m->nbytes > room)
        drop(c, peer, m->id);
    if (!p)
        return;
    if (m->nbytes > room) {
        end(c, p, tb__op_too_big(p->op, room, m->nbytes));
        return;
    }
    p->stage = RECV_OFFERED;
    p->id = m->id;
    tb__waiters_add(&c->wanted, &p->waiter);
    wake(c);
}

static void take_grant(tb_comm *c, int32_t peer, const nvshmem_message *m) {
    nvshmem_posted *p = (nvshmem_posted *)tb__match_take(&c->offered, peer, m->id);
    char why[128];
    bool was_cancelled = !p;
    if (was_cancelled)
        p = tb__calloc(1, sizeof *p);
    if (!p) {
        nvshmem_fail(c, TB_IO, TB_NO_RANK, false, "there is no memory for a message's end");
        return;
    }
    p->waiter.peer = peer;
    p->stage = SEND_GRANTED;
    p->slot = m->slot;
    p->offset = m->offset;
    p->value = m->value;
    tb__waiters_add(&c->granted, &p->waiter);
    wake(c);
    if (m->slot < NVSHMEM_SLOTS && m->value > 0 && m->value <= MOST_VALUE && m->offset <= c->nbytes &&
        p->nbytes <= c->nbytes - m->offset)
        return;
    snprintf(why, sizeof why, "rank %" PRId32 " grants memory that is not the communicator's", peer);
    nvshmem_fail(c, TB_IO, TB_NO_RANK, false, why);
}

void nvshmem_told_op(tb_comm *c, int32_t peer, const nvshmem_message *m) {
    if (c->status != TB_OK || !c->is_ready || c->is_destroyed)
        return;
    if (m->kind == TELL_OFFER) {
        take_offer(c, peer, m);
    } else if (m->kind == TELL_GRANT) {
        take_grant(c, peer, m);
    } else {
        nvshmem_posted *p = (nvshmem_posted *)tb__match_take(&c->offered, peer, m->id);
        if (p)
            end(c, p, TB_OK);
    }
}

/* ---- Receiving --------------------------------------------------------------------------------------------------- */

static size_t find_slot(const tb_comm *c) {
    size_t i = 0;
    while (i < NVSHMEM_SLOTS && (c->slots[i].receive || c->slots[i].is_kept))
        i++;
    return i;
}

static void grant_wanted(tb_comm *c) {
    while (c->wanted.first) {
        size_t slot = find_slot(c);
        if (slot == NVSHMEM_SLOTS)
            return;
        nvshmem_posted *p = (nvshmem_posted *)tb__waiters_take(&c->wanted);
        nvshmem_slot *s = &c->slots[slot];
        s->receive = p;
        s->value = s->value % MOST_VALUE + 1;
        c->ngranted++;
        p->stage = RECV_GRANTED;
        p->slot = slot;
        nvshmem_tell(c, p->waiter.peer,
                     &(nvshmem_message){.kind = TELL_GRANT,
                                        .slot = (uint32_t)slot,
                                        .id = p->id,
                                        .offset = (uintptr_t)p->op->pieces[0].base - (uintptr_t)c->memory.base,
                                        .value = s->value});
    }
}

/* The word of a slot has its value. */
static void take_word(tb_comm *c, nvshmem_posted *p, uint64_t nbytes) {
    empty_slot(c, p->slot, false);
    if (nbytes == NVSHMEM_DROPPED && p->nlooks > 0) {
        end_left(c, p);
    } else if (nbytes == NVSHMEM_DROPPED) { /* the receive waits for another message */
        p->stage = RECV_WAITING;
        tb__match_add(&c->receives, &p->waiter);
    } else {
        p->op->nbytes = nbytes;
        end(c, p, TB_OK);
    }
}

/* Looks at the last copy of the words, and begins another. */
static void watch(tb_comm *c) {
    nvshmem_memory *m = &c->memory;
    const nvshmem_cuda *cuda = c->owner->cuda;
    if (c->is_watching) {
        int result = cuda->event_query(m->event);
        if (result == CUDA_NOT_READY || !check_cuda(c, "cuEventQuery", result))
            return;
        c->is_watching = false;
        for (size_t i = 0; i < NVSHMEM_SLOTS; i++) {
            nvshmem_posted *p = c->slots[i].receive;
            if (p && m->seen[i] >> VALUE_SHIFT == c->slots[i].value) {
                take_word(c, p, m->seen[i] & NVSHMEM_DROPPED);
            } else if (p && p->nlooks == 2) {
                empty_slot(c, i, false);
                end_left(c, p);
            }
        }
    }
    if (c->ngranted == 0)
        return;
    if (!check_cuda(c, "cuMemcpyAsync",
                    cuda->copy((uintptr_t)m->seen, (uintptr_t)m->words, NVSHMEM_SLOTS * sizeof *m->words, m->watch)) ||
        !check_cuda(c, "cuEventRecord", cuda->event_record(m->event, m->watch)))
        return;
    c->is_watching = true;
    for (size_t i = 0; i < NVSHMEM_SLOTS; i++) {
        if (c->slots[i].receive && c->slots[i].receive->nlooks == 1)
            c->slots[i].receive->nlooks = 2;
    }
}

/* ---- Sending ----------------------------------------------------------------------------------------------------- */

/* NVSHMEM orders the signal after the data; after quiet, the stream's work is done when both are at the receiver. */
static void put(tb_comm *c, nvshmem_posted *p) {
    const nvshmem_functions *call = c->owner->call;
    const nvshmem_cuda *cuda = c->owner->cuda;
    int pe = (int)nvshmem_find(c, p->waiter.peer);
    void *stream = c->memory.streams[(size_t)pe % NVSHMEM_STREAMS];
    uint64_t *word = &c->memory.words[p->slot];
    uint64_t value = p->value << VALUE_SHIFT | (p->op ? p->nbytes : NVSHMEM_DROPPED);
    p->stage = SEND_PUT;
    tb__waiters_add(&c->put, &p->waiter);
    if (!check_cuda(c, "cuEventCreate", cuda->event_create(&p->event, CUDA_NO_TIMING)))
        return;
    if (p->op && p->nbytes > 0)
        call->put_signal(c->memory.base + p->offset, p->op->pieces[0].base, p->nbytes, word, value, NVSHMEM_SIGNAL_SET,
                         pe, stream);
    else
        call->set_signal(word, value, NVSHMEM_SIGNAL_SET, pe, stream);
    call->quiet(stream);
    check_cuda(c, "cuEventRecord", cuda->event_record(p->event, stream));
}

static void put_granted(tb_comm *c) {
    if (!c->granted.first || !nvshmem_library_enter())
        return;
    tb__waiter *w;
    while (c->status == TB_OK && (w = tb__waiters_take(&c->granted)))
        put(c, (nvshmem_posted *)w);
    nvshmem_library_exit();
}

static void check_puts(tb_comm *c) {
    for (tb__waiter **at = &c->put.first; *at;) {
        nvshmem_posted *p = (nvshmem_posted *)*at;
        int result = p->event ? c->owner->cuda->event_query(p->event) : CUDA_NOT_READY;
        if (result != CUDA_NOT_READY && !check_cuda(c, "cuEventQuery", result))
            return;
        if (result == CUDA_NOT_READY) {
            at = &p->waiter.next;
        } else {
            tb__waiters_unlink(&c->put, at);
            end(c, p, TB_OK);
        }
    }
}

bool nvshmem_advance(tb_comm *c) {
    if (c->status == TB_OK && c->is_ready && !c->is_destroyed &&
        (c->wanted.first || c->granted.first || c->put.first || c->ngranted > 0)) {
        if (!enter_gpu(c)) {
            nvshmem_library_lose(tb_error_detail());
            nvshmem_fail(c, TB_IO, TB_NO_RANK, false, tb_error_detail());
        } else {
            grant_wanted(c);
            put_granted(c);
            check_puts(c);
            watch(c);
            leave_gpu(c);
        }
    }
    complete_ended(c);
    if (c->status != TB_OK)
        complete_failed_puts(c);
    return c->status == TB_OK && !c->is_destroyed &&
           (c->wanted.first || c->granted.first || c->put.first || c->ngranted > 0);
}

/* ---- Cancelling -------------------------------------------------------------------------------------------------- */

/* Waits until the GPU is done with the operation; NULL: with all that this rank has put and granted. */
static void wait_for(tb_comm *c, const nvshmem_posted *p) {
    int64_t until = tb__now_ms() + PATIENCE_MS;
    if (!enter_gpu(c))
        return;
    for (;;) {
        check_puts(c);
        watch(c);
        bool is_busy = p ? p->stage == SEND_PUT || p->stage == RECV_GRANTED : c->put.first || c->ngranted > 0;
        if (!is_busy || c->status != TB_OK || tb__now_ms() >= until)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    leave_gpu(c);
}

static void cancel_waiting(tb_comm *c, nvshmem_posted *p) {
    static const char text[] = "it is still under way";
    switch (p->stage) {
    case SEND_OFFERED:
        tb__match_remove(&c->offered, &p->waiter);
        break;
    case RECV_WAITING:
        tb__match_remove(&c->receives, &p->waiter);
        break;
    case RECV_OFFERED:
        tb__waiters_remove(&c->wanted, &p->waiter);
        drop(c, p->waiter.peer, p->id);
        break;
    case OP_ENDED:
        tb__waiters_remove(&c->ended, &p->waiter);
        break;
    case SEND_GRANTED: /* its receiver is told by the word */
        p->nbytes = 0;
        abandon(c, p, TB_CANCELLED);
        return;
    case SEND_PUT:
        memcpy(p->op->why, text, sizeof text);
        abandon(c, p, TB_TIMEOUT);
        return;
    default:
        empty_slot(c, p->slot, true);
        memcpy(p->op->why, text, sizeof text);
        complete(c, p, TB_TIMEOUT);
        return;
    }
    complete(c, p, TB_CANCELLED);
}

void nvshmem_cancel(void *context, tb_op *op) {
    tb_comm *c = op->comm;
    nvshmem_posted *p = op->state;
    (void)context;
    if (p->stage == SEND_PUT || p->stage == RECV_GRANTED)
        wait_for(c, p);
    cancel_waiting(c, p);
}

/* For comm_destroy. */
void nvshmem_cancel_all(tb_comm *c) {
    nvshmem_posted *p;
    while ((p = take_idle(c)))
        end(c, p, TB_CANCELLED);
    if (c->status == TB_OK && (c->put.first || c->ngranted > 0))
        wait_for(c, NULL);
    while ((p = take_idle(c))) /* receives whose message was dropped */
        end(c, p, TB_CANCELLED);
    for (tb__waiter *w = c->ended.first; w; w = w->next)
        ((nvshmem_posted *)w)->status = TB_CANCELLED;
    for (size_t i = 0; i < NVSHMEM_SLOTS; i++) {
        if (c->slots[i].receive)
            cancel_waiting(c, c->slots[i].receive);
    }
    for (tb__waiter *w = c->put.first; w; w = ((nvshmem_posted *)w)->op ? c->put.first : w->next) {
        if (((nvshmem_posted *)w)->op)
            cancel_waiting(c, (nvshmem_posted *)w);
    }
    complete_ended(c);
}

bool nvshmem_drain(tb_comm *c) {
    if (c->put.first && c->status == TB_OK)
        return false;
    int64_t until = tb__now_ms() + PATIENCE_MS;
    if (c->put.first && enter_gpu(c)) {
        while (check_puts(c), c->put.first && tb__now_ms() < until)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        leave_gpu(c);
    }
    complete_ended(c);
    return !c->put.first;
}
