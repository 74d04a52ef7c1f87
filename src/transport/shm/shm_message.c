/* Sends and receives: inside the socket, read from the sender's memory, or through the ring. */
#include "transport/shm/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic uint64_t *offer_word(shm_control *control, uint32_t slot) {
    return &control->offer[slot % SHM_OFFERS];
}

static uint64_t offer_value(uint64_t serial, uint64_t state) {
    return serial << 2 | state;
}

/* A free word of the control page, set to a new offer; false if all are taken. */
static bool open_offer(shm *s, shm_posted *p) {
    for (uint32_t i = 0; i < SHM_OFFERS; i++) {
        uint32_t slot = (s->next_offer + i) % SHM_OFFERS;
        if (atomic_load(offer_word(s->control, slot)) != 0)
            continue;
        s->next_offer = slot + 1;
        p->slot = slot;
        p->serial = ++s->next_serial;
        atomic_store(offer_word(s->control, slot), offer_value(p->serial, OFFER_READY));
        return true;
    }
    return false;
}

static void close_offer(shm *s, const shm_posted *p) {
    atomic_store(offer_word(s->control, p->slot), 0);
}

static int send_eager(shm_peer *peer, const shm_posted *p) {
    unsigned char data[SHM_EAGER];
    shm_frame frame = {.kind = SHM_MESSAGE, .is_expected = p->op->is_expected, .tag = p->op->tag, .nbytes = p->nbytes};
    tb__pieces_gather(p->op->pieces, p->op->npieces, 0, data, p->nbytes);
    return shm_link_try(&peer->out, &frame, &(struct iovec){data, p->nbytes}, 1, -1);
}

static int send_offer(shm *s, shm_peer *peer, shm_posted *p) {
    shm_frame frame = {.kind = SHM_OFFER, .is_expected = p->op->is_expected, .tag = p->op->tag, .nbytes = p->nbytes};
    tb_range pieces[SHM_MAX_PIECES];
    size_t count = peer->it_can_read && p->op->npieces <= SHM_MAX_PIECES ? p->op->npieces : 0;
    for (size_t i = 0; i < count; i++)
        pieces[i] = (tb_range){(uintptr_t)p->op->pieces[i].base, p->op->pieces[i].nbytes};
    if (!open_offer(s, p))
        return EAGAIN;
    frame.slot = p->slot;
    frame.serial = p->serial;
    int error = shm_link_try(&peer->out, &frame, &(struct iovec){pieces, count * sizeof *pieces}, 1, -1);
    if (error)
        close_offer(s, p);
    return error;
}

void shm_push(shm *s, shm_peer *peer) {
    shm_posted *p;
    while ((p = (shm_posted *)peer->queue.first) && peer->out.is_ready && peer->out.queue_count == 0) {
        bool is_eager = p->nbytes <= SHM_EAGER;
        int error = is_eager ? send_eager(peer, p) : send_offer(s, peer, p);
        if (error == EAGAIN && peer->offered.first && !is_eager && peer->out.queue_count == 0 &&
            atomic_load(offer_word(s->control, s->next_offer)) != 0)
            return; /* all offers are taken: an answer will bring us back here */
        if (error == EAGAIN)
            shm_link_want_write(s, &peer->out, true);
        if (error)
            return; /* a broken socket is seen by the event loop */
        tb__waiters_take(&peer->queue);
        if (is_eager) {
            shm_finish(s, p, TB_OK);
        } else {
            p->state = SHM_OFFERED;
            tb__waiters_add(&peer->offered, &p->waiter);
        }
    }
}

static void answer(shm *s, const shm_offer *o, shm_kind kind, uint64_t tag) {
    shm_frame frame = {.kind = kind, .slot = o->slot, .serial = o->arrival.id, .tag = tag};
    if (o->peer->in)
        shm_link_send(s, o->peer->in, &frame, -1);
}

static void forget_taken(shm_offer *o) {
    tb__waiters_remove(&o->peer->taken, &o->arrival.waiter);
}

/* Nobody can have it, or wants it. */
static void discard(shm *s, tb__arrival *a) {
    if (a->is_offer)
        answer(s, (shm_offer *)a, SHM_DONE, 0);
    free(a);
}

static void begin_take(shm *s, shm_posted *p, shm_offer *o) {
    p->op->nbytes = o->arrival.nbytes;
    if (o->arrival.nbytes > p->nbytes) {
        discard(s, &o->arrival);
        shm_finish(s, p, TB_TOO_BIG);
        return;
    }
    p->state = SHM_TAKING;
    p->taking = o;
    p->at = 0;
    o->taker = p;
    tb__waiters_add(&o->peer->taken, &o->arrival.waiter);
    if (o->by_ring) {
        answer(s, o, SHM_TAKE, 0);
    } else {
        tb__waiters_add(&s->taking, &p->waiter);
        eventfd_write(s->wake, 1);
    }
}

