/* tensorbus: move distributed tensors between programs whose layouts differ.
 *
 * The API of programs, to be read from top to bottom: status and errors, log, dtypes and shapes; then memory, the
 * world (the processes on the bus), pairs (two groups and their layouts), batches (tensors that are moved
 * together) and transfers; the copy service, which copies tensors from rank to rank unchanged; agents, which do
 * all this for other processes; and models (names and views of many parameters).
 *
 * Other headers: tensorbus/plan.h has layouts, plans and the IR as data, for tools and simulators;
 * tensorbus/mpi.h makes a world of the ranks of an MPI communicator; tensorbus/transport.h is for implementers of
 * transports.
 *
 * Rules that hold everywhere:
 *  - Functions that can fail return a tb_status: TB_OK (0) or a negative code. Outputs are written only on success.
 *    After a failure tb_error_detail() returns the error message.
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
 *  - After fork() the child can't use worlds, or objects made from them: calls fail at once, with TB_REFUSED, or -1 for
 *    a descriptor. Destroying them there frees memory, and has no effect on the parent or its peers. The child has none
 *    of their connections. It can join a bus itself, but not with transport ucx if the parent had opened that. Ranks,
 *    incarnations, groups and sizes can still be read, and layouts, plans, the IR, views and names still work.
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
    TB_TOO_BIG = -3,     /* a size or a count exceeds a limit of tensorbus */
    TB_REFUSED = -4,     /* well-formed, but against a rule: avg of integers, an implicit cast to 8 bits */
    TB_IO = -5,          /* the system failed to read or write */
    TB_INTERNAL = -6,    /* a check of tensorbus's own results failed: a bug */
    TB_TIMEOUT = -7,     /* the deadline has passed */
    TB_LOST = -8,        /* a peer or a connection is gone */
    TB_DENIED = -9,      /* not allowed: a wrong token, another user's process */
    TB_CONFLICT = -10,   /* another process was first, or gave different values */
    TB_CANCELLED = -11,  /* the caller cancelled it */
    TB_IN_DOUBT = -12,   /* it is unknown whether the version is committed */
    TB_SUPERSEDED = -13, /* the version was overtaken: its receivers are offered a higher one by other senders */
} tb_status;

/* A short name for the code, never NULL. */
TB_API const char *tb_status_string(tb_status status);

/* The error message of the thread's last failed call; "" if none failed. Valid until the thread's next failure. */
TB_API const char *tb_error_detail(void);

/* For functions of the program that the library calls: sets that error message, and returns the status. */
TB_API tb_status tb_error_set(tb_status status, const char *sentence);

/* ---- Log ----------------------------------------------------------------------------------------------------- */

typedef enum tb_log_level { TB_LOG_OFF, TB_LOG_ERROR, TB_LOG_WARN, TB_LOG_INFO, TB_LOG_DEBUG } tb_log_level;

/* Called with one line, without a newline. May be called from any thread. */
typedef void (*tb_log_fn)(void *arg, tb_log_level level, const char *line);

/* Log lines up to `level` go to `fn`; there is no sink until this is called. NULL removes it. Of errors and warnings of
 * one kind, the first 10 within a minute are written; the others are counted, and a later line, at the latest when the
 * sink is changed, has their number. */
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

/* Accepts our names, and those of PyTorch ("bfloat16") and safetensors ("BF16"). */
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
 * GPUs, of which "cuda:1" is one, by its ordinal in this program. Memory that no other device claims counts as "host".
 * The library finds out where a tensor lies. A program may also name the device, in tb_tensor.memory and
 * tb_copy_view.memory: then memory on any other device is refused. */

/* Memory that other processes of this machine can read in place, the fastest for tensors. Any other memory works too,
 * with one more copy where the system does not let peers read it. Aligned to 64 bytes; an allocation of zero bytes is a
 * valid pointer, too. Pages come from a pool of the process, which keeps freed pages for the next allocation: new pages
 * are zero, reused ones are not cleared. An allocation of 2 MiB or more takes its pages at once, where they are huge
 * ones, else as they are touched. Both functions may be called from any thread. The memory does not outlive the
 * process, and a forked child does not inherit it: touching it there is a fault, freeing it does nothing. */
TB_API tb_status tb_alloc(size_t nbytes, void **out);

/* The same on a device; no world is needed:
 *
 *     "host"            tb_alloc
 *     "pinned"          tb_alloc in separate pages, pinned by the driver of a GPU, so that GPUs read and write
 *                       them at full speed. Pinning takes about 0.1 s for each GiB
 *     "cuda", "cuda:1"  memory of a GPU, by its ordinal in this program, or of the one that the calling thread uses;
 *                       GPUs of other processes of this machine can read it in place
 *
 * TB_INVALID, with a list of this build's devices, for any other; TB_REFUSED, with the reason, if this machine has no
 * such device. The memory's initial contents are undefined. */
TB_API tb_status tb_alloc_on(const char *device, size_t nbytes, void **out);

/* Frees memory of either. NULL is allowed. A pointer that is no live allocation is logged as an error, and ignored. A
 * batch must first stop using the memory: tb_batch_destroy, or tb_world_invalidate that has returned TB_OK. */
TB_API void tb_free(void *ptr);

/* The same two with the signatures of PyTorch's CUDAPluggableAllocator: memory of GPU `device`, NULL if there is none.
 * The stream is not used: PyTorch's pools keep memory until the streams that have used it are done. */
TB_API void *tb_torch_alloc(ptrdiff_t nbytes, int device, void *stream);
TB_API void tb_torch_free(void *ptr, ptrdiff_t nbytes, int device, void *stream);

/* ---- World --------------------------------------------------------------------------------------------------- */

/* A process's seat on the bus. It has one *bus rank*, and is in one or more *groups*: named arrays of processes.
 *
 * The calls below may come from several threads at once, except that the call which destroys an object must be the last
 * one on it. Waits end at their deadline, with TB_TIMEOUT and an error message that names the missing ranks. */
typedef struct tb_world tb_world;

