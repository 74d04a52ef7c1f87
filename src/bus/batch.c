/* Batches: adding tensors and pairs, registration, versions. */
#include "bus/exchange.h"

#include "base/opts.h"
#include "base/text.h"

#include <stdio.h>
#include <string.h>

tb_status tb__local_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out) {
    tb_batch_opts o = *opts;
    tb_transform transform = {0};
    if (o.transform)
        TB_TRY(tb__struct_read(&transform, sizeof transform, o.transform, 0, "a tb_transform"));
    tb_batch *batch = tb__calloc(1, sizeof *batch);
    if (!batch)
        return TB_NO_MEMORY;
    batch->base = world->base;
    batch->world = world;
    batch->transform = transform;
    batch->name = tb__strdup(name);
    tb__matching_pack(&batch->matching, &o);
    if (!batch->name || batch->matching.failed) {
        tb__pack_fini(&batch->matching);
        free(batch->name);
        free(batch);
        return TB_NO_MEMORY;
    }
    o.ties = NULL; /* owned by the caller */
    o.ignored = NULL;
    o.nties = o.nignored = 0;
    batch->opts = o;
    if (o.transform)
        batch->opts.transform = &batch->transform;
    batch->memory.invalidate = tb__batch_invalidate;
    atomic_init(&batch->refs, 1);
    tb__world_ref(world);
    tb__loop_lock(world->loop);
    tb__world_add_user(world, &batch->memory);
    tb__loop_unlock(world->loop);
    *out = batch;
    return TB_OK;
}

static tb__exchange *find_exchange(const tb_batch *batch, const tb_pair *pair) {
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        if (strcmp(batch->exchanges.item[i]->pair->name, pair->name) == 0)
            return batch->exchanges.item[i];
    }
    return NULL;
}

tb_status tb__batch_check_idle(const tb_batch *batch) {
    if (!batch->sending && !batch->receiving && batch->nstarting == 0)
        return TB_OK;
    return tb__fail(TB_REFUSED, "batch '%s' is being %s; destroy that transfer first", batch->name,
                    batch->receiving ? "received" : "sent");
}

/* With the lock held. */
static tb_status add_pair(tb_batch *batch, tb_pair *pair) {
    if (find_exchange(batch, pair))
        return tb__fail(TB_REFUSED, "batch '%s' has been registered; nothing can be added to it", batch->name);
    TB_TRY(tb__batch_check_idle(batch));
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (batch->pairs.item[i] == pair)
            return TB_OK;
    }
    if (!tb__vec_push(&batch->pairs, pair))
        return TB_NO_MEMORY;
    pair->refs++;
    return TB_OK;
}

tb_status tb__local_batch_add_pair(tb_batch *batch, tb_pair *pair) {
    if (pair->world != batch->world)
        return tb__fail(TB_INVALID, "pair '%s' is of another world", pair->name);
    return add_pair(batch, pair);
}

static void free_tensor(tb__added_tensor *t) {
    tb__added_tensor_fini(t);
    free(t);
}

tb_status tb__local_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor) {
    return tb__batch_add_mirrored(batch, pair, name, tensor, &(tb__mirrored){0});
}

tb_status tb__batch_add_mirrored(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor,
                                 const tb__mirrored *mirrored) {
    if (pair->world != batch->world)
        return tb__fail(TB_INVALID, "tensor '%.100s': the pair is of another world", name);
    tb__added_tensor *t = tb__malloc(1, sizeof *t);
    if (!t)
        return TB_NO_MEMORY;
    tb_status status = tb__added_tensor_init(t, pair, name, tensor, batch->opts.transform);
    if (status != TB_OK) {
        free(t);
        return tb__fail_within(status, "tensor '%.100s'", name);
    }
    t->mirrored = *mirrored;
    tb__loop_lock(batch->world->loop);
    status = add_pair(batch, pair);
    if (status == TB_OK && !tb__vec_push(&batch->tensors, t))
        status = TB_NO_MEMORY;
    tb__loop_unlock(batch->world->loop);
    if (status != TB_OK) {
        free_tensor(t);
        tb__prefix_detail("tensor '%.100s'", name);
    }
    return status;
}

