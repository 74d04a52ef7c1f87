/* Messages: small ones are letters, larger ones are offered, and follow in chunks. */
#include "transport/mpi/mpi.h"

#include "base/process.h"

#include <inttypes.h>
#include <string.h>

/* ---- Messages -------------------------------------------------------------------------------------------------- */

static bool is_waiting(message_state state) {
    return state == MESSAGE_WAITS || state == MESSAGE_QUEUED || state == MESSAGE_OFFERED || state == MESSAGE_RECEIVES ||
           state == MESSAGE_ENDS; /* what is to come of it may take its time */
}

/* Leaving a state gives back what it had. */
void mpi_set_state(mpi *m, message *msg, message_state state) {
    bool was_offered = msg->state == MESSAGE_OFFERED || msg->state == MESSAGE_SENDS;
    m->nwaiting += (size_t)is_waiting(state) - (size_t)is_waiting(msg->state);
    m->nqueued += (size_t)(state == MESSAGE_QUEUED) - (size_t)(msg->state == MESSAGE_QUEUED);
    if (msg->state == MESSAGE_RECEIVES)
        m->streams[msg->tag - 1] = false;
    if (was_offered && state != MESSAGE_SENDS)
        m->offered.item[(uint32_t)msg->id] = NULL;
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

bool mpi_is_held(const message *msg, bool is_direct) {
    bool is = false;
    for (size_t i = 0; i < WINDOW; i++)
        is |= msg->chunks[i].request != NO_REQUEST && (msg->chunks[i].is_direct || !is_direct);
    return is;
}

/* Takes it out of all that leads to it. */
static void unlink_message(mpi *m, message *msg) {
    if (msg->is_ripe)
        TAILQ_REMOVE(&m->ripe, msg, ripe);
    TAILQ_REMOVE(&m->all, msg, all);
    mpi_set_state(m, msg, MESSAGE_LETTER);
    free(msg->arrival);
}

void mpi_free_message(mpi *m, message *msg) {
    unlink_message(m, msg);
    for (size_t i = 0; i < WINDOW; i++)
        free(msg->chunks[i].bounce);
    free(msg);
}

/* What MPI may still read or write when its endpoint is gone. It is kept, and nothing leads to it but this. */
static message_list left_behind = TAILQ_HEAD_INITIALIZER(left_behind);

void mpi_leave_message(mpi *m, message *msg) {
    if (!mpi_is_held(msg, false)) {
        mpi_free_message(m, msg);
        return;
    }
    unlink_message(m, msg);
    TAILQ_INSERT_TAIL(&left_behind, msg, all);
}

static void complete(tb_op *op, tb_status status) {
    if (!op)
        return;
    op->status = status;
    op->state = NULL;
    op->done(op);
}

void mpi_tell(message *msg, tb_status status) {
    tb_op *op = msg->op;
    msg->op = NULL;
    complete(op, status);
}

void mpi_finish(mpi *m, message *msg, tb_status status) {
    tb_op *op = msg->op;
    mpi_free_message(m, msg);
    complete(op, status);
}

/* ---- Posting --------------------------------------------------------------------------------------------------- */

static tb_status post_small(mpi *m, tb_op *op, int rank, size_t nbytes) {
    TB_TRY(mpi_reserve_request(m));
    message *msg = mpi_new_message(m, MESSAGE_LETTER, op, rank, nbytes);
    if (!msg)
        return TB_NO_MEMORY;
    _Static_assert(offsetof(message, data) == offsetof(message, header) + sizeof(header), "nothing in between");
    msg->header = (header){.kind = LETTER_SMALL, .is_expected = op->is_expected, .tag = op->tag, .nbytes = nbytes};
    tb__pieces_gather(op->pieces, op->npieces, 0, msg->data, nbytes);
    tb_status status = mpi_send_letter(m, msg, nbytes);
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
        mpi_set_state(m, msg, MESSAGE_OFFERED);
        header h = {
            .kind = LETTER_OFFER, .is_expected = op->is_expected, .tag = op->tag, .nbytes = nbytes, .id = msg->id};
        status = mpi_write_letter(m, rank, h);
    }
    if (status != TB_OK) {
        op->state = NULL;
        mpi_free_message(m, msg);
    }
    return status;
}

static void match(mpi *m, message *msg, tb__arrival *a) {
    mpi_set_state(m, msg, MESSAGE_MATCHED);
    msg->arrival = a;
    mpi_ripen(m, msg);
}

/* What has come already, or what is to come. */
static void await(mpi *m, message *msg) {
    tb__arrival *a = (tb__arrival *)tb__match_meet(&m->arrivals, &m->receives, &msg->waiter);
    if (a)
        match(m, msg, a);
    else
        mpi_set_state(m, msg, MESSAGE_WAITS);
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
    msg->nbytes = tb__pieces_size(msg->op->pieces, msg->op->npieces);
    msg->posted = msg->done = 0;
    msg->end = SIZE_MAX;
    await(m, msg);
}

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
        mpi_take_queued(m);
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
    mpi_set_state(m, msg, MESSAGE_RECEIVES);
    int rank = msg->rank;
    uint64_t id = msg->id;
    /* The receives are there before the sender hears of it: nothing comes unexpected. */
    begin_chunks(m, msg);
    if (!m->peers[rank].is_lost)
        mpi_answer(m, rank, LETTER_ACCEPT, id, (uint64_t)at + 1, 0);
    return true;
}

