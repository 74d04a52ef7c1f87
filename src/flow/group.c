/* Tensor groups: the window, arrival, and groups that are converted: gathered in slots and written from there, or
 * converted where the senders have them. With scales that need all of a tensor, that takes two readings: the first
 * measures, and the second, when all is measured, writes. */
#include "flow/flow_inside.h"

#include "base/int.h"

static int compare_groups(const void *a, const void *b) {
    const group *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static bool is_gathered(const tb__flow *flow, const tb_bucket *bucket) {
    for (size_t i = 0; i < bucket->nentries; i++) {
        if (flow->tensors[flow->setup.ir->chunks[flow->setup.ir->entries[bucket->first_entry + i].chunk].tensor]
                .is_gathered)
            return true;
    }
    return false;
}

/* The first group with this user group, or a higher one. */
static size_t find_user_group(const tb__flow *flow, uint32_t user_group) {
    size_t i = 0;
    TB_BISECT(i, flow->setup.groups.count, flow->setup.groups.item[i].user_group >= user_group);
    return i;
}

static size_t count_user_groups(const tb__flow *flow) {
    return flow->setup.groups.count ? flow->setup.groups.item[flow->setup.groups.count - 1].ordinal + 1 : 0;
}

static size_t ordinal_at(const tb__flow *flow, size_t at) {
    return at < flow->setup.groups.count ? flow->setup.groups.item[at].ordinal : count_user_groups(flow);
}

static size_t find_group(const tb__flow *flow, uint32_t number) {
    size_t i = 0;
    TB_BISECT(i, flow->setup.groups.count, flow->setup.groups.item[i].number >= number);
    return i;
}

const group *tb__flow_find_group(const tb__flow *flow, uint32_t number) {
    return &flow->setup.groups.item[find_group(flow, number)];
}

const group *tb__flow_group(const tb__flow *flow, size_t bucket) {
    return tb__flow_find_group(flow, flow->setup.ir->buckets[bucket].group);
}

bool tb__group_has_step(const group *g) {
    return g->slot != TB__NOWHERE || g->is_read_twice;
}

/* Slots are on the unit of all tensors that are gathered, or in host memory. */
static void choose_slot_unit(tb__flow *flow) {
    struct flow_groups *groups = &flow->groups;
    for (size_t i = 0; i < flow->o.ntensors; i++) {
        tb__memory memory;
        if (!flow->tensors[i].is_gathered || !flow->setup.dst_regions[i])
            continue;
        tb__device *device = tb__loop_find_memory(flow->o.loop, flow->tensors[i].dst.base, 1, &memory);
        if (groups->device && (groups->device != device || groups->unit != memory.index)) {
            groups->device = NULL;
            break;
        }
        groups->device = device;
        groups->unit = memory.index;
    }
    if (!groups->device)
        groups->device = tb__loop_find_memory(flow->o.loop, NULL, 0, &(tb__memory){0});
}

tb__device *tb__flow_slot_device(const tb__flow *flow) {
    return flow->groups.device;
}

/* Whether the bucket can be converted where its sender has it: by the device that has both. */
static bool can_convert(const tb__flow *flow, const lane *l, size_t bucket) {
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    const tb__gather *gather = &flow->o.gather;
    tb__memory unused;
    if (l->nsenders != 1 || l->first->is_coded || l->is_stashed || flow->setup.paths[bucket].why_taken)
        return false;
    for (size_t i = 0; i < b->nentries; i++) {
        const tb_chunk *chunk = &flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk];
        const remote_tensor *p = tb__member_find_tensor(&flow->members[l->senders[0]], chunk->tensor);
        if (!p || !p->memory || !tb__peer_memory_is_mapped(p->memory) ||
            tb__peer_memory_find(p->memory, &unused) != flow->groups.device ||
            !gather->can_list_chunk(gather->arg, chunk, p->strides))
            return false;
    }
    return true;
}

/* Counts, for each sender, the buckets that are read twice, and the groups after which it is not needed any more. */
static void count_conversions(tb__flow *flow) {
    for (size_t i = 0; i < flow->setup.ir->nbuckets; i++) {
        const lane *l = tb__flow_lane(flow, i);
        const group *g = l->is_target ? tb__flow_group(flow, i) : NULL;
        for (uint32_t j = 0; g && (g->is_converted || g->slot != TB__NOWHERE) && j < l->nsenders; j++) {
            struct member_setup *m = &flow->members[l->senders[j]].setup;
            size_t until = (size_t)(g - flow->setup.groups.item) + 1;
            m->nread_twice += g->is_read_twice;
            m->gathers_until = until > m->gathers_until ? until : m->gathers_until;
        }
    }
}

