/* Messages that end early: they are cancelled, or their peer is lost, or the endpoint closes. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <string.h>

static void log_held(const message *msg) {
    tb__log(TB_LOG_ERROR,
            "transport mpi: rank %d of the communicator: a message stands still half-way, and MPI can't take it back",
            msg->rank);
}

/* ---- Requests -------------------------------------------------------------------------------------------------- */

static tb_status end_chunk(mpi *m, message *msg, chunk *c, int64_t deadline_ms) {
    bool was_cancelled;
    TB_TRY(mpi_end_request(m, c->request, deadline_ms, &was_cancelled));
    c->request = NO_REQUEST;
    c->is_done = !was_cancelled;
    if (was_cancelled && c->offset < msg->posted)
        msg->posted = c->offset;
    return TB_OK;
}

/* All are cancelled before any is waited for, and the last first: otherwise an earlier one might receive a later one's
 * chunk. */
tb_status mpi_cancel_chunks(mpi *m, message *msg, size_t from, int64_t deadline_ms) {
    tb_status status = TB_OK;
    chunk *last;
    do {
        last = NULL;
        for (size_t i = 0; i < WINDOW; i++) {
            chunk *c = &msg->chunks[i];
            bool is_there = c->request != NO_REQUEST && c->offset >= from && !c->cancel_requested;
            if (is_there && (!last || c->offset > last->offset))
                last = c;
        }
        if (last) {
            mpi_cancel_request(m, last->request);
            last->cancel_requested = true;
        }
    } while (last);
    for (size_t i = 0; i < WINDOW; i++) {
        chunk *c = &msg->chunks[i];
        tb_status own = TB_OK;
        if (c->request != NO_REQUEST && c->offset >= from)
            own = end_chunk(m, msg, c, deadline_ms);
        status = own != TB_OK ? own : status;
    }
    return status;
}

/* Of a receive, chunks in buffers are cancelled, too: if one stayed, it would receive the chunk of a cancelled one. */
tb_status mpi_reclaim_memory(mpi *m, message *msg, bool is_all, int64_t deadline_ms) {
    tb_status status = TB_OK;
    if (msg->state == MESSAGE_RECEIVES)
        return mpi_cancel_chunks(m, msg, 0, deadline_ms);
    for (size_t i = 0; i < WINDOW; i++) {
        chunk *c = &msg->chunks[i];
        tb_status own = TB_OK;
        if (c->request != NO_REQUEST && (c->is_direct || is_all))
            own = end_chunk(m, msg, c, deadline_ms);
        status = own != TB_OK ? own : status;
    }
    return status;
}

/* ---- Peers ----------------------------------------------------------------------------------------------------- */

const char *mpi_why(const peer *p) {
    return p->why ? p->why : "there was no memory for the reason";
}

/* Reports a lost peer to the loop once all operations with it are completed. */
static void report_loss(mpi *m, int rank) {
    peer *p = &m->peers[rank];
    if (!p->is_lost || p->is_loss_reported)
        return;
    for (const message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        if (msg->rank == rank && msg->op)
            return;
    }
    p->is_loss_reported = true;
    if (p->is_connected && m->env.lost)
        m->env.lost(m->env.arg, p->transport_rank, mpi_why(p));
}

void mpi_lose_peer(mpi *m, int rank, const char *why) {
    peer *p = &m->peers[rank];
    if (p->is_lost)
        return;
    p->is_lost = true;
    p->why = tb__strdup(why);
    tb__match_free(&m->unexpected, rank);
    for (bool again = true; again;) { /* from the beginning: completing an operation changes the list */
        again = false;
        for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
            bool has_chunks = msg->state == MESSAGE_RECEIVES || msg->state == MESSAGE_SENDS;
            if (msg->rank != rank || msg->state == MESSAGE_ENDS || !(msg->op || has_chunks))
                continue;
            mpi_abort_message(m, msg, TB_LOST);
            again = true;
            break;
        }
    }
    report_loss(m, rank);
    if (!m->is_closed)
        mpi_send_queued(m);
}

void mpi_lose_leavers(mpi *m) {
    for (int i = 0; i < m->nranks && m->has_leavers; i++) {
        if (m->peers[i].has_left && !m->peers[i].is_lost)
            mpi_lose_peer(m, i, "it has left");
    }
    m->has_leavers = false;
}

/* ---- Messages -------------------------------------------------------------------------------------------------- */

