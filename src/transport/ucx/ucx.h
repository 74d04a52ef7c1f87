/* The ucx transport: processes of many machines, through OpenUCX.
 *
 * Everything but the first message to a peer travels as active messages of one kind, each with a frame of ours in its
 * header: so a receiver knows who sent what, tags have all their 64 bits for each pair of ranks, and what is too long
 * is known before it is received. (UCX's own tags are matched across all senders together. Large messages are as fast
 * either way.)
 *
 * The first is a hello, under a tag, and nothing else is sent before the peer's has come (ucx_meet.c).
 *
 * Short messages carry their bytes. Long ones, whose receive is posted, come in chunks, which go in one of two ways.
 * The sender chooses, by the lanes that UCX found:
 *
 *  - copied, over TCP: into memory of ours before UCX sees them, and at the receiver out of UCX's own. Chunks are short
 *    enough to be in the cache when they are copied, and go at once (eager): UCX sends a segment from where it is, and
 *    hands it over where it was received, which was a third faster than its rendezvous.
 *  - direct, over RDMA and shared memory: long ones, from where they lie in the sender's operation to where they belong
 *    in the receiver's, by UCX's rendezvous. An adapter then reads the sender's memory itself.
 *
 * UCX can't be told to keep its hands off memory that it was given. So an operation of which direct chunks are under
 * way is not done, whatever becomes of it, before UCX has given them back (`nrequests`). Where the peer stands still
 * that takes the end of its endpoint, and so of the peer.
 *
 * Peers reach no memory here (no mem_... slots). TCP can't read a peer's memory. Shared memory lanes read whatever is
 * at an address, registered or not; and InfiniBand answers an access to what has been unregistered by breaking the
 * connection. Neither makes an access fail by name, and only that one. */
#ifndef TB_TRANSPORT_UCX_UCX_H
#define TB_TRANSPORT_UCX_UCX_H

#include "base/index.h"
#include "transport/message.h"
#include "transport/ucx/ucx_load.h"

#include <pthread.h>

enum {
    UCX_MAGIC = 0x54425558,
    UCX_VERSION = 5,
    UCX_ACTIVE_MESSAGE = 1,    /* the number of our handler */
    UCX_CHUNK_SIZE = 60 << 10, /* of a long message: with headers, one segment of UCX's TCP */
    UCX_WINDOW = 16,           /* chunks on their way to one peer */
    UCX_SPARE = 64,            /* chunks that are kept to be used again */

    UCX_DIRECT_SIZE = 4 << 20,    /* of direct chunks, if there is so much */
    UCX_DIRECT_LEAST = 64 << 10,  /* what is shorter is copied */
    UCX_DIRECT_WINDOW = 4,        /* direct chunks on their way to one peer */
    UCX_PIECE_LONG = 256 << 10,   /* a piece that is a chunk of its own: memory in one piece is what adapters read */
    UCX_PIECE_LEAST = 4 << 10,    /* pieces that are shorter on average are copied */
    UCX_CHUNK_MOST = 8 << 20,     /* that is received */
    UCX_CANCEL_TIMEOUT_MS = 1000, /* for what is under way of an operation that is given up */
    UCX_LOSE_TIMEOUT_MS = 10000,  /* for what UCX has of an endpoint that is closed; it takes moments */
};

typedef enum ucx_kind {
    UCX_HELLO,   /* first of all, under a tag of UCX's; tag: whether the sender is driven; number: the number of the
                    connection, 0 is 1; carries the sender's address */
    UCX_MESSAGE, /* tag; carries the bytes */
    UCX_REVOKE,  /* id, tag: the long message is withdrawn */
    UCX_DONE,    /* back: id: the long message is in, or nobody receives it */
    UCX_BYE,     /* last of all */
    UCX_PING,    /* is somebody there? at: a number for the answer, or 0 */
    UCX_PONG,    /* somebody is; at: of the PING */
    UCX_CHUNK,   /* id, tag, nbytes: of a long message, and where in it, `at`, the bytes belong that it carries. Chunks
                    come in any order, and may overtake others or be overtaken */
} ucx_kind;

