/* What the parts of reshard/disk.h share. */
#ifndef TB_RESHARD_DISK_INSIDE_H
#define TB_RESHARD_DISK_INSIDE_H

#include "reshard/disk.h"

/* ---- The source (disk_input.c) ------------------------------------------------------------------------------- */

typedef struct tb__disk_input tb__disk_input;

/* Where a rank has a tensor. */
typedef struct tb__disk_source {
    const tb__safetensors *file;
    const tb__safetensor *tensor; /* NULL: the file does not have it */
} tb__disk_source;

/* `ranks`, ascending, are those that the spec wants. */
tb_status tb__disk_input_open(const char *dir, const int32_t *ranks, size_t nranks, tb__disk_input **out);
void tb__disk_input_close(tb__disk_input *input);

bool tb__disk_input_is_model(const tb__disk_input *input);

/* Of a model, every rank has everything. */
tb__disk_source tb__disk_input_find(const tb__disk_input *input, int32_t rank, const char *name);

/* All names, ascending, each once; the array is to be freed by the caller. */
tb_status tb__disk_input_names(const tb__disk_input *input, const char ***names, size_t *count);

/* Of all files that have the name, the first whose rank is not in the layout; NULL: there is none. */
const char *tb__disk_input_stranger(const tb__disk_input *input, const tb_layout *layout, const char *name);

/* The first file, whose notes the target gets; NULL if there is none. */
const tb__safetensors *tb__disk_input_first(const tb__disk_input *input);

/* ---- Parts (disk_bands.c) ------------------------------------------------------------------------------------ */

/* What the file of a target rank gets for a tensor: the data, and scales if it is quantised. */
tb_status tb__disk_part_tensors(const tb__disk_tensor *tensor, int32_t rank, tb__safetensor out[2], size_t *count);

/* How a part is cut into bands, which are contiguous: the dims before `dim` are stepped through, `rows` indices of
 * `dim` make a band, and those after it are whole. Where scales cover several rows, bands begin with them. */
typedef struct tb__disk_bands {
    tb_shape shape; /* of the part */
    int64_t stride[TB_MAX_DIMS];
    int dim;
    int64_t rows, per_outer, count;
} tb__disk_bands;

void tb__disk_bands_init(tb__disk_bands *bands, const tb__disk_tensor *tensor, const tb_shape *shape,
                         int64_t band_bytes);

/* The box of a band. */
typedef struct tb__disk_band {
    int64_t start[TB_MAX_DIMS], len[TB_MAX_DIMS];
    int64_t first, nelements; /* in the part, row-major */
} tb__disk_band;

void tb__disk_bands_at(const tb__disk_bands *bands, int64_t i, tb__disk_band *out);

/* What a band of a tensor that is quantised takes at least, a multiple of 64; 0 for others. */
int64_t tb__disk_least_band(const tb__disk_tensor *tensor);

/* A band, quantised. */
typedef struct tb__disk_quantised {
    size_t data_nbytes, scale_nbytes;
    int64_t scale_offset; /* bytes, among the part's scales */
} tb__disk_quantised;

/* `to` is as large as a band's buffer; the data comes first and then, from the next multiple of 64 on, the scales. */
tb_status tb__disk_quantise(const tb__disk_tensor *tensor, const tb__disk_bands *bands, const tb__disk_band *band,
                            const void *from, unsigned char *to, tb__disk_quantised *out);

/* ---- The target (disk_output.c) ------------------------------------------------------------------------------ */

typedef struct tb__disk_output tb__disk_output;

tb_status tb__disk_output_create(const tb__disk *disk, const char *dir, const tb__disk_opts *opts,
                                 tb__disk_output **out);

/* Parts of a rank's tensor, whose slot is 2 * its index, or that plus 1 for its scales; any thread may call these. What
 * was written can be read back until it is committed. */
tb_status tb__disk_output_write(tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, const void *bytes,
                                size_t nbytes);
tb_status tb__disk_output_read(const tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, void *buffer,
                               size_t nbytes);
tb_status tb__disk_output_commit(tb__disk_output *output, bool sync);
void tb__disk_output_destroy(tb__disk_output *output); /* what was not committed goes away; accepts NULL */

/* ---- Pieces (disk_gather.c, disk_verify.c) ------------------------------------------------------------------- */

/* A box on its way from the local tensors of some source ranks, which are combined, to that of a target rank. */
typedef struct tb__disk_piece {
    uint32_t nsources; /* 0: zeros */
    const int32_t *sources;
    int64_t len[TB_MAX_DIMS], src[TB_MAX_DIMS], dst[TB_MAX_DIMS];
} tb__disk_piece;

typedef TB_VEC(tb__disk_piece) tb__disk_pieces;

/* One thread's memory for bringing boxes together. */
typedef struct tb__disk_gather {
    const tb__disk_input *input;
    unsigned char *stage; /* what is read before it is cast, combined or moved apart */
    size_t stage_nbytes;
    TB_VEC(tb__disk_source) sources;
    TB_VEC(const void *) from;
    TB_VEC(struct tb__disk_strides { int64_t dim[TB_MAX_DIMS]; }) strides;
} tb__disk_gather;

void tb__disk_gather_fini(tb__disk_gather *gather); /* not the stage */

/* Brings the piece to `to`, where element 0 of the piece goes; dst_stride is in elements. */
tb_status tb__disk_gather_piece(tb__disk_gather *gather, const tb__disk_tensor *tensor, const tb__disk_piece *piece,
                                void *to, const int64_t *dst_stride);

/* What a target rank's part is made of, worked out from the layouts alone: the plan has no say in it. For verifying. */
tb_status tb__disk_layout_pieces(const tb__disk_tensor *tensor, int32_t rank, tb__disk_pieces *out, tb__arena *arena);

#endif
