/* What the server's loop (server.c) and its operations (requests.c) share. All of it belongs to the server's thread. */
#ifndef TB_BUS_STORE_SESSION_H
#define TB_BUS_STORE_SESSION_H

#include "bus/store/address.h"
#include "bus/store/server.h"
#include "bus/store/table.h"

enum {
    TB__SESSION_BUSY = 1 << 20,   /* with this much to send, no more of its requests are read */
    TB__SESSION_STUCK = 64 << 20, /* with this much it is dropped: only waits that come true lead here */
    TB__SESSION_MAX_WAITERS = 1024,
};

/* A wait or a wait_change that sleeps. */
typedef struct tb__waiter {
    LIST_ENTRY(tb__waiter) in_server, in_session;
    struct tb__session *session;
    uint64_t id;
    tb__store_op op;
    size_t nbytes;
    uint8_t key[];
} tb__waiter;

typedef LIST_HEAD(tb__waiter_list, tb__waiter) tb__waiter_list;

/* One client's connection. */
typedef struct tb__session {
    LIST_ENTRY(tb__session) link;
    TAILQ_ENTRY(tb__session) pending_hello, dirty;
    struct tb__store_server *server;
    tb__owned_fd socket;
    uint64_t id;
    bool has_greeted;
    bool is_closing; /* what can be sent at once is sent, then it is closed */
    bool is_dirty;   /* to be settled before the loop sleeps again */
    bool has_ephemerals;
    int64_t hello_deadline_ms;
    uint32_t events; /* what epoll watches */
    tb__bytes in, out;
    size_t nsent;    /* of out */
    size_t nbuffers; /* bytes that the server counts for it */
    size_t nwaiters;
    tb__waiter_list waiters;
} tb__session;

typedef TAILQ_HEAD(tb__session_queue, tb__session) tb__session_queue;

struct tb__store_server {
    tb__listener listener;
    tb__owned_fd epoll, wake;
    pthread_t thread;
    tb__store_limits limits;
    size_t token_nbytes;
    uint8_t token[TB__STORE_MAX_TOKEN]; /* zeros after its end */
    tb__store_table table;
    LIST_HEAD(tb__session_list, tb__session) sessions;
    size_t nsessions;
    uint64_t last_session;
    tb__session_queue pending_hello; /* have not said hello; the oldest first */
    tb__session_queue dirty;
    tb__waiter_list waiters;
    size_t nbuffers;
    bool is_full;          /* out of descriptors: the listener is not watched ... */
    int64_t full_until_ms; /* ... until then, at the latest */
    int64_t full_since_ms; /* since when nobody could be accepted; 0: the last one could */
    int64_t warn_again_ms; /* when that may be logged again */
    tb__owned_fd spare;    /* is given up to tell somebody so, one at a time */
    uint8_t scratch[1 << 16];
};

/* Carries out one request. Replies are queued; nothing is sent or closed before the session is settled. */
void tb__session_serve(tb__session *session, const tb__store_message *request);

/* Replies with the calling thread's error sentence. */
void tb__session_refuse(tb__session *session, uint64_t id, tb__store_op op, tb_status status);

void tb__session_touch(tb__session *session); /* marks it dirty */
void tb__session_drop_waiters(tb__session *session);

/* tb__store_table.changed: wakes those who wait for the key. The context is the server. */
void tb__wake_waiters(void *server, const tb__record *record, bool is_removed);

#endif
