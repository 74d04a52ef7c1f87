/* URLs, and connecting to their addresses. */
#include "bus/store/address.h"

#include "base/descriptors.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

_Static_assert(sizeof((tb__address *)0)->path == sizeof((struct sockaddr_un *)0)->sun_path,
               "a path fits a sockaddr_un");

/* One NAME=VALUE of a query. */
static tb_status read_option(const char *url, const char *text, size_t length, tb__store_url *out) {
    const struct {
        const char *name;
        char *to;
        size_t room;
    } options[] = {
        {"namespace=", out->name_space, sizeof out->name_space},
        {"ca=", out->ca, sizeof out->ca},
        {"user=", out->user, sizeof out->user},
        {"password=", out->password, sizeof out->password},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        size_t n = strlen(options[i].name);
        if (length < n || strncmp(text, options[i].name, n) != 0)
            continue;
        if (length == n || length - n >= options[i].room)
            return tb__fail(TB_INVALID, "store '%s': a %.*s has 1 to %zu bytes", url, (int)n - 1, options[i].name,
                            options[i].room - 1);
        memcpy(options[i].to, text + n, length - n);
        options[i].to[length - n] = '\0';
        return TB_OK;
    }
    return tb__fail(TB_INVALID,
                    "store '%s': only ?namespace=NAME may follow the address, and with etcd ca=FILE, user=FILE and "
                    "password=FILE, with '&' between them",
                    url);
}

tb_status tb__store_url_split(const char *url, tb__store_url *out) {
    size_t length = strcspn(url, "?");
    if (length > TB__STORE_MAX_URL)
        return tb__fail(TB_TOO_BIG, "a store's URL of %zu bytes; %d are allowed", length, TB__STORE_MAX_URL);
    *out = (tb__store_url){0};
    memcpy(out->base, url, length);
    for (const char *at = url + length; *at;) {
        at++;
        size_t n = strcspn(at, "&");
        TB_TRY(read_option(url, at, n, out));
        at += n;
    }
    if (strncmp(url, "etcd:", 5) != 0 && (*out->ca || *out->user || *out->password))
        return tb__fail(TB_INVALID, "store '%s': ca, user and password are for etcd", url);
    if (!*out->user != !*out->password)
        return tb__fail(TB_INVALID, "store '%s': user and password go together", url);
    if (*out->user && !*out->ca)
        return tb__fail(TB_INVALID, "store '%s': a password is sent over TLS only: give ca=FILE, too", url);
    return TB_OK;
}

static bool is_loopback(const char *host, size_t length) {
    static const char *const names[] = {"localhost:", "[::1]:", ":"};
    bool is_local = length > 4 && strncmp(host, "127.", 4) == 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        is_local |= length > strlen(names[i]) && strncmp(host, names[i], strlen(names[i])) == 0;
    return is_local;
}

bool tb__store_url_is_local(const char *url) {
    if (strncmp(url, "unix:", 5) == 0)
        return true;
    const char *scheme = strstr(url, "://");
    if (!scheme)
        return false;
    for (const char *at = scheme + 3;; at++) { /* etcd may have several */
        size_t length = strcspn(at, ",?");
        if (!is_loopback(at, length))
            return false;
        at += length;
        if (*at != ',')
            return true;
    }
}

/* Text behind the last colon: 0 to 65535, where 0 lets a server choose. */
static tb_status parse_port(const char *text, tb__address *out) {
    size_t ndigits = strspn(text, "0123456789");
    if (!*text)
        return tb__fail(TB_INVALID, "no port at its end");
    if (text[ndigits])
        return tb__fail(TB_INVALID, "'%.60s' is not a port, which is a number from 1 to 65535", text);
    int64_t port = 0;
    const char *at = text;
    if (!tb__read_int(&at, &port) || port > 65535)
        return tb__fail(TB_INVALID, "port %.60s is out of range: ports are 1 to 65535", text);
    snprintf(out->port, sizeof out->port, "%d", (int)port);
    return TB_OK;
}

tb_status tb__host_port_parse(const char *text, tb__address *out) {
    const char *host = text, *end, *colon;
    if (*text == '[') {
        host = text + 1;
        end = strchr(host, ']');
        if (!end)
            return tb__fail(TB_INVALID, "the bracket before the IPv6 address is not closed");
        if (end == host)
            return tb__fail(TB_INVALID, "no IPv6 address in the brackets");
        colon = end + 1;
        if (*colon && *colon != ':')
            return tb__fail(TB_INVALID, "'%.60s' follows the brackets; it must be a colon and a port", colon);
    } else {
        end = colon = strrchr(text, ':');
        if (colon && memchr(text, ':', (size_t)(colon - text)))
            return tb__fail(TB_INVALID, "an IPv6 address goes into brackets");
    }
    if (!colon || !*colon)
        return tb__fail(TB_INVALID, "no port at its end");
    TB_TRY(parse_port(colon + 1, out));
    if ((size_t)(end - host) >= sizeof out->host)
        return tb__fail(TB_TOO_BIG, "the host's name is too long");
    /* Without a host: this one, not reachable from others. */
    if (end == host)
        snprintf(out->host, sizeof out->host, "127.0.0.1");
    else
        snprintf(out->host, sizeof out->host, "%.*s", (int)(end - host), host);
    return TB_OK;
}

