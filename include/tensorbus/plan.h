/* Layouts, plans and the transfer IR as data, for tools and simulators: who holds which part of a tensor, which bytes
 * go where, and what each rank does for it. Programs that only move tensors do not need this.
 *
 * All of it but its end, where an IR is executed, is pure: nothing is sent, no file is read, and the same arguments
 * give the same result on every rank. The rules of tensorbus.h hold here, too. Structs without `size` stay as they are
 * within a minor version: tb_segment, tb_placement, tb_local and tb_box, and those that the library returns to be read,
 * tb_route, and tb_ir with what it points to, which a program may also build itself.
 */
#ifndef TENSORBUS_PLAN_H
#define TENSORBUS_PLAN_H

#include "tensorbus/tensorbus.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Layouts ------------------------------------------------------------------------------------------------- */

/* The indices start .. stop-1 of one dimension. */
typedef struct tb_segment {
    int64_t start, stop;
} tb_segment;

typedef enum tb_placement_kind {
    TB_REPLICATE,     /* keep everything */
    TB_SHARD,         /* an even cut of `dim`: part r of ceil(n/c) indices */
    TB_STRIDED_SHARD, /* `split` equal pieces, each cut like Shard */
    TB_BLOCK_SHARD,   /* pieces of the sizes given, each cut like Shard */
    TB_EXPLICIT,      /* coordinate r keeps the segments listed for it */
    TB_PARTIAL,       /* every coordinate holds a contribution; the value is their reduction */
} tb_placement_kind;

typedef enum tb_reduce_op { TB_SUM, TB_AVG, TB_MIN, TB_MAX, TB_PRODUCT } tb_reduce_op;

/* The effect of one mesh dimension on the tensor. Only the fields of its kind are used. */
typedef struct tb_placement {
    tb_placement_kind kind;
    int dim;                 /* sharding kinds: the tensor dimension; negative counts from the end */
    int64_t split;           /* STRIDED_SHARD: at least 1 */
    size_t nsizes;           /* BLOCK_SHARD */
    const int64_t *sizes;    /*   full sizes of the pieces; they add up to the length they cut */
    size_t nlists;           /* EXPLICIT: as many as the mesh dimension is long */
    const size_t *list_ends; /*   coordinate r keeps segments[list_ends[r-1] .. list_ends[r]), in that order */
    const tb_segment *segments;
    tb_reduce_op op; /* PARTIAL */
} tb_placement;

typedef struct tb_layout tb_layout; /* a mesh and a placement for each of its dimensions */

/* `ranks` lists the mesh row-major: distinct ranks in any order, with gaps; NULL means 0, 1, 2, ... All is copied. */
TB_API tb_status tb_layout_create(int mesh_ndim, const int64_t *mesh_shape, const int32_t *ranks,
                                  const tb_placement *placements, tb_layout **out);

/* Parses "mesh=2,2 place=R,S1 ranks=4..7", the form that pairs use. */
TB_API tb_status tb_layout_parse(const char *text, tb_layout **out);

TB_API void tb_layout_destroy(tb_layout *layout);

/* The text form, which tb_layout_parse reads back. To be freed by the caller with free(). */
TB_API tb_status tb_layout_format(const tb_layout *layout, char **out);

TB_API bool tb_layout_equal(const tb_layout *a, const tb_layout *b);

/* The mesh: its size, the rank at a row-major index (0 to size-1), and the index of a rank (-1: not in the mesh). */
TB_API int32_t tb_layout_nranks(const tb_layout *layout);
TB_API int32_t tb_layout_rank_at(const tb_layout *layout, int32_t index);
TB_API int32_t tb_layout_index_of(const tb_layout *layout, int32_t rank);

/* Whether the layout fits tensors of this shape: dims in range, blocks that add up on every coordinate, and so on. */
TB_API tb_status tb_layout_check(const tb_layout *layout, const tb_shape *shape);

/* The part of one rank: per tensor dimension the ordered global indices, as segments; memory is row-major over them. */
typedef struct tb_local {
    tb_shape shape; /* lengths of the lists; all zero for a rank outside the mesh */
    size_t nsegments[TB_MAX_DIMS];
    tb_segment *segments[TB_MAX_DIMS];
} tb_local;

