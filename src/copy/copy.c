/* Opens and closes a copy service, and handles its messages. */
#include "copy/copy.h"

#include "base/int.h"
#include "base/opts.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- Failures -------------------------------------------------------------------------------------------------- */

void tb__copy_break(tb_copy *copy, tb_status status) {
    if (copy->broken != TB_OK)
        return;
    copy->broken = status;
    snprintf(copy->why, sizeof copy->why, "%s", tb_error_detail());
    tb__handshake_break(&copy->handshake, status, false); /* the goodbye informs peers that have agreed */
    /* The next step breaks the flow: a step may be running in another thread now. */
    tb__loop_wake(copy->world->loop);
    tb__loop_signal(copy->world->loop);
}

static void record_abort(tb_copy *copy, uint64_t run, bool is_late, tb_status status, const char *why) {
    copy->aborted = run > copy->aborted ? run : copy->aborted;
    if (!copy->is_running || run != copy->run || copy->is_given_up)
        return;
    copy->is_given_up = true;
    copy->is_late = is_late;
    copy->abort_status = status;
    snprintf(copy->abort_why, sizeof copy->abort_why, "%s", why);
    tb__loop_wake(copy->world->loop);
    tb__loop_signal(copy->world->loop);
}

tb_status tb__copy_abort(tb_copy *copy, tb_status status) {
    tb__saved_detail why = tb__save_detail();
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        tb__pack pack = {0};
        if (i == copy->self)
            continue;
        tb__pack_u32(&pack, COPY_ABORT);
        tb__pack_u64(&pack, copy->run);
        tb__pack_u32(&pack, status == TB_TIMEOUT && copy->peers[i].offered < copy->run);
        tb__pack_status(&pack, status);
        tb__pack_string(&pack, why.text);
        if (tb__loop_send(copy->handshake.peers[i], copy->handshake.ports[i], &pack) != TB_OK)
            tb__copy_break(copy, TB_NO_MEMORY);
    }
    record_abort(copy, copy->run, false, status, why.text);
    return tb__fail(status, "%s", why.text);
}

/* ---- Messages in ----------------------------------------------------------------------------------------------- */

uint32_t tb__copy_flow_number(uint64_t run) {
    return COPY_FLOWS + (uint32_t)(run % (UINT32_MAX - COPY_FLOWS));
}

void tb__copy_drop_backlog(tb_copy *copy) {
    for (size_t i = 0; i < copy->backlog.count; i++)
        free(copy->backlog.item[i].data);
    copy->backlog.count = 0;
}

static bool copy_message(const tb__unpack *message, unsigned char **data, size_t *nbytes) {
    *nbytes = (size_t)(message->end - message->at);
    *data = tb__memdup(message->at, *nbytes, 1);
    return *data != NULL;
}

/* A new offer replaces that of the run before. */
static bool on_offer(tb_copy *copy, tb__copy_peer *peer, tb__unpack *message) {
    uint64_t run = tb__unpack_u64(message);
    unsigned char *data;
    size_t nbytes;
    if (message->failed || run <= peer->offered)
        return false;
    if (!copy_message(message, &data, &nbytes)) {
        tb__copy_break(copy, TB_NO_MEMORY);
        return true;
    }
    free(peer->offer);
    peer->offer = data;
    peer->offer_nbytes = nbytes;
    peer->offered = run;
    return true;
}

static bool on_vote(tb__copy_peer *peer, tb__unpack *message) {
    uint64_t run = tb__unpack_u64(message);
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    if (!tb__unpack_is_done(message) || run <= peer->voted)
        return false;
    peer->voted = run;
    peer->vote = status;
    snprintf(peer->why, sizeof peer->why, "%s", why);
    return true;
}

static bool on_copy_abort(tb_copy *copy, tb__unpack *message) {
    uint64_t run = tb__unpack_u64(message);
    bool is_late = tb__unpack_u32(message) != 0;
    tb_status status = tb__unpack_status(message);
    const char *why = tb__unpack_string(message);
    if (!tb__unpack_is_done(message) || status == TB_OK)
        return false;
    record_abort(copy, run, is_late, status, why);
    return true;
}

