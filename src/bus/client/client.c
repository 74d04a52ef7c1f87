/* The client's connection to its agent: sends frames, receives replies. A reply is kept until the call that waits for
 * it takes it. Once the connection is lost every call fails. */
#include "bus/client/client.h"

#include "base/descriptors.h"
#include "base/opts.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    CONNECT_MS = 5000,
    COMMAND_MS = 30000, /* if the agent does not tell its timeout */
    GRACE_MS = 5000,    /* added to the deadline that the agent was given */
    READ_BYTES = 64 << 10,
    FDS_AT_ONCE = 250,
    RETRY_MS = 20, /* there is no notification when an agent starts to listen */
};

/* ---- Sending and receiving ------------------------------------------------------------------------------------- */

static tb_status fail_lost(tb_client *c, const char *why) {
    if (c->broken == TB_OK) {
        c->broken = TB_LOST;
        snprintf(c->why, sizeof c->why, "the agent at %s is gone: %s", c->path, why);
    }
    return tb__fail(c->broken, "%s", c->why);
}

tb_status tb__client_check(const tb_client *c, const char *what) {
    return tb__owner_check(&c->owner, what, "connect again");
}

bool tb__client_is_half_changed(const tb_client *c) {
    return tb__is_inherited(&c->owner) && c->is_busy;
}

static tb_status check_connected(const tb_client *c) {
    return c->broken == TB_OK ? TB_OK : tb__fail(c->broken, "%s", c->why);
}

static tb_status poll_socket(tb_client *c, short events, int64_t deadline_ms, const char *what) {
    for (;;) {
        struct pollfd fd = {.fd = c->socket.fd, .events = events};
        int n = poll(&fd, 1, tb__ms_until(deadline_ms));
        if (n > 0)
            return TB_OK;
        if (n < 0 && errno != EINTR)
            return fail_lost(c, strerror(errno));
        if (tb__now_ms() >= deadline_ms)
            return tb__fail(TB_TIMEOUT, "the agent at %s is silent: it has not %s in time", c->path, what);
    }
}

