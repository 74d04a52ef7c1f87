/* Regions: a table per loop, looked up by exact range. */
#include "loop/region.h"

#include "base/mem.h"
#include "device/host/memory.h"
#include "loop/loop_inside.h"
#include "loop/share.h"

#include <stdio.h>

struct tb__region {
    tb__loop *loop;
    char *base;
    size_t nbytes;
    size_t refs;
    bool is_valid;
    tb__device *device;
    tb__memory memory; /* of a device: that it lies in */
    tb__share *share;  /* of a device: NULL until it is exported to another process */
    tb_mem *mem[TB__MAX_TRANSPORTS];
    tb__region *next, **link;
};

static bool is_on_host(const tb__device *device) {
    return device->ops == &tb__host_device_ops;
}

/* The device of the bytes. A device can share them only if it finds them as one memory. */
static tb__device *find_memory(tb__loop *loop, void *base, size_t nbytes, tb__memory *out) {
    tb__device *device = tb__loop_find_memory(loop, base, nbytes, out);
    if (!is_on_host(device))
        return device;
    device = tb__loop_find_memory(loop, base, 1, out);
    out->is_shareable = false;
    return device;
}

static tb__region **find_bucket(tb__loop *loop, const void *base, size_t nbytes) {
    return &loop->regions[tb__hash((uintptr_t)base, nbytes) % loop->nregion_buckets];
}

static void insert_region(tb__region *region) {
    tb__region **bucket = find_bucket(region->loop, region->base, region->nbytes);
    region->next = *bucket;
    region->link = bucket;
    if (*bucket)
        (*bucket)->link = &region->next;
    *bucket = region;
}

/* Keeps more buckets than regions: a model may have a million tensors. */
static tb_status grow_buckets(tb__loop *loop) {
    enum { FIRST = 256 };
    tb__region **before = loop->regions;
    size_t nbefore = loop->nregion_buckets, n = nbefore ? 2 * nbefore : FIRST;
    if (loop->nregions < nbefore)
        return TB_OK;
    tb__region **buckets = tb__calloc(n, sizeof *buckets);
    if (!buckets)
        return TB_NO_MEMORY;
    loop->regions = buckets;
    loop->nregion_buckets = n;
    for (size_t i = 0; i < nbefore; i++) {
        for (tb__region *region = before[i], *next; region; region = next) {
            next = region->next;
            insert_region(region);
        }
    }
    free(before);
    return TB_OK;
}

tb_status tb__region_get(tb__loop *loop, void *base, size_t nbytes, tb__region **out) {
    tb__memory memory;
    tb__device *device = find_memory(loop, base, nbytes, &memory);
    TB_TRY(grow_buckets(loop));
    for (tb__region *region = *find_bucket(loop, base, nbytes); region; region = region->next) {
        if (region->is_valid && region->base == base && region->nbytes == nbytes && region->device == device &&
            (is_on_host(device) || region->memory.epoch == memory.epoch)) {
            region->refs++;
            *out = region;
            return TB_OK;
        }
    }
    tb__region *region = tb__calloc(1, sizeof *region);
    if (!region)
        return TB_NO_MEMORY;
    *region = (tb__region){
        .loop = loop, .base = base, .nbytes = nbytes, .refs = 1, .is_valid = true, .device = device, .memory = memory};
    insert_region(region);
    loop->nregions++;
    *out = region;
    return TB_OK;
}

tb__device *tb__region_find(const tb__region *region, tb__memory *out) {
    *out = region->memory;
    return region->device;
}

static void unregister_region(tb__region *region) {
    for (size_t i = 0; i < region->loop->ntransports; i++) {
        const tb_transport *t = &region->loop->transports[i];
        if (region->mem[i])
            t->ops->mem_unregister(t->context, region->mem[i]);
        region->mem[i] = NULL;
    }
    tb__share_put(region->share);
    region->share = NULL;
}

void tb__region_put(tb__region *region) {
    if (!region || --region->refs > 0)
        return;
    unregister_region(region);
    *region->link = region->next;
    if (region->next)
        region->next->link = region->link;
    region->loop->nregions--;
    free(region);
}

