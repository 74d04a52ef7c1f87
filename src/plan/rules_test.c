/* Single rules of planning, each by a small case that shows it; the cache; failing allocations. */
#include "plan/plan.h"

#include "../tests/support/random_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static tb_status plan_of(const char *src_text, const char *dst_text, const char *shape_text, tb_dtype dtype,
                         const tb_plan_opts *opts, tb_plan **out) {
    tb_layout *src, *dst;
    tb_shape shape;
    assert_int_equal(tb_layout_parse(src_text, &src), TB_OK);
    assert_int_equal(tb_layout_parse(dst_text, &dst), TB_OK);
    assert_int_equal(tb_shape_parse(shape_text, &shape), TB_OK);
    tb_status status = tb_plan_create(src, dst, &shape, dtype, opts, out);
    tb_layout_destroy(src); /* the plan keeps what it needs */
    tb_layout_destroy(dst);
    return status;
}

/* A good plan's figures; the plan has been checked. */
static tb_plan_stats stats_of(const char *src, const char *dst, const char *shape, tb_dtype dtype,
                              const tb_plan_opts *opts) {
    tb_plan *plan;
    tb_plan_stats stats = {.size = sizeof stats};
    assert_int_equal(plan_of(src, dst, shape, dtype, opts, &plan), TB_OK);
    assert_int_equal(tb_plan_check(plan), TB_OK);
    assert_int_equal(tb_plan_stats_compute(plan, &stats), TB_OK);
    tb_plan_destroy(plan);
    return stats;
}

