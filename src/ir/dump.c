/* The IR as text for people and as JSON for programs. */
#include "base/text.h"
#include "ir/ir.h"
#include "layout/layout.h"

#include <inttypes.h>

static void add_ranks(tb__text *t, const int32_t *ranks, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        tb__text_add(t, "%s%" PRId32, i ? "," : "", ranks[i]);
}

static void add_box(tb__text *t, const tb_box *box, const tb_chunk *c) {
    tb__text_add(t, "[");
    for (int d = 0; d < c->ndim; d++)
        tb__text_add(t, "%s%" PRId64 ":%" PRId64, d ? ", " : "", box->start[d], box->start[d] + c->len[d]);
    tb__text_add(t, "]");
}

static void add_key(tb__text *t, const tb_chunk *c) {
    tb__text_add(t, "%s%s ", tb_chunk_mode_name(c->mode), c->is_coded ? ", coded," : "");
    if (c->source == TB_NO_RANK)
        tb__text_add(t, "zeros");
    else
        tb__text_add(t, "%" PRId32, c->source);
    tb__text_add(t, " -> ");
    add_ranks(t, c->targets, c->ntargets);
    if (c->ncontributors) {
        tb__text_add(t, ", combined from ");
        add_ranks(t, c->contributors, c->ncontributors);
    }
}

/* The relays of a broadcast: in "0>1>2,3", 0 sends to 1, and 1 relays to 2 and 3. */
static void add_relay(tb__text *t, const tb_chunk *c, const int32_t *via, int32_t from) {
    bool is_first = true;
    for (uint32_t i = 0; i < c->ntargets; i++) {
        if (via[i] != from)
            continue;
        tb__text_add(t, is_first ? ", %" PRId32 " sends to %" PRId32 : ",%" PRId32, is_first ? from : c->targets[i],
                     c->targets[i]);
        is_first = false;
    }
}

static void add_relays(tb__text *t, const tb_chunk *c, const int32_t *via) {
    add_relay(t, c, via, c->source);
    for (uint32_t i = 0; i < c->ntargets; i++)
        add_relay(t, c, via, c->targets[i]);
}

static void add_entry(tb__text *t, const tb_ir *ir, const tb_bucket_entry *entry) {
    const tb_chunk *c = &ir->chunks[entry->chunk];
    tb__text_add(t, "    @%-10" PRId64 " %s", entry->offset, ir->names[c->tensor]);
    if (c->source != TB_NO_RANK) {
        tb__text_add(t, " ");
        add_box(t, &c->src, c);
    }
    if (c->mode != TB_NONE) {
        tb__text_add(t, " -> ");
        add_box(t, &c->dst, c);
    }
    tb__text_add(t, " %s", tb_dtype_name(c->wire_dtype));
    if (c->src_dtype != c->wire_dtype)
        tb__text_add(t, " from %s", tb_dtype_name(c->src_dtype));
    tb__text_add(t, ", %" PRId64 " bytes, id %016" PRIx64, c->nbytes, c->id);
    if (c->part)
        tb__text_add(t, " part %" PRIu32, c->part);
    if (c->ncontributors)
        tb__text_add(t, ", %s", tb__reduce_op_name(c->op));
    if (c->divisor > 1)
        tb__text_add(t, " over %" PRIu64, c->divisor);
    tb__text_add(t, "%s%s\n", c->is_source ? ", source" : "", c->is_target ? ", target" : "");
}

tb_status tb_ir_dump_text(const tb_ir *ir, char **out) {
    tb__text t = {0};
    tb__text_add(&t,
                 "rank %" PRId32 ": %zu tensors, %zu channels, %zu buckets of up to %" PRId64 " bytes, %zu chunks\n",
                 ir->rank, ir->ntensors, ir->nchannels, ir->nbuckets, ir->bucket_size, ir->nchunks);
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_channel *channel = &ir->channels[i];
        const tb_bucket *bucket = &ir->buckets[channel->first_bucket];
        tb__text_add(&t, "channel %zu: ", i);
        const tb_chunk *key = &ir->chunks[ir->entries[bucket->first_entry].chunk];
        add_key(&t, key);
        if (channel->via)
            add_relays(&t, key, channel->via);
        tb__text_add(&t, "; %" PRIu32 " in flight\n", channel->max_in_flight);
        for (size_t b = 0; b < channel->nbuckets; b++, bucket++) {
            tb__text_add(&t, "  bucket %zu: %zu chunks, %" PRId64 " bytes", channel->first_bucket + b, bucket->nentries,
                         bucket->total_bytes);
            if (bucket->group)
                tb__text_add(&t, ", group %" PRIu32, bucket->group);
            tb__text_add(&t, "\n");
            for (size_t e = 0; e < bucket->nentries; e++)
                add_entry(&t, ir, &ir->entries[bucket->first_entry + e]);
        }
    }
    return tb__text_take(&t, out);
}

