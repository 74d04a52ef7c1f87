/* Plans against brute force: thousands of random layout pairs, each plan carried out element by element. */
#include "plan/plan.h"

#include "../tests/support/random_case.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ELEMENTS = 4096, POISON = -7, ZERO = -1 };

/* One rank's part: per dim its indices, and per element the global element it holds. */
typedef struct part {
    int32_t rank;
    int64_t shape[TB_MAX_DIMS];
    int64_t nelements;
    int64_t element[MAX_ELEMENTS];
    int64_t coord[TB_MAX_DIMS]; /* in the mesh */
} part;

static part parts[2][CASE_MAX_RANKS];

static void fill_part(const side *s, const tb_shape *shape, int32_t m, part *p) {
    static naive_list list[TB_MAX_DIMS];
    p->rank = s->ranks[m];
    mesh_coords(s, m, p->coord);
    p->nelements = 1;
    for (int d = 0; d < shape->ndim; d++) {
        naive_local(s, shape, m, d, &list[d]);
        p->shape[d] = list[d].count;
        p->nelements *= list[d].count;
    }
    assert_true(p->nelements <= MAX_ELEMENTS);
    for (int64_t i = 0; i < p->nelements; i++) {
        int64_t left = i, element = 0, scale = 1;
        for (int d = shape->ndim - 1; d >= 0; d--) {
            element += list[d].index[left % list[d].count] * scale;
            scale *= shape->dim[d];
            left /= list[d].count;
        }
        p->element[i] = element;
    }
}

static part *part_of(int which, const side *s, int32_t rank) {
    for (int32_t m = 0; m < s->nranks; m++) {
        if (parts[which][m].rank == rank)
            return &parts[which][m];
    }
    return NULL;
}

/* Whether the target holds zeros: away from the origin of a Partial(sum) mesh dim. */
static bool holds_zeros(const side *s, const part *p) {
    for (int i = 0; i < s->mesh_ndim; i++) {
        if (s->place[i].kind == TB_PARTIAL && s->place[i].op == TB_SUM && p->coord[i] != 0)
            return true;
    }
    return false;
}

static bool holds(const part *p, int64_t element) {
    for (int64_t i = 0; i < p->nelements; i++) {
        if (p->element[i] == element)
            return true;
    }
    return false;
}

/* An element that a target wants and no source holds. */
static bool has_hole(const random_case *c, int64_t nelements) {
    for (int64_t e = 0; e < nelements; e++) {
        bool held = false, wanted = false;
        for (int32_t m = 0; m < c->src.nranks && !held; m++)
            held = holds(&parts[0][m], e);
        for (int32_t m = 0; m < c->dst.nranks && !held && !wanted; m++)
            wanted = holds(&parts[1][m], e);
        if (wanted)
            return true;
    }
    return false;
}

static int64_t flat(const tb_box *box, const int64_t *len, const int64_t *shape, int ndim, int64_t i) {
    int64_t offset = 0, scale = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        int64_t x = box->start[d] + i % len[d];
        assert_in_range(x, 0, shape[d] - 1);
        offset += x * scale;
        scale *= shape[d];
        i /= len[d];
    }
    return offset;
}

/* The contributors must be all ranks that differ from the source in Partial mesh dims only, in mesh order. */
static void check_contributors(const random_case *c, const tb_route *route) {
    const part *source = part_of(0, &c->src, route->source);
    uint32_t n = 0;
    bool is_partial = false;
    for (int32_t m = 0; m < c->src.nranks; m++) {
        const part *p = &parts[0][m];
        bool same = true;
        for (int i = 0; i < c->src.mesh_ndim; i++) {
            is_partial |= c->src.place[i].kind == TB_PARTIAL;
            same &= c->src.place[i].kind == TB_PARTIAL || p->coord[i] == source->coord[i];
        }
        if (same && is_partial) {
            assert_true(n < route->ncontributors);
            assert_int_equal(route->contributors[n++], p->rank);
        }
    }
    assert_int_equal(n, route->ncontributors);
}

static bool is_target(const tb_route *route, int32_t rank) {
    bool mine = false;
    for (uint32_t t = 0; t < route->ntargets; t++)
        mine |= route->targets[t] == rank;
    return mine;
}

