/* Connections of clients: receives frames with descriptors, sends replies. */
#include "bus/agent/agent_inside.h"

#include "base/descriptors.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
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
    return atomic_load(&s->nbytes) > TB__AGENT_MAX_HELD;
}

/* Calls epoll only if the wanted events have changed. */
static void update_session_epoll(agent_session *s) {
    size_t waiting = s->out.count - s->nsent;
    unsigned wanted = (s->is_closing || exceeds_held_limit(s) || waiting > BUSY_BYTES ? 0U : (unsigned)EPOLLIN) |
                      (waiting > 0 ? (unsigned)EPOLLOUT : 0U);
    if (wanted == s->watched)
        return;
    struct epoll_event event = {.events = wanted, .data.ptr = s};
    if (epoll_ctl(s->agent->epoll, EPOLL_CTL_MOD, s->socket, &event) == 0)
        s->watched = wanted;
}

void tb__agent_session_watch(agent_session *s) {
    if (!s->is_gone)
        update_session_epoll(s);
}

/* For the reason in tb_error_detail. */
static tb_status set_denial(agent_session *s, tb_status status) {
    tb__log(TB_LOG_WARN, "agent: a connection was refused: %s", tb_error_detail());
    s->denied_with = status;
    s->denial = tb__strdup(tb_error_detail());
    return s->denial ? TB_OK : TB_NO_MEMORY;
}

/* `status`: why the connection is refused; TB_OK: it is not. */
static tb_status init_session(agent_session *s, int socket, tb_status status) {
    if (status == TB_OK)
        status = tb__client_process_init(&s->process, socket);
    if (status != TB_OK)
        TB_TRY(set_denial(s, status));
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
    if (epoll_ctl(s->agent->epoll, EPOLL_CTL_ADD, socket, &event) != 0) {
        tb__client_process_fini(&s->process);
        return tb__fail(TB_IO, "epoll_ctl: %s", strerror(errno));
    }
    s->socket = socket;
    s->watched = EPOLLIN;
    s->in.max_nbytes = TB__HELLO_MAX;
    s->deadline_ms = tb__now_ms() + (s->denial ? DENIED_MS : PATIENCE_MS);
    pthread_mutex_init(&s->process_lock, NULL);
    LIST_INSERT_HEAD(&s->agent->sessions, s, link);
    return TB_OK;
}

void tb__agent_listen_again(tb__agent *agent) {
    if (agent->spare < 0)
        agent->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (agent->spare < 0 || agent->is_stopping)
        return;
    agent->is_full = false;
    tb__listener_enable(agent->epoll, agent->listener.socket.fd, &agent->listener, true);
}

/* Accepts a connection. If descriptors have run out, closes the spare one to accept one client and refuse it; the
 * others wait. *status: why it is refused. */
static int accept_client(tb__agent *agent, tb_status *status) {
    *status = TB_OK;
    int fd = accept4(agent->listener.socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0 || !tb__is_out_of_descriptors(errno) || agent->spare < 0)
        return fd;
    *status = tb__fail(TB_IO, "the agent can't take another connection: %s", tb__errno_text(errno));
    close(agent->spare);
    agent->spare = -1;
    return accept4(agent->listener.socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void add_agent_session(tb__agent *agent, int fd, tb_status status) {
    agent_session *s = tb__calloc(1, sizeof *s);
    if (s) {
        s->agent = agent;
        s->id = ++agent->nsessions;
        s->process.pidfd = -1;
        status = init_session(s, fd, status);
    }
    if (s && status == TB_OK)
        return;
    tb__log(TB_LOG_WARN, "agent: a connection was refused: %s", tb_error_detail());
    close(fd);
    if (s)
        free(s->denial);
    free(s);
}

void tb__agent_accept(tb__agent *agent) {
    while (!agent->is_full) {
        tb_status status;
        int fd = accept_client(agent, &status), error = errno;
        if (fd >= 0)
            add_agent_session(agent, fd, status);
        if (fd >= 0 ? agent->spare < 0 : tb__is_shortage(error)) {
            if (fd < 0)
                tb__log(TB_LOG_ERROR, "agent: accept: %s", tb__errno_text(error));
            agent->is_full = true;
            tb__listener_enable(agent->epoll, agent->listener.socket.fd, &agent->listener, false);
        } else if (fd < 0 && error != EINTR && error != ECONNABORTED) {
            if (error != EAGAIN && error != EWOULDBLOCK)
                tb__log(TB_LOG_ERROR, "agent: accept: %s", strerror(error));
            return;
        }
    }
}

void tb__agent_session_free(agent_session *s) {
    LIST_REMOVE(s, link);
    close(s->socket);
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
    epoll_ctl(s->agent->epoll, EPOLL_CTL_DEL, s->socket, NULL);
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
    tb__frame_reader_fini(&s->in);
    free(s->out.item);
    s->out = (tb__bytes){0};
    tb__agent_drop_client(s->agent, s);
}

void tb__agent_session_writable(agent_session *s) {
    while (!s->is_gone && s->nsent < s->out.count) {
        ssize_t n = send(s->socket, s->out.item + s->nsent, s->out.count - s->nsent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n <= 0) {
            tb__agent_session_close(s);
            return;
        }
        s->nsent += (size_t)n;
    }
    if (s->is_gone)
        return;
    if (s->nsent == s->out.count) {
        s->nsent = s->out.count = 0;
        if (s->is_closing) {
            tb__agent_session_close(s);
            return;
        }
    }
    update_session_epoll(s);
}

void tb__agent_session_reply(agent_session *s, const tb__message *reply) {
    if (s->is_gone)
        return;
    tb_status status = tb__message_encode(reply, &s->out);
    if (status != TB_OK) {
        tb__log(TB_LOG_ERROR, "agent: a reply could not be made: %s", tb_error_detail());
        tb__agent_session_close(s);
        return;
    }
    tb__agent_session_writable(s);
}

void tb__agent_session_close_when_sent(agent_session *s) {
    if (s->is_gone)
        return;
    s->is_closing = true;
    s->deadline_ms = tb__now_ms() + PATIENCE_MS;
    tb__agent_session_writable(s);
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
    for (size_t i = 0; i < n; i++) /* takes as long whatever was given */
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
    s->in.max_nbytes = TB__FRAME_MAX;
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
    tb__agent_job_trim(job);
    tb__agent_run_command(job);
}

static void on_client_frames(agent_session *s) {
    while (!s->is_gone && !s->is_closing) {
        tb__blob map;
        bool has_frame;
        tb_status status = tb__frame_next(&s->in, &map, &has_frame);
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

void tb__agent_session_readable(agent_session *s) {
    size_t total = 0;
    while (!s->is_gone && !s->is_closing && !exceeds_held_limit(s) && total < 4 * READ_BYTES) {
        uint8_t *room;
        size_t nbytes = READ_BYTES;
        if (tb__frame_room(&s->in, &room, &nbytes) != TB_OK) {
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
        ssize_t n = recvmsg(s->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
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
        tb__frame_filled(&s->in, (size_t)n);
        total += (size_t)n;
        on_client_frames(s);
        if ((size_t)n < nbytes)
            return; /* that was all, or epoll says that there is more */
    }
}
