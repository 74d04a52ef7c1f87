/* Frames: writing them, the ring of receives for them, and their order.
 *
 * MPI matches the frames of one rank in the order in which they were sent, but where it sends them by rendezvous a
 * later one may be there first. So they are numbered, and one that has overtaken another waits for it outside the ring:
 * a rank that stands still keeps the places of those that it has begun to send, and no more. */
#include "transport/mpi/mpi.h"

#include "base/log.h"
#include "base/process.h"

#include <string.h>

/* ---- Writing --------------------------------------------------------------------------------------------------- */

tb_status mpi_send_frame(mpi *m, message *msg, size_t nbytes_behind) {
    MPI_Request request;
    msg->header.serial = m->peers[msg->rank].nwritten;
    int code = MPI_Isend(&msg->header, (int)(sizeof msg->header + nbytes_behind), MPI_BYTE, msg->rank, FRAME_TAG,
                         m->seat.out, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Isend", code);
    m->peers[msg->rank].nwritten++;
    msg->chunks[0].request = mpi_keep_request(m, request, (owner){msg, 0});
    mpi_note_event(m);
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

tb_status mpi_fill_place(mpi *m, size_t at) {
    place *p = &m->ring[at];
    MPI_Request request;
    TB_TRY(mpi_reserve_request(m));
    int code = MPI_Irecv(p->bytes, (int)sizeof p->bytes, MPI_BYTE, MPI_ANY_SOURCE, FRAME_TAG, m->seat.in, &request);
    if (code != MPI_SUCCESS)
        return mpi_failed("MPI_Irecv", code);
    p->request = mpi_keep_request(m, request, (owner){NULL, at});
    return TB_OK;
}

void mpi_drop_ring(mpi *m) {
    int64_t deadline_ms = tb__now_ms() + CLOSE_MS;
    bool is_taken_back;
    for (size_t i = 0; m->ring && i < RING; i++) {
        if (m->ring[i].request != NO_REQUEST)
            mpi_recall_request(m, m->ring[i].request);
    }
    for (size_t i = 0; m->ring && i < RING; i++) {
        if (m->ring[i].request != NO_REQUEST)
            mpi_end_request(m, m->ring[i].request, deadline_ms, &is_taken_back);
        m->ring[i].request = NO_REQUEST;
    }
}

/* ---- Opening --------------------------------------------------------------------------------------------------- */

/* The next one of its rank. */
static void open_frame(mpi *m, int rank, const unsigned char *bytes, size_t nbytes) {
    header h;
    memcpy(&h, bytes, sizeof h);
    m->peers[rank].nopened++;
    if (h.kind != FRAME_BYE && (m->is_over || m->peers[rank].is_lost))
        return;
    if (mpi_on_frame(m, rank, &h, bytes + sizeof h, nbytes - sizeof h) != TB_OK)
        mpi_lose(m, rank, tb_error_detail());
}

/* Those that have waited for the last one. */
static void open_early(mpi *m, int rank) {
    tb__arrival *e;
    while ((e = (tb__arrival *)tb__match_take(&m->early, rank, m->peers[rank].nopened))) {
        open_frame(m, rank, e->data, e->nbytes);
        free(e);
    }
}

static tb_status take_frame(mpi *m, const place *in) {
    header h;
    if (in->rank < 0 || in->rank >= m->nranks)
        return TB_OK;
    if (in->error != MPI_SUCCESS || in->nbytes < sizeof h) {
        tb__set_detail("it sent what makes no sense");
        if (in->error != MPI_SUCCESS)
            mpi_failed("MPI", in->error);
        mpi_lose(m, in->rank, tb_error_detail());
        return TB_OK;
    }
    memcpy(&h, in->bytes, sizeof h);
    if (h.serial != m->peers[in->rank].nopened)
        return tb__arrival_keep(&m->early, in->rank, h.serial, in->bytes, in->nbytes) ? TB_OK : TB_NO_MEMORY;
    open_frame(m, in->rank, in->bytes, in->nbytes);
    open_early(m, in->rank);
    return TB_OK;
}

tb_status mpi_open_frames(mpi *m) {
    for (size_t at = 0; at < RING && m->ndone > 0; at++) {
        place *p = &m->ring[at];
        if (!p->is_done)
            continue;
        TB_TRY(take_frame(m, p)); /* one that there was no memory for stays where it is */
        p->is_done = false;
        m->ndone--;
        TB_TRY(mpi_fill_place(m, at));
    }
    return TB_OK;
}
