/* Tensors as payloads. */
#include "bus/protocol/payload.h"
#include "layout/layout.h"

#include <inttypes.h>
#include <string.h>

#define MOST_BYTES (UINT64_C(1) << 62)

typedef struct wire_memory {
    tb__maybe_uint fd, address, memory;
    uint64_t offset;
    const char *copied_from;
} wire_memory;

typedef struct wire_tensor {
    const char *name, *view, *encode, *scale_group;
    tb_dtype dtype, wire_dtype;
    tb__ints shape, strides;
    tb__blob mesh, placements, mem, scales_mem, scale_mem;
    uint64_t group, nbytes, scales_nbytes;
} wire_tensor;

/* clang-format off */
#define IN(type_, key, kind, how, member, most, text)                                                                  \
    {.name = (key), .type = TB__FIELD_##kind, .rule = TB__##how, .offset = offsetof(type_, member), .max = (most),     \
     .about = (text)}

static const tb__field memory_fields[] = {
    IN(wire_memory, "fd", MAYBE_UINT, OPTION, fd, TB__MAX_FDS - 1, "index among the descriptors that came with the frame"),
    IN(wire_memory, "offset", UINT, OPTION, offset, MOST_BYTES, "with `fd` or `memory`: where the bytes begin there; default: 0"),
    IN(wire_memory, "address", MAYBE_UINT, OPTION, address, 0, "where the bytes begin in the client's memory; with `fd` or `memory` it is said for Invalidate"),
    IN(wire_memory, "memory", MAYBE_UINT, OPTION, memory, TB__MAX_FDS - 1, "index among the frame's `memories`"),
    IN(wire_memory, "copied_from", TEXT, OPTION, copied_from, 0, "with `fd`: the device, such as `cuda:0`, whose memory the client copies from and to here; for reports"),
};

static const tb__field device_memory_fields[] = {
    IN(tb__device_memory, "id", UINT, REQUIRED, id, 0, "the client's number of the memory, the same whenever it comes again"),
    IN(tb__device_memory, "fd", UINT, OPTION, fd, TB__MAX_FDS - 1, "the first of its descriptors among those of the frame; default: 0"),
    IN(tb__device_memory, "nfds", UINT, OPTION, nfds, TB__MAX_FDS, "how many of them are its; default: 0"),
    IN(tb__device_memory, "key", BIN, REQUIRED, key, 0, "what the device needs besides to map it"),
};

static const tb__field tensor_fields[] = {
    IN(wire_tensor, "name", TEXT, REQUIRED, name, 0, "the same on both sides of the pair"),
    IN(wire_tensor, "dtype", DTYPE, REQUIRED, dtype, 0, "`bf16`; PyTorch's and safetensors' names will do, too"),
    IN(wire_tensor, "shape", INTS, REQUIRED, shape, 0, "of the whole tensor"),
    IN(wire_tensor, "strides", INTS, OPTION, strides, 0, "of this rank's part, in elements; default: row-major without gaps"),
    IN(wire_tensor, "mesh", MAP, OPTION, mesh, 0, "a mesh of its own; default: the pair's"),
    IN(wire_tensor, "placements", ARRAY, OPTION, placements, 0, "on that mesh; default: the pair's"),
    IN(wire_tensor, "view", TEXT, OPTION, view, 0, "how the stored tensor becomes the one that is named; default: as it is"),
    IN(wire_tensor, "encode", TEXT, OPTION, encode, 0, "a quantised format, such as `mxfp8`"),
    IN(wire_tensor, "scale_group", TEXT, OPTION, scale_group, 0, "tensors of one group share their scale"),
    IN(wire_tensor, "group", UINT, OPTION, group, UINT32_MAX, "lower groups arrive first; default: 0"),
    IN(wire_tensor, "wire_dtype", DTYPE, OPTION, wire_dtype, 0, "what it is cast to on the way; default: the narrower side's"),
    IN(wire_tensor, "mem", MAP, OPTION, mem, 0, "where this rank's part is; may be left out if that is empty"),
    IN(wire_tensor, "nbytes", UINT, REQUIRED, nbytes, MOST_BYTES, "bytes from there that belong to the tensor"),
    IN(wire_tensor, "scales_mem", MAP, OPTION, scales_mem, 0, "where the scales of its blocks are"),
    IN(wire_tensor, "scales_nbytes", UINT, OPTION, scales_nbytes, MOST_BYTES, "bytes of the scales; default: 0"),
    IN(wire_tensor, "scale_mem", MAP, OPTION, scale_mem, 0, "where the one scale is, a float of 4 bytes"),
};

