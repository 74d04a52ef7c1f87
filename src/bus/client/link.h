/* A connection of this process to a store's server or to an agent: sends frames, receives replies and events. Several
 * threads may use it: one of those that wait reads for all of them, and a frame is sent as a whole.
 *
 * All calls but those that make and close it are made with the lock held, which they give up while they wait. A reply
 * is kept until the call that waits for it takes it. Once the connection is lost every call fails. */
#ifndef TB_BUS_CLIENT_LINK_H
#define TB_BUS_CLIENT_LINK_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/protocol/protocol.h"
#include "bus/store/protocol.h"

#include <stdatomic.h>

enum { TB__LINK_WHY = 512 };

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
    bool keeps_unsent; /* the rest of a frame that was not taken in time is sent before the next; else that is a loss */
    bool lacks_memory; /* for a frame that has arrived */
    bool is_malformed; /* it was lost because the peer sent what is no frame */
    tb_status broken;  /* TB_OK: connected */
    char why[TB__LINK_WHY];
    bool is_over;     /* the peer has ended, or closed the connection: it uses no memory of this process any more */
    uint64_t nframes; /* sent so far */
    int64_t heard_ms; /* when bytes last arrived */
    tb__frame_reader in;
    tb__bytes unsent;
    tb__link_reply *replies;  /* not taken by a call yet */
    TB_VEC(uint64_t) dropped; /* frames whose replies nobody takes */
    /* Reads a frame: a reply has its `seq` then; else *is_reply is false, and it was dealt with. A failure ends the
     * connection. */
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
/* Without the lock; nobody uses it any more. Not in a forked child while is_locked. NULL is allowed. */
void tb__link_close(tb__link *link);

void tb__link_lock(tb__link *link);
void tb__link_unlock(tb__link *link);

/* Sends a frame, with descriptors; *seq, which may be NULL, is its number. */
tb_status tb__link_send(tb__link *link, const tb__bytes *frame, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq);
tb__link_reply *tb__link_take_reply(tb__link *link, uint64_t seq); /* NULL: it has not come */
void tb__link_reply_free(tb__link_reply *reply);
/* The reply to this frame is not wanted. */
void tb__link_drop_reply(tb__link *link, uint64_t seq);
/* Waits until is_true, which is looked at after every frame. TB_TIMEOUT at the deadline; TB_NO_MEMORY if there is none
 * for a frame that has arrived, which the next wait reads. `what` the peer has to do, for
 * the error message. */
tb_status tb__link_wait(tb__link *link, bool (*is_true)(void *arg), void *arg, int64_t deadline_ms, const char *what);
/* Ends the calling thread's waits with TB_CANCELLED, once it is set and tb__link_wake was called; NULL: nothing does.
 * `wake` has to be there. */
extern _Thread_local const atomic_bool *tb__link_cancelled;
void tb__link_break(tb__link *link, const char *why); /* gives the connection up; later calls fail with TB_LOST */
/* Waits until the peer uses no memory of this process any more, after a wait has failed: the connection is given up. */
void tb__link_await_end(tb__link *link);
/* For a thread that reads when nobody else does: sleeps until something has come, or tb__link_wake is called. */
void tb__link_step(tb__link *link);
/* Wakes all threads that wait here, to look again. */
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

/* Connects and says Hello. TB_IO if no agent listens; TB_TIMEOUT if it is silent; TB_DENIED for a wrong token;
 * TB_REFUSED if it speaks another version. */
tb_status tb__link_open(const char *path, const tb__link_opts *opts, tb__link **out);

/* Sends a frame, with descriptors; *seq is the `seq` of its reply. */
tb_status tb__link_post(tb__link *link, const tb__message *message, const int *fds, size_t nfds, int64_t deadline_ms,
                        uint64_t *seq);
/* Waits for a reply. Returns the failure that it tells, too; *out is NULL if it has not come. */
tb_status tb__link_await_reply(tb__link *link, uint64_t seq, int64_t deadline_ms, const char *what,
                               tb__link_reply **out);
/* Posts a frame and waits for its reply, as long as the agent was given and a grace period; a failure in the reply is
 * returned. `out` may be NULL. */
tb_status tb__link_call(tb__link *link, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                        const char *what, tb__link_reply **out);

#endif
