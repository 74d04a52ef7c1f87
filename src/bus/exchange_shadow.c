/* Shadowed receives of an exchange: commit modes, shadows of quantised tensors, and checks of overlap. */
#include "bus/exchange.h"

#include "base/int.h"
#include "layout/overlap.h"

static const char *commit_name(tb_commit commit) {
    return commit == TB_SHADOW ? "shadow" : "in place";
}

tb_status tb__exchange_agree_modes(tb__exchange *exchange) {
    for (int side = 0; side < 2; side++) {
        tb__exchange_side *s = &exchange->sides[side];
        tb__peer *const *peers = exchange->pair->sides[side].peers;
        s->commit = s->used.item[0]->commit;
        for (size_t i = 0; i < s->used.count; i++) {
            const tb__tensor_list *list = s->used.item[i];
            if (list->commit != s->commit)
                return tb__fail(TB_CONFLICT, "%s and %s commit %s differently: %s and %s", peers[0]->label,
                                peers[list->first_seat]->label, exchange->what, commit_name(s->commit),
                                commit_name(list->commit));
            exchange->checksum |= list->checksum;
        }
    }
    return TB_OK;
}

/* Tensors that are parts of one storage share its shadow. */
static tb_status alloc_shadow(tb__loop *loop, tb__encoded_shadows *shadows, tb__encoded_shadow *s) {
    const tb__encoded *live = s->live;
    uint64_t hash = tb__hash(0, (uint64_t)(uintptr_t)live->data);
    size_t probe = 0, i;
    while ((i = tb__index_next(&shadows->by_data, hash, &probe)) != TB__NOWHERE) {
        const tb__encoded_shadow *other = shadows->all.item[i];
        if (other->live->data == live->data && other->live->scales == live->scales &&
            other->live->matrices == live->matrices && other->live->size.data_nbytes == live->size.data_nbytes) {
            s->encoded.data = other->encoded.data;
            s->encoded.scales = other->encoded.scales;
            return TB_OK;
        }
    }
    size_t data = (size_t)tb__align(live->matrices * live->size.data_nbytes, 64);
    size_t scales = (size_t)tb__align(live->matrices * live->size.scale_nbytes, 64);
    tb__memory memory;
    s->device = tb__loop_find_memory(loop, live->data, 1, &memory);
    if (s->device->ops == &tb__host_device_ops)
        s->device = tb__loop_find_memory(loop, live->scales, 1, &memory);
    TB_TRY(s->device->ops->alloc(s->device, memory.index, data + scales, (void **)&s->memory));
    s->encoded.data = s->memory;
    s->encoded.scales = live->scales ? s->memory + data : NULL;
    return tb__index_add(&shadows->by_data, hash, shadows->all.count) ? TB_OK : TB_NO_MEMORY;
}

static void free_shadow(tb__encoded_shadow *s) {
    if (s->memory)
        s->device->ops->free(s->device, s->memory);
    free(s);
}

tb_status tb__exchange_shadow(tb__exchange *exchange, int src, const tb__encoded *live, const tb__encoded **out) {
    tb__encoded_shadows *shadows = &exchange->shadows[src];
    tb__encoded_shadow *s = tb__vec_reserve(&shadows->all, 1) ? tb__calloc(1, sizeof *s) : NULL;
    if (!s)
        return TB_NO_MEMORY;
    s->live = live;
    s->encoded = *live;
    s->encoded.scale = live->scale ? &s->scale : NULL;
    tb_status status = alloc_shadow(exchange->world->loop, shadows, s);
    if (status != TB_OK) {
        free_shadow(s);
        return status;
    }
    s->encoded.part.base = s->encoded.data;
    shadows->all.item[shadows->all.count++] = s;
    *out = &s->encoded;
    return TB_OK;
}

/* Tensors may share the memory of a global scale: it is copied once. */
tb_status tb__exchange_list_shadows(const tb__encoded_shadows *shadows, tb__move_list *out) {
    tb__index by_scale = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < shadows->all.count && status == TB_OK; i++) {
        const tb__encoded_shadow *s = shadows->all.item[i];
        status = tb__encoded_list_copy(&s->encoded, s->live, out);
        if (status != TB_OK || !s->live->scale || !tb__encoding_is_global(&s->live->encoding))
            continue;
        uint64_t hash = tb__hash(0, (uint64_t)(uintptr_t)s->live->scale);
        size_t probe = 0, at;
        while ((at = tb__index_next(&by_scale, hash, &probe)) != TB__NOWHERE &&
               shadows->all.item[at]->live->scale != s->live->scale)
            ;
        if (at == TB__NOWHERE && !tb__index_add(&by_scale, hash, i))
            status = TB_NO_MEMORY;
        else if (at == TB__NOWHERE)
            status = tb__encoded_list_scale(s->encoded.scale, s->live->scale, out);
    }
    tb__index_fini(&by_scale);
    return status;
}

void tb__exchange_free_shadows(tb__encoded_shadows *shadows) {
    for (size_t i = 0; i < shadows->all.count; i++)
        free_shadow(shadows->all.item[i]);
    free(shadows->all.item);
    tb__index_fini(&shadows->by_data);
}

tb_status tb__exchange_check_clash(const tb__exchange *to, const tb__flow *receives, const tb__exchange *from,
                                   const tb__flow *sends) {
    const tb__exchange_side *target = &to->sides[receives == to->flows[0]],
                            *source = &from->sides[sends == from->flows[1]];
    TB_VEC(tb_binding) reads = {0}, writes = {0};
    if (target->commit != TB_SHADOW)
        return TB_OK;
    bool *marks = tb__calloc(source->own.count, sizeof *marks);
    bool has_room = marks != NULL;
    for (size_t i = 0; i < source->own.count && has_room; i++)
        has_room = tb__vec_push(&reads, source->own.item[i]->binding);
    for (size_t i = 0; i < target->own.count && has_room; i++)
        has_room = tb__vec_push(&writes, target->own.item[i]->binding);
    tb_status status =
        has_room ? tb__bindings_mark_overlaps(reads.item, reads.count, writes.item, writes.count, marks) : TB_NO_MEMORY;
    for (size_t i = 0; i < source->own.count && status == TB_OK; i++) {
        if (marks[i])
            status = tb__fail(TB_REFUSED,
                              "%s: tensor '%.100s' is being sent, and would be overwritten by data received from "
                              "elsewhere meanwhile",
                              from->what, source->own.item[i]->name);
    }
    free(reads.item);
    free(writes.item);
    free(marks);
    return status;
}