/* In the byte order of the machine, as UCX's own headers are. */
typedef struct ucx_frame {
    uint16_t kind, is_expected; /* the latter of short messages, as in tb_op */
    int32_t rank;               /* the sender's */
    uint64_t from;   /* the sender's id, or, after the first connection, one made of it and the connection's number */
    uint64_t serial; /* counts what the sender sent to this receiver, but for chunks */
    uint64_t id;     /* of a long message, at its sender */
    uint64_t tag, nbytes;
    uint64_t number; /* of the connection */
    uint64_t at;     /* where in the message a chunk belongs */
} ucx_frame;

typedef struct ucx ucx;
typedef struct ucx_peer ucx_peer;

typedef enum ucx_state {
    UCX_SENDING,   /* a long message */
    UCX_WAITING,   /* a receive of which nothing has come */
    UCX_RECEIVING, /* a long message */
    UCX_ENDING,    /* it ends when UCX has given back its memory */
    UCX_FINISHED,
} ucx_state;

/* A posted operation. */
typedef struct ucx_posted {
    tb__waiter waiter; /* in one of the lists, or a receive by its tag */
    tb_op *op;
    ucx_peer *peer;
    ucx_state state;
    size_t nbytes, at;  /* in all, and how much has been sent */
    tb__mark mark;      /* where in the operation chunks come from, or go to */
    uint64_t id;        /* of the long message */
    size_t coming, got; /* of a receive: bytes of chunks that came or are being fetched; of those that are in */
    size_t nrequests;   /* direct chunks: UCX may touch the operation's memory while there are any; or a short message
                           that it has not taken yet */
} ucx_posted;

/* Something that UCX works on, with memory of ours, or with an operation's. It lasts until UCX says that it is done,
 * whatever becomes of the operation. */
typedef struct ucx_transfer {
    ucx *owner;
    ucx_peer *peer;
    struct ucx_transfer *next, **link; /* in the list of all of them */
    ucx_frame frame;
    size_t nbytes;
    bool is_direct;     /* the bytes are in an operation's memory, not in `data`, which may have a list of the pieces */
    bool is_sent;       /* direct, and not received */
    ucx_posted *direct; /* whose memory it is, or who waits until it is sent; NULL: nobody does, or it is disowned */
    bool is_spare;      /* has room for a chunk that is copied, and can be used again */
    struct ucx_transfer *later; /* the next one that is held */
    _Alignas(ucp_dt_iov_t) unsigned char data[];
} ucx_transfer;

/* Where some bytes of an operation lie. */
typedef struct ucx_place {
    const tb_piece *pieces; /* from the first one on */
    size_t skip;            /* in the first one */
    size_t nbytes, npieces; /* in all; those that are not empty */
} ucx_place;

/* A connection that the peer has begun, to take the place of one that is not told to be lost yet. */
typedef struct ucx_next {
    uint64_t number;
    bool is_driven;
    size_t nbytes;
    unsigned char address[];
} ucx_next;

/* A connection with a peer. After a loss the next one has an object of its own, with a higher number; both ends use the
 * highest number that either of them has begun. */
