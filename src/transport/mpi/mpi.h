/* Shared by the files of the mpi transport: mpi.c (its table, operations, progress), mpi_message.c (messages and their
 * chunks), mpi_end.c (cancelled messages, lost peers), mpi_frame.c (frames, and their order), mpi_chunk.c (memory that
 * MPI sends from and receives to), mpi_request.c (requests under way, the lock, and the polling timer).
 *
 * Our tags have 64 bits, MPI's perhaps 15. So every message begins with a *frame*, a header and up to TB_SHORT_MAX
 * bytes of data, under one MPI tag; each rank keeps a ring of receives for frames posted. The bytes of a long message
 * follow its frame in chunks, under an MPI tag that no other message of the sender has meanwhile. Chunks are sent in
 * MPI's synchronous mode: they are done when a receive has matched them, so that the tag can be reused. Chunks of a
 * cancelled receive are received and discarded.
 *
 * While MPI accesses an operation's memory, the operation is not completed, because its owner may free or reuse the
 * memory then. MPI can cancel a receive that is not matched; a chunk that has begun has to be waited for, and so has a
 * send. Cancelling waits at once; if the peer is lost, the message is MESSAGE_ENDS until MPI is done with it. Both wait
 * at most CANCEL_MS, closing CLOSE_MS: a peer that is stopped in the middle of a chunk must not block others. After
 * that an error is logged, because MPI may still write there. */
#ifndef TB_TRANSPORT_MPI_MPI_H
#define TB_TRANSPORT_MPI_MPI_H

#include "base/index.h"
#include "transport/message.h"

#include <mpi.h>
#include <pthread.h>
#include <sys/queue.h>

enum {
    MPI_UID_SIZE = 16,
    FRAME_TAG = 0,
    RING = 16, /* posted receives for frames */
    CHUNK = 512 << 10,
    WINDOW = 4,        /* chunks of a message in flight */
    MAX_STREAMS = 256, /* MPI tags of long messages being sent */
    CANCEL_MS = 5000,  /* for chunks that MPI can't cancel */
    CLOSE_MS = 1000,   /* the same, when closing */
    CLOSING_MS = 200,  /* for the goodbyes of other ranks */
};

/* The communicators of an endpoint. There are two so that a test can have both ends of a connection in one process; in
 * a world both are the same. */
typedef struct tb__mpi_comms {
    MPI_Comm out, in;
    unsigned char uid[MPI_UID_SIZE]; /* the same for all ranks of the communicator, and unique */
    bool is_taken;                   /* set when an endpoint is opened, which then owns and frees `in` */
} tb__mpi_comms;

/* Sets the communicators of the next endpoint that this thread opens. NULL: none. */
void tb__mpi_set_next_comms(tb__mpi_comms *comms);

extern const tb_transport_ops tb__mpi_ops;

typedef enum frame_kind {
    FRAME_SHORT,    /* a short message, with its bytes */
    FRAME_LONG,     /* a long message of nbytes, which follow in chunks */
    FRAME_WITHDRAW, /* long message `id` is cancelled after nbytes of it */
    FRAME_BYE,      /* the sender closes: its last frame, after all its chunks */
} frame_kind;

typedef struct header {
    uint32_t kind, is_expected; /* is_expected: of short messages, as in tb_op */
    uint64_t tag, nbytes;
    uint64_t id;     /* of a long message, at its sender; its chunks have MPI tag id % MAX_STREAMS + 1 */
    uint64_t serial; /* counts the frames from this sender to this receiver */
} header;

typedef enum message_state {
    MESSAGE_WAITS,    /* a receive without a message yet */
    MESSAGE_MATCHED,  /* a receive that gets short_message in the next progress */
    MESSAGE_QUEUED,   /* a long send that waits for an MPI tag */
    MESSAGE_RECEIVES, /* chunks */
    MESSAGE_FRAME,    /* a frame being sent; op is NULL if it is the transport's own */
    MESSAGE_SENDS,    /* chunks */
    MESSAGE_ENDS,     /* cancelled, but MPI still has chunks of it; `op` then completes with final_status */
} message_state;

