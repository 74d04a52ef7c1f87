/* The transfer IR inside the library: the memory of a tb_ir, and the steps by which it is made. */
#ifndef TB_IR_IR_H
#define TB_IR_IR_H

#include "base/index.h"
#include "base/mem.h"
#include "tensorbus/plan.h"

enum { TB__BUCKET_ALIGN = 64 };

typedef struct tb__owned_ir {
    tb_ir view; /* the public struct; first, so that it can be cast back */
    size_t
        nshares; /* references besides the first; not thread-safe: those who share it must use one thread or a lock */
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
    lists; /* deduplicated rank lists */
    tb__index by_ranks;
} tb__owned_ir;

/* A copy of the list with the IR's lifetime; equal lists have equal addresses. NULL: no memory. */
const int32_t *tb__ir_ranks(tb__owned_ir *ir, const int32_t *ranks, uint32_t count);

/* Memory in bytes. */
size_t tb__ir_nbytes(const tb_ir *view);

/* Whether the mode, source and targets of a channel's chunks are consistent. */
tb_status tb__chunk_check_key(const tb_chunk *key);

/* Checks an IR from an untrusted source: indices, offsets, ranks, roles, ids and sizes. */
tb_status tb__ir_check(const tb_ir *ir);

/* Adds to hashes[r] a hash of the fields shared with rank r, for ranks below n: equal at both ends if they agree. */
void tb__ir_hash(const tb_ir *ir, uint64_t *hashes, int32_t n);

/* A copy, in which rank r is rank_of(arg, r); NULL: the same. */
tb_status tb__ir_copy(const tb_ir *from, int32_t (*rank_of)(void *arg, int32_t rank), void *arg, tb_ir **out);

/* Adds a reference, which tb_ir_destroy drops. */
void tb__ir_ref(tb_ir *view);

/* Size limits of buckets. */
typedef struct tb__ir_limits {
    int64_t bucket_size; /* in the wire dtype */
    int64_t staged;      /* including contributions; INT64_MAX if nothing is staged */
    int64_t chunk;       /* larger chunks are cut; 0: no limit */
} tb__ir_limits;

/* The most bytes of a bucket of the chunk's channel, so that all contributions fit; and how many times larger than in
 * the wire dtype contributions are. Both depend only on fields that all members of a channel know. */
int64_t tb__chunk_limit(const tb_chunk *chunk, const tb__ir_limits *limits);
int64_t tb__chunk_widening(const tb_chunk *chunk);

/* Adds a chunk, cut into parts that are within the limits. Both ends cut the same way. */
tb_status tb__ir_add(tb__owned_ir *ir, const tb_chunk *chunk, const tb__ir_limits *limits);

/* Sorts the chunks into channels and packs them into buckets. */
tb_status tb__ir_pack(tb__owned_ir *ir, const tb__ir_limits *limits, uint32_t max_in_flight);

/* Whether a broadcast is relayed by some of its targets: two or more are on other hosts than its source. */
bool tb__ir_uses_relays(const tb_chunk *key, const tb_plan_opts *plan);

/* Chooses the relays of broadcasts to other hosts, after tb__ir_pack. */
tb_status tb__ir_fan_out(tb__owned_ir *ir, const tb_plan_opts *plan);

/* Points the view at the arrays. */
void tb__ir_finish(tb__owned_ir *ir);

/* A rank's role in a route. */
typedef struct tb__role {
    tb_chunk_mode mode;
    bool is_source, is_target;
} tb__role;

tb__role tb__route_role(const tb_route *route, int32_t rank);

/* The dtype on the wire; fails if there is none. */
tb_status tb__wire_dtype(tb_dtype src, tb_dtype dst, tb_dtype asked, tb_dtype *out);

#endif
