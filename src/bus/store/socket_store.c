/* The client of the embedded server. A caller queues a request and sleeps until the reply or its deadline; one thread
 * reads replies, and sends what the socket did not take at once.
 *
 * After a network outage TCP retransmits at growing intervals: an old connection may stay silent for many seconds while
 * a new one works at once. So a caller whose reply takes long opens a new connection. If that is answered, and the old
 * one still is not, the old one is lost. A server that is stopped or unreachable answers neither. */
#include "bus/store/address.h"
#include "bus/store/protocol.h"

#include "base/descriptors.h"
#include "base/mem.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* LINGER_MS: the server removes a dead process's keys when the kernel has closed its connection, and the server is
 * scheduled. */
enum { MAX_UNSENT = 16 << 20, READ_SIZE = 1 << 16, LINGER_MS = 500 };

/* How long the connection may be silent before a new one is tried, the time in which that has to be answered, and the
 * time that the old one has then. */
enum { SILENCE_MS = 1500, TRIAL_MS = 1000, GRACE_MS = 300 };

/* One caller's request that is under way. */
typedef struct call {
    LIST_ENTRY(call) link;
    uint64_t id;
    pthread_cond_t answered;
    bool is_answered;
    uint8_t *frame; /* the reply; NULL if there was no memory for it */
    size_t nbytes;
} call;

typedef struct socket_client {
    tb__address address;
    char *token; /* NULL: this is a connection to try whether the server answers */
    _Atomic int timeout_ms;
    tb__owned_fd socket, wake;
    pthread_t thread;
    _Atomic uint64_t last_id;

    pthread_mutex_t lock; /* for all that follows */
    LIST_HEAD(call_list, call) calls;
    tb__bytes out;
    size_t nsent; /* of out */
    bool is_closing;
    bool is_lost;
    bool has_answered; /* the peer has answered like a store */
    bool is_foreign;   /* the peer has answered like another program */
    char why[256];
    bool is_trying;   /* a caller tries a new connection */
    int64_t heard_ms; /* when bytes last arrived */

    tb__bytes in; /* the thread's own */
} socket_client;

/* With the lock held. */
static void mark_lost(socket_client *c, const char *why) {
    if (c->is_lost)
        return;
    c->is_lost = true;
    snprintf(c->why, sizeof c->why, "%s", why);
    shutdown(c->socket.fd, SHUT_RDWR);
    for (call *waiting = LIST_FIRST(&c->calls); waiting; waiting = LIST_NEXT(waiting, link))
        pthread_cond_signal(&waiting->answered);
}

/* With the lock held. Sends what the socket takes without blocking. */
static void send_queued(socket_client *c) {
    while (c->nsent < c->out.count && !c->is_lost) {
        ssize_t n = send(c->socket.fd, c->out.item + c->nsent, c->out.count - c->nsent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0)
            c->nsent += (size_t)n;
        else if (errno == EAGAIN)
            return;
        else if (errno == EPIPE || errno == ECONNRESET)
            return; /* the thread still reads what the server sent before */
        else if (errno != EINTR)
            mark_lost(c, strerror(errno));
    }
    free(c->out.item);
    c->out = (tb__bytes){0};
    c->nsent = 0;
}

/* With the lock held. */
static tb_status queue_request(socket_client *c, const tb__store_message *request) {
    if (c->out.count - c->nsent > MAX_UNSENT)
        return tb__fail(TB_TIMEOUT, "%s: silent, %zu bytes wait to be sent", c->address.url, c->out.count - c->nsent);
    TB_TRY(tb__store_encode(request, &c->out));
    send_queued(c);
    if (c->out.count > 0)
        eventfd_write(c->wake.fd, 1);
    return TB_OK;
}

