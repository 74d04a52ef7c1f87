/* A connection of this process to a store's server or to an agent: sends frames, receives replies and events. Several
 * threads may use it: one of the waiting threads reads for all of them, and frames are sent whole.
 *
 * All calls but those that make and close it need the lock, which they release while they wait. A reply is kept until
 * the call that waits for it takes it. Once the connection is lost every call fails. */
#ifndef TB_BUS_CLIENT_LINK_H
#define TB_BUS_CLIENT_LINK_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/protocol/protocol.h"
#include "bus/store/protocol.h"

#include <stdatomic.h>

enum {
    TB__LINK_WHY = 512,
    TB__LINK_RECV_MS = 100, /* see tb__link_let_block */
};

typedef struct tb__link_reply {
    struct tb__link_reply *next;
    unsigned char *frame;
    tb__arena arena;
    uint64_t seq; /* the frame that it answers */
    union {
        tb__message message;     /* of an agent */
        tb__store_message store; /* of a store's server */
    };
} tb__link_reply;

typedef struct tb__link {
    tb__owner owner;
    char *name;          /* for messages: the store's URL, or "the agent at PATH" ... */
    const char *is_gone; /* ... and what follows if it is lost */
    tb__owned_fd socket; /* closed in forked children, or the peer would think that this process lives */
    int pidfd;           /* the peer's process; -1: it can't be watched */
    int wake;            /* an eventfd that ends a read; -1: there is none */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_locked; /* for forked children, which can't free what a thread was changing */
    bool is_reading, is_sending;
    bool may_block;    /* see tb__link_let_block */
    bool keeps_unsent; /* the rest of a frame not sent in time is sent before the next; otherwise that is a loss */
    bool lacks_memory; /* for a frame that has arrived */
    bool is_malformed; /* it was lost because the peer sent an invalid frame */
    tb_status broken;  /* TB_OK: connected */
    char why[TB__LINK_WHY];
    bool is_over;     /* the peer has ended, or closed the connection: it uses no memory of this process any more */
    uint64_t nframes; /* sent so far */
    int64_t heard_ms; /* when bytes last arrived */
    tb__frame_reader in;
    tb__bytes unsent;
    tb__link_reply *replies;  /* not taken by a call yet */
    TB_VEC(uint64_t) dropped; /* frames whose replies nobody takes */
    /* Reads a frame: a reply has its `seq` afterwards; for other frames, which it handles, *is_reply is false. A
     * failure ends the connection. */
    tb_status (*read)(struct tb__link *link, tb__blob frame, tb__link_reply *out, bool *is_reply);
    void (*on_event)(void *arg, const tb__message *event); /* of an agent, like what follows */
    void *arg;
    const char *path;          /* of its socket: the end of the name */
    int32_t rank, index, size; /* its seat, in the group: */
    char *group;
    uint64_t incarnation;
    int timeout_ms; /* its default */
} tb__link;

/* Without a socket. `is_gone` must stay. */
tb_status tb__link_create(const char *name, const char *is_gone, tb__link **out);
tb_status tb__link_watch_wake(tb__link *link); /* makes `wake`, if there is none */
/* A thread that waits, while there is no `wake`, sleeps in recv for TB__LINK_RECV_MS, and in poll only after that. So
 * it may notice that much later that the peer's process has ended, if another process has the peer's end, too. */
void tb__link_let_block(tb__link *link);
/* Without the lock; nobody uses it any more. Not in a forked child while is_locked. NULL is allowed. */
void tb__link_close(tb__link *link);

void tb__link_lock(tb__link *link);
void tb__link_unlock(tb__link *link);

/* Sends a frame, with descriptors; *seq, which may be NULL, is its number. */
tb_status tb__link_send(tb__link *link, const tb__bytes *frame, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq);
tb__link_reply *tb__link_take_reply(tb__link *link, uint64_t seq); /* NULL: it has not come */
void tb__link_reply_free(tb__link_reply *reply);
/* Drops the reply to this frame. */
void tb__link_drop_reply(tb__link *link, uint64_t seq);
/* Waits until is_true, which is called after every frame. TB_TIMEOUT at the deadline; TB_NO_MEMORY if memory
 * for an arrived frame is short, which the next wait reads. `what` the peer has to do, for the error
 * message. */
tb_status tb__link_wait(tb__link *link, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms, const char *what);
/* Ends the calling thread's waits with TB_CANCELLED, once it is set and tb__link_wake was called; NULL: nothing does.
 * `wake` has to be there. */
extern _Thread_local const atomic_bool *tb__link_cancelled;
void tb__link_break(tb__link *link, const char *why); /* ends the connection; later calls fail with TB_LOST */
/* Waits, after a failed wait, until the peer does not use memory of this process any more: the connection ends. */
void tb__link_await_end(tb__link *link);
/* For a thread that reads when no other does: sleeps until something has arrived, or tb__link_wake is called. */
void tb__link_step(tb__link *link);
/* Wakes all waiting threads, to check their conditions. */
void tb__link_wake(tb__link *link);
void tb__link_sleep(tb__link *link); /* until something has changed */

/* To an agent: agent_link.c. */

typedef struct tb__link_opts {
    int timeout_ms;                                        /* to connect, an agent's start included */
    const char *token;                                     /* NULL: none */
    const char *name;                                      /* NULL: the program's */
    bool is_awaited;                                       /* else TB_IO at once if no agent listens */
    void (*on_event)(void *arg, const tb__message *event); /* with the lock held; may be NULL */
    void *arg;
} tb__link_opts;

/* Connects and says Hello. TB_IO if no agent listens; TB_TIMEOUT if it does not answer; TB_DENIED for a wrong token;
 * TB_REFUSED if it has another version of the protocol. */
tb_status tb__link_open(const char *path, const tb__link_opts *opts, tb__link **out);

/* Sends a frame, with descriptors; *seq is the `seq` of its reply. */
tb_status tb__link_post(tb__link *link, const tb__message *message, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq);
/* Waits for a reply. Returns the failure in it, too; *out is NULL if it has not come. */
tb_status tb__link_await_reply(tb__link *link, uint64_t seq, int64_t deadline_ms, const char *what,
                               tb__link_reply **out);
/* Posts a frame and waits for its reply, for the agent's timeout and a grace period; returns a failure in the reply.
 * `out` may be NULL. */
tb_status tb__link_call(tb__link *link, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                        const char *what, tb__link_reply **out);

#endif
