/* Worlds and pairs of a process whose seat an agent has. */
#include "bus/client/remote.h"

#include "base/descriptors.h"
#include "base/opts.h"
#include "bus/world.h"

#include <inttypes.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_MS = 30000, FOREVER_MS = INT32_MAX };

bool tb__remote_is_inherited(const remote_world *w) {
    return tb__is_inherited(&w->link->owner);
}

bool tb__remote_is_half_changed(const remote_world *w) {
    return tb__remote_is_inherited(w) && w->link->is_locked;
}

int tb__remote_timeout(const remote_world *w, int timeout_ms) {
    return timeout_ms > 0 ? timeout_ms : w->timeout_ms;
}

static const remote_seat *find_seat(const remote_world *w, const char *group) {
    for (size_t i = 0; i < w->seats.count; i++) {
        if (strcmp(w->seats.item[i].group, group) == 0)
            return &w->seats.item[i];
    }
    return NULL;
}

static tb_status add_seat(remote_world *w, const char *group, int32_t index, int32_t size) {
    remote_seat seat = {tb__strdup(group), index, size};
    if (seat.group && tb__vec_push(&w->seats, seat))
        return TB_OK;
    free(seat.group);
    return TB_NO_MEMORY;
}

static void free_world(remote_world *w) {
    if (tb__remote_is_half_changed(w))
        return;
    if (w->has_thread && !tb__remote_is_inherited(w)) {
        tb__link_lock(w->link);
        w->is_ending = true;
        tb__link_wake(w->link);
        tb__link_unlock(w->link);
        pthread_join(w->thread, NULL);
    }
    tb__remote_close_devices(w);
    if (!tb__remote_is_inherited(w))
        pthread_mutex_destroy(&w->device_lock);
    tb__link_close(w->link);
    for (size_t i = 0; i < w->seats.count; i++)
        free(w->seats.item[i].group);
    free(w->seats.item);
    free(w);
}

void tb__remote_unref(remote_world *w) {
    if (atomic_fetch_sub(&w->refs, 1) == 1)
        free_world(w);
}

void tb__remote_world_destroy(tb_world *world) {
    tb__remote_unref((remote_world *)world);
}

/* Without a group, or without a size, any seat of the agent's will do. */
static tb_status check_seat(const tb__link *l, const char *group, int32_t index, int32_t size) {
    bool is_same_group = !group || !*group || strcmp(group, l->group) == 0;
    bool is_same_seat = size == 0 || (size == l->size && (index == TB_NO_RANK || index == l->index));
    if (is_same_group && is_same_seat)
        return TB_OK;
    return tb__fail(TB_CONFLICT,
                    "the agent at %s has seat %" PRId32 " of %" PRId32 " in group '%s', not seat %" PRId32
                    " of %" PRId32 " in group '%.100s'",
                    l->path, l->index, l->size, l->group, index, size, is_same_group ? l->group : group);
}

tb_status tb__agent_world_join(const char *path, const char *group, int32_t index, int32_t size,
                               const tb_world_opts *opts, tb_world **out) {
    tb_world_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    if (o.manual)
        return tb__fail(TB_REFUSED, "a manual world needs a process that is on the bus itself; an agent makes progress "
                                    "by itself");
    remote_world *w = tb__calloc(1, sizeof *w);
    if (!w)
        return TB_NO_MEMORY;
    w->base.ops = &tb__remote_ops;
    w->timeout_ms = o.timeout_ms ? o.timeout_ms : DEFAULT_TIMEOUT_MS;
    atomic_init(&w->refs, 1);
    tb__link_opts link = {.timeout_ms = w->timeout_ms,
                          .token = o.token,
                          .name = o.name,
                          .is_awaited = true,
                          .on_event = tb__remote_on_event,
                          .arg = w};
    tb_status status = tb__link_open(path, &link, &w->link);
    if (status != TB_OK) {
        free(w);
        return status;
    }
    w->base.owner = w->link->owner;
    w->base.guard = w->link;
    pthread_mutex_init(&w->device_lock, NULL);
    status = check_seat(w->link, group, index, size);
    if (status == TB_OK)
        status = add_seat(w, w->link->group, w->link->index, w->link->size);
    if (status != TB_OK) {
        tb__remote_unref(w);
        return status;
    }
    *out = (tb_world *)w;
    return TB_OK;
}

