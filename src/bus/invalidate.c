/* tb_world_invalidate: marks the tensors in the memory, and waits until nothing uses it. */
#include "bus/exchange.h"

#include "layout/overlap.h"
#include "loop/region.h"
#include "loop/share.h"

#include <stdio.h>
#include <string.h>

void tb__world_add_user(tb_world *world, tb__memory_user *user) {
    user->next = world->memory_users;
    world->memory_users = user;
}

void tb__world_remove_user(tb_world *world, tb__memory_user *user) {
    tb__memory_user **at = &world->memory_users;
    while (*at && *at != user)
        at = &(*at)->next;
    if (*at)
        *at = user->next;
}

bool tb__binding_overlaps(const tb_binding *binding, uintptr_t first, uintptr_t last) {
    uintptr_t from, to;
    return tb__binding_span(binding, &from, &to) == TB_OK && from < to && from < last && first < to;
}

static bool bytes_overlap(const void *base, size_t nbytes, uintptr_t first, uintptr_t last) {
    uintptr_t from = (uintptr_t)base;
    return base && nbytes > 0 && from < last && first < from + nbytes;
}

static bool tensor_overlaps(const tb__added_tensor *t, uintptr_t first, uintptr_t last) {
    const tb__encoded *e = &t->encoded;
    bool meets = tb__binding_overlaps(&t->binding, first, last) ||
                 bytes_overlap(e->scales, (size_t)(e->matrices * e->size.scale_nbytes), first, last) ||
                 bytes_overlap(e->scale, sizeof *e->scale, first, last);
    for (size_t i = 0; i < t->npadding && !meets; i++)
        meets = tb__binding_overlaps(&t->padding[i], first, last);
    return meets;
}

bool tb__batch_invalidate(tb__memory_user *user, uintptr_t first, uintptr_t last, char *still, size_t room) {
    tb_batch *batch = (tb_batch *)((char *)user - offsetof(tb_batch, memory));
    bool has_some = false, is_used = false;
    for (size_t i = 0; i < batch->tensors.count; i++) {
        bool meets = tensor_overlaps(batch->tensors.item[i], first, last);
        batch->tensors.item[i]->is_invalidated |= meets;
        has_some |= meets;
    }
    for (size_t i = 0; has_some && i < batch->exchanges.count; i++) {
        for (int src = 0; src < 2; src++) {
            const char *tensor = "";
            tb__flow *flow = batch->exchanges.item[i]->flows[src];
            if (!flow || !tb__flow_mark_invalidated(flow, first, last, &tensor))
                continue;
            snprintf(still, room, "tensor '%.100s' of batch '%s'", tensor, batch->name);
            is_used = true;
        }
    }
    return is_used;
}

bool tb__batch_has_invalidated(const tb_batch *batch) {
    bool has_some = false;
    tb__loop_lock(batch->world->loop);
    for (size_t i = 0; i < batch->tensors.count; i++)
        has_some |= batch->tensors.item[i]->is_invalidated;
    tb__loop_unlock(batch->world->loop);
    return has_some;
}

typedef struct invalidation {
    tb_world *world;
    uintptr_t first, last;
    char still[256], where[128]; /* names what still uses the memory, and on which rank */
} invalidation;

static bool is_memory_unused(void *arg) {
    invalidation *t = arg;
    bool is_used = false;
    for (tb__memory_user *user = t->world->memory_users; user; user = user->next)
        is_used |= user->invalidate(user, t->first, t->last, t->still, sizeof t->still);
    const char *stuck = tb__quarantine_find(t->world->loop, t->first, t->last);
    if (stuck)
        snprintf(t->still, sizeof t->still, "%s", stuck);
    const tb__peer *holder = is_used || stuck ? NULL : tb__shares_find_holder(t->world->loop, t->first, t->last);
    if (is_used || stuck)
        snprintf(t->where, sizeof t->where, "rank %d", (int)t->world->rank);
    else if (holder) {
        snprintf(t->still, sizeof t->still, "a mapping");
        snprintf(t->where, sizeof t->where, "%s", holder->label);
    }
    return !is_used && !stuck && !holder;
}

tb_status tb__local_world_invalidate(tb_world *world, const void *base, size_t nbytes) {
    return tb__world_invalidate_until(world, base, nbytes, tb__world_deadline(world, 0));
}

tb_status tb__world_invalidate_until(tb_world *world, const void *base, size_t nbytes, int64_t deadline_ms) {
    invalidation t = {.world = world, .first = (uintptr_t)base};
    if (__builtin_add_overflow(t.first, nbytes, &t.last))
        return tb__fail(TB_INVALID, "%zu bytes at %p run past the last address", nbytes, base);
    if (tb__loop_is_driver(world->loop))
        return tb__fail(TB_REFUSED, "memory can't be invalidated by a function that the library calls: it would wait "
                                    "for itself");
    if (!tb__loop_lock_until(world->loop, deadline_ms))
        return tb__fail(TB_TIMEOUT,
                        "%zu bytes at %p may still be in use by a transfer whose progress function has not "
                        "returned",
                        nbytes, base);
    tb__regions_invalidate(world->loop, base, nbytes);
    bool is_ours = nbytes == 0 || tb__loop_wait(world->loop, is_memory_unused, &t, deadline_ms);
    tb__loop_unlock(world->loop);
    return is_ours
               ? TB_OK
               : tb__fail(TB_TIMEOUT, "%zu bytes at %p are still in use by %s on %s", nbytes, base, t.still, t.where);
}
