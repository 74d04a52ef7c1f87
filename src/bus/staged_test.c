/* Buckets that receivers read in the sender's staging memory. A sender that ends a transfer takes its buffers back at
 * once: who is reading one then must not take the bytes for the tensor's. */
#include "bus/bus_test.h"

#include "flow/flow.h"

#include <poll.h>
#include <stdatomic.h>

enum { SIDE = 64, MOST_BUFFERS = 64 };

/* The receiver is about to read; the sender has used its memory for something else. */
static atomic_bool is_armed, is_reading, is_reused;

static void await_flag(atomic_bool *flag) {
    for (int i = 0; i < 30000 && !atomic_load(flag); i++)
        poll(NULL, 0, 1);
    check(atomic_load(flag));
}

static void on_arrival(void *bytes, size_t nbytes) {
    (void)bytes;
    (void)nbytes;
    if (!atomic_exchange(&is_armed, false))
        return;
    atomic_store(&is_reading, true);
    await_flag(&is_reused);
}

/* Fills as much memory as the buffers had, wherever they were. */
static void reuse_memory(size_t nbytes) {
    void *memory[MOST_BUFFERS];
    for (size_t i = 0; i < MOST_BUFFERS; i++) {
        check_ok(tb_alloc(nbytes, &memory[i]));
        memset(memory[i], 0xDD, nbytes);
    }
    for (size_t i = 0; i < MOST_BUFFERS; i++)
        tb_free(memory[i]);
}

/* One that comes through. */
static void move_version(rank *r, setup *s, uint32_t version) {
    tb_transfer *t = NULL;
    if (is_a(r))
        part_fill(&s->w, version);
    check_ok((is_a(r) ? tb_send : tb_recv)(s->batch, NULL, &t));
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    check(part_holds(&s->w, version));
    tb_transfer_destroy(t);
}

static void take_back(rank *r) {
    const tb_commit *commit = r->scene->shared;
    tb_batch_opts opts = {.size = sizeof opts, .staged = true, .commit = *commit};
    tb_transfer *t = NULL;
    setup s;
    set_up(r, &s, "mesh=1 place=R", "mesh=1 place=R", SIDE, SIDE, &opts);
    move_version(r, &s, 1);
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 2);
        atomic_store(&is_reading, false);
        atomic_store(&is_reused, false);
        atomic_store(&is_armed, true);
    }
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(s.batch, NULL, &t));
    if (is_a(r)) {
        await_flag(&is_reading);
        tb_transfer_destroy(t);
        reuse_memory((size_t)SIDE * SIDE * 4);
        atomic_store(&is_reused, true);
    } else {
        check_fails(tb_wait(t, TB_COMMITTED, -1), TB_CANCELLED, "");
        check(*commit != TB_SHADOW || part_holds(&s.w, 1));
        tb_transfer_destroy(t);
    }
    meet(r);
    move_version(r, &s, 3);
    tear_down(&s);
}

static void test_a_buffer_is_taken_back(void **state) {
    (void)state;
    const tb_commit commits[] = {TB_IN_PLACE, TB_SHADOW};
    tb__flow_on_arrival = on_arrival;
    for (size_t i = 0; i < sizeof commits / sizeof *commits; i++)
        run_ranks(take_back, 1, 1, &commits[i]);
    tb__flow_on_arrival = NULL;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_a_buffer_is_taken_back)};
    return cmocka_run_group_tests_name("staged", tests, NULL, NULL);
}
