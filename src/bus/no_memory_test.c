/* A rank is short of memory for a moment, while it makes progress. Whatever is lost by that, nobody waits in vain: the
 * transfer succeeds, or fails on all ranks at once, with a sentence that says what was missing. */
#include "base/mem.h"
#include "bus/bus_test.h"

#include <stdatomic.h>

enum { MOST_TURNS = 4, MOST_ALLOCATIONS = 30 };

typedef struct shortage {
    int who;  /* which rank */
    int turn; /* in which of its turns */
    long after;
    bool staged;
    tb_commit commit;
    _Atomic int nfailed, nended;
} shortage;

static void run_short(rank *r) {
    shortage *s = (shortage *)r->scene->shared;
    tb_batch_opts opts = {.size = sizeof opts, .staged = s->staged, .commit = s->commit};
    tb_transfer_opts patient = {.size = sizeof patient, .timeout_ms = 5000};
    tb_transfer *t = NULL;
    setup w;
    bool is_short = r == &r->scene->ranks[s->who];
    set_up(r, &w, "mesh=1 place=R", "mesh=1 place=R", 8, 8, &opts);
    if (is_a(r))
        part_fill(&w.w, 1);
    meet(r);
    check_ok((is_a(r) ? tb_send : tb_recv)(w.batch, &patient, &t));
    for (int turn = 0; is_short && turn <= s->turn; turn++) {
        if (turn == s->turn)
            tb__mem_fail_after(s->after);
        tb_world_progress(r->world);
        tb__mem_fail_after(-1);
        usleep(500);
    }
    tb_status status = tb_wait(t, TB_COMMITTED, -1);
    /* A transport that has no memory for what a peer sends loses it: the other end hears of that only. */
    if (status != TB_OK && status != TB_LOST && !(status == TB_NO_MEMORY && strstr(tb_error_detail(), "memory")))
        fails(__FILE__, __LINE__, "a transfer of a rank that is short of memory", tb_error_detail());
    if (status == TB_NO_MEMORY)
        atomic_fetch_add(&s->nfailed, 1);
    check(status != TB_OK || part_holds(&w.w, 1));
    atomic_fetch_add(&s->nended, 1);
    int64_t deadline_ms = tb__now_ms() + 8000;
    while (atomic_load(&s->nended) < r->scene->nranks &&
           tb__now_ms() < deadline_ms) { /* others may have to hear of it */
        tb_world_progress(r->world);
        usleep(500);
    }
    tb_transfer_destroy(t);
    meet(r);
    tear_down(&w);
}

static void run_all(int who, bool staged, tb_commit commit) {
    int nfailed = 0;
    for (int turn = 0; turn < MOST_TURNS; turn++) {
        for (long after = 0; after < MOST_ALLOCATIONS; after += 1 + after / 8) {
            scene s;
            shortage how = {.who = who, .turn = turn, .after = after, .staged = staged, .commit = commit};
            scene_init(&s);
            s.is_manual = true;
            run_ranks_in(&s, run_short, 1, 1, &how);
            nfailed += how.nfailed;
        }
    }
    check(nfailed > 0); /* else this has tested nothing */
}

static void test_a_sender_is_short(void **state) {
    (void)state;
    run_all(0, false, TB_IN_PLACE);
    run_all(0, true, TB_IN_PLACE);
}

static void test_a_receiver_is_short(void **state) {
    (void)state;
    run_all(1, false, TB_IN_PLACE);
    run_all(1, true, TB_IN_PLACE);
    run_all(1, false, TB_SHADOW);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_sender_is_short),
        cmocka_unit_test(test_a_receiver_is_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
