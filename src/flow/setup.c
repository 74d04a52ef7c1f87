/* The plan of a flow: the IR and its lanes, which members read from which, memory for snapshots and shadows, and which
 * sources this rank's targets overwrite. */
#include "flow/flow_inside.h"
#include "layout/overlap.h"

#include "base/dtype.h"
#include "base/int.h"

#include <inttypes.h>
#include <string.h>

static tb_status make_ir(tb__flow *flow) {
    const tb__flow_opts *o = &flow->o;
    if (flow->setup.ir)
        return TB_OK;
    tb_tensor_spec *specs = tb__malloc(o->ntensors, sizeof *specs);
    if (!specs)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < o->ntensors; i++)
        specs[i] = flow->tensors[i].spec;
    tb_plan_opts plan = {.size = sizeof plan, .hosts = o->hosts, .nhosts = o->nhosts};
    /* Buckets do not depend on which of them are staged, so that both ends build the same. */
    tb_ir_opts opts = {.size = sizeof opts,
                       .bucket_size = o->bucket_size,
                       .staging_bytes = o->staging_bytes,
                       .max_in_flight = o->max_in_flight,
                       .plan = &plan};
    tb_status status = o->get_ir ? o->get_ir(o->get_ir_arg, specs, o->ntensors, &opts, &flow->setup.ir)
                                 : tb_ir_create(o->rank, specs, o->ntensors, o->cache, &opts, &flow->setup.ir);
    free(specs);
    return status;
}

/* ---- Lanes ---------------------------------------------------------------------------------------------------- */

static const tb_chunk *first_chunk(const tb_ir *ir, const tb_bucket *bucket) {
    return &ir->chunks[ir->entries[bucket->first_entry].chunk];
}

static int64_t lane_nbytes(const tb_ir *ir, const tb_channel *channel) {
    int64_t nbytes = 0;
    for (size_t i = 0; i < channel->nbuckets; i++) {
        const tb_bucket *bucket = &ir->buckets[channel->first_bucket + i];
        for (size_t j = 0; j < bucket->nentries; j++)
            nbytes += ir->entries[bucket->first_entry + j].nbytes;
    }
    return nbytes;
}

static tb_status set_senders(tb__flow *flow, lane *l) {
    const tb_chunk *first = l->first;
    const int32_t *ranks = first->ncontributors ? first->contributors : &first->source;
    l->nsenders = first->ncontributors ? first->ncontributors : first->source != TB_NO_RANK;
    l->senders = tb__arena_alloc(&flow->setup.arena, l->nsenders, sizeof *l->senders);
    if (!l->senders)
        return TB_NO_MEMORY;
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = tb__flow_find_member(flow, ranks[i]);
        if (!m)
            return tb__fail(TB_INTERNAL, "rank %" PRId32 " sends %s but is in neither group", ranks[i], flow->what);
        l->senders[i] = (uint32_t)(m - flow->members);
    }
    member *source = l->nsenders ? tb__flow_find_member(flow, first->source) : &flow->members[flow->self];
    if (!source)
        return tb__fail(TB_INTERNAL, "rank %" PRId32 " sends %s but is in neither group", first->source, flow->what);
    l->source = (uint32_t)(source - flow->members);
    return TB_OK;
}

static bool is_sender_of(const tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (l->senders[i] == flow->self)
            return true;
    }
    return false;
}

/* The member that sends staged buckets to this rank, and the members that this rank relays them to. */
static tb_status set_relay_links(tb__flow *flow, lane *l) {
    const tb_chunk *first = l->first;
    const int32_t *via = l->channel->via;
    l->parent = l->source;
    if (!l->is_target || !via)
        return TB_OK;
    l->children = tb__arena_alloc(&flow->setup.arena, first->ntargets, sizeof *l->children);
    if (!l->children)
        return TB_NO_MEMORY;
    for (uint32_t i = 0; i < first->ntargets; i++) {
        bool is_parent = first->targets[i] == flow->o.rank, is_child = via[i] == flow->o.rank;
        if (!is_parent && !is_child)
            continue;
        const member *m = tb__flow_find_member(flow, is_parent ? via[i] : first->targets[i]);
        if (!m)
            return tb__fail(TB_INTERNAL, "rank %" PRId32 " is on the way of %s but in neither group",
                            is_parent ? via[i] : first->targets[i], flow->what);
        if (is_parent)
            l->parent = (uint32_t)(m - flow->members);
        else
            l->children[l->nchildren++] = (uint32_t)(m - flow->members);
    }
    for (size_t i = 0; l->nchildren && i < l->channel->nbuckets; i++) {
        int64_t nbytes = flow->setup.ir->buckets[l->channel->first_bucket + i].total_bytes;
        flow->setup.largest_relay = nbytes > flow->setup.largest_relay ? nbytes : flow->setup.largest_relay;
    }
    return TB_OK;
}

