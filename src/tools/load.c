/* What each rank of a batch sends, receives and keeps, what goes from host to host, and by which ways broadcasts get
 * there: the buckets of every rank, added up. */
#include "tools/tools.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

static void count(int64_t *total, int64_t nbytes) {
    if (__builtin_add_overflow(*total, nbytes, total))
        *total = INT64_MAX;
}

void tool_load_fini(tool_load *load) {
    for (size_t i = 0; i < load->ways.count; i++)
        free(load->ways.item[i].text);
    free(load->ways.item);
    free(load->host_links.item);
    free(load->rank_links.item);
    free(load->ranks);
    *load = (tool_load){0};
}

int64_t tool_load_total(const tool_load *load) {
    int64_t total = 0;
    for (size_t i = 0; i < load->nranks; i++)
        count(&total, load->ranks[i].sends);
    return total;
}

static bool add_link(tool_links *list, int32_t from, int32_t to, int64_t nbytes) {
    const tool_link *links = list->item;
    size_t low = 0;
    TB_BISECT(low, list->count, links[low].from > from || (links[low].from == from && links[low].to >= to));
    tool_link *at = list->item + low;
    if (low < list->count && at->from == from && at->to == to) {
        count(&at->nbytes, nbytes);
        return true;
    }
    if (!tb__vec_reserve(list, 1))
        return false;
    at = list->item + low;
    memmove(at + 1, at, (list->count++ - low) * sizeof *at);
    *at = (tool_link){from, to, nbytes};
    return true;
}

static tool_rank_load *find_rank(const tool_load *load, int32_t rank) {
    size_t low = 0;
    TB_BISECT(low, load->nranks, load->ranks[low].rank >= rank);
    return &load->ranks[low]; /* all ranks of the tensors are there */
}

static bool add_move(tool_load *load, int32_t from, int32_t to, int64_t nbytes, const int32_t *hosts) {
    if (from == to) {
        count(&find_rank(load, from)->keeps, nbytes);
        return true;
    }
    count(&find_rank(load, from)->sends, nbytes);
    count(&find_rank(load, to)->receives, nbytes);
    return add_link(&load->rank_links, from, to, nbytes) &&
           (!hosts || hosts[from] == hosts[to] || add_link(&load->host_links, hosts[from], hosts[to], nbytes));
}

/* Those to whom `from` sends it, each with those to whom it hands it on. */
static void add_branch(tb__text *out, const tb_chunk *key, const int32_t *via, int32_t from) {
    uint32_t count = 0, n = 0;
    for (uint32_t i = 0; i < key->ntargets; i++)
        count += via[i] == from;
    for (uint32_t i = 0; i < key->ntargets; i++) {
        if (via[i] != from)
            continue;
        tb__text_add(out, "%s%" PRId32, n ? ", " : count > 1 ? " > (" : " > ", key->targets[i]);
        add_branch(out, key, via, key->targets[i]);
        n++;
    }
    tb__text_add(out, count > 1 ? ")" : "");
}

static tb_status add_way(tool_load *load, const tb_chunk *key, const int32_t *via, int64_t nbytes) {
    tb__text text = {0};
    char *taken;
    tb__text_add(&text, "%" PRId32, key->source);
    add_branch(&text, key, via, key->source);
    TB_TRY(tb__text_take(&text, &taken));
    for (size_t i = 0; i < load->ways.count; i++) {
        if (strcmp(load->ways.item[i].text, taken) == 0) {
            load->ways.item[i].nbytes += nbytes;
            free(taken);
            return TB_OK;
        }
    }
    if (tb__vec_push(&load->ways, (tool_way){taken, nbytes}))
        return TB_OK;
    free(taken);
    return TB_NO_MEMORY;
}

/* What leaves from this rank as a source, and how it goes on. */
static tb_status add_ir(tool_load *load, const tb_ir *ir, const int32_t *hosts) {
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_channel *channel = &ir->channels[i];
        const tb_bucket *bucket = &ir->buckets[channel->first_bucket];
        const tb_chunk *key = &ir->chunks[ir->entries[bucket->first_entry].chunk];
        int64_t nbytes = 0;
        if (key->mode != TB_NONE && key->source != ir->rank)
            continue;
        for (size_t j = 0; j < channel->nbuckets; j++) {
            for (size_t k = 0; k < bucket[j].nentries; k++)
                nbytes += ir->entries[bucket[j].first_entry + k].nbytes;
        }
        if (key->mode == TB_NONE) { /* a contribution goes to the rank that combines */
            if (ir->rank != key->source && !add_move(load, ir->rank, key->source, nbytes, hosts))
                return TB_NO_MEMORY;
            continue;
        }
        for (uint32_t t = 0; t < key->ntargets; t++) {
            int32_t from = channel->via ? channel->via[t] : key->source;
            if (!add_move(load, from, key->targets[t], nbytes, hosts))
                return TB_NO_MEMORY;
        }
        if (channel->via)
            TB_TRY(add_way(load, key, channel->via, nbytes));
    }
    return TB_OK;
}

tb_status tool_load_fill(tool_load *load, const tb_tensor_spec *tensors, size_t ntensors, const int32_t *ranks,
                         size_t nranks, const tb_ir_opts *opts) {
    tb_plan_cache *cache;
    *load = (tool_load){.nranks = nranks, .ranks = tb__calloc(nranks, sizeof *load->ranks)};
    if (!load->ranks && nranks > 0)
        return TB_NO_MEMORY;
    for (size_t i = 0; i < nranks; i++)
        load->ranks[i].rank = ranks[i];
    TB_TRY(tb_plan_cache_create(&cache));
    tb_status status = TB_OK;
    for (size_t i = 0; i < nranks && status == TB_OK; i++) {
        tb_ir *ir;
        status = tb_ir_create(ranks[i], tensors, ntensors, cache, opts, &ir);
        if (status == TB_OK) {
            status = add_ir(load, ir, opts->plan->hosts);
            tb_ir_destroy(ir);
        }
    }
    tb_plan_cache_destroy(cache);
    return status;
}
