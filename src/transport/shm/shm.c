/* The shm transport: opening and closing, peers and their loss, progress. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct address {
    uint32_t magic, version;
    char name[32];
    uint64_t users; /* inode of the user namespace */
    uint64_t user;
} address;

void *shm_map_fd(int fd, size_t nbytes) {
    void *map = tb__map_shared(fd, nbytes, PROT_READ | PROT_WRITE);
    if (map)
        madvise(map, nbytes, MADV_DONTFORK); /* a child would keep pages that their owner has freed */
    return map;
}

static void wake_always(shm *s) {
    if (!s->is_woken)
        eventfd_write(s->wake, 1);
    s->is_woken = true;
}

void shm_wake(shm *s) {
    if (!s->is_progressing)
        wake_always(s);
}

void shm_finish(shm *s, shm_posted *p, tb_status status) {
    p->op->status = status;
    if (status == TB_LOST && !*p->op->why)
        snprintf(p->op->why, sizeof p->op->why, "%s", p->peer->why);
    p->state = SHM_FINISHED;
    tb__waiters_add(&s->finished, &p->waiter);
    shm_wake(s);
}

static void complete_finished(shm *s) {
    tb__waiter *w;
    while ((w = tb__waiters_take(&s->finished)))
        tb__op_complete(((shm_posted *)w)->op);
}

shm_peer *shm_find(const shm *s, int32_t rank) {
    size_t probe = 0, i;
    while ((i = tb__index_next(&s->by_rank, tb__hash(0, (uint32_t)rank), &probe)) != TB__NOWHERE) {
        if (s->peers.item[i]->rank == rank)
            return s->peers.item[i];
    }
    return NULL;
}

static void init_peer(shm *s, shm_peer *peer, int32_t rank, uint64_t number) {
    peer->owner = s;
    peer->rank = rank;
    peer->number = number;
    peer->pidfd = -1;
    peer->out = (shm_link){.watch = WATCH_LINK, .fd = -1, .peer = peer, .is_out = true};
}

static shm_peer *find_or_add(shm *s, int32_t rank) {
    shm_peer *peer = shm_find(s, rank);
    if (peer)
        return peer;
    peer = tb__calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    if (!tb__vec_reserve(&s->peers, 1) || !tb__index_add(&s->by_rank, tb__hash(0, (uint32_t)rank), s->peers.count)) {
        free(peer);
        return NULL;
    }
    s->peers.item[s->peers.count++] = peer;
    init_peer(s, peer, rank, 1);
    return peer;
}