static void *read_main(void *arg) {
    remote_world *w = arg;
    tb__link_lock(w->link);
    while (!w->is_ending) {
        if (w->link->is_over)
            tb__remote_note_loss(w);
        tb__remote_call_user(w);
        if (!w->is_ending)
            tb__link_step(w->link);
    }
    tb__link_unlock(w->link);
    return NULL;
}

tb_status tb__remote_start_thread(remote_world *w) {
    if (w->has_thread)
        return TB_OK;
    TB_TRY(tb__link_watch_wake(w->link));
    TB_TRY(tb__start_thread(&w->thread, "tb-agent", read_main, w));
    w->has_thread = true;
    return TB_OK;
}

static tb_status call(remote_world *w, tb__message *message, int timeout_ms, const char *what, tb__link_reply **out) {
    tb__link_lock(w->link);
    tb_status status = tb__link_call(w->link, message, NULL, 0, timeout_ms, what, out);
    tb__link_unlock(w->link);
    return status;
}

tb_status tb__remote_world_enter(tb_world *world, const char *group, int32_t index, int32_t size) {
    remote_world *w = (remote_world *)world;
    if (index < 0 || size < 1 || index >= size)
        return tb__fail(TB_INVALID, "seat %" PRId32 " of %" PRId32 " in group '%.100s' does not exist", index, size,
                        group);
    tb__message m = {.kind = TB__ENTER, .group_name = group, .seat = (uint64_t)index, .seats = (uint64_t)size};
    TB_TRY(call(w, &m, w->timeout_ms, "entered the group", NULL));
    tb__link_lock(w->link);
    tb_status status = find_seat(w, group) ? TB_OK : add_seat(w, group, index, size);
    tb__link_unlock(w->link);
    return status;
}

void tb__remote_world_seat(const tb_world *world, const char **group, int32_t *index, int32_t *size) {
    const tb__link *l = ((const remote_world *)world)->link;
    *group = l->group;
    *index = l->index;
    *size = l->size;
}

int32_t tb__remote_world_rank(const tb_world *world) {
    return ((const remote_world *)world)->link->rank;
}

uint64_t tb__remote_world_incarnation(const tb_world *world) {
    return ((const remote_world *)world)->link->incarnation;
}

tb_status tb__remote_world_wait(tb_world *world, const char *group, int timeout_ms) {
    remote_world *w = (remote_world *)world;
    tb__message m = {.kind = TB__AWAIT_MEMBERS, .group_name = group};
    return call(w, &m, tb__remote_timeout(w, timeout_ms), "seen all of the group", NULL);
}

tb_status tb__remote_world_groups(tb_world *world, int timeout_ms, char **out) {
    remote_world *w = (remote_world *)world;
    tb__message m = {.kind = TB__LIST_GROUPS};
    tb__link_reply *reply = NULL;
    tb__text text = {0};
    tb_status status = call(w, &m, tb__remote_timeout(w, timeout_ms), "listed the groups", &reply);
    if (status == TB_OK)
        tb__text_add(&text, "%.*s", (int)reply->message.report.nbytes, (const char *)reply->message.report.data);
    tb__link_reply_free(reply);
    return status == TB_OK ? tb__text_take(&text, out) : status;
}

int tb__remote_world_fd(const tb_world *world) {
    (void)world;
    return -1; /* it is not manual */
}

tb_status tb__remote_world_progress(tb_world *world) {
    (void)world;
    return TB_OK;
}