static void what_can_not_be_planned(void **state) {
    (void)state;
    static const struct {
        const char *src, *dst, *shape;
        tb_dtype dtype;
        tb_status status;
        const char *word;
    } wrong[] = {
        {"mesh=2 place=S1", "mesh=2 place=S0", "8", TB_F32, TB_INVALID, "src: mesh dim 0 shards dim 1"},
        {"mesh=2 place=S0", "mesh=2 place=S3", "8", TB_F32, TB_INVALID, "dst: mesh dim 0 shards dim 3"},
        {"mesh=2 place=Partial(avg)", "mesh=1 place=R", "8", TB_I32, TB_REFUSED, "avg"},
        {"mesh=1 place=R", "mesh=2 place=Partial(avg)", "8", TB_U8, TB_REFUSED, "avg"},
        {"mesh=1 place=R", "mesh=2 place=Partial(product)", "8", TB_F32, TB_REFUSED, "can't be a target"},
        {"mesh=2 place=P", "mesh=1 place=R", "8", TB_BOOL, TB_REFUSED, "no arithmetic"},
        {"mesh=2,2 place=Partial(min),Partial(max)", "mesh=1 place=R", "8", TB_F32, TB_INVALID, "mixed"},
        {"mesh=2 place=Explicit(0, 0-3; 4-8)", "mesh=1 place=R", "8", TB_F32, TB_INVALID, "index 3 of dim 0"},
        {"mesh=2 place=S0", "mesh=1 place=R", "4611686018427387904", TB_BF16, TB_TOO_BIG, "2^62"},
        {"mesh=1 place=R", "mesh=1 place=Explicit(0, 0-4,0-4)", "4,144115188075855872", TB_F64, TB_TOO_BIG,
         "local part"},
        {"mesh=3 place=S0", "mesh=1 place=R", "8", TB_F4E2M1, TB_REFUSED, "inside a byte"},
        {"mesh=1 place=R", "mesh=1 place=R", "7", TB_F4E2M1, TB_REFUSED, "even"},
        {"mesh=1 place=R", "mesh=1 place=R", "8", (tb_dtype)77, TB_INVALID, "dtype"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tb_plan *plan;
        tb_status status = plan_of(wrong[i].src, wrong[i].dst, wrong[i].shape, wrong[i].dtype, NULL, &plan);
        if (status != wrong[i].status || !strstr(tb_error_detail(), wrong[i].word))
            fail_msg("case %zu gave %d '%s', not '%s'", i, status, tb_error_detail(), wrong[i].word);
    }
    int32_t hosts[] = {0, 1, 2};
    tb_plan_opts opts = {.size = sizeof opts, .hosts = hosts, .nhosts = 3};
    tb_plan *plan;
    assert_int_equal(plan_of("mesh=2 place=S0", "mesh=2 place=S0 ranks=2,3", "8", TB_F32, &opts, &plan), TB_INVALID);
    assert_non_null(strstr(tb_error_detail(), "rank 3"));
}

static void what_a_rank_holds_is_not_sent(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=4 place=S0", "mesh=4 place=S0", "64", TB_F32, NULL);
    assert_int_equal(s.total_bytes, 0);
    assert_int_equal(s.local_bytes, 256);
    assert_int_equal(s.nchunks, 4);
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=4 place=S0", "mesh=2 place=S0 ranks=1,2", "64", TB_F32, NULL);
    assert_int_equal(s.local_bytes, 128); /* ranks 1 and 2 keep what they have, and get the other half */
    assert_int_equal(s.total_bytes, 128);
    tb_plan_stats_fini(&s);
}

/* Three replicas serve one receiver: a third each, along the outermost dim that is fine enough. */
static void replicas_share_the_work(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=3 place=R", "mesh=1 place=R ranks=9", "3000,4", TB_F32, NULL);
    assert_int_equal(s.min_max_send, 16000);
    assert_int_equal(s.max_send, 16000);
    assert_int_equal(s.nchunks, 3);
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=3 place=R", "mesh=3 place=R ranks=7,8,9", "3000,4", TB_F32, NULL);
    assert_int_equal(s.nchunks, 3); /* nothing is cut where the balance does not need it */
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=3 place=R", "mesh=1 place=R ranks=9", "2,3000", TB_F32, NULL);
    assert_int_equal(s.max_send, 8000); /* two rows do not divide by three, columns do */
    tb_plan_stats_fini(&s);
}

static void equal_boxes_are_one_broadcast(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=2 place=S0", "mesh=4 place=R ranks=4..7", "64", TB_F32, NULL);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(s.send_bytes[i], 512);
        assert_int_equal(s.egress_bytes[i], 128);
    }
    tb_plan_stats_fini(&s);
    /* Redundant experts: the same rows at other places of other ranks. */
    s = stats_of("mesh=1 place=R", "mesh=2 place=Explicit(0, 0-4,6-8; 6-8,4-6) ranks=4,5", "8", TB_F32, NULL);
    assert_int_equal(s.send_bytes[0], 40);
    assert_int_equal(s.egress_bytes[0], 32);
    tb_plan_stats_fini(&s);
}

/* Cells are numbered row-major in grids whose shape the API returns; a route's mode depends on the rank that asks. */
static void routes_say_their_cells_and_modes(void **state) {
    (void)state;
    tb_plan *plan;
    tb_routes *routes;
    tb_shape src, dst;
    assert_int_equal(plan_of("mesh=2,2 place=S0,S1", "mesh=4 place=S1", "8,8", TB_F32, NULL, &plan), TB_OK);
    tb_plan_grids(plan, &src, NULL);
    tb_plan_grids(plan, NULL, &dst);
    assert_true(src.ndim == 2 && src.dim[0] == 2 && src.dim[1] == 2);
    assert_true(dst.ndim == 2 && dst.dim[0] == 1 && dst.dim[1] == 4);
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    assert_int_equal(tb_plan_routes(plan, 2, 0, routes), TB_OK);
    assert_int_equal(tb_routes_count(routes), 4); /* two that it sends, one of them to itself, and two that it gets */
    for (size_t i = 0; i < tb_routes_count(routes); i++) {
        const tb_route *route = tb_routes_at(routes, i);
        uint64_t row = route->src_cell / (uint64_t)src.dim[1], column = route->src_cell % (uint64_t)src.dim[1];
        assert_true((int32_t)(row * 2 + column) == route->source); /* the mesh has the shape of the grid */
        assert_true((int32_t)route->dst_cell == route->targets[0]);
        assert_int_equal(tb_route_mode(route, 2), route->source == route->targets[0] ? TB_LOCAL : TB_P2P);
    }
    tb_plan_destroy(plan);
    assert_int_equal(plan_of("mesh=2 place=P", "mesh=3 place=R ranks=4..6", "8", TB_F32, NULL, &plan), TB_OK);
    for (int32_t rank = 0; rank < 7; rank += 2) {
        assert_int_equal(tb_plan_routes(plan, rank, 0, routes), TB_OK);
        for (size_t i = 0; i < tb_routes_count(routes); i++) {
            const tb_route *route = tb_routes_at(routes, i);
            bool only_adds = rank == 0 && route->source != 0;
            assert_int_equal(tb_route_mode(route, rank), only_adds ? TB_NONE : TB_BROADCAST);
        }
    }
    tb_plan_destroy(plan);
    tb_routes_destroy(routes);
}