TB_API tb_status tb_layout_local(const tb_layout *layout, const tb_shape *shape, int32_t rank, tb_local *out);
TB_API void tb_local_fini(tb_local *local);

/* The hash of the rank's whole part (see Hashes in tensorbus.h); 0 if it holds nothing. An index that a list contains
 * twice counts twice. TB_REFUSED if the layout is Partial. */
TB_API tb_status tb_hash_part(const tb_layout *layout, const tb_shape *shape, int32_t rank, const tb_binding *part,
                              uint64_t *out);

/* ---- Views --------------------------------------------------------------------------------------------------- */

/* The effect of a view on a tensor; the syntax is in tensorbus.h (Models). A view of NULL changes
 * nothing. */

TB_API tb_status tb_view_parse(const char *text, tb_view **out); /* "" changes nothing */
TB_API void tb_view_destroy(tb_view *view);

/* The canonical shape and layout of a tensor stored with this global shape and layout, for all ranks. A cut dim stays
 * Shard if that describes the result, and becomes Explicit otherwise; mesh dims may be split or merged for that.
 * TB_REFUSED if a rank's part would no longer be a box with constant strides. */
TB_API tb_status tb_view_apply(const tb_view *view, const tb_shape *shape, const tb_layout *layout, tb_shape *out_shape,
                               tb_layout **out_layout);

/* The binding of `rank`'s part of the canonical tensor; `binding` is that of its part of the stored tensor. */
TB_API tb_status tb_view_bind(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                              const tb_binding *binding, tb_binding *out);

/* The boxes of the rank's storage that are padding. They are never sent; a rank that receives the tensor sets them to
 * zero. To be freed by the caller with free(); NULL if there are none. */
TB_API tb_status tb_view_padding(const tb_view *view, const tb_shape *shape, const tb_layout *layout, int32_t rank,
                                 const tb_binding *binding, tb_binding **out, size_t *count);

/* ---- Plans --------------------------------------------------------------------------------------------------- */

/* A plan defines, for one shape, which elements each rank sends to which other. It is a pure function of its arguments:
 * no communication, the same on every rank. The cost of listing one rank's routes is proportional to the data that the
 * rank moves. */
typedef struct tb_plan tb_plan;

typedef struct tb_plan_opts {
    size_t size;
    /* hosts[rank]: the machine of the rank; NULL: not known, and all sources are equal. A source on the target's
     * machine is preferred. Data for ranks without one leaves the source's machine once, in a broadcast to all of them.
     */
    const int32_t *hosts;
    size_t nhosts;   /* ranks the array covers; it must cover both meshes */
    bool unbalanced; /* use the first replica for everything, for comparisons */
    bool whole_rows; /* parts of replicas are not cut along the last dim */
} tb_plan_opts;

TB_API tb_status tb_plan_create(const tb_layout *src, const tb_layout *dst, const tb_shape *shape, tb_dtype dtype,
                                const tb_plan_opts *opts, tb_plan **out);
TB_API void tb_plan_destroy(tb_plan *plan);

/* The first indices of a box in a local tensor; its lengths are given separately. */
typedef struct tb_box {
    int64_t start[TB_MAX_DIMS];
} tb_box;

/* One box that moves: from its place in the source's local tensor to its place in each target's. */
typedef struct tb_route {
    int32_t source;    /* TB_NO_RANK: the target box is filled with zeros */
    uint32_t ntargets; /* at least 1, distinct; the source may be the only one (a local copy) */
    const int32_t *targets;
    uint32_t ncontributors; /* of a Partial source, in the order they are combined, the source among them; 0 if none */
    const int32_t *contributors;
    uint64_t src_cell; /* the cell of each side's grid that contains the box, row-major (tb_plan_grids) */
    uint64_t dst_cell;
    int64_t nelements;
    int64_t order; /* row-major offset in the first target's local tensor, in elements */
    int64_t len[TB_MAX_DIMS];
    tb_box src; /* the same box at the source and at every contributor */
    tb_box dst; /* at this rank if it is a target, else at the first target */
} tb_route;

