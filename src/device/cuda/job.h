/* Shared by the files that prepare and launch jobs: job.c, job_box.c, job_matrix.c, job_memory.c, job_launch.c. */
#ifndef TB_DEVICE_CUDA_JOB_H
#define TB_DEVICE_CUDA_JOB_H

#include "base/mem.h"
#include "device/cuda/cuda.h"

#include <sys/queue.h>

/* ---- Blocks of memory (job_memory.c) ----------------------------------------------------------------------------- */

/* Pinned memory, device memory, or as much of both, from a pool: the driver waits for all work of a GPU when it frees
 * memory. Jobs return blocks to the pool. */
typedef struct tb__cuda_block {
    tb__gpu *gpu;
    size_t nbytes;
    void *pinned;               /* NULL: device memory only */
    CUdeviceptr pinned_address; /* for the GPU */
    CUdeviceptr device;         /* 0: pinned memory only */
    size_t nclean;              /* results that `device` begins with, as take_results leaves them */
    LIST_ENTRY(tb__cuda_block) link;
} tb__cuda_block;

enum { TB__CUDA_PINNED = 1, TB__CUDA_DEVICE = 2 };

/* The GPU's context is current. The block has at least so many bytes. */
tb_status tb__cuda_block_get(tb__gpu *gpu, size_t nbytes, int kinds, tb__cuda_block **out);
void tb__cuda_block_put(tb__cuda_block *block); /* NULL is allowed. No context need be current */

/* Copies bytes to device memory and waits until they are there, at most some seconds. */
tb_status tb__cuda_upload(tb__gpu *gpu, CUdeviceptr to, const void *from, size_t nbytes);

/* ---- Places of memory (job_memory.c) ----------------------------------------------------------------------------- */

/* A range of memory that moves of a job use. */
typedef struct tb__cuda_span {
    uintptr_t begin, end;
    int gpu;                              /* -1: host memory */
    uint64_t can_read, can_write, cannot; /* other GPUs, by ordinal, as far as it was tried */
} tb__cuda_span;

_Static_assert(TB__MAX_GPUS <= 64, "a bit for each");

typedef struct tb__cuda_spans {
    TB_VEC(tb__cuda_span) list; /* by address; they do not overlap */
    size_t last;                /* where the last search ended */
} tb__cuda_spans;

/* The ordinal of the GPU that the bytes are on, -1 for host memory. */
tb_status tb__cuda_find_gpu(tb__cuda_spans *spans, tb__device *device, uintptr_t begin, uintptr_t end, int *out);

/* Gives a GPU access to bytes that were found on another one: see tb__memory_give_access. */
tb_status tb__cuda_span_access(tb__cuda_spans *spans, const tb__gpu *gpu, uintptr_t begin, uintptr_t end,
                               bool is_written);

/* Host memory that a job has pinned. */
typedef struct tb__cuda_host_range {
    uintptr_t begin, end;
    tb__cuda_pin *pin;
} tb__cuda_host_range;

typedef struct tb__cuda_host_ranges {
    tb__cuda_host_range *item; /* by address */
    size_t count, capacity;
} tb__cuda_host_ranges;

/* Pins the bytes until tb__cuda_host_fini, unless they are pinned. */
tb_status tb__cuda_host_pin(tb__cuda_host_ranges *ranges, tb__gpu *gpu, uintptr_t begin, uintptr_t end);
void tb__cuda_host_fini(tb__cuda_host_ranges *ranges);
/* Whether the address is in host memory that was pinned by these. GPUs use it by the host's addresses. */
bool tb__cuda_is_host(const tb__cuda_host_ranges *ranges, uintptr_t address);

/* ---- Jobs (job.c) ------------------------------------------------------------------------------------------------ */

/* How a move is executed: as items of a kernel, or as copies by the copy engine. */
typedef struct tb__cuda_step {
    uint32_t first, count;
    uint16_t kernel; /* TB__CUDA_NKERNELS: the copy engine */
    uint16_t gpu;    /* of the job's */
} tb__cuda_step;

/* A move of a quantised tensor, or an amax. */
typedef struct tb__cuda_quant {
    uint32_t step, result; /* moves whose rows follow each other share a result */
    tb__move_kind kind;
    tb__quant_kind format;
    int64_t first, columns;
    const float *scale; /* in host memory; NULL: there is none, or it is on the device */
    bool needs_scale;
    float *amax;
    const char *name;
} tb__cuda_quant;

