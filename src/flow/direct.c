/* Exposures and direct reads: see direct.h. */
#include "flow/flow_inside.h"

#include "base/int.h"

#include <string.h>

static uint64_t exposure_value(uint64_t attempt, unsigned state) {
    return attempt << 2 | state;
}

/* ---- Exposures of this rank's tensors --------------------------------------------------------------------------- */

tb_status tb__flow_make_exposures(tb__flow *flow) {
    size_t nbytes = flow->nmembers * EXPOSURE_STRIDE;
    TB_TRY(tb_alloc(nbytes, (void **)&flow->direct.exposures));
    memset(flow->direct.exposures, 0, nbytes);
    for (size_t i = 0; i < flow->nmembers; i++)
        flow->members[i].direct.exposure = (_Atomic uint64_t *)(void *)(flow->direct.exposures + i * EXPOSURE_STRIDE);
    return tb__region_get(flow->o.loop, flow->direct.exposures, nbytes, &flow->direct.exposures_region);
}

void tb__flow_free_exposures(tb__flow *flow) {
    tb__region_put(flow->direct.exposures_region);
    tb_free(flow->direct.exposures);
}

/* This rank may overwrite its sources when all readers that stash have stashed them. A rank that sends from a snapshot
 * does not wait: readers may stash for other reasons, and may need this rank's data before they can finish. */
static void try_permit_writes(tb__flow *flow) {
    for (size_t i = 0; flow->setup.overwrites_any_source && i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader && flow->members[i].setup.must_stash &&
            !flow->members[i].direct.has_stashed)
            return;
    }
    flow->direct.writable_attempt = flow->send.attempt;
}

void tb__flow_on_stashed(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->direct.is_exposed || flow->send.attempt != attempt)
        return;
    from->direct.has_stashed = true;
    try_permit_writes(flow);
}

static void update_send_complete(tb__flow *flow) {
    if (flow->direct.readers_left == 0 && flow->direct.committers_left == 0)
        tb__leg_complete(&flow->send);
}

void tb__flow_forget_exposures(tb__flow *flow) {
    flow->direct.is_exposed = false;
}

void tb__flow_expose(tb__flow *flow) {
    tb__leg *leg = &flow->send;
    flow->direct.readers_left = flow->direct.committers_left = 0;
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (!m->setup.is_reader)
            continue;
        m->direct.has_stashed = m->direct.is_done = m->direct.has_committed = false;
        flow->direct.readers_left++;
        flow->direct.committers_left += flow->o.shadow.is_used;
        atomic_store(m->direct.exposure, exposure_value(leg->attempt, EXPOSURE_READY));
    }
    flow->direct.is_exposed = true;
    for (size_t i = 0; flow->o.on_bucket && i < flow->setup.ir->nbuckets; i++) {
        const lane *l = tb__flow_lane(flow, i);
        if (!l->is_target && flow->setup.paths[i].nstaged == 0) /* it is where its readers find it */
            tb__flow_tell_step(flow, i, TB_BUCKET_LAUNCHED);
    }
    try_permit_writes(flow);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader)
            tb__flow_tell(flow, &flow->members[i], MESSAGE_READY, leg->attempt);
    }
    if (flow->setup.snapshot_of)
        tb__leg_release(leg);
    update_send_complete(flow);
}

void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->direct.is_exposed || flow->send.attempt != attempt || from->direct.is_done || !from->setup.is_reader)
        return;
    tb__flow_on_stashed(flow, from, attempt); /* the STASHED message of a lost reader may be lost */
    from->direct.is_done = true;
    flow->direct.readers_left--;
    tb__leg_add_bytes(&flow->send, from->setup.reads_nbytes);
    from->peer->moved[1] += (uint64_t)from->setup.reads_nbytes;
    update_send_complete(flow);
}

void tb__flow_check_exposure_of(tb__flow *flow, member *reader) {
    if (reader->direct.exposure &&
        atomic_load(reader->direct.exposure) == exposure_value(flow->send.attempt, EXPOSURE_COMPLETE))
        tb__flow_on_done(flow, reader, flow->send.attempt);
}

void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->direct.is_exposed || flow->send.attempt != attempt || from->direct.has_committed ||
        !from->setup.is_reader)
        return;
    from->direct.has_committed = true;
    flow->direct.committers_left -= flow->o.shadow.is_used;
    update_send_complete(flow);
}

bool tb__flow_is_served(const tb__flow *flow, const member *reader) {
    return reader->direct.is_done && (reader->direct.has_committed || !flow->o.shadow.is_used);
}