static void on_ready(tb_copy *copy, size_t at) {
    copy->peers[at].is_ready = true;
    copy->has_agreed = true;
    for (size_t i = 0; i < copy->handshake.npeers; i++)
        copy->has_agreed &= copy->peers[i].is_ready && copy->handshake.ranks[i].is_confirmed;
}

/* A peer may send data before this rank has all votes: such messages are kept. Messages of earlier runs are ignored. */
static bool on_flow_message(tb_copy *copy, size_t at, uint32_t number, tb__unpack *message) {
    if (!copy->is_running || number != tb__copy_flow_number(copy->run))
        return true;
    if (copy->flow)
        return tb__flow_message(copy->flow, at, message);
    struct tb__copy_backlog b = {.peer = at};
    if (!copy_message(message, &b.data, &b.nbytes) || !tb__vec_push(&copy->backlog, b)) {
        free(b.data);
        tb__copy_break(copy, TB_NO_MEMORY);
    }
    return true;
}

static void on_copy_message(tb__port *port, tb__peer *from, tb__unpack *message) {
    tb_copy *copy = (tb_copy *)port;
    size_t at = tb__handshake_find(&copy->handshake, from);
    if (at == TB__NOWHERE || copy->broken != TB_OK)
        return;
    uint32_t kind = tb__unpack_u32(message);
    bool is_valid = !message->failed;
    tb__set_detail("truncated or malformed, kind %u", (unsigned)kind);
    if (kind == COPY_READY)
        on_ready(copy, at);
    else if (kind == COPY_OFFER)
        is_valid &= on_offer(copy, &copy->peers[at], message);
    else if (kind == COPY_VOTE)
        is_valid &= on_vote(&copy->peers[at], message);
    else if (kind == COPY_ABORT)
        is_valid &= on_copy_abort(copy, message);
    else
        is_valid &= on_flow_message(copy, at, kind, message);
    if (!is_valid)
        tb__copy_break(copy,
                       tb__fail_within(TB_INVALID, "%s sent an invalid message about %s", from->label, copy->what));
    tb__loop_signal(copy->world->loop);
}

tb_status tb__copy_find_loss(const tb_copy *copy) {
    for (size_t i = 0; i < copy->handshake.npeers && copy->nlost > 0; i++) {
        if (copy->peers[i].lost_why)
            return tb__fail(TB_LOST, "%s", copy->peers[i].lost_why);
    }
    return TB_OK;
}

/* The peer is lost. A run that needs nothing more from the peer continues. */
static void drop_peer(tb_copy *copy, size_t at, const char *why) {
    tb__copy_peer *peer = &copy->peers[at];
    if (!copy->has_agreed || (!peer->lost_why && !(peer->lost_why = tb__strdup(why)))) {
        tb__copy_break(copy, tb__fail(TB_LOST, "%s", why));
        return;
    }
    copy->nlost++;
    tb__handshake_break(&copy->handshake, tb__fail(TB_LOST, "%s", why), false);
    if (copy->flow)
        tb__copy_flow_gone(copy, at);
    tb__loop_wake(copy->world->loop);
    tb__loop_signal(copy->world->loop);
}

static void on_copy_peer_lost(tb__port *port, tb__peer *peer) {
    tb_copy *copy = (tb_copy *)port;
    size_t at = tb__handshake_find(&copy->handshake, peer);
    char why[TB__WHY_MAX];
    if (at == TB__NOWHERE || copy->handshake.ranks[at].is_gone)
        return;
    snprintf(why, sizeof why, "%s was lost during %s: %s", peer->label, copy->what, peer->why ? peer->why : "?");
    drop_peer(copy, at, why);
}

/* ---- Joining and leaving --------------------------------------------------------------------------------------- */

static void pack_copy_manifest(tb__handshake *handshake, tb__pack *pack) {
    const tb_copy *copy = (const tb_copy *)handshake;
    tb__pack_i64(pack, copy->opts.bucket_size);
    tb__pack_i64(pack, copy->opts.staging_bytes);
}

/* A peer may have given up after its manifest. So all ranks confirm that they have all manifests (READY) before the
 * service is open. */
static tb_status send_ready(tb_copy *copy) {
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        tb__pack pack = {0};
        if (i == copy->self)
            continue;
        tb__pack_u32(&pack, COPY_READY);
        TB_TRY(tb__loop_send(copy->handshake.peers[i], copy->handshake.ports[i], &pack));
    }
    on_ready(copy, copy->self);
    return TB_OK;
}

