/* The ucx transport: processes on many machines, through OpenUCX.
 *
 * All but the first message to a peer are active messages of one id, with a frame of ours as the header. So a receiver
 * knows the sender, tags have 64 bits for each pair of ranks, and messages that are too long are known before they are
 * received. (UCX's own tags are matched across all senders. Large messages are as fast either way.)
 *
 * The first is a hello, a tagged message; nothing else is sent before the peer's hello has arrived (ucx_handshake.c).
 *
 * Short messages carry their bytes. Long ones, whose receive is posted already, are sent in chunks, in one of two ways.
 * The sender chooses by the lanes that UCX found:
 *
 *  - copied, over TCP: into memory of ours before UCX sees them, and at the receiver out of UCX's own. Chunks are short
 *    enough to be in the cache when they are copied, and go at once (eager): UCX sends a segment from where it is, and
 *    hands it over where it was received, which was a third faster than its rendezvous.
 *  - direct, over RDMA and shared memory: long ones, from where they lie in the sender's operation to where they belong
 *    in the receiver's, by UCX's rendezvous. An adapter then reads the sender's memory itself.
 *
 * Operations in memory of a GPU go in direct chunks, by rendezvous, if UCX has lanes for it; the kind of memory is told
 * to UCX. Both ends of a message are in such memory, or neither is. UCX's functions are called with the context
 * of the GPU current (ucx_enter).
 *
 * UCX can't release the memory of a request early. So an operation with direct chunks under way is not done, even if it
 * fails or is cancelled, before UCX has completed these requests (`nrequests`). If the peer is stopped, that takes
 * closing its endpoint, which loses the peer.
 *
 * There is no access to peers' memory (no mem_... slots). TCP can't read a peer's memory. Shared memory lanes read
 * whatever is at an address, registered or not; and InfiniBand answers an access to what has been unregistered by
 * breaking the connection. Neither lets a single access fail with an error. */
#ifndef TB_TRANSPORT_UCX_UCX_H
#define TB_TRANSPORT_UCX_UCX_H

#include "base/index.h"
#include "base/proof.h"
#include "transport/message.h"
#include "transport/ucx/ucx_load.h"

#include <pthread.h>

enum {
    UCX_MAGIC = 0x54425558,
    UCX_VERSION = 7,
    UCX_ACTIVE_MESSAGE = 1,    /* id of our handler */
    UCX_CHUNK_SIZE = 60 << 10, /* with headers, one segment of UCX's TCP */
    UCX_WINDOW = 16,           /* chunks in flight to one peer */
    UCX_SPARE = 64,            /* free chunks that are kept for reuse */

    UCX_DIRECT_SIZE = 4 << 20,    /* of direct chunks, at most */
    UCX_DIRECT_MIN = 64 << 10,    /* shorter chunks are copied */
    UCX_DIRECT_WINDOW = 4,        /* direct chunks in flight to one peer */
    UCX_PIECE_LONG = 256 << 10,   /* a longer piece is a chunk of its own: adapters read contiguous memory */
    UCX_PIECE_MIN = 4 << 10,      /* pieces that are shorter on average are copied */
    UCX_CHUNK_MAX = 8 << 20,      /* that is accepted */
    UCX_DEVICE_SIZE = 64 << 20,   /* of chunks in memory of a GPU, at most */
    UCX_CANCEL_TIMEOUT_MS = 1000, /* for UCX to complete the requests of a cancelled operation */
    UCX_LOSE_TIMEOUT_MS = 10000,  /* for UCX to complete the requests of a closed endpoint */
};

typedef enum ucx_kind {
    UCX_HELLO,   /* first, a tagged message of UCX; tag: whether the sender's loop has a thread; number: of the
                    connection, 0 means 1; carries a ucx_challenge and the sender's address */
    UCX_PROOF,   /* second; carries the sender's proof */
    UCX_MESSAGE, /* tag; carries the bytes */
    UCX_REVOKE,  /* id, tag: the long message is withdrawn */
    UCX_DONE,    /* back: id: the long message is received, or has no receive any more */
    UCX_BYE,     /* the sender closes */
    UCX_PING,    /* at: a number for the PONG, or 0 */
    UCX_PONG,    /* at: of the PING */
    UCX_CHUNK,   /* id, tag, nbytes: of a long message; at: offset of the bytes that it carries. Chunks arrive in any
                    order, also relative to other frames */
} ucx_kind;

