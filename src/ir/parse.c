/* Reads the JSON dump of an IR, and validates all of it. */
#include "base/dtype.h"
#include "ir/ir.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

static tb_status read_int(const json_t *object, const char *key, int64_t lo, int64_t hi, int64_t *out) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value))
        return tb__fail(TB_INVALID, "'%s' is missing or not an integer", key);
    *out = json_integer_value(value);
    if (*out < lo || *out > hi)
        return tb__fail(TB_INVALID, "'%s' is %" PRId64 ", not between %" PRId64 " and %" PRId64, key, *out, lo, hi);
    return TB_OK;
}

static tb_status read_array(const json_t *object, const char *key, const json_t **out) {
    *out = json_object_get(object, key);
    return json_is_array(*out) ? TB_OK : tb__fail(TB_INVALID, "'%s' is missing or not an array", key);
}

static tb_status read_bool(const json_t *object, const char *key, bool *out) {
    const json_t *value = json_object_get(object, key);
    *out = json_is_true(value);
    return json_is_boolean(value) ? TB_OK : tb__fail(TB_INVALID, "'%s' is missing or not true or false", key);
}

static tb_status read_ranks(tb__owned_ir *ir, const json_t *object, const char *key, uint32_t *count,
                            const int32_t **out) {
    const json_t *array;
    TB_TRY(read_array(object, key, &array));
    size_t n = json_array_size(array);
    int32_t *ranks = tb__malloc(n, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    tb_status status = TB_OK;
    for (size_t i = 0; i < n && status == TB_OK; i++) {
        const json_t *rank = json_array_get(array, i);
        if (!json_is_integer(rank) || json_integer_value(rank) < 0 || json_integer_value(rank) >= TB_MAX_RANKS)
            status = tb__fail(TB_INVALID, "'%s' element %zu is not a rank", key, i);
        else
            ranks[i] = (int32_t)json_integer_value(rank);
    }
    if (status == TB_OK) {
        *count = (uint32_t)n;
        *out = tb__ir_ranks(ir, ranks, (uint32_t)n);
        status = *out ? TB_OK : TB_NO_MEMORY;
    }
    free(ranks);
    return status;
}

static tb_status read_dims(const json_t *object, const char *key, int ndim, int64_t lo, int64_t *out) {
    const json_t *array;
    TB_TRY(read_array(object, key, &array));
    if (json_array_size(array) != (size_t)ndim)
        return tb__fail(TB_INVALID, "'%s' has %zu dims where the chunk has %d", key, json_array_size(array), ndim);
    for (int d = 0; d < ndim; d++) {
        const json_t *value = json_array_get(array, (size_t)d);
        out[d] = json_integer_value(value);
        if (!json_is_integer(value) || out[d] < lo || out[d] > INT64_C(1) << 62)
            return tb__fail(TB_INVALID, "'%s' dim %d is out of range", key, d);
    }
    return TB_OK;
}

static tb_status read_id(const json_t *object, uint64_t *out) {
    const char *text = json_string_value(json_object_get(object, "id"));
    if (!text || strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16)
        return tb__fail(TB_INVALID, "'id' is missing or not 16 hexadecimal digits");
    *out = strtoull(text, NULL, 16);
    return TB_OK;
}

static tb_status read_dtype(const json_t *object, const char *key, tb_dtype *out) {
    const char *name = json_string_value(json_object_get(object, key));
    return name ? tb_dtype_parse(name, out) : tb__fail(TB_INVALID, "'%s' is missing or not a string", key);
}

/* Fields of one chunk; `chunk` already has what its channel says. */
static tb_status read_chunk(const tb__owned_ir *ir, const json_t *json, tb_chunk *chunk, int64_t *offset) {
    const json_t *shape;
    int64_t value;
    TB_TRY(read_dtype(json, "src_dtype", &chunk->src_dtype));
    TB_TRY(read_dtype(json, "wire_dtype", &chunk->wire_dtype));
    if (tb__wire_dtype(chunk->src_dtype, chunk->wire_dtype, chunk->wire_dtype, &chunk->wire_dtype) != TB_OK)
        return tb__fail(TB_INVALID, "there is no cast from %s to %s", tb_dtype_name(chunk->src_dtype),
                        tb_dtype_name(chunk->wire_dtype));
    if (ir->names.count == 0)
        return tb__fail(TB_INVALID, "there are chunks but no tensors");
    TB_TRY(read_int(json, "tensor", 0, (int64_t)ir->names.count - 1, &value));
    chunk->tensor = (uint32_t)value;
    TB_TRY(read_id(json, &chunk->id));
    TB_TRY(read_int(json, "part", 0, UINT32_MAX, &value));
    chunk->part = (uint32_t)value;
    if (json_object_get(json, "whole"))
        TB_TRY(read_bool(json, "whole", &chunk->is_whole));
    TB_TRY(read_bool(json, "is_source", &chunk->is_source));
    TB_TRY(read_bool(json, "is_target", &chunk->is_target));
    const char *op = json_string_value(json_object_get(json, "op"));
    if (!op || !tb__reduce_op_read(op, &chunk->op))
        return tb__fail(TB_INVALID, "'op' is missing or not a reduction");
    TB_TRY(read_int(json, "divisor", 1, INT64_MAX, &value));
    chunk->divisor = (uint64_t)value;
    TB_TRY(read_array(json, "shape", &shape));
    if (json_array_size(shape) > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "'shape' has more than %d dims", TB_MAX_DIMS);
    chunk->ndim = (int)json_array_size(shape);
    TB_TRY(read_dims(json, "shape", chunk->ndim, 1, chunk->len));
    TB_TRY(read_dims(json, "src", chunk->ndim, 0, chunk->src.start));
    TB_TRY(read_dims(json, "dst", chunk->ndim, 0, chunk->dst.start));
    const int64_t most = INT64_C(1) << 62;
    for (int d = 0; d < chunk->ndim; d++) {
        if (chunk->src.start[d] > most - chunk->len[d] || chunk->dst.start[d] > most - chunk->len[d])
            return tb__fail(TB_INVALID, "a box ends past 2^62 in dim %d", d);
    }
    TB_TRY(read_int(json, "src_cell", 0, INT64_MAX, &value));
    chunk->src_cell = (uint64_t)value;
    TB_TRY(read_int(json, "dst_cell", 0, INT64_MAX, &value));
    chunk->dst_cell = (uint64_t)value;
    TB_TRY(read_int(json, "order", 0, INT64_MAX, &chunk->order));
    TB_TRY(read_int(json, "offset", 0, INT64_C(1) << 62, offset));
    TB_TRY(read_int(json, "nbytes", 1, INT64_C(1) << 62, &chunk->nbytes));
    if (*offset > most - chunk->nbytes)
        return tb__fail(TB_INVALID, "'offset' %" PRId64 " and 'nbytes' go past 2^62", *offset);
    tb_shape size = {.ndim = chunk->ndim};
    memcpy(size.dim, chunk->len, sizeof size.dim);
    TB_TRY(tb_shape_size(&size, chunk->src_dtype, NULL, &value)); /* as a contribution it may be larger */
    TB_TRY(tb_shape_size(&size, chunk->wire_dtype, NULL, &value));
    if (value != chunk->nbytes && !chunk->is_coded)
        return tb__fail(TB_INVALID, "'nbytes' is %" PRId64 ", but the shape has %" PRId64 " bytes", chunk->nbytes,
                        value);
    return TB_OK;
}

static tb_status read_bucket(tb__owned_ir *ir, const json_t *json, const tb_chunk *key, uint32_t least_group) {
    const json_t *chunks;
    tb_bucket bucket = {.channel = ir->channels.count - 1, .first_entry = ir->entries.count};
    int64_t total, group;
    TB_TRY(read_array(json, "chunks", &chunks));
    TB_TRY(read_int(json, "group", least_group, UINT32_MAX, &group));
    bucket.group = (uint32_t)group;
    TB_TRY(read_int(json, "total_bytes", 1, INT64_MAX, &total));
    if (json_array_size(chunks) == 0)
        return tb__fail(TB_INVALID, "a bucket has no chunks");
    for (size_t i = 0; i < json_array_size(chunks); i++) {
        tb_chunk chunk = *key;
        chunk.group = bucket.group;
        tb_bucket_entry entry = {.chunk = ir->chunks.count};
        tb_status status = read_chunk(ir, json_array_get(chunks, i), &chunk, &entry.offset);
        if (status == TB_OK && (entry.offset % TB__BUCKET_ALIGN || entry.offset < bucket.total_bytes))
            status = tb__fail(TB_INVALID, "'offset' %" PRId64 " is not a multiple of %d after the chunk before",
                              entry.offset, TB__BUCKET_ALIGN);
        if (status != TB_OK)
            return tb__fail_within(status, "chunk %zu", i);
        entry.nbytes = chunk.nbytes;
        bucket.nentries++;
        bucket.total_bytes = entry.offset + entry.nbytes;
        if (!tb__vec_push(&ir->chunks, chunk) || !tb__vec_push(&ir->entries, entry))
            return TB_NO_MEMORY;
    }
    if (total != bucket.total_bytes)
        return tb__fail(TB_INVALID, "'total_bytes' is %" PRId64 ", but the chunks end at %" PRId64, total,
                        bucket.total_bytes);
    return tb__vec_push(&ir->buckets, bucket) ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__chunk_check_key(const tb_chunk *key) {
    bool to_itself = key->ntargets == 1 && (key->targets[0] == key->source || key->source == TB_NO_RANK);
    if (key->ntargets == 0)
        return tb__fail(TB_INVALID, "'targets' is empty");
    if ((key->mode == TB_LOCAL && !to_itself) || (key->mode == TB_P2P && key->ntargets != 1) ||
        (key->mode == TB_BROADCAST && key->ntargets < 2))
        return tb__fail(TB_INVALID, "%s with %" PRIu32 " targets", tb_chunk_mode_name(key->mode), key->ntargets);
    for (uint32_t i = 0; i < key->ntargets; i++) {
        if ((key->mode == TB_P2P || key->mode == TB_BROADCAST) && key->targets[i] == key->source)
            return tb__fail(TB_INVALID, "rank %" PRId32 " sends to itself by %s", key->source,
                            tb_chunk_mode_name(key->mode));
    }
    return TB_OK;
}

/* Every target gets it from the source, or from a target of a lower rank. */
static tb_status read_via(tb__owned_ir *ir, const json_t *json, const tb_chunk *key, const int32_t **out) {
    uint32_t count;
    TB_TRY(read_ranks(ir, json, "via", &count, out));
    bool is_complete = key->mode == TB_BROADCAST && count == key->ntargets;
    for (uint32_t i = 0; is_complete && i < count; i++) {
        bool is_known = (*out)[i] == key->source;
        for (uint32_t j = 0; j < count; j++)
            is_known |= (*out)[i] == key->targets[j] && key->targets[j] < key->targets[i];
        is_complete = is_known;
    }
    return is_complete ? TB_OK : tb__fail(TB_INVALID, "'via' does not name the sender of each target of a BROADCAST");
}

static tb_status read_channel(tb__owned_ir *ir, const json_t *json) {
    const json_t *buckets;
    const char *mode = json_string_value(json_object_get(json, "mode"));
    tb_channel channel = {.first_bucket = ir->buckets.count};
    tb_chunk key = {0};
    int64_t value;
    while (key.mode <= TB_NONE && !(mode && strcmp(mode, tb_chunk_mode_name(key.mode)) == 0))
        key.mode++;
    if (key.mode > TB_NONE)
        return tb__fail(TB_INVALID, "'mode' is missing or not P2P, BROADCAST, LOCAL or NONE");
    if (json_object_get(json, "coded"))
        TB_TRY(read_bool(json, "coded", &key.is_coded));
    TB_TRY(read_int(json, "source", TB_NO_RANK, TB_MAX_RANKS - 1, &value));
    key.source = (int32_t)value;
    TB_TRY(read_ranks(ir, json, "targets", &key.ntargets, &key.targets));
    TB_TRY(read_ranks(ir, json, "contributors", &key.ncontributors, &key.contributors));
    TB_TRY(tb__chunk_check_key(&key));
    if (json_object_get(json, "via"))
        TB_TRY(read_via(ir, json, &key, &channel.via));
    TB_TRY(read_int(json, "max_in_flight", 1, UINT32_MAX, &value));
    channel.max_in_flight = (uint32_t)value;
    TB_TRY(read_array(json, "buckets", &buckets));
    channel.nbuckets = json_array_size(buckets);
    if (channel.nbuckets == 0)
        return tb__fail(TB_INVALID, "it has no buckets");
    if (!tb__vec_push(&ir->channels, channel))
        return TB_NO_MEMORY;
    for (size_t i = 0; i < channel.nbuckets; i++) {
        uint32_t least_group = i ? ir->buckets.item[ir->buckets.count - 1].group : 0;
        tb_status status = read_bucket(ir, json_array_get(buckets, i), &key, least_group);
        if (status != TB_OK)
            return tb__fail_within(status, "bucket %zu", i);
    }
    return TB_OK;
}

static tb_status read_ir(tb__owned_ir *ir, const json_t *json) {
    const json_t *tensors, *channels;
    int64_t rank;
    if (!json_is_object(json))
        return tb__fail(TB_INVALID, "an IR is a JSON object");
    TB_TRY(read_int(json, "rank", 0, TB_MAX_RANKS - 1, &rank));
    ir->view.rank = (int32_t)rank;
    TB_TRY(read_int(json, "bucket_size", 1, INT64_MAX, &ir->view.bucket_size));
    TB_TRY(read_array(json, "tensors", &tensors));
    TB_TRY(read_array(json, "channels", &channels));
    for (size_t i = 0; i < json_array_size(tensors); i++) {
        const char *name = json_string_value(json_array_get(tensors, i));
        if (!name || (i > 0 && strcmp(ir->names.item[i - 1], name) >= 0))
            return tb__fail(TB_INVALID, "'tensors' element %zu is not a name, or not in order", i);
        name = tb__arena_strdup(&ir->arena, name);
        if (!name || !tb__vec_push(&ir->names, name))
            return TB_NO_MEMORY;
    }
    for (size_t i = 0; i < json_array_size(channels); i++) {
        tb_status status = read_channel(ir, json_array_get(channels, i));
        if (status != TB_OK)
            return tb__fail_within(status, "channel %zu", i);
    }
    return TB_OK;
}

tb_status tb_ir_parse_json(const char *text, size_t length, tb_ir **out) {
    json_error_t error;
    json_t *json = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!json)
        return tb__fail(TB_INVALID, "line %d, column %d: %.200s", error.line, error.column, error.text);
    tb__owned_ir *ir = tb__calloc(1, sizeof *ir);
    tb_status status = ir ? read_ir(ir, json) : TB_NO_MEMORY;
    json_decref(json);
    if (status != TB_OK) {
        if (ir)
            tb_ir_destroy(&ir->view);
        return status;
    }
    tb__ir_finish(ir);
    *out = &ir->view;
    return TB_OK;
}