/* The agent invalidates memory that it uses; memory that is copied here must not be in use. */
tb_status tb__remote_world_invalidate(tb_world *world, const void *base, size_t nbytes) {
    remote_world *w = (remote_world *)world;
    uintptr_t first = (uintptr_t)base, last;
    if (__builtin_add_overflow(first, nbytes, &last))
        return tb__fail(TB_INVALID, "%zu bytes at %p run past the last address", nbytes, base);
    tb__message m = {.kind = TB__INVALIDATE, .address = first, .nbytes = nbytes};
    tb_status status = TB_OK;
    tb__link_lock(w->link);
    bool is_used = tb__remote_mark_invalidated(w, first, last);
    if (is_used && !w->link->is_over) {
        status = tb__link_call(w->link, &m, NULL, 0, w->timeout_ms, "given the memory up", NULL);
        if (status == TB_OK)
            tb__remote_note_invalidated(w);
        if (status == TB_LOST && !w->link->is_over)
            status = tb__fail(TB_TIMEOUT, "%zu bytes at %p may still be in use by the agent at %s", nbytes, base,
                              w->link->path);
        if (status == TB_LOST)
            status = TB_OK; /* it does not use the memory any more */
    }
    tb__link_unlock(w->link);
    if (status != TB_OK)
        return status;
    int64_t until_ms = tb__now_ms() + w->timeout_ms;
    while (pthread_mutex_trylock(&w->device_lock) != 0) {
        if (tb__now_ms() >= until_ms)
            return tb__fail(TB_TIMEOUT, "%zu bytes at %p are still being copied to or from a device", nbytes, base);
        tb__sleep_ms(1); /* ThreadSanitizer does not know pthread_mutex_clocklock */
    }
    pthread_mutex_unlock(&w->device_lock);
    return TB_OK;
}

void tb__remote_world_plans(const tb_world *world, tb__plans_state *out) {
    tb__message m = {.kind = TB__INSPECT};
    tb__link_reply *reply = NULL;
    if (call((remote_world *)(uintptr_t)world, &m, 0, "said what it does", &reply) == TB_OK)
        *out = (tb__plans_state){.hits = reply->message.plan_hits.value,
                                 .misses = reply->message.plan_misses.value,
                                 .nbytes = reply->message.plan_bytes.value};
    tb__link_reply_free(reply);
}

static void free_pair(remote_pair *p) {
    tb_layout_destroy(p->layout);
    free(p->name);
    free(p->remote);
    free(p->group);
    free(p);
}

void tb__remote_pair_unref(remote_pair *p) {
    if (--p->refs == 0)
        free_pair(p);
}

/* Outputs must be freed also if it fails. */
static tb_status encode_layout(const tb_layout *layout, tb__bytes *mesh, tb__bytes *placements) {
    TB_TRY(tb__mesh_encode(layout, mesh));
    return tb__placements_encode(layout, placements);
}

/* A pair made with no_wait has no deadline; the batch that uses it has one. */
static tb_status init_pair(remote_pair *p, int timeout_ms, bool no_wait) {
    remote_world *w = p->world;
    tb__bytes mesh = {0}, placements = {0};
    tb_status status = p->has_layout ? encode_layout(p->layout, &mesh, &placements) : TB_OK;
    if (status == TB_OK) {
        tb__message m = {.kind = TB__INIT_PAIR,
                         .pair_name = p->name,
                         .local_name = p->group,
                         .expected_world_size = (uint64_t)p->size,
                         .remote_name = p->remote,
                         .mesh = {mesh.item, mesh.count},
                         .placements = {placements.item, placements.count},
                         .timeout_ms = FOREVER_MS};
        status = no_wait ? tb__link_post(w->link, &m, NULL, 0, tb__now_ms() + timeout_ms, &p->seq)
                         : tb__link_call(w->link, &m, NULL, 0, timeout_ms, "made the pair", NULL);
    }
    p->is_awaited = no_wait && status == TB_OK;
    free(mesh.item);
    free(placements.item);
    return status;
}

static tb_status new_pair(remote_world *w, const char *name, const char *group, const char *remote, const char *layout,
                          remote_pair **out) {
    const remote_seat *seat = group ? find_seat(w, group) : &w->seats.item[0];
    if (!seat)
        return tb__fail(TB_INVALID, "this process is not in group '%.100s'", group);
    if (strcmp(seat->group, remote) == 0)
        return tb__fail(TB_INVALID, "a pair has two groups; '%s' can't be both of them", remote);
    for (const remote_pair *p = LIST_FIRST(&w->pairs); p; p = LIST_NEXT(p, link)) {
        if (strcmp(p->name, name) == 0 && strcmp(p->group, seat->group) == 0)
            return tb__fail(TB_CONFLICT, "this process has made pair '%s' as group '%s' already", name, seat->group);
    }
    remote_pair *p = tb__calloc(1, sizeof *p);
    if (!p)
        return TB_NO_MEMORY;
    *p = (remote_pair){.base = w->base, .world = w, .refs = 1, .index = seat->index, .size = seat->size};
    p->has_layout = layout;
    p->name = tb__strdup(name);
    p->remote = tb__strdup(remote);
    p->group = tb__strdup(seat->group);
    tb_status status = p->name && p->remote && p->group
                           ? tb__pair_layout_parse(layout ? layout : TB__NO_LAYOUT, p->index, &p->layout)
                           : TB_NO_MEMORY;
    for (int32_t i = 0; status == TB_OK && i < tb_layout_nranks(p->layout); i++) {
        if (tb_layout_rank_at(p->layout, i) >= p->size)
            status = tb__fail(TB_INVALID, "the layout names rank %" PRId32 " of group '%s', which has %" PRId32,
                              tb_layout_rank_at(p->layout, i), p->group, p->size);
    }
    if (status == TB_OK)
        *out = p;
    else
        free_pair(p);
    return status;
}

