/* Exposures, and what is read by them: see direct.h. */
#include "flow/flow_inside.h"

#include <string.h>

static uint64_t word_of(uint64_t attempt, unsigned state) {
    return attempt << 2 | state;
}

/* ---- Exposures of this rank's tensors --------------------------------------------------------------------------- */

tb_status tb__flow_make_words(tb__flow *flow) {
    size_t nbytes = flow->nmembers * WORD_STRIDE;
    TB_TRY(tb_alloc(nbytes, (void **)&flow->direct.words));
    memset(flow->direct.words, 0, nbytes);
    for (size_t i = 0; i < flow->nmembers; i++)
        flow->members[i].direct.word = (_Atomic uint64_t *)(void *)(flow->direct.words + i * WORD_STRIDE);
    return tb__region_get(flow->o.loop, flow->direct.words, nbytes, &flow->direct.words_region);
}

void tb__flow_free_words(tb__flow *flow) {
    tb__region_put(flow->direct.words_region);
    tb_free(flow->direct.words);
}

/* Once nobody needs what this rank is going to overwrite any more, it may. A rank whose sources are out of reach, in a
 * snapshot, waits for nobody: readers put things aside for reasons of their own, too, and may need this rank to get
 * there. */
static void try_permit_writes(tb__flow *flow) {
    for (size_t i = 0; flow->setup.overwrites_any_source && i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader && flow->members[i].setup.stashes && !flow->members[i].direct.has_stashed)
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

static void note_served(tb__flow *flow) {
    flow->send.is_complete = flow->direct.readers_left == 0 && flow->direct.committers_left == 0;
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
        atomic_store(m->direct.word, word_of(leg->attempt, EXPOSURE_READY));
    }
    flow->direct.is_exposed = true;
    try_permit_writes(flow);
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].setup.is_reader)
            tb__flow_tell(flow, &flow->members[i], MESSAGE_READY, leg->attempt);
    }
    leg->is_released = flow->setup.snapshot_of != NULL;
    note_served(flow);
}

void tb__flow_on_done(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->direct.is_exposed || flow->send.attempt != attempt || from->direct.is_done || !from->setup.is_reader)
        return;
    tb__flow_on_stashed(flow, from, attempt); /* of one that is gone, the message may be lost */
    from->direct.is_done = true;
    flow->direct.readers_left--;
    flow->send.bytes_done += from->setup.reads_nbytes;
    from->peer->moved[1] += (uint64_t)from->setup.reads_nbytes;
    note_served(flow);
}

void tb__flow_read_word(tb__flow *flow, member *reader) {
    if (reader->direct.word && atomic_load(reader->direct.word) == word_of(flow->send.attempt, EXPOSURE_COMPLETE))
        tb__flow_on_done(flow, reader, flow->send.attempt);
}

void tb__flow_on_committed(tb__flow *flow, member *from, uint64_t attempt) {
    if (!flow->direct.is_exposed || flow->send.attempt != attempt || from->direct.has_committed ||
        !from->setup.is_reader)
        return;
    from->direct.has_committed = true;
    flow->direct.committers_left -= flow->o.shadow.is_used;
    note_served(flow);
}

bool tb__flow_is_served(const tb__flow *flow, const member *reader) {
    return reader->direct.is_done && (reader->direct.has_committed || !flow->o.shadow.is_used);
}

void tb__flow_revoke(tb__flow *flow) {
    if (!flow->direct.is_exposed)
        return;
    flow->direct.is_exposed = false;
    for (size_t i = 0; i < flow->nmembers; i++) {
        uint64_t ready = word_of(flow->send.attempt, EXPOSURE_READY);
        if (flow->members[i].setup.is_reader)
            atomic_compare_exchange_strong(flow->members[i].direct.word, &ready,
                                           word_of(flow->send.attempt, EXPOSURE_REVOKED));
    }
}

/* ---- What this rank reads --------------------------------------------------------------------------------------- */

