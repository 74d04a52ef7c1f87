/* Batches: what is added to one, and when it is agreed on. */
#include "bus/accord.h"

#include "base/opts.h"
#include "base/text.h"

#include <string.h>

enum { LEAST_STAGING = 64 << 10 };

/* Nothing matched with nothing: what remains is what is wrong with the options themselves. */
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
    tb_match match;
    TB_TRY(tb_match_names(NULL, 0, NULL, 0, &opts, &match));
    tb_match_fini(&match);
    return TB_OK;
}

tb_status tb_batch_create(tb_world *world, const char *name, const tb_batch_opts *opts, tb_batch **out) {
    tb_batch_opts o;
    TB_TRY(tb__opts_read(&o, sizeof o, opts));
    TB_TRY(tb__world_check_name("batch", name));
    if (o.bucket_size < 0 || o.staging_bytes < 0)
        return tb__fail(TB_INVALID, "bucket_size and staging_bytes can't be negative");
    o.bucket_size = o.bucket_size ? o.bucket_size : 16 << 20;
    o.staging_bytes = o.staging_bytes ? o.staging_bytes : 256 << 20;
    if (o.staging_bytes < LEAST_STAGING)
        return tb__fail(TB_INVALID, "staging_bytes must be at least %d", LEAST_STAGING);
    TB_TRY(check_matching(&o));
    tb_batch *batch = tb__calloc(1, sizeof *batch);
    if (!batch)
        return TB_NO_MEMORY;
    batch->world = world;
    batch->name = tb__strdup(name);
    tb__matching_pack(&batch->matching, &o);
    if (!batch->name || batch->matching.failed) {
        tb__pack_fini(&batch->matching);
        free(batch->name);
        free(batch);
        return TB_NO_MEMORY;
    }
    o.ties = NULL; /* the caller's */
    o.ignored = NULL;
    o.nties = o.nignored = 0;
    batch->opts = o;
    atomic_init(&batch->refs, 1);
    tb__world_ref(world);
    *out = batch;
    return TB_OK;
}

/* With the lock held. */
static tb_status add_pair(tb_batch *batch, tb_pair *pair) {
    if (batch->is_sealed)
        return tb__fail(TB_REFUSED, "batch '%s' has been registered; nothing can be added to it", batch->name);
    for (size_t i = 0; i < batch->pairs.count; i++) {
        if (batch->pairs.item[i] == pair)
            return TB_OK;
    }
    if (!tb__vec_push(&batch->pairs, pair))
        return TB_NO_MEMORY;
    pair->refs++;
    return TB_OK;
}

tb_status tb_batch_add_pair(tb_batch *batch, tb_pair *pair) {
    if (pair->world != batch->world)
        return tb__fail(TB_INVALID, "pair '%s' is of another world", pair->name);
    tb__engine_lock(batch->world->engine);
    tb_status status = add_pair(batch, pair);
    tb__engine_unlock(batch->world->engine);
    return status;
}

tb_status tb_batch_add(tb_batch *batch, tb_pair *pair, const char *name, const tb_tensor *tensor) {
    if (!name || !*name)
        return tb__fail(TB_INVALID, "a tensor needs a name");
    if (pair->world != batch->world)
        return tb__fail(TB_INVALID, "tensor '%.100s': the pair is of another world", name);
    tb__tensor t;
    tb_status status = tb__tensor_init(&t, pair, name, tensor, batch->opts.transform);
    if (status != TB_OK)
        return tb__fail_within(status, "tensor '%.100s'", name);
    tb__engine_lock(batch->world->engine);
    status = add_pair(batch, pair);
    if (status == TB_OK && !tb__vec_push(&batch->tensors, t))
        status = TB_NO_MEMORY;
    tb__engine_unlock(batch->world->engine);
    if (status != TB_OK) {
        tb__tensor_fini(&t);
        tb__prefix_detail("tensor '%.100s'", name);
    }
    return status;
}

/* ---- Agreement ------------------------------------------------------------------------------------------------- */

static bool has_accord(const tb_batch *batch, const char *pair) {
    for (size_t i = 0; i < batch->accords.count; i++) {
        if (strcmp(batch->accords.item[i]->pair->name, pair) == 0)
            return true;
    }
    return false;
}

/* One for each pair, whichever of its sides this process is on. */
static tb_status make_accords(tb_batch *batch) {
    for (size_t i = 0; i < batch->pairs.count; i++) {
        tb_pair *pair = batch->pairs.item[i]; /* never NULL */
        if (!pair || has_accord(batch, pair->name))
            continue;
        tb__accord *accord;
        if (!tb__vec_reserve(&batch->accords, 1))
            return TB_NO_MEMORY;
        TB_TRY(tb__accord_create(batch, pair, &accord));
        batch->accords.item[batch->accords.count++] = accord;
    }
    if (batch->accords.count == 0)
        return tb__fail(TB_INVALID, "batch '%s' has no tensors", batch->name);
    return TB_OK;
}