/* Gives a reply to its caller, if that still waits. With the lock held. */
static void deliver_reply(socket_client *c, const tb__store_message *reply, const uint8_t *frame, size_t nbytes) {
    if (reply->id == 0) { /* it is about the connection */
        char why[sizeof c->why];
        snprintf(why, sizeof why, "the server says: %.*s", (int)reply->value.nbytes, (const char *)reply->value.data);
        mark_lost(c, why);
        return;
    }
    for (call *waiting = LIST_FIRST(&c->calls); waiting; waiting = LIST_NEXT(waiting, link)) {
        if (waiting->id != reply->id || waiting->is_answered)
            continue;
        waiting->frame = tb__memdup(frame, nbytes, 1);
        waiting->nbytes = nbytes;
        waiting->is_answered = true;
        pthread_cond_signal(&waiting->answered);
        return;
    }
}

/* With the lock held. */
static void deliver_replies(socket_client *c) {
    size_t done = 0;
    while (!c->is_lost) {
        tb__store_message reply;
        size_t used;
        tb_status status = tb__store_decode(c->in.item + done, c->in.count - done, TB__STORE_MAX_REPLY, &reply, &used);
        if (status == TB_OK && used > 0 && !reply.is_reply) /* an echo server does this */
            status = tb__fail(TB_INVALID, "the server sent a request instead of a reply");
        if (status != TB_OK) {
            c->is_foreign = !c->has_answered;
            mark_lost(c, tb_error_detail());
            break;
        }
        if (used == 0)
            break;
        c->has_answered = true;
        deliver_reply(c, &reply, c->in.item + done, used);
        done += used;
    }
    if (done == 0)
        return;
    c->in.count -= done;
    if (c->in.count > 0) {
        memmove(c->in.item, c->in.item + done, c->in.count);
        return;
    }
    free(c->in.item);
    c->in = (tb__bytes){0};
}

static void receive_replies(socket_client *c) {
    uint8_t bytes[READ_SIZE];
    ssize_t n = recv(c->socket.fd, bytes, sizeof bytes, MSG_DONTWAIT);
    int error = errno;
    pthread_mutex_lock(&c->lock);
    c->heard_ms = tb__now_ms();
    if (n > 0 && tb__vec_reserve(&c->in, (size_t)n)) {
        memcpy(c->in.item + c->in.count, bytes, (size_t)n);
        c->in.count += (size_t)n;
        deliver_replies(c);
    } else if (n > 0) {
        mark_lost(c, "out of memory");
    } else if (n == 0) {
        mark_lost(c, "the server closed the connection");
    } else if (error != EAGAIN && error != EINTR) {
        mark_lost(c, strerror(error));
    }
    pthread_mutex_unlock(&c->lock);
}

static void *io_thread(void *arg) {
    socket_client *c = arg;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        bool is_over = c->is_closing || c->is_lost, has_output = c->out.count > 0;
        pthread_mutex_unlock(&c->lock);
        if (is_over)
            return NULL;
        struct pollfd fds[] = {{.fd = c->socket.fd, .events = (short)(POLLIN | (has_output ? POLLOUT : 0))},
                               {.fd = c->wake.fd, .events = POLLIN}};
        poll(fds, 2, -1);
        eventfd_t ignored;
        if (fds[1].revents)
            eventfd_read(c->wake.fd, &ignored);
        if (fds[0].revents & POLLOUT) {
            pthread_mutex_lock(&c->lock);
            send_queued(c);
            pthread_mutex_unlock(&c->lock);
        }
        if (fds[0].revents & (POLLIN | POLLHUP | POLLERR))
            receive_replies(c);
    }
}

static tb_status open_client(const tb__address *address, const char *token, bool is_trial, int64_t deadline_ms,
                             int timeout_ms, socket_client **out);
static void socket_close(void *context);

/* With the lock held, but for the attempt. The old connection is reset (SO_LINGER 0), so that none of its unsent
 * requests reaches the server after those of the next connection. */
