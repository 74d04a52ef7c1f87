/* The sockets of a server, which is a store's or an agent: one epoll set with a listener, a descriptor that wakes its
 * thread, and connections of clients. Connections collect arriving frames, and queue outgoing bytes.
 *
 * All of it belongs to one thread, except tb__endpoint_wake. */
#ifndef TB_BUS_STORE_CONNECTION_H
#define TB_BUS_STORE_CONNECTION_H

#include "bus/protocol/protocol.h"
#include "bus/store/address.h"

typedef struct tb__endpoint tb__endpoint;

typedef struct tb__connection {
    tb__endpoint *endpoint;
    tb__owned_fd socket;
    uint32_t watched; /* the events that epoll reports */
    tb__frame_reader in;
    tb__bytes out;
    size_t nsent; /* of out */
} tb__connection;

struct tb__endpoint {
    const char *what; /* "store", for messages */
    int refuse_ms;    /* without descriptors: after which waiting clients are refused */
    bool is_open;     /* this and what follows are tb__endpoint_open's */
    tb__listener listener;
    tb__owned_fd epoll, wake;
    tb__owned_fd spare;    /* closed in order to accept one client and refuse it */
    bool is_stopped;       /* nobody is accepted any more */
    bool is_full;          /* out of descriptors or memory: the listener is not watched ... */
    int64_t full_until_ms; /* ... until then, at the latest */
    int64_t full_since_ms; /* since when accept has failed; 0: the last one succeeded */
    int64_t warn_again_ms; /* when that may be logged again */
    /* A client has connected. Takes ownership of the descriptor. `status`, with tb_error_detail: the reason to refuse
     * the client; TB_OK: none. */
    void (*accepted)(tb__endpoint *endpoint, int fd, tb_status status);
    void (*ready)(tb__connection *connection, uint32_t events);
};

/* After a failure, too, it has to be closed. Closing one that was never opened does nothing. */
tb_status tb__endpoint_open(tb__endpoint *endpoint, const tb__address *address, bool is_local);
void tb__endpoint_close(tb__endpoint *endpoint);
void tb__endpoint_stop(tb__endpoint *endpoint); /* accepts no more connections */
void tb__endpoint_wake(tb__endpoint *endpoint); /* from any thread, or a signal handler */

/* Sleeps until something happens, or the time comes, and handles it. Returns whether tb__endpoint_wake was called. */
bool tb__endpoint_step(tb__endpoint *endpoint, int64_t until_ms);

/* Takes over the descriptor, also if it fails. */
tb_status tb__connection_open(tb__connection *connection, tb__endpoint *endpoint, int fd);
void tb__connection_unwatch(tb__connection *connection); /* it is not reported any more */
void tb__connection_close(tb__connection *connection);

/* Sends what can be sent now; false: the connection is broken. */
bool tb__connection_send(tb__connection *connection);
size_t tb__connection_unsent(const tb__connection *connection);

/* Makes epoll report when queued bytes can be sent, and, if `reads`, when bytes have arrived. False: it
 * can't. */
bool tb__connection_watch(tb__connection *connection, bool reads);

#endif
