/* The end of messages that don't come through: they are cancelled, or their peer is lost, or the endpoint closes. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <string.h>

static void log_held(const message *msg) {
    tb__log(TB_LOG_ERROR,
            "transport mpi: rank %d of the communicator: a message stands still half-way, and MPI can't take it back",
            msg->rank);
}

/* ---- What MPI has ---------------------------------------------------------------------------------------------- */

static tb_status end_chunk(mpi *m, message *msg, chunk *c, int64_t deadline_ms) {
    bool is_taken_back;
    TB_TRY(mpi_end_request(m, c->request, deadline_ms, &is_taken_back));
    c->request = NO_REQUEST;
    c->is_done = !is_taken_back;
    if (is_taken_back && c->offset < msg->posted)
        msg->posted = c->offset;
    return TB_OK;
}

/* MPI is asked for all of them before any is waited for, and from the last: an earlier one might get what a later one
 * waits for. */
tb_status mpi_take_back(mpi *m, message *msg, size_t from, int64_t deadline_ms) {
    tb_status status = TB_OK;
    chunk *last;
    do {
        last = NULL;
        for (size_t i = 0; i < WINDOW; i++) {
            chunk *c = &msg->chunks[i];
            bool is_there = c->request != NO_REQUEST && c->offset >= from && !c->is_recalled;
            if (is_there && (!last || c->offset > last->offset))
                last = c;
        }
        if (last) {
            mpi_recall_request(m, last->request);
            last->is_recalled = true;
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

/* Of a receive no chunk may be left, not even one that is not in the operation's memory: where others are taken back it
 * would get what the next one is for. */
tb_status mpi_release(mpi *m, message *msg, bool is_all, int64_t deadline_ms) {
    tb_status status = TB_OK;
    if (msg->state == MESSAGE_RECEIVES)
        return mpi_take_back(m, msg, 0, deadline_ms);
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

/* The engine hears of a lost peer when all operations with it are over. */
static void tell_lost(mpi *m, int rank) {
    peer *p = &m->peers[rank];
    if (!p->is_lost || p->is_told)
        return;
    for (const message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
        if (msg->rank == rank && msg->op)
            return;
    }
    p->is_told = true;
    if (p->is_connected && m->env.lost)
        m->env.lost(m->env.arg, p->wire, mpi_why(p));
}

void mpi_lose(mpi *m, int rank, const char *why) {
    peer *p = &m->peers[rank];
    if (p->is_lost)
        return;
    p->is_lost = true;
    p->why = tb__strdup(why);
    tb__match_free(&m->arrivals, rank);
    for (bool again = true; again;) { /* from the beginning: callbacks change the list */
        again = false;
        for (message *msg = TAILQ_FIRST(&m->all); msg; msg = TAILQ_NEXT(msg, all)) {
            bool has_chunks = msg->state == MESSAGE_RECEIVES || msg->state == MESSAGE_SENDS;
            if (msg->rank != rank || msg->state == MESSAGE_ENDS || !(msg->op || has_chunks))
                continue;
            mpi_give_up(m, msg, TB_LOST);
            again = true;
            break;
        }
    }
    tell_lost(m, rank);
    if (!m->is_over)
        mpi_send_queued(m);
}

void mpi_lose_leavers(mpi *m) {
    for (int i = 0; i < m->nranks && m->has_leavers; i++) {
        if (m->peers[i].has_left && !m->peers[i].is_lost)
            mpi_lose(m, i, "it has left");
    }
    m->has_leavers = false;
}

/* ---- Messages -------------------------------------------------------------------------------------------------- */

void mpi_give_up(mpi *m, message *msg, tb_status status) {
    bool is_send = msg->state == MESSAGE_SENDS;
    if (msg->state == MESSAGE_WAITS)
        tb__match_remove(&m->receives, &msg->waiter);
    if (msg->op && status == TB_LOST)
        snprintf(msg->op->why, sizeof msg->op->why, "%s", mpi_why(&m->peers[msg->rank]));
    if (is_send || msg->state == MESSAGE_RECEIVES) {
        if (!m->is_over)
            (void)mpi_release(m, msg, false, 0);
        msg->decision = status;
        msg->deadline_ms = tb__now_ms() + CANCEL_MS;
        mpi_set_state(m, msg, MESSAGE_ENDS);
    }
    /* Who has left has taken its receives back: what was sent to them and is still there is never read. */
    bool is_waited_for = msg->op && mpi_is_held(msg, true) && !m->is_over && !(is_send && m->peers[msg->rank].has_left);
    if (!mpi_is_held(msg, false))
        mpi_finish(m, msg, status);
    else if (!is_waited_for)
        mpi_tell(msg, status);
    else if (m->ending_ms == 0 || msg->deadline_ms < m->ending_ms)
        m->ending_ms = msg->deadline_ms;
}

void mpi_end_message(mpi *m, message *msg) {
    int rank = msg->rank;
    if (!mpi_is_held(msg, false))
        mpi_finish(m, msg, msg->decision);
    else if (!mpi_is_held(msg, true))
        mpi_tell(msg, msg->decision);
    tell_lost(m, rank);
}

void mpi_end_late(mpi *m) {
    int64_t now_ms = tb__now_ms();
    message *late;
    do {
        late = NULL;
        m->ending_ms = 0;
        for (message *msg = TAILQ_FIRST(&m->all); msg && !late; msg = TAILQ_NEXT(msg, all)) {
            if (msg->state != MESSAGE_ENDS || !msg->op)
                continue;
            if (m->is_over || msg->deadline_ms <= now_ms)
                late = msg;
            else if (m->ending_ms == 0 || msg->deadline_ms < m->ending_ms)
                m->ending_ms = msg->deadline_ms;
        }
        if (late) {
            int rank = late->rank;
            if (!m->is_over)
                log_held(late);
            mpi_tell(late, late->decision);
            tell_lost(m, rank);
        }
    } while (late);
}

static void cancel_ending(mpi *m, message *msg) {
    int rank = msg->rank;
    tb_status status = mpi_release(m, msg, false, msg->deadline_ms);
    if (status != TB_OK)
        log_held(msg);
    if (mpi_is_held(msg, false))
        mpi_tell(msg, status == TB_OK ? TB_CANCELLED : TB_TIMEOUT);
    else
        mpi_finish(m, msg, TB_CANCELLED);
    tell_lost(m, rank);
}

/* If the other side stands still in the middle of a chunk it counts as lost, which is all that can be done. */
static void cancel_stream(mpi *m, message *msg) {
    int rank = msg->rank;
    if (mpi_release(m, msg, false, tb__now_ms() + CANCEL_MS) != TB_OK) {
        log_held(msg);
        mpi_tell(msg, TB_TIMEOUT);
        mpi_lose(m, rank, "a message stands still half-way");
        return;
    }
    if (msg->state == MESSAGE_SENDS &&
        mpi_write_frame(m, rank, (header){.kind = FRAME_WITHDRAW, .id = msg->id, .nbytes = msg->posted}) != TB_OK)
        mpi_lose(m, rank, tb_error_detail()); /* the receiver would wait for good */
    if (m->peers[rank].is_lost)               /* which has told everybody */
        return;
    mpi_ripen(m, msg);
    mpi_tell(msg, TB_CANCELLED);
}

void mpi_cancel_message(mpi *m, message *msg) {
    switch (msg->state) {
    case MESSAGE_WAITS:
        tb__match_remove(&m->receives, &msg->waiter);
        break;
    case MESSAGE_MATCHED:
    case MESSAGE_QUEUED:
        break;
    case MESSAGE_FRAME: /* it is a copy, and on its way */
        mpi_tell(msg, TB_CANCELLED);
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