static tb_status make_lane(tb__flow *flow, lane *l, const tb_channel *channel) {
    const tb_ir *ir = flow->setup.ir;
    l->channel = channel;
    l->first = first_chunk(ir, &ir->buckets[channel->first_bucket]);
    TB_TRY(set_senders(flow, l));
    l->is_target = l->first->is_target;
    l->is_channel_source = l->nsenders && l->source == flow->self;
    l->is_contributor = !l->is_channel_source && is_sender_of(flow, l);
    TB_TRY(set_relay_links(flow, l));
    int64_t nbytes = lane_nbytes(ir, channel);
    if (l->is_target) {
        tb__leg_add_total(&flow->recv, nbytes);
        for (uint32_t i = 0; i < l->nsenders; i++) {
            flow->members[l->senders[i]].setup.is_sender = true;
            flow->members[l->senders[i]].setup.nbuckets += channel->nbuckets;
            flow->members[l->senders[i]].setup.sends_nbytes += nbytes;
        }
    }
    for (uint32_t i = 0; (l->is_channel_source || l->is_contributor) && i < l->first->ntargets; i++) {
        member *m = tb__flow_find_member(flow, l->first->targets[i]);
        if (!m)
            return tb__fail(TB_INTERNAL, "rank %" PRId32 " reads %s but is in neither group", l->first->targets[i],
                            flow->what);
        m->setup.is_reader = true;
        m->setup.reads_nbytes += nbytes;
        tb__leg_add_total(&flow->send, nbytes);
    }
    return TB_OK;
}

static tb_status index_buckets(tb__flow *flow) {
    const tb_ir *ir = flow->setup.ir;
    for (size_t i = 0; i < ir->nbuckets; i++) {
        const tb_chunk *first = first_chunk(ir, &ir->buckets[i]);
        if (!tb__index_add(&flow->setup.by_bucket, tb__hash(first->id, first->part), i))
            return TB_NO_MEMORY;
    }
    return TB_OK;
}

static tb_status make_lanes(tb__flow *flow) {
    flow->setup.lanes = tb__calloc(flow->setup.ir->nchannels, sizeof *flow->setup.lanes);
    flow->setup.paths = tb__calloc(flow->setup.ir->nbuckets, sizeof *flow->setup.paths);
    if (!flow->setup.lanes || !flow->setup.paths)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < flow->setup.ir->nchannels; i++)
        TB_TRY(make_lane(flow, &flow->setup.lanes[i], &flow->setup.ir->channels[i]));
    TB_TRY(index_buckets(flow));
    return tb__flow_count_groups(flow);
}

/* ---- Memory --------------------------------------------------------------------------------------------------- */

static tb_status get_regions(tb__flow *flow, bool is_src, tb__region **regions) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        const tb_binding *b = is_src ? &flow->tensors[i].src : &flow->tensors[i].dst;
        uintptr_t first, last;
        TB_TRY(tb__binding_span(b, &first, &last));
        if (first != last)
            TB_TRY(tb__region_get(flow->o.loop, (void *)first, last - first, &regions[i])); // NOLINT
    }
    return TB_OK;
}

/* One of a device's units, such as a GPU. */
typedef struct unit {
    tb__device *device;
    int index;
} unit;

static unit find_unit(const tb__flow *flow, const tb_binding *b) {
    tb__memory memory;
    tb__device *device = tb__loop_find_memory(flow->o.loop, b->base, 1, &memory);
    return (unit){device, memory.index};
}

/* Binds all tensors of `left` that are on the unit to new memory there, and clears their `left`. */
static tb_status bind_duplicates_on(tb__flow *flow, unit on, bool is_src, bool *left, tb_binding *live_of) {
    size_t at = 0;
    char *memory = NULL;
    for (int pass = 0; pass < 2; pass++) {
        size_t total = at;
        at = 0;
        if (pass == 1) {
            TB_TRY(on.device->ops->alloc(on.device, on.index, total, (void **)&memory));
            if (!tb__vec_push(&flow->setup.duplicates, ((device_memory){on.device, memory}))) {
                on.device->ops->free(on.device, memory);
                return TB_NO_MEMORY;
            }
        }
        for (size_t i = 0; i < flow->o.ntensors; i++) {
            tb_binding *b = is_src ? &flow->tensors[i].src : &flow->tensors[i].dst;
            int64_t nbytes;
            /* the second pass binds those that the first one has seen: only these have live_of set */
            if (!left[i] || (pass == 1 && live_of[i].dtype == TB_DTYPE_NONE))
                continue;
            unit of = find_unit(flow, pass ? &live_of[i] : b);
            if (of.device != on.device || of.index != on.index)
                continue;
            TB_TRY(tb_shape_size(&b->shape, b->dtype, NULL, &nbytes));
            if (pass == 0) {
                live_of[i] = *b;
            } else {
                TB_TRY(tb_binding_contiguous(memory, (int64_t)at, b->dtype, &live_of[i].shape, b));
                left[i] = false;
            }
            at += (size_t)tb__align(nbytes, 64);
        }
    }
    return TB_OK;
}

