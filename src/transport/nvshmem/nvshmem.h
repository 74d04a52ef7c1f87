/* What the files of the transport over NVSHMEM share. nvshmem.c says how it works. */
#ifndef TB_TRANSPORT_NVSHMEM_H
#define TB_TRANSPORT_NVSHMEM_H

#include "transport/match.h"
#include "transport/nvshmem/nvshmem_library.h"

/* ---- Messages between two ends of the transport ---- */

typedef enum nvshmem_kind {
    TELL_JOIN = 1, /* to the leader: this rank has created the communicator. nbytes: of its memory; offset: ranks */
    TELL_INIT,     /* from the leader, as the next two: initialise NVSHMEM with `uid`, */
    TELL_ALLOC,    /* allocate the communicator's memory, */
    TELL_FREE,     /* free it, */
    TELL_FINALIZE, /* finalise NVSHMEM. All ranks do these in the order in which they are told */
    TELL_END,      /* to the leader: this rank waits for TELL_FINALIZE */
    TELL_FAIL,     /* the communicator has failed, `why`; tag: the status; id: the lost rank */
    TELL_LEAVE,    /* to all: this rank has destroyed it */
    TELL_OFFER,    /* sender: message `id`, with this tag and nbytes */
    TELL_GRANT,    /* receiver: put message `id` at the offset, and then the value into the slot's word */
    TELL_DROP,     /* receiver: message `id` is not wanted */
} nvshmem_kind;

typedef struct nvshmem_message {
    uint32_t kind, slot;
    uint64_t key; /* of the communicator */
    uint64_t id, tag, nbytes, offset, value;
    union {
        nvshmem_uid uid;
        char why[sizeof(nvshmem_uid)];
    };
} nvshmem_message;

enum { NVSHMEM_MESSAGE_HEAD = offsetof(nvshmem_message, uid) };

/* One that came before its communicator was created. */
typedef struct nvshmem_early {
    struct nvshmem_early *next;
    int32_t from;
    nvshmem_message message;
} nvshmem_early;

enum { NVSHMEM_MOST_EARLY = 4096 };

/* ---- Operations ---- */

typedef enum nvshmem_stage {
    SEND_OFFERED, /* in comm.offered */
    SEND_GRANTED, /* in comm.granted: to be put as soon as possible */
    SEND_PUT,     /* in comm.put */
    RECV_WAITING, /* in comm.receives */
    RECV_OFFERED, /* in comm.wanted: waits for a slot */
    RECV_GRANTED, /* in comm.slots */
    OP_ENDED,     /* in comm.ended: done is to be called */
} nvshmem_stage;

typedef struct nvshmem_posted {
    tb__waiter waiter; /* its tag: of a SEND_OFFERED, its id; else the operation's */
    tb_op *op;         /* NULL: a granted message that was cancelled, of which the receiver is told by its word */
    nvshmem_stage stage;
    uint64_t id; /* that the sender gave it */
    uint64_t nbytes, offset, value;
    size_t slot;
    void *event; /* after the put */
    int nlooks;  /* of a RECV_GRANTED whose sender has left. 1: wants a look at the words; 2: it is under way */
    tb_status status;
} nvshmem_posted;

/* A word of a receiver: the value, which is not zero and never the same twice in a row, and the size of the message. */
enum { VALUE_SHIFT = 48, MOST_VALUE = UINT16_MAX };
#define NVSHMEM_DROPPED ((UINT64_C(1) << VALUE_SHIFT) - 1) /* instead of the size */

typedef struct nvshmem_slot {
    nvshmem_posted *receive; /* NULL: it is free, unless ... */
    bool is_kept;            /* ... something may still be written by its grant */
    uint64_t value;
} nvshmem_slot;

/* ---- Communicators ---- */

typedef struct nvshmem nvshmem;

typedef struct nvshmem_member {
    bool has_joined; /* which only the leader knows */
    bool has_left;
} nvshmem_member;

