/* What the files of the client share: client.c (the connection), client_batch.c (pairs and batches), client_transfer.c
 * (transfers and their events). */
#ifndef TB_BUS_CLIENT_CLIENT_H
#define TB_BUS_CLIENT_CLIENT_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/protocol/protocol.h"

#include <sys/queue.h>

enum { TB__CLIENT_WHY = 512 };

typedef struct tb__client_reply {
    struct tb__client_reply *next;
    unsigned char *frame;
    tb__arena arena;
    tb__message message;
} tb__client_reply;

/* A transfer begun with no_wait. */
typedef struct tb__pending_transfer {
    struct tb__pending_transfer *next;
    const tb_client_batch *batch;
    bool is_send;
    uint64_t seq;
    int64_t deadline_ms; /* the agent's deadline, and a grace period for its answer */
    unsigned events;     /* that have arrived */
    tb_status status;    /* of one that failed ... */
    char why[TB__CLIENT_WHY];
} tb__pending_transfer;

struct tb_client_batch {
    tb_client *client;
    char *name;
    tb_batch_opts opts;
    tb__arena arena; /* what the options point to */
    TB_VEC(struct tb__client_tensor {
        const char *pair; /* the client's */
        tb__bytes payload;
        uint32_t fds[3]; /* indices in the batch's `fds` */
        size_t nfds;
    })
    tensors;
    size_t nregistered; /* the first nregistered tensors; the rest is new */
    TB_VEC(int) fds;    /* of all memory that the tensors are in */
    bool is_registered;
    bool may_be_registered; /* registering timed out: the agent may have the batch */
    LIST_ENTRY(tb_client_batch) link;
};

struct tb_client {
    tb__owner owner;
    size_t refs; /* the user's, and one for each batch */
    char *path;
    tb__owned_fd socket; /* closed in forked children, or the agent would think that this process lives */
    bool is_busy;        /* received frames are being handled */
    tb_status broken;    /* TB_OK: connected */
    char why[TB__CLIENT_WHY];
    uint64_t nframes; /* sent so far */
    tb__frame_reader in;
    tb__client_reply *replies; /* not taken by a call yet */
    tb__pending_transfer *transfers;
    LIST_HEAD(tb__client_batches, tb_client_batch) batches;
    int32_t rank, index, size;
    int timeout_ms; /* the agent's default */
    char *group;
    TB_VEC(struct tb__client_pair {
        char *name;
        char *layout;
    })
    pairs;
};

/* As tb_client_connect. Unless is_awaited, TB_IO at once if no agent listens. */
tb_status tb__client_open(const char *path, const tb_client_opts *opts, bool is_awaited, tb_client **out);

/* TB_REFUSED in a forked child. Every public call checks this first; `what` names the object. */
tb_status tb__client_check(const tb_client *client, const char *what);
/* In a forked child: whether the client was being changed at the fork, so that it can't be freed. */
bool tb__client_is_half_changed(const tb_client *client);

void tb__client_unref(tb_client *client);

/* Makes the agent end the batch, if it has it. Then nothing uses its tensors any more, unless the agent does not
 * answer. */
void tb__client_batch_end(tb_client_batch *batch);

/* Sends a frame, with descriptors; *seq is the `seq` of its reply. */
tb_status tb__client_post(tb_client *client, const tb__message *message, const int *fds, size_t nfds,
                          int64_t deadline_ms, uint64_t *seq);
/* Waits for a reply. `what` the agent has to do, for the error message. */
tb_status tb__client_await_reply(tb_client *client, uint64_t seq, int64_t deadline_ms, const char *what,
                                 tb__client_reply **out);
void tb__client_reply_free(tb__client_reply *reply);

/* Waits for frames, and handles all that have arrived. */
tb_status tb__client_listen(tb_client *client, int64_t deadline_ms, const char *what);

/* client_transfer.c */
void tb__client_on_event(tb_client *client, const tb__message *event);
void tb__client_forget(tb_client *client, const tb_client_batch *batch); /* NULL: all */

/* Posts a frame and waits for its reply; a failure in the reply is returned. `out` may be NULL. A timeout of 0 is the
 * agent's. */
tb_status tb__client_call(tb_client *client, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                          const char *what, tb__client_reply **out);

#endif
