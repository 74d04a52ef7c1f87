/* Relays of broadcasts to several hosts: one rank of each host receives it, and relays it to the other ranks of its
 * host and to the next host. The source sends it once, however many hosts there are. */
#include "ir/ir.h"

#include <string.h>

/* With up to so many hosts, or at least as many buckets as hosts, each host sends to one other: all links carry every
 * byte once, and a host relays a bucket while it receives the next. Otherwise each host sends to two, so that the last
 * one is only a few steps away. */
enum { LONGEST_CHAIN = 4 };

typedef struct target {
    int32_t rank;
    uint32_t position; /* among the targets */
} target;

typedef struct fan {
    const tb_chunk *key;
    const int32_t *hosts;
    int32_t *via;    /* by position */
    target *targets; /* by rank */
    target *leads;   /* the first of each host but the source's */
    uint32_t nleads;
} fan;

static int compare_targets(const void *a, const void *b) {
    const target *x = a, *y = b;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The host's first target; NULL: there is none yet. */
static const target *find_lead(const fan *f, int32_t host) {
    for (uint32_t i = 0; i < f->nleads; i++) {
        if (f->hosts[f->leads[i].rank] == host)
            return &f->leads[i];
    }
    return NULL;
}

/* A relay has a lower rank than its receivers, so that waits for memory can't form a cycle. */
static void choose_relays(fan *f, size_t nbuckets) {
    const tb_chunk *key = f->key;
    for (uint32_t i = 0; i < key->ntargets; i++)
        f->targets[i] = (target){key->targets[i], i};
    qsort(f->targets, key->ntargets, sizeof *f->targets, compare_targets);
    for (uint32_t i = 0; i < key->ntargets; i++) {
        const target *t = &f->targets[i], *lead = find_lead(f, f->hosts[t->rank]);
        f->via[t->position] = lead ? lead->rank : key->source;
        if (!lead && f->hosts[t->rank] != f->hosts[key->source])
            f->leads[f->nleads++] = *t;
    }
    bool is_chain = f->nleads <= LONGEST_CHAIN || nbuckets >= f->nleads;
    for (uint32_t i = 1; i < f->nleads; i++)
        f->via[f->leads[i].position] = f->leads[is_chain ? i - 1 : (i - 1) / 2].rank;
}

bool tb__ir_uses_relays(const tb_chunk *key, const tb_plan_opts *plan) {
    uint32_t away = 0;
    for (uint32_t i = 0; plan && plan->hosts && key->source != TB_NO_RANK && away < 2 && i < key->ntargets; i++)
        away += plan->hosts[key->targets[i]] != plan->hosts[key->source];
    return away > 1;
}

static tb_status fan_out_channel(tb__owned_ir *ir, tb_channel *channel, const tb_plan_opts *plan) {
    fan f = {.key = &ir->chunks.item[ir->entries.item[ir->buckets.item[channel->first_bucket].first_entry].chunk],
             .hosts = plan->hosts};
    uint32_t n = f.key->ntargets;
    if (f.key->mode != TB_BROADCAST || !tb__ir_uses_relays(f.key, plan))
        return TB_OK;
    f.via = tb__malloc(n, sizeof *f.via);
    f.targets = tb__malloc(n, sizeof *f.targets);
    f.leads = tb__malloc(n, sizeof *f.leads);
    if (f.via && f.targets && f.leads) {
        choose_relays(&f, channel->nbuckets);
        channel->via = tb__ir_ranks(ir, f.via, n);
    }
    free(f.via);
    free(f.targets);
    free(f.leads);
    return channel->via ? TB_OK : TB_NO_MEMORY;
}

tb_status tb__ir_fan_out(tb__owned_ir *ir, const tb_plan_opts *plan) {
    for (size_t i = 0; plan && plan->hosts && i < ir->channels.count; i++)
        TB_TRY(fan_out_channel(ir, &ir->channels.item[i], plan));
    return TB_OK;
}