static const tb__field state_fields[] = {
    IN(tb__state_payload, "status", STATUS, REQUIRED, state.status, 127, "0, or the code of a failure"),
    IN(tb__state_payload, "message", SENTENCE, REQUIRED, message, 0, "why it failed; empty if it did not"),
    IN(tb__state_payload, "events", UINT32, OPTION, state.events, 15, "the sum of: 1 released, 2 arrived, 4 committed, 8 committing"),
    IN(tb__state_payload, "attempt", UINT, OPTION, state.attempt, 0, "the number that the senders gave it; default: 0, none"),
    IN(tb__state_payload, "version", UINT, OPTION, state.version, 0, "the same once it is committed"),
    IN(tb__state_payload, "bytes_done", UINT, OPTION, state.bytes_done, MOST_BYTES, "progress"),
    IN(tb__state_payload, "bytes_total", UINT, OPTION, state.bytes_total, MOST_BYTES, "of how many"),
    IN(tb__state_payload, "groups_done", UINT32, OPTION, state.groups_done, UINT32_MAX, "groups of tensors that are done"),
    IN(tb__state_payload, "groups_total", UINT32, OPTION, state.groups_total, UINT32_MAX, "of how many"),
    IN(tb__state_payload, "seconds", FLOAT, OPTION, state.seconds, 0, "how long it has taken"),
    IN(tb__state_payload, "plan", FLOAT, OPTION, state.phase[TB_PHASE_PLAN], 0, "seconds of that in each phase"),
    IN(tb__state_payload, "wait", FLOAT, OPTION, state.phase[TB_PHASE_WAIT], 0, "the same"),
    IN(tb__state_payload, "pack", FLOAT, OPTION, state.phase[TB_PHASE_PACK], 0, "the same"),
    IN(tb__state_payload, "wire", FLOAT, OPTION, state.phase[TB_PHASE_WIRE], 0, "the same"),
    IN(tb__state_payload, "unpack", FLOAT, OPTION, state.phase[TB_PHASE_UNPACK], 0, "the same"),
    IN(tb__state_payload, "commit", FLOAT, OPTION, state.phase[TB_PHASE_COMMIT], 0, "the same"),
    IN(tb__state_payload, "received", UINT, OPTION, received, 0, "the last version that was received; default: 0, none"),
    IN(tb__state_payload, "torn", BOOL, OPTION, is_torn, 0, "the tensors have parts of a version that failed"),
    IN(tb__state_payload, "mixed", BOOL, OPTION, is_mixed, 0, "of all pairs: what was received through them differs"),
    IN(tb__state_payload, "side", TEXT, OPTION, side, 0, "of a pair: this side's group; default: the agent's own"),
    IN(tb__state_payload, "in_doubt", BOOL, OPTION, is_in_doubt, 0, "of all pairs: whether a version is committed is not known"),
};
/* clang-format on */

const tb__schema tb__memory_schema = TB__SCHEMA("mem", memory_fields, wire_memory);
const tb__schema tb__device_memory_schema = TB__SCHEMA("device memory", device_memory_fields, tb__device_memory);
const tb__schema tb__tensor_schema = TB__SCHEMA("tensor", tensor_fields, wire_tensor);
const tb__schema tb__state_schema = TB__SCHEMA("state", state_fields, tb__state_payload);

