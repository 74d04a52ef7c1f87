/* tensorbus: move distributed tensors between programs whose layouts differ.
 *
 * What programs use, meant to be read from top to bottom: status and errors, log, dtypes and shapes; then what moves
 * tensors: memory, the world (who is there), pairs (two groups and their layouts), batches (tensors that travel
 * together), transfers; the copy service, for tensors that go from one rank to another as they are; agents, which do
 * all this for other processes; and models (names and views of many parameters).
 *
 * Beside it: tensorbus/plan.h has layouts, plans and the IR as data, for tools and simulators; tensorbus/mpi.h makes a
 * world of the ranks of an MPI communicator; tensorbus/transport.h is for those who write a transport.
 *
 * Rules that hold everywhere:
 *  - Functions that can fail return a tb_status: TB_OK (0) or a negative code. Outputs are written only on success.
 *    tb_error_detail() then gives one sentence that says what is wrong and where.
 *  - Nothing here aborts or prints. Objects are opaque, made by *_create or *_parse, and freed by *_destroy, which
 *    accepts NULL.
 *  - Structs that begin with `size` may get more fields at their end, within a minor version. A program sets it to
 *    sizeof the struct, also in those that the library fills in. Fields that a program does not have are taken as zero,
 *    and are not filled in. A program that sets a field which the library does not know is refused (TB_REFUSED). In an
 *    array all have the same size. Structs without `size` stay as they are within a minor version: tb_shape,
 *    tb_binding, tb_tie, tb_rule, tb_part, tb_parts, tb_copy_op, tb_slice.
 *  - In options structs, zero means the default, and NULL means all defaults.
 *  - Layouts, plans, views and names never change once made, and may be used from several threads at once. Other
 *    objects belong to one thread at a time.
 *  - After fork() the child can't use worlds, and what was made from them: calls on them fail at once, with TB_REFUSED,
 *    or -1 for a descriptor. Destroying them there frees memory, and neither tells the peers nor changes anything for
 *    the parent. The child has none of their connections. It can join by itself, but not with transport ucx where the
 *    parent had that open. Ranks, incarnations, groups and sizes can still be
 *    read, and layouts, plans, the IR, views and names still work.
 */
#ifndef TENSORBUS_TENSORBUS_H
#define TENSORBUS_TENSORBUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TB_API __attribute__((visibility("default")))

/* The library's version, "major.minor.patch". */
TB_API const char *tb_version_string(void);

/* ---- Status -------------------------------------------------------------------------------------------------- */

typedef enum tb_status {
    TB_OK = 0,
    TB_INVALID = -1,     /* an argument or an input is wrong */
    TB_NO_MEMORY = -2,   /* an allocation failed */
    TB_TOO_BIG = -3,     /* a size or a count is beyond what tensorbus handles */
    TB_REFUSED = -4,     /* well formed, but against a rule: avg of integers, a silent cast to 8 bits */
    TB_IO = -5,          /* the system failed to read or write */
    TB_INTERNAL = -6,    /* a check of tensorbus's own results failed: a bug */
    TB_TIMEOUT = -7,     /* nothing happened before the deadline */
    TB_LOST = -8,        /* a peer or a connection is gone */
    TB_DENIED = -9,      /* not allowed: a wrong token, another user's process */
    TB_CONFLICT = -10,   /* somebody else was first, or says something else */
    TB_CANCELLED = -11,  /* the caller gave it up */
    TB_IN_DOUBT = -12,   /* whether it is committed is not known */
    TB_SUPERSEDED = -13, /* the version was overtaken: its receivers are offered a higher one by others */
} tb_status;

/* A short name for the code, never NULL. */
TB_API const char *tb_status_string(tb_status status);

/* The sentence of the calling thread's last failed call; "" if none failed. Valid until the thread's next failure. */
TB_API const char *tb_error_detail(void);

/* For functions of the user's that the library calls: sets that sentence, and returns the status. */
TB_API tb_status tb_error_set(tb_status status, const char *sentence);

/* ---- Log ----------------------------------------------------------------------------------------------------- */

typedef enum tb_log_level { TB_LOG_OFF, TB_LOG_ERROR, TB_LOG_WARN, TB_LOG_INFO, TB_LOG_DEBUG } tb_log_level;

/* Called with one line, without a newline. May be called from any thread. */
typedef void (*tb_log_fn)(void *arg, tb_log_level level, const char *line);

/* Messages up to `level` go to `fn`; there is no sink until this is called. NULL takes it away. Of errors and warnings
 * of one kind, the first 10 within a minute are messages; the others are counted, and their number is told by a later
 * message, or when the sink is changed. */
TB_API void tb_log_set(tb_log_level level, tb_log_fn fn, void *arg);

/* The same for a descriptor in place of a function: each message is written to it at once, with its level, as in
 * "warn: ...", and a newline. One that it has no room for and does not wait for is lost. -1 takes it away. */
TB_API void tb_log_set_fd(tb_log_level level, int fd);

/* ---- Dtypes -------------------------------------------------------------------------------------------------- */

typedef enum tb_dtype {
    TB_DTYPE_NONE,
    TB_BOOL,
    TB_U8,
    TB_U16,
    TB_U32,
    TB_U64,
    TB_I8,
    TB_I16,
    TB_I32,
    TB_I64,
    TB_F16,
    TB_BF16,
    TB_F32,
    TB_F64,
    TB_F8E4M3,
    TB_F8E5M2,
    TB_E8M0,   /* a power-of-two scale */
    TB_F4E2M1, /* two to a byte, the even element in the low half */
    TB_DTYPE_COUNT
} tb_dtype;

TB_API const char *tb_dtype_name(tb_dtype dtype); /* "bf16"; NULL: not a dtype */
TB_API unsigned tb_dtype_bits(tb_dtype dtype);    /* 16; 0: not a dtype */

/* Takes our names, and those of PyTorch ("bfloat16") and safetensors ("BF16"). */
TB_API tb_status tb_dtype_parse(const char *name, tb_dtype *out);

/* ---- Shapes -------------------------------------------------------------------------------------------------- */

enum {
    TB_MAX_DIMS = 8,        /* of a tensor, and of a mesh */
    TB_MAX_BUFFERS = 4,     /* of a transform's piece, or of an operation */
    TB_MAX_RANKS = 1 << 20, /* ranks are 0 .. TB_MAX_RANKS - 1 */
    TB_NO_RANK = -1,
};

typedef struct tb_shape {
    int ndim; /* 0 is a scalar */
    int64_t dim[TB_MAX_DIMS];
} tb_shape;

/* "4096,4096"; "" is a scalar. */
TB_API tb_status tb_shape_parse(const char *text, tb_shape *out);

/* Checks the shape and counts its elements and bytes; a tensor may have at most 2^62 bytes. Outputs may be NULL. */
TB_API tb_status tb_shape_size(const tb_shape *shape, tb_dtype dtype, int64_t *nelements, int64_t *nbytes);

/* ---- Memory -------------------------------------------------------------------------------------------------- */

