/* Writes the header of a safetensors file, and decides where the tensors go. */
#include "base/dtype.h"
#include "base/int.h"
#include "format/safetensors.h"

#include <inttypes.h>
#include <string.h>

const char *tb__safetensor_dtype_name(const tb__safetensor *t) {
    return t->unknown_dtype ? t->unknown_dtype : tb_dtype_name(t->dtype);
}

tb_status tb__safetensor_size(const tb__safetensor *t, int64_t *nbytes) {
    int64_t nelements, size; /* *nbytes may be the tensor's */
    TB_TRY(tb_shape_size(&t->shape, t->unknown_dtype ? TB_U8 : t->dtype, &nelements, &size));
    if (t->unknown_dtype) {
        if (t->nbytes < 0 || (t->nbytes == 0) != (nelements == 0))
            return tb__fail(TB_INVALID, "%" PRId64 " elements of %s can't take %" PRId64 " bytes", nelements,
                            t->unknown_dtype, t->nbytes);
        size = t->nbytes;
    } else if (nelements % tb__dtype_packing(t->dtype) != 0) {
        return tb__fail(TB_INVALID, "%" PRId64 " elements of %s do not fill whole bytes", nelements,
                        tb_dtype_name(t->dtype));
    }
    *nbytes = size;
    return TB_OK;
}

/* The largest power of two that divides the bytes of an element; 1 if these are not whole. */
static int64_t alignment(const tb__safetensor *t) {
    int64_t nelements, nbytes;
    (void)tb_shape_size(&t->shape, TB_U8, &nelements, &nbytes); /* was checked */
    int64_t width = nelements > 0 && t->nbytes % nelements == 0 ? t->nbytes / nelements : 1;
    return width & -width;
}

/* The order of the official library: by alignment, and among dtypes of one width as its list has them. Those that are
 * not known come before the others of their width. */
static int tensor_order(const tb__safetensor *t) {
    static const tb_dtype order[] = {TB_BOOL, TB_F4E2M1, TB_U8,  TB_I8,  TB_F8E5M2, TB_F8E4M3, TB_E8M0, TB_I16, TB_U16,
                                     TB_F16,  TB_BF16,   TB_I32, TB_U32, TB_F32,    TB_F64,    TB_I64,  TB_U64};
    _Static_assert(sizeof order / sizeof *order == TB_DTYPE_COUNT - 1, "every dtype has its place");
    int i = 0;
    int64_t bits = t->unknown_dtype ? tb__min64(alignment(t), 8) * 8 : 0;
    while (t->unknown_dtype ? tb_dtype_bits(order[i]) < bits : order[i] != t->dtype)
        i++;
    return 2 * i + !t->unknown_dtype;
}

static int compare_places(const void *left, const void *right) {
    const tb__safetensor *a = *(tb__safetensor *const *)left, *b = *(tb__safetensor *const *)right;
    int first = tensor_order(a), second = tensor_order(b);
    return first != second ? second - first : strcmp(a->name, b->name);
}

static int compare_names(const void *left, const void *right) {
    return strcmp((*(tb__safetensor *const *)left)->name, (*(tb__safetensor *const *)right)->name);
}

static int compare_notes(const void *left, const void *right) {
    return strcmp((*(const tb__safetensors_metadata *const *)left)->key,
                  (*(const tb__safetensors_metadata *const *)right)->key);
}

void tb__safetensors_add_string(tb__text *out, const char *string) {
    static const char plain[] = "\"\\\b\f\n\r\t", escaped[] = "\"\\bfnrt";
    tb__text_add(out, "\"");
    while (*string) {
        size_t run = 0;
        while ((unsigned char)string[run] >= 0x20 && string[run] != '"' && string[run] != '\\')
            run++;
        tb__text_add(out, "%.*s", (int)run, string);
        string += run;
        const char *at = *string ? strchr(plain, *string) : NULL;
        if (at)
            tb__text_add(out, "\\%c", escaped[at - plain]);
        else if (*string)
            tb__text_add(out, "\\u%04x", (unsigned char)*string);
        string += *string != '\0';
    }
    tb__text_add(out, "\"");
}

static tb_status check_tensor(tb__safetensor *t) {
    if (!tb__is_utf8(t->name))
        return tb__fail(TB_INVALID, "its name is not UTF-8");
    if (strlen(t->name) > TB__SAFETENSORS_MAX_HEADER)
        return tb__fail(TB_TOO_BIG, "its name is longer than a header may be");
    if (strcmp(t->name, "__metadata__") == 0)
        return tb__fail(TB_INVALID, "the format keeps this name for itself");
    return tb__safetensor_size(t, &t->nbytes);
}

