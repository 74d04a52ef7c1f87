/* Files of tensors in the safetensors format: a length (u64, little-endian), a JSON header of that length that says
 * what there is, and the data, tensor after tensor, row-major, without holes.
 *
 * What is read is checked completely before any of it is used; the message names the file and the tensor that is wrong.
 * Accepted is what the format's own library accepts, except for what tensorbus has no words for: more than 8 dims, and
 * names with a zero character. Tensors of dtypes that are not in tb_dtype (6-bit floats, the FNUZ kinds, complex
 * numbers) are bytes and the dtype's name. */
#ifndef TB_FORMAT_SAFETENSORS_H
#define TB_FORMAT_SAFETENSORS_H

#include "base/mem.h"
#include "base/text.h"
#include "format/file.h"

enum { TB__SAFETENSORS_LENGTH = 8, TB__SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000 };

typedef struct tb__safetensor {
    const char *name;
    tb_dtype dtype;            /* TB_DTYPE_NONE: one that is not known */
    const char *unknown_dtype; /* its name in files; NULL if dtype is known */
    tb_shape shape;
    int64_t offset, nbytes; /* in the data */
} tb__safetensor;

const char *tb__safetensor_dtype_name(const tb__safetensor *tensor);

/* The bytes that shape and dtype take. Those of an unknown dtype are what tensor->nbytes says, if that can be. */
tb_status tb__safetensor_size(const tb__safetensor *tensor, int64_t *nbytes);

typedef struct tb__safetensors_metadata {
    const char *key, *value;
} tb__safetensors_metadata;

/* ---- Headers (safetensors_parse.c, safetensors_format.c): no I/O ---------------------------------------------- */

typedef struct tb__safetensors_header {
    size_t count;
    const tb__safetensor *tensors;        /* as they lie in the data: by offset, without holes */
    const tb__safetensor *const *by_name; /* in the order of strcmp */
    size_t nmetadata;
    const tb__safetensors_metadata *metadata; /* "__metadata__", by key */
    int64_t data_nbytes;
    tb__arena arena; /* all of the above */
} tb__safetensors_header;

/* Reads the length from the first 8 bytes of a file that has file_nbytes. */
tb_status tb__safetensors_length(const void *bytes, int64_t file_nbytes, size_t *out);

/* `text` is what follows the length, and data_nbytes what there is in the file after it. */
tb_status tb__safetensors_parse(const char *text, size_t length, int64_t data_nbytes, tb__safetensors_header *out);
void tb__safetensors_header_fini(tb__safetensors_header *header);

/* NULL if it is not there. */
const tb__safetensor *tb__safetensors_find(const tb__safetensors_header *header, const char *name);

/* What `format` answers: the first bytes of the file, length included, and where the tensors go. */
typedef struct tb__safetensors_plan {
    char *head;
    size_t head_nbytes; /* a multiple of 8 */
    int64_t data_nbytes;
} tb__safetensors_plan;

/* Lays out tensors, of which name, dtype and shape are given, and nbytes if the dtype is unknown; writes offset and
 * nbytes into them. The order is that of the official library, the widest dtypes first, so that every tensor is aligned
 * to its elements; then by name. The bytes are that library's, too, for up to one metadata entry: it writes several in
 * an order that changes from run to run, here they are sorted. plan->head is to be freed by the caller. */
tb_status tb__safetensors_format(tb__safetensor *tensors, size_t count, const tb__safetensors_metadata *metadata,
                                 size_t nmetadata, tb__safetensors_plan *plan);

/* Adds a JSON string as the official library writes it. */
void tb__safetensors_add_string(tb__text *out, const char *string);

/* ---- Reading files (safetensors.c) --------------------------------------------------------------------------- */

/* A file that is open for reading. What it has may be read from several threads at once. */
typedef struct tb__safetensors {
    tb__safetensors_header header;
    char *path;
    int64_t data_start; /* in the file */
    int fd;
} tb__safetensors;

tb_status tb__safetensors_open(const char *path, tb__safetensors **out);
void tb__safetensors_close(tb__safetensors *file); /* accepts NULL */

/* Copies a part of a tensor to memory of the caller. Whatever happens to the file meanwhile, the worst is a TB_IO. */
tb_status tb__safetensors_read(const tb__safetensors *file, const tb__safetensor *tensor, int64_t offset, size_t nbytes,
                               void *buffer);

/* ---- Writing files (safetensors_writer.c) -------------------------------------------------------------------- */

/* A file that is being written, under a temporary name in the same directory until it is committed. */
typedef struct tb__safetensors_writer tb__safetensors_writer;

/* Of the tensors and metadata, which are copied, offset is not looked at, and nbytes only if the dtype is unknown. */
tb_status tb__safetensors_create(const char *path, const tb__safetensor *tensors, size_t count,
                                 const tb__safetensors_metadata *metadata, size_t nmetadata,
                                 tb__safetensors_writer **out);

/* Writes a part of tensor i of those given. Parts may come in any order and from any threads, but each byte once. */
tb_status tb__safetensors_write(tb__safetensors_writer *writer, size_t i, int64_t offset, const void *bytes,
                                size_t nbytes);

/* Reads a part of tensor i as the file has it now. */
tb_status tb__safetensors_read_back(const tb__safetensors_writer *writer, size_t i, int64_t offset, size_t nbytes,
                                    void *buffer);

/* Checks that all was written and hands it to the system, or with `sync` to the disk; then commit can hardly fail. For
 * callers that commit several files together. */
tb_status tb__safetensors_finish(tb__safetensors_writer *writer, bool sync);

/* Gives the file its name; finishes it first, if that was not done. */
tb_status tb__safetensors_commit(tb__safetensors_writer *writer);

/* Abandons what was not committed: nothing stays behind. Accepts NULL. */
void tb__safetensors_writer_destroy(tb__safetensors_writer *writer);

#endif
