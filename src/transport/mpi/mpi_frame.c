/* Frames: sending them, the ring of receives for them, and their order.
 *
 * MPI matches the frames of one rank in order, but by rendezvous a later one may complete first. So frames are
 * numbered, and an early one waits outside the ring: a rank that is stopped occupies only the slots of frames that it
 * has begun to send. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <string.h>

/* ---- Sending --------------------------------------------------------------------------------------------------- */

tb_status mpi_send_frame(mpi *m, message *msg, size_t data_nbytes) {
    MPI_Request request;
    msg->header.serial = m->peers[msg->rank].nwritten;
    int code = MPI_Isend(&msg->header, (int)(sizeof msg->header + data_nbytes), MPI_BYTE, msg->rank, FRAME_TAG,
                         m->comms.out, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Isend", code);
    m->peers[msg->rank].nwritten++;
    msg->chunks[0].request = mpi_keep_request(m, request, (owner){msg, 0});
    mpi_record_event(m);
    return TB_OK;
}

tb_status mpi_write_frame(mpi *m, int rank, header h) {
    TB_TRY(mpi_reserve_request(m));
    message *msg = mpi_new_message(m, MESSAGE_FRAME, NULL, rank, 0);
    if (!msg)
        return TB_NO_MEMORY;
    msg->header = h;
    tb_status status = mpi_send_frame(m, msg, 0);
    if (status != TB_OK)
        mpi_free_message(m, msg);
    return status;
}

void mpi_send_bye(mpi *m, int rank) {
    if (mpi_write_frame(m, rank, (header){.kind = FRAME_BYE}) != TB_OK)
        tb__log(TB_LOG_DEBUG, "transport mpi: %s", tb_error_detail());
}

/* ---- The ring -------------------------------------------------------------------------------------------------- */

tb_status mpi_post_ring_receive(mpi *m, size_t at) {
    ring_slot *p = &m->ring[at];
    MPI_Request request;
    TB_TRY(mpi_reserve_request(m));
    int code = MPI_Irecv(p->bytes, (int)sizeof p->bytes, MPI_BYTE, MPI_ANY_SOURCE, FRAME_TAG, m->comms.in, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Irecv", code);
    p->request = mpi_keep_request(m, request, (owner){NULL, at});
    return TB_OK;
}

void mpi_drop_ring(mpi *m) {
    int64_t deadline_ms = tb__now_ms() + CLOSE_MS;
    bool was_cancelled;
    for (size_t i = 0; m->ring && i < RING; i++) {
        if (m->ring[i].request != NO_REQUEST)
            mpi_cancel_request(m, m->ring[i].request);
    }
    for (size_t i = 0; m->ring && i < RING; i++) {
        if (m->ring[i].request != NO_REQUEST)
            mpi_end_request(m, m->ring[i].request, deadline_ms, &was_cancelled);
        m->ring[i].request = NO_REQUEST;
    }
}

/* ---- Receiving ------------------------------------------------------------------------------------------------- */

/* Handles the next frame of the rank. */
static void handle_frame(mpi *m, int rank, const unsigned char *bytes, size_t nbytes) {
    header h;
    memcpy(&h, bytes, sizeof h);
    m->peers[rank].nhandled++;
    if (h.kind != FRAME_BYE && (m->is_closed || m->peers[rank].is_lost))
        return;
    if (mpi_on_frame(m, rank, &h, bytes + sizeof h, nbytes - sizeof h) != TB_OK)
        mpi_lose_peer(m, rank, tb_error_detail());
}

/* Handles frames that have waited for the previous one. */
static void handle_early_frames(mpi *m, int rank) {
    tb__unexpected *e;
    while ((e = (tb__unexpected *)tb__match_take(&m->early, rank, m->peers[rank].nhandled))) {
        handle_frame(m, rank, e->data, e->nbytes);
        free(e);
    }
}

static tb_status handle_or_queue_frame(mpi *m, const ring_slot *in) {
    header h;
    if (in->rank < 0 || in->rank >= m->nranks)
        return TB_OK;
    if (in->error != MPI_SUCCESS || in->nbytes < sizeof h) {
        tb__set_detail("truncated frame: got %zu of at least %zu bytes", in->nbytes, sizeof h);
        if (in->error != MPI_SUCCESS)
            mpi_failed("MPI", in->error);
        mpi_lose_peer(m, in->rank, tb_error_detail());
        return TB_OK;
    }
    memcpy(&h, in->bytes, sizeof h);
    if (h.serial != m->peers[in->rank].nhandled)
        return tb__unexpected_add(&m->early, in->rank, h.serial, in->bytes, in->nbytes) ? TB_OK : TB_NO_MEMORY;
    handle_frame(m, in->rank, in->bytes, in->nbytes);
    handle_early_frames(m, in->rank);
    return TB_OK;
}

tb_status mpi_handle_frames(mpi *m) {
    for (size_t at = 0; at < RING && m->ndone > 0; at++) {
        ring_slot *p = &m->ring[at];
        if (!p->is_done)
            continue;
        TB_TRY(handle_or_queue_frame(m, p)); /* without memory, the frame stays in its slot */
        p->is_done = false;
        m->ndone--;
        TB_TRY(mpi_post_ring_receive(m, at));
    }
    return TB_OK;
}
