/* Shared by the server's loop (server.c) and its operations (requests.c). All of it belongs to the server's thread. */
#ifndef TB_BUS_STORE_SESSION_H
#define TB_BUS_STORE_SESSION_H

#include "bus/store/connection.h"
#include "bus/store/server.h"
#include "bus/store/table.h"

enum {
    TB__SESSION_BUSY = 1 << 20, /* bytes to send with which no more requests are read from it */
    TB__SESSION_MAX_WAITERS = 1024,
};

/* A wait_change that is not answered yet. */
typedef struct tb__waiter {
    LIST_ENTRY(tb__waiter) in_server, in_session;
    struct tb__session *session;
    uint64_t id;
    size_t nbytes;
    uint8_t prefix[];
} tb__waiter;

typedef LIST_HEAD(tb__waiter_list, tb__waiter) tb__waiter_list;

/* One client's connection. */
typedef struct tb__session {
    tb__connection connection; /* first */
    LIST_ENTRY(tb__session) link;
    TAILQ_ENTRY(tb__session) pending_hello, dirty;
    struct tb__store_server *server;
    tb__proof_end mine, peer; /* of the hello */
    bool has_hello;           /* its hello was answered, */
    bool has_proved;          /* and its proof accepted */
    tb__key_owner owner;      /* the process; zeros: it may not write */
    bool is_closing;          /* it is closed after one attempt to send its replies */
    bool is_dirty;            /* flush_sessions has to handle it before the loop sleeps again */
    bool has_ephemerals;
    int64_t hello_deadline_ms;
    size_t nbuffers; /* bytes of the connection's buffers that are in the server's nbuffers */
    size_t nwaiters;
    tb__waiter_list waiters;
} tb__session;

typedef TAILQ_HEAD(tb__session_queue, tb__session) tb__session_queue;

struct tb__store_server {
    tb__endpoint endpoint; /* first */
    pthread_t thread;
    tb__store_limits limits;
    tb__proof_key key;
    uint8_t id[TB__PROOF_ID]; /* random */
    tb__store_table table;
    LIST_HEAD(tb__session_list, tb__session) sessions;
    size_t nsessions;
    tb__session_queue pending_hello; /* sessions that have not proved anything; the oldest first */
    tb__session_queue dirty;
    tb__waiter_list waiters;
    size_t nbuffers;
    uint8_t scratch[1 << 16];
};

/* Runs one request. Replies are queued; flush_sessions sends and closes. */
void tb__session_serve(tb__session *session, const tb__store_message *request);

/* Replies with a failure, whose message is tb_error_detail, and ends the session. */
void tb__session_end(tb__session *session, uint64_t id, tb__store_op op, tb_status status);

void tb__session_touch(tb__session *session); /* marks it for flush_sessions */
void tb__session_drop_waiters(tb__session *session);

/* tb__store_table.changed: answers waits for the key. The context is the server. */
void tb__wake_waiters(void *server, const tb__record *record);

#endif