/* Finds a message for the receive, or lets it wait. */
static void match_receive(shm *s, shm_posted *p) {
    tb__arrival *a = (tb__arrival *)tb__match_meet(&s->arrivals, &s->receives, &p->waiter);
    p->state = SHM_WAITING;
    if (a && a->is_offer) {
        begin_take(s, p, (shm_offer *)a);
    } else if (a) {
        shm_finish(s, p, tb__op_fill(p->op, p->nbytes, a->data, a->nbytes));
        free(a);
    }
}

/* The bytes are in: they count if the sender has not revoked them meanwhile. */
static void complete_take(shm *s, shm_posted *p) {
    shm_offer *o = p->taking;
    uint64_t expected = offer_value(o->arrival.id, OFFER_READY);
    bool is_complete = atomic_compare_exchange_strong(offer_word(o->peer->control, o->slot), &expected,
                                                      offer_value(o->arrival.id, OFFER_COMPLETE));
    forget_taken(o);
    p->taking = NULL;
    if (is_complete) {
        answer(s, o, SHM_DONE, 0);
        shm_finish(s, p, TB_OK);
    } else {
        match_receive(s, p);
    }
    free(o);
}

bool shm_take_slices(shm *s) {
    tb__waiters round = s->taking;
    s->taking = (tb__waiters){0};
    for (tb__waiter *w; (w = tb__waiters_take(&round));) {
        shm_posted *p = (shm_posted *)w;
        shm_offer *o = p->taking;
        size_t left = o->arrival.nbytes - p->at, n = left < SHM_READ_SLICE ? left : SHM_READ_SLICE;
        tb_status status = shm_process_read(o->peer, p->op->pieces, p->op->npieces, 0, o->pieces, o->npieces, p->at, n);
        p->at += n;
        bool is_revoked = atomic_load(offer_word(o->peer->control, o->slot)) != offer_value(o->arrival.id, OFFER_READY);
        if (status != TB_OK && is_revoked) { /* whoever revokes may give the memory back at once */
            complete_take(s, p);
        } else if (status != TB_OK) { /* the sender's memory is gone, or the sender is, of which we shall hear */
            forget_taken(o);
            answer(s, o, SHM_DONE, (uint64_t)-status);
            free(o);
            p->taking = NULL;
            shm_finish(s, p, status);
        } else if (n == left) {
            complete_take(s, p);
        } else {
            tb__waiters_add(&s->taking, &p->waiter);
        }
    }
    return s->taking.first != NULL;
}