void mpi_abort_message(mpi *m, message *msg, tb_status status) {
    bool is_send = msg->state == MESSAGE_SENDS;
    if (msg->state == MESSAGE_WAITS)
        tb__match_remove(&m->receives, &msg->waiter);
    if (msg->op && status == TB_LOST)
        snprintf(msg->op->why, sizeof msg->op->why, "%s", mpi_why(&m->peers[msg->rank]));
    if (is_send || msg->state == MESSAGE_RECEIVES) {
        if (!m->is_closed)
            (void)mpi_reclaim_memory(m, msg, false, 0);
        msg->final_status = status;
        msg->deadline_ms = tb__now_ms() + CANCEL_MS;
        mpi_set_state(m, msg, MESSAGE_ENDS);
    }
    /* A peer that has left has cancelled its receives: sends to it never complete. */
    bool is_waited_for =
        msg->op && mpi_is_held(msg, true) && !m->is_closed && !(is_send && m->peers[msg->rank].has_left);
    if (!mpi_is_held(msg, false))
        mpi_finish(m, msg, status);
    else if (!is_waited_for)
        mpi_complete_op(msg, status);
    else if (m->ending_ms == 0 || msg->deadline_ms < m->ending_ms)
        m->ending_ms = msg->deadline_ms;
}

void mpi_end_message(mpi *m, message *msg) {
    int rank = msg->rank;
    if (!mpi_is_held(msg, false))
        mpi_finish(m, msg, msg->final_status);
    else if (!mpi_is_held(msg, true))
        mpi_complete_op(msg, msg->final_status);
    report_loss(m, rank);
}

void mpi_complete_overdue(mpi *m) {
    int64_t now_ms = tb__now_ms();
    message *late;
    do {
        late = NULL;
        m->ending_ms = 0;
        for (message *msg = TAILQ_FIRST(&m->all); msg && !late; msg = TAILQ_NEXT(msg, all)) {
            if (msg->state != MESSAGE_ENDS || !msg->op)
                continue;
            if (m->is_closed || msg->deadline_ms <= now_ms)
                late = msg;
            else if (m->ending_ms == 0 || msg->deadline_ms < m->ending_ms)
                m->ending_ms = msg->deadline_ms;
        }
        if (late) {
            int rank = late->rank;
            if (!m->is_closed)
                log_held(late);
            mpi_complete_op(late, late->final_status);
            report_loss(m, rank);
        }
    } while (late);
}

static void cancel_ending(mpi *m, message *msg) {
    int rank = msg->rank;
    tb_status status = mpi_reclaim_memory(m, msg, false, msg->deadline_ms);
    if (status != TB_OK)
        log_held(msg);
    if (mpi_is_held(msg, false))
        mpi_complete_op(msg, status == TB_OK ? TB_CANCELLED : TB_TIMEOUT);
    else
        mpi_finish(m, msg, TB_CANCELLED);
    report_loss(m, rank);
}

/* If the other rank is stopped in the middle of a chunk, it counts as lost. */
static void cancel_stream(mpi *m, message *msg) {
    int rank = msg->rank;
    if (mpi_reclaim_memory(m, msg, false, tb__now_ms() + CANCEL_MS) != TB_OK) {
        log_held(msg);
        mpi_complete_op(msg, TB_TIMEOUT);
        mpi_lose_peer(m, rank, "a message stands still half-way");
        return;
    }
    if (msg->state == MESSAGE_SENDS &&
        mpi_write_frame(m, rank, (header){.kind = FRAME_WITHDRAW, .id = msg->id, .nbytes = msg->posted}) != TB_OK)
        mpi_lose_peer(m, rank, tb_error_detail()); /* the receiver would wait forever */
    if (m->peers[rank].is_lost)                    /* which has completed the operation */
        return;
    mpi_mark_ready(m, msg);
    mpi_complete_op(msg, TB_CANCELLED);
}

void mpi_cancel_message(mpi *m, message *msg) {
    switch (msg->state) {
    case MESSAGE_WAITS:
        tb__match_remove(&m->receives, &msg->waiter);
        break;
    case MESSAGE_MATCHED:
    case MESSAGE_QUEUED:
        break;
    case MESSAGE_FRAME: /* a copy is being sent */
        mpi_complete_op(msg, TB_CANCELLED);
        return;
    case MESSAGE_RECEIVES:
    case MESSAGE_SENDS:
        cancel_stream(m, msg);
        return;
    case MESSAGE_ENDS:
        cancel_ending(m, msg);
        return;
    }
    mpi_finish(m, msg, TB_CANCELLED);
}
