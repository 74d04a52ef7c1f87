/* Ranks that are idle while others give up one send after the other: however many there were, the next one arrives. */
#include "bus/bus_test.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { MANY = 500 };
#else
enum { MANY = 5000 };
#endif

#define ROWS    "mesh=2 place=Shard(0)"
#define COLUMNS "mesh=2 place=Shard(1)"

typedef enum way { BY_CANCEL, BY_TIMEOUT } way;

/* What the ranks of a test do. */
typedef struct plan {
    int count; /* of sends that are given up */
    way way;
    tb_batch_opts opts;
} plan;

static uint32_t version_of(int i) {
    return (uint32_t)i % 200 + 1;
}

/* Sends what nobody receives. */
static void give_up_one(setup *s, way how, int i) {
    tb_transfer *t = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = how == BY_TIMEOUT ? 1 : 0};
    part_fill(&s->w, version_of(i));
    check_ok(tb_send(s->batch, &opts, &t));
    if (how == BY_CANCEL)
        tb_cancel(t);
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    check(status == (how == BY_CANCEL ? TB_CANCELLED : TB_TIMEOUT));
    tb_transfer_destroy(t);
}

/* A version that everybody gets, under the number that it has. Sends that were given up before are nothing to it. */
static void get_through(rank *r, setup *s, uint32_t version, uint64_t number) {
    tb_transfer *t = NULL;
    tb_transfer_state state = {.size = sizeof state};
    if (is_a(r))
        part_fill(&s->w, version);
    else
        part_poison(&s->w);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_query(t, &state);
    check(part_holds(&s->w, version));
    check(state.version == number && state.attempt == number);
    tb_transfer_destroy(t);
}

/* ---- One and one ----------------------------------------------------------------------------------------------- */

static void idle_receiver(rank *r) {
    const plan *p = r->scene->shared;
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", 40, 40, &p->opts);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; is_a(r) && i < p->count; i++)
            give_up_one(&s, p->way, i);
        meet(r);
        get_through(r, &s, 201, (uint64_t)(round + 1) * (uint64_t)(p->count + 1));
        meet(r);
    }
    tear_down(&s);
}

static void run_plan_in(scene *s, void (*body)(rank *r), int n, plan p) {
    p.opts.size = sizeof p.opts;
    run_ranks_in(s, body, n, n, &p);
}

static void run_plan(void (*body)(rank *r), int n, plan p) {
    scene s;
    scene_init(&s);
    run_plan_in(&s, body, n, p);
}

static void test_cancelled(void **state) {
    (void)state;
    const int counts[] = {64, 65, 200, MANY};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        run_plan(idle_receiver, 1, (plan){.count = counts[i]});
}

static void test_timed_out(void **state) {
    (void)state;
    run_plan(idle_receiver, 1, (plan){.count = 65, .way = BY_TIMEOUT});
    run_plan(idle_receiver, 1, (plan){.count = 200, .way = BY_TIMEOUT});
}

static void test_staged(void **state) {
    (void)state;
    run_plan(idle_receiver, 1, (plan){.count = 65, .opts = {.staged = true}});
    run_plan(idle_receiver, 1, (plan){.count = 65, .way = BY_TIMEOUT, .opts = {.staged = true, .bucket_size = 512}});
    run_plan(idle_receiver, 1, (plan){.count = MANY, .opts = {.staged = true}});
}

static void test_shadowed(void **state) {
    (void)state;
    run_plan(idle_receiver, 1, (plan){.count = 65, .opts = {.commit = TB_SHADOW}});
    run_plan(idle_receiver, 1, (plan){.count = 200, .way = BY_TIMEOUT, .opts = {.commit = TB_SHADOW}});
    run_plan(idle_receiver, 1, (plan){.count = MANY, .opts = {.commit = TB_SHADOW}});
}

/* Messages take longer between hosts. */
static void test_between_hosts(void **state) {
    (void)state;
    static const char *const hosts[] = {"north", "south"};
    for (int i = 0; i < 4; i++) {
        scene s;
        scene_init(&s);
        s.hosts = hosts;
        run_plan_in(&s, idle_receiver, 1,
                    (plan){.count = 20,
                           .way = i & 1 ? BY_TIMEOUT : BY_CANCEL,
                           .opts = {.commit = i & 2 ? TB_SHADOW : TB_IN_PLACE}});
    }
}

/* An idle manual world does not even take messages in. A sender does not wait for it for long. */
static void test_manual(void **state) {
    (void)state;
    scene s;
    scene_init(&s);
    s.is_manual = true;
    run_plan_in(&s, idle_receiver, 1, (plan){.count = 2});
}

/* ---- Two and two ------------------------------------------------------------------------------------------------ */

