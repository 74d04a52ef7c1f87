/* Connections of clients: receives frames with descriptors, sends replies. */
#include "bus/agent/agent_inside.h"

#include "base/descriptors.h"
#include "base/log.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    READ_BYTES = 256 << 10,
    BUSY_BYTES = 4 << 20, /* with this much to send, no more is read */
    PATIENCE_MS = 5000,   /* for the Hello of a new connection, and for the last replies of one that is closed ... */
    DENIED_MS = 1000,     /* ... and for the Hello of one that is refused: others may wait for its descriptor */
    FDS_AT_ONCE = 253,    /* what the system takes in one message */
};

static bool exceeds_held_limit(const agent_session *s) {
    return s->nbytes > TB__AGENT_MAX_HELD;
}

/* ... and for the Hello of a refused one: others may wait for its descriptor */
static void watch(agent_session *s) {
    bool is_busy = tb__connection_unsent(&s->connection) > BUSY_BYTES || exceeds_held_limit(s);
    if (!s->is_gone && !tb__connection_watch(&s->connection, !s->is_closing && !is_busy))
        tb__agent_session_close(s);
}

/* For the reason in tb_error_detail. */
static tb_status set_denial(agent_session *s, tb_status status) {
    tb__log(TB_LOG_WARN, "agent: a connection was refused: %s", tb_error_detail());
    s->denied_with = status;
    s->denial = tb__strdup(tb_error_detail());
    return s->denial ? TB_OK : TB_NO_MEMORY;
}

static void open_session(tb__agent *agent, int fd, tb_status status) {
    agent_session *s = tb__calloc(1, sizeof *s);
    if (!s) {
        tb__log(TB_LOG_WARN, "agent: a connection was refused: %s", tb_error_detail());
        tb__fd_close(fd);
        return;
    }
    s->agent = agent;
    s->id = ++agent->nsessions;
    s->process.pidfd = -1;
    pthread_mutex_init(&s->process_lock, NULL);
    LIST_INSERT_HEAD(&agent->sessions, s, link);
    if (status == TB_OK)
        status = tb__client_process_init(&s->process, fd);
    bool is_lost = status != TB_OK && set_denial(s, status) != TB_OK;
    s->connection.in.max_nbytes = TB__HELLO_MAX;
    s->deadline_ms = tb__now_ms() + (s->denial ? DENIED_MS : PATIENCE_MS);
    if (tb__connection_open(&s->connection, &agent->endpoint, fd) != TB_OK || is_lost)
        tb__agent_session_close(s);
}

void tb__agent_accepted(tb__endpoint *endpoint, int fd, tb_status status) {
    tb__agent_lock((tb__agent *)endpoint);
    open_session((tb__agent *)endpoint, fd, status);
    tb__agent_unlock((tb__agent *)endpoint);
}

void tb__agent_session_free(agent_session *s) {
    LIST_REMOVE(s, link);
    tb__connection_close(&s->connection);
    tb__client_process_fini(&s->process);
    pthread_mutex_destroy(&s->process_lock);
    free(s->name);
    free(s->denial);
    free(s);
}

void tb__agent_session_close(agent_session *s) {
    if (s->is_gone)
        return;
    s->is_gone = true;
    tb__connection_unwatch(&s->connection);
    tb__endpoint_wake(&s->agent->endpoint);
}

static void close_fds(tb__fds *fds) {
    for (size_t i = 0; i < fds->count; i++)
        close(fds->item[i]);
    free(fds->item);
    *fds = (tb__fds){0};
}

void tb__agent_session_release(agent_session *s) {
    s->has_released = true;
    close_fds(&s->fds);
    close_fds(&s->new_fds);
    tb__agent_drop_client(s->agent, s);
}

void tb__agent_session_flush(agent_session *s) {
    if (s->is_gone)
        return;
    bool is_whole = tb__connection_send(&s->connection);
    if (is_whole && !(s->is_closing && tb__connection_unsent(&s->connection) == 0))
        watch(s);
    else
        tb__agent_session_close(s);
}

void tb__agent_session_reply(agent_session *s, const tb__message *reply) {
    if (s->is_gone)
        return;
    tb_status status = tb__message_encode(reply, &s->connection.out);
    if (status != TB_OK) {
        tb__log(TB_LOG_ERROR, "agent: a reply could not be made: %s", tb_error_detail());
        tb__agent_session_close(s);
    }
}

void tb__agent_session_close_when_sent(agent_session *s) {
    if (s->is_gone)
        return;
    s->is_closing = true;
    s->deadline_ms = tb__now_ms() + PATIENCE_MS;
}

/* A frame that can't be read: replies, and closes the connection. */
static void refuse_frame(agent_session *s, tb_status status) {
    tb__message reply = {.kind = TB__REPLY, .seq = s->nframes, .status = status, .message = tb_error_detail()};
    tb__agent_session_reply(s, &reply);
    tb__agent_session_close_when_sent(s);
}

static bool is_agent_token(const char *wanted, const char *given) {
    size_t n = strlen(wanted), m = given ? strlen(given) : 0;
    unsigned char difference = n != m;
    for (size_t i = 0; i < n; i++) /* takes the same time for every token */
        difference |= (unsigned char)(wanted[i] ^ (i < m ? given[i] : 0));
    return !difference;
}

