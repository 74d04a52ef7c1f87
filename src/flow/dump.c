/* What a rank does in a flow, for people. */
#include "flow/flow_inside.h"

#include "base/text.h"

#include <inttypes.h>

static void add_box(tb__text *t, const tb_box *box, const tb_chunk *c) {
    tb__text_add(t, "[");
    for (int d = 0; d < c->ndim; d++)
        tb__text_add(t, "%s%" PRId64 ":%" PRId64, d ? ", " : "", box->start[d], box->start[d] + c->len[d]);
    tb__text_add(t, "]");
}

/* What becomes of a piece that is received. */
static const char *write_back(const tb__flow *flow, const lane *l, const tb_chunk *c) {
    const tb__flow_tensor *t = &flow->tensors[c->tensor];
    if (t->is_gathered || (c->is_coded && (t->codec->list_unpack || t->codec->call_unpack)))
        return "transform";
    if (tb__flow_is_in_place(flow, c))
        return "in place";
    return l->takes_staged || l->overwrites_source || c->is_coded ? "copy" : "direct";
}

static void add_ranks(tb__text *t, const int32_t *ranks, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        tb__text_add(t, "%s%" PRId32, i ? "," : "", ranks[i]);
}

static void add_piece(tb__text *t, const tb__flow *flow, bool is_send, const lane *l, const tb_chunk *c) {
    tb__text_add(t, "  %s ", flow->tensors[c->tensor].spec.name);
    if (is_send) {
        add_box(t, &c->src, c);
        tb__text_add(t, " to ");
        add_ranks(t, c->targets, c->ntargets);
        tb__text_add(t, ", %s", c->is_coded ? "coded" : l->nstaged == c->ntargets ? "staged" : "read in place");
        if (!c->is_coded && l->nstaged > 0 && l->nstaged < c->ntargets)
            tb__text_add(t, " or staged");
    } else {
        add_box(t, &c->dst, c);
        tb__text_add(t, " from ");
        if (c->ncontributors)
            add_ranks(t, c->contributors, c->ncontributors);
        else if (c->source == TB_NO_RANK)
            tb__text_add(t, "nobody: zeros");
        else
            add_ranks(t, &c->source, 1);
        if (l->parent != l->shipper)
            tb__text_add(t, " by way of %" PRId32, flow->members[l->parent].peer->rank);
        tb__text_add(t, ", %s", write_back(flow, l, c));
        for (uint32_t i = 0; i < l->nchildren; i++)
            tb__text_add(t, "%s%" PRId32, i ? "," : ", handed on to ", flow->members[l->children[i]].peer->rank);
    }
    tb__text_add(t, ", %s %" PRId64 " bytes, id %016" PRIx64, tb_transport_kind_name(c->transport), c->nbytes, c->id);
    if (c->part)
        tb__text_add(t, " part %" PRIu32, c->part);
    tb__text_add(t, "\n");
}

tb_status tb__flow_dump(const tb__flow *flow, bool is_send, char **out) {
    bool is_known = flow->is_planned && (is_send || flow->is_reached);
    for (size_t i = 0; is_send && is_known && i < flow->nmembers; i++)
        is_known = !flow->members[i].is_reader || flow->members[i].has_reach;
    if (!is_known)
        return tb__fail(TB_REFUSED, "%s has not been %s yet: what goes which way is settled by the first transfer",
                        flow->what, is_send ? "sent" : "received");
    tb__text t = {0};
    size_t count = 0;
    for (size_t i = 0; i < flow->ir->nchunks; i++)
        count += is_send ? flow->ir->chunks[i].is_source : flow->ir->chunks[i].is_target;
    tb__text_add(&t, "%s, rank %" PRId32 " %s %zu pieces:\n", flow->what, flow->o.rank, is_send ? "sends" : "receives",
                 count);
    for (size_t i = 0; i < flow->ir->nbuckets; i++) {
        const tb_bucket *b = &flow->ir->buckets[i];
        for (size_t j = 0; j < b->nentries; j++) {
            const tb_chunk *c = &flow->ir->chunks[flow->ir->entries[b->first_entry + j].chunk];
            if (is_send ? c->is_source : c->is_target)
                add_piece(&t, flow, is_send, &flow->lanes[b->channel], c);
        }
    }
    return tb__text_take(&t, out);
}