void tb__flow_revoke(tb__flow *flow) {
    if (!flow->direct.is_exposed)
        return;
    flow->direct.is_exposed = false;
    for (size_t i = 0; i < flow->nmembers; i++) {
        uint64_t ready = exposure_value(flow->send.attempt, EXPOSURE_READY);
        if (flow->members[i].setup.is_reader)
            atomic_compare_exchange_strong(flow->members[i].direct.exposure, &ready,
                                           exposure_value(flow->send.attempt, EXPOSURE_REVOKED));
    }
}

/* ---- Reads ----------------------------------------------------------------------------------------------------- */

/* The lane's first bucket, from this one on, that this rank reads. Of a reduced lane, either all buckets are staged or
 * none is. */
static size_t next_to_take(const tb__flow *flow, const lane *l, size_t from) {
    while (l->nsenders == 1 && from < l->channel->nbuckets &&
           flow->setup.paths[l->channel->first_bucket + from].takes_staged)
        from++;
    return from;
}

void tb__flow_open_reads(tb__flow *flow) {
    size_t n = flow->setup.ir->nchannels;
    for (size_t i = 0; i < n; i++)
        flow->setup.lanes[i].to_take = next_to_take(flow, &flow->setup.lanes[i], 0);
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        m->direct.left = m->setup.nbuckets + m->setup.nread_twice;
        m->direct.stash_left = m->setup.nstash;
        m->direct.is_concluded = false;
    }
    flow->direct.next_lane_in = n ? (uint32_t)(flow->self % n) : 0;
}

bool tb__member_on_ready(member *from, uint64_t attempt) {
    from->direct.ready = attempt;
    return from->setup.is_sender;
}

bool tb__flow_may_write(const tb__flow *flow) {
    return (!flow->setup.overwrites_any_source && !flow->setup.overwrites_live) ||
           flow->direct.writable_attempt >= flow->recv.attempt;
}

static tb_status fail_withdrawn(const tb__flow *flow, const member *m) {
    return tb__fail(TB_CANCELLED, "%s withdrew %s while it was being read", m->peer->label, flow->what);
}

/* All buckets of this sender have arrived: completes its exposure. */
static tb_status complete_exposure(tb__flow *flow, member *m) {
    uint64_t attempt = flow->recv.attempt, ready = exposure_value(attempt, EXPOSURE_READY);
    if (m->direct.peer_exposure &&
        !atomic_compare_exchange_strong(m->direct.peer_exposure, &ready, exposure_value(attempt, EXPOSURE_COMPLETE)))
        return fail_withdrawn(flow, m);
    m->direct.is_concluded = true;
    m->peer->moved[0] += (uint64_t)m->setup.sends_nbytes;
    return TB_OK;
}

static tb_status conclude_sender(tb__flow *flow, member *m) {
    TB_TRY(complete_exposure(flow, m));
    tb__flow_tell(flow, m, MESSAGE_DONE, flow->recv.attempt);
    return TB_OK;
}

/* Its buckets may still have to be relayed, which does not need the sender. The exposure of a lost sender can be
 * accessed: the mapping stays. */
void tb__flow_conclude_gone(tb__flow *flow, member *m) {
    bool has_all = flow->recv.is_under_way && flow->recv.attempt && m->setup.is_sender && !m->direct.is_concluded &&
                   m->direct.left == 0;
    if (has_all)
        (void)complete_exposure(flow,
                                m); /* on failure the sender counts as needed, and the leg fails for that reason */
}

tb_status tb__flow_conclude(tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (m->setup.is_sender && !m->direct.is_concluded && m->direct.left == 0 &&
            flow->groups.done >= m->setup.gathers_until)
            TB_TRY(conclude_sender(flow, m));
    }
    return TB_OK;
}

bool tb__member_is_exposed(const tb__flow *flow, const member *sender) {
    return !sender->direct.peer_exposure ||
           atomic_load(sender->direct.peer_exposure) == exposure_value(flow->recv.attempt, EXPOSURE_READY);
}

tb_status tb__flow_check_exposures(const tb__flow *flow, const group *g) {
    for (size_t i = 0; i < g->nlanes; i++) {
        const lane *l = g->lanes[i];
        for (uint32_t j = 0; j < l->nsenders; j++) {
            const member *m = &flow->members[l->senders[j]];
            if (!m->direct.is_concluded && m->direct.ready == flow->recv.attempt && !tb__member_is_exposed(flow, m))
                return fail_withdrawn(flow, m);
        }
    }
    return TB_OK;
}