/* Carries out the routes of every target rank and compares with what the layouts say. */
static void carry_out(const random_case *c, const tb_plan *plan, uint64_t rotation, tb_routes *routes) {
    static int64_t got[MAX_ELEMENTS];
    int ndim = c->shape.ndim;
    for (int32_t m = 0; m < c->dst.nranks; m++) {
        const part *target = &parts[1][m];
        for (int64_t i = 0; i < target->nelements; i++)
            got[i] = POISON;
        assert_int_equal(tb_plan_routes(plan, target->rank, rotation, routes), TB_OK);
        for (size_t r = 0; r < tb_routes_count(routes); r++) {
            const tb_route *route = tb_routes_at(routes, r);
            if (!is_target(route, target->rank))
                continue;
            const part *source = NULL;
            if (route->source != TB_NO_RANK) {
                source = part_of(0, &c->src, route->source);
                assert_non_null(source);
                check_contributors(c, route);
            }
            for (int64_t i = 0; i < route->nelements; i++) {
                int64_t to = flat(&route->dst, route->len, target->shape, ndim, i);
                assert_int_equal(got[to], POISON); /* nothing is written twice */
                got[to] = source ? source->element[flat(&route->src, route->len, source->shape, ndim, i)] : ZERO;
            }
        }
        for (int64_t i = 0; i < target->nelements; i++)
            assert_int_equal(got[i], holds_zeros(&c->dst, target) ? ZERO : target->element[i]);
    }
}

static bool has_source_on(const random_case *c, int64_t element, const int32_t *hosts, int32_t host) {
    for (int32_t m = 0; m < c->src.nranks; m++) {
        if (hosts[parts[0][m].rank] == host && holds(&parts[0][m], element))
            return true;
    }
    return false;
}

/* How many times an element has to be sent: once for each receiver; with hosts, once for all that have no source on
 * their host. */
static int64_t count_sends(const random_case *c, int64_t element, const int32_t *hosts) {
    int64_t wanted = 0;
    for (int32_t m = 0; m < c->dst.nranks; m++) {
        const part *p = &parts[1][m], *as_source = part_of(0, &c->src, p->rank);
        if (holds_zeros(&c->dst, p) || (as_source && holds(as_source, element)))
            continue;
        if (hosts && holds(p, element) && !has_source_on(c, element, hosts, hosts[p->rank]))
            return 1;
        for (int64_t i = 0; !hosts && i < p->nelements; i++)
            wanted += p->element[i] == element;
    }
    return wanted;
}

/* Elements with the same set of holders. */
static struct {
    uint64_t holders, senders; /* senders: to other hosts */
    int64_t nbytes;            /* to be sent */
} set[MAX_ELEMENTS];
static int64_t ngroups, group_of[MAX_ELEMENTS];

static void find_groups(const random_case *c, int64_t nelements, const int32_t *hosts) {
    ngroups = 0;
    for (int64_t e = 0; e < nelements; e++) {
        uint64_t holders = 0;
        for (int32_t m = 0; m < c->src.nranks; m++)
            holders |= (uint64_t)holds(&parts[0][m], e) << m;
        int64_t g = 0;
        while (g < ngroups && set[g].holders != holders)
            g++;
        if (g == ngroups) {
            set[ngroups].holders = holders;
            set[ngroups].senders = 0;
            set[ngroups++].nbytes = 0;
        }
        group_of[e] = g;
        set[g].nbytes += count_sends(c, e, hosts) * tb_dtype_bits(c->dtype) / 8;
    }
}

/* The bound: the bytes that a group must send, divided by its members; or the smallest part, if that is larger. Also
 * finds whether groups have members in common, which happens only with Explicit sources. */
static int64_t naive_bound(int64_t least, bool *groups_meet) {
    int64_t bound = 0;
    *groups_meet = false;
    for (int64_t g = 0; g < ngroups; g++) {
        int64_t members = __builtin_popcountll(set[g].holders), nbytes = set[g].nbytes;
        if (members) {
            int64_t share = (nbytes + members - 1) / members, smallest = nbytes < least ? nbytes : least;
            share = share > smallest ? share : smallest;
            bound = share > bound ? share : bound;
        }
        for (int64_t h = 0; h < g; h++)
            *groups_meet |= (set[g].holders & set[h].holders) != 0;
    }
    return bound;
}

static void check_stats(const random_case *c, const tb_plan *plan, int64_t nelements) {
    tb_plan_stats stats = {.size = sizeof stats};
    bool groups_meet;
    assert_int_equal(tb_plan_stats_compute(plan, &stats), TB_OK);
    find_groups(c, nelements, NULL);
    int64_t bound = naive_bound(0, &groups_meet), sent = 0, received = 0;
    assert_int_equal(stats.min_max_send, bound);
    for (int32_t i = 0; i < stats.nranks; i++) {
        sent += stats.send_bytes[i];
        received += stats.recv_bytes[i];
        assert_true(stats.send_bytes[i] <= stats.max_send);
    }
    assert_int_equal(sent, received);
    assert_int_equal(sent, stats.total_bytes);
    if (!groups_meet)
        assert_true(stats.max_send <= stats.min_max_send + stats.max_slice);
    tb_plan_stats_fini(&stats);
}

