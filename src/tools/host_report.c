/* What a plan sends from host to host, and by which ways broadcasts get there. */
#include "tools/tools.h"

#include "base/int.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_ROWS = 32 }; /* of a table, unless all are asked for */

typedef struct link {
    int32_t from, to; /* hosts */
    int64_t nbytes;
} link;

/* A broadcast that is handed on. */
typedef struct way {
    char *text; /* "0 > 4 > 8,9": who sends to whom */
    int64_t nbytes;
} way;

typedef struct view {
    TB_VEC(link) links; /* by from, then to */
    TB_VEC(way) ways;
} view;

static void view_fini(view *v) {
    for (size_t i = 0; i < v->ways.count; i++)
        free(v->ways.item[i].text);
    free(v->ways.item);
    free(v->links.item);
}

static bool add_link(view *v, int32_t from, int32_t to, int64_t nbytes) {
    const link *links = v->links.item;
    size_t low = 0;
    TB_BISECT(low, v->links.count, links[low].from > from || (links[low].from == from && links[low].to >= to));
    link *at = v->links.item + low;
    if (low < v->links.count && at->from == from && at->to == to) {
        if (__builtin_add_overflow(at->nbytes, nbytes, &at->nbytes))
            at->nbytes = INT64_MAX;
        return true;
    }
    if (!tb__vec_reserve(&v->links, 1))
        return false;
    at = v->links.item + low;
    memmove(at + 1, at, (v->links.count++ - low) * sizeof *at);
    *at = (link){from, to, nbytes};
    return true;
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

static tb_status add_way(view *v, const tb_chunk *key, const int32_t *via, int64_t nbytes) {
    tb__text text = {0};
    char *taken;
    tb__text_add(&text, "%" PRId32, key->source);
    add_branch(&text, key, via, key->source);
    TB_TRY(tb__text_take(&text, &taken));
    for (size_t i = 0; i < v->ways.count; i++) {
        if (strcmp(v->ways.item[i].text, taken) == 0) {
            v->ways.item[i].nbytes += nbytes;
            free(taken);
            return TB_OK;
        }
    }
    if (tb__vec_push(&v->ways, (way){taken, nbytes}))
        return TB_OK;
    free(taken);
    return TB_NO_MEMORY;
}

/* What leaves from this rank as a source, and how it goes on. */
static tb_status add_ir(view *v, const tb_ir *ir, const int32_t *hosts) {
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
            if (hosts[ir->rank] != hosts[key->source] && !add_link(v, hosts[ir->rank], hosts[key->source], nbytes))
                return TB_NO_MEMORY;
            continue;
        }
        for (uint32_t t = 0; t < key->ntargets; t++) {
            int32_t from = hosts[channel->via ? channel->via[t] : key->source], to = hosts[key->targets[t]];
            if (from != to && !add_link(v, from, to, nbytes))
                return TB_NO_MEMORY;
        }
        if (channel->via)
            TB_TRY(add_way(v, key, channel->via, nbytes));
    }
    return TB_OK;
}

static tb_status view_fill(view *v, const tool_plan_view *plan, const tb_ir_opts *opts) {
    tb_tensor_spec spec = {.size = sizeof spec,
                           .name = "tensor",
                           .shape = plan->shape,
                           .src = plan->src,
                           .dst = plan->dst,
                           .src_dtype = plan->dtype,
                           .dst_dtype = plan->dtype};
    tb_plan_cache *cache;
    TB_TRY(tb_plan_cache_create(&cache));
    tb_status status = TB_OK;
    for (int32_t i = 0; i < plan->stats.nranks && status == TB_OK; i++) {
        tb_ir *ir;
        status = tb_ir_create(plan->stats.ranks[i], &spec, 1, cache, opts, &ir);
        if (status == TB_OK) {
            status = add_ir(v, ir, opts->plan->hosts);
            tb_ir_destroy(ir);
        }
    }
    tb_plan_cache_destroy(cache);
    return status;
}

static void add_rest(tb__text *out, size_t shown, size_t count) {
    if (shown < count)
        tb__text_add(out, "%sthe first %zu of %zu; --all shows the others%s\n", tool_dim(), shown, count, tool_plain());
    tb__text_add(out, "\n");
}

static void add_text(tb__text *out, const view *v, bool all) {
    tool_table table = {0}, ways = {0};
    size_t shown = all || v->links.count <= MOST_ROWS ? v->links.count : MOST_ROWS;
    tool_table_column(&table, "from host", true);
    tool_table_column(&table, "to host", true);
    tool_table_column(&table, "bytes", true);
    tool_table_column(&table, "", true);
    for (size_t i = 0; i < shown; i++) {
        const link *l = &v->links.item[i];
        tool_table_cell(&table, "%" PRId32, l->from);
        tool_table_cell(&table, "%" PRId32, l->to);
        tool_table_cell(&table, "%" PRId64, l->nbytes);
        tool_table_cell(&table, "%s", l->nbytes >= 1024 ? tool_size(l->nbytes).text : "");
    }
    tb__text_add(out, "\n");
    tool_table_finish(&table, out);
    add_rest(out, shown, v->links.count);
    if (v->ways.count == 0)
        return;
    shown = all || v->ways.count <= MOST_ROWS ? v->ways.count : MOST_ROWS;
    tool_table_column(&ways, "handed on from rank to rank", false);
    tool_table_column(&ways, "bytes", true);
    tool_table_column(&ways, "", true);
    for (size_t i = 0; i < shown; i++) {
        const way *w = &v->ways.item[i];
        tool_table_cell(&ways, "%s", w->text);
        tool_table_cell(&ways, "%" PRId64, w->nbytes);
        tool_table_cell(&ways, "%s", w->nbytes >= 1024 ? tool_size(w->nbytes).text : "");
    }
    tool_table_finish(&ways, out);
    add_rest(out, shown, v->ways.count);
}

tb_status tool_add_hosts(tb__text *out, const tool_plan_view *plan, const tb_ir_opts *opts, bool all) {
    view v = {0};
    tb_status status = view_fill(&v, plan, opts);
    if (status == TB_OK)
        add_text(out, &v, all);
    view_fini(&v);
    return status;
}

tb_status tool_hosts_json(const tool_plan_view *plan, const tb_ir_opts *opts, char **out) {
    view v = {0};
    tb__text text = {0};
    tb_status status = view_fill(&v, plan, opts);
    tb__text_add(&text, "\"hosts\":[");
    for (size_t i = 0; i < v.links.count; i++)
        tb__text_add(&text, "%s{\"from\":%" PRId32 ",\"to\":%" PRId32 ",\"bytes\":%" PRId64 "}", i ? "," : "",
                     v.links.item[i].from, v.links.item[i].to, v.links.item[i].nbytes);
    tb__text_add(&text, "],\"ways\":[");
    for (size_t i = 0; i < v.ways.count; i++)
        tb__text_add(&text, "%s{\"way\":\"%s\",\"bytes\":%" PRId64 "}", i ? "," : "", v.ways.item[i].text,
                     v.ways.item[i].nbytes);
    tb__text_add(&text, "]");
    view_fini(&v);
    if (status == TB_OK)
        return tb__text_take(&text, out);
    tb__text_fini(&text);
    return status;
}