static tb_status open_control(shm *s) {
    s->control_fd = tb__fd_own(memfd_create("tensorbus-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (s->control_fd < 0 || ftruncate(s->control_fd, sizeof *s->control) != 0 ||
        fcntl(s->control_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        return tb__fail(TB_IO, "shared memory for the control page: %s", tb__errno_text(errno));
    s->control = shm_map_fd(s->control_fd, sizeof *s->control);
    if (!s->control)
        return tb__fail(TB_IO, "mapping the control page: %s", strerror(errno));
    return getrandom(&s->control->probe, sizeof s->control->probe, 0) > 0
               ? TB_OK
               : tb__fail(TB_IO, "getrandom: %s", strerror(errno));
}

static void set_name(struct sockaddr_un *to, const char *name, socklen_t *length) {
    *to = (struct sockaddr_un){.sun_family = AF_UNIX}; /* a leading NUL: abstract namespace, no file */
    size_t n = strnlen(name, 32);
    memcpy(to->sun_path + 1, name, n);
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

static tb_status open_listener(shm *s) {
    uint64_t random[1];
    struct sockaddr_un name;
    socklen_t length;
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return tb__fail(TB_IO, "getrandom: %s", strerror(errno));
    snprintf(s->name, sizeof s->name, "tensorbus-%016" PRIx64, random[0]);
    set_name(&name, s->name, &length);
    s->listener = tb__fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (s->listener < 0 || bind(s->listener, (struct sockaddr *)&name, length) != 0 || listen(s->listener, 1024) != 0)
        return tb__fail(TB_IO, "listening on a Unix socket: %s", tb__errno_text(errno));
    return TB_OK;
}

static tb_status watch_fd(shm *s, int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    return epoll_ctl(s->epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? TB_OK : tb__fail(TB_IO, "epoll: %s", strerror(errno));
}

static uint64_t user_namespace(void) {
    struct stat info;
    return stat("/proc/self/ns/user", &info) == 0 ? info.st_ino : 0;
}

static tb_status open_resources(shm *s) {
    s->epoll = tb__fd_own(epoll_create1(EPOLL_CLOEXEC));
    s->wake = tb__fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    s->retry = tb__fd_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (s->epoll < 0 || s->wake < 0 || s->retry < 0)
        return tb__fail(TB_IO, "epoll, eventfd and timerfd: %s", tb__errno_text(errno));
    (void)tb__process_start_time(getpid(), &s->start_time);
    s->user_namespace = user_namespace();
    s->user = geteuid();
    TB_TRY(open_control(s));
    TB_TRY(open_listener(s));
    TB_TRY(watch_fd(s, s->listener, &s->listen_watch));
    TB_TRY(watch_fd(s, s->retry, &s->retry_watch));
    return watch_fd(s, s->wake, &s->wake_watch);
}

void shm_free_link(shm *s, shm_link *link) {
    shm_release_reserved(link);
    shm_link_close(s, link);
    free(link);
}

static void unmap_ring(unsigned char **ring) {
    if (*ring)
        munmap(*ring, (size_t)SHM_RING_SLOTS * SHM_RING_SLOT_SIZE);
    *ring = NULL;
}

/* Closes sockets, pidfd, rings, and descriptors that nobody has taken. */
static void close_connection(shm *s, shm_peer *peer) {
    shm_link_close(s, &peer->out);
    if (peer->in)
        shm_free_link(s, peer->in);
    peer->in = NULL;
    if (peer->pidfd >= 0) {
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, peer->pidfd, NULL);
        tb__fd_close(peer->pidfd);
    }
    peer->pidfd = -1;
    unmap_ring(&peer->ring_in);
    unmap_ring(&peer->ring_out);
    shm_sent_fds_close(peer);
}

static void free_peer(shm *s, shm_peer *peer) {
    close_connection(s, peer);
    shm_mappings_close(peer);
    if (peer->control)
        munmap(peer->control, sizeof *peer->control);
    free(peer);
}

/* Replaces a lost connection by a new one with this number, and frees the lost one unless it has remotes. NULL: no
 * memory. */
static shm_peer *replace_peer(shm *s, shm_peer *lost, uint64_t number) {
    shm_peer *peer = tb__vec_reserve(&s->retired, 1) ? tb__calloc(1, sizeof *peer) : NULL;
    if (!peer)
        return NULL;
    init_peer(s, peer, lost->rank, number);
    for (size_t i = 0; i < s->peers.count; i++) {
        if (s->peers.item[i] == lost)
            s->peers.item[i] = peer;
    }
    if (lost->nremotes > 0)
        s->retired.item[s->retired.count++] = lost;
    else
        free_peer(s, lost);
    return peer;
}

void shm_free_retired(shm *s, shm_peer *peer) {
    for (size_t i = 0; i < s->retired.count; i++) {
        if (s->retired.item[i] != peer)
            continue;
        s->retired.item[i] = s->retired.item[--s->retired.count];
        free_peer(s, peer);
        return;
    }
}

static void shm_close(void *context) {
    shm *s = context;
    for (size_t i = 0; i < s->peers.count; i++)
        shm_drop_messages(s, s->peers.item[i], TB_CANCELLED);
    complete_finished(s);
    for (size_t i = 0; i < s->peers.count; i++)
        free_peer(s, s->peers.item[i]);
    for (size_t i = 0; i < s->retired.count; i++)
        free_peer(s, s->retired.item[i]);
    free(s->retired.item);
    for (size_t i = 0; i < s->unidentified.count; i++)
        shm_free_link(s, s->unidentified.item[i]);
    free(s->unidentified.item);
    free(s->peers.item);
    tb__index_fini(&s->by_rank);
    shm_memory_close(s);
    int fds[] = {s->epoll, s->wake, s->retry, s->listener, s->control_fd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        tb__fd_close(fds[i]);
    if (s->control)
        munmap(s->control, sizeof *s->control);
    free(s);
}

static tb_status shm_open_endpoint(const tb_transport_env *env, void **context) {
    shm *s = tb__calloc(1, sizeof *s);
    if (!s)
        return TB_NO_MEMORY;
    s->env = *env;
    s->listen_watch = WATCH_LISTEN;
    s->wake_watch = WATCH_WAKE;
    s->retry_watch = WATCH_RETRY;
    s->epoll = s->wake = s->retry = s->listener = s->control_fd = -1;
    tb_status status = open_resources(s);
    if (status != TB_OK) {
        shm_close(s);
        return status;
    }
    *context = s;
    return TB_OK;
}

static tb_status shm_address(void *context, void *buffer, size_t *nbytes) {
    shm *s = context;
    address a = {.magic = SHM_MAGIC, .version = SHM_VERSION, .users = s->user_namespace, .user = s->user};
    if (*nbytes < sizeof a)
        return tb__fail(TB_TOO_BIG, "the address needs %zu bytes", sizeof a);
    memcpy(a.name, s->name, sizeof a.name);
    memcpy(buffer, &a, sizeof a);
    *nbytes = sizeof a;
    return TB_OK;
}

/* Only processes of the same user connect. User ids of different namespaces can't be compared; then accept checks them.
 */
static bool shm_reaches(void *context, const void *bytes, size_t nbytes) {
    const shm *s = context;
    address a;
    if (nbytes != sizeof a || (memcpy(&a, bytes, sizeof a), a.version != SHM_VERSION))
        return true; /* shm_connect reports the error */
    if (a.users != s->user_namespace || a.user == s->user)
        return true;
    tb__set_detail("it runs as user %" PRIu64 ", we as user %" PRIu32, a.user, s->user);
    return false;
}

static tb_status shm_connect(void *context, int32_t rank, const void *bytes, size_t nbytes) {
    shm *s = context;
    address a;
    struct sockaddr_un name;
    socklen_t length;
    if (nbytes != sizeof a || (memcpy(&a, bytes, sizeof a), a.magic != SHM_MAGIC))
        return tb__fail(TB_INVALID, "its address is not one of transport shm");
    if (a.version != SHM_VERSION)
        return tb__fail(TB_INVALID, "it speaks version %" PRIu32 " of transport shm, we %d", a.version, SHM_VERSION);
    shm_peer *peer = find_or_add(s, rank);
    if (peer && atomic_load(&peer->is_lost))
        peer = replace_peer(s, peer, peer->number + 1);
    if (!peer)
        return TB_NO_MEMORY;
    if (peer->out.fd >= 0)
        return TB_OK;
    set_name(&name, a.name, &length);
    int fd = tb__fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd < 0 || connect(fd, (struct sockaddr *)&name, length) != 0) {
        int error = errno;
        tb__fd_close(fd);
        return tb__fail(tb__is_out_of_descriptors(error) ? TB_REFUSED : TB_LOST, "connecting to its socket @%.32s: %s",
                        a.name, tb__errno_text(error));
    }
    peer->out.fd = fd;
    shm_hello hello = {.magic = SHM_MAGIC,
                       .version = SHM_VERSION,
                       .rank = s->env.rank,
                       .start_time = s->start_time,
                       .probe_address = (uint64_t)(uintptr_t)&s->control->probe,
                       .probe = s->control->probe};
    int error = shm_link_try(&peer->out, &(shm_frame){.kind = SHM_HELLO, .serial = peer->number},
                             &(struct iovec){&hello, sizeof hello}, 1, &s->control_fd, 1);
    if (error) {
        shm_link_close(s, &peer->out);
        return tb__fail(TB_LOST, "sending it a hello: %s", strerror(error));
    }
    return shm_link_watch(s, &peer->out);
}

void shm_lose(shm *s, shm_peer *peer, const char *why) {
    if (atomic_load(&peer->is_lost))
        return;
    if (why != peer->why)
        snprintf(peer->why, sizeof peer->why, "%s", why); /* before is_lost is set: other threads read it then */
    atomic_store(&peer->is_lost, true);
    tb__log(TB_LOG_INFO, "rank %" PRId32 " is lost: %s", peer->rank, why);
    shm_drop_messages(s, peer, TB_LOST);
    close_connection(s, peer);
    shm_mappings_forget(peer);
    complete_finished(s);
    if (s->env.lost)
        s->env.lost(s->env.arg, peer->rank, why);
}

static void shm_disconnect(void *context, int32_t rank, const char *why) {
    shm *s = context;
    shm_peer *peer = shm_find(s, rank);
    if (!peer || atomic_load(&peer->is_lost))
        return;
    snprintf(peer->why, sizeof peer->why, "%s",
             why); /* the caller may be in a callback of its links, so the peer is lost later */
    peer->is_ending = true;
    wake_always(s);
}

static void end_disconnected(shm *s) {
    for (size_t i = 0; i < s->peers.count; i++) {
        if (s->peers.item[i]->is_ending)
            shm_lose(s, s->peers.item[i], s->peers.item[i]->why);
    }
}

/* The connection that a hello belongs to. One with a higher number than ours replaces ours, which is lost first. NULL:
 * the hello is late. */
static shm_peer *find_connection(shm *s, int32_t rank, uint64_t number) {
    shm_peer *peer = find_or_add(s, rank);
    if (!peer || (number == peer->number && !atomic_load(&peer->is_lost)))
        return peer;
    if (number <= peer->number)
        return NULL;
    if (peer->out.fd < 0 && !peer->in && !atomic_load(&peer->is_lost)) { /* not connected yet */
        peer->number = number;
        return peer;
    }
    shm_lose(s, peer, "it has begun a new connection");
    return replace_peer(s, peer, number);
}

/* Opens a pidfd of the peer, and tests whether its memory can be read. False: errno says why. */
static bool open_peer_process(shm *s, shm_peer *peer, int fd, const shm_hello *hello) {
    struct ucred who;
    socklen_t length = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0)
        return false;
    if (who.uid != geteuid()) {
        errno = EPERM;
        return false;
    }
    peer->pid = who.pid;
    bool is_here = who.pid == getpid(); /* it ends with this process, or closes its socket */
    peer->pidfd = who.pid > 0 && !is_here ? tb__fd_own((int)syscall(SYS_pidfd_open, who.pid, 0)) : -1;
    if (peer->pidfd < 0 && !is_here && tb__is_out_of_descriptors(errno))
        return false;
    if (peer->pidfd < 0 && !is_here)
        return true; /* another pid namespace: only the socket shows its end, and its memory can't be read */
    peer->watch = WATCH_PROCESS;
    if (peer->pidfd >= 0 && watch_fd(s, peer->pidfd, peer) != TB_OK)
        return false;
    uint64_t probe = 0, started = 0;
    struct iovec here = {&probe, sizeof probe};
    struct iovec there = {(void *)(uintptr_t)hello->probe_address, sizeof probe}; // NOLINT(performance-no-int-to-ptr)
    if (is_here)
        started = s->start_time; /* reading it takes as long as the process has threads */
    else
        (void)tb__process_start_time(who.pid, &started);
    peer->can_read = started == hello->start_time &&
                     process_vm_readv(who.pid, &here, 1, &there, 1, 0) == sizeof probe && probe == hello->probe;
    return true;
}

static bool is_control_page(int fd) {
    struct stat info;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && seals & F_SEAL_SHRINK && fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(shm_control);
}

static void remove_unidentified(shm *s, const shm_link *link) {
    for (size_t i = 0; i < s->unidentified.count; i++) {
        if (s->unidentified.item[i] == link)
            s->unidentified.item[i] = s->unidentified.item[--s->unidentified.count];
    }
}

/* The first frame of an accepted link. */
static bool on_hello(shm *s, shm_link *link, const shm_frame *frame, const unsigned char *data, size_t nbytes, int fd) {
    shm_hello hello;
    if (frame->kind != SHM_HELLO || nbytes != sizeof hello || fd == -1)
        return false;
    memcpy(&hello, data, sizeof hello);
    if (hello.magic != SHM_MAGIC || hello.version != SHM_VERSION || hello.rank < 0)
        return false;
    if (fd >= 0 && !is_control_page(fd))
        return false;
    shm_peer *peer = find_connection(s, hello.rank, frame->serial > 1 ? frame->serial : 1);
    if (!peer || peer->in)
        return false;
    shm_control *control = fd >= 0 ? shm_map_fd(fd, sizeof *control) : NULL;
    errno = fd >= 0 ? errno : EMFILE;
    if (!control || !open_peer_process(s, peer, link->fd, &hello)) {
        tb__log(TB_LOG_WARN, "rank %" PRId32 " can't connect: %s", hello.rank, tb__errno_text(errno));
        if (tb__is_out_of_descriptors(errno))
            shm_tell_shortage(s, link);
        if (control)
            munmap(control, sizeof *control);
        return false;
    }
    peer->control = control;
    remove_unidentified(s, link);
    link->peer = peer;
    peer->in = link;
    shm_link_send(s, link, &(shm_frame){.kind = SHM_WELCOME, .serial = peer->can_read}, NULL, 0);
    if (s->env.reached)
        s->env.reached(s->env.arg, peer->rank);
    return true;
}

/* Handles frames that are still in the socket. A frame may lose the peer, which closes the link. */
static void read_remaining_frames(shm *s, shm_peer *peer, bool is_out) {
    unsigned char data[SHM_MAX_FRAME];
    for (bool is_good = true; is_good;) {
        shm_link *link = is_out ? &peer->out : peer->in;
        shm_frame frame = {0};
        bool is_empty;
        shm_fds fds;
        if (!link || link->fd < 0)
            return;
        ssize_t n = shm_link_receive(link, &frame, data, sizeof data, &fds, &is_empty);
        is_good = !is_empty && n >= 0 && shm_on_frame(s, link, &frame, data, (size_t)n, &fds);
        shm_fds_close(&fds);
    }
}

/* The peer is gone. Frames that it sent before are handled first, such as SHM_DONE or SHM_SHORTAGE, and receives
 * completed. */
static void finish_peer(shm *s, shm_peer *peer, const char *why) {
    read_remaining_frames(s, peer, false);
    read_remaining_frames(s, peer, true);
    complete_finished(s);
    shm_lose(s, peer, why);
}

/* Handles frames of one link, a bounded number for fairness. */
static void read_link(shm *s, shm_link *link) {
    unsigned char data[SHM_MAX_FRAME];
    for (int i = 0; i < 64; i++) {
        shm_frame frame = {0};
        bool is_empty;
        shm_fds fds;
        shm_peer *peer = link->peer;
        if (!peer)
            shm_release_reserved(link);
        ssize_t n = shm_link_receive(link, &frame, data, sizeof data, &fds, &is_empty);
        if (is_empty)
            return;
        bool is_good = n >= 0 && (peer ? shm_on_frame(s, link, &frame, data, (size_t)n, &fds)
                                       : on_hello(s, link, &frame, data, (size_t)n, shm_fds_only(&fds)));
        shm_fds_close(&fds);
        if (is_good)
            continue;
        tb__saved_detail why = tb__save_detail();
        if (!peer) {
            remove_unidentified(s, link);
            shm_free_link(s, link);
        } else if (n < 0) {
            finish_peer(s, peer, "its connection ended");
        } else {
            shm_lose(s, peer, why.text);
        }
        return;
    }
}

static void on_event(shm *s, const struct epoll_event *event) {
    shm_watch_kind *kind = event->data.ptr;
    shm_link *link = event->data.ptr;
    eventfd_t unused;
    switch (*kind) {
    case WATCH_LISTEN:
        shm_accept(s);
        break;
    case WATCH_WAKE:
        eventfd_read(s->wake, &unused);
        s->is_woken = false;
        break;
    case WATCH_RETRY:
        shm_retry(s);
        break;
    case WATCH_PROCESS:
        finish_peer(s, event->data.ptr, "its process ended");
        break;
    case WATCH_LINK:
        if (event->events & EPOLLOUT) {
            shm_link_flush(s, link);
            if (link->is_out && link->queue_count == 0)
                shm_send_queued(s, link->peer);
        }
        if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            read_link(s, link);
        break;
    }
}

static tb_status shm_progress(void *context) {
    shm *s = context;
    struct epoll_event event; /* one at a time: handling one may close the descriptor of another */
    s->is_progressing = true;
    for (int i = 0; i < 256 && epoll_wait(s->epoll, &event, 1, 0) == 1; i++)
        on_event(s, &event);
    end_disconnected(s);
    bool more = shm_read_slices(s);
    s->is_progressing = false; /* those that hear of the end of an operation may begin others */
    complete_finished(s);
    if (more)
        shm_wake(s);
    return TB_OK;
}

static tb_status shm_post(void *context, tb_op *op) {
    shm *s = context;
    shm_peer *peer = op->kind == TB_OP_RECV ? find_or_add(s, op->peer) : shm_find(s, op->peer);
    if (!peer || atomic_load(&peer->is_lost) || (op->kind == TB_OP_SEND && peer->out.fd < 0))
        return tb__fail(TB_LOST, "%s", peer && peer->is_lost ? peer->why : "it is not connected");
    return shm_post_message(s, peer, op);
}

static void shm_cancel(void *context, tb_op *op) {
    if (op->state)
        shm_cancel_message(context, op->state);
}

static int shm_fd(void *context) {
    return ((shm *)context)->epoll;
}

const tb_transport_ops tb__shm_ops = {
    .size = sizeof tb__shm_ops,
    .name = "shm",
    .reports_strangers = true,
    .memory = 1U << TB_MEM_HOST,
    .is_local = true,
    .open = shm_open_endpoint,
    .close = shm_close,
    .address = shm_address,
    .reaches = shm_reaches,
    .connect = shm_connect,
    .mem_register = shm_register,
    .mem_unregister = shm_unregister,
    .mem_export = shm_export,
    .mem_import = shm_import_key,
    .mem_release = shm_release,
    .mem_map = shm_map,
    .mem_is_valid = shm_is_valid,
    .mem_read = shm_read,
    .post = shm_post,
    .cancel = shm_cancel,
    .progress = shm_progress,
    .fd = shm_fd,
    .disconnect = shm_disconnect,
    .fd_send = shm_send_fds,
    .fd_take = shm_take_fds,
};
