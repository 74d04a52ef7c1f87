/* The ucx transport: processes of many machines, through OpenUCX.
 *
 * Everything travels as active messages of one kind, each with a frame of ours in its header: so a receiver knows who
 * sent what, tags have all their 64 bits for each pair of ranks, and what is too long is known before it is received.
 * (UCX's own tags are matched across all senders together. Large messages are as fast either way.)
 *
 * Short messages carry their bytes. Long ones are offered; once a receive matches, the receiver takes the offer, and
 * the bytes come in chunks. A chunk is copied into memory of ours before UCX sees it, and is received into memory of
 * ours: UCX can't be told to keep its hands off memory that it was given, and an operation that is cancelled must have
 * its memory back at once. Chunks are short enough to be in the cache when they are copied, and go at once (eager):
 * over TCP UCX sends a segment from where it is, and hands it over where it was received, which was a third faster than
 * its rendezvous.
 *
 * Peers reach no memory here (no READ, WRITE or mapping). TCP has none of it, and UCX's stand-in for writing is slow.
 * Shared memory lanes read whatever is at an address, registered or not; and InfiniBand answers an access to what has
 * been unregistered by breaking the connection. Neither makes an access fail by name, and only that one. */
#ifndef TB_TRANSPORT_UCX_UCX_H
#define TB_TRANSPORT_UCX_UCX_H

#include "transport/match.h"
#include "transport/transport.h"
#include "transport/ucx/ucx_load.h"

enum {
    UCX_MAGIC = 0x54425558,
    UCX_VERSION = 1,
    UCX_ACTIVE_MESSAGE = 1,    /* the number of our handler */
    UCX_SHORT = 16 << 10,      /* messages up to this size carry their bytes */
    UCX_CHUNK_SIZE = 60 << 10, /* of what an offered message is sent in: with headers, one segment of UCX's TCP */
    UCX_WINDOW = 16,           /* chunks on their way to one peer */
    UCX_SPARE = 64,            /* chunks that are kept to be used again */
};

typedef enum ucx_kind {
    UCX_HELLO,   /* first of all; carries the sender's address */
    UCX_MESSAGE, /* tag; carries the bytes */
    UCX_OFFER,   /* offer, tag, nbytes */
    UCX_REVOKE,  /* offer, tag: it is withdrawn */
    UCX_TAKE,    /* back: offer, attempt: send it, from its beginning */
    UCX_STOP,    /* back: offer, attempt: not now; it may be taken again */
    UCX_DONE,    /* back: offer: the message is in, or nobody can have it */
    UCX_BYE,     /* last of all */
    UCX_CHUNK,   /* offer, attempt, at; carries bytes of an offered message. The only kind that may overtake others. */
} ucx_kind;

/* In the byte order of the machine, as UCX's own headers are. */
typedef struct ucx_frame {
    uint32_t kind;
    int32_t rank;    /* the sender's */
    uint64_t from;   /* the sender's id */
    uint64_t serial; /* counts what the sender sent to this receiver, but for chunks */
    uint64_t offer;  /* its number at the rank that made it */
    uint64_t tag, nbytes;
    uint64_t attempt, at; /* how often it has been taken; where in the message a chunk belongs */
} ucx_frame;

typedef struct ucx ucx;
typedef struct ucx_peer ucx_peer;

typedef enum ucx_state { UCX_OFFERED, UCX_SENDING, UCX_WAITING, UCX_TAKING, UCX_FINISHED } ucx_state;

/* A posted operation. */
typedef struct ucx_posted {
    tb__waiter waiter; /* of a receive */
    tb_op *op;
    ucx_peer *peer;
    ucx_state state;
    size_t nbytes, at;           /* in all, and how much has been sent */
    uint64_t offer, attempt;     /* of a send */
    struct ucx_arrival *arrival; /* that a receive is taking */
    struct ucx_posted *next;     /* in one of the lists */
} ucx_posted;

typedef struct ucx_list {
    ucx_posted *first, **last;
} ucx_list;

