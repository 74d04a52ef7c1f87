/* The death of a rank that others are not connected with: a member hears of it from its lead, also if the lead has no
 * pair any more, and if another process has taken the seat. */
#include "bus/bus_test.h"

#include "bus/store/server.h"

enum { ROWS = 12, COLUMNS = 8 };

static const char *layout_of(const rank *r) {
    return is_a(r) ? "mesh=1 place=Replicate" : "mesh=3 place=Shard(0)";
}

static void make_pair(const rank *r, bool no_wait, tb_pair **pair) {
    tb_pair_opts opts = {.size = sizeof opts, .no_wait = no_wait};
    check_ok(tb_pair_create(r->world, "p", other_group(r), layout_of(r), &opts, pair));
}

static tb_status register_batch(const rank *r, tb_pair *pair, part *w, tb_batch **batch) {
    part_init(w, layout_of(r), r->index, ROWS, COLUMNS);
    tb_tensor tensor = part_tensor(w);
    check_ok(tb_batch_create(r->world, "step", NULL, batch));
    check_ok(tb_batch_add(*batch, pair, "w", &tensor));
    return tb_batch_register(*batch, 0);
}

static bool is_lead_of_b(const rank *r) {
    return !is_a(r) && r->index == 0;
}

static bool is_victim(const rank *r) {
    return !is_a(r) && r->index == 2;
}

/* The lead of the victim's side has destroyed the pair when the victim goes. */
static void lead_has_no_pair(rank *r) {
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    part w = {0};
    make_pair(r, false, &pair);
    meet(r);
    if (is_lead_of_b(r)) {
        tb_pair_destroy(pair);
        pair = NULL;
    }
    meet(r);
    if (is_victim(r)) {
        tb_pair_destroy(pair);
        tb_world_destroy(r->world);
        r->world = NULL;
        pair = NULL;
    }
    meet(r);
    if (pair)
        check_fails(register_batch(r, pair, &w, &batch), TB_LOST, "(b 2)");
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    if (w.data)
        part_fini(&w);
}

/* The lead has never met the victim, whose seat another process has taken when the lead makes the pair. One rank has
 * still the pair with the victim. */
static void another_has_the_seat(rank *r) {
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    part w = {0};
    bool is_stale = !is_a(r) && r->index == 1;
    make_pair(r, is_lead_of_b(r), &pair);
    meet(r);
    if (!is_stale) {
        tb_pair_destroy(pair);
        pair = NULL;
    }
    if (is_victim(r)) {
        tb_world_destroy(r->world);
        r->world = NULL;
        tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
        check_ok(tb_world_join(r->scene->url, r->group, r->index, r->size, &opts, &r->world));
    }
    meet(r);
    if (!is_stale)
        make_pair(r, false, &pair);
    tb_status status = register_batch(r, pair, &w, &batch);
    if (is_stale)
        check_fails(status, TB_LOST, "(b 2)");
    else
        check(status == TB_OK || status == TB_LOST); /* it has agreed before it hears of the other's failure, or not */
    meet(r);
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    part_fini(&w);
}

static void run_with_store(void (*body)(rank *r)) {
    scene s;
    char folder[] = "/tmp/tb-losses-XXXXXX";
    tb__store_server *server = NULL;
    scene_init(&s);
    check(mkdtemp(folder));
    snprintf(s.url, sizeof s.url, "unix:%s/s", folder); /* no rank serves it, because ranks leave */
    check_ok(tb__store_server_start(s.url, NULL, &server));
    run_ranks_in(&s, body, 1, 3, NULL);
    tb__store_server_stop(server);
    check(rmdir(folder) == 0);
}

static void test_lead_has_no_pair(void **state) {
    (void)state;
    run_with_store(lead_has_no_pair);
}

static void test_another_has_the_seat(void **state) {
    (void)state;
    run_with_store(another_has_the_seat);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lead_has_no_pair),
        cmocka_unit_test(test_another_has_the_seat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
