/* Diagnostics of a flow (report.c): why it is broken, why a leg fails, which members it waits for, which tensors a
 * failed copy had, and the dump. Only report.c writes struct flow_report.
 *
 * All of this needs the loop's lock. */
#ifndef TB_FLOW_REPORT_H
#define TB_FLOW_REPORT_H

#include "flow/flow.h"

typedef struct member member;

enum { REASON_MS = 1000 }; /* how long to wait for another rank's report of the cause */

struct flow_report {
    tb__fault broken;  /* set: no transfer can run any more */
    tb__fault loss;    /* set: a member has reported that another one is lost, so no transfer begins any more */
    tb__fault failure; /* it breaks with this, ... */
    tb__task task;     /* ... in a step of this task, which also informs the members */
};

/* Whether the leg can't succeed without the member. */
bool tb__flow_needs(const tb__flow *flow, bool is_send, const member *m);
/* A reason for the leg to fail; TB_OK: none. *tells: other members do not know it yet. */
tb__fault tb__flow_find_reason(tb__flow *flow, bool is_send, bool *tells);
/* The reason as other ranks get it. */
enum { TB__REASON_MAX = TB__WHY_MAX + 256 };
const char *tb__flow_reason_for_others(const tb__flow *flow, tb_status status, const char *why,
                                       char reason[TB__REASON_MAX]);
/* Breaks the flow in the driver's next step, for failures in code that a leg must not end in. */
void tb__flow_fail_later(tb__flow *flow, tb_status status, const char *why);
/* Likewise, for a message to the member that could not be sent. */
void tb__flow_miss_message(tb__flow *flow, member *to, tb_status status, const char *why);
/* False: the flow was broken before, and keeps its first reason. */
bool tb__flow_record_broken(tb__flow *flow, tb_status status, const char *why);
void tb__flow_record_loss(tb__flow *flow, const char *why);
void tb__flow_fini_report(tb__flow *flow);

#endif
