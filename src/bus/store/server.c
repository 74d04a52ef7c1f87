/* The embedded server's loop. It handles the events of a round first; then flush_sessions sends and closes, so that no
 * handler loses the session it works on. */
#include "bus/store/server.h"

#include "base/log.h"
#include "bus/store/session.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MAX_BUFFERS = 512 << 20, /* bytes of all sessions that are half received or not yet sent */
    MAX_DISCARD = 64,        /* reads */
    REFUSE_MS = 1000,        /* out of descriptors: after which waiting clients are refused */
    PROBE_MS = 1000,
};

static void close_session(tb__session *session) {
    tb__store_server *server = session->server;
    /* Unread bytes would make TCP's close a reset, which can overtake the last reply. */
    for (int i = 0; i < MAX_DISCARD; i++) {
        if (recv(session->connection.socket.fd, server->scratch, sizeof server->scratch, 0) <= 0)
            break;
    }
    tb__connection_close(&session->connection);
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
    free(session);
}

static bool is_busy(const tb__session *session) {
    return tb__connection_unsent(&session->connection) > TB__SESSION_BUSY;
}

/* Serves the complete frames that have arrived, until too many replies wait to be sent. */
static void serve_frames(tb__session *session) {
    tb__frame_reader *in = &session->connection.in;
    for (bool has_frame = true; has_frame && !session->is_closing && !is_busy(session);) {
        tb__store_message request = {0};
        tb__blob frame;
        in->max_nbytes = session->has_proved ? TB__STORE_MAX_REQUEST : TB__STORE_MAX_HELLO;
        tb_status status = tb__frame_next(in, &frame, &has_frame);
        if (status == TB_OK && has_frame)
            status = tb__store_decode(frame, &request);
        if (status != TB_OK) {
            tb__session_end(session, request.id, request.op, status);
        } else if (has_frame) {
            tb__session_serve(session, &request);
        }
    }
    if (tb__frame_is_between(in))
        tb__frame_reader_fini(in); /* most clients are silent most of the time */
}

static void receive_requests(tb__session *session) {
    tb__store_server *server = session->server;
    tb__session_touch(session);
    /* One read per round, for fairness; at most a hello of a client that has proved nothing. */
    ssize_t n = recv(session->connection.socket.fd, server->scratch,
                     session->has_proved ? sizeof server->scratch : (size_t)TB__STORE_MAX_HELLO, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && tb__frame_add(&session->connection.in, server->scratch, (size_t)n) == TB_OK)
        serve_frames(session);
    else
        session->is_closing = true;
}

static void flush_session(tb__session *session) {
    tb__store_server *server = session->server;
    tb__connection *c = &session->connection;
    bool is_whole = tb__connection_send(c);
    size_t taken = SIZE_MAX;
    while (is_whole && !session->is_closing && !is_busy(session) && c->in.taken != taken) {
        taken = c->in.taken;
        serve_frames(session);
        is_whole = tb__connection_send(c);
    }
    size_t nbuffers = c->in.bytes.capacity + c->out.capacity;
    server->nbuffers += nbuffers - session->nbuffers;
    session->nbuffers = nbuffers;
    if (!is_whole || session->is_closing || (nbuffers > 0 && server->nbuffers > MAX_BUFFERS) ||
        !tb__connection_watch(c, !is_busy(session)))
        close_session(session);
}

/* Closing a session may answer waits of others, which must be flushed then. */
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
    if (!server->endpoint.listener.address.is_unix)
        return TB_OK;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid())
        return tb__fail(TB_DENIED, "the server belongs to user %u, and the client to user %u", (unsigned)geteuid(),
                        (unsigned)peer.uid);
    return TB_OK;
}

static void add_store_session(tb__endpoint *endpoint, int fd, tb_status status) {
    tb__store_server *server = (tb__store_server *)endpoint;
    tb__session *session = tb__calloc(1, sizeof *session);
    if (!session) {
        tb__fd_close(fd);
        return;
    }
    if (!endpoint->listener.address.is_unix)
        tb__set_tcp_options(fd);
    if (status == TB_OK)
        status = check_peer(server, fd);
    tb__saved_detail why = tb__save_detail();
    session->server = server;
    session->hello_deadline_ms = tb__now_ms() + server->limits.hello_timeout_ms;
    session->is_closing = tb__connection_open(&session->connection, endpoint, fd) != TB_OK;
    LIST_INIT(&session->waiters);
    LIST_INSERT_HEAD(&server->sessions, session, link);
    TAILQ_INSERT_TAIL(&server->pending_hello, session, pending_hello);
    server->nsessions++;
    if (status != TB_OK) {
        tb__set_detail("%s", why.text);
        tb__log(TB_LOG_WARN, "store %s: a connection was refused: %s", endpoint->listener.address.url, why.text);
        tb__session_end(session, 0, TB__STORE_HELLO, status);
    }
    tb__session_touch(session);
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
        tb__session_end(session, 0, TB__STORE_HELLO, TB_TIMEOUT);
    }
}

static void on_session_ready(tb__connection *connection, uint32_t events) {
    tb__session *session = (tb__session *)connection;
    if (events & EPOLLIN) {
        receive_requests(session);
    } else {
        session->is_closing |= (events & (EPOLLHUP | EPOLLERR)) != 0;
        tb__session_touch(session);
    }
}

/* Until it is woken, in order to end. */
static void *server_thread(void *arg) {
    tb__store_server *server = arg;
    for (;;) {
        const tb__session *oldest = TAILQ_FIRST(&server->pending_hello);
        if (tb__endpoint_step(&server->endpoint, oldest ? oldest->hello_deadline_ms : INT64_MAX))
            return NULL;
        refuse_silent(server);
        flush_sessions(server);
    }
}

static tb_status start_server(tb__store_server *server, const tb__address *address) {
    TB_TRY(tb__endpoint_open(&server->endpoint, address, server->limits.is_local));
    TB_TRY(tb__random_bytes(server->id, sizeof server->id));
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
    tb__endpoint_close(&server->endpoint);
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
    server->endpoint.what = "store";
    server->endpoint.refuse_ms = REFUSE_MS;
    server->endpoint.accepted = add_store_session;
    server->endpoint.ready = on_session_ready;
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
    if (server->endpoint.wake.fd < 0)
        return;
    tb__endpoint_wake(&server->endpoint);
    pthread_join(server->thread, NULL);
    free_server(server);
}

const char *tb__store_server_url(const tb__store_server *server) {
    return server->endpoint.listener.address.url;
}
