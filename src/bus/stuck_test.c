/* Devices that fail: both ends say whose device it was, and at once. Devices that never finish a copy: calls end at
 * their deadlines, by name, and the memory that the device may still use is not given back. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

#define WHOLE "mesh=1 place=Replicate"

/* A rank that waits for another one's report takes a second. */
enum { DEADLINE_MS = 500, PROMPT_MS = 900 };

typedef enum way { WAIT, CANCEL, DESTROY } way;

typedef struct plan {
    way how;
    bool is_send;   /* the sender's tensor is on the device, whose first copy is held; else the receiver's */
    bool is_shadow; /* the receiver's first copy is into the shadow, and the one from there is held */
} plan;

static void part_make(const rank *r, part *p, int64_t side, bool is_on_device) {
    part_init(p, WHOLE, r->index, side, side);
    size_t nbytes = p->count * sizeof *p->data;
    tensor_free(p->data);
    p->data = NULL;
    if (is_on_device)
        p->data = slow_device_alloc(nbytes);
    else
        check_ok(tb_alloc(nbytes, (void **)&p->data));
    part_poison(p);
}

static void open_one_device(rank *r, setup *s, bool is_on_device, tb_commit commit) {
    tb_batch_opts opts = {.size = sizeof opts, .commit = commit};
    part_make(r, &s->w, 16, is_on_device);
    check_ok(tb_pair_create(r->world, "p", other_group(r), WHOLE, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", &opts, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w));
}

static bool is_torn(const setup *s) {
    uint64_t version;
    bool torn;
    check_ok(tb_batch_version(s->batch, s->pair, &version, &torn));
    return torn;
}

static void hold_copy(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    const plan *p = r->scene->shared;
    bool is_held = is_a(r) == p->is_send;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = DEADLINE_MS};
    open_one_device(r, &s, is_held, p->is_shadow ? TB_SHADOW : TB_IN_PLACE);
    check_ok(tb_batch_register(s.batch, 0));
    if (is_held)
        slow_device_hold_run(p->is_shadow);
    meet(r);
    int64_t began_ms = tb__now_ms();
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
    if (!is_held) {
        check(tb_wait(t, TB_COMMITTED, -1) != TB_OK);
    } else if (p->how == WAIT) {
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_TIMEOUT, "has not finished a copy of batch 'step'");
    } else {
        usleep(DEADLINE_MS / 2 * 1000);
        if (p->how == CANCEL)
            tb_cancel(t);
    }
    tb_transfer_destroy(t);
    check(is_torn(&s) == (is_held && !is_a(r)));
    tb_batch_destroy(s.batch);
    s.batch = NULL;
    check(tb__now_ms() - began_ms < PATIENCE_MS / 2);
    meet(r);
    if (is_held) { /* the device may still use the memory, so it can't be taken from it */
        size_t nbytes = s.w.count * sizeof *s.w.data;
        check_fails(tb_world_invalidate(r->world, s.w.data, nbytes), TB_TIMEOUT,
                    "in use by a copy of batch 'step' that a device has not finished");
        slow_device_let_go();
        check_ok(tb_world_invalidate(r->world, s.w.data, nbytes));
    }
    meet(r);
    tear_down(&s);
}

static void run_impatient(const plan *p) {
    scene s;
    scene_init(&s);
    s.timeout_ms = 2 * DEADLINE_MS;
    run_ranks_in(&s, hold_copy, 1, 1, (void *)(uintptr_t)p);
}

static void test_a_copy_that_never_ends(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++)
        run_impatient(&(plan){.how = (way)(i / 2), .is_send = i % 2});
}

/* The version is committed, but its copy into the tensors never ends. */
static void test_a_shadow_that_is_never_applied(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++)
        run_impatient(&(plan){.how = (way)i, .is_shadow = true});
}

/* The batch can't be used any more, and says so at once, also while the device finishes the copy after all. */
static void use_after_hold(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = DEADLINE_MS};
    open_one_device(r, &s, !is_a(r), TB_IN_PLACE);
    check_ok(tb_batch_register(s.batch, 0));
    if (!is_a(r))
        slow_device_hold_run(0);
    meet(r);
    for (int round = 0; round < 3; round++) {
        int64_t began_ms = tb__now_ms();
        check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, &opts, &t));
        if (round == 1 && !is_a(r))
            slow_device_let_go();
        tb_status status = tb_wait(t, TB_COMMITTED, -1);
        check(status == TB_TIMEOUT);
        check(round == 0 || strstr(tb_error_detail(), "has not finished a copy of batch 'step'"));
        check(!is_a(r) || !strstr(tb_error_detail(), "torn")); /* the receiver's own affair */
        tb_transfer_destroy(t);
        check(round == 0 || tb__now_ms() - began_ms < PROMPT_MS);
        meet(r);
    }
    tear_down(&s);
}

