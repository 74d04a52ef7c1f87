/* Reports that other threads of the agent's process ask for, while it runs and while it does not. */
#include "bus/agent/agent_inside.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PATIENCE_MS = 30000, SOON_MS = 50, ASKERS = 4, QUESTIONS = 50 };

typedef struct scene {
    char folder[32], url[64], socket[64];
    tb__agent *agent;
    pthread_t thread;
} scene;

static int begin(void **state) {
    static scene s;
    snprintf(s.folder, sizeof s.folder, "/tmp/tb-report-XXXXXX");
    if (!mkdtemp(s.folder))
        return -1;
    snprintf(s.url, sizeof s.url, "unix:%s/store", s.folder);
    snprintf(s.socket, sizeof s.socket, "%s/agent.sock", s.folder);
    tb__agent_opts opts = {.socket = s.socket, .store = s.url, .group = "g", .size = 1, .timeout_ms = PATIENCE_MS};
    *state = &s;
    return tb__agent_create(&opts, &s.agent) == TB_OK ? 0 : -1;
}

static int end(void **state) {
    scene *s = *state;
    tb__agent_destroy(s->agent);
    return rmdir(s->folder); /* nothing is left in it */
}

static void *run_agent(void *arg) {
    tb__agent_run(arg);
    return NULL;
}

static void start(scene *s) {
    assert_int_equal(pthread_create(&s->thread, NULL, run_agent, s->agent), 0);
}

static void stop(scene *s) {
    void *failed;
    tb__agent_stop(s->agent);
    assert_int_equal(pthread_join(s->thread, &failed), 0);
    assert_null(failed);
}

static void test_there_is_none_while_the_loop_is_stuck(void **state) {
    scene *s = *state;
    char *report = NULL;
    start(s);
    tb__agent_lock(s->agent);
    assert_int_equal(tb__agent_report(s->agent, SOON_MS, &report), TB_TIMEOUT);
    assert_string_equal(tb_error_detail(), "the agent's loop has not answered in 50 ms");
    assert_null(report);
    tb__agent_unlock(s->agent);
    assert_int_equal(tb__agent_report(s->agent, PATIENCE_MS, &report), TB_OK);
    free(report);
    stop(s);
}

/* Returns NULL where each report is newer than the one before it. */
static void *ask_often(void *arg) {
    double last = -1;
    for (int i = 0; i < QUESTIONS; i++) {
        char *text;
        if (tb__agent_report(arg, PATIENCE_MS, &text) != TB_OK)
            return arg;
        json_t *report = json_loads(text, 0, NULL);
        double uptime = json_number_value(json_object_get(report, "uptime"));
        const char *group = json_string_value(json_object_get(report, "group"));
        bool is_good = group && strcmp(group, "g") == 0 && uptime >= last;
        last = uptime;
        json_decref(report);
        free(text);
        if (!is_good)
            return arg;
    }
    return NULL;
}

static void test_many_may_ask_at_once(void **state) {
    scene *s = *state;
    pthread_t askers[ASKERS];
    start(s);
    for (int i = 0; i < ASKERS; i++)
        assert_int_equal(pthread_create(&askers[i], NULL, ask_often, s->agent), 0);
    for (int i = 0; i < ASKERS; i++) {
        void *failed;
        assert_int_equal(pthread_join(askers[i], &failed), 0);
        assert_null(failed);
    }
    stop(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_there_is_none_while_the_loop_is_stuck, begin, end),
        cmocka_unit_test_setup_teardown(test_many_may_ask_at_once, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
