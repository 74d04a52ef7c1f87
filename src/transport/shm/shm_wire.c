/* Frames on Unix sockets of type SOCK_SEQPACKET, with file descriptors. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static void set_events(shm *s, shm_link *link, int operation) {
    struct epoll_event event = {.events = EPOLLIN | (link->wants_write ? (uint32_t)EPOLLOUT : 0), .data.ptr = link};
    epoll_ctl(s->epoll, operation, link->fd, &event);
}

tb_status shm_link_watch(shm *s, shm_link *link) {
    link->watch = WATCH_LINK;
    set_events(s, link, EPOLL_CTL_ADD);
    return TB_OK;
}

void shm_link_want_write(shm *s, shm_link *link, bool wants) {
    if (link->wants_write == wants || link->fd < 0)
        return;
    link->wants_write = wants;
    set_events(s, link, EPOLL_CTL_MOD);
}

int shm_link_try(shm_link *link, const shm_frame *frame, const struct iovec *data, size_t ndata, const int *fds,
                 size_t nfds) {
    struct iovec parts[SHM_MAX_PIECES + 1];
    parts[0] = (struct iovec){(void *)frame, sizeof *frame};
    if (ndata > SHM_MAX_PIECES || nfds > SHM_MAX_FDS)
        return EINVAL;
    if (ndata)
        memcpy(parts + 1, data, ndata * sizeof *data);
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = ndata + 1};
    union {
        char bytes[CMSG_SPACE(SHM_MAX_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    if (nfds > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(nfds * sizeof *fds);
        memset(control.bytes, 0, message.msg_controllen);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(nfds * sizeof *fds);
        memcpy(CMSG_DATA(c), fds, nfds * sizeof *fds);
    }
    ssize_t n;
    do {
        n = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n >= 0)
        return 0;
    /* ETOOMANYREFS: more descriptors are on their way than the process may have open. */
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS ? EAGAIN : errno;
}

static void close_all(const int *fds, size_t nfds) {
    for (size_t i = 0; i < nfds; i++)
        tb__fd_close(fds[i]);
}

void shm_fds_close(shm_fds *fds) {
    close_all(fds->item, fds->count);
    fds->count = 0;
}

static bool enqueue_frame(shm_link *link, const shm_frame *frame, const int *fds, size_t nfds) {
    int *copy = nfds ? tb__memdup(fds, nfds, sizeof *fds) : NULL;
    bool has_room = (copy || nfds == 0) && (link->queue_count < link->queue_capacity ||
                                            tb__vec_grow((void **)&link->queue, &link->queue_capacity,
                                                         link->queue_count + 1, sizeof *link->queue));
    if (has_room)
        link->queue[link->queue_count++] = (struct shm_queued){*frame, copy, nfds};
    else
        free(copy);
    return has_room;
}

static void free_queued(struct shm_queued *q) {
    close_all(q->fds, q->nfds);
    free(q->fds);
}

void shm_link_send(shm *s, shm_link *link, const shm_frame *frame, const int *fds, size_t nfds) {
    int error = EAGAIN;
    if (link->fd >= 0 && link->queue_count == 0)
        error = shm_link_try(link, frame, NULL, 0, fds, nfds);
    if (error == EAGAIN && link->fd >= 0 && enqueue_frame(link, frame, fds, nfds)) {
        shm_link_want_write(s, link, true);
        return;
    }
    close_all(fds, nfds);
    /* Any other error breaks the socket, which epoll reports. */
}

tb_status shm_link_send_copies(shm *s, shm_link *link, const shm_frame *frame, const int *fds, size_t nfds) {
    int copies[SHM_MAX_FDS];
    if (link->queue_count == 0 && shm_link_try(link, frame, NULL, 0, fds, nfds) == 0)
        return TB_OK;
    for (size_t i = 0; i < nfds; i++) {
        copies[i] = tb__fd_own(fcntl(fds[i], F_DUPFD_CLOEXEC, 0)); /* it may be closed before it is sent */
        if (copies[i] < 0) {
            tb_status status = tb__fail(TB_IO, "duplicating a descriptor to send: %s", tb__errno_text(errno));
            close_all(copies, i);
            return status;
        }
    }
    shm_link_send(s, link, frame, copies, nfds);
    return TB_OK;
}

void shm_link_flush(shm *s, shm_link *link) {
    size_t sent = 0;
    while (sent < link->queue_count) {
        struct shm_queued *q = &link->queue[sent];
        if (shm_link_try(link, &q->frame, NULL, 0, q->fds, q->nfds) == EAGAIN)
            break;
        free_queued(q);
        sent++;
    }
    link->queue_count -= sent;
    if (link->queue_count)
        memmove(link->queue, link->queue + sent, link->queue_count * sizeof *link->queue);
    shm_link_want_write(s, link, link->queue_count > 0);
}

void shm_link_close(shm *s, shm_link *link) {
    for (size_t i = 0; i < link->queue_count; i++)
        free_queued(&link->queue[i]);
    free(link->queue);
    link->queue = NULL;
    link->queue_count = link->queue_capacity = 0;
    if (link->fd >= 0) { /* remove it explicitly: a child being spawned may hold a copy for a moment */
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, link->fd, NULL);
        tb__fd_close(link->fd);
    }
    link->fd = -1;
}

/* The descriptors that came with a message. */
static void collect_fds(struct msghdr *message, shm_fds *fds) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); /* the buffer has room for SHM_MAX_FDS */
        memcpy(fds->item + fds->count, CMSG_DATA(c), count * sizeof(int));
        for (size_t end = fds->count + count; fds->count < end; fds->count++)
            tb__fd_mark(fds->item[fds->count]);
    }
}

ssize_t shm_link_receive(shm_link *link, shm_frame *frame, void *data, size_t room, shm_fds *fds, bool *is_empty) {
    struct iovec parts[2] = {{frame, sizeof *frame}, {data, room}};
    union {
        char bytes[CMSG_SPACE(SHM_MAX_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr message = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n;
    fds->count = 0;
    fds->is_short = false;
    tb__delay_forks();
    do {
        n = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == ECONNRESET) /* reported once, before frames that the other end has sent */
        n = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *is_empty = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (n > 0)
        collect_fds(&message, fds);
    tb__allow_forks();
    if (*is_empty)
        return 0;
    /* The kernel drops descriptors that exceed the process's limit; the frame itself is valid. */
    fds->is_short = n > 0 && message.msg_flags & MSG_CTRUNC;
    bool is_good = n >= (ssize_t)sizeof *frame && !(message.msg_flags & MSG_TRUNC);
    if (fds->is_short || !is_good)
        shm_fds_close(fds);
    return is_good ? n - (ssize_t)sizeof *frame : -1;
}
