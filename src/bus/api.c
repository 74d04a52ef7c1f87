/* The public calls for worlds, pairs, batches and transfers: checks what every implementation asks of their arguments,
 * and calls the object's own. */
#include "base/opts.h"
#include "bus/client/link.h"
#include "bus/environment.h"
#include "bus/ops.h"
#include "bus/store/address.h"
#include "bus/world.h"

#include <inttypes.h>
#include <string.h>

static void lock_loop(void *loop) {
    tb__loop_lock(loop);
}

static void unlock_loop(void *loop) {
    tb__loop_unlock(loop);
}

static void wake_loop(void *loop) {
    tb__loop_signal(loop);
    tb__loop_wake(loop);
}

static void lock_link(void *link) {
    tb__link_lock(link);
}

static void unlock_link(void *link) {
    tb__link_unlock(link);
}

static void wake_link(void *link) {
    tb__link_wake(link);
}

/* TB_REFUSED in a forked child. `what` names the object. */
static tb_status check_owner(const void *object, const char *what) {
    return tb__owner_check(&((const tb__bus_object *)object)->owner, what, "join again");
}

/* The same, and takes the lock. */
static tb_status enter(const void *object, const char *what) {
    TB_TRY(check_owner(object, what));
    tb__ops_of(object)->lock(((const tb__bus_object *)object)->guard);
    return TB_OK;
}

static tb_status leave(const void *object, tb_status status) {
    tb__ops_of(object)->unlock(((const tb__bus_object *)object)->guard);
    return status;
}

tb_status tb_world_join(const char *url, const char *group, int32_t index, int32_t size, const tb_world_opts *opts,
                        tb_world **out) {
    static const char agent[] = "agent:";
    tb_world_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    tb__joining j = {.url = url, .group = group, .index = index, .size = size, .token = o.token};
    if (url && strncmp(url, agent, sizeof agent - 1) == 0)
        j.agent = url + sizeof agent - 1;
    TB_TRY(tb__joining_read(&j));
    o.token = j.token;
    if (j.agent)
        return tb__agent_world_join(j.agent, j.group, j.index, j.size, &o, out);
    return tb__world_create(j.url, j.group, j.index, j.size, tb__store_url_is_local(j.url), &o, out);
}

tb_status tb_world_enter(tb_world *world, const char *group, int32_t index, int32_t size) {
    TB_TRY(check_owner(world, "world"));
    TB_TRY(tb__name_check("group", group));
    return tb__ops_of(world)->world_enter(world, group, index, size);
}

void tb_world_destroy(tb_world *world) {
    if (world)
        tb__ops_of(world)->world_destroy(world);
}

void tb_world_seat(const tb_world *world, const char **group, int32_t *index, int32_t *size) {
    tb__ops_of(world)->world_seat(world, group, index, size);
}

int32_t tb_world_rank(const tb_world *world) {
    return tb__ops_of(world)->world_rank(world);
}

uint64_t tb_world_incarnation(const tb_world *world) {
    return tb__ops_of(world)->world_incarnation(world);
}

tb_status tb_world_wait(tb_world *world, const char *group, int timeout_ms) {
    TB_TRY(check_owner(world, "world"));
    TB_TRY(tb__name_check("group", group));
    return tb__ops_of(world)->world_wait(world, group, timeout_ms);
}

tb_status tb_world_groups(tb_world *world, int timeout_ms, char **out) {
    TB_TRY(check_owner(world, "world"));
    return tb__ops_of(world)->world_groups(world, timeout_ms, out);
}

int tb_world_fd(const tb_world *world) {
    return check_owner(world, "world") == TB_OK ? tb__ops_of(world)->world_fd(world) : -1;
}

tb_status tb_world_progress(tb_world *world) {
    TB_TRY(check_owner(world, "world"));
    return tb__ops_of(world)->world_progress(world);
}

tb_status tb_world_invalidate(tb_world *world, const void *base, size_t nbytes) {
    TB_TRY(check_owner(world, "world"));
    return tb__ops_of(world)->world_invalidate(world, base, nbytes);
}

