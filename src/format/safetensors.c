/* Reads safetensors files: opens, checks, and reads parts. */
#include "format/safetensors.h"

#include <inttypes.h>
#include <unistd.h>

static tb_status read_header(tb__safetensors *file, int64_t file_nbytes) {
    unsigned char first[TB__SAFETENSORS_LENGTH] = {0};
    size_t length;
    if (file_nbytes >= TB__SAFETENSORS_LENGTH)
        TB_TRY(tb__file_read(file->fd, file->path, 0, first, sizeof first));
    tb_status status = tb__safetensors_length(first, file_nbytes, &length);
    if (status != TB_OK)
        return tb__file_fail_within(status, file->path);
    char *text = tb__malloc(length, 1);
    if (!text)
        return TB_NO_MEMORY;
    status = tb__file_read(file->fd, file->path, TB__SAFETENSORS_LENGTH, text, length);
    if (status == TB_OK) {
        file->data_start = TB__SAFETENSORS_LENGTH + (int64_t)length;
        status = tb__safetensors_parse(text, length, file_nbytes - file->data_start, &file->header);
        if (status != TB_OK)
            tb__file_fail_within(status, file->path);
    }
    free(text);
    return status;
}

tb_status tb__safetensors_open(const char *path, tb__safetensors **out) {
    int64_t file_nbytes = 0;
    tb__safetensors *file = tb__calloc(1, sizeof *file);
    if (!file)
        return TB_NO_MEMORY;
    file->fd = -1;
    file->path = tb__strdup(path);
    tb_status status = file->path ? tb__file_open(path, &file->fd, &file_nbytes) : TB_NO_MEMORY;
    if (status == TB_OK)
        status = read_header(file, file_nbytes);
    if (status != TB_OK)
        tb__safetensors_close(file);
    else
        *out = file;
    return status;
}

void tb__safetensors_close(tb__safetensors *file) {
    if (!file)
        return;
    if (file->fd >= 0)
        close(file->fd);
    tb__safetensors_header_fini(&file->header);
    free(file->path);
    free(file);
}

tb_status tb__safetensors_read(const tb__safetensors *file, const tb__safetensor *tensor, int64_t offset, size_t nbytes,
                               void *buffer) {
    if (offset < 0 || offset > tensor->nbytes || nbytes > (uint64_t)(tensor->nbytes - offset))
        return tb__fail(TB_INVALID, "%zu bytes from byte %" PRId64 " on are not in tensor '%.100s', which has %" PRId64,
                        nbytes, offset, tensor->name, tensor->nbytes);
    return tb__file_read(file->fd, file->path, file->data_start + tensor->offset + offset, buffer, nbytes);
}
