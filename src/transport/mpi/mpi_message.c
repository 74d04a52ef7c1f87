/* Letters and offers, and what becomes of chunks. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <inttypes.h>
#include <string.h>

/* ---- Messages -------------------------------------------------------------------------------------------------- */

static bool is_waiting(message_state state) {
    return state == MESSAGE_WAITS || state == MESSAGE_QUEUED || state == MESSAGE_OFFERED ||
           state == MESSAGE_RECEIVES; /* what is to come of it may take its time */
}

static void set_state(mpi *m, message *msg, message_state state) {
    m->nwaiting += (size_t)is_waiting(state) - (size_t)is_waiting(msg->state);
    msg->state = state;
}

message *mpi_new_message(mpi *m, message_state state, tb_op *op, int rank, size_t nbytes_behind) {
    message *msg = tb__malloc(1, sizeof *msg + nbytes_behind);
    if (!msg)
        return NULL;
    *msg = (message){.state = state, .op = op, .rank = rank, .end = SIZE_MAX, .error = MPI_SUCCESS};
    for (size_t i = 0; i < WINDOW; i++)
        msg->chunks[i].request = NO_REQUEST;
    if (op) {
        msg->waiter.peer = rank;
        msg->waiter.tag = op->tag;
        msg->nbytes = tb__pieces_size(op->pieces, op->npieces);
        op->state = msg;
    }
    m->nwaiting += is_waiting(state);
    TAILQ_INSERT_TAIL(&m->all, msg, all);
    return msg;
}

void mpi_ripen(mpi *m, message *msg) {
    if (!msg->is_ripe)
        TAILQ_INSERT_TAIL(&m->ripe, msg, ripe);
    msg->is_ripe = true;
}

/* What MPI may still read when nobody waits for it any more. It is kept, and never looked at again. */
static message_list left_behind = TAILQ_HEAD_INITIALIZER(left_behind);

static bool is_held(const message *msg) {
    bool is = false;
    for (size_t i = 0; i < WINDOW; i++)
        is |= msg->chunks[i].request != NO_REQUEST;
    return is;
}

void mpi_free_message(mpi *m, message *msg) {
    if (msg->is_ripe)
        TAILQ_REMOVE(&m->ripe, msg, ripe);
    TAILQ_REMOVE(&m->all, msg, all);
    m->nwaiting -= is_waiting(msg->state);
    m->nqueued -= msg->state == MESSAGE_QUEUED;
    if (msg->state == MESSAGE_RECEIVES)
        m->streams[msg->tag - 1] = false;
    if (msg->state == MESSAGE_OFFERED || msg->state == MESSAGE_SENDS)
        m->offered.item[(uint32_t)msg->id] = NULL;
    free(msg->arrival);
    if (is_held(msg)) {
        TAILQ_INSERT_TAIL(&left_behind, msg, all);
        return;
    }
    for (size_t i = 0; i < WINDOW; i++)
        free(msg->chunks[i].bounce);
    free(msg);
}

static void complete(tb_op *op, tb_status status) {
    if (!op)
        return;
    op->status = status;
    op->state = NULL;
    op->done(op);
}

/* Tells whose operation it is, and takes it from the message, which may live on. */
static void tell(message *msg, tb_status status) {
    tb_op *op = msg->op;
    msg->op = NULL;
    complete(op, status);
}

void mpi_finish(mpi *m, message *msg, tb_status status) {
    tb_op *op = msg->op;
    mpi_free_message(m, msg);
    complete(op, status);
}

/* ---- Letters --------------------------------------------------------------------------------------------------- */

