/* The heartbeat. If a peer's machine or network fails while bytes are in flight, the kernel takes minutes to notice.
 * Between two processes whose loops have threads, the heartbeat notices earlier.
 *
 * Silence is counted in heartbeats that this process has handled, not in time: a process that was stopped first
 * receives what has arrived meanwhile.
 *
 * The driver may be busy for longer than peers wait, in a callback of the program or in a copy. Then a backup driver, a
 * thread, calls UCX and sends heartbeats. The driver reports the results when it is back. */
#include "transport/ucx/ucx.h"

#include "base/log.h"
#include "base/process.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { AWAY_BEATS = 2 }; /* beats without the driver */

int tb__ucx_heartbeat_ms = 1000;
bool tb__ucx_has_backup_driver = true;

static bool is_watched(const ucx_peer *peer) {
    return peer->owner->env.is_driven && peer->is_driven && peer->ep && !ucx_has_failed(peer);
}

static void set_timer(ucx *u, bool is_on) {
    struct timespec beat = {is_on ? tb__ucx_heartbeat_ms / 1000 : 0, is_on ? tb__ucx_heartbeat_ms % 1000 * 1000000 : 0};
    if (u->is_timer_set != is_on && timerfd_settime(u->timer, 0, &(struct itimerspec){beat, beat}, NULL) == 0)
        u->is_timer_set = is_on;
}

static bool is_awaited(const ucx_peer *peer) {
    return peer->ep && !peer->has_hello && !ucx_has_failed(peer);
}

void ucx_await_peer(ucx_peer *peer) {
    if (is_awaited(peer))
        set_timer(peer->owner, true);
}

static void *run_backup_driver(void *arg) {
    ucx *u = arg;
    uint64_t seen = 0;
    int away = 0;
    while (poll(&(struct pollfd){.fd = u->quit, .events = POLLIN}, 1, tb__ucx_heartbeat_ms) == 0) {
        bool is_entered = ucx_enter(u);
        away = u->nprogress_calls == seen ? away + 1 : 0;
        seen = u->nprogress_calls;
        if (away >= AWAY_BEATS) {
            ucx_progress_worker(u);
            ucx_heartbeat(u);
            ucx_wake(u); /* so that the driver arms UCX's descriptor again */
        }
        ucx_leave(u, is_entered);
    }
    return NULL;
}

void ucx_watch_peer(ucx_peer *peer) {
    ucx *u = peer->owner;
    if (!is_watched(peer))
        return;
    set_timer(u, true);
    if (u->has_backup_driver || !tb__ucx_has_backup_driver)
        return;
    u->quit = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    u->has_backup_driver = u->quit >= 0 && tb__start_thread(&u->backup_driver, "tb-ucx", run_backup_driver, u) == TB_OK;
    if (!u->has_backup_driver)
        tb__log(TB_LOG_WARN, "ucx: there is no backup driver: %s", tb_error_detail());
}

void ucx_stop_backup_driver(ucx *u) {
    if (u->has_backup_driver) {
        eventfd_write(u->quit, 1);
        pthread_join(u->backup_driver, NULL);
    }
    tb__fd_close(u->quit);
}

void ucx_record_traffic(ucx_peer *peer, bool is_chunk) {
    peer->has_received = true;
    peer->is_sending_chunks |= is_chunk;
}

/* A peer that sends chunks gets no frame from us until the message is complete, and its PING would queue behind the
 * chunks, too late on a slow link. So it gets a PONG unasked. */
static void check_peer(ucx_peer *peer) {
    if (peer->is_sending_chunks)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PONG});
    peer->silent_beats = peer->has_received ? 0 : peer->silent_beats + 1;
    peer->has_received = peer->is_sending_chunks = false;
    if (peer->silent_beats == UCX_PING_BEATS)
        ucx_send(peer, &(ucx_frame){.kind = UCX_PING});
    if (peer->silent_beats >= UCX_LOSE_BEATS)
        ucx_fail_peer(peer, "nothing has come from it for 13 s");
}

void ucx_heartbeat(ucx *u) {
    uint64_t unused;
    if (!u->is_timer_set || read(u->timer, &unused, sizeof unused) != (ssize_t)sizeof unused)
        return;
    bool is_needed = false;
    for (size_t i = 0; i < u->peers.count; i++) {
        ucx_peer *peer = u->peers.item[i];
        if (is_watched(peer))
            check_peer(peer);
        else if (peer->is_stranger && !ucx_has_failed(peer) && ++peer->stranger_beats >= UCX_LOSE_BEATS)
            ucx_fail_peer(peer, "it has not proved that it has the token of the bus");
        else if (is_awaited(peer) && !peer->is_stranger && ++peer->unanswered_beats >= peer->max_unanswered_beats)
            ucx_retry_hello(peer);
        is_needed |= is_watched(peer) || is_awaited(peer);
    }
    set_timer(u, is_needed);
}