static tb_status encode_memory(const tb__payload_memory *memory, tb__arena *arena, tb__blob *out) {
    if (memory->kind == TB__MEMORY_NONE)
        return TB_OK;
    wire_memory wire = {0};
    if (memory->kind == TB__MEMORY_FD || memory->kind == TB__MEMORY_DEVICE) {
        *(memory->kind == TB__MEMORY_FD ? &wire.fd : &wire.memory) = tb__some_uint(memory->fd);
        wire.offset = memory->offset;
    }
    if (memory->kind == TB__MEMORY_ADDRESS || memory->address)
        wire.address = tb__some_uint(memory->address);
    wire.copied_from = memory->copied_from;
    return tb__map_encode_kept(&tb__memory_schema, &wire, arena, out);
}

static bool same_mesh(const tb_layout *a, const tb_layout *b) {
    if (a->ndim != b->ndim || a->nranks != b->nranks ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return false;
    for (int32_t i = 0; i < a->nranks; i++) {
        if (tb_layout_rank_at(a, i) != tb_layout_rank_at(b, i))
            return false;
    }
    return true;
}

/* The buffers must be freed also if it fails. */
static tb_status encode_parts(const tb__tensor_payload *t, const tb_layout *pair, tb__arena *arena, tb__bytes *mesh,
                              tb__bytes *placements, wire_tensor *out) {
    if (t->layout && !(pair && same_mesh(t->layout, pair)))
        TB_TRY(tb__mesh_encode(t->layout, mesh));
    if (t->layout)
        TB_TRY(tb__placements_encode(t->layout, placements));
    out->mesh = (tb__blob){mesh->item, mesh->count};
    out->placements = (tb__blob){placements->item, placements->count};
    TB_TRY(encode_memory(&t->data, arena, &out->mem));
    TB_TRY(encode_memory(&t->scales, arena, &out->scales_mem));
    return encode_memory(&t->scale, arena, &out->scale_mem);
}

tb_status tb__tensor_encode(const tb__tensor_payload *tensor, const tb_layout *pair, tb__bytes *out) {
    const tb__tensor_payload *t = tensor;
    wire_tensor wire = {.name = t->name, .view = t->view, .encode = t->encode, .scale_group = t->scale_group};
    wire.dtype = t->dtype;
    wire.wire_dtype = t->wire_dtype;
    wire.shape = (tb__ints){.count = (size_t)t->shape.ndim, .item = t->shape.dim};
    wire.strides = (tb__ints){.count = (size_t)t->shape.ndim, .item = t->strides, .is_set = t->has_strides};
    wire.group = t->group;
    wire.nbytes = t->data.nbytes;
    wire.scales_nbytes = t->scales.nbytes;
    tb__arena arena = {0};
    tb__bytes mesh = {0}, placements = {0};
    tb_status status = encode_parts(t, pair, &arena, &mesh, &placements, &wire);
    if (status == TB_OK)
        status = tb__map_encode(&tb__tensor_schema, &wire, out);
    tb__arena_fini(&arena);
    free(mesh.item);
    free(placements.item);
    return status;
}

/* It goes into reports as it is. */
static bool is_device_name(const char *name) {
    size_t length = strlen(name);
    return length > 0 && length < 24 && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789:_") == length;
}

static tb_status decode_memory(tb__blob bytes, uint64_t nbytes, const char *what, tb__arena *arena,
                               tb__payload_memory *out) {
    *out = (tb__payload_memory){0};
    if (bytes.nbytes == 0) {
        if (nbytes > 0)
            return tb__fail(TB_INVALID, "%s is missing, and there are %" PRIu64 " bytes", what, nbytes);
        return TB_OK;
    }
    wire_memory wire = {0};
    tb_status status = tb__map_decode(&tb__memory_schema, bytes, arena, &wire);
    if (status != TB_OK)
        return status;
    int nways = wire.fd.is_set + wire.memory.is_set;
    if (nways > 1 || (nways == 0 && !wire.address.is_set))
        return tb__fail(TB_INVALID, "%s has %s; it must have one of them, or an `address`", what,
                        nways ? "`fd` and `memory`" : "none of `fd` and `memory`");
    if (nways == 0 && wire.offset > 0)
        return tb__fail(TB_INVALID, "%s has `offset` with `address`", what);
    if (wire.address.is_set && wire.address.value > UINT64_MAX - nbytes)
        return tb__fail(TB_TOO_BIG, "%s: %" PRIu64 " bytes from 0x%" PRIx64 " on run past the last address", what,
                        nbytes, wire.address.value);
    if (wire.copied_from && !is_device_name(wire.copied_from))
        return tb__fail(TB_INVALID, "%s: `copied_from` is not the name of a device", what);
    *out = (tb__payload_memory){.kind = wire.fd.is_set       ? TB__MEMORY_FD
                                        : wire.memory.is_set ? TB__MEMORY_DEVICE
                                                             : TB__MEMORY_ADDRESS,
                                .fd = (uint32_t)(wire.fd.is_set ? wire.fd : wire.memory).value,
                                .offset = wire.offset,
                                .address = wire.address.value,
                                .nbytes = nbytes,
                                .copied_from = wire.copied_from};
    return TB_OK;
}

static tb_status decode_shape(const wire_tensor *wire, tb__tensor_payload *out) {
    if (wire->shape.count > TB_MAX_DIMS)
        return tb__fail(TB_INVALID, "shape has %zu dims; there are at most %d", wire->shape.count, TB_MAX_DIMS);
    out->shape.ndim = (int)wire->shape.count;
    for (size_t d = 0; d < wire->shape.count; d++)
        out->shape.dim[d] = wire->shape.item[d];
    TB_TRY(tb_shape_size(&out->shape, wire->dtype, NULL, NULL));
    out->has_strides = wire->strides.is_set;
    if (out->has_strides && wire->strides.count != wire->shape.count)
        return tb__fail(TB_INVALID, "%zu strides for a tensor of %zu dims", wire->strides.count, wire->shape.count);
    for (size_t d = 0; d < wire->strides.count; d++)
        out->strides[d] = wire->strides.item[d];
    return TB_OK;
}

static tb_status decode_all_memory(const wire_tensor *wire, tb__arena *arena, tb__tensor_payload *out) {
    TB_TRY(decode_memory(wire->mem, wire->nbytes, "mem", arena, &out->data));
    TB_TRY(decode_memory(wire->scales_mem, wire->scales_nbytes, "scales_mem", arena, &out->scales));
    uint64_t scale = wire->scale_mem.nbytes ? sizeof(float) : 0;
    return decode_memory(wire->scale_mem, scale, "scale_mem", arena, &out->scale);
}

/* Last, since the layout is the only thing that would have to be freed. */
static tb_status decode_layout(const wire_tensor *wire, const tb_layout *pair, tb__tensor_payload *out) {
    if (wire->mesh.nbytes > 0 && wire->placements.nbytes == 0)
        return tb__fail(TB_INVALID, "it has a mesh and no placements");
    if (wire->mesh.nbytes > 0)
        return tb__layout_decode(wire->mesh, wire->placements, &out->layout);
    return wire->placements.nbytes > 0 ? tb__placements_decode(pair, wire->placements, &out->layout) : TB_OK;
}

tb_status tb__tensor_decode(tb__blob payload, const tb_layout *pair, tb__arena *arena, tb__tensor_payload *out) {
    wire_tensor wire = {0};
    TB_TRY(tb__map_decode(&tb__tensor_schema, payload, arena, &wire));
    if (!*wire.name)
        return tb__fail(TB_INVALID, "tensor: name is empty");
    tb__tensor_payload t = {.name = wire.name, .view = wire.view, .encode = wire.encode};
    t.scale_group = wire.scale_group;
    t.dtype = wire.dtype;
    t.wire_dtype = wire.wire_dtype;
    t.group = (uint32_t)wire.group;
    tb_status status = decode_shape(&wire, &t);
    if (status == TB_OK)
        status = decode_all_memory(&wire, arena, &t);
    if (status == TB_OK)
        status = decode_layout(&wire, pair, &t);
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.200s'", wire.name);
    *out = t;
    return TB_OK;
}