/* Sends some bytes, with some descriptors. */
static tb_status send_piece(tb_client *c, const uint8_t *data, size_t nbytes, const int *fds, size_t nfds,
                            int64_t deadline_ms, size_t *sent) {
    union {
        char bytes[CMSG_SPACE(FDS_AT_ONCE * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec piece = {(void *)data, nbytes};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (nfds > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(nfds * sizeof *fds);
        memcpy(CMSG_DATA(header), fds, nfds * sizeof *fds);
    }
    for (;;) {
        ssize_t n = sendmsg(c->socket.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            *sent = (size_t)n;
            return TB_OK;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
            return fail_lost(c, strerror(errno));
        TB_TRY(poll_socket(c, POLLOUT, deadline_ms, "taken a command"));
    }
}

/* All descriptors go with the frame's first bytes: if they are more than one message takes, one byte goes with each
 * message but the last. */
static tb_status send_client_frame(tb_client *c, const tb__bytes *frame, const int *fds, size_t nfds,
                                   int64_t deadline_ms) {
    size_t at = 0;
    while (at < frame->count) {
        size_t n = nfds < FDS_AT_ONCE ? nfds : FDS_AT_ONCE, sent = 0;
        size_t nbytes = nfds > n ? 1 : frame->count - at;
        tb_status status = send_piece(c, frame->item + at, nbytes, fds, n, deadline_ms, &sent);
        if (status != TB_OK) /* the agent has half a frame: no other can follow */
            return at > 0 ? fail_lost(c, "it does not take what is sent") : status;
        at += sent;
        fds += n;
        nfds -= n;
    }
    return TB_OK;
}

static tb_status receive_bytes(tb_client *c) {
    uint8_t *room;
    size_t nbytes = READ_BYTES;
    TB_TRY(tb__frame_room(&c->in, &room, &nbytes));
    ssize_t n = recv(c->socket.fd, room, nbytes, MSG_DONTWAIT);
    int error = errno;
    tb__frame_filled(&c->in, n > 0 ? (size_t)n : 0);
    if (n > 0 || (n < 0 && (error == EAGAIN || error == EWOULDBLOCK || error == EINTR)))
        return TB_OK;
    return fail_lost(c, n == 0 ? "it has closed the connection" : strerror(error));
}

static void drop_replies(tb_client *c) {
    while (c->replies) {
        tb__client_reply *next = c->replies->next;
        tb__client_reply_free(c->replies);
        c->replies = next;
    }
}

void tb__client_reply_free(tb__client_reply *reply) {
    if (!reply)
        return;
    tb__arena_fini(&reply->arena);
    free(reply->frame);
    free(reply);
}

static tb_status keep_reply(tb_client *c, tb__blob map) {
    tb__client_reply *r = tb__calloc(1, sizeof *r);
    if (!r)
        return TB_NO_MEMORY;
    r->frame = tb__memdup(map.data, map.nbytes, 1);
    if (!r->frame) {
        free(r);
        return TB_NO_MEMORY;
    }
    tb_status status = tb__message_decode((tb__blob){r->frame, map.nbytes}, &r->arena, &r->message);
    if (status == TB_OK && r->message.kind == TB__EVENT) {
        tb__client_on_event(c, &r->message);
        tb__client_reply_free(r);
        return TB_OK;
    }
    if (status != TB_OK || r->message.kind != TB__REPLY) {
        tb__client_reply_free(r);
        return fail_lost(c, "it sent a frame that is neither a Reply nor an Event");
    }
    r->next = c->replies;
    c->replies = r;
    return TB_OK;
}

static tb__client_reply *find_reply(tb_client *c, uint64_t seq) {
    for (tb__client_reply **at = &c->replies; *at; at = &(*at)->next) {
        if ((*at)->message.seq == seq) {
            tb__client_reply *found = *at;
            *at = found->next;
            return found;
        }
    }
    return NULL;
}

/* Handles all frames that have arrived: no call would look for them later. */
static tb_status handle_frames(tb_client *c) {
    for (;;) {
        tb__blob map;
        bool has_frame = false;
        if (tb__frame_next(&c->in, &map, &has_frame) != TB_OK)
            return fail_lost(c, "it sent a frame that is too long");
        if (!has_frame)
            return TB_OK;
        TB_TRY(keep_reply(c, map));
    }
}

tb_status tb__client_listen(tb_client *c, int64_t deadline_ms, const char *what) {
    TB_TRY(check_connected(c));
    TB_TRY(poll_socket(c, POLLIN, deadline_ms, what));
    c->is_busy = true;
    tb_status status = receive_bytes(c),
              taken = handle_frames(c); /* frames that arrived before the connection ended count */
    c->is_busy = false;
    return status == TB_OK ? taken : status;
}

tb_status tb__client_await_reply(tb_client *c, uint64_t seq, int64_t deadline_ms, const char *what,
                                 tb__client_reply **out) {
    while (!(*out = find_reply(c, seq))) {
        tb_status status = tb__client_listen(c, deadline_ms, what);
        if (status == TB_OK)
            continue;
        return (*out = find_reply(c, seq)) ? TB_OK : status;
    }
    return TB_OK;
}

tb_status tb__client_post(tb_client *c, const tb__message *message, const int *fds, size_t nfds, int64_t deadline_ms,
                          uint64_t *seq) {
    tb__bytes frame = {0};
    TB_TRY(check_connected(c));
    tb_status status = tb__message_encode(message, &frame);
    if (status == TB_OK)
        status = send_client_frame(c, &frame, fds, nfds, deadline_ms);
    free(frame.item);
    if (status == TB_OK)
        *seq = c->nframes++;
    return status;
}

static tb_status check_client_timeout(int timeout_ms) {
    return timeout_ms >= 0 ? TB_OK : tb__fail(TB_INVALID, "a timeout of %d ms; it can't be negative", timeout_ms);
}

tb_status tb__client_call(tb_client *c, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                          const char *what, tb__client_reply **out) {
    TB_TRY(check_client_timeout(timeout_ms));
    int64_t deadline_ms = tb__now_ms() + (timeout_ms ? timeout_ms : c->timeout_ms) + GRACE_MS;
    uint64_t seq;
    tb__client_reply *reply;
    message->timeout_ms = (uint64_t)timeout_ms;
    TB_TRY(tb__client_post(c, message, fds, nfds, deadline_ms, &seq));
    TB_TRY(tb__client_await_reply(c, seq, deadline_ms, what, &reply));
    c->is_unmapped = reply->message.unmapped.value;
    if (reply->message.status != TB_OK) {
        tb_status status = tb__fail(reply->message.status, "%s", reply->message.message);
        tb__client_reply_free(reply);
        return status;
    }
    if (out)
        *out = reply;
    else
        tb__client_reply_free(reply);
    return TB_OK;
}

/* ---- Life ------------------------------------------------------------------------------------------------------ */

/* ECONNREFUSED is the error for a socket without a listener and for a file that is not a socket. */
static tb_status fail_refused(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISSOCK(info.st_mode))
        return tb__fail(TB_INVALID, "%s is %s, and no agent's socket", path,
                        S_ISDIR(info.st_mode) ? "a folder" : "a file");
    return tb__fail(TB_IO, "nobody listens at %s: the agent has ended", path);
}

/* TB_IO if an agent may listen the next time; TB_INVALID if the path is not a socket. */
static tb_status fail_no_agent(const tb_client *c, int error) {
    return error == ENOENT ? tb__fail(TB_IO, "there is no socket %s: is the agent running?", c->path)
                           : fail_refused(c->path);
}

/* Says whether the socket is missing, refused, or silent. */
static tb_status connect_to_agent(const tb_client *c, int fd, bool is_awaited, int64_t deadline_ms) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (!*c->path)
        return tb__fail(TB_INVALID, "the path of the agent's socket is empty");
    if (strlen(c->path) >= sizeof name.sun_path)
        return tb__fail(TB_INVALID, "the path of the agent's socket is too long: %.120s", c->path);
    memcpy(name.sun_path, c->path, strlen(c->path) + 1);
    for (;;) {
        int left_ms = tb__ms_until(deadline_ms);
        struct timeval left = {.tv_sec = left_ms / 1000, .tv_usec = left_ms % 1000 * 1000 + 1}; /* 0 is for ever */
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof left);
        if (connect(fd, (const struct sockaddr *)&name, sizeof name) == 0)
            return TB_OK;
        if (errno == ENOENT || errno == ECONNREFUSED) {
            tb_status status = fail_no_agent(c, errno);
            left_ms = tb__ms_until(deadline_ms);
            if (status != TB_IO || !is_awaited || left_ms == 0)
                return status;
            poll(NULL, 0, left_ms < RETRY_MS ? left_ms : RETRY_MS);
            continue;
        }
        if (errno == EACCES || errno == EPERM)
            return tb__fail(TB_DENIED, "the socket %s is another user's", c->path);
        if (errno != EAGAIN && errno != EINTR)
            return tb__fail(TB_IO, "%s: %s", c->path, strerror(errno));
        if (tb__now_ms() >= deadline_ms) /* its queue is full, and it accepts nobody */
            return tb__fail(TB_TIMEOUT, "the agent at %s is silent: it does not accept connections", c->path);
    }
}

static tb_status open_agent_socket(tb_client *c, bool is_awaited, int64_t deadline_ms) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return tb__fail(TB_IO, "socket: %s", tb__errno_text(errno));
    tb__owned_fd_init(&c->socket, fd); /* before it is connected: that may take a while */
    return connect_to_agent(c, fd, is_awaited, deadline_ms);
}

