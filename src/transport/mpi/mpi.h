/* What the files of the transport mpi share: mpi.c (its table, operations, progress), mpi_message.c (messages, and what
 * becomes of chunks), mpi_end.c (messages that are given up, peers that are lost), mpi_frame.c (frames, and their
 * order), mpi_chunk.c (memory that MPI sends from and receives to), mpi_request.c (requests under way, the lock, and
 * the timer that has them looked at).
 *
 * Our tags have 64 bits, MPI's perhaps 15. So everything begins with a *frame*, a header with up to TB_SHORT_MAX bytes
 * behind it, under one MPI tag; each rank keeps a few receives for frames posted. The frame of a long message says
 * under which MPI tag its bytes follow, in chunks: one that no other message of its sender has meanwhile. Chunks are
 * sent in MPI's synchronous mode: they are done when a receive has matched them, so the tag can be used again. Chunks
 * of a message that nobody receives any more are received and thrown away.
 *
 * While MPI has chunks in an operation's memory, the operation is not over: whoever is told so may free it, or fill it
 * anew. A receive that nothing has come for yet MPI gives back; what is half-way has to be waited for, and so has a
 * send. Cancelling waits there and then; if the peer is lost, the message is MESSAGE_ENDS until MPI is through with it.
 * Both wait CANCEL_MS and no longer, closing CLOSE_MS: a peer that stands still in the middle of a chunk must not
 * hold up others for good. Then an error is logged, since MPI may still write there. */
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
    RING = 16, /* receives posted for frames */
    CHUNK = 512 << 10,
    WINDOW = 4,        /* chunks of a message under way */
    MAX_STREAMS = 256, /* long messages being sent: MPI tags for them */
    CANCEL_MS = 5000,  /* for chunks that MPI can't give back */
    CLOSE_MS = 1000,   /* the same, when closing */
    PART_MS = 200,     /* for others to close, too */
};

/* What an endpoint is opened on. Two communicators, so that a test can have both ends of a connection in one process;
 * a world has the same twice. */
typedef struct tb__mpi_seat {
    MPI_Comm out, in;
    unsigned char uid[MPI_UID_SIZE]; /* the same for all ranks of it, and for nobody else */
    bool is_taken;                   /* set by whoever opens: `in` is its own from then on, and is freed by it */
} tb__mpi_seat;

/* The next endpoint that this thread opens is on this seat. NULL: none. */
void tb__mpi_take_seat(tb__mpi_seat *seat);

extern const tb_transport_ops tb__mpi_ops;

typedef enum frame_kind {
    FRAME_SHORT,    /* a message, which is behind it */
    FRAME_LONG,     /* a message of nbytes, which follows in chunks */
    FRAME_WITHDRAW, /* long message `id` ends when nbytes of it have been sent */
    FRAME_BYE,      /* the sender closes: this is its last, and its chunks are through */
} frame_kind;

typedef struct header {
    uint32_t kind, is_expected; /* the latter of short messages, as in tb_op */
    uint64_t tag, nbytes;
    uint64_t id;     /* of a long message, at its sender; modulo MAX_STREAMS, the MPI tag of its chunks, less 1 */
    uint64_t serial; /* how many frames came before it, from the same rank to the same */
} header;

typedef enum message_state {
    MESSAGE_WAITS,    /* a receive that nothing has come for */
    MESSAGE_MATCHED,  /* a receive that `arrival` is for, to be dealt with in progress */
    MESSAGE_QUEUED,   /* a long send that waits for an MPI tag */
    MESSAGE_RECEIVES, /* chunks */
    MESSAGE_FRAME,    /* goes out; op is NULL if it is the transport's own */
    MESSAGE_SENDS,    /* chunks */
    MESSAGE_ENDS,     /* it was given up, but MPI still has chunks of it; `op` is told `decision` when it hasn't */
} message_state;

