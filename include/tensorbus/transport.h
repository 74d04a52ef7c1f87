/* What a transport implements: one table of functions, one folder.
 *
 * A transport carries bytes between the ranks of a world. The layers above speak to it through wrappers
 * (src/transport/transport.h), which hold the defaults of the optional slots; so a table names only what the transport
 * really does. Adding one takes its folder, a line in src/transport/registry.c and a line in the build; one that lives
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
 *  - Structs that begin with `size`, which whoever fills them in sets to their sizeof, grow at the end only. A
 *    transport reads no further than `size` of what the world hands to it.
 */
#ifndef TENSORBUS_TRANSPORT_H
#define TENSORBUS_TRANSPORT_H

#include "tensorbus/tensorbus.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TB_ADDRESS_MAX = 3072, /* bytes of a transport's address */
    TB_MEM_KEY_MAX = 64,   /* bytes of a memory key */
    TB_SHORT_MAX = 16384,  /* bytes of a message that may be sent before its RECV is posted */
    TB_OP_WHY_MAX = 128,
};

/* What the world tells a transport, and how the transport tells the world. Valid while it is open. */
typedef struct tb_transport_env {
    size_t size;
    int32_t rank;
    void *arg;
    void (*lost)(void *arg, int32_t peer, const char *why);
    bool is_driven; /* progress is called whenever there is something to do, by a thread that is away only while it
                       copies, or is in a function of the host's */
    void (*reached)(void *arg, int32_t peer); /* is_reached has become true, in progress; may be NULL */
} tb_transport_env;

typedef enum tb_mem_kind { TB_MEM_HOST, TB_MEM_PINNED, TB_MEM_CUDA } tb_mem_kind;

/* Memory to register: an allocation, or a part of one. */
typedef struct tb_mem_desc {
    size_t size;
    void *base;
    size_t nbytes;
    tb_mem_kind kind;
    int device;    /* of TB_MEM_CUDA */
    int fd;        /* the memfd behind it, sealed against shrinking, needed for the call only; -1: none */
    size_t offset; /* of base in fd */
} tb_mem_desc;

typedef struct tb_mem tb_mem;       /* this rank's memory, registered */
typedef struct tb_remote tb_remote; /* a peer's memory */

/* Enough to find a registration from another rank. Fixed size, to be copied into messages. */
typedef struct tb_mem_key {
    uint32_t nbytes;
    unsigned char bytes[TB_MEM_KEY_MAX];
} tb_mem_key;

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
    tb_op_kind kind;
    int32_t peer; /* whom to, whom from */
    uint64_t tag;
    const tb_piece *pieces; /* one after the other; they stay the caller's, unchanged until done */
    size_t npieces;
    bool is_expected; /* SEND: the peer has said that it has posted the RECV. If it has cancelled it since then, the
                         message is dropped, and the SEND is done */
    void (*done)(tb_op *op); /* called with the fields below set */
    void *arg;
    tb_status status;
    char why[TB_OP_WHY_MAX]; /* the sentence of a failure; empty: the status says all */
    size_t nbytes; /* RECV: how many came; more than the pieces hold is TB_TOO_BIG, and none are kept */
    void *state;   /* the transport's own while it has the operation; NULL before and after */
};