static void on_copy_manifest(tb__handshake *handshake, size_t at, tb__unpack *manifest) {
    tb_copy *copy = (tb_copy *)handshake;
    int64_t bucket_size = tb__unpack_i64(manifest), staging_bytes = tb__unpack_i64(manifest);
    if (!tb__unpack_is_done(manifest) || bucket_size < 1 || staging_bytes < TB__LEAST_STAGING) {
        tb__copy_break(copy,
                       tb__fail(TB_INVALID,
                                "%s sent an invalid manifest of %s: bucket size %" PRId64 ", %" PRId64 " staging bytes",
                                handshake->peers[at]->label, copy->what, bucket_size, staging_bytes));
        return;
    }
    copy->peers[at].bucket_size = bucket_size;
    copy->peers[at].staging_bytes = staging_bytes;
}

/* All manifests are here. */
static tb_status agree(tb_copy *copy) {
    tb__handshake_tell_members(&copy->handshake);
    copy->bucket_size = copy->staging_bytes = INT64_MAX;
    for (size_t i = 0; i < copy->handshake.npeers; i++) {
        const tb__copy_peer *peer = &copy->peers[i];
        copy->bucket_size = tb__min64(copy->bucket_size, peer->bucket_size);
        copy->staging_bytes = tb__min64(copy->staging_bytes, peer->staging_bytes);
    }
    if (!copy->handshake.comm)
        TB_TRY(tb__handshake_make_comm(&copy->handshake, (size_t)copy->staging_bytes));
    return send_ready(copy);
}

static void on_copy_confirmed(tb__handshake *handshake, size_t at) {
    tb_copy *copy = (tb_copy *)handshake;
    tb_status status = handshake->nunconfirmed == 0 ? agree(copy) : TB_OK;
    (void)at;
    if (status != TB_OK)
        tb__copy_break(copy, status);
    tb__loop_signal(copy->world->loop);
}

static void on_copy_comm(tb__handshake *handshake) {
    tb_copy *copy = (tb_copy *)handshake;
    if (handshake->comm->has_failed)
        tb__copy_break(copy, tb__fail_within(handshake->comm->status, "%s", copy->what));
    tb__loop_signal(copy->world->loop);
}

static void on_copy_broken(tb__handshake *handshake, size_t at, tb_status status, const char *why) {
    (void)at;
    tb__copy_break((tb_copy *)handshake, tb__fail(status, "%s", why));
}

/* A peer that closes after a failure passes on its reason. One that timed out while opening may open again. */
static void on_copy_goodbye(tb__handshake *handshake, size_t at, tb__unpack *goodbye) {
    tb_copy *copy = (tb_copy *)handshake;
    bool had_agreed = tb__unpack_u32(goodbye) != 0;
    tb_status status = tb__unpack_status(goodbye);
    const char *why = tb__unpack_string(goodbye);
    if (goodbye->failed) {
        tb__copy_break(
            copy, tb__fail(TB_INVALID, "%s sent a truncated goodbye of %s", handshake->peers[at]->label, copy->what));
    } else if (status == TB_LOST) {
        drop_peer(copy, at, why);
    } else if (status != TB_OK) {
        tb__copy_break(copy, tb__fail(status, "%s", why));
    } else if (!had_agreed && !copy->has_agreed) {
        tb__handshake_forget(handshake, at);
        copy->peers[at].is_ready = false;
    } else if (copy->flow) {
        tb__copy_flow_gone(copy, at);
    }
    tb__loop_wake(copy->world->loop);
    tb__loop_signal(copy->world->loop);
}

/* ---- Opening --------------------------------------------------------------------------------------------------- */

typedef struct waiting {
    tb_world *world;
    const char *group;
    tb__roster roster;
    tb__peer **peers; /* by seat, once connected */
    tb_status status;
    bool is_complete;
    bool has_lost; /* a peer was lost, and may be connected again */
} waiting;