/* In the machine's byte order, like UCX's own headers. */
typedef struct ucx_frame {
    uint16_t kind;
    union {
        uint16_t is_expected;  /* of short messages, as in tb_op */
        uint16_t is_on_device; /* of chunks: the sender has it in memory of a GPU, so that the receiver does, too */
    };
    int32_t rank;    /* the sender's */
    uint64_t from;   /* of a hello, ucx_connection_id; of others, the connection's secret id */
    uint64_t serial; /* counts the sender's frames to this receiver, except chunks */
    uint64_t id;     /* of a long message, at its sender */
    uint64_t tag, nbytes;
    uint64_t number; /* of the connection */
    uint64_t at;     /* offset of a chunk in the message */
} ucx_frame;

typedef struct ucx ucx;
typedef struct ucx_peer ucx_peer;

typedef enum ucx_state {
    UCX_SENDING,   /* a long message */
    UCX_WAITING,   /* a receive without a message yet */
    UCX_RECEIVING, /* a long message */
    UCX_ENDING,    /* it ends when UCX has completed its requests */
    UCX_FINISHED,
} ucx_state;

/* A posted operation. */
typedef struct ucx_posted {
    tb__waiter waiter; /* in one of the lists, or a receive by its tag */
    tb_op *op;
    ucx_peer *peer;
    ucx_state state;
    size_t nbytes, at;     /* at: how much has been sent */
    tb__piece_cursor mark; /* position of chunks in the operation's pieces */
    uint64_t id;           /* of the long message */
    size_t coming,
        got; /* of a receive: bytes of chunks that have arrived or are being fetched; of those that are done */
    size_t
        nrequests; /* UCX's requests for direct chunks, which access the operation's memory, or for the short message */
} ucx_posted;

/* A request of UCX, with memory of ours or of an operation. It exists until UCX has completed it, also after the
 * operation has ended. */
typedef struct ucx_transfer {
    ucx *owner;
    ucx_peer *peer;
    struct ucx_transfer *next, **link; /* in the list of all transfers */
    ucx_frame frame;
    size_t nbytes;
    bool is_direct;     /* the bytes are in an operation's memory; `data` may have an iov list */
    bool is_sent;       /* direct: sent, not received */
    bool is_on_device;  /* direct: in memory of a GPU */
    ucx_posted *direct; /* the operation whose memory it uses, or that waits for it; NULL: none, or detached */
    bool is_spare;      /* has room for a copied chunk, and can be reused */
    struct ucx_transfer *next_queued; /* in ucx_peer.queued */
    _Alignas(ucp_dt_iov_t) unsigned char data[];
} ucx_transfer;

/* A range of an operation's bytes, as pieces. */
typedef struct ucx_span {
    const tb_piece *pieces; /* the first piece with bytes of it */
    size_t skip;            /* bytes to skip in the first piece */
    size_t nbytes, npieces; /* npieces: without empty ones */
} ucx_span;

/* A newer connection that the peer has begun, while the loss of the current one is not reported yet. */
typedef struct ucx_successor {
    uint64_t number;
    bool is_driven;
    tb__proof_end end;
    size_t nbytes;
    unsigned char address[];
} ucx_successor;

/* A connection with a peer. A connection after a loss is a new ucx_peer with a higher number; both ends use the highest
 * number that either has begun. */
struct ucx_peer {
    ucx *owner;
    int32_t rank;
    uint64_t id;                /* of the peer's process; 0: not known yet */
    uint64_t number;            /* of the connection, from 1 */
    ucp_ep_h ep;                /* NULL: none, or closed */
    uint64_t nendpoints;        /* that were created for the peer, in all its connections */
    tb__proof_end mine, theirs; /* of our hello, and of the peer's, */
    bool has_challenge;         /* which has arrived, */
    bool is_challenge_driven;   /* and whether the peer's loop has a thread */
    uint64_t id_out, id_in;     /* ucx_frame.from, known to those who have the key */
    bool has_hello;             /* its proof has arrived, too: it belongs to the bus */
    bool is_stranger;           /* it has begun, and has not proved yet that it belongs to the bus, */
    unsigned stranger_beats;    /* for so many heartbeats */
    unsigned char *address;     /* of a peer without hello, to send ours again */
    size_t address_nbytes;
    unsigned unanswered_beats;     /* heartbeats since our last hello, until the peer's arrives, */
    unsigned max_unanswered_beats; /* and the limit */
    ucx_successor *successor;      /* NULL: none */
    uint64_t last_ping, last_pong; /* numbers of the last PING for is_reached, and of the last PONG */
    bool reached_changed;          /* is_reached may have changed to true */
    size_t ntransfers;             /* that refer to this peer */
    bool is_lost;
    const char *why;                     /* the next progress loses the peer for this reason; NULL: it does not */
    char why_text[96];                   /* buffer for `why` */
    ucx_transfer *queued, **last_queued; /* frames to be sent when its hello has arrived */
    uint64_t serial_out, serial_in, last_id;
    bool is_driven;         /* its loop has a thread, as its hello says */
    bool has_received;      /* frames since the last heartbeat, */
    bool is_sending_chunks; /* chunks among them */
    unsigned silent_beats;  /* heartbeats since the last frame */
    bool is_direct;         /* its lanes support direct chunks */
    size_t in_flight;       /* copied chunks in flight to it */
    size_t ndirect;         /* direct chunks in flight to it */
    size_t nrequests;       /* these, and direct chunks being fetched */
    tb__waiters sending;    /* long sends */
    tb__waiters receiving;  /* receives of a long message from it */
    tb__waiters ending;     /* operations that only wait for UCX */
};