typedef struct tb_routes tb_routes; /* a list of routes and its memory, to be reused */

TB_API tb_status tb_routes_create(tb_routes **out);
TB_API void tb_routes_destroy(tb_routes *routes);
TB_API size_t tb_routes_count(const tb_routes *routes);
TB_API const tb_route *tb_routes_at(const tb_routes *routes, size_t i);

/* Replaces the list by the routes in which `rank` is source, target or contributor. Tensor i of a batch passes
 * rotation = i, so that the same replica does not serve all of them. */
TB_API tb_status tb_plan_routes(const tb_plan *plan, int32_t rank, uint64_t rotation, tb_routes *routes);

/* The number of cells of each side's grid along each dim (Shard over 4 ranks has 4). Either may be NULL. */
TB_API void tb_plan_grids(const tb_plan *plan, tb_shape *src, tb_shape *dst);

/* Proves the whole plan (at rotation 0): every target element is written exactly once, by a source that holds it at
 * that place, and both ends of every route agree on it. TB_INTERNAL, with an error message, if not. Costs the whole
 * world's traffic. */
TB_API tb_status tb_plan_check(const tb_plan *plan);

/* Statistics over all ranks, limited to INT64_MAX. Local copies count only in local_bytes and nchunks. */
typedef struct tb_plan_stats {
    size_t size;
    int32_t nranks;      /* of both meshes together */
    int32_t *ranks;      /* ascending */
    int64_t *send_bytes; /* per rank, counting every receiver */
    int64_t *recv_bytes;
    int64_t *egress_bytes; /* as send_bytes, but a box that goes to several ranks counts once */
    int64_t *reduce_bytes; /* other ranks' contributions that this rank combines */
    int64_t total_bytes;
    int64_t local_bytes;
    int64_t nchunks;      /* boxes, counting every receiver, local copies included; boxes of zeros are not */
    int64_t max_send;     /* of the busiest sender */
    int64_t min_max_send; /* no choice among replicas can be below this */
    int64_t max_slice;    /* the largest slice that a cut among replicas was rounded to: max_send - min_max_send is
                             at most this, unless hosts are known or Explicit lists share indices in part */
} tb_plan_stats;

TB_API tb_status tb_plan_stats_compute(const tb_plan *plan, tb_plan_stats *out);
TB_API void tb_plan_stats_fini(tb_plan_stats *stats);

/* Plans and routes are computed once per distinct (layouts, shape, dtype) and shared. Results stay valid until the
 * cache is destroyed. */
typedef struct tb_plan_cache tb_plan_cache;

TB_API tb_status tb_plan_cache_create(tb_plan_cache **out);
TB_API void tb_plan_cache_destroy(tb_plan_cache *cache);
TB_API tb_status tb_plan_cache_get(tb_plan_cache *cache, const tb_layout *src, const tb_layout *dst,
                                   const tb_shape *shape, tb_dtype dtype, const tb_plan_opts *opts,
                                   const tb_plan **out);
TB_API tb_status tb_plan_cache_routes(tb_plan_cache *cache, const tb_plan *plan, int32_t rank, uint64_t rotation,
                                      const tb_routes **out);
TB_API void tb_plan_cache_counters(const tb_plan_cache *cache, uint64_t *hits, uint64_t *misses);

/* ---- Transfer IR --------------------------------------------------------------------------------------------- */

/* How a chunk's bytes cross ranks. Roles (is_source, is_target) are separate fields, and never inferred from it. */
typedef enum tb_chunk_mode {
    TB_P2P,
    TB_BROADCAST,
    TB_LOCAL, /* same rank: a copy, or a fill with zeros */
    TB_NONE,  /* takes part in a reduction, ships nothing */
} tb_chunk_mode;

TB_API const char *tb_chunk_mode_name(tb_chunk_mode mode);

/* The mode of the route's chunks on this rank, which is its source, a target or a contributor. */
TB_API tb_chunk_mode tb_route_mode(const tb_route *route, int32_t rank);

