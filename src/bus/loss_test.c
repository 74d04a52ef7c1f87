/* A transport loses all peers of one rank at its n-th call, for every n, while tensors are staged: nobody crashes, all
 * transfers end, and what is reported as received is all there. */
#include "bus/bus_test.h"

#include "../tests/support/cut_transport.h"

enum { ROWS = 24, COLUMNS = 512, BUCKET = 8192 };

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

/* Anything may fail, but soon, and for want of a peer. */
static bool ended(tb_status status) {
    if (status != TB_OK && status != TB_LOST && status != TB_CANCELLED && status != TB_IN_DOUBT)
        fails(__FILE__, __LINE__, tb_status_string(status), tb_error_detail());
    return status == TB_OK;
}

static void move(rank *r, const plan *p, tb_batch *batch, part *w, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(w, version);
    else
        part_poison(w);
    if (adds_nothing(r, p->what))
        memset(w->data, 0, w->count * sizeof *w->data);
    if (!ended((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t)))
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
    int64_t begun_ms = tb__now_ms();
    if (r == &r->scene->ranks[p->victim])
        cut_arm(p->n);
    check_ok(tb_batch_create(r->world, "step", &p->what->opts, &batch));
    tb_tensor tensor = part_tensor(&w);
    check_ok(tb_batch_add(batch, pair, "w", &tensor));
    if (ended(tb_batch_register(batch, 0))) {
        for (uint32_t version = 1; version <= 2; version++)
            move(r, p, batch, &w, version);
    }
    check(tb__now_ms() < begun_ms + PATIENCE_MS); /* nor has one that ended well waited for its deadline */
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

/* ---- A rank that comes late ------------------------------------------------------------------------------------- */

/* Ends with a failure of which the sentence has `words`. */
static void be_told(rank *r, tb_batch *batch, const char *words) {
    tb_transfer *t = NULL;
    int64_t begun_ms = tb__now_ms();
    tb_status status = (is_a(r) ? tb_send : tb_recv)(batch, NULL, &t);
    if (status == TB_OK)
        status = tb_wait(t, TB_COMMITTED, -1);
    check_fails(status, TB_LOST, words);
    check(tb__now_ms() < begun_ms + PATIENCE_MS);
    tb_transfer_destroy(t);
}

typedef struct late {
    int victim, late; /* of all ranks */
    const char *victims_name;
} late;

/* The first of each side move a version, so that the transfer has a number. One of the two others is lost, with which
 * the last one would have moved the rest of it: that one begins only when it knows of the loss, and nothing comes to it
 * any more. */
static void come_late(rank *r) {
    const late *p = r->scene->shared;
    const char *layout = "mesh=2 place=Shard(0)";
    tb_pair *pair = NULL;
    tb_batch *batches[2] = {NULL, NULL};
    part w;
    part_init(&w, layout, r->index, ROWS, COLUMNS);
    tb_tensor tensor = part_tensor(&w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair));
    for (int i = 0; i < 2; i++) {
        check_ok(tb_batch_create(r->world, i == 0 ? "step" : "other", NULL, &batches[i]));
        check_ok(tb_batch_add(batches[i], pair, "w", &tensor));
        check_ok(tb_batch_register(batches[i], 0));
    }
    setup first = {.pair = pair, .batch = batches[0], .w = w};
    part_poison(&w);
    meet(r);
    if (r->index == 0)
        exchange(r, &first, "a", 1);
    meet(r);
    usleep(SOON_MS * 1000); /* until the number has come to all */
    meet(r);
    if (r == &r->scene->ranks[p->victim]) {
        cut_arm(1);
        tb_batch_destroy(batches[0]);
        batches[0] = NULL;
    }
    if (r == &r->scene->ranks[p->late]) {
        be_told(r, batches[1], p->victims_name);
        usleep(SOON_MS * 1000); /* until the others have said what they know */
        be_told(r, batches[0], p->victims_name);
        check(part_is_poison(&w));
    }
    meet(r);
    tb_batch_destroy(batches[0]);
    tb_batch_destroy(batches[1]);
    tb_pair_destroy(pair);
    part_fini(&w);
    meet(r);
}

