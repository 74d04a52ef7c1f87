/* A device that never finishes a copy: calls end at their deadlines, by name, and the memory that the device may still
 * use is not given back. */
#define TB_SLOW_DEVICE
#include "bus/bus_test.h"

#define WHOLE "mesh=1 place=Replicate"

enum { DEADLINE_MS = 500 };

typedef enum way { WAIT, CANCEL, DESTROY } way;

typedef struct plan {
    way how;
    bool is_send; /* the sender's tensor is on the device, whose first copy is held; else the receiver's */
} plan;

static void set_up_one_device(rank *r, setup *s, bool is_on_device) {
    part_init(&s->w, WHOLE, r->index, 16, 16);
    size_t nbytes = s->w.count * sizeof *s->w.data;
    tensor_free(s->w.data);
    s->w.data = NULL;
    if (is_on_device)
        s->w.data = slow_device_alloc(nbytes);
    else
        check_ok(tb_alloc(nbytes, (void **)&s->w.data));
    part_poison(&s->w);
    check_ok(tb_pair_create(r->world, "p", other_group(r), WHOLE, NULL, &s->pair));
    check_ok(tb_batch_create(r->world, "step", NULL, &s->batch));
    tb_tensor w = part_tensor(&s->w);
    check_ok(tb_batch_add(s->batch, s->pair, "w", &w));
    check_ok(tb_batch_register(s->batch, 0));
}

static void hold_copy(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    const plan *p = r->scene->shared;
    bool is_held = is_a(r) == p->is_send;
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = DEADLINE_MS};
    set_up_one_device(r, &s, is_held);
    if (is_held)
        slow_device_hold_run(0);
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
    tb_batch_destroy(s.batch);
    s.batch = NULL;
    check(tb__now_ms() - began_ms < PATIENCE_MS);
    meet(r);
    if (is_held)
        slow_device_let_go();
    meet(r);
    tear_down(&s);
}

static void test_a_copy_that_never_ends(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++)
        run_ranks(hold_copy, 1, 1, &(plan){.how = (way)(i / 2), .is_send = i % 2});
}

/* A run that fails names the rank and the batch, on both sides. */
static void fail_copy(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    set_up(r, &s, WHOLE, WHOLE, 16, 16, NULL);
    if (!is_a(r))
        slow_device_fail_run(0, TB_IO, "the device has failed");
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    check_fails(tb_wait(t, TB_COMMITTED, -1), TB_IO, "the device has failed");
    tb_transfer_destroy(t);
    meet(r);
    slow_device_mend();
    tear_down(&s);
}

static void test_a_copy_that_fails(void **state) {
    (void)state;
    run_ranks(fail_copy, 1, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_that_fails),
        cmocka_unit_test(test_a_copy_that_never_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
