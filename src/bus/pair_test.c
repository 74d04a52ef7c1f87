/* Pairs: two groups find each other, or everybody learns why not. */
#include "bus/bus_test.h"

#include "bus/store/server.h"
#include "bus/world.h"

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

enum { ROUNDS = 10 };

/* All ranks see a layout differ, whoever comes first; when it does not any more, all is well. */
static void different_layouts(rank *r) {
    tb_pair *pair = NULL;
    for (int round = 0; round < ROUNDS; round++) {
        const char *layout = is_a(r) && r->index == 1 ? "mesh=2 place=Replicate" : ROWS;
        meet(r);
        tb_status status = tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair);
        check_fails(status, TB_CONFLICT, "pair 'p': a 0 has layout 'mesh=2 place=Shard(0)', but a 1 'mesh=2 place=Rep");
        check(!pair);
        meet(r);
        check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=2  place=S0", NULL, &pair)); /* other words */
        meet(r);
        tb_pair_destroy(pair);
        pair = NULL;
    }
}

static void test_ranks_with_different_layouts_are_named(void **state) {
    (void)state;
    run_ranks(different_layouts, 2, 2, NULL);
}

static void different_groups(rank *r) {
    tb_pair *pair = NULL;
    for (int round = 0; round < ROUNDS; round++) {
        const char *remote = is_a(r) && r->index == 1 ? "c" : other_group(r);
        meet(r);
        check_fails(tb_pair_create(r->world, "p", remote, ROWS, NULL, &pair), TB_CONFLICT, "pair 'p'");
        const char *why = tb_error_detail();
        check(strstr(why, "a 1 expects group 'c', not 'b'") || strstr(why, "a 0 expects group 'b', not 'c'") ||
              strstr(why, "pair 'p' of groups 'a' and 'c' is also used by group 'b'"));
        meet(r);
    }
}

static void test_ranks_that_expect_different_groups_are_named(void **state) {
    (void)state;
    run_ranks(different_groups, 2, 2, NULL);
}

/* ---- Who is missing -------------------------------------------------------------------------------------------- */

static void nobody_comes(rank *r) {
    tb_pair *pair = NULL;
    tb_pair_opts opts = {.size = sizeof opts, .timeout_ms = SOON_MS};
    check_ok(tb_world_wait(r->world, "b", 0));
    check_ok(tb_world_wait(r->world, "a", 0));
    meet(r);
    if (is_a(r))
        check_fails(tb_pair_create(r->world, "lonely", "c", ROWS, &opts, &pair), TB_TIMEOUT,
                    "pair 'lonely': nobody has joined group 'c'");
    meet(r);
    tb_pair_opts at_once = {.size = sizeof at_once, .no_wait = true};
    bool is_first = r->index == 0;
    if (!is_a(r)) /* one side comes, and then one of the other */
        check_ok(tb_pair_create(r->world, "half", "a", ROWS, &at_once, &pair));
    meet(r);
    if (is_a(r) && is_first) {
        check_fails(tb_pair_create(r->world, "half", "b", ROWS, &opts, &pair), TB_TIMEOUT, "a 1 is missing");
        check(strstr(tb_error_detail(), "pair 'half': only 1 of 2 ranks of group 'a' have come"));
    }
    meet(r);
    tb_pair_destroy(pair);
    pair = NULL;
    if (r->index == 0) /* a group that is not complete */
        check_ok(tb_world_enter(r->world, is_a(r) ? "c" : "d", is_a(r) ? 2 : 0, is_a(r) ? 4 : 1));
    meet(r);
    if (!is_a(r) && r->index == 0)
        check_fails(tb_pair_create(r->world, "torso", "c", "mesh=2 place=R", &opts, &pair), TB_TIMEOUT,
                    "group 'c' is not complete: nobody has taken seat 0, 1, 3");
    check(!pair);
    meet(r);
}

static void test_timeouts_name_the_missing(void **state) {
    (void)state;
    run_ranks(nobody_comes, 2, 2, NULL);
}

/* ---- no_wait, several names ------------------------------------------------------------------------------------ */

