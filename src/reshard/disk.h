/* Checkpoints from one sharding to another, on disk: a spec defines the form of each tensor in the source and in the
 * target. Data streams from file to file in bands of bounded size, whatever the size of the tensors; several threads
 * each take the next part.
 *
 * The source is a directory with a file for each rank (rank_0.safetensors, ...), each with its local shards under their
 * names, or a model as Hugging Face lays it out, which counts as one rank. So is the target. */
#ifndef TB_RESHARD_DISK_H
#define TB_RESHARD_DISK_H

#include "format/checkpoint.h"
#include "layout/layout.h"
#include "reshard/spec.h"
#include "tensorbus/plan.h"

/* How files store a quantised tensor: data under its name, and beside it scales of blocks, a scale of the whole part,
 * or both. */
typedef struct tb__disk_quant {
    tb__quant_format format; /* kind 0: it is not quantised */
    const char *scales_name; /* of those of blocks; NULL: there are none */
    const char *scale_name;  /* of the one for the whole part; NULL: there is none */
} tb__disk_quant;

/* A tensor of the source that is read. */
typedef struct tb__disk_stored {
    const char *name; /* in the whole model */
    tb_shape shape;   /* global */
    tb_dtype dtype;   /* as which it is read, where it is quantised */
    const tb__safetensor
        *unknown; /* as a file has it, if the dtype is not known: its bytes are copied as u8; or NULL */
    tb__disk_quant quant;
    const tb_layout *layout;
    const tb__grid *grid;
    size_t reader; /* which of disk->tensors compares its replicas: the first that reads it */
    /* Source bytes that another rank should have, too: of all replicas but the first, and what of that belongs to
     * parts of different ranks (or one rank's part twice) that have elements in common. */
    int64_t replica_nbytes, shared_nbytes;
} tb__disk_stored;

/* What a target's tensor takes from one of the source: elements that both sides have, each in its own form. */
typedef struct tb__disk_part {
    tb__disk_stored *from;
    const char *name; /* of the target's tensor, in the whole model */
    const tb__spec_rule *rule;
    tb_view *src_view, *dst_view; /* from either side's tensor to what both have; NULL: it is that */
    tb_layout *src;               /* of what both have, where there is a view */
    tb_shape shape;               /* of what both have */
    const tb_plan *plan;          /* from the source's layout of it to the target's */
    tb_dtype wire_dtype;
} tb__disk_part;

/* A tensor of the target, after the spec and the files have been compared. */
typedef struct tb__disk_tensor {
    const char *name;              /* in the whole model */
    tb_shape shape;                /* global */
    tb_dtype band_dtype;           /* in which parts are brought together: what is written, or what is quantised */
    tb_dtype dst_dtype;            /* of what is written */
    const tb__safetensor *unknown; /* as tb__disk_stored's */
    tb__disk_quant dst_quant;
    const char *group; /* whose parts share one scale, on all ranks; NULL: each part has its own */
    size_t amax;       /* which of disk->namax is the group's, or that of the target mesh's first rank */
    const tb_layout *dst;
    const tb__grid *grid;
    size_t nparts;
    tb__disk_part *parts;
    bool has_padding;   /* elements that no part has are zero */
    int64_t dst_nbytes; /* of all target ranks together, scales included */
} tb__disk_tensor;

/* A source that has been opened and checked against a spec, and what is to be done with it. */
typedef struct tb__disk {
    const tb__spec *spec;
    struct tb__disk_input *input;
    size_t count;
    tb__disk_tensor *tensors; /* by name */
    TB_VEC(tb__disk_part) parts;
    TB_VEC(struct tb__disk_grid *) grids;
    tb__index grid_index; /* of grids, by layout and shape */
    size_t nskipped;      /* tensors that the spec leaves out */
    size_t nranks;
    int32_t *ranks; /* of the target, ascending */
    int64_t src_nbytes, dst_nbytes;
    size_t nreplicated; /* stored tensors that have replicas in the source */
    int64_t replica_nbytes;
    size_t namax;        /* largest magnitudes that are looked for before anything is quantised, for scales */
    int64_t amax_nbytes; /* of quantised data that is made from what is looked at then */
    tb__index groups;    /* the first tensor of each */
    tb_plan_cache *plans;
    tb__arena arena;
} tb__disk;

/* Opens all files of the source, and finds every error that can be found without reading data: a rank's file or a
 * tensor in it that is missing, shapes and dtypes that contradict the spec, tensors that the spec does not mention,
 * tensors and files that would not be read (unless these are ignored). The spec must outlive it. */
tb_status tb__disk_open(const tb__spec *spec, const char *dir, bool ignore_unindexed, tb__disk **out);
void tb__disk_close(tb__disk *disk); /* accepts NULL */

/* The source, if it is a model; else NULL. */
const tb__checkpoint *tb__disk_model(const tb__disk *disk);

/* The files of ranks, if the source is not a model; else NULL. */
const tb__rank_files *tb__disk_rank_files(const tb__disk *disk);

/* Bytes of data in the file of a target rank. */
tb_status tb__disk_rank_nbytes(const tb__disk *disk, int32_t rank, int64_t *out);

typedef struct tb__disk_state {
    bool is_verifying;
    /* Of the target, in each of the two passes, and of the first of the replicas that are compared. Tensors with a
     * scale for more than a block count twice, because they are read once more before they are quantised. */
    int64_t bytes_done, bytes_total;
} tb__disk_state;

enum { TB__DISK_MIN_MEMORY = 16 << 20 };

typedef struct tb__disk_opts {
    int64_t memory;         /* what buffers and the process itself may take together; 0: 1 GiB */
    int threads;            /* 0: as many as there are cores, and memory for their buffers */
    int64_t band_bytes;     /* how much is brought together at a time, a multiple of 64; 0: 1 MiB, or what fits */
    tb__spec_files files;   /* what the target's are called; a Hugging Face model is of one rank */
    int64_t max_file_bytes; /* of the model's files; 0: no limit */
    bool sync;              /* all is on the disk before any file has its name */
    bool trust_replicas;    /* reads the first replica and does not compare the others with it */
    bool verify;            /* reads everything back and compares it with the source before any file gets its final
                             * name */
    tb__leftovers *removed; /* files of killed runs in the target's directory; may be NULL */
    /* Called at the beginning of each pass, and then regularly, by the thread that runs it; any status but TB_OK ends
     * the run with that status. */
    tb_status (*progress)(void *arg, const tb__disk_state *state);
    void *arg;
} tb__disk_opts;

/* Writes the target. Makes the directory if it is not there, and removes files that killed runs left in it;
 * TB_REFUSED if another run writes into it, or if it holds files of a checkpoint. Files have temporary names
 * until all are complete; after a failure nothing stays behind. Replicas of the source that differ are
 * TB_INVALID. */
tb_status tb__disk_run(const tb__disk *disk, const char *dir, const tb__disk_opts *opts);

#endif
