/* Quantised tensors in files: their names, dtypes and shapes, and the parts that share one scale. */
#include "layout/layout.h"
#include "plan/plan.h"
#include "reshard/disk_inside.h"

#include <stdio.h>
#include <string.h>

enum { TILE_ROWS = 128 }; /* of swizzled scales */

/* The suffixes of scales' names that programs which load such checkpoints expect. */
static const struct {
    const char *scales, *scale;
    int ndim; /* the minimum */
} formats[] = {
    [TB__QUANT_MXFP8] = {"_scale", NULL, 1},
    [TB__QUANT_FP8_BLOCK] = {"_scale_inv", NULL, 2},
    [TB__QUANT_FP8_TENSOR] = {NULL, "_scale", 1},
    [TB__QUANT_NVFP4] = {"_scale", "_scale_2", 1},
};

static tb_status add_name(const char *name, const char *ending, tb__arena *arena, const char **out) {
    if (!ending)
        return TB_OK;
    size_t nbytes = strlen(name) + strlen(ending) + 1;
    char *joined = tb__arena_alloc(arena, nbytes, 1);
    if (!joined)
        return TB_NO_MEMORY;
    snprintf(joined, nbytes, "%s%s", name, ending);
    *out = joined;
    return TB_OK;
}

tb_status tb__disk_quant_init(tb__disk_quant *quant, const tb__quant_format *format, const char *name,
                              tb__arena *arena) {
    *quant = (tb__disk_quant){.format = *format};
    TB_TRY(add_name(name, formats[format->kind].scales, arena, &quant->scales_name));
    return add_name(name, formats[format->kind].scale, arena, &quant->scale_name);
}

bool tb__disk_quant_is_scale(const tb__quant_format *format, const char *name, size_t kept) {
    const char *scales = formats[format->kind].scales, *scale = formats[format->kind].scale;
    return (scales && strcmp(name + kept, scales) == 0) || (scale && strcmp(name + kept, scale) == 0);
}

tb_status tb__disk_quant_check(const tb__quant_format *format, const tb_shape *shape, tb_dtype dtype) {
    const char *name = tb__quant_name(format->kind);
    if (dtype != TB_F32 && dtype != TB_F16 && dtype != TB_BF16)
        return tb__fail(TB_REFUSED, "it is %s, but %s is made from f32, f16 or bf16", tb_dtype_name(dtype), name);
    if (shape->ndim < formats[format->kind].ndim)
        return tb__fail(TB_REFUSED, "it has %d dims, too few for %s", shape->ndim, name);
    return TB_OK;
}

int64_t tb__disk_matrix_rows(const tb_shape *part) {
    return part->ndim > 1 ? part->dim[part->ndim - 2] : 1;
}

int64_t tb__disk_quant_rows(const tb__quant_format *format) {
    return format->kind == TB__QUANT_FP8_BLOCK || format->is_swizzled ? TILE_ROWS : 1;
}

static tb_shape scale_shape(const tb__quant_format *format, const tb_shape *part, const tb__quant_size *size) {
    int last = part->ndim - 1;
    tb_shape out = *part;
    int64_t rows = size->scale_rows, columns = size->scale_columns;
    if (format->is_swizzled) { /* with the padding of the tiles */
        columns = (size->scale_columns + 3) / 4 * 4;
        rows = columns ? size->scale_nbytes / columns : 0;
    }
    out.dim[last] = last > 0 ? columns : columns * rows;
    if (last > 0)
        out.dim[last - 1] = rows;
    return out;
}

tb_status tb__disk_quant_tensors(const tb__disk_quant *quant, const char *name, tb_dtype dtype, const tb_shape *part,
                                 tb__safetensor out[TB__DISK_SLOTS]) {
    tb__quant_size size;
    int last = part->ndim - 1;
    for (int i = 0; i < TB__DISK_SLOTS; i++)
        out[i] = (tb__safetensor){0};
    out[TB__DISK_DATA] = (tb__safetensor){.name = name, .dtype = dtype, .shape = *part};
    if (!quant->format.kind)
        return TB_OK;
    TB_TRY(tb__quant_measure(&quant->format, tb__disk_matrix_rows(part), part->dim[last], &size));
    out[TB__DISK_DATA].dtype = size.data_dtype;
    if (size.data_dtype == TB_F4E2M1) { /* few programs know 4-bit dtypes: they are bytes in files */
        out[TB__DISK_DATA].dtype = TB_U8;
        out[TB__DISK_DATA].shape.dim[last] /= 2;
    }
    if (quant->scales_name)
        out[TB__DISK_SCALES] = (tb__safetensor){
            .name = quant->scales_name, .dtype = size.scale_dtype, .shape = scale_shape(&quant->format, part, &size)};
    if (quant->scale_name)
        out[TB__DISK_SCALE] = (tb__safetensor){.name = quant->scale_name, .dtype = TB_F32};
    return TB_OK;
}

tb_shape tb__disk_quant_part(const tb__disk_quant *quant, const tb_shape *data) {
    tb_shape part = *data;
    int last = part.ndim - 1;
    int64_t most = INT64_C(1) << 61; /* an empty tensor may have any other dim */
    if (quant->format.kind == TB__QUANT_NVFP4 && last >= 0)
        part.dim[last] = 2 * (part.dim[last] < most ? part.dim[last] : most);
    return part;
}

tb_status tb__disk_take_amax(tb__disk *disk, tb__disk_tensor *t) {
    size_t probe = 0, i;
    uint64_t hash = t->group ? tb__hash_string(0, t->group) : 0;
    while (t->group && (i = tb__index_next(&disk->groups, hash, &probe)) != TB__NOWHERE) {
        const tb__disk_tensor *first = &disk->tensors[i];
        if (strcmp(first->group, t->group) != 0)
            continue;
        if (first->dst_quant.format.kind != t->dst_quant.format.kind)
            return tb__fail(TB_REFUSED, "it is %s, but '%.100s' of the same group '%.100s' is %s",
                            tb__quant_name(t->dst_quant.format.kind), first->name, t->group,
                            tb__quant_name(first->dst_quant.format.kind));
        t->amax = first->amax;
        return TB_OK;
    }
    if (t->group && !tb__index_add(&disk->groups, hash, (size_t)(t - disk->tensors)))
        return TB_NO_MEMORY;
    t->amax = disk->namax;
    disk->namax += t->group ? 1 : (size_t)tb_layout_nranks(t->dst);
    return TB_OK;
}

/* The first rank of all that have the same part. */
static int32_t first_copy(const tb__disk_tensor *t, int32_t rank) {
    tb__place place;
    if (!tb__grid_place(t->grid, rank, &place))
        return rank;
    place.copy = 0;
    return tb__grid_rank(t->grid, &place);
}

size_t tb__disk_amax_of(const tb__disk_tensor *t, int32_t rank) {
    return t->group ? t->amax : t->amax + (size_t)tb_layout_index_of(t->dst, first_copy(t, rank));
}

bool tb__disk_is_looked_at(const tb__disk_tensor *t, int32_t rank) {
    return t->dst_quant.scale_name && first_copy(t, rank) == rank;
}