typedef struct tb_world_opts {
    size_t size;
    const char *token; /* the same in all processes that use one store; NULL: "" */
    int timeout_ms;    /* 30000: to join, and for the calls below that get no timeout of their own */
    /* "auto" (the default): for each process the fastest transport that reaches it, shm on the same host and ucx
     * elsewhere; or the only one to use: "self", "shm", "ucx". */
    const char *transport;
    int workers;        /* threads that copy, in the whole process; default: cores / ranks on this host, at least 1 */
    bool manual;        /* no thread of ours: the program calls tb_world_progress when tb_world_fd is readable */
    const char *host;   /* processes with equal ids are on one host; default: the machine and its network namespace */
    int64_t plan_bytes; /* the most memory for cached plans, for batches that are made again; default: 64 MiB. The least
                         * recently used plans are dropped first */
    const char *name;   /* the name of this process in an agent's `tensorbus status`; default: the program's name */
} tb_world_opts;

/* Takes seat `index` of the `size` in the group. Processes find each other through the store at `url`:
 * "unix:/tmp/bus.sock" or "tcp://127.0.0.1:7000", or "etcd://a:2379,b:2379"; "?namespace=NAME" separates buses. A URL
 * without a host, "tcp://:7000", means 127.0.0.1: only processes of this machine reach it. If no process serves a store
 * there, this one does, for as long as it has the world. While the store is down, transfers go on, but none can join;
 * when it is back, or another process serves it, all take their seats there again. TB_CONFLICT while another process
 * has the seat; TB_REFUSED, naming both versions, while a rank with another minor version of tensorbus is on the bus.
 *
 * "agent:/run/trainer-0.sock" is an agent instead (see Agents), whose seat this must be: TB_CONFLICT, with both seats,
 * if it is not. With a group of NULL, or a size of 0, it is whichever seat the agent has.
 *
 * What is missing of a store's URL, a group (NULL) and a seat (a size of 0) is taken from the environment:
 *
 *     TENSORBUS_STORE                    the URL, if it is NULL; or TENSORBUS_AGENT, an agent's socket, comes before it
 *     TENSORBUS_TOKEN_FILE               with a URL of NULL, the file whose first line is the token
 *     TENSORBUS_GROUP                    the group
 *     TENSORBUS_INDEX, TENSORBUS_SIZE    the seat; or else, the first that is set:
 *     RANK, WORLD_SIZE                   of torchrun
 *     OMPI_COMM_WORLD_RANK, ..._SIZE     of Open MPI
 *     PMI_RANK, PMI_SIZE                 of MPICH
 *     SLURM_PROCID, SLURM_STEP_NUM_TASKS of srun
 *     LWS_WORKER_INDEX, LWS_GROUP_SIZE   of a LeaderWorkerSet of Kubernetes
 *     JOB_COMPLETION_INDEX               of an indexed Job of Kubernetes, which needs TENSORBUS_SIZE
 *
 * `tensorbus run` sets them. TB_INVALID, with the variable, if it is malformed, or if none is set. */
TB_API tb_status tb_world_join(const char *url, const char *group, int32_t index, int32_t size,
                               const tb_world_opts *opts, tb_world **out);

/* Takes a seat in another group too. */
TB_API tb_status tb_world_enter(tb_world *world, const char *group, int32_t index, int32_t size);

/* Leaves all groups. Pairs, batches and copy services keep a reference to their world, and transfers to their batch:
 * they may be destroyed in any order. */
TB_API void tb_world_destroy(tb_world *world);

/* The seat that this process joined with, or that its agent has. The group's name belongs to the world. */
TB_API void tb_world_seat(const tb_world *world, const char **group, int32_t *index, int32_t *size);

TB_API int32_t tb_world_rank(const tb_world *world);
TB_API uint64_t tb_world_incarnation(const tb_world *world); /* how often this bus rank has been taken, from 1 */

/* Waits until every seat of the group is taken. A timeout of 0 means the world's, here and below. */
TB_API tb_status tb_world_wait(tb_world *world, const char *group, int timeout_ms);

/* The groups on the bus, by name, one line each: the number of taken seats, the number of all seats, and the name, as
 * in "1 2 trainer". To be freed by the caller with free(). */
TB_API tb_status tb_world_groups(tb_world *world, int timeout_ms, char **out);

/* For a `manual` world; other calls that wait make progress, too. */
TB_API int tb_world_fd(const tb_world *world);
TB_API tb_status tb_world_progress(tb_world *world);

/* The memory is about to be freed or moved. Transfers of this world that use it fail, on all their ranks, with
 * TB_INVALID and an error message that names the tensor, the batch and this rank; so do runs of copy services, on the
 * ranks that have entered them. Released tensors and snapshots are not affected. After TB_OK this process neither
 * reads nor writes the memory, and no peer writes it; a peer that has read it meanwhile, or is still reading, discards
 * the data and fails. No peer maps device memory in it any more. Batches with tensors in it have to be made again,
 * also those that have not been transferred yet.
 *
 * Waits for copies that are under way, and for peers to unmap device memory, for the world's timeout_ms at most.
 * TB_TIMEOUT ("still in use by ..."): the memory must not be freed yet; the call may be repeated. A manual world makes
 * progress meanwhile. TB_REFUSED in a function that the library calls. A shadowed receive whose commit was decided,
 * but that has not changed the tensors yet, fails on this rank alone: the other ranks of its group have the
 * version. */
TB_API tb_status tb_world_invalidate(tb_world *world, const void *base, size_t nbytes);

/* How often a batch found its plan in the cache, and how often one had to be made. A batch plans when it is first sent
 * or first received. Plans outlive it, for batches made again from the same tensors and layouts. */
TB_API void tb_world_plan_counters(const tb_world *world, uint64_t *hits, uint64_t *misses);

/* The memory of cached plans: at most tb_world_opts.plan_bytes. */
TB_API uint64_t tb_world_plan_bytes(const tb_world *world);

/* ---- Pairs --------------------------------------------------------------------------------------------------- */

/* Two groups that exchange tensors, and the layout of each: which rank holds which part of a tensor. Each side gives
 * its own layout, as text, in which ranks are seats of the group.
 *
 *     mesh=2,2 place=R,S1 ranks=4..7
 *
 * is a mesh of ranks, row-major (without `ranks`: 0, 1, 2, ...), and a placement for each of its dimensions: Shard(0),
 * StridedShard(0,2), BlockShard(0,4,12,8), Explicit(0, 0-3,5-6; 3-5), Replicate, Partial(sum); short S0, R, P.
 * docs/design/layout.md has the rules.
 *
 * With a layout of NULL, on both sides, seat i sends to seat i; the groups have equally many ranks. Each rank then has
 * separate tensors: shapes are those of the rank's own tensors, and other ranks may have other tensors, or other shapes
 * under the same names. Messages and dumps call tensor w of seat 2 w@2. Ties and patterns use names without the
 * seat. */
