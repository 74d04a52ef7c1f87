/* The embedded server's loop. It handles the events of a round first; then flush_sessions sends and closes, so that no
 * handler loses the session it works on. */
#include "bus/store/server.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "bus/store/session.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    NEVENTS = 64,
    MAX_BUFFERS = 512 << 20, /* bytes of all sessions that are half received or not yet sent */
    MAX_DISCARD = 64,        /* reads */
    REFUSE_MS = 1000,        /* out of descriptors: after which waiting clients are refused */
    PROBE_MS = 1000,
};

static bool control_epoll(tb__store_server *server, int op, int fd, uint32_t events, void *what) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    return epoll_ctl(server->epoll.fd, op, fd, &event) == 0;
}

static void listen_again(tb__store_server *server) {
    int fd = server->spare.fd < 0 ? eventfd(0, EFD_CLOEXEC) : -1;
    if (fd >= 0)
        tb__owned_fd_init(&server->spare, fd);
    server->is_full = false;
    tb__listener_enable(server->epoll.fd, server->listener.socket.fd, &server->listener, true);
}

static void close_session(tb__session *session) {
    tb__store_server *server = session->server;
    /* Unread bytes would make TCP's close a reset, which can overtake the last reply. */
    for (int i = 0; i < MAX_DISCARD; i++) {
        if (recv(session->socket.fd, server->scratch, sizeof server->scratch, 0) <= 0)
            break;
    }
    /* Until a process that is being spawned has called exec, its copy of the descriptor would keep a closed one
     * watched. */
    control_epoll(server, EPOLL_CTL_DEL, session->socket.fd, 0, NULL);
    tb__owned_fd_close(&session->socket);
    tb__session_drop_waiters(session);
    if (session->is_dirty)
        TAILQ_REMOVE(&server->dirty, session, dirty);
    if (!session->has_proved)
        TAILQ_REMOVE(&server->pending_hello, session, pending_hello);
    LIST_REMOVE(session, link);
    server->nsessions--;
    server->nbuffers -= session->nbuffers;
    if (session->has_ephemerals)
        tb__store_table_remove_ephemerals(&server->table, &session->owner);
    tb__frame_reader_fini(&session->in);
    free(session->out.item);
    free(session);
    if (server->is_full)
        listen_again(server);
}

static bool is_busy(const tb__session *session) {
    return session->out.count - session->nsent > TB__SESSION_BUSY;
}

/* Serves the complete frames that have arrived, until too many replies wait to be sent. */
static void serve_frames(tb__session *session) {
    for (bool has_frame = true; has_frame && !session->is_closing && !is_busy(session);) {
        tb__store_message request = {0};
        tb__blob frame;
        session->in.max_nbytes = session->has_proved ? TB__STORE_MAX_REQUEST : TB__STORE_MAX_HELLO;
        tb_status status = tb__frame_next(&session->in, &frame, &has_frame);
        if (status == TB_OK && has_frame)
            status = tb__store_decode(frame, &request);
        if (status != TB_OK) {
            tb__session_refuse(session, request.id, request.op, status);
            session->is_closing = true;
        } else if (has_frame) {
            tb__session_serve(session, &request);
        }
    }
    if (tb__frame_is_between(&session->in))
        tb__frame_reader_fini(&session->in); /* most clients are silent most of the time */
}

static void receive_requests(tb__session *session) {
    tb__store_server *server = session->server;
    tb__session_touch(session);
    /* One read a round, for fairness; no more than a hello of a client that has proved nothing. */
    ssize_t n = recv(session->socket.fd, server->scratch,
                     session->has_proved ? sizeof server->scratch : (size_t)TB__STORE_MAX_HELLO, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && tb__frame_add(&session->in, server->scratch, (size_t)n) == TB_OK)
        serve_frames(session);
    else
        session->is_closing = true;
}