/* A chunk under way. */
typedef struct chunk {
    size_t request; /* NO_REQUEST: none */
    size_t offset, nbytes;
    bool is_direct;   /* in the operation's own memory, not in `bounce` */
    char *bounce;     /* NULL: none was needed yet */
    bool is_recalled; /* MPI was asked to give it back */
    bool is_done;     /* it is through, and not counted yet */
} chunk;

#define NO_REQUEST SIZE_MAX

/* An operation, or a frame. */
typedef struct message {
    tb__waiter waiter; /* its peer is an MPI rank, here and below */
    message_state state;
    tb_op *op; /* NULL: nobody's any more */
    int rank;
    uint64_t id; /* of a long one */
    int tag;     /* MPI's, of its chunks */
    size_t nbytes;
    size_t posted; /* where the next chunk begins: all before it were given to MPI, and are there or through */
    size_t done;   /* bytes that are through */
    size_t end;    /* of what is received: the sender stops there */
    chunk chunks[WINDOW];
    tb_status decision;   /* of one that ends ... */
    int64_t deadline_ms;  /* ... and when it is told at the latest */
    tb__arrival *arrival; /* a short message for a receive */
    bool is_ripe;         /* something of it has completed ... */
    int error;            /* ... with this error of MPI's */
    TAILQ_ENTRY(message) all, ripe;
    header header; /* of a frame, with its bytes */
    unsigned char data[];
} message;

typedef TAILQ_HEAD(message_list, message) message_list;

typedef struct peer {
    int32_t wire; /* as the engine calls it */
    bool is_connected;
    bool has_left;     /* its last frame has come */
    bool is_lost;      /* nothing is exchanged with it any more ... */
    bool is_told;      /* ... and the engine knows: all operations with it are over */
    char *why;         /* NULL: there was no memory for it */
    uint64_t nwritten; /* frames to it, and from it */
    uint64_t nopened;
} peer;

/* Whose request it is: a message's chunk, a message that is a frame, or a place in the ring. */
typedef struct owner {
    message *message; /* NULL: of the ring */
    size_t at;        /* which chunk, or which place */
} owner;

typedef struct place {
    size_t request;
    bool is_done;
    int rank, error;
    size_t nbytes;
    unsigned char bytes[sizeof(header) + TB_SHORT_MAX];
} place;

typedef struct mpi {
    tb_transport_env env;
    tb__mpi_seat seat;
    int rank, nranks;
    int nbyes;        /* ranks that have closed */
    bool has_leavers; /* some of those are not lost yet */
    bool is_over;     /* closed, or MPI was finalised ... */
    bool has_to_tell; /* ... which nobody knows yet */
    peer *peers;      /* by MPI rank */
    tb__index by_wire;
    tb__match receives, arrivals;
    tb__match early; /* by serial: frames that have overtaken another of the same rank */
    message_list all, ripe;
    size_t nwaiting, nunder_way; /* messages that wait for the other side, and requests but those of the ring */
    int64_t ending_ms;           /* when the first message that ends is to be told; 0: there is none */
    place *ring;
    size_t ndone;              /* places that have a frame */
    bool streams[MAX_STREAMS]; /* MPI tags in use, less 1 */
    size_t nqueued;
    uint64_t nlong; /* long messages that were sent */

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
    bool *is_freed; /* for whoever waits for it to part; NULL: nobody does */
} mpi;

/* mpi_request.c. All of MPI is called with this lock, which is recursive: it can be finalised by another thread. */
void mpi_lock(void);
void mpi_unlock(void);
/* Lets the other endpoints of the process have the lock for a moment. Nobody else uses the one that naps: its thread is
 * here, and finalising waits. */
void mpi_nap(void);
/* From here on nobody naps. */
void mpi_end_naps(void);

