/* Joins the bus, enters groups, leaves. */
#include "bus/world.h"

#include "base/opts.h"
#include "base/process.h"
#include "bus/environment.h"
#include "bus/store/address.h"
#include "device/host/workers.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 30000, DEFAULT_PLAN_BYTES = 64 << 20 };

tb_status tb__world_check_memory(const tb_world *world, const char *device, const void *address, size_t nbytes) {
    if (nbytes == 0)
        return TB_OK;
    tb__memory memory;
    tb__device *found = tb__loop_find_memory(world->loop, address, nbytes, &memory); /* notes that it is used */
    const char *unit = tb__device_unit_name(found, memory.index);
    if (device && strcmp(found->ops->name, device) != 0 && strcmp(unit, device) != 0)
        return tb__fail(TB_REFUSED, "its memory is said to be on device '%.40s', but is on device '%s'", device, unit);
    return TB_OK;
}

tb_status tb__world_check_local(const tb_world *world, const char *what) {
    return world->base.ops == &tb__local_ops
               ? TB_OK
               : tb__fail(TB_REFUSED, "%s needs a process that is on the bus itself; this world has an agent's seat",
                          what);
}

tb_status tb__world_check(const tb_world *world, const char *what) {
    return tb__owner_check(&world->base.owner, what, "join again");
}

bool tb__world_is_inherited(const tb_world *world) {
    return tb__is_inherited(&world->base.owner);
}

bool tb__world_was_unlocked(const tb_world *world) {
    return tb__loop_was_unlocked(world->loop);
}

int64_t tb__world_deadline(const tb_world *world, int timeout_ms) {
    return tb__now_ms() + (timeout_ms > 0 ? timeout_ms : world->timeout_ms);
}

const tb__membership *tb__world_find_membership(const tb_world *world, const char *group) {
    for (size_t i = 0; i < world->memberships.count; i++) {
        if (strcmp(world->memberships.item[i].group, group) == 0)
            return &world->memberships.item[i];
    }
    return NULL;
}

static bool add_membership(tb_world *world, const char *group, int32_t index, int32_t size) {
    if (!tb__vec_reserve(&world->memberships, 1))
        return false;
    tb__membership *seat = &world->memberships.item[world->memberships.count];
    *seat = (tb__membership){tb__strdup(group), index, size};
    world->memberships.count += seat->group != NULL;
    return seat->group != NULL;
}

void tb__world_wake_waiters(tb_world *world) {
    tb__loop_lock(world->loop);
    tb__loop_signal(world->loop);
    tb__loop_wake(world->loop);
    tb__loop_unlock(world->loop);
}

/* In the directory's thread. */
static void on_directory_change(void *arg) {
    tb_world *world = arg;
    if (!atomic_load(&world->is_ready))
        return;
    tb__world_wake_waiters(world); /* first: hints may wait for the store */
    tb__pairs_hint(world);
}

static void on_world_peer_lost(tb__port *port, tb__peer *peer) {
    tb_world *world = (tb_world *)((char *)port - offsetof(tb_world, port));
    tb__handshake_on_lost(world, peer);
    if (!tb__loop_has_unreported_losses(world->loop)) /* the last of those that were noticed together */
        tb__losses_tell_all(world);
}

static tb_status announce_world(tb_world *world, int64_t deadline_ms) {
    tb__pack contact = {0};
    TB_TRY(tb__loop_contact(world->loop, &contact));
    tb_status status = tb__directory_announce(world->directory, contact.data, contact.count, tb__ms_until(deadline_ms));
    tb__pack_fini(&contact);
    return status;
}