static void choose_converted(tb__flow *flow) {
    group *groups = flow->setup.groups.item;
    for (size_t i = 0; i < flow->setup.groups.count; i++)
        groups[i].is_converted = groups[i].slot != TB__NOWHERE;
    for (size_t i = 0; i < flow->setup.ir->nbuckets; i++) {
        const lane *l = tb__flow_lane(flow, i);
        group *g = l->is_target ? &groups[find_group(flow, flow->setup.ir->buckets[i].group)] : NULL;
        if (g && g->is_converted)
            g->is_converted = can_convert(flow, l, i);
    }
}

tb_status tb__flow_choose_slots(tb__flow *flow) {
    const tb__gather *gather = &flow->o.gather;
    struct flow_groups *groups = &flow->groups;
    size_t next = 0;
    choose_converted(flow);
    for (size_t i = 0; i < flow->setup.groups.count; i++) {
        group *g = &flow->setup.groups.item[i];
        size_t nbytes = 0;
        g->is_read_twice = g->is_converted && gather->must_measure(gather->arg, g->number);
        g->slot = g->slot == TB__NOWHERE || g->is_converted ? TB__NOWHERE : next++;
        if (g->slot != TB__NOWHERE)
            TB_TRY(gather->measure_slot(gather->arg, g->number, &nbytes));
        groups->slot_nbytes = nbytes > groups->slot_nbytes ? nbytes : groups->slot_nbytes;
        groups->has_steps |= tb__group_has_step(g);
    }
    groups->nslots = 2 * groups->slot_nbytes <= gather->slots_nbytes ? 2 : 1;
    count_conversions(flow);
    return TB_OK;
}

/* Lists each group's lanes. Groups ascend within a channel. */
static tb_status list_lanes(tb__flow *flow) {
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < flow->setup.ir->nchannels; i++) {
            const lane *l = &flow->setup.lanes[i];
            const group *last = NULL;
            for (size_t j = 0; l->is_target && j < l->channel->nbuckets; j++) {
                uint32_t number = flow->setup.ir->buckets[l->channel->first_bucket + j].group;
                group *g = &flow->setup.groups.item[find_group(flow, number)];
                if (g == last)
                    continue;
                if (pass == 1)
                    g->lanes[g->nlanes] = l;
                g->nlanes++;
                last = g;
            }
        }
        for (size_t i = 0; pass == 0 && i < flow->setup.groups.count; i++) {
            group *g = &flow->setup.groups.item[i];
            g->lanes = tb__arena_alloc(&flow->setup.arena, g->nlanes, sizeof *g->lanes);
            g->nlanes = 0;
            if (!g->lanes)
                return TB_NO_MEMORY;
        }
    }
    return TB_OK;
}

tb_status tb__flow_count_groups(tb__flow *flow) {
    const tb_ir *ir = flow->setup.ir;
    for (size_t i = 0; i < ir->nbuckets; i++) {
        const tb_bucket *bucket = &ir->buckets[i];
        group new = {.number = bucket->group, .nbuckets = 1, .slot = is_gathered(flow, bucket) ? 0 : TB__NOWHERE};
        if (flow->setup.lanes[bucket->channel].is_target && !tb__vec_push(&flow->setup.groups, new))
            return TB_NO_MEMORY;
    }
    group *g = flow->setup.groups.item;
    size_t n = flow->setup.groups.count, kept = 0;
    if (!g)
        return TB_OK; /* this rank receives nothing */
    qsort(g, n, sizeof *g, compare_groups);
    for (size_t i = 0; i < n; i++) {
        if (kept && g[kept - 1].number == g[i].number) {
            g[kept - 1].nbuckets++;
            g[kept - 1].slot = g[i].slot == TB__NOWHERE ? g[kept - 1].slot : g[i].slot;
        } else {
            g[kept++] = g[i];
        }
    }
    flow->setup.groups.count = kept;
    for (size_t i = 0; i < kept; i++) {
        g[i].user_group = flow->o.user_groups ? flow->o.user_groups[g[i].number] : g[i].number;
        g[i].ordinal = i ? g[i - 1].ordinal + (g[i].user_group != g[i - 1].user_group) : 0;
    }
    choose_slot_unit(flow);
    TB_TRY(list_lanes(flow));
    tb__leg_set_groups(&flow->recv, 0, count_user_groups(flow));
    return TB_OK;
}

void tb__flow_begin_groups(tb__flow *flow) {
    flow->groups.takes_all = false;
    flow->groups.user_groups_taken = 0;
}

