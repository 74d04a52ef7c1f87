/* Shared by the files that implement reshard/disk.h. */
#ifndef TB_RESHARD_DISK_INSIDE_H
#define TB_RESHARD_DISK_INSIDE_H

#include "reshard/disk.h"

#include <stdatomic.h>

/* ---- The source (disk_input.c) ------------------------------------------------------------------------------- */

typedef struct tb__disk_input tb__disk_input;

/* A rank's tensor in a file. */
typedef struct tb__disk_source {
    const tb__safetensors *file;
    const tb__safetensor *tensor; /* NULL: the file does not have it */
} tb__disk_source;

/* `ranks`, ascending, are those that the spec wants. Names are those of the whole model, which the mesh tells. */
tb_status tb__disk_input_open(const char *dir, const tb__spec_mesh *mesh, const int32_t *ranks, size_t nranks,
                              bool ignore_unindexed, tb__disk_input **out);
void tb__disk_input_close(tb__disk_input *input);

const tb__checkpoint *tb__disk_input_model(const tb__disk_input *input); /* NULL: files of ranks */
const tb__rank_files *tb__disk_input_ranks(const tb__disk_input *input); /* none of a model */

/* In a model, every rank has every tensor. */
tb__disk_source tb__disk_input_find(const tb__disk_input *input, int32_t rank, const char *name);

/* All names, ascending, each once; the array is to be freed by the caller. */
tb_status tb__disk_input_names(const tb__disk_input *input, const char ***names, size_t *count);

/* Of all files with this name, the first one whose rank is not in the layout; NULL: there is none. */
const char *tb__disk_input_stranger(const tb__disk_input *input, const tb_layout *layout, const char *name);

/* The first file, whose metadata is copied to the target; NULL if there is none. */
const tb__safetensors *tb__disk_input_first(const tb__disk_input *input);

/* ---- Quantised tensors in files (disk_quant.c) ---------------------------------------------------------------- */

/* The tensors of a file that store one tensor. */
enum { TB__DISK_DATA, TB__DISK_SCALES, TB__DISK_SCALE, TB__DISK_SLOTS };

/* Names, in the arena, for a tensor of this name. */
tb_status tb__disk_quant_init(tb__disk_quant *quant, const tb__quant_format *format, const char *name,
                              tb__arena *arena);

/* Whether the name is that of a scale tensor, if its first `kept` bytes are the name of a tensor of this format. */
bool tb__disk_quant_is_scale(const tb__quant_format *format, const char *name, size_t kept);

/* Checks that the dims and the dtype can be quantised. */
tb_status tb__disk_quant_check(const tb__quant_format *format, const tb_shape *shape, tb_dtype dtype);

/* Names, dtypes and shapes of the file's tensors for a part; missing ones have no name. `dtype` is that of data that is
 * not quantised. */
tb_status tb__disk_quant_tensors(const tb__disk_quant *quant, const char *name, tb_dtype dtype, const tb_shape *part,
                                 tb__safetensor out[TB__DISK_SLOTS]);

/* The inverse: the shape of the part whose data has this shape in the file. */
tb_shape tb__disk_quant_part(const tb__disk_quant *quant, const tb_shape *data);

/* A part is a stack of matrices, each of which has its own blocks. */
int64_t tb__disk_matrix_rows(const tb_shape *part);

/* Rows that share scales, or their place in memory. */
int64_t tb__disk_quant_rows(const tb__quant_format *format);

/* Gives the tensor its place among the amax, with its group if it has one. */
tb_status tb__disk_take_amax(tb__disk *disk, tb__disk_tensor *tensor);

/* Which amax the part of a target rank belongs to. Of ranks that have the same part one is looked at. */
size_t tb__disk_amax_of(const tb__disk_tensor *tensor, int32_t rank);
bool tb__disk_is_looked_at(const tb__disk_tensor *tensor, int32_t rank);

/* ---- Parts (disk_bands.c) ------------------------------------------------------------------------------------ */

/* The tensors in the file of a target rank that store its part. */
tb_status tb__disk_part_tensors(const tb__disk_tensor *tensor, int32_t rank, tb__safetensor out[TB__DISK_SLOTS]);

/* The division of a part into bands, which are contiguous: dims before `dim` are stepped through, `rows` indices of
 * `dim` make a band, and later dims are whole. If scales cover several rows, bands begin with them. */
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

/* The least size of a band of a quantised tensor, a multiple of 64; 0 for others. */
int64_t tb__disk_least_band(const tb__disk_tensor *tensor);

