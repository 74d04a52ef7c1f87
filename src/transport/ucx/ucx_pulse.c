/* The heartbeat: a peer whose machine or network is gone says nothing about it, and the kernel takes minutes to find
 * out while bytes are on their way. Two processes that both work all the time need not wait for that.
 *
 * Silence is counted in beats that this process has lived through, not in time: one that was stopped for a while hears
 * what has come meanwhile before it counts on.
 *
 * The driver may be away for longer than peers wait, in a function of the host's or in a copy. Then a thread stands in
 * for it: it lets UCX work, and keeps the beat. What has come of it is told when the driver is back. */
#include "transport/ucx/ucx.h"

#include "base/log.h"
#include "base/process.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { AWAY = 2 }; /* beats without the driver */

int tb__ucx_beat_ms = 1000;
bool tb__ucx_stands_in = true;

static bool is_watched(const ucx_peer *peer) {
    return peer->owner->env.is_driven && peer->is_driven && peer->ep && !ucx_is_over(peer);
}

static void set_timer(ucx *u, bool is_on) {
    struct timespec beat = {is_on ? tb__ucx_beat_ms / 1000 : 0, is_on ? tb__ucx_beat_ms % 1000 * 1000000 : 0};
    if (u->is_beating != is_on && timerfd_settime(u->timer, 0, &(struct itimerspec){beat, beat}, NULL) == 0)
        u->is_beating = is_on;
}

/* It has not answered our hello. */
static bool is_awaited(const ucx_peer *peer) {
    return peer->ep && !peer->is_met && !ucx_is_over(peer);
}

void ucx_await_peer(ucx_peer *peer) {
    if (is_awaited(peer))
        set_timer(peer->owner, true);
}

static void *stand_in(void *arg) {
    ucx *u = arg;
    uint64_t seen = 0;
    int away = 0;
    while (poll(&(struct pollfd){.fd = u->quit, .events = POLLIN}, 1, tb__ucx_beat_ms) == 0) {
        pthread_mutex_lock(&u->lock);
        away = u->nturns == seen ? away + 1 : 0;
        seen = u->nturns;
        if (away >= AWAY) {
            ucx_work(u);
            ucx_beat(u);
            ucx_wake(u); /* the driver arms UCX's descriptor again */
        }
        pthread_mutex_unlock(&u->lock);
    }
    return NULL;
}

void ucx_watch_peer(ucx_peer *peer) {
    ucx *u = peer->owner;
    if (!is_watched(peer))
        return;
    set_timer(u, true);
    if (u->has_stand_in || !tb__ucx_stands_in)
        return;
    u->quit = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    u->has_stand_in = u->quit >= 0 && tb__start_thread(&u->stand_in, "tb-ucx", stand_in, u) == TB_OK;
    if (!u->has_stand_in)
        tb__log(TB_LOG_WARN, "ucx: nobody stands in for the driver: %s", tb_error_detail());
}

void ucx_end_stand_in(ucx *u) {
    if (u->has_stand_in) {
        eventfd_write(u->quit, 1);
        pthread_join(u->stand_in, NULL);
    }
    tb__fd_close(u->quit);
}

void ucx_hear(ucx_peer *peer, bool is_chunk) {
    peer->is_heard = true;
    peer->is_sending |= is_chunk;
}

/* A peer that sends chunks hears nothing from us before the message is in, and what it asks comes after the chunks,
 * over a slow line too late. So it is told without having asked. */
static void look_at(ucx_peer *peer) {
    if (peer->is_sending)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG});
    peer->silence = peer->is_heard ? 0 : peer->silence + 1;
    peer->is_heard = peer->is_sending = false;
    if (peer->silence == UCX_ASK)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PING});
    if (peer->silence >= UCX_LOSE)
        ucx_fail(peer, "nothing has come from it for 13 s");
}

void ucx_beat(ucx *u) {
    uint64_t unused;
    if (!u->is_beating || read(u->timer, &unused, sizeof unused) != (ssize_t)sizeof unused)
        return;
    bool is_needed = false;
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_peer *peer = u->peers.item[i];
        if (is_watched(peer))
            look_at(peer);
        else if (is_awaited(peer) && ++peer->unheard >= peer->patience)
            ucx_say_hello_again(peer);
        is_needed |= is_watched(peer) || is_awaited(peer);
    }
    set_timer(u, is_needed);
}