/* Tensors lie in memory of a *device*, which has a name: "host", memory that the CPU reads and writes; "cuda", that of
 * GPUs, of which "cuda:1" is one, by its ordinal in this program. Whatever no other device claims is taken for "host".
 * The library finds out where a tensor lies. A program may also say so, in tb_tensor.memory and tb_copy_view.memory:
 * then memory that turns out to be elsewhere is refused. */

/* Memory that other processes of this machine can read in place: the fastest home for tensors. Any other memory works
 * too, with a copy more where the system does not let peers read it. Aligned to 64 bytes; zero bytes are a pointer,
 * too. Pages come from a pool of the process, which keeps what was freed warm for the next allocation: they are zero
 * when they are new, and not cleared in between. Both may be called from any thread. It does not outlive the process,
 * and a forked child has none of its parent's: touching it there is a fault, freeing it does nothing. */
TB_API tb_status tb_alloc(size_t nbytes, void **out);

/* The same on a device, for which no world is needed:
 *
 *     "host"            tb_alloc
 *     "pinned"          tb_alloc in pages of its own, which the driver of a GPU has pinned, so that GPUs read and write
 *                       them at full speed. Pinning takes about 0.1 s for each GiB
 *     "cuda", "cuda:1"  memory of a GPU, by its ordinal in this program, or of the one that the calling thread uses;
 *                       GPUs of other processes of this machine can read it in place
 *
 * TB_INVALID, with the devices of this build, for any other; TB_REFUSED, with what is missing, if this machine has no
 * such device. What the memory holds at first is not said. */
TB_API tb_status tb_alloc_on(const char *device, size_t nbytes, void **out);

/* Frees memory of either. NULL is allowed; what is no live allocation is logged as an error, and left alone. Memory
 * that a batch uses must first be given up: tb_batch_destroy, or tb_world_invalidate that has returned TB_OK. */
TB_API void tb_free(void *ptr);

/* The same two with the signatures of PyTorch's CUDAPluggableAllocator: memory of GPU `device`, NULL if there is none.
 * The stream is not used: PyTorch's pools keep memory until the streams that have used it are done. */
TB_API void *tb_torch_alloc(ptrdiff_t nbytes, int device, void *stream);
TB_API void tb_torch_free(void *ptr, ptrdiff_t nbytes, int device, void *stream);

/* ---- World --------------------------------------------------------------------------------------------------- */

/* A process's seat on the bus. It has one *bus rank*, and is in one or more *groups*: named arrays of processes.
 *
 * The calls below may come from several threads at once, but for the one that destroys an object, which must be the
 * last. Waits end at their deadline, with TB_TIMEOUT and a sentence that names who is missing. */
typedef struct tb_world tb_world;

typedef struct tb_world_opts {
    size_t size;
    const char *token; /* must be the same for all who meet in one store; NULL: "" */
    int timeout_ms;    /* 30000: to join, and for calls below that are given no timeout of their own */
    /* "auto" (the default): for each process the fastest that gets there, shm on the same host and ucx elsewhere; or
     * the only one to use: "self", "shm", "ucx". */
    const char *transport;
    int workers;      /* threads that copy, in the whole process; default: cores / ranks on this host, at least 1 */
    bool manual;      /* no thread of ours: the program calls tb_world_progress when tb_world_fd is readable */
    const char *host; /* whoever has the same one is on the same host; default: the machine and its network namespace */
    int64_t plan_bytes; /* the most memory for plans that are kept for batches that are made again; default: 64 MiB. The
                           least recently used plans are dropped first */
    const char *name;   /* as which an agent's `tensorbus status` shows this process; default: the program's name */
} tb_world_opts;

/* Takes seat `index` of the `size` in the group. The store at `url` is where processes meet: "unix:/tmp/bus.sock" or
 * "tcp://127.0.0.1:7000", or etcd, "etcd://a:2379,b:2379"; "?namespace=NAME" keeps several buses apart. A URL without
 * a host, "tcp://:7000", means 127.0.0.1: only processes of this machine reach it. If nobody serves a socket there,
 * this process does, for as long as it has the world. Without the store transfers go on, but nobody new can be met;
 * when it is back, or another process serves it, all take their seats there again. TB_CONFLICT while another process
 * has the seat; TB_REFUSED, naming both versions, while a rank with another minor version of tensorbus is on the bus.
 *
 * "agent:/run/trainer-0.sock" is an agent instead (see Agents), whose seat this must be: TB_CONFLICT, with both seats,
 * if it is not. With a group of NULL, or a size of 0, it is whichever seat the agent has. */
TB_API tb_status tb_world_join(const char *url, const char *group, int32_t index, int32_t size,
                               const tb_world_opts *opts, tb_world **out);

/* Takes a seat in another group too. */
TB_API tb_status tb_world_enter(tb_world *world, const char *group, int32_t index, int32_t size);

/* Leaves all groups. Pairs, batches and copy services keep their world, and transfers their batch: in whichever order
 * they are destroyed, each goes when nothing needs it any more. */
TB_API void tb_world_destroy(tb_world *world);

/* The seat that it joined with, or that its agent has. The group's name is the world's. */
TB_API void tb_world_seat(const tb_world *world, const char **group, int32_t *index, int32_t *size);

TB_API int32_t tb_world_rank(const tb_world *world);
TB_API uint64_t tb_world_incarnation(const tb_world *world); /* how often this bus rank has been taken, from 1 */

/* Waits until every seat of the group is taken. A timeout of 0 is the world's; this holds below, too. */
TB_API tb_status tb_world_wait(tb_world *world, const char *group, int timeout_ms);

/* The groups on the bus, one to a line, by name: how many of its seats are taken, of how many, and its name, as in
 * "1 2 trainer". To be freed by the caller with free(). */
TB_API tb_status tb_world_groups(tb_world *world, int timeout_ms, char **out);

/* Of a `manual` world; other calls that wait make progress, too. */
TB_API int tb_world_fd(const tb_world *world);
TB_API tb_status tb_world_progress(tb_world *world);

/* The memory is about to be freed or moved. Transfers of this world that use it fail, on all their ranks, with
 * TB_INVALID and a sentence that names the tensor, the batch and this rank; so do runs of copy services, on the ranks
 * that have come to them. What was released, or is in a snapshot, is not affected. After TB_OK this process neither
 * reads nor writes the memory, and no peer writes it; a peer that has read it meanwhile, or is still reading, discards
 * what it read and fails. Device memory is not mapped by any peer any more. Batches with tensors in it have to be made
 * again, also those that have not moved yet.
 *
 * Waits for copies that are under way, and for peers to unmap device memory, for the world's timeout_ms at most.
 * TB_TIMEOUT ("still in use by ..."): the
 * memory must not be freed yet; the call may be repeated. A manual world makes progress meanwhile. TB_REFUSED in a
 * function that the library calls. A shadowed receive that was decided and has not changed the tensors yet fails on
 * this rank alone: the others of its group have the version. */
TB_API tb_status tb_world_invalidate(tb_world *world, const void *base, size_t nbytes);

