/* Serves and finds the store of a communicator. */
#include "bus/mpi/bootstrap.h"

#include "base/descriptors.h"
#include "base/index.h"
#include "base/process.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

uint64_t tb__bootstrap_machine_hash(void) {
    static const char *const namespaces[] = {"/proc/self/ns/net", "/proc/self/ns/mnt"};
    char name[128] = "";
    uint64_t hash = 1;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, name, sizeof name - 1);
        name[n > 0 ? n : 0] = '\0';
        close(fd);
    }
    if (!name[0])
        gethostname(name, sizeof name - 1);
    hash = tb__hash_string(hash, name);
    for (size_t i = 0; i < 2; i++) {
        struct stat file;
        hash = tb__hash(hash, stat(namespaces[i], &file) == 0 ? (uint64_t)file.st_ino : 0);
    }
    return hash;
}

static tb_status make_secrets(tb__bootstrap_info *out) {
    unsigned char secret[(BOOTSTRAP_SECRET - 1) / 2];
    if (getrandom(out->uid, sizeof out->uid, 0) != (ssize_t)sizeof out->uid ||
        getrandom(secret, sizeof secret, 0) != (ssize_t)sizeof secret)
        return tb__fail(TB_IO, "random numbers: %s", strerror(errno));
    for (size_t i = 0; i < sizeof secret; i++)
        snprintf(out->token + 2 * i, 3, "%02x", secret[i]);
    return TB_OK;
}

/* Addresses of this machine's interfaces that are up; loopback only if there are no others. */
static tb_status list_addresses(tb__bootstrap_info *out, const char *port, bool has_ipv6) {
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0)
        return tb__fail(TB_IO, "this host's addresses: %s", strerror(errno));
    for (int pass = 0; pass < 2; pass++) {
        for (const struct ifaddrs *at = all; at && out->naddresses < BOOTSTRAP_ADDRESSES; at = at->ifa_next) {
            bool is_loopback = at->ifa_flags & IFF_LOOPBACK;
            int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;
            if (!(at->ifa_flags & IFF_UP) || is_loopback != (pass == 1) || (pass == 1 && out->naddresses > 0))
                continue;
            struct sockaddr_storage *to = &out->addresses[out->naddresses];
            in_port_t number = htons((uint16_t)strtoul(port, NULL, 10));
            if (family == AF_INET) {
                memcpy(to, at->ifa_addr, sizeof(struct sockaddr_in));
                ((struct sockaddr_in *)to)->sin_port = number;
            } else if (family == AF_INET6 && has_ipv6 &&
                       !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)at->ifa_addr)->sin6_addr)) {
                memcpy(to, at->ifa_addr, sizeof(struct sockaddr_in6));
                ((struct sockaddr_in6 *)to)->sin6_port = number;
            } else {
                continue;
            }
            out->naddresses++;
        }
    }
    freeifaddrs(all);
    return out->naddresses ? TB_OK : tb__fail(TB_IO, "this host has no address that others could reach it by");
}

static tb_status serve_port(tb__bootstrap_info *out, tb__store_server **server) {
    bool has_ipv6 = tb__store_server_start("tcp://[::]:0", out->token, server) == TB_OK;
    if (!has_ipv6)
        TB_TRY(tb__store_server_start("tcp://0.0.0.0:0", out->token, server));
    const char *port = strrchr(tb__store_server_url(*server), ':') + 1;
    tb_status status = list_addresses(out, port, has_ipv6);
    if (status != TB_OK)
        tb__store_server_stop(*server);
    return status;
}

static tb_status serve_socket(tb__bootstrap_info *out, tb__store_server **server) {
    char url[BOOTSTRAP_URL];
    snprintf(out->folder, sizeof out->folder, "/tmp/tensorbus-mpi-XXXXXX");
    if (!mkdtemp(out->folder))
        return tb__fail(TB_IO, "%s: %s", out->folder, strerror(errno));
    snprintf(url, sizeof url, "unix:%s/s", out->folder);
    tb_status status = tb__store_server_start(url, out->token, server);
    if (status != TB_OK)
        rmdir(out->folder);
    return status;
}