/* A socket on which UCX listens. */
typedef struct ucx_listener {
    int fd;
    uint64_t number; /* the kernel's socket cookie: the descriptor may have been reused */
} ucx_listener;

struct ucx {
    pthread_mutex_t lock;     /* recursive; held by the driver or the backup driver */
    uint64_t nprogress_calls; /* by the driver */
    pthread_t backup_driver;
    bool has_backup_driver;
    int quit; /* eventfd that stops it */
    const ucx_functions *call;
    tb_transport_env env;
    bool is_user; /* ucx_begin_use has been called */
    uint64_t id;  /* random: tells processes of the same rank apart */
    tb__proof_key key;
    tb__proof_end hello_end; /* of the hello that is being handled */
    bool is_deaf;            /* no hello is received until a stranger has proved itself or is given up */
    int64_t warn_again_ms;   /* when a refused hello may be logged again */
    ucp_context_h context;
    ucp_worker_h worker;
    unsigned char *address; /* ours, as peers get it */
    size_t address_nbytes;
    int epoll, wake;            /* epoll: of UCX's descriptor and ours */
    int worker_fd;              /* UCX's */
    int timer;                  /* of the heartbeat */
    bool is_timer_set;          /* the timer is set */
    bool is_awake;              /* `wake` is readable */
    TB_VEC(ucx_peer *) peers;   /* the newest connection with each */
    tb__index by_rank;          /* in there */
    TB_VEC(ucx_peer *) retired; /* older connections, until UCX has completed their requests */
    tb__match receives, unexpected;
    tb__match early;         /* by serial: frames that arrived before one with a lower serial */
    tb__waiters finished;    /* to be completed in the next progress */
    ucx_transfer *transfers; /* under way */
    ucx_transfer *spare;     /* of chunks */
    size_t nspare;
    size_t npending;         /* endpoints that UCX is flushing or closing */
    size_t nqueued;          /* frames to peers whose hello has not arrived */
    unsigned char *hello;    /* receive buffer of the next hello */
    TB_VEC(int) descriptors; /* open before a call of UCX */
    TB_VEC(uint16_t) ports;  /* that UCX listens on */
    TB_VEC(ucx_listener) listeners;
    bool is_paused;         /* listeners are paused, because descriptors are running out */
    int guard;              /* timer to check that ... */
    int64_t guard_again_ms; /* ... but not before this time */
    void *listening;        /* UCX's request for the next hello; NULL: none */
    bool carries_cuda;      /* UCX has lanes for memory of GPUs */
    size_t ndevice;         /* requests in memory of a GPU that are under way */
    tb_mem_kind memory;     /* of the last operation that was not in host memory; TB_MEM_HOST: there was none */
    int device;             /* its GPU */
};

/* ucx.c */
ucx_peer *ucx_find(const ucx *u, int32_t rank);
ucx_peer *ucx_find_or_add(ucx *u, int32_t rank);
void ucx_wake(ucx *u);
/* Locks, and, once there have been operations in memory of a GPU, makes its context current; ucx_leave gets the result.
 * Around all calls of UCX. */