void mpi_take_queued(mpi *m) {
    bool is_taken = m->nqueued > 0;
    while (is_taken) {
        message *msg = TAILQ_FIRST(&m->all);
        while (msg && msg->state != MESSAGE_QUEUED)
            msg = TAILQ_NEXT(msg, all);
        is_taken = msg && accept(m, msg);
    }
}

static void deal_with_arrival(mpi *m, message *msg) {
    tb__arrival *a = msg->arrival;
    tb_op *op = msg->op;
    op->nbytes = a->nbytes;
    if (a->nbytes > msg->nbytes) {
        int rank = msg->rank;
        uint64_t id = a->id;
        bool is_offer = a->is_offer;
        tb__set_detail("%zu bytes came with tag %" PRIu64 ", more than there is room for", a->nbytes, op->tag);
        mpi_finish(m, msg, TB_TOO_BIG); /* first: if the peer is lost in answering, all of its messages are given up */
        if (is_offer && !m->peers[rank].is_lost)
            mpi_answer(m, rank, LETTER_DECLINE, id, 0, 0);
    } else if (!a->is_offer) {
        tb__pieces_scatter(op->pieces, op->npieces, 0, a->data, a->nbytes);
        mpi_finish(m, msg, TB_OK);
    } else {
        msg->nbytes = a->nbytes;
        msg->id = a->id;
        msg->arrival = NULL;
        free(a);
        if (!accept(m, msg))
            mpi_set_state(m, msg, MESSAGE_QUEUED);
    }
}

void mpi_go_on(mpi *m, message *msg) {
    int error = msg->error;
    if (error != MPI_SUCCESS && !m->peers[msg->rank].is_lost) {
        msg->error = MPI_SUCCESS; /* it stays ripe, and is gone on with, unless that has ended it */
        mpi_failed("MPI", error);
        mpi_lose(m, msg->rank, tb_error_detail());
        return;
    }
    TAILQ_REMOVE(&m->ripe, msg, ripe);
    msg->is_ripe = false;
    switch (msg->state) {
    case MESSAGE_MATCHED:
        deal_with_arrival(m, msg);
        break;
    case MESSAGE_LETTER:
        mpi_finish(m, msg, TB_OK);
        break;
    case MESSAGE_RECEIVES:
    case MESSAGE_SENDS:
        move_chunks(m, msg);
        break;
    case MESSAGE_ENDS:
        mpi_end_message(m, msg);
        break;
    case MESSAGE_WAITS:
    case MESSAGE_QUEUED:
    case MESSAGE_OFFERED:
        break; /* nothing of these completes */
    }
}

/* ---- What comes ------------------------------------------------------------------------------------------------ */

static message *find_offered(const mpi *m, int rank, uint64_t id) {
    uint32_t at = (uint32_t)id;
    message *msg = at < m->offered.count ? m->offered.item[at] : NULL;
    return msg && msg->id == id && msg->rank == rank ? msg : NULL;
}

static tb_status on_message(mpi *m, int rank, const header *h, const unsigned char *behind, size_t nbytes) {
    bool is_offer = h->kind == LETTER_OFFER;
    if (is_offer ? nbytes != 0 || h->nbytes <= INLINE_MAX : nbytes != h->nbytes)
        return tb__fail(TB_INVALID, "it sent what makes no sense");
    message *msg = (message *)tb__match_take(&m->receives, rank, h->tag);
    if (!msg && h->is_expected) {
        if (is_offer)
            mpi_answer(m, rank, LETTER_DECLINE, h->id, 0, 0);
        return TB_OK;
    }
    tb__arrival *a = tb__arrival_create(rank, h->tag, nbytes);
    if (!a)
        return TB_NO_MEMORY;
    memcpy(a->data, behind, nbytes);
    a->is_offer = is_offer;
    a->id = h->id;
    a->nbytes = h->nbytes;
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
    mpi_set_state(m, msg, MESSAGE_SENDS);
    msg->tag = (int)h->tag;
    begin_chunks(m, msg);
    return TB_OK;
}

/* The sender's chunks end early: the receives beyond that are for nothing. */
static tb_status shorten(mpi *m, message *msg, size_t end) {
    msg->end = end;
    TB_TRY(mpi_take_back(m, msg, end, tb__now_ms() + CANCEL_MS));
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
        free(msg->arrival);
        msg->arrival = NULL;
        msg->nbytes = tb__pieces_size(msg->op->pieces, msg->op->npieces);
        if (msg->is_ripe)
            TAILQ_REMOVE(&m->ripe, msg, ripe);
        msg->is_ripe = false;
        await(m, msg);
        return TB_OK;
    }
    tb__offer_drop(&m->arrivals, rank, h->tag, h->id);
    return TB_OK;
}

tb_status mpi_on_letter(mpi *m, int rank, const header *h, const unsigned char *behind, size_t nbytes) {
    message *msg;
    switch (h->kind) {
    case LETTER_SMALL:
    case LETTER_OFFER:
        return on_message(m, rank, h, behind, nbytes);
    case LETTER_ACCEPT:
        return on_accept(m, rank, h);
    case LETTER_DECLINE:
        msg = find_offered(m, rank, h->id);
        if (msg && msg->state == MESSAGE_OFFERED)
            mpi_finish(m, msg, TB_OK);
        return TB_OK;
    case LETTER_WITHDRAW:
        return on_withdraw(m, rank, h);
    case LETTER_BYE:
        m->nbyes++;
        m->has_leavers = true;
        m->peers[rank].has_left = true;
        return TB_OK;
    default:
        return tb__fail(TB_INVALID, "it sent what makes no sense");
    }
}