/* The lane's first bucket from this one on that is not sent to this rank. Those that are reduced are all or none. */
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
        m->direct.left = m->setup.nbuckets;
        m->direct.aside_left = m->setup.naside;
        m->direct.is_concluded = false;
    }
    flow->direct.next_lane_in = n ? (uint32_t)(flow->self % n) : 0;
}

bool tb__flow_on_ready(tb__flow *flow, member *from, uint64_t attempt) {
    (void)flow;
    from->direct.ready = attempt;
    return from->setup.is_sender;
}

bool tb__flow_may_write(const tb__flow *flow) {
    return (!flow->setup.overwrites_any_source && !flow->setup.overwrites_live) ||
           flow->direct.writable_attempt >= flow->recv.attempt;
}

static tb_status withdrew(const tb__flow *flow, const member *m) {
    return tb__fail(TB_CANCELLED, "%s withdrew %s while it was being read", m->peer->label, flow->what);
}

/* All that comes from this sender is here: completes its exposure. */
static tb_status complete_exposure(tb__flow *flow, member *m) {
    uint64_t attempt = flow->recv.attempt, ready = word_of(attempt, EXPOSURE_READY);
    if (m->direct.peer_exposure &&
        !atomic_compare_exchange_strong(m->direct.peer_exposure, &ready, word_of(attempt, EXPOSURE_COMPLETE)))
        return withdrew(flow, m);
    m->direct.is_concluded = true;
    m->peer->moved[0] += (uint64_t)m->setup.sends_nbytes;
    return TB_OK;
}

static tb_status conclude_sender(tb__flow *flow, member *m) {
    TB_TRY(complete_exposure(flow, m));
    tb__flow_tell(flow, m, MESSAGE_DONE, flow->recv.attempt);
    return TB_OK;
}

/* What was read of it may still have to be handed on; that needs it no more. Its word can be read, although its memory
 * is lost: the mapping stays. */
void tb__flow_conclude_gone(tb__flow *flow, member *m) {
    bool has_all = flow->recv.is_under_way && flow->recv.attempt && m->setup.is_sender && !m->direct.is_concluded &&
                   m->direct.left == 0;
    if (has_all)
        (void)complete_exposure(flow, m); /* else it is needed, and the leg fails by that */
}

tb_status tb__flow_conclude(tb__flow *flow) {
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (m->setup.is_sender && !m->direct.is_concluded && m->direct.left == 0 &&
            flow->groups_done >= m->setup.gathers_until)
            TB_TRY(conclude_sender(flow, m));
    }
    return TB_OK;
}

tb_status tb__flow_check_exposures(const tb__flow *flow, const group *g) {
    uint64_t ready = word_of(flow->recv.attempt, EXPOSURE_READY);
    for (size_t i = 0; i < g->nlanes; i++) {
        const lane *l = g->lanes[i];
        for (uint32_t j = 0; j < l->nsenders; j++) {
            const member *m = &flow->members[l->senders[j]];
            if (!m->direct.is_concluded && m->direct.ready == flow->recv.attempt && m->direct.peer_exposure &&
                atomic_load(m->direct.peer_exposure) != ready)
                return withdrew(flow, m);
        }
    }
    return TB_OK;
}

tb_status tb__flow_count_arrived(tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if (--m->direct.left == 0 && flow->groups_done >= m->setup.gathers_until)
            TB_TRY(conclude_sender(flow, m));
    }
    return TB_OK;
}

void tb__flow_count_aside(tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        member *m = &flow->members[l->senders[i]];
        if (--m->direct.aside_left == 0)
            tb__flow_tell(flow, m, MESSAGE_STASHED, flow->recv.attempt);
    }
}

static bool are_ready(const tb__flow *flow, const lane *l) {
    for (uint32_t i = 0; i < l->nsenders; i++) {
        if (flow->members[l->senders[i]].direct.ready != flow->recv.attempt)
            return false;
    }
    return true;
}

