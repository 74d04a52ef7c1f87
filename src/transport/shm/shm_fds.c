/* Descriptors that the layers above send to a peer. A frame carries up to SHM_MAX_FDS of them; those of one id are kept
 * until they are taken, or the connection ends. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

tb_status shm_send_fds(void *context, int32_t rank, const int *fds, size_t nfds, uint64_t *id) {
    shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    if (!peer || peer->out.fd < 0 || atomic_load(&peer->is_lost))
        return tb__fail(TB_LOST, "rank %" PRId32 " is not connected", rank);
    shm_frame frame = {.kind = SHM_FDS, .serial = ++s->next_fds};
    for (size_t at = 0; at < nfds; at += SHM_MAX_FDS) {
        size_t n = nfds - at < SHM_MAX_FDS ? nfds - at : SHM_MAX_FDS;
        tb_status status = shm_link_send_copies(s, &peer->out, &frame, fds + at, n);
        if (status != TB_OK) {
            frame.slot = 1; /* withdraws those that were sent */
            shm_link_send(s, &peer->out, &frame, NULL, 0);
            return status;
        }
    }
    *id = frame.serial;
    return TB_OK;
}

static size_t find_sent(const shm_peer *peer, uint64_t id) {
    size_t i = 0;
    while (i < peer->fds.count && peer->fds.item[i].id != id)
        i++;
    return i;
}

static void close_sent(shm_sent_fds *sent) {
    for (size_t i = 0; i < sent->fds.count; i++)
        tb__fd_close(sent->fds.item[i]);
    free(sent->fds.item);
}

bool shm_on_fds(shm_peer *peer, const shm_frame *frame, shm_fds *fds) {
    size_t at = find_sent(peer, frame->serial);
    if (frame->slot == 1) {
        if (at < peer->fds.count) {
            close_sent(&peer->fds.item[at]);
            peer->fds.item[at] = peer->fds.item[--peer->fds.count];
        }
        return true;
    }
    if (at == peer->fds.count && !tb__vec_push(&peer->fds, (shm_sent_fds){.id = frame->serial}))
        return false;
    shm_sent_fds *sent = &peer->fds.item[at];
    if (!tb__vec_reserve(&sent->fds, fds->count))
        return false;
    sent->is_short |= fds->is_short;
    for (size_t i = 0; i < fds->count; i++)
        sent->fds.item[sent->fds.count++] = fds->item[i];
    fds->count = 0;
    return true;
}

tb_status shm_take_fds(void *context, int32_t rank, uint64_t id, int *fds, size_t nfds) {
    const shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    size_t at = peer ? find_sent(peer, id) : 0;
    if (nfds == 0)
        return TB_OK;
    if (!peer || at == peer->fds.count)
        return tb__fail(TB_INVALID, "rank %" PRId32 " has sent no descriptors with id %" PRIu64, rank, id);
    shm_sent_fds sent = peer->fds.item[at];
    peer->fds.item[at] = peer->fds.item[--peer->fds.count];
    tb_status status = TB_OK;
    if (sent.is_short)
        status =
            tb__fail(TB_IO, "receiving %zu descriptors of rank %" PRId32 ": %s", nfds, rank, tb__errno_text(EMFILE));
    else if (sent.fds.count != nfds)
        status = tb__fail(TB_INVALID, "rank %" PRId32 " has sent %zu descriptors with id %" PRIu64 ", not %zu", rank,
                          sent.fds.count, id, nfds);
    else
        memcpy(fds, sent.fds.item, nfds * sizeof *fds);
    if (status == TB_OK)
        free(sent.fds.item);
    else
        close_sent(&sent);
    return status;
}

void shm_sent_fds_close(shm_peer *peer) {
    for (size_t i = 0; i < peer->fds.count; i++)
        close_sent(&peer->fds.item[i]);
    free(peer->fds.item);
    peer->fds.item = NULL;
    peer->fds.count = peer->fds.capacity = 0;
}