struct ucx_peer {
    ucx *owner;
    int32_t rank;
    uint64_t id;            /* of the peer's process; 0: not known yet */
    uint64_t number;        /* of the connection, from 1 */
    ucp_ep_h ep;            /* NULL: none yet, or no more */
    uint64_t nendpoints;    /* that were made for the peer, in all its connections */
    bool is_met;            /* its hello has come */
    unsigned char *address; /* of a peer that we have not met, to say hello again */
    size_t address_nbytes;
    unsigned unheard;         /* beats since we have said hello to such a peer, */
    unsigned patience;        /* and how many there may be */
    ucx_next *next;           /* NULL: none */
    uint64_t asked, answered; /* the last PING that is_reached waits for, and the last that was answered */
    bool has_news;            /* is_reached may have become true */
    size_t ntransfers;        /* that point here */
    bool is_lost;
    const char *why;                 /* it is to be lost when there is time; NULL: it is not */
    char words[96];                  /* room for that, where UCX says it */
    ucx_transfer *held, **last_held; /* what it is to be sent when we have met */
    uint64_t serial_out, serial_in, last_id;
    bool is_driven;        /* it works all the time, as it says */
    bool is_heard;         /* something has come from it since the last beat, */
    bool is_sending;       /* chunks, even */
    unsigned silence;      /* beats since then */
    bool is_direct;        /* its lanes are such that chunks go from their place */
    size_t in_flight;      /* chunks on their way to it that were copied */
    size_t ndirect;        /* those that were not */
    size_t nrequests;      /* and those that are being fetched */
    tb__waiters sending;   /* long sends */
    tb__waiters receiving; /* receives that get a long message of its */
    tb__waiters ending;    /* sends and receives that wait for UCX only */
};

/* A socket on which UCX listens. */
typedef struct ucx_listener {
    int fd;
    uint64_t number; /* the kernel's for it: the descriptor may be another's by now */
} ucx_listener;

struct ucx {
    pthread_mutex_t lock; /* recursive. Held by the driver while it is here, or by who stands in for it */
    uint64_t nturns;      /* how often the driver has been here */
    pthread_t stand_in;
    bool has_stand_in;
    int quit; /* readable: it may go */
    const ucx_functions *call;
    tb_transport_env env;
    bool is_user; /* ucx_begin_use has been called */
    uint64_t id;  /* random: a peer of the same rank is not taken for the one before */
    ucp_context_h context;
    ucp_worker_h worker;
    unsigned char *address; /* ours, as peers get it */
    size_t address_nbytes;
    int epoll, wake;            /* UCX's descriptor and ours, in one */
    int worker_fd;              /* UCX's */
    int timer;                  /* of the heartbeat */
    bool is_beating;            /* the timer is set */
    bool is_awake;              /* `wake` is readable */
    TB_VEC(ucx_peer *) peers;   /* the last connection with each */
    tb__index by_rank;          /* in there */
    TB_VEC(ucx_peer *) retired; /* connections before, until UCX has nothing of them */
    tb__match receives, arrivals;
    tb__match early;         /* by serial: frames, with what they carry, that came before one with a lower serial */
    tb__waiters finished;    /* to be told in the next progress */
    ucx_transfer *transfers; /* that UCX has */
    ucx_transfer *spare;     /* of chunks */
    size_t nspare;
    size_t npending;         /* endpoints that UCX is flushing or closing */
    size_t nheld;            /* frames to peers that we have not met */
    unsigned char *hello;    /* where the next one is received */
    TB_VEC(int) descriptors; /* that there were before UCX made some */
    TB_VEC(uint16_t) ports;  /* on which it listens */
    TB_VEC(ucx_listener) listeners;
    bool is_paused;         /* the listeners accept nothing: descriptors are running out */
    int guard;              /* a timer: when to look at that ... */
    int64_t guard_again_ms; /* ... but not before */
    void *listening;        /* UCX's request for it; NULL: none */
};