/* Boxes that are contiguous at both ends are one, also where lists repeat or share indices. */
static void neighbours_are_merged(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=1 place=R ranks=9", "mesh=1 place=Explicit(0, 0-4,2-4)", "8", TB_U8, NULL);
    assert_int_equal(s.nchunks, 2);
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=2 place=Explicit(0, 0-8; 6-8)", "mesh=1 place=R ranks=9", "8", TB_U8, NULL);
    assert_int_equal(s.nchunks, 2); /* rank 0 sends its own six and the one it shares in one piece */
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=2 place=StridedShard(0,2)", "mesh=2 place=StridedShard(0,2) ranks=2,3", "8", TB_U8, NULL);
    assert_int_equal(s.nchunks, 2);
    tb_plan_stats_fini(&s);
}

/* 4096 columns do not divide by 3; nobody sends a single column because of that. */
static void slivers_are_not_cut_off(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=2,4 place=R,S0", "mesh=2,3 place=R,S1 ranks=8..13", "4096,4096", TB_BF16, NULL);
    assert_int_equal(s.nchunks, 24);
    assert_true(100 * s.max_send <= 101 * s.min_max_send);
    tb_plan_stats_fini(&s);
}

static void contributions_are_counted_apart(void **state) {
    (void)state;
    tb_plan_stats s = stats_of("mesh=4 place=P", "mesh=4 place=S0 ranks=4..7", "64", TB_F32, NULL);
    for (int32_t i = 0; i < 4; i++) { /* no member does all the work */
        assert_int_equal(s.send_bytes[i], 64);
        assert_int_equal(s.reduce_bytes[i], 192);
    }
    tb_plan_stats_fini(&s);
    s = stats_of("mesh=4 place=P", "mesh=4 place=R ranks=4..7", "64", TB_F32, NULL);
    for (int32_t i = 0; i < 4; i++) { /* each element is reduced once, however many want it */
        assert_int_equal(s.reduce_bytes[i], 192);
        assert_int_equal(s.send_bytes[i], 256);
        assert_int_equal(s.egress_bytes[i], 64);
    }
    tb_plan_stats_fini(&s);
}

static void the_same_host_comes_first(void **state) {
    (void)state;
    const int32_t hosts[] = {0, 1, 0, 1, 0, 1};
    tb_plan_opts opts = {.size = sizeof opts, .hosts = hosts, .nhosts = 6};
    tb_plan *plan;
    tb_routes *routes;
    assert_int_equal(plan_of("mesh=2 place=R", "mesh=4 place=S0 ranks=2..5", "64", TB_F32, &opts, &plan), TB_OK);
    assert_int_equal(tb_plan_check(plan), TB_OK);
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    for (int32_t rank = 2; rank < 6; rank++) {
        assert_int_equal(tb_plan_routes(plan, rank, 0, routes), TB_OK);
        assert_int_equal(tb_routes_count(routes), 1);
        assert_int_equal(tb_routes_at(routes, 0)->source, hosts[rank]);
    }
    tb_routes_destroy(routes);
    tb_plan_destroy(plan);
}

