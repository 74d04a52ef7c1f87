/* Two checkpoints, or a checkpoint and a list of hashes, compared by hashes of their tensors, for `tensorbus verify`.
 * Files are mapped and hashed in place, by several threads. */
#ifndef TB_TOOLS_HASHES_H
#define TB_TOOLS_HASHES_H

#include "format/checkpoint.h"
#include "reshard/disk.h"

/* Elements that have a hash of their own in the list of a model, in row-major order. */
enum { HASH_TILE = 1 << 20 };

/* A tensor, or a part of it, in a file. */
typedef struct hash_part {
    int32_t rank;            /* TB_NO_RANK: of a model, the whole tensor */
    const tb_layout *layout; /* NULL if it is the whole tensor */
    tb_binding binding;      /* in the mapped file */
    int32_t replica;         /* the parts of one replica make up the tensor */
} hash_part;

typedef struct hash_tensor {
    const char *name, *dtype_name;
    tb_dtype dtype; /* if tensorbus does not know its dtype: u8, and one dim of bytes */
    tb_shape shape; /* global, as it is hashed */
    tb_shape shown; /* as in the file */
    size_t nparts;
    hash_part *parts; /* NULL: it comes from a list */
    int32_t nreplicas;
    uint64_t *hash; /* of each replica */
    size_t ntiles;
    uint64_t *tiles; /* NULL: not known */
} hash_tensor;

typedef struct hash_side {
    const char *path;
    tb__checkpoint *model; /* or */
    tb__rank_files ranks;
    size_t nfiles;
    tb__safetensors **files;
    void **maps;
    tb__disk *disk; /* of rank files whose spec's `src` it is */
    size_t count;
    hash_tensor *tensors; /* by name */
    tb__arena arena;
} hash_side;

/* Opens a checkpoint. For files of ranks the spec defines the tensors of each: its `src`, or, for a second checkpoint,
 * its `dst`, with the shapes from `first`. The spec, and `first`, must outlive it. */
tb_status hash_side_open(hash_side *side, const char *path, const tb__spec *spec, const hash_side *first);

/* A list of hashes, as tool_add_hashes writes it; "-": from standard input. */
tb_status hash_side_load(hash_side *side, const char *path);
void hash_side_close(hash_side *side);

/* Fills in the hashes. threads 0: as many as there are cores. */
tb_status hash_side_compute(hash_side *side, int threads);

const hash_tensor *hash_side_find(const hash_side *side, const char *name);

void tool_add_hashes(tb__text *out, const hash_side *side);

/* Where two tensors with one dtype and shape differ. */
typedef struct hash_difference {
    int32_t rank_a, rank_b;
    int64_t start[TB_MAX_DIMS], len[TB_MAX_DIMS]; /* the smallest box with all of it */
    int64_t count, of;                            /* elements that differ, and that were compared */
} hash_difference;

/* Compares element by element, file by file; to be freed by the caller. Empty if either tensor comes from a list. */
tb_status hash_compare(const hash_tensor *a, const hash_tensor *b, hash_difference **out, size_t *count);

#endif