static tb_status say_hello(tb_client *c, const tb_client_opts *o, int64_t deadline_ms) {
    tb__message hello = {.kind = TB__HELLO,
                         .protocol = TB__PROTOCOL_VERSION,
                         .token = o->token,
                         .client = o->name ? o->name : program_invocation_short_name};
    uint64_t seq;
    tb__client_reply *reply;
    TB_TRY(tb__client_post(c, &hello, NULL, 0, deadline_ms, &seq));
    TB_TRY(tb__client_await_reply(c, seq, deadline_ms, "answered the hello", &reply));
    const tb__message *m = &reply->message;
    tb_status status = m->status == TB_OK ? TB_OK : tb__fail(m->status, "%s: %s", c->path, m->message);
    if (status == TB_OK) {
        c->rank = (int32_t)m->rank.value;
        c->index = (int32_t)m->index.value;
        c->size = (int32_t)m->size.value;
        c->timeout_ms = m->timeout_ms ? (int)m->timeout_ms : COMMAND_MS;
        c->group = tb__strdup(m->name ? m->name : "");
        status = c->group ? TB_OK : TB_NO_MEMORY;
    }
    tb__client_reply_free(reply);
    return status;
}

tb_status tb__client_open(const char *path, const tb_client_opts *opts, bool is_awaited, tb_client **out) {
    tb_client_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(check_client_timeout(o.timeout_ms));
    int64_t deadline_ms = tb__now_ms() + (o.timeout_ms ? o.timeout_ms : CONNECT_MS);
    tb_client *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    c->socket.fd = -1;
    c->refs = 1;
    tb__owner_init(&c->owner);
    c->path = tb__strdup(path);
    tb_status status = c->path ? open_agent_socket(c, is_awaited, deadline_ms) : TB_NO_MEMORY;
    if (status == TB_OK)
        status = say_hello(c, &o, deadline_ms);
    if (status != TB_OK) {
        tb_client_close(c);
        return status;
    }
    *out = c;
    return TB_OK;
}

tb_status tb_client_connect(const char *path, const tb_client_opts *opts, tb_client **out) {
    return tb__client_open(path, opts, true, out);
}

void tb__client_unref(tb_client *c) {
    if (--c->refs > 0 || tb__client_is_half_changed(c))
        return;
    drop_replies(c);
    tb__client_forget(c, NULL);
    tb__frame_reader_fini(&c->in);
    for (size_t i = 0; i < c->pairs.count; i++) {
        free(c->pairs.item[i].name);
        free(c->pairs.item[i].layout);
    }
    free(c->pairs.item);
    tb__client_close_devices(c);
    free(c->group);
    free(c->path);
    free(c);
}

void tb_client_close(tb_client *c) {
    if (!c)
        return;
    tb_client_batch *first = tb__client_is_half_changed(c) ? NULL : LIST_FIRST(&c->batches);
    for (tb_client_batch *b = first; b; b = LIST_NEXT(b, link))
        tb__client_batch_end(b);
    tb__owned_fd_close(&c->socket);
    if (c->broken == TB_OK) {
        c->broken = TB_LOST;
        snprintf(c->why, sizeof c->why, "the client was closed");
    }
    tb__client_unref(c);
}

int32_t tb_client_rank(const tb_client *c) {
    return c->rank;
}

int32_t tb_client_index(const tb_client *c) {
    return c->index;
}

int32_t tb_client_size(const tb_client *c) {
    return c->size;
}

int tb_client_fd(const tb_client *c) {
    return tb__client_check(c, "client") == TB_OK && c->broken == TB_OK ? c->socket.fd : -1;
}

const char *tb_client_group(const tb_client *c) {
    return c->group;
}