/* Data for ranks without a source on their host leaves the sources' hosts once, and the replicas share the sends. */
static void other_hosts_are_sent_to_once(void **state) {
    (void)state;
    static const struct {
        const char *src, *dst;
        int32_t hosts[8];
        int64_t egress[3], total_bytes; /* in units of 4096, of 64 times as many elements of 4 bytes */
    } cases[] = {
        {"mesh=2 place=R", "mesh=2 place=R ranks=2,3", {0, 0, 1, 1}, {128, 128}, 512},
        {"mesh=2 place=R", "mesh=4 place=R ranks=2..5", {0, 1, 2, 2, 3, 3}, {128, 128}, 1024},
        {"mesh=2 place=R", "mesh=1 place=R ranks=2", {0, 0, 1}, {128, 128}, 256},
        {"mesh=2 place=R", "mesh=4 place=S0 ranks=2..5", {0, 0, 1, 1, 1, 1}, {128, 128}, 256},
        /* Rank 2 has sources beside it, which share what it gets. Rank 3 gets the same half from the line, and ranks 4
         * and 5 the other. */
        {"mesh=2 place=R", "mesh=2,2 place=S0,R ranks=2..5", {0, 0, 0, 1, 1, 1}, {192, 192}, 512},
        /* Rank 0 sends its half to rank 2, which is beside it, and to rank 3; rank 1 sends its own to both at once. */
        {"mesh=2 place=S0", "mesh=2 place=R ranks=2,3", {0, 1, 0, 2}, {256, 128}, 512},
        /* Its last third goes to two ranks, and counts once. */
        {"mesh=3 place=R",
         "mesh=2 place=Explicit(0, 0-196608; 131072-196608) ranks=3,4",
         {0, 0, 0, 1, 1},
         {64, 64, 64},
         256},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_plan_opts opts = {.size = sizeof opts, .hosts = cases[i].hosts, .nhosts = 8};
        tb_plan_stats s = stats_of(cases[i].src, cases[i].dst, "262144", TB_F32, &opts);
        assert_int_equal(s.total_bytes, 4096 * cases[i].total_bytes);
        for (int32_t r = 0; r < 3 && cases[i].egress[r]; r++) {
            if (s.egress_bytes[r] != 4096 * cases[i].egress[r])
                fail_msg("case %zu: %lld bytes leave rank %d, not %lld", i, (long long)s.egress_bytes[r], r,
                         4096 * (long long)cases[i].egress[r]);
        }
        tb_plan_stats_fini(&s);
    }
}

/* A small tensor for other hosts is not cut among all replicas; tensors of a batch take turns among them. */
static void little_is_not_cut_for_other_hosts(void **state) {
    (void)state;
    enum { NREPLICAS = 70, NRANKS = 73 }; /* three targets */
    static const struct {
        const char *shape;
        tb_dtype dtype;
        uint64_t nparts;
    } cases[] = {
        {"", TB_F32, 1},         {"8192", TB_U8, 1},        {"65536", TB_F32, 1},          {"65537", TB_F32, 2},
        {"1048576", TB_BF16, 8}, {"1048578", TB_F4E2M1, 3}, {"33554432", TB_U8, NREPLICAS}};
    int32_t hosts[NRANKS];
    for (int32_t rank = 0; rank < NRANKS; rank++)
        hosts[rank] = rank < NREPLICAS ? rank % 4 : 4 + rank % 2;
    tb_plan_opts opts = {.size = sizeof opts, .hosts = hosts, .nhosts = NRANKS};
    tb_routes *routes;
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tb_plan *plan;
        assert_int_equal(
            plan_of("mesh=70 place=R", "mesh=3 place=R ranks=70..72", cases[i].shape, cases[i].dtype, &opts, &plan),
            TB_OK);
        assert_int_equal(tb_plan_check(plan), TB_OK);
        for (uint64_t rotation = 0; rotation < 2 * NREPLICAS; rotation += 23) {
            uint64_t n = 0;
            for (int32_t rank = 0; rank < NREPLICAS; rank++) {
                uint64_t part = ((uint64_t)rank + 2 * NREPLICAS - rotation) % NREPLICAS;
                assert_int_equal(tb_plan_routes(plan, rank, rotation, routes), TB_OK);
                assert_int_equal(tb_routes_count(routes), part < cases[i].nparts);
                n += tb_routes_count(routes);
            }
            assert_int_equal(n, cases[i].nparts);
            assert_int_equal(tb_plan_routes(plan, 71, rotation, routes), TB_OK);
            assert_int_equal(tb_routes_count(routes), cases[i].nparts);
            for (uint64_t k = 0; k < cases[i].nparts; k++) {
                uint64_t source = (uint64_t)tb_routes_at(routes, k)->source;
                assert_true((source + 2 * NREPLICAS - rotation) % NREPLICAS < cases[i].nparts);
            }
        }
        tb_plan_destroy(plan);
    }
    tb_routes_destroy(routes);
}

