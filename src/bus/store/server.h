/* The embedded store server: one thread of the calling process that sleeps in epoll and serves the clients of store.h.
 *
 * Client and server prove to each other that they have the token (base/proof.h); on a Unix socket the client must be a
 * process of the same user. The
 * server's memory for a client is bounded, and no client can starve another. A malformed request ends the connection.
 */
#ifndef TB_BUS_STORE_SERVER_H
#define TB_BUS_STORE_SERVER_H

#include "bus/store/store.h"

typedef struct tb__store_server tb__store_server;

/* Listens at the URL; a namespace in it is ignored. TB_CONFLICT if another process serves there; TB_REFUSED without a
 * token if others than this machine can connect. The socket of a dead server is replaced. */
TB_API tb_status tb__store_server_start(const char *url, const char *token, tb__store_server **out);

/* Without a token, for everybody who can connect. */
TB_API tb_status tb__store_server_start_insecure(const char *url, tb__store_server **out);

/* Zero means the default. */
typedef struct tb__store_limits {
    int hello_timeout_ms;    /* 5000 */
    size_t max_sessions;     /* 16384 */
    size_t max_table_nbytes; /* 256 MiB of keys and values */
    bool is_insecure;        /* listens beyond this machine without a token */
    bool is_local;           /* set by the server: it may listen on loopback and Unix sockets only */
} tb__store_limits;

tb_status tb__store_server_start_limited(const char *url, const char *token, const tb__store_limits *limits,
                                         tb__store_server **out);

/* Ends every connection and removes the socket. NULL is allowed. */
TB_API void tb__store_server_stop(tb__store_server *server);

/* Where it listens, with the port that was chosen for port 0. Valid until it stops. */
TB_API const char *tb__store_server_url(const tb__store_server *server);

/* Connects; if nobody listens and the address is one of this machine, serves and connects to itself; else tries again
 * until the timeout. Of any number of processes that do this at once exactly one serves: it gets `server`, to be
 * stopped after its store is closed; the others get NULL. */
tb_status tb__store_open_or_serve(const char *url, const char *token, const tb__store_secret *secret, int timeout_ms,
                                  tb__store **store, tb__store_server **server);

/* One attempt of that. Another attempt may succeed after a failure. */
tb_status tb__store_try_open_or_serve(const char *url, const char *token, const tb__store_secret *secret,
                                      int timeout_ms, tb__store **store, tb__store_server **server);

#endif