/* A band, quantised. */
typedef struct tb__disk_quantised {
    const unsigned char *data, *scales;
    size_t data_nbytes, scale_nbytes;
    int64_t data_offset, scale_offset; /* bytes, in the part's data and among its scales */
} tb__disk_quantised;

/* `to` is as large as a band's buffer, and gets data and scales. `scale` is that of the whole part, if it has one. */
tb_status tb__disk_quantise(const tb__disk_tensor *tensor, const tb__disk_bands *bands, const tb__disk_band *band,
                            float scale, const void *from, unsigned char *to, tb__disk_quantised *out);

/* The largest magnitude of a band that will be quantised. */
tb_status tb__disk_band_amax(const tb__disk_tensor *tensor, const tb__disk_bands *bands, const tb__disk_band *band,
                             const void *from, float *out);

/* Bytes of the spec's constants in the file of each target rank. */
int64_t tb__disk_constants_nbytes(const tb__disk *disk);

/* ---- The target (disk_output.c) ------------------------------------------------------------------------------ */

typedef struct tb__disk_output tb__disk_output;

tb_status tb__disk_output_create(const tb__disk *disk, const char *dir, const tb__disk_opts *opts,
                                 tb__disk_output **out);

/* Write and read parts of a rank's tensor. A slot is TB__DISK_SLOTS times its index, plus TB__DISK_SCALES and so on;
 * any thread may call these. Written data can be read back until it is committed. */
tb_status tb__disk_output_write(tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, const void *bytes,
                                size_t nbytes);
tb_status tb__disk_output_read(const tb__disk_output *output, int32_t rank, size_t slot, int64_t offset, void *buffer,
                               size_t nbytes);
tb_status tb__disk_output_commit(tb__disk_output *output, bool sync);
void tb__disk_output_destroy(tb__disk_output *output); /* removes uncommitted files; accepts NULL */

/* ---- Quantised sources (disk_dequant.c) ----------------------------------------------------------------------- */

/* A source rank's tensor. */
typedef struct tb__disk_origin {
    tb__disk_source data, scales; /* scales: of blocks, if it has them */
    float scale;                  /* of the whole part, if it has one */
    tb_shape shape;               /* of the part */
} tb__disk_origin;

tb_status tb__disk_origin_find(const tb__disk_input *input, const tb__disk_stored *tensor, int32_t rank,
                               tb__disk_origin *out);

/* How much of a box can be brought to nbytes of memory at a time, in each dim; false: nothing. */
bool tb__disk_dequant_step(const tb__disk_stored *tensor, const int64_t *len, int64_t nbytes, int64_t *step);

/* Reads such a box into `stage`, as numbers of the tensor's dtype that *out points to; stride is in elements. */
tb_status tb__disk_dequantise(const tb__disk_stored *tensor, const tb__disk_origin *origin, const int64_t *start,
                              const int64_t *len, unsigned char *stage, size_t nbytes, const void **out,
                              int64_t *stride);

/* ---- Pieces (disk_gather.c, disk_verify.c) ------------------------------------------------------------------- */

/* Elements on their way from the local tensors of some source ranks, which are combined, to that of a target rank. On
 * both sides element [i, j, ...] is at the offset plus i, j, ... times the strides, all in elements. */
typedef struct tb__disk_piece {
    const tb__disk_stored *from;
    uint32_t nsources; /* 0: zeros */
    const int32_t *sources;
    tb_dtype wire_dtype;
    tb_reduce_op op; /* of those that are combined */
    uint64_t avg_divisor;
    int ndim;
    int64_t len[TB_MAX_DIMS];
    int64_t src, src_stride[TB_MAX_DIMS];
    int64_t dst, dst_stride[TB_MAX_DIMS];
} tb__disk_piece;

/* Those of a part, by where they begin in it. */
typedef struct tb__disk_pieces {
    TB_VEC(tb__disk_piece) list;
    TB_VEC(int64_t) reach; /* the highest end of those up to each */
} tb__disk_pieces;

/* Sorts the piece's dims by their strides, slowest first, and joins those that are one dim on both sides. */
void tb__disk_piece_join(tb__disk_piece *piece, bool by_target);

/* The pieces that a target rank's part of the tensor is made of: by the plan, or worked out from the layouts alone, for
 * verifying; then the plan has no say in it. Dims are sorted for the target. */
tb_status tb__disk_list_pieces(const tb__disk_tensor *tensor, int32_t rank, bool by_plan, tb_routes *routes,
                               tb__disk_pieces *out, tb__arena *arena);