/* Tensor i of a batch begins with another replica than tensor i+1. */
static void tensors_take_turns(void **state) {
    (void)state;
    tb_plan *plan;
    tb_routes *routes;
    assert_int_equal(plan_of("mesh=4 place=R", "mesh=1 place=R ranks=9", "", TB_F32, NULL, &plan), TB_OK);
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    bool used[4] = {false};
    for (uint64_t i = 0; i < 4; i++) {
        assert_int_equal(tb_plan_routes(plan, 9, i, routes), TB_OK);
        assert_int_equal(tb_routes_count(routes), 1);
        used[tb_routes_at(routes, 0)->source] = true;
        int32_t source = tb_routes_at(routes, 0)->source;
        for (int32_t rank = 0; rank < 4; rank++) {
            assert_int_equal(tb_plan_routes(plan, rank, i, routes), TB_OK);
            assert_int_equal(tb_routes_count(routes), rank == source);
        }
    }
    assert_true(used[0] && used[1] && used[2] && used[3]);
    tb_routes_destroy(routes);
    tb_plan_destroy(plan);
}

/* The largest sizes and the most ranks, without overflow. */
static void huge_plans(void **state) {
    (void)state;
    tb_plan_stats s =
        stats_of("mesh=3,5 place=R,S0", "mesh=7,2 place=S0,R ranks=20..33", "4611686018427387904", TB_U8, NULL);
    assert_true(s.max_send <= s.min_max_send + s.max_slice);
    tb_plan_stats_fini(&s);
    tb_plan *plan;
    tb_plan_stats stats = {.size = sizeof stats};
    assert_int_equal(plan_of("mesh=1 place=R", "mesh=4 place=R ranks=1..4", "4611686018427387904", TB_U8, NULL, &plan),
                     TB_OK);
    assert_int_equal(tb_plan_check(plan), TB_OK);
    assert_int_equal(tb_plan_stats_compute(plan, &stats), TB_OK);
    assert_int_equal(stats.send_bytes[0], INT64_MAX); /* 2^64 does not fit */
    assert_int_equal(stats.recv_bytes[4], INT64_C(1) << 62);
    tb_plan_stats_fini(&stats);
    tb_plan_destroy(plan);
    tb_routes *routes;
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    assert_int_equal(plan_of("mesh=524288 place=S0", "mesh=524288 place=S0 ranks=524288..1048575", "1048576,1048576",
                             TB_BF16, NULL, &plan),
                     TB_OK);
    assert_int_equal(tb_plan_routes(plan, 1048575, 0, routes), TB_OK);
    assert_int_equal(tb_routes_count(routes), 1);
    assert_int_equal(tb_routes_at(routes, 0)->source, 524287);
    tb_plan_destroy(plan);
    tb_routes_destroy(routes);
}