bool ucx_enter(ucx *u);
void ucx_leave(ucx *u, bool is_entered);
/* Only the context, of one GPU. */
bool ucx_enter_device(const ucx *u, tb_mem_kind memory, int device);
void ucx_leave_device(const ucx *u, bool is_entered);
/* Calls ucp_worker_progress, a bounded number of times. */
void ucx_progress_worker(ucx *u);
/* The next progress loses the peer; `why` must stay valid. */
void ucx_fail_peer(ucx_peer *peer, const char *why);
/* The same, with UCX's status as the reason. */
void ucx_fail_peer_by_status(ucx_peer *peer, ucs_status_t status);
/* Closes the endpoint by force: UCX completes its requests without the peer. */
void ucx_close_endpoint(ucx_peer *peer);
/* Calls ucp_worker_progress until *count is 0. False: timeout. */
bool ucx_progress_until_zero(ucx *u, const size_t *count, int timeout_ms);
/* Whether this process can open `needed` files, at most 64: 0 or an errno. */
int ucx_try_descriptors(size_t needed);
/* Fails with `what`, UCX's status and the variables that select its devices. */
tb_status ucx_fail_by_choice(const ucx *u, const char *what, ucs_status_t status, tb_status out);
/* Whether the operation's bytes can't be accessed here. */
static inline bool ucx_is_on_device(const tb_op *op) {
    return op->memory != TB_MEM_HOST;
}
static inline bool ucx_has_failed(const ucx_peer *peer) {
    return peer->is_lost || peer->why;
}

/* ucx_handshake.c: connections and hellos. */

/* Precedes UCX's own address. UCX does not validate addresses, so they have a checksum. */
typedef struct ucx_address {
    uint32_t magic, version;
    uint64_t id;
    uint64_t nbytes, checksum;
} ucx_address;

/* Comes before the address in a hello. */
typedef struct ucx_challenge {
    uint8_t nonce[TB__PROOF_NONCE];
    uint8_t code[TB__SHA256_NBYTES]; /* HMAC of the hello, with zeros in this place. UCX never sees the address of a
                                      * sender without the key */
} ucx_challenge;

/* Limits for processes that have not proved yet that they belong to the bus: their number, and bytes of an address. */
enum { UCX_STRANGERS = 64, UCX_STRANGER_NBYTES = 4096 };
_Static_assert(sizeof(ucx_peer) + TB_ADDRESS_MAX <= UCX_STRANGER_NBYTES, "a stranger takes at most 4 KiB");

tb_status ucx_check_address(const void *address, size_t nbytes, ucx_address *head);
/* Creates an endpoint to the worker with this address, if the peer has none, and sends our hello. */
tb_status ucx_connect_endpoint(ucx_peer *peer, const void *address, size_t nbytes);
/* Replaces a lost connection by a new one with this number. NULL: no memory. */
ucx_peer *ucx_replace_peer(ucx_peer *lost, uint64_t number);
/* ucx_frame.from of a process's connection. */
uint64_t ucx_connection_id(uint64_t id, uint64_t number);
void ucx_free_peer(ucx_peer *peer);
/* Frees retired connections without requests. */
void ucx_free_retired(ucx *u);
/* Sends a PING whose PONG makes is_reached true. */
void ucx_ping(ucx_peer *peer);
/* Starts and stops receiving hellos. */
tb_status ucx_receive_hellos(ucx *u);
void ucx_stop_receiving_hellos(ucx *u);
void ucx_send_hello(ucx_peer *peer);
/* The frame is sent when the peer's hello has arrived. */
void ucx_queue_until_hello(ucx_transfer *t);
/* The peer's hello, with u->hello_end, has arrived: sends our proof. */
void ucx_answer_hello(ucx_peer *peer, bool is_driven);
/* The peer's proof has arrived. False: it does not have the token. */
bool ucx_on_proof(ucx_peer *peer, const unsigned char *proof, size_t nbytes);
/* Drops the state of a stranger with the rank of another process. */
void ucx_forget_stranger(ucx_peer *peer);
/* Receives hellos again, if there are fewer strangers than UCX_STRANGERS. */
void ucx_listen_again(ucx *u);
/* A new connection begins when a hello was not answered for so many heartbeats; the second is for connections after a
 * loss. */
enum { UCX_HELLO_BEATS = 8, UCX_HELLO_BEATS_AGAIN = 2 };
void ucx_retry_hello(ucx_peer *peer);
/* Replaces a lost connection by the successor that the peer has begun. */
void ucx_accept_successor(ucx_peer *lost);
void ucx_drop_queued(ucx_peer *peer);

/* ucx_wire.c: frames. A failure to send loses the peer. */

/* With `room` bytes in `data`; NULL: no memory. */
ucx_transfer *ucx_new_transfer(ucx_peer *peer, const ucx_frame *frame, size_t nbytes, size_t room);
void ucx_release(ucx_transfer *t);
/* Sets the frame's sender and serial. */
void ucx_set_sender(ucx_transfer *t);
/* Sends it from `data` (span is NULL), or from an operation's memory. */
void ucx_send_transfer(ucx_transfer *t, const ucx_span *place);
/* UCX's callback when a transfer has been sent. */
void ucx_on_sent(void *request, ucs_status_t status, void *arg);
/* Handles what UCX returned for a transfer. False: it is complete or has failed, and was freed. */
bool ucx_is_under_way(ucx_transfer *t, ucs_status_ptr_t request);
void ucx_send(ucx_peer *peer, const ucx_frame *frame);
void ucx_send_for(ucx_posted *p,
                  const ucx_frame *frame); /* the short message of an operation, which completes with it */