static void probe_new_connection(socket_client *c, call *mine, int64_t deadline_ms) {
    socket_client *other;
    int64_t begun_ms = tb__now_ms(), trial_ms = begun_ms + TRIAL_MS;
    c->is_trying = true;
    pthread_mutex_unlock(&c->lock);
    tb_status status =
        open_client(&c->address, c->token, true, trial_ms < deadline_ms ? trial_ms : deadline_ms, TRIAL_MS, &other);
    if (status == TB_OK)
        socket_close(other);
    pthread_mutex_lock(&c->lock);
    struct timespec until = tb__time_of_ms(tb__now_ms() + GRACE_MS);
    while (status == TB_OK && !mine->is_answered && !c->is_lost && c->heard_ms < begun_ms &&
           pthread_cond_timedwait(&mine->answered, &c->lock, &until) != ETIMEDOUT)
        ;
    if (status == TB_OK && !mine->is_answered && !c->is_lost && c->heard_ms < begun_ms) {
        struct linger at_once = {.l_onoff = 1, .l_linger = 0};
        setsockopt(c->socket.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        mark_lost(c, "it was silent, and a new one was answered");
    }
    c->is_trying = false;
}

/* With the lock held. Until there is a reply, the connection is lost, or the time is up. */
static void await_reply(socket_client *c, call *mine, bool is_prompt, int64_t deadline_ms) {
    int64_t since_ms = tb__now_ms();
    while (!mine->is_answered && !c->is_lost && tb__now_ms() < deadline_ms) {
        int64_t silent_ms = (since_ms > c->heard_ms ? since_ms : c->heard_ms) + SILENCE_MS, until_ms = deadline_ms;
        if (is_prompt && c->token && silent_ms < deadline_ms)
            until_ms = silent_ms;
        struct timespec until = tb__time_of_ms(until_ms);
        if (pthread_cond_timedwait(&mine->answered, &c->lock, &until) != ETIMEDOUT || until_ms == deadline_ms ||
            c->heard_ms + SILENCE_MS > until_ms)
            continue;
        since_ms = tb__now_ms();
        if (!c->is_trying)
            probe_new_connection(c, mine, deadline_ms);
    }
}

/* Queues the request and sleeps. On success the reply is in `frame`, which the caller frees, and `reply` points into
 * it. */
static tb_status request_reply(socket_client *c, tb__store_message *request, int timeout_ms, tb__store_message *reply,
                               uint8_t **frame) {
    if (c->socket.fd < 0)
        return tb__fail(TB_LOST, "%s: the connection belongs to the process that opened it", c->address.url);
    int64_t deadline_ms = tb__now_ms() + timeout_ms + 1;
    bool is_prompt = request->op != TB__STORE_WAIT && request->op != TB__STORE_WAIT_CHANGE;
    call mine = {.id = atomic_fetch_add(&c->last_id, 1) + 1};
    request->id = mine.id;
    tb__monotonic_cond_init(&mine.answered);
    pthread_mutex_lock(&c->lock);
    LIST_INSERT_HEAD(&c->calls, &mine, link);
    tb_status status = c->is_lost ? TB_OK : queue_request(c, request);
    if (status == TB_OK)
        await_reply(c, &mine, is_prompt, deadline_ms);
    LIST_REMOVE(&mine, link);
    bool is_answered = mine.is_answered;
    if (status == TB_OK && !is_answered && c->is_lost) {
        status = tb__fail(TB_LOST, "%s: the connection was lost: %s", c->address.url, c->why);
    } else if (status == TB_OK && !is_answered) {
        if (!is_prompt)
            (void)queue_request(c, &(tb__store_message){.id = mine.id, .op = TB__STORE_CANCEL});
        status = tb__fail(TB_TIMEOUT, "%s: nothing within %d ms", c->address.url, timeout_ms);
    }
    pthread_mutex_unlock(&c->lock);
    pthread_cond_destroy(&mine.answered);
    if (status != TB_OK)
        return status;
    if (!mine.frame)
        return tb__fail(TB_NO_MEMORY, "no memory for a reply of %zu bytes", mine.nbytes);
    size_t used;
    status = tb__store_decode(mine.frame, mine.nbytes, TB__STORE_MAX_REPLY, reply, &used);
    if (status == TB_OK && reply->op != request->op && reply->status == TB_OK)
        status = tb__fail(TB_INTERNAL, "%s: a %s was answered as a %s", c->address.url, tb__store_op_name(request->op),
                          tb__store_op_name(reply->op));
    else if (status == TB_OK && reply->status != TB_OK)
        status = reply->status == TB_CONFLICT
                     ? TB_CONFLICT
                     : tb__fail(reply->status, "%.*s", (int)reply->value.nbytes, (const char *)reply->value.data);
    if (status == TB_OK || status == TB_CONFLICT)
        *frame = mine.frame;
    else
        free(mine.frame);
    return status;
}

static tb__span text_span(const char *text) {
    return (tb__span){.data = (const uint8_t *)text, .nbytes = strlen(text)};
}

/* For requests whose reply has a revision at most. */
static tb_status request_revision(socket_client *c, tb__store_message request, int timeout_ms, uint64_t *revision) {
    tb__store_message reply;
    uint8_t *frame;
    TB_TRY(request_reply(c, &request, timeout_ms, &reply, &frame));
    *revision = reply.revision;
    free(frame);
    return TB_OK;
}

static tb_status copy_value(const tb__store_message *reply, tb__store_value *out) {
    tb__store_value value = {.nbytes = reply->value.nbytes, .revision = reply->revision};
    if (value.revision > 0) {
        char *data = tb__malloc(value.nbytes + 1, 1);
        if (!data)
            return TB_NO_MEMORY;
        if (value.nbytes > 0)
            memcpy(data, reply->value.data, value.nbytes);
        data[value.nbytes] = '\0';
        value.data = data;
    }
    *out = value;
    return TB_OK;
}

static tb_status read_value(socket_client *c, tb__store_op op, const char *key, int timeout_ms, tb__store_value *out) {
    tb__store_message request = {.op = op, .key = text_span(key)}, reply;
    uint8_t *frame;
    TB_TRY(request_reply(c, &request, timeout_ms, &reply, &frame));
    tb_status status = copy_value(&reply, out);
    free(frame);
    return status;
}

static tb_status socket_set(void *context, const char *key, const void *data, size_t nbytes,
                            tb__store_lifetime lifetime, uint64_t *revision) {
    socket_client *c = context;
    return request_revision(c,
                            (tb__store_message){.op = TB__STORE_SET,
                                                .key = text_span(key),
                                                .value = {.data = data, .nbytes = nbytes},
                                                .lifetime = lifetime},
                            c->timeout_ms, revision);
}

static tb_status socket_get(void *context, const char *key, tb__store_value *out) {
    socket_client *c = context;
    return read_value(c, TB__STORE_GET, key, c->timeout_ms, out);
}

static tb_status socket_wait(void *context, const char *key, int timeout_ms, tb__store_value *out) {
    return read_value(context, TB__STORE_WAIT, key, timeout_ms, out);
}

static tb_status socket_compare_and_set(void *context, const char *key, uint64_t expected, const void *data,
                                        size_t nbytes, tb__store_lifetime lifetime, uint64_t *revision,
                                        tb__store_value *present) {
    socket_client *c = context;
    tb__store_message request = {.op = TB__STORE_COMPARE_AND_SET,
                                 .key = text_span(key),
                                 .revision = expected,
                                 .value = {.data = data, .nbytes = nbytes},
                                 .lifetime = lifetime};
    tb__store_message reply = {0};
    uint8_t *frame = NULL;
    tb_status status = request_reply(c, &request, c->timeout_ms, &reply, &frame);
    if (status == TB_OK) {
        *revision = reply.revision;
    } else if (status == TB_CONFLICT) {
        status = copy_value(&reply, present);
        if (status == TB_OK)
            status = reply.revision ? tb__fail(TB_CONFLICT, "its revision is %llu, not %llu",
                                               (unsigned long long)reply.revision, (unsigned long long)expected)
                                    : tb__fail(TB_CONFLICT, "there is no such key, so its revision is not %llu",
                                               (unsigned long long)expected);
    }
    free(frame);
    return status;
}

static tb_status socket_delete(void *context, const char *key) {
    socket_client *c = context;
    uint64_t revision;
    return request_revision(c, (tb__store_message){.op = TB__STORE_DELETE, .key = text_span(key)}, c->timeout_ms,
                            &revision);
}

static tb_status socket_delete_prefix(void *context, const char *prefix) {
    socket_client *c = context;
    uint64_t revision;
    return request_revision(c, (tb__store_message){.op = TB__STORE_DELETE_PREFIX, .key = text_span(prefix)},
                            c->timeout_ms, &revision);
}

/* The array of entries, then their keys and values, each with a NUL after it. */
static tb_status copy_entries(const tb__store_message *reply, tb__store_entries *out) {
    size_t count = reply->nentries;
    char *memory = tb__malloc(1, count * sizeof *out->item + reply->entries.nbytes);
    if (!memory)
        return TB_NO_MEMORY;
    *out = (tb__store_entries){.count = count, .item = (void *)memory, .revision = reply->revision};
    char *at = memory + count * sizeof *out->item;
    tb__span rest = reply->entries, key, value;
    uint64_t revision;
    for (size_t i = 0; i < count && tb__store_next_entry(&rest, &key, &revision, &value); i++) {
        memcpy(at, key.data, key.nbytes);
        at[key.nbytes] = '\0';
        char *data = at + key.nbytes + 1;
        if (value.nbytes > 0)
            memcpy(data, value.data, value.nbytes);
        data[value.nbytes] = '\0';
        out->item[i] =
            (tb__store_entry){.key = at, .value = {.data = data, .nbytes = value.nbytes, .revision = revision}};
        at = data + value.nbytes + 1;
    }
    return TB_OK;
}

static tb_status socket_list(void *context, const char *prefix, tb__store_entries *out) {
    socket_client *c = context;
    tb__store_message request = {.op = TB__STORE_LIST, .key = text_span(prefix)}, reply;
    uint8_t *frame;
    TB_TRY(request_reply(c, &request, c->timeout_ms, &reply, &frame));
    tb_status status = copy_entries(&reply, out);
    free(frame);
    return status;
}

static tb_status socket_wait_change(void *context, const char *prefix, uint64_t since, int timeout_ms,
                                    uint64_t *revision) {
    return request_revision(
        context, (tb__store_message){.op = TB__STORE_WAIT_CHANGE, .key = text_span(prefix), .revision = since},
        timeout_ms, revision);
}

static void socket_set_timeout(void *context, int timeout_ms) {
    socket_client *c = context;
    c->timeout_ms = timeout_ms;
}

static void socket_hang_up(void *context) {
    socket_client *c = context;
    if (c->socket.fd < 0)
        return;
    pthread_mutex_lock(&c->lock);
    mark_lost(c, "this side has hung up");
    pthread_mutex_unlock(&c->lock);
}

static void free_socket_client(socket_client *c) {
    tb__owned_fd_close(&c->socket);
    tb__owned_fd_close(&c->wake);
    pthread_mutex_destroy(&c->lock);
    free(c->token);
    free(c->in.item);
    free(c->out.item);
    free(c);
}

static void socket_close(void *context) {
    socket_client *c = context;
    /* A forked child has neither the thread nor the descriptors, and the memory may be in the middle of a change. */
    if (c->socket.fd < 0)
        return;
    pthread_mutex_lock(&c->lock);
    c->is_closing = true;
    pthread_mutex_unlock(&c->lock);
    eventfd_write(c->wake.fd, 1);
    pthread_join(c->thread, NULL);
    free_socket_client(c);
}

static const tb__store_ops socket_ops = {
    .set = socket_set,
    .get = socket_get,
    .wait = socket_wait,
    .compare_and_set = socket_compare_and_set,
    .delete_key = socket_delete,
    .delete_prefix = socket_delete_prefix,
    .list = socket_list,
    .wait_change = socket_wait_change,
    .set_timeout = socket_set_timeout,
    .hang_up = socket_hang_up,
    .close = socket_close,
    .linger_ms = LINGER_MS,
};

static tb_status start_client(socket_client *c, int64_t deadline_ms) {
    int fd, error, wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake < 0)
        return tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno));
    tb__owned_fd_init(&c->wake, wake);
    TB_TRY(tb__address_connect(&c->address, deadline_ms, &fd, &error));
    tb__owned_fd_init(&c->socket, fd);
    return tb__start_thread(&c->thread, "tb-store-io", io_thread, c);
}

