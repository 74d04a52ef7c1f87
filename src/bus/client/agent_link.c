/* The connection of a process to an agent: how it begins, commands and their replies. */
#include "bus/client/link.h"

#include "base/descriptors.h"
#include "bus/store/address.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    COMMAND_MS = 30000, /* if the agent does not tell its timeout */
    GRACE_MS = 5000,    /* added to the deadline that the agent was given */
    RETRY_MS = 20,      /* there is no notification when an agent starts to listen */
};

static tb_status read_agent_frame(tb__link *l, tb__blob frame, tb__link_reply *out, bool *is_reply) {
    tb_status status = tb__message_decode(frame, &out->arena, &out->message);
    out->seq = out->message.seq;
    *is_reply = status == TB_OK && out->message.kind == TB__REPLY;
    if (status == TB_OK && out->message.kind == TB__EVENT && l->on_event)
        l->on_event(l->arg, &out->message);
    return status == TB_NO_MEMORY || *is_reply || (status == TB_OK && out->message.kind == TB__EVENT)
               ? status
               : tb__fail(TB_INVALID, "it sent a frame that is neither a Reply nor an Event");
}

tb_status tb__link_post(tb__link *l, const tb__message *message, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq) {
    tb__bytes frame = {0};
    tb_status status = tb__message_encode(message, &frame);
    if (status == TB_OK)
        status = tb__link_send(l, &frame, fds, nfds, deadline_ms, seq);
    free(frame.item);
    return status;
}

typedef struct awaited {
    tb__link *link;
    uint64_t seq;
    tb__link_reply *reply;
} awaited;

static bool has_reply(void *arg) {
    awaited *a = arg;
    a->reply = tb__link_take_reply(a->link, a->seq);
    return a->reply;
}

tb_status tb__link_await_reply(tb__link *l, uint64_t seq, int64_t deadline_ms, const char *what, tb__link_reply **out) {
    awaited a = {l, seq, NULL};
    tb_status status = tb__link_wait(l, has_reply, &a, deadline_ms, what);
    *out = a.reply;
    if (!a.reply || a.reply->message.status == TB_OK)
        return status;
    return tb__fail(a.reply->message.status, "%s", a.reply->message.message);
}

tb_status tb__link_call(tb__link *l, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                        const char *what, tb__link_reply **out) {
    if (timeout_ms < 0)
        return tb__fail(TB_INVALID, "a timeout of %d ms; it can't be negative", timeout_ms);
    int64_t deadline_ms = tb__now_ms() + (timeout_ms ? timeout_ms : l->timeout_ms) + GRACE_MS;
    uint64_t seq;
    tb__link_reply *reply;
    message->timeout_ms = (uint64_t)timeout_ms;
    TB_TRY(tb__link_post(l, message, fds, nfds, deadline_ms, &seq));
    tb_status status = tb__link_await_reply(l, seq, deadline_ms, what, &reply);
    if (!reply)
        tb__link_drop_reply(l, seq);
    if (out)
        *out = reply;
    else
        tb__link_reply_free(reply);
    return status;
}

/* ECONNREFUSED is the error for a socket without a listener and for a file that is not a socket. */
static tb_status fail_refused(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISSOCK(info.st_mode))
        return tb__fail(TB_INVALID, "%s is %s, and no agent's socket", path,
                        S_ISDIR(info.st_mode) ? "a folder" : "a file");
    return tb__fail(TB_IO, "nobody listens at %s: the agent has ended", path);
}

/* TB_IO if an agent may listen the next time; TB_INVALID if the path is not a socket. */
static tb_status fail_no_agent(const tb__link *l, int error) {
    return error == ENOENT ? tb__fail(TB_IO, "there is no socket %s: is the agent running?", l->path)
                           : fail_refused(l->path);
}

