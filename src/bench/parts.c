/* What one rank holds: its parts of all tensors, and the memory they are in. */
#include "bench/move.h"

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
    if (tool_part_is_coded(part))
        TB_TRY(tool_part_measure(part));
    if (parts->nbytes_allocated > INT64_MAX / 4 - part->nbytes)
        return tb__fail(TB_TOO_BIG, "a rank would hold more than 2^61 bytes");
    parts->nbytes += part->nbytes;
    parts->nbytes_allocated += tb__align(part->nbytes, ALIGNMENT);
    return TB_OK;
}

tb_status tool_parts_init(tool_parts *parts, const tool_job *job, int which, int32_t rank) {
    *parts = (tool_parts){.device = job->memory[which] ? job->memory[which] : job->is_foreign ? NULL : "host"};
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
    TB_TRY(tool_mirror_init(&parts->mirror, parts->device, (size_t)parts->nbytes_allocated));
    int64_t at = 0;
    for (size_t i = 0; i < parts->count; i++) {
        tool_part *part = &parts->part[i];
        if (part->nbytes > 0) {
            part->data = (char *)parts->mirror.memory + at;
            part->host = parts->mirror.host + at;
        }
        at += tb__align(part->nbytes, ALIGNMENT);
    }
    return TB_OK;
}

void tool_parts_fini(tool_parts *parts) {
    for (size_t i = 0; i < parts->count; i++)
        tb_local_fini(&parts->part[i].local);
    free(parts->part);
    tool_mirror_fini(&parts->mirror);
    *parts = (tool_parts){0};
}

tb_status tool_parts_prepare(const tool_parts *parts, uint32_t version, _Atomic int64_t *done) {
    for (size_t i = 0; i < parts->count; i++) {
        const tool_part *part = &parts->part[i];
        TB_TRY((part->which == TOOL_SOURCE ? tool_part_fill : tool_part_poison)(part, version));
        atomic_fetch_add(done, part->nbytes);
    }
    return tool_mirror_put(&parts->mirror);
}