static tb_status export_by_transport(tb__region *region, tb__peer *peer, tb__pack *out) {
    const tb_transport *t = peer->transport;
    size_t i = (size_t)(t - region->loop->transports);
    tb_mem_key key = {0};
    if (!region->mem[i]) {
        tb_mem_desc desc = {.size = sizeof desc, .base = region->base, .nbytes = region->nbytes, .fd = -1};
        tb__arena_file file;
        if (tb__memory_find(region->base, region->nbytes, &file)) {
            desc.fd = file.fd;
            desc.offset = (size_t)(region->base - (char *)file.base);
            desc.may_stay_mapped = !file.is_adopted;
        }
        TB_TRY(tb__transport_register(t, &desc, &region->mem[i]));
    }
    TB_TRY(t->ops->mem_export(t->context, region->mem[i], peer->transport_rank, &key));
    tb__pack_u32(out, TB__KEY_TRANSPORT);
    tb__pack_raw(out, key.bytes, key.nbytes);
    return TB_OK;
}

static tb_status export_share(tb__region *region, tb__peer *peer, tb__pack *out) {
    uint64_t id;
    const char *base;
    if (!region->share)
        TB_TRY(tb__share_get(region->loop, region->device, &region->memory, &region->share));
    TB_TRY(tb__share_with(region->share, peer, &id, &base));
    tb__pack_u32(out, TB__KEY_SHARE);
    tb__pack_u64(out, id);
    tb__pack_u64(out, (uint64_t)(region->base - base));
    tb__pack_u64(out, region->nbytes);
    return TB_OK;
}

tb_status tb__region_export(tb__region *region, tb__peer *peer, tb__pack *key) {
    if (!region->is_valid)
        return tb__fail(TB_INVALID, "its memory was invalidated");
    TB_TRY(tb__peer_open(peer));
    bool is_here = peer->transport->ops == &tb__self_ops; /* then the address itself is used, in any memory */
    return is_here || is_on_host(region->device) ? export_by_transport(region, peer, key)
                                                 : export_share(region, peer, key);
}

void tb__regions_invalidate(tb__loop *loop, const void *base, size_t nbytes) {
    const char *first = base, *last = first + nbytes;
    tb__shares_revoke(loop, (uintptr_t)first, (uintptr_t)last);
    for (size_t i = 0; i < loop->nregion_buckets; i++) {
        for (tb__region *region = loop->regions[i]; region; region = region->next) {
            if (region->is_valid && region->base < last && first < region->base + region->nbytes) {
                region->is_valid = false;
                unregister_region(region);
            }
        }
    }
}

/* ---- Quarantine -------------------------------------------------------------------------------------------------- */

typedef struct span {
    uintptr_t first, last;
} span;

struct tb__quarantine {
    tb__loop *loop;
    char what[160];
    TB_VEC(span) spans;
    tb__quarantine *next;
};

tb__quarantine *tb__quarantine_create(tb__loop *loop, const char *what) {
    tb__quarantine *q = tb__calloc(1, sizeof *q);
    if (!q) {
        loop->is_all_in_quarantine = true;
        return NULL;
    }
    q->loop = loop;
    q->next = loop->quarantine;
    snprintf(q->what, sizeof q->what, "%s", what);
    loop->quarantine = q;
    return q;
}

void tb__quarantine_add(tb__quarantine *q, uintptr_t first, uintptr_t last) {
    if (!q || first == last)
        return;
    if (!tb__vec_push(&q->spans, ((span){first, last})))
        q->loop->is_all_in_quarantine = true;
}

void tb__quarantine_end(tb__quarantine *q) {
    if (!q)
        return;
    tb__quarantine **at = &q->loop->quarantine;
    while (*at != q)
        at = &(*at)->next;
    *at = q->next;
    tb__loop_signal(q->loop);
    free(q->spans.item);
    free(q);
}

const char *tb__quarantine_find(const tb__loop *loop, uintptr_t first, uintptr_t last) {
    for (const tb__quarantine *q = loop->quarantine; q; q = q->next) {
        for (size_t i = 0; i < q->spans.count; i++) {
            if (q->spans.item[i].first < last && first < q->spans.item[i].last)
                return q->what;
        }
    }
    return loop->is_all_in_quarantine ? "work that a device has not finished" : NULL;
}