void tb__flow_free_groups(tb__flow *flow) {
    if (flow->groups.slots)
        flow->groups.device->ops->free(flow->groups.device, flow->groups.slots);
}

tb_status tb__flow_open_groups(tb__flow *flow) {
    const tb__gather *gather = &flow->o.gather;
    struct flow_groups *groups = &flow->groups;
    bool gathers = false;
    for (size_t i = 0; i < flow->setup.groups.count; i++) {
        flow->setup.groups.item[i].left = flow->setup.groups.item[i].nbuckets;
        flow->setup.groups.item[i].nlast = 0;
        gathers |= flow->setup.groups.item[i].slot != TB__NOWHERE;
    }
    groups->done = groups->slots_done = groups->asked = 0;
    groups->is_step_running = false;
    if (gather->begin)
        gather->begin(gather->arg);
    if (!gathers || groups->slots)
        return TB_OK;
    return groups->device->ops->alloc(groups->device, groups->unit, groups->nslots * groups->slot_nbytes,
                                      (void **)&groups->slots);
}

/* ---- Windows --------------------------------------------------------------------------------------------------- */

bool tb__flow_is_in_window(const tb__flow *flow, const tb_bucket *bucket) {
    const group *g = &flow->setup.groups.item[find_group(flow, bucket->group)];
    if (g->slot != TB__NOWHERE && g->slot >= flow->groups.slots_done + flow->groups.nslots)
        return false;
    if (flow->o.group_window == 0)
        return true;
    size_t taken = flow->groups.takes_all ? ordinal_at(flow, flow->groups.done) : flow->groups.user_groups_taken;
    return g->ordinal < taken + flow->o.group_window;
}

bool tb__flow_has_group(const tb__flow *flow, uint32_t user_group) {
    return flow->recv.attempt && flow->groups.done >= find_user_group(flow, user_group + 1);
}

void tb__flow_take_groups(tb__flow *flow, uint32_t user_group) {
    if (user_group == UINT32_MAX) {
        flow->groups.takes_all = true;
    } else {
        size_t taken = ordinal_at(flow, find_user_group(flow, user_group + 1));
        flow->groups.user_groups_taken =
            taken > flow->groups.user_groups_taken ? taken : flow->groups.user_groups_taken;
    }
    tb__loop_wake(flow->o.loop);
}

/* ---- Arrivals -------------------------------------------------------------------------------------------------- */

static group *next_complete(tb__flow *flow) {
    group *next = flow->groups.done < flow->setup.groups.count ? &flow->setup.groups.item[flow->groups.done] : NULL;
    return next && next->left == 0 ? next : NULL;
}

static void count_done(tb__flow *flow) {
    flow->groups.done++;
    tb__leg_set_groups(&flow->recv, ordinal_at(flow, flow->groups.done), count_user_groups(flow));
}

/* Counts complete groups that have no step of their own as done. */
static tb_status advance_groups(tb__flow *flow) {
    for (const group *g; (g = next_complete(flow)) && !tb__group_has_step(g);) {
        TB_TRY(tb__flow_check_exposures(flow, g));
        count_done(flow);
    }
    return TB_OK;
}

tb_status tb__flow_count_group(tb__flow *flow, uint32_t number) {
    flow->setup.groups.item[find_group(flow, number)].left--;
    return advance_groups(flow);
}

void tb__flow_count_last(tb__flow *flow, uint32_t number, int step) {
    flow->setup.groups.item[find_group(flow, number)].nlast += (size_t)step;
}

const group *tb__flow_find_last(const tb__flow *flow) {
    for (size_t i = flow->groups.done; i < flow->setup.groups.count; i++) {
        const group *g = &flow->setup.groups.item[i];
        if (g->nlast > 0 && g->nlast == g->left)
            return g;
    }
    return NULL;
}

static char *slot_of(const tb__flow *flow, const group *g) {
    return flow->groups.slots + g->slot % flow->groups.nslots * flow->groups.slot_nbytes;
}

char *tb__flow_slot(const tb__flow *flow, const tb_chunk *chunk) {
    return slot_of(flow, &flow->setup.groups.item[find_group(flow, chunk->group)]);
}

tb_status tb__flow_list_gathered(tb__flow *flow, copy_kind kind, tb__move_list *out) {
    const tb__gather *gather = &flow->o.gather;
    tb__gather_step step = kind == COPY_MEASURE ? TB__GATHER_MEASURE : TB__GATHER_WRITE;
    for (size_t i = 0; i < flow->setup.groups.count; i++) {
        const group *g = &flow->setup.groups.item[i];
        size_t first = out->moves.count;
        if (!tb__group_has_step(g))
            continue;
        TB_TRY(gather->list(gather->arg, g->number, step, g->is_read_twice ? NULL : slot_of(flow, g), out));
        for (; first < out->moves.count; first++)
            out->moves.item[first].part = g->number;
    }
    return TB_OK;
}