static tb_status join_bus(tb_world *world, const char *url, const char *group, int32_t index, int32_t size,
                          bool is_local, const tb_world_opts *o) {
    tb__directory_opts directory = {.token = o->token,
                                    .timeout_ms = world->timeout_ms,
                                    .changed = on_directory_change,
                                    .arg = world,
                                    .only_hints = true,
                                    .is_lead = tb__pair_is_request,
                                    .report = tb__world_add_report};
    int64_t deadline_ms = tb__world_deadline(world, 0);
    world->plans.limit = o->plan_bytes ? (size_t)o->plan_bytes : DEFAULT_PLAN_BYTES;
    TB_TRY(tb_plan_cache_create(&world->cache));
    TB_TRY(tb__directory_open(url, group, index, size, &directory, &world->directory));
    if (!add_membership(world, group, index, size))
        return TB_NO_MEMORY;
    world->rank = tb__directory_rank(world->directory);
    world->incarnation = tb__directory_incarnation(world->directory);
    tb__loop_opts loop = {.rank = world->rank,
                          .incarnation = world->incarnation,
                          .token = o->token,
                          .transport = o->transport,
                          .host = o->host,
                          .is_local = is_local,
                          .manual = o->manual};
    TB_TRY(tb__loop_create(&loop, &world->loop));
    world->base.guard = world->loop;
    atomic_store(&world->is_ready, true);
    world->port.message = tb__handshake_on_message;
    world->port.lost = on_world_peer_lost;
    tb__loop_lock(world->loop);
    tb__loop_add_port(world->loop, &world->port);
    tb__loop_unlock(world->loop);
    TB_TRY(announce_world(world, deadline_ms));
    return tb__directory_check_members(world->directory, deadline_ms, tb__contact_check_version);
}

tb_status tb__world_create(const char *url, const char *group, int32_t index, int32_t size, bool is_local,
                           const tb_world_opts *opts, tb_world **out) {
    tb_world_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(tb__name_check("group", group));
    if (o.timeout_ms < 0 || o.workers < 0 || o.workers > TB__WORKERS_MAX)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative, and workers must be 0 to %d", TB__WORKERS_MAX);
    if (o.plan_bytes < 0)
        return tb__fail(TB_INVALID, "plan_bytes can't be negative");
    if (o.host && (!*o.host || strlen(o.host) >= TB__CONTACT_PREFIX))
        return tb__fail(TB_INVALID, "a host's id has 1 to %d bytes", TB__CONTACT_PREFIX - 1);
    TB_TRY(tb__environment_apply());
    tb_world *world = tb__calloc(1, sizeof *world);
    if (!world)
        return TB_NO_MEMORY;
    world->base.ops = &tb__local_ops;
    atomic_init(&world->refs, 1);
    tb__owner_init(&world->base.owner);
    world->timeout_ms = o.timeout_ms ? o.timeout_ms : DEFAULT_TIMEOUT_MS;
    world->workers = o.workers;
    tb_status status = join_bus(world, url, group, index, size, is_local, &o);
    if (status != TB_OK) {
        tb_world_destroy(world);
        return status;
    }
    *out = world;
    return TB_OK;
}

tb_status tb__local_world_enter(tb_world *world, const char *group, int32_t index, int32_t size) {
    TB_TRY(tb__directory_enter(world->directory, group, index, size));
    tb__loop_lock(world->loop);
    bool added = add_membership(world, group, index, size);
    tb__loop_unlock(world->loop);
    return added ? TB_OK : TB_NO_MEMORY;
}

void tb__world_ref(tb_world *world) {
    atomic_fetch_add(&world->refs, 1);
}

void tb__local_world_destroy(tb_world *world) {
    tb__world_unref(world);
}

/* Frees what the loop's lock guards. */
static void free_world_members(tb_world *world) {
    for (size_t i = 0; i < world->memberships.count; i++)
        free(world->memberships.item[i].group);
    free(world->memberships.item);
    for (size_t i = 0; i < world->early.count; i++)
        tb__early_manifest_fini(&world->early.item[i]);
    free(world->early.item);
    for (size_t i = 0; i < world->rounds.count; i++)
        free(world->rounds.item[i].pair);
    free(world->rounds.item);
    tb__plans_fini(&world->plans);
    tb_plan_cache_destroy(world->cache);
}

/* In a forked child. The world itself stays reachable, so that leak checkers do not report it. */
static void leave_to_parent(tb_world *world) {
    static _Atomic(tb_world *) kept;
    if (tb__world_was_unlocked(world))
        free_world_members(world);
    world->next = atomic_load(&kept);
    while (!atomic_compare_exchange_weak(&kept, &world->next, world))
        ;
}

void tb__world_unref(tb_world *world) {
    if (atomic_fetch_sub(&world->refs, 1) > 1)
        return;
    if (tb__world_is_inherited(world)) {
        leave_to_parent(world);
        return;
    }
    atomic_store(&world->is_ready, false);
    tb__commit_log_destroy(world->commit_log);
    /* The directory first: when peers notice the end of connections, the seats are empty. */
    tb__directory_close(world->directory);
    tb__loop_destroy(world->loop);
    free_world_members(world);
    if (world->at_end)
        world->at_end(world->at_end_arg);
    free(world);
}

