/* How long planning takes. Each case prints its figure, what it must not exceed, and whether it does; the exit status
 * tells too. Times are of one thread. */
#include "measure.h"

#include "tensorbus/plan.h"

#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void must(tb_status status) {
    if (status != TB_OK) {
        fprintf(stderr, "bench/plan: %s: %s\n", tb_status_string(status), tb_error_detail());
        exit(1);
    }
}

static tb_layout *layout(const char *text) {
    tb_layout *l;
    must(tb_layout_parse(text, &l));
    return l;
}

static bool decision(const char *what, double value, double limit, const char *unit) {
    bool ok = value <= limit;
    printf("  %-58s %9.4f %-4s (at most %g) %s\n", what, value, unit, limit, ok ? "ok" : "TOO SLOW");
    return ok;
}

/* Transfers that the routes of one rank receive. */
static int64_t receives(const tb_routes *routes, int32_t rank) {
    int64_t n = 0;
    for (size_t i = 0; i < tb_routes_count(routes); i++) {
        const tb_route *route = tb_routes_at(routes, i);
        for (uint32_t t = 0; t < route->ntargets; t++)
            n += route->targets[t] == rank;
    }
    return n;
}

enum { PARAMS = 500, REPEATS = 5 };

/* All ranks' routes of one parameter; counts transfers at the receivers. */
static int64_t plan_all(const tb_plan *plan, tb_plan_cache *cache, tb_routes *routes) {
    int64_t n = 0;
    for (int32_t rank = 0; rank < 512; rank++) {
        const tb_routes *list = routes;
        if (cache)
            must(tb_plan_cache_routes(cache, plan, rank, 0, &list));
        else
            must(tb_plan_routes(plan, rank, 0, routes));
        n += receives(list, rank);
    }
    return n;
}

static bool whole_world(void) {
    printf("(a) all ranks' plans, 256 to 256 ranks, tp8 to tp4, %d parameters of distinct shapes\n", PARAMS);
    tb_layout *src[2] = {layout("mesh=32,8 place=R,S0"), layout("mesh=32,8 place=R,S1")};
    tb_layout *dst[2] = {layout("mesh=64,4 place=R,S0 ranks=256..511"), layout("mesh=64,4 place=R,S1 ranks=256..511")};
    tb_routes *routes;
    must(tb_routes_create(&routes));
    double cold[REPEATS], warm[REPEATS];
    int64_t transfers = 0;
    for (int r = 0; r < REPEATS; r++) {
        transfers = 0;
        double start = now();
        for (int i = 0; i < PARAMS; i++) {
            tb_shape shape = {2, {1024 + 8 * i, 2048 + 16 * i}};
            tb_plan *plan;
            must(tb_plan_create(src[i % 2], dst[i % 2], &shape, TB_BF16, NULL, &plan));
            transfers += plan_all(plan, NULL, routes);
            tb_plan_destroy(plan);
        }
        cold[r] = now() - start;
        tb_plan_cache *cache;
        must(tb_plan_cache_create(&cache));
        for (int round = 0; round < 2; round++) {
            start = now();
            for (int i = 0; i < PARAMS; i++) {
                tb_shape shape = {2, {1024 + 8 * i, 2048 + 16 * i}};
                const tb_plan *plan;
                must(tb_plan_cache_get(cache, src[i % 2], dst[i % 2], &shape, TB_BF16, NULL, &plan));
                plan_all(plan, cache, routes);
            }
            warm[r] = now() - start;
        }
        tb_plan_cache_destroy(cache);
    }
    qsort(cold, REPEATS, sizeof *cold, compare_doubles);
    qsort(warm, REPEATS, sizeof *warm, compare_doubles);
    printf("  %" PRId64 " transfers; %.0f ns each; again from the cache %.4f s\n", transfers,
           1e9 * cold[REPEATS / 2] / (double)transfers, warm[REPEATS / 2]);
    bool ok = decision("cache off, median of 5", cold[REPEATS / 2], 0.27, "s");
    tb_routes_destroy(routes);
    for (int i = 0; i < 2; i++) {
        tb_layout_destroy(src[i]);
        tb_layout_destroy(dst[i]);
    }
    return ok;
}

enum { LAYERS = 61, EXPERTS = 384, STAGES = 8, EP = 32, ENGINES = 8, WORLD = 1024, PER_LAYER = 3 * EXPERTS + 6 };

/* A mixture-of-experts model of about 1T parameters. Source: 8 pipeline stages of 128 ranks; experts over ep32, each
 * expert sharded over 4 ranks; attention tp8 x dp16. Target: 8 engines of 128 ranks, experts over ep128, attention
 * tp8 x dp16. */
typedef struct model {
    tb_layout *expert_src[STAGES][EP], *expert_dst[EXPERTS / 3];
    tb_layout *attention_src[STAGES][2], *attention_dst[2];
    tb_tensor_spec *tensors;
    size_t ntensors;
} model;