/* So many bytes are read by one copying, so that the leg shows how far it has come. */
enum { COPYING_BYTES = 256 << 20 };

static bool can_read(const tb__flow *flow, const lane *l) {
    bool is_reduced_staged = l->nsenders > 1 && l->takes_staged;
    return l->is_target && !is_reduced_staged && l->to_take < l->channel->nbuckets && are_ready(flow, l) &&
           (l->overwrites_source || tb__flow_may_write(flow)) &&
           tb__flow_admits(flow, l, &flow->setup.ir->buckets[l->channel->first_bucket + l->to_take]);
}

/* The next lane that can be read, round and round, so that no sender waits for all others. */
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

/* A tensor in this bucket whose memory was invalidated; TB_OK: there is none. */
static tb_status find_invalidated(tb__flow *flow, size_t bucket) {
    const lane *l = tb__flow_lane(flow, bucket);
    const tb_bucket *b = &flow->setup.ir->buckets[bucket];
    for (size_t i = 0; i < b->nentries; i++) {
        uint32_t tensor = flow->setup.ir->chunks[flow->setup.ir->entries[b->first_entry + i].chunk].tensor;
        for (uint32_t j = 0; j < l->nsenders; j++) {
            const member *m = &flow->members[l->senders[j]];
            const place *p = tb__member_place(m, tensor);
            if (p && p->remote && !tb__transport_is_valid(m->peer->transport, p->remote))
                return tb__fail(m->peer->is_lost ? TB_LOST : TB_INVALID,
                                "the memory of tensor '%.100s' on %s was invalidated; make %s again",
                                flow->tensors[tensor].spec.name, m->peer->label, flow->what);
        }
    }
    return TB_OK;
}

/* A read has failed: if memory was invalidated, because of a tensor that it was to read. */
static void fail_read(tb__flow *flow, const copying *c, tb_status status) {
    tb_status named = TB_OK;
    for (size_t i = 0; i < c->nparts && status == TB_INVALID && named == TB_OK; i++)
        named = find_invalidated(flow, c->parts[i]);
    if (named == TB_OK)
        tb__flow_end_step_recv(flow, status, c->why);
    else
        tb__flow_end_step_recv(flow, named, tb_error_detail());
}

static void end_read(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (flow->recv.is_ending)
        return;
    if (status != TB_OK) {
        fail_read(flow, c, status);
        return;
    }
    for (size_t i = 0; i < c->nparts && status == TB_OK; i++) {
        flow->recv.bytes_done += tb__flow_bucket_nbytes(flow, c->parts[i]);
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[i]), c->parts[i]);
    }
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static void end_aside(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    if (status != TB_OK || flow->recv.is_ending) {
        tb__flow_unstage(flow, POOL_STASH, c->to, c->nbytes);
        if (!flow->recv.is_ending)
            fail_read(flow, c, status);
        return;
    }
    status = tb__staged_put_aside(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0], c->to, c->nbytes);
    if (status != TB_OK)
        tb__flow_unstage(flow, POOL_STASH, c->to, c->nbytes);
    tb__flow_end_step_recv(flow, status, tb_error_detail());
}

static tb_status read_aside(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take, nbytes = (size_t)flow->setup.ir->buckets[index].total_bytes;
    copying *c = tb__flow_new_copying(flow, false, COPY_ASIDE, 1);
    char *buffer = c ? tb__flow_stage(flow, POOL_STASH, nbytes) : NULL;
    if (!buffer) {
        tb__flow_drop_copying(c);
        return TB_NO_MEMORY;
    }
    c->parts[c->nparts++] = (uint32_t)index;
    c->to = buffer;
    c->nbytes = nbytes;
    c->end = end_aside;
    l->to_take = next_to_take(flow, l, l->to_take + 1);
    tb_status status = tb__flow_start_copying(c);
    if (status != TB_OK)
        tb__flow_unstage(flow, POOL_STASH, buffer, nbytes);
    return status;
}

