/* Listening at an address, at most one server per address. For a Unix socket the lock on path.lock decides: whoever
 * holds it may remove a socket that a dead server has left behind, and nobody else touches the files. */
#include "bus/store/address.h"

#include "base/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 4096, RESOLVE_MS = 10000, PATH_SIZE = 108 + 5 };

static void lock_path(const tb__address *address, char path[PATH_SIZE]) {
    snprintf(path, PATH_SIZE, "%s.lock", address->path);
}

static bool is_same_file(int fd, const char *path) {
    struct stat held, present;
    return fstat(fd, &held) == 0 && stat(path, &present) == 0 && held.st_dev == present.st_dev &&
           held.st_ino == present.st_ino;
}

static tb_status take_lock(const tb__address *address, int *out) {
    char path[PATH_SIZE];
    lock_path(address, path);
    for (;;) {
        int fd = tb__fd_own(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (fd < 0 && errno == ENOENT)
            return tb__fail(TB_IO, "%s: the folder of this socket does not exist; make it first", address->url);
        if (fd < 0)
            return tb__fail(TB_IO, "%s: %s.lock: %s", address->url, address->path, tb__errno_text(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            int error = errno;
            tb__fd_close(fd);
            if (error == EINTR)
                continue;
            return error == EWOULDBLOCK
                       ? tb__fail(TB_CONFLICT, "%s: another process serves it", address->url)
                       : tb__fail(TB_IO, "%s: %s.lock: %s", address->url, address->path, tb__errno_text(error));
        }
        /* A server that stopped in between has removed the file: then the lock is on nothing. */
        if (is_same_file(fd, path)) {
            *out = fd;
            return TB_OK;
        }
        tb__fd_close(fd);
    }
}

/* With the lock held. A server that listens without the lock, because its lock file was deleted, is left alone. */
static tb_status remove_stale(const tb__address *address) {
    struct stat present;
    if (lstat(address->path, &present) != 0)
        return errno == ENOENT ? TB_OK : tb__fail(TB_IO, "%s: %s", address->url, strerror(errno));
    if (!S_ISSOCK(present.st_mode))
        return tb__fail(TB_INVALID, "%s: there is a file that is not a socket", address->url);
    int fd = -1, error = 0;
    tb_status status = tb__address_connect(address, tb__now_ms() + 100, &fd, &error);
    if (status == TB_OK)
        tb__fd_close(fd);
    if (tb__is_out_of_descriptors(error)) /* the error does not show whether a server is there */
        return status;
    if (error != ECONNREFUSED && error != ENOENT)
        return tb__fail(TB_CONFLICT,
                        "%s: a process listens there that does not hold %s.lock: it is not tensorbus, or its lock file "
                        "was deleted",
                        address->url, address->path);
    if (unlink(address->path) != 0 && errno != ENOENT)
        return tb__fail(TB_IO, "%s: removing the socket of a dead server: %s", address->url, strerror(errno));
    return TB_OK;
}

static tb_status bind_unix(tb__listener *listener, int fd) {
    const tb__address *address = &listener->address;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct stat made;
    memcpy(name.sun_path, address->path, sizeof name.sun_path);
    TB_TRY(remove_stale(address));
    /* The mode of the file is taken from the socket, so that it is never another, not even for a moment. */
    if (fchmod(fd, 0600) != 0 || bind(fd, (const struct sockaddr *)&name, sizeof name) != 0)
        return tb__fail(TB_IO, "%s: bind: %s", address->url, strerror(errno));
    if (listen(fd, BACKLOG) != 0 || lstat(address->path, &made) != 0) {
        tb_status status = tb__fail(TB_IO, "%s: listen: %s", address->url, strerror(errno));
        unlink(address->path);
        return status;
    }
    listener->device = made.st_dev;
    listener->inode = made.st_ino;
    return TB_OK;
}

static tb_status listen_unix(tb__listener *listener) {
    char path[PATH_SIZE];
    lock_path(&listener->address, path);
    int lock = -1;
    TB_TRY(take_lock(&listener->address, &lock));
    int fd = tb__fd_own(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    tb_status status = fd < 0 ? tb__fail(TB_IO, "%s: socket: %s", listener->address.url, tb__errno_text(errno))
                              : bind_unix(listener, fd);
    if (status != TB_OK) {
        tb__fd_close(fd);
        unlink(path);
        tb__fd_close(lock);
        return status;
    }
    tb__owned_fd_init(&listener->lock, lock);
    tb__owned_fd_init(&listener->socket, fd);
    return TB_OK;
}

static int bind_tcp(const struct addrinfo *name, int *out) {
    int fd = tb__fd_own(socket(name->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd < 0)
        return errno;
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    /* Two may bind as long as neither listens; listen then refuses the second. */
    if (bind(fd, name->ai_addr, name->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
        int error = errno;
        tb__fd_close(fd);
        return error;
    }
    *out = fd;
    return 0;
}

static tb_status name_port(tb__address *address, int fd) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    if (getsockname(fd, (struct sockaddr *)&name, &length) != 0 ||
        getnameinfo((struct sockaddr *)&name, length, NULL, 0, address->port, sizeof address->port, NI_NUMERICSERV) !=
            0)
        return tb__fail(TB_IO, "%s: which port was chosen: %s", address->url, strerror(errno));
    bool is_ipv6 = strchr(address->host, ':') != NULL;
    snprintf(address->url, sizeof address->url, "tcp://%s%s%s:%s", is_ipv6 ? "[" : "", address->host,
             is_ipv6 ? "]" : "", address->port);
    return TB_OK;
}

/* A process on another machine would resolve the name to another address. */
static tb_status check_reach(const tb__address *address, const struct addrinfo *names, bool is_local) {
    if (is_local && !tb__is_loopback(names))
        return tb__fail(TB_REFUSED,
                        "%s: a store that others than this machine can connect to needs a token: --token-file FILE, "
                        "or --insecure for a network where everybody may",
                        address->url);
    if (tb__store_url_is_local(address->url) || !tb__is_loopback(names))
        return TB_OK;
    return tb__fail(TB_REFUSED, "%s: '%s' is %s here, which no other host reaches; listen at tcp://0.0.0.0:%s",
                    address->url, address->host, tb__numeric_of(names).text, address->port);
}

static tb_status listen_tcp(tb__listener *listener, bool is_local) {
    struct addrinfo *names;
    TB_TRY(tb__resolve(&listener->address, tb__now_ms() + RESOLVE_MS, &names));
    tb_status status = check_reach(&listener->address, names, is_local);
    if (status != TB_OK) {
        freeaddrinfo(names);
        return status;
    }
    int fd = -1, error = EADDRNOTAVAIL;
    /* A taken port is not the cue to try the next address: whoever has it is the server. */
    for (const struct addrinfo *name = names; name && (error == EADDRNOTAVAIL || error == EAFNOSUPPORT);
         name = name->ai_next)
        error = bind_tcp(name, &fd);
    freeaddrinfo(names);
    const char *url = listener->address.url;
    if (error == EADDRINUSE)
        return tb__fail(TB_CONFLICT, "%s: another process serves it", url);
    if (error == EADDRNOTAVAIL)
        return tb__fail(TB_REFUSED, "%s: not an address of this host", url);
    if (error != 0)
        return tb__fail(TB_IO, "%s: listen: %s", url, tb__errno_text(error));
    status = name_port(&listener->address, fd);
    if (status != TB_OK)
        tb__fd_close(fd);
    else
        tb__owned_fd_init(&listener->socket, fd);
    return status;
}

tb_status tb__listener_open(const tb__address *address, bool is_local, tb__listener *out) {
    *out = (tb__listener){.address = *address, .socket.fd = -1, .lock.fd = -1};
    return address->is_unix ? listen_unix(out) : listen_tcp(out, is_local);
}

void tb__listener_close(tb__listener *listener) {
    if (listener->lock.fd >= 0) {
        char path[PATH_SIZE];
        struct stat present;
        if (lstat(listener->address.path, &present) == 0 && present.st_dev == listener->device &&
            present.st_ino == listener->inode)
            unlink(listener->address.path);
        lock_path(&listener->address, path);
        if (is_same_file(listener->lock.fd, path))
            unlink(path);
    }
    tb__owned_fd_close(&listener->socket);
    tb__owned_fd_close(&listener->lock);
}