static void add(model *m, const char *name, int64_t rows, int64_t cols, const tb_layout *src, const tb_layout *dst) {
    m->tensors[m->ntensors++] = (tb_tensor_spec){.size = sizeof(tb_tensor_spec),
                                                 .name = strdup(name),
                                                 .shape = {2, {rows, cols}},
                                                 .src = src,
                                                 .dst = dst,
                                                 .src_dtype = TB_BF16,
                                                 .dst_dtype = TB_BF16};
}

static void make_model(model *m) {
    char text[512];
    memset(m, 0, sizeof *m);
    for (int s = 0; s < STAGES; s++) {
        for (int e = 0; e < EP; e++) {
            int base = s * 128 + e;
            snprintf(text, sizeof text, "mesh=4 place=S0 ranks=%d,%d,%d,%d", base, base + 32, base + 64, base + 96);
            m->expert_src[s][e] = layout(text);
        }
        for (int d = 0; d < 2; d++) {
            snprintf(text, sizeof text, "mesh=16,8 place=R,S%d ranks=%d..%d", d, s * 128, s * 128 + 127);
            m->attention_src[s][d] = layout(text);
        }
    }
    for (int e = 0; e < EXPERTS / 3; e++) {
        int n = snprintf(text, sizeof text, "mesh=8 place=R ranks=");
        for (int i = 0; i < ENGINES; i++)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%d", i ? "," : "", WORLD + i * 128 + e);
        m->expert_dst[e] = layout(text);
    }
    for (int d = 0; d < 2; d++) {
        snprintf(text, sizeof text, "mesh=8,16,8 place=R,R,S%d ranks=1024..2047", d);
        m->attention_dst[d] = layout(text);
    }
    static const struct {
        const char *name;
        int64_t rows, cols;
        int dim;
    } attention[] = {{"q_a_proj", 1536, 7168, 0},  {"q_b_proj", 12288, 1536, 0}, {"kv_a_proj", 576, 7168, 0},
                     {"kv_b_proj", 16384, 512, 0}, {"o_proj", 7168, 8192, 1},    {"gate", 384, 7168, 0}};
    m->tensors = calloc((size_t)LAYERS * PER_LAYER, sizeof *m->tensors);
    for (int l = 0; l < LAYERS; l++) {
        int stage = l * STAGES / LAYERS;
        for (int e = 0; e < EXPERTS; e++) {
            for (int w = 1; w <= 3; w++) {
                snprintf(text, sizeof text, "layers.%d.experts.%d.w%d", l, e, w);
                add(m, text, w == 2 ? 7168 : 2048, w == 2 ? 2048 : 7168, m->expert_src[stage][e * EP / EXPERTS],
                    m->expert_dst[e / 3]);
            }
        }
        for (size_t i = 0; i < sizeof attention / sizeof *attention; i++) {
            snprintf(text, sizeof text, "layers.%d.attention.%s", l, attention[i].name);
            add(m, text, attention[i].rows, attention[i].cols, m->attention_src[stage][attention[i].dim],
                m->attention_dst[attention[i].dim]);
        }
    }
}

static void free_model(model *m) {
    for (int s = 0; s < STAGES; s++) {
        for (int e = 0; e < EP; e++)
            tb_layout_destroy(m->expert_src[s][e]);
        tb_layout_destroy(m->attention_src[s][0]);
        tb_layout_destroy(m->attention_src[s][1]);
    }
    for (int e = 0; e < EXPERTS / 3; e++)
        tb_layout_destroy(m->expert_dst[e]);
    tb_layout_destroy(m->attention_dst[0]);
    tb_layout_destroy(m->attention_dst[1]);
    for (size_t i = 0; i < m->ntensors; i++)
        free((char *)m->tensors[i].name);
    free(m->tensors);
}

/* The rank with the most routes over the whole model. */
static int32_t find_busiest(const model *m, int64_t *most) {
    static int64_t count[2 * WORLD];
    tb_plan_cache *cache;
    must(tb_plan_cache_create(&cache));
    for (size_t i = 0; i < m->ntensors; i++) {
        const tb_tensor_spec *t = &m->tensors[i];
        const tb_plan *plan;
        const tb_routes *routes;
        must(tb_plan_cache_get(cache, t->src, t->dst, &t->shape, t->src_dtype, NULL, &plan));
        const tb_layout *sides[2] = {t->src, t->dst};
        for (int s = 0; s < 2; s++) {
            for (int32_t j = 0; j < tb_layout_nranks(sides[s]); j++) {
                int32_t rank = tb_layout_rank_at(sides[s], j);
                must(tb_plan_cache_routes(cache, plan, rank, 0, &routes));
                count[rank] += (int64_t)tb_routes_count(routes);
            }
        }
    }
    tb_plan_cache_destroy(cache);
    int32_t best = 0;
    for (int32_t r = 1; r < 2 * WORLD; r++)
        best = count[r] > count[best] ? r : best;
    *most = count[best];
    return best;
}