static void add_json_ints(tb__text *t, const char *key, const int64_t *values, int count) {
    tb__text_add(t, ",\"%s\":[", key);
    for (int i = 0; i < count; i++)
        tb__text_add(t, "%s%" PRId64, i ? "," : "", values[i]);
    tb__text_add(t, "]");
}

static void add_json_entry(tb__text *t, const tb_ir *ir, const tb_bucket_entry *entry) {
    const tb_chunk *c = &ir->chunks[entry->chunk];
    /* The id is a string: it fills 64 bits, and JSON readers often stop at 53. */
    tb__text_add(t, "{\"tensor\":%" PRIu32 ",\"id\":\"%016" PRIx64 "\",\"part\":%" PRIu32, c->tensor, c->id, c->part);
    if (c->is_whole)
        tb__text_add(t, ",\"whole\":true");
    tb__text_add(t, ",\"is_source\":%s,\"is_target\":%s", c->is_source ? "true" : "false",
                 c->is_target ? "true" : "false");
    tb__text_add(t, ",\"op\":\"%s\",\"divisor\":%" PRIu64, tb__reduce_op_name(c->op), c->divisor);
    add_json_ints(t, "shape", c->len, c->ndim);
    add_json_ints(t, "src", c->src.start, c->ndim);
    add_json_ints(t, "dst", c->dst.start, c->ndim);
    tb__text_add(t, ",\"src_cell\":%" PRIu64 ",\"dst_cell\":%" PRIu64 ",\"order\":%" PRId64, c->src_cell, c->dst_cell,
                 c->order);
    tb__text_add(t, ",\"src_dtype\":\"%s\",\"wire_dtype\":\"%s\",\"offset\":%" PRId64 ",\"nbytes\":%" PRId64 "}",
                 tb_dtype_name(c->src_dtype), tb_dtype_name(c->wire_dtype), entry->offset, entry->nbytes);
}

tb_status tb_ir_dump_json(const tb_ir *ir, char **out) {
    tb__text t = {0};
    tb__text_add(&t, "{\"rank\":%" PRId32 ",\"bucket_size\":%" PRId64 ",\"tensors\":[", ir->rank, ir->bucket_size);
    for (size_t i = 0; i < ir->ntensors; i++) {
        tb__text_add(&t, i ? "," : "");
        tb__text_add_json(&t, ir->names[i]);
    }
    tb__text_add(&t, "],\"channels\":[");
    for (size_t i = 0; i < ir->nchannels; i++) {
        const tb_channel *channel = &ir->channels[i];
        const tb_bucket *bucket = &ir->buckets[channel->first_bucket];
        const tb_chunk *key = &ir->chunks[ir->entries[bucket->first_entry].chunk];
        tb__text_add(&t, "%s\n{\"mode\":\"%s\",%s\"source\":%" PRId32 ",\"targets\":[", i ? "," : "",
                     tb_chunk_mode_name(key->mode), key->is_coded ? "\"coded\":true," : "", key->source);
        add_ranks(&t, key->targets, key->ntargets);
        tb__text_add(&t, "],\"contributors\":[");
        add_ranks(&t, key->contributors, key->ncontributors);
        if (channel->via) {
            tb__text_add(&t, "],\"via\":[");
            add_ranks(&t, channel->via, key->ntargets);
        }
        tb__text_add(&t, "],\"max_in_flight\":%" PRIu32 ",\"buckets\":[", channel->max_in_flight);
        for (size_t b = 0; b < channel->nbuckets; b++, bucket++) {
            tb__text_add(&t, "%s\n {\"group\":%" PRIu32 ",\"total_bytes\":%" PRId64 ",\"chunks\":[", b ? "," : "",
                         bucket->group, bucket->total_bytes);
            for (size_t e = 0; e < bucket->nentries; e++) {
                tb__text_add(&t, e ? ",\n  " : "\n  ");
                add_json_entry(&t, ir, &ir->entries[bucket->first_entry + e]);
            }
            tb__text_add(&t, "]}");
        }
        tb__text_add(&t, "]}");
    }
    tb__text_add(&t, "]}\n");
    return tb__text_take(&t, out);
}
