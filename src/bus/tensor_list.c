/* A rank's tensor list as it is sent: tensors by name, with their descriptions, and how names are matched. */
#include "bus/exchange.h"

#include <string.h>

typedef TB_VEC(uint64_t) memory_kinds;

/* The number of the tensor's kind of memory among those of the tensors before it. Ranks of which each has all of its
 * tensors on a GPU have the same list, whichever GPU that is. */
static uint32_t number_memory(tb__pack *pack, memory_kinds *kinds, const tb__added_tensor *t) {
    uint32_t i = 0;
    if (t->memory_kind == 0) /* it has none */
        return 0;
    while (i < kinds->count && kinds->item[i] != t->memory_kind)
        i++;
    pack->failed |= i == kinds->count && !tb__vec_push(kinds, t->memory_kind);
    return i;
}

void tb__tensor_list_pack(tb__pack *pack, const tb_batch *batch, const tb__added_tensor *const *tensors,
                          size_t ntensors) {
    memory_kinds kinds = {0};
    tb__pack_u32(pack, batch->opts.commit);
    tb__pack_u32(pack, batch->opts.checksum);
    tb__pack_raw(pack, batch->matching.data, batch->matching.count);
    tb__pack_u32(pack, (uint32_t)ntensors);
    for (size_t i = 0; i < ntensors; i++) {
        const tb__added_tensor *t = tensors[i];
        tb__pack_string(pack, t->name);
        tb__pack_u32(pack, t->dtype);
        tb__pack_u32(pack, t->wire_dtype);
        tb__pack_u32(pack, t->group);
        tb__pack_u32(pack, (uint32_t)t->shape.ndim);
        for (int d = 0; d < t->shape.ndim; d++)
            tb__pack_i64(pack, t->shape.dim[d]);
        tb__pack_string(pack, t->layout ? t->layout : "");
        tb__pack_string(pack, t->encode ? t->encode : "");
        tb__pack_string(pack, t->scale_group ? t->scale_group : "");
        tb__pack_u32(pack, (uint32_t)t->is_transformed | (uint32_t)t->is_whole << 1);
        tb__pack_u32(pack, number_memory(pack, &kinds, t));
    }
    free(kinds.item);
}

void tb__matching_pack(tb__pack *pack, const tb_batch_opts *opts) {
    tb__pack_u32(pack, (uint32_t)opts->nties);
    for (size_t i = 0; i < opts->nties; i++) {
        tb__pack_string(pack, opts->ties[i].name);
        tb__pack_string(pack, opts->ties[i].canonical);
    }
    tb__pack_u32(pack, (uint32_t)opts->nignored);
    for (size_t i = 0; i < opts->nignored; i++)
        tb__pack_string(pack, opts->ignored[i]);
}

/* These return false also if memory is short; invalid input sets u->failed. */
static bool unpack_matching(tb__unpack *u, tb__tensor_list *list) {
    size_t nties = tb__unpack_count(u, 10);
    for (size_t i = 0; i < nties; i++) {
        const char *name = tb__unpack_string(u), *canonical = tb__unpack_string(u);
        if (u->failed || !tb__vec_push(&list->ties, (tb_tie){name, canonical}))
            return false;
    }
    size_t nignored = tb__unpack_count(u, 5);
    for (size_t i = 0; i < nignored; i++) {
        const char *pattern = tb__unpack_string(u);
        if (u->failed || !tb__vec_push(&list->ignored, pattern))
            return false;
    }
    return !u->failed;
}

static void unpack_tensor(tb__unpack *u, tb__tensor_description *t) {
    t->name = tb__unpack_string(u);
    t->dtype = (tb_dtype)tb__unpack_u32(u);
    t->wire_dtype = (tb_dtype)tb__unpack_u32(u);
    t->group = tb__unpack_u32(u);
    uint32_t ndim = tb__unpack_u32(u);
    u->failed |= !*t->name || ndim > TB_MAX_DIMS || !tb_dtype_bits(t->dtype) ||
                 (unsigned)t->wire_dtype >= TB_DTYPE_COUNT || t->group == UINT32_MAX;
    if (u->failed)
        return;
    t->shape.ndim = (int)ndim;
    for (uint32_t d = 0; d < ndim; d++)
        t->shape.dim[d] = tb__unpack_i64(u);
    const char *layout = tb__unpack_string(u);
    const char *encode = tb__unpack_string(u), *scale_group = tb__unpack_string(u);
    t->layout = *layout ? layout : NULL;
    t->encode = *encode ? encode : NULL;
    t->scale_group = *scale_group ? scale_group : NULL;
    uint32_t transform = tb__unpack_u32(u);
    u->failed |= transform > 3 || transform == 2;
    t->is_transformed = transform & 1;
    t->is_whole = transform & 2;
    t->memory = tb__unpack_u32(u);
    u->failed |= t->encode && tb__encoding_parse(t->encode, &t->encoding) != TB_OK;
    u->failed |= tb_shape_size(&t->shape, t->dtype, NULL, NULL) != TB_OK;
}

static bool unpack_tensors(tb__unpack *u, tb__tensor_list *list) {
    size_t count = tb__unpack_count(u, 29);
    for (size_t i = 0; i < count; i++) {
        tb__tensor_description t = {0};
        unpack_tensor(u, &t);
        u->failed |= i > 0 && strcmp(list->tensors.item[i - 1].name, t.name) >= 0;
        if (u->failed || !tb__vec_push(&list->tensors, t))
            return false;
    }
    u->failed |= u->at != u->end;
    return !u->failed;
}

tb_status tb__tensor_list_init(tb__tensor_list *list, unsigned char *data, size_t nbytes) {
    tb__unpack u = {data, data + nbytes, false};
    *list = (tb__tensor_list){.hash = tb__tensor_list_hash(data, nbytes), .data = data, .nbytes = nbytes};
    list->commit = (tb_commit)tb__unpack_u32(&u);
    u.failed |= (unsigned)list->commit > TB_SHADOW;
    list->checksum = tb__unpack_u32(&u) != 0;
    if (!u.failed && unpack_matching(&u, list) && unpack_tensors(&u, list))
        return TB_OK;
    tb__tensor_list_fini(list);
    return u.failed ? tb__fail(TB_INVALID, "a tensor list of %zu bytes can't be parsed", nbytes) : TB_NO_MEMORY;
}

void tb__tensor_list_fini(tb__tensor_list *list) {
    free(list->tensors.item);
    free(list->ties.item);
    free(list->ignored.item);
    free(list->data);
}

uint64_t tb__tensor_list_hash(const void *data, size_t nbytes) {
    uint64_t hash = nbytes;
    for (size_t i = 0; i < nbytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, nbytes - i < 8 ? nbytes - i : 8);
        hash = tb__hash(hash + i, word);
    }
    return hash;
}
