/* A connection to a store's server or an agent: its frames, and the threads that wait for them. */
#include "bus/client/link.h"

#include "base/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

enum { READ_BYTES = 64 << 10, FDS_AT_ONCE = 250 };

void tb__link_lock(tb__link *l) {
    pthread_mutex_lock(&l->lock);
    l->is_locked = true;
}

void tb__link_unlock(tb__link *l) {
    l->is_locked = false;
    pthread_mutex_unlock(&l->lock);
}

void tb__link_break(tb__link *l, const char *why) {
    if (l->broken != TB_OK)
        return;
    l->broken = TB_LOST;
    snprintf(l->why, sizeof l->why, "%s%s: %s", l->name, l->is_gone, why);
    shutdown(l->socket.fd, SHUT_WR); /* so that the peer, if it lives, cancels its work for this process */
    pthread_cond_broadcast(&l->changed);
}

static tb_status check_connected(const tb__link *l) {
    return l->broken == TB_OK ? TB_OK : tb__fail(l->broken, "%s", l->why);
}

static tb_status break_and_fail(tb__link *l, const char *why) {
    tb__link_break(l, why);
    return check_connected(l);
}

/* An agent closes a connection when it does not use the client's memory any more. */
static tb_status fail_over(tb__link *l, const char *why) {
    l->is_over = true;
    return break_and_fail(l, why);
}

void tb__link_reply_free(tb__link_reply *reply) {
    if (!reply)
        return;
    tb__arena_fini(&reply->arena);
    free(reply->frame);
    free(reply);
}

static bool is_dropped(tb__link *l, uint64_t seq) {
    for (size_t i = 0; i < l->dropped.count; i++) {
        if (l->dropped.item[i] == seq) {
            l->dropped.item[i] = l->dropped.item[--l->dropped.count];
            return true;
        }
    }
    return false;
}

static tb_status keep_reply(tb__link *l, tb__blob frame) {
    bool is_reply = false;
    tb__link_reply *r = tb__calloc(1, sizeof *r);
    if (!r)
        return TB_NO_MEMORY;
    r->frame = tb__memdup(frame.data, frame.nbytes, 1);
    tb_status status = r->frame ? l->read(l, (tb__blob){r->frame, frame.nbytes}, r, &is_reply) : TB_NO_MEMORY;
    if (status != TB_OK || !is_reply || is_dropped(l, r->seq)) {
        tb__link_reply_free(r);
        return status;
    }
    r->next = l->replies;
    l->replies = r;
    return TB_OK;
}

tb__link_reply *tb__link_take_reply(tb__link *l, uint64_t seq) {
    for (tb__link_reply **at = &l->replies; *at; at = &(*at)->next) {
        if ((*at)->seq == seq) {
            tb__link_reply *found = *at;
            *at = found->next;
            return found;
        }
    }
    return NULL;
}

void tb__link_drop_reply(tb__link *l, uint64_t seq) {
    tb__link_reply *reply = tb__link_take_reply(l, seq);
    tb__link_reply_free(reply);
    if (!reply && l->broken == TB_OK)
        (void)tb__vec_push(&l->dropped, seq); /* without memory for it, the reply is kept */
}

/* Handles all frames that have arrived. One for which there is no memory is handled the next time. */
static void handle_frames(tb__link *l) {
    tb__blob frame;
    bool has_frame = true;
    l->lacks_memory = false;
    while (has_frame && !l->lacks_memory) {
        tb_status status = tb__frame_next(&l->in, &frame, &has_frame);
        if (status == TB_OK && has_frame)
            status = keep_reply(l, frame);
        if (status == TB_OK || l->broken != TB_OK)
            continue;
        if (status == TB_NO_MEMORY) {
            l->in.taken -= TB__FRAME_HEADER + frame.nbytes;
            l->lacks_memory = true;
            return;
        }
        l->is_malformed = status != TB_LOST;
        tb__link_break(l, tb_error_detail());
    }
}