/* Makes an exchange for each pair that has none, whichever of its sides this process is on. */
static tb_status make_exchanges(tb_batch *batch) {
    for (size_t i = 0; i < batch->pairs.count; i++) {
        tb_pair *pair = batch->pairs.item[i]; /* never NULL */
        if (!pair || find_exchange(batch, pair))
            continue;
        tb__exchange *exchange;
        if (!tb__vec_reserve(&batch->exchanges, 1))
            return TB_NO_MEMORY;
        TB_TRY(tb__exchange_create(batch, pair, &exchange));
        batch->exchanges.item[batch->exchanges.count++] = exchange;
    }
    if (batch->exchanges.count == 0)
        return tb__fail(TB_INVALID, "batch '%s' has no tensors", batch->name);
    return TB_OK;
}

/* Failures after that are reported by transfers. */
static bool is_registered(const tb__exchange *exchange) {
    return exchange->has_agreed && !tb__handshake_awaits_comm(&exchange->handshake);
}

static bool has_failed(const tb__exchange *exchange) {
    return exchange->state == EXCHANGE_BROKEN && !is_registered(exchange);
}

typedef struct registration {
    const tb_batch *batch;
    const atomic_bool *cancelled; /* NULL: it can't be cancelled */
} registration;

static bool is_registration_cancelled(const registration *s) {
    return s->cancelled && atomic_load(s->cancelled);
}

static bool is_registration_over(void *arg) {
    const tb_batch *batch = ((const registration *)arg)->batch;
    bool waits = false;
    if (is_registration_cancelled(arg))
        return true;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        if (has_failed(batch->exchanges.item[i]))
            return true;
        waits |= !is_registered(batch->exchanges.item[i]);
    }
    return !waits;
}

static tb_status registration_result(const registration *s) {
    const tb_batch *batch = s->batch;
    if (is_registration_cancelled(s))
        return tb__fail(TB_CANCELLED, "batch '%s' was given up", batch->name);
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        if (has_failed(exchange))
            return tb__fail(exchange->handshake.status, "%s", exchange->handshake.why);
    }
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        if (!is_registered(batch->exchanges.item[i]))
            return tb__exchange_fail_waiting(batch->exchanges.item[i]);
    }
    return TB_OK;
}

/* The next pair without an exchange, from the i-th on. NULL: there is none. */
static tb_pair *next_pair(tb_batch *batch, size_t *i) {
    tb__loop_lock(batch->world->loop);
    while (*i < batch->pairs.count && find_exchange(batch, batch->pairs.item[*i]))
        ++*i;
    tb_pair *pair = *i < batch->pairs.count ? batch->pairs.item[*i] : NULL;
    tb__loop_unlock(batch->world->loop);
    return pair;
}

/* Makes and announces exchanges for new pairs. With the lock held. */
static tb_status announce_exchanges(tb_batch *batch) {
    size_t known = batch->exchanges.count;
    tb_status status = make_exchanges(batch);
    for (size_t i = 0; i < batch->engines.count && status == TB_OK && batch->exchanges.count > known; i++)
        status = tb__engine_draw_nonce(batch->engines.item[i]);
    for (size_t i = known; i < batch->exchanges.count && status == TB_OK; i++)
        status = tb__exchange_announce(batch->exchanges.item[i]);
    batch->epoch += status == TB_OK && batch->exchanges.count > known;
    while (status != TB_OK && batch->exchanges.count > known)
        tb__exchange_destroy(batch->exchanges.item[--batch->exchanges.count]);
    tb__batch_update_version(batch);
    return status;
}

tb_status tb__local_batch_register(tb_batch *batch, int timeout_ms, const atomic_bool *cancelled) {
    registration s = {batch, cancelled};
    tb__loop *loop = batch->world->loop;
    int64_t deadline_ms = tb__world_deadline(batch->world, timeout_ms);
    tb_pair *pair;
    for (size_t i = 0; (pair = next_pair(batch, &i)); i++)
        TB_TRY(tb__pair_connect(pair, deadline_ms, cancelled));
    tb__loop_lock(loop);
    tb_status status = announce_exchanges(batch);
    if (status == TB_OK) {
        tb__handshakes_wait(batch->world, is_registration_over, &s, deadline_ms);
        status = registration_result(&s);
    }
    tb__loop_unlock(loop);
    return status;
}