typedef struct settling {
    const tb_batch *batch;
    const atomic_bool *unwanted; /* NULL: it is wanted */
} settling;

static bool is_unwanted(const settling *s) {
    return s->unwanted && atomic_load(s->unwanted);
}

static bool is_settled(void *arg) {
    const tb_batch *batch = ((const settling *)arg)->batch;
    bool waits = false;
    if (is_unwanted(arg))
        return true;
    for (size_t i = 0; i < batch->accords.count; i++) {
        if (batch->accords.item[i]->state == ACCORD_BROKEN)
            return true;
        waits |= batch->accords.item[i]->state == ACCORD_WAITING;
    }
    return !waits;
}

static tb_status settle(const settling *s) {
    const tb_batch *batch = s->batch;
    if (is_unwanted(s))
        return tb__fail(TB_CANCELLED, "batch '%s' was given up", batch->name);
    for (size_t i = 0; i < batch->accords.count; i++) {
        const tb__accord *accord = batch->accords.item[i];
        if (accord->state == ACCORD_BROKEN)
            return tb__fail(accord->all.status, "%s", accord->all.why);
    }
    for (size_t i = 0; i < batch->accords.count; i++) {
        if (batch->accords.item[i]->state == ACCORD_WAITING)
            return tb__accord_not_settled(batch->accords.item[i]);
    }
    return TB_OK;
}

/* The next pair to be met. NULL: the batch is sealed, or that was the last. */
static tb_pair *next_pair(tb_batch *batch, size_t i) {
    tb__engine_lock(batch->world->engine);
    tb_pair *pair = !batch->is_sealed && i < batch->pairs.count ? batch->pairs.item[i] : NULL;
    tb__engine_unlock(batch->world->engine);
    return pair;
}

tb_status tb_batch_register(tb_batch *batch, int timeout_ms) {
    return tb__batch_register(batch, timeout_ms, NULL);
}

tb_status tb__batch_register(tb_batch *batch, int timeout_ms, const atomic_bool *unwanted) {
    settling s = {batch, unwanted};
    tb__engine *engine = batch->world->engine;
    int64_t deadline_ms = tb__world_deadline(batch->world, timeout_ms);
    tb_status status = TB_OK;
    tb_pair *pair;
    for (size_t i = 0; (pair = next_pair(batch, i)); i++)
        TB_TRY(tb__pair_meet(pair, deadline_ms, unwanted));
    tb__engine_lock(engine);
    if (!batch->is_sealed) {
        batch->is_sealed = true;
        status = make_accords(batch);
        for (size_t i = 0; i < batch->accords.count && status == TB_OK; i++)
            status = tb__accord_announce(batch->accords.item[i]);
        if (status != TB_OK) {
            while (batch->accords.count > 0)
                tb__accord_destroy(batch->accords.item[--batch->accords.count]);
            batch->is_sealed = false;
        }
    }
    if (status == TB_OK) {
        tb__engine_wait(engine, is_settled, &s, deadline_ms);
        status = settle(&s);
    }
    tb__engine_unlock(engine);
    return status;
}

tb_status tb_batch_dump(tb_batch *batch, bool is_send, char **out) {
    tb__text text = {0};
    tb_status status = TB_OK;
    tb__engine_lock(batch->world->engine);
    for (size_t i = 0; i < batch->accords.count && status == TB_OK; i++) {
        const tb__accord *accord = batch->accords.item[i];
        for (int side = 0; side < 2 && status == TB_OK; side++) {
            const tb__flow *flow = accord->flows[is_send ? side : !side];
            char *part;
            if (!accord->sides[side].is_here || !flow)
                continue;
            status = tb__flow_dump(flow, is_send, &part);
            if (status != TB_OK)
                break;
            tb__text_add(&text, "%s", part);
            free(part);
        }
    }
    tb__engine_unlock(batch->world->engine);
    if (status == TB_OK && !text.count)
        status = tb__fail(TB_REFUSED, "batch '%s' has not been registered yet", batch->name);
    if (status == TB_OK)
        return tb__text_take(&text, out);
    tb__text_fini(&text);
    return status;
}

void tb_batch_destroy(tb_batch *batch) {
    if (batch)
        tb__batch_unref(batch);
}

void tb__batch_unref(tb_batch *batch) {
    if (atomic_fetch_sub(&batch->refs, 1) > 1)
        return;
    tb_world *world = batch->world;
    tb__engine *engine = world->engine;
    tb__engine_lock(engine);
    for (size_t i = 0; i < batch->accords.count; i++)
        tb__accord_destroy(batch->accords.item[i]);
    for (size_t i = 0; i < batch->pairs.count; i++)
        tb__pair_unref(batch->pairs.item[i]);
    tb__engine_unlock(engine);
    for (size_t i = 0; i < batch->tensors.count; i++)
        tb__tensor_fini(&batch->tensors.item[i]);
    free(batch->tensors.item);
    free(batch->pairs.item);
    free(batch->accords.item);
    tb__pack_fini(&batch->matching);
    free(batch->name);
    free(batch);
    tb__world_unref(world);
}