typedef struct tb_pair tb_pair;

typedef struct tb_pair_opts {
    size_t size;
    const char *group; /* this side's, if the process is in several; default: the first one that it joined */
    int timeout_ms;    /* exceeded by up to a second if the store does not answer */
    bool no_wait;      /* returns at once; registering a batch waits for the others */
} tb_pair_opts;

/* Completes when all ranks of both groups have made the pair `name`, and are connected. After connections were lost,
 * for example because a network was down for a while, destroy the pair and make it again: that connects the ranks that
 * are alive, over all transports but MPI. If ranks of a side disagree, every rank fails at once, with their names
 * (TB_CONFLICT); so it does if ranks have no transport in common, or other versions of tensorbus (TB_REFUSED). A
 * process that is in both groups makes the pair once for each of them, the first time with no_wait. */
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
 * and its row-major index in the whole tensor (docs/verify.md has the formula). So each rank can hash its own part, and
 * the sums can be added in any order: the hash does not depend on how the tensor is cut. It does not depend on dtype
 * and shape either, only on the elements' bits and indices: compare those separately.
 *
 * This function hashes the binding's box, which begins at the indices `start` of a tensor of this shape. The hash of an
 * empty box is 0. The CPU reads the memory: the caller copies memory of a GPU to the host first. Pure, may be called
 * from several threads at once. */
TB_API tb_status tb_hash_box(const tb_binding *box, const tb_shape *shape, const int64_t *start, uint64_t *out);

/* ---- Transforms ---------------------------------------------------------------------------------------------- */

/* Conversions by functions of the program. A tensor's `encode` selects one of those that come with tensorbus. */
typedef struct tb_transform_piece {
    size_t size;
    const char *name; /* of the tensor; if names are tied, the receiving side's */
    tb_dtype dtype;   /* the sending side's */
    int ndim;
    int64_t shape[TB_MAX_DIMS]; /* of the piece */
    /* The first indices of the piece in the two local tensors; a piece that is sent to several ranks has those of the
     * first one. Unknown to prepare_recv. */
    int64_t src_start[TB_MAX_DIMS], dst_start[TB_MAX_DIMS];
    /* Offsets and sizes of its buffers on the wire, in bytes. Unknown to prepare_recv and list_buffers. */
    size_t nbuffers;
    int64_t buffer_offset[TB_MAX_BUFFERS], buffer_nbytes[TB_MAX_BUFFERS];
} tb_transform_piece;

/* A tensor is sent in pieces, boxes that one rank sends to others. Each is turned into bytes by the
 * sender, and back by the receiver. If only one side gives a transform for a tensor, the wire has
 * the elements, in the sending side's dtype: that side's transform may only change values, or copy
 * them. If both sides do, a piece has as many bytes as the transforms say, which must be the same
 * at both. should_transform is called by tb_batch_add, the others by the thread that makes
 * progress, one at a time; they must not call the world. Functions may be NULL: then elements are
 * copied, in the sending side's dtype. A function that fails sets its error message by
 * tb_error_set. */
typedef struct tb_transform {
    size_t size;
    void *arg;
    bool (*should_transform)(void *arg, const char *name); /* NULL: all */
    /* The size of a piece on the wire, at least 1 byte, by its shape; NULL: that of its elements. Called at both ends
     * while the batch is planned, perhaps more than once. */
    int64_t (*prepare_recv)(void *arg, const tb_transform_piece *piece);
    /* `part` is the piece in this rank's tensor. */
    tb_status (*prepare_send)(void *arg, const tb_transform_piece *piece, const tb_binding *part, void *wire);
    tb_status (*finalize_recv)(void *arg, const tb_transform_piece *piece, const tb_binding *part, const void *wire);
    /* Pieces are not cut to fit staging memory: a piece is a whole box that one rank has for another. finalize_recv is
     * called when all of the tensor's group has arrived (except for tensors with an `encode`), in the order of names,
     * then of positions in the target; until then staging memory keeps the pieces, and a batch that does not fit is
     * refused. If either side sets it, it holds for both. */
    bool whole;
    /* In place of prepare_recv: a piece is several buffers, such as data and scales. Writes their sizes, each at least
     * 1, and returns their number, 1 to TB_MAX_BUFFERS. On the wire each begins at a multiple of 64 bytes. */
    int (*list_buffers)(void *arg, const tb_transform_piece *piece, int64_t *nbytes);
} tb_transform;

/* ---- Batches ------------------------------------------------------------------------------------------------- */

/* Tensors that travel together, through one or more pairs. All ranks of a pair make the batch, with the same name, and
 * each adds the tensors that it has a part of; it may add others of its side, too. A side has the union of its ranks'
 * tensors. Names and shapes must be equal on both sides, all else may differ; ranks of one side must describe a tensor
 * alike. */
typedef struct tb_batch tb_batch;

/* Tied weights: one tensor with two names. */
typedef struct tb_tie {
    const char *name, *canonical;
} tb_tie;

/* How arriving data gets into the tensors. The receiving side's value is used; its ranks must agree. */
typedef enum tb_commit {
    TB_IN_PLACE, /* it is written to the tensors; a receive that fails half-way leaves them torn */
    TB_SHADOW,   /* it is written to separate memory of the same size, and copied into the tensors when all ranks of the
                  * group have all their data: either all of them get the new version, or none does. The store decides.
                  * Data that a transform writes elsewhere is not covered */
} tb_commit;

