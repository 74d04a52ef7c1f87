/* What `tensorbus demo` and `tensorbus bench` are made of: tensors and their layouts on two sides, memory on the host
 * and on GPUs, values that tell where an element belongs, processes that the parent leads through steps, and memcpy to
 * compare with. */
#ifndef TB_BENCH_MOVE_H
#define TB_BENCH_MOVE_H

#include "tools/guard.h"
#include "tools/mirror.h"

#include <stdatomic.h>

/* ---- Tensors (llama.c) --------------------------------------------------------------------------------------- */

enum { TOOL_SOURCE, TOOL_TARGET, TOOL_NSIDES };

/* Which of a side's layouts a tensor has: what tensor parallelism does to a weight. */
typedef enum tool_cut {
    TOOL_CUT_COLUMN, /* by output features: dim 0 */
    TOOL_CUT_ROW,    /* by input features: dim 1 */
    TOOL_CUT_NORM,   /* a vector, which is not cut */
    TOOL_CUT_COUNT
} tool_cut;

/* What the elements are. */
typedef enum tool_values {
    TOOL_BITS,   /* anything, of 16 or 32 bits */
    TOOL_FLOATS, /* f32 integers of 24 bits, which arrive as bf16 and so have to be rounded */
    TOOL_TERMS,  /* bf16 integers, other ones at each source, so small that the sums that arrive are exact */
    TOOL_FINITE, /* bf16 numbers, none of which is infinite or NaN */
} tool_values;

typedef struct tool_tensor {
    char name[56];
    tb_shape shape;
    tool_cut cut;
    tb_dtype dtype[TOOL_NSIDES];
    tool_values values;
    uint32_t nterms; /* TERMS: of the sources, at most 8 */
    /* How targets store it; in these two cases all values are as sent. */
    bool is_transposed; /* a matrix with its columns one after the other */
    const char *encode; /* a matrix of FINITE numbers, quantised: as in tb_tensor; NULL: numbers of its dtype */
} tool_tensor;

typedef TB_VEC(tool_tensor) tool_tensors;

typedef struct tool_llama {
    int nlayers;
    int64_t hidden, nbytes;
} tool_llama;

enum { TOOL_MIN_LLAMA = 64 << 10 };

/* Adds weights shaped like those of a small Llama, in bf16: `nbytes` of them and hardly more, because the vocabulary
 * takes what the layers leave. */
tb_status tool_llama_add(tool_tensors *tensors, int64_t nbytes, tool_llama *out);

/* ---- Sides (sides.c) ----------------------------------------------------------------------------------------- */

enum { TOOL_MAX_SIDE = 64, TOOL_DEFAULT_RANKS = 4 }; /* processes of one side */

typedef struct tool_side {
    const char *group;
    int32_t nranks;
    tb_layout *layout[TOOL_CUT_COUNT];
    char *text[TOOL_CUT_COUNT]; /* the same, as text */
} tool_side;

/* `text` NULL: the layouts that come with the side. `nranks` 0: as many as the text names, or else the default. */
tb_status tool_side_init(tool_side *side, int which, const char *group, const char *text, int32_t nranks);
void tool_side_fini(tool_side *side);

typedef struct tool_rank_name {
    char text[32]; /* "trainer 2" */
} tool_rank_name;

/* What is moved, between whom, and how. */
typedef struct tool_job {
    tool_side side[TOOL_NSIDES];
    tool_tensors tensors;
    bool is_local;                   /* the processes of both sides are the same */
    bool is_foreign;                 /* memory that is not tb_alloc's */
    const char *memory[TOOL_NSIDES]; /* where tensors are, as tb_alloc_on takes it; NULL: memory of tb_alloc */
    tb_batch_opts batch;             /* see tool_batch_opts */
    char folder[80];                 /* where the ranks meet; "": none */
    const char *store;               /* where they meet instead; NULL: in the folder */
    const char *token;               /* of that store; NULL: none */
    const char *transport;           /* the only one to use; NULL: what suits */
    /* Set by tool_job_weigh: */
    int nranks; /* processes; sources come first */
    tool_rank_name names[TOOL_NSIDES * TOOL_MAX_SIDE];
    int64_t nbytes[TOOL_NSIDES]; /* of all parts of a side, without gaps */
    int timeout_ms;              /* for each wait of a rank */
} tool_job;

