/* What a transport implements: one table of functions, one folder.
 *
 * A transport carries bytes between the ranks of a world. The layers above speak to it through wrappers
 * (src/transport/transport.h), which hold the defaults of the optional slots; so a table names only what the transport
 * really does. Adding one takes its folder, a line in src/transport/transport.h and a line in the build; one that lives
 * in a library of its own is told to the core by tb_transport_register instead.
 *
 * Rules:
 *  - One thread at a time uses an open transport: the world's progress thread. Nothing here blocks, but for `open`,
 *    `close`, and `cancel` of what is under way, for seconds at most; what takes time completes in `progress`.
 *  - An operation belongs to the transport from a successful post until its `done` is called, which happens once, in
 *    `progress` or `cancel`. If post fails, `done` is never called.
 *  - When a peer is lost, all operations that name it complete with TB_LOST, then `lost` is called, once. Later posts
 *    to it fail with TB_LOST, until a new connection begins (`disconnect`).
 *  - Sends and receives between two ranks are matched by tag; those with equal tags, in the order they were posted.
 *    A message of more than TB_SHORT_MAX bytes is sent when its RECV is posted (tb_op.is_expected), under a tag that no
 *    other message between the two ranks has. So a transport keeps short messages until they are received, and no
 *    others.
 *  - Structs that begin with `size`, which is set to their sizeof, grow at the end only. A transport reads no further
 *    than `size` of structs that it gets.
 */
#ifndef TENSORBUS_TRANSPORT_H
#define TENSORBUS_TRANSPORT_H

#include "tensorbus/tensorbus.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TB_KEY_SIZE = 32,
    TB_ADDRESS_MAX = 3072, /* bytes of a transport's address */
    TB_MEM_KEY_MAX = 64,   /* bytes of a memory key */
    TB_SHORT_MAX = 16384,  /* bytes of a message that may be sent before its RECV is posted */
    TB_OP_WHY_MAX = 128,
    TB_COMM_ID_SIZE = 256,
};

typedef enum tb_mem_kind { TB_MEM_HOST, TB_MEM_PINNED, TB_MEM_CUDA } tb_mem_kind;

/* The world's parameters and callbacks. Valid while the transport is open. */
typedef struct tb_transport_env {
    size_t size;
    int32_t rank;
    void *arg;
    void (*lost)(void *arg, int32_t peer, const char *why);
    bool is_driven; /* a thread calls progress whenever there is something to do, except while it copies or is in a
                       function of the program */
    /* Called in progress when is_reached has become true, or, with reports_strangers, when a peer has connected to this
     * rank. May be NULL. */
    void (*reached)(void *arg, int32_t peer);
    const unsigned char *key; /* TB_KEY_SIZE bytes that only ranks of the bus have; with them ranks prove to each other
                               * that they belong to it. Valid during `open`; NULL: none */
    /* For libraries that use GPUs: makes the context of a GPU current in this thread, until `leave_device`. Any thread.
     * Both may be NULL. */
    tb_status (*enter_device)(void *arg, tb_mem_kind kind, int device);
    void (*leave_device)(void *arg, tb_mem_kind kind);
    /* The function that the driver of such devices exports under that name ("cuMemAlloc_v2"); NULL: there is none, or
     * no driver. Any thread. May be NULL. */
    void *(*device_function)(void *arg, tb_mem_kind kind, const char *name);
    /* For transports with communicators: sends a message to the same transport at a peer, by another transport. It
     * arrives there as `told`, in order, unless one of the two is lost. May be called in `told`. May be NULL. */
    tb_status (*tell)(void *arg, int32_t peer, const void *bytes, size_t nbytes);
} tb_transport_env;

/* Memory to register: an allocation, or a part of it. */
typedef struct tb_mem_desc {
    size_t size;
    void *base;
    size_t nbytes;
    tb_mem_kind kind;
    int device;    /* of TB_MEM_CUDA */
    int fd;        /* its memfd, sealed against shrinking, which may be closed after the call; -1: none */
    size_t offset; /* of base in fd */
    /* Freed memory of the file goes back to the system whoever has the file mapped. So peers may keep it mapped when
     * nothing in it is registered any more, for what is registered next. */
    bool may_stay_mapped;
} tb_mem_desc;

typedef struct tb_mem tb_mem;       /* this rank's memory, registered */
typedef struct tb_remote tb_remote; /* a peer's memory */

/* Identifies a registration to another rank. Fixed size; can be copied into messages. */
typedef struct tb_mem_key {
    uint32_t nbytes;
    unsigned char bytes[TB_MEM_KEY_MAX];
} tb_mem_key;

/* A communicator: a fixed set of ranks that a library, such as NCCL, connects at once. */
typedef struct tb_comm tb_comm;