tb_status tb__flow_bind_duplicates(tb__flow *flow, bool is_src, const bool *has, tb_binding **out) {
    tb_binding *live_of = *out = tb__calloc(flow->o.ntensors, sizeof **out);
    bool *left = tb__memdup(has, flow->o.ntensors, sizeof *left);
    tb_status status = live_of && left ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < flow->o.ntensors && status == TB_OK; i++) {
        if (!left[i])
            continue;
        const tb_binding *b = is_src ? &flow->tensors[i].src : &flow->tensors[i].dst;
        status = bind_duplicates_on(flow, find_unit(flow, b), is_src, left, live_of);
    }
    free(left);
    return status;
}

/* Sources are sent from a snapshot, in memory of the flow. */
static tb_status make_snapshot(tb__flow *flow) {
    bool *all = tb__calloc(flow->o.ntensors, sizeof *all);
    tb_status status = all ? TB_OK : TB_NO_MEMORY;
    for (size_t i = 0; i < flow->o.ntensors && status == TB_OK; i++) {
        const tb__codec *codec = flow->tensors[i].codec;
        all[i] = true;
        if (codec && codec->reads_more)
            status = tb__fail(TB_REFUSED, "tensor '%.100s' of %s is quantised, and there are no snapshots of such",
                              flow->tensors[i].spec.name, flow->what);
    }
    if (status == TB_OK)
        status = tb__flow_bind_duplicates(flow, true, all, &flow->setup.snapshot_of);
    free(all);
    return status;
}

tb_binding *tb__flow_live(const tb__flow *flow, size_t i, bool is_src) {
    tb__flow_tensor *t = &flow->tensors[i];
    if (is_src)
        return flow->setup.snapshot_of ? &flow->setup.snapshot_of[i] : &t->src;
    return flow->shadow.live && tb__flow_has_shadow(flow, i) ? &flow->shadow.live[i] : &t->dst;
}

static tb_status check_targets(const tb__flow *flow) {
    size_t n = flow->o.ntensors, a = n, b = n;
    tb_binding *targets = tb__malloc(n, sizeof *targets);
    if (!targets)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n; i++)
        targets[i] = *tb__flow_live(flow, i, false);
    tb_status status = tb__bindings_find_overlap(targets, n, &a, &b);
    free(targets);
    if (status == TB_OK && a < n && a != b)
        status = tb__fail(TB_INVALID, "tensors '%.100s' and '%.100s' of %s would be received into the same memory",
                          flow->tensors[a].spec.name, flow->tensors[b].spec.name, flow->what);
    else if (status == TB_OK && a < n)
        status = tb__fail(TB_INVALID,
                          "tensor '%.100s' of %s has several elements in the same memory; it can't be "
                          "received",
                          flow->tensors[a].spec.name, flow->what);
    return status;
}

/* Finds the source tensors that share memory with boxes that this rank writes. Boxes that are in place already are not
 * written. */
static tb_status find_overwritten(tb__flow *flow) {
    const tb_ir *ir = flow->setup.ir;
    size_t n = flow->o.ntensors;
    tb_binding *sources = tb__malloc(n, sizeof *sources);
    TB_VEC(tb_binding) writes = {0};
    tb_status status = sources ? TB_OK : TB_NO_MEMORY;
    flow->setup.overwrites_any_source = flow->setup.overwrites_live = false;
    for (size_t i = 0; i < n && sources; i++) {
        sources[i] = *tb__flow_live(flow, i, true);
        if (!tb__vec_push(&writes, flow->tensors[i].dst))
            status = TB_NO_MEMORY;
    }
    if (status == TB_OK)
        status = tb__bindings_mark_overlaps(sources, n, writes.item, writes.count, flow->setup.overwritten);
    for (size_t i = 0; i < n && status == TB_OK; i++)
        flow->setup.overwrites_any_source |= flow->setup.overwritten[i];
    if (status == TB_OK && flow->setup.snapshot_of) { /* readers use the snapshot, which only has to be taken first */
        flow->setup.overwrites_live = flow->setup.overwrites_any_source;
        flow->setup.overwrites_any_source = false;
        memset(flow->setup.overwritten, 0, n * sizeof *flow->setup.overwritten);
    }
    if (status == TB_OK &&
        flow->setup.overwrites_any_source) { /* whole tensors overlap; now check the boxes that are really written */
        writes.count = 0;
        for (size_t i = 0; i < ir->nchunks && status == TB_OK; i++) {
            const tb_chunk *chunk = &ir->chunks[i];
            if (!chunk->is_target || tb__flow_is_in_place(flow, chunk))
                continue;
            tb_binding box = flow->tensors[chunk->tensor].dst;
            box.offset += (int64_t)tb__box_offset(&box, &chunk->dst);
            memcpy(box.shape.dim, chunk->len, sizeof box.shape.dim);
            if (!tb__vec_push(&writes, box))
                status = TB_NO_MEMORY;
        }
        if (status == TB_OK)
            status = tb__bindings_mark_overlaps(sources, n, writes.item, writes.count, flow->setup.overwritten);
        flow->setup.overwrites_any_source = false;
        for (size_t i = 0; i < n && status == TB_OK; i++)
            flow->setup.overwrites_any_source |= flow->setup.overwritten[i];
    }
    free(writes.item);
    free(sources);
    for (size_t i = 0; i < n && status == TB_OK; i++) {
        if (flow->setup.overwritten[i] && flow->tensors[i].spec.coded)
            status =
                tb__fail(TB_REFUSED,
                         "tensor '%.100s' of %s is converted on its way, and would be overwritten while it is sent; "
                         "receive into other memory",
                         flow->tensors[i].spec.name, flow->what);
    }
    return status;
}

