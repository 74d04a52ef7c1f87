/* Tensors that are moved as the routes of a plan say, one element at a time. The memory of all ranks is this process's;
 * dtypes of whole bytes. */
#ifndef TB_TESTS_ELEMENTS_H
#define TB_TESTS_ELEMENTS_H

#include "asserts.h"
#include "tensorbus/plan.h"

#include <stdbool.h>

/* Element i, in row-major order, of a box of the lengths `len` in what is bound. */
static inline void *element_at(const tb_binding *b, const tb_box *box, const int64_t *len, int64_t i) {
    int64_t at = 0;
    for (int d = b->shape.ndim - 1; d >= 0; d--) {
        at += (box->start[d] + i % len[d]) * b->strides[d];
        i /= len[d];
    }
    return (char *)b->base + b->offset + at * (tb_dtype_bits(b->dtype) / 8);
}

/* `from` and `to` are by rank; targets have numbers below `nranks`. */
static inline void move_elements(const tb_plan *plan, const tb_binding *from, const tb_binding *to, int32_t nranks) {
    tb_routes *routes;
    assert_ok(tb_routes_create(&routes));
    for (int32_t rank = 0; rank < nranks; rank++) {
        assert_ok(tb_plan_routes(plan, rank, 0, routes));
        for (size_t r = 0; r < tb_routes_count(routes); r++) {
            const tb_route *route = tb_routes_at(routes, r);
            bool is_target = false;
            for (uint32_t t = 0; t < route->ntargets; t++)
                is_target |= route->targets[t] == rank;
            for (int64_t i = 0; i < route->nelements && is_target; i++)
                memcpy(element_at(&to[rank], &route->dst, route->len, i),
                       element_at(&from[route->source], &route->src, route->len, i),
                       (size_t)tb_dtype_bits(to[rank].dtype) / 8);
        }
    }
    tb_routes_destroy(routes);
}

#endif
