/* The transfer IR inside the library: what tb_ir points into, and the steps by which it is made. */
#ifndef TB_IR_IR_H
#define TB_IR_IR_H

#include "base/index.h"
#include "base/mem.h"
#include "tensorbus/plan.h"

enum { TB__BUCKET_ALIGN = 64 };

typedef struct tb__ir {
    tb_ir view;     /* what users see; first, so that it can be cast back */
    size_t nshares; /* who has it besides its first owner; whoever shares it sees to it that only one thread does */
    tb__arena arena;
    TB_VEC(const char *) names;
    TB_VEC(tb_chunk) chunks;
    TB_VEC(tb_bucket_entry) entries;
    TB_VEC(tb_bucket) buckets;
    TB_VEC(tb_channel) channels;
    TB_VEC(struct tb__rank_list {
        uint32_t count;
        const int32_t *ranks;
    })
    lists; /* each kept once */
    tb__index by_ranks;
} tb__ir;

/* A copy of the list that lives as long as the IR; equal lists have equal addresses. NULL if memory is short. */
const int32_t *tb__ir_ranks(tb__ir *ir, const int32_t *ranks, uint32_t count);

/* Memory that it takes. */
size_t tb__ir_nbytes(const tb_ir *view);

/* One owner more: so many have to destroy it. */
void tb__ir_ref(tb_ir *view);

/* What bounds a bucket. */
typedef struct tb__ir_limits {
    int64_t bucket_size; /* in the wire dtype */
    int64_t staged;      /* with all that a rank holds for it; INT64_MAX where nothing is staged */
    int64_t chunk;       /* larger chunks are cut, also where more can be staged; 0: no limit of its own */
} tb__ir_limits;

/* The most bytes that buckets of this chunk's channel may have, so that all contributions find room, and how many times
 * larger than in the wire dtype chunks count towards it. Both follow from what all members of a channel know. */
int64_t tb__chunk_limit(const tb_chunk *chunk, const tb__ir_limits *limits);
int64_t tb__chunk_widening(const tb_chunk *chunk);

/* Adds a chunk, cut into parts that are within the limits. Both ends cut alike. */
tb_status tb__ir_add(tb__ir *ir, const tb_chunk *chunk, const tb__ir_limits *limits);

/* Sorts the chunks into channels and packs them into buckets. */
tb_status tb__ir_pack(tb__ir *ir, const tb__ir_limits *limits, uint32_t max_in_flight);

/* Whether a broadcast reaches some of its targets through others: two or more are on other hosts than its source. */
bool tb__ir_hands_on(const tb_chunk *key, const tb_plan_opts *plan);

/* Finds the ways of broadcasts to other hosts, once the buckets are there. */
tb_status tb__ir_fan_out(tb__ir *ir, const tb_plan_opts *plan);

/* Points the view at the arrays. */
void tb__ir_finish(tb__ir *ir);

/* What a rank does in a route. */
typedef struct tb__role {
    tb_transport_kind transport;
    bool is_source, is_target;
} tb__role;

tb__role tb__route_role(const tb_route *route, int32_t rank);

/* The dtype on the wire, or why there can be none. */
tb_status tb__wire_dtype(tb_dtype src, tb_dtype dst, tb_dtype asked, tb_dtype *out);

#endif