/* How often a batch found its plan ready, and how often one had to be made. A batch plans when it is first sent or
 * first received; plans outlive it, for one that is made again from the same tensors and layouts. */
TB_API void tb_world_plan_counters(const tb_world *world, uint64_t *hits, uint64_t *misses);

/* The memory of plans that are kept: at most tb_world_opts.plan_bytes. */
TB_API uint64_t tb_world_plan_bytes(const tb_world *world);

/* ---- Pairs --------------------------------------------------------------------------------------------------- */

/* Two groups that exchange tensors, and the layout each of them has: who holds which part of a tensor. Each side gives
 * its own, as text, in which ranks are seats of the group.
 *
 *     mesh=2,2 place=R,S1 ranks=4..7
 *
 * is a mesh of ranks, row-major (without `ranks`: 0, 1, 2, ...), and for each of its dimensions what that does to the
 * tensor: Shard(0), StridedShard(0,2), BlockShard(0,4,12,8), Explicit(0, 0-3,5-6; 3-5), Replicate, Partial(sum); short
 * S0, R, P. docs/design/layout.md has the rules.
 *
 * With a layout of NULL, on both sides, seat i sends to seat i; the groups have as many ranks. Each rank's tensors are
 * its own then: their shapes are those of what the rank has, and other ranks may have other tensors, or other shapes
 * under the same names. Sentences and dumps call tensor w of seat 2 w@2. Ties and patterns have names without the seat.
 */
typedef struct tb_pair tb_pair;

typedef struct tb_pair_opts {
    size_t size;
    const char *group; /* this side's, where the process is in several; default: the one it joined first */
    int timeout_ms;    /* if the store does not answer, up to a second more */
    bool no_wait;      /* returns at once; the others are waited for when a batch is registered */
} tb_pair_opts;

/* Completes when all ranks of both groups have made the pair `name`, and are connected. After connections were lost,
 * for example because a network was cut and mended, destroy the pair and make it again: that connects the ranks that
 * are alive, over all transports but MPI. Ranks of a side that disagree are named on every rank, at once (TB_CONFLICT),
 * and so are ranks that have no transport in common, or other versions of tensorbus (TB_REFUSED). A process that is in
 * both groups makes the pair once for each of them, the first time with no_wait. */
TB_API tb_status tb_pair_create(tb_world *world, const char *name, const char *remote_group, const char *layout,
                                const tb_pair_opts *opts, tb_pair **out);
TB_API void tb_pair_destroy(tb_pair *pair);

/* ---- Bindings ------------------------------------------------------------------------------------------------ */

/* Where a rank keeps its part: element (i, j, ...) of the local shape is at
 * base + offset + (i*strides[0] + j*strides[1] + ...) elements. Several bindings may share one allocation, so that a
 * fused parameter is several logical tensors. */
typedef struct tb_binding {
    void *base;
    int64_t offset; /* bytes */
    tb_dtype dtype;
    tb_shape shape; /* the local shape */
    int64_t strides[TB_MAX_DIMS];
} tb_binding;

/* Row-major, without gaps. */
TB_API tb_status tb_binding_contiguous(void *base, int64_t offset, tb_dtype dtype, const tb_shape *shape,
                                       tb_binding *out);

/* Whether every element lies inside an allocation of nbytes that starts at `base`. */
TB_API tb_status tb_binding_check(const tb_binding *binding, int64_t nbytes);

/* ---- Hashes -------------------------------------------------------------------------------------------------- */

/* The hash of a tensor is the sum modulo 2^64 of the hashes of its elements, and that of an element comes from its bits
 * and its row-major index in the whole tensor (docs/verify.md has the formula). So parts are hashed where they lie, and
 * added up in any order: the hash does not depend on how the tensor is cut. It does not depend on dtype and shape
 * either, beyond the elements' bits and indices: compare these, too.
 *
 * This is the hash of the box that the binding says, which begins at the indices `start` of a tensor of this shape. An
 * empty one has 0. The memory is read by the CPU: the caller copies that of a GPU to the host. Pure, may be called from
 * several threads at once. */
TB_API tb_status tb_hash_box(const tb_binding *box, const tb_shape *shape, const int64_t *start, uint64_t *out);

/* ---- Transforms ---------------------------------------------------------------------------------------------- */

/* Conversions on the way that are the user's own. Those that come with tensorbus are said by a tensor's `encode`. */
typedef struct tb_transform_piece {
    size_t size;
    const char *name; /* of the tensor; where names are tied, the receiving side's */
    tb_dtype dtype;   /* the sending side's */
    int ndim;
    int64_t shape[TB_MAX_DIMS]; /* of the piece */
    /* Where it begins in the two local tensors: when it is sent to several ranks, in the first one's; not known to
     * prepare_recv. */
    int64_t src_start[TB_MAX_DIMS], dst_start[TB_MAX_DIMS];
    /* Where its buffers are in the wire, in bytes; not known to prepare_recv and list_buffers. */
    size_t nbuffers;
    int64_t buffer_offset[TB_MAX_BUFFERS], buffer_nbytes[TB_MAX_BUFFERS];
} tb_transform_piece;

/* A tensor goes in pieces, boxes that one rank has for others. Each is turned into bytes where it is sent, and back
 * where it is received. A side that gives no transform for a tensor has nothing to do with the other side's: on the
 * wire are the elements, in the sending side's dtype, and a transform at one side only turns them into other values of
 * as many bytes, or takes them as they are. Where both sides transform a tensor, its pieces have as many bytes as the
 * transforms say, which must be the same at both. should_transform is called by tb_batch_add, the others by the thread
 * that makes progress, one at a time; they must not call the world. Functions may be NULL: then elements are copied as
 * they are, in the sending side's dtype, and the piece has their bytes. A sentence of failure is set by tb_error_set.
 */
typedef struct tb_transform {
    size_t size;
    void *arg;
    bool (*should_transform)(void *arg, const char *name); /* NULL: all */
    /* How many bytes a piece has on the wire, at least 1, by its shape; NULL: those of its elements. Asked at both
     * ends, while the batch is planned, perhaps more than once. */
    int64_t (*prepare_recv)(void *arg, const tb_transform_piece *piece);
    /* `part` is the piece in this rank's tensor. */
    tb_status (*prepare_send)(void *arg, const tb_transform_piece *piece, const tb_binding *part, void *wire);
    tb_status (*finalize_recv)(void *arg, const tb_transform_piece *piece, const tb_binding *part, const void *wire);
    /* Pieces are not cut to fit staging memory: each is all that one rank has for another in one box. And finalize_recv
     * is called when all of the tensor's group has arrived (but for tensors with an `encode`), in the order of names,
     * then of places in the target; until then the pieces are kept in staging memory, and a batch that does not fit is
     * refused. Asked for by one side, pieces are whole for both. */
    bool whole;
    /* In place of prepare_recv: a piece is several buffers, such as data and scales. Writes their sizes, each at least
     * 1, and returns how many there are, 1 to TB_MAX_BUFFERS. In the wire each begins at a multiple of 64 bytes. */
    int (*list_buffers)(void *arg, const tb_transform_piece *piece, int64_t *nbytes);
} tb_transform;

