/* Sends and receives: inside the socket, read from the sender's memory, or through the ring. */
#include "transport/shm/shm.h"

#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic uint64_t *message_word(shm_control *control, uint32_t slot) {
    return &control->message[slot % SHM_LONG_MESSAGES];
}

static uint64_t word_value(uint64_t serial, uint64_t state) {
    return serial << 2 | state;
}

/* Assigns a free word of the control page to a new message; false if all are in use. */
static bool take_word(shm *s, shm_posted *p) {
    for (uint32_t i = 0; i < SHM_LONG_MESSAGES; i++) {
        uint32_t slot = (s->next_message + i) % SHM_LONG_MESSAGES;
        if (atomic_load(message_word(s->control, slot)) != 0)
            continue;
        s->next_message = slot + 1;
        p->slot = slot;
        p->serial = ++s->next_serial;
        atomic_store(message_word(s->control, slot), word_value(p->serial, MESSAGE_READY));
        return true;
    }
    return false;
}

static void free_word(shm *s, const shm_posted *p) {
    atomic_store(message_word(s->control, p->slot), 0);
}

/* ---- Sending --------------------------------------------------------------------------------------------------- */

static int send_short(shm_peer *peer, const shm_posted *p) {
    unsigned char data[TB_SHORT_MAX];
    shm_frame frame = {.kind = SHM_MESSAGE, .is_expected = p->op->is_expected, .tag = p->op->tag, .nbytes = p->nbytes};
    tb__pieces_gather(p->op->pieces, p->op->npieces, 0, data, p->nbytes);
    return shm_link_try(&peer->out, &frame, &(struct iovec){data, p->nbytes}, 1, NULL, 0);
}

static int send_long(shm *s, shm_peer *peer, shm_posted *p) {
    tb_range pieces[SHM_MAX_PIECES];
    p->by_ring = !peer->it_can_read || p->op->npieces > SHM_MAX_PIECES;
    size_t count = p->by_ring ? 0 : p->op->npieces;
    for (size_t i = 0; i < count; i++)
        pieces[i] = (tb_range){(uintptr_t)p->op->pieces[i].base, p->op->pieces[i].nbytes};
    if (!take_word(s, p))
        return EAGAIN;
    shm_frame frame = {.kind = SHM_LONG, .slot = p->slot, .serial = p->serial, .tag = p->op->tag, .nbytes = p->nbytes};
    int error = shm_link_try(&peer->out, &frame, &(struct iovec){pieces, count * sizeof *pieces}, 1, NULL, 0);
    if (error)
        free_word(s, p);
    return error;
}

void shm_send_queued(shm *s, shm_peer *peer) {
    shm_posted *p;
    while ((p = (shm_posted *)peer->queue.first) && peer->out.is_ready && peer->out.queue_count == 0) {
        bool is_short = p->nbytes <= TB_SHORT_MAX;
        int error = is_short ? send_short(peer, p) : send_long(s, peer, p);
        if (error == EAGAIN && peer->sending.first && !is_short && peer->out.queue_count == 0 &&
            atomic_load(message_word(s->control, s->next_message)) != 0)
            return; /* all words are in use: on_done calls this again */
        if (error == EAGAIN)
            shm_link_want_write(s, &peer->out, true);
        if (error)
            return; /* epoll reports a broken socket */
        tb__waiters_take(&peer->queue);
        if (is_short) {
            shm_finish(s, p, TB_OK);
        } else {
            p->state = SHM_SENDING;
            tb__waiters_add(&peer->sending, &p->waiter);
            shm_fill_ring(s, peer);
        }
    }
}

static shm_posted *find_long(const tb__waiters *list, uint64_t serial) {
    tb__waiter *w = list->first;
    while (w && ((shm_posted *)w)->serial != serial)
        w = w->next;
    return (shm_posted *)w;
}