typedef struct tb_batch_opts {
    size_t size;
    int64_t bucket_size;    /* 16 MiB; the size of the unit of transfer. The sending side's value is used */
    int64_t staging_bytes;  /* 256 MiB; the most memory this rank may use for tensors that are not read in place.
                               Snapshots, shadows, and buffers of conversions on this rank come on top */
    uint32_t max_in_flight; /* 2; buckets under way per channel */
    uint32_t group_window;  /* groups of tensors that may be under way at a time; default: all */
    bool staged;            /* use staging memory for everything, as between machines */
    bool snapshot;          /* tb_send copies the tensors first, so that they are released at once; takes as much memory
                               again as the tensors have. The transfer goes on until it is committed, and must not be
                               destroyed before */
    /* How names are matched, as in tb_match_opts. Values given by any rank of either side hold for all. */
    const tb_tie *ties; /* a target that the sending side lacks takes the tensor of a name that is tied to its own. A
                         * tensor that the receiving side lacks because of a tie is not sent: transfers fail with
                         * TB_CONFLICT, by name, unless a rank of the sending side has declared that tie, too */
    size_t nties;
    const char *const *ignored; /* patterns for names that may be on one side only; those tensors stay as they are */
    size_t nignored;
    const tb_transform *transform; /* see Transforms; its arg is borrowed until the batch is destroyed */
    tb_commit commit;
    bool checksum; /* every bucket is sent with a checksum, which the receiver compares before it unpacks the bucket;
                    * nothing is read in place then. Copies within a rank, and conversions at either end, are not
                    * covered. If any rank of either side sets it, it holds for all */
    bool sends; /* this side is going to send: when the batch is registered, both sides plan, map memory, and allocate
                 * what `snapshot` and TB_SHADOW take; afterwards page tables are filled in the background. No memory
                 * is allocated for tensors. Else the first transfer does it all, and takes longer than later ones.
                 * Set it on all ranks of the side */
} tb_batch_opts;

typedef struct tb_tensor {
    size_t size;
    void *data; /* this rank's part; borrowed until the batch is destroyed. May be NULL where that is empty */
    tb_dtype dtype;
    int ndim;
    int64_t shape[TB_MAX_DIMS]; /* global */
    const int64_t *strides;     /* of the local part, in elements; NULL: row-major without gaps */
    const char *layout;         /* of this side, for this tensor; NULL: the pair's */
    /* Requests a cast to it on the way; the sending side's value is used. There are casts among floats, and among
     * integers. A cast that may lose values is refused unless it is requested here: to floats of 8 bits, to integers
     * that lack values of the source. */
    tb_dtype wire_dtype;
    uint32_t group;   /* groups arrive in ascending order; the receiving side's value is used */
    const char *view; /* converts the stored tensor to the one that `name` names (see Models); shape, strides and layout
                       * are those of the storage. NULL: as it is. A receive sets padding to zero */
    /* This side's tensor is quantised: "mxfp8", "fp8_block", "fp8_tensor" or "nvfp4" (docs/models.md has the formats).
     * A receive quantises it, and a send dequantises it. Options are in parentheses: mxfp8(floor) for the exponent rule
     * of OCP, mxfp8(swizzled) and nvfp4(swizzled) for scales in tiles of 128 x 4, fp8_block(power_of_two) and
     * fp8_tensor(power_of_two), mxfp8(sender) to have the sender quantise, which halves the bytes sent. Rows of the
     * last dim stay whole; strides are not allowed. */
    const char *encode;
    void *scales;            /* contiguous, as many as the format has for this rank's part; borrowed */
    float *scale;            /* fp8_tensor and nvfp4: the scale of the whole tensor; borrowed */
    const char *scale_group; /* tensors with the same scale_group have one scale in common, over all ranks of this side,
                              * or, if the name begins with "local:", on each rank separately; NULL: this rank's part
                              * has its own. Tensors that point to one `scale` must be in one group */
    const char *memory; /* the device that data, scales and scale are on (see Memory), else TB_REFUSED; NULL: any */
} tb_tensor;

/* The sizes of `data`, `scales` and `scale` of a tb_tensor with this `encode`, if the rank's part has this shape.
 * Outputs may be NULL. */
TB_API tb_status tb_encode_nbytes(const char *encode, const tb_shape *part, size_t *data, size_t *scales,
                                  size_t *scale);

/* Copies everything in the options but the transform. */
TB_API tb_status tb_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out);

/* Copies everything but the tensor's data and scales.
 *
 * A new pair may also be added to a registered batch, while no transfer of it exists: for an engine that joins, or for
 * one that comes back and makes its pair again, once the old pair was removed. Only the ranks of that pair register the
 * batch then; nothing changes for the others. */
TB_API tb_status tb_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor);

/* The same for many tensors. Ends at the first that fails, and names it; the *nadded tensors before it are in the
 * batch. `nadded`, which may be NULL, is always written. */
TB_API tb_status tb_batch_add_all(tb_batch *batch, tb_pair *pair, const char *const *names, const tb_tensor *tensors,
                                  size_t count, size_t *nadded);

/* Makes this process take part in the pair's transfers even if it adds none of the pair's tensors: a rank that is idle
 * in this model. */
TB_API tb_status tb_batch_add_pair(tb_batch *batch, tb_pair *pair);

/* Completes when both sides of every pair have added their tensors, and names and shapes agree. Fails at once on every
 * rank, by name, if ranks describe a tensor differently, if a rank holds a part of a tensor and has not added it, or if
 * only one side has a tensor. The first transfer registers a batch that is not registered yet; from then on no tensors
 * can be added to its pairs. Fails, too, if a tensor can't be converted in either direction; other obstacles in one
 * direction (a cast that is refused, targets that overlap) fail the first transfer in that direction. */
TB_API tb_status tb_batch_register(tb_batch *batch, int timeout_ms);

/* Lists every piece that this process sends or receives in the batch, one per line: its box and tensor, its device if
 * that is not the host, its source and targets, and the relays. For a received piece, how it is written: *direct* (it
 * is read into its place), *copy* (it came in a bucket), *transform* (it is converted), or *in place* (it is there
 * already); and how it is reached: *mapped*, or *staged*, with the reason. With an
 * agent, further lines list tensors on devices that this process copies from or to host memory, and why. Ranks are
 * those of the bus. To be freed by the caller with free(). TB_REFUSED before the first transfer in that direction,
 * which decides all this. */
TB_API tb_status tb_batch_dump(tb_batch *batch, bool is_send, char **out);

/* Removes the pair and its tensors from the batch, while no transfer of it exists. The pair's other ranks can't
 * transfer it without this process any more; nothing changes for other pairs. */
TB_API tb_status tb_batch_remove_pair(tb_batch *batch, tb_pair *pair);