tb_status tb__bootstrap_serve(const char *group, bool is_one_host, tb__bootstrap_info *out, tb__store_server **server) {
    memset(out, 0, sizeof *out);
    snprintf(out->group, sizeof out->group, "%s", group);
    TB_TRY(make_secrets(out));
    return is_one_host ? serve_socket(out, server) : serve_port(out, server);
}

static tb_status name_url(const struct sockaddr_storage *address, char url[BOOTSTRAP_URL]) {
    char host[INET6_ADDRSTRLEN + 16], port[8];
    bool is_ipv6 = address->ss_family == AF_INET6;
    int error = getnameinfo((const struct sockaddr *)address, sizeof *address, host, sizeof host, port, sizeof port,
                            NI_NUMERICHOST | NI_NUMERICSERV);
    if (error != 0)
        return tb__fail(TB_IO, "an address of the store: %s", gai_strerror(error));
    snprintf(url, BOOTSTRAP_URL, "tcp://%s%s%s:%s", is_ipv6 ? "[" : "", host, is_ipv6 ? "]" : "", port);
    return TB_OK;
}

/* Starts a non-blocking connect; -1: failed. */
static int start_connect(const struct sockaddr_storage *address) {
    int fd = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t length = address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)address, length) != 0 && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Index of the first connection that is established; -1: none in time. */
static int first_to_answer(struct pollfd *fds, size_t n, int64_t deadline_ms) {
    int left = tb__ms_until(deadline_ms);
    for (bool any = true; any && left > 0; left = tb__ms_until(deadline_ms)) {
        any = false;
        poll(fds, n, left);
        for (size_t i = 0; i < n; i++) {
            int error = 0;
            socklen_t length = sizeof error;
            if (fds[i].fd >= 0 && fds[i].revents) {
                if (getsockopt(fds[i].fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0)
                    return (int)i;
                close(fds[i].fd);
                fds[i].fd = -1;
            }
            any |= fds[i].fd >= 0;
        }
    }
    return -1;
}

tb_status tb__bootstrap_find(const tb__bootstrap_info *info, int64_t deadline_ms, char url[BOOTSTRAP_URL]) {
    if (info->folder[0]) {
        snprintf(url, BOOTSTRAP_URL, "unix:%s/s", info->folder);
        return TB_OK;
    }
    struct pollfd fds[BOOTSTRAP_ADDRESSES];
    size_t n = info->naddresses;
    for (size_t i = 0; i < n; i++)
        fds[i] = (struct pollfd){.fd = start_connect(&info->addresses[i]), .events = POLLOUT};
    int first = first_to_answer(fds, n, deadline_ms);
    for (size_t i = 0; i < n; i++) {
        if (fds[i].fd >= 0)
            close(fds[i].fd);
    }
    if (first >= 0)
        return name_url(&info->addresses[first], url);
    TB_TRY(name_url(&info->addresses[0], url));
    return tb__fail(TB_TIMEOUT, "the store of the communicator's rank 0 answers at none of its %zu addresses (%s, ...)",
                    n, url);
}

static void name_entry(const tb__bootstrap_info *info, char path[BOOTSTRAP_URL]) {
    snprintf(path, BOOTSTRAP_URL, "%s/%ld", info->folder, (long)getpid());
}

tb_status tb__bootstrap_enter_folder(const tb__bootstrap_info *info) {
    char path[BOOTSTRAP_URL];
    if (!info->folder[0])
        return TB_OK;
    name_entry(info, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return tb__fail(TB_IO, "%s: %s", path, tb__errno_text(errno));
    close(fd);
    return TB_OK;
}

void tb__bootstrap_leave_folder(const tb__bootstrap_info *info) {
    char path[BOOTSTRAP_URL];
    if (!info->folder[0])
        return;
    name_entry(info, path);
    unlink(path);
    rmdir(info->folder); /* fails while other ranks use it */
}