static tb__plans_state get_plans(const tb_world *world) {
    tb__plans_state state = {0};
    if (check_owner(world, "world") == TB_OK)
        tb__ops_of(world)->world_plans(world, &state);
    return state;
}

void tb_world_plan_counters(const tb_world *world, uint64_t *hits, uint64_t *misses) {
    tb__plans_state state = get_plans(world);
    *hits = state.hits;
    *misses = state.misses;
}

uint64_t tb_world_plan_bytes(const tb_world *world) {
    return get_plans(world).nbytes;
}

tb_status tb_pair_create(tb_world *world, const char *name, const char *remote_group, const char *layout,
                         const tb_pair_opts *opts, tb_pair **out) {
    TB_TRY(check_owner(world, "world"));
    return tb__ops_of(world)->pair_create(world, name, remote_group, layout, opts, NULL, out);
}

void tb_pair_destroy(tb_pair *pair) {
    if (pair)
        tb__ops_of(pair)->pair_destroy(pair);
}

static tb_status check_same_kind(const void *object, const tb_pair *pair) {
    return tb__ops_of(object) == tb__ops_of(pair) ? TB_OK : tb__fail(TB_INVALID, "the pair is of another world");
}

/* Matching empty lists checks only the options. */
static tb_status check_matching(const tb_batch_opts *o) {
    for (size_t i = 0; i < o->nties; i++) {
        if (!o->ties[i].name || !o->ties[i].canonical)
            return tb__fail(TB_INVALID, "tie %zu lacks a name", i);
    }
    for (size_t i = 0; i < o->nignored; i++) {
        if (!o->ignored[i])
            return tb__fail(TB_INVALID, "pattern %zu of what is ignored is NULL", i);
    }
    tb_match_opts opts = {
        .size = sizeof opts, .ties = o->ties, .nties = o->nties, .ignored = o->ignored, .nignored = o->nignored};
    tb_match match = {.size = sizeof match};
    TB_TRY(tb_match_names(NULL, 0, NULL, 0, &opts, &match));
    tb_match_fini(&match);
    return TB_OK;
}

tb_status tb_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out) {
    tb_batch_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(tb__name_check("batch", name));
    if (o.bucket_size < 0 || o.staging_bytes < 0)
        return tb__fail(TB_INVALID, "bucket_size and staging_bytes can't be negative");
    o.bucket_size = o.bucket_size ? o.bucket_size : 16 << 20;
    o.staging_bytes = o.staging_bytes ? o.staging_bytes : 256 << 20;
    if (o.staging_bytes < TB__LEAST_STAGING)
        return tb__fail(TB_INVALID, "staging_bytes must be at least %d", TB__LEAST_STAGING);
    if ((unsigned)o.commit > TB_SHADOW)
        return tb__fail(TB_INVALID, "commit is %d, which is neither TB_IN_PLACE nor TB_SHADOW", (int)o.commit);
    TB_TRY(check_matching(&o));
    TB_TRY(check_owner(world, "world"));
    return tb__ops_of(world)->batch_create(world, name, &o, out);
}

tb_status tb_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor) {
    tb_tensor t;
    TB_TRY(check_owner(batch, "batch"));
    if (!name || !*name)
        return tb__fail(TB_INVALID, "a tensor needs a name");
    tb_status status = check_same_kind(batch, pair);
    if (status == TB_OK)
        status = tb__struct_read(&t, sizeof t, tensor, 0, "a tb_tensor");
    return status == TB_OK ? tb__ops_of(batch)->batch_add(batch, pair, name, &t)
                           : tb__fail_within(status, "tensor '%.100s'", name);
}

tb_status tb_batch_add_all(tb_batch *batch, tb_pair *pair, const char *const *names, const tb_tensor *tensors,
                           size_t count, size_t *nadded) {
    tb_status status = TB_OK;
    size_t n = 0;
    while (n < count && status == TB_OK) { /* in an array all have the size of the first */
        const void *tensor = (const char *)tensors + n * tensors->size;
        status = tb_batch_add(batch, pair, names[n], tensor);
        n += status == TB_OK;
    }
    if (nadded)
        *nadded = n;
    return status;
}