/* A message that came before its receive, or an offer, also while it is being taken. */
typedef struct ucx_arrival {
    tb__waiter waiter;
    ucx_peer *peer;
    bool is_offer;
    uint64_t offer, attempt;
    size_t nbytes, got;
    ucx_posted *taker;
    struct ucx_arrival *next_taken; /* in the peer's list of offers being taken */
    unsigned char data[];           /* of a short message */
} ucx_arrival;

/* Memory that UCX works with. It is ours until UCX says that it is done, whatever becomes of the operation. */
typedef struct ucx_transfer {
    ucx *owner;
    ucx_peer *peer;
    struct ucx_transfer *next, **link; /* in the list of all of them */
    ucx_frame frame;
    size_t nbytes;
    unsigned char data[];
} ucx_transfer;

/* A frame that came before one with a lower serial. */
typedef struct ucx_early {
    struct ucx_early *next;
    ucx_frame frame;
    size_t nbytes;
    unsigned char data[];
} ucx_early;

struct ucx_peer {
    ucx *owner;
    int32_t rank;
    uint64_t id; /* 0: not known yet */
    ucp_ep_h ep; /* NULL: none yet, or no more */
    bool is_lost;
    const char *why; /* it is to be lost when there is time; NULL: it is not */
    uint64_t serial_out, serial_in, next_offer;
    size_t in_flight;   /* chunks on their way to it */
    ucx_list offered;   /* sends that wait for an answer, or are being sent */
    ucx_arrival *taken; /* offers of it that we are taking */
    ucx_early *early;
    ucx_peer *next;
};

struct ucx {
    const ucx_functions *call;
    tb_transport_env env;
    bool is_user; /* ucx_begin_use has been called */
    uint64_t id;  /* random: a peer of the same rank is not taken for the one before */
    ucp_context_h context;
    ucp_worker_h worker;
    unsigned char *address; /* ours, as peers get it */
    size_t address_nbytes;
    int epoll, wake; /* UCX's descriptor and ours, in one */
    bool is_awake;   /* `wake` is readable */
    ucx_peer *peers;
    tb__match receives, arrivals;
    ucx_list finished;       /* to be told in the next progress */
    ucx_transfer *transfers; /* that UCX has */
    ucx_transfer *spare;     /* of chunks */
    size_t nspare;
    size_t npending; /* endpoints that UCX is flushing or closing */
};

/* ucx.c */
ucx_peer *ucx_find(const ucx *u, int32_t rank);
ucx_peer *ucx_find_or_add(ucx *u, int32_t rank);
void ucx_wake(ucx *u);
/* The peer's loss is told in the next progress; `why` is a constant. */
void ucx_fail(ucx_peer *peer, const char *why);
/* An endpoint to the worker with this address, if the peer has none, with our hello on its way. */
tb_status ucx_reach(ucx_peer *peer, const void *address, size_t nbytes);

/* ucx_wire.c: frames. What can't be sent loses the peer. */
void ucx_send(ucx_peer *peer, const ucx_frame *frame, const tb_piece *pieces, size_t npieces);
/* Sends the next chunk of an offered message. False: there is no memory for it. */
bool ucx_send_chunk(ucx_posted *p);
ucs_status_t ucx_on_active_message(void *arg, const void *header, size_t header_length, void *data, size_t nbytes,
                                   const ucp_am_recv_param_t *param);
void ucx_drop_early(ucx_peer *peer);
void ucx_free_transfers(ucx *u); /* when UCX is gone */

/* ucx_message.c: sends and receives. */
tb_status ucx_post_message(ucx *u, ucx_peer *peer, tb_op *op);
void ucx_cancel_message(ucx *u, ucx_posted *p);
/* A frame in its turn. False: it makes no sense. */
bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* Whether these bytes of a chunk are wanted by a receive. */
bool ucx_wants_chunk(const ucx_peer *peer, const ucx_frame *frame, size_t nbytes);
void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* Sends chunks of what has been taken, as many as the window lets through. */
void ucx_pump(ucx_peer *peer);
void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status);
void ucx_tell(ucx_posted *p);
void ucx_tell_all(ucx *u);

#endif
