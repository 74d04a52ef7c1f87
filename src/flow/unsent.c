/* Messages that could not be sent, and other failures in the middle of something that must not end a leg on the spot.
 * They break the flow from a task of its own, in the driver's next turn. Whoever has missed a message is told that the
 * flow is broken, again and again until that message gets through: what was missing was memory, of which there may be
 * some later. */
#include "flow/flow_inside.h"

#include <stdio.h>

enum { AGAIN_MS = 20 };

static bool tell_uninformed(tb__flow *flow) {
    char words[TB__WORDS_MAX];
    bool did = false;
    tb__flow_own_words(flow, flow->broken, flow->why, words);
    for (size_t i = 0; i < flow->nmembers; i++) {
        member *m = &flow->members[i];
        if (!m->missed_message)
            continue;
        m->missed_message = false; /* it may be set again */
        if (i != flow->self)
            tb__flow_tell_abort(flow, i, 0, 0, flow->broken, words);
        did |= !m->missed_message;
    }
    return did;
}

static bool step(tb__task *task) {
    tb__flow *flow = (tb__flow *)((char *)task - offsetof(tb__flow, failing));
    if (tb__now_ms() < task->deadline_ms)
        return false;
    bool did = true;
    if (flow->broken == TB_OK)
        tb__flow_break(flow, tb__fail(flow->failure, "%s", flow->failure_why));
    else
        did = tell_uninformed(flow);
    task->deadline_ms = INT64_MAX;
    for (size_t i = 0; i < flow->nmembers; i++) {
        if (flow->members[i].missed_message)
            task->deadline_ms = tb__now_ms() + AGAIN_MS;
    }
    return did;
}

void tb__flow_fail_later(tb__flow *flow, tb_status status) {
    if (flow->failure == TB_OK) {
        flow->failure = status;
        snprintf(flow->failure_why, sizeof flow->failure_why, "%s", tb_error_detail());
    }
    if (!flow->failing.step) {
        flow->failing.step = step;
        tb__loop_add_task(flow->o.loop, &flow->failing);
    }
    flow->failing.deadline_ms = tb__now_ms();
    tb__loop_wake(flow->o.loop);
}
