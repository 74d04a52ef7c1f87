/* Reads the header of a safetensors file, and believes none of it. */
#include "base/dtype.h"
#include "format/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

tb_status tb__safetensors_length(const void *bytes, int64_t file_nbytes, size_t *out) {
    const unsigned char *byte = bytes;
    if (file_nbytes < TB__SAFETENSORS_LENGTH)
        return tb__fail(TB_INVALID, "it has %" PRId64 " bytes, too few for a safetensors file", file_nbytes);
    uint64_t length = 0;
    for (int i = TB__SAFETENSORS_LENGTH - 1; i >= 0; i--)
        length = length << 8 | byte[i];
    if (length > TB__SAFETENSORS_MAX_HEADER)
        return tb__fail(TB_INVALID, "a header of %" PRIu64 " bytes is beyond the format's limit of %d bytes", length,
                        TB__SAFETENSORS_MAX_HEADER);
    if ((int64_t)length > file_nbytes - TB__SAFETENSORS_LENGTH)
        return tb__fail(TB_INVALID, "the header should have %" PRIu64 " bytes, but the file has only %" PRId64, length,
                        file_nbytes);
    *out = (size_t)length;
    return TB_OK;
}

/* A word as the format has them for dtypes: "F8_E4M3FNUZ". */
static bool is_dtype_name(const char *name) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";
    size_t length = strlen(name);
    return name[0] >= 'A' && name[0] <= 'Z' && length <= 40 && strspn(name, letters) == length;
}

static tb_status read_dtype(const json_t *json, tb__arena *arena, tb__safetensor *out) {
    const char *name = json_string_value(json);
    if (!name)
        return tb__fail(TB_INVALID, "'dtype' is missing or not a string");
    for (tb_dtype d = TB_DTYPE_NONE + 1; d < TB_DTYPE_COUNT; d++) {
        if (strcmp(name, tb__dtype_safetensors(d)) == 0) {
            out->dtype = d;
            return TB_OK;
        }
    }
    if (!is_dtype_name(name))
        return tb__fail(TB_INVALID, "dtype '%.40s' is not one that the format may have", name);
    out->unknown_dtype = tb__arena_strdup(arena, name);
    return out->unknown_dtype ? TB_OK : TB_NO_MEMORY;
}

static tb_status read_shape(const json_t *json, tb_shape *out) {
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "'shape' is missing or not an array");
    size_t ndim = json_array_size(json);
    if (ndim > TB_MAX_DIMS)
        return tb__fail(TB_TOO_BIG, "it has %zu dims; tensorbus handles %d", ndim, TB_MAX_DIMS);
    *out = (tb_shape){.ndim = (int)ndim};
    for (size_t d = 0; d < ndim; d++) {
        const json_t *n = json_array_get(json, d);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return tb__fail(TB_INVALID, "dim %zu of its shape is not a size", d);
        out->dim[d] = json_integer_value(n);
    }
    return TB_OK;
}

static tb_status read_offsets(const json_t *json, int64_t *offset, int64_t *nbytes) {
    const json_t *begin = json_array_get(json, 0), *end = json_array_get(json, 1);
    if (!json_is_integer(begin) || !json_is_integer(end) || json_array_size(json) != 2)
        return tb__fail(TB_INVALID, "'data_offsets' is missing or not two integers");
    int64_t first = json_integer_value(begin), last = json_integer_value(end);
    if (first < 0 || last < first)
        return tb__fail(TB_INVALID, "its data can't be from byte %" PRId64 " to byte %" PRId64, first, last);
    *offset = first;
    *nbytes = last - first;
    return TB_OK;
}

static tb_status read_tensor(const json_t *json, tb__arena *arena, tb__safetensor *out) {
    int64_t nbytes;
    *out = (tb__safetensor){0};
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "it is not described by a JSON object");
    TB_TRY(read_dtype(json_object_get(json, "dtype"), arena, out));
    TB_TRY(read_shape(json_object_get(json, "shape"), &out->shape));
    TB_TRY(read_offsets(json_object_get(json, "data_offsets"), &out->offset, &out->nbytes));
    TB_TRY(tb__safetensor_size(out, &nbytes));
    if (nbytes != out->nbytes)
        return tb__fail(TB_INVALID, "its shape and dtype take %" PRId64 " bytes, but its data has %" PRId64, nbytes,
                        out->nbytes);
    return TB_OK;
}