static tb_status send_letter(mpi *m, message *msg, size_t nbytes_behind) {
    MPI_Request request;
    int code = MPI_Isend(&msg->header, (int)(sizeof msg->header + nbytes_behind), MPI_BYTE, msg->rank, LETTER_TAG,
                         m->seat.out, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Isend", code);
    msg->chunks[0].request = mpi_keep_request(m, request, (owner){msg, 0});
    mpi_note_event(m);
    return TB_OK;
}

/* A letter of the transport's own. The bytes behind the header begin right after it. */
static tb_status write_letter(mpi *m, int rank, header h) {
    TB_TRY(mpi_reserve_request(m));
    message *msg = mpi_new_message(m, MESSAGE_LETTER, NULL, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    msg->header = h;
    tb_status status = send_letter(m, msg, 0);
    if (status != TB_OK)
        mpi_free_message(m, msg);
    return status;
}

/* Without its answer the other side would wait for good. */
static void answer(mpi *m, int rank, letter_kind kind, uint64_t id, uint64_t tag, uint64_t nbytes) {
    if (write_letter(m, rank, (header){.kind = kind, .tag = tag, .nbytes = nbytes, .id = id}) != TB_OK)
        mpi_lose(m, rank, tb_error_detail());
}

void mpi_send_bye(mpi *m, int rank) {
    if (write_letter(m, rank, (header){.kind = LETTER_BYE}) != TB_OK)
        tb__log(TB_LOG_DEBUG, "transport mpi: %s", tb_error_detail());
}

tb_status mpi_fill_place(mpi *m, size_t at) {
    place *p = &m->ring[at];
    MPI_Request request;
    p->is_done = false;
    p->request = NO_REQUEST;
    TB_TRY(mpi_reserve_request(m));
    int code = MPI_Irecv(p->bytes, (int)sizeof p->bytes, MPI_BYTE, MPI_ANY_SOURCE, LETTER_TAG, m->seat.in, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Irecv", code);
    p->request = mpi_keep_request(m, request, (owner){NULL, at});
    return TB_OK;
}

/* ---- Posting --------------------------------------------------------------------------------------------------- */

static tb_status post_small(mpi *m, tb_op *op, int rank, size_t nbytes) {
    TB_TRY(mpi_reserve_request(m));
    message *msg = mpi_new_message(m, MESSAGE_LETTER, op, rank, nbytes);
    if (!msg)
        return TB_NO_MEMORY;
    _Static_assert(offsetof(message, data) == offsetof(message, header) + sizeof(header), "nothing in between");
    msg->header = (header){.kind = LETTER_SMALL, .tag = op->tag, .nbytes = nbytes};
    tb__pieces_gather(op->pieces, op->npieces, 0, msg->data, nbytes);
    tb_status status = send_letter(m, msg, nbytes);
    if (status != TB_OK) {
        op->state = NULL;
        mpi_free_message(m, msg);
    }
    return status;
}

/* A number for what is offered: its place in the list, and one that no other offer in that place has had. */
static tb_status number_offer(mpi *m, message *msg) {
    size_t at = 0;
    while (at < m->offered.count && m->offered.item[at])
        at++;
    if (at == m->offered.count && !tb__vec_push(&m->offered, NULL))
        return TB_NO_MEMORY;
    m->offered.item[at] = msg;
    msg->id = ++m->last_offer << 32 | at;
    return TB_OK;
}

tb_status mpi_post_send(mpi *m, tb_op *op, int rank) {
    size_t nbytes = tb__pieces_size(op->pieces, op->npieces);
    if (nbytes <= INLINE_MAX)
        return post_small(m, op, rank, nbytes);
    message *msg = mpi_new_message(m, MESSAGE_LETTER, op, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    tb_status status = number_offer(m, msg);
    if (status == TB_OK) {
        set_state(m, msg, MESSAGE_OFFERED);
        status = write_letter(m, rank, (header){.kind = LETTER_OFFER, .tag = op->tag, .nbytes = nbytes, .id = msg->id});
    }
    if (status != TB_OK) {
        op->state = NULL;
        mpi_free_message(m, msg);
    }
    return status;
}

static void match(mpi *m, message *msg, arrival *a) {
    set_state(m, msg, MESSAGE_MATCHED);
    msg->arrival = a;
    mpi_ripen(m, msg);
}

/* What has come already, or what is to come. */
static void await(mpi *m, message *msg) {
    arrival *a = (arrival *)tb__match_take(&m->arrivals, msg->rank, msg->waiter.tag);
    if (a) {
        match(m, msg, a);
        return;
    }
    set_state(m, msg, MESSAGE_WAITS);
    tb__match_add(&m->receives, &msg->waiter);
}

tb_status mpi_post_receive(mpi *m, tb_op *op, int rank) {
    message *msg = mpi_new_message(m, MESSAGE_WAITS, op, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    mpi_note_event(m);
    await(m, msg);
    return TB_OK;
}

/* ---- Chunks ---------------------------------------------------------------------------------------------------- */

/* Keeps the window full. A send that was given up sends no more; a receive that was, throws away what still comes. */
static void begin_chunks(mpi *m, message *msg) {
    bool is_send = msg->state == MESSAGE_SENDS;
    tb_status status = TB_OK;
    while (status == TB_OK && msg->posted < msg->nbytes && msg->posted < msg->end && (msg->op || !is_send)) {
        size_t i = 0;
        while (i < WINDOW && (msg->chunks[i].request != NO_REQUEST || msg->chunks[i].is_done))
            i++;
        if (i == WINDOW)
            return;
        status = mpi_begin_chunk(m, msg, i);
    }
    if (status != TB_OK)
        mpi_lose(m, msg->rank, tb_error_detail());
}

/* Also one whose sender took it back while it came. */
static void end_receive(mpi *m, message *msg) {
    if (msg->done == msg->nbytes || !msg->op) {
        mpi_finish(m, msg, TB_OK);
        return;
    }
    m->streams[msg->tag - 1] = false;
    msg->nbytes = tb__pieces_size(msg->op->pieces, msg->op->npieces);
    msg->posted = msg->done = 0;
    msg->end = SIZE_MAX;
    await(m, msg);
}

static void take_queued(mpi *m);

static void move_chunks(mpi *m, message *msg) {
    bool is_send = msg->state == MESSAGE_SENDS;
    for (size_t i = 0; i < WINDOW; i++) {
        chunk *c = &msg->chunks[i];
        if (!c->is_done)
            continue;
        c->is_done = false;
        msg->done += c->nbytes;
        if (!is_send && msg->op && !c->is_direct)
            tb__pieces_scatter(msg->op->pieces, msg->op->npieces, c->offset, c->bounce, c->nbytes);
    }
    if (is_send && (msg->done == msg->nbytes || (!msg->op && msg->done == msg->posted))) {
        mpi_finish(m, msg, TB_OK);
    } else if (!is_send && (msg->done == msg->nbytes || msg->done >= msg->end)) {
        end_receive(m, msg);
        take_queued(m);
    } else {
        begin_chunks(m, msg);
    }
}

/* Gives it an MPI tag and tells the sender. False: there is none left. */
static bool accept(mpi *m, message *msg) {
    int at = 0;
    while (at < MAX_STREAMS && m->streams[at])
        at++;
    if (at == MAX_STREAMS)
        return false;
    m->streams[at] = true;
    msg->tag = at + 1;
    m->nqueued -= msg->state == MESSAGE_QUEUED;
    set_state(m, msg, MESSAGE_RECEIVES);
    int rank = msg->rank;
    uint64_t id = msg->id;
    /* The receives are there before the sender hears of it: nothing comes unexpected. */
    begin_chunks(m, msg);
    if (!m->peers[rank].is_lost)
        answer(m, rank, LETTER_ACCEPT, id, (uint64_t)at + 1, 0);
    return true;
}

static void take_queued(mpi *m) {
    bool is_taken = m->nqueued > 0;
    while (is_taken) {
        message *msg = TAILQ_FIRST(&m->all);
        while (msg && msg->state != MESSAGE_QUEUED)
            msg = TAILQ_NEXT(msg, all);
        is_taken = msg && accept(m, msg);
    }
}

static void deal_with_arrival(mpi *m, message *msg) {
    arrival *a = msg->arrival;
    tb_op *op = msg->op;
    op->nbytes = a->nbytes;
    if (a->nbytes > msg->nbytes) {
        if (a->is_offer)
            answer(m, msg->rank, LETTER_DECLINE, a->id, 0, 0);
        tb__set_detail("%zu bytes came with tag %" PRIu64 ", more than there is room for", a->nbytes, op->tag);
        mpi_finish(m, msg, TB_TOO_BIG);
    } else if (!a->is_offer) {
        tb__pieces_scatter(op->pieces, op->npieces, 0, a->data, a->nbytes);
        mpi_finish(m, msg, TB_OK);
    } else {
        msg->nbytes = a->nbytes;
        msg->id = a->id;
        msg->arrival = NULL;
        free(a);
        if (!accept(m, msg)) {
            set_state(m, msg, MESSAGE_QUEUED);
            m->nqueued++;
        }
    }
}

void mpi_go_on(mpi *m, message *msg) {
    TAILQ_REMOVE(&m->ripe, msg, ripe);
    msg->is_ripe = false;
    if (msg->error != MPI_SUCCESS) {
        mpi_failed("MPI", msg->error);
        mpi_lose(m, msg->rank, tb_error_detail());
    } else if (msg->state == MESSAGE_MATCHED)
        deal_with_arrival(m, msg);
    else if (msg->state == MESSAGE_LETTER)
        mpi_finish(m, msg, TB_OK);
    else
        move_chunks(m, msg);
}

/* ---- What comes ------------------------------------------------------------------------------------------------ */

static message *find_offered(const mpi *m, int rank, uint64_t id) {
    uint32_t at = (uint32_t)id;
    message *msg = at < m->offered.count ? m->offered.item[at] : NULL;
    return msg && msg->id == id && msg->rank == rank ? msg : NULL;
}

static tb_status on_message(mpi *m, const place *p, const header *h) {
    bool is_offer = h->kind == LETTER_OFFER;
    size_t behind = p->nbytes - sizeof *h;
    if (is_offer ? behind != 0 || h->nbytes <= INLINE_MAX : behind != h->nbytes)
        return tb__fail(TB_INVALID, "it sent what makes no sense");
    arrival *a = tb__malloc(1, sizeof *a + behind);
    if (!a)
        return TB_NO_MEMORY;
    *a = (arrival){.waiter = {.peer = p->rank, .tag = h->tag}, .is_offer = is_offer, .id = h->id, .nbytes = h->nbytes};
    memcpy(a->data, p->bytes + sizeof *h, behind);
    message *msg = (message *)tb__match_take(&m->receives, p->rank, h->tag);
    if (msg)
        match(m, msg, a);
    else
        tb__match_add(&m->arrivals, &a->waiter);
    return TB_OK;
}

static tb_status on_accept(mpi *m, int rank, const header *h) {
    message *msg = find_offered(m, rank, h->id);
    if (!msg) /* it was withdrawn, which is on its way */
        return TB_OK;
    if (msg->state != MESSAGE_OFFERED || h->tag < 1 || h->tag > MAX_STREAMS)
        return tb__fail(TB_INVALID, "it accepted what was not offered");
    set_state(m, msg, MESSAGE_SENDS);
    msg->tag = (int)h->tag;
    begin_chunks(m, msg);
    return TB_OK;
}

static void forget_offer(mpi *m, int rank, const header *h) {
    size_t b = tb__match_bucket(rank, h->tag);
    for (tb__waiter *w = m->arrivals.bucket[b].first; w; w = w->next) {
        arrival *a = (arrival *)w;
        if (w->peer == rank && w->tag == h->tag && a->is_offer && a->id == h->id) {
            tb__match_remove(&m->arrivals, w);
            free(a);
            return;
        }
    }
}

/* The sender's chunks end early: the receives beyond that are for nothing, and MPI takes those back. From the last: an
 * earlier one might get what a later one waits for. */
static tb_status shorten(mpi *m, message *msg, size_t end) {
    msg->end = end;
    for (;;) {
        chunk *last = NULL;
        for (size_t i = 0; i < WINDOW; i++) {
            chunk *c = &msg->chunks[i];
            if (c->request != NO_REQUEST && c->offset >= end && (!last || c->offset > last->offset))
                last = c;
        }
        if (!last)
            break;
        bool is_taken_back;
        TB_TRY(mpi_end_request(m, last->request, true, tb__now_ms() + CANCEL_MS, &is_taken_back));
        last->request = NO_REQUEST;
    }
    mpi_ripen(m, msg);
    return TB_OK;
}

static tb_status on_withdraw(mpi *m, int rank, const header *h) {
    for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        bool has_it = (msg->state == MESSAGE_RECEIVES || msg->state == MESSAGE_QUEUED) && msg->id == h->id;
        bool is_about_to = msg->state == MESSAGE_MATCHED && msg->arrival->is_offer && msg->arrival->id == h->id;
        if (msg->rank != rank || !(has_it || is_about_to))
            continue;
        if (msg->state == MESSAGE_RECEIVES)
            return shorten(m, msg, h->nbytes);
        m->nqueued -= msg->state == MESSAGE_QUEUED;
        free(msg->arrival);
        msg->arrival = NULL;
        msg->nbytes = tb__pieces_size(msg->op->pieces, msg->op->npieces);
        if (msg->is_ripe)
            TAILQ_REMOVE(&m->ripe, msg, ripe);
        msg->is_ripe = false;
        await(m, msg);
        return TB_OK;
    }
    forget_offer(m, rank, h);
    return TB_OK;
}

static tb_status deal_with_letter(mpi *m, const place *p, const header *h) {
    message *msg;
    switch (h->kind) {
    case LETTER_SMALL:
    case LETTER_OFFER:
        return on_message(m, p, h);
    case LETTER_ACCEPT:
        return on_accept(m, p->rank, h);
    case LETTER_DECLINE:
        msg = find_offered(m, p->rank, h->id);
        if (msg && msg->state == MESSAGE_OFFERED)
            mpi_finish(m, msg, TB_OK);
        return TB_OK;
    case LETTER_WITHDRAW:
        return on_withdraw(m, p->rank, h);
    case LETTER_BYE:
        m->nbyes++;
        return tb__fail(TB_LOST, "it has left");
    default:
        return tb__fail(TB_INVALID, "it sent what makes no sense");
    }
}

void mpi_open_letter(mpi *m, const place *p) {
    header h = {.kind = LETTER_KINDS};
    if (p->rank < 0 || p->rank >= m->nranks)
        return;
    if (p->nbytes >= sizeof h)
        memcpy(&h, p->bytes, sizeof h);
    if (h.kind != LETTER_BYE && (m->is_over || m->peers[p->rank].is_lost))
        return;
    tb_status status = deal_with_letter(m, p, &h);
    if (status != TB_OK)
        mpi_lose(m, p->rank, tb_error_detail());
}

/* ---- The end of messages --------------------------------------------------------------------------------------- */

/* Fails if the other side stands still in the middle of a chunk: then it counts as lost, which is all that can be done.
 * From the last chunk: an earlier receive might get what a later one waits for. */
tb_status mpi_release_memory(mpi *m, message *msg, int64_t deadline_ms) {
    bool is_receive = msg->state == MESSAGE_RECEIVES;
    if (!is_receive && msg->state != MESSAGE_SENDS)
        return TB_OK;
    for (;;) {
        chunk *last = NULL;
        for (size_t i = 0; i < WINDOW; i++) {
            chunk *c = &msg->chunks[i];
            if (c->request != NO_REQUEST && c->is_direct && (!last || c->offset > last->offset))
                last = c;
        }
        if (!last)
            return TB_OK;
        bool is_taken_back;
        TB_TRY(mpi_end_request(m, last->request, is_receive, deadline_ms, &is_taken_back));
        last->request = NO_REQUEST;
        if (is_taken_back)
            msg->posted = last->offset;
        else
            last->is_done = true;
    }
}

static void cancel_stream(mpi *m, message *msg) {
    int rank = msg->rank;
    bool is_send = msg->state == MESSAGE_SENDS;
    tb_status status = mpi_release_memory(m, msg, tb__now_ms() + CANCEL_MS);
    if (status != TB_OK) {
        tb__log(TB_LOG_ERROR, "transport mpi: rank %d of the communicator: %s", rank, tb_error_detail());
        mpi_lose(m, rank, tb_error_detail());
        return;
    }
    if (is_send)
        answer(m, rank, LETTER_WITHDRAW, msg->id, msg->op->tag, msg->posted);
    if (m->peers[rank].is_lost) /* which has told everybody */
        return;
    mpi_ripen(m, msg);
    tell(msg, TB_CANCELLED);
}

void mpi_cancel_message(mpi *m, message *msg) {
    switch (msg->state) {
    case MESSAGE_WAITS:
        tb__match_remove(&m->receives, &msg->waiter);
        break;
    case MESSAGE_MATCHED: /* it is for the next one that asks */
        tb__match_add(&m->arrivals, &msg->arrival->waiter);
        msg->arrival = NULL;
        break;
    case MESSAGE_QUEUED:
        answer(m, msg->rank, LETTER_DECLINE, msg->id, 0, 0);
        if (m->peers[msg->rank].is_lost)
            return;
        break;
    case MESSAGE_OFFERED:
        answer(m, msg->rank, LETTER_WITHDRAW, msg->id, msg->op->tag, 0);
        if (m->peers[msg->rank].is_lost)
            return;
        break;
    case MESSAGE_LETTER: /* it is a copy, and on its way */
        tell(msg, TB_CANCELLED);
        return;
    case MESSAGE_RECEIVES:
    case MESSAGE_SENDS:
        cancel_stream(m, msg);
        return;
    }
    mpi_finish(m, msg, TB_CANCELLED);
}

void mpi_give_up(mpi *m, message *msg, tb_status status) {
    if (msg->state == MESSAGE_WAITS)
        tb__match_remove(&m->receives, &msg->waiter);
    if (is_held(msg))
        tell(msg, status);
    else
        mpi_finish(m, msg, status);
}

void mpi_lose(mpi *m, int rank, const char *why) {
    peer *p = &m->peers[rank];
    if (p->is_lost)
        return;
    p->is_lost = true;
    char *reason = tb__strdup(why);
    tb__waiter *w;
    while ((w = tb__match_drain(&m->arrivals, rank)))
        free(w);
    for (bool again = true; again;) { /* from the beginning: callbacks change the list */
        again = false;
        for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
            if (msg->rank != rank || !msg->op)
                continue;
            /* Receives are taken back. A send that nobody takes is never read either. */
            if (msg->state == MESSAGE_RECEIVES && !m->is_over && mpi_release_memory(m, msg, 0) != TB_OK)
                tb__log(TB_LOG_ERROR, "transport mpi: rank %d of the communicator: %s", rank, tb_error_detail());
            mpi_give_up(m, msg, TB_LOST);
            again = true;
            break;
        }
    }
    if (p->is_connected && m->env.lost)
        m->env.lost(m->env.arg, p->wire, reason ? reason : "it is lost");
    free(reason);
}
