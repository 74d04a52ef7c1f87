/* Many ranks: all find each other, with few messages; a rank that is missing, dead or disagrees is
 * named on every other rank. TB_RANKS sets their number: 48 by default, up to 1024. */
#include "../support/ranks.h"

#include "bus/world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* MOST_MESSAGES: they are about 35, and more on a machine so busy that ranks ask again. */
enum { DEFAULT_RANKS = 48, TENSORS = 20, MOST_MESSAGES = 45, SOON_MS = 3000 };
/* A rank that leads nothing is connected with its lead; when tensors have moved, also with the one that has its part,
 * and with the lead that numbers the transfers. */
enum { MOST_CONNECTIONS = 1, MOST_CONNECTIONS_MOVED = 3 };

static char folder[32], url[64];
static tb__store_server *server;
static atomic_int nbad;

static int nranks(void) {
    const char *given = getenv("TB_RANKS");
    int n = given ? atoi(given) : DEFAULT_RANKS;
    return n >= 4 && n <= 2 * RANKS_ROWS ? n / 2 * 2 : DEFAULT_RANKS;
}

/* The one that is missing, dead or disagrees: an engine that leads nothing. */
static bool is_odd(const fleet_rank *r) {
    return r->is_engine && r->index == r->fleet->nranks / 4;
}

static void claim(bool is_so, const fleet_rank *r, const char *what) {
    if (is_so)
        return;
    if (atomic_fetch_add(&nbad, 1) < 5)
        fprintf(stderr, "%s %d: %s: %s\n", r->is_engine ? "engine" : "trainer", r->index, what, tb_error_detail());
}

static bool names_odd(const fleet_rank *r) {
    char label[32];
    snprintf(label, sizeof label, "(engine %d)", r->fleet->nranks / 4);
    return strstr(tb_error_detail(), label) != NULL;
}

/* Element k of a rank's part of tensor i. */
static float value_of(const fleet_rank *r, int i, size_t k) {
    return (float)(i * 1000 + r->index) + (float)k / 64;
}

static void move_once(fleet_rank *r) {
    size_t count = (size_t)r->rows * RANKS_COLUMNS;
    for (int i = 0; i < TENSORS && !r->is_engine; i++) {
        for (size_t k = 0; k < count; k++)
            r->memory[(size_t)i * count + k] = value_of(r, i, k);
    }
    tb_transfer *t = NULL;
    claim((r->is_engine ? tb_recv : tb_send)(r->batch, NULL, &t) == TB_OK, r, "transfer");
    claim(tb_wait(t, TB_COMMITTED, 60000) == TB_OK, r, "wait");
    tb_transfer_destroy(t);
    bool is_right = true;
    for (int i = 0; i < TENSORS; i++) {
        for (size_t k = 0; k < count; k++)
            is_right &= r->memory[(size_t)i * count + k] == value_of(r, i, k);
    }
    claim(is_right, r, "values");
}

static int count_connections(const fleet_rank *r) {
    int count = 0;
    tb__loop_lock(r->world->loop);
    for (const tb__peer *peer = tb__loop_peers(r->world->loop); peer; peer = peer->next)
        count += peer->is_open && peer->rank != r->world->rank;
    tb__loop_unlock(r->world->loop);
    return count;
}

static void all_come(fleet_rank *r) {
    fleet_join(r);
    claim(fleet_pair(r, NULL) == TB_OK, r, "pair");
    fleet_add(r, RANKS_COLUMNS);
    claim(tb_batch_register(r->batch, 0) == TB_OK, r, "register");
    fleet_meet(r);
    claim(r->index == 0 || count_connections(r) <= MOST_CONNECTIONS, r, "connections of a rank that is ready");
    fleet_meet(r);
    move_once(r);
    fleet_meet(r);
    claim(r->index == 0 || count_connections(r) <= MOST_CONNECTIONS_MOVED, r, "connections after a transfer");
    fleet_meet(r);
    fleet_leave(r);
}

/* The leads join when all others have: nobody has one to rely on. They make the pair again, when all have one. */
static atomic_int njoined;

static void leads_come_last(fleet_rank *r) {
    while (r->index == 0 && atomic_load(&njoined) < r->fleet->nranks - 2)
        tb__sleep_ms(1);
    fleet_join(r);
    atomic_fetch_add(&njoined, 1);
    for (int i = 0; i < 2; i++) {
        claim(fleet_pair(r, NULL) == TB_OK, r, "pair");
        fleet_meet(r);
        if (i == 0) {
            tb_pair_destroy(r->pair);
            r->pair = NULL;
        }
    }
    fleet_add(r, RANKS_COLUMNS);
    claim(tb_batch_register(r->batch, 0) == TB_OK, r, "register");
    move_once(r);
    fleet_meet(r);
    fleet_leave(r);
}