static bool find_room(tb__link *l, uint8_t **room, size_t *nbytes) {
    *nbytes = READ_BYTES;
    if (l->lacks_memory)
        handle_frames(l);
    l->lacks_memory |= tb__frame_room(&l->in, room, nbytes) != TB_OK;
    return !l->lacks_memory;
}

/* Handles what recv has read into the room, or its error. Returns whether it was as much as there was room for. */
static bool handle_received(tb__link *l, ssize_t n, size_t nbytes, int error) {
    tb__frame_filled(&l->in, n > 0 ? (size_t)n : 0);
    if (n > 0) {
        l->heard_ms = tb__now_ms();
        handle_frames(l);
    } else if (n == 0 || (error != EAGAIN && error != EWOULDBLOCK && error != EINTR)) {
        (void)fail_over(l, n == 0 ? "it has closed the connection" : strerror(error));
    }
    return n > 0 && (size_t)n == nbytes;
}

/* Receives all bytes that have arrived. After a loss it goes on, to find the end of the connection. */
static void receive_all(tb__link *l) {
    uint8_t *room;
    size_t nbytes;
    bool has_more = true;
    while (has_more && find_room(l, &room, &nbytes)) {
        ssize_t n = recv(l->socket.fd, room, nbytes, MSG_DONTWAIT);
        has_more = handle_received(l, n, nbytes, errno);
    }
}

void tb__link_let_block(tb__link *l) {
    struct timeval longest = {.tv_usec = TB__LINK_RECV_MS * 1000L};
    int flags = fcntl(l->socket.fd, F_GETFL);
    l->may_block = flags >= 0 && setsockopt(l->socket.fd, SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest) == 0 &&
                   fcntl(l->socket.fd, F_SETFL, flags & ~O_NONBLOCK) == 0;
}

/* Sleeps in recv: that is one system call less than poll and recv. Nothing but the socket ends it. False: nothing came
 * in TB__LINK_RECV_MS. */
static bool receive_briefly(tb__link *l) {
    uint8_t *room;
    size_t nbytes;
    if (!find_room(l, &room, &nbytes))
        return false;
    l->is_reading = true;
    tb__link_unlock(l);
    ssize_t n = recv(l->socket.fd, room, nbytes, 0);
    int error = errno;
    tb__link_lock(l);
    if (handle_received(l, n, nbytes, error))
        receive_all(l);
    l->is_reading = false;
    if (n >= 0 || l->is_over)
        pthread_cond_broadcast(&l->changed);
    return n >= 0 || l->is_over;
}

/* Sleeps until something has arrived, and handles it. Without the lock while it sleeps. */
static void read_once(tb__link *l, int64_t deadline_ms) {
    if (l->may_block && l->wake < 0 && !l->lacks_memory && tb__ms_until(deadline_ms) > TB__LINK_RECV_MS &&
        receive_briefly(l))
        return;
    struct pollfd fds[] = {
        {.fd = l->socket.fd, .events = POLLIN}, {.fd = l->pidfd, .events = POLLIN}, {.fd = l->wake, .events = POLLIN}};
    int sleep_ms = l->lacks_memory ? 0 : tb__ms_until(deadline_ms);
    l->is_reading = true;
    tb__link_unlock(l);
    int n = poll(fds, 3, sleep_ms);
    tb__link_lock(l);
    if (n > 0 && fds[2].revents) {
        eventfd_t unused;
        eventfd_read(l->wake, &unused);
    }
    if (n > 0 || l->lacks_memory)
        receive_all(l); /* frames that arrived before the end count */
    if (n > 0 && fds[1].revents)
        (void)fail_over(l, "its process has ended");
    l->is_reading = false;
    pthread_cond_broadcast(&l->changed);
}

static void sleep_until_changed(tb__link *l, int64_t deadline_ms) {
    int64_t longest_ms = tb__now_ms() + (1 << 30);
    struct timespec until = tb__time_of_ms(deadline_ms < longest_ms ? deadline_ms : longest_ms);
    l->is_locked = false;
    pthread_cond_timedwait(&l->changed, &l->lock, &until);
    l->is_locked = true;
}