static int compare_offsets(const void *left, const void *right) {
    const tb__safetensor *a = left, *b = right;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    if (a->nbytes != b->nbytes)
        return a->nbytes < b->nbytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

static int compare_names(const void *left, const void *right) {
    return strcmp((*(const tb__safetensor *const *)left)->name, (*(const tb__safetensor *const *)right)->name);
}

static int compare_keys(const void *left, const void *right) {
    return strcmp(((const tb__safetensors_metadata *)left)->key, ((const tb__safetensors_metadata *)right)->key);
}

/* Sorted by offset, each tensor must begin where the one before it ends, and the last must end where the file does. */
static tb_status check_data(const tb__safetensors_header *header) {
    int64_t end = 0;
    for (size_t i = 0; i < header->count; i++) {
        const tb__safetensor *t = &header->tensors[i];
        if (t->offset < end)
            return tb__fail(TB_INVALID,
                            "tensors '%.80s' and '%.80s' overlap: one ends at byte %" PRId64
                            " of the data, the other begins at %" PRId64,
                            header->tensors[i - 1].name, t->name, end, t->offset);
        if (t->offset > end)
            return tb__fail(TB_INVALID,
                            "tensor '%.100s' begins at byte %" PRId64 " of the data, but bytes from %" PRId64
                            " on belong to no tensor",
                            t->name, t->offset, end);
        if (t->nbytes > header->data_nbytes - t->offset)
            return tb__fail(TB_INVALID,
                            "tensor '%.100s' has bytes %" PRId64 " to %" PRId64 " of the data, but the file has only "
                            "%" PRId64,
                            t->name, t->offset, t->offset + t->nbytes, header->data_nbytes);
        end = t->offset + t->nbytes;
    }
    if (end != header->data_nbytes && header->count > 0)
        return tb__fail(TB_INVALID,
                        "tensor '%.100s' is the last and ends at byte %" PRId64 " of the data, but %" PRId64
                        " bytes follow",
                        header->tensors[header->count - 1].name, end, header->data_nbytes - end);
    if (end != header->data_nbytes)
        return tb__fail(TB_INVALID, "it has no tensors, but %" PRId64 " bytes of data", header->data_nbytes);
    return TB_OK;
}

static tb_status read_notes(const json_t *json, tb__safetensors_header *header) {
    size_t n = json_object_size(json), i = 0;
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "'__metadata__' is not an object");
    tb__safetensors_metadata *metadata = tb__arena_alloc(&header->arena, n, sizeof *metadata);
    if (!metadata)
        return TB_NO_MEMORY;
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it), i++) {
        const char *key = json_object_iter_key(it), *value = json_string_value(json_object_iter_value(it));
        if (!value)
            return tb__fail(TB_INVALID, "'%.100s' in '__metadata__' is not a string", key);
        metadata[i].key = tb__arena_strdup(&header->arena, key);
        metadata[i].value = tb__arena_strdup(&header->arena, value);
        if (!metadata[i].key || !metadata[i].value)
            return TB_NO_MEMORY;
    }
    qsort(metadata, n, sizeof *metadata, compare_keys);
    header->metadata = metadata;
    header->nmetadata = n;
    return TB_OK;
}

static tb_status read_header(const json_t *json, tb__safetensors_header *header) {
    static const char notes_key[] = "__metadata__";
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "the header is JSON, but not an object");
    size_t most = json_object_size(json), n = 0;
    tb__safetensor *tensors = tb__arena_alloc(&header->arena, most, sizeof *tensors);
    const tb__safetensor **by_name = tb__arena_alloc(&header->arena, most, sizeof *by_name);
    if (!tensors || !by_name)
        return TB_NO_MEMORY;
    for (void *it = json_object_iter((json_t *)json); it; it = json_object_iter_next((json_t *)json, it)) {
        const char *name = json_object_iter_key(it);
        if (strcmp(name, notes_key) == 0) {
            TB_TRY(read_notes(json_object_iter_value(it), header));
            continue;
        }
        tb_status status = read_tensor(json_object_iter_value(it), &header->arena, &tensors[n]);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", name);
        tensors[n].name = tb__arena_strdup(&header->arena, name);
        if (!tensors[n++].name)
            return TB_NO_MEMORY;
    }
    qsort(tensors, n, sizeof *tensors, compare_offsets);
    for (size_t i = 0; i < n; i++)
        by_name[i] = &tensors[i];
    qsort(by_name, n, sizeof *by_name, compare_names);
    header->count = n;
    header->tensors = tensors;
    header->by_name = by_name;
    return check_data(header);
}

tb_status tb__safetensors_parse(const char *text, size_t length, int64_t data_nbytes, tb__safetensors_header *out) {
    json_error_t error;
    if (length == 0 || text[0] != '{')
        return tb__fail(TB_INVALID, "the header does not begin with {: it is not a safetensors file");
    json_t *json = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!json && json_error_code(&error) == json_error_out_of_memory)
        return tb__fail(TB_NO_MEMORY, "out of memory while reading a header of %zu bytes", length);
    if (!json)
        return tb__fail(TB_INVALID, "the header is not JSON, at byte %d: %s", error.position, error.text);
    tb__safetensors_header header = {.data_nbytes = data_nbytes};
    tb_status status = read_header(json, &header);
    json_decref(json);
    if (status != TB_OK)
        tb__safetensors_header_fini(&header);
    else
        *out = header;
    return status;
}

void tb__safetensors_header_fini(tb__safetensors_header *header) {
    tb__arena_fini(&header->arena);
    *header = (tb__safetensors_header){0};
}

const tb__safetensor *tb__safetensors_find(const tb__safetensors_header *header, const char *name) {
    const tb__safetensor wanted = {.name = name}, *key = &wanted;
    const tb__safetensor *const *found =
        header->count ? bsearch(&key, header->by_name, header->count, sizeof *header->by_name, compare_names) : NULL;
    return found ? *found : NULL;
}
