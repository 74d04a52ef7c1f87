/* Memory that the program has remapped or freed without tb_world_invalidate. A reader that has mapped memory of this
 * rank would go on reading the old one, so the pieces of memory that tensors are in are listed once for each plan, and
 * compared when a leg begins: once for each piece, however many tensors are in it.
 *
 * Targets, and sources that no reader has mapped, are used by their addresses: other memory may be there now, but there
 * must be some. */
#include "flow/flow_inside.h"

#include "loop/adopted.h"

#include <inttypes.h>

static int compare_watched(const void *a, const void *b) {
    const watched_memory *x = a, *y = b;
    return ((uintptr_t)x->id.base > (uintptr_t)y->id.base) - ((uintptr_t)x->id.base < (uintptr_t)y->id.base);
}

static tb_status watch_memory(struct flow_setup *setup, bool is_src, uint32_t tensor, tb__device *device,
                              const tb__memory *memory) {
    tb__memory_ids ids = {0};
    tb_status status = device->ops->list_ids(device, memory, &ids);
    for (size_t i = 0; i < ids.count && status == TB_OK; i++) {
        watched_memory w = {.device = device, .id = ids.item[i], .tensor = tensor, .is_shared = memory->is_shareable};
        status = tb__vec_push(&setup->watched[is_src], w) ? TB_OK : TB_NO_MEMORY;
    }
    free(ids.item);
    return status;
}

/* Leaves out memory that an agent has mapped for its programs: these watch it themselves. */
static tb_status watch_tensors(tb__flow *flow, bool is_src) {
    struct flow_setup *setup = &flow->setup;
    bool has_snapshot = is_src && setup->snapshot_of;
    setup->watched[is_src].count = 0;
    tb__memory last = {0}, unused;
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        tb__region *region = (is_src ? setup->src_regions : setup->dst_regions)[i];
        tb__memory memory;
        if (!region)
            continue;
        tb__device *device = has_snapshot ? tb__loop_find_memory(flow->o.loop, setup->snapshot_of[i].base, 1, &memory)
                                          : tb__region_find(region, &memory);
        if (!device->ops->list_ids || (memory.base == last.base && memory.nbytes == last.nbytes) ||
            tb__adopted_find(flow->o.loop, memory.base, 1, &unused))
            continue;
        memory.is_shareable = memory.is_shareable && !has_snapshot;
        TB_TRY(watch_memory(setup, is_src, (uint32_t)i, device, &memory));
        last = memory;
    }
    size_t n = 0, count = setup->watched[is_src].count;
    watched_memory *list = setup->watched[is_src].item;
    if (count)
        qsort(list, count, sizeof *list, compare_watched);
    for (size_t i = 0; i < count; i++) {
        if (n == 0 || list[n - 1].id.base != list[i].id.base)
            list[n++] = list[i];
        else
            list[n - 1].is_shared |= list[i].is_shared;
    }
    setup->watched[is_src].count = n;
    return TB_OK;
}

tb_status tb__flow_watch_memory(tb__flow *flow) {
    TB_TRY(watch_tensors(flow, true));
    return watch_tensors(flow, false);
}

tb_status tb__flow_check_remapped(const tb__flow *flow, bool is_send) {
    for (size_t i = 0; i < flow->setup.watched[is_send].count; i++) {
        const watched_memory *w = &flow->setup.watched[is_send].item[i];
        tb__memory_change change = w->device->ops->check_id(w->device, &w->id);
        bool is_bad = change == TB__MEMORY_GONE || (change == TB__MEMORY_REMAPPED && is_send && w->is_shared);
        if (is_bad)
            return tb__fail(TB_INVALID,
                            "the memory of tensor '%.100s' on rank %" PRId32
                            " was %s since it was registered; call tb_world_invalidate before, and make %s again",
                            flow->tensors[w->tensor].spec.name, flow->o.rank,
                            change == TB__MEMORY_GONE ? "freed or unmapped" : "remapped", flow->what);
    }
    return TB_OK;
}