_Thread_local const atomic_bool *tb__link_cancelled;

tb_status tb__link_wait(tb__link *l, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms, const char *what) {
    for (bool has_looked = false; !is_true(arg); has_looked = true) {
        TB_TRY(check_connected(l));
        if (tb__link_cancelled && atomic_load(tb__link_cancelled))
            return tb__fail(TB_CANCELLED, "the call was given up before %s had %s", l->name, what);
        if (has_looked && l->lacks_memory)
            return tb__fail(TB_NO_MEMORY, "no memory for a frame of %s", l->name);
        if (has_looked && tb__now_ms() >= deadline_ms)
            return tb__fail(TB_TIMEOUT, "%s is silent: it has not %s in time", l->name, what);
        if (l->is_reading)
            sleep_until_changed(l, deadline_ms);
        else
            read_once(l, deadline_ms);
    }
    return TB_OK;
}

void tb__link_await_end(tb__link *l) {
    tb__link_break(l, "there is no memory for its frame");
    while (l->broken != TB_OK && !l->is_over) {
        if (l->is_reading)
            sleep_until_changed(l, INT64_MAX);
        else
            read_once(l, INT64_MAX);
    }
}

void tb__link_step(tb__link *l) {
    if (l->is_reading || l->is_over)
        sleep_until_changed(l, INT64_MAX);
    else
        read_once(l, INT64_MAX);
}

void tb__link_sleep(tb__link *l) {
    sleep_until_changed(l, INT64_MAX);
}

void tb__link_wake(tb__link *l) {
    if (l->wake >= 0)
        eventfd_write(l->wake, 1);
    pthread_cond_broadcast(&l->changed);
}

/* Whether sending has failed because the connection is shut, by the peer or by this process. */
static bool is_shut(int error) {
    return error == EPIPE || error == ECONNRESET || error == ENOTCONN;
}