/* It makes the pair, and does not register. */
static void one_is_missing(fleet_rank *r) {
    fleet_join(r);
    claim(fleet_pair(r, NULL) == TB_OK, r, "pair");
    fleet_meet(r);
    if (!is_odd(r)) {
        fleet_add(r, RANKS_COLUMNS);
        claim(tb_batch_register(r->batch, SOON_MS) == TB_TIMEOUT && names_odd(r), r, "register");
    }
    fleet_meet(r);
    fleet_leave(r);
}

/* It leaves the bus, and the others register afterwards: they hear of it at once. */
static void one_is_dead(fleet_rank *r) {
    fleet_join(r);
    claim(fleet_pair(r, NULL) == TB_OK, r, "pair");
    fleet_meet(r);
    if (is_odd(r)) {
        fleet_leave(r);
    } else {
        fleet_add(r, RANKS_COLUMNS);
        claim(tb_batch_register(r->batch, 0) == TB_LOST && names_odd(r), r, "register");
    }
    fleet_meet(r);
    fleet_leave(r);
}

static void one_disagrees(fleet_rank *r) {
    fleet_join(r);
    claim(fleet_pair(r, NULL) == TB_OK, r, "pair");
    fleet_add(r, is_odd(r) ? RANKS_COLUMNS - 1 : RANKS_COLUMNS);
    claim(tb_batch_register(r->batch, 0) == TB_CONFLICT && names_odd(r), r, "register");
    fleet_meet(r);
    fleet_leave(r);
}

static void one_has_another_layout(fleet_rank *r) {
    char other[64];
    snprintf(other, sizeof other, "mesh=%d place=R", r->fleet->nranks / 2);
    fleet_join(r);
    claim(fleet_pair(r, is_odd(r) ? other : NULL) == TB_CONFLICT, r, "pair");
    char label[32];
    snprintf(label, sizeof label, "engine %d has layout", r->fleet->nranks / 4);
    char also[32];
    snprintf(also, sizeof also, "engine %d '", r->fleet->nranks / 4);
    claim(strstr(tb_error_detail(), label) || strstr(tb_error_detail(), also), r, "the rank with another layout");
    fleet_meet(r);
    fleet_leave(r);
}

static void run(void (*body)(fleet_rank *r), fleet *f) {
    *f = (fleet){.url = url, .nranks = nranks(), .ntensors = TENSORS, .body = body};
    nbad = 0;
    run_fleet(f);
    assert_int_equal(nbad, 0);
}

static void test_all_come(void **state) {
    (void)state;
    fleet f;
    run(all_come, &f);
    double messages =
        (double)(f.meetings[1].store + f.meetings[1].messages - f.meetings[0].store - f.meetings[0].messages) /
        f.nranks;
    printf("%d ranks are ready after %.2f s, with %.1f messages each\n", f.nranks, f.meetings[1].at - f.meetings[0].at,
           messages);
    assert_true(messages <= MOST_MESSAGES);
}

static void test_leads_come_last(void **state) {
    (void)state;
    fleet f;
    njoined = 0;
    run(leads_come_last, &f);
}

static void test_one_is_missing(void **state) {
    (void)state;
    fleet f;
    run(one_is_missing, &f);
}

static void test_one_is_dead(void **state) {
    (void)state;
    fleet f;
    run(one_is_dead, &f);
}

static void test_one_disagrees(void **state) {
    (void)state;
    fleet f;
    run(one_disagrees, &f);
}

static void test_one_has_another_layout(void **state) {
    (void)state;
    fleet f;
    run(one_has_another_layout, &f);
}

static int serve(void **state) {
    (void)state;
    snprintf(folder, sizeof folder, "/tmp/tb-scale-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(url, sizeof url, "unix:%s/s", folder);
    assert_int_equal(tb__store_server_start(url, NULL, &server), TB_OK);
    return 0;
}

static int stop(void **state) {
    (void)state;
    tb__store_server_stop(server);
    return rmdir(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_all_come, serve, stop),
        cmocka_unit_test_setup_teardown(test_leads_come_last, serve, stop),
        cmocka_unit_test_setup_teardown(test_one_is_missing, serve, stop),
        cmocka_unit_test_setup_teardown(test_one_is_dead, serve, stop),
        cmocka_unit_test_setup_teardown(test_one_disagrees, serve, stop),
        cmocka_unit_test_setup_teardown(test_one_has_another_layout, serve, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