/* ---- Batches ------------------------------------------------------------------------------------------------- */

/* Tensors that travel together, through one or more pairs. All ranks of a pair make the batch, by the same name, and
 * each adds the tensors that it has a part of; it may add others of its side, too. What the ranks of a side have added,
 * all together, is what the side has. Names and shapes must be equal on both sides, all else may differ; ranks of one
 * side describe a tensor alike. */
typedef struct tb_batch tb_batch;

/* Tied weights: one tensor with two names. */
typedef struct tb_tie {
    const char *name, *canonical;
} tb_tie;

/* What becomes of data that arrives. The receiving side's counts; its ranks say the same. */
typedef enum tb_commit {
    TB_IN_PLACE, /* it lands in the tensors; a receive that fails half-way leaves them torn */
    TB_SHADOW,   /* it lands beside them, in as much memory again, and is copied into them when all ranks of the group
                    have all of theirs: then all of them get the new version, or none does. The store decides; what a
                    transform writes elsewhere is none of its business */
} tb_commit;

typedef struct tb_batch_opts {
    size_t size;
    int64_t bucket_size;    /* 16 MiB; what is sent together. The sending side's counts */
    int64_t staging_bytes;  /* 256 MiB; the most memory this rank may use for tensors that are not read in place.
                               Snapshots, shadows, and buffers of conversions on this rank come on top */
    uint32_t max_in_flight; /* 2; buckets under way per channel */
    uint32_t group_window;  /* how many groups of tensors may be under way at a time; default: all */
    bool staged;            /* use staging memory for everything, as between machines */
    bool snapshot;          /* tb_send copies the tensors first, so that they are released at once; takes as much memory
                               again as the tensors have. The transfer goes on until it is committed, and must not be
                               destroyed before */
    /* How names are matched, as in tb_match_opts. What any rank of either side gives counts for all. */
    const tb_tie *ties; /* a target that the sending side lacks takes the tensor of a name that is tied to its own */
    size_t nties;
    const char *const *ignored; /* patterns for what may be on one side only; there it stays as it is */
    size_t nignored;
    const tb_transform *transform; /* see Transforms; its arg is borrowed until the batch is destroyed */
    tb_commit commit;
    bool checksum; /* every bucket goes with a sum of its bytes, which is compared where it arrives, before it is
                      unpacked; nothing is read in place then. Copies within a rank, and conversions at either end,
                      are not covered. Asked for by any rank of either side, it is so for all */
} tb_batch_opts;

typedef struct tb_tensor {
    size_t size;
    void *data; /* this rank's part; borrowed until the batch is destroyed. May be NULL where that is empty */
    tb_dtype dtype;
    int ndim;
    int64_t shape[TB_MAX_DIMS]; /* global */
    const int64_t *strides;     /* of the local part, in elements; NULL: row-major without gaps */
    const char *layout;         /* of this side, for this tensor; NULL: the pair's */
    /* Asks for a cast to it on the way; the sending side's counts. There are casts among floats, and among integers.
     * One that may lose values without notice is refused unless it is asked for here: to floats of 8 bits, to integers
     * that lack values of the source. */
    tb_dtype wire_dtype;
    uint32_t group;   /* groups arrive in ascending order; the receiving side's counts */
    const char *view; /* how the stored tensor becomes the one that `name` names (see Models); shape, strides and layout
                         are those of the storage. NULL: as it is. A receive sets padding to zero */
    /* This side has it quantised: "mxfp8", "fp8_block", "fp8_tensor" or "nvfp4" (docs/models.md has the formats).
     * It is quantised when it arrives, and turned back into numbers when it is sent. Options stand in parentheses:
     * mxfp8(floor) for the exponent rule of OCP, mxfp8(swizzled) and nvfp4(swizzled) for scales in tiles of 128 x 4,
     * fp8_block(power_of_two) and fp8_tensor(power_of_two), mxfp8(sender) to have the sender quantise, which halves
     * what is sent. Rows of the last dim stay whole; strides are not allowed. */
    const char *encode;
    void *scales;            /* one after the other, as many as the format has for this rank's part; borrowed */
    float *scale;            /* fp8_tensor and nvfp4: the one for all of it; borrowed */
    const char *scale_group; /* tensors of this name have that in common, over all ranks of this side, or, if it begins
                                with "local:", on each for itself; NULL: this rank's part has its own. Tensors that
                                point to one `scale` have to be in one group */
    const char *memory; /* the device that data, scales and scale are on (see Memory), else TB_REFUSED; NULL: any */
} tb_tensor;

/* How many bytes `data`, `scales` and `scale` of a tb_tensor with this `encode` have, if the rank's part has this
 * shape. Outputs may be NULL. */
TB_API tb_status tb_encode_nbytes(const char *encode, const tb_shape *part, size_t *data, size_t *scales,
                                  size_t *scale);

/* Everything in the options but the transform is copied. */
TB_API tb_status tb_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out);

/* Everything but the tensor's data and scales is copied.
 *
 * After the batch was registered, too, a new pair may be added to it, while no transfer of it exists: an engine that
 * joins, or one that comes back and makes its pair again, once the old one is removed. Only the ranks of that pair
 * register it then; nothing changes for the others. */
TB_API tb_status tb_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor);

/* The same for many tensors. The first that fails is named, and ends it; those before it, *nadded of them, are in the
 * batch. `nadded`, which may be NULL, is written in any case. */
TB_API tb_status tb_batch_add_all(tb_batch *batch, tb_pair *pair, const char *const *names, const tb_tensor *tensors,
                                  size_t count, size_t *nadded);

/* This process takes part in the pair's transfers even if it adds none of the pair's tensors: a rank that is idle in
 * this model. */
TB_API tb_status tb_batch_add_pair(tb_batch *batch, tb_pair *pair);

/* Completes when both sides of every pair have added their tensors, and names and shapes agree. Ranks that describe a
 * tensor differently, one that holds a part of a tensor and has not added it, and tensors that only one side has are
 * named on every rank, at once. The first transfer registers a batch, if that has not been done; from then on nothing
 * can be added to its pairs. What can't be converted in either direction is told here, too; what else can't be moved
 * in one of them (a cast that is refused, targets that overlap) by the first transfer in it. */
TB_API tb_status tb_batch_register(tb_batch *batch, int timeout_ms);

/* Every piece that this process sends or receives in the batch, one to a line: which box of which tensor, and on which
 * device if it is not the host, goes to or comes from whom, by way of whom, and, of what is received, how it is
 * written: *direct* (it is read into its place), *copy* (it came in a bucket), *transform* (it is converted), or *in
 * place* (it is there already), and how it is reached: *mapped*, *not mapped* (it is read by calls), or *staged*, with
 * the reason. With an agent, further lines tell which tensors on devices this process copies from or to host memory,
 * and why. Ranks are those of the bus. To be freed by the caller with free(). TB_REFUSED before the first transfer in
 * that direction, which settles it. */
