/* A transport loses all peers of one rank at its n-th call, for every n, during runs of a copy service: nobody crashes,
 * all runs end, and what is reported as copied is all there. */
#include "bus/bus_test.h"

#include "../tests/support/cut_transport.h"

enum { NRANKS = 3, N = 30000 };

typedef struct plan {
    int victim;
    uint64_t n;
} plan;

static uint32_t value(int from, int to, int round, int i) {
    return (uint32_t)(((from * NRANKS + to) * 2 + round) * N + i);
}

static uint64_t id_of(int from, int to) {
    return (uint64_t)from * NRANKS + (uint64_t)to;
}

/* Anything may fail, but soon, and for want of a peer. */
static bool ended(tb_status status) {
    check(status == TB_OK || status == TB_LOST);
    return status == TB_OK;
}

/* Everybody to everybody, itself too. */
static void run(const rank *r, tb_copy *copy, uint32_t *out, uint32_t *in, int round) {
    for (int other = 0; other < NRANKS; other++) {
        tb_copy_view from = {.size = sizeof from, .data = out + other * N, .dtype = TB_U32, .ndim = 1, .shape = {N}},
                     to = from;
        to.data = in + other * N;
        for (int i = 0; i < N; i++) {
            ((uint32_t *)tensor_bytes(out))[other * N + i] = value(r->index, other, round, i);
            ((uint32_t *)tensor_bytes(in))[other * N + i] = POISON;
        }
        check_ok(tb_copy_submit_send(copy, &from, 1, other, id_of(r->index, other)));
        check_ok(tb_copy_submit_recv(copy, &to, 1, other, id_of(other, r->index)));
    }
    bool is_done = ended(tb_copy_run(copy, 0));
    for (int k = 0; is_done && k < NRANKS * N; k++)
        check(((uint32_t *)tensor_bytes(in))[k] == value(k / N, r->index, round, k % N));
}

static void be_cut_off(rank *r) {
    const plan *p = r->scene->shared;
    tb_copy_opts opts = {.size = sizeof opts, .bucket_size = 32 << 10};
    tb_copy *copy = NULL;
    uint32_t *out, *in;
    check((out = tensor_alloc(sizeof *out * NRANKS * N)));
    check((in = tensor_alloc(sizeof *in * NRANKS * N)));
    check_ok(tb_copy_open(r->world, "c", NULL, &opts, &copy));
    meet(r);
    if (r->index == p->victim)
        cut_arm(p->n);
    for (int round = 0; round < 2; round++)
        run(r, copy, out, in, round);
    tb_copy_close(copy);
    tensor_free(out);
    tensor_free(in);
    meet(r);
}

static void test_cut_at_every_call(void **state) {
    (void)state;
    for (int victim = 0; victim < NRANKS; victim += NRANKS - 1) {
        uint64_t n = 0;
        do {
            scene s;
            n++;
            plan p = {.victim = victim, .n = n};
            scene_init(&s);
            s.transport = "cut";
            run_ranks_in(&s, be_cut_off, NRANKS, 0, &p);
        } while (cut_has_happened());
        print_message("rank %d has %d calls\n", victim, (int)n - 1);
        assert_true(n > 20);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cut_at_every_call)};
    cut_register();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