/* One tensor of a batch. */
typedef struct tb_tensor_spec {
    size_t size;
    const char *name;
    tb_shape shape; /* global */
    const tb_layout *src, *dst;
    tb_dtype src_dtype, dst_dtype;
    tb_dtype wire_dtype; /* TB_DTYPE_NONE: the narrower side's, the source's where they are equally wide */
    uint32_t group;      /* tensors of a lower group go first: a layer, say */
    int64_t band;        /* every `band` indices of dim 0, as the targets have it, are a separate group, numbered from
                          * `group` on; 0: the tensor is in one group */
    bool coded; /* its bytes on the wire are made and read by other means than a cast. The size of a box of `len`: */
    int64_t (*coded_nbytes)(const void *arg, int ndim, const int64_t *len); /* NULL: as many as in the wire dtype */
    const void *coded_arg;
    bool whole;           /* of a coded tensor: its chunks are never cut, and each has a bucket of its own */
    uint64_t memory_kind; /* tensors with different numbers are never in one bucket: their memory may have to be reached
                             in different ways. Any number, the same on all ranks */
} tb_tensor_spec;

/* One box, and this rank's role in it. Pure data. */
typedef struct tb_chunk {
    tb_chunk_mode mode;
    bool is_source;    /* reads a local tensor into the buffer */
    bool is_target;    /* writes the buffer into a local tensor */
    bool is_coded;     /* see tb_tensor_spec; never in one bucket with those that are not */
    uint32_t tensor;   /* index of the tensor's name in sorted order */
    uint32_t group;    /* the tensor's, or its band's */
    uint64_t id;       /* the same number at both ends */
    uint32_t part;     /* a chunk too large for the staging memory is cut; its parts share the id */
    int32_t source;    /* TB_NO_RANK: zeros */
    uint32_t ntargets; /* for TB_NONE, the ranks that the source ships to; never the source of a P2P or BROADCAST */
    const int32_t *targets;
    uint32_t ncontributors;
    const int32_t *contributors;
    tb_reduce_op op;  /* how contributions are combined; TB_SUM for TB_AVG too ... */
    uint64_t divisor; /* ... whose sum is then divided by this; else 1 */
    uint64_t src_cell, dst_cell;
    int ndim;
    int64_t len[TB_MAX_DIMS];
    tb_box src, dst;
    int64_t order;      /* row-major offset in the first target, in elements */
    tb_dtype src_dtype; /* the source's. Contributions travel in it; they are combined before the cast, 8- and 16-bit
                         * floats in f32, and rounded once */
    tb_dtype wire_dtype;
    int64_t nbytes;       /* on the wire */
    bool is_whole;        /* see tb_tensor_spec */
    uint64_t memory_kind; /* see tb_tensor_spec */
} tb_chunk;

/* A chunk's place in a bucket's buffer. */
typedef struct tb_bucket_entry {
    size_t chunk;
    int64_t offset, nbytes; /* offsets are multiples of 64; gaps are zero */
} tb_bucket_entry;

/* The unit that is transferred. All of its chunks are of one group. */
typedef struct tb_bucket {
    size_t channel;
    uint32_t group; /* never decreases within a channel */
    size_t first_entry, nentries;
    int64_t total_bytes;
} tb_bucket;

/* The buckets that share a key, in order; at most max_in_flight of them are under way at a time. The key is part of the
 * first chunk: mode, source, targets, contributors, how they are combined, and the kind of memory. */
typedef struct tb_channel {
    size_t first_bucket, nbuckets;
    uint32_t max_in_flight;
    /* A BROADCAST to other hosts: for each target, the rank that sends to it. The source sends to one rank of another
     * host, which relays the data. NULL: the source sends to all. */
    const int32_t *via;
} tb_channel;

/* All actions of one rank for one batch. Read only. */
typedef struct tb_ir {
    int32_t rank;
    int64_t bucket_size;
    size_t ntensors;
    const char *const *names; /* sorted */
    size_t nchunks, nentries, nbuckets, nchannels;
    const tb_chunk *chunks; /* by channel, then group, name, target offset and part */
    const tb_bucket_entry *entries;
    const tb_bucket *buckets;
    const tb_channel *channels;
} tb_ir;