/* A tensor that has moved. */
typedef struct tb_rebinding {
    tb_pair *pair; /* that the tensor was added to, by this name */
    const char *name;
    void *data; /* where this rank's part is now */
} tb_rebinding;

/* Sets new addresses of tensors; their strides stay. Nothing is copied, and only this process calls it: readers on
 * other ranks get the new addresses before its next transfer, and do not read the old ones any more. The old
 * memory may be freed afterwards, or before if tb_world_invalidate was called for it; such tensors are valid
 * again.
 *
 * The new memory has to be of the same kind, since the way peers reach it stays: on the same device, and of
 * tb_alloc only if the old one was. TB_REFUSED if it is not; if targets would begin or cease to overlap sources;
 * for a quantised tensor; while a transfer of the batch exists; and with an agent. Then nothing has changed.
 * Waits, for the world's timeout_ms at most, for messages of a transfer that has failed. */
TB_API tb_status tb_batch_rebind(tb_batch *batch, const tb_rebinding *tensors, size_t count);

/* How often this process has registered pairs of the batch, or removed them. */
TB_API uint64_t tb_batch_epoch(tb_batch *batch);

/* The version that this process has in the tensors that it receives through the pair: the number of the last completed
 * transfer, which is the same on all ranks, also those of other pairs; 0: none. It counts the sends of the batch by the
 * pair's first sender, including failed ones. `is_torn`: a later transfer has failed after it had begun to write, and
 * the tensors have parts of it, until another one is completed. */
TB_API tb_status tb_batch_version(tb_batch *batch, const tb_pair *pair, uint64_t *version, bool *is_torn);

/* The state of the tensors that this process receives through all pairs of the batch together. */
typedef struct tb_batch_state {
    size_t size;
    uint64_t version;     /* the last one that all pairs had at the same time; 0: none */
    bool is_mixed;        /* the pairs' versions differ: a receive in place failed for some of them, or a pair is new */
    bool is_torn;         /* some pair's tensors are torn */
    bool transfer_signal; /* sending: some receivers have not read it yet; receiving: a version is offered, or is being
                           * received */
    bool is_in_doubt; /* a receive has ended with TB_IN_DOUBT: the tensors have the version before, which other ranks of
                       * the group may have left. Use neither before this is false again */
} tb_batch_state;

TB_API tb_status tb_batch_query(tb_batch *batch, tb_batch_state *out);

/* The transfer_signal, equal on every rank of this process's group `group` (NULL: the only one of the batch's pairs, or
 * the one that it joined first) that asks the same question, so that all ranks of an engine branch alike. Programs
 * number their questions from 1, alike on all ranks; a number may be asked again, and numbers may be skipped. The first
 * rank of the group answers a question with its own signal at the time when the first rank asks it, whether or not its
 * own program asks; in a manual world, its program has to be in a call of the library. It remembers its answers as long
 * as it has the batch, for the last thousands of changes of the signal; older questions are refused. `timeout_ms` is as
 * in tb_batch_register. For registered batches. */
TB_API tb_status tb_batch_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms, bool *out);

/* The tensors belong to the caller again, once the batch's transfers are destroyed, too. */
TB_API void tb_batch_destroy(tb_batch *batch);

/* ---- Calls by a descriptor ------------------------------------------------------------------------------------ */

/* tb_world_join, tb_pair_create and tb_batch_register wait for others. These functions make the same call in a thread
 * of the library, so that the program can wait for a descriptor, do other work meanwhile, and cancel the call.
 * Arguments are copied. The world of a pair, and the batch, must not be destroyed before the call is. */
typedef struct tb_call tb_call;

TB_API tb_status tb_call_join(const char *url, const char *group, int32_t index, int32_t size,
                              const tb_world_opts *opts, tb_call **out);
TB_API tb_status tb_call_pair(tb_world *world, const char *name, const char *remote_group, const char *layout,
                              const tb_pair_opts *opts, tb_call **out);
TB_API tb_status tb_call_register(tb_batch *batch, int timeout_ms, tb_call **out);

/* Readable once the call has ended. Valid until the call is destroyed. */
TB_API int tb_call_fd(const tb_call *call);

/* The status of a call that has ended, and its error message; TB_TIMEOUT if it has not ended. *out gets the tb_world,
 * the tb_pair or the tb_transfer, which then belongs to the caller, and NULL the next time; it may be NULL for a
 * registration. */
TB_API tb_status tb_call_result(tb_call *call, void **out);

/* Cancels a call that is under way, and destroys its result if the program has not taken it. All but a join have ended
 * when this returns, and can be tried again. A join may go on in the background until its deadline, and
 * leaves again if it succeeds. NULL is allowed. */
TB_API void tb_call_destroy(tb_call *call);

/* ---- Transfers ----------------------------------------------------------------------------------------------- */

typedef struct tb_transfer tb_transfer;

typedef enum tb_event {
    TB_RELEASED = 1,  /* sending: the tensors may change again */
    TB_ARRIVED = 2,   /* receiving: all data of this rank is in the tensors, or, with TB_SHADOW, in the shadow */
    TB_COMMITTED = 4, /* receiving: the version is in this rank's tensors. With TB_SHADOW the group has decided to
                       * commit, and the other ranks have it or are about to; in place, others may still be receiving
                       * it, or may not have begun (see whole_group). Sending: all receivers of this rank's data have
                       * it. This process may end now: the others do not need it for this version any more */
    TB_DECIDED = 8,   /* receiving with TB_SHADOW and hold: the group has decided; tb_proceed lets the tensors change */
} tb_event;

typedef enum tb_phase {
    TB_PHASE_PLAN,   /* computing the plan, the first time */
    TB_PHASE_WAIT,   /* for other ranks */
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
    unsigned events;  /* the tb_events that have happened */
    uint64_t attempt; /* the number its senders gave it; 0: they have not begun */
    int64_t bytes_done, bytes_total;
    uint32_t groups_done, groups_total;
    double seconds; /* since it began, until it ended */
    double phase[TB_PHASE_COUNT];
    uint64_t version; /* of a committed transfer: its number, the lowest of its pairs'; 0: it is not committed */
} tb_transfer_state;