/* Sends some bytes, with some descriptors. Without the lock: *lost is why it could not. */
static tb_status send_piece(const tb__link *l, const uint8_t *data, size_t nbytes, const int *fds, size_t nfds,
                            int64_t deadline_ms, size_t *sent, int *lost) {
    union {
        char bytes[CMSG_SPACE(FDS_AT_ONCE * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec piece = {(void *)(uintptr_t)data, nbytes};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (nfds > 0) {
        memset(&control, 0, CMSG_SPACE(nfds * sizeof *fds));
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(nfds * sizeof *fds);
        memcpy(CMSG_DATA(header), fds, nfds * sizeof *fds);
    }
    for (;;) {
        ssize_t n = nfds > 0 ? sendmsg(l->socket.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                             : send(l->socket.fd, data, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            *sent = (size_t)n;
            return TB_OK;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            *lost = errno;
            return TB_LOST;
        }
        struct pollfd room[] = {{.fd = l->socket.fd, .events = POLLOUT}, {.fd = l->pidfd, .events = POLLIN}};
        if (poll(room, 2, tb__ms_until(deadline_ms)) > 0 && room[1].revents) {
            *lost = EPIPE;
            return TB_LOST;
        }
        if (tb__now_ms() >= deadline_ms)
            return tb__fail(TB_TIMEOUT, "%s is silent: it has not taken a command in time", l->name);
    }
}

/* All descriptors go with the frame's first bytes: if they are more than one message takes, one byte goes with each
 * message but the last. *at is how much was sent. */
static tb_status send_bytes(const tb__link *l, const tb__bytes *frame, const int *fds, size_t nfds, int64_t deadline_ms,
                            size_t *at, int *lost) {
    while (*at < frame->count) {
        size_t n = nfds < FDS_AT_ONCE ? nfds : FDS_AT_ONCE, sent = 0;
        TB_TRY(send_piece(l, frame->item + *at, nfds > n ? 1 : frame->count - *at, fds, n, deadline_ms, &sent, lost));
        *at += sent;
        fds = n > 0 ? fds + n : fds; /* it may be NULL */
        nfds -= n;
    }
    return TB_OK;
}

/* Keeps unsent bytes: of the rest of an earlier frame, or of this one. */
static tb_status keep_unsent(tb__bytes *rest, size_t nrest, const tb__bytes *frame, size_t nsent) {
    size_t left = nsent > 0 ? frame->count - nsent : 0;
    rest->count -= nrest;
    if (rest->count > 0)
        memmove(rest->item, rest->item + nrest, rest->count);
    if (left == 0)
        return TB_OK;
    if (!tb__vec_reserve(rest, left))
        return TB_NO_MEMORY;
    memcpy(rest->item + rest->count, frame->item + nsent, left);
    rest->count += left;
    return TB_OK;
}

tb_status tb__link_send(tb__link *l, const tb__bytes *frame, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq) {
    size_t nrest = 0, nsent = 0;
    int lost = 0;
    while (l->is_sending && l->broken == TB_OK) {
        if (tb__now_ms() >= deadline_ms)
            return tb__fail(TB_TIMEOUT, "%s is silent: it has not taken a command in time", l->name);
        sleep_until_changed(l, deadline_ms);
    }
    TB_TRY(check_connected(l));
    if (seq)
        *seq = l->nframes;
    l->nframes++;
    l->is_sending = true;
    tb__link_unlock(l);
    tb_status status = send_bytes(l, &l->unsent, NULL, 0, deadline_ms, &nrest, &lost);
    if (status == TB_OK)
        status = send_bytes(l, frame, fds, nfds, deadline_ms, &nsent, &lost);
    tb__link_lock(l);
    l->is_sending = false;
    l->nframes -= status != TB_OK;
    pthread_cond_broadcast(&l->changed);
    if (lost && !l->is_reading)
        receive_all(l); /* replies sent before the end are valid; they are complete when nothing is left */
    if (lost && (is_shut(lost) || nrest + nsent > 0))
        return break_and_fail(l, strerror(lost));
    if (lost) /* a descriptor that can't be sent, or no memory */
        return tb__fail(TB_IO, "%s: a frame can't be sent: %s", l->name, strerror(lost));
    if (nsent > 0 && nsent < frame->count && !l->keeps_unsent) /* half a frame was sent: no other frame can follow */
        return break_and_fail(l, "it does not read its frames");
    if (l->keeps_unsent && keep_unsent(&l->unsent, nrest, frame, nsent) != TB_OK)
        return break_and_fail(l, "there is no memory for the unsent rest of a frame");
    return status;
}

tb_status tb__link_create(const char *name, const char *is_gone, tb__link **out) {
    tb__link *l = tb__calloc(1, sizeof *l);
    if (!l)
        return TB_NO_MEMORY;
    l->socket.fd = l->pidfd = l->wake = -1;
    l->is_gone = is_gone;
    tb__owner_init(&l->owner);
    pthread_mutex_init(&l->lock, NULL);
    tb__monotonic_cond_init(&l->changed);
    l->name = tb__strdup(name);
    if (!l->name) {
        tb__link_close(l);
        return TB_NO_MEMORY;
    }
    *out = l;
    return TB_OK;
}

tb_status tb__link_watch_wake(tb__link *l) {
    if (l->wake < 0)
        l->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    return l->wake < 0 ? tb__fail(TB_IO, "eventfd: %s", tb__errno_text(errno)) : TB_OK;
}

void tb__link_close(tb__link *l) {
    if (!l)
        return;
    tb__owned_fd_close(&l->socket);
    if (!tb__is_inherited(&l->owner)) { /* a forked child has closed them, and its locks may be in use */
        tb__fd_close(l->pidfd);
        tb__fd_close(l->wake);
        pthread_mutex_destroy(&l->lock);
        pthread_cond_destroy(&l->changed);
    }
    while (l->replies) {
        tb__link_reply *next = l->replies->next;
        tb__link_reply_free(l->replies);
        l->replies = next;
    }
    tb__frame_reader_fini(&l->in);
    free(l->dropped.item);
    free(l->group);
    free(l->unsent.item);
    free(l->name);
    free(l);
}
