/* UCX's TCP sockets, which it lets other programs inherit. A rank that is killed is noticed at once because the kernel
 * closes its connections; but not while a process that it has started holds them, too. So they are found, and neither
 * go with an exec nor stay open in a fork.
 *
 * They are found by when they appear: sockets of TCP that are there after UCX was called and were not before, of the
 * kind that it makes. Other threads may have made one just then; it would have to be without a delay, not blocking and
 * open to other programs to be taken for one of UCX's. Those that UCX has accepted have the port of one on which it
 * listens. One that is not found is no harm: the peer is missed a little later. */
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

/* ---- What a fork leaves alone ---------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static TB_VEC(uint64_t) known; /* by descriptor: the socket that it was; 0: none */
static int nothing = -1;       /* what a forked process has in place of it */

/* The kernel's number for a socket, which no other ever has; 0: it is none. */
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

/* The descriptors stay taken: whoever closes them for UCX would close another one's. */
static void in_fork(void) {
    for (size_t fd = 0; nothing >= 0 && fd < known.count; fd++) {
        if (known.item[fd] != 0 && known.item[fd] == number_of((int)fd))
            dup3(nothing, (int)fd, O_CLOEXEC);
    }
    pthread_mutex_unlock(&lock);
}

static void prepare(void) {
    nothing = eventfd(0, EFD_CLOEXEC);
    pthread_atfork(before_fork, after_fork, in_fork);
}

static void keep_to_ourselves(int fd) {
    pthread_once(&once, prepare);
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

/* ---- Which they are -------------------------------------------------------------------------------------------- */

static int option(int fd, int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, level, name, &value, &length) == 0 ? value : 0;
}

/* A socket of TCP that other programs inherit: its port, else 0. */
static uint16_t port_of(int fd) {
    struct sockaddr_storage name = {0};
    socklen_t length = sizeof name;
    int flags = fcntl(fd, F_GETFD);
    if (flags < 0 || flags & FD_CLOEXEC || getsockname(fd, (struct sockaddr *)&name, &length) != 0 ||
        option(fd, SOL_SOCKET, SO_PROTOCOL) != IPPROTO_TCP)
        return 0;
    return name.ss_family == AF_INET    ? ntohs(((struct sockaddr_in *)&name)->sin_port)
           : name.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&name)->sin6_port)
                                        : 0;
}

static bool is_like_ucx(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && flags & O_NONBLOCK && option(fd, IPPROTO_TCP, TCP_NODELAY);
}

/* Calls a function with each descriptor there is, but for the one that shows them. */
static void for_each(ucx *u, void (*call)(ucx *u, int fd)) {
    DIR *dir = opendir("/proc/self/fd");
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        int fd = entry->d_name[0] == '.' ? -1 : (int)strtol(entry->d_name, NULL, 10);
        if (fd >= 0 && fd != dirfd(dir))
            call(u, fd);
    }
    if (dir)
        closedir(dir);
}

static void note(ucx *u, int fd) {
    tb__vec_push(&u->descriptors, fd);
}

void ucx_sockets_look(ucx *u) {
    u->descriptors.count = 0;
    for_each(u, note);
}

static void take_new(ucx *u, int fd) {
    for (size_t i = 0; i < u->descriptors.count; i++) {
        if (u->descriptors.item[i] == fd)
            return;
    }
    uint16_t port = port_of(fd);
    bool is_listener = port && option(fd, SOL_SOCKET, SO_ACCEPTCONN);
    if (is_listener) {
        tb__vec_push(&u->ports, port);
        tb__vec_push(&u->listeners, ((ucx_listener){fd, number_of(fd)}));
    }
    if (is_listener || (port && is_like_ucx(fd)))
        keep_to_ourselves(fd);
}

void ucx_sockets_take_new(ucx *u) {
    for_each(u, take_new);
}

static void take_accepted(ucx *u, int fd) {
    uint16_t port = port_of(fd);
    for (size_t i = 0; port && i < u->ports.count; i++) {
        if (u->ports.item[i] == port) {
            keep_to_ourselves(fd);
            return;
        }
    }
}

void ucx_sockets_take_accepted(ucx *u) {
    if (u->ports.count > 0)
        for_each(u, take_accepted);
}

/* ---- When descriptors run out ----------------------------------------------------------------------------------- */

enum { LEAST_MARGIN = 4, MOST_MARGIN = 32, NEIGHBOURS = 4 };

/* The lowest free number is taken first, so those near the limit are in use when there are few left. Some program may
 * have chosen one of them; not several in a row. */
static bool is_running_out(void) {
    unsigned long long limit = tb__descriptor_limit(), margin = limit / 32;
    margin = margin < LEAST_MARGIN ? LEAST_MARGIN : margin > MOST_MARGIN ? MOST_MARGIN : margin;
    int first = (int)((limit < INT32_MAX ? limit : INT32_MAX) - margin);
    for (int fd = first; fd < first + NEIGHBOURS; fd++) {
        if (fcntl(fd, F_GETFD) < 0)
            return false;
    }
    return true;
}

/* A filter that drops all packets of a listener. The other end tries to connect again after one second, two, four ...
 */
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
        tb__shortage_note("accept a connection", EMFILE);
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
