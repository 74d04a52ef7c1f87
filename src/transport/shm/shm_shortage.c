/* Shortage of file descriptors: failed operations are retried, connections are accepted only if descriptors are left
 * for their hello, and peers that are lost because of it get the reason. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

void shm_retry_later(shm *s, const char *what, int error) {
    struct itimerspec when = {.it_value = tb__time_of_ms(TB__RELISTEN_MS)}, now;
    tb__shortage_record(what, error);
    if (timerfd_gettime(s->retry, &now) == 0 && (now.it_value.tv_sec || now.it_value.tv_nsec))
        return;
    if (tb__may_warn(&s->warn_again_ms))
        tb__log(TB_LOG_WARN, "transport shm can't %s: %s; it tries again", what, tb__errno_text(error));
    timerfd_settime(s->retry, 0, &when, NULL);
}

void shm_tell_shortage(shm *s, shm_link *link) {
    shm_link_send(s, link, &(shm_frame){.kind = SHM_SHORTAGE, .nbytes = tb__descriptor_limit()}, NULL, 0);
}

void shm_lose_by_shortage(shm *s, shm_peer *peer) {
    char why[256];
    snprintf(why, sizeof why, "a frame of it can't be received: %s", tb__errno_text(EMFILE));
    shm_tell_shortage(s, peer->in);
    shm_lose(s, peer, why);
}

/* Opens descriptors before a connection is accepted, which are closed before its hello is read: so that there are some
 * for the hello's descriptor and the pidfd. False: there are none. */
static bool reserve_descriptors(shm *s, shm_link *link) {
    for (size_t i = 0; i < SHM_HELLO_FDS; i++)
        link->reserved[i] = -1;
    for (size_t i = 0; i < SHM_HELLO_FDS; i++) {
        link->reserved[i] = tb__fd_own(fcntl(s->wake, F_DUPFD_CLOEXEC, 0));
        if (link->reserved[i] < 0)
            return false;
    }
    return true;
}

void shm_release_reserved(shm_link *link) {
    for (size_t i = 0; i < SHM_HELLO_FDS; i++) {
        tb__fd_close(link->reserved[i]);
        link->reserved[i] = -1;
    }
}

/* Stops watching the listener, which would be readable again at once. */
static void stop_accepting(shm *s, int error) {
    s->is_accept_paused = true;
    tb__listener_enable(s->epoll, s->listener, &s->listen_watch, false);
    shm_retry_later(s, "accept a connection", error);
}

/* Returns whether there may be more to accept. */
static bool accept_one(shm *s) {
    struct ucred who;
    socklen_t length = sizeof who;
    shm_link *link = tb__calloc(1, sizeof *link);
    if (!link) {
        stop_accepting(s, ENOMEM);
        return false;
    }
    link->fd =
        reserve_descriptors(s, link) ? tb__fd_own(accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) : -1;
    int error = link->fd < 0 ? errno : 0;
    bool is_ours = !error && getsockopt(link->fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
    if (is_ours && tb__vec_push(&s->unidentified, link)) {
        shm_link_watch(s, link);
        return true;
    }
    shm_free_link(s, link);
    if (tb__is_shortage(error))
        stop_accepting(s, error);
    return !error || error == EINTR || error == ECONNABORTED;
}

void shm_accept(shm *s) {
    while (accept_one(s))
        ;
}

void shm_retry(shm *s) {
    uint64_t expirations;
    ssize_t unused = read(s->retry, &expirations, sizeof expirations);
    (void)unused;
    if (s->is_accept_paused)
        tb__listener_enable(s->epoll, s->listener, &s->listen_watch, true);
    s->is_accept_paused = false;
    for (size_t i = 0; i < s->peers.count; i++)
        shm_fill_ring(s, s->peers.item[i]);
}
