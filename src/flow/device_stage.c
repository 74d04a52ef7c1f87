/* Staging memory on a device: buckets of tensors that are on one of its units go from there to readers that have mapped
 * it, so that their data does not pass through the host. It is made once for each flow, and readers map it when they
 * are bound (bind.c); a bucket that does not fit is staged in host memory. The reader's exposure shows whether the
 * sender has reused a bucket's memory. */
#include "flow/flow_inside.h"

#include "base/int.h"

/* Whether other ranks can't read some of this rank's tensors on a device; *where is the first one's memory. */
static bool find_staged(const tb__flow *flow, tb__device **device, tb__memory *where) {
    for (size_t i = 0; i < flow->o.ntensors && !flow->o.checksum; i++) {
        const tb__flow_tensor *t = &flow->tensors[i];
        if (!flow->setup.src_regions[i])
            continue;
        *device = tb__loop_find_memory(flow->o.loop, t->src.base, 1, where);
        if ((*device)->ops != &tb__host_device_ops && (flow->o.staged || t->spec.coded || !where->is_shareable))
            return true;
    }
    return false;
}

/* Without it, buckets are staged in host memory. */
void tb__staged_make_device_stage(tb__flow *flow) {
    device_stage *s = &flow->staged.on_device;
    tb__memory where;
    bool has_others = false;
    for (size_t i = 0; i < flow->nmembers; i++)
        has_others |= flow->members[i].setup.is_reader && i != flow->self;
    if (s->memory || !has_others || !find_staged(flow, &s->device, &where))
        return;
    s->unit = where.index;
    s->nbytes = (size_t)flow->staged.pool_size[POOL_SEND];
    if (s->device->ops->alloc(s->device, s->unit, s->nbytes, (void **)&s->memory) != TB_OK)
        s->memory = NULL;
    else if (tb__region_get(flow->o.loop, s->memory, s->nbytes, &s->region) != TB_OK)
        tb__staged_free_device_stage(flow);
}

void tb__staged_free_device_stage(tb__flow *flow) {
    device_stage *s = &flow->staged.on_device;
    tb__region_put(s->region);
    if (s->memory)
        s->device->ops->free(s->device, s->memory);
    *s = (device_stage){0};
}

bool tb__staged_is_on_device(const tb__flow *flow, const char *buffer) {
    const device_stage *s = &flow->staged.on_device;
    return s->memory && buffer >= s->memory && buffer < s->memory + s->nbytes;
}

char *tb__staged_alloc_on_device(tb__flow *flow, size_t nbytes) {
    const device_stage *s = &flow->staged.on_device;
    size_t at = 0;
    for (bool has_moved = true; has_moved;) { /* behind buckets that are in the way */
        has_moved = false;
        for (const staged_bucket *p = flow->staged.buckets; p; p = p->next) {
            if (!tb__staged_is_on_device(flow, p->buffer))
                continue;
            size_t first = (size_t)(p->buffer - s->memory), last = first + (size_t)tb__align((int64_t)p->nbytes, 256);
            if (at < last && first < at + nbytes) {
                at = last;
                has_moved = true;
            }
        }
    }
    return nbytes <= s->nbytes && at <= s->nbytes - nbytes ? s->memory + at : NULL;
}

/* Whether this device does all moves between the bucket and its tensors. */
static bool is_copied_by(tb__flow *flow, size_t bucket, bool packs, const tb__device *device) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    tb__move_list list = {0};
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        if ((!packs && flow->tensors[chunk->tensor].is_gathered) ||
            (chunk->is_coded && tb__flow_needs_host(flow, chunk, packs)))
            return false;
    }
    bool is = tb__flow_list_bucket(flow, packs, bucket, &list) == TB_OK;
    for (size_t i = 0; i < list.moves.count && is; i++)
        is = tb__jobs_choose_device(flow->o.loop, &list.moves.item[i]) == device;
    tb__move_list_fini(&list);
    return is;
}

bool tb__staged_packs_on_device(tb__flow *flow, size_t bucket) {
    const device_stage *s = &flow->staged.on_device;
    const lane *l = tb__flow_lane(flow, bucket);
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    bool is = s->memory && l->is_channel_source && l->nsenders == 1;
    for (size_t i = 0; i < b->nentries && is; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        tb__memory where;
        is = tb__loop_find_memory(flow->o.loop, flow->tensors[chunk->tensor].src.base, 1, &where) == s->device &&
             where.index == s->unit;
    }
    return is && is_copied_by(flow, bucket, true, s->device);
}

bool tb__staged_unpacks_on_host(tb__flow *flow, size_t bucket) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    const tb__device *host = tb__loop_find_device(flow->o.loop, NULL, 0);
    tb__move_list list = {0};
    int64_t scratch = 0;
    bool is = true;
    for (size_t i = 0; i < b->nentries && is; i++) {
        const tb_bucket_entry *entry = &flow->setup.ir->entries[b->first_entry + i];
        const tb_chunk *chunk = &flow->setup.ir->chunks[entry->chunk];
        const tb__flow_tensor *t = &flow->tensors[chunk->tensor];
        if (t->is_gathered)
            is = tb__flow_slot_device(flow) == host;
        else if (!chunk->is_coded)
            is = tb__loop_find_device(flow->o.loop, t->dst.base, 1) == host;
        else
            is = tb__flow_list_coded(flow, COPY_UNPACK, entry, &scratch, &list) == TB_OK;
    }
    for (size_t i = 0; i < list.moves.count && is; i++)
        is = tb__jobs_choose_device(flow->o.loop, &list.moves.item[i]) == host;
    tb__move_list_fini(&list);
    return is;
}

/* Whether the units that the bucket's targets are on can read this memory. */
static bool can_targets_read(tb__flow *flow, size_t bucket, const tb__memory *memory) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        tb__memory target;
        tb__device *device = tb__loop_find_memory(flow->o.loop, flow->tensors[chunk->tensor].dst.base, 1, &target);
        if (device->ops != &tb__host_device_ops && target.index != memory->index &&
            tb__flow_why_not_accessed(flow, device, target.index, memory))
            return false;
    }
    return true;
}

bool tb__staged_unpacks_on_device(tb__flow *flow, const lane *l, size_t bucket) {
    const member *m = &flow->members[l->source];
    tb__memory memory;
    return m->setup.stage && m->direct.peer_exposure && l->nsenders == 1 && l->parent == l->source &&
           l->nchildren == 0 && !l->is_stashed &&
           is_copied_by(flow, bucket, false, tb__peer_memory_find(m->setup.stage, &memory)) &&
           can_targets_read(flow, bucket, &memory);
}