typedef struct tb_comm_desc {
    size_t size;
    const unsigned char *id; /* TB_COMM_ID_SIZE bytes, from comm_id of the first rank */
    const int32_t *ranks;    /* all of them, in the same order on all */
    size_t nranks, self;     /* self: this rank's position */
    tb_mem_kind kind;        /* of memory that it carries ... */
    int device;              /* ... and of this rank's, which GPU */
    size_t nbytes;           /* of comm_memory; the same on all ranks */
} tb_comm_desc;

typedef enum tb_op_kind { TB_OP_SEND, TB_OP_RECV } tb_op_kind;

/* A piece of local memory. */
typedef struct tb_piece {
    void *base;
    size_t nbytes;
} tb_piece;

/* A part of a peer's memory. */
typedef struct tb_range {
    size_t offset, nbytes;
} tb_range;

typedef struct tb_op tb_op;
struct tb_op {
    size_t size; /* set by the library */
    tb_op_kind kind;
    int32_t peer; /* destination or source */
    uint64_t tag;
    const tb_piece *pieces; /* owned by the caller, unchanged until done */
    size_t npieces;
    bool is_expected;        /* SEND: the peer has confirmed that the RECV is posted. If it was cancelled meanwhile, the
                                message is dropped, and the SEND succeeds */
    void (*done)(tb_op *op); /* called with the fields below set */
    void *arg;
    tb_status status;
    char why[TB_OP_WHY_MAX]; /* message of a failure; may be empty */
    size_t nbytes; /* RECV: size of the message; TB_TOO_BIG, and nothing is stored, if the pieces are too small */
    void *state;   /* owned by the transport while the operation is posted; else NULL */
    tb_mem_kind
        memory;    /* that the pieces are in. If it is not TB_MEM_HOST, the transport carries it, there is one piece,
                      the other end's memory is of the same kind, and a SEND is_expected, however short it is */
    int device;    /* of TB_MEM_CUDA: the GPU's number in this process */
    tb_comm *comm; /* that carries it; NULL for transports without communicators */
};

