/* A cache of plans of models, which outlives batches: planning thousands of tensors takes long, and a batch that is
 * made again mostly has the same plan. A plan is found by a key that contains all its inputs. The cache is bounded in
 * bytes. */
#include "bus/exchange.h"

#include "base/index.h"
#include "ir/ir.h"
#include "plan/plan.h"

#include <string.h>

/* Layouts that were packed already: many tensors share few of them. */
typedef struct packed_layouts {
    TB_VEC(const tb_layout *) list;
    tb__index index;
} packed_layouts;

/* Packs the layout's number, and its text when it first occurs. */
static tb_status pack_layout(tb__pack *key, packed_layouts *known, const tb_layout *layout) {
    uint64_t hash = tb__hash(0, (uint64_t)(uintptr_t)layout);
    size_t probe = 0, i;
    if (!tb__vec_reserve(&known->list, 1))
        return TB_NO_MEMORY;
    while ((i = tb__index_next(&known->index, hash, &probe)) != TB__NOWHERE) {
        if (known->list.item[i] == layout) {
            tb__pack_u32(key, (uint32_t)i);
            return TB_OK;
        }
    }
    char *text;
    TB_TRY(tb_layout_format(layout, &text));
    tb__pack_u32(key, (uint32_t)known->list.count);
    tb__pack_string(key, text);
    free(text);
    if (!tb__index_add(&known->index, hash, known->list.count))
        return TB_NO_MEMORY;
    known->list.item[known->list.count++] = layout;
    return TB_OK;
}

static tb_status pack_spec(tb__pack *key, packed_layouts *known, const tb_tensor_spec *spec) {
    tb__pack_string(key, spec->name);
    tb__pack_u32(key, (uint32_t)spec->shape.ndim);
    for (int d = 0; d < spec->shape.ndim; d++)
        tb__pack_i64(key, spec->shape.dim[d]);
    tb__pack_u32(key, spec->src_dtype);
    tb__pack_u32(key, spec->dst_dtype);
    tb__pack_u32(key, spec->wire_dtype);
    tb__pack_u32(key, spec->group);
    tb__pack_i64(key, spec->band);
    tb__pack_u32(key, spec->coded);
    tb__pack_u32(key, spec->whole);
    tb__pack_u64(key, spec->memory_kind);
    tb__pack_u64(key, (uint64_t)(uintptr_t)spec->coded_nbytes);
    TB_TRY(pack_layout(key, known, spec->src));
    return pack_layout(key, known, spec->dst);
}

static void pack_opts(tb__pack *key, const tb_ir_opts *o) {
    tb__pack_i64(key, o->bucket_size);
    tb__pack_i64(key, o->staging_bytes);
    tb__pack_u32(key, o->max_in_flight);
    tb__pack_u32(key, o->direct);
    tb__pack_u32(key, o->plan->unbalanced);
    tb__pack_u32(key, (uint32_t)o->plan->nhosts);
    for (size_t i = 0; i < o->plan->nhosts; i++)
        tb__pack_u32(key, (uint32_t)o->plan->hosts[i]);
}

static tb_status make_plan_key(tb__pack *key, int32_t rank, const tb_tensor_spec *specs, size_t nspecs,
                               const tb_ir_opts *opts) {
    packed_layouts known = {0};
    tb_status status = TB_OK;
    tb__pack_u32(key, (uint32_t)rank);
    pack_opts(key, opts);
    tb__pack_u32(key, (uint32_t)nspecs);
    for (size_t i = 0; i < nspecs && status == TB_OK; i++)
        status = pack_spec(key, &known, &specs[i]);
    free(known.list.item);
    tb__index_fini(&known.index);
    return status == TB_OK && key->failed ? TB_NO_MEMORY : status;
}

/* coded_nbytes without an argument is a pure function of the shape; with one, its result may change. */
static bool is_comparable(const tb_tensor_spec *specs, size_t nspecs) {
    for (size_t i = 0; i < nspecs; i++) {
        if (specs[i].coded_nbytes && specs[i].coded_arg)
            return false;
    }
    return true;
}

