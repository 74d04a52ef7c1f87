/* Messages: short ones are frames; long ones are a frame and chunks. */
#include "transport/mpi/mpi.h"

#include "base/process.h"

#include <inttypes.h>
#include <string.h>

/* ---- Messages -------------------------------------------------------------------------------------------------- */

static bool is_waiting(message_state state) {
    return state == MESSAGE_WAITS || state == MESSAGE_QUEUED || state == MESSAGE_RECEIVES ||
           state == MESSAGE_ENDS; /* they wait for the other rank */
}

/* Updates counters, and frees the MPI tag of a send. */
void mpi_set_state(mpi *m, message *msg, message_state state) {
    m->nwaiting += (size_t)is_waiting(state) - (size_t)is_waiting(msg->state);
    m->nqueued += (size_t)(state == MESSAGE_QUEUED) - (size_t)(msg->state == MESSAGE_QUEUED);
    if (msg->state == MESSAGE_SENDS)
        m->streams[msg->tag - 1] = false;
    msg->state = state;
}

message *mpi_new_message(mpi *m, message_state state, tb_op *op, int rank, size_t data_nbytes) {
    message *msg = tb__malloc(1, sizeof *msg + data_nbytes);
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

void mpi_mark_ready(mpi *m, message *msg) {
    if (!msg->is_ready)
        TAILQ_INSERT_TAIL(&m->ready, msg, ready);
    msg->is_ready = true;
}

bool mpi_is_held(const message *msg, bool is_direct) {
    bool is = false;
    for (size_t i = 0; i < WINDOW; i++)
        is |= msg->chunks[i].request != NO_REQUEST && (msg->chunks[i].is_direct || !is_direct);
    return is;
}

/* Removes it from all lists. */
static void unlink_message(mpi *m, message *msg) {
    if (msg->is_ready)
        TAILQ_REMOVE(&m->ready, msg, ready);
    TAILQ_REMOVE(&m->all, msg, all);
    mpi_set_state(m, msg, MESSAGE_FRAME);
    free(msg->short_message);
}

void mpi_free_message(mpi *m, message *msg) {
    unlink_message(m, msg);
    for (size_t i = 0; i < WINDOW; i++)
        free(msg->chunks[i].bounce);
    free(msg);
}

/* Messages that MPI may still access after their endpoint was freed. The list keeps leak checkers quiet. */
static message_list abandoned = TAILQ_HEAD_INITIALIZER(abandoned);

void mpi_abandon_message(mpi *m, message *msg) {
    if (!mpi_is_held(msg, false)) {
        mpi_free_message(m, msg);
        return;
    }
    unlink_message(m, msg);
    TAILQ_INSERT_TAIL(&abandoned, msg, all);
}

static void complete_op(tb_op *op, tb_status status) {
    if (!op)
        return;
    if (status == TB_TIMEOUT)
        snprintf(op->why, sizeof op->why, "a message stands still half-way, and MPI can't take it back");
    op->status = status;
    op->state = NULL;
    op->done(op);
}

void mpi_complete_op(message *msg, tb_status status) {
    tb_op *op = msg->op;
    msg->op = NULL;
    complete_op(op, status);
}

void mpi_finish(mpi *m, message *msg, tb_status status) {
    tb_op *op = msg->op;
    mpi_free_message(m, msg);
    complete_op(op, status);
}

/* ---- Posting --------------------------------------------------------------------------------------------------- */

static tb_status post_short(mpi *m, tb_op *op, int rank, size_t nbytes) {
    TB_TRY(mpi_reserve_request(m));
    message *msg = mpi_new_message(m, MESSAGE_FRAME, op, rank, nbytes);
    if (!msg)
        return TB_NO_MEMORY;
    _Static_assert(offsetof(message, data) == offsetof(message, header) + sizeof(header), "nothing in between");
    msg->header = (header){.kind = FRAME_SHORT, .is_expected = op->is_expected, .tag = op->tag, .nbytes = nbytes};
    tb__pieces_gather(op->pieces, op->npieces, 0, msg->data, nbytes);
    tb_status status = mpi_send_frame(m, msg, nbytes);
    if (status != TB_OK) {
        op->state = NULL;
        mpi_free_message(m, msg);
    }
    return status;
}

static void set_matched(mpi *m, message *msg, tb__unexpected *a) {
    mpi_set_state(m, msg, MESSAGE_MATCHED);
    msg->short_message = a;
    mpi_mark_ready(m, msg);
}

/* Matches the receive with an unexpected message, or lets it wait. */
static void match_receive(mpi *m, message *msg) {
    tb__unexpected *a = (tb__unexpected *)tb__match_take_or_add(&m->unexpected, &m->receives, &msg->waiter);
    if (a)
        set_matched(m, msg, a);
    else
        mpi_set_state(m, msg, MESSAGE_WAITS);
}

tb_status mpi_post_receive(mpi *m, tb_op *op, int rank) {
    message *msg = mpi_new_message(m, MESSAGE_WAITS, op, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    mpi_record_event(m);
    match_receive(m, msg);
    return TB_OK;
}

/* ---- Chunks ---------------------------------------------------------------------------------------------------- */

/* Keeps the window full. A cancelled send stops; a cancelled receive discards what still arrives. */
static tb_status begin_chunks(mpi *m, message *msg) {
    bool is_send = msg->state == MESSAGE_SENDS;
    while (msg->posted < msg->nbytes && msg->posted < msg->end && (msg->op || !is_send)) {
        size_t i = 0;
        while (i < WINDOW && (msg->chunks[i].request != NO_REQUEST || msg->chunks[i].is_done))
            i++;
        if (i == WINDOW)
            return TB_OK;
        TB_TRY(mpi_begin_chunk(m, msg, i));
    }
    return TB_OK;
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
        mpi_send_queued(m);
    } else if (!is_send && (msg->done == msg->nbytes || msg->done >= msg->end)) {
        mpi_finish(m, msg, msg->done == msg->nbytes || !msg->op ? TB_OK : tb__op_withdrawn(msg->op));
    } else if (begin_chunks(m, msg) != TB_OK) {
        mpi_lose_peer(m, msg->rank, tb_error_detail());
    }
}

/* The first free MPI tag, minus 1; MAX_STREAMS: none. */
static size_t find_stream(const mpi *m) {
    size_t at = 0;
    while (at < MAX_STREAMS && m->streams[at])
        at++;
    return at;
}

static tb_status begin_send(mpi *m, message *msg, size_t stream) {
    msg->id = m->nlong++ * MAX_STREAMS + stream;
    TB_TRY(mpi_write_frame(m, msg->rank,
                           (header){.kind = FRAME_LONG, .tag = msg->op->tag, .nbytes = msg->nbytes, .id = msg->id}));
    m->streams[stream] = true;
    msg->tag = (int)stream + 1;
    mpi_set_state(m, msg, MESSAGE_SENDS);
    if (begin_chunks(m, msg) != TB_OK)
        mpi_mark_ready(m, msg); /* progress tries again, where a failure can lose the peer */
    return TB_OK;
}

void mpi_send_queued(mpi *m) {
    size_t stream;
    while (m->nqueued > 0 && (stream = find_stream(m)) < MAX_STREAMS) {
        message *msg = TAILQ_FIRST(&m->all);
        while (msg->state != MESSAGE_QUEUED)
            msg = TAILQ_NEXT(msg, all);
        if (begin_send(m, msg, stream) != TB_OK)
            mpi_lose_peer(m, msg->rank, tb_error_detail());
    }
}

tb_status mpi_post_send(mpi *m, tb_op *op, int rank) {
    size_t nbytes = tb__pieces_size(op->pieces, op->npieces), stream = find_stream(m);
    if (nbytes <= TB_SHORT_MAX)
        return post_short(m, op, rank, nbytes);
    message *msg = mpi_new_message(m, MESSAGE_FRAME, op, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    mpi_set_state(m, msg, MESSAGE_QUEUED);
    tb_status status = stream < MAX_STREAMS ? begin_send(m, msg, stream) : TB_OK;
    if (status != TB_OK) {
        op->state = NULL;
        mpi_free_message(m, msg);
    }
    return status;
}

static void finish_short_receive(mpi *m, message *msg) {
    const tb__unexpected *a = msg->short_message;
    mpi_finish(m, msg, tb__op_fill(msg->op, msg->nbytes, a->data, a->nbytes));
}

void mpi_advance_message(mpi *m, message *msg) {
    int error = msg->error;
    if (error != MPI_SUCCESS && !m->peers[msg->rank].is_lost) {
        msg->error = MPI_SUCCESS; /* it stays in the ready list, unless losing the peer frees it */
        mpi_failed("MPI", error);
        mpi_lose_peer(m, msg->rank, tb_error_detail());
        return;
    }
    TAILQ_REMOVE(&m->ready, msg, ready);
    msg->is_ready = false;
    switch (msg->state) {
    case MESSAGE_MATCHED:
        finish_short_receive(m, msg);
        break;
    case MESSAGE_FRAME:
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
        break; /* they have no requests */
    }
}

/* ---- Frames ---------------------------------------------------------------------------------------------------- */

static tb_status on_short(mpi *m, int rank, const header *h, const unsigned char *data, size_t nbytes) {
    if (nbytes != h->nbytes)
        return tb__fail(TB_INVALID, "truncated message: got %zu of %" PRIu64 " bytes", nbytes, h->nbytes);
    message *msg = (message *)tb__match_take(&m->receives, rank, h->tag);
    if (!msg)
        return h->is_expected || tb__unexpected_add(&m->unexpected, rank, h->tag, data, nbytes) ? TB_OK : TB_NO_MEMORY;
    tb__unexpected *a = tb__unexpected_create(rank, h->tag, nbytes);
    if (!a) {
        tb__match_add(&m->receives, &msg->waiter);
        return TB_NO_MEMORY;
    }
    memcpy(a->data, data, nbytes);
    set_matched(m, msg, a);
    return TB_OK;
}

/* If the receive was cancelled, or is too small, the chunks are received and discarded. */
static tb_status on_long(mpi *m, int rank, const header *h) {
    if (h->nbytes <= TB_SHORT_MAX)
        return tb__fail(TB_INVALID, "it sent %" PRIu64 " bytes as a long message", h->nbytes);
    message *msg = (message *)tb__match_take(&m->receives, rank, h->tag);
    if (!msg && !(msg = mpi_new_message(m, MESSAGE_WAITS, NULL, rank, 0)))
        return TB_NO_MEMORY;
    tb_op *op = msg->op;
    bool has_room = op && h->nbytes <= msg->nbytes;
    tb_status refused = op && !has_room ? tb__op_too_big(op, msg->nbytes, h->nbytes) : TB_OK;
    if (has_room)
        op->nbytes = h->nbytes;
    else
        msg->op = NULL;
    msg->nbytes = h->nbytes;
    msg->id = h->id;
    msg->tag = (int)(h->id % MAX_STREAMS) + 1;
    mpi_set_state(m, msg, MESSAGE_RECEIVES);
    mpi_mark_ready(m, msg); /* progress starts its chunks */
    if (refused != TB_OK)
        complete_op(op, refused);
    return TB_OK;
}

/* The sender stops early: cancels the receives of later chunks. */
static tb_status on_withdraw(mpi *m, int rank, const header *h) {
    message *msg = TAILQ_FIRST(&m->all);
    while (msg && (msg->state != MESSAGE_RECEIVES || msg->rank != rank || msg->id != h->id))
        msg = TAILQ_NEXT(msg, all);
    if (!msg)
        return TB_OK;
    msg->end = h->nbytes;
    TB_TRY(mpi_cancel_chunks(m, msg, msg->end, tb__now_ms() + CANCEL_MS));
    mpi_mark_ready(m, msg);
    return TB_OK;
}

tb_status mpi_on_frame(mpi *m, int rank, const header *h, const unsigned char *data, size_t nbytes) {
    switch (h->kind) {
    case FRAME_SHORT:
        return on_short(m, rank, h, data, nbytes);
    case FRAME_LONG:
        return on_long(m, rank, h);
    case FRAME_WITHDRAW:
        return on_withdraw(m, rank, h);
    case FRAME_BYE:
        m->ngoodbyes++;
        m->has_leavers = true;
        m->peers[rank].has_left = true;
        return TB_OK;
    default:
        return tb__fail(TB_INVALID, "it sent a frame of unknown kind %" PRIu32 "", h->kind);
    }
}
