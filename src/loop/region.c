/* Regions: a list per loop, looked up by exact range. */
#include "loop/region.h"

#include "base/mem.h"
#include "device/host/memory.h"
#include "loop/loop_inside.h"

#include <stdio.h>

struct tb__region {
    tb__loop *loop;
    char *base;
    size_t nbytes;
    size_t refs;
    bool is_valid;
    tb_mem *mem[TB__MAX_TRANSPORTS];
    tb__region *next, **link;
};

tb_status tb__region_get(tb__loop *loop, void *base, size_t nbytes, tb__region **out) {
    tb__region **bucket = &loop->regions[tb__hash((uintptr_t)base, nbytes) % TB__REGION_BUCKETS];
    for (tb__region *region = *bucket; region; region = region->next) {
        if (region->is_valid && region->base == base && region->nbytes == nbytes) {
            region->refs++;
            *out = region;
            return TB_OK;
        }
    }
    tb__region *region = tb__calloc(1, sizeof *region);
    if (!region)
        return TB_NO_MEMORY;
    *region = (tb__region){
        .loop = loop, .base = base, .nbytes = nbytes, .refs = 1, .is_valid = true, .next = *bucket, .link = bucket};
    if (*bucket)
        (*bucket)->link = &region->next;
    *bucket = region;
    *out = region;
    return TB_OK;
}

static void unregister_region(tb__region *region) {
    for (size_t i = 0; i < region->loop->ntransports; i++) {
        const tb_transport *t = &region->loop->transports[i];
        if (region->mem[i])
            t->ops->mem_unregister(t->context, region->mem[i]);
        region->mem[i] = NULL;
    }
}

void tb__region_put(tb__region *region) {
    if (!region || --region->refs > 0)
        return;
    unregister_region(region);
    *region->link = region->next;
    if (region->next)
        region->next->link = region->link;
    free(region);
}

tb_status tb__region_export(tb__region *region, tb__peer *peer, tb_mem_key *out) {
    const tb_transport *t = peer->transport;
    size_t i = (size_t)(t - region->loop->transports);
    if (!region->is_valid)
        return tb__fail(TB_INVALID, "its memory was invalidated");
    if (!region->mem[i]) {
        tb_mem_desc desc = {.size = sizeof desc, .base = region->base, .nbytes = region->nbytes, .fd = -1};
        tb__arena_file file;
        if (tb__memory_find(region->base, region->nbytes, &file)) {
            desc.fd = file.fd;
            desc.offset = (size_t)(region->base - (char *)file.base);
        }
        TB_TRY(tb__transport_register(t, &desc, &region->mem[i]));
    }
    return t->ops->mem_export(t->context, region->mem[i], peer->transport_rank, out);
}

void tb__regions_invalidate(tb__loop *loop, const void *base, size_t nbytes) {
    const char *first = base, *last = first + nbytes;
    for (size_t i = 0; i < TB__REGION_BUCKETS; i++) {
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