/* With the lock held. */
static void remove_pair(tb_batch *batch, const char *name) {
    for (size_t i = batch->exchanges.count; i-- > 0;) {
        tb__exchange *gone = batch->exchanges.item[i];
        if (strcmp(gone->pair->name, name) != 0)
            continue;
        memmove(&batch->exchanges.item[i], &batch->exchanges.item[i + 1],
                (--batch->exchanges.count - i) * sizeof(tb__exchange *));
        tb__exchange_destroy(gone);
    }
    size_t kept = 0;
    for (size_t i = 0; i < batch->tensors.count; i++) {
        if (strcmp(batch->tensors.item[i]->pair->name, name) == 0)
            free_tensor(batch->tensors.item[i]);
        else
            batch->tensors.item[kept++] = batch->tensors.item[i];
    }
    batch->tensors.count = kept;
    kept = 0;
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (strcmp(batch->pairs.item[i]->name, name) != 0)
            batch->pairs.item[kept++] = batch->pairs.item[i];
        else
            tb__pair_unref(batch->pairs.item[i]);
    }
    batch->pairs.count = kept;
    batch->epoch++;
    tb__batch_update_version(batch);
}

tb_status tb__local_batch_remove_pair(tb_batch *batch, tb_pair *pair) {
    bool is_here = false;
    for (size_t i = 0; i < batch->pairs.count; i++)
        is_here |= strcmp(batch->pairs.item[i]->name, pair->name) == 0;
    if (!is_here)
        return tb__fail(TB_INVALID, "pair '%s' is not in batch '%s'", pair->name, batch->name);
    TB_TRY(tb__batch_check_idle(batch));
    remove_pair(batch, pair->name);
    return TB_OK;
}

void tb__batch_describe_wait(const tb_batch *batch, char *out, size_t room) {
    *out = '\0';
    tb__loop_lock(batch->world->loop);
    for (size_t i = 0; i < batch->exchanges.count && !*out; i++) {
        if (is_registered(batch->exchanges.item[i]))
            continue;
        (void)tb__exchange_fail_waiting(batch->exchanges.item[i]); /* sets tb_error_detail */
        snprintf(out, room, "%s", tb_error_detail());
    }
    tb__loop_unlock(batch->world->loop);
}

uint64_t tb__local_batch_epoch(tb_batch *batch) {
    return batch->epoch;
}

tb_status tb__local_batch_dump(tb_batch *batch, bool is_send, char **out) {
    tb__text text = {0};
    tb_status status = TB_OK;
    for (size_t i = 0; i < batch->exchanges.count && status == TB_OK; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        for (int side = 0; side < 2 && status == TB_OK; side++) {
            const tb__flow *flow = exchange->flows[is_send ? side : !side];
            char *part;
            if (!exchange->sides[side].is_here || !flow)
                continue;
            status = tb__flow_dump(flow, is_send, &part);
            if (status != TB_OK)
                break;
            tb__text_add(&text, "%s", part);
            free(part);
        }
    }
    if (status == TB_OK && !text.count)
        status = tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", batch->name);
    if (status == TB_OK)
        return tb__text_take(&text, out);
    tb__text_fini(&text);
    return status;
}

/* The flow in which this process sends, or receives; TB_REFUSED if there are several. */
static tb_status find_only_flow(const tb_batch *batch, bool is_send, tb__flow **out) {
    const char *first = NULL;
    *out = NULL;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        for (int side = 0; side < 2; side++) {
            tb__flow *flow = exchange->flows[is_send ? side : !side];
            if (!exchange->sides[side].is_here || !flow || flow == *out)
                continue;
            if (*out)
                return tb__fail(TB_REFUSED, "batch '%s' is %s through pairs '%s' and '%s', each with an IR of its own",
                                batch->name, is_send ? "sent" : "received", first, exchange->pair->name);
            *out = flow;
            first = exchange->pair->name;
        }
    }
    return *out ? TB_OK : tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", batch->name);
}

tb_status tb__local_batch_ir(tb_batch *batch, bool is_send, tb_ir **out) {
    tb__flow *flow;
    TB_TRY(find_only_flow(batch, is_send, &flow));
    return tb__flow_copy_ir(flow, out);
}