/* A seat whose process is lost for good counts as empty: another process may take it. */
static bool is_group_reachable(void *arg) {
    waiting *w = arg;
    tb__roster_fini(&w->roster);
    w->roster = (tb__roster){0};
    w->status = tb__directory_roster(w->world->directory, w->group, &w->roster);
    if (w->status != TB_OK)
        return true;
    w->is_complete = w->roster.size > 0 && w->roster.npresent == w->roster.size && !w->roster.sizes_differ;
    for (int32_t i = 0; w->is_complete && i < w->roster.size; i++) {
        const tb__member *m = &w->roster.member[i];
        const tb__peer *peer = tb__loop_find_peer(w->world->loop, m->rank, m->incarnation);
        w->is_complete = !peer || !peer->is_lost || tb__peer_can_reconnect(peer);
    }
    return w->is_complete;
}

static tb_status explain_group(const waiting *w, const char *what) {
    char missing[128];
    if (w->roster.size == 0)
        return tb__fail(TB_TIMEOUT, "%s: nobody is in group '%s'", what, w->group);
    if (tb__world_name_missing(&w->roster, missing, sizeof missing))
        return tb__fail(TB_TIMEOUT, "%s: group '%s' has %" PRId32 " of %" PRId32 " ranks; missing: %s", what, w->group,
                        w->roster.npresent, w->roster.size, missing);
    if (w->roster.sizes_differ)
        return tb__fail(TB_CONFLICT, "%s: the ranks of group '%s' disagree about its size", what, w->group);
    return tb__fail(TB_TIMEOUT, "%s: a rank of group '%s' is gone, and nobody has taken its seat", what, w->group);
}

/* Sets labels with this service's group: the loop labels a process by the first group it met it in. */
static tb_status set_labels(tb_copy *copy, const char *group, tb__peer *const *by_seat) {
    copy->position = tb__malloc((size_t)copy->size, sizeof *copy->position);
    copy->peers = tb__calloc(copy->handshake.npeers, sizeof *copy->peers);
    if (!copy->position || !copy->peers)
        return TB_NO_MEMORY;
    for (int32_t i = 0; i < copy->size; i++) {
        size_t at = tb__handshake_find(&copy->handshake, by_seat[i]);
        copy->position[i] = at;
        copy->peers[at].seat = i;
        copy->peers[at].label = tb__strdup(tb__label_of(by_seat[i]->rank, group, i).text);
        if (!copy->peers[at].label)
            return TB_NO_MEMORY;
    }
    copy->self = copy->position[copy->index];
    return TB_OK;
}

/* "copy service 'weights' over shm, ucx": the transports to the other ranks, each once. */
static void name_service(tb_copy *copy, const char *name, const waiting *w) {
    int at = snprintf(copy->what, sizeof copy->what, "copy service '%s'", name);
    const char *before = " over ";
    for (int32_t i = 0; w && i < w->roster.size && at < (int)sizeof copy->what; i++) {
        bool is_new = i != copy->index;
        for (int32_t j = 0; j < i; j++)
            is_new &= j == copy->index || w->peers[j]->transport != w->peers[i]->transport;
        if (is_new)
            at += snprintf(copy->what + at, sizeof copy->what - (size_t)at, "%s%s", before,
                           w->peers[i]->transport->ops->name);
        before = is_new ? ", " : before;
    }
}

static tb_status connect_peers(waiting *w) {
    free(w->peers); /* of the previous attempt */
    w->peers = tb__calloc((size_t)w->roster.size, sizeof *w->peers);
    tb_status status = w->peers ? TB_OK : TB_NO_MEMORY;
    for (int32_t i = 0; i < w->roster.size && status == TB_OK; i++) {
        status = tb__world_meet(w->world, w->group, &w->roster, i, &w->peers[i]);
        if (status == TB_OK)
            status = tb__peer_open(w->peers[i]); /* all ranks send to all */
    }
    return status;
}

/* Also true if a peer was lost, because another process may take its seat. */
static bool group_has_answered(void *arg) {
    waiting *w = arg;
    bool have_all = true;
    w->has_lost = false;
    for (int32_t i = 0; i < w->roster.size; i++) {
        w->has_lost |= w->peers[i]->is_lost;
        have_all &= tb__peer_is_reached(w->peers[i]);
    }
    return have_all || w->has_lost;
}

static bool never_true(void *arg) {
    (void)arg;
    return false;
}