static struct tb__kept_plan *find_kept_plan(tb__plans *plans, uint64_t hash, const tb__pack *key) {
    for (size_t i = 0; i < plans->kept.count; i++) {
        struct tb__kept_plan *p = &plans->kept.item[i];
        if (p->hash == hash && p->key.count == key->count && memcmp(p->key.data, key->data, key->count) == 0)
            return p;
    }
    return NULL;
}

static void plan_fini(struct tb__kept_plan *plan) {
    tb__pack_fini(&plan->key);
    tb_ir_destroy(plan->ir);
}

/* Takes ownership of the key. If memory is short, the plan is not kept. */
static void keep_plan(tb__plans *plans, uint64_t hash, tb__pack *key, tb_ir *ir) {
    size_t nbytes = tb__mem_nbytes(key->data) + tb__ir_nbytes(ir);
    if (!tb__vec_push(&plans->kept, (struct tb__kept_plan){hash, *key, ir, plans->clock, nbytes}))
        return;
    plans->nbytes += nbytes;
    *key = (tb__pack){0};
    tb__ir_ref(ir);
}

/* Evicts plans last used at this time. */
static void evict_plans(tb__plans *plans, uint64_t time) {
    size_t nkept = 0;
    for (size_t i = 0; i < plans->kept.count; i++) {
        struct tb__kept_plan *p = &plans->kept.item[i];
        if (p->used != time) {
            plans->kept.item[nkept++] = *p;
            continue;
        }
        plans->nbytes -= p->nbytes;
        plans->evicted++;
        plan_fini(p);
    }
    plans->kept.count = nkept;
}

/* Evicts the least recently used: plans of models, and those of single tensors, which they were made from. */
static void evict_to_limit(tb__plans *plans, tb_plan_cache *cache) {
    while (plans->nbytes + tb__plan_cache_nbytes(cache) > plans->limit) {
        uint64_t oldest = tb__plan_cache_oldest(cache);
        for (size_t i = 0; i < plans->kept.count; i++)
            oldest = plans->kept.item[i].used < oldest ? plans->kept.item[i].used : oldest;
        if (oldest == UINT64_MAX)
            break;
        plans->evicted += tb__plan_cache_drop(cache, oldest);
        evict_plans(plans, oldest);
    }
}

tb_status tb__plans_get(void *arg, const tb_tensor_spec *specs, size_t nspecs, const tb_ir_opts *opts, tb_ir **out) {
    tb_world *world = arg;
    tb__plans *plans = &world->plans;
    tb__pack key = {0};
    uint64_t hash = 0;
    tb_ir *ir = NULL;
    bool may_keep = is_comparable(specs, nspecs);
    tb__plan_cache_set_time(world->cache, ++plans->clock);
    tb_status status = may_keep ? make_plan_key(&key, world->rank, specs, nspecs, opts) : TB_OK;
    if (status == TB_OK && may_keep) {
        hash = tb__tensor_list_hash(key.data, key.count);
        struct tb__kept_plan *found = find_kept_plan(plans, hash, &key);
        if (found) {
            found->used = plans->clock;
            ir = found->ir;
            tb__ir_ref(ir);
        }
    }
    plans->hits += ir != NULL;
    if (status == TB_OK && !ir) {
        plans->misses++;
        status = tb_ir_create(world->rank, specs, nspecs, world->cache, opts, &ir);
        if (status == TB_OK && may_keep)
            keep_plan(plans, hash, &key, ir);
        evict_to_limit(plans, world->cache);
    }
    tb__pack_fini(&key);
    if (status == TB_OK)
        *out = ir;
    return status;
}

void tb__plans_fini(tb__plans *plans) {
    for (size_t i = 0; i < plans->kept.count; i++)
        plan_fini(&plans->kept.item[i]);
    free(plans->kept.item);
}

void tb__local_world_plans(const tb_world *world, tb__plans_state *out) {
    tb__loop_lock(world->loop);
    const tb__plans *plans = &world->plans;
    *out = (tb__plans_state){.kept = plans->kept.count,
                             .nbytes = plans->nbytes + tb__plan_cache_nbytes(world->cache),
                             .limit = plans->limit,
                             .hits = plans->hits,
                             .misses = plans->misses,
                             .evicted = plans->evicted};
    tb__loop_unlock(world->loop);
}