tb_status tb__flow_count_arrived(tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if (--m->direct.left == 0 && flow->groups.done >= m->setup.gathers_until)
            TB_TRY(conclude_sender(flow, m));
    }
    return TB_OK;
}

tb_status tb__flow_count_second_reads(tb__flow *flow, const lane *l, uint32_t number) {
    const tb_bucket *buckets = &flow->setup.ir->buckets[l->channel->first_bucket]; /* ascend by group */
    size_t i = 0;
    TB_BISECT(i, l->channel->nbuckets, buckets[i].group >= number);
    for (; i < l->channel->nbuckets && buckets[i].group == number; i++)
        TB_TRY(tb__flow_count_arrived(flow, l));
    return TB_OK;
}

void tb__flow_count_stashed(tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if (--m->direct.stash_left == 0)
            tb__flow_tell(flow, m, MESSAGE_STASHED, flow->recv.attempt);
    }
}

static bool are_ready(const tb__flow *flow, const lane *l) {
    if (flow->direct.is_revoking || tb__lane_is_unreadable(flow, l))
        return false;
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (flow->members[l->senders[i]].direct.ready != flow->recv.attempt)
            return false;
    }
    return true;
}

/* The most that the host reads in one copy operation, so that bytes_done grows steadily. What other devices do is not
 * divided. */
enum { COPY_OP_BYTES = 256 << 20 };

static bool can_read(const tb__flow *flow, const lane *l) {
    bool is_reduced_staged = l->nsenders > 1 && l->takes_staged;
    return l->is_target && !is_reduced_staged && l->to_take < l->channel->nbuckets && are_ready(flow, l) &&
           (l->is_stashed || tb__flow_may_write(flow)) &&
           tb__flow_admits(flow, l, &flow->setup.ir->buckets[l->channel->first_bucket + l->to_take]);
}

/* The next lane that can be read, round robin, so that no sender waits for all others. */
static lane *find_ready(tb__flow *flow) {
    size_t n = flow->setup.ir->nchannels;
    for (size_t i = 0; i < n; i++) {
        size_t at = (flow->direct.next_lane_in + i) % n;
        if (!can_read(flow, &flow->setup.lanes[at]))
            continue;
        flow->direct.next_lane_in = (uint32_t)((at + 1) % n);
        return &flow->setup.lanes[at];
    }
    return NULL;
}

/* TB_INVALID, or TB_LOST, if the memory of a tensor in this bucket was invalidated. */
static tb_status find_invalidated(tb__flow *flow, size_t bucket) {
    const lane *l = tb__flow_lane(flow, bucket);
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    for (size_t i = 0; i < b->nentries; i++) {
        uint32_t tensor = flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk].tensor;
        for (uint32_t j = 0; j < l->nsenders; j++) {
            const member *m = &flow->members[l->senders[j]];
            const remote_tensor *p = tb__member_find_tensor(m, tensor);
            if (p && p->memory && !tb__peer_memory_is_valid(p->memory))
                return tb__flow_fail_invalidated(flow, m, tensor);
        }
    }
    return TB_OK;
}

/* Ends the receive for a failed read. If memory was invalidated, the message names the tensor. */
static void fail_read(tb__flow *flow, const copy_op *c, tb_status status) {
    tb_status named = TB_OK;
    for (size_t i = 0; i < c->nparts && status == TB_INVALID && named == TB_OK; i++)
        named = find_invalidated(flow, c->parts[i]);
    if (named == TB_OK)
        tb__flow_end_step_recv(flow, status, c->why);
    else
        tb__flow_end_step_recv(flow, named, tb_error_detail());
}

static void end_read(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (flow->recv.is_ending)
        return;
    if (status != TB_OK) {
        fail_read(flow, c, status);
        return;
    }
    for (size_t i = 0; i < c->nparts && status == TB_OK; i++)
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[i]), c->parts[i]);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static void end_stash_read(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (status != TB_OK || flow->recv.is_ending) {
        tb__flow_unstage(flow, POOL_STASH, c->to, c->nbytes);
        if (!flow->recv.is_ending)
            fail_read(flow, c, status);
        return;
    }
    status = tb__staged_stash(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0], c->to, c->nbytes);
    if (status != TB_OK)
        tb__flow_unstage(flow, POOL_STASH, c->to, c->nbytes);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static tb_status read_into_stash(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take, nbytes = (size_t)flow->setup.ir->buckets[index].total_bytes;
    copy_op *c = tb__flow_new_copy_op(flow, false, l->first->is_coded ? COPY_PACK : COPY_STASH, 1);
    char *buffer = c ? tb__flow_stage(flow, POOL_STASH, nbytes) : NULL;
    if (!buffer) {
        tb__flow_free_copy_op(c);
        return TB_NO_MEMORY;
    }
    c->parts[c->nparts++] = (uint32_t)index;
    tb__flow_tell_step(flow, index, TB_BUCKET_LAUNCHED);
    c->to = buffer;
    c->nbytes = nbytes;
    c->end = end_stash_read;
    l->to_take = next_to_take(flow, l, l->to_take + 1);
    tb__flow_start_copy_op(c);
    return TB_OK;
}

