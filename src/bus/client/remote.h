/* Worlds whose seat on the bus an agent has; shared by the files that implement tb__remote_ops: remote_world.c (worlds
 * and pairs), remote_batch.c (batches and the description of their tensors), remote_memory.c (device memory),
 * remote_transfer.c (transfers), remote_state.c (states from the agent).
 *
 * The link's lock guards everything; calls release it while they wait. Devices have a separate lock, which may be taken
 * with the link's held, but not the other way round. */
#ifndef TB_BUS_CLIENT_REMOTE_H
#define TB_BUS_CLIENT_REMOTE_H

#include "bus/client/link.h"
#include "bus/ops.h"
#include "bus/protocol/payload.h"
#include "device/device.h"

#include <stdatomic.h>
#include <sys/queue.h>

typedef struct remote_seat {
    char *group;
    int32_t index, size;
} remote_seat;

typedef struct remote_transfer remote_transfer;

typedef struct remote_world {
    tb__bus_object base; /* first */
    atomic_size_t refs;  /* the user's, and one for each pair and batch */
    tb__link *link;
    int timeout_ms;
    TB_VEC(remote_seat) seats; /* the first is the agent's own */
    LIST_HEAD(remote_pairs, remote_pair) pairs;
    LIST_HEAD(remote_batches, remote_batch) batches;
    LIST_HEAD(remote_transfers, remote_transfer) transfers;
    bool has_thread, is_ending; /* a thread that reads, for descriptors and for functions of the user */
    pthread_t thread;
    pthread_mutex_t device_lock;
    bool has_devices;             /* they were opened: */
    TB_VEC(tb__device *) devices; /* other than the host */
    bool copies_memory;           /* the agent can't map device memory: it is copied here */
    uint64_t last_memory;
} remote_world;

typedef struct remote_pair {
    tb__bus_object base; /* first */
    remote_world *world;
    char *name, *remote;
    char *group; /* of this side, where the agent has this seat: */
    int32_t index, size;
    bool has_layout;   /* false: seat i sends to seat i ... */
    tb_layout *layout; /* ... and this is of a tensor that only this seat has */
    size_t refs;       /* the user's, and one for each batch that has it */
    bool is_awaited;   /* it was made with no_wait, and its reply has not come */
    bool is_given_up;  /* the user has destroyed it */
    uint64_t seq;
    LIST_ENTRY(remote_pair) link;
} remote_pair;

/* Device memory that the agent maps. */
typedef struct remote_memory {
    tb__device *device;
    tb__memory memory;
    uint64_t id;        /* for the agent */
    tb__memory_ids ids; /* its pieces */
} remote_memory;

/* Device memory that the agent does not map: its bytes are copied to and from memory of tb_alloc. */
typedef struct remote_copy {
    tb__device *device;
    char *address;
    size_t nbytes;
    char *buffer;
} remote_copy;

/* A part of a tensor that is copied. */
typedef struct remote_box {
    tb_binding binding;       /* in device memory */
    size_t copy;              /* index in the batch's `copies` */
    bool is_read, is_written; /* before a transfer, and after a receive */
} remote_box;

typedef struct remote_tensor {
    remote_pair *pair;
    TB_VEC(remote_box) boxes; /* the parts of it that are copied */
    const char *name;         /* NULL: only the pair was added */
    tb_tensor given;
    struct {
        uintptr_t first, last;
    } areas[3]; /* its memory here */
} remote_tensor;

typedef struct remote_batch {
    tb__bus_object base; /* first */
    remote_world *world;
    size_t refs; /* the user's, and one for each transfer */
    char *name;
    tb_batch_opts opts;
    tb__arena arena; /* what the options and tensors point to */
    TB_VEC(remote_tensor) tensors;
    size_t nregistered; /* the first nregistered tensors; the rest is new */
    TB_VEC(remote_memory) memories;
    TB_VEC(remote_copy) copies;
    bool is_registered;
    bool may_be_registered;  /* registering timed out: the agent may have the batch */
    bool is_busy;            /* a call registers it, or removes a pair */
    const char *invalidated; /* a tensor whose memory was; NULL: none */
    bool agent_invalidated;  /* the agent has done so, too: transfers fail there, on all their ranks */
    uint64_t epoch;
    remote_transfer *transfers[2]; /* by direction: received, sent */
    tb_batch_state last;           /* of receives, as last sent by the agent ... */
    _Atomic uint32_t *mark;        /* ... and whether the agent may have written more since then; shared memory */
    bool is_given_up;              /* the agent may still run a transfer that this process did not wait for */
    bool is_torn_here;             /* received data could not be copied to the tensors */
    LIST_ENTRY(remote_batch) link;
} remote_batch;

/* A RegisterTensors that is being made. */
typedef struct remote_frame {
    tb__message message;
    tb__arena arena;         /* of the message */
    TB_VEC(int) fds;         /* of the host memory that tensors are in, and then the others of the frame */
    TB_VEC(size_t) memories; /* device memory that they are in: indices in the batch's `memories` */
    tb__memory_key key;      /* whose descriptors are those of device memory */
    tb__bytes payloads;      /* of the tensors */
} remote_frame;

/* The part of a transfer that goes through one pair. */
typedef struct remote_part {
    const char *pair;
    tb__state_payload at; /* text in the transfer's arena, like the pair's name */
} remote_part;

