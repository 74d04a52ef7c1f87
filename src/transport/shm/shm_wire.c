/* Frames on Unix sockets of type SOCK_SEQPACKET, with file descriptors. */
#include "transport/shm/shm.h"

#include <errno.h>
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

int shm_link_try(shm_link *link, const shm_frame *frame, const struct iovec *data, size_t ndata, int fd) {
    struct iovec parts[SHM_MAX_PIECES + 1];
    parts[0] = (struct iovec){(void *)frame, sizeof *frame};
    if (ndata > SHM_MAX_PIECES)
        return EINVAL;
    if (ndata)
        memcpy(parts + 1, data, ndata * sizeof *data);
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = ndata + 1};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t n;
    do {
        n = sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n >= 0)
        return 0;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? EAGAIN : errno;
}

static bool enqueue_frame(shm_link *link, const shm_frame *frame, int fd) {
    if (link->queue_count == link->queue_capacity &&
        !tb__vec_grow((void **)&link->queue, &link->queue_capacity, link->queue_count + 1, sizeof *link->queue))
        return false;
    link->queue[link->queue_count++] = (struct shm_queued){*frame, fd};
    return true;
}

void shm_link_send(shm *s, shm_link *link, const shm_frame *frame, int fd) {
    int error = EAGAIN;
    if (link->fd >= 0 && link->queue_count == 0)
        error = shm_link_try(link, frame, NULL, 0, fd);
    if (error == EAGAIN && link->fd >= 0 && enqueue_frame(link, frame, fd)) {
        shm_link_want_write(s, link, true);
        return;
    }
    if (fd >= 0)
        close(fd);
    /* Any other error breaks the socket, which epoll reports. */
}

void shm_link_flush(shm *s, shm_link *link) {
    size_t sent = 0;
    while (sent < link->queue_count) {
        struct shm_queued *q = &link->queue[sent];
        if (shm_link_try(link, &q->frame, NULL, 0, q->fd) == EAGAIN)
            break;
        if (q->fd >= 0)
            close(q->fd);
        sent++;
    }
    link->queue_count -= sent;
    if (link->queue_count)
        memmove(link->queue, link->queue + sent, link->queue_count * sizeof *link->queue);
    shm_link_want_write(s, link, link->queue_count > 0);
}

void shm_link_close(shm *s, shm_link *link) {
    for (size_t i = 0; i < link->queue_count; i++) {
        if (link->queue[i].fd >= 0)
            close(link->queue[i].fd);
    }
    free(link->queue);
    link->queue = NULL;
    link->queue_count = link->queue_capacity = 0;
    if (link->fd >= 0) { /* remove it explicitly: a child being spawned may hold a copy for a moment */
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, link->fd, NULL);
        tb__fd_close(link->fd);
    }
    link->fd = -1;
}

ssize_t shm_link_receive(shm_link *link, shm_frame *frame, void *data, size_t room, int *fd, bool *is_empty) {
    struct iovec parts[2] = {{frame, sizeof *frame}, {data, room}};
    union {
        char bytes[CMSG_SPACE(4 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr message = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n;
    *is_empty = false;
    *fd = -1;
    do {
        n = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == ECONNRESET) /* reported once, before frames that the other end has sent */
        n = recvmsg(link->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        *is_empty = true;
        return 0;
    }
    /* The kernel drops descriptors that exceed the process's limit; the frame itself is valid. */
    bool is_short = message.msg_flags & MSG_CTRUNC && n > 0 && !CMSG_FIRSTHDR(&message);
    bool is_good = n >= (ssize_t)sizeof *frame && !(message.msg_flags & MSG_TRUNC) &&
                   (is_short || !(message.msg_flags & MSG_CTRUNC));
    for (struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&message) : NULL; c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) { /* one is expected; others are closed */
            int got;
            memcpy(&got, CMSG_DATA(c) + i * sizeof got, sizeof got);
            if (is_good && *fd < 0)
                *fd = got;
            else
                close(got);
        }
    }
    if (is_short)
        *fd = SHM_FD_LOST;
    return is_good ? n - (ssize_t)sizeof *frame : -1;
}
