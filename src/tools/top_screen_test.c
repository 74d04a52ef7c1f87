/* The screen of `tensorbus top`: what goes from one agent to another is counted once, and peers are in order. */
#include "tools/agents.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* An agent that has sent and received so many bytes, and has three peers and a lost one. */
static json_t *report_of(const char *group, int64_t sent, int64_t received) {
    json_t *report = json_pack("{s:s, s:i, s:s, s:{s:b}, s:[], s:[], s:{s:{s:I}, s:{s:I}}}", "group", group, "index", 0,
                               "state", "running", "store", "connected", 1, "clients", "pairs", "totals", "send",
                               "bytes", (json_int_t)sent, "recv", "bytes", (json_int_t)received);
    static const int ranks[] = {10, 2, 7, 1, 3};
    json_t *peers = json_array();
    assert_non_null(report);
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        char label[32];
        snprintf(label, sizeof label, "rank %d (x)", ranks[i]);
        json_array_append_new(peers, json_pack("{s:i, s:s, s:s, s:I, s:I, s:b, s:s}", "rank", ranks[i], "label", label,
                                               "transport", "shm", "sent", (json_int_t)5, "received", (json_int_t)0,
                                               "alive", ranks[i] > 1 && ranks[i] != 3, "why", "it has left"));
    }
    json_object_set_new(report, "peers", peers);
    const json_int_t total = sent + received, done = total / 10;
    /* one that is under way has moved a tenth of its bytes */
    json_object_set_new(report, "batches",
                        json_pack("[{s:s, s:[{s:s, s:I, s:I}]}]", "id", "b", "transfers", "direction",
                                  sent ? "send" : "recv", "bytes_done", done, "bytes_total", total));
    return report;
}

static void counts_once(void **state) {
    (void)state;
    const int64_t gb = 1000000000;
    tool_agents agents = {0};
    tb__text out = {0};
    tool_agent_view views[] = {{.report = report_of("trainer", 4 * gb, 0), .before = report_of("trainer", 2 * gb, 0)},
                               {.report = report_of("engine", 0, 4 * gb), .before = report_of("engine", 0, 2 * gb)}};
    for (int i = 0; i < 2; i++) {
        views[i].when = 12;
        views[i].before_when = 10;
        assert_true(tb__vec_push(&agents.list, views[i]));
    }
    top_draw(&out, &agents);
    assert_false(out.failed);
    assert_non_null(
        strstr(out.data, "agents 2, clients 0, transfers under way 2, sent 1.10 GB/s, received 1.10 GB/s\n"));
    const char *at = out.data;
    static const char *const order[] = {"rank 2 (x)", "rank 7 (x)", "rank 10 (x)"}, *const lost[] = {"rank 1 (x)",
                                                                                                     "rank 3 (x)"};
    for (int agent = 0; agent < 2; agent++) {
        for (size_t i = 0; i < 3; i++)
            assert_non_null(at = strstr(at, order[i]));
    }
    for (size_t i = 0; i < 2; i++)
        assert_non_null(at = strstr(at, lost[i]));
    for (int i = 0; i < 2; i++) {
        json_decref(views[i].report);
        json_decref(views[i].before);
    }
    free(agents.list.item);
    tb__text_fini(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(counts_once)};
    return cmocka_run_group_tests_name("top_screen", tests, NULL, NULL);
}
