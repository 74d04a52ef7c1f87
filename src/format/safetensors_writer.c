/* Safetensors files for writing: laid out first, filled in any order, named at the end. */
#include "format/safetensors.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

struct tb__safetensors_writer {
    tb__draft draft;
    size_t count;
    tb__safetensor *tensors;
    atomic_int_fast64_t *written; /* bytes of each tensor, so that none is forgotten */
    int64_t data_start;
    bool is_finished;
    tb__arena arena;
};

static bool copy_tensors(tb__safetensors_writer *w, const tb__safetensor *tensors, size_t count) {
    w->count = count;
    w->tensors = tb__arena_alloc(&w->arena, count, sizeof *w->tensors);
    w->written = tb__arena_alloc(&w->arena, count, sizeof *w->written);
    if (!w->tensors || !w->written)
        return false;
    for (size_t i = 0; i < count; i++) {
        w->tensors[i] = tensors[i];
        w->tensors[i].name = tb__arena_strdup(&w->arena, tensors[i].name);
        if (tensors[i].unknown_dtype)
            w->tensors[i].unknown_dtype = tb__arena_strdup(&w->arena, tensors[i].unknown_dtype);
        if (!w->tensors[i].name || (tensors[i].unknown_dtype && !w->tensors[i].unknown_dtype))
            return false;
        atomic_init(&w->written[i], 0);
    }
    return true;
}

static tb_status begin_file(tb__safetensors_writer *w, const char *path, const tb__safetensors_metadata *metadata,
                            size_t nmetadata) {
    tb__safetensors_plan plan;
    tb_status status = tb__safetensors_format(w->tensors, w->count, metadata, nmetadata, &plan);
    if (status != TB_OK)
        return tb__file_fail_within(status, path);
    w->data_start = (int64_t)plan.head_nbytes;
    status = tb__draft_init(&w->draft, path, w->data_start + plan.data_nbytes);
    if (status == TB_OK)
        status = tb__file_write(w->draft.fd, path, 0, plan.head, plan.head_nbytes);
    free(plan.head);
    return status;
}

tb_status tb__safetensors_create(const char *path, const tb__safetensor *tensors, size_t count,
                                 const tb__safetensors_metadata *metadata, size_t nmetadata,
                                 tb__safetensors_writer **out) {
    tb__safetensors_writer *w = tb__calloc(1, sizeof *w);
    if (!w)
        return TB_NO_MEMORY;
    w->draft.fd = -1;
    tb_status status = copy_tensors(w, tensors, count) ? begin_file(w, path, metadata, nmetadata) : TB_NO_MEMORY;
    if (status != TB_OK)
        tb__safetensors_writer_destroy(w);
    else
        *out = w;
    return status;
}

static tb_status check_part(const tb__safetensors_writer *w, const tb__safetensor *t, int64_t offset, size_t nbytes) {
    if (w->is_finished)
        return tb__fail(TB_INVALID, "tensor '%.100s' can't be reached: its file is finished", t->name);
    if (offset < 0 || offset > t->nbytes || nbytes > (uint64_t)(t->nbytes - offset))
        return tb__fail(TB_INVALID, "%zu bytes from byte %" PRId64 " on are not in tensor '%.100s', which has %" PRId64,
                        nbytes, offset, t->name, t->nbytes);
    return TB_OK;
}

tb_status tb__safetensors_write(tb__safetensors_writer *w, size_t i, int64_t offset, const void *bytes, size_t nbytes) {
    const tb__safetensor *t = &w->tensors[i];
    TB_TRY(check_part(w, t, offset, nbytes));
    TB_TRY(tb__file_write(w->draft.fd, w->draft.path, w->data_start + t->offset + offset, bytes, nbytes));
    atomic_fetch_add(&w->written[i], (int_fast64_t)nbytes);
    return TB_OK;
}

tb_status tb__safetensors_read_back(const tb__safetensors_writer *w, size_t i, int64_t offset, size_t nbytes,
                                    void *buffer) {
    const tb__safetensor *t = &w->tensors[i];
    TB_TRY(check_part(w, t, offset, nbytes));
    return tb__file_read(w->draft.fd, w->draft.path, w->data_start + t->offset + offset, buffer, nbytes);
}

tb_status tb__safetensors_finish(tb__safetensors_writer *w, bool sync) {
    if (w->is_finished)
        return TB_OK;
    for (size_t i = 0; i < w->count; i++) {
        int64_t written = atomic_load(&w->written[i]);
        if (written != w->tensors[i].nbytes)
            return tb__file_fail(TB_INVALID, w->draft.path,
                                 "tensor '%.100s' has %" PRId64 " bytes, but %" PRId64 " were written",
                                 w->tensors[i].name, w->tensors[i].nbytes, written);
    }
    TB_TRY(tb__draft_flush(&w->draft, sync));
    w->is_finished = true;
    return TB_OK;
}

tb_status tb__safetensors_commit(tb__safetensors_writer *w) {
    TB_TRY(tb__safetensors_finish(w, false));
    return tb__draft_commit(&w->draft);
}

void tb__safetensors_writer_destroy(tb__safetensors_writer *w) {
    if (!w)
        return;
    tb__draft_fini(&w->draft);
    tb__arena_fini(&w->arena);
    free(w);
}