/* A box of what both sides have, as a plan or the layouts give it: starts are in either rank's share of that. */
typedef struct tb__disk_box {
    uint32_t nsources;
    const int32_t *sources;
    int64_t len[TB_MAX_DIMS], src[TB_MAX_DIMS], dst[TB_MAX_DIMS];
} tb__disk_box;

typedef TB_VEC(tb__disk_box) tb__disk_boxes;

tb_status tb__disk_layout_boxes(const tb__disk_part *part, int32_t rank, tb__disk_boxes *out, tb__arena *arena);

/* One thread's memory for bringing boxes together. */
typedef struct tb__disk_gather {
    const tb__disk_input *input;
    unsigned char *stage; /* data before it is cast, combined or moved apart */
    size_t stage_nbytes;
    TB_VEC(tb__disk_origin) sources;
    TB_VEC(const void *) from;
    TB_VEC(struct tb__disk_strides { int64_t dim[TB_MAX_DIMS]; }) strides;
} tb__disk_gather;

void tb__disk_gather_fini(tb__disk_gather *gather); /* not the stage */

/* Brings a band of a part together; `to` has room for it, in the tensor's band_dtype. */
tb_status tb__disk_gather_band(tb__disk_gather *gather, const tb__disk_tensor *tensor, const tb__disk_pieces *pieces,
                               const tb__disk_band *band, unsigned char *to);

/* Brings the piece to memory of this dtype, where its element 0 goes. */
tb_status tb__disk_gather_piece(tb__disk_gather *gather, const tb__disk_piece *piece, void *to, tb_dtype dtype);

/* ---- Parts of the target's tensors (disk_parts.c) -------------------------------------------------------------- */

/* The grid of a layout over a shape, and the layout itself, which the disk keeps. */
tb_status tb__disk_grid(tb__disk *disk, const tb_layout *layout, const tb_shape *shape, tb__side side,
                        const tb__grid **out);
void tb__disk_free_grids(tb__disk *disk);

/* The views of a part whose stored tensor is known, and the shape of what both sides have. */
tb_status tb__disk_part_shape(tb__disk *disk, tb__disk_part *part);

/* The shape of the tensor that is made of parts: what their rules say, or what their views tell. */
tb_status tb__disk_target_shape(const tb__disk_part *parts, size_t count, tb_shape *out);
tb_status tb__disk_part_plan(tb__disk *disk, const tb__disk_tensor *tensor, tb__disk_part *part);

/* That the parts make up the tensor, each element once, but for padding. */
tb_status tb__disk_check_cover(tb__disk_tensor *tensor);

/* ---- Tensors of the source (disk_stored.c) --------------------------------------------------------------------- */

/* Checks what the files have of it against the rule; sentences name the file and the tensor. */
tb_status tb__disk_find_stored(tb__disk *disk, const char *name, const tb__spec_rule *rule, tb__disk_stored **out);

bool tb__disk_same_shape(const tb_shape *a, const tb_shape *b);
typedef struct tb__shape_text {
    char text[TB_MAX_DIMS * 21 + 8];
} tb__shape_text;

tb__shape_text tb__disk_shape_text(const tb_shape *shape); /* "2,3", "a scalar" */

/* ---- Replicas (disk_replicas.c) ------------------------------------------------------------------------------ */

/* A comparison of a source rank's data: bytes of one of its tensors with those of its copies, or the elements that it
 * shares with other parts. All copies of a tensor come before all shared elements. */
typedef struct tb__disk_comparison {
    bool is_shared;
    int32_t source;        /* index in the source mesh */
    int slot;              /* of copies */
    int64_t first, nbytes; /* of the slot */
} tb__disk_comparison;

/* Fills in replica_nbytes and shared_nbytes of a tensor that has its grid. */
void tb__disk_count_replicas(const tb__disk_input *input, tb__disk_stored *tensor);

/* The next one after *at, which is all zeros before the first; false: there is none. */
bool tb__disk_next_comparison(const tb__disk_input *input, const tb__disk_stored *tensor, tb__disk_comparison *at,
                              tb__disk_comparison *out);

/* What one thread compares with. */
typedef struct tb__disk_comparer {
    tb__disk_gather *gather;
    unsigned char *one, *other;
    size_t nbytes; /* of each of these */
    const atomic_bool *is_stopped;
    atomic_int_fast64_t *bytes_done;
} tb__disk_comparer;

/* TB_INVALID, with a message that names the tensor and the ranks, if they differ. */
tb_status tb__disk_compare(const tb__disk_comparer *comparer, const tb__disk_stored *tensor,
                           const tb__disk_comparison *comparison);

#endif
