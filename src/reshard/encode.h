/* Tensors that a side keeps quantised: data and scales in the program's memory. Rows of the canonical tensor are rows
 * of the storage, whole, in any order that a view makes of them; the storage is a stack of matrices, each quantised
 * separately; a rank's storage may hold several tensors (q, k and v; w1 and w3 of all experts). */
#ifndef TB_RESHARD_ENCODE_H
#define TB_RESHARD_ENCODE_H

#include "device/move.h"
#include "tensorbus/tensorbus.h"

typedef struct tb__encoding {
    tb__quant_format format;
    bool by_sender; /* mxfp8: the sending side quantises */
} tb__encoding;

/* "mxfp8", "mxfp8(floor,swizzled,sender)", "fp8_block(power_of_two)", "fp8_tensor", "nvfp4(swizzled)". */
tb_status tb__encoding_parse(const char *text, tb__encoding *out);
bool tb__encoding_is_global(const tb__encoding *encoding); /* it has one scale for a whole tensor */

/* The sizes of a rank's storage of this shape, as a stack of matrices. */
typedef struct tb__encoded_size {
    int64_t columns, matrix_rows, matrices; /* matrices is 0 if it is empty */
    tb__quant_size matrix;
    size_t data_nbytes, scales_nbytes, scale_nbytes; /* of all of them; scale_nbytes: of the global scale */
} tb__encoded_size;

tb_status tb__encoded_measure(const tb__encoding *encoding, const tb_shape *stored, tb__encoded_size *out);

/* One rank's part of an encoded tensor. */
typedef struct tb__encoded {
    tb__encoding encoding;
    char *data, *scales;
    float *scale; /* of a global encoding */
    int64_t columns, matrix_rows, matrices;
    tb__quant_size size; /* of a matrix */
    tb_binding part;     /* the canonical tensor's place in the data */
    int64_t rows;        /* of the canonical tensor's part */
} tb__encoded;

/* `stored` is the shape of the rank's storage, row-major from `data` on; `part` is the result of the view. */
tb_status tb__encoded_init(const tb__encoding *encoding, const tb_shape *stored, void *data, void *scales, float *scale,
                           const tb_binding *part, tb__encoded *out);

/* Rows of a box of the part that are consecutive in one matrix. */
typedef struct tb__encoded_run {
    int64_t first, count; /* of the box */
    int64_t matrix, row;  /* where they begin in the storage */
} tb__encoded_run;

/* The run that begins at row i of the box's `rows`. `start` is NULL for the whole part. */
tb__encoded_run tb__encoded_next_run(const tb__encoded *encoded, int ndim, const int64_t *start, const int64_t *len,
                                     int64_t i, int64_t rows);

/* Runs of bytes that the part has, of its data and of its scales: their offsets. Ends with the first failure. */
typedef tb_status tb__encoded_visit(void *arg, bool is_scale, size_t offset, size_t nbytes);
tb_status tb__encoded_each(const tb__encoded *encoded, tb__encoded_visit *visit, void *arg);

/* Rows of dim 0 that can be quantised apart from the others: bands begin at its multiples. */
int64_t tb__encoded_band(const tb__quant_format *format, const tb_shape *part);
/* Whether bands of so many indices of dim 0 end with blocks of their matrices. */
bool tb__encoded_takes_bands(const tb__encoded *encoded, int64_t band);

/* ---- Moves (encode_moves.c) ---- */

/* Quantises rows first .. first+rows-1 of the part, which are contiguous at `from`. A global scale is read from
 * `scale`, in host memory, when the moves are run. */
tb_status tb__encoded_list_write(const tb__encoded *encoded, int64_t first, int64_t rows, const void *from,
                                 tb_dtype dtype, const float *scale, const char *name, tb__move_list *out);

/* A box of the part with whole rows, stored as `from`: its last dim has stride 1, and its base is an address or, with a
 * mapping, relative to that. Quantises the box, which begins at `start` of the part. */
bool tb__encoded_takes_box(const tb__encoded *encoded, const int64_t *start, const tb_binding *from);
tb_status tb__encoded_list_write_box(const tb__encoded *encoded, const int64_t *start, const tb_binding *from,
                                     tb__mapping *mapping, const float *scale, const char *name, tb__move_list *out);
/* Raises *amax to the largest magnitude in the box, which begins at `start` of a part of this shape. */
tb_status tb__encoded_list_amax(const tb_shape *part, const int64_t *start, const tb_binding *from,
                                tb__mapping *mapping, float *amax, const char *name, tb__move_list *out);

/* Copies the global scale from host memory to the tensor's. */
tb_status tb__encoded_list_scale(const float *from, float *to, tb__move_list *out);

/* Copies data and scales of the part to the same part of another storage of the same shape. */
tb_status tb__encoded_list_copy(const tb__encoded *from, const tb__encoded *to, tb__move_list *out);

/* Lists the moves that write the numbers of a box of the part, row-major, into the buffer of a run from `offset` on. */
tb_status tb__encoded_list_read(const tb__encoded *encoded, int ndim, const int64_t *start, const int64_t *len,
                                int64_t offset, tb_dtype dtype, const char *name, tb__move_list *out);

/* The wire form of mxfp8: a box's data, row-major, and then its scales, a row for each of its rows. Boxes must have
 * whole blocks of the target's part; else they are refused. */
int64_t tb__mxfp8_wire_nbytes(int ndim, const int64_t *len);
/* `from` is the box, whose last dim has stride 1, and begins at `first_column` of the target; its base is an address
 * or, with a mapping, relative to that. The wire form is in the buffer of a run, from `offset` on. */
tb_status tb__mxfp8_list_pack(const tb__quant_format *format, const tb_binding *from, tb__mapping *mapping,
                              int64_t first_column, int64_t offset, const char *name, tb__move_list *out);
tb_status tb__mxfp8_list_unpack(const tb__encoded *to, int ndim, const int64_t *start, const int64_t *len,
                                int64_t offset, tb__move_list *out);

#endif
