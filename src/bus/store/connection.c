/* A server's sockets: accepting, sending, and the loop over them. */
#include "bus/store/connection.h"

#include "base/descriptors.h"
#include "base/log.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

enum { NEVENTS = 64, LARGE = 1 << 20 };

static bool control_epoll(const tb__endpoint *e, int op, int fd, uint32_t events, void *what) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    return epoll_ctl(e->epoll.fd, op, fd, &event) == 0;
}

/* Takes the descriptor of a call, or fails with its error. */
static tb_status own_fd(const tb__endpoint *e, int fd, const char *what, tb__owned_fd *out) {
    if (fd < 0)
        return tb__fail(TB_IO, "%s: %s: %s", e->listener.address.url, what, tb__errno_text(errno));
    tb__owned_fd_init(out, fd);
    return TB_OK;
}

tb_status tb__endpoint_open(tb__endpoint *e, const tb__address *address, bool is_local) {
    e->listener.socket.fd = e->listener.lock.fd = e->epoll.fd = e->wake.fd = e->spare.fd = -1;
    e->is_open = true;
    TB_TRY(tb__listener_open(address, is_local, &e->listener));
    TB_TRY(own_fd(e, epoll_create1(EPOLL_CLOEXEC), "epoll", &e->epoll));
    TB_TRY(own_fd(e, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd", &e->wake));
    TB_TRY(own_fd(e, eventfd(0, EFD_CLOEXEC), "eventfd", &e->spare));
    return control_epoll(e, EPOLL_CTL_ADD, e->wake.fd, EPOLLIN, &e->wake) &&
                   control_epoll(e, EPOLL_CTL_ADD, e->listener.socket.fd, EPOLLIN, &e->listener)
               ? TB_OK
               : tb__fail(TB_IO, "%s: epoll: %s", address->url, tb__errno_text(errno));
}

void tb__endpoint_close(tb__endpoint *e) {
    if (!e->is_open)
        return;
    tb__listener_close(&e->listener);
    tb__owned_fd_close(&e->wake);
    tb__owned_fd_close(&e->spare);
    tb__owned_fd_close(&e->epoll);
}

void tb__endpoint_stop(tb__endpoint *e) {
    e->is_stopped = true;
    e->is_full = false;
    control_epoll(e, EPOLL_CTL_DEL, e->listener.socket.fd, 0, NULL);
}

void tb__endpoint_wake(tb__endpoint *e) {
    eventfd_write(e->wake.fd, 1);
}

static void listen_again(tb__endpoint *e) {
    int fd = e->spare.fd < 0 ? eventfd(0, EFD_CLOEXEC) : -1;
    if (fd >= 0)
        tb__owned_fd_init(&e->spare, fd);
    e->is_full = false;
    tb__listener_enable(e->epoll.fd, e->listener.socket.fd, &e->listener, true);
}

static int accept_fd(const tb__endpoint *e) {
    return tb__fd_own(accept4(e->listener.socket.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

/* accept fails for lack of descriptors or memory, and the listener would be ready again at once. So it is not watched
 * until a connection ends, or a moment has passed. A client that waits for long is refused, with the reason. */
static void pause_accepting(tb__endpoint *e, int error) {
    int64_t now = tb__now_ms();
    tb_status status = tb__fail(TB_REFUSED, "the %s can't take another connection: %s", e->what, tb__errno_text(error));
    if (tb__may_warn(&e->warn_again_ms))
        tb__log(TB_LOG_WARN, "%s %s: accept: %s", e->what, e->listener.address.url, tb__errno_text(error));
    e->full_since_ms = e->full_since_ms ? e->full_since_ms : now;
    e->full_until_ms = now + TB__RELISTEN_MS;
    e->is_full = true;
    tb__listener_enable(e->epoll.fd, e->listener.socket.fd, &e->listener, false);
    if (!tb__is_out_of_descriptors(error) || now - e->full_since_ms < e->refuse_ms || e->spare.fd < 0)
        return;
    tb__owned_fd_close(&e->spare);
    int fd = accept_fd(e);
    if (fd >= 0)
        e->accepted(e, fd, status);
}

static void accept_clients(tb__endpoint *e) {
    for (int i = 0; i < NEVENTS; i++) {
        int fd = accept_fd(e);
        int error = fd < 0 ? errno : 0;
        if (fd >= 0) {
            e->full_since_ms = 0;
            e->accepted(e, fd, TB_OK);
        } else if (tb__is_shortage(error)) {
            pause_accepting(e, error);
            return;
        } else if (error != EINTR && error != ECONNABORTED) {
            return;
        }
    }
}

bool tb__endpoint_step(tb__endpoint *e, int64_t until_ms) {
    struct epoll_event events[NEVENTS];
    bool is_woken = false;
    until_ms = e->is_full && e->full_until_ms < until_ms ? e->full_until_ms : until_ms;
    int n = epoll_wait(e->epoll.fd, events, NEVENTS, until_ms == INT64_MAX ? -1 : tb__ms_until(until_ms));
    if (e->is_full && tb__now_ms() >= e->full_until_ms)
        listen_again(e);
    for (int i = 0; i < n; i++) {
        void *what = events[i].data.ptr;
        if (what == &e->wake) {
            eventfd_t unused;
            eventfd_read(e->wake.fd, &unused);
            is_woken = true;
        } else if (what == &e->listener) {
            accept_clients(e);
        } else {
            e->ready(what, events[i].events);
        }
    }
    return is_woken;
}

tb_status tb__connection_open(tb__connection *c, tb__endpoint *e, int fd) {
    c->endpoint = e;
    tb__owned_fd_init(&c->socket, fd);
    c->watched = EPOLLIN;
    if (control_epoll(e, EPOLL_CTL_ADD, fd, c->watched, c))
        return TB_OK;
    return tb__fail(TB_IO, "epoll_ctl: %s", tb__errno_text(errno));
}

/* Until a process that is being spawned has called exec, its copy of the descriptor would keep a closed one watched. */
void tb__connection_unwatch(tb__connection *c) {
    control_epoll(c->endpoint, EPOLL_CTL_DEL, c->socket.fd, 0, NULL);
}

void tb__connection_close(tb__connection *c) {
    tb__connection_unwatch(c);
    tb__owned_fd_close(&c->socket);
    tb__frame_reader_fini(&c->in);
    free(c->out.item);
    c->out = (tb__bytes){0};
    if (c->endpoint->is_full)
        listen_again(c->endpoint);
}

size_t tb__connection_unsent(const tb__connection *c) {
    return c->out.count - c->nsent;
}

/* Frees what was sent of a large buffer, while a slow client reads the rest. */
static void forget_sent(tb__connection *c) {
    if (c->nsent < LARGE || c->nsent < c->out.count / 2)
        return;
    c->out.count -= c->nsent;
    memmove(c->out.item, c->out.item + c->nsent, c->out.count);
    c->nsent = 0;
}

bool tb__connection_send(tb__connection *c) {
    while (c->nsent < c->out.count) {
        ssize_t n = send(c->socket.fd, c->out.item + c->nsent, c->out.count - c->nsent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            forget_sent(c);
            return errno == EAGAIN;
        }
        c->nsent += (size_t)n;
    }
    c->nsent = 0;
    free(c->out.item);
    c->out = (tb__bytes){0};
    return true;
}

bool tb__connection_watch(tb__connection *c, bool reads) {
    uint32_t events = (reads ? (uint32_t)EPOLLIN : 0u) | (tb__connection_unsent(c) > 0 ? (uint32_t)EPOLLOUT : 0u);
    bool is_same = events == c->watched;
    c->watched = events;
    return is_same || control_epoll(c->endpoint, EPOLL_CTL_MOD, c->socket.fd, events, c);
}