static void test_use_after_a_copy_that_never_ended(void **state) {
    (void)state;
    run_ranks(use_after_hold, 1, 1, NULL);
}

/* ---- Copies that fail ------------------------------------------------------------------------------------------- */

typedef struct failure {
    bool is_send; /* the sender's device fails, else the receiver's */
    tb_status status;
    bool has_two; /* tensors */
    const char *sentence;
} failure;

enum { ROUNDS = 4 };

static int64_t fail_once(rank *r, const setup *s, const failure *f) {
    tb_transfer *t = NULL;
    bool is_failing = is_a(r) == f->is_send;
    if (is_failing)
        slow_device_fail_run(0, f->status, "the device has failed");
    if (!is_a(r)) /* a receiver that comes after the sender has failed would wait for the next transfer */
        check_ok(tb_recv(s->batch, NULL, &t));
    meet(r);
    int64_t began_ms = tb__now_ms();
    if (is_a(r))
        check_ok(tb_send(s->batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), f->status, f->sentence);
    int64_t took_ms = tb__now_ms() - began_ms;
    tb_transfer_destroy(t);
    meet(r);
    if (is_failing)
        slow_device_mend();
    return took_ms;
}

/* Both ends name the rank whose device has failed, the tensors and the batch. Then the batch works again. */
static void fail_copies(rank *r) {
    const failure *f = r->scene->shared;
    setup s;
    part v;
    int64_t least_ms = INT64_MAX; /* other processes may keep a rank waiting */
    open_one_device(r, &s, is_a(r) == f->is_send, TB_IN_PLACE);
    part_make(r, &v, 4, is_a(r) == f->is_send);
    tb_tensor second = part_tensor(&v);
    if (f->has_two)
        check_ok(tb_batch_add(s.batch, s.pair, "v", &second));
    check_ok(tb_batch_register(s.batch, 0));
    for (int i = 0; i < ROUNDS; i++) {
        int64_t took_ms = fail_once(r, &s, f);
        least_ms = took_ms < least_ms ? took_ms : least_ms;
    }
    check(least_ms < PROMPT_MS);
    exchange(r, &s, "a", 7);
    tear_down(&s);
    part_fini(&v);
}

static void test_a_copy_that_fails(void **state) {
    (void)state;
    static const tb_status statuses[] = {TB_IO, TB_LOST, TB_INVALID};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        run_ranks(fail_copies, 1, 1,
                  &(failure){true, statuses[i], false,
                             "(a 0): the slow:0 device could not copy tensor 'w' of batch 'step': the device has "
                             "failed"});
        run_ranks(fail_copies, 1, 1,
                  &(failure){true, statuses[i], true,
                             "(a 0): the slow:0 device could not copy a staged bucket of tensors 'v' ... 'w' of batch "
                             "'step': the device has failed"});
        run_ranks(fail_copies, 1, 1,
                  &(failure){false, statuses[i], false,
                             "(b 0): the slow:0 device could not copy tensor 'w' of batch 'step': the device has "
                             "failed"});
    }
}

/* A shadow that is copied in part leaves the tensors torn. */
static void fail_to_apply(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    open_one_device(r, &s, !is_a(r), TB_SHADOW);
    check_ok(tb_batch_register(s.batch, 0));
    if (!is_a(r))
        slow_device_fail_run(1, TB_IO, "the device has failed");
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IO, "the device has failed");
    tb_transfer_destroy(t);
    check(is_torn(&s) == !is_a(r));
    meet(r);
    if (is_a(r))
        part_fill(&s.w, 7);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s.w, 7) && !is_torn(&s));
    tb_transfer_destroy(t);
    tear_down(&s);
}

static void test_a_shadow_that_can_not_be_applied(void **state) {
    (void)state;
    run_ranks(fail_to_apply, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_that_fails),
        cmocka_unit_test(test_a_copy_that_never_ends),
        cmocka_unit_test(test_a_shadow_that_is_never_applied),
        cmocka_unit_test(test_use_after_a_copy_that_never_ended),
        cmocka_unit_test(test_a_shadow_that_can_not_be_applied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
