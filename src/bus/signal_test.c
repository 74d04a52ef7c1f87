/* Questions about the transfer_signal: every rank of a group has the same answer to the same question. */
#include "bus/bus_test.h"

#include "bus/engine.h"
#include "bus/world.h"

enum { SIDE = 3, QUESTIONS = 60, VERSIONS = 4, ROWS = 6, COLUMNS = 5 };

#define LAYOUT "mesh=3 place=S0"

/* What the ranks have heard, by group, seat and question. */
typedef struct answers {
    bool heard[2][SIDE][QUESTIONS + 1];
} answers;

static bool ask(const setup *s, uint64_t question) {
    bool answer = false;
    check_ok(tb_batch_signal(s->batch, NULL, question, 0, &answer));
    return answer;
}

static void record(rank *r, const setup *s, uint64_t question) {
    answers *all = (answers *)(uintptr_t)r->scene->shared;
    all->heard[is_a(r)][r->index][question] = ask(s, question);
}

/* Each rank asks all questions in an order of its own, while versions are sent. */
static void random_questions(rank *r) {
    setup s;
    uint64_t state = (uint64_t)r->index * 2 + is_a(r) + 1, order[QUESTIONS] = {0};
    set_up(r, &s, LAYOUT, LAYOUT, ROWS, COLUMNS, NULL);
    for (uint64_t i = 0; i < QUESTIONS; i++) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        uint64_t j = (state >> 33) % (i + 1);
        order[i] = order[j];
        order[j] = i + 1;
    }
    for (int i = 0; i < QUESTIONS; i++) {
        if (i % (QUESTIONS / VERSIONS) == 0)
            exchange(r, &s, "a", 1 + (uint32_t)i / (QUESTIONS / VERSIONS));
        record(r, &s, order[i]);
    }
    meet(r);
    const answers *all = r->scene->shared;
    for (int i = 1; i <= QUESTIONS; i++) {
        check(ask(&s, (uint64_t)i) == all->heard[is_a(r)][r->index][i]); /* once more */
        check(all->heard[is_a(r)][0][i] == all->heard[is_a(r)][r->index][i]);
    }
    meet(r);
    tear_down(&s);
}

static void test_same_answer_to_the_same_question(void **state) {
    (void)state;
    answers all = {0};
    run_ranks(random_questions, SIDE, SIDE, &all);
}

/* Nothing is offered, then a version is, then it has been received: three answers, whoever asks, and when. */
static void known_answers(rank *r) {
    setup s;
    tb_transfer *t = NULL;
    bool is_late = r->index == SIDE - 1, answer = false;
    set_up(r, &s, LAYOUT, LAYOUT, ROWS, COLUMNS, NULL);
    meet(r);
    if (!is_late)
        check(!ask(&s, 1));
    meet(r);
    if (is_a(r)) {
        part_fill(&s.w, 1);
        check_ok(tb_send(s.batch, NULL, &t));
    } else if (r->index == 0) { /* the lead has heard of it */
        tb_batch_state now = {.size = sizeof now};
        int64_t until_ms = tb__now_ms() + PATIENCE_MS;
        do
            check_ok(tb_batch_query(s.batch, &now));
        while (!now.transfer_signal && tb__now_ms() < until_ms);
        check(now.transfer_signal);
    }
    meet(r);
    if (!is_a(r) && is_late)
        check(ask(&s, 5)); /* 2 to 4 were passed over */
    meet(r);
    if (!is_a(r)) {
        check(ask(&s, 3));
        check_ok(tb_recv(s.batch, NULL, &t));
    }
    check_ok(tb_wait(t, TB_COMMITTED, -1));
    tb_transfer_destroy(t);
    meet(r);
    check(part_holds(&s.w, 1));
    if (!is_a(r)) {
        check(ask(&s, 4) && ask(&s, 5) && !ask(&s, 1)); /* as before, also for who has not asked yet */
        check(!ask(&s, 6));
    }
    check_fails(tb_batch_signal(s.batch, NULL, 0, 0, &answer), TB_INVALID, "questions are numbered from 1");
    check_fails(tb_batch_signal(s.batch, "c", 7, 0, &answer), TB_INVALID,
                "batch 'step' has no registered pair of group 'c'");
    meet(r);
    tear_down(&s);
}

static void test_known_answers(void **state) {
    (void)state;
    run_ranks(known_answers, SIDE, SIDE, NULL);
}

/* The lead forgets the oldest answers when there are too many changes. */
static void forgotten(rank *r) {
    setup s;
    bool answer;
    set_up(r, &s, "mesh=2 place=S0", "mesh=1 place=R", ROWS, COLUMNS, NULL);
    check(!ask(&s, 10));
    meet(r);
    if (is_a(r) && r->index == 0) { /* as after thousands of changes */
        tb__loop_lock(r->world->loop);
        for (size_t i = 0; i < s.batch->engines.count; i++)
            s.batch->engines.item[i]->signal.runs.item[0].first = 10;
        tb__loop_unlock(r->world->loop);
    }
    meet(r);
    if (is_a(r))
        check_fails(tb_batch_signal(s.batch, NULL, 9, 0, &answer), TB_REFUSED,
                    "question 9 about batch 'step' is too old");
    check(!ask(&s, 10));
    meet(r);
    tear_down(&s);
}

static void test_old_questions_are_refused(void **state) {
    (void)state;
    run_ranks(forgotten, 2, 1, NULL);
}

/* A lead whose batch is gone does not answer; one that is gone is named. */
static void no_lead(rank *r) {
    setup s;
    bool answer;
    set_up(r, &s, "mesh=2 place=S0", "mesh=1 place=R", ROWS, COLUMNS, NULL);
    check_fails(tb_batch_signal(s.batch, "b", is_a(r) ? 1 : 0, 0, &answer), TB_INVALID, "");
    meet(r);
    if (is_a(r) && r->index == 0) {
        tear_down(&s);
        tb_world_destroy(r->world);
        r->world = NULL;
    }
    meet(r);
    if (is_a(r) && r->index == 1)
        check_fails(tb_batch_signal(s.batch, NULL, 2, PATIENCE_MS, &answer), TB_LOST, "(a 0)");
    meet(r);
    if (!(is_a(r) && r->index == 0))
        tear_down(&s);
}

static void test_a_lead_that_is_gone_is_named(void **state) {
    (void)state;
    run_ranks(no_lead, 2, 1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_answer_to_the_same_question),
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_old_questions_are_refused),
        cmocka_unit_test(test_a_lead_that_is_gone_is_named),
    };
    return cmocka_run_group_tests_name("signal", tests, NULL, NULL);
}
