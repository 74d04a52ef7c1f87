/* The heartbeat: a peer whose machine or network is gone says nothing about it, and the kernel takes minutes to find
 * out while bytes are on their way. Two processes that both work all the time need not wait for that.
 *
 * Silence is counted in beats that this process has lived through, not in time: one that was stopped for a while hears
 * what has come meanwhile before it counts on. */
#include "transport/ucx/ucx.h"

#include <sys/timerfd.h>
#include <unistd.h>

int tb__ucx_beat_ms = 1000;

static bool is_watched(const ucx_peer *peer) {
    return peer->owner->env.is_driven && peer->is_driven && peer->ep && !peer->is_lost && !peer->why;
}

static void set_timer(ucx *u, bool is_on) {
    struct timespec beat = {is_on ? tb__ucx_beat_ms / 1000 : 0, is_on ? tb__ucx_beat_ms % 1000 * 1000000 : 0};
    if (u->is_beating != is_on && timerfd_settime(u->timer, 0, &(struct itimerspec){beat, beat}, NULL) == 0)
        u->is_beating = is_on;
}

void ucx_watch_peer(ucx_peer *peer) {
    if (is_watched(peer))
        set_timer(peer->owner, true);
}

void ucx_hear(ucx_peer *peer, bool is_chunk) {
    peer->is_heard = true;
    peer->is_sending |= is_chunk;
}

/* A peer that sends chunks hears nothing from us before the message is in, and what it asks comes after the chunks,
 * over a slow line too late. So it is told without having asked. */
static void look_at(ucx_peer *peer) {
    if (peer->is_sending)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG}, NULL, 0);
    peer->silence = peer->is_heard ? 0 : peer->silence + 1;
    peer->is_heard = peer->is_sending = false;
    if (peer->silence == UCX_ASK)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PING}, NULL, 0);
    if (peer->silence >= UCX_LOSE)
        ucx_fail(peer, "nothing has come from it for 13 s");
}

void ucx_beat(ucx *u) {
    uint64_t unused;
    if (!u->is_beating || read(u->timer, &unused, sizeof unused) != (ssize_t)sizeof unused)
        return;
    bool is_needed = false;
    for (ucx_peer *peer = u->peers; peer; peer = peer->next) {
        if (is_watched(peer)) {
            is_needed = true;
            look_at(peer);
        }
    }
    set_timer(u, is_needed);
}