/* Whether some target holds an element at two places, which are then served one by one. */
static bool has_repeats(const random_case *c) {
    for (int32_t m = 0; m < c->dst.nranks; m++) {
        const part *p = &parts[1][m];
        for (int64_t i = 0; i < p->nelements; i++) {
            for (int64_t j = 0; j < i; j++) {
                if (p->element[i] == p->element[j])
                    return true;
            }
        }
    }
    return false;
}

/* Each element for other hosts is sent by one rank, in one broadcast, to all ranks without a source of it on their
 * host. The members of a group share the sends, but in parts no smaller than the minimum. */
static void check_once(const random_case *c, const tb_plan *plan, const int32_t *hosts, uint64_t rotation,
                       tb_routes *routes) {
    static uint64_t reached[MAX_ELEMENTS]; /* the targets of the broadcast, by number in the mesh */
    static int32_t sender[MAX_ELEMENTS];
    int64_t nelements = 1, most = 0;
    for (int d = 0; d < c->shape.ndim; d++)
        nelements *= c->shape.dim[d];
    memset(reached, 0, (size_t)nelements * sizeof *reached);
    find_groups(c, nelements, hosts);
    for (int32_t m = 0; m < c->src.nranks; m++) {
        const part *source = &parts[0][m];
        int64_t sent = 0;
        assert_int_equal(tb_plan_routes(plan, source->rank, rotation, routes), TB_OK);
        for (size_t i = 0; i < tb_routes_count(routes); i++) {
            const tb_route *route = tb_routes_at(routes, i);
            uint64_t targets = 0;
            for (uint32_t t = 0; t < route->ntargets && route->source == source->rank; t++) {
                if (hosts[route->targets[t]] != hosts[source->rank])
                    targets |= (uint64_t)1 << (part_of(1, &c->dst, route->targets[t]) - parts[1]);
            }
            for (int64_t e = 0; targets && e < route->nelements; e++) {
                int64_t element = source->element[flat(&route->src, route->len, source->shape, c->shape.ndim, e)];
                assert_int_equal(reached[element], 0); /* it leaves no host a second time */
                reached[element] = targets;
                sender[element] = source->rank;
                set[group_of[element]].senders |= (uint64_t)1 << m;
                sent++;
            }
        }
        most = sent > most ? sent : most;
    }
    for (int64_t e = 0; e < nelements; e++) {
        uint64_t far = 0;
        for (int32_t m = 0; m < c->dst.nranks; m++) {
            const part *p = &parts[1][m];
            if (!holds_zeros(&c->dst, p) && holds(p, e) && !has_source_on(c, e, hosts, hosts[p->rank]))
                far |= (uint64_t)1 << m;
        }
        assert_int_equal(reached[e], far);
    }
    for (int32_t m = 0; m < c->dst.nranks; m++) { /* the receiver knows the sender */
        const part *target = &parts[1][m];
        assert_int_equal(tb_plan_routes(plan, target->rank, rotation, routes), TB_OK);
        for (size_t i = 0; i < tb_routes_count(routes); i++) {
            const tb_route *route = tb_routes_at(routes, i);
            if (route->source == TB_NO_RANK || hosts[route->source] == hosts[target->rank] ||
                !is_target(route, target->rank))
                continue;
            for (int64_t e = 0; e < route->nelements; e++) {
                int64_t at = flat(&route->dst, route->len, target->shape, c->shape.ndim, e);
                assert_int_equal(sender[target->element[at]], route->source);
            }
        }
    }
    for (int64_t g = 0; g < ngroups; g++)
        assert_true(__builtin_popcountll(set[g].senders) <=
                    (set[g].nbytes + tb__min_part_nbytes - 1) / tb__min_part_nbytes);
    tb_plan_stats stats = {.size = sizeof stats};
    bool groups_meet;
    assert_int_equal(tb_plan_stats_compute(plan, &stats), TB_OK);
    int64_t bound = naive_bound(tb__min_part_nbytes, &groups_meet), itemsize = tb_dtype_bits(c->dtype) / 8;
    if (!groups_meet) /* no cut divides an element */
        assert_true(most * itemsize <= bound + (stats.max_slice > itemsize ? stats.max_slice : itemsize));
    tb_plan_stats_fini(&stats);
}