TB_API tb_status tb_batch_dump(tb_batch *batch, bool is_send, char **out);

/* Takes the pair and its tensors out of the batch, while no transfer of it exists. The pair's other ranks can't move it
 * without this process any more; nothing changes for other pairs. */
TB_API tb_status tb_batch_remove_pair(tb_batch *batch, tb_pair *pair);

/* A tensor that has moved. */
typedef struct tb_rebinding {
    tb_pair *pair; /* that it was added to, by this name */
    const char *name;
    void *data; /* where this rank's part is now */
} tb_rebinding;

/* From now on the tensors are where these say, with the strides that they had. Nothing is copied, and only this process
 * calls it: readers on other ranks are told before its next transfer, and read nothing at the old address any more.
 * The old memory may be freed afterwards, or before if tb_world_invalidate was called for it; such tensors are valid
 * again.
 *
 * The new memory has to be of the same kind, since peers reach it as they have agreed to: on the same device, and of
 * tb_alloc only if the old one was. TB_REFUSED if it is not; if targets would now overlap what is sent, or not any
 * more; for a quantised tensor; while a transfer of the batch exists; and with an agent. Then nothing has changed.
 * Waits, for the world's timeout_ms at most, for messages of a transfer that has failed. */
TB_API tb_status tb_batch_rebind(tb_batch *batch, const tb_rebinding *tensors, size_t count);

/* How often this process has registered pairs of the batch, or removed them. */
TB_API uint64_t tb_batch_epoch(tb_batch *batch);

/* Which version this process has in the tensors that it receives through the pair: the number of the last transfer that
 * was completed, which all ranks agree on, those of other pairs too; 0: none. It counts what the first sender of the
 * pair has sent of its batch, what failed included. `is_torn`: a later one has failed after it had begun to
 * write, and the tensors have parts of it, until another one is completed. */
TB_API tb_status tb_batch_version(tb_batch *batch, const tb_pair *pair, uint64_t *version, bool *is_torn);

/* What this process has received through all pairs of the batch together. */
typedef struct tb_batch_state {
    size_t size;
    uint64_t version;     /* the last that all pairs had at one time; 0: none */
    bool is_mixed;        /* the pairs' versions differ: a receive in place failed for some of them, or a pair is new */
    bool is_torn;         /* some pair's tensors are torn */
    bool transfer_signal; /* sending: not all have read it; receiving: there is something to receive, or being received
                           */
    bool is_in_doubt; /* a receive has ended with TB_IN_DOUBT: the tensors have the version before, which other ranks
                         of the group may have left. Neither is to be used before this is false again */
} tb_batch_state;

TB_API tb_status tb_batch_query(tb_batch *batch, tb_batch_state *out);

/* The transfer_signal, the same on every rank of this process's group `group` (NULL: the only one of the batch's pairs,
 * or the one that it joined first) that asks the same question: so all ranks of an engine branch alike. Programs number
 * their questions from 1, on all ranks alike; a number may be asked again, and numbers may be passed over. The first
 * rank of the group answers a question with what it sees when the first rank asks it, whether or not its own program
 * asks; in a manual world, its program has to be in a call of the library. It remembers what it has answered as long as
 * it has the batch, for the last thousands of changes of the signal; older questions are refused. `timeout_ms` is as in
 * tb_batch_register. For registered batches. */
TB_API tb_status tb_batch_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms, bool *out);

/* The tensors are the caller's again, once the batch's transfers are destroyed, too. */
TB_API void tb_batch_destroy(tb_batch *batch);

/* ---- Calls by a descriptor ------------------------------------------------------------------------------------ */

/* tb_world_join, tb_pair_create and tb_batch_register wait for others. These have a thread of the library's make the
 * same call, so that the program can wait for a descriptor meanwhile, and for other things, and can give the call up.
 * Arguments are copied. The world of a pair, and the batch, must not be destroyed before the call is. */
typedef struct tb_call tb_call;

TB_API tb_status tb_call_join(const char *url, const char *group, int32_t index, int32_t size,
                              const tb_world_opts *opts, tb_call **out);
TB_API tb_status tb_call_pair(tb_world *world, const char *name, const char *remote_group, const char *layout,
                              const tb_pair_opts *opts, tb_call **out);
TB_API tb_status tb_call_register(tb_batch *batch, int timeout_ms, tb_call **out);

/* Readable once the call has ended. Valid until the call is destroyed. */
TB_API int tb_call_fd(const tb_call *call);

/* The status of a call that has ended, and its sentence; TB_TIMEOUT if it has not. *out is the tb_world or the tb_pair,
 * which is the caller's from then on, and NULL the next time; it may be NULL for a registration. */
TB_API tb_status tb_call_result(tb_call *call, void **out);

/* Cancels a call that is under way, and destroys what it has made and nobody has taken. Pairs and registrations have
 * ended when this returns, and can be tried again. One that joins may go on until its deadline, by itself, and leaves
 * again if it succeeds. NULL is allowed. */
TB_API void tb_call_destroy(tb_call *call);

/* ---- Transfers ----------------------------------------------------------------------------------------------- */

typedef struct tb_transfer tb_transfer;

typedef enum tb_event {
    TB_RELEASED = 1,  /* sending: the tensors may change again */
    TB_ARRIVED = 2,   /* receiving: this rank's data is in, or, with TB_SHADOW, beside the tensors */
    TB_COMMITTED = 4, /* receiving: the version is in this rank's tensors. With TB_SHADOW the group has decided so, and
                         the other ranks have it or are about to; in place, others may still be receiving it, or may not
                         have begun (see whole_group). Sending: all receivers of this rank's data have it. This process
                         may end now: the others need nothing of it any more for this version */
    TB_DECIDED = 8,   /* receiving with TB_SHADOW and hold: the group has decided; tb_proceed lets the tensors change */
} tb_event;

typedef enum tb_phase {
    TB_PHASE_PLAN,   /* working out what goes where, the first time */
    TB_PHASE_WAIT,   /* for others */
    TB_PHASE_PACK,   /* tensors to staging memory, or to the snapshot */
    TB_PHASE_WIRE,   /* between processes: reading tensors in place, or sending staged ones */
    TB_PHASE_UNPACK, /* staging memory to tensors */
    TB_PHASE_COMMIT,
    TB_PHASE_COUNT
} tb_phase;

TB_API const char *tb_phase_name(tb_phase phase); /* "plan"; NULL: not a phase */

typedef struct tb_transfer_state {
    size_t size;
    tb_status status; /* TB_OK while it is under way and after it succeeded */
    unsigned events;  /* the tb_events that have come about */
    uint64_t attempt; /* the number its senders gave it; 0: they have not begun. A receive that was cancelled before
                         they began has the number that they will give up */
    int64_t bytes_done, bytes_total;
    uint32_t groups_done, groups_total;
    double seconds; /* since it began, until it ended */
    double phase[TB_PHASE_COUNT];
    uint64_t version; /* of one that is committed: its number, the lowest of its pairs'; 0: it is not */
} tb_transfer_state;