/* Says whether the socket is missing, refused, or silent. */
static tb_status connect_to_agent(const tb__link *l, bool is_awaited, int64_t deadline_ms, int *fd) {
    tb__address address = {.is_unix = true};
    if (!*l->path)
        return tb__fail(TB_INVALID, "the path of the agent's socket is empty");
    if (strlen(l->path) >= sizeof address.path)
        return tb__fail(TB_INVALID, "the path of the agent's socket is too long: %.120s", l->path);
    snprintf(address.path, sizeof address.path, "%s", l->path);
    snprintf(address.url, sizeof address.url, "%s", l->path);
    for (;;) {
        int error;
        tb_status status = tb__address_connect(&address, deadline_ms, fd, &error);
        if (error == EACCES || error == EPERM)
            return tb__fail(TB_DENIED, "the socket %s is another user's", l->path);
        if (status == TB_TIMEOUT) /* its queue is full, and it accepts nobody */
            return tb__fail(TB_TIMEOUT, "the agent at %s is silent: it does not accept connections", l->path);
        if (error != ENOENT && error != ECONNREFUSED)
            return status;
        status = fail_no_agent(l, error);
        int left_ms = tb__ms_until(deadline_ms);
        if (status != TB_IO || !is_awaited || left_ms == 0)
            return status;
        poll(NULL, 0, left_ms < RETRY_MS ? left_ms : RETRY_MS);
    }
}

/* By the socket, where the kernel can (6.5), or by the pid of the process that listens. */
static int open_agent_pidfd(int socket) {
#ifdef SO_PEERPIDFD
    int fd = -1;
    socklen_t size = sizeof fd;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0)
        return fd;
#endif
    struct ucred agent;
    socklen_t length = sizeof agent;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &agent, &length) != 0 || agent.pid <= 0)
        return -1;
    return (int)syscall(SYS_pidfd_open, agent.pid, 0);
}

static tb_status say_hello(tb__link *l, const tb__link_opts *o, int64_t deadline_ms) {
    tb__message hello = {.kind = TB__HELLO,
                         .protocol = TB__PROTOCOL_VERSION,
                         .token = o->token,
                         .client = o->name ? o->name : program_invocation_short_name};
    uint64_t seq;
    tb__link_reply *reply;
    TB_TRY(tb__link_post(l, &hello, NULL, 0, deadline_ms, &seq));
    tb_status status = tb__link_await_reply(l, seq, deadline_ms, "answered the hello", &reply);
    if (status != TB_OK && reply)
        status = tb__fail_within(status, "%s", l->path);
    if (status == TB_OK) {
        const tb__message *m = &reply->message;
        l->rank = (int32_t)m->rank.value;
        l->index = (int32_t)m->index.value;
        l->size = (int32_t)m->size.value;
        l->incarnation = m->incarnation.value;
        l->timeout_ms = m->timeout_ms ? (int)m->timeout_ms : COMMAND_MS;
        l->group = tb__strdup(m->name ? m->name : "");
        status = l->group ? TB_OK : TB_NO_MEMORY;
    }
    tb__link_reply_free(reply);
    return status;
}

tb_status tb__link_open(const char *path, const tb__link_opts *o, tb__link **out) {
    static const char before[] = "the agent at ";
    int64_t deadline_ms = tb__now_ms() + o->timeout_ms;
    char name[sizeof before + PATH_MAX];
    tb__link *l;
    int fd;
    snprintf(name, sizeof name, "%s%s", before, path);
    TB_TRY(tb__link_create(name, " is gone", &l));
    l->path = l->name + sizeof before - 1;
    l->read = read_agent_frame;
    l->on_event = o->on_event;
    l->arg = o->arg;
    tb_status status = connect_to_agent(l, o->is_awaited, deadline_ms, &fd);
    if (status == TB_OK) {
        tb__owned_fd_init(&l->socket, fd);
        l->pidfd = tb__fd_own(open_agent_pidfd(fd));
        tb__link_let_block(l);
        tb__link_lock(l);
        status = say_hello(l, o, deadline_ms);
        tb__link_unlock(l);
    }
    if (status != TB_OK) {
        tb__link_close(l);
        return status;
    }
    *out = l;
    return TB_OK;
}