tb_status tb__local_batch_version(tb_batch *batch, const tb_pair *pair, uint64_t *version, bool *is_torn) {
    const tb__exchange *exchange = find_exchange(batch, pair);
    if (!exchange)
        return tb__fail(TB_INVALID, "pair '%s' is not in batch '%s'", pair->name, batch->name);
    const tb__flow *flow = exchange->flows[!pair->side];
    *is_torn = false;
    *version = flow ? tb__flow_version(flow, is_torn) : 0;
    return TB_OK;
}

void tb__batch_get_received(const tb_batch *batch, const tb_pair *pair, const tb__added_tensor *const **out,
                            size_t *count) {
    tb__loop_lock(batch->world->loop);
    const tb__exchange *exchange = find_exchange(batch, pair);
    *out = exchange ? exchange->received[!pair->side].item : NULL;
    *count = exchange ? exchange->received[!pair->side].count : 0;
    tb__loop_unlock(batch->world->loop);
}

/* The versions of the tensors that are received here, by pair. */
static tb__versions versions_of(const tb_batch *batch, bool *is_torn) {
    tb__versions versions = TB__NO_VERSIONS;
    *is_torn = false;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        const tb__flow *flow = exchange->flows[!exchange->pair->side];
        bool is_this_torn = false;
        tb__versions_add(&versions, flow ? tb__flow_version(flow, &is_this_torn) : 0);
        *is_torn |= is_this_torn;
    }
    return versions;
}

void tb__batch_update_version(tb_batch *batch) {
    bool unused;
    tb__versions versions = versions_of(batch, &unused);
    tb__versions_update_common(&versions, &batch->common_version);
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (batch->pairs.item[i]->index == 0) {
            tb__world_report(batch->world);
            return;
        }
    }
}

/* Whether the other side of a pair has begun to send it, and this process has not received that. */
static bool is_offered(const tb_batch *batch) {
    bool is_offered = false;
    for (size_t i = 0; i < batch->exchanges.count; i++) {
        const tb__exchange *exchange = batch->exchanges.item[i];
        const tb__flow *flow = exchange->flows[!exchange->pair->side];
        is_offered |= flow && tb__flow_is_offered(flow);
    }
    return is_offered;
}

tb_status tb__local_batch_query(tb_batch *batch, tb_batch_state *out) {
    *out = (tb_batch_state){0};
    tb__versions versions = versions_of(batch, &out->is_torn);
    out->version = batch->common_version;
    out->is_mixed = tb__versions_differ(&versions);
    out->transfer_signal = is_offered(batch) || (batch->sending && tb__transfer_is_unread(batch->sending));
    out->is_in_doubt = tb__batch_is_in_doubt(batch);
    return TB_OK;
}

bool tb__batch_is_in_doubt(const tb_batch *batch) {
    bool is_in_doubt = false;
    for (size_t i = 0; i < batch->engines.count; i++)
        is_in_doubt |= tb__commit_is_in_doubt(&batch->engines.item[i]->commit);
    return is_in_doubt;
}

void tb__local_batch_destroy(tb_batch *batch) {
    tb__batch_unref(batch);
}

static void free_batch(tb_batch *batch) {
    for (size_t i = 0; i < batch->tensors.count; i++)
        free_tensor(batch->tensors.item[i]);
    free(batch->tensors.item);
    free(batch->pairs.item);
    free(batch->exchanges.item);
    free(batch->engines.item);
    tb__pack_fini(&batch->matching);
    free(batch->name);
    free(batch);
}

static void unref_pairs(tb_batch *batch) {
    for (size_t i = 0; i < batch->pairs.count; i++)
        tb__pair_unref(batch->pairs.item[i]);
}

void tb__batch_unref(tb_batch *batch) {
    if (atomic_fetch_sub(&batch->refs, 1) > 1)
        return;
    tb_world *world = batch->world;
    if (!tb__world_is_inherited(world)) {
        tb__loop_lock(world->loop);
        tb__world_remove_user(world, &batch->memory);
        while (batch->exchanges.count > 0)
            tb__exchange_destroy(batch->exchanges.item[--batch->exchanges.count]);
        while (batch->engines.count > 0)
            tb__engine_destroy(batch->engines.item[--batch->engines.count]);
        unref_pairs(batch);
        tb__world_report(world);
        tb__loop_unlock(world->loop);
        free_batch(batch);
    } else if (tb__world_was_unlocked(world)) {
        unref_pairs(batch);
        free_batch(batch);
    }
    tb__world_unref(world);
}