typedef struct tb_ir_opts {
    size_t size;
    int64_t bucket_size;    /* 16 MiB; 1: every chunk alone. A broadcast that is relayed is cut to it (but not to less
                               than 64 KiB), so that buckets follow one another from host to host */
    int64_t staging_bytes;  /* 256 MiB; staged buckets have at most a quarter of it, and larger chunks are cut. Where
                               n ranks contribute, an n-th of that, in the wider of source and wire dtype: a rank that
                               combines holds all contributions to a bucket at once */
    uint32_t max_in_flight; /* 2 */
    bool direct;            /* chunks need no staging memory, and are never cut */
    const tb_plan_opts *plan;
} tb_ir_opts;

/* The IR of `rank` for moving the tensors, which must have distinct names. `cache` may be NULL. */
TB_API tb_status tb_ir_create(int32_t rank, const tb_tensor_spec *tensors, size_t ntensors, tb_plan_cache *cache,
                              const tb_ir_opts *opts, tb_ir **out);
TB_API void tb_ir_destroy(tb_ir *ir);

/* Dumps, to be freed by the caller with free(). The parser reads the JSON form and checks it. */
TB_API tb_status tb_ir_dump_text(const tb_ir *ir, char **out);
TB_API tb_status tb_ir_dump_json(const tb_ir *ir, char **out);
TB_API tb_status tb_ir_parse_json(const char *text, size_t length, tb_ir **out);

/* ---- Executing an IR ------------------------------------------------------------------------------------------ */

/* This process's actions when the registered batch is sent, or received, as data: the plan of its next transfer, which
 * is made now if it has not been. Ranks are those of the bus. To be freed with tb_ir_destroy. TB_REFUSED before the
 * batch is registered, if it moves through several pairs in that direction, or by an agent. */
TB_API tb_status tb_batch_ir(tb_batch *batch, bool is_send, tb_ir **out);

/* The progress of a bucket on this rank. */
typedef enum tb_bucket_step {
    TB_BUCKET_PREPARED,  /* sending: it is packed, or can be read in place; receiving: there is room for it */
    TB_BUCKET_LAUNCHED,  /* sending: others can get it; receiving, and on one rank: it is being read */
    TB_BUCKET_COMPLETE,  /* its bytes have come, or all others have them */
    TB_BUCKET_FINALISED, /* receiving: it is in the tensors; its memory is free again */
} tb_bucket_step;

/* The bindings of this rank's parts of a tensor of the IR. */
typedef struct tb_ir_part {
    size_t size;
    const tb_binding *src, *dst; /* NULL: this rank sends, or receives, none of it. Shapes are those of the parts */
} tb_ir_part;

typedef struct tb_ir_execute_opts {
    size_t size;
    int timeout_ms; /* default: the world's */
    bool bus_ranks; /* ranks in the IR are those of the bus, as in tb_batch_ir; default: seats of the service's group */
    /* Called for each step of each bucket of the IR, by the thread that makes progress or the one that executes; it
     * must not call the library. After a failure some buckets are not finalised. */
    void (*progress)(void *arg, size_t bucket, tb_bucket_step step);
    void *arg;
} tb_ir_execute_opts;

/* Executes the IR as a run of the copy service, with its staging options. The IR may come from tb_ir_create, from JSON,
 * or be built by hand, with one or more chunks per bucket. `parts` has one element for each tensor. All ranks of the
 * service's group call it, each with its own IR, which has the same names everywhere, and perhaps no chunks. First
 * everything is checked: indices, offsets, ranks, roles, ids and sizes on each rank, boxes against the parts, and, by a
 * hash, that any two ranks have the same chunks and buckets for each other. An error on any rank fails the call on
 * every rank, with the same error message, before a byte is written; deadlines and losses are those of tb_copy_run.
 * Coded chunks are refused. Sources may share memory with targets, as in a batch; targets must be disjoint. */
TB_API tb_status tb_ir_execute(tb_copy *copy, const tb_ir *ir, const tb_ir_part *parts, const tb_ir_execute_opts *opts);

#ifdef __cplusplus
}
#endif

#endif
