/* What several hosts want goes from one to the next: all of it arrives, and who holds it up is named. */
#include "bus/bus_test.h"

#define ALONE "mesh=1 place=Replicate"
#define ALL   "mesh=2 place=Replicate"

static const char *const hosts[] = {"source", "first", "second"};

/* Both receivers are driven by their own calls. The one with the higher rank is handed everything by the other. */
static bool is_last(const rank *r) {
    const rank *other = &r->scene->ranks[r->index == 0 ? 2 : 1];
    return !is_a(r) && tb_world_rank(r->world) > tb_world_rank(other->world);
}

static void hand_on(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_opts soon = {.size = sizeof soon, .timeout_ms = 2000};
    char words[40];
    meet(r);
    const rank *last = is_last(&r->scene->ranks[1]) ? &r->scene->ranks[1] : &r->scene->ranks[2];
    snprintf(words, sizeof words, "(b %d) to receive", (int)last->index);
    set_up(r, &s, ALONE, ALL, 300, 200, NULL);
    for (uint32_t version = 1; version <= 3; version++)
        exchange(r, &s, "a", version);
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &soon, &t)); /* the last one stands still from here */
    if (r != last)
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, words);
    meet(r);
    if (r == last)
        check(tb_wait(t, TB_COMMITTED, -1) == TB_TIMEOUT);
    tb_transfer_destroy(t);
    meet(r);
    exchange(r, &s, "a", 5);
    tear_down(&s);
}

static void test_who_holds_it_up_is_named(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.hosts = hosts;
    s.is_manual = true;
    run_ranks_in(&s, hand_on, 1, 2, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_who_holds_it_up_is_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