static void unwaited(rank *r) {
    tb_pair_opts opts = {.size = sizeof opts, .no_wait = true, .timeout_ms = 1};
    setup s;
    if (!is_a(r))
        meet(r); /* nobody is there when a comes */
    check_ok(tb_pair_create(r->world, "p", other_group(r), ROWS, &opts, &s.pair));
    part_init(&s.w, ROWS, r->index, 10, 10);
    tb_tensor w = part_tensor(&s.w);
    check_ok(tb_batch_create(r->world, "step", NULL, &s.batch));
    check_ok(tb_batch_add(s.batch, s.pair, "w", &w));
    if (is_a(r)) {
        check_ok(tb_world_wait(r->world, "b", 0)); /* which is there, but not in the pair */
        check_fails(tb_batch_register(s.batch, 20), TB_TIMEOUT, "b 0 is missing");
        meet(r);
    }
    exchange(r, &s, "a", 1);
    tear_down(&s);
}

static void test_no_wait_is_made_up_for_by_the_batch(void **state) {
    (void)state;
    run_ranks(unwaited, 2, 2, NULL);
}

static void names(rank *r) {
    tb_pair *first, *second, *third = NULL;
    check_ok(tb_pair_create(r->world, "p", other_group(r), ROWS, NULL, &first));
    check_ok(tb_pair_create(r->world, "q", other_group(r), COLUMNS, NULL, &second)); /* any number between two groups */
    check_fails(tb_pair_create(r->world, "p", other_group(r), COLUMNS, NULL, &third), TB_CONFLICT,
                "this process has made pair 'p'");
    check(!third);
    tb_pair_destroy(first);
    meet(r);
    check_ok(tb_pair_create(r->world, "p", other_group(r), COLUMNS, NULL, &first)); /* free again */
    meet(r);
    tb_pair_destroy(first);
    tb_pair_destroy(second);
    tb_pair_destroy(NULL);
}

static void test_a_name_is_used_once(void **state) {
    (void)state;
    run_ranks(names, 2, 2, NULL);
}

/* Lets others see this process as one of another version. */
static void announce_as(const rank *r, const char *version) {
    tb__pack contact = {0};
    check_ok(tb__loop_contact(r->world->loop, &contact));
    size_t length = strlen(version);
    check(length == strlen(tb_version_string()));
    unsigned char *at = memmem(contact.data, contact.count, tb_version_string(), length);
    for (size_t i = 0; at && i < length; i++)
        at[i] = (unsigned char)version[i];
    check(at);
    check_ok(tb__directory_announce(r->world->directory, contact.data, contact.count, PATIENCE_MS));
    tb__pack_fini(&contact);
}

/* Those that differ in the last number only meet. */
static void another_version(rank *r) {
    const char *version = r->scene->shared;
    tb_pair *pair = NULL;
    meet(r); /* both have joined */
    if (!is_a(r))
        announce_as(r, version);
    meet(r);
    tb_status status = tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair);
    bool is_close = *version == *tb_version_string();
    if (is_close)
        check_ok(status);
    else
        check_fails(status, TB_REFUSED, "(b 0) has tensorbus 9.9.9, we have ");
    meet(r);
    if (is_a(r)) { /* who comes now is told when it joins */
        tb_world *late = NULL;
        status = tb_world_join(r->scene->url, "late", 0, 1, NULL, &late);
        if (is_close)
            check_ok(status);
        else
            check_fails(status, TB_REFUSED, "(b 0) has tensorbus 9.9.9, we have ");
        tb_world_destroy(late);
    }
    meet(r);
    tb_pair_destroy(pair);
}

static void get_close_version(char *out, size_t room) {
    snprintf(out, room, "%s", tb_version_string());
    out[strlen(out) - 1] ^= 1; /* from one digit to another */
}

static void test_versions_that_differ_are_named(void **state) {
    (void)state;
    char last[32];
    get_close_version(last, sizeof last);
    run_ranks(another_version, 1, 1, last);
    run_ranks(another_version, 1, 1, "9.9.9");
}

/* A process that is found under the number of one that was met before is not taken for that one. */
static void another_process(rank *r) {
    tb_pair *pair = NULL;
    check_ok(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair));
    meet(r);
    tb_pair_destroy(pair);
    pair = NULL;
    if (!is_a(r))
        announce_as(r, r->scene->shared);
    meet(r);
    check_fails(tb_pair_create(r->world, "p", other_group(r), "mesh=1 place=R", NULL, &pair), TB_CONFLICT,
                "(b 0) has the number of another process, rank ");
    meet(r);
}