/* Why the hello was not answered as by a store. The status stays TB_LOST: another program may listen there the next
 * time. */
static tb_status fail_hello(socket_client *c) {
    pthread_mutex_lock(&c->lock);
    bool has_answered = c->has_answered, is_foreign = c->is_foreign;
    pthread_mutex_unlock(&c->lock);
    if (is_foreign)
        return tb__fail(TB_LOST, "%s: a program that is not a tensorbus store listens there", c->address.url);
    if (has_answered)
        return TB_LOST;
    return tb__fail(TB_LOST,
                    "%s: who listens there has closed the connection without an answer: it is no tensorbus store, or "
                    "just ending",
                    c->address.url);
}

static tb_status open_client(const tb__address *address, const char *token, bool is_trial, int64_t deadline_ms,
                             int timeout_ms, socket_client **out) {
    socket_client *c = tb__calloc(1, sizeof *c);
    if (!c)
        return TB_NO_MEMORY;
    c->address = *address;
    c->timeout_ms = timeout_ms;
    c->socket.fd = c->wake.fd = -1;
    pthread_mutex_init(&c->lock, NULL);
    LIST_INIT(&c->calls);
    tb_status status = start_client(c, deadline_ms);
    if (status != TB_OK) {
        free_socket_client(c);
        return status;
    }
    uint64_t unused;
    status = request_revision(
        c, (tb__store_message){.op = TB__STORE_HELLO, .version = TB__STORE_VERSION, .value = text_span(token)},
        tb__ms_until(deadline_ms), &unused);
    if (status == TB_TIMEOUT)
        status = tb__fail(TB_TIMEOUT, "%s: silent, somebody listens there but does not answer", address->url);
    else if (status == TB_LOST)
        status = fail_hello(c);
    if (status == TB_OK && !is_trial && !(c->token = tb__strdup(token)))
        status = TB_NO_MEMORY;
    if (status != TB_OK) {
        socket_close(c);
        return status == TB_REFUSED || status == TB_DENIED ? tb__fail_within(status, "%.100s", address->url) : status;
    }
    *out = c;
    return TB_OK;
}

tb_status tb__socket_store_open(const char *url, const char *name_space, const char *token, int64_t deadline_ms,
                                int timeout_ms, const tb__store_ops **ops, void **context) {
    (void)name_space; /* it is in the keys */
    tb__address address;
    socket_client *c;
    TB_TRY(tb__address_parse(url, &address));
    if (strlen(token) > TB__STORE_MAX_TOKEN)
        return tb__fail(TB_TOO_BIG, "a token of %zu bytes; %d are allowed", strlen(token), TB__STORE_MAX_TOKEN);
    TB_TRY(open_client(&address, token, false, deadline_ms, timeout_ms, &c));
    *ops = &socket_ops;
    *context = c;
    return TB_OK;
}