/* A copy for the copy engine. */
typedef struct tb__cuda_transfer {
    uint64_t src, dst, nbytes;
} tb__cuda_transfer;

/* Items from `first` up to the next stretch's are tiles of the object at `place`, from tile `tile` on. */
typedef struct tb__cuda_stretch {
    uint32_t first, place, tile;
} tb__cuda_stretch;

/* The part of a job that one GPU does. */
typedef struct tb__cuda_part_of_gpu {
    tb__gpu *gpu;
    TB_VEC(uint8_t) heap;
    TB_VEC(uint8_t) items[TB__CUDA_NKERNELS]; /* until they are uploaded */
    TB_VEC(tb__cuda_stretch) stretches[TB__CUDA_NKERNELS];
    uint32_t nitems[TB__CUDA_NKERNELS];
    uint64_t offset[TB__CUDA_NKERNELS]; /* of the items in `memory`, which begins with the heap */
    tb__cuda_block *memory;
    TB_VEC(tb__cuda_transfer) transfers;
    TB_VEC(tb__cuda_quant) quants;
    uint32_t nresults;
    uint32_t last_matrix; /* place, if there are quants */
} tb__cuda_part_of_gpu;

typedef struct tb__cuda_job_part {
    uint32_t number;
    size_t first;      /* of its steps */
    uint64_t last_run; /* number of the last run that included it */
} tb__cuda_job_part;

/* An operand that the GPU of its move can't access. */
typedef struct tb__cuda_far {
    const tb__move *move;
    int source; /* its index, or one of those below */
} tb__cuda_far;

enum { TB__FAR_DATA = -1, TB__FAR_SCALES = -2, TB__FAR_SCALE = -3 }; /* of a quantised tensor */

/* Moves of a part that read memory of GPUs to which theirs have no access, through the job's relay_memory. */
typedef struct tb__cuda_relay {
    uint32_t part;
    tb__job *in, *work; /* first to that memory, then from there */
} tb__cuda_relay;

struct tb__job {
    tb__device *device;
    tb__cuda_part_of_gpu *gpus;
    size_t ngpus;
    TB_VEC(tb__cuda_step) steps; /* by part; a move has one or more */
    tb__cuda_job_part *parts;    /* by number; the last one is a sentinel */
    size_t nparts, next_part;    /* next_part: the one after the last one found */
    uint64_t nruns;
    tb__cuda_host_ranges host;
    bool reads_buffer, writes_buffer; /* of a run */
    TB_VEC(tb__cuda_relay) relays;    /* by part, in the order in which they are run, one after the other */
    char *relay_memory;
    bool is_relaying; /* a run uses that memory */
};

/* job_relay.c: makes relays of moves. The list is sorted by part, and the entries of a move are adjacent. */
tb_status tb__cuda_add_relays(tb__job *job, const tb__cuda_far *far, size_t nfar);
void tb__cuda_free_relays(tb__job *job);

/* Makes steps of a move that is checked and not empty. `src` are the addresses of its sources. */
tb_status tb__cuda_add_copy(tb__job *job, uint32_t gpu, const tb__move *move, const void *const *src); /* job_box.c */
tb_status tb__cuda_add_matrix(tb__job *job, uint32_t gpu, const tb__move *move, const void *const *src,
                              bool is_scale_on_device); /* job_matrix.c */

/* Shared by both: reserve bytes of the heap; add tiles of an object in it. */
void *tb__cuda_heap_add(tb__cuda_part_of_gpu *part, size_t nbytes, uint32_t *place); /* NULL: no memory */
tb_status tb__cuda_add_tiles(tb__job *job, uint32_t gpu, int kernel, uint32_t place, uint32_t first, uint32_t ntiles);
tb_status tb__cuda_add_step(tb__job *job, uint32_t gpu, int kernel, uint32_t first, uint32_t count);
tb__cuda_divisor tb__cuda_divide_by(uint32_t by);

typedef struct tb__cuda_kernel_shape {
    uint16_t threads, blocks, slots; /* of a block; of an item */
} tb__cuda_kernel_shape;

extern const tb__cuda_kernel_shape tb__cuda_kernel_shapes[TB__CUDA_NKERNELS];

#endif
