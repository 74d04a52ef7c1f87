/* What one rank holds: its parts of all tensors, and the memory they are in. */
#include "tools/move.h"

#include "base/int.h"

enum { ALIGNMENT = 64 };

static tb_status add_part(tool_parts *parts, const tool_job *job, int which, int32_t rank) {
    size_t i = parts->count;
    const tool_tensor *tensor = &job->tensors.item[i];
    tool_part *part = &parts->part[i];
    *part = (tool_part){.tensor = tensor, .number = (uint32_t)i, .which = which, .rank = rank};
    TB_TRY(tb_layout_local(job->side[which].layout[tensor->cut], &tensor->shape, rank, &part->local));
    parts->count++;
    /* A list may name an index twice, so that a part is larger than its tensor. */
    TB_TRY(tb_shape_size(&part->local.shape, tensor->dtype[which], &part->nelements, &part->nbytes));
    if (parts->nbytes_allocated > INT64_MAX / 4 - part->nbytes)
        return tb__fail(TB_TOO_BIG, "a rank would hold more than 2^61 bytes");
    parts->nbytes += part->nbytes;
    parts->nbytes_allocated += tb__align(part->nbytes, ALIGNMENT);
    return TB_OK;
}

tb_status tool_parts_init(tool_parts *parts, const tool_job *job, int which, int32_t rank) {
    *parts = (tool_parts){.is_foreign = job->is_foreign};
    parts->part = tb__calloc(job->tensors.count, sizeof *parts->part);
    if (!parts->part)
        return TB_NO_MEMORY;
    while (parts->count < job->tensors.count) {
        tb_status status = add_part(parts, job, which, rank);
        if (status != TB_OK) {
            tool_parts_fini(parts);
            return status;
        }
    }
    return TB_OK;
}

tb_status tool_parts_allocate(tool_parts *parts) {
    if (parts->nbytes == 0)
        return TB_OK;
    if (!parts->is_foreign)
        TB_TRY(tb_alloc((size_t)parts->nbytes_allocated, &parts->memory));
    else if (!(parts->memory = tb__malloc((size_t)parts->nbytes_allocated, 1)))
        return TB_NO_MEMORY;
    char *at = parts->memory;
    for (size_t i = 0; i < parts->count; i++) {
        tool_part *part = &parts->part[i];
        part->data = part->nbytes > 0 ? at : NULL;
        at += tb__align(part->nbytes, ALIGNMENT);
    }
    return TB_OK;
}

void tool_parts_fini(tool_parts *parts) {
    for (size_t i = 0; i < parts->count; i++)
        tb_local_fini(&parts->part[i].local);
    free(parts->part);
    if (parts->is_foreign)
        free(parts->memory);
    else
        tb_free(parts->memory);
    *parts = (tool_parts){0};
}