/* Whether the window has room for another chunk. */
bool ucx_may_send_chunk(const ucx_peer *peer);
/* Sends the next chunk of a long message. False: no memory. */
bool ucx_send_chunk(ucx_posted *p);
/* For an operation that ends although UCX has not completed its requests. */
void ucx_detach_requests(ucx *u, const ucx_posted *p);
ucs_status_t ucx_on_active_message(void *arg, const void *header, size_t header_length, void *data, size_t nbytes,
                                   const ucp_am_recv_param_t *param);
void ucx_free_transfers(ucx *u); /* after UCX is closed */

/* ucx_message.c: sends and receives. */
tb_status ucx_post_message(ucx *u, ucx_peer *peer, tb_op *op);
void ucx_cancel_message(ucx *u, ucx_posted *p);
/* Handles a frame, in order of serials. False: it is not valid. */
bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* Finds the receive of a chunk, and counts its bytes in `coming`. NULL: there is none. */
ucx_posted *ucx_expect_chunk(ucx_peer *peer, const ucx_frame *frame, size_t nbytes);
/* An expected chunk has arrived; data is NULL if it was received directly. */
void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* UCX has completed a request of the operation. */
void ucx_on_request_done(ucx_posted *p);
/* Sends chunks of long messages until the window is full. */
void ucx_send_chunks(ucx_peer *peer);
void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status);
void ucx_complete_finished(ucx *u);

/* ucx_heartbeat.c: detects peers that are gone, and shows them that we are alive. */

/* Pings a silent peer, and loses it, after so many heartbeats. A heartbeat is a second; tests may change that. */
enum { UCX_PING_BEATS = 3, UCX_LOSE_BEATS = 13 };
extern int tb__ucx_heartbeat_ms;
/* For tests: false: no backup driver for transports that are opened from then on. */
extern bool tb__ucx_has_backup_driver;
/* The peer's hello says whether it is driven. */
void ucx_watch_peer(ucx_peer *peer);
/* Our hello has been sent to the peer. */
void ucx_await_peer(ucx_peer *peer);
/* A frame of the peer has arrived. */
void ucx_record_traffic(ucx_peer *peer, bool is_chunk);
/* Call after ucp_worker_progress has returned 0, so that pending frames count. */
void ucx_heartbeat(ucx *u);
void ucx_stop_backup_driver(ucx *u);

/* ucx_interfaces.c */

/* The network devices without a public address, as UCX_NET_DEVICES lists them. False: all are. */
bool ucx_list_private_devices(tb__text *out);

/* ucx_sockets.c: sockets of UCX that child processes would inherit. */

/* Call before and after a function of UCX that creates sockets. */
void ucx_sockets_snapshot(ucx *u);
void ucx_sockets_adopt_new(ucx *u);
/* Call when UCX has accepted connections. */
void ucx_sockets_adopt_accepted(ucx *u);
/* UCX stops listening for good when accept fails for lack of descriptors. So the listeners are paused while few are
 * left. Call it often; it checks every UCX_GUARD_MS. */
enum { UCX_GUARD_MS = 100 };
void ucx_sockets_guard(ucx *u);

/* ucx_direct.c: chunks that are sent and received without a copy. */

/* Whether the endpoint has lanes for direct chunks. */
bool ucx_has_direct_lanes(const ucx *u, ucp_ep_h ep);
/* For tests: 1 and 0 override ucx_has_direct_lanes for new endpoints; -1 does not. */
extern int tb__ucx_direct;
/* The next bytes of an operation from `at` on, at most `most`, to send as one direct chunk. False: they are better
 * copied. */
bool ucx_span_next(ucx_posted *p, size_t at, size_t most, ucx_span *out);
/* The span of these bytes. False: its pieces are too short for a direct receive. */
bool ucx_span_all(ucx_posted *p, size_t at, size_t nbytes, ucx_span *out);
/* Memory, count, datatype and kind of memory (in `param`) for UCX. Several pieces are listed in `list`. */
void *ucx_span_memory(const tb_op *op, const ucx_span *place, ucp_dt_iov_t *list, ucp_request_param_t *param,
                      size_t *count);

#endif