/* A chunk under way. */
typedef struct chunk {
    size_t request; /* NO_REQUEST: none */
    size_t offset, nbytes;
    bool is_direct;        /* in the operation's memory, not in `bounce` */
    char *bounce;          /* buffer; NULL: not needed yet */
    bool cancel_requested; /* MPI_Cancel was called */
    bool is_done;          /* MPI has completed it, but it is not counted yet */
} chunk;

#define NO_REQUEST SIZE_MAX

/* An operation, or a frame. */
typedef struct message {
    tb__waiter waiter; /* `peer` is an MPI rank, here and below */
    message_state state;
    tb_op *op; /* NULL: none, or completed */
    int rank;
    uint64_t id; /* of a long one */
    int tag;     /* MPI tag of its chunks */
    size_t nbytes;
    size_t posted; /* bytes in chunks that were given to MPI */
    size_t done;   /* bytes in completed chunks */
    size_t end;    /* of a receive: where a cancelled send stops */
    chunk chunks[WINDOW];
    tb_status final_status;        /* of MESSAGE_ENDS ... */
    int64_t deadline_ms;           /* ... and when it completes at the latest */
    tb__unexpected *short_message; /* of MESSAGE_MATCHED */
    bool is_ready;                 /* a request of it has completed ... */
    int error;                     /* ... with this error of MPI's */
    TAILQ_ENTRY(message) all, ready;
    header header; /* of a frame, with its data */
    unsigned char data[];
} message;

typedef TAILQ_HEAD(message_list, message) message_list;

typedef struct peer {
    int32_t transport_rank; /* the loop's rank for it */
    bool is_connected;
    bool has_left;         /* its goodbye has arrived */
    bool is_lost;          /* no further messages ... */
    bool is_loss_reported; /* ... reported to the loop, after all operations with it were completed */
    char *why;             /* NULL: there was no memory for the message */
    uint64_t nwritten;     /* frames sent to it, and handled from it */
    uint64_t nhandled;
} peer;

/* What a request belongs to: a message's chunk, a frame, or a slot of the ring. */
typedef struct owner {
    message *message; /* NULL: of the ring */
    size_t at;        /* index of the chunk, or slot */
} owner;

typedef struct ring_slot {
    size_t request;
    bool is_done;
    int rank, error;
    size_t nbytes;
    unsigned char bytes[sizeof(header) + TB_SHORT_MAX];
} ring_slot;

typedef struct mpi {
    tb_transport_env env;
    tb__mpi_comms comms;
    int rank, nranks;
    int ngoodbyes;      /* ranks that have sent their goodbye */
    bool has_leavers;   /* some of these are not lost yet */
    bool is_closed;     /* closed, or MPI was finalised ... */
    bool has_to_report; /* ... which has not been reported yet */
    peer *peers;        /* by MPI rank */
    tb__index by_transport_rank;
    tb__match receives, unexpected;
    tb__match early; /* by serial: frames that arrived before one with a lower serial */
    message_list all, ready;
    size_t nwaiting, nunder_way; /* messages that wait for the other rank; requests, except those of the ring */
    int64_t ending_ms;           /* earliest deadline of MESSAGE_ENDS; 0: none */
    ring_slot *ring;
    size_t ndone;              /* slots with a frame */
    bool streams[MAX_STREAMS]; /* [i]: MPI tag i + 1 is in use */
    size_t nqueued;
    uint64_t nlong; /* long messages sent */

    /* mpi_request.c */
    TB_VEC(MPI_Request) requests;
    TB_VEC(owner) owners;
    TB_VEC(size_t) spare;
    int *outcomes;
    MPI_Status *statuses;
    size_t noutcomes;
    int timer;
    int64_t interval_ns, event_ns;
    LIST_ENTRY(mpi) link;
    bool *is_freed; /* set when it is freed; NULL: nobody waits for that */
} mpi;

/* mpi_request.c. All calls of MPI hold this recursive lock, because another thread may finalise MPI. */
void mpi_lock(void);
void mpi_unlock(void);
/* Releases the lock for a moment, for other endpoints of the process. The caller's endpoint does not change meanwhile:
 * its thread is here, and finalising waits. */
void mpi_yield_lock(void);
/* From now on mpi_yield_lock does nothing. */
void mpi_stop_yielding(void);