void tb__world_at_end(tb_world *world, void (*at_end)(void *arg), void *arg) {
    world->at_end = at_end;
    world->at_end_arg = arg;
}

void tb__local_world_seat(const tb_world *world, const char **group, int32_t *index, int32_t *size) {
    const tb__membership *first = &world->memberships.item[0]; /* it stays */
    *group = first->group;
    *index = first->index;
    *size = first->size;
}

int32_t tb__local_world_rank(const tb_world *world) {
    return world->rank;
}

uint64_t tb__local_world_incarnation(const tb_world *world) {
    return world->incarnation;
}

int tb__local_world_fd(const tb_world *world) {
    return tb__loop_fd(world->loop);
}

tb_status tb__local_world_progress(tb_world *world) {
    tb__loop_progress(world->loop);
    return TB_OK;
}

tb__label tb__label_of(int32_t rank, const char *group, int32_t seat) {
    tb__label label;
    snprintf(label.text, sizeof label.text, "rank %" PRId32 " (%s %" PRId32 ")", rank, group, seat);
    return label;
}

tb_status tb__world_meet(const tb_world *world, const char *group, const tb__roster *roster, int32_t seat,
                         tb__peer **out) {
    const tb__member *m = &roster->member[seat];
    return tb__loop_meet(world->loop, m->rank, m->incarnation, m->contact, m->contact_nbytes,
                         tb__label_of(m->rank, group, seat).text, out);
}

bool tb__world_name_missing(const tb__roster *roster, char *out, size_t room) {
    enum { NAMED = 8 };
    size_t at = 0, missing = 0;
    out[0] = '\0';
    for (int32_t i = 0; i < roster->size; i++) {
        if (roster->member[i].rank != TB_NO_RANK)
            continue;
        if (missing < NAMED && at < room)
            at += (size_t)snprintf(out + at, room - at, "%s%" PRId32, missing ? ", " : "", i);
        missing++;
    }
    if (missing > NAMED && at < room)
        snprintf(out + at, room - at, " and %zu more", missing - NAMED);
    return missing > 0;
}

typedef struct waiting {
    tb_world *world;
    const char *group;
    tb_status status;
    bool is_complete;
} waiting;

static bool is_complete(void *arg) {
    waiting *w = arg;
    tb__roster roster;
    w->status = tb__directory_roster(w->world->directory, w->group, &roster);
    if (w->status != TB_OK)
        return true;
    w->is_complete = roster.size > 0 && roster.npresent == roster.size && !roster.sizes_differ;
    tb__roster_fini(&roster);
    return w->is_complete;
}

tb_status tb__local_world_wait(tb_world *world, const char *group, int timeout_ms) {
    waiting w = {.world = world, .group = group};
    (void)tb__directory_follow_all(world->directory, tb__ms_until(tb__world_deadline(world, timeout_ms)));
    tb__loop_lock(world->loop);
    tb__loop_wait(world->loop, is_complete, &w, tb__world_deadline(world, timeout_ms));
    tb__loop_unlock(world->loop);
    if (w.status != TB_OK || w.is_complete)
        return w.status;
    tb__roster roster;
    char missing[128];
    TB_TRY(tb__directory_roster(world->directory, group, &roster));
    bool is_missing = tb__world_name_missing(&roster, missing, sizeof missing);
    tb_status status;
    if (roster.size == 0)
        status = tb__fail(TB_TIMEOUT, "nobody has joined group '%s'", group);
    else if (is_missing)
        status = tb__fail(TB_TIMEOUT, "group '%s' has %" PRId32 " of %" PRId32 " ranks; missing: %s", group,
                          roster.npresent, roster.size, missing);
    else if (roster.sizes_differ)
        status = tb__fail(TB_CONFLICT, "the ranks of group '%s' disagree about its size", group);
    else
        status = TB_OK; /* the last one has come since the deadline */
    tb__roster_fini(&roster);
    return status;
}

tb_status tb__local_world_groups(tb_world *world, int timeout_ms, char **out) {
    tb__text text = {0};
    TB_TRY(tb__directory_follow_all(world->directory, tb__ms_until(tb__world_deadline(world, timeout_ms))));
    tb__directory_list_groups(world->directory, &text);
    return tb__text_take(&text, out);
}
