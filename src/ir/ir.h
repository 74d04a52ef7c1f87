/* The transfer IR inside the library: what tb_ir points into, and the steps by which it is made. */
#ifndef TB_IR_IR_H
#define TB_IR_IR_H

#include "base/index.h"
#include "base/mem.h"
#include "tensorbus/tensorbus.h"

enum { TB__BUCKET_ALIGN = 64 };

typedef struct tb__ir {
    tb_ir view; /* what users see; first, so that it can be cast back */
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

const char *tb__ir_string(tb__ir *ir, const char *string);

/* Sorts the chunks into channels and packs them into buckets. */
tb_status tb__ir_pack(tb__ir *ir, int64_t bucket_size, uint32_t max_in_flight);

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