/* False if the connection is broken. */
static bool send_replies(tb__session *session) {
    while (session->nsent < session->out.count) {
        ssize_t n = send(session->socket.fd, session->out.item + session->nsent, session->out.count - session->nsent,
                         MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN;
        session->nsent += (size_t)n;
    }
    session->nsent = 0;
    free(session->out.item);
    session->out = (tb__bytes){0};
    return true;
}

/* Frees the part of a large buffer that was sent, while a slow client reads the rest. */
static void forget_sent(tb__session *session) {
    if (session->nsent < TB__SESSION_BUSY || session->nsent < session->out.count / 2)
        return;
    session->out.count -= session->nsent;
    memmove(session->out.item, session->out.item + session->nsent, session->out.count);
    session->nsent = 0;
}

static void flush_session(tb__session *session) {
    tb__store_server *server = session->server;
    bool is_whole = send_replies(session);
    size_t taken = SIZE_MAX;
    while (is_whole && !session->is_closing && !is_busy(session) && session->in.taken != taken) {
        taken = session->in.taken;
        serve_frames(session);
        is_whole = send_replies(session);
    }
    forget_sent(session);
    size_t nbuffers = session->in.bytes.capacity + session->out.capacity;
    server->nbuffers += nbuffers - session->nbuffers;
    session->nbuffers = nbuffers;
    if (!is_whole || session->is_closing || (nbuffers > 0 && server->nbuffers > MAX_BUFFERS)) {
        close_session(session);
        return;
    }
    uint32_t events = (is_busy(session) ? 0u : (uint32_t)EPOLLIN) | (session->out.count > 0 ? (uint32_t)EPOLLOUT : 0u);
    if (events == session->events)
        return;
    session->events = events;
    if (!control_epoll(server, EPOLL_CTL_MOD, session->socket.fd, events, session))
        close_session(session);
}

/* Closing a session may answer waits of others, which become dirty then. */
static void flush_sessions(tb__store_server *server) {
    tb__session *session;
    while ((session = TAILQ_FIRST(&server->dirty))) {
        TAILQ_REMOVE(&server->dirty, session, dirty);
        session->is_dirty = false;
        flush_session(session);
    }
}

static tb_status check_peer(const tb__store_server *server, int fd) {
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (server->nsessions >= server->limits.max_sessions)
        return tb__fail(TB_REFUSED, "the server has %zu connections, and no more are allowed", server->nsessions);
    if (!server->listener.address.is_unix)
        return TB_OK;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid())
        return tb__fail(TB_DENIED, "the server belongs to user %u, and the client to user %u", (unsigned)geteuid(),
                        (unsigned)peer.uid);
    return TB_OK;
}

/* `status`, with tb_error_detail: why the client is refused; TB_OK: it is not. */
static void add_store_session(tb__store_server *server, int fd, tb_status status) {
    tb__session *session = tb__calloc(1, sizeof *session);
    if (!session) {
        tb__fd_close(fd);
        return;
    }
    if (!server->listener.address.is_unix)
        tb__set_tcp_options(fd);
    if (status == TB_OK)
        status = check_peer(server, fd);
    session->server = server;
    session->hello_deadline_ms = tb__now_ms() + server->limits.hello_timeout_ms;
    session->events = EPOLLIN;
    tb__owned_fd_init(&session->socket, fd);
    LIST_INIT(&session->waiters);
    LIST_INSERT_HEAD(&server->sessions, session, link);
    TAILQ_INSERT_TAIL(&server->pending_hello, session, pending_hello);
    server->nsessions++;
    if (status != TB_OK) {
        tb__log(TB_LOG_WARN, "store %s: a connection was refused: %s", server->listener.address.url, tb_error_detail());
        tb__session_refuse(session, 0, TB__STORE_HELLO, status);
        session->is_closing = true;
    } else if (!control_epoll(server, EPOLL_CTL_ADD, fd, session->events, session)) {
        session->is_closing = true;
    }
    tb__session_touch(session);
}

/* accept fails for lack of descriptors or memory, and the listener would be ready again at once. So it is not watched
 * until a session ends, or a moment has passed. A client that waits for long is refused, with the reason. */
