/* A side's list of tensors, as it goes from rank to rank: by name, with all that both sides have to know. */
#include "bus/world.h"

#include <string.h>

void tb__tensors_pack(tb__pack *pack, const tb__tensors *tensors) {
    tb__pack_u32(pack, (uint32_t)tensors->list.count);
    for (size_t i = 0; i < tensors->list.count; i++) {
        const tb__tensor *t = &tensors->list.item[i];
        tb__pack_string(pack, t->name);
        tb__pack_u32(pack, t->dtype);
        tb__pack_u32(pack, t->wire_dtype);
        tb__pack_u32(pack, t->group);
        tb__pack_u32(pack, (uint32_t)t->shape.ndim);
        for (int d = 0; d < t->shape.ndim; d++)
            tb__pack_i64(pack, t->shape.dim[d]);
        tb__pack_string(pack, t->layout ? t->layout : "");
    }
}

static bool unpack_tensor(tb__unpack *u, tb__tensor *t) {
    const char *name = tb__unpack_string(u);
    t->dtype = (tb_dtype)tb__unpack_u32(u);
    t->wire_dtype = (tb_dtype)tb__unpack_u32(u);
    t->group = tb__unpack_u32(u);
    uint32_t ndim = tb__unpack_u32(u);
    if (u->failed || !*name || ndim > TB_MAX_DIMS || !tb_dtype_bits(t->dtype) ||
        (unsigned)t->wire_dtype >= TB_DTYPE_COUNT)
        return false;
    t->shape.ndim = (int)ndim;
    for (uint32_t d = 0; d < ndim; d++)
        t->shape.dim[d] = tb__unpack_i64(u);
    const char *layout = tb__unpack_string(u);
    if (u->failed || tb_shape_size(&t->shape, t->dtype, NULL, NULL) != TB_OK)
        return false;
    t->name = tb__strdup(name);
    t->layout = *layout ? tb__strdup(layout) : NULL;
    return t->name && (!*layout || t->layout);
}

bool tb__tensors_unpack(const void *data, size_t nbytes, tb__tensors *out) {
    tb__unpack u = {data, (const unsigned char *)data + nbytes, false};
    size_t count = tb__unpack_count(&u, 25);
    for (size_t i = 0; i < count && !u.failed; i++) {
        tb__tensor t = {0};
        bool is_good = unpack_tensor(&u, &t) && tb__vec_reserve(&out->list, 1) &&
                       (i == 0 || strcmp(out->list.item[i - 1].name, t.name) < 0);
        if (!is_good) {
            free(t.name);
            free(t.layout);
            u.failed = true;
        } else {
            out->list.item[out->list.count++] = t;
        }
    }
    return tb__unpack_is_done(&u);
}

uint64_t tb__tensors_hash(const tb__pack *pack) {
    uint64_t hash = pack->count;
    for (size_t i = 0; i < pack->count; i += 8) {
        uint64_t word = 0;
        memcpy(&word, pack->data + i, pack->count - i < 8 ? pack->count - i : 8);
        hash = tb__hash(hash + i, word);
    }
    return hash;
}