/* Waits until all ranks of the group are present, connected, and have answered. */
static tb_status await_group(waiting *w, const char *what, int64_t deadline_ms) {
    tb__loop *loop = w->world->loop;
    for (;;) {
        tb__loop_wait(loop, is_group_reachable, w, deadline_ms);
        TB_TRY(w->status);
        if (!w->is_complete)
            return explain_group(w, what);
        TB_TRY(connect_peers(w));
        int64_t again_ms = tb__min64(tb__now_ms() + TB__CONNECT_AGAIN_MS, deadline_ms);
        if (tb__loop_wait(loop, group_has_answered, w, again_ms) && !w->has_lost)
            return TB_OK;
        if (tb__now_ms() >= deadline_ms)
            return w->has_lost ? explain_group(w, what)
                               : tb__fail(TB_TIMEOUT, "%s: a rank of group '%s' does not answer", what, w->group);
        tb__loop_wait(loop, never_true, NULL, again_ms);
    }
}

static tb_status begin_handshake(tb_copy *copy, const char *name, const waiting *w) {
    char key[2 * TB__DIRECTORY_MAX_NAME + 16];
    snprintf(key, sizeof key, "copy\n%s\n%s", name, w->group); /* names have no control characters */
    if (tb__handshake_exists(copy->world, key))
        return tb__fail(TB_CONFLICT, "there is a %s of group '%s' already", copy->what, w->group);
    copy->size = w->roster.size;
    name_service(copy, name, w);
    int *sides = tb__calloc((size_t)w->roster.size, sizeof *sides); /* one side: the first rank leads */
    if (!sides)
        return TB_NO_MEMORY;
    tb_status status =
        tb__handshake_init(&copy->handshake, copy->world, key, copy->what, w->peers, sides, (size_t)w->roster.size);
    free(sides);
    return status == TB_OK ? set_labels(copy, w->group, w->peers) : status;
}

static bool has_agreed_or_broken(void *arg) {
    const tb_copy *copy = arg;
    return (copy->has_agreed && !tb__handshake_awaits_comm(&copy->handshake)) || copy->broken != TB_OK;
}

static tb_status await_agreement(tb_copy *copy, int64_t deadline_ms) {
    tb__handshakes_wait(copy->world, has_agreed_or_broken, copy, deadline_ms);
    if (copy->broken != TB_OK)
        return tb__fail(copy->broken, "%s", copy->why);
    TB_TRY(tb__copy_find_loss(copy));
    size_t nhave, missing = tb__handshake_find_missing(&copy->handshake, &nhave);
    if (missing != TB__NOWHERE)
        return tb__fail(TB_TIMEOUT, "%s has not opened %s (%zu of %zu ranks have)", copy->peers[missing].label,
                        copy->what, nhave, copy->handshake.npeers);
    if (tb__handshake_awaits_comm(&copy->handshake))
        return tb__fail(TB_TIMEOUT, "%s has not connected the %zu ranks of %s",
                        copy->handshake.comm->transport->ops->name, copy->handshake.npeers, copy->what);
    return copy->has_agreed ? TB_OK
                            : tb__fail(TB_TIMEOUT, "all ranks have opened %s, but not all know it yet", copy->what);
}

/* With the lock held. */
static tb_status open_service(tb_copy *copy, const char *name, const char *group, int64_t deadline_ms) {
    waiting w = {.world = copy->world, .group = group};
    tb__loop_unlock(copy->world->loop);
    (void)tb__directory_follow_all(copy->world->directory, tb__ms_until(deadline_ms));
    tb__loop_lock(copy->world->loop);
    tb_status status = await_group(&w, copy->what, deadline_ms);
    if (status == TB_OK)
        status = begin_handshake(copy, name, &w);
    tb__roster_fini(&w.roster);
    free(w.peers);
    TB_TRY(status);
    TB_TRY(tb__handshake_announce(&copy->handshake));
    return await_agreement(copy, deadline_ms);
}

static tb_status read_opts(const tb_copy_opts *opts, tb_copy_opts *o) {
    TB_TRY(tb__opts_read(o, sizeof *o, opts));
    if (o->bucket_size < 0 || o->staging_bytes < 0 || o->timeout_ms < 0)
        return tb__fail(TB_INVALID, "bucket_size, staging_bytes and timeout_ms can't be negative");
    o->bucket_size = o->bucket_size ? o->bucket_size : 16 << 20;
    o->staging_bytes = o->staging_bytes ? o->staging_bytes : 256 << 20;
    o->max_in_flight = o->max_in_flight ? o->max_in_flight : 2;
    if (o->staging_bytes < TB__LEAST_STAGING)
        return tb__fail(TB_INVALID, "staging_bytes must be at least %d", TB__LEAST_STAGING);
    return TB_OK;
}

