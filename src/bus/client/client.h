/* What the files of the client share: client.c (the connection), client_batch.c (pairs and batches), client_transfer.c
 * (transfers, and what is told of them). */
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

/* A transfer that was begun without waiting for its end. */
typedef struct tb__pending_transfer {
    struct tb__pending_transfer *next;
    const tb_client_batch *batch;
    bool is_send;
    uint64_t seq;
    int64_t deadline_ms; /* the agent's, and some time to tell */
    unsigned events;     /* that were told */
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
        uint32_t fds[3]; /* that it names: indices below */
        size_t nfds;
    })
    tensors;
    size_t nregistered; /* of them; the rest is new */
    TB_VEC(int) fds;    /* of all memory that went along */
    bool is_registered;
    bool may_be_registered; /* the agent did not say */
    LIST_ENTRY(tb_client_batch) link;
};

struct tb_client {
    tb__owner owner;
    size_t refs; /* the user's, and one for each batch */
    char *path;
    tb__owned_fd socket; /* a child that kept it would make the agent believe that this process lives */
    bool is_busy;        /* what has been received is being taken */
    tb_status broken;    /* and why */
    char why[TB__CLIENT_WHY];
    uint64_t nframes; /* sent so far */
    tb__frame_reader in;
    tb__client_reply *replies; /* that nobody has waited for yet */
    tb__pending_transfer *transfers;
    LIST_HEAD(tb__client_batches, tb_client_batch) batches;
    int32_t rank, index, size;
    int timeout_ms; /* the agent's own, for what does not say */
    char *group;
    TB_VEC(struct tb__client_pair {
        char *name;
        char *layout;
    })
    pairs;
};

/* As tb_client_connect. Unless the agent is awaited, TB_IO at once if nobody listens. */
tb_status tb__client_open(const char *path, const tb_client_opts *opts, bool is_awaited, tb_client **out);

/* TB_REFUSED in a forked child, for the client or a batch of it: the first thing that public calls ask. */
tb_status tb__client_check(const tb_client *client, const char *what);
/* In a forked child: what a thread was changing when it was forked can't be freed. */
bool tb__client_is_half_changed(const tb_client *client);

void tb__client_unref(tb_client *client);

/* The agent gives the batch up, if it has it: nothing uses its tensors any more, unless the agent is silent. */
void tb__client_batch_end(tb_client_batch *batch);

/* Sends a frame, with descriptors; *seq is what its reply will have. */
tb_status tb__client_post(tb_client *client, const tb__message *message, const int *fds, size_t nfds,
                          int64_t deadline_ms, uint64_t *seq);
/* `what` the agent has to do, for the sentence if it does not. */
tb_status tb__client_await_reply(tb_client *client, uint64_t seq, int64_t deadline_ms, const char *what,
                                 tb__client_reply **out);
void tb__client_reply_free(tb__client_reply *reply);

/* Takes what has come, and waits for more if there is none. */
tb_status tb__client_listen(tb_client *client, int64_t deadline_ms, const char *what);

/* client_transfer.c */
void tb__client_on_event(tb_client *client, const tb__message *event);
void tb__client_forget(tb_client *client, const tb_client_batch *batch); /* NULL: all */

/* Both; a reply that tells of a failure is one. `out` may be NULL. A timeout of 0 is the agent's. */
tb_status tb__client_call(tb_client *client, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                          const char *what, tb__client_reply **out);

#endif
