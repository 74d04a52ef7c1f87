/* What the files of the client share: client.c (the connection), client_batch.c (pairs, batches, transfers). */
#ifndef TB_BUS_CLIENT_CLIENT_H
#define TB_BUS_CLIENT_CLIENT_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/protocol/protocol.h"

enum { TB__CLIENT_WHY = 512 };

typedef struct tb__client_reply {
    struct tb__client_reply *next;
    unsigned char *frame;
    tb__arena arena;
    tb__message message;
} tb__client_reply;

struct tb_client {
    size_t refs; /* the user's, and one for each batch */
    char *path;
    tb__owned_fd socket; /* a child that kept it would make the agent believe that this process lives */
    tb_status broken;    /* and why */
    char why[TB__CLIENT_WHY];
    uint64_t nframes; /* sent so far */
    tb__frame_reader in;
    tb__client_reply *replies; /* that nobody has waited for yet */
    int32_t rank, index, size;
    char *group;
    TB_VEC(struct tb__client_pair {
        char *name;
        char *layout;
    })
    pairs;
};

void tb__client_unref(tb_client *client);

/* Sends a frame, with descriptors; *seq is what its reply will have. */
tb_status tb__client_post(tb_client *client, const tb__message *message, const int *fds, size_t nfds,
                          int64_t deadline_ms, uint64_t *seq);
/* `what` the agent has to do, for the sentence if it does not. */
tb_status tb__client_wait(tb_client *client, uint64_t seq, int64_t deadline_ms, const char *what,
                          tb__client_reply **out);
void tb__client_reply_free(tb__client_reply *reply);

/* Both; a reply that tells of a failure is one. `out` may be NULL. A timeout of 0 is the agent's. */
tb_status tb__client_call(tb_client *client, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                          const char *what, tb__client_reply **out);

#endif