tb_status tb_copy_open(tb_world *world, const char *name, const char *group, const tb_copy_opts *opts, tb_copy **out) {
    tb_copy_opts o;
    TB_TRY(tb__world_check_local(world, "a copy service"));
    TB_TRY(tb__world_check(world, "world"));
    TB_TRY(read_opts(opts, &o));
    TB_TRY(tb__name_check("copy service", name));
    group = group ? group : world->memberships.item[0].group;
    const tb__membership *seat = tb__world_find_membership(world, group);
    if (!seat)
        return tb__fail(TB_INVALID, "this process is not in group '%.100s'", group);
    tb_copy *copy = tb__calloc(1, sizeof *copy);
    if (!copy)
        return TB_NO_MEMORY;
    tb__world_ref(world);
    copy->world = world;
    copy->opts = o;
    copy->index = seat->index;
    copy->handshake.port.message = on_copy_message;
    copy->handshake.port.lost = on_copy_peer_lost;
    copy->handshake.pack_manifest = pack_copy_manifest;
    copy->handshake.on_manifest = on_copy_manifest;
    copy->handshake.on_confirmed = on_copy_confirmed;
    copy->handshake.on_broken = on_copy_broken;
    copy->handshake.on_gone = on_copy_goodbye;
    copy->handshake.on_comm = on_copy_comm;
    copy->handshake.device = tb__comm_find_device(world->loop, &copy->handshake.unit);
    name_service(copy, name, NULL);
    copy->memory.invalidate = tb__copy_invalidate;
    tb__loop_lock(world->loop);
    tb__world_add_user(world, &copy->memory);
    tb_status status = open_service(copy, name, group, tb__world_deadline(world, o.timeout_ms));
    tb__loop_unlock(world->loop);
    if (status != TB_OK) {
        tb__saved_detail why = tb__save_detail();
        tb_copy_close(copy);
        return tb__fail(status, "%s", why.text);
    }
    tb__world_set_workers(world);
    *out = copy;
    return TB_OK;
}

/* ---- Closing --------------------------------------------------------------------------------------------------- */

static void leave_handshake(tb_copy *copy) {
    tb__pack goodbye = {0};
    tb__pack_u32(&goodbye, copy->has_agreed);
    tb_status status = copy->broken != TB_OK ? tb__fail(copy->broken, "%s", copy->why) : tb__copy_find_loss(copy);
    tb__pack_status(&goodbye, status);
    tb__pack_string(&goodbye, status != TB_OK ? tb_error_detail() : "");
    tb__handshake_leave(&copy->handshake, &goodbye);
    tb__pack_fini(&goodbye);
    tb__handshake_fini(&copy->handshake);
}

static void free_copy_members(tb_copy *copy, size_t npeers) {
    for (size_t i = 0; copy->peers && i < npeers; i++) {
        free(copy->peers[i].label);
        free(copy->peers[i].offer);
        free(copy->peers[i].lost_why);
    }
    tb__copy_drop_backlog(copy);
    free(copy->backlog.item);
    free(copy->peers);
    free(copy->position);
    free(copy->sends.ops.item);
    free(copy->recvs.ops.item);
    free(copy->views.item);
    free(copy->params.item);
}

void tb_copy_close(tb_copy *copy) {
    if (!copy)
        return;
    tb_world *world = copy->world;
    size_t npeers = copy->handshake.npeers;
    if (tb__world_is_inherited(world)) { /* in a forked child: the world keeps the rest */
        if (tb__world_was_unlocked(world))
            free_copy_members(copy, npeers);
        tb__world_unref(world);
        return;
    }
    tb__loop_lock(world->loop);
    tb__world_remove_user(world, &copy->memory);
    if (copy->handshake.world) /* the handshake was initialised */
        leave_handshake(copy);
    tb__loop_unlock(world->loop);
    free_copy_members(copy, npeers);
    free(copy);
    tb__world_unref(world);
}