static void end_own_unpack(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    const char *why = c->why;
    free(c->from);
    if (flow->recv.is_ending)
        return;
    if (status == TB_OK) {
        flow->recv.bytes_done += tb__flow_bucket_nbytes(flow, c->parts[0]);
        status = tb__flow_bucket_arrived(flow, tb__flow_lane(flow, c->parts[0]), c->parts[0]);
        why = tb_error_detail();
    }
    tb__flow_end_step_recv(flow, status, why);
}

static tb_status begin_own(tb__flow *flow, size_t bucket, copy_kind kind, char *buffer,
                           void (*end)(copying *c, tb_status status)) {
    copying *c = tb__flow_new_copying(flow, false, kind, 1);
    tb_status status = TB_NO_MEMORY;
    if (c) {
        c->parts[c->nparts++] = (uint32_t)bucket;
        c->from = kind == COPY_UNPACK ? buffer : NULL;
        c->to = kind == COPY_PACK ? buffer : NULL;
        c->end = end;
        status = tb__flow_start_copying(c);
    }
    if (status != TB_OK)
        free(buffer);
    return status;
}

static void end_own_pack(copying *c, tb_status status) {
    tb__flow *flow = c->flow;
    const char *why = c->why;
    if (flow->recv.is_ending || status != TB_OK)
        free(c->to);
    if (flow->recv.is_ending)
        return;
    if (status == TB_OK) {
        status = begin_own(flow, c->parts[0], COPY_UNPACK, c->to, end_own_unpack);
        why = tb_error_detail();
    }
    if (status != TB_OK)
        tb__flow_end_step_recv(flow, status, why);
}

/* Of this rank with itself: by way of a buffer, as if it came from another. */
static tb_status convert_own(tb__flow *flow, lane *l) {
    size_t index = l->channel->first_bucket + l->to_take;
    l->to_take = next_to_take(flow, l, l->to_take + 1);
    char *buffer = tb__malloc((size_t)flow->setup.ir->buckets[index].total_bytes, 1);
    return buffer ? begin_own(flow, index, COPY_PACK, buffer, end_own_pack) : TB_NO_MEMORY;
}

/* All that is ready and of one group, beginning with this lane. */
static tb_status read_buckets(tb__flow *flow, lane *first) {
    size_t n = flow->setup.ir->nchannels, count = 0;
    uint32_t number = flow->setup.ir->buckets[first->channel->first_bucket + first->to_take].group;
    int64_t nbytes = 0;
    for (size_t i = 0; i < n; i++)
        count +=
            flow->setup.lanes[i].is_target ? flow->setup.lanes[i].channel->nbuckets - flow->setup.lanes[i].to_take : 0;
    copying *c = tb__flow_new_copying(flow, false, COPY_DIRECT, count);
    if (!c)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < n && nbytes < COPYING_BYTES; i++) {
        lane *l = &flow->setup.lanes[((size_t)(first - flow->setup.lanes) + i) % n];
        while (nbytes < COPYING_BYTES && !l->overwrites_source && !l->first->is_coded && can_read(flow, l)) {
            size_t index = l->channel->first_bucket + l->to_take;
            if (flow->setup.ir->buckets[index].group != number)
                break;
            nbytes += flow->setup.ir->buckets[index].total_bytes;
            c->parts[c->nparts++] = (uint32_t)index;
            l->to_take = next_to_take(flow, l, l->to_take + 1);
        }
    }
    c->end = end_read;
    return tb__flow_start_copying(c);
}

static tb_status read_some(tb__flow *flow, lane *l) {
    if (l->overwrites_source)
        return read_aside(flow, l);
    return l->first->is_coded ? convert_own(flow, l) : read_buckets(flow, l);
}

tb_status tb__flow_step_reads(tb__flow *flow, bool *did) {
    lane *l = find_ready(flow);
    *did = l != NULL;
    return l ? read_some(flow, l) : TB_OK;
}