tb_status tb_batch_add_pair(tb_batch *batch, tb_pair *pair) {
    TB_TRY(check_same_kind(batch, pair));
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_add_pair(batch, pair));
}

tb_status tb_batch_register(tb_batch *batch, int timeout_ms) {
    TB_TRY(check_owner(batch, "batch"));
    return tb__ops_of(batch)->batch_register(batch, timeout_ms, NULL);
}

tb_status tb_batch_dump(tb_batch *batch, bool is_send, char **out) {
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_dump(batch, is_send, out));
}

tb_status tb_batch_ir(tb_batch *batch, bool is_send, tb_ir **out) {
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_ir(batch, is_send, out));
}

tb_status tb_batch_remove_pair(tb_batch *batch, tb_pair *pair) {
    TB_TRY(check_same_kind(batch, pair));
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_remove_pair(batch, pair));
}

tb_status tb_batch_rebind(tb_batch *batch, const tb_rebinding *tensors, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!tensors[i].name)
            return tb__fail(TB_INVALID, "the name of tensor %zu is missing", i);
        TB_TRY(check_same_kind(batch, tensors[i].pair));
    }
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_rebind(batch, tensors, count));
}

uint64_t tb_batch_epoch(tb_batch *batch) {
    if (enter(batch, "batch") != TB_OK)
        return 0;
    uint64_t epoch = tb__ops_of(batch)->batch_epoch(batch);
    (void)leave(batch, TB_OK);
    return epoch;
}

tb_status tb_batch_version(tb_batch *batch, const tb_pair *pair, uint64_t *version, bool *is_torn) {
    TB_TRY(check_same_kind(batch, pair));
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_version(batch, pair, version, is_torn));
}

tb_status tb_batch_query(tb_batch *batch, tb_batch_state *out) {
    tb_batch_state state;
    TB_TRY(tb__struct_check(out, "a tb_batch_state"));
    TB_TRY(enter(batch, "batch"));
    TB_TRY(leave(batch, tb__ops_of(batch)->batch_query(batch, &state)));
    return tb__struct_write(out, &state, sizeof state, "a tb_batch_state");
}

tb_status tb_batch_signal(tb_batch *batch, const char *group, uint64_t question, int timeout_ms, bool *out) {
    TB_TRY(check_owner(batch, "batch"));
    if (question == 0)
        return tb__fail(TB_INVALID, "questions are numbered from 1");
    return tb__ops_of(batch)->batch_signal(batch, group, question, timeout_ms, out);
}

tb_status tb__batch_roles(tb_batch *batch, const char *from, bool *sends, bool *receives, const char **to) {
    TB_TRY(enter(batch, "batch"));
    return leave(batch, tb__ops_of(batch)->batch_roles(batch, from, sends, receives, to));
}

void tb_batch_destroy(tb_batch *batch) {
    if (batch)
        tb__ops_of(batch)->batch_destroy(batch);
}

static tb_status begin_transfer(tb_batch *batch, bool is_send, const tb_transfer_opts *opts, tb_transfer **out) {
    tb_transfer_opts o;
    TB_TRY(check_owner(batch, "batch"));
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    if (o.timeout_ms < 0)
        return tb__fail(TB_INVALID, "timeout_ms can't be negative");
    return tb__ops_of(batch)->begin(batch, is_send, &o, out);
}

tb_status tb_send(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out) {
    return begin_transfer(batch, true, opts, out);
}

tb_status tb_recv(tb_batch *batch, const tb_transfer_opts *opts, tb_transfer **out) {
    return begin_transfer(batch, false, opts, out);
}