typedef struct tb_transport_ops {
    size_t size;
    const char *name;
    unsigned memory; /* a bit for each tb_mem_kind that the pieces of SEND and RECV may lie in: 1 << TB_MEM_HOST, ... */
    bool is_local;   /* reaches processes of the same machine only */

    /* Opens an endpoint of this rank. TB_REFUSED: it is not for this world, which goes without it unless it was asked
     * for by name. */
    tb_status (*open)(const tb_transport_env *env, void **context);
    /* Completes what is under way with TB_CANCELLED, and forgets all memory. Never fails. */
    void (*close)(void *context);

    /* What other ranks need to connect to this one; *nbytes is the room there is, then what was used. */
    tb_status (*address)(void *context, void *buffer, size_t *nbytes);
    /* (optional; default true) Whether the process with this address can be connected to. Both ends must say the same.
     * Where it can't, the reason may be left as the sentence of tb_error_detail. */
    bool (*reaches)(void *context, const void *address, size_t nbytes);
    /* Makes a peer reachable. May be asked from both ends at once. Operations may be posted at once and wait for it.
     * What is wrong with the peer is told of "it": the world puts before it who that is.
     *
     * With `disconnect`, connecting to a peer that was lost begins a new connection, unless the peer has begun one
     * since then. Messages of the old connection never arrive on the new one. If the peer begins a new connection while
     * this end still has the old one, the old one is lost first. */
    tb_status (*connect)(void *context, int32_t peer, const void *address, size_t nbytes);

    /* (optional, all of mem_...; default: TB_REFUSED) Without them no peer reaches this rank's memory. */
    tb_status (*mem_register)(void *context, const tb_mem_desc *desc, tb_mem **out);
    /* Every later access by a peer fails, by name. The caller sees to it that none is under way. */
    void (*mem_unregister)(void *context, tb_mem *mem);
    /* A key that `peer` may import once a message sent after this call has reached it. */
    tb_status (*mem_export)(void *context, tb_mem *mem, int32_t peer, tb_mem_key *out);
    tb_status (*mem_import)(void *context, int32_t peer, const tb_mem_key *key, tb_remote **out);
    void (*mem_release)(void *context, tb_remote *remote);
    /* (optional; default NULL) An address at which the peer's memory can be read and written, or NULL where it can't.
     * Valid until the remote is released. What is read may have become invalid: see mem_is_valid. */
    void *(*mem_map)(void *context, tb_remote *remote);
    /* (optional; default true) False once the owner has unregistered the memory or is lost. To be asked after reading
     * through a mapping, before the bytes are believed. */
    bool (*mem_is_valid)(void *context, const tb_remote *remote);

    /* (optional; default: TB_REFUSED) Reads ranges of a peer's memory into the pieces at once, one after the other;
     * both lists have the same number of bytes in all, else TB_INVALID. What is out of bounds is refused before
     * anything is read. May be called from any thread while the remote is held, also while another uses the transport.
     */
    tb_status (*mem_read)(void *context, tb_remote *remote, const tb_range *ranges, size_t nranges,
                          const tb_piece *pieces, size_t npieces);

    tb_status (*post)(void *context, tb_op *op);
    /* Completes an operation that has not completed with TB_CANCELLED; nothing of its memory is written after the call,
     * and nobody who reads it then believes what they read. It completes with TB_TIMEOUT instead, after seconds, if the
     * system or a library below does not release the memory, which may then still be read or written. The message that
     * a cancelled receive has been matched with is dropped, and its send is done. A receive that has got a part of a
     * message whose send is cancelled completes with TB_CANCELLED, too; one that has got nothing may go on waiting. */
    void (*cancel)(void *context, tb_op *op);
    /* Does what can be done without waiting; calls `done` and `lost`. */
    tb_status (*progress)(void *context);
    /* Readable when progress has something to do. To be waited for after a progress that did. */
    int (*fd)(void *context);
    /* (optional; default true) False while a connection that was there before `connect`, or that takes the place of a
     * lost one, has not carried an answer of the peer since `connect` was called. */
    bool (*is_reached)(void *context, int32_t peer);
    /* (optional; default: a peer that was lost stays lost) Ends the connection: the peer is lost at both ends, and
     * `lost` is called in progress. `connect` begins another one. */
    void (*disconnect)(void *context, int32_t peer, const char *why);
} tb_transport_ops;

/* Adds a transport to those of the library, in the whole process, for good: after those for processes of one host,
 * before those that go over the network, because whoever brings one means it to be used. The table is copied, its name
 * is not. The same one again, by its name and `open`, is no error; TB_CONFLICT if another has its name; TB_INVALID if a
 * slot is missing that is not optional, or host memory is not among what it carries. Worlds that are there already do
 * without. Any thread. */
TB_API tb_status tb_transport_register(const tb_transport_ops *ops);

/* An open transport. */
typedef struct tb_transport {
    const tb_transport_ops *ops;
    void *context;
} tb_transport;

#ifdef __cplusplus
}
#endif

#endif