static void test_numbers_that_are_given_twice(void **state) {
    (void)state;
    char last[32];
    get_close_version(last, sizeof last);
    run_ranks(another_process, 1, 1, last);
}

/* a 1 was the one that differed, is mended, and started anew: what was said of it does not hold any more. */
static void started_anew(rank *r) {
    tb_pair *pair = NULL;
    tb_pair_opts soon = {.size = sizeof soon, .timeout_ms = SOON_MS};
    const char *layout = is_a(r) && r->index == 1 ? "mesh=2 place=R" : ROWS;
    check_fails(tb_pair_create(r->world, "p", other_group(r), layout, NULL, &pair), TB_CONFLICT, "but a 1");
    meet(r);
    if (is_a(r) && r->index == 1) {
        tb_world_opts opts = {.size = sizeof opts, .timeout_ms = PATIENCE_MS};
        tb_world_destroy(r->world);
        r->world = NULL;
        check_ok(tb_world_join(r->scene->url, r->group, r->index, r->size, &opts, &r->world));
        check_fails(tb_pair_create(r->world, "p", "b", ROWS, &soon, &pair), TB_TIMEOUT, "b 0 is missing");
    }
    meet(r);
    check_ok(tb_pair_create(r->world, "p", other_group(r), ROWS, NULL, &pair));
    meet(r);
    tb_pair_destroy(pair);
}

static void test_verdicts_end_with_those_they_are_about(void **state) {
    (void)state;
    scene s, elsewhere; /* nobody of the ranks serves the store */
    tb__store_server *server;
    scene_init(&s);
    scene_init(&elsewhere);
    check_ok(tb__store_server_start(elsewhere.url, NULL, &server));
    snprintf(s.url, sizeof s.url, "%s", elsewhere.url);
    run_ranks_in(&s, started_anew, 2, 2, NULL);
    tb__store_server_stop(server);
    scene_fini(&elsewhere);
}

static void mistakes(rank *r) {
    tb_pair *pair = NULL;
    tb_pair_opts opts = {.size = sizeof opts, .group = "elsewhere"};
    char name[300];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    check_fails(tb_pair_create(r->world, "", "b", ROWS, NULL, &pair), TB_INVALID, "a pair needs a name");
    check_fails(tb_pair_create(r->world, NULL, "b", ROWS, NULL, &pair), TB_INVALID, "a pair needs a name");
    check_fails(tb_pair_create(r->world, name, "b", ROWS, NULL, &pair), TB_INVALID, "at most 200 bytes");
    check_fails(tb_pair_create(r->world, "p\n", "b", ROWS, NULL, &pair), TB_INVALID, "control character");
    check_fails(tb_pair_create(r->world, "p", NULL, ROWS, NULL, &pair), TB_INVALID, "a group needs a name");
    check_fails(tb_pair_create(r->world, "p", "a", ROWS, NULL, &pair), TB_INVALID, "'a' can't be both of them");
    check_fails(tb_pair_create(r->world, "p", "b", "mesh=2 place=X", NULL, &pair), TB_INVALID, "X");
    check_fails(tb_pair_create(r->world, "p", "b", "mesh=3 place=S0", NULL, &pair), TB_INVALID,
                "the layout names rank 2 of group 'a', which has 2");
    check_fails(tb_pair_create(r->world, "p", "b", ROWS, &opts, &pair), TB_INVALID, "not in group 'elsewhere'");
    check(!pair);
    meet(r);
}

static void test_mistakes(void **state) {
    (void)state;
    run_ranks(mistakes, 2, 0, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_with_different_layouts_are_named),
        cmocka_unit_test(test_ranks_that_expect_different_groups_are_named),
        cmocka_unit_test(test_timeouts_name_the_missing),
        cmocka_unit_test(test_no_wait_is_made_up_for_by_the_batch),
        cmocka_unit_test(test_a_name_is_used_once),
        cmocka_unit_test(test_versions_that_differ_are_named),
        cmocka_unit_test(test_numbers_that_are_given_twice),
        cmocka_unit_test(test_verdicts_end_with_those_they_are_about),
        cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