/* ucx.c */
ucx_peer *ucx_find(const ucx *u, int32_t rank);
ucx_peer *ucx_find_or_add(ucx *u, int32_t rank);
void ucx_wake(ucx *u);
/* Lets UCX do what it can, within bounds. */
void ucx_work(ucx *u);
/* The peer's loss is told in the next progress; `why` is a constant. */
void ucx_fail(ucx_peer *peer, const char *why);
/* The same, by what UCX says of the connection. */
void ucx_break(ucx_peer *peer, ucs_status_t status);
/* Closes the endpoint at once, whatever is on its way: UCX gives back what it has of it, without the peer. */
void ucx_hang_up(ucx_peer *peer);
/* Lets UCX work until there are none of these, which it counts. False: the time is up. */
bool ucx_await(ucx *u, const size_t *count, int timeout_ms);
/* Whether this process can open so many files, at most 64; else the error. */
int ucx_try_descriptors(size_t needed);
/* The sentence after `what` is UCX's; where there is no device, or none that leads to a peer, it matters which ones it
 * may use. */
tb_status ucx_fail_by_choice(const ucx *u, const char *what, ucs_status_t status, tb_status out);
static inline bool ucx_is_over(const ucx_peer *peer) {
    return peer->is_lost || peer->why;
}

/* ucx_meet.c: connections and hellos. */

/* What comes before UCX's own address. UCX believes any bytes it is given, so it is given none that have suffered. */
typedef struct ucx_address {
    uint32_t magic, version;
    uint64_t id;
    uint64_t nbytes, checksum;
} ucx_address;

tb_status ucx_check_address(const void *address, size_t nbytes, ucx_address *head);
/* An endpoint to the worker with this address, if the peer has none, with our hello on its way. */
tb_status ucx_reach(ucx_peer *peer, const void *address, size_t nbytes);
/* A connection with this number in the place of one that is lost. NULL: there is no memory. */
ucx_peer *ucx_renew(ucx_peer *lost, uint64_t number);
/* What a sender puts into frames of a connection. */
uint64_t ucx_mark(uint64_t id, uint64_t number);
void ucx_free_peer(ucx_peer *peer);
/* Those of which UCX has nothing any more. */
void ucx_free_retired(ucx *u);
/* Asks the peer whether it is there: for is_reached. */
void ucx_ask(ucx_peer *peer);
/* Receives the hellos of peers from now on, or no more. */
tb_status ucx_listen(ucx *u);
void ucx_listen_no_more(ucx *u);
void ucx_say_hello(ucx_peer *peer);
/* The frame is sent when we have met the peer. */
void ucx_hold(ucx_transfer *t);
/* Its hello has come. */
void ucx_meet(ucx_peer *peer, bool is_driven);
/* The next connection begins when a hello was not answered for this many beats; for one after a loss it is the second.
 */
enum { UCX_PATIENCE = 8, UCX_PATIENCE_AGAIN = 2 };
void ucx_say_hello_again(ucx_peer *peer);
/* Takes up the connection that the peer has begun, in the place of this one, which is lost. */
void ucx_take_next(ucx_peer *lost);
void ucx_drop_held(ucx_peer *peer);

/* ucx_wire.c: frames. What can't be sent loses the peer. */

/* With room for so many bytes in `data`; NULL: there is no memory. */
ucx_transfer *ucx_new_transfer(ucx_peer *peer, const ucx_frame *frame, size_t nbytes, size_t room);
void ucx_release(ucx_transfer *t);
/* Says whom it is from, and numbers it. */
void ucx_sign(ucx_transfer *t);
/* Hands it to UCX, with memory of ours (NULL), or from its place. */
void ucx_dispatch(ucx_transfer *t, const ucx_place *place);
/* What UCX calls when it has sent a transfer. */
void ucx_on_sent(void *request, ucs_status_t status, void *arg);
/* What UCX returns for a transfer that it was given: whether it is under way. Else it is gone. */
bool ucx_is_under_way(ucx_transfer *t, ucs_status_ptr_t request);
void ucx_send(ucx_peer *peer, const ucx_frame *frame);
void ucx_send_for(ucx_posted *p, const ucx_frame *frame); /* the short message of an operation, which waits for it */
/* Whether another chunk may be on its way to the peer. */
bool ucx_may_send_chunk(const ucx_peer *peer);
/* Sends the next chunk of a long message. False: there is no memory for it. */
bool ucx_send_chunk(ucx_posted *p);
/* UCX has not given back what it has of an operation, and the operation ends all the same. */
void ucx_disown(ucx *u, const ucx_posted *p);
ucs_status_t ucx_on_active_message(void *arg, const void *header, size_t header_length, void *data, size_t nbytes,
                                   const ucp_am_recv_param_t *param);
