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

static int append_payload(void *data, const char *bytes, size_t nbytes) {
    tb__bytes *out = data;
    if (!tb__vec_reserve(out, nbytes))
        return -1;
    memcpy(out->item + out->count, bytes, nbytes);
    out->count += nbytes;
    return 0;
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
    msgpack_packer_init(&packer, out, append_payload);
    int failed = msgpack_pack_array(&packer, (size_t)layout->ndim);
    for (int m = 0; m < layout->ndim && !failed; m++)
        failed = put_placement(&packer, &layout->place[m]);
    if (!failed)
        return TB_OK;
    out->count = start;
    return TB_NO_MEMORY;
}

/* Reading. Only the items of the array that is being read are taken, and each claim was compared with what is there. */
static tb_status take_int(tb__cursor *from, const char *what, int64_t *out) {
    tb__value value;
    TB_TRY(tb__value_take(from, &value));
    if (value.type == TB__VALUE_NEGATIVE)
        *out = value.negative;
    else if (value.type == TB__VALUE_UINT && value.positive <= INT64_MAX)
        *out = (int64_t)value.positive;
    else
        return tb__fail(TB_INVALID, "%s is not a whole number below 2^63", what);
    return TB_OK;
}

static tb_status take_array_header(tb__cursor *from, const char *what, uint32_t *count) {
    tb__value value;
    TB_TRY(tb__value_take(from, &value));
    if (value.type != TB__VALUE_ARRAY)
        return tb__fail(TB_INVALID, "%s is %s; it must be an array", what, tb__value_type_name(value.type));
    *count = value.count;
    return TB_OK;
}

/* Goes over the lists: counts their segments first, then, with somewhere to put them, reads them. */
static tb_status walk_lists(tb__cursor from, size_t *ends, tb_segment *segments, uint32_t *nlists, size_t *nsegments,
                            tb__cursor *end) {
    TB_TRY(take_array_header(&from, "an Explicit's lists", nlists));
    size_t n = 0;
    for (uint32_t r = 0; r < *nlists; r++) {
        uint32_t count, two;
        TB_TRY(take_array_header(&from, "an Explicit's list", &count));
        for (uint32_t i = 0; i < count; i++, n++) {
            tb_segment s;
            TB_TRY(take_array_header(&from, "an Explicit's segment", &two));
            if (two != 2)
                return tb__fail(TB_INVALID, "an Explicit's segment has %" PRIu32 " numbers; it must be [start, stop]",
                                two);
            TB_TRY(take_int(&from, "a segment's start", &s.start));
            TB_TRY(take_int(&from, "a segment's stop", &s.stop));
            if (segments)
                segments[n] = s;
        }
        if (ends)
            ends[r] = n;
    }
    *nsegments = n;
    *end = from;
    return TB_OK;
}

static tb_status take_lists(tb__cursor *from, tb__arena *arena, tb_placement *out) {
    uint32_t nlists;
    size_t nsegments;
    tb__cursor end;
    TB_TRY(walk_lists(*from, NULL, NULL, &nlists, &nsegments, &end));
    size_t *ends = tb__arena_alloc(arena, nlists, sizeof *ends);
    tb_segment *segments = tb__arena_alloc(arena, nsegments, sizeof *segments);
    if (!ends || !segments)
        return TB_NO_MEMORY;
    TB_TRY(walk_lists(*from, ends, segments, &nlists, &nsegments, from));
    out->nlists = nlists;
    out->list_ends = ends;
    out->segments = segments;
    return TB_OK;
}

static tb_status take_sizes(tb__cursor *from, tb__arena *arena, uint32_t count, tb_placement *out) {
    int64_t *sizes = tb__arena_alloc(arena, count, sizeof *sizes);
    if (!sizes)
        return TB_NO_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        TB_TRY(take_int(from, "a block size", &sizes[i]));
    out->nsizes = count;
    out->sizes = sizes;
    return TB_OK;
}

/* A short string; "" for what is none. */
static tb_status take_short_string(tb__cursor *from, char *out, size_t nbytes) {
    tb__value value;
    TB_TRY(tb__value_take(from, &value));
    bool fits = value.type == TB__VALUE_STR && value.bytes.nbytes < nbytes;
    if (fits)
        memcpy(out, value.bytes.data, value.bytes.nbytes);
    out[fits ? value.bytes.nbytes : 0] = '\0';
    return TB_OK;
}