typedef struct tb_transfer_opts {
    size_t size;
    int timeout_ms; /* for the whole transfer, after which it fails; default: the world's */
    /* Called as data arrives or leaves, by the thread that makes progress; it must not call the library. */
    void (*progress)(void *arg, const tb_transfer_state *state);
    void *arg;
    const char *group; /* as which group this process acts, where it is in both groups of a pair; default: to send, the
                          one it entered first, and to receive, the other */
    /* Receiving with TB_SHADOW: called right before the tensors are overwritten with the new version, and right after
     * those of all pairs are. By the thread that makes progress, or the one that begins a transfer; it must not call
     * the library. */
    void (*committing)(void *arg, bool is_done);
    bool skip_lost; /* goes without engines (groups that receive) of which a pair has lost a rank, with all of their
                       pairs; default: fails by name, also for the other pairs where that was known before */
    /* Receiving with TB_SHADOW: once the group has decided to commit, this rank does not touch its tensors before
     * tb_proceed is called. What was decided can't be taken back, so it goes on by itself when the transfer's deadline
     * has come, or when it is cancelled. Senders wait for it; their deadlines go on, too. */
    bool hold;
    /* A stream of the device that this rank's tensors are on: points to its handle (of "cuda", a CUstream or
     * cudaStream_t), which is read during the call, because the handle of the default stream is 0. NULL: none. A send
     * reads the tensors, and a receive writes them, after the work that is on the stream when the call is made; the
     * call itself does not wait for that. Host memory is not ordered by streams: there the transfer may use the tensors
     * from the call on. TB_REFUSED if the stream is being captured, if tensors are on a device that has no streams, or
     * on two devices that have. */
    const void *stream;
    /* TB_COMMITTED comes when all ranks of this side have ended the transfer: receiving, all have the version; sending,
     * all receivers of all ranks have it. Ranks that have nothing to send or to receive wait, too. All ranks of the
     * side set it, or none. If one fails, is lost, or does not come before the deadline, the transfer fails on all
     * ranks, by that rank's name; those that have received the version keep it. */
    bool whole_group;
} tb_transfer_opts;

/* Begins to send the batch's tensors to the other sides of its pairs, or to receive from there. A batch can do one of
 * each at a time. All ranks of a side call it.
 *
 * A group that receives is an engine. All pairs of the batch that lead to it are received as one version: the highest
 * number that is offered through any of them; senders of lower ones fail with TB_SUPERSEDED, and send again. With
 * TB_SHADOW the engine gets all of it or nothing of it; in place, a pair that fails leaves the others, which go on, and
 * the batch mixed or torn. Engines are independent: if a send to one of several fails, the others go on, and the
 * transfer's own failure, which is the first of theirs, comes when all have ended. TB_RELEASED does not wait for those
 * that failed. But a pair of which a rank is known to be lost, or that is in doubt, when the call is made fails the
 * call, by name, and no pair begins, unless skip_lost is set. A transfer that others began before the loss can still be
 * joined.
 *
 * The senders' calls belong together by their number: a rank's fifth with the others' fifth. A sender that comes when
 * the others, or the receivers, have given its transfer up fails with their reason, at once; so nothing of it gets into
 * the next one. A receiver that comes then waits for the next one. So a call that was cancelled, or whose time is up,
 * returns when all ranks have heard of it; one that is silent is waited for a second.
 *
 * With TB_SHADOW a rank whose data is there can't go back on its own: what ends the transfer from then on, be it a
 * deadline, tb_cancel or a loss, asks the store, and the group may have committed. Who gets no answer before its
 * deadline, or in a few seconds if that is later, fails with TB_IN_DOUBT: its tensors have the version before, but
 * others of its group may have the new one. So do those who sent to it, by its name, for whom that is an end as any
 * other. For the receiver the batch is neither sent nor received then until the next of these calls has found out; if
 * it was committed, that call copies it into the tensors, without holding it back. */
TB_API tb_status tb_send(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out);
TB_API tb_status tb_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out);

/* Waits for one event, or for the failure of the transfer, whose status it returns. After `timeout_ms` (0: looks
 * without waiting; negative: as long as the transfer's own deadline) TB_TIMEOUT, and the transfer goes on. */
TB_API tb_status tb_wait(tb_transfer *transfer, tb_event event, int timeout_ms);

/* Makes a stream (see tb_transfer_opts; not NULL) wait for an event: what is submitted to it after this call is done
 * after the event. Of TB_ARRIVED this waits only until the device has been given all copies, of other events not at
 * all. Where the event has come about already, the stream does not wait. For host memory the event has come about when
 * this returns: it waits as tb_wait does, until the transfer's own deadline. So it does where a batch has tensors, or
 * scales of tensors, on the host besides others, and for TB_ARRIVED if that is so of tensors that are received there.
 *
 * A transfer that has failed returns its status. One that fails later, is cancelled or comes to its deadline lets the
 * stream go on, when it uses the tensors no more: so look at tb_wait, too, before what the stream did is relied upon.
 * The transfer must not be destroyed before, which cancels it. */
TB_API tb_status tb_stream_wait(tb_transfer *transfer, tb_event event, const void *stream);

/* Lets a transfer with `hold` change the tensors, now or as soon as it is decided. TB_INVALID for any other. */
TB_API tb_status tb_proceed(tb_transfer *transfer);

/* Waits until the tensors of this group have arrived. With a group_window, a group counts as under way until its
 * arrival was taken in this way, or TB_ARRIVED is waited for. */
TB_API tb_status tb_wait_group(tb_transfer *transfer, uint32_t group, int timeout_ms);

/* The sentence of a transfer that has failed is in tb_error_detail then. */
TB_API tb_status tb_transfer_query(const tb_transfer *transfer, tb_transfer_state *out);

/* What has become of one pair's part; seconds and phases are those of all. A pair that was skipped has the status of
 * its loss. The sentence of a failure is in tb_error_detail. */
TB_API tb_status tb_transfer_pair(const tb_transfer *transfer, const tb_pair *pair, tb_transfer_state *out);

/* Readable when an event or a failure has come about that no wait or query has seen yet. Valid until the transfer is
 * destroyed. */
TB_API int tb_transfer_fd(const tb_transfer *transfer);

/* Ends the transfer with TB_CANCELLED, here and at its peers; when it returns nothing of it is read or written any
 * more, and the peers know that it has ended. Does nothing to one that has ended. */
TB_API void tb_cancel(tb_transfer *transfer);

/* Cancels it if it is under way. */
TB_API void tb_transfer_destroy(tb_transfer *transfer);

/* Moves the batch once, from the group `from` to the groups that it exchanges with, and waits until that is done: this
 * process sends, receives, does both, or, without tensors, waits for nobody, whichever groups it is in. The states, of
 * which either may be NULL, are those of the two transfers; all zero for one that it had no part in. */
TB_API tb_status tb_reshard_execute(tb_batch *batch, const char *from, const tb_transfer_opts *opts,
                                    tb_transfer_state *sent, tb_transfer_state *received);