tb_status mpi_requests_init(mpi *m);
void mpi_requests_fini(mpi *m);
/* Room for one more, which nothing that follows can fail for. */
tb_status mpi_reserve_request(mpi *m);
size_t mpi_keep_request(mpi *m, MPI_Request request, owner whose);
/* Looks at all of them, and notes what is done with their owners. Whether anything is. */
tb_status mpi_test_requests(mpi *m, bool *did);
/* Asks a receive back, once. It is over, later or at once: either it never happened, or it has come. */
void mpi_recall_request(mpi *m, size_t request);
/* Waits until it is done. `is_taken_back`: it never happened. TB_TIMEOUT: MPI still has it. */
tb_status mpi_end_request(mpi *m, size_t request, int64_t deadline_ms, bool *is_taken_back);
void mpi_note_event(mpi *m);
void mpi_set_timer(mpi *m);
tb_status mpi_failed(const char *what, int code);

/* mpi_chunk.c: gives the next chunk of a message to MPI, as its i-th under way. */
tb_status mpi_begin_chunk(mpi *m, message *msg, size_t i);

/* mpi_frame.c */
tb_status mpi_fill_place(mpi *m, size_t at);
/* Gives the ring back to MPI. */
void mpi_drop_ring(mpi *m);
/* Sends a message that is a frame. */
tb_status mpi_send_frame(mpi *m, message *msg, size_t nbytes_behind);
/* Sends one of the transport's own. */
tb_status mpi_write_frame(mpi *m, int rank, header h);
void mpi_send_bye(mpi *m, int rank);
/* Opens those that have come. */
tb_status mpi_open_frames(mpi *m);

/* mpi_message.c */
message *mpi_new_message(mpi *m, message_state state, tb_op *op, int rank, size_t nbytes_behind);
void mpi_set_state(mpi *m, message *msg, message_state state);
/* Whether MPI has anything of it; `is_direct`: in the operation's own memory. */
bool mpi_is_held(const message *msg, bool is_direct);
/* Frees one that MPI has nothing of. */
void mpi_free_message(mpi *m, message *msg);
/* The same when the endpoint goes: what MPI has of it stays. */
void mpi_leave_message(mpi *m, message *msg);
/* Tells whose operation it is, and takes it from the message, which lives on. */
void mpi_tell(message *msg, tb_status status);
/* Tells, and frees one that MPI has nothing of. */
void mpi_finish(mpi *m, message *msg, tb_status status);
void mpi_ripen(mpi *m, message *msg);
tb_status mpi_post_send(mpi *m, tb_op *op, int rank);
tb_status mpi_post_receive(mpi *m, tb_op *op, int rank);
/* A frame is opened. */
tb_status mpi_on_frame(mpi *m, int rank, const header *h, const unsigned char *behind, size_t nbytes);
/* Goes on with what has completed a chunk, or was matched. */
void mpi_go_on(mpi *m, message *msg);
/* Begins long sends that wait for an MPI tag, as far as there are any. */
void mpi_send_queued(mpi *m);

/* mpi_end.c */
/* Takes chunks back from MPI: those in the operation's memory, or all; of a receive, always all. TB_TIMEOUT: some are
 * still there. */
tb_status mpi_release(mpi *m, message *msg, bool is_all, int64_t deadline_ms);
/* The receives of chunks at `from` and behind it. */
tb_status mpi_take_back(mpi *m, message *msg, size_t from, int64_t deadline_ms);
void mpi_cancel_message(mpi *m, message *msg);
/* Ends it with `status`, as soon as MPI has nothing of the operation's memory; at once if the endpoint is over. */
void mpi_give_up(mpi *m, message *msg, tb_status status);
/* MPI has nothing any more of one that ends. */
void mpi_end_message(mpi *m, message *msg);
/* Tells those that end of which the deadline has passed; of an endpoint that is over, all. */
void mpi_end_late(mpi *m);
void mpi_lose(mpi *m, int rank, const char *why);
const char *mpi_why(const peer *p); /* it was lost */
/* Those whose last frame has come, once all that they said before has been heard. */
void mpi_lose_leavers(mpi *m);

#endif