tb_status tb__remote_begin_cancellable(remote_world *w, const atomic_bool *cancelled) {
    if (cancelled)
        TB_TRY(tb__link_watch_wake(w->link));
    tb__link_cancelled = cancelled;
    return TB_OK;
}

/* Keeps the error message of an earlier failure. */
static void clean_up_pair(const remote_pair *p) {
    tb__message m = {.kind = TB__CLEANUP_PAIR, .pair_name = p->name, .local_name = p->group};
    tb__saved_detail why = tb__save_detail();
    (void)tb__link_call(p->world->link, &m, NULL, 0, p->world->timeout_ms, "given the pair up", NULL);
    tb__set_detail("%s", why.text);
}

tb_status tb__remote_pair_create(tb_world *world, const char *name, const char *remote_group, const char *layout,
                                 const tb_pair_opts *opts, const atomic_bool *cancelled, tb_pair **out) {
    remote_world *w = (remote_world *)world;
    tb_pair_opts o;
    remote_pair *p;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(tb__name_check("pair", name));
    TB_TRY(tb__name_check("group", remote_group));
    tb__link_lock(w->link);
    tb_status status = new_pair(w, name, o.group, remote_group, layout, &p);
    if (status == TB_OK) {
        LIST_INSERT_HEAD(&w->pairs, p, link);
        status = tb__remote_begin_cancellable(w, cancelled);
        if (status == TB_OK)
            status = init_pair(p, tb__remote_timeout(w, o.timeout_ms), o.no_wait);
        tb__link_cancelled = NULL;
        if (status == TB_CANCELLED)
            clean_up_pair(p);
        if (status != TB_OK) {
            LIST_REMOVE(p, link);
            free_pair(p);
        }
    }
    tb__link_unlock(w->link);
    if (status != TB_OK)
        return status;
    atomic_fetch_add(&w->refs, 1);
    *out = (tb_pair *)p;
    return TB_OK;
}

/* The agent names the missing ranks when a request for the pair reaches its deadline. */
static tb_status init_named(remote_pair *p) {
    uint64_t seq = p->seq;
    tb_status status = init_pair(p, 1, false);
    p->seq = seq;
    p->is_awaited = true;
    return status;
}

tb_status tb__remote_await_pair(remote_pair *p, int64_t deadline_ms) {
    tb__link_reply *reply;
    if (!p->is_awaited)
        return TB_OK;
    tb_status status = tb__link_await_reply(p->world->link, p->seq, deadline_ms, "made the pair", &reply);
    if (!reply && status == TB_TIMEOUT) /* the first request goes on */
        return init_named(p);
    p->is_awaited = !reply;
    tb__link_reply_free(reply);
    return status;
}

void tb__remote_pair_destroy(tb_pair *pair) {
    remote_pair *p = (remote_pair *)pair;
    remote_world *w = p->world;
    if (tb__remote_is_inherited(w)) {
        if (!tb__remote_is_half_changed(w))
            tb__remote_pair_unref(p);
    } else {
        tb__link_lock(w->link);
        if (p->is_awaited)
            tb__link_drop_reply(w->link, p->seq);
        p->is_awaited = false;
        LIST_REMOVE(p, link);
        clean_up_pair(p);
        tb__remote_pair_unref(p);
        tb__link_unlock(w->link);
    }
    tb__remote_unref(w);
}