static bool big_model(void) {
    model m;
    make_model(&m);
    double parameters = 0;
    for (size_t i = 0; i < m.ntensors; i++)
        parameters += (double)m.tensors[i].shape.dim[0] * (double)m.tensors[i].shape.dim[1];
    printf("(b) busiest of 1,024 to 1,024 ranks, mixture of experts, %.2fT parameters, %zu tensors\n",
           parameters / 1e12, m.ntensors);
    const tb_layout *shown[] = {m.expert_src[3][5], m.expert_dst[20], m.attention_src[3][0], m.attention_dst[0]};
    const char *const what[] = {"expert 60, source", "expert 60, target", "attention, source", "attention, target"};
    for (int i = 0; i < 4; i++) {
        char *text;
        must(tb_layout_format(shown[i], &text));
        printf("  %-18s %s\n", what[i], text);
        free(text);
    }
    int64_t most;
    int32_t rank = find_busiest(&m, &most);
    malloc_trim(0);
    double times[REPEATS];
    size_t nbytes = 0, nchunks = 0, nbuckets = 0;
    for (int r = 0; r < REPEATS; r++) {
        size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
        tb_plan_cache *cache;
        tb_ir *ir;
        double start = now();
        must(tb_plan_cache_create(&cache));
        must(tb_ir_create(rank, m.tensors, m.ntensors, cache, NULL, &ir));
        times[r] = now() - start;
        nbytes = mallinfo2().uordblks + mallinfo2().hblkhd - before;
        nchunks = ir->nchunks;
        nbuckets = ir->nbuckets;
        tb_ir_destroy(ir);
        tb_plan_cache_destroy(cache);
    }
    qsort(times, REPEATS, sizeof *times, compare_doubles);
    printf("  rank %" PRId32 " has most to do: %zu chunks in %zu buckets\n", rank, nchunks, nbuckets);
    bool ok = decision("plans, chunks, ids and buckets, median of 5", times[REPEATS / 2], 0.3, "s");
    ok &= decision("memory held", (double)nbytes / (1 << 20), 100, "MiB");
    free_model(&m);
    return ok;
}

/* Time of one rank's plan, over a sample of ranks. */
static double per_rank(const char *src_text, const char *dst_text, int64_t rows, int32_t nranks) {
    tb_layout *src = layout(src_text), *dst = layout(dst_text);
    tb_routes *routes;
    must(tb_routes_create(&routes));
    double times[REPEATS];
    for (int r = 0; r < REPEATS; r++) {
        double start = now();
        int n = 0;
        for (int repeat = 0; repeat < 40; repeat++) {
            for (int32_t i = 0; i < 64; i++, n++) {
                tb_shape shape = {2, {rows, 1024 + repeat}};
                tb_plan *plan;
                must(tb_plan_create(src, dst, &shape, TB_BF16, NULL, &plan));
                must(tb_plan_routes(plan, (int32_t)((int64_t)i * nranks / 64), 0, routes));
                tb_plan_destroy(plan);
            }
        }
        times[r] = (now() - start) / n;
    }
    qsort(times, REPEATS, sizeof *times, compare_doubles);
    tb_routes_destroy(routes);
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
    return times[REPEATS / 2];
}

/* Layout pairs that give each rank the same to do in any world of n ranks. */
static bool growth(void) {
    static const struct {
        const char *what;
        int src_tp, dst_tp; /* 0: one mesh dim, else a replicated one before it */
        const char *src, *dst;
        bool same_ranks;
    } cases[] = {
        {"tp8 x dp to tp4 x dp, other ranks", 8, 4, "R,S0", "R,S0", false},
        {"tp8 x dp to tp4 x dp, same ranks", 8, 4, "R,S0", "R,S0", true},
        {"Shard(0) to StridedShard(0,2), other ranks", 0, 0, "S0", "StridedShard(0,2)", false},
        {"all replicated to Shard(0), other ranks", 0, 0, "R", "S0", false},
        {"all replicated to Shard(0), same ranks", 0, 0, "R", "S0", true},
    };
    bool ok = true;
    printf("(c) one rank's plan of a new shape, as the world grows from 64 to 4,096 ranks\n");
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double first = 0, last = 0;
        printf("  %-44s", cases[c].what);
        for (int32_t n = 64; n <= 4096; n *= 4) {
            char src[128], dst[128], src_mesh[32], dst_mesh[32];
            int32_t base = cases[c].same_ranks ? 0 : n;
            snprintf(src_mesh, sizeof src_mesh, cases[c].src_tp ? "%d,8" : "%d", cases[c].src_tp ? n / 8 : n);
            snprintf(dst_mesh, sizeof dst_mesh, cases[c].dst_tp ? "%d,4" : "%d", cases[c].dst_tp ? n / 4 : n);
            snprintf(src, sizeof src, "mesh=%s place=%s", src_mesh, cases[c].src);
            snprintf(dst, sizeof dst, "mesh=%s place=%s ranks=%d..%d", dst_mesh, cases[c].dst, base, base + n - 1);
            double t = per_rank(src, dst, cases[c].src_tp ? 4096 : 64 * (int64_t)n, base + n);
            printf(" %7.2f", 1e6 * t);
            first = n == 64 ? t : first;
            last = t;
        }
        printf(" us\n");
        ok &= decision("  4,096 ranks over 64 ranks", last / first, 2, "x");
    }
    return ok;
}

int main(void) {
    bool ok = whole_world();
    ok &= big_model();
    ok &= growth();
    return ok ? 0 : 1;
}