static tb_status place_tensors(tb__safetensor *tensors, size_t count, tb__safetensor **order, int64_t *data_nbytes) {
    for (size_t i = 0; i < count; i++) {
        tb_status status = check_tensor(&tensors[i]);
        if (status != TB_OK)
            return tb__fail_within(status, "tensor '%.100s'", tensors[i].name);
        order[i] = &tensors[i];
    }
    qsort(order, count, sizeof *order, compare_names);
    for (size_t i = 1; i < count; i++) {
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return tb__fail(TB_INVALID, "there are two tensors '%.100s'", order[i]->name);
    }
    qsort(order, count, sizeof *order, compare_places);
    int64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        if (order[i]->nbytes > (INT64_C(1) << 62) - end)
            return tb__fail(TB_TOO_BIG, "the tensors have more than 2^62 bytes together");
        order[i]->offset = end;
        end += order[i]->nbytes;
    }
    *data_nbytes = end;
    return TB_OK;
}

static tb_status add_metadata(tb__text *out, const tb__safetensors_metadata *metadata, size_t nmetadata) {
    const tb__safetensors_metadata **order = tb__malloc(nmetadata, sizeof *order);
    if (!order)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nmetadata; i++)
        order[i] = &metadata[i];
    qsort(order, nmetadata, sizeof *order, compare_notes);
    tb_status status = TB_OK;
    tb__text_add(out, "\"__metadata__\":{");
    for (size_t i = 0; i < nmetadata && status == TB_OK; i++) {
        if (!tb__is_utf8(order[i]->key) || !tb__is_utf8(order[i]->value))
            status = tb__fail(TB_INVALID, "'%.100s' in the metadata is not UTF-8", order[i]->key);
        else if (strlen(order[i]->key) > TB__SAFETENSORS_MAX_HEADER ||
                 strlen(order[i]->value) > TB__SAFETENSORS_MAX_HEADER)
            status = tb__fail(TB_TOO_BIG, "'%.100s' in the metadata is longer than a header may be", order[i]->key);
        else if (i > 0 && strcmp(order[i - 1]->key, order[i]->key) == 0)
            status = tb__fail(TB_INVALID, "'%.100s' is twice in the metadata", order[i]->key);
        tb__text_add(out, i ? "," : "");
        tb__safetensors_add_string(out, order[i]->key);
        tb__text_add(out, ":");
        tb__safetensors_add_string(out, order[i]->value);
    }
    tb__text_add(out, "}");
    free(order);
    return status;
}

static void add_tensor(tb__text *out, const tb__safetensor *t) {
    tb__safetensors_add_string(out, t->name);
    tb__text_add(out, ":{\"dtype\":\"%s\",\"shape\":[",
                 t->unknown_dtype ? t->unknown_dtype : tb__dtype_safetensors(t->dtype));
    for (int d = 0; d < t->shape.ndim; d++)
        tb__text_add(out, "%s%" PRId64, d ? "," : "", t->shape.dim[d]);
    tb__text_add(out, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", t->offset, t->offset + t->nbytes);
}

static tb_status add_header(tb__text *out, tb__safetensor *const *order, size_t count,
                            const tb__safetensors_metadata *metadata, size_t nmetadata) {
    tb__text_add(out, "%*s{", TB__SAFETENSORS_LENGTH, ""); /* room for the length */
    if (nmetadata > 0)
        TB_TRY(add_metadata(out, metadata, nmetadata));
    for (size_t i = 0; i < count; i++) {
        tb__text_add(out, i > 0 || nmetadata > 0 ? "," : "");
        add_tensor(out, order[i]);
        if (out->count > TB__SAFETENSORS_MAX_HEADER + TB__SAFETENSORS_LENGTH)
            break; /* no need for the rest */
    }
    tb__text_add(out, "}");
    tb__text_add(out, "%*s", (int)(-out->count % TB__SAFETENSORS_LENGTH), "");
    if (out->failed)
        return tb__fail(TB_NO_MEMORY, "out of memory while writing a header");
    if (out->count > TB__SAFETENSORS_MAX_HEADER + TB__SAFETENSORS_LENGTH)
        return tb__fail(TB_TOO_BIG, "the header would be beyond the format's limit of %d bytes",
                        TB__SAFETENSORS_MAX_HEADER);
    return TB_OK;
}

tb_status tb__safetensors_format(tb__safetensor *tensors, size_t count, const tb__safetensors_metadata *metadata,
                                 size_t nmetadata, tb__safetensors_plan *plan) {
    tb__text text = {0};
    tb__safetensors_plan made = {0};
    tb__safetensor **order = tb__malloc(count, sizeof *order);
    if (!order)
        return TB_NO_MEMORY;
    tb_status status = place_tensors(tensors, count, order, &made.data_nbytes);
    if (status == TB_OK)
        status = add_header(&text, order, count, metadata, nmetadata);
    free(order);
    made.head_nbytes = text.count;
    if (status == TB_OK)
        status = tb__text_take(&text, &made.head);
    if (status != TB_OK) {
        tb__text_fini(&text);
        return status;
    }
    for (size_t i = 0; i < TB__SAFETENSORS_LENGTH; i++)
        made.head[i] = (char)(unsigned char)((made.head_nbytes - TB__SAFETENSORS_LENGTH) >> 8 * i);
    *plan = made;
    return TB_OK;
}