/* ---- Copy service -------------------------------------------------------------------------------------------- */

/* Copies tensors from rank to rank, within a group. Each rank submits what it sends and what it receives; then all run
 * it, as one batch. Ranks are seats of the group. */
typedef struct tb_copy tb_copy;

typedef struct tb_copy_opts {
    size_t size;
    int timeout_ms;         /* to open */
    int64_t bucket_size;    /* 16 MiB; the least of all ranks counts */
    int64_t staging_bytes;  /* 256 MiB; the most memory this rank may use for tensors that are not read in place */
    uint32_t max_in_flight; /* 2; buckets under way from one rank to another */
    bool staged;            /* use staging memory for everything, as between machines */
    /* What a rank copies to itself is cast to the target's dtype and broadcast to its shape, as by PyTorch's copy_.
     * Between ranks nothing is converted. */
    bool convert_local;
} tb_copy_opts;

/* A tensor in this rank's memory. */
typedef struct tb_copy_view {
    size_t size;
    void *data; /* may be NULL where there are no elements */
    tb_dtype dtype;
    int ndim;
    int64_t shape[TB_MAX_DIMS];
    const int64_t *strides; /* in elements, may be negative; NULL: row-major without gaps */
    const char *memory;     /* the device that data is on (see Memory), else TB_REFUSED; NULL: any */
} tb_copy_view;

/* Completes when all of the group have opened the service `name`. `group` NULL: the one this process joined first. */
TB_API tb_status tb_copy_open(tb_world *world, const char *name, const char *group, const tb_copy_opts *opts,
                              tb_copy **out);

/* As a task_id: the operation has none. The n-th of these from one rank to another belongs to the n-th of these that
 * the other receives from it. */
#define TB_NO_TASK UINT64_MAX

/* Adds an operation to the next run: one or more tensors (data and its scale) under one `task_id`, which is the same at
 * both ends and unique in the run, or TB_NO_TASK. Tensors that are submitted later for the same rank under the same id
 * belong to the same operation, after those before. Both ends have as many tensors in an operation, in the same order,
 * and those that belong together have as many bytes, and items of the same size; dtypes don't matter, nothing is cast
 * (but see convert_local). Elements keep their row-major order. Shapes may differ where splitting dimensions makes them
 * equal: [6,4] and [2,3,4] do, and so does anything without gaps.
 *
 * The views are copied, and their memory is borrowed until the run returns. What is received must not share memory with
 * anything else that is received, nor, where a rank copies to itself, with anything that is sent. */
TB_API tb_status tb_copy_submit_send(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t dest,
                                     uint64_t task_id);
TB_API tb_status tb_copy_submit_recv(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t source,
                                     uint64_t task_id);

/* Does what was submitted since the last run; all ranks of the group call it, also those that have submitted nothing.
 * Completes when what this rank sends has been read and what it receives is there. Ids that are doubled, or that only
 * one end has, and tensors that don't fit fail the run on every rank, before anything is written, with the same
 * sentence. So does the deadline of any rank. Operations are gone then, too, and the next run can succeed, unless a
 * rank was lost. */
TB_API tb_status tb_copy_run(tb_copy *copy, int timeout_ms);

/* Ends a run that another thread is in, with TB_CANCELLED, on every rank that has come to it; the next run can succeed.
 * What a rank has all of succeeds nonetheless. Does nothing where none is under way. */
TB_API void tb_copy_cancel(tb_copy *copy);

/* Runs that need this rank fail from then on. What was submitted and not run is dropped. NULL is allowed. */
TB_API void tb_copy_close(tb_copy *copy);

typedef struct tb_copy_op {
    uint64_t task_id;
    const tb_copy_view *views;
    size_t nviews;
} tb_copy_op;

/* How a run pairs what a rank sends to itself: send i belongs to receive recv_of[i]. Operations may have no views.
 * Several under one id are paired in their order, each with as many tensors at both ends. Pure; else it fails as the
 * run would. `rank` is for sentences. */
TB_API tb_status tb_copy_match_local(int32_t rank, const tb_copy_op *sends, size_t nsends, const tb_copy_op *recvs,
                                     size_t nrecvs, size_t *recv_of);

/* ---- Plans of others ------------------------------------------------------------------------------------------ */

/* A plan that somebody else has made, such as Megatron's planner: which slices of parameters this rank sends to whom,
 * and which it receives from whom. It is executed as a run of a copy service, on any of its transports. */

/* Indices start .. start+length-1 of each dimension. */
typedef struct tb_slice {
    int64_t start[TB_MAX_DIMS], length[TB_MAX_DIMS];
} tb_slice;

/* What a rank sends to a peer, or receives from it. */
typedef struct tb_reshard_op {
    size_t size;
    const char *param;
    int32_t peer;         /* its seat in the service's group; may be this rank's own */
    tb_slice here, there; /* in this rank's parameter, in the peer's: as many elements, and dimensions alike */
    uint64_t task_id;     /* as in tb_copy_submit_send: the same at both ends, or TB_NO_TASK */
} tb_reshard_op;

/* A parameter, or a buffer, of this rank. */
typedef struct tb_reshard_param {
    size_t size;
    const char *name;
    const tb_copy_view *view; /* borrowed during the call, and so is its memory */
    /* In which it travels, cast at either end that has another; both ends say the same. TB_DTYPE_NONE: its own, or, of
     * one with an `encode`, bf16. */
    tb_dtype buffer_dtype;
    /* As in a tb_tensor. One that is received gathers in an accumulator, in its buffer_dtype, until all of its slices,
     * which must be all of it, are in, and is quantised then. One that is sent is turned back into numbers. */
    const char *encode;
    void *scales;
    float *scale;
} tb_reshard_param;

typedef struct tb_reshard_plan {
    size_t size;
    const tb_reshard_op *sends, *recvs;
    size_t nsends, nrecvs;
    /* Of this rank's parameters; NULL: none. Pieces are whole slices, and `whole` need not be set. list_buffers, or
     * prepare_recv, give the bytes that are sent and received; without them those are the elements, in the parameter's
     * buffer_dtype, so that one end's transform needs nothing of the other end. Functions are called by this thread. */
    const tb_transform *transform;
    const tb_reshard_param *sources, *targets; /* what `sends` read, and `recvs` write; names are distinct in each */
    size_t nsources, ntargets;
} tb_reshard_plan;

/* How many receives were written in which way. */
typedef struct tb_reshard_counts {
    size_t size;
    size_t direct;      /* into the parameter itself */
    size_t copied;      /* by a cast after the run */
    size_t transformed; /* by finalize_recv */
    size_t accumulated; /* into an accumulator, and quantised from there */
} tb_reshard_counts;

/* Executes the plan; all ranks of the service's group call it, also those that have nothing to send or to receive. What
 * any rank finds wrong with its own part (a name, a slice, a transform that fails to send) fails it on every rank, with
 * one sentence, before a byte is written, and so does everything that fails tb_copy_run. Then what was received in
 * other ways than directly is written in the order of the plan's `recvs`; a failure there is this rank's alone. Ends at
 * the deadline. Operations that were submitted to the service before are run, too. `counts` may be NULL. */