/* A host map: ranks that have a source on their host get nothing from elsewhere. */
static void check_hosts(const random_case *c, const tb_layout *src, const tb_layout *dst, rng *r, tb_routes *routes) {
    int32_t hosts[128];
    int64_t nhosts = rng_range(r, 2, 8);
    for (size_t i = 0; i < 128; i++)
        hosts[i] = (int32_t)rng_range(r, 0, nhosts - 1);
    if (rng_range(r, 0, 1)) { /* sources on few hosts, so that others have none */
        for (int32_t m = 0; m < c->src.nranks; m++)
            hosts[parts[0][m].rank] = (int32_t)rng_range(r, 0, 1);
    }
    /* Lines of a few bytes are cut, too: as finely as possible, or so that some have fewer parts than members. */
    tb__min_part_nbytes = (int64_t[]){1, rng_range(r, 2, 64), rng_range(r, 64, 2048)}[rng_range(r, 0, 2)];
    tb_plan_opts opts = {.size = sizeof opts, .hosts = hosts, .nhosts = 128};
    tb_plan *plan;
    assert_int_equal(tb_plan_create(src, dst, &c->shape, c->dtype, &opts, &plan), TB_OK);
    assert_int_equal(tb_plan_check(plan), TB_OK);
    uint64_t rotation = rng_next(r) % 5;
    carry_out(c, plan, rotation, routes);
    bool is_partial = false;
    for (int i = 0; i < c->src.mesh_ndim; i++)
        is_partial |= c->src.place[i].kind == TB_PARTIAL;
    if (!is_partial && !has_repeats(c))
        check_once(c, plan, hosts, rotation, routes);
    for (int32_t m = 0; m < c->dst.nranks; m++) {
        const part *target = &parts[1][m];
        assert_int_equal(tb_plan_routes(plan, target->rank, 0, routes), TB_OK);
        for (size_t i = 0; i < tb_routes_count(routes); i++) {
            const tb_route *route = tb_routes_at(routes, i);
            if (!is_target(route, target->rank) || route->ncontributors || route->source == TB_NO_RANK ||
                route->source == target->rank || hosts[route->source] == hosts[target->rank])
                continue;
            const part *source = part_of(0, &c->src, route->source);
            int64_t first = source->element[flat(&route->src, route->len, source->shape, c->shape.ndim, 0)];
            assert_false(has_source_on(c, first, hosts, hosts[target->rank]));
        }
    }
    tb_plan_destroy(plan);
}

static void check_case(const random_case *c, tb_routes *routes) {
    int64_t nelements = 1;
    tb_layout *src, *dst;
    tb_plan *plan;
    rng r = {c->seed ^ 0x5EED};
    for (int d = 0; d < c->shape.ndim; d++)
        nelements *= c->shape.dim[d];
    for (int32_t m = 0; m < c->src.nranks; m++)
        fill_part(&c->src, &c->shape, m, &parts[0][m]);
    for (int32_t m = 0; m < c->dst.nranks; m++)
        fill_part(&c->dst, &c->shape, m, &parts[1][m]);
    assert_int_equal(side_layout(&c->src, &src), TB_OK);
    assert_int_equal(side_layout(&c->dst, &dst), TB_OK);
    tb_status status = tb_plan_create(src, dst, &c->shape, c->dtype, NULL, &plan);
    if (has_hole(c, nelements)) {
        assert_int_equal(status, TB_INVALID);
    } else {
        assert_int_equal(status, TB_OK);
        assert_int_equal(tb_plan_check(plan), TB_OK);
        carry_out(c, plan, 0, routes);
        carry_out(c, plan, rng_next(&r) % 1000, routes);
        check_stats(c, plan, nelements);
        tb_plan_destroy(plan);
        tb_plan_opts opts = {.size = sizeof opts, .unbalanced = true};
        assert_int_equal(tb_plan_create(src, dst, &c->shape, c->dtype, &opts, &plan), TB_OK);
        assert_int_equal(tb_plan_check(plan), TB_OK);
        tb_plan_destroy(plan);
        check_hosts(c, src, dst, &r, routes);
    }
    tb_layout_destroy(src);
    tb_layout_destroy(dst);
}

static const random_case *current; /* printed if an assertion fails */

static int print_current(void **state) {
    (void)state;
    if (current) {
        random_case_print(current);
        printf("TB_SEED=%" PRIu64 " TB_CASES=1 repeats this case; last error: %s\n", current->seed, tb_error_detail());
    }
    return 0;
}

static void random_plans_equal_brute_force(void **state) {
    (void)state;
    static random_case c;
    uint64_t seed = test_seed();
    int64_t n = test_cases(20000);
    tb_routes *routes;
    assert_int_equal(tb_routes_create(&routes), TB_OK);
    for (int64_t i = 0; i < n; i++) {
        random_case_make(&c, seed + (uint64_t)i);
        current = &c;
        check_case(&c, routes);
    }
    current = NULL;
    tb_routes_destroy(routes);
    printf("%" PRId64 " random layout pairs\n", n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(random_plans_equal_brute_force, print_current),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