/* Called when the groups of the operation, the next ones, are in the tensors. */
static tb_status end_written(tb__flow *flow, const copy_op *c) {
    for (size_t i = 0; i < c->nparts; i++) {
        const group *g = &flow->setup.groups.item[flow->groups.done];
        TB_TRY(tb__flow_check_exposures(flow, g));
        flow->groups.slots_done += g->slot != TB__NOWHERE;
        count_done(flow);
        for (size_t j = 0; g->is_read_twice && j < g->nlanes; j++)
            TB_TRY(tb__flow_count_second_reads(flow, g->lanes[j], g->number));
    }
    TB_TRY(advance_groups(flow));
    return tb__flow_conclude(flow);
}

static void end_gathered_step(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    flow->groups.is_step_running = false;
    if (flow->recv.is_ending)
        return;
    if (status != TB_OK) {
        tb__flow_end_step_recv(flow, status, c->why);
        return;
    }
    if (c->kind == COPY_GATHERED)
        status = end_written(flow, c);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static tb_status ask_next(tb__flow *flow, const group *g, tb__gather_step *out) {
    const tb__gather *gather = &flow->o.gather;
    TB_TRY(tb__flow_check_exposures(flow, g));
    return gather->next(gather->arg, flow, flow->recv.attempt, g->number, g->is_read_twice, out);
}

/* Called when the group waits for a rank, which may be gone. The groups behind it that are complete send their
 * magnitudes to other ranks meanwhile, each once. */
static tb_status wait_for_group(tb__flow *flow, const group *next) {
    const tb__gather *gather = &flow->o.gather;
    struct flow_groups *groups = &flow->groups;
    const group *all = flow->setup.groups.item;
    tb__gather_step step;
    groups->asked = groups->asked > groups->done ? groups->asked : groups->done + 1;
    for (; groups->asked < flow->setup.groups.count; groups->asked++) {
        const group *g = &all[groups->asked];
        if (!next->is_read_twice || !g->is_read_twice || g->left > 0)
            break;
        TB_TRY(ask_next(flow, g, &step));
    }
    TB_TRY(ask_next(flow, next, &step)); /* the one that is awaited is that of the last group that was asked for */
    const member *awaited = flow->ngone ? tb__flow_find_member(flow, gather->awaits(gather->arg)) : NULL;
    return awaited && awaited->is_gone ? tb__fail(awaited->gone_status, "%s", tb__member_why_gone(awaited)) : TB_OK;
}

/* Chooses the next step, and the number of groups that take it: one of the groups with slots, or all complete ones that
 * were measured and belong to one group of the program. */
static tb_status choose_step(tb__flow *flow, tb__gather_step *step, size_t *count) {
    const group *next = &flow->setup.groups.item[flow->groups.done], *g = next;
    const group *end = flow->setup.groups.item + flow->setup.groups.count;
    tb__gather_step same = TB__GATHER_WAIT;
    TB_TRY(ask_next(flow, next, step));
    if (*step == TB__GATHER_WAIT)
        return wait_for_group(flow, next);
    do {
        g++;
        if (g == end || !next->is_read_twice || !g->is_read_twice || g->left > 0 || g->user_group != next->user_group)
            break;
        TB_TRY(ask_next(flow, g, &same));
    } while (same == *step);
    *count = (size_t)(g - next);
    return TB_OK;
}

tb_status tb__flow_step_gathered(tb__flow *flow, bool *did) {
    const group *g = next_complete(flow);
    tb__gather_step step = TB__GATHER_WAIT;
    size_t count = 0;
    if (!g || !tb__group_has_step(g) || flow->groups.is_step_running || (g->is_read_twice && flow->direct.is_revoking))
        return TB_OK;
    TB_TRY(choose_step(flow, &step, &count));
    if (step == TB__GATHER_WAIT)
        return TB_OK;
    copy_op *c = tb__flow_new_copy_op(flow, false, step == TB__GATHER_MEASURE ? COPY_MEASURE : COPY_GATHERED, count);
    if (!c)
        return TB_NO_MEMORY;
    c->converts = g->is_read_twice;
    while (c->nparts < count)
        c->parts[c->nparts++] = g++->number;
    c->end = end_gathered_step;
    flow->groups.is_step_running = *did = true;
    tb__flow_start_copy_op(c);
    return TB_OK;
}