static void pause_accepting(tb__store_server *server, int error) {
    int64_t now = tb__now_ms();
    tb_status status = tb__fail(TB_REFUSED, "the store can't take another connection: %s", tb__errno_text(error));
    if (tb__may_warn(&server->warn_again_ms))
        tb__log(TB_LOG_WARN, "store %s: accept: %s", server->listener.address.url, tb__errno_text(error));
    server->full_since_ms = server->full_since_ms ? server->full_since_ms : now;
    server->full_until_ms = now + TB__RELISTEN_MS;
    server->is_full = true;
    tb__listener_enable(server->epoll.fd, server->listener.socket.fd, &server->listener, false);
    if (!tb__is_out_of_descriptors(error) || now - server->full_since_ms < REFUSE_MS || server->spare.fd < 0)
        return;
    tb__owned_fd_close(&server->spare);
    int fd = tb__fd_own(accept4(server->listener.socket.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd >= 0)
        add_store_session(server, fd, status);
}

static void accept_clients(tb__store_server *server) {
    for (int i = 0; i < NEVENTS; i++) {
        int fd = tb__fd_own(accept4(server->listener.socket.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
        int error = fd < 0 ? errno : 0;
        if (fd >= 0) {
            server->full_since_ms = 0;
            add_store_session(server, fd, TB_OK);
        } else if (tb__is_shortage(error)) {
            pause_accepting(server, error);
            return;
        } else if (error != EINTR && error != ECONNABORTED) {
            return;
        }
    }
}

static void refuse_silent(tb__store_server *server) {
    int64_t now = tb__now_ms();
    for (tb__session *session = TAILQ_FIRST(&server->pending_hello); session;
         session = TAILQ_NEXT(session, pending_hello)) {
        if (session->hello_deadline_ms > now)
            break;
        if (session->is_closing)
            continue;
        tb__set_detail("no %s within %d ms", session->has_hello ? "proof" : "hello", server->limits.hello_timeout_ms);
        tb__session_refuse(session, 0, TB__STORE_HELLO, TB_TIMEOUT);
        session->is_closing = true;
    }
}

static int how_long_to_sleep(const tb__store_server *server) {
    if (server->is_full)
        return tb__ms_until(server->full_until_ms);
    const tb__session *oldest = TAILQ_FIRST(&server->pending_hello);
    return oldest ? tb__ms_until(oldest->hello_deadline_ms) : -1;
}

static void *server_thread(void *arg) {
    tb__store_server *server = arg;
    struct epoll_event events[NEVENTS];
    for (;;) {
        int n = epoll_wait(server->epoll.fd, events, NEVENTS, how_long_to_sleep(server));
        if (server->is_full && tb__now_ms() >= server->full_until_ms)
            listen_again(server);
        for (int i = 0; i < n; i++) {
            void *what = events[i].data.ptr;
            tb__session *session = what;
            if (what == &server->wake)
                return NULL;
            if (what == &server->listener) {
                accept_clients(server);
            } else if (events[i].events & EPOLLIN) {
                receive_requests(session);
            } else {
                session->is_closing |= (events[i].events & (EPOLLHUP | EPOLLERR)) != 0;
                tb__session_touch(session);
            }
        }
        refuse_silent(server);
        flush_sessions(server);
    }
}

static tb_status start_server(tb__store_server *server, const tb__address *address) {
    TB_TRY(tb__random_bytes(server->id, sizeof server->id));
    TB_TRY(tb__listener_open(address, server->limits.is_local, &server->listener));
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0)
        return tb__fail(TB_IO, "%s: epoll: %s", address->url, tb__errno_text(errno));
    tb__owned_fd_init(&server->epoll, epoll);
    int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake < 0)
        return tb__fail(TB_IO, "%s: eventfd: %s", address->url, tb__errno_text(errno));
    tb__owned_fd_init(&server->wake, wake);
    int spare = eventfd(0, EFD_CLOEXEC);
    if (spare < 0)
        return tb__fail(TB_IO, "%s: eventfd: %s", address->url, tb__errno_text(errno));
    tb__owned_fd_init(&server->spare, spare);
    if (!control_epoll(server, EPOLL_CTL_ADD, wake, EPOLLIN, &server->wake) ||
        !control_epoll(server, EPOLL_CTL_ADD, server->listener.socket.fd, EPOLLIN, &server->listener))
        return tb__fail(TB_IO, "%s: epoll: %s", address->url, tb__errno_text(errno));
    return tb__start_thread(&server->thread, "tb-store", server_thread, server);
}

/* The thread has ended, or was never started. */
static void free_server(tb__store_server *server) {
    tb__session *next;
    /* No waits are left to be answered. */
    server->table.changed = NULL;
    for (tb__session *session = LIST_FIRST(&server->sessions); session; session = next) {
        next = LIST_NEXT(session, link);
        close_session(session);
    }
    tb__listener_close(&server->listener);
    tb__owned_fd_close(&server->wake);
    tb__owned_fd_close(&server->spare);
    tb__owned_fd_close(&server->epoll);
    tb__store_table_fini(&server->table);
    free(server);
}

tb_status tb__store_server_start_limited(const char *url, const char *token, const tb__store_limits *limits,
                                         tb__store_server **out) {
    tb__store_url parts;
    tb__address address;
    TB_TRY(tb__store_url_split(url, &parts));
    TB_TRY(tb__address_parse(parts.base, &address));
    TB_TRY(tb__token_check(token));
    tb__store_server *server = tb__calloc(1, sizeof *server);
    if (!server)
        return TB_NO_MEMORY;
    server->limits = *limits;
    if (!server->limits.hello_timeout_ms)
        server->limits.hello_timeout_ms = 5000;
    if (!server->limits.max_sessions)
        server->limits.max_sessions = 16384;
    if (!server->limits.max_table_nbytes)
        server->limits.max_table_nbytes = (size_t)256 << 20;
    server->limits.is_local = !limits->is_insecure && !(token && *token);
    tb__proof_key_derive(token, TB__STORE_PURPOSE, &server->key);
    server->table.max_nbytes = server->limits.max_table_nbytes;
    server->table.changed = tb__wake_waiters;
    server->table.context = server;
    server->listener.socket.fd = server->listener.lock.fd = server->epoll.fd = server->wake.fd = server->spare.fd = -1;
    LIST_INIT(&server->sessions);
    LIST_INIT(&server->waiters);
    TAILQ_INIT(&server->pending_hello);
    TAILQ_INIT(&server->dirty);
    tb_status status = start_server(server, &address);
    if (status != TB_OK) {
        free_server(server);
        return status;
    }
    *out = server;
    return TB_OK;
}

/* Another process has the port. A tensorbus store answers a hello, if only to say that the token is wrong. */
static tb_status explain_conflict(const char *url, const char *token) {
    tb__store *other = NULL;
    tb_status status = tb__store_open(url, token, PROBE_MS, &other);
    tb__store_close(other);
    if (status == TB_OK || status == TB_DENIED || status == TB_REFUSED)
        return tb__fail(TB_CONFLICT, "%.300s: another process serves it", url);
    return tb__fail_within(TB_CONFLICT, "the port is taken, and not by a tensorbus store that answers");
}

static tb_status start_or_explain(const char *url, const char *token, const tb__store_limits *limits,
                                  tb__store_server **out) {
    tb_status status = tb__store_server_start_limited(url, token, limits, out);
    bool is_taken_port = status == TB_CONFLICT && strncmp(url, "tcp://", 6) == 0;
    return is_taken_port ? explain_conflict(url, token) : status;
}

tb_status tb__store_server_start(const char *url, const char *token, tb__store_server **out) {
    return start_or_explain(url, token, &(tb__store_limits){0}, out);
}

tb_status tb__store_server_start_insecure(const char *url, tb__store_server **out) {
    return start_or_explain(url, NULL, &(tb__store_limits){.is_insecure = true}, out);
}

void tb__store_server_stop(tb__store_server *server) {
    if (!server)
        return;
    /* A forked child has neither the thread nor the descriptors, and the memory may be in the middle of a change. */
    if (server->wake.fd < 0)
        return;
    eventfd_write(server->wake.fd, 1);
    pthread_join(server->thread, NULL);
    free_server(server);
}

const char *tb__store_server_url(const tb__store_server *server) {
    return server->listener.address.url;
}
