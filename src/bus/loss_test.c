/* A transport loses all peers of one rank at its n-th call, for every n, while tensors are staged: nobody crashes, all
 * transfers end, and what is reported as received is all there. */
#include "bus/bus_test.h"

#include "../tests/support/cut_transport.h"

enum { ROWS = 24, COLUMNS = 512, BUCKET = 8192, DEADLINE_MS = PATIENCE_MS / 4 };

typedef struct scenario {
    const char *name;
    const char *layout_a, *layout_b;
    int na, nb;
    const char *const *hosts;
    tb_batch_opts opts;
    bool cancels; /* the receivers do, in the middle */
} scenario;

typedef struct plan {
    const scenario *what;
    int victim; /* of all ranks */
    uint64_t n;
} plan;

/* A rank that is one of several contributors to a sum. */
static bool adds_nothing(const rank *r, const scenario *what) {
    return r->index > 0 && is_a(r) && strstr(what->layout_a, "Partial");
}

/* Anything may fail, for want of a peer. A call that ends at its deadline is printed. */
static bool ended(tb_status status) {
    if (status == TB_TIMEOUT)
        print_message("%s %d: %s\n", me->group, (int)me->index, tb_error_detail());
    check(status == TB_OK || status == TB_LOST || status == TB_CANCELLED || status == TB_IN_DOUBT ||
          status == TB_TIMEOUT);
    return status == TB_OK;
}

static void move(rank *r, const plan *p, tb_batch *batch, part *w, uint32_t version) {
    tb_transfer *t = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = DEADLINE_MS};
    if (is_a(r))
        part_fill(w, version);
    else
        part_poison(w);
    if (adds_nothing(r, p->what))
        memset(w->data, 0, w->count * sizeof *w->data);
    if (!ended((is_a(r) ? tb_send : tb_recv)(batch, &opts, &t)))
        return;
    if (p->what->cancels && !is_a(r) && r->index == 0 && version == 2) {
        (void)tb_wait(t, TB_ARRIVED, 1);
        tb_cancel(t);
    }
    if (ended(tb_wait(t, TB_COMMITTED, -1)) && !is_a(r))
        check(part_holds(w, version));
    tb_transfer_destroy(t);
}

static void be_cut_off(rank *r) {
    const plan *p = r->scene->shared;
    const char *layout = is_a(r) ? p->what->layout_a : p->what->layout_b;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    part w;
    part_init(&w, layout, r->index, ROWS, COLUMNS);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    meet(r);
    if (r == &r->scene->ranks[p->victim])
        cut_arm(p->n);
    check_ok(tb_batch_create(r->world, "step", &p->what->opts, &batch));
    tb_tensor tensor = part_tensor(&w);
    check_ok(tb_batch_add(batch, pair, "w", &tensor));
    if (ended(tb_batch_register(batch, DEADLINE_MS))) {
        for (uint32_t version = 1; version <= 2; version++)
            move(r, p, batch, &w, version);
    }
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&w);
    meet(r);
}

static void cut_everywhere(const scenario *what) {
    for (int victim = 0; victim < what->na + what->nb; victim += what->na) {
        uint64_t n = 0;
        do {
            scene s;
            n++;
            plan p = {.what = what, .victim = victim, .n = n};
            scene_init(&s);
            s.transport = "cut";
            s.hosts = what->hosts;
            run_ranks_in(&s, be_cut_off, what->na, what->nb, &p);
        } while (cut_has_happened());
        print_message("%s: rank %d has %d calls\n", what->name, victim, (int)n - 1);
        assert_true(n > 20);
    }
}

#define SMALL .size = sizeof(tb_batch_opts), .bucket_size = BUCKET

static void test_buckets_for_several(void **state) {
    (void)state;
    cut_everywhere(&(scenario){.name = "buckets for several",
                               .layout_a = "mesh=2 place=Shard(0)",
                               .layout_b = "mesh=3 place=Replicate",
                               .na = 2,
                               .nb = 3,
                               .opts = {SMALL}});
}

static void test_sums(void **state) {
    (void)state;
    cut_everywhere(&(scenario){.name = "sums",
                               .layout_a = "mesh=3 place=Partial(sum)",
                               .layout_b = "mesh=2 place=Shard(1)",
                               .na = 3,
                               .nb = 2,
                               .opts = {SMALL}});
}

static void test_buckets_that_are_handed_on(void **state) {
    (void)state;
    static const char *const hosts[] = {"source", "first", "second", "third"};
    cut_everywhere(&(scenario){.name = "buckets that are handed on",
                               .layout_a = "mesh=1 place=Replicate",
                               .layout_b = "mesh=3 place=Replicate",
                               .na = 1,
                               .nb = 3,
                               .hosts = hosts,
                               .opts = {SMALL}});
}

static void test_shadowed(void **state) {
    (void)state;
    cut_everywhere(&(scenario){.name = "shadowed",
                               .layout_a = "mesh=2 place=Shard(0)",
                               .layout_b = "mesh=2 place=Shard(1)",
                               .na = 2,
                               .nb = 2,
                               .opts = {SMALL, .commit = TB_SHADOW, .checksum = true}});
}

static void test_cancelled(void **state) {
    (void)state;
    cut_everywhere(&(scenario){.name = "cancelled",
                               .layout_a = "mesh=2 place=Shard(0)",
                               .layout_b = "mesh=2 place=Replicate",
                               .na = 2,
                               .nb = 2,
                               .opts = {SMALL, .snapshot = true},
                               .cancels = true});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets_for_several),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_buckets_that_are_handed_on),
        cmocka_unit_test(test_shadowed),
        cmocka_unit_test(test_cancelled),
    };
    cut_register();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
