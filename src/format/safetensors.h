/* Files of tensors in the safetensors format: a length (u64, little-endian), a JSON header of that length, which
 * describes the tensors, and the data, tensor after tensor, row-major, without holes.
 *
 * A header is checked completely before any of it is used; error messages name the file and the tensor. Accepts every
 * file that the format's own library accepts, except tensors with more than 8 dims, and names with a zero character.
 * Tensors of dtypes that are not in tb_dtype (6-bit floats, the FNUZ kinds, complex numbers) are bytes and the dtype's
 * name. */
#ifndef TB_FORMAT_SAFETENSORS_H
#define TB_FORMAT_SAFETENSORS_H

#include "base/mem.h"
#include "base/text.h"
#include "format/file.h"

enum { TB__SAFETENSORS_LENGTH = 8, TB__SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000 };

typedef struct tb__safetensor {
    const char *name;
    tb_dtype dtype;            /* TB_DTYPE_NONE: unknown */
    const char *unknown_dtype; /* its name in files; NULL if dtype is known */
    tb_shape shape;
    int64_t offset, nbytes; /* in the data */
} tb__safetensor;

const char *tb__safetensor_dtype_name(const tb__safetensor *tensor);

/* The size by shape and dtype; for an unknown dtype tensor->nbytes, if that is possible. */
tb_status tb__safetensor_size(const tb__safetensor *tensor, int64_t *nbytes);

typedef struct tb__safetensors_metadata {
    const char *key, *value;
} tb__safetensors_metadata;

/* ---- Headers (safetensors_parse.c, safetensors_format.c): no I/O ---------------------------------------------- */

typedef struct tb__safetensors_header {
    size_t count;
    const tb__safetensor *tensors;        /* by offset in the data, without holes */
    const tb__safetensor *const *by_name; /* in the order of strcmp */
    size_t nmetadata;
    const tb__safetensors_metadata *metadata; /* "__metadata__", by key */
    int64_t data_nbytes;
    tb__arena arena; /* all of the above */
} tb__safetensors_header;

/* Reads the length from the first 8 bytes of a file that has file_nbytes. */
tb_status tb__safetensors_length(const void *bytes, int64_t file_nbytes, size_t *out);

/* `text` is the header after the length; data_nbytes is the rest of the file. */
tb_status tb__safetensors_parse(const char *text, size_t length, int64_t data_nbytes, tb__safetensors_header *out);
void tb__safetensors_header_fini(tb__safetensors_header *header);

/* NULL if there is none. */
const tb__safetensor *tb__safetensors_find(const tb__safetensors_header *header, const char *name);

/* The result of `format`: the first bytes of the file, length included, and the tensors' offsets. */
typedef struct tb__safetensors_plan {
    char *head;
    size_t head_nbytes; /* a multiple of 8 */
    int64_t data_nbytes;
} tb__safetensors_plan;

/* Lays out tensors with given name, dtype and shape, and nbytes if the dtype is unknown; writes offset and nbytes into
 * them. The order is that of the official library, the widest dtypes first, so that every tensor is aligned to its
 * elements; then by name. The bytes equal that library's, too, for up to one metadata entry: it writes several in an
 * order that changes from run to run, while here they are sorted. plan->head is to be freed by the caller. */
tb_status tb__safetensors_format(tb__safetensor *tensors, size_t count, const tb__safetensors_metadata *metadata,
                                 size_t nmetadata, tb__safetensors_plan *plan);

/* Adds a JSON string as the official library writes it. */
void tb__safetensors_add_string(tb__text *out, const char *string);

/* ---- Reading files (safetensors.c) --------------------------------------------------------------------------- */

/* A file that is open for reading. Several threads may read from it at once. */
typedef struct tb__safetensors {
    tb__safetensors_header header;
    char *path;
    int64_t data_start; /* in the file */
    int fd;
} tb__safetensors;

tb_status tb__safetensors_open(const char *path, tb__safetensors **out);
void tb__safetensors_close(tb__safetensors *file); /* accepts NULL */

/* Copies a part of a tensor to the caller's memory. Changes to the file meanwhile cause TB_IO at worst. */
tb_status tb__safetensors_read(const tb__safetensors *file, const tb__safetensor *tensor, int64_t offset, size_t nbytes,
                               void *buffer);

/* ---- Writing files (safetensors_writer.c) -------------------------------------------------------------------- */

/* A file that is being written, under a temporary name in the same directory until it is committed. */
typedef struct tb__safetensors_writer tb__safetensors_writer;

/* Copies the tensors and metadata. Ignores offset, and nbytes unless the dtype is unknown. */
tb_status tb__safetensors_create(const char *path, const tb__safetensor *tensors, size_t count,
                                 const tb__safetensors_metadata *metadata, size_t nmetadata,
                                 tb__safetensors_writer **out);

/* Writes a part of tensor i. Parts may come in any order and from any threads, but each byte once. */
tb_status tb__safetensors_write(tb__safetensors_writer *writer, size_t i, int64_t offset, const void *bytes,
                                size_t nbytes);

/* Reads a part of tensor i from the file as written so far. */
tb_status tb__safetensors_read_back(const tb__safetensors_writer *writer, size_t i, int64_t offset, size_t nbytes,
                                    void *buffer);

/* Checks that all was written, and flushes it to the system, or with `sync` to the disk; then commit is unlikely to
 * fail. For callers that commit several files together. */
tb_status tb__safetensors_finish(tb__safetensors_writer *writer, bool sync);

/* Gives the file its final name; finishes it first if necessary. */
tb_status tb__safetensors_commit(tb__safetensors_writer *writer);

/* Abandons what was not committed: nothing stays behind. Accepts NULL. */
void tb__safetensors_writer_destroy(tb__safetensors_writer *writer);

#endif