/* Works out what the ranks hold, and whether there is room for all of it. */
tb_status tool_job_weigh(tool_job *job);
void tool_job_fini(tool_job *job);

/* Whether every tensor can be moved from the one side to the other. */
tb_status tool_job_check(const tool_job *job);

/* ---- Parts (parts.c, values.c, coded.c) --------------------------------------------------------------------- */

/* One rank's part of one tensor; row-major without gaps, unless the tensor says otherwise. */
typedef struct tool_part {
    const tool_tensor *tensor;
    uint32_t number; /* of the tensor */
    int which;       /* side */
    int32_t rank;    /* of its side */
    tb_local local;
    int64_t nelements;
    int64_t nbytes;              /* with the scales, if it is quantised */
    int64_t scales_at, scale_at; /* quantised: how far behind the data they begin; 0: it has none */
    int64_t strides[2];          /* transposed */
    void *data;                  /* NULL before it is allocated, and where there is nothing */
    void *host;                  /* where this process reads and writes it */
} tool_part;

/* All parts of one rank, which lie in one stretch of memory. */
typedef struct tool_parts {
    size_t count;
    tool_part *part;
    int64_t nbytes; /* without the gaps */
    int64_t nbytes_allocated;
    const char *device; /* as tb_alloc_on takes it; NULL: malloc */
    tool_mirror mirror;
} tool_parts;

/* The job must outlive the parts. */
tb_status tool_parts_init(tool_parts *parts, const tool_job *job, int which, int32_t rank);
tb_status tool_parts_allocate(tool_parts *parts);
void tool_parts_fini(tool_parts *parts);

/* The next version's values in all parts of a source; in those of a target, what is wrong everywhere. *done counts the
 * bytes. */
tb_status tool_parts_prepare(const tool_parts *parts, uint32_t version, _Atomic int64_t *done);

/* Every element has a value of its own, made of version, tensor and global index; a rank finds its elements' indices
 * through tb_layout_local alone. An element that was never written is always noticed, because poison differs from what
 * is expected there; of BITS, one that belongs elsewhere in the same run of 65536 always, too, and any other with a
 * chance of 65535 in 65536. */
tb_status tool_part_fill(const tool_part *part, uint32_t version);
tb_status tool_part_poison(const tool_part *part, uint32_t version);

typedef struct tool_wrong {
    int64_t count;              /* of wrong elements */
    int64_t index[TB_MAX_DIMS]; /* global, of the first of them */
    uint32_t expected, found;
} tool_wrong;

/* Whether all elements of a target are right, which is not coded; fills in *wrong if not. */
bool tool_part_check(const tool_part *part, uint32_t version, tool_wrong *wrong);

/* TB_INTERNAL, with a sentence that names the tensor, the element, what was expected and what is there. *done counts
 * the bytes that were right. */
tb_status tool_parts_check(const tool_parts *parts, uint32_t version, _Atomic int64_t *done);

/* (coded.c) Whether the part has another form than numbers, row after row; what it takes in that form, and what it has
 * to hold in the end: part->nbytes bytes. */
bool tool_part_is_coded(const tool_part *part);
tb_status tool_part_measure(tool_part *part);
tb_status tool_part_expect(const tool_part *part, uint32_t version, void *out);

/* ---- Processes (ranks.c) ------------------------------------------------------------------------------------- */

/* What a rank tells the parent of a step, in shared memory. All but `done` is read when the step is over. */
typedef struct tool_slot {
    _Atomic int64_t done; /* bytes; 0 when the step begins */
    int64_t ended_ns;     /* a rank may set it itself, before what follows the end; else when its work returns */
    double phase[TB_PHASE_COUNT];
    double gpu_seconds; /* that a GPU was busy for the rank, where that is measured */
    int64_t nlaunches;  /* of kernels */
} tool_slot;