static tb_status wrong_placement(void) {
    return tb__fail(TB_INVALID,
                    "a placement is one of [\"R\"], [\"S\",dim], [\"SS\",dim,split], [\"BS\",dim,size,...], "
                    "[\"E\",dim,lists], [\"P\",op]");
}

static tb_status take_kind(tb__cursor *from, tb_placement_kind *out) {
    char tag[8];
    TB_TRY(take_short_string(from, tag, sizeof tag));
    for (int kind = 0; tb__placement_tag((tb_placement_kind)kind); kind++) {
        if (strcmp(tb__placement_tag((tb_placement_kind)kind), tag) == 0) {
            *out = (tb_placement_kind)kind;
            return TB_OK;
        }
    }
    return wrong_placement();
}

static tb_status take_placement(tb__cursor *from, tb__arena *arena, tb_placement *out) {
    uint32_t count;
    TB_TRY(take_array_header(from, "a placement", &count));
    if (count == 0)
        return wrong_placement();
    TB_TRY(take_kind(from, &out->kind));
    if (out->kind == TB_REPLICATE)
        return count == 1 ? TB_OK : wrong_placement();
    if (out->kind == TB_PARTIAL) {
        char op[16];
        if (count != 2)
            return wrong_placement();
        TB_TRY(take_short_string(from, op, sizeof op));
        if (!tb__reduce_op_read(op, &out->op))
            return tb__fail(TB_INVALID, "[\"P\",op] takes sum, avg, min, max or product");
        return TB_OK;
    }
    bool is_long = out->kind != TB_SHARD;
    if (out->kind == TB_BLOCK_SHARD ? count < 3 : count != 2 + (unsigned)is_long)
        return wrong_placement();
    int64_t dim;
    TB_TRY(take_int(from, "a placement's dim", &dim));
    if (dim < -TB_MAX_DIMS || dim >= TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "a placement's dim, %" PRId64 ", is out of range", dim);
    out->dim = (int)dim;
    if (out->kind == TB_STRIDED_SHARD)
        return take_int(from, "a split factor", &out->split);
    if (out->kind == TB_BLOCK_SHARD)
        return take_sizes(from, arena, count - 2, out);
    return out->kind == TB_EXPLICIT ? take_lists(from, arena, out) : TB_OK;
}

static tb_status take_placements(tb__blob bytes, int ndim, tb__arena *arena, tb_placement *out) {
    TB_TRY(tb__value_check(bytes));
    tb__cursor from = tb__cursor_over(bytes);
    uint32_t count;
    TB_TRY(take_array_header(&from, "the list", &count));
    if (count != (uint32_t)ndim)
        return tb__fail(TB_INVALID, "%" PRIu32 " of them for a mesh of %d dims", count, ndim);
    for (uint32_t m = 0; m < count; m++) {
        tb_status status = take_placement(&from, arena, &out[m]);
        if (status != TB_OK)
            return tb__fail_within(status, "mesh dim %" PRIu32, m);
    }
    return TB_OK;
}

static tb_status make_layout(int ndim, const int64_t *shape, const int32_t *ranks, tb__blob placements,
                             tb__arena *arena, tb_layout **out) {
    tb_placement place[TB_MAX_DIMS] = {0};
    tb_status status = take_placements(placements, ndim, arena, place);
    if (status != TB_OK)
        return tb__fail_within(status, "placements");
    return tb_layout_create(ndim, shape, ranks, place, out);
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
    return make_layout((int)wire.shape.count, wire.shape.item, ranks, placements, arena, out);
}

tb_status tb__layout_decode(tb__blob mesh, tb__blob placements, tb_layout **out) {
    tb__arena arena = {0};
    tb_status status = make_with_mesh(mesh, placements, &arena, out);
    tb__arena_fini(&arena);
    return status;
}

tb_status tb__placements_decode(const tb_layout *mesh, tb__blob placements, tb_layout **out) {
    tb__arena arena = {0};
    int32_t *ranks = tb__arena_alloc(&arena, (size_t)mesh->nranks, sizeof *ranks);
    tb_status status = ranks ? TB_OK : TB_NO_MEMORY;
    for (int32_t i = 0; ranks && i < mesh->nranks; i++)
        ranks[i] = tb_layout_rank_at(mesh, i);
    if (status == TB_OK)
        status = make_layout(mesh->ndim, mesh->shape, ranks, placements, &arena, out);
    tb__arena_fini(&arena);
    return status;
}
