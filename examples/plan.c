/* Plans one weight from four ranks to six, and prints what rank 6 receives, as rank 6 would work it out by itself. */
#include <tensorbus/plan.h>

#include <inttypes.h>
#include <stdio.h>

int main(void) {
    tb_layout *src = NULL, *dst = NULL;
    tb_plan *plan = NULL;
    tb_routes *routes = NULL;
    tb_shape shape = {.ndim = 2, .dim = {6144, 4096}};
    bool failed = tb_layout_parse("mesh=2,2 place=Shard(0),Shard(1)", &src) ||
                  tb_layout_parse("mesh=2,3 place=Replicate,Shard(0) ranks=1,4..8", &dst) ||
                  tb_plan_create(src, dst, &shape, TB_BF16, NULL, &plan) || tb_routes_create(&routes) ||
                  tb_plan_routes(plan, 6, 0, routes);
    if (failed)
        fprintf(stderr, "%s\n", tb_error_detail());
    for (size_t i = 0; !failed && i < tb_routes_count(routes); i++) {
        const tb_route *r = tb_routes_at(routes, i);
        printf("from rank %" PRId32 ": %" PRId64 " x %" PRId64 " elements, to row %" PRId64 ", column %" PRId64 "\n",
               r->source, r->len[0], r->len[1], r->dst.start[0], r->dst.start[1]);
    }
    tb_routes_destroy(routes);
    tb_plan_destroy(plan);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    return failed;
}