struct tb_comm {
    tb_comm *next;
    nvshmem *owner;
    uint64_t key;
    int32_t *ranks; /* ascending: a rank's position is its PE in NVSHMEM, and the first one leads */
    nvshmem_member *members;
    size_t nranks, pe;
    size_t nbytes, capacity; /* of its memory; rounded up */
    int device;
    bool is_waiting;   /* this rank has not joined it yet, because NVSHMEM still connects others */
    bool is_agreed;    /* the leader has told, or has been told, TELL_ALLOC: all ranks are in it */
    bool is_ready;     /* its memory is there */
    bool is_over;      /* it is agreed no more, or never was: nothing is to be freed */
    bool is_destroyed; /* by the caller; it is kept until its memory is freed */
    bool is_told_over; /* the leader has told that it failed, or has left, or is lost */
    tb_status status;  /* of its failure */
    int32_t lost;      /* the rank whose loss that was; TB_NO_RANK: none */
    char why[256];
    size_t nposted;
    nvshmem_memory memory;
    bool is_watching; /* a copy of the words is under way */
    size_t ngranted;  /* slots in use by receives */
    nvshmem_slot slots[NVSHMEM_SLOTS];
    tb__match receives, offered;
    tb__waiters wanted, granted, put, ended;
};

/* ---- An open transport ---- */

struct nvshmem {
    tb_transport_env env;
    const nvshmem_functions *call;
    const nvshmem_cuda *cuda;
    int event;
    uint64_t nids;
    tb_comm *comms;       /* oldest first */
    nvshmem_early *early; /* oldest first */
    size_t nearly;
    /* Of the leader: what it has told so far. */
    bool is_starting; /* a unique id is being made */
    bool is_up;       /* TELL_INIT was told, and no TELL_FINALIZE since */
    /* Of every rank: what it has been told so far. */
    size_t njobs;       /* that the thread has not done */
    bool is_end_wanted; /* to connect other ranks */
    bool is_connected;
    int32_t *ranks; /* that are connected */
    size_t nranks;
    int device;
};

/* ---- nvshmem_comm.c: communicators ---- */

tb_status nvshmem_comm_id(void *context, unsigned char id[TB_COMM_ID_SIZE]);
tb_status nvshmem_comm_create(void *context, const tb_comm_desc *desc, tb_comm **out);
tb_status nvshmem_comm_check(void *context, tb_comm *comm, bool *is_ready);
void *nvshmem_comm_memory(void *context, tb_comm *comm);
void nvshmem_comm_destroy(void *context, tb_comm *comm);
/* A message about communicators. */
void nvshmem_told_comm(nvshmem *u, int32_t peer, const nvshmem_message *m);
void nvshmem_lost(nvshmem *u, int32_t peer, const char *why);
/* The communicator fails, at all ranks; `is_told`: the leader has said so. Its operations end in progress. lost: a
 * rank, or TB_NO_RANK. */
void nvshmem_fail(tb_comm *c, tb_status status, int32_t lost, bool is_told, const char *why);
/* What the thread has done. */
void nvshmem_take_jobs(nvshmem *u);
/* Frees messages that came early from this rank, or, if it is TB_NO_RANK, from all. */
void nvshmem_forget_early(nvshmem *u, int32_t peer);
/* Frees communicators that nobody needs any more. */
void nvshmem_sweep(nvshmem *u);
void nvshmem_free_comm(tb_comm *c);
/* The position of a rank; SIZE_MAX: it is none of them. */
size_t nvshmem_find(const tb_comm *c, int32_t rank);
/* Failures are noticed by peer_lost. */
void nvshmem_tell(const tb_comm *c, int32_t peer, nvshmem_message *m);

/* ---- nvshmem_op.c: operations ---- */

tb_status nvshmem_post(void *context, tb_op *op);
void nvshmem_cancel(void *context, tb_op *op);
void nvshmem_told_op(tb_comm *c, int32_t peer, const nvshmem_message *m);
/* Returns whether there is more to do soon. */
bool nvshmem_advance(tb_comm *c);
/* All operations of a communicator complete at once, as those of `cancel` do. */
void nvshmem_cancel_all(tb_comm *c);
/* Operations that name a rank which has left end. */
void nvshmem_end_with(tb_comm *c, int32_t peer);
/* All operations of a failed communicator move to `ended`. */
void nvshmem_end_all(tb_comm *c);
/* Waits, for a second at most, for puts that are under way without an operation. */
bool nvshmem_drain(tb_comm *c);

#endif