tb_status tb__address_parse(const char *base_url, tb__address *out) {
    tb__address address = {0};
    snprintf(address.url, sizeof address.url, "%s", base_url);
    if (strncmp(base_url, "tcp://", 6) == 0) {
        tb_status status = tb__host_port_parse(base_url + 6, &address);
        if (status != TB_OK) {
            tb__saved_detail why = tb__save_detail();
            return tb__fail(status, "store '%s': %s", base_url, why.text);
        }
    } else if (strncmp(base_url, "unix:", 5) == 0) {
        address.is_unix = true;
        const char *path = base_url + 5;
        if (!*path)
            return tb__fail(TB_INVALID, "store '%s': no path", base_url);
        if (strlen(path) >= sizeof address.path)
            return tb__fail(TB_TOO_BIG, "store '%s': a socket's path has at most %zu bytes", base_url,
                            sizeof address.path - 1);
        memcpy(address.path, path, strlen(path));
    } else {
        return tb__fail(TB_INVALID, "store '%s' is neither unix:/path/to.sock nor tcp://host:port", base_url);
    }
    *out = address;
    return TB_OK;
}

static tb_status fail_connect(const tb__address *address, int error) {
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return tb__fail(TB_IO, "%s: the socket is missing", address->url);
    case ECONNREFUSED:
        return tb__fail(TB_IO, "%s: refused, nobody listens there", address->url);
    case EAGAIN: /* a Unix socket whose backlog is full */
    case ETIMEDOUT:
        return tb__fail(TB_TIMEOUT, "%s: silent, the connection is not accepted", address->url);
    }
    return tb__fail(TB_IO, "%s: connect: %s", address->url, tb__errno_text(error));
}

static int connect_unix(int fd, const tb__address *address, int64_t deadline_ms) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path, address->path, sizeof name.sun_path);
    for (;;) {
        /* The only timeout that a connect to a full backlog knows; zero would be none. */
        long left = tb__ms_until(deadline_ms);
        struct timeval timeout = {.tv_sec = left / 1000, .tv_usec = left ? left % 1000 * 1000 : 1};
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
        if (connect(fd, (const struct sockaddr *)&name, sizeof name) == 0)
            return 0;
        if (errno != EINTR || tb__ms_until(deadline_ms) == 0)
            return errno;
    }
}

/* A port of the ephemeral range may be chosen for our own end: TCP then connects the socket to itself. */
static bool is_self_connected(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t here_length = sizeof here, there_length = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &here_length) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &there_length) == 0 && here_length == there_length &&
           memcmp(&here, &there, here_length) == 0;
}

static int connect_tcp(int fd, const struct addrinfo *name, int64_t deadline_ms) {
    if (connect(fd, name->ai_addr, name->ai_addrlen) != 0) {
        if (errno != EINPROGRESS && errno != EINTR)
            return errno;
        struct pollfd writable = {.fd = fd, .events = POLLOUT};
        int ready;
        do
            ready = poll(&writable, 1, tb__ms_until(deadline_ms));
        while (ready < 0 && errno == EINTR);
        int error = 0;
        socklen_t length = sizeof error;
        if (ready == 0)
            return ETIMEDOUT;
        if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
            return errno;
        if (error != 0)
            return error;
    }
    return is_self_connected(fd) ? ECONNREFUSED : 0;
}

void tb__set_tcp_options(int fd) {
    int on = 1, idle_s = 10, interval_s = 5, count = 3;
    /* If set, it also replaces the count: so it ends between the last probe and the end of the wait for its answer. */
    unsigned unanswered_ms = (unsigned)(idle_s + count * interval_s) * 1000 - 1000;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

tb_status tb__address_check_server(const tb__address *address, int fd) {
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (!address->is_unix)
        return TB_OK;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return tb__fail(TB_IO, "%s: SO_PEERCRED: %s", address->url, strerror(errno));
    if (peer.uid != geteuid())
        return tb__fail(TB_DENIED, "%s: served by user %u, and this is user %u", address->url, (unsigned)peer.uid,
                        (unsigned)geteuid());
    return TB_OK;
}

tb_status tb__address_connect(const tb__address *address, int64_t deadline_ms, int *fd, int *error) {
    *error = 0;
    if (address->is_unix) {
        int s = tb__fd_own(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (s < 0) {
            *error = errno;
            return tb__fail(TB_IO, "%s: socket: %s", address->url, tb__errno_text(*error));
        }
        *error = connect_unix(s, address, deadline_ms);
        if (*error) {
            tb__fd_close(s);
            return fail_connect(address, *error);
        }
        fcntl(s, F_SETFL, O_NONBLOCK);
        *fd = s;
        return TB_OK;
    }
    if (strcmp(address->port, "0") == 0)
        return tb__fail(TB_INVALID, "store '%s': port 0 is for a server to listen at", address->url);
    struct addrinfo *names;
    TB_TRY(tb__resolve(address, deadline_ms, &names));
    *error = ECONNREFUSED;
    for (const struct addrinfo *name = names; name; name = name->ai_next) {
        int s = tb__fd_own(socket(name->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        *error = s < 0 ? errno : connect_tcp(s, name, deadline_ms);
        if (*error == 0) {
            freeaddrinfo(names);
            tb__set_tcp_options(s);
            *fd = s;
            return TB_OK;
        }
        tb__fd_close(s);
    }
    freeaddrinfo(names);
    return fail_connect(address, *error);
}