tb_status shm_post_message(shm *s, shm_peer *peer, tb_op *op) {
    shm_posted *p = tb__op_begin(op, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    p->peer = peer;
    p->nbytes = tb__pieces_size(op->pieces, op->npieces);
    if (op->kind == TB_OP_RECV) {
        match_receive(s, p);
    } else {
        p->state = SHM_QUEUED;
        tb__waiters_add(&peer->queue, &p->waiter);
        shm_push(s, peer);
    }
    return TB_OK;
}

static shm_posted *find_offered(const shm_peer *peer, const shm_frame *frame) {
    for (tb__waiter *w = peer->offered.first; w; w = w->next) {
        shm_posted *p = (shm_posted *)w;
        if (p->slot == frame->slot && p->serial == frame->serial)
            return p;
    }
    return NULL;
}

static shm_offer *find_taken(const shm_peer *peer, const shm_frame *frame) {
    return (shm_offer *)tb__offer_find(&peer->taken, frame->serial);
}

static bool make_ring(shm *s, shm_peer *peer) {
    size_t nbytes = (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE;
    int fd = memfd_create("tensorbus-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0)
        peer->ring_out = shm_map_fd(fd, nbytes);
    if (!peer->ring_out) {
        shm_retry_later(s, "make a ring of shared memory", errno);
        if (fd >= 0)
            close(fd);
        return false;
    }
    peer->ring_free = (1U << SHM_RING_SLOTS) - 1;
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW); /* the peer sees to it, too */
    shm_link_send(s, &peer->out, &(shm_frame){.kind = SHM_RING}, fd);
    return true;
}

void shm_pump(shm *s, shm_peer *peer) {
    for (tb__waiter *w = peer->offered.first; w; w = w->next) {
        shm_posted *p = (shm_posted *)w;
        while (p->state == SHM_RINGING && p->at < p->nbytes) {
            if (!peer->ring_out && !make_ring(s, peer))
                return;
            if (!peer->ring_free)
                return;
            uint32_t slot = (uint32_t)__builtin_ctz(peer->ring_free);
            size_t n = p->nbytes - p->at < SHM_RING_SLOT_SIZE ? p->nbytes - p->at : SHM_RING_SLOT_SIZE;
            tb__pieces_gather(p->op->pieces, p->op->npieces, p->at, peer->ring_out + (size_t)slot * SHM_RING_SLOT_SIZE,
                              n);
            peer->ring_free &= ~(1U << slot);
            p->at += n;
            shm_frame frame = {.kind = SHM_CHUNK, .slot = p->slot, .serial = p->serial, .tag = slot, .nbytes = n};
            shm_link_send(s, &peer->out, &frame, -1);
        }
    }
}

static bool on_message(shm *s, shm_peer *peer, const shm_frame *frame, const unsigned char *data, size_t nbytes) {
    if (frame->nbytes != nbytes)
        return false;
    shm_posted *p = (shm_posted *)tb__match_take(&s->receives, peer->rank, frame->tag);
    if (p)
        shm_finish(s, p, tb__op_fill(p->op, p->nbytes, data, nbytes));
    return p || frame->is_expected || tb__arrival_keep(&s->arrivals, peer->rank, frame->tag, data, nbytes);
}

static bool on_offer(shm *s, shm_peer *peer, const shm_frame *frame, const unsigned char *data, size_t nbytes) {
    size_t npieces = nbytes / sizeof(tb_range), sum = 0;
    if (!peer->control || frame->slot >= SHM_OFFERS || nbytes % sizeof(tb_range) || (npieces && !peer->can_read))
        return false;
    shm_offer *o = tb__malloc(1, sizeof *o + nbytes);
    if (!o)
        return false;
    *o = (shm_offer){.arrival = {.waiter = {.peer = peer->rank, .tag = frame->tag},
                                 .is_offer = true,
                                 .id = frame->serial,
                                 .nbytes = frame->nbytes},
                     .peer = peer,
                     .by_ring = npieces == 0,
                     .slot = frame->slot,
                     .npieces = npieces};
    memcpy(o->pieces, data, nbytes);
    bool is_good = true;
    for (size_t i = 0; i < npieces; i++)
        is_good &= !__builtin_add_overflow(sum, o->pieces[i].nbytes, &sum);
    if (npieces && (!is_good || sum != frame->nbytes)) {
        tb__set_detail("it offered %" PRIu64 " bytes, but its pieces have %" PRIu64, frame->nbytes, (uint64_t)sum);
        free(o);
        return false;
    }
    shm_posted *p = (shm_posted *)tb__match_take(&s->receives, peer->rank, frame->tag);
    if (p)
        begin_take(s, p, o);
    else if (frame->is_expected)
        discard(s, &o->arrival);
    else
        tb__match_add(&s->arrivals, &o->arrival.waiter);
    return true;
}

/* The receive that was taking a message waits for another one. */
static void untake(shm *s, shm_offer *o) {
    shm_posted *p = o->taker;
    forget_taken(o);
    o->taker = NULL;
    p->taking = NULL;
    if (!o->by_ring)
        tb__waiters_remove(&s->taking, &p->waiter);
}

static void on_revoke(shm *s, shm_peer *peer, const shm_frame *frame) {
    shm_offer *o = find_taken(peer, frame);
    if (!o) {
        tb__offer_drop(&s->arrivals, peer->rank, frame->tag, frame->serial);
        return;
    }
    shm_posted *p = o->taker;
    untake(s, o);
    free(o);
    match_receive(s, p);
}

static bool on_chunk(shm *s, shm_peer *peer, const shm_frame *frame) {
    if (!peer->ring_in || frame->tag >= SHM_RING_SLOTS || frame->nbytes > SHM_RING_SLOT_SIZE)
        return false;
    shm_offer *o = find_taken(peer, frame); /* none if the receive was given up */
    if (o && (!o->by_ring || frame->nbytes > o->arrival.nbytes - o->taker->at)) {
        tb__set_detail("it sent more of a message than it had offered, or in another way");
        return false;
    }
    if (o) {
        shm_posted *p = o->taker;
        tb__pieces_scatter(p->op->pieces, p->op->npieces, p->at, peer->ring_in + frame->tag * SHM_RING_SLOT_SIZE,
                           frame->nbytes);
        p->at += frame->nbytes;
    }
    shm_link_send(s, peer->in, &(shm_frame){.kind = SHM_CREDIT, .tag = frame->tag}, -1);
    if (o && o->taker->at == o->arrival.nbytes)
        complete_take(s, o->taker);
    return true;
}

static bool on_done(shm *s, shm_peer *peer, const shm_frame *frame) {
    shm_posted *p = find_offered(peer, frame);
    if (!p)
        return true; /* revoked meanwhile */
    tb__waiters_remove(&peer->offered, &p->waiter);
    close_offer(s, p);
    shm_finish(s, p, frame->tag ? TB_IO : TB_OK);
    shm_push(s, peer);
    return true;
}

bool shm_on_frame(shm *s, shm_link *link, const shm_frame *frame, const unsigned char *data, size_t nbytes, int fd) {
    tb__set_detail("it sent what makes no sense");
    shm_peer *peer = link->peer;
    shm_posted *p;
    char why[96];
    if (link->is_out) {
        switch ((shm_kind)frame->kind) {
        case SHM_WELCOME:
            peer->it_can_read = frame->serial != 0;
            link->is_ready = true;
            shm_push(s, peer);
            return true;
        case SHM_TAKE:
            p = find_offered(peer, frame);
            if (p)
                p->state = SHM_RINGING;
            shm_pump(s, peer);
            return true;
        case SHM_CREDIT:
            if (frame->tag >= SHM_RING_SLOTS)
                return false;
            peer->ring_free |= 1U << frame->tag;
            shm_pump(s, peer);
            return true;
        case SHM_DONE:
            return on_done(s, peer, frame);
        case SHM_AGAIN:
            shm_on_again(s, peer, frame);
            return true;
        case SHM_SHORTAGE:
            snprintf(why, sizeof why, "it is out of file descriptors: its RLIMIT_NOFILE is %" PRIu64, frame->nbytes);
            shm_lose(s, peer, why);
            return false;
        default:
            return false;
        }
    }
    switch ((shm_kind)frame->kind) {
    case SHM_MESSAGE:
        return on_message(s, peer, frame, data, nbytes);
    case SHM_OFFER:
        return on_offer(s, peer, frame, data, nbytes);
    case SHM_REVOKE:
        on_revoke(s, peer, frame);
        return true;
    case SHM_CHUNK:
        return on_chunk(s, peer, frame);
    case SHM_FILE:
        return shm_on_file(peer, frame, fd);
    case SHM_FORGET:
        shm_on_forget(peer, frame);
        return true;
    case SHM_RING:
        if (fd == SHM_FD_LOST) {
            shm_give_up(s, peer);
            return false;
        }
        if (fd >= 0 && !peer->ring_in)
            peer->ring_in = shm_map_ring(fd);
        return peer->ring_in != NULL;
    default:
        return false;
    }
}

static void cancel_send(shm *s, shm_posted *p) {
    if (p->state == SHM_QUEUED) {
        tb__waiters_remove(&p->peer->queue, &p->waiter);
        p->op->status = TB_CANCELLED;
        return;
    }
    uint64_t expected = offer_value(p->serial, OFFER_READY);
    bool is_revoked = atomic_compare_exchange_strong(offer_word(s->control, p->slot), &expected,
                                                     offer_value(p->serial, OFFER_REVOKED));
    tb__waiters_remove(&p->peer->offered, &p->waiter);
    close_offer(s, p);
    p->op->status = is_revoked ? TB_CANCELLED : TB_OK; /* the receiver was first: it is delivered */
    if (is_revoked) {
        shm_frame frame = {.kind = SHM_REVOKE, .slot = p->slot, .serial = p->serial, .tag = p->op->tag};
        shm_link_send(s, &p->peer->out, &frame, -1);
    }
}

static void cancel_receive(shm *s, shm_posted *p) {
    p->op->status = TB_CANCELLED;
    if (p->state == SHM_WAITING) {
        tb__match_remove(&s->receives, &p->waiter);
        return;
    }
    shm_offer *o = p->taking;
    untake(s, o);
    discard(s, &o->arrival);
}

void shm_cancel_message(shm *s, shm_posted *p) {
    if (p->state == SHM_FINISHED)
        tb__waiters_remove(&s->finished, &p->waiter);
    else if (p->op->kind == TB_OP_SEND)
        cancel_send(s, p);
    else
        cancel_receive(s, p);
    tb__op_tell(p->op);
}

void shm_drop_messages(shm *s, shm_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->queue)))
        shm_finish(s, (shm_posted *)w, status);
    while ((w = tb__waiters_take(&peer->offered))) {
        shm_posted *p = (shm_posted *)w; /* the word tells whether it was received, also if the answer did not come */
        bool is_complete = atomic_load(offer_word(s->control, p->slot)) == offer_value(p->serial, OFFER_COMPLETE);
        close_offer(s, p);
        shm_finish(s, p, is_complete ? TB_OK : status);
    }
    while ((w = tb__waiters_take(&peer->taken))) {
        shm_offer *o = (shm_offer *)w;
        shm_posted *p = o->taker;
        untake(s, o);
        free(o);
        shm_finish(s, p, status);
    }
    while ((w = tb__match_drain(&s->receives, peer->rank)))
        shm_finish(s, (shm_posted *)w, status);
    tb__match_free(&s->arrivals, peer->rank);
}
