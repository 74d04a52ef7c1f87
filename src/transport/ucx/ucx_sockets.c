/* Keeps child processes from inheriting UCX's TCP sockets. A killed rank is noticed at once because the kernel closes
 * its connections; but not while a child process holds them, too. So these sockets get close-on-exec, and are closed in
 * forked children.
 *
 * UCX's sockets are those that appear during a call of UCX: TCP, non-blocking, TCP_NODELAY, without close-on-exec.
 * (Only a socket of another thread with the same properties could be mistaken for one.) Accepted sockets have the port
 * of one of UCX's listeners. A socket that is missed does little harm: the loss of the rank is noticed later. */
#include "transport/ucx/ucx.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- Forks ----------------------------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static TB_VEC(uint64_t) known;  /* by descriptor: cookie of the UCX socket; 0: none */
static int placeholder_fd = -1; /* replaces them in a forked child */

/* The kernel's cookie of a socket, which is never reused; 0: not a socket. */
static uint64_t number_of(int fd) {
    uint64_t number = 0;
    socklen_t length = sizeof number;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &number, &length) == 0 ? number : 0;
}

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&lock);
}

/* The descriptors stay in use: UCX's own close in the child must not close a later file. */
static void close_in_child(void) {
    for (size_t fd = 0; placeholder_fd >= 0 && fd < known.count; fd++) {
        if (known.item[fd] != 0 && known.item[fd] == number_of((int)fd))
            dup3(placeholder_fd, (int)fd, O_CLOEXEC);
    }
    pthread_mutex_unlock(&lock);
}

static void init_fork_handlers(void) {
    placeholder_fd = eventfd(0, EFD_CLOEXEC);
    pthread_atfork(before_fork, after_fork, close_in_child);
}

static void close_in_children(int fd) {
    pthread_once(&once, init_fork_handlers);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return;
    pthread_mutex_lock(&lock);
    bool has_room = true;
    while (has_room && known.count <= (size_t)fd)
        has_room = tb__vec_push(&known, 0);
    if (has_room)
        known.item[fd] = number_of(fd);
    pthread_mutex_unlock(&lock);
}

/* ---- UCX's sockets --------------------------------------------------------------------------------------------- */

static int socket_option(int fd, int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, level, name, &value, &length) == 0 ? value : 0;
}

/* The port of a TCP socket without close-on-exec; 0: it is none. */
static uint16_t port_of(int fd) {
    struct sockaddr_storage name = {0};
    socklen_t length = sizeof name;
    int flags = fcntl(fd, F_GETFD);
    if (flags < 0 || flags & FD_CLOEXEC || getsockname(fd, (struct sockaddr *)&name, &length) != 0 ||
        socket_option(fd, SOL_SOCKET, SO_PROTOCOL) != IPPROTO_TCP)
        return 0;
    return name.ss_family == AF_INET    ? ntohs(((struct sockaddr_in *)&name)->sin_port)
           : name.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&name)->sin6_port)
                                        : 0;
}

static bool is_like_ucx(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && flags & O_NONBLOCK && socket_option(fd, IPPROTO_TCP, TCP_NODELAY);
}

/* Calls a function for each open descriptor of the process. */
static void for_each_descriptor(ucx *u, void (*call)(ucx *u, int fd)) {
    DIR *dir = opendir("/proc/self/fd");
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        int fd = entry->d_name[0] == '.' ? -1 : (int)strtol(entry->d_name, NULL, 10);
        if (fd >= 0 && fd != dirfd(dir))
            call(u, fd);
    }
    if (dir)
        closedir(dir);
}

static void record_descriptor(ucx *u, int fd) {
    tb__vec_push(&u->descriptors, fd);
}

void ucx_sockets_snapshot(ucx *u) {
    u->descriptors.count = 0;
    for_each_descriptor(u, record_descriptor);
}

static void adopt_new(ucx *u, int fd) {
    for (size_t i = 0; i < u->descriptors.count; i++) {
        if (u->descriptors.item[i] == fd)
            return;
    }
    uint16_t port = port_of(fd);
    bool is_listener = port && socket_option(fd, SOL_SOCKET, SO_ACCEPTCONN);
    if (is_listener) {
        tb__vec_push(&u->ports, port);
        tb__vec_push(&u->listeners, ((ucx_listener){fd, number_of(fd)}));
    }
    if (is_listener || (port && is_like_ucx(fd)))
        close_in_children(fd);
}

void ucx_sockets_adopt_new(ucx *u) {
    for_each_descriptor(u, adopt_new);
}

static void adopt_accepted(ucx *u, int fd) {
    uint16_t port = port_of(fd);
    for (size_t i = 0; port && i < u->ports.count; i++) {
        if (u->ports.item[i] == port) {
            close_in_children(fd);
            return;
        }
    }
}

void ucx_sockets_adopt_accepted(ucx *u) {
    if (u->ports.count > 0)
        for_each_descriptor(u, adopt_accepted);
}

/* ---- Shortage of descriptors ----------------------------------------------------------------------------------- */

enum { MIN_MARGIN = 4, MAX_MARGIN = 32, NEIGHBOURS = 4 };

/* The kernel assigns the lowest free number, so if numbers near the limit are in use, few are left. A program may have
 * chosen one of them with dup2, but hardly several in a row. */
static bool is_running_out(void) {
    unsigned long long limit = tb__descriptor_limit(), margin = limit / 32;
    margin = margin < MIN_MARGIN ? MIN_MARGIN : margin > MAX_MARGIN ? MAX_MARGIN : margin;
    int first = (int)((limit < INT32_MAX ? limit : INT32_MAX) - margin);
    for (int fd = first; fd < first + NEIGHBOURS; fd++) {
        if (fcntl(fd, F_GETFD) < 0)
            return false;
    }
    return true;
}

/* Attaches a filter that drops all packets of the listener. TCP of the other end retries after 1, 2, 4 ... seconds. */
static void pause_listener(int fd, bool is_paused) {
    struct sock_filter drop_all = {.code = BPF_RET | BPF_K, .k = 0};
    struct sock_fprog program = {.len = 1, .filter = &drop_all};
    int unused = 0;
    if (is_paused)
        setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
    else
        setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused);
}

void ucx_sockets_guard(ucx *u) {
    uint64_t expirations;
    int64_t now_ms = tb__now_ms();
    if (now_ms < u->guard_again_ms)
        return;
    u->guard_again_ms = now_ms + UCX_GUARD_MS / 2;
    ssize_t unused = read(u->guard, &expirations, sizeof expirations);
    (void)unused;
    bool is_paused = is_running_out();
    if (is_paused)
        tb__shortage_record("accept a connection", EMFILE);
    for (size_t i = 0; i < u->listeners.count; i++) {
        ucx_listener *l = &u->listeners.item[i];
        if (number_of(l->fd) != l->number) {
            tb__log(TB_LOG_ERROR,
                    "ucx: process %d was out of file descriptors, and UCX has stopped listening: ranks that "
                    "have not met this one can't reach it; raise RLIMIT_NOFILE, which is %llu, and start it again",
                    (int)getpid(), tb__descriptor_limit());
            u->listeners.item[i--] = u->listeners.item[--u->listeners.count];
        } else if (is_paused != u->is_paused) {
            pause_listener(l->fd, is_paused);
        }
    }
    if (is_paused && !u->is_paused)
        tb__log(TB_LOG_WARN,
                "ucx: process %d is running out of file descriptors, its RLIMIT_NOFILE is %llu: ranks that "
                "want to connect have to wait",
                (int)getpid(), tb__descriptor_limit());
    u->is_paused = is_paused;
}