typedef struct tb_transfer_opts {
    size_t size;
    int timeout_ms; /* for the whole transfer, after which it fails; default: the world's */
    /* Called as data arrives or leaves, by the thread that makes progress; it must not call the library. */
    void (*progress)(void *arg, const tb_transfer_state *state);
    void *arg;
    const char *group; /* the group this process acts for, if it is in both groups of a pair; default: to send, the one
                        * it entered first, and to receive, the other */
    /* Receiving with TB_SHADOW: called right before the tensors are overwritten with the new version, and right after
     * those of all pairs are. By the thread that makes progress, or the one that begins a transfer; it must not call
     * the library. */
    void (*committing)(void *arg, bool is_done);
    bool skip_lost; /* leaves out engines (groups that receive) if any of their pairs has lost a rank, with all of their
                     * pairs. Default: fails by name, also for the other pairs if the loss was known before */
    /* Receiving with TB_SHADOW: once the group has decided to commit, this rank does not touch its tensors before
     * tb_proceed is called. The decision can't be undone, so the commit goes on without tb_proceed when the transfer's
     * deadline has passed, or when it is cancelled. Senders wait for it; their deadlines go on, too. */
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
     * side set it, or none. If one fails, is lost, or does not join before the deadline, the transfer fails on all
     * ranks, with that rank's name; ranks that have received the version keep it. */
    bool whole_group;
} tb_transfer_opts;

/* Begins to send the batch's tensors to the other sides of its pairs, or to receive from there. A batch can do
 * one of each at a time. All ranks of a side call it.
 *
 * A group that receives is an engine. It receives one version through all pairs of the batch that lead to it:
 * the highest number that is offered through any of them; senders of lower ones fail with TB_SUPERSEDED, and
 * send again. With TB_SHADOW the engine gets all of it or nothing; in place, if a pair fails, the others go on,
 * and the batch is mixed or torn. Engines are independent: if the send to one of several fails, the others go
 * on, and the transfer fails with the first failure when all have ended. TB_RELEASED does not wait for those
 * that failed. But if a pair is known to have lost a rank, or is in doubt, when the call is made, the call
 * fails, by name, and no pair begins, unless skip_lost is set. A transfer that others began before the loss can
 * still be joined.
 *
 * The senders' calls match by number: a rank's fifth with the others' fifth. A sender that calls after the
 * others, or the receivers, have given up its transfer fails at once with their reason, so that its data does
 * not get into the next one. A receiver that calls then waits for the next one. So a call that was cancelled, or
 * whose deadline has passed, returns when all ranks know of it; it waits a second for ranks that do not answer. A
 * receive that ends in these ways before its senders have begun is as if it had not been called.
 *
 * With TB_SHADOW a rank that has all its data can't abort alone: a deadline, tb_cancel or a loss then makes it
 * ask the store, and the group may have committed. A rank that gets no answer before its deadline, or in a few
 * seconds if that is later, fails with TB_IN_DOUBT: its tensors have the version before, but other ranks of its
 * group may have the new one. Its senders fail with the same status, and its name; for them this is a failure
 * like any other. The receiver can neither send nor receive the batch until the next of these calls has learnt
 * the outcome; if the version was committed, that call copies it into the tensors, without holding it back. */
TB_API tb_status tb_send(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out);
TB_API tb_status tb_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out);

/* Calls by a descriptor that register the batch if it is not, and have ended when the transfer has begun. */
TB_API tb_status tb_call_send(tb_batch *batch, const tb_transfer_opts *opts, tb_call **out);
TB_API tb_status tb_call_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_call **out);

/* Waits for one event, or for the failure of the transfer, whose status it returns. After `timeout_ms` (0: does not
 * wait; negative: the transfer's own deadline) returns TB_TIMEOUT, and the transfer goes on. */
TB_API tb_status tb_wait(tb_transfer *transfer, tb_event event, int timeout_ms);

/* Makes a stream (see tb_transfer_opts; not NULL) wait for an event: work that is submitted to it after this call runs
 * after the event. For TB_ARRIVED the call itself waits until the device has been given all copies, for other events it
 * does not wait. If the event has happened already, the stream does not wait. For host memory the event has happened
 * when this returns: the call waits as tb_wait does, until the transfer's own deadline. So it does if the batch has
 * tensors, or scales of tensors, on the host besides others; for TB_ARRIVED, only if some of those are received.
 *
 * Returns the status of a transfer that has failed. If it fails later, is cancelled, or passes its deadline, the stream
 * continues once the transfer does not use the tensors any more: check tb_wait, too, before relying on the stream's
 * results. Do not destroy the transfer before that, which would cancel it. */
TB_API tb_status tb_stream_wait(tb_transfer *transfer, tb_event event, const void *stream);

/* Lets a transfer with `hold` change the tensors, now or once the commit is decided. TB_INVALID for any other. */
TB_API tb_status tb_proceed(tb_transfer *transfer);

/* Waits until the tensors of this group have arrived. With a group_window, a group counts as under way until this call,
 * or a wait for TB_ARRIVED, has returned its arrival. */
TB_API tb_status tb_wait_group(tb_transfer *transfer, uint32_t group, int timeout_ms);

/* If the transfer has failed, its error message is in tb_error_detail afterwards. */
TB_API tb_status tb_transfer_query(const tb_transfer *transfer, tb_transfer_state *out);

/* The state of one pair's part; seconds and phases are those of all pairs. A pair that was skipped has the status of
 * its loss. The error message of a failure is in tb_error_detail afterwards. */
TB_API tb_status tb_transfer_pair(const tb_transfer *transfer, const tb_pair *pair, tb_transfer_state *out);

/* Readable when an event or a failure has happened that no wait or query has returned yet. Valid until the transfer is
 * destroyed. -1, with tb_error_detail, if the process can't have another descriptor. */
TB_API int tb_transfer_fd(const tb_transfer *transfer);

/* Ends the transfer with TB_CANCELLED, here and at its peers. When this returns, its tensors are not read or written
 * any more, and the peers know that it has ended. A receive whose senders have not begun ends here only: what they send
 * then is for the next one. Does nothing to a transfer that has ended. */
TB_API void tb_cancel(tb_transfer *transfer);

/* Cancels the transfer if it is under way. */
TB_API void tb_transfer_destroy(tb_transfer *transfer);

