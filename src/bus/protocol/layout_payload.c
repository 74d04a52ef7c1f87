/* Layouts as payloads: a mesh and the placements on it. */
#include "bus/protocol/payload.h"
#include "bus/protocol/value.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <msgpack.h>
#include <string.h>

typedef struct wire_mesh {
    tb__ints shape, ranks;
} wire_mesh;

static const tb__field mesh_fields[] = {
    {.name = "shape", .type = TB__FIELD_INTS, .offset = offsetof(wire_mesh, shape), .about = "sizes of its dims"},
    {.name = "ranks",
     .type = TB__FIELD_INTS,
     .rule = TB__NILABLE,
     .offset = offsetof(wire_mesh, ranks),
     .about = "row-major, distinct; nil: 0, 1, 2, ..."},
};

const tb__schema tb__mesh_schema = TB__SCHEMA("mesh", mesh_fields, wire_mesh);

tb_status tb__mesh_encode(const tb_layout *layout, tb__bytes *out) {
    wire_mesh wire = {.shape = {.count = (size_t)layout->ndim, .item = layout->shape}};
    int64_t *ranks = NULL;
    if (layout->ranks || layout->first != 0) {
        ranks = tb__malloc((size_t)layout->nranks, sizeof *ranks);
        if (!ranks)
            return TB_NO_MEMORY;
        for (int32_t i = 0; i < layout->nranks; i++)
            ranks[i] = tb_layout_rank_at(layout, i);
        wire.ranks = (tb__ints){.count = (size_t)layout->nranks, .item = ranks, .is_set = true};
    }
    tb_status status = tb__map_encode(&tb__mesh_schema, &wire, out);
    free(ranks);
    return status;
}

static int pack_text(msgpack_packer *packer, const char *text) {
    return msgpack_pack_str_with_body(packer, text, strlen(text));
}

static int put_lists(msgpack_packer *packer, const tb_placement *place) {
    int failed = msgpack_pack_array(packer, place->nlists);
    for (size_t r = 0, i = 0; r < place->nlists; r++) {
        failed |= msgpack_pack_array(packer, place->list_ends[r] - i);
        for (; i < place->list_ends[r] && !failed; i++) {
            failed |= msgpack_pack_array(packer, 2);
            failed |= msgpack_pack_int64(packer, place->segments[i].start);
            failed |= msgpack_pack_int64(packer, place->segments[i].stop);
        }
    }
    return failed;
}

/* Not 0 if memory is short. */
static int put_placement(msgpack_packer *packer, const tb_placement *place) {
    bool has_one = place->kind == TB_STRIDED_SHARD || place->kind == TB_EXPLICIT;
    size_t more = place->kind == TB_BLOCK_SHARD ? place->nsizes : has_one;
    size_t count = place->kind == TB_REPLICATE ? 1 : 2 + more;
    int failed = msgpack_pack_array(packer, count);
    failed |= pack_text(packer, tb__placement_tag(place->kind));
    if (tb__placement_shards(place))
        failed |= msgpack_pack_int64(packer, place->dim);
    if (place->kind == TB_PARTIAL)
        failed |= pack_text(packer, tb__reduce_op_name(place->op));
    else if (place->kind == TB_STRIDED_SHARD)
        failed |= msgpack_pack_int64(packer, place->split);
    else if (place->kind == TB_EXPLICIT)
        failed |= put_lists(packer, place);
    for (size_t i = 0; place->kind == TB_BLOCK_SHARD && i < place->nsizes; i++)
        failed |= msgpack_pack_int64(packer, place->sizes[i]);
    return failed;
}

tb_status tb__placements_encode(const tb_layout *layout, tb__bytes *out) {
    size_t start = out->count;
    msgpack_packer packer;
    msgpack_packer_init(&packer, out, tb__append_packed);
    int failed = msgpack_pack_array(&packer, (size_t)layout->ndim);
    for (int m = 0; m < layout->ndim && !failed; m++)
        failed = put_placement(&packer, &layout->place[m]);
    if (!failed)
        return TB_OK;
    out->count = start;
    return TB_NO_MEMORY;
}

/* The next value as JSON, which src/layout reads: arrays, numbers and text; all else is null. JSON takes more memory,
 * so at most *left values are read. NULL: there are more, or there is no memory. The bytes were checked. */
static json_t *take_json(tb__cursor *from, size_t *left) {
    tb__value value;
    tb__cursor start = *from;
    if (*left == 0 || tb__value_take(from, &value) != TB_OK)
        return NULL;
    --*left;
    if (value.type == TB__VALUE_UINT && value.positive <= INT64_MAX)
        return json_integer((json_int_t)value.positive);
    if (value.type == TB__VALUE_NEGATIVE)
        return json_integer(value.negative);
    if (value.type == TB__VALUE_STR)
        return json_stringn_nocheck((const char *)value.bytes.data, value.bytes.nbytes);
    if (value.type != TB__VALUE_ARRAY) {
        *from = start;
        return tb__value_skip(from, 0) == TB_OK ? json_null() : NULL;
    }
    json_t *array = json_array();
    for (uint32_t i = 0; array && i < value.count; i++) {
        if (json_array_append_new(array, take_json(from, left)) != 0) { /* takes the item, also if it fails */
            json_decref(array);
            array = NULL;
        }
    }
    return array;
}