static void end_own_unpack(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    free(c->from);
    if (flow->recv.is_ending)
        return;
    status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0]);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static tb_status begin_own_conversion(tb__flow *flow, size_t bucket, copy_kind kind, char *buffer,
                                      void (*end)(copy_op *c, tb_status status)) {
    copy_op *c = tb__flow_new_copy_op(flow, false, kind, 1);
    if (!c) {
        free(buffer);
        return TB_NO_MEMORY;
    }
    c->parts[c->nparts++] = (uint32_t)bucket;
    c->from = kind == COPY_UNPACK ? buffer : NULL;
    c->to = kind == COPY_PACK ? buffer : NULL;
    c->end = end;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

static void end_own_pack(copy_op *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (flow->recv.is_ending) {
        free(c->to);
        return;
    }
    status = begin_own_conversion(flow, c->parts[0], COPY_UNPACK, c->to, end_own_unpack);
    if (status != TB_OK)
        tb__flow_end_step_recv(flow, status, tb_error_detail());
}

/* A coded bucket of this rank for itself: packed and unpacked through a buffer, as between two ranks. */
static tb_status convert_own(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take;
    l->to_take = next_to_take(flow, l, l->to_take + 1);
    char *buffer = tb__malloc((size_t)flow->setup.ir->buckets[index].total_bytes, 1);
    return buffer ? begin_own_conversion(flow, index, COPY_PACK, buffer, end_own_pack) : TB_NO_MEMORY;
}

/* The program's number of the group that the lane's next bucket belongs to. */
static uint32_t next_user_group(const tb__flow *flow, const lane *l) {
    uint32_t number = flow->setup.ir->buckets[l->channel->first_bucket + l->to_take].group;
    return flow->o.user_groups ? flow->o.user_groups[number] : number;
}

/* Reads all ready buckets of one of the program's groups, starting with this lane: those that are converted where they
 * are, or the others. */
static tb_status read_buckets(tb__flow *flow, lane *first) {
    size_t n = flow->setup.ir->nchannels, count = 0;
    uint32_t number = next_user_group(flow, first);
    bool converts = tb__flow_group(flow, first->channel->first_bucket + first->to_take)->is_converted;
    int64_t nbytes = 0;
    for (size_t i = 0; i < n; i++)
        count +=
            flow->setup.lanes[i].is_target ? flow->setup.lanes[i].channel->nbuckets - flow->setup.lanes[i].to_take : 0;
    copy_op *c = tb__flow_new_copy_op(flow, false, COPY_DIRECT, count);
    if (!c)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n && nbytes < COPY_OP_BYTES; i++) {
        lane *l = &flow->setup.lanes[((size_t)(first - flow->setup.lanes) + i) % n];
        while (nbytes < COPY_OP_BYTES && !l->is_stashed && !l->first->is_coded && can_read(flow, l)) {
            size_t index = l->channel->first_bucket + l->to_take;
            if (next_user_group(flow, l) != number || tb__flow_group(flow, index)->is_converted != converts)
                break;
            nbytes += flow->setup.paths[index].is_for_device ? 0 : flow->setup.ir->buckets[index].total_bytes;
            c->parts[c->nparts++] = (uint32_t)index;
            tb__flow_tell_step(flow, index, TB_BUCKET_LAUNCHED);
            l->to_take = next_to_take(flow, l, l->to_take + 1);
        }
    }
    c->converts = converts;
    c->end = end_read;
    tb__flow_start_copy_op(c);
    return TB_OK;
}

static tb_status read_next(tb__flow *flow, lane *l) {
    if (l->is_stashed)
        return read_into_stash(flow, l);
    return l->first->is_coded ? convert_own(flow, l) : read_buckets(flow, l);
}

tb_status tb__flow_step_reads(tb__flow *flow, bool *did) {
    lane *l = find_ready(flow);
    *did = l != NULL;
    return l ? read_next(flow, l) : TB_OK;
}