typedef struct tool_ranks_opts {
    int n;
    const tool_rank_name *names;
    int timeout_ms; /* for a step */
    /* In the rank's process, which has a copy of `arg` of its own; a sentence of failure reaches the parent. */
    tb_status (*work)(void *arg, int rank, int step, tool_slot *slot);
    void (*tick)(void *arg); /* in this process, ten times a second during a step; may be NULL */
    void *arg;
} tool_ranks_opts;

typedef struct tool_ranks tool_ranks;

/* Forks the ranks, which sleep between steps. What they write to standard streams goes to standard error, by name.
 * There must be no other thread in this process. Names and guard must outlive the ranks. */
tb_status tool_ranks_create(const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out);

/* Has all ranks do a step; *seconds is from its beginning until the last one had ended it, and may be NULL. If one
 * fails or dies, the sentence names the one that was first. TB_CANCELLED if the guard caught a signal. After a failure
 * they are only good for being destroyed. */
tb_status tool_ranks_step(tool_ranks *ranks, int step, double *seconds);

const tool_slot *tool_ranks_slot(const tool_ranks *ranks, int rank);

/* Memory of all ranks together, pages that they share counted once; -1 where the kernel does not tell. */
int64_t tool_ranks_memory(const tool_ranks *ranks);

/* Ends them, whatever they are doing; none is left when it returns. */
void tool_ranks_destroy(tool_ranks *ranks);

/* ---- A rank's work (mover.c) --------------------------------------------------------------------------------- */

typedef enum tool_step {
    TOOL_ALLOCATE,
    TOOL_PREPARE, /* the next version: values at the sources; at the targets, what is wrong everywhere */
    TOOL_CONNECT, /* the world, pairs, the batch */
    TOOL_MOVE,    /* ends when this rank has its data, or its memory back */
    TOOL_VERIFY,
    TOOL_CLOSE,
    TOOL_NSTEPS
} tool_step;

/* A rank at one end of the job. */
typedef struct tool_end {
    int which;
    int32_t seat;
    tool_parts parts;
    tb_pair *pair;
    tb_transfer *transfer;
} tool_end;

typedef struct tool_mover {
    const tool_job *job;
    uint32_t version;
    int nends;
    tool_end end[TOOL_NSIDES];
    tb_world *world;
    tb_batch *batch;
    _Atomic int32_t *turn; /* the target whose turn it is to receive: they do so one by one. NULL: all at once */
} tool_mover;

/* Waits until *turn is `seat`. */
tb_status tool_take_turn(_Atomic int32_t *turn, int32_t seat, int timeout_ms);

void tool_mover_init(tool_mover *mover, const tool_job *job, int rank);
tb_status tool_mover_do(tool_mover *mover, tool_step step, tool_slot *slot);

/* As batches take it; valid as long as the side. */
tb_tensor tool_part_tensor(const tool_part *part, const tool_side *side);

/* As the settings have it; `staged` takes the path that tensors take between machines. */
tb_batch_opts tool_batch_opts(const tb__config *config, bool staged, bool checksum);

/* Makes the folder that the ranks will meet in, and forks them; of the options work, tick and arg count. */
tb_status tool_job_start(tool_job *job, const tool_ranks_opts *opts, tool_guard *guard, tool_ranks **out);

/* The step CONNECT. Nobody needs the folder when they have met: it is removed, lest it be left behind. */
tb_status tool_job_connect(tool_job *job, tool_ranks *ranks);

/* ---- Baselines (memcpy.c) ------------------------------------------------------------------------------------ */

/* Two warm buffers of this process, which children do not get, and a thread for each core it may use. */
typedef struct tool_buffers {
    char *src, *dst;
    size_t nbytes;
    void *mapping;
    size_t mapped;
    int nthreads;
} tool_buffers;

tb_status tool_buffers_init(tool_buffers *buffers, size_t nbytes);
void tool_buffers_fini(tool_buffers *buffers);

/* Copies all of it, or casts it from f32 to bf16; GB/s of the bytes read. */
tb_status tool_memcpy(tool_buffers *buffers, double *gb_per_s);
tb_status tool_cast(tool_buffers *buffers, double *gb_per_s);

/* The cast keeps its threads for the next one; none is to be there when ranks are forked. */
void tool_end_threads(void);

#endif