/* Fails by the send with its own number, which was given up. */
static void come_late(setup *s) {
    tb_transfer *t = NULL;
    part_fill(&s->w, 230);
    check_ok(tb_send(s->batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "cancelled");
    tb_transfer_destroy(t);
}

/* The first sender gives up; all others are idle. The second one comes too late to each of its own sends: none of them
 * may become part of the next version, however far it is behind. */
static void late_sender(rank *r) {
    const plan *p = r->scene->shared;
    setup s;
    set_up(r, &s, ROWS, COLUMNS, 40, 40, &p->opts);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; is_a(r) && r->index == 0 && i < p->count; i++)
            give_up_one(&s, p->way, i);
        meet(r);
        for (int i = 0; is_a(r) && r->index == 1 && i < p->count; i++)
            come_late(&s);
        meet(r);
        get_through(r, &s, 202, (uint64_t)(round + 1) * (uint64_t)(p->count + 1));
        meet(r);
    }
    tear_down(&s);
}

static void test_late_sender(void **state) {
    (void)state;
    run_plan(late_sender, 2, (plan){.count = 3});
    run_plan(late_sender, 2, (plan){.count = 65});
    run_plan(late_sender, 2, (plan){.count = MANY});
    run_plan(late_sender, 2, (plan){.count = 200, .opts = {.staged = true}});
    run_plan(late_sender, 2, (plan){.count = 200, .opts = {.commit = TB_SHADOW}});
}

/* Both senders and one receiver take part in every send that is given up; the other receiver is idle. The first one may
 * have got all of its part. */
static void one_idle(rank *r) {
    const plan *p = r->scene->shared;
    bool is_idle = !is_a(r) && r->index == 1;
    setup s;
    set_up(r, &s, ROWS, COLUMNS, 40, 40, &p->opts);
    for (int i = 0; i < p->count; i++) {
        tb_transfer *t = NULL;
        if (is_a(r))
            part_fill(&s.w, version_of(i));
        if (!is_idle)
            check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
        meet(r);
        if (is_a(r) && r->index == i % 2)
            tb_cancel(t);
        tb_status status = is_idle ? TB_OK : tb_wait(t, TB_COMMITTED, -1);
        check(status == (is_a(r) ? TB_CANCELLED : status) && (status == TB_OK || status == TB_CANCELLED));
        check(is_a(r) || is_idle || status != TB_OK || part_holds(&s.w, version_of(i)));
        tb_transfer_destroy(t);
        meet(r);
    }
    get_through(r, &s, 203, (uint64_t)p->count + 1);
    get_through(r, &s, 204, (uint64_t)p->count + 2);
    tear_down(&s);
}

static void test_one_idle(void **state) {
    (void)state;
    run_plan(one_idle, 2, (plan){.count = 70});
    run_plan(one_idle, 2, (plan){.count = 200, .opts = {.staged = true}});
    run_plan(one_idle, 2, (plan){.count = 200, .opts = {.commit = TB_SHADOW}});
}

/* All senders begin, one of them cancels at once, and when the calls of all have returned, all ranks begin the next
 * version together. Again and again: what is told meanwhile must not get into it. */
static void at_once(rank *r) {
    const plan *p = r->scene->shared;
    setup s;
    set_up(r, &s, ROWS, COLUMNS, 8, 8, &p->opts);
    for (int i = 0; i < p->count; i++) {
        tb_transfer *t = NULL;
        tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = p->way == BY_TIMEOUT ? 1 : 0};
        bool cancels = p->way == BY_CANCEL && r->index == i / 2 % 2;
        if (is_a(r)) {
            check_ok(tb_send(s.batch, &opts, &t));
            if (cancels)
                tb_cancel(t);
            check_fails(tb_wait(t, TB_COMMITTED, -1), p->way == BY_CANCEL ? TB_CANCELLED : TB_TIMEOUT, "batch 'step'");
            tb_transfer_destroy(t);
        }
        meet(r);
        get_through(r, &s, version_of(i), 2 * (uint64_t)i + 2);
        meet(r);
    }
    tear_down(&s);
}

static void test_one_canceller(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++)
        run_plan(at_once, 2,
                 (plan){.count = 40,
                        .way = i & 1 ? BY_TIMEOUT : BY_CANCEL,
                        .opts = {.commit = i & 2 ? TB_SHADOW : TB_IN_PLACE, .staged = i & 4}});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancelled),     cmocka_unit_test(test_timed_out),   cmocka_unit_test(test_staged),
        cmocka_unit_test(test_shadowed),      cmocka_unit_test(test_late_sender), cmocka_unit_test(test_one_idle),
        cmocka_unit_test(test_between_hosts), cmocka_unit_test(test_manual),      cmocka_unit_test(test_one_canceller),
    };
    return cmocka_run_group_tests_name("idle", tests, NULL, NULL);
}