typedef struct tb_transport_ops {
    size_t size;
    const char *name;
    unsigned memory; /* a bit for each tb_mem_kind that pieces may be in: 1 << TB_MEM_HOST, ...; see also `carries` */
    bool is_local;   /* reaches processes of the same machine only */

    /* Opens an endpoint of this rank. TB_REFUSED: it can't be used in this world; that is an error only if it was
     * requested by name. */
    tb_status (*open)(const tb_transport_env *env, void **context);
    /* Completes all operations with TB_CANCELLED, and unregisters all memory. Never fails. */
    void (*close)(void *context);

    /* The address by which other ranks connect to this one; *nbytes: size of the buffer, then of the address. */
    tb_status (*address)(void *context, void *buffer, size_t *nbytes);
    /* (optional; default true) Whether the process with this address can be connected to. Both ends must agree. If
     * false, tb_error_detail may have the reason. */
    bool (*reaches)(void *context, const void *address, size_t nbytes);
    /* Connects to a peer. Both ends may do so at once. Operations may be posted at once, and wait for the connection.
     * Error messages call the peer "it": the world puts its name in front.
     *
     * With `disconnect`, connecting to a peer that was lost begins a new connection, unless the peer has begun one
     * since then. Messages of the old connection never arrive on the new one. If the peer begins a new connection while
     * this end still has the old one, the old one is lost first. */
    tb_status (*connect)(void *context, int32_t peer, const void *address, size_t nbytes);

    /* (optional, all of mem_...; default: TB_REFUSED) Without them peers can't access this rank's memory. */
    tb_status (*mem_register)(void *context, const tb_mem_desc *desc, tb_mem **out);
    /* Later accesses by peers fail with TB_INVALID. The caller ensures that none is under way. */
    void (*mem_unregister)(void *context, tb_mem *mem);
    /* A key that `peer` may import once a message sent after this call has reached it. */
    tb_status (*mem_export)(void *context, tb_mem *mem, int32_t peer, tb_mem_key *out);
    tb_status (*mem_import)(void *context, int32_t peer, const tb_mem_key *key, tb_remote **out);
    void (*mem_release)(void *context, tb_remote *remote);
    /* (optional; default NULL) An address at which the peer's memory can be read and written, or NULL where it can't.
     * Valid until the remote is released. What is read may have become invalid: see mem_is_valid. */
    void *(*mem_map)(void *context, tb_remote *remote);
    /* (optional; default true) False once the owner has unregistered the memory or is lost. Check it after reading
     * through a mapping, before the bytes are used. */
    bool (*mem_is_valid)(void *context, const tb_remote *remote);

    /* (optional; default: TB_REFUSED) Reads ranges of a peer's memory into the pieces, synchronously; both lists must
     * have the same number of bytes, else TB_INVALID. Ranges out of bounds are refused before anything is read. May be
     * called from any thread while the remote is held, also while another uses the transport. */
    tb_status (*mem_read)(void *context, tb_remote *remote, const tb_range *ranges, size_t nranges,
                          const tb_piece *pieces, size_t npieces);

    tb_status (*post)(void *context, tb_op *op);
    /* Completes an operation that has not completed with TB_CANCELLED; its memory is not written after the call, and a
     * peer that still reads it discards the data. It completes with TB_TIMEOUT instead, after seconds, if the system or
     * a library below does not release the memory, which may then still be read or written. A message that a cancelled
     * receive was matched with is dropped, and its send succeeds. A receive with a part of a message whose send is
     * cancelled completes with TB_CANCELLED, too; one without may go on waiting. */
    void (*cancel)(void *context, tb_op *op);
    /* Makes progress without blocking; calls `done` and `lost`. */
    tb_status (*progress)(void *context);
    /* Readable when progress has something to do. Wait for it after a call of progress. */
    int (*fd)(void *context);
    /* (optional; default true) After `connect` of a peer that was connected before, or was lost: false until the peer
     * has answered over the connection. */
    bool (*is_reached)(void *context, int32_t peer);
    /* (optional; default: a peer that was lost stays lost) Ends the connection: the peer is lost at both ends, and
     * `lost` is called in progress. `connect` begins another one. */
    void (*disconnect)(void *context, int32_t peer, const char *why);

    /* (optional, both; default: TB_REFUSED) Sends copies of file descriptors, any number of them, to a peer on this
     * machine, which can take them by *id once a message sent after this call has reached it. They may be closed after
     * the call. */
    tb_status (*fd_send)(void *context, int32_t peer, const int *fds, size_t nfds, uint64_t *id);
    /* Takes the descriptors that the peer has sent under this id; the caller closes them. TB_INVALID unless they are
     * `nfds`; TB_IO if this process had none left for them. Those that nobody takes are closed when the connection
     * ends. */
    tb_status (*fd_take)(void *context, int32_t peer, uint64_t id, int *fds, size_t nfds);

    /* (optional; default false) `reached` is also called when a peer that this rank has not connected to connects to
     * it; from then on its messages can be received. Without it, a world connects to all peers that it might hear
     * from. */
    bool reports_strangers;
    /* (optional; default true) Whether pieces can be in memory of this kind, one of `memory`, with the libraries that
     * were found on this machine. */
    bool (*carries)(void *context, tb_mem_kind kind);

    /* (optional, all of comm_..., told and peer_lost) A transport with communicators carries memory of devices only,
     * between the ranks of a communicator. All else goes by another transport: messages of the library, and what the
     * two ends of this transport tell each other (tb_transport_env.tell). So it has no `address`, `connect` and
     * mem_..., TB_MEM_HOST is not in its `memory`, and its operations name a communicator (tb_op.comm). */
    /* An id for a communicator whose first rank is this one. */
    tb_status (*comm_id)(void *context, unsigned char id[TB_COMM_ID_SIZE]);
    /* Begins to connect the ranks, all of which call it with the same id. Does not wait for the others: `comm_check`
     * tells when they are connected. Operations may be posted at once, and wait for that. The arrays of *desc may be
     * freed after the call. */
    tb_status (*comm_create)(void *context, const tb_comm_desc *desc, tb_comm **out);
    /* Fails, with a message, once the communicator has failed: when a rank is lost (TB_LOST), or the library reports an
     * error (TB_IO), at any rank. Then all its operations complete on all ranks, those that name the lost rank with
     * TB_LOST, others with TB_IO, and so do later ones. Cheap. */
    tb_status (*comm_check)(void *context, tb_comm *comm, bool *is_ready);
    /* (optional; default NULL) tb_comm_desc.nbytes of this rank's memory that belongs to the communicator, once it is
     * ready. If there is such memory, all pieces of operations are in it. */
    void *(*comm_memory)(void *context, tb_comm *comm);
    /* This rank leaves it: its operations complete as those of `cancel` do. At other ranks, operations that name it
     * complete with TB_LOST, and the rest go on. Never fails; takes seconds at most. */
    void (*comm_destroy)(void *context, tb_comm *comm);
    /* A message of the same transport at a peer. Not in `progress` or another function here. */
    void (*told)(void *context, int32_t peer, const void *bytes, size_t nbytes);
    /* A peer is lost: nothing comes from it any more, and communicators that it had not left fail. */
    void (*peer_lost)(void *context, int32_t peer, const char *why);
    bool is_by_request; /* it is opened only if the program names it */
} tb_transport_ops;

/* Registers a transport in the process, permanently. In the order of preference it comes after transports within a
 * machine and before network transports. The table is copied, its name is not. Registering the same name and `open`
 * again is no error; TB_CONFLICT if another transport has the name; TB_INVALID if a required slot is missing, or
 * TB_MEM_HOST is not in `memory`, unless it has communicators. Existing worlds do not use it. Any thread. */
TB_API tb_status tb_transport_register(const tb_transport_ops *ops);

#ifdef __cplusplus
}
#endif

#endif