TB_API tb_status tb_reshard_execute_plan(tb_copy *copy, const tb_reshard_plan *plan, int timeout_ms,
                                         tb_reshard_counts *counts);

/* ---- Agents -------------------------------------------------------------------------------------------------- */

/* A process need not be on the bus itself: an *agent* (`tensorbus agent`), a process of the same user on the same
 * machine, can have the seat, and move tensors for it. A program joins by the agent's socket,
 *
 *     tb_world_join("agent:/run/trainer-0.sock", "trainer", 0, 2, NULL, &world)
 *
 * and everything else is the same. An agent and its programs may be started together: while there is no such socket, or
 * nobody listens, it is waited for until the timeout. TB_IO, with a sentence, if that is still so then; TB_TIMEOUT if
 * the agent is silent; TB_DENIED for a wrong token, the agent's; TB_REFUSED if it speaks another version of the
 * protocol. Transport, workers, host and plan_bytes are the agent's own: what the program says of them does not count.
 * A group that a program enters is entered by the agent, which stays in it.
 *
 * What an agent can't do is refused (TB_REFUSED): worlds that are `manual`, transforms, copy services.
 * An agent and its program are in step by messages: a `committing` function that has not returned by the transfer's
 * deadline is not waited for, and some calls of `progress` may be left out.
 *
 * Tensors in memory of tb_alloc are used where they are, and so are those on a device whose memory the agent can map.
 * Other host memory is copied by the agent, which has to be allowed to read and write this process's memory; other
 * memory of devices is copied in this process: before a transfer is begun, which waits for the stream, if one was
 * given, and, of a receive, when a wait or a query returns that tells of the arrival. Copies are written with what was
 * received through a pair, if that pair's part has succeeded: elements and padding, and no other byte. A pair that has
 * failed leaves them as they are, and not torn, unless groups of tensors had been waited for, or it was this write that
 * failed. A batch with such tensors is not sent and received at the same time (TB_REFUSED). tb_stream_wait waits as
 * tb_wait does.
 *
 * When the agent is gone, calls return TB_LOST; batches still tell what they have, torn if the agent may have begun to
 * write more.
 * Tensors are borrowed until the agent has answered, or its process has ended, whichever is first: an agent that was
 * stopped may go on, and write. So tb_cancel, and the calls that destroy a transfer or a batch, wait for it as long as
 * its process lives; all other calls have deadlines. */

/* ---- Models -------------------------------------------------------------------------------------------------- */

/* A model is many parameters, which two programs keep under different names and in different forms. Each side says how
 * its own become *canonical* tensors: names and views. Then both have tensors of equal names and shapes, which pairs
 * and batches can carry. All of this is pure: nothing is sent, and the same arguments give the same result everywhere.
 *
 * A view is how a tensor in storage becomes a canonical one: operations, done from left to right.
 *
 *     split(D, a, b, ...)        dim D becomes several, the first varies slowest; one size may be -1: what is left
 *     merge(D, E)                dims D to E become one
 *     permute(D, E, ...)         the dims in a new order
 *     slice(D, start, length)    some indices of dim D
 *     pad(D, before, after)      dim D without the padding that the storage has there
 *
 * A negative D counts from the end. Nothing is copied: the result is the same memory with other strides. plan.h has the
 * functions that apply one. */
typedef struct tb_view tb_view;

/* A pattern is a glob, in which * stands for any characters (dots, too) and ? for one; or, if it begins with ^, a POSIX
 * extended regular expression, which takes longer. It has to match the whole name.
 *
 * The first rule that matches a name is applied, and no other; except that rules right after it with the same pattern
 * are applied, too: then the parameter becomes several tensors, linear_qkv q, k and v. Without a match it stays what
 * it is. */
typedef struct tb_rule {
    const char *match;
    const char *name; /* the new name; \1 to \9 is what the wildcards, or the groups, matched, \0 all; NULL: the old */
    const char *view; /* NULL: none */
} tb_rule;

/* What the parameters of one rank are called in the whole model, and what they become. In this order: layers are
 * numbered, experts are numbered, rules are applied. */
typedef struct tb_names_opts {
    size_t size;
    /* Pipeline stages: layers are dealt out to the stages of chunk 0, then to those of chunk 1, and so on. In the
     * pattern, # is the number, * any characters but dots, and a dot at its end the end of the name, too. */
    const char *layer_pattern;   /* "layers.#." */
    int32_t stage, nstages;      /* 0 stages: the numbers stay */
    int32_t chunk, nchunks;      /* virtual stages; default: 1 */
    int64_t nlayers;             /* in all */
    const int64_t *first_layers; /* nchunks * nstages numbers, in that order; NULL: equally many everywhere */
    /* Experts: equally many on every rank, in order; or the rank's expert i is the model's expert_map[i]. */
    const char *expert_pattern;         /* "experts.#." */
    int32_t expert_rank, nexpert_ranks; /* 0 ranks: the numbers stay, unless there is a map */
    int64_t nexperts;                   /* in all */
    const int64_t *expert_map;
    size_t nexpert_map;
    const tb_rule *rules;
    size_t nrules;
} tb_names_opts;

typedef struct tb_names tb_names;

TB_API tb_status tb_names_create(const tb_names_opts *opts, tb_names **out);
TB_API void tb_names_destroy(tb_names *names);

/* A canonical tensor that is in a parameter. */
typedef struct tb_part {
    size_t param; /* index of the parameter */
    const char *name;
    const tb_view *view; /* NULL: none; belongs to the tb_names */
    const char *text;    /* of the view, as a tb_tensor takes it; NULL: none; belongs to the tb_names */
} tb_part;

typedef struct tb_parts {
    size_t count;
    tb_part *part; /* in the order of the parameters, then of the rules */
} tb_parts;

/* Two parts of one name are an error. */
TB_API tb_status tb_names_resolve(const tb_names *names, const char *const *params, size_t nparams, tb_parts *out);
TB_API void tb_parts_fini(tb_parts *parts);

typedef struct tb_match_opts {
    size_t size;
    const tb_tie *ties; /* a target that the source lacks takes the canonical one, or else another that is tied to it */
    size_t nties;
    const char *const *ignored; /* patterns for what may be on one side only */
    size_t nignored;
    bool allow_unmatched; /* report it, and do not fail */
} tb_match_opts;

/* Indices into the names that were given. */
typedef struct tb_match {
    size_t size;
    size_t nmatched;
    size_t *source, *target; /* in the targets' order; a source may serve several */
    size_t nonly_source, nonly_target;
    size_t *only_source, *only_target; /* sorted by name; without what is ignored, or tied to something that matches */
} tb_match;

/* The names of each side are distinct. Where a name is on one side only, TB_INVALID, and the sentence has the first. */
TB_API tb_status tb_match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                                const tb_match_opts *opts, tb_match *out);
TB_API void tb_match_fini(tb_match *match);

#ifdef __cplusplus
}
#endif

#endif