struct remote_transfer {
    tb__bus_object base; /* first */
    remote_batch *batch;
    bool is_send;
    tb_transfer_opts opts;
    uint64_t seq;
    int64_t deadline_ms; /* the agent's deadline, and a grace period for its answer */
    unsigned events;     /* that the program may see */
    bool has_ended;
    tb_status status; /* of one that has ended */
    char why[TB__LINK_WHY];
    tb_transfer_state state;   /* the last one from the agent */
    tb__arena arena;           /* of the parts */
    TB_VEC(remote_part) parts; /* the same */
    bool has_news;             /* not seen by a wait or query yet */
    int fd;                    /* an eventfd that is readable then; -1: it was not asked for */
    unsigned told; /* events sent by the agent, if functions of the user must be called before they are reported */
    bool is_told_end;
    bool has_progress, may_proceed, has_proceeded, is_committing;
    size_t ncalls;                                          /* functions of the user that are being called */
    enum { NOT_DELIVERED, DELIVERING, DELIVERED } delivery; /* of received data to memory that is copied here */
    tb_status delivered;
    char delivery_why[TB__LINK_WHY];
    uint64_t ngroups; /* groups of tensors that were delivered before */
    LIST_ENTRY(remote_transfer) link;
};

/* remote_world.c */
/* In a forked child: whether a thread was changing the world's objects at the fork, so that they can't be freed. */
bool tb__remote_is_half_changed(const remote_world *world);
bool tb__remote_is_inherited(const remote_world *world);
void tb__remote_unref(remote_world *world); /* without the lock */
int tb__remote_timeout(const remote_world *world, int timeout_ms);
/* Waits for the reply to a pair that was made with no_wait. */
tb_status tb__remote_await_pair(remote_pair *pair, int64_t deadline_ms);
void tb__remote_pair_unref(remote_pair *pair);
/* Starts the thread that reads, unless it runs. */
tb_status tb__remote_start_thread(remote_world *world);

/* remote_batch.c */
/* Describes host memory of this process for the agent: a file and an offset, or an address. */
tb_status tb__remote_describe_host(remote_frame *frame, const void *at, size_t nbytes, tb__payload_memory *out);
void tb__remote_batch_unref(remote_batch *batch);                       /* without the lock */
bool tb__remote_batch_has(const remote_batch *batch, const char *pair); /* whether the agent has it there */
tb_status tb__remote_register_locked(remote_batch *batch, int timeout_ms);
/* Sets tb__link_cancelled, if that is not NULL; to be reset after the wait. With the lock held. */
tb_status tb__remote_begin_cancellable(remote_world *world, const atomic_bool *cancelled);

/* remote_memory.c */
/* The device that has the memory; NULL: the host has it. With the device lock, like those that follow. */
tb_status tb__remote_find_device(remote_world *world, const void *at, size_t nbytes, tb__device **device,
                                 tb__memory *memory);
/* Describes it for the agent. *copy is the index of its copy, SIZE_MAX if the agent maps it. */
tb_status tb__remote_describe_device(remote_batch *batch, remote_frame *frame, tb__device *device,
                                     const tb__memory *memory, const void *at, size_t nbytes, tb__payload_memory *out,
                                     size_t *copy);
/* TB_INVALID, naming a tensor, if memory that the agent maps was remapped: the agent would go on with the old one. */
tb_status tb__remote_check_memories(const remote_batch *batch);
/* Adds to the frame's message the device memory that its tensors are in, and the descriptors to its key. */
tb_status tb__remote_share_memories(const remote_batch *batch, remote_frame *frame);
/* Copies memory that is not mapped: before a transfer; or after it, data received through a pair, of groups of tensors
 * from `first` to before `last`. */
tb_status tb__remote_copy_out(const remote_batch *batch, int64_t deadline_ms);
tb_status tb__remote_copy_back(const remote_batch *batch, const remote_pair *pair, uint64_t first, uint64_t last,
                               int64_t deadline_ms);
/* Waits until the work that is on the stream now is done, if any tensor is on a device. */
tb_status tb__remote_wait_stream(const remote_batch *batch, const void *stream, int64_t deadline_ms);
void tb__remote_close_devices(remote_world *world);

/* remote_state.c: with the lock held. */
void tb__remote_on_event(void *world, const tb__message *event);
/* Reads the transfer's states from a message. */
void tb__remote_read_states(remote_transfer *transfer, const tb__entries *states);
/* Asks the agent; the caller frees the reply. */
tb_status tb__remote_query(remote_batch *batch, tb__state_name what, tb__asked_direction direction,
                           tb__link_reply **out);
/* The agent is gone: transfers under way have ended. */
void tb__remote_note_loss(remote_world *world);
/* Calls functions of the user that are due. For the thread that reads. */
void tb__remote_call_user(remote_world *world);
void tb__remote_clear_news(remote_transfer *transfer);

/* remote_transfer.c */
/* Copies received data to memory that is copied here, once. Returns its failure. */
tb_status tb__remote_deliver(remote_transfer *transfer);

/* remote_batch.c */
/* Marks batches with tensors in these bytes. Returns whether the agent may use any of the bytes. */
bool tb__remote_mark_invalidated(remote_world *world, uintptr_t first, uintptr_t last);
/* Called when the agent has done the same. */
void tb__remote_note_invalidated(remote_world *world);
/* Fails with the name of the tensor. */
tb_status tb__remote_fail_invalidated(const remote_batch *batch);

#endif