void ucx_free_transfers(ucx *u); /* when UCX is gone */

/* ucx_message.c: sends and receives. */
tb_status ucx_post_message(ucx *u, ucx_peer *peer, tb_op *op);
void ucx_cancel_message(ucx *u, ucx_posted *p);
/* A frame in its turn. False: it is not valid. */
bool ucx_on_frame(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* The receive that a chunk of so many bytes is for, which are counted as coming; NULL: there is none. */
ucx_posted *ucx_expect_chunk(ucx_peer *peer, const ucx_frame *frame, size_t nbytes);
/* A chunk that was expected is there; data is NULL where it is in its place. */
void ucx_on_chunk(ucx_peer *peer, const ucx_frame *frame, const unsigned char *data, size_t nbytes);
/* UCX has given back a direct chunk of it. */
void ucx_give_back(ucx_posted *p);
/* Sends chunks of long messages, as many as the window lets through. */
void ucx_send_chunks(ucx_peer *peer);
void ucx_drop_messages(ucx *u, ucx_peer *peer, tb_status status);
void ucx_tell_all(ucx *u);

/* ucx_pulse.c: whether peers are still there, and that we are. */

/* Asks a peer and loses it after so many beats of silence. A beat is a second; tests may change that. */
enum { UCX_ASK = 3, UCX_LOSE = 13 };
extern int tb__ucx_beat_ms;
/* Tests: false: nobody works for endpoints that are opened from then on but those who drive them. */
extern bool tb__ucx_stands_in;
/* The peer has told whether it is driven. */
void ucx_watch_peer(ucx_peer *peer);
/* Our hello is on its way to the peer. */
void ucx_await_peer(ucx_peer *peer);
/* Something has come from it. */
void ucx_hear(ucx_peer *peer, bool is_chunk);
/* To be called after UCX has handed over what there is. */
void ucx_beat(ucx *u);
void ucx_end_stand_in(ucx *u);

/* ucx_sockets.c: what UCX would let other programs inherit. */

/* Before and after UCX is called to make sockets. */
void ucx_sockets_look(ucx *u);
void ucx_sockets_take_new(ucx *u);
/* When it has accepted some. */
void ucx_sockets_take_accepted(ucx *u);
/* UCX stops listening for good when it can't accept a connection for want of descriptors. So the listeners are paused
 * while few are left. To be called often; it looks every UCX_GUARD_MS. */
enum { UCX_GUARD_MS = 100 };
void ucx_sockets_guard(ucx *u);

/* ucx_direct.c: what is sent and received without a copy. */

/* Whether the endpoint has lanes for it. */
bool ucx_has_direct_lanes(const ucx *u, ucp_ep_h ep);
/* Tests: 1 and 0 say so in place of the lanes of endpoints that are made from then on; -1: the lanes do. */
extern int tb__ucx_direct;
/* The next bytes of an operation from `at` on, at most so many, that are worth sending as one direct chunk. False: none
 * are. */
bool ucx_place_next(ucx_posted *p, size_t at, size_t most, ucx_place *out);
/* Where bytes of an operation lie. False: in pieces that are too short to be received to. */
bool ucx_place_all(ucx_posted *p, size_t at, size_t nbytes, ucx_place *out);
/* What UCX is given: memory and its count, of the type that is set in `param`. A list of pieces is written to `list`.
 */
void *ucx_place_memory(const ucx_place *place, ucp_dt_iov_t *list, ucp_request_param_t *param, size_t *count);

#endif
