/* What the files of the client share: client.c (the connection), client_batch.c (pairs and batches), client_memory.c
 * (memory of devices), client_transfer.c (transfers and their events). */
#ifndef TB_BUS_CLIENT_CLIENT_H
#define TB_BUS_CLIENT_CLIENT_H

#include "base/mem.h"
#include "base/process.h"
#include "bus/protocol/payload.h"
#include "bus/protocol/protocol.h"
#include "device/device.h"

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
    bool is_delivered;   /* what was received is in device memory, where this process copies it */
    tb_status status;    /* of one that failed ... */
    char why[TB__CLIENT_WHY];
} tb__pending_transfer;

/* Device memory that the agent maps. */
typedef struct tb__client_memory {
    tb__device *device;
    tb__memory memory;
    uint64_t id; /* for the agent */
} tb__client_memory;

/* Device memory that the agent does not map: its bytes are copied to and from memory of tb_alloc. */
typedef struct tb__client_copy {
    tb__device *device;
    char *address;
    size_t nbytes;
    char *buffer;
} tb__client_copy;

/* A part of a tensor that is copied. */
typedef struct tb__client_box {
    tb_binding binding;       /* in device memory */
    size_t copy;              /* index in the batch's `copies` */
    bool is_read, is_written; /* before a transfer, and after a receive */
} tb__client_box;

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
        uint32_t memories[3]; /* likewise in its `memories` */
        size_t nmemories;
        TB_VEC(tb__client_box) boxes; /* what is copied of it */
        const char *name;             /* of one on a device, to be described again; NULL: it is on none */
        tb_tensor given;
    })
    tensors;
    size_t nregistered; /* the first nregistered tensors; the rest is new */
    TB_VEC(int) fds;    /* of all host memory that the tensors are in */
    TB_VEC(tb__client_memory) memories;
    TB_VEC(tb__client_copy) copies;
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
    bool has_devices;             /* they were opened: */
    TB_VEC(tb__device *) devices; /* other than the host */
    bool copies_memory;           /* the agent can't map device memory: it is copied here */
    bool is_unmapped;             /* the last reply said so */
    uint64_t last_memory;
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

/* client_batch.c */
/* Describes host memory of this process for the agent: a file and an offset, or an address. */
tb_status tb__client_describe_host(tb_client_batch *batch, struct tb__client_tensor *tensor, const void *at,
                                   size_t nbytes, tb__payload_memory *out);

/* client_memory.c */
/* The device that has the memory; NULL: the host has it. */
tb_status tb__client_find_device(tb_client *client, const void *at, size_t nbytes, tb__device **device,
                                 tb__memory *memory);
/* Describes it for the agent. *copy is the index of its copy, SIZE_MAX if the agent maps it. */
tb_status tb__client_describe_device(tb_client_batch *batch, struct tb__client_tensor *tensor, tb__device *device,
                                     const tb__memory *memory, const void *at, size_t nbytes, tb__payload_memory *out,
                                     size_t *copy);
/* Adds what the message says of device memory that the new tensors are in: payloads, to be freed by the caller with
 * their entries, and descriptors, which are to be closed. */
tb_status tb__client_share_memories(const tb_client_batch *batch, size_t nfds, tb__entries *out, tb__memory_key *fds);
/* Copies what is not mapped: before a transfer; or after it, what came through a pair. */
tb_status tb__client_copy_out(const tb_client_batch *batch, int64_t deadline_ms);
tb_status tb__client_copy_back(const tb_client_batch *batch, const char *pair, int64_t deadline_ms);
/* Waits until the work that is on the stream now is done, if any tensor is on a device. */
tb_status tb__client_wait_stream(const tb_client_batch *batch, const void *stream, int64_t deadline_ms);
void tb__client_close_devices(tb_client *client);

/* client_transfer.c */
void tb__client_on_event(tb_client *client, const tb__message *event);
void tb__client_forget(tb_client *client, const tb_client_batch *batch); /* NULL: all */

/* Posts a frame and waits for its reply; a failure in the reply is returned. `out` may be NULL. A timeout of 0 is the
 * agent's. */
tb_status tb__client_call(tb_client *client, tb__message *message, const int *fds, size_t nfds, int timeout_ms,
                          const char *what, tb__client_reply **out);

#endif
