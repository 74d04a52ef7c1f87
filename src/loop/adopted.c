/* Adopted memory: a list for each loop. */
#include "loop/adopted.h"

#include "base/log.h"
#include "base/mem.h"
#include "loop/loop_inside.h"
#include "loop/region.h"

#include <stdatomic.h>
#include <string.h>

static tb_status find_device(const tb__loop *loop, const char *name, size_t *out) {
    for (size_t i = 0; i + 1 < loop->ndevices; i++) {
        if (strcmp(loop->devices[i]->ops->name, name) == 0) {
            *out = i;
            return TB_OK;
        }
    }
    return tb__fail(TB_REFUSED, "there is no device '%.40s' here", name);
}

static tb_status map_adopted(tb__loop *loop, const char *name, tb__adopted *adopted) {
    static atomic_uint_fast64_t epochs;
    size_t i;
    TB_TRY(find_device(loop, name, &i));
    adopted->loop = loop;
    adopted->device = loop->devices[i];
    TB_TRY(tb__device_map(adopted->device, &adopted->key, true, &adopted->mapping));
    atomic_store(&loop->is_device_used[i], true);
    adopted->memory = (tb__memory){.base = adopted->mapping->base,
                                   .nbytes = adopted->mapping->nbytes,
                                   .index = adopted->mapping->index,
                                   .epoch = atomic_fetch_add(&epochs, 1) + 1,
                                   .is_shareable = true};
    return TB_OK;
}

tb_status tb__adopted_create(tb__loop *loop, const char *device, tb__memory_key *key, tb__adopted **out) {
    tb__adopted *adopted = tb__calloc(1, sizeof *adopted);
    if (!adopted) {
        tb__memory_key_fini(key);
        return TB_NO_MEMORY;
    }
    adopted->key = *key;
    *key = (tb__memory_key){0};
    tb_status status = map_adopted(loop, device, adopted);
    if (status != TB_OK) {
        tb__memory_key_fini(&adopted->key);
        free(adopted);
        return status;
    }
    pthread_mutex_lock(&loop->adopted_lock);
    adopted->next = loop->adopted;
    loop->adopted = adopted;
    pthread_mutex_unlock(&loop->adopted_lock);
    *out = adopted;
    return TB_OK;
}

void tb__adopted_destroy(tb__adopted *adopted) {
    if (!adopted)
        return;
    tb__loop *loop = adopted->loop;
    uintptr_t first = (uintptr_t)adopted->memory.base;
    pthread_mutex_lock(&loop->adopted_lock);
    tb__adopted **at = &loop->adopted;
    while (*at != adopted)
        at = &(*at)->next;
    *at = adopted->next;
    pthread_mutex_unlock(&loop->adopted_lock);
    tb__loop_lock(loop);
    const char *user = tb__quarantine_find(loop, first, first + adopted->memory.nbytes);
    if (user)
        tb__log(TB_LOG_ERROR, "memory of device %s stays mapped: %s", adopted->device->ops->name, user);
    else
        adopted->device->ops->unmap(adopted->device, adopted->mapping);
    tb__loop_unlock(loop);
    tb__memory_key_fini(&adopted->key);
    free(adopted);
}

/* With the lock of the list. */
static const tb__adopted *find_adopted(const tb__loop *loop, const void *address, size_t nbytes) {
    uintptr_t at = (uintptr_t)address;
    const tb__adopted *a = loop->adopted;
    for (; a; a = a->next) {
        uintptr_t first = (uintptr_t)a->memory.base;
        if (at >= first && at - first <= a->memory.nbytes && nbytes <= a->memory.nbytes - (at - first))
            break;
    }
    return a;
}

tb__device *tb__adopted_find(tb__loop *loop, const void *address, size_t nbytes, tb__memory *out) {
    pthread_mutex_lock(&loop->adopted_lock);
    const tb__adopted *a = find_adopted(loop, address, nbytes);
    if (a)
        *out = a->memory;
    tb__device *device = a ? a->device : NULL;
    pthread_mutex_unlock(&loop->adopted_lock);
    return device;
}

tb_status tb__adopted_share(tb__loop *loop, tb__device *device, const tb__memory *memory, tb__memory_key *key) {
    pthread_mutex_lock(&loop->adopted_lock);
    const tb__adopted *a = find_adopted(loop, memory->base, memory->nbytes);
    bool is_same = a && a->memory.epoch == memory->epoch && a->device == device;
    tb_status status = is_same ? tb__memory_key_copy(&a->key, key) : TB_OK;
    pthread_mutex_unlock(&loop->adopted_lock);
    return is_same ? status : tb__device_share(device, memory, key);
}
