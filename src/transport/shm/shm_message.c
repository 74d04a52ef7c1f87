/* Sends and receives: inside the socket, read from the sender's memory, or through the ring. */
#include "transport/shm/shm.h"

#include <errno.h>
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
    shm_frame frame = {.kind = SHM_MESSAGE, .tag = p->op->tag, .nbytes = p->nbytes};
    tb__pieces_gather(p->op->pieces, p->op->npieces, 0, data, p->nbytes);
    return shm_link_try(&peer->out, &frame, &(struct iovec){data, p->nbytes}, 1, -1);
}

static int send_offer(shm *s, shm_peer *peer, shm_posted *p) {
    shm_frame frame = {.kind = SHM_OFFER, .tag = p->op->tag, .nbytes = p->nbytes};
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

static void answer(shm *s, shm_peer *peer, shm_kind kind, const shm_arrival *a, uint64_t tag) {
    shm_frame frame = {.kind = kind, .slot = a->slot, .serial = a->serial, .tag = tag};
    if (peer->in)
        shm_link_send(s, peer->in, &frame, -1);
}

static void forget_taken(shm_arrival *a) {
    tb__waiters_remove(&a->peer->taken, &a->waiter);
}

static void free_arrival(shm_arrival *a) {
    free(a->pieces);
    free(a);
}

static void deliver(shm *s, shm_posted *p, const unsigned char *data, size_t nbytes) {
    tb_op *op = p->op;
    op->nbytes = nbytes;
    if (nbytes > p->nbytes) {
        shm_finish(s, p, TB_TOO_BIG);
        return;
    }
    tb__pieces_scatter(op->pieces, op->npieces, 0, data, nbytes);
    shm_finish(s, p, TB_OK);
}

/* Nobody can have it, or wants it. */
static void discard(shm *s, shm_arrival *a) {
    if (a->is_offer)
        answer(s, a->peer, SHM_DONE, a, 0);
    free_arrival(a);
}

static void begin_take(shm *s, shm_posted *p, shm_arrival *a) {
    p->op->nbytes = a->nbytes;
    if (a->nbytes > p->nbytes) {
        discard(s, a);
        shm_finish(s, p, TB_TOO_BIG);
        return;
    }
    p->state = SHM_TAKING;
    p->offer = a;
    p->at = 0;
    a->taker = p;
    tb__waiters_add(&a->peer->taken, &a->waiter);
    if (a->by_ring) {
        answer(s, a->peer, SHM_TAKE, a, 0);
    } else {
        tb__waiters_add(&s->taking, &p->waiter);
        eventfd_write(s->wake, 1);
    }
}

/* Finds a receive for the offer, or lets it wait. */
static void match_offer(shm *s, shm_arrival *a) {
    shm_posted *p = (shm_posted *)tb__match_take(&s->receives, a->waiter.peer, a->waiter.tag);
    if (p)
        begin_take(s, p, a);
    else
        tb__match_add(&s->arrivals, &a->waiter);
}

/* Finds a message for the receive, or lets it wait. */
static void match_receive(shm *s, shm_posted *p) {
    shm_arrival *a = (shm_arrival *)tb__match_take(&s->arrivals, p->waiter.peer, p->waiter.tag);
    p->state = SHM_WAITING;
    if (!a) {
        tb__match_add(&s->receives, &p->waiter);
    } else if (a->is_offer) {
        begin_take(s, p, a);
    } else {
        deliver(s, p, a->data, a->nbytes);
        free_arrival(a);
    }
}

/* The bytes are in: they count if the sender has not revoked them meanwhile. */
static void complete_take(shm *s, shm_posted *p) {
    shm_arrival *a = p->offer;
    uint64_t expected = offer_value(a->serial, OFFER_READY);
    bool is_complete = atomic_compare_exchange_strong(offer_word(a->peer->control, a->slot), &expected,
                                                      offer_value(a->serial, OFFER_COMPLETE));
    forget_taken(a);
    p->offer = NULL;
    if (is_complete) {
        answer(s, a->peer, SHM_DONE, a, 0);
        shm_finish(s, p, TB_OK);
    } else {
        match_receive(s, p);
    }
    free_arrival(a);
}

bool shm_take_slices(shm *s) {
    tb__waiters round = s->taking;
    s->taking = (tb__waiters){0};
    for (tb__waiter *w; (w = tb__waiters_take(&round));) {
        shm_posted *p = (shm_posted *)w;
        shm_arrival *a = p->offer;
        size_t n = a->nbytes - p->at < SHM_READ_SLICE ? a->nbytes - p->at : SHM_READ_SLICE;
        tb_status status =
            shm_process_copy(a->peer, p->op->pieces, p->op->npieces, 0, a->pieces, a->npieces, p->at, n, false);
        p->at += n;
        if (status != TB_OK) { /* the sender's memory is gone, or the sender is, of which we shall hear */
            forget_taken(a);
            answer(s, a->peer, SHM_DONE, a, (uint64_t)-status);
            free_arrival(a);
            p->offer = NULL;
            shm_finish(s, p, status);
        } else if (p->at == a->nbytes) {
            complete_take(s, p);
        } else {
            tb__waiters_add(&s->taking, &p->waiter);
        }
    }
    return s->taking.first != NULL;
}

tb_status shm_post_message(shm *s, shm_peer *peer, tb_op *op) {
    shm_posted *p = tb__calloc(1, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    p->op = op;
    p->peer = peer;
    p->nbytes = tb__pieces_size(op->pieces, op->npieces);
    p->waiter.peer = op->peer;
    p->waiter.tag = op->tag;
    op->state = p;
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

static shm_arrival *find_taken(const shm_peer *peer, const shm_frame *frame) {
    for (tb__waiter *w = peer->taken.first; w; w = w->next) {
        shm_arrival *a = (shm_arrival *)w;
        if (a->slot == frame->slot && a->serial == frame->serial)
            return a;
    }
    return NULL;
}

static bool make_ring(shm *s, shm_peer *peer) {
    size_t nbytes = (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE;
    int fd = memfd_create("tensorbus-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return false;
    if (ftruncate(fd, (off_t)nbytes) == 0)
        peer->ring_out = shm_map_fd(fd, nbytes);
    if (!peer->ring_out) {
        close(fd);
        return false;
    }
    peer->ring_free = (1U << SHM_RING_SLOTS) - 1;
    shm_link_send(s, &peer->out, &(shm_frame){.kind = SHM_RING}, fd);
    return true;
}

/* Fills the ring with what has been asked for. */
static void pump(shm *s, shm_peer *peer) {
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
    if (p) {
        deliver(s, p, data, nbytes);
        return true;
    }
    if (tb__unwanted_take(&peer->unwanted, frame->tag))
        return true;
    shm_arrival *a = tb__calloc(1, sizeof *a + nbytes);
    if (!a)
        return false;
    *a = (shm_arrival){.waiter = {.peer = peer->rank, .tag = frame->tag}, .peer = peer, .nbytes = nbytes};
    memcpy(a->data, data, nbytes);
    tb__match_add(&s->arrivals, &a->waiter);
    return true;
}

static bool on_offer(shm *s, shm_peer *peer, const shm_frame *frame, const unsigned char *data, size_t nbytes) {
    size_t npieces = nbytes / sizeof(tb_range), sum = 0;
    if (!peer->control || frame->slot >= SHM_OFFERS || nbytes % sizeof(tb_range) || (npieces && !peer->can_read))
        return false;
    shm_arrival *a = tb__calloc(1, sizeof *a);
    if (!a)
        return false;
    *a = (shm_arrival){.waiter = {.peer = peer->rank, .tag = frame->tag},
                       .peer = peer,
                       .is_offer = true,
                       .by_ring = npieces == 0,
                       .slot = frame->slot,
                       .serial = frame->serial,
                       .nbytes = frame->nbytes,
                       .npieces = npieces};
    a->pieces = tb__malloc(npieces, sizeof *a->pieces);
    if (a->pieces && npieces)
        memcpy(a->pieces, data, nbytes);
    for (size_t i = 0; a->pieces && i < npieces; i++)
        sum += a->pieces[i].nbytes;
    if (!a->pieces || (npieces && sum != a->nbytes)) {
        free_arrival(a);
        return false;
    }
    if (tb__unwanted_take(&peer->unwanted, frame->tag))
        discard(s, a);
    else
        match_offer(s, a);
    return true;
}

/* The receive that was taking a message waits for another one. */
static void untake(shm *s, shm_arrival *a) {
    shm_posted *p = a->taker;
    forget_taken(a);
    a->taker = NULL;
    p->offer = NULL;
    if (!a->by_ring)
        tb__waiters_remove(&s->taking, &p->waiter);
}

static void on_revoke(shm *s, shm_peer *peer, const shm_frame *frame) {
    shm_arrival *a = find_taken(peer, frame);
    if (a) {
        shm_posted *p = a->taker;
        untake(s, a);
        free_arrival(a);
        match_receive(s, p);
        return;
    }
    size_t b = tb__match_bucket(peer->rank, frame->tag);
    for (tb__waiter *w = s->arrivals.bucket[b].first; w; w = w->next) {
        a = (shm_arrival *)w;
        if (a->peer == peer && a->is_offer && a->slot == frame->slot && a->serial == frame->serial) {
            tb__match_remove(&s->arrivals, w);
            free_arrival(a);
            return;
        }
    }
}

static bool on_chunk(shm *s, shm_peer *peer, const shm_frame *frame) {
    if (!peer->ring_in || frame->tag >= SHM_RING_SLOTS || frame->nbytes > SHM_RING_SLOT_SIZE)
        return false;
    shm_arrival *a = find_taken(peer, frame); /* none if the receive was given up */
    if (a && frame->nbytes > a->nbytes - a->taker->at)
        return false;
    if (a) {
        shm_posted *p = a->taker;
        tb__pieces_scatter(p->op->pieces, p->op->npieces, p->at, peer->ring_in + frame->tag * SHM_RING_SLOT_SIZE,
                           frame->nbytes);
        p->at += frame->nbytes;
    }
    shm_link_send(s, peer->in, &(shm_frame){.kind = SHM_CREDIT, .tag = frame->tag}, -1);
    if (a && a->taker->at == a->nbytes)
        complete_take(s, a->taker);
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
    shm_peer *peer = link->peer;
    shm_posted *p;
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
            pump(s, peer);
            return true;
        case SHM_CREDIT:
            if (frame->tag >= SHM_RING_SLOTS)
                return false;
            peer->ring_free |= 1U << frame->tag;
            pump(s, peer);
            return true;
        case SHM_DONE:
            return on_done(s, peer, frame);
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
        if (fd >= 0 && !peer->ring_in)
            peer->ring_in = shm_map_fd(fd, (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE);
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
    shm_arrival *a = p->offer;
    untake(s, a);
    if (a->by_ring) { /* what is in the ring is spent; the sender is told that nobody wants it */
        answer(s, a->peer, SHM_DONE, a, (uint64_t)-TB_CANCELLED);
        free_arrival(a);
    } else {
        match_offer(s, a);
    }
}

void shm_cancel_message(shm *s, shm_posted *p) {
    if (p->state == SHM_FINISHED)
        tb__waiters_remove(&s->finished, &p->waiter);
    else if (p->op->kind == TB_OP_SEND)
        cancel_send(s, p);
    else
        cancel_receive(s, p);
    shm_tell(p);
}

void shm_forget_message(shm *s, shm_peer *peer, uint64_t tag) {
    shm_arrival *a = (shm_arrival *)tb__match_take(&s->arrivals, peer->rank, tag);
    if (a)
        discard(s, a);
    else
        tb__unwanted_add(&peer->unwanted, tag);
}

void shm_drop_messages(shm *s, shm_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->queue)))
        shm_finish(s, (shm_posted *)w, status);
    while ((w = tb__waiters_take(&peer->offered))) {
        close_offer(s, (shm_posted *)w);
        shm_finish(s, (shm_posted *)w, status);
    }
    while ((w = tb__waiters_take(&peer->taken))) {
        shm_arrival *a = (shm_arrival *)w;
        shm_posted *p = a->taker;
        untake(s, a);
        free_arrival(a);
        shm_finish(s, p, status);
    }
    while ((w = tb__match_drain(&s->receives, peer->rank)))
        shm_finish(s, (shm_posted *)w, status);
    while ((w = tb__match_drain(&s->arrivals, peer->rank)))
        free_arrival((shm_arrival *)w);
    tb__unwanted_fini(&peer->unwanted);
}