static void test_late(void **state) {
    (void)state;
    static const late cases[] = {{.victim = 1, .late = 3, .victims_name = "(a 1)"},
                                 {.victim = 3, .late = 1, .victims_name = "(b 1)"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        scene s;
        scene_init(&s);
        s.transport = "cut";
        run_ranks_in(&s, come_late, 2, 2, &cases[i]);
    }
}

/* ---- A link that is cut ----------------------------------------------------------------------------------------- */

/* Two receivers lose each other while both wait for the second sender; then the first gives up. It tells the senders,
 * and can't tell the other receiver, which hears from the second sender that nothing will come. */
static void lose_a_link(rank *r) {
    static int32_t ranks[MAX_RANKS];
    setup s;
    tb_transfer *t = NULL;
    set_up(r, &s, "mesh=2 place=Shard(0)", "mesh=2 place=Replicate", ROWS, COLUMNS, NULL);
    ranks[r - r->scene->ranks] = tb_world_rank(r->world);
    bool is_late = is_a(r) && r->index == 1;
    if (!is_late)
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    usleep(SOON_MS * 1000); /* until they are in it */
    meet(r);
    if (r == &r->scene->ranks[2]) {
        cut_link(ranks[2], ranks[3]);
        usleep(SOON_MS * 1000);
        tb_cancel(t);
    }
    if (r == &r->scene->ranks[3])
        check(!ended(tb_wait(t, TB_COMMITTED, -1)));
    meet(r);
    tb_transfer_destroy(t);
    tear_down(&s);
    meet(r);
}

static void test_link(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.transport = "cut";
    run_ranks_in(&s, lose_a_link, 2, 2, NULL);
}

/* ---- Scenarios -------------------------------------------------------------------------------------------------- */

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

/* ---- A message that its transport does not give back ------------------------------------------------------------- */

enum { MATRIX = 1024, MOST_ROUNDS = 1000, HASTY_MS = 4000 };

/* The sender cancels transfers until one stops in the middle of a message. Only the tensor of that message stays in
 * use; tensors have a bucket each, and one bucket at a time is under way. */
static void hold_message(rank *r) {
    const char *names[2] = {"v", "w"};
    tb_batch_opts opts = {.size = sizeof opts, .bucket_size = MATRIX * MATRIX * 4, .max_in_flight = 1};
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    part parts[2];
    int nheld = 0;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=Replicate", NULL, &pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &batch));
    for (int i = 0; i < 2; i++) {
        part_init(&parts[i], "mesh=1 place=Replicate", 0, MATRIX, MATRIX);
        part_fill(&parts[i], 1);
        tb_tensor tensor = part_tensor(&parts[i]);
        check_ok(tb_batch_add(batch, pair, names[i], &tensor));
    }
    check_ok(tb_batch_register(batch, 0));
    if (is_a(r))
        cut_hold_cancelled();
    for (int round = 0; !cut_has_happened() || round == 0; round++) {
        tb_transfer *t = NULL;
        check(round < MOST_ROUNDS);
        meet(r);
        check_ok((is_a(r) ? tb_send : tb_recv)(batch, NULL, &t));
        if (is_a(r)) {
            usleep(500 + (unsigned)round * 331 % 8000);
            tb_cancel(t);
        }
        (void)tb_wait(t, TB_COMMITTED, -1);
        tb_transfer_destroy(t);
        meet(r);
    }
    for (int i = 0; is_a(r) && i < 2; i++) {
        char held[64];
        snprintf(held, sizeof held, "still in use by tensor '%s' of batch 'step'", names[i]);
        tb_status status = tb_world_invalidate(r->world, parts[i].data, 4);
        check(status == TB_OK || (status == TB_TIMEOUT && strstr(tb_error_detail(), held)));
        nheld += status != TB_OK;
    }
    check(nheld == is_a(r));
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&parts[0]);
    part_fini(&parts[1]);
}

static void test_message_not_given_back(void **state) {
    scene s;
    (void)state;
    scene_init(&s);
    s.transport = "cut";
    s.timeout_ms = HASTY_MS;
    run_ranks_in(&s, hold_message, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_link),
        cmocka_unit_test(test_buckets_for_several),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_buckets_that_are_handed_on),
        cmocka_unit_test(test_shadowed),
        cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_message_not_given_back),
    };
    cut_register();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
