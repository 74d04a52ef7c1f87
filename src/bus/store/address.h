/* A store's address: its parsed URL, connecting to it, listening at it. */
#ifndef TB_BUS_STORE_ADDRESS_H
#define TB_BUS_STORE_ADDRESS_H

#include "base/process.h"
#include "bus/store/store.h"

#include <sys/types.h>

struct addrinfo;

enum { TB__STORE_MAX_URL = 511 };

enum { TB__STORE_MAX_PATH = 255 };

typedef struct tb__store_url {
    char base[TB__STORE_MAX_URL + 1]; /* without what follows the '?' */
    char name_space[TB__STORE_MAX_NAMESPACE + 1];
    char ca[TB__STORE_MAX_PATH + 1];                                     /* etcd: file with the CA of its TLS, */
    char user[TB__STORE_MAX_PATH + 1], password[TB__STORE_MAX_PATH + 1]; /* and files with these; "" for none */
} tb__store_url;

tb_status tb__store_url_split(const char *url, tb__store_url *out);

/* Whether only processes of this host can connect: a Unix socket, or loopback. */
bool tb__store_url_is_local(const char *url);

typedef struct tb__address {
    char url[TB__STORE_MAX_URL + 1];
    bool is_unix;
    char path[108]; /* what a sockaddr_un holds */
    char host[256]; /* without brackets */
    char port[6];
} tb__address;

tb_status tb__address_parse(const char *base_url, tb__address *out);

/* Reads "host:port" or "[IPv6 address]:port" into the two fields; the error message does not name the URL. */
tb_status tb__host_port_parse(const char *text, tb__address *out);

/* A connected socket, non-blocking, to be closed with tb__fd_close. TB_TIMEOUT if the other side does not answer.
 * `error` is always written: the errno of connect or socket; 0 if neither failed. */
tb_status tb__address_connect(const tb__address *address, int64_t deadline_ms, int *fd, int *error);

/* Of a Unix socket: TB_DENIED if another user's process serves it. */
tb_status tb__address_check_server(const tb__address *address, int fd);

/* Disables Nagle's delay, and detects a dead peer machine within 25 seconds: by keepalives and, while sent bytes are
 * not acknowledged, when no keepalives are sent, by TCP_USER_TIMEOUT. */
void tb__set_tcp_options(int fd);

/* The addresses of a TCP host, to be freed with freeaddrinfo. A name that no server answers for is given up in time. */
tb_status tb__resolve(const tb__address *address, int64_t deadline_ms, struct addrinfo **out);

/* Whether all addresses are loopback. A name may resolve to loopback on its own machine only: Debian and Ubuntu write
 * "127.0.1.1 NAME" into /etc/hosts. */
bool tb__is_loopback(const struct addrinfo *names);

/* The first of them, without its port. */
typedef struct tb__numeric {
    char text[64];
} tb__numeric;
tb__numeric tb__numeric_of(const struct addrinfo *names);

typedef struct tb__listener {
    tb__address address; /* with the port that was chosen */
    tb__owned_fd socket; /* non-blocking */
    tb__owned_fd lock;   /* Unix sockets: path.lock, held while the server lives */
    dev_t device;        /* of the socket's file, so that only our own is removed */
    ino_t inode;
} tb__listener;

/* TB_CONFLICT if another process serves there; TB_REFUSED if the address is not this machine's, if a name for other
 * machines resolves to loopback here, or if the listener must be local and others could connect. */
tb_status tb__listener_open(const tb__address *address, bool is_local, tb__listener *out);

/* Also removes the files, unless this is a forked child. */
void tb__listener_close(tb__listener *listener);

#endif
