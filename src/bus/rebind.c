/* tb_batch_rebind: tensors that have moved to other memory. Nothing changes before everything has been checked. */
#include "bus/exchange.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static uint64_t hash_name(const char *name) {
    return tb__hash_string(0, name);
}

static tb_status index_tensors(const tb_batch *batch, tb__index *index) {
    for (size_t i = 0; i < batch->tensors.count; i++) {
        if (!tb__index_add(index, hash_name(batch->tensors.item[i]->name), i))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb__added_tensor *find_named(const tb_batch *batch, const tb__index *index, const tb_pair *pair,
                                    const char *name) {
    size_t probe = 0, i;
    while ((i = tb__index_next(index, hash_name(name), &probe)) != TB__NOWHERE) {
        tb__added_tensor *t = batch->tensors.item[i];
        if (t->pair == pair && strcmp(t->name, name) == 0)
            return t;
    }
    return NULL;
}

/* A seat's own tensor has its seat in its name. */
static tb__added_tensor *find_tensor(const tb_batch *batch, const tb__index *index, const tb_pair *pair,
                                     const char *name) {
    tb__added_tensor *t = find_named(batch, index, pair, name);
    size_t room = strlen(name) + 16;
    char *own = t ? NULL : tb__malloc(room, 1);
    if (own) {
        snprintf(own, room, "%s@%" PRId32, name, pair->index);
        t = find_named(batch, index, pair, own);
    }
    free(own);
    return t;
}

/* A tensor that this rank has no element of stays where it is. */
static tb_status set_shift(const tb_batch *batch, const tb__index *index, const tb_rebinding *to) {
    tb__added_tensor *t = find_tensor(batch, index, to->pair, to->name);
    if (!t)
        return tb__fail(TB_INVALID, "there is no tensor '%.100s' of pair '%s' in batch '%s'", to->name, to->pair->name,
                        batch->name);
    if (!t->memory_kind)
        return TB_OK;
    if (!to->data)
        return tb__fail(TB_INVALID, "tensor '%.100s': its data is NULL", to->name);
    t->shift = (intptr_t)((uintptr_t)to->data - (uintptr_t)t->data);
    tb_status status = t->shift ? tb__added_tensor_check_shift(t) : TB_OK;
    if (status != TB_OK)
        tb__prefix_detail("tensor '%.100s'", to->name);
    return status;
}

static tb_status set_shifts(const tb_batch *batch, const tb_rebinding *tensors, size_t count) {
    tb__index index = {0};
    tb_status status = index_tensors(batch, &index);
    for (size_t i = 0; i < count && status == TB_OK; i++)
        status = set_shift(batch, &index, &tensors[i]);
    tb__index_fini(&index);
    return status;
}

static void shift_all(const tb_batch *batch, bool back) {
    for (size_t i = 0; i < batch->tensors.count; i++)
        tb__added_tensor_shift(batch->tensors.item[i], back);
}

static tb_status check_exchanges(const tb_batch *batch) {
    tb_status status = TB_OK;
    for (size_t i = 0; i < batch->exchanges.count && status == TB_OK; i++) {
        for (int src = 0; src < 2 && status == TB_OK; src++) {
            tb__flow *flow = batch->exchanges.item[i]->flows[src];
            status = flow ? tb__flow_check_rebind(flow) : TB_OK;
        }
    }
    if (status != TB_OK)
        return status;
    shift_all(batch, false);
    for (size_t i = 0; i < batch->exchanges.count && status == TB_OK; i++) {
        for (int src = 0; src < 2 && status == TB_OK; src++)
            status = tb__exchange_check_padding(batch->exchanges.item[i], src);
    }
    shift_all(batch, true);
    return status;
}

static void rebind(tb_batch *batch) {
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        for (int src = 0; src < 2; src++) {
            if (batch->exchanges.item[i]->flows[src])
                tb__flow_rebind(batch->exchanges.item[i]->flows[src]);
        }
    }
    shift_all(batch, false);
    for (size_t i = 0; i < batch->tensors.count; i++)
        batch->tensors.item[i]->is_invalidated &= batch->tensors.item[i]->shift == 0;
}

static bool is_given_back(void *arg) {
    const tb_batch *batch = arg;
    bool is_held = false;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        for (int src = 0; src < 2; src++) {
            const tb__flow *flow = batch->exchanges.item[i]->flows[src];
            is_held |= flow && tb__flow_holds_tensors(flow);
        }
    }
    return !is_held;
}

tb_status tb__local_batch_rebind(tb_batch *batch, const tb_rebinding *tensors, size_t count) {
    tb_world *world = batch->world;
    TB_TRY(tb__batch_check_idle(batch));
    if (!is_given_back(batch) && !tb__loop_wait(world->loop, is_given_back, batch, tb__world_deadline(world, 0)))
        return tb__fail(TB_TIMEOUT, "a transport still uses tensors of batch '%s' for a transfer that has failed",
                        batch->name);
    TB_TRY(tb__batch_check_idle(batch)); /* the lock was released */
    tb_status status = set_shifts(batch, tensors, count);
    if (status == TB_OK)
        status = check_exchanges(batch);
    if (status == TB_OK)
        rebind(batch);
    for (size_t i = 0; i < batch->tensors.count; i++)
        batch->tensors.item[i]->shift = 0;
    return status;
}