/* Moves the batch once, from the group `from` to the groups that it exchanges with, and waits until that is done. This
 * process sends, receives, or does both, depending on its groups; without tensors it waits for no transfer. The states,
 * of which either may be NULL, are those of the two transfers; all zero for a transfer that it has no part in. */
TB_API tb_status tb_reshard_execute(tb_batch *batch, const char *from, const tb_transfer_opts *opts,
                                    tb_transfer_state *sent, tb_transfer_state *received);

/* ---- Copy service -------------------------------------------------------------------------------------------- */

/* Copies tensors from rank to rank, within a group. Each rank submits its sends and receives; then all run them as one
 * batch. Ranks are seats of the group. */
typedef struct tb_copy tb_copy;

typedef struct tb_copy_opts {
    size_t size;
    int timeout_ms;         /* to open */
    int64_t bucket_size;    /* 16 MiB; the smallest value of all ranks is used */
    int64_t staging_bytes;  /* 256 MiB; the most memory this rank may use for tensors that are not read in place */
    uint32_t max_in_flight; /* 2; buckets under way from one rank to another */
    bool staged;            /* use staging memory for everything, as between machines */
    /* Copies from a rank to itself are cast to the target's dtype and broadcast to its shape, as by PyTorch's copy_.
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

/* Completes when all of the group have opened the service `name`. `group` NULL: the first one this process joined. */
TB_API tb_status tb_copy_open(tb_world *world, const char *name, const char *group, const tb_copy_opts *opts,
                              tb_copy **out);

/* As a task_id: the operation has none. The n-th such send from one rank to another matches the n-th such receive
 * there. */
#define TB_NO_TASK UINT64_MAX

/* Adds an operation to the next run: one or more tensors (data and its scale) under one `task_id`, which is the same at
 * both ends and unique in the run, or TB_NO_TASK. Tensors that are submitted later for the same rank under the same id
 * are appended to the operation. Both ends have equally many tensors in an operation, in the same order; matching
 * tensors have equal sizes in bytes and in bytes per item; dtypes don't matter, nothing is cast (but see
 * convert_local). Elements keep their row-major order. Shapes may differ if splitting dimensions makes them equal, as
 * [6,4] and [2,3,4], or if there are no gaps.
 *
 * The views are copied, and their memory is borrowed until the run returns. Received tensors must not share memory with
 * one another, nor, if a rank copies to itself, with tensors that are sent. */
TB_API tb_status tb_copy_submit_send(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t dest,
                                     uint64_t task_id);
TB_API tb_status tb_copy_submit_recv(tb_copy *copy, const tb_copy_view *views, size_t nviews, int32_t source,
                                     uint64_t task_id);

/* Runs the operations submitted since the last run; all ranks of the group call it, also those that have submitted
 * none. Completes when the tensors that this rank sends have been read, and those that it receives have been written.
 * Ids that are repeated, or that only one end has, and tensors that don't match fail the run on every rank, before
 * anything is written, with the same error message. So does the deadline of any rank. The operations are dropped then,
 * too, and the next run can succeed, unless a rank was lost. */
TB_API tb_status tb_copy_run(tb_copy *copy, int timeout_ms);

/* Ends a run that another thread is in, with TB_CANCELLED, on every rank that has entered it; the next run can succeed.
 * A rank that has all its data succeeds nonetheless. Does nothing if no run is under way. */
TB_API void tb_copy_cancel(tb_copy *copy);

/* Runs that need this rank fail from then on. Submitted operations are dropped. NULL is allowed. */
TB_API void tb_copy_close(tb_copy *copy);

typedef struct tb_copy_op {
    uint64_t task_id;
    const tb_copy_view *views;
    size_t nviews;
} tb_copy_op;

/* How a run matches the operations of a rank with itself: send i belongs to receive recv_of[i]. Operations may have no
 * views. Several operations under one id are matched in their order; both ends have equally many tensors. Pure. Fails
 * as the run would. `rank` is for error messages. */
TB_API tb_status tb_copy_match_local(int32_t rank, const tb_copy_op *sends, size_t nsends, const tb_copy_op *recvs,
                                     size_t nrecvs, size_t *recv_of);

/* ---- Plans of others ------------------------------------------------------------------------------------------ */

/* A plan made elsewhere, such as by Megatron's planner: the slices of parameters that this rank sends to and receives
 * from each peer. It is executed as a run of a copy service, on any of its transports. */

/* Indices start .. start+length-1 of each dimension. */
typedef struct tb_slice {
    int64_t start[TB_MAX_DIMS], length[TB_MAX_DIMS];
} tb_slice;

/* A slice that a rank sends to a peer, or receives from it. */
typedef struct tb_reshard_op {
    size_t size;
    const char *param;
    int32_t peer;         /* its seat in the service's group; may be this rank's own */
    tb_slice here, there; /* in this rank's parameter, and in the peer's: equally many elements and dimensions */
    uint64_t task_id;     /* as in tb_copy_submit_send: the same at both ends, or TB_NO_TASK */
} tb_reshard_op;

/* A parameter, or a buffer, of this rank. */
typedef struct tb_reshard_param {
    size_t size;
    const char *name;
    const tb_copy_view *view; /* borrowed during the call, and so is its memory */
    /* The dtype on the wire, to and from which either end casts; both ends must give the same. TB_DTYPE_NONE: the
     * parameter's own, or bf16 if it has an `encode`. */
    tb_dtype buffer_dtype;
    /* As in a tb_tensor. A received parameter is gathered in an accumulator, in its buffer_dtype, until all of its
     * slices have arrived, which must cover it; then it is quantised. A sent one is dequantised. */
    const char *encode;
    void *scales;
    float *scale;
} tb_reshard_param;

typedef struct tb_reshard_plan {
    size_t size;
    const tb_reshard_op *sends, *recvs;
    size_t nsends, nrecvs;
    /* Of this rank's parameters; NULL: none. Pieces are whole slices, and `whole` need not be set. list_buffers, or
     * prepare_recv, give the number of bytes that are sent and received; without them it is that of the elements, in
     * the parameter's buffer_dtype, and the other end needs no transform. Functions are called by this thread. */
    const tb_transform *transform;
    const tb_reshard_param *sources, *targets; /* read by `sends`, and written by `recvs`; names are distinct in each */
    size_t nsources, ntargets;
} tb_reshard_plan;

/* The number of receives written in each way. */
typedef struct tb_reshard_counts {
    size_t size;
    size_t direct;      /* into the parameter itself */
    size_t copied;      /* by a cast after the run */
    size_t transformed; /* by finalize_recv */
    size_t accumulated; /* into an accumulator, and quantised from there */
} tb_reshard_counts;

/* Executes the plan; all ranks of the service's group call it, also those that have nothing to send or to receive. If
 * any rank finds an error in its own part (a name, a slice, a transform that fails to send), every rank fails with the
 * same error message, before a byte is written; so it does in all cases in which tb_copy_run fails. After the run,
 * receives that are not direct are written in the order of the plan's `recvs`; a failure there is this rank's alone.
 * Ends at the deadline. Operations that were submitted to the service before are run, too. `counts` may be NULL. */
TB_API tb_status tb_reshard_execute_plan(tb_copy *copy, const tb_reshard_plan *plan, int timeout_ms,
                                         tb_reshard_counts *counts);

/* ---- Agents -------------------------------------------------------------------------------------------------- */

/* A process need not be on the bus itself: an *agent* (`tensorbus agent`), a process of the same user on the
 * same machine, can have the seat, and move tensors for it. A program joins by the agent's socket,
 *
 *     tb_world_join("agent:/run/trainer-0.sock", "trainer", 0, 2, NULL, &world)
 *
 * and everything else is the same. An agent and its programs may be started together: the call waits until
 * the timeout for a socket on which an agent listens. TB_IO if there is none by then; TB_TIMEOUT if the
 * agent does not answer; TB_DENIED if the token is not the agent's; TB_REFUSED if the agent has another
 * version of the protocol. Transport, workers, host and plan_bytes are the agent's own: the program's values
 * are ignored. If a program enters a group, the agent enters it, and stays in it.
 *
 * With an agent, `manual` worlds, transforms and copy services are refused (TB_REFUSED). An agent and its
 * program exchange messages: the agent does not wait beyond the transfer's deadline for a `committing`
 * function to return, and some calls of `progress` may be left out.
 *
 * The agent uses tensors in memory of tb_alloc in place, and so it does those on a device whose memory it
 * can map. Other host memory is copied by the agent, which must be allowed to read and write this process's
 * memory. Other device memory is copied in this process: before a transfer begins, after waiting for the
 * stream, if one was given; and, for a receive, when a wait or a query returns the arrival. Such tensors are
 * written with the data received through a pair, if that pair's part has succeeded: elements and padding,
 * and no other byte. If it has failed, they stay as they are, and are not torn, unless groups of tensors had
 * been waited for, or this write failed. A batch with such tensors can't be sent and received at the same
 * time (TB_REFUSED). tb_stream_wait waits as tb_wait does.
 *
 * When the agent is gone, calls return TB_LOST; batches still report their version, torn if the agent may
 * have begun to write a later one. Tensors are borrowed until the agent has answered, or its process has
 * ended, whichever is first: a stopped agent may continue, and write. So tb_cancel, and the calls that
 * destroy a transfer or a batch, wait for it as long as its process lives; all other calls have
 * deadlines. */

/* ---- Models -------------------------------------------------------------------------------------------------- */

/* A model has many parameters, which two programs may name and store differently. Each side's rules (names and views)
 * convert its own to *canonical* tensors: both then have tensors of equal names and shapes, which pairs and batches can
 * carry. All of this is pure: the same arguments give the same result everywhere.
 *
 * A view converts a stored tensor to a canonical one, by operations from left to right:
 *
 *     split(D, a, b, ...)        dim D becomes several, the first varies slowest; one size may be -1: what is left
 *     merge(D, E)                dims D to E become one
 *     permute(D, E, ...)         the dims in a new order
 *     slice(D, start, length)    some indices of dim D
 *     pad(D, before, after)      removes the storage's padding from dim D
 *
 * A negative D counts from the end. Nothing is copied: the result is the same memory with other strides. plan.h has the
 * functions. */
typedef struct tb_view tb_view;

/* A pattern is a glob, in which * matches any characters (dots, too) and ? matches one; or, if it begins with ^, a
 * POSIX extended regular expression, which takes longer. It has to match the whole name.
 *
 * Only the first rule that matches a name is applied, together with the rules right after it that have the same
 * pattern: then the parameter becomes several tensors, as linear_qkv becomes q, k and v. A name without a match stays
 * as it is. */
typedef struct tb_rule {
    const char *match;
    const char *name; /* the new name; \1 to \9 is the text of a wildcard, or of a group, \0 all; NULL: the old */
    const char *view; /* NULL: none */
} tb_rule;

/* Maps the parameter names of one rank to names in the whole model. In this order: layers are numbered, experts are
 * numbered, rules are applied. */
typedef struct tb_names_opts {
    size_t size;
    /* Pipeline stages: layers are assigned to the stages of chunk 0, then to those of chunk 1, and so on. In the
     * pattern, # matches the number, * any characters but dots, and a final dot also the end of the name. */
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

/* A canonical tensor in a parameter. */
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

/* Fails if two parts have the same name. */
TB_API tb_status tb_names_resolve(const tb_names *names, const char *const *params, size_t nparams, tb_parts *out);
TB_API void tb_parts_fini(tb_parts *parts);

typedef struct tb_match_opts {
    size_t size;
    const tb_tie *ties; /* a target that the source lacks takes the canonical one, or else another that is tied to it */
    size_t nties;
    const char *const *ignored; /* patterns for names that may be on one side only */
    size_t nignored;
    bool allow_unmatched; /* report unmatched names without failing */
} tb_match_opts;

/* Indices into the given names. */
typedef struct tb_match {
    size_t size;
    size_t nmatched;
    size_t *source, *target; /* in the targets' order; a source may serve several */
    size_t nonly_source, nonly_target;
    size_t *only_source, *only_target; /* sorted by name; without names that are ignored, or tied to a matching name */
} tb_match;

/* The names of each side are distinct. TB_INVALID if a name is on one side only; the error message has the first. */
TB_API tb_status tb_match_names(const char *const *source, size_t nsource, const char *const *target, size_t ntarget,
                                const tb_match_opts *opts, tb_match *out);
TB_API void tb_match_fini(tb_match *match);

#ifdef __cplusplus
}
#endif

#endif