/* Shadows are copied when no rank reads any more, so targets may overlap sources. */
tb_status tb__flow_check_overlaps(tb__flow *flow) {
    TB_TRY(check_targets(flow));
    return flow->o.shadow.is_used ? TB_OK : find_overwritten(flow);
}

/* ---- Plan ------------------------------------------------------------------------------------------------------ */

static tb_status make_plan(tb__flow *flow) {
    size_t n = flow->o.ntensors;
    TB_TRY(make_ir(flow));
    flow->setup.src_regions = tb__calloc(n, sizeof *flow->setup.src_regions);
    flow->setup.dst_regions = tb__calloc(n, sizeof *flow->setup.dst_regions);
    flow->setup.overwritten = tb__calloc(n, sizeof *flow->setup.overwritten);
    if (!flow->setup.src_regions || !flow->setup.dst_regions || !flow->setup.overwritten)
        return TB_NO_MEMORY;
    if (flow->o.snapshot)
        TB_TRY(make_snapshot(flow));
    TB_TRY(tb__flow_check_overlaps(flow));
    TB_TRY(get_regions(flow, true, flow->setup.src_regions));
    TB_TRY(get_regions(flow, false, flow->setup.dst_regions));
    TB_TRY(tb__flow_watch_memory(flow));
    if (flow->o.shadow.is_used)
        TB_TRY(tb__flow_make_shadow(flow));
    TB_TRY(make_lanes(flow));
    TB_TRY(tb__flow_make_exposures(flow));
    return tb__staged_init(flow);
}

tb_status tb__flow_plan(tb__flow *flow) {
    if (flow->setup.is_planned)
        return TB_OK;
    tb_status status = make_plan(flow);
    flow->setup.is_planned = status == TB_OK;
    return status;
}

tb_status tb__flow_copy_ir(tb__flow *flow, tb_ir **out) {
    TB_TRY(tb__flow_plan(flow));
    return tb__ir_copy(flow->setup.ir, NULL, NULL, out);
}

bool tb__flow_ensure_plan(tb__flow *flow) {
    tb_status status = tb__flow_plan(flow);
    if (status != TB_OK) {
        status = tb__fail_within(status, "rank %" PRId32, flow->o.rank);
        tb__flow_break(flow, status, tb_error_detail());
    }
    return status == TB_OK;
}

void tb__flow_unplan(tb__flow *flow) {
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        if (flow->setup.src_regions)
            tb__region_put(flow->setup.src_regions[i]);
        if (flow->setup.dst_regions)
            tb__region_put(flow->setup.dst_regions[i]);
    }
    tb__flow_free_exposures(flow);
    free(flow->setup.src_regions);
    free(flow->setup.dst_regions);
    free(flow->setup.overwritten);
    free(flow->setup.snapshot_of);
    free(flow->shadow.live);
    free(flow->setup.lanes);
    free(flow->setup.paths);
    free(flow->setup.groups.item);
    free(flow->setup.accesses.item);
    free(flow->setup.watched[0].item);
    free(flow->setup.watched[1].item);
    tb__index_fini(&flow->setup.by_bucket);
    tb__arena_fini(&flow->setup.arena);
    tb_ir_destroy(flow->setup.ir);
    if (flow->staged.held)
        return; /* they may still be accessed */
    for (size_t i = 0; i < flow->setup.duplicates.count; i++)
        flow->setup.duplicates.item[i].device->ops->free(flow->setup.duplicates.item[i].device,
                                                         flow->setup.duplicates.item[i].memory);
    free(flow->setup.duplicates.item);
}