/* Entries used since then stay, and are found again; all bytes are accounted for. */
static void the_cache_drops_what_is_old(void **state) {
    (void)state;
    enum { PLANS = 40 };
    tb_plan_cache *cache;
    tb_layout *src, *dst[PLANS];
    tb_shape shape = {.ndim = 1, .dim = {PLANS + 1}};
    const tb_plan *plan[PLANS], *again;
    const tb_routes *routes;
    uint64_t hits, misses;
    assert_int_equal(tb_layout_parse("mesh=4 place=S0", &src), TB_OK);
    assert_int_equal(tb_plan_cache_create(&cache), TB_OK);
    assert_int_equal(tb__plan_cache_oldest(cache), UINT64_MAX);
    for (int i = 0; i < PLANS; i++) {
        char text[80];
        snprintf(text, sizeof text, "mesh=2 place=Explicit(0, 0-%d; %d-%d) ranks=8,9", i + 1, i + 1, PLANS + 1);
        assert_int_equal(tb_layout_parse(text, &dst[i]), TB_OK);
        tb__plan_cache_set_time(cache, (uint64_t)i + 1);
        size_t before = tb__plan_cache_nbytes(cache);
        assert_int_equal(tb_plan_cache_get(cache, src, dst[i], &shape, TB_F32, NULL, &plan[i]), TB_OK);
        assert_int_equal(tb_plan_cache_routes(cache, plan[i], 8, 0, &routes), TB_OK);
        assert_true(tb__plan_cache_nbytes(cache) > before);
    }
    tb__plan_cache_set_time(cache, PLANS + 1);
    assert_int_equal(tb_plan_cache_get(cache, src, dst[0], &shape, TB_F32, NULL, &again), TB_OK);
    assert_int_equal(tb_plan_cache_routes(cache, again, 8, 0, &routes), TB_OK);
    assert_int_equal(tb__plan_cache_oldest(cache), 2);
    assert_int_equal(tb__plan_cache_drop(cache, PLANS - 1), PLANS - 2);
    assert_int_equal(tb__plan_cache_oldest(cache), PLANS);
    tb_plan_cache_counters(cache, &hits, &misses);
    for (int i = 0; i < PLANS; i += PLANS - 1) {
        assert_int_equal(tb_plan_cache_get(cache, src, dst[i], &shape, TB_F32, NULL, &again), TB_OK);
        assert_ptr_equal(again, plan[i]);
        assert_int_equal(tb_plan_cache_routes(cache, again, 8, 0, &routes), TB_OK);
        assert_true(tb_routes_count(routes) > 0);
    }
    uint64_t misses_now;
    assert_int_equal(tb_plan_cache_get(cache, src, dst[1], &shape, TB_F32, NULL, &again), TB_OK);
    tb_plan_cache_counters(cache, &hits, &misses_now);
    assert_int_equal(misses_now, misses + 1);
    assert_int_equal(tb__plan_cache_drop(cache, UINT64_MAX), 3);
    assert_int_equal(tb__plan_cache_nbytes(cache), 0);
    tb_plan_cache_destroy(cache);
    for (int i = 0; i < PLANS; i++)
        tb_layout_destroy(dst[i]);
    tb_layout_destroy(src);
}