static bool make_ring(shm *s, shm_peer *peer) {
    size_t nbytes = (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE;
    int fd = tb__fd_own(memfd_create("tensorbus-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd >= 0 && ftruncate(fd, (off_t)nbytes) == 0)
        peer->ring_out = shm_map_fd(fd, nbytes);
    if (!peer->ring_out) {
        shm_retry_later(s, "make a ring of shared memory", errno);
        tb__fd_close(fd);
        return false;
    }
    peer->ring_free = (1U << SHM_RING_SLOTS) - 1;
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW); /* the peer adds the seal, too */
    shm_link_send(s, &peer->out, &(shm_frame){.kind = SHM_RING}, &fd, 1);
    return true;
}

void shm_fill_ring(shm *s, shm_peer *peer) {
    for (tb__waiter *w = peer->sending.first; w; w = w->next) {
        shm_posted *p = (shm_posted *)w;
        while (p->by_ring && p->at < p->nbytes) {
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
            shm_frame frame = {.kind = SHM_CHUNK, .slot = slot, .serial = p->serial, .nbytes = n};
            shm_link_send(s, &peer->out, &frame, NULL, 0);
        }
    }
}

static void on_done(shm *s, shm_peer *peer, const shm_frame *frame) {
    shm_posted *p = find_long(&peer->sending, frame->serial);
    if (!p)
        return; /* it was revoked meanwhile */
    tb__waiters_remove(&peer->sending, &p->waiter);
    free_word(s, p);
    if (frame->tag)
        snprintf(p->op->why, sizeof p->op->why, "it could not read our memory");
    shm_finish(s, p, frame->tag ? TB_IO : TB_OK);
    shm_send_queued(s, peer);
}

/* ---- Receiving ------------------------------------------------------------------------------------------------- */

static void send_done(shm *s, shm_peer *peer, uint64_t serial, tb_status status) {
    if (peer->in)
        shm_link_send(s, peer->in, &(shm_frame){.kind = SHM_DONE, .serial = serial, .tag = (uint64_t)-status}, NULL, 0);
}

static void stop_receiving(shm *s, shm_posted *p) {
    tb__waiters_remove(&p->peer->receiving, &p->waiter);
    s->nreading -= !p->by_ring;
    free(p->ranges);
    p->ranges = NULL;
}

static void end_receive(shm *s, shm_posted *p, tb_status status) {
    stop_receiving(s, p);
    shm_finish(s, p, status);
}

/* All bytes are read. They are valid unless the sender has revoked the message meanwhile. */
static void complete_receive(shm *s, shm_posted *p) {
    uint64_t ready = word_value(p->serial, MESSAGE_READY);
    bool is_complete = atomic_compare_exchange_strong(message_word(p->peer->control, p->slot), &ready,
                                                      word_value(p->serial, MESSAGE_COMPLETE));
    if (is_complete)
        send_done(s, p->peer, p->serial, TB_OK);
    end_receive(s, p, is_complete ? TB_OK : tb__op_withdrawn(p->op));
}

static void read_slice(shm *s, shm_posted *p) {
    size_t left = p->op->nbytes - p->at, n = left < SHM_READ_SLICE ? left : SHM_READ_SLICE;
    tb_status status = shm_process_read(p->peer, p->op->pieces, p->op->npieces, 0, p->ranges, p->nranges, p->at, n);
    p->at += n;
    bool is_revoked = atomic_load(message_word(p->peer->control, p->slot)) != word_value(p->serial, MESSAGE_READY);
    if (is_revoked) { /* the sender may free the memory as soon as it has revoked the message */
        end_receive(s, p, tb__op_withdrawn(p->op));
    } else if (status != TB_OK) { /* the sender has unmapped the memory, or has exited, which is reported later */
        snprintf(p->op->why, sizeof p->op->why, "%s", tb_error_detail());
        send_done(s, p->peer, p->serial, status);
        end_receive(s, p, status);
    } else if (n == left) {
        complete_receive(s, p);
    }
}

bool shm_read_slices(shm *s) {
    for (size_t i = 0; s->nreading > 0 && i < s->peers.count; i++) {
        for (tb__waiter *w = s->peers.item[i]->receiving.first, *next; w; w = next) {
            next = w->next;
            if (!((shm_posted *)w)->by_ring)
                read_slice(s, (shm_posted *)w);
        }
    }
    return s->nreading > 0;
}

static bool on_message(shm *s, shm_peer *peer, const shm_frame *frame, const unsigned char *data, size_t nbytes) {
    if (frame->nbytes != nbytes)
        return false;
    shm_posted *p = (shm_posted *)tb__match_take(&s->receives, peer->rank, frame->tag);
    if (p)
        shm_finish(s, p, tb__op_fill(p->op, p->nbytes, data, nbytes));
    return p || frame->is_expected || tb__unexpected_add(&s->unexpected, peer->rank, frame->tag, data, nbytes);
}

static bool check_ranges(const tb_range *ranges, size_t count, uint64_t nbytes) {
    size_t sum = 0;
    bool is_good = true;
    for (size_t i = 0; i < count; i++)
        is_good &= !__builtin_add_overflow(sum, ranges[i].nbytes, &sum);
    if (!is_good || sum != nbytes)
        tb__set_detail("it sends %" PRIu64 " bytes, but their pieces have %" PRIu64, nbytes, (uint64_t)sum);
    return is_good && sum == nbytes;
}

static bool on_long(shm *s, shm_peer *peer, const shm_frame *frame, const unsigned char *data, size_t nbytes) {
    size_t nranges = nbytes / sizeof(tb_range);
    if (!peer->control || frame->slot >= SHM_LONG_MESSAGES || nbytes % sizeof(tb_range) || (nranges && !peer->can_read))
        return false;
    tb_range *ranges = nranges ? tb__malloc(1, nbytes) : NULL;
    if (nranges && !ranges)
        return false;
    if (ranges)
        memcpy(ranges, data, nbytes);
    if (ranges && !check_ranges(ranges, nranges, frame->nbytes)) {
        free(ranges);
        return false;
    }
    shm_posted *p = (shm_posted *)tb__match_take(&s->receives, peer->rank, frame->tag);
    if (!p || frame->nbytes > p->nbytes) { /* the receive was cancelled, or is too small */
        free(ranges);
        send_done(s, peer, frame->serial, TB_OK);
        if (p)
            shm_finish(s, p, tb__op_too_big(p->op, p->nbytes, frame->nbytes));
        return true;
    }
    p->state = SHM_RECEIVING;
    p->op->nbytes = frame->nbytes;
    p->at = 0;
    p->slot = frame->slot;
    p->serial = frame->serial;
    p->ranges = ranges;
    p->nranges = nranges;
    p->by_ring = !ranges;
    s->nreading += !p->by_ring;
    tb__waiters_add(&peer->receiving, &p->waiter);
    if (!p->by_ring)
        shm_wake(s);
    return true;
}

static void on_revoke(shm *s, const shm_peer *peer, const shm_frame *frame) {
    shm_posted *p = find_long(&peer->receiving, frame->serial);
    if (p)
        end_receive(s, p, tb__op_withdrawn(p->op));
}

static bool on_chunk(shm *s, shm_peer *peer, const shm_frame *frame) {
    if (!peer->ring_in || frame->slot >= SHM_RING_SLOTS || frame->nbytes > SHM_RING_SLOT_SIZE)
        return false;
    shm_posted *p = find_long(&peer->receiving, frame->serial); /* NULL if the receive was cancelled */
    if (p && (!p->by_ring || frame->nbytes > p->op->nbytes - p->at)) {
        tb__set_detail("it sent more of a message than it had announced, or in another way");
        return false;
    }
    if (p) {
        tb__pieces_scatter(p->op->pieces, p->op->npieces, p->at,
                           peer->ring_in + (size_t)frame->slot * SHM_RING_SLOT_SIZE, frame->nbytes);
        p->at += frame->nbytes;
    }
    shm_link_send(s, peer->in, &(shm_frame){.kind = SHM_CREDIT, .slot = frame->slot}, NULL, 0);
    if (p && p->at == p->op->nbytes)
        complete_receive(s, p);
    return true;
}

/* Matches the receive with an unexpected message, or lets it wait. */
static void match_receive(shm *s, shm_posted *p) {
    tb__unexpected *a = (tb__unexpected *)tb__match_take_or_add(&s->unexpected, &s->receives, &p->waiter);
    p->state = SHM_WAITING;
    if (a)
        shm_finish(s, p, tb__op_fill(p->op, p->nbytes, a->data, a->nbytes));
    free(a);
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

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
        shm_send_queued(s, peer);
    }
    return TB_OK;
}

bool shm_on_frame(shm *s, shm_link *link, const shm_frame *frame, const unsigned char *data, size_t nbytes,
                  shm_fds *fds) {
    tb__set_detail("it sent an invalid frame of kind %u with %zu bytes of data", (unsigned)frame->kind, nbytes);
    shm_peer *peer = link->peer;
    int fd = shm_fds_only(fds);
    char why[96];
    if (link->is_out) {
        switch ((shm_kind)frame->kind) {
        case SHM_WELCOME:
            peer->it_can_read = frame->serial != 0;
            link->is_ready = true;
            shm_send_queued(s, peer);
            return true;
        case SHM_CREDIT:
            if (frame->slot >= SHM_RING_SLOTS)
                return false;
            peer->ring_free |= 1U << frame->slot;
            shm_fill_ring(s, peer);
            return true;
        case SHM_DONE:
            on_done(s, peer, frame);
            return true;
        case SHM_RESEND:
            shm_on_resend(s, peer, frame);
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
    case SHM_LONG:
        return on_long(s, peer, frame, data, nbytes);
    case SHM_REVOKE:
        on_revoke(s, peer, frame);
        return true;
    case SHM_CHUNK:
        return on_chunk(s, peer, frame);
    case SHM_FILE:
        return shm_on_file(peer, frame, fd);
    case SHM_FDS:
        return shm_on_fds(peer, frame, fds);
    case SHM_FORGET:
        shm_on_forget(peer, frame);
        return true;
    case SHM_RING:
        if (fd == SHM_FD_LOST) {
            shm_lose_by_shortage(s, peer);
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
    uint64_t ready = word_value(p->serial, MESSAGE_READY);
    bool is_revoked = atomic_compare_exchange_strong(message_word(s->control, p->slot), &ready,
                                                     word_value(p->serial, MESSAGE_REVOKED));
    tb__waiters_remove(&p->peer->sending, &p->waiter);
    free_word(s, p);
    p->op->status = is_revoked ? TB_CANCELLED : TB_OK; /* TB_OK: the receiver had completed it before */
    if (is_revoked)
        shm_link_send(s, &p->peer->out, &(shm_frame){.kind = SHM_REVOKE, .serial = p->serial}, NULL, 0);
}

static void cancel_receive(shm *s, shm_posted *p) {
    p->op->status = TB_CANCELLED;
    if (p->state == SHM_WAITING) {
        tb__match_remove(&s->receives, &p->waiter);
        return;
    }
    stop_receiving(s, p);
    send_done(s, p->peer, p->serial, TB_OK);
}

void shm_cancel_message(shm *s, shm_posted *p) {
    if (p->state == SHM_FINISHED)
        tb__waiters_remove(&s->finished, &p->waiter);
    else if (p->op->kind == TB_OP_SEND)
        cancel_send(s, p);
    else
        cancel_receive(s, p);
    tb__op_complete(p->op);
}

void shm_drop_messages(shm *s, shm_peer *peer, tb_status status) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&peer->queue)))
        shm_finish(s, (shm_posted *)w, status);
    while ((w = tb__waiters_take(&peer->sending))) {
        shm_posted *p = (shm_posted *)w; /* the word shows whether it was received, even if SHM_DONE has not arrived */
        bool is_complete = atomic_load(message_word(s->control, p->slot)) == word_value(p->serial, MESSAGE_COMPLETE);
        free_word(s, p);
        shm_finish(s, p, is_complete ? TB_OK : status);
    }
    while (peer->receiving.first)
        end_receive(s, (shm_posted *)peer->receiving.first, status);
    while ((w = tb__match_drain(&s->receives, peer->rank)))
        shm_finish(s, (shm_posted *)w, status);
    tb__match_free(&s->unexpected, peer->rank);
}