tb_status mpi_requests_init(mpi *m);
void mpi_requests_fini(mpi *m);
/* Makes room for one more request, so that mpi_keep_request can't fail. */
tb_status mpi_reserve_request(mpi *m);
size_t mpi_keep_request(mpi *m, MPI_Request request, owner whose);
/* Tests all requests, and records completions in their owners. *did: there were some. */
tb_status mpi_test_requests(mpi *m, bool *did);
/* Calls MPI_Cancel for a receive, once. It then completes soon, cancelled or with its data. */
void mpi_cancel_request(mpi *m, size_t request);
/* Waits until the request is complete. TB_TIMEOUT: it is not. */
tb_status mpi_end_request(mpi *m, size_t request, int64_t deadline_ms, bool *was_cancelled);
void mpi_record_event(mpi *m);
void mpi_set_timer(mpi *m);
tb_status mpi_failed(const char *what, int code);

/* mpi_chunk.c: starts the next chunk of a message, in chunks[i]. */
tb_status mpi_begin_chunk(mpi *m, message *msg, size_t i);

/* mpi_frame.c */
tb_status mpi_post_ring_receive(mpi *m, size_t at);
/* Cancels the receives of the ring. */
void mpi_drop_ring(mpi *m);
/* Sends msg->header and its data. */
tb_status mpi_send_frame(mpi *m, message *msg, size_t data_nbytes);
/* Sends a frame of the transport's own. */
tb_status mpi_write_frame(mpi *m, int rank, header h);
void mpi_send_bye(mpi *m, int rank);
/* Handles the frames in the ring. */
tb_status mpi_handle_frames(mpi *m);

/* mpi_message.c */
message *mpi_new_message(mpi *m, message_state state, tb_op *op, int rank, size_t data_nbytes);
void mpi_set_state(mpi *m, message *msg, message_state state);
/* Whether MPI has requests of it; `is_direct`: with the operation's memory. */
bool mpi_is_held(const message *msg, bool is_direct);
/* MPI has no requests of it. */
void mpi_free_message(mpi *m, message *msg);
/* Frees it when the endpoint is freed; if MPI still has requests of it, keeps it forever. */
void mpi_abandon_message(mpi *m, message *msg);
/* Completes the operation; the message stays, without it. */
void mpi_complete_op(message *msg, tb_status status);
/* Completes the operation and frees the message, which MPI has no requests of. */
void mpi_finish(mpi *m, message *msg, tb_status status);
void mpi_mark_ready(mpi *m, message *msg);
tb_status mpi_post_send(mpi *m, tb_op *op, int rank);
tb_status mpi_post_receive(mpi *m, tb_op *op, int rank);
/* Handles a frame, in order. */
tb_status mpi_on_frame(mpi *m, int rank, const header *h, const unsigned char *data, size_t nbytes);
/* Continues a message after a completed request or a match. */
void mpi_advance_message(mpi *m, message *msg);
/* Starts long sends that wait for an MPI tag, while there are free tags. */
void mpi_send_queued(mpi *m);

/* mpi_end.c */
/* Ends the requests of chunks: those with the operation's memory, or all; of a receive, always all. TB_TIMEOUT: some
 * are left. */
tb_status mpi_reclaim_memory(mpi *m, message *msg, bool is_all, int64_t deadline_ms);
/* Cancels the receives of chunks from offset `from` on. */
tb_status mpi_cancel_chunks(mpi *m, message *msg, size_t from, int64_t deadline_ms);
void mpi_cancel_message(mpi *m, message *msg);
/* Ends the message with `status` once MPI has released the operation's memory; at once if the endpoint is closed. */
void mpi_abort_message(mpi *m, message *msg, tb_status status);
/* A request of a MESSAGE_ENDS has completed. */
void mpi_end_message(mpi *m, message *msg);
/* Completes messages of MESSAGE_ENDS whose deadline has passed; if the endpoint is closed, all. */
void mpi_complete_overdue(mpi *m);
void mpi_lose_peer(mpi *m, int rank, const char *why);
const char *mpi_why(const peer *p); /* why it was lost */
/* Loses peers whose goodbye has arrived, after their earlier messages were handled. */
void mpi_lose_leavers(mpi *m);

#endif