static void the_cache_shares_plans(void **state) {
    (void)state;
    tb_plan_cache *cache;
    tb_layout *a, *b, *c;
    const tb_plan *first, *second;
    const tb_routes *r1, *r2;
    uint64_t hits, misses;
    tb_shape shape = {2, {64, 32}}, other = {2, {64, 33}};
    assert_int_equal(tb_plan_cache_create(&cache), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=4 place=R", &a), TB_OK);
    assert_int_equal(tb_layout_parse("mesh=4 place=Replicate", &b), TB_OK); /* equal, not the same object */
    assert_int_equal(tb_layout_parse("mesh=2 place=S0 ranks=8,9", &c), TB_OK);
    assert_int_equal(tb_plan_cache_get(cache, a, c, &shape, TB_F32, NULL, &first), TB_OK);
    assert_int_equal(tb_plan_cache_get(cache, b, c, &shape, TB_F32, NULL, &second), TB_OK);
    assert_ptr_equal(first, second);
    assert_int_equal(tb_plan_cache_get(cache, b, c, &other, TB_F32, NULL, &second), TB_OK);
    assert_ptr_not_equal(first, second);
    assert_int_equal(tb_plan_cache_get(cache, b, c, &shape, TB_F16, NULL, &second), TB_OK);
    assert_ptr_not_equal(first, second);
    const int32_t hosts[10] = {0};
    tb_plan_opts opts = {.size = sizeof opts, .hosts = hosts, .nhosts = 10};
    assert_int_equal(tb_plan_cache_get(cache, b, c, &shape, TB_F32, &opts, &second), TB_OK);
    assert_ptr_not_equal(first, second);
    tb_plan_cache_counters(cache, &hits, &misses);
    assert_int_equal(hits, 1);
    assert_int_equal(misses, 4);
    assert_int_equal(tb_plan_cache_routes(cache, first, 8, 1, &r1), TB_OK);
    assert_int_equal(tb_plan_cache_routes(cache, first, 8, 5, &r2), TB_OK); /* four replicas: 1 and 5 are the same */
    assert_ptr_equal(r1, r2);
    assert_int_equal(tb_plan_cache_routes(cache, first, 8, 2, &r2), TB_OK);
    assert_ptr_not_equal(r1, r2);
    tb_layout_destroy(a);
    tb_layout_destroy(b);
    tb_layout_destroy(c);
    tb_plan_cache_destroy(cache);
}

/* Every allocation fails once, in turn: an error is returned, nothing leaks, no output is half made. */
static void failing_allocations(void **state) {
    (void)state;
    static random_case c;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        random_case_make(&c, seed * 77);
        tb_status status = TB_NO_MEMORY;
        for (long n = 0; status == TB_NO_MEMORY; n++) {
            tb_layout *src = NULL, *dst = NULL;
            tb_plan *plan = NULL;
            tb_plan_stats stats = {.size = sizeof stats};
            tb_ir *ir;
            char *text = NULL;
            tb__mem_fail_after(n);
            status = side_layout(&c.src, &src);
            if (status == TB_OK)
                status = side_layout(&c.dst, &dst);
            if (status == TB_OK)
                status = tb_plan_create(src, dst, &c.shape, c.dtype, NULL, &plan);
            if (status == TB_OK)
                status = tb_plan_check(plan);
            if (status == TB_OK && (status = tb_plan_stats_compute(plan, &stats)) == TB_OK)
                tb_plan_stats_fini(&stats);
            tb_tensor_spec spec = {.size = sizeof spec,
                                   .name = "t",
                                   .shape = c.shape,
                                   .src = src,
                                   .dst = dst,
                                   .src_dtype = c.dtype,
                                   .dst_dtype = c.dtype};
            if (status == TB_OK && (status = tb_ir_create(c.dst.ranks[0], &spec, 1, NULL, NULL, &ir)) == TB_OK) {
                status = tb_ir_dump_json(ir, &text);
                tb_ir_destroy(ir);
            }
            tb__mem_fail_after(-1);
            free(text);
            tb_plan_destroy(plan);
            tb_layout_destroy(src);
            tb_layout_destroy(dst);
            assert_true(n < 100000);
        }
        assert_true(status == TB_OK || status == TB_INVALID); /* invalid: a case with a hole */
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_can_not_be_planned),
        cmocka_unit_test(what_a_rank_holds_is_not_sent),
        cmocka_unit_test(replicas_share_the_work),
        cmocka_unit_test(equal_boxes_are_one_broadcast),
        cmocka_unit_test(routes_say_their_cells_and_modes),
        cmocka_unit_test(neighbours_are_merged),
        cmocka_unit_test(slivers_are_not_cut_off),
        cmocka_unit_test(contributions_are_counted_apart),
        cmocka_unit_test(the_same_host_comes_first),
        cmocka_unit_test(other_hosts_are_sent_to_once),
        cmocka_unit_test(little_is_not_cut_for_other_hosts),
        cmocka_unit_test(tensors_take_turns),
        cmocka_unit_test(huge_plans),
        cmocka_unit_test(the_cache_shares_plans),
        cmocka_unit_test(the_cache_drops_what_is_old),
        cmocka_unit_test(failing_allocations),
    };
    return cmocka_run_group_tests_name("plan rules", tests, NULL, NULL);
}