static tb_status read_placements(const json_t *json, int ndim, tb_placement *out) {
    if (!json_is_array(json))
        return tb__fail(TB_INVALID, "they must be an array");
    if (json_array_size(json) != (size_t)ndim)
        return tb__fail(TB_INVALID, "%zu of them for a mesh of %d dims", json_array_size(json), ndim);
    for (int m = 0; m < ndim; m++) {
        tb_status status = tb__placement_from_json(json_array_get(json, (size_t)m), &out[m]);
        if (status != TB_OK)
            return tb__fail_within(status, "mesh dim %d", m);
    }
    return TB_OK;
}

static tb_status decode_placements(tb__blob bytes, int ndim, tb_placement *out) {
    size_t left = TB__MAX_ITEMS;
    tb__cursor from = tb__cursor_over(bytes);
    TB_TRY(tb__value_check(bytes));
    json_t *json = take_json(&from, &left);
    if (!json)
        return left > 0 ? tb__fail(TB_NO_MEMORY, "no memory for them")
                        : tb__fail(TB_TOO_BIG, "they have more than %d values", TB__MAX_ITEMS);
    tb_status status = read_placements(json, ndim, out);
    json_decref(json);
    return status;
}

static tb_status make_layout(int ndim, const int64_t *shape, const int32_t *ranks, tb__blob placements,
                             tb_layout **out) {
    tb_placement place[TB_MAX_DIMS] = {0};
    tb_status status = decode_placements(placements, ndim, place);
    if (status == TB_OK)
        status = tb_layout_create(ndim, shape, ranks, place, out);
    else
        (void)tb__fail_within(status, "placements");
    for (int m = 0; m < ndim; m++)
        tb__placement_fini(&place[m]);
    return status;
}

static tb_status make_with_mesh(tb__blob mesh, tb__blob placements, tb__arena *arena, tb_layout **out) {
    wire_mesh wire = {0};
    TB_TRY(tb__map_decode(&tb__mesh_schema, mesh, arena, &wire));
    if (wire.shape.count < 1 || wire.shape.count > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "mesh: it has %zu dims; there must be 1 to %d", wire.shape.count, TB_MAX_DIMS);
    int64_t size = 1;
    for (size_t m = 0; m < wire.shape.count; m++) {
        if (wire.shape.item[m] < 1 || wire.shape.item[m] > TB_MAX_RANKS / size)
            return tb__fail(TB_INVALID,
                            "mesh: dim %zu has size %" PRId64 "; sizes are at least 1, and ranks at most %d", m,
                            wire.shape.item[m], TB_MAX_RANKS);
        size *= wire.shape.item[m];
    }
    int32_t *ranks = NULL;
    if (wire.ranks.is_set) {
        if (wire.ranks.count != (size_t)size)
            return tb__fail(TB_INVALID, "mesh: %zu ranks for a mesh of %" PRId64, wire.ranks.count, size);
        ranks = tb__arena_alloc(arena, wire.ranks.count, sizeof *ranks);
        if (!ranks)
            return TB_NO_MEMORY;
    }
    for (size_t i = 0; ranks && i < wire.ranks.count; i++) {
        if (wire.ranks.item[i] < 0 || wire.ranks.item[i] >= TB_MAX_RANKS)
            return tb__fail(TB_INVALID, "mesh: rank %" PRId64 " is not between 0 and %d", wire.ranks.item[i],
                            TB_MAX_RANKS - 1);
        ranks[i] = (int32_t)wire.ranks.item[i];
    }
    return make_layout((int)wire.shape.count, wire.shape.item, ranks, placements, out);
}

tb_status tb__layout_decode(tb__blob mesh, tb__blob placements, tb_layout **out) {
    tb__arena arena = {0};
    tb_status status = make_with_mesh(mesh, placements, &arena, out);
    tb__arena_fini(&arena);
    return status;
}

tb_status tb__placements_decode(const tb_layout *mesh, tb__blob placements, tb_layout **out) {
    int32_t *ranks = tb__malloc((size_t)mesh->nranks, sizeof *ranks);
    if (!ranks)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < mesh->nranks; i++)
        ranks[i] = tb_layout_rank_at(mesh, i);
    tb_status status = make_layout(mesh->ndim, mesh->shape, ranks, placements, out);
    free(ranks);
    return status;
}