tb_status tb__event_check(tb_event event, bool is_send, bool hold, const char **what) {
    static const struct {
        tb_event event;
        const char *what;
        bool of_send, of_recv;
    } events[] = {{TB_RELEASED, "been released", true, false},
                  {TB_ARRIVED, "arrived", false, true},
                  {TB_COMMITTED, "been committed", true, true},
                  {TB_DECIDED, "been decided", false, true}};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (events[i].event != event)
            continue;
        if (event == TB_DECIDED && !hold)
            return tb__fail(TB_INVALID, "the transfer was not begun with hold");
        if (is_send ? !events[i].of_send : !events[i].of_recv)
            return tb__fail(TB_INVALID, "%s",
                            is_send ? "what is sent is released, and does not arrive here"
                                    : "what is received arrives, and is not released");
        *what = events[i].what;
        return TB_OK;
    }
    return tb__fail(TB_INVALID, "%d is not an event", (int)event);
}

tb_status tb_wait(tb_transfer *transfer, tb_event event, int timeout_ms) {
    TB_TRY(enter(transfer, "transfer"));
    return leave(transfer, tb__ops_of(transfer)->wait(transfer, event, timeout_ms));
}

tb_status tb_stream_wait(tb_transfer *transfer, tb_event event, const void *stream) {
    TB_TRY(check_owner(transfer, "transfer"));
    if (!stream)
        return tb__fail(TB_INVALID, "stream is NULL; it points to a handle");
    return tb__ops_of(transfer)->stream_wait(transfer, event, stream);
}

tb_status tb_proceed(tb_transfer *transfer) {
    TB_TRY(enter(transfer, "transfer"));
    return leave(transfer, tb__ops_of(transfer)->proceed(transfer));
}

tb_status tb_wait_group(tb_transfer *transfer, uint32_t group, int timeout_ms) {
    if (group == UINT32_MAX)
        return tb__fail(TB_INVALID, "groups go up to %" PRIu32, UINT32_MAX - 1);
    TB_TRY(enter(transfer, "transfer"));
    return leave(transfer, tb__ops_of(transfer)->wait_group(transfer, group, timeout_ms));
}

tb_status tb_transfer_query(const tb_transfer *transfer, tb_transfer_state *out) {
    tb_transfer_state state;
    TB_TRY(tb__struct_check(out, "a tb_transfer_state"));
    TB_TRY(enter(transfer, "transfer"));
    TB_TRY(leave(transfer, tb__ops_of(transfer)->transfer_query(transfer, &state)));
    return tb__struct_write(out, &state, sizeof state, "a tb_transfer_state");
}

tb_status tb_transfer_pair(const tb_transfer *transfer, const tb_pair *pair, tb_transfer_state *out) {
    tb_transfer_state state;
    TB_TRY(tb__struct_check(out, "a tb_transfer_state"));
    TB_TRY(check_same_kind(transfer, pair));
    TB_TRY(enter(transfer, "transfer"));
    TB_TRY(leave(transfer, tb__ops_of(transfer)->transfer_pair(transfer, pair, &state)));
    return tb__struct_write(out, &state, sizeof state, "a tb_transfer_state");
}

int tb_transfer_fd(const tb_transfer *transfer) {
    return check_owner(transfer, "transfer") == TB_OK ? tb__ops_of(transfer)->transfer_fd(transfer) : -1;
}

void tb_cancel(tb_transfer *transfer) {
    if (enter(transfer, "transfer") != TB_OK)
        return;
    tb__ops_of(transfer)->cancel(transfer);
    (void)leave(transfer, TB_OK);
}

void tb_transfer_destroy(tb_transfer *transfer) {
    if (transfer)
        tb__ops_of(transfer)->transfer_destroy(transfer);
}

#define LOCAL(type, name, parameters)  .name = tb__local_##name,
#define REMOTE(type, name, parameters) .name = tb__remote_##name,
const tb__bus_ops tb__local_ops = {.lock = lock_loop, .unlock = unlock_loop, .wake = wake_loop, TB__BUS_OPS(LOCAL)};
const tb__bus_ops tb__remote_ops = {.lock = lock_link, .unlock = unlock_link, .wake = wake_link, TB__BUS_OPS(REMOTE)};