static tb_status check_hello(agent_session *s, const agent_job *job) {
    const tb__message *hello = &job->message;
    tb__agent *agent = s->agent;
    if (s->denial)
        return tb__fail(s->denied_with, "%s", s->denial);
    if (hello->kind != TB__HELLO)
        return tb__fail(TB_INVALID, "the first message has to be a Hello");
    TB_TRY(tb__hello_check(hello));
    if (agent->token && !is_agent_token(agent->token, hello->token))
        return tb__fail(TB_DENIED, "the token is wrong");
    s->name = tb__strdup(hello->client ? hello->client : "");
    if (!s->name)
        return TB_NO_MEMORY;
    s->has_greeted = true;
    s->protocol = hello->protocol;
    s->connection.in.max_nbytes = TB__FRAME_MAX;
    return TB_OK;
}

static void on_client_frame(agent_session *s, tb__blob map) {
    agent_job *job = tb__agent_job_create(s, map);
    if (!job) {
        refuse_frame(s, TB_NO_MEMORY);
        return;
    }
    tb_status status = tb__message_decode((tb__blob){job->frame, map.nbytes}, &job->arena, &job->message);
    if (!s->has_greeted) {
        if (status == TB_OK)
            status = check_hello(s, job);
        if (status == TB_OK)
            job->reply =
                (tb__message){.version = tb__some_uint(s->protocol),
                              .rank = tb__some_uint((uint64_t)s->agent->world->rank),
                              .name = s->agent->group,
                              .index = tb__some_uint((uint64_t)s->agent->index),
                              .size = tb__some_uint((uint64_t)s->agent->size),
                              .timeout_ms = (uint64_t)s->agent->timeout_ms,
                              .incarnation = {.is_set = s->protocol > 1, .value = s->agent->world->incarnation}};
        else
            s->is_closing = true;
        job->message.semaphore_name = NULL; /* only clients that have said Hello have semaphores posted */
        tb__agent_job_end(job, status);
        return;
    }
    if (status != TB_OK) {
        tb__agent_job_end(job, status); /* framing is intact: the next frame may be valid */
        return;
    }
    if (job->message.kind != TB__REGISTER_TENSORS && job->message.kind != TB__INIT_PAIR)
        tb__agent_job_drop_frame(job); /* the message has no bytes of it: text is in the arena */
    tb__agent_run_command(job);
}

static void on_client_frames(agent_session *s) {
    while (!s->is_gone && !s->is_closing) {
        tb__blob map;
        bool has_frame;
        tb_status status = tb__frame_next(&s->connection.in, &map, &has_frame);
        if (status != TB_OK) {
            refuse_frame(s, status);
            return;
        }
        if (!has_frame)
            break;
        on_client_frame(s, map);
    }
    if (!tb__agent_session_keep_fds(s))
        refuse_frame(s, TB_NO_MEMORY);
}

/* The kernel ends a read at the message that carries descriptors. So they belong to the last frame of which bytes have
 * arrived, not to earlier ones of the same read. */
bool tb__agent_session_keep_fds(agent_session *s) {
    size_t n = s->new_fds.count;
    if (n == 0)
        return true;
    if (!tb__vec_reserve(&s->fds, n))
        return false;
    memcpy(s->fds.item + s->fds.count, s->new_fds.item, n * sizeof *s->fds.item);
    s->fds.count += n;
    s->new_fds.count = 0;
    return true;
}

static tb_status receive_fds(agent_session *s, const struct msghdr *message) {
    tb_status status = TB_OK;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR((struct msghdr *)message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (s->fds.count + s->new_fds.count < TB__AGENT_MAX_FDS && tb__vec_push(&s->new_fds, fd))
                continue;
            close(fd);
            status = tb__fail(TB_TOO_BIG, "a frame has more than %d descriptors", TB__AGENT_MAX_FDS);
        }
    }
    if (status == TB_OK && message->msg_flags & MSG_CTRUNC) /* the system has dropped some */
        status = tb__fail(TB_TOO_BIG, "the agent can't take the descriptors of a frame: %s", tb__errno_text(EMFILE));
    return status;
}

static void receive_frames(agent_session *s) {
    size_t total = 0;
    while (!s->is_gone && !s->is_closing && !exceeds_held_limit(s) && total < 4 * READ_BYTES) {
        uint8_t *room;
        size_t nbytes = READ_BYTES;
        if (tb__frame_room(&s->connection.in, &room, &nbytes) != TB_OK) {
            refuse_frame(s, TB_NO_MEMORY);
            return;
        }
        union {
            char bytes[CMSG_SPACE(FDS_AT_ONCE * sizeof(int))];
            struct cmsghdr align;
        } control;
        struct iovec piece = {room, nbytes};
        struct msghdr message = {
            .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        ssize_t n = recvmsg(s->connection.socket.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            tb__agent_session_close(s);
            return;
        }
        tb_status status = receive_fds(s, &message);
        if (status != TB_OK) {
            refuse_frame(s, status);
            return;
        }
        tb__frame_filled(&s->connection.in, (size_t)n);
        total += (size_t)n;
        on_client_frames(s);
        if ((size_t)n < nbytes)
            return; /* all was read, or epoll reports more */
    }
}

static void handle_events(agent_session *s, uint32_t events) {
    if (!s->is_gone && events & EPOLLOUT)
        tb__agent_session_flush(s);
    if (s->is_gone || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    if (s->is_closing || !(events & EPOLLIN)) /* the connection has ended, which epoll would report again and again */
        tb__agent_session_close(s);
    else
        receive_frames(s);
}

void tb__agent_session_ready(tb__connection *connection, uint32_t events) {
    agent_session *s = (agent_session *)connection;
    tb__agent *agent = s->agent;
    tb__agent_lock(agent);
    handle_events(s, events);
    tb__agent_unlock(agent);
}
